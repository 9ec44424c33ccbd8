"""The windows of one epoch on one worker: which one an instant belongs to, which are sealed, which the master lacks.

A window is sealed once nothing older can turn up any more. What still does goes to the oldest open window, and is
counted `late`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.grid import Grid
from vllm_locust.recording import Gauges, WindowState, to_wire


@dataclass(slots=True)
class Window:
    """What has happened in one stretch of time."""

    cells: Cells = field(default_factory=dict)
    gauges: Gauges = field(default_factory=Gauges)
    changed: bool = True
    reported: int | None = None
    """Sequence number of the last report that carried it."""
    sealed: bool = False


class Windows:
    """The windows of a grid from an instant on; those that are sealed and acknowledged are forgotten."""

    def __init__(self, start_ns: int, grid: Grid) -> None:
        self._start_ns = start_ns
        self.grid = grid
        self._windows: dict[int, Window] = {0: Window()}
        self._oldest = 0
        self._stop_ns: int | None = None
        self._of_run: int | None = None

    def stop(self, at_ns: int, number: int) -> None:
        """There are so many; what happens from this instant on goes into one behind them, as long as it gets."""
        self._stop_ns, self._of_run = at_ns, number

    def index(self, at_ns: int) -> int:
        """Return the number of the window that an instant belongs to."""
        index = self.grid.index(at_ns - self._start_ns)
        if self._stop_ns is None or self._of_run is None:
            return index
        return min(index, self._of_run) if at_ns < self._stop_ns else self._of_run

    def at(self, at_ns: int) -> Window:
        """Return the window of an instant, to be written to."""
        return self._of(self.index(at_ns))

    def cell(self, key: Key, at_ns: int) -> Cell:
        """Return the cell of a key in the window of an instant, to be written to."""
        cells = self.at(at_ns).cells
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = Cell()
        return cell

    def pieces(self, since_ns: int, until_ns: int) -> Iterator[tuple[Gauges, int]]:
        """Split a stretch of time at the ends of windows; yields the gauges and the length of each piece."""
        while since_ns < until_ns:
            index = self.index(since_ns)
            end_ns = until_ns
            if index != self._of_run:
                end_ns = min(until_ns, self._start_ns + self.grid.bounds(index)[1])
            yield self._of(index).gauges, end_ns - since_ns
            since_ns = end_ns

    def split(
        self, times: npt.NDArray[np.int64], values: npt.NDArray[np.int64] | None = None
    ) -> list[tuple[Window, npt.NDArray[np.int64]]]:
        """Split values (the times themselves, unless given) by the window of their times."""
        values = times if values is None else values
        indices = self.grid.indices(times - self._start_ns)
        if self._stop_ns is not None and self._of_run is not None:
            indices = np.where(times < self._stop_ns, np.minimum(indices, self._of_run), self._of_run)
        late = int(np.count_nonzero(indices < self._oldest))
        if late:
            self._windows[self._oldest].gauges.late += late
            indices = np.maximum(indices, self._oldest)
        if indices.min() == indices.max():
            return [(self._of(int(indices[0])), values)]
        return [(self._of(int(index)), values[indices == index]) for index in np.unique(indices)]

    def seal(self, until: int) -> None:
        """Nothing will come any more into windows before this number."""
        for index in range(self._oldest, until):
            if index not in self._windows:
                self._windows[index] = Window()
            self._windows[index].sealed = self._windows[index].changed = True
        self._oldest = max(self._oldest, until)
        if self._oldest not in self._windows:
            self._windows[self._oldest] = Window()

    def seal_all(self) -> None:
        """Nothing will come any more at all."""
        self.seal(max(self._windows) + 1)
        self._windows[self._oldest].changed = False  # nothing will come into it, and it need not travel

    def report(self, seq: int) -> list[WindowState]:
        """Return the whole state of each window that has changed since its last acknowledged report; this is `seq`."""
        states = []
        for index, window in sorted(self._windows.items()):
            if window.changed:
                window.reported, window.changed = seq, False
            elif window.reported is None:
                continue
            cells, gauges = to_wire(window.cells), msgspec.structs.replace(window.gauges)
            states.append(
                WindowState(index=index, seq=window.reported, sealed=window.sealed, gauges=gauges, cells=cells)
            )
        return states

    def acknowledge(self, seq: int) -> None:
        """The master has the report of this number: what has not changed since need not be sent again."""
        for index, window in list(self._windows.items()):
            if window.reported is not None and window.reported <= seq and not window.changed:
                window.reported = None
                if window.sealed:
                    del self._windows[index]

    def _of(self, index: int) -> Window:
        if index < self._oldest:
            index = self._oldest
            self._windows[index].gauges.late += 1
        for new in range(max(self._windows) + 1, index + 1):
            self._windows[new] = Window()
        window = self._windows[index]
        window.changed = True
        return window
