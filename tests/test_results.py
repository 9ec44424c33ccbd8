"""The run file and the numbers in it: right, strict, complete, and the same again after loading."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.fidelity import DEFAULTS, Limits
from vllm_locust.figures import COUNTS
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.report import text
from vllm_locust.results import FORMAT, Run, check_writable, load, save
from vllm_locust.summary import Meta, summary
from vllm_locust.timeline import METRICS, Outcome

MS = 1_000_000
WINDOW_NS = 10 * NS_PER_S
META = Meta(
    name="baseline",
    started="2026-01-02T03:04:05+00:00",
    target="http://127.0.0.1:8000",
    load={"users": 5, "spawn_rate": 1.5, "run_time_s": None},
)


def merged(states: dict[tuple[str, int], Cells], *failures: Failure, **gauges: int) -> Recording:
    """Return what a master holds after each worker has reported each of its windows once."""
    recording = Recording("r1", 0, WINDOW_NS)
    for (worker, index), cells in states.items():
        seen = Gauges(**{"span_ns": WINDOW_NS, **gauges})
        window = WindowState(index=index, seq=1, sealed=True, gauges=seen, cells=to_wire(cells))
        arguments: dict[str, Any] = {"windows": [window], "failures": list(failures)}
        assert recording.merge(Report(run="r1", epoch=0, worker=worker, seq=1, now_ns=0, **arguments))
    recording.length_ns = WINDOW_NS * (1 + max((index for _, index in states), default=0))
    return recording


def cell_of(counters: dict[str, int] | None = None, /, **samples: list[int]) -> Cell:
    """Return a cell of these samples, in nanoseconds or tokens, and counts."""
    cell = Cell(counters=counters or {})
    for metric, values in samples.items():
        for value in values:
            cell.histogram(metric).add(value)
    return cell


def one(cell: Cell, **gauges: int) -> dict[str, Any]:
    """Return the summary of one cell in one window of 10 s."""
    return summary(merged({("w1", 0): {Key("short", "chat"): cell}}, **gauges), META)


def failure(**changes: Any) -> Failure:
    """Return a failure, as a worker reports it."""
    fields = {
        "scenario": "short",
        "endpoint": "chat",
        "outcome": "http_4xx",
        "status": 404,
        "message": "no such model",
    }
    return Failure(**{**fields, "first_ns": 2 * NS_PER_S, "last_ns": 3 * NS_PER_S, **changes})


# Numbers


def test_a_metric_is_in_seconds_and_exact_where_the_histogram_is() -> None:
    """Mean, minimum and maximum are exact, percentiles within 0.5 %."""
    ttft = one(cell_of(ttft=[100 * MS, 200 * MS, 400 * MS]))["total"]["ttft"]
    assert (ttft["count"], ttft["min"], ttft["max"]) == (3, 0.1, 0.4)
    assert ttft["mean"] == pytest.approx(0.7 / 3)
    assert ttft["p50"] == pytest.approx(0.2, rel=0.005)
    assert ttft["p99"] == 0.4


def test_tokens_are_whole_numbers_and_their_mean_is_not() -> None:
    """Nobody sends half a token."""
    tokens = one(cell_of(output_tokens=[1000, 1001]))["total"]["output_tokens"]
    assert tokens["mean"] == 1000.5
    assert all(isinstance(tokens[key], int) for key in ("p50", "p90", "p95", "p99", "min", "max"))
    assert tokens["min"] == 1000 <= tokens["p50"] <= tokens["p99"] == tokens["max"] == 1001


@pytest.mark.parametrize("value", [2**53 + 1, 2**62 - 1])
def test_percentiles_stay_between_minimum_and_maximum_where_floats_are_coarse(value: int) -> None:
    """Found by the property below: the float of the maximum is one more than the maximum."""
    tokens = one(cell_of(output_tokens=[value]))["total"]["output_tokens"]
    assert {tokens[key] for key in ("min", "p50", "p99", "max")} == {value}


def test_a_metric_without_samples_is_null() -> None:
    """Never 0, which would be a wonderful latency."""
    absent = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "min", "max"))
    assert one(cell_of())["total"]["e2el"] == {"count": 0, **absent}


def test_latencies_are_of_steady_requests_and_counts_of_all() -> None:
    """Rates and outcomes count what happened; a warm-up shows no latency that anyone waits for."""
    warmup = cell_of({"sent": 10, "outcome|ok|200": 10, "tokens_received": 50}, ttft=[5000 * MS] * 10, itl=[0])
    steady = cell_of({"sent": 20, "outcome|ok|200": 20, "tokens_received": 100}, ttft=[300 * MS] * 20)
    cells = {Key("short", "chat", "warmup"): warmup, Key("short", "chat"): steady}
    total = summary(merged({("w1", 0): cells}), META)["total"]
    assert (total["ttft"]["count"], total["ttft"]["max"]) == (20, 0.3)
    assert (total["requests"], total["outcomes"]["ok"], total["rates"]["output_tokens_per_s"]) == (30, 30, 15)
    assert total["counts"]["zero_gaps"] == 0


def test_scenarios_merge_their_endpoints_stages_and_workers() -> None:
    """What the reader calls `short` is one row."""
    short, staged = cell_of({"sent": 1}, ttft=[MS]), cell_of({"sent": 2}, ttft=[2 * MS] * 2)
    states = {
        ("w1", 0): {Key("short", "chat"): short, Key("short", "completions"): short},
        ("w2", 0): {Key("short", "chat", "steady", 1): staged, Key("long", "chat"): short},
    }
    numbers = summary(merged(states), META)
    assert numbers["scenarios"]["short"]["requests"] == numbers["scenarios"]["short"]["ttft"]["count"] == 4
    assert numbers["total"]["requests"] == 5


def test_each_configured_part_is_there_in_its_order_and_others_follow() -> None:
    """A part without requests is shown with 0 and nulls; one that nobody configured is not lost."""
    recording = merged({("w1", 0): {Key("b", "chat"): cell_of({"sent": 1}), Key("new", "chat"): cell_of()}})
    scenarios = summary(recording, replace(META, parts=["c", "b", "a"]))["scenarios"]
    assert list(scenarios) == ["c", "b", "a", "new"]
    assert scenarios["c"]["requests"] == 0
    assert scenarios["c"]["ttft"]["p50"] is None


def test_outcomes_are_the_closed_set_and_a_cut_request_is_no_failure() -> None:
    """Statuses add up; the share of failures is of the requests that ended by themselves."""
    counters = {"sent": 20, "outcome|ok|200": 9, "outcome|http_4xx|404": 2, "outcome|http_4xx|400": 1}
    total = one(cell_of(counters | {"outcome|cancelled|200": 8}))["total"]
    assert list(total["outcomes"]) == [outcome.value for outcome in Outcome]
    assert (total["outcomes"]["http_4xx"], total["failed"], total["cancelled"]) == (3, 3, 8)
    assert total["failed_share"] == 3 / 12
    assert one(cell_of({"outcome|cancelled|200": 8}))["total"]["failed_share"] is None


def test_judged_percentiles_count_failures_as_late_and_leave_cut_requests_out() -> None:
    """A server that rejects a fifth of its requests must not shine."""
    counters = {"outcome|ok|200": 8, "outcome|http_429|429": 2, "failed_without_token": 1}
    total = one(cell_of(counters, ttft=[100 * MS] * 9, e2el=[900 * MS] * 8, cut_ttft=[MS] * 3))["total"]
    assert total["ttft"]["p99"] == 0.1
    judged = total["judged"]["ttft"]
    assert (judged["count"], judged["failed"], judged["cut"]) == (10, 1, 3)
    assert (judged["p50"], judged["p90"], judged["p95"], judged["p99"]) == (0.1, 0.1, "failed", "failed")
    assert total["judged"]["e2el"]["failed"] == 2
    assert total["judged"]["e2el"]["p90"] == "failed"
    nothing = one(cell_of())["total"]["judged"]["ttft"]
    assert (nothing["count"], nothing["p99"]) == (0, None)


def test_rates_are_counts_over_the_length_of_the_run() -> None:
    """Tokens of failed requests arrived too; they are shown apart as well."""
    counters = {
        "sent": 40,
        "outcome|ok|200": 30,
        "tokens_received": 600,
        "tokens_failed": 50,
        "token_events": 300,
    }
    total = one(cell_of(counters, input_tokens=[100, 200]), in_flight_peak=7, in_flight_ns=40 * NS_PER_S)["total"]
    assert total["rates"] == {
        "offered_per_s": None,
        "request_per_s": 3,
        "sent_per_s": 4,
        "input_tokens_per_s": 30,
        "output_tokens_per_s": 60,
        "output_tokens_failed_per_s": 5,
        "goodput_per_s": None,  # nobody said what a good request is
        "goodput_share": None,
        "in_flight_mean": 4,
        "in_flight_peak": 7,
    }
    assert total["tokens"]["tokens_per_event"] == 2


def test_streams_in_flight_add_up_over_workers_and_not_over_windows() -> None:
    """The peak is the largest sum of the workers' peaks in one window."""
    recording = merged({("w1", 0): {}, ("w2", 0): {}, ("w1", 1): {}, ("w2", 1): {}})
    peaks = {("w1", 0): 5, ("w2", 0): 1, ("w1", 1): 3, ("w2", 1): 4}
    for place, peak in peaks.items():
        recording.gauges[place].in_flight_peak = peak
    assert summary(recording, META)["total"]["rates"]["in_flight_peak"] == 7


def test_what_happens_after_the_stop_counts_in_totals_and_not_in_rates() -> None:
    """Streams run out after the stop: their latencies are of the run, but no rate is raised by them."""
    counters = {"sent": 10, "outcome|ok|200": 10, "tokens_received": 100}
    cells = {Key("short", "chat"): cell_of(counters, ttft=[MS] * 10)}
    recording = merged({("w1", 0): cells, ("w1", 1): cells}, in_flight_peak=4, in_flight_ns=20 * NS_PER_S)
    recording.length_ns = WINDOW_NS
    recording.gauges["w1", 1].in_flight_peak = 9
    numbers = summary(recording, META)
    for scope in (numbers["total"], numbers["scenarios"]["short"]):
        assert (scope["ttft"]["count"], scope["outcomes"]["ok"], scope["tokens"]["output_received"]) == (
            20,
            20,
            200,
        )
        assert (scope["rates"]["request_per_s"], scope["rates"]["output_tokens_per_s"]) == (1, 10)
    assert (numbers["total"]["rates"]["in_flight_mean"], numbers["total"]["rates"]["in_flight_peak"]) == (
        2,
        4,
    )


def test_a_run_whose_length_is_not_fixed_yet_is_as_long_as_its_first_worker_has_got() -> None:
    """Live figures have a denominator too; without any worker there is none, and rates are null."""
    recording = merged({("w1", 0): {}, ("w1", 1): {}, ("w2", 1): {}})
    recording.length_ns = None
    assert summary(recording, META)["duration_s"] == 20
    empty = summary(Recording("r1", 0, WINDOW_NS), META)
    assert empty["duration_s"] is None
    assert set(empty["total"]["rates"].values()) == {None}


def test_failures_come_with_their_count_times_and_message_the_most_frequent_first() -> None:
    """A kind whose message was lost with its worker is still counted; cut requests are no failures."""
    counters = {
        "outcome|http_4xx|404": 2,
        "outcome|truncated|200": 5,
        "outcome|ok|200": 1,
        "outcome|cancelled|200": 9,
    }
    recording = merged({("w1", 0): {Key("short", "chat"): cell_of(counters)}}, failure())
    failures = summary(recording, META)["failures"]
    assert [(kind["outcome"], kind["status"], kind["count"]) for kind in failures] == [
        ("truncated", 200, 5),
        ("http_4xx", 404, 2),
    ]
    assert (failures[0]["first_s"], failures[0]["message"]) == (None, "")
    assert (failures[1]["first_s"], failures[1]["last_s"], failures[1]["message"]) == (2, 3, "no such model")


def test_a_share_of_failures_is_of_the_requests_of_their_scenario_that_ended_by_themselves() -> None:
    cells = {
        Key("short", "chat"): cell_of({"outcome|ok|200": 6, "outcome|http_4xx|404": 1, "outcome|cancelled|200": 5}),
        Key("short", "completions"): cell_of({"outcome|http_5xx|500": 3}),
        Key("long", "chat"): cell_of({"outcome|http_4xx|404": 4}),
    }
    found = summary(merged({("w1", 0): cells}, failure(endpoint="completions", outcome="empty")), META)["failures"]
    assert [(kind["scenario"], kind["endpoint"], kind["count"], kind["share"]) for kind in found] == [
        ("long", "chat", 4, 1.0),
        ("short", "completions", 3, 0.3),
        ("short", "chat", 1, 0.1),
        ("short", "completions", 0, 0.0),
    ]


def test_fidelity_says_how_data_were_read_and_what_each_worker_was_like() -> None:
    """The worst window counts, but not one that had hardly begun."""
    cell = cell_of({"stamped": 3, "unstamped": 1}, read_lag=[MS, 3 * MS], uncertainty=[0])
    recording = merged({("w1", 0): {Key("short", "chat"): cell}, ("w1", 1): {}, ("w1", 2): {}, ("w2", 0): {}})
    spans_and_cpu = {0: (WINDOW_NS, 2 * NS_PER_S), 1: (WINDOW_NS, 5 * NS_PER_S), 2: (1000, 1000)}
    for index, (span_ns, cpu_ns) in spans_and_cpu.items():
        gauges = recording.gauges["w1", index]
        gauges.span_ns, gauges.cpu_ns, gauges.loop_lag_ns, gauges.late = span_ns, cpu_ns, (index + 1) * MS, 1
    fidelity = summary(recording, META)["fidelity"]
    assert fidelity["stamped_share"] == 0.75
    assert fidelity["read_lag"]["max"] == 0.003
    assert fidelity["uncertainty"] == {"p50": 0, "p99": 0, "max": 0}
    worker = fidelity["workers"]["w1"]
    assert (worker["loop_lag_s"], worker["late"], worker["cpu_share_max"]) == (0.003, 3, 0.5)
    assert worker["cpu_share"] == pytest.approx(0.35)
    assert list(fidelity["workers"]) == ["w1", "w2"]


# The file


def test_a_run_is_saved_under_its_name_and_time_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Two runs of one name and second live side by side; no temporary file stays."""
    run = Run.of(merged({}), META)
    paths = [save(run, tmp_path / "results") for _ in range(3)]
    stem = tmp_path / "results" / "baseline_20260102-030405"
    assert paths == [Path(f"{stem}{suffix}") / "run.json" for suffix in ("", "-2", "-3")]
    assert [file.name for file in paths[0].parent.iterdir()] == ["run.json"]
    assert paths[0].read_bytes() == paths[2].read_bytes()
    assert paths[0].read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/passwd", "..", "", "a\x00b\x1b[2J", "会" * 300, ".hidden"])
def test_a_name_is_never_a_way_out_of_the_directory(tmp_path: Path, name: str) -> None:
    """Whatever `--name` is, the file is one level below the results."""
    path = save(Run.of(merged({}), replace(META, name=name)), tmp_path)
    assert path.parent.parent == tmp_path
    assert path.parent.resolve().parent == tmp_path.resolve()
    assert not path.parent.name.startswith(".")
    assert load(path).meta.name == name


def test_a_start_that_is_no_time_still_gives_a_file(tmp_path: Path) -> None:
    """The time of the file is a label."""
    assert save(Run.of(merged({}), Meta()), tmp_path).parent.name.startswith("run_2")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """A disk that takes no more is an error that names the flag; half a file would be a trap."""
    run = Run.of(merged({}), META)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file may grow beyond
    try:
        with pytest.raises(InputError, match=r"--results .*File too large"):
            save(run, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_found_out_early(tmp_path: Path) -> None:
    """Before the first request, with the flag that helps; a missing directory is made."""
    check_writable(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--results") as caught:
        check_writable(tmp_path / "file")
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    with pytest.raises(InputError, match="--results"):
        save(Run.of(merged({}), META), tmp_path / "file")


def test_the_file_holds_plain_values_that_a_stranger_understands(tmp_path: Path) -> None:
    """`jq .summary.total.ttft.p99` is all that a script needs."""
    cell = cell_of({"sent": 2, "outcome|ok|200": 2}, ttft=[300 * MS, 300 * MS])
    path = save(Run.of(merged({("w1", 0): {Key("short", "chat"): cell}}), META), tmp_path)
    saved = strict(path.read_bytes())
    assert list(saved) == ["format", "meta", "summary", "recording"]
    assert saved["format"] == FORMAT
    assert saved["meta"]["load"] == {"users": 5, "spawn_rate": 1.5, "run_time_s": None}
    assert saved["summary"]["total"]["ttft"]["p99"] == 0.3
    assert saved["summary"]["scenarios"]["short"]["outcomes"]["ok"] == 2
    assert saved["summary"]["total"]["e2el"]["p99"] is None


def test_a_run_is_loaded_from_its_file_or_its_directory(tmp_path: Path) -> None:
    """People type what their shell completes."""
    path = save(Run.of(merged({}), META), tmp_path)
    assert load(path).meta == load(path.parent).meta == META


def test_an_unknown_key_of_a_later_version_is_no_error(tmp_path: Path) -> None:
    """What a later version adds within a format does not stop this one."""
    path = save(Run.of(merged({}), META), tmp_path)
    saved = json.loads(path.read_text())
    saved["meta"]["colour"] = "blue"
    path.write_text(json.dumps(saved))
    assert load(path).meta == META


def test_a_file_that_lost_its_end_is_called_truncated(tmp_path: Path) -> None:
    """Wherever it was cut, an interrupted copy is named as what it is."""
    path = save(Run.of(merged({("w1", 0): {Key("short", "chat"): cell_of(ttft=[1])}}), META), tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"run\.json: truncated"):
            load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<html>", "not JSON"),
        ('{"format": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON|truncated"),
        ('{"format": "\udcff"}', "not JSON"),
        ("[]", "no run file of vllm-locust"),
        ('{"date": "20260102", "backend": "vllm"}', "no run file of vllm-locust"),
        (
            '{"format": 99, "meta": {"plugin_version": "9\\u001b"}, "recording": {}}',
            r"format 99, written by .*'9\\x1b'",
        ),
        ('{"format": 1, "meta": {}, "recording": {}}', "damaged"),
        ('{"format": 1, "meta": [], "recording": {"format": 1}}', "damaged"),
    ],
)
def test_a_file_that_is_no_run_is_an_error_of_the_user(tmp_path: Path, content: str, message: str) -> None:
    """One message with the path, never a traceback."""
    path = tmp_path / "other.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(InputError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["length_ns", "windows", "gauges", "failures", "window_ns"])
def test_a_file_with_a_damaged_recording_is_an_error_of_the_user(tmp_path: Path, damage: str) -> None:
    """Someone edited it, or a disk did."""
    cells = {Key("short", "chat"): cell_of({"outcome|ok|200": 1}, ttft=[1])}
    path = save(Run.of(merged({("w1", 0): cells}), META), tmp_path)
    saved = json.loads(path.read_text())
    for value in ("x", [["x"]], [{"index": 0, "cells": [{"key": ["a"], "histograms": 5}]}]):
        path.write_text(json.dumps(saved | {"recording": saved["recording"] | {damage: value}}))
        with pytest.raises(InputError, match="damaged"):
            load(path)


def test_a_path_to_nothing_says_what_to_give(tmp_path: Path) -> None:
    """A file that is not there, and a directory without one."""
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InputError, match=r"no such file; give a run\.json or its directory"):
            load(path)


# Guarantees

words = st.one_of(st.text(max_size=8), st.sampled_from(["short", "long", "会話", "\ud800", "\x00\x1b"]))
values = st.one_of(st.integers(0, 10**11), st.integers(0, 2**62))


@st.composite
def cells_of(draw: st.DrawFn) -> Cell:
    """Draw a cell of any samples and counts."""
    cell = cell_of(**draw(st.dictionaries(st.sampled_from([*METRICS, "read_lag"]), st.lists(values, max_size=4))))
    kinds = [f"outcome|{outcome}|{status}" for outcome in Outcome for status in (0, 200, 429)]
    names = st.sampled_from(["sent", "tokens_received", "token_events", "stamped", "finish|stop", *COUNTS, *kinds])
    cell.counters = draw(st.dictionaries(names, st.integers(0, 10**12)))
    return cell


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a run of several workers, windows and scenarios, with any words in it."""
    keys = st.builds(Key, words.filter(encodable), st.just("chat"), st.sampled_from(["steady", "warmup"]))
    places = st.tuples(st.sampled_from(["w1", "w2"]), st.integers(0, 3))
    states = draw(st.dictionaries(places, st.dictionaries(keys, cells_of(), max_size=2), max_size=4))
    failures = [failure(message=message) for message in draw(st.lists(words, max_size=2))]
    recording = merged(dict(sorted(states.items())), *failures, loop_lag_ns=draw(values), cpu_ns=draw(values))
    recording.length_ns = draw(st.one_of(st.none(), st.integers(0, 5 * WINDOW_NS)))
    meta = replace(META, name=draw(words), parts=draw(st.lists(words.filter(encodable), max_size=2)))
    return Run.of(recording, replace(meta, remarks=draw(st.lists(words.filter(encodable), max_size=2))))


def encodable(word: str) -> bool:
    """Tell whether UTF-8 has the word; half a surrogate pair is saved as an escape, as another word."""
    return word.isascii() or "\ud800" not in word


def strict(data: bytes) -> Any:
    """Parse JSON and refuse what Python's parser lets pass."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_a_loaded_run_has_the_numbers_and_the_report_of_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, run: Run
) -> None:
    """Whatever was recorded: strict JSON, the same summary to the last digit, the same text."""
    path = save(run, tmp_path_factory.mktemp("results"))
    assert strict(path.read_bytes())["format"] == FORMAT
    loaded = load(path)
    messages = [kind.pop("message") for kind in loaded.summary["failures"]]
    assert messages == [escaped(kind.pop("message")) for kind in run.summary["failures"]]
    assert loaded.summary == run.summary
    loaded, run = load(path), Run.of(run.recording, run.meta)
    assert text(loaded, full=True) == text(run, full=True)
    assert load(save(loaded, path.parent)).summary == loaded.summary


def escaped(message: str) -> str:
    """Return what UTF-8 can hold of a text."""
    return message.encode("utf-8", "backslashreplace").decode()


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_percentiles_are_ordered_in_every_summary(run: Run) -> None:
    """`min <= p50 <= p90 <= p95 <= p99 <= max`, or all of them are null."""
    for scope in (run.summary["total"], *run.summary["scenarios"].values()):
        for metric in METRICS:
            row = [scope[metric][key] for key in ("min", "p50", "p90", "p95", "p99", "max")]
            assert row == sorted(row) if scope[metric]["count"] else row == [None] * 6


def test_a_file_from_before_limits_waits_and_stalls_still_loads(tmp_path: Path) -> None:
    """What it does not have is absent, and judged by the defaults."""
    recording = merged({("w1", 0): {Key("short", "chat"): cell_of({"token_events": 1})}}, cpu_ns=NS_PER_S, late=3)
    path = save(Run.of(recording, META), tmp_path)
    saved = json.loads(path.read_text())
    del saved["meta"]["generator_limits"]
    for gauges in saved["recording"]["gauges"]:
        del gauges[-2:]
    path.write_text(json.dumps(saved))
    run = load(path)
    assert run.meta.generator_limits == DEFAULTS
    worker = run.summary["fidelity"]["workers"]["w1"]
    assert (worker["late"], worker["core_wait_share"], worker["stalled_share"]) == (3, None, 0)
    assert "wait for a core unknown here" in " ".join(text(run).split())


def test_limits_come_back_with_the_run(tmp_path: Path) -> None:
    limits = Limits(cpu=0.5, given=("cpu",))
    run = Run.of(merged({("w1", 0): {}}), replace(META, generator_limits=limits))
    assert load(save(run, tmp_path)).meta.generator_limits == limits
