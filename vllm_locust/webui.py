"""Rows of our own in Locust's statistics table: `TTFT short`, `ITL short`.

Built by the master from the recording on every tick, so that nothing is logged per gap. They do not count in
*Aggregated*, nor in RPS. Locust's histograms keep what they are given, so the median and percentile columns show our
resolution; minima, maxima and averages Locust rounds when it shows them.
"""

from typing import cast

from locust.stats import RequestStats, StatsEntry

from vllm_locust.cell import Cells, select, total
from vllm_locust.histogram import Histogram

_ROWS = {"TTFT": "ttft", "ITL": "itl"}
METRICS = tuple(_ROWS.values())
"""What the rows are about."""


class _Row(StatsEntry):
    """A row that is no request: it has samples, but no rate."""

    total_rps = 0.0
    current_rps = 0.0


def update_rows(stats: RequestStats, cells: Cells) -> None:
    """Write the latencies of each scenario into Locust's table."""
    for scenario in sorted({key.scenario for key in cells}):
        cell = total(select(cells, scenario=scenario, phase="steady"))
        for method, metric in _ROWS.items():
            histogram = cell.histograms.get(metric)
            if histogram is not None and histogram.count:
                stats.entries[scenario, method] = _row(stats, scenario, method, histogram)


def _row(stats: RequestStats, name: str, method: str, histogram: Histogram) -> StatsEntry:
    row = _Row(stats, name, method)
    row.num_requests = histogram.count
    low, high = histogram.min or 0, histogram.max or 0
    # Locust says int where it can hold any number of milliseconds.
    row.total_response_time = cast("int", histogram.sum / 1e6)
    row.min_response_time, row.max_response_time = cast("int", low / 1e6), cast("int", high / 1e6)
    for value, number in histogram:
        row.response_times[cast("int", _readable_ms(value / 1e6))] += number
    return row


def _readable_ms(value: float) -> float:
    """Round to what the buckets know, about three digits: 8.4 reads 8.4."""
    if value >= 100:  # noqa: PLR2004
        return round(value)
    return round(value, 1 if value >= 1 else 2)
