"""A fleet under the host's and the network's hazards: section E of the collected cases, on real processes.

What a master should hold is not estimated: each worker keeps what it reports as it leaves (`reporting`).
"""

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgpack
import psutil
import pytest
from processes import (
    MIXED,
    Browser,
    Cluster,
    Process,
    assert_clean,
    cluster,
    forked,
    free_port,
    get,
    headless,
    locust,
    process,
    saved,
    served,
    simulator,
    wait_for,
    when,
)
from reporting import assert_holds, completed, ended, kinds, reporting, sent, told

from vllm_locust.cluster import REPORT, TICK_S
from vllm_locust.recording import FORMAT, decode_report, encode_report

FAST = ("--ttft", "20ms", "--itl", "2ms")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with simulator(tmp_path, *FAST) as url:
        yield url


def end(running: Cluster) -> int:
    """Wait for everyone; returns the master's exit code."""
    code = running.master.wait()
    for worker in running.workers:
        if worker.popen.returncode is None:
            worker.wait(20)
    return code


def progress(running: Cluster) -> Callable[[], bool]:
    """Return whether the run has been going on for some seconds."""
    return lambda: "streams in flight" in running.master.output


def assert_told(folder: Path, *workers: Process) -> dict[str, Any]:
    """Check that the one run that was saved holds what each worker last told, once; returns it."""
    run = saved(folder)
    assert_holds(run, [told(sent(folder, worker)) for worker in workers])
    return run


def join(running: Cluster, folder: Path, locustfile: Path) -> Any:
    """Return the process of one more worker, to be entered."""
    command: list[str] = running.master.popen.args  # type: ignore[assignment]
    port = command[command.index("--master-bind-port") + 1]
    worker = locust("--worker", "--master-port", port, locustfile=locustfile)
    return process(worker, folder / "joined.log", cwd=folder)


# 51, 52: the end of a run

_FIRES_TWICE = """
from locust import events

@events.quit.add_listener
def again(**_):
    environments[0].events.test_stopping.fire(environment=environments[0])
    environments[0].events.test_stop.fire(environment=environments[0])

environments = []

@events.init.add_listener
def note(environment, **_):
    environments.append(environment)
"""


def test_case_51_a_final_message_that_is_two_seconds_late_is_waited_for_and_events_that_fire_twice_change_nothing(
    tmp_path: Path, server: str
) -> None:
    """Sources: locustio/locust#1426, #1025, #984, #1421, #1638."""
    master = tmp_path / "master_locustfile.py"
    master.write_text(f"exec(open({str(MIXED)!r}).read())\n{_FIRES_TWICE}")
    slow = reporting(tmp_path, passing="gevent.spawn_later(2, send) if last else send()")
    arguments = headless(tmp_path, server, "-u", "8", "-r", "8", "-t", "4s")
    with cluster(tmp_path, arguments, locustfile=master, worker_locustfile=slow) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
        run = assert_told(tmp_path, *running.workers)
    assert run["meta"]["missing_workers"] == []
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]
    assert running.master.output.count("Saved     ") == 1


@pytest.mark.long
def test_case_51_a_worker_that_stands_still_at_the_end_of_the_run_is_waited_for(tmp_path: Path, server: str) -> None:
    """Nothing of it is heard for two seconds, its heartbeat included."""
    arguments = headless(tmp_path, server, "-u", "8", "-r", "8", "-t", "6s")
    with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(progress(running), "progress")
        running.workers[0].popen.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        assert running.master.popen.poll() is None
        running.workers[0].popen.send_signal(signal.SIGCONT)
        end(running)
        run = assert_told(tmp_path, *running.workers)
    assert run["meta"]["missing_workers"] == []
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]


@pytest.mark.long
def test_case_51_the_wait_has_a_limit_and_whose_final_data_is_missing_is_said_by_name(
    tmp_path: Path, server: str
) -> None:
    """And a Ctrl-C during the wait, which is the second order to end, writes no second file."""
    deaf = reporting(tmp_path, passing="None if last and os.path.exists('lose') else send()")
    limits = ["--stop-timeout", "1", "--finish-timeout", "2s"]
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "4s", "--tags", "short", *limits)
    with cluster(tmp_path, arguments, worker_locustfile=deaf) as running:
        wait_for(lambda: all(len(sent(tmp_path, worker)) > 2 for worker in running.workers), "reports")
        (tmp_path / "lose").touch()
        wait_for(lambda: any(one.last for one in sent(tmp_path, running.workers[0])), "end of the run")
        ended_s = time.monotonic()
        running.master.interrupt()
        assert running.master.wait() == 4
        assert 1 < time.monotonic() - ended_s < 12
        names = saved(tmp_path)["meta"]["missing_workers"]
        assert len(names) == 2
        assert all(f"final data of {name}" in " ".join(running.master.output.split()) for name in names) or (
            f"final data of {', '.join(names)}" in " ".join(running.master.output.split())
        )


# 53: clocks


@pytest.mark.parametrize(
    ("offset_s", "seconds"), [pytest.param(-200, 5), pytest.param(200, 24, marks=pytest.mark.long)]
)
def test_case_53_a_wall_clock_that_is_wrong_changes_no_number_and_is_named(
    tmp_path: Path, server: str, offset_s: int, seconds: int
) -> None:
    """Sources: locustio/locust#38, #2300, #1984."""
    wrong = f"real = time.time\ntime.time = lambda: real() + {offset_s}"
    watched, astray = tmp_path / "watched", tmp_path / "astray"
    watched.mkdir()
    astray.mkdir()
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", f"{seconds}s", "--window", "2s", "--warmup", "0")
    with (
        cluster(tmp_path, [*arguments, "--expect-workers", "2"], 1, worker_locustfile=reporting(watched)) as running,
        join(running, tmp_path, reporting(astray, before=wrong)) as other,
    ):
        code = end(running)
        other.wait(20)
        assert_clean(running.master, *running.workers, other)
        run = assert_told(tmp_path, *running.workers, other)
    summary = run["summary"]
    assert code == 0, running.master.output
    assert summary["total"]["outcomes"]["ok"] == served(server)["completed"]
    assert summary["duration_s"] == pytest.approx(seconds, abs=1)
    assert summary["total"]["ttft"]["max"] < 2
    found = [remark for remark in run["meta"]["remarks"] if re.search(r"wall clock is \d+ s (behind|ahead)", remark)]
    (remark,) = found
    assert re.match(rf"worker \d \(.*\): .* {'behind' if offset_s < 0 else 'ahead'}", remark)
    assert abs(int(re.findall(r"(\d+) s (?:behind|ahead)", remark)[0]) - 200) <= 2
    # Both workers are in every window, whatever they think what time it is.
    named = {
        worker: {g[1]: g for g in run["recording"]["gauges"] if g[0] == worker}
        for worker in {g[0] for g in run["recording"]["gauges"]}
    }
    assert len(named) == 2
    for gauges in named.values():
        assert [gauges[index][2] for index in range(seconds // 2)] == pytest.approx([2e9] * (seconds // 2), rel=0.6)
    per_window = [sum(cell["counters"].get("sent", 0) for cell in w["cells"]) for w in run["recording"]["windows"]]
    assert all(count > 0 for count in per_window[: seconds // 2])


@pytest.mark.long
def test_a_first_report_that_takes_three_seconds_is_no_wrong_clock(tmp_path: Path, server: str) -> None:
    slow = reporting(tmp_path, passing="if number == 1:\n    gevent.sleep(3)\nsend()")
    arguments = headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "7s", "--tags", "short")
    with cluster(tmp_path, arguments, 1, worker_locustfile=slow) as running:
        end(running)
        run = assert_told(tmp_path, *running.workers)
    assert not any("wall clock" in remark for remark in run["meta"]["remarks"])


# 54: workers that die, and come again


@dataclass(frozen=True, slots=True)
class Killed:
    """A run of three workers of which one was killed, and started again."""

    run: dict[str, Any]
    output: str
    code: int
    lost: str
    heir: str
    killed_s: float
    joined_s: float


def kill_and_restart(folder: Path, server: str, *arguments: str, at_once: bool = False) -> Killed:
    """Run; kill -9 one worker, start it again, and check that nothing told is lost.

    It is started when the master has missed it, or at once, and the master misses it later.
    """
    watched = reporting(folder)
    given = headless(folder, server, *arguments)
    with cluster(folder, given, 3, worker_locustfile=watched) as running:
        wait_for(lambda: all(len(sent(folder, worker)) > 2 for worker in running.workers), "reports")
        started_s = time.monotonic() - 2 * TICK_S
        victim = running.workers[1]
        count = len(sent(folder, victim))
        wait_for(lambda: len(sent(folder, victim)) > count, "another report")
        time.sleep(0.3)
        victim.popen.kill()
        killed_s = time.monotonic() - started_s
        if not at_once:
            wait_for(lambda: "is lost; what it had reported stays" in running.master.output, "loss")
        joined_s = time.monotonic() - started_s
        with join(running, folder, watched) as newcomer:
            code = end(running)
            newcomer.wait(20)
            survivors = [running.workers[0], running.workers[2]]
            assert_clean(running.master, *survivors, newcomer)
            run = assert_told(folder, victim, *survivors, newcomer)
            lost, heir = sent(folder, victim)[-1].report.worker, sent(folder, newcomer)[-1].report.worker
            assert ended(told(sent(folder, newcomer))) > 0
    return Killed(run, running.master.output, code, lost, heir, killed_s, joined_s)


def assert_said(killed: Killed) -> None:
    """Check that the report tells what happened to whom, and when."""
    assert killed.code == 4
    assert killed.run["meta"]["missing_workers"] == [killed.lost]
    assert killed.lost != killed.heir
    assert killed.killed_s - 2 <= when(killed.run, f"{killed.lost} lost") <= killed.killed_s + 8
    assert when(killed.run, f"{killed.heir} joined") >= killed.joined_s - 2
    assert when(killed.run, f"{killed.heir} takes the place of {killed.lost}") >= when(
        killed.run, f"{killed.heir} joined"
    )
    assert f"{killed.lost} lost" in " ".join(killed.output.split())


@pytest.mark.long
def test_case_54_a_worker_that_was_killed_and_started_again_takes_its_place_in_a_closed_loop(
    tmp_path: Path, server: str
) -> None:
    """Sources: locustio/locust#699, #951, #1766, #1913, #2302."""
    killed = kill_and_restart(tmp_path, server, "-u", "9", "-r", "9", "-t", "20s", "--window", "2s", "--warmup", "0")
    assert_said(killed)
    users: dict[int, int] = {}
    for _, index, _, _, _, _, last, *_ in killed.run["recording"]["gauges"]:
        users[index] = users.get(index, 0) + last
    assert users[0] == 9
    ok = killed.run["summary"]["total"]["outcomes"]["ok"]
    # What the killed worker had been answered since its last report is the server's alone.
    assert 0 <= served(server)["completed"] - ok <= 60


@pytest.mark.long
@pytest.mark.parametrize("at_once", [False, True])
def test_case_54_a_worker_that_was_killed_and_started_again_goes_on_with_its_arrivals(
    tmp_path: Path, server: str, *, at_once: bool
) -> None:
    rate = 15
    load = ["--request-rate", str(rate), "--arrivals", "constant", "--warmup", "0", "-u", "3", "-r", "3"]
    killed = kill_and_restart(tmp_path, server, *load, "-t", "20s", at_once=at_once)
    assert_said(killed)
    total = killed.run["summary"]["total"]
    gap_s = when(killed.run, f"{killed.heir} takes the place of {killed.lost}") - killed.killed_s
    expected = 20 * rate - gap_s * rate / 3
    assert total["outcomes"]["ok"] == pytest.approx(expected, abs=2 * rate)
    assert 0 <= served(server)["completed"] - total["outcomes"]["ok"] <= 2 * rate / 3


@pytest.mark.long
def test_case_54_a_fixed_number_of_requests_ends_although_a_worker_was_killed(tmp_path: Path, server: str) -> None:
    load = ["--requests", "900", "-u", "6", "-r", "6", "--warmup", "0", "--tags", "short"]
    killed = kill_and_restart(tmp_path, server, *load)
    assert_said(killed)
    ok = killed.run["summary"]["total"]["outcomes"]["ok"]
    # Of those that it had taken, no more than what its users were about was never heard of.
    assert 900 - 2 <= ok <= 900
    assert served(server)["completed"] >= ok


@pytest.mark.long
def test_a_fixed_number_of_requests_of_which_a_worker_took_its_part_along_ends_by_itself_and_says_so(
    tmp_path: Path, server: str
) -> None:
    """Nobody takes its place."""
    load = ["--requests", "600", "-u", "6", "-r", "6", "--warmup", "0", "--tags", "short", "--finish-timeout", "3s"]
    with cluster(tmp_path, headless(tmp_path, server, *load), 3, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(lambda: all(len(sent(tmp_path, worker)) > 2 for worker in running.workers), "reports")
        running.workers[1].popen.kill()
        assert end(running) == 4
        assert_clean(running.master, running.workers[0], running.workers[2])
        run = saved(tmp_path)
        survivors = [completed(told(sent(tmp_path, running.workers[number]))) for number in (0, 2)]
    assert survivors == [200, 200]
    assert 400 <= run["summary"]["total"]["outcomes"]["ok"] < 600
    assert run["meta"]["ended_early"]
    assert "the run ended early" in running.master.output


@pytest.mark.long
def test_a_forked_worker_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "9s", *forked(2))
    command = locust(*arguments, locustfile=reporting(tmp_path))
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: served(server)["completed"] > 5, "requests")
        children = [child.pid for child in psutil.Process(running.popen.pid).children()]
        wait_for(lambda: len(sent(tmp_path, children[0])) > 2, "reports")
        count = len(sent(tmp_path, children[0]))
        wait_for(lambda: len(sent(tmp_path, children[0])) > count, "another report")
        time.sleep(0.3)
        os.kill(children[0], signal.SIGKILL)
        assert running.wait() == 4
        run = saved(tmp_path)
        assert_holds(run, [told(sent(tmp_path, child)) for child in children])
        assert run["meta"]["missing_workers"] == [sent(tmp_path, children[0])[-1].report.worker]


@pytest.mark.long
def test_a_worker_that_is_killed_in_the_last_second_is_named_and_what_it_reported_counts(
    tmp_path: Path, server: str
) -> None:
    """Locust takes it for alive when the run ends, so its final state is waited for until Locust misses it."""
    arguments = headless(tmp_path, server, "-u", "9", "-r", "9", "-t", "6s", "--tags", "short")
    with cluster(tmp_path, arguments, 3, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(lambda: "All users spawned" in running.master.output, "users")
        count = len(sent(tmp_path, running.workers[2]))
        wait_for(lambda: len(sent(tmp_path, running.workers[2])) >= max(count + 1, 6), "the fifth second")
        time.sleep(0.3)
        running.workers[2].popen.kill()
        killed_s = time.monotonic()
        assert end(running) == 4
        assert time.monotonic() - killed_s < 20
        assert_clean(running.master, *running.workers[:2])
        run = assert_told(tmp_path, *running.workers)
        lost = sent(tmp_path, running.workers[2])[-1].report.worker
    assert run["meta"]["missing_workers"] == [lost]
    assert f"the final data of {lost} are missing" in " ".join(running.master.output.split())


@pytest.mark.long
def test_a_run_whose_workers_are_all_killed_ends_early_and_keeps_what_they_reported(
    tmp_path: Path, server: str
) -> None:
    """Locust ends a run when it misses the last worker, and then waits for the time to be over."""
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "60s", "--tags", "short")
    with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(lambda: all(len(sent(tmp_path, worker)) > 3 for worker in running.workers), "reports")
        time.sleep(0.3)
        for worker in running.workers:
            worker.popen.kill()
        assert running.master.wait(25) == 4
        assert "Traceback" not in running.master.output
        run = assert_told(tmp_path, *running.workers)
        names = sorted(sent(tmp_path, worker)[-1].report.worker for worker in running.workers)
    assert run["meta"]["ended_early"]
    assert sorted(run["meta"]["missing_workers"]) == names
    assert all(when(run, f"{name} lost") < 20 for name in names)
    assert "the run ended early" in running.master.output


@pytest.mark.long
def test_a_worker_that_was_given_up_stops_sending_when_it_hears_of_the_end(tmp_path: Path, server: str) -> None:
    """It stands still while the run ends, so nobody waits for it; Locust's own word to end reaches it later."""
    load = ["--request-rate", "20", "-u", "2", "-r", "2", "--tags", "short"]
    arguments = headless(tmp_path, server, *load, "-t", "8s")
    with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(lambda: all(len(sent(tmp_path, worker)) > 3 for worker in running.workers), "reports")
        running.workers[0].popen.send_signal(signal.SIGSTOP)
        assert running.master.wait() == 4
        running.workers[1].wait(20)
        running.workers[0].popen.send_signal(signal.SIGCONT)
        running.workers[0].wait(15)
        assert saved(tmp_path)["meta"]["missing_workers"] == [sent(tmp_path, running.workers[0])[-1].report.worker]


@pytest.mark.long
def test_a_worker_that_is_interrupted_hands_over_all_it_has_and_the_run_goes_on(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "9s")
    with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(progress(running), "progress")
        running.workers[1].interrupt()
        running.workers[1].wait(20)
        before = served(server)["completed"]
        assert running.master.popen.poll() is None
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
        run = assert_told(tmp_path, *running.workers)
        left = sent(tmp_path, running.workers[1])[-1].report.worker
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"] > before + 10
    assert run["meta"]["missing_workers"] == []
    assert when(run, f"{left} left") < 9


# 56: less than was asked for


def test_case_56_a_run_whose_workers_never_came_is_no_success(tmp_path: Path, server: str) -> None:
    """Sources: locustio/locust#3501, #1707, #571, #152."""
    arguments = [*headless(tmp_path, server, "-u", "2", "-t", "5s"), "--expect-workers", "3"]
    with cluster(tmp_path, [*arguments, "--expect-workers-max-wait", "3"], 1) as running:
        assert running.master.wait(30) not in (0, None)
        assert "Gave up waiting for workers" in running.master.output
        assert "Traceback" not in running.master.output
    assert not list((tmp_path / "results").glob("*"))
    assert served(server)["completed"] == 0


def test_case_56_a_run_that_is_ended_early_says_so_with_planned_and_actual_time_and_workers(
    tmp_path: Path, server: str
) -> None:
    with cluster(tmp_path, headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "60s")) as running:
        wait_for(lambda: served(server)["completed"] > 10, "requests")
        running.master.interrupt()
        assert end(running) == 1
        assert_clean(running.master, *running.workers)
        assert "the run ended early" in running.master.output
    run = saved(tmp_path)
    assert run["meta"]["ended_early"]
    assert run["meta"]["load"]["run_time_s"] == 60
    assert 0 < run["summary"]["duration_s"] < 30
    assert (len(run["meta"]["expected_workers"]), run["meta"]["missing_workers"]) == (2, [])


def test_case_56_a_run_without_a_request_is_no_success(tmp_path: Path, server: str) -> None:
    locustfile = tmp_path / "idle.py"
    locustfile.write_text(
        dedent("""
            import gevent
            from vllm_locust import ChatUser

            class Idle(ChatUser):
                scenario = "short"

                def on_start(self):
                    gevent.sleep(60)
        """)
    )
    arguments = headless(tmp_path, server, "-u", "2", "-r", "2", "-t", "3s")
    with cluster(tmp_path, arguments, 1, locustfile=locustfile) as running:
        assert end(running) == 1
        assert_clean(running.master, *running.workers)
    total = saved(tmp_path)["summary"]["total"]
    assert (total["requests"], total["ttft"]["p50"]) == (0, None)
    assert served(server)["completed"] == 0


# 57, 58: several runs, and resets, in the same processes

_TICKETS = """
from pathlib import Path

import gevent
from locust import task
from vllm_locust import ChatUser

TICKETS = Path({folder!r})


class Mine(ChatUser):
    @task
    def ask(self):
        for ticket in TICKETS.iterdir():
            try:
                ticket.unlink()
            except FileNotFoundError:
                continue  # another user, or another worker, has taken it
            body = {{"messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 8, "ignore_eos": True}}
            self.stream(body, scenario=ticket.name.partition("-")[0])
            return
        gevent.sleep(0.02)
"""


@dataclass(slots=True)
class Office:
    """A fleet with a web UI whose users send one request for each ticket."""

    folder: Path
    server: str
    browser: Browser
    running: Cluster
    metrics: int
    locustfile: Path

    def ask(self, scenario: str, number: int) -> None:
        """Have so many requests sent, the first of their epoch, and wait until they are in the UI, everywhere."""
        before = served(self.server)["completed"]
        wait_for(lambda: self.counts(scenario) == [0, 0], "rows of a new epoch")  # Locust caches them for two seconds
        for _ in range(number):
            (self.folder / "tickets" / f"{scenario}-{uuid.uuid4()}").touch()
        wait_for(lambda: served(self.server)["completed"] >= before + number, "answers")
        wait_for(lambda: min(self.counts(scenario)) >= number, "the same in all rows")
        assert served(self.server)["completed"] == before + number

    def counts(self, scenario: str) -> list[int]:
        """Return what our rows and Locust's own say of a scenario."""
        rows = (("TTFT", scenario), ("POST", f"/v1/chat/completions [{scenario}]"))
        return [self.browser.row(*row).get("num_requests", 0) for row in rows]

    def start(self) -> None:
        wait_for(lambda: self.browser.stats()["state"] in ("ready", "stopped"), "end of the run before")
        assert self.browser.swarm(user_count="4", spawn_rate="4", host=self.server)["success"]

    def stop(self) -> dict[str, Any]:
        """End the run, and return what was saved of it."""
        before = set((self.folder / "results").glob("*/run.json"))
        self.browser.post("stop")
        wait_for(lambda: set((self.folder / "results").glob("*/run.json")) - before, "run file")
        (path,) = set((self.folder / "results").glob("*/run.json")) - before
        return dict(json.loads(path.read_text()))

    def series(self, family: str) -> dict[str, float]:
        """Return the labels and the values of a family of metrics."""
        page = get(f"http://127.0.0.1:{self.metrics}/metrics")
        return {k: float(v) for k, v in re.findall(rf"^{family}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)}

    def ok(self) -> float:
        """Return how many answered requests the metrics have counted in all."""
        return sum(v for labels, v in self.series("vllm_locust_requests_total").items() if 'outcome="ok"' in labels)


@contextmanager
def office(folder: Path, server: str, *arguments: str, passing: str = "send()") -> Iterator[Office]:
    (folder / "tickets").mkdir()
    tickets = folder / "tickets_locustfile.py"
    tickets.write_text(_TICKETS.format(folder=str(folder / "tickets")))
    worker = reporting(folder, passing=passing, locustfile=tickets)
    port, metrics = free_port(), free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--results", str(folder / "results")]
    options += ["--prometheus-port", str(metrics), "--host", server, "--warmup", "0", "--window", "1s", *arguments]
    browser = Browser(f"http://127.0.0.1:{port}")
    with cluster(folder, options, locustfile=tickets, worker_locustfile=worker) as running:
        wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
        yield Office(folder, server, browser, running, metrics, worker)
        assert_clean(running.master, *running.workers)


_STALE = """
kept = globals().setdefault("kept", [])
if number == 2 or last:
    kept.append(send)
send()
for again in kept:
    again()
"""


@pytest.mark.long
def test_case_57_after_a_reset_there_is_what_came_after_it_and_rebalancing_resets_nothing(
    tmp_path: Path, server: str
) -> None:
    """Each report is followed by an old one, and by the last one before the reset.

    Sources: locustio/locust#91, #446, #1168, #2723.
    """
    with office(tmp_path, server, "--enable-rebalancing", passing=_STALE) as fleet:
        fleet.start()
        fleet.ask("mine", 100)
        fleet.browser.post("stats/reset")
        fleet.ask("mine", 50)
        assert fleet.counts("mine") == [50, 50]
        with join(fleet.running, tmp_path, fleet.locustfile) as third:
            wait_for(lambda: len(fleet.browser.stats()["workers"]) == 3, "third worker")
            wait_for(lambda: len(sent(tmp_path, third)) > 3, "reports of the third worker")
            time.sleep(2.5)  # Locust caches the page for two seconds
            assert fleet.counts("mine") == [50, 50]
            run = fleet.stop()
            assert_clean(third)
        assert run["summary"]["total"]["outcomes"]["ok"] == run["summary"]["total"]["ttft"]["count"] == 50
        assert fleet.ok() == 150
        assert_holds(run, [told(sent(tmp_path, worker), epoch=1) for worker in (*fleet.running.workers, third)])


@pytest.mark.long
def test_case_58_further_runs_in_the_same_processes_hold_nothing_of_the_ones_before(
    tmp_path: Path, server: str
) -> None:
    """Sources: locustio/locust#2723, myzhan/locust4j#28."""
    with office(tmp_path, server) as fleet:
        pid = fleet.running.master.popen.pid
        for number, (scenario, requests) in enumerate([("one", 100), ("one", 30), ("two", 10)], 1):
            fleet.start()
            fleet.ask(scenario, requests)
            live = fleet.series("vllm_locust_streams_in_flight")
            assert all(f'scenario="{scenario}"' in labels for labels in live), live
            assert listening(pid) >= {fleet.metrics}
            run = fleet.stop()
            assert list(run["summary"]["scenarios"]) == [scenario]
            total = run["summary"]["total"]
            assert total["outcomes"]["ok"] == total["ttft"]["count"] == total["e2el"]["count"] == requests
            assert_holds(run, [told(sent(tmp_path, worker)) for worker in fleet.running.workers])
            assert len(list((tmp_path / "results").glob("*/run.json"))) == number
        assert fleet.ok() == 140
        assert not any(fleet.metrics in listening(worker.popen.pid) for worker in fleet.running.workers)


@pytest.mark.long
def test_a_worker_that_stood_still_while_a_run_ended_takes_part_in_the_next_one(tmp_path: Path, server: str) -> None:
    with office(tmp_path, server, "--stop-timeout", "2") as fleet:
        fleet.start()
        fleet.ask("one", 40)
        still = fleet.running.workers[0]
        still.popen.send_signal(signal.SIGSTOP)
        wait_for(lambda: "is lost" in fleet.running.master.output, "loss")
        first = fleet.stop()
        still.popen.send_signal(signal.SIGCONT)
        assert first["summary"]["total"]["outcomes"]["ok"] == 40
        assert len(first["meta"]["missing_workers"]) == 1
        wait_for(lambda: [w["state"] for w in fleet.browser.stats()["workers"]] == ["ready"] * 2, "both workers")
        fleet.start()
        fleet.ask("one", 30)
        second = fleet.stop()
        assert second["summary"]["total"]["outcomes"]["ok"] == 30
        assert second["meta"]["missing_workers"] == []
        assert_holds(second, [told(sent(tmp_path, worker)) for worker in fleet.running.workers])
        assert fleet.ok() == 70


def listening(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


# 59, 61: messages, and what may become of them

_UNREADABLE = """
if number == 3:
    import msgspec
    from locust.rpc import Message
    from vllm_locust.recording import decode_report

    other = decode_report(data["report"])
    other.format += 1
    for harmed in (b"garbage", msgspec.msgpack.encode(other), "text"):
        runner.client.send(Message(REPORT, {**data, "report": harmed}, runner.client_id))
    for harmed in ({"nothing": 1}, {"report": data["report"]}, None):
        runner.client.send(Message(REPORT, harmed, runner.client_id))
send()
"""


def test_case_61_a_report_that_cannot_be_read_costs_one_line_in_the_log_and_nothing_else(
    tmp_path: Path, server: str
) -> None:
    """Sources: sky-uk/mite#141, myzhan/locust4j#27."""
    harmed = reporting(tmp_path, passing=_UNREADABLE)
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", "-t", "4s")
    with cluster(tmp_path, arguments, 1, worker_locustfile=harmed) as running:
        end(running)
        lines = [line for line in running.master.output.splitlines() if "/ERROR/" in line]
        assert "Traceback" not in running.master.output
        run = assert_told(tmp_path, *running.workers)
    assert len(lines) == 6, running.master.output
    assert "6 reports of workers could not be read" in run["meta"]["remarks"]
    assert all("cannot be read and is dropped" in line for line in lines)
    assert any(f"format {FORMAT + 1}" in line for line in lines)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]


def test_cases_59_and_61_a_worker_sends_one_bounded_message_per_interval_that_travels_unharmed(
    tmp_path: Path,
) -> None:
    """Sources: GoogleCloudPlatform/ai-on-gke#766, locustio/locust#255; sky-uk/mite#141."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    name = 'a/b "q"'
    (tmp_path / "odd.toml").write_text(f'[part."{json.dumps(name)[1:-1]}"]\nprompts = "p.jsonl"\nmax_tokens = 20\n')
    with simulator(tmp_path, "--ttft", "5ms", "--itl", "1ms", "--seats", "200") as url:
        arguments = headless(tmp_path, url, "-u", "60", "-r", "60", "-t", "6s", "--scenario", "odd.toml")
        with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path)) as running:
            end(running)
            run = assert_told(tmp_path, *running.workers)
            assert run["summary"]["total"]["outcomes"]["ok"] == served(url)["completed"] > 300
            messages = [kinds(tmp_path, worker) for worker in running.workers]
            reports = [one for worker in running.workers for one in sent(tmp_path, worker)]
    assert list(run["summary"]["scenarios"]) == [name]
    for counted in messages:
        # One at the start, one per interval, one or two at the end; and what tells of the warm-up, once.
        assert 5 <= counted[REPORT] <= 6 / TICK_S + 4
        assert counted.total() - counted[REPORT] <= 4
    assert max(len(one.data) for one in reports) < 50_000
    for one in reports:
        message = {"report": one.data, "last": one.last}
        for options in ({"raw": False, "strict_map_key": False}, {}):  # as Locust unpacks, and as msgpack would
            travelled = msgpack.unpackb(msgpack.packb(message), **options)
            assert travelled == message
            assert decode_report(travelled["report"]) == one.report
        assert decode_report(encode_report(one.report)) == one.report


_HARM = """
import random
chance = globals().setdefault("chance", random.Random(os.getpid())).random()
if chance < 0.3:
    pass  # lost
elif chance < 0.6:
    send()
    send()
elif chance < 0.8:
    gevent.spawn_later(1.5, send)  # behind its successors
else:
    send()
"""


@pytest.mark.long
def test_reports_that_are_lost_repeated_or_late_leave_the_totals_as_they_are(tmp_path: Path, server: str) -> None:
    """A final state that is lost is sent again, until the master has said that it is there."""
    arguments = headless(tmp_path, server, "-u", "8", "-r", "8", "-t", "5s", "--window", "1s")
    with cluster(tmp_path, arguments, worker_locustfile=reporting(tmp_path, passing=_HARM)) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
        run = assert_told(tmp_path, *running.workers)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]


@pytest.mark.long
def test_a_master_that_stands_still_for_three_seconds_loses_neither_workers_nor_numbers(
    tmp_path: Path, server: str
) -> None:
    arguments = headless(tmp_path, server, "-u", "9", "-r", "9", "-t", "12s")
    with cluster(tmp_path, arguments, 3, worker_locustfile=reporting(tmp_path)) as running:
        wait_for(progress(running), "progress")
        running.master.popen.send_signal(signal.SIGSTOP)
        time.sleep(3)
        running.master.popen.send_signal(signal.SIGCONT)
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
        run = assert_told(tmp_path, *running.workers)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]
    assert not any("lost" in remark for remark in run["meta"]["remarks"])


# 62: tags, weights, and workers that are set up differently


@pytest.mark.long
def test_case_62_the_masters_tags_hold_on_workers_in_the_first_run_and_in_later_ones(
    tmp_path: Path, server: str
) -> None:
    """Sources: locustio/locust#1882, #1689, #2849, #2994."""
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", server]
    options += ["--results", str(tmp_path / "results"), "--tags", "short"]
    browser = Browser(f"http://127.0.0.1:{port}")
    with cluster(tmp_path, options) as running:
        wait_for(lambda: len(browser.stats()["workers"]) == 2, "workers")
        for number in (1, 2):
            wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "end of the run before")
            assert browser.swarm(user_count="6", spawn_rate="6", host=server)["success"]
            wait_for(lambda: browser.stats()["state"] == "running", "users")
            wait_for(lambda: served(server)["completed"] > 40 * number, "requests")  # noqa: B023
            browser.post("stop")
            wait_for(lambda: len(list((tmp_path / "results").glob("*/run.json"))) == number, "run file")  # noqa: B023
        assert_clean(running.master, *running.workers)
    for path in (tmp_path / "results").glob("*/run.json"):
        assert list(json.loads(path.read_text())["summary"]["scenarios"]) == ["short"]


@pytest.mark.long
def test_case_62_a_class_that_is_left_with_nothing_to_send_is_left_out_with_a_warning_on_a_fleet_too(
    tmp_path: Path, server: str
) -> None:
    locustfile = tmp_path / "two.py"
    locustfile.write_text(
        "from vllm_locust import ChatUser\n"
        "class Brief(ChatUser):\n    scenario = 'short'\n"
        "class Reader(ChatUser):\n    scenario = 'long'\n"
    )
    arguments = headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "3s", "--tags", "short")
    with cluster(tmp_path, arguments, locustfile=locustfile) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
        assert "no part is left for user class Reader; it was left out" in running.master.output
    run = saved(tmp_path)
    assert list(run["summary"]["scenarios"]) == ["short"]
    assert run["summary"]["total"]["rates"]["in_flight_peak"] == 4


@pytest.mark.long
def test_case_62_a_report_has_every_scenario_also_those_that_no_user_was_spawned_for(
    tmp_path: Path, server: str
) -> None:
    """Five classes on five workers, with a user for each, and then with users for three of them."""
    names = [f"part{number}" for number in range(5)]
    text = ["from vllm_locust import ChatUser"]
    for name in names:
        (tmp_path / f"{name}.toml").write_text(f'[part.{name}]\nprompts = "p.jsonl"\nmax_tokens = 8\n')
        text.append(f"class {name.title()}(ChatUser):\n    scenario = '{name}.toml'")
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "five.py").write_text("\n".join(text))
    for users, folder in ((5, tmp_path / "all"), (3, tmp_path / "some")):
        folder.mkdir()
        arguments = headless(folder, server, "-u", str(users), "-r", "5", "-t", "3s")
        with cluster(folder, arguments, 5, locustfile=tmp_path / "five.py") as running:
            end(running)
            assert_clean(running.master, *running.workers)
        scenarios = saved(folder)["summary"]["scenarios"]
        assert sorted(scenarios) == names
        idle = [scope for scope in scenarios.values() if scope["requests"] == 0]
        assert len(idle) == 5 - users
        assert all((scope["ttft"]["p50"], scope["ttft"]["count"]) == (None, 0) for scope in idle)
        shown = re.findall(r"^(part\d) +(\d+)", running.master.output, re.MULTILINE)
        assert [name for name, _ in shown] == names


def test_case_62_workers_with_prompts_of_their_own_send_those_of_the_master(tmp_path: Path, server: str) -> None:
    """The log of requests has what was really sent."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, prompt in ((here, "the master's"), (there, "the worker's")):
        folder.mkdir()
        (folder / "mine.toml").write_text('[part.a]\nprompts = "p.jsonl"\nmax_tokens = 4\n')
        (folder / "p.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        (folder / "mine.py").write_text(
            "from vllm_locust import ChatUser\nclass Mine(ChatUser):\n    scenario = 'mine.toml'\n"
        )
    logged = ["--request-log", "--log-text"]
    arguments = headless(here, server, "-u", "4", "-r", "4", "-t", "2s", *logged)
    own = there / "mine.py"
    with cluster(here, arguments, locustfile=here / "mine.py", worker_locustfile=own, worker_folder=there) as running:
        assert end(running) == 0
        assert_clean(running.master, *running.workers)
    (path,) = (here / "results").glob("*/requests.jsonl")
    text = path.read_text()
    assert text.count("the master's") >= len(text.splitlines()) > 10
    assert "the worker's" not in text


# 63: processes and ports


@pytest.mark.long
def test_case_63_forked_workers_leave_the_metrics_to_their_master_and_users_are_counted_once(
    tmp_path: Path, server: str
) -> None:
    """And a second master is refused its port before it sends anything, and a restart within a second gets it.

    Sources: locustio/locust#3507, #2908, #12; prometheus/client_python#155.
    """
    port = free_port()
    arguments = [*headless(tmp_path, server, "-u", "4", "-r", "4"), "--prometheus-port", str(port)]
    with process(locust(*arguments, *forked(2)), tmp_path / "first.log", cwd=tmp_path) as running:
        wait_for(lambda: "vllm_locust_users 4.0" in get(f"http://127.0.0.1:{port}/metrics"), "users")
        master = psutil.Process(running.popen.pid)
        family = [master, *master.children(recursive=True)]
        assert len(family) == 3
        assert [member.pid for member in family if port in listening(member.pid)] == [master.pid]
        assert "vllm_locust_workers 2.0" in get(f"http://127.0.0.1:{port}/metrics")
        second = locust(*arguments, "--master", "--master-bind-port", str(free_port()), "--expect-workers", "1")
        with process(second, tmp_path / "second.log", cwd=tmp_path) as other:
            assert other.wait(20) == 2
            assert (str(port) in other.output, "--prometheus-port" in other.output) == (True, True)
            assert "Traceback" not in other.output
        os.killpg(running.popen.pid, signal.SIGINT)
        assert running.wait() == 0
        assert_clean(running)
    assert saved(tmp_path)["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]
    again = locust(*arguments, "-t", "2s", *forked(2))
    with process(again, tmp_path / "again.log", cwd=tmp_path) as running:
        assert running.wait() == 0, running.output


def test_case_63_ctrl_c_on_the_parent_of_forked_workers_alone_loses_nothing(tmp_path: Path, server: str) -> None:
    arguments = headless(tmp_path, server, "-u", "6", "-r", "6", *forked(2))
    with process(locust(*arguments), tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: served(server)["completed"] > 20, "requests")
        running.interrupt()
        assert running.wait() == 0
        assert_clean(running)
    assert saved(tmp_path)["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]


@pytest.mark.long
def test_case_63_a_machine_of_forked_workers_takes_part_and_opens_no_port(tmp_path: Path, server: str) -> None:
    metrics = free_port()
    arguments = [*headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "4s"), "--prometheus-port", str(metrics)]
    with cluster(tmp_path, [*arguments, "--expect-workers", "2"], 0) as running:
        command: list[str] = running.master.popen.args  # type: ignore[assignment]
        port = command[command.index("--master-bind-port") + 1]
        parent = locust("--worker", "--processes", "2", "--master-port", port, "--prometheus-port", str(metrics))
        with process(parent, tmp_path / "forked.log", cwd=tmp_path) as workers:
            wait_for(lambda: served(server)["completed"] > 5, "requests")
            family = [psutil.Process(workers.popen.pid), *psutil.Process(workers.popen.pid).children(recursive=True)]
            assert not any(metrics in listening(member.pid) for member in family)
            assert running.master.wait() == 0, running.master.output
            workers.wait(20)
            assert_clean(running.master, workers)
    run = saved(tmp_path)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(server)["completed"]
    assert len(run["meta"]["expected_workers"]) == 2
