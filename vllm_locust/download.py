"""Logs of requests and samples of answers on their way to the master, which asks each worker once that has finished.

Promise: whatever is lost is asked for again, what comes twice counts once, and a worker that does not answer is not
waited for without end. What is missing then is told.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import gevent
import gevent.event

from vllm_locust.results import replacing
from vllm_locust.spool import Spool

logger = logging.getLogger(__name__)

_LARGE_BYTES = 50_000_000
"""What takes seconds to come is spoken of."""
_AGAIN_S = 1.0
"""How long an answer is waited for before the same is asked again."""


class Download:
    """What one worker has kept, as far as it has come."""

    def __init__(self, what: str, worker: str, directory: Path, ask: Callable[[int], None]) -> None:
        """Keep what comes on the disk of a directory; `ask` wants what is behind an offset."""
        self._what = what
        self.worker = worker
        self.spool = Spool(directory)
        self._ask = ask
        self._came = gevent.event.Event()
        self._piece: dict[str, Any] = {}
        self._size: int | None = None
        self._rows = self._left_out = 0
        self._why = ""

    def fetch(self, patience_s: float, gone: Callable[[], bool]) -> None:
        """Ask for all of it; give up when the worker is gone, or nothing new has come for so long."""
        progress_s = time.monotonic()
        while not (self.complete or self.spool.trouble or gone()) and time.monotonic() < progress_s + patience_s:
            before = self._size, self.spool.size
            self._came.clear()
            self._ask(self.spool.size)
            if self._came.wait(_AGAIN_S):
                self._keep(self._piece)
            if (self._size, self.spool.size) != before:
                progress_s = time.monotonic()
        if self.complete:
            self._ask(self.spool.size)  # the worker may go

    def take(self, piece: dict[str, Any]) -> None:
        """Take an answer; one to an older question has been taken before."""
        if piece["offset"] == self.spool.size:
            self._piece = piece
            self._came.set()

    def _keep(self, piece: dict[str, Any]) -> None:
        if self._size is None and piece["size"] > _LARGE_BYTES:
            logger.info("%s sends its %s, %.0f MB", self.worker, self._what, piece["size"] / 1e6)
        self.spool.append(piece["data"])
        self.spool.settle()
        self._size, self._left_out, self._why = piece["size"], piece["left_out"], piece["trouble"]
        if not self.spool.trouble:
            self._rows += piece["data"].count(b"\n")

    @property
    def complete(self) -> bool:
        """Whether all that the worker kept is here."""
        return self._size == self.spool.size

    @property
    def remark(self) -> str:
        """What is missing, in words, empty where nothing is."""
        if self.complete:
            left_out = f"{self._left_out:,} requests of {self.worker} are left out, {self._why}"
            return f"{self._what}: {left_out}" if self._left_out else ""
        trouble = f" ({self.spool.trouble})" if self.spool.trouble else ""
        if self._rows:
            return f"{self._what}: of {self.worker} there are but the first {self._rows:,} requests{trouble}"
        return f"{self._what}: the requests of {self.worker} are missing{trouble}"


class Downloads:
    """What all workers that ever took part in a run have kept, each row a line; `what` it is, in a word of remarks."""

    def __init__(
        self,
        what: str,
        directory: Path,
        patience_s: float,
        ask: Callable[[str, int], None],
        left: Callable[[str], bool],
    ) -> None:
        """Expect nobody yet; `ask` a client for what is behind an offset, and find out whether it has `left`."""
        self._what = what
        self._directory = directory
        self._patience_s = patience_s
        self._ask = ask
        self._left = left
        self._by_client: dict[str, Download] = {}
        self._fetching: dict[str, gevent.Greenlet] = {}

    def expect(self, client: str, worker: str) -> None:
        """A worker takes part; what it keeps will be there when it has finished."""
        if client not in self._by_client:
            self._by_client[client] = Download(self._what, worker, self._directory, partial(self._ask, client))

    def forget(self, client: str) -> None:
        """It takes no part after all."""
        self._by_client.pop(client, None)

    def fetch(self, client: str) -> None:
        """A worker has finished, perhaps in the middle of the run: it stays until all is here."""
        download = self._by_client.get(client)
        if download is not None and client not in self._fetching:
            self._fetching[client] = gevent.spawn(download.fetch, self._patience_s, partial(self._left, client))

    def take(self, client: str, piece: dict[str, Any]) -> None:
        """Take what a worker has sent."""
        if client in self._by_client:
            self._by_client[client].take(piece)

    def wait(self) -> None:
        """Wait until everyone's rows are here or given up."""
        gevent.joinall(list(self._fetching.values()))

    @property
    def remarks(self) -> list[str]:
        """What is missing, in words."""
        return [download.remark for download in self._by_client.values() if download.remark]

    def lines(self) -> Iterator[bytes]:
        """Yield all rows, of one worker after the other; for a thread."""
        for download in self._by_client.values():
            yield from download.spool.lines()

    def save(self, path: Path, write: Callable[[Iterator[bytes], IO[bytes]], None]) -> None:
        """Write all rows into a file, in a thread since they may be many, and give the space back; raises `OSError`."""
        try:
            gevent.get_hub().threadpool.apply(self._save, (path, write))
        finally:
            self.close()

    def _save(self, path: Path, write: Callable[[Iterator[bytes], IO[bytes]], None]) -> None:
        with replacing(path) as file:
            write(self.lines(), file)

    def close(self) -> None:
        """Give the space back."""
        for download in self._by_client.values():
            download.spool.close()
