"""The OpenAI dialect: request bodies, and the data of events → what they say.

The rules of what a token event is are those of `docs/metrics.md`; they follow vLLM and what the other servers of this
dialect send: SGLang, TGI, llama.cpp, Ollama, LiteLLM, Azure, OpenRouter. Decoding is typed and in one pass; unknown
fields are passed over.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""Path of each endpoint."""

_KIND_LENGTH = 40
"""A code or type longer than this is none."""

CHOICES = 1024
"""How many choices a request may have: OpenAI takes 128, and no server brings forth more than some hundred at once."""
_LARGE = 1_048_576
_VALUES = 1_048_576
"""How many values a large event may have: decoded, each takes thirty times the two characters that it may be told in.
A logprob takes some seventy for its four, and the ids of the longest prompt are far fewer."""

_Index = Annotated[int, Meta(ge=0, lt=CHOICES)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]
"""Of tokens: what is no number of tokens makes its event malformed, as a wrong type does, so that nobody counts it."""


# Untracked by the collector (`gc=False`): JSON has no cycles, and each event makes some of these.


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: Any = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: list[dict[str, Any]] | dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: _Index = 0
    delta: _Delta | None = None
    text: str | None = None
    message: msgspec.Raw = msgspec.Raw()
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    error: msgspec.Raw = msgspec.Raw()


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """What the server says it counted."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: Annotated[list[_Choice], Meta(max_length=CHOICES)] | None = None
    usage: Usage | None = None
    error: Any = None


class _Kind(msgspec.Struct):
    object: msgspec.Raw = msgspec.Raw()  # a number may be one that no decoder takes


class Part(msgspec.Struct, frozen=True, gc=False):
    """What an event says of one choice."""

    choice: int
    token: bool
    """Whether it is a token event."""
    reasoning: bool
    content: bool
    finish_reason: str | None
    token_ids: int
    """How many token ids it carries."""
    text: str | list[Any] | None = None
    """What it has of the answer, as it came; see `plain`."""
    thought: str | None = None
    """What it has of the reasoning."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one event says."""

    parts: list[Part]
    usage: Usage | None
    error: str | None
    """Message of an error inside the stream."""
    whole: bool = False
    """Whether it is a whole answer, of a server that does not stream."""


class MalformedError(Exception):
    """The data are no chunk of this dialect; the text tells what came."""


_DECODER = msgspec.json.Decoder(_Chunk)
_KIND_DECODER = msgspec.json.Decoder(_Kind)
_ERROR = msgspec.Raw(b'"error"')
_BROKEN = ("error", "abort")
"""Finish reasons of an answer that the server did not bring to its end: vLLM's, SGLang's, OpenRouter's
(vllm-project/vllm#57082)."""


def decode(data: str, event: str = "message") -> Delta:
    """Decode the data of one event; raises `MalformedError`."""
    if len(data) > _LARGE and data.count(",") + data.count("[") + data.count("{") > _VALUES:
        raise MalformedError(f"an event of more than {_VALUES:,} values: {data[:120]!r}")
    try:
        chunk = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as failure:
        if event == "error":
            return Delta([], None, data)
        raise MalformedError(f"{failure}: {data[:120]!r}") from None
    if chunk.error or event == "error" or (not chunk.choices and _KIND_DECODER.decode(data).object == _ERROR):
        return Delta([], chunk.usage, _stream_error(data))
    choices = chunk.choices or ()
    parts = [_part(choice) for choice in choices]
    for choice in choices:
        if (choice.error or choice.finish_reason in _BROKEN) and (error := _choice_error(choice)):
            return Delta([part for part in parts if part.content or part.reasoning], chunk.usage, error)
    return Delta(parts, chunk.usage, None, any(choice.message for choice in choices))


def _choice_error(choice: _Choice) -> str | None:
    said = bytes(choice.error).decode()
    if said not in ("", "null", "{}", '""', "false"):
        return _stream_error(said)
    return f"finish_reason is {choice.finish_reason}" if choice.finish_reason in _BROKEN else None


def _part(choice: _Choice) -> Part:
    delta, ids = choice.delta, len(choice.token_ids or ())
    finish = choice.finish_reason or None  # TGI's completions say "" in every event but the last
    if delta is None:
        said = choice.text
        # vLLM sends an empty text for a real token whose text is held back, its last one included.
        return Part(choice.index, said is not None or ids > 0, False, bool(said), finish, ids, said)  # noqa: FBT003
    thought, text = delta.reasoning or delta.reasoning_content, delta.content
    reasoning, content = bool(thought), bool(text)
    if delta.reasoning_details:
        reasoning = reasoning or _has(delta.reasoning_details, "text", "summary")
    token = (
        content
        or reasoning
        or ids > 0
        or bool(delta.refusal)
        or _calls_something(delta)
        or _has(delta.audio, "transcript", "data")
        or (text == "" and delta.role is None)
    )
    return Part(choice.index, token, reasoning, content, finish, ids, text or delta.refusal, thought)


def plain(text: str | list[Any] | None) -> str:
    """Return a text that some servers send in pieces, each an object with its `text`."""
    if isinstance(text, list):
        found = (piece.get("text") for piece in text if isinstance(piece, dict))
        return "".join(piece for piece in found if isinstance(piece, str))
    return text or ""


def _calls_something(delta: _Delta) -> bool:
    # TGI sent a call without a list around it until huggingface/text-generation-inference#3086.
    calls = [delta.tool_calls] if isinstance(delta.tool_calls, dict) else delta.tool_calls or []
    functions = [*(call.get("function") for call in calls), delta.function_call]
    return _has(functions, "name", "arguments")


def _has(value: Any, *names: str) -> bool:  # noqa: ANN401 - JSON
    """Tell whether an object, or one of a list of them, has something under one of these names."""
    objects = value if isinstance(value, list) else (value,)
    return any(isinstance(each, dict) and any(each.get(name) for name in names) for each in objects)


def _stream_error(data: str) -> str:
    """Return what an error inside a stream says; its code, which no status tells, stands in front, else its type."""
    message = error_message(data)
    kind = "" if message == data else _kind(msgspec.json.decode(data))
    return f"{kind}: {message}" if kind else message


def _kind(error: Any) -> str:  # noqa: ANN401 - JSON
    """Return the code of an error, else its type; LiteLLM's are strings, even "None"."""
    levels = [each for each in (error.get("error"), error) if isinstance(each, dict)] if isinstance(error, dict) else []
    for name in ("code", "http_status_code", "type", "error_type"):
        for value in (level.get(name) for level in levels):
            if type(value) is int or (isinstance(value, str) and value.isdecimal()):
                return f"code {value}"
            if isinstance(value, str) and value not in ("", "None", "error") and len(value) <= _KIND_LENGTH:
                return value
    return ""


def error_message(body: str | bytes) -> str:
    """Return what an error body says, in whichever of the usual shapes; else the body itself."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    while isinstance(value, dict):
        inner = next((value[key] for key in ("error", "message", "detail", "msg", "text") if value.get(key)), None)
        if inner is None:
            return text
        value = inner
    return value if isinstance(value, str) and value.strip() else text


class Counting(msgspec.Struct, frozen=True, kw_only=True):
    """How each event is asked to tell how many tokens it carries: vLLM's ways, others pass them over or refuse them."""

    continuous_usage: bool = False
    """By the usage so far, `stream_options.continuous_usage_stats`."""
    token_ids: bool = False
    """By the ids of its tokens, `return_token_ids`."""


def asked(body: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return what a body asks: its messages, or its prompt."""
    return body.get("messages", body.get("prompt"))


def streaming(body: dict[str, Any], model: str, counting: Counting) -> dict[str, Any]:
    """Return a body that asks for a stream with usage; what it has itself, it keeps."""
    options: dict[str, bool] = {"include_usage": True}
    if counting.continuous_usage:
        options["continuous_usage_stats"] = True
    ids = {"return_token_ids": True} if counting.token_ids else {}
    return {"model": model, "stream": True, "stream_options": options, **ids, **body}


def encode_body(body: dict[str, Any]) -> bytes:
    """Encode a request's body as UTF-8 JSON."""
    return msgspec.json.encode(body)
