"""Our rows in Locust's own statistics."""

import pytest
from locust.stats import RequestStats

from vllm_locust.recording import Cell, Cells, Key
from vllm_locust.webui import update_rows


def cells(**metrics: list[float]) -> Cells:
    """Return the cells of one scenario with samples in milliseconds."""
    cell = Cell()
    for metric, values in metrics.items():
        for value_ms in values:
            cell.histogram(metric).add(round(value_ms * 1e6))
    return {Key("short", "chat"): cell}


@pytest.mark.parametrize(
    ("value_ms", "shown"), [(0.4, 0.4), (2.5, 2.5), (7.4, 7.4), (8.4, 8.4), (147, 147), (1450, 1450), (10_499, 10_499)]
)
def test_case_46_median_and_percentiles_show_what_was_measured(value_ms: float, shown: float) -> None:
    """Sources: locustio/locust#331, #1043, #3373."""
    stats = RequestStats()
    update_rows(stats, cells(ttft=[value_ms] * 1000))
    row = stats.entries["short", "TTFT"]
    assert row.median_response_time == pytest.approx(shown, rel=0.005)
    assert row.get_response_time_percentile(0.99) == pytest.approx(shown, rel=0.005)
    assert row.min_response_time <= row.median_response_time <= row.max_response_time
    if shown < 100:
        assert row.get_response_time_percentile(0.99) == shown


def test_rows_have_samples_but_no_rate_and_do_not_count_in_aggregated() -> None:
    """Case 48; source: locustio/locust#2289."""
    stats = RequestStats()
    for _ in range(100):
        stats.log_request("POST", "/v1/chat/completions [short]", 455, 0)
    before = (stats.total.num_requests, stats.total.total_rps, stats.total.get_response_time_percentile(0.95))
    update_rows(stats, cells(ttft=[300] * 100, itl=[50] * 300))
    assert (stats.entries["short", "TTFT"].num_requests, stats.entries["short", "ITL"].num_requests) == (100, 300)
    assert stats.entries["short", "ITL"].total_rps == stats.entries["short", "ITL"].current_rps == 0
    after = (stats.total.num_requests, stats.total.total_rps, stats.total.get_response_time_percentile(0.95))
    assert after == before


def test_a_scenario_without_samples_has_no_row() -> None:
    stats = RequestStats()
    update_rows(stats, cells(ttft=[300]))
    assert list(stats.entries) == [("short", "TTFT")]


def test_scenarios_of_both_endpoints_share_a_row_and_another_phase_stays_out() -> None:
    stats = RequestStats()
    one, two, retried = (next(iter(cells(ttft=[ms]).values())) for ms in (100, 300, 900))
    by_key = {Key("short", "chat"): one, Key("short", "completions"): two, Key("short", "chat", "retry"): retried}
    update_rows(stats, by_key)
    row = stats.entries["short", "TTFT"]
    assert (row.num_requests, row.min_response_time, row.max_response_time) == (2, 100, 300)
