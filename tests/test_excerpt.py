"""A part of a run, by time or by scenario: what is in it, what is said of it, and that parts add up to the whole."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windowed import Traffic, log_normal, merge_cells

from vllm_locust import cli
from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.errors import InputError
from vllm_locust.excerpt import excerpt
from vllm_locust.picture import of_run
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Gauges, Mark, Recording, Report, WindowState, to_wire
from vllm_locust.report import text
from vllm_locust.results import Run, load, save
from vllm_locust.slowest import Slow, each
from vllm_locust.summary import Meta
from vllm_locust.timeline import Outcome

S = NS_PER_S
WINDOW_NS = 10 * S
SCENARIOS = ("short", "long", "会話")
META = Meta(name="r", started="2026-01-02T03:04:05+00:00", parts=["short", "long"])


def recording_of(
    states: dict[tuple[str, int], Cells], *, length_ns: int, boundaries_ns: Iterable[int] = ()
) -> Recording:
    """Return what a master holds after each worker has reported each of its windows, all of them sealed."""
    recording = Recording("r1", 0, WINDOW_NS)
    recording.grid = recording.grid.moved(boundaries_ns)
    for (worker, index), cells in sorted(states.items()):
        gauges = Gauges(span_ns=WINDOW_NS, in_flight_ns=index * S, in_flight_peak=index, late=1)
        window = WindowState(index=index, seq=1, sealed=True, gauges=gauges, cells=to_wire(cells))
        report = Report(run="r1", epoch=0, worker=worker, seq=1, now_ns=0, windows=[window], failures=[])
        assert recording.merge(report)
    recording.length_ns = length_ns
    return recording


def cell_of(counters: dict[str, int], **samples: list[int]) -> Cell:
    cell = Cell(counters=dict(counters))
    for metric, values in samples.items():
        for value in values:
            cell.histogram(metric).add(value)
    return cell


def answered(number: int, ttft_ns: int = S // 10) -> Cell:
    counters = {"sent": number, f"outcome|{Outcome.OK}|200": number, "tokens_received": 10 * number}
    return cell_of(counters, ttft=[ttft_ns] * number, e2el=[S] * number)


def steady_run(windows: int = 30, **facts: Any) -> Run:
    """Return a run of so many windows of 10 s with two scenarios."""
    return Run.of(log_normal(1, {"short": Traffic(40), "long": Traffic(20)}, windows), replace(META, **facts))


# What is in it


def test_latencies_counts_and_rates_are_those_of_the_windows_between_two_instants() -> None:
    """Each window has another number of requests, so any other choice of windows has another sum."""
    states: dict[tuple[str, int], Cells] = {
        ("w1", index): {Key("short", "chat"): answered(2**index, (index + 1) * S)} for index in range(7)
    }
    run = Run.of(recording_of(states, length_ns=6 * WINDOW_NS), META)
    part = excerpt(run, since_s=20, until_s=40)
    total = part.summary["total"]
    assert (total["requests"], total["outcomes"]["ok"], total["ttft"]["count"]) == (12, 12, 12)
    assert (total["ttft"]["min"], total["ttft"]["max"]) == (3, 4)
    assert part.summary["duration_s"] == 20
    assert total["rates"]["request_per_s"] == 12 / 20
    assert (total["rates"]["in_flight_mean"], total["rates"]["in_flight_peak"]) == ((2 + 3) / 20, 3)
    assert part.summary["fidelity"]["workers"]["w1"]["late"] == 2
    # What came after the stop belongs to whoever has the end, and to no rate.
    end = excerpt(run, since_s=50).summary
    assert (end["total"]["requests"], end["total"]["rates"]["sent_per_s"]) == (32 + 64, 32 / 10)


@pytest.mark.parametrize(
    ("since_s", "until_s", "shown"),
    [(20, 40, (20, 40)), (15.1, 44.9, (20, 40)), (24.9, 35.1, (20, 40)), (None, 21, (0, 20)), (286, 300.9, (290, 300))],
)
def test_an_instant_is_moved_to_the_nearest_end_of_a_window(
    since_s: float | None, until_s: float, shown: tuple[float, float]
) -> None:
    part = excerpt(steady_run(), since_s=since_s, until_s=until_s)
    assert (part.recording.begin_ns / S, (part.recording.length_ns or 0) / S) == shown
    assert part.meta.excerpt[0] == f"{shown[0]} s to {shown[1]} s of 300 s, in whole windows"


def test_windows_that_a_warm_up_has_moved_are_cut_where_they_end() -> None:
    recording = recording_of(
        {("w1", index): {Key("short", "chat"): answered(2**index)} for index in range(5)},
        length_ns=34 * S,
        boundaries_ns=[4 * S],
    )
    recording.steady_ns = 4 * S
    part = excerpt(Run.of(recording, META), since_s=15, until_s=24)
    assert (part.recording.begin_ns, part.recording.length_ns) == (14 * S, 24 * S)
    assert part.summary["total"]["requests"] == 2**2
    assert part.summary["warmup"] is None


def test_of_a_warm_up_the_part_that_is_in_it_is_left_out() -> None:
    """From the middle of a warm-up on: what is judged begins at its end, as in the whole run."""
    warm, steady = {Key("short", "chat", "warmup"): answered(7, 9 * S)}, {Key("short", "chat"): answered(1)}
    states = {("w1", index): warm if index < 3 else steady for index in range(6)}
    recording = recording_of(states, length_ns=6 * WINDOW_NS, boundaries_ns=[30 * S])
    recording.steady_ns = 30 * S
    run = Run.of(recording, META)
    part = excerpt(run, since_s=20)
    assert part.summary["warmup"] == {"s": 10, "requests": 7, "ok": 7, "failed": 0}
    assert (part.summary["duration_s"], part.summary["total"]["ttft"]["count"]) == (30, 3)
    # Nothing but warm-up: it is told, as where a run is over first.
    warmup = excerpt(run, until_s=20).summary
    assert (warmup["duration_s"], warmup["total"]["ttft"]["count"], warmup["warmup"]["s"]) == (20, 14, None)


def test_of_a_stage_the_part_that_is_in_it_is_told() -> None:
    states: dict[tuple[str, int], Cells] = {
        ("w1", index): {Key("short", "chat", stage=1 + index // 3): answered(2**index)} for index in range(6)
    }
    recording = recording_of(states, length_ns=60 * S, boundaries_ns=[30 * S])
    recording.stages_ns = [0, 30 * S, 60 * S]
    meta = replace(META, load={"stages": [8, 16], "stage_s": 30, "arrivals": "poisson"})
    first, second = excerpt(Run.of(recording, meta), since_s=20, until_s=50).summary["stages"]
    assert (first["value"], first["since_s"], first["length_s"], first["requests"]) == (8, 20, 10, 2**2)
    assert (second["value"], second["since_s"], second["length_s"], second["requests"]) == (16, 30, 20, 2**3 + 2**4)


def test_a_scenario_alone_has_what_is_asked_of_it_and_no_other_limit() -> None:
    run = steady_run(
        limits=["short: ttft p95 < 300ms", "long: ttft p95 < 1ms", "failures < 1%"],
        goodput=["ttft < 300ms", "long: ttft < 2s"],
    )
    part = excerpt(run, scenarios=["short"])
    assert list(part.summary["scenarios"]) == part.meta.parts == ["short"]
    assert part.summary["total"]["requests"] == run.summary["scenarios"]["short"]["requests"]
    assert part.summary["total"]["ttft"] == run.summary["scenarios"]["short"]["ttft"]
    assert [limit["limit"] for limit in part.summary["limits"]] == ["short: ttft p95 < 300ms"]
    in_time = excerpt(run, until_s=50).summary["limits"]
    assert [limit["limit"] for limit in in_time] == run.meta.limits
    assert part.meta.goodput == ["ttft < 300ms"]
    assert "scenario short" in part.meta.excerpt[0]
    assert any("all scenarios" in line for line in part.meta.excerpt)


def test_failures_outside_are_not_told_and_the_times_of_others_are_within() -> None:
    """Where a kind began before the excerpt, its first time is that of the window in which it occurred again."""
    late, refused = f"outcome|{Outcome.IDLE_TIMEOUT}|200", f"outcome|{Outcome.HTTP_5XX}|503"
    counts: list[dict[str, int]] = [{late: 1, "sent": 9}, {}, {}, {late: 2}, {late: 1, refused: 1}, {}]
    states: dict[tuple[str, int], Cells] = {
        ("w1", index): {Key("short", "chat"): cell_of(counters)} for index, counters in enumerate(counts)
    }
    recording = recording_of(states, length_ns=60 * S)
    for outcome, status, first_s, last_s in (("idle_timeout", 200, 3, 48), ("http_5xx", 503, 44, 44)):
        failure = Failure(
            scenario="short",
            endpoint="chat",
            outcome=outcome,
            status=status,
            first_ns=first_s * S,
            last_ns=last_s * S,
            message=f"why {outcome}",
        )
        recording.failures[failure.kind] = failure
    run = Run.of(recording, META)
    assert [(kind["outcome"], kind["count"]) for kind in run.summary["failures"]] == [
        ("idle_timeout", 4),
        ("http_5xx", 1),
    ]

    def told(since_s: float, until_s: float) -> list[tuple[Any, ...]]:
        failures = excerpt(run, since_s=since_s, until_s=until_s).summary["failures"]
        return [tuple(kind[key] for key in ("outcome", "count", "first_s", "last_s")) for kind in failures]

    assert told(20, 40) == [("idle_timeout", 2, 30, 40)]
    assert told(40, 50) == [("http_5xx", 1, 44, 44), ("idle_timeout", 1, 40, 48)]
    assert told(10, 30) == []


def test_marks_and_slowest_requests_are_those_that_fall_in_it() -> None:
    recording = recording_of(
        {("w1", index): {Key("short", "chat"): answered(1)} for index in range(6)}, length_ns=60 * S
    )
    recording.marks = [Mark(at_ns=at_s * S, text=f"at {at_s}") for at_s in (5, 20, 39, 40, 70)]
    for place, at_s in enumerate((5, 20, 39, 40, 70)):
        slow = Slow(
            scenario="short" if place % 2 else "long",
            endpoint="chat",
            metric="ttft",
            value_ns=S * (place + 1),
            at_ns=at_s * S,
            worker="w1",
            request_id=f"r1-{place}",
            input_tokens=None,
            output_tokens=1,
            in_flight=1,
            outcome="ok",
        )
        recording.slowest.setdefault((slow.scenario, "ttft"), []).append(slow)
    run = Run.of(recording, META)

    def told(**asked: Any) -> tuple[list[str], list[int]]:
        part = excerpt(run, **asked).recording
        return [mark.text for mark in part.marks], sorted(slow.at_ns // S for slow in each(part.slowest))

    assert told(since_s=20, until_s=40) == (["at 20", "at 39"], [20, 39])
    assert told(since_s=40) == (["at 40", "at 70"], [40, 70])
    assert told(scenarios=["short"])[1] == [20, 40]


def test_more_good_requests_than_were_sent_in_it_are_no_more_than_all_that_were_due() -> None:
    """Three that were sent before have ended in it: a share above 1 would be nonsense."""
    cell = cell_of({"sent": 2, "outcome|ok|200": 5, "good": 5})
    run = Run.of(
        recording_of({("w1", 0): {Key("short", "chat"): cell}}, length_ns=10 * S), replace(META, goodput=["ttft < 1s"])
    )
    assert run.summary["total"]["rates"]["goodput_share"] == 1


# What is said of it


def test_stability_is_not_judged_anew_and_that_is_said() -> None:
    """The promise on false alarms is for a run, not for the part of it that looks worst."""
    run = steady_run(stability=True)
    assert run.summary["stability"]["verdict"] == "stable"
    part = excerpt(run, since_s=0, until_s=290)
    assert "stability" not in part.summary
    assert "stability is judged of a whole run alone" in part.meta.excerpt


def test_a_run_that_is_over_some_milliseconds_late_ends_when_it_was_to_end() -> None:
    """Timers are late, and a warm-up moves windows: `--to 60s` of 60 s is all of them."""
    recording = recording_of(
        {("w1", index): {Key("short", "chat"): answered(2**index)} for index in range(7)},
        length_ns=60 * S + 163_215,
        boundaries_ns=[4_976_916_654],
    )
    run = Run.of(recording, META)
    assert excerpt(run, since_s=0, until_s=60).summary == run.summary
    assert excerpt(run, since_s=15, until_s=25).summary["total"]["requests"] == 2**2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"since_s": 40.0, "until_s": 20.0}, r"--from 40s --to 20s: nothing is between them"),
        ({"since_s": 300.0}, r"--from 300s: nothing is between them; the run is 300 s long"),
        ({"until_s": 0.0}, r"--to 0s: nothing is between them"),
        ({"until_s": 306.0}, r"--to 306s: the run is 300 s long"),
        ({"since_s": 62.0, "until_s": 64.0}, r"--from 62s --to 64s: less than a window.*the nearest is 60 s to 70 s"),
        ({"since_s": 298.0}, r"--from 298s: less than a window.*the nearest is 290 s to 300 s"),
        ({"scenarios": ["short", "x"]}, r"--scenario x: .*it has short, long$"),
    ],
)
def test_what_cannot_be_is_refused_with_what_there_is(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        excerpt(steady_run(), **asked)


def test_an_excerpt_of_a_run_in_which_nothing_happened_is_shown_or_refused_in_words() -> None:
    run = Run.of(Recording("r1", 0, WINDOW_NS), META)
    assert excerpt(run, scenarios=["short"]).summary["total"]["requests"] == 0
    with pytest.raises(InputError, match="nothing is between them"):
        excerpt(run, since_s=10)


def test_every_form_of_the_report_takes_an_excerpt_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(steady_run(), tmp_path)
    asked = ["report", "--from", "60s", "--to", "4m", "--scenario", "short", str(path)]
    expected = excerpt(load(path), since_s=60, until_s=240, scenarios=["short"])
    for shape in ([], ["--full"], ["--format", "markdown"]):
        assert cli.main([*asked, *shape]) == 0
        shown = capsys.readouterr().out
        assert "60 s to 240 s of 300 s, in whole windows, scenario short" in shown
        assert f"{expected.summary['total']['requests']:,}" in shown
        assert "long" not in re.sub(r"longest|long request", "", shown.split("scenario short", 1)[1])
    assert cli.main([*asked, "--html", str(tmp_path / "page.html")]) == 0
    assert "60 s to 240 s of 300 s" in (tmp_path / "page.html").read_text()
    assert cli.main([*asked[:-1], "--scenario", "x", str(path)]) == 2
    assert "--scenario x" in capsys.readouterr().err


def test_its_picture_has_the_columns_of_its_windows_and_their_times() -> None:
    whole, part = of_run(steady_run()), of_run(excerpt(steady_run(), since_s=60, until_s=240))
    assert part["columns"] == whole["columns"][6:24]
    assert (part["from"], part["next"], part["length_s"]) == (6, 24, 240)


def test_an_excerpt_that_is_saved_is_the_same_again_and_can_be_cut_further(tmp_path: Path) -> None:
    part = excerpt(steady_run(), since_s=60, until_s=240)
    again = load(save(part, tmp_path))
    assert again.summary == part.summary
    assert text(again, full=True) == text(part, full=True)
    assert excerpt(again, since_s=100, until_s=200).summary == excerpt(steady_run(), since_s=100, until_s=200).summary
    with pytest.raises(InputError, match="less than a window"):
        excerpt(again, until_s=62)


# Guarantees


values = st.one_of(st.integers(0, 10**11), st.integers(0, 2**62))
counters = st.dictionaries(
    st.sampled_from(["sent", "tokens_received", "scheduled", "dropped", "outcome|ok|200", "outcome|http_5xx|503"]),
    st.integers(0, 10**12),
)
cells = st.builds(
    lambda counted, ttft, itl: cell_of(counted, ttft=ttft, itl=itl),
    counters,
    st.lists(values, max_size=3),
    st.lists(values, max_size=3),
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a run of workers, windows that boundaries have moved, a tail behind the stop, and phases and stages."""
    keys = st.builds(
        Key,
        st.sampled_from(SCENARIOS),
        st.sampled_from(["chat", "completions"]),
        st.sampled_from(["steady", "warmup", "retry"]),
        st.integers(0, 2),
    )
    length_ns = draw(st.integers(1, 60 * S))
    boundaries_ns = draw(st.lists(st.integers(1, length_ns), max_size=3))
    count = recording_of({}, length_ns=length_ns, boundaries_ns=boundaries_ns).window_count
    places = st.tuples(st.sampled_from(["w1", "w2"]), st.integers(0, count))
    states = draw(st.dictionaries(places, st.dictionaries(keys, cells, max_size=2), max_size=6))
    recording = recording_of(states, length_ns=length_ns, boundaries_ns=boundaries_ns)
    recording.steady_ns = draw(st.sampled_from([0, *boundaries_ns]))
    recording.stages_ns = sorted(draw(st.sampled_from([[], [0, *boundaries_ns]])))
    recording.marks = [Mark(at_ns=at_ns, text="m") for at_ns in draw(st.lists(st.integers(0, 70 * S), max_size=3))]
    return Run.of(recording, replace(META, parts=[*SCENARIOS]))


def plain(cells: Cells) -> Any:
    """Return what cells hold, those without anything left out."""
    return {
        key: (
            {name: number for name, number in cell.counters.items() if number},
            {name: (dict(h), h.count, h.sum, h.min, h.max) for name, h in cell.histograms.items() if h.count},
        )
        for key, cell in cells.items()
        if any(cell.counters.values()) or any(h.count for h in cell.histograms.values())
    }


def added(parts: Iterable[Run]) -> Cells:
    found: Cells = {}
    for part in parts:
        merge_cells(found, part.recording.totals)
    return found


@settings(max_examples=150, deadline=None)
@given(run=runs(), data=st.data())
def test_excerpts_that_part_a_run_add_up_to_all_of_it(run: Run, data: st.DataObject) -> None:
    """By time and by scenario: counters, histograms, gauges, failures, marks; and the length, in which rates are."""
    recording = run.recording
    ends_ns = [recording.bounds_ns(index)[0] for index in recording.windows] + [recording.length_ns or 0]
    inner = data.draw(st.lists(st.sampled_from(ends_ns[1:-1] or ends_ns[:1]), max_size=3)) if len(ends_ns) > 2 else []
    cuts = sorted({ends_ns[0], *inner, ends_ns[-1]})
    parts = [
        excerpt(
            run,
            since_s=None if since_ns == cuts[0] else since_ns / S,
            until_s=None if until_ns == cuts[-1] else until_ns / S,
        )
        for since_ns, until_ns in pairwise(cuts)
    ]
    whole = plain(recording.totals)
    assert plain(added(parts)) == whole
    steady: Cells = {}
    for part in parts:
        if part.recording.phases == recording.phases:
            merge_cells(steady, part.recording.within())
    if all(part.recording.phases == recording.phases for part in parts):
        assert plain(steady) == plain(recording.within())
        assert sum(part.summary["duration_s"] for part in parts) == pytest.approx(run.summary["duration_s"])
    assert sorted(place for part in parts for place in part.recording.gauges) == sorted(recording.gauges)
    marks = [mark.at_ns for part in parts for mark in part.recording.marks]
    assert sorted(marks) == sorted(mark.at_ns for mark in recording.marks)
    failures: Counter[str] = Counter()
    for part in parts:
        for kind in part.summary["failures"]:
            failures[f"{kind['scenario']} {kind['endpoint']}"] += kind["count"]
    expected: Counter[str] = Counter()
    for kind in run.summary["failures"]:
        expected[f"{kind['scenario']} {kind['endpoint']}"] += kind["count"]
    assert +failures == +expected
    by_scenario = [excerpt(run, scenarios=[name]) for name in run.summary["scenarios"]]
    assert plain(added(by_scenario)) == whole


@settings(max_examples=50, deadline=None)
@given(run=runs())
def test_an_excerpt_of_everything_is_the_run_itself(run: Run) -> None:
    part = excerpt(run, scenarios=[*run.summary["scenarios"]])
    assert part.summary == run.summary
    assert json.loads(json.dumps(part.recording.save_frame())) == json.loads(json.dumps(run.recording.save_frame()))
