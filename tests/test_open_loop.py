"""What a run is asked to send, on real processes: at a rate, in stages, a fixed number of times, each prompt once.

Expectations come from the scenario and the schedule alone; what happened comes from the log of requests or the server.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from emitter import DONE, FINISH, LENGTH, ROLE, Answer, Emitter, Server, token
from processes import (
    assert_clean,
    cluster,
    free_port,
    headless,
    locust,
    process,
    saved,
    served,
    simulator,
    wait_for,
)

from vllm_locust import scenario
from vllm_locust.load import Load

FAST = ("--ttft", "20ms", "--itl", "2ms")
MINE = """
from vllm_locust import ChatUser, CompletionsUser


class Chat(ChatUser):
    scenario = "mine.toml"
"""
TWO = f"""{MINE}
    weight = 3


class Completions(CompletionsUser):
    scenario = "mine.toml"
"""
PARTS = """
cache = "natural"
weight = { a = 2, b = 1 }

[part.a]
prompts = "a.jsonl"
output_tokens = 4

[part.b]
prompts = "b.jsonl"
output_tokens = 4
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, *FAST) as url:
        yield url


def write(folder: Path, *, head: str = "", classes: str = MINE) -> Path:
    """Write a locustfile, and beside it a scenario with 13 + 7 prompts; returns the former."""
    for name, number in (("a", 13), ("b", 7)):
        lines = "".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(number))
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "mine.toml").write_text(head + PARTS)
    path = folder / "locustfile.py"
    path.write_text(classes)
    return path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the log of all requests."""
    (path,) = (folder / "results").glob("*/requests.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbered(rows: list[dict[str, Any]]) -> Counter[str]:
    """Return how often each request was sent: its name without that of the run."""
    return Counter(row["request_id"].partition("-")[2] for row in rows)


def prompts_of(rows: list[dict[str, Any]]) -> Counter[str]:
    """Return which prompts were sent how often, by the log."""
    return Counter(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"] for row in rows)


def most_at_once(rows: list[dict[str, Any]]) -> int:
    changes = sorted([(row["called_s"], 1) for row in rows] + [(row["done_s"], -1) for row in rows])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


# At a rate


def test_two_workers_send_the_one_schedule_and_each_arrival_once(tmp_path: Path, server: str) -> None:
    locustfile = write(tmp_path, classes=TWO)
    rate = ["--request-rate", "20", "--arrivals", "constant", "-t", "5s", "--request-log"]
    with cluster(tmp_path, headless(tmp_path, server, *rate), locustfile=locustfile) as running:
        assert running.master.wait() == 0, running.master.output
        assert_clean(running.master, *running.workers)
    rows = sorted(rows_of(tmp_path), key=lambda row: row["scheduled_s"])
    assert len(rows) > 80  # in 5 s
    assert [row["scheduled_s"] for row in rows] == [k / 20 for k in range(len(rows))]
    assert all(row["sent_s"] >= row["scheduled_s"] for row in rows)
    assert {row["outcome"] for row in rows} == {"ok"}
    # The k-th is the same request on any number of workers, and every other one is a worker's.
    load = Load(weights={"Chat": 3, "Completions": 1})
    names = ["{}-{}".format(*load.request(0, k)) for k in range(len(rows))]
    assert [row["request_id"].partition("-")[2] for row in rows] == names
    assert len({row["worker"] for row in rows[::2]}) == len({row["worker"] for row in rows[1::2]}) == 1
    assert rows[0]["worker"] != rows[1]["worker"]
    assert served(server)["completed"] == len(rows)
    run = saved(tmp_path)
    total, remarks = run["summary"]["total"], run["meta"]["remarks"]
    assert total["scheduled"] == total["requests"] == total["outcomes"]["ok"] == total["queue"]["count"] == len(rows)
    assert total["dropped"] == 0
    assert total["queue"]["max"] == pytest.approx(max(row["sent_s"] - row["scheduled_s"] for row in rows), abs=1e-9)
    late = max(row["first_token_s"] - row["scheduled_s"] for row in rows)
    assert total["ttft_scheduled"]["max"] == pytest.approx(late, abs=1e-9)
    assert "requests leave at their rate, whatever the number of users (-u), who stand by" in remarks


def test_case_43_a_freeze_shows_in_what_waits_while_ttft_says_what_the_server_did(tmp_path: Path) -> None:
    """Source: HdrHistogram's author on coordinated omission; ten users would have asked nothing meanwhile."""
    with simulator(tmp_path, *FAST, "--fault", "stall 4s at 2s") as url:
        locustfile = write(tmp_path)
        rate = ["--request-rate", "10", "--arrivals", "constant", "--max-in-flight", "10", "-t", "9s", "--request-log"]
        command = locust(*headless(tmp_path, url, *rate), locustfile=locustfile)
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            assert running.wait() == 0, running.output
            assert_clean(running)
            output = running.output
    rows = sorted(rows_of(tmp_path), key=lambda row: row["scheduled_s"])
    assert [row["scheduled_s"] for row in rows] == [k / 10 for k in range(len(rows))]
    assert all(first["called_s"] <= second["called_s"] for first, second in pairwise(rows))  # seats in their order
    assert most_at_once(rows) == 10
    # Ten were out when nothing came any more; all that was due since then waited until their answers came.
    frozen = [row for row in rows if row["ttft_s"] > 2]
    assert 0 < len(frozen) <= 10
    full_s, free_s = max(row["sent_s"] for row in frozen), min(row["done_s"] for row in frozen)
    held_back = [row for row in rows if full_s < row["scheduled_s"] < free_s]
    assert len(held_back) >= 20
    assert all(row["sent_s"] >= free_s for row in held_back)
    total = saved(tmp_path)["summary"]["total"]
    queues = [row["sent_s"] - row["scheduled_s"] for row in rows]
    assert total["queue"]["max"] == pytest.approx(max(queues), abs=1e-9)
    assert total["queue"]["max"] >= free_s - held_back[0]["scheduled_s"] > 2
    scheduled = [row["first_token_s"] - row["scheduled_s"] for row in rows]
    assert total["ttft_scheduled"]["max"] == pytest.approx(max(scheduled), abs=1e-9)
    # A tenth saw the freeze in ttft, whose meaning does not change; a third waited for it.
    assert sum(row["ttft_s"] > 1 for row in rows) <= 10
    assert sum(waited > 1 for waited in scheduled) >= 25
    rates = total["rates"]
    assert total["scheduled"] == total["outcomes"]["ok"] == len(rows)
    assert rates["offered_per_s"] == rates["sent_per_s"] == rates["request_per_s"]  # in the end
    assert rates["in_flight_peak"] == 10
    assert re.search(r"offered, .* achieved \(sent\), .* completed \(ok\)", output)


def test_what_waits_when_the_run_ends_is_dropped_and_counted(tmp_path: Path) -> None:
    with simulator(tmp_path, "--ttft", "1s") as url:
        rate = ["--request-rate", "50", "--max-in-flight", "6", "-t", "3s", "--request-log"]
        with cluster(tmp_path, headless(tmp_path, url, *rate), locustfile=write(tmp_path)) as running:
            running.master.wait()
            assert_clean(running.master, *running.workers)
    rows, total = rows_of(tmp_path), saved(tmp_path)["summary"]["total"]
    assert {row["outcome"] for row in rows} == {"ok"}
    assert most_at_once(rows) == 6
    assert total["dropped"] > 50
    assert total["scheduled"] == total["dropped"] + len(rows)
    assert total["requests"] == len(rows)
    rates = total["rates"]
    assert rates["offered_per_s"] > rates["sent_per_s"] > 0


# A fixed number


def expected_prompts(folder: Path, number: int, seed: int) -> Counter[str]:
    """Return the prompts of the first so many requests."""
    mine = scenario.load(str(folder / "mine.toml"))
    picks = [scenario.pick(mine, seed, "Chat", index) for index in range(number)]
    return Counter(str(pick.prompt.text) for pick in picks)


@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]
)
def test_a_fixed_number_is_the_same_on_any_number_of_workers_and_ends_by_itself(
    tmp_path: Path, server: str, workers: int
) -> None:
    """0: forks of one process, as with `--processes`."""
    locustfile = write(tmp_path)
    arguments = headless(tmp_path, server, "--requests", "60", "-u", "7", "-r", "7", "--seed", "5")
    arguments += ["--request-log", "--log-text"]
    if workers:
        with cluster(tmp_path, arguments, workers, locustfile=locustfile) as running:
            assert running.master.wait(30) == 0, running.master.output
            assert_clean(running.master, *running.workers)
    else:
        port = str(free_port())
        ports = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
        command = locust(*arguments, "--processes", "2", *ports, locustfile=locustfile)
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as run:
            assert run.wait(30) == 0, run.output
            assert_clean(run)
    rows = rows_of(tmp_path)
    assert numbered(rows) == Counter(f"Chat-{index}" for index in range(60))
    assert prompts_of(rows) == expected_prompts(tmp_path, 60, seed=5)
    assert len({row["worker"] for row in rows}) == (workers or 2)
    assert served(server)["completed"] == 60
    run_file = saved(tmp_path)
    # Rates are over the time until then: what follows the last answer is not waited for.
    assert run_file["summary"]["duration_s"] - max(row["done_s"] for row in rows) < 0.5
    assert run_file["summary"]["total"]["outcomes"]["ok"] == 60
    assert run_file["summary"]["warmup"] is None
    assert not run_file["meta"]["ended_early"]


@pytest.mark.long
def test_a_fixed_number_at_a_rate_is_the_same_requests_too(tmp_path: Path, server: str) -> None:
    locustfile = write(tmp_path)
    arguments = headless(tmp_path, server, "--num-prompts", "40", "--request-rate", "40", "--seed", "5")
    with cluster(tmp_path, [*arguments, "--request-log", "--log-text"], workers=3, locustfile=locustfile) as running:
        assert running.master.wait(30) == 0, running.master.output
        assert_clean(running.master, *running.workers)
    rows = rows_of(tmp_path)
    assert numbered(rows) == Counter(f"Chat-{index}" for index in range(40))
    assert prompts_of(rows) == expected_prompts(tmp_path, 40, seed=5)
    total = saved(tmp_path)["summary"]["total"]
    assert (total["scheduled"], total["dropped"], total["requests"]) == (40, 0, 40)


def test_each_prompt_once_is_each_prompt_of_all_files_once(tmp_path: Path, server: str) -> None:
    locustfile = write(tmp_path, head='order = "once"')
    arguments = headless(tmp_path, server, "-u", "4", "-r", "4", "--request-log", "--log-text")
    with cluster(tmp_path, arguments, locustfile=locustfile) as running:
        assert running.master.wait(30) == 0, running.master.output
        assert_clean(running.master, *running.workers)
    prompts = prompts_of(rows_of(tmp_path))
    assert prompts == Counter([*(f"a {i}" for i in range(13)), *(f"b {i}" for i in range(7))])
    assert served(server)["completed"] == 20


def test_what_failed_is_asked_again_at_the_end_and_counted_apart(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST, "--stream-errors", "0.3") as url:
        locustfile = write(tmp_path)
        arguments = ["--requests", "40", "--retry-failed", "2", "-u", "5", "-r", "5", "--request-log", "--log-text"]
        with cluster(tmp_path, headless(tmp_path, url, *arguments), locustfile=locustfile) as running:
            running.master.wait(30)
            assert_clean(running.master, *running.workers)
    rows = rows_of(tmp_path)
    by_name = {row["request_id"].partition("-")[2]: row for row in rows}
    assert len(by_name) == len(rows)
    first = {name: row for name, row in by_name.items() if re.fullmatch(r"Chat-\d+", name)}
    assert first.keys() == {f"Chat-{index}" for index in range(40)}
    again = {name: row for name, row in by_name.items() if name not in first}
    assert {row["phase"] for row in first.values()} == {"steady"}
    assert {row["phase"] for row in again.values()} == {"retry"}
    failed = {name for name, row in by_name.items() if row["outcome"] != "ok"}
    assert failed & first.keys()
    # Exactly what failed, with what it asked, at most twice.
    once = {f"{name}-1" for name in failed & first.keys()}
    twice = {f"{name.removesuffix('-1')}-2" for name in failed & once}
    assert again.keys() == once | twice
    assert all(row["prompt"] == first[name.rpartition("-")[0]]["prompt"] for name, row in again.items())
    for worker in {row["worker"] for row in rows}:
        ends_s = [row["done_s"] for row in first.values() if row["worker"] == worker]
        assert all(row["called_s"] >= max(ends_s) for row in again.values() if row["worker"] == worker)
    summary = saved(tmp_path)["summary"]
    assert summary["total"]["requests"] == sum(summary["total"]["outcomes"].values()) == 40
    assert summary["total"]["ttft"]["count"] == sum(row["ttft_s"] is not None for row in first.values())
    ok = sum(row["outcome"] == "ok" for row in again.values())
    assert summary["retry"] == {"requests": len(again), "ok": ok, "failed": len(again) - ok}


@pytest.mark.long
def test_a_fixed_number_ends_where_no_user_is_left_to_send_what_is_left(tmp_path: Path, server: str) -> None:
    """Locust moves users to a worker that joins, and a form may take them away."""
    gone = f"{MINE}\n    def on_start(self):\n        self.stop(force=True)\n"
    locustfile = write(tmp_path, classes=gone)
    command = locust(*headless(tmp_path, server, "--requests", "5"), locustfile=locustfile)
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait() == 1, running.output
        assert "requests are left, and no user to send them, at local" in running.output


# In stages


SHAPE = f"""{MINE}
from locust import LoadTestShape


class Steps(LoadTestShape):
    def tick(self):
        return (2, 2) if self.get_run_time() < 5 else None
"""


def test_stages_of_users_are_refused_where_a_shape_sets_the_users(tmp_path: Path, server: str) -> None:
    locustfile = write(tmp_path, classes=SHAPE)
    command = locust(*headless(tmp_path, server, "--stages", "1,2", "--stage-time", "1s"), locustfile=locustfile)
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        assert running.wait(30) == 2, running.output
        assert "--stages are numbers of users, which the load shape Steps sets, too" in running.output
    assert served(server)["completed"] == 0


def test_stages_of_users_end_by_themselves_and_each_has_its_own_number(tmp_path: Path, server: str) -> None:
    locustfile = write(tmp_path)
    arguments = headless(tmp_path, server, "--stages", "2,4,6", "--stage-time", "3s", "--request-log")
    with cluster(tmp_path, arguments, locustfile=locustfile) as running:
        assert running.master.wait(40) == 0, running.master.output
        assert_clean(running.master, *running.workers)
    rows, run = rows_of(tmp_path), saved(tmp_path)
    workers = {row["worker"] for row in rows}
    assert len(workers) == 2
    stages = {number: [row for row in rows if row["stage"] == number] for number in (1, 2, 3)}
    assert sum(map(len, stages.values())) == len(rows)
    for number, of_stage in stages.items():
        assert all(3 * (number - 1) <= row["sent_s"] for row in of_stage)
        assert all(row["called_s"] < 3 * number for row in of_stage if number < 3)
        # Each worker's clock began when it had heard of the run: they are not quite together at the ends.
        middle = [row for row in of_stage if 3 * number - 2.5 < row["called_s"] and row["done_s"] < 3 * number - 0.5]
        assert sum(most_at_once([row for row in middle if row["worker"] == w]) for w in workers) == 2 * number
    for stage, of_stage in zip(run["summary"]["stages"], stages.values(), strict=True):
        assert stage["requests"] == len(of_stage)
        assert stage["ttft"]["count"] == len(of_stage)
        assert (stage["value"], stage["since_s"], stage["length_s"]) == (
            2 * stage["stage"],
            3 * (stage["stage"] - 1),
            pytest.approx(3, abs=0.5),
        )
    peaks = [stage["rates"]["in_flight_peak"] for stage in run["summary"]["stages"]]
    assert peaks[0] >= 2
    assert peaks[1] >= 4
    assert peaks[2] == 6
    assert not run["meta"]["ended_early"]


# A worker that is lost


def _asked(server: Server) -> list[int]:
    """Return the numbers of the arrivals that a server was asked."""
    found = [re.search(rb"X-Request-Id: \w+-Chat-(\d+)", reply.request) for reply in server.replies()]
    return [int(match[1]) for match in found if match]


def test_a_worker_that_takes_the_place_of_a_killed_one_goes_on_from_then(tmp_path: Path, emitter: Emitter) -> None:
    """Nothing is sent twice, and nothing of the time before is made up for: it would not be the schedule."""
    models = Answer([(0, b'{"data": [{"id": "m"}]}')], content_type="application/json", framing=LENGTH)
    answer = Answer([(5, ROLE), (10, token("a")), (15, FINISH), (15, DONE)])
    server = emitter.serve({"/v1/models": models, "*": answer})
    locustfile = write(tmp_path)
    arguments = ["--request-rate", "20", "--arrivals", "constant", "-t", "10s", "--request-log"]
    with cluster(tmp_path, headless(tmp_path, server.url, *arguments), locustfile=locustfile) as running:
        wait_for(lambda: len(_asked(server)) > 30, "arrivals")
        running.workers[0].popen.kill()
        port = running.master.popen.args[running.master.popen.args.index("--master-bind-port") + 1]
        command = locust("--worker", "--master-port", port, locustfile=locustfile)
        with process(command, tmp_path / "heir.log", cwd=tmp_path) as heir:
            assert running.master.wait() == 4, running.master.output  # data of the killed one is missing
            heir.wait(20)
            assert_clean(running.master, running.workers[1], heir)
    asked, rows, run = _asked(server), rows_of(tmp_path), saved(tmp_path)
    assert len(set(asked)) == len(asked)
    (mark,) = [text for text in run["meta"]["remarks"] if "takes the place of" in text]
    assert re.fullmatch(r"\d+ s: worker 3 .* takes the place of worker [12] .*", mark)
    ours = sorted((row["scheduled_s"], row) for row in rows if row["worker"].startswith("worker 3"))
    assert ours
    ranks = {round(at_s * 20) % 2 for at_s, _ in ours}
    (rank,) = ranks
    stripe = sorted(number for number in asked if number % 2 == rank)
    other = sorted(number for number in asked if number % 2 != rank)
    assert other == list(range(1 - rank, other[-1] + 1, 2))  # who stays is not disturbed
    since = round(ours[0][0] * 20)
    before = [number for number in stripe if number < since]
    assert before == list(range(rank, before[-1] + 1, 2))
    assert [number for number in stripe if number >= since] == list(range(since, stripe[-1] + 1, 2))
    assert since > before[-1] + 2  # what was due in between passed over
    assert all(row["sent_s"] >= row["scheduled_s"] for _, row in ours)
    assert abs(stripe[-1] - other[-1]) < 20
