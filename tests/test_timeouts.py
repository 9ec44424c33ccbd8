"""How long streams are waited for: when each is given up, as what, and how it is seen while it hangs."""

from collections.abc import Iterator
from contextlib import closing

import gevent
import pytest
from emitter import CLOSE, DONE, FINISH, REF, ROLE, SILENCE, Answer, Emitter, Server, script, token
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.client import Client
from vllm_locust.origin import origin_of
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts, given_up, reason
from vllm_locust.transport import Pool

MS = 1_000_000
S = 1000 * MS
WAITS_S = st.none() | st.floats(0.001, 1000).map(lambda wait_s: round(wait_s, 3))


@pytest.fixture(autouse=True)
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A server that is given up is no traceback, in no greenlet."""
    yield
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def client_of(server: Server, timeouts: Timeouts) -> Client:
    return Client(Pool(origin_of(server.url)[0]), timeouts)


def stream(client: Client) -> Timeline:
    timeline = Timeline("request-1", "short", "chat", 0)
    client.stream(timeline, b'{"stream":true}')
    return timeline


def answered(emitter: Emitter, answer: Answer, timeouts: Timeouts) -> Timeline:
    client = client_of(emitter.serve(answer), timeouts)
    with closing(client.pool):
        return stream(client)


def age_ms(timeline: Timeline) -> float:
    assert timeline.done_ns is not None
    assert timeline.sent_ns is not None
    return (timeline.done_ns - timeline.sent_ns) / MS


# The rule


TIMEOUTS = st.builds(Timeouts, first_token_s=WAITS_S, idle_s=WAITS_S, token_s=WAITS_S, total_s=WAITS_S)


@given(TIMEOUTS, st.lists(st.integers(1, 500 * S), max_size=3), st.integers(0, 500 * S))
def test_a_stream_is_given_up_at_the_first_limit_that_it_reaches_and_as_that_one(
    timeouts: Timeouts, ages: list[int], heard: int
) -> None:
    timeline = Timeline("id", "short", "chat", 0)
    timeline.sent_ns = sent_ns = 7 * S
    for age_ns in sorted(ages):
        timeline.token_event(0, sent_ns + age_ns, 0)
    heard_ns = max([sent_ns + age_ns for age_ns in ages] + [heard])
    due = {Outcome.TOTAL_TIMEOUT: (sent_ns, timeouts.total_s)}
    if ages:
        due[Outcome.TOKEN_TIMEOUT] = (sent_ns + max(ages), timeouts.token_s)
        due[Outcome.IDLE_TIMEOUT] = (heard_ns, timeouts.idle_s)
    else:
        due[Outcome.FIRST_TOKEN_TIMEOUT] = (sent_ns, timeouts.first_token_s)
    instants = {o: since_ns + round(wait_s * S) for o, (since_ns, wait_s) in due.items() if wait_s is not None}
    found = given_up(timeouts, timeline, heard_ns)
    if not instants:
        assert found is None
    else:
        assert found is not None
        assert found[0] == min(instants.values()) == instants[found[1]]


def test_what_came_on_a_connection_before_the_request_left_is_no_sign_of_life() -> None:
    timeline = Timeline("id", "short", "chat", 0)
    timeline.sent_ns = 100 * S
    timeline.token_event(0, 101 * S, 0)
    assert given_up(Timeouts(idle_s=5), timeline, 2 * S) == (105 * S, Outcome.IDLE_TIMEOUT)


def test_each_reason_names_its_limit_and_how_far_the_stream_had_got() -> None:
    timeline = Timeline("id", "short", "chat", 0)
    timeouts = Timeouts(first_token_s=300, idle_s=1.5, token_s=20, total_s=600)
    assert reason(timeouts, timeline, Outcome.FIRST_TOKEN_TIMEOUT) == "no token within 300 s"
    assert reason(timeouts, timeline, Outcome.TOTAL_TIMEOUT) == "not at its end within 600 s, after 0 token events"
    timeline.token_event(0, 1, 0)
    assert reason(timeouts, timeline, Outcome.IDLE_TIMEOUT) == "no byte for 1.5 s after 1 token event"
    timeline.token_event(0, 2, 0)
    assert reason(timeouts, timeline, Outcome.TOKEN_TIMEOUT) == "no token for 20 s after 2 token events"


# Streams


def test_case_31_comments_are_no_tokens_where_those_have_a_limit(emitter: Emitter) -> None:
    """Sources: fw-ai/benchmark#91, aaif-goose/goose#8110, AtomicBot-ai/atomic-agent#323."""
    comments = [(at, b": still here\n\n") for at in range(400, 6000, 100)]
    answer = Answer(script(*REF[:2], *comments), ending=SILENCE)
    timeline = answered(emitter, answer, Timeouts(idle_s=5, token_s=0.9))
    assert (timeline.outcome, timeline.events) == (Outcome.TOKEN_TIMEOUT, 1)
    assert timeline.message == "no token for 0.9 s after 1 token event"
    assert timeline.comments > 1
    assert timeline.done_ns is not None
    assert timeline.last_ns is not None
    assert timeline.done_ns >= timeline.last_ns + 900 * MS


def test_each_token_puts_off_the_limit_of_the_next_one(emitter: Emitter) -> None:
    tokens = [(at, token("la")) for at in range(20, 3020, 50)]
    timeline = answered(
        emitter, Answer(script((1, ROLE), *tokens, (3020, FINISH), (3020, DONE))), Timeouts(token_s=2.5)
    )
    assert (timeline.outcome, timeline.events) == (Outcome.OK, len(tokens))


@pytest.mark.parametrize("tokens", [0, 5, 400])
def test_the_whole_of_a_request_may_have_a_limit(emitter: Emitter, tokens: int) -> None:
    pieces = [(20 + 20 * i, token("la")) for i in range(tokens)]
    timeline = answered(emitter, Answer(script((1, ROLE), *pieces), ending=SILENCE), Timeouts(total_s=0.6))
    assert timeline.outcome is Outcome.TOTAL_TIMEOUT
    assert timeline.message.startswith("not at its end within 0.6 s, after ")
    assert bool(timeline.events) is bool(tokens)
    assert age_ms(timeline) >= 600


def test_the_limit_of_silence_holds_from_the_first_token_on_however_long_that_might_have_taken(
    emitter: Emitter,
) -> None:
    timeline = answered(emitter, Answer(script((1, ROLE), (5, token("a"))), ending=SILENCE), Timeouts(idle_s=0.3))
    assert (timeline.outcome, timeline.message) == (Outcome.IDLE_TIMEOUT, "no byte for 0.3 s after 1 token event")


def test_a_server_that_sends_without_a_pause_does_not_outrun_its_limit(emitter: Emitter) -> None:
    """Nobody ever waits for what is there already, and so no clock would be looked at."""
    flood = [(2, token("la") * 1500)] * 2000
    timeline = answered(emitter, Answer(script((1, ROLE), *flood, (3, DONE)), ending=CLOSE), Timeouts(total_s=0.3))
    assert timeline.outcome is Outcome.TOTAL_TIMEOUT
    assert 0 < timeline.events < 3_000_000


def test_who_waits_for_ever_has_the_answer(emitter: Emitter) -> None:
    timeline = answered(emitter, Answer(script(*REF)), Timeouts(first_token_s=None, idle_s=None))
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, 4)


def test_case_13_the_end_of_a_body_is_not_waited_for_after_an_error(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#57519, sgl-project/sglang#38868."""
    error = (350, b'data: {"error":{"message":"engine stopped","type":"InternalServerError","code":500}}\n\n')
    timeline = answered(emitter, Answer(script(*REF[:2], error), ending=SILENCE), Timeouts())
    assert (timeline.outcome, timeline.events) == (Outcome.STREAM_ERROR, 1)
    assert "engine stopped" in timeline.message


# While it hangs


def test_the_longest_silence_is_that_of_the_stream_that_has_been_quiet_for_longest(emitter: Emitter) -> None:
    silent = Answer(script((1, ROLE)), ending=SILENCE)
    talking = Answer(script(*((at, token("a")) for at in range(5, 5000, 5))), ending=SILENCE)
    server = emitter.serve([silent, talking])
    client = client_of(server, Timeouts())
    with closing(client.pool):
        assert client.longest_silence_ns == 0
        streams = [gevent.spawn(stream, client)]
        gevent.sleep(0.3)
        streams.append(gevent.spawn(stream, client))
        gevent.sleep(0.7)
        (quiet, _), (talks, _) = client.reading.items()
        assert (quiet.events, talks.events > 0) == (0, True)
        both_ns = client.longest_silence_ns
        assert quiet.sent_ns is not None
        assert both_ns >= 500 * MS
        client.in_flight[quiet].kill()
        assert client.longest_silence_ns < both_ns
        client.cut_all()
        gevent.joinall(streams)
        assert client.longest_silence_ns == 0
