"""An open loop: every arrival leaves at its instant, in a greenlet of its own, however many are in flight.

Nothing here waits for an answer. Where there is a cap on streams in flight, arrivals wait for a seat, and get it in the
order in which they were due; what the end of the run finds waiting is dropped, and counted. So is what was due and
this process was too slow to send.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from typing import Generic, TypeVar

import gevent

Request = TypeVar("Request")

_JUST_NOW_NS = 10_000_000
"""What has been due for less time when the end comes was not held back: it is as if it were due later."""
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
        offered when it is due, unless the end comes within a moment. `send` returns when it has ended; there are at
        most `most` of them at once, unless that is None. `on_done` is called when the last one has ended.
        """
        self._arrivals = arrivals
        self._start_ns = start_ns
        self._since_ns = since_ns
        self._most = most
        self._make, self._offer, self._send, self._drop, self._on_done = make, offer, send, drop, on_done
        self._waiting: deque[tuple[int, int]] = deque()
        """Not whole requests: a server that stands still leaves as many here as one likes, and prompts are long."""
        self._next: tuple[int, int] | None = None
        """What has been taken from the schedule and not been offered."""
        self._out = 0
        self._over = self._closed = False
        self._overdue_ns = 0
        """What was due by then, and has not been sent when it closes, was held back."""
        self._loop = gevent.spawn(self._run)

    @property
    def done(self) -> bool:
        """Whether the last arrival has left and all have ended."""
        return self._over and not self._out and not self._waiting

    def close(self) -> None:
        """Let no more arrivals leave; drop those that wait for a seat, and offer and drop those that are overdue."""
        if self._closed:
            return
        self._overdue_ns = time.monotonic_ns() - _JUST_NOW_NS
        self._closed = True
        self._loop.kill()
        gevent.sleep(0)  # who has just been given a seat is dropped before this returns
        while self._waiting:
            self._drop(self._make(*self._waiting.popleft()))
        left = chain([] if self._next is None else [self._next], self._arrivals)
        for number, at_ns in takewhile(lambda arrival: self._start_ns + arrival[1] <= self._overdue_ns, left):
            if at_ns >= self._since_ns:
                request = self._make(number, self._start_ns + at_ns)
                self._offer(request)
                self._drop(request)

    def _run(self) -> None:
        passed = 0
        for number, at_ns in self._arrivals:
            self._next = number, at_ns
            if at_ns < self._since_ns:
                passed += 1
                if not passed % _PASSED:
                    gevent.sleep(0)
                continue
            due_ns = self._start_ns + at_ns
            request = self._make(number, due_ns)  # before it is due, so that it need only be sent then
            _sleep_until(due_ns)
            self._next = None
            if self._most is None or self._out < self._most:
                self._depart(request, due_ns, offered=False)
            else:
                self._offer(request)
                self._waiting.append((number, due_ns))
            gevent.sleep(0)  # it leaves before the next one is made, and what is overdue lets others have their turn
        self._over = True
        self._tell()

    def _tell(self) -> None:
        if self.done and not self._closed:
            self._on_done()

    def _depart(self, request: Request, due_ns: int, *, offered: bool) -> None:
        self._out += 1
        gevent.spawn(self._stream, request, due_ns, offered)

    def _stream(self, request: Request, due_ns: int, offered: bool) -> None:  # noqa: FBT001 - spawned
        try:
            if self._closed and not offered and due_ns > self._overdue_ns:
                return
            if not offered:
                self._offer(request)
            if self._closed:
                self._drop(request)
            else:
                self._send(request)
        finally:
            self._out -= 1
            if self._waiting and not self._closed:
                number, due_ns = self._waiting.popleft()
                self._depart(self._make(number, due_ns), due_ns, offered=True)
            self._tell()


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        gevent.sleep(left_ns / 1e9)
