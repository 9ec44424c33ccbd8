"""Figures of two sides held against each other: both values, the difference, how far it may be chance, and a word.

Words are `better`, `worse`, `no clear difference` and `incomparable`. A difference is clear if it is larger than
`MARGIN` even where chance is taken off (`vllm_locust.bootstrap`), with all words of the table together wrong at most
once in a hundred comparisons of a server with itself: probabilities are corrected for their number by Holm's method
("A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979). An interval is
that of its row alone, of 95 %: it may leave 0 out where the word is not clear yet.

Failures are no chance of measuring: their share is judged by Fisher's exact test, and for itself. What only one side
has is incomparable, and then the whole comparison never passes (case 73).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_locust import chance
from vllm_locust.bootstrap import Variance
from vllm_locust.figure import FAILURES, FIGURES, GOODPUT, Figure
from vllm_locust.judgement import wilson
from vllm_locust.limit import Unit
from vllm_locust.side import Measured, Side, failures, measure, scenarios

ERROR = 0.01
"""How often any word of a table may be wrong where there is no difference."""
CONFIDENCE = 0.95
"""Of an interval."""
MARGIN = 0.01
"""What no difference may stand out by: of the base's value, or of all requests where the figure is a share of them.
Buckets are 0.5 % wide to either side, and no two starts of a server are the same."""


FEW_SAMPLES = "too few samples"


class Word(StrEnum):
    """What is said of a figure."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "no clear difference"
    INCOMPARABLE = "incomparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of one scenario on both sides, in the unit of the figure; infinite where too many failed."""

    scenario: str
    """Empty for all of them together."""
    figure: Figure
    base: float | None
    new: float | None
    low: float | None = None
    """Ends of the interval of the difference; absent where nobody can say how far it scatters."""
    high: float | None = None
    likely: float | None = None
    """How likely chance alone makes such a difference; absent where there is nothing to test."""
    word: Word = Word.UNCLEAR
    note: str = ""
    """Why it is incomparable, or what it lacks to be clear."""

    @property
    def name(self) -> str:
        """What it is of."""
        return f"{self.scenario}: {self.figure.title}" if self.scenario else self.figure.title

    @property
    def tested(self) -> bool:
        """Whether a difference could have been found; failures are counted, which takes no test of their scatter."""
        return self.likely is not None and self.figure != FAILURES

    @property
    def change(self) -> float | None:
        """The difference, absent where a side has no value."""
        if self.base is None or self.new is None:
            return None
        return 0.0 if self.base == self.new else self.new - self.base

    def relative(self, change: float | None) -> float | None:
        """Return a change as a share of the base's value; of shares, and where the base is 0, there is none."""
        if change is None or not self.base or math.isinf(change + self.base) or self.figure.unit is Unit.SHARE:
            return None
        return change / self.base

    def shown(self, change: float | None) -> str:
        """Print a change with its sign: in percent, of shares in points of percent, and else in the figure's unit."""
        if change is None:
            return "–"
        relative = self.relative(change)
        if relative is not None:
            return f"{_rounded(100 * relative, 1):+.1f} %"
        if self.figure.unit is Unit.SHARE:
            return f"{_rounded(100 * change, 2):+.2f} pp"
        return f"{'+' if change >= 0 else '-'}{self.figure.shown(abs(change))}"

    @property
    def interval(self) -> str:
        """Where the difference lies, at `CONFIDENCE`; a dash where nobody can say."""
        return "–" if self.low is None or self.high is None else f"{self.shown(self.low)} to {self.shown(self.high)}"


def _rounded(value: float, digits: int) -> float:
    """Round without leaving a negative zero."""
    return round(value, digits) + 0.0


def differences(base: Side, new: Side) -> list[Difference]:
    """Return a row for each figure of each scenario that any side has, and of all scenarios together."""
    names = scenarios(base, new)
    scopes = [*names, *([""] if len(names) > 1 else [])]
    found = [row for scope in scopes for figure in FIGURES if (row := difference(base, new, figure, scope))]
    return with_words(found)


def difference(base: Side, new: Side, figure: Figure, scenario: str) -> Difference | None:
    """Return one figure of both sides, its word open where it takes a test; None where neither side has it."""
    ours, theirs = measure(base, figure, scenario), measure(new, figure, scenario)
    if ours is None and theirs is None:
        return None
    row = Difference(
        scenario=scenario,
        figure=figure,
        base=None if ours is None else ours.value,
        new=None if theirs is None else theirs.value,
    )
    if ours is None or theirs is None:
        return replace(row, word=Word.INCOMPARABLE, note=f"the {'base' if ours is None else 'new'} has none")
    return _judged(row, base, new, ours, theirs)


def _judged(row: Difference, base: Side, new: Side, ours: Measured, theirs: Measured) -> Difference:
    figure = row.figure
    if figure == GOODPUT and _good(base) != _good(new):
        return replace(row, word=Word.INCOMPARABLE, note="a good request is not the same on both sides")
    if figure == FAILURES:
        return _of_failures(row, base, new)
    if math.isinf(ours.value) or math.isinf(theirs.value):
        # A percentile among the failures has no number: it is as clear as the failures are.
        sides = (failures(one, row.scenario) for one in (base, new))
        return replace(row, likely=_exact(*sides) if row.change else 1.0)
    if not (ours.carried and theirs.carried):
        return replace(row, note=FEW_SAMPLES)
    known = ours.variances and theirs.variances
    return _tested(row, [*ours.variances, *theirs.variances] if known else [])


def _good(one: Side) -> set[tuple[str, ...]]:
    return {tuple(run.meta.goodput) for run in one.runs}


def _tested(row: Difference, variances: Sequence[Variance]) -> Difference:
    """Hold a difference against its scatter, by Student's law with the degrees of freedom of Satterthwaite (1946)."""
    if not variances:
        return replace(row, note="too few windows")
    variance, change = sum(part.value for part in variances), row.change or 0.0
    margin = MARGIN * (1.0 if row.figure.unit is Unit.SHARE else row.base or 0.0)
    beyond = max(0.0, abs(change) - margin)
    if not variance:
        return replace(row, low=change, high=change, likely=0.0 if beyond else 1.0)
    if math.isinf(variance):
        return replace(row, likely=1.0, note="a percentile near the share of failures")
    freedom = variance**2 / sum(part.value**2 / part.freedom for part in variances)
    error = math.sqrt(variance)
    reach = chance.student_within(CONFIDENCE, freedom) * error
    likely = 2 * chance.student_above(beyond / error, freedom) if beyond else 1.0
    return replace(row, low=change - reach, high=change + reach, likely=likely)


def _of_failures(row: Difference, base: Side, new: Side) -> Difference:
    """Judge the shares that failed; the interval is Newcombe's, of Wilson's (Statistics in Medicine 17, 1998)."""
    (failed_a, ended_a), (failed_b, ended_b) = failures(base, row.scenario), failures(new, row.scenario)
    (low_a, high_a), (low_b, high_b) = wilson(failed_a, ended_a), wilson(failed_b, ended_b)
    share_a, share_b, change = row.base or 0.0, row.new or 0.0, row.change or 0.0
    low = change - math.hypot(share_b - low_b, high_a - share_a)
    high = change + math.hypot(high_b - share_b, share_a - low_a)
    likely = _exact((failed_a, ended_a), (failed_b, ended_b))
    word = _word(row) if likely <= ERROR else Word.UNCLEAR
    return replace(row, low=low, high=high, likely=likely, word=word)


def _exact(base: tuple[int, int], new: tuple[int, int]) -> float:
    """Return how likely chance makes failures differ as much between two sides, either way (Fisher's exact test)."""
    (failed_a, ended_a), (failed_b, ended_b) = base, new
    failed, ended = failed_a + failed_b, ended_a + ended_b
    sides = chance.at_least(failed_b, ended_b, failed, ended), chance.at_least(failed_a, ended_a, failed, ended)
    return min(1.0, 2 * min(sides))


def with_words(rows: Iterable[Difference]) -> list[Difference]:
    """Return rows with their words, which are corrected for the number of rows that are tested."""
    rows = list(rows)
    tested = sorted(
        (place for place, row in enumerate(rows) if row.tested),
        key=lambda place: rows[place].likely or 0.0,
    )
    for number, place in enumerate(tested):
        if (rows[place].likely or 0.0) > ERROR / (len(tested) - number):
            break
        rows[place] = replace(rows[place], word=_word(rows[place]))
    return rows


def _word(row: Difference) -> Word:
    change = row.change or 0.0
    return Word.BETTER if (change < 0) == row.figure.lower_is_better else Word.WORSE
