"""Samples of answers: the same ones of every run that asks the same questions, and no text of any other."""

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
from emitter import DONE, FINISH, ROLE, SILENCE, Answer, Emitter, finish, reasoning, script, token
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

from vllm_locust import __version__, samples, scenario
from vllm_locust.errors import InputError
from vllm_locust.generator import Generator, Request
from vllm_locust.load import Load
from vllm_locust.prompts import Prompt
from vllm_locust.run import Finish, Settings, Start, encode_scenarios
from vllm_locust.samples import Kept, Sample, Samples, Wanted, add, each, load, rank, told, write
from vllm_locust.scenario import Part, Scenario
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.transport import Pool
from vllm_locust.work import Item

FAST = ("--ttft", "20ms", "--itl", "2ms")
SECRET = "sk-most-secret-of-all"
POOLS: list[Pool] = []
"""Connections of the test, closed after it."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while POOLS:
        POOLS.pop().close()


def example(**changed: Any) -> Sample:
    sample = Sample(
        scenario="short",
        endpoint="chat",
        user_class="Mine",
        index=1,
        seed=0,
        rank="0000000000000001",
        request_id="id-1",
        worker="local",
        phase="steady",
        outcome="ok",
        status=200,
        message=None,
        finish_reason="stop",
        input_tokens=7,
        output_tokens=3,
        estimated=False,
        ttft_s=0.1,
        e2el_s=0.3,
        prompt="Why?",
        answer="Because of it.",
        reasoning=None,
        truncated=False,
    )
    return msgspec.structs.replace(sample, **changed)


# Ranks


def test_a_rank_is_what_the_documents_say() -> None:
    assert rank(7, "MixedChat", 12) == blake2b(b"7|MixedChat|12", digest_size=8).hexdigest()
    assert rank(7, "Mine", b'"Why?"') == blake2b(b'7|Mine|"Why?"', digest_size=8).hexdigest()


# In a worker


def kept_of(keeper: Samples) -> list[Sample]:
    """Ask for all that a worker has kept, piece by piece."""
    data = b""
    while True:
        piece = keeper.piece(len(data))
        data += piece["data"]
        if piece["size"] == len(data):
            assert keeper.piece(len(data))["data"] == b""
            assert keeper.delivered
            return [msgspec.json.decode(line, type=Sample) for line in data.splitlines()]


def ended(scenario: str = "short") -> Timeline:
    timeline = Timeline("id", scenario, "chat", 1000, user_class="Mine")
    timeline.end(Outcome.OK, 2000)
    return timeline


def test_only_a_few_candidates_of_many_requests_are_ever_wanted() -> None:
    number, most = 20_000, 5
    keeper = Samples("w", 3, most)
    wanted = [i for i in range(number) if keeper.admit("short", rank(3, "Mine", i))]
    # K records at first, and then the n-th request is one with probability K / n.
    expected = most + sum(most / n for n in range(most + 1, number + 1))
    assert abs(len(wanted) - expected) < 4 * math.sqrt(expected)
    for i in wanted:
        keeper.keep(Wanted(rank(3, "Mine", i), i, b'"Why?"'), ended())
    smallest = sorted(rank(3, "Mine", i) for i in range(number))[:most]
    assert sorted(sample.rank for sample in kept_of(keeper)) == smallest


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), unique=True, max_size=60),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_a_worker_keeps_the_smallest_ranks_in_whichever_order_requests_leave_and_end(
    requests: list[tuple[str, int]], most: int, order: random.Random
) -> None:
    keeper, running = Samples("w", 0, most), []
    for name, i in requests:
        place = rank(0, name, i)
        if keeper.admit(name, place):
            running.append((name, Wanted(place, i, b"null")))
        while running and order.random() < 0.4:
            name_of, one = running.pop(order.randrange(len(running)))
            keeper.keep(one, ended(name_of))
    for name_of, one in running:
        keeper.keep(one, ended(name_of))
    found = {name: sorted(s.rank for s in kept_of(keeper) if s.scenario == name) for name in "ab"}
    assert found == {name: sorted(rank(0, n, i) for n, i in requests if n == name)[:most] for name in "ab"}


def test_names_of_requests_are_no_scenarios_and_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_SCENARIOS", 3)
    keeper = Samples("w", 0, 2)
    assert [keeper.admit(f"name-{i % 5}", rank(0, "Mine", i)) for i in range(10)] == [
        True,
        True,
        True,
        False,
        False,
    ] * 2
    piece = keeper.piece(0)
    assert (piece["left_out"], piece["trouble"]) == (4, "beyond 3 scenarios")


# With a generator, as a worker has it


class Sending:
    """A generator in a run, whose samples are read as a master would."""

    def __init__(self, url: str, most: int = 5, **settings: Any) -> None:
        self.generator = Generator()
        prompts = tuple(Prompt(text=f"Question {i}?") for i in range(9))
        part = Part(name="short", prompts=prompts, weight=1, cold=True, max_tokens=9, extra_body={})
        self.scenario = Scenario("s", (part,))
        self.start = Start(
            version=__version__,
            run="run-1",
            epoch=0,
            age_ns=0,
            run_age_ns=0,
            worker="worker 1 (here)",
            rank=0,
            ranks=1,
            settings=Settings(
                target=url, model="m", seed=4, samples=most, endpoints={"C": "chat", "T": "completions"}, **settings
            ),
            scenario_hash="",
            scenarios=encode_scenarios({"C": self.scenario, "T": self.scenario}),
        )
        self.generator.begin(self.start, lambda _: None)
        assert self.generator._client is not None
        POOLS.append(self.generator._client.pool)

    def ask(self, user_class: str = "C", index: int = 0, attempt: int = 0) -> Timeline:
        return self.send(self.generator._request(Item(user_class, index, attempt)))

    def ask_own(self, body: dict[str, Any]) -> Timeline:
        request = Request(user_class="Mine", endpoint="chat", scenario="mine", body=body, request_id="own")
        return self.send(request)

    def send(self, request: Request) -> Timeline:
        return self.generator.stream(request, lambda _: None)

    def end(self, stop_timeout_s: float = 5) -> list[Sample]:
        self.generator.finish(Finish(run="run-1", windows=1, stop_timeout_s=stop_timeout_s))
        assert self.generator.samples is not None
        return kept_of(self.generator.samples)


def hello(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


WHOLE = script((1, ROLE), (2, reasoning("Hm.")), (3, token("Be")), (4, token("cause.")), (5, FINISH), (5, DONE))


def test_a_sample_is_what_was_asked_without_the_nonce_and_what_was_answered(emitter: Emitter) -> None:
    server = emitter.serve(Answer(WHOLE))
    sending = Sending(server.url)
    chat, text = sending.ask("C", 3), sending.ask("T", 4)
    found = {sample.user_class: sample for sample in sending.end()}
    asked = {name: scenario.pick(sending.scenario, 4, name, i).prompt.text for name, i in (("C", 3), ("T", 4))}
    assert chat.ttft_ns is not None
    assert chat.e2el_ns is not None
    assert found["C"] == Sample(
        scenario="short",
        endpoint="chat",
        user_class="C",
        index=3,
        seed=4,
        rank=rank(4, "C", 3),
        request_id="run-1-C-3",
        worker="worker 1 (here)",
        phase="steady",
        outcome="ok",
        status=200,
        message=None,
        finish_reason="stop",
        input_tokens=None,
        output_tokens=3,
        estimated=True,
        ttft_s=chat.ttft_ns / 1e9,
        e2el_s=chat.e2el_ns / 1e9,
        prompt=[{"role": "user", "content": asked["C"]}],
        answer="Because.",
        reasoning="Hm.",
        truncated=False,
    )
    assert (found["T"].prompt, found["T"].rank, text.outcome) == (asked["T"], rank(4, "T", 4), "ok")
    sent = [reply.request for reply in server.replies(2)]
    assert all(b"[" in request and request.count(b"Question") == 1 for request in sent)


def test_failed_and_cut_requests_are_samples_and_what_is_asked_again_is_none(emitter: Emitter) -> None:
    silent = Answer(script((1, ROLE), (2, token("half"))), ending=SILENCE)
    server = emitter.serve([Answer([(0, b'{"error": {"message": "no"}}')], status="500 Oh"), Answer(WHOLE), silent])
    sending = Sending(server.url)
    sending.ask(index=0)
    sending.ask(index=0, attempt=1)
    cut = gevent.spawn(sending.ask, "C", 1)
    server.replies(2)
    wait_for(lambda: gevent.sleep(0.02) or sending.generator._client.reading, "stream")  # type: ignore[union-attr]
    gevent.sleep(0.3)
    found = {sample.index: sample for sample in sending.end(stop_timeout_s=0)}
    cut.join()
    assert {i: (s.outcome, s.answer) for i, s in found.items()} == {0: ("http_5xx", None), 1: ("cancelled", "half")}
    assert (found[0].message, found[0].status, found[0].request_id) == ("no", 500, "run-1-C-0")


def test_no_text_is_kept_of_what_is_not_wanted(emitter: Emitter) -> None:
    server = emitter.serve(Answer(WHOLE))
    sending = Sending(server.url, most=1)
    order = sorted(range(30), key=lambda i: rank(4, "C", i))
    first, better, worse = (sending.ask(index=i) for i in (order[5], order[0], order[9]))
    assert [timeline.answer is not None for timeline in (first, better, worse)] == [True, True, False]
    (sample,) = sending.end()
    assert sample.index == order[0]
    without = Sending(server.url, most=0)
    assert without.ask().answer is None
    assert without.generator.samples is None


@pytest.mark.parametrize("texts", [False, True])
def test_a_log_has_no_texts_because_of_samples(emitter: Emitter, texts: bool) -> None:  # noqa: FBT001
    sending = Sending(emitter.serve(Answer(WHOLE)).url, request_log=True, log_text=texts)
    sending.ask()
    (sample,) = sending.end()
    log = sending.generator.log
    assert log is not None
    assert sample.answer == "Because."
    assert json.loads(log.piece(0)["data"]).get("answer") == ("Because." if texts else None)
    assert (b"Question" in log.piece(0)["data"]) == texts
    log.close()


def test_what_a_task_builds_is_known_by_what_it_asks_and_its_first_answer_stands_for_all(emitter: Emitter) -> None:
    answers = [Answer(script((1, token(text)), (2, FINISH), (2, DONE))) for text in ("one", "two", "three")]
    sending = Sending(emitter.serve(answers).url)
    body = hello("Why?")
    sending.ask_own(body)
    prompt = b'[{"role":"user","content":"Why?"}]'
    sending.ask_own(hello("Why?"))
    body["messages"].append({"role": "assistant", "content": "what was said before"})
    sending.ask_own(body)
    found = {sample.rank: sample for sample in sending.end()}
    assert found.keys() == {rank(4, "Mine", prompt), rank(4, "Mine", msgspec.json.encode(body["messages"]))}
    assert {s.answer for s in found.values()} == {"one", "three"}
    sample = found[rank(4, "Mine", prompt)]
    assert (sample.prompt, sample.index, sample.scenario) == (json.loads(prompt), None, "mine")


def test_a_reset_of_statistics_changes_nothing(emitter: Emitter) -> None:
    sending = Sending(emitter.serve(Answer(WHOLE)).url)
    sending.ask(index=0)
    sending.generator.new_epoch(sending.start, 1, 1_000_000)
    sending.ask(index=1)
    assert {sample.index for sample in sending.end()} == {0, 1}


def test_the_key_is_blotted_out_of_all_texts(emitter: Emitter) -> None:
    said = script(
        (1, reasoning(SECRET)), (2, token(SECRET[:5])), (2, token(SECRET[5:])), (3, finish(SECRET)), (3, DONE)
    )
    sending = Sending(emitter.serve(Answer(said)).url, api_key=SECRET)
    sending.ask_own({"messages": [{"role": "user", "content": [{"type": "text", "text": f"Is {SECRET} right?"}, 7]}]})
    (sample,) = sending.end()
    assert SECRET not in repr(sample)
    assert (sample.answer, sample.reasoning, sample.finish_reason) == ("***", "***", "***")
    assert sample.prompt[0]["content"][0]["text"] == "Is *** right?"


def test_of_a_long_answer_so_much_is_kept_and_the_sample_says_so(emitter: Emitter) -> None:
    most = samples.KEPT_CHARACTERS
    pieces = script(
        *((1, token("a" * 30_000, index=0)) for _ in range(2)),
        *((2, token("b" * 30_000, index=1)) for _ in range(2)),
        (3, finish("stop", index=0)),
        (3, finish("length", index=1)),
        (3, DONE),
    )
    sending = Sending(emitter.serve(Answer(pieces)).url)
    sending.ask_own({**hello("Go on."), "n": 2})
    (sample,) = sending.end()
    assert sample.answer == ["a" * 60_000, "b" * (most - 60_000)]
    assert (sample.truncated, sample.finish_reason) == (True, "stop,length")


# Of all workers


RANKED = st.builds(
    lambda scenario, place, outcome, worker: example(
        scenario=scenario, rank=f"{place:016x}", outcome=outcome, worker=worker
    ),
    st.sampled_from("ab"),
    st.integers(0, 30),
    st.sampled_from(["ok", "cancelled", "truncated"]),
    st.sampled_from(["w1", "w2", "w3"]),
)


def kept_from(found: list[Sample], most: int) -> list[Sample]:
    kept: Kept = {}
    for sample in found:
        add(kept, sample, most)
    return each(kept)


@given(st.lists(st.tuples(st.integers(0, 3), RANKED), max_size=60), st.integers(1, 6), st.randoms())
def test_any_split_over_workers_in_any_order_however_often_gives_the_same(
    asked: list[tuple[int, Sample]], most: int, order: random.Random
) -> None:
    whole = kept_from([sample for _, sample in asked], most)
    parts = [sample for w in range(4) for sample in kept_from([s for by, s in asked if by == w], most)]
    again = parts + parts[: len(parts) // 2]
    order.shuffle(again)
    assert kept_from(again, most) == whole
    ranks = {name: {s.rank for _, s in asked if s.scenario == name} for name in "ab"}
    assert [(s.scenario, s.rank) for s in whole] == [(n, r) for n in "ab" for r in sorted(ranks[n])[:most]]
    for sample in whole:  # what was asked twice is shown where it has ended by itself
        same = [s for _, s in asked if (s.scenario, s.rank) == (sample.scenario, sample.rank)]
        assert (sample.outcome == "cancelled") == all(s.outcome == "cancelled" for s in same)


# The file


@given(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.lists(st.text(max_size=3)), st.booleans())
def test_a_file_reads_back_as_its_samples(text: str, choices: list[str] | None, cut: bool) -> None:  # noqa: FBT001
    prompt = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    sample = example(prompt=prompt, answer=choices, reasoning=text, truncated=cut, index=None)
    other = example(rank="0" * 16)
    file = io.BytesIO()
    try:
        lines = [msgspec.json.encode(one) + b"\n" for one in (sample, other)]
    except UnicodeEncodeError:
        return
    write(lines, file, 2)
    assert [msgspec.json.decode(line, type=Sample) for line in file.getvalue().split(b"\n")[:-1]] == [other, sample]


def test_samples_are_read_beside_a_run_and_a_run_without_them_has_none(tmp_path: Path) -> None:
    assert load(tmp_path) == []
    assert samples.line(tmp_path / "run.json") == ""
    file = tmp_path / "samples.jsonl"
    file.write_bytes(msgspec.json.encode(example()) + b"\n")
    assert load(tmp_path) == load(tmp_path / "run.json") == [example()]
    assert samples.line(tmp_path / "run.json") == f"{file}: 1 answer of short"
    file.write_bytes(msgspec.json.encode(example()) + b'\n{"scenario": "sh')
    with pytest.raises(
        InputError, match=r"samples\.jsonl, line 2: no sample \(.*\); measure again, or remove the file"
    ):
        load(tmp_path)
    assert "line 2" in samples.line(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "none"),
        ({"a": 5}, "5 answers of a"),
        ({"a": 5, "b": 5, "c": 5}, "5 answers of each of 3 scenarios"),
        ({"b": 1, "a": 5}, "5 answers of a, 1 answer of b"),
    ],
)
def test_how_many_there_are_is_said_in_words(numbers: dict[str, int], words: str) -> None:
    assert told(example(scenario=name) for name, number in numbers.items() for _ in range(number)) == words


# Real processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, *FAST) as url:
        yield url


def only(folder: Path) -> list[Sample]:
    (path,) = (folder / "results").glob("*/samples.jsonl")
    return load(path.parent)


def known_by(found: list[Sample]) -> list[tuple[str, str, int | None, str, Any]]:
    """Return what is the same in each run that asks the same."""
    return [(s.scenario, s.user_class, s.index, s.rank, s.prompt) for s in found]


@pytest.mark.parametrize("load", [["-u", "6", "-r", "6"], ["--request-rate", "40"]], ids=["closed", "open"])
def test_two_runs_keep_the_same_ones_on_any_number_of_workers_and_as_many_as_asked(
    tmp_path: Path, server: str, load: list[str]
) -> None:
    found = []
    for workers in (0, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        arguments = headless(folder, server, *load, "--requests", "90", "--seed", "5", "--save-samples", "4")
        command = locust(*arguments, *(forked(workers) if workers else ()))
        with process(command, folder / "locust.log", cwd=folder) as running:
            assert running.wait() == 0
            assert_clean(running)
            (path,) = folder.glob("results/*/samples.jsonl")
            assert f"Samples   {path}: 4 answers of each of 3 scenarios" in running.output
        report = [sys.executable, "-m", "vllm_locust", "report", str(path.parent)]
        printed = subprocess.run(report, capture_output=True, text=True, check=True).stdout
        assert printed.splitlines()[-1] == f"Samples   {path}: 4 answers of each of 3 scenarios"
        found.append(only(folder))
        assert len(list(path.parent.iterdir())) == 2  # nothing unfinished
    alone, together = found
    assert known_by(alone) == known_by(together)
    mixed = scenario.load("mixed")
    every: dict[str, list[str]] = {"short": [], "long": [], "longform": []}
    amounts = Load(requests=90, weights={"MixedChat": 3, "MixedCompletions": 1}).amounts(5) or {}
    for user_class, number in amounts.items():
        for i in range(number):
            every[scenario.pick(mixed, 5, user_class, i).part.name].append(rank(5, user_class, i))
    assert {name: [s.rank for s in alone if s.scenario == name] for name in every} == {
        name: sorted(ranks)[:4] for name, ranks in every.items()
    }
    assert {s.worker.partition(" (")[0] for s in together} <= {"worker 1", "worker 2", "worker 3"}
    assert all(s.outcome == "ok" and s.answer and s.output_tokens for s in alone + together)


def test_after_ctrl_c_on_everyone_at_once_the_samples_of_all_workers_are_there(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "10", "-r", "10", *forked(2), "--save-samples", "50", "--request-log")
    with process(locust(*arguments), tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: served(server)["completed"] > 60, "requests")
        os.killpg(running.popen.pid, signal.SIGINT)
        assert running.wait() == 0
        assert_clean(running)
    (log,) = tmp_path.glob("results/*/requests.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert "prompt" not in rows[0]
    expected = {}
    for name in ("short", "long", "longform"):
        ids = [row["request_id"].rpartition("-")[0::2] for row in rows if row["scenario"] == name]
        places = sorted(rank(0, front.partition("-")[2], int(i)) for front, i in ids)
        expected[name] = places[:50]
    found = only(tmp_path)
    assert {name: [s.rank for s in found if s.scenario == name] for name in expected} == expected
    assert {s.request_id for s in found} <= {row["request_id"] for row in rows}
    assert {s.worker.partition(" (")[0] for s in found} == {"worker 1", "worker 2"}


def test_a_killed_worker_takes_its_samples_along_and_is_named(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "9", "-r", "9", "-t", "8s", "--tags", "short", "--save-samples", "20")
    with cluster(tmp_path, arguments, 3) as running:
        wait_for(lambda: "streams in flight" in running.master.output, "progress")
        running.workers[0].popen.kill()
        running.workers[1].interrupt()
        assert running.workers[1].wait(20) == 0
        assert running.master.wait() == 4
        output = running.master.output
    meta = saved(tmp_path)["meta"]
    (killed,) = meta["missing_workers"]
    said = f"samples: the requests of {killed} are missing"
    assert said in output
    assert said in meta["remarks"]
    found = only(tmp_path)
    assert len(found) == 20
    assert {s.worker for s in found} == {*meta["expected_workers"]} - {killed}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_run_from_the_web_ui_has_its_own_samples_and_a_reset_changes_nothing(
    tmp_path: Path, server: str, workers: int
) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--results", str(tmp_path / "results")]
    options += ["--prometheus-port", "0", "--host", server, "--save-samples", "2", "--requests", "60"]
    alone = process(locust(*options), tmp_path / "master.log", cwd=tmp_path)
    browser, found = Browser(f"http://127.0.0.1:{port}"), []
    with cluster(tmp_path, options, workers) if workers else alone as running:
        for reset in (True, False):
            before, files = served(server)["completed"], set(tmp_path.glob("results/*/samples.jsonl"))
            wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
            wait_for(lambda: len(browser.stats().get("workers", [])) == workers, "workers")
            browser.swarm(user_count="6", spawn_rate="6", host=server)
            wait_for(lambda before=before: served(server)["completed"] > before + 15, "requests")
            if reset:
                browser.post("stats/reset")
            wait_for(lambda files=files: set(tmp_path.glob("results/*/samples.jsonl")) > files, "samples")
            (path,) = set(tmp_path.glob("results/*/samples.jsonl")) - files
            found.append(load(path.parent))
            assert served(server)["completed"] == before + 60
        assert_clean(*([running.master, *running.workers] if isinstance(running, Cluster) else [running]))
    assert known_by(found[0]) == known_by(found[1])
    assert Counter(s.scenario for s in found[0]) == {"short": 2, "long": 2, "longform": 2}


def test_a_user_that_builds_its_own_requests_has_samples_under_its_own_scenario(tmp_path: Path, server: str) -> None:
    custom = MIXED.with_name("custom.py")
    command = locust(
        *headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "8s", "--save-samples", "5"), locustfile=custom
    )
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait() == 0
        assert_clean(running)
    found = only(tmp_path)
    assert {(s.scenario, s.user_class, s.index) for s in found} == {("mine", "Custom", None)}
    assert len({json.dumps(s.prompt) for s in found}) == len(found) >= 3
    first = {s.prompt[0]["content"] for s in found}
    assert first == {"Why is the sky blue?"}


@pytest.mark.parametrize(
    ("given_value", "said"),
    [
        ("0", "--save-samples is 0, expected 1 to 1,000 of each scenario"),
        ("1001", "--save-samples is 1001, expected 1 to 1,000 of each scenario"),
        ("five", "--save-samples is 'five', expected a whole number"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_first_request(
    tmp_path: Path, server: str, given_value: str, said: str
) -> None:
    command = locust(*headless(tmp_path, server, "-t", "5s", "--save-samples", given_value))
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait() == 2
        assert said in running.output
        assert "Traceback" not in running.output
    assert served(server)["completed"] == 0
