"""Plain TCP sockets in greenlets: opening one, and writing to it.

gevent's own are twice as large, and ask a thread for every address, numeric ones included, twice; what is read is
the hub's business (`vllm_locust.transport`).
"""

import errno
import os
import time
from typing import Any

import gevent
import gevent.socket
from gevent.monkey import get_original

Socket: Any = get_original("socket", "socket")
_getaddrinfo: Any = get_original("socket", "getaddrinfo")


def connect(host: str, port: int, timeout_s: float) -> Any:  # noqa: ANN401 - a socket, not gevent's
    """Open a connection to the first address of a host that accepts one, within so many seconds in all.

    Each address gets an equal part of the time that is left, so that a dead one does not take all of it.

    Raises `OSError`, of which a time-out and a name that cannot be resolved are kinds.
    """
    until_s = time.monotonic() + timeout_s
    failure: OSError = OSError(f"{host} has no address")
    with gevent.Timeout(timeout_s, TimeoutError(f"no address of {host} within {timeout_s:g} s")):
        addresses = _addresses(host, port)
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        try:
            sock = Socket(family, kind, protocol)
        except OSError as error:  # a name may have addresses of a family that this machine does not speak
            failure = error
            continue
        sock.setblocking(False)  # noqa: FBT003
        try:
            _connect(sock, address, (until_s - time.monotonic()) / (len(addresses) - number))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def send_all(sock: Any, data: bytes, until_ns: int | None) -> None:  # noqa: ANN401
    """Write all of it, waiting for room until a monotonic instant; raises `OSError`, such as `TimeoutError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            left_s = None if until_ns is None else max(0, until_ns - time.monotonic_ns()) / 1e9
            gevent.socket.wait_write(sock.fileno(), timeout=left_s, timeout_exc=TimeoutError("timed out"))


def _addresses(host: str, port: int) -> Any:  # noqa: ANN401 - as of getaddrinfo(3)
    try:
        return _getaddrinfo(host, port, type=gevent.socket.SOCK_STREAM, flags=gevent.socket.AI_NUMERICHOST)
    except gevent.socket.gaierror:
        return gevent.socket.getaddrinfo(host, port, type=gevent.socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(f"{host!r} cannot be the name of a host") from None


def _connect(sock: Any, address: Any, timeout_s: float) -> None:  # noqa: ANN401
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        gevent.socket.wait_write(sock.fileno(), timeout=max(timeout_s, 0), timeout_exc=TimeoutError("timed out"))
        code = sock.getsockopt(gevent.socket.SOL_SOCKET, gevent.socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
