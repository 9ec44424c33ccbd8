"""The body of a response as it arrives: its pieces and its events, each with the read that it came with.

What a proxy compressed whatever was asked for is inflated as it comes, in bounded memory, and others have their turn.
"""

import zlib
from collections.abc import Iterable, Iterator

from vllm_locust.api import Delta
from vllm_locust.hub import hub
from vllm_locust.note import note
from vllm_locust.pattern import Pattern, pattern_of
from vllm_locust.response import HTTPParseError, Response, feed
from vllm_locust.sse import EventStream
from vllm_locust.stamp import STAMP_RESOLUTION_NS, Read
from vllm_locust.timeline import Timeline
from vllm_locust.transport import Connection, ConnectionLostError, SilenceError

COMPRESSED = ("gzip", "x-gzip", "deflate")
"""Encodings that are understood, though never asked for."""
_LESSONS = 4
"""How many patterns in a row may be learnt in vain: some servers send no two events that differ in their text alone."""
_EITHER = 47
"""Window bits for gzip and zlib, which are told apart by their heads."""
_INFLATED_BYTES = 65_536
_INFLATED_FREELY_BYTES = 16_777_216
_INFLATION = 100
"""Events that are alike shrink to a thirtieth; beyond what is free, only a bomb shrinks further than this."""
_ERROR_BODY_BYTES = 65_536


class Body:
    """The pieces of a response's body, and its events; knows which read the one in hand came with."""

    def __init__(self, connection: Connection, response: Response, timeline: Timeline, read: Read) -> None:
        self._connection = connection
        self._response = response
        self._timeline = timeline
        self.read = read
        """The read that the piece in hand came with."""
        self._pieces = 0
        self._events_before = 0
        self.ended = False
        self.events = EventStream(self.plain())
        """All events but those that fit a pattern, which are in the timeline without having been taken apart."""
        self._pattern: Pattern | None = None
        # What is compressed is not what it looks like, though it may look like an event; a pattern passes texts over.
        self._lessons = 0 if self._compressed or timeline.answer is not None else _LESSONS

    def __iter__(self) -> Iterator[bytes]:
        pieces = self._response.pieces
        while True:
            self._pieces = len(pieces)
            while pieces:
                yield pieces.pop(0)
            self.close_read()
            if self._response.broken is not None:
                raise self._response.broken
            if self._response.ended:
                self.ended = True
                return
            read = self._connection.read()
            while read is not None and self._fits(read):
                read = self._connection.read()
            if read is not None:
                self.read = read
                self._timeline.response_bytes += len(read.data)
            feed(self._response, read)

    def learn(self, said: str, delta: Delta) -> None:
        """Take the event in hand, its data and what they mean, as a pattern for those to come."""
        if self._lessons and self._pieces == 1 and self._response.between_chunks:
            self._lessons -= 1
            self._pattern = pattern_of(self.read.data, said, delta)

    def unlearn(self) -> None:
        """Take apart whatever comes from now on: after its end has been told, a stream is no longer what it was."""
        self._pattern, self._lessons = None, 0

    def _fits(self, read: Read) -> bool:
        """Note a read that is an event like one before it; False where it has to be taken apart."""
        pattern = self._pattern
        if pattern is None or not pattern.fits(read.data):
            return False
        if self.events.unfinished or not self._response.between_chunks:
            return False
        timeline = self._timeline
        self.read = read
        self._lessons = _LESSONS
        timeline.response_bytes += len(read.data)
        part = pattern.delta.parts[0]
        if part.reasoning or timeline.content_ns is None:
            note(timeline, pattern.delta, read.at_ns)
        else:  # what else a note would take down is there already
            timeline.token_event(part.choice, read.at_ns, 0)
        self._events_before += 1
        self._note_read(1, shared=False)
        return True

    @property
    def sized(self) -> bool:
        """Whether a length was announced, so that nothing in the last bytes tells that they are the last."""
        return bool(self._response.header("content-length"))

    def plain(self) -> Iterable[bytes]:
        """Yield the pieces without the compression that some proxies apply whatever was asked for."""
        return _inflated(self) if self._compressed else self

    @property
    def _compressed(self) -> bool:
        return self._response.header("content-encoding").lower() in COMPRESSED

    def pause(self) -> None:
        """Let others have their turn in the middle of a read."""
        self._connection.in_hand_ns = self.read.at_ns
        try:
            hub().pause()
        finally:
            self._connection.in_hand_ns = None

    def close_read(self) -> None:
        """Note what the read in hand brought, once all of it is parsed."""
        timeline = self._timeline
        events = timeline.events - self._events_before
        if events:
            self._events_before = timeline.events
            # The stamp is that of the last segment, so whatever else came along may have come earlier.
            self._note_read(events, shared=self._pieces > 1 or events > 1)

    def _note_read(self, events: int, *, shared: bool) -> None:
        timeline, read = self._timeline, self.read
        timeline.token_reads += 1
        certain = read.stamped and not shared
        uncertainty_ns = STAMP_RESOLUTION_NS if certain else max(read.away_ns, STAMP_RESOLUTION_NS)
        timeline.reads.extend((read.at_ns, events, read.lag_ns, uncertainty_ns, read.stamped))


def error_body(body: Body) -> bytes:
    """Return the beginning of an error's body as far as it can be read; the rest is read and dropped."""
    kept = b""
    try:
        for piece in body.plain():
            kept += piece[: _ERROR_BODY_BYTES - len(kept)]
            if len(kept) == _ERROR_BODY_BYTES:
                break
        for _ in body:
            pass
    except (ConnectionLostError, HTTPParseError, SilenceError, zlib.error):
        pass  # its status says what it is, whether its body ends or not
    return kept


def _inflated(body: Body) -> Iterator[bytes]:
    """Decompress gzip or zlib as it comes, flush by flush, never much at once; raises `zlib.error`."""
    inflate = zlib.decompressobj(wbits=_EITHER)
    came = brought = 0
    for piece in body:
        came += len(piece)
        plain, rest = b"", piece
        while rest or len(plain) == _INFLATED_BYTES:
            if plain:
                body.pause()
            if inflate.eof:  # another member follows (RFC 1952, section 2.2)
                inflate = zlib.decompressobj(wbits=_EITHER)
            plain = inflate.decompress(rest, _INFLATED_BYTES)
            brought += len(plain)
            if brought > _INFLATED_FREELY_BYTES + _INFLATION * came:
                raise zlib.error(f"{brought:,} bytes out of {came:,} that were compressed")
            yield plain
            rest = inflate.unconsumed_tail or inflate.unused_data
