"""HTTP/1.1 responses, parsed from what a connection read by geventhttpclient's parser."""

from geventhttpclient.response import HTTPParseError, HTTPResponse

from vllm_locust.stamp import Read
from vllm_locust.transport import ConnectionLostError


class Response(HTTPResponse):
    """A response that is fed bytes and gathers the pieces of its body."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []
        self.between_chunks = False
        """Whether what comes next is known to be the beginning of a chunk."""

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

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append(bytes(buf))

    @property
    def head_complete(self) -> bool:
        """Whether the head of the final response is complete; interim ones (1xx) are passed over."""
        return bool(self.headers_complete) and self.status_code >= 200  # noqa: PLR2004

    def header(self, name: str) -> str:
        """Return a header's value, the empty string where it is absent."""
        value = self.get(name)
        return value if isinstance(value, str) else ", ".join(value or ())


def feed(response: Response, read: Read | None) -> None:
    """Parse what was read, None being the end; raises `HTTPParseError`, `ConnectionLostError` for an early end."""
    if read is not None:
        response.take(read.data)
        return
    try:
        response.feed(b"")
    except HTTPParseError as error:
        raise ConnectionLostError("the connection ended in the middle of the response") from error
    if not response.message_complete:
        raise ConnectionLostError("the connection ended in the middle of the response")


__all__ = ["HTTPParseError", "Response", "feed"]
