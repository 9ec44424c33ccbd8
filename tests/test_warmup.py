"""The warm-up: requests that are sent before its end are left out of latencies everywhere alike, and counted."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Browser, assert_clean, cluster, free_port, get, headless, saved, simulator, wait_for

USERS = 10
SLOW_S, FAST_S = 1.5, 0.03
"""Median time to first token of what comes in the first second, and of all else, whose spread is nothing."""
COLD = ("--ttft", "30ms", "--ttft-sigma", "0", "--itl", "1ms", "--prefill", "0s", "--fault", "slow 50x at 0s for 1s")


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[str]:
    """A server that is slow for a second after its first request."""
    with simulator(tmp_path, *COLD) as url:
        yield url


@pytest.fixture
def brief(tmp_path: Path) -> Path:
    """A scenario of short answers."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How long is a piece of string?"}\n')
    (tmp_path / "brief.toml").write_text('[part.brief]\nprompts = "prompts.jsonl"\noutput_tokens = 4\n')
    return tmp_path / "brief.toml"


def run(folder: Path, url: str, scenario: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run with two workers; returns the summary, and what the master wrote."""
    options = ["-u", str(USERS), "-r", str(USERS), "--scenario", str(scenario), *arguments]
    command = [option for option in headless(folder, url, *options) if option]
    with cluster(folder, command) as running:
        assert running.master.wait() == 0, running.master.output
        assert_clean(running.master, *running.workers)
        return saved(folder)["summary"], " ".join(running.master.output.split())


def test_case_44_what_is_sent_in_the_warm_up_is_left_out_and_counted(tmp_path: Path, cold: str, brief: Path) -> None:
    """Sources: aws-samples/aws-do-eks#88, modelscope/evalscope#1641, fw-ai/benchmark#36."""
    summary, output = run(tmp_path, cold, brief, "-t", "5s", "--warmup", "1s")
    # Each user waits for its first answer until the warm-up is over, and sends nothing more in it.
    assert summary["warmup"] == {"s": 1.0, "requests": USERS, "ok": USERS, "failed": 0}
    total = summary["total"]
    assert total["ttft"]["count"] == total["requests"] - USERS > 100
    assert total["ttft"]["p99"] < SLOW_S / 2
    assert "after 1.00 s of warm-up, left out with its 10 requests" in output
    assert summary["duration_s"] == pytest.approx(4, abs=0.7)


@pytest.mark.long
def test_case_44_without_a_warm_up_the_first_requests_are_the_slowest(tmp_path: Path, cold: str, brief: Path) -> None:
    summary, _ = run(tmp_path, cold, brief, "-t", "5s", "--warmup", "0")
    ttft = summary["total"]["ttft"]
    assert summary["warmup"] is None
    assert ttft["count"] == summary["total"]["requests"]
    assert ttft["max"] >= SLOW_S > ttft["p95"]


def test_case_44_by_default_it_lasts_until_every_user_has_an_answer(tmp_path: Path, cold: str, brief: Path) -> None:
    """While it lasts, neither the metrics nor Locust's rows know of latencies; afterwards all say the same."""
    port = free_port()
    arguments = ["--headless", "--only-summary", "--host", cold, "--results", str(tmp_path / "results")]
    arguments += ["--prometheus-port", str(port), "--scenario", str(brief), "-u", "10", "-r", "10", "-t", "40s"]
    quantile = r'^vllm_locust_ttft_quantile_seconds\{.*quantile="0.99".*span="run".*\} ([\d.e-]+)$'

    def told(pattern: str) -> float | None:
        found = re.search(pattern, get(f"http://127.0.0.1:{port}/metrics"), re.MULTILINE)
        return None if found is None else float(found[1])

    with cluster(tmp_path, arguments) as running:
        wait_for(lambda: told(r"^vllm_locust_warming_up ([\d.]+)$") == 1, "warm-up")
        assert told(quantile) is None
        wait_for(lambda: told(r"^vllm_locust_warming_up ([\d.]+)$") == 0, "end of the warm-up", 8)
        wait_for(lambda: told(quantile) is not None, "latencies")
        assert (told(quantile) or 0) < SLOW_S / 2
        sent = r'^vllm_locust_requests_sent_total\{.*phase="steady".*\} ([\d.]+)$'
        wait_for(lambda: (told(sent) or 0) > 150, "more requests than the warm-up had")
        running.master.interrupt()
        assert running.master.wait() == 1
        assert_clean(running.master, *running.workers)
    summary = saved(tmp_path)["summary"]
    # A tenth of the run would be 4 s; the last first answer comes after some 1.7 s.
    assert SLOW_S < summary["warmup"]["s"] < 3.5
    assert USERS <= summary["warmup"]["requests"] < 0.5 * summary["total"]["requests"]
    assert summary["total"]["ttft"]["p99"] < SLOW_S / 2


def test_a_run_that_is_over_before_its_warm_up_keeps_what_it_has(tmp_path: Path, cold: str, brief: Path) -> None:
    arguments = headless(tmp_path, cold, "-u", "4", "-r", "4", "--scenario", str(brief), "--warmup", "60s")
    with cluster(tmp_path, arguments, 1) as running:
        wait_for(lambda: "warm-up" in running.master.output, "warm-up")
        running.master.interrupt()
        assert running.master.wait() == 0, running.master.output  # there was no time for it to be over
        assert "all of it warm-up: nothing is left out" in " ".join(running.master.output.split())
    summary = saved(tmp_path)["summary"]
    assert summary["warmup"]["s"] is None
    assert summary["total"]["ttft"]["count"] > 0
    assert summary["total"]["rates"]["request_per_s"] > 0


@pytest.mark.long
def test_the_windows_of_a_run_begin_anew_where_the_warm_up_ends(tmp_path: Path, cold: str, brief: Path) -> None:
    """So every interval that is reported is made of whole windows."""
    run(tmp_path, cold, brief, "-t", "6s", "--warmup", "1500ms", "--window", "1s")
    recording = saved(tmp_path)["recording"]
    assert (recording["steady_ns"], recording["boundaries_ns"]) == (1_500_000_000, [1_500_000_000])
    phases = [{cell["key"][2] for cell in window["cells"]} for window in recording["windows"]]
    sent = [
        {cell["key"][2] for cell in window["cells"] if cell["counters"].get("sent")} for window in recording["windows"]
    ]
    assert sent[0] == {"warmup"}
    assert all("warmup" not in found for found in sent[2:])
    assert "steady" not in phases[0] | phases[1]


def test_the_form_of_a_new_test_asks_for_rate_and_warm_up_and_the_tab_says_so(
    tmp_path: Path, cold: str, brief: Path
) -> None:
    port, web = free_port(), free_port()
    arguments = ["--web-port", str(web), "--host", cold, "--results", str(tmp_path / "results")]
    arguments += ["--prometheus-port", str(port), "--scenario", str(brief)]
    browser = Browser(f"http://127.0.0.1:{web}")
    with cluster(tmp_path, arguments) as running:
        wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
        page = get(browser.url)
        assert all(f'"{name}"' in page for name in ("request_rate", "arrivals", "max_in_flight", "warmup", "stages"))
        form = {"user_count": "1", "spawn_rate": "1", "request_rate": "20", "arrivals": "constant", "warmup": "2s"}
        assert browser.swarm(**form)["success"]

        def told() -> dict[str, str]:
            return browser.tab()

        wait_for(lambda: "left out of latencies" in told().get("warm-up", ""), "warm-up in the tab")
        wait_for(lambda: told().get("warm-up") == "the first 2.00 s are left out", "its end in the tab")
        time.sleep(4)  # so that one request more or less makes no difference
        browser.post("stop")
        wait_for(lambda: list((tmp_path / "results").glob("*/run.json")), "saved run")
        assert_clean(running.master, *running.workers)
    run_file = saved(tmp_path)
    assert run_file["meta"]["load"]["request_rate"] == 20
    assert run_file["summary"]["total"]["rates"]["offered_per_s"] == pytest.approx(20, rel=0.1)
