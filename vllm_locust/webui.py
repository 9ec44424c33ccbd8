"""Rows of our own in Locust's statistics table, `TTFT short` and `ITL short`, and a tab: whether to believe them.

Rows are built by the master from the recording on every tick, so that nothing is logged per gap. They do not count in
*Aggregated*, nor in RPS. Locust's histograms keep what they are given, so the median and percentile columns show our
resolution; minima, maxima and averages Locust rounds when it shows them.
"""

from collections.abc import Callable
from typing import Any, cast

from flask import Response, request
from locust.stats import RequestStats, StatsEntry
from locust.web import WebUI

from vllm_locust import fidelity
from vllm_locust.cell import Cells, select, total
from vllm_locust.fidelity import Limits, percent
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import format_count, format_duration
from vllm_locust.recording import Recording
from vllm_locust.summary import Summary, fidelity_of
from vllm_locust.workers import Watch

_ROWS = {"TTFT": "ttft", "ITL": "itl"}
_TAB = "llm"
_COLUMNS = {"name": "Fidelity", "text": ""}
METRICS = tuple(_ROWS.values())
"""What the rows are about."""


class _Row(StatsEntry):
    """A row that is no request: it has samples, but no rate."""

    total_rps = 0.0
    current_rps = 0.0


def update_rows(stats: RequestStats, cells: Cells) -> None:
    """Write the latencies of each scenario into Locust's table."""
    for scenario in sorted({key.scenario for key in cells}):
        cell = total(select(cells, scenario=scenario, phase="steady"))
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


def add_tab(web_ui: WebUI, run: Callable[[], tuple[Recording | None, Limits]]) -> None:
    """Give Locust's web UI a tab on the current run, which is asked for as often as its statistics are."""
    watch = Watch()
    args: dict[str, Any] = web_ui.template_args
    structure = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
    args["extendedTabs"] = [*args.get("extendedTabs", ()), {"title": "LLM", "key": _TAB}]
    args["extendedTables"] = [*args.get("extendedTables", ()), {"key": _TAB, "structure": structure}]

    app = web_ui.app
    assert app is not None  # noqa: S101 - declared before it is made

    @app.after_request
    def extend(response: Response) -> Response:
        content = response.get_json(silent=True) if request.path.endswith("/stats/requests") else None
        if isinstance(content, dict):
            # Locust keeps its answer for two seconds, and with it what we have added.
            others = [stats for stats in content.get("extended_stats", ()) if stats.get("key") != _TAB]
            ours = {"key": _TAB, "data": [dict(zip(_COLUMNS, row, strict=True)) for row in _tab(*run(), watch)]}
            response.set_data(app.json.dumps({**content, "extended_stats": [*others, ours]}))
        return response


def _tab(recording: Recording | None, limits: Limits, watch: Watch) -> list[tuple[str, str]]:
    """Return what the tab says: the verdict on the run so far, and what each worker was like."""
    if recording is None:
        return [("this run", "has not begun")]
    seen = fidelity_of(recording, limits, watch.seen(recording))
    return [("this run", fidelity.line(seen, limits)), *((name, _worker(w)) for name, w in seen["workers"].items())]


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
