"""`vllm-locust demo`: one command, and nothing of it left afterwards."""

import json
import sys
from pathlib import Path

import pytest
from processes import Process, assert_clean, free_port, process, saved, simulator, wait_for

from vllm_locust import cli, scenario
from vllm_locust.evidence import FALSE_ALARMS, SPIKING
from vllm_locust.spikes import needed
from vllm_locust.stability import FEWEST_WINDOWS


def demo(folder: Path, *flags: str) -> list[str]:
    where = ["--results", str(folder / "results"), "--prometheus-port", str(free_port())]
    return [sys.executable, "-m", "vllm_locust", "demo", "--users", "4", *where, *flags]


def left(folder: Path) -> list[str]:
    """Return the commands of processes that were started in a folder and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="who still runs is read from /proc")
def test_the_demo_measures_both_endpoints_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with process(demo(tmp_path, "--run-time", "4s"), tmp_path / "demo.log", cwd=tmp_path) as running:
        assert running.wait() == 0, running.output
        assert_clean(running)
        tail = running.output.splitlines()[-3:]
        assert [line[:10] for line in tail] == ["Verdict   ", "Saved     ", "Metrics   "]
        assert left(tmp_path) == []
    meta = saved(tmp_path)["meta"]
    assert sorted(meta["endpoints"].values()) == ["chat", "completions"]
    assert meta["load"]["workers"] == 2


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="who still runs is read from /proc")
def test_ctrl_c_ends_the_demo_with_its_report_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with process(demo(tmp_path, "--run-time", "60s"), tmp_path / "demo.log", cwd=tmp_path) as running:
        wait_for(lambda: "streams in flight" in running.output, "progress")
        running.interrupt()
        assert running.wait() == 1, running.output
        assert "the run ended early" in running.output
        wait_for(lambda: not left(tmp_path), "end of everything", 10)
    assert saved(tmp_path)["summary"]["total"]["failed"] == 0


def test_the_demo_measures_another_server_and_says_what_it_lacks(tmp_path: Path) -> None:
    with simulator(tmp_path, "--chat-only", "--itl", "2ms") as url:
        command = demo(tmp_path, "--run-time", "3s", "--host", url)
        with process(command, tmp_path / "demo.log", cwd=tmp_path) as running:
            assert running.wait() == 0, running.output
            assert (
                _remark(running) == "the server has no completions endpoint; user class MixedCompletions was left out"
            )


def test_the_stability_test_of_the_demo_sends_enough_of_each_scenario_to_be_judged() -> None:
    _, good, *_ = cli._parser().parse_args(["demo"]).stages.split(",")  # the simulator is at its end beyond the third
    parts = scenario.load("stability").parts
    rarest = min(part.weight for part in parts) / sum(part.weight for part in parts)
    windows = 27  # of 10 s, after the warm-up
    chance = FALSE_ALARMS["spike"] / (len(SPIKING) * len(parts) * windows)
    assert 0.75 * float(good) * rarest * 10 * (windows // FEWEST_WINDOWS) > 1.5 * needed(chance)


@pytest.mark.long
def test_the_demo_of_stability_holds_three_quarters_of_the_last_rate_that_met_the_limit(tmp_path: Path) -> None:
    stages = ("--stability", "--stages", "8,60", "--stage-time", "6s", "--run-time", "6s")
    with process(demo(tmp_path, *stages), tmp_path / "demo.log", cwd=tmp_path) as running:
        assert running.wait() == 4, running.output  # too short a test to be called stable
        assert_clean(running)
        assert "the last stage that met its limits: 8\n" in running.output
    (path,) = (tmp_path / "results").glob("demo-stability_*/run.json")
    meta = json.loads(path.read_text())["meta"]
    assert (meta["load"]["request_rate"], meta["stability"]) == (6, True)
    assert meta["limits"] == ["ttft p95 < 500ms"]


def _remark(running: Process) -> str:
    (line,) = (line for line in running.output.splitlines() if line.startswith("Remarks"))
    return line.removeprefix("Remarks").strip()
