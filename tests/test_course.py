"""How a run went, window by window: what the table and the sparklines show, and when."""

import re

import pytest
from windowed import WINDOW_S, Traffic, log_normal, recorded

from vllm_locust.cell import Cells, Key
from vllm_locust.course import course, spark, sparklines, stability_lines, window_table
from vllm_locust.intervals import intervals, rows
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Recording
from vllm_locust.report import text
from vllm_locust.results import Run
from vllm_locust.summary import Meta
from vllm_locust.terminal import COLUMNS, width_of

MIXED = {"short": Traffic(60), "long": Traffic(20, ttft_s=0.3, tokens=300, input_tokens=3000)}
DASH = "–"


def report(recording: Recording, *, stability: bool = True, full: bool = False) -> str:
    return text(Run.of(recording, Meta(stability=stability)), full=full)


def table_rows(shown: str) -> list[list[str]]:
    """Return the rows of the table of windows."""
    lines = shown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("from  ")) + 2
    return [line.split() for line in lines[start:] if line[:1].isdigit()]


def test_a_run_that_was_to_be_stable_has_verdict_sparklines_and_a_row_for_each_window() -> None:
    shown = report(log_normal(1, MIXED))
    assert "\nStability stable: 30 windows of 10.0 s\n" in shown
    assert [row[0] for row in table_rows(shown)] == [str(10 * index) for index in range(30)]
    assert "TTFT p95 short" in shown


@pytest.mark.parametrize(
    ("windows", "stability", "full", "shown"),
    [(30, False, False, False), (30, False, True, True), (1, False, True, False), (1, True, False, True)],
)
def test_other_runs_show_their_windows_in_the_long_report(
    windows: int,
    stability: bool,  # noqa: FBT001
    full: bool,  # noqa: FBT001
    shown: bool,  # noqa: FBT001
) -> None:
    """Of one window there is nothing to say that the overview does not."""
    found = report(log_normal(1, MIXED, windows), stability=stability, full=full)
    assert ("windows: a mark per 10.0 s" in found) == shown
    assert ("\nStability" in found) == stability


def test_a_row_has_the_numbers_of_its_window() -> None:
    recording = log_normal(2, {"one": Traffic(200)})
    (cell,) = recording.window(7).values()
    ttft = cell.histograms["ttft"]
    (start, sent, failed, samples, p50, p95, itl, tokens, offered, ok, streams) = table_rows(report(recording))[7]
    assert (start, sent, failed, samples, itl) == ("70", str(ttft.count), "0", str(ttft.count), DASH)
    for printed, value in ((p50, ttft.percentile(0.5)), (p95, ttft.percentile(0.95))):
        assert float(printed) == pytest.approx((value or 0) / 1e6, rel=0.01)
    assert float(tokens.replace(",", "")) == pytest.approx(cell.counters["tokens_received"] / WINDOW_S, rel=0.01)
    assert offered == ok == f"{ttft.count / WINDOW_S:.1f}"
    assert float(streams) == pytest.approx(cell.histograms["e2el"].sum / NS_PER_S / WINDOW_S, rel=0.01)


def test_without_a_schedule_nothing_is_offered() -> None:
    shown = report(log_normal(2, MIXED, scheduled=False))
    assert "offered" not in shown[shown.index("windows: ") :]


def test_case_50_an_empty_window_is_a_row_of_dashes_and_a_partial_one_says_how_long_it_was() -> None:
    cells: list[Cells] = [log_normal(3, MIXED, 31).window(index) for index in range(31)]
    cells[10] = {}
    shown = report(recorded(cells, last_s=5))
    rows = table_rows(shown)
    assert rows[10] == ["100", "0", "0", "0", DASH, DASH, DASH, "0.00", "0.00", "0.00", "0.00"]
    assert rows[30][-3:] == ["only", "5.00", "s"]
    assert "30 windows of 10.0 s (left out: 1 partial)" in shown
    sent = sum(cell.counters["sent"] for cell in cells[30].values())
    assert rows[30][9] == f"{sent / 5:.1f}"
    spark_line = next(line for line in shown.splitlines() if line.startswith("TTFT p50"))
    assert spark_line.split()[2][10] == "·"
    token_line = next(line for line in shown.splitlines() if line.startswith("output tok/s"))
    assert token_line.split()[2][10] == "▁"


def test_the_windows_of_a_reason_are_marked() -> None:
    slow = {("short", 12): 3.0}
    rows = table_rows(report(log_normal(4, MIXED, slower=lambda name, window: slow.get((name, window), 1.0))))
    assert [row[0] for row in rows if "spike" in row] == ["120"]


def test_the_warm_up_is_marked() -> None:
    recording = log_normal(5, MIXED)
    recording.steady_ns = 2 * WINDOW_S * NS_PER_S
    shown = report(recording)
    assert ["warm-up" in row for row in table_rows(shown)] == [True, True] + [False] * 28
    assert "stable: 28 windows of 10.0 s (left out: 2 of the warm-up)" in shown


def test_a_percentile_that_its_samples_cannot_carry_is_marked_and_explained() -> None:
    shown = report(log_normal(6, {"one": Traffic(6)}), stability=False, full=True)
    assert all(row[5].endswith("*") for row in table_rows(shown))
    assert shown.count("* max of n") == 2  # of the overview, and of the windows


def test_a_spark_is_as_high_as_its_share_of_the_largest() -> None:
    """From 0, so that a healthy run looks flat."""
    assert spark([0, 1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇██"
    assert spark([6.9, 8, 7.1]) == "▇██"
    assert spark([None, 5, None]) == "·█·"
    assert spark([0, 0]) == "▁▁"
    assert spark([None]) == "·"
    assert spark([]) == ""


def test_a_long_run_has_the_worst_of_neighbours_and_loses_no_spike() -> None:
    """120 windows in 40 marks: latencies have their maximum, rates their minimum."""
    windows = rows(intervals(log_normal(7, {"one": Traffic(60)}, 120, slower=lambda _, window: 3.0 ** (window == 70))))
    windows[80]["output_tokens_per_s"] = 0.0
    lines = sparklines(windows)
    assert lines[0].startswith("windows: a mark per 3 windows, the worst of them")
    marks = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1] for line in lines[1:]}
    assert marks["TTFT p50"].index("█") == 70 // 3
    assert marks["output tok/s"].index("▁") == 80 // 3
    assert {len(spark) for spark in marks.values()} == {40}


def test_many_reasons_are_told_in_part() -> None:
    reason = {"kind": "spike", "scenario": "a", "metric": "ttft", "windows": [1], "text": "a: TTFT spikes"}
    judged = {
        "verdict": "unstable",
        "judged_windows": [1],
        "window_s": 10.0,
        "reasons": [reason] * 25,
        "doubtful": [reason],
        "remarks": [reason],
        "windows": [],
    }
    lines = stability_lines(judged)
    assert lines[0] == "Stability unstable: 1 window of 10.0 s"
    assert [line.strip() for line in lines[-3:]] == [
        "and 15 more",
        "in doubt for that: a: TTFT spikes",
        "remark: a: TTFT spikes",
    ]
    assert stability_lines(None) == []


@pytest.mark.parametrize("large", [1, 10**9, 10**17])
def test_no_line_is_wider_than_a_page_however_large_the_numbers_and_long_the_names(large: int) -> None:
    recording = log_normal(8, {"会話" * 30: Traffic(60), "\x1b[31m" * 20: Traffic(20)}, 40)
    windows = rows(intervals(recording))
    for window in windows:
        for name in ("sent", "failed", "in_flight_mean", "output_tokens_per_s", "offered_per_s", "completed_per_s"):
            window[name] = (window[name] or 1) * large
        window["ttft"]["p95"] *= large
        window["tpot_mean_s"] *= large
    lines = [*sparklines(windows), *window_table(windows, {3: ["throughput", "variation", "failures"]})]
    assert max(map(width_of, lines)) <= COLUMNS
    assert all(line.isprintable() for line in lines)


def test_a_run_without_windows_shows_none() -> None:
    recording = Recording("r1", 0, NS_PER_S)
    judged = Run.of(recording, Meta(stability=True)).summary["stability"]
    assert (judged["verdict"], list(course(recording, judged, full=True))) == ("inconclusive", [])


def test_a_summary_with_a_verdict_has_plain_keys() -> None:
    """Scripts read these names."""
    stability = Run.of(log_normal(9, MIXED), Meta(stability=True)).summary["stability"]
    assert list(stability) == [
        "verdict",
        "judged_windows",
        "window_s",
        "reasons",
        "doubtful",
        "remarks",
        "windows",
    ]
    assert set(stability["windows"][0]) == {
        *("index", "start_s", "length_s", "whole", "steady", "sent", "ok", "failed", "cancelled", "ttft", "scenarios"),
        *("itl", "tpot_mean_s", "output_tokens_per_s", "offered_per_s", "completed_per_s", "in_flight_mean"),
        "silence_s",
    }
    assert Key("short", "chat") in log_normal(9, MIXED).window(0)
