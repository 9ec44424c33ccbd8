"""HTTP/1.1 responses, parsed from what a connection read by geventhttpclient's parser."""

from geventhttpclient.response import HTTPParseError, HTTPResponse

from vllm_locust.stamp import Read
from vllm_locust.transport import ConnectionLostError


class Response(HTTPResponse):
    """A response that is fed bytes and gathers the pieces of its body."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []

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
        response.feed(read.data)
        return
    try:
        response.feed(b"")
    except HTTPParseError as error:
        raise ConnectionLostError("the connection ended in the middle of the response") from error
    if not response.message_complete:
        raise ConnectionLostError("the connection ended in the middle of the response")


__all__ = ["HTTPParseError", "Response", "feed"]
