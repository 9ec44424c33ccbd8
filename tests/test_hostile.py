"""Whatever a server sends, a request has one outcome, in bounded memory and time, and the next request works."""

import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import gevent
import hostile
import pytest
from cutting import cut
from emitter import CLOSE, DONE, FIN, FINISH, KEEP, RAW, REF, RST, Answer, Emitter, chunk, token, usage
from hostile import GZIP, HEAD, LAST, WHOLE, ask, endless, framed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust import api, body, response, sse
from vllm_locust.client import Client
from vllm_locust.hub import hub
from vllm_locust.origin import origin_of
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

READ = 65_536
MANY = settings(suppress_health_check=list(HealthCheck))
TOLD = HEAD + framed(WHOLE)
KB, MB, GB = 1024, 1024**2, 1024**3


@contextmanager
def bounded(memory: int, cpu_s: float = 40) -> Iterator[None]:
    """Check that what is done takes no more memory; and CPU time of another order than what it would with a fault."""
    tracemalloc.start()
    began_s = time.process_time()
    try:
        yield
        taken_s, (_, peak) = time.process_time() - began_s, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= memory
    assert taken_s <= cpu_s


def reads_of(*parts: bytes) -> list[bytes]:
    return [piece for part in parts for piece in cut(part, range(READ, len(part), READ))]


def data(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def outcome_of(*reads: bytes) -> tuple[Outcome | None, str, int, bool]:
    """Return outcome, message, number of token events, and whether the connection is kept."""
    timeline, wire = ask(reads)
    hostile.check(timeline, wire)
    return timeline.outcome, timeline.message, timeline.events, not wire.closed


# Anything at all


@settings(MANY, max_examples=30)
@given(hostile.STORIES, hostile.RANDOMS)
def test_whatever_servers_say_each_request_has_its_outcome_and_everyone_can_read_it(
    story: hostile.Story, random: Random
) -> None:
    hostile.live(story)
    for mutant in islice(hostile.mutants(story, random), 4):
        hostile.live(mutant, read=False)


@settings(MANY, max_examples=30)
@given(st.lists(hostile.ANSWERS, min_size=1, max_size=3), hostile.RANDOMS)
def test_whatever_comes_over_a_socket_the_next_request_works(
    emitter: Emitter, answers: list[bytes], random: Random
) -> None:
    plan = [
        Answer(
            [(0, read) for read in hostile.cut(answer, random)[:50]],
            framing=RAW,
            ending=random.choice([CLOSE, FIN, RST]),
        )
        for answer in answers
    ]
    server = emitter.serve([*plan, Answer([(0, WHOLE)], ending=KEEP)])
    pool = Pool(origin_of(server.url)[0])
    client = Client(pool, Timeouts(first_token_s=5, idle_s=5))
    for number in range(len(answers)):
        timeline = streamed(client)
        assert timeline.outcome in set(Outcome) - {Outcome.CANCELLED}
        # Bytes that come behind an answer are no fault of the next one; the request that a closed connection got is.
        server.replies(number + 1)
        gevent.sleep(0.005)
    following = streamed(client)
    pool.close()
    assert (following.outcome, following.output_tokens, following.message) == (Outcome.OK, 4, "")


def streamed(client: Client) -> Timeline:
    timeline = Timeline("request-1", "short", "chat", time.monotonic_ns())
    client.stream(timeline, b"{}")
    return timeline


def test_a_story_that_failed_can_be_told_again(tmp_path: Path) -> None:
    story = [hostile.request(TOLD + LAST, Random(1)), hostile.request(b"\x00\xff'\"\\", Random(2))]
    assert hostile.loaded(hostile.saved(story)) == story
    (tmp_path / "story").write_text(hostile.saved(story), encoding="utf-8")
    fuzz = Path(hostile.__file__).with_name("fuzz.py")
    told = subprocess.run([sys.executable, fuzz, tmp_path / "story"], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "nothing fails any more\n"), told.stderr


# Events without an end


def test_an_event_may_have_megabytes_in_whatever_pieces_and_takes_the_time_of_its_bytes() -> None:
    event = data('{"choices":[{"index":0,"delta":{"content":"a"},"x":"%s"}]}' % ("y" * 10 * MB))
    for reads in (reads_of(HEAD + framed(event)), cut(HEAD + framed(event), range(KB, 10 * MB, KB))):
        with bounded(120 * MB):
            timeline, _ = ask([*reads, framed(FINISH + DONE) + LAST])
        assert (timeline.outcome, timeline.events) == (Outcome.OK, 1)


@pytest.mark.parametrize("chunked", [False, True])
def test_case_07_a_long_event_byte_by_byte_takes_the_time_of_its_bytes(*, chunked: bool) -> None:
    event = data('{"choices":[{"index":0,"delta":{"content":"a"},"x":"%s"}]}' % ("y" * 300_000))
    bytewise = [bytes([byte]) for byte in event]
    reads = [HEAD, *map(framed, bytewise)] if chunked else [HEAD, b"%x\r\n" % len(event), *bytewise, b"\r\n"]
    began_s = time.process_time()
    timeline, _ = ask([*reads, framed(FINISH + DONE) + LAST])
    assert (timeline.outcome, timeline.events) == (Outcome.OK, 1)
    assert time.process_time() - began_s < 15  # 1 s; when all is looked at again with each byte, minutes


@pytest.mark.parametrize("first", [b"data: ", b": ", b"data: {}\n\ndata: ", WHOLE + b"id: "])
def test_a_body_without_an_end_of_an_event_is_malformed_in_bounded_memory(first: bytes) -> None:
    with bounded(sse.EVENT_BYTES + 4 * MB):
        timeline, wire = ask(endless(HEAD + framed(first), framed(b"y" * READ), 200 * MB))
    assert (timeline.outcome, timeline.message) == (Outcome.MALFORMED, "an event of more than 16,777,216 bytes")
    assert timeline.events == (4 if WHOLE in first else 0)
    assert wire.closed
    assert wire.bytes < 18 * MB


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        *((line, Outcome.OK) for line in (b":\n", b"data:\n", b"x\n")),
        *(
            pytest.param(line, Outcome.OK, marks=pytest.mark.long)
            for line in (b"x: a\n", b"event: a\n", b"data:\r", b":\r\n")
        ),
        (b"data: a\n", Outcome.MALFORMED),
    ],
)
def test_an_event_of_very_many_lines_takes_the_time_of_its_bytes(line: bytes, outcome: Outcome) -> None:
    lines = framed(line * (READ // len(line)))
    with bounded(120 * MB):
        timeline, _ = ask([HEAD, framed(b":\n"), *[lines] * 60, framed(b"\n\n" + WHOLE), LAST])
    assert timeline.outcome is outcome


@pytest.mark.parametrize("blank", [b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf\n"])
def test_a_body_that_begins_with_very_many_blank_lines_takes_the_time_of_its_bytes(blank: bytes) -> None:
    with bounded(4 * MB):
        timeline, _ = ask([HEAD + framed(blank), *[framed(blank[-1:] * READ)] * 200, framed(WHOLE) + LAST])
    assert (timeline.outcome, timeline.events) == (Outcome.OK, 4)


def test_what_sseclient_sees_is_logged_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """It would log each event, and what it does not know with its text, where Locust's log level is DEBUG."""
    with caplog.at_level(logging.DEBUG):
        assert ask([HEAD + framed(WHOLE + b"secret: 1\n\n") + LAST])[0].outcome is Outcome.OK
    assert not caplog.records


# HTTP without an end


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        pytest.param(b"HTTP/1.1 200 ", b"a" * READ, id="status line"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: ", b"a" * READ, id="header"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"a" * READ, id="name of a header"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n" * 10_000, id="headers"),
        pytest.param(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 2_000, id="interim responses"),
        pytest.param(b"", b"\r\n" * 30_000, id="blank lines"),
        pytest.param(HEAD, b"0" * READ, id="size of a chunk"),
        pytest.param(TOLD + b"5;a=", b"a" * READ, id="extension of a chunk"),
        pytest.param(TOLD + b"0\r\nX: ", b"a" * READ, id="trailer"),
        pytest.param(TOLD + b"0\r\n", b"X: a\r\n" * 10_000, id="trailers"),
    ],
)
def test_http_without_an_end_is_malformed_in_bounded_memory(first: bytes, piece: bytes) -> None:
    with bounded(16 * MB):
        timeline, wire = ask(endless(first, piece, 100 * MB))
    assert (timeline.outcome, timeline.message) == (
        Outcome.MALFORMED,
        f"more than {response.FRAME_BYTES:,} bytes of HTTP without a body",
    )
    assert timeline.events == (4 if WHOLE in first else 0)
    assert wire.closed
    assert wire.bytes <= len(first) + response.FRAME_BYTES + 2 * READ


def test_a_large_head_and_long_extensions_are_taken() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nX: %b\r\n\r\n" % (b"a" * 100_000))
    chunks = [b"%x;a=%b\r\n%b\r\n" % (len(piece), b"b" * 100_000, piece) for _, piece in REF]
    assert outcome_of(*reads_of(head + b"".join(chunks) + LAST)) == (Outcome.OK, "", 4, True)


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" + WHOLE
MALFORMED = [
    *(
        LENGTH % value
        for value in (b"-1", b"+5", b"0x10", b"1_0", b"1, 1", b"", b"18446744073709551616", b"\xb2", b"5\x00")
    ),
    LENGTH % b"5\r\nContent-Length: 5",
    LENGTH % b"5\r\nTransfer-Encoding: chunked",
    HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + framed(WHOLE) + LAST,
    *(
        HEAD + size + b"\r\n" + WHOLE
        for size in (b"-1", b"0x9", b" 9", b"9 ", b"+9", b"9_9", b"", b"g", b"10000000000000000")
    ),
    *(
        b"<html>login</html>",
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"PRI * HTTP/2.0\r\n\r\n",
    ),
    *(
        b"HTTP/1.1 %b x\r\n\r\n" % status
        for status in (b"099", b"000", b"20", b"2000", b"-20", b"2e2", b"\xb2\xb0\xb0")
    ),
    *(
        b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % line
        for line in (b"X\xe9: a", b": a", b"X: \x00", b"X: a\r\n b", b"X", b"X : a")
    ),
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + WHOLE,
]


@pytest.mark.parametrize("answer", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_http_is_malformed_at_once_and_says_so(answer: bytes) -> None:
    outcome, message, events, kept = outcome_of(answer)
    assert (outcome, events, kept) == (Outcome.MALFORMED, 0, False)
    assert message.startswith("not HTTP/1.1: ")
    assert "(" not in message


@pytest.mark.parametrize("size", [b"8000000000000000", b"7fffffffffffffff", b"ffffffffffffffff"])
@pytest.mark.parametrize("framing", [HEAD + b"%b\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n"])
def test_a_body_may_announce_any_length_and_loses_its_connection_before(size: bytes, framing: bytes) -> None:
    announced = framing % (b"%d" % int(size, 16) if b"Length" in framing else size)
    with bounded(4 * MB):
        timeline, wire = ask([announced + b"".join(piece for _, piece in REF[:3])])
    assert (timeline.outcome, timeline.events, wire.closed) == (Outcome.CONNECTION_LOST, 2, True)


@pytest.mark.parametrize("whole", [LENGTH % (b"%d" % len(WHOLE)), TOLD + LAST])
@pytest.mark.parametrize(
    "behind",
    [
        b"junk",
        b"\x00",
        b"HTTP/1.1 200 OK\r\n",
        HEAD,
        TOLD + LAST,
        HEAD + framed(data('{"error":"x"}')) + LAST,
        b"HTTP/1.1 404 ",
    ],
)
def test_what_stands_behind_an_answer_is_no_part_of_it_and_its_connection_is_not_used_again(
    whole: bytes, behind: bytes
) -> None:
    """RFC 9112, section 6.3: what a client did not ask for is not to be taken for an answer."""
    assert outcome_of(whole + behind) == (Outcome.OK, "", 4, False)
    assert outcome_of(whole[:-1], whole[-1:] + behind) == (Outcome.OK, "", 4, False)
    assert outcome_of(whole, behind) == (Outcome.OK, "", 4, False)
    assert outcome_of(whole + b"\r\n") == (Outcome.OK, "", 4, True)


@pytest.mark.parametrize("interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"])
def test_a_connection_with_no_more_than_an_interim_response_is_not_used_again(interim: bytes) -> None:
    outcome, message, _, kept = outcome_of(interim)
    assert (outcome, kept) == (Outcome.CONNECTION_LOST, False)
    assert "in the middle of the response" in message
    assert outcome_of(interim, TOLD + LAST) == (Outcome.OK, "", 4, True)


def test_a_connection_that_waits_for_more_than_an_interim_response_is_not_used_again(emitter: Emitter) -> None:
    late = Answer([(0, b"HTTP/1.1 100 Continue\r\n\r\n"), (300, TOLD + LAST)], framing=RAW)
    server = emitter.serve([late, Answer([(0, WHOLE)])])
    pool = Pool(origin_of(server.url)[0])
    client = Client(pool, Timeouts(first_token_s=0.1))
    assert streamed(client).outcome is Outcome.FIRST_TOKEN_TIMEOUT
    client.timeouts = Timeouts()
    assert streamed(client).output_tokens == 4
    pool.close()
    assert [reply.connection for reply in server.replies(2)] == [0, 1]


def test_what_comes_while_nothing_is_asked_for_is_not_gathered(emitter: Emitter) -> None:
    """It would keep sweeps of the hub from being whole, and windows from being sealed, for as long as it lay there."""
    pieces = [(0, TOLD + LAST), *[(50, b"x" * READ)] * 160]
    server = emitter.serve([Answer(pieces, framing=RAW, ending=CLOSE), Answer([(0, WHOLE)])])
    pool = Pool(origin_of(server.url)[0])
    client = Client(pool, Timeouts())
    assert streamed(client).outcome is Outcome.OK
    (kept,) = pool._idle
    gevent.sleep(0.5)
    assert (kept.idle, hub().full) == (False, 0)
    assert kept._queued <= READ
    following = streamed(client)
    pool.close()
    assert (following.outcome, following.output_tokens) == (Outcome.OK, 4)


@pytest.mark.parametrize("broken", [b"zz\r\n", b"-1\r\n", b"\r\n", b"5\r\nabcdefgh"])
@pytest.mark.parametrize("apart", [False, True])
def test_tokens_that_come_together_with_broken_http_count(broken: bytes, *, apart: bool) -> None:
    events = b"".join(framed(piece) for _, piece in REF[:3])
    timeline, wire = ask([HEAD, events, broken] if apart else [HEAD + events + broken])
    assert (timeline.outcome, timeline.status, timeline.events, wire.closed) == (Outcome.MALFORMED, 200, 2, True)


RECORDS = [
    pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", id="plain HTTP"),
    pytest.param(b"\x15\x03\x03\x00\x02\x02\x28", id="alert"),
    pytest.param(b"\x17\x03\x03\x00\x10" + b"x" * 16, id="wrong keys"),
    pytest.param(b"\x17\x03\x03\xff\xff" + b"x" * READ, id="long record"),
    pytest.param((b"\x17\x03\x03\x40\x00" + b"x" * 16_384) * 100, id="many records"),
    pytest.param(b"\xff" * MB, id="bytes"),
]


@pytest.mark.parametrize("record", RECORDS)
def test_what_is_no_tls_in_the_middle_of_an_answer_is_a_lost_connection(record: bytes, pem: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            tls = context.wrap_socket(listener.accept()[0], server_side=True)
            with tls, socket.socket(fileno=os.dup(tls.fileno())) as plain, suppress(OSError):
                tls.recv(READ)
                tls.sendall(HEAD + framed(token("a")))
                time.sleep(0.2)  # what comes in one read with what is no TLS is lost with it
                plain.sendall(record)
                plain.shutdown(socket.SHUT_WR)

        serving = threading.Thread(target=answer)
        serving.start()
        pool = Pool(origin_of(f"https://127.0.0.1:{listener.getsockname()[1]}", insecure=True)[0])
        timeline = streamed(Client(pool, Timeouts(first_token_s=5, idle_s=5)))
        serving.join()
    assert (timeline.outcome, timeline.events) == (Outcome.CONNECTION_LOST, 1)
    assert timeline.message.startswith("[")
    assert not pool._idle


# Compression


def squeezed(*bodies: bytes, wbits: int = 31) -> bytes:
    return b"".join(zlib.compress(body, wbits=wbits) for body in bodies)


def bomb(unit: bytes, size: int) -> bytes:
    press = zlib.compressobj(wbits=31)
    block = unit * (MB // len(unit))
    return b"".join([press.compress(block) for _ in range(size // MB)]) + press.flush()


@pytest.mark.parametrize(
    "unit",
    [
        b": %b\n\n" % (b"x" * 50),
        pytest.param(b"\n", marks=pytest.mark.long),
        pytest.param(b"data:\n\n", marks=pytest.mark.long),
        pytest.param(b"data: {}\n\n", marks=pytest.mark.long),
        b"data: {}\n",
        bytes(token("a")),
        b"x" * 1000 + b"\n",
    ],
)
def test_a_bomb_is_malformed_in_bounded_memory(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_INFLATED_FREELY_BYTES", MB)
    squeezed_size = 4 * KB
    pieces = cut(bomb(unit, 16 * MB), range(squeezed_size, 16 * MB // 100, squeezed_size))
    with bounded(8 * MB, cpu_s=60):
        timeline, wire = ask([GZIP, framed(squeezed(b":\n\n")), *map(framed, filter(None, pieces)), LAST])
    assert (timeline.outcome, wire.closed) == (Outcome.MALFORMED, True)
    assert re.search("bytes out of .* that were compressed", timeline.message)


@pytest.mark.long
def test_a_bomb_without_a_line_end_is_malformed_in_bounded_memory() -> None:
    with bounded(sse.EVENT_BYTES + 4 * MB):
        timeline, wire = ask([GZIP, framed(squeezed(b"data: ")), *map(framed, reads_of(bomb(b"y", GB))), LAST])
    assert (timeline.outcome, timeline.message) == (Outcome.MALFORMED, "an event of more than 16,777,216 bytes")
    assert wire.closed


def test_a_bomb_in_the_body_of_an_error_is_not_blown_up() -> None:
    head = GZIP.replace(b"200 OK", b"500 Oops")
    error = json.dumps({"error": {"message": "engine stopped"}, "padding": "y" * 70_000}).encode()
    with bounded(4 * MB):
        timeline, wire = ask([head, *map(framed, reads_of(bomb(b"y", 256 * MB))), LAST])
        assert (timeline.outcome, timeline.message, wire.closed) == (Outcome.HTTP_5XX, "y" * 200, False)
        assert outcome_of(head, framed(squeezed(error[:60_000])), LAST)[1].startswith(
            '{"error": {"message": "engine st'
        )


def test_case_33_members_that_follow_each_other_are_one_body() -> None:
    """RFC 1952, section 2.2."""
    points = (1, 100, 400, 400)
    members = [squeezed(part) for part in cut(WHOLE, points)]
    for pieces in (members, [b"".join(members)], cut(b"".join(members), range(1, len(b"".join(members))))):
        assert outcome_of(GZIP, *map(framed, filter(None, pieces)), LAST) == (Outcome.OK, "", 4, True)


@pytest.mark.parametrize("behind", [b"garbage", b"\x00" * 8, WHOLE, squeezed(WHOLE)[:5] + b"\xff" * 20])
def test_what_follows_a_compressed_body_and_is_none_is_malformed(behind: bytes) -> None:
    outcome, message, events, _ = outcome_of(GZIP, framed(squeezed(WHOLE) + behind), LAST)
    assert (outcome, events) == (Outcome.MALFORMED, 4)
    assert "decompress" in message


def test_a_compressed_body_that_lacks_its_end_is_what_its_events_say() -> None:
    assert outcome_of(GZIP, framed(squeezed(WHOLE)[:-8]), LAST)[:3] == (Outcome.OK, "", 4)
    cut_off = zlib.compressobj(wbits=31)
    begun = cut_off.compress(b"".join(piece for _, piece in REF[:3])) + cut_off.flush(zlib.Z_SYNC_FLUSH)
    assert outcome_of(GZIP, framed(begun), LAST)[0::2] == (Outcome.TRUNCATED, 2)


@pytest.mark.parametrize(("wbits", "outcome"), [(15, Outcome.OK), (-15, Outcome.MALFORMED)])
def test_deflate_is_that_of_zlib(wbits: int, outcome: Outcome) -> None:
    """RFC 9110, section 8.4.1.2; the other one is sent by mistake, and no server of this dialect is known to do so."""
    head = GZIP.replace(b"gzip", b"deflate")
    assert outcome_of(head, framed(squeezed(WHOLE, wbits=wbits)), LAST)[0] is outcome


def test_events_that_are_alike_may_shrink_as_far_as_they_do() -> None:
    many = bytes(token("a")) * 100_000
    timeline, _ = ask([GZIP, *map(framed, reads_of(squeezed(many + FINISH + DONE))), LAST])
    assert (timeline.outcome, timeline.events) == (Outcome.OK, 100_000)


def test_others_have_their_turn_while_a_body_is_inflated_and_know_that_it_is_not_parsed() -> None:
    pool = hostile.Wires([GZIP, framed(squeezed(bytes(token("a")) * 20_000 + FINISH + DONE)), LAST], lambda: None)
    seen: list[int | None] = []

    def look() -> None:
        while True:
            seen.append(pool.wire.in_hand_ns)
            gevent.sleep(0)

    looking = gevent.spawn(look)
    timeline, seen_then = streamed(Client(pool, Timeouts())), seen[:]
    looking.kill()
    assert timeline.events == 20_000
    assert len(seen_then) > 10
    assert set(seen_then) == {timeline.first_ns}
    assert pool.wire.in_hand_ns is None


# Numbers


ABSURD = ["-1", "-5", str(2**31), str(2**63), str(2**64), str(2**70), "1e308", "7.5", "true", '"7"', "[7]", "{}"]


@pytest.mark.parametrize("number", ABSURD)
@pytest.mark.parametrize(
    "place",
    [
        '{"choices":[],"usage":{"completion_tokens":%s}}',
        '{"choices":[],"usage":{"prompt_tokens":%s}}',
        '{"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":%s}}}',
        '{"choices":[{"index":%s,"text":"a"}]}',
    ],
)
def test_what_is_no_number_of_tokens_and_no_choice_is_malformed_and_counts_nowhere(number: str, place: str) -> None:
    answer = TOLD.replace(DONE, b"")
    story = [hostile.Request([HEAD + framed(WHOLE.replace(DONE, data(place % number)) + DONE) + LAST], [answer + LAST])]
    timeline, wire = ask(story[0].reads)
    hostile.check(timeline, wire)
    assert (timeline.outcome, timeline.events) == (Outcome.MALFORMED, 4)
    assert timeline.message.startswith("Expected `int")
    assert re.search(r"`\$\.(usage|choices)", timeline.message)


@pytest.mark.parametrize("number", [1, 7, 2**31 - 1])
def test_any_number_of_tokens_that_a_count_can_be_is_reported(number: int) -> None:
    told = f'{{"choices":[],"usage":{{"prompt_tokens":{number},"completion_tokens":{number},'
    told += f'"prompt_tokens_details":{{"cached_tokens":{number}}}}}}}'
    reads = [HEAD + framed(WHOLE.replace(DONE, data(told)) + DONE) + LAST]
    story = [hostile.Request(reads, reads)] * 50
    timelines = hostile.live(story)
    assert {(t.outcome, t.output_tokens, t.input_tokens, t.cached_tokens) for t in timelines} == {
        (Outcome.OK, number, number, number)
    }


def test_counts_that_fall_leave_no_number_below_zero() -> None:
    counts = [5, 3, 0, 2**31 - 1, 1]
    events = b"".join(
        chunk('[{"index":0,"text":"a"}]', f',"usage":{{"completion_tokens":{count}}}') for count in counts
    )
    reads = [HEAD, framed(events + FINISH + usage(7, 2) + DONE) + LAST]
    (timeline,) = hostile.live([hostile.Request(reads, reads)])
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, 2)


def test_token_ids_without_an_end_are_malformed() -> None:
    ids = data('{"choices":[{"index":0,"text":"a","token_ids":[%s0]}]}' % ("0," * 5_000_000))
    assert len(ids) < sse.EVENT_BYTES
    with bounded(150 * MB):
        timeline, _ = ask([HEAD, *map(framed, reads_of(ids)), LAST])
    assert (timeline.outcome, timeline.events) == (Outcome.MALFORMED, 0)
    assert timeline.message.startswith("an event of more than 1,048,576 values: ")


# Choices


def test_a_million_choices_in_an_event_are_malformed() -> None:
    million = data('{"choices":[%s{"text":"a"}]}' % ('{"text":"a"},' * 999_999))
    assert len(million) < sse.EVENT_BYTES
    with bounded(150 * MB):
        timeline, wire = ask([HEAD, *map(framed, reads_of(million)), LAST])
    assert (timeline.outcome, timeline.events, wire.closed) == (Outcome.MALFORMED, 0, True)


@pytest.mark.parametrize("said", ['"text":"a"', '"finish_reason":"%s"' % ("x" * 2_000), '"delta":{"content":"a"}'])
def test_a_million_choices_one_by_one_are_malformed_and_a_thousand_are_not(said: str) -> None:
    events = [framed(data(f'{{"choices":[{{"index":{index},{said}}}]}}')) for index in range(api.CHOICES)]
    with bounded(8 * MB):
        assert ask([HEAD, *events, LAST])[0].outcome in (Outcome.TRUNCATED, Outcome.EMPTY)
        timeline, _ = ask([HEAD, *events, framed(data(f'{{"choices":[{{"index":1024,{said}}}]}}')), LAST])
    assert timeline.outcome is Outcome.MALFORMED
    assert timeline.message.startswith("Expected `int` <= 1023 - at `$.choices[0].index`")


def test_more_choices_than_there_may_be_in_one_event_are_malformed() -> None:
    many = data('{"choices":[%s{"text":"a"}]}' % ('{"text":"a"},' * api.CHOICES))
    assert outcome_of(HEAD + framed(many) + LAST)[:2] == (
        Outcome.MALFORMED,
        "Expected `array` of length <= 1024 - at `$.choices`: "
        + repr('{"choices":[' + '{"text":"a"},' * 20)[
            : 200 - len("Expected `array` of length <= 1024 - at `$.choices`: ")
        ][:121]
        + "'",
    )


# Texts

EVIL = (
    "\x1b[31m\x9b2J\x07\x00\x7f\u202etxt\u2066\u200b\ufeff\r\n\u2028\u0085"
    "</script><img src=x onerror=alert(1)>\t=cmd|'/C calc'!A0,\"\\"
)


def evil(length: int = 0) -> str:
    return json.dumps(EVIL + "x" * length)[1:-1]


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param([HEAD + framed(data(f'{{"error":{{"message":"{evil()}"}}}}')) + LAST], id="error"),
        pytest.param([HEAD + framed(data(f'{{"error":"{evil(10 * MB)}"}}')) + LAST], id="long error"),
        pytest.param(
            [HEAD + framed(b"event: error\n" + data(EVIL.replace("\r", "").replace("\n", ""))) + LAST], id="event"
        ),
        pytest.param([HEAD + framed(data(EVIL.replace("\r", "").replace("\n", ""))) + LAST], id="no JSON"),
        pytest.param([HEAD + framed(data(f'{{"choices":[{{"{evil()}":1,"index":"x"}}]}}')) + LAST], id="key"),
        pytest.param([HEAD + framed(EVIL.encode()) + LAST], id="page"),
        pytest.param([b"HTTP/1.1 500 \x1b[31m\r\n\r\n" + EVIL.encode()], id="status"),
        pytest.param([b"HTTP/1.1 400 Bad\r\n\r\n" + json.dumps({"detail": EVIL}).encode()], id="body"),
        pytest.param([b"HTTP/1.1 400 Bad\r\n\r\n" + b"\xff\xfe\xed\xa0\x80" + EVIL.encode("utf-16")], id="bytes"),
        pytest.param([HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: \x9b31m\xff\r\n\r\n")], id="header"),
    ],
)
def test_a_message_is_one_short_line_without_anything_to_obey(reads: list[bytes]) -> None:
    (timeline,) = hostile.live([hostile.Request(reads_of(*reads), reads)])
    assert timeline.outcome is not Outcome.OK
    assert 0 < len(timeline.message) <= 200
    assert timeline.message.isprintable()


def test_a_finish_reason_is_short_and_counted_under_a_name_of_ours() -> None:
    for reason in (evil(), evil(100_000), "x" * 50, "a\\u0301" * 50, "stop"):
        told = data(f'{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"{reason}"}}]}}')
        reads = [HEAD + framed(token("a") + told + DONE) + LAST]
        (timeline,) = hostile.live([hostile.Request(reads_of(*reads), reads)])
        assert timeline.outcome is Outcome.OK
        assert len(timeline.finish_reasons[0]) <= 40


@pytest.mark.parametrize("depth", [100, 900, 1_100, 100_000])
@pytest.mark.parametrize(
    "place",
    [
        '{"x":%s}',
        '{"error":%s}',
        '{"object":%s}',
        '{"choices":[{"x":%s}]}',
        '{"choices":[{"delta":{"content":%s}}]}',
        "%s",
    ],
)
def test_json_may_be_nested_without_measure(depth: int, place: str) -> None:
    for deep in ("[" * depth + "]" * depth, '{"error":' * depth + "1" + "}" * depth, "[" * depth):
        for event in (data(place % deep), b"event: error\n" + data(place % deep)):
            reads = [HEAD + framed(event) + LAST]
            hostile.live([hostile.Request(reads, reads)], read=False)
        reads = [b"HTTP/1.1 500 Oops\r\n\r\n" + (place % deep).encode()]
        hostile.live([hostile.Request(reads, reads)], read=False)


def test_a_number_that_no_decoder_takes_is_passed_over_where_nobody_asks_for_it() -> None:
    for event in (
        '{"object":1e999}',
        '{"choices":[{"index":0,"text":"a","x":1e999}]}',
        '{"created":%s}' % ("9" * 5000),
    ):
        assert outcome_of(HEAD + framed(data(event) + WHOLE) + LAST)[0] is Outcome.OK


def test_the_limits_are_those_that_the_docs_tell() -> None:
    told = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    _, _, limits = told.partition("Whatever a server sends is taken in bounded memory")
    numbers = [
        int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", limits.partition("What follows an")[0])
    ]
    assert numbers == [
        *(sse.EVENT_BYTES, api._VALUES, response.FRAME_BYTES, api.CHOICES - 1, 2**31 - 1),
        *(body._INFLATED_FREELY_BYTES, body._INFLATION),
    ]
    assert api._VALUES == api._LARGE


# Real sockets, in a process of its own

VICTIM = """
import json, resource, sys, time
import gevent
from vllm_locust.client import Client
from vllm_locust.origin import origin_of
from vllm_locust.recorder import Recorder
from vllm_locust.recording import encode_report
from vllm_locust.timeline import Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

recorder = Recorder("run", 0, "worker", 1_000_000_000, time.monotonic_ns())
client = Client(Pool(origin_of(sys.argv[1])[0]), Timeouts(**json.loads(sys.argv[2])))
peaks, said = [], []

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def tick():
    while True:
        gevent.sleep(0.05)
        now_ns = time.monotonic_ns()
        recorder.tick(now_ns, swept_ns=now_ns, unparsed_ns=client.oldest_unparsed_ns, users=1, away_ns=0)
        report = recorder.report(now_ns)
        encode_report(report)
        recorder.acknowledge(report.seq)
        peaks.append(peak())

before = peak()
gevent.spawn(tick)
for _ in range(2):
    timeline = Timeline("request-1", "short", "chat", time.monotonic_ns())
    recorder.begin(timeline)
    client.stream(timeline, b"{}")
    recorder.end(timeline)
    said.append([timeline.outcome, timeline.message, timeline.events, timeline.response_bytes])
print(json.dumps({"said": said, "grown": peak() - before, "peaks": peaks}))
"""


def victim(url: str, **timeouts: float) -> dict[str, Any]:
    """Send two requests from a process of its own, and return what became of them and of its memory."""
    command = [sys.executable, "-c", VICTIM, url, json.dumps(timeouts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def flood(piece: bytes, size: int) -> list[tuple[float, bytes]]:
    return [(0, piece)] * (size // len(piece))


FLOODS = {
    "body without a line end": Answer([(0, b"data: "), *flood(b"y" * READ, GB)]),
    "header": Answer([(0, b"HTTP/1.1 200 OK\r\nX: "), *flood(b"y" * READ, 100 * MB)], framing=RAW),
    "interim responses": Answer(flood(b"HTTP/1.1 102 Wait\r\n\r\n" * 3000, 100 * MB), framing=RAW),
    "choices": Answer([(0, b'data: {"choices":['), *flood(b"{}," * 20_000, GB)]),
    "bomb": Answer(
        flood(squeezed((b": " + b"x" * 1_000 + b"\n\n") * 60_000), 10 * MB), headers=("Content-Encoding: gzip",)
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_takes_bounded_memory_and_the_next_request_works(emitter: Emitter, name: str) -> None:
    server = emitter.serve([FLOODS[name], Answer([(0, WHOLE)])])
    seen = victim(server.url)
    (outcome, message, _, size), following = seen["said"]
    assert (outcome, following[:3]) == ("malformed", ["ok", "", 4]), message
    assert size < 40 * MB
    assert seen["grown"] < 150 * MB


@pytest.mark.long
def test_a_flood_of_tokens_takes_no_more_memory_the_longer_it_lasts(emitter: Emitter) -> None:
    events = bytes(token("a")) * 500
    server = emitter.serve([Answer([*flood(events, 60 * MB), (0, FINISH + DONE)]), Answer([(0, WHOLE)])])
    seen = victim(server.url)
    (outcome, _, number, _), following = seen["said"]
    assert (outcome, following[:3]) == ("ok", ["ok", "", 4])
    assert number == 500 * (60 * MB // len(events))
    early, late = seen["peaks"][len(seen["peaks"]) // 4], seen["peaks"][-1]
    assert late - early < 20 * MB


def test_a_flood_that_says_nothing_ends_at_the_limit_of_the_first_token(emitter: Emitter) -> None:
    noise = b"".join(b": %b\n\n" % (b"%x" % Random(seed).getrandbits(400)) for seed in range(600))
    for answer in (
        Answer(flood(noise, GB)),
        Answer(flood(squeezed(noise + b": " + b"x" * 2_000_000 + b"\n\n"), GB), headers=("Content-Encoding: gzip",)),
    ):
        server = emitter.serve([answer, Answer([(0, WHOLE)])])
        seen = victim(server.url, first_token_s=1)
        (outcome, _, number, _), following = seen["said"]
        assert (outcome, number, following[:3]) == ("first_token_timeout", 0, ["ok", "", 4])
        assert seen["grown"] < 150 * MB
