"""The unit of a recording: histograms and counters of one key in one stretch of time, which add up."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_locust.histogram import Histogram

WARMUP, STEADY, RETRY = "warmup", "steady", "retry"
"""The phases of requests: before the run is judged, what it is judged by, what is asked again at the end."""


class Key(NamedTuple):
    """What samples are kept apart by."""

    scenario: str
    endpoint: str
    phase: str = STEADY
    stage: int = 0


@dataclass(slots=True)
class Cell:
    """Histograms by metric and counters by name, of one key in one stretch of time."""

    histograms: dict[str, Histogram] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def histogram(self, metric: str) -> Histogram:
        """Return the histogram of a metric to be written to."""
        found = self.histograms.get(metric)
        if found is None:
            found = self.histograms[metric] = Histogram()
        return found

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + number

    def merge(self, other: "Cell") -> None:
        """Add all of another cell."""
        for metric, histogram in other.histograms.items():
            self.histogram(metric).merge(histogram)
        for name, number in other.counters.items():
            self.count(name, number)

    def copy(self, metrics: Container[str] | None = None) -> "Cell":
        """Return an independent copy; given metrics, with no histograms but theirs."""
        chosen = {m: h.copy() for m, h in self.histograms.items() if metrics is None or m in metrics}
        return Cell(chosen, self.counters.copy())


Cells = dict[Key, Cell]


def select(cells: Cells, *, scenario: str | None = None, phase: str | None = None) -> Iterator[Cell]:
    """Yield the cells of a scenario and a phase; absent means all."""
    for key, cell in cells.items():
        if (scenario is None or key.scenario == scenario) and (phase is None or key.phase == phase):
            yield cell


def total(cells: Iterable[Cell]) -> Cell:
    """Add up cells into a new one."""
    result = Cell()
    for cell in cells:
        result.merge(cell)
    return result
