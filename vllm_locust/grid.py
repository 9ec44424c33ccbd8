"""Where windows begin and end: all of one length, but a boundary ends one early, and the next begins there.

Boundaries are the end of the warm-up and of each stage, so every interval that is reported is made of whole windows.
Instants are nanoseconds since the epoch began. A boundary may be added or moved while windows fill up: numbers only
grow, and what has been filed stays where it is.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Grid:
    """Windows of a length, and the instants above 0 at which one ends early."""

    window_ns: int
    boundaries_ns: tuple[int, ...] = ()
    _starts_ns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each stretch between boundaries begins."""
    _first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of the first window of each stretch."""

    def __post_init__(self) -> None:
        """Number the windows."""
        boundaries_ns = tuple(sorted({ns for ns in self.boundaries_ns if ns > 0}))
        starts_ns, first = (0, *boundaries_ns), [0]
        for since_ns, until_ns in pairwise(starts_ns):
            first.append(first[-1] - (since_ns - until_ns) // self.window_ns)
        object.__setattr__(self, "boundaries_ns", boundaries_ns)
        object.__setattr__(self, "_starts_ns", starts_ns)
        object.__setattr__(self, "_first", tuple(first))

    def index(self, at_ns: int) -> int:
        """Return the number of the window of an instant; what is before the start is in the first one."""
        at_ns = max(0, at_ns)
        stretch = bisect_right(self._starts_ns, at_ns) - 1
        return self._first[stretch] + (at_ns - self._starts_ns[stretch]) // self.window_ns

    def indices(self, at_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of the windows of many instants."""
        at_ns = np.maximum(at_ns, 0)
        if len(self._starts_ns) == 1:
            return np.asarray(at_ns // self.window_ns)
        starts_ns, first = np.array(self._starts_ns), np.array(self._first)
        stretches = np.searchsorted(starts_ns, at_ns, side="right") - 1
        return np.asarray(first[stretches] + (at_ns - starts_ns[stretches]) // self.window_ns)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return when a window begins and ends."""
        stretch = bisect_right(self._first, index) - 1
        since_ns = self._starts_ns[stretch] + (index - self._first[stretch]) * self.window_ns
        following = self._starts_ns[stretch + 1 : stretch + 2]
        return since_ns, min((since_ns + self.window_ns, *following))

    def count(self, length_ns: int) -> int:
        """Return how many windows begin within a length, a partial last one included."""
        return self.index(length_ns - 1) + 1 if length_ns > 0 else 0

    def moved(self, boundaries_ns: Iterable[int]) -> "Grid":
        """Return the grid with other boundaries."""
        return Grid(self.window_ns, tuple(boundaries_ns))
