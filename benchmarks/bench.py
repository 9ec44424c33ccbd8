"""Measures the measuring: what a token event costs, and how far its time is from the truth.

For each number of streams, an emitter that knows its times (`emitter.py`) runs on one core and a generator on the
other: all that a Locust worker does for its streams, Locust itself left out. Afterwards the i-th time of each stream is
compared with the i-th emission. Exits with 1 if a stream or a token was lost, else with 0, whatever the figures.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gevent
import numpy as np

from vllm_locust import __version__, run, scenario
from vllm_locust.generator import Generator
from vllm_locust.prompts import Prompt
from vllm_locust.recording import Recording, decode_report, encode_report
from vllm_locust.timeline import Outcome, Timeline

_EMITTER = Path(__file__).with_name("emitter.py")
_RUN = "bench"
_USER_CLASS = "ChatUser"


class Targets(Protocol):
    """A column of a table."""

    @property
    def targets(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured at once, and the targets, by figure."""

    streams: int
    rate: float
    targets: dict[str, float]
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.streams:,} x {self.rate:g}/s{', TLS' if self.tls else ''}"


_ALWAYS = {"lost streams": 0, "gap error p99.9, µs": 1000, "peak memory per stream, KiB": 32}
POINTS = (
    Point(64, 47, {}),
    Point(256, 47, {**_ALWAYS, "gap error p99, µs": 20, "TTFT error p99, µs": 500, "CPU per token event, µs": 20}),
    Point(256, 47, {**_ALWAYS, "gap error p99, µs": 20, "TTFT error p99, µs": 500}, tls=True),
    Point(1000, 39, {**_ALWAYS, "gap error p99, µs": 50, "TTFT error p99, µs": 1000, "CPU per token event, µs": 15}),
)
_DECIMALS = {"lost streams": 0, "unstamped token events": 0, "token events": 0, "emitter's share of its core": 2}


# The generator's process


def generate(target: str, streams: int, tokens: int) -> dict[str, Any]:
    """Stream everything and return what it cost and what was measured."""
    generator = Generator()
    generator.begin(_start(target, tokens), lambda _: None)
    assert generator.recorder is not None
    # Keeps the times, which are compared later, for 0.05 µs per event.
    generator.recorder.itl_wanted = True
    timelines: list[Timeline] = []
    reports: list[bytes] = []
    before_bytes, before_s = _memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now: proc_pid_clear_refs(5)
    ticker = gevent.spawn(_tick_for_ever, generator, streams, reports)
    gevent.joinall([gevent.spawn(_stream, generator, timelines) for _ in range(streams)])
    ticker.kill()
    reports.append(encode_report(generator.finish(run.Finish(run=_RUN, windows=1, stop_timeout_s=0))))
    cpu_s, peak_bytes = time.process_time() - before_s, _memory("VmHWM")
    recording = Recording(_RUN, 0, run.Settings(target="", model="").window_ns)
    for report in reports:
        recording.merge(decode_report(report))
    return {
        "cpu_s": cpu_s,
        "unstamped": sum(cell.counters.get("unstamped", 0) for cell in recording.totals.values()),
        "bytes": peak_bytes - before_bytes - _kept_bytes(timelines),
        "lost": sum(not _whole(timeline, tokens) for timeline in timelines),
        "outcomes": sorted({f"{t.outcome}: {t.message}" for t in timelines}),
        "times": {t.request_id: [t.first_ns, t.gaps_ns().tolist()] for t in timelines if t.events},
    }


def _start(target: str, tokens: int) -> run.Start:
    prompt = Prompt(text="How long is a piece of string? ")
    part = scenario.Part(name="bench", prompts=(prompt,), output_tokens=tokens, extra_body={})
    return run.Start(
        version=__version__,
        run=_RUN,
        epoch=0,
        age_ns=0,
        run_age_ns=0,
        worker="worker",
        rank=0,
        ranks=1,
        settings=run.Settings(target=target, model="tiny", insecure=True, endpoints={_USER_CLASS: "chat"}),
        scenario_hash="",
        scenarios=run.encode_scenarios({_USER_CLASS: scenario.Scenario("bench", (part,))}),
    )


def _stream(generator: Generator, timelines: list[Timeline]) -> None:
    timelines.append(generator.stream(generator.next_request(_USER_CLASS), lambda _: None))


def _tick_for_ever(generator: Generator, users: int, reports: list[bytes]) -> None:
    while True:
        gevent.sleep(1)
        generator.harvest()
        report = generator.tick(users)
        reports.append(encode_report(report))
        assert generator.recorder is not None
        generator.recorder.acknowledge(report.seq)


def _kept_bytes(timelines: list[Timeline]) -> int:
    """Return what the times take that are kept for the comparison alone."""
    return sum(sys.getsizeof(choice.kept) for timeline in timelines for choice in timeline.choices.values())


def _whole(timeline: Timeline, tokens: int) -> bool:
    return timeline.outcome is Outcome.OK and timeline.events == timeline.completion_tokens == tokens


def _memory(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# The bench's own process


def measure(point: Point, seconds: float) -> dict[str, float]:
    """Run emitter and generator, each on its core, and return the figures."""
    tokens = round(point.rate * seconds)
    with tempfile.TemporaryDirectory() as folder, _emitter(point, tokens, Path(folder)) as (emitter, port, truth):
        scheme = "https" if point.tls else "http"
        command = [sys.executable, __file__, "--generate", f"{scheme}://127.0.0.1:{port},{point.streams},{tokens}"]
        with on_core(0):
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=seconds * 5 + 30).stdout
        found = json.loads(output)
        cost = json.loads(emitter.communicate(timeout=30)[0])
        emitted = json.loads(truth.read_text())
    if found["lost"]:
        print(f"{point}: {found['lost']} lost; outcomes: {found['outcomes']}", file=sys.stderr)
    first, gaps = _errors_us(found["times"], emitted)
    events = sum(len(times) for times in emitted.values())
    return {
        "token events": events,
        "lost streams": found["lost"],
        "unstamped token events": found["unstamped"],
        "CPU per token event, µs": found["cpu_s"] * 1e6 / events,
        "peak memory per stream, KiB": found["bytes"] / 1024 / point.streams,
        **{f"TTFT error p{q:g}, µs": np.percentile(first, q) for q in (50, 99)},
        **{f"gap error p{q:g}, µs": np.percentile(gaps, q) for q in (50, 99, 99.9)},
        "gap error max, µs": gaps.max(),
        "emitter's share of its core": cost["core_share"],
        "emitted late p99, µs": cost["late_p99_us"],
    }


@contextmanager
def _emitter(point: Point, tokens: int, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    truth = folder / "truth.json"
    what: dict[str, Any] = {"streams": point.streams, "rate": point.rate, "tokens": tokens, "truth": truth}
    if point.tls:
        what["certificate"] = _certificate(folder)
    command = [sys.executable, str(_EMITTER), *(f"--{name}={value}" for name, value in what.items())]
    with on_core(1):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline()), truth
    finally:
        process.kill()
        process.wait()


def _certificate(folder: Path) -> Path:
    pem, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", pem], check=True, capture_output=True)
    pem.write_text(pem.read_text() + key.read_text())
    return pem


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Let processes begin on one of the cores that this one may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


def _errors_us(measured: dict[str, Any], emitted: dict[str, list[int]]) -> tuple[Any, Any]:
    """Return how far off first tokens and gaps are, without sign."""
    first = [ns - emitted[name][0] for name, (ns, _) in measured.items()]
    gaps = [np.array(ns) - np.diff(emitted[name])[: len(ns)] for name, (_, ns) in measured.items()]
    return np.abs(np.array(first)) / 1e3, np.abs(np.concatenate(gaps)) / 1e3


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure; of lost streams, the most."""
    found = {name: float(np.median([figures[name] for figures in runs])) for name in runs[0]}
    return found | {"lost streams": max(figures["lost streams"] for figures in runs)}


def table(points: Sequence[Targets], figures: list[dict[str, float]], decimals: dict[str, int]) -> str:
    """Return one line per figure, one column per point, targets in brackets."""
    rows = [["", *(f"{point} (target)" for point in points)]]
    for name in figures[0]:
        cells = []
        for point, found in zip(points, figures, strict=True):
            target = f" (≤ {point.targets[name]:g})" if name in point.targets else ""
            cells.append(f"{found[name]:,.{decimals.get(name, 1)}f}{target}")
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def machine() -> str:
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores {names[0] if names else platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, gevent {gevent.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=11, help="length of each measurement (11)")
    parser.add_argument("--streams", type=int, help="measure only the point of so many streams")
    parser.add_argument("--repeat", type=int, default=1, help="how often to measure each; medians are shown (1)")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        target, streams, tokens = options.generate.split(",")
        print(json.dumps(generate(target, int(streams), int(tokens))))
        return 0
    print(machine(), flush=True)
    points = [point for point in POINTS if options.streams in (None, point.streams)]
    figures = [_median([measure(point, options.seconds) for _ in range(options.repeat)]) for point in points]
    print(table(points, figures, _DECIMALS))
    return 1 if any(found["lost streams"] for found in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
