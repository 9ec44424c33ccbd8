"""The main job in one command: a simulator, a master and two workers as processes, a minute of load, the report.

Everything that it starts is gone afterwards, also after Ctrl-C: the processes are in sessions of their own, so that the
interrupt reaches the master alone, which ends the run in order; whatever is left then is ended by its process id.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_locust.errors import ExitCode, TargetError

_READY_S = 20.0
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What to run."""

    locustfile: Path
    host: str | None
    """A server to measure; absent: the embedded simulator."""
    users: int
    run_time: str
    results: str
    prometheus_port: int
    extra: tuple[str, ...] = ()
    """More options for `locust`."""


def run(demo: Demo) -> int:
    """Run it with everything on this machine; returns the exit code of the master, which is that of the run."""
    with ExitStack() as started:
        host = demo.host or started.enter_context(_simulator())
        port = str(_free_port())
        locust = [sys.executable, "-m", "locust", "-f", str(demo.locustfile)]
        for _ in range(2):
            started.enter_context(_process([*locust, "--worker", "--master-port", port, "--loglevel", "WARNING"]))
        master = [*locust, "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        load = ["--headless", "--only-summary", "--expect-workers", "2", "--expect-workers-max-wait", "30"]
        what = ["--host", host, "-u", str(demo.users), "-r", str(demo.users), "-t", demo.run_time, "--name", "demo"]
        where = ["--results", demo.results, "--prometheus-port", str(demo.prometheus_port)]
        process = started.enter_context(_process([*master, *load, *what, *where, *demo.extra]))
        return _wait(process)


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the master, handing it what is sent to us."""
    interrupts = 0

    def interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        # The first one ends the run in order, the second one hurries that, the third one leaves.
        process.send_signal(signal.SIGINT if interrupts < 3 else signal.SIGKILL)  # noqa: PLR2004

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    code = process.wait()
    return code if code >= 0 else int(ExitCode.NOT_RUN)


@contextmanager
def _process(command: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    # Its own session: Ctrl-C in the terminal is ours to hand on. No stdin, or each would read the terminal's keys.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - our own words
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _simulator() -> Iterator[str]:
    port = _free_port()
    with _process([sys.executable, "-m", "vllm_locust", "simulate", "--port", str(port), "--quiet"]) as process:
        deadline = time.monotonic() + _READY_S
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    yield f"http://127.0.0.1:{port}"
                    return
            time.sleep(0.05)
        raise TargetError(f"the simulator did not come up on port {port} within {_READY_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_metrics_port(wanted: int) -> int:
    """Return the wanted port if it is free, else another one: a demo should not fail on a Prometheus next door."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return wanted if os.name == "nt" or probe.connect_ex(("127.0.0.1", wanted)) != 0 else _free_port()
