"""Prompt files: every line is checked before the first request, and every refusal says where and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust.errors import ExitCode, InputError
from vllm_locust.prompts import Prompt, load

CASE_69 = [
    b'{"prompt": "good"}',
    b"",
    b'{"prompt": "x",}',
    b'{"text":"no prompt"}',
    b'{"prompt": 5}',
    b"[]",
    b'{"prompt": "last"}',
]

CASE_71: list[Any] = [
    {"conversations": []},
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q1"},
            {"from": "gpt", "value": "a1"},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "g"}, {"from": "human", "value": "q2"}]},
    {"conversations": [{"role": "user", "content": "q3"}, {"role": "assistant", "content": "a3"}]},
    {"conversations": [{"from": "human", "value": ""}]},
    {"messages": [{"role": "user", "content": "q4"}]},
]


def file_of(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    return path


def refusal(path: Path, *, skip_bad: bool = False) -> str:
    with pytest.raises(InputError) as refused:
        load(path, skip_bad=skip_bad)
    assert refused.value.exit_code is ExitCode.BAD_INPUT
    return str(refused.value)


def texts(path: Path) -> list[str | None]:
    return [prompt.text for prompt in load(path).prompts]


def test_a_line_is_a_prompt_with_or_without_a_length_of_the_answer(tmp_path: Path) -> None:
    path = file_of(tmp_path, b'{"prompt": "a", "id": 7}\n{"prompt": " b ", "output_tokens": 12}\n')
    assert load(path).prompts == (Prompt(text="a"), Prompt(text=" b ", output_tokens=12))


def test_messages_are_kept_as_they_are(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "look"}], "name": "n"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
    ]
    path = file_of(tmp_path, json.dumps({"messages": messages, "output_tokens": 3}).encode())
    assert load(path).prompts == (Prompt(messages=tuple(messages), output_tokens=3),)


def test_case_69_every_bad_line_is_named_with_its_reason_and_the_flag_that_leaves_it_out(tmp_path: Path) -> None:
    path = file_of(tmp_path, b"\n".join(CASE_69))
    message = refusal(path)
    lines = message.splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path}:{number}" for number in (3, 4, 5, 6)]
    for line, reason in zip(lines, ["not JSON", "none of `prompt`", "`prompt` is 5", "a list"], strict=False):
        assert reason in line
    assert "--skip-bad-prompts" in lines[-1]


def test_case_69_bad_lines_are_left_out_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    loaded = load(file_of(tmp_path, b"\n".join(CASE_69)), skip_bad=True)
    assert [prompt.text for prompt in loaded.prompts] == ["good", "last"]
    assert loaded.skipped == 4


def test_case_69_of_many_bad_lines_the_first_twenty_are_named(tmp_path: Path) -> None:
    lines = refusal(file_of(tmp_path, b"{}\n" * 50)).splitlines()
    assert len(lines) == 22
    assert lines[19].split(":")[1] == "20"
    assert lines[20] == "\N{HORIZONTAL ELLIPSIS} and 30 more"


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("data", [b"", b"\n\n  \n", b"\xef\xbb\xbf", b"[]", b"[ ]\n"])
def test_case_69_a_file_without_a_prompt_is_refused(tmp_path: Path, data: bytes, *, skip_bad: bool) -> None:
    assert "no usable prompt" in refusal(file_of(tmp_path, data), skip_bad=skip_bad)


def test_case_69_a_file_of_bad_lines_alone_is_refused_even_where_they_are_left_out(tmp_path: Path) -> None:
    assert "no usable prompt" in refusal(file_of(tmp_path, b"{}\nx\n"), skip_bad=True)


def test_case_69_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonl"
    assert refusal(missing) == f"{missing}: No such file or directory"
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        '"text"',
        "5",
        "null",
        "true",
        '{"prompt": ""}',
        '{"prompt": null}',
        '{"prompt": ["a"]}',
        '{"prompt": "a", "output_tokens": 0}',
        '{"prompt": "a", "output_tokens": 2.5}',
        '{"prompt": "a", "output_tokens": true}',
        '{"prompt": "a", "output_tokens": "9"}',
        '{"messages": []}',
        '{"messages": "a"}',
        '{"messages": ["a"]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": ""}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"messages": [{"role": 5, "content": "a"}]}',
        '{"messages": [{"role": "system", "content": "a"}]}',
        '{"conversations": "a"}',
        '{"conversations": [5, null, "a"]}',
        '{"conversations": [{"from": ["human"], "value": "a"}]}',
        '{"conversations": [{"from": "gpt", "value": "a"}]}',
        '{"conversations": [{"from": "human", "value": 5}]}',
        "{" * 100_000,
        "[" * 100_000,
        '{"prompt":' + "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda row: row[:40],
)
def test_a_row_that_cannot_be_asked_is_refused_with_its_line(tmp_path: Path, row: str) -> None:
    path = file_of(tmp_path, b'{"prompt": "good"}\n' + row.encode())
    assert refusal(path).startswith(f"{path}:2: ")
    assert load(path, skip_bad=True).skipped == 1


def test_what_is_asked_is_never_shown_in_a_refusal(tmp_path: Path) -> None:
    path = file_of(tmp_path, b'{"messages": [{"role": "assistant", "content": "secret"}]}\n{"prompt": ["secret"]}')
    assert "secret" not in refusal(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["prompt", "messages", "conversations", "role", "content", "from", "value", "output_tokens"]
            ),
            inner | st.sampled_from(["user", "human", "gpt", "system"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(json_values, min_size=1, max_size=3), skip_bad=st.booleans())
def test_any_json_is_either_a_prompt_that_can_be_asked_or_refused_as_input(
    tmp_path: Path, *, rows: list[Any], skip_bad: bool
) -> None:
    path = file_of(tmp_path, "\n".join(json.dumps(row) for row in rows).encode())
    try:
        loaded = load(path, skip_bad=skip_bad)
    except InputError as refused:
        assert str(path) in str(refused)  # noqa: PT017 - either is right
    else:
        for prompt in loaded.prompts:
            assert (prompt.text is None) != (prompt.messages is None)
            assert prompt.text or any(message["role"] == "user" for message in prompt.messages or ())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_are_either_prompts_or_refused_as_input(tmp_path: Path, data: bytes) -> None:
    try:
        load(file_of(tmp_path, b'{"prompt": "a"}\n' + data))
    except InputError as refused:
        assert "prompts.jsonl:" in str(refused)  # noqa: PT017


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_any_text_comes_back_as_it_was_written_whatever_line_ends_it_holds(tmp_path: Path, asked: list[str]) -> None:
    for ascii_only in (True, False):
        data = "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in asked)
        assert texts(file_of(tmp_path, data.encode())) == asked


# Encodings


def test_case_70_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert texts(file_of(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}')) == ["a", "b"]
    assert texts(file_of(tmp_path, b'\xef\xbb\xbf[{"prompt": "a"}]')) == ["a"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_case_70_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\N{BYTE ORDER MARK}"
    path = file_of(tmp_path, (mark + '{"prompt": "a"}').encode(encoding))
    assert refusal(path) == f"{path}:1: byte 0: the file is UTF-16; save it as UTF-8"
    unmarked = file_of(tmp_path, '{"prompt": "a"}'.encode("utf-16-le"))
    assert refusal(unmarked).startswith(f"{path}:1: ")


def test_case_70_a_byte_of_another_encoding_is_refused_with_line_and_offset(tmp_path: Path) -> None:
    path = file_of(tmp_path, b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert refusal(path).startswith(f"{path}:2: byte 15 of the line (0xe9) is not UTF-8")
    array = file_of(tmp_path, b'[{"prompt": "a"},\n{"prompt": "caf\xe9"}]\n')
    assert "byte 15 of the line (0xe9) is not UTF-8" in refusal(array)


def test_case_70_half_a_surrogate_pair_is_refused_and_a_whole_one_is_a_character(tmp_path: Path) -> None:
    path = file_of(tmp_path, rb'{"prompt": "bad \ud83d end"}')
    assert refusal(path).startswith(f"{path}:1: not JSON")
    messages = file_of(tmp_path, rb'{"messages": [{"role": "user", "content": "bad \udc00"}]}')
    assert refusal(messages).startswith(f"{path}:1: not JSON")
    (good,) = load(file_of(tmp_path, rb'{"prompt": "\ud83d\ude42"}')).prompts
    assert good.text is not None
    assert good.text.encode() == b"\xf0\x9f\x99\x82"


# Shapes of data sets


@pytest.mark.parametrize("form", ["array", "lines"])
def test_case_71_of_a_conversation_the_first_human_turn_is_asked_with_its_system_turns(
    tmp_path: Path, form: str
) -> None:
    data = json.dumps(CASE_71, indent=1) if form == "array" else "\n".join(json.dumps(row) for row in CASE_71)
    path = file_of(tmp_path, data.encode())
    loaded = load(path, skip_bad=True)
    asked = [[(m["role"], m["content"]) for m in prompt.messages or ()] for prompt in loaded.prompts]
    assert asked == [[("system", "s"), ("user", "q1")], [("user", "q2")], [("user", "q3")], [("user", "q4")]]
    assert loaded.skipped == 2
    reasons = refusal(path).splitlines()
    places = [f"{path}: entry 1", f"{path}: entry 5"] if form == "array" else [f"{path}:1", f"{path}:5"]
    assert [reason.rpartition(": ")[0] for reason in reasons[:-1]] == places
    assert all("no human turn" in reason for reason in reasons[:-1])
