"""A recording as plain values: tokens, seconds, shares and nulls, derived once, from nothing but the recording.

Latencies, `judged`, zero gaps and fidelity are of requests of the phase `steady`, however late they ended; outcomes,
tokens and counts are of the warm-up too, while what was asked again at the end is counted apart. Rates and streams in
flight are of what happened between the warm-up and the stop, whatever the phase.
"No sample" is null, never 0. Nothing here knows how a number is shown.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_locust import limit as limits
from vllm_locust import stability
from vllm_locust.api import Counting
from vllm_locust.cell import RETRY, STEADY, WARMUP, Cell, Cells, select, total
from vllm_locust.fidelity import DEFAULTS, Limits, faults
from vllm_locust.histogram import Histogram
from vllm_locust.judgement import due, judge
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Recording
from vllm_locust.slowest import each
from vllm_locust.timeline import CUT, METRICS, Outcome, Unit
from vllm_locust.workers import Seen, all_seen

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
COUNTS = ("estimated", "coalesced", "short_outputs", "heartbeats", "comments", "reconnects")
"""Counters that a summary shows as they are."""

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a run was, for people and for comparisons; no number is computed from it, but the limits are applied."""

    name: str = "run"
    run: str = ""
    started: str = ""
    """ISO 8601, UTC; a label only."""
    plugin_version: str = ""
    locust_version: str = ""
    python_version: str = ""
    target: str = ""
    """URL of the server, without credentials."""
    model: str = ""
    scenarios: dict[str, str] = field(default_factory=dict)
    """Name of the scenario by user class."""
    endpoints: dict[str, str] = field(default_factory=dict)
    """`chat` or `completions` by user class."""
    parts: list[str] = field(default_factory=list)
    """Parts that were configured, each of which is shown, even without a request."""
    scenario_hash: str = ""
    seed: int = 0
    cache: str = ""
    counting: Counting = field(default_factory=Counting)
    """How events were asked for the tokens that they carry."""
    load: dict[str, Any] = field(default_factory=dict)
    """`users`, `spawn_rate`, `run_time_s` (or null), `workers`."""
    expected_workers: list[str] = field(default_factory=list)
    missing_workers: list[str] = field(default_factory=list)
    """Workers that took part and whose final data are missing."""
    ended_early: bool = False
    remarks: list[str] = field(default_factory=list)
    generator_limits: Limits = DEFAULTS
    """What `fidelity` is judged by, now and later."""
    limits: list[str] = field(default_factory=list)
    """What the run has to meet, now and later, as `vllm_locust.limit.parse` takes it."""
    goodput: list[str] = field(default_factory=list)
    """What a good request was, a text for each scope; empty where nothing said so."""
    stability: bool = False
    """Whether the run is to tell if the server was steady."""


def summary(recording: Recording, meta: Meta) -> Summary:
    """Return the numbers of the whole run and of each scenario; the module says of which phases."""
    everything, within, length_s = recording.totals, recording.within(), _length_s(recording)
    cells = {key: cell for key, cell in everything.items() if key.phase != RETRY}
    phases, good, labels = recording.phases, bool(meta.goodput), sorted({key.scenario for key in cells})

    def scope(name: str | None) -> Summary:
        chosen = {key: cell for key, cell in cells.items() if name is None or key.scenario == name}
        rates = _rates(select(within, scenario=name), length_s) | _goodput(
            chosen, phases, select(within, scenario=name), length_s, wanted=good
        )
        return _scope(chosen, phases) | {"rates": rates}

    whole = scope(None)
    whole["rates"] |= _in_flight(recording, recording.steady_windows, length_s)
    scenarios = {name: scope(name) for name in dict.fromkeys([*meta.parts, *labels])}
    fidelity = fidelity_of(recording, meta.generator_limits, all_seen(recording))
    judged = _limits(meta.limits, cells, phases, {"": whole} | scenarios)
    return {
        "duration_s": length_s,
        "warmup": _warmup(recording, cells),
        "total": whole,
        "scenarios": scenarios,
        "limits": judged,
        "retry": _asked(select(everything, phase=RETRY)),
        "stages": _stages(recording, cells, meta),
        "failures": failures_of(recording),
        "slowest": slowest_of(recording),
        "fidelity": fidelity,
        **({"stability": _stability(recording, meta, fidelity, judged)} if meta.stability else {}),
    }


def _stability(recording: Recording, meta: Meta, fidelity: Summary, judged: Iterable[Summary]) -> Summary:
    return stability.judge(
        recording,
        missing=meta.missing_workers,
        early=meta.ended_early,
        faulty=bool(fidelity["token_events"] and faults(fidelity, meta.generator_limits)),
        limited=any(limit["metric"] == "failures" and not limit["scope"] for limit in judged),
    )


def _warmup(recording: Recording, cells: Cells) -> Summary | None:
    """Return what was left out, null where nothing was; `s` is null where the run was over first."""
    if not recording.steady_ns:
        return None
    return {"s": recording.steady_ns / NS_PER_S if WARMUP not in recording.phases else None} | _asked(
        select(cells, phase=WARMUP)
    )


def _asked(cells: Iterable[Cell]) -> Summary:
    """Return how many requests there were, and how they ended."""
    cell = total(cells)
    outcomes = _outcomes(cell)
    return {"requests": cell.counters.get("sent", 0), "ok": outcomes[Outcome.OK], "failed": _failed(outcomes)}


def _stages(recording: Recording, cells: Cells, meta: Meta) -> list[Summary]:
    """Return what each stage was like: latencies of the requests sent in it, rates of what happened in it.

    Where there are limits, it says whether the stage met all of them, and which one was the last that did.
    """
    values, stages, good = meta.load.get("stages", ()), [], bool(meta.goodput)
    for number, since_ns, until_ns in recording.stages:
        length_s = (until_ns - since_ns) / NS_PER_S
        windows = range(recording.grid.index(since_ns), recording.grid.count(until_ns))
        sent = {key: cell for key, cell in cells.items() if key.stage == number}
        within = recording.windows_in(since_ns, until_ns)

        def scope(name: str | None, sent: Cells = sent, within: Cells = within, length_s: float = length_s) -> Summary:
            chosen = {key: cell for key, cell in sent.items() if name is None or key.scenario == name}
            now = [*select(within, scenario=name)]
            return _scope(chosen, (STEADY,)) | {
                "rates": _rates(now, length_s) | _goodput(chosen, (STEADY,), now, length_s, wanted=good)
            }

        whole = scope(None)
        parts = {name: scope(name) for name in meta.parts}
        judged = _limits(meta.limits, sent, (STEADY,), {"": whole} | parts)
        whole["rates"] |= _in_flight(recording, windows, length_s)
        stages.append(
            {
                "stage": number,
                "value": values[number - 1] if number <= len(values) else None,
                "since_s": since_ns / NS_PER_S,
                "length_s": length_s,
                **{
                    name: whole[name]
                    for name in ("requests", "failed", "failed_share", "ttft", "itl", "judged", "rates")
                },
                "limits": [{name: limit[name] for name in ("limit", "state", "text")} for limit in judged],
            }
        )
    return stages


def _limits(texts: Iterable[str], cells: Cells, phases: Container[str], scopes: Mapping[str, Summary]) -> list[Summary]:
    """Return each limit with what is said of it (see `vllm_locust.judgement`), by requests of these phases."""
    judged = []
    for text in texts:
        limit = limits.parse(text, where="limits")
        steady = total(cell for key, cell in cells.items() if key.phase in phases and limit.scope in ("", key.scenario))
        scope = scopes.get(limit.scope) or _scope({}, ()) | {
            "rates": _rates((), None) | _goodput({}, (), (), None, wanted=True)
        }
        judged.append(judge(limit, steady, scope).plain())
    return judged


def _scope(cells: Cells, phases: Container[str]) -> Summary:
    steady = total(cell for key, cell in cells.items() if key.phase in phases)
    every = total(cells.values())
    outcomes = _outcomes(every)
    failed, cancelled = _failed(outcomes), outcomes[Outcome.CANCELLED]
    return {
        "requests": every.counters.get("sent", 0),
        "failed": failed,
        "cancelled": cancelled,
        "scheduled": every.counters.get("scheduled"),
        "dropped": every.counters.get("dropped", 0),
        # Of the requests that ended by themselves: one that was cut is neither success nor failure.
        "failed_share": _ratio(failed, outcomes[Outcome.OK] + failed),
        "outcomes": outcomes,
        **{name: _metric(steady.histograms.get(name), metric.unit) for name, metric in METRICS.items()},
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


def _metric(histogram: Histogram | None, unit: Unit) -> Summary:
    if histogram is None or not histogram.count:
        return {"count": 0, **dict.fromkeys(("mean", *PERCENTILES, "min", "max"))}
    plain = _seconds if unit is Unit.SECONDS else _whole
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
        "e2el": _failed(_outcomes(steady)) + dropped,
    }
    judged = {}
    for name, failures in failed.items():
        histogram = steady.histograms.get(name, Histogram())
        values = histogram.percentiles(PERCENTILES.values(), failed=failures)
        judged[name] = {
            "count": histogram.count + failures,
            "failed": failures,
            "cut": steady.histograms.get(CUT[name], Histogram()).count,
            **{key: _seconds(value) for key, value in zip(PERCENTILES, values, strict=True)},
        }
    return judged


def _rates(cells: Iterable[Cell], length_s: float | None) -> Summary:
    cell = total(cells)
    numbers = {
        "request_per_s": _outcomes(cell)[Outcome.OK],
        "sent_per_s": cell.counters.get("sent", 0),
        "input_tokens_per_s": cell.histograms.get("input_tokens", Histogram()).sum,
        "output_tokens_per_s": cell.counters.get("tokens_received", 0),
        "output_tokens_failed_per_s": cell.counters.get("tokens_failed", 0),
    }
    offered = cell.counters.get("scheduled")
    return {
        "offered_per_s": None if offered is None else _ratio(offered, length_s),
        **{name: _ratio(number, length_s) for name, number in numbers.items()},
    }


def _goodput(
    cells: Cells, phases: Container[str], within: Iterable[Cell], length_s: float | None, *, wanted: bool
) -> Summary:
    """Return good requests per second, and their share of the requests of these phases that were due."""
    if not wanted:
        return {"goodput_per_s": None, "goodput_share": None}
    steady = total(cell for key, cell in cells.items() if key.phase in phases)
    return {
        "goodput_per_s": _ratio(total(within).counters.get("good", 0), length_s),
        "goodput_share": _ratio(steady.counters.get("good", 0), due(steady)),
    }


def _tokens(cell: Cell) -> Summary:
    events, received = cell.counters.get("token_events", 0), cell.counters.get("tokens_received", 0)
    return {
        "input": cell.histograms.get("input_tokens", Histogram()).sum,
        "output_received": received,
        "output_failed": cell.counters.get("tokens_failed", 0),
        "surplus": cell.counters.get("tokens_surplus", 0),
        "events": events,
        "tokens_per_event": _ratio(received, events),
    }


def _in_flight(recording: Recording, windows: range, length_s: float | None) -> Summary:
    """Return the mean over some windows, and the peak: the largest sum of the workers' peaks in one of them."""
    peaks: Counter[int] = Counter()
    streams_ns = 0
    for (_, index), gauges in recording.gauges.items():
        if index in windows:
            peaks[index] += gauges.in_flight_peak
            streams_ns += gauges.in_flight_ns
    mean = _ratio(streams_ns / NS_PER_S, length_s)
    return {"in_flight_mean": mean, "in_flight_peak": max(peaks.values(), default=None)}


def failures_of(recording: Recording) -> list[Summary]:
    """Return each kind of failure with its count, share, times and one message, the most frequent first.

    The share is of the requests of its scenario that ended by themselves.
    """
    counts: Counter[tuple[str, str, str, int]] = Counter()
    judged: Counter[str] = Counter()
    for key, cell in recording.totals_of(()).items():
        if key.phase == RETRY:
            continue
        for outcome, status, number in _ended(cell):
            counts[key.scenario, key.endpoint, outcome, status] += number
            judged[key.scenario] += 0 if outcome == Outcome.CANCELLED else number
    kinds = [kind for kind in {**counts, **recording.failures} if _is_failure(kind[2])]
    return [
        _failure(kind, counts[kind], judged[kind[0]], recording.failures.get(kind))
        for kind in sorted(kinds, key=lambda kind: (-counts[kind], kind))
    ]


def _failure(kind: tuple[str, str, str, int], number: int, judged: int, known: Failure | None) -> Summary:
    return {
        **dict(zip(("scenario", "endpoint", "outcome", "status"), kind, strict=True)),
        "count": number,
        "share": _ratio(number, judged),
        "first_s": _seconds(known.first_ns) if known else None,
        "last_s": _seconds(known.last_ns) if known else None,
        "message": known.message if known else "",
    }


def slowest_of(recording: Recording) -> list[Summary]:
    """Return the requests of each scenario with the slowest first tokens and the longest gaps, the slowest first."""
    return [
        {
            "scenario": slow.scenario,
            "endpoint": slow.endpoint,
            "metric": slow.metric,
            "value_s": _seconds(slow.value_ns),
            "at_s": _seconds(slow.at_ns),
            "worker": slow.worker,
            "request_id": slow.request_id,
            "input_tokens": slow.input_tokens,
            "output_tokens": slow.output_tokens,
            "in_flight": slow.in_flight,
            "outcome": slow.outcome,
        }
        for slow in each(recording.slowest)
    ]


def fidelity_of(recording: Recording, limits: Limits, workers: dict[str, Seen]) -> Summary:
    """Return how far to trust the numbers: of token times, and of each worker, as it was seen."""
    cells = recording.totals_of(("uncertainty", "read_lag", "itl", "ttft"))
    steady = total(cell for key, cell in cells.items() if key.phase in recording.phases)
    stamped, unstamped = steady.counters.get("stamped", 0), steady.counters.get("unstamped", 0)
    uncertainty = steady.histograms.get("uncertainty", Histogram())
    gap_ns, gap = _typical_gap(steady)
    bounds_ns = [] if gap_ns is None else [limits.uncertainty * gap_ns]
    lags = {name: _metric(steady.histograms.get(name), Unit.SECONDS) for name in ("read_lag", "uncertainty")}
    return {
        "token_events": sum(cell.counters.get("token_events", 0) for cell in cells.values()),
        "stamped_share": _ratio(stamped, stamped + unstamped),
        "uncertain_share": next(
            (_ratio(uncertainty.count - sure, uncertainty.count) for sure in uncertainty.count_at_most(bounds_ns)), None
        ),
        "gap": {"name": gap, "s": _seconds(gap_ns)},
        **{name: {key: lag[key] for key in ("p50", "p99", "max")} for name, lag in lags.items()},
        "workers": {worker: seen.figures() for worker, seen in workers.items()},
    }


def _typical_gap(steady: Cell) -> tuple[float | None, str]:
    """Return what uncertainty is held against: the median gap, or what is left where that is 0 or absent."""
    gaps = steady.histograms.get("itl", Histogram())
    for value_ns, name in ((gaps.percentile(0.5), "median gap"), (gaps.mean, "mean gap")):
        if value_ns:
            return value_ns, name
    return steady.histograms.get("ttft", Histogram()).percentile(0.5), "median TTFT"


def _ended(cell: Cell) -> Iterator[tuple[str, int, int]]:
    for name, number in cell.counters.items():
        if name.startswith("outcome|"):
            _, outcome, status = name.split("|")
            yield outcome, int(status), number


def _outcomes(cell: Cell) -> dict[str, int]:
    """Return the count of every outcome of the closed set, and of those of a later version."""
    outcomes = {outcome.value: 0 for outcome in Outcome}
    for outcome, _, number in _ended(cell):
        outcomes[outcome] = outcomes.get(outcome, 0) + number
    return outcomes


def _failed(outcomes: dict[str, int]) -> int:
    return sum(number for outcome, number in outcomes.items() if _is_failure(outcome))


def _is_failure(outcome: str) -> bool:
    return outcome not in (Outcome.OK, Outcome.CANCELLED)


def _length_s(recording: Recording) -> float | None:
    """Return how long the run lasted after its warm-up; before its end, how far the first worker has got."""
    if recording.length_ns is not None:
        return (recording.length_ns - recording.since_ns) / NS_PER_S
    spans: Counter[str] = Counter()
    steady = recording.steady_windows
    for (worker, index), gauges in recording.gauges.items():
        if index in steady:
            spans[worker] += gauges.span_ns
    return max(spans.values(), default=0) / NS_PER_S or None


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _seconds(value_ns: float | None) -> float | str | None:
    """Round to the nanosecond that was measured; +inf, a failure judged as late, is a word of its own."""
    if value_ns is None:
        return None
    return "failed" if math.isinf(value_ns) else round(value_ns / NS_PER_S, 9)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
