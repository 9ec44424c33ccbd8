"""What went wrong or slowly, for people: a line or a row for each kind of failure and for each of the slowest requests.

Promise: words of a server are harmless on a terminal and in a table of the web UI, and no line is wider than a page.
Both show the same figures, which come from `vllm_locust.summary`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_locust.figures import Summary
from vllm_locust.quantity import format_duration, format_number, format_share
from vllm_locust.terminal import COLUMNS, LABEL_WIDTH, Column, labelled, printable, table, width_of, wrapped
from vllm_locust.timeline import Outcome

SLOW = {"ttft": "first token", "itl_max": "gap"}
"""What a request was slow in, by the name of its list."""
_TITLES = {"ttft": "slowest first tokens", "itl_max": "longest gaps"}
_NO_NEWS = (0, 200, 429)
"""HTTP statuses that say no more than the outcome beside them."""
_ID_WIDTH = 40
"""The end of an id is what tells it from others; its beginning is the run's."""


# Lines of the report


@dataclass(slots=True)
class _Kind:
    """Failures of one outcome and status, of all scenarios and endpoints."""

    count: int = 0
    first_s: float | None = None
    last_s: float | None = None
    message: str = ""

    def add(self, failure: Summary) -> None:
        """Take one more; the message of the earliest stays."""
        self.count += failure["count"]
        first_s, last_s = failure["first_s"], failure["last_s"]
        if first_s is None:
            return
        if self.first_s is None or (first_s, failure["message"]) < (self.first_s, self.message):
            self.first_s, self.message = first_s, failure["message"]
        self.last_s = max(last_s, last_s if self.last_s is None else self.last_s)


def outcome_lines(summary: Summary) -> list[str]:
    """Return a line for each outcome that occurred, with its status if that says more, and the earliest message."""
    outcomes = {name: number for name, number in summary["total"]["outcomes"].items() if number}
    judged = sum(number for name, number in outcomes.items() if name != Outcome.CANCELLED)
    kinds = [kind for name, number in outcomes.items() for kind in _kinds(name, number, summary["failures"])]
    width = max((len(format_number(kind.count, 9)) for _, kind in kinds), default=0)
    lines = []
    for name, kind in kinds:
        share = "" if name == Outcome.CANCELLED else format_share(kind.count, judged)
        line = f"{format_number(kind.count, 9):>{width}} {printable(name, 19):<19} {share:>8}  "
        if name == Outcome.CANCELLED:
            line += "cut by the end of the run"
        elif kind.first_s is not None and kind.last_s is not None:
            line += _when(kind.first_s, kind.last_s)
            line += printable(f": {kind.message}", max(COLUMNS - LABEL_WIDTH - width_of(line), 1))
        lines.append(line)
    return [f"{'' if i else 'Outcomes':{LABEL_WIDTH}}{line}" for i, line in enumerate(lines)]


def _kinds(outcome: str, number: int, failures: Iterable[Summary]) -> list[tuple[str, _Kind]]:
    """Part an outcome by its statuses, the most frequent first; of ok and cancelled requests none is known."""
    kinds: dict[str, _Kind] = {}
    for failure in failures:
        if failure["outcome"] == outcome:
            kinds.setdefault(_named(outcome, failure["status"]), _Kind()).add(failure)
    return [(name, kind) for name, kind in kinds.items() if kind.count] or [(outcome, _Kind(number))]


def _named(outcome: str, status: int) -> str:
    return outcome if status in _NO_NEWS else f"{outcome} {status}"


def _when(first_s: float, last_s: float) -> str:
    first, last = format_duration(first_s), format_duration(last_s)
    return f"at {first}" if first == last else f"{first} to {last}"


def slowest_lines(slowest: list[Summary]) -> list[str]:
    """Return the one slowest first token and the one longest gap, of whichever scenario."""
    told = []
    for metric, what in SLOW.items():
        found = [slow for slow in slowest if slow["metric"] == metric]
        if found:
            worst = max(found, key=lambda slow: slow["value_s"])
            place = f"{worst['scenario']}, {worst['request_id']}, at {format_duration(worst['at_s'])}"
            outcome = "" if worst["outcome"] == Outcome.OK else f", {worst['outcome']}"
            told.append(f"{what} {format_duration(worst['value_s'])}: {place}{outcome}")
    return labelled("Slowest", [*told[:-1], *(f"{last}; more: --full" for last in told[-1:])])


# Tables of the long report


_FAILURE_HEADS = (
    Column("", "scenario"),
    Column("", "endpoint"),
    Column("", "kind"),
    Column("", "status"),
    Column("", "count"),
    Column("", "share"),
    Column("first", "[s]"),
    Column("last", "[s]"),
)


def failure_table(failures: list[Summary]) -> list[str]:
    """Return a row for each kind of failure, with its first message on lines of its own; nothing without failures."""
    rows = [
        [
            printable(kind["scenario"], COLUMNS),
            printable(kind["endpoint"], 11),
            printable(kind["outcome"], 19),
            format_number(kind["status"] or None, 6),
            format_number(kind["count"], 9),
            _share(kind),
            format_number(kind["first_s"], 7),
            format_number(kind["last_s"], 7),
        ]
        for kind in failures
    ]
    if not rows:
        return []
    lines = table(_FAILURE_HEADS, rows)
    heads, lines = lines[: -len(rows)], lines[-len(rows) :]
    indent = " " * 4
    messages = [wrapped(printable(kind["message"]), COLUMNS - len(indent)) for kind in failures]
    shown = [[line, *(f"{indent}{part}" for part in said if part)] for line, said in zip(lines, messages, strict=True)]
    title = "failures: share of the requests of their scenario, and the first message of their kind"
    return [title, *heads, *(line for block in shown for line in block)]


def _share(kind: Summary) -> str:
    return "–" if kind["share"] is None else format_share(kind["share"], 1)


def slowest_tables(slowest: list[Summary], scenarios: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lists of each scenario, the slowest first."""
    for scenario in scenarios:
        for metric in SLOW:
            found = [slow for slow in slowest if (slow["scenario"], slow["metric"]) == (scenario, metric)]
            if found:
                yield [f"{printable(scenario, 60)}: {_TITLES[metric]}", *_slowest_table(metric, found)]


def _slowest_table(metric: str, found: list[Summary]) -> list[str]:
    heads = [
        Column("", "request id"),
        Column("TTFT" if metric == "ttft" else "gap", "[ms]"),
        Column("at", "[s]"),
        Column("tokens", "in"),
        Column("tokens", "out"),
        Column("in", "flight"),
        Column("", "worker"),
        Column("", "outcome"),
    ]
    rows = [
        [
            _ending(printable(slow["request_id"], COLUMNS)),
            format_number(1e3 * slow["value_s"], 9),
            format_number(slow["at_s"], 7),
            *(format_number(slow[key], 7) for key in ("input_tokens", "output_tokens", "in_flight")),
            printable(_short(slow["worker"]), 15),
            "" if slow["outcome"] == Outcome.OK else printable(slow["outcome"], 15),
        ]
        for slow in found
    ]
    if not any(row[-1] for row in rows):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return table(heads, rows)


def _ending(request_id: str) -> str:
    return request_id if len(request_id) <= _ID_WIDTH else f"…{request_id[1 - _ID_WIDTH :]}"


def _short(worker: str) -> str:
    """Leave the host out: the number of a worker is its own."""
    return worker.partition(" (")[0]


# Rows of the web UI


FAILURE_COLUMNS = {
    "scenario": "Scenario",
    "endpoint": "Endpoint",
    "kind": "Kind",
    "status": "Status",
    "count": "Count",
    "share": "Share of scenario",
    "first": "First [s]",
    "last": "Last [s]",
    "message": "First message",
}
SLOW_COLUMNS = {
    "scenario": "Scenario",
    "what": "Slow in",
    "ms": "[ms]",
    "at": "At [s]",
    "input": "Tokens in",
    "output": "Tokens out",
    "flight": "In flight",
    "worker": "Worker",
    "id": "x-request-id",
    "outcome": "Outcome",
}


def failure_rows(failures: list[Summary]) -> list[tuple[str | float | None, ...]]:
    """Return a row of `FAILURE_COLUMNS` for each kind; numbers stay numbers, by which the browser sorts."""
    return [
        (
            printable(kind["scenario"]),
            kind["endpoint"],
            kind["outcome"],
            kind["status"] or None,
            kind["count"],
            _share(kind),
            _rounded(kind["first_s"]),
            _rounded(kind["last_s"]),
            printable(kind["message"]),
        )
        for kind in failures
    ]


def slow_rows(slowest: list[Summary]) -> list[tuple[str | float | None, ...]]:
    """Return a row of `SLOW_COLUMNS` for each of the slowest requests."""
    return [
        (
            printable(slow["scenario"]),
            SLOW.get(slow["metric"], slow["metric"]),
            round(1e3 * slow["value_s"], 2),
            _rounded(slow["at_s"]),
            slow["input_tokens"],
            slow["output_tokens"],
            slow["in_flight"],
            printable(slow["worker"]),
            printable(slow["request_id"]),
            slow["outcome"],
        )
        for slow in sorted(slowest, key=lambda slow: (slow["scenario"], slow["metric"] != "ttft"))
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
