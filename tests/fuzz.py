"""Answers of hostile servers for as long as one likes, each time other ones: `make fuzz MINUTES=60`.

Hypothesis draws stories, and each is told again and again with some bytes changed at random. What fails is saved as a
file, with its seed; `python tests/fuzz.py FILE` tells it once more.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from itertools import islice
from pathlib import Path

import hostile
from hypothesis import HealthCheck, Phase, given, seed, settings

STORIES = 20
"""Drawn from one seed."""
MUTANTS = 50
"""Of each story."""
READ_EVERY = 50
"""Reports and metrics of a story are read once in so many: they take longer than all else together."""


class Fuzzer:
    """Tells stories until one fails."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.outcomes: Counter[str] = Counter()
        self.stories = 0
        self.story: hostile.Story = []
        self._said_s = time.monotonic()

    def sow(self, number: int) -> None:
        """Tell the stories of one seed."""

        @seed(number)
        @settings(
            max_examples=STORIES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(hostile.STORIES)
        def tell(story: hostile.Story) -> None:
            self.tell(story)
            for mutant in islice(hostile.mutants(story, random.Random(number)), MUTANTS):
                self.tell(mutant)

        tell()

    def tell(self, story: hostile.Story) -> None:
        """Live through one story, unless the time is up."""
        if time.monotonic() > self.until_s:
            return
        self.story = story
        timelines = hostile.live(story, read=self.stories % READ_EVERY == 0)
        self.stories += 1
        self.outcomes.update(str(timeline.outcome) for timeline in timelines)
        if time.monotonic() > self._said_s + 60:
            self._said_s = time.monotonic()
            print(self, flush=True)

    def __str__(self) -> str:
        """Say how much has been tried."""
        outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in self.outcomes.most_common())
        return f"{self.stories:,} stories, {self.outcomes.total():,} answers: {outcomes}"


def smallest(story: hostile.Story) -> hostile.Story:
    """Return as few of the requests of a story that fails as still do."""
    for index in reversed(range(len(story))):
        fewer = [*story[:index], *story[index + 1 :]]
        if fewer and fails(fewer):
            story = fewer
    return story


def fails(story: hostile.Story) -> bool:
    """Tell whether a story fails."""
    try:
        hostile.live(story)
    except Exception:  # noqa: BLE001 - whatever it is
        return True
    return False


def main() -> int:
    """Fuzz, or tell a saved story; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a story that failed")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, help="begin with this one, to see a failure again")
    options = parser.parse_args()
    if options.file:
        hostile.live(hostile.loaded(options.file.read_text(encoding="utf-8")))
        print("nothing fails any more")
        return 0
    fuzzer = Fuzzer(time.monotonic() + 60 * options.minutes)
    number = options.seed
    while time.monotonic() < fuzzer.until_s:
        number = random.SystemRandom().randrange(2**32) if number is None else number
        try:
            fuzzer.sow(number)
        except Exception:  # noqa: BLE001 - whatever it is
            file = Path(f"fuzz-{number}.txt")
            file.write_text(hostile.saved(smallest(fuzzer.story)), encoding="utf-8")
            traceback.print_exc()
            print(f"{fuzzer}\nseed {number} fails; the story is in {file}", flush=True)
            return 1
        number = None
    print(fuzzer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
