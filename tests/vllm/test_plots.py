"""`vllm bench sweep plot` draws exported runs as it does its own results; it needs no server."""

import json
import subprocess
from pathlib import Path

import pytest
from processes import headless, locust, process, simulator
from server import Vllm

from vllm_locust import cli

CONCURRENCIES = (2, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of exported runs, one for each concurrency."""
    folder = tmp_path_factory.mktemp("exported")
    with simulator(folder, "--ttft", "20ms", "--itl", "2ms") as url:
        for users in map(str, CONCURRENCIES):
            command = locust(*headless(folder, url, "-u", users, "-r", users, "-t", "3s"))
            with process(command, folder / "locust.log", cwd=folder) as running:
                assert running.wait() == 0, running.output
    for run in (folder / "results").iterdir():
        assert cli.main(["export", "--format", "vllm-bench", str(run)]) == 0
    return folder / "results"


def plot(vllm: Vllm, results: Path, *options: str) -> str:
    command = [str(vllm.venv / "bin" / "vllm"), "bench", "sweep", "plot", str(results), *options]
    environment = vllm.environment | {"MPLBACKEND": "Agg"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("axes", [(), ("--var-x", "max_concurrency", "--var-y", "p99_itl_ms")])
def test_its_plots_are_drawn_from_an_export(vllm: Vllm, results: Path, axes: tuple[str, ...], tmp_path: Path) -> None:
    plot(vllm, results, "--curve-by", "scenario,label", "--fig-dir", str(tmp_path), "--fig-name", "curves", *axes)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_number_of_an_export_can_be_an_axis(vllm: Vllm, results: Path, tmp_path: Path) -> None:
    (first, *_) = json.loads(next(results.glob("*/vllm-bench/summary.json")).read_text())
    numbers = {key for key, value in first.items() if isinstance(value, int | float)}
    assert {"total_token_throughput", "median_ttft_ms", "max_concurrency", "std_e2el_ms"} < numbers
    told = plot(vllm, results, "--fig-by", "scenario", "--fig-dir", str(tmp_path), "--dry-run")
    assert told.count("[BEGIN FIGURE]") == 4
