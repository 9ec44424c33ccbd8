"""Lines on their way to a file of the user: in a file without a name, gone with its process, however that ends.

Disks stall for seconds now and then, so only threads touch the file: who appends does not wait, who reads waits without
keeping the event loop away.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import gevent
from gevent.lock import Semaphore


class Spool:
    """A file without a name, of up to so many bytes."""

    def __init__(self, directory: Path | None = None, most_bytes: int | None = None) -> None:
        """Nothing is opened before there is something to keep; without a directory, where temporary files go."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._waiting: list[bytes] = []
        self._writer: gevent.Greenlet | None = None
        self._turn = Semaphore()
        self._file: IO[bytes] | None = None
        self.size = 0
        """How many bytes are in the file, once it is `settled`."""
        self.left_out = 0
        """How many lines are not in it."""
        self.trouble = ""
        """Why not; what kept one line out keeps out all that follow, so that those in the file are the first ones."""

    def append(self, data: bytes) -> None:
        """Have bytes written; returns at once."""
        self._waiting.append(data)
        if self._writer is None or self._writer.ready():
            self._writer = gevent.spawn(self._write)

    def settle(self) -> None:
        """Wait until everything appended is in the file or left out."""
        if self._writer is not None:
            self._writer.join()

    def read(self, offset: int, size: int) -> bytes:
        """Return so many bytes of a settled file, or what there is of them; raises `OSError`."""
        return bytes(self.in_thread(self._read, offset, size))

    def close(self) -> None:
        """Give the space back."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def in_thread(self, act: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - what it takes and returns
        """Have a thread do something with the file, when those before are done, and wait for it."""
        with self._turn:
            return gevent.get_hub().threadpool.apply(act, arguments)

    def _write(self) -> None:
        while self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            self.in_thread(self._append, data)

    # In a thread

    def _append(self, data: bytes) -> None:
        kept = 0 if self.trouble else len(data)
        if self._most_bytes is not None and kept > self._most_bytes - self.size:
            kept = data.rfind(b"\n", 0, self._most_bytes - self.size) + 1
            self.trouble = f"beyond {self._most_bytes / 1e6:g} MB"
        try:
            self._put(data[:kept])
        except OSError as error:
            kept, self.trouble = 0, error.strerror or str(error)
        self.size += kept
        self.left_out += data.count(b"\n", kept)

    def _put(self, data: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - for as long as the spool
        self._file.seek(self.size)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]  # a disk that is nearly full takes a part

    def _read(self, offset: int, size: int) -> bytes:
        if self._file is None:
            return b""
        self._file.seek(offset)
        return self._file.read(size)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a settled file that are whole."""
        if self._file is None:
            return
        self._file.seek(0)
        left = self.size
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for line in file:
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    return
                yield line
