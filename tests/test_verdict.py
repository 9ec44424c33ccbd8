"""Verdicts: which run asks for which exit code, and whether the server or the generator was measured."""

from typing import Any

import pytest

from vllm_locust.cell import Cell, Key
from vllm_locust.errors import ExitCode
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.summary import Meta, summary
from vllm_locust.verdict import CPU_SHARE, FAILED_SHARE, exit_code, fidelity_line, findings, generator_faults

MS = 1_000_000


def summed(
    *, ok: int = 0, failed: int = 0, cancelled: int = 0, cell: Cell | None = None, **gauges: int
) -> dict[str, Any]:
    """Return the summary of requests that ended so, on one worker."""
    cell = cell or Cell()
    outcomes = {"outcome|ok|200": ok, "outcome|http_4xx|404": failed, "outcome|cancelled|200": cancelled}
    cell.counters |= {"sent": ok + failed + cancelled, **{name: n for name, n in outcomes.items() if n}}
    seen = Gauges(**{"span_ns": 10 * NS_PER_S, **gauges})
    cells = to_wire({Key("short", "chat"): cell})
    failure = Failure(
        scenario="short",
        endpoint="chat",
        outcome="http_4xx",
        status=404,
        first_ns=0,
        last_ns=1,
        message="model x not found",
    )
    recording = Recording("r", 0, 10 * NS_PER_S)
    window = WindowState(index=0, seq=1, sealed=True, gauges=seen, cells=cells)
    failures = [failure] if failed else []
    report = Report(run="r", epoch=0, worker="w1", seq=1, now_ns=0, windows=[window], failures=failures)
    assert recording.merge(report)
    recording.length_ns = 10 * NS_PER_S
    return summary(recording, Meta())


def streamed(*, uncertainty_ns: int, gap_ns: int = 50 * MS, uncertain: int = 5) -> Cell:
    """Return a cell of 100 token events, some of which came at an uncertain time."""
    cell = Cell()
    cell.histogram("ttft").add(300 * MS)
    cell.histogram("itl").add(gap_ns, 99)
    cell.histogram("read_lag").add(200_000, 100)
    cell.histogram("uncertainty").add(0, 100 - uncertain)
    cell.histogram("uncertainty").add(uncertainty_ns, uncertain)
    cell.counters = {"stamped": 99, "unstamped": 1, "token_events": 100, "tokens_received": 100}
    return cell


MISSING = {"missing_workers": ["w2"]}
EARLY = {"ended_early": True}


@pytest.mark.parametrize(
    ("requests", "ending", "code"),
    [
        ({"ok": 100}, {}, ExitCode.OK),
        ({"ok": 99, "failed": 1}, {}, ExitCode.OK),  # exactly 1 % is not above 1 %
        ({"ok": 98, "failed": 2}, {}, ExitCode.MISSED),
        ({"ok": 99, "failed": 1, "cancelled": 900}, {}, ExitCode.OK),  # one that was cut is neither
        ({"ok": 49, "failed": 1, "cancelled": 900}, {}, ExitCode.MISSED),
        ({"failed": 3}, {}, ExitCode.MISSED),
        ({}, {}, ExitCode.NOT_RUN),
        ({"ok": 100}, EARLY, ExitCode.NOT_RUN),
        ({"failed": 3}, EARLY, ExitCode.NOT_RUN),
        ({"ok": 100}, MISSING, ExitCode.NOT_JUDGED),
        ({"failed": 3}, MISSING, ExitCode.NOT_JUDGED),  # 4 beats 3
        ({"ok": 100}, MISSING | EARLY, ExitCode.NOT_JUDGED),
        ({}, MISSING, ExitCode.NOT_RUN),  # without a request there is nothing to doubt
        ({"cancelled": 5}, {}, ExitCode.NOT_JUDGED),
    ],
)
def test_a_run_asks_for_one_exit_code(requests: dict[str, Any], ending: dict[str, Any], code: ExitCode) -> None:
    """Doubt beats an early end, which beats a miss; nothing sent beats all."""
    assert exit_code(findings(summed(**requests), Meta(**ending))) is code


def test_a_successful_run_has_no_findings() -> None:
    """Silence is success."""
    assert findings(summed(ok=100), Meta()) == []


def test_when_all_requests_fail_the_server_has_the_word() -> None:
    """Issue ggml-org/llama.cpp#16486: a wrong model made a run that looked excellent."""
    (finding,) = findings(summed(failed=1500), Meta())
    assert finding.subject == "failures"
    assert finding.text == 'all 1,500 requests failed, most often http_4xx (HTTP status 404): "model x not found"'


def test_too_many_failures_are_named_with_their_share_and_the_most_frequent_kind() -> None:
    """The reader knows what to look for."""
    (finding,) = findings(summed(ok=90, failed=10), Meta())
    assert finding.text.startswith("10.0 % of the requests failed, more than 1 %, most often http_4xx (HTTP")
    assert FAILED_SHARE == 0.01


def test_each_thing_that_went_wrong_is_a_finding() -> None:
    """One does not hide the others."""
    found = findings(summed(failed=3), Meta(ended_early=True, missing_workers=["w2", "w3"]))
    assert [finding.exit_code for finding in found] == [
        ExitCode.NOT_JUDGED,
        ExitCode.NOT_RUN,
        ExitCode.MISSED,
    ]
    assert "w2, w3" in found[0].text


def test_a_kind_of_failure_without_a_message_is_named_all_the_same() -> None:
    """A worker's last words may be lost while its counts are not."""
    numbers = summed(ok=1, failed=1)
    numbers["failures"][0]["message"] = ""
    assert findings(numbers, Meta())[0].text.endswith("most often http_4xx (HTTP status 404)")
    numbers["failures"] = []
    assert findings(numbers, Meta())[0].text.endswith("more than 1 %")


def test_the_server_was_measured_where_the_generator_kept_up() -> None:
    """The line gives the evidence, not only the verdict."""
    numbers = summed(ok=1, cell=streamed(uncertainty_ns=0), loop_lag_ns=14 * MS, cpu_ns=4_100 * MS)
    assert fidelity_line(numbers) == (
        "measured the server: 99.0 % of token times stamped by the kernel, read lag p99 200 µs, "
        "loop away up to 14.0 ms, CPU up to 41 %"
    )


def test_a_loop_that_is_away_while_tokens_arrive_limits_the_run() -> None:
    """Issue llm-d/llm-d-benchmark#261: a greenlet that blocks for 200 ms looked like a slow server."""
    numbers = summed(ok=1, cell=streamed(uncertainty_ns=200 * MS), loop_lag_ns=212 * MS)
    assert fidelity_line(numbers) == (
        "limited by the generator: token times uncertain by 200 ms (p99) at a median gap of 50.0 ms, "
        "w1 was away for up to 212 ms; add workers (`--processes 2`) or lower the load"
    )


@pytest.mark.parametrize(("uncertainty_ms", "gap_ms", "limited"), [(2, 50, False), (3, 50, True), (3, 100, False)])
def test_uncertainty_is_held_against_the_gaps_that_were_measured(
    uncertainty_ms: int, gap_ms: int, *, limited: bool
) -> None:
    """5 % of the median gap."""
    cell = streamed(uncertainty_ns=uncertainty_ms * MS, gap_ns=gap_ms * MS)
    assert bool(generator_faults(summed(ok=1, cell=cell))) is limited


def test_one_uncertain_event_in_a_thousand_does_not_limit_a_run() -> None:
    """p99 is what counts."""
    assert generator_faults(summed(ok=1, cell=streamed(uncertainty_ns=200 * MS, uncertain=1))) == []


def test_where_most_gaps_are_zero_the_mean_gap_is_the_measure_and_without_gaps_the_first_token() -> None:
    """A median of zero would make any uncertainty too much."""
    cell = streamed(uncertainty_ns=MS, gap_ns=0)
    cell.histogram("itl").add(10_000 * MS)
    assert generator_faults(summed(ok=1, cell=cell)) == []
    cell = streamed(uncertainty_ns=20 * MS)
    del cell.histograms["itl"]
    assert "median TTFT of 300 ms" in generator_faults(summed(ok=1, cell=cell))[0]


def test_a_worker_without_cpu_to_spare_limits_the_run() -> None:
    """Worst window, not the mean: queues grow as long as it lasts."""
    numbers = summed(ok=1, cell=streamed(uncertainty_ns=0), cpu_ns=9_700 * MS)
    assert "w1 used up to 97 % of a core" in fidelity_line(numbers)
    assert generator_faults(summed(ok=1, cell=streamed(uncertainty_ns=0), cpu_ns=int(CPU_SHARE * 10 * NS_PER_S))) == []


def test_without_a_token_there_is_nothing_to_judge() -> None:
    """No claim without evidence, however the run failed."""
    assert fidelity_line(summed(failed=3)) == "nothing to judge: no token arrived"


def test_evidence_that_is_absent_is_not_made_up() -> None:
    """A recording without gauges and lags still gets its line."""
    cell = Cell(counters={"token_events": 1})
    numbers = summed(ok=1, cell=cell)
    numbers["fidelity"]["workers"] = {}
    assert fidelity_line(numbers) == "measured the server: no sign of a busy generator"
