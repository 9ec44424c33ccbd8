"""The simulator keeps the promises of its docstring, over real sockets.

Client and server are greenlets of one thread. Shapes are literals copied from captures of vLLM 0.32; nothing
here asserts speed, only that nothing comes early or in another order.
"""

import dataclasses
import http.client
import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import gevent
import gevent.socket
import processes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from vllm_locust import cli, faults
from vllm_locust.errors import InputError
from vllm_locust.simulated import Token, due, pick_break
from vllm_locust.simulated_faults import Drift, Errors, Fault, Slow, SlowSeat, Stall
from vllm_locust.simulated_metrics import Buckets
from vllm_locust.simulator import Profile, Simulator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}  # 2 tokens and 4 of the template
FAST = Profile(ttft_s=0, itl_s=0, prefill_s_per_token=0)
CONSTANT = Profile(ttft_s=0.03, ttft_sigma=0, itl_s=0.01, itl_sigma=0, prefill_s_per_token=0)
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

EVENT_KEYS = ["id", "object", "created", "model", "choices"]
CHAT_CHOICE_KEYS = ["index", "delta", "logprobs", "finish_reason"]
TEXT_CHOICE_KEYS = [
    *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
]
USAGE_KEYS = ["prompt_tokens", "total_tokens", "completion_tokens"]
WHOLE_KEYS = {*EVENT_KEYS, "service_tier", "system_fingerprint", "usage"} | {
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
}
WHOLE_CHOICE_KEYS = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}


class Reply(NamedTuple):
    """A complete answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def data(self) -> list[str]:
        """Return the data of each event of a stream."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        return [event.removeprefix("data: ") for event in events]

    def events(self) -> list[Any]:
        return [json.loads(data) for data in self.data() if data != "[DONE]"]

    def texts(self) -> list[str]:
        choices = [event["choices"][0] for event in self.events() if event.get("choices")]
        return [c["text"] if "text" in c else c["delta"]["content"] for c in choices if not opens(c)]


class Connection(http.client.HTTPConnection):
    """A kept connection that waits the gevent way, so that the server in this thread can run."""

    def __init__(self, simulator: Simulator) -> None:
        parts = urlsplit(simulator.url)
        assert parts.hostname
        super().__init__(parts.hostname, parts.port)

    def connect(self) -> None:
        self.sock = gevent.socket.create_connection((self.host, self.port))

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        self.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = self.getresponse()
        return Reply(response.status, response.headers, response.read())


@pytest.fixture
def run() -> Iterator[Callable[..., Simulator]]:
    running: list[Simulator] = []

    def start(profile: Profile = FAST, **fields: object) -> Simulator:
        running.append(Simulator(dataclasses.replace(profile, **fields)))  # type: ignore[arg-type]
        running[-1].start()
        return running[-1]

    yield start
    for simulator in running:
        simulator.stop()


def opens(choice: dict[str, Any]) -> bool:
    return "role" in choice.get("delta", {})


def get(simulator: Simulator, path: str, **headers: str) -> Reply:
    with closing(Connection(simulator)) as connection:
        return connection.ask("GET", path, None, **headers)


def post(simulator: Simulator, path: str, **fields: object) -> Reply:
    with closing(Connection(simulator)) as connection:
        return connection.ask("POST", path, json.dumps(fields).encode())


def metric(simulator: Simulator, name: str, **labels: str) -> float:
    """Return the one sample of this name that has these labels."""
    families = text_string_to_metric_families(get(simulator, "/metrics").body.decode())
    wanted = {"model_name": "simulated", "engine": "0", **labels}
    (value,) = [s.value for f in families for s in f.samples if (s.name, s.labels) == (name, wanted)]
    return value


def ended(simulator: Simulator, reason: str) -> float:
    return metric(simulator, "vllm:request_success_total", finished_reason=reason)


def emitted_ns(reply: Reply) -> list[int]:
    """Return when the server says that it wrote each token."""
    return [event["emitted_ns"] for event in reply.events() if event.get("choices") and not opens(event["choices"][0])]


def whole_chunks(received: bytes) -> Iterator[bytes]:
    """Split what one receive brought into chunks, all of them complete."""
    while received:
        size, _, received = received.partition(b"\r\n")
        length = int(size, 16)
        assert received[length : length + 2] == b"\r\n"
        yield received[:length]
        received = received[length + 2 :]


def wait_until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(5):
        while not condition():
            gevent.sleep(0.005)


def test_a_chat_stream_has_the_shape_of_vllms(run: Callable[..., Simulator]) -> None:
    reply = post(run(), CHAT, **HELLO, **USAGE, max_tokens=3)
    opening, *tokens, last, usage = reply.events()
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert list(opening) == [*EVENT_KEYS, "prompt_token_ids", "prompt_text"]
    assert list(opening["choices"][0]) == CHAT_CHOICE_KEYS
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 2
    for event in tokens:
        assert list(event) == EVENT_KEYS
        assert list(event["choices"][0]) == [*CHAT_CHOICE_KEYS, "token_ids"]
        assert list(event["choices"][0]["delta"]) == ["content"]
    assert list(last["choices"][0]) == [*CHAT_CHOICE_KEYS, "stop_reason", "token_ids"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert list(usage) == [*EVENT_KEYS, "usage", "system_fingerprint"]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 6, "total_tokens": 9, "completion_tokens": 3}
    assert {event["object"] for event in reply.events()} == {"chat.completion.chunk"}
    assert len({event["id"] for event in reply.events()}) == 1
    assert reply.data()[-1] == "[DONE]"


def test_a_completion_stream_has_the_shape_of_vllms(run: Callable[..., Simulator]) -> None:
    reply = post(run(), TEXT, prompt="hello", **USAGE, max_tokens=3)
    *tokens, usage = reply.events()
    assert [list(event) for event in tokens] == [EVENT_KEYS] * 3
    assert [list(event["choices"][0]) for event in tokens] == [TEXT_CHOICE_KEYS] * 3
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, "length"]
    assert list(usage) == [*EVENT_KEYS, "usage", "system_fingerprint"]
    assert usage["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    assert {event["object"] for event in reply.events()} == {"text_completion"}
    assert reply.data()[-1] == "[DONE]"


def test_continuous_usage_counts_each_choice_and_the_end_counts_all(run: Callable[..., Simulator]) -> None:
    *events, end = post(run(), CHAT, **HELLO, **CONTINUOUS, max_tokens=2, n=2).events()
    assert [event["choices"][0]["index"] for event in events] == [0, 1, 0, 1, 0, 1]
    assert [opens(event["choices"][0]) for event in events] == [True, True, False, False, False, False]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 0, 1, 1, 2, 2]
    assert {tuple(event["usage"]) for event in events} == {(*USAGE_KEYS, "completion_tokens_details")}
    assert end["usage"] == {"prompt_tokens": 6, "total_tokens": 10, "completion_tokens": 4}
    *events, _ = post(run(), TEXT, prompt="hello", **CONTINUOUS, max_tokens=2).events()
    assert [event["usage"] for event in events] == [
        {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1},
        {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2},
    ]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"continuous_usage_stats": True}}])
def test_usage_comes_only_when_it_is_asked_for(run: Callable[..., Simulator], options: dict[str, object]) -> None:
    *tokens, last = post(run(), TEXT, prompt="hello", stream=True, max_tokens=3, **options).events()
    assert [list(event) for event in tokens] == [EVENT_KEYS] * 2
    assert list(last) == [*EVENT_KEYS, "system_fingerprint"]


def test_a_whole_chat_answer_has_the_shape_of_vllms(run: Callable[..., Simulator]) -> None:
    answer = post(run(), CHAT, **HELLO, max_tokens=3, n=2).json()
    assert set(answer) == WHOLE_KEYS | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert set(answer["choices"][0]) == WHOLE_CHOICE_KEYS | {"message"}
    message = answer["choices"][0]["message"]
    nulls = ("refusal", "annotations", "audio", "function_call", "reasoning")
    assert set(message) == {"role", "content", *nulls}
    assert len(message["content"].split()) == 3
    assert set(answer["usage"]) == {*USAGE_KEYS, "prompt_tokens_details", "completion_tokens_details"}
    assert answer["usage"]["completion_tokens"] == 6


def test_a_whole_completion_has_the_shape_of_vllms(run: Callable[..., Simulator]) -> None:
    answer = post(run(), TEXT, prompt="hello", max_tokens=3).json()
    assert set(answer) == WHOLE_KEYS
    assert answer["object"] == "text_completion"
    extra = {"text", "prompt_logprobs", "prompt_token_ids"}
    assert set(answer["choices"][0]) == WHOLE_CHOICE_KEYS | extra
    assert answer["choices"][0]["finish_reason"] == "length"


def test_every_event_is_one_chunk_and_no_chunk_is_cut(run: Callable[..., Simulator]) -> None:
    body = json.dumps({**HELLO, **USAGE, "max_tokens": 4}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    chunks: list[bytes] = []
    with closing(Connection(run(CONSTANT))) as connection:
        connection.connect()
        connection.sock.sendall(head.encode() + body)
        headers = connection.sock.recv(65536)
        assert headers.endswith(b"\r\n\r\n")  # alone: they do not wait for the first token
        while b"" not in chunks:
            chunks += whole_chunks(connection.sock.recv(65536))
    *events, end = chunks
    assert end == b""
    assert len(events) == 1 + 4 + 1 + 1  # role, tokens, usage, [DONE]
    assert all(event.startswith(b"data: ") and event.count(b"\n\n") == 1 for event in events)


@pytest.mark.parametrize("length", [1, 2, 50])
def test_ignore_eos_gives_exactly_max_tokens(run: Callable[..., Simulator], length: int) -> None:
    reply = post(run(), TEXT, prompt="hello", stream=True, max_tokens=length, ignore_eos=True)
    assert len(reply.texts()) == length
    assert all(reply.texts())
    assert reply.events()[-1]["choices"][0]["finish_reason"] == "length"


def test_a_drawn_length_stops_with_an_empty_token_and_is_clamped(run: Callable[..., Simulator]) -> None:
    simulator = run()
    for _ in range(5):
        reply = post(simulator, CHAT, **HELLO, stream=True, min_tokens=100, max_tokens=120)
        *texts, last = reply.texts()
        finish = reply.events()[-1]["choices"][0]["finish_reason"]
        assert 100 <= len(texts) + 1 <= 120
        assert finish == ("length" if last else "stop")
        assert finish == "stop" or len(texts) + 1 == 120
    free = post(simulator, CHAT, **HELLO, stream=True)
    assert free.texts()[-1] == ""
    assert len({len(post(simulator, CHAT, **HELLO, stream=True).texts()) for _ in range(5)}) > 1


def test_an_answer_never_outgrows_the_model(run: Callable[..., Simulator]) -> None:
    simulator = run(max_model_len=20)
    for fields in ({}, {"max_tokens": 20}):
        answer = post(simulator, CHAT, **HELLO, ignore_eos=True, **fields).json()
        assert answer["usage"] == answer["usage"] | {"prompt_tokens": 6, "completion_tokens": 14}


def test_max_completion_tokens_wins_in_chats(run: Callable[..., Simulator]) -> None:
    limits = {"max_completion_tokens": 2, "max_tokens": 3, "ignore_eos": True}
    assert len(post(run(), CHAT, **HELLO, **limits, stream=True).texts()) == 2
    assert len(post(run(), TEXT, prompt="hello", **limits, stream=True).texts()) == 3


def test_a_prompt_costs_a_token_per_four_bytes_or_its_ids(run: Callable[..., Simulator]) -> None:
    simulator = run()

    def cost(prompt: str | list[int]) -> int:
        answer = post(simulator, TEXT, prompt=prompt, max_tokens=1).json()
        return int(answer["usage"]["prompt_tokens"])

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.text(min_size=1, max_size=200), st.lists(st.integers(0, 99), min_size=1, max_size=50))
    def check(text: str, ids: list[int]) -> None:
        assert cost(text) == (len(text.encode()) + 3) // 4
        assert cost(ids) == len(ids)

    check()


def test_content_parts_cost_their_text(run: Callable[..., Simulator]) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answer = post(run(), CHAT, messages=[{"role": "user", "content": parts}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == 6


def test_answers_follow_from_seed_and_number(run: Callable[..., Simulator]) -> None:
    def texts(simulator: Simulator) -> list[list[str]]:
        return [post(simulator, TEXT, prompt="hello", stream=True).texts() for _ in range(3)]

    first, again, other = texts(run(seed=1)), texts(run(seed=1)), texts(run(seed=2))
    assert first == again
    assert len({tuple(text) for text in first + other}) == 6
    post(mixed := run(seed=1), TEXT, prompt="hello", model="unknown")  # refused: not numbered
    whole = post(mixed, TEXT, prompt="hello").json()
    assert whole["choices"][0]["text"] == "".join(first[0])
    assert texts(mixed) == first


def test_text_that_needs_escapes_comes_through(run: Callable[..., Simulator]) -> None:
    texts = post(run(), TEXT, prompt="x", stream=True, max_tokens=2000, ignore_eos=True).texts()
    assert {' "yes"', " café", " a\\b"} <= set(texts)


def test_shares_of_broken_streams_are_exact(run: Callable[..., Simulator]) -> None:
    simulator = run(stream_errors=0.25, early_ends=0.5)
    replies = [post(simulator, CHAT, **HELLO, **USAGE, max_tokens=9, ignore_eos=True) for _ in range(8)]
    kinds = ["error" if '"error"' in r.body.decode() else r.data()[-1] == "[DONE]" for r in replies]
    assert [kinds[k : k + 4].count("error") for k in (0, 4)] == [1, 1]
    assert [kinds[k : k + 4].count(False) for k in (0, 4)] == [2, 2]
    assert [len(r.texts()) for r, kind in zip(replies, kinds, strict=True) if kind is not True] == [3] * 6
    failed = replies[kinds.index("error")]
    assert failed.events()[-1]["error"]["code"] == 500
    assert failed.data()[-1] == "[DONE]"
    cut = replies[kinds.index(False)].events()
    assert not any("usage" in event or event["choices"][0]["finish_reason"] for event in cut)
    assert (ended(simulator, "error"), ended(simulator, "length")) == (6, 2)
    assert metric(simulator, "vllm:generation_tokens_total") == 6 * 3 + 2 * 9


def test_tokens_leave_when_planned_and_never_early(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, emission=True, prefill_s_per_token=0.005)
    before = time.monotonic_ns()
    reply = post(simulator, CHAT, **HELLO, stream=True, max_tokens=20, ignore_eos=True)
    after = time.monotonic_ns()
    emitted = emitted_ns(reply)
    assert len(emitted) == 20
    assert emitted == sorted(emitted)
    late_s = [(ns - before) / 1e9 - (0.03 + 6 * 0.005 + 0.01 * i) for i, ns in enumerate(emitted)]
    assert min(late_s) >= 0
    assert min(late_s[10:]) < 0.1  # oversleeping does not add up
    assert emitted[-1] <= after


def test_no_token_event_is_stamped_unless_asked(run: Callable[..., Simulator]) -> None:
    assert "emitted_ns" not in post(run(), CHAT, **HELLO, stream=True, max_tokens=3).body.decode()


def test_who_finds_no_seat_queues_in_order(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, seats=1)
    done: list[int] = []

    def ask(number: int) -> None:
        post(simulator, TEXT, prompt="hello", stream=True, max_tokens=1)
        done.append(number)

    holder = Connection(simulator)
    holder.request("POST", CHAT, json.dumps({**HELLO, "stream": True, "ignore_eos": True}))
    wait_until(lambda: metric(simulator, "vllm:num_requests_running") == 1)
    clients: list[gevent.Greenlet] = []
    for number in range(4):
        clients.append(gevent.spawn(ask, number))
        wait_until(lambda: metric(simulator, "vllm:num_requests_waiting") == len(clients))
    assert done == []
    holder.close()
    gevent.joinall(clients, timeout=5, raise_error=True)
    assert done == [0, 1, 2, 3]
    assert metric(simulator, "vllm:num_requests_running") == 0
    assert metric(simulator, "vllm:num_requests_waiting") == 0


def test_a_client_that_leaves_frees_its_seat_silently(
    run: Callable[..., Simulator], capfd: pytest.CaptureFixture[str]
) -> None:
    simulator = run(CONSTANT, seats=1)
    leaver = Connection(simulator)
    leaver.request("POST", CHAT, json.dumps({**HELLO, "stream": True, "ignore_eos": True}))
    response = leaver.getresponse()
    response.read1()
    response.close()
    leaver.close()
    answer = post(simulator, CHAT, **HELLO, stream=True, max_tokens=2)
    assert answer.data()[-1] == "[DONE]"
    assert (ended(simulator, "abort"), ended(simulator, "length")) == (1, 1)
    assert capfd.readouterr() == ("", "")


def test_metrics_agree_with_what_was_sent(run: Callable[..., Simulator]) -> None:
    simulator = run()
    for fields in ({"stream": True}, {"stream": True, "n": 2}, {}):
        post(simulator, TEXT, prompt="hello", max_tokens=5, ignore_eos=True, **fields)
    post(simulator, TEXT, prompt="hello", min_tokens=2, max_tokens=32000)
    assert (ended(simulator, "length"), ended(simulator, "stop")) == (3, 1)
    assert [ended(simulator, reason) for reason in ("abort", "error", "repetition")] == [0, 0, 0]
    tokens = metric(simulator, "vllm:generation_tokens_total")
    assert tokens > 5 + 10 + 5
    assert metric(simulator, "vllm:prompt_tokens_total") == 4 * 2
    assert metric(simulator, "vllm:time_to_first_token_seconds_count") == 4
    assert metric(simulator, "vllm:inter_token_latency_seconds_count") == tokens - 5  # of 5 choices
    assert metric(simulator, "vllm:e2e_request_latency_seconds_count") == 4
    assert metric(simulator, "vllm:time_to_first_token_seconds_bucket", le="0.001") >= 0
    assert metric(simulator, "vllm:inter_token_latency_seconds_bucket", le="0.025") >= 0
    assert metric(simulator, "vllm:e2e_request_latency_seconds_bucket", le="7680.0") == 4
    assert metric(simulator, "vllm:request_queue_time_seconds_count") == 4
    assert metric(simulator, "vllm:prefix_cache_queries_total") == 4 * 2
    assert metric(simulator, "vllm:prefix_cache_hits_total") == 0
    assert metric(simulator, "vllm:num_preemptions_total") == 0


def test_the_servers_histograms_tell_when_tokens_were_written(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, emission=True)
    before_ns, emitted = [], []
    for _ in range(3):
        before_ns.append(time.monotonic_ns())
        emitted.append(emitted_ns(post(simulator, CHAT, **HELLO, stream=True, max_tokens=20, ignore_eos=True)))
    gaps_s = sum(instants[-1] - instants[0] for instants in emitted) / 1e9
    firsts_s = sum(instants[0] - sent for instants, sent in zip(emitted, before_ns, strict=True)) / 1e9
    assert metric(simulator, "vllm:inter_token_latency_seconds_count") == 3 * 19
    assert metric(simulator, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps_s, abs=0.1)
    assert metric(simulator, "vllm:time_to_first_token_seconds_count") == 3
    assert metric(simulator, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert 3 * 0.03 <= metric(simulator, "vllm:time_to_first_token_seconds_sum") <= firsts_s


def test_time_in_the_queue_is_a_part_of_the_time_to_the_first_token(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, seats=1)
    clients = [gevent.spawn(post, simulator, TEXT, prompt="hello", stream=True, max_tokens=1) for _ in range(3)]
    gevent.joinall(clients, timeout=5, raise_error=True)
    queue_s = metric(simulator, "vllm:request_queue_time_seconds_sum")
    assert queue_s > 0
    assert metric(simulator, "vllm:time_to_first_token_seconds_sum") >= queue_s + 3 * 0.03


def test_the_cache_holds_prompts_and_answers_of_those_with_a_seat(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, seats=2, max_model_len=100)
    holder = Connection(simulator)
    holder.request("POST", CHAT, json.dumps({**HELLO, "stream": True, "ignore_eos": True}))
    wait_until(lambda: metric(simulator, "vllm:generation_tokens_total") > 2)
    page = get(simulator, "/metrics").body.decode()
    told = {sample.name: sample.value for f in text_string_to_metric_families(page) for sample in f.samples}
    assert told["vllm:kv_cache_usage_perc"] == (6 + told["vllm:generation_tokens_total"]) / (2 * 100)
    holder.close()
    wait_until(lambda: metric(simulator, "vllm:num_requests_running") == 0)
    assert metric(simulator, "vllm:kv_cache_usage_perc") == 0
    assert metric(simulator, "vllm:generation_tokens_total") >= told["vllm:generation_tokens_total"]


@pytest.mark.parametrize(("times_ms", "at_most"), [([], (0, 0)), ([9, 10, 11, 90_000], (2, 3))])
def test_a_bucket_counts_what_is_at_or_below_its_bound(times_ms: list[int], at_most: tuple[int, int]) -> None:
    buckets = Buckets((0.01, 80.0))
    for time_ms in times_ms:
        buckets.add(time_ms * 10**6)
    counts = dict(zip(("0.01", "80.0", "+Inf"), (*at_most, len(times_ms)), strict=True))
    assert buckets.told() == (list(counts.items()), sum(times_ms) / 1000)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, b'{"messages":[', (400, "body", "1 validation error")),
        (TEXT, b"", (400, "body", "1 validation error")),
        (TEXT, b"[]", (400, "body", "1 validation error")),
        (TEXT, b'{"prompt":"\xff"}', (400, "body", "1 validation error")),
        (TEXT, b'{"other":' + b"[" * 100_000, (400, "body", "1 validation error")),
        (CHAT, b'{"stream":true}', (400, "body.messages", "Field required")),
        (TEXT, b'{"prompt":"x","max_tokens":"many"}', (400, "body.max_tokens", "1 validation error")),
        (TEXT, b'{"prompt":"x","max_tokens":true}', (400, "body.max_tokens", "1 validation error")),
        (TEXT, b'{"prompt":""}', (400, "prompt", "Either prompt or prompt_embeds")),
        (TEXT, b'{"prompt":"x","n":0}', (400, "n", "n must be at least 1, got 0.")),
        (
            TEXT,
            b'{"prompt":"x","max_tokens":0}',
            (400, "max_tokens", "must be at least 1, got 0. (parameter="),
        ),
        (
            TEXT,
            b'{"prompt":"x","max_tokens":99999}',
            (400, "max_tokens", "cannot be greater than max_model_"),
        ),
        (TEXT, b'{"prompt":"x","max_tokens":5,"min_tokens":50}', (400, None, "to max_tokens=5, got 50.")),
        (TEXT, b'{"prompt":"x","stream_options":{}}', (400, "stream_options", "when `stream=True`")),
        (TEXT, b'{"prompt":"%s"}' % (b"x" * 140_000), (400, "input_tokens", "contains 35000 input tokens")),
        (CHAT, b'{"messages":[],"model":"nope"}', (404, "model", "The model `nope` does not exist.")),
    ],
)
def test_a_bad_request_gets_vllms_error(
    run: Callable[..., Simulator], path: str, body: bytes, expected: tuple[int, str | None, str]
) -> None:
    status, param, words = expected
    with closing(Connection(run())) as connection:
        reply = connection.ask("POST", path, body)
    error = reply.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (reply.status, error["code"], error["param"]) == (status, status, param)
    assert words in error["message"]


def test_unknown_paths_and_methods_are_refused(run: Callable[..., Simulator]) -> None:
    simulator = run(completions=False)
    assert get(simulator, "/v1/nope")[::2] == (404, b'{"detail":"Not Found"}')
    assert post(simulator, TEXT, prompt="hello").status == 404
    wrong = get(simulator, CHAT)
    assert wrong[::2] == (405, b'{"detail":"Method Not Allowed"}')
    assert wrong.headers["Allow"] == "POST"


def test_a_key_is_needed_under_v1_only(run: Callable[..., Simulator]) -> None:
    simulator = run(api_key="secret")
    assert get(simulator, "/v1/models")[::2] == (401, b'{"error":"Unauthorized"}')
    assert get(simulator, "/v1/models", Authorization="Bearer wrong").status == 401
    assert get(simulator, "/v1/models", Authorization="Bearer secret").status == 200
    assert post(simulator, CHAT, **HELLO).status == 401
    assert get(simulator, "/health").status == get(simulator, "/metrics").status == 200


def test_the_server_describes_itself(run: Callable[..., Simulator]) -> None:
    simulator = run(model="m", max_model_len=99)
    (model,) = get(simulator, "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == ("m", 99, "vllm")
    assert list(get(simulator, "/version").json()) == ["version"]
    assert get(simulator, "/health")[::2] == get(simulator, "/ping")[::2] == (200, b"")


def test_connections_are_kept(run: Callable[..., Simulator]) -> None:
    stream = json.dumps({**HELLO, "stream": True, "max_tokens": 2}).encode()
    with closing(Connection(run())) as connection:
        assert connection.ask("POST", CHAT, stream).status == 200
        socket = connection.sock
        assert connection.ask("POST", CHAT, b"{").status == 400
        assert connection.ask("GET", "/health").status == 200
        assert connection.ask("POST", CHAT, stream).data()[-1] == "[DONE]"
        assert connection.sock is socket


def test_stop_cuts_streams_and_closes_the_port(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT)
    client = gevent.spawn(post, simulator, CHAT, **HELLO, stream=True, ignore_eos=True)
    wait_until(lambda: metric(simulator, "vllm:num_requests_running") == 1)
    simulator.stop()
    with pytest.raises(http.client.IncompleteRead):
        client.get(timeout=5)
    with pytest.raises(ConnectionRefusedError):
        get(simulator, "/health")


def test_serve_forever_returns_when_stopped() -> None:
    simulator = Simulator(FAST)
    server = gevent.spawn(simulator.serve_forever)
    wait_until(lambda: not simulator.url.endswith(":0"))
    assert get(simulator, "/health").status == 200
    simulator.stop()
    server.get(timeout=5)


def test_an_ipv6_host_is_bracketed_in_the_url() -> None:
    assert Simulator(host="::1", port=8000).url == "http://[::1]:8000"


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_s": -1},
        {"itl_s": float("nan")},
        {"itl_sigma": float("inf")},
        {"seats": 0},
        {"max_model_len": 1},
        {"early_ends": -0.1},
        {"stream_errors": 0.6, "early_ends": 0.5},
    ],
)
def test_a_profile_no_server_could_have_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Profile(**fields)


MS, S, MINUTE = 10**6, 10**9, 60 * 10**9

begins = st.integers(0, 10 * S)
spans = st.integers(1, 5 * S)
stalls = st.lists(st.builds(Stall, spans, begins), max_size=4).map(tuple)
gaps = st.lists(st.integers(0, 3 * S), min_size=1, max_size=20)


def answer(*gaps_ns: int) -> list[Token]:
    """Return an answer whose tokens come at these distances, the first from the seat."""
    ends = list(itertools.accumulate(gaps_ns))
    return [Token(end, 0, ordinal, " a", None) for ordinal, end in enumerate(ends, 1)]


def instants(given_faults: tuple[Fault, ...], tokens: list[Token], seated_ns: int, seat: int = 1) -> list[int]:
    return [due_ns for due_ns, _ in due(given_faults, tokens, seated_ns, seat)]


def frozen(given_stalls: tuple[Stall, ...], begin_ns: int, end_ns: int) -> int:
    """Return for how long of a time some stall was: the sum of its pieces that are within one."""
    edges = sorted({begin_ns, end_ns, *(edge for s in given_stalls for edge in (s.begin_ns, s.begin_ns + s.length_ns))})
    return sum(
        later - sooner
        for sooner, later in itertools.pairwise(edges)
        if begin_ns <= sooner < end_ns and any(s.begin_ns <= sooner < s.begin_ns + s.length_ns for s in given_stalls)
    )


def test_without_faults_tokens_are_due_as_drawn() -> None:
    tokens = answer(80 * MS, 12 * MS, 0, 7)
    assert list(due((), tokens, 5, 0)) == [(5 + token.due_ns, token) for token in tokens]


@given(stalls, gaps, begins)
def test_in_a_stall_nothing_is_due_and_all_that_follows_keeps_its_distance(
    given_stalls: tuple[Stall, ...], gaps_ns: list[int], seated: int
) -> None:
    found = instants(given_stalls, answer(*gaps_ns), seated)
    for instant, planned in zip(found, itertools.accumulate(gaps_ns), strict=True):
        assert instant - seated - frozen(given_stalls, seated, instant) == planned
        assert not any(stall.begin_ns <= instant < stall.begin_ns + stall.length_ns for stall in given_stalls)


def test_what_is_due_when_a_stall_begins_comes_after_it() -> None:
    stall = (Stall(15 * S, 100 * S),)
    assert instants(stall, answer(S, S, S, S), 98 * S) == [99 * S, 115 * S, 116 * S, 117 * S]
    assert instants(stall, answer(S, S), 107 * S) == [116 * S, 117 * S]  # no first token out of a frozen server
    assert instants(stall, answer(S, S), 115 * S) == [116 * S, 117 * S]


@pytest.mark.parametrize(("seated", "factor"), [(59 * S, 1), (60 * S, 3), (70 * S - 1, 3), (70 * S, 1)])
def test_who_gets_a_seat_in_a_slow_time_is_slow_to_the_end(seated: int, factor: int) -> None:
    found = instants((Slow(3.0, 60 * S, 10 * S),), answer(80 * MS, 20 * S, 12 * MS), seated)
    assert found == [seated + factor * planned for planned in (80 * MS, 20_080 * MS, 20_092 * MS)]


def test_with_a_drift_each_gap_takes_as_long_as_its_begin_says() -> None:
    drift = (Drift(0.5),)
    assert instants(drift, answer(MINUTE, MINUTE, 100 * MS), 0) == [MINUTE, 2.5 * MINUTE, 2.5 * MINUTE + 225 * MS]
    assert instants(drift, answer(80 * MS), 2 * MINUTE) == [2 * MINUTE + 160 * MS]


def test_only_the_first_seat_is_the_slow_one() -> None:
    assert instants((SlowSeat(4.0),), answer(80 * MS, 12 * MS), 7, seat=0) == [7 + 320 * MS, 7 + 368 * MS]
    assert instants((SlowSeat(4.0),), answer(80 * MS, 12 * MS), 7, seat=1) == [7 + 80 * MS, 7 + 92 * MS]


def test_faults_that_meet_are_multiplied() -> None:
    both = (Slow(3.0, 0, S), SlowSeat(2.0), Drift(1.0))
    assert instants(both, answer(10 * MS), S // 2, seat=0) == [S // 2 + round(60 * MS * (1 + 1 / 120))]


def test_errors_break_their_share_of_the_streams_that_begin_in_their_time() -> None:
    profile = Profile(stream_errors=0.125, early_ends=0.25, faults=(Errors(0.5, 60 * S, 10 * S),))

    def kinds(came_ns: int) -> list[str | None]:
        return [pick_break(profile, number, came_ns) for number in range(16)]

    for came_ns in (0, 60 * S - 1, 70 * S):
        assert (kinds(came_ns).count("error"), kinds(came_ns).count("early end")) == (2, 4)
    for came_ns in (60 * S, 70 * S - 1):
        assert (kinds(came_ns).count("error"), kinds(came_ns).count("early end")) == (10, 4)
        assert all(kinds(came_ns)[k : k + 4].count("error") >= 2 for k in range(0, 16, 4))


def test_a_frozen_server_writes_nothing_and_goes_on_where_it_was(run: Callable[..., Simulator]) -> None:
    stall = Stall(300 * MS, 150 * MS)
    simulator = run(CONSTANT, emission=True, faults=(stall,))
    lengths = {"max_tokens": 30, "ignore_eos": True, "stream": True}
    before = time.monotonic_ns()
    clients = [gevent.spawn(post, simulator, CHAT, **HELLO, **lengths) for _ in range(5)]
    wait_until(lambda: simulator._began is not None)
    assert simulator._began is not None
    begin = simulator._began + stall.begin_ns
    end = begin + stall.length_ns
    gevent.sleep(max(0, begin - 15 * MS - time.monotonic_ns()) / 1e9)
    time.sleep(0.05)  # without gevent, so the server wakes up in the stall for what was due before it
    with closing(Connection(simulator)) as late:
        late.request("POST", TEXT, json.dumps({"prompt": "x", **lengths}))
        response = late.getresponse()
        assert time.monotonic_ns() >= end  # not even headers
        assert min(emitted_ns(Reply(200, response.headers, response.read()))) >= end + 30 * MS
    for client in clients:
        emitted = emitted_ns(client.get(timeout=5))
        assert not any(begin <= ns < end for ns in emitted)
        planned = instants((stall,), answer(30 * MS, *[10 * MS] * 29), 0)
        assert all(ns >= before + due_ns for ns, due_ns in zip(emitted, planned, strict=True))
        assert emitted[-1] >= end


def test_of_two_seats_that_take_turns_the_first_one_is_slow(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, emission=True, seats=2, faults=(SlowSeat(8.0),))
    took = []
    for _ in range(6):
        before = time.monotonic_ns()
        reply = post(simulator, CHAT, **HELLO, stream=True, max_tokens=3, ignore_eos=True)
        took.append([ns - before for ns in emitted_ns(reply)])
    for slow in took[0::2]:
        assert all(ns >= due_ns for ns, due_ns in zip(slow, [240 * MS, 320 * MS, 400 * MS], strict=True))
    # Planned for an eighth of it; two, as the machine may be slow once.
    assert min(took[3][-1], took[5][-1]) < 400 * MS


def test_a_seat_that_changes_hands_stays_the_seat_that_it_is(run: Callable[..., Simulator]) -> None:
    simulator = run(CONSTANT, emission=True, seats=1, faults=(SlowSeat(5.0),))
    before = time.monotonic_ns()
    clients = [gevent.spawn(post, simulator, CHAT, **HELLO, stream=True, max_tokens=1) for _ in range(3)]
    firsts = sorted(emitted_ns(client.get(timeout=5))[0] - before for client in clients)
    assert all(ns >= due_ns for ns, due_ns in zip(firsts, [150 * MS, 300 * MS, 450 * MS], strict=True))


def test_the_clock_of_the_faults_begins_with_the_first_stream(run: Callable[..., Simulator]) -> None:
    simulator = run(FAST, faults=(Errors(1.0, 0, 3600 * S), Slow(2.0, 3600 * S, S)))
    post(simulator, CHAT, **HELLO, max_tokens=1)
    assert simulator._began is None
    before = time.monotonic_ns()
    assert '"error"' in post(simulator, CHAT, **HELLO, stream=True, max_tokens=9).body.decode()
    assert simulator._began is not None
    assert before <= simulator._began <= time.monotonic_ns()
    later = run(FAST, faults=(Errors(1.0, 3600 * S, S),))
    assert '"error"' not in post(later, CHAT, **HELLO, stream=True, max_tokens=9).body.decode()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stall 15s at 100s", Stall(15 * S, 100 * S)),
        ("slow 3x at 60s for 10s", Slow(3.0, 60 * S, 10 * S)),
        ("drift 50% per minute", Drift(0.5)),
        ("errors 30% at 60s for 10s", Errors(0.3, 60 * S, 10 * S)),
        ("slow seat 4x", SlowSeat(4.0)),
        ("  stall 1m 30s   at 300 ms ", Stall(90 * S, 300 * MS)),
        ("stall 5 at 0", Stall(5 * S, 0)),
        ("slow 0.5x at 0s for 2.5m", Slow(0.5, 0, 150 * S)),
        ("errors 0.05 at 0s for 1h", Errors(0.05, 0, 3600 * S)),
        ("drift 150% per minute", Drift(1.5)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert faults.parse(text) == fault


def test_each_example_of_the_help_is_a_fault() -> None:
    assert {type(faults.parse(text)) for text in faults.EXAMPLES} == {Stall, Slow, Drift, Errors, SlowSeat}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no fault; write it like one of\n  stall 15s at 100s\n"),
        ("stall 15s", "'stall 15s' is no fault"),
        ("stall -1s at 5s", "'-1s' is not a duration"),
        ("stall 15q at 5s", "'15q' is not a duration"),
        ("stall 0s at 5s", "it lasts no time"),
        ("stall 1s at 99999999h", "99999999h is too long"),
        (f"stall 1s at {'9' * 400}s", "is not a duration"),
        ("slow 0x at 1s for 1s", "0x is no factor"),
        ("slow -2x at 1s for 1s", "is no fault"),
        ("slow nanx at 1s for 1s", "is no fault"),
        ("slow 3 at 1s for 1s", "is no fault"),
        ("slow seat 0.0x", "0.0x is no factor"),
        (f"slow seat {'9' * 400}x", "is no fault"),
        ("drift -5% per minute", "is no fault"),
        ("drift 5% per hour", "is no fault"),
        ("errors 130% at 1s for 1s", "'130%' is not a share"),
        ("errors 30% at 1s for 0s", "it lasts no time"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_is(text: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        faults.parse(text)
    assert str(refused.value).startswith("--fault")
    assert reason in str(refused.value)


def test_the_command_refuses_a_fault_before_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--port", "0", "--fault", "slow seat 2x", "--fault", "explode"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("vllm-locust: --fault: 'explode' is no fault; write it like one of\n")


def test_the_command_tells_the_server_its_faults(tmp_path: Path) -> None:
    given_faults = ("--fault", "drift 50% per minute", "--fault", "errors 100% at 0s for 1h")
    with processes.simulator(tmp_path, "--ttft", "0ms", "--itl", "0ms", *given_faults) as url:
        body = json.dumps({**HELLO, "stream": True, "max_tokens": 9, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}{CHAT}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            assert b'"error"' in response.read()
