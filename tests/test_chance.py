"""Laws of chance: held against counting all cases, and against dice with a fixed seed."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest

from vllm_locust import chance


def test_the_law_of_dealing_out_is_that_of_counting_all_hands() -> None:
    """Of 4 marked among 10, how many are in each of the 252 hands of 5."""
    hands = [sum(card < 4 for card in hand) for hand in combinations(range(10), 5)]
    for hits in range(7):
        expected = sum(hand >= hits for hand in hands) / len(hands)
        assert chance.at_least(hits, 5, 4, 10) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("hits", "drawn", "marked", "total", "expected"),
    [
        (0, 5, 4, 10, 1.0),
        (6, 5, 4, 10, 0.0),
        (5, 9, 4, 10, 0.0),  # there are but four
        (3, 9, 4, 10, 1.0),  # at least three have to be in it
        (1, 1, 10, 10, 1.0),
        (50, 200, 300, 6000, pytest.approx(2.5e-23, rel=0.7)),
        (1, 200, 300, 6000, pytest.approx(1.0, abs=1e-3)),
    ],
)
def test_the_law_of_dealing_out_at_its_ends(hits: int, drawn: int, marked: int, total: int, expected: float) -> None:
    assert chance.at_least(hits, drawn, marked, total) == expected


def test_the_far_tail_of_dealing_out_is_exact() -> None:
    """Where a verdict is made: one in ten thousand and less."""
    exact = sum(math.comb(300, k) * math.comb(5700, 60 - k) for k in range(12, 61)) / math.comb(6000, 60)
    assert chance.at_least(12, 60, 300, 6000) == pytest.approx(exact, rel=1e-9)


def test_the_binomial_law_is_exact() -> None:
    exact = sum(math.comb(20, k) * 0.05**k * 0.95 ** (20 - k) for k in range(7, 21))
    assert chance.binomial_at_least(7, 20, 0.05) == pytest.approx(exact, rel=1e-9)
    assert chance.binomial_at_least(0, 20, 0.05) == pytest.approx(1.0)
    assert chance.binomial_at_least(21, 20, 0.05) == 0


def test_numbers_that_no_run_has_take_no_time_and_are_no_error() -> None:
    """A run file may come from anybody; what cannot be added up is bounded from above."""
    for many in (10**11, 10**17):
        assert 0.3 <= chance.at_least(many // 4 + 1, many // 2, many // 2, many) <= 1
        assert 0.3 <= chance.binomial_at_least(many // 100 + 1, many, 0.01) <= 1


def test_a_run_of_a_day_is_judged_by_the_same_laws() -> None:
    """Of 10 million, 1 % and five standard deviations more."""
    assert chance.binomial_at_least(101_574, 10**7, 0.01) == pytest.approx(2.9e-7, rel=0.1)


@pytest.mark.parametrize("ties", [False, True])
def test_a_rank_correlation_is_as_likely_as_among_all_orders(ties: bool) -> None:  # noqa: FBT001
    """Of all orders of eight, those as high or higher are no more than its probability says, and not far fewer."""
    values = [0, 0, 1, 1, 2, 3, 4, 5] if ties else list(range(8))
    pairs = np.triu_indices(8, 1)
    orders = np.array(list(permutations(values)))
    scores = np.sign(orders[:, pairs[1]] - orders[:, pairs[0]]).sum(axis=1)
    for score in np.unique(scores):
        example = orders[np.argmax(scores == score)]
        _, likely = chance.concordance(range(8), example.tolist())
        exact = float((scores >= score).mean())
        assert exact <= likely * 1.1 + 1e-9 if likely < 0.01 else likely == pytest.approx(exact, abs=0.03)


def test_tau_is_that_of_its_definition() -> None:
    """Concordant pairs less discordant ones, of all pairs; with ties, of those that are tied in neither (tau b)."""
    assert chance.concordance([1, 2, 3, 4], [1, 2, 4, 3])[0] == pytest.approx(4 / 6)
    assert chance.concordance([1, 2, 3, 4], [1, 1, 1, 2])[0] == pytest.approx(3 / math.sqrt(6 * 3))
    assert chance.concordance([1, 2, 3], [5, 5, 5]) == (0.0, 1.0)
    assert chance.concordance([1, 2], [1, 2]) == (0.0, 1.0)


def test_a_ratio_of_variances_is_as_likely_as_among_dice() -> None:
    """Of 29 and 570 degrees of freedom, as thirty windows of twenty have."""
    rng = np.random.default_rng(1)
    ratios = (rng.chisquare(29, 400_000) / 29) / (rng.chisquare(570, 400_000) / 570)
    for share in (0.05, 0.01, 0.001):
        ratio = float(np.quantile(ratios, 1 - share))
        assert chance.variance_ratio_above(ratio, 29, 570) == pytest.approx(share, rel=0.1)
