"""What the rules of a stability test look at, and what they may say how often.

A rule is a test with a stated error rate: how often it speaks in a run in which nothing but chance is at work, that is,
in which each request is like any other of its scenario whenever it was sent. `FALSE_ALARMS` shares out less than 1 % in
all, over all windows, scenarios and metrics together (Bonferroni: rates add up at most). Where a run is long and busy,
what is no chance may be too little to matter: so each rule has also an effect that it takes at least. That makes false
alarms rarer still. The rules are in `vllm_locust.spikes` and `vllm_locust.symptoms`.

The first windows of a run hold no slow requests yet, since those have not come so far: they are left out where a
request takes longer than a tenth of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from vllm_locust.cell import Cell, total
from vllm_locust.histogram import Histogram
from vllm_locust.intervals import Interval
from vllm_locust.quantity import NS_PER_S

FALSE_ALARMS = {
    "spike": 0.004,
    "drift": 0.002,
    "variation": 0.001,
    "failures": 0.001,
    "throughput": 0.0005,
    "backlog": 0.0005,
    "silence": 0.0005,
    "interplay": 0.0004,
}
"""How often each rule may speak in a run in which nothing but chance is at work; for `silence`, a bound."""
SPIKING = ("ttft", "itl_max", "e2el")
"""Metrics with one sample per request; gaps of one request are alike, and no law counts them."""
DRIFTING = ("ttft", "itl_max", "tpot")
_METRICS = {*SPIKING, *DRIFTING, "input_tokens"}
_TITLES = {"ttft": "TTFT", "itl_max": "longest gap", "e2el": "E2EL", "tpot": "TPOT"}


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that was seen."""

    kind: str
    text: str
    scenario: str = ""
    """Absent where it is seen in all of them together."""
    metric: str = ""
    windows: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can carry it."""
        return {
            "kind": self.kind,
            "scenario": self.scenario or None,
            "metric": self.metric or None,
            "windows": list(self.windows),
            "text": self.text,
        }


@dataclass(slots=True)
class Evidence:
    """The windows of a run that are judged: whole ones after the warm-up."""

    windows: list[Interval] = field(default_factory=list)
    """Without histograms."""
    steady: dict[str, list[Cell]] = field(default_factory=dict)
    """Steady requests of each scenario, window by window."""
    totals: dict[str, Cell] = field(default_factory=dict)
    """The same of all these windows together."""

    def add(self, window: Interval) -> None:
        """Take the next window, and of it no more than the rules look at: all of a day's windows are much."""
        names = {key.scenario for key in window.cells if key.phase in window.phases}
        for name in sorted(names - self.steady.keys()):
            self.steady[name], self.totals[name] = [Cell() for _ in self.windows], Cell()
        for name, cells in self.steady.items():
            cells.append(total(cell.copy(_METRICS) for cell in window.told(name)))
            self.totals[name].merge(cells[-1])
        self.windows.append(window.counted())

    @property
    def window_ns(self) -> int:
        """How long a window is."""
        return max((window.end_ns - window.start_ns for window in self.windows), default=1)

    def histogram(self, scenario: str, metric: str) -> Histogram:
        """Return the histogram of all windows."""
        return self.totals[scenario].histograms.get(metric, Histogram())

    def samples(self, scenario: str, metric: str) -> "list[tuple[Interval, Histogram]]":
        """Return the histogram of each window, but of the first ones, into which slow requests cannot have come yet."""
        takes = self.histogram(scenario, "ttft" if metric == "ttft" else "e2el")
        settled_ns = (takes.percentile(0.95) or 0) - 0.1 * self.window_ns
        return [
            (window, cell.histograms.get(metric, Histogram()))
            for window, cell in zip(self.windows, self.steady[scenario], strict=True)
            if window.start_ns - self.windows[0].start_ns >= settled_ns
        ]

    def counted(self, name: str) -> list[int]:
        """Return a counter of all scenarios and phases, window by window."""
        return [sum(cell.counters.get(name, 0) for cell in window.cells.values()) for window in self.windows]

    def takes_ns(self) -> float:
        """Return how long a request takes, all but the slowest."""
        found = Histogram()
        for name in self.totals:
            found.merge(self.histogram(name, "e2el"))
        return found.percentile(0.95) or 0


def of(metric: str, scenario: str) -> str:
    """Name a metric of a scenario."""
    return f"{scenario}: {_TITLES[metric]}"


def when(windows: Sequence[Interval]) -> str:
    """Say when windows are, neighbours as one; of many, the first."""
    spans: list[list[Interval]] = []
    for before, window in pairwise([None, *windows]):
        if window is None:
            continue
        if before is not None and before.index + 1 == window.index:
            spans[-1].append(window)
        else:
            spans.append([window])
    bounds_s = [(round(span[0].start_ns / NS_PER_S, 1), round(span[-1].end_ns / NS_PER_S, 1)) for span in spans[:3]]
    shown = [f"{start_s:g} to {end_s:g} s" for start_s, end_s in bounds_s]
    more = f" and {len(spans) - 3} more times" if len(spans) > 3 else ""  # noqa: PLR2004 - of many, the first
    return f"at {', '.join(shown)}{more}"
