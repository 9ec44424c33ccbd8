"""Files of prompts → validated prompts: every line is checked before the first request.

One JSON object a line (or one JSON array of them): `{"prompt": "…"}` or `{"messages": [{"role": …, "content": …}]}`,
optionally `"output_tokens": n`; or ShareGPT's `{"conversations": [{"from": …, "value": …}]}`, of which the leading
system turns and the first human turn are asked, turns of the model before it dropped. Always UTF-8, whatever the
locale; a byte order mark is passed over. Other keys are, too: data sets carry ids and sources.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vllm_locust.errors import InputError

_SHOWN = 20
"""Bad lines that an error names; more of them tell nothing new."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked: a text, or the messages of a conversation; exactly one of them."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    output_tokens: int | None = None
    """Length of the answer, where the file gives one for this prompt."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The usable prompts of one file, and how many lines were skipped."""

    prompts: tuple[Prompt, ...]
    skipped: int = 0


class _BadRowError(Exception):
    """Why one row cannot be used."""


def load(path: Path, *, skip_bad: bool = False) -> Prompts:
    """Read and check a file; raises `InputError` that names file, line and reason of every bad line (the first 20).

    With `skip_bad` bad lines are left out and counted; a file without a usable line is refused all the same.
    """
    prompts, bad = [], []
    for where, row in _rows(path):
        try:
            prompts.append(_prompt(row))
        except _BadRowError as reason:
            bad.append(f"{where}: {reason}")
    if bad and not skip_bad:
        more = f"\n… and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        listed = "\n".join(bad[:_SHOWN])
        raise InputError(f"{listed}{more}\n(--skip-bad-prompts leaves such lines out)")
    if not prompts:
        raise InputError(f'{path}: no usable prompt in it; a line is like {{"prompt": "…"}}')
    return Prompts(tuple(prompts), len(bad))


def _rows(path: Path) -> list[tuple[str, Any]]:
    """Return (file and line or entry, JSON value or the reason why there is none)."""
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}:1: byte 0: the file is UTF-16; save it as UTF-8")
    if data.lstrip().startswith(b"["):
        try:
            rows = msgspec.json.decode(data, type=list[Any])
            return [(f"{path}: entry {number}", row) for number, row in enumerate(rows, 1)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # no array as a whole, so each line has to speak for itself
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return [(f"{path}:{number}", _decode(line)) for number, line in enumerate(lines, 1) if line.strip()]


def _decode(line: bytes) -> Any:  # noqa: ANN401 - any JSON value
    try:
        line.decode()
        return msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return _BadRowError(
            f"byte {error.start} of the line (0x{line[error.start]:02x}) is not UTF-8; save it as UTF-8"
        )
    except (msgspec.DecodeError, RecursionError) as error:
        return _BadRowError(f"not JSON: {error}")


def _prompt(row: Any) -> Prompt:  # noqa: ANN401 - any JSON value
    if isinstance(row, _BadRowError):
        raise row
    if not isinstance(row, dict):
        raise _BadRowError(f'a {type(row).__name__}, expected an object like {{"prompt": "…"}}')
    output_tokens = row.get("output_tokens")
    if output_tokens is not None and (type(output_tokens) is not int or output_tokens < 1):
        raise _BadRowError(f"`output_tokens` is {output_tokens!r}, expected a whole number of at least 1")
    if "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str) or not text:
            raise _BadRowError(f"`prompt` is {_shown(text)}, expected a text that is not empty")
        return Prompt(text=text, output_tokens=output_tokens)
    if "messages" in row:
        return Prompt(messages=_messages(row["messages"]), output_tokens=output_tokens)
    if "conversations" in row:
        return Prompt(messages=_conversation(row["conversations"]), output_tokens=output_tokens)
    raise _BadRowError("none of `prompt`, `messages`, `conversations` in it")


def _messages(value: Any) -> tuple[dict[str, Any], ...]:  # noqa: ANN401 - any JSON value
    if not isinstance(value, list) or not value:
        raise _BadRowError(f"`messages` is {_shown(value)}, expected a list that is not empty")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadRowError(f"message {_shown(message)} lacks a role")
        content = message.get("content")
        if not isinstance(content, str | list) or not content:
            raise _BadRowError(f"`content` of a message is {_shown(content)}, expected a text that is not empty")
    if not any(message["role"] == "user" for message in value):
        raise _BadRowError("`messages` has none of role user")
    return tuple(value)


def _conversation(value: Any) -> tuple[dict[str, Any], ...]:  # noqa: ANN401 - any JSON value
    if not isinstance(value, list):
        raise _BadRowError(f"`conversations` is {_shown(value)}, expected a list")
    asked: list[dict[str, Any]] = []
    for turn in (turn for turn in value if isinstance(turn, dict)):
        role = _ROLES.get(str(turn.get("from") or turn.get("role")))
        content = turn.get("value") or turn.get("content")
        if role in ("system", "user") and isinstance(content, str):
            asked.append({"role": role, "content": content})
            if role == "user":
                return tuple(asked)
    raise _BadRowError("`conversations` has no human turn with a text")


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return the kind of a value, and its text where that is harmless; prompts themselves are never shown."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return "empty" if not value else f"of type {type(value).__name__}"
