"""When requests leave in an open loop: a schedule is a pure function of (process, rate profile, seed).

A process of unit rate (constant: 0, 1, 2, …; Poisson; gamma, whose gaps are burstier or smoother) is warped by the
profile: the k-th request leaves when the integral of the rate reaches the k-th point of the process. A trace is what it
says. Every rank walks through the whole schedule and takes its share of it, so no two have to talk.

Workers on different machines must compute the same schedule, to the last bit: hence `vllm_locust.draws`, and here only
arithmetic that IEEE 754 rounds alike everywhere. Points are whole quanta, so nothing drifts however many are added up.

What it does not do: read a clock, send anything, or know of users.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_locust import draws
from vllm_locust.errors import InputError
from vllm_locust.quantity import NS_PER_S, format_list

Ints: TypeAlias = NDArray[np.int64]

PROCESSES = ("constant", "poisson", "gamma", "trace")

_QUANTUM = 1 << 30
"""So many quanta are one arrival; what rounding to them may shift, at one request in three minutes, is 0.1 µs."""
_MOST = 1 << 32
"""Arrivals of a schedule; their quanta fit 64 bits, with room for one more chunk."""
_HORIZON_NS = 1 << 62
"""146 years; nothing is later."""
_CHUNK = 1024
"""Numbers drawn at a time: enough to be fast, and done within a fraction of a millisecond, as streams wait for it."""
_RATES_PER_S = (1e-6, 1e6)
_BURSTINESS = (1e-6, 1e6)
"""Between them, gaps fit 64 bits, and rounding harms no sample that is drawn."""
_LINE = '{"at_s": 1.25} (seconds) or {"timestamp": 1250} (milliseconds)'
_KEYS_NS = {"at_s": NS_PER_S, "timestamp": 1_000_000}


class Segment(msgspec.Struct, frozen=True):
    """One stretch of a rate profile; its end belongs to the next one."""

    rate_per_s: float
    """At its end; throughout, unless it ramps."""
    length_ns: int | None = None
    """None: for ever, which only the last one may be."""
    ramp: bool = False
    """From the rate before it (0 for the first one) in a straight line to its own."""

    def __post_init__(self) -> None:
        """Refuse what no stretch can be."""
        low, high = _RATES_PER_S
        if self.rate_per_s != 0 and not low <= self.rate_per_s <= high:
            raise InputError(f"rate {self.rate_per_s}/s: expected 0, or from {low} to {high:,.0f} per second")
        if self.length_ns is None:
            if self.ramp:
                raise InputError(f"a ramp to {self.rate_per_s}/s needs a length")
        elif not 0 < self.length_ns < _HORIZON_NS:
            raise InputError(f"a stretch of {self.length_ns} ns: expected more than none, and less than 146 years")


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, as a value; `offsets_ns` unfolds it."""

    process: str = "poisson"
    """One of `PROCESSES`."""
    profile: tuple[Segment, ...] = ()
    """Empty for a trace alone; after its last stretch the last rate holds on."""
    burstiness: float = 1.0
    """Gamma's shape, as in `vllm bench serve`: 1 is Poisson, below it is burstier; the mean gap stays the same."""
    seed: int = 0
    trace_ns: bytes = b""
    """Offsets of a trace as `read_trace` returns them: ascending, int64, little-endian, its speed applied."""

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        if self.process not in PROCESSES:
            raise InputError(f"arrivals {self.process!r}: expected one of {format_list(PROCESSES)}")
        if (self.process == "trace") != bool(self.trace_ns) or (self.process == "trace") == bool(self.profile):
            raise InputError(
                f"{self.process} arrivals: a trace needs its offsets alone, all others a rate profile alone"
            )
        if not -(1 << 63) <= self.seed < 1 << 64:  # what msgpack carries
            raise InputError(f"seed {self.seed}: expected a whole number of at most 64 bits")
        if not _BURSTINESS[0] <= self.burstiness <= _BURSTINESS[1]:
            low, high = _BURSTINESS
            raise InputError(f"burstiness {self.burstiness}: expected a number from {low} to {high:,.0f}")
        if self.profile:
            _check_profile(self.profile)


def _check_profile(profile: tuple[Segment, ...]) -> None:
    if any(segment.length_ns is None for segment in profile[:-1]):
        raise InputError("rate profile: only its last stretch may have no length")
    if all(segment.rate_per_s == 0 for segment in profile):
        raise InputError("rate profile: every rate in it is 0; nothing would ever be sent")
    if sum(segment.length_ns or 0 for segment in profile) >= _HORIZON_NS:
        raise InputError("rate profile: expected less than 146 years in all")
    if sum(_mean_rate(stretch) * stretch.length_ns / NS_PER_S for stretch in _stretches(profile)[:-1]) > _MOST:
        raise InputError(f"rate profile: expected at most {_MOST:,} arrivals before its last rate")


def offsets_ns(arrivals: Arrivals) -> Iterator[int]:
    """Yield when each request leaves, in ns since the start, ascending.

    Endless, unless the trace ends, the profile ends with rate 0, or four billion requests have left.
    """
    for offsets in _chunks(arrivals):
        yield from offsets.tolist()


def slice_of(arrivals: Arrivals, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (k, offset in ns) of those requests that are a rank's: k = rank, rank + ranks and so on."""
    k = rank
    before = 0
    for offsets in _chunks(arrivals):
        for offset in offsets[k - before :: ranks].tolist():
            yield k, offset
            k += ranks
        before += len(offsets)


class _Stretch(NamedTuple):
    """A segment that knows where it begins."""

    begin_ns: int
    length_ns: int
    from_per_s: float
    to_per_s: float


def _stretches(profile: tuple[Segment, ...]) -> list[_Stretch]:
    """Return all of a profile, and the rate that holds on after it."""
    stretches = []
    begin_ns, rate = 0, 0.0
    for segment in (*profile, Segment(profile[-1].rate_per_s)):
        length_ns = _HORIZON_NS - begin_ns if segment.length_ns is None else segment.length_ns
        stretches.append(
            _Stretch(begin_ns, length_ns, rate if segment.ramp else segment.rate_per_s, segment.rate_per_s)
        )
        begin_ns, rate = begin_ns + length_ns, segment.rate_per_s
        if segment.length_ns is None:
            break
    return stretches


def _mean_rate(stretch: _Stretch) -> float:
    return (stretch.from_per_s + stretch.to_per_s) / 2


class _Piece(NamedTuple):
    """A stretch with the integral of the rate at its begin (which belongs to it) and at its end, in quanta.

    Whole quanta, so that a request that is due when a pause begins leaves after it, whatever a product was rounded to.
    """

    begin: int
    end: int
    stretch: _Stretch


def _pieces(profile: tuple[Segment, ...]) -> list[_Piece]:
    pieces: list[_Piece] = []
    begin = 0
    *before, last = _stretches(profile)
    for stretch in before:
        end = begin + round(_mean_rate(stretch) * (stretch.length_ns / NS_PER_S) * _QUANTUM)
        pieces.append(_Piece(begin, end, stretch))
        begin = end
    return [*pieces, _Piece(begin, 2 * _MOST * _QUANTUM - 1, last)] if last.to_per_s else pieces


def _chunks(arrivals: Arrivals) -> Iterator[Ints]:
    """Yield the whole schedule, in arrays."""
    if arrivals.process == "trace":
        yield np.frombuffer(arrivals.trace_ns, "<i8").astype(np.int64)
        return
    pieces = _pieces(arrivals.profile)
    latest = np.int64(0)
    for points in _points(arrivals):
        offsets = _warped(points, pieces)
        if offsets.size:
            # Rounding may turn two requests around that leave within one nanosecond.
            offsets = np.maximum.accumulate(np.maximum(offsets, latest))
            latest = offsets[-1]
            yield offsets
        if offsets.size < points.size:
            return


def _warped(points: Ints, pieces: list[_Piece]) -> Ints:
    """Return the offsets of those points that the profile reaches."""
    edges = np.searchsorted(points, [*(piece.begin for piece in pieces), pieces[-1].end])
    parts = zip(pieces, edges, edges[1:], strict=False)
    return np.concatenate([_inverse_ns(piece, points[begin:end]) for piece, begin, end in parts])


def _inverse_ns(piece: _Piece, points: Ints) -> Ints:
    """Return when the integral of the rate reaches points that are in this piece."""
    begin_ns, length_ns, first, last = piece.stretch
    if first <= last:
        return begin_ns + _climb_ns(points - piece.begin, first, last, length_ns)
    # A fall is a climb from behind; from its begin, a small difference of large numbers would decide about its end.
    return begin_ns + length_ns - _climb_ns(piece.end - points, last, first, length_ns)


def _climb_ns(quanta: Ints, low: float, high: float, length_ns: int) -> Ints:
    """Return how long it takes to collect quanta at a rate that does not fall: low·t + slope·t²/2, solved for t."""
    arrivals = quanta / _QUANTUM
    slope = (high - low) / (length_ns / NS_PER_S)
    both = low + np.sqrt(low * low + 2 * slope * arrivals)
    taken_s = 2 * arrivals / np.maximum(both, 1e-300)  # none takes no time, at rate 0 too
    return np.minimum(np.rint(taken_s * NS_PER_S), length_ns).astype(np.int64)


def _points(arrivals: Arrivals) -> Iterator[Ints]:
    """Yield the process of unit rate, in quanta and in arrays."""
    at, end = 0, _MOST * _QUANTUM
    if arrivals.process == "constant":
        for begin in range(0, end, _CHUNK * _QUANTUM):
            yield np.arange(begin, begin + _CHUNK * _QUANTUM, _QUANTUM)
        return
    shape = arrivals.burstiness if arrivals.process == "gamma" else 1.0
    draw = draws.uniforms("arrivals", arrivals.seed, _CHUNK)
    while at < end:
        if shape == 1:
            gaps = draws.exponential(next(draw))
        else:
            gaps = draws.gamma(shape, next(draw), next(draw), next(draw)) / shape
        if gaps.size:
            points = at + np.cumsum(np.rint(gaps * _QUANTUM).astype(np.int64))
            at = int(points[-1])
            yield points


class _BadLineError(Exception):
    """Why a line of a trace cannot be used."""


def read_trace(path: Path, speed: float) -> bytes:
    """Read a trace: JSON lines with `at_s` or, as Mooncake's traces have it, `timestamp` in milliseconds.

    Offsets count from the first line, wherever it begins; at speed 2 they come twice as fast. Other keys, blank lines
    and a byte order mark are passed over. Raises `InputError` that names file, line, value and what is accepted.
    """
    if not 0 < speed < math.inf:
        raise InputError(f"{path}: at speed {speed}: expected a number above 0; 2 is twice as fast")
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    key: str | None = None
    instants_ns: list[int] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                key, instant_ns = _instant_ns(line, key)
                instants_ns.append(instant_ns)
                _check_order(instants_ns, speed)
            except _BadLineError as reason:
                raise InputError(f"{path}:{number}: {reason}") from None
    if not instants_ns:
        raise InputError(f"{path}: no arrival in it; expected lines like {_LINE}")
    return np.array([round((at_ns - instants_ns[0]) / speed) for at_ns in instants_ns], "<i8").tobytes()


def _check_order(instants_ns: list[int], speed: float) -> None:
    """Refuse the last one where it cannot follow those before it."""
    if instants_ns[-1] < instants_ns[max(0, len(instants_ns) - 2)]:
        raise _BadLineError("earlier than the line before it; expected lines in the order of their times")
    if instants_ns[-1] - instants_ns[0] >= _HORIZON_NS * speed:
        raise _BadLineError(f"more than 146 years after the first one, at speed {speed:g}")


def _instant_ns(line: bytes, known: str | None) -> tuple[str, int]:
    """Return under which key a line has its time (that of the lines before, if there are any), and the time."""
    try:
        row: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadLineError(f"not JSON: {error}; expected {_LINE}") from None
    keys = [key for key in _KEYS_NS if key in row] if isinstance(row, dict) else []
    if len(keys) != 1:
        there = "both keys" if keys else "no time" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise _BadLineError(f"{there}; expected {_LINE}")
    key, value = keys[0], row[keys[0]]
    if known not in (None, key):
        raise _BadLineError(f"`{key}` after lines with `{known}`; expected the same key in all of them")
    if type(value) not in (int, float) or value < 0:
        raise _BadLineError(f"`{key}` is {value!r:.40}; expected a number of at least 0, like {_LINE}")
    return key, value * _KEYS_NS[key] if isinstance(value, int) else round(value * _KEYS_NS[key])
