"""What an event says, written into the timeline of its request."""

from vllm_locust.api import Delta, Part, Usage, plain
from vllm_locust.terminal import printable
from vllm_locust.timeline import Timeline

_REASON_CHARS = 40


def note(timeline: Timeline, delta: Delta, at_ns: int) -> None:
    """Write into a timeline what an event says that arrived at `at_ns`."""
    timeline.whole |= delta.whole
    for part in delta.parts:
        index = part.choice
        tokens = _tokens_so_far(timeline, delta, part) if delta.usage is not None or part.token_ids else 0
        if part.token or _has_grown(timeline, index, tokens):
            timeline.token_event(index, at_ns, tokens)
            if part.reasoning:
                timeline.reasoning_ns = timeline.reasoning_ns or timeline.last_ns
            elif part.content and timeline.content_ns is None:
                timeline.content_ns = timeline.last_ns
        if timeline.answer is not None:
            timeline.answer.add(index, plain(part.text), part.thought or "")
        if part.finish_reason is not None:
            timeline.finish_reasons[index] = printable(part.finish_reason, _REASON_CHARS)[:_REASON_CHARS]
    # With several choices, usage on a chunk is that of its choice; the request's comes in a chunk of its own.
    if delta.usage is not None and not (delta.parts and len(timeline.choices) > 1):
        _note_usage(timeline, delta.usage)


def _tokens_so_far(timeline: Timeline, delta: Delta, part: Part) -> int:
    """Return how many tokens of its choice there are by now, 0 where the events do not tell."""
    choice = timeline.choices.get(part.choice)
    if part.token_ids:
        return part.token_ids + (choice.tokens if choice else 0)
    # Usage after events without it is that of the answer, wherever it stands: many servers put it into the last chunk.
    if delta.usage is not None and len(delta.parts) == 1 and (choice is None or choice.tokens):
        return delta.usage.completion_tokens or 0
    return 0


def _has_grown(timeline: Timeline, index: int, tokens: int) -> bool:
    """Tell whether an event without a text brought tokens: whether a count that was told before is larger by now."""
    choice = timeline.choices.get(index)
    told = timeline.completion_tokens is not None if choice is None else choice.tokens > 0
    return told and tokens > (choice.tokens if choice else 0)


def _note_usage(timeline: Timeline, usage: Usage) -> None:
    if not usage.prompt_tokens and not usage.completion_tokens:
        return  # Ollama's completions say 0 and 0 in every event but the last
    if usage.completion_tokens is not None:
        timeline.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens is not None:
        timeline.input_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        timeline.cached_tokens = usage.prompt_tokens_details.cached_tokens
