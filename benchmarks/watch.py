"""One run of one tool: the emitter on one core, the tool on the other, and what the tool cost as seen from outside.

CPU time is that of all processes of the tool from the first request until everything that was sent has been read, so
neither start-up nor the writing of results counts; peak memory is the most that they held by then, start-up included.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tools

_EMITTER = Path(__file__).with_name("emitter.py")
_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.05
_OPEN = ("01", "08")
"""Sockets that are established, or that the emitter has closed: tcp_states.h."""


class RunError(Exception):
    """Why a run says nothing."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tool took from the first request until all that was sent to it had been read."""

    cpu_s: float
    core_cpu_s: float
    """CPU time of everything on the tool's core; what is beyond the tool's own was not to be had."""
    read_s: float
    """How long that was."""
    behind_s: float
    """How much of it came after the last emission."""
    peak_bytes: int
    """The most memory until then, start-up included."""


@dataclass(frozen=True, slots=True)
class Watched:
    """One run: the tool's words, the truth, and the cost."""

    found: tools.Found
    emitted: dict[str, list[int]]
    """Times of emission by request, in nanoseconds of the monotonic clock."""
    arrived: dict[str, int]
    """When the last segment of each request arrived, on the same clock."""
    cost: Cost
    core_share: float
    """How much of its core the emitter used."""
    late_p99_us: float
    """How late the emitter was by its own schedule."""


def run(tool: tools.Tool, load: tools.Load, folder: Path, timeout_s: float) -> Watched:
    """Run a tool once; raises `RunError` where it fails or takes too long."""
    deadline_s = time.monotonic() + timeout_s
    with _process(_emitter(load, folder), 1) as emitter, (folder / "output.txt").open("wb") as output:
        lines = _Lines(emitter, deadline_s)
        port = int(lines.read())
        environment = tool.full_environment(folder) | {"BENCH_TOKENS": str(load.tokens)}
        command = tool.command(load, port, folder)
        with _process(command, 0, output=output, env=environment, cwd=folder) as process:
            lines.beside = process
            cost = _watch(lines, process.pid, port, deadline_s)
            emitter_cost = json.loads(lines.read())
            _wait(process, deadline_s)
    if emitter_cost["given_up"]:
        raise RunError(f"{emitter_cost['given_up']} streams were given up: too far behind, or gone")
    try:
        found = tool.read(load, folder)
    except (OSError, StopIteration, KeyError, TypeError, ValueError) as error:
        raise RunError(f"left no results ({error!r})") from error
    emitted, arrived = (json.loads((folder / name).read_text()) for name in ("truth.json", "arrivals.json"))
    return Watched(found, emitted, arrived, cost, emitter_cost["core_share"], emitter_cost["late_p99_us"])


def _watch(lines: "_Lines", leader: int, port: int, deadline_s: float) -> Cost:
    lines.read()
    begun_s, cpu_s, core_cpu_s = time.monotonic(), _cpu_s(leader), _core_cpu_s(0)
    lines.read()
    sent_s = time.monotonic()
    _wait_until_read(port, deadline_s)
    read_s = time.monotonic()
    cpu_s, core_cpu_s = _cpu_s(leader) - cpu_s, _core_cpu_s(0) - core_cpu_s
    return Cost(cpu_s, core_cpu_s, read_s - begun_s, read_s - sent_s, _peak_bytes(leader))


def allow_many_sockets() -> None:
    """Let this process and all that it starts open as many files as the machine permits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _emitter(load: tools.Load, folder: Path) -> list[str]:
    options = {
        "streams": load.streams,
        "rate": load.rate,
        "tokens": load.tokens,
        "truth": folder / "truth.json",
        "arrivals": folder / "arrivals.json",
    }
    flags = ["--stay", *(["--broken"] if load.broken else [])]
    return [sys.executable, str(_EMITTER), *flags, *(f"--{name}={value}" for name, value in options.items())]


@contextmanager
def _process(command: list[str], core: int, *, output: Any = subprocess.PIPE, **more: Any) -> Iterator[Any]:
    """Start a process, the leader of its session, on one of the cores, and end it and its children at last."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_core(core)})
    errors = None if output is subprocess.PIPE else subprocess.STDOUT
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True, **more
    )
    os.sched_setaffinity(0, cores)
    try:
        yield process
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _core(number: int) -> int:
    """Return one of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


class _Lines:
    """The emitter's lines, which stop coming where the tool beside it has gone."""

    def __init__(self, emitter: subprocess.Popen[bytes], deadline_s: float) -> None:
        assert emitter.stdout is not None
        self.beside: subprocess.Popen[bytes] | None = None
        self._fd = emitter.stdout.fileno()
        self._deadline_s = deadline_s
        self._read = b""

    def read(self) -> str:
        while b"\n" not in self._read:
            if select.select([self._fd], [], [], 0.5)[0]:
                data = os.read(self._fd, 4096)
                if not data:
                    raise RunError("the emitter has gone")
                self._read += data
            elif time.monotonic() > self._deadline_s:
                raise RunError("took too long")
            elif self.beside is not None and self.beside.poll() is not None:
                raise RunError(f"ended before its streams did, with exit code {self.beside.returncode}")
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RunError("took too long to end") from None


def _wait_until_read(port: int, deadline_s: float) -> None:
    """Wait until no socket that is connected to a port of this machine holds anything unread."""
    while _unread_bytes(port):
        if time.monotonic() > deadline_s:
            raise RunError("took too long to read what was sent")
        time.sleep(_POLL_S)


def _unread_bytes(port: int) -> int:
    """Return what clients of a port have not read, and what could not even be sent to them: proc_net_tcp.txt."""
    ending = f":{port:04X}"
    unread = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_ = line.split()
        sending, received = (int(length, 16) for length in queues.split(":"))
        if state in _OPEN:
            unread += sending if local.endswith(ending) else received if remote.endswith(ending) else 0
    return unread


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _stat(pid)[3:4] == [str(leader)]]


def _stat(pid: int) -> list[str]:
    """Return what proc_pid_stat(5) says of a process from the state on; nothing once it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _cpu_s(leader: int) -> float:
    """Return the CPU time that the processes of a session have used, with that of children that have gone."""
    return sum(sum(map(int, _stat(pid)[11:15])) for pid in _session(leader)) / _TICKS


def _core_cpu_s(number: int) -> float:
    """Return the time that a core has spent on anything but waiting, all its processes and the kernel."""
    name = f"cpu{_core(number)}"
    times = next(line.split() for line in Path("/proc/stat").read_text().splitlines() if line.split()[0] == name)
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, times[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / _TICKS


def _peak_bytes(leader: int) -> int:
    """Return the most memory that the processes of a session have held, as a sum."""
    lines = [line for pid in _session(leader) for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
