"""A histogram whose percentiles are right within 0.5 %, whatever is merged with whatever.

Guarantee: for non-negative integers (nanoseconds or tokens) a percentile is the value of its nearest rank, at most
0.5 % off; count, sum, minimum and maximum are exact; `min <= p50 <= p99 <= max`. Merging adds integers, so it is exact,
in any order and any split. A busy window holds some hundred buckets: 1 ms to 1 s is 690 of them, 1 µs to 1 h 2,200.

The buckets are those of DDSketch (Masson, Rim, Lee: "DDSketch", VLDB 2019, section 2.1): value v > 0 lies in bucket
ceil(log v / log gamma) with gamma = (1 + a) / (1 - a), whose middle 2 gamma^i / (gamma + 1) is within a of all its
values. Zero has a bucket of its own. There is no collapsing and so no loss at either end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.005
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_ZERO = -1
"""Bucket of the value 0; value 1 is in bucket 0."""
_LARGEST_SUM = 2**63 - 1
"""What numpy's sums can hold; beyond, they would wrap in silence."""


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, beside the exact count, sum, minimum and maximum of integer values."""

    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    sum: int = 0
    min: int | None = None
    max: int | None = None

    def add(self, value: int, times: int = 1) -> None:
        """Record one non-negative value; a negative one is a bug of the caller."""
        if value < 0:
            raise ValueError(f"a histogram holds non-negative integers, not {value}")
        index = bucket(value)
        self.buckets[index] = self.buckets.get(index, 0) + times
        self.count += times
        self.sum += value * times
        self._stretch(value, value)

    def add_array(self, values: npt.NDArray[np.int64]) -> None:
        """Record an array of non-negative values at once."""
        if not values.size:
            return
        low, high = int(values.min()), int(values.max())
        if low < 0:
            raise ValueError(f"a histogram holds non-negative integers, not {low}")
        indices = np.full(values.shape, _ZERO, dtype=np.int64)
        positive = values > 0
        indices[positive] = np.ceil(np.log(values[positive]) / _LOG_GAMMA)
        counts = np.bincount(indices - _ZERO)
        for offset in np.flatnonzero(counts).tolist():
            index = offset + _ZERO
            self.buckets[index] = self.buckets.get(index, 0) + int(counts[offset])
        self.count += int(values.size)
        self.sum += int(values.sum()) if high <= _LARGEST_SUM // values.size else sum(values.tolist())
        self._stretch(low, high)

    def merge(self, other: "Histogram") -> None:
        """Add all of `other`: the same as recording its values here."""
        for index, number in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + number
        self.count += other.count
        self.sum += other.sum
        if other.min is not None and other.max is not None:
            self._stretch(other.min, other.max)

    def replace(self, old: "Histogram", new: "Histogram") -> None:
        """Move a total by the difference of two states of one of its parts, where `new` has grown out of `old`.

        Growth is what allows minimum and maximum to be folded: they only ever move outwards.
        """
        self.merge(new)
        for index, number in old.buckets.items():
            self.buckets[index] -= number
            if not self.buckets[index]:
                del self.buckets[index]
        self.count -= old.count
        self.sum -= old.sum

    def copy(self) -> "Histogram":
        """Return an independent copy."""
        return Histogram(dict(self.buckets), self.count, self.sum, self.min, self.max)

    @property
    def mean(self) -> float | None:
        """The exact mean, absent without samples."""
        return self.sum / self.count if self.count else None

    @property
    def zeros(self) -> int:
        """How many samples were exactly zero."""
        return self.buckets.get(_ZERO, 0)

    def percentiles(self, quantiles: Iterable[float], *, failed: int = 0) -> list[float | None]:
        """Return the value of the nearest rank for each quantile in (0, 1], `failed` more samples counting as infinite.

        Absent without samples. Quantiles may come in any order.
        """
        total = self.count + failed
        wanted = sorted((max(1, math.ceil(q * total - 1e-9)), i) for i, q in enumerate(quantiles))
        result: list[float | None] = [None] * len(wanted)
        if not total:
            return result
        ranked = iter(sorted(self.buckets.items()))
        cumulative, index = 0, _ZERO
        for rank, position in wanted:
            while cumulative < rank and cumulative < self.count:
                index, number = next(ranked)
                cumulative += number
            result[position] = self._value(index, rank)
        return result

    def percentile(self, quantile: float, *, failed: int = 0) -> float | None:
        """Return the value of the nearest rank of one quantile in (0, 1]."""
        return self.percentiles([quantile], failed=failed)[0]

    def count_at_most(self, bounds: Iterable[float]) -> list[int]:
        """Return for each of the ascending bounds how many samples lie at or below it, within the relative error."""
        ranked = sorted(self.buckets.items())
        counts, position, cumulative = [], 0, 0
        for bound in bounds:
            while position < len(ranked) and middle(ranked[position][0]) <= bound * (1 + RELATIVE_ERROR):
                cumulative += ranked[position][1]
                position += 1
            counts.append(cumulative)
        return counts

    def _value(self, index: int, rank: int) -> float:
        if self.min is None or self.max is None or rank > self.count:
            return math.inf
        if rank == self.count:
            return float(self.max)
        return float(min(max(middle(index), self.min), self.max))

    def _stretch(self, low: int, high: int) -> None:
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)


def bucket(value: int) -> int:
    """Return the index of the bucket that holds a non-negative value."""
    return math.ceil(math.log(value) / _LOG_GAMMA) if value else _ZERO


def middle(index: int) -> float:
    """Return the value that stands for all values of a bucket."""
    return 0.0 if index == _ZERO else 2 * _GAMMA**index / (_GAMMA + 1)
