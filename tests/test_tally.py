"""What an ended request counts as."""

from typing import NamedTuple

import pytest

from vllm_locust.cell import Cell
from vllm_locust.limit import Goodput, parse_good
from vllm_locust.tally import count_end
from vllm_locust.timeline import Outcome, Timeline

MS = 1_000_000
SENT = 1_000_000 * MS


def ended(*tokens_ms: int, outcome: Outcome = Outcome.OK, choices: int = 1, reads: int | None = None) -> Timeline:
    """Return a request that should have left 20 ms before it did; each further choice is twice as slow."""
    made = Timeline("r1", "short", "chat", SENT, choices_asked=choices, scheduled_ns=SENT - 20 * MS)
    made.sent_ns = SENT
    for at_ms, index in sorted((at_ms * (index + 1), index) for at_ms in tokens_ms for index in range(choices)):
        made.token_event(index, SENT + at_ms * MS, 0)
    made.token_reads = made.events if reads is None else reads
    made.end(outcome, made.last_ns or SENT)
    return made


class Case(NamedTuple):
    """A request, what it has to meet, and whether it does."""

    timeline: Timeline
    goodput: str
    good: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(ended(100, 150, 250), "ttft <= 100ms, tpot <= 75ms, e2el <= 250ms, itl_max <= 100ms", good=True),
        Case(ended(100, 150, 250), "ttft < 100ms", good=False),
        Case(ended(100, 150, 250), "tpot < 75ms", good=False),
        Case(ended(100, 150, 250), "e2el < 250ms", good=False),
        Case(ended(100, 150, 250), "itl_max < 100ms", good=False),
        Case(ended(100, 150, 250), "ttft_scheduled <= 120ms, e2el_scheduled <= 270ms", good=True),
        Case(ended(100, 150, 250), "ttft_scheduled < 120ms", good=False),
        Case(ended(100, 150, 250), "e2el_scheduled < 270ms", good=False),
        Case(ended(100), "tpot < 1ns, itl_max < 1ns", good=True),  # one token has neither
        Case(ended(100, 150, choices=2), "tpot < 100ms", good=False),  # the second choice took 100 ms
        Case(ended(100, 150, choices=2), "tpot <= 100ms", good=True),
        Case(ended(*range(100, 200, 10), reads=1), "tpot < 1ns, itl_max < 1ns", good=True),  # gathered on its way
        Case(ended(100, outcome=Outcome.STREAM_ERROR), "ttft < 1s", good=False),
        Case(ended(100, outcome=Outcome.CANCELLED), "ttft < 1s", good=False),
        Case(ended(100), "long: ttft < 1ms", good=True),  # another part's
        Case(ended(100), "short: ttft < 1ms", good=False),
    ],
)
def test_an_ok_request_is_good_if_it_met_each_limit_on_what_it_has(case: Case) -> None:
    cell = Cell()
    count_end(case.timeline, cell, Goodput(parse_good(case.goodput)))
    assert cell.counters.get("good", 0) == case.good


def test_without_a_schedule_a_request_is_not_late_for_it() -> None:
    timeline, cell = ended(100), Cell()
    timeline.scheduled_ns = None
    count_end(timeline, cell, Goodput(parse_good("ttft_scheduled < 1ns")))
    assert cell.counters["good"] == 1


def test_where_nothing_says_what_a_good_request_is_there_is_none() -> None:
    cell = Cell()
    count_end(ended(100), cell)
    assert "good" not in cell.counters
