"""How long the calling thread was ready to run and had no core: another process has it, not a busy event loop.

Linux tells (`/proc/thread-self/schedstat`, second field); elsewhere nobody does, and nothing is made up.
"""

import os
import threading
import time

LONG_WAIT_NS = 1_000_000
"""A wait that says that another process has the core. Where several processes wake for the same event, each waits for
some 100 µs, which add up to 3 % of the time on an idle machine of two cores, but less than 0.1 % of it in waits of 1 ms
and longer; beside a process that never sleeps, nearly all of the waiting is in these."""

_PATH = "/proc/thread-self/schedstat"
_BYTES = 64
_SHORT_TURNS = 16
_fds: dict[int, int | None] = {}
"""Open files by native thread id, which a forked process does not share; absent where there is no such file."""


def core_wait_ns() -> int | None:
    """Return the thread's wait for a core since it began, in nanoseconds; absent where the system does not say.

    A wait that goes on is not in it; there is none while this runs. It takes some microseconds.
    """
    thread = threading.get_native_id()
    if thread not in _fds:
        _fds[thread] = _open()
    fd = _fds[thread]
    if fd is None:
        return None
    try:
        _, waited, times = os.pread(fd, _BYTES, 0).split()
    except (OSError, ValueError):
        _fds[thread] = None
        return None
    # A kernel that does not count says that this thread, which evidently runs, has got a core zero times.
    return int(waited) if int(times) else None


class CoreWait:
    """The long waits of this thread for a core: those that fell into one turn of its event loop."""

    def __init__(self) -> None:
        self._looked_ns = time.monotonic_ns()
        self._waited_ns = core_wait_ns()
        self._sum_ns = self._short = 0

    def look(self, now_ns: int) -> int:
        """Return how long the thread waited since the last look, 0 if for less than `LONG_WAIT_NS`.

        The file is read only after turns that were long enough, and after some short ones, lest their waits add up.
        """
        passed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if self._waited_ns is None:
            return 0
        if passed_ns < LONG_WAIT_NS:
            self._short += 1
            if self._short % _SHORT_TURNS == 0:
                self._waited_ns = core_wait_ns()
            return 0
        before_ns, self._waited_ns = self._waited_ns, core_wait_ns()
        # A few short turns before this one may have waited, too.
        waited_ns = 0 if self._waited_ns is None else min(self._waited_ns - before_ns, passed_ns)
        if waited_ns < LONG_WAIT_NS:
            return 0
        self._sum_ns += waited_ns
        return waited_ns

    def take_ns(self) -> int | None:
        """Return the sum of the long waits since the last call; absent where the system does not say."""
        taken_ns, self._sum_ns = self._sum_ns, 0
        return None if self._waited_ns is None else taken_ns


def _open() -> int | None:
    try:
        return os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):  # Windows has no O_CLOEXEC
        return None
