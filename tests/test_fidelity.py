"""Whether the server or the generator was measured: each criterion, its option, what is said of it."""

from typing import Any

import pytest

from vllm_locust import fidelity
from vllm_locust.cell import Cell, Key
from vllm_locust.fidelity import DEFAULTS, FLAGS, UNCERTAIN_SHARE, Limits, faults, line, misses, percent
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.summary import Meta, fidelity_of, summary
from vllm_locust.workers import all_seen

MS = 1_000_000
WINDOW_NS = 10 * NS_PER_S


def recorded(cell: Cell, *workers: list[dict[str, int]]) -> Recording:
    """Return a recording in which all came to the first worker; each has gauges for windows of 10 s."""
    recording = Recording("r", 0, WINDOW_NS)
    for number, windows in enumerate(workers or ([{}],)):
        states = [
            WindowState(
                index=index,
                seq=1,
                sealed=True,
                gauges=Gauges(**{"span_ns": WINDOW_NS, "core_wait_ns": 0, **gauges}),
                cells=[] if number or index else to_wire({Key("short", "chat"): cell}),
            )
            for index, gauges in enumerate(windows)
        ]
        name = f"w{number + 1}"
        assert recording.merge(Report(run="r", epoch=0, worker=name, seq=1, now_ns=0, windows=states, failures=[]))
    return recording


def seen(cell: Cell, *workers: list[dict[str, int]], limits: Limits = DEFAULTS) -> dict[str, Any]:
    recording = recorded(cell, *workers)
    return fidelity_of(recording, limits, all_seen(recording))


def streamed(*, uncertainty_ns: int = 0, gap_ns: int = 50 * MS, uncertain: int = 0) -> Cell:
    """Return a cell of 1000 token events, some of which came at an uncertain time."""
    cell = Cell()
    cell.histogram("ttft").add(300 * MS)
    cell.histogram("itl").add(gap_ns, 999)
    cell.histogram("read_lag").add(200_000, 1000)
    cell.histogram("uncertainty").add(0, 1000 - uncertain)
    cell.histogram("uncertainty").add(uncertainty_ns, uncertain)
    cell.counters = {"stamped": 990, "unstamped": 10, "token_events": 1000, "tokens_received": 1000}
    return cell


def found(cell: Cell | None = None, *workers: list[dict[str, int]], limits: Limits = DEFAULTS) -> list[tuple[str, str]]:
    cell = cell or streamed()
    return [(fault.limit, fault.text) for fault in faults(seen(cell, *workers, limits=limits), limits)]


def test_the_server_was_measured_where_the_generator_kept_up() -> None:
    """The line gives the evidence, not only the verdict."""
    gauges = {"loop_lag_ns": 14 * MS, "cpu_ns": 4_100 * MS, "core_wait_ns": 80 * MS}
    assert line(seen(streamed(), [gauges]), DEFAULTS) == (
        "measured the server: 99.0 % of token times stamped by the kernel, read lag p99 200 µs, "
        "loop away up to 14.0 ms, CPU up to 41 %, waited for a core for 0.8 %"
    )


def test_case_40_a_loop_that_is_away_while_tokens_arrive_limits_the_run() -> None:
    """Issue llm-d/llm-d-benchmark#261: a greenlet that blocks for 200 ms looked like a slow server."""
    gauges = {"loop_lag_ns": 212 * MS, "stalled_ns": 10 * 205 * MS}
    assert line(seen(streamed(uncertainty_ns=200 * MS, uncertain=31), [gauges]), DEFAULTS) == (
        "limited by the generator: w1 was away for up to 212 ms, 3.1 % of token times uncertain by more than 5 % of "
        "the median gap (50.0 ms), the event loop of w1 stalled for 18 % of the time; "
        "something blocks its event loop: a task or a listener that computes, or waits outside gevent"
    )


# Uncertainty


@pytest.mark.parametrize(("uncertainty_ms", "gap_ms", "limited"), [(2, 50, False), (3, 50, True), (3, 100, False)])
def test_uncertainty_is_held_against_the_gaps_that_were_measured(
    uncertainty_ms: int, gap_ms: int, *, limited: bool
) -> None:
    """5 % of the median gap."""
    cell = streamed(uncertainty_ns=uncertainty_ms * MS, gap_ns=gap_ms * MS, uncertain=50)
    assert [name for name, _ in found(cell)] == ["uncertainty"] * limited


@pytest.mark.parametrize(("uncertain", "limited"), [(10, False), (11, True)])
def test_one_uncertain_event_in_a_hundred_does_not_limit_a_run_and_more_do(uncertain: int, *, limited: bool) -> None:
    assert bool(found(streamed(uncertainty_ns=200 * MS, uncertain=uncertain))) is limited
    assert UNCERTAIN_SHARE == 0.01


def test_uncertainty_alone_asks_for_more_workers() -> None:
    """A loop that is busy in short stretches has too much to do."""
    one = line(seen(streamed(uncertainty_ns=20 * MS, uncertain=50), [{}]), DEFAULTS)
    assert one.endswith("; add workers (`--processes 2`) or lower the load")
    two = line(seen(streamed(uncertainty_ns=20 * MS, uncertain=50), [{}], [{}]), DEFAULTS)
    assert two.endswith("; add workers or lower the load")


def test_where_most_gaps_are_zero_the_mean_gap_is_the_measure_and_without_gaps_the_first_token() -> None:
    """A median of zero would make any uncertainty too much."""
    cell = streamed(uncertainty_ns=MS, gap_ns=0, uncertain=50)
    cell.histogram("itl").add(100_000 * MS)
    assert found(cell) == []
    cell = streamed(uncertainty_ns=20 * MS, uncertain=50)
    del cell.histograms["itl"]
    assert "median TTFT (300 ms)" in found(cell)[0][1]


# CPU


def test_a_worker_without_cpu_to_spare_limits_the_run() -> None:
    """Worst window, not the mean: queues grow as long as it lasts."""
    busy, idle = {"cpu_ns": 9_700 * MS}, {"cpu_ns": 1_000 * MS}
    assert found(None, [idle], [idle, busy]) == [("cpu", "w2 used up to 97 % of a core")]
    assert found(None, [{"cpu_ns": 9_000 * MS}]) == []
    assert line(seen(streamed(), [busy]), DEFAULTS).endswith("; add workers (`--processes 2`) or lower the load")


def test_the_worst_worker_is_named_and_the_others_are_counted() -> None:
    workers = [[{"cpu_ns": cpu_ms * MS}] for cpu_ms in (9_100, 9_900, 5_000, 9_500)]
    assert found(None, *workers) == [("cpu", "w2 (and 2 more) used up to 99 % of a core")]


def test_a_window_that_has_hardly_begun_is_judged_only_if_there_is_no_other() -> None:
    """A partial last window stays out of the verdict."""
    partial = {"span_ns": 2_000 * MS, "cpu_ns": 1_990 * MS}
    assert found(None, [{"cpu_ns": 1_000 * MS}, partial]) == []
    assert found(None, [partial]) == [("cpu", "w1 used up to 100 % of a core")]


# Wait for a core


def test_a_worker_whose_core_another_process_has_limits_the_run() -> None:
    workers = [{"core_wait_ns": 600 * MS, "cpu_ns": 900 * MS}, {"core_wait_ns": 20 * MS, "cpu_ns": 600 * MS}]
    ((limit, text),) = found(None, workers)
    assert (limit, text) == ("core_wait", "w1 waited for a core for 29 % of the time that it needed one")
    assert line(seen(streamed(), workers), DEFAULTS).endswith(
        "; something else runs on its core: give the generator a core or a machine of its own"
    )


@pytest.mark.parametrize(
    ("wait_ms", "cpu_ms", "limited"),
    [
        (1_000, 4_000, False),  # exactly a fifth
        (1_001, 4_000, True),
        (40, 10, False),  # it needs next to no core
        (60, 20, True),
        (300, 7_000, False),
    ],
)
def test_a_wait_is_held_against_the_time_for_which_a_core_was_needed(
    wait_ms: int, cpu_ms: int, *, limited: bool
) -> None:
    """So a neighbour on the core is seen at any load."""
    gauges = [{"core_wait_ns": wait_ms * MS, "cpu_ns": cpu_ms * MS}]
    assert [name for name, _ in found(None, gauges)] == ["core_wait"] * limited


def test_where_the_system_does_not_tell_the_criterion_is_silent_and_that_is_said() -> None:
    recording = recorded(streamed(), [{}])
    recording.gauges["w1", 0].core_wait_ns = None
    told = fidelity_of(recording, DEFAULTS, all_seen(recording))
    assert faults(told, DEFAULTS) == []
    assert line(told, DEFAULTS).endswith(", wait for a core unknown here")
    assert misses(told, DEFAULTS) == []
    given = Limits(core_wait=0.2, given=("core_wait",))
    assert misses(told, given) == ["--max-core-wait: nobody knows how long w1 waited for a core"]


# Stalls


@pytest.mark.parametrize(
    ("windows", "stalled"),
    [
        ([{"loop_lag_ns": 500 * MS, "stalled_ns": 500 * MS}], False),  # the machine stalled once
        ([{"loop_lag_ns": 500 * MS, "stalled_ns": 500 * MS}, *[{}] * 5], False),
        ([{"loop_lag_ns": 500 * MS, "stalled_ns": 590 * MS}], False),  # and once more, briefly
        ([{"loop_lag_ns": 500 * MS, "stalled_ns": 610 * MS}], True),
        ([{"loop_lag_ns": 60 * MS, "stalled_ns": 120 * MS}, {"loop_lag_ns": 60 * MS, "stalled_ns": 240 * MS}], True),
        ([{"loop_lag_ns": 49 * MS, "stalled_ns": 0}], False),
    ],
)
def test_a_loop_that_stalls_again_and_again_limits_the_run_and_once_is_no_habit(
    windows: list[dict[str, int]], *, stalled: bool
) -> None:
    assert [name for name, _ in found(None, windows)] == ["stalled"] * stalled


# Causes and remedies


def test_what_comes_of_another_cause_has_no_remedy_of_its_own() -> None:
    """A process that has no core stalls, and its token times are uncertain."""
    cell = streamed(uncertainty_ns=20 * MS, uncertain=50)
    stalls = {"loop_lag_ns": 200 * MS, "stalled_ns": 4_000 * MS}
    waits = line(seen(cell, [{**stalls, "core_wait_ns": 5_000 * MS, "cpu_ns": 4_000 * MS}]), DEFAULTS)
    assert waits.split("; ")[1:] == [fidelity._CORE]
    busy = line(seen(cell, [{**stalls, "cpu_ns": 9_900 * MS}]), DEFAULTS)
    assert busy.split("; ")[1:] == ["add workers (`--processes 2`) or lower the load"]
    both = line(seen(cell, [{"core_wait_ns": 5_000 * MS, "cpu_ns": 9_900 * MS}]), DEFAULTS)
    assert both.split("; ")[1:] == [fidelity._CORE, "add workers (`--processes 2`) or lower the load"]


def test_a_loop_that_stalls_for_longer_than_it_waits_for_a_core_is_blocked_all_the_same() -> None:
    gauges = {"loop_lag_ns": 200 * MS, "stalled_ns": 2_200 * MS, "core_wait_ns": 900 * MS, "cpu_ns": 2_000 * MS}
    assert line(seen(streamed(), [gauges]), DEFAULTS).split("; ")[1:] == [fidelity._CORE, fidelity._BLOCKED]


def test_case_33_what_was_gathered_on_the_way_is_not_the_generators_fault() -> None:
    """A proxy that buffers hides gaps; their absence says nothing against the generator."""
    cell = streamed()
    del cell.histograms["itl"]
    cell.counters["coalesced"] = 25
    assert line(seen(cell), DEFAULTS).startswith("measured the server: ")


# Limits


@pytest.mark.parametrize(
    ("limits", "faulty"),
    [
        (Limits(uncertainty=0.5), {"cpu", "core_wait", "stalled"}),
        (Limits(cpu=1), {"uncertainty", "core_wait", "stalled"}),
        (Limits(core_wait=0.6), {"uncertainty", "cpu", "stalled"}),
        (Limits(stalled=0.5), {"uncertainty", "cpu", "core_wait"}),
    ],
)
def test_each_limit_can_be_set(limits: Limits, faulty: set[str]) -> None:
    gauges = {"cpu_ns": 9_900 * MS, "core_wait_ns": 5_000 * MS, "loop_lag_ns": 200 * MS, "stalled_ns": 4_000 * MS}
    cell = streamed(uncertainty_ns=20 * MS, uncertain=50)
    assert {name for name, _ in found(cell, [gauges])} == set(FLAGS)
    assert {name for name, _ in found(cell, [gauges], limits=limits)} == faulty


def test_only_a_limit_that_was_set_is_missed() -> None:
    gauges = [{"cpu_ns": 9_700 * MS, "core_wait_ns": 5_000 * MS}]
    given = Limits(cpu=0.925, given=("cpu",))
    assert misses(seen(streamed(), gauges), DEFAULTS) == []
    assert misses(seen(streamed(), gauges), given) == [
        "w1 used up to 97 % of a core (the limit is --max-generator-cpu 92.5%)"
    ]
    assert misses(seen(streamed(), [{}]), given) == []
    assert misses(seen(Cell(), gauges), given) == []  # no token, nothing to judge


def test_the_limits_of_a_run_are_those_that_its_numbers_are_judged_by() -> None:
    recording = recorded(streamed(uncertainty_ns=2 * MS, uncertain=50))
    for share, uncertain in ((0.05, 0), (0.03, 0.05)):
        numbers = summary(recording, Meta(generator_limits=Limits(uncertainty=share)))
        assert numbers["fidelity"]["uncertain_share"] == uncertain


# Words


def test_without_a_token_there_is_nothing_to_judge() -> None:
    """No claim without evidence, however the run failed."""
    assert line(seen(Cell(), [{"cpu_ns": 9_900 * MS}]), DEFAULTS) == "nothing to judge: no token arrived"


def test_evidence_that_is_absent_is_not_made_up() -> None:
    """A recording without gauges and lags still gets its line."""
    told = seen(Cell(counters={"token_events": 1}))
    told["workers"] = {}
    assert line(told, DEFAULTS) == "measured the server: no sign of a busy generator"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0006, "< 0.1 %"), (0.008, "0.8 %"), (0.05, "5 %"), (0.031, "3.1 %"), (0.119, "12 %"), (1, "100 %")],
)
def test_shares_have_two_digits(share: float, text: str) -> None:
    assert percent(share) == text
