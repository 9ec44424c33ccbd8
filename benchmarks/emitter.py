"""A server of token streams that knows when it sent each token event, cheap enough to run beside who measures it.

It answers as many requests as it was told to expect, each with so many token events shaped like vLLM's, each event an
HTTP chunk and a segment of its own. Head, role and first token go out as soon as a request is read; the rest follow
on a wheel with one slot per stream, turned so many times a second, so the streams are spread evenly over time.

Just before each send the monotonic clock is read: that is the truth. It goes into the event's text and, by
X-Request-Id (or by its place in the order of requests, where a client sends none), into a file at the end; so does, if
asked for, when the kernel received the last segment of the request. The last line of output says what the emitter cost
and how late it was.

With `--broken` only every fourth stream ends well; see `Ending`. With `--stay` a line says when the first request is
there and one when the last stream has ended, and the emitter stays until its input ends, and leaves further requests
unanswered.

With `--certificate` it speaks TLS; requests are then stamped by the clock alone.

Whatever does not ask for a stream gets an answer that keeps clients going: a list of one model, or an error.
"""

import argparse
import json
import select
import socket
import ssl
import struct
import sys
import time
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

HOST = "127.0.0.1"
_REST_NS = 250_000
"""Shortest rest: waking up costs more than sending, so what is due within one goes out together."""
_SLOTS_PER_LOOK = 64
"""An emitter that is late still looks for new requests once in so many slots."""
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 01 Dec 2026 17:33:37 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHUNK = '{"id":"chatcmpl-%s","object":"chat.completion.chunk","created":1796146417,"model":"tiny","choices":'
_ROLE = '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
_TOKEN = '[{"index":0,"delta":{"content":" %016d"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
_LAST = '[{"index":0,"delta":{"content":" %016d"},"logprobs":null,"finish_reason":"length","token_ids":null}]}'
_USAGE = '[],"usage":{"prompt_tokens":10,"total_tokens":%d,"completion_tokens":%d}}'
_ERROR = '{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}'
_CLOCK = len("%016d")
_BODY_END = b"0\r\n\r\n"

_MODELS = '{"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]}'
_REFUSAL = '{"error": {"message": "a stream, and no more min_tokens than max_tokens, please", "code": 400}}'

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
_RESET = struct.pack("ii", 1, 0)


class Ending(IntEnum):
    """How a stream ends; with `--broken` the n-th request gets the n-th of these, round and round."""

    WELL = 0
    ERROR = 1
    """An error event after three tokens, and [DONE]: what vLLM sends when its engine dies."""
    TRUNCATED = 2
    """The body ends properly halfway, with neither a finish reason nor [DONE]."""
    RESET = 3
    """The connection is reset halfway."""


def _event(data: str) -> bytes:
    """Return an event as an HTTP chunk; a clock still to be filled in counts with its digits."""
    event = f"data: {data}\n\n".encode()
    size = len(event) + (16 - _CLOCK if b"%016d" in event else 0)
    return b"%x\r\n%b\r\n" % (size, event)


@dataclass(slots=True)
class Stream:
    """One answer under way."""

    sock: socket.socket
    request_id: str
    arrived_ns: int
    token: bytes
    """The event of a token, without its clock."""
    turns: int
    """How many token events there will be; or, where the stream ends badly, one more."""
    ending: Ending
    emitted: "array[int]" = field(default_factory=lambda: array("q"))

    def emit(self, token: bytes) -> None:
        now_ns = time.monotonic_ns()
        if self.sock.send(token % now_ns) < len(token):
            raise BlockingIOError
        self.emitted.append(now_ns)

    def begin(self) -> None:
        self.sock.send(_HEAD + _event(_CHUNK % self.request_id + _ROLE))
        self.emit(self.token)

    def end(self) -> None:
        """Take the last turn."""
        match self.ending:
            case Ending.WELL:
                self.emit(_event(_CHUNK % self.request_id + _LAST))
                tokens = len(self.emitted)
                usage = _event(_CHUNK % self.request_id + _USAGE % (10 + tokens, tokens))
                self.sock.send(usage + _event("[DONE]") + _BODY_END)
            case Ending.ERROR:
                self.sock.send(_event(_ERROR) + _event("[DONE]") + _BODY_END)
            case Ending.TRUNCATED:
                self.sock.send(_BODY_END)
            case Ending.RESET:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self.sock.close()


@dataclass(slots=True)
class Request:
    """A request that is not wholly there yet."""

    sock: socket.socket
    received: bytes = b""
    arrived_ns: int = 0
    """When the kernel received its last segment, on the monotonic clock."""

    def read(self) -> bool:
        """Read what is there, and tell whether the request is complete; raises `EOFError` at the end."""
        if isinstance(self.sock, ssl.SSLSocket):
            try:
                self.sock.do_handshake()  # nothing once it is done
                data, ancillary = self.sock.recv(65_536), []
            except ssl.SSLWantReadError:
                return False
        else:
            data, ancillary, _, _ = self.sock.recvmsg(65_536, 64)
        if not data:
            raise EOFError
        self.received += data
        self.arrived_ns = time.monotonic_ns()
        for level, kind, stamp in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                self.arrived_ns -= time.time_ns() - (seconds * 1_000_000_000 + nanoseconds)
        head, found, body = self.received.partition(b"\r\n\r\n")
        return bool(found) and len(body) >= int(_header(head, "content-length") or 0)

    @property
    def for_stream(self) -> bool:
        return self.received.startswith(b"POST ") and b'"stream":true' in self.received.replace(b" ", b"")

    def answer(self) -> None:
        """Answer what does not ask for a stream."""
        line, body = ("200 OK", _MODELS) if self.received.startswith(b"GET /v1/models") else ("400 No", _REFUSAL)
        head = f"HTTP/1.1 {line}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.sock.sendall(f"{head}connection: close\r\n\r\n{body}".encode())
        self.sock.close()


def _header(head: bytes, name: str) -> str | None:
    for line in head.decode().split("\r\n"):
        key, _, value = line.partition(": ")
        if key.lower() == name:
            return value
    return None


class Emitter:
    """Accepts the streams and turns the wheel."""

    def __init__(
        self, streams: int, rate: float, tokens: int, *, broken: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        self.streams: list[Stream] = []
        self.late = array("q")
        """How late each token event was, all but the first of a stream; in nanoseconds."""
        self.given_up = 0
        """Streams whose client was gone, or so far behind that the kernel took no more."""
        self._expected = streams
        self._turn_ns = round(1e9 / rate)
        self._tokens = tokens
        self._broken = broken
        self._tls = tls
        self._unanswered: list[socket.socket] = []
        self._epoll = select.epoll()
        self._listener = socket.create_server((HOST, 0), backlog=max(streams, 4096))
        self._listener.settimeout(0)
        # Accepted sockets have it, too.
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._asking: dict[int, Request] = {}
        self.port: int = self._listener.getsockname()[1]

    def wait(self) -> None:
        """Wait for the first request for a stream."""
        while not self.streams:
            self._take_requests(None)

    def run(self) -> None:
        """Serve until every stream that is expected has ended."""
        wheel = self.streams
        begun_ns, turn_ns, size = time.monotonic_ns(), self._turn_ns, self._expected
        slot = ended = 0
        while ended < size:
            due_ns = begun_ns + slot * turn_ns // size
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                rest_s = max(wait_ns, _REST_NS) / 1e9
                if len(wheel) < size:
                    self._take_requests(rest_s)
                else:
                    time.sleep(rest_s)
            elif slot % _SLOTS_PER_LOOK == 0 and len(wheel) < size:
                self._take_requests(0)
            position = slot % size
            slot += 1
            if position >= len(wheel):
                continue
            stream = wheel[position]
            left = stream.turns - len(stream.emitted)
            if left > 1:
                try:
                    stream.emit(stream.token)
                except OSError:
                    self._give_up(stream)
                    ended += 1
            elif left == 1:
                self._end(stream)
                ended += 1
            else:
                continue
            self.late.append(max(0, stream.emitted[-1] - due_ns))

    def stay(self) -> None:
        """Answer what asks for no stream until the input ends."""
        self._epoll.register(sys.stdin, select.EPOLLIN)
        while self._take_requests(None):
            pass

    def _end(self, stream: Stream) -> None:
        try:
            stream.end()
        except OSError:
            self._give_up(stream)
        if stream.sock.fileno() >= 0:
            self._expect(stream.sock)  # for the client's next request
        stream.turns = len(stream.emitted)

    def _give_up(self, stream: Stream) -> None:
        stream.sock.close()
        stream.turns = len(stream.emitted)
        self.given_up += 1

    def _take_requests(self, wait_s: float | None) -> bool:
        """Take what has come, and tell whether the input goes on."""
        for fd, _ in self._epoll.poll(wait_s):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._asking:
                self._read(fd)
            else:
                return False
        return True

    def _accept(self) -> None:
        """Accept all that wait: a queue that overflows costs a client a second."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._expect(sock)

    def _expect(self, sock: socket.socket) -> None:
        self._epoll.register(sock, select.EPOLLIN)
        self._asking[sock.fileno()] = Request(sock)

    def _read(self, fd: int) -> None:
        request = self._asking[fd]
        try:
            if not request.read():
                return
        except (EOFError, OSError):
            self._epoll.unregister(fd)
            self._asking.pop(fd).sock.close()
            return
        self._epoll.unregister(fd)
        del self._asking[fd]
        if not request.for_stream:
            request.answer()
        elif len(self.streams) < self._expected:
            self._begin(request)
        else:
            self._unanswered.append(request.sock)

    def _begin(self, request: Request) -> None:
        number = len(self.streams)
        request_id = _header(request.received.partition(b"\r\n\r\n")[0], "x-request-id") or f"no-{number}"
        ending = Ending(number % len(Ending)) if self._broken else Ending.WELL
        turns = {Ending.WELL: self._tokens, Ending.ERROR: 4}.get(ending, self._tokens // 2)
        token = _event(_CHUNK % request_id + _TOKEN)
        stream = Stream(request.sock, request_id, request.arrived_ns, token, turns, ending)
        stream.begin()
        self.streams.append(stream)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="token events per second of each stream")
    parser.add_argument("--tokens", type=int, required=True, help="token events of each stream")
    parser.add_argument("--truth", type=Path, required=True, help="file for the times of emission")
    parser.add_argument("--arrivals", type=Path, help="file for the times of arrival of the requests")
    parser.add_argument("--certificate", type=Path, help="file with a certificate and its key, for TLS")
    parser.add_argument("--broken", action="store_true", help="let three of four streams break")
    parser.add_argument(
        "--stay", action="store_true", help="say when streams begin and end, and stay until the input ends"
    )
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    # Linux sleeps 50 µs longer than asked unless told otherwise.
    Path("/proc/self/timerslack_ns").write_text("1")
    tls = None
    if options.certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.certificate)
    emitter = Emitter(options.streams, options.rate, options.tokens, broken=options.broken, tls=tls)
    print(emitter.port, flush=True)
    emitter.wait()
    if options.stay:
        print("begun", flush=True)
    emitter.run()
    if options.stay:
        print("ended", flush=True)
    cpu_s, streams = time.process_time(), emitter.streams
    took_s = (max(stream.emitted[-1] for stream in streams) - streams[0].emitted[0]) / 1e9
    options.truth.write_text(json.dumps({stream.request_id: stream.emitted.tolist() for stream in streams}))
    if options.arrivals:
        options.arrivals.write_text(json.dumps({stream.request_id: stream.arrived_ns for stream in streams}))
    late = sorted(emitter.late)
    late_p99_us = late[len(late) * 99 // 100] / 1e3
    cost = {"core_share": cpu_s / took_s, "late_p99_us": late_p99_us, "given_up": emitter.given_up}
    print(json.dumps(cost), flush=True)
    if options.stay:
        emitter.stay()


if __name__ == "__main__":
    main()
