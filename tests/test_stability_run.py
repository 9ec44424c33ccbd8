"""The verdict of real runs against a simulator that misbehaves on cue."""

from pathlib import Path

import pytest
from processes import headless, locust, process, saved, simulator

from vllm_locust.errors import ExitCode

WINDOW_S = 1
LOAD = ("--request-rate", "25", "-t", "16s", "--window", f"{WINDOW_S}s", "--stability")
TRIES = 3
FAST = ("--ttft", "20ms", "--itl", "2ms")


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("stall 4s at 8s", "silence", "token came at "),
        pytest.param("errors 90% at 8s for 2s", "failures", "of the requests failed", marks=pytest.mark.long),
    ],
    ids=["stall", "errors"],
)
def test_a_fault_on_cue_is_a_reason_in_its_windows(tmp_path: Path, fault: str, kind: str, text: str) -> None:
    """Neither hangs on how busy this machine is: no token for seconds, and what the server itself calls an error."""
    with (
        simulator(tmp_path, *FAST, "--fault", fault) as url,
        process(locust(*headless(tmp_path, url, *LOAD)), tmp_path / "log") as run,
    ):
        code = run.wait()
        shown = run.output
    stability = saved(tmp_path)["summary"]["stability"]
    assert (stability["verdict"], code) == ("unstable", ExitCode.MISSED), shown
    found = [reason for reason in stability["reasons"] if reason["kind"] == kind]
    assert text in found[0]["text"]
    # The server counts from its first request, which may be that of the check before the run.
    assert {index for reason in found for index in reason["windows"]} <= set(range(6, 14))
    assert "\nStability unstable: 16 windows of 1.00 s" in shown
    assert kind in shown[shown.index("windows: a mark per 1.00 s") :]


@pytest.mark.long
def test_a_run_without_a_fault_is_not_called_unstable(tmp_path: Path) -> None:
    """It is stable; on a machine that is too busy to say, inconclusive. One that starves the server alone is chance."""
    expected = {("stable", ExitCode.OK), ("inconclusive", ExitCode.NOT_JUDGED)}
    found = []
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (
            simulator(folder, *FAST) as url,
            process(locust(*headless(folder, url, *LOAD)), folder / "log") as run,
        ):
            code = run.wait()
        found.append((saved(folder)["summary"]["stability"]["verdict"], code))
        if found[-1] in expected:
            break
    assert found[-1] in expected, found
