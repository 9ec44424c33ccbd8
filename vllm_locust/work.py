"""What one process has to send: which request of a user class is next, how many there are, and what is asked again.

Rank w of n takes the requests i = w, w + n, … of each user class; whoever is free takes the next. Where the number of
requests is fixed, users that have sent all of their own class help with the others, so that nothing is left over. What
failed is asked again once all else has ended, where that is wanted, in so many rounds at most.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

_LATE_SPACE = 2**40
"""First index of the space of a worker that joined later; the next one's begins twice as far, and so on."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a user class."""

    user_class: str
    index: int
    attempt: int = 0
    """How often it has been asked before."""


class Work:
    """The requests of one rank."""

    def __init__(  # noqa: PLR0913 - what a start says of a rank
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        late: int = 0,
        amounts: Mapping[str, int] | None = None,
        retries: int = 0,
        taken: Mapping[str, int] | None = None,
    ) -> None:
        """Take up where a predecessor of this rank had `taken` so many of each class.

        `amounts` are those of all ranks together, absent where there is no end. The k-th worker that joined `late`
        without a rank draws from the k-th space of its own.
        """
        self._first, self._step = (_LATE_SPACE * late, 1) if late else (rank, ranks)
        self._amounts = amounts
        self._retries = retries
        self.taken = dict(taken or {})
        """How many requests of each class have been taken."""
        self._out = 0
        self._failed: list[Item] = []
        self._again: deque[Item] = deque()

    def take(self, user_class: str) -> Item | None:
        """Take the next request, of this class if there is one; None where there is none (yet: see `done`)."""
        item = self._next(user_class)
        if item is None and self._amounts is not None:
            item = next((found for other in self._amounts if (found := self._next(other)) is not None), None)
        if item is None and not self._out and not self._again:  # what fails again is of the next round
            self._again.extend(self._failed)
            self._failed.clear()
        if item is None and self._again:
            item = self._again.popleft()
        if item is not None:
            self._out += 1
        return item

    def _next(self, user_class: str) -> Item | None:
        taken = self.taken.get(user_class, 0)
        index = self._first + taken * self._step
        if self._amounts is not None and index >= self._amounts.get(user_class, 0):
            return None
        self.taken[user_class] = taken + 1
        return Item(user_class, index)

    def end(self, item: Item, *, failed: bool) -> None:
        """A request that was taken has ended."""
        self._out -= 1
        if failed and item.attempt < self._retries:
            self._failed.append(replace(item, attempt=item.attempt + 1))

    @property
    def done(self) -> bool:
        """Whether all of it has been sent and has ended."""
        return self._amounts is not None and not (self._out or self._failed or self._again or self._left())

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, so that whoever waits for the ends of others may look again."""
        return not self._out

    def _left(self) -> bool:
        amounts = self._amounts or {}
        return any(self._first + self.taken.get(name, 0) * self._step < number for name, number in amounts.items())
