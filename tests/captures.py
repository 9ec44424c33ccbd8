"""Answers of a real server as they were recorded: their bytes, when these came, and what they say.

Nothing here is the product's: the reader takes the bytes apart with the standard library, by the rules of
`docs/metrics.md`, so that what the product makes of them can be held against it and against `streams/expected.toml`.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emitter import FIN, KEEP, SILENCE

STREAMS = Path(__file__).parent / "streams"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((STREAMS / "expected.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer: its bytes, where and when each `recv` that brought some of them began, and how it ended."""

    raw: bytes
    reads: list[tuple[float, int]]
    """In milliseconds since the request was sent; the offset of the first byte."""
    ending: str
    end_ms: float


def recording(name: str) -> Recording:
    """Read NAME.raw and NAME.recv.tsv, in which 0 bytes are the end of the connection, and -1 is silence."""
    lines = (STREAMS / f"{name}.recv.tsv").read_text(encoding="ascii").splitlines()[1:]
    rows = [(float(at_s) * 1000, int(size), int(offset)) for at_s, size, offset in map(str.split, lines)]
    end_ms, last, _ = rows[-1]
    reads = [(at_ms, offset) for at_ms, size, offset in rows if size > 0]
    return Recording((STREAMS / f"{name}.raw").read_bytes(), reads, {0: FIN, -1: SILENCE}.get(last, KEEP), end_ms)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token event: of which choice, and which byte of the answer completes it."""

    choice: int
    last_byte: int


def token_events(raw: bytes) -> list[TokenEvent]:
    """Find the token events of a stream whose events are chunks of their own, as vLLM's are."""
    if b"transfer-encoding: chunked" not in raw.partition(b"\r\n\r\n")[0]:
        return []
    return [
        TokenEvent(choice["index"], last_byte)
        for data, last_byte in _events(raw)
        for choice in data.get("choices", ())
        if _is_token(choice)
    ]


def _is_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", {})
    text = choice.get("text", delta.get("content"))
    return bool(text or choice.get("token_ids")) or (text == "" and "role" not in delta)


def _events(raw: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the data of each event that is JSON, and the offset of its last line end."""
    at = raw.index(b"\r\n\r\n") + 4
    while at < len(raw):
        head, _, _ = raw[at:].partition(b"\r\n")
        begin = at + len(head) + 2
        end = begin + int(head, 16)
        event = raw[begin:end].decode()
        assert event.endswith("\n\n") or not event
        for line in event.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: ")), end - 1
        at = end + 2
