"""The stages of a run as a table: the knee of a server in one look."""

from collections.abc import Sequence
from typing import Any

from vllm_locust.quantity import format_number
from vllm_locust.terminal import Column, table

_HEADS = (
    Column("requests/s", "offered"),
    Column("requests/s", "sent"),
    Column("requests/s", "ok"),
    Column("", "streams"),
    Column("", "failed"),
    Column("TTFT [ms]", "p50"),
    Column("TTFT [ms]", "p95"),
    Column("ITL [ms]", "mean"),
    Column("ITL [ms]", "p99"),
    Column("output", "tok/s"),
    Column("", "limits"),
)
_WORDS = {None: "", True: "met", False: "missed"}


def stage_table(stages: Sequence[dict[str, Any]], *, rates: bool) -> list[str]:
    """Return a row per stage: of users, or of `rates`; nothing without stages."""
    if not stages:
        return []
    head = Column("", "stage: requests/s" if rates else "stage: users")
    return table((head, *_HEADS), [_row(stage) for stage in stages])


def _row(stage: dict[str, Any]) -> list[str]:
    rates, ttft, itl = stage["rates"], stage["ttft"], stage["itl"]
    return [
        f"{stage['value']:g}" if stage["value"] is not None else str(stage["stage"]),
        *(format_number(rates[name], 6) for name in ("offered_per_s", "sent_per_s", "request_per_s", "in_flight_mean")),
        format_number(stage["failed"], 6),
        *(format_number(_ms(ttft[key]), 6) for key in ("p50", "p95")),
        *(format_number(_ms(itl[key]), 6) for key in ("mean", "p99")),
        format_number(rates["output_tokens_per_s"], 6),
        _WORDS[stage.get("met")] + (" <" if stage.get("last_met") else ""),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
