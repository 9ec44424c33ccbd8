"""How long a thread waited for a core, as Linux counts it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm_locust import cpu

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")


def burn(seconds: float) -> int:
    """Use a core for a while; returns how long this thread waited for one meanwhile."""
    before_ns, until = cpu.core_wait_ns(), time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    after_ns = cpu.core_wait_ns()
    assert before_ns is not None
    assert after_ns is not None
    return after_ns - before_ns


@LINUX
def test_two_who_share_a_core_wait_for_it_by_turns() -> None:
    before, core = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
    code = f"import os\nos.sched_setaffinity(0, {core})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as hog:
        try:
            assert hog.stdout is not None
            hog.stdout.readline()
            os.sched_setaffinity(0, core)
            waited_ns = burn(0.8)
        finally:
            os.sched_setaffinity(0, before)
            hog.kill()
    assert waited_ns >= 200_000_000


@LINUX
def test_each_thread_has_its_own() -> None:
    burn(0.01)
    mine = set(cpu._fds)
    thread = threading.Thread(target=burn, args=(0.01,))
    thread.start()
    thread.join()
    assert len(set(cpu._fds) - mine) == 1


_FORK = """
import os
from vllm_locust.cpu import core_wait_ns

assert core_wait_ns() is not None
if not os.fork():
    waited_ns, told_ns = core_wait_ns(), int(open("/proc/self/schedstat").read().split()[1])
    os._exit(0 if waited_ns <= told_ns else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@LINUX
def test_a_forked_worker_does_not_read_what_its_parent_waited() -> None:
    assert subprocess.run([sys.executable, "-c", _FORK], check=False).returncode == 0


@pytest.mark.parametrize("content", [None, "", "0 0 0\n", "not numbers"], ids=["no file", "empty", "zeros", "other"])
def test_where_nobody_counts_it_is_absent(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(cpu, "_PATH", str(path))
    monkeypatch.setattr(cpu, "_fds", {})
    assert cpu.core_wait_ns() is None
    assert cpu.core_wait_ns() is None


def test_reading_it_is_cheap_enough_to_be_done_often() -> None:
    cpu.core_wait_ns()
    taken_ns = []
    for _ in range(1000):
        before_ns = time.perf_counter_ns()
        cpu.core_wait_ns()
        taken_ns.append(time.perf_counter_ns() - before_ns)
    assert sorted(taken_ns)[500] < 20_000


def test_only_long_waits_add_up_and_short_turns_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ms, waited_ns = 1_000_000, [0]
    monkeypatch.setattr(cpu, "core_wait_ns", lambda: waited_ns[0])
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)
    wait, now_ns = cpu.CoreWait(), 0
    seen = []
    for passed_us, waited_us in ((5_000, 900), (5_000, 3_000), (500, 400), (1_500, 700), (2_000, 1_000), (900, 900)):
        now_ns += passed_us * 1000
        waited_ns[0] += waited_us * 1000
        seen.append(wait.look(now_ns) / ms)
    # The fourth has the third in it, as far as it can: nobody looked in between.
    assert seen == [0, 3, 0, 1.1, 1, 0]
    assert wait.take_ns() == 5.1 * ms
    assert wait.take_ns() == 0


def test_long_waits_are_absent_where_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "core_wait_ns", lambda: None)
    wait = cpu.CoreWait()
    assert wait.look(time.monotonic_ns() + 10**10) == 0
    assert wait.take_ns() is None
