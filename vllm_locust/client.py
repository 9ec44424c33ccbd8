"""One request → one finished timeline: send it, follow its stream to the end of the body, decide its outcome.

Every way in which a server can end a stream leads to exactly one outcome. The body is read to its end, past the finish
reason and `[DONE]`, so that late usage counts and the connection can be used again. A request that got no byte of an
answer on a reused connection is sent once more: the server had closed it in the meantime (counted as a reconnect).
Nothing else is retried, redirects are not followed.
"""

import time
import zlib
from collections.abc import Callable
from functools import partial

import gevent

from vllm_locust import api
from vllm_locust.body import COMPRESSED, Body, error_body
from vllm_locust.hub import hub
from vllm_locust.note import note
from vllm_locust.response import HTTPParseError, Response, feed
from vllm_locust.sse import EventTooLongError, NotEventStreamError
from vllm_locust.stamp import Read
from vllm_locust.timeline import Outcome, Timeline, outcome_of_status
from vllm_locust.timeouts import Timeouts, after, given_up, reason
from vllm_locust.transport import Connection, ConnectionLostError, CutError, Pool, SilenceError

_END_NS = 1_000_000_000
"""How long the end of a body is waited for after `[DONE]`, after an error, and in the body of an error."""
_WITHOUT_A_MESSAGE = {
    Outcome.EMPTY: "the answer ended without a token",
    Outcome.TRUNCATED: "the body ended without a finish reason and without [DONE]",
    Outcome.NOT_STREAMED: "a whole answer in one event",
}
"""What is said of failures in which the server says nothing."""
_SERVER_ERRORS = (
    api.MalformedError,
    EventTooLongError,
    HTTPParseError,
    NotEventStreamError,
    UnicodeDecodeError,
    zlib.error,
)


class Client:
    """Streams requests to one server; keeps what is in flight, so that it can be cut."""

    def __init__(self, pool: Pool, timeouts: Timeouts, api_key: str | None = None, prefix: str = "") -> None:
        self.pool = pool
        self.timeouts = timeouts
        self._prefix = prefix
        self._api_key = api_key
        lines = {
            "Host": pool.origin.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "vllm-locust",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
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

        Whatever is raised through it, such as the kill of its greenlet, ends it as cancelled and goes on.
        """
        timeline.secret = self._api_key
        self.in_flight[timeline] = gevent.getcurrent()
        try:
            self._stream(timeline, body, on_first_token)
        except CutError:
            timeline.end(Outcome.CANCELLED, time.monotonic_ns())
        finally:
            if timeline.outcome is None:  # the greenlet was killed, or a listener ended its user, or this is a bug
                timeline.end(Outcome.CANCELLED, time.monotonic_ns())
            del self.in_flight[timeline]

    def cut_all(self) -> None:
        """End everything in flight as cancelled, once what has arrived is parsed."""
        for connection in self.reading.values():
            connection.hurry()
        for timeline in self.in_flight:
            hub().soon(partial(self._cut, timeline))

    def _cut(self, timeline: Timeline) -> None:
        """Cut a request unless it has ended since: its greenlet would be hit in whatever it does now."""
        greenlet = self.in_flight.get(timeline)
        if greenlet is not None:
            greenlet.throw(CutError())

    @property
    def longest_silence_ns(self) -> int:
        """For how long the quietest stream has sent no byte, since it was asked or since its last one."""
        now_ns = time.monotonic_ns()
        silences = (now_ns - max(t.sent_ns or now_ns, c.heard_ns) for t, c in self.reading.items())
        return max(silences, default=0)

    @property
    def oldest_unparsed_ns(self) -> int | None:
        """When the oldest bytes arrived that no stream has parsed yet."""
        return min((ns for c in self.reading.values() if (ns := c.oldest_unparsed_ns) is not None), default=None)

    def _stream(self, timeline: Timeline, body: bytes, on_first_token: Callable[[Timeline], None] | None) -> None:
        payload = self._request(timeline, body)
        stale = self.pool.stale
        connection = self.pool.take()
        if connection is not None and self._attempt(timeline, connection, payload, on_first_token, reused=True):
            return
        if connection is not None or self.pool.stale > stale:
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
        connection.wait_until(partial(self._given_up_ns, timeline))
        self.reading[timeline] = connection
        response = Response()
        try:
            self._exchange(timeline, connection, response, payload, on_first_token)
        except ConnectionLostError as error:
            if reused and not timeline.response_bytes:
                return False
            self._fail(timeline, error)
        except SilenceError:
            self._give_up(timeline, connection.heard_ns)
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
        try:
            connection = self.pool.open(self.timeouts.connect_s)
        except OSError as error:
            timeline.end(Outcome.CONNECT_FAILED, time.monotonic_ns(), str(error) or type(error).__name__)
            return None
        timeline.connect_ns = connection.connect_ns
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
        body = Body(connection, response, timeline, read)
        if response.status_code != 200:  # noqa: PLR2004
            _wait_for_the_end(connection)
            message = api.error_message(error_body(body))
            timeline.end(outcome_of_status(response.status_code), body.read.at_ns, message)
        elif response.header("content-encoding").lower() not in ("", "identity", *COMPRESSED):
            encoding = response.header("content-encoding")
            raise api.MalformedError(f"Content-Encoding: {encoding}, though only identity was accepted")
        else:
            self._follow(timeline, connection, body, on_first_token)

    def _follow(
        self,
        timeline: Timeline,
        connection: Connection,
        body: Body,
        on_first_token: Callable[[Timeline], None] | None,
    ) -> None:
        """Read the events of a 200, and decide how it ended."""
        done, error, ending = False, None, False
        try:
            for event, data in body.events:
                before, waiting = timeline.events, timeline.first_ns is None
                if data.strip() == "[DONE]":
                    done = True
                elif error is None:  # with its error, a stream is over
                    error = _taken(timeline, body, event, data)
                if waiting and timeline.first_ns is not None:
                    connection.patient = not body.sized
                    connection.wait_anew()
                    if on_first_token is not None:
                        on_first_token(timeline)
                if done and timeline.events > before:  # it was the end of a choice: some servers send one for each
                    done = ending = False
                    connection.wait_until(partial(self._given_up_ns, timeline))
                if (done or error is not None) and not ending:
                    ending = True
                    body.unlearn()
                    _wait_for_the_end(connection)
        except (SilenceError, ConnectionLostError):
            if not done and error is None:
                raise
        finally:
            body.close_read()
            timeline.comments += body.events.comments
        outcome = _outcome(timeline, error, done=done)
        timeline.end(outcome, body.read.at_ns, error or _WITHOUT_A_MESSAGE.get(outcome, ""))

    def _given_up_ns(self, timeline: Timeline, heard_ns: int) -> int | None:
        end = given_up(self.timeouts, timeline, heard_ns)
        return None if end is None else end[0]

    def _give_up(self, timeline: Timeline, heard_ns: int) -> None:
        end = given_up(self.timeouts, timeline, heard_ns)
        assert end is not None  # noqa: S101 - else the connection would wait for ever
        timeline.end(end[1], time.monotonic_ns(), reason(self.timeouts, timeline, end[1]))

    def _fail(self, timeline: Timeline, error: Exception) -> None:
        now_ns = time.monotonic_ns()
        match error:
            case NotEventStreamError():
                timeline.end(Outcome.NOT_STREAMED, now_ns, str(error))
            case ConnectionLostError():
                timeline.end(Outcome.CONNECTION_LOST, now_ns, f"{error} {after(timeline)}")
            case _:
                timeline.end(Outcome.MALFORMED, now_ns, str(error))


def _wait_for_the_end(connection: Connection) -> None:
    """Give the end of the body, and late usage, a moment to come: it is due, but some servers never send it."""
    until_ns = time.monotonic_ns() + _END_NS
    connection.wait_until(lambda _: until_ns)


def _taken(timeline: Timeline, body: Body, event: str, data: str) -> str | None:
    """Note what an event says; returns the message of an error."""
    if data.startswith(":") or not data.strip():
        timeline.heartbeats += 1
        return None
    try:
        delta = api.decode(data, event)
    except api.MalformedError:
        if body.ended:  # the end of the body has cut it in its middle (case 10)
            return None
        raise
    note(timeline, delta, body.read.at_ns)
    body.learn(data, delta)
    return delta.error


def _outcome(timeline: Timeline, error: str | None, *, done: bool) -> Outcome:
    """Decide how a 200 whose body came to its end has ended."""
    if error is not None:
        return Outcome.STREAM_ERROR
    finished = timeline.finish_reasons.keys()
    if not done and not (len(finished) >= timeline.choices_asked and timeline.choices.keys() <= finished):
        return Outcome.TRUNCATED
    if timeline.events:
        return Outcome.OK
    return Outcome.NOT_STREAMED if timeline.whole else Outcome.EMPTY
