"""A Prometheus server that is left on over three runs of the same processes, with the configuration that is shipped.

Everything happens once, in `History`: a run that has all there is to tell, against a scripted server; one against the
simulator; one that is reset and loses a worker. Meanwhile a scraper of our own keeps every page that it gets, and what
Prometheus has stored is asked afterwards.
"""

import itertools
import json
import math
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from emitter import DONE, FINISH, LENGTH, Answer, Emitter, Token, chunk
from processes import ROOT, Browser, assert_clean, cluster, free_port, get, process, simulator, wait_for
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from vllm_locust.cpu import core_wait_ns
from vllm_locust.exporter import QUANTILES
from vllm_locust.families import FAMILIES, HISTOGRAMS, PREFIX, quantiles_of
from vllm_locust.timeline import METRICS

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus here (Debian's package is named so): what it makes of metrics is not tested",
)

NAMES = {"Chat": "thinks", "Text": '5" screen\\new ü {a="b"}'}
"""The one scenario of each class."""
LOCUSTFILE = """
from vllm_locust import ChatUser, CompletionsUser

class Chat(ChatUser):
    scenario = "Chat.toml"

class Text(CompletionsUser):
    scenario = "Text.toml"
"""
OPTIONS = (
    *("--request-rate", "20", "--arrivals", "constant", "--goodput", "ttft < 10m", "--token-ids"),
    *("--connection", "new"),
    *("--window", "1s", "--warmup", "1s", "--name", NAMES["Text"], "--web-host", "127.0.0.1", "--stop-timeout", "5"),
)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TOTALS = ("_total", "_bucket", "_sum", "_count")

MODELS = Answer([(0, b'{"data":[{"id":"m"}]}')], content_type="application/json", framing=LENGTH)


def said(name: str, text: str, number: int) -> Token:
    delta = json.dumps({name: text})
    return Token(chunk(f'[{{"index":0,"delta":{delta},"token_ids":[{number},7],"finish_reason":null}}]'))


CACHED = b'"prompt_tokens_details":{"cached_tokens":4}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":6,%b}}\n\n' % CACHED
THOUGHT = [(20, said("reasoning", "a", 1)), (30, said("reasoning", "b", 2)), (45, said("content", "c", 3))]
CHAT = Answer([*THOUGHT, (45, FINISH), (45, USAGE), (45, DONE)])
BROKEN = Answer(
    [(20, b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'), (30, b'data: {"error":{"message":"gone"}}\n\n')]
)


@dataclass(frozen=True, slots=True)
class Page:
    """What one scrape brought."""

    openmetrics: bool
    text: str


@dataclass(slots=True)
class Prometheus:
    """Its API."""

    url: str

    def ask(self, path: str, **parameters: object) -> Any:
        try:
            answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None
        return answer["data"]

    def query(self, expression: str, at_s: float | None = None) -> dict[frozenset[tuple[str, str]], float]:
        """Return the value of each set of labels, now or at a Unix time."""
        when = {} if at_s is None else {"time": at_s}
        result = self.ask("query", query=expression, **when)["result"]
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in result}

    def one(self, expression: str, at_s: float | None = None) -> float:
        (value,) = self.query(expression, at_s).values()
        return value


@dataclass(slots=True)
class History:
    """What happened, and who knows of it."""

    prometheus: Prometheus
    pages: list[Page] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    """Unix times after each run, when all of it has been scraped; the first one is before them."""
    runs: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[Prometheus]:
    """Run a server with the shipped files; only addresses and the patience of people are replaced."""
    text = (ROOT / "docker" / "prometheus.yml").read_text()
    for name, target in zip(("master:9646", "simulator:8000"), targets, strict=True):
        assert text.count(name) == 1
        text = text.replace(name, target)
    assert text.count("_interval: 5s") == 2
    (folder / "prometheus.yml").write_text(text.replace("_interval: 5s", "_interval: 1s"))
    shutil.copy(ROOT / "docker" / "alerts.yml", folder)
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with process([*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log"):
        wait_for(lambda: get(f"http://127.0.0.1:{port}/-/ready"), "prometheus")
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def scraper(url: str, pages: list[Page]) -> Iterator[None]:
    """Keep all pages, of each format by turns."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(0.8):
            openmetrics = len(pages) % 2 == 1
            request = urllib.request.Request(url, headers={"Accept": OPENMETRICS if openmetrics else "text/plain"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                pages.append(Page(openmetrics, answer.read().decode()))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, emitter: Emitter) -> Iterator[History]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"{n} apples"}) + "\n" for n in range(9)))
    for name, part in NAMES.items():
        (folder / f"{name}.toml").write_text(f'[part.{json.dumps(part)}]\nprompts = "p.jsonl"\noutput_tokens = 6\n')
    (folder / "locustfile.py").write_text(LOCUSTFILE)
    answers = {"/v1/models": MODELS, "/v1/chat/completions": CHAT, "*": BROKEN}
    scripted, web, port = emitter.serve(answers), free_port(), free_port()
    options = [*OPTIONS, "--web-port", str(web), "--prometheus-port", str(port), "--results", str(folder / "results")]
    browser = Browser(f"http://127.0.0.1:{web}")
    with ExitStack() as started:
        simulated = started.enter_context(simulator(folder, "--ttft", "20ms", "--itl", "2ms"))
        targets = [f"127.0.0.1:{port}", simulated.removeprefix("http://")]
        told = History(started.enter_context(prometheus(folder, *targets)))
        running = started.enter_context(cluster(folder, options, locustfile=folder / "locustfile.py"))
        wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
        started.enter_context(scraper(f"http://{targets[0]}/metrics", told.pages))

        def ends() -> None:
            """Wait until Prometheus has scraped, and judged, what there is since the run was saved."""
            wait_for(lambda: len(list((folder / "results").glob("*/run.json"))) == len(told.ends_s), "run file")
            saved_s = time.time()
            wait_for(lambda: told.prometheus.query(f"timestamp({PREFIX}running) > {saved_s + 2}"), "scrape")
            told.ends_s.append(time.time())

        def start(url: str, for_s: float) -> None:
            assert browser.swarm(user_count="2", spawn_rate="2", host=url)["success"]
            time.sleep(for_s)

        ends()
        start(scripted.url, 6)
        browser.post("stop")
        ends()
        start(simulated, 6)
        browser.post("stop")
        ends()
        start(simulated, 3)
        browser.post("stats/reset")
        time.sleep(3)
        running.workers[1].popen.kill()
        wait_for(lambda: told.prometheus.query('ALERTS{alertname="LlmWorkerLost",alertstate="firing"}'), "alert")
        browser.post("stop")
        ends()
        assert_clean(running.master, running.workers[0])
        paths = sorted((folder / "results").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        told.runs += [json.loads(path.read_text()) for path in paths]
        yield told


@pytest.fixture(scope="module")
def read(history: History) -> list[list[Metric]]:
    """Read each page as strictly as the client library can."""
    parsers = (parse_text, parse_openmetrics)
    return [list(parsers[page.openmetrics](page.text)) for page in history.pages]  # type: ignore[no-untyped-call]


def described(read: list[list[Metric]]) -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of each family that was ever scraped, as the table of families has them."""
    found: dict[str, tuple[str, set[str]]] = {}
    for families in read:
        for family in families:
            name = family.name.removesuffix("_total") + "_total" * (family.type == "counter")
            kind, labels = found.setdefault(name, (family.type, set()))
            assert kind == family.type
            labels |= {label for sample in family.samples for label in sample.labels} - {"le"}
    return found


def test_what_is_exported_is_what_is_documented(read: list[list[Metric]]) -> None:
    """In both directions; that the document has this table is another test's."""
    untold = set() if core_wait_ns() is not None else {f"{PREFIX}worker_core_wait_ratio"}
    assert described(read) == {
        family.name: (family.kind, set(family.labels)) for family in FAMILIES.values() if family.name not in untold
    }


def test_case_57_no_total_of_any_page_is_below_one_before(read: list[list[Metric]]) -> None:
    before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for families in read:
        samples = [sample for family in families for sample in family.samples if sample.name.endswith(TOTALS)]
        now = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(now) == len(samples)
        assert all(now.get(key, -1) >= value for key, value in before.items())
        before = now
    assert sum(value for (name, _), value in before.items() if name == f"{PREFIX}requests_sent_total") > 300


def test_promtool_has_no_complaint_of_any_page(history: History) -> None:
    largest = max((page for page in history.pages if not page.openmetrics), key=lambda page: len(page.text))
    for page in (history.pages[0], largest, history.pages[-1 - history.pages[-1].openmetrics]):
        command = ["promtool", "check", "metrics"]
        done = subprocess.run(command, input=page.text, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_shipped_configuration_finds_both_sides_and_its_alerts(history: History) -> None:
    targets = history.prometheus.ask("targets")["activeTargets"]
    assert {target["labels"]["job"]: target["health"] for target in targets} == {"vllm-locust": "up", "vllm": "up"}
    assert {target["lastError"] for target in targets} == {""}
    (group,) = history.prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == 5
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    began_s, *_, end_s = history.ends_s
    assert set(history.prometheus.query(f"min_over_time(up[{math.floor(end_s - began_s)}s])", end_s).values()) == {1}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_percentiles_of_a_run_are_those_of_its_file(history: History, number: int) -> None:
    """The third run was reset, and lost a worker: what the file has since then."""
    compared = 0
    for metric in METRICS.values():
        stem = quantiles_of(metric.name)
        told = history.prometheus.query(f'{stem}{{span="run"}}', history.ends_s[number + 1])
        by = {(labels["scenario"], labels["quantile"]): value for labels, value in labelled(told)}
        for name in NAMES.values():
            saved = history.runs[number]["summary"]["scenarios"].get(name, {}).get(metric.name, {"count": 0})
            expected = {q: saved[f"p{float(q) * 100:g}"] for q in map(str, QUANTILES)} if saved["count"] else {}
            found = {quantile: value for (scenario, quantile), value in by.items() if scenario == name}
            assert found == pytest.approx(expected, rel=0.005)
            compared += len(found)
        assert not history.prometheus.query(f'{stem}{{span="window"}}', history.ends_s[number + 1])
    assert compared > 40


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("metric", HISTOGRAMS)
def test_the_buckets_of_a_run_have_the_percentiles_of_its_file(history: History, metric: str, number: int) -> None:
    """What a run has added to them, although they count all runs; edges are 10 % apart."""
    before_s, after_s = history.ends_s[number : number + 2]
    # A series that begins in between would have no increase at its first sample, so that values are subtracted.
    buckets = f"sum by (le, scenario) ({PREFIX}{metric}_seconds_bucket @ %.3f)"
    added = f"{buckets % after_s} - ({buckets % before_s} or 0 * {buckets % after_s})"
    expected = {name: told[metric] for name, told in history.runs[number]["summary"]["scenarios"].items()}
    compared = set()
    for quantile in (0.5, 0.95):
        found = history.prometheus.query(f"histogram_quantile({quantile}, {added})", after_s)
        for labels, value in labelled(found):
            if not math.isnan(value):
                assert value == pytest.approx(expected[labels["scenario"]][f"p{quantile * 100:g}"], rel=0.1)
                compared.add(labels["scenario"])
    assert compared == {name for name, told in expected.items() if told["count"]} != set()


def test_the_rate_over_a_run_gives_its_percentiles_as_a_dashboard_asks_for_them(history: History) -> None:
    before_s, after_s = history.ends_s[1:3]
    over = f"{math.floor(after_s - before_s)}s"
    rates = f"sum by (le, scenario) (rate({PREFIX}ttft_seconds_bucket[{over}]))"
    found = history.prometheus.query(f"histogram_quantile(0.95, {rates})", after_s)
    ((labels, value),) = (row for row in labelled(found) if row[0]["scenario"] == NAMES["Chat"])
    assert value == pytest.approx(history.runs[1]["summary"]["scenarios"][labels["scenario"]]["ttft"]["p95"], rel=0.1)


@pytest.mark.parametrize("number", [0, 1])
def test_case_57_a_run_adds_what_it_has_counted_to_each_counter(history: History, number: int) -> None:
    """Neither more, nor less, nor twice; a warm-up counts, too, and is told by itself."""
    before_s, after_s = history.ends_s[number : number + 2]
    total, warmup = (history.runs[number]["summary"][name] for name in ("total", "warmup"))

    def added(name: str, matchers: str = "") -> float:
        series = f"sum ({PREFIX}{name}_total{{{matchers}}} @ %.3f)"
        return history.prometheus.one(f"{series % after_s} - {series % before_s}", after_s)

    assert total["requests"] > 60
    assert warmup["requests"] > 5
    for phases, numbers, ok in ((".*", total, total["outcomes"]["ok"]), ("warmup", warmup, warmup["ok"])):
        assert added("requests_sent", f'phase=~"{phases}"') == numbers["requests"]
        assert added("requests_failed", f'phase=~"{phases}"') == numbers["failed"]
        assert added("requests", f'phase=~"{phases}",outcome="ok"') == ok
    assert added("output_tokens") == total["tokens"]["output_received"]
    assert added("requests_good", 'phase="steady"') == total["outcomes"]["ok"] - warmup["ok"]


def test_case_57_counters_begin_at_zero_and_nothing_ever_looks_like_a_restart(history: History) -> None:
    end_s = history.ends_s[-1]
    rows = history.prometheus.ask(
        "query", query=f'{{__name__=~"{PREFIX}.*_(total|bucket|count|sum)"}}[5m]', time=end_s
    )["result"]
    assert len(rows) > 500
    for row in rows:
        values = [float(value) for _, value in row["values"]]
        assert all(low <= high for low, high in itertools.pairwise(values))
        if row["metric"]["__name__"] in FAMILIES and row["metric"].get("outcome", "ok") == "ok":
            assert values[0] == 0
    rates = history.prometheus.query(f"max_over_time(rate({PREFIX}requests_sent_total[5s])[5m:1s])", end_s)
    assert max(rates.values()) < 40  # each scenario has half of 20 a second


def test_one_series_names_each_run_in_its_turn(history: History) -> None:
    for run, at_s in zip(history.runs, history.ends_s[1:], strict=True):
        ((labels, value),) = labelled(history.prometheus.query(f"{PREFIX}run_info", at_s))
        told = {label: labels[label] for label in ("run", "name", "scenario", "target", "version")}
        meta = run["meta"]
        expected = {"run": meta["run"], "name": NAMES["Text"], "scenario": "Chat, Text", "target": meta["target"]}
        assert (told, value) == ({**expected, "version": meta["plugin_version"]}, 1)
    assert len({run["meta"]["run"] for run in history.runs}) == 3
    names = history.prometheus.query(f'count by (__name__) ({{__name__=~"{PREFIX}.*",run!=""}})', history.ends_s[-1])
    assert [labels["__name__"] for labels, _ in labelled(names)] == [f"{PREFIX}run_info"]


def test_alerts_are_raised_by_what_was_wrong_and_by_nothing_else(history: History) -> None:
    """But for the two that depend on how busy this machine is."""
    firing = 'count_over_time(ALERTS{{alertstate="firing",alertname!~"LlmFirstTokensLate|LlmGeneratorLimited"}}[{}s])'
    raised = []
    for before_s, after_s in zip(history.ends_s, history.ends_s[1:], strict=False):
        found = history.prometheus.query(firing.format(math.floor(after_s - before_s)), after_s)
        raised.append({(labels["alertname"], labels.get("scenario", "")) for labels, _ in labelled(found)})
    failed = ("LlmRequestsFail", NAMES["Text"])
    assert raised[0] == {failed}
    assert raised[1] - {failed} == set()  # of the last minute
    assert raised[2] - {failed} == {("LlmWorkerLost", "")}
    assert not history.prometheus.query('ALERTS{alertname="LlmWorkerLost"}', history.ends_s[-1])


def labelled(found: dict[frozenset[tuple[str, str]], float]) -> list[tuple[dict[str, str], float]]:
    return [(dict(labels), value) for labels, value in found.items()]
