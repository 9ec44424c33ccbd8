"""What the web UI shows of the current run, summed up no more often than once a second, however many look.

Promise: the cost does not grow with the length of the run. Columns of a picture that will not change any more are kept
as text; those that may are made anew.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.lock import RLock

from vllm_locust import overview, picture, progress
from vllm_locust.exporter import Snapshot
from vllm_locust.figures import Summary
from vllm_locust.recording import Recording
from vllm_locust.summary import Meta, so_far, stages_of, window_of
from vllm_locust.workers import Watch

_FRESH_S = 1.0

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """A run, and what there is to say of it at a moment."""

    recording: Recording
    meta: Meta
    summary: Summary
    """Of a run that is over, all of it; else without what is costly."""
    running: bool
    last_window: list[list[str]]
    """Rows as of `vllm_locust.overview` of the last window that is closed; none before."""
    closed: int
    """Windows that will not change any more."""
    frame: Values
    """What a picture has beside its columns."""

    def is_of(self, now: Snapshot) -> bool:
        """Tell whether it is of the same run, which goes on, or is over and summed up, as it was then."""
        summed_up = now.summary is None or now.summary is self.summary
        return self.recording is now.recording and self.running == now.running and summed_up


@dataclass(slots=True)
class _Column:
    """A column that will not change any more, unless a worker tells of one of its windows after all."""

    states: int
    text: str


class Live:
    """The current run, or the last one, for whoever looks."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read `snapshot` when somebody looks."""
        self._snapshot = snapshot
        self._watch = Watch()
        self._told: Told | None = None
        self._told_s = 0.0
        self._kept: list[_Column] = []
        self._kept_of: tuple[Recording | None, bool, int] = (None, False, 1)
        """A recording, whether it goes on, and how many windows a column covers."""
        self._version = 0
        """Of the columns that are kept: another one when any of them has changed."""
        self._lock = RLock()

    def told(self) -> Told | None:
        """Return what there is to say now, a second old at most; absent before the first run."""
        now = self._snapshot()
        stale = time.monotonic() - self._told_s > _FRESH_S
        if now.recording is None or now.meta is None:
            self._told = None
        elif stale or self._told is None or not self._told.is_of(now):
            self._told, self._told_s = self._tell(now, now.recording, now.meta), time.monotonic()
        return self._told

    def _tell(self, now: Snapshot, recording: Recording, meta: Meta) -> Told:
        summary = now.summary
        if summary is None:
            summary = so_far(recording, meta, self._watch.seen(recording)) | {"stages": stages_of(recording, meta)}
        moment: Values = {
            "state": "running" if now.running else "stopped",
            "now_s": now.age_s,
            "warming_up": now.warming_up,
            "users": now.users,
            "workers": now.workers,
        }
        if now.running:
            moment["in_flight"] = progress.in_flight(recording, now.live_workers)
            moment["silence_s"] = progress.silence_s(recording, now.live_workers)
        elif now.summary is not None:
            moment["verdict"] = picture.verdict_lines(summary, meta)
        closed = recording.closed_windows(now.live_workers) if now.running else recording.window_count
        window = overview.rows(window_of(recording, closed - 1, meta)) if closed else []
        frame = {**picture.frame(recording, meta, summary), "tables": picture.tables(meta, summary, window), **moment}
        return Told(recording, meta, summary, now.running, window, closed, frame)

    def picture(self, version: str = "", first: int = 0) -> str:
        """Return the text of a picture; for who has a version of it, without the columns before the `first`."""
        told = self.told()
        if told is None:
            return json.dumps({"run": "", "state": "none", "columns": [], "from": 0, "next": 0})
        texts, lasting, every = self._columns_of(told)
        now = f"{told.recording.run}.{self._version}"
        first = max(0, min(first, lasting)) if version == now else 0
        frame = told.frame | {"version": now, "every": every, "from": first, "next": lasting}
        return f'{json.dumps(frame, allow_nan=False)[:-1]}, "columns": [{", ".join(texts[first:])}]}}'

    def columns(self) -> Iterator[Values]:
        """Yield the columns of the whole picture; none before the first run."""
        told = self.told()
        if told is not None:
            texts, _, _ = self._columns_of(told)
            yield from map(json.loads, texts)

    def _columns_of(self, told: Told) -> tuple[list[str], int, int]:
        """Return all columns as text, how many of them will not change any more, and how many windows each covers."""
        every = picture.windows_per_column(told.recording.window_count)
        lasting = told.closed // every if told.running else -(-told.closed // every)
        with self._lock:
            self._drop_changed((told.recording, told.running, every), lasting)
            columns = picture.columns(
                *(told.recording, told.meta.generator_limits),
                every=every,
                first=len(self._kept),
                closed=told.closed,
            )
            later: list[str] = []
            for column in columns:
                text = json.dumps(column, allow_nan=False)
                if column["index"] < lasting:
                    self._kept.append(_Column(_states(told.recording, every, column["index"]), text))
                else:
                    later.append(text)
                gevent.sleep(0)  # streams must be read while a long run is drawn
            return [*(column.text for column in self._kept), *later], lasting, every

    def _drop_changed(self, of: tuple[Recording, bool, int], lasting: int) -> None:
        """Drop what is kept from the first column on that has changed: a worker that was cut off has told the rest."""
        recording, _, every = of
        same = of == self._kept_of
        unchanged = next(
            (i for i, column in enumerate(self._kept) if column.states != _states(recording, every, i)), len(self._kept)
        )
        unchanged = min(unchanged, lasting) if same else 0
        if unchanged < len(self._kept) or not same:
            self._version += 1
        del self._kept[unchanged:]
        self._kept_of = of


def _states(recording: Recording, every: int, column: int) -> int:
    return sum(recording.states[index] for index in range(column * every, (column + 1) * every))
