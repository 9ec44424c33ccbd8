"""Limits of a comparison: how much worse than the base a figure may be, in the words of one line.

    allowance = [part ":"] metric [statistic] ("+" | "-") change       ttft p95 +5%      short: output_tokens_per_s -3%

`+` is the most by which the figure may rise, `-` the most by which it may fall: in percent of the base's value, or in
the unit of the figure (`+20ms`). Of failures and goodput, which are shares, percent are points.

Like a limit of a run (`vllm_locust.judgement`) it is judged by what was measured, and says where the interval lies: who
allowed 5 % wants to know of 6 %, clear or not. What was not measured on both sides, or by too few samples, is
inconclusive.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from vllm_locust import limit as limits
from vllm_locust.difference import FEW_SAMPLES, Difference, Word, difference
from vllm_locust.errors import InputError
from vllm_locust.figure import Figure
from vllm_locust.judgement import State
from vllm_locust.limit import Unit
from vllm_locust.quantity import duration_s, format_list, number
from vllm_locust.side import Side

_FORM = re.compile(r"\s*([^+-]*?)\s*([+-])\s*([^+-]*?)\s*")
_EXAMPLE = "ttft p95 +5%"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a figure may rise above its base, or fall below it."""

    scope: str
    """Name of a part; empty means all of them together."""
    figure: Figure
    rises: bool
    """Whether it is a rise that has a limit."""
    most: float
    """The most of it, in the unit of the figure unless it is relative."""
    relative: bool
    """Whether it is a share of the base's value."""
    text: str

    def met_by(self, row: Difference) -> bool:
        """Tell whether a difference whose values are known is within it."""
        change, most = row.change or 0.0, self.most * (row.base or 0.0) if self.relative else self.most
        return (change if self.rises else -change) <= most


@dataclass(frozen=True, slots=True)
class Judged:
    """An allowance, and what was measured."""

    allowance: Allowance
    state: State
    text: str


def parse(text: str, *, where: str = "--limit") -> Allowance:
    """Parse one; raises `InputError`, which names `where`."""
    begun, scope, body = limits.scoped(text, None, where)
    match = _FORM.fullmatch(body)
    if match is None:
        raise InputError(f"{begun} not one change; write it like {_EXAMPLE!r}: + is a rise, - a fall")
    sign, change = match[2], match[3]
    figure = Figure(*limits.measured(match[1], begun, f"{sign}{change}"))
    relative = change.endswith("%") and figure.unit is not Unit.SHARE
    most = _most(figure, change, begun.removesuffix(":"))
    what = f"{scope}: " if scope else ""
    return Allowance(
        scope=scope,
        figure=figure,
        rises=sign == "+",
        most=most,
        relative=relative,
        text=f"{what}{figure.metric} {figure.statistic}".rstrip() + f" {sign}{change}",
    )


def _most(figure: Figure, change: str, where: str) -> float:
    if change.endswith("%"):
        return number(change.removesuffix("%"), where=where) / 100
    match figure.unit:
        case Unit.SHARE:
            raise InputError(f"{where}: {change!r} of a share; write it in points of percent, like 0.5%")
        case Unit.SECONDS:
            if change.replace(",", "").replace(".", "").isdigit():
                raise InputError(f"{where}: {change!r} has no unit; write it like 5% or 20ms")
            return duration_s(change, where=where)
    return number(change.removesuffix("/s"), where=where)


def check_parts(allowances: Collection[Allowance], parts: Collection[str], where: str = "--limit") -> None:
    """Refuse an allowance for a part that neither side has."""
    for one in allowances:
        if one.scope and one.scope not in parts:
            raise InputError(
                f"{where}: {one.text!r}: no part {one.scope!r}; there are {format_list((*parts, limits.ALL))}"
            )


def judge(one: Allowance, base: Side, new: Side) -> Judged:
    """Judge an allowance by two sides."""
    row = difference(base, new, one.figure, one.scope)
    if row is None or row.word is Word.INCOMPARABLE:
        return Judged(one, State.INCONCLUSIVE, f"not measured: {row.note if row else 'neither side has it'}")
    where = "" if row.low is None else f" (95 % CI {row.interval})"
    text = f"{one.figure.shown(row.base)} to {one.figure.shown(row.new)}, {row.shown(row.change)}{where}"
    if row.note == FEW_SAMPLES:
        return Judged(one, State.INCONCLUSIVE, f"{row.note}: {text}")
    return Judged(one, State.MET if one.met_by(row) else State.MISSED, text)
