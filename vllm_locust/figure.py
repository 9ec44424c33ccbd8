"""What runs are compared by: a figure is one statistic of one metric, and which way of it is better."""

import math
from dataclasses import dataclass

from vllm_locust.limit import PLAIN, Unit, quantile
from vllm_locust.quantity import format_duration, format_rate, format_share
from vllm_locust.timeline import METRICS

_TITLES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "itl_max": "longest gap",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "request_per_s": "requests/s",
    "input_tokens_per_s": "input tok/s",
    "output_tokens_per_s": "output tok/s",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One statistic of one metric, as limits name them."""

    metric: str
    statistic: str = ""

    @property
    def unit(self) -> Unit:
        """What it is in; goodput is a share of all requests that were due."""
        return PLAIN[self.metric] if self.metric in PLAIN else Unit(METRICS[self.metric].unit)

    @property
    def quantile(self) -> float | None:
        """What part of the samples lies below it, absent unless it is a percentile."""
        return quantile(self.statistic)

    @property
    def judged(self) -> bool:
        """Whether a failure counts as infinitely late."""
        return self.metric in ("ttft", "e2el")

    @property
    def lower_is_better(self) -> bool:
        """Which way is better: less time and fewer failures, more of all else."""
        return self.unit is Unit.SECONDS or self.metric == "failures"

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{_TITLES.get(self.metric, self.metric)} {self.statistic}".rstrip()

    def shown(self, value: float | None) -> str:
        """Print a value with its unit; absent is a dash, infinite is `failed`."""
        if value is None:
            return "–"
        if math.isinf(value):
            return "failed"
        match self.unit:
            case Unit.SECONDS:
                return format_duration(value)
            case Unit.SHARE:
                return format_share(value, 1)
        return format_rate(value)


TTFT_P95 = Figure("ttft", "p95")
ITL_MEAN = Figure("itl", "mean")
TPOT_MEAN = Figure("tpot", "mean")
FAILURES = Figure("failures")
GOODPUT = Figure("goodput")
FIGURES = (
    Figure("ttft", "p50"),
    TTFT_P95,
    Figure("ttft", "p99"),
    ITL_MEAN,
    Figure("itl", "p99"),
    Figure("itl_max", "p95"),
    TPOT_MEAN,
    Figure("e2el", "p95"),
    Figure("request_per_s"),
    Figure("output_tokens_per_s"),
    FAILURES,
    GOODPUT,
)
"""What a comparison has a row of, in this order."""
