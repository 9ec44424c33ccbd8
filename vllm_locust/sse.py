"""Bytes in any cut → the data of server-sent events, over `sseclient-py`.

`sseclient` parses fields; what it does not know is put right in front of it: a byte order mark, line ends of every
kind (WHATWG HTML, section 9.2.5), comments, which it drops and we count, and bodies that are no event stream at all,
which would vanish in it, as would a field `error`: llama.cpp told of errors by one until September 2025, so it is an
event of that name. An unfinished event at the end of the body is delivered, as servers forget the last blank line,
unless it was cut in the middle of a character. Memory is that of the largest event, which has a limit, and time that of
the bytes, whatever they are.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from sseclient import SSEClient

EVENT_BYTES = 16_777_216
"""An event with log probabilities may have some megabytes; a body in which no event ends has no limit of its own."""
_BOM = b"\xef\xbb\xbf"
_PLAIN_LINES = 2
_FIELDS = (b"data", b"event", b"id", b"retry", b"error", b":")
_ERROR_FIELD = re.compile(rb"^error:", re.MULTILINE)
_MANY_LINES = 64
"""From so many lines on, `sseclient`, which joins those of an event one by one, takes a time of their square."""
_FIELD = re.compile(r"^(data|event)(?:: ?(.*))?$", re.MULTILINE)

# It logs every event, and the text of lines that it does not know, where somebody wants to see all that Locust does.
logging.getLogger("sseclient").setLevel(logging.INFO)


class NotEventStreamError(Exception):
    """The body does not begin like an event stream; the text is its beginning."""


class EventTooLongError(Exception):
    """An event has more than `EVENT_BYTES`, if it ends at all."""


class EventStream:
    """The events of one body; iterating yields (event name, data)."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self._last = b"\n"
        self._skip_lf = False
        self.comments = 0
        self.unfinished = bytearray()
        """The beginning of an event whose end has not come."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (event name, data); raises `NotEventStreamError`, `EventTooLongError`, and `UnicodeDecodeError`."""
        pieces = iter(self._pieces)
        for piece in chain((_beginning(pieces),), pieces):
            # Nearly every piece is one line of data and an empty one: taking it apart here saves a third of the cost.
            if not self.unfinished and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
                lines = piece.splitlines()  # of bytes, which end at CR, LF and CRLF alone
                if len(lines) == _PLAIN_LINES:
                    yield "message", lines[0][6:].decode()
                    continue
            if block := self._ended(self._lines(piece)):
                yield from _events(block)
            if len(self.unfinished) > EVENT_BYTES:
                raise EventTooLongError(f"an event of more than {EVENT_BYTES:,} bytes")
        try:
            yield from _events(bytes(self.unfinished))
        except UnicodeDecodeError:
            return

    def _ended(self, lines: bytes) -> bytes:
        """Return the events that a piece ends; what is behind them waits for its own end."""
        unfinished = self.unfinished
        if not unfinished and lines.endswith(b"\n\n"):
            return lines
        seam = max(len(unfinished) - 1, 0)  # a blank line may be cut in its middle
        unfinished += lines
        end = unfinished.rfind(b"\n\n", seam) + 2
        if end < 2:  # noqa: PLR2004
            return b""
        block = bytes(memoryview(unfinished)[:end])
        del unfinished[:end]
        return block

    def _lines(self, piece: bytes) -> bytes:
        """Return a piece with LF as the only line end, and count its comments."""
        if not piece:
            return piece
        if self._skip_lf and piece.startswith(b"\n"):
            piece = piece[1:]
        self._skip_lf = False
        if b"\r" in piece:
            self._skip_lf = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # A colon right after a line end begins a comment: JSON strings hold no raw line ends.
        self.comments += (self._last + piece).count(b"\n:")
        self._last = piece[-1:] or self._last
        return piece


def _beginning(pieces: Iterator[bytes]) -> bytes:
    """Join pieces until they tell whether this is an event stream, and return them without mark and blank lines."""
    head, marked = b"", True
    for piece in pieces:
        head += piece
        if marked and len(head) >= len(_BOM):
            head, marked = head.removeprefix(_BOM), False
        if not marked:
            head = head.lstrip(b"\r\n")
        if len(head) >= len(b"event") or head.startswith(b":"):
            break
    start = head.removeprefix(_BOM).lstrip(b"\r\n") if marked else head
    # A body may end within its first word.
    if not start.startswith(_FIELDS) and not any(word.startswith(start) for word in (*_FIELDS, _BOM)):
        raise NotEventStreamError(start[:400].decode("utf-8", "replace"))
    return start


def _events(block: bytes) -> Iterator[tuple[str, str]]:
    """Yield the events of a block that ends where one does, or the body."""
    block = _ERROR_FIELD.sub(b"event: error\ndata:", block)
    if block.count(b"\n") > _MANY_LINES:
        yield from _joined(block)
        return
    for event in SSEClient(iter((block,))).events():
        yield event.event, event.data


def _joined(block: bytes) -> Iterator[tuple[str, str]]:
    """Yield the events of a block, as `sseclient` would, in a time of its length."""
    for event in block.split(b"\n\n"):
        name, data = "", []
        for field in _FIELD.finditer(event.decode()):
            if field[1] == "data":
                data.append(field[2] or "")
            else:
                name = field[2] or ""
        if data:
            yield name or "message", "\n".join(data)
