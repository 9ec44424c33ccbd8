"""A comparison as text for a terminal, and as Markdown: what differs first, then figures with their words.

Promise: what makes the sides unlike is there before any number; no line is wider than `COLUMNS`, and nothing that
somebody else wrote is obeyed by a terminal or becomes markup. Nothing here computes a number.
"""

from collections.abc import Iterator, Sequence

from vllm_locust import markdown, pairs
from vllm_locust.comparison import Comparison
from vllm_locust.difference import CONFIDENCE, ERROR, MARGIN, Difference, Word
from vllm_locust.quantity import format_duration, format_list
from vllm_locust.results import Run
from vllm_locust.side import Side, scenarios
from vllm_locust.terminal import COLUMNS, Column, labelled, printable, table, wrapped

HEADS = ("base", "new", "difference", f"{100 * CONFIDENCE:g} % interval", "word")
ALL = "all"
LEGEND = (
    f"A word is for a difference of more than {100 * MARGIN:g} % that chance does not make; comparing the same with "
    f"itself, any of them is wrong at most once in {1 / ERROR:.0f} times. An interval is that of its row alone."
)


def text(found: Comparison) -> str:
    """Return the comparison for a terminal."""
    parts = [
        [line for label, runs in _sides(found) for line in labelled(label, runs)],
        labelled("Differs", _differing(found) or ["nothing that the runs tell of"]),
        *(_table(name, rows) for name, rows in by_scenario(found)),
        wrapped(LEGEND, COLUMNS) if found.differences else [],
        pairs.lines(found.samples),
        [line for label, texts in facts(found) for line in labelled(label, texts)],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


def as_markdown(found: Comparison) -> str:
    """Return the comparison as Markdown (see `vllm_locust.markdown`)."""
    code = markdown.code
    parts = [
        [f"### {verdict(found)}"],
        [f"- {label}: {code(one)}" for label, runs in _sides(found) for one in runs],
        [f"- differs: {code(one)}" for one in _differing(found)],
        [f"- {label.lower()}: {code(one)}" for label, texts in facts(found) for one in texts],
    ]
    for name, rows in by_scenario(found):
        cells = [[markdown.cell(row.figure.title), *row_of(row)] for row in rows]
        parts += [[f"**{code(name)}**"], markdown.table(["figure", *HEADS], cells)]
    parts += [[LEGEND]] if found.differences else []
    # What was asked and answered is for whoever has the files, and not for all who read a pull request.
    samples = pairs.summary(found.samples)
    parts += [[f"Samples: {code(samples)}"]] if samples else []
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def verdict(found: Comparison) -> str:
    """Say all of it in a line."""
    counts = {word: len(found.rows(word)) for word in (Word.BETTER, Word.WORSE, Word.INCOMPARABLE)}
    told = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    code = f" (exit code {found.exit_code:d})" if found.exit_code else ""
    return f"{found.word}{f': {told} of {len(found.differences)} figures' if told else ''}{code}"


def facts(found: Comparison) -> list[tuple[str, list[str]]]:
    """Return what is said beside the tables, by subject."""
    rule = found.rule
    return [
        ("Limits", [f"{one.state}: {one.allowance.text}: {one.text}" for one in found.allowances]),
        ("Rule", [f"tuned: {rule.state}: {rule.text}"] if rule else []),
        ("Remarks", found.remarks),
        ("Better", _names(found, Word.BETTER)),
        ("Worse", _names(found, Word.WORSE)),
        ("Verdict", [*(f"{one.subject}: {one.text}" for one in found.findings), verdict(found)]),
    ]


def by_scenario(found: Comparison) -> Iterator[tuple[str, list[Difference]]]:
    """Yield the rows of each scenario, and those of all together at the end."""
    for name in (*scenarios(found.base, found.new), ""):
        if rows := [row for row in found.differences if row.scenario == name]:
            yield name or ALL, rows


def row_of(row: Difference) -> list[str]:
    """Return the cells of a row under `HEADS`."""
    said = f"{row.word}: {row.note}" if row.note and row.word is Word.INCOMPARABLE else row.note or str(row.word)
    values = [row.figure.shown(value) for value in (row.base, row.new)]
    return [*values, row.shown(row.change), row.interval, said]


def _table(name: str, rows: Sequence[Difference]) -> list[str]:
    heads = [Column("", printable(name, 40)), *(Column("", head) for head in HEADS)]
    return table(heads, [[row.figure.title, *row_of(row)] for row in rows])


def _sides(found: Comparison) -> list[tuple[str, list[str]]]:
    return [("Base", _runs(found.base)), ("New", _runs(found.new))]


def _runs(one: Side) -> list[str]:
    return [_run(run) for run in one.runs]


def _run(run: Run) -> str:
    meta = run.meta
    told = [f"{meta.name} {meta.run}".rstrip(), meta.started, meta.target, format_duration(run.summary["duration_s"])]
    return ", ".join(filter(None, told))


def differing_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return what differs, on each side, and whether that makes numbers incomparable."""
    return [
        (one.what, one.base, one.new, "makes numbers incomparable" if one.prevents else "") for one in found.differing
    ]


def _differing(found: Comparison) -> list[str]:
    rows = differing_rows(found)
    return [f"{what}: {base} | {new}{f' ({so})' if so else ''}" for what, base, new, so in rows]


def _names(found: Comparison, word: Word) -> list[str]:
    rows = found.rows(word)
    return [format_list(f"{row.name} {row.shown(row.change)}" for row in rows)] if rows else []
