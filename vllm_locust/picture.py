"""A run as something to draw: columns over time and tables, as plain values for a browser.

The page in Locust's web UI and whatever is saved of it draw the same picture. It has a column per window, or per so
many windows that a run of any length has at most `MOST` of them: they are merged exactly, never thinned out. Times are
seconds since the epoch began; "no sample" is null, never 0. A text may be somebody else's, and is made harmless by
whoever shows it.

In the warm-up a column tells what happened in it, since it is drawn shaded; what the run is judged by leaves it out.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vllm_locust import course, facts, fidelity, figures, incidents, overview, stages
from vllm_locust import limit as limits
from vllm_locust.cell import RETRY, STEADY, WARMUP, Cell, Cells, total
from vllm_locust.fidelity import Limits
from vllm_locust.figures import Summary
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import NS_PER_S, format_count, format_share
from vllm_locust.recording import Gauges, Recording
from vllm_locust.results import Run
from vllm_locust.summary import Meta, fidelity_in, window_of
from vllm_locust.terminal import Column, printable
from vllm_locust.timeline import Outcome
from vllm_locust.verdict import exit_code, findings
from vllm_locust.workers import seen_in

MOST = 720
"""Columns: more than there are pixels for in a chart says nothing more."""
_MOST_SCOPES = 2_400
"""Of scenarios in columns that are saved, so that a page with many scenarios can still be sent by mail."""
_FEWEST = 20
_STEPS = (1, 2, 5)
_LOWEST_S = 1e-6
_PER_DECADE = 10
"""Cells of a heat map, from a microsecond up; what is shorter is in the first one."""
_TTFT = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_ITL = {"p50": 0.50, "p99": 0.99}
_DISTRIBUTED = ("ttft", "itl", "e2el")
_POINTS = 200
"""Of a distribution: a chart is not wider."""
_MOST_KINDS = 50
_MOST_SLOW = 10
"""Rows of each list; the files beside the picture have all."""

Values = dict[str, Any]


def of_run(run: Run) -> Values:
    """Return the whole picture of a run that is over."""
    recording, closed = run.recording, run.recording.window_count
    most = max(_FEWEST, _MOST_SCOPES // (1 + len(run.summary["scenarios"])))
    every = windows_per_column(len(recording.windows), min(MOST, most))
    window = overview.rows(window_of(recording, closed - 1, run.meta)) if closed else []
    first = recording.windows.start // every
    drawn = [*columns(recording, run.meta.generator_limits, every=every, first=first, closed=closed)]
    return {
        **frame(recording, run.meta, run.summary),
        "tables": {
            **tables(run.meta, run.summary, window),
            "marks": _marks(recording),
            "settings": plain(_SETTINGS, settings_of(run)),
        },
        "distributions": distributions(recording),
        "state": "stopped",
        "verdict": verdict_lines(run.summary, run.meta),
        "every": every,
        "from": first,
        "next": first + len(drawn),
        "columns": drawn,
    }


def frame(recording: Recording, meta: Meta, summary: Summary) -> Values:
    """Return what there is to say of the run beside its columns and tables; of a run that goes on, so far."""
    told = summary["fidelity"]
    faults = fidelity.faults(told, meta.generator_limits)
    return {
        "run": f"{recording.run}.{recording.epoch}",
        **{name: getattr(meta, name) for name in ("name", "target", "model", "started")},
        "excerpt": meta.excerpt[0] if meta.excerpt else "",
        "window_s": recording.window_ns / NS_PER_S,
        "now_s": None,
        "length_s": None if recording.length_ns is None else recording.length_ns / NS_PER_S,
        "warmup_s": recording.since_ns / NS_PER_S if recording.since_ns > recording.begin_ns else None,
        "warming_up": False,
        **dict.fromkeys(("users", "workers", "in_flight", "silence_s"), 0),
        "scenarios": [*summary["scenarios"]],
        "limits": [_limit(text) for text in meta.limits],
        "marks": [{"at_s": mark.at_ns / NS_PER_S, "text": mark.text} for mark in recording.marks],
        "stages": summary.get("stages", []),
        "fidelity": {
            "limited": None if fidelity.unknown(told) or not told["token_events"] else bool(faults),
            "text": fidelity.line(told, meta.generator_limits),
        },
        "verdict": None,
    }


def _limit(text: str) -> Values:
    limit = limits.parse(text, where="limits")
    return {
        "text": str(limit),
        **{name: getattr(limit, name) for name in ("scope", "metric", "statistic", "bound")},
        "unit": limit.unit.value,
    }


def verdict_lines(summary: Summary, meta: Meta) -> list[str]:
    """Return what keeps a run that is over from being a success, or that it is one."""
    found = findings(summary, meta)
    told = [f"{finding.subject}: {finding.text}" for finding in found]
    return [*told, f"exit code {exit_code(found):d}"] if told else ["ok"]


# Columns


def windows_per_column(windows: int, most: int = MOST) -> int:
    """Return how many windows a column covers: 1, 2, 5, 10, … as few as give no more than so many columns."""
    power = 1
    while True:
        for step in _STEPS:
            if windows <= most * step * power:
                return step * power
        power *= 10


def columns(recording: Recording, limits: Limits, *, every: int, first: int, closed: int) -> Iterator[Values]:
    """Yield the columns from one on; `limits` say how far the generator may be off, and so many windows are closed."""
    for number in range(first, -(-recording.window_count // every)):
        windows = range(max(number * every, recording.windows.start), min((number + 1) * every, recording.window_count))
        yield {"index": number, "whole": windows[-1] < closed, **_column(recording, limits, windows)}


def _column(recording: Recording, limits: Limits, windows: range) -> Values:
    start_ns, end_ns = recording.bounds_ns(windows[0])[0], recording.bounds_ns(windows[-1])[1]
    cells = {key: cell for key, cell in recording.windows_in(start_ns, end_ns).items() if key.phase != RETRY}
    gauges = {worker: seen for worker in recording.workers if (seen := [*_gauges(recording, worker, windows)])}
    steady = windows[0] in recording.steady_windows
    phases = recording.phases if steady else (STEADY, WARMUP)
    length_ns = end_ns - start_ns
    if recording.length_ns is None:  # the last column is not over
        length_ns = max((sum(one.span_ns for one in seen) for seen in gauges.values()), default=0)
    length_s, offered = length_ns / NS_PER_S, any("scheduled" in cell.counters for cell in cells.values())
    in_flight_ns = sum(one.in_flight_ns for seen in gauges.values() for one in seen)
    return {
        "start_s": start_ns / NS_PER_S,
        "end_s": end_ns / NS_PER_S,
        "steady": steady,
        "users": sum(seen[-1].users_last for seen in gauges.values()),
        "in_flight": figures.ratio(in_flight_ns / NS_PER_S, length_s),
        "in_flight_peak": sum(max(one.in_flight_peak for one in seen) for seen in gauges.values()),
        "fidelity": _fidelity(recording, limits, cells, phases, gauges),
        "scopes": {
            name: _scope(cells, name, phases, length_s, offered=offered)
            for name in ("", *sorted({key.scenario for key in cells}))
        },
    }


def _gauges(recording: Recording, worker: str, windows: range) -> Iterator[Gauges]:
    for index in windows:
        if (seen := recording.gauges.get((worker, index))) is not None:
            yield seen


def _fidelity(
    recording: Recording, limits: Limits, cells: Cells, phases: Sequence[str], gauges: Mapping[str, list[Gauges]]
) -> Values | None:
    """Return whether the generator was at fault in a column; null where nothing was measured."""
    workers = {worker: seen_in(windows, recording.window_ns) for worker, windows in gauges.items()}
    seen = fidelity_in(cells, phases, limits, workers)
    if not seen["token_events"] or fidelity.unknown(seen):
        return None
    faults = fidelity.faults(seen, limits)
    return {"limited": bool(faults), "text": "; ".join(fault.text for fault in faults) or "measured the server"}


def _scope(cells: Cells, name: str, phases: Sequence[str], length_s: float, *, offered: bool) -> Values:
    """Return a scenario, or all of them, in a column: latencies of some phases, everything else of all."""
    chosen = {key: cell for key, cell in cells.items() if name in ("", key.scenario)}
    every = total(chosen.values())
    told = total(cell for key, cell in chosen.items() if key.phase in phases)
    outcomes: Counter[str] = Counter()
    for outcome, _, number in figures.ended(every.counters):
        outcomes[outcome] += number
    counted = {
        "offered_per_s": every.counters.get("scheduled", 0) if offered else None,
        "sent_per_s": every.counters.get("sent", 0),
        "ok_per_s": outcomes[Outcome.OK],
        "input_tokens_per_s": every.histograms.get("input_tokens", Histogram()).sum,
        "output_tokens_per_s": every.counters.get("tokens_received", 0),
    }
    return {
        "sent": every.counters.get("sent", 0),
        "outcomes": dict(sorted(outcomes.items())),
        **{rate: None if number is None else figures.ratio(number, length_s) for rate, number in counted.items()},
        "ttft": _latency(told, "ttft", _TTFT),
        "itl": _latency(told, "itl", _ITL),
    }


def _latency(cell: Cell, metric: str, quantiles: Mapping[str, float]) -> Values:
    histogram = cell.histograms.get(metric, Histogram())
    values = histogram.percentiles(quantiles.values())
    return {
        "count": histogram.count,
        **{name: figures.seconds(value) for name, value in zip(quantiles, values, strict=True)},
        "max": figures.seconds(histogram.max),
        "heat": heat(histogram),
    }


def distributions(recording: Recording) -> Values:
    """Return for each metric that has samples some values, ascending, and which share of them is at most each of these.

    `shares` are of all scenarios, whose name is empty, and of each that has samples.
    """
    cells = {key: cell for key, cell in recording.totals.items() if key.phase in recording.phases}
    names = ("", *sorted({key.scenario for key in cells}))
    scopes = {name: total(cell for key, cell in cells.items() if name in ("", key.scenario)) for name in names}
    found = {
        metric: distribution({name: cell.histograms.get(metric, Histogram()) for name, cell in scopes.items()})
        for metric in _DISTRIBUTED
    }
    return {metric: told for metric, told in found.items() if told}


def distribution(histograms: Mapping[str, Histogram]) -> Values | None:
    """Return some values, ascending, and which share of each histogram is at most each; None without a sample."""
    counted = {name: histogram for name, histogram in histograms.items() if histogram.count}
    if not counted:
        return None
    every = Histogram()
    for histogram in counted.values():
        every.merge(histogram)
    values_ns = every.occupied()[0].clip(_LOWEST_S * NS_PER_S)
    # Those of buckets: between them every line would have stairs.
    ends_ns = [values_ns[0] * 0.98, *values_ns[: -1 : -(-values_ns.size // _POINTS)], values_ns[-1]]
    shares = {
        name: [round(number / histogram.count, 5) for number in histogram.count_at_most(ends_ns)]
        for name, histogram in counted.items()
    }
    return {"at_s": [float(f"{at / NS_PER_S:.5g}") for at in ends_ns], "shares": shares}


def heat(histogram: Histogram) -> list[list[int]]:
    """Return how many samples are in each cell of a heat map, of those that have any."""
    values, counts = histogram.occupied()
    cells = np.floor(_PER_DECADE * np.log10(np.maximum(values / NS_PER_S, _LOWEST_S) / _LOWEST_S) + 1e-9).astype(int)
    return [[int(cell), int(counts[cells == cell].sum())] for cell in np.unique(cells)]


# Tables


def tables(meta: Meta, summary: Summary, window: Sequence[Sequence[str]]) -> Values:
    """Return the tables under the charts, each null where it has no row; those of the last `window` are given."""
    firsts, gaps = ([slow for slow in summary["slowest"] if slow["metric"] == metric] for metric in incidents.SLOW)
    slow = [one for found in (firsts, gaps) for one in sorted(found, key=_slowest_first)[:_MOST_SLOW]]
    failures = incidents.failure_rows(summary["failures"][:_MOST_KINDS])
    return {
        "run": _overview(overview.rows(summary), overview.counting_failures(summary)),
        "window": _overview(window),
        "stability": plain(_STABILITY, course.stability_rows(summary.get("stability"))),
        "facts": plain(_FACTS, fact_rows(summary, meta)),
        "outcomes": plain(_OUTCOMES, outcome_rows(summary)),
        "limits": plain(_LIMITS, [(one["limit"], one["state"], one["text"]) for one in summary["limits"]]),
        "failures": plain(incidents.FAILURE_COLUMNS.values(), failures),
        "slowest": plain(incidents.SLOW_COLUMNS.values(), incidents.slow_rows(slow)),
        "stages": _table(stages.heads(rates="arrivals" in meta.load), stages.rows(summary.get("stages", []))),
        "workers": _table(overview.WORKER_HEADS, overview.worker_rows(summary["fidelity"]["workers"])),
    }


def settings_of(run: Run) -> list[tuple[str, str]]:
    """Return what was run, and with what."""
    found = [*facts.of_setting(run.summary, run.meta), *facts.of_versions(run.meta)]
    return [(subject, "\n".join(texts)) for subject, texts in found if texts]


def _slowest_first(slow: Summary) -> float:
    return -float(slow["value_s"])


_SETTINGS = ("Setting", "Value")
_FACTS = ("About", "In words")
_OUTCOMES = ("Outcome", "Requests", "Share")
_LIMITS = ("Limit", "State", "What was measured")
_STABILITY = ("Stability", "What was found")
_MARKS = ("At [s]", "What happened")


def fact_rows(summary: Summary, meta: Meta) -> list[tuple[str, str]]:
    """Return what is said in words, each with its subject."""
    found = [*facts.of_load(summary, meta), *facts.of_measurement(summary, meta)]
    return [(subject, text) for subject, texts in found for text in texts]


def outcome_rows(summary: Summary) -> list[tuple[str, str, str]]:
    """Return each outcome that occurred, how often, and the share of the requests that ended by themselves."""
    outcomes = {name: number for name, number in summary["total"]["outcomes"].items() if number}
    judged = sum(number for name, number in outcomes.items() if name != Outcome.CANCELLED)
    return [
        (name, format_count(number), "" if name == Outcome.CANCELLED else format_share(number, judged))
        for name, number in outcomes.items()
    ]


def _marks(recording: Recording) -> Values | None:
    """Return the table of what happened, which a chart tells only who points at it."""
    marks = sorted(recording.marks, key=lambda mark: mark.at_ns)
    return plain(_MARKS, [(round(mark.at_ns / NS_PER_S, 1), printable(mark.text)) for mark in marks])


def _overview(rows: Sequence[Sequence[str]], more: str = "") -> Values | None:
    notes = [overview.LEGEND] * overview.marked(rows) + [more] * bool(more)
    return _table(overview.HEADS, rows, "; ".join(notes))


def _table(heads: Sequence[Column], rows: Sequence[Sequence[str]], note: str = "") -> Values | None:
    """Return a table whose first column is a name, and whose others are numbers; null without rows."""
    if not rows:
        return None
    told = [{"group": head.group, "title": head.head, "text": not place} for place, head in enumerate(heads)]
    return {"columns": told, "rows": rows, "note": note}


def plain(
    titles: Iterable[str], rows: Sequence[Sequence[str | float | None]], *, numbers: Container[int] = ()
) -> Values | None:
    """Return a table of texts and numbers, null without rows; of these places, texts are numbers with their unit."""
    if not rows:
        return None
    columns = enumerate(zip(*rows, strict=True))
    texts = [place not in numbers and any(isinstance(cell, str) for cell in column) for place, column in columns]
    told = [{"group": "", "title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
    return {"columns": told, "rows": [[_shown(cell) for cell in row] for row in rows], "note": ""}


def _shown(cell: str | float | None) -> str:
    return "–" if cell is None else cell if isinstance(cell, str) else f"{cell:,}"
