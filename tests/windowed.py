"""Recordings of many windows, made at once: what a run of log-normal latencies leaves behind."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording

WINDOW_S = 10
Change = Callable[[str, int], float]
"""By which factor everything takes longer: of a scenario, in a window."""


def merge_cells(target: Cells, source: Cells) -> None:
    """Add all of some cells to others."""
    for key, cell in source.items():
        target.setdefault(key, Cell()).merge(cell)


@dataclass(frozen=True)
class Traffic:
    """Requests of one scenario: log-normal times around these medians."""

    per_window: float
    ttft_s: float = 0.080
    tpot_s: float = 0.010
    tokens: int = 100
    input_tokens: int = 200
    sigma: float = 0.5


def steadily(_scenario: str, _window: int) -> float:
    return 1.0


def log_normal(  # noqa: PLR0913 - what a run is made of
    seed: int,
    traffic: dict[str, Traffic],
    windows: int = 30,
    *,
    slower: Change = steadily,
    busier: Change = steadily,
    scheduled: bool = True,
) -> Recording:
    """Return a run in which the number of requests of a window is Poisson, and everything that happens independent.

    `slower` is a factor on all times, `busier` one on the number of requests.
    """
    rng = np.random.default_rng(seed)
    cells = [
        {
            Key(name, "chat"): _cell(rng, each, slower(name, index), busier(name, index))
            for name, each in traffic.items()
        }
        for index in range(windows)
    ]
    if scheduled:
        for of_window in cells:
            for cell in of_window.values():
                cell.counters["scheduled"] = cell.counters["sent"]
    return recorded(cells)


def _cell(rng: np.random.Generator, traffic: Traffic, slower: float, busier: float) -> Cell:
    number, cell = int(rng.poisson(traffic.per_window * busier)), Cell()
    ttft_s, tpot_s, tokens, longest = (rng.lognormal(0, traffic.sigma, number) for _ in range(4))
    ttft_s *= traffic.ttft_s * slower
    tpot_s *= traffic.tpot_s * slower
    tokens = np.maximum(tokens * traffic.tokens, 2).astype(np.int64)
    for metric, values in (
        ("ttft", ttft_s),
        ("tpot", tpot_s),
        ("itl_max", tpot_s * 3 * longest),
        ("e2el", ttft_s + tpot_s * (tokens - 1)),
    ):
        cell.histogram(metric).add_array((values * NS_PER_S).astype(np.int64))
    cell.histogram("input_tokens").add(traffic.input_tokens, number)
    cell.counters = {"sent": number, "outcome|ok|200": number, "tokens_received": int(tokens.sum())}
    return cell


def recorded(
    cells: list[Cells], *, last_s: float = WINDOW_S, gauges: dict[int, dict[str, int]] | None = None
) -> Recording:
    """Return what a master holds of one worker; the last window is `last_s` long."""
    recording = Recording("r1", 0, WINDOW_S * NS_PER_S)
    for index, of_window in enumerate(cells):
        recording._folded._loose[index] = of_window
        merge_cells(recording._sealed_totals, of_window)
        span_ns = round((WINDOW_S if index < len(cells) - 1 else last_s) * NS_PER_S)
        busy_ns = sum(cell.histogram("e2el").sum for cell in of_window.values())
        seen = {"span_ns": span_ns, "users_last": 10, "in_flight_ns": busy_ns, "in_flight_peak": 9}
        recording.gauges["w1", index] = Gauges(**seen | (gauges or {}).get(index, {}))
    recording._sealed["w1"] = len(cells)
    recording.length_ns = round(((len(cells) - 1) * WINDOW_S + last_s) * NS_PER_S)
    return recording
