"""Measures the open loop: how many of the requests that are due really leave, and how late.

For each point, a real Locust master and its workers send at a rate to a simulated server, which counts what arrives.
Workers have one core, all else the other one. Exits with 1 if a request that was due did not arrive at the server, else
with 0, whatever the figures.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench import machine, on_core, table
from local import free_port, running

_LOCUSTFILE = """
from vllm_locust import ChatUser


class Chat(ChatUser):
    scenario = "bench.toml"
"""
_SCENARIO = '[part.bench]\nprompts = "bench.jsonl"\noutput_tokens = 8\n'
_PROMPT = '{"prompt": "How long is a piece of string?"}\n'
_SERVER = ("--ttft", "20ms", "--itl", "5ms", "--seats", "1000", "--quiet")


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured at once, and the targets, by figure."""

    rate: int
    process: str
    workers: int
    seconds: int
    targets: dict[str, float]

    def __str__(self) -> str:
        return f"{self.rate}/s {self.process}, {self.workers} worker{'s' * (self.workers > 1)}"


_QUEUE = {"queue p99, ms": 2.0}
_ALWAYS = {"lost": 0.0, "off the offered rate, %": 0.5}
POINTS = (
    Point(50, "constant", 3, 60, {**_ALWAYS, **_QUEUE, "off the asked rate, %": 0.5}),
    Point(50, "poisson", 3, 60, {**_ALWAYS, **_QUEUE}),
    Point(500, "constant", 1, 20, {**_ALWAYS, "off the asked rate, %": 0.5}),
    Point(500, "poisson", 1, 20, _ALWAYS),
)
_DECIMALS = {"requests due": 0, "lost": 0, "queue p50, ms": 2, "queue p99, ms": 2, "off the offered rate, %": 2}
_DECIMALS |= {"off the asked rate, %": 2, "core of the busiest worker, %": 0, "core of the server, %": 0}


def measure(point: Point, seconds: float) -> dict[str, float]:
    """Run it, and return the figures."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder, port, bind = Path(name), free_port(), str(free_port())
        log = folder / "output.txt"
        for file, text in (("locustfile.py", _LOCUSTFILE), ("bench.toml", _SCENARIO), ("bench.jsonl", _PROMPT)):
            (folder / file).write_text(text)
        url = f"http://127.0.0.1:{port}"
        with on_core(1):
            simulate = [sys.executable, "-m", "vllm_locust", "simulate", "--port", str(port), *_SERVER]
            server = psutil.Process(started.enter_context(running(simulate, log)).pid)
        _wait_for(url)
        with on_core(0):
            for _ in range(point.workers):
                started.enter_context(running([*_LOCUST, "--worker", "--master-port", bind], log))
        before, began_s = sum(server.cpu_times()[:2]), time.monotonic()
        run = ["--request-rate", str(point.rate), "--arrivals", point.process, "-t", f"{seconds:g}s", "--warmup", "0"]
        master = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", bind, "--expect-workers"]
        where = ["--headless", "--only-summary", "--host", url, "--results", "results", "--prometheus-port", "0"]
        with on_core(1), running([*_LOCUST, *master, str(point.workers), *where, *run], log) as leading:
            if leading.wait(seconds + 60) > 4:
                raise RuntimeError(log.read_text())
        used, passed_s = sum(server.cpu_times()[:2]) - before, time.monotonic() - began_s
        (saved,) = folder.glob("results/*/run.json")
        return _figures(point, json.loads(saved.read_text())["summary"], _arrived(url)) | {
            "core of the server, %": 100 * used / passed_s
        }


def _figures(point: Point, summary: dict[str, Any], arrived: int) -> dict[str, float]:
    total = summary["total"]
    rates, queue = total["rates"], total["queue"]
    workers = summary["fidelity"]["workers"].values()
    return {
        "requests due": total["scheduled"],
        "lost": total["scheduled"] - arrived,
        "offered/s": rates["offered_per_s"],
        "achieved/s": rates["sent_per_s"],
        "off the offered rate, %": 100 * abs(rates["sent_per_s"] / rates["offered_per_s"] - 1),
        "off the asked rate, %": 100 * abs(rates["sent_per_s"] / point.rate - 1),
        **{f"queue {name}, ms": queue[name] * 1e3 for name in ("p50", "p99", "max")},
        "most in flight": rates["in_flight_peak"],
        "core of the busiest worker, %": 100 * max(worker["cpu_share"] for worker in workers),
    }


_LOCUST = [sys.executable, "-m", "locust", "-f", "locustfile.py"]


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _arrived(url: str) -> int:
    """Return how many streams the server says it has ended."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        ended = re.findall(r"^vllm:request_success_total\{.*\} ([\d.e+]+)$", page.read().decode(), re.MULTILINE)
    return round(sum(map(float, ended)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="length of each measurement (60 at 50/s, 20 at 500/s)")
    parser.add_argument("--rate", type=int, help="measure only the points of this rate")
    parser.add_argument("--arrivals", help="measure only the points of this process")
    options = parser.parse_args()
    print(machine(), flush=True)
    points = [
        point for point in POINTS if options.rate in (None, point.rate) and options.arrivals in (None, point.process)
    ]
    figures = [measure(point, options.seconds or point.seconds) for point in points]
    print(table(points, figures, _DECIMALS))
    return 1 if any(found["lost"] for found in figures) else 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    sys.exit(main())
