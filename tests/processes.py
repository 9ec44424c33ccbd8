"""Real processes for tests: simulators, Locust masters and workers, whose logs must be clean."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MIXED = ROOT / "locustfiles" / "mixed.py"


@dataclass(slots=True)
class Process:
    """A running process whose output goes to files."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    @property
    def output(self) -> str:
        """What it has written so far, both streams as they came."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 90) -> int:
        """Return the exit code."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self.popen.send_signal(signal.SIGINT)


@contextmanager
def process(command: list[str], log: Path, **kwargs: Any) -> Iterator[Process]:
    """Start a process in a session of its own, and end all of the session afterwards."""
    with log.open("wb") as out:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **kwargs
        )
    try:
        yield Process(popen, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


PORTS = range(11_000, 32_768)
"""None that a browser refuses, like 10080, and none that Linux gives to clients: net.ipv4.ip_local_port_range."""


def free_port() -> int:
    """Return a port that nobody listens on, and that the kernel gives to no client before somebody does."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    """Wait until a condition holds; it may raise OSError while it does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {timeout_s} s")


@contextmanager
def simulator(folder: Path, *flags: str) -> Iterator[str]:
    """Run a simulator; yields its address."""
    with simulator_process(folder, *flags) as (url, _):
        yield url


@contextmanager
def simulator_process(folder: Path, *flags: str) -> Iterator[tuple[str, Process]]:
    """Run a simulator; yields its address and itself."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_locust", "simulate", "--port", str(port), *flags]
    with process(command, folder / f"simulator-{port}.log") as running:
        wait_for(lambda: get(f"http://127.0.0.1:{port}/health") is not None or running.popen.poll(), "simulator")
        yield f"http://127.0.0.1:{port}", running


def get(url: str) -> str:
    """Return the body of a page."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def served(url: str, getter: Callable[[str], str] = get) -> dict[str, int]:
    """Return what a simulator says it has served: requests sent to their end, and tokens."""
    page = getter(f"{url}/metrics")
    reasons = re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} ([\d.e+]+)$', page, re.MULTILINE)
    tokens = re.findall(r"^vllm:generation_tokens_total\{.*\} ([\d.e+]+)$", page, re.MULTILINE)
    completed = sum(float(n) for reason, n in reasons if reason in ("stop", "length"))
    return {
        "completed": int(completed),
        "broken": int(sum(float(n) for reason, n in reasons) - completed),
        "tokens": int(sum(float(n) for n in tokens)),
    }


def locust(*arguments: str | Path, locustfile: Path = MIXED) -> list[str]:
    """Return the command of a Locust process."""
    return [sys.executable, "-m", "locust", "-f", str(locustfile), *map(str, arguments)]


def forked(workers: int) -> list[str]:
    """Return the options of a run whose master forks its workers, on a port of its own."""
    port = str(free_port())
    return ["--processes", str(workers), "--master-bind-port", port, "--master-port", port]


def headless(folder: Path, host: str, *arguments: str) -> list[str]:
    """Return the options of a run without a browser, whose results go to a folder."""
    results = str(folder / "results")
    return [
        *("--headless", "--only-summary", "--host", host, "--results", results, "--prometheus-port", "0"),
        *("--warmup", "0", *arguments),  # every request is in the latencies
    ]


@dataclass(slots=True)
class Cluster:
    """A master and its workers."""

    master: Process
    workers: list[Process]


@contextmanager
def cluster(  # noqa: PLR0913 - what differs between tests
    folder: Path,
    arguments: list[str],
    workers: int = 2,
    *,
    locustfile: Path = MIXED,
    worker_locustfile: Path | None = None,
    worker_folder: Path | None = None,
) -> Iterator[Cluster]:
    """Run a master, and workers which may live elsewhere."""
    port = str(free_port())
    with ExitStack() as started:
        command = locust("--worker", "--master-port", port, locustfile=worker_locustfile or locustfile)
        running = [
            started.enter_context(process(command, folder / f"worker-{number}.log", cwd=worker_folder or folder))
            for number in range(workers)
        ]
        bind = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        expected = ["--expect-workers", str(workers)] if workers else []
        master = locust(*bind, *expected, *arguments, locustfile=locustfile)
        yield Cluster(started.enter_context(process(master, folder / "master.log", cwd=folder)), running)


class Browser:
    """What the web UI sends."""

    def __init__(self, url: str) -> None:
        self.url = url

    def swarm(self, **form: str) -> dict[str, Any]:
        data = urllib.parse.urlencode(form).encode()
        with urllib.request.urlopen(f"{self.url}/swarm", data, timeout=30) as response:
            return dict(json.load(response))

    def post(self, path: str) -> None:
        try:
            urllib.request.urlopen(f"{self.url}/{path}", b"", timeout=90).close()
        except urllib.error.HTTPError as error:
            if error.code != 405:
                raise
            urllib.request.urlopen(f"{self.url}/{path}", timeout=90).close()  # as Locust had it before 2.45

    def stats(self) -> dict[str, Any]:
        return dict(json.loads(get(f"{self.url}/stats/requests")))

    def table(self, key: str) -> list[dict[str, Any]]:
        (rows,) = (table["data"] for table in self.stats()["extended_stats"] if table["key"] == key)
        return list(rows)

    def tab(self) -> dict[str, str]:
        return {row["of"]: row["note"] for row in self.table("llm") if row["note"]}

    def row(self, method: str, name: str) -> dict[str, Any]:
        return next((r for r in self.stats()["stats"] if (r["method"], r["name"]) == (method, name)), {})


def saved(folder: Path) -> dict[str, Any]:
    """Return the one run that was saved."""
    (path,) = (folder / "results").glob("*/run.json")
    return dict(json.loads(path.read_text()))


def when(run: dict[str, Any], happened: str) -> int:
    """Return the second of a saved run at which something happened, by how its remark begins."""
    (second,) = re.findall(rf"^(\d+) s: {re.escape(happened)}", "\n".join(run["meta"]["remarks"]), re.MULTILINE)
    return int(second)


def assert_clean(*processes: Process, but: str = "") -> None:
    """Check that nothing was logged as an error: Locust swallows what listeners raise."""
    for running in processes:
        lines = running.output.splitlines()
        bad = [line for line in lines if ("/ERROR/" in line or "Traceback" in line) and not (but and but in line)]
        assert not bad, running.output
