"""What is new in timelines, taken in bulk: token events, gaps, and what their reads were like.

Gaps are held back until a stream's third read with tokens, or its end: until then it may turn out to be coalesced.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_locust.cell import Cell
from vllm_locust.timeline import COALESCED_READS, Choice, Timeline


@dataclass(slots=True)
class Harvest:
    """What was found in the timelines of one key."""

    events: "array[int]" = field(default_factory=lambda: array("q"))
    """Times of token events."""
    bundles: list[tuple[int, int]] = field(default_factory=list)
    reads: "array[int]" = field(default_factory=lambda: array("q"))
    """Rows of five, as in `Timeline.reads`."""
    times: "array[int]" = field(default_factory=lambda: array("q"))
    """Token times whose gaps are due, of one choice after the other."""
    exact_times: "array[int]" = field(default_factory=lambda: array("q"))
    """The same of choices whose events tell how many tokens they carry."""
    carried: "array[int]" = field(default_factory=lambda: array("q"))
    """How many tokens each of `exact_times` brought since the one before it, 0 where that is another choice's."""
    _stretches: list[tuple[Timeline, int]] = field(default_factory=list)
    """Whose `times` these are, and how many, at least two of each."""

    def take(self, timeline: Timeline, *, keep: bool) -> int | None:
        """Take what is new, and leave the times with the timeline too if asked to `keep` them.

        Returns the time of the oldest token event whose gap is held back.
        """
        oldest_ns = None
        ended = timeline.outcome is not None
        release = not timeline.coalesced if ended else timeline.token_reads > COALESCED_READS
        for choice in timeline.choices.values():
            if len(choice.times) > choice.counted:
                self.events.extend(choice.times[choice.counted :])
                choice.counted = len(choice.times)
            if len(choice.times) > 1:
                if release:
                    self._release(timeline, choice, keep=keep)
                else:
                    oldest_ns = min(choice.times[0], oldest_ns or choice.times[0])
        self.bundles.extend(timeline.bundles)
        timeline.bundles.clear()
        self.reads.extend(timeline.reads)
        timeline.reads = array("q")
        return oldest_ns

    def _release(self, timeline: Timeline, choice: Choice, *, keep: bool) -> None:
        times = choice.times
        self.times.extend(times)
        self._stretches.append((timeline, len(times)))
        if choice.carried:
            self.exact_times.extend(times)
            choice.carried[0] = 0  # the gap before it has been taken already, or there is none
            self.carried.extend(choice.carried)
            choice.carried = choice.carried[-1:]
        if keep:
            choice.kept.extend(times[bool(choice.kept) :])
        choice.times = array("q", times[-1:])
        choice.counted = 1

    def gaps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the times at which the gaps ended, and the gaps; notes the longest one in each timeline."""
        times = np.frombuffer(self.times, np.int64)
        values = np.diff(times)
        lengths = np.array([number for _, number in self._stretches])
        ends = np.cumsum(lengths)
        seams = ends[:-1] - 1
        values[seams] = 0  # from one stretch to the next is no gap
        starts = ends - lengths
        longest = np.maximum.reduceat(values, starts)
        largest = np.flatnonzero(values == np.repeat(longest, lengths)[:-1])  # at least one in each stretch
        ends_ns = times[1 + largest[np.searchsorted(largest, starts)]]
        for (timeline, _), longest_ns, end_ns in zip(self._stretches, longest.tolist(), ends_ns.tolist(), strict=True):
            if timeline.longest_gap_ns is None or longest_ns > timeline.longest_gap_ns:
                timeline.longest_gap_ns, timeline.longest_gap_end_ns = longest_ns, end_ns
        return np.delete(times[1:], seams), np.delete(values, seams)

    def token_gaps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the times at which gaps ended whose event told its tokens, and the gaps divided by those."""
        times, carried = np.frombuffer(self.exact_times, np.int64), np.frombuffer(self.carried, np.int64)[1:]
        known = carried > 0
        return times[1:][known], np.diff(times)[known] // carried[known]


def count_reads(reads: npt.NDArray[np.int64], cell: Cell) -> None:
    """Add what the reads of token events were like: rows as in `Timeline.reads`."""
    events, lags, uncertainties, stamped = reads[:, 1], reads[:, 2], reads[:, 3], reads[:, 4] > 0
    cell.histogram("uncertainty").add_array(np.repeat(uncertainties, events))
    if stamped.any():
        cell.histogram("read_lag").add_array(lags[stamped])
    for name, number in (("stamped", int(events[stamped].sum())), ("unstamped", int(events[~stamped].sum()))):
        if number:
            cell.count(name, number)
