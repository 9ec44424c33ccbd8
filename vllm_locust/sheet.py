"""The numbers of a run as flat tables for a spreadsheet: seconds, tokens, shares, an empty cell where nothing is known.

Promise: no text of somebody else becomes a formula. Spreadsheets evaluate a cell that begins like one, and may be made
to send others away by it; such a text has an apostrophe before it (OWASP, "CSV Injection").
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from vllm_locust.figures import PERCENTILES, Summary
from vllm_locust.timeline import METRICS, Unit

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_COUNTS = ("requests", "failed", "cancelled", "scheduled", "dropped")
_STATISTICS = ("mean", *PERCENTILES, "min", "max")
_MOMENT = ("start_s", "end_s", "steady", "whole", "users", "in_flight", "in_flight_peak")
_RATES = ("offered_per_s", "sent_per_s", "ok_per_s", "input_tokens_per_s", "output_tokens_per_s")
_LATENCIES = {"ttft": ("p50", "p95", "p99", "max"), "itl": ("p50", "p99", "max")}

Table = Iterator[Sequence[Any]]
"""Heads, then rows."""


def lines(table: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield a table as lines of CSV (RFC 4180)."""
    for row in table:
        line = io.StringIO()
        csv.writer(line).writerow([_harmless(cell) for cell in row])
        yield line.getvalue()


def _harmless(cell: Any) -> Any:  # noqa: ANN401 - any plain value
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def scenarios(summary: Summary) -> Table:
    """Yield a row per scenario, and one of all of them, whose name is empty: a scenario may be called anything."""
    metrics = [
        (metric.name, key, f"{metric.name}_{key}" + ("_s" if metric.unit is Unit.SECONDS and key != "count" else ""))
        for metric in METRICS.values()
        for key in ("count", *_STATISTICS)
    ]
    rates = [*summary["total"]["rates"]]
    yield ["scenario", *_COUNTS, "failed_share", *rates, *(head for _, _, head in metrics)]
    for name, scope in (*summary["scenarios"].items(), ("", summary["total"])):
        yield [
            name,
            *(scope[key] for key in (*_COUNTS, "failed_share")),
            *(scope["rates"].get(key) for key in rates),
            *(scope[metric][key] for metric, key, _ in metrics),
        ]


def windows(columns: Iterable[dict[str, Any]]) -> Table:
    """Yield a row per column of a picture and scenario, the name of all of them being empty."""
    heads = [f"{metric}_{key}_s" for metric, keys in _LATENCIES.items() for key in keys]
    counts = [f"{metric}_count" for metric in _LATENCIES]
    yield [*_MOMENT, "generator_limited", "scenario", "sent", "ok", "failed", "cancelled", *_RATES, *counts, *heads]
    for column in columns:
        moment = [column[key] for key in _MOMENT]
        limited = None if column["fidelity"] is None else column["fidelity"]["limited"]
        for name, scope in column["scopes"].items():
            outcomes = scope["outcomes"]
            ok, cancelled = outcomes.get("ok", 0), outcomes.get("cancelled", 0)
            ended = [ok, sum(outcomes.values()) - ok - cancelled, cancelled]
            latencies = [scope[metric][key] for metric, keys in _LATENCIES.items() for key in keys]
            rates = [scope[key] for key in _RATES]
            yield [
                *(*moment, limited, name, scope["sent"], *ended, *rates),
                *(*(scope[metric]["count"] for metric in _LATENCIES), *latencies),
            ]


def records(rows: Sequence[Summary]) -> Table:
    """Yield rows that have the same names, like failures and slowest requests; nothing, not even heads, without one."""
    yield from chain([[*rows[0]]], ([*row.values()] for row in rows)) if rows else ()
