"""Our rows in Locust's own statistics, in a process of its own: importing Locust patches the whole process."""

import json
import subprocess
import sys
from typing import Any

import pytest

_SCRIPT = """
import json, sys
from locust.stats import RequestStats
from vllm_locust.cell import Cell, Key
from vllm_locust.webui import update_rows

given = json.load(sys.stdin)
stats = RequestStats()
for _ in range(given["requests"]):
    stats.log_request("POST", "/v1/chat/completions [short]", 455, 0)
cells = {}
for scenario, endpoint, phase, metric, values_ms in given["samples"]:
    cell = cells.setdefault(Key(scenario, endpoint, phase), Cell())
    for value_ms in values_ms:
        cell.histogram(metric).add(round(value_ms * 1e6))


def shown(row):
    return {
        "samples": row.num_requests, "min": row.min_response_time, "max": row.max_response_time,
        "median": row.median_response_time, "p95": row.get_response_time_percentile(0.95),
        "p99": row.get_response_time_percentile(0.99), "total_rps": row.total_rps, "current_rps": row.current_rps,
    }


before = shown(stats.total)
update_rows(stats, cells, ("steady",))
rows = {f"{method} {name}": shown(row) for (name, method), row in stats.entries.items()}
print(json.dumps({"rows": rows, "before": before, "after": shown(stats.total)}))
"""

Sample = tuple[str, str, str, str, list[float]]


def shown(*samples: Sample, requests: int = 0) -> dict[str, Any]:
    """Return Locust's rows after ours were written, and its total before and after."""
    given = json.dumps({"samples": samples, "requests": requests})
    done = subprocess.run([sys.executable, "-c", _SCRIPT], input=given, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_case_46_median_and_percentiles_show_what_was_measured() -> None:
    """Sources: locustio/locust#331, #1043, #3373."""
    values_ms = [0.4, 2.5, 7.4, 8.4, 147, 1450, 10_499]
    rows = shown(*((f"{value_ms}", "chat", "steady", "ttft", [value_ms] * 100) for value_ms in values_ms))["rows"]
    for value_ms in values_ms:
        row = rows[f"TTFT {value_ms}"]
        assert row["min"] <= row["median"] <= row["p99"] <= row["max"]
        assert row["median"] == row["p99"] == pytest.approx(value_ms, rel=0.005)
        assert value_ms > 100 or row["median"] == value_ms


def test_rows_have_samples_but_no_rate_and_do_not_count_in_aggregated() -> None:
    """Case 48; source: locustio/locust#2289."""
    ttft: Sample = ("short", "chat", "steady", "ttft", [300] * 100)
    found = shown(ttft, ("short", "chat", "steady", "itl", [50] * 300), requests=100)
    rows = found["rows"]
    assert (rows["TTFT short"]["samples"], rows["ITL short"]["samples"]) == (100, 300)
    assert rows["ITL short"]["total_rps"] == rows["ITL short"]["current_rps"] == 0
    assert found["after"]["samples"] == found["before"]["samples"] == 100
    assert found["after"]["p95"] == found["before"]["p95"]


def test_endpoints_share_the_row_of_their_scenario_and_other_phases_and_metrics_stay_out() -> None:
    rows = shown(
        ("short", "chat", "steady", "ttft", [100]),
        ("short", "completions", "steady", "ttft", [300]),
        ("short", "chat", "retry", "ttft", [900]),
        ("short", "chat", "steady", "e2el", [900]),
    )["rows"]
    assert list(rows) == ["TTFT short"]
    assert (rows["TTFT short"]["samples"], rows["TTFT short"]["min"], rows["TTFT short"]["max"]) == (2, 100, 300)
