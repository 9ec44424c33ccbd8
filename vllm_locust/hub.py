"""One turn of the event loop: work for a moment, rest, poll, read whatever has arrived.

Bytes are read as soon as the loop polls. Everything that can wait, from parsing them to building the next request, is
done in slices between two polls, so that reads never wait for long, however many streams there are and however many
begin at once. Since the kernel stamps every segment, the loop may also rest between polls: a sweep that reads ten
sockets costs little more than one that reads a single one. How long the loop was away before it read bounds what a
shared stamp can hide (`vllm_locust.stamp`).
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import gevent
import numpy as np
import numpy.typing as npt
from gevent.hub import Waiter
from gevent.monkey import get_original

from vllm_locust.cpu import CoreWait

READ_BYTES = 65_536
TOGETHER_NS = 20_000
"""Two clocks read within this were read together: many times what reading them takes."""

STALL_NS = 50_000_000
"""A loop that is away for so long has stalled: a sweep over a thousand sockets, a tick or a collection take less."""

_GATHER_NS = 250_000_000
"""How long bytes wait for more of their stream where nobody is in a hurry: parsed together, they cost about half."""
_LOOK_S = 0.05
"""How often the loop turns at least while something gathers."""
_SLICE_NS = 500_000
"""How long one turn does what is due, and parses what has gathered: reads wait for so long, and have their stamps."""
_EVENTS_OF_A_POLL = 64
"""A poll of libev tells of so many descriptors at first, and of twice as many once it was full."""
_FULL_POLLS = 5
"""That many in a row that seem full have told of everything: what one leaves comes first in the next, and if they were
full, the last told of a thousand. Else it was timers and sockets of others, which are among what is counted."""
_PATH_NS = 1_000_000
"""A segment is stamped before it lies in its socket: microseconds before, longer where soft interrupts are put off."""

_REST_NS = 500_000
"""Longest rest: what an answer waits for before its user may go on."""
_REST_OF_TYPICAL_GAP = 50
_REST_OF_SHORT_GAP = 4
"""A rest is at most this part of a typical and of a short gap, so that two events of a stream hardly ever meet in one
read, and those which do are not uncertain by much."""

_FEW_GAPS = 200
_READS_OF_A_REST = 2
"""A rest for fewer reads than this costs more than it spares."""

_NO_GAPS = np.empty(0, np.int64)

_sleep = get_original("time", "sleep")


class Hub:
    """The turns of this thread's event loop, and the buffer that all reads share.

    What had arrived when a poll began was read in its sweep, unless the poll was full. So a stamp older than the last
    poll that was not, or from the future, is wrong (the wall clock stepped).
    """

    def __init__(self) -> None:
        self._turned = gevent.get_hub()  # kept, since it is known by its id
        self.loop = self._turned.loop
        self.buffer = memoryview(bytearray(READ_BYTES))
        """Where reads go first: bytes that a read makes itself leave holes behind, and memory per stream doubles."""
        self.buffers = (self.buffer,)
        self.reads = 0
        """How many reads the sweep in hand has made; whoever reads counts here."""
        self.left = False
        """Whether a socket still holds bytes that had arrived before the sweep in hand; whoever leaves some says so."""
        self.full = 0
        """How many connections have so much to parse that their sockets are not read."""
        self.unstamped = 0
        """How many reads, since the last `rest`, had no stamp that can be believed."""
        self._events = 0
        """How many events the last poll told of, at least; timers are among them."""
        self._poll_size = _EVENTS_OF_A_POLL
        self._full_polls = 0
        """How many in a row seemed full."""
        self.wall_ns = 0
        """The wall clock less the monotonic one, of this sweep."""
        self.complete_ns = time.monotonic_ns()
        """Everything that arrived before this instant has been read."""
        self.swept_ns = self._whole_ns = self._polled_ns = self.complete_ns
        self.oldest_ns = self.swept_ns
        """What is read in this sweep was stamped later than this."""
        self.away_ns = 0
        """How long the loop had been away when it polled for this sweep."""
        self._since_ns = self._longest_away_ns = self._stalled_ns = 0
        self.core_wait = CoreWait()
        self._rest_s = 0.0
        self._due: deque[Callable[[], None]] = deque()
        self._gathered: deque[tuple[int, Callable[[], None]]] = deque()
        self._look = self.loop.timer(_LOOK_S, repeat=_LOOK_S, ref=False)
        self._go_on = self.loop.idle()
        # Highest and lowest priority: first after the poll, last before it, when gevent's own callbacks have run.
        self._check = self.loop.check(ref=False, priority=self.loop.MAXPRI)
        self._prepare = self.loop.prepare(ref=False, priority=self.loop.MINPRI)
        self._sweeps()
        self._check.start(self._sweeps)
        self._prepare.start(self._polls)

    def soon(self, act: Callable[[], None]) -> None:
        """Have something done by the loop, in its turn: before the next poll, or a few later if there is much to do."""
        if not self._due:
            self._go_on.start(_nothing)
        self._due.append(act)

    def pause(self) -> None:
        """Let the calling greenlet wait for its turn, as `soon` would."""
        waiter = Waiter()
        self.soon(partial(waiter.switch, None))
        waiter.get()

    def gather(self, parse: Callable[[], None]) -> None:
        """Have what has come parsed a moment later, by a call from the loop."""
        if not self._gathered:
            self._look.start(_nothing)
        self._gathered.append((self.swept_ns + _GATHER_NS, parse))

    def _sweeps(self) -> None:
        self._events = self.loop.pendingcnt
        for _ in range(10):
            self.swept_ns, wall_ns = time.monotonic_ns(), time.time_ns()
            if time.monotonic_ns() - self.swept_ns <= TOGETHER_NS:
                break
        self.wall_ns = wall_ns - self.swept_ns
        # A process that had no core when its poll ended was away as well, and has not noticed.
        self.away_ns += self.core_wait.look(self.swept_ns)

    def _polls(self) -> None:
        if self._events < self._poll_size:
            self._full_polls = 0
        else:
            self._full_polls += 1
            self._poll_size = max(self._poll_size, self.reads + 1)
        if not self.left and not self.full and self._full_polls % _FULL_POLLS == 0:
            self.complete_ns, self._whole_ns = self._polled_ns, self.swept_ns
        self.left, self.reads = False, 0
        if self._due or self._gathered:
            self._work()
        # What was done may have called back into gevent, which has looked at its callbacks already.
        more = self._due or self.loop._callbacks or self._gathered_is_due()  # noqa: SLF001 - it has no public one
        if more:
            self._go_on.start(_nothing)
        else:
            self._go_on.stop()
            if self._rest_s:
                _sleep(self._rest_s)
        now_ns = self._polled_ns = time.monotonic_ns()
        self.oldest_ns = self.complete_ns - _PATH_NS
        self.away_ns = now_ns - self._whole_ns
        turn_ns = now_ns - max(self.swept_ns, self._since_ns)
        self._longest_away_ns = max(self._longest_away_ns, turn_ns)
        self._stalled_ns += turn_ns if turn_ns >= STALL_NS else 0

    def _work(self) -> None:
        """Do what is due and parse what has gathered, for a slice each."""
        due, gathered, now_ns = self._due, self._gathered, time.monotonic_ns()
        until_ns = now_ns + _SLICE_NS
        while due and now_ns < until_ns:
            due.popleft()()
            now_ns = time.monotonic_ns()
        until_ns = now_ns + _SLICE_NS
        while gathered and gathered[0][0] <= now_ns < until_ns:
            gathered.popleft()[1]()
            now_ns = time.monotonic_ns()
        if not gathered:
            self._look.stop()

    def _gathered_is_due(self) -> bool:
        return bool(self._gathered) and self._gathered[0][0] <= time.monotonic_ns()

    def rest(self, gaps_ns: npt.NDArray[np.int64] = _NO_GAPS) -> None:
        """Rest between sweeps from now on, as far as the gaps of the last second leave room for it.

        Not where there are few gaps, or a sweep would read little more for it, or the clock is read in place of stamps.
        """
        self._rest_s, unstamped, self.unstamped = 0.0, self.unstamped, 0
        if unstamped * 100 <= gaps_ns.size >= _FEW_GAPS:
            places = (gaps_ns.size // 100, gaps_ns.size // 2)
            short_ns, typical_ns = np.partition(gaps_ns, places)[list(places)]
            rest_s = min(_REST_NS, typical_ns / _REST_OF_TYPICAL_GAP, short_ns / _REST_OF_SHORT_GAP) / 1e9
            if gaps_ns.size * rest_s >= _READS_OF_A_REST:
                self._rest_s = rest_s

    def begin(self) -> None:
        """Count lags, stalls and waits from now on, and do not rest until gaps are known: a run or an epoch begins."""
        self._since_ns, self._longest_away_ns, self._stalled_ns = time.monotonic_ns(), 0, 0
        self.core_wait.take_ns()
        self.rest()

    def take_longest_away_ns(self) -> int:
        """Return the longest time for which the loop was away since the last call."""
        longest_ns, self._longest_away_ns = self._longest_away_ns, 0
        return longest_ns

    def take_stalled_ns(self) -> int:
        """Return how long the loop has been away since the last call, in stretches of `STALL_NS` and longer."""
        stalled_ns, self._stalled_ns = self._stalled_ns, 0
        return stalled_ns


def _nothing() -> None:
    """Turn the loop; what is due is done before each poll."""


_hubs: dict[int, Hub] = {}


def hub() -> Hub:
    """Return the turns of this thread's event loop; the first call begins to take them."""
    key = id(gevent.get_hub())
    found = _hubs.get(key)
    if found is None:
        found = _hubs[key] = Hub()
    return found
