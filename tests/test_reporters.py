"""The bench of the master is a command, not a timed test: here it has to run, to lose nothing, to report little."""

import subprocess
import sys

from processes import ROOT


def test_played_workers_report_to_a_real_master_which_loses_no_sample() -> None:
    command = [sys.executable, "benchmarks/reporters.py", "--workers", "3", "--seconds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, alone = [line.split() for line in done.stdout.splitlines() if line.startswith(("vllm-locust", "Locust"))]
    assert len(ours) == 9, done.stdout
    assert 0 < float(ours[7]) <= float(ours[8]), done.stdout
    assert 5 < float(ours[4]) <= float(ours[5]) < 50, done.stdout  # an empty one has 0.2 KB
    assert ours[6] == "0"
    assert alone[:3] == ["Locust", "alone", "3"]
