"""An open loop: every arrival leaves at its instant, in a greenlet of its own, however many are in flight.

Nothing here waits for an answer. Where there is a cap on streams in flight, arrivals wait for a seat, and get it in the
order in which they were due; what the end of the run finds waiting is dropped, and counted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import gevent

Request = TypeVar("Request")

_PASSED = 1000
"""How many arrivals are passed over without a pause: a fraction of a millisecond."""


class Dispatch(Generic[Request]):
    """Sends the arrivals of one rank."""

    def __init__(  # noqa: PLR0913 - what to do when, and four things to do
        self,
        arrivals: Iterator[tuple[int, int]],
        start_ns: int,
        *,
        since_ns: int,
        most: int | None,
        make: Callable[[int, int], Request],
        offer: Callable[[Request], None],
        send: Callable[[Request], None],
        drop: Callable[[Request], None],
        on_done: Callable[[], None],
    ) -> None:
        """Take number and offset of each arrival from an iterator; those that were due before `since_ns` pass over.

        `make` makes a request of a number and the instant at which it is due, and may be asked to again; each is
        offered when it is due, unless the end comes right then. `send` returns when it has ended; there are at most
        `most` of them at once, unless that is None. `on_done` is called when the last one has ended.
        """
        self._arrivals = arrivals
        self._start_ns = start_ns
        self._most = most
        self._make, self._offer, self._send, self._drop, self._on_done = make, offer, send, drop, on_done
        self._waiting: deque[tuple[int, int]] = deque()
        """Not whole requests: a server that stands still leaves as many here as one likes, and prompts are long."""
        self._out = 0
        self._over = self._closed = False
        self._loop = gevent.spawn(self._run, since_ns)

    @property
    def done(self) -> bool:
        """Whether the last arrival has left and all have ended."""
        return self._over and not self._out and not self._waiting

    def close(self) -> None:
        """Let no more arrivals leave, and drop those that wait for a seat."""
        self._closed = True
        self._loop.kill()
        while self._waiting:
            self._drop(self._make(*self._waiting.popleft()))

    def _run(self, since_ns: int) -> None:
        passed = 0
        for number, at_ns in self._arrivals:
            if at_ns < since_ns:
                passed += 1
                if not passed % _PASSED:
                    gevent.sleep(0)
                continue
            due_ns = self._start_ns + at_ns
            request = self._make(number, due_ns)  # before it is due, so that it need only be sent then
            _sleep_until(due_ns)
            if self._most is None or self._out < self._most:
                self._depart(request, offered=False)
            else:
                self._offer(request)
                self._waiting.append((number, due_ns))
            gevent.sleep(0)  # it leaves before the next one is made, and what is overdue lets others have their turn
        self._over = True
        self._tell()

    def _tell(self) -> None:
        if self.done and not self._closed:
            self._on_done()

    def _depart(self, request: Request, *, offered: bool) -> None:
        self._out += 1
        gevent.spawn(self._stream, request, offered)

    def _stream(self, request: Request, offered: bool) -> None:  # noqa: FBT001 - spawned
        try:
            if not self._closed:
                if not offered:
                    self._offer(request)
                self._send(request)
            elif offered:  # what was due as the end came was not held back
                self._drop(request)
        finally:
            self._out -= 1
            if self._waiting and not self._closed:
                self._depart(self._make(*self._waiting.popleft()), offered=True)
            self._tell()


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        gevent.sleep(left_ns / 1e9)
