"""The dashboard for Grafana: every query of it finds something, and its JSON keeps the rules that Grafana has.

No Grafana is needed. A Prometheus server scrapes a distributed run, the simulator, and pages of vLLM's metrics with the
names of several versions; queries run there, with values in the place of Grafana's variables.
"""

import itertools
import json
import math
import re
import shutil
import statistics
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from processes import ROOT, Browser, assert_clean, cluster, free_port, get, process, simulator, wait_for
from prometheus_client.parser import text_string_to_metric_families

from vllm_locust.families import BOUNDS_S

GRAFANA = ROOT / "docker" / "grafana"
DASHBOARD = json.loads((GRAFANA / "vllm-locust.json").read_text())
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = {"__rate_interval", "__range", "__interval"}
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
ANNOTATIONS: list[dict[str, Any]] = DASHBOARD["annotations"]["list"]
PAGE = (Path(__file__).parent / "metrics" / "vllm-0.32.0.txt").read_text()
"""What a real vLLM told after some 300 requests, without the families that no query asks for."""
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="no prometheus here (Debian's package is named so): no query is run"
)

SCENARIO = """
[part.quick]
prompts = "p.jsonl"
output_tokens = 5

[part.slow]
prompts = "p.jsonl"
output_tokens = 30
"""
LOCUSTFILE = """
from vllm_locust import ChatUser

class Mine(ChatUser):
    scenario = "mine.toml"
"""
OPTIONS = [
    *("--window", "2s", "--warmup", "2s", "--goodput", "ttft < 10m", "--request-rate", "40", "--max-in-flight", "6"),
    *("--name", "demo", "--scenario", "mine.toml"),
]
"""Six seats for answers of 0.2 s in the mean are too few for 40 a second, so some are dropped at the end."""
SERVER = ("--ttft", "20ms", "--itl", "10ms", "--seats", "5", "--stream-errors", "0.1")


class Query(NamedTuple):
    """What is asked of Prometheus, and by which part of the dashboard."""

    by: str
    expr: str
    instant: bool = False
    legend: str = ""

    def alternatives(self) -> "list[Query]":
        return [self._replace(expr=expr) for expr in self.expr.split(" or ")]


def queries() -> list[Query]:
    panels = [
        Query(
            f"{panel['title']}, {target['refId']}", target["expr"], target.get("instant", False), target["legendFormat"]
        )
        for panel in CHARTS
        for target in panel["targets"]
    ]
    return panels + [Query(f"mark {mark['name']}", mark["expr"]) for mark in ANNOTATIONS]


QUERIES = queries()
OF_VLLM = [query for query in QUERIES if "$server" in query.expr]


# The rules of the JSON


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert max(Counter(panel["id"] for panel in PANELS).values()) == 1
    cells: Counter[tuple[int, int]] = Counter()
    for panel in PANELS:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert x >= 0
        assert x + w <= 24
        cells.update(itertools.product(range(x, x + w), range(y, y + h)))
    assert max(cells.values()) == 1
    assert len(cells) == 24 * (1 + max(y for _, y in cells)), "there are holes"
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in PANELS]
    assert places == sorted(places)


def test_a_panel_says_what_it_shows_and_in_which_unit() -> None:
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in CHARTS:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == DATASOURCE
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert target["legendFormat"] or panel["type"] == "table"


def test_no_datasource_is_hard_coded_and_all_variables_are_defined() -> None:
    assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD))) == {"${datasource}", "vllm-locust"}
    assert VARIABLES["datasource"] == VARIABLES["datasource"] | {"type": "datasource", "query": "prometheus"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - BUILT_IN - {"__all"} == VARIABLES.keys()
    named = re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD))
    assert set(named) <= {
        *("scenario", "endpoint", "instance", "worker", "outcome", "le"),
        *("name", "target", "run", "alertname"),
    }


def test_the_dashboard_opens_with_the_last_minutes_and_goes_on() -> None:
    assert (DASHBOARD["uid"], DASHBOARD["id"]) == ("vllm-locust", None)
    assert (DASHBOARD["time"], DASHBOARD["refresh"]) == ({"from": "now-15m", "to": "now"}, "5s")
    assert DASHBOARD["schemaVersion"] == 41
    assert DASHBOARD["tags"] == sorted(DASHBOARD["tags"])
    for mark in ANNOTATIONS:
        assert mark["target"] == {"expr": mark["expr"], "refId": "Anno"}  # newer versions of Grafana, and older ones


def test_the_file_is_written_for_people_and_diffs() -> None:
    assert (GRAFANA / "vllm-locust.json").read_text() == json.dumps(DASHBOARD, indent=2, ensure_ascii=False) + "\n"


def test_percentiles_are_never_averaged() -> None:
    for query in QUERIES:
        assert not re.search(r"(avg|sum|max|min)[^(]*\([^)]*_quantile_seconds\{", query.expr)
        assert not re.search(r"\bavg\b|avg_over_time", query.expr)


def edges(regexp: str) -> list[float]:
    """Return which of our buckets a query picks, the last one of all excluded."""
    return [bound for bound in BOUNDS_S if re.fullmatch(regexp, str(bound))]


def test_heat_maps_have_all_rows_of_their_range() -> None:
    found = {
        panel["title"]: re.findall(r'le=~"([^"]*)"', panel["targets"][0]["expr"])
        for panel in CHARTS
        if panel["type"] == "heatmap"
    }
    for title, low, high in (("TTFT over time", 0.01, 100), ("ITL over time", 0.001, 10)):
        (regexp,) = found.pop(title)
        assert edges(regexp) == [bound for bound in BOUNDS_S if low <= bound < high]
        assert re.fullmatch(regexp, "+Inf")
    assert found == {}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("ttft", "vllm:time_to_first_token_seconds"), ("itl", "vllm:inter_token_latency_seconds")],
)
def test_server_and_client_are_compared_by_the_servers_buckets(ours: str, theirs: str) -> None:
    (family,) = (family for family in text_string_to_metric_families(PAGE) if family.name == theirs)
    bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
    assert bounds[-1] == math.inf
    found = [re.search(rf'vllm_locust_{ours}_seconds_bucket.*\ble=~"(\d[^"]*)"', query.expr) for query in QUERIES]
    regexps = {match[1] for match in found if match and "over time" not in match[1] and "|1.0|" in match[1]}
    assert [edges(regexp) for regexp in regexps] == [bounds[:-1]]


def test_provisioning_refers_to_what_compose_mounts() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source == source | {"uid": "prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    scraping = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/vllm-locust.yml").read_text())["providers"]
    assert provider["options"] == {"path": "/var/lib/grafana/dashboards"}


def test_every_shipped_alert_can_be_a_mark() -> None:
    (expr,) = (mark["expr"] for mark in ANNOTATIONS if mark["name"] == "Alerts")
    (named,) = re.findall(r'alertname=~"([^"]*)"', expr)
    (group,) = yaml.safe_load((ROOT / "docker" / "alerts.yml").read_text())["groups"]
    assert all(re.fullmatch(named, rule["alert"]) for rule in group["rules"])


def test_what_the_document_says_of_the_dashboard_is_so() -> None:
    document = (ROOT / "docs" / "dashboards.md").read_text()
    first_cells = [line.split("|")[1].strip() for line in document.splitlines() if line.startswith("| ")]
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    labels = [variable["label"] for variable in VARIABLES.values()]
    assert [cell for cell in first_cells if cell in rows] == rows
    assert [cell for cell in first_cells if cell in labels] == labels
    asked = {name for query in OF_VLLM for name in re.findall(r"\bvllm:\w+", query.expr)}
    for name in re.findall(r"`(vllm:\w+)`", document):
        assert {name, f"{name}_total", f"{name}_bucket"} & asked


# vLLM's pages


class Sample(NamedTuple):
    """One line of a page."""

    name: str
    labels: dict[str, str]
    value: float


Page = list[Sample]
GAUGES = "num_requests_|_perc$|_rate$"
OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}


def engine(number: int, running: int, cache: float) -> Page:
    """Return a page as vLLM 0.32 has it, of one engine that is busy."""
    busy = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": cache}
    lines = [sample for family in text_string_to_metric_families(PAGE) for sample in family.samples]
    return [Sample(s.name, {**s.labels, "engine": str(number)}, busy.get(s.name, s.value)) for s in lines]


def older(page: Page) -> Page:
    """Return a page with the names that vLLM had before."""
    renamed = []
    for sample in page:
        name = sample.name
        for new, old in OLDER.items():
            name = name.replace(new, old)
        renamed.append(sample._replace(name=name))
    return renamed


def both(page: Page) -> Page:
    """Return a page of a version that had both names; the old ones tell lies, so that it matters who wins."""
    names = {sample.name for sample in page}
    return page + [lie(sample) for sample in older(page) if sample.name not in names]


def lie(sample: Sample) -> Sample:
    """Make a cache fuller, its hits more, and each gap one of minutes."""
    if "le" in sample.labels:
        return sample if sample.labels["le"] == "+Inf" else sample._replace(value=0)
    return sample if "queries" in sample.name else sample._replace(value=3 * sample.value)


def before_v1(page: Page) -> Page:
    """Return a page of vLLM's first engine: no number of the engine, and the share of hits as a gauge."""
    merged: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in older(page):
        key = sample.name, frozenset(sample.labels.items() - {("engine", "0"), ("engine", "1")})
        total = max if "cache_usage" in sample.name else sum
        merged[key] = total((merged.get(key, 0), sample.value))
    (hits, queries) = (
        next(value for (name, _), value in merged.items() if name == f"vllm:gpu_prefix_cache_{what}_total")
        for what in ("hits", "queries")
    )
    lines = [Sample(name, dict(labels), value) for (name, labels), value in merged.items()]
    lines = [line for line in lines if "prefix_cache" not in line.name]
    return [*lines, Sample("vllm:gpu_prefix_cache_hit_rate", {"model_name": "tiny"}, hits / queries)]


def without_total(page: Page) -> Page:
    return [sample._replace(name=sample.name.removesuffix("_total")) for sample in page]


TWO_ENGINES = engine(0, 3, 0.2) + engine(1, 5, 0.6)
PAGES = {
    "new": TWO_ENGINES,
    "both": both(TWO_ENGINES),
    "old": older(TWO_ENGINES),
    "first": before_v1(TWO_ENGINES),
    "plain": without_total(TWO_ENGINES),
}


@contextmanager
def served_pages() -> Iterator[str]:
    """Serve the pages, each by its name; what counts grows by what the page has in each second."""
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age_s = time.monotonic() - began
            lines = []
            for sample in PAGES[self.path.removeprefix("/")]:
                grown = 1 if re.search(GAUGES, sample.name) else age_s
                labels = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
                lines.append(f"{sample.name}{{{labels}}} {sample.value * grown}\n")
            body = "".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# A Prometheus server that has seen a run


@dataclass
class Seen:
    """A Prometheus server, and what it scraped."""

    url: str
    master: str
    simulator: str
    since: float = field(default_factory=time.time)
    until: float = 0

    def ask(self, path: str, **parameters: object) -> Any:
        answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success"
        return answer["data"]

    def filled(self, text: str, server: str | None = None) -> str:
        """Put values in the place of variables, as Grafana does."""
        values = {"__rate_interval": "4s", "__range": f"{math.ceil(self.until - self.since)}s", "__interval": "1s"}
        values |= {"instance": re.escape(self.master), "scenario": "(quick|slow)"}
        values |= {"server": server or re.escape(self.simulator)}
        return re.sub(r"\$(\w+)", lambda match: values[match[1]].replace("\\", "\\\\"), text)

    def series(self, query: Query, server: str | None = None) -> list[dict[str, Any]]:
        """Return each series that a query finds, as Prometheus tells it: labels in `metric`, and its values."""
        expr = self.filled(query.expr, server)
        if query.instant:
            found = self.ask("query", query=expr, time=self.until)["result"]
            return [{"metric": one["metric"], "values": [one["value"]]} for one in found]
        return list(self.ask("query_range", query=expr, start=self.since, end=self.until, step=1)["result"])

    def values(self, query: Query, server: str | None = None) -> list[dict[float, float]]:
        """Return the finite values of each series that a query finds, by time."""
        series = [one["values"] for one in self.series(query, server)]
        return [{at: float(value) for at, value in points if math.isfinite(float(value))} for points in series]


def configuration(folder: Path, master: str, simulated: str, pages: str) -> Path:
    jobs: list[dict[str, Any]] = [
        {"job_name": "vllm-locust", "static_configs": [{"targets": [master]}]},
        {"job_name": "vllm", "static_configs": [{"targets": [simulated]}]},
    ]
    for page in PAGES:
        static = {"targets": [pages], "labels": {"instance": page}}
        jobs.append({"job_name": page, "metrics_path": f"/{page}", "static_configs": [static]})
    path = folder / "prometheus.yml"
    often = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    rules = [str(ROOT / "docker" / "alerts.yml")]
    path.write_text(yaml.safe_dump({"global": often, "rule_files": rules, "scrape_configs": jobs}))
    return path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "mine.toml").write_text(SCENARIO)
    (folder / "p.jsonl").write_text('{"prompt": "why?"}\n{"prompt": "how?"}\n')
    (folder / "locustfile.py").write_text(LOCUSTFILE)
    with ExitStack() as started:
        simulated = started.enter_context(simulator(folder, *SERVER))
        pages = started.enter_context(served_pages())
        master, web, port = (free_port() for _ in range(3))
        options = ["--host", simulated, "--web-host", "127.0.0.1", "--web-port", str(web), *OPTIONS]
        options += ["--prometheus-port", str(master), "--results", str(folder / "results")]
        running = started.enter_context(cluster(folder, options, locustfile=folder / "locustfile.py"))
        config = configuration(folder, f"127.0.0.1:{master}", simulated.removeprefix("http://"), pages)
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        prometheus = [*command, f"--web.listen-address=127.0.0.1:{port}"]
        started.enter_context(process(prometheus, folder / "prometheus.log"))
        seen = Seen(f"http://127.0.0.1:{port}", f"127.0.0.1:{master}", simulated.removeprefix("http://"))
        browser = Browser(f"http://127.0.0.1:{web}")
        wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
        wait_for(lambda: len(seen.ask("query", query="up == 1")["result"]) == 2 + len(PAGES), "targets")
        seen.since = time.time()
        assert browser.swarm(user_count="2", spawn_rate="2", host=simulated)["success"]
        time.sleep(10)  # a warm-up, and windows after it
        browser.post("stop")
        time.sleep(4)  # what was counted last is seen by a rate
        seen.until = time.time()
        assert_clean(running.master, *running.workers)
        yield seen


@needs_prometheus
def test_every_query_finds_something(seen: Seen) -> None:
    counts = {query.by: len(list(filter(None, seen.values(query)))) for query in QUERIES}
    assert [by for by, count in counts.items() if not count] == []
    assert counts["TTFT per scenario, A"] == counts["mark Runs"] * 2 == 2
    assert counts["TTFT over time, A"] > 50


@needs_prometheus
def test_a_legend_tells_apart_all_series_that_its_query_can_find(seen: Seen) -> None:
    """Of several masters, too, which one query may ask for."""
    for query in filter(lambda query: query.legend, QUERIES):
        fixed = {"__name__", "job", *re.findall(r'(\w+)="', query.expr)}
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert {label for one in seen.series(query) for label in one["metric"]} - fixed <= named, query.by


@needs_prometheus
def test_every_variable_has_its_values(seen: Seen) -> None:
    found = {}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert asked
            assert variable["query"]["query"] == variable["definition"]
            found[name] = seen.ask(f"label/{asked[2]}/values", **{"match[]": seen.filled(asked[1])})
    assert found == {
        "instance": [seen.master],
        "scenario": ["quick", "slow"],
        "server": sorted([seen.simulator, *PAGES]),
    }


@needs_prometheus
def test_failures_and_good_requests_are_shares_of_what_ended(seen: Seen) -> None:
    failed, good = (seen.values(query) for query in QUERIES if query.by.startswith("Failures and goodput"))
    assert 0 < max(failed[0].values()) < 0.5  # one of ten streams breaks
    assert 0.5 < max(good[0].values()) <= 1
    assert min(*failed[0].values(), *good[0].values()) >= 0


@needs_prometheus
@pytest.mark.parametrize("query", OF_VLLM, ids=lambda query: query.by)
def test_case_68_each_alternative_finds_something_and_no_version_tells_another_value(seen: Seen, query: Query) -> None:
    for alternative in query.alternatives():
        assert any(any(seen.values(alternative, page)) for page in PAGES), alternative.expr
    told = {page: [statistics.median(points.values()) for points in seen.values(query, page)] for page in PAGES}
    assert {len(values) for values in told.values()} == {1}, "one series for a server, whatever its engines"
    assert told == {page: pytest.approx(told["new"], rel=0.2) for page in PAGES}  # scrapes are not on the dot


@needs_prometheus
def test_case_68_requests_of_engines_are_added_and_the_fullest_cache_counts(seen: Seen) -> None:
    told = {
        query.by: {value for page in PAGES for points in seen.values(query, page) for value in points.values()}
        for query in OF_VLLM
    }
    assert told["Requests in the server, A"] == {8}
    assert told["Requests in the server, B"] == {4}
    assert told["Caches of the server, A"] == {0.6}
    assert list(told["Caches of the server, B"]) == pytest.approx([8832 / 63480] * len(told["Caches of the server, B"]))
