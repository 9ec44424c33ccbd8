"""Two tokens as each server of the dialect sends them, with all the fields that it puts around them.

Written after what their sources and documents say: sgl-project/sglang, huggingface/text-generation-inference,
ggml-org/llama.cpp, ollama/ollama, BerriAI/litellm, Azure, OpenRouter. Real bytes of vLLM are in `streams/`.
"""

import json
from dataclasses import dataclass
from typing import Any

from emitter import DONE

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
NOTHING_YET = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A stream of two tokens: what comes before them, they themselves, and what comes behind them."""

    before: tuple[bytes, ...]
    first: bytes
    second: bytes
    behind: tuple[bytes, ...]
    cached_tokens: int | None = None
    finish_reason: str = "stop"


def said(choice: dict[str, Any] | None, **more: Any) -> bytes:
    """Return an event with one choice, or none."""
    choices = [] if choice is None else [{"index": 0, **choice}]
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode()


def sglang(finish: str | None = None, **delta: str) -> bytes:
    nulls = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
    matched = 2 if finish else None
    choice = {"delta": {**nulls, **delta}, "logprobs": None, "finish_reason": finish, "matched_stop": matched}
    return said(choice, usage=None)


def tgi(text: str, finish: str | None = None, usage: dict[str, int] | None = None) -> bytes:
    delta = {"role": "assistant", "content": text}
    return said({"delta": delta, "logprobs": None, "finish_reason": finish}, system_fingerprint="3.3.4", usage=usage)


def tgi_completions(text: str, finish: str = "", **more: Any) -> bytes:
    return said({"text": text, "logprobs": None, "finish_reason": finish}, **more)


def llama_cpp(finish: str | None = None, delta: dict[str, Any] | None = None, **more: Any) -> bytes:
    return said({"finish_reason": finish, "delta": delta or {}}, system_fingerprint="b9038", **more)


def ollama(content: str, finish: str | None = None, **delta: str) -> bytes:
    return said({"delta": {"role": "assistant", "content": content, **delta}, "finish_reason": finish})


def ollama_completions(text: str, finish: str | None = None) -> bytes:
    return said({"text": text, "finish_reason": finish}, system_fingerprint="fp_ollama", usage=NOTHING_YET)


SAFE = {"hate": {"filtered": False, "severity": "safe"}}
FILTERED = {"hate": {"filtered": True, "severity": "high"}}
PROMPT_FILTER = {"prompt_filter_results": [{"prompt_index": 0, "content_filter_results": SAFE}]}
OFFSETS = {"check_offset": 44, "start_offset": 44, "end_offset": 198}


def azure(finish: str | None = None, delta: dict[str, Any] | None = None) -> bytes:
    safe = FILTERED if finish else SAFE
    return said({"content_filter_results": safe, "delta": delta or {}, "finish_reason": finish}, usage=None)


def openrouter(content: str, finish: str | None = None, usage: Any = None, **delta: Any) -> bytes:
    reasons = {"finish_reason": finish, "native_finish_reason": finish and finish.upper()}
    more = {"provider": "p", **({"usage": usage} if usage else {})}
    return said({"delta": {"role": "assistant", "content": content, **delta}, **reasons, "logprobs": None}, **more)


THOUGHT = {"type": "reasoning.text", "text": "a", "format": "unknown", "index": 0}

DIALECTS = {
    "sglang": Dialect(
        before=(sglang(role="assistant", content=""),),
        first=sglang(content="a"),
        second=sglang(content="b"),
        behind=(
            sglang(finish="stop"),
            said(None, usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 3}, "reasoning_tokens": 0}),
            DONE,
        ),
        cached_tokens=3,
    ),
    "sglang-reasoning": Dialect(
        before=(sglang(role="assistant", content=""),),
        first=sglang(reasoning_content="a"),
        second=sglang(content="b"),
        behind=(sglang(finish="stop"), said(None, usage=USAGE), DONE),
    ),
    "tgi": Dialect(
        before=(b":\n\n",), first=tgi("a"), second=tgi("b"), behind=(tgi("", "stop"), said(None, usage=USAGE), DONE)
    ),
    "tgi-usage-with-the-reason": Dialect(
        before=(), first=tgi("a"), second=tgi("b", "length", USAGE), behind=(DONE,), finish_reason="length"
    ),
    "tgi-completions": Dialect(
        before=(),
        first=tgi_completions("a"),
        second=tgi_completions("b", "eos_token", usage=USAGE),
        behind=(DONE,),
        finish_reason="eos_token",
    ),
    "llama.cpp": Dialect(
        before=(
            llama_cpp(
                delta={"role": "assistant", "content": None},
                prompt_progress={"total": 7, "cache": 0, "processed": 4, "time_ms": 3},
            ),
            llama_cpp(delta={"role": "assistant", "content": None}),
        ),
        first=llama_cpp(delta={"content": "a"}, timings={"predicted_n": 1}),
        second=llama_cpp(delta={"content": "b"}, timings={"predicted_n": 2}),
        behind=(
            llama_cpp("stop"),
            said(None, usage=USAGE, timings={"cache_n": 0, "prompt_n": 7, "predicted_n": 2}),
            DONE,
        ),
    ),
    "ollama": Dialect(
        before=(),
        first=ollama("a"),
        second=ollama("b"),
        behind=(ollama("", "stop"), said(None, usage=USAGE), DONE),
    ),
    "ollama-reasoning": Dialect(
        before=(),
        first=ollama("", reasoning="a"),
        second=ollama("b"),
        behind=(ollama("", "stop"), said(None, usage=USAGE), DONE),
    ),
    # Its last text is empty: an event by the rule that vLLM's held-back texts make.
    "ollama-completions": Dialect(
        before=(),
        first=ollama_completions("a"),
        second=ollama_completions("", "stop"),
        behind=(said(None, usage=USAGE), DONE),
    ),
    "litellm": Dialect(
        before=(),
        first=said({"delta": {"content": "a", "role": "assistant"}}),
        second=said({"delta": {"content": "b"}}),
        behind=(
            said({"finish_reason": "stop", "delta": {}}),
            said({"delta": {}}, usage={**USAGE, "completion_tokens_details": None, "prompt_tokens_details": None}),
            DONE,
        ),
    ),
    "azure": Dialect(
        before=(
            said(None, **PROMPT_FILTER),
            azure(delta={"content": "", "refusal": None, "role": "assistant"}),
        ),
        first=azure(delta={"content": "a"}),
        second=azure(delta={"content": "b"}),
        behind=(
            azure("content_filter"),
            said({"content_filter_offsets": OFFSETS, "content_filter_results": SAFE, "finish_reason": None}),
            said(None, usage={**USAGE, "completion_tokens_details": {"reasoning_tokens": 0}}),
            DONE,
        ),
        finish_reason="content_filter",
    ),
    "openrouter": Dialect(
        before=(b": OPENROUTER PROCESSING\n\n", b": OPENROUTER PROCESSING\n\n"),
        first=openrouter("", reasoning="a", reasoning_details=[THOUGHT]),
        second=openrouter("b"),
        behind=(
            openrouter("", "stop"),
            openrouter("", usage={**USAGE, "cost": 0.0001, "prompt_tokens_details": {"cached_tokens": 0}}),
            DONE,
        ),
        cached_tokens=0,
    ),
    "audio": Dialect(
        before=(said({"delta": {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}}),),
        first=said({"delta": {"audio": {"id": "audio_1", "transcript": "a"}}}),
        second=said({"delta": {"audio": {"id": "audio_1", "data": "AAAA"}}}),
        behind=(said({"delta": {"audio": {"expires_at": 5}}, "finish_reason": "stop"}, usage=USAGE), DONE),
    ),
}
