"""Every family that Prometheus can scrape: the one table that the exporter and its documentation are made of.

Promise: nothing is exported that is not here, under exactly this name and with exactly these labels, and what
`docs/metrics.md` says of families is `markdown()`; tests hold both, the first against scrapes of real runs.

What it does not do: know values.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_locust.timeline import METRICS

PREFIX = "vllm_locust_"
HISTOGRAMS = ("ttft", "itl", "tpot", "e2el")
"""Metrics that have buckets."""
_VLLM_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    *(0.5, 0.75, 0.8, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 80, 120, 160, 240, 480, 640),
    *(960, 1920, 2560, 7680),
)
"""All bounds of vLLM's own four histograms, so that both sides can be compared bucket by bucket."""
_FINE_S = (0.0005, 300)
_STEP = 1.1
_SCENARIO = ("scenario", "endpoint")
_PHASE = (*_SCENARIO, "phase")

_ALWAYS = "always"
_COUNTED = "from when its part is known"
_RUN = "from the first run on"
_TOKEN = "from the first token of a run until the next run"  # noqa: S105 - the token of a language model
_RUNNING = "while a run is on, from its first request"
_WINDOW = "while a run is on, for each worker that takes part"
_SAMPLE = "from its first sample on"

Kind = Literal["gauge", "counter", "histogram", "summary"]


@dataclass(frozen=True, slots=True)
class Family:
    """What is exported under one name."""

    name: str
    """As it is queried, without what a histogram or a summary adds to it."""
    kind: Kind
    unit: str
    """Of the value, empty where it is 1 or 0."""
    labels: tuple[str, ...]
    """Beside `le` of buckets."""
    meaning: str
    there: str
    """When its series exist."""


def _gauges() -> Iterator[Family]:
    def gauge(name: str, unit: str, meaning: str, there: str, labels: tuple[str, ...] = ()) -> Family:
        return Family(PREFIX + name, "gauge", unit, labels, meaning, there)

    yield gauge("running", "", "Whether a run goes on (1) or not (0).", _ALWAYS)
    text = "Whether requests that are sent now are left out of latencies (1) or not (0)."
    yield gauge("warming_up", "", text, _ALWAYS)
    yield gauge("users", "users", "Locust users that run now.", _ALWAYS)
    yield gauge("workers", "workers", "Locust workers that take part now.", _ALWAYS)
    text = "Always 1; its labels say what the current run is, or else the last one."
    yield gauge("run_info", "", text, _RUN, ("run", "name", "scenario", "target", "version"))
    text = "Requests that were sent and have not ended, as their workers last said; those of a lost worker are gone."
    there = "from the first request of a run until the next run, 0 after the stop"
    yield gauge("streams_in_flight", "requests", text, there, _SCENARIO)
    text = "For how long the quietest of the streams in flight has sent no byte."
    yield gauge("longest_silence_seconds", "seconds", text, _RUNNING)
    text = "Whether the run so far is limited by the generator (1) or not (0)."
    yield gauge("generator_limited", "", text, _TOKEN)
    text = "Share of the token times of the run that are more uncertain than the limit."
    yield gauge("uncertain_ratio", "ratio", text, _TOKEN)
    yield gauge("stamped_ratio", "ratio", "Share of the token times of the run that the kernel stamped.", _TOKEN)
    text = "Longest time in the window for which the event loop was away."
    yield gauge("worker_loop_lag_seconds", "seconds", text, _WINDOW, ("worker",))
    yield gauge("worker_cpu_ratio", "ratio", "Use of a core in the window.", _WINDOW, ("worker",))
    text = "Share of the window spent in long waits for a core, where the system tells."
    yield gauge("worker_core_wait_ratio", "ratio", text, _WINDOW, ("worker",))
    text = "Share of the window spent in stalls of the event loop, but for the longest one."
    yield gauge("worker_stalled_ratio", "ratio", text, _WINDOW, ("worker",))


def _counters() -> Iterator[Family]:
    def counter(name: str, unit: str, meaning: str, there: str, labels: tuple[str, ...]) -> Family:
        return Family(f"{PREFIX}{name}_total", "counter", unit, labels, meaning, there)

    open_loop = f"{_COUNTED}, in an open loop"
    yield counter("requests_scheduled", "requests", "Requests that were due at a request rate.", open_loop, _PHASE)
    text = "Requests that were due, were held back by a cap or a slow generator, and had not been sent at the end."
    yield counter("requests_dropped", "requests", text, open_loop, _PHASE)
    text = "Requests that were sent, or ended without a connection."
    yield counter("requests_sent", "requests", text, _COUNTED, _PHASE)
    text = "Requests that met all limits of a good request."
    yield counter("requests_good", "requests", text, f"{_COUNTED}, where goodput is asked for", _PHASE)
    text = "Requests that ended, by outcome and HTTP status (0 where none came)."
    there = f"`ok` {_COUNTED}, other outcomes from their first request on"
    yield counter("requests", "requests", text, there, (*_PHASE, "outcome", "status"))
    text = "Requests that failed, whatever the outcome: neither ok nor cancelled."
    yield counter("requests_failed", "requests", text, _COUNTED, _PHASE)
    yield counter("input_tokens", "tokens", "Tokens of prompts, as the server counts them.", _COUNTED, _PHASE)
    text = "Tokens received, those of failed requests included."
    yield counter("output_tokens", "tokens", text, _COUNTED, _PHASE)
    yield counter("failed_output_tokens", "tokens", "Tokens received by requests that failed.", _COUNTED, _PHASE)
    yield counter("token_events", "events", "Stream events that carried tokens.", _COUNTED, _PHASE)
    yield counter("plugin_errors", "errors", "Errors inside vllm-locust itself.", _COUNTED, ())
    text = "Samples that came after their window had been closed."
    yield counter("late_samples", "samples", text, _COUNTED, ())


def _latencies() -> Iterator[Family]:
    for metric in METRICS.values():
        if metric.name in HISTOGRAMS:
            name = f"{PREFIX}{metric.name}_seconds"
            yield Family(name, "histogram", "seconds", _SCENARIO, f"Steady requests: {metric.title}.", _SAMPLE)
    labels = (*_SCENARIO, "span", "quantile")
    for metric in METRICS.values():
        text = f"Steady requests: {metric.title}. Sum and count are of all runs."
        yield Family(quantiles_of(metric.name), "summary", str(metric.unit), labels, text, _SAMPLE)


def quantiles_of(metric: str) -> str:
    """Return the name of the family with the percentiles of a metric."""
    return f"{PREFIX}{metric.removesuffix('_tokens')}_quantile_{METRICS[metric].unit}"


def _bounds_s() -> tuple[float, ...]:
    """Return vLLM's bounds, with steps of at most 10 % between them over the fine range."""
    anchors = sorted({*_VLLM_S, *_FINE_S})
    bounds = []
    for low, high in itertools.pairwise(anchors):
        steps = math.ceil(math.log(high / low, _STEP)) if high <= _FINE_S[1] else 1
        bounds += [float(f"{low * (high / low) ** (i / steps):.3g}") for i in range(steps)]
    return (*bounds, float(anchors[-1]))


BOUNDS_S = _bounds_s()
"""Of the buckets of all histograms."""

FAMILIES = {family.name: family for family in (*_gauges(), *_counters(), *_latencies())}
"""By name, in the order in which they are exported."""


def markdown() -> str:
    """Return the table of the documentation."""
    rows = [("family", "type", "unit", "labels", "meaning", "there"), ("---",) * 6]
    rows += [
        (f"`{f.name}`", f.kind, f.unit or "–", ", ".join(f.labels) or "–", f.meaning.rstrip("."), f.there)
        for f in FAMILIES.values()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
