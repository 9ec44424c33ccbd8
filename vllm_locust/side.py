"""One side of a comparison: one run or several of the same, and every figure of them with how far it scatters.

Promise: the value of a figure is the one that the report of the run shows, judged where failures count as late; of
several runs it is that of all their requests together. What nobody knows has no value, and never a 0.

The windows from the end of the warm-up on are what is drawn from. What came after the stop, and a last window that is
shorter than it should be, belong to the window before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_locust import bootstrap
from vllm_locust.bootstrap import Draws, Statistic, Variance
from vllm_locust.cell import Cell, Cells, total
from vllm_locust.figure import GOODPUT, Figure
from vllm_locust.figures import Summary, failed_of, outcomes_of, ratio
from vllm_locust.histogram import Histogram, stacked
from vllm_locust.intervals import WHOLE
from vllm_locust.judgement import due, needed
from vllm_locust.limit import PLAIN, Unit
from vllm_locust.quantity import NS_PER_S
from vllm_locust.results import Run
from vllm_locust.summary import RATED

_COUNTED: dict[str, Callable[[Cell], int]] = {
    "request_per_s": lambda cell: outcomes_of(cell)["ok"],
    "input_tokens_per_s": lambda cell: cell.histograms["input_tokens"].sum if "input_tokens" in cell.histograms else 0,
    "output_tokens_per_s": lambda cell: cell.counters.get("tokens_received", 0),
}
"""What rates are of."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of one side, in the unit of the figure; infinite where more failed than a percentile leaves out."""

    value: float
    carried: bool = True
    """Whether there are as many samples as a percentile needs."""
    variances: tuple[Variance, ...] = ()
    """Parts of the variance of the value; empty where nobody can say how far it scatters."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A window of a run, with what belongs to it."""

    length_s: float
    steady: dict[str, Cell]
    """Requests whose latencies are told, by scenario, and of all of them under the empty name."""
    happened: dict[str, Cell]
    """All requests in the same way, as far as rates need them."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One run, or several of the same."""

    runs: tuple[Run, ...]
    stretches: tuple[Stretch, ...]
    """The windows of its runs, which follow each other."""
    draws: Draws | None
    """Absent where there are too few windows."""


def side(runs: Sequence[Run]) -> Side:
    """Read the windows of some runs, at least one."""
    each = [_stretches(run) for run in runs]
    return Side(
        tuple(runs), tuple(stretch for of_run in each for stretch in of_run), bootstrap.draws([*map(len, each)])
    )


def _stretches(run: Run) -> list[Stretch]:
    recording = run.recording
    found: list[Stretch] = []
    for index in range(recording.steady_windows.start, 1 + max((place for _, place in recording.gauges), default=-1)):
        since_ns, until_ns = recording.bounds_ns(index)
        length_ns = until_ns - since_ns if index < recording.window_count else 0
        cells = recording.window(index)
        stretch = Stretch(
            length_ns / NS_PER_S,
            _by_scenario({key: cell for key, cell in cells.items() if key.phase in recording.phases}),
            _by_scenario({key: cell.copy(RATED) for key, cell in cells.items() if length_ns}),
        )
        if found and length_ns < WHOLE * recording.window_ns and index >= recording.window_count - 1:
            found[-1] = _joined(found[-1], stretch)
        else:
            found.append(stretch)
    return found


def _by_scenario(cells: Cells) -> dict[str, Cell]:
    found: dict[str, Cell] = {"": Cell()}
    for key, cell in cells.items():
        found[""].merge(cell)
        found.setdefault(key.scenario, Cell()).merge(cell)
    return found


def _joined(one: Stretch, other: Stretch) -> Stretch:
    steady, happened = (
        {name: total(part[name] for part in (a, b) if name in part) for name in a.keys() | b.keys()}
        for a, b in ((one.steady, other.steady), (one.happened, other.happened))
    )
    return Stretch(one.length_s + other.length_s, steady, happened)


def scenarios(*sides: Side) -> list[str]:
    """Return the scenarios of all runs of some sides, in their order."""
    return [*dict.fromkeys(name for one in sides for run in one.runs for name in run.summary["scenarios"])]


def scopes(one: Side, scenario: str) -> list[Summary]:
    """Return what each run says of a scenario, or of all of them; nothing of a run that does not have it."""
    found = [run.summary["scenarios"].get(scenario) if scenario else run.summary["total"] for run in one.runs]
    return [scope for scope in found if scope is not None]


def failures(one: Side, scenario: str) -> tuple[int, int]:
    """Return how many requests failed, and how many ended by themselves."""
    found = scopes(one, scenario)
    failed = sum(scope["failed"] for scope in found)
    return failed, failed + sum(scope["outcomes"]["ok"] for scope in found)


def measure(one: Side, figure: Figure, scenario: str = "") -> Measured | None:
    """Return a figure of a scenario, or of all of them; None where nobody knows it."""
    if not scopes(one, scenario) or (figure == GOODPUT and not all(run.meta.goodput for run in one.runs)):
        return None
    if figure.metric == "failures":
        failed, ended = failures(one, scenario)
        return Measured(failed / ended) if ended else None
    if not one.stretches:
        return _told(one, figure, scenario)
    steady = [stretch.steady.get(scenario, Cell()) for stretch in one.stretches]
    if figure.metric == "goodput":
        return _quotient(one, [cell.counters.get("good", 0) for cell in steady], [*map(due, steady)])
    if figure.metric in _COUNTED:
        counted = [_COUNTED[figure.metric](stretch.happened.get(scenario, Cell())) for stretch in one.stretches]
        return _quotient(one, counted, [stretch.length_s for stretch in one.stretches])
    return _of_samples(one, figure, steady)


def _quotient(one: Side, parts: Sequence[float], wholes: Sequence[float]) -> Measured | None:
    value = ratio(sum(parts), sum(wholes))
    if value is None:
        return None
    return _varied(one, Measured(value), bootstrap.quotient(np.array(parts, float), np.array(wholes, float)))


def _of_samples(one: Side, figure: Figure, steady: Sequence[Cell]) -> Measured | None:
    histograms = [cell.histograms.get(figure.metric, Histogram()) for cell in steady]
    failed = [_failed(figure, cell) for cell in steady]
    every = Histogram()
    for histogram in histograms:
        every.merge(histogram)
    late = sum(failed)
    if not every.count + late:
        return None
    scale = NS_PER_S if figure.unit is Unit.SECONDS else 1
    share = figure.quantile
    if share is not None:
        value = (every.percentile(share, failed=late) or 0.0) / scale
        table, values = stacked(histograms)
        table, values = np.column_stack((table, failed)), np.append(values / scale, math.inf)
        measured = Measured(value, carried=every.count + late >= needed(share))
        return _varied(one, measured, bootstrap.quantile(table, values, share))
    if late and figure.statistic != "min":
        return Measured(math.inf)
    if figure.statistic == "mean":
        return _quotient(
            one, [histogram.sum / scale for histogram in histograms], [histogram.count for histogram in histograms]
        )
    return Measured(((every.min if figure.statistic == "min" else every.max) or 0) / scale)


def _varied(one: Side, measured: Measured, statistic: Statistic) -> Measured:
    if one.draws is None:
        return measured
    return replace(measured, variances=tuple(one.draws.variances(statistic)))


def _failed(figure: Figure, cell: Cell) -> int:
    """Return how many requests count as infinitely late."""
    if not figure.judged:
        return 0
    dropped = cell.counters.get("dropped", 0)
    return dropped + (
        cell.counters.get("failed_without_token", 0) if figure.metric == "ttft" else failed_of(outcomes_of(cell))
    )


def _told(one: Side, figure: Figure, scenario: str) -> Measured | None:
    """Return what a run without windows says: one whose file has no samples."""
    found = scopes(one, scenario)
    if len(found) != 1:
        return None
    scope = found[0]
    if figure.metric in PLAIN:
        value = scope["rates"][f"{figure.metric}_share" if figure.metric == "goodput" else figure.metric]
    else:
        known = scope["judged"] if figure.judged and figure.quantile is not None else scope
        value = known[figure.metric].get(figure.statistic)
    return None if value is None else Measured(math.inf if value == "failed" else value)
