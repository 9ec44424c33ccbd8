"""One request → one finished timeline: send it, follow its stream to the end of the body, decide its outcome.

Every way in which a server can end a stream leads to exactly one outcome. The body is read to its end, past the finish
reason and `[DONE]`, so that late usage counts and the connection can be used again. A request that got no byte of an
answer on a reused connection is sent once more: the server had closed it in the meantime (counted as a reconnect).
Nothing else is retried, redirects are not followed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gevent

from vllm_locust import api
from vllm_locust.sse import EventStream, NotEventStreamError
from vllm_locust.timeline import Outcome, Timeline, outcome_of_status
from vllm_locust.transport import (
    STAMP_RESOLUTION_NS,
    Connection,
    ConnectionLostError,
    CutError,
    HTTPParseError,
    Pool,
    Read,
    Response,
    SilenceError,
    feed,
)

_AFTER_DONE_NS = 1_000_000_000
"""How long the end of the body is waited for after `[DONE]`: some servers never send it."""
_ERROR_BODY_BYTES = 65_536
_SERVER_ERRORS = (api.MalformedError, HTTPParseError, NotEventStreamError, SilenceError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long to wait, in seconds."""

    connect_s: float = 10.0
    """A server that does not accept within this is not there; TCP retries after 1, 3 and 7 s are within it."""
    first_token_s: float = 300.0
    """A queued request may wait long; a short limit would cut the tail off."""
    idle_s: float = 120.0
    """A stream that has begun must not go silent for ever, as vLLM's do when it gets SIGTERM."""


class _Body:
    """The pieces of a response's body; knows which read the piece in hand came with."""

    def __init__(self, connection: Connection, response: Response, timeline: Timeline, read: Read) -> None:
        self._connection = connection
        self._response = response
        self._timeline = timeline
        self.read = read
        self._events_before = 0
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        pieces = self._response.pieces
        while True:
            while pieces:
                yield pieces.pop(0)
            self._close_read()
            if self._response.message_complete:
                self.ended = True
                return
            read = self._connection.read()
            if read is not None:
                self.read = read
                self._timeline.response_bytes += len(read.data)
            feed(self._response, read)

    def _close_read(self) -> None:
        """Note what the read in hand brought, once all of it is parsed."""
        timeline, read = self._timeline, self.read
        events = timeline.events - self._events_before
        if events:
            self._events_before = timeline.events
            timeline.token_reads += 1
            shared = events > 1 or not read.stamped
            uncertainty_ns = max(read.away_ns, STAMP_RESOLUTION_NS) if shared else STAMP_RESOLUTION_NS
            timeline.reads.append((read.at_ns, events, read.lag_ns, uncertainty_ns, read.stamped))


class Client:
    """Streams requests to one server; keeps what is in flight, so that it can be cut."""

    def __init__(self, pool: Pool, limits: Limits, headers: dict[str, str], prefix: str = "") -> None:
        self.pool = pool
        self.limits = limits
        self._prefix = prefix
        lines = {
            "Host": pool.origin.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "vllm-locust",
            **headers,
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.in_flight: dict[Timeline, gevent.Greenlet] = {}
        self.reading: dict[Timeline, Connection] = {}

    def stream(
        self,
        timeline: Timeline,
        body: bytes,
        on_first_token: Callable[[Timeline], None] | None = None,
    ) -> None:
        """Send a request and follow its answer; returns when the timeline has its outcome.

        A kill of the greenlet (`gevent.GreenletExit`) ends it as cancelled and goes on.
        """
        self.in_flight[timeline] = gevent.getcurrent()
        try:
            self._stream(timeline, body, on_first_token)
        except CutError:
            timeline.end(Outcome.CANCELLED, time.monotonic_ns())
        except gevent.GreenletExit:
            timeline.end(Outcome.CANCELLED, time.monotonic_ns())
            raise
        finally:
            del self.in_flight[timeline]

    def cut_all(self) -> None:
        """End everything in flight as cancelled."""
        for greenlet in list(self.in_flight.values()):
            gevent.kill(greenlet, CutError())

    @property
    def oldest_unparsed_ns(self) -> int | None:
        """When the oldest bytes arrived that no stream has parsed yet."""
        return min((ns for c in self.reading.values() if (ns := c.oldest_unparsed_ns) is not None), default=None)

    def _stream(self, timeline: Timeline, body: bytes, on_first_token: Callable[[Timeline], None] | None) -> None:
        payload = self._request(timeline, body)
        connection = self.pool.take()
        if connection is not None:
            if self._attempt(timeline, connection, payload, on_first_token, reused=True):
                return
            timeline.reconnects += 1
        connection = self._connect(timeline)
        if connection is not None:
            self._attempt(timeline, connection, payload, on_first_token, reused=False)

    def _attempt(
        self,
        timeline: Timeline,
        connection: Connection,
        payload: bytes,
        on_first_token: Callable[[Timeline], None] | None,
        *,
        reused: bool,
    ) -> bool:
        """Send the request on a connection; False where it had gone stale and the request has to be sent again."""
        timeline.sent_ns = time.monotonic_ns()
        connection.wait_until(timeline.sent_ns + round(self.limits.first_token_s * 1e9))
        self.reading[timeline] = connection
        response = Response()
        try:
            self._exchange(timeline, connection, response, payload, on_first_token)
        except ConnectionLostError as error:
            if reused and not timeline.response_bytes:
                return False
            self._fail(timeline, error)
        except _SERVER_ERRORS as error:
            self._fail(timeline, error)
        finally:
            del self.reading[timeline]
            self._release(connection, response)
        return True

    def _release(self, connection: Connection, response: Response) -> None:
        if response.message_complete and not response.should_close():
            self.pool.give(connection)
        else:
            connection.close()

    def _request(self, timeline: Timeline, body: bytes) -> bytes:
        return (
            f"POST {self._prefix}{api.PATHS[timeline.endpoint]} HTTP/1.1\r\n{self._head}"
            f"X-Request-Id: {timeline.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1") + body

    def _connect(self, timeline: Timeline) -> Connection | None:
        began_ns = time.monotonic_ns()
        try:
            connection = Connection(self.pool.origin, self.limits.connect_s)
        except OSError as error:
            timeline.end(Outcome.CONNECT_FAILED, time.monotonic_ns(), str(error) or type(error).__name__)
            return None
        timeline.connect_ns = time.monotonic_ns() - began_ns
        return connection

    def _exchange(
        self,
        timeline: Timeline,
        connection: Connection,
        response: Response,
        payload: bytes,
        on_first_token: Callable[[Timeline], None] | None,
    ) -> None:
        connection.send(payload)
        read: Read | None = None
        while not response.head_complete:
            read = connection.read()
            if read is not None:
                timeline.response_bytes += len(read.data)
            feed(response, read)
        assert read is not None  # noqa: S101 - a head does not complete without bytes
        timeline.status = response.status_code
        body = _Body(connection, response, timeline, read)
        if response.status_code != 200:  # noqa: PLR2004
            message = api.error_message(b"".join(_first_bytes(body)))
            timeline.end(outcome_of_status(response.status_code), body.read.at_ns, message)
        elif response.header("content-encoding") not in ("", "identity"):
            encoding = response.header("content-encoding")
            raise api.MalformedError(f"Content-Encoding: {encoding}, though only identity was accepted")
        else:
            self._follow(timeline, connection, body, on_first_token)

    def _follow(
        self,
        timeline: Timeline,
        connection: Connection,
        body: _Body,
        on_first_token: Callable[[Timeline], None] | None,
    ) -> None:
        """Read the events of a 200, and decide how it ended."""
        stream = EventStream(body)
        done, error, waiting = False, None, True
        try:
            for event, data in stream:
                if data == "[DONE]":
                    if not done:
                        done = True
                        connection.wait_until(time.monotonic_ns() + _AFTER_DONE_NS)
                    continue
                if data.startswith(":") or not data.strip():
                    timeline.heartbeats += 1
                    continue
                try:
                    delta = api.decode(data, event)
                except api.MalformedError:
                    if body.ended:  # cut in the middle of an event: case 10
                        break
                    raise
                error = error or delta.error
                _note(timeline, delta, body.read.at_ns)
                if waiting and timeline.first_ns is not None:
                    waiting = False
                    connection.wait_until(None, round(self.limits.idle_s * 1e9))
                    if on_first_token is not None:
                        on_first_token(timeline)
        except SilenceError:
            if not done:
                raise
        finally:
            timeline.comments += stream.comments
        timeline.end(_outcome(timeline, error, done=done), body.read.at_ns, error or "")

    def _fail(self, timeline: Timeline, error: Exception) -> None:
        now_ns = time.monotonic_ns()
        after = f"after {timeline.events} token events"
        match error:
            case NotEventStreamError():
                timeline.end(Outcome.NOT_STREAMED, now_ns, str(error))
            case SilenceError() if timeline.first_ns is None:
                timeline.end(Outcome.FIRST_TOKEN_TIMEOUT, now_ns, f"no token within {self.limits.first_token_s:g} s")
            case SilenceError():
                timeline.end(Outcome.IDLE_TIMEOUT, now_ns, f"no byte for {self.limits.idle_s:g} s {after}")
            case ConnectionLostError():
                timeline.end(Outcome.CONNECTION_LOST, now_ns, f"{error} {after}")
            case _:
                timeline.end(Outcome.MALFORMED, now_ns, str(error))


def _first_bytes(body: _Body) -> Iterator[bytes]:
    """Yield the beginning of an error's body; the rest is read and dropped."""
    left = _ERROR_BODY_BYTES
    for piece in body:
        yield piece[:left]
        left = max(0, left - len(piece))


def _note(timeline: Timeline, delta: api.Delta, at_ns: int) -> None:
    """Write what one event says into the timeline."""
    usage = delta.usage
    for part in delta.parts:
        index = part.choice
        tokens = 0
        if part.token_ids:
            known = timeline.choices.get(index)
            tokens = part.token_ids + (known.tokens if known else 0)
        elif usage is not None and usage.completion_tokens and len(delta.parts) == 1:
            tokens = usage.completion_tokens
        if part.token or _grew(timeline, index, tokens):
            timeline.token_event(index, at_ns, tokens)
            if part.reasoning:
                timeline.reasoning_ns = timeline.reasoning_ns or timeline.last_ns
            elif part.content and timeline.content_ns is None:
                timeline.content_ns = timeline.last_ns
        if part.finish_reason is not None:
            timeline.finish_reasons[index] = part.finish_reason
    if usage is not None and not (delta.parts and len(timeline.choices) > 1):
        if usage.completion_tokens is not None:
            timeline.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            timeline.input_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            timeline.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _grew(timeline: Timeline, index: int, tokens: int) -> bool:
    known = timeline.choices.get(index)
    return tokens > (known.tokens if known else 0)


def _outcome(timeline: Timeline, error: str | None, *, done: bool) -> Outcome:
    """Decide how a 200 whose body came to its end has ended."""
    if error is not None:
        return Outcome.STREAM_ERROR
    finished = done or (bool(timeline.finish_reasons) and timeline.choices.keys() <= timeline.finish_reasons.keys())
    if not finished:
        return Outcome.TRUNCATED
    return Outcome.OK if timeline.events else Outcome.EMPTY
