"""Connections that remember when each byte arrived, and HTTP/1.1 responses parsed from them.

Receive times come from the kernel where it stamps segments (`SO_TIMESTAMPNS`), so neither a busy event loop nor the
GIL adds to them. Reads happen in the hub: one persistent watcher per connection whose callback does nothing but
`recvmsg` and append; parsing waits for its greenlet, which in the middle of an answer is woken for several reads at
once. So one sweep over a thousand sockets takes some milliseconds, however much parsing is due. A stamp is believed
only where it cannot be wrong (`_Hub`), else the clock is read.

TLS: ciphertext is read and stamped in the hub, decrypted in the greenlet through a `MemoryBIO`.

What it does not do: redirects, retries, proxies, HTTP/2.
"""

import socket as stdlib_socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import gevent
import gevent.socket
import msgspec
from geventhttpclient.response import HTTPParseError, HTTPResponse

from vllm_locust.errors import InputError

# Not in the socket module before Python 3.14; the numbers of the generic Linux ABI (asm-generic/socket.h).
_SO_TIMESTAMPNS = 35 if sys.platform == "linux" else None
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY_BYTES = stdlib_socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(stdlib_socket, "CMSG_SPACE") else 0

_READ_BYTES = 65_536
_QUEUE_BYTES = 4_194_304
"""Bytes that may wait for parsing on one connection; beyond, its socket is not read until they are parsed."""

_GATHER_S = 0.1
"""How long reads may wait for each other where their reader is patient: parsed together, they cost about half."""
_LAST_CHUNK = b"0\r\n\r\n"

_TOGETHER_NS = 20_000
"""Two clocks read within this were read together: many times what reading them takes."""

STAMP_RESOLUTION_NS = 1_000
"""What is left of an error where a segment has a stamp of its own."""


class ConnectionLostError(Exception):
    """The connection broke, or ended in the middle of a response."""


class SilenceError(Exception):
    """Nothing came for as long as the caller was ready to wait."""


class CutError(BaseException):
    """The end of the run cut the request; raised in its greenlet, and no listener's business to catch."""


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


class _Hub:
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
        self.buffers = (memoryview(bytearray(_READ_BYTES)),)
        """Where reads go first: bytes that a read makes itself leave holes behind, and memory per stream doubles."""
        self._longest_away_ns = 0
        if _SO_TIMESTAMPNS is not None:
            # The kernel begins to stamp some time after the first socket with the option, and ends with the last.
            self._stamping = stdlib_socket.socket()
            self._stamping.setsockopt(stdlib_socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
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

    def _sweeps(self) -> None:
        self.swept_ns = time.monotonic_ns()

    @property
    def complete_ns(self) -> int:
        """Everything that arrived before this instant has been read."""
        return self._polled_ns if self._polled_ns < self.swept_ns else self.polled_before_ns

    def take_longest_away_ns(self) -> int:
        """Return the longest time for which the loop was away since the last call."""
        longest_ns, self._longest_away_ns = self._longest_away_ns, 0
        return longest_ns


_hubs: dict[int, _Hub] = {}


def hub_times() -> _Hub:
    """Return the sweep times of this thread's hub; the first call begins to take them."""
    hub = gevent.get_hub()
    times = _hubs.get(id(hub))
    if times is None:
        times = _hubs[id(hub)] = _Hub()
    return times


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is: what `--host` says, without the path."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def netloc(self) -> str:
        """Value of the Host header (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def origin_of(url: str, *, insecure: bool = False, ca_pem: str | None = None) -> tuple[Origin, str]:
    """Split `--host` into the origin and the path before `/v1`; a trailing `/v1` may be given or left out."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or port == 0 or parts.scheme not in ("http", "https"):
        raise InputError(f"--host {url!r} is not the address of a server; write it like http://my-server:8000")
    tls = None
    if parts.scheme == "https":
        tls = tls_context(insecure=insecure, ca_pem=ca_pem)
    path = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
    return Origin(host, port or (443 if tls else 80), tls), path


def read_ca(path: str) -> str:
    """Return the certificates of a PEM file as text, which travels to workers that do not have the file."""
    try:
        pem = Path(path).read_text(encoding="ascii")
        ssl.create_default_context(cadata=pem)
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"--ca-file {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"--ca-file {path}: no certificate in it; expected a PEM file") from None
    return pem


def tls_context(*, insecure: bool, ca_pem: str | None) -> ssl.SSLContext:
    """Return how to speak TLS: with the check of certificates, of the given authorities if any, or without."""
    context = ssl.create_default_context(cadata=ca_pem)
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Connection:
    """One open connection; a single greenlet uses it at a time."""

    def __init__(self, origin: Origin, connect_timeout_s: float) -> None:
        """Open it; raises `OSError` (of which `ssl.SSLError` and a time-out are kinds)."""
        self._times = hub_times()
        self._reads: deque[Read] = deque()
        self._queued = 0
        self._waiter: gevent.Greenlet | None = None
        self._broken: Exception | None = None
        self._ended = False
        self.until_ns: int | None = None
        """When the caller gives up waiting, whatever comes."""
        self.silence_ns: int | None = None
        """How long the caller waits for the next byte."""
        self.patient = False
        """Whether the reader may be woken a moment late, except for the end of a body: times are taken here."""
        self._heard_ns = time.monotonic_ns()
        self._timer: Any = None
        self._sock = gevent.socket.create_connection((origin.host, origin.port), timeout=connect_timeout_s)
        self._sock.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
        if _SO_TIMESTAMPNS is not None:
            self._sock.setsockopt(stdlib_socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        # gevent's own would wait; the real socket's does not.
        self._recvmsg_into: Callable[..., Any] = self._sock._sock.recvmsg_into  # noqa: SLF001
        self._loop = gevent.get_hub().loop
        self._gathering = self._loop.timer(0, repeat=_GATHER_S)
        self._watcher = self._loop.io(self._sock.fileno(), 1)
        self._watcher.start(self._readable)
        self._tls: ssl.SSLObject | None = None
        if origin.tls is not None:
            self._handshake(origin.tls, origin.host, connect_timeout_s)

    def _readable(self) -> None:
        """Take what has arrived; runs in the hub, once per sweep."""
        try:
            size, ancillary, _, _ = self._recvmsg_into(self._times.buffers, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._broken = error
            self._watcher.stop()
        else:
            now_ns = time.monotonic_ns()
            if size:
                self._heard_ns = now_ns
                self._reads.append(self._stamp(bytes(self._times.buffers[0][:size]), ancillary, now_ns))
                self._queued += size
                if self._queued > _QUEUE_BYTES:
                    self._watcher.stop()
            else:
                self._ended = True
                self._watcher.stop()
        if self._waiter is not None:
            if self._may_gather:
                if not self._gathering.active:
                    self._gathering.again(self._loop.run_callback, self._wake)
            else:
                self._loop.run_callback(self._wake)

    @property
    def _may_gather(self) -> bool:
        """Whether what has come can wait for more; the end of a ciphertext's body cannot be seen."""
        if not self.patient or self._finished or self._tls is not None or self._queued > _READ_BYTES:
            return False
        return not self._reads[-1].data.endswith(_LAST_CHUNK)

    def hurry(self) -> None:
        """Wake the reader now if anything has come."""
        if self._waiter is not None and self._reads:
            self._loop.run_callback(self._wake)

    def _stamp(self, data: bytes, ancillary: list[tuple[int, int, bytes]], now_ns: int) -> Read:
        times = self._times
        away_ns = times.away_ns + now_ns - times.swept_ns
        for _, kind, value in ancillary:
            if kind == _SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(value)
                stamp_ns = seconds * 1_000_000_000 + nanoseconds
                lag_ns = time.time_ns() - stamp_ns
                if time.monotonic_ns() - now_ns > _TOGETHER_NS:  # this process slept between the two readings
                    lag_ns = now_ns - _monotonic_ns(stamp_ns)
                if 0 <= lag_ns <= now_ns - times.polled_before_ns:
                    return Read(data, now_ns - lag_ns, lag_ns, away_ns, stamped=True)
        return Read(data, now_ns, 0, away_ns, stamped=False)

    def _wake(self) -> None:
        self._gathering.stop()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.switch()

    def _expire(self) -> None:
        """Wake the reader, who looks whether its time is up or has moved on."""
        self._timer = None
        self._wake()

    def _left_ns(self) -> int | None:
        limits = []
        if self.until_ns is not None:
            limits.append(self.until_ns)
        if self.silence_ns is not None:
            limits.append(self._heard_ns + self.silence_ns)
        return min(limits) - time.monotonic_ns() if limits else None

    def wait_until(self, until_ns: int | None, silence_ns: int | None = None) -> None:
        """Set for how long `read` waits from now on: until an instant, and for so much silence."""
        self.until_ns, self.silence_ns = until_ns, silence_ns
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def read(self) -> Read | None:
        """Return the next bytes as the server sent them, None at the end.

        Raises `ConnectionLostError`, or `SilenceError` when the time set by `wait_until` is up.
        """
        while True:
            if self._reads:
                read = self._reads.popleft()
                self._queued -= len(read.data)
                if self._queued <= _QUEUE_BYTES // 2 and not self._watcher.active and not self._finished:
                    self._watcher.start(self._readable)
                if self._tls is None:
                    return read
                plain = self._decrypt(read.data)
                if plain is None:
                    return None
                if plain:
                    return msgspec.structs.replace(read, data=plain)
                continue
            if self._broken is not None:
                raise ConnectionLostError(str(self._broken))
            if self._ended:
                return None
            self._wait()

    def _wait(self) -> None:
        """Let other greenlets run until something has come or a deadline may have passed."""
        if self._timer is None:
            # Set once, not at every read: silence moves its deadline on with each byte, and `_expire` finds that out.
            left_ns = self._left_ns()
            if left_ns is not None:
                if left_ns <= 0:
                    raise SilenceError
                self._timer = self._loop.timer(left_ns / 1e9)
                self._timer.start(self._expire)
        self._waiter = gevent.getcurrent()
        try:
            gevent.get_hub().switch()
        finally:
            self._waiter = None

    @property
    def _finished(self) -> bool:
        return self._ended or self._broken is not None

    @property
    def oldest_unparsed_ns(self) -> int | None:
        """When the oldest bytes that nobody has parsed yet arrived."""
        try:
            return self._reads[0].at_ns
        except IndexError:
            return None

    @property
    def idle(self) -> bool:
        """Whether it can carry another request: open, and nothing unasked-for has come."""
        return not self._finished and not self._reads

    def send(self, data: bytes) -> None:
        """Send all of it; raises `ConnectionLostError`."""
        try:
            if self._tls is not None:
                self._tls.write(data)
                data = self._outgoing.read()
            self._sock.sendall(data)
        except OSError as error:
            raise ConnectionLostError(str(error)) from None

    def close(self) -> None:
        """Close it; the watcher goes first, since the number of its descriptor may soon belong to another socket."""
        self._watcher.stop()
        self._watcher.close()
        self._gathering.stop()
        self._gathering.close()
        if self._timer is not None:
            self._timer.stop()
        self._sock.close()
        self._ended = True

    def _handshake(self, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.wait_until(time.monotonic_ns() + round(timeout_s * 1e9))
        try:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._sock.sendall(self._outgoing.read())
                    read = self.read()
                    if read is None:
                        raise OSError("the server closed the connection in the TLS handshake") from None
                    self._incoming.write(read.data)
            self._sock.sendall(self._outgoing.read())
        except SilenceError:
            self.close()
            raise TimeoutError(f"no TLS handshake within {timeout_s:g} s") from None
        except ConnectionLostError as error:
            self.close()
            raise OSError(str(error)) from None
        except BaseException:  # the end of the run may cut a handshake, too
            self.close()
            raise
        self.wait_until(None)
        self._tls = tls

    def _decrypt(self, data: bytes) -> bytes | None:
        """Return the plaintext that ciphertext completed, None when the peer closed."""
        assert self._tls is not None  # noqa: S101 - only called on a TLS connection
        self._incoming.write(data)
        plain: list[bytes] = []
        try:
            while True:
                piece = self._tls.read(_READ_BYTES)
                if not piece:
                    return b"".join(plain) or None
                plain.append(piece)
        except ssl.SSLWantReadError:
            return b"".join(plain)
        except ssl.SSLError as error:
            raise ConnectionLostError(str(error)) from None


class Pool:
    """Idle connections to one origin, the last used first: the others may be closed by the server in peace."""

    def __init__(self, origin: Origin, *, keep_alive: bool = True) -> None:
        self.origin = origin
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []
        self.stale = 0
        """How many idle connections turned out to be of no more use."""

    def take(self) -> Connection | None:
        """Return an idle connection that the server has not closed, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.idle:
                return connection
            connection.close()
            self.stale += 1
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection whose response has been read to its end."""
        if self._keep_alive and connection.idle:
            connection.wait_until(None)
            connection.patient = False
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()


class Response(HTTPResponse):
    """A response that is fed bytes and gathers the pieces of its body."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append(bytes(buf))

    @property
    def head_complete(self) -> bool:
        """Whether the head of the final response is complete; interim ones (1xx) are passed over."""
        return bool(self.headers_complete) and self.status_code >= 200  # noqa: PLR2004

    def header(self, name: str) -> str:
        """Return a header's value, the empty string where it is absent."""
        value = self.get(name)
        return value if isinstance(value, str) else ", ".join(value or ())


def feed(response: Response, read: Read | None) -> None:
    """Parse what was read, None being the end; raises `HTTPParseError`, `ConnectionLostError` for an early end."""
    if read is not None:
        response.feed(read.data)
        return
    try:
        response.feed(b"")
    except HTTPParseError as error:
        raise ConnectionLostError("the connection ended in the middle of the response") from error
    if not response.message_complete:
        raise ConnectionLostError("the connection ended in the middle of the response")


__all__ = [
    "Connection",
    "ConnectionLostError",
    "CutError",
    "HTTPParseError",
    "Origin",
    "Pool",
    "Read",
    "Response",
    "SilenceError",
    "feed",
    "hub_times",
    "origin_of",
    "read_ca",
    "tls_context",
]
