"""The exporter, scraped over HTTP, read by strict parsers, promtool and a Prometheus server."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import gevent
import pytest
from gevent.subprocess import DEVNULL, Popen
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from vllm_locust import exporter
from vllm_locust.arrivals import Arrivals, Segment
from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.exporter import MAX_SCENARIOS, QUANTILES, Exporter, Snapshot
from vllm_locust.families import BOUNDS_S, HISTOGRAMS
from vllm_locust.fidelity import DEFAULTS, Limits
from vllm_locust.listener import serve
from vllm_locust.load import Load
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.summary import Meta
from vllm_locust.timeline import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from prometheus_client import Metric

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

SHORT = Key("short", "chat")
MS = NS_PER_S // 1000
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
HOSTILE = '5" screen\nnew\\path ü 漢字 {a="b"} # \\n'

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed here")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus server here")


class Master:
    """The owner of recordings: what `Snapshot` is made of, and an exporter of it."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.before: tuple[Recording, ...] = ()
        self.scenarios: dict[str, None] = {}
        self.meta: Meta | None = None
        self.running = False
        self.users = self.workers = 0
        self.live: tuple[str, ...] = ("w",)
        self.limits = DEFAULTS
        self.exporter = Exporter(self.snapshot)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            recording=self.recording,
            before=self.before,
            running=self.running,
            users=self.users,
            workers=self.workers,
            live_workers=self.live,
            limits=self.limits,
            scenarios=tuple(self.scenarios),
            meta=self.meta,
        )

    def start(self, run: str, epoch: int = 0) -> None:
        if self.recording is not None and self.recording not in self.before:
            self.exporter.retire(self.recording)
        self.recording = Recording(run, epoch, 10 * NS_PER_S)
        self.running, self.users, self.workers = True, 5, 1

    def stop(self) -> None:
        self.running, self.users = False, 0

    def report(  # noqa: PLR0913 - what differs between tests
        self,
        cells: Cells,
        *,
        worker: str = "w",
        index: int = 0,
        seq: int = 1,
        sealed: bool = False,
        streams: list[tuple[str, str, int]] | None = None,
        recording: Recording | None = None,
        **gauges_seen: int,
    ) -> None:
        recording = recording or self.recording
        assert recording is not None
        gauges = Gauges(late=1, plugin_errors=2, **gauges_seen)
        window = WindowState(index=index, seq=seq, sealed=sealed, gauges=gauges, cells=to_wire(cells))
        self.scenarios |= dict.fromkeys(cell.key.scenario for cell in window.cells)
        known = recording.merge(
            Report(
                run=recording.run,
                epoch=recording.epoch,
                worker=worker,
                seq=seq,
                now_ns=seq,
                windows=[window],
                failures=[],
                in_flight=streams or [],
            )
        )
        assert known


def ok_requests(number: int, latency_ns: int = 40 * MS) -> Cell:
    cell = Cell()
    for metric in METRICS:
        cell.histogram(metric).add(9 if metric.endswith("_tokens") else latency_ns, number)
    for name in ("sent", "outcome|ok|200"):
        cell.count(name, number)
    for name in ("tokens_received", "token_events", "stamped"):
        cell.count(name, 9 * number)
    return cell


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def url(master: Master) -> Iterator[str]:
    server = serve(master.exporter.registry, 0, "127.0.0.1")
    yield f"http://127.0.0.1:{server.port}/metrics"
    server.close()


def fetch(url: str, accept: str = "text/plain") -> str:
    """Read a page in a thread of its own, so that a server in this thread's hub can answer."""

    def read() -> str:
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())

    return str(gevent.get_hub().threadpool.apply(read))


def series_of(families: Iterable[Metric]) -> Series:
    samples = [sample for family in families for sample in family.samples]
    series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples), "a series is there twice"
    return series


def collected(master: Master) -> Series:
    """Return all series without the way over HTTP and parsers."""
    return series_of(master.exporter.registry.collect())


def scrape(url: str) -> Series:
    """Return all series, which must be the same in both formats and to both parsers."""
    series = series_of(parse_text(fetch(url)))
    assert series == series_of(parse_openmetrics(fetch(url, OPENMETRICS)))  # type: ignore[no-untyped-call]
    return series


def one(series: Series, name: str, /, **labels: str) -> float | None:
    """Return the value of one series, absent where it is."""
    return series.get((f"vllm_locust_{name}", frozenset(labels.items())))


def names(series: Series) -> set[str]:
    return {name for name, _ in series}


def is_total(name: str) -> bool:
    return name.endswith(("_total", "_bucket", "_sum", "_count"))


def promtool(page: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


ALWAYS = {"vllm_locust_running", "vllm_locust_users", "vllm_locust_warming_up", "vllm_locust_workers"}
P50 = {"scenario": "short", "endpoint": "chat", "quantile": "0.5"}
CHAT = {"scenario": "short", "endpoint": "chat"}
STEADY = {**CHAT, "phase": "steady"}


def test_case_64_before_the_first_sample_nothing_but_the_state_is_there(master: Master, url: str) -> None:
    assert names(scrape(url)) == ALWAYS
    master.start("a")
    assert names(scrape(url)) == ALWAYS
    master.report({})
    assert names(scrape(url)) == ALWAYS
    cell = Cell()
    cell.count("sent")
    cell.count("tokens_received", 0)
    master.report({SHORT: cell}, seq=2, streams=[("short", "chat", 1)])
    series = scrape(url)
    assert names(series) == ALWAYS | {
        "vllm_locust_requests_sent_total",
        "vllm_locust_requests_failed_total",
        "vllm_locust_requests_total",
        "vllm_locust_streams_in_flight",
        "vllm_locust_longest_silence_seconds",
        "vllm_locust_plugin_errors_total",
        "vllm_locust_late_samples_total",
    }
    assert one(series, "streams_in_flight", **CHAT) == 1


def test_case_31_how_long_the_quietest_stream_is_silent_is_told_of_those_in_flight_now(
    master: Master, url: str
) -> None:
    master.start("a")
    master.live = ("w", "x")
    cell = Cell(counters={"sent": 2})
    master.report({SHORT: cell}, sealed=True, silence_last_ns=90 * NS_PER_S)
    master.report({SHORT: cell}, index=1, seq=2, silence_last_ns=31 * NS_PER_S)
    master.report({SHORT: cell}, worker="x", sealed=True, silence_last_ns=7 * NS_PER_S)
    master.report({SHORT: cell}, worker="lost", silence_last_ns=200 * NS_PER_S)
    assert one(scrape(url), "longest_silence_seconds") == 31
    master.stop()
    assert one(scrape(url), "longest_silence_seconds") is None


def test_case_31_streams_in_flight_are_those_of_live_workers_and_none_after_the_stop(master: Master, url: str) -> None:
    """What a lost worker had in flight is gone, though its requests never end in any counter."""
    master.start("a")
    master.live = ("w", "x")
    cell = Cell(counters={"sent": 9})
    master.report({SHORT: cell}, streams=[("other one", "completions", 4), ("short", "chat", 3)], seq=2)
    master.report({SHORT: cell}, streams=[("short", "chat", 9)])  # older, and late
    master.report({SHORT: cell}, worker="x", streams=[("short", "chat", 20)])
    both = scrape(url)
    assert one(both, "streams_in_flight", **CHAT) == 23
    assert one(both, "streams_in_flight", scenario="other one", endpoint="completions") == 4
    master.live = ("w",)
    assert one(scrape(url), "streams_in_flight", **CHAT) == 3
    master.live = ()
    assert one(scrape(url), "streams_in_flight", **CHAT) == 0
    master.live = ("w", "x")
    master.stop()
    stopped = scrape(url)
    assert one(stopped, "streams_in_flight", **CHAT) == 0
    assert one(stopped, "streams_in_flight", scenario="other one", endpoint="completions") is None


def test_case_64_window_percentiles_are_there_only_for_a_closed_window_with_samples(master: Master, url: str) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(3)})
    open_window = scrape(url)
    assert one(open_window, "ttft_quantile_seconds", **P50, span="window") is None
    assert one(open_window, "ttft_quantile_seconds", **P50, span="run") == pytest.approx(0.04, rel=0.005)
    master.report({SHORT: ok_requests(3)}, seq=2, sealed=True)
    master.report({SHORT: ok_requests(1, 900 * MS)}, index=1, seq=2)
    assert one(scrape(url), "ttft_quantile_seconds", **P50, span="window") == pytest.approx(0.04, rel=0.005)
    master.report({SHORT: ok_requests(1, 900 * MS)}, index=1, seq=3, sealed=True)
    assert one(scrape(url), "ttft_quantile_seconds", **P50, span="window") == pytest.approx(0.9, rel=0.005)
    master.report({}, index=2, seq=4, sealed=True)
    gap = scrape(url)
    assert one(gap, "ttft_quantile_seconds", **P50, span="window") is None
    assert one(gap, "ttft_seconds_count", **CHAT) == 4


def test_case_64_a_window_is_closed_when_every_live_worker_has_closed_it(master: Master, url: str) -> None:
    master.start("a")
    master.live = ("w", "x")
    master.report({SHORT: ok_requests(3)}, sealed=True)
    master.report({SHORT: ok_requests(3, 60 * MS)}, worker="lost")
    assert one(scrape(url), "ttft_quantile_seconds", **P50, span="window") is None
    master.report({SHORT: ok_requests(9, 80 * MS)}, worker="x", sealed=True)
    assert one(scrape(url), "ttft_quantile_seconds", **P50, span="window") == pytest.approx(0.08, rel=0.005)


def test_case_64_after_the_stop_state_is_zero_and_totals_stay_until_a_new_start_adds_to_them(
    master: Master, url: str
) -> None:
    cell = ok_requests(3)
    cell.count("sent", 2)
    master.start("a")
    master.report({SHORT: cell}, sealed=True, streams=[("short", "chat", 2)])
    during = scrape(url)
    assert one(during, "streams_in_flight", **CHAT) == 2
    master.stop()
    after = scrape(url)
    state = [one(after, name) for name in ("running", "users", "workers")]
    assert [*state, one(after, "streams_in_flight", **CHAT)] == [0, 0, 1, 0]
    assert one(after, "ttft_quantile_seconds", **P50, span="window") is None
    assert one(after, "ttft_quantile_seconds", **P50, span="run") == pytest.approx(0.04, rel=0.005)
    totals = {key: value for key, value in during.items() if is_total(key[0])}
    assert totals == {key: value for key, value in after.items() if is_total(key[0])}
    master.start("b")
    again = scrape(url)
    assert totals == {key: value for key, value in again.items() if is_total(key[0])}
    assert one(again, "streams_in_flight", **CHAT) is None
    assert one(again, "ttft_quantile_seconds", **P50, span="run") is None


def test_case_57_totals_survive_a_reset_and_lose_nothing_between_scrapes(master: Master, url: str) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(60)})
    before = scrape(url)
    master.report({SHORT: ok_requests(100)}, seq=2)  # after the last scrape of this epoch
    assert master.recording is not None
    master.exporter.retire(master.recording)
    master.start("a", epoch=1)
    assert one(scrape(url), "ttft_seconds_count", **CHAT) == 100
    master.report({SHORT: ok_requests(50, 900 * MS)})
    after = scrape(url)
    assert all(after[key] >= value for key, value in before.items() if is_total(key[0]))
    ok = {**STEADY, "outcome": "ok", "status": "200"}
    assert one(after, "requests_total", **ok) == one(after, "ttft_seconds_count", **CHAT) == 150
    for name in ("input_tokens_total", "output_tokens_total", "token_events_total"):
        assert one(after, name, **STEADY) == 9 * 150
    assert one(after, "ttft_seconds_sum", **CHAT) == 100 * 0.04 + 50 * 0.9
    assert one(after, "ttft_quantile_seconds_count", **CHAT, span="run") == 150
    assert one(after, "plugin_errors_total") == 4
    assert one(after, "ttft_quantile_seconds", **P50, span="run") == pytest.approx(0.9, rel=0.005)


def test_case_58_a_second_run_adds_and_scenarios_of_the_first_are_not_live(master: Master, url: str) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(100)})
    scrape(url)
    master.stop()
    first = master.recording
    assert first is not None
    master.start("b")
    long = Key("long", "completions")
    master.report({long: ok_requests(30)})
    for _ in range(2):
        series = scrape(url)
        master.exporter.retire(first)
    assert one(series, "ttft_seconds_count", **CHAT) == 100
    assert one(series, "ttft_seconds_count", scenario="long", endpoint="completions") == 30
    live = ("vllm_locust_ttft_quantile_seconds", "vllm_locust_streams_in_flight")
    assert {dict(labels)["scenario"] for name, labels in series if name in live} == {"long"}


def test_a_retired_recording_that_stays_current_is_counted_once(master: Master, url: str) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(7)})
    running = scrape(url)
    assert master.recording is not None
    master.exporter.retire(master.recording)
    master.exporter.retire(master.recording)
    assert scrape(url) == running


def counted(number: int) -> Cell:
    """Return a cell with so many requests, cheaply."""
    cell = Cell()
    cell.histogram("ttft").add(40 * MS, number)
    cell.count("sent", number)
    cell.count("outcome|http_5xx|500", number)
    return cell


WORKERS, SCENARIOS = ("w", "x"), ("a", "b", "c", "d")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from(WORKERS), st.sampled_from(SCENARIOS)),
        st.tuples(st.just("late report"), st.sampled_from(WORKERS), st.sampled_from(SCENARIOS)),
        st.tuples(st.just("old report"), st.sampled_from(WORKERS), st.sampled_from(SCENARIOS)),
        st.tuples(st.sampled_from(["seal", "lose"]), st.sampled_from(WORKERS), st.just("")),
        st.tuples(st.sampled_from(["reset", "settle", "run", "stop", "scrape"]), st.just(""), st.just("")),
    ),
    max_size=25,
)


class Story:
    """What happens to a master, step by step, and what it must have counted in the end."""

    def __init__(self) -> None:
        self.master = Master()
        self.master.live = WORKERS
        self.total: Counter[str] = Counter()
        self._number = self._seq = 0
        self._cells: dict[tuple[str, int, str], Cells] = {}
        self._index: Counter[tuple[str, int, str]] = Counter()
        self.master.start("0")

    def happens(self, step: str, worker: str, scenario: str) -> None:
        master, current = self.master, self.master.recording
        assert current is not None
        if step == "report":
            self._report(current, worker, scenario)
        elif step == "late report" and master.before:
            self._report(master.before[-1], worker, scenario)
        elif step == "old report":
            stale = Recording("long ago", 0, 10 * NS_PER_S)
            report = Report(run=stale.run, epoch=0, worker=worker, seq=self._seq, now_ns=0, windows=[], failures=[])
            assert not current.merge(report)
        elif step == "seal":
            self._report(current, worker, SCENARIOS[0], sealed=True)
        elif step == "lose":
            master.live = tuple(name for name in WORKERS if name != worker)
        elif step == "reset":
            master.before = (*master.before, current)
            master.start(current.run, current.epoch + 1)
        elif step == "settle" and master.before:
            settled, *rest = master.before
            master.before = tuple(rest)
            master.exporter.retire(settled)
        elif step == "run":  # a reset may be under way
            self._number += 1
            master.start(str(self._number))
            master.live = WORKERS
        elif step == "stop":
            master.stop()

    def _report(self, recording: Recording, worker: str, scenario: str, *, sealed: bool = False) -> None:
        """Report the whole state of the open window, in which three more requests have ended."""
        place = (recording.run, recording.epoch, worker)
        self._seq += 1
        cells = self._cells.setdefault(place, {})
        cells.setdefault(Key(scenario, "chat"), Cell()).merge(counted(3))
        self.total[scenario] += 3
        index = self._index[place]
        self.master.report(cells, recording=recording, worker=worker, index=index, seq=self._seq, sealed=sealed)
        if sealed:
            self._index[place] += 1
            del self._cells[place]


@given(STEPS)
def test_case_57_totals_never_fall_and_a_scrape_changes_nothing(steps: list[tuple[str, str, str]]) -> None:
    """Whatever happens, and however many scenarios there are; the other story has the same steps without a scrape."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "MAX_SCENARIOS", 2)
        scraped, alone = Story(), Story()
        before: Series = {}
        for step in [*steps, ("scrape", "", "")]:
            if step[0] == "scrape":
                now = collected(scraped.master)
                assert all(now.get(key, -1) >= value for key, value in before.items() if is_total(key[0]))
                before = now
            else:
                scraped.happens(*step)
                alone.happens(*step)
        assert before == collected(alone.master)
    for name in ("requests_sent_total", "requests_failed_total", "requests_total", "ttft_seconds_count"):
        named = {key: value for key, value in before.items() if key[0] == f"vllm_locust_{name}"}
        found = [value for key, value in named.items() if dict(key[1]).get("outcome") != "ok"]
        assert sum(found) == sum(alone.total.values())
        assert len(found) == min(len(alone.total), 3)


ZEROS = {"requests_sent", "requests_failed", "input_tokens", "output_tokens", "failed_output_tokens", "token_events"}
COUNTED = ZEROS | {"requests_scheduled", "requests_dropped", "requests_good"}


def test_case_57_counters_of_known_parts_begin_at_zero_so_that_rate_sees_the_first_increase(
    master: Master, url: str
) -> None:
    master.exporter.expect([("short", "chat")], Load(warmup_ns=5), good=False)
    series = scrape(url)
    ok = {"outcome": "ok", "status": "200"}
    for phase in ("warmup", "steady"):
        labels = {**CHAT, "phase": phase}
        assert {name for name in COUNTED if one(series, f"{name}_total", **labels) == 0} == ZEROS
        assert one(series, "requests_total", **labels, **ok) == 0
    assert {one(series, f"{name}_total") for name in ("plugin_errors", "late_samples")} == {0}
    assert not any("_seconds" in name or "streams" in name for name in names(series))
    master.exporter.expect([("short", "chat")], Load(arrivals=Arrivals(profile=(Segment(1),))), good=True)
    series = scrape(url)
    assert {name for name in COUNTED if one(series, f"{name}_total", **STEADY) == 0} == COUNTED
    master.start("a")
    master.report({SHORT: counted(5)})
    series = scrape(url)
    assert one(series, "requests_failed_total", **STEADY) == one(series, "requests_sent_total", **STEADY) == 5
    assert one(series, "requests_total", **STEADY, outcome="http_5xx", status="500") == 5
    assert one(series, "requests_total", **STEADY, **ok) == 0
    assert one(series, "requests_scheduled_total", **CHAT, phase="warmup") is None


def test_one_series_says_what_the_run_is_whatever_its_names(master: Master, url: str) -> None:
    assert "vllm_locust_run_info" not in names(scrape(url))
    run = {"run": "f3446611", "name": HOSTILE, "scenario": HOSTILE, "target": "http://host:8000/v1", "version": "1"}
    scenarios = dict.fromkeys(("First", "Second"), HOSTILE) | {"WithBodiesOfItsOwn": ""}
    target = run["target"]
    master.meta = Meta(run="f3446611", name=HOSTILE, scenarios=scenarios, target=target, plugin_version="1")
    master.start("f3446611")
    master.report({SHORT: ok_requests(3)}, sealed=True)
    series = scrape(url)
    assert one(series, "run_info", **run) == 1
    others = {label for name, labels in series if name != "vllm_locust_run_info" for label, _ in labels}
    assert others.isdisjoint({"run", "name", "target", "version"})


def test_phases_are_a_label_of_counters_and_latencies_are_steady(master: Master, url: str) -> None:
    master.start("a")
    keys = [SHORT._replace(phase="warmup"), SHORT._replace(stage=1), SHORT._replace(stage=2)]
    master.report({key: ok_requests(10) for key in keys})
    series = scrape(url)
    assert one(series, "requests_sent_total", **CHAT, phase="warmup") == 10
    assert one(series, "requests_sent_total", **STEADY) == 20
    for metric in HISTOGRAMS:
        assert one(series, f"{metric}_seconds_count", **CHAT) == 20
        assert one(series, f"{metric}_quantile_seconds_count", **CHAT, span="run") == 20


def test_exported_percentiles_are_those_of_the_recording(master: Master, url: str) -> None:
    cell = ok_requests(1)
    for sample in (3, 5, 800, 90_000, 4_000_000, 70_000_000):
        for metric in METRICS:
            cell.histogram(metric).add(sample)
    master.start("a")
    master.report({SHORT: cell}, sealed=True)
    series = scrape(url)
    for metric, span in itertools.product(METRICS, ("run", "window")):
        stem, unit = (metric[:-7], "tokens") if metric.endswith("_tokens") else (metric, "seconds")
        scale = 1 if unit == "tokens" else NS_PER_S
        for quantile, value in zip(QUANTILES, cell.histograms[metric].percentiles(QUANTILES), strict=True):
            assert value is not None
            labels = {**CHAT, "span": span, "quantile": str(quantile)}
            assert one(series, f"{stem}_quantile_{unit}", **labels) == value / scale


@needs_promtool
def test_case_66_promtool_has_no_complaint_of_a_page_with_everything(master: Master, url: str) -> None:
    idle = fetch(url)
    assert idle.count("# TYPE") == len(ALWAYS)
    promtool(idle)
    cell = ok_requests(5)
    for name in ("outcome|http_4xx|404", "outcome|connect_failed|0", "tokens_failed"):
        cell.count(name)
    cell.histogram("uncertainty").add(1000, 45)
    master.start("a")
    master.live = (HOSTILE,)
    cells = {Key(HOSTILE, "chat"): cell, Key("", "completions", "retry"): cell}
    master.report(cells, worker=HOSTILE, sealed=True, **WORST)
    page = fetch(url)
    assert page.count("# TYPE") == len(ALWAYS) + 2 + 3 + len(WORKER_FAMILIES) + len(HISTOGRAMS) + len(METRICS) + 9
    promtool(page)


def test_case_66_label_values_come_back_as_they_were(master: Master, url: str) -> None:
    master.start("a")
    master.report({Key(HOSTILE, "chat"): ok_requests(5)}, sealed=True)
    scenarios = {dict(labels).get("scenario") for _, labels in scrape(url)}
    assert scenarios == {HOSTILE, None}


def test_case_66_series_follow_neither_workers_that_are_gone_nor_requests_and_scenarios_have_a_limit(
    master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(1)})
    few = collected(master)
    for worker in range(200):
        master.report({SHORT: ok_requests(50)}, worker=f"w{worker}")
    assert collected(master).keys() == few.keys()
    assert {dict(labels).get("worker") for _, labels in collected(master)} == {None}
    for number in range(0, 200, 40):  # one after the other takes the place of the last
        master.live = (f"w{number}",)
        master.report({SHORT: ok_requests(50)}, worker=f"w{number}", seq=2, sealed=True, **WORST)
        told = {dict(labels).get("worker") for _, labels in collected(master)}
        assert told == {None, f"w{number}"}
    assert len(collected(master)) == len(few) + len(WORKER_FAMILIES) + len(QUANTILES) * len(METRICS)
    master.live = ("w",)
    master.report({Key(f"s{i:03}", "chat"): ok_requests(1) for i in range(150)}, index=1, sealed=True)
    for _ in range(2):
        series = collected(master)
        counts = {k: v for k, v in series.items() if k[0] == "vllm_locust_ttft_seconds_count"}
        assert len(counts) == MAX_SCENARIOS + 1
        assert sum(counts.values()) == 1 + 200 * 50 + 150
        others = one(series, "ttft_seconds_count", scenario="other", endpoint="chat")
        assert others == 1 + 150 - MAX_SCENARIOS
    assert [record.levelname for record in caplog.records] == ["WARNING"]


VLLM_EDGES = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 "
    "2560.0 "
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 "
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
)
"""As printed by a vLLM 0.32 server for ttft, itl and tpot, e2el."""


def test_case_67_edges_are_ten_percent_apart_and_those_of_vllm_among_them(master: Master, url: str) -> None:
    master.start("a")
    master.report({SHORT: ok_requests(1)})
    series = scrape(url)
    for metric in HISTOGRAMS:
        name = f"vllm_locust_{metric}_seconds_bucket"
        edges = {dict(labels)["le"] for found, labels in series if found == name}
        assert edges >= {*VLLM_EDGES.split(), "+Inf", "0.0005", "300.0"}
    fine = [bound for bound in BOUNDS_S if bound <= 300]
    assert fine[0] == 0.0005
    assert all(1.05 < high / low < 1.104 for low, high in itertools.pairwise(fine))


@given(st.lists(st.integers(min_value=1, max_value=10_000 * NS_PER_S), min_size=1, max_size=50))
def test_an_edge_counts_all_below_it_and_at_most_one_percent_above(values: list[int]) -> None:
    cell, master = Cell(), Master()
    for value in values:
        cell.histogram("ttft").add(value)
    master.start("a")
    master.report({SHORT: cell})
    series = collected(master)
    for bound in BOUNDS_S:
        counted = one(series, "ttft_seconds_bucket", **CHAT, le=str(bound))
        edge_ns = bound * NS_PER_S
        at_most, near = (sum(value <= limit for value in values) for limit in (edge_ns, edge_ns * 1.0101))
        assert counted is not None
        assert at_most <= counted <= near
    assert one(series, "ttft_seconds_bucket", **CHAT, le="+Inf") == len(values)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(answer: Callable[[], float | None], timeout_s: float = 8) -> float:
    """Ask until there is an answer."""
    deadline = time.monotonic() + timeout_s
    while (value := answer()) is None:
        assert time.monotonic() < deadline, "no answer in time"
        gevent.sleep(0.1)
    return value


def prometheus_value(base: str, query: str) -> float | None:
    try:
        answer = json.loads(fetch(f"{base}/api/v1/query?{urlencode({'query': query})}"))
    except OSError:  # not up yet
        return None
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else None


@needs_prometheus
def test_case_67_a_prometheus_server_finds_the_percentiles(master: Master, url: str, tmp_path: Path) -> None:
    cell = Cell()
    cell.histogram("itl").add(4 * MS, 1000)
    cell.histogram("ttft").add(45 * NS_PER_S, 1000)
    master.start("a")
    master.report({SHORT: cell})
    target = url.removeprefix("http://").removesuffix("/metrics")
    scraping = {"job_name": "vllm_locust", "scrape_interval": "200ms", "scrape_timeout": "200ms"}
    scraping["static_configs"] = [{"targets": [target]}]  # type: ignore[assignment]
    config, port = tmp_path / "prometheus.json", free_port()
    config.write_text(json.dumps({"scrape_configs": [scraping]}))  # JSON is YAML
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    arguments.append(f"--web.listen-address=127.0.0.1:{port}")
    server = Popen(["prometheus", *arguments], stdout=DEVNULL, stderr=DEVNULL)
    try:
        for metric, expected_s in (("itl", 0.004), ("ttft", 45.0)):
            for quantile in (0.5, 0.99):
                query = f"histogram_quantile({quantile}, vllm_locust_{metric}_seconds_bucket)"
                value = until(partial(prometheus_value, f"http://127.0.0.1:{port}", query))
                assert value == pytest.approx(expected_s, rel=0.1)
            query = f'vllm_locust_{metric}_quantile_seconds{{quantile="0.99",span="run"}}'
            assert prometheus_value(f"http://127.0.0.1:{port}", query) == pytest.approx(expected_s, rel=0.005)
    finally:
        server.kill()
        server.wait()


def test_case_63_a_taken_port_is_refused_by_name(master: Master) -> None:
    server = serve(master.exporter.registry, 0)
    try:
        for host in ("", "127.0.0.1"):
            with pytest.raises(InputError, match=f"--prometheus-port: port {server.port} is taken") as error:
                serve(Exporter(master.snapshot), server.port, host)
            assert error.value.exit_code == ExitCode.BAD_INPUT
    finally:
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_case_63_a_port_that_another_program_has_is_refused(master: Master, host: str) -> None:
    with socket.create_server((host, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"{port} is taken"):
            serve(master.exporter.registry, port)


def test_a_port_that_is_none_is_refused(master: Master) -> None:
    with pytest.raises(InputError, match="--prometheus-port: 70000 is no port"):
        serve(master.exporter.registry, 70000)
    with pytest.raises(InputError, match="port 9646 cannot be used"):
        serve(master.exporter.registry, 9646, "192.0.2.1")


def test_case_63_a_restart_gets_its_port_back_at_once(master: Master) -> None:
    server = serve(master.exporter.registry, 0)
    for users in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as scraper:
            scraper.settimeout(5)
            scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert gevent.get_hub().threadpool.apply(scraper.recv, (100,)).startswith(b"HTTP/1.1 200")
            server.close()  # while the scraper keeps its connection, as Prometheus does
            page = gevent.get_hub().threadpool.apply(read_all, (scraper,))
            assert page.endswith(b"\n")
        master.users = users
        server = serve(master.exporter.registry, server.port)
        page = fetch(f"http://127.0.0.1:{server.port}/metrics")
        assert f"vllm_locust_users {users:.1f}" in page
    server.close()


def read_all(scraper: socket.socket) -> bytes:
    """Read until the other side closes."""
    return b"".join(iter(lambda: scraper.recv(4096), b""))


def test_who_asks_for_the_headers_alone_gets_no_page_and_may_ask_again(master: Master) -> None:
    server = serve(master.exporter.registry, 0, "127.0.0.1")

    def ask_twice() -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as scraper:
            scraper.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return read_all(scraper)

    told = gevent.get_hub().threadpool.apply(ask_twice)
    server.close()
    headers, second, page = told.split(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 OK\r\n")
    assert second.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(page)}".encode() in headers
    assert b"vllm_locust_running 0.0" in page


def test_both_families_of_addresses_are_answered(master: Master) -> None:
    server = serve(master.exporter.registry, 0)
    hosts = ["127.0.0.1", *(["[::1]"] if has_ipv6_loopback() else [])]
    try:
        pages = [fetch(f"http://{host}:{server.port}/metrics") for host in hosts]
    finally:
        server.close()
    assert all("vllm_locust_running 0.0" in page for page in pages)


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


PATCHED = """
import gevent.monkey; gevent.monkey.patch_all()
import urllib.request
from vllm_locust.exporter import Exporter, Snapshot
from vllm_locust.listener import serve
snapshot = Snapshot(recording=None, running=True, users=3, workers=2, live_workers=())
server = serve(Exporter(lambda: snapshot).registry, 0)
print(urllib.request.urlopen(f"http://localhost:{server.port}/metrics", timeout=5).read().decode())
server.close()
"""


def test_it_serves_in_a_process_that_gevent_has_patched() -> None:
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "vllm_locust_users 3.0" in done.stdout


def test_streams_are_read_while_a_page_is_written(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exporter._SLICE_NS <= 2 * MS
    monkeypatch.setattr(exporter, "_SLICE_NS", 0)
    master.start("a")
    master.report({Key(f"s{i}", "chat"): ok_requests(5) for i in range(20)})
    turns = 0

    def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            gevent.sleep(0)

    reader = gevent.spawn(stream)
    families = list(master.exporter.collect())
    reader.kill()
    assert turns >= len(families) - 1


def test_a_histogram_of_zeros_is_in_its_first_bucket(master: Master, url: str) -> None:
    cell = Cell()
    cell.histogram("itl").add(0, 3)
    master.start("a")
    master.report({SHORT: cell})
    series = scrape(url)
    assert one(series, "itl_seconds_bucket", **CHAT, le="0.0005") == 3
    assert one(series, "itl_quantile_seconds", **P50, span="run") == 0
    assert not any(math.isnan(value) for value in series.values())


# Fidelity

WORST = {"span_ns": 10 * NS_PER_S, "cpu_ns": 4 * NS_PER_S, "core_wait_ns": 50 * MS, "loop_lag_ns": 212 * MS}


def test_case_40_the_loop_lag_and_cpu_of_each_live_worker_are_those_of_the_last_closed_window(
    master: Master, url: str
) -> None:
    master.start("a")
    master.live = ("w", "x (host)")
    master.report({SHORT: ok_requests(3)}, sealed=True, **WORST, stalled_ns=1212 * MS)
    assert one(scrape(url), "worker_cpu_ratio", worker="w") is None
    master.report({SHORT: ok_requests(3)}, worker="x (host)", sealed=True, span_ns=10 * NS_PER_S)
    master.report({SHORT: ok_requests(3)}, worker="lost", sealed=True, **WORST)
    series = scrape(url)
    seen = {
        worker: [one(series, f"worker_{name}", worker=worker) for name in WORKER_FAMILIES]
        for worker in ("w", "x (host)", "lost")
    }
    assert seen == {"w": [0.212, 0.4, 0.005, 0.1], "x (host)": [0, 0, None, 0], "lost": [None] * 4}
    master.stop()
    assert not any("_worker_" in name for name in names(scrape(url)))


WORKER_FAMILIES = ("loop_lag_seconds", "cpu_ratio", "core_wait_ratio", "stalled_ratio")


def test_case_40_whether_the_generator_limits_the_run_so_far_is_told_from_its_first_token_on(
    master: Master, url: str
) -> None:
    cell = ok_requests(100)
    cell.histogram("uncertainty").add(1000, 98)
    cell.histogram("uncertainty").add(20 * MS, 2)
    cell.count("unstamped", 100)
    master.start("a")
    master.report({SHORT: ok_requests(0)})
    assert one(scrape(url), "generator_limited") is None
    master.report({SHORT: ok_requests(100)}, seq=2, **WORST)
    assert one(scrape(url), "generator_limited") == 0
    master.report({SHORT: cell}, index=1, **WORST)
    series = scrape(url)
    told = [one(series, name) for name in ("generator_limited", "uncertain_ratio", "stamped_ratio")]
    assert told == [1, 0.02, pytest.approx(0.9 + 0.9 / 19)]
    master.limits = Limits(uncertainty=0.6)
    assert one(scrape(url), "generator_limited") == 0
    master.stop()
    assert one(scrape(url), "generator_limited") == 0
