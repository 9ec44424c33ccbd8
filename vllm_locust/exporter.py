"""What Prometheus scrapes: totals of the process, percentiles of the run and of its last window.

It promises: counters and histograms are lifetime totals of the process, which never fall, whatever is reset
or started anew; a scrape changes nothing, so that no page depends on the scrapes before it; latencies are absent, not
0, before their first sample, and counters are told from 0 on as soon as their part is known, since Prometheus cannot
see the increase with which a series begins; `promtool check metrics` has no complaint; the number of series follows
scenarios, outcomes and the workers that are there, never requests, messages or workers that are gone.

The plan: at a scrape read a `Snapshot`, add the recordings that are over (`Exporter.retire`) to those that are not,
write the families of `vllm_locust.families`. Latencies are of steady requests, counters of all phases. Percentiles are
those of the report, of `span="run"` (since the start or the last reset, kept until the next run) and `span="window"`
(the last window that every live worker has closed, only while running). Their type is summary, since nothing else
may have a label `quantile`; `_sum` and `_count` stand under `span="run"` alone and are, as the type demands,
lifetime totals: they give the mean, over any interval, of metrics without a histogram too. Whether to believe all that
is told of the run so far, and what each live worker was like of the last window that all of them have closed.

The edge of a bucket counts every sample at or below it, and may count one up to 1 % above: a bucket of
`vllm_locust.histogram` is 1 % wide, and belongs below the edge if its middle is at most 0.5 % above.

What it does not do: read Locust, or export the Python process.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import gevent
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from vllm_locust import fidelity, progress
from vllm_locust.cell import RETRY, STEADY, WARMUP, Cell, Cells, Key
from vllm_locust.families import BOUNDS_S, FAMILIES, HISTOGRAMS, PREFIX, quantiles_of
from vllm_locust.fidelity import DEFAULTS, Limits
from vllm_locust.figures import Summary
from vllm_locust.histogram import Histogram
from vllm_locust.load import Load
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Recording
from vllm_locust.summary import Meta, fidelity_in
from vllm_locust.timeline import METRICS, Outcome, Unit
from vllm_locust.workers import Watch, seen_in

QUANTILES = (0.5, 0.9, 0.95, 0.99)
MAX_SCENARIOS = 100
"""Each costs some 800 series per endpoint; more of them are most likely a request's name or number."""
OTHER = "other"
"""Label of all scenarios beyond `MAX_SCENARIOS`."""

_SLICE_NS = 2_000_000
"""For how long a page is written before others have their turn: streams must be read meanwhile. At each turn a report
is taken, too, and 64 workers report at the same time: more turns would have the scrape wait for all of them."""
_OUTCOME = "outcome|"
_COUNTERS = {
    "requests_scheduled": "scheduled",
    "requests_dropped": "dropped",
    "requests_sent": "sent",
    "requests_good": "good",
    "input_tokens": "input_tokens",
    "output_tokens": "tokens_received",
    "failed_output_tokens": "tokens_failed",
    "token_events": "token_events",
}
"""What the recording calls each counter, or the histogram whose sum it is."""
_ANY_LOOP = {"requests_sent", "input_tokens", "output_tokens", "failed_output_tokens", "token_events"}
"""Counters of every run; the others are of an open loop, or of one that asks for good requests."""
_OPEN_LOOP = {"requests_scheduled", "requests_dropped"}
_FAULTS = ("plugin_errors", "late_samples")

_RUN_SHARES = {"uncertain_ratio": "uncertain_share", "stamped_ratio": "stamped_share"}
"""What the summary calls each gauge; so also below."""
_WORKER = {
    "loop_lag_seconds": "loop_lag_s",
    "cpu_ratio": "cpu_share",
    "core_wait_ratio": "core_wait_share",
    "stalled_ratio": "stalled_share",
}

_log = logging.getLogger(__name__)


_BOUNDS_NS = [round(bound * NS_PER_S) for bound in BOUNDS_S]
_EDGES = (*map(str, BOUNDS_S), "+Inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is to be told at one scrape."""

    recording: Recording | None
    """Of the current or else the last epoch; absent before the first run."""
    before: tuple[Recording, ...] = ()
    """Those before it that may still take reports, after a reset."""
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
    scenarios: tuple[str, ...] = ()
    """Those of the process in the order in which they were first heard of: the first ones keep their names."""


class Exporter:
    """Collector of everything that is exported, in a registry of its own."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read `snapshot` at every scrape."""
        self._snapshot = snapshot
        self._retired: set[tuple[str, int]] = set()
        self._base: Cells = {}
        self._base_faults: Counter[str] = Counter()
        self._expected: dict[Key, set[str]] = {}
        """Counters that are told from 0 on."""
        self._watch = Watch()
        self._warned = False
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def expect(self, parts: Iterable[tuple[str, str]], load: Load, *, good: bool) -> None:
        """Tell the counters of these scenarios and endpoints from now on, from 0; to do so again changes nothing."""
        counters = _ANY_LOOP | (_OPEN_LOOP if load.arrivals else set()) | ({"requests_good"} if good else set())
        phases = [STEADY, *([WARMUP] if load.warmup_ns else []), *([RETRY] if load.retries else [])]
        for (scenario, endpoint), phase in itertools.product(parts, phases):
            self._expected.setdefault(Key(scenario, endpoint, phase), set()).update(counters)

    def retire(self, recording: Recording) -> None:
        """Keep the totals of a recording that takes no more reports; to do so again changes nothing.

        Its owner calls this when it replaces a recording, since no scrape may come before it does so again.
        """
        if not self._is_retired(recording):
            self._retired.add((recording.run, recording.epoch))
            cells = recording.totals
            _add_all(self._base, _labelled(cells, self._labels(self._snapshot(), cells)))
            self._base_faults.update(_faults(cells, self._watch, recording))

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has samples, all of one moment."""
        now = self._snapshot()
        current = [] if now.recording is None else [now.recording]
        totals = [(recording, recording.totals) for recording in (*now.before, *current)]
        streams = _in_flight(now)
        labels = self._labels(now, *(cells for _, cells in totals), streams)
        lifetime, faults, run = Cells(), self._base_faults.copy(), Cells()
        _add_all(lifetime, self._base)
        for recording, cells in totals:
            labelled = _labelled(cells, labels)
            if recording is now.recording:
                run = labelled
            if not self._is_retired(recording):
                _add_all(lifetime, labelled)
                faults.update(_faults(cells, self._watch if recording is now.recording else Watch(), recording))
        expected: dict[Key, set[str]] = {}
        for key, counters in self._expected.items():
            expected.setdefault(_relabelled(key, labels), set()).update(counters)
        if expected:
            faults.update(dict.fromkeys(_FAULTS, 0))
        window = _labelled(_last_window(now), labels)
        gauges = [*_state(now), *_streams(now, run, streams, labels), *_fidelity(now, run, self._watch), *_workers(now)]
        counted = itertools.chain(_counters(lifetime, expected), _fault_counters(faults), _histograms(lifetime))
        since_ns = time.monotonic_ns()
        for family in itertools.chain(gauges, counted, _summaries(lifetime, run, window)):
            if family.samples:
                yield family
            if time.monotonic_ns() - since_ns >= _SLICE_NS:
                gevent.sleep(0)  # all is copied by now
                since_ns = time.monotonic_ns()

    def _is_retired(self, recording: Recording) -> bool:
        return (recording.run, recording.epoch) in self._retired

    def _labels(self, now: Snapshot, *cells: Iterable[Key]) -> dict[str, str]:
        """Return the label of each scenario: its name, or `OTHER` beyond the limit."""
        keys = itertools.chain(self._expected, self._base, *map(sorted, cells))
        names = list(dict.fromkeys((*now.scenarios, *(key.scenario for key in keys))))
        if len(names) > MAX_SCENARIOS and not self._warned:
            self._warned = True
            remark = "more than %d scenarios: Prometheus gets %r and further ones as %r, reports do not"
            _log.warning(remark, MAX_SCENARIOS, names[MAX_SCENARIOS], OTHER)
        return {name: name if place < MAX_SCENARIOS else OTHER for place, name in enumerate(names)}


def _labelled(cells: Cells, labels: dict[str, str]) -> Cells:
    """Copy cells, added up where labels are the same: of stages, of scenarios beyond the limit."""
    result: Cells = {}
    for key in sorted(cells):
        _add_all(result, {_relabelled(key, labels): cells[key]})
    return result


def _relabelled(key: Key, labels: dict[str, str]) -> Key:
    return Key(labels[key.scenario], key.endpoint, key.phase)


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


def _faults(cells: Cells, watch: Watch, recording: Recording) -> dict[str, int]:
    """Return what is counted per worker, once there is anything that could have gone wrong.

    From then on 0 is told as well: an alert on the first error needs the series before it.
    """
    if not cells:
        return {}
    workers = watch.seen(recording).values()
    errors, late = sum(seen.plugin_errors for seen in workers), sum(seen.late for seen in workers)
    return {"plugin_errors": errors, "late_samples": late}


def _family(name: str) -> Metric:
    """Return a family without samples."""
    family = FAMILIES[PREFIX + name]
    # The client adds `_total` where a format wants it.
    return Metric(family.name.removesuffix("_total"), family.meaning, family.kind)


def _gauge(name: str, value: float) -> Metric:
    family = _family(name)
    family.add_sample(family.name, {}, value)
    return family


def _state(now: Snapshot) -> Iterator[Metric]:
    yield _gauge("running", now.running)
    yield _gauge("warming_up", now.warming_up)
    yield _gauge("users", now.users)
    yield _gauge("workers", now.workers)
    family = _family("run_info")
    if now.meta is not None:
        family.add_sample(family.name, _run_labels(now.meta), 1)
    yield family


def _run_labels(meta: Meta) -> dict[str, str]:
    return {
        "run": meta.run,
        "name": meta.name,
        "scenario": ", ".join(name for name in dict.fromkeys(meta.scenarios.values()) if name),
        "target": meta.target,
        "version": meta.plugin_version,
    }


def _in_flight(now: Snapshot) -> Counter[Key]:
    """Return how many streams those who take part have in flight, by scenario and endpoint."""
    numbers = Counter[Key]()
    if now.recording is not None and now.running:
        for worker in now.live_workers:
            for scenario, endpoint, number in now.recording.in_flight(worker):
                numbers[Key(scenario, endpoint)] += number
    return numbers


def _streams(now: Snapshot, run: Cells, streams: Counter[Key], labels: dict[str, str]) -> Iterator[Metric]:
    """Yield what streams now, 0 for what has streamed in this run."""
    if now.recording is None:
        return
    numbers = Counter({(key.scenario, key.endpoint): 0 for key in run})
    for key, number in streams.items():
        numbers[labels[key.scenario], key.endpoint] += number
    family = _family("streams_in_flight")
    for (scenario, endpoint), number in numbers.items():
        family.add_sample(family.name, {"scenario": scenario, "endpoint": endpoint}, number)
    yield family
    if now.running and numbers:
        yield _gauge("longest_silence_seconds", progress.silence_s(now.recording, now.live_workers))


def _fidelity(now: Snapshot, run: Cells, watch: Watch) -> Iterator[Metric]:
    """Yield whether to believe the run so far; absent before its first token."""
    if now.recording is None:
        return
    seen = fidelity_in(run, now.recording.phases, now.limits, watch.seen(now.recording))
    if not seen["token_events"]:
        return
    yield _gauge("generator_limited", bool(fidelity.faults(seen, now.limits)))
    for name, source in _RUN_SHARES.items():
        if seen[source] is not None:
            yield _gauge(name, seen[source])


def _workers(now: Snapshot) -> Iterator[Metric]:
    """Yield what each live worker was like in the last window that all of them have closed."""
    closed = _closed(now)
    if now.recording is None or not closed:
        return
    gauges = {worker: now.recording.gauges.get((worker, closed - 1)) for worker in now.live_workers}
    seen = {worker: seen_in([g], now.recording.window_ns).figures() for worker, g in gauges.items() if g is not None}
    for name, source in _WORKER.items():
        family = _family(f"worker_{name}")
        for worker, figures in seen.items():
            if figures[source] is not None:
                family.add_sample(family.name, {"worker": worker}, figures[source])
        yield family


def _counters(lifetime: Cells, expected: dict[Key, set[str]]) -> Iterator[Metric]:
    cells = dict.fromkeys(sorted(expected), Cell()) | lifetime
    for name, source in _COUNTERS.items():
        family = _family(f"{name}_total")
        for key, cell in cells.items():
            histogram = cell.histograms.get(source)
            number = cell.counters.get(source, 0) if histogram is None else histogram.sum
            if number or name in expected.get(key, ()):
                family.add_sample(f"{family.name}_total", _phase_labels(key), number)
        yield family
    ended, failed = _family("requests_total"), _family("requests_failed_total")
    for key, cell in cells.items():
        known = key in expected or bool(cell.counters.get("sent"))
        numbers = {(str(Outcome.OK), "200"): 0} if known else {}
        numbers |= _outcomes(cell)
        for (outcome, status), number in numbers.items():
            ended.add_sample(f"{ended.name}_total", _phase_labels(key) | {"outcome": outcome, "status": status}, number)
        if known:
            number = sum(number for (outcome, _), number in numbers.items() if Outcome(outcome).failed)
            failed.add_sample(f"{failed.name}_total", _phase_labels(key), number)
    yield from (ended, failed)


def _phase_labels(key: Key) -> dict[str, str]:
    return {"scenario": key.scenario, "endpoint": key.endpoint, "phase": key.phase}


def _fault_counters(faults: Counter[str]) -> Iterator[Metric]:
    for name, number in faults.items():
        family = _family(f"{name}_total")
        family.add_sample(f"{family.name}_total", {}, number)
        yield family


def _outcomes(cell: Cell) -> dict[tuple[str, str], int]:
    """Return how many requests ended, by outcome and status."""
    found = {}
    for name, number in sorted(cell.counters.items()):
        if number and name.startswith(_OUTCOME):
            outcome, _, status = name.removeprefix(_OUTCOME).partition("|")
            found[outcome, status] = number
    return found


def _steady(cells: Cells, metric: str) -> Iterator[tuple[Key, Histogram]]:
    """Yield each histogram of a metric that has samples of steady requests."""
    for key, cell in cells.items():
        histogram = cell.histograms.get(metric)
        if key.phase == STEADY and histogram is not None and histogram.count:
            yield key, histogram


def _histograms(lifetime: Cells) -> Iterator[Metric]:
    for metric in HISTOGRAMS:
        family = _family(f"{metric}_seconds")
        for key, histogram in _steady(lifetime, metric):
            labels = {"scenario": key.scenario, "endpoint": key.endpoint}
            counts = (*histogram.count_at_most(_BOUNDS_NS), histogram.count)
            for edge, count in zip(_EDGES, counts, strict=True):
                family.add_sample(f"{family.name}_bucket", {**labels, "le": edge}, count)
            family.add_sample(f"{family.name}_count", labels, histogram.count)
            family.add_sample(f"{family.name}_sum", labels, histogram.sum / NS_PER_S)
        yield family


def _summaries(lifetime: Cells, run: Cells, window: Cells) -> Iterator[Metric]:
    for metric in METRICS.values():
        scale = NS_PER_S if metric.unit is Unit.SECONDS else 1
        family = _family(quantiles_of(metric.name).removeprefix(PREFIX))
        spans = {"run": dict(_steady(run, metric.name)), "window": dict(_steady(window, metric.name))}
        # OpenMetrics wants the samples of one set of labels together
        for (key, total), span in itertools.product(_steady(lifetime, metric.name), spans):
            labels = {"scenario": key.scenario, "endpoint": key.endpoint, "span": span}
            values = spans[span].get(key, Histogram()).percentiles(QUANTILES)
            for quantile, value in zip(QUANTILES, values, strict=True):
                if value is not None:
                    family.add_sample(family.name, {**labels, "quantile": str(quantile)}, value / scale)
            if span == "run":
                family.add_sample(f"{family.name}_count", labels, total.count)
                family.add_sample(f"{family.name}_sum", labels, total.sum / scale)
        yield family
