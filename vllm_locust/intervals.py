"""What happened in each window of a run, one after the other.

A window that is empty is there, with 0 tokens per second and without percentiles. One that a boundary or the end of the
run cut has its own length, by which its rates are divided. A sample is in the window in which it happened.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_locust.cell import Cell, Cells, select, total
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording
from vllm_locust.timeline import Outcome

WHOLE = 0.9
"""A window of which less is left is shown with its own length, and not judged (case 50)."""

_SHORTEST_NS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One window of a run, over all workers."""

    index: int
    start_ns: int
    end_ns: int
    whole: bool
    """Whether it is as long as it should be."""
    steady: bool
    """Whether the warm-up was over."""
    phases: tuple[str, ...]
    """Those of the requests whose latencies are told."""
    cells: Cells
    gauges: dict[str, Gauges]
    """By worker."""

    @property
    def length_s(self) -> float:
        """How long it is."""
        return (self.end_ns - self.start_ns) / NS_PER_S

    def counted(self) -> "Interval":
        """Return the same without histograms."""
        return replace(self, cells={key: cell.copy(()) for key, cell in self.cells.items()})

    def told(self, scenario: str | None = None) -> Iterator[Cell]:
        """Yield the cells of those requests whose latencies are told; of a scenario or of all."""
        for phase in self.phases:
            yield from select(self.cells, scenario=scenario, phase=phase)


def intervals(recording: Recording) -> Iterator[Interval]:
    """Yield the windows of a run in their order, empty ones included."""
    gauges: dict[int, dict[str, Gauges]] = {}
    for (worker, index), seen in recording.gauges.items():
        gauges.setdefault(index, {})[worker] = seen
    for index in recording.windows:
        start_ns, end_ns = recording.bounds_ns(index)
        yield Interval(
            index=index,
            start_ns=start_ns,
            end_ns=end_ns,
            whole=end_ns - start_ns >= WHOLE * recording.window_ns,
            steady=index in recording.steady_windows,
            phases=recording.phases,
            cells=recording.window(index),
            gauges=gauges.get(index, {}),
        )


def ended(cells: Iterable[Cell]) -> dict[str, int]:
    """Return how many requests ended `ok`, `failed` and `cancelled`."""
    counts = {"ok": 0, "failed": 0, "cancelled": 0}
    for cell in cells:
        for name, number in cell.counters.items():
            if name.startswith("outcome|"):
                outcome = name.split("|")[1]
                counts[outcome if outcome in (Outcome.OK, Outcome.CANCELLED) else "failed"] += number
    return counts


def rows(windows: Iterable[Interval]) -> list[dict[str, Any]]:
    """Return the figures of each window of a run; where a schedule offers, a window without an arrival has 0 of it.

    A run of `5m` is over some microseconds later, and the window of that time, if nothing is in it, is left out.
    """
    found = [_row(window) for window in windows if window.cells or window.length_s * NS_PER_S >= _SHORTEST_NS]
    if any(window["offered_per_s"] is not None for window in found):
        for window in found:
            window["offered_per_s"] = window["offered_per_s"] or 0.0
    return found


def _row(interval: Interval) -> dict[str, Any]:
    """Return the figures of a window as plain values: seconds, per second, null where there is no sample.

    Latencies are of `steady` requests, all else is of all; what was offered is null where no schedule offers it.
    """
    every, steady = total(interval.cells.values()), total(interval.told())
    counts, length_s = ended(interval.cells.values()), interval.length_s
    scheduled = every.counters.get("scheduled")
    return {
        "index": interval.index,
        "start_s": interval.start_ns / NS_PER_S,
        "length_s": length_s,
        "whole": interval.whole,
        "steady": interval.steady,
        "sent": every.counters.get("sent", 0),
        **counts,
        "ttft": _latency(steady, "ttft", {"p50": 0.50, "p95": 0.95}),
        "scenarios": {
            name: _latency(total(interval.told(name)), "ttft", {"p95": 0.95})
            for name in sorted({key.scenario for key in interval.cells})
        },
        "itl": _latency(steady, "itl", {"p99": 0.99}),
        "tpot_mean_s": _seconds(steady.histograms.get("tpot", Histogram()).mean),
        "output_tokens_per_s": _per_s(every.counters.get("tokens_received", 0), length_s),
        "offered_per_s": None if scheduled is None else _per_s(scheduled, length_s),
        "completed_per_s": _per_s(counts["ok"], length_s),
        "in_flight_mean": _per_s(sum(seen.in_flight_ns for seen in interval.gauges.values()) / NS_PER_S, length_s),
        "silence_s": _seconds(max((seen.silence_last_ns for seen in interval.gauges.values()), default=None)),
    }


def _latency(cell: Cell, metric: str, quantiles: dict[str, float]) -> dict[str, Any]:
    histogram = cell.histograms.get(metric, Histogram())
    values = histogram.percentiles(quantiles.values())
    return {"count": histogram.count, **{name: _seconds(v) for name, v in zip(quantiles, values, strict=True)}}


def _per_s(number: float, length_s: float) -> float:
    return number / length_s if length_s else 0.0


def _seconds(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / NS_PER_S, 9)
