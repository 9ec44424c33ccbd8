"""Connections that remember when each byte arrived.

Reads happen in the hub: one persistent watcher per connection whose callback does nothing but `recvmsg` and append;
parsing waits for its greenlet, which in the middle of an answer is woken for several reads at once (`vllm_locust.hub`).

TLS: ciphertext is read, stamped and decrypted in the hub, through a `MemoryBIO`: where a body ends can be seen then.

What it does not do: redirects, retries, proxies, HTTP/2.
"""

import socket as stdlib_socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent

from vllm_locust.hub import READ_BYTES, hub
from vllm_locust.origin import Origin
from vllm_locust.stamp import ANCILLARY_BYTES, SO_TIMESTAMPNS, Read, read_of
from vllm_locust.tcp import connect, send_all
from vllm_locust.tls import Tls

_QUEUE_BYTES = 4_194_304
"""Bytes that may wait for parsing on one connection; beyond, its socket is not read until they are parsed."""
_LAST_CHUNK = b"0\r\n\r\n"


class ConnectionLostError(Exception):
    """The connection broke, or ended in the middle of a response."""


class SilenceError(Exception):
    """Nothing came for as long as the caller was ready to wait."""


Deadline = Callable[[int], int | None]
"""From when the last byte came, when its reader gives up; None for never."""


class CutError(BaseException):
    """The end of the run cut the request; raised in its greenlet, and no listener's business to catch."""


class Connection:
    """One open connection; a single greenlet uses it at a time."""

    def __init__(self, origin: Origin, connect_timeout_s: float, session: ssl.SSLSession | None = None) -> None:
        """Open it; raises `OSError` (of which `ssl.SSLError` and a time-out are kinds).

        A TLS session of an earlier connection spares its handshake a round of certificates.
        """
        self._hub = hub()
        self._reads: deque[Read] = deque()
        self._queued = 0
        self._full = False
        self._waiter: gevent.Greenlet | None = None
        self._broken: OSError | None = None
        self._ended = False
        self._deadline: Deadline | None = None
        self.patient = False
        """Whether the reader may be woken a moment late, except for the end of a body: times are taken here."""
        self._gathering = False
        self.in_hand_ns: int | None = None
        """When the read came that its reader has taken and rests from; set by the reader."""
        self.heard_ns = time.monotonic_ns()
        """When the last byte came; at first, when it was opened."""
        self._timer: Any = None
        began_ns = time.monotonic_ns()
        self._sock = connect(origin.host, origin.port, connect_timeout_s)
        self.connect_ns = time.monotonic_ns() - began_ns
        """How long opening took: the time for which it waited here, for its turn, is not in it."""
        self._sock.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
        if SO_TIMESTAMPNS is not None:
            self._sock.setsockopt(stdlib_socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._recvmsg_into: Callable[..., Any] = self._sock.recvmsg_into
        self._watcher = self._hub.loop.io(self._sock.fileno(), 1)
        self._watcher.start(self._readable)
        self.tls: Tls | None = None
        try:
            self._hub.pause()  # many connections open at once where many users begin
        except BaseException:
            self.close()
            raise
        if origin.tls is not None:
            began_ns = time.monotonic_ns()
            until_ns = began_ns + round(connect_timeout_s * 1e9) - self.connect_ns
            try:
                self._handshake(Tls(origin.tls, origin.host, session), until_ns)
            except SilenceError:
                raise TimeoutError(f"no TLS handshake within {connect_timeout_s:g} s") from None
            self.connect_ns += time.monotonic_ns() - began_ns

    def _readable(self) -> None:
        """Take what has arrived; runs in the hub, once per sweep."""
        hub = self._hub
        hub.reads += 1
        try:
            size, ancillary, _, _ = self._recvmsg_into(hub.buffers, ANCILLARY_BYTES)
            read = hub.buffer[:size]
            if self.tls is None or not size or not self.tls.established:
                data = read.tobytes()  # half the cost of `bytes`
            else:
                data = self.tls.decrypt(read, hub.buffer)
                self._ended = self.tls.closed
        except BlockingIOError:
            return
        except OSError as error:
            self._broken = error
            self._watcher.stop()
        else:
            if data:
                self.heard_ns = hub.swept_ns
                self._reads.append(read_of(data, ancillary, hub))
                self._queued += len(data)
                hub.left |= size == READ_BYTES
                if self._queued > _QUEUE_BYTES:
                    self._full = True
                    hub.full += 1
                    self._watcher.stop()
                if self.patient and not self._hurries(data):
                    self._gather()
                    return
            elif size and not self._ended:
                return  # half a record, or one that is no data
            else:
                self._ended = True
                self._watcher.stop()
        if self._waiter is not None:
            hub.soon(self._wake)

    def _hurries(self, data: bytes) -> bool:
        """Tell whether these bytes end a body, or what is queued is too much to wait."""
        split = len(data) < len(_LAST_CHUNK)  # the end of one that came in two segments
        return split or data.endswith(_LAST_CHUNK) or self._ended or self._queued >= READ_BYTES

    def _gather(self) -> None:
        if not self._gathering:
            self._gathering = True
            self._hub.gather(self._gathered)

    def _gathered(self) -> None:
        if self._gathering:
            self._wake()

    def hurry(self) -> None:
        """Wake the reader now if anything has come."""
        if self._waiter is not None and self._reads:
            self._hub.soon(self._wake)

    def _wake(self) -> None:
        self._gathering = False
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.switch()

    def _expire(self) -> None:
        """Wake the reader, who looks whether its time is up or has moved on."""
        self._timer = None
        self._wake()

    @property
    def _until_ns(self) -> int | None:
        return None if self._deadline is None else self._deadline(self.heard_ns)

    def wait_until(self, deadline: Deadline | None) -> None:
        """Set for how long `read` and `send` wait from now on."""
        self._deadline = deadline
        self.wait_anew()

    def wait_anew(self) -> None:
        """The deadline may have come nearer: one that moves away is noticed when it would have passed."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def read(self) -> Read | None:
        """Return the next bytes as the server sent them, None at the end.

        Raises `ConnectionLostError`, or `SilenceError` when the time set by `wait_until` is up: then what came too late
        stays unread, of a server that sends without a pause, too.
        """
        while True:
            if self._reads:
                # No timer runs after one that has expired, and before the first wait.
                if self._timer is None and self._is_late(self._reads[0]):
                    raise SilenceError
                read = self._reads.popleft()
                self._queued -= len(read.data)
                if self._full and self._queued <= _QUEUE_BYTES // 2:
                    self._read_on()
                return read
            if self._broken is not None:
                raise ConnectionLostError(str(self._broken))
            if self._ended:
                return None
            self._wait()

    def _is_late(self, read: Read) -> bool:
        until_ns = self._until_ns
        return until_ns is not None and read.at_ns > until_ns

    def _read_on(self) -> None:
        """Read the socket again; until that is done, no sweep is whole."""
        self._full = False
        self._hub.full -= 1
        self._hub.left = True
        if not self._finished:
            self._watcher.start(self._readable)

    def _wait(self) -> None:
        """Let other greenlets run until something has come or a deadline may have passed."""
        if self._timer is None:
            # Set once, not at every read: each byte may move the deadline on, and `_expire` finds that out.
            until_ns = self._until_ns
            if until_ns is not None:
                left_ns = until_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise SilenceError
                self._timer = self._hub.loop.timer(left_ns / 1e9)
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
        if self.in_hand_ns is not None:
            return self.in_hand_ns
        try:
            return self._reads[0].at_ns
        except IndexError:
            return None

    @property
    def idle(self) -> bool:
        """Whether it can carry another request: open, and nothing unasked-for has come."""
        return not self._finished and not self._reads

    def rest(self) -> None:
        """Wait for the next request; whatever comes before it is an answer to nothing, and ends the connection."""
        self.wait_until(None)
        self.patient = False
        self._watcher.callback = self._unasked

    def resume(self) -> None:
        """A request is about to be sent."""
        self._watcher.callback = self._readable

    def _unasked(self) -> None:
        self._readable()
        if self._reads:
            self._ended = True
            self._watcher.stop()

    def send(self, data: bytes) -> None:
        """Send all of it; raises `ConnectionLostError`, or `SilenceError` when the time set by `wait_until` is up."""
        try:
            send_all(self._sock, data if self.tls is None else self.tls.encrypt(data), self._until_ns)
        except TimeoutError:
            raise SilenceError from None
        except OSError as error:
            raise ConnectionLostError(str(error)) from None

    def close(self) -> None:
        """Close it; the watcher goes first, since the number of its descriptor may soon belong to another socket."""
        self._watcher.stop()
        self._watcher.close()
        self._gathering = False
        if self._timer is not None:
            self._timer.stop()
        self._sock.close()
        self._ended = True
        if self._full:
            self._read_on()

    def _handshake(self, tls: Tls, until_ns: int) -> None:
        self.tls = tls
        self.wait_until(lambda _: until_ns)
        try:
            send_all(self._sock, tls.handshake(b""), until_ns)
            while not tls.established:
                read = self.read()
                if read is None:
                    raise OSError("the server closed the connection in the TLS handshake")  # noqa: TRY301
                send_all(self._sock, tls.handshake(read.data), until_ns)
            # What came right behind the handshake is still ciphertext: tickets for a later session.
            while self._reads and (read := self.read()) is not None:
                tls.decrypt(memoryview(read.data), self._hub.buffer)
        except ConnectionLostError as error:
            self.close()
            raise OSError(str(error)) from None
        except BaseException:  # the end of the run may cut a handshake, too
            self.close()
            raise
        self.wait_until(None)


class Pool:
    """Idle connections to one origin, the last used first: the others may be closed by the server in peace."""

    def __init__(self, origin: Origin, *, keep_alive: bool = True) -> None:
        self.origin = origin
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []
        self._session: ssl.SSLSession | None = None
        self.stale = 0
        """How many idle connections turned out to be of no more use."""

    def open(self, timeout_s: float) -> Connection:
        """Open a new connection; raises `OSError`."""
        return Connection(self.origin, timeout_s, self._session)

    def take(self) -> Connection | None:
        """Return an idle connection that the server has not closed, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.idle:
                connection.resume()
                return connection
            connection.close()
            self.stale += 1
        return None

    def give(self, connection: Connection) -> None:
        """Keep a connection whose response has been read to its end."""
        if connection.tls is not None:
            self._session = connection.tls.session
        if self._keep_alive and connection.idle:
            connection.rest()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()
