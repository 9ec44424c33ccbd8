"""Verdicts: which run asks for which exit code, and why."""

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_locust.cell import Cell, Key
from vllm_locust.errors import ExitCode
from vllm_locust.fidelity import Limits
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.summary import Meta, summary
from vllm_locust.verdict import FAILED_SHARE, exit_code, findings


def summed(
    *,
    ok: int = 0,
    failed: int = 0,
    cancelled: int = 0,
    cell: Cell | None = None,
    limits: Sequence[str] = (),
    **gauges: int,
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
    return summary(recording, Meta(limits=list(limits)))


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


@pytest.mark.parametrize(("dropped", "code"), [(0, ExitCode.OK), (10, ExitCode.OK), (11, ExitCode.MISSED)])
def test_requests_that_were_due_and_never_sent_are_no_success(dropped: int, code: ExitCode) -> None:
    """A server that holds up a cap would else be judged by the few that it took."""
    cell = Cell(counters={"scheduled": 1000, "dropped": dropped})
    found = findings(summed(ok=1000 - dropped, cell=cell), Meta())
    assert exit_code(found) is code
    assert all("had not been sent by the end: lower the rate" in finding.text for finding in found)


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


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(), ExitCode.OK),  # only the line on fidelity says so
        (Limits(cpu=0.9, given=("cpu",)), ExitCode.NOT_JUDGED),
        (Limits(cpu=0.98, given=("cpu",)), ExitCode.OK),
        (Limits(stalled=0.01, given=("stalled",)), ExitCode.OK),  # another one is missed
    ],
)
def test_a_generator_limit_that_the_user_set_is_one_to_meet(limits: Limits, code: ExitCode) -> None:
    numbers = summed(ok=1, cell=Cell(counters={"token_events": 1}), cpu_ns=9_700_000_000)
    found = findings(numbers, Meta(generator_limits=limits))
    assert exit_code(found) is code
    assert [(finding.subject, finding.text) for finding in found] == [
        ("generator", "w1 used up to 97 % of a core (the limit is --max-generator-cpu 90%)")
    ] * bool(code)


def test_a_generator_at_fault_puts_a_miss_in_doubt() -> None:
    """4 beats 3: the failures may be those of a generator that was late."""
    cell = Cell(counters={"token_events": 1})
    numbers = summed(ok=1, failed=9, cell=cell, cpu_ns=9_700_000_000)
    found = findings(numbers, Meta(generator_limits=Limits(given=("cpu",))))
    assert ({f.exit_code for f in found}, exit_code(found)) == (
        {ExitCode.MISSED, ExitCode.NOT_JUDGED},
        ExitCode.NOT_JUDGED,
    )


# Limits


def answered(number: int, ttft_ms: int) -> Cell:
    made = Cell()
    made.histogram("ttft").add(ttft_ms * 1_000_000, number)
    return made


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (["ttft p95 < 300ms"], ExitCode.OK),
        (["ttft p95 < 200ms"], ExitCode.MISSED),
        (["ttft p99.9 < 300ms"], ExitCode.NOT_JUDGED),  # of 100 requests
        (["itl p95 < 300ms"], ExitCode.NOT_JUDGED),  # not measured
        (["rare: ttft p95 < 300ms"], ExitCode.NOT_JUDGED),
        (["ttft p95 < 200ms", "itl p95 < 300ms"], ExitCode.NOT_JUDGED),  # 4 beats 3
    ],
)
def test_a_limit_that_was_missed_or_cannot_be_judged_has_its_exit_code(limits: list[str], code: ExitCode) -> None:
    numbers = summed(ok=100, cell=answered(100, 250), limits=limits)
    assert exit_code(findings(numbers, Meta())) is code


def test_a_finding_says_what_was_measured_what_was_asked_and_what_to_do() -> None:
    numbers = summed(
        ok=100, cell=answered(100, 250), limits=["short: ttft p95 < 200ms", "ttft p99.9 < 1s", "itl max < 1s"]
    )
    missed, few, absent = findings(numbers, Meta())
    assert [finding.subject for finding in (missed, few, absent)] == ["short: ttft p95", "ttft p99.9", "itl max"]
    assert missed.text == (
        "250 ms (95 % CI 250 ms to 250 ms, 100 requests), the limit is < 200ms: "
        "lower the load, or see what the server waits for: its queue, or the prefill of long prompts"
    )
    assert few.text == (
        "too few samples: 250 ms (95 % CI from 250 ms, 100 requests), 1,000 are needed, the limit is < 1s: run longer"
    )
    assert absent.text == "not measured: no request that counts, the limit is < 1s: run longer"


@pytest.mark.parametrize(
    ("limits", "subjects"),
    [
        ([], ["failures"]),
        (["failures < 20%"], []),
        (["failures <= 5%"], ["failures"]),
        (["short: failures < 20%"], ["failures"]),  # of one part: the rule for all stays
        (["short: failures < 5%"], ["short: failures", "failures"]),
    ],
)
def test_where_a_limit_speaks_of_failures_the_rule_of_one_percent_is_silent(
    limits: list[str], subjects: list[str]
) -> None:
    found = findings(summed(ok=90, failed=10, limits=limits), Meta())
    assert [finding.subject for finding in found] == subjects
    assert {finding.exit_code for finding in found} <= {ExitCode.MISSED}


def test_a_missed_limit_on_failures_has_the_words_of_the_server() -> None:
    (finding,) = findings(summed(failed=100, limits=["failures < 1%"]), Meta())
    assert finding.exit_code is ExitCode.MISSED
    assert finding.text == (
        "100.0 % (95 % CI 96.3 % to 100.0 %, 100 requests), the limit is < 1%, "
        'most often http_4xx (HTTP status 404): "model x not found": see the outcomes'
    )


def test_where_nothing_was_sent_no_limit_adds_to_that() -> None:
    found = findings(summed(limits=["ttft p95 < 300ms", "failures < 1%"]), Meta())
    assert [finding.subject for finding in found] == ["load"]
    assert exit_code(found) is ExitCode.NOT_RUN
