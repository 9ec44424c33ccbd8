"""Durations, rates, counts and shares as people write them: `300ms`, `5m`, `1.2 s`, `8,000`, `5%`.

Parsing accepts what printing produces. Inside the program a duration is a float of seconds or an integer of
nanoseconds; the unit is in the name.
"""

import math
import re
from collections.abc import Iterable
from decimal import Decimal

from vllm_locust.errors import InputError

NS_PER_S = 1_000_000_000

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = re.compile(_DIGITS)
_PART = re.compile(rf"\s*({_DIGITS})\s*(ns|us|µs|ms|min|s|m|h)?")


def duration_s(text: str | float, *, where: str = "duration") -> float:
    """Parse `300ms`, `5m`, `1m30s` or plain seconds into seconds; `where` names the key or flag in the error."""
    if isinstance(text, int | float):
        if not 0 <= text < math.inf:
            raise InputError(f"{where}: {text} is no duration; give seconds or something like 300ms, 30s, 5m")
        return float(text)
    total_s, position, parts = 0.0, 0, 0
    stripped = text.strip()
    while position < len(stripped):
        match = _PART.match(stripped, position)
        if match is None or (match[2] is None and (parts or match.end() != len(stripped))):
            break
        total_s += float(match[1].replace(",", "")) * _UNITS_S[match[2] or "s"]
        position, parts = match.end(), parts + 1
    if not parts or position < len(stripped) or not math.isfinite(total_s):
        raise InputError(f"{where}: {text!r} is not a duration; write it like 300ms, 30s, 5m or 1m30s")
    return total_s


def share(text: str | float, *, where: str = "share") -> float:
    """Parse `5%` or `0.05` into a share from 0 to 1; `where` names the key or flag in the error."""
    digits, percent, rest = str(text).strip().partition("%")
    try:
        # Not float(digits) / 100: 0.7 % would be a little less than 7 of 1,000.
        value = float(Decimal(digits) / (100 if percent else 1))
    except ArithmeticError:
        value = math.nan
    if not 0 <= value <= 1 or rest:
        raise InputError(f"{where}: {text!r} is not a share; write it like 5% or 0.05, from 0% to 100%")
    return value


def number(text: str, *, where: str = "number") -> float:
    """Parse `8,000` or `0.5`; `where` names the key or flag in the error."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[0].replace(",", "")) if match else math.inf
    if math.isinf(value):
        raise InputError(f"{where}: {text!r} is not a number; write it like 8,000 or 0.5")
    return value


def format_duration(seconds: float | None) -> str:
    """Print a duration with three significant digits: `8.40 ms`, `1.25 s`; absent is a dash."""
    if seconds is None:
        return "–"
    if seconds < 1e-6:  # noqa: PLR2004 - a microsecond
        return f"{seconds * 1e9:.0f} ns"
    for limit_s, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit_s * 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_milliseconds(seconds: float | None) -> str:
    """Print a duration in milliseconds without its unit, for the columns of a table that share it."""
    return "–" if seconds is None else _three_digits(seconds * 1e3)


def format_count(number: float | None) -> str:
    """Print a count: `8,000`, `1.25 M`; absent is a dash."""
    if number is None:
        return "–"
    if number >= 1e7:  # noqa: PLR2004 - below, all digits fit a column
        return f"{_three_digits(number / 1e6)} M"
    return f"{number:,.0f}"


def format_rate(per_s: float | None) -> str:
    """Print a rate per second with three significant digits; absent is a dash."""
    return "–" if per_s is None else _three_digits(per_s)


def format_share(part: float, whole: float) -> str:
    """Print a share in percent; something is never printed as nothing, nor all but everything as all."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.05:  # noqa: PLR2004 - would round to 0.0
        return "< 0.1 %"
    if 99.95 <= percent < 100:  # noqa: PLR2004 - would round to 100.0
        return "> 99.9 %"
    return f"{percent:.1f} %"


def format_number(value: float | str | None, width: int) -> str:
    """Print a number with three digits at least, in `width` columns (5 at least) however large; a word as it is."""
    if value is None or isinstance(value, str):
        return value or "–"
    plain = f"{value:,}" if isinstance(value, int) else format_rate(value)
    for scale, suffix in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if len(plain) <= width:
            return plain
        plain = format_rate(value / scale) + suffix
    return plain if len(plain) <= width else f"{value:.0e}"


def format_list(names: Iterable[object]) -> str:
    """Print the accepted set of an error message."""
    return ", ".join(str(name) for name in names) or "none"


def _three_digits(value: float) -> str:
    if value >= 99.95:  # noqa: PLR2004 - three digits stand before the point
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"  # noqa: PLR2004
