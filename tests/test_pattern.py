"""What is passed by says what it would have said taken apart: events by their frame, chunks by their size."""

import zlib
from collections import deque
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec
import pytest
from emitter import DONE, REF, Answer, Emitter, Tokens, finish, script, token, usage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust import body as body_module
from vllm_locust.api import Delta, MalformedError, decode
from vllm_locust.client import Client
from vllm_locust.origin import Origin, origin_of
from vllm_locust.pattern import Pattern, pattern_of
from vllm_locust.response import HTTPParseError, Response
from vllm_locust.sse import EventStream, NotEventStreamError
from vllm_locust.stamp import Read
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Deadline, Pool

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
BASE_NS = 1 << 62
"""Long after any clock of this machine, so that no time of a read is before its request."""
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def wordless(delta: Delta) -> Delta:
    """Return what an event says but for its texts: where they are wanted, no pattern is learnt."""
    parts = [msgspec.structs.replace(part, text=None, thought=None) for part in delta.parts]
    return msgspec.structs.replace(delta, parts=parts)


# The slow path


def apart(data: bytes) -> tuple[list[Delta], int] | None:
    """Return what a chunk says and the number of its comments, by the parsers alone; None for no whole chunk."""
    response = Response()
    try:
        response.feed(HEAD)
        response.feed(data)
        response.feed(LAST)
    except HTTPParseError:
        return None
    if not response.message_complete:
        return None
    stream = EventStream(response.pieces)
    try:
        return [decode(text, name) for name, text in stream], stream.comments
    except (MalformedError, NotEventStreamError, UnicodeDecodeError):
        return None


def learnt(data: bytes) -> Pattern | None:
    """Return the pattern of a chunk that is one event."""
    said = apart(data)
    if said is None or len(said[0]) != 1:
        return None
    response = Response()
    response.feed(HEAD)
    response.feed(data)
    ((_, text),) = EventStream(response.pieces)
    return pattern_of(data, text, said[0][0])


# Events of every kind

TEXTS = st.sampled_from(
    [
        *(b"a", b" b", b"the", b"data: x", b"0", b"5\\r\\n", b"}", b"]}", b"content", b"\xc3\xa9", b"\xf0\x9f\x98\x80"),
        *(b"", b'\\"', b"\\\\", b"\\n", b"\\u0041", b"\\ud83d\\ude00", b"\\ud800", b"\\", b'"', b'","x":"'),
        *(b"\n", b"\r", b"\r\n", b"\x00", b"\x07", b"\x7f", b"\xe2\x80\xa8", b"\xc2\x85", b"\xc2\xa0", b"\xef\xbb\xbf"),
        *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f", b"\n\ndata: [DONE]", b"\n\n: ping"),
        *(b'a"}}]}\n\ndata: {"choices":[{"text":"b', b"x" * 40, b"y" * 200),
    ]
)
SHAPES = st.sampled_from(
    [
        b'{"id":"c-1","created":7,"choices":[{"index":%i,"delta":{"content":"%t"},"finish_reason":%f,"token_ids":%n}]%u}',
        b'{"id":"c-1","choices":[{"index":%i,"delta":{"content":"%t"},"finish_reason":%f}]%u}',
        b'{"id": "c-1", "choices": [{"index": %i, "delta": {"role": "assistant", "content": "%t"}}]%u}',
        b'{"object":"text_completion","choices":[{"index":%i,"text":"%t","logprobs":null,"finish_reason":%f}]%u}',
        b'{"choices":[{"index":%i,"delta":{"reasoning_content":"%t"},"finish_reason":%f}]%u}',
        b'{"choices":[{"index":%i,"delta":{"reasoning":"%t","reasoning_content":"%t"},"finish_reason":%f}]%u}',
        # SGLang: every field, most of them null
        (
            b'{"choices":[{"index":%i,"delta":{"role":null,"content":"%t","reasoning_content":null,"tool_calls":null},'
            b'"logprobs":null,"finish_reason":%f,"matched_stop":null}],"usage":null}'
        ),
        b'{"choices":[{"index":%i,"delta":{"role":null,"content":null,"reasoning_content":"%t"},"finish_reason":%f}]}',
        # llama.cpp: the reason first, numbers behind
        b'{"choices":[{"finish_reason":%f,"index":%i,"delta":{"content":"%t"}}],"created":7,"id":"l","timings":{"n":1}}',
        b'{"choices":[{"index":%i,"delta":{"content":"%t"},"logprobs":{"content":[{"token":"%t","logprob":-0.1}]}}]}',
        # Keys of these names elsewhere, and twice
        b'{"meta":{"content":"%t"},"choices":[{"index":%i,"delta":{"content":"%t"}}]%u}',
        b'{"choices":[{"index":%i,"delta":{"content":"%t"}}],"meta":{"content":"%t","text":"%t"}}',
        b'{"choices":[{"index":%i,"delta":{"content":"%t","content":"%t"}}]}',
        b'{"x\\"content":"%t","choices":[{"index":%i,"text":"%t"}]}',
        b'{"content":"%t","choices":[{"index":%i,"delta":{"refusal":"%t"}}]}',
        b'{"text":"%t","choices":[]%u}',
        b'{"choices":[{"index":%i,"delta":{"tool_calls":[{"function":{"arguments":"%t"}}]},"text":"%t"}]}',
        b'{"choices":[{"index":0,"text":"%t"},{"index":1,"text":"%t"}]}',
        b'{"choices":[{"index":%i,"delta":{"content":[{"type":"text","text":"%t"}]}}]}',
        # Errors
        b'{"error":{"message":"%t","text":"%t"}}',
        b'{"error":"","choices":[{"index":%i,"text":"%t"}]}',
        b'{"object":"error","text":"%t"}',
        b'{"choices":[{"index":%i,"text":"%t","finish_reason":"error"}]}',
        b'{"choices":[{"index":%i,"text":%t}]}',
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4}}',
        b"[DONE]",
        b": keepalive",
        b"%t",
        b"",
    ]
)


@st.composite
def chunks_of_json(draw: st.DrawFn, shapes: st.SearchStrategy[bytes] = SHAPES) -> bytes:
    """Draw the data of an event."""
    shape = draw(shapes)
    if draw(st.booleans()):  # most events say nothing but a text
        reason, ids, used, index = b"null", b"null", b"", b"0"
    else:
        reason = draw(st.sampled_from([b"null", b"null", b'"stop"', b'"length"', b'"error"']))
        ids = draw(st.sampled_from([b"null", b"[]", b"[5]", b"[5,6]"]))
        used = draw(
            st.sampled_from(
                [b"", b',"usage":null', b',"usage":{"prompt_tokens":7,"completion_tokens":3}', b',"usage":{}']
            )
        )
        index = draw(st.sampled_from([b"0", b"1", b"2", b'"0"']))
    for mark, value in ((b"%f", reason), (b"%n", ids), (b"%u", used), (b"%i", index)):
        shape = shape.replace(mark, value)
    while b"%t" in shape:
        shape = shape.replace(b"%t", draw(TEXTS), 1)
    return shape


@st.composite
def with_another_text(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a chunk like this one, but for a text or for some bytes, its size set right or left as it is."""
    head, _, payload = data.partition(b"\r\n")
    payload = payload.removesuffix(b"\r\n")
    new = bytearray(payload)
    quotes = [place for place, byte in enumerate(payload) if byte == ord('"')]
    if len(quotes) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(quotes) - 2))
        new[quotes[at] + 1 : quotes[at + 1]] = draw(TEXTS)
    for _ in range(draw(st.integers(0, 3))):
        _mutate(draw, new)
    if draw(st.integers(0, 3)):
        return framed(bytes(new))
    whole = bytearray(head + b"\r\n" + new + b"\r\n")
    for _ in range(draw(st.integers(0, 2))):
        _mutate(draw, whole)
    return bytes(whole)


def _mutate(draw: st.DrawFn, data: bytearray) -> None:
    """Flip, insert or delete a few bytes."""
    at = draw(st.integers(0, len(data)))
    how = draw(st.integers(0, 2))
    if how == 0 and at < len(data):
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif how == 1:
        data[at:at] = draw(st.sampled_from([b"\r", b"\n", b"\r\n", b'"', b"\\", b"0", b";", b" ", b"a", b"\n\n"]))
    else:
        del data[at : at + draw(st.integers(1, 3))]


PLAIN = st.sampled_from([b"a", b" b", b"the", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"}", b"5", b"x" * 200])
ALIKE = [
    b'{"id":"c-1","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}',
    b'{"choices":[{"index":1,"delta":{"role":null,"content":null,"reasoning_content":"%b"}}],"usage":null}',
    b'{"choices":[{"index":0,"text":"%b"}]}',
    b'{"meta":{"content":"%b"},"choices":[{"index":0,"delta":{"content":"a"}}]}',
]
"""Events that differ in a text alone."""


# One event


@MANY
@given(st.data())
def test_what_fits_is_one_event_that_says_what_the_pattern_says(data: st.DataObject) -> None:
    said = data.draw(chunks_of_json())
    taught = framed(
        data.draw(st.sampled_from([event(said), event(said).replace(b"\n", b"\r\n"), b": c\n" + event(said)]))
    )
    pattern = learnt(taught)
    if pattern is None:
        return
    assert pattern.fits(taught)
    for _ in range(5):
        other = data.draw(with_another_text(taught))
        if pattern.fits(other):
            found = apart(other)
            assert found is not None
            assert [*map(wordless, found[0])] == [wordless(pattern.delta)], (taught, other)
            assert found[1] == 0


@given(st.sampled_from([b"a", b" b", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"x" * 300, b"'", b"{", b"data: "]))
def test_a_token_like_one_before_it_fits(text: bytes) -> None:
    """The property above is not true for want of anything that fits."""
    for shape in (b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}', b'{"choices":[{"index":0,"text":"%b"}]}'):
        size = len(framed(event(shape % text))) - len(event(shape % text))
        other = b"b" * len(text)
        pattern = learnt(framed(event(shape % other)))
        assert pattern is not None
        assert pattern.digits == size - 4
        assert pattern.fits(framed(event(shape % text)))


TAUGHT = framed(event(b'{"choices":[{"index":0,"text":"' + b"x" * 240 + b'"}]}'))
"""A chunk whose size has three digits."""


@pytest.mark.parametrize(
    "data",
    [
        b"ff\r\r\n" + event(b'{"choices":[{"index":0,"text":"' + b"x" * 212 + b'"}]}') + b"\r\n",
        framed(event(b'{"choices":[{"index":0,"text":""}]}')),
        framed(event(b'{"choices":[{"index":0,"text":"' + b"x" * 239 + b'\\"}]}')),
        TAUGHT.upper(),
        TAUGHT.replace(b"\r\n", b"\n"),
        TAUGHT.replace(b"\r\n", b";a=b\r\n", 1),
        b"0" + TAUGHT,
        b"0x" + TAUGHT,
        TAUGHT + TAUGHT,
        TAUGHT + LAST,
        TAUGHT[:-1],
        TAUGHT[1:],
        b"",
    ],
)
def test_a_chunk_with_another_frame_does_not_fit(data: bytes) -> None:
    pattern = learnt(TAUGHT)
    assert pattern is not None
    assert not pattern.fits(data)


TOKEN = b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}'


@pytest.mark.parametrize(
    "payload",
    [
        event(TOKEN % b"a") + event(TOKEN % b"b"),
        event(TOKEN % b"a") + b": ping\n\n",
        b": ping\n" + event(TOKEN % b"a"),
        b"id: 1\n" + event(TOKEN % b"a"),
        event(TOKEN % b"a") + b"\n\n",
        event(TOKEN % b"a")[:-1],
        b'data: {\ndata: "choices":[{"index":0,"text":"a"}]}\n\n',
        event(b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'),
        event(b'{"choices":[{"index":0,"text":"a","token_ids":[1]}]}'),
        event(b'{"choices":[{"index":0,"text":"a"}],"usage":{"completion_tokens":1}}'),
        event(b'{"choices":[{"index":0,"text":"a"},{"index":1,"text":"a"}]}'),
        event(b'{"choices":[{"index":0,"delta":{"refusal":"a"}}]}'),
        event(b'{"error":{"text":"a"},"choices":[{"index":0,"text":"a"}]}'),
        event(TOKEN % b""),
        event(TOKEN % b"\\n"),
    ],
)
def test_nothing_is_learnt_from_what_is_more_or_other_than_one_event_with_a_text(payload: bytes) -> None:
    data, delta = framed(payload), decode('{"choices":[{"index":0,"text":"a"}]}')
    response = Response()
    response.feed(HEAD + data)
    name, said = next(iter(EventStream(response.pieces)))
    with suppress(MalformedError):
        delta = decode(said, name)
    assert pattern_of(data, said, delta) is None


# Whole streams


class Scripted:
    """A connection on which these reads come."""

    idle = patient = False
    tls = None

    def __init__(self, reads: list[Read]) -> None:
        self._reads = deque(reads)

    def read(self) -> Read | None:
        return self._reads.popleft() if self._reads else None

    def send(self, data: bytes) -> None:
        """Send nothing: the answer is known."""

    def wait_until(self, deadline: Deadline | None) -> None:
        """Wait for nothing."""

    def wait_anew(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Close nothing."""


def followed(reads: list[bytes], lessons: int) -> dict[str, Any]:
    """Return all that a timeline says of an answer that was read like this."""
    timeline = Timeline("request-1", "short", "chat", monotonic_ns())
    client = Client(Pool(Origin("unused", 1), keep_alive=False), Timeouts())
    stamped = [Read(data, BASE_NS + i * 1_000_003, i, 10_000 * i, i % 5 != 3) for i, data in enumerate(reads)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_LESSONS", lessons)
        client._attempt(timeline, Scripted(stamped), b"", None, reused=False)  # type: ignore[arg-type]
    said = {field.name: getattr(timeline, field.name) for field in fields(timeline) if field.name != "called_ns"}
    said["sent_ns"] = None
    said["choices"] = {
        index: (c.first_ns, c.last_ns, c.events, c.tokens, list(c.times)) for index, c in timeline.choices.items()
    }
    if said["done_ns"] < BASE_NS:  # it failed, now
        said["done_ns"] = None
    return said


class Streamed(NamedTuple):
    """An answer in chunks."""

    head: bytes
    chunks: list[bytes]
    """As they are on the wire."""
    end: bytes

    @property
    def data(self) -> bytes:
        return self.head + b"".join(self.chunks) + self.end


HEADS = st.sampled_from(
    [
        *[HEAD] * 6,
        HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 400"),
        HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close"),
        HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"),
    ]
)
ENDS = st.sampled_from(
    [LAST, LAST, LAST, b"0\r\nX-Trailer: data: a\r\n\r\n", b"", b"0\r\n", b"x", LAST + b"\r\n", b"00\r\n\r\n"]
)


def _frames(payload: bytes) -> list[bytes]:
    size, plain = b"%x" % len(payload), framed(payload)
    return [
        *[plain] * 20,
        plain.upper(),
        b"%X\r\n%b\r\n" % (len(payload), payload),
        b"0" + plain,
        b"000" + plain,
        b"0x" + plain,
        size + b";a=b\r\n" + payload + b"\r\n",
        size + b';a="data: x"\r\n' + payload + b"\r\n",
        size + b" \r\n" + payload + b"\r\n",
        size + b"\n" + payload + b"\n",
        size + b"\r" + plain[len(size) :],
        plain[:-2],
        plain + b"\r\n",
        framed(plain),
        framed(payload[:9]) + framed(payload[9:]),
        framed(payload + payload),
    ]


@st.composite
def streams(draw: st.DrawFn) -> Streamed:
    """Draw an answer whose events are mostly alike."""
    alike = draw(st.booleans())
    shape = draw(st.sampled_from(ALIKE))
    odd = st.sampled_from(draw(st.lists(SHAPES, min_size=1, max_size=3)))
    around = st.sampled_from(
        [
            *["data: %b\n\n"] * 12,
            *(
                "data:%b\n\n",
                "data: %b\r\n\r\n",
                "data: %b\n\n\n",
                "data: %b\r\r",
                "id: 1\ndata: %b\n\n",
                ": c\n\ndata: %b\n\n",
            ),
            *(
                "data: %b\n\n: c\n\n",
                "event: error\ndata: %b\n\n",
                "data: %b\n",
                "data: %b",
                "%b",
                ": c\n",
                "\n",
                "id: 5\n",
            ),
            *(
                'data: %b\n\ndata: {"choices":[{"index":0,"text":"!"}]}\n\n',
                'data: {"a":\ndata: %b}\n\n',
                "event: error\n",
            ),
            *('data: {"choices":[],\n', "\n: c\n\n", "\r\n", "data\n", "data: [DONE]\n\n"),
        ]
    )
    pieces = []
    for _ in range(draw(st.integers(1, 15))):
        if alike and draw(st.integers(0, 5)):
            pieces.append(framed(event(shape % draw(PLAIN))))
            continue
        said = shape % draw(PLAIN) if draw(st.booleans()) else draw(chunks_of_json(odd))
        payload = draw(around).encode().replace(b"%b", said)
        pieces.append(draw(st.sampled_from(_frames(payload))))
    return Streamed(draw(HEADS), pieces, draw(ENDS))


@st.composite
def cuts(draw: st.DrawFn, stream: Streamed) -> list[bytes]:
    """Draw how an answer is read: chunk by chunk, some at once, some in their middle, byte by byte."""
    how = draw(st.integers(0, 5))
    if how <= 2:
        return [stream.head, *stream.chunks, *([stream.end] if stream.end else [])]
    if how == 3:
        return [stream.data[i : i + 1] for i in range(len(stream.data))]
    edges, at = {0, len(stream.data)}, len(stream.head)
    for piece in stream.chunks:
        if draw(st.integers(0, 3)):
            edges.add(at)
        if how == 5:
            edges.add(draw(st.integers(at, at + len(piece))))
        at += len(piece)
    return [stream.data[a:b] for a, b in pairwise(sorted(edges | {at}))]


@MANY
@given(st.data())
def test_a_stream_has_the_same_numbers_whether_patterns_are_learnt_or_not(data: st.DataObject) -> None:
    stream = data.draw(streams())
    for _ in range(2):
        reads = data.draw(cuts(stream))
        assert followed(reads, 4) == followed(reads, 0)


@MANY
@given(st.data())
def test_a_stream_with_some_wrong_bytes_has_the_same_numbers_too(data: st.DataObject) -> None:
    stream = data.draw(streams())
    reads = [bytearray(read) for read in data.draw(cuts(stream))]
    for _ in range(data.draw(st.integers(1, 4))):
        _mutate(data.draw, reads[data.draw(st.integers(0, len(reads) - 1))])
    whole = [bytes(read) for read in reads if read]
    assert followed(whole, 4) == followed(whole, 0)


def test_events_that_share_a_chunk_are_all_counted() -> None:
    pair = [framed(event(TOKEN % text) + event(TOKEN % b"!")) for text in (b"a", b"b", b"c")]
    said = followed([HEAD, *pair, framed(DONE), LAST], 4)
    assert said["events"] == 6
    assert said == followed([HEAD, *pair, framed(DONE), LAST], 0)


def test_comments_that_share_a_chunk_with_an_event_are_all_counted() -> None:
    both = [framed(event(TOKEN % text) + b": ping\n\n") for text in (b"a", b"b", b"c")]
    assert followed([HEAD, *both, framed(DONE), LAST], 4)["comments"] == 3


def test_a_chunk_that_ends_an_event_is_taken_apart_though_it_fit() -> None:
    token_chunk, begin = framed(event(TOKEN % b"a")), framed(b"event: error\n")
    said = followed([HEAD, token_chunk, token_chunk, begin, token_chunk, LAST], 4)
    assert (said["outcome"], said["events"]) == (Outcome.STREAM_ERROR, 2)


def test_what_follows_an_error_counts_for_nothing_whether_it_would_fit_or_not() -> None:
    token_chunk, error = framed(event(TOKEN % b"a")), framed(b'data: {"error":{"message":"gone"}}\n\n')
    late = framed(b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n')
    for lessons in (4, 0):
        said = followed([HEAD, token_chunk, token_chunk, error, token_chunk, late, LAST], lessons)
        assert (said["outcome"], said["events"], said["input_tokens"]) == (Outcome.STREAM_ERROR, 2, None)


def test_an_event_that_began_in_the_chunk_before_teaches_nothing() -> None:
    begin, end = framed(b'data: {"x":1,\n'), framed(b'data: "choices":[{"index":0,"text":"a"}]}\n\n')
    said = followed([HEAD, begin, end, end, LAST], 4)
    assert (said["outcome"], said["events"]) == (Outcome.MALFORMED, 1)


def test_what_is_compressed_teaches_nothing_though_it_look_like_an_event() -> None:
    """A block of gzip may be stored as it is, and its bytes be the pieces of the answer."""
    events = [event(TOKEN % text) for text in (b"a", b"b", b"c")]
    deflate = zlib.compressobj(0, wbits=31)
    first = deflate.compress(b"".join(events)) + deflate.flush(zlib.Z_SYNC_FLUSH)
    begin, end = first.index(b"data: "), first.index(b"data: ") + len(b"".join(events))
    pieces = [first[:begin], *events, first[end:], deflate.compress(DONE) + deflate.flush()]
    assert zlib.decompress(b"".join(pieces), wbits=31) == b"".join(events) + DONE
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    said = followed([head, *map(framed, pieces), LAST], 4)
    assert (said["events"], said["outcome"]) == (3, Outcome.OK)
    assert said == followed([head, *map(framed, pieces), LAST], 0)


def test_a_stream_over_a_socket_has_the_times_of_its_sending_with_patterns_and_without(emitter: Emitter) -> None:
    pieces = [(5 * i, token("x" * (i % 40 + 1))) for i in range(60)]
    pieces[20:20] = [(100, b": ping\n\n"), (100, Tokens(token("a") + token("b")))]
    pieces += [(400, finish()), (400, usage(7, 62)), (400, DONE)]
    said = []
    for lessons in (4, 0):
        server = emitter.serve(Answer(script(*REF[:1], *pieces)))
        client = Client(Pool(origin_of(server.url)[0]), Timeouts())
        timeline = Timeline("id", "short", "chat", monotonic_ns())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body_module, "_LESSONS", lessons)
            client.stream(timeline, b"{}")
        client.pool.close()
        answer, reply = Answer(script(*REF[:1], *pieces)), server.replies()[0]
        times = timeline.choices[0].times
        for at_ns, piece in zip(times, answer.token_pieces, strict=True):
            assert at_ns >= reply.sent[piece][0] - 1_000_000
        said.append(
            (timeline.outcome, timeline.events, timeline.comments, timeline.finish_reasons, timeline.output_tokens)
        )
    assert said == [(Outcome.OK, 62, 1, {0: "stop"}, 62)] * 2


# Chunks


def taken(reads: list[bytes], *, shortcut: bool) -> tuple[list[bytes], str, bool]:
    """Return the body read by read, the error that ended it, and whether it came to its end."""
    response, bodies, error = Response(), [], ""
    for data in reads:
        try:
            response.take(data) if shortcut else response.feed(data)
        except HTTPParseError:
            error = "malformed"
        error = error or ("malformed" if response.broken else "")
        bodies.append(b"".join(response.pieces))
        response.pieces.clear()
        if error or response.message_complete:
            break
    return bodies, error, bool(response.message_complete)


@MANY
@given(st.data())
def test_a_body_is_what_the_parser_alone_finds_however_it_is_cut(data: st.DataObject) -> None:
    stream = data.draw(streams())
    for _ in range(3):
        reads = data.draw(cuts(stream))
        assert taken(reads, shortcut=True) == taken(reads, shortcut=False)


@given(st.data())
def test_a_body_with_some_wrong_bytes_is_what_the_parser_alone_finds(data: st.DataObject) -> None:
    reads = [bytearray(read) for read in data.draw(cuts(data.draw(streams())))]
    for _ in range(data.draw(st.integers(1, 4))):
        _mutate(data.draw, reads[data.draw(st.integers(0, len(reads) - 1))])
    whole = [bytes(read) for read in reads if read]
    assert taken(whole, shortcut=True) == taken(whole, shortcut=False)


@pytest.mark.parametrize("text", [b'data: a"', b'data: a"\n'])
def test_a_head_that_ends_like_the_chunk_before_it_is_no_end_of_a_chunk(text: bytes) -> None:
    """An extension may say anything in quotes, and then a chunk may look like another one."""
    reads = [HEAD + framed(text) + b'a;x="' + text + b"\r\n", b"5\r\nhello\r\n", b"\r\n" + LAST]
    assert taken(reads, shortcut=True) == taken(reads, shortcut=False)
