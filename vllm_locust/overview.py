"""The scenarios of a run, or of a stretch of it, and its workers as tables: the same for terminal, web UI and page.

A percentile that its samples cannot carry is their maximum, and marked. Nothing here computes a number.
"""

from collections.abc import Sequence

from vllm_locust.figures import Summary
from vllm_locust.quantity import format_number
from vllm_locust.terminal import COLUMNS, MARK, Column, printable

_NEEDED = {"p90": 10, "p95": 20, "p99": 100}
"""Samples without which a percentile is no more than the maximum."""
_UNKNOWN = "–"
LEGEND = f"{MARK} max of n: fewer than 10 (p90), 20 (p95) or 100 (p99) samples"
HEADS = (
    Column("", "scenario"),
    Column("", "requests"),
    Column("", "failed"),
    Column("mean tokens", "in"),
    Column("mean tokens", "out"),
    Column("TTFT [ms]", "p50"),
    Column("TTFT [ms]", "p95"),
    Column("TTFT [ms]", "p99"),
    Column("ITL [ms]", "mean"),
    Column("ITL [ms]", "p99"),
    Column("gap [ms]", "max p95"),
    Column("E2EL [s]", "p95"),
    Column("output", "tok/s"),
)

BRIEF = (
    Column("TTFT [ms]", "p50"),
    Column("TTFT [ms]", "p95"),
    Column("ITL [ms]", "mean"),
    Column("ITL [ms]", "p99"),
    Column("output", "tok/s"),
)
"""What tables have room for whose rows are stages or runs."""


def scopes(summary: Summary) -> list[tuple[str, Summary]]:
    """Return each scenario by name, and all of them where that is another row."""
    scenarios: dict[str, Summary] = summary["scenarios"]
    return [*scenarios.items(), *([] if len(scenarios) == 1 else [("all", summary["total"])])]


def rows(summary: Summary) -> list[list[str]]:
    """Return a row of `HEADS` for each of them."""
    return [_row(name, scope) for name, scope in scopes(summary)]


def marked(rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether a mark needs its legend; a name may end like one."""
    return any(cell.endswith(MARK) for row in rows for cell in row[1:])


def _row(name: str, scope: Summary) -> list[str]:
    return [
        printable(name, COLUMNS),
        format_number(scope["requests"], 8),
        format_number(scope["failed"], 6),
        *(format_number(scope[metric]["mean"], 5) for metric in ("input_tokens", "output_tokens")),
        *(cell(scope["ttft"], key, 1e3, 6) for key in ("p50", "p95", "p99")),
        *(cell(scope["itl"], key, 1e3, 6) for key in ("mean", "p99")),
        cell(scope["itl_max"], "p95", 1e3, 6),
        cell(scope["e2el"], "p95", 1, 6),
        format_number(scope["rates"]["output_tokens_per_s"], 6),
    ]


def counting_failures(summary: Summary) -> str:
    """Say how the percentiles change when failures count as late; empty where they do not."""
    judged = [late for name, scope in scopes(summary) if (late := _judged(name, scope))]
    return f"counting failures as late: {'; '.join(judged)}" if judged else ""


def _judged(name: str, scope: Summary) -> str:
    changes = []
    for metric, keys, scale, unit in (("ttft", ("p50", "p95", "p99"), 1e3, "ms"), ("e2el", ("p95",), 1, "s")):
        described, judged = scope[metric], scope["judged"][metric]
        pairs = [(key, cell(described, key, scale, 6), cell(judged, key, scale, 6)) for key in keys]
        moved = [(key, late) for key, was, late in pairs if late not in (was, _UNKNOWN)]
        shown = [f"{key} {late}" + ("" if late == "failed" else f" {unit}") for key, late in moved]
        changes += [f"{metric.upper()} {', '.join(shown)}"] if shown else []
    return f"{printable(name, 40)} {', '.join(changes)}" if changes else ""


def cell(values: Summary, key: str, scale: float, width: int) -> str:
    """Print one statistic of a metric, marked if it is a percentile that its samples, where known, cannot carry."""
    value = values.get(key)
    if isinstance(value, float):
        value *= scale
    few = None not in (value, values["count"]) and values["count"] < _NEEDED.get(key, 0)
    return format_number(value, width) + (MARK if few and value != "failed" else "")


WORKER_HEADS = (
    Column("", "worker"),
    Column("away", "[ms]"),
    Column("CPU [%]", "mean"),
    Column("CPU [%]", "max"),
    Column("no core", "[%]"),
    Column("stalled", "[%]"),
    Column("", "streams"),
    Column("", "late"),
    Column("", "errors"),
)
_SHARES = ("cpu_share", "cpu_share_max", "core_wait_share", "stalled_share")


def worker_rows(workers: Summary) -> list[list[str]]:
    """Return a row of `WORKER_HEADS` for each worker."""
    return [
        [
            printable(worker, COLUMNS),
            format_number(1e3 * seen["loop_lag_s"], 9),
            *(format_number(seen[key] and 100 * seen[key], 6) for key in _SHARES),
            *(format_number(seen[key], 9) for key in ("in_flight_peak", "late", "plugin_errors")),
        ]
        for worker, seen in workers.items()
    ]
