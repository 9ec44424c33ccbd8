"""Limits: what a run has to meet, and what a good request does, in the words of one line.

    limit    = [part ":"] metric [statistic] comparison quantity       short: ttft p95 < 300ms
    goodput  = [part ":"] metric ("<" | "<=") duration {"," ...}       long: ttft < 2s, tpot < 50ms

Without a part, or with `all` as its name, a limit is on all parts together, and those of a good request hold for each
part that has none of its own on the same metric. Metrics with a statistic (mean, min, max or a percentile like p99.9)
are those of `vllm_locust.timeline.METRICS`; plain ones are in `PLAIN`.

Promise: a limit prints itself in a form that is parsed into the same limit, and what is refused is named with what is
accepted instead. How a run is judged by them is in `vllm_locust.judgement`.
"""

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

import msgspec

from vllm_locust.errors import InputError
from vllm_locust.quantity import NS_PER_S, duration_s, format_list, number, share
from vllm_locust.timeline import METRICS

ALL = "all"
"""How a scope is written that means all parts together."""
SEPARATOR = ";"
"""Between limits of one text, as an environment variable or a field of a form has them."""
REQUEST_METRICS = ("ttft", "tpot", "e2el", "itl_max", "ttft_scheduled", "e2el_scheduled")
"""What a good request can be held to: all that has one value per request, or a worst one."""

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_LIMIT = re.compile(r"\s*([^<>=]*?)\s*(<=|>=|<|>)\s*([^<>=]*?)\s*")
_PERCENTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,3})?)")
_NEXT = re.compile(r",(?!\s*[0-9])")
"""A comma between limits, and not within a number."""
_EXAMPLE = "short: ttft p95 < 300ms"
_GOOD_EXAMPLE = "ttft < 300ms, tpot < 50ms"
_STATISTICS = "mean, min, max or a percentile like p95 or p99.9"
_UNITS_S = (("s", 1), ("ms", 1000), ("us", 1_000_000), ("ns", NS_PER_S))


class Unit(StrEnum):
    """What the bound of a limit is in."""

    SECONDS = "seconds"
    TOKENS = "tokens"
    SHARE = "share"
    """From 0 to 1, written in percent."""
    PER_S = "per_s"


PLAIN = {
    "failures": Unit.SHARE,
    "goodput": Unit.SHARE,
    "request_per_s": Unit.PER_S,
    "input_tokens_per_s": Unit.PER_S,
    "output_tokens_per_s": Unit.PER_S,
}
"""Metrics without a statistic; `goodput` is a share of all that were due in percent, and per second else."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit; the text of it is its canonical form."""

    metric: str
    comparison: str
    bound: float
    """In seconds, tokens, per second, or a share from 0 to 1."""
    unit: Unit
    scope: str = ""
    """Name of a part; empty means all of them together."""
    statistic: str = ""

    def __str__(self) -> str:
        """Return what `parse` makes the same limit of."""
        return f"{self.scope}: {self.unscoped}" if self.scope else self.unscoped

    @property
    def subject(self) -> str:
        """What is limited: scope, metric and statistic."""
        what = f"{self.metric} {self.statistic}".rstrip()
        return f"{self.scope}: {what}" if self.scope else what

    @property
    def condition(self) -> str:
        """Comparison and bound."""
        return f"{self.comparison} {self.quantity}"

    @property
    def quantile(self) -> float | None:
        """What part of the samples lies below the percentile, absent for another statistic."""
        return quantile(self.statistic)

    @property
    def bound_ns(self) -> int:
        """The bound of a duration."""
        return round(self.bound * NS_PER_S)

    def met_by(self, value: float) -> bool:
        """Tell whether a value, in the unit of the bound, meets the limit; +inf is one."""
        return bool(_COMPARISONS[self.comparison](value, self.bound))

    @property
    def unscoped(self) -> str:
        """The text without the scope."""
        return f"{self.metric} {self.statistic}".rstrip() + f" {self.condition}"

    @property
    def quantity(self) -> str:
        """The bound with its unit."""
        exact = Decimal(repr(self.bound))
        if self.unit is Unit.SHARE:
            return f"{_plain(exact * 100)}%"
        if self.unit is Unit.SECONDS:
            unit, scale = next((u for u in _UNITS_S if exact * u[1] >= 1), _UNITS_S[0])
            return f"{_plain(exact * scale)}{unit}"
        return f"{_plain(exact)}{'/s' if self.metric == 'goodput' else ''}"


def _plain(value: Decimal) -> str:
    """Print all digits, with thousands apart."""
    return f"{value.normalize():,f}"


class Goodput(msgspec.Struct, frozen=True):
    """What an ok request has to meet in order to be a good one."""

    limits: tuple[Limit, ...]

    def of(self, part: str) -> tuple[Limit, ...]:
        """Return what a request of a part has to meet: the part's own limit on a metric, else that of all parts."""
        general = {limit.metric: limit for limit in self.limits if not limit.scope}
        own = {limit.metric: limit for limit in self.limits if limit.scope == part}
        return tuple((general | own).values())

    @property
    def texts(self) -> tuple[str, ...]:
        """The canonical form: a text for each scope."""
        return tuple(
            (f"{scope}: " if scope else "") + ", ".join(limit.unscoped for limit in self.limits if limit.scope == scope)
            for scope in dict.fromkeys(limit.scope for limit in self.limits)
        )


class Limited(Protocol):
    """What brings limits along, as texts; a `vllm_locust.scenario.Scenario` is one."""

    @property
    def limits(self) -> Sequence[str]:
        """Limits, each with its scope."""

    @property
    def goodput(self) -> Sequence[str]:
        """Limits of good requests, each text with its scope."""


# Parsing


def parse(text: str, *, scope: str | None = None, where: str = "--limit") -> Limit:
    """Parse a limit; where the scope is given, the text has none. `where` names the key or flag in the error."""
    where, scope, body = scoped(text, scope, where)
    match = _match(body, where, _EXAMPLE)
    comparison, quantity = match[2], match[3]
    metric, statistic = measured(match[1], where, f"{comparison} {quantity}")
    return _bounded(where, metric, statistic, comparison, quantity, scope)


def measured(text: str, where: str, rest: str) -> tuple[str, str]:
    """Parse metric and statistic; what follows them, and `where`, which ends in a colon, are for the errors."""
    metric, *statistics = text.lower().split() or [""]
    if metric in PLAIN:
        if statistics:
            raise InputError(f"{where} {metric} has no statistic; write it like {metric} {rest}")
        return metric, ""
    if metric not in METRICS:
        raise InputError(f"{where} no metric {metric!r}; there are {format_list((*METRICS, *PLAIN))}")
    if len(statistics) != 1:
        what = f"{' '.join(statistics)!r} is not one statistic" if statistics else "a statistic is missing"
        raise InputError(f"{where} {what} of {metric}; accepted are {_STATISTICS}")
    return metric, _statistic(statistics[0], where)


def quantile(statistic: str) -> float | None:
    """Return what part of the samples lies below a percentile, absent for another statistic."""
    match = _PERCENTILE.fullmatch(statistic)
    return float(Decimal(match[1]) / 100) if match else None


def parse_good(text: str, *, scope: str | None = None, where: str = "--goodput") -> tuple[Limit, ...]:
    """Parse what a good request has to meet; where the scope is given, the text has none."""
    where, scope, body = scoped(text, scope, where)
    found = []
    for piece in _NEXT.split(body):
        match = _match(piece, where, _GOOD_EXAMPLE)
        metric, comparison, quantity = match[1].lower(), match[2], match[3]
        if metric not in REQUEST_METRICS:
            raise InputError(f"{where} a request has no {metric!r}; it has {format_list(REQUEST_METRICS)}")
        if comparison not in ("<", "<="):
            raise InputError(f"{where} {metric} {comparison} asks for slow requests; accepted are < and <=")
        found.append(_bounded(where, metric, "", comparison, quantity, scope))
    _refuse_twice(found, where)
    return tuple(found)


def split(text: str | None) -> tuple[str, ...]:
    """Return the texts that one has, which an option that was repeated, a variable or a form has gathered."""
    return tuple(piece.strip() for piece in (text or "").split(SEPARATOR) if piece.strip())


def scoped(text: str, scope: str | None, where: str) -> tuple[str, str, str]:
    """Return how errors begin, the scope, and what follows it. A part's name may have colons, the rest has none."""
    begun = f"{where}: {text!r}:"
    before, colon, body = text.rpartition(":")
    if scope is None:
        scope = before.strip()
        if colon and not scope:
            raise InputError(f"{begun} no part before the colon; leave it out, or write {ALL}, for all parts")
    elif colon:
        raise InputError(f"{begun} the key names the part, the text has none; write it like {_EXAMPLE.split(': ')[1]}")
    return begun, "" if scope == ALL else scope, body


def _match(text: str, where: str, example: str) -> re.Match[str]:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise InputError(f"{where} not one comparison; write it like {example!r}, with {format_list(_COMPARISONS)}")
    return match


def _statistic(word: str, where: str) -> str:
    match = _PERCENTILE.fullmatch(word)
    value = Decimal(match[1]) if match else Decimal()
    if word not in ("mean", "min", "max") and not value:
        raise InputError(f"{where} no statistic {word!r}; accepted are {_STATISTICS}")
    return f"p{value.normalize():f}" if value else word


def _bounded(where: str, metric: str, statistic: str, comparison: str, quantity: str, scope: str) -> Limit:  # noqa: PLR0913, PLR0917 - what a limit has
    unit = _unit(metric, quantity)
    if unit is Unit.SECONDS:
        if quantity.replace(",", "").replace(".", "").isdigit():
            raise InputError(f"{where} {quantity!r} has no unit; write it like 300ms or 2s")
        bound = round(duration_s(quantity, where=where[:-1]), 9)
    elif unit is Unit.SHARE:
        bound = share(quantity, where=where[:-1])
    else:
        bound = number(quantity.removesuffix("/s") if unit is Unit.PER_S else quantity, where=where[:-1])
    limit = Limit(metric=metric, statistic=statistic, comparison=comparison, bound=bound, unit=unit, scope=scope)
    if (comparison == "<" and not bound) or (comparison == ">" and unit is Unit.SHARE and bound == 1):
        raise InputError(f"{where} nothing is {limit.condition}; did you mean {comparison}= ?")
    return limit


def _unit(metric: str, quantity: str) -> Unit:
    if metric == "goodput" and "%" not in quantity:
        return Unit.PER_S
    if metric in PLAIN:
        return PLAIN[metric]
    return Unit(METRICS[metric].unit) if metric in METRICS else Unit.SECONDS


# What holds in a run


def of_options(
    limits: str | None, goodput: str | None, scenarios: Iterable[Limited], parts: Collection[str] | None
) -> tuple[tuple[Limit, ...], Goodput | None]:
    """Return the limits of a run and of its good requests, from --limit, --goodput and its scenarios.

    An option replaces what a scenario says of the same scope, metric and statistic. What a scenario says of parts that
    are not sent is left out; an option that names such a part is refused. `parts` are those that are sent, None where
    user classes label requests as they like.
    """
    scenarios = list(scenarios)
    given = [parse(text) for text in split(limits)]
    given_good = [limit for text in split(goodput) for limit in parse_good(text)]
    _refuse_twice(given_good, "--goodput:")
    check_parts(given, parts, "--limit")
    check_parts(given_good, parts, "--goodput")
    loaded = dict.fromkeys(parse(text) for scenario in scenarios for text in scenario.limits)
    loaded_good = dict.fromkeys(
        limit for scenario in scenarios for text in scenario.goodput for limit in parse_good(text)
    )
    _refuse_twice(loaded_good, "goodput of several scenarios:")
    good = Goodput((*_kept(loaded_good, given_good, parts), *given_good))
    every = (*_kept(loaded, given, parts), *dict.fromkeys(given))
    for limit in every:
        covered = good.of(limit.scope) if limit.scope else good.limits
        if limit.metric == "goodput" and not covered:
            of = f" of {limit.scope}" if limit.scope else ""
            raise InputError(
                f"limit {str(limit)!r}: nothing says what a good request{of} is; give --goodput {_GOOD_EXAMPLE!r}"
            )
    return every, good if good.limits else None


def check_parts(limits: Iterable[Limit], parts: Collection[str] | None, where: str) -> None:
    """Refuse a limit on a part that is not there; None where nobody knows which are."""
    for limit in limits:
        if parts is not None and limit.scope and limit.scope not in parts:
            raise InputError(
                f"{where}: {str(limit)!r}: no part {limit.scope!r}; there are {format_list((*parts, ALL))}"
            )


def _kept(loaded: Iterable[Limit], given: Iterable[Limit], parts: Collection[str] | None) -> Iterable[Limit]:
    """Return those limits of scenarios that options do not replace, on parts that are sent."""
    replaced = {_key(limit) for limit in given}
    return [
        limit
        for limit in loaded
        if _key(limit) not in replaced and (parts is None or not limit.scope or limit.scope in parts)
    ]


def _key(limit: Limit) -> tuple[str, ...]:
    """What of two limits makes one replace the other; goodput is two metrics."""
    return limit.scope, limit.metric, limit.statistic, limit.unit


def _refuse_twice(limits: Iterable[Limit], where: str) -> None:
    for (scope, metric), times in Counter((limit.scope, limit.metric) for limit in limits).items():
        if times > 1:
            raise InputError(f"{where} {metric} of {scope or 'all parts'} has several limits; keep one")
