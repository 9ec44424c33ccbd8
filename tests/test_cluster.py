"""Distributed runs: a real master and real workers against a real simulator."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import (
    MIXED,
    Browser,
    Cluster,
    assert_clean,
    cluster,
    forked,
    free_port,
    get,
    headless,
    locust,
    process,
    saved,
    served,
    simulator,
    wait_for,
)

FAST = ("--ttft", "20ms", "--itl", "2ms")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, *FAST) as url:
        yield url


def end(running: Cluster) -> int:
    """Wait for everyone; returns the master's exit code."""
    code = running.master.wait()
    for worker in running.workers:
        worker.wait(20)
    return code


def assert_equal_counts(folder: Path, url: str) -> dict[str, Any]:
    total: dict[str, Any] = saved(folder)["summary"]["total"]
    counted = served(url)
    assert total["outcomes"]["ok"] == counted["completed"] > 0
    assert total["tokens"]["output_received"] == counted["tokens"]
    return total


@pytest.mark.parametrize("workers", [1, 3])
def test_case_51_the_masters_totals_equal_the_servers_count(tmp_path: Path, server: str, workers: int) -> None:
    """Sources: locustio/locust#1426, #1025, #984."""
    arguments = headless(tmp_path, server, "-u", "12", "-r", "12", "-t", "4s")
    with cluster(tmp_path, arguments, workers) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
    assert_equal_counts(tmp_path, server)
    meta, summary = saved(tmp_path)["meta"], saved(tmp_path)["summary"]
    assert_slowest(summary["slowest"], summary["scenarios"], users=12)
    assert {slow["worker"] for slow in summary["slowest"]} <= set(meta["expected_workers"])
    assert len(meta["expected_workers"]) == workers
    assert meta["missing_workers"] == []


@pytest.mark.long
def test_three_hundred_users_on_three_workers_lose_nothing_in_a_minute(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "300", "-r", "100", "-t", "60s")
    with cluster(tmp_path, arguments, 3) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
    assert_equal_counts(tmp_path, server)


def test_a_run_that_ends_during_its_ramp_up_loses_nothing(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "200", "-r", "20", "-t", "4s")
    with cluster(tmp_path, arguments) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
    assert_equal_counts(tmp_path, server)


def test_ctrl_c_on_the_master_loses_nothing(tmp_path: Path, server: str) -> None:
    with cluster(tmp_path, headless(tmp_path, server, "-u", "10", "-r", "10")) as running:
        wait_for(lambda: served(server)["completed"] > 20, "requests")
        running.master.interrupt()
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
    assert_equal_counts(tmp_path, server)


def test_ctrl_c_on_everyone_at_once_loses_nothing(tmp_path: Path, server: str) -> None:
    """What a terminal does to `--processes`."""
    arguments = headless(tmp_path, server, "-u", "10", "-r", "10", *forked(2))
    with process(locust(*arguments), tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: served(server)["completed"] > 20, "requests")
        os.killpg(running.popen.pid, signal.SIGINT)
        assert running.wait() == 0
        assert_clean(running)
    assert_equal_counts(tmp_path, server)


def test_streams_that_the_stop_cuts_are_cancelled_on_every_worker(tmp_path: Path) -> None:
    with simulator(tmp_path, "--itl", "100ms") as url:
        arguments = headless(tmp_path, url, "-u", "6", "-r", "6", "-t", "3s", "--stop-timeout", "0")
        with cluster(tmp_path, arguments) as running:
            assert end(running) == 4
            assert_clean(running.master, *running.workers)
    outcomes = saved(tmp_path)["summary"]["total"]["outcomes"]
    assert outcomes["cancelled"] == 6
    assert sum(outcomes.values()) == 6


def test_a_killed_worker_is_named_and_what_it_reported_stays(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "12s", "--tags", "short")
    with cluster(tmp_path, arguments, 2) as running:
        wait_for(lambda: "streams in flight" in running.master.output, "progress")
        running.workers[0].popen.kill()
        assert running.master.wait() == 4
        assert "lost; what it had reported stays" in running.master.output
        assert "final data of worker" in running.master.output
    run = saved(tmp_path)
    (missing,) = run["meta"]["missing_workers"]
    reported = {gauges[0] for gauges in run["recording"]["gauges"]}
    assert missing in reported
    assert len(reported) == 2
    assert 0 < run["summary"]["total"]["outcomes"]["ok"] <= served(server)["completed"]


def test_a_worker_that_joins_late_takes_part_and_nothing_is_sent_twice(tmp_path: Path, server: str) -> None:
    """Locust's worker takes messages before its listeners run, so it may be told to start before it can listen."""
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "12s", "--tags", "short")
    with cluster(tmp_path, arguments, 1) as running:
        wait_for(lambda: "streams in flight" in running.master.output, "progress")
        port = running.master.popen.args[running.master.popen.args.index("--master-bind-port") + 1]
        command = locust("--worker", "--master-port", port)
        with process(command, tmp_path / "late.log", cwd=tmp_path) as late:
            assert running.master.wait() == 0, running.master.output
            late.wait(20)
            assert_clean(running.master, late)
    assert_equal_counts(tmp_path, server)
    run = saved(tmp_path)
    assert run["meta"]["load"]["workers"] == 2
    assert "worker 2" in " ".join(run["meta"]["remarks"])
    assert any(g[0].startswith("worker 2") and g[4] > 0 for g in run["recording"]["gauges"])


def test_case_62_workers_need_neither_the_scenario_nor_its_prompts_and_obey_the_masters_tags(tmp_path: Path) -> None:
    """Sources: locustio/locust#1882, #1689."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "mine.toml").write_text('[part.a]\nprompts = "p.jsonl"\nmax_tokens = 4\n[part.b]\nprompts = "p.jsonl"\n')
    (here / "p.jsonl").write_text('{"prompt": "eins"}\n{"prompt": "zwei"}\n')
    locustfile = elsewhere / "locustfile.py"
    locustfile.write_text("from vllm_locust import ChatUser\nclass Mine(ChatUser):\n    scenario = 'mine.toml'\n")
    with simulator(tmp_path, *FAST) as url:
        arguments = headless(here, url, "-u", "4", "-r", "4", "-t", "2s", "--tags", "a")
        with cluster(here, arguments, locustfile=locustfile, worker_folder=elsewhere) as running:
            assert end(running) == 0
            assert_clean(running.master, *running.workers)
        assert_equal_counts(here, url)
    assert list(saved(here)["summary"]["scenarios"]) == ["a"]


def test_a_worker_of_another_version_takes_no_part(tmp_path: Path, server: str) -> None:
    other = tmp_path / "other.py"
    other.write_text(f"import vllm_locust.worker as c\nc.__version__ = '0.0.0'\nexec(open({str(MIXED)!r}).read())\n")
    arguments = headless(tmp_path, server, "-u", "2", "-r", "2", "-t", "4s")
    with cluster(tmp_path, arguments, 1, worker_locustfile=other) as running:
        assert running.master.wait() == 1
        assert "runs vllm-locust 0.0.0" in running.master.output
        assert "takes no part" in running.master.output
    assert served(server)["completed"] == 0


# The same requests on both sides of a comparison


_LISTENER = """
import json
import sys

import gevent.pywsgi

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\\n\\n'
END = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\\n\\ndata: [DONE]\\n\\n'
log = open(sys.argv[2], "a")


def serve(environ, start_response):
    if environ["REQUEST_METHOD"] == "GET":
        start_response("200 OK", [("Content-Type", "application/json")])
        return [b'{"data": [{"id": "m"}]}']
    body = environ["wsgi.input"].read()
    if "HTTP_X_REQUEST_ID" not in environ:
        start_response("400 Bad Request", [])
        return [b"min_tokens"]
    log.write(json.dumps([environ["HTTP_X_REQUEST_ID"], json.loads(body)]) + "\\n")
    log.flush()
    gevent.sleep(0.01)
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    return [CHUNK.encode(), END.encode()]


gevent.pywsgi.WSGIServer(("127.0.0.1", int(sys.argv[1])), serve, log=None).serve_forever()
"""


USERS = 8


def _requests(folder: Path, workers: int, seed: str) -> dict[str, Any]:
    """Run, and return what a server was asked: body without its nonce, by user class and index."""
    import sys  # noqa: PLC0415

    folder.mkdir()
    script, log, port = folder / "listener.py", folder / "asked.jsonl", free_port()
    script.write_text(_LISTENER)
    with process([sys.executable, str(script), str(port), str(log)], folder / "listener.log"):
        wait_for(lambda: get(f"http://127.0.0.1:{port}/v1/models"), "listener")
        users = ["-u", str(USERS), "-r", str(USERS)]
        arguments = headless(folder, f"http://127.0.0.1:{port}", *users, "-t", "3s", "--seed", seed)
        with cluster(folder, arguments, workers) as running:
            assert end(running) == 0
    asked: dict[str, Any] = {}
    for line in log.read_text().splitlines():
        request_id, body = json.loads(line)
        key = request_id.partition("-")[2]
        assert key not in asked
        text = body.pop("prompt", None) or body.pop("messages")[0]["content"]
        assert text[0] == "["
        assert text[17:19] == "] "
        asked[key] = (text[19:], body)
    return asked


@pytest.mark.long
def test_the_same_seed_asks_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    one, three = _requests(tmp_path / "one", 1, "7"), _requests(tmp_path / "three", 3, "7")
    other = _requests(tmp_path / "other", 1, "8")
    common = one.keys() & three.keys()
    assert len(common) > 100
    assert all(one[key] == three[key] for key in common)
    assert sum(one[key] != other[key] for key in one.keys() & other.keys()) > 0.5 * len(common)
    for asked, ranks in ((one, 1), (three, 3)):
        indices = sorted(int(key.rpartition("-")[2]) for key in asked if key.startswith("MixedChat-"))
        for rank in range(ranks):
            # However much slower one worker is: it leaves nothing out but what its users took as the gate closed.
            stripe = [index for index in indices if index % ranks == rank]
            assert len(stripe) > USERS
            assert stripe[:-USERS] == list(range(rank, stripe[-USERS], ranks))


# The web UI


@pytest.mark.parametrize("workers", [0, 2])
def test_runs_resets_and_further_runs_from_the_web_ui(tmp_path: Path, server: str, workers: int) -> None:
    """Cases 57 and 58; sources: locustio/locust#91, #446, #2723."""
    port, metrics = free_port(), free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--results", str(tmp_path / "results")]
    options += ["--prometheus-port", str(metrics), "--host", server]
    alone = process(locust(*options), tmp_path / "master.log", cwd=tmp_path)
    browser = Browser(f"http://127.0.0.1:{port}")
    with cluster(tmp_path, options, workers) if workers else alone as running:
        wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
        if workers:
            wait_for(lambda: len(browser.stats()["workers"]) == workers, "workers")
        assert browser.tab() == {"run": "has not begun", "charts": f"{browser.url}/llm"}
        assert get(browser.url).count('"key": "llm"') == 2  # the tab and its table
        _first_run(browser, server)
        _check_tab(browser, workers)
        _reset(browser, server)
        browser.post("stop")
        counted = served(server)["completed"]
        wait_for(lambda: len(list((tmp_path / "results").glob("*/run.json"))) == 1, "run file")
        _check_tab(browser, workers, ended=True)
        page = get(f"http://127.0.0.1:{metrics}/metrics")
        ok = [line for line in page.splitlines() if line.startswith("vllm_locust_requests_total") and '"ok"' in line]
        # Resets do not touch counters; what ran at the reset belongs to neither epoch.
        assert counted - 4 <= sum(float(line.rpartition(" ")[2]) for line in ok) <= counted
        _second_run(browser, server)
        browser.post("stop")
        wait_for(lambda: len(list((tmp_path / "results").glob("*/run.json"))) == 2, "second run file")
        master = running.master if isinstance(running, Cluster) else running
        assert_clean(master, *(running.workers if isinstance(running, Cluster) else []))
    second = max((tmp_path / "results").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(second.read_text())["summary"]
    assert list(summary["scenarios"]) == ["long"]
    assert summary["total"]["outcomes"]["ok"] == served(server)["completed"] - counted


def _first_run(browser: Browser, server: str) -> None:
    assert browser.swarm(user_count="4", spawn_rate="4", host=server, parts="short")["success"]
    wait_for(lambda: browser.row("ITL", "short").get("num_requests", 0) > 500, "ITL row")
    wait_for(lambda: browser.row("POST", "/v1/chat/completions [short]"), "Locust's own row")
    stats = browser.stats()
    requests = sum(r["num_requests"] for r in stats["stats"] if r["method"] == "POST")
    aggregated = next(r for r in stats["stats"] if r["name"] == "Aggregated")
    assert aggregated["num_requests"] == requests  # our rows do not count
    assert {r["name"].partition("[")[2] for r in stats["stats"] if r["method"] == "POST"} == {"short]"}
    assert browser.row("TTFT", "short")["current_rps"] == 0
    wait_for(lambda: "outcome" in browser.tab(), "tab")  # a second later


def _check_tab(browser: Browser, workers: int, *, ended: bool = False) -> None:
    rows = browser.tab()
    streams = rows.pop("now", None)
    assert streams is None if ended else re.fullmatch(r"\d+ streams in flight", str(streams))
    warmup = rows.pop("warm-up", None)  # the statistics are reset before the end
    assert warmup is None if ended else re.fullmatch(r"the first .* m?s are left out", str(warmup))
    assert rows.pop("charts") == f"{browser.url}/llm"
    assert "requests/s ok" in rows.pop("rates")
    assert ("in flight on average" in rows.pop("streams", "")) is ended
    for maybe in ("tokens", "remarks"):
        assert rows.pop(maybe, "there")
    assert rows.pop("outcome", None) or ended  # what was cut by the end has no share
    assert rows.pop("verdict", None) == ("ok" if ended else None)
    line, *others = rows.items()
    assert (line[0], line[1].partition(": ")[0]) in VERDICTS
    assert [name.partition(" (")[0] for name, _ in others] == [f"worker {i + 1}" for i in range(workers)] or ["local"]
    for _, text in others:
        assert re.fullmatch(
            r"away for up to [\d.]+ [mµ]?s; CPU .* %, up to .* %; waited for a core .*; stalled .* %; \d+ late samples",
            text,
        )


VERDICTS = [("fidelity", "measured the server"), ("fidelity", "limited by the generator")]


def _reset(browser: Browser, server: str) -> None:
    before = served(server)["completed"]
    browser.post("stats/reset")
    time.sleep(2.5)  # Locust caches the page for two seconds
    wait_for(lambda: browser.row("TTFT", "short").get("num_requests"), "row after reset")
    # What ran at the reset does not count, what began since does.
    assert browser.row("TTFT", "short")["num_requests"] <= served(server)["completed"] - before + 4


def _second_run(browser: Browser, server: str) -> None:
    wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "stop")
    assert browser.swarm(user_count="2", spawn_rate="2", host=server, parts="long")["success"]
    wait_for(lambda: browser.row("TTFT", "long").get("num_requests", 0) > 5, "TTFT row")
    assert browser.row("TTFT", "short") == {}


def test_failures_and_slow_requests_are_in_tabs_while_the_run_goes_on(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST, "--stream-errors", "0.5") as url:
        port = str(free_port())
        where = ["--web-host", "127.0.0.1", "--web-port", port, "--prometheus-port", "0", "--host", url]
        browser = Browser(f"http://127.0.0.1:{port}")
        with cluster(tmp_path, [*where, "--results", str(tmp_path / "results")]) as running:
            wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
            assert (browser.table("llm-failures"), browser.table("llm-slowest")) == ([], [])
            assert browser.swarm(user_count="4", spawn_rate="4", host=url, parts="short")["success"]
            wait_for(lambda: sum(row["count"] for row in browser.table("llm-failures")) > 10, "failures")
            wait_for(lambda: len(browser.table("llm-slowest")) == 20, "slow requests")
            failures, slowest = browser.table("llm-failures"), browser.table("llm-slowest")
            assert not list((tmp_path / "results").glob("*/run.json"))
            browser.post("stop")
            wait_for(lambda: len(list((tmp_path / "results").glob("*/run.json"))) == 1, "run file")
            assert_clean(running.master, *running.workers)
    assert {(row["scenario"], row["kind"], row["status"]) for row in failures} == {("short", "stream_error", 200)}
    assert all(row["share"].endswith(" %") and row["first"] <= row["last"] and row["message"] for row in failures)
    assert {(row["scenario"], row["what"]) for row in slowest} == {("short", "first token"), ("short", "gap")}
    summary = saved(tmp_path)["summary"]
    assert {row["worker"] for row in slowest} <= set(saved(tmp_path)["meta"]["expected_workers"])
    assert_slowest(summary["slowest"], summary["scenarios"], users=4)


def assert_slowest(slowest: list[dict[str, Any]], scenarios: dict[str, Any], users: int) -> None:
    """Check the lists against what the histograms hold: of each scenario ten, the first of them the maximum."""
    for name, scope in scenarios.items():
        for metric in ("ttft", "itl_max"):
            found = [slow for slow in slowest if (slow["scenario"], slow["metric"]) == (name, metric)]
            values = [slow["value_s"] for slow in found]
            assert len(values) == min(10, scope[metric]["count"])
            assert values == sorted(values, reverse=True)
            assert values[0] == scope[metric]["max"]
            assert len({slow["request_id"] for slow in found}) == len(found)
            assert all(1 <= slow["in_flight"] <= users and slow["at_s"] > 0 for slow in found)
            assert all(slow["input_tokens"] and slow["output_tokens"] for slow in found if slow["outcome"] == "ok")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--requests", "10", "-u", "1"], "--requests on 2 workers with -u 1"),
        (["--request-rate", "5", "--max-in-flight", "1"], "--max-in-flight 1 for 2 workers"),
    ],
)
def test_what_the_workers_that_came_cannot_do_ends_the_run_at_once(
    tmp_path: Path, server: str, flags: list[str], error: str
) -> None:
    with cluster(tmp_path, headless(tmp_path, server, "-t", "10m", *flags)) as running:
        assert running.master.wait(30) == 2, running.master.output
        assert error in running.master.output
        for worker in running.workers:
            worker.wait(30)
    assert served(server)["completed"] == 0


def test_workers_are_there_for_the_form_that_mends_a_refused_one(tmp_path: Path, server: str) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", server]
    browser = Browser(f"http://127.0.0.1:{port}")
    with cluster(tmp_path, options) as running:
        wait_for(lambda: running.master.output.count("reported as ready") == 2, "workers")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="nowhere.toml")
        wait_for(lambda: "scenario 'nowhere.toml' not found" in running.master.output, "error")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="short")
        wait_for(lambda: served(server)["completed"] > 0, "requests of the mended form", 10)


def test_a_form_without_a_run_time_does_not_have_that_of_the_form_before(tmp_path: Path, server: str) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", server]
    browser = Browser(f"http://127.0.0.1:{port}")
    results = tmp_path / "results"
    with process(locust(*options), tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="short", run_time="2s")
        wait_for(lambda: len(list(results.glob("*/run.json"))) == 1, "first run")
        # A warm-up that is longer than that run would be refused.
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="short", run_time="", warmup="3s")
        wait_for(lambda: "now" in browser.tab(), "second run")
        browser.post("stop")
        wait_for(lambda: len(list(results.glob("*/run.json"))) == 2, "second run")
        assert_clean(running)
    runs = [json.loads(path.read_text()) for path in results.glob("*/run.json")]
    runs.sort(key=lambda run: run["meta"]["started"])
    assert [run["meta"]["load"]["run_time_s"] for run in runs] == [2, None]
    assert [run["recording"]["window_ns"] for run in runs] == [1_000_000_000, 10_000_000_000]


def test_a_bad_form_is_refused_in_words_and_sends_nothing(tmp_path: Path, server: str) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", server]
    browser = Browser(f"http://127.0.0.1:{port}")
    with process(locust(*options), tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="nowhere.toml")
        wait_for(lambda: "scenario 'nowhere.toml' not found" in running.output, "error")
        wait_for(lambda: "nowhere.toml" in get(f"{browser.url}/exceptions"), "error in the UI")
        assert "Traceback" not in running.output
        assert served(server)["completed"] == 0
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="short")
        wait_for(lambda: served(server)["completed"] > 0, "requests of the mended form")
        browser.post("stop")
        results = tmp_path / "results"
        wait_for(lambda: len(list(results.glob("*/run.json"))) == 1, "run file")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="nowhere.toml")
        wait_for(lambda: running.output.count("nowhere.toml' not found") == 2, "second error")
        wait_for(lambda: browser.stats()["state"] == "stopped", "end of what never began")
        assert len(list(results.glob("*/run.json"))) == 1  # the run before is not saved again
        before = served(server)["completed"]
        for _ in range(3):
            browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="nowhere.toml")
        browser.swarm(user_count="2", spawn_rate="2", host=server, scenario="short")
        wait_for(lambda: served(server)["completed"] > before, "requests of a form that was mended at once")
