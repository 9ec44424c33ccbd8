"""Run files as older versions wrote them, turned into what this one reads, before anything else looks at them.

Promise: a file is read for ever. There is a step for each change that a reader of today would misunderstand, the oldest
first, and `tests/golden/runs` has a file from before each. What was only added needs none: it is absent, and has a
default where it is read.
"""

from itertools import accumulate
from typing import Any

import numpy as np

from vllm_locust.histogram import Histogram

_ZERO = -1
"""Bucket of exactly zero, as long as zero had one."""


def upgraded(recording: dict[str, Any]) -> dict[str, Any]:
    """Return a recording of a run file as it would be saved now; may raise what damaged files make raise."""
    if "boundaries_ns" not in recording:  # the key is younger than the bytes of counts
        for window in recording["windows"]:
            for cell in window["cells"]:
                for metric, saved in cell["histograms"].items():
                    cell["histograms"][metric] = _packed(*saved)
    return recording


def _packed(steps: list[Any], counts: int | list[int], total: int, low: int | None, high: int | None) -> list[Any]:
    """Pack a histogram of two lists: from each occupied bucket to the next one, and how many samples are in it."""
    if not isinstance(counts, list):
        return [steps, counts, total, low, high]
    buckets = dict(zip(accumulate(steps), counts, strict=True))
    number = sum(buckets.values())
    buckets.pop(_ZERO, None)
    first = min(buckets, default=0)
    dense = np.zeros(max(buckets, default=first - 1) + 1 - first, np.int64)
    for bucket, count in buckets.items():
        dense[bucket - first] = count
    return [Histogram(first, dense).planes(), number, total, low, high]
