"""An open loop by the real clock: what is compared is when something really happened, never how fast it was."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

import gevent
import pytest
from gevent.event import Event

from vllm_locust.dispatch import Dispatch

MS = 1_000_000

Arrival = tuple[int, int]
"""A number, and the instant at which it is due."""


@dataclass
class Sending:
    """What a dispatch did, and when."""

    start_ns: int = field(default_factory=time.monotonic_ns)
    offered: list[tuple[Arrival, int]] = field(default_factory=list)
    sent: list[tuple[Arrival, int]] = field(default_factory=list)
    dropped: list[Arrival] = field(default_factory=list)
    answered: Event = field(default_factory=Event)
    """Until it is set, no answer comes."""
    in_flight: int = 0
    peak: int = 0
    done: list[tuple[bool, int]] = field(default_factory=list)
    """What was in flight whenever it said that it was done, and whether it says so, too."""

    def dispatch(
        self,
        offsets_ns: list[int] | Iterator[int],
        *,
        most: int | None = None,
        since_ns: int = 0,
        send: Callable[[Arrival], None] | None = None,
    ) -> "Dispatch[Arrival]":
        def on_done() -> None:
            self.done.append((dispatch.done, self.in_flight))

        dispatch: Dispatch[Arrival] = Dispatch(
            ((number, at_ns) for number, at_ns in enumerate(offsets_ns)),
            self.start_ns,
            since_ns=since_ns,
            most=most,
            make=lambda number, due_ns: (number, due_ns),
            offer=lambda arrival: self.offered.append((arrival, time.monotonic_ns())),
            send=send or self.send,
            drop=self.dropped.append,
            on_done=on_done,
        )
        return dispatch

    def send(self, arrival: Arrival) -> None:
        self.sent.append((arrival, time.monotonic_ns()))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            self.answered.wait()
        finally:
            self.in_flight -= 1

    @property
    def numbers(self) -> list[int]:
        return [number for (number, _), _ in self.sent]


@pytest.fixture
def sending() -> Iterator[Sending]:
    sending = Sending()
    yield sending
    sending.answered.set()  # nothing stays behind


def wait_for(condition: Callable[[], object]) -> None:
    with gevent.Timeout(20):
        while not condition():
            gevent.sleep(0.001)


def every_ms(milliseconds: float, number: int) -> list[int]:
    return [round(k * milliseconds * MS) for k in range(number)]


@pytest.mark.parametrize("most", [None, 30])
def test_each_leaves_at_or_after_its_instant_in_order_and_waits_for_no_other(
    sending: Sending, most: int | None
) -> None:
    """No answer ever comes here."""
    offsets_ns = every_ms(3.7, 30)
    dispatch = sending.dispatch(offsets_ns, most=most)
    wait_for(lambda: len(sending.sent) == 30)
    dues_ns = [sending.start_ns + at_ns for at_ns in offsets_ns]
    assert [arrival for arrival, _ in sending.sent] == list(enumerate(dues_ns))
    assert [arrival for arrival, _ in sending.offered] == list(enumerate(dues_ns))
    for (_, due_ns), at_ns in (*sending.offered, *sending.sent):
        assert due_ns <= at_ns
    assert [at_ns for _, at_ns in sending.sent] == sorted(at_ns for _, at_ns in sending.sent)
    for (_, offered_ns), (_, sent_ns) in zip(sending.offered, sending.sent, strict=True):
        assert offered_ns <= sent_ns
    assert sending.in_flight == 30
    assert not dispatch.done
    assert not sending.done


def test_those_that_are_due_at_once_leave_at_once_in_their_order(sending: Sending) -> None:
    sending.dispatch([MS] * 50)
    wait_for(lambda: len(sending.sent) == 50)
    assert sending.numbers == list(range(50))


def test_it_is_done_once_when_the_last_has_ended(sending: Sending) -> None:
    dispatch = sending.dispatch(every_ms(1, 5))
    wait_for(lambda: len(sending.sent) == 5)
    assert (dispatch.done, sending.done) == (False, [])
    sending.answered.set()
    wait_for(lambda: sending.done)
    gevent.sleep(0.01)
    assert sending.done == [(True, 0)]
    assert dispatch.done
    dispatch.close()
    assert not sending.dropped


def test_it_is_done_when_all_have_ended_before_the_schedule_has(sending: Sending) -> None:
    sending.answered.set()
    sending.dispatch(every_ms(5, 3))
    wait_for(lambda: sending.done)
    gevent.sleep(0.01)
    assert sending.done == [(True, 0)]


def test_a_rank_without_an_arrival_is_done(sending: Sending) -> None:
    sending.dispatch([])
    wait_for(lambda: sending.done)
    assert sending.done == [(True, 0)]


def test_a_cap_is_never_exceeded_and_seats_are_given_in_the_order_in_which_arrivals_were_due(sending: Sending) -> None:
    """Answers come while others become due, in the very turns of the loop in which these do."""

    def send(arrival: Arrival) -> None:
        sending.sent.append((arrival, time.monotonic_ns()))
        sending.in_flight += 1
        sending.peak = max(sending.peak, sending.in_flight)
        gevent.sleep(arrival[0] % 4 * 0.001)
        sending.in_flight -= 1

    sending.dispatch(every_ms(0.3, 200), most=3, send=send)
    wait_for(lambda: sending.done)
    assert sending.numbers == list(range(200))
    assert sending.peak == 3
    assert sending.done == [(True, 0)]
    assert not sending.dropped


def test_a_seat_that_becomes_free_goes_to_who_waits_not_to_who_is_due_just_then(sending: Sending) -> None:
    seat = Event()

    def send(arrival: Arrival) -> None:
        sending.sent.append((arrival, time.monotonic_ns()))
        if arrival[0] == 0:
            seat.wait()

    # The third is due when the loop is back, which is when the first one's answer is, too.
    sending.dispatch([0, MS, 40 * MS], most=1, send=send)
    wait_for(lambda: len(sending.offered) == 2)
    seat.set()
    time.sleep(max(0.0, (sending.start_ns + 45 * MS - time.monotonic_ns()) / 1e9))
    wait_for(lambda: sending.done)
    assert sending.numbers == [0, 1, 2]


def test_a_request_that_breaks_frees_its_seat(sending: Sending, capfd: pytest.CaptureFixture[str]) -> None:
    def send(arrival: Arrival) -> None:
        sending.sent.append((arrival, time.monotonic_ns()))
        if arrival[0] == 0:
            raise LookupError("a bug")

    sending.dispatch([0, 0, MS], most=1, send=send)
    wait_for(lambda: sending.done)
    assert sending.numbers == [0, 1, 2]
    assert "LookupError: a bug" in capfd.readouterr().err


def test_what_is_overdue_at_the_end_is_offered_and_dropped(sending: Sending) -> None:
    """A thousand are due each second, and this process is too slow for more than fifty."""

    def send(arrival: Arrival) -> None:
        sending.sent.append((arrival, time.monotonic_ns()))
        time.sleep(0.02)

    dispatch = sending.dispatch(every_ms(1, 10_000), send=send)
    wait_for(lambda: len(sending.sent) >= 5)
    before_ns = time.monotonic_ns()
    dispatch.close()
    after_ns = time.monotonic_ns()
    due = sum(sending.start_ns + at_ns <= before_ns - 10 * MS for at_ns in every_ms(1, 10_000))
    offered = [number for (number, _), _ in sending.offered]
    assert offered == list(range(len(offered)))
    assert due <= len(offered)
    assert all(due_ns <= after_ns for (_, due_ns), _ in sending.offered)
    assert sending.numbers + [number for number, _ in sending.dropped] == offered
    assert sending.dropped


def test_closing_drops_exactly_those_that_wait_and_none_is_sent_afterwards(sending: Sending) -> None:
    dispatch = sending.dispatch(every_ms(1, 10_000), most=4)
    wait_for(lambda: len(sending.offered) >= 9)
    dispatch.close()
    offered, sent, dropped = len(sending.offered), len(sending.sent), list(sending.dropped)
    assert sending.numbers == [0, 1, 2, 3]
    assert dropped == [arrival for arrival, _ in sending.offered[4:]]
    sending.answered.set()
    wait_for(lambda: not sending.in_flight)
    gevent.sleep(0.02)
    dispatch.close()
    assert (len(sending.offered), len(sending.sent), sending.dropped) == (offered, sent, dropped)
    assert not sending.done  # it was stopped


@pytest.mark.parametrize("most", [None, 3])
def test_what_is_offered_is_sent_or_dropped_and_dropped_only_if_a_cap_held_it_back(most: int | None) -> None:
    """In whichever turn of the loop the end comes: what was about to leave just then is as if it were due later."""
    for turns in range(6):
        one = Sending()
        dispatch = one.dispatch([0] * 100, most=most)
        for _ in range(turns):
            gevent.sleep(0)
        dispatch.close()
        one.answered.set()
        gevent.sleep(0.005)
        assert sorted([arrival for arrival, _ in one.sent] + one.dropped) == [arrival for arrival, _ in one.offered]
        assert len(one.offered) < 100
        assert most is not None or not one.dropped


def test_what_was_due_before_it_may_begin_is_passed_over(sending: Sending) -> None:
    offsets_ns = every_ms(0.01, 5_000)  # 50 ms
    dispatch = sending.dispatch(offsets_ns, since_ns=40 * MS + 1)
    wait_for(lambda: len(sending.sent) == 999)
    gevent.sleep(0.005)
    assert sending.numbers == list(range(4_001, 5_000))
    assert len(sending.offered) == 999
    dispatch.close()
    assert not sending.dropped


def test_passing_over_a_long_time_lets_others_have_their_turn(sending: Sending) -> None:
    turns: list[int] = []

    def others() -> None:
        while not sending.sent:
            turns.append(time.monotonic_ns())
            gevent.sleep(0)

    other = gevent.spawn(others)
    sending.dispatch(count(), since_ns=20_000)
    wait_for(lambda: sending.sent)
    other.join()
    assert sending.numbers[0] == 20_000
    assert len(turns) >= 20


def test_a_loop_that_was_blocked_sends_what_is_overdue_and_says_when_it_was_due(sending: Sending) -> None:
    dispatch = sending.dispatch(every_ms(1, 300))
    wait_for(lambda: len(sending.sent) >= 5)
    before = len(sending.sent)
    time.sleep(0.1)  # not gevent's: nothing runs meanwhile
    back_ns = time.monotonic_ns()
    assert len(sending.sent) == before
    wait_for(lambda: len(sending.sent) == 300)
    assert [arrival for arrival, _ in sending.sent] == [(k, sending.start_ns + k * MS) for k in range(300)]
    assert all(at_ns >= max(due_ns, back_ns) for (_, due_ns), at_ns in sending.sent[before:])
    assert all(at_ns <= later_ns for (_, at_ns), (_, later_ns) in pairwise(sending.sent))
    dispatch.close()


def test_others_have_their_turn_among_what_is_overdue(sending: Sending) -> None:
    """A thousand requests that are late must not keep the loop from reading the answers of the first ones."""
    turns: list[int] = []

    def others() -> None:
        while len(sending.sent) < 1_000:
            turns.append(len(sending.sent))
            gevent.sleep(0)

    other = gevent.spawn(others)
    sending.dispatch([0] * 1_000)
    wait_for(lambda: len(sending.sent) == 1_000)
    other.join()
    assert len(set(turns)) > 100
