"""When bytes arrived, as the kernel says it.

On Linux every received segment has a stamp (`SO_TIMESTAMPNS`), so neither a busy event loop nor the GIL adds to it. A
stamp is believed only where it cannot be wrong (`Hub`); else the clock is read right after the bytes.
"""

import socket
import struct
import sys
import time

import msgspec
from gevent.monkey import get_original

from vllm_locust.hub import Hub

# Not in the socket module before Python 3.14; the numbers of the generic Linux ABI (asm-generic/socket.h).
SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
_timespec = struct.Struct("@qq")
_TIMESPEC_BYTES = _timespec.size
ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC_BYTES) if hasattr(socket, "CMSG_SPACE") else 0

STAMP_RESOLUTION_NS = 1_000
"""What is left of an error where a segment has a stamp of its own."""

# The kernel begins to stamp some time after the first socket with the option, and ends with the last: this one stays.
_stamping = get_original("socket", "socket")()
if SO_TIMESTAMPNS is not None:
    _stamping.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


class Read(msgspec.Struct, frozen=True, gc=False):
    """Bytes, when their last segment arrived (monotonic ns), and how that is known."""

    data: bytes
    at_ns: int
    lag_ns: int
    """How long they waited in the kernel; 0 where unstamped."""
    away_ns: int
    """How long the loop had been away before it read them: events that share the read may be older by so much."""
    stamped: bool


def read_of(data: bytes, ancillary: list[tuple[int, int, bytes]], hub: Hub) -> Read:
    """Return bytes that have just been read with the time of their last segment."""
    now_ns = time.monotonic_ns()
    away_ns = hub.away_ns + now_ns - hub.swept_ns
    for _, kind, value in ancillary:
        if kind == SO_TIMESTAMPNS and len(value) == _TIMESPEC_BYTES:
            seconds, nanoseconds = _timespec.unpack(value)
            at_ns = seconds * 1_000_000_000 + nanoseconds - hub.wall_ns
            if hub.oldest_ns <= at_ns <= now_ns:
                return Read(data, at_ns, now_ns - at_ns, away_ns, True)  # noqa: FBT003 - a tenth of a microsecond
    hub.unstamped += 1
    return Read(data, now_ns, 0, away_ns, False)  # noqa: FBT003
