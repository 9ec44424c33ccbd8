"""How often an interval of a comparison holds the truth, and how often a word is wrong, for known truths.

    python benchmarks/coverage.py [--repeats 400]

Each row compares two runs of one law, hundreds of times over. *Holds* is the share of the 95 % intervals of a row that
contain the true difference, which is 0; *wrong* is the share of comparisons with any word that is not `no clear
difference`, which the method allows to be 1 %. The laws: requests that are independent; windows that are alike for a
while (an autoregressive level with a standard deviation of 10 %); a queue that is busy for 70 % of the time.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from vllm_locust.cell import Cell, Key
from vllm_locust.comparison import compare
from vllm_locust.difference import Word
from vllm_locust.figure import Figure
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.results import Run
from vllm_locust.summary import Meta

KEY = Key("s", "chat")
WINDOW_NS = 10 * NS_PER_S
SHOWN = tuple(Figure("ttft", statistic) for statistic in ("p50", "p95", "p99"))

Source = np.random.Generator
Times = Iterator[npt.NDArray[np.float64]]
"""Latencies in seconds, window by window."""
Law = Callable[[Source, int, int], Times]


def independent(source: Source, windows: int, requests: int) -> Times:
    """Yield log-normal times, as many per window as a Poisson process brings."""
    for _ in range(windows):
        yield 0.1 * np.exp(0.25 * source.standard_normal(source.poisson(requests)))


def drifting(source: Source, windows: int, requests: int, *, memory: float) -> Times:
    """Yield the same at a level that a window has in part from the one before."""
    level = source.standard_normal()
    for _ in range(windows):
        yield 0.1 * np.exp(0.1 * level + 0.25 * source.standard_normal(source.poisson(requests)))
        level = memory * level + math.sqrt(1 - memory**2) * source.standard_normal()


def queueing(source: Source, windows: int, requests: int) -> Times:
    """Yield how long customers stay with one server (M/M/1, by Lindley's recursion)."""
    before = 1000
    number = before + 2 * windows * requests
    services, gaps = source.exponential(0.7, number), source.exponential(1.0, number)
    walk = np.concatenate(([0.0], np.cumsum(services - gaps)))[:-1]
    stays = walk - np.minimum.accumulate(walk) + services
    index = np.floor(np.cumsum(gaps[before:]) / requests).astype(int)
    for window in range(windows):
        yield stays[before:][index == window]


LAWS: dict[str, Law] = {
    "independent": independent,
    "level, memory 0.3": lambda *of: drifting(*of, memory=0.3),
    "level, memory 0.6": lambda *of: drifting(*of, memory=0.6),
    "queue, 70 % busy": queueing,
}


def run(times: Times) -> Run:
    """Return a run whose requests have these first tokens."""
    states = [
        WindowState(
            index=index, seq=index, sealed=True, gauges=Gauges(span_ns=WINDOW_NS), cells=to_wire({KEY: cell(values)})
        )
        for index, values in enumerate(times)
    ]
    recording = Recording("r", 0, WINDOW_NS)
    recording.merge(Report(run="r", epoch=0, worker="w", seq=len(states), now_ns=0, windows=states, failures=[]))
    recording.length_ns = len(states) * WINDOW_NS
    return Run.of(recording, Meta(parts=[KEY.scenario]))


def cell(values_s: npt.NDArray[np.float64]) -> Cell:
    """Return what requests with these first tokens leave in a window."""
    found = Cell(counters={"sent": values_s.size, "outcome|ok|200": values_s.size})
    found.histogram("ttft").add_array((values_s * NS_PER_S).astype(np.int64))
    return found


def row(law: Law, windows: int, requests: int, repeats: int) -> str:
    """Compare pairs of runs of a law and say what came out."""
    source = np.random.default_rng(windows * requests)
    holds, wrong = dict.fromkeys(SHOWN, 0), 0
    for _ in range(repeats):
        found = compare(*([run(law(source, windows, requests))] for _ in range(2)))
        wrong += any(one.word is not Word.UNCLEAR for one in found.differences)
        for one in found.differences:
            if one.figure in holds and one.low is not None and one.high is not None:
                holds[one.figure] += one.low <= 0 <= one.high
    shares = "".join(f" {number / repeats:7.1%}" for number in holds.values())
    return f"{windows:7} {requests:8}{shares} {wrong / repeats:7.1%}"


def main() -> None:
    """Print a row for each law and length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=400)
    repeats = parser.parse_args().repeats
    print(f"{'law':18} windows requests {' '.join(f'{one.title:>7}' for one in SHOWN)}   wrong")
    for name, law in LAWS.items():
        for windows, requests in ((10, 60), (30, 10), (30, 60), (90, 60)):
            print(f"{name:18} {row(law, windows, requests, repeats)}", flush=True)


if __name__ == "__main__":
    main()
