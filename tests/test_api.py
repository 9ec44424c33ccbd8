"""What events mean: token events, errors in every usual shape, and real captures in any cut."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from captures import EXPECTED, STREAMS
from cutting import cut, ways
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust.api import PATHS, Delta, MalformedError, Part, Usage, decode, encode_body, error_message
from vllm_locust.response import Response
from vllm_locust.sse import EventStream

LARGE = 8192
CUTS = st.lists(st.integers(0, LARGE - 1), max_size=40)


def chat(delta: Any, **choice: Any) -> str:
    return json.dumps({"id": "c1", "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]})


def completion(**choice: Any) -> str:
    return json.dumps({"id": "c1", "choices": [{"index": 0, **choice}]})


def one(data: str) -> Part:
    (part,) = decode(data).parts
    return part


# Token events


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": " "},
        {"role": "assistant", "content": "a"},
        {"content": [{"type": "text", "text": "a"}]},
        {"reasoning": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a", "reasoning_content": "a", "content": None},
        {"reasoning_details": [{"type": "reasoning.text", "text": "a"}]},
        {"role": "assistant", "content": "", "reasoning_details": [{"type": "reasoning.summary", "summary": "a"}]},
        {"refusal": "no"},
        {"audio": {"id": "a", "transcript": "a"}},
        {"role": "assistant", "content": None, "audio": {"id": "a", "data": "AAAA"}},
        {"role": "assistant", "tool_calls": {"index": 0, "function": {"name": None, "arguments": "{"}}},
        {"tool_calls": [{"index": 0, "function": {"name": "get", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":1}'}}]},
        {"function_call": {"arguments": "{"}},
        {"content": ""},
    ],
    ids=json.dumps,
)
def test_a_delta_with_something_to_show_or_text_held_back_is_a_token_event(delta: Any) -> None:
    assert one(chat(delta)).token


@pytest.mark.parametrize(
    "delta",
    [
        {},
        None,
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": None, "content": None},
        {"content": None},
        {"reasoning": "", "content": None},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA"}]},
        {"reasoning_details": []},
        {"reasoning_details": "?"},
        {"audio": {"id": "a", "expires_at": 5}},
        {"audio": None},
        {"tool_calls": {}},
        {"refusal": ""},
        {"tool_calls": []},
        {"tool_calls": [{"index": 0, "function": {"name": "", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": None}]},
        {"function_call": {}},
        {"something_new": "a"},
    ],
    ids=json.dumps,
)
def test_a_delta_with_nothing_in_it_is_no_token_event(delta: Any) -> None:
    assert not one(chat(delta)).token


@pytest.mark.parametrize(("text", "token"), [("a", True), ("", True), (None, False)])
def test_a_text_is_a_token_event_even_where_it_is_held_back(text: str | None, *, token: bool) -> None:
    assert one(completion(text=text)).token == token


def test_a_text_in_two_fields_is_one_event_of_its_choice() -> None:
    assert len(decode(chat({"reasoning": "a", "reasoning_content": "a"})).parts) == 1


def test_token_ids_make_a_token_event_whatever_the_text() -> None:
    assert one(chat({"role": "assistant", "content": ""}, token_ids=[5])) == Part(
        choice=0, token=True, reasoning=False, content=False, finish_reason=None, token_ids=1
    )
    assert one(completion(text=None, token_ids=[5, 6, 7])).token_ids == 3
    assert not one(chat({}, token_ids=[])).token


def test_case_17_chunks_without_choices_or_delta_say_nothing() -> None:
    for data in ('{"id":"","choices":[],"prompt_filter_results":[]}', '{"choices":null}', "{}"):
        assert decode(data) == Delta([], None, None)
    for data in (
        '{"choices":[{"index":0,"delta":null}]}',
        chat({"role": None, "content": None}),
        '{"id":"","choices":[{"index":0,"finish_reason":null,"content_filter_offsets":{}}]}',
    ):
        assert not one(data).token


def test_case_19_the_role_chunk_is_no_token_event_in_any_of_its_forms() -> None:
    for content in ({"content": ""}, {"content": None}, {}):
        assert not one(chat({"role": "assistant", **content})).token


def test_case_21_reasoning_and_content_are_told_apart() -> None:
    reasoning, content = one(chat({"reasoning_content": "a"})), one(chat({"content": "a"}))
    assert (reasoning.token, reasoning.reasoning, reasoning.content) == (True, True, False)
    assert (content.token, content.reasoning, content.content) == (True, False, True)


def test_case_22_tool_calls_are_token_events_and_neither_reasoning_nor_content() -> None:
    call = {"index": 0, "id": "k", "type": "function", "function": {"name": "get", "arguments": ""}}
    assert one(chat({"tool_calls": [call]})) == Part(
        choice=0, token=True, reasoning=False, content=False, finish_reason=None, token_ids=0
    )


def test_case_23_the_last_text_may_come_with_the_finish_reason() -> None:
    for data in (chat({"content": "Yes"}, finish_reason="length"), completion(text="Yes", finish_reason="length")):
        part = one(data)
        assert (part.token, part.content, part.finish_reason) == (True, True, "length")


def test_case_34_a_finish_chunk_without_text_is_no_token_event() -> None:
    part = one(completion(finish_reason="length"))
    assert (part.token, part.finish_reason) == (False, "length")


def test_case_11_an_empty_finish_reason_is_none() -> None:
    """TGI's completions have one in every event but the last."""
    for data in (chat({"content": "a"}, finish_reason=""), completion(text="a", finish_reason="")):
        assert (one(data).token, one(data).finish_reason) == (True, None)


def test_case_26_choices_keep_their_index() -> None:
    data = json.dumps({"choices": [{"index": 1, "delta": {"content": "b"}}, {"index": 0, "delta": {}}]})
    assert [(part.choice, part.token) for part in decode(data).parts] == [(1, True), (0, False)]


def test_case_16_usage_comes_with_or_without_choices() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    for choices in ([], [{"index": 0, "delta": {}}], None):
        found = decode(json.dumps({"choices": choices, "usage": usage})).usage
        assert found is not None
        assert (found.prompt_tokens, found.completion_tokens) == (7, 4)
        assert found.prompt_tokens_details is not None
        assert found.prompt_tokens_details.cached_tokens == 5
    assert decode('{"choices":[],"usage":null}').usage is None
    assert decode('{"usage":{"prompt_tokens_details":null}}').usage == Usage()


# Errors in the stream


@pytest.mark.parametrize(
    ("data", "event", "message"),
    [
        (
            '{"error":{"message":"engine stopped","type":"InternalServerError","code":500}}',
            "message",
            "code 500: engine stopped",
        ),
        ('{"error":{"message":"engine stopped","code":null}}', "message", "engine stopped"),
        ('{"error":"too busy","error_type":"overloaded"}', "message", "overloaded: too busy"),
        ('{"message":"bad input"}', "error", "bad input"),
        ('{"object":"error","message":"too long","code":400}', "message", "code 400: too long"),
        ('{ "object" : "error" , "message" : "too long" }', "message", "too long"),
        ('{"error":{"code":"context_length_exceeded"}}', "message", '{"error":{"code":"context_length_exceeded"}}'),
        ('{"error":{"message":"a","code":"context_length_exceeded"}}', "message", "context_length_exceeded: a"),
        ('{"error":{"message":"a","type":"None","param":"None","code":"408"}}', "message", "code 408: a"),
        ('{"error":{"message":"a","http_status_code":422}}', "message", "code 422: a"),
        ('{"error":{"message":"a","type":"api_error","param":null,"code":null}}', "message", "api_error: a"),
        ('{"type":"error","error":{"type":"overloaded_error","message":"a"}}', "message", "overloaded_error: a"),
        ('{"error":{"message":"a","code":0,"type":""}}', "message", "code 0: a"),
        ('{"error":{"message":"a","code":{"b":1},"type":["c"]}}', "message", "a"),
        ('{"error":{"message":"a","type":"' + "x" * 100 + '"}}', "message", "a"),
        ('{"error":"a","choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}]}', "message", "a"),
        ('{"code":400,"message":"a","type":"invalid_request_error"}', "error", "code 400: a"),
        ('{"detail":"gone"}', "error", "gone"),
        ("gone away", "error", "gone away"),
        ("[1,2]", "error", "[1,2]"),
    ],
)
def test_case_13_and_14_an_error_is_known_in_every_usual_shape(data: str, event: str, message: str) -> None:
    found = decode(data, event)
    assert (found.parts, found.error) == ([], message)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_case_13_a_choice_may_say_that_it_ended_in_an_error(reason: str) -> None:
    for nothing in ({}, {"content": ""}, {"content": None}):
        found = decode(chat(nothing, finish_reason=reason))
        assert (found.parts, found.error) == ([], f"finish_reason is {reason}")
    assert one(chat({"content": "a"}, finish_reason=reason)).token


@pytest.mark.parametrize(
    ("error", "message"),
    [({"code": 502, "message": "a"}, "code 502: a"), ("a", "a"), ({"code": 502}, '{"code": 502}'), (["a"], '["a"]')],
    ids=json.dumps,
)
def test_case_13_a_choice_may_carry_its_error(error: Any, message: str) -> None:
    assert decode(chat({"content": ""}, error=error)).error == message
    for nothing in (None, {}, ""):
        assert decode(chat({"content": "a"}, error=nothing)).error is None
    nested = '{"choices":[{"index":0,"error":' + "[" * 500 + "]" * 500 + "}]}"
    assert decode(nested).error == "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    "data",
    [
        *('{"error":null,"choices":[]}', '{"message":"hello"}', '{"object":"x"}', '{"object":"error "}'),
        *('{"object":1e999}', '{"object":[-1e999]}', '{"object":1' + "0" * 5000 + "}"),  # numbers that no decoder takes
    ],
)
def test_what_only_looks_like_an_error_is_none(data: str) -> None:
    assert decode(data).error is None


@pytest.mark.parametrize(
    "data",
    [
        '{"choi',
        "hello",
        "",
        "5",
        "null",
        "[]",
        '{"choices":5}',
        '{"choices":[5]}',
        '{"choices":[{"delta":"a"}]}',
        '{"usage":5}',
        '{"choices":[{"delta":{"content":5}}]}',
        "[" * 100_000,
        '{"error":' * 100_000,
    ],
    ids=lambda data: data[:30],
)
def test_case_3_anything_else_is_malformed_with_a_short_snippet(data: str) -> None:
    with pytest.raises(MalformedError) as refused:
        decode(data)
    assert len(str(refused.value)) < 400
    assert repr(data[:20])[1:-1] in str(refused.value)


KEYS = [
    *("choices", "delta", "content", "role", "error", "usage", "object", "index", "text", "message"),
    *("tool_calls", "function", "function_call", "arguments", "token_ids", "code", "finish_reason"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=400)
@given(st.one_of(st.text(), json_values.map(json.dumps)), st.sampled_from(["message", "error", "ping"]))
def test_decoding_any_text_gives_a_delta_or_says_that_it_is_malformed(data: str, event: str) -> None:
    try:
        found = decode(data, event)
    except MalformedError:
        assert event != "error"
    else:
        assert found.error is None or isinstance(found.error, str)
        assert all(isinstance(part.token, bool) for part in found.parts)


@given(
    content=st.none() | st.text(max_size=3),
    role=st.none() | st.just("assistant"),
    reasoning=st.none() | st.text(max_size=3),
    ids=st.none() | st.lists(st.integers(0, 9), max_size=2),
)
def test_a_token_event_is_what_the_rule_says(
    content: str | None, role: str | None, reasoning: str | None, ids: list[int] | None
) -> None:
    expected = bool(content) or bool(reasoning) or bool(ids) or (content == "" and role is None)
    delta = {"content": content, "role": role, "reasoning_content": reasoning}
    assert one(chat(delta, token_ids=ids)).token == expected
    assert (
        one(chat({name: value for name, value in delta.items() if value is not None}, token_ids=ids)).token == expected
    )


# Bodies


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"model x not found","code":404}}', "model x not found"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":[{"msg":"field required"}]}', '{"detail":[{"msg":"field required"}]}'),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"", ""),
        (b"caf\xe9", "caf\N{REPLACEMENT CHARACTER}"),
        (b'{"error":{}}', '{"error":{}}'),
        (b"[" * 100_000, "[" * 100_000),
        (b'{"error":' * 100_000, '{"error":' * 100_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_case_29_the_message_of_an_error_body_is_found_or_the_body_is_the_message(body: bytes, message: str) -> None:
    assert error_message(body) == message


@settings(max_examples=200)
@given(st.one_of(st.binary(), json_values.map(lambda value: json.dumps(value).encode())))
def test_any_body_has_a_message(body: bytes) -> None:
    assert isinstance(error_message(body), str)


@given(st.text())
def test_a_body_is_utf_8_json_that_gives_the_prompt_back(prompt: str) -> None:
    body = {"model": "m", "prompt": prompt, "stream": True}
    assert json.loads(encode_body(body).decode("utf-8")) == body


def test_endpoints_have_the_paths_of_the_dialect() -> None:
    assert PATHS == {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


# Captures of a real server


WHOLE = [name for name, row in EXPECTED.items() if row["status"] == 200 and row["outcome"] in ("ok", "stream_error")]


def replay(pieces: Iterable[bytes]) -> tuple[int, int, list[tuple[str, str]], list[Delta]]:
    """Return status, comments, events and what they say, by the way that they take from the socket."""
    response = Response()

    def bodies() -> Iterator[bytes]:
        for piece in filter(None, pieces):  # no bytes are the end to an HTTP parser
            response.feed(piece)
            yield from response.pieces
            response.pieces.clear()

    stream = EventStream(bodies())
    events = list(stream)
    assert response.message_complete
    deltas = [decode(data, event) for event, data in events if data != "[DONE]"]
    return response.status_code, stream.comments, events, deltas


@pytest.mark.parametrize("name", WHOLE)
def test_a_captured_stream_says_what_the_table_says_whole_and_byte_by_byte(name: str) -> None:
    row, data = EXPECTED[name], (STREAMS / f"{name}.raw").read_bytes()
    status, comments, events, deltas = replay([data])
    assert (status, comments) == (200, row.get("comments", 0))
    assert [data for _, data in events].count("[DONE]") == 1
    assert events[-1][1] == "[DONE]"
    parts = [part for delta in deltas for part in delta.parts]
    choices = sorted({part.choice for part in parts})
    tokens, ids, ends = Counter[int](), Counter[int](), dict[int, str]()
    for part in parts:
        tokens[part.choice] += part.token
        ids[part.choice] += part.token_ids
        if part.finish_reason is not None:
            ends[part.choice] = part.finish_reason
    assert [tokens[index] for index in choices] == row.get("events", [])
    assert [ids[index] for index in choices] == row.get("token_ids", [0] * len(choices))
    assert [ends[index] for index in choices if index in ends] == row.get("finish", [])
    assert [delta.error for delta in deltas if delta.error is not None] == (
        [row["message"]] if "message" in row else []
    )
    usage = [delta.usage for delta in deltas if delta.usage is not None]
    assert usage_of(usage[-1] if usage else None) == (
        row.get("input_tokens"),
        row["output_tokens"] if usage else None,
        row.get("cached_tokens"),
    )
    for pieces in ways(data, 10 if len(data) < LARGE else 1):
        assert replay(pieces) == (status, comments, events, deltas)


def usage_of(usage: Usage | None) -> tuple[int | None, int | None, int | None]:
    if usage is None:
        return None, None, None
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, usage.completion_tokens, None if details is None else details.cached_tokens


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([name for name in WHOLE if (STREAMS / f"{name}.raw").stat().st_size < LARGE]), CUTS)
def test_a_captured_stream_says_the_same_in_any_cut(name: str, points: list[int]) -> None:
    data = (STREAMS / f"{name}.raw").read_bytes()
    assert replay(cut(data, (point % len(data) for point in points))) == replay([data])
