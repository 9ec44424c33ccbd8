"""Laws of chance: how likely something is where nothing but chance is at work.

Each function returns a probability, exact or, where it says so, an approximation that a simulation in the tests holds
to. Nothing here knows what is measured, and nothing is estimated by throwing dice: the same numbers, the same verdict.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

_NEGLIGIBLE = 1e-15
_TERMS = 100_000
_LARGEST = 10**12
"""Beyond, logarithms of factorials cancel; no run has so many requests, and of those nothing is remarkable."""


def at_least(hits: int, drawn: int, marked: int, total: int) -> float:
    """Return how likely `hits` or more of `drawn` are marked, where `marked` of `total` are (hypergeometric, exact).

    This is the law of how many of a window's requests lie above a threshold that was taken from all requests: given the
    values, every way to deal them out over the windows is as likely as any other. A binomial law would take the share
    above the threshold for known, and forget that what is in this window is in no other.
    """
    most = min(drawn, marked)
    if hits <= max(0, drawn + marked - total) or total > _LARGEST:
        return 1.0
    if hits > most:
        return 0.0
    if hits * total <= drawn * marked:  # from the other side, where the terms fall
        return 1 - at_least(drawn - hits + 1, drawn, total - marked, total)
    log = _log_choose(marked, hits) + _log_choose(total - marked, drawn - hits) - _log_choose(total, drawn)
    return _tail(
        log,
        lambda k: (marked - k) * (drawn - k) / ((k + 1) * (total - marked - drawn + k + 1)),
        range(hits, most + 1),
    )


def binomial_at_least(hits: int, drawn: int, share: float) -> float:
    """Return how likely `hits` or more of `drawn` are, each of which has the same `share` of a chance (exact)."""
    if hits <= 0 or drawn > _LARGEST:
        return 1.0
    if hits > drawn:
        return 0.0
    if hits <= drawn * share:
        return 1 - binomial_at_least(drawn - hits + 1, drawn, 1 - share)
    log = _log_choose(drawn, hits) + hits * math.log(share) + (drawn - hits) * math.log1p(-share)
    odds = share / (1 - share)
    return _tail(log, lambda k: odds * (drawn - k) / (k + 1), range(hits, drawn + 1))


def _tail(log: float, ratio: Callable[[int], float], numbers: range) -> float:
    """Add up falling terms: the first by its logarithm, each following one by its ratio to the one before.

    What is left out is counted as if it fell no faster from there on, so that the sum is never too small.
    """
    term, likely = math.exp(min(log, 0.0)), 0.0
    for number in numbers[:_TERMS]:
        likely += term
        if term <= _NEGLIGIBLE * likely:
            return min(likely, 1.0)
        term *= ratio(number)
    if len(numbers) > _TERMS:
        likely += term / (1 - min(ratio(numbers[_TERMS]), 1 - _NEGLIGIBLE))
    return min(likely, 1.0)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def concordance(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return Kendall's tau of two series, and how likely it is to be as high or higher by chance.

    With time for one of them this is the trend test of Mann (1945) and Kendall. The probability is that of the normal
    law with continuity correction and the variance for ties (Kendall, Rank Correlation Methods, chapters 3 and 5). Far
    out, it is above the exact one, whose tail ends: it never raises a false alarm more often than it says.
    """
    n, x, y = len(xs), np.asarray(xs, float), np.asarray(ys, float)
    if n < 3:  # noqa: PLR2004 - no order of two is remarkable
        return 0.0, 1.0
    score = sum(
        float((np.sign(x[i + 1 :] - x[i]) * np.sign(y[i + 1 :] - y[i])).sum()) for i in range(n - 1)
    )  # a row at a time: a day has 8,640 windows
    ties = [np.unique(values, return_counts=True)[1].astype(float) for values in (x, y)]
    spread = [float((t * (t - 1) * (2 * t + 5)).sum()) for t in ties]
    pairs = [float((t * (t - 1)).sum()) for t in ties]
    triples = [float((t * (t - 1) * (t - 2)).sum()) for t in ties]
    variance = (n * (n - 1) * (2 * n + 5) - sum(spread)) / 18
    variance += triples[0] * triples[1] / (9 * n * (n - 1) * (n - 2))
    variance += pairs[0] * pairs[1] / (2 * n * (n - 1))
    scale = math.sqrt((n * (n - 1) - pairs[0]) * (n * (n - 1) - pairs[1])) / 2
    if variance <= 0 or not scale:
        return 0.0, 1.0
    return score / scale, _normal_above((score - 1) / math.sqrt(variance))


def variance_ratio_above(ratio: float, above: int, below: int) -> float:
    """Return how likely a ratio of variances of so many degrees of freedom is to be as high (F law, approximated).

    The approximation is that of Paulson (1942), which makes a cube root of a variance normal.
    """
    root, a, b = ratio ** (1 / 3), 2 / (9 * above), 2 / (9 * below)
    return _normal_above(((1 - b) * root - (1 - a)) / math.sqrt(b * root**2 + a))


def student_above(t: float, freedom: float) -> float:
    """Return how likely a value of Student's law is to be as high, for any number of degrees of freedom above 0.

    Half the incomplete beta function at freedom / (freedom + t²) (Abramowitz and Stegun, 26.7.1 and 26.5.27).
    """
    if t < 0:
        return 1 - student_above(-t, freedom)
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def student_within(likely: float, freedom: float) -> float:
    """Return the number that a value of Student's law exceeds, up or down, in all but `likely` of the cases."""
    low, high = 0.0, 1.0
    while student_above(high, freedom) > (1 - likely) / 2:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_above(middle, freedom) > (1 - likely) / 2 else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function (its continued fraction: DLMF 8.17.22, by Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction is slow, the other side is fast
        return 1 - _incomplete_beta(1 - x, b, a)
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    fraction = numerator = 1.0
    denominator = 0.0
    for step in range(_TERMS):
        half = step // 2
        term = (
            1.0
            if not step
            else half * (b - half) * x / ((a + step - 1) * (a + step))
            if step % 2 == 0
            else -(a + half) * (a + b + half) * x / ((a + step - 1) * (a + step))
        )
        denominator = 1 / (1 + term * denominator)
        numerator = 1 + term / numerator
        fraction *= numerator * denominator
        if abs(numerator * denominator - 1) < _NEGLIGIBLE:
            break
    return math.exp(log) * (fraction - 1) / a


def _normal_above(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2
