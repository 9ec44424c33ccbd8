"""The main job in one command: a simulator, a master and two workers as processes, a minute of load, the report.

Or the stability test: stages find the last rate that meets a limit, and three quarters of it are held for five minutes.

Everything that it starts is gone afterwards, also after Ctrl-C: the processes are in sessions of their own, so that the
interrupt reaches the master alone, which ends the run in order; whatever is left then is ended by its process id.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_locust.child import ended, started
from vllm_locust.errors import ExitCode, TargetError
from vllm_locust.results import FILE_NAME, load
from vllm_locust.stages import last_met

_READY_S = 20.0
_SEATS = "32"
"""Of the simulator in the stability test: few enough for its stages to show where it is full, at some 26 requests/s,
and enough for each scenario to have the requests in a window that the verdict needs."""
_OF_LAST_RATE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What to run."""

    locustfile: Path
    host: str | None
    """A server to measure; absent: the embedded simulator."""
    load: tuple[str, ...]
    """What to ask of it, as options of `locust`."""
    results: str
    prometheus_port: int
    extra: tuple[str, ...] = ()
    """More options for `locust`."""


def run(demo: Demo) -> int:
    """Run it with everything on this machine; returns the exit code of the master, which is that of the run."""
    with _server(demo.host) as host:
        return _run(demo, host, "demo")


def run_stability(demo: Demo, locustfile: Path, *, stages: str, stage_time: str, limit: str) -> int:
    """Find a rate by stages, and test the server at three quarters of it; returns the exit code of that test."""
    with _server(demo.host, "--seats", _SEATS) as host:
        finding = ("--request-rate", "stages", "--stages", stages, "--stage-time", stage_time, "--limit", limit)
        code = _run(replace(demo, load=finding), host, "demo-stages")
        rate = _last_rate(Path(demo.results))
        if rate is None:
            print(f"vllm-locust: no stage met {limit}, so there is no rate to test at", file=sys.stderr)  # noqa: T201 - the user's terminal
            return code or int(ExitCode.MISSED)
        holding = (*demo.load, "--request-rate", f"{_OF_LAST_RATE * rate:g}", "--limit", limit)
        return _run(replace(demo, locustfile=locustfile, load=holding), host, "demo-stability")


def _last_rate(directory: Path) -> float | None:
    """Return the last rate that met the limit, of the stages that have just been run."""
    saved = max(directory.glob(f"demo-stages_*/{FILE_NAME}"), key=lambda path: path.stat().st_mtime_ns, default=None)
    last = None if saved is None else last_met(load(saved).summary["stages"])
    return None if last is None else float(last["value"])


@contextmanager
def _server(host: str | None, *options: str) -> Iterator[str]:
    if host is not None:
        yield host
        return
    with _simulator(*options) as url:
        yield url


def _run(demo: Demo, host: str, name: str) -> int:
    with ExitStack() as running:
        port = str(_free_port())
        locust = [sys.executable, "-m", "locust", "-f", str(demo.locustfile)]
        for _ in range(2):
            running.enter_context(started([*locust, "--worker", "--master-port", port, "--loglevel", "WARNING"]))
        master = [*locust, "--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        how = ["--headless", "--only-summary", "--expect-workers", "2", "--expect-workers-max-wait", "30"]
        where = ["--results", demo.results, "--prometheus-port", str(demo.prometheus_port), "--name", name]
        process = running.enter_context(started([*master, *how, "--host", host, *demo.load, *where, *demo.extra]))
        return ended(process)


@contextmanager
def _simulator(*options: str) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "vllm_locust", "simulate", "--port", str(port), "--quiet", *options]
    with started(command) as process:
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
