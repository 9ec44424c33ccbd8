"""The little language in which the simulator is told to misbehave: `stall 15s at 100s`, `slow 3x at 60s for 10s`.

A text becomes one of the values of `vllm_locust.simulated_faults`, which say what each does. Times count from the first
streamed request.
"""

import re
from collections.abc import Callable

from vllm_locust.errors import InputError
from vllm_locust.quantity import NS_PER_S, duration_s, share
from vllm_locust.simulated_faults import Drift, Errors, Fault, Slow, SlowSeat, Stall

EXAMPLES = {
    "stall 15s at 100s": "nothing leaves on any stream from 100 s on, for 15 s; the rest comes as much later",
    "slow 3x at 60s for 10s": "requests that get a seat in this time take three times as long",
    "drift 50% per minute": "first tokens and gaps take half as long again after a minute, twice as long after two",
    "errors 30% at 60s for 10s": "this share of the streams that begin in this time breaks with an error",
    "slow seat 4x": "one seat is four times slower than the others",
}
"""One of each kind, and what it does."""

_LONGEST_S = 10_000 * 3600
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]+)?"
_Parse = Callable[[str, "re.Match[str]"], Fault]


def parse(text: str, *, where: str = "--fault") -> Fault:
    """Parse one fault; raises `InputError` that names what is accepted."""
    for pattern, build in _KINDS:
        match = re.fullmatch(pattern, " ".join(text.split()))
        if match:
            return build(f"{where} {text!r}", match)
    listed = "".join(f"\n  {example}" for example in EXAMPLES)
    raise InputError(f"{where}: {text!r} is no fault; write it like one of{listed}")


def _begin_ns(where: str, match: "re.Match[str]") -> int:
    return _ns(where, match["at"])


def _length_ns(where: str, match: "re.Match[str]") -> int:
    length_ns = _ns(where, match["length"])
    if not length_ns:
        raise InputError(f"{where}: it lasts no time; expected a duration above 0")
    return length_ns


def _ns(where: str, text: str) -> int:
    seconds = duration_s(text, where=where)
    if seconds > _LONGEST_S:
        raise InputError(f"{where}: {text} is too long; expected at most 10,000h")
    return round(seconds * NS_PER_S)


def _factor(where: str, match: "re.Match[str]") -> float:
    factor = float(match["factor"])
    if not factor:
        raise InputError(f"{where}: {match['factor']}x is no factor; expected one above 0, like 3x")
    return factor


def _stall(where: str, match: "re.Match[str]") -> Stall:
    return Stall(_length_ns(where, match), _begin_ns(where, match))


def _slow(where: str, match: "re.Match[str]") -> Slow:
    return Slow(_factor(where, match), _begin_ns(where, match), _length_ns(where, match))


def _drift(_: str, match: "re.Match[str]") -> Drift:
    return Drift(float(match["percent"]) / 100)


def _errors(where: str, match: "re.Match[str]") -> Errors:
    return Errors(share(match["share"], where=where), _begin_ns(where, match), _length_ns(where, match))


def _slow_seat(where: str, match: "re.Match[str]") -> SlowSeat:
    return SlowSeat(_factor(where, match))


_KINDS: tuple[tuple[str, _Parse], ...] = (
    (r"stall (?P<length>.+) at (?P<at>.+)", _stall),
    (rf"slow (?P<factor>{_NUMBER})x at (?P<at>.+) for (?P<length>.+)", _slow),
    (rf"drift (?P<percent>{_NUMBER})% per minute", _drift),
    (r"errors (?P<share>.+) at (?P<at>.+) for (?P<length>.+)", _errors),
    (rf"slow seat (?P<factor>{_NUMBER})x", _slow_seat),
)
