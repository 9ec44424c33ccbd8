"""Real answers, replayed byte by byte as they came: `streams/INDEX.md` says what they are and where they are from.

Each is replayed at the times at which it was recorded, in the pieces in which it was received, and at once. What it
says is in `streams/expected.toml`; when its token events really left is what the scripted server noted.
"""

import sys
from itertools import pairwise

import pytest
from captures import EXPECTED, STREAMS, Recording, recording, token_events
from emitter import KEEP, RAW, RST, Answer, Emitter
from measuring import EARLY_NS, MS, PATIENT, TRIES, UNSTAMPED_NS, Measured, client_of, stream

from vllm_locust.errors import TargetError
from vllm_locust.probe import Access, Target, count_tokens, probe
from vllm_locust.timeline import COALESCED_EVENTS, COALESCED_READS, Outcome, Timeline
from vllm_locust.timeouts import Timeouts

pytestmark = pytest.mark.usefixtures("quiet")

FOR_THE_PROBE = {"models", "auth_models_nokey", "tokenize", "tokenize_chat"}
"""What is asked before a run, and read by the probe."""
WITH_TOKENS = [name for name, row in EXPECTED.items() if "events" in row]
LATE_NS = (1 if sys.platform == "linux" else 10) * MS
"""Half of the time between two tokens, where the kernel stamps: no event has the time of a later read than its own."""


def impatient(outcome: str) -> Timeouts:
    """Return time limits under which only an answer that falls silent for good is given up, and that soon."""
    return Timeouts(connect_s=5, first_token_s=20, idle_s=1) if outcome == "idle_timeout" else PATIENT


class Piece(bytes):
    """A piece that completes so many token events."""

    events: int


def as_it_came(name: str) -> Answer:
    """Return the recorded pieces at their recorded times."""
    recorded, faster = recording(name), EXPECTED[name].get("faster", 1)
    return answer(recorded, [(at_ms / faster, offset) for at_ms, offset in recorded.reads], recorded.end_ms / faster)


def at_once(name: str, ending: str | None = None) -> Answer:
    recorded = recording(name)
    return answer(recorded, [(1, 0)], 1 if recorded.ending == KEEP else 30, ending)


def answer(recorded: Recording, reads: list[tuple[float, int]], end_ms: float, ending: str | None = None) -> Answer:
    """Return the recorded bytes cut at the beginnings of these reads."""
    events = token_events(recorded.raw)
    pieces: list[tuple[float, bytes]] = []
    ends = [begin for _, begin in reads[1:]] + [len(recorded.raw)]
    for (at_ms, begin), end in zip(reads, ends, strict=True):
        piece = Piece(recorded.raw[begin:end])
        piece.events = sum(begin <= event.last_byte < end for event in events)
        pieces.append((at_ms, piece))
    return Answer(pieces, framing=RAW, ending=ending or recorded.ending, end_ms=end_ms)


def replay(emitter: Emitter, name: str, script: Answer) -> Measured:
    """Ask once for a recorded answer."""
    row = EXPECTED[name]
    server = emitter.serve(script)
    client = client_of(server, impatient(row["outcome"]))
    timeline = stream(client, row["endpoint"])
    return Measured(timeline, script, server.replies()[0])


def assert_says(name: str, timeline: Timeline) -> None:
    """What was understood is what the table says, times aside."""
    row = EXPECTED[name]
    events, exact, finish = (row.get(key, []) for key in ("events", "exact", "finish"))
    choices = [timeline.choices[index] for index in sorted(timeline.choices)]
    assert (timeline.outcome, timeline.status) == (Outcome(row["outcome"]), row["status"])
    assert [choice.events for choice in choices] == events
    assert [choice.tokens for choice in choices] == (exact or [0] * len(events))
    assert [timeline.finish_reasons[index] for index in sorted(timeline.finish_reasons)] == finish
    assert timeline.output_tokens == row.get("output_tokens", 0)
    assert (timeline.input_tokens, timeline.cached_tokens) == (row.get("input_tokens"), row.get("cached_tokens"))
    assert timeline.estimated == ("input_tokens" not in row)
    assert (timeline.comments, timeline.heartbeats, timeline.reconnects) == (row.get("comments", 0), 0, 0)


def assert_message(name: str, timeline: Timeline) -> None:
    row = EXPECTED[name]
    match row["outcome"]:
        case "not_streamed":
            said = recording(name).raw.partition(b"\r\n\r\n")[2].decode()
        case "idle_timeout":
            assert timeline.message.endswith(f" after {sum(row['events'])} token events")
            return
        case _:
            said = row.get("message", "")
    assert timeline.message == " ".join(said.split())[:200]


def assert_numbers_of(name: str, measured: Measured) -> None:
    """All metrics follow from the times of the token events, of each choice for itself."""
    timeline, row = measured.timeline, EXPECTED[name]
    assert timeline.sent_ns is not None
    assert timeline.ttft_ns == (measured.times[0] - timeline.sent_ns if measured.times else None)
    coalesced = timeline.events >= COALESCED_EVENTS and timeline.token_reads <= COALESCED_READS
    assert timeline.coalesced == coalesced
    times = [list(choice.times) for choice in timeline.choices.values()]
    gaps = [second - first for of_choice in times for first, second in pairwise(of_choice)]
    assert measured.gaps == ([] if coalesced else gaps)
    ok = row["outcome"] == "ok"
    assert timeline.e2el_ns == (measured.times[-1] - timeline.sent_ns if ok else None)
    each = row.get("output_tokens", 0) // max(1, len(times))  # in all captures the choices are of one length
    tpots = [(of_choice[-1] - of_choice[0]) // (each - 1) for of_choice in times] if each > 1 else []
    assert timeline.tpots_ns() == (tpots if ok and not coalesced else [])


def late_ns(measured: Measured) -> int:
    """Return by how much a time is later than its read can have been, at most; none is earlier than its sending.

    A process without a CPU gets several pieces in one read, and then the time of the last of them for all their events.
    So events of one time must have come together: what was sent before the next event is the latest that their read can
    have brought.
    """
    timeline, script, reply = measured
    times = {index: iter(choice.times) for index, choice in timeline.choices.items()}
    events = token_events(b"".join(piece for _, piece in script.pieces))
    seen = [(next(times[event.choice]), number) for event, number in zip(events, script.token_pieces, strict=True)]
    late = 0
    for (at_ns, number), (next_ns, next_number) in pairwise([*seen, (0, len(script.pieces))]):
        assert at_ns >= reply.sent[number][0] - EARLY_NS
        if next_ns != at_ns:
            late = max(late, at_ns - reply.sent[max(number, next_number - 1)][1])
    return late


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_answer_at_its_recorded_times(emitter: Emitter, name: str) -> None:
    for _ in range(TRIES):
        measured = replay(emitter, name, as_it_came(name))
        assert_says(name, measured.timeline)
        assert_message(name, measured.timeline)
        assert_numbers_of(name, measured)
        if late_ns(measured) <= LATE_NS:
            break
    else:
        pytest.fail(f"{late_ns(measured) / MS} ms late, {TRIES} times")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_answer_at_once(emitter: Emitter, name: str) -> None:
    measured = replay(emitter, name, at_once(name))
    assert_says(name, measured.timeline)
    assert_message(name, measured.timeline)
    assert_numbers_of(name, measured)
    (before_ns, after_ns), *_ = measured.reply.sent
    for at_ns in measured.times:
        assert before_ns - EARLY_NS <= at_ns <= after_ns + UNSTAMPED_NS


def test_a_server_that_was_killed_may_reset_its_connections(emitter: Emitter) -> None:
    timeline = replay(emitter, "die_api_kill9", at_once("die_api_kill9", RST)).timeline
    assert_says("die_api_kill9", timeline)
    assert timeline.message.endswith("reset by peer after 96 token events")


@pytest.mark.parametrize("name", ["comp_stream_usage", "chat_stream_n2", "err_503_queue_full", "auth_missing"])
def test_a_connection_outlives_an_answer_that_was_whole(emitter: Emitter, name: str) -> None:
    server = emitter.serve([at_once(name), at_once("chat_stream_usage")])
    client = client_of(server)
    outcomes = [stream(client, EXPECTED[name]["endpoint"]).outcome, stream(client).outcome]
    assert outcomes == [Outcome(EXPECTED[name]["outcome"]), Outcome.OK]
    assert [reply.connection for reply in server.replies(2)] == [0, 0]


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_the_table_says_what_is_in_the_bytes(name: str) -> None:
    row, events = EXPECTED[name], token_events(recording(name).raw)
    choices = sorted({event.choice for event in events})
    assert [sum(event.choice == index for event in events) for index in choices] == row["events"]


def test_every_capture_is_in_the_index_and_in_the_table_and_all_are_small() -> None:
    text = (STREAMS / "INDEX.md").read_text(encoding="utf-8")
    indexed = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and "`" in line]
    names = {path.stem for path in STREAMS.glob("*.raw")}
    assert sorted(indexed) == sorted(f"`{name}`" for name in names)
    assert names == EXPECTED.keys() | FOR_THE_PROBE
    assert names == {path.name.removesuffix(".recv.tsv") for path in STREAMS.glob("*.recv.tsv")}
    assert sum(path.stat().st_size for path in STREAMS.iterdir()) < 450_000
    for name in names:
        recorded = recording(name)
        assert recorded.reads[0][1] == 0
        assert recorded.reads == sorted(recorded.reads)


def test_the_probe_reads_what_the_server_answers_before_a_run(emitter: Emitter) -> None:
    """The order of what it asks is its own; each path has one answer here."""
    routes = {
        "/v1/models": at_once("models"),
        "/v1/completions": at_once("err_min_gt_max"),
        "/v1/chat/completions": at_once("err_missing_messages"),
        "/tokenize": at_once("tokenize"),
        "*": at_once("err_unknown_path"),
    }
    server = emitter.serve(routes)
    access = Access(url=server.url)
    assert probe(access, model=None, endpoints=("completions", "chat")) == Target(
        url=server.url, model="tiny", max_model_len=4096, endpoints=("completions", "chat"), exact_length=True
    )
    assert count_tokens(access, "tiny", {"prompt": "import os and print"}) == 4
    templated = Access(url=emitter.serve({"/tokenize": at_once("tokenize_chat")}).url)
    assert count_tokens(templated, "tiny", {"messages": [{"role": "user", "content": "hi"}]}) == 5


@pytest.mark.parametrize("name", ["err_unknown_path", "err_method"])
def test_the_probe_knows_a_path_that_is_not_there(emitter: Emitter, name: str) -> None:
    server = emitter.serve({"/v1/models": at_once("models"), "*": at_once(name)})
    with pytest.raises(TargetError, match="does not have /v1/chat/completions"):
        probe(Access(url=server.url), model=None, endpoints=("chat",))


def test_the_probe_is_told_that_it_needs_a_key(emitter: Emitter) -> None:
    server = emitter.serve({"/v1/models": at_once("auth_models_nokey"), "*": at_once("auth_missing")})
    with pytest.raises(TargetError, match=r"refuses access \(HTTP 401\)"):
        probe(Access(url=server.url), model=None, endpoints=("chat",))
