"""What each worker was like, added up from its gauges; of a run that goes on, what is sealed is added up once.

So a look at a day's run costs what its open windows cost. What it does not do: judge (see `vllm_locust.fidelity`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording

_WHOLE = 0.9
"""A window of which less has passed says more of its edges than of its worker."""
_STRETCH_NS = 10 * NS_PER_S
"""Shorter windows are judged together: a second of a worker that was busy as its users came is no lack of CPU."""


@dataclass(slots=True)
class Seen:
    """What a worker was like in some windows; sums and maxima of its gauges."""

    span_ns: int = 0
    cpu_ns: int = 0
    core_wait_ns: int | None = None
    stalled_ns: int = 0
    loop_lag_ns: int = 0
    in_flight_peak: int = 0
    late: int = 0
    plugin_errors: int = 0
    busiest: float | None = None
    """Share of a core in the busiest window, of those that were whole; of short ones, in 10 s of them."""
    stretch_ns: int = 0
    stretch_cpu_ns: int = 0
    """Of the whole windows that are not yet 10 s together."""

    def add(self, gauges: Gauges, window_ns: int) -> None:
        """Take one more window."""
        self.span_ns += gauges.span_ns
        self.cpu_ns += gauges.cpu_ns
        if gauges.core_wait_ns is not None:
            self.core_wait_ns = (self.core_wait_ns or 0) + gauges.core_wait_ns
        self.stalled_ns += gauges.stalled_ns
        self.loop_lag_ns = max(self.loop_lag_ns, gauges.loop_lag_ns)
        self.in_flight_peak = max(self.in_flight_peak, gauges.in_flight_peak)
        self.late += gauges.late
        self.plugin_errors += gauges.plugin_errors
        if gauges.span_ns >= max(_WHOLE * window_ns, 1):
            self.stretch_ns += gauges.span_ns
            self.stretch_cpu_ns += gauges.cpu_ns
        if self.stretch_ns >= _WHOLE * max(window_ns, _STRETCH_NS):
            self.busiest = max(self.stretch_cpu_ns / self.stretch_ns, self.busiest or 0)
            self.stretch_ns = self.stretch_cpu_ns = 0

    def figures(self) -> dict[str, Any]:
        """Return shares and seconds, null where nothing is known.

        What is only partly a window is judged only if there is no whole one. Stalled is the share of the time in which
        the loop was away in long stretches, the longest one left out.
        """
        cpu, waited_ns = _share(self.cpu_ns, self.span_ns), self.core_wait_ns
        return {
            "loop_lag_s": round(self.loop_lag_ns / NS_PER_S, 9),
            "cpu_share": cpu,
            "cpu_share_max": cpu if self.busiest is None else max(self.busiest, cpu or 0),
            "core_wait_share": None if waited_ns is None else _share(waited_ns, self.span_ns),
            "core_wait_of_need": None if waited_ns is None else _share(waited_ns, waited_ns + self.cpu_ns),
            "stalled_share": _share(max(0, self.stalled_ns - self.loop_lag_ns), self.span_ns),
            "late": self.late,
            "plugin_errors": self.plugin_errors,
            "in_flight_peak": self.in_flight_peak,
        }


def _share(part_ns: int, whole_ns: int) -> float | None:
    return part_ns / whole_ns if whole_ns else None


def seen_in(windows: Iterable[Gauges], window_ns: int) -> Seen:
    """Return what a worker was like in some windows."""
    seen = Seen()
    for gauges in windows:
        seen.add(gauges, window_ns)
    return seen


def all_seen(recording: Recording) -> dict[str, Seen]:
    """Return what each worker of a recording was like, by name."""
    found: dict[str, Seen] = {}
    for (worker, _), gauges in sorted(recording.gauges.items(), key=lambda item: item[0]):
        found.setdefault(worker, Seen()).add(gauges, recording.window_ns)
    return found


class Watch:
    """The same of a recording that grows, at a cost that does not."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._sealed: dict[str, tuple[int, Seen]] = {}
        """How many windows of each worker are added up, and to what."""

    def seen(self, recording: Recording) -> dict[str, Seen]:
        """Return what each worker has been like so far, by name."""
        if recording is not self._recording:
            self._recording, self._sealed = recording, {}
        return {worker: self._seen(recording, worker) for worker in recording.workers}

    def _seen(self, recording: Recording, worker: str) -> Seen:
        done, seen = self._sealed.get(worker, (0, Seen()))
        sealed = recording.closed_windows([worker])
        for index in range(done, sealed):
            gauges = recording.gauges.get((worker, index))
            if gauges is not None:
                seen.add(gauges, recording.window_ns)
        self._sealed[worker] = sealed, seen
        so_far, index = replace(seen), sealed
        while (gauges := recording.gauges.get((worker, index))) is not None:
            so_far.add(gauges, recording.window_ns)
            index += 1
        return so_far
