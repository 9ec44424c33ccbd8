"""A scripted server in a process of its own, which remembers when it really sent each piece.

It answers any request as its script says: pieces of a body, each at so many milliseconds after the receipt of the
request, a framing, and an ending. Times are monotonic nanoseconds, the clock of the machine, so a test can compare
what it measured with what happened, however late the machine made it happen: a piece left between two readings of the
clock, right before and right after its `send`.

What it does not do: check requests, or answer two at once on one connection.
"""

import pickle
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Self

import pytest

KEEP, CLOSE, FIN, RST, SILENCE = "keep", "close", "fin", "rst", "silence"
"""Endings: body complete, connection kept; body complete, then closed; closed or reset without the end of the body;
nothing more, until the client leaves."""
CHUNKED, LENGTH, UNTIL_CLOSE, RAW = "chunked", "length", "until close", "raw"
"""Framings: a chunk per piece; Content-Length; the end of the connection ends the body; pieces as they are."""


SO_TIMESTAMPNS = 35

# The shorthand of cases.md


class Token(bytes):
    """A piece that completes token events."""

    __slots__ = ()
    events = 1


class Tokens(Token):
    """A piece that completes two of them."""

    __slots__ = ()
    events = 2


def chunk(choices: str, more: str = "") -> bytes:
    """Return an event of a chat with these choices."""
    return b'data: {"id":"c1","object":"chat.completion.chunk","choices":%b%b}\n\n' % (choices.encode(), more.encode())


def delta(value: str, *, index: int = 0, finish: str = "null") -> bytes:
    """Return an event with this delta, as JSON."""
    return chunk(f'[{{"index":{index},"delta":{value},"finish_reason":{finish}}}]')


def token(text: str, *, index: int = 0) -> Token:
    """Return the event of a token of content."""
    return Token(delta(f'{{"content":"{text}"}}', index=index))


def reasoning(text: str) -> Token:
    """Return the event of a token of reasoning."""
    return Token(delta(f'{{"reasoning_content":"{text}"}}'))


def finish(reason: str = "stop", *, index: int = 0) -> bytes:
    """Return the event that tells why a choice has ended."""
    return delta("{}", index=index, finish=f'"{reason}"')


def usage(prompt: int, completion: int) -> bytes:
    """Return the event that tells the numbers of tokens."""
    numbers = f'"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion}'
    return b'data: {"id":"c1","choices":[],"usage":{%b}}\n\n' % numbers.encode()


ROLE = delta('{"role":"assistant","content":""}')
FINISH = finish()
DONE = b"data: [DONE]\n\n"
SCALE = 0.25
"""Scripts run four times as fast as cases.md tells them: every number of a test comes from what was really sent."""

Script = list[tuple[float, bytes]]


def script(*pieces: tuple[float, bytes]) -> Script:
    """Return pieces in the order of their times, scaled; those of equal times stay as they are given."""
    return [(at_ms * SCALE, piece) for at_ms, piece in sorted(pieces, key=lambda piece: piece[0])]


REF = (
    (100, ROLE),
    (300, token("Al")),
    (350, token("pha")),
    (400, token(" be")),
    (450, token("ta")),
    (450, FINISH),
    (455, usage(7, 4)),
    (455, DONE),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request is answered."""

    pieces: Script
    status: str = "200 OK"
    content_type: str = "text/event-stream; charset=utf-8"
    headers: tuple[str, ...] = ()
    framing: str = CHUNKED
    ending: str = KEEP
    end_ms: float = 0
    """When the ending comes, if that is after the last piece."""
    head_ms: float | None = None
    """When the head leaves by itself; else it leaves with the first piece."""
    bytewise: bool = False
    """Every byte is a write of its own."""
    version: str = "HTTP/1.1"

    @property
    def token_pieces(self) -> list[int]:
        """Return the index of the piece that completes each token event."""
        return [i for i, (_, piece) in enumerate(self.pieces) for _ in range(getattr(piece, "events", 0))]


@dataclass(slots=True)
class Reply:
    """What really happened to one request."""

    connection: int
    request: bytes
    received_ns: int
    sent: list[tuple[int, int]] = field(default_factory=list)
    """Of each piece: the clock right before its first byte was sent, and right after its last."""
    ended: bool = False


# In the process of the test


def certificate(folder: Path) -> Path:
    """Make a certificate for localhost that is its own authority; a PEM file, its key in it."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    pem, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run([*command.split(), "-addext", names, "-keyout", key, "-out", pem], check=True, capture_output=True)
    pem.write_text(pem.read_text() + key.read_text())
    return pem


@dataclass(frozen=True, slots=True)
class Server:
    """A port that answers by script."""

    emitter: "Emitter"
    host: str
    port: int
    scheme: str

    @property
    def url(self) -> str:
        """What `--host` would be."""
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def replies(self, ended: int = 1) -> list[Reply]:
        """Return what happened so far, once so many replies have ended."""
        replies: list[Reply] = self.emitter.call("replies", self.port, ended)
        assert sum(reply.ended for reply in replies) >= ended, replies
        return replies


class Emitter:
    """The process, between the beginning and the end of a `with`."""

    def __init__(self) -> None:
        # Where no socket has the option, the kernel switches stamping off, and on again only some time later.
        self._stamping = socket.socket()
        if sys.platform == "linux":
            self._stamping.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        ours, theirs = socket.socketpair()
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import emitter; emitter.main({theirs.fileno()})"
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = Pipe(ours.detach())

    def call(self, *arguments: Any) -> Any:
        """Have the process do something."""
        self._pipe.send_bytes(pickle.dumps(arguments))
        return pickle.loads(self._pipe.recv_bytes())

    def serve(
        self,
        answers: Answer | list[Answer] | Mapping[str, Answer],
        *,
        host: str = "127.0.0.1",
        certificate: Path | None = None,
        idle_close_s: float | None = None,
    ) -> Server:
        """Answer the n-th request by the n-th answer, the last one for ever; or by path, `*` being any other.

        `certificate` is a PEM file with its key, `idle_close_s` closes a connection that brings no request for so long.
        """
        if isinstance(answers, Answer):
            answers = [answers]
        plan: Any = (
            {path: _plain(answer) for path, answer in answers.items()}
            if isinstance(answers, Mapping)
            else [_plain(answer) for answer in answers]
        )
        port = self.call("serve", plan, host, str(certificate) if certificate else None, idle_close_s)
        return Server(self, host, port, "https" if certificate else "http")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.wait(10)
        self._stamping.close()


def _plain(answer: Answer) -> Answer:
    return replace(answer, pieces=[(at_ms, bytes(piece)) for at_ms, piece in answer.pieces])


# In the other process


def main(descriptor: int) -> None:
    """Do what the test says, until its pipe ends."""
    sys.setswitchinterval(0.0005)
    threading.stack_size(262_144)
    pipe = Pipe(descriptor)
    ports: dict[int, _Port] = {}
    while True:
        try:
            what, *arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if what == "serve":
            port = _Port(*arguments)
            ports[port.number] = port
            pipe.send_bytes(pickle.dumps(port.number))
        else:
            number, ended = arguments
            pipe.send_bytes(pickle.dumps(ports[number].wait(ended)))


class _Port:
    """One port and all that came in by it."""

    def __init__(
        self,
        plan: list[Answer] | dict[str, Answer],
        host: str,
        certificate: str | None,
        idle_close_s: float | None,
    ) -> None:
        self._plan = plan
        self._idle_close_s = idle_close_s
        self._changed = threading.Condition()
        self._replies: list[Reply] = []
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
        self.number: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, ended: int) -> list[Reply]:
        with self._changed:
            self._changed.wait_for(lambda: sum(reply.ended for reply in self._replies) >= ended, timeout=10)
            return self._replies

    def _accept(self) -> None:
        number = 0
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._connection, args=(sock, number), daemon=True).start()
            number += 1

    def _connection(self, sock: socket.socket, number: int) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            while True:
                sock.settimeout(self._idle_close_s)
                request = _request(sock)
                sock.settimeout(None)
                if request is None:
                    break
                reply = Reply(number, request, time.monotonic_ns())
                with self._changed:
                    self._replies.append(reply)
                    answer = self._answer(request, len(self._replies) - 1)
                try:
                    kept = _answer(sock, answer, reply)
                finally:
                    with self._changed:
                        reply.ended = True
                        self._changed.notify_all()
                if not kept:
                    break
                if answer.ending == SILENCE:
                    sock.recv(1)
        except OSError:  # the client left
            pass
        finally:
            sock.close()

    def _answer(self, request: bytes, index: int) -> Answer:
        if isinstance(self._plan, list):
            return self._plan[min(index, len(self._plan) - 1)]
        path = request.split(b" ", 2)[1].decode()
        return self._plan.get(path) or self._plan["*"]


def _request(sock: socket.socket) -> bytes | None:
    """Return one whole request, None where the client left, or was idle for too long."""
    received = b""
    try:
        while b"\r\n\r\n" not in received:
            received += (piece := sock.recv(65_536))
            if not piece:
                return None
        head, _, body = received.partition(b"\r\n\r\n")
        lines = [line.lower().partition(b":") for line in head.split(b"\r\n")]
        left = sum(int(value) for name, _, value in lines if name == b"content-length") - len(body)
        while left > 0:
            received += (piece := sock.recv(65_536))
            left -= len(piece)
            if not piece:
                return None
    except TimeoutError:
        return None
    return received


def _answer(sock: socket.socket, answer: Answer, reply: Reply) -> bool:
    """Send an answer as its script says; returns whether the connection is kept."""
    began_ns = reply.received_ns
    pending = _head(answer)
    if answer.head_ms is not None:
        _sleep_until(began_ns + answer.head_ms * 1e6)
        sock.sendall(pending)
        pending = b""
    for at_ms, piece in answer.pieces:
        _sleep_until(began_ns + at_ms * 1e6)
        framed = pending + (b"%x\r\n%b\r\n" % (len(piece), piece) if answer.framing == CHUNKED else piece)
        pending = b""
        before_ns = time.monotonic_ns()
        if answer.bytewise:
            for byte in framed:
                sock.send(bytes([byte]))
        else:
            sock.sendall(framed)
        reply.sent.append((before_ns, time.monotonic_ns()))
    if answer.ending == SILENCE:
        return True
    _sleep_until(began_ns + answer.end_ms * 1e6)
    if answer.ending in (KEEP, CLOSE):
        pending += b"0\r\n\r\n" if answer.framing == CHUNKED else b""
        sock.sendall(pending)
    if answer.ending == RST:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif answer.ending != KEEP:
        sock.shutdown(socket.SHUT_WR)
    return answer.ending == KEEP


def _head(answer: Answer) -> bytes:
    if answer.framing == RAW:
        return b""
    lines: Iterable[str] = [f"{answer.version} {answer.status}", f"Content-Type: {answer.content_type}"]
    if answer.framing == CHUNKED:
        lines = [*lines, "Transfer-Encoding: chunked"]
    elif answer.framing == LENGTH:
        lines = [*lines, f"Content-Length: {sum(len(piece) for _, piece in answer.pieces)}"]
    return "".join(f"{line}\r\n" for line in (*lines, *answer.headers, "")).encode("latin-1")


def _sleep_until(due_ns: float) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
