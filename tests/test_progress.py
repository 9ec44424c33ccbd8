"""The line that a run shows while it runs."""

from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.progress import line
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire

WINDOW_NS = 10 * NS_PER_S


def recording(*windows: tuple[Cells, bool], silence_s: float = 0) -> Recording:
    """Return what one worker reported: cells by window, and whether it has sealed them."""
    states = [
        WindowState(
            index=index,
            seq=1,
            sealed=sealed,
            gauges=Gauges(silence_last_ns=round(silence_s * NS_PER_S), in_flight_last=4 * (index + 1)),
            cells=to_wire(cells),
        )
        for index, (cells, sealed) in enumerate(windows)
    ]
    result = Recording("run", 0, WINDOW_NS)
    result.merge(Report(run="run", epoch=0, worker="w", seq=1, now_ns=0, windows=states, failures=[]))
    return result


def cells() -> Cells:
    cell = Cell(counters={"sent": 12, "outcome|ok|200": 5, "outcome|http_4xx|404": 2, "outcome|cancelled|200": 1})
    cell.counters["tokens_received"] = 640
    cell.histogram("ttft").add(120_000_000, 5)
    cell.histogram("itl").add(8_000_000, 635)
    return {Key("short", "chat"): cell}


def test_before_a_window_is_closed_the_line_counts() -> None:
    shown = line(recording((cells(), False)), 5 * NS_PER_S, ["w"])
    assert shown == "   5 s  4 streams in flight, 5 ok, 2 failed"


def test_case_31_a_stream_that_is_silent_for_long_is_told_of() -> None:
    shown = line(recording((cells(), True), (cells(), False), silence_s=31.4), 15 * NS_PER_S, ["w"])
    assert shown.startswith("  15 s  8 streams in flight (one silent for 31 s), 10 ok, 4 failed")
    assert "silent" not in line(recording((cells(), False), silence_s=1), 5 * NS_PER_S, ["w"])


def test_the_streams_of_a_lost_worker_are_gone() -> None:
    assert "  0 streams in flight, 5 ok" in line(recording((cells(), False)), 5 * NS_PER_S, [])


def test_what_is_due_and_waits_is_told_of_where_there_is_any() -> None:
    due = cells()
    due[Key("short", "chat")].counters["scheduled"] = 15
    assert line(recording((due, False)), 5 * NS_PER_S, ["w"]).endswith("2 failed, 3 due and not sent")


def test_then_it_tells_of_the_last_closed_window() -> None:
    shown = line(recording((cells(), True), ({}, False)), 12 * NS_PER_S, ["w"])
    assert shown.endswith("; last window: TTFT p95 120 ms, ITL p99 8.00 ms, 64.0 tok/s")


def test_a_window_in_which_nothing_came_has_no_latencies() -> None:
    shown = line(recording((cells(), True), ({}, True)), 22 * NS_PER_S, ["w"])
    assert shown.endswith("; last window: TTFT p95 –, ITL p99 –, 0.00 tok/s")
