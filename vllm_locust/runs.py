"""The runs of a directory as a table, those side by side that sent the same scenario to the same server.

Promise: every run file below the directory has a row, or a line that says what is wrong with it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from vllm_locust import facts
from vllm_locust.errors import InputError
from vllm_locust.overview import BRIEF, cell
from vllm_locust.quantity import format_number
from vllm_locust.results import FILE_NAME, Run, load
from vllm_locust.summary import Meta
from vllm_locust.terminal import COLUMNS, Column, printable, table, wrapped
from vllm_locust.verdict import exit_code, findings

_HEADS = (
    Column("", "run"),
    Column("", "load"),
    Column("", "requests"),
    Column("", "failed"),
    *BRIEF,
    Column("", "verdict"),
)
_LOAD_WIDTH = 18


def text(directory: Path) -> str:
    """Return a table for each scenario and server, the latest run last; raises `InputError` where there is no run."""
    groups: dict[str, list[tuple[str, list[str], str]]] = defaultdict(list)
    unreadable: list[str] = []
    for file in sorted(directory.glob(f"**/{FILE_NAME}")):
        try:
            run = load(file)
        except InputError as error:
            unreadable += wrapped(printable(str(error)), COLUMNS)
        else:
            row = _row(str(file.parent.relative_to(directory)), run)
            groups[_sent(run.meta)].append((run.meta.started, row, run.meta.note))
    if not groups and not unreadable:
        raise InputError(f"{directory}: no {FILE_NAME} in it or below; give a directory that runs were saved in")
    return "\n\n".join("\n".join(part) for part in (*_tables(groups), unreadable) if part) + "\n"


def _tables(groups: dict[str, list[tuple[str, list[str], str]]]) -> Iterator[list[str]]:
    for sent, found in groups.items():
        found.sort()
        lines = [line.rstrip() for line in table(_HEADS, [row for _, row, _ in found])]
        heads, rows = lines[: -len(found)], lines[-len(found) :]
        noted = ([row, *_note(note)] for row, (_, _, note) in zip(rows, found, strict=True))
        yield [*wrapped(printable(sent), COLUMNS), *heads, *chain.from_iterable(noted)]


def _note(note: str) -> list[str]:
    return [f"  {line}" for line in wrapped(printable(note), COLUMNS - 2)] if note else []


def _sent(meta: Meta) -> str:
    scenarios = ", ".join(name or "bodies of its own" for name in dict.fromkeys(meta.scenarios.values()))
    target = f" to {meta.target}" if meta.target else ""
    return f"{scenarios}{target}" + (f", model {meta.model}" if meta.model else "")


def _row(name: str, run: Run) -> list[str]:
    whole, code = run.summary["total"], exit_code(findings(run.summary, run.meta))
    return [
        printable(name, COLUMNS),
        printable(next(facts.asked(run.meta), ""), _LOAD_WIDTH),
        format_number(whole["requests"], 8),
        format_number(whole["failed"], 6),
        *(cell(whole["ttft"], key, 1e3, 6) for key in ("p50", "p95")),
        *(cell(whole["itl"], key, 1e3, 6) for key in ("mean", "p99")),
        format_number(whole["rates"]["output_tokens_per_s"], 6),
        f"exit {code:d}" if code else "ok",
    ]
