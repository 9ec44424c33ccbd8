"""Random numbers that are the same on every machine, to the last bit.

They rest on `Random.random`, whose sequence Python promises to keep (it does not promise that of other methods, nor
numpy that of its generators), and on what IEEE 754 rounds alike everywhere: the four basic operations and the square
root. Logarithms are not among it, and numpy has different ones for different processors. One unit in the last place
would be no matter, if it did not now and then turn a rejection round, and with it all that follows. So logarithms and
powers are made here, of those five.
"""

import hashlib
import math
import random
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_LN2 = 0.6931471805599453


def uniforms(purpose: str, seed: int, count: int) -> Iterator[Floats]:
    """Yield arrays of `count` numbers above 0 and below 1; for each purpose, 16 letters at most, independent ones."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16, person=purpose.encode()).digest()
    draw = random.Random(int.from_bytes(digest)).random  # noqa: S311 - no secret
    while True:
        # Odd multiples of 2⁻⁵³, so that neither they nor their distances from 1 are ever 0.
        yield (np.floor(np.array([draw() for _ in range(count)]) * 2.0**52) + 0.5) / 2.0**52


def exponential(uniform: Floats) -> Floats:
    """Return numbers of the exponential distribution with mean 1."""
    return -_log(uniform)


def gamma(shape: float, first: Floats, second: Floats, third: Floats) -> Floats:
    """Return the numbers of a gamma distribution with scale 1 that three uniforms each give, after rejection.

    Best's algorithm XG (Devroye, Non-Uniform Random Variate Generation, 1986, page 410) for a shape above 1; else a
    number of shape + 1 times a uniform one to the power of 1 / shape (page 420): they need logarithms and roots alone.
    """
    above = shape if shape > 1 else shape + 1
    b, c = above - 1, 3 * above - 0.75
    w = first * (1 - first)
    y = np.sqrt(c / w) * (first - 0.5)
    positive = b + y > 0
    x = np.where(positive, b + y, 1.0)
    accepted = positive & (_log(64 * w * w * w * second * second) <= 2 * (b * _log(x / b) - y))
    numbers = x[accepted]
    return numbers if shape > 1 else numbers * _exp(_log(third[accepted]) / shape)


def _log(x: Floats) -> Floats:
    """Return natural logarithms of positive numbers, within a few units in the last place."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    s = (mantissa - 1) / (mantissa + 1)
    square, series = s * s, np.zeros_like(s)
    for odd in range(23, 0, -2):  # log m = 2 artanh s = 2 (s + s³/3 + s⁵/5 + …), s at most 0.172
        series = series * square + 1 / odd
    logarithm: Floats = exponent * _LN2 + 2 * s * series
    return logarithm


def _exp(x: Floats) -> Floats:
    """Return powers of e of numbers that are not positive; relative error below 1e-12."""
    x = np.maximum(x, -700.0)  # as good as nothing, and still a normal number
    halvings = np.rint(x / _LN2)
    rest = x - halvings * _LN2
    series = np.ones_like(x)
    for n in range(14, 0, -1):  # 1 + r (1 + r/2 (1 + r/3 (…))), r at most 0.35
        series = 1 + series * rest / n
    power: Floats = np.ldexp(series, halvings.astype(np.int32))
    return power
