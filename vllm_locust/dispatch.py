"""An open loop: every arrival leaves at its instant, in a greenlet of its own, however many are in flight.

Nothing here waits for an answer. Where there is a cap on streams in flight, arrivals wait for a seat in the order in
which they were due; what the end of the run finds waiting is dropped, and counted.
"""

import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import gevent
from gevent.lock import BoundedSemaphore

Request = TypeVar("Request")


class Dispatch(Generic[Request]):
    """Sends the arrivals of one rank."""

    def __init__(  # noqa: PLR0913 - what to do when, and three things to do
        self,
        arrivals: Iterator[tuple[int, int]],
        start_ns: int,
        *,
        since_ns: int,
        most: int | None,
        offer: Callable[[int, int], Request],
        send: Callable[[Request], None],
        drop: Callable[[Request], None],
        on_done: Callable[[], None],
    ) -> None:
        """Take number and offset of each arrival from an iterator; those that were due before `since_ns` pass over.

        `offer` makes a request of a number and the instant at which it is due. `send` returns when it has ended; there
        are at most `most` of them at once, unless that is None. `on_done` is called when the last one has ended.
        """
        self._arrivals = arrivals
        self._start_ns = start_ns
        self._seats = None if most is None else BoundedSemaphore(most)
        self._offer, self._send, self._drop, self._on_done = offer, send, drop, on_done
        self._waiting: dict[gevent.Greenlet, Request] = {}
        self._out = 0
        self._over = self._closed = False
        self._loop = gevent.spawn(self._run, since_ns)

    @property
    def done(self) -> bool:
        """Whether the last arrival has left and all have ended."""
        return self._over and not self._out

    def close(self) -> None:
        """Let no more arrivals leave, and drop those that wait for a seat."""
        self._closed = True
        self._loop.kill()
        for greenlet, request in list(self._waiting.items()):
            greenlet.kill(block=False)
            self._drop(request)
        self._waiting.clear()

    def _run(self, since_ns: int) -> None:
        for number, at_ns in self._arrivals:
            if at_ns < since_ns:
                continue
            _sleep_until(self._start_ns + at_ns)
            self._out += 1
            gevent.spawn(self._depart, number, self._start_ns + at_ns)
        self._over = True
        self._tell()

    def _tell(self) -> None:
        if self.done and not self._closed:
            self._on_done()

    def _depart(self, number: int, due_ns: int) -> None:
        try:
            request = self._offer(number, due_ns)
            if self._seats is None:
                self._send(request)
            elif self._seats.acquire(blocking=False) or self._wait_for_seat(request):
                try:
                    self._send(request)
                finally:
                    self._seats.release()
        finally:
            self._out -= 1
            self._tell()

    def _wait_for_seat(self, request: Request) -> bool:
        assert self._seats is not None  # noqa: S101 - there is a cap
        self._waiting[gevent.getcurrent()] = request
        try:
            return bool(self._seats.acquire())
        finally:
            self._waiting.pop(gevent.getcurrent(), None)


def _sleep_until(due_ns: int) -> None:
    """Sleep; an instant that has passed takes the others' turn into account all the same."""
    while True:
        left_ns = due_ns - time.monotonic_ns()
        gevent.sleep(max(0, left_ns) / 1e9)
        if due_ns <= time.monotonic_ns():
            return
