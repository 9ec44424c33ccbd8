"""Rows of our own in Locust's statistics table, `TTFT short` and `ITL short`, tabs, and the page of charts.

The tabs tell what the report does, what failed, and which requests were the slowest; the page draws it.

Rows are built by the master from the recording on every tick, so that nothing is logged per gap. They do not count in
*Aggregated*, nor in RPS. Locust's histograms keep what they are given, so the median and percentile columns show our
resolution; minima, maxima and averages Locust rounds when it shows them.
"""

import gzip
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import gevent
from flask import Response, request
from locust.stats import RequestStats, StatsEntry
from locust.web import WebUI

from vllm_locust import fidelity, incidents, overview, picture, progress, sheet
from vllm_locust.cell import WARMUP, Cells, select, total
from vllm_locust.fidelity import percent
from vllm_locust.figures import Summary
from vllm_locust.histogram import Histogram
from vllm_locust.live import Live, Told
from vllm_locust.page import page
from vllm_locust.quantity import NS_PER_S, format_count, format_duration
from vllm_locust.terminal import printable

logger = logging.getLogger(__name__)

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


_PAGE = "/llm"
_TABS = (
    _Tab(
        "llm",
        "LLM",
        {"of": "Of", **{f"column{i}": head.title for i, head in enumerate(overview.HEADS)}, "note": "Note"},
    ),
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


def add_tabs(web_ui: WebUI, live: Live) -> None:
    """Give Locust's web UI tabs on the current run, which is asked for as often as its statistics are."""
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
            charts = request.url.removesuffix("/stats/requests") + _PAGE
            ours = [
                {"key": tab.key, "data": [dict(zip(tab.columns, row, strict=True)) for row in rows]}
                for tab, rows in zip(_TABS, _rows_of_tabs(live.told(), charts), strict=True)
            ]
            response.set_data(app.json.dumps({**content, "extended_stats": [*others, *ours]}))
        return response


def add_pages(web_ui: WebUI, live: Live, base_path: str) -> None:
    """Give Locust's web UI the page of charts, what it asks for, and files to download; all behind Locust's login."""
    app = web_ui.app
    assert app is not None  # noqa: S101 - declared before it is made
    charts = f"{base_path}{_PAGE}"

    def add(path: str, answer: Callable[[], Response]) -> None:
        app.add_url_rule(f"{charts}{path}", f"vllm_locust{path}", web_ui.auth_required_if_enabled(answer))

    def shown() -> Response:
        return Response(page(), mimetype="text/html")

    def picture() -> Response:
        return _compressed(live.picture(request.args.get("version", ""), request.args.get("from", 0, type=int)))

    def saved() -> Response:
        return _file("charts.html", [page(live.picture())], "text/html")

    add("", shown)
    add("/picture", picture)
    add("/charts.html", saved)
    for name, table in _SHEETS.items():
        add(f"/{name}.csv", partial(_sheet, f"{name}.csv", table, live))
    links = [
        {"href": f".{_PAGE}{path}", "title": title}
        for path, title in {
            "": "LLM charts, live",
            "/charts.html": "Download LLM charts (HTML)",
            **{f"/{name}.csv": f"Download LLM {name} CSV" for name in _SHEETS},
        }.items()
    ]
    args: dict[str, Any] = web_ui.template_args
    args["extendedCsvFiles"] = [*args.get("extendedCsvFiles", ()), *links]
    host = web_ui.host if web_ui.host not in ("", "0.0.0.0") else "localhost"  # noqa: S104 - what Locust listens on
    logger.info("charts are at %s://%s:%d%s", "https" if web_ui.tls_cert else "http", host, web_ui.port, charts)


_SHEETS: dict[str, Callable[[Live, Told], sheet.Table]] = {
    "scenarios": lambda _, told: sheet.scenarios(told.summary),
    "windows": lambda live, _: sheet.windows(live.columns()),
    "failures": lambda _, told: sheet.records(told.summary["failures"]),
    "slowest": lambda _, told: sheet.records(told.summary["slowest"]),
}
"""What there is to download, by name."""


def _sheet(name: str, table: Callable[[Live, Told], sheet.Table], live: Live) -> Response:
    told = live.told()
    if told is None:
        return Response("there has been no run yet\n", HTTPStatus.NOT_FOUND, mimetype="text/plain")
    return _file(name, sheet.lines(table(live, told)), "text/csv")


def _file(name: str, parts: Iterable[str], mimetype: str) -> Response:
    return Response(parts, mimetype=mimetype, headers={"Content-Disposition": f'attachment; filename="llm_{name}"'})


def _compressed(text: str) -> Response:
    """Return JSON, in a tenth of the bytes; in a thread, since a single process streams meanwhile."""
    headers = {"Cache-Control": "no-store"}
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        return Response(text, mimetype="application/json", headers=headers)
    body = gevent.get_hub().threadpool.apply(gzip.compress, (text.encode(), 1))
    return Response(body, mimetype="application/json", headers={**headers, "Content-Encoding": "gzip"})


def forget_run_time(web_ui: WebUI, options: Any) -> None:  # noqa: ANN401 - an argparse namespace
    """Have a form without a run time mean none: Locust ends no such run, but keeps the option of the one before."""
    app = web_ui.app
    assert app is not None  # noqa: S101 - declared before it is made

    @app.before_request
    def forget() -> None:
        if request.method == "POST" and request.path.endswith("/swarm") and not request.form.get("run_time"):
            options.run_time = None


def _rows_of_tabs(told: Told | None, charts: str) -> Iterator[Sequence[Sequence[object]]]:
    """Yield the rows of each tab."""
    if told is None:
        yield from ([_noted("run", "has not begun"), _noted("charts", charts)], [], [])
    else:
        yield [*_llm_rows(told), _noted("charts", charts)]
        yield incidents.failure_rows(told.summary["failures"])
        yield incidents.slow_rows(told.summary["slowest"])


def _llm_rows(told: Told) -> Iterator[Sequence[object]]:
    """Yield the rows of the report, of the run and of its last window, and in words what else there is to say."""
    summary, empty = told.summary, [""] * (len(overview.HEADS) - 2)
    for of, rows in (("run", overview.rows(summary)), ("window", told.last_window)):
        yield from ([of, *row, ""] for row in rows)
    for outcome, number, share in picture.outcome_rows(summary):
        yield ["outcome", outcome, number, *empty, share]
    yield from (_noted(subject.lower(), text) for subject, text in picture.fact_rows(summary, told.meta))
    yield from (_noted("limit", f"{one['limit']}: {one['text']}, {one['state']}") for one in summary["limits"])
    yield from (_noted(subject, text) for subject, text in _moment(told))
    yield _noted("fidelity", fidelity.line(summary["fidelity"], told.meta.generator_limits))
    yield from (_noted(worker, _worker(seen)) for worker, seen in summary["fidelity"]["workers"].items())


def _noted(subject: str, text: str) -> list[str]:
    return [printable(subject), *[""] * len(overview.HEADS), printable(text)]


def _moment(told: Told) -> Iterator[tuple[str, str]]:
    """Yield what streams while the run goes on, and what is left out of its numbers."""
    frame, recording = told.frame, told.recording
    if told.running:
        yield "now", progress.streams(frame["in_flight"], frame["silence_s"])
    if frame["warming_up"]:
        yield "warm-up", "what is sent now is left out of latencies and rates"
    elif recording.steady_ns and WARMUP not in recording.phases:
        yield "warm-up", f"the first {format_duration(recording.steady_ns / NS_PER_S)} are left out"
    yield from (("verdict", text) for text in frame["verdict"] or ())


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
