"""Which requests a run makes, and in which phase and stage: the same however it is split, sent and stopped."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.arrivals import Arrivals, Segment
from vllm_locust.load import Load

S = 1_000_000_000
weights = st.dictionaries(st.sampled_from(["Chat", "Completions", "Other"]), st.integers(1, 12), min_size=1)
seeds = st.integers(0, 2**32)


@given(weights, seeds, st.integers(0, 300))
def test_a_fixed_number_is_the_first_requests_of_the_schedule(by_class: dict[str, int], seed: int, number: int) -> None:
    load = Load(weights=by_class, requests=number)
    requests = [load.request(seed, k) for k in range(number)]
    amounts = load.amounts(seed)
    assert amounts is not None
    assert sum(amounts.values()) == number
    assert Counter(requests) == Counter((name, index) for name, amount in amounts.items() for index in range(amount))
    for name, amount in amounts.items():
        assert [index for found, index in requests if found == name] == list(range(amount))


@given(weights, seeds, st.integers(0, 20))
def test_each_block_has_every_class_as_often_as_its_weight_says(
    by_class: dict[str, int], seed: int, block: int
) -> None:
    """Weights with a common divisor, too: the block is as long as their sum."""
    load, size = Load(weights=by_class), sum(by_class.values())
    names = Counter(load.request(seed, k)[0] for k in range(block * size, (block + 1) * size))
    assert names == by_class


def test_the_same_seed_asks_the_same_and_another_one_something_else() -> None:
    load = Load(weights={"Chat": 3, "Completions": 2})
    first, again, other = ([load.request(seed, k) for k in range(200)] for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert [name for name, _ in first[:100]] != [name for name, _ in first[100:]]  # blocks have orders of their own


def test_without_a_fixed_number_there_are_no_amounts() -> None:
    assert Load(weights={"Chat": 1}).amounts(0) is None


# Stages


@pytest.mark.parametrize(("at_s", "stage"), [(-0.1, 1), (0, 1), (2.999999999, 1), (3, 2), (8.9, 3), (9, 3), (1_000, 3)])
def test_a_stage_begins_when_the_one_before_ends_and_the_last_one_goes_on(at_s: float, stage: int) -> None:
    """What is sent before the start (a clock's rounding) or after the end belongs to the stage beside it."""
    assert Load(stages=(2, 4, 6), stage_ns=3 * S).stage(round(at_s * S)) == stage


@given(st.lists(st.integers(1, 100).map(float), min_size=1, max_size=9), st.integers(1, 600 * S))
def test_windows_end_where_stages_and_the_warm_up_do(stages: list[float], stage_ns: int) -> None:
    load = Load(stages=tuple(stages), stage_ns=stage_ns)
    assert (load.stages_ns[0], load.stages_ns[-1]) == (0, load.length_ns)
    assert len(load.stages_ns) == len(stages) + 1
    assert set(load.boundaries_ns(stage_ns // 3)) == {stage_ns // 3, *load.stages_ns}
    for number, (since_ns, until_ns) in enumerate(pairwise(load.stages_ns), 1):
        assert load.stage(since_ns) == load.stage(until_ns - 1) == number


def test_a_run_without_stages_has_none() -> None:
    load = Load()
    assert (load.stage(0), load.stage(5 * S), load.length_ns) == (0, 0, None)
    assert (load.stages_ns, load.boundaries_ns(7)) == ((), (7,))


def test_a_rate_is_named_by_the_stretch_that_an_instant_is_in() -> None:
    profile = (Segment(5, 10 * S), Segment(50, 20 * S, ramp=True), Segment(50))
    load = Load(arrivals=Arrivals(profile=profile))
    named = {0: "5/s", 9: "5/s", 10: "to 50/s", 29: "to 50/s", 30: "50/s", 10_000: "50/s"}
    assert {at_s: load.rate_text(at_s * S) for at_s in named} == named
    ends = Load(arrivals=Arrivals(profile=(Segment(7, S, ramp=True),)))
    assert [ends.rate_text(at_s * S) for at_s in (0, 1, 60)] == ["to 7/s", "7/s", "7/s"]
    assert Load().rate_text(0) == Load(arrivals=Arrivals(process="trace", trace_ns=bytes(8))).rate_text(0) == ""
