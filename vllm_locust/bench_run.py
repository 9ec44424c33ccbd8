"""A result of `vllm bench serve` as a run: what it has of each request goes through the same histograms.

Promise: with `--save-detailed` reports, comparisons and charts are made of it as of any run. Without, there is no
window: what the file says is shown, and all else is null, never 0. Of the generator nothing is told.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from vllm_locust.bench_result import TOOL, Result, recording_of, requests_of, result_of
from vllm_locust.figures import PERCENTILES, Summary, ratio
from vllm_locust.recording import Recording
from vllm_locust.summary import Meta, summary
from vllm_locust.timeline import Outcome
from vllm_locust.workers import Seen

KEYS = frozenset({"request_throughput", "mean_ttft_ms", "completed", "duration"})
"""What tells such a file from others."""
UNKNOWN = "unknown"
"""Outcome of failures of which the file only has the number."""
_METRICS = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = {"mean": "mean", "p50": "median"} | {key: key for key in PERCENTILES if key != "p50"}
"""Their word for each of ours."""


def recognised(saved: Any) -> bool:  # noqa: ANN401 - JSON
    """Tell whether JSON is a result of `vllm bench serve`."""
    return isinstance(saved, dict) and saved.keys() >= KEYS


def was_read(meta: Meta) -> bool:
    """Tell whether a run is one that `read` returned: it has no target, no seed and no word on the generator."""
    return TOOL in meta.scenarios


def read(saved: dict[str, Any], name: str) -> tuple[Meta, Recording, Summary]:
    """Return a result as a run of a name; raises `ValueError` or `msgspec.ValidationError` where it is damaged."""
    result = result_of(saved)
    requests = [*requests_of(result)]
    meta = _meta(result, name, listed=len(requests))
    recording = recording_of(result, requests)
    return meta, recording, _filled(summary(recording, meta), result, saved)


def _meta(result: Result, name: str, *, listed: int) -> Meta:
    scenario, endpoint = result.key.scenario, result.endpoint
    remarks = [f"read from a result of {TOOL}: see docs/vllm-bench.md for what it defines in another way"]
    if not listed and result.number:
        remarks.append("it has no samples (--save-detailed): what it does not say is missing, and so are charts")
    elif result.itls is None:
        remarks.append("it has no gaps: what it says of them is shown, and the tokens of an answer count when it ended")
    if listed and listed != result.number:
        remarks.append(f"it counts {result.number:,} requests, and has lists of {listed:,}")
    return Meta(
        name=result.label or name,
        started=_started(result.date),
        model=result.model_id or "",
        scenarios={TOOL: scenario},
        endpoints={TOOL: endpoint} if endpoint else {},
        parts=[scenario],
        load=_load(result),
        remarks=remarks,
    )


def _started(date: str | None) -> str:
    """Return when it was run, on the clock of its machine: nobody knows the zone."""
    try:
        return datetime.strptime(date or "", "%Y%m%d-%H%M%S").isoformat()  # noqa: DTZ007 - it has none
    except ValueError:
        return ""


def _load(result: Result) -> dict[str, Any]:
    load: dict[str, Any] = {"requests": result.num_prompts}
    if result.open:
        gamma = result.burstiness not in (None, 1.0)
        load |= {"arrivals": "gamma" if gamma else "poisson", "burstiness": result.burstiness if gamma else None}
        load |= {"request_rate": result.request_rate, "max_in_flight": result.max_concurrency}
    else:
        load["users"] = result.max_concurrency
    return {key: value for key, value in load.items() if value is not None}


# What there are no samples of


def _filled(told: Summary, result: Result, saved: Mapping[str, Any]) -> Summary:
    """Return a summary with what the file says in place of what it has no samples of."""
    scenarios = told["scenarios"].values()
    detailed = bool(told["total"]["requests"])
    for scope in (told["total"], *scenarios):
        for name in _METRICS:
            if not scope[name]["count"]:
                scope[name] = _values(saved, name, scope[name], result.completed)
        if not detailed:
            scope.update(_counted(result, scope))
            scope["judged"] = {name: _judged(scope[name], known, result) for name, known in scope["judged"].items()}
        if result.request_goodput is not None:
            scope["rates"]["goodput_per_s"] = result.request_goodput
    told["duration_s"] = result.duration
    if not detailed:
        told["total"]["rates"] |= {"in_flight_mean": None, "in_flight_peak": None}
        told["failures"] = [*_failed(result)]
        told["fidelity"]["workers"] = {TOOL: Seen().figures()}
    return told


def _values(saved: Mapping[str, Any], name: str, known: Summary, completed: int) -> Summary:
    """Return the statistics of a metric that the file says; how many gaps they are of, or TPOTs, nobody knows."""
    values = {ours: saved.get(f"{theirs}_{name}_ms") for ours, theirs in _STATISTICS.items()}
    numbers = {key: msgspec.convert(value, float) / 1e3 for key, value in values.items() if value is not None}
    if any(value < 0 for value in numbers.values()):
        raise ValueError(f"{name} takes less than no time")
    # Without a sample theirs are 0.
    count = completed if name in ("ttft", "e2el") else None
    return known | ({"count": count} | numbers if any(numbers.values()) else {})


def _judged(values: Summary, known: Summary, result: Result) -> Summary:
    """Return percentiles in which failures are late: theirs where nothing failed, else only which are a failure."""
    told = {key: values[key] for key in PERCENTILES}
    if result.lost:
        told = {
            key: "failed" if share * result.number > result.completed else None for key, share in PERCENTILES.items()
        }
    return known | told | {"count": result.number, "failed": result.lost}


def _counted(result: Result, scope: Summary) -> Summary:
    """Return requests, tokens and rates as the file counts them."""
    output, asked = result.total_output_tokens, result.total_input_tokens
    outcomes = scope["outcomes"] | {Outcome.OK.value: result.completed}
    return {
        "requests": result.number,
        "failed": result.lost,
        "failed_share": ratio(result.lost, result.number),
        "outcomes": outcomes | ({UNKNOWN: result.lost} if result.lost else {}),
        "input_tokens": _mean(scope["input_tokens"], asked, result.completed),
        "output_tokens": _mean(scope["output_tokens"], output, result.completed),
        "tokens": scope["tokens"] | {"input": asked or 0, "output_received": output or 0},
        "rates": scope["rates"]
        | {
            "request_per_s": result.request_throughput,
            "sent_per_s": ratio(result.number, result.duration),
            "input_tokens_per_s": None if asked is None else asked / result.duration,
            "output_tokens_per_s": result.output_throughput,
        },
    }


def _mean(known: Summary, total: int | None, number: int) -> Summary:
    return known if total is None or not number else known | {"count": number, "mean": total / number}


def _failed(result: Result) -> Iterable[Summary]:
    if result.lost:
        yield {
            "scenario": result.key.scenario,
            "endpoint": result.endpoint,
            "outcome": UNKNOWN,
            "status": 0,
            "count": result.lost,
            "share": ratio(result.lost, result.number),
            "first_s": None,
            "last_s": None,
            "message": "",
        }
