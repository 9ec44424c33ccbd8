"""Limits are judged by what was measured: nothing gains by failing, and too little is never enough."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.cell import Cell, Key
from vllm_locust.figures import Summary
from vllm_locust.judgement import Judged, State, due, judge, ranks, wilson
from vllm_locust.limit import parse
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.summary import Meta, summary
from vllm_locust.timeline import METRICS

MS = 1_000_000
MET, MISSED, INCONCLUSIVE = State


def cell(counters: dict[str, int] | None = None, **metrics_ms: Iterable[float]) -> Cell:
    """Return a cell of samples in milliseconds, whose ok requests are those with an `e2el`."""
    made = Cell()
    for metric, values in metrics_ms.items():
        for value in values:
            made.histogram(metric).add(round(value * MS))
    ok = max((h.count for h in made.histograms.values()), default=0)
    made.counters = {"sent": ok, "outcome|ok|200": ok} | (counters or {})
    return made


def summed(
    *cells: tuple[str, Cell], limits: Iterable[str] = (), goodput: Iterable[str] = (), **meta: list[str]
) -> Summary:
    """Return the summary of a run of 10 s in which one worker reported cells of these scenarios."""
    wire = to_wire({Key(name, "chat"): found for name, found in cells})
    window = WindowState(index=0, seq=1, sealed=True, gauges=Gauges(span_ns=10 * NS_PER_S), cells=wire)
    recording = Recording("r", 0, 10 * NS_PER_S)
    assert recording.merge(Report(run="r", epoch=0, worker="w1", seq=1, now_ns=0, windows=[window], failures=[]))
    recording.length_ns = 10 * NS_PER_S
    return summary(recording, replace(Meta(), limits=[*limits], goodput=[*goodput], **meta))


def judged(text: str, found: Cell, *, goodput: str = "") -> Summary:
    """Return what is said of a limit on the only scenario."""
    (limit,) = summed(("short", found), limits=[text], goodput=[goodput] if goodput else ())["limits"]
    return limit


# Percentiles


def test_a_limit_is_met_or_missed_by_the_percentile_of_its_part_or_of_all() -> None:
    short, long = cell(ttft=[100] * 100), cell(ttft=[900] * 100)
    texts = ["ttft p95 < 300ms", "short: ttft p95 < 300ms", "long: ttft p95 < 300ms", "ttft p40 < 300ms"]
    limits = summed(("short", short), ("long", long), limits=texts)["limits"]
    assert [limit["state"] for limit in limits] == [MISSED, MET, MISSED, MET]
    assert [limit["limit"] for limit in limits] == texts
    assert [limit["samples"] for limit in limits] == [200, 100, 100, 200]
    assert limits[1]["measured"] == pytest.approx(0.1, rel=0.005)


def test_the_text_has_the_measurement_its_interval_and_how_many_samples() -> None:
    """Values are those of buckets, up to 0.5 % off."""
    limit = judged("ttft p50 < 300ms", cell(ttft=range(100, 200)))
    assert (limit["state"], limit["text"]) == (MET, "148 ms (95 % CI 138 ms to 161 ms, 100 requests)")
    near = judged("ttft p50 < 150ms", cell(ttft=range(100, 200)))
    assert near["text"] == "148 ms (95 % CI 138 ms to 161 ms, which includes the limit, 100 requests)"
    open_end = judged("ttft p95 < 1s", cell(ttft=[100] * 30))["text"]
    assert open_end == "100 ms (95 % CI from 100 ms, which includes the limit, 30 requests)"
    assert judged("ttft p5 < 1s", cell(ttft=[100] * 30))["text"] == "100 ms (95 % CI up to 100 ms, 30 requests)"
    assert judged("connect max < 1s", cell(connect=[3]))["text"] == "3.00 ms (1 connection)"


def test_a_value_that_would_read_like_the_limit_is_shown_with_more_digits() -> None:
    limit = judged("ttft max < 300ms", cell(ttft=[300.0001]))
    assert (limit["state"], limit["text"]) == (MISSED, "300.0001ms (1 request)")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("ttft p95 < 1s", 20),
        ("ttft p99 < 1s", 100),
        ("ttft p90 < 1s", 10),
        ("ttft p99.9 < 1s", 1000),
        ("ttft p50 < 1s", 2),
        ("ttft p1 < 1s", 100),
        ("ttft mean < 1s", 2),
        ("ttft max < 1s", 1),
        ("ttft min < 1s", 1),
        ("failures < 0.5%", 200),
        ("failures <= 0%", 1),
        ("goodput > 95%", 20),
        ("goodput >= 100%", 1),
    ],
)
def test_too_few_samples_never_meet_a_limit_and_just_enough_do(text: str, number: int) -> None:
    counters = {"good": number}
    assert judged(text, cell(counters, ttft=[100] * number), goodput="ttft < 1s")["state"] == MET
    few = judged(text, cell({"good": number - 1}, ttft=[100] * (number - 1)), goodput="ttft < 1s")
    assert (few["state"], few["advice"]) == (INCONCLUSIVE, "run longer")
    if number > 1:
        assert few["text"].startswith("too few samples: ")
        assert few["text"].endswith(f", {number:,} are needed")


def test_few_samples_miss_a_limit_if_their_whole_interval_is_beyond_it() -> None:
    """Five of which three lie above what one in twenty may: that is no chance."""
    assert judged("ttft p95 < 300ms", cell(ttft=[100, 100, 400, 400, 400]))["state"] == MISSED
    assert judged("ttft p95 < 300ms", cell(ttft=[100, 100, 100, 100, 400]))["state"] == INCONCLUSIVE
    assert judged("ttft p95 > 300ms", cell(ttft=[100, 100, 100, 100, 100]))["state"] == INCONCLUSIVE
    assert judged("ttft p5 > 300ms", cell(ttft=[400, 400, 100, 100, 100]))["state"] == MISSED
    assert judged("ttft mean < 300ms", cell(ttft=[400]))["state"] == INCONCLUSIVE
    failing = {"sent": 4, "outcome|ok|200": 1, "outcome|http_5xx|500": 3}
    assert judged("failures < 1%", cell(failing))["state"] == MISSED
    assert judged("failures < 1%", cell({"sent": 99, "outcome|ok|200": 98, "outcome|http_5xx|500": 1}))["state"] == (
        INCONCLUSIVE
    )


@pytest.mark.parametrize("metric", [name for name in METRICS if METRICS[name].unit == "seconds"])
def test_what_was_not_measured_is_inconclusive(metric: str) -> None:
    for statistic in ("mean", "min", "max", "p95"):
        limit = judged(f"{metric} {statistic} < 1h", cell({"sent": 100, "outcome|ok|200": 100}))
        assert (limit["state"], limit["measured"], limit["samples"]) == (INCONCLUSIVE, None, 0)
        assert limit["text"].startswith("not measured: ")


def test_a_scope_without_requests_is_inconclusive() -> None:
    texts = [
        *("rare: ttft p95 < 1s", "rare: failures < 1%", "rare: goodput > 95%", "rare: goodput > 1/s"),
        *("rare: request_per_s < 10", "rare: ttft min < 1s"),
    ]
    full = cell({"good": 100}, ttft=[100] * 100)
    for meta in ({"parts": ["short", "rare"]}, {}):  # a part, and a label that nobody knows
        limits = summed(("short", full), limits=texts, goodput=["ttft < 1s"], **meta)["limits"]
        assert {limit["state"] for limit in limits} == {INCONCLUSIVE}


# What failures do


def test_a_request_that_fails_is_late_however_fast_it_failed() -> None:
    """A server that rejects a tenth of its requests does not shine."""
    counters = {"sent": 100, "outcome|ok|200": 90, "outcome|http_429|429": 10, "failed_without_token": 10}
    found = cell(counters, ttft=[100] * 90, e2el=[200] * 90)
    for metric in ("ttft", "e2el"):
        limit = judged(f"{metric} p95 < 300ms", found)
        assert (limit["state"], limit["measured"], limit["high"], limit["samples"]) == (MISSED, "failed", "failed", 100)
        assert limit["text"].startswith("failed (95 % CI from ")
        assert limit["text"].endswith(", which includes the limit, 100 requests, 10 of them failed)")
        assert judged(f"{metric} p85 < 300ms", found)["state"] == MET
        assert judged(f"{metric} mean < 300ms", found)["measured"] == "failed"
        assert judged(f"{metric} max < 300ms", found)["state"] == MISSED
        assert judged(f"{metric} min < 300ms", found)["state"] == MET


def test_a_stream_that_fails_later_had_its_first_token_and_no_end() -> None:
    counters = {"sent": 100, "outcome|ok|200": 90, "outcome|stream_error|200": 10}
    found = cell(counters, ttft=[100] * 100, e2el=[200] * 90)
    assert judged("ttft p95 < 300ms", found)["state"] == MET
    assert judged("e2el p95 < 300ms", found)["state"] == MISSED


def test_an_arrival_that_was_dropped_is_late_and_not_good() -> None:
    counters = {"sent": 90, "outcome|ok|200": 90, "dropped": 10, "good": 90}
    found = cell(counters, ttft=[100] * 90, e2el=[200] * 90, queue=[0] * 90)
    for text in ("ttft p95 < 300ms", "e2el p95 < 300ms", "goodput > 95%"):
        assert judged(text, found, goodput="ttft < 1s")["state"] == MISSED
    assert judged("goodput >= 90%", found, goodput="ttft < 1s")["measured"] == 0.9


def test_a_cut_request_counts_if_it_was_older_than_the_limit_already_and_is_left_out_else() -> None:
    counters = {"sent": 120, "outcome|ok|200": 90, "outcome|cancelled|200": 30}
    found = cell(counters, ttft=[100] * 90, e2el=[100] * 90, cut_ttft=[50] * 20 + [400] * 10, cut_e2el=[400] * 30)
    limit = judged("ttft p95 < 300ms", found)
    assert (limit["state"], limit["samples"]) == (MISSED, 100)
    assert (
        limit["text"]
        == "399 ms (95 % CI 100 ms to 399 ms, which includes the limit, 100 requests, 20 cut by the end left out)"
    )
    assert judged("ttft p95 < 500ms", found)["text"].endswith("90 requests, 30 cut by the end left out)")
    assert judged("ttft p85 < 300ms", found)["state"] == MET
    assert judged("e2el p80 < 300ms", found)["samples"] == 120


def test_a_run_without_a_schedule_has_nothing_from_it() -> None:
    """Of failures there are some all the same."""
    counters = {"sent": 50, "outcome|http_5xx|500": 10, "failed_without_token": 10, "outcome|ok|200": 40}
    closed = cell(counters, ttft=[1] * 40, e2el=[1] * 40)
    found = cell(counters, ttft_scheduled=[100] * 40, e2el_scheduled=[100] * 40, queue=[1] * 50)
    for metric in ("ttft_scheduled", "e2el_scheduled"):
        limit = judged(f"{metric} p50 < 300ms", closed)
        assert (limit["state"], limit["advice"]) == (INCONCLUSIVE, "leave it out")
        assert "open loop" in limit["text"]
        assert judged(f"{metric} p50 < 300ms", found)["state"] == MET
        assert judged(f"{metric} p85 < 300ms", found)["measured"] == "failed"


# Shares and rates


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("failures <= 0.7%", MET),
        ("failures < 0.7%", MISSED),
        ("failures < 0.8%", MET),
        ("goodput >= 90%", MET),
        ("goodput > 90%", MISSED),
        ("goodput > 89/s", MET),
        ("goodput > 90/s", MISSED),
        ("request_per_s >= 99.3", MET),
        ("request_per_s > 99.3", MISSED),
        ("output_tokens_per_s >= 8,000", MET),
        ("output_tokens_per_s > 8000", MISSED),
        ("input_tokens_per_s > 1", MISSED),
    ],
)
def test_shares_and_rates_are_compared_exactly(text: str, state: State) -> None:
    """The limit of 0.7 % is 7 of 1,000, to the last bit."""
    counters = {
        "sent": 1020,
        "outcome|ok|200": 993,
        "outcome|http_5xx|500": 7,
        "outcome|cancelled|200": 20,
        "good": 900,
        "tokens_received": 80_000,
    }
    assert judged(text, cell(counters), goodput="ttft < 1s")["state"] == state


def test_a_failure_says_its_share_with_the_interval() -> None:
    counters = {"sent": 1000, "outcome|ok|200": 990, "outcome|http_5xx|500": 10}
    limit = judged("failures < 0.5%", cell(counters))
    assert limit["text"] == "1.0 % (95 % CI 0.5 % to 1.8 %, 1,000 requests)"
    assert limit["advice"] == "see the outcomes"


def test_due_is_what_was_to_be_sent_but_for_what_the_end_cut() -> None:
    counters = {"sent": 100, "dropped": 7, "outcome|ok|200": 80, "outcome|cancelled|200": 5, "outcome|cancelled|0": 1}
    assert due(Cell(counters=counters)) == 101


def test_goodput_is_shown_where_somebody_said_what_it_is() -> None:
    counters = {"sent": 100, "outcome|ok|200": 95, "outcome|cancelled|200": 5, "good": 76}
    rates = summed(("short", cell(counters)), goodput=["ttft < 1s"])["total"]["rates"]
    assert (rates["goodput_per_s"], rates["goodput_share"]) == (7.6, 0.8)
    rates = summed(("short", cell(counters)))["scenarios"]["short"]["rates"]
    assert (rates["goodput_per_s"], rates["goodput_share"]) == (None, None)


def test_only_steady_requests_are_judged() -> None:
    key, slow = Key("short", "chat", "warmup"), cell(ttft=[900] * 100)
    steady = cell({"good": 20}, ttft=[100] * 20)
    recording = Recording("r", 0, 10 * NS_PER_S)
    cells = to_wire({key: slow, Key("short", "chat", "retry"): slow, Key("short", "chat"): steady})
    window = WindowState(index=0, seq=1, sealed=True, gauges=Gauges(span_ns=10 * NS_PER_S), cells=cells)
    recording.merge(Report(run="r", epoch=0, worker="w1", seq=1, now_ns=0, windows=[window], failures=[]))
    meta = Meta(limits=["ttft p95 < 300ms", "goodput >= 100%"], goodput=["ttft < 1s"])
    assert [(limit["state"], limit["samples"]) for limit in summary(recording, meta)["limits"]] == [
        (MET, 20),
        (MET, 20),
    ]


# Intervals


@pytest.mark.parametrize(
    ("quantile", "number", "expected"),
    [
        # R's qbinom(c(0.025, 0.975), number, quantile) + c(0, 1)
        (0.5, 10, (2, 9)),
        (0.5, 100, (40, 61)),
        (0.95, 20, (17, 21)),
        (0.95, 71, (63, 72)),
        (0.95, 72, (64, 72)),
        (0.95, 73, (65, 73)),
        (0.95, 1000, (936, 964)),
        (0.99, 100, (97, 101)),
        (0.5, 5, (0, 6)),
    ],
)
def test_the_ranks_of_an_interval_are_those_of_the_binomial_law(
    quantile: float, number: int, expected: tuple[int, int]
) -> None:
    assert ranks(quantile, number) == expected


@given(st.integers(1, 400), st.floats(0.001, 0.999))
def test_the_ranks_are_the_tightest_that_hold_in_exact_arithmetic(number: int, quantile: float) -> None:
    low, high = ranks(quantile, number)
    terms = [math.comb(number, k) * quantile**k * (1 - quantile) ** (number - k) for k in range(number + 1)]

    def below(rank: int) -> float:
        return math.fsum(terms[:rank])

    assert below(low) <= 0.025 + 1e-9
    assert below(low + 1) > 0.025 - 1e-9
    assert 1 - below(high) <= 0.025 + 1e-9 or high == number + 1
    assert 1 - below(high - 1) > 0.025 - 1e-9


def test_the_ranks_of_a_long_run_take_no_time() -> None:
    low, high = ranks(0.95, 10**9)
    deviation = math.sqrt(10**9 * 0.95 * 0.05)
    assert (low - 0.95e9) / deviation == pytest.approx(-1.96, abs=0.01)
    assert (high - 0.95e9) / deviation == pytest.approx(1.96, abs=0.01)


@pytest.mark.parametrize(("quantile", "number"), [(0.5, 30), (0.9, 80), (0.95, 100), (0.95, 600), (0.99, 1000)])
def test_an_interval_holds_the_true_percentile_in_at_least_95_of_100_runs(quantile: float, number: int) -> None:
    """On skewed latencies with a second hump: no law is assumed."""
    random, runs = np.random.default_rng(number), 2000
    low, high = ranks(quantile, number)
    fast, slow = random.lognormal(4, 0.5, (runs, number)), random.lognormal(7, 0.3, (runs, number))
    draws = np.sort(np.where(random.random((runs, number)) < 0.2, slow, fast), axis=1)
    many = 400_000
    fast, slow = random.lognormal(4, 0.5, many), random.lognormal(7, 0.3, many)
    true = np.quantile(np.where(random.random(many) < 0.2, slow, fast), quantile)
    inside = (draws[:, low - 1] <= true) & (true <= draws[:, high - 1])
    assert inside.mean() >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / runs)
    assert inside.mean() <= 0.99


def test_the_interval_of_a_run_is_that_of_its_ranks() -> None:
    values = np.random.default_rng(1).lognormal(4, 1, 500)
    limit = judged("ttft p90 < 1h", cell(ttft=values))
    low, high = ranks(0.9, 500)
    ordered = np.sort(values) / 1000
    assert limit["low"] == pytest.approx(ordered[low - 1], rel=0.006)
    assert limit["high"] == pytest.approx(ordered[high - 1], rel=0.006)


def test_gaps_of_one_request_are_not_so_many_witnesses() -> None:
    """A request whose gaps are all long is one piece of evidence."""
    found = cell(itl=[10] * 900 + [50] * 100, itl_max=[10] * 18 + [50] * 2)
    limit = judged("itl p95 < 60ms", found)
    assert (limit["state"], limit["samples"]) == (MET, 1000)
    assert limit["text"] == "49.9 ms (95 % CI from 10.0 ms, which includes the limit, 1,000 gaps)"


@pytest.mark.parametrize(
    ("part", "whole", "low", "high"),
    [(0, 100, 0, 0.0370), (10, 1000, 0.00544, 0.0183), (1, 10, 0.0179, 0.4042), (50, 50, 0.9287, 1)],
)
def test_the_interval_of_a_share_is_wilsons(part: int, whole: int, low: float, high: float) -> None:
    """Values of R's prop.test(correct = FALSE)."""
    assert wilson(part, whole) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 10**6), st.data())
def test_the_interval_of_a_share_holds_it(whole: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, whole))
    low, high = wilson(part, whole)
    assert 0 <= low <= part / whole <= high <= 1


# Any run


@given(
    st.sampled_from(["ttft", "e2el", "tpot", "itl", "queue"]),
    st.sampled_from(["mean", "min", "max", "p50", "p95", "p99.9"]),
    st.sampled_from(["<", "<=", ">", ">="]),
    st.lists(st.integers(0, 10_000), max_size=60),
    st.integers(0, 30),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_any_run_is_judged_in_order_and_never_met_by_failing(  # noqa: PLR0913, PLR0917 - a whole run
    metric: str, statistic: str, comparison: str, values: list[int], failed: int, cut: list[int]
) -> None:
    counters = {"sent": len(values) + failed, "failed_without_token": failed, "outcome|http_5xx|500": failed}
    found = cell(counters, **{metric: values, "cut_ttft": cut, "cut_e2el": cut})
    scope = summed(("short", found))["total"]
    limit = parse(f"{metric} {statistic} {comparison} 5s")
    seen: Judged = judge(limit, found, scope)
    if seen.measured is None:
        assert (seen.state, seen.samples) == (INCONCLUSIVE, 0)
        return
    assert (seen.low or 0) <= seen.measured <= (math.inf if seen.high is None else seen.high)
    assert (seen.state == MET) <= limit.met_by(seen.measured)
    assert bool(seen.advice) == (seen.state != MET)
    if comparison in ("<", "<="):
        found.count("failed_without_token", 5)
        found.count("outcome|http_4xx|400", 5)
        worse = judge(limit, found, summed(("short", found))["total"])
        if seen.state == MISSED:
            assert worse.state != MET
        assert worse.measured is not None
        assert worse.measured >= seen.measured


def test_a_run_that_was_over_before_its_warm_up_is_judged_by_all_of_it() -> None:
    """Its report tells the latencies of the warm-up, for there is nothing else."""
    counters = {"good": 19, "failed_without_token": 1, "outcome|http_5xx|500": 1, "outcome|ok|200": 19, "sent": 20}
    found = cell(counters, ttft=[100] * 19)
    recording = Recording("r", 0, 10 * NS_PER_S)
    cells = to_wire({Key("short", "chat", "warmup"): found})
    window = WindowState(index=0, seq=1, sealed=True, gauges=Gauges(span_ns=10 * NS_PER_S), cells=cells)
    recording.merge(Report(run="r", epoch=0, worker="w1", seq=1, now_ns=0, windows=[window], failures=[]))
    recording.length_ns, recording.steady_ns = 10 * NS_PER_S, 30 * NS_PER_S
    meta = Meta(limits=["ttft p90 < 300ms", "short: goodput >= 95%"], goodput=["ttft < 1s"])
    limits = summary(recording, meta)["limits"]
    assert [(limit["state"], limit["samples"]) for limit in limits] == [(MET, 20), (MET, 20)]
