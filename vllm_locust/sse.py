"""Bytes in any cut → the data of server-sent events, over `sseclient-py`.

`sseclient` parses fields; what it does not know is put right in front of it: a byte order mark, line ends of every
kind (WHATWG HTML, section 9.2.5), comments, which it drops and we count, and bodies that are no event stream at all,
which would vanish in it. An unfinished event at the end of the body is delivered, as servers forget the last blank
line.
"""

from collections.abc import Iterable, Iterator

from sseclient import SSEClient

_BOM = b"\xef\xbb\xbf"
_FIELDS = (b"data", b"event", b"id", b"retry", b":")


class NotEventStreamError(Exception):
    """The body does not begin like an event stream; the text is its beginning."""


class EventStream:
    """The events of one body; iterating yields (event name, data)."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.comments = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (event name, data); raises `NotEventStreamError`, and `UnicodeDecodeError` where it is no UTF-8."""
        for event in SSEClient(self._lines()).events():
            yield event.event, event.data

    def _lines(self) -> Iterator[bytes]:
        """Yield the pieces with LF as the only line end."""
        last, skip_lf = b"\n", False
        for original in self._begin():
            piece = original
            if skip_lf and piece.startswith(b"\n"):
                piece = piece[1:]
            skip_lf = False
            if b"\r" in piece:
                skip_lf = piece.endswith(b"\r")
                piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if not piece:
                continue
            # A colon right after a line end begins a comment: JSON strings hold no raw line ends.
            self.comments += (last + piece).count(b"\n:")
            last = piece[-1:]
            yield piece

    def _begin(self) -> Iterator[bytes]:
        """Yield the pieces, the first joined until it tells whether this is an event stream."""
        head = b""
        pieces = iter(self._pieces)
        for piece in pieces:
            head += piece
            start = head.removeprefix(_BOM).lstrip(b"\r\n")
            if len(start) >= len(b"event") or start.startswith(b":"):
                break
        start = head.removeprefix(_BOM).lstrip(b"\r\n")
        if start and not start.startswith(_FIELDS):
            raise NotEventStreamError(start[:400].decode("utf-8", "replace"))
        yield head.removeprefix(_BOM)
        yield from pieces
