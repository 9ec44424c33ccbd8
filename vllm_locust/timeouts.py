"""How long a stream is waited for: when it is given up, and what that is called.

Every limit is of one wait. Which ones a stream has before it is told in one place, so that the instant at which it is
given up and the outcome that this gets cannot disagree.
"""

import msgspec

from vllm_locust.quantity import NS_PER_S
from vllm_locust.timeline import Outcome, Timeline


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait, in seconds; None is for ever."""

    connect_s: float = 10.0
    """A server that does not accept within this is not there; TCP retries after 1, 3 and 7 s are within it."""
    first_token_s: float | None = 300.0
    """Until the first token event, from when the request left: a queued request may wait long, and a short limit would
    cut the tail off."""
    idle_s: float | None = 120.0
    """For the next byte, from the first token event on: a stream that has begun must not go silent for ever, as vLLM's
    do when it gets SIGTERM. Comments and other events that carry no token are bytes, too."""
    token_s: float | None = None
    """For the next token event. None by default: a tool call or a long answer in one piece may take its time."""
    total_s: float | None = None
    """For the end of the body, from when the request left. None by default: answers are as long as they are."""


def given_up(timeouts: Timeouts, timeline: Timeline, heard_ns: int) -> tuple[int, Outcome] | None:
    """Return when a stream is given up if nothing more comes, and as what; None for never.

    `heard_ns` is when the last byte came.
    """
    sent_ns = timeline.sent_ns or timeline.called_ns
    waits = [(sent_ns, timeouts.total_s, Outcome.TOTAL_TIMEOUT)]
    if timeline.last_ns is None:
        waits.append((sent_ns, timeouts.first_token_s, Outcome.FIRST_TOKEN_TIMEOUT))
    else:
        waits.append((timeline.last_ns, timeouts.token_s, Outcome.TOKEN_TIMEOUT))
        waits.append((max(heard_ns, sent_ns), timeouts.idle_s, Outcome.IDLE_TIMEOUT))
    limits = [
        (since_ns + round(wait_s * NS_PER_S), outcome) for since_ns, wait_s, outcome in waits if wait_s is not None
    ]
    return min(limits, default=None)


def reason(timeouts: Timeouts, timeline: Timeline, outcome: Outcome) -> str:
    """Say what was waited for in vain."""
    match outcome:
        case Outcome.FIRST_TOKEN_TIMEOUT:
            return f"no token within {timeouts.first_token_s:g} s"
        case Outcome.TOTAL_TIMEOUT:
            return f"not at its end within {timeouts.total_s:g} s, {after(timeline)}"
        case Outcome.TOKEN_TIMEOUT:
            return f"no token for {timeouts.token_s:g} s {after(timeline)}"
        case _:
            return f"no byte for {timeouts.idle_s:g} s {after(timeline)}"


def after(timeline: Timeline) -> str:
    """Say how far a stream had got."""
    return f"after {timeline.events} token event{'' if timeline.events == 1 else 's'}"
