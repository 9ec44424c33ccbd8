"""The recording: whatever the network does to reports, the totals are those of the samples."""

import json
import subprocess
import sys
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windowed import merge_cells

from vllm_locust.cell import Cell, Cells, Key, select, total
from vllm_locust.grid import Grid
from vllm_locust.histogram import Histogram
from vllm_locust.recording import (
    FORMAT,
    Failure,
    Gauges,
    Mark,
    Recording,
    Report,
    WindowState,
    decode_report,
    encode_report,
    from_wire,
    load,
    to_wire,
)

S = 1_000_000_000
NAMES = ['a/b "q"', "new\nline\\", "会話 🙂", "", "short"]

names = st.one_of(st.sampled_from(NAMES), st.text(max_size=8))
keys = st.builds(
    Key, names, st.sampled_from(["chat", "completions"]), st.sampled_from(["steady", "warmup"]), st.integers(0, 2)
)
few_keys = st.sampled_from([Key(NAMES[0], "chat"), Key(NAMES[2], "chat", "warmup"), Key("short", "completions")])
metrics = st.sampled_from(["ttft", "itl", "tpot"])
sizes = st.one_of(st.just(0), st.integers(1, 10**4), st.integers(1, 10**13))


def plain(cells: Cells) -> dict[Key, tuple[dict[str, tuple[Any, ...]], dict[str, int]]]:
    """Return cells as values that compare; what is empty is left out."""
    return {
        key: (
            {m: (dict(h), h.count, h.sum, h.min, h.max) for m, h in cell.histograms.items()},
            dict(cell.counters),
        )
        for key, cell in cells.items()
        if cell.histograms or cell.counters
    }


def all_windows(recording: Recording) -> Cells:
    """Return the sum of the windows, those behind the run included."""
    cells: Cells = {}
    for index in range(50):
        merge_cells(cells, recording.window(index))
    return cells


@st.composite
def cells_of(draw: st.DrawFn, key: st.SearchStrategy[Key] = keys) -> Cells:
    cells: Cells = {}
    for k, metric, value in draw(st.lists(st.tuples(key, metrics, sizes), max_size=12)):
        cell = cells.setdefault(k, Cell())
        cell.histogram(metric).add(value)
        cell.count(f"{metric}|n")
    return cells


def report_of(*windows: WindowState, worker: str = "w1", seq: int = 1, **changed: Any) -> Report:
    fields: dict[str, Any] = {"run": "r", "epoch": 0, "now_ns": 0, "failures": [], **changed}
    return Report(worker=worker, seq=seq, windows=list(windows), **fields)


def state(index: int, cells: Cells, *, seq: int = 1, sealed: bool = False, **gauges: int) -> WindowState:
    return WindowState(index=index, seq=seq, sealed=sealed, gauges=Gauges(**gauges), cells=to_wire(cells))


def one_sample(value: int = 7) -> Cells:
    cell = Cell()
    cell.histogram("ttft").add(value)
    cell.count("sent")
    return {Key("short", "chat"): cell}


class Worker:
    """What the protocol asks of a worker, in its simplest form; beside it, what really happened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.oldest_open = 0
        self.windows: dict[int, Cells] = {0: {}}
        self.truth: dict[int, Cells] = defaultdict(dict)

    def work(self, ahead: int, key: Key, metric: str, value: int) -> None:
        index = self.oldest_open + ahead
        for cells in (self.windows.setdefault(index, {}), self.truth[index]):
            cell = cells.setdefault(key, Cell())
            cell.histogram(metric).add(value)
            cell.count("samples")

    def seal(self) -> None:
        self.windows.setdefault(self.oldest_open, {})
        self.oldest_open += 1

    def report(self) -> bytes:
        self.seq += 1
        states = [
            state(index, cells, seq=self.seq, sealed=index < self.oldest_open, late=count_of(cells))
            for index, cells in sorted(self.windows.items())
        ]
        return encode_report(report_of(*states, worker=self.name, seq=self.seq))

    def acknowledge(self, report: Report) -> None:
        """Drop what was final in a report that the master has."""
        for window in report.windows:
            if window.sealed:
                self.windows.pop(window.index, None)


def count_of(cells: Cells) -> int:
    return sum(cell.counters.get("samples", 0) for cell in cells.values())


class Cluster:
    """Three workers, a master, and a network that keeps every message, so that each may come again at any time."""

    def __init__(self) -> None:
        self.workers = {name: Worker(name) for name in ("w0", "w1", "w2")}
        self.master = Recording("r", 0, 10 * S)
        self.sent: list[bytes] = []

    def work(self, worker: str, ahead: int, key: Key, metric: str, value: int) -> None:
        self.workers[worker].work(ahead, key, metric, value)

    def seal(self, worker: str) -> None:
        self.workers[worker].seal()

    def report(self, worker: str) -> None:
        self.sent.append(self.workers[worker].report())

    def deliver(self, number: int, acknowledged: bool) -> None:  # noqa: FBT001 - drawn
        if self.sent:
            report = decode_report(self.sent[number % len(self.sent)])
            assert self.master.merge(report)
            assert plain(self.master.totals) == plain(all_windows(self.master))
            if acknowledged:
                self.workers[report.worker].acknowledge(report)

    def finish(self, random: Random) -> None:
        """Seal what is open, report it, and deliver all that was ever sent in any order."""
        for worker in self.workers.values():
            while max(worker.windows, default=-1) >= worker.oldest_open:
                worker.seal()
            self.report(worker.name)
        for number in random.sample(range(len(self.sent)), len(self.sent)):
            self.deliver(number, acknowledged=True)

    def truth(self, index: int) -> Cells:
        cells: Cells = {}
        for worker in self.workers.values():
            merge_cells(cells, worker.truth.get(index, {}))
        return cells


worker_names = st.sampled_from(["w0", "w1", "w2"])
actions = st.one_of(
    st.tuples(st.just(Cluster.work), worker_names, st.integers(0, 2), few_keys, metrics, sizes),
    st.tuples(st.just(Cluster.seal), worker_names),
    st.tuples(st.just(Cluster.report), worker_names),
    st.tuples(st.just(Cluster.deliver), st.integers(0, 99), st.booleans()),
)


@settings(max_examples=150)
@given(st.lists(actions, max_size=60), st.randoms(use_true_random=False))
def test_reports_lost_repeated_reordered_or_late_change_nothing(script: list[Any], random: Random) -> None:
    cluster = Cluster()
    for action, *arguments in script:
        action(cluster, *arguments)
    cluster.finish(random)
    master, workers = cluster.master, cluster.workers
    assert [plain(master.window(i)) for i in range(50)] == [plain(cluster.truth(i)) for i in range(50)]
    for name, worker in workers.items():
        seen = {index: count_of(cells) for index, cells in worker.truth.items()}
        assert {index: master.gauges[name, index].late for index in seen} == seen
        assert master.closed_windows([name]) == worker.oldest_open
    assert master.closed_windows() == min(worker.oldest_open for worker in workers.values())
    assert master.stale == 0


@given(st.lists(cells_of(few_keys), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_state_that_grew_replaces_its_predecessor_and_an_older_one_changes_nothing(
    growth: list[Cells], random: Random
) -> None:
    states, grown = [], {}
    for seq, more in enumerate(growth, 1):
        merge_cells(grown, more)
        states.append(report_of(state(0, grown, seq=seq), seq=seq))
    expected = plain(grown)
    random.shuffle(states)
    master = Recording("r", 0, 10 * S)
    for report in [*states, *states]:
        master.merge(report)
    assert plain(master.totals) == plain(master.window(0)) == expected


@given(cells_of(), st.lists(st.tuples(names, names), max_size=4))
def test_case_61_a_report_that_travelled_is_the_report_that_was_sent(
    cells: Cells, messages: list[tuple[str, str]]
) -> None:
    failures = [
        Failure(scenario=s, endpoint="chat", outcome="http_5xx", status=503, first_ns=1, last_ns=2, message=text)
        for s, text in messages
    ]
    report = report_of(state(3, cells, seq=9, sealed=True, span_ns=10**10, cpu_ns=7), seq=9, failures=failures)
    expected = plain(cells)
    # As Locust sends it, and as a reader with the strictest settings would take it.
    travelled = msgpack.packb(("vllm_locust:report", {"report": encode_report(report)}, "host_1"))
    for options in ({"raw": False, "strict_map_key": False}, {}):
        received = decode_report(msgpack.unpackb(travelled, **options)[1]["report"])
        assert received == report
        assert plain(from_wire(received.windows[0].cells)) == expected
        master = Recording("r", 0, 10 * S)
        assert master.merge(received)
        assert plain(master.totals) == expected


@given(st.binary(max_size=200))
def test_bytes_that_are_no_report_are_refused_as_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_report(data)


@given(cells_of(few_keys), st.integers(0, 10**6))
def test_a_report_that_was_cut_short_is_refused(cells: Cells, cut: int) -> None:
    data = encode_report(report_of(state(0, cells)))
    with pytest.raises(ValueError, match=r".+"):
        decode_report(data[: cut % len(data)])


def test_a_report_of_another_format_is_refused_with_both_versions() -> None:
    other = msgspec.structs.replace(report_of(), format=FORMAT + 1)
    with pytest.raises(ValueError, match=f"format {FORMAT + 1}.*format {FORMAT}"):
        decode_report(encode_report(other))


@pytest.mark.parametrize(("run", "epoch"), [("older", 0), ("r", 0), ("r", 2)])
def test_case_57_a_report_of_another_run_or_epoch_is_dropped_and_counted(run: str, epoch: int) -> None:
    master = Recording("r", 1, 10 * S)
    master.merge(report_of(state(0, one_sample()), epoch=1))
    before = deepcopy(master.save())
    assert not master.merge(report_of(state(1, one_sample(9)), run=run, epoch=epoch, worker="w2"))
    assert master.save() == before
    assert (master.stale, master.workers) == (1, ["w1"])


@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_case_59_the_size_of_a_report_is_bounded_by_buckets_not_by_requests(spread: float) -> None:
    """Two full windows at once, which is more than at the seam between them; the wider spread is over four decades."""
    cells: Cells = {}
    rng = np.random.default_rng(1)
    for scenario in ("short", "long", "longform", "code"):
        cell = cells[Key(scenario, "chat")] = Cell()
        for metric in range(10):
            samples = rng.lognormal(17, spread, 50_000 if metric < 3 else 500)  # per token event, per request
            cell.histogram(f"metric_{metric}").add_array(samples.astype(np.int64))
        cell.count("token_events", 10**9)
    report = report_of(state(0, cells, sealed=True), state(1, cells))
    encoded = encode_report(report)
    assert len(encoded) < 50_000
    assert decode_report(encoded) == report
    before = len(encoded)
    for cell in cells.values():
        for histogram in cell.histograms.values():
            histogram.merge(histogram.copy())
    assert len(encode_report(report_of(state(0, cells, sealed=True), state(1, cells)))) < before * 1.5


@pytest.mark.parametrize("value", [b"\xa1\xff", b"\x91" * 100_000])
def test_a_report_that_is_no_utf_8_or_has_no_bottom_is_refused(value: bytes) -> None:
    for key in (b"\xa3run", b"\xa5other"):
        with pytest.raises(ValueError, match=r".+"):
            decode_report(b"\x81" + key + value)


def test_a_large_report_that_was_damaged_is_refused() -> None:
    cells = {Key("short", "chat"): Cell({f"metric_{n}": Histogram() for n in range(5000)})}
    data = encode_report(report_of(state(0, cells)))
    assert decode_report(data)
    for damaged in (data[:-9], data[:40] + bytes(40) + data[80:]):
        with pytest.raises(ValueError, match="compressed"):
            decode_report(damaged)


@settings(max_examples=60)
@given(st.data())
def test_a_recording_that_was_saved_as_json_and_loaded_is_the_same(data: st.DataObject) -> None:
    master = Recording("r", 3, 10 * S)
    for worker in ("w 1 (höst)", "w2"):
        windows = [
            state(index, data.draw(cells_of()), sealed=data.draw(st.booleans()), in_flight_peak=index)
            for index in range(data.draw(st.integers(0, 3)))
        ]
        failure = Failure(
            scenario="会話", endpoint="chat", outcome="empty", status=200, first_ns=5, last_ns=9, message='"\n'
        )
        master.merge(report_of(*windows, worker=worker, epoch=3, failures=[failure]))
    master.marks.append(Mark(at_ns=4, text="worker 2 lost"))
    master.length_ns = data.draw(st.one_of(st.none(), st.integers(1, 25 * S)))
    saved = json.dumps(master.save(), allow_nan=False)
    again = load(json.loads(saved))
    assert json.dumps(again.save(), allow_nan=False) == saved
    assert plain(again.totals) == plain(master.totals)
    assert plain(again.within()) == plain(master.within())
    assert (again.gauges, again.failures, again.marks) == (master.gauges, master.failures, master.marks)
    assert (again.run, again.epoch, again.window_ns, again.length_ns) == ("r", 3, 10 * S, master.length_ns)
    assert again.window_count == master.window_count


@pytest.mark.parametrize("saved", [{}, {"format": FORMAT + 1}, {"format": None}, {"format": str(FORMAT)}])
def test_a_file_of_another_format_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"this is format {FORMAT}"):
        load(saved)


def test_what_came_after_the_stop_counts_in_totals_but_not_within_the_run() -> None:
    """A run of 15 s has a window of ten seconds and one of five; behind them is what streams that ran out brought."""
    master = Recording("r", 0, 10 * S)
    master.merge(report_of(*(state(index, one_sample(index), sealed=True) for index in range(3))))
    assert master.window_count == 3
    master.length_ns = 15 * S
    assert master.window_count == 2
    assert total(master.within().values()).histograms["ttft"].sum == 0 + 1
    assert total(master.totals.values()).histograms["ttft"].sum == 0 + 1 + 2


def test_a_window_counts_before_it_is_sealed_and_is_closed_only_when_every_worker_sealed_it() -> None:
    master = Recording("r", 0, 10 * S)
    master.merge(report_of(state(0, one_sample()), worker="w1"))
    master.merge(report_of(state(0, one_sample(), sealed=True), state(1, one_sample()), worker="w2"))
    assert total(master.window(0).values()).counters["sent"] == 2
    assert (master.closed_windows(), master.closed_windows(["w2"]), master.closed_windows([])) == (0, 1, 0)
    master.merge(report_of(state(0, one_sample(), seq=2, sealed=True), worker="w1", seq=2))
    assert master.closed_windows() == 1
    assert master.workers == ["w1", "w2"]


def test_a_worker_that_never_reported_closes_nothing() -> None:
    master = Recording("r", 0, 10 * S)
    master.merge(report_of(state(0, one_sample(), sealed=True), worker="w1"))
    assert master.closed_windows(["w1", "w2"]) == 0


def test_windows_in_which_nothing_happened_exist_and_are_empty() -> None:
    master = Recording("r", 0, 10 * S)
    master.merge(report_of(state(0, {}), state(1, {}), state(2, one_sample())))
    assert master.window_count == 3
    assert master.window(1) == {}
    assert ("w1", 1) in master.gauges


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_failures_of_a_kind_keep_the_first_and_last_time_and_the_earliest_message_in_any_order(
    seen: list[tuple[int, int, str]], random: Random
) -> None:
    expected = (min(s[0] for s in seen), max(s[0] + s[1] for s in seen), min((s[0], s[2]) for s in seen)[1])
    reports = [
        report_of(
            worker=f"w{i}",
            failures=[
                Failure(
                    scenario="s",
                    endpoint="chat",
                    outcome="empty",
                    status=200,
                    first_ns=first,
                    last_ns=first + lasting,
                    message=message,
                )
            ],
        )
        for i, (first, lasting, message) in enumerate(seen)
    ]
    random.shuffle(reports)
    master = Recording("r", 0, 10 * S)
    for report in [*reports, *reports]:
        master.merge(report)
    (found,) = master.failures.values()
    assert (found.first_ns, found.last_ns, found.message) == expected


def test_failures_of_another_status_are_of_another_kind() -> None:
    failures = [
        Failure(scenario="s", endpoint="chat", outcome="http_5xx", status=code, first_ns=0, last_ns=0, message="")
        for code in (500, 503)
    ]
    master = Recording("r", 0, 10 * S)
    master.merge(report_of(failures=failures))
    assert sorted(kind[3] for kind in master.failures) == [500, 503]


@given(st.lists(cells_of(few_keys), max_size=5))
def test_the_total_of_cells_is_a_new_cell_with_the_sum_of_all(parts: list[Cells]) -> None:
    everything = [cell for cells in parts for cell in cells.values()]
    before = [plain(cells) for cells in parts]
    expected_counts: dict[str, int] = defaultdict(int)
    for cell in everything:
        for name, number in cell.counters.items():
            expected_counts[name] += number
    summed = total(everything)
    assert summed.counters == expected_counts
    assert summed.histograms.get("ttft", Histogram()).count == expected_counts.get("ttft|n", 0)
    summed.histogram("ttft").add(1)
    assert [plain(cells) for cells in parts] == before


def test_a_sliver_at_the_end_of_a_run_is_no_window_of_its_own() -> None:
    """Timers are late: a run of 300 s has 30 windows, though it is stopped half a millisecond later."""
    recording = Recording("r", 0, 10 * S)
    recording.grid = recording.grid.moved([15 * S])
    lengths = (300 * S + 541_000, 300 * S, 299 * S, 301 * S, 541_000, 15 * S + 1)
    assert [recording.whole_ns(length_ns) for length_ns in lengths] == [
        *(300 * S + 541_000, 300 * S, 299 * S, 301 * S, 541_000, 15 * S),
    ]
    assert Recording("r", 0, 10 * S).whole_ns(300 * S + 541_000) == 300 * S


def test_cells_are_selected_by_scenario_and_phase() -> None:
    cells = {Key(s, "chat", phase): Cell() for s in ("short", "long") for phase in ("warmup", "steady")}
    assert list(select(cells, scenario="long", phase="steady")) == [cells[Key("long", "chat", "steady")]]
    assert len(list(select(cells, scenario="long"))) == len(list(select(cells, phase="warmup"))) == 2
    assert len(list(select(cells))) == 4


@pytest.mark.parametrize(("length_ns", "windows"), [(0, 0), (1, 1), (10 * S, 1), (10 * S + 1, 2), (305 * S, 31)])
def test_case_50_a_partial_last_window_is_a_window(length_ns: int, windows: int) -> None:
    assert Grid(10 * S).count(length_ns) == windows


def test_a_worker_that_was_cut_off_adds_to_windows_that_were_put_away() -> None:
    """It is back with all that it had sealed meanwhile, while the others are far ahead."""
    master, truth = Recording("r", 0, 10 * S), defaultdict[int, Cells](dict)
    sealed = {w: [{Key("short", "chat"): Cell()} for _ in range(40)] for w in ("w1", "w2")}
    for worker, windows in sealed.items():
        for index, cells in enumerate(windows):
            cell = cells[Key("short", "chat")]
            cell.histogram("ttft").add_array(np.arange(index, 9 * index, len(worker) + index % 3) * 1000)
            cell.count("sent", index)
            merge_cells(truth[index], cells)
    states = {w: [state(i, cells, sealed=True) for i, cells in enumerate(c)] for w, c in sealed.items()}
    for late in range(0, 40, 20):
        for index in range(late, late + 20):
            master.merge(report_of(states["w1"][index], worker="w1"))
        master.merge(report_of(*states["w2"][late : late + 20], worker="w2"))
    assert [plain(master.window(index)) for index in range(40)] == [plain(truth[index]) for index in range(40)]
    assert plain(all_windows(master)) == plain(master.totals)


def test_a_window_whose_sum_is_beyond_64_bits_is_put_away_like_any_other() -> None:
    """No report carries one, but two may add up to it: tokens are what servers claim."""
    master = Recording("r", 0, 10 * S)
    large = {Key("short", "chat"): Cell()}
    large[Key("short", "chat")].histogram("input_tokens").add(2**62, times=3)
    for worker in ("w1", "w2"):
        master.merge(report_of(*(state(index, large, sealed=True) for index in range(4)), worker=worker))
    sums = [total(master.window(index).values()).histograms["input_tokens"].sum for index in range(4)]
    assert sums == [6 * 2**62] * 4


@pytest.mark.parametrize("windows", [400, pytest.param(8640, marks=pytest.mark.long)])
def test_a_day_of_windows_costs_less_than_200_mb_and_saving_it_hardly_more(tmp_path: Path, windows: int) -> None:
    """8,640 windows of 10 s are a day; a process that is short of memory at its end has measured for nothing."""
    script = Path(__file__).parent / "day.py"
    command = [sys.executable, str(script), str(windows), str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
    share = windows / 8640
    assert 50 * share < found["grown"] < 200 * share, found
    assert found["peak"] < found["grown"] + 15, found
    assert found["file"] < 400 * share, found
