"""The one data structure: a sparse cube of integers, built by workers, merged by the master, read by everyone else.

*window × (scenario, endpoint, phase, stage) × (histogram of a metric | counter)*, and beside it, per worker and window,
gauges. Every number that anyone is shown is a sum over some slice of it. And a bounded appendix, merged by extreme:
failures by kind, the slowest requests.

Reporting is state-based: a report carries, for each window that changed, the window's whole state with a sequence
number, and the master replaces what it held for (worker, window) if the number is higher. A lost, repeated, reordered
or late report therefore changes nothing. A sealed state is final and is folded into its window and the totals at once;
a window that is old is compressed, so a day costs some 15 KB per window, not per window and worker. A window that its
worker has not sealed counts all the same: its state is kept as it came, and added when somebody looks. For a window is
reported as often as it is long in seconds, and the next report replaces all of it: adding each, and taking it out
again, is what a master cannot afford.

What it does not do: keep samples, know what a metric means, or look at a clock.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import msgspec

from vllm_locust import slowest
from vllm_locust.cell import STEADY, WARMUP, Cell, Cells, Key
from vllm_locust.grid import Grid
from vllm_locust.histogram import Histogram, Planes
from vllm_locust.slowest import Lists, Slow

_SLIVER = 0.01
"""Share of a window's length that is no window of its own at the end of a run."""
FORMAT = 1
"""Version of the encoding, on the wire and in run files; another one is refused."""


class Gauges(msgspec.Struct, array_like=True, kw_only=True):
    """What one worker was like in one window; times in nanoseconds."""

    span_ns: int = 0
    """How much of the window has passed on this worker."""
    in_flight_last: int = 0
    in_flight_peak: int = 0
    in_flight_ns: int = 0
    """Integral of the streams in flight over time."""
    users_last: int = 0
    cpu_ns: int = 0
    """CPU time of the process."""
    loop_lag_ns: int = 0
    """The longest time for which the event loop was away."""
    late: int = 0
    """Samples that belong to an older window, which had been sealed already."""
    plugin_errors: int = 0
    core_wait_ns: int | None = None
    """How long the sending thread was ready to run and had no core, in waits of `cpu.LONG_WAIT_NS` and longer; absent
    where the system does not say."""
    stalled_ns: int = 0
    """Sum of the times, of `hub.STALL_NS` and longer each, for which the event loop was away."""
    silence_last_ns: int = 0
    """For how long the quietest stream in flight had sent no byte."""


class Failure(msgspec.Struct, kw_only=True):
    """First and last time, since the start of the run, and one message of one kind of failure."""

    scenario: str
    endpoint: str
    outcome: str
    status: int
    """HTTP status, 0 where none came."""
    first_ns: int
    last_ns: int
    message: str

    @property
    def kind(self) -> tuple[str, str, str, int]:
        """What failures are gathered by."""
        return (self.scenario, self.endpoint, self.outcome, self.status)

    def join(self, other: "Failure") -> "Failure":
        """Merge two of a kind: the message of the earliest one stays, so that the order of merging does not matter."""
        first = min(self, other, key=lambda failure: (failure.first_ns, failure.message))
        return msgspec.structs.replace(first, last_ns=max(self.last_ns, other.last_ns))


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in a run: a worker lost, a change of users."""

    at_ns: int
    text: str


class WireHistogram(msgspec.Struct, array_like=True):
    """A histogram as it travels."""

    planes: Planes
    count: int
    sum: int
    min: int | None
    max: int | None


class WireCell(msgspec.Struct, kw_only=True):
    """A cell as it travels."""

    key: Key
    histograms: dict[str, WireHistogram]
    counters: dict[str, int]


class WindowState(msgspec.Struct, kw_only=True):
    """One worker's whole state of one window."""

    index: int
    seq: int
    sealed: bool
    gauges: Gauges
    cells: list[WireCell]


class Report(msgspec.Struct, kw_only=True):
    """What a worker tells the master at a tick: every window that changed, whole."""

    format: int = FORMAT
    run: str
    epoch: int
    worker: str
    seq: int
    now_ns: int
    """Time since the start of the run on the worker's clock."""
    windows: list[WindowState]
    failures: list[Failure]
    slowest: list[Slow] = []
    """Those that no acknowledged report has carried."""
    steady_ns: int = 0
    """When the warm-up ends, as far as the worker knows, since the start of the run."""
    answered_users: int = 0
    """How many users have finished a request in this run."""
    taken: dict[str, int] = {}
    """How many requests of each user class have been taken, for whoever inherits the worker's rank."""
    in_flight: list[tuple[str, str, int]] = []
    """How many streams of each scenario and endpoint are in flight."""
    done: bool = False
    """Whether everything that it had to send has been sent and has ended."""


_REPORT_DECODER = msgspec.msgpack.Decoder(Report)


_LARGE_BYTES = 32_768
"""From here on a report is compressed, to a third or less: many buckets with little in them. It takes some 0.5 ms of a
worker's loop, which common reports, half as large, are better off without."""
_ZLIB = b"\x78"
"""First byte of compressed data (RFC 1950, section 2.2); that of a report, a map of msgpack, is another."""


def encode_report(report: Report) -> bytes:
    """Encode a report for Locust's messages, which carry bytes unharmed."""
    data = msgspec.msgpack.encode(report)
    return data if len(data) < _LARGE_BYTES else zlib.compress(data, level=1)


def decode_report(data: bytes) -> Report:
    """Decode a report; raises `ValueError` for bytes that are no report of this format."""
    try:
        report = _REPORT_DECODER.decode(zlib.decompress(data) if data[:1] == _ZLIB else data)
    except zlib.error as error:
        raise ValueError(f"a compressed report that cannot be read: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:  # only since 0.21 is the first a ValueError
        raise ValueError(f"no report: {error}") from None
    if report.format != FORMAT:
        raise ValueError(f"report of format {report.format}, this is format {FORMAT}")
    return report


def to_wire(cells: Cells) -> list[WireCell]:
    """Turn cells into what travels and what is saved."""
    return [
        WireCell(
            key=key,
            histograms={metric: _pack(h) for metric, h in sorted(cell.histograms.items())},
            counters=dict(sorted(cell.counters.items())),
        )
        for key, cell in sorted(cells.items())
    ]


def from_wire(cells: Iterable[WireCell]) -> Cells:
    """Turn what travelled back into cells."""
    result: Cells = {}
    _add(result, cells)
    return result


def _pack(histogram: Histogram) -> WireHistogram:
    return WireHistogram(histogram.planes(), histogram.count, histogram.sum, histogram.min, histogram.max)


def _add(target: Cells, cells: Iterable[WireCell], metrics: Container[str] | None = None) -> None:
    """Add what travelled to cells, all of it or only histograms of these metrics."""
    for wire in cells:
        cell = target.setdefault(wire.key, Cell())
        for metric, h in wire.histograms.items():
            if metrics is None or metric in metrics:
                cell.histogram(metric).merge_planes(h.planes, h.count, h.sum, h.min, h.max)
        for name, number in wire.counters.items():
            cell.count(name, number)


def _add_parts(target: Cells, parts: Iterable[list[WireCell]], metrics: Container[str] | None) -> None:
    """Add what many workers have told of their open windows, each histogram in one go."""
    found: dict[Key, dict[str, list[tuple[Planes, int, int, int | None, int | None]]]] = {}
    for wire in chain.from_iterable(parts):
        cell, histograms = target.setdefault(wire.key, Cell()), found.setdefault(wire.key, {})
        for metric, h in wire.histograms.items():
            if metrics is None or metric in metrics:
                histograms.setdefault(metric, []).append((h.planes, h.count, h.sum, h.min, h.max))
        for name, number in wire.counters.items():
            cell.count(name, number)
    for key, histograms in found.items():
        for metric, several in histograms.items():
            target[key].histogram(metric).merge_many(several)


_PACKED_DECODER = msgspec.msgpack.Decoder(list[WireCell])
_LARGE_DECODER = msgspec.json.Decoder(list[WireCell])


def _packed(cells: list[WireCell]) -> bytes:
    try:
        data = msgspec.msgpack.encode(cells)
    except OverflowError:  # a sum of more than 64 bits, which fits into no report, but may come from several
        data = msgspec.json.encode(cells)
    return zlib.compress(data, level=1)


def _unpacked(packed: bytes) -> list[WireCell]:
    data = zlib.decompress(packed)
    return (_LARGE_DECODER if data[:1] == b"[" else _PACKED_DECODER).decode(data)


class _Folded:
    """Sealed states, added up by window.

    Those of the windows that come last are cells; older ones are kept as they travel, compressed, in a tenth of the
    memory. One that still grows (a worker was cut off, and is back) is unpacked for as long as it is among the last.
    """

    _LOOSE = 2
    """How many windows are cells: workers seal a window within a second or two of each other."""

    def __init__(self) -> None:
        self._loose: dict[int, Cells] = {}
        self._packed: dict[int, bytes] = {}

    def add(self, index: int, cells: Iterable[WireCell]) -> None:
        """Add the sealed state of one more worker to a window."""
        if index not in self._loose:
            packed = self._packed.pop(index, None)
            self._loose[index] = {} if packed is None else from_wire(_unpacked(packed))
        _add(self._loose[index], cells)
        while len(self._loose) > self._LOOSE:
            first = next(iter(self._loose))
            self.put(first, to_wire(self._loose.pop(first)))

    def put(self, index: int, cells: list[WireCell]) -> None:
        """Put all of a window away."""
        self._packed[index] = _packed(cells)

    @property
    def indices(self) -> list[int]:
        """Numbers of the windows of which anything was sealed."""
        return sorted({*self._packed, *self._loose})

    def wire(self, index: int) -> list[WireCell]:
        """Return the cells of a window as they travel; empty where nothing was sealed."""
        if index in self._loose:
            return to_wire(self._loose[index])
        return _unpacked(self._packed[index]) if index in self._packed else []


class Recording:
    """One epoch of one run, as the master (or a single process) holds it."""

    def __init__(self, run: str, epoch: int, window_ns: int) -> None:
        self.run = run
        self.epoch = epoch
        self.grid = Grid(window_ns)
        self.steady_ns = 0
        """When the warm-up ends, 0 where there is none."""
        self.begin_ns = 0
        """Where a part of a run begins that was cut out of it (see `vllm_locust.excerpt`); its end is `length_ns`."""
        self.stages_ns: list[int] = []
        """When each stage begins, and when the last one ends; empty without stages."""
        self.length_ns: int | None = None
        """How long the run lasted, warm-up included, once that is known."""
        self.gauges: dict[tuple[str, int], Gauges] = {}
        self.failures: dict[tuple[str, str, str, int], Failure] = {}
        self.slowest: Lists = {}
        self.marks: list[Mark] = []
        self.stale = 0
        """Reports of an older run or epoch that came and were dropped."""
        self._sealed_totals: Cells = {}
        self._folded = _Folded()
        self._open: dict[tuple[str, int], list[WireCell]] = {}
        self._seqs: dict[tuple[str, int], int] = {}
        self._sealed: dict[str, int] = {}
        self.states: Counter[int] = Counter()
        """How many states of each window were merged: a worker that was cut off tells of one long after the others."""
        self._within: Cells = {}
        """The sealed states of the windows that `within` has added up."""
        self._within_range = range(0)
        self._in_flight: dict[str, tuple[int, list[tuple[str, str, int]]]] = {}

    def merge(self, report: Report) -> bool:
        """Take a report; whatever of it is already known, or older than what is known, changes nothing.

        Returns whether it belongs to this run and epoch.
        """
        if (report.run, report.epoch) != (self.run, self.epoch):
            self.stale += 1
            return False
        self._sealed.setdefault(report.worker, 0)
        if report.seq > self._in_flight.get(report.worker, (-1,))[0]:
            self._in_flight[report.worker] = report.seq, report.in_flight
        for window in sorted(report.windows, key=lambda state: state.index):
            self._take(report.worker, window)
        for failure in report.failures:
            known = self.failures.get(failure.kind)
            self.failures[failure.kind] = failure if known is None else known.join(failure)
        for slow in report.slowest:
            slowest.add(self.slowest, slow)
        return True

    def _take(self, worker: str, state: WindowState) -> None:
        place = (worker, state.index)
        if state.index < self._sealed[worker] or state.seq <= self._seqs.get(place, -1):
            return
        self.gauges[place] = state.gauges
        self.states[state.index] += 1
        if state.sealed:
            self._open.pop(place, None)
            self._seqs.pop(place, None)
            self._folded.add(state.index, state.cells)
            _add(self._sealed_totals, state.cells)
            if state.index in self._within_range:
                _add(self._within, state.cells)
            self._sealed[worker] = state.index + 1
        else:
            self._open[place] = state.cells
            self._seqs[place] = state.seq

    @property
    def window_ns(self) -> int:
        """Length of a window that no boundary ends early."""
        return self.grid.window_ns

    @property
    def totals(self) -> Cells:
        """Everything so far, added up anew."""
        return self.totals_of()

    def totals_of(self, metrics: Container[str] | None = None) -> Cells:
        """Everything so far, added up anew; given metrics, no histograms but theirs, which is that much cheaper."""
        cells = {key: cell.copy(metrics) for key, cell in self._sealed_totals.items()}
        _add_parts(cells, self._open.values(), metrics)
        return cells

    @property
    def workers(self) -> list[str]:
        """Names of all workers that ever reported."""
        return sorted(self._sealed)

    def in_flight(self, worker: str) -> list[tuple[str, str, int]]:
        """Return how many streams of each scenario and endpoint a worker had in flight when it last reported."""
        return self._in_flight[worker][1] if worker in self._in_flight else []

    @property
    def window_count(self) -> int:
        """How many windows the run has so far; once it has been stopped, what came later is in one more behind them."""
        if self.length_ns is not None:
            return self.grid.count(self.length_ns)
        return 1 + max((index for _, index in self.gauges), default=-1)

    @property
    def reached_ns(self) -> int:
        """How far the first worker has got, by what the workers have reported."""
        last = self._sealed.copy()
        for worker, index in self._open:
            last[worker] = max(last[worker], index + 1)
        reached = (
            self.grid.bounds(count - 1)[0] + self.gauges[worker, count - 1].span_ns
            for worker, count in last.items()
            if (worker, count - 1) in self.gauges
        )
        return max(reached, default=0)

    @property
    def since_ns(self) -> int:
        """When what the run is judged by begins: at the end of the warm-up, if it came to that."""
        return max(self.begin_ns, self.steady_ns if self._warm else 0)

    @property
    def phases(self) -> tuple[str, ...]:
        """Those whose latencies are told: where the run was over before its warm-up was, there is nothing else."""
        return (STEADY,) if self._warm else (STEADY, WARMUP)

    @property
    def _warm(self) -> bool:
        return self.length_ns is None or self.steady_ns < self.length_ns or not self.steady_ns

    def whole_ns(self, length_ns: int) -> int:
        """Return a length without a last window that would be a mere sliver: timers are some milliseconds late."""
        since_ns, _ = self.grid.bounds(self.grid.index(length_ns))
        return since_ns if since_ns > 0 and length_ns - since_ns < _SLIVER * self.window_ns else length_ns

    @property
    def windows(self) -> range:
        """Numbers of the windows of the run so far."""
        return range(self.grid.index(self.begin_ns), self.window_count)

    @property
    def steady_windows(self) -> range:
        """Numbers of the windows from then on to the stop."""
        return range(self.grid.index(self.since_ns), self.window_count)

    @property
    def stages(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, begin and end of each stage, as far as it belongs to what the run is judged by."""
        end_ns = self.stages_ns[-1] if self.length_ns is None and self.stages_ns else self.length_ns or 0
        for number, (since_ns, until_ns) in enumerate(pairwise(self.stages_ns), 1):
            since_ns, until_ns = max(since_ns, self.since_ns), min(until_ns, end_ns)  # noqa: PLW2901
            if since_ns < until_ns:
                yield number, since_ns, until_ns

    def windows_in(self, since_ns: int, until_ns: int) -> Cells:
        """Return the cells of the windows of a stretch of time; whole ones, where a boundary begins and ends it."""
        cells: Cells = {}
        for index in range(self.grid.index(since_ns), self.grid.count(until_ns)):
            _add(cells, self._wire(index))
        return cells

    def bounds_ns(self, index: int) -> tuple[int, int]:
        """Return when a window of the run begins and ends; the stop ends the last one early."""
        since_ns, until_ns = self.grid.bounds(index)
        return since_ns, until_ns if self.length_ns is None else min(until_ns, self.length_ns)

    def within(self, metrics: Container[str] | None = None) -> Cells:
        """Return the cells of the steady windows: what came before or after counts in totals, not in rates.

        Given metrics, no histograms but theirs. What is sealed is added up once, while the same windows are asked for.
        """
        first, stop = self.steady_windows.start, self.window_count if self.length_ns is not None else sys.maxsize
        if self._within_range != range(first, stop):
            self._within_range, self._within = range(first, stop), {}
            for index in self._folded.indices:
                if index in self._within_range:
                    _add(self._within, self._folded.wire(index))
        cells = {key: cell.copy(metrics) for key, cell in self._within.items()}
        parts = (part for (_, index), part in self._open.items() if index in self._within_range)
        _add_parts(cells, parts, metrics)
        return cells

    def closed_windows(self, workers: Iterable[str] | None = None) -> int:
        """How many windows, counted from the first, the given workers (default: all) have sealed."""
        return min((self._sealed.get(w, 0) for w in (self._sealed if workers is None else workers)), default=0)

    def window(self, index: int) -> Cells:
        """Return the cells of one window, sealed or not, over all workers; empty where nothing happened."""
        return from_wire(self._wire(index))

    def _wire(self, index: int) -> Iterable[WireCell]:
        """Return a window as it travels: a key once for what is sealed, and once for each worker that has not."""
        parts = (part for (_, open_index), part in self._open.items() if open_index == index)
        return chain(self._folded.wire(index), *parts)

    def _whole(self, index: int) -> list[WireCell]:
        """Return a window as it travels, each key once."""
        if any(open_index == index for _, open_index in self._open):
            return to_wire(self.window(index))
        return self._folded.wire(index)

    def save(self) -> dict[str, Any]:
        """Return all of it as values that JSON can carry."""
        return {**self.save_frame(), "windows": msgspec.to_builtins(list(self.save_windows()))}

    def save_windows(self) -> Iterator[dict[str, Any]]:
        """Yield what is JSON as `save` has it, window by window, for whom all of them at once are too much."""
        for index in range(1 + max((index for _, index in self.gauges), default=-1)):
            yield {"index": index, "cells": self._whole(index)}

    def save_frame(self) -> dict[str, Any]:
        """Return what `save` has beside its windows."""
        return {
            "format": FORMAT,
            "run": self.run,
            "epoch": self.epoch,
            "window_ns": self.window_ns,
            "boundaries_ns": list(self.grid.boundaries_ns),
            "steady_ns": self.steady_ns,
            "stages_ns": self.stages_ns,
            "length_ns": self.length_ns,
            "begin_ns": self.begin_ns,
            "gauges": [[worker, index, *msgspec.to_builtins(g)] for (worker, index), g in sorted(self.gauges.items())],
            "failures": msgspec.to_builtins([self.failures[kind] for kind in sorted(self.failures)]),
            "slowest": msgspec.to_builtins([*slowest.each(self.slowest)]),
            "marks": msgspec.to_builtins(self.marks),
        }


def load(saved: dict[str, Any]) -> Recording:
    """Make a recording again from what `Recording.save` returned; raises `ValueError` where it is another format."""
    if saved.get("format") != FORMAT:
        raise ValueError(f"recording of format {saved.get('format')!r}, this is format {FORMAT}")
    recording = Recording(saved["run"], saved["epoch"], saved["window_ns"])
    recording.grid = recording.grid.moved(saved.get("boundaries_ns", ()))
    recording.steady_ns = saved.get("steady_ns", 0)
    recording.stages_ns = list(saved.get("stages_ns", ()))
    recording.length_ns = saved["length_ns"]
    recording.begin_ns = saved.get("begin_ns", 0)
    for window in saved["windows"]:
        cells = msgspec.convert(window["cells"], list[WireCell])
        recording._folded.put(window["index"], cells)  # noqa: SLF001 - a second constructor
        _add(recording._sealed_totals, cells)  # noqa: SLF001
    for worker, index, *values in saved["gauges"]:
        recording.gauges[worker, index] = msgspec.convert(values, Gauges)
        recording._sealed[worker] = max(index + 1, recording._sealed.get(worker, 0))  # noqa: SLF001
    for failure in msgspec.convert(saved["failures"], list[Failure]):
        recording.failures[failure.kind] = failure
    for slow in msgspec.convert(saved.get("slowest", []), list[Slow]):
        slowest.add(recording.slowest, slow)
    recording.marks = msgspec.convert(saved["marks"], list[Mark])
    return recording
