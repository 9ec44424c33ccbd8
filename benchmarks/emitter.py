"""A server of token streams that knows when it sent each token event, cheap enough to run beside who measures it.

It answers as many requests as it was told to expect, each with so many token events shaped like vLLM's, each event an
HTTP chunk and a segment of its own. Head, role and first token go out as soon as a request is read; the rest follow
on a wheel with one slot per stream, turned so many times a second, so the streams are spread evenly over time.

Just before each send the monotonic clock is read: that is the truth. It goes into the event's text and, by
X-Request-Id, into a file at the end. The last line of output says what the emitter cost and how late it was.

What it does not do: read bodies, answer anything else, serve a connection twice.
"""

import argparse
import json
import select
import socket
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
_REST_NS = 250_000
"""Shortest rest: waking up costs more than sending, so what is due within one goes out together."""
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Tue, 01 Dec 2026 17:33:37 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHUNK = '{"id":"chatcmpl-%s","object":"chat.completion.chunk","created":1796146417,"model":"tiny","choices":'
_ROLE = '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
_TOKEN = '[{"index":0,"delta":{"content":" %016d"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
_LAST = '[{"index":0,"delta":{"content":" %016d"},"logprobs":null,"finish_reason":"length","token_ids":null}]}'
_USAGE = '[],"usage":{"prompt_tokens":10,"total_tokens":%d,"completion_tokens":%d}}'
_CLOCK = len("%016d")


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
    token: bytes
    """The event of a token, without its clock."""
    emitted: "array[int]" = field(default_factory=lambda: array("q"))

    def emit(self, token: bytes) -> None:
        now_ns = time.monotonic_ns()
        self.sock.send(token % now_ns)
        self.emitted.append(now_ns)

    def begin(self) -> None:
        self.sock.send(_HEAD + _event(_CHUNK % self.request_id + _ROLE))
        self.emit(self.token)

    def end(self) -> None:
        self.emit(_event(_CHUNK % self.request_id + _LAST))
        tokens = len(self.emitted)
        usage = _event(_CHUNK % self.request_id + _USAGE % (10 + tokens, tokens))
        self.sock.send(usage + _event("[DONE]") + b"0\r\n\r\n")


class Emitter:
    """Accepts the streams and turns the wheel."""

    def __init__(self, streams: int, rate: float, tokens: int) -> None:
        self.streams: list[Stream] = []
        self.late = array("q")
        """How late each token event was, all but the first of a stream; in nanoseconds."""
        self._expected = streams
        self._turn_ns = round(1e9 / rate)
        self._tokens = tokens
        self._epoll = select.epoll()
        self._listener = socket.create_server((HOST, 0), backlog=streams)
        self._listener.settimeout(0)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._asking: dict[int, socket.socket] = {}
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        """Wait for the first request, and serve until every stream has ended."""
        wheel = self.streams
        while not wheel:
            self._take_requests(None)
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
            position = slot % size
            slot += 1
            if position >= len(wheel):
                continue
            stream = wheel[position]
            left = self._tokens - len(stream.emitted)
            if left > 1:
                stream.emit(stream.token)
            elif left == 1:
                stream.end()
                ended += 1
            self.late.append(max(0, stream.emitted[-1] - due_ns))

    def _take_requests(self, wait_s: float | None) -> None:
        for fd, _ in self._epoll.poll(wait_s):
            if fd == self._listener.fileno():
                self._accept()
            else:
                self._begin(fd)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._epoll.register(sock, select.EPOLLIN)
        self._asking[sock.fileno()] = sock

    def _begin(self, fd: int) -> None:
        self._epoll.unregister(fd)
        sock = self._asking.pop(fd)
        head, _, _ = sock.recv(65_536).partition(b"\r\n\r\n")
        request_id = next(
            line[14:] for line in head.decode().split("\r\n") if line.lower().startswith("x-request-id: ")
        )
        stream = Stream(sock, request_id, _event(_CHUNK % request_id + _TOKEN))
        stream.begin()
        self.streams.append(stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="token events per second of each stream")
    parser.add_argument("--tokens", type=int, required=True, help="token events of each stream")
    parser.add_argument("--truth", type=Path, required=True, help="file for the times of emission")
    options = parser.parse_args()
    # Linux sleeps 50 µs longer than asked unless told otherwise.
    Path("/proc/self/timerslack_ns").write_text("1")
    emitter = Emitter(options.streams, options.rate, options.tokens)
    print(emitter.port, flush=True)
    emitter.run()
    cpu_s = time.process_time()
    took_s = (max(stream.emitted[-1] for stream in emitter.streams) - emitter.streams[0].emitted[0]) / 1e9
    options.truth.write_text(json.dumps({stream.request_id: stream.emitted.tolist() for stream in emitter.streams}))
    late = sorted(emitter.late)
    print(json.dumps({"core_share": cpu_s / took_s, "late_p99_us": late[len(late) * 99 // 100] / 1e3}))


if __name__ == "__main__":
    main()
