"""Server-sent events, in any cut: what browsers would see, and what servers meant."""

import json
from collections.abc import Iterable

import pytest
from cutting import cut, read_in_every_cut, ways
from hypothesis import example, given
from hypothesis import strategies as st
from sseclient import SSEClient

from vllm_locust import sse
from vllm_locust.sse import EventStream, EventTooLongError, NotEventStreamError


def chunk(delta: object, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [choice]}, ensure_ascii=False)


ROLE, FIN = chunk({"role": "assistant", "content": ""}), chunk({}, "stop")
USE = '{"id":"c1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4,"total_tokens":11}}'
TOKENS = [chunk({"content": text}) for text in ("Al", "pha", " be", "ta")]
REF = [ROLE, *TOKENS, FIN, USE, "[DONE]"]


def body(events: Iterable[str], field: str = "data: ") -> bytes:
    return "".join(f"{field}{data}\n\n" for data in events).encode()


def named_events(pieces: Iterable[bytes]) -> list[tuple[str, str]]:
    return list(EventStream(pieces))


def events_of(data: bytes) -> list[str]:
    """Return the data of all events, after making sure that no cut changes them."""
    return [text for _, text in read_in_every_cut(named_events, data)]


def comments_of(pieces: Iterable[bytes]) -> int:
    stream = EventStream(pieces)
    for _ in stream:
        pass
    return stream.comments


def text_of(events: list[str]) -> str:
    """Return the answer that the events carry."""
    chunks = [json.loads(data) for data in events if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"])


def test_the_reference_stream_has_its_events() -> None:
    assert events_of(body(REF)) == REF


def test_case_1_comments_are_no_events_and_are_counted_wherever_they_stand() -> None:
    glued = body(REF[:2]) + b": ping\n" + body(REF[2:])
    data = b": QUEUED\n\n" + b":\n\n" + b": ping\n\n" + glued
    assert events_of(data) == REF
    assert {comments_of(pieces) for pieces in ways(data)} == {4}


def test_case_3_a_heartbeat_in_disguise_is_an_event_whose_data_shows_it() -> None:
    data = body(REF[:1]) + b"data: : keepalive\n\ndata:\n\ndata: \n\n" + body(REF[1:])
    assert events_of(data) == [REF[0], ": keepalive", "", "", *REF[1:]]
    assert comments_of([data]) == 0


def test_case_4_the_space_after_the_colon_may_be_missing_and_at_most_one_is_taken() -> None:
    assert events_of(body(REF, "data:")) == REF
    assert events_of(b"data:  two\n\n") == [" two"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_case_5_every_kind_of_line_end_and_a_byte_order_mark_are_understood(mark: bytes, end: bytes) -> None:
    data = mark + body(REF).replace(b"\n", end)
    assert events_of(data) == REF
    # A flush between the two halves of a line end makes no second one.
    halves = cut(data, [i + 1 for i, byte in enumerate(data) if byte == 13])
    assert [text for _, text in named_events(halves)] == REF
    assert [text for _, text in named_events(p for half in halves for p in (half, b""))] == REF


def test_case_5_line_ends_may_be_mixed() -> None:
    assert events_of(b"data: a\n\r\ndata: b\r\n\ndata: c\r\rdata: d\n\ndata: e\r\n\r\n") == ["a", "b", "c", "d", "e"]


def test_case_7_no_character_space_or_blank_line_is_lost_at_any_boundary() -> None:
    texts = ["é", "漢", " 🙂", "  x"]
    events = [ROLE, *(chunk({"content": text}) for text in texts), FIN, USE, "[DONE]"]
    seen = events_of(body(events))
    assert seen == events
    assert text_of(seen) == "é漢 🙂  x"
    between_the_ends = [i + 1 for i in range(len(body(events)) - 1) if body(events)[i : i + 2] == b"\n\n"]
    assert [text for _, text in named_events(cut(body(events), between_the_ends))] == events


def test_case_7_a_line_may_be_very_long() -> None:
    long = chunk({"content": "a", "logprobs": "x" * 300_000})
    data = body([ROLE, long, "[DONE]"])
    for pieces in ([data], cut(data, range(0, len(data), 1000)), cut(data, range(7, len(data), 65_536))):
        assert [text for _, text in named_events(pieces)] == [ROLE, long, "[DONE]"]


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_case_8_only_line_feed_and_carriage_return_end_a_line(odd: str) -> None:
    events = [ROLE, json.dumps({"content": "a"})[:-2] + odd + 'b"}', "[DONE]"]
    assert events_of(body(events)) == events


def test_case_9_several_data_lines_are_one_event_and_other_fields_are_passed_over() -> None:
    split = (
        b'event: message\nid: 9\nretry: 3000\ndata: {"id":"c1","choices":[{"index":0,\n'
        b'data: "delta":{"content":"pha"},"finish_reason":null}]}\n\n'
    )
    seen = events_of(body(REF[:2]) + split + body(REF[3:]))
    assert "\n" in seen[2]
    assert (len(seen), text_of(seen)) == (len(REF), "Alpha beta")


def test_case_9_unknown_fields_and_events_without_data_are_passed_over() -> None:
    assert events_of(b"event: ping\n\nid: 5\n\nfoo: bar\ndata\ndata: a\n\n") == ["\na"]


def test_an_event_has_the_name_that_it_was_given() -> None:
    data = b'event: error\ndata: {"message":"bad input"}\n\ndata: a\n\n'
    assert read_in_every_cut(named_events, data) == [("error", '{"message":"bad input"}'), ("message", "a")]


def test_case_14_a_field_named_error_is_an_event_of_that_name() -> None:
    """Sources: ggml-org/llama.cpp#14566, #16109."""
    error = b'error: {"code":500,"message":"no slot"}\n\n'
    failed = ("error", '{"code":500,"message":"no slot"}')
    assert read_in_every_cut(named_events, error + b"data: [DONE]\n\n") == [failed, ("message", "[DONE]")]
    assert read_in_every_cut(named_events, b"data: a\n\n" + error) == [("message", "a"), failed]
    assert read_in_every_cut(named_events, b'data: {"a":\ndata: "error: b"}\n\n') == [
        ("message", '{"a":\n"error: b"}'),
    ]


def test_case_10_the_last_event_counts_without_its_blank_line_or_its_newline() -> None:
    assert [text for _, text in named_events([body(REF)[:-2]])] == REF
    assert [text for _, text in named_events([body(REF[:-1])[:-1]])] == REF[:-1]
    for pieces in ways(body(REF)[:-2]):
        assert [text for _, text in named_events(pieces)] == REF


def test_case_10_any_cut_off_stream_gives_the_events_that_came_whole_and_no_error_of_its_own() -> None:
    texts = [ROLE, chunk({"content": "漢🙂"}), "[DONE]"]
    for data in (body(texts), b"\xef\xbb\xbf" + body(texts).replace(b"\n", b"\r\n")):
        for end in range(len(data)):
            whole = sum(data[:end].replace(b"\r", b"").count(t.encode() + b"\n\n") for t in texts)
            for pieces in ([data[:end]], cut(data[:end], range(1, end))):
                assert [text for _, text in named_events(pieces)][:whole] == texts[:whole]


@pytest.mark.parametrize(
    "data",
    [
        b'{"id":"c1","object":"chat.completion","choices":[]}',
        b'{"id":"c1","object":"chat.completion","choices":[]}\n\ndata: [DONE]\n\n',
        b"<html><h1>login</h1>",
        b"\n\n<html>",
        b"\xef\xbb\xbf[]",
        b"x",
        b"Internal Server Error",
        b"dates are not data",
    ],
)
def test_case_27_a_body_that_begins_like_no_event_stream_is_told_apart_in_any_cut(data: bytes) -> None:
    shown = data.removeprefix(b"\xef\xbb\xbf").lstrip().decode()
    for pieces in ways(data):
        with pytest.raises(NotEventStreamError) as refused:
            named_events(pieces)
        # With the first bytes of a body, what was known by then; never more than a beginning.
        assert str(refused.value)
        assert shown.startswith(str(refused.value))


def test_case_27_of_a_long_page_only_the_beginning_is_kept() -> None:
    with pytest.raises(NotEventStreamError) as refused:
        named_events([b"<html>" + b"x" * 20_000])
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b": only a comment", b":\n\n", b"retry: 5\n\n"]
)
def test_case_14_a_stream_without_an_event_is_an_event_stream_all_the_same(data: bytes) -> None:
    assert not any(named_events(pieces) for pieces in ways(data, 5))


def test_bytes_that_are_no_utf_8_are_an_error_and_not_replaced() -> None:
    with pytest.raises(UnicodeDecodeError):
        named_events([b"data: caf\xe9\n\n", b"data: b\n\n"])


lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)


@given(
    events=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=5),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    points=st.lists(st.integers(0, 10**6), max_size=20),
    comments=st.integers(0, 3),
)
@example(events=[["a", "b"]], end="\r\n", points=[8], comments=0)  # between the halves of a line end
@example(events=[["a", "b"]], end="\r\n", points=[8, 8], comments=0)
@example(events=[], end="\r\n", points=[4, 5], comments=2)
def test_any_text_comes_back_from_any_cut_with_any_line_end(
    events: list[list[str]], end: str, points: list[int], comments: int
) -> None:
    text = f": c{end}" * comments + "".join("".join(f"data: {line}{end}" for line in event) + end for event in events)
    data = text.encode()
    pieces = cut(data, (point % (len(data) + 1) for point in points))
    stream = EventStream(pieces)
    assert [seen for _, seen in stream] == ["\n".join(event) for event in events]
    assert stream.comments == comments


@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=6))
def test_any_bytes_are_read_to_the_same_end_in_any_cut(data: bytes, points: list[int]) -> None:
    """What comes out is events, or one of the two errors that are the server's."""

    def outcome(pieces: list[bytes]) -> object:
        try:
            return named_events(pieces)
        except NotEventStreamError:
            return NotEventStreamError
        except UnicodeDecodeError:
            return UnicodeDecodeError

    data = b"data: " + data
    assert outcome(cut(data, (min(point, len(data)) for point in points))) == outcome([data])


LINES = st.sampled_from(
    [
        *(
            "data: a",
            "data:",
            "data",
            "data:  b",
            "data: é漢",
            "event: error",
            "event:",
            "event",
            "id: 1",
            "retry: x",
            ": c",
            ":",
        ),
        *(
            "",
            "",
            "",
            " ",
            "x",
            "x: y",
            " data: a",
            "data : a",
            "database: a",
            "events: a",
            "Data: a",
            "data: \x00\u2028\x0b",
        ),
    ]
)


@given(st.lists(LINES, max_size=12))
def test_an_event_is_the_same_whether_it_has_many_lines_or_few(lines: list[str]) -> None:
    block = "\n".join(lines).encode()
    few = [(event.event, event.data) for event in SSEClient(iter((block,))).events()]
    assert list(sse._joined(block)) == few


def test_an_event_has_a_largest_size() -> None:
    beginning, rest = b"data: ", b"x" * (sse.EVENT_BYTES - 6)
    assert len(list(EventStream([beginning, rest, b"\n\n"]))) == 1
    with pytest.raises(EventTooLongError, match="more than 16,777,216 bytes"):
        list(EventStream([beginning, rest, b"x"]))
