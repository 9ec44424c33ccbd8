"""A recording as plain values: tokens, seconds, shares and nulls, derived once, from nothing but the recording.

Latencies, `judged`, zero gaps and fidelity are of requests of the phase `steady`, however late they ended; outcomes,
tokens and counts are of the warm-up too, while what was asked again at the end is counted apart. Rates and streams in
flight are of what happened between the warm-up and the stop, whatever the phase.
"No sample" is null, never 0. Nothing here knows how a number is shown.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_locust import figures, stability
from vllm_locust import limit as limits
from vllm_locust.api import Counting
from vllm_locust.cell import RETRY, STEADY, WARMUP, Cell, Cells, select, total
from vllm_locust.fidelity import DEFAULTS, Limits, faults
from vllm_locust.figures import Summary
from vllm_locust.histogram import Histogram
from vllm_locust.judgement import judge
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Recording
from vllm_locust.slowest import each
from vllm_locust.timeline import Outcome, Unit
from vllm_locust.workers import Seen, all_seen

TIMED = ("uncertainty", "read_lag", "itl", "ttft")
"""Histograms from which fidelity is told."""
RATED = ("input_tokens",)
"""Histograms from which rates are told; the others are told by counters."""


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
    command: str = ""
    """How Locust was started, without secrets; a label only."""
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
    note: str = ""
    """What somebody wanted to remember of it."""
    server_config: str = ""
    """How the server was started, without our key."""
    goodput: list[str] = field(default_factory=list)
    """What a good request was, a text for each scope; empty where nothing said so."""
    stability: bool = False
    """Whether the run is to tell if the server was steady."""
    excerpt: list[str] = field(default_factory=list)
    """Which part of a run it is, in words; empty where it is all of it."""


def summary(recording: Recording, meta: Meta) -> Summary:
    """Return the numbers of the whole run and of each scenario; the module says of which phases."""
    told = so_far(recording, meta, all_seen(recording))
    rates = told["total"]["rates"]
    rates |= _in_flight(recording, recording.steady_windows, told["duration_s"])
    return {
        **told,
        "stages": stages_of(recording, meta),
        **({"stability": _stability(recording, meta, told)} if meta.stability else {}),
    }


def so_far(recording: Recording, meta: Meta, workers: dict[str, Seen]) -> Summary:
    """Return what of it costs no more for a long run than for a short one, given how the workers were seen."""
    everything, within, length_s = recording.totals, recording.within(RATED), _length_s(recording)
    cells = {key: cell for key, cell in everything.items() if key.phase != RETRY}
    phases, good = recording.phases, bool(meta.goodput)
    whole = figures.figures(cells, within, phases, length_s, good=good)
    scenarios = {
        name: figures.figures(cells, within, phases, length_s, name=name, good=good) for name in _names(meta, cells)
    }
    return {
        "duration_s": length_s,
        "warmup": _warmup(recording, cells),
        "total": whole,
        "scenarios": scenarios,
        "limits": _limits(meta.limits, cells, phases, {"": whole} | scenarios),
        "retry": _asked(select(everything, phase=RETRY)),
        "failures": failures_of(recording),
        "slowest": slowest_of(recording),
        "fidelity": fidelity_of(recording, meta.generator_limits, workers),
    }


def window_of(recording: Recording, index: int, meta: Meta) -> Summary:
    """Return `total` and `scenarios` of what happened in one window, whatever the phase but of what was asked again."""
    cells = {key: cell for key, cell in recording.window(index).items() if key.phase != RETRY}
    since_ns, until_ns = recording.bounds_ns(index)
    length_s, good = (until_ns - since_ns) / NS_PER_S, bool(meta.goodput)
    phases = recording.phases if index in recording.steady_windows else (STEADY, WARMUP)
    return {
        "total": figures.figures(cells, cells, phases, length_s, good=good),
        "scenarios": {
            name: figures.figures(cells, cells, phases, length_s, name=name, good=good) for name in _names(meta, cells)
        },
    }


def _names(meta: Meta, cells: Cells) -> list[str]:
    """Return the scenarios that are told, those without a request included."""
    return [*dict.fromkeys([*meta.parts, *sorted({key.scenario for key in cells})])]


def _stability(recording: Recording, meta: Meta, told: Summary) -> Summary:
    fidelity = told["fidelity"]
    return stability.judge(
        recording,
        missing=meta.missing_workers,
        early=meta.ended_early,
        faulty=bool(fidelity["token_events"] and faults(fidelity, meta.generator_limits)),
        limited=any(limit["metric"] == "failures" and not limit["scope"] for limit in told["limits"]),
    )


def _warmup(recording: Recording, cells: Cells) -> Summary | None:
    """Return what was left out, null where nothing was; `s` is null where the run was over first."""
    if recording.steady_ns <= recording.begin_ns:
        return None
    left_out_s = (recording.steady_ns - recording.begin_ns) / NS_PER_S
    return {"s": left_out_s if WARMUP not in recording.phases else None} | _asked(select(cells, phase=WARMUP))


def _asked(cells: Iterable[Cell]) -> Summary:
    """Return how many requests there were, and how they ended."""
    cell = total(cells)
    outcomes = figures.outcomes_of(cell)
    return {"requests": cell.counters.get("sent", 0), "ok": outcomes[Outcome.OK], "failed": figures.failed_of(outcomes)}


def stages_of(recording: Recording, meta: Meta) -> list[Summary]:
    """Return what each stage was like: latencies of the requests sent in it, rates of what happened in it.

    Where there are limits, it says whether the stage met all of them, and which one was the last that did.
    """
    values, good = meta.load.get("stages", ()), bool(meta.goodput)
    totals, stages = (recording.totals if recording.stages_ns else {}), []
    for number, since_ns, until_ns in recording.stages:
        length_s = (until_ns - since_ns) / NS_PER_S
        windows = range(recording.grid.index(since_ns), recording.grid.count(until_ns))
        sent = {key: cell for key, cell in totals.items() if key.stage == number and key.phase != RETRY}
        within = recording.windows_in(since_ns, until_ns)
        whole, *each = [
            figures.figures(sent, within, (STEADY,), length_s, name=name, good=good) for name in (None, *meta.parts)
        ]
        judged = _limits(meta.limits, sent, (STEADY,), {"": whole, **dict(zip(meta.parts, each, strict=True))})
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
        scope = scopes.get(limit.scope) or figures.figures({}, {}, (), None, good=True)
        judged.append(judge(limit, steady, scope).plain())
    return judged


def _in_flight(recording: Recording, windows: range, length_s: float | None) -> Summary:
    """Return the mean over some windows, and the peak: the largest sum of the workers' peaks in one of them."""
    peaks: Counter[int] = Counter()
    streams_ns = 0
    for (_, index), gauges in recording.gauges.items():
        if index in windows:
            peaks[index] += gauges.in_flight_peak
            streams_ns += gauges.in_flight_ns
    mean = figures.ratio(streams_ns / NS_PER_S, length_s)
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
        for outcome, status, number in figures.ended(cell.counters):
            counts[key.scenario, key.endpoint, outcome, status] += number
            judged[key.scenario] += 0 if outcome == Outcome.CANCELLED else number
    kinds = [kind for kind in {**counts, **recording.failures} if figures.is_failure(kind[2])]
    return [
        _failure(kind, counts[kind], judged[kind[0]], recording.failures.get(kind))
        for kind in sorted(kinds, key=lambda kind: (-counts[kind], kind))
    ]


def _failure(kind: tuple[str, str, str, int], number: int, judged: int, known: Failure | None) -> Summary:
    return {
        **dict(zip(("scenario", "endpoint", "outcome", "status"), kind, strict=True)),
        "count": number,
        "share": figures.ratio(number, judged),
        "first_s": figures.seconds(known.first_ns) if known else None,
        "last_s": figures.seconds(known.last_ns) if known else None,
        "message": known.message if known else "",
    }


def slowest_of(recording: Recording) -> list[Summary]:
    """Return the requests of each scenario with the slowest first tokens and the longest gaps, the slowest first."""
    return [
        {
            "scenario": slow.scenario,
            "endpoint": slow.endpoint,
            "metric": slow.metric,
            "value_s": figures.seconds(slow.value_ns),
            "at_s": figures.seconds(slow.at_ns),
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
    return fidelity_in(recording.totals_of(TIMED), recording.phases, limits, workers)


def fidelity_in(cells: Cells, phases: Container[str], limits: Limits, workers: dict[str, Seen]) -> Summary:
    """Return the same of some cells, which need no histograms but `TIMED`."""
    steady = total(cell for key, cell in cells.items() if key.phase in phases)
    stamped, unstamped = steady.counters.get("stamped", 0), steady.counters.get("unstamped", 0)
    uncertainty = steady.histograms.get("uncertainty", Histogram())
    gap_ns, gap = _typical_gap(steady)
    bounds_ns = [] if gap_ns is None else [limits.uncertainty * gap_ns]
    shares = [
        figures.ratio(uncertainty.count - sure, uncertainty.count) for sure in uncertainty.count_at_most(bounds_ns)
    ]
    lags = {name: figures.metric(steady.histograms.get(name), Unit.SECONDS) for name in ("read_lag", "uncertainty")}
    return {
        "token_events": sum(cell.counters.get("token_events", 0) for cell in cells.values()),
        "stamped_share": figures.ratio(stamped, stamped + unstamped),
        "uncertain_share": shares[0] if shares else None,
        "gap": {"name": gap, "s": figures.seconds(gap_ns)},
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


def _length_s(recording: Recording) -> float | None:
    """Return how long the run lasted after its warm-up; before its end, how far the first worker has got."""
    if recording.length_ns is not None:
        return (recording.length_ns - recording.since_ns) / NS_PER_S
    return max(0, recording.reached_ns - recording.since_ns) / NS_PER_S or None
