"""What Prometheus scrapes: totals of the process, percentiles of the run and of its last window.

It promises: counters and histograms are lifetime totals of the process, which never fall, whatever is reset
or started anew; a labelled series is absent, not 0, before its first sample; `promtool check metrics` has no
complaint; the number of series follows scenarios, outcomes and the workers that are there, never requests or messages.

The plan: at a scrape read a `Snapshot`, add the recordings that are over (`Exporter.retire`) to the current
one, write families. Latencies are of steady requests, counters of all phases. Percentiles are those of the
report, of `span="run"` (since the start or the last reset, kept until the next run) and `span="window"` (the
last window that every live worker has closed, only while running). Their type is summary, since nothing else
may have a label `quantile`; `_sum` and `_count` stand under `span="run"` alone and are, as the type demands,
lifetime totals: they give the mean, over any interval, of metrics without a histogram too. Whether to believe all that
is told of the run so far, and what each live worker was like of the last window that all of them have closed.

The edge of a bucket counts every sample at or below it, and may count one up to 1 % above: a bucket of
`vllm_locust.histogram` is 1 % wide, and belongs below the edge if its middle is at most 0.5 % above.

What it does not do: read Locust, or export the Python process.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gevent
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from vllm_locust import fidelity, progress
from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.fidelity import DEFAULTS, Limits
from vllm_locust.figures import Summary
from vllm_locust.histogram import Histogram
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Recording
from vllm_locust.summary import Meta, fidelity_of
from vllm_locust.timeline import METRICS, Unit
from vllm_locust.workers import Watch, seen_in

HISTOGRAMS = ("ttft", "itl", "tpot", "e2el")
QUANTILES = (0.5, 0.9, 0.95, 0.99)
MAX_SCENARIOS = 100
"""Each costs some 800 series per endpoint; more of them are most likely a request's name or number."""
OTHER = "other"
"""Label of all scenarios beyond `MAX_SCENARIOS`."""

_VLLM_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    *(0.5, 0.75, 0.8, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 80, 120, 160, 240, 480, 640),
    *(960, 1920, 2560, 7680),
)
"""All bounds of vLLM's own four histograms, so that both sides can be compared bucket by bucket."""
_FINE_S = (0.0005, 300)
_STEP = 1.1
_LABELS = ("scenario", "endpoint")
_OUTCOME = "outcome|"
_COUNTERS = {
    "requests_scheduled": ("scheduled", "Requests that were due at a request rate."),
    "requests_dropped": (
        "dropped",
        "Requests that were due, were held back by a cap or a slow generator, and had not been sent at the end.",
    ),
    "requests_sent": ("sent", "Requests that were sent, or ended without a connection."),
    "requests_good": ("good", "Requests that met all limits of a good request."),
    "input_tokens": ("input_tokens", "Tokens of prompts, as the server counts them."),
    "output_tokens": ("tokens_received", "Tokens received, those of failed requests included."),
    "failed_output_tokens": ("tokens_failed", "Tokens received by requests that failed."),
    "token_events": ("token_events", "Stream events that carried tokens."),
}
"""What the recording calls each counter (or the histogram whose sum it is), and its help."""
_FAULTS = {
    "plugin_errors": "Errors inside vllm-locust itself.",
    "late_samples": "Samples that came after their window had been closed.",
}

_RUN_SHARES = {
    "uncertain_ratio": ("uncertain_share", "Token times of the run that are more uncertain than the limit."),
    "stamped_ratio": ("stamped_share", "Token times of the run that the kernel stamped."),
}
"""What the summary calls each gauge, and its help; so also below."""
_WORKER = {
    "loop_lag_seconds": ("loop_lag_s", "Longest time in the window for which the event loop was away."),
    "cpu_ratio": ("cpu_share", "Use of a core in the window."),
    "core_wait_ratio": ("core_wait_share", "Time in the window in long waits for a core."),
    "stalled_ratio": ("stalled_share", "Time in the window in stalls of the event loop, but for the longest one."),
}

_log = logging.getLogger(__name__)


def _bounds_s() -> tuple[float, ...]:
    """Return vLLM's bounds, with steps of at most 10 % between them over the fine range."""
    anchors = sorted({*_VLLM_S, *_FINE_S})
    bounds = []
    for low, high in itertools.pairwise(anchors):
        steps = math.ceil(math.log(high / low, _STEP)) if high <= _FINE_S[1] else 1
        bounds += [float(f"{low * (high / low) ** (i / steps):.3g}") for i in range(steps)]
    return (*bounds, float(anchors[-1]))


BOUNDS_S = _bounds_s()
_BOUNDS_NS = [round(bound * NS_PER_S) for bound in BOUNDS_S]
_EDGES = (*map(str, BOUNDS_S), "+Inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is to be told at one scrape."""

    recording: Recording | None
    """Of the current or else the last epoch; absent before the first run."""
    running: bool
    """Whether streams may still be open: true until the final state of every worker has come."""
    users: int
    workers: int
    live_workers: tuple[str, ...]
    """Names of those that take part now and so close windows."""
    warming_up: bool = False
    """Whether what is sent now is left out of latencies."""
    limits: Limits = DEFAULTS
    """How far the generator may be off."""
    age_s: float | None = None
    """For how long the run has gone on, since its start or the last reset; absent unless it does."""
    meta: Meta | None = None
    """What the run of the recording is; absent with it."""
    summary: Summary | None = None
    """Its numbers, once it is over and they have been summed up."""


class Exporter:
    """Collector of everything that is exported, in a registry of its own."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read `snapshot` at every scrape."""
        self._snapshot = snapshot
        self._followed: list[Recording] = []
        self._retired: set[tuple[str, int]] = set()
        self._base: Cells = {}
        self._base_faults: Counter[str] = Counter()
        self._scenarios: dict[str, str] = {}
        self._watch = Watch()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def retire(self, recording: Recording) -> None:
        """Keep the totals of a recording that takes no more reports; to do so again changes nothing.

        Its owner calls this when it replaces a recording, since no scrape may come before it does so again.
        """
        if not self._is_retired(recording):
            self._retired.add((recording.run, recording.epoch))
            _add_all(self._base, self._labelled(recording.totals))
            self._base_faults.update(_faults(recording, self._watch))

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has samples, all of one moment."""
        now = self._snapshot()
        lifetime, faults, run = Cells(), self._base_faults.copy(), Cells()
        _add_all(lifetime, self._base)
        if now.recording is not None:
            run = self._labelled(now.recording.totals)
            if not self._is_retired(now.recording):
                _add_all(lifetime, run)
                faults.update(_faults(now.recording, self._watch))
        self._follow(now.recording, lifetime, faults)
        window = self._labelled(_last_window(now))
        gauges = [*_gauges(now, run), *_fidelity(now, self._watch), *_workers(now)]
        totals = itertools.chain(_counters(lifetime, faults), _histograms(lifetime))
        for family in itertools.chain(gauges, totals, _summaries(lifetime, run, window)):
            if family.samples:
                yield family
                gevent.sleep(0)  # streams must be read while a long page is written; all is copied by now

    def _follow(self, recording: Recording | None, lifetime: Cells, faults: Counter[str]) -> None:
        """Add recordings before this one until their owner retires them: their last reports may come yet (a reset)."""
        self._followed = [one for one in self._followed if one is not recording and not self._is_retired(one)]
        for before in self._followed:
            _add_all(lifetime, self._labelled(before.totals))
            faults.update(_faults(before, Watch()))
        if recording is not None:
            self._followed.append(recording)

    def _is_retired(self, recording: Recording) -> bool:
        return (recording.run, recording.epoch) in self._retired

    def _labelled(self, cells: Cells) -> Cells:
        """Copy cells, added up where labels are the same: of stages, of scenarios beyond the limit."""
        result: Cells = {}
        for key in sorted(cells):
            label = Key(self._label(key.scenario), key.endpoint, key.phase)
            _add_all(result, {label: cells[key]})
        return result

    def _label(self, scenario: str) -> str:
        if scenario not in self._scenarios:
            known = len(self._scenarios)
            if known == MAX_SCENARIOS:
                remark = "more than %d scenarios: Prometheus gets %r and further ones as %r, reports do not"
                _log.warning(remark, MAX_SCENARIOS, scenario, OTHER)
            self._scenarios[scenario] = scenario if known < MAX_SCENARIOS else OTHER
        return self._scenarios[scenario]


def _closed(now: Snapshot) -> int:
    """Return how many windows all live workers have closed, none unless the run goes on."""
    return now.recording.closed_windows(now.live_workers) if now.recording and now.running else 0


def _last_window(now: Snapshot) -> Cells:
    closed = _closed(now)
    return now.recording.window(closed - 1) if now.recording and closed else {}


def _add_all(target: Cells, source: Cells) -> None:
    """Add cells to others and share nothing; to copy what is new is ten times as fast as to merge it."""
    for key, cell in source.items():
        if key in target:
            target[key].merge(cell)
        else:
            target[key] = cell.copy()


def _faults(recording: Recording, watch: Watch) -> dict[str, int]:
    """Return what is counted per worker, once there is anything that could have gone wrong.

    From then on 0 is told as well: an alert on the first error needs the series before it.
    """
    if not recording.totals_of(()):
        return {}
    workers = watch.seen(recording).values()
    errors, late = sum(seen.plugin_errors for seen in workers), sum(seen.late for seen in workers)
    return {"plugin_errors": errors, "late_samples": late}


def _gauges(now: Snapshot, run: Cells) -> Iterator[Metric]:
    yield GaugeMetricFamily("vllm_locust_running", "Whether a run goes on (1) or not (0).", now.running)
    help_text = "Whether requests that are sent now are left out of latencies (1) or not (0)."
    yield GaugeMetricFamily("vllm_locust_warming_up", help_text, now.warming_up)
    yield GaugeMetricFamily("vllm_locust_users", "Locust users that run now.", now.users)
    yield GaugeMetricFamily("vllm_locust_workers", "Locust workers that are connected.", now.workers)
    help_text = "Requests of this run that were sent and have not ended."
    family = GaugeMetricFamily("vllm_locust_streams_in_flight", help_text, labels=_LABELS)
    in_flight: Counter[tuple[str, str]] = Counter()
    for key, cell in run.items():
        ended = sum(number for _, number in _outcomes(cell))
        in_flight[key.scenario, key.endpoint] += (cell.counters.get("sent", 0) - ended) if now.running else 0
    for labels, number in in_flight.items():
        family.add_metric(labels, number)
    yield family
    if now.recording is not None and now.running and in_flight:
        help_text = "For how long the quietest of the streams in flight has sent no byte."
        silent_s = progress.silence_s(now.recording, now.live_workers)
        yield GaugeMetricFamily("vllm_locust_longest_silence_seconds", help_text, silent_s)


def _fidelity(now: Snapshot, watch: Watch) -> Iterator[Metric]:
    """Yield whether to believe the run so far; absent before its first token."""
    if now.recording is None:
        return
    seen = fidelity_of(now.recording, now.limits, watch.seen(now.recording))
    if not seen["token_events"]:
        return
    help_text = "Whether the run so far is limited by the generator (1) or not (0)."
    limited = bool(fidelity.faults(seen, now.limits))
    yield GaugeMetricFamily("vllm_locust_generator_limited", help_text, limited)
    for name, (source, help_text) in _RUN_SHARES.items():
        if seen[source] is not None:
            yield GaugeMetricFamily(f"vllm_locust_{name}", help_text, seen[source])


def _workers(now: Snapshot) -> Iterator[Metric]:
    """Yield what each live worker was like in the last window that all of them have closed."""
    closed = _closed(now)
    if now.recording is None or not closed:
        return
    gauges = {worker: now.recording.gauges.get((worker, closed - 1)) for worker in now.live_workers}
    seen = {worker: seen_in([g], now.recording.window_ns).figures() for worker, g in gauges.items() if g is not None}
    for name, (source, help_text) in _WORKER.items():
        family = GaugeMetricFamily(f"vllm_locust_worker_{name}", help_text, labels=["worker"])
        for worker, figures in seen.items():
            if figures[source] is not None:
                family.add_metric([worker], figures[source])
        yield family


def _counters(lifetime: Cells, faults: Counter[str]) -> Iterator[Metric]:
    labels = (*_LABELS, "phase")
    for name, (source, help_text) in _COUNTERS.items():
        family = CounterMetricFamily(f"vllm_locust_{name}", help_text, labels=labels)
        for key, cell in lifetime.items():
            histogram = cell.histograms.get(source)
            number = cell.counters.get(source, 0) if histogram is None else histogram.sum
            if number:
                family.add_metric(key[:3], number)
        yield family
    help_text = "Requests that ended, by outcome and HTTP status (0 where none came)."
    family = CounterMetricFamily("vllm_locust_requests", help_text, labels=(*labels, "outcome", "status"))
    for key, cell in lifetime.items():
        for outcome_and_status, number in _outcomes(cell):
            family.add_metric((*key[:3], *outcome_and_status), number)
    yield family
    for name, number in faults.items():
        yield CounterMetricFamily(f"vllm_locust_{name}", _FAULTS[name], number)


def _outcomes(cell: Cell) -> Iterator[tuple[list[str], int]]:
    """Yield outcome and status, and how many requests ended so."""
    for name, number in sorted(cell.counters.items()):
        if number and name.startswith(_OUTCOME):
            yield name.removeprefix(_OUTCOME).split("|"), number


def _steady(cells: Cells, metric: str) -> Iterator[tuple[Key, Histogram]]:
    """Yield each histogram of a metric that has samples of steady requests."""
    for key, cell in cells.items():
        histogram = cell.histograms.get(metric)
        if key.phase == "steady" and histogram is not None and histogram.count:
            yield key, histogram


def _histograms(lifetime: Cells) -> Iterator[Metric]:
    for name in HISTOGRAMS:
        help_text = f"Steady requests: {METRICS[name].title}."
        family = HistogramMetricFamily(f"vllm_locust_{name}_seconds", help_text, labels=_LABELS)
        for key, histogram in _steady(lifetime, name):
            counts = (*histogram.count_at_most(_BOUNDS_NS), histogram.count)
            family.add_metric(key[:2], list(zip(_EDGES, counts, strict=True)), histogram.sum / NS_PER_S)
        yield family


def _summaries(lifetime: Cells, run: Cells, window: Cells) -> Iterator[Metric]:
    for metric in METRICS.values():
        scale = NS_PER_S if metric.unit is Unit.SECONDS else 1
        name = f"vllm_locust_{metric.name.removesuffix('_tokens')}_quantile_{metric.unit}"
        family = Metric(name, f"Steady requests: {metric.title}. Sum and count are of all runs.", "summary")
        spans = {"run": dict(_steady(run, metric.name)), "window": dict(_steady(window, metric.name))}
        # OpenMetrics wants the samples of one set of labels together
        for (key, total), span in itertools.product(_steady(lifetime, metric.name), spans):
            labels = {"scenario": key.scenario, "endpoint": key.endpoint, "span": span}
            values = spans[span].get(key, Histogram()).percentiles(QUANTILES)
            for quantile, value in zip(QUANTILES, values, strict=True):
                if value is not None:
                    family.add_sample(name, {**labels, "quantile": str(quantile)}, value / scale)
            if span == "run":
                family.add_sample(f"{name}_count", labels, total.count)
                family.add_sample(f"{name}_sum", labels, total.sum / scale)
        yield family
