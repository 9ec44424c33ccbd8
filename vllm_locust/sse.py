"""Bytes in any cut → the data of server-sent events, over `sseclient-py`.

`sseclient` parses fields; what it does not know is put right in front of it: a byte order mark, line ends of every
kind (WHATWG HTML, section 9.2.5), comments, which it drops and we count, and bodies that are no event stream at all,
which would vanish in it, as would a field `error`: llama.cpp told of errors by one until September 2025, so it is an
event of that name. An unfinished event at the end of the body is delivered, as servers forget the last blank line,
unless it was cut in the middle of a character.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from sseclient import SSEClient

_BOM = b"\xef\xbb\xbf"
_PLAIN_LINES = 2
_FIELDS = (b"data", b"event", b"id", b"retry", b"error", b":")
_ERROR_FIELD = re.compile(rb"^error:", re.MULTILINE)


class NotEventStreamError(Exception):
    """The body does not begin like an event stream; the text is its beginning."""


class EventStream:
    """The events of one body; iterating yields (event name, data)."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self._last = b"\n"
        self._skip_lf = False
        self.comments = 0
        self.unfinished = b""
        """The beginning of an event whose end has not come."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (event name, data); raises `NotEventStreamError`, and `UnicodeDecodeError` where it is no UTF-8."""
        pieces = iter(self._pieces)
        for piece in chain((_beginning(pieces),), pieces):
            # Nearly every piece is one line of data and an empty one: taking it apart here saves a third of the cost.
            if not self.unfinished and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
                lines = piece.splitlines()  # of bytes, which end at CR, LF and CRLF alone
                if len(lines) == _PLAIN_LINES:
                    yield "message", lines[0][6:].decode()
                    continue
            block, blank, self.unfinished = (self.unfinished + self._lines(piece)).rpartition(b"\n\n")
            if blank:
                yield from _events(block + blank)
        try:
            yield from _events(self.unfinished)
        except UnicodeDecodeError:
            return

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
    """Return the first pieces, joined until they tell whether this is an event stream."""
    head = b""
    for piece in pieces:
        head += piece
        start = head.removeprefix(_BOM).lstrip(b"\r\n")
        if len(start) >= len(b"event") or start.startswith(b":"):
            break
    start = head.removeprefix(_BOM).lstrip(b"\r\n")
    # A body may end within its first word.
    if not start.startswith(_FIELDS) and not any(word.startswith(start) for word in (*_FIELDS, _BOM)):
        raise NotEventStreamError(start[:400].decode("utf-8", "replace"))
    return head.removeprefix(_BOM)


def _events(block: bytes) -> Iterator[tuple[str, str]]:
    """Yield the events of a block that ends where one does, or the body."""
    block = _ERROR_FIELD.sub(b"event: error\ndata:", block)
    for event in SSEClient(iter((block,))).events():
        yield event.event, event.data
