"""A run as text for a terminal: at most 100 columns wide, and the short form fits a screen.

Promise: whatever names, messages and numbers a server or a file brought along, no line is wider than
`COLUMNS` and none holds a character that a terminal obeys. The text is a pure function of the run, so a run
that was saved and loaded again prints the same.

A column has one unit, which stands in its head. A percentile that its samples cannot carry is their maximum,
and marked. Nothing here computes a number: `vllm_locust.results` sums up and `vllm_locust.verdict` judges.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from vllm_locust.quantity import format_count, format_duration, format_rate, format_share
from vllm_locust.results import Meta, Run, Summary
from vllm_locust.timeline import METRICS, Metric, Outcome, Unit
from vllm_locust.verdict import exit_code, fidelity_line, findings

COLUMNS = 100
_LABEL = 10
_ABSENT = "–"
_TEXT_LIMIT = 1000
"""Columns after which a text of somebody else is cut even where it may wrap."""
_NEEDED = {"p90": 10, "p95": 20, "p99": 100}
"""Samples without which a percentile is no more than the maximum."""
_MARK = "*"
_LEGEND = f"{_MARK} max of n: fewer than 10 (p90), 20 (p95) or 100 (p99) samples"
_OPTIONAL = ("queue", "connect", "ttfc", "cached_tokens")
"""Metrics that have no table where they have no sample."""
_IN_SECONDS = ("e2el",)
"""Metrics that are shown in seconds, all others in milliseconds."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; neighbours of one group share a head above their own."""

    group: str
    head: str


def text(run: Run, *, full: bool = False) -> str:
    """Return the report; `full` adds a table per metric, every kind of failure, and the workers."""
    summary = run.summary
    parts = [_heading(run.meta, summary), _overview(summary, full=full), _facts(run, full=full)]
    if full:
        parts += [
            *_metric_tables(summary),
            _worker_table(summary["fidelity"]["workers"]),
            _versions(run.meta),
        ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


_HEADS = (
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


def _heading(meta: Meta, summary: Summary) -> list[str]:
    scenarios = [f"{name} ({user}, {meta.endpoints.get(user, '?')})" for user, name in meta.scenarios.items()]
    details = [f"seed {meta.seed}", f"cache {meta.cache}" if meta.cache else ""]
    started = f", started {meta.started}" if meta.started else ""
    return [
        *_labelled("Run", [f"{meta.name} {meta.run}{started}"]),
        *_labelled("Target", [meta.target + (f", model {meta.model}" if meta.model else "")]),
        *_labelled("Scenario", [", ".join([*scenarios, *filter(None, details)])]),
        *_labelled("Load", [", ".join(_load(meta.load)) or _ABSENT]),
        *_labelled("Duration", [format_duration(summary["duration_s"])]),
    ]


def _load(load: dict[str, Any]) -> Iterator[str]:
    words = {"users": ("", " users"), "spawn_rate": ("", " spawned per s"), "run_time_s": ("for ", " s")}
    for key, value in load.items():
        before, after = words.get(key, ("", f" {key}"))
        if value is not None:
            yield f"{before}{value}{after}"


def _scopes(summary: Summary) -> list[tuple[str, Summary]]:
    """Return the rows of a table: each scenario, and all of them where that is another row."""
    scenarios: dict[str, Summary] = summary["scenarios"]
    return [*scenarios.items(), *([] if len(scenarios) == 1 else [("all", summary["total"])])]


def _overview(summary: Summary, *, full: bool) -> list[str]:
    rows = [_overview_row(name, scope) for name, scope in _scopes(summary)]
    lines = _table(_HEADS, rows)
    if full or any(cell.endswith(_MARK) for row in rows for cell in row[1:]):
        lines.append(_LEGEND)
    judged = [late for name, scope in _scopes(summary) if (late := _judged(name, scope))]
    if judged:
        lines += _wrapped(f"counting failures as late: {'; '.join(judged)}", COLUMNS)
    return lines


def _overview_row(name: str, scope: Summary) -> list[str]:
    return [
        printable(name, COLUMNS),
        _number(scope["requests"], 8),
        _number(scope["failed"], 6),
        *(_number(scope[metric]["mean"], 5) for metric in ("input_tokens", "output_tokens")),
        *(_cell(scope["ttft"], key, 1e3, 6) for key in ("p50", "p95", "p99")),
        *(_cell(scope["itl"], key, 1e3, 6) for key in ("mean", "p99")),
        _cell(scope["itl_max"], "p95", 1e3, 6),
        _cell(scope["e2el"], "p95", 1, 6),
        _number(scope["rates"]["output_tokens_per_s"], 6),
    ]


def _cell(values: Summary, key: str, scale: float, width: int) -> str:
    """Print one statistic of a metric, marked if it is a percentile that its samples cannot carry."""
    value = values.get(key)
    if isinstance(value, float):
        value *= scale
    few = value is not None and values["count"] < _NEEDED.get(key, 0)
    return _number(value, width) + (_MARK if few and value != "failed" else "")


def _judged(name: str, scope: Summary) -> str:
    """Say how the percentiles of the overview change when failures count as late; empty if they do not."""
    changes = []
    for metric, keys, scale, unit in (("ttft", ("p50", "p95", "p99"), 1e3, "ms"), ("e2el", ("p95",), 1, "s")):
        described, judged = scope[metric], scope["judged"][metric]
        pairs = [(key, _cell(described, key, scale, 6), _cell(judged, key, scale, 6)) for key in keys]
        moved = [(key, late) for key, was, late in pairs if was != late and judged["failed"]]
        shown = [f"{key} {late}" + ("" if late == "failed" else f" {unit}") for key, late in moved]
        changes += [f"{metric.upper()} {', '.join(shown)}"] if shown else []
    return f"{printable(name, 40)} {', '.join(changes)}" if changes else ""


def _facts(run: Run, *, full: bool) -> list[str]:
    summary, meta = run.summary, run.meta
    found = findings(summary, meta)
    verdicts = [f"{finding.subject}: {finding.text} (exit code {finding.exit_code:d})" for finding in found]
    if len(found) > 1:
        verdicts.append(f"exit code {exit_code(found):d}")
    return [
        *_labelled("Rates", [_rates(summary["total"]["rates"])]),
        *_labelled("Streams", [_streams(summary["total"]["rates"])]),
        *_outcomes(summary),
        *(_labelled("Failures", map(_failure, summary["failures"])) if full else ()),
        *_labelled("Tokens", _token_notes(summary["total"])),
        *(_labelled("Counts", [_counts(summary["total"])]) if full else ()),
        *_labelled("Remarks", [*meta.remarks, *_worker_remarks(summary["fidelity"]["workers"])]),
        *_labelled("Fidelity", [fidelity_line(summary)]),
        *_labelled("Verdict", verdicts or ["ok"]),
    ]


def _rates(rates: Summary) -> str:
    failed = rates["output_tokens_failed_per_s"]
    return (
        f"{format_rate(rates['request_per_s'])} requests/s ok, {format_rate(rates['sent_per_s'])} sent/s; "
        f"{format_rate(rates['input_tokens_per_s'])} input tok/s, "
        f"{format_rate(rates['output_tokens_per_s'])} output tok/s"
        + (f" ({format_rate(failed)} of them of failed requests)" if failed else "")
    )


def _streams(rates: Summary) -> str:
    mean, peak = format_rate(rates["in_flight_mean"]), format_count(rates["in_flight_peak"])
    return f"{mean} in flight on average, {peak} at most"


def _outcomes(summary: Summary) -> list[str]:
    """Return a line for each outcome that occurred, with the earliest message of its kind."""
    outcomes = {name: number for name, number in summary["total"]["outcomes"].items() if number}
    judged = sum(number for name, number in outcomes.items() if name != Outcome.CANCELLED)
    width = max((len(_number(number, 9)) for number in outcomes.values()), default=0)
    lines = []
    for name, number in outcomes.items():
        share = "" if name == Outcome.CANCELLED else format_share(number, judged)
        line = f"{_number(number, 9):>{width}} {printable(name, 19):<19} {share:>8}  "
        kinds = [k for k in summary["failures"] if k["outcome"] == name and k["first_s"] is not None]
        if name == Outcome.CANCELLED:
            line += "cut by the end of the run"
        elif kinds:
            first = min(kinds, key=lambda kind: (kind["first_s"], kind["message"]))
            line += _when(first["first_s"], max(kind["last_s"] for kind in kinds))
            line += printable(f": {first['message']}", max(COLUMNS - _LABEL - width_of(line), 1))
        lines.append(line)
    return [f"{'' if i else 'Outcomes':{_LABEL}}{line}" for i, line in enumerate(lines)]


def _when(first_s: float, last_s: float) -> str:
    first, last = format_duration(first_s), format_duration(last_s)
    return f"at {first}" if first == last else f"{first} to {last}"


def _failure(kind: Summary) -> str:
    status = f" {kind['status']}" if kind["status"] else ""
    when = "" if kind["first_s"] is None else f", {_when(kind['first_s'], kind['last_s'])}"
    place = f"{kind['scenario']} {kind['endpoint']}"
    return f"{kind['count']:,} {place} {kind['outcome']}{status}{when}: {kind['message']}"


def _token_notes(total: Summary) -> Iterator[str]:
    counts, per_event = total["counts"], total["tokens"]["tokens_per_event"]
    if per_event is not None and f"{per_event:.2f}" != "1.00":
        yield f"{per_event:.2f} tokens per event: gaps are those of events"
    if counts["zero_gaps"]:
        yield f"{format_share(counts['zero_gaps'], total['itl']['count'])} of the gaps are zero"
    if counts["estimated"]:
        yield f"{counts['estimated']:,} requests without usage: their events are counted as tokens"
    if counts["coalesced"]:
        yield f"{counts['coalesced']:,} requests came in two pieces at most (a buffering proxy?): no gaps"
    if counts["short_outputs"]:
        yield f"{counts['short_outputs']:,} answers shorter than asked for"


def _counts(total: Summary) -> str:
    finish = {f"finish {reason}": number for reason, number in total["finish"].items()}
    return ", ".join(f"{name} {number:,}" for name, number in (total["counts"] | finish).items())


def _worker_remarks(workers: Summary) -> Iterator[str]:
    for worker, seen in workers.items():
        if seen["late"]:
            yield f"{worker}: {seen['late']:,} samples came late and count in a later window"
        if seen["plugin_errors"]:
            yield f"{worker}: {seen['plugin_errors']:,} errors of the plugin, see its log"


def _metric_tables(summary: Summary) -> Iterator[list[str]]:
    total = summary["total"]
    for metric in METRICS.values():
        if total[metric.name]["count"] or metric.name not in _OPTIONAL:
            yield _metric_table(metric, [(name, scope[metric.name]) for name, scope in _scopes(summary)])
        if total["judged"].get(metric.name, {}).get("failed"):
            rows = [(name, scope["judged"][metric.name]) for name, scope in _scopes(summary)]
            yield _metric_table(metric, rows, " (failures counted as late)")


def _metric_table(metric: Metric, rows: Sequence[tuple[str, Summary]], title: str = "") -> list[str]:
    keys = ("mean", "p50", "p90", "p95", "p99", "max")
    seconds = metric.unit is Unit.SECONDS
    unit = ("s" if metric.name in _IN_SECONDS else "ms") if seconds else "tokens"
    scale = 1e3 if unit == "ms" else 1
    heads = [Column("", name) for name in ("scenario", "samples", *keys)]
    cells = [
        [printable(name, 30), _number(values["count"], 9), *(_cell(values, key, scale, 9) for key in keys)]
        for name, values in rows
    ]
    return [f"{metric.name} [{unit}]: {metric.title}{title}", *_table(heads, cells)]


def _worker_table(workers: Summary) -> list[str]:
    names = ("worker", "away [ms]", "CPU mean [%]", "CPU max [%]", "streams", "late", "errors")
    rows = [
        [
            printable(worker, COLUMNS),
            _number(1e3 * seen["loop_lag_s"], 9),
            *(_number(seen[key] and 100 * seen[key], 9) for key in ("cpu_share", "cpu_share_max")),
            *(_number(seen[key], 9) for key in ("in_flight_peak", "late", "plugin_errors")),
        ]
        for worker, seen in workers.items()
    ]
    return _table([Column("", name) for name in names], rows) if rows else []


def _versions(meta: Meta) -> list[str]:
    named = {"vllm-locust": meta.plugin_version, "Locust": meta.locust_version, "Python": meta.python_version}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    scenario = f"scenario {meta.scenario_hash}" if meta.scenario_hash else ""
    return _labelled("Versions", [part for part in (versions, scenario) if part])


def printable(text: str, width: int = _TEXT_LIMIT) -> str:
    """Make a text of somebody else harmless: one line of `width` columns at most, no control codes.

    White space becomes one blank; what a terminal obeys or hides (ESC, C1, bidi overrides) becomes an escape.
    """
    shown: list[str] = []
    used = 0
    # Combining marks have no width: the number of characters has a limit of its own.
    words = " ".join(text[: 8 * width].split())
    for position, char in enumerate(words):
        piece = char if char.isprintable() else _escape(char)
        used += width_of(piece)
        if used > width or position >= 4 * width:
            return _cut(shown, width)
        shown.append(piece)
    return "".join(shown)


def width_of(text: str) -> int:
    """Return how many columns a printable text takes on a terminal."""
    return sum(_char_columns(char) for char in text)


def _char_columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if char.isascii() else char.encode("ascii", "backslashreplace").decode()


def _cut(pieces: list[str], width: int) -> str:
    while pieces and width_of("".join(pieces)) >= width:
        pieces.pop()
    return "".join(pieces) + "…"


def _wrapped(text: str, width: int) -> list[str]:
    """Break a harmless text between words, and within those that are wider than a line."""
    lines = [""]
    for word in text.split(" "):
        for piece in _pieces(word, width):
            if lines[-1] and width_of(lines[-1]) + 1 + width_of(piece) > width:
                lines.append("")
            lines[-1] += f" {piece}" if lines[-1] else piece
    return lines


def _pieces(word: str, width: int) -> Iterator[str]:
    piece, used = "", 0
    for char in word:
        used += width_of(char)
        if used > width:
            yield piece
            piece, used = "", width_of(char)
        piece += char
    yield piece


def _labelled(label: str, texts: Iterable[str]) -> list[str]:
    """Return texts of anybody, each on lines of its own, beside one label; no lines without a text."""
    lines = [line for text in texts for line in _wrapped(printable(text), COLUMNS - _LABEL)]
    return [f"{label if not i else '':{_LABEL}}{line}" for i, line in enumerate(lines)]


def _table(heads: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay a table out: the first column to the left and cut if need be, the others to the right."""
    names, *numbers = zip(*rows, strict=True)
    cells = [names, *map(_aligned, numbers)]
    natural = [max(map(width_of, (head.head, *column))) for head, column in zip(heads, cells, strict=True)]
    grouped = groupby(range(len(heads)), lambda i: heads[i].group)
    groups = [(label, list(members)) for label, members in grouped]
    for between, inside in ((2, 2), (2, 1), (1, 1)):
        gaps = [0, *(inside if a.group and a.group == b.group else between for a, b in pairwise(heads))]
        widths = natural[:]
        for label, members in groups:
            widths[members[0]] += max(0, len(label) - _span(members, widths, gaps))
        free = COLUMNS - sum(widths[1:]) - sum(gaps)
        if widths[0] <= free:
            break
    widths[0] = min(widths[0], free)
    top = [" " * gaps[members[0]] + _over(label, members, widths, gaps) for label, members in groups]
    lines = ["".join(top)] if any(head.group for head in heads) else []
    for row in ([head.head for head in heads], *zip(*cells, strict=True)):
        name = printable(row[0], widths[0])
        line = name + " " * (widths[0] - width_of(name))
        for cell, width, gap in zip(row[1:], widths[1:], gaps[1:], strict=True):
            line += " " * (gap + width - width_of(cell)) + cell
        lines.append(line)
    return lines


def _span(members: Sequence[int], widths: Sequence[int], gaps: Sequence[int]) -> int:
    return sum(widths[i] for i in members) + sum(gaps[i] for i in members[1:])


def _over(label: str, members: Sequence[int], widths: Sequence[int], gaps: Sequence[int]) -> str:
    """Return the head of a group, ruled where it spans several columns."""
    span = _span(members, widths, gaps)
    if label and len(members) > 1 and span > len(label) + 1:
        return f" {label} ".center(span, "-")
    return label.rjust(span)


def _aligned(column: Sequence[str]) -> list[str]:
    """Make room for the mark in a column of numbers that has one."""
    marked = any(cell.endswith(_MARK) for cell in column)
    return [f"{cell} " if marked and not cell.endswith(_MARK) else cell for cell in column]


def _number(value: float | str | None, width: int) -> str:
    """Print a number with three digits at least, in `width` columns (5 at least) however large it is."""
    if value is None or isinstance(value, str):
        return value or _ABSENT
    plain = f"{value:,}" if isinstance(value, int) else format_rate(value)
    for scale, suffix in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if len(plain) <= width:
            return plain
        plain = format_rate(value / scale) + suffix
    return plain if len(plain) <= width else f"{value:.0e}"
