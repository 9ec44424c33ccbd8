"""Measures what workers cost their master: its share of a core with 1, 8 and 64 of them, how large a report gets, and
how long a scrape takes meanwhile.

A real Locust master, started as users start it, and one process that plays all workers: Locust's own worker runners and
ours, each with a recorder of its own, which is filled with samples where a worker would stream. The same without
vllm-locust shows what Locust takes for itself. Exits with 1 if a sample was lost, else with 0, whatever the figures.
"""

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gevent
import locust
import numpy as np
import psutil
from local import free_port
from locust import argument_parser
from locust.env import Environment
from locust.event import EventHook
from locust.runners import STATE_RUNNING, WorkerRunner

from vllm_locust import generator, slowest, worker
from vllm_locust.cell import Key, total
from vllm_locust.cluster import REPORT
from vllm_locust.recording import load
from vllm_locust.run import Phase
from vllm_locust.slowest import Slow

_START_S = 60
_SETTLE_S = 3
_SCRAPE_S = 5
"""As in docker-compose.yml."""
_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
"""How Prometheus asks."""
_USERS = 16
"""Locust users per worker; they do nothing."""
_LOCUSTFILES = {
    "vllm-locust": "from vllm_locust import ChatUser\n\nclass Reported(ChatUser):\n    scenario = 'mixed'\n",
    "Locust alone": "from locust import User\n\nclass Reported(User):\n    tasks = [print]\n",
}
_MS = 1_000_000


class Metric(NamedTuple):
    """How the samples of a metric are spread (log-normal), and how many of them there are per token event."""

    name: str
    median: float
    sigma: float
    per_event: float


_PER_REQUEST = 1 / 200
METRICS = (
    Metric("ttft", 250 * _MS, 0.6, _PER_REQUEST),
    Metric("itl", 30 * _MS, 0.4, 1),
    Metric("itl_max", 90 * _MS, 0.5, _PER_REQUEST),
    Metric("tpot", 31 * _MS, 0.2, _PER_REQUEST),
    Metric("e2el", 6_000 * _MS, 0.4, _PER_REQUEST),
    Metric("input_tokens", 800, 0.7, _PER_REQUEST),
    Metric("output_tokens", 200, 0.3, _PER_REQUEST),
    Metric("uncertainty", 0.02 * _MS, 0.8, 1),
    Metric("read_lag", 0.05 * _MS, 0.8, 1),
)
SCENARIOS = ("short", "long", "longform", "code")


# The reporters' process


class Reporter(generator.Generator):
    """A generator that makes its samples up: so many token events per second, spread over the scenarios."""

    def __init__(self, seed: int, events_per_s: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._rate = events_per_s / len(SCENARIOS)
        self._ids = itertools.count(seed << 32)
        self._fed_ns = time.monotonic_ns()
        self.counted: Counter[str] = Counter()

    def tick(self, users: int) -> Any:
        now_ns = time.monotonic_ns()
        if self.run.phase is Phase.RUNNING:
            events = round(self._rate * (now_ns - self._fed_ns) / 1e9)
            for number, scenario in enumerate(SCENARIOS):
                self._feed(scenario, 1 + number / 3, events, now_ns)
        self._fed_ns = now_ns
        return super().tick(users)

    def _feed(self, scenario: str, slower: float, events: int, now_ns: int) -> None:
        assert self.recorder is not None
        cell = self.recorder._windows.cell(Key(scenario, "chat"), now_ns)  # noqa: SLF001 - instead of timelines
        for metric in METRICS:
            size = self._rng.poisson(events * metric.per_event)
            values = self._rng.lognormal(np.log(metric.median * slower), metric.sigma, size).astype(np.int64)
            cell.histogram(metric.name).add_array(values)
            if metric.name in ("ttft", "itl_max"):
                self._add_slow(scenario, metric.name, values.tolist(), now_ns)
            self.counted[metric.name] += size
        requests = round(events * _PER_REQUEST)
        counts = {"sent": requests, "outcome|ok|200": requests, "finish|length": requests, "stamped": events}
        for name, number in {**counts, "token_events": events, "tokens_received": events}.items():
            cell.count(name, number)

    def _add_slow(self, scenario: str, metric: str, values_ns: list[int], now_ns: int) -> None:
        assert self.recorder is not None
        for value_ns in values_ns:
            slow = Slow(
                scenario=scenario,
                endpoint="chat",
                metric=metric,
                value_ns=value_ns,
                at_ns=now_ns - self.recorder.start_ns,
                worker=self.recorder.worker,
                request_id=f"{self.recorder.run}-Reported-{next(self._ids)}",
                input_tokens=800,
                output_tokens=200,
                in_flight=_USERS,
                outcome="ok",
            )
            slowest.add(self.recorder._slowest.lists, slow)  # noqa: SLF001 - instead of timelines


class Reported(locust.User):
    """The user of a worker, who leaves the work to the reporter."""

    tasks = (lambda _: None,)
    wait_time = locust.constant(3600)


@dataclass(slots=True)
class Played:
    """A worker that is played, and what it has sent."""

    runner: WorkerRunner
    reporter: Reporter
    sizes: list[int]


def play(port: int, count: int, events_per_s: int, *, ours: bool) -> list[Played]:
    """Connect so many workers to a master."""
    parser = argument_parser.get_empty_argument_parser()
    argument_parser.setup_parser_arguments(parser)
    options = parser.parse(args=[])
    defaults = dict.fromkeys(vars(options))
    argument_parser.default_args_dict = lambda: defaults  # 0.2 s for each
    played = []
    for number in range(count):
        environment = Environment(user_classes=[Reported], parsed_options=options)
        runner = environment.create_worker_runner("127.0.0.1", port)
        playing = Played(runner, Reporter(number, events_per_s), [])
        gevent.spawn(_end_requests, environment, events_per_s * _PER_REQUEST)
        if ours:
            environment.events.ttft, environment.events.itl = EventHook(), EventHook()
            _note_sizes(runner, playing.sizes)
            worker.Worker(environment, runner, playing.reporter)
        played.append(playing)
    return played


def _end_requests(environment: Environment, per_s: float) -> None:
    """Tell Locust of requests that have ended, for ever."""
    rng = np.random.default_rng(1)
    while True:
        gevent.sleep(1)
        for number in range(round(per_s)):
            scenario = SCENARIOS[number % len(SCENARIOS)]
            environment.events.request.fire(
                request_type="POST",
                name=f"/v1/chat/completions [{scenario}]",
                response_time=rng.lognormal(np.log(6000), 0.5),
                response_length=40_000,
            )


def _note_sizes(runner: WorkerRunner, sizes: list[int]) -> None:
    send = runner.send_message

    def send_message(kind: str, data: Any = None, client_id: str | None = None) -> None:
        if kind == REPORT:
            sizes.append(len(data["report"]))
        send(kind, data, client_id)

    runner.send_message = send_message


def report(port: int, count: int, events_per_s: int, kind: str) -> None:
    """Play the workers until their master has them quit; says when all are running, and at last what they sent."""
    ours = kind == "vllm-locust"
    played = play(port, count, events_per_s, ours=ours)
    until_s = time.monotonic() + _START_S
    while not all(p.runner.worker_state == STATE_RUNNING and (p.sizes or not ours) for p in played):
        if time.monotonic() > until_s:
            sys.exit("the machine is too busy: the master has lost workers before all were running")
        gevent.sleep(0.1)
    print("running", flush=True)
    for playing in played:
        playing.runner.greenlet.join()
    samples = sum((playing.reporter.counted for playing in played), Counter())
    print(json.dumps({"sizes": [size for playing in played for size in playing.sizes], "samples": samples}))


# The bench's own process


@dataclass(frozen=True, slots=True)
class Found:
    """What a master took, and what came to it."""

    share: float
    """Of a core."""
    sizes: list[int]
    """Of reports, in bytes."""
    lost: int
    """By how many samples the saved run differs from what was sent."""
    scrapes_s: list[float]
    """How long each scrape took, from the request to the last byte; none of Locust alone."""


def measure(kind: str, workers: int, seconds: float, events_per_s: int, server: str) -> Found:
    """Run a master with so many workers."""
    with tempfile.TemporaryDirectory() as name, _master(kind, workers, Path(name), server) as (master, port, metrics):
        command = [sys.executable, __file__, "--report", f"{port},{workers},{events_per_s},{kind}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reporters:
            try:
                assert reporters.stdout is not None
                assert reporters.stdout.readline() == "running\n", "the workers did not start"
                time.sleep(_SETTLE_S)
                share, scrapes_s = _watch(master, seconds, metrics)
                master.send_signal(signal.SIGINT)
                sent = json.loads(reporters.stdout.readline())
                master.wait(60)
            finally:
                reporters.kill()
        return Found(share, sent["sizes"], _lost(sent["samples"], Path(name)) if metrics else 0, scrapes_s)


def _watch(process: "subprocess.Popen[bytes]", seconds: float, metrics: int | None) -> tuple[float, list[float]]:
    """Return the share of a core that a process takes, scraped as Prometheus would where it has metrics, and how long
    the scrapes took."""
    before_s, start_s = _cpu_s(process), time.monotonic()
    scrapes_s = []
    scrapes = max(1, round(seconds / _SCRAPE_S))
    for _ in range(scrapes):
        time.sleep(seconds / scrapes)
        if metrics:
            asked_s = time.monotonic()
            request = urllib.request.Request(f"http://127.0.0.1:{metrics}/metrics", headers=_PROMETHEUS)
            urllib.request.urlopen(request).read()
            scrapes_s.append(time.monotonic() - asked_s)
    return (_cpu_s(process) - before_s) / (time.monotonic() - start_s), scrapes_s


def _cpu_s(process: "subprocess.Popen[bytes]") -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _lost(sent: dict[str, int], folder: Path) -> int:
    (path,) = folder.glob("results/*/run.json")
    found = total(load(json.loads(path.read_text())["recording"]).totals.values()).histograms
    return sum(abs(found[metric].count - number) for metric, number in sent.items())


@contextmanager
def _master(
    kind: str, workers: int, folder: Path, server: str
) -> Iterator[tuple["subprocess.Popen[bytes]", int, int | None]]:
    """Start a master; yields it, its port, and that of its metrics where it has any."""
    (folder / "locustfile.py").write_text(_LOCUSTFILES[kind])
    port, metrics = free_port(), free_port() if kind == "vllm-locust" else None
    command = [sys.executable, "-m", "locust", "--master", "--master-bind-host", "127.0.0.1"]
    command += ["--master-bind-port", str(port), "--headless", "--expect-workers", str(workers), "--host", server]
    command += ["--users", str(_USERS * workers), "--spawn-rate", str(_USERS * workers), "--stop-timeout", "1"]
    command += ["--prometheus-port", str(metrics)] if metrics else []
    with (folder / "master.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield process, port, metrics
    except Exception:
        print((folder / "master.log").read_text(), file=sys.stderr)
        raise
    finally:
        process.kill()
        process.wait()


@contextmanager
def _server() -> Iterator[str]:
    """Run a server for masters to ask what it serves; nobody else asks it anything."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_locust", "simulate", "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _told(found: Found) -> list[str]:
    """Return the columns about reports, none for Locust alone."""
    sizes = sorted(found.sizes)
    if not sizes:
        return []
    scrapes = [f"{seconds * 1000:.0f}" for seconds in (statistics.median(found.scrapes_s), max(found.scrapes_s))]
    return [f"{sizes[len(sizes) // 2] / 1000:.1f}", f"{sizes[-1] / 1000:.1f}", str(found.lost), *scrapes]


def _row(first: str, *cells: object) -> str:
    return f"{first:12}  " + "  ".join(f"{cell:>15}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,8,64", help="how many (1,8,64)")
    parser.add_argument("--seconds", type=float, default=30, help="length of each measurement (30)")
    parser.add_argument("--events", type=int, default=6400, help="token events per second of each worker (6400)")
    parser.add_argument("--ours-only", action="store_true", help="leave out Locust alone")
    parser.add_argument("--report", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        port, count, rate, kind = options.report.split(",")
        report(int(port), int(count), int(rate), kind)
        return 0
    counts = [int(count) for count in options.workers.split(",")]
    kinds = [kind for kind in _LOCUSTFILES if kind == "vllm-locust" or not options.ours_only]
    lost = 0
    with _server() as server:
        heads = (
            "workers",
            "share of a core",
            "ms/s per worker",
            "report, KB",
            "largest",
            "lost",
            "scrape, ms",
            "slowest",
        )
        print(_row("", *heads), flush=True)
        for kind, count in itertools.product(kinds, counts):
            found = measure(kind, count, options.seconds, options.events, server)
            print(
                _row(kind, count, f"{found.share:.3f}", f"{found.share / count * 1000:.2f}", *_told(found)), flush=True
            )
            lost += found.lost
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
