"""Every way in which a server can answer ends in exactly one outcome, with the numbers that the server caused.

Cases are those of public reports; each names its source. What was measured is compared with what the scripted server
really did, piece by piece: a time lies between the two readings of the clock around its sending.
"""

import gzip
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from time import monotonic_ns, sleep
from wsgiref.types import StartResponse, WSGIEnvironment

import gevent
import pytest
from dialects import DIALECTS
from emitter import (
    CHUNKED,
    CLOSE,
    DONE,
    FIN,
    FINISH,
    KEEP,
    LENGTH,
    RAW,
    REF,
    ROLE,
    RST,
    SCALE,
    SILENCE,
    UNTIL_CLOSE,
    Answer,
    Emitter,
    Script,
    Token,
    Tokens,
    chunk,
    delta,
    finish,
    reasoning,
    script,
    token,
    usage,
)
from gevent.pywsgi import WSGIServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measuring import (
    CLIENTS,
    EARLY_NS,
    MS,
    PATIENT,
    UNSTAMPED_NS,
    Measured,
    assert_as_sent,
    client_of,
    measure,
    stream,
)

from vllm_locust.client import Client
from vllm_locust.origin import Origin, origin_of
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

pytestmark = pytest.mark.usefixtures("quiet")


def assert_numbers(measured: Measured, tokens: int) -> None:
    """All metrics of an ok request of one choice follow from the times of its token events."""
    timeline, times = measured.timeline, measured.times
    assert (timeline.outcome, timeline.message, timeline.status) == (Outcome.OK, "", 200)
    assert timeline.output_tokens == tokens
    assert timeline.sent_ns is not None
    assert timeline.ttft_ns == times[0] - timeline.sent_ns
    assert timeline.e2el_ns == times[-1] - timeline.sent_ns
    assert measured.gaps == [second - first for first, second in pairwise(times)]
    assert timeline.tpots_ns() == ([(times[-1] - times[0]) // (tokens - 1)] if tokens > 1 else [])
    assert timeline.response_time_ns >= timeline.e2el_ns


def assert_ref(measured: Measured, *, ttft_ms: float = 300) -> None:
    """The numbers are those of REF: 4 tokens, the first no earlier than the server sends it."""
    assert_numbers(measured, tokens=4)
    timeline = measured.timeline
    assert len(measured.gaps) == 3
    assert timeline.ttft_ns is not None
    assert timeline.ttft_ns >= ttft_ms * SCALE * MS - EARLY_NS
    assert (timeline.input_tokens, timeline.completion_tokens, timeline.estimated) == (7, 4, False)
    assert timeline.finish_reasons == {0: "stop"}


def assert_no_samples(timeline: Timeline) -> None:
    assert (timeline.ttft_ns, timeline.e2el_ns, timeline.tpots_ns(), list(timeline.gaps_ns())) == (None, None, [], [])
    assert timeline.events == 0


def assert_failed_after(measured: Measured, outcome: Outcome, tokens: int) -> None:
    """A request that failed in the middle keeps what its user saw, and has no number of a whole request."""
    timeline = measured.timeline
    assert timeline.outcome is outcome
    assert timeline.events == tokens
    assert timeline.ttft_ns is not None
    assert len(measured.gaps) == tokens - 1
    assert (timeline.e2el_ns, timeline.tpots_ns()) == (None, [])


def without(*pieces: bytes) -> list[tuple[float, bytes]]:
    return [entry for entry in REF if entry[1] not in pieces]


def changed(change: Callable[[bytes], bytes]) -> Script:
    """Return REF with all pieces changed; what completed a token event still does."""
    return script(*((at, type(piece)(change(piece))) for at, piece in REF))


def test_ref(emitter: Emitter) -> None:
    assert_ref(measure(emitter, script(*REF)))


# A. Framing of events


def test_case_01_comments_before_the_first_token(emitter: Emitter) -> None:
    """Sources: mnfst/llm-gateway#2053, brainlid/langchain#569, deepnoodle-ai/dive#206, mistralai/mistral-vibe#794."""
    glued = (350, Token(b": ping\n" + token("pha")))
    comments = [(20, b": QUEUED\n\n"), (40, b":\n\n"), (60, b": ping\n\n")]
    measured = measure(emitter, script(*comments, glued, *without(token("pha"))))
    assert_ref(measured)
    assert measured.timeline.comments == 4


def test_case_03_keep_alives_disguised_as_data(emitter: Emitter) -> None:
    """Sources: anomalyco/opencode#50871, Growth-Circle/cadis#2329, Routstr/routstr-core#543."""
    heartbeats = [(150, b"data: : keepalive\n\n"), (160, b"data:\n\n"), (170, b"data: \n\n")]
    measured = measure(emitter, script(*REF, *heartbeats))
    assert_ref(measured)
    assert measured.timeline.heartbeats == 3


@pytest.mark.parametrize(
    "odd", [b'data: {"choi\n\n', b"data: hello\n\n", b"data: 5\n\n", b'data: "x"\n\n', b"data: []\n\n"]
)
def test_case_03_other_data_that_are_no_chunk_fail_the_request(emitter: Emitter, odd: bytes) -> None:
    """Sources: as above."""
    measured = measure(emitter, script((100, ROLE), (300, token("Al")), (350, odd), (450, DONE)))
    assert_failed_after(measured, Outcome.MALFORMED, tokens=1)
    assert odd[6:-2].decode() in measured.timeline.message


def test_case_04_no_space_after_the_colon(emitter: Emitter) -> None:
    """Sources: huggingface/text-generation-inference#2019, sgl-project/genai-bench#159, openai/openai-python#498."""
    assert_ref(measure(emitter, changed(lambda piece: piece.replace(b"data: ", b"data:"))))


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_case_05_other_line_ends_one_of_them_cut_in_two_and_a_byte_order_mark(emitter: Emitter, end: bytes) -> None:
    """Sources: oobabooga/textgen#5678, kubernetes-sigs/inference-perf#781; WHATWG HTML, section 9.2.5."""
    pieces = [(at, type(piece)(piece.replace(b"\n", end))) for at, piece in REF]
    pieces[0] = (100, b"\xef\xbb\xbf" + pieces[0][1])
    whole = pieces[2][1]
    pieces[2:3] = [(350, Token(whole[:-1])), (365, whole[-1:])] if end == b"\r\n" else [(350, Token(whole))]
    assert_ref(measure(emitter, script(*pieces)))


WIDE = (
    (100, ROLE),
    *zip((300, 350, 400, 450), map(token, ("é", "漢", " 🙂", "  x")), strict=True),
    (450, FINISH),
    (455, usage(7, 4)),
    (455, DONE),
)
"""REF with texts of several bytes; that they come out as they were is for tests/test_sse.py to see."""


def test_case_07_every_byte_a_write_of_its_own(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#51172, #38732, #50868; elastic/elasticsearch#153980; NVIDIA/TensorRT-LLM#13952."""
    assert_ref(measure(emitter, Answer(script(*WIDE), bytewise=True)))


@pytest.mark.parametrize("pieces", [REF, WIDE], ids=["ref", "wide"])
def test_case_07_the_whole_body_in_one_write(emitter: Emitter, pieces: Script) -> None:
    """Sources: as above; 42 for the times."""
    answer = Answer([(25, b"".join(piece for _, piece in pieces))])
    server = emitter.serve(answer)
    timeline = stream(client_of(server))
    (before_ns, after_ns), *_ = server.replies()[0].sent
    assert (timeline.outcome, timeline.output_tokens, timeline.coalesced) == (Outcome.OK, 4, False)
    if timeline.token_reads == 1:
        assert list(timeline.gaps_ns()) == [0, 0, 0]
    assert timeline.first_ns is not None
    assert before_ns - EARLY_NS <= timeline.first_ns <= after_ns + UNSTAMPED_NS


def test_case_07_very_long_lines(emitter: Emitter) -> None:
    """Source: kubernetes-sigs/inference-perf#283."""
    entry = '{"token":" be","logprob":-0.25,"bytes":[32,98,101],"top_logprobs":[]},'
    logprobs = '{"content":[' + (entry * (300_000 // len(entry)))[:-1] + "]}"
    long = Token(chunk(f'[{{"index":0,"delta":{{"content":" be"}},"logprobs":{logprobs},"finish_reason":null}}]'))
    assert len(long) > 300_000
    assert_ref(measure(emitter, script(*without(token(" be")), (400, long))))


def test_case_07_a_boundary_between_the_two_line_ends_of_an_event(emitter: Emitter) -> None:
    """Sources: as above."""
    halves = [half for _, piece in REF for half in (piece[:-1], type(piece)(piece[-1:]))]
    times = [at + extra for at, _ in REF[:5] for extra in (0, 20)] + [490, 500, 510, 520, 530, 540]
    assert_ref(measure(emitter, script(*zip(times, halves, strict=True))))


def test_case_08_separators_of_unicode_are_no_line_ends(emitter: Emitter) -> None:
    """Sources: modelscope/evalscope#1642, florimondmanca/httpx-sse#34, langgenius/dify#39008."""
    odd = [(300, token("a\u2028b")), (350, token("c\u0085d\u2029")), (400, token("\x7f"))]
    measured = measure(emitter, script((100, ROLE), *odd, *REF[4:]))
    assert_ref(measured)


def test_case_09_several_data_lines_and_other_fields(emitter: Emitter) -> None:
    """Sources: modelscope/evalscope#1474, SamSaffron/term-llm#454, Growth-Circle/cadis#2053."""
    event = Token(
        b'event: message\nid: 9\nretry: 3000\ndata: {"id":"c1","choices":[{"index":0,\n'
        b'data: "delta":{"content":"pha"},"finish_reason":null}]}\n\n'
    )
    comments = [(410, b":\n\n"), (420, b"foo: bar\n\n"), (430, b"id: 10\n\n")]  # the id is sticky, no event is
    assert_ref(measure(emitter, script(*without(token("pha")), (350, event), *comments)))


@pytest.mark.parametrize("framing", [CHUNKED, LENGTH, UNTIL_CLOSE])
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param([(455, usage(7, 4)), (455, b"data: [DONE]")], id="done-without-line-end"),
        pytest.param([(455, usage(7, 4)[:-1])], id="usage-with-one-line-end"),
        pytest.param([(455, usage(7, 4)[:-2])], id="usage-without-line-end"),
    ],
)
def test_case_10_the_last_event_lacks_its_end(emitter: Emitter, ending: Script, framing: str) -> None:
    """Sources: openai/openai-node#2725, google-gemini/gemini-cli#29059."""
    answer = Answer(script(*REF[:6], *ending), framing=framing, ending=CLOSE)
    assert_ref(measure(emitter, answer))


@pytest.mark.parametrize("framing", [CHUNKED, LENGTH, UNTIL_CLOSE])
@pytest.mark.parametrize("end", [2, 70, -3])
def test_case_10_a_stream_that_is_cut_in_an_event_is_truncated(emitter: Emitter, framing: str, end: int) -> None:
    """Sources: as above."""
    cut = bytes(token(" be"))[:end]
    measured = measure(emitter, Answer(script(*REF[:3], (400, cut)), framing=framing, ending=CLOSE))
    assert_failed_after(measured, Outcome.TRUNCATED, tokens=2)


# B. Contents of streams


@pytest.mark.parametrize(
    ("framing", "version"), [(CHUNKED, "HTTP/1.1"), (UNTIL_CLOSE, "HTTP/1.1"), (UNTIL_CLOSE, "HTTP/1.0")]
)
def test_case_11_a_clean_end_without_finish_reason_and_done(emitter: Emitter, framing: str, version: str) -> None:
    """Sources: kubernetes-sigs/inference-perf#655, infiniflow/ragflow#19498, vllm-project/vllm#54628."""
    closing = ("Connection: close",) if framing == UNTIL_CLOSE else ()
    answer = Answer(script(*REF[:3]), framing=framing, version=version, headers=closing, ending=CLOSE, end_ms=100)
    measured = measure(emitter, answer)
    assert_failed_after(measured, Outcome.TRUNCATED, tokens=2)
    assert measured.timeline.output_tokens == 2


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_a_body_that_the_end_of_the_connection_ends_is_whole(emitter: Emitter, version: str) -> None:
    answer = Answer(script(*REF), framing=UNTIL_CLOSE, version=version, headers=("Connection: close",), ending=CLOSE)
    assert_ref(measure(emitter, answer))


@pytest.mark.parametrize("framing", [CHUNKED, LENGTH])
@pytest.mark.parametrize(
    "tail",
    [
        pytest.param([FINISH, usage(7, 4)], id="without-done"),
        pytest.param([FINISH, usage(7, 4), DONE, DONE], id="two-done"),
        pytest.param([usage(7, 4), DONE], id="without-finish-reason"),
        pytest.param([FINISH, DONE, usage(7, 4)], id="usage-after-done"),
    ],
)
def test_case_12_done_and_finish_reason_in_every_combination(emitter: Emitter, tail: list[bytes], framing: str) -> None:
    """Sources: vllm-project/vllm#378, infiniflow/ragflow#19498, NVIDIA/nvcf#1826, and others that disagree."""
    answer = Answer(script(*REF[:5], *((455, piece) for piece in tail)), framing=framing)
    measured = measure(emitter, answer)
    assert_numbers(measured, tokens=4)
    assert measured.timeline.completion_tokens == 4


@pytest.mark.parametrize("last_ms", [450, 6000])
def test_case_12_done_may_come_once_for_each_choice(emitter: Emitter, last_ms: int) -> None:
    """Source: vllm-project/vllm#378; the end of the body is waited for longer than after the last one."""
    first = [(300, token("a", index=0)), (350, finish(index=0)), (350, DONE)]
    second = [(at, token("b", index=1)) for at in range(400, last_ms, 400)]
    second += [(last_ms, token("c", index=1)), (last_ms, finish(index=1)), (last_ms, DONE)]
    measured = measure(emitter, script((100, ROLE), *first, *second, (last_ms + 5, usage(7, len(second) - 1))))
    timeline = measured.timeline
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, len(second) - 1)
    assert timeline.finish_reasons == {0: "stop", 1: "stop"}
    assert [choice.events for choice in timeline.choices.values()] == [1, len(second) - 2]


@pytest.mark.parametrize(("ending", "outcome"), [(CLOSE, Outcome.TRUNCATED), (FIN, Outcome.CONNECTION_LOST)])
def test_case_12_tokens_behind_done_are_of_a_choice_that_has_to_end_too(
    emitter: Emitter, ending: str, outcome: Outcome
) -> None:
    """Source: vllm-project/vllm#378."""
    first = [(300, token("a", index=0)), (350, finish(index=0)), (350, DONE)]
    answer = Answer(script((100, ROLE), *first, (400, token("b", index=1)), (450, token("c", index=1))), ending=ending)
    assert measure(emitter, answer).timeline.outcome is outcome


def test_case_12_a_connection_is_drained_before_it_is_used_again(emitter: Emitter) -> None:
    """Source: vllm-project/vllm#378."""
    server = emitter.serve([Answer(script(*REF, (470, DONE))), Answer(script(*REF))])
    client = client_of(server)
    first, second = stream(client), stream(client)
    replies = server.replies(2)
    assert [reply.connection for reply in replies] == [0, 0]
    assert (second.connect_ns, second.reconnects) == (None, 0)
    assert_ref(Measured(first, Answer(script(*REF)), replies[0]))
    assert_as_sent(Measured(second, Answer(script(*REF)), replies[1]))
    assert_ref(Measured(second, Answer(script(*REF)), replies[1]))


@pytest.mark.parametrize("ending", [SILENCE, FIN, RST])
def test_case_12_after_done_the_end_of_the_body_may_be_missing(emitter: Emitter, ending: str) -> None:
    """Source: infiniflow/ragflow#19498."""
    answer = Answer(script(*REF), ending=ending, end_ms=455 * SCALE + 20)
    server = emitter.serve([answer, Answer(script(*REF))])
    client = client_of(server)
    timeline = stream(client)
    measured = Measured(timeline, answer, server.replies()[0])
    assert_as_sent(measured)
    assert_ref(measured)
    last_before_ns, last_after_ns = measured.reply.sent[-1]
    assert timeline.done_ns is not None
    assert last_before_ns - EARLY_NS <= timeline.done_ns <= last_after_ns + UNSTAMPED_NS / 4
    assert stream(client).outcome is Outcome.OK
    assert server.replies(2)[1].connection == 1, "a connection in the middle of a body was used again"


UNFINISHED = "the body ended without a finish reason and without [DONE]"
ENGINE_STOPPED = b'data: {"error":{"message":"engine stopped","type":"InternalServerError","code":500}}\n\n'


def test_case_13_an_error_after_tokens(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#57519, sgl-project/sglang#38868, pegainfer-project/pegainfer#142."""
    measured = measure(emitter, script(*REF[:2], (350, ENGINE_STOPPED), (350, DONE)))
    assert_failed_after(measured, Outcome.STREAM_ERROR, tokens=1)
    assert measured.timeline.message == "code 500: engine stopped"


@pytest.mark.parametrize("ending", [FIN, RST])
def test_case_13_an_error_stays_the_error_when_the_connection_breaks_next(emitter: Emitter, ending: str) -> None:
    """Sources: as above."""
    answer = Answer(script(*REF[:2], (350, ENGINE_STOPPED)), ending=ending, end_ms=350 * SCALE + 20)
    measured = measure(emitter, answer)
    assert_failed_after(measured, Outcome.STREAM_ERROR, tokens=1)
    assert measured.timeline.message == "code 500: engine stopped"


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_case_13_a_finish_reason_that_is_an_error(emitter: Emitter, reason: str) -> None:
    """Sources: as above; vllm-project/vllm#57082."""
    measured = measure(emitter, script(*REF[:2], (350, finish(reason)), (350, usage(7, 1)), (350, DONE)))
    assert_failed_after(measured, Outcome.STREAM_ERROR, tokens=1)
    assert measured.timeline.message == f"finish_reason is {reason}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(
            b'error: {"code":500,"message":"no slot","type":"server_error"}\n\n',
            "code 500: no slot",
            id="llama.cpp-2025",
        ),
        pytest.param(
            b'data: {"error":{"code":500,"message":"no slot","type":"server_error"}}\n\n',
            "code 500: no slot",
            id="llama.cpp",
        ),
        pytest.param(
            b'data: {"error":{"object":"error","message":"gone","type":"Gone","param":null,"code":503}}\n\n',
            "code 503: gone",
            id="sglang",
        ),
        pytest.param(
            b'data:{"error":"Request failed during generation: out of memory","error_type":"generation"}\n\n',
            "generation: Request failed during generation: out of memory",
            id="tgi",
        ),
        pytest.param(
            b'data: {"error": {"message": "litellm.Timeout: upstream", "type": "None", "param": "None", "code": "408"}}'
            b"\n\n",
            "code 408: litellm.Timeout: upstream",
            id="litellm",
        ),
        pytest.param(
            b'data: {"error":{"message":"server had an error","type":"server_error","param":null,"code":null}}\n\n',
            "server_error: server had an error",
            id="azure",
        ),
        pytest.param(
            b'data: {"id":"gen-1","object":"chat.completion.chunk","created":1,"model":"m","provider":"p","error":'
            b'{"code":502,"message":"Provider disconnected","metadata":{}},"choices":[{"index":0,"delta":{"role":'
            b'"assistant","content":""},"finish_reason":"error","native_finish_reason":"error"}]}\n\n',
            "code 502: Provider disconnected",
            id="openrouter",
        ),
        pytest.param(
            chunk('[{"index":0,"delta":{"content":""},"error":{"code":429,"message":"busy"},"finish_reason":"error"}]'),
            "code 429: busy",
            id="openrouter-choice",
        ),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1])
def test_case_13_and_14_errors_as_servers_send_them(emitter: Emitter, error: bytes, message: str, tokens: int) -> None:
    """Sources: as of 13 and 14; ggml-org/llama.cpp#16109."""
    timeline = measure(emitter, script(*REF[: tokens + 1], (350, error), (350, DONE))).timeline
    assert (timeline.outcome, timeline.message, timeline.status) == (Outcome.STREAM_ERROR, message, 200)
    assert (timeline.e2el_ns, timeline.tpots_ns()) == (None, [])


@pytest.mark.parametrize("after", [b"data: junk\n\n", b"data: {\n\n", bytes(token("pha")) * 3, ENGINE_STOPPED])
def test_case_13_an_error_stays_the_error_whatever_comes_behind_it(emitter: Emitter, after: bytes) -> None:
    """Sources: as above."""
    measured = measure(emitter, script(*REF[:2], (350, ENGINE_STOPPED), (360, after), (370, after), (380, DONE)))
    assert_failed_after(measured, Outcome.STREAM_ERROR, tokens=1)
    assert measured.timeline.message == "code 500: engine stopped"


def test_case_13_the_message_of_an_error_is_one_short_line(emitter: Emitter) -> None:
    """Sources: as above."""
    error = b'data: {"error":{"message":"' + b"first\\nsecond " * 500 + b'"}}\n\n'
    timeline = measure(emitter, script(*REF[:2], (350, error))).timeline
    assert timeline.outcome is Outcome.STREAM_ERROR
    assert len(timeline.message) <= 200
    assert "\n" not in timeline.message


@pytest.mark.parametrize(
    ("pieces", "outcome", "message"),
    [
        pytest.param([ENGINE_STOPPED, DONE], Outcome.STREAM_ERROR, "code 500: engine stopped", id="object"),
        pytest.param(
            [b'data:{"error":"too busy","error_type":"overloaded"}\n\n'],
            Outcome.STREAM_ERROR,
            "overloaded: too busy",
            id="flat",
        ),
        pytest.param(
            [b'event: error\ndata: {"message":"bad input"}\n\n'], Outcome.STREAM_ERROR, "bad input", id="event-error"
        ),
        pytest.param([b"event: error\ndata: it broke\n\n"], Outcome.STREAM_ERROR, "it broke", id="event-error-text"),
        pytest.param(
            [b'data: {"object":"error","message":"too long","code":400}\n\n', DONE],
            Outcome.STREAM_ERROR,
            "code 400: too long",
            id="object-error",
        ),
        pytest.param([DONE], Outcome.EMPTY, "the answer ended without a token", id="done-alone"),
        pytest.param([], Outcome.TRUNCATED, UNFINISHED, id="no-bytes"),
        pytest.param(
            [ROLE, FINISH, usage(7, 0), DONE], Outcome.EMPTY, "the answer ended without a token", id="no-token"
        ),
        pytest.param([b": ping\n\n"], Outcome.TRUNCATED, UNFINISHED, id="comment-alone"),
    ],
)
def test_case_14_a_200_whose_stream_is_an_error_or_empty(
    emitter: Emitter, pieces: list[bytes], outcome: Outcome, message: str
) -> None:
    """Sources: kubernetes-sigs/inference-perf#713, ggml-org/llama.cpp#14566, huggingface/huggingface_hub#1711,
    huggingface/text-generation-inference#2749, tenstorrent/tt-inference-server#4982, vllm-project/vllm#40986.
    """  # noqa: D205
    timeline = measure(emitter, script(*((8, piece) for piece in pieces))).timeline
    assert (timeline.outcome, timeline.message) == (outcome, message)
    assert_no_samples(timeline)


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("{}", '"stop"', None), id="in-the-finish-chunk"),
        pytest.param(('{"role":"assistant","content":""}', '"stop"', None), id="in-the-finish-chunk-with-a-role"),
        pytest.param(("{}", "null", FINISH), id="behind-it-with-a-choice"),
        pytest.param((None, '"stop"', None), id="in-a-finish-chunk-with-an-index-only"),
    ],
)
def test_case_16_usage_in_a_chunk_with_a_choice_is_no_token(
    emitter: Emitter, place: tuple[str | None, str, bytes | None], *, continuous: bool
) -> None:
    """Sources: as below; TGI sends it in the finish chunk, LiteLLM and OpenRouter behind it with a choice."""
    value, reason, before = place
    numbers = ',"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}'
    shown = "" if value is None else f'"delta":{value},'
    last = chunk(f'[{{"index":0,{shown}"finish_reason":{reason}}}]', numbers)
    texts = ("Al", "pha", " be", "ta")
    tokens = [(300 + 50 * i, counted(text, 2 * i + 3 if continuous else None)) for i, text in enumerate(texts)]
    finishing = [(450, before)] if before else []
    measured = measure(emitter, script((100, ROLE), *tokens, *finishing, (450, last), (455, DONE)))
    assert_numbers(measured, tokens=9)
    assert measured.timeline.finish_reasons == {0: "stop"}
    assert measured.timeline.choices[0].tokens == (9 if continuous else 0)


def test_case_16_usage_long_after_the_finish_reason(emitter: Emitter) -> None:
    """Sources: ggml-org/llama.cpp#16048, strands-agents/harness-sdk#3955, vllm-project/production-stack#873."""
    measured = measure(emitter, script(*REF[:6], (900, usage(7, 4)), (900, DONE)))
    assert_ref(measured)
    timeline, token, last = measured.timeline, measured.reply.sent[4], measured.reply.sent[-1]
    assert timeline.response_time_ns >= last[0] - timeline.called_ns - EARLY_NS
    assert timeline.e2el_ns is not None
    assert timeline.response_time_ns - timeline.e2el_ns >= last[0] - token[1] - EARLY_NS


def test_case_17_chunks_without_choices_or_delta(emitter: Emitter) -> None:
    """Sources: AbanteAI/archive-old-cli-mentat#429, simonw/llm#294, microsoft/autogen#6465,
    sgl-project/sglang#18335.
    """  # noqa: D205
    odd = [
        (50, b'data: {"id":"","choices":[],"prompt_filter_results":[]}\n\n'),
        (60, b'data: {"choices":null}\n\n'),
        (70, b'data: {"choices":[{"index":0,"delta":null}]}\n\n'),
        (80, delta('{"role":null,"content":null}')),
        (452, b'data: {"id":"","choices":[{"index":0,"finish_reason":null,"content_filter_offsets":{}}]}\n\n'),
    ]
    assert_ref(measure(emitter, script(*REF, *odd)))


@pytest.mark.parametrize(
    "role", ['{"role":"assistant","content":""}', '{"role":"assistant","content":null}', '{"role":"assistant"}']
)
def test_case_19_the_role_is_no_token(emitter: Emitter, role: str) -> None:
    """Sources: vllm-project/vllm#3759, #3768, #15106; api7/aisix#869; tingly-dev/tingly-box#1235."""
    assert_ref(measure(emitter, script((5, delta(role)), *without(ROLE))))


@pytest.mark.parametrize(
    "shape",
    [
        '{"reasoning_content":"~"}',
        '{"reasoning_content":"~","content":null}',
        '{"reasoning":"~"}',
        '{"role":"assistant","content":"","reasoning":"~"}',
        '{"content":"","reasoning":"~","reasoning_details":[{"type":"reasoning.text","text":"~"}]}',
        '{"content":"","reasoning_details":[{"type":"reasoning.summary","summary":"~"}]}',
    ],
    ids=["sglang", "llama.cpp", "vllm", "ollama", "openrouter", "openrouter-summary"],
)
def test_case_21_reasoning_counts_as_tokens_and_content_has_its_own_time(emitter: Emitter, shape: str) -> None:
    """Sources: kubernetes-sigs/inference-perf#559, gpustack/gpustack#6205, modelscope/evalscope#1694,
    sgl-project/genai-bench#81.
    """  # noqa: D205
    thoughts = [(at, Token(delta(shape.replace("~", text)))) for at, text in ((200, "a"), (250, "b"))]
    tail = [(1000, FINISH), (1005, usage(7, 3)), (1005, DONE)]
    measured = measure(emitter, script((100, ROLE), *thoughts, (1000, token("c")), *tail))
    assert_numbers(measured, tokens=3)
    timeline = measured.timeline
    assert timeline.sent_ns is not None
    assert timeline.ttfc_ns == measured.times[2] - timeline.sent_ns


def test_case_21_an_answer_that_ends_in_its_reasoning(emitter: Emitter) -> None:
    """Sources: as above."""
    tail = [(250, finish("length")), (255, usage(7, 2)), (255, DONE)]
    measured = measure(emitter, script((200, reasoning("a")), (250, reasoning("b")), *tail))
    assert_numbers(measured, tokens=2)
    assert len(measured.gaps) == 1
    assert measured.timeline.ttfc_ns is None


def test_case_22_calls_of_tools(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#27485, sgl-project/sglang#36272."""
    call = '{"tool_calls":[{"index":0,"id":"k","type":"function","function":{"name":"get","arguments":""}}]}'
    arguments = '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":1}"}}]}'
    tail = [(460, finish("tool_calls")), (470, usage(9, 17)), (470, DONE)]
    measured = measure(emitter, script((100, ROLE), (300, Token(delta(call))), (460, Token(delta(arguments))), *tail))
    assert_numbers(measured, tokens=17)
    assert measured.timeline.events == 2
    assert measured.timeline.tpots_ns() == [measured.gaps[0] // 16]


def test_case_22_a_call_that_is_no_list(emitter: Emitter) -> None:
    """Source: huggingface/text-generation-inference#2954."""
    call = '{"role":"assistant","tool_calls":{"index":0,"id":"","function":{"name":null,"arguments":"~"}}}'
    tokens = [(at, Token(delta(call.replace("~", text)))) for at, text in ((300, "{"), (350, "}"))]
    measured = measure(emitter, script(*tokens, (350, finish("stop")), (355, usage(9, 2)), (355, DONE)))
    assert_numbers(measured, tokens=2)
    assert len(measured.gaps) == 1


YES = {
    "chat": Token(delta('{"content":"Yes"}', finish='"length"')),
    "completions": Token(chunk('[{"index":0,"text":"Yes","finish_reason":"length"}]')),
}


def one_token(endpoint: str) -> Script:
    head = [(50, ROLE)] if endpoint == "chat" else []
    return script(*head, (200, YES[endpoint]), (201, usage(7, 1)), (201, DONE))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_case_23_the_only_token_comes_with_the_finish_reason(emitter: Emitter, endpoint: str) -> None:
    """Sources: vllm-project/vllm#36944, ai-dynamo/dynamo#3531, sgl-project/genai-bench#44."""
    measured = measure(emitter, one_token(endpoint), endpoint)
    assert_numbers(measured, tokens=1)
    assert (measured.gaps, measured.timeline.tpots_ns()) == ([], [])
    path = {"chat": b"/v1/chat/completions", "completions": b"/v1/completions"}[endpoint]
    assert measured.reply.request.startswith(b"POST " + path + b" HTTP/1.1\r\n")


def counted(text: str, tokens: int | None) -> Token:
    """Return a token event with continuous usage, or without."""
    so_far = f',"usage":{{"prompt_tokens":7,"completion_tokens":{tokens},"total_tokens":0}}' if tokens else ""
    return Token(chunk(f'[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}]', so_far))


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize(
    ("at_ms", "counts"),
    [((300, 340, 380, 420), (4, 8, 12, 16)), ((300, 310, 320, 330, 340, 350), (5, 6, 7, 8, 9, 10))],
)
def test_case_24_several_tokens_in_an_event(
    emitter: Emitter, at_ms: tuple[int, ...], counts: tuple[int, ...], *, continuous: bool
) -> None:
    """Sources: vllm-project/vllm#42661, #46652, #55276; ai-dynamo/aiperf#1279; PaddlePaddle/FastDeploy#8113."""
    events = [(at, counted("some text", n if continuous else None)) for at, n in zip(at_ms, counts, strict=True)]
    end = at_ms[-1]
    tail = [(end, FINISH), (end + 5, usage(7, counts[-1])), (end + 5, DONE)]
    measured = measure(emitter, script((100, ROLE), *events, *tail))
    assert_numbers(measured, tokens=counts[-1])
    assert measured.timeline.events == len(at_ms)
    assert measured.timeline.choices[0].tokens == (counts[-1] if continuous else 0)


def test_case_24_a_count_that_grows_is_a_token_whatever_its_text(emitter: Emitter) -> None:
    """Source: vllm-project/vllm#42661."""
    held_back = [(300, counted("a", 1)), (350, Token(counted("", 2).replace(b'"content":""', b'"content":null')))]
    measured = measure(emitter, script((100, ROLE), *held_back, (400, finish()), (400, usage(7, 2)), (400, DONE)))
    assert_numbers(measured, tokens=2)


def test_case_26_choices_that_alternate(emitter: Emitter) -> None:
    """Sources: sgl-project/sglang#8417, langfuse/langfuse-python#1862, ai-dynamo/dynamo#8745."""
    tokens = [(at, token("t", index=int(at % 100 == 50))) for at in (300, 350, 400, 450, 500, 550)]
    ends = [(500, finish(index=0)), (550, finish(index=1)), (555, usage(7, 6)), (555, DONE)]
    measured = measure(emitter, script((100, ROLE), *tokens, *ends))
    timeline, times = measured.timeline, measured.times
    assert (timeline.outcome, timeline.output_tokens, timeline.estimated) == (Outcome.OK, 6, False)
    assert measured.gaps == [times[2] - times[0], times[4] - times[2], times[3] - times[1], times[5] - times[3]]
    assert timeline.tpots_ns() == [(times[4] - times[0]) // 2, (times[5] - times[1]) // 2]
    assert timeline.ttft_ns == times[0] - (timeline.sent_ns or 0)


def test_case_26_one_choice_of_two_that_never_finishes_is_truncated(emitter: Emitter) -> None:
    """Sources: as above."""
    tokens = [(300, token("t", index=0)), (350, token("t", index=1))]
    timeline = measure(emitter, script((100, ROLE), *tokens, (400, finish(index=0)))).timeline
    assert timeline.outcome is Outcome.TRUNCATED


def test_case_26_a_choice_that_was_asked_for_and_never_came_is_missing(emitter: Emitter) -> None:
    """Sources: as above."""
    answer = Answer(script((20, ROLE), (30, token("t", index=0)), (40, finish(index=0))))
    server = emitter.serve(answer)
    client = client_of(server)
    asked = {n: Timeline(f"request-{n}", "short", "chat", monotonic_ns(), choices_asked=n) for n in (1, 2)}
    for timeline in asked.values():
        client.stream(timeline, b'{"stream":true}')
    assert [timeline.outcome for timeline in asked.values()] == [Outcome.OK, Outcome.TRUNCATED]


# Streams as other servers send them, field by field


@pytest.mark.parametrize("name", DIALECTS)
def test_the_streams_of_other_servers_have_the_same_numbers(emitter: Emitter, name: str) -> None:
    sent = DIALECTS[name]
    tokens = [(300, Token(sent.first)), (350, Token(sent.second))]
    around = [*((100, piece) for piece in sent.before), *((355, piece) for piece in sent.behind)]
    measured = measure(emitter, script(*tokens, *around), "completions" if "completions" in name else "chat")
    assert_numbers(measured, tokens=2)
    timeline = measured.timeline
    assert (timeline.input_tokens, timeline.cached_tokens, timeline.estimated) == (7, sent.cached_tokens, False)
    assert timeline.finish_reasons == {0: sent.finish_reason}
    assert timeline.choices[0].tokens == 0, "no event of these tells how many tokens it brought"
    assert timeline.comments == sum(piece.startswith(b":") for piece in sent.before)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("framing", [CHUNKED, UNTIL_CLOSE])
def test_case_11_the_streams_of_other_servers_that_just_end(emitter: Emitter, name: str, framing: str) -> None:
    """Sources: as of 11."""
    sent = DIALECTS[name]
    pieces = script(*((100, piece) for piece in sent.before), (300, Token(sent.first)))
    measured = measure(emitter, Answer(pieces, framing=framing, ending=CLOSE))
    assert_failed_after(measured, Outcome.TRUNCATED, tokens=1)
    assert (measured.timeline.output_tokens, measured.timeline.input_tokens) == (1, None)


# C. HTTP and transport


COMPLETION = (
    b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"Alpha beta"}}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":4,"total_tokens":11}}'
)


@pytest.mark.parametrize(
    ("body", "content_type", "framing"),
    [
        pytest.param(COMPLETION, "application/json", LENGTH, id="json"),
        pytest.param(COMPLETION + b"\n\ndata: [DONE]\n\n", "text/event-stream", CHUNKED, id="json-then-done"),
        pytest.param(b"\n " + COMPLETION, "application/json", CHUNKED, id="json-after-white-space"),
        pytest.param(b"<html><h1>login</h1>", "text/html", LENGTH, id="html"),
        pytest.param(b"ok", "text/plain", LENGTH, id="short-text"),
    ],
)
@pytest.mark.parametrize("bytewise", [False, True])
def test_case_27_a_200_that_is_no_event_stream(
    emitter: Emitter, body: bytes, content_type: str, framing: str, *, bytewise: bool
) -> None:
    """Sources: fw-ai/benchmark#85, modelscope/evalscope#407, decolua/9router#3492, QwenLM/qwen-code#383."""
    answer = Answer([(20, body)], content_type=content_type, framing=framing, bytewise=bytewise)
    timeline = measure(emitter, answer).timeline
    assert timeline.outcome is Outcome.NOT_STREAMED
    assert timeline.message.startswith(body.strip()[:5].decode())
    assert len(timeline.message) <= 200
    assert_no_samples(timeline)


@pytest.mark.parametrize("after", [[], [(20, DONE)]])
def test_case_27_a_whole_answer_in_an_event_is_no_stream(emitter: Emitter, after: Script) -> None:
    """Sources: as above."""
    timeline = measure(emitter, script((20, b"data: " + COMPLETION + b"\n\n"), *after)).timeline
    assert (timeline.outcome, timeline.message) == (Outcome.NOT_STREAMED, "a whole answer in one event")
    assert_no_samples(timeline)


def test_case_12_done_may_stand_among_blanks(emitter: Emitter) -> None:
    """Sources: infiniflow/ragflow#19498, NVIDIA/nvcf#1826."""
    assert_numbers(measure(emitter, script(*REF[:-1], (455, b"data:  [DONE] \n\n"))), tokens=4)


@pytest.mark.parametrize("filler", range(100, 130, 3))
def test_a_key_that_a_server_repeats_is_not_shown_though_a_quote_cuts_it_short(emitter: Emitter, filler: int) -> None:
    """An event that is none of this dialect is quoted by its beginning."""
    key = "sk-most-secret-of-all"
    server = emitter.serve(Answer(script((1, b"data: " + b"x" * filler + key.encode() + b"\n\n"))))
    origin, prefix = origin_of(server.url)
    client = Client(Pool(origin), PATIENT, key, prefix)
    timeline = stream(client)
    client.pool.close()
    assert timeline.outcome is Outcome.MALFORMED
    assert key[:8] not in timeline.message
    assert key not in repr(timeline)


def test_case_27_an_error_page_is_one_short_line(emitter: Emitter) -> None:
    """Source: Mintplex-Labs/anything-llm#3223."""
    page = b"<html>\n<h1>Bad gateway</h1>\n" + b"<p>padding</p>\n" * 1400
    timeline = measure(emitter, Answer([(5, page)], "502 Bad Gateway", "text/html", framing=LENGTH)).timeline
    assert (timeline.outcome, timeline.status) == (Outcome.HTTP_5XX, 502)
    assert "Bad gateway" in timeline.message
    assert len(timeline.message) <= 200
    assert "\n" not in timeline.message
    assert_no_samples(timeline)


@pytest.mark.parametrize(
    ("status", "retry_after", "outcome"),
    [
        ("429 Too Many Requests", "2", Outcome.HTTP_429),
        ("503 Service Unavailable", "Wed, 01 Jan 2031 00:00:00 GMT", Outcome.HTTP_5XX),
    ],
)
def test_case_28_a_refused_request_is_one_failure_and_is_not_sent_again(
    emitter: Emitter, status: str, retry_after: str, outcome: Outcome
) -> None:
    """Sources: Azure/azure-openai-benchmark#20, #21, #34; empirical-run/empirical#166."""
    error = b'{"error":{"message":"slow down"}}'
    refused = Answer([(1, error)], status, "application/json", (f"Retry-After: {retry_after}",), LENGTH)
    good = Answer(script(*REF))
    server = emitter.serve([refused, good, refused, good])
    client = client_of(server)
    timelines = [stream(client) for _ in range(4)]
    replies = server.replies(4)
    assert len(replies) == 4
    assert [reply.connection for reply in replies] == [0] * 4, "an error whose body was read costs no connection"
    for timeline in timelines[::2]:
        assert (timeline.outcome, timeline.message, timeline.status) == (outcome, "slow down", int(status[:3]))
        assert_no_samples(timeline)
    for timeline, reply in zip(timelines[1::2], replies[1::2], strict=True):
        assert_as_sent(Measured(timeline, good, reply))
        assert_ref(Measured(timeline, good, reply))


def test_case_29_fast_failures_have_no_latency(emitter: Emitter) -> None:
    """Sources: ggml-org/llama.cpp#16486, vllm-project/vllm#16420, vllm-project/guidellm#444, ai-dynamo/aiperf#688."""
    error = b'{"error":{"message":"model x not found","code":404}}'
    missing = Answer([(2, error)], "404 Not Found", "application/json", framing=LENGTH)
    timeline = measure(emitter, missing).timeline
    assert (timeline.outcome, timeline.status) == (Outcome.HTTP_4XX, 404)
    assert timeline.message == "model x not found"
    assert_no_samples(timeline)


def test_case_29_failures_among_successes_lower_no_time(emitter: Emitter) -> None:
    """Sources: as above."""
    long = Answer([(2, b'{"detail":"too long"}')], "400 Bad Request", "application/json", framing=LENGTH)
    good = Answer(script(*REF))
    client = client_of(emitter.serve([good] * 5 + [long] + [good] * 4))
    timelines = [stream(client) for _ in range(10)]
    assert [timeline.outcome for timeline in timelines] == [*[Outcome.OK] * 5, Outcome.HTTP_4XX, *[Outcome.OK] * 4]
    ttfts = [timeline.ttft_ns for timeline in timelines if timeline.ttft_ns is not None]
    assert len(ttfts) == 9
    assert min(ttfts) >= 300 * SCALE * MS - EARLY_NS


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("204 No Content", Outcome.NOT_STREAMED),
        ("301 Moved Permanently", Outcome.REDIRECTED),
        ("307 Temporary Redirect", Outcome.REDIRECTED),
        ("401 Unauthorized", Outcome.HTTP_4XX),
        ("500 Internal Server Error", Outcome.HTTP_5XX),
    ],
)
def test_every_other_status_is_an_outcome(emitter: Emitter, status: str, outcome: Outcome) -> None:
    headers = ("Location: http://127.0.0.1:1/v1",)
    framing = RAW if status.startswith("204") else LENGTH
    answer = Answer([(1, b"")], status, "text/plain", headers, framing)
    if framing == RAW:
        answer = Answer([(1, b"HTTP/1.1 204 No Content\r\n\r\n")], framing=RAW)
    timeline = measure(emitter, answer).timeline
    assert (timeline.outcome, timeline.status) == (outcome, int(status[:3]))
    assert_no_samples(timeline)


@pytest.mark.parametrize("ending", [SILENCE, FIN, RST])
def test_an_error_whose_body_does_not_end_is_still_that_error(emitter: Emitter, ending: str) -> None:
    answer = Answer([(1, b'{"error":"overloaded"}')], "503 Service Unavailable", ending=ending, end_ms=20)
    timeline = measure(emitter, answer).timeline
    assert (timeline.outcome, timeline.status, timeline.message) == (Outcome.HTTP_5XX, 503, "overloaded")


def test_an_error_nested_beyond_measure_is_text(emitter: Emitter) -> None:
    answer = Answer([(1, b"[" * 50_000)], "500 Internal Server Error", framing=LENGTH)
    timeline = measure(emitter, answer).timeline
    assert (timeline.outcome, timeline.message) == (Outcome.HTTP_5XX, "[" * 200)


@pytest.mark.parametrize("ending", [RST, FIN])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_case_30_a_connection_that_breaks_in_the_middle(emitter: Emitter, ending: str, tokens: int) -> None:
    """Sources: npuichigo/openai_trtllm#31, konveyor/kai#622."""
    answer = Answer(script(*REF[: tokens + 1]), ending=ending, end_ms=SCALE * 320 + 25)
    server = emitter.serve([answer, Answer(script(*REF))])
    client = client_of(server)
    measured = Measured(stream(client), answer, server.replies()[0])
    assert_as_sent(measured)
    timeline = measured.timeline
    assert (timeline.outcome, timeline.events, timeline.reconnects) == (Outcome.CONNECTION_LOST, tokens, 0)
    assert timeline.message.endswith(f"after {tokens} token event" + "s" * (tokens != 1))
    assert (timeline.e2el_ns, timeline.tpots_ns()) == (None, [])
    assert (timeline.ttft_ns is None) == (tokens == 0)
    assert stream(client).outcome is Outcome.OK


@pytest.mark.parametrize("ending", [RST, FIN])
def test_case_30_a_body_that_is_shorter_than_its_length(emitter: Emitter, ending: str) -> None:
    """Sources: as above."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100000\r\n\r\n"
    answer = Answer(script((100, head), *REF[:2]), framing=RAW, ending=ending, end_ms=SCALE * 320 + 25)
    measured = measure(emitter, answer)
    assert_failed_after(measured, Outcome.CONNECTION_LOST, tokens=1)
    assert measured.timeline.message.endswith("after 1 token event")


def test_a_connection_that_breaks_before_any_answer_is_lost_and_not_tried_again(emitter: Emitter) -> None:
    server = emitter.serve([Answer([], framing=RAW, ending=RST), Answer(script(*REF))])
    client = client_of(server)
    timeline = stream(client)
    assert (timeline.outcome, timeline.reconnects) == (Outcome.CONNECTION_LOST, 0)
    assert_no_samples(timeline)
    assert len(server.replies()) == 1
    assert stream(client).outcome is Outcome.OK


def test_case_31_silence_in_the_middle(emitter: Emitter) -> None:
    """Sources: fw-ai/benchmark#91, aaif-goose/goose#8110, AtomicBot-ai/atomic-agent#323."""
    answer = Answer(script(*REF[:2]), ending=SILENCE)
    measured = measure(emitter, answer, timeouts=Timeouts(first_token_s=20, idle_s=2))
    assert_failed_after(measured, Outcome.IDLE_TIMEOUT, tokens=1)
    timeline = measured.timeline
    assert timeline.done_ns is not None
    assert timeline.done_ns >= measured.times[0] + 2_000 * MS
    assert timeline.message == "no byte for 2 s after 1 token event"


def test_case_31_comments_keep_a_stream_alive(emitter: Emitter) -> None:
    """Sources: as above."""
    comments = [(at, b": still here\n\n") for at in range(1000, 9000, 800)]
    tail = [(9000, token("pha")), (9000, FINISH), (9000, usage(7, 2)), (9000, DONE)]
    measured = measure(emitter, script(*REF[:2], *comments, *tail), timeouts=Timeouts(first_token_s=20, idle_s=1.2))
    assert_numbers(measured, tokens=2)
    assert measured.timeline.comments == len(comments)


def test_case_31_comments_do_not_put_off_the_limit_of_the_first_token(emitter: Emitter) -> None:
    """Sources: as above."""
    answer = Answer(script((1, ROLE), *((at, b": queued\n\n") for at in range(50, 4000, 50)), (4000, token("late"))))
    server = emitter.serve(answer)
    client = client_of(server, Timeouts(first_token_s=0.3))
    timeline = stream(client)
    assert (timeline.outcome, timeline.message) == (Outcome.FIRST_TOKEN_TIMEOUT, "no token within 0.3 s")
    assert timeline.done_ns is not None
    assert timeline.sent_ns is not None
    assert timeline.done_ns >= timeline.sent_ns + 300 * MS
    assert_no_samples(timeline)


def test_a_server_that_never_answers_is_a_first_token_timeout(emitter: Emitter) -> None:
    timeline = measure(emitter, Answer([], framing=RAW, ending=SILENCE), timeouts=Timeouts(first_token_s=0.2)).timeline
    assert timeline.outcome is Outcome.FIRST_TOKEN_TIMEOUT
    assert_no_samples(timeline)


def test_case_33_the_client_asks_for_no_compression(emitter: Emitter) -> None:
    """Sources: Kludex/starlette#2753, tower-rs/tower-http#419."""
    request = measure(emitter, script(*REF)).reply.request
    head = request.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert [line for line in head if line.startswith("accept-encoding:")] == ["accept-encoding: identity"]


def test_case_33_a_server_that_compresses_for_whoever_takes_it_streams_to_us() -> None:
    """Sources: as above. Such a server gathers all that it compresses, as a middleware does."""

    def serve(environ: WSGIEnvironment, respond: StartResponse) -> Iterator[bytes]:
        packs = "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")
        environ["wsgi.input"].read()
        respond("200 OK", [("Content-Type", "text/event-stream"), *([("Content-Encoding", "gzip")] if packs else [])])
        if packs:
            gevent.sleep(0.3)
            yield gzip.compress(b"".join(piece for _, piece in REF))
            return
        for _, piece in REF:
            yield piece
            gevent.sleep(0.03)

    server = WSGIServer(("127.0.0.1", 0), serve, log=None)
    server.start()
    client = Client(Pool(Origin("127.0.0.1", server.server_port)), PATIENT)
    timeline = stream(client)
    client.pool.close()
    server.stop()
    assert (timeline.outcome, timeline.output_tokens, timeline.token_reads) == (Outcome.OK, 4, 4)
    assert all(gap_ns > 5 * MS for gap_ns in timeline.gaps_ns())


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("x-gzip", 31), ("deflate", 15), ("GZIP", 31)])
@pytest.mark.parametrize("bytewise", [False, True])
def test_case_33_a_compressed_stream_has_the_times_of_its_flushes(
    emitter: Emitter, encoding: str, wbits: int, *, bytewise: bool
) -> None:
    """Sources: mostlygeek/llama-swap#236, ggml-org/llama.cpp#24774."""
    press = zlib.compressobj(wbits=wbits)
    pieces = [(at, type(piece)(press.compress(piece) + press.flush(zlib.Z_SYNC_FLUSH))) for at, piece in REF]
    pieces.append((455, press.flush()))
    answer = Answer(script(*pieces), headers=(f"Content-Encoding: {encoding}",), bytewise=bytewise)
    assert_ref(measure(emitter, answer))


def test_case_33_a_compressed_stream_may_be_larger_than_its_pieces(emitter: Emitter) -> None:
    """Sources: as above."""
    body = b"".join([ROLE, *[token("x" * 1000)] * 400, b": " + b" " * 3_000_000 + b"\n\n", FINISH, usage(7, 400), DONE])
    press = zlib.compressobj(wbits=31)
    squeezed = press.compress(body) + press.flush()
    assert len(squeezed) < 20_000
    server = emitter.serve(Answer([(1, squeezed)], headers=("Content-Encoding: gzip",)))
    timeline = stream(client_of(server))
    assert (timeline.outcome, timeline.events, timeline.output_tokens) == (Outcome.OK, 400, 400)
    assert timeline.coalesced


@pytest.mark.parametrize(
    ("encoding", "body", "outcome"),
    [
        ("br", b"\x1b\x00", Outcome.MALFORMED),
        ("zstd", b"\x28\xb5\x2f\xfd", Outcome.MALFORMED),
        ("gzip, br", b"\x1b\x00", Outcome.MALFORMED),
        ("gzip", b"data: it is not", Outcome.MALFORMED),
        ("gzip", zlib.compress(b"".join(piece for _, piece in REF), wbits=31)[:60], Outcome.TRUNCATED),
    ],
)
def test_case_33_what_cannot_be_decompressed_is_an_outcome(
    emitter: Emitter, encoding: str, body: bytes, outcome: Outcome
) -> None:
    """Sources: as above."""
    timeline = measure(emitter, Answer([(1, body)], headers=(f"Content-Encoding: {encoding}",))).timeline
    assert timeline.outcome is outcome
    if outcome is Outcome.MALFORMED:
        assert encoding in timeline.message or "decompress" in timeline.message
    assert_no_samples(timeline)


def test_case_33_events_that_were_gathered_on_their_way_have_no_gaps(emitter: Emitter) -> None:
    """Sources: sgl-project/genai-bench#228, fixie-ai/thefastest.ai#6."""
    gathered = Token(b"".join([token("x")] * 100 + [FINISH, usage(7, 100), DONE]))
    server = emitter.serve(Answer(script((1000, gathered))))
    timeline = stream(client_of(server))
    assert (timeline.outcome, timeline.output_tokens, timeline.coalesced) == (Outcome.OK, 100, True)
    assert (list(timeline.gaps_ns()), timeline.tpots_ns()) == ([], [])
    assert timeline.sent_ns is not None
    reply = server.replies()[0]
    before_ns, after_ns = reply.sent[0]
    for measured_ns in (timeline.ttft_ns, timeline.e2el_ns):
        assert measured_ns is not None
        assert before_ns - EARLY_NS <= timeline.sent_ns + measured_ns <= after_ns + UNSTAMPED_NS


def test_case_34_small_events_are_not_held_back(emitter: Emitter) -> None:
    """Sources: sgl-project/genai-bench#100, #110; LostRuins/koboldcpp#1411; psf/requests#2433; locustio/locust#3018."""
    event = Token(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')
    pieces = [(100.0 * (i + 1), event) for i in range(20)]
    tail = [(2000.0, b'data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\n'), (2000.0, DONE)]
    answer = Answer(script(*pieces, *tail))
    measured = measure(emitter, answer, "completions")
    assert_numbers(measured, tokens=20)
    assert measured.timeline.estimated
    assert len(measured.gaps) == 19


@pytest.mark.parametrize("noticed", [True, False])
def test_case_35_a_connection_that_the_server_closed_while_it_was_idle(emitter: Emitter, *, noticed: bool) -> None:
    """Sources: vllm-project/vllm-omni#1374, llm-d/llm-d#1564, vllm-project/vllm#41567."""
    answer = Answer(script(*REF))
    server = emitter.serve(answer, idle_close_s=0.15)
    client = client_of(server)
    first = stream(client)
    (gevent.sleep if noticed else sleep)(0.4)  # blocked, the loop does not see the end before it sends
    second = stream(client)
    replies = server.replies(2)
    assert [reply.connection for reply in replies] == [0, 1]
    for timeline, reply, reconnects in zip((first, second), replies, (0, 1), strict=True):
        assert_as_sent(Measured(timeline, answer, reply))
        assert_ref(Measured(timeline, answer, reply))
        assert timeline.connect_ns is not None
        assert timeline.reconnects == reconnects


def test_case_35_an_answer_that_had_begun_is_not_asked_for_again(emitter: Emitter) -> None:
    """Sources: as above."""
    broken = Answer([(5, b"HTTP/1.1 200 OK\r\nContent-Type: text/")], framing=RAW, ending=FIN)
    server = emitter.serve([Answer(script(*REF)), broken, Answer(script(*REF))])
    client = client_of(server)
    outcomes = [stream(client).outcome for _ in range(3)]
    assert outcomes == [Outcome.OK, Outcome.CONNECTION_LOST, Outcome.OK]
    assert len(server.replies(3)) == 3


def test_a_port_that_nobody_listens_on() -> None:
    origin, _ = origin_of("http://127.0.0.1:1")
    timeline = stream(Client(Pool(origin), PATIENT))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert "refused" in timeline.message
    assert timeline.sent_ns is None
    assert_no_samples(timeline)


def test_a_name_that_does_not_resolve() -> None:
    origin, _ = origin_of("http://no-such-host.invalid")
    timeline = stream(Client(Pool(origin), PATIENT))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert timeline.message
    assert_no_samples(timeline)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(pieces: Script, extension: bytes = b"") -> list[tuple[float, bytes]]:
    return [(at, type(p)(b"%X%b\r\n%b\r\n" % (len(p), extension, p))) for at, p in pieces]


@pytest.mark.parametrize(
    ("before", "extension", "end"),
    [
        pytest.param([(4 + i, HEAD[i : i + 7]) for i in range(0, len(HEAD), 7)], b"", b"0\r\n\r\n", id="head-in-reads"),
        pytest.param([(5, b"HTTP/1.1 100 Continue\r\n\r\n"), (20, HEAD)], b"", b"0\r\n\r\n", id="100"),
        pytest.param(
            [(5, b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n" + HEAD)], b"", b"0\r\n\r\n", id="103"
        ),
        pytest.param(
            [(5, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"), (9, HEAD)],
            b"",
            b"0\r\n\r\n",
            id="100-103",
        ),
        pytest.param([(5, HEAD)], b"", b"0\r\nServer-Timing: total;dur=1\r\nX-Other: y\r\n\r\n", id="trailers"),
        pytest.param([(5, HEAD)], b';name="value";other', b"0;last\r\n\r\n", id="chunk-extensions"),
    ],
)
def test_responses_that_http_allows_have_the_same_numbers(
    emitter: Emitter, before: Script, extension: bytes, end: bytes
) -> None:
    answer = Answer(script(*before, *chunks(list(REF), extension), (455, end)), framing=RAW)
    server = emitter.serve([answer, answer])
    client = client_of(server)
    first, second = stream(client), stream(client)
    for timeline, reply in zip((first, second), server.replies(2), strict=True):
        assert_as_sent(Measured(timeline, answer, reply))
        assert_ref(Measured(timeline, answer, reply))
        assert reply.connection == 0, "the connection was not kept"


def test_a_connection_that_the_server_wants_closed_is_closed(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF), headers=("Connection: close",)))
    client = client_of(server)
    assert [stream(client).outcome, stream(client).outcome] == [Outcome.OK, Outcome.OK]
    assert [reply.connection for reply in server.replies(2)] == [0, 1]


def test_without_keep_alive_every_request_has_its_own_connection(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF)))
    client = client_of(server, keep_alive=False)
    timelines = [stream(client), stream(client)]
    assert all(timeline.connect_ns is not None for timeline in timelines)
    assert [reply.connection for reply in server.replies(2)] == [0, 1]


def test_what_is_no_http_is_malformed(emitter: Emitter) -> None:
    timeline = measure(emitter, Answer([(1, b"SSH-2.0-OpenSSH_9.6\r\n")], framing=RAW, ending=CLOSE)).timeline
    assert timeline.outcome is Outcome.MALFORMED
    assert timeline.message
    assert_no_samples(timeline)


def test_the_request_carries_what_it_was_given(emitter: Emitter) -> None:
    server = emitter.serve({"/gateway/v1/chat/completions": Answer(script(*REF)), "*": Answer([], "404 Not Found")})
    origin, prefix = origin_of(f"{server.url}/gateway/v1")
    client = Client(Pool(origin), PATIENT, "secret", prefix)
    CLIENTS.append(client)
    timeline = Timeline("run-7-index-9", "short", "chat", monotonic_ns())
    client.stream(timeline, '{"messages":"é"}'.encode())
    assert timeline.outcome is Outcome.OK
    head, _, body = server.replies()[0].request.partition(b"\r\n\r\n")
    assert body.decode() == '{"messages":"é"}'
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /gateway/v1/chat/completions HTTP/1.1"
    for line in (
        f"Host: 127.0.0.1:{server.port}",
        "Authorization: Bearer secret",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "X-Request-Id: run-7-index-9",
    ):
        assert line in lines


# D. Measuring


def test_case_37_missing_values_are_absent(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#6064, #5895; modelscope/evalscope#1694; sgl-project/genai-bench#165."""
    empty = Answer(script((100, ROLE), (150, FINISH), (155, usage(7, 0)), (155, DONE)))
    answers = [Answer(script(*REF))] * 4 + [Answer(one_token("chat"))] * 3 + [empty] * 3
    client = client_of(emitter.serve(answers))
    timelines = [stream(client) for _ in answers]
    assert [t.outcome for t in timelines] == [Outcome.OK] * 7 + [Outcome.EMPTY] * 3
    ttfts = [t.ttft_ns for t in timelines if t.ttft_ns is not None]
    assert len(ttfts) == 7
    assert min(ttfts) >= 200 * SCALE * MS - EARLY_NS
    assert sum(len(t.tpots_ns()) for t in timelines) == 4
    assert sum(len(t.gaps_ns()) for t in timelines) == 12
    for timeline in timelines[7:]:
        assert_no_samples(timeline)
        assert timeline.output_tokens == 0


def test_case_38_gaps_are_intervals_and_tpot_is_of_a_request(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#6531, #7242; NVIDIA/TensorRT-LLM#8378; vllm-project/guidellm#1144."""
    many = [(1000.0 + 40 * i, token("a")) for i in range(11)]
    few = [(500.0, token("a")), (600.0, token("b"))]
    gaps: list[int] = []
    tpots: list[int] = []
    for tokens in (many, few):
        end = tokens[-1][0]
        measured = measure(
            emitter, script((100, ROLE), *tokens, (end, FINISH), (end, usage(7, len(tokens))), (end, DONE))
        )
        assert_numbers(measured, tokens=len(tokens))
        gaps += measured.gaps
        tpots += measured.timeline.tpots_ns()
        assert sum(measured.gaps) // len(measured.gaps) == tpots[-1]
    assert (len(gaps), len(tpots)) == (11, 2)


@pytest.mark.parametrize(
    ("tail", "tokens", "estimated"), [([usage(7, 9), DONE], 9, False), ([DONE], 4, True)], ids=["usage", "no-usage"]
)
def test_case_39_the_servers_count_is_the_number_of_tokens(
    emitter: Emitter, tail: list[bytes], tokens: int, *, estimated: bool
) -> None:
    """Sources: CentML/flexible-inference-bench#66, kubernetes-sigs/inference-perf#577, #746."""
    measured = measure(emitter, script(*REF[:6], *((455, piece) for piece in tail)))
    assert_numbers(measured, tokens=tokens)
    assert measured.timeline.estimated is estimated


def test_case_39_an_echo_of_the_prompt_adds_no_tokens(emitter: Emitter) -> None:
    """Source: vllm-project/vllm-omni#4459."""
    events = [
        (300, Token(chunk('[{"index":0,"text":" Hi there ok"}]'))),
        (350, Token(chunk('[{"index":0,"text":" fine"}]'))),
    ]
    last = chunk('[{"index":0,"finish_reason":"stop"}]')
    measured = measure(emitter, script(*events, (350, last), (355, usage(2, 2)), (355, DONE)), "completions")
    assert_numbers(measured, tokens=2)


def test_case_39_a_short_answer_is_known_by_its_count(emitter: Emitter) -> None:
    """Source: vllm-project/vllm#15233."""
    tokens = [(300 + 10 * i, token("a")) for i in range(10)]
    client = client_of(
        emitter.serve(Answer(script((100, ROLE), *tokens, (395, FINISH), (400, usage(7, 10)), (400, DONE))))
    )
    timeline = Timeline("id", "short", "chat", monotonic_ns(), expected_tokens=128)
    client.stream(timeline, b"{}")
    assert (timeline.outcome, timeline.output_tokens, timeline.finish_reasons) == (Outcome.OK, 10, {0: "stop"})


def test_case_42_events_in_one_read_have_one_time(emitter: Emitter) -> None:
    """Sources: vllm-project/vllm#46652, paiml/probar#27, doctolib/neurow#60."""
    both = Tokens(token("pha") + token(" be"))
    measured = measure(emitter, script(*REF[:2], (400, both), *REF[4:]))
    assert_ref(measured)
    assert measured.gaps[1] == 0
    assert measured.gaps[0] > 0
    assert measured.gaps[2] > 0
    assert not measured.timeline.coalesced


def test_case_48_the_row_of_a_request_ends_with_its_body(emitter: Emitter) -> None:
    """Sources: locustio/locust#2289, #162; BerriAI/litellm#33748; bhope/hedge#10."""
    measured = measure(emitter, Answer(script(*REF), head_ms=1))
    assert_ref(measured)
    timeline, (last_ns, _) = measured.timeline, measured.reply.sent[-1]
    assert timeline.response_time_ns >= last_ns - EARLY_NS - timeline.called_ns
    assert timeline.response_time_ns >= (timeline.e2el_ns or 0)


# Ends that are ours


def test_a_request_that_is_cut_is_neither_success_nor_failure(emitter: Emitter) -> None:
    server = emitter.serve([Answer(script(*REF[:3]), ending=SILENCE), Answer(script(*REF))])
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    seen = gevent.event.Event()
    streaming = gevent.spawn(client.stream, timeline, b"{}", lambda _: seen.set())
    assert seen.wait(10)
    while timeline.events < 2:
        gevent.sleep(0.002)
    assert list(client.in_flight) == [timeline]
    client.cut_all()
    streaming.join(5)
    assert streaming.successful()
    assert timeline.outcome is Outcome.CANCELLED
    assert not timeline.outcome.failed
    assert_failed_after(Measured(timeline, Answer([]), server.replies()[0]), Outcome.CANCELLED, tokens=2)
    assert stream(client).outcome is Outcome.OK
    assert server.replies(2)[1].connection == 1, "a connection in the middle of a body was used again"


def test_what_has_arrived_when_a_request_is_cut_counts(emitter: Emitter) -> None:
    """In the middle of an answer reads wait for each other before they are parsed."""
    server = emitter.serve(Answer(script(*REF[:4]), ending=SILENCE))
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    streaming = gevent.spawn(client.stream, timeline, b"{}")
    while timeline.first_ns is None:
        gevent.sleep(0.002)
    server.replies()  # blocks this thread until all of the answer is there
    gevent.sleep(0.005)  # the hub reads it
    client.cut_all()
    streaming.join(5)
    assert (timeline.outcome, timeline.events) == (Outcome.CANCELLED, 3)


def test_a_killed_user_is_a_cancelled_request_and_goes_on_dying(emitter: Emitter) -> None:
    server = emitter.serve([Answer(script(*REF[:2]), ending=SILENCE), Answer(script(*REF))])
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    survived = []

    def user() -> None:
        client.stream(timeline, b"{}")
        survived.append(True)

    streaming = gevent.spawn(user)
    while not timeline.events:
        gevent.sleep(0.002)
    streaming.kill()
    assert isinstance(streaming.value, gevent.GreenletExit)
    assert not survived
    assert timeline.outcome is Outcome.CANCELLED
    assert not client.in_flight
    assert stream(client).outcome is Outcome.OK
    assert server.replies(2)[1].connection == 1


def test_a_server_that_does_not_read_its_request_is_a_first_token_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Pool(Origin("127.0.0.1", listener.getsockname()[1])), Timeouts(first_token_s=0.3))
        timeline = Timeline("id", "short", "chat", monotonic_ns())
        client.stream(timeline, b"x" * 24_000_000)
    assert timeline.outcome is Outcome.FIRST_TOKEN_TIMEOUT
    assert timeline.message == "no token within 0.3 s"


def test_a_request_that_is_cut_while_it_waits_for_its_answer(emitter: Emitter) -> None:
    server = emitter.serve(Answer([], framing=RAW, ending=SILENCE))
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    streaming = gevent.spawn(client.stream, timeline, b"{}")
    while timeline.sent_ns is None:
        gevent.sleep(0.002)
    server.replies()
    client.cut_all()
    streaming.join(5)
    assert timeline.outcome is Outcome.CANCELLED
    assert_no_samples(timeline)


def test_cutting_never_reaches_a_user_whose_request_has_ended(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF)))
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())

    def user() -> str:
        client.stream(timeline, b"{}")
        gevent.sleep(0.05)
        return "undisturbed"

    streaming = gevent.spawn(user)
    while not client.reading:
        gevent.sleep(0.001)
    connection = client.reading[timeline]
    server.replies()  # blocks this thread until all of the answer is there
    connection._readable()  # what the hub would do, in the same turn of the loop as
    client.cut_all()
    assert streaming.get(timeout=5) == "undisturbed"
    assert timeline.outcome in (Outcome.OK, Outcome.CANCELLED)


def test_cutting_is_not_lost_in_a_listener_that_catches_everything(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF[:3]), ending=SILENCE))
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    listening = gevent.event.Event()

    def listener(_: Timeline) -> None:
        listening.set()
        with suppress(Exception):  # as Locust's events do
            gevent.sleep(60)

    streaming = gevent.spawn(client.stream, timeline, b"{}", listener)
    assert listening.wait(10)
    client.cut_all()
    streaming.join(5)
    assert timeline.outcome is Outcome.CANCELLED


def test_the_first_token_is_told_once_as_soon_as_it_is_known(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF)))
    client = client_of(server)
    timeline = Timeline("id", "short", "chat", monotonic_ns())
    told: list[tuple[int, Outcome | None]] = []
    client.stream(timeline, b"{}", lambda known: told.append((known.events, known.outcome)))
    assert told == [(1, None)]


def test_a_thousand_streams_at_once(emitter: Emitter) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"only {hard} descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    count = 1100
    server = emitter.serve(Answer([(1, ROLE), (1500, token("a")), (1500, FINISH), (1500, usage(7, 1)), (1500, DONE)]))
    client = client_of(server)
    streaming = [gevent.spawn(stream, client) for _ in range(count)]
    gevent.joinall(streaming)
    outcomes = [greenlet.value.outcome for greenlet in streaming]
    assert outcomes == [Outcome.OK] * count
    assert {reply.connection for reply in server.replies(count)} == set(range(count))


# Whatever comes


WHOLE = b"".join(piece for _, piece in REF)
BITS = [
    b"\r",
    b"\n",
    b"\n\n",
    b"data:",
    b"\x00",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b'"',
    b": x\n\n",
    b"0\r\n\r\n",
    b"\xe2\x80",
    DONE,
    ROLE,
]


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return bytes with some of them changed, left out, or put in."""
    result = whole
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(result)))
        end = min(len(result), start + draw(st.sampled_from([0, 0, 1, 2, 50, 1000])))
        put = draw(st.one_of(st.sampled_from([b"", *BITS]), st.binary(max_size=8)))
        result = result[:start] + put + result[end:]
    return result


ANSWERS = st.one_of(
    st.builds(
        Answer,
        st.lists(st.tuples(st.just(0), mutated(WHOLE)), min_size=1, max_size=2),
        framing=st.sampled_from([CHUNKED, LENGTH, UNTIL_CLOSE]),
        ending=st.sampled_from([CLOSE, FIN, RST]),
        headers=st.sampled_from([(), ("Connection: close",), ("Content-Encoding: gzip",)]),
        status=st.sampled_from(["200 OK", "200 OK", "200 OK", "500 Oops"]),
    ),
    st.builds(
        Answer,
        st.lists(st.tuples(st.just(0), mutated(HEAD + b"%x\r\n" % len(WHOLE) + WHOLE + b"\r\n0\r\n\r\n")), min_size=1),
        framing=st.just(RAW),
        ending=st.sampled_from([CLOSE, FIN, RST]),
    ),
    st.builds(
        Answer,
        st.lists(st.tuples(st.just(0), st.binary(min_size=1, max_size=300)), min_size=1, max_size=3),
        framing=st.sampled_from([CHUNKED, RAW, UNTIL_CLOSE]),
        ending=st.sampled_from([CLOSE, FIN, RST]),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(answer=ANSWERS)
def test_whatever_bytes_come_there_is_one_outcome_and_the_next_request_works(emitter: Emitter, answer: Answer) -> None:
    server = emitter.serve([answer, Answer([(0, WHOLE)], ending=KEEP)])
    client = client_of(server, Timeouts(connect_s=5, first_token_s=5, idle_s=5))
    timeline = stream(client)
    server.replies()
    gevent.sleep(0.005)  # what came after the end of the answer would else belong to the next one
    assert timeline.done_ns is not None
    assert len(timeline.message) <= 200
    assert (timeline.e2el_ns is None) == (timeline.outcome is not Outcome.OK)
    assert all(gap >= 0 for gap in timeline.gaps_ns())
    following = stream(client)
    assert (following.outcome, following.output_tokens, following.message) == (Outcome.OK, 4, "")


def test_case_41_a_wall_clock_that_steps_while_tokens_come_changes_no_number(
    emitter: Emitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources: openvinotoolkit/model_server#1260, sgl-project/sglang#17640."""
    steps_ns, right_ns, begin_ns = (0, -5_000 * MS, 3_600_000 * MS), time.time_ns, time.monotonic_ns()
    seen = set()

    def stepping_ns() -> int:
        step_ns = steps_ns[(time.monotonic_ns() - begin_ns) // (17 * MS) % 3]
        seen.add(step_ns)
        return right_ns() + step_ns

    monkeypatch.setattr(time, "time_ns", stepping_ns)
    monkeypatch.setattr(time, "time", lambda: stepping_ns() / 1e9)
    for _ in range(5):
        assert_ref(measure(emitter, script(*REF)))
    if sys.platform == "linux":  # where nobody stamps, nobody asks
        assert seen == set(steps_ns)
