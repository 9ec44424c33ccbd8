"""What a simulated server tells of itself on `/metrics`, by the names and with the buckets of vLLM.

It promises: counts are exact, and of what was really written: a token counts when its taker, having written it, wants
the next. A token costs an addition and a bisection; all else is done at a scrape.

Where it differs from a real vLLM: it has no prefix cache, so that every token of a prompt is a query and none a hit;
it preempts nobody; and the cache that `kv_cache_usage_perc` is a share of holds the longest context for every seat.
"""

import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from vllm_locust.simulated import Profile

COMPLETE = ("stop", "length")
REASONS = (*COMPLETE, "abort", "error", "repetition")

# vLLM's own buckets, so that what reads its dashboards reads these.
_SECONDS = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *_SECONDS, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_SECONDS)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *_MINUTES)


class Buckets:
    """A histogram of times."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._edges = (*map(str, bounds_s), "+Inf")
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._counts = [0] * len(self._edges)
        self._sum_ns = 0

    def add(self, time_ns: int) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_ns, time_ns)] += 1
        self._sum_ns += time_ns

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many there were up to each bound, and their sum in seconds."""
        return list(zip(self._edges, itertools.accumulate(self._counts), strict=True)), self._sum_ns / 1e9


@dataclass(slots=True, eq=False)
class Served:
    """A request, from its arrival to its end; instants in monotonic ns."""

    prompt: int  # its tokens
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    seated_ns: int = 0  # 0 while it queues
    tokens: int = 0  # written so far


class Metrics:
    """All that was served, as a collector."""

    def __init__(self, profile: Profile, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Ask `running` and `waiting` at a scrape for the requests with and without a seat."""
        self.ttft, self.itl = Buckets(_TTFT), Buckets(_ITL)
        self._e2e, self._queue = Buckets(_REQUEST), Buckets(_REQUEST)
        self._running, self._waiting = running, waiting
        self._labels = {"model_name": profile.model, "engine": "0"}
        self._cache = profile.seats * profile.max_model_len
        self._seated: set[Served] = set()
        self._ended = dict.fromkeys(REASONS, 0)
        self._tokens: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def seat(self, served: Served) -> None:
        """Note that a request is served from now on."""
        served.seated_ns = time.monotonic_ns()
        self._seated.add(served)
        self._tokens["queries"] += served.prompt

    def begin(self, served: Served, first_ns: int) -> None:
        """Note that an answer began at an instant."""
        self.ttft.add(first_ns - served.arrived_ns)
        self._tokens["prompt"] += served.prompt

    def end(self, served: Served, reason: str) -> None:
        """Count a request that is over, whether it got a seat or not."""
        self._ended[reason] += 1
        self._seated.discard(served)
        self._tokens["generation"] += served.tokens
        if reason in COMPLETE:
            self._e2e.add(time.monotonic_ns() - served.arrived_ns)
            self._queue.add(served.seated_ns - served.arrived_ns)

    def exposition(self) -> bytes:
        """Return the text of `/metrics`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        names, values = zip(*self._labels.items(), strict=True)
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, text, number in self._counters():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric(values, number)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "All that ended.", labels=("finished_reason", *names))
        for reason, number in self._ended.items():
            success.add_metric((reason, *values), number)
        yield success
        for name, text, buckets in self._histograms():
            histogram = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=names)
            histogram.add_metric(values, *buckets.told())
            yield histogram

    def _gauges(self) -> Iterable[tuple[str, str, float]]:
        held = sum(served.prompt + served.tokens for served in self._seated)
        yield "num_requests_running", "With a seat.", self._running()
        yield "num_requests_waiting", "For a seat.", self._waiting()
        yield (
            "kv_cache_usage_perc",
            "Tokens of those with a seat, as a share of what all seats can hold.",
            held / self._cache,
        )

    def _counters(self) -> Iterable[tuple[str, str, int]]:
        generated = self._tokens["generation"] + sum(served.tokens for served in self._seated)
        yield "prompt_tokens", "Of answers that have begun.", self._tokens["prompt"]
        yield "generation_tokens", "Of all answers, as written.", generated
        yield "prefix_cache_queries", "Tokens of prompts that got a seat.", self._tokens["queries"]
        yield "prefix_cache_hits", "Of them, those that were there: none, it has no such cache.", 0
        yield "num_preemptions", "It preempts nobody.", 0

    def _histograms(self) -> Iterable[tuple[str, str, Buckets]]:
        yield "time_to_first_token", "From arrival.", self.ttft
        yield "inter_token_latency", "Gaps of a choice.", self.itl
        yield "e2e_request_latency", "Complete answers.", self._e2e
        yield "request_queue_time", "Complete answers: what they waited for a seat.", self._queue
