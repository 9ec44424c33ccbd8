"""vLLM's wire format: requests read or refused as vLLM would, and the shapes of all that it answers.

It deliberately has no tokenizer: a prompt costs a token per 4 bytes of UTF-8, begun ones included, and a chat 4 more
per message. It takes one prompt per request; sampling parameters, `echo`, `logprobs`, `stop` and tools are accepted and
ignored. Nothing here knows a connection.
"""

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.json import encode

from vllm_locust.simulated import WORDS, Break, Profile, Token

Json: TypeAlias = dict[str, Any]

VERSION = "0.32.0"  # the vLLM whose wire format this is
MESSAGE_TOKENS = 4  # what a chat template typically puts around a message

_FINGERPRINT = {"system_fingerprint": f"vllm-{VERSION}-simulated"}
_DONE = b"data: [DONE]\n\n"
_ERROR = (  # vLLM encodes this one with spaces, unlike its others
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root '
    b'cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
_HOLE = "\0"  # where the text goes in a prebuilt event
_ESCAPED = {text: encode(text) for text in ["", *WORDS]}

# What vLLM sends as null in an answer that is not streamed.
_NULLS = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
_CHAT_NULLS = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
_CHOICE_NULLS = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "routed_experts"))
_TEXT_CHOICE_NULLS = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
_MESSAGE_NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_USAGE_NULLS = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct):
    """The fields of a request body that mean something here; others may be there."""

    model: str | None = None
    prompt: str | list[int] = ""
    messages: list[_Message] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False


class Ask(NamedTuple):
    """A valid request."""

    body: _Body
    chat: bool
    prompt: int  # its tokens
    limit: int  # tokens of a choice at most

    @property
    def lengths(self) -> tuple[int, int]:
        """Fewest and most tokens of a choice."""
        return self.limit if self.body.ignore_eos else self.body.min_tokens, self.limit

    @property
    def usage(self) -> bool:
        """Usage ends the stream."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def continuous(self) -> bool:
        """Usage is in every event."""
        options = self.body.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class RefusedError(Exception):
    """A request that is answered by an error object."""

    def __init__(self, message: str, param: str | None, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def read_ask(profile: Profile, raw: bytes, *, chat: bool) -> Ask:
    """Read a request, or refuse it, as vLLM would."""
    body = _body(raw)
    if chat and body.messages is None:
        detail = {"type": "missing", "loc": "body.messages", "msg": "Field required"}
        raise _invalid(detail, "body.messages")
    if body.model not in (None, profile.model):
        message = f"The model `{body.model}` does not exist. Valid aliases: {profile.model}."
        raise RefusedError(message, "model", 404, "NotFoundError")
    prompt = sum(map(_message_tokens, body.messages or [])) if chat else _tokens(body.prompt)
    asked = body.max_completion_tokens if chat and body.max_completion_tokens is not None else body.max_tokens
    _check(body, prompt, asked, profile.max_model_len)
    room = profile.max_model_len - prompt
    return Ask(body, chat, prompt, room if asked is None else min(asked, room))


def _body(raw: bytes) -> _Body:
    try:
        return msgspec.json.decode(raw, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        path = str(error).partition("`$")[2]  # as in: Expected `int`, got `str` - at `$.n`
        raise _invalid(error, "body" + path.rstrip("`")) from None


def _check(body: _Body, prompt: int, asked: int | None, longest: int) -> None:
    """Refuse what a model of this length cannot do with a prompt of so many tokens."""
    if body.stream_options is not None and not body.stream:
        raise _unfit(None, "stream_options", "Stream options can only be defined when `stream=True`.")
    if body.n < 1:
        raise _unfit(body.n, "n", f"n must be at least 1, got {body.n}.")
    if asked is not None and asked < 1:
        raise _unfit(asked, "max_tokens", f"max_tokens must be at least 1, got {asked}.")
    if asked is not None and asked > longest:
        text = f"max_tokens={asked} cannot be greater than max_model_len={longest}."
        raise _unfit(asked, "max_tokens", f"{text} Please request fewer output tokens.")
    if asked is not None and asked < body.min_tokens:
        text = f"min_tokens must be less than or equal to max_tokens={asked}, got {body.min_tokens}."
        raise RefusedError(text, None)
    if prompt == 0:
        raise _unfit(None, "prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
    if prompt >= longest:  # an answer has at least one token
        text = f"This model's maximum context length is {longest} tokens. However, your prompt contains"
        text += f" {prompt} input tokens, which exceeds this limit even without any output tokens."
        raise _unfit(prompt, "input_tokens", f"{text} Please reduce the length of the input prompt.")


def _invalid(detail: object, where: str) -> RefusedError:
    return RefusedError(f"1 validation error:\n  {detail}", where, kind="Bad Request")


def _unfit(value: int | None, param: str, text: str) -> RefusedError:
    shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return RefusedError(f"{text} ({shown})", param)


def _message_tokens(message: _Message) -> int:
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return MESSAGE_TOKENS + _tokens(text)


def _tokens(prompt: str | list[int]) -> int:
    return math.ceil(len(prompt.encode()) / 4) if isinstance(prompt, str) else len(prompt)


class Frames:
    """The events of one stream; what does not change from token to token is encoded once."""

    def __init__(self, profile: Profile, ask: Ask) -> None:
        self._ask = ask
        self._emission = profile.emission
        self._identity = _identity(profile, ask, "chat.completion.chunk" if ask.chat else "text_completion")
        plain = (self._event([_piece(ask, choice, _HOLE, None)]) for choice in range(ask.body.n))
        self._plain = [event.split(encode(_HOLE)) for event in plain]

    def role(self, choice: int) -> bytes:
        """Open a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        piece = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage_so_far(0)} if self._ask.continuous else {}
        return self._event([piece], **usage, prompt_token_ids=None, prompt_text=None) + b"}\n\n"

    def token(self, token: Token) -> bytes:
        """Build the event of one token, to be written at once."""
        ask, choice = self._ask, token.choice
        if token.finish:
            last = {} if ask.usage else _FINGERPRINT
            event = self._event([_piece(ask, choice, token.text, token.finish)], **last)
        else:
            before, after = self._plain[choice]
            event = before + _ESCAPED[token.text] + after
        if ask.continuous:
            event += b',"usage":' + encode(self._usage_so_far(token.ordinal))
        if self._emission:
            event += b',"emitted_ns":%d' % time.monotonic_ns()
        return event + b"}\n\n"

    def ending(self, written: int, breaks: Break | None) -> Iterator[bytes]:
        """End the stream of so many tokens: properly, with an error, or not at all."""
        if breaks == "error":
            yield _ERROR
        elif breaks is None and self._ask.usage:
            yield self._event([], usage=_usage(self._ask.prompt, written), **_FINGERPRINT) + b"}\n\n"
        if breaks != "early end":
            yield _DONE

    def _event(self, choices: list[Json], **more: object) -> bytes:
        """Encode an event up to its closing brace."""
        return b"data: " + encode({**self._identity, "choices": choices, **more})[:-1]

    def _usage_so_far(self, ordinal: int) -> Json:
        details = {"completion_tokens_details": None} if self._ask.chat else {}
        return _usage(self._ask.prompt, ordinal) | details


def _piece(ask: Ask, choice: int, text: str, finish: str | None) -> Json:
    """Return the choice object of a token event."""
    piece: Json = {"index": choice, **({"delta": {"content": text}} if ask.chat else {"text": text})}
    piece |= {"logprobs": None, "finish_reason": finish}
    if finish or not ask.chat:
        piece["stop_reason"] = None
    if not ask.chat:
        piece["prompt_token_ids"] = None
    return piece | {"token_ids": None}


def whole_answer(profile: Profile, ask: Ask, tokens: list[Token]) -> Json:
    """Return the body of an answer that is not streamed."""
    choices = []
    for choice in range(ask.body.n):
        own = [token for token in tokens if token.choice == choice]
        text = "".join(token.text for token in own)
        said: Json = {"text": text, **_TEXT_CHOICE_NULLS}
        if ask.chat:
            said = {"message": {"role": "assistant", "content": text, **_MESSAGE_NULLS}}
        choices.append({"index": choice, **said, **_CHOICE_NULLS, "finish_reason": own[-1].finish})
    answer = _identity(profile, ask, "chat.completion" if ask.chat else "text_completion")
    answer |= {"choices": choices, **_FINGERPRINT, "usage": _usage(ask.prompt, len(tokens)) | _USAGE_NULLS}
    return answer | _NULLS | (_CHAT_NULLS if ask.chat else {})


def _identity(profile: Profile, ask: Ask, kind: str) -> Json:
    ident = f"{'chatcmpl' if ask.chat else 'cmpl'}-{time.monotonic_ns():016x}"
    return {"id": ident, "object": kind, "created": int(time.time()), "model": profile.model}


def _usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def models(profile: Profile) -> Json:
    """Return the body of the list of models."""
    about = {"id": profile.model, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
    about |= {"root": profile.model, "parent": None, "max_model_len": profile.max_model_len, "permission": []}
    return {"object": "list", "data": [about]}
