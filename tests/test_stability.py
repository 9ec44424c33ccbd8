"""Stable, unstable, inconclusive: how often the verdict is wrong, and what it says of runs made up for it."""

from typing import Any

import pytest
from windowed import WINDOW_S, Change, Traffic, log_normal, recorded, steadily

from vllm_locust import spikes, stability
from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.errors import ExitCode
from vllm_locust.evidence import Evidence
from vllm_locust.intervals import intervals
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording
from vllm_locust.summary import Meta, summary
from vllm_locust.verdict import findings

MIXED = {"short": Traffic(60), "long": Traffic(20, ttft_s=0.3, tokens=300, input_tokens=3000)}
ONE = {"short": Traffic(60)}


def judged(recording: Recording, **doubts: Any) -> dict[str, Any]:
    return stability.judge(recording, **{"missing": [], "early": False, "faulty": False, **doubts})


def kinds(verdict: dict[str, Any], part: str = "reasons") -> set[str]:
    return {reason["kind"] for reason in verdict[part]}


def cells_of(recording: Recording) -> list[Cells]:
    return [recording.window(index) for index in range(recording.window_count)]


# How often it is wrong


def share_of(seeds: range, kind: str | None, traffic: dict[str, Traffic], slower: Change = steadily) -> float:
    """Return the share of runs in which there is a reason (of a kind)."""
    verdicts = (judged(log_normal(seed, traffic, slower=slower)) for seed in seeds)
    return sum(any(kind in (None, r["kind"]) for r in v["reasons"]) for v in verdicts) / len(seeds)


def tripled(_scenario: str, window: int) -> float:
    return 3.0 if window == 17 else 1.0


def drifting(_scenario: str, window: int) -> float:
    return 1 + 0.5 * window / 29


NEEDED = 13
"""Requests of a window, of a single scenario, with which a spike can be shown."""


def test_the_rates_of_all_rules_add_up_to_less_than_one_in_a_hundred() -> None:
    assert stability.FALSE_ALARM <= 0.01
    evidence = Evidence()
    for window in intervals(log_normal(0, ONE)):
        evidence.add(window)
    assert spikes.needed(spikes.allowed_of_one(evidence)) == NEEDED


@pytest.mark.parametrize("traffic", [MIXED, {"few": Traffic(20)}, {"many": Traffic(300)}], ids=["mixed", "few", "many"])
def test_no_healthy_run_of_thirty_is_called_unstable(traffic: dict[str, Traffic]) -> None:
    """Poisson numbers of log-normal requests; a false alarm in a hundred would show with 60 % of choices of seeds."""
    assert share_of(range(30), None, traffic) == 0


@pytest.mark.long
@pytest.mark.parametrize(("size", "sigma"), [(20, 0.5), (60, 0.2), (60, 1.0), (500, 0.5)])
def test_false_alarms_are_one_in_a_hundred_at_most(size: int, sigma: float) -> None:
    """Of 1,000 healthy runs of two scenarios, 18 false alarms would be too many by chance once in a hundred times."""
    traffic = {"short": Traffic(size, sigma=sigma), "long": Traffic(20, ttft_s=0.3, tokens=300, sigma=sigma)}
    assert share_of(range(1000), None, traffic) <= 0.018


@pytest.mark.parametrize("size", [20, 60])
def test_a_window_that_takes_three_times_as_long_is_found(size: int) -> None:
    """One of thirty, whatever else is found."""
    assert share_of(range(40), "spike", {"short": Traffic(size)}, tripled) >= 0.9


@pytest.mark.parametrize("size", [20, 60])
def test_a_rise_by_half_over_the_run_is_found(size: int) -> None:
    assert share_of(range(40), "drift", {"short": Traffic(size)}, drifting) >= 0.9


@pytest.mark.long
@pytest.mark.parametrize(("kind", "slower"), [("spike", tripled), ("drift", drifting)])
def test_what_is_promised_of_power_holds_with_the_fewest_requests(kind: str, slower: Change) -> None:
    """In 400 runs with as few requests in a window as are accepted: of 18 in the mean, a tenth are fewer than 13."""
    assert share_of(range(400), kind, {"short": Traffic(18)}, slower) >= stability.POWER


# Runs made up for it

WAITING = {"in_flight_ns": 10 * WINDOW_S * NS_PER_S}
"""Of ten users, for a window."""


def test_a_flat_run_is_stable() -> None:
    verdict = judged(log_normal(1, MIXED))
    assert (verdict["verdict"], verdict["reasons"], verdict["doubtful"]) == ("stable", [], [])
    assert verdict["judged_windows"] == list(range(30))


def test_a_spike_is_named_with_its_scenario_window_and_numbers() -> None:
    """Only of the scenario that has it; the other one is none of its reasons."""
    slower = {("long", 17): 3.0}
    verdict = judged(log_normal(1, MIXED, slower=lambda name, window: slower.get((name, window), 1.0)))
    assert verdict["verdict"] == "unstable"
    assert {reason["scenario"] for reason in verdict["reasons"]} == {"long"}
    spike = next(r for r in verdict["reasons"] if (r["kind"], r["metric"]) == ("spike", "ttft"))
    assert spike["windows"] == [17]
    above, number = (int(word) for word in spike["text"].split(": ")[2].split()[:3:2])
    assert number == log_normal(1, MIXED).window(17)[Key("long", "chat")].histograms["ttft"].count
    assert 10 <= above <= number
    assert spike["text"].startswith("long: TTFT spikes at 170 to 180 s: ")
    assert "drift" not in kinds(verdict)


def test_a_drift_is_no_spike() -> None:
    verdict = judged(log_normal(2, ONE, slower=drifting))
    assert {(r["kind"], r["metric"]) for r in verdict["reasons"]} >= {("drift", "ttft"), ("drift", "tpot")}
    assert "spike" not in kinds(verdict)
    drift = next(r for r in verdict["reasons"] if r["metric"] == "ttft")
    assert "rose from" in drift["text"]


def test_one_bad_window_at_the_end_is_no_drift() -> None:
    """Ten times as slow, where a straight line would bend most."""
    for seed in range(20):
        verdict = judged(log_normal(seed, ONE, slower=lambda _, window: 10.0 if window == 29 else 1.0))
        assert "spike" in kinds(verdict)
        assert "drift" not in kinds(verdict)


def test_a_run_that_becomes_faster_is_stable_and_says_so() -> None:
    verdict = judged(log_normal(2, ONE, slower=lambda _, window: 1.5 - 0.5 * window / 29))
    assert verdict["verdict"] == "stable"
    assert "fell from" in next(r["text"] for r in verdict["remarks"] if r["metric"] == "ttft")


def test_a_change_too_small_to_matter_is_none_however_sure() -> None:
    """Of 2,000 requests in a window, 3 % more over the run are no chance."""
    verdict = judged(log_normal(3, {"short": Traffic(2000)}, slower=lambda _, window: 1 + 0.03 * window / 29))
    assert verdict["verdict"] == "stable"


def test_a_server_that_saturates_has_a_backlog() -> None:
    """Six requests a second are due, five end."""
    cells = cells_of(log_normal(4, ONE))
    for of_window in cells:
        (cell,) = of_window.values()
        cell.counters["outcome|ok|200"] -= 10
    verdict = judged(recorded(cells))
    assert verdict["verdict"] == "unstable"
    (backlog,) = [reason for reason in verdict["reasons"] if reason["kind"] == "backlog"]
    assert "were offered" in backlog["text"]


def test_arrivals_that_were_dropped_are_a_backlog() -> None:
    cells = cells_of(log_normal(4, ONE))
    for of_window in cells:
        (cell,) = of_window.values()
        cell.counters |= {"dropped": 2, "scheduled": cell.counters["scheduled"] + 2}
    (reason,) = judged(recorded(cells))["reasons"]
    assert reason["text"].startswith("3.")
    assert "of the arrivals were dropped" in reason["text"]


def falling(_scenario: str, window: int) -> float:
    return 1 - 0.5 * window / 29


def test_a_throughput_that_falls_while_as_many_users_ask_is_unstable() -> None:
    """A closed loop: fewer requests are sent since fewer end."""
    verdict = judged(log_normal(5, ONE, busier=falling, scheduled=False))
    assert kinds(verdict) == {"throughput"}
    assert {reason["metric"] for reason in verdict["reasons"]} == {"tokens", "requests"}


def test_a_throughput_that_falls_as_the_offer_does_is_no_sign() -> None:
    assert judged(log_normal(5, ONE, busier=falling))["verdict"] == "stable"


def test_case_43_a_closed_loop_hides_a_stall_in_percentiles_and_not_in_the_verdict() -> None:
    """Ten users wait for 15 s: ten slow requests of 1,800 move no p95, but one window has no token at all."""
    cells = cells_of(log_normal(6, ONE, scheduled=False))
    cells[10] = {}
    for metric in ("ttft", "itl_max", "e2el"):
        cells[11][Key("short", "chat")].histogram(metric).add(15 * NS_PER_S, 10)
    verdict = judged(recorded(cells, gauges={10: WAITING}))
    assert kinds(verdict) == {"silence", "spike"}
    assert verdict["reasons"][0]["windows"] == [10]
    assert verdict["reasons"][0]["text"].startswith("no token came at 100 to 110 s")
    assert {tuple(r["windows"]) for r in verdict["reasons"][1:]} == {(11,)}


def test_a_window_in_which_a_stall_begins_is_a_silence_though_some_tokens_came_before() -> None:
    cells = cells_of(log_normal(6, ONE, scheduled=False))
    cells[10] = {Key("short", "chat"): Cell(counters={"tokens_received": 60})}
    verdict = judged(recorded(cells, gauges={10: WAITING}))
    assert verdict["reasons"][0]["text"] == "hardly a token came at 100 to 110 s, while streams were in flight"


def test_a_window_without_requests_is_no_silence() -> None:
    """Nobody asked, nobody answered."""
    cells = cells_of(log_normal(6, ONE, scheduled=False))
    cells[10] = {}
    verdict = judged(recorded(cells))
    assert verdict["verdict"] == "stable"
    assert verdict["windows"][10]["output_tokens_per_s"] == 0


def test_a_stream_that_came_to_nothing_is_a_silence() -> None:
    """It has no sample until it ends: the gauge alone tells."""
    quiet = {index: {"silence_last_ns": (index - 19) * 10 * NS_PER_S} for index in range(20, 30)}
    verdict = judged(recorded(cells_of(log_normal(7, ONE)), gauges=quiet))
    (reason,) = verdict["reasons"]
    assert (reason["kind"], verdict["verdict"]) == ("silence", "unstable")
    assert reason["text"].startswith("a stream sent nothing for 100 s")


def test_failures_that_come_together_are_unstable_however_few_they_are() -> None:
    """Eight of 1,800 are less than 1 %, but they are in one window."""
    cells = cells_of(log_normal(8, ONE))
    cells[5][Key("short", "chat")].counters["outcome|http_5xx|503"] = 8
    (reason,) = judged(recorded(cells))["reasons"]
    assert (reason["kind"], reason["scenario"], reason["windows"]) == ("failures", "short", [5])
    assert "failed together at 50 to 60 s: 8 of " in reason["text"]


def test_failures_here_and_there_are_stable_up_to_one_in_a_hundred() -> None:
    """One in every second window is 0.8 %, one in each 1.6 %."""
    for every, verdict in ((2, "stable"), (1, "unstable")):
        cells = cells_of(log_normal(8, ONE))
        for of_window in cells[::every]:
            of_window[Key("short", "chat")].counters["outcome|http_429|429"] = 1
        assert judged(recorded(cells))["verdict"] == verdict


def test_where_a_limit_speaks_of_failures_it_has_the_say_but_not_of_those_that_come_together() -> None:
    """Three in each window are 5 %; ten in one are an incident, whatever the limit."""
    cells = cells_of(log_normal(8, ONE))
    for of_window in cells:
        of_window[Key("short", "chat")].counters["outcome|http_429|429"] = 3
    recording = recorded(cells)
    verdicts = {
        limit: summary(recording, Meta(stability=True, limits=[limit]))["stability"]["verdict"]
        for limit in ("failures < 10%", "ttft p95 < 10s", "short: failures < 10%")
    }
    assert list(verdicts.values()) == ["stable", "unstable", "unstable"]
    cells[5][Key("short", "chat")].counters["outcome|http_429|429"] = 25
    assert judged(recorded(cells), limited=True)["reasons"][0]["windows"] == [5]


def test_a_tpot_that_varies_from_window_to_window_is_unstable() -> None:
    """Every third window is twice as slow, in which no request is unusual."""
    verdict = judged(log_normal(9, ONE, slower=lambda _, window: 1.0 + (window % 3 == 0)))
    (reason,) = [reason for reason in verdict["reasons"] if reason["kind"] == "variation"]
    assert reason["windows"] == list(range(3, 30, 3))  # the first is left out: slow requests cannot have ended


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_the_noise_of_few_requests_is_no_variation(sigma: float) -> None:
    """Means of five log-normal times scatter by half; that is chance."""
    for seed in range(20):
        assert "variation" not in kinds(judged(log_normal(seed, {"short": Traffic(5, sigma=sigma)})))


# What is in doubt


def test_a_sparse_run_is_inconclusive_and_says_what_is_needed() -> None:
    verdict = judged(log_normal(10, {"short": Traffic(2)}))
    (reason,) = verdict["reasons"]
    assert (verdict["verdict"], reason["kind"], reason["scenario"]) == ("inconclusive", "sparse", "short")
    assert f"nine of ten windows have to have {NEEDED} requests to show a spike, 3 taken together" in reason["text"]


def test_a_scenario_with_few_requests_is_judged_by_several_windows_at_a_time() -> None:
    """Eight in a window: three windows together are enough, and a slow half minute shows."""
    few = {"short": Traffic(8)}
    assert judged(log_normal(11, few))["verdict"] == "stable"
    verdict = judged(log_normal(11, few, slower=lambda _, window: 3.0 if 12 <= window < 15 else 1.0))
    assert {12, 13, 14} <= {w for r in verdict["reasons"] if r["kind"] == "spike" for w in r["windows"]}


def test_a_rare_scenario_does_not_keep_the_others_from_being_judged() -> None:
    verdict = judged(log_normal(12, MIXED | {"rare": Traffic(1)}))
    assert verdict["verdict"] == "stable"
    assert [remark["scenario"] for remark in verdict["remarks"] if remark["kind"] == "rare"] == ["rare"]


def test_fewer_than_ten_windows_are_inconclusive_and_ten_are_not() -> None:
    short, enough = (judged(log_normal(13, ONE, windows)) for windows in (9, 10))
    assert (short["verdict"], kinds(short)) == ("inconclusive", {"short"})
    assert enough["verdict"] == "stable"


def test_a_run_without_requests_is_inconclusive() -> None:
    assert judged(recorded([{} for _ in range(30)]))["verdict"] == "inconclusive"
    assert judged(Recording("r1", 0, NS_PER_S))["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("doubt", "kind", "verdict"),
    [
        ({"early": True}, "early", "unstable"),
        ({"missing": ["w2"]}, "workers", "unstable"),
        ({"faulty": True}, "generator", "inconclusive"),
    ],
)
def test_a_spike_is_what_it_is_unless_the_generator_made_it(doubt: dict[str, Any], kind: str, verdict: str) -> None:
    """Unstable beats inconclusive where what was seen does not hang on what is in doubt."""
    spiky = judged(log_normal(14, ONE, slower=tripled), **doubt)
    assert (spiky["verdict"], kind in kinds(spiky)) == (verdict, True)
    assert ("spike" in kinds(spiky, "doubtful")) == (verdict == "inconclusive")
    flat = judged(log_normal(14, ONE), **doubt)
    assert (flat["verdict"], kinds(flat)) == ("inconclusive", {kind})


def test_a_silence_is_the_servers_unless_the_generator_did_not_read() -> None:
    """Ten seconds without a token do not come from a busy core; they may from a loop that was away for as long."""
    cells = cells_of(log_normal(6, ONE, scheduled=False))
    cells[10] = {}
    for away_s, verdict in ((0.2, "unstable"), (9, "inconclusive")):
        seen = {10: WAITING | {"loop_lag_ns": int(away_s * NS_PER_S)}}
        assert judged(recorded(cells, gauges=seen), faulty=True)["verdict"] == verdict


def test_a_lost_worker_explains_a_throughput_that_fell() -> None:
    """Its share of the load is gone; what the server did with the rest is not told by rates."""
    recording = log_normal(15, ONE, busier=lambda _, window: 1.0 if window < 15 else 0.5, scheduled=False)
    for index in range(30):
        recording.gauges["w2", index] = Gauges(span_ns=WINDOW_S * NS_PER_S if index < 15 else 0)
    verdict = judged(recording)
    assert (verdict["verdict"], kinds(verdict), kinds(verdict, "doubtful")) == (
        "inconclusive",
        {"workers"},
        {"throughput"},
    )
    assert verdict["reasons"][0]["text"] == "w2 took part in 15 of 30 windows"


def test_stages_change_the_load_so_no_change_is_the_servers() -> None:
    cells = cells_of(log_normal(16, ONE, slower=lambda _, window: 1.0 if window < 15 else 2.0))
    staged: list[Cells] = [
        {key._replace(stage=index // 15): cell for key, cell in of_window.items()}
        for index, of_window in enumerate(cells)
    ]
    verdict = judged(recorded(staged))
    assert (verdict["verdict"], kinds(verdict)) == ("inconclusive", {"load"})


def test_users_that_come_and_go_change_the_load_of_a_closed_loop_alone() -> None:
    more = {index: {"users_last": 20} for index in range(15, 30)}
    closed = judged(recorded(cells_of(log_normal(16, ONE, scheduled=False)), gauges=more))
    assert (closed["verdict"], kinds(closed)) == ("inconclusive", {"load"})
    assert closed["reasons"][0]["text"] == "there were 10 to 20 users: a constant load is judged"
    assert judged(recorded(cells_of(log_normal(16, ONE)), gauges=more))["verdict"] == "stable"


# Windows


def test_case_50_a_partial_window_is_shown_and_not_judged_and_an_empty_one_is_there() -> None:
    """305 s, silent from 100 s to 110 s: windows 0 to 29 are judged, the one of 5 s has its own length."""
    cells = cells_of(log_normal(17, ONE, 31))
    cells[10] = {}
    verdict = judged(recorded(cells, last_s=5, gauges={10: WAITING}))
    windows = verdict["windows"]
    assert verdict["judged_windows"] == list(range(30))
    assert [window["whole"] for window in windows] == [True] * 30 + [False]
    assert windows[10]["output_tokens_per_s"] == 0
    assert windows[10]["ttft"] == {"count": 0, "p50": None, "p95": None}
    last = cells[30][Key("short", "chat")].counters
    assert windows[30]["length_s"] == 5
    assert windows[30]["output_tokens_per_s"] == last["tokens_received"] / 5
    assert windows[30]["completed_per_s"] == last["outcome|ok|200"] / 5
    assert kinds(verdict) == {"silence"}


def test_a_spike_in_a_partial_window_is_none() -> None:
    recording = log_normal(18, ONE, 31, slower=lambda _, window: 5.0 if window == 30 else 1.0)
    assert judged(recorded(cells_of(recording), last_s=8))["verdict"] == "stable"
    assert judged(recorded(cells_of(recording), last_s=9))["verdict"] == "unstable"


def test_the_warm_up_is_left_out() -> None:
    """What was slow then is no spike."""
    cells = cells_of(log_normal(19, ONE, slower=lambda _, window: 9.0 if window < 3 else 1.0))
    cells[:3] = [{key._replace(phase="warmup"): cell for key, cell in each.items()} for each in cells[:3]]
    recording = recorded(cells)
    recording.steady_ns = 3 * WINDOW_S * NS_PER_S
    verdict = judged(recording)
    assert verdict["verdict"] == "stable"
    assert verdict["judged_windows"] == list(range(3, 30))
    assert [window["steady"] for window in verdict["windows"][:4]] == [False, False, False, True]


def test_windows_into_which_no_slow_request_can_have_come_are_no_drift() -> None:
    """Requests of up to 40 s: in the first windows only short ones have ended."""
    traffic = {"long": Traffic(40, ttft_s=0.1, tpot_s=0.1, tokens=200)}
    for seed in range(10):
        cells = cells_of(log_normal(seed, traffic, slower=lambda _, window: min(1.0, 0.25 * (window + 1))))
        assert "drift" not in kinds(judged(recorded(cells)))


# Scenarios beside each other


def test_short_requests_that_wait_while_long_prompts_are_read_are_a_remark() -> None:
    """From window to window there are up to three times as many, and short requests wait for up to twice as long."""
    busy = {window: 1.0 + window * 7 % 10 / 5 for window in range(30)}
    recording = log_normal(
        20,
        MIXED,
        busier=lambda name, window: busy[window] if name == "long" else 1.0,
        slower=lambda name, window: (1 + busy[window]) / 2 if name == "short" else 1.0,
    )
    (remark,) = judged(recording)["remarks"]
    assert (remark["kind"], remark["scenario"]) == ("interplay", "short")
    assert remark["text"].startswith("TTFT of short is longer in windows with more prompts of long")
    assert judged(log_normal(20, MIXED))["remarks"] == []


# In a run


def test_only_a_run_that_asks_for_it_is_judged() -> None:
    recording = log_normal(21, ONE)
    assert "stability" not in summary(recording, Meta())
    assert summary(recording, Meta(stability=True))["stability"]["verdict"] == "stable"


@pytest.mark.parametrize(
    ("recording", "code", "text"),
    [
        (log_normal(22, ONE), None, ""),
        (log_normal(22, ONE, slower=drifting), ExitCode.MISSED, "unstable: short: TTFT rose from"),
        (log_normal(22, ONE, 5), ExitCode.NOT_JUDGED, "inconclusive: 5 whole windows after the warm-up"),
    ],
    ids=["stable", "unstable", "inconclusive"],
)
def test_the_verdict_is_a_finding_with_its_exit_code(recording: Recording, code: ExitCode | None, text: str) -> None:
    meta = Meta(stability=True)
    found = findings(summary(recording, meta), meta)
    assert [finding.exit_code for finding in found] == ([] if code is None else [code])
    assert all(finding.subject == "stability" and finding.text.startswith(text) for finding in found)
