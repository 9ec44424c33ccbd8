"""How long the calling thread was ready to run and had no core: another process has it, not a busy event loop.

Linux tells (`/proc/thread-self/schedstat`, second field); elsewhere nobody does, and nothing is made up.
"""

import os
import threading

_PATH = "/proc/thread-self/schedstat"
_BYTES = 64
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


def _open() -> int | None:
    try:
        return os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):  # Windows has no O_CLOEXEC
        return None
