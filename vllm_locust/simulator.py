"""A server that looks like vLLM on the wire and whose timing is known.

It promises: an answer follows from the seed and the number of the request alone (streams and whole answers are numbered
apart, each from 0; refused requests are not). Its instants are planned ahead, from when the request got its seat: a
late wake-up does not shift the rest, and nothing leaves early (late: up to 1 ms, by epoll's clock). One token is one
event, one HTTP chunk, one send.

The plan: read the request (`read_ask`), wait for a seat (`_Seats`), draw the tokens (`draw`), send each when `due`
(`Frames`), count it for `/metrics` (`Metrics`). The clock of the faults begins with the first stream.

A client that left is noticed at the next write. The server lives in the gevent hub of the thread that starts it: to
block that thread without gevent is to stop the server.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Self
from wsgiref.types import StartResponse, WSGIEnvironment

import gevent
from gevent.event import AsyncResult
from gevent.pool import Pool
from gevent.pywsgi import WSGIServer
from gevent.socket import IPPROTO_TCP, TCP_NODELAY
from msgspec.json import encode
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_locust.simulated import Profile, Token, broken, draw, due, pick_break
from vllm_locust.simulated_faults import ends_ns
from vllm_locust.simulated_metrics import Metrics, Served
from vllm_locust.simulated_wire import VERSION, Ask, Frames, Json, RefusedError, models, read_ask, whole_answer

_USUAL = Profile()


class Simulator:
    """A running server: between `start` and `stop`, or inside `with`."""

    def __init__(self, profile: Profile = _USUAL, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.url = _url(host, port)  # names the real port from `start` on
        self._profile = profile
        self._address = (host, port)
        self._server: Any = None
        self._seats = _Seats(profile.seats)
        self._metrics = Metrics(profile, lambda: self._seats.running, lambda: len(self._seats.queue))
        self._streams, self._wholes = itertools.count(), itertools.count()
        self._began: int | None = None
        self._routes: dict[str, tuple[str, Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]]] = {
            "/v1/completions": ("POST", partial(self._generate, chat=False)),
            "/v1/chat/completions": ("POST", partial(self._generate, chat=True)),
            "/v1/models": ("GET", lambda _, respond: _reply(respond, 200, models(profile))),
            "/version": ("GET", lambda _, respond: _reply(respond, 200, {"version": VERSION})),
            "/health": ("GET", lambda _, respond: _reply(respond, 200, b"")),
            "/ping": ("GET", lambda _, respond: _reply(respond, 200, b"")),
            "/metrics": ("GET", self._scrape),
        }
        if not profile.completions:
            del self._routes["/v1/completions"]

    def start(self) -> None:
        """Bind and serve in the background; nothing if it runs already."""
        if self._server is not None:
            return
        self._server = WSGIServer(
            self._address,
            self._application,
            backlog=2048,  # a load test may open all its connections at once
            spawn=Pool(),  # without a pool, `stop` would leave open connections running
            log=None,
            error_log=None,
            environ={"SERVER_NAME": self._address[0]},  # spares gevent a reverse DNS query
        )
        self._server.init_socket()
        # Accepted sockets inherit it. Without it, the second segment of an answer waits for a delayed ACK.
        self._server.socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._server.start()
        self.url = _url(self._address[0], self._server.server_port)

    def stop(self) -> None:
        """Close the port and cut what runs; nothing if it does not run."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(timeout=0)

    def serve_forever(self) -> None:
        """Serve until interrupted, or until another greenlet calls `stop`."""
        with self:
            self._server.serve_forever(stop_timeout=0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _application(self, environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/v1") and not self._allows(environ.get("HTTP_AUTHORIZATION")):
            return _reply(respond, 401, {"error": "Unauthorized"})
        if path not in self._routes:
            return _reply(respond, 404, {"detail": "Not Found"})
        method, handler = self._routes[path]
        if environ["REQUEST_METHOD"] != method:
            return _reply(respond, 405, {"detail": "Method Not Allowed"}, Allow=method)
        try:
            return handler(environ, respond)
        except RefusedError as refused:
            return _reply(respond, refused.status, refused.body)

    def _allows(self, authorization: str | None) -> bool:
        return self._profile.api_key is None or authorization == f"Bearer {self._profile.api_key}"

    def _scrape(self, _: WSGIEnvironment, respond: StartResponse) -> list[bytes]:
        return _reply(respond, 200, self._metrics.exposition(), **{"Content-Type": CONTENT_TYPE_LATEST})

    def _generate(self, environ: WSGIEnvironment, respond: StartResponse, *, chat: bool) -> Iterator[bytes]:
        ask = read_ask(self._profile, environ["wsgi.input"].read(), chat=chat)
        if ask.body.stream:
            self._began = time.monotonic_ns() if self._began is None else self._began
            return self._stream(ask, next(self._streams), respond)
        return self._whole(ask, next(self._wholes), respond)

    def _stream(self, ask: Ask, number: int, respond: StartResponse) -> Iterator[bytes]:
        served, outcome = Served(ask.prompt), "abort"
        breaks, frames = pick_break(self._profile, number, self._since_begin()), Frames(self._profile, ask)
        tokens = self._draw(ask, number)
        try:
            self._sleep_through_stall()
            # vLLM sends the headers before the request has a seat; an empty write makes pywsgi do so.
            respond("200 OK", [("Content-Type", "text/event-stream; charset=utf-8")])(b"")
            with self._seats.taken() as seat:
                for token in self._paced(served, broken(tokens) if breaks else tokens, seat):
                    if ask.chat and not served.tokens:
                        yield from map(frames.role, range(ask.body.n))
                    yield frames.token(token)
                yield from frames.ending(served.tokens, breaks)
            outcome = token.finish or "error"
        finally:
            self._metrics.end(served, outcome)

    def _whole(self, ask: Ask, number: int, respond: StartResponse) -> Iterator[bytes]:
        served, outcome = Served(ask.prompt), "abort"
        try:
            with self._seats.taken() as seat:
                tokens = list(self._paced(served, self._draw(ask, number), seat))
                yield from _reply(respond, 200, whole_answer(self._profile, ask, tokens))
            outcome = tokens[-1].finish or "error"
        finally:
            self._metrics.end(served, outcome)

    def _draw(self, ask: Ask, number: int) -> Iterator[Token]:
        return draw(self._profile, number, prompt=ask.prompt, choices=ask.body.n, lengths=ask.lengths)

    def _since_begin(self) -> int:
        """Read the clock of the faults, which stands at 0 until the first stream."""
        return 0 if self._began is None else time.monotonic_ns() - self._began

    def _sleep_through_stall(self) -> None:
        if self._profile.faults:
            now = self._since_begin()
            left = ends_ns(self._profile.faults, now, 0) - now
            if left:
                _sleep_until(time.monotonic_ns() + left)

    def _paced(self, served: Served, tokens: Iterable[Token], seat: int) -> Iterator[Token]:
        """Hand out each token when it is due; count it when its taker, having written it, wants the next."""
        self._metrics.seat(served)
        since, gaps = self._since_begin(), self._metrics.itl
        previous: dict[int, int] = {}
        for due_ns, token in due(self._profile.faults, tokens, since, seat):
            _sleep_until(served.seated_ns - since + due_ns)
            self._sleep_through_stall()  # a late wake-up is no way around it
            now = time.monotonic_ns()
            yield token
            if not previous:
                self._metrics.begin(served, now)
            elif token.choice in previous:
                gaps.add(now - previous[token.choice])
            served.tokens += 1
            previous[token.choice] = now


class _Seats:
    """So many requests at once; the others queue. Of free seats, the one that has been free for longest is next."""

    def __init__(self, total: int) -> None:
        self.running = 0
        self.queue: deque[Any] = deque()  # of AsyncResult, which has no type arguments when it runs
        self._total = total
        self._used = 0
        self._left: deque[int] = deque()

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Wait for a seat, hold it inside `with`; yields its number."""
        turn: Any = AsyncResult()
        if self.running < self._total:
            self.running += 1
            turn.set(self._free())
        else:
            self.queue.append(turn)
        try:
            yield turn.get()
        finally:
            if not turn.ready():
                self.queue.remove(turn)
            elif self.queue:
                self.queue.popleft().set(turn.get())  # the seat changes hands: no newcomer gets in between
            else:
                self.running -= 1
                self._left.append(turn.get())

    def _free(self) -> int:
        if self._used == self._total:
            return self._left.popleft()
        self._used += 1
        return self._used - 1


def _sleep_until(due_ns: int) -> None:
    gevent.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)  # even when late: others want to run
    while (left := due_ns - time.monotonic_ns()) > 0:  # libev counts from its own, older idea of now
        gevent.sleep(left / 1e9)


def _reply(respond: StartResponse, status: int, payload: Json | bytes, **headers: str) -> list[bytes]:
    """Answer at once: JSON, or bytes as they are."""
    body = payload if isinstance(payload, bytes) else encode(payload)
    if not isinstance(payload, bytes):
        headers["Content-Type"] = "application/json"
    headers["Content-Length"] = str(len(body))
    respond(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
    return [body]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


__all__ = ["Profile", "Simulator"]
