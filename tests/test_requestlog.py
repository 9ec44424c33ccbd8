"""The log of all requests: a row for each, in every set-up, whatever became of it; and nothing in it that is secret."""

import csv
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
from emitter import (
    DONE,
    FINISH,
    REF,
    ROLE,
    SILENCE,
    Answer,
    Emitter,
    delta,
    finish,
    reasoning,
    script,
    token,
)
from hypothesis import given
from hypothesis import strategies as st
from processes import (
    MIXED,
    Browser,
    Cluster,
    assert_clean,
    cluster,
    forked,
    free_port,
    headless,
    locust,
    process,
    saved,
    served,
    simulator,
    wait_for,
)

from vllm_locust import __version__, answer, download, requestlog
from vllm_locust.download import Downloads
from vllm_locust.generator import Generator, Request
from vllm_locust.recording import Report
from vllm_locust.requestlog import COLUMNS, MOST_BYTES, PIECE_BYTES, TEXTS, RequestLog, Row, cell
from vllm_locust.run import Finish, Settings, Start, encode_scenarios
from vllm_locust.spool import Spool
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.transport import Pool

FAST = ("--ttft", "20ms", "--itl", "2ms")
SECRET = "sk-most-secret-of-all"
MARKER = "xylophone"
"""A word that no scenario and no simulated answer has."""


LOGS: list[RequestLog] = []
"""Those of the test; what nobody fetches is closed after it."""
POOLS: list[Pool] = []
"""The same of connections."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for kept in (LOGS, POOLS):
        while kept:
            kept.pop().close()


# In this process: a generator, as a worker has it, and its log


class Sending:
    """A generator in a run, whose log is read as a master would."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.generator = Generator()
        self.start = Start(
            version=__version__,
            run="run-1",
            epoch=0,
            age_ns=0,
            run_age_ns=0,
            worker="worker 1 (here)",
            rank=0,
            ranks=1,
            settings=Settings(target=url, model="m", request_log=True, **settings),
            scenario_hash="",
            scenarios=encode_scenarios({}),
        )
        self.generator.begin(self.start, lambda _: None)
        assert self.generator._client is not None
        POOLS.append(self.generator._client.pool)

    def ask(self, body: dict[str, Any], request_id: str = "id-1", endpoint: str = "chat") -> Timeline:
        request = Request(user_class="Mine", endpoint=endpoint, scenario="short", body=body, request_id=request_id)
        return self.generator.stream(request, lambda _: None)

    def end(self, stop_timeout_s: float = 5) -> tuple[list[dict[str, Any]], Report]:
        report = self.generator.finish(Finish(run="run-1", windows=1, stop_timeout_s=stop_timeout_s))
        assert self.generator.log is not None
        return [json.loads(line) for line in read(self.generator.log).splitlines()], report


def read(log: RequestLog) -> bytes:
    """Ask a log for all of it, piece by piece."""
    data = b""
    while True:
        piece = log.piece(len(data))
        assert len(piece["data"]) <= PIECE_BYTES
        data += piece["data"]
        if piece["size"] == len(data):
            assert log.piece(len(data))["data"] == b""
            assert log.delivered
            return data


def hello(text: str = "hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_row_has_the_instants_and_the_numbers_of_its_request(emitter: Emitter) -> None:
    server = emitter.serve(Answer(script(*REF)))
    sending = Sending(server.url)
    began_ns = time.monotonic_ns()
    timeline = sending.ask(hello())
    (row,), _ = sending.end()
    (reply,) = server.replies()
    sent_s = [(before_ns - began_ns) / 1e9 for before_ns, _ in reply.sent]
    # The run began a moment before `began_ns`, and a segment without a stamp is late by what the machine makes of it.
    assert 0 < row["called_s"] <= row["sent_s"] < sent_s[1] + 3
    assert sent_s[1] - 0.01 <= row["first_token_s"] < sent_s[1] + 3
    assert sent_s[4] - 0.01 <= row["last_token_s"] <= row["done_s"]
    assert row["ttft_s"] == pytest.approx(row["first_token_s"] - row["sent_s"], abs=1e-8)
    assert row["e2el_s"] == pytest.approx(row["last_token_s"] - row["sent_s"], abs=1e-8)
    assert row["ttft_s"] == (timeline.ttft_ns or 0) / 1e9
    assert 0 < row["itl_max_s"] <= row["e2el_s"] - row["ttft_s"]
    assert row["connect_s"] > 0
    rest = {name: row[name] for name in COLUMNS if not name.endswith("_s")}
    assert rest == {
        "request_id": "id-1",
        "scenario": "short",
        "endpoint": "chat",
        "user_class": "Mine",
        "worker": "worker 1 (here)",
        "epoch": 0,
        "phase": "steady",
        "stage": 0,
        "attempt": 0,
        "input_tokens": 7,
        "output_tokens": 4,
        "cached_tokens": None,
        "token_events": 4,
        "estimated": False,
        "finish_reason": "stop",
        "outcome": "ok",
        "status": 200,
        "message": None,
        "in_flight": 1,
        "reconnects": 0,
    }
    assert list(row) == list(COLUMNS)
    assert row["scheduled_s"] is None


def test_a_request_that_failed_has_a_row_with_its_message_and_nulls_where_nothing_was(emitter: Emitter) -> None:
    server = emitter.serve(Answer([(0, b'{"error": {"message": "no such\\nmodel"}}')], status="404 Not Found"))
    sending = Sending(server.url)
    sending.ask(hello())
    gone = Sending("http://127.0.0.1:9")
    gone.ask(hello())
    (row,), _ = sending.end()
    (refused,), _ = gone.end()
    assert (row["outcome"], row["status"], row["message"]) == ("http_4xx", 404, "no such model")
    absent = ("scheduled_s", "first_token_s", "last_token_s", "ttft_s", "e2el_s", "itl_max_s", "input_tokens")
    assert [row[name] for name in (*absent, "finish_reason")] == [None] * 8
    assert (row["output_tokens"], row["estimated"]) == (0, False)
    assert (refused["outcome"], refused["sent_s"], refused["status"]) == ("connect_failed", None, None)


def test_requests_that_the_end_cuts_and_those_of_before_a_reset_are_in_it_once(emitter: Emitter) -> None:
    slow = Answer(script((1, ROLE), (20, token("a")), (2000, token("b")), (2010, token("c"))), ending=SILENCE)
    server = emitter.serve(slow)
    sending = Sending(server.url)
    asking = [gevent.spawn(sending.ask, hello(), "before")]
    wait_for(lambda: gevent.sleep(0.01) or sending.generator.recorder.in_flight, "request")  # type: ignore[union-attr]
    while not sending.generator.tick(1).windows[0].cells:
        gevent.sleep(0.02)
    sending.generator.new_epoch(sending.start, 1, 1_000_000)
    asking.append(gevent.spawn(sending.ask, hello(), "after"))
    (reply, *_) = server.replies(0)
    while len(reply.sent) < 4:
        gevent.sleep(0.02)
        (reply, *_) = server.replies(0)
    gevent.sleep(0.05)
    rows, _ = sending.end(stop_timeout_s=0)
    gevent.joinall(asking)
    found = {row["request_id"]: row for row in rows}
    assert len(rows) == 2
    assert {name: (row["epoch"], row["outcome"]) for name, row in found.items()} == {
        "before": (0, "cancelled"),
        "after": (1, "cancelled"),
    }
    # Nobody harvests what came after the reset, and yet the longest gap is of all.
    assert found["before"]["itl_max_s"] == pytest.approx((reply.sent[2][0] - reply.sent[1][0]) / 1e9, abs=0.1)
    assert found["before"]["token_events"] == 3


# Texts


def test_without_being_asked_for_no_text_is_kept_or_written(emitter: Emitter) -> None:
    sending = Sending(emitter.serve(Answer(script((1, ROLE), (2, token(MARKER)), (3, FINISH), (3, DONE)))).url)
    timeline = sending.ask(hello(MARKER))
    assert timeline.answer is None
    sending.generator.write_log()
    assert sending.generator.log is not None
    data = read(sending.generator.log)
    assert json.loads(data)["output_tokens"] == 1
    assert MARKER.encode() not in data


def test_texts_are_those_that_were_sent_and_received(emitter: Emitter) -> None:
    words = [f" w{i}" for i in range(200)]
    tokens = [(i, token(word)) for i, word in enumerate(words, 1)]
    pieces = script((0, ROLE), (0, reasoning("Hm")), (0, reasoning("m.")), *tokens, (300, FINISH), (300, DONE))
    server = emitter.serve(Answer(pieces))
    sending = Sending(server.url, log_text=True)
    asked = hello("Why?")
    sending.ask(asked)
    asked["messages"].append({"role": "assistant", "content": "who goes on with the same list"})
    sending.ask({"prompt": "Once upon"}, endpoint="completions")
    (row, other), _ = sending.end()
    assert row["prompt"] == [{"role": "user", "content": "Why?"}]
    assert (row["answer"], row["reasoning"], row["answer_truncated"]) == ("".join(words), "Hmm.", False)
    assert row["token_events"] == 202
    assert other["prompt"] == "Once upon"
    assert list(row) == [*COLUMNS, *TEXTS]


def test_several_choices_have_a_list_of_texts_and_their_reasons_joined(emitter: Emitter) -> None:
    pieces = [
        *((i, token(text, index=i % 2)) for i, text in enumerate(("a", "b", "c", "d"))),
        (5, finish("length", index=1)),
        (5, finish("stop", index=0)),
        (6, DONE),
    ]
    sending = Sending(emitter.serve(Answer(script(*pieces))).url, log_text=True)
    sending.ask({**hello(), "n": 2})
    (row,), _ = sending.end()
    assert (row["answer"], row["finish_reason"]) == (["ac", "bd"], "stop,length")
    assert row["reasoning"] is None


def test_texts_in_pieces_and_refusals_are_answers_and_tool_calls_have_none(emitter: Emitter) -> None:
    parts = delta('{"content":[{"type":"text","text":"in "},{"type":"text","text":"pieces"},7]}')
    call = delta('{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}')
    answers = [parts, delta('{"refusal":"No."}'), call]
    server = emitter.serve([Answer(script((1, piece), (2, FINISH), (2, DONE))) for piece in answers])
    sending = Sending(server.url, log_text=True)
    for _ in answers:
        sending.ask(hello())
    rows, _ = sending.end()
    assert [row["answer"] for row in rows] == ["in pieces", "No.", None]


def test_of_an_answer_without_end_so_much_is_kept_and_the_row_says_so() -> None:
    kept = answer.Answer()
    for choice in range(1000):
        kept.add(choice, "x" * 5_000, "y" * 5_000)
    assert kept.truncated
    assert sum(map(len, [*kept.content.values(), *kept.reasoning.values()])) == answer.KEPT_CHARACTERS
    many = answer.Answer()
    for choice in range(1000):
        many.add(choice, "x", "")
    assert (len(many.content), many.truncated) == (128, True)


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5), st.text(max_size=5))))
def test_an_answer_is_what_its_events_said(events: list[tuple[int, str, str]]) -> None:
    kept = answer.Answer()
    for event in events:
        kept.add(*event)
    for choice in range(3):
        assert kept.content.get(choice, "") == "".join(text for c, text, _ in events if c == choice)
        assert kept.reasoning.get(choice, "") == "".join(text for c, _, text in events if c == choice)
    assert not kept.truncated


def test_the_key_is_blotted_out_of_whatever_a_server_says(emitter: Emitter) -> None:
    refusal = json.dumps({"error": {"message": f"{'x' * 190} {SECRET} is no key"}}).encode()
    echo = script((1, token(f"your key is {SECRET[:5]}")), (2, token(SECRET[5:])), (3, finish(SECRET)), (3, DONE))
    server = emitter.serve([Answer([(0, refusal)], status="401 Unauthorized"), Answer(echo)])
    sending = Sending(server.url, log_text=True, api_key=SECRET)
    timeline = sending.ask(hello())
    sending.ask(hello())
    assert SECRET not in repr(timeline)
    (refused, echoed), report = sending.end()
    assert refused["message"] == f"{'x' * 190} *** is no"
    assert (echoed["answer"], echoed["finish_reason"]) == ("your key is ***", "***")
    assert [failure.message for failure in report.failures] == [refused["message"]]
    assert f"Bearer {SECRET}".encode() in server.replies(2)[0].request


# Room


def log_with_room(worker: str = "w", most_bytes: int = MOST_BYTES) -> RequestLog:
    LOGS.append(RequestLog(worker, 0, most_bytes=most_bytes))
    return LOGS[-1]


def ended(number: int) -> Timeline:
    timeline = Timeline(f"id-{number}", "short", "chat", 1000 + number)
    timeline.end(Outcome.CANCELLED, 2000 + number)
    return timeline


def logged(log: RequestLog, count: int) -> None:
    for number in range(count):
        log.add(ended(number), 0, {})
    for _ in log.slices():
        pass


def test_a_log_without_room_keeps_the_first_rows_and_counts_the_others() -> None:
    log = log_with_room(most_bytes=10_000)
    logged(log, 120)
    logged(log, 1)
    lines = read(log).splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == [f"id-{i}" for i in range(len(lines))]
    assert 10_000 - 600 < sum(map(len, lines)) + len(lines) <= 10_000
    piece = log.piece(0)
    assert (piece["left_out"], piece["trouble"]) == (121 - len(lines), "beyond 0.01 MB")


def test_a_long_log_comes_in_pieces() -> None:
    log = log_with_room()
    logged(log, 2000)
    assert [json.loads(line)["request_id"] for line in read(log).splitlines()] == [f"id-{i}" for i in range(2000)]


def test_a_disk_that_takes_nothing_is_no_reason_to_fail_but_counted(tmp_path: Path) -> None:
    kept = Spool(tmp_path / "nowhere")
    kept.append(b"one\ntwo\n")
    kept.append(b"three\n")
    kept.settle()
    assert (kept.size, kept.left_out, kept.trouble) == (0, 3, "No such file or directory")
    assert list(kept.lines()) == []


@given(st.lists(st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"") + b"\n"))), st.integers(0, 60))
def test_a_spool_holds_the_first_lines_that_fit(batches: list[list[bytes]], most_bytes: int) -> None:
    fit: list[bytes] = []
    for line in (line for batch in batches for line in batch):
        if sum(map(len, fit)) + len(line) > most_bytes:
            break
        fit.append(line)
    kept = Spool(most_bytes=most_bytes)
    for batch in batches:
        kept.append(b"".join(batch))
        kept.settle()
    assert list(kept.lines()) == fit
    assert (kept.size, kept.left_out) == (sum(map(len, fit)), sum(map(len, batches)) - len(fit))
    assert kept.read(1, 3) == b"".join(fit)[1:4]
    kept.close()


# On the way to the master


class Workers:
    """Workers whose answers may be lost, or come twice, or late."""

    def __init__(self, tmp_path: Path, logs: dict[str, RequestLog], patience_s: float = 0.5) -> None:
        self.logs = logs
        self.downloads = Downloads("request log", tmp_path, patience_s, self._ask, lambda client: client in self.gone)
        self.gone: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        self.answer: Callable[[str, dict[str, Any]], None] = self.downloads.take
        for client in logs:
            self.downloads.expect(client, f"worker {client}")

    def _ask(self, client: str, offset: int) -> None:
        self.asked.append((client, offset))
        self.answer(client, self.logs[client].piece(offset))

    def fetch(self, *clients: str) -> list[bytes]:
        for client in clients or self.logs:
            self.downloads.fetch(client)
        self.downloads.wait()
        lines = list(self.downloads.lines())
        self.downloads.close()
        return lines


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is asked for again at once."""
    monkeypatch.setattr(download, "_AGAIN_S", 0.02)
    monkeypatch.setattr(requestlog, "PIECE_BYTES", 1000)


@pytest.mark.usefixtures("at_once")
def test_what_is_lost_is_asked_for_again_and_what_comes_twice_or_late_counts_once(tmp_path: Path) -> None:
    logs = {client: log_with_room(client) for client in "ab"}
    for log in logs.values():
        logged(log, 30)
    workers = Workers(tmp_path, logs)
    heard: list[tuple[str, dict[str, Any]]] = []

    def unreliable(client: str, piece: dict[str, Any]) -> None:
        heard.append((client, piece))
        match len(heard) % 3:
            case 0:  # lost
                pass
            case 1:
                gevent.spawn_later(0.01, workers.downloads.take, client, piece)
            case 2:
                workers.downloads.take(client, piece)
                workers.downloads.take(client, piece)
                workers.downloads.take(*heard[0])

    workers.answer = unreliable
    rows = [json.loads(line) for line in workers.fetch()]
    assert [(row["worker"], row["request_id"]) for row in rows] == [(w, f"id-{i}") for w in "ab" for i in range(30)]
    assert len(workers.asked) > len(set(workers.asked))
    assert workers.downloads.remarks == []


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_falls_silent_is_given_up_and_what_is_missing_is_said(tmp_path: Path) -> None:
    logs = {client: log_with_room(client, most) for client, most in (("a", 5_000), ("b", 10**6), ("c", 10**6))}
    for log in logs.values():
        logged(log, 30)
    workers = Workers(tmp_path, logs)
    pieces: Counter[str] = Counter()

    def falls_silent(client: str, piece: dict[str, Any]) -> None:
        pieces[client] += 1
        if client == "a" or pieces[client] <= 4:
            workers.downloads.take(client, piece)

    workers.answer = falls_silent
    began = time.monotonic()
    rows = [json.loads(line) for line in workers.fetch("a", "b")]  # c was killed: it never finished
    assert time.monotonic() - began > 0.5
    number = Counter(row["worker"] for row in rows)
    assert 0 < number["b"] < 30
    assert workers.downloads.remarks == [
        f"request log: {30 - number['a']} requests of worker a are left out, beyond 0.005 MB",
        f"request log: of worker b there are but the first {number['b']} requests",
        "request log: the requests of worker c are missing",
    ]


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    workers = Workers(tmp_path, {"a": log_with_room("a")}, patience_s=60)
    workers.answer = lambda client, _: workers.gone.add(client)
    assert workers.fetch() == []
    assert workers.downloads.remarks == ["request log: the requests of worker a are missing"]


def test_a_master_without_room_says_so(tmp_path: Path) -> None:
    log = log_with_room("a")
    logged(log, 3)
    workers = Workers(tmp_path / "nowhere", {"a": log})
    assert workers.fetch() == []
    assert workers.downloads.remarks == [
        "request log: the requests of worker a are missing (No such file or directory)"
    ]


def test_a_log_without_rows_is_complete(tmp_path: Path) -> None:
    workers = Workers(tmp_path, {"a": log_with_room("a")})
    assert workers.fetch() == []
    assert workers.downloads.remarks == []
    assert workers.logs["a"].delivered


# CSV


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(TEXT, TEXT, TEXT, st.none() | st.lists(TEXT, max_size=3) | TEXT)
def test_a_file_of_csv_reads_back_as_its_rows(request_id: str, message: str, prompt: str, answered: Any) -> None:
    row = example(request_id=request_id, message=message or None, estimated=True)
    full = msgspec.structs.replace(row, prompt=prompt, answer=answered, reasoning=None, answer_truncated=False)
    file = io.BytesIO()
    requestlog.write([msgspec.json.encode(full) + b"\n"], file, "csv", texts=True)
    text = file.getvalue().decode()
    assert text.splitlines()[0] == ",".join([*COLUMNS, *TEXTS])
    assert text.count("\r\n") >= 2
    head, cells = csv.reader(io.StringIO(text, newline=""))
    found = dict(zip(head, cells, strict=True))
    assert found["request_id"].removeprefix("'" if request_id.startswith(FORMULA) else "") == request_id
    assert found["message"].removeprefix("'" if message.startswith(FORMULA) else "") == message
    assert not any(value.startswith(FORMULA) for name, value in found.items() if name != "called_s")
    assert (found["called_s"], float(found["sent_s"])) == ("-1e-06", 1.5)
    assert (found["estimated"], found["scheduled_s"], found["status"]) == ("true", "", "200")
    if isinstance(answered, list):
        assert json.loads(found["answer"]) == answered


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@pytest.mark.parametrize("begin", FORMULA)
def test_no_text_of_a_cell_is_a_formula_and_numbers_stay_numbers(begin: str) -> None:
    assert cell(f"{begin}cmd|' /C calc'!A0") == f"'{begin}cmd|' /C calc'!A0"
    assert cell(f"a{begin}b") == f"a{begin}b"
    row = example(message=f"{begin}1", called_s=-1.5, reconnects=-1)
    file = io.BytesIO()
    requestlog.write([msgspec.json.encode(row) + b"\n"], file, "csv", texts=False)
    _, cells = csv.reader(io.StringIO(file.getvalue().decode(), newline=""))
    found = dict(zip(COLUMNS, cells, strict=True))
    assert (found["message"], found["called_s"], found["reconnects"]) == (f"'{begin}1", "-1.5", "-1")


def example(**changed: Any) -> Row:
    row = Row(
        request_id="id-1",
        scenario="short",
        endpoint="chat",
        user_class="Mine",
        worker="local",
        epoch=0,
        phase="steady",
        stage=0,
        attempt=0,
        called_s=-0.000001,
        scheduled_s=None,
        sent_s=1.5,
        first_token_s=None,
        last_token_s=None,
        done_s=2.0,
        connect_s=None,
        ttft_s=None,
        e2el_s=None,
        itl_max_s=None,
        input_tokens=None,
        output_tokens=0,
        cached_tokens=None,
        token_events=0,
        estimated=False,
        finish_reason=None,
        outcome="ok",
        status=200,
        message=None,
        in_flight=1,
        reconnects=0,
    )
    return msgspec.structs.replace(row, **changed)


# Real processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, *FAST) as url:
        yield url


def scenario(folder: Path) -> str:
    """Write a scenario whose prompts have the marker in them; returns its path."""
    (folder / "p.jsonl").write_text(json.dumps({"prompt": f"What is a {MARKER}?"}) + "\n")
    path = folder / "marked.toml"
    path.write_text('[part.a]\nprompts = "p.jsonl"\nmax_tokens = 24\n[part.b]\nprompts = "p.jsonl"\nmax_tokens = 48\n')
    return str(path)


def log_of(run_file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, with the numbers of a CSV file as such."""
    (path,) = run_file.parent.glob("requests.*")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["output_tokens"], row["token_events"] = int(row["output_tokens"]), int(row["token_events"])
    return rows


def only_run(folder: Path) -> Path:
    (path,) = (folder / "results").glob("*/run.json")
    return path


def assert_whole(rows: list[dict[str, Any]], run_file: Path, requests: int) -> None:
    """As many rows as the server has had requests, and in sum what the run says."""
    total = json.loads(run_file.read_text())["summary"]["total"]
    assert len({row["request_id"] for row in rows}) == len(rows) == requests > 20
    assert Counter(row["outcome"] for row in rows) == {k: n for k, n in total["outcomes"].items() if n}
    assert sum(row["output_tokens"] for row in rows) == total["tokens"]["output_received"]
    assert sum(row["token_events"] for row in rows) == total["tokens"]["events"]
    assert len(list(run_file.parent.iterdir())) == 2  # nothing unfinished


def test_after_ctrl_c_a_single_process_has_logged_every_request_and_nothing_secret(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST, "--api-key", SECRET, "--stream-errors", "0.3") as url:
        arguments = headless(tmp_path, url, "-u", "6", "-r", "6", "--api-key", SECRET, "--scenario", scenario(tmp_path))
        environment = {**os.environ, "VLLM_LOCUST_REQUEST_LOG": "jsonl"}
        command = locust(*arguments, "--stop-timeout", "0")
        with process(command, tmp_path / "locust.log", cwd=tmp_path, env=environment) as running:
            wait_for(lambda: served(url)["completed"] > 40, "requests")
            running.interrupt()
            assert running.wait() == 3
            assert_clean(running)
            assert f"Requests  {only_run(tmp_path).with_name('requests.jsonl')}" in running.output
        counted = served(url)
    rows = log_of(only_run(tmp_path))
    ended = Counter(row["outcome"] for row in rows)
    assert ended.keys() == {"ok", "stream_error", "cancelled"}
    assert_whole(rows, only_run(tmp_path), ended.total())
    # What was cut may have been sent to its end, broken off, or not have come that far.
    uncut = ended.total() - ended["cancelled"]
    assert uncut <= counted["completed"] + counted["broken"] <= ended.total()
    for path in (tmp_path / "results").rglob("*.*"):
        assert SECRET not in path.read_text()
        assert MARKER not in path.read_text()


def test_after_ctrl_c_on_the_master_the_rows_of_all_workers_are_in_its_file(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "10", "-r", "10", "--request-log", "csv")
    with cluster(tmp_path, arguments) as running:
        wait_for(lambda: served(server)["completed"] > 40, "requests")
        running.master.interrupt()
        assert running.master.wait() == 0
        for worker in running.workers:
            worker.wait(20)
        assert_clean(running.master, *running.workers)
    rows = log_of(only_run(tmp_path))
    assert_whole(rows, only_run(tmp_path), served(server)["completed"])
    assert {row["worker"].partition(" (")[0] for row in rows} == {"worker 1", "worker 2"}
    assert list(rows[0]) == list(COLUMNS)


def test_after_ctrl_c_on_everyone_at_once_no_row_is_missing_and_texts_are_where_asked_for(
    tmp_path: Path, server: str
) -> None:
    """What a terminal does to `--processes`."""
    arguments = headless(tmp_path, server, "-u", "10", "-r", "10", *forked(2), "--request-log", "--log-text")
    command = locust(*arguments, "--scenario", scenario(tmp_path))
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: served(server)["completed"] > 40, "requests")
        os.killpg(running.popen.pid, signal.SIGINT)
        assert running.wait() == 0
        assert_clean(running)
    rows = log_of(only_run(tmp_path))
    assert_whole(rows, only_run(tmp_path), served(server)["completed"])
    asked = {row["prompt"] if row["endpoint"] == "completions" else row["prompt"][0]["content"] for row in rows}
    assert len(asked) == len(rows)  # each has a nonce
    assert all(text.endswith(f"What is a {MARKER}?") for text in asked)
    assert all(len(row["answer"].split()) > 10 for row in rows)
    assert MARKER not in only_run(tmp_path).read_text()


def test_a_killed_worker_is_named_and_one_that_leaves_in_order_is_not(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "9", "-r", "9", "-t", "8s", "--tags", "short", "--request-log")
    with cluster(tmp_path, arguments, 3) as running:
        wait_for(lambda: "streams in flight" in running.master.output, "progress")
        running.workers[0].popen.kill()
        running.workers[1].interrupt()
        assert running.workers[1].wait(20) == 0
        assert running.master.wait() == 4
        said = [line for line in running.master.output.splitlines() if "request log: " in line]
    meta = saved(tmp_path)["meta"]
    (killed,) = meta["missing_workers"]
    assert said[0].endswith(f"request log: the requests of {killed} are missing")
    assert f"request log: the requests of {killed} are missing" in meta["remarks"]
    rows = log_of(only_run(tmp_path))
    assert {row["worker"] for row in rows} == {*meta["expected_workers"]} - {killed}
    assert len({row["request_id"] for row in rows}) == len(rows) > 20
    # What the killed one had reported is in the numbers, but not in the log.
    assert len(rows) < saved(tmp_path)["summary"]["total"]["outcomes"]["ok"]


def test_what_a_worker_has_no_room_for_is_counted(tmp_path: Path, server: str) -> None:
    small = tmp_path / "small.py"
    small.write_text(
        "from functools import partial\nimport vllm_locust.generator as g\n"
        f"g.RequestLog = partial(g.RequestLog, most_bytes=10_000)\nexec(open({str(MIXED)!r}).read())\n"
    )
    command = locust(*headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "3s", "--request-log"), locustfile=small)
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait() == 0
        assert_clean(running)
        left_out = served(server)["completed"] - len(log_of(only_run(tmp_path)))
        said = f"request log: {left_out} requests of local are left out, beyond 0.01 MB"
        assert left_out > 0
        assert said in running.output
    assert said in saved(tmp_path)["meta"]["remarks"]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_run_from_the_web_ui_has_its_own_log_and_a_reset_changes_nothing(
    tmp_path: Path, server: str, workers: int
) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--results", str(tmp_path / "results")]
    options += ["--prometheus-port", "0", "--host", server, "--request-log"]
    alone = process(locust(*options), tmp_path / "master.log", cwd=tmp_path)
    browser = Browser(f"http://127.0.0.1:{port}")
    with cluster(tmp_path, options, workers) if workers else alone as running:
        _log_a_run(browser, tmp_path, server, workers, reset=True)
        _log_a_run(browser, tmp_path, server, workers, reset=False)
        assert_clean(*([running.master, *running.workers] if isinstance(running, Cluster) else [running]))


def _log_a_run(browser: Browser, folder: Path, server: str, workers: int, *, reset: bool) -> None:
    before, files = served(server)["completed"], set(folder.glob("results/*/requests.jsonl"))
    wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
    wait_for(lambda: len(browser.stats().get("workers", [])) == workers, "workers")
    browser.swarm(user_count="6", spawn_rate="6", host=server)
    wait_for(lambda: served(server)["completed"] > before + 20, "requests")
    if reset:
        browser.post("stats/reset")
        wait_for(lambda: served(server)["completed"] > before + 60, "more requests")
    browser.post("stop")
    wait_for(lambda: set(folder.glob("results/*/requests.jsonl")) > files, "log")
    (path,) = set(folder.glob("results/*/requests.jsonl")) - files
    rows = log_of(path.with_name("run.json"))
    assert len({row["request_id"] for row in rows}) == len(rows) == served(server)["completed"] - before
    assert {row["epoch"] for row in rows} == ({0, 1} if reset else {0})
    if not reset:
        assert_whole(rows, path.with_name("run.json"), len(rows))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--request-log", "xml"], "--request-log is 'xml', expected jsonl, csv"),
        (["--log-text"], "--log-text is for the log of requests; add --request-log"),
    ],
)
def test_what_cannot_be_logged_is_refused_before_the_first_request(
    tmp_path: Path, server: str, arguments: list[str], said: str
) -> None:
    command = locust(*headless(tmp_path, server, "-t", "5s"), *arguments)
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait() == 2
        assert said in running.output
        assert "Traceback" not in running.output
    assert served(server)["completed"] == 0
