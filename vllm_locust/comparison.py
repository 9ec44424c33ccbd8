"""A comparison as plain values: what two sides were not alike in, how their figures differ, limits, a rule, a verdict.

Promise: sides that answer different questions are not compared unless somebody insists; what only one side has is
named, and keeps the comparison from passing. One run a side says nothing of what differs from start to start of a
server, and the comparison says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_locust import allowance, rule
from vllm_locust.allowance import Allowance
from vllm_locust.bootstrap import FEWEST_WINDOWS
from vllm_locust.difference import Difference, Word, differences
from vllm_locust.differing import Differing, differing
from vllm_locust.errors import ExitCode
from vllm_locust.judgement import State
from vllm_locust.pairs import SideBySide
from vllm_locust.quantity import format_list
from vllm_locust.results import Run
from vllm_locust.rule import Verdict
from vllm_locust.side import Side, scenarios, side
from vllm_locust.verdict import Finding, exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides, and everything that is said of them."""

    base: Side
    new: Side
    differing: tuple[Differing, ...]
    refused: bool
    """Whether something that differs makes numbers incomparable, and nobody insisted: there are none then."""
    differences: tuple[Difference, ...] = ()
    allowances: tuple[allowance.Judged, ...] = ()
    rule: Verdict | None = None
    samples: SideBySide = field(default_factory=SideBySide)
    """Answers that both sides have kept."""

    def rows(self, word: Word) -> list[Difference]:
        """Return the rows that got a word."""
        return [row for row in self.differences if row.word is word]

    @property
    def word(self) -> Word:
        """What is said of all rows together."""
        words = {row.word for row in self.differences}
        order = (Word.INCOMPARABLE, Word.WORSE, Word.BETTER, Word.UNCLEAR)
        return Word.INCOMPARABLE if self.refused else next((word for word in order if word in words), Word.INCOMPARABLE)

    @property
    def remarks(self) -> list[str]:
        """What has to be known of the words."""
        return [*_remarks(self)] if not self.refused else []

    @property
    def findings(self) -> list[Finding]:
        """What keeps the new side from passing; where a rule or limits were given, they say what is worse."""
        return [*_findings(self)]

    @property
    def exit_code(self) -> ExitCode:
        """What the command ends with."""
        return exit_code(self.findings)


def compare(  # noqa: PLR0913 - two sides, and what is asked of them
    base: Sequence[Run],
    new: Sequence[Run],
    *,
    allowances: Sequence[Allowance] = (),
    tuned: bool = False,
    force: bool = False,
    samples: SideBySide | None = None,
) -> Comparison:
    """Compare runs of two sides, at least one each, and the answers that they have kept.

    Raises `InputError` for an allowance on a part that no side has.
    """
    ours, theirs = side(base), side(new)
    allowance.check_parts(allowances, scenarios(ours, theirs))
    found = tuple(differing(ours, theirs))
    if any(one.prevents for one in found) and not force:
        return Comparison(base=ours, new=theirs, differing=found, refused=True)
    return Comparison(
        base=ours,
        new=theirs,
        differing=found,
        refused=False,
        differences=tuple(differences(ours, theirs)),
        allowances=tuple(allowance.judge(one, ours, theirs) for one in allowances),
        rule=rule.tuned(ours, theirs) if tuned else None,
        samples=samples or SideBySide(),
    )


def _remarks(found: Comparison) -> Iterator[str]:
    for name, one in (("base", found.base), ("new", found.new)):
        if not one.stretches:
            yield f"the {name} has no samples, only figures: nothing of it can be clear"
        elif one.draws is None:
            yield (
                f"a run of the {name} has fewer than {FEWEST_WINDOWS} windows, too few to say what is clear: "
                "run longer, or with a shorter --window"
            )
    if len(found.base.runs) == 1 or len(found.new.runs) == 1:
        yield "variation between restarts not measured: it takes several runs a side (--base B1 B2 --new N1 N2)"


def _findings(found: Comparison) -> Iterator[Finding]:
    if found.refused:
        what = format_list(one.what for one in found.differing if one.prevents)
        yield Finding(ExitCode.NOT_JUDGED, "runs", f"incomparable: {what}; --force compares all the same")
    if rows := found.rows(Word.INCOMPARABLE):
        yield Finding(ExitCode.NOT_JUDGED, "rows", f"incomparable: {_names(rows)}")
    for judged in found.allowances:
        if judged.state is not State.MET:
            code = ExitCode.MISSED if judged.state is State.MISSED else ExitCode.NOT_JUDGED
            yield Finding(code, judged.allowance.text, judged.text)
    if found.rule is not None and found.rule.state is not State.MET:
        code = ExitCode.MISSED if found.rule.state is State.MISSED else ExitCode.NOT_JUDGED
        yield Finding(code, "rule tuned", found.rule.text)
    if found.rule is not None or found.allowances:
        return
    if rows := found.rows(Word.WORSE):
        yield Finding(ExitCode.MISSED, "rows", f"worse: {_names(rows)}")
    if found.differences and not any(row.tested for row in found.differences):
        yield Finding(ExitCode.NOT_JUDGED, "rows", "no difference could have been found: see the remarks")


def _names(rows: Sequence[Difference]) -> str:
    return format_list(row.name for row in rows)
