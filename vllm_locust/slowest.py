"""The slowest requests of each scenario, kept without any log: ten first tokens, and ten longest gaps.

Merging is by extreme: the ten slowest of all are the ten slowest of the ten slowest of any parts, in whichever order
and however often these come. So a worker reports what is new in its lists until that is acknowledged: at most 20
requests of a scenario, some 150 bytes each, however many there were. One that ten slower ones push out before need
never arrive.

What it does not do: look at a request that still runs, or at one that failed without a first token.
"""

from collections.abc import Iterator

import msgspec

SIZE = 10
"""How many a list keeps."""


class Slow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request that was slow in one respect; a request is in a list once."""

    scenario: str
    endpoint: str
    metric: str
    """Which list: `ttft`, or `itl_max` for the longest gap of a request."""
    value_ns: int
    at_ns: int
    """When that came to its end, since the start of the epoch: the first token, or the token after the gap; where a
    time-out ended the gap, the time-out."""
    worker: str
    request_id: str
    """As it was sent in the header `x-request-id`."""
    input_tokens: int | None
    """Absent where the server does not tell."""
    output_tokens: int
    in_flight: int
    """Streams of its worker that were in flight when it left, itself among them."""
    outcome: str


Lists = dict[tuple[str, str], list[Slow]]
"""By scenario and metric, the slowest first."""


def admits(lists: Lists, scenario: str, metric: str, value_ns: int) -> bool:
    """Tell whether a value may be among the slowest, at the cost of a comparison."""
    known = lists.get((scenario, metric), [])
    return len(known) < SIZE or value_ns >= known[-1].value_ns


def add(lists: Lists, slow: Slow) -> None:
    """Keep a request if it is among the slowest; one that is there already changes nothing."""
    if admits(lists, slow.scenario, slow.metric, slow.value_ns):
        known = lists.get((slow.scenario, slow.metric), ())
        lists[slow.scenario, slow.metric] = sorted({*known, slow}, key=_rank)[:SIZE]


def _rank(slow: Slow) -> tuple[int, str]:
    """Order by slowness, and where that is equal by the id, so that the order of arrival does not matter."""
    return -slow.value_ns, slow.request_id


def each(lists: Lists) -> Iterator[Slow]:
    """Yield what all lists hold, list by list, the slowest first."""
    for place in sorted(lists):
        yield from lists[place]


class Slowest:
    """The lists of a worker, and which of them its master is known to have."""

    def __init__(self) -> None:
        self.lists: Lists = {}
        self._reported: dict[Slow, int] = {}
        """Number of the first report that carried it."""
        self._acknowledged = 0

    def report(self, seq: int) -> list[Slow]:
        """Return what the master may not have yet; this is report `seq`."""
        self._reported = {slow: self._reported.get(slow, seq) for slow in each(self.lists)}
        return [slow for slow, first in self._reported.items() if first > self._acknowledged]

    def acknowledge(self, seq: int) -> None:
        """The master has the report of this number."""
        self._acknowledged = max(self._acknowledged, seq)
