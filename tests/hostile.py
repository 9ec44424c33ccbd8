"""Answers that a server might make up, whole ones and broken ones, and what must hold whichever of them comes.

The reads are made up, and taken the way that those of a socket are; a few thousand a minute can be tried like that
(`tests/fuzz.py`). They are gathered in a story: requests of one run, each with its answer, that a recorder sees.
"""

import ast
import csv
import io
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from emitter import DONE, FINISH, REF, ROLE
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_locust import api, recording, report, requestlog, results
from vllm_locust.answer import Answer
from vllm_locust.client import Client
from vllm_locust.exporter import Exporter, Snapshot
from vllm_locust.origin import Origin
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recorder import Recorder
from vllm_locust.stamp import Read
from vllm_locust.summary import Meta
from vllm_locust.terminal import COLUMNS, width_of
from vllm_locust.timeline import MESSAGE_CHARS, Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Deadline, Pool

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
GZIP = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
LAST = b"0\r\n\r\n"
WHOLE = b"".join(piece for _, piece in REF)
CAPTURES = [path.read_bytes() for path in sorted((Path(__file__).parent / "streams").glob("*.raw"))]
BODIES = [captured.partition(b"\r\n\r\n")[2] for captured in CAPTURES]
BODIES = [b"".join(re.findall(rb"[0-9a-f]+\r\n(data: .*?\n\n|: .*?\n\n)\r\n", body, re.DOTALL)) for body in BODIES]
BYTEWISE = 2000
WINDOW_NS = 10 * NS_PER_S


def framed(payload: bytes) -> bytes:
    """Return a chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


# The way that bytes take


class Wire:
    """A connection on which these bytes come, read by read; the end of the reads is the end of the connection."""

    connect_ns = 1
    heard_ns = 0
    patient = False
    tls = None
    oldest_unparsed_ns = None
    in_hand_ns: int | None = None

    def __init__(self, reads: Iterable[bytes], on_read: Callable[[], None]) -> None:
        self._reads = iter(reads)
        self._next: bytes | None = next(self._reads, None)
        self._on_read = on_read
        self.closed = False
        self.bytes = 0

    def read(self) -> Read | None:
        self._on_read()
        data, self._next = self._next, next(self._reads, None)
        if data is None:
            return None
        self.bytes += len(data)
        return Read(data, time.monotonic_ns(), 0, 1_000, stamped=True)

    @property
    def idle(self) -> bool:
        return self._next is None and not self.closed

    def send(self, data: bytes) -> None:
        """Send nothing: the answer is known."""

    def wait_until(self, deadline: Deadline | None) -> None:
        """Wait for nothing."""

    def wait_anew(self) -> None:
        """Wait for nothing."""

    def rest(self) -> None:
        """Wait for nothing."""

    def hurry(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        self.closed = True


class Wires(Pool):
    """Opens one connection, on which an answer comes that is known."""

    def __init__(self, reads: Iterable[bytes], on_read: Callable[[], None]) -> None:
        super().__init__(Origin("unused", 1))
        self.wire = Wire(reads, on_read)

    def open(self, timeout_s: float) -> Any:  # noqa: ARG002
        return self.wire


def _nothing() -> None:
    """Do nothing while a read is taken."""


def ask(
    reads: Iterable[bytes], timeline: Timeline | None = None, on_read: Callable[[], None] = _nothing
) -> tuple[Timeline, Wire]:
    """Return what becomes of a request to which these reads are the answer, and its connection."""
    timeline = timeline or Timeline("request-1", "short", "chat", time.monotonic_ns())
    pool = Wires(reads, on_read)
    client = Client(pool, Timeouts(), "secret")
    client.stream(timeline, b"{}")
    assert not client.in_flight
    assert not client.reading
    return timeline, pool.wire


# What a server may say

ABSURD = [
    *("0", "1", "7", "-1", "-5", "1023", "1024", "2147483647", "2147483648", "9223372036854775807"),
    *("9223372036854775808", "18446744073709551616", "1180591620717411303424", "1e308", "1e999", "-1e308", "7.0"),
    *("0.5", "true", "null", '"7"', "[]", "{}", "[7]", "00", "-", "NaN", "Infinity", "9" * 400),
]
TEXTS = [
    *(
        "a",
        " be",
        "é",
        "漢",
        "🙂",
        "",
        " ",
        "\\n",
        "\\u0000",
        "\\u001b[31m",
        "\\u202etxt.exe",
        "\\ud800",
        "\\udc00\\ud800",
    ),
    *(
        "\\u2028",
        "\\u0085",
        "\u2028",
        "\u0085",
        "\x7f",
        "\x00",
        "\x1b]0;title\x07",
        "\x9b31m",
        "\\q",
        "\\",
        '\\"',
        '"',
        "\r",
    ),
    *(
        "</script><img src=x onerror=alert(1)>",
        "=cmd|' /C calc'!A0",
        "a,b;c\\td",
        "{{7*7}}",
        "%s%n",
        "x" * 300,
        "a\\u0301" * 50,
    ),
    *("data: ", "[DONE]", ": ", "\u200d", "\ufeff", "error", "stop"),
]
JUNK = [
    *(
        b"\r",
        b"\n",
        b"\n\n",
        b"\r\n\r\n",
        b"data:",
        b"data: [DONE]\n\n",
        b"\x00",
        b"\xff",
        b"\xfe\xff",
        b"\xed\xa0\x80",
        b"\xe2\x80",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b'"',
        b"\\",
        b": x\n\n",
        b"event: error\n",
        b"0\r\n\r\n",
        b"1\r\na\r\n",
        b"ffffffffffffffff\r\n",
        b"-1\r\n",
    ),
    *(
        b"8000000000000000\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"\x1f\x8b\x08\x00",
        b"\x15\x03\x01\x00\x02\x02\x28",
    ),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"[" * 3000,
        b'{"a":' * 1500,
        b"\n:" * 100,
        b"data:\n" * 100,
        b"9" * 50,
        b"\xef\xbb\xbf",
    ),
]
NUMBERS = st.one_of(st.sampled_from(["0", "0", "0", "1", "7"]), st.sampled_from(ABSURD), st.integers().map(str))
STRINGS = st.one_of(st.sampled_from(TEXTS), st.text(max_size=5)).map(lambda text: f'"{text}"')
VALUES = st.one_of(STRINGS, NUMBERS, st.sampled_from(["null", "{}", "[]", '[{"type":"text","text":"a"}]', "[[[[]]]]"]))


def _object(fields: list[str]) -> str:
    return f"{{{','.join(fields)}}}"


@st.composite
def deltas(draw: st.DrawFn) -> str:
    """Draw what a chunk says of one choice, as JSON."""
    fields = []
    names = ("content", "content", "content", "text", "text", "reasoning", "reasoning_content", "refusal", "role")
    for name in draw(st.lists(st.sampled_from([*names, "tool_calls", "function_call"]), max_size=3)):
        if name in ("tool_calls", "function_call"):
            call = draw(st.sampled_from(['{"name":"f","arguments":""}', "{}", "null", "5", '{"arguments":[[]]}']))
            shown = f'[{{"function":{call}}}]' if name == "tool_calls" else call
            value = draw(st.sampled_from([shown, shown, "[5]", "{}", "null"]))
        else:
            value = draw(st.one_of(STRINGS, STRINGS, STRINGS, VALUES))
        fields.append(f'"{name}":{value}')
    return _object(fields)


@st.composite
def choices(draw: st.DrawFn) -> str:
    """Draw one choice of a chunk, as JSON."""
    fields = [f'"index":{draw(NUMBERS)}'] if draw(st.integers(0, 4)) else []
    said = draw(deltas())
    fields += [f'"delta":{said}'] if draw(st.booleans()) else [said[1:-1]] if len(said) > 2 else []
    if not draw(st.integers(0, 3)):
        fields.append(
            f'"finish_reason":{draw(st.one_of(st.sampled_from(["null", TEXTS[-1].join(chr(34) * 2)]), VALUES))}'
        )
    if not draw(st.integers(0, 5)):
        ids = draw(st.lists(NUMBERS, max_size=4))
        fields.append(f'"token_ids":[{",".join(ids)}]')
    if not draw(st.integers(0, 9)):
        fields.append(f'"message":{draw(VALUES)}')
    return _object(fields)


@st.composite
def usages(draw: st.DrawFn) -> str:
    """Draw what a chunk says of tokens, as JSON."""
    fields = [
        f'"{name}":{draw(NUMBERS)}'
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        if draw(st.booleans())
    ]
    if draw(st.booleans()):
        cached = draw(NUMBERS.map(lambda number: _object([f'"cached_tokens":{number}'])))
        fields.append(f'"prompt_tokens_details":{draw(st.sampled_from([cached, cached, "null", "5"]))}')
    return _object(fields)


@st.composite
def chunks(draw: st.DrawFn) -> str:
    """Draw the data of an event, mostly a chunk of the dialect."""
    if not draw(st.integers(0, 15)):
        return draw(
            st.sampled_from(["[DONE]", " [DONE] ", "", " ", ":", "hello", "5", "[]", '"x"', "null", "{", "[" * 2000])
        )
    fields = []
    if draw(st.integers(0, 7)):
        fields.append(
            f'"choices":[{",".join(draw(st.lists(choices(), min_size=draw(st.integers(0, 1)), max_size=3)))}]'
        )
    if not draw(st.integers(0, 3)):
        fields.append(f'"usage":{draw(st.one_of(usages(), st.just("null"), VALUES))}')
    if not draw(st.integers(0, 9)):
        message = draw(st.one_of(VALUES, STRINGS.map(lambda text: f'{{"message":{text},"code":500}}')))
        fields.append(f'"error":{message}')
    if not draw(st.integers(0, 9)):
        fields.append(f'"object":{draw(VALUES)}')
    return _object(fields)


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """Draw an event, or something that looks like one."""
    kind = draw(st.integers(0, 19))
    if kind <= 6:
        return draw(st.sampled_from([piece for _, piece in REF]))
    if kind == 7:
        return draw(
            st.sampled_from([FINISH, DONE, ROLE, b": ping\n\n", b":\n", b"\n", b"id: 1\nretry: 5\n\n", b"foo\n\n"])
        )
    if kind == 8:
        return draw(st.one_of(st.sampled_from(JUNK), st.binary(max_size=20)))
    end = draw(st.sampled_from(["\n\n"] * 8 + ["\n", "\r\n\r\n", "\r\r", "\n\r\n", ""]))
    begin = draw(
        st.sampled_from(["data: "] * 8 + ["data:", "data", "event: error\ndata: ", ": c\ndata: ", "Data: ", ""])
    )
    return f"{begin}{draw(chunks())}{end}".encode("utf-8", "surrogatepass")


# How it may be wrapped

STATUSES = [
    *["HTTP/1.1 200 OK"] * 12,
    *("HTTP/1.0 200 OK", "HTTP/1.1 200 ", "HTTP/1.1 204 No Content", "HTTP/1.1 206 Partial", "HTTP/1.1 302 Found"),
    *(
        "HTTP/1.1 304 Not Modified",
        "HTTP/1.1 400 Bad Request",
        "HTTP/1.1 429 Slow",
        "HTTP/1.1 500 \x1b[31m",
        "HTTP/1.1 503 \xff\xfe",
    ),
    *(
        "HTTP/1.1 999 Odd",
        "HTTP/1.1 099 Low",
        "HTTP/1.1 000 None",
        "HTTP/1.1 101 Switching",
        "HTTP/1.1 20 Short",
        "HTTP/1.1 2000 Long",
    ),
    *(
        "HTTP/2 200",
        "HTTP/0.9 200 OK",
        "HTTP/9.9 200 OK",
        "ICY 200 OK",
        "<html>",
        "HTTP/1.1 -200 OK",
        "HTTP/1.1\x00200 OK",
    ),
]
HEADERS = [
    *(
        "Content-Type: text/event-stream",
        "Content-Type: \xff\xfe",
        "Content-Encoding: gzip",
        "Content-Encoding: \x9b31m",
    ),
    *(
        "Content-Encoding: br",
        "Content-Encoding: identity",
        "Connection: close",
        "Connection: keep-alive",
        "Connection: upgrade\r\nUpgrade: x",
    ),
    *(
        "X: " + "a" * 2000,
        "X:",
        ": x",
        "X\x00: a",
        "X: a\x00",
        "X: \x1b[0m",
        "X: a\r\n folded",
        "Transfer-Encoding: gzip",
        "Location: /x",
    ),
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked"),
]


@st.composite
def squeezed(draw: st.DrawFn, body: bytes) -> bytes:
    """Draw a way in which a proxy compresses a body, rightly or not."""
    wbits = draw(st.sampled_from([31, 31, 31, 15, -15]))
    points = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
    members = draw(st.booleans())
    press, result = zlib.compressobj(wbits=wbits), b""
    for start, end in pairwise([0, *points, len(body)]):
        result += press.compress(body[start:end])
        if members:
            result += press.flush()
            press = zlib.compressobj(wbits=wbits)
        else:
            result += press.flush(zlib.Z_SYNC_FLUSH)
    result += press.flush()
    cut = draw(st.sampled_from([None, None, None, -1, -8, len(result) // 2]))
    return result[:cut] + draw(st.sampled_from([b"", b"", b"", b"\0\0\0", b"garbage"]))


@st.composite
def payloads(draw: st.DrawFn, body: bytes) -> tuple[list[str], bytes]:
    """Draw the framing of a body, rightly or not: its headers and its bytes."""
    how = draw(st.sampled_from(["chunked"] * 6 + ["length"] * 2 + ["close"] * 2 + ["long", "short"]))
    if how == "chunked":
        points = sorted(draw(st.lists(st.integers(0, len(body)), max_size=6)))
        if draw(st.booleans()):
            points = [i + 2 for i in range(len(body)) if body[i : i + 2] == b"\n\n"]
        pieces = [body[start:end] for start, end in pairwise([0, *points, len(body)]) if end > start]
        extension = draw(st.sampled_from([b"", b"", b"", b";a=b", b';a="data: x"', b" "]))
        wire = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
        end = draw(
            st.sampled_from(
                [LAST, LAST, LAST, LAST, b"", b"0\r\n", b"0\r\nX: y\r\n\r\n", b"00;a\r\n\r\n", b"-0\r\n\r\n"]
            )
        )
        return ["Transfer-Encoding: chunked"], wire + end
    length = len(body) + {"long": 5, "short": -5}.get(how, 0)
    return [] if how == "close" else [f"Content-Length: {length}"], body


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """Draw all bytes of an answer."""
    body = b"".join(draw(st.lists(events(), max_size=12)))
    body = draw(st.sampled_from([body, body, body + WHOLE, WHOLE + body]))
    if not draw(st.integers(0, 3)):
        return wrapped(changed(draw(st.sampled_from(BODIES)), draw(RANDOMS)), draw(RANDOMS))
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=3)) if not draw(st.integers(0, 2)) else []
    if not draw(st.integers(0, 5)):
        body = draw(squeezed(body))
        headers.append(
            draw(st.sampled_from(["Content-Encoding: gzip", "content-encoding: deflate", "Content-Encoding: GZIP"]))
        )
    framing, wire = draw(payloads(body))
    end = draw(st.sampled_from(["\r\n"] * 12 + ["\n"]))
    interim = draw(
        st.sampled_from([b""] * 12 + [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" * 3])
    )
    head = "".join(f"{line}{end}" for line in (draw(st.sampled_from(STATUSES)), *framing, *headers, ""))
    behind = draw(
        st.sampled_from([b""] * 8 + [b"\r\n", b"junk", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", HEAD])
    )
    return interim + head.encode("latin-1") + wire + behind


def changed(data: bytes, random: Random) -> bytes:
    """Return bytes with some flipped, left out, put in, repeated, cut off, spliced with others, or another value."""
    for _ in range(random.choice([1, 1, 2, 3, 5])):
        start = random.randint(0, len(data))
        end = min(len(data), start + random.choice([0, 1, 1, 2, 8, 50, 1000]))
        match random.choice(["flip", "flip", "put", "put", "drop", "repeat", "cut", "splice", *["value"] * 6]):
            case "flip" if start < end:
                data = data[:start] + bytes([data[start] ^ (1 << random.randrange(8))]) + data[start + 1 :]
            case "put":
                data = data[:start] + random.choice([*JUNK, random.randbytes(random.randrange(8))]) + data[end:]
            case "drop":
                data = data[:start] + data[end:]
            case "repeat":
                data = data[:end] + data[start:end] * random.choice([1, 2, 30]) + data[end:]
            case "cut":
                data = data[:start]
            case "value":
                value = random.choice([*ABSURD, *(f'"{text}"' for text in TEXTS)]).encode("utf-8", "surrogatepass")
                places = [found.span(1) for found in re.finditer(rb'":\s*(-?[0-9][0-9.]*|"[^"]*"|null)', data)]
                start, end = random.choice(places or [(start, start)])
                data = data[:start] + value + data[end:]
            case "splice":
                other = random.choice(CAPTURES)
                data = data[:start] + other[random.randint(0, len(other)) :]
    return data


def wrapped(body: bytes, random: Random) -> bytes:
    """Return an answer that is well formed, whatever its body is."""
    match random.randrange(3):
        case 0:
            return HEAD + b"".join(framed(event) for event in re.split(rb"(?<=\n\n)", body) if event) + LAST
        case 1:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        case _:
            return b"HTTP/1.1 200 OK\r\n\r\n" + body


RANDOMS = st.integers(0, 2**64 - 1).map(Random)
ANSWERS = st.one_of(
    responses(),
    responses(),
    st.builds(changed, responses(), RANDOMS),
    st.builds(changed, st.sampled_from(CAPTURES), RANDOMS),
    st.binary(max_size=200),
)


def cut(data: bytes, random: Random) -> list[bytes]:
    """Return the reads by which bytes may arrive: whole, byte by byte, line by line, or anyhow."""
    how = random.randrange(5)
    points: Iterable[int] = ()
    if how == 1 and len(data) <= BYTEWISE:
        points = range(1, len(data))
    elif how in (2, 3):
        points = [line.end() for line in re.finditer(rb"\r\n", data)]
    elif how:
        points = sorted(random.choices(range(len(data) + 1), k=random.randint(1, 10)))
    return [data[start:end] for start, end in pairwise([0, *points, len(data)]) if end > start]


# Stories


@dataclass(frozen=True, slots=True)
class Request:
    """A request and the reads that are its answer; the recorder ticks after so many of them."""

    reads: list[bytes]
    again: list[bytes]
    """The same bytes in other reads."""
    endpoint: str = "chat"
    choices: int = 1
    ticks: tuple[int, ...] = ()


Story = list[Request]


def request(data: bytes, random: Random) -> Request:
    """Return a request to which these bytes are the answer."""
    ticks = tuple(random.choices(range(1, 30), k=random.randrange(3)))
    endpoint, number = random.choice(["chat", "completions"]), random.choice([1, 1, 1, 2])
    return Request(cut(data, random), cut(data, random), endpoint, number, ticks)


STORIES = st.lists(st.builds(request, ANSWERS, RANDOMS), min_size=1, max_size=8)


def mutants(story: Story, random: Random) -> Iterator[Story]:
    """Yield stories like this one for ever, with other bytes in every answer."""
    answers = [b"".join(told.reads) for told in story]
    while True:
        bodies = [wrapped(changed(random.choice(BODIES), random), random) for _ in answers]
        whole = [changed(data, random) for data in answers]
        yield [request(random.choice(pair), random) for pair in zip(whole, bodies, strict=True)]


def saved(story: Story) -> str:
    """Return a story as a text that `loaded` reads."""
    return repr([(r.reads, r.again, r.endpoint, r.choices, r.ticks) for r in story])


def loaded(text: str) -> Story:
    """Return a story that was saved."""
    return [Request(*values) for values in ast.literal_eval(text)]


# What must hold


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def live(story: Story, *, read: bool = True) -> list[Timeline]:
    """Live through a story, and check all that must hold whatever the server said; everyone may `read` what remains."""
    logged, root = _Logged(), logging.getLogger()
    level = root.level
    root.addHandler(logged)
    root.setLevel(logging.DEBUG)
    try:
        timelines = _live(story, read=read)
    finally:
        root.removeHandler(logged)
        root.setLevel(level)
    assert not logged.records
    return timelines


def _live(story: Story, *, read: bool) -> list[Timeline]:
    start_ns = time.monotonic_ns()
    recorder = Recorder("run", 0, "worker", WINDOW_NS, start_ns)
    master = recording.Recording("run", 0, WINDOW_NS)
    timelines = []
    for number, request in enumerate(story):
        timeline = Timeline(
            *(f"request-{number}", "short", request.endpoint, time.monotonic_ns()), choices_asked=request.choices
        )
        timeline.answer = Answer() if len(request.ticks) == 1 else None
        recorder.begin(timeline)
        timeline, wire = ask(request.reads, timeline, _ticking(recorder, master, request.ticks))
        check(timeline, wire)
        check_cut(request, timeline)
        recorder.end(timeline)
        timelines.append(timeline)
    now_ns = time.monotonic_ns()
    recorder.stop(now_ns, master.grid.count(now_ns - start_ns))
    recorder.finish(time.monotonic_ns())
    _send(recorder, master)
    master.length_ns = now_ns - start_ns
    check_recording(master, timelines)
    if read:
        check_readers(master)
        check_rows(timelines)
    return timelines


def _ticking(recorder: Recorder, master: recording.Recording, ticks: tuple[int, ...]) -> Callable[[], None]:
    reads = 0

    def on_read() -> None:
        nonlocal reads
        reads += 1
        if reads in ticks:
            now_ns = time.monotonic_ns()
            recorder.tick(now_ns, swept_ns=now_ns, unparsed_ns=None, users=1, away_ns=0)
            _send(recorder, master)

    return on_read


def _send(recorder: Recorder, master: recording.Recording) -> None:
    report = recorder.report(time.monotonic_ns())
    assert master.merge(recording.decode_report(recording.encode_report(report)))
    recorder.acknowledge(report.seq)


def check(timeline: Timeline, wire: Wire) -> None:
    """One outcome of the closed set, numbers that fit each other, a message that harms nobody."""
    assert timeline.outcome in set(Outcome) - {Outcome.CANCELLED}
    assert timeline.response_bytes == wire.bytes
    assert wire.closed or wire.idle
    assert 0 <= timeline.status <= 999
    instants = [timeline.called_ns, timeline.sent_ns, timeline.first_ns, timeline.last_ns, timeline.done_ns]
    known = [at_ns for at_ns in instants if at_ns is not None]
    assert known == sorted(known)
    assert timeline.done_ns is not None
    assert set(timeline.choices) | set(timeline.finish_reasons) <= set(range(api.CHOICES))
    assert timeline.events == sum(choice.events for choice in timeline.choices.values()) >= 0
    assert all(choice.tokens >= 0 and choice.first_ns <= choice.last_ns for choice in timeline.choices.values())
    for number in (timeline.input_tokens, timeline.completion_tokens, timeline.cached_tokens):
        assert number is None or 0 <= number < 2**31
    assert timeline.output_tokens >= 0
    assert (timeline.gaps_ns() >= 0).all()
    assert all(tpot_ns >= 0 for tpot_ns in timeline.tpots_ns())
    assert (timeline.e2el_ns is None) == (timeline.outcome is not Outcome.OK)
    assert (timeline.ttft_ns is None) == (not timeline.events)
    if timeline.outcome is Outcome.OK:
        assert (timeline.status, timeline.message) == (200, "")
    else:
        assert timeline.message or timeline.status not in (0, 200) or timeline.outcome is Outcome.NOT_STREAMED
    for text, limit in ((timeline.message, MESSAGE_CHARS), *((text, 40) for text in timeline.finish_reasons.values())):
        assert len(text) <= limit
        assert text.isprintable()


def check_cut(request: Request, timeline: Timeline) -> None:
    """How bytes are cut changes nothing; but what came before a fault in compressed ones may be lost with it."""
    again, _ = ask(request.again, Timeline("again", "short", request.endpoint, 0, choices_asked=request.choices))
    outcomes = [(asked.outcome, asked.status) for asked in (again, timeline)]
    if b"content-encoding" not in b"".join(request.reads).lower():
        assert (outcomes[0], numbers(again)) == (outcomes[1], numbers(timeline))
    elif (Outcome.MALFORMED, 200) not in outcomes:
        assert outcomes[0] == outcomes[1]


def numbers(timeline: Timeline) -> object:
    """Return all that is counted of a request."""
    events = {index: (choice.events, choice.tokens) for index, choice in timeline.choices.items()}
    usage = (timeline.input_tokens, timeline.completion_tokens, timeline.cached_tokens)
    # How much of a body that is no event stream is quoted, and where a byte is wrong, depends on what came together.
    quoted = timeline.outcome is Outcome.NOT_STREAMED or "codec" in timeline.message
    message = "" if quoted else timeline.message
    # Comments count when they come, whether what stands before them in the same read is taken or not.
    comments = 0 if timeline.outcome is Outcome.MALFORMED else timeline.comments
    return (events, usage, timeline.finish_reasons, timeline.heartbeats, comments, message)


def check_recording(master: recording.Recording, timelines: list[Timeline]) -> None:
    """The recording holds each request once."""
    cells = list(master.totals.values())
    counters = [counter for cell in cells for counter in cell.counters.items()]
    assert all(number >= 0 for _, number in counters)
    ended = [number for name, number in counters if name.startswith("outcome|")]
    assert sum(ended) == len(timelines)
    assert sum(number for name, number in counters if name == "token_events") == sum(t.events for t in timelines)
    for cell in cells:
        for histogram in cell.histograms.values():
            assert histogram.count == histogram.zeros + int(histogram.counts.sum())
            assert histogram.zeros >= 0


def check_readers(master: recording.Recording) -> None:
    """Report, run file and metrics take what the server said, and it does them no harm."""
    run = results.Run.of(master, Meta(name="story", run="run", parts=["short"]))
    shown = report.text(run, full=True)
    assert all(line.isprintable() and width_of(line) <= COLUMNS for line in shown.split("\n"))
    kept = msgspec.json.decode(msgspec.json.encode(master.save()))
    assert results.Run.of(recording.load(kept), run.meta).summary == run.summary
    registry = CollectorRegistry()
    snapshot = Snapshot(
        recording=master, running=True, users=1, workers=1, live_workers=("worker",), limits=run.meta.generator_limits
    )
    registry.register(Exporter(lambda: snapshot))
    samples = [
        s for family in text_string_to_metric_families(generate_latest(registry).decode()) for s in family.samples
    ]
    labels = {s.labels["outcome"] for s in samples if "outcome" in s.labels}
    assert labels <= set(Outcome)
    assert all(s.value >= 0 for s in samples)


def check_rows(timelines: list[Timeline]) -> None:
    """The log of requests has a row for each, as JSON and as a table in which nothing is a formula."""
    encode = msgspec.json.encode
    log = requestlog.RequestLog("worker", 0, texts=True)
    lines = [log._line(timeline, 0, msgspec.Raw(b"null")) for timeline in timelines]
    rows = [msgspec.json.decode(line, type=requestlog.Row) for line in lines]
    assert [encode(row) + b"\n" for row in rows] == lines
    file = io.BytesIO()
    requestlog.write(lines, file, "csv", texts=True)
    head, *table = csv.reader(io.StringIO(file.getvalue().decode(), newline=""))
    assert [len(cells) for cells in table] == [len(head)] * len(timelines)
    texts = ("message", "finish_reason", *requestlog.TEXTS)
    shown = [cell for cells in table for name, cell in zip(head, cells, strict=True) if name in texts]
    assert not [cell for cell in shown if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))]


def endless(first: bytes, piece: bytes, size: int) -> Iterator[bytes]:
    """Yield the same bytes again and again, so much that they could not be held."""
    yield first
    for _ in range(size // len(piece)):
        yield piece
