"""Texts and tables for a terminal, in which nothing that somebody else wrote can do harm.

No line is wider than `COLUMNS`, whatever the width of its characters, and none holds a character that a terminal obeys.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

COLUMNS = 100
LABEL_WIDTH = 10
MARK = "*"
"""Ends a number that means something else than its column says."""
_TEXT_LIMIT = 1000
"""Columns after which a text of somebody else is cut even where it may wrap."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; neighbours of one group share a head above their own."""

    group: str
    head: str

    @property
    def title(self) -> str:
        """The one line that it has in a table without shared heads, like `TTFT p50 [ms]`."""
        group, _, unit = self.group.partition(" [")
        return f"{group} {self.head}{unit and f' [{unit}'}".strip()


def printable(text: str, width: int = _TEXT_LIMIT) -> str:
    """Make a text of somebody else harmless: one line of `width` columns at most, no control codes.

    White space becomes one blank; what a terminal obeys or hides (ESC, C1, bidi overrides) becomes an escape.
    """
    shown: list[str] = []
    used = 0
    # Combining marks have no width: the number of characters has a limit of its own.
    words = " ".join(text[: 8 * width].split())
    for position, char in enumerate(words):
        piece = char if char.isprintable() else _escape(char)
        used += width_of(piece)
        if used > width or position >= 4 * width:
            return _cut(shown, width)
        shown.append(piece)
    return "".join(shown)


def width_of(text: str) -> int:
    """Return how many columns a printable text takes on a terminal."""
    return sum(_char_columns(char) for char in text)


def _char_columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if char.isascii() else char.encode("ascii", "backslashreplace").decode()


def _cut(pieces: list[str], width: int) -> str:
    while pieces and width_of("".join(pieces)) >= width:
        pieces.pop()
    return "".join(pieces) + "…"


def wrapped(text: str, width: int) -> list[str]:
    """Break a harmless text between words, and within those that are wider than a line."""
    lines = [""]
    for word in text.split(" "):
        for piece in _pieces(word, width):
            if lines[-1] and width_of(lines[-1]) + 1 + width_of(piece) > width:
                lines.append("")
            lines[-1] += f" {piece}" if lines[-1] else piece
    return lines


def _pieces(word: str, width: int) -> Iterator[str]:
    piece, used = "", 0
    for char in word:
        used += width_of(char)
        if used > width:
            yield piece
            piece, used = "", width_of(char)
        piece += char
    yield piece


def labelled(label: str, texts: Iterable[str]) -> list[str]:
    """Return texts of anybody, each on lines of its own, beside one label; no lines without a text."""
    lines = [line for text in texts for line in wrapped(printable(text), COLUMNS - LABEL_WIDTH)]
    return [f"{label if not i else '':{LABEL_WIDTH}}{line}" for i, line in enumerate(lines)]


def table(heads: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay a table out: the first column to the left and cut if need be, the others to the right."""
    names, *numbers = zip(*rows, strict=True)
    cells = [names, *map(_aligned, numbers)]
    natural = [max(map(width_of, (head.head, *column))) for head, column in zip(heads, cells, strict=True)]
    grouped = groupby(range(len(heads)), lambda i: heads[i].group)
    groups = [(label, list(members)) for label, members in grouped]
    for between, inside in ((2, 2), (2, 1), (1, 1)):
        gaps = [0, *(inside if a.group and a.group == b.group else between for a, b in pairwise(heads))]
        widths = natural[:]
        for label, members in groups:
            widths[members[0]] += max(0, len(label) - _span(members, widths, gaps))
        free = COLUMNS - sum(widths[1:]) - sum(gaps)
        if widths[0] <= free:
            break
    widths[0] = min(widths[0], free)
    top = [" " * gaps[members[0]] + _over(label, members, widths, gaps) for label, members in groups]
    lines = ["".join(top)] if any(head.group for head in heads) else []
    for row in ([head.head for head in heads], *zip(*cells, strict=True)):
        name = printable(row[0], widths[0])
        line = name + " " * (widths[0] - width_of(name))
        for cell, width, gap in zip(row[1:], widths[1:], gaps[1:], strict=True):
            line += " " * (gap + width - width_of(cell)) + cell
        lines.append(line)
    return lines


def _span(members: Sequence[int], widths: Sequence[int], gaps: Sequence[int]) -> int:
    return sum(widths[i] for i in members) + sum(gaps[i] for i in members[1:])


def _over(label: str, members: Sequence[int], widths: Sequence[int], gaps: Sequence[int]) -> str:
    """Return the head of a group, ruled where it spans several columns."""
    span = _span(members, widths, gaps)
    if label and len(members) > 1 and span > len(label) + 1:
        return f" {label} ".center(span, "-")
    return label.rjust(span)


def _aligned(column: Sequence[str]) -> list[str]:
    """Make room for the mark in a column of numbers that has one."""
    marked = any(cell.endswith(MARK) for cell in column)
    return [f"{cell} " if marked and not cell.endswith(MARK) else cell for cell in column]
