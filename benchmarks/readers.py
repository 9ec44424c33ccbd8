"""Measures how long it takes to read runs: report, page and comparison of five minutes with 3 million tokens each.

Each command is a process of its own, as users start it. Exits with 1 where one fails, else 0, whatever the figures.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from vllm_locust.cell import STEADY, Cell, Cells, Key
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, decode_report, encode_report, to_wire
from vllm_locust.results import Run, save
from vllm_locust.summary import Meta

_WINDOWS, _WINDOW_NS, _WORKERS = 30, 10 * NS_PER_S, 2
_SCENARIOS = {"short": 0.08, "long": 0.2, "longform": 0.09}
"""Median TTFT in seconds."""
_TOKENS = 100
_REQUESTS = 3_000_000 // (_TOKENS * _WINDOWS * _WORKERS * len(_SCENARIOS))
_ROUNDS = 5
_JUDGED = (0, 3, 4)
"""Exit codes of a run or comparison that could be read."""


def _cells(rng: np.random.Generator) -> Cells:
    cells: Cells = {}
    for scenario, ttft_s in _SCENARIOS.items():
        cell = cells[Key(scenario, "chat", STEADY)] = Cell()
        ttft, gaps = rng.lognormal(0, 0.4, _REQUESTS) * ttft_s, rng.lognormal(0, 0.3, (_REQUESTS, _TOKENS)) * 0.012
        samples = {"ttft": ttft, "itl": gaps, "itl_max": gaps.max(1), "tpot": gaps.mean(1), "e2el": ttft + gaps.sum(1)}
        for metric, values in samples.items():
            cell.histogram(metric).add_array((values.ravel() * NS_PER_S).astype(np.int64))
        cell.histogram("input_tokens").add(200, _REQUESTS)
        cell.histogram("output_tokens").add(_TOKENS, _REQUESTS)
        for name in ("sent", "outcome|ok|200", "finish|length"):
            cell.count(name, _REQUESTS)
        for name in ("token_events", "stamped", "tokens_received"):
            cell.count(name, _REQUESTS * _TOKENS)
    return cells


def _saved(name: str, seed: int, folder: Path) -> Path:
    """Save a run as a master leaves it."""
    rng, recording = np.random.default_rng(seed), Recording(name, 0, _WINDOW_NS)
    for index in range(_WINDOWS):
        for worker in range(_WORKERS):
            gauges = Gauges(span_ns=_WINDOW_NS, in_flight_ns=30 * _WINDOW_NS, cpu_ns=NS_PER_S)
            state = WindowState(index=index, seq=index, sealed=True, gauges=gauges, cells=to_wire(_cells(rng)))
            who = {"run": name, "epoch": 0, "worker": f"worker {worker}", "seq": index}
            report = Report(**who, now_ns=(index + 1) * _WINDOW_NS, windows=[state], failures=[])
            recording.merge(decode_report(encode_report(report)))
    recording.length_ns = _WINDOWS * _WINDOW_NS
    meta = Meta(run=name, name=name, started="2026-12-02T00:00:00+00:00", parts=[*_SCENARIOS])
    return save(Run.of(recording, meta), folder)


def _took_s(*arguments: str) -> float:
    begun = time.monotonic()
    command = [sys.executable, "-m", "vllm_locust", *arguments]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    took_s = time.monotonic() - begun
    if code not in _JUDGED:
        raise SystemExit(f"{' '.join(arguments)} ended with {code}")
    return took_s


def main() -> None:
    """Print the median of some rounds of each command."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base, new = (str(_saved(name, seed, folder)) for seed, name in enumerate(("base", "new")))
        page = str(folder / "page.html")
        commands = {
            "report": ("report", base),
            "report --html": ("report", base, "--html", page),
            "compare": ("compare", base, new),
            "compare --html": ("compare", base, new, "--html", page),
        }
        for title, command in commands.items():
            print(f"{title:15} {statistics.median(_took_s(*command) for _ in range(_ROUNDS)):6.2f} s")


if __name__ == "__main__":
    main()
