"""A server, a master and three workers on five machines: what the report says is what reached the server."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from namespaces import MACHINES, Machine, existing, machines
from processes import Process, assert_clean, headless, locust, process, saved, served, wait_for, when
from reporting import assert_holds, ended, reporting, sent, told

pytestmark = MACHINES

RATE = 12
"""Requests per second, a third of them from each worker."""
LOAD = ["--request-rate", str(RATE), "--arrivals", "constant", "-u", "3", "-r", "3"]
NAMES = ("server", "master", "client-1", "client-2", "client-3")


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs on the machines."""

    master: Process
    workers: dict[str, Process]
    machines: dict[str, Machine]
    url: str
    started_s: float

    def served(self) -> dict[str, int]:
        """Return what the simulator says it has served."""
        return served(self.url, self.machines["server"].get)

    def at(self, second: float) -> None:
        """Wait until so much of the run has passed."""
        time.sleep(max(0, self.started_s + second - time.monotonic()))

    def name(self, machine: str) -> str:
        """Return what the master calls the worker of a machine."""
        (found,) = {name for name in saved_names(self) if name.endswith(f"({machine})")}
        return found


def saved_names(fleet: Fleet) -> list[str]:
    return list(saved(fleet.master.log.parent)["meta"]["expected_workers"])


@contextmanager
def fleet(folder: Path, *arguments: str) -> Iterator[Fleet]:
    """Run the server, the master and the workers, each on a machine of its own."""
    with ExitStack() as started:
        hosts = dict(zip(NAMES, started.enter_context(machines(*NAMES)), strict=True))

        def run(machine: str, command: list[str]) -> Process:
            log = folder / f"{machine}.log"
            return started.enter_context(process(hosts[machine].command(*command), log, cwd=folder))

        simulate = ["-m", "vllm_locust", "simulate", "--bind", "0.0.0.0", "--ttft", "20ms", "--itl", "2ms"]
        run("server", [sys.executable, *simulate])
        url = f"http://{hosts['server'].address}:8000"
        wait_for(lambda: hosts["server"].get(f"{url}/health") is not None, "simulator")
        bound = ["--master", "--master-bind-host", hosts["master"].address, "--expect-workers", "3"]
        master = run("master", locust(*bound, *headless(folder, url, *LOAD, *arguments)))
        watched = reporting(folder)
        worker = locust("--worker", "--master-host", hosts["master"].address, locustfile=watched)
        workers = {name: run(name, worker) for name in NAMES[2:]}
        wait_for(lambda: all(sent(folder, running) for running in workers.values()), "first reports")
        yield Fleet(master, workers, hosts, url, time.monotonic())


def after(what: Callable[[], list[Any]]) -> None:
    """Wait until a worker has reported once more, and that has arrived."""
    before = len(what())
    wait_for(lambda: len(what()) > before, "another report")
    time.sleep(0.3)


def assert_totals(folder: Path, running: Fleet) -> dict[str, Any]:
    """Check that the master holds what each worker last told it; returns the run."""
    run = saved(folder)
    assert_holds(run, [told(sent(folder, worker)) for worker in running.workers.values()])
    return run


def test_every_machine_takes_part_and_the_totals_are_the_servers_count(tmp_path: Path) -> None:
    with fleet(tmp_path, "-t", "5s") as running:
        assert running.master.wait() == 0, running.master.output
        for worker in running.workers.values():
            worker.wait(20)
        counted = running.served()
        assert_clean(running.master, *running.workers.values())
        run = assert_totals(tmp_path, running)
    assert {name.partition(" (")[2] for name in run["meta"]["expected_workers"]} == {
        "client-1)",
        "client-2)",
        "client-3)",
    }
    assert run["meta"]["missing_workers"] == []
    assert run["summary"]["total"]["outcomes"]["ok"] == counted["completed"]
    assert run["summary"]["total"]["tokens"]["output_received"] == counted["tokens"]


@pytest.mark.long
def test_a_minute_with_a_cable_pulled_and_a_worker_killed_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    with fleet(tmp_path, "-t", "60s") as running:
        running.at(10)
        running.machines["client-2"].cut()
        running.at(20)
        running.machines["client-2"].restore()
        running.at(38)
        killed = running.workers["client-3"]
        after(lambda: sent(tmp_path, killed))
        killed.popen.kill()
        killed_s = time.monotonic() - running.started_s
        assert running.master.wait() == 4, running.master.output
        for name in ("client-1", "client-2"):
            running.workers[name].wait(20)
        counted = running.served()
        assert_clean(running.workers["client-1"], running.workers["client-2"])
        run = assert_totals(tmp_path, running)
        cut_off, lost = running.name("client-2"), running.name("client-3")
    ok = run["summary"]["total"]["outcomes"]["ok"]
    # What the killed worker had been answered since its last report is the server's alone: a third of a second or so.
    assert 0 <= counted["completed"] - ok <= RATE / 3 * 2
    for name in ("client-1", "client-2"):  # without a network, too, every request was due at its instant
        assert abs(ended(told(sent(tmp_path, running.workers[name]))) - 60 * RATE / 3) <= 1
    assert 11 <= when(run, f"{cut_off} lost") <= 17
    assert 20 <= when(run, f"{cut_off} back") <= 38
    assert killed_s + 1 <= when(run, f"{lost} lost") <= killed_s + 8
    assert run["meta"]["missing_workers"] == [lost]
    printed = " ".join(running.master.output.split())
    assert f"{lost} lost" in printed
    assert f"{cut_off} back" in printed


@pytest.mark.long
def test_a_worker_whose_cable_is_out_when_the_run_ends_is_named_and_nobody_waits_for_it_long(tmp_path: Path) -> None:
    with fleet(tmp_path, "-t", "12s") as running:
        running.at(9.5)
        after(lambda: sent(tmp_path, running.workers["client-1"]))
        running.machines["client-1"].cut()
        cut_off = len(sent(tmp_path, running.workers["client-1"]))
        assert running.master.wait(30) == 4, running.master.output
        assert time.monotonic() - running.started_s < 12 + 12
        for name in ("client-2", "client-3"):
            running.workers[name].wait(20)
        run = saved(tmp_path)
        heard = [sent(tmp_path, running.workers["client-1"])[:cut_off]]
        heard += [sent(tmp_path, running.workers[name]) for name in ("client-2", "client-3")]
        assert_holds(run, [told(reports) for reports in heard])
        assert run["meta"]["missing_workers"] == [running.name("client-1")]


def test_nothing_is_left_of_machines_also_where_a_test_fails() -> None:
    made: set[str] = set()

    def fail() -> None:
        with machines("one", "two"):
            made.update(existing())
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert len(made) == 3
    assert existing() == set()
