"""Samples of two runs side by side: what each answered to the same prompt, and how many answers became other ones.

Promise: two answers are beside each other only where the same request of the same user class asked the same; what has
no twin is counted. A request that the end of a run cut says nothing of the server, and is left out.

Whether another text is a worse one is not for a program to say. At a temperature above 0 no two are alike, and even at
0 a server that batches differently may go other ways; so what counts is answers that got shorter, stopped for another
reason, or failed, and the texts are for a person to read.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vllm_locust.quantity import format_list
from vllm_locust.samples import Sample, load
from vllm_locust.terminal import COLUMNS, labelled, printable
from vllm_locust.timeline import Outcome

HEADS = ("scenario", "request", "what", "asked", "base", "new")
"""Of `rows`."""
_BEFORE = 30
"""Characters in front of the first difference."""
_SHOWN = 3
"""Pairs that a terminal shows; others are in the files."""
_CELL = 400
"""Columns of a cell."""
_ORDER = (
    *("failed", "stopped for another reason", "shorter", "another text"),
    *("longer", "failed otherwise", "no longer failed"),
)
"""What is different, the worst first."""
_MARKS = str.maketrans({"\n": "⏎", "\t": "⇥"})
"""How white space is shown that is part of an answer."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same."""

    base: Sample
    new: Sample

    @property
    def answered(self) -> bool:
        """Whether both are whole answers."""
        return self.base.outcome == self.new.outcome == Outcome.OK

    @property
    def equal(self) -> bool:
        """Whether both say the same, as far as they are kept, and stopped alike."""
        alike = self.answered and not self.other_reason and not self.grown
        return alike and _parts(self.base) == _parts(self.new)

    @property
    def other_reason(self) -> bool:
        """Whether they stopped for different reasons."""
        return self.answered and self.base.finish_reason != self.new.finish_reason

    @property
    def grown(self) -> int:
        """By how much the new one is longer, below 0 where it is shorter: in tokens, else in characters.

        The number of token events is no length: events of one server may bundle tokens.
        """
        if not self.answered:
            return 0
        if self.base.estimated or self.new.estimated:
            return len(said(self.new)) - len(said(self.base))
        return self.new.output_tokens - self.base.output_tokens

    @property
    def failed(self) -> bool:
        """Whether the new one failed, and the base did not."""
        return self.base.outcome == Outcome.OK != self.new.outcome

    @property
    def mended(self) -> bool:
        """Whether the base failed, and the new one did not."""
        return self.new.outcome == Outcome.OK != self.base.outcome

    @property
    def words(self) -> list[str]:
        """What is different, the worst first; nothing where they are equal, or failed alike."""
        told = {
            "failed": self.failed,
            "stopped for another reason": self.other_reason,
            "shorter": self.grown < 0,
            "longer": self.grown > 0,
            "no longer failed": self.mended,
        }
        words = [word for word, holds in told.items() if holds]
        if words or self.equal or self.base.outcome == self.new.outcome != Outcome.OK:
            return words
        return ["another text" if self.answered else "failed otherwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """All samples of two sides."""

    pairs: tuple[Pair, ...] = field(default=())
    """In the order of scenarios and ranks."""
    cut: int = 0
    """Pairs of which the end of a run cut one; they are not in `pairs`."""
    other_prompt: int = 0
    """Pairs of the same request that did not ask the same; neither are they."""
    base_alone: int = 0
    """Samples of the base without a twin."""
    new_alone: int = 0

    @property
    def equal(self) -> int:
        """How many are equal."""
        return sum(pair.equal for pair in self.pairs)

    @property
    def shorter(self) -> int:
        """How many answers got shorter."""
        return sum(pair.grown < 0 for pair in self.pairs)

    @property
    def longer(self) -> int:
        """How many got longer."""
        return sum(pair.grown > 0 for pair in self.pairs)

    @property
    def other_reason(self) -> int:
        """How many stopped for another reason."""
        return sum(pair.other_reason for pair in self.pairs)

    @property
    def failed(self) -> int:
        """How many failed that did not in the base."""
        return sum(pair.failed for pair in self.pairs)

    @property
    def mended(self) -> int:
        """How many no longer failed."""
        return sum(pair.mended for pair in self.pairs)


def of_runs(base: Iterable[Path], new: Iterable[Path]) -> SideBySide:
    """Put the samples that are beside some runs, given by their files or directories, beside each other."""
    return side_by_side(*([sample for run in side for sample in load(run)] for side in (base, new)))


def side_by_side(base: Sequence[Sample], new: Sequence[Sample]) -> SideBySide:
    """Put samples of the same request beside each other; of several runs a side, the first beside the first."""
    sides: dict[tuple[str, str, str], tuple[list[Sample], list[Sample]]] = defaultdict(lambda: ([], []))
    for side, samples in enumerate((base, new)):
        for sample in samples:
            sides[sample.scenario, sample.rank, sample.endpoint][side].append(sample)
    pairs: list[Pair] = []
    cut = other_prompt = base_alone = new_alone = 0
    for place in sorted(sides):
        for one, other in zip_longest(*sides[place]):
            if one is None or other is None:
                base_alone, new_alone = base_alone + (other is None), new_alone + (one is None)
            elif one.prompt != other.prompt:
                other_prompt += 1
            elif Outcome.CANCELLED in (one.outcome, other.outcome):
                cut += 1
            else:
                pairs.append(Pair(one, other))
    return SideBySide(
        pairs=tuple(pairs), cut=cut, other_prompt=other_prompt, base_alone=base_alone, new_alone=new_alone
    )


def said(sample: Sample) -> str:
    """Return all that was answered, as one text: reasoning first, of several choices one after the other."""
    return "\n".join(text for part in _parts(sample) for text in ([part] if isinstance(part, str) else part or ()))


def _parts(sample: Sample) -> list[str | list[str] | None]:
    return [sample.reasoning, sample.answer]


# For people


def summary(found: SideBySide) -> str:
    """Say in a line how many answers became other ones; empty where there are no samples on either side."""
    alone = found.base_alone + found.new_alone
    if not (found.pairs or found.cut or found.other_prompt or alone):
        return ""
    counts = {
        "equal": found.equal,
        "shorter": found.shorter,
        "longer": found.longer,
        "stopped for another reason": found.other_reason,
        "failed": found.failed,
        "no longer failed": found.mended,
    }
    told = format_list(f"{number} {what}" for what, number in counts.items() if number or what == "equal")
    left_out = {
        "cut by the end of a run": found.cut,
        "asked something else": found.other_prompt,
        "in the base alone": found.base_alone,
        "in the new alone": found.new_alone,
    }
    apart = format_list(f"{number} {what}" for what, number in left_out.items() if number)
    line = (
        f"answers to {len(found.pairs)} prompt{'s' * (len(found.pairs) != 1)} beside each other: {told}"
        if found.pairs
        else "no prompt is on both sides"
    )
    return line + (f"; left out: {apart}" if any(left_out.values()) else "")


def changed(found: SideBySide) -> list[Pair]:
    """Return the pairs that are worth a look, the worst first."""
    pairs = [pair for pair in found.pairs if pair.words]
    return sorted(pairs, key=lambda pair: [_ORDER.index(word) for word in pair.words])


def lines(found: SideBySide, most: int = _SHOWN) -> list[str]:
    """Return the summary and so many changed pairs for a terminal; no lines where there are no samples."""
    shown = labelled("Samples", filter(None, [summary(found)]))
    pairs = changed(found)
    for pair in pairs[:most]:
        base, new = _around(pair, 8 * COLUMNS)
        shown += [
            f"  {printable(_name(pair), 50)}: {format_list(pair.words)}",
            *(_line(label, text) for label, text in (("asked", asked(pair.base.prompt)), ("base", base), ("new", new))),
        ]
    if len(pairs) > most:
        shown.append(f"  and {len(pairs) - most} more")
    return shown


def _line(label: str, text: str) -> str:
    head = f"    {label:7}"
    return head + printable(text, COLUMNS - len(head))


def rows(found: SideBySide, most: int = 20) -> list[list[str]]:
    """Return so many changed pairs as cells under `HEADS`: one line each, without anything that a terminal obeys."""
    return [
        [
            printable(text, _CELL)
            for text in (
                pair.base.scenario,
                _request(pair),
                format_list(pair.words),
                asked(pair.base.prompt),
                *_around(pair, _CELL),
            )
        ]
        for pair in changed(found)[:most]
    ]


def asked(prompt: Any) -> str:  # noqa: ANN401 - JSON
    """Return a prompt as a text; of messages the last one, which is what was asked."""
    if isinstance(prompt, str):
        return prompt
    return next(_texts(prompt[-1].get("content")), "") if _is_messages(prompt) else str(prompt)


def _is_messages(prompt: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[-1], dict)


def _texts(content: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield the texts of a content: it is one, or has parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield " ".join(str(part.get("text", "…")) for part in content if isinstance(part, dict))


def _name(pair: Pair) -> str:
    return f"{pair.base.scenario}, {_request(pair)}"


def _request(pair: Pair) -> str:
    index = "" if pair.base.index is None else f" {pair.base.index}"
    return f"{pair.base.user_class}{index}"


def _around(pair: Pair, width: int) -> Iterable[str]:
    """Return what both said around the first difference, behind how they ended."""
    texts = [said(pair.base), said(pair.new)]
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = max(0, same - _BEFORE)
    for sample, text in zip((pair.base, pair.new), texts, strict=True):
        yield f"{_ending(sample)}: {'…' * bool(begin)}{text[begin : begin + width]}".translate(_MARKS)


def _ending(sample: Sample) -> str:
    number = f"{sample.output_tokens} token{'s' * (sample.output_tokens != 1)}"
    if sample.outcome == Outcome.OK:
        return f"{number}, {sample.finish_reason or 'no reason told'}"
    return f"{number}, {sample.outcome}{f' ({sample.message})' if sample.message else ''}"
