"""Requests of the real client to a scripted server, and what really happened to each beside what was measured.

A time that was measured lies between the two readings of the clock around its sending, or shortly after.
"""

from itertools import pairwise
from time import monotonic_ns
from typing import NamedTuple

import pytest
from emitter import Answer, Emitter, Reply, Script, Server

from vllm_locust.client import Client
from vllm_locust.origin import origin_of
from vllm_locust.timeline import Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

MS = 1_000_000
EARLY_NS, LATE_NS = 1 * MS, 10 * MS
UNSTAMPED_NS = 2_000 * MS
"""How late a time may be that the kernel did not stamp: the machine stalls now and then."""
TRIES = 3
"""A process without a CPU gets two segments in one read, and then one time for both; that is chance, a fault is not."""
PATIENT = Timeouts(connect_s=5, first_token_s=20, idle_s=20)


CLIENTS: list[Client] = []
"""Those of the test; what they keep open is closed after it."""


class Measured(NamedTuple):
    """A request that has ended, and what really happened to it."""

    timeline: Timeline
    answer: Answer
    reply: Reply

    @property
    def times(self) -> list[int]:
        """Times of all token events."""
        return sorted(at_ns for choice in self.timeline.choices.values() for at_ns in choice.times)

    @property
    def gaps(self) -> list[int]:
        return [int(gap) for gap in self.timeline.gaps_ns()]


def client_of(server: Server, timeouts: Timeouts = PATIENT, *, keep_alive: bool = True) -> Client:
    origin, prefix = origin_of(server.url)
    CLIENTS.append(Client(Pool(origin, keep_alive=keep_alive), timeouts, None, prefix))
    return CLIENTS[-1]


def stream(client: Client, endpoint: str = "chat") -> Timeline:
    timeline = Timeline("request-1", "short", endpoint, monotonic_ns())
    client.stream(timeline, b'{"stream":true}')
    assert timeline.outcome is not None
    assert timeline not in client.in_flight
    assert timeline not in client.reading
    return timeline


def measure(
    emitter: Emitter, answer: Answer | Script, endpoint: str = "chat", timeouts: Timeouts = PATIENT
) -> Measured:
    """Ask once, on a new connection; the time of every token event is that of its sending."""
    answer = answer if isinstance(answer, Answer) else Answer(answer)
    for _ in range(TRIES):
        server = emitter.serve(answer)
        timeline = stream(client_of(server, timeouts), endpoint)
        measured = Measured(timeline, answer, server.replies()[0])
        assert_as_sent(measured)
        if latest_ns(measured) <= LATE_NS:
            break
    else:
        pytest.fail(f"{latest_ns(measured) / MS} ms late, {TRIES} times")
    return measured


def latest_ns(measured: Measured) -> int:
    """Return by how much the time of a token event is later than its sending, at most."""
    truth = [measured.reply.sent[piece][1] for piece in measured.answer.token_pieces]
    return max((at_ns - sent_ns for at_ns, sent_ns in zip(measured.times, truth, strict=True)), default=0)


def assert_as_sent(measured: Measured) -> None:
    """Each token event has a time from its sending on, and nothing else is one."""
    timeline, answer, reply = measured
    truth = [reply.sent[piece] for piece in answer.token_pieces]
    assert len(measured.times) == len(truth) == timeline.events
    for at_ns, (before_ns, _) in zip(measured.times, truth, strict=True):
        assert before_ns - EARLY_NS <= at_ns <= reply.sent[-1][1] + UNSTAMPED_NS
    assert timeline.sent_ns is not None
    assert timeline.called_ns <= timeline.sent_ns <= reply.received_ns
    for first, second in pairwise(measured.times):
        assert second >= first
