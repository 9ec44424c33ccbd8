"""One request: its instants, and the definitions of everything that is measured from them.

All instants are integer nanoseconds of one monotonic clock. Two origins never share a name, and "no sample" is
absent, never zero. A timeline only remembers; `vllm_locust.recorder` harvests it in bulk, so that a token event costs
an append.

| metric | formula | one sample per |
|---|---|---|
| `ttft` | `token[0] - sent` | request with a token event |
| `itl` | `token[i] - token[i-1]` of one choice | gap between token events, pooled over requests |
| `itl_max` | the largest gap of the request, the open one at a time-out included | ended request with a token event |
| `tpot` | `(token[last] - token[0]) / (N - 1)` of one choice | choice of an ok request with N > 1 |
| `e2el` | `token[last] - sent` | ok request |
| `queue` | `sent - scheduled` | open-loop request |
| `ttft_scheduled`, `e2el_scheduled` | the same from `scheduled` | with their twins |
| `connect` | time to open the connection | new connection |
| `ttfc` | first content that is not reasoning `- sent` | request that had reasoning before content |
| `itl_token` | a gap divided by the tokens that its event carried | gap, where events tell their tokens exactly |

N is what the server's usage says, else the number of token events, and then the request is `estimated`. `itl`, `tpot`
and `e2el` follow the rules of `vllm bench serve`.
"""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from vllm_locust.answer import Answer
from vllm_locust.secret import blotted
from vllm_locust.terminal import printable

COALESCED_EVENTS = 8
"""A request of at least so many token events that came in at most `COALESCED_READS` reads was buffered on its way."""
COALESCED_READS = 2
MESSAGE_CHARS = 200
"""What is kept of a message, in which nothing is left that a terminal obeys or that UTF-8 does not know."""
_REASONS_CHARS = 200
"""Of the finish reasons of all choices; servers say anything."""


class Unit(StrEnum):
    """What a metric counts; histograms of seconds hold integer nanoseconds."""

    SECONDS = "seconds"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Metric:
    """Name, unit and meaning of one metric, the same word wherever it is shown."""

    name: str
    unit: Unit
    title: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("ttft", Unit.SECONDS, "time to first token"),
        Metric("itl", Unit.SECONDS, "inter-token latency: gap between token events"),
        Metric("itl_max", Unit.SECONDS, "longest gap of a request"),
        Metric("tpot", Unit.SECONDS, "time per output token"),
        Metric("e2el", Unit.SECONDS, "end-to-end latency, from sent to the last token"),
        Metric("itl_token", Unit.SECONDS, "gap divided by the tokens of its event"),
        Metric("queue", Unit.SECONDS, "client send delay: sent after scheduled"),
        Metric("ttft_scheduled", Unit.SECONDS, "time to first token, from when the request was due"),
        Metric("e2el_scheduled", Unit.SECONDS, "end-to-end latency, from when the request was due"),
        Metric("connect", Unit.SECONDS, "time to open a connection"),
        Metric("ttfc", Unit.SECONDS, "time to first content after reasoning"),
        Metric("input_tokens", Unit.TOKENS, "tokens of the prompt, from usage"),
        Metric("output_tokens", Unit.TOKENS, "tokens of the answer"),
        Metric("cached_tokens", Unit.TOKENS, "tokens of the prompt that the server had cached"),
    )
}
"""Everything that has a histogram and a place in reports, in the order in which it is shown."""

CUT = {"ttft": "cut_ttft", "e2el": "cut_e2el"}
"""Histograms of the ages of requests that the end of the run cut before they had a first token, or an end."""


class Outcome(StrEnum):
    """How a request ended: a closed set."""

    OK = "ok"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    STREAM_ERROR = "stream_error"
    MALFORMED = "malformed"
    NOT_STREAMED = "not_streamed"
    HTTP_4XX = "http_4xx"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    REDIRECTED = "redirected"
    CONNECT_FAILED = "connect_failed"
    CONNECTION_LOST = "connection_lost"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - the token of a language model
    IDLE_TIMEOUT = "idle_timeout"
    TOKEN_TIMEOUT = "token_timeout"  # noqa: S105
    TOTAL_TIMEOUT = "total_timeout"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """Whether the server failed; a request cut by the end of the run is neither success nor failure."""
        return self not in (Outcome.OK, Outcome.CANCELLED)


def outcome_of_status(status: int) -> Outcome:
    """Return the outcome of a response that is not a 200."""
    if status == 429:  # noqa: PLR2004 - RFC 6585, section 4
        return Outcome.HTTP_429
    if status >= 500:  # noqa: PLR2004
        return Outcome.HTTP_5XX
    if status >= 400:  # noqa: PLR2004
        return Outcome.HTTP_4XX
    return Outcome.REDIRECTED if status >= 300 else Outcome.NOT_STREAMED  # noqa: PLR2004


@dataclass(slots=True)
class Choice:
    """The token events of one choice (`n` > 1 asks for several)."""

    first_ns: int
    last_ns: int
    events: int = 0
    tokens: int = 0
    """Exact count, where events carry one."""
    times: "array[int]" = field(default_factory=lambda: array("q"))
    """Times of the token events whose gaps have not been harvested; the first of them closes the last harvested gap."""
    carried: "array[int]" = field(default_factory=lambda: array("q"))
    """How many tokens the event of each of `times` carried, 0 where that is not known; empty until one tells."""
    told: bool = True
    """Whether the exact count is that of the last event."""
    counted: int = 0
    """How many of `times` are in the counters already."""
    kept: "array[int]" = field(default_factory=lambda: array("q"))
    """Harvested times, where somebody listens to `events.itl`."""


@dataclass(slots=True, eq=False)
class Timeline:
    """What is known of one request; written by the client while it streams, complete when `outcome` is set."""

    request_id: str
    scenario: str
    endpoint: str
    called_ns: int
    phase: str = "steady"
    stage: int = 0
    attempt: int = 0
    """How often the same has been asked before."""
    expected_tokens: int | None = None
    """Exact number of output tokens that the body asked for, if it did."""
    choices_asked: int = 1
    """How many choices the body asked for (`n`)."""
    scheduled_ns: int | None = None
    in_flight: int = 0
    """Streams of this process that were in flight when it left, itself among them."""
    connect_ns: int | None = None
    """How long opening the connection took; absent on a reused one."""
    sent_ns: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    first_ns: int | None = None
    last_ns: int | None = None
    reasoning_ns: int | None = None
    content_ns: int | None = None
    token_reads: int = 0
    """Reads that completed a token event."""
    events: int = 0
    done_ns: int | None = None
    outcome: Outcome | None = None
    status: int = 0
    message: str = ""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    whole: bool = False
    """Whether an event brought a whole answer."""
    input_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    response_bytes: int = 0
    heartbeats: int = 0
    comments: int = 0
    reconnects: int = 0
    known_tokens: int = 0
    """Sum of the exact counts of the choices."""
    bundled: int = 0
    """How many tokens beyond one per event have arrived, by exact counts; never shrinks."""
    bundles: list[tuple[int, int]] = field(default_factory=list)
    """When `bundled` grew and by how much, until harvested."""
    reads: "array[int]" = field(default_factory=lambda: array("q"))
    """Of each read that completed token events, in a row: when, their number, lag, uncertainty, whether the kernel
    stamped it."""
    longest_gap_ns: int | None = None
    longest_gap_end_ns: int | None = None
    """When that gap ended, the first of several that are as long."""
    user_class: str = ""
    answer: Answer | None = None
    """Where the texts of the answer go, if they are wanted."""
    secret: str | None = field(default=None, repr=False)
    """What no message may show; some servers repeat the key that they refuse."""

    def token_event(self, index: int, at_ns: int, tokens: int) -> None:
        """Remember one token event; `tokens` is the exact number so far of its choice, or 0 where it is not told."""
        # A process that sleeps between reading two clocks gets a stamp too early by as much; time never runs backwards.
        earliest_ns = self.sent_ns if self.last_ns is None else self.last_ns
        if earliest_ns is not None and at_ns < earliest_ns:
            at_ns = earliest_ns
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice(at_ns, at_ns)
            if self.first_ns is None:
                self.first_ns = at_ns
        choice.times.append(at_ns)
        choice.last_ns = self.last_ns = at_ns
        choice.events += 1
        self.events += 1
        if tokens or choice.carried:
            choice.carried.extend([0] * (len(choice.times) - 1 - len(choice.carried)))
            choice.carried.append(max(0, tokens - choice.tokens) if choice.told else 0)
        choice.told = tokens > 0
        if tokens > choice.tokens:
            self.known_tokens += tokens - choice.tokens
            choice.tokens = tokens
            more = self.known_tokens - self.events - self.bundled
            if more > 0:
                self.bundled += more
                self.bundles.append((at_ns, more))

    def end(self, outcome: Outcome, at_ns: int, message: str = "") -> None:
        """Fix how the request ended, no earlier than its last token; `message` becomes a short and harmless line."""
        self.outcome = outcome
        self.done_ns = at_ns if self.last_ns is None else max(at_ns, self.last_ns)
        line = " ".join(blotted(message, self.secret)[: 8 * MESSAGE_CHARS].split())[:MESSAGE_CHARS]
        self.message = line if line.isprintable() else printable(line, MESSAGE_CHARS)[:MESSAGE_CHARS]

    @property
    def finish_reason(self) -> str | None:
        """Why the server ended the choices, in their order with commas between; absent where it does not tell."""
        reasons = ",".join(map(self.finish_reasons.__getitem__, sorted(self.finish_reasons)))[:_REASONS_CHARS]
        return blotted(reasons, self.secret) or None

    @property
    def coalesced(self) -> bool:
        """Whether something on the way gathered the events, so that their gaps mean nothing."""
        return self.events >= COALESCED_EVENTS and self.token_reads <= COALESCED_READS

    @property
    def estimated(self) -> bool:
        """Whether the number of output tokens is that of the token events."""
        return self.completion_tokens is None and not any(choice.tokens for choice in self.choices.values())

    @property
    def output_tokens(self) -> int:
        """N: what usage says, else what events carried, else their number."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(choice.tokens or choice.events for choice in self.choices.values())

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token, absent without one."""
        return None if self.first_ns is None or self.sent_ns is None else self.first_ns - self.sent_ns

    @property
    def e2el_ns(self) -> int | None:
        """End-to-end latency, absent unless the request is ok."""
        if self.outcome is not Outcome.OK or self.last_ns is None or self.sent_ns is None:
            return None
        return self.last_ns - self.sent_ns

    @property
    def ttfc_ns(self) -> int | None:
        """Time to first content, absent unless reasoning came before it."""
        if self.reasoning_ns is None or self.content_ns is None or self.sent_ns is None:
            return None
        return self.content_ns - self.sent_ns

    @property
    def response_time_ns(self) -> int:
        """What Locust's own row of the request holds: from the call to the end of the body, or until it failed."""
        return (self.done_ns or self.called_ns) - self.called_ns

    def gaps_ns(self) -> npt.NDArray[np.int64]:
        """All gaps of an ended request whose times were kept, one choice after the other; none where coalesced."""
        if self.coalesced:
            return np.empty(0, np.int64)
        gaps = [np.diff(np.frombuffer(c.kept + c.times[bool(c.kept) :], np.int64)) for c in self.choices.values()]
        return np.concatenate(gaps) if gaps else np.empty(0, np.int64)

    def tpots_ns(self) -> list[int]:
        """Time per output token of each choice, absent unless the request is ok and not coalesced."""
        if self.outcome is not Outcome.OK or self.coalesced:
            return []
        return [
            (choice.last_ns - choice.first_ns) // (tokens - 1)
            for choice, tokens in zip(self.choices.values(), self._tokens_of_choices(), strict=True)
            if tokens > 1
        ]

    def _tokens_of_choices(self) -> list[int]:
        """Share N out to the choices: by exact counts where events carried them, else by their token events."""
        choices = self.choices.values()
        if len(choices) == 1:
            return [self.output_tokens]
        if all(choice.tokens for choice in choices):
            return [choice.tokens for choice in choices]
        return [round(self.output_tokens * choice.events / self.events) for choice in choices]
