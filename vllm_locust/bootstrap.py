"""How far a statistic of a run would scatter if the run were repeated: a block bootstrap over its windows.

Latencies of neighbouring requests are alike: they meet the same queue. Requests drawn one by one would forget that, and
find a certainty that is not there. So windows are drawn, with all that is in them, in blocks of neighbours that wrap
around the end (Politis and Romano, "A circular block-resampling procedure for stationary data", 1992). A block is as
long as the cube root of the number of windows, the order that is best for a variance (Künsch, Annals of Statistics
17, 1989). Where one side has several runs, runs are drawn first and windows within them: what differs from start to
start is then part of the scatter.

What is drawn is used for variances alone. A percentile of few draws would be too rough for the small probabilities
that many words in one table ask for (see `vllm_locust.difference`); Student's law is not, with the degrees of freedom
that so many blocks leave: those of a variance whose covariances are weighted with Bartlett's triangle, which is what
drawing blocks does. docs/comparing.md has a simulation of how often the intervals hold the truth.

The same windows give the same numbers: what is drawn is seeded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPLICATES = 600
"""The standard error of a standard error is 3 % of it."""
FEWEST_WINDOWS = 4
"""Of a run; of fewer nobody can say how far they scatter."""

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Takes weights of windows, a row for each replicate, and returns a value for each; infinite where too much failed."""


@dataclass(frozen=True, slots=True)
class Variance:
    """An estimate of a variance, and how many degrees of freedom it rests on."""

    value: float
    freedom: float


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How often each window of a side is in each replicate; the windows of its runs follow each other."""

    within: Floats
    """Every run, its windows drawn."""
    freedom: float
    inflation: float
    """What variances have to be multiplied by: a block deviates from a mean that it is part of."""
    across: Floats | None
    """Runs drawn, and their windows; absent with one run."""
    runs: int

    def variances(self, statistic: Statistic) -> list[Variance]:
        """Return the parts that the variance of a statistic is the sum of: within runs, and from run to run."""
        within = self.inflation * _variance(statistic(self.within))
        parts = [Variance(within, self.freedom)]
        if self.across is not None:
            # Drawing R runs of R shows (R - 1) / R of how runs scatter, beside how their windows do.
            both = _variance(statistic(self.across))
            between = max(0.0, both - within) if math.isfinite(within) else math.inf
            parts.append(Variance(between * self.runs / (self.runs - 1), self.runs - 1))
        return parts


def draws(windows: Sequence[int]) -> Draws | None:
    """Draw from runs of so many windows each; None where one of them has too few."""
    if min(windows, default=0) < FEWEST_WINDOWS:
        return None
    source = np.random.default_rng(sum(windows))
    within = np.hstack([_drawn(source, number, REPLICATES) for number in windows])
    inflation = max(number / (number - _block(number)) for number in windows)
    freedom = sum(map(_freedom, windows))
    across = None if len(windows) == 1 else _drawn_runs(source, windows)
    return Draws(within, freedom, inflation, across, len(windows))


def _drawn_runs(source: np.random.Generator, windows: Sequence[int]) -> Floats:
    """Draw as many runs as there are, each with its windows drawn."""
    ends, drawn = np.cumsum(windows), np.zeros((REPLICATES, sum(windows)))
    for _ in windows:
        chosen = source.integers(len(windows), size=REPLICATES)
        for run, (end, number) in enumerate(zip(ends, windows, strict=True)):
            rows = np.flatnonzero(chosen == run)
            drawn[rows, end - number : end] += _drawn(source, number, rows.size)
    return drawn


def _drawn(source: np.random.Generator, windows: int, replicates: int) -> Floats:
    """Draw blocks until there are as many windows as there were; return how often each window is among them."""
    length = _block(windows)
    starts = source.integers(windows, size=(replicates, -(-windows // length), 1))
    places = ((starts + np.arange(length)) % windows).reshape(replicates, -1)[:, :windows]
    flat = places + windows * np.arange(replicates)[:, None]
    return np.bincount(flat.ravel(), minlength=windows * replicates).reshape(replicates, windows).astype(np.float64)


def _variance(values: Floats) -> float:
    """Return the variance of what replicates say, those without a sample left out; endless where too much failed."""
    said = values[~np.isnan(values)]
    return float(said.var()) if said.size and np.isfinite(said).all() else math.inf


def _block(windows: int) -> int:
    return max(1, round(math.cbrt(windows)))


def _freedom(windows: int) -> float:
    """Return the degrees of freedom of a variance from overlapping blocks (Bartlett's weights, squared and summed)."""
    length = _block(windows)
    return windows / (2 * length / 3 + 1 / (3 * length)) - 1


# Statistics


def quantile(table: Floats, values: Floats, share: float) -> Statistic:
    """Return the statistic of the nearest rank: `table` has a row for each window, and a column for each value."""

    def of(weights: Floats) -> Floats:
        below = (weights @ table).cumsum(axis=1)
        ranks = np.ceil(share * below[:, -1:] - 1e-9)
        found = values[np.minimum((below < ranks).sum(axis=1), values.size - 1)]
        return np.where(ranks[:, 0] > 0, found, math.nan)  # windows of bursts may be drawn that hold no sample

    return of


def quotient(part: Floats, whole: Floats) -> Statistic:
    """Return the statistic of sums over windows, one divided by the other."""

    def of(weights: Floats) -> Floats:
        below = weights @ whole
        return np.divide(weights @ part, below, out=np.zeros_like(below), where=below > 0)

    return of
