"""What each worker was like: the same whether it is added up at once or while the recording grows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.recording import Gauges, Recording, Report, WindowState
from vllm_locust.workers import Watch, all_seen, seen_in

S = 1_000_000_000

gauges = st.builds(
    Gauges,
    span_ns=st.sampled_from([0, S // 2, S]),
    cpu_ns=st.integers(0, S),
    core_wait_ns=st.none() | st.integers(0, S),
    loop_lag_ns=st.integers(0, S),
    stalled_ns=st.integers(0, S),
    late=st.integers(0, 3),
    plugin_errors=st.integers(0, 3),
    in_flight_peak=st.integers(0, 9),
)


def report(recording: Recording, worker: str, seq: int, *windows: tuple[int, bool, Gauges]) -> None:
    states = [WindowState(index=i, seq=seq, sealed=sealed, gauges=g, cells=[]) for i, sealed, g in windows]
    assert recording.merge(Report(run="r", epoch=0, worker=worker, seq=seq, now_ns=0, windows=states, failures=[]))


@given(st.lists(st.tuples(st.sampled_from(["w1", "w2"]), gauges, gauges), max_size=12))
def test_a_watch_of_a_recording_that_grows_sees_what_all_of_it_adds_up_to(
    steps: list[tuple[str, Gauges, Gauges]],
) -> None:
    recording, watch, at = Recording("r", 0, S), Watch(), {"w1": 0, "w2": 0}
    for seq, (worker, last, new) in enumerate(steps):
        report(recording, worker, seq + 1, (at[worker], True, last), (at[worker] + 1, False, new))
        at[worker] += 1
        assert watch.seen(recording) == all_seen(recording)
    assert watch.seen(Recording("r", 1, S)) == {}
    assert watch.seen(recording) == all_seen(recording)


def figures(*windows: dict[str, Any], window_ns: int = S) -> dict[str, Any]:
    return seen_in([Gauges(**{"span_ns": window_ns, **window}) for window in windows], window_ns).figures()


def test_a_share_is_of_all_the_time_and_the_busiest_window_is_a_whole_one() -> None:
    ten_s = 10 * S
    seen = figures(
        {"cpu_ns": ten_s // 2}, {"cpu_ns": ten_s // 4}, {"span_ns": ten_s // 2, "cpu_ns": ten_s // 2}, window_ns=ten_s
    )
    assert (seen["cpu_share"], seen["cpu_share_max"]) == (0.5, 0.5)
    assert figures({"span_ns": ten_s // 2, "cpu_ns": ten_s // 4}, window_ns=ten_s)["cpu_share_max"] == 0.5
    busy_in_the_end = figures({"cpu_ns": ten_s // 10}, {"span_ns": ten_s // 2, "cpu_ns": ten_s // 2}, window_ns=ten_s)
    assert busy_in_the_end["cpu_share_max"] == busy_in_the_end["cpu_share"] == 0.4  # no mean is above its maximum


@pytest.mark.parametrize(("window_s", "together"), [(1, 9), (2, 5), (3, 3), (10, 1), (60, 1)])
def test_windows_are_judged_together_until_they_are_10_s(window_s: int, together: int) -> None:
    """A second in which all users came is no lack of CPU, and the verdict is the same for windows of any length."""
    whole_ns = window_s * S
    busy, idle = {"cpu_ns": whole_ns}, {"cpu_ns": 0}
    first_busy = [busy, *[idle] * (together - 1)]
    assert figures(*first_busy, *[idle] * 40, window_ns=whole_ns)["cpu_share_max"] == pytest.approx(1 / together)
    busy_on_end = [*[idle] * together, *[busy] * together, *[idle] * 40]
    assert figures(*busy_on_end, window_ns=whole_ns)["cpu_share_max"] == 1


def test_the_longest_stretch_is_left_out_of_the_stalls() -> None:
    assert figures({"loop_lag_ns": S // 2, "stalled_ns": S // 2}, {})["stalled_share"] == 0
    assert figures({"loop_lag_ns": S // 2, "stalled_ns": S // 2}, {"stalled_ns": S // 10})["stalled_share"] == 0.05


def test_what_nobody_told_is_null_and_not_zero() -> None:
    seen = figures({"span_ns": 0})
    assert [seen[name] for name in seen if name.startswith(("cpu_", "core_wait_", "stalled_"))] == [None] * 5
    assert figures({"core_wait_ns": None}, {"core_wait_ns": S // 10})["core_wait_share"] == 0.05
    assert figures({"core_wait_ns": S // 10, "cpu_ns": S // 10}, {"cpu_ns": S // 5})["core_wait_of_need"] == 0.25
    assert figures({"core_wait_ns": 0})["core_wait_of_need"] is None
