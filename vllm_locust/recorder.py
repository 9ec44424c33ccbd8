"""A worker's side of the recording: timelines in, reports out.

Between a stream and the recording stands no per-token work. On every tick, and when a report is due, what is new in all
timelines is taken in bulk (numpy: differences, logarithms, counts), filed under the window in which it happened, and
dropped, so memory per stream stays flat however long an answer is.

A window is sealed once nothing older can turn up any more: a sweep of the hub began after its end, and no connection
holds older bytes unparsed, no request older gaps back. What still does goes to the oldest open window, counted `late`.
A reset starts a new recorder; timelines that began under the old one end there, where nobody looks any more.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_locust import tally
from vllm_locust.cell import Cell, Key
from vllm_locust.grid import Grid
from vllm_locust.harvest import Harvest, count_reads
from vllm_locust.limit import Goodput
from vllm_locust.recording import Failure, Report
from vllm_locust.slowest import Slowest
from vllm_locust.timeline import Timeline
from vllm_locust.windows import Windows

_SLICE = 50
"""How many timelines are harvested without a pause: half a millisecond."""
_ENDED = 10
"""How many that have ended: each costs as much as five."""
_NO_GAPS = np.empty(0, np.int64)


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
        self.goodput: Goodput | None = None
        """What a good request has to meet, where that is said."""
        self._gaps_ns: list[npt.NDArray[np.int64]] = []
        self._windows = Windows(start_ns, Grid(window_ns))
        self._live: dict[Timeline, _Progress] = {}
        self._ended: list[tuple[Timeline, _Progress]] = []
        self._failures: dict[tuple[str, str, str, int], Failure] = {}
        self._slowest = Slowest()
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
        timeline.in_flight = self._in_flight

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
        for gauges, length_ns in self._windows.pieces(self._changed_ns, now_ns):
            gauges.in_flight_ns += self._in_flight * length_ns
            gauges.in_flight_peak = max(gauges.in_flight_peak, self._in_flight)
            gauges.in_flight_last = self._in_flight
            gauges.span_ns += length_ns
        self._changed_ns = max(self._changed_ns, now_ns)
        self._in_flight += change
        gauges = self._windows.at(now_ns).gauges
        gauges.in_flight_peak = max(gauges.in_flight_peak, self._in_flight)
        gauges.in_flight_last = self._in_flight

    def _spend(self, now_ns: int) -> None:
        """Share out the CPU time since the last tick over the windows of that time."""
        before_ns, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        for gauges, length_ns in self._windows.pieces(self._ticked_ns, now_ns):
            gauges.cpu_ns += round((self._cpu_ns - before_ns) * length_ns / (now_ns - self._ticked_ns))
        self._ticked_ns = max(self._ticked_ns, now_ns)

    def note_plugin_error(self) -> None:
        """Count an error of ours, which has been logged."""
        self._windows.at(self._clock()).gauges.plugin_errors += 1

    def offer(self, key: Key, due_ns: int) -> None:
        """An arrival is due."""
        self._windows.cell(key, due_ns).count("scheduled")

    def drop(self, key: Key) -> None:
        """An arrival was due and will not be sent."""
        self._windows.cell(key, self._clock()).count("dropped")

    # Windows

    def stop(self, now_ns: int, windows: int) -> None:
        """The gate is closed: the run has so many windows, and what happens from now on goes behind them.

        The number comes from the master, so that all workers mean the same window; what happened here before this
        instant keeps its place.
        """
        self._flight(now_ns, 0)
        self._windows.stop(now_ns, windows)

    @property
    def grid(self) -> Grid:
        """Where windows begin and end."""
        return self._windows.grid

    def move(self, boundaries_ns: Iterable[int]) -> None:
        """Let windows end early at other instants since the start."""
        self._windows.grid = self._windows.grid.moved(boundaries_ns)

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
        silence_ns: int = 0,
    ) -> None:
        """Take what is new, note the gauges, and seal what is complete.

        Everything that arrived before `swept_ns` has been read; `unparsed_ns` is when the oldest bytes arrived that
        nobody has parsed, `away_ns` the longest time for which the loop was away since the last tick, `stalled_ns` the
        sum of all long ones, `core_wait_ns` that of its long waits for a core, and `silence_ns` how long the quietest
        stream has been silent.
        """
        held_ns = self.harvest()
        self._flight(now_ns, 0)
        self._spend(now_ns)
        gauges = self._windows.at(now_ns).gauges
        gauges.users_last = users
        gauges.silence_last_ns = silence_ns
        gauges.loop_lag_ns = max(gauges.loop_lag_ns, away_ns)
        gauges.stalled_ns += stalled_ns
        if core_wait_ns is not None:
            gauges.core_wait_ns = (gauges.core_wait_ns or 0) + core_wait_ns
        complete_ns = min(ns for ns in (swept_ns, unparsed_ns, held_ns) if ns is not None)
        self._windows.seal(self._windows.index(complete_ns))

    def finish(self, now_ns: int) -> None:
        """Take the last of it; every window is final, the one in hand included."""
        self.harvest()
        self._flight(now_ns, 0)
        self._windows.seal_all()

    def harvest_slices(self) -> Iterator[None]:
        """Take what is new in timelines, a slice at a time: the loop is not to be away for long."""
        live = list(self._live.items())
        for first in range(0, len(live), _SLICE):
            self._take(live[first : first + _SLICE])
            yield
        while len(self._ended) > _ENDED:  # the last few are left to `harvest`
            ended, self._ended = self._ended[:_ENDED], self._ended[_ENDED:]
            self._take_ended(ended)
            yield

    def take_gaps_ns(self) -> npt.NDArray[np.int64]:
        """Return the gaps that were harvested since the last call."""
        gaps_ns, self._gaps_ns = np.concatenate([_NO_GAPS, *self._gaps_ns]), []
        return gaps_ns

    def harvest(self) -> int | None:
        """Take what is new in all timelines; returns when the oldest token event came whose gap is held back."""
        ended, self._ended = self._ended, []
        self._take_ended(ended)
        return self._take([*self._live.items()])

    def _take_ended(self, ended: "list[tuple[Timeline, _Progress]]") -> None:
        self._take(ended)
        for timeline, progress in ended:
            self._take_end(timeline, progress)

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
            cell = self._windows.cell(progress.key, sent_ns)
            cell.count("sent")
            if timeline.scheduled_ns is not None:
                cell.histogram("queue").add(max(0, sent_ns - timeline.scheduled_ns))
        if timeline.connect_ns is not None and sent_ns is not None and not progress.connected:
            progress.connected = True  # later than sent where a connection had gone stale
            self._windows.cell(progress.key, sent_ns).histogram("connect").add(timeline.connect_ns)
        if timeline.first_ns is not None and not progress.first:
            progress.first = True
            cell = self._windows.cell(progress.key, timeline.first_ns)
            cell.histogram("ttft").add(timeline.first_ns - (sent_ns or 0))
            if timeline.scheduled_ns is not None:
                cell.histogram("ttft_scheduled").add(max(0, timeline.first_ns - timeline.scheduled_ns))

    def _file(self, key: Key, harvest: Harvest) -> None:
        """File the token events and gaps of one key under the windows of their (later) event."""
        if harvest.events:
            for window, events in self._windows.split(np.frombuffer(harvest.events, np.int64)):
                cell = window.cells.setdefault(key, Cell())
                cell.count("token_events", events.size)
                cell.count("tokens_received", events.size)
        if harvest.bundles:
            bundles = np.array(harvest.bundles, np.int64)
            for window, tokens in self._windows.split(bundles[:, 0], bundles[:, 1]):
                window.cells.setdefault(key, Cell()).count("tokens_received", int(tokens.sum()))
        if harvest.reads:
            reads = np.frombuffer(harvest.reads, np.int64).reshape(-1, 5)
            for window, rows in self._windows.split(reads[:, 0], reads):
                count_reads(rows, window.cells.setdefault(key, Cell()))
        if harvest.times:
            ends_ns, gaps_ns = harvest.gaps()
            self._gaps_ns.append(gaps_ns)
            self._file_gaps(key, "itl", ends_ns, gaps_ns)
            self._file_gaps(key, "itl_token", *harvest.token_gaps())

    def _file_gaps(self, key: Key, metric: str, ends_ns: npt.NDArray[np.int64], gaps_ns: npt.NDArray[np.int64]) -> None:
        if ends_ns.size:
            for window, chosen in self._windows.split(ends_ns, gaps_ns):
                window.cells.setdefault(key, Cell()).histogram(metric).add_array(chosen)

    # Ends

    def _take_end(self, timeline: Timeline, progress: _Progress) -> None:
        assert timeline.done_ns is not None  # noqa: S101 - it has ended
        cell = self._windows.cell(progress.key, timeline.done_ns)
        if not progress.sent:  # it never got a connection; every request that ends has been counted as due
            cell.count("sent")
        tally.count_end(timeline, cell, self.goodput)
        if progress.key.phase == "steady":
            tally.note_slow(timeline, self._slowest.lists, self.worker, self.start_ns)
        if timeline.outcome is not None and timeline.outcome.failed:
            failure = tally.failure(timeline, max(0, timeline.done_ns - self.start_ns))
            known = self._failures.get(failure.kind)
            self._failures[failure.kind] = failure if known is None else known.join(failure)

    # Reports

    def report(self, now_ns: int) -> Report:
        """Return the whole state of each window that has changed since its last acknowledged report."""
        self.seq += 1
        in_flight = Counter((progress.key.scenario, progress.key.endpoint) for progress in self._live.values())
        return Report(
            run=self.run,
            epoch=self.epoch,
            worker=self.worker,
            seq=self.seq,
            now_ns=now_ns - self.start_ns,
            windows=self._windows.report(self.seq),
            failures=list(self._failures.values()),
            slowest=self._slowest.report(self.seq),
            in_flight=[(*labels, number) for labels, number in sorted(in_flight.items())],
        )

    def acknowledge(self, seq: int) -> None:
        """The master has the report of this number: what has not changed since need not be sent again."""
        self._windows.acknowledge(seq)
        self._slowest.acknowledge(seq)
