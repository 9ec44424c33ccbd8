"""Random numbers that do not depend on the machine; the laws of gaps are tested in tests/test_arrivals.py."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust import draws


def test_uniform_numbers_are_between_0_and_1_and_spread_evenly() -> None:
    numbers = next(draws.uniforms("test", 1, 100_000))
    assert 0 < numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    shares, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert shares.sum() == 100_000
    assert all(abs(share - 10_000) < 4 * math.sqrt(9_000) for share in shares.tolist())


def test_the_arrays_of_a_seed_continue_one_sequence_whatever_their_size() -> None:
    small, large = draws.uniforms("test", 1, 10), draws.uniforms("test", 1, 30)
    assert [*next(small), *next(small), *next(small)] == [*next(large)]


def test_purposes_and_seeds_have_numbers_of_their_own() -> None:
    sequences = [next(draws.uniforms(purpose, seed, 1000)) for purpose in ("one", "other") for seed in (1, 2)]
    assert len({number for numbers in sequences for number in numbers.tolist()}) == 4000


@given(st.floats(2.0**-53, 1e12))
def test_logarithms_are_right_within_a_few_units_in_the_last_place(x: float) -> None:
    (found,) = draws._log(np.array([x])).tolist()
    assert found == pytest.approx(math.log(x), rel=1e-15, abs=1e-16)


@given(st.floats(-690, 0))
def test_powers_of_e_are_right(x: float) -> None:
    (found,) = draws._exp(np.array([x])).tolist()
    assert found == pytest.approx(math.exp(x), rel=1e-12)


def test_a_power_that_is_as_good_as_nothing_is_no_error() -> None:
    (found,) = draws._exp(np.array([-1e9])).tolist()
    assert 0 <= found < 1e-300


def test_all_machines_draw_the_same_bits() -> None:
    uniforms = draws.uniforms("test", 1, 100_000)
    drawn = draws.gamma(0.3, next(uniforms), next(uniforms), next(uniforms))
    found = hashlib.sha256(drawn.astype("<f8").tobytes() + draws.exponential(next(uniforms)).astype("<f8").tobytes())
    assert found.hexdigest() == "0da328cb8a7c12883c4d1e44eee78e97f6f40755cb1b578102612a6a3a87a227"
