"""Rows of our own in Locust's statistics table, `TTFT short` and `ITL short`, and tabs.

The tabs say whether to believe the numbers, what failed, and which requests were the slowest.

Rows are built by the master from the recording on every tick, so that nothing is logged per gap. They do not count in
*Aggregated*, nor in RPS. Locust's histograms keep what they are given, so the median and percentile columns show our
resolution; minima, maxima and averages Locust rounds when it shows them.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flask import Response, request
from locust.stats import RequestStats, StatsEntry
from locust.web import WebUI

from vllm_locust import fidelity, incidents, progress
from vllm_locust.cell import WARMUP, Cells, select, total
from vllm_locust.exporter import Snapshot
from vllm_locust.fidelity import percent
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import NS_PER_S, format_count, format_duration
from vllm_locust.recording import Recording
from vllm_locust.summary import Summary, failures_of, fidelity_of, slowest_of
from vllm_locust.workers import Watch

_ROWS = {"TTFT": "ttft", "ITL": "itl"}


METRICS = tuple(_ROWS.values())
"""What the rows are about."""


@dataclass(frozen=True, slots=True)
class _Tab:
    """A tab of the web UI, which can hold a table of plain values."""

    key: str
    title: str
    columns: dict[str, str]
    """Title by key. Locust sorts by a column `name` until asked for another; without one, our order stays."""


_TABS = (
    _Tab("llm", "LLM", {"subject": "Fidelity", "text": ""}),
    _Tab("llm-failures", "LLM failures", incidents.FAILURE_COLUMNS),
    _Tab("llm-slowest", "LLM slowest", incidents.SLOW_COLUMNS),
)


class _Row(StatsEntry):
    """A row that is no request: it has samples, but no rate."""

    total_rps = 0.0
    current_rps = 0.0


def update_rows(stats: RequestStats, cells: Cells, phases: Container[str]) -> None:
    """Write the latencies of each scenario into Locust's table, of those phases that are told."""
    cells = {key: cell for key, cell in cells.items() if key.phase in phases}
    for scenario in sorted({key.scenario for key in cells}):
        cell = total(select(cells, scenario=scenario))
        for method, metric in _ROWS.items():
            histogram = cell.histograms.get(metric)
            if histogram is not None and histogram.count:
                stats.entries[scenario, method] = _row(stats, scenario, method, histogram)


def _row(stats: RequestStats, name: str, method: str, histogram: Histogram) -> StatsEntry:
    row = _Row(stats, name, method)
    row.num_requests = histogram.count
    low, high = histogram.min or 0, histogram.max or 0
    # Locust says int where it can hold any number of milliseconds.
    row.total_response_time = cast("int", histogram.sum / 1e6)
    row.min_response_time, row.max_response_time = cast("int", low / 1e6), cast("int", high / 1e6)
    for value, number in histogram:
        row.response_times[cast("int", _readable_ms(value / 1e6))] += number
    return row


def _readable_ms(value: float) -> float:
    """Round to what the buckets know, about three digits: 8.4 reads 8.4."""
    if value >= 100:  # noqa: PLR2004
        return round(value)
    return round(value, 1 if value >= 1 else 2)


def add_tabs(web_ui: WebUI, snapshot: Callable[[], Snapshot]) -> None:
    """Give Locust's web UI tabs on the current run, which is asked for as often as its statistics are."""
    watch = Watch()
    args: dict[str, Any] = web_ui.template_args
    tables = [
        {"key": tab.key, "structure": [{"key": key, "title": title} for key, title in tab.columns.items()]}
        for tab in _TABS
    ]
    args["extendedTabs"] = [*args.get("extendedTabs", ()), *({"title": tab.title, "key": tab.key} for tab in _TABS)]
    args["extendedTables"] = [*args.get("extendedTables", ()), *tables]

    app = web_ui.app
    assert app is not None  # noqa: S101 - declared before it is made

    @app.after_request
    def extend(response: Response) -> Response:
        content = response.get_json(silent=True) if request.path.endswith("/stats/requests") else None
        if isinstance(content, dict):
            # Locust keeps its answer for two seconds, and with it what we have added.
            keys = [tab.key for tab in _TABS]
            others = [stats for stats in content.get("extended_stats", ()) if stats.get("key") not in keys]
            ours = [
                {"key": tab.key, "data": [dict(zip(tab.columns, row, strict=True)) for row in rows]}
                for tab, rows in zip(_TABS, _rows_of_tabs(snapshot(), watch), strict=True)
            ]
            response.set_data(app.json.dumps({**content, "extended_stats": [*others, *ours]}))
        return response


def forget_run_time(web_ui: WebUI, options: Any) -> None:  # noqa: ANN401 - an argparse namespace
    """Have a form without a run time mean none: Locust ends no such run, but keeps the option of the one before."""
    app = web_ui.app
    assert app is not None  # noqa: S101 - declared before it is made

    @app.before_request
    def forget() -> None:
        if request.method == "POST" and request.path.endswith("/swarm") and not request.form.get("run_time"):
            options.run_time = None


def _rows_of_tabs(now: Snapshot, watch: Watch) -> Iterator[Sequence[Sequence[object]]]:
    """Yield the rows of each tab."""
    if now.recording is None:
        yield from ([("this run", "has not begun")], [], [])
    else:
        yield _fidelity_rows(now.recording, now, watch)
        yield incidents.failure_rows(failures_of(now.recording))
        yield incidents.slow_rows(slowest_of(now.recording))


def _fidelity_rows(recording: Recording, now: Snapshot, watch: Watch) -> list[tuple[str, str]]:
    """Return the verdict on the run so far, what streams while it goes on, and what each worker was like."""
    seen = fidelity_of(recording, now.limits, watch.seen(recording))
    rows = [("this run", fidelity.line(seen, now.limits))]
    if now.running:
        rows.append(("now", progress.streams(*_streams(recording, now.live_workers))))
    if now.warming_up:
        rows.append(("warm-up", "what is sent now is left out of latencies and rates"))
    elif recording.steady_ns and WARMUP not in recording.phases:
        rows.append(("warm-up", f"the first {format_duration(recording.steady_ns / NS_PER_S)} are left out"))
    return [*rows, *((name, _worker(worker)) for name, worker in seen["workers"].items())]


def _streams(recording: Recording, live_workers: Sequence[str]) -> tuple[int, float]:
    return progress.in_flight(recording, live_workers), progress.silence_s(recording, live_workers)


def _worker(seen: Summary) -> str:
    shares = {"CPU": "cpu_share", "waited for a core": "core_wait_share", "stalled": "stalled_share"}
    told = {name: "unknown" if seen[key] is None else percent(seen[key]) for name, key in shares.items()}
    if seen["cpu_share_max"] is not None:
        told["CPU"] += f", up to {percent(seen['cpu_share_max'])}"
    parts = [
        f"away for up to {format_duration(seen['loop_lag_s'])}",
        *(f"{name} {text}" for name, text in told.items()),
    ]
    return "; ".join([*parts, f"{format_count(seen['late'])} late samples"])
