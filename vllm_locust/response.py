"""HTTP/1.1 responses, parsed from what a connection read by geventhttpclient's parser.

A response ends where HTTP says so: what follows is no part of it, and its connection is of no more use.
"""

from contextlib import suppress

from geventhttpclient.response import HTTPParseError, HTTPResponse

from vllm_locust.stamp import Read
from vllm_locust.transport import ConnectionLostError

FRAME_BYTES = 262_144
"""How much HTTP may come in a row without a byte of a body: a head, interim responses, extensions of chunks, trailers.
Servers send 8 KB as a rule, and curl takes 300 KB."""
_LOWEST_STATUS = 100
_LOWEST_FINAL_STATUS = 200


class Response(HTTPResponse):
    """A response that is fed bytes and gathers the pieces of its body."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []
        self.between_chunks = False
        """Whether what comes next is known to be the beginning of a chunk."""
        self.broken: HTTPParseError | None = None
        """Why there will be no more of its body than the pieces that have come."""
        self._frame_bytes = 0

    def take(self, data: bytes) -> None:
        """Parse bytes; raises `HTTPParseError`.

        Nearly every read is one whole chunk, and is taken apart here for half the cost, past the parser, which stays
        where it is: between two chunks.
        """
        if self.between_chunks:
            size = len(data) - data.find(b"\r\n") - 4
            if size > 0 and data.startswith(b"%x\r\n" % size) and data.endswith(b"\r\n"):
                self.pieces.append(data[-2 - size : -2])
                return
        self.feed(data)
        # No chunk's head holds such a piece, since there is no LF in one (there may be anything else, in an extension).
        # So if the piece ends the data but for a line end, that one ends a chunk; if it were in the chunk, it would be
        # in the piece.
        last = self.pieces[-1] if self.pieces else b""
        plain = last.startswith(b"data:") and last.endswith(b"\n") and not last.endswith(b"\r\n")
        self.between_chunks = plain and data.endswith(last + b"\r\n")

    def feed(self, data: bytes | str) -> None:
        """Parse bytes; raises `HTTPParseError`, from a complete head on when it is fed again: see `broken`."""
        if self.broken is not None:
            raise self.broken
        known = len(self.pieces)
        try:
            super().feed(data)
        except HTTPParseError as error:
            if not self.ended:  # else it is of what comes behind, and the connection is of no more use
                self._break(f"not HTTP/1.1: {error.args[0]}")
        self._frame_bytes = 0 if len(self.pieces) > known else self._frame_bytes + len(data)
        if self._frame_bytes > FRAME_BYTES:
            self._break(f"more than {FRAME_BYTES:,} bytes of HTTP without a body")

    def _break(self, why: str) -> None:
        self.broken = HTTPParseError(why)
        if not self.head_complete:
            raise self.broken

    def _on_headers_complete(self) -> int | bool | None:
        if self.status_code < _LOWEST_STATUS:
            raise HTTPParseError(f"status {self.status_code}")
        return super()._on_headers_complete()

    def _on_message_begin(self) -> None:
        if self.ended:
            raise HTTPParseError("a second response")
        super()._on_message_begin()

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append(bytes(buf))

    @property
    def head_complete(self) -> bool:
        """Whether the head of the final response is complete; interim ones (1xx) are passed over."""
        return bool(self.headers_complete) and self.status_code >= _LOWEST_FINAL_STATUS

    @property
    def ended(self) -> bool:
        """Whether the final response has come to its end."""
        return bool(self.message_complete) and self.head_complete

    def should_close(self) -> bool:
        """Whether its connection can carry no other one."""
        return not self.ended or bool(super().should_close())

    def header(self, name: str) -> str:
        """Return a header's value, the empty string where it is absent."""
        value = self.get(name)
        return value if isinstance(value, str) else ", ".join(value or ())


def feed(response: Response, read: Read | None) -> None:
    """Parse what was read, None being the end; raises `HTTPParseError`, `ConnectionLostError` for an early end."""
    if read is not None:
        response.take(read.data)
        return
    with suppress(HTTPParseError):
        response.feed(b"")
    if not response.ended:
        raise ConnectionLostError("the connection ended in the middle of the response")


__all__ = ["HTTPParseError", "Response", "feed"]
