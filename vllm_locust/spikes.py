"""Windows in which too many requests were slow.

Of the requests of a window, more lie above the p95 of the run than the law of dealing them out allows
(`chance.at_least`; hypergeometric, since the threshold comes from the same requests), and at least `SPIKE_TIMES` as
many as are to be expected.

Requests of one window are alike, too, on a real server: they wait behind the same prompt. So where the counts scatter
by more than the law says, in the lower four fifths of the windows, both counts and threshold are divided by that factor
(the design effect of Rao and Scott, 1992). Where windows hold too few requests of a scenario to show a spike, they are
taken several at a time.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from vllm_locust import chance
from vllm_locust.evidence import FALSE_ALARMS, SPIKING, Evidence, Symptom, of, when
from vllm_locust.histogram import Histogram
from vllm_locust.intervals import Interval
from vllm_locust.quantity import NS_PER_S, format_duration

SPIKE_TIMES = 3
_UNUSUAL = 0.05
_TRIMMED = 0.8
"""Share of the windows by which the scatter is judged; those with most above the threshold are left out."""
_TRIMMED_VARIANCE = 0.583
"""Variance of the lower four fifths of a standard normal law."""


def allowed_of_one(evidence: Evidence) -> float:
    """Return the error rate of a single window, metric and scenario."""
    return FALSE_ALARMS["spike"] / max(len(SPIKING) * len(evidence.steady) * len(evidence.windows), 1)


def spikes(evidence: Evidence, together: dict[str, int]) -> Iterator[Symptom]:
    """Yield scenarios and metrics with windows in which too many requests were slow.

    Windows of each scenario are taken so many `together`.
    """
    allowed = allowed_of_one(evidence)
    for scenario in evidence.steady:
        for metric in SPIKING:
            groups = _gathered(evidence.samples(scenario, metric), together[scenario])
            found = _spiking(groups, allowed)
            if found:
                yield _spike(scenario, metric, found, evidence.histogram(scenario, metric))


_Group = tuple[list[Interval], Histogram]


def _gathered(samples: Sequence[tuple[Interval, Histogram]], size: int) -> list[_Group]:
    groups = []
    for first in range(0, len(samples), size):
        merged = Histogram()
        for _, histogram in samples[first : first + size]:
            merged.merge(histogram)
        groups.append(([window for window, _ in samples[first : first + size]], merged))
    return groups


def _spiking(groups: Sequence[_Group], allowed: float) -> list[tuple[list[Interval], int, int, float]]:
    """Return windows that are spikes, how many of their requests are above the threshold, of how many, and the norm."""
    pooled = Histogram()
    for _, histogram in groups:
        pooled.merge(histogram)
    if not pooled.count:
        return []
    bucket = _bucket(pooled, 1 - _UNUSUAL)
    above, drawn = [_above(h, bucket) for _, h in groups], [h.count for _, h in groups]
    marked, number = sum(above), pooled.count
    effect = _design_effect(above, drawn)
    found = []
    for (windows, _), hits, size in zip(groups, above, drawn, strict=True):
        norm = size * marked / number
        if hits < SPIKE_TIMES * norm or not hits:
            continue
        likely = chance.at_least(hits, size, marked, number)
        if effect > 1:
            effective = (int(hits / effect), *(math.ceil(count / effect) for count in (size, marked, number)))
            likely = max(likely, chance.at_least(*effective))
        if likely <= allowed:
            found.append((windows, hits, size, norm))
    return found


def _bucket(histogram: Histogram, quantile: float) -> int:
    """Return the bucket of a nearest rank; zeros are in one below all."""
    rank = math.ceil(quantile * histogram.count - 1e-9) - histogram.zeros
    return histogram.first + int(np.searchsorted(histogram.counts.cumsum(), rank)) if rank > 0 else -(2**31)


def _above(histogram: Histogram, bucket: int) -> int:
    """Return how many samples are in the buckets above one: the same threshold in every histogram."""
    return int(histogram.counts[max(0, bucket + 1 - histogram.first) :].sum())


def _design_effect(above: Sequence[int], drawn: Sequence[int]) -> float:
    """Return by which factor counts scatter more than those of independent requests, 1 at least.

    Taken from the windows with the smallest shares, so that spikes neither hide themselves nor each other.
    """
    order = sorted((hits / size, hits, size) for hits, size in zip(above, drawn, strict=True) if size)
    kept = order[: math.ceil(_TRIMMED * len(order))]
    share = sum(hits for _, hits, _ in kept) / max(sum(size for _, _, size in kept), 1)
    if not 0 < share < 1 or len(kept) < 2:  # noqa: PLR2004 - one does not scatter
        return 1.0
    scatter = sum((hits - size * share) ** 2 / (size * share * (1 - share)) for _, hits, size in kept)
    return max(1.0, scatter / (len(kept) - 1) / _TRIMMED_VARIANCE)


def _spike(
    scenario: str, metric: str, found: Sequence[tuple[list[Interval], int, int, float]], histogram: Histogram
) -> Symptom:
    worst = max(found, key=lambda spike: spike[1] / max(spike[3], 1e-9))
    windows = [window for spike in found for window in spike[0]]
    limit = format_duration((histogram.percentile(1 - _UNUSUAL) or 0) / NS_PER_S)
    where = f", most {when(worst[0])}" if len(found) > 1 else ""
    text = (
        f"{of(metric, scenario)} spikes {when(windows)}{where}: {worst[1]} of {worst[2]} requests above the run's "
        f"p95 ({limit}), {worst[3]:.1f} to be expected"
    )
    return Symptom("spike", text, scenario, metric, tuple(window.index for window in windows))


def needed(allowed: float) -> int:
    """Return how many requests a window needs so that a spike of 60 % of them above the p95 is found nine times in ten.

    Of log-normal times with a sigma of 0.5 that are tripled in one of 30 windows, 65 to 70 % are.
    """
    power, shown = 0.9, 0.6
    for size in range(2, 1000):
        hits = next((k for k in range(size + 1) if chance.binomial_at_least(k, size, _UNUSUAL) <= allowed), size + 1)
        if hits <= size and chance.binomial_at_least(hits, size, shown) >= power:
            return size
    return 1000
