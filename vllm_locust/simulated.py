"""What a simulated server is and what it answers: which tokens, when each is due, and which streams break.

It promises: all of this follows from the profile and what the functions are given: the number of a request, the lengths
that it asks for, and, for faults on cue alone, when it came and got which seat. Nothing here reads a clock or knows a
wire.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from vllm_locust.simulated_faults import Fault, drift, ends_ns, error_share, slowness

Break: TypeAlias = Literal["error", "early end"]

BREAK_AFTER = 3  # token events before a stream breaks, if it does: a first token and two gaps
LENGTH_MEDIAN, LENGTH_SIGMA = 120, 0.6  # a paragraph; one answer in a hundred is four times as long

_TEXT = (  # with a quote, a letter beyond ASCII and a backslash, which clients must unescape
    'the of and to in is that it was for on as with be at by this had not are but from or have an they "yes" '
    "café a\\b one you were all her she there would their we him been has when who will no more if out so"
)
WORDS = [f" {word}" for word in _TEXT.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the simulated server is; times in seconds."""

    model: str = "simulated"  # the one model it serves
    seed: int = 0  # same seed, same answers
    ttft_s: float = 0.080  # median time to first token of a request that has a seat, without prefill
    ttft_sigma: float = 0.25  # sigma of its log-normal; 0 = constant
    itl_s: float = 0.012  # median gap between the tokens of a choice
    itl_sigma: float = 0.15  # sigma of its log-normal; 0 = constant
    prefill_s_per_token: float = 0.00004  # added to the time to first token, per prompt token
    seats: int = 64  # requests that run at once; the others queue, first come first served
    max_model_len: int = 32768  # tokens of a prompt and of one answer to it together
    api_key: str | None = None  # with it, /v1/* answers 401 to whoever does not send it
    stream_errors: float = 0.0  # share of streams that send an error object after 3 token events
    early_ends: float = 0.0  # share of streams that just end after 3 token events
    faults: tuple[Fault, ...] = ()  # how it misbehaves on cue
    emission: bool = False  # token events carry "emitted_ns": monotonic ns, read right before the write
    completions: bool = True  # False: a chat-only server, /v1/completions is 404

    def __post_init__(self) -> None:
        """Refuse what no server could be."""
        least = {"ttft_s": 0, "ttft_sigma": 0, "itl_s": 0, "itl_sigma": 0, "prefill_s_per_token": 0}
        least |= {"stream_errors": 0, "early_ends": 0, "seats": 1, "max_model_len": 2}
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                msg = f"{name}={getattr(self, name)}: expected a finite number, at least {low}"
                raise ValueError(msg)
        if self.stream_errors + self.early_ends > 1:
            msg = f"stream_errors={self.stream_errors} + early_ends={self.early_ends}: expected at most 1"
            raise ValueError(msg)


class Token(NamedTuple):
    """One token event of an answer."""

    due_ns: int  # since the request got its seat
    choice: int
    ordinal: int  # in its choice, from 1
    text: str
    finish: str | None


def draw(profile: Profile, number: int, *, prompt: int, choices: int, lengths: tuple[int, int]) -> Iterator[Token]:
    """Draw the answer to request `number`; its choices advance together, as in a batch.

    `prompt` is the number of its tokens, `lengths` the fewest and the most tokens of a choice.
    """
    rng = Random(f"{profile.seed}/{number}")  # noqa: S311 - no secret
    at_s = _lognormal(rng, profile.ttft_s, profile.ttft_sigma) + profile.prefill_s_per_token * prompt
    ends = [_end(rng, *lengths) for _ in range(choices)]
    for ordinal in range(1, max(ends)[0] + 1):
        for choice, (length, reason) in enumerate(ends):
            if ordinal <= length:
                finish = reason if ordinal == length else None
                # vLLM counts the token that ends a sequence, and sends its event with an empty text.
                text = "" if finish == "stop" else rng.choice(WORDS)
                yield Token(int(at_s * 1e9), choice, ordinal, text, finish)
        at_s += _lognormal(rng, profile.itl_s, profile.itl_sigma)


def _end(rng: Random, fewest: int, most: int) -> tuple[int, str]:
    length = max(1, fewest, round(_lognormal(rng, LENGTH_MEDIAN, LENGTH_SIGMA)))
    return (most, "length") if length >= most else (length, "stop")


def _lognormal(rng: Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


def due(faults: tuple[Fault, ...], tokens: Iterable[Token], seated_ns: int, seat: int) -> Iterator[tuple[int, Token]]:
    """Yield each token with the instant at which it is due, for a request that got its seat at an instant."""
    slow, at_ns, before_ns = slowness(faults, seated_ns, seat), seated_ns, 0
    for token in tokens:
        work_ns = token.due_ns - before_ns
        at_ns = ends_ns(faults, at_ns, int(work_ns * slow * drift(faults, at_ns))) if faults else at_ns + work_ns
        before_ns = token.due_ns
        yield at_ns, token


def pick_break(profile: Profile, number: int, came_ns: int) -> Break | None:
    """Pick by the base-2 radical inverse of the number: exact shares, spread evenly; `came_ns` matters to faults."""
    share = int(f"{number:b}"[::-1], 2) / (1 << number.bit_length())
    errors = profile.stream_errors + error_share(profile.faults, came_ns)
    if share < errors:
        return "error"
    return "early end" if share < errors + profile.early_ends else None


def broken(tokens: Iterable[Token]) -> Iterator[Token]:
    """Cut an answer where it breaks."""
    return (token._replace(finish=None) for token in itertools.islice(tokens, BREAK_AFTER))
