"""Real runs that are limited by the generator, and runs that only look so."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from processes import (
    ROOT,
    assert_clean,
    cluster,
    free_port,
    get,
    headless,
    locust,
    process,
    saved,
    simulator,
    wait_for,
)

from vllm_locust.errors import ExitCode
from vllm_locust.results import load

REF = ("--ttft", "300ms", "--itl", "50ms")
SHORT = """
from vllm_locust import ChatUser

class Short(ChatUser):
    scenario = "short"
"""
BLOCKING = SHORT + dedent(
    """
    import time
    import gevent
    from locust import events

    def block():
        while True:
            until = time.perf_counter() + 0.2
            while time.perf_counter() < until:
                pass
            gevent.sleep(0.8)

    @events.test_start.add_listener
    def on_test_start(environment, **_):
        if getattr(environment.runner, "worker_index", 1) == 1:
            gevent.spawn(block)
    """
)
HOG = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def write(folder: Path, text: str) -> Path:
    path = folder / "locustfile.py"
    path.write_text(text)
    return path


def fidelity_of(output: str) -> str:
    """Return the line of the report, which may be broken."""
    found = re.search(r"^Fidelity  (.*(?:\n {10}.*)*)", output, re.MULTILINE)
    assert found, output
    return " ".join(found[1].split())


def limited(run_file: dict[str, Any]) -> set[str]:
    """Judge anew, by the figures and limits in the run file, as the documents define it."""
    limits, seen = run_file["meta"]["generator_limits"], run_file["summary"]["fidelity"]
    found = {"uncertainty"} if seen["uncertain_share"] > 0.01 else set()
    for worker in seen["workers"].values():
        figures = {
            "cpu": worker["cpu_share_max"],
            "core_wait": worker["core_wait_of_need"] if (worker["core_wait_share"] or 0) > 0.005 else None,
            "stalled": worker["stalled_share"],
        }
        found |= {name for name, figure in figures.items() if figure is not None and figure > limits[name]}
    return found


def test_case_40_a_worker_whose_loop_is_blocked_is_named_in_the_report_the_run_file_and_the_metrics(
    tmp_path: Path,
) -> None:
    """Sources: llm-d/llm-d-benchmark#261, kubernetes-sigs/inference-perf#648."""
    port = free_port()
    options = ["--headless", "--only-summary", "--window", "2s", "-u", "50", "-r", "50", "-t", "8s"]
    options += ["--results", str(tmp_path / "results"), "--prometheus-port", str(port), "--stop-timeout", "1"]
    blocking = r'^vllm_locust_worker_loop_lag_seconds\{worker="worker 2 [^}]*\} (0\.[2-9]|[1-9])'

    def told() -> bool:
        page = get(f"http://127.0.0.1:{port}/metrics")
        limited = re.search(r"^vllm_locust_generator_limited 1\.0$", page, re.MULTILINE)
        return bool(limited and re.search(blocking, page, re.MULTILINE))

    with simulator(tmp_path, *REF) as url:
        arguments = [*options, "--host", url, "--max-stalled", "2%"]
        with cluster(tmp_path, arguments, locustfile=write(tmp_path, BLOCKING)) as running:
            wait_for(told, "loop lag in the metrics")
            # A limit that was set is one to meet.
            assert running.master.wait() == ExitCode.NOT_JUDGED, running.master.output
            assert_clean(running.master, *running.workers)
            output = " ".join(running.master.output.split())
            line = fidelity_of(running.master.output)
    assert line.startswith("limited by the generator: "), line
    assert re.search(r"the event loop of worker 2 .*stalled for \d\d % of the time", line), line
    assert "(the limit is --max-stalled 2%)" in output
    run_file = saved(tmp_path)
    (blocked,) = (w for name, w in run_file["summary"]["fidelity"]["workers"].items() if name.startswith("worker 2 "))
    assert blocked["loop_lag_s"] >= 0.2
    # On a machine whose cores are taken, that explains a part of the stalls, and is the first thing to mend.
    alone = blocked["stalled_share"] > (blocked["core_wait_share"] or 0) and "core_wait" not in limited(run_file)
    assert ("something blocks its event loop: a task or a listener that computes" in line) or not alone
    assert "something blocks its event loop" in line or "something else runs on its core" in line
    assert blocked["cpu_share"] > 0.1
    assert blocked["stalled_share"] > 0.1
    assert "stalled" in limited(run_file)
    assert run_file["meta"]["generator_limits"]["given"] == ["stalled"]
    assert run_file["summary"]["total"]["ttft"]["count"] > 50  # numbers are shown all the same
    (path,) = (tmp_path / "results").glob("*/run.json")
    assert load(path).meta.generator_limits.stalled == 0.02


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a process waits for a core")
def test_case_40_a_process_that_has_the_generators_core_is_called_out(tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    with simulator(tmp_path, *REF) as url, process([sys.executable, "-c", HOG, core], tmp_path / "hog.log"):
        command = locust(
            *headless(tmp_path, url, "-u", "50", "-r", "50", "-t", "6s", "--stop-timeout", "1", "--window", "2s"),
            locustfile=write(tmp_path, SHORT),
        )
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as run:
            os.sched_setaffinity(run.popen.pid, {int(core)})
            assert run.wait() == 0, run.output  # no limit was set
            line = fidelity_of(run.output)
    assert re.search(r"limited by the generator: .*local waited for a core for \d\d % of the time that", line), line
    assert "something else runs on its core" in line
    assert "core_wait" in limited(saved(tmp_path))


@pytest.mark.parametrize("limit", [(), ("--max-core-wait", "100%")])
def test_a_calm_run_is_judged_by_the_figures_that_it_saves(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """A busy machine may limit it; then the figures say so, too."""
    with simulator(tmp_path, *REF) as url:
        command = locust(
            *headless(tmp_path, url, "-u", "5", "-r", "5", "-t", "4s", "--stop-timeout", "1", *limit),
            locustfile=write(tmp_path, SHORT),
        )
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as run:
            assert run.wait() == 0, run.output
            assert_clean(run)
            line = fidelity_of(run.output)
    assert line.startswith("limited by the generator: " if limited(saved(tmp_path)) else "measured the server: ")
    assert saved(tmp_path)["meta"]["generator_limits"]["given"] == ["core_wait"] * bool(limit)


@contextmanager
def buffering(folder: Path, target: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, str(ROOT / "tests" / "buffering_proxy.py"), str(port), target]
    with process(command, folder / "proxy.log"):
        wait_for(lambda: get(f"http://127.0.0.1:{port}/health") is not None, "proxy")
        yield f"http://127.0.0.1:{port}"


def test_case_33_behind_a_proxy_that_buffers_the_report_says_where_the_gaps_are_and_blames_nobody_else(
    tmp_path: Path,
) -> None:
    """Sources: Kludex/starlette#2753, sgl-project/genai-bench#228."""
    with simulator(tmp_path, "--ttft", "20ms", "--itl", "5ms") as url, buffering(tmp_path, url) as proxy:
        command = locust(
            *headless(tmp_path, proxy, "-u", "4", "-r", "4", "-t", "4s"), locustfile=write(tmp_path, SHORT)
        )
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as run:
            assert run.wait() == 0, run.output
            assert_clean(run)
            output = " ".join(run.output.split())
    run_file = saved(tmp_path)
    total = run_file["summary"]["total"]
    number = total["counts"]["coalesced"]
    assert 0 < number <= total["outcomes"]["ok"]
    said = re.search(r"([\d,]+) requests \(([\d.]+) %\) were gathered on their way \(a buffering proxy\?\)", output)
    assert said, output
    assert (int(said[1].replace(",", "")), float(said[2]) > 90) == (number, True)
    assert total["ttft"]["min"] > 0.3  # when the whole answer came
    if number == total["outcomes"]["ok"]:
        assert total["itl"]["count"] == total["tpot"]["count"] == 0
    # A busy machine may limit it, which its figures then say; the proxy does not.
    assert bool(limited(run_file)) == ("limited by the generator" in output)


@pytest.mark.parametrize("option", ["--max-uncertainty", "--max-generator-cpu", "--max-core-wait", "--max-stalled"])
def test_a_limit_that_is_no_share_is_refused_before_the_first_request(tmp_path: Path, option: str) -> None:
    with simulator(tmp_path) as url:
        command = locust(*headless(tmp_path, url, "-u", "1", "-t", "2s", option, "5 percent"))
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as run:
            assert run.wait() == ExitCode.BAD_INPUT
            assert f"vllm-locust: {option}: '5 percent' is not a share; write it like 5% or 0.05" in run.output
            assert "Traceback" not in run.output
        assert "vllm:generation_tokens_total" not in get(f"{url}/metrics") or "} 0" in get(f"{url}/metrics")
