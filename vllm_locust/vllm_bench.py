"""A run as results of `vllm bench serve`: a file for each scenario, one for all of them, and the list for its plots.

Promise: every key of its result files (as of vLLM 0.32) is there, with a value of its type or null. What nobody knows
is null, never 0 or NaN. Figures are of the requests whose latencies a report tells, after the warm-up; rates are those
of the report. Where that is not what vLLM computes, docs/vllm-bench.md says so.

A list per request is there where the log of requests lies beside the run, in the order in which requests left.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from vllm_locust.cell import Cell, select, total
from vllm_locust.errors import InputError
from vllm_locust.figures import PERCENTILES, Summary, failed_of, outcomes_of, ratio
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import NS_PER_S
from vllm_locust.requestlog import FORMATS, Row, read
from vllm_locust.results import Run, encode, replacing, slug
from vllm_locust.summary import Meta
from vllm_locust.timeline import Outcome

ALL = "all"
"""What all scenarios together are called, in names of files and under `scenario`."""
PLOTTED = "summary.json"
"""What `vllm bench sweep plot` looks for: a list of results."""
METRICS = ("ttft", "tpot", "itl", "e2el")
LISTS = (
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
)
"""Keys that have a value per request."""
_BACKENDS = {"chat": "openai-chat", "completions": "openai"}

Result = dict[str, Any]


def results_of(run: Run, rows: Sequence[Row] | None = None) -> dict[str, Result]:
    """Return the result of each scenario by name, and under the empty name that of all of them.

    `rows` is the log of requests; without one there is no list per request. Raises `InputError` for a run that has no
    windows: one that was itself read from such a result.
    """
    if not run.recording.gauges and run.summary["total"]["requests"]:
        raise InputError("export: this was read from a result of vllm bench serve that has no samples to make another")
    peaks = _peaks(run)
    return {name: _result(run, name, peaks, rows) for name in (*run.summary["scenarios"], "")}


def _result(run: Run, name: str, peaks: dict[str, float], rows: Sequence[Row] | None) -> Result:
    scope = run.summary["scenarios"][name] if name else run.summary["total"]
    cells = {
        key: cell
        for key, cell in run.recording.totals.items()
        if key.phase in run.recording.phases and name in ("", key.scenario)
    }
    steady = total(cells.values())
    outcomes = outcomes_of(steady)
    completed, failed = outcomes[Outcome.OK], failed_of(outcomes)
    alone = not name or len(run.summary["scenarios"]) == 1
    return {
        **_setting(run.meta, {key.endpoint for key in cells}, name, completed + failed),
        "duration": run.summary["duration_s"],
        "completed": completed,
        "failed": failed,
        "total_input_tokens": _sum(steady, "input_tokens"),
        "total_output_tokens": _sum(steady, "output_tokens"),
        **_rates(scope["rates"]),
        **_lists(run, name, rows),
        "max_output_tokens_per_s": peaks.get(name),
        # What the workers count is of all scenarios.
        "max_concurrent_requests": scope["rates"].get("in_flight_peak") if alone else None,
        "rtfx": None,
        **_latencies(steady, scope),
    }


def _setting(meta: Meta, endpoints: Iterable[str], name: str, number: int) -> Result:
    """Return what was asked for; `scenario` is of ours, as a key that `--metadata` adds there."""
    load, backends = meta.load, {_BACKENDS.get(endpoint) for endpoint in endpoints}
    backend = backends.pop() if len(backends) == 1 else None
    return {
        "date": _date(meta.started),
        "endpoint_type": backend,
        "backend": backend,
        "label": meta.name or None,
        "model_id": meta.model or None,
        "tokenizer_id": None,
        "num_prompts": number,
        "scenario": name or ALL,
        **_load(load),
    }


def _load(load: dict[str, Any]) -> Result:
    """Return the load of the run in their words: a closed loop has an infinite rate, and a concurrency."""
    if "arrivals" in load:
        burstiness = {"poisson": 1.0, "gamma": load.get("burstiness")}.get(load["arrivals"])
        rate = load.get("request_rate")
        return {
            "request_rate": None if rate is None else float(rate),
            "burstiness": burstiness,
            "max_concurrency": load.get("max_in_flight"),
        }
    users = None if load.get("stages") else load.get("users")
    return {"request_rate": "inf", "burstiness": None, "max_concurrency": users}


def _date(started: str) -> str | None:
    try:
        return f"{datetime.fromisoformat(started):%Y%m%d-%H%M%S}"
    except ValueError:
        return None


def _rates(rates: Summary) -> Result:
    """Return rates; tokens of failed requests are none of theirs."""
    output, failed, asked = (
        rates[f"{name}_per_s"] for name in ("output_tokens", "output_tokens_failed", "input_tokens")
    )
    if output is not None:
        output = max(0.0, output - (failed or 0.0))
    return {
        "request_throughput": rates["request_per_s"],
        "request_goodput": rates["goodput_per_s"],
        "output_throughput": output,
        "total_token_throughput": None if output is None or asked is None else output + asked,
    }


def _latencies(steady: Cell, scope: Summary) -> Result:
    """Return mean, median, deviation and percentiles of each metric, in milliseconds."""
    found: Result = {}
    for name in METRICS:
        values = scope[name]
        statistics = {
            "mean": values["mean"],
            "median": values["p50"],
            "std": _deviation_s(steady.histograms.get(name, Histogram())),
            **{key: values[key] for key in PERCENTILES},
        }
        found |= {f"{key}_{name}_ms": None if value is None else 1e3 * value for key, value in statistics.items()}
    return found


def _deviation_s(histogram: Histogram) -> float | None:
    """Return the standard deviation, of all samples as theirs, from the middles of buckets.

    So it is off by as much as a bucket is wide at most: 0.5 % of the root mean square, not of the deviation.
    """
    if histogram.mean is None:
        return None
    values, counts = histogram.occupied()
    return math.sqrt(float(np.average((values - histogram.mean) ** 2, weights=counts))) / NS_PER_S


def _sum(cell: Cell, metric: str) -> int | None:
    histogram = cell.histograms.get(metric)
    return histogram.sum if histogram is not None and histogram.count else None


def _peaks(run: Run) -> dict[str, float]:
    """Return the tokens per second of the best whole window of each scenario, and of all; of any if none is whole."""
    recording = run.recording
    lengths_ns = {
        index: until - since for index in recording.steady_windows for since, until in [recording.bounds_ns(index)]
    }
    whole = [index for index, length_ns in lengths_ns.items() if length_ns == recording.window_ns]
    peaks: dict[str, float] = {}
    for index in whole or lengths_ns:
        cells = recording.window(index)
        for name in (*run.summary["scenarios"], ""):
            tokens = sum(cell.counters.get("tokens_received", 0) for cell in select(cells, scenario=name or None))
            per_s = ratio(tokens, lengths_ns[index] / NS_PER_S)
            peaks[name] = max(peaks.get(name, 0.0), per_s or 0.0)
    return peaks


# Per request


def log_of(directory: Path) -> list[Row] | None:
    """Return the rows of the log beside a run, None where there is none; raises `InputError` where it is damaged."""
    found = next((file for form in FORMATS if (file := directory / f"requests.{form}").is_file()), None)
    return None if found is None else [*read(found)]


def missing(result: Result, rows: Sequence[Row] | None) -> str:
    """Say why there is no list per request, or that it lacks requests; empty where all are there."""
    if rows is None:
        return "no list per request: there is no log of requests beside the run (--request-log)"
    listed, number = len(result["errors"]), result["num_prompts"]
    return "" if listed == number else f"the log beside the run has {listed:,} of the {number:,} requests"


def _lists(run: Run, name: str, rows: Sequence[Row] | None) -> Result:
    """Return a list per request, those that the end cut left out; null what the log does not have."""
    if rows is None:
        return dict.fromkeys(LISTS)
    chosen = [row for row in rows if name in ("", row.scenario) and counted(run, row)]
    chosen.sort(key=lambda row: (row.called_s if row.sent_s is None else row.sent_s, row.request_id))
    ok = [row.outcome == Outcome.OK for row in chosen]
    answered = any(isinstance(row.answer, str | list) for row in chosen)
    return {
        "input_lens": [row.input_tokens for row in chosen],
        "output_lens": [row.output_tokens if good else 0 for row, good in zip(chosen, ok, strict=True)],
        "ttfts": [row.ttft_s for row in chosen],
        "itls": None,
        "latencies": [row.e2el_s for row in chosen],
        "start_times": [row.sent_s for row in chosen],
        "queue_times": [_queued_s(row) for row in chosen],
        "generated_texts": [_answer(row) for row in chosen] if answered else None,
        "errors": ["" if good else _error(row) for row, good in zip(chosen, ok, strict=True)],
    }


def counted(run: Run, row: Row) -> bool:
    """Tell whether the figures of a run count a logged request, as an answer or a failure."""
    recording = run.recording
    return (row.epoch, row.phase in recording.phases) == (recording.epoch, True) and row.outcome != Outcome.CANCELLED


def _queued_s(row: Row) -> float | None:
    return None if row.scheduled_s is None or row.sent_s is None else row.sent_s - row.scheduled_s


def _answer(row: Row) -> str:
    """Return the answer of a request, the first one of several, as theirs."""
    texts = row.answer if isinstance(row.answer, list) else [row.answer]
    return next((text for text in texts if isinstance(text, str)), "")


def _error(row: Row) -> str:
    return f"{row.outcome}: {row.message}" if row.message else row.outcome


# Files


def save(results: dict[str, Result], directory: Path) -> list[Path]:
    """Write a file per result, and a list of all without what is per request; returns the paths, the list last.

    Raises `InputError`, and writes nothing, where one of them is there already.
    """
    files = {directory / f"{stem}.json": results[name] for stem, name in _stems(results)}
    files[directory / PLOTTED] = [  # type: ignore[assignment]
        {key: value for key, value in result.items() if key not in LISTS} for result in results.values()
    ]
    if there := next((file for file in files if file.exists()), None):
        raise InputError(f"{there}: is there already, and stays; give another directory: --output DIR")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            with replacing(path) as file:
                file.write(encode(content))
    except OSError as error:
        raise InputError(
            f"--output {directory}: cannot be written to ({error.strerror}); give another one: --output DIR"
        ) from error
    return [*files]


def _stems(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a name of a file for each scenario: like `run=0.json` of a sweep, `scenario=short.json`."""
    used: set[str] = set()
    for name in names:
        stem = f"scenario={slug(name)}" if name else ALL
        number, base = 1, stem
        while stem.casefold() in used:
            number += 1
            stem = f"{base}-{number}"
        used.add(stem.casefold())
        yield stem, name
