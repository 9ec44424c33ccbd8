"""Turns of the event loop: everything in its turn, reads between slices, times that are the kernel's in any burst."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from random import Random

import gevent
import numpy as np
import numpy.typing as npt
import pytest
from gevent.event import Event
from gevent.monkey import get_original
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_locust.hub import Hub, hub
from vllm_locust.origin import Origin
from vllm_locust.stamp import Read
from vllm_locust.transport import Connection

MS = 1_000_000
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what a TCP socket receives")


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    """No test leaves a rest behind, nor anything to do."""
    yield
    hub().rest(np.empty(0, np.int64))
    assert not hub()._due
    turn_until(lambda: not hub()._gathered)


class Pairs:
    """Connections, and their other ends in this process, which block and do not turn the loop."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        self.connections: list[Connection] = []
        self.peers: list[socket.socket] = []

    def open(self, number: int) -> None:
        while len(self.connections) < number:
            connection = Connection(Origin("127.0.0.1", self._listener.getsockname()[1]), 10.0)
            self._stack.callback(connection.close)
            self.connections.append(connection)
            peer, _ = self._listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peers.append(self._stack.enter_context(peer))

    def reads(self) -> list[list[Read]]:
        """Return what each connection has read and nobody has parsed, and forget it."""
        found = []
        for connection in self.connections:
            found.append(list(connection._reads))
            connection._reads.clear()
            connection._queued = 0
        return found


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    with ExitStack() as stack:
        yield Pairs(stack)


def in_a_loop_of_its_own(act: Callable[[Pairs], None]) -> None:
    """Have something done in a thread whose loop has never polled: libev asks for more once a poll was full."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with ExitStack() as stack:
                act(Pairs(stack))
        except BaseException as failure:  # noqa: BLE001 - raised in the thread of the test
            failures.append(failure)

    thread = get_original("threading", "Thread")(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def turn_until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(20):
        while not condition():
            gevent.sleep(0.001)


def a_whole_sweep() -> None:
    """Turn the loop until a sweep began and ended after this."""
    now_ns = time.monotonic_ns()
    turn_until(lambda: hub()._whole_ns > now_ns and hub().complete_ns > now_ns)


# What is due


@given(st.integers(0, 60))
def test_what_is_due_is_done_in_order_each_thing_once(number: int) -> None:
    done: list[int] = []
    for i in range(number):
        hub().soon(partial(done.append, i))
    turn_until(lambda: len(done) >= number)
    gevent.sleep(0)
    assert done == [*range(number)]


def test_what_becomes_due_while_something_is_done_is_done_after_it() -> None:
    done: list[str] = []

    def first() -> None:
        hub().soon(lambda: done.append("third"))
        done.append("first")

    hub().soon(first)
    hub().soon(lambda: done.append("second"))
    turn_until(lambda: len(done) == 3)
    assert done == ["first", "second", "third"]


def test_what_is_due_does_not_wait_for_anything_else_to_happen() -> None:
    done = Event()
    hub().soon(done.set)
    assert done.wait(20)


def test_what_fails_does_not_keep_the_rest_from_being_done(capfd: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []
    hub().soon(lambda: done.append(1))
    hub().soon(lambda: done[1])  # type: ignore[arg-type, return-value]
    hub().soon(lambda: done.append(3))
    turn_until(lambda: 3 in done)
    assert done == [1, 3]
    assert "IndexError" in capfd.readouterr().err


def test_greenlets_that_pause_go_on_in_order_and_in_their_turn() -> None:
    order: list[object] = []

    def pausing(name: int) -> None:
        for _ in range(3):
            hub().pause()
            order.append(name)

    greenlets = [gevent.spawn(pausing, name) for name in range(5)]
    gevent.joinall(greenlets, timeout=20)
    assert order == [*range(5)] * 3


def test_a_greenlet_that_is_killed_in_its_pause_is_not_woken_by_it_any_more() -> None:
    """It may wait for something else by then, and would take its turn for that."""
    order: list[object] = []
    other = Event()

    def pausing(name: int) -> None:
        try:
            hub().pause()
        except gevent.GreenletExit:
            order.append(("killed", name, other.wait(20)))
        else:
            order.append(name)

    greenlets = [gevent.spawn(pausing, name) for name in range(4)]
    gevent.sleep(0)
    assert len(hub()._due) == 4, "they do not pause"
    greenlets[1].kill(block=False)
    hub().soon(lambda: order.append("last"))
    turn_until(lambda: "last" in order)
    assert order == [0, 2, 3, "last"]
    other.set()
    gevent.joinall(greenlets, timeout=20)
    assert order[4:] == [("killed", 1, True)]


# Slices


def test_sockets_are_read_between_the_slices_of_what_is_due(pairs: Pairs) -> None:
    pairs.open(1)
    a_whole_sweep()
    order: list[str] = []

    def work(i: int) -> None:
        until_ns = time.monotonic_ns() + 200_000
        if i % 50 == 10:
            pairs.peers[0].send(b"x")
        while time.monotonic_ns() < until_ns:
            pass
        order.extend(["read"] * len(pairs.reads()[0]))
        order.append("work")

    for i in range(300):
        hub().soon(partial(work, i))
    turn_until(lambda: order.count("work") == 300)
    # Six were sent, each 50 things to do after the last, and 39 before the end: none is read after all is done.
    reads = [place for place, what in enumerate(order) if what == "read"]
    assert len(reads) == 6
    assert reads[-1] < len(order) - 1
    assert all(second > first + 1 for first, second in pairwise(reads))


# What has gathered


def test_bytes_that_gather_are_parsed_without_other_traffic(pairs: Pairs) -> None:
    pairs.open(1)
    (connection,) = pairs.connections
    connection.patient = True
    reading = gevent.spawn(connection.read)
    gevent.sleep(0)
    sent_ns = time.monotonic_ns()
    pairs.peers[0].send(b"data: x\n\n")
    reading.join(20)
    read = reading.value
    assert read is not None
    assert read.data == b"data: x\n\n"
    assert time.monotonic_ns() - sent_ns >= 200 * MS, "nobody waited for more"
    assert not connection._gathering


def test_what_gathers_is_parsed_together_and_the_end_of_a_body_does_not_wait(pairs: Pairs) -> None:
    pairs.open(1)
    (connection,) = pairs.connections
    connection.patient = True
    woken: list[bytes] = []

    def read() -> None:
        for _ in range(2):
            read = connection.read()
            assert read is not None
            woken.append(read.data)

    reading = gevent.spawn(read)
    gevent.sleep(0)
    pairs.peers[0].send(b"one, and more")
    turn_until(lambda: connection._gathering)
    assert woken == []
    pairs.peers[0].send(b"0\r\n\r\n")
    turn_until(lambda: bool(woken))
    assert woken == [b"one, and more", b"0\r\n\r\n"]
    reading.get(timeout=20)


def test_a_connection_that_is_closed_while_its_bytes_gather_wakes_nobody(pairs: Pairs) -> None:
    pairs.open(2)
    for connection, peer in zip(pairs.connections, pairs.peers, strict=True):
        connection.patient = True
        peer.send(b"data: x")
    turn_until(lambda: all(connection._gathering for connection in pairs.connections))
    pairs.connections[0].close()
    assert pairs.connections[1].read() is not None
    turn_until(lambda: not hub()._gathered)


# Bursts


@LINUX
@pytest.mark.parametrize(
    "sizes", [[200], [200, 200, 30], [47, 48, 63, 64, 65, 127, 128, 129, 200], [64] * 5, [63, 64, 200]]
)
def test_a_burst_over_more_sockets_than_a_poll_tells_of_is_stamped_read_by_read(sizes: list[int]) -> None:
    in_a_loop_of_its_own(lambda pairs: burst(pairs, sizes))


def burst(pairs: Pairs, sizes: list[int]) -> None:
    pairs.open(max(sizes))
    for size in sizes:
        a_whole_sweep()
        pairs.reads()
        before_ns = time.monotonic_ns()
        chosen = Random(size).sample(range(len(pairs.peers)), size)
        for i in chosen:
            pairs.peers[i].send(b"one")
        time.sleep(0.02)
        for i in chosen:
            pairs.peers[i].send(b"two")
        after_ns = time.monotonic_ns()
        turn_until(lambda: all(sum(len(r.data) for r in pairs.connections[i]._reads) == 6 for i in chosen))  # noqa: B023
        for reads in pairs.reads():
            for read in reads:
                assert read.stamped, f"unstamped in a burst of {size}"
                assert before_ns - 5 * MS <= read.at_ns <= after_ns + 5 * MS
                # Whatever shares the read came since the last whole sweep, and the loop was away since then.
                assert read.away_ns >= after_ns - before_ns
                assert read.lag_ns >= 0


@LINUX
def test_reads_that_a_full_poll_left_behind_were_away_for_as_long_as_those_of_that_poll() -> None:
    in_a_loop_of_its_own(left_behind)


def left_behind(pairs: Pairs) -> None:
    pairs.open(200)
    a_whole_sweep()
    before_ns = time.monotonic_ns()
    for peer in pairs.peers:
        peer.send(b"x")
    time.sleep(0.03)
    blocked_ns = time.monotonic_ns() - before_ns
    turn_until(lambda: all(connection._reads for connection in pairs.connections))
    assert all(reads[0].away_ns >= blocked_ns for reads in pairs.reads())
    a_whole_sweep()
    pairs.peers[0].send(b"x")
    turn_until(lambda: bool(pairs.connections[0]._reads))
    assert hub()._whole_ns > before_ns + blocked_ns, "no sweep was whole again"


@LINUX
def test_everything_that_came_before_what_is_complete_has_been_read() -> None:
    in_a_loop_of_its_own(complete)


def complete(pairs: Pairs) -> None:
    """Ask in a callback of gevent, by a timer before the reads of its sweep, and in its turn."""
    pairs.open(150)
    claims: list[tuple[int, int]] = []

    def claim() -> None:
        read = sum(len(read.data) for connection in pairs.connections for read in connection._reads)
        claims.append((hub().complete_ns, read))

    for _ in range(20):
        a_whole_sweep()
        pairs.reads()
        claims.clear()
        timers = [gevent.spawn_later(0.001, claim), gevent.spawn_later(0, claim), gevent.spawn_later(0.004, claim)]
        gevent.sleep(0)
        for peer in pairs.peers:
            peer.send(b"x")
        sent_ns = time.monotonic_ns()
        time.sleep(0.005)
        for _ in range(5):
            hub().soon(claim)
        turn_until(lambda: all(connection._reads for connection in pairs.connections))
        gevent.joinall(timers, timeout=20)
        turn_until(lambda: len(claims) == 8)
        for complete_ns, read in claims:
            assert complete_ns < sent_ns or read == len(pairs.peers)
    a_whole_sweep()
    assert hub().complete_ns > sent_ns


def test_a_loop_that_was_away_says_for_how_long() -> None:
    a_whole_sweep()
    hub().take_longest_away_ns()
    time.sleep(0.03)
    a_whole_sweep()
    assert hub().take_longest_away_ns() >= 30 * MS


def test_what_was_before_the_beginning_is_no_lag_of_the_run() -> None:
    a_whole_sweep()
    time.sleep(0.1)
    began_ns = time.monotonic_ns()
    hub().begin()
    a_whole_sweep()
    longest_ns = hub().take_longest_away_ns()
    assert longest_ns <= time.monotonic_ns() - began_ns
    assert hub().take_stalled_ns() <= time.monotonic_ns() - began_ns


def test_a_thread_has_a_hub_of_its_own_and_only_one() -> None:
    found: list[Hub] = []
    thread = get_original("threading", "Thread")(target=lambda: found.extend([hub(), hub()]))
    thread.start()
    thread.join()
    assert found[0] is found[1]
    assert found[0] is not hub()
    assert hub() is hub()


# Rests

GAPS = hnp.arrays(
    np.int64,
    st.integers(0, 300) | st.integers(2_500, 9_000),
    elements=st.integers(0, 3_000_000) | st.integers(0, 200_000_000),
    fill=st.sampled_from([0, 100_000, 4_000_000, 20_000_000, 40_000_000]),
)


def rest_of(gaps_ns: npt.NDArray[np.int64], unstamped: int = 0) -> float:
    hub().unstamped = unstamped
    hub().rest(gaps_ns)
    assert hub().unstamped == 0
    return hub()._rest_s * 1e9


@given(GAPS, st.integers(0, 50))
def test_a_rest_is_short_beside_the_gaps(gaps_ns: npt.NDArray[np.int64], unstamped: int) -> None:
    before = gaps_ns.copy()
    rest_ns = rest_of(gaps_ns, unstamped)
    assert (gaps_ns == before).all()
    assert 0 <= rest_ns <= 500_000
    if gaps_ns.size <= 200 or unstamped * 100 > gaps_ns.size:
        assert rest_ns == 0
    if rest_ns:  # by a sample of the gaps
        assert (gaps_ns < rest_ns * 50 - 1).mean() <= 0.56
        assert (gaps_ns < rest_ns * 4 - 1).mean() <= 0.03


@pytest.mark.parametrize(
    ("gaps_ns", "unstamped", "rest_ns"),
    [
        (np.full(20_000, 20 * MS), 0, 400_000),
        (np.full(50_000, 40 * MS), 0, 500_000),
        (np.full(50_000, 40 * MS), 500, 500_000),
        (np.full(50_000, 40 * MS), 501, 0),
        (np.full(1_900, 40 * MS), 0, 0),
        (np.full(100_000, MS // 10), 0, 0),
        (np.full(100_000, 100), 0, 0),
        (np.zeros(100_000, np.int64), 0, 0),
        (np.concatenate([np.zeros(1_000, np.int64), np.full(49_000, 40 * MS)]), 0, 0),
        (np.concatenate([np.full(1_000, MS), np.full(49_000, 40 * MS)]), 0, 250_000),
        (np.empty(0, np.int64), 0, 0),
    ],
)
def test_there_is_no_rest_where_gaps_are_short_few_or_unstamped(
    gaps_ns: npt.NDArray[np.int64], unstamped: int, rest_ns: float
) -> None:
    shuffled = np.random.default_rng(0).permutation(gaps_ns.astype(np.int64))
    assert rest_of(shuffled, unstamped) == pytest.approx(rest_ns)


def test_gaps_that_alternate_are_all_seen() -> None:
    """Streams of which every other event brings two segments: their gaps lie in turns."""
    gaps_ns = np.tile(np.array([0, 40 * MS], np.int64), 25_000)
    for some in (gaps_ns, gaps_ns[1:], gaps_ns[:3_000], gaps_ns[1:3_000]):
        assert rest_of(some) == 0


@LINUX
def test_there_is_no_rest_without_gaps() -> None:
    assert rest_of(np.full(20_000, 20_000_000)) > 0
    hub().rest()
    assert hub()._rest_s == 0


def test_a_rest_shifts_no_stamp_and_puts_off_nothing_for_ever(pairs: Pairs) -> None:
    pairs.open(3)
    hub().rest(np.full(50_000, 40 * MS))
    assert hub()._rest_s == 0.0005
    for _ in range(20):
        a_whole_sweep()
        before_ns = time.monotonic_ns()
        for peer in pairs.peers:
            peer.send(b"x")
        after_ns = time.monotonic_ns()
        turn_until(lambda: all(connection._reads for connection in pairs.connections))
        for (read,) in pairs.reads():
            assert read.stamped
            assert before_ns - MS <= read.at_ns <= after_ns + 5 * MS
    done: list[int] = []
    for i in range(100):
        hub().soon(partial(done.append, i))
    turn_until(lambda: done == [*range(100)])
