"""The histogram's guarantee, against sorted lists: percentiles within 0.5 %, everything else exact."""

import math
from fractions import Fraction
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_locust.histogram import Histogram

MS = 1_000_000
HOUR = 3_600_000_000_000
BOUND = Fraction(5, 1000) + Fraction(1, 10**9)  # the last term is what float numbers of nanoseconds cost

values = st.one_of(
    st.integers(0, 3), st.integers(0, 1000), st.integers(1, 10**7), st.integers(1, HOUR), st.integers(1, 2**62)
)
lists = st.lists(values, max_size=80)
quantiles = st.integers(1, 1000).map(lambda permille: Fraction(permille, 1000))


def made_of(numbers: list[int]) -> Histogram:
    histogram = Histogram()
    for number in numbers:
        histogram.add(number)
    return histogram


def nearest_rank(numbers: list[int], quantile: Fraction) -> int:
    """Return the percentile by its definition: the ceil(q n)-th of the sorted samples."""
    return sorted(numbers)[math.ceil(quantile * len(numbers)) - 1]


def near(actual: float | None, expected: int) -> bool:
    return actual is not None and abs(Fraction(actual) - expected) <= BOUND * expected


def state(histogram: Histogram) -> tuple[dict[float, int], int, int, int | None, int | None]:
    return (dict(histogram), histogram.count, histogram.sum, histogram.min, histogram.max)


@given(lists.filter(bool), quantiles)
def test_a_percentile_is_the_value_of_its_nearest_rank_within_half_a_percent(numbers: list[int], q: Fraction) -> None:
    expected = nearest_rank(numbers, q)
    assert near(made_of(numbers).percentile(float(q)), expected)


@given(values)
@example(1)
@example(HOUR)
@example(2**63 - 1)
def test_any_single_value_is_its_own_percentile_exactly(value: int) -> None:
    assert made_of([value]).percentiles([0.001, 0.5, 0.999, 1.0]) == [float(value)] * 4


def test_every_value_from_one_nanosecond_to_beyond_an_hour_is_within_half_a_percent() -> None:
    """Two far neighbours keep the exact minimum and maximum out of the answer."""
    ends = {1, *(round(1.0097**i) for i in range(3400))}
    for value in sorted(ends):
        assert near(made_of([0, value, 2**62]).percentile(0.5), value), value


DISTRIBUTIONS = {
    "constant": lambda _, n: np.full(n, 50 * MS),
    "uniform": lambda rng, n: rng.integers(0, 10**9, n),
    "normal": lambda rng, n: np.abs(rng.normal(40 * MS, 5 * MS, n)).astype(np.int64),
    "exponential": lambda rng, n: rng.exponential(30 * MS, n).astype(np.int64),
    "lognormal": lambda rng, n: rng.lognormal(17, 2, n).astype(np.int64),
    "pareto": lambda rng, n: (rng.pareto(1.2, n) * MS).astype(np.int64),
    "two humps": lambda rng, n: np.concatenate([rng.integers(9 * MS, 11 * MS, n - n // 10), np.full(n // 10, 10**9)]),
    "mostly zero": lambda rng, n: np.where(rng.random(n) < 0.9, 0, rng.integers(1, HOUR, n)),
    "tokens": lambda rng, n: rng.integers(1, 400, n),
}


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_guarantee_holds_for_the_distributions_of_latencies(distribution: str, size: int) -> None:
    samples = DISTRIBUTIONS[distribution](np.random.default_rng(size), size)
    asked = ["0.001", "0.05", "0.25", "0.5", "0.75", "0.9", "0.95", "0.99", "0.999", "1"]
    expected = [nearest_rank(samples.tolist(), Fraction(q)) for q in asked]
    histogram = Histogram()
    histogram.add_array(samples)
    found = histogram.percentiles([float(q) for q in asked])
    assert [q for q, f, e in zip(asked, found, expected, strict=True) if not near(f, e)] == []


@given(lists.filter(bool))
def test_percentiles_rise_from_the_minimum_to_the_maximum(numbers: list[int]) -> None:
    histogram = made_of(numbers)
    found = histogram.percentiles([0.001, 0.5, 0.9, 0.99, 1.0])
    assert all(low <= high for low, high in pairwise([float(min(numbers)), *found]))
    assert found[-1] == float(max(numbers))


@given(lists)
@example([2**62, 2**62, 2**62])
def test_count_sum_minimum_maximum_and_zeros_are_exact_in_both_ways_of_adding(numbers: list[int]) -> None:
    expected = (len(numbers), sum(numbers), min(numbers, default=None), max(numbers, default=None), numbers.count(0))
    singly, at_once = made_of(numbers), Histogram()
    at_once.add_array(np.array(numbers, np.int64))
    for histogram in (singly, at_once):
        found = (histogram.count, histogram.sum, histogram.min, histogram.max, histogram.zeros)
        assert found == expected
    assert state(at_once) == state(singly)


def test_adding_one_by_one_and_at_once_fills_the_same_buckets_at_every_edge() -> None:
    """The integers around each bucket's end are where two ways to take a logarithm could differ."""
    edge, edges = Fraction(1), []
    while edge < HOUR:
        edge *= Fraction(201, 199)
        edges += [max(1, int(edge) - 1), int(edge), int(edge) + 1]
    at_once = Histogram()
    at_once.add_array(np.array(edges, np.int64))
    assert state(at_once) == state(made_of(edges))


@given(values, st.integers(1, 10**9))
def test_adding_a_value_several_times_is_adding_it_so_often(value: int, times: int) -> None:
    histogram = Histogram()
    histogram.add(value, times)
    assert (histogram.count, histogram.sum) == (times, value * times)
    assert near(histogram.percentile(0.5), value)


@given(st.lists(lists, max_size=6), st.randoms(use_true_random=False))
def test_merging_any_split_in_any_order_is_recording_the_values_in_one_place(
    parts: list[list[int]], random: Random
) -> None:
    expected = state(made_of([number for part in parts for number in part]))
    random.shuffle(parts)
    merged = Histogram()
    for part in parts:
        merged.merge(made_of(part))
    assert state(merged) == expected


@given(lists, lists)
def test_merging_leaves_what_was_merged_unchanged(mine: list[int], theirs: list[int]) -> None:
    other = made_of(theirs)
    before = state(other.copy())
    made_of(mine).merge(other)
    copy = other.copy()
    copy.add(1)
    assert state(other) == before


@given(mine=lists, theirs=lists)
def test_merging_what_travels_is_merging_the_histogram(mine: list[int], theirs: list[int]) -> None:
    expected, other, found = state(made_of(mine + theirs)), made_of(theirs), made_of(mine)
    found.merge_planes(other.planes(), other.count, other.sum, other.min, other.max)
    assert state(found) == expected


@given(mine=lists, several=st.lists(st.tuples(lists, st.sampled_from([1, 256, 70_000])), min_size=1, max_size=5))
def test_merging_many_of_what_travels_is_merging_one_after_the_other(
    mine: list[int], several: list[tuple[list[int], int]]
) -> None:
    expected, found, wires = made_of(mine), made_of(mine), []
    for theirs, times in several:
        other = Histogram()
        for value in theirs:
            other.add(value, times)
        expected.merge(other)
        wires.append((other.planes(), other.count, other.sum, other.min, other.max))
    found.merge_many(wires)
    assert state(found) == state(expected)


@given(numbers=lists, failed=st.integers(0, 100), q=quantiles)
def test_failed_samples_count_as_infinite_and_show_only_where_the_rank_falls_among_them(
    numbers: list[int], failed: int, q: Fraction
) -> None:
    rank = math.ceil(q * (len(numbers) + failed))
    found = made_of(numbers).percentile(float(q), failed=failed)
    if not numbers and not failed:
        assert found is None
    elif rank > len(numbers):
        assert found == math.inf
    else:
        assert near(found, sorted(numbers)[rank - 1])


@given(numbers=lists.filter(bool), near_permille=st.lists(st.integers(970, 1030), min_size=1, max_size=8))
def test_the_count_at_or_below_a_bound_is_that_of_the_samples_but_for_those_within_the_error(
    numbers: list[int], near_permille: list[int]
) -> None:
    bounds = sorted(Fraction(number * permille, 1000) for number in numbers for permille in near_permille)
    found = made_of(numbers).count_at_most(map(float, bounds))
    for bound, count in zip(bounds, found, strict=True):
        surely = sum(number * (1 + 2 * BOUND**2) <= bound for number in numbers)
        perhaps = sum(number <= bound * (1 + BOUND) ** 2 for number in numbers)
        assert surely <= count <= perhaps


@given(lists)
def test_counts_below_ascending_bounds_never_fall_and_end_with_all(numbers: list[int]) -> None:
    found = made_of(numbers).count_at_most([0.5, 1e3, 1e6, 1e9, 1e12, math.inf])
    assert found == sorted(found)
    assert found[0] == numbers.count(0)
    assert found[-1] == len(numbers)


@given(lists)
def test_quantiles_may_be_asked_in_any_order(numbers: list[int]) -> None:
    histogram = made_of(numbers)
    upwards = histogram.percentiles([0.1, 0.5, 0.99])
    assert histogram.percentiles([0.99, 0.1, 0.5]) == [upwards[2], upwards[0], upwards[1]]


def test_without_samples_nothing_is_zero_but_the_counts() -> None:
    empty = Histogram()
    empty.add_array(np.empty(0, np.int64))
    assert empty.percentiles([0.5, 0.99]) == [None, None]
    assert (empty.mean, empty.min, empty.max, empty.count, empty.sum) == (None, None, None, 0, 0)
    assert empty.count_at_most([1.0, 2.0]) == [0, 0]


def test_zero_is_a_sample_with_a_bucket_of_its_own() -> None:
    histogram = made_of([0, 0, 0, 50 * MS])
    assert histogram.zeros == 3
    assert histogram.percentile(0.75) == 0
    assert histogram.mean == 12.5 * MS


def test_a_negative_value_is_refused_and_changes_nothing() -> None:
    histogram = made_of([1, 2])
    before = state(histogram.copy())
    with pytest.raises(ValueError, match="not -1"):
        histogram.add(-1)
    with pytest.raises(ValueError, match="not -7"):
        histogram.add_array(np.array([3, -7], np.int64))
    assert state(histogram) == before


def test_a_busy_range_has_as_many_buckets_as_is_promised() -> None:
    """What a message and a window cost is bounded by the range of the values, never by their number."""
    histogram = Histogram()
    histogram.add_array(np.geomspace(MS, 1000 * MS, 200_000).astype(np.int64))
    assert len(list(histogram)) <= 692
    wide = Histogram()
    wide.add_array(np.geomspace(1000, HOUR, 200_000).astype(np.int64))
    assert len(list(wide)) <= 2202


def test_case_45_merged_workers_have_the_percentiles_of_all_samples_not_the_mean_of_two() -> None:
    a, b = Histogram(), Histogram()
    a.add(10 * MS, 900)
    b.add(1000 * MS, 100)
    for first, second in ((a, b), (b, a)):
        total = first.copy()
        total.merge(second)
        expected = [10 * MS, 10 * MS, 1000 * MS, 1000 * MS]
        found = total.percentiles([0.5, 0.9, 0.95, 0.99])
        assert all(near(f, e) for f, e in zip(found, expected, strict=True))
        assert (total.count, total.sum) == (1000, 109_000 * MS)


@pytest.mark.parametrize("tenths_of_ms", [4, 25, 74, 1470, 14_500, 104_990])
def test_case_46_no_value_is_rounded_as_locust_rounds_it(tenths_of_ms: int) -> None:
    value = tenths_of_ms * MS // 10
    histogram = Histogram()
    histogram.add(value - 1, 1)
    histogram.add(value, 998)
    histogram.add(value + 1, 1)
    found = histogram.percentiles([0.5, 0.99])
    assert all(near(f, value) for f in found)
    assert value - 1 <= found[0] <= found[1] <= value + 1
