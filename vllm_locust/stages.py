"""The stages of a run as a table: the knee of a server in one look."""

from collections.abc import Sequence
from typing import Any

from vllm_locust.overview import BRIEF
from vllm_locust.quantity import format_number
from vllm_locust.terminal import Column, table

_HEADS = (
    Column("requests/s", "offered"),
    Column("requests/s", "sent"),
    Column("requests/s", "ok"),
    Column("", "streams"),
    Column("", "failed"),
    *BRIEF,
    Column("", "limits"),
)
_STATES = ("missed", "inconclusive", "met")
"""What is said of several limits is what is said of the worst one."""


def stage_table(stages: Sequence[dict[str, Any]], *, rates: bool) -> list[str]:
    """Return a row per stage: of users, or of `rates`; nothing without stages."""
    if not stages:
        return []
    lines = table(heads(rates=rates), rows(stages))
    last = last_met(stages)
    return [*lines, f"the last stage that met its limits: {_named(last)}"] if last is not None else lines


def heads(*, rates: bool) -> tuple[Column, ...]:
    """Return the heads of `rows`, for stages of users or of rates."""
    return (Column("", "stage: requests/s" if rates else "stage: users"), *_HEADS)


def rows(stages: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row per stage."""
    return [_row(stage) for stage in stages]


def last_met(stages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last stage before one that missed a limit, absent where there is no limit, or none was met."""
    last = None
    for stage in stages:
        state = _state(stage)
        if state == "missed":
            break
        last = stage if state == "met" else last
    return last


def _state(stage: dict[str, Any]) -> str:
    found = {limit["state"] for limit in stage["limits"]}
    return next((state for state in _STATES if state in found), "")


def _named(stage: dict[str, Any]) -> str:
    return f"{stage['value']:g}" if stage["value"] is not None else str(stage["stage"])


def _row(stage: dict[str, Any]) -> list[str]:
    rates, ttft, itl = stage["rates"], stage["ttft"], stage["itl"]
    return [
        _named(stage),
        *(format_number(rates[name], 6) for name in ("offered_per_s", "sent_per_s", "request_per_s", "in_flight_mean")),
        format_number(stage["failed"], 6),
        *(format_number(_ms(ttft[key]), 6) for key in ("p50", "p95")),
        *(format_number(_ms(itl[key]), 6) for key in ("mean", "p99")),
        format_number(rates["output_tokens_per_s"], 6),
        _state(stage),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
