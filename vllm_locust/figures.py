"""What some cells were like, as plain values: how their requests ended, latencies, tokens, rates.

"No sample" is null, never 0; times are in seconds. Latencies are of the phases that are asked for, outcomes and tokens
of all; rates are of what happened in a stretch of time, whatever the phase. Nothing here knows whose cells they are.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from vllm_locust.cell import Cell, Cells, select, total
from vllm_locust.histogram import Histogram
from vllm_locust.judgement import due
from vllm_locust.quantity import NS_PER_S
from vllm_locust.timeline import CUT, METRICS, Outcome, Unit

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
COUNTS = ("estimated", "coalesced", "short_outputs", "heartbeats", "comments", "reconnects")
"""Counters that a summary shows as they are."""

Summary = dict[str, Any]


def figures(  # noqa: PLR0913 - what is summed up, and of what
    cells: Cells, within: Cells, phases: Container[str], length_s: float | None, *, name: str | None = None, good: bool
) -> Summary:
    """Return all of it for the scenario of a name, or for all of them.

    Rates are those of what happened `within` a stretch of so many seconds; `good` asks for those of good requests.
    """
    chosen = {key: cell for key, cell in cells.items() if name is None or key.scenario == name}
    now = [*select(within, scenario=name)]
    return requests(chosen, phases) | {
        "rates": rates(now, length_s) | _goodput(chosen, phases, now, length_s, wanted=good)
    }


def requests(cells: Cells, phases: Container[str]) -> Summary:
    """Return how many requests there were, how they ended, and what those of some phases were like."""
    steady = total(cell for key, cell in cells.items() if key.phase in phases)
    every = total(cells.values())
    outcomes = outcomes_of(every)
    failed, cancelled = failed_of(outcomes), outcomes[Outcome.CANCELLED]
    return {
        "requests": every.counters.get("sent", 0),
        "failed": failed,
        "cancelled": cancelled,
        "scheduled": every.counters.get("scheduled"),
        "dropped": every.counters.get("dropped", 0),
        # Of the requests that ended by themselves: one that was cut is neither success nor failure.
        "failed_share": ratio(failed, outcomes[Outcome.OK] + failed),
        "outcomes": outcomes,
        **{known.name: metric(steady.histograms.get(known.name), known.unit) for known in METRICS.values()},
        "judged": _judged(steady),
        "tokens": _tokens(every),
        "counts": {name: every.counters.get(name, 0) for name in COUNTS}
        | {"zero_gaps": steady.histograms.get("itl", Histogram()).zeros},
        "finish": {
            name.removeprefix("finish|"): number
            for name, number in sorted(every.counters.items())
            if name.startswith("finish|")
        },
    }


def metric(histogram: Histogram | None, unit: Unit) -> Summary:
    """Return the statistics of a metric, null where there is no sample."""
    if histogram is None or not histogram.count:
        return {"count": 0, **dict.fromkeys(("mean", *PERCENTILES, "min", "max"))}
    plain = seconds if unit is Unit.SECONDS else _whole
    low, high = histogram.min or 0, histogram.max or 0
    # Percentiles are floats, and above 2**53 those may step over the exact minimum or maximum.
    values = [min(max(value or 0, low), high) for value in histogram.percentiles(PERCENTILES.values())]
    mean = histogram.sum / histogram.count
    return {
        "count": histogram.count,
        "mean": mean / NS_PER_S if unit is Unit.SECONDS else mean,
        **{name: plain(value) for name, value in zip(PERCENTILES, values, strict=True)},
        "min": plain(low),
        "max": plain(high),
    }


def _judged(steady: Cell) -> Summary:
    """Return the percentiles in which a failure counts as infinitely late: a request never gains by failing.

    Nor does one that was due and was dropped. Requests that the end of the run cut are left out, and counted.
    """
    dropped = steady.counters.get("dropped", 0)
    failed = {
        "ttft": steady.counters.get("failed_without_token", 0) + dropped,
        "e2el": failed_of(outcomes_of(steady)) + dropped,
    }
    judged = {}
    for name, failures in failed.items():
        histogram = steady.histograms.get(name, Histogram())
        values = histogram.percentiles(PERCENTILES.values(), failed=failures)
        judged[name] = {
            "count": histogram.count + failures,
            "failed": failures,
            "cut": steady.histograms.get(CUT[name], Histogram()).count,
            **{key: seconds(value) for key, value in zip(PERCENTILES, values, strict=True)},
        }
    return judged


def rates(cells: Iterable[Cell], length_s: float | None) -> Summary:
    """Return what happened per second of a stretch of time."""
    cell = total(cells)
    numbers = {
        "request_per_s": outcomes_of(cell)[Outcome.OK],
        "sent_per_s": cell.counters.get("sent", 0),
        "input_tokens_per_s": cell.histograms.get("input_tokens", Histogram()).sum,
        "output_tokens_per_s": cell.counters.get("tokens_received", 0),
        "output_tokens_failed_per_s": cell.counters.get("tokens_failed", 0),
    }
    offered = cell.counters.get("scheduled")
    return {
        "offered_per_s": None if offered is None else ratio(offered, length_s),
        **{name: ratio(number, length_s) for name, number in numbers.items()},
    }


def _goodput(
    cells: Cells, phases: Container[str], within: Iterable[Cell], length_s: float | None, *, wanted: bool
) -> Summary:
    """Return good requests per second, and their share of the requests of these phases that were due."""
    if not wanted:
        return {"goodput_per_s": None, "goodput_share": None}
    steady = total(cell for key, cell in cells.items() if key.phase in phases)
    return {
        "goodput_per_s": ratio(total(within).counters.get("good", 0), length_s),
        "goodput_share": ratio(steady.counters.get("good", 0), due(steady)),
    }


def _tokens(cell: Cell) -> Summary:
    events, received = cell.counters.get("token_events", 0), cell.counters.get("tokens_received", 0)
    return {
        "input": cell.histograms.get("input_tokens", Histogram()).sum,
        "output_received": received,
        "output_failed": cell.counters.get("tokens_failed", 0),
        "surplus": cell.counters.get("tokens_surplus", 0),
        "events": events,
        "tokens_per_event": ratio(received, events),
    }


def ended(counters: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield outcome, HTTP status and number of the requests that ended, of the counters of a cell."""
    for name, number in counters.items():
        if name.startswith("outcome|"):
            _, outcome, status = name.split("|")
            yield outcome, int(status), number


def outcomes_of(cell: Cell) -> dict[str, int]:
    """Return the count of every outcome of the closed set, and of those of a later version."""
    outcomes = {outcome.value: 0 for outcome in Outcome}
    for outcome, _, number in ended(cell.counters):
        outcomes[outcome] = outcomes.get(outcome, 0) + number
    return outcomes


def failed_of(outcomes: dict[str, int]) -> int:
    """Return how many of these requests failed."""
    return sum(number for outcome, number in outcomes.items() if is_failure(outcome))


def is_failure(outcome: str) -> bool:
    """Tell whether a request that ended so has failed."""
    return outcome not in (Outcome.OK, Outcome.CANCELLED)


def ratio(part: float, whole: float | None) -> float | None:
    """Divide, where there is anything to divide by."""
    return part / whole if whole else None


def seconds(value_ns: float | None) -> float | str | None:
    """Round to the nanosecond that was measured; +inf, a failure judged as late, is a word of its own."""
    if value_ns is None:
        return None
    return "failed" if math.isinf(value_ns) else round(value_ns / NS_PER_S, 9)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
