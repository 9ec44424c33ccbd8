"""The bench is a command, not a timed test: here it only has to run and to lose nothing."""

import subprocess
import sys

from processes import ROOT


def test_the_bench_runs_and_loses_no_stream() -> None:
    command = [sys.executable, "benchmarks/bench.py", "--streams", "64", "--seconds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line[:27].strip(): line[27:].split() for line in done.stdout.splitlines()}
    assert lines["lost streams"][0] == "0"
    assert float(lines["CPU per token event, µs"][0]) > 0
