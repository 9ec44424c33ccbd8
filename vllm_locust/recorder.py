"""A worker's side of the recording: timelines in, reports out.

Between a stream and the recording stands no per-token work. On every tick, and when a report is due, what is new in all
timelines is taken in bulk (numpy: differences, logarithms, counts), filed under the window in which it happened, and
dropped, so memory per stream stays flat however long an answer is.

A window is sealed once nothing older can turn up any more: a sweep of the hub began after its end, and no connection
holds older bytes unparsed, no request older gaps back. What still does goes to the oldest open window, counted `late`.
A reset starts a new recorder; timelines that began under the old one end there, where nobody looks any more.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_locust import tally
from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.harvest import Harvest, count_reads
from vllm_locust.recording import Failure, Gauges, Report, WindowState, to_wire
from vllm_locust.timeline import Timeline

_SLICE = 50
"""How many timelines are harvested without a pause: half a millisecond."""
_NO_GAPS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Window:
    cells: Cells = field(default_factory=dict)
    gauges: Gauges = field(default_factory=Gauges)
    changed: bool = True
    reported: int | None = None
    """Sequence number of the last report that carried it."""
    sealed: bool = False


@dataclass(slots=True)
class _Progress:
    """What of a running timeline is in the recording already."""

    key: Key
    sent: bool = False
    connected: bool = False
    first: bool = False


class Recorder:
    """Accumulates one epoch of one run on one worker."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a report says of itself, and two instants
        self,
        run: str,
        epoch: int,
        worker: str,
        window_ns: int,
        start_ns: int,
        joined_ns: int | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Count from `start_ns`, when the epoch began on this worker's clock; the worker may have joined later."""
        self._clock = clock
        self.run = run
        self.epoch = epoch
        self.worker = worker
        self.start_ns = start_ns
        self.itl_wanted = False
        """Whether somebody listens to `events.itl`, so that the gaps of a request have to be kept together."""
        self._gaps_ns: list[npt.NDArray[np.int64]] = []
        self._window_ns = window_ns
        self._windows: dict[int, _Window] = {0: _Window()}
        self._oldest = 0
        self._stop_ns: int | None = None
        self._windows_of_run: int | None = None
        self._live: dict[Timeline, _Progress] = {}
        self._ended: list[tuple[Timeline, _Progress]] = []
        self._failures: dict[tuple[str, str, str, int], Failure] = {}
        self.seq = 0
        """Number of the last report."""
        self._in_flight = 0
        self._changed_ns = self._ticked_ns = start_ns if joined_ns is None else joined_ns
        self._cpu_ns = time.process_time_ns()

    # Requests

    def begin(self, timeline: Timeline) -> None:
        """A request is about to be sent."""
        key = Key(timeline.scenario, timeline.endpoint, timeline.phase, timeline.stage)
        self._live[timeline] = _Progress(key)
        self._flight(self._clock(), 1)

    def end(self, timeline: Timeline) -> None:
        """A request has its outcome."""
        self._ended.append((timeline, self._live.pop(timeline)))
        self._flight(self._clock(), -1)

    @property
    def in_flight(self) -> int:
        """Requests that have begun and not ended."""
        return self._in_flight

    def _flight(self, now_ns: int, change: int) -> None:
        """Add to the integral of the streams in flight, split at the ends of windows, and change their number."""
        for gauges, length_ns in self._pieces(self._changed_ns, now_ns):
            gauges.in_flight_ns += self._in_flight * length_ns
            gauges.in_flight_peak = max(gauges.in_flight_peak, self._in_flight)
            gauges.in_flight_last = self._in_flight
            gauges.span_ns += length_ns
        self._changed_ns = max(self._changed_ns, now_ns)
        self._in_flight += change
        gauges = self._window_at(now_ns).gauges
        gauges.in_flight_peak = max(gauges.in_flight_peak, self._in_flight)
        gauges.in_flight_last = self._in_flight

    def _pieces(self, since_ns: int, until_ns: int) -> Iterator[tuple[Gauges, int]]:
        """Split a stretch of time at the ends of windows; yields the gauges and the length of each piece."""
        while since_ns < until_ns:
            index = self._index(since_ns)
            end_ns = min(until_ns, self.start_ns + (index + 1) * self._window_ns)
            if index == self._windows_of_run:
                end_ns = until_ns
            yield self._window_of(index).gauges, end_ns - since_ns
            since_ns = end_ns

    def _spend(self, now_ns: int) -> None:
        """Share out the CPU time since the last tick over the windows of that time."""
        before_ns, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        for gauges, length_ns in self._pieces(self._ticked_ns, now_ns):
            gauges.cpu_ns += round((self._cpu_ns - before_ns) * length_ns / (now_ns - self._ticked_ns))
        self._ticked_ns = max(self._ticked_ns, now_ns)

    def note_plugin_error(self) -> None:
        """Count an error of ours, which has been logged."""
        self._window_at(self._clock()).gauges.plugin_errors += 1

    # Windows

    def stop(self, now_ns: int, windows: int) -> None:
        """The gate is closed: the run has so many windows, and what happens from now on goes behind them.

        The number comes from the master, so that all workers mean the same window; what happened here before this
        instant keeps its place.
        """
        self._flight(now_ns, 0)
        self._stop_ns, self._windows_of_run = now_ns, windows

    def _index(self, at_ns: int) -> int:
        index = max(0, at_ns - self.start_ns) // self._window_ns
        if self._stop_ns is None or self._windows_of_run is None:
            return index
        return min(index, self._windows_of_run) if at_ns < self._stop_ns else self._windows_of_run

    def _window_at(self, at_ns: int) -> _Window:
        return self._window_of(self._index(at_ns))

    def _window_of(self, index: int) -> _Window:
        if index < self._oldest:
            index = self._oldest
            self._windows[index].gauges.late += 1
        for new in range(max(self._windows) + 1, index + 1):
            self._windows[new] = _Window()
        window = self._windows[index]
        window.changed = True
        return window

    def _cell(self, key: Key, at_ns: int) -> Cell:
        cells = self._window_at(at_ns).cells
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = Cell()
        return cell

    # Harvest

    def tick(  # noqa: PLR0913 - what the event loop and the client know
        self,
        now_ns: int,
        *,
        swept_ns: int,
        unparsed_ns: int | None,
        users: int,
        away_ns: int,
        stalled_ns: int = 0,
        core_wait_ns: int | None = None,
    ) -> None:
        """Take what is new, note the gauges, and seal what is complete.

        Everything that arrived before `swept_ns` has been read; `unparsed_ns` is when the oldest bytes arrived that
        nobody has parsed, `away_ns` the longest time for which the loop was away since the last tick, `stalled_ns` the
        sum of all long ones, and `core_wait_ns` that of its long waits for a core.
        """
        held_ns = self.harvest()
        self._flight(now_ns, 0)
        self._spend(now_ns)
        gauges = self._window_at(now_ns).gauges
        gauges.users_last = users
        gauges.loop_lag_ns = max(gauges.loop_lag_ns, away_ns)
        gauges.stalled_ns += stalled_ns
        if core_wait_ns is not None:
            gauges.core_wait_ns = (gauges.core_wait_ns or 0) + core_wait_ns
        complete_ns = min(ns for ns in (swept_ns, unparsed_ns, held_ns) if ns is not None)
        self._seal(self._index(complete_ns))

    def finish(self, now_ns: int) -> None:
        """Take the last of it; every window is final, the one in hand included."""
        self.harvest()
        self._flight(now_ns, 0)
        self._seal(max(self._windows) + 1)
        self._windows[self._oldest].changed = False  # nothing will come into it, and it need not travel

    def _seal(self, until: int) -> None:
        for index in range(self._oldest, until):
            if index not in self._windows:
                self._windows[index] = _Window()
            self._windows[index].sealed = self._windows[index].changed = True
        self._oldest = max(self._oldest, until)
        if self._oldest not in self._windows:
            self._windows[self._oldest] = _Window()

    def harvest_slices(self) -> Iterator[None]:
        """Take what is new in timelines that run, a slice at a time: the loop is not to be away for long."""
        live = list(self._live.items())
        for first in range(0, len(live), _SLICE):
            self._take(live[first : first + _SLICE])
            yield

    def take_gaps_ns(self) -> npt.NDArray[np.int64]:
        """Return the gaps that were harvested since the last call."""
        gaps_ns, self._gaps_ns = np.concatenate([_NO_GAPS, *self._gaps_ns]), []
        return gaps_ns

    def harvest(self) -> int | None:
        """Take what is new in all timelines; returns when the oldest token event came whose gap is held back."""
        ended, self._ended = self._ended, []
        held_ns = self._take([*self._live.items(), *ended])
        for timeline, progress in ended:
            self._take_end(timeline, progress)
        return held_ns

    def _take(self, timelines: "list[tuple[Timeline, _Progress]]") -> int | None:
        harvests: dict[Key, Harvest] = defaultdict(Harvest)
        held_ns: int | None = None
        for timeline, progress in timelines:
            self._take_instants(timeline, progress)
            oldest_ns = harvests[progress.key].take(timeline, keep=self.itl_wanted)
            if oldest_ns is not None and timeline.outcome is None:
                held_ns = oldest_ns if held_ns is None else min(held_ns, oldest_ns)
        for key, harvest in harvests.items():
            self._file(key, harvest)
        return held_ns

    def _take_instants(self, timeline: Timeline, progress: _Progress) -> None:
        sent_ns = timeline.sent_ns
        if sent_ns is not None and not progress.sent:
            progress.sent = True
            cell = self._cell(progress.key, sent_ns)
            cell.count("sent")
            if timeline.scheduled_ns is not None:
                cell.histogram("queue").add(max(0, sent_ns - timeline.scheduled_ns))
        if timeline.connect_ns is not None and sent_ns is not None and not progress.connected:
            progress.connected = True  # later than sent where a connection had gone stale
            self._cell(progress.key, sent_ns).histogram("connect").add(timeline.connect_ns)
        if timeline.first_ns is not None and not progress.first:
            progress.first = True
            self._cell(progress.key, timeline.first_ns).histogram("ttft").add(timeline.first_ns - (sent_ns or 0))

    def _file(self, key: Key, harvest: Harvest) -> None:
        """File the token events and gaps of one key under the windows of their (later) event."""
        if harvest.events:
            for window, events in self._by_window(np.frombuffer(harvest.events, np.int64)):
                cell = window.cells.setdefault(key, Cell())
                cell.count("token_events", events.size)
                cell.count("tokens_received", events.size)
        if harvest.bundles:
            bundles = np.array(harvest.bundles, np.int64)
            for window, tokens in self._by_window(bundles[:, 0], bundles[:, 1]):
                window.cells.setdefault(key, Cell()).count("tokens_received", int(tokens.sum()))
        if harvest.reads:
            reads = np.frombuffer(harvest.reads, np.int64).reshape(-1, 5)
            for window, rows in self._by_window(reads[:, 0], reads):
                count_reads(rows, window.cells.setdefault(key, Cell()))
        if harvest.times:
            ends_ns, gaps_ns = harvest.gaps()
            self._gaps_ns.append(gaps_ns)
            for window, chosen in self._by_window(ends_ns, gaps_ns):
                window.cells.setdefault(key, Cell()).histogram("itl").add_array(chosen)

    def _by_window(
        self, times: npt.NDArray[np.int64], values: npt.NDArray[np.int64] | None = None
    ) -> list[tuple[_Window, npt.NDArray[np.int64]]]:
        """Split values (the times themselves, unless given) by the window of their times."""
        values = times if values is None else values
        indices = np.maximum(times - self.start_ns, 0) // self._window_ns
        if self._stop_ns is not None and self._windows_of_run is not None:
            indices = np.where(times < self._stop_ns, np.minimum(indices, self._windows_of_run), self._windows_of_run)
        late = int(np.count_nonzero(indices < self._oldest))
        if late:
            self._windows[self._oldest].gauges.late += late
            indices = np.maximum(indices, self._oldest)
        if indices.min() == indices.max():
            return [(self._window_of(int(indices[0])), values)]
        return [(self._window_of(int(index)), values[indices == index]) for index in np.unique(indices)]

    # Ends

    def _take_end(self, timeline: Timeline, progress: _Progress) -> None:
        assert timeline.done_ns is not None  # noqa: S101 - it has ended
        cell = self._cell(progress.key, timeline.done_ns)
        if not progress.sent:  # it never got a connection; every request that ends has been counted as due
            cell.count("sent")
        tally.count_end(timeline, cell)
        if timeline.outcome is not None and timeline.outcome.failed:
            failure = tally.failure(timeline, max(0, timeline.done_ns - self.start_ns))
            known = self._failures.get(failure.kind)
            self._failures[failure.kind] = failure if known is None else known.join(failure)

    # Reports

    def report(self, now_ns: int) -> Report:
        """Return the whole state of each window that has changed since its last acknowledged report."""
        self.seq += 1
        windows = []
        for index, window in sorted(self._windows.items()):
            if window.changed:
                window.reported, window.changed = self.seq, False
            elif window.reported is None:
                continue
            cells = to_wire(window.cells)
            gauges = msgspec.structs.replace(window.gauges)
            windows.append(
                WindowState(index=index, seq=window.reported, sealed=window.sealed, gauges=gauges, cells=cells)
            )
        return Report(
            run=self.run,
            epoch=self.epoch,
            worker=self.worker,
            seq=self.seq,
            now_ns=now_ns - self.start_ns,
            windows=windows,
            failures=list(self._failures.values()),
        )

    def acknowledge(self, seq: int) -> None:
        """The master has the report of this number: what has not changed since need not be sent again."""
        for index, window in list(self._windows.items()):
            if window.reported is not None and window.reported <= seq and not window.changed:
                window.reported = None
                if window.sealed:
                    del self._windows[index]
