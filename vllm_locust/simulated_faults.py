"""How a simulated server misbehaves on cue: each fault, and what it does to an instant.

Instants are ns on the clock of the faults, which begins with the first streamed request. Where faults meet, their
factors are multiplied and their shares added. Nothing here reads a clock.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

NS_PER_MINUTE = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Stall:
    """The server is frozen: nothing leaves on any stream, and what was to come comes as much later as it lasts."""

    length_ns: int
    begin_ns: int


@dataclass(frozen=True, slots=True)
class Slow:
    """Requests that get their seat in this time take so many times as long to the first token and for every gap."""

    factor: float
    begin_ns: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class Drift:
    """Times to the first token and gaps grow with time: each minute by this share of what they were at first."""

    per_minute: float


@dataclass(frozen=True, slots=True)
class Errors:
    """This share of the streams whose requests come in this time breaks with an error, beside those of the profile."""

    share: float
    begin_ns: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class SlowSeat:
    """The first seat is so many times slower than the others, all the time."""

    factor: float


Fault: TypeAlias = Stall | Slow | Drift | Errors | SlowSeat


def slowness(faults: Iterable[Fault], seated_ns: int, seat: int) -> float:
    """Return how many times as long all takes for a request that got this seat (the first is 0) at this instant."""
    factor = 1.0
    for fault in faults:
        if (isinstance(fault, Slow) and _within(fault, seated_ns)) or (isinstance(fault, SlowSeat) and seat == 0):
            factor *= fault.factor
    return factor


def drift(faults: Iterable[Fault], at_ns: int) -> float:
    """Return how many times as long what begins at this instant takes."""
    grown = (1 + fault.per_minute * at_ns / NS_PER_MINUTE for fault in faults if isinstance(fault, Drift))
    return math.prod(grown)


def ends_ns(faults: Iterable[Fault], begin_ns: int, work_ns: int) -> int:
    """Return when work ends that begins at an instant and goes on whenever no stall holds it up.

    What would end just as a stall begins ends after it, so nothing at all ends within one.
    """
    at_ns, left_ns = begin_ns, work_ns
    stalls = (fault for fault in faults if isinstance(fault, Stall))
    for stall in sorted(stalls, key=lambda stall: stall.begin_ns):
        thawed_ns = stall.begin_ns + stall.length_ns
        if at_ns < thawed_ns and stall.begin_ns <= at_ns + left_ns:
            left_ns -= max(0, stall.begin_ns - at_ns)
            at_ns = thawed_ns
    return at_ns + left_ns


def error_share(faults: Iterable[Fault], at_ns: int) -> float:
    """Return which share of the streams whose requests come at this instant break with an error."""
    return sum(fault.share for fault in faults if isinstance(fault, Errors) and _within(fault, at_ns))


def _within(fault: Stall | Slow | Errors, at_ns: int) -> bool:
    return fault.begin_ns <= at_ns < fault.begin_ns + fault.length_ns
