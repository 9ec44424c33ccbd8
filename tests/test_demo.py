"""`vllm-locust demo`: one command, and nothing of it left afterwards."""

import sys
from pathlib import Path

import pytest
from processes import Process, assert_clean, free_port, process, saved, simulator, wait_for


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


def _remark(running: Process) -> str:
    (line,) = (line for line in running.output.splitlines() if line.startswith("Remarks"))
    return line.removeprefix("Remarks").strip()
