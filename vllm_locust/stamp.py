"""When bytes arrived, as the kernel says it.

On Linux every received segment has a stamp (`SO_TIMESTAMPNS`), so neither a busy event loop nor the GIL adds to it. A
stamp is believed only where it cannot be wrong (`Hub`); else the clock is read right after the bytes.
"""

import socket
import struct
import sys
import time

import gevent
import msgspec

from vllm_locust.cpu import CoreWait

# Not in the socket module before Python 3.14; the numbers of the generic Linux ABI (asm-generic/socket.h).
SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
_TIMESPEC = struct.Struct("@qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0

READ_BYTES = 65_536
_TOGETHER_NS = 20_000
"""Two clocks read within this were read together: many times what reading them takes."""

STAMP_RESOLUTION_NS = 1_000
"""What is left of an error where a segment has a stamp of its own."""

STALL_NS = 50_000_000
"""A loop that is away for so long has stalled: a sweep over a thousand sockets, a tick or a collection take less."""


class Read(msgspec.Struct, frozen=True, gc=False):
    """Bytes, when their last segment arrived (monotonic ns), and how that is known."""

    data: bytes
    at_ns: int
    lag_ns: int
    """How long they waited in the kernel; 0 where unstamped."""
    away_ns: int
    """How long the loop had been away before it read them: events that share the read may be older by so much."""
    stamped: bool


def _monotonic_ns(wall_ns: int) -> int:
    """Return an instant of the wall clock as one of the monotonic clock, by reading both now."""
    for _ in range(10):
        before_ns, now_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns <= _TOGETHER_NS:
            break
    return before_ns - (now_ns - wall_ns)


class Hub:
    """The times of the event loop's sweeps over its sockets, and the buffer that they share.

    What had arrived when a poll began was read in its sweep. So a stamp older than the poll before this sweep's, or
    from the future, is wrong (the wall clock stepped), and how long the loop was busy before it polled bounds what a
    shared stamp can hide.
    """

    def __init__(self) -> None:
        loop = gevent.get_hub().loop
        now_ns = time.monotonic_ns()
        self.swept_ns = self._polled_ns = self.polled_before_ns = now_ns
        self.away_ns = 0
        self.buffers = (memoryview(bytearray(READ_BYTES)),)
        """Where reads go first: bytes that a read makes itself leave holes behind, and memory per stream doubles."""
        self._longest_away_ns = self._stalled_ns = 0
        self.core_wait = CoreWait()
        if SO_TIMESTAMPNS is not None:
            # The kernel begins to stamp some time after the first socket with the option, and ends with the last.
            self._stamping = socket.socket()
            self._stamping.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        # Highest and lowest priority: first after the poll, last before it, when gevent's own callbacks have run.
        self._check = loop.check(ref=False, priority=loop.MAXPRI)
        self._check.start(self._sweeps)
        self._prepare = loop.prepare(ref=False, priority=loop.MINPRI)
        self._prepare.start(self._polls)

    def _polls(self) -> None:
        now_ns = time.monotonic_ns()
        self.polled_before_ns, self._polled_ns = self._polled_ns, now_ns
        self.away_ns = away_ns = now_ns - self.swept_ns
        self._longest_away_ns = max(self._longest_away_ns, away_ns)
        self._stalled_ns += away_ns if away_ns >= STALL_NS else 0

    def _sweeps(self) -> None:
        self.swept_ns = time.monotonic_ns()
        self.core_wait.look(self.swept_ns)

    @property
    def complete_ns(self) -> int:
        """Everything that arrived before this instant has been read."""
        return self._polled_ns if self._polled_ns < self.swept_ns else self.polled_before_ns

    def take_longest_away_ns(self) -> int:
        """Return the longest time for which the loop was away since the last call."""
        longest_ns, self._longest_away_ns = self._longest_away_ns, 0
        return longest_ns

    def take_stalled_ns(self) -> int:
        """Return how long the loop has been away since the last call, in stretches of `STALL_NS` and longer."""
        stalled_ns, self._stalled_ns = self._stalled_ns, 0
        return stalled_ns


_hubs: dict[int, Hub] = {}


def hub_times() -> Hub:
    """Return the sweep times of this thread's hub; the first call begins to take them."""
    hub = gevent.get_hub()
    times = _hubs.get(id(hub))
    if times is None:
        times = _hubs[id(hub)] = Hub()
    return times


def read_of(data: bytes, ancillary: list[tuple[int, int, bytes]], now_ns: int, times: Hub) -> Read:
    """Return bytes with the time of their last segment; `now_ns` is the clock right after they were read."""
    away_ns = times.away_ns + now_ns - times.swept_ns
    for _, kind, value in ancillary:
        if kind == SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            stamp_ns = seconds * 1_000_000_000 + nanoseconds
            lag_ns = time.time_ns() - stamp_ns
            if time.monotonic_ns() - now_ns > _TOGETHER_NS:  # this process slept between the two readings
                lag_ns = now_ns - _monotonic_ns(stamp_ns)
            if 0 <= lag_ns <= now_ns - times.polled_before_ns:
                return Read(data, now_ns - lag_ns, lag_ns, away_ns, stamped=True)
    return Read(data, now_ns, 0, away_ns, stamped=False)
