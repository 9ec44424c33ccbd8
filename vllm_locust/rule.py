"""The rule of the experiment that this was made for: tuning a server is to bring first tokens, and cost no gaps.

`tuned` holds if p95 TTFT is clearly lower in one scenario at least, and in none clearly higher, and mean ITL is clearly
higher in none. Its words are corrected for their own number alone: who asks one question in advance need not pay for a
table of them. Where events carry another number of tokens on both sides, gaps between them are of other things, and
TPOT takes their place.
"""

from dataclasses import dataclass

from vllm_locust.difference import Difference, Word, difference, with_words
from vllm_locust.differing import EVENTS, apart, tokens_per_event
from vllm_locust.figure import ITL_MEAN, TPOT_MEAN, TTFT_P95
from vllm_locust.judgement import State
from vllm_locust.side import Side, scenarios


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a rule holds, by which rows, and why."""

    state: State
    rows: tuple[Difference, ...]
    text: str


def tuned(base: Side, new: Side) -> Verdict:
    """Judge by the rule `tuned`."""
    found, notes = [], []
    for name in scenarios(base, new):
        ours, theirs = tokens_per_event(base, name), tokens_per_event(new, name)
        pace = TPOT_MEAN if apart(ours, theirs, EVENTS) else ITL_MEAN
        if pace is TPOT_MEAN:
            notes.append(f"{name}: by TPOT, since events carry {ours:.3g} and {theirs:.3g} tokens")
        found += [difference(base, new, figure, name) for figure in (TTFT_P95, pace)]
    rows = with_words(row for row in found if row is not None)
    first = [row for row in rows if row.figure == TTFT_P95]
    lower = [row for row in first if row.word is Word.BETTER]
    higher = [row for row in rows if row.word is Word.WORSE]
    missing = [row for row in rows if row.word is Word.INCOMPARABLE]
    if missing or not first:
        state, texts = State.INCONCLUSIVE, _names(missing) or ["no TTFT on either side"]
    elif higher:
        state, texts = State.MISSED, [f"{text} is clearly higher" for text in _names(higher)]
    elif not any(row.tested for row in first):
        state, texts = State.INCONCLUSIVE, [f"no TTFT p95 could be told from chance: {first[0].note}"]
    elif not lower:
        state, texts = State.MISSED, ["TTFT p95 is clearly lower in no scenario"]
    else:
        state = State.MET
        texts = [f"{text} is clearly lower" for text in _names(lower)] + ["nothing is clearly higher"]
    return Verdict(state, tuple(rows), "; ".join([*texts, *notes]))


def _names(rows: list[Difference]) -> list[str]:
    return [f"{row.name} ({row.shown(row.change)})" for row in rows]
