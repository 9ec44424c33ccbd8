"""A run as text for a terminal: at most 100 columns wide, and the short form fits a screen.

Promise: whatever names, messages and numbers a server or a file brought along, no line is wider than
`COLUMNS` and none holds a character that a terminal obeys. The text is a pure function of the run, so a run
that was saved and loaded again prints the same.

A column has one unit, which stands in its head. A percentile that its samples cannot carry is their maximum,
and marked. Nothing here computes a number: `vllm_locust.summary` sums up and `vllm_locust.verdict` judges.
"""

from collections.abc import Iterator, Sequence

from vllm_locust import facts, fidelity, overview
from vllm_locust.course import course, stability_lines
from vllm_locust.figures import Summary
from vllm_locust.incidents import failure_table, outcome_lines, slowest_lines, slowest_tables
from vllm_locust.overview import cell
from vllm_locust.quantity import format_number
from vllm_locust.results import Run
from vllm_locust.stages import stage_table
from vllm_locust.terminal import COLUMNS, LABEL_WIDTH, Column, labelled, printable, table, wrapped
from vllm_locust.timeline import METRICS, Metric, Unit
from vllm_locust.verdict import exit_code, findings

_OPTIONAL = ("itl_token", "queue", "ttft_scheduled", "e2el_scheduled", "connect", "ttfc", "cached_tokens")
"""Metrics that have no table where they have no sample."""
_IN_SECONDS = ("e2el", "e2el_scheduled")
"""Metrics that are shown in seconds, all others in milliseconds."""


def text(run: Run, *, full: bool = False) -> str:
    """Return the report; `full` adds each kind of failure, a table per metric, the slowest requests and the workers."""
    summary = run.summary
    workers = summary["fidelity"]["workers"]
    parts = [
        _told(facts.of_setting(summary, run.meta)),
        _scenarios(summary, full=full),
        stage_table(summary["stages"], rates="arrivals" in run.meta.load),
        _facts(run, full=full),
        *course(run.recording, summary.get("stability"), full=full),
    ]
    if full:
        parts += [
            failure_table(summary["failures"]),
            *_metric_tables(summary),
            *slowest_tables(summary["slowest"], summary["scenarios"]),
            table(overview.WORKER_HEADS, overview.worker_rows(workers)) if workers else [],
            _told(facts.of_versions(run.meta)),
        ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


def _scenarios(summary: Summary, *, full: bool) -> list[str]:
    rows = overview.rows(summary)
    lines = table(overview.HEADS, rows)
    if full or overview.marked(rows):
        lines.append(overview.LEGEND)
    if late := overview.counting_failures(summary):
        lines += wrapped(late, COLUMNS)
    return lines


def _facts(run: Run, *, full: bool) -> list[str]:
    summary, meta = run.summary, run.meta
    found = findings(summary, meta)
    verdicts = [f"{finding.subject}: {finding.text} (exit code {finding.exit_code:d})" for finding in found]
    if len(found) > 1:
        verdicts.append(f"exit code {exit_code(found):d}")
    return [
        *_told(facts.of_load(summary, meta)),
        *outcome_lines(summary),
        *(() if full else slowest_lines(summary["slowest"])),
        *_told(facts.of_measurement(summary, meta, full=full)),
        *_limit_lines(summary["limits"]),
        *labelled("Fidelity", [fidelity.line(summary["fidelity"], meta.generator_limits)]),
        *stability_lines(summary.get("stability")),
        *labelled("Verdict", verdicts or ["ok"]),
    ]


def _told(found: facts.Facts) -> list[str]:
    return [line for subject, texts in found for line in labelled(subject, texts)]


def _limit_lines(limits: Sequence[Summary]) -> list[str]:
    """Return a line for each limit, the state of it first."""
    width = max((len(limit["state"]) for limit in limits), default=0) + 2
    lines = []
    for limit in limits:
        text = wrapped(printable(f"{limit['limit']}: {limit['text']}"), COLUMNS - LABEL_WIDTH - width)
        lines += [f"{limit['state'] if not i else '':{width}}{line}" for i, line in enumerate(text)]
    return [f"{'' if i else 'Limits':{LABEL_WIDTH}}{line}" for i, line in enumerate(lines)]


def _metric_tables(summary: Summary) -> Iterator[list[str]]:
    total = summary["total"]
    for metric in METRICS.values():
        if total[metric.name]["count"] or metric.name not in _OPTIONAL:
            yield _metric_table(metric, [(name, scope[metric.name]) for name, scope in overview.scopes(summary)])
        if total["judged"].get(metric.name, {}).get("failed"):
            rows = [(name, scope["judged"][metric.name]) for name, scope in overview.scopes(summary)]
            yield _metric_table(metric, rows, " (failures counted as late)")


def _metric_table(metric: Metric, rows: Sequence[tuple[str, Summary]], title: str = "") -> list[str]:
    keys = ("mean", "p50", "p90", "p95", "p99", "max")
    seconds = metric.unit is Unit.SECONDS
    unit = ("s" if metric.name in _IN_SECONDS else "ms") if seconds else "tokens"
    scale = 1e3 if unit == "ms" else 1
    heads = [Column("", name) for name in ("scenario", "samples", *keys)]
    cells = [
        [
            printable(name, 30),
            format_number(values["count"], 9),
            *(cell(values, key, scale, 9) for key in keys),
        ]
        for name, values in rows
    ]
    return [f"{metric.name} [{unit}]: {metric.title}{title}", *table(heads, cells)]
