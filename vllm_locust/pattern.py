"""Events that differ from one before them in nothing but their text.

Nearly all events of a stream do, and such an event says what that one said, whatever its text is. To know it by its
beginning and its end costs a fifth of taking apart its chunk, its lines and its JSON; what does not fit is taken apart.
"""

import msgspec

from vllm_locust.api import Delta

_FIELDS = (b'"content":', b'"text":', b'"reasoning_content":', b'"reasoning":')


class Pattern(msgspec.Struct, frozen=True, gc=False):
    """A chunk of HTTP that is one event: all of it but the digits of its size and its text."""

    digits: int
    begin: bytes
    """From the end of the digits to the quote before the text."""
    end: bytes
    """From the quote behind the text to the end of the chunk."""
    delta: Delta
    """What the event says."""

    def fits(self, data: bytes) -> bool:
        """Tell whether these bytes are such a chunk, with a text that is not empty and needs no decoding."""
        text = data[self.digits + len(self.begin) : -len(self.end)]
        try:
            return (
                data.endswith(self.end)
                and data.startswith(self.begin, self.digits)
                and data.startswith(b"%x\r\n" % (len(data) - self.digits - 4))
                and b'"' not in text
                and b"\\" not in text
                and text.decode().isprintable()
                and text != b""
            )
        except UnicodeDecodeError:
            return False


def pattern_of(data: bytes, said: str, delta: Delta) -> Pattern | None:
    """Return the pattern of an event from the bytes of its read, where those are nothing but its chunk.

    Only of a token event that says nothing else: no usage, no finish reason, no token ids. `said` is its data: nothing
    else may be in the chunk, no comment and no second event, nor may the event have begun before it.
    """
    if len(delta.parts) != 1 or delta.usage is not None or delta.error is not None:
        return None
    part = delta.parts[0]
    if not (part.token and (part.content or part.reasoning)) or part.finish_reason is not None or part.token_ids:
        return None
    digits = data.find(b"\r\n")
    if digits <= 0 or "\n" in said or data[digits + 2 :] != b"data: %b\n\n\r\n" % said.encode():
        return None
    for field in _FIELDS:
        begin, found, rest = data.partition(field)
        if found:
            space = rest[: len(rest) - len(rest.lstrip(b" "))]
            _, _, end = rest[len(space) + 1 :].partition(b'"')
            pattern = Pattern(digits, begin[digits:] + field + space + b'"', b'"' + end, delta)
            if pattern.fits(data):
                return pattern
    return None
