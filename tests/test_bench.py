"""The benches are commands, not timed tests: here they only have to run, to lose nothing, and to compare rightly."""

import subprocess
import sys

import pytest
from processes import ROOT


def bench(script: str, *options: str) -> dict[str, list[str]]:
    """Run a bench; returns the cells of its tables by the name of the row."""
    command = [sys.executable, f"benchmarks/{script}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    lines = {line[:27].strip(): line[27:].split() for line in done.stdout.splitlines() if not line.startswith("|")}
    return lines | {name: cells for name, *cells in rows}


def test_the_bench_runs_and_loses_no_stream() -> None:
    figures = bench("bench.py", "--streams", "64", "--seconds", "2")
    assert figures["lost streams"][0] == "0"
    assert float(figures["CPU per token event, µs"][0]) > 0


def test_the_bench_of_arrivals_runs_and_loses_none() -> None:
    figures = bench("arrivals.py", "--rate", "50", "--arrivals", "constant", "--seconds", "2")
    assert int(figures["requests due"][0]) > 50
    assert figures["lost"][0] == "0"
    assert float(figures["queue p50, ms"][0]) > 0


def test_of_100_streams_of_which_75_break_we_call_25_a_success_and_plain_locust_more() -> None:
    found = bench("peers.py", "--tools", "vllm-locust,Locust", "--streams", "100", "--rounds", "1")[
        "streams called a success"
    ]
    ours, *scripts = map(int, found)
    assert ours == 25
    assert len(scripts) == 2
    assert all(25 < script <= 100 for script in scripts)


def test_percentiles_of_a_tool_stand_beside_the_true_ones() -> None:
    found = bench("peers.py", "--tools", "vllm-locust,Locust", "--streams", "256", "--rounds", "1", "--seconds", "1")
    for name in ("TTFT p99", "ITL p50"):
        for reported, true, error in zip(
            *(found[f"{name} {which}, ms"] for which in ("reported", "true", "error")), strict=True
        ):
            off = float(reported.replace(",", "")) - float(true) - float(error.replace(",", ""))
            assert off == pytest.approx(0, abs=0.02)
    assert 20 < float(found["ITL p50 true, ms"][0]) < 23
    assert all(float(cell) > 0 for cell in found["CPU per token event, µs"])


def test_a_gap_before_the_first_token_is_not_held_against_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from figures import figures  # noqa: PLC0415 - scripts, not installed
    from tools import Found  # noqa: PLC0415
    from watch import Cost, Watched  # noqa: PLC0415

    found = Found(1, (7.0, 7.0), (20.0, 20.0), ttfts_s={"a": 0.007}, gaps_s={"a": [0.001, 0.020, 0.022]})
    cost = Cost(cpu_s=0.3, core_cpu_s=0.4, read_s=2.0, behind_s=0.1, peak_bytes=2**20)
    emitted = {"a": [5_000_000, 25_000_000, 46_000_000]}
    compared = figures(Watched(found, emitted, {"a": 1_000_000}, cost, 0.1, 10.0))
    assert compared["TTFT p50 error, ms"] == pytest.approx(7 - 4)
    assert compared["error of one gap p99.9, ms"] == pytest.approx(1, abs=0.01)
    assert compared["CPU per token event, µs"] == pytest.approx(100_000)
    assert compared["others' CPU on its core, %"] == pytest.approx(5)
