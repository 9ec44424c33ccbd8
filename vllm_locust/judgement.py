"""Limits, judged by what a run measured: met, missed, or inconclusive.

Promise: nothing gains by failing. A request that failed, or was never sent because too many were in flight, counts as
infinitely late; one that the end of the run cut counts with its age if that is beyond the limit already, and is left
out and counted else. What was measured by too few samples, or not at all, is never met: it is inconclusive, unless
even its confidence interval lies beyond the limit. The definitions are in docs/metrics.md.

The interval of a percentile is between two samples, whose ranks follow from the binomial law of how many samples lie
below it, whatever their distribution (Conover: Practical Nonparametric Statistics, section 3.2; Hahn and Meeker:
Statistical Intervals, section 5.2); that of a share is Wilson's score interval (JASA 22, 1927). Both are two-sided,
of 95 %, and take requests as independent of each other. Gaps of one request are not, so percentiles of gaps have the
interval of as many samples as there were requests.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from vllm_locust.cell import Cell
from vllm_locust.histogram import Histogram
from vllm_locust.limit import Limit, Unit
from vllm_locust.quantity import NS_PER_S, format_count, format_duration, format_rate, format_share
from vllm_locust.timeline import CUT

CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2
_Z = 1.959963985
"""Standard deviations of a normal law within which `CONFIDENCE` of it lies."""
_OF_GAPS = ("itl", "itl_token")
_SAMPLES = dict.fromkeys(_OF_GAPS, "gaps") | {"connect": "connections", "tpot": "answers"}
"""What a metric has a sample of each of, where that is not a request."""
_ABSENT = {
    "queue": "arrivals of an open loop alone have it",
    "ttft_scheduled": "arrivals of an open loop alone have it",
    "e2el_scheduled": "arrivals of an open loop alone have it",
    "itl_token": "--continuous-usage asks the server for it",
    "ttfc": "answers with reasoning alone have it",
    "cached_tokens": "the server tells nothing of it",
}
"""Why a metric may have no sample."""
_SERVER = "lower the load, or see what the server waits for"
_ADVICE = {
    **dict.fromkeys(("ttft", "ttft_scheduled", "ttfc"), f"{_SERVER}: its queue, or the prefill of long prompts"),
    **dict.fromkeys(("itl", "itl_max", "itl_token", "tpot"), f"{_SERVER}: its batch size, prefill in between"),
    **dict.fromkeys(("e2el", "e2el_scheduled"), f"{_SERVER}, or ask for shorter answers"),
    "queue": "the generator sent late: add workers, or see the line Fidelity",
    "connect": "see the network, or keep connections (--connection keep-alive)",
    **dict.fromkeys(("input_tokens", "output_tokens", "cached_tokens"), "see the prompts and lengths of the scenario"),
    "failures": "see the outcomes",
    "goodput": "lower the load, or see which of its limits the latencies miss",
    **dict.fromkeys(
        ("request_per_s", "input_tokens_per_s", "output_tokens_per_s"),
        "raise the load if streams were few, else the server is at its end",
    ),
}
"""What to do where a limit on a metric is missed."""
_LONGER = "run longer"
_LEAVE_OUT = "leave it out"


class State(StrEnum):
    """What is said of a limit."""

    MET = "met"
    MISSED = "missed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A limit, and what was measured; numbers are in the unit of its bound, +inf is a failure."""

    limit: Limit
    state: State
    measured: float | None
    low: float | None
    """Ends of the confidence interval, absent where the samples give none."""
    high: float | None
    samples: int
    text: str
    """What was measured, for people."""
    advice: str = ""
    """What to do, unless it was met."""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        numbers = {"bound": self.limit.bound, "measured": self.measured, "low": self.low, "high": self.high}
        return {
            "limit": str(self.limit),
            **{name: getattr(self.limit, name) for name in ("scope", "metric", "statistic", "comparison")},
            "unit": str(self.limit.unit),
            "state": str(self.state),
            **{name: "failed" if value == math.inf else value for name, value in numbers.items()},
            "samples": self.samples,
            "text": self.text,
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """What a limit is held against."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    needed: int = 1
    """Samples without which the value says too little."""
    of: str = "requests"
    notes: tuple[str, ...] = ()
    absent: str = ""
    """Why there is no value."""


def judge(limit: Limit, steady: Cell, scope: Mapping[str, Any]) -> Judged:
    """Judge a limit by the steady cell of its scope and what `vllm_locust.summary` says of the scope."""
    if limit.metric == "failures":
        failed = scope["failed"]
        measured = _share(limit, failed, failed + scope["outcomes"]["ok"])
    elif limit.metric == "goodput" and limit.unit is Unit.SHARE:
        measured = _share(limit, steady.counters.get("good", 0), due(steady))
    elif limit.unit is Unit.PER_S:
        name = "goodput_per_s" if limit.metric == "goodput" else limit.metric
        measured = _Measurement(value=scope["rates"][name] if scope["requests"] else None, samples=scope["requests"])
    else:
        measured = _of_samples(limit, steady, scope)
    return _judged(limit, measured)


def due(steady: Cell) -> int:
    """Return how many requests should have been answered: all that were to be sent, but for those that the end cut.

    In an excerpt of a run more may have ended than were sent in it, and these were due, too.
    """
    counters = steady.counters
    ended = {name: number for name, number in counters.items() if name.startswith("outcome|")}
    cut = sum(number for name, number in ended.items() if name.startswith("outcome|cancelled|"))
    return max(counters.get("sent", 0), sum(ended.values())) + counters.get("dropped", 0) - cut


def _judged(limit: Limit, found: _Measurement) -> Judged:
    if found.value is None:
        text = f"not measured: {found.absent or 'no request that counts'}"
        state, advice = State.INCONCLUSIVE, _LEAVE_OUT if found.absent else _LONGER
    else:
        text = f"{_shown(limit, found.value)} ({', '.join(_details(limit, found))})"
        state = State.MET if limit.met_by(found.value) else State.MISSED
        advice = "" if state is State.MET else _ADVICE[limit.metric]
        if found.samples < found.needed and not (state is State.MISSED and _beyond(limit, found)):
            text = f"too few samples: {text}, {format_count(found.needed)} are needed"
            state, advice = State.INCONCLUSIVE, _LONGER
    return Judged(
        limit=limit,
        state=state,
        measured=found.value,
        low=found.low,
        high=found.high,
        samples=found.samples,
        text=text,
        advice=advice,
    )


def _beyond(limit: Limit, found: _Measurement) -> bool:
    """Tell whether the limit is missed wherever in the interval the truth is."""
    low, high = (0.0 if found.low is None else found.low), (math.inf if found.high is None else found.high)
    return not limit.met_by(low) and not limit.met_by(high)


# Samples


def _of_samples(limit: Limit, steady: Cell, scope: Mapping[str, Any]) -> _Measurement:
    samples, failed, left_out = _with_failures(limit, steady, scope)
    number = samples.count + failed
    if not number:
        return _Measurement(absent=_ABSENT.get(limit.metric, ""))
    notes = (
        f"{format_count(failed)} of them failed" if failed else "",
        f"{format_count(left_out)} cut by the end left out" if left_out else "",
    )
    of = _SAMPLES.get(limit.metric, "requests")
    ends: list[float | None] = [None, None]
    enough = 1
    quantile = limit.quantile
    if quantile is not None:
        value = samples.percentile(quantile, failed=failed)
        ends = _interval(samples, quantile, failed, _independent(limit, steady, number))
        enough = needed(quantile)
    elif limit.statistic == "mean":
        value = math.inf if failed else samples.mean
        enough = 2  # one sample has no mean to speak of
    elif limit.statistic == "max":
        value = math.inf if failed else samples.max
    else:
        value = math.inf if samples.min is None else samples.min
    low, high = (_in_unit(limit, end) for end in ends)
    return _Measurement(
        value=_in_unit(limit, value), low=low, high=high, samples=number, needed=enough, of=of, notes=notes
    )


def _with_failures(limit: Limit, steady: Cell, scope: Mapping[str, Any]) -> tuple[Histogram, int, int]:
    """Return the samples, how many more are infinitely late, and how many cut requests are left out.

    A cut request that is older than the limit has its age among the samples: its value is no smaller.
    """
    metric = limit.metric.removesuffix("_scheduled")
    samples = steady.histograms.get(limit.metric, Histogram())
    if metric not in CUT:
        return samples, 0, 0
    failed = scope["judged"][metric]["failed"]
    if limit.metric != metric and not (steady.histograms.get("queue") or steady.counters.get("dropped")):
        return samples, 0, 0  # a closed loop has no schedule
    cut, samples = steady.histograms.get(CUT[metric], Histogram()), samples.copy()
    older = [(age_ns, number) for age_ns, number in cut if age_ns > limit.bound_ns]
    for age_ns, number in older:
        samples.add(round(age_ns), number)
    return samples, failed, cut.count - sum(number for _, number in older)


def _independent(limit: Limit, steady: Cell, number: int) -> int:
    """Return how many samples tell something of their own."""
    if limit.metric not in _OF_GAPS:
        return number
    requests = steady.histograms.get("itl_max", Histogram()).count
    return min(number, requests or number)


def _interval(samples: Histogram, quantile: float, failed: int, number: int) -> list[float | None]:
    """Return the ends of the interval of a percentile, by the ranks of `number` samples."""
    low, high = ranks(quantile, number)
    inside = [rank / number if 1 <= rank <= number else None for rank in (low, high)]
    return [None if place is None else samples.percentile(place, failed=failed) for place in inside]


def ranks(quantile: float, number: int) -> tuple[int, int]:
    """Return the ranks of the samples between which a quantile lies, with a confidence of at least 95 %.

    0 is below the first and `number + 1` above the last one: the samples give no such end. With B, the binomial number
    of samples below the quantile, they are the largest l with P(B < l) <= 2.5 % and the smallest u with
    P(B >= u) <= 2.5 %.
    """
    first, below = _binomial(quantile, number)
    low = first + int(np.searchsorted(below, _TAIL, side="right"))
    high = first + int(np.searchsorted(below, 1 - _TAIL, side="left")) + 1
    return low, min(high, number + 1)


def _binomial(share: float, number: int) -> tuple[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the smallest count that matters, and the probabilities of at most that many and each that follows.

    What is left out lies more than nine standard deviations and ten counts away: less than 1e-15 of the whole. Ratios
    of neighbours are added up as logarithms, so that nothing overflows.
    """
    mean, deviation = number * share, math.sqrt(number * share * (1 - share))
    first = max(0, math.floor(mean - 9 * deviation - 10))
    last = min(number, math.ceil(mean + 9 * deviation + 10))
    counts = np.arange(first, last, dtype=np.float64)
    ratios = np.log((number - counts) / (counts + 1)) + math.log(share / (1 - share))
    logs = np.concatenate(([0.0], ratios.cumsum()))
    weights = np.exp(logs - logs.max())
    return first, weights.cumsum() / weights.sum()


def needed(share: float) -> int:
    """Return how many samples there must be for one of them to be expected beyond a share."""
    rare = min(share, 1 - share)
    return math.ceil(1 / rare - 1e-6) if rare > 0 else 1


# Shares


def _share(limit: Limit, part: int, whole: int) -> _Measurement:
    """Measure a share of requests; a limit closer to all or nothing than one of them is needs more of them."""
    if not whole:
        return _Measurement()
    low, high = wilson(part, whole)
    return _Measurement(value=part / whole, low=low, high=high, samples=whole, needed=needed(limit.bound))


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share."""
    share, square = part / whole, _Z * _Z / whole
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / whole + square / whole / 4) / (1 + square)
    return max(0.0, middle - half) if part else 0.0, min(1.0, middle + half) if part < whole else 1.0


# Texts


def _details(limit: Limit, found: _Measurement) -> list[str]:
    """Return what is said in brackets of a value."""
    interval = ""
    low, high = found.low, found.high
    if low is not None and low < math.inf:
        ends = (
            f"from {_near(limit, low)}"
            if high is None or high == math.inf
            else f"{_near(limit, low)} to {_near(limit, high)}"
        )
        interval = f"95 % CI {ends}"
    elif low is None and high is not None and high < math.inf:
        interval = f"95 % CI up to {_near(limit, high)}"
    if (
        interval
        and found.samples >= found.needed
        and limit.met_by(low or 0.0) != limit.met_by(math.inf if high is None else high)
    ):
        interval += ", which includes the limit"
    one = found.of.removesuffix("s") if found.samples == 1 else found.of
    return [part for part in (interval, f"{format_count(found.samples)} {one}", *found.notes) if part]


def _in_unit(limit: Limit, value: float | None) -> float | None:
    """Return a value of a histogram in the unit of the bound."""
    if value is None or limit.unit is not Unit.SECONDS or math.isinf(value):
        return value
    return round(value / NS_PER_S, 9)


def _shown(limit: Limit, value: float) -> str:
    """Print a value with three digits, or as many as tell it from the limit."""
    near = _near(limit, value)
    if value != limit.bound and near == _near(limit, limit.bound):
        return msgspec.structs.replace(limit, bound=round(value, 9)).quantity
    return near


def _near(limit: Limit, value: float) -> str:
    if math.isinf(value):
        return "failed"
    match limit.unit:
        case Unit.SECONDS:
            return format_duration(value)
        case Unit.SHARE:
            return format_share(value, 1)
        case Unit.PER_S:
            return f"{format_rate(value)}/s"
    return format_rate(value)
