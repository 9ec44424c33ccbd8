"""A run as Markdown, for a comment on a pull request or the summary of a CI job.

Promise: whatever is not a number or a word of ours stands in a code span, so no name and no message becomes markup, a
link, or a mention of somebody. The dialect is GitHub's (https://github.github.com/gfm/): tables, and `|` escaped even
in code.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from vllm_locust import facts, fidelity, overview
from vllm_locust.picture import outcome_rows, verdict_lines
from vllm_locust.results import Run
from vllm_locust.terminal import printable

_OUTCOMES = ("outcome", "requests", "share")
_LIMITS = ("limit", "state", "measured")


def text(run: Run) -> str:
    """Return the verdict with its reasons, the overview, limits, outcomes and, folded, what was run."""
    summary, meta = run.summary, run.meta
    rows = overview.rows(summary)
    *reasons, verdict = verdict_lines(summary, meta)
    limits = [(cell(one["limit"]), one["state"], cell(one["text"])) for one in summary["limits"]]
    parts = [
        [f"### {code(meta.name)}: {verdict}"],
        [f"- {code(reason)}" for reason in reasons],
        table([head.title for head in overview.HEADS], [[cell(name), *numbers] for name, *numbers in rows]),
        _cells([overview.LEGEND]) if overview.marked(rows) else [],
        table(_LIMITS, limits),
        table(_OUTCOMES, [(cell(name), number, share) for name, number, share in outcome_rows(summary)]),
        [f"Fidelity: {code(fidelity.line(summary['fidelity'], meta.generator_limits))}"],
        ["<details><summary>What was run, and what was remarked</summary>"],
        [*_list([*facts.of_setting(summary, meta), *facts.of_versions(meta)])],
        [*_list([*facts.of_load(summary, meta), *facts.of_measurement(summary, meta)])],
        ["</details>"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def code(text: str) -> str:
    """Return a text of anybody as a code span, whose fence is longer than any that is in it."""
    shown = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown[:1] in ("`", " ", "") or shown[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def cell(text: str) -> str:
    """Return a code span for a table, where a bar would end the cell even in code."""
    return code(text).replace("|", "\\|")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first column is to the left; nothing without rows."""
    if not rows:
        return []
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *map(_cells, rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(row: Sequence[str]) -> list[str]:
    """Escape the mark of numbers, which are not in code."""
    return [cell if cell.startswith("`") else cell.replace("*", "\\*") for cell in row]


def _list(found: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    yield from (f"- {subject}: {code(text)}" for subject, texts in found for text in texts)
