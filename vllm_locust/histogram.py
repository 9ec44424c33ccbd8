"""A histogram whose percentiles are right within 0.5 %, whatever is merged with whatever.

Guarantee: for non-negative integers (nanoseconds or tokens) a percentile is the value of its nearest rank, at most
0.5 % off; count, sum, minimum and maximum are exact; `min <= p50 <= p99 <= max`. Merging adds integers, so it is exact,
in any order and any split. 1 ms to 1 s is 690 buckets, 1 µs to 1 h 2,200: eight bytes each in memory, about one where
they travel (`planes`).

The buckets are those of DDSketch (Masson, Rim, Lee: "DDSketch", VLDB 2019, section 2.1): value v > 0 lies in bucket
ceil(log v / log gamma) with gamma = (1 + a) / (1 - a), whose middle 2 gamma^i / (gamma + 1) is within a of all its
values. Zero has a bucket of its own. There is no collapsing and so no loss at either end.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.005
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_LARGEST_SUM = 2**63 - 1
"""What numpy's sums can hold; beyond, they would wrap in silence."""

Planes = list[tuple[int, bytes]]
"""Counts of adjacent buckets, byte by byte: where the lowest bytes begin and what they are, then the next higher ones,
each without empty buckets at either end. Few counts need a second byte, so a bucket takes little more than one."""


@dataclass(slots=True, eq=False)
class Histogram:
    """Counts by bucket, beside the exact count, sum, minimum and maximum of integer values."""

    first: int = 0
    """Bucket of the first of `counts`."""
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of adjacent buckets of positive values; what is not in them is zeros."""
    count: int = 0
    sum: int = 0
    min: int | None = None
    max: int | None = None

    def add(self, value: int, times: int = 1) -> None:
        """Record one non-negative value; a negative one is a bug of the caller."""
        if value < 0:
            raise ValueError(f"a histogram holds non-negative integers, not {value}")
        if value:
            index = math.ceil(math.log(value) / _LOG_GAMMA)
            self._reach(index, index + 1)
            self.counts[index - self.first] += times
        self._total(times, value * times, value, value)

    def add_array(self, values: npt.NDArray[np.int64]) -> None:
        """Record an array of non-negative values at once."""
        if not values.size:
            return
        low, high = int(values.min()), int(values.max())
        if low < 0:
            raise ValueError(f"a histogram holds non-negative integers, not {low}")
        positive = values if low else values[values > 0]
        if positive.size:
            indices = np.ceil(np.log(positive) / _LOG_GAMMA).astype(np.int64)
            first = int(indices.min())
            self._add(first, np.bincount(indices - first))
        total = int(values.sum()) if high <= _LARGEST_SUM // values.size else sum(values.tolist())
        self._total(int(values.size), total, low, high)

    def merge(self, other: "Histogram") -> None:
        """Add all of `other`: the same as recording its values here."""
        self._add(other.first, other.counts)
        self._total(other.count, other.sum, other.min, other.max)

    def merge_planes(self, planes: Planes, count: int, total: int, low: int | None, high: int | None) -> None:
        """Add all of a histogram of these `planes`, count, sum, minimum and maximum."""
        for power, (first, data) in enumerate(planes):
            counts = np.frombuffer(data, np.uint8)
            self._add(first, counts.astype(np.int64) << 8 * power if power else counts)
        self._total(count, total, low, high)

    def merge_many(self, several: Sequence[tuple[Planes, int, int, int | None, int | None]]) -> None:
        """Add many, each as `merge_planes` takes it, in a third of the time that one after the other takes."""
        planes, counts, sums, lows, highs = zip(*several, strict=True)
        for power in range(max(map(len, planes))):
            rows = [each[power] for each in planes if len(each) > power]
            first, end = min(begin for begin, _ in rows), max(begin + len(data) for begin, data in rows)
            lines = [(b"\0" * (begin - first) + data).ljust(end - first, b"\0") for begin, data in rows]
            table = np.frombuffer(b"".join(lines), np.uint8).reshape(len(rows), end - first)
            self._add(first, table.sum(axis=0, dtype=np.int64) << 8 * power)
        low = min((value for value in lows if value is not None), default=None)
        high = max((value for value in highs if value is not None), default=None)
        self._total(sum(counts), sum(sums), low, high)

    def planes(self) -> Planes:
        """Return the counts as they travel."""
        planes, first, counts = [], self.first, self.counts
        while (occupied := counts.nonzero()[0]).size:
            low, high = int(occupied[0]), int(occupied[-1]) + 1
            first, counts = first + low, counts[low:high]
            planes.append((first, counts.astype(np.uint8).tobytes()))
            counts = counts >> 8
        return planes

    def copy(self) -> "Histogram":
        """Return an independent copy."""
        return Histogram(self.first, self.counts.copy(), self.count, self.sum, self.min, self.max)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """Yield the value that stands for each occupied bucket, ascending, and how many samples it has."""
        values, counts = self.occupied()
        yield from zip(values.tolist(), counts.tolist(), strict=True)

    def occupied(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the values that stand for the occupied buckets, ascending, and how many samples each has."""
        if self.min is None or self.max is None:
            return np.empty(0), np.empty(0, np.int64)
        chosen = self.counts.nonzero()[0]
        values, counts = self._middles()[chosen].clip(self.min, self.max), self.counts[chosen]
        if zeros := self.zeros:
            return np.concatenate(([0.0], values)), np.concatenate(([zeros], counts))
        return values, counts

    @property
    def mean(self) -> float | None:
        """The exact mean, absent without samples."""
        return self.sum / self.count if self.count else None

    @property
    def zeros(self) -> int:
        """How many samples were exactly zero."""
        return self.count - int(self.counts.sum())

    def percentiles(self, quantiles: Iterable[float], *, failed: int = 0) -> list[float | None]:
        """Return the value of the nearest rank for each quantile in (0, 1], `failed` more samples counting as infinite.

        Absent without samples. Quantiles may come in any order.
        """
        total = self.count + failed
        ranks = [max(1, math.ceil(q * total - 1e-9)) for q in quantiles]
        if not total:
            return [None] * len(ranks)
        positions = np.searchsorted(self._cumulative(), ranks) - 1
        return [self._value(position, rank) for position, rank in zip(positions.tolist(), ranks, strict=True)]

    def percentile(self, quantile: float, *, failed: int = 0) -> float | None:
        """Return the value of the nearest rank of one quantile in (0, 1]."""
        return self.percentiles([quantile], failed=failed)[0]

    def count_at_most(self, bounds: Iterable[float]) -> list[int]:
        """Return for each of the ascending bounds how many samples lie at or below it, within the relative error."""
        ends = np.searchsorted(self._middles(), [bound * (1 + RELATIVE_ERROR) for bound in bounds], side="right")
        return [int(count) for count in self._cumulative()[ends]]

    def _cumulative(self) -> npt.NDArray[np.int64]:
        """Return how many samples are zero, and from there on how many are in a bucket or below it."""
        return np.concatenate(([0], self.counts)).cumsum() + self.zeros

    def _middles(self) -> npt.NDArray[np.float64]:
        """Return the values that stand for all values of each bucket."""
        return 2 * _GAMMA ** np.arange(self.first, self.first + self.counts.size, dtype=np.float64) / (_GAMMA + 1)

    def _value(self, position: int, rank: int) -> float:
        """Return what stands for the sample of a rank, which is in a bucket of `counts` or, at -1, zero."""
        if self.min is None or self.max is None or rank > self.count:
            return math.inf
        if rank == self.count:
            return float(self.max)
        middle = 0.0 if position < 0 else 2 * _GAMMA ** (self.first + position) / (_GAMMA + 1)
        return float(min(max(middle, self.min), self.max))

    def _add(self, first: int, counts: npt.NDArray[np.int64] | npt.NDArray[np.uint8]) -> None:
        """Add counts of adjacent buckets."""
        if counts.size:
            self._reach(first, first + counts.size)
            self.counts[first - self.first : first - self.first + counts.size] += counts

    def _reach(self, first: int, end: int) -> None:
        """Make room for the buckets of a range, which is not empty."""
        if not self.counts.size:
            self.first, self.counts = first, np.zeros(end - first, np.int64)
        elif first < self.first or end > self.first + self.counts.size:
            low, high = min(first, self.first), max(end, self.first + self.counts.size)
            wider = np.zeros(high - low, np.int64)
            wider[self.first - low : self.first - low + self.counts.size] = self.counts
            self.first, self.counts = low, wider

    def _total(self, count: int, total: int, low: int | None, high: int | None) -> None:
        """Add to what is exact."""
        self.count += count
        self.sum += total
        if low is not None and high is not None:
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)


def stacked(histograms: Sequence[Histogram]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return a row of counts for each histogram, and the ascending values that stand for the columns."""
    every = Histogram()
    for histogram in histograms:
        every.merge(histogram)
    occupied = every.counts.nonzero()[0]
    table = np.zeros((len(histograms), 1 + occupied.size))
    for row, histogram in zip(table, histograms, strict=True):
        wide = np.zeros(every.counts.size)
        start = histogram.first - every.first
        wide[start : start + histogram.counts.size] = histogram.counts
        row[0], row[1:] = histogram.zeros, wide[occupied]
    return table, np.concatenate(([0.0], every._middles()[occupied]))  # noqa: SLF001 - of the same module
