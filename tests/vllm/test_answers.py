"""What vLLM answers to single requests, and that we take from it what it counted itself."""

import json
import urllib.request
from itertools import pairwise
from typing import Any

import pytest
from asking import CONTINUOUS, ENDPOINTS, ask, body_of, client_of
from server import KEY, POSITIONS, Server

from vllm_locust.timeline import Outcome, Timeline

TOKENS = 40
END, SPECIAL = "1", ("0", "1", "2", "3")
"""Ids of the token that ends an answer, and of all that have no text, in the order in which the model has them."""
endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


def assert_in_order(timeline: Timeline) -> None:
    """Instants follow each other: sent, token events, the end of the body."""
    times = [time for choice in timeline.choices.values() for time in choice.times]
    assert timeline.sent_ns is not None
    assert timeline.done_ns is not None
    assert timeline.called_ns < timeline.sent_ns < min(times)
    assert max(times) <= timeline.done_ns
    assert all(a <= b for choice in timeline.choices.values() for a, b in pairwise(choice.times))


def unstreamed(server: Server, endpoint: str, body: dict[str, Any]) -> str:
    """Return the text of an answer."""
    path = "chat/completions" if endpoint == "chat" else "completions"
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    return str(choice["message"]["content"] if endpoint == "chat" else choice["text"])


@endpoints
def test_tokens_are_those_of_usage_however_many_events_they_came_in(plain: Server, endpoint: str) -> None:
    before = plain.counted()
    timeline = ask(plain, endpoint, body_of(endpoint, tokens=TOKENS))
    assert timeline.outcome is Outcome.OK
    assert timeline.finish_reasons == {0: "length"}
    assert (timeline.output_tokens, timeline.estimated) == (TOKENS, False)
    # vLLM gathers what it has not sent yet, so an event is a token or more; the chunk of the role is none.
    assert TOKENS / 2 < timeline.events <= TOKENS
    assert_in_order(timeline)
    plain.assert_counted(before, length=1, generated=TOKENS, prompted=timeline.input_tokens or 0)


@endpoints
def test_without_usage_tokens_are_estimated_by_events(plain: Server, endpoint: str) -> None:
    timeline = ask(plain, endpoint, body_of(endpoint, stream_options=None))
    assert (timeline.outcome, timeline.input_tokens, timeline.estimated) == (Outcome.OK, None, True)
    assert timeline.output_tokens == timeline.events


@endpoints
@pytest.mark.parametrize(
    "exact", [CONTINUOUS, {"return_token_ids": True, "stream_options": None}], ids=["usage", "ids"]
)
def test_events_that_carry_counts_tell_exactly(plain: Server, endpoint: str, exact: dict[str, Any]) -> None:
    before = plain.counted()
    timeline = ask(plain, endpoint, body_of(endpoint, tokens=TOKENS) | exact)
    assert timeline.outcome is Outcome.OK
    assert (timeline.choices[0].tokens, timeline.known_tokens, timeline.output_tokens) == (TOKENS, TOKENS, TOKENS)
    assert timeline.events + timeline.bundled == TOKENS
    assert not timeline.estimated
    plain.assert_counted(before, length=1, generated=TOKENS, prompted=plain.since(before)["prompted"])


@endpoints
@pytest.mark.parametrize("more", [{}, CONTINUOUS], ids=["plain", "continuous"])
def test_two_choices_are_measured_apart(plain: Server, endpoint: str, more: dict[str, Any]) -> None:
    before = plain.counted()
    timeline = ask(plain, endpoint, body_of(endpoint, tokens=TOKENS, n=2) | more)
    assert timeline.outcome is Outcome.OK
    assert timeline.finish_reasons == {0: "length", 1: "length"}
    assert sorted(timeline.choices) == [0, 1]
    assert timeline.output_tokens == 2 * TOKENS
    assert [choice.tokens for choice in timeline.choices.values()] == ([TOKENS, TOKENS] if more else [0, 0])
    assert len(timeline.tpots_ns()) == 2
    assert_in_order(timeline)
    plain.assert_counted(before, length=2, generated=2 * TOKENS, prompted=2 * (timeline.input_tokens or 0))


@endpoints
def test_a_stop_string_ends_the_answer(plain: Server, endpoint: str) -> None:
    body = body_of(endpoint, tokens=TOKENS)
    text = unstreamed(plain, endpoint, body)
    # Some bytes of its own make no character; what they would be stopped by, nobody can send.
    stop = next(word for word in text[len(text) // 2 :].split("\ufffd") if word)[:5]
    before = plain.counted()
    timeline = ask(plain, endpoint, body | {"stop": [stop]})
    assert timeline.outcome is Outcome.OK
    assert timeline.finish_reasons == {0: "stop"}
    assert 1 < timeline.output_tokens < TOKENS
    assert timeline.events <= timeline.output_tokens
    plain.assert_counted(before, stop=1, generated=timeline.output_tokens, prompted=timeline.input_tokens or 0)


@endpoints
def test_tokens_without_a_text_are_tokens(plain: Server, endpoint: str) -> None:
    """The model is made to say nothing but the end of the answer, and to go on; special tokens have no text."""
    timeline = ask(plain, endpoint, body_of(endpoint, tokens=8, logit_bias={END: 100}))
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, 8)
    assert 1 <= timeline.events <= 8


@endpoints
def test_an_answer_of_one_token_has_no_gap(plain: Server, endpoint: str) -> None:
    timeline = ask(plain, endpoint, body_of(endpoint, tokens=1))
    assert (timeline.outcome, timeline.output_tokens, timeline.events) == (Outcome.OK, 1, 1)
    assert not list(timeline.gaps_ns())
    assert timeline.e2el_ns == timeline.ttft_ns


def test_an_answer_that_ends_at_once_is_one_token(plain: Server) -> None:
    before = plain.counted()
    timeline = ask(plain, "chat", body_of("chat", logit_bias={END: 100}, ignore_eos=False))
    assert (timeline.outcome, timeline.finish_reasons, timeline.output_tokens) == (Outcome.OK, {0: "stop"}, 1)
    plain.assert_counted(before, stop=1, generated=1, prompted=timeline.input_tokens or 0)


# Refused, before anything is generated

LONG = "word " * POSITIONS
REFUSED = {
    "long chat": ("chat", {"messages": [{"role": "user", "content": LONG}]}, 400, str(POSITIONS)),
    "long completions": ("completions", {"prompt": LONG}, 400, str(POSITIONS)),
    "max_tokens chat": ("chat", {"max_tokens": 100_000}, 400, "100000"),
    "max_tokens completions": ("completions", {"max_tokens": 100_000}, 400, "100000"),
    "model chat": ("chat", {"model": "other"}, 404, "other"),
    "model completions": ("completions", {"model": "other"}, 404, "other"),
    "empty prompt": ("completions", {"prompt": ""}, 400, "prompt"),
    "temperature": ("chat", {"temperature": -1}, 400, "temperature"),
}


@pytest.mark.parametrize(("endpoint", "wrong", "status", "word"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_has_status_and_message(
    plain: Server, endpoint: str, wrong: dict[str, Any], status: int, word: str
) -> None:
    before = plain.counted()
    timeline = ask(plain, endpoint, body_of(endpoint) | wrong)
    assert (timeline.outcome, timeline.status) == (Outcome.HTTP_4XX, status)
    assert word in timeline.message
    assert timeline.first_ns is None
    plain.assert_counted(before)


@endpoints
@pytest.mark.parametrize("key", ["", "another"])
def test_without_the_key_nothing_is_answered(limited: Server, endpoint: str, key: str) -> None:
    before = limited.counted()
    timeline = ask(limited, endpoint, client=client_of(limited, key))
    assert (timeline.outcome, timeline.status) == (Outcome.HTTP_4XX, 401)
    assert KEY not in timeline.message
    limited.assert_counted(before)


@endpoints
def test_with_the_key_all_is_well(limited: Server, endpoint: str) -> None:
    timeline = ask(limited, endpoint, body_of(endpoint, "A prompt of its own for this"), client_of(limited, KEY))
    assert (timeline.outcome, timeline.cached_tokens) == (Outcome.OK, 0)


def test_prompt_tokens_that_were_cached_are_told(limited: Server) -> None:
    body = body_of("completions", "The same again. " * 60)
    first, second = (ask(limited, "completions", body, client_of(limited, KEY)) for _ in range(2))
    assert first.input_tokens == second.input_tokens
    assert first.cached_tokens == 0
    assert second.input_tokens is not None
    assert second.cached_tokens is not None
    assert second.input_tokens / 2 < second.cached_tokens < second.input_tokens


# Reasoning; the parser takes all for reasoning until the prompt or the answer has said `</think>`


def reasoning(**more: Any) -> dict[str, Any]:
    """Return a chat in which no special token is generated, so that reasoning never ends by itself."""
    return body_of("chat", logit_bias=dict.fromkeys(SPECIAL, -100), **more)


def test_reasoning_is_tokens(limited: Server) -> None:
    timeline = ask(limited, "chat", reasoning(), client_of(limited, KEY))
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, TOKENS)
    assert timeline.reasoning_ns == timeline.first_ns
    assert timeline.content_ns is None
    assert timeline.ttfc_ns is None


def test_with_reasoning_off_all_is_content(limited: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    timeline = ask(limited, "chat", reasoning(**off), client_of(limited, KEY))
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, TOKENS)
    assert timeline.content_ns == timeline.first_ns
    assert timeline.reasoning_ns is None
    assert timeline.ttfc_ns is None


def test_an_answer_of_reasoning_that_is_kept_back_is_empty(limited: Server) -> None:
    """The server generates, and shows nothing of it; its usage tells, but nobody has seen a token."""
    before = limited.counted()
    timeline = ask(limited, "chat", reasoning(include_reasoning=False), client_of(limited, KEY))
    assert (timeline.outcome, timeline.events, timeline.completion_tokens) == (Outcome.EMPTY, 0, TOKENS)
    limited.assert_counted(before, length=1, generated=TOKENS, prompted=timeline.input_tokens or 0)


# Several tokens per event


@endpoints
def test_at_stream_interval_4_an_event_is_4_tokens_after_the_first(bundling: Server, endpoint: str) -> None:
    timeline = ask(bundling, endpoint, body_of(endpoint, tokens=201) | CONTINUOUS)
    assert (timeline.outcome, timeline.output_tokens, timeline.known_tokens) == (Outcome.OK, 201, 201)
    assert 40 <= timeline.events <= 1 + 200 / 4
    (tpot_ns,) = timeline.tpots_ns()
    gaps_ns = timeline.gaps_ns()
    assert tpot_ns == gaps_ns.sum() // 200
