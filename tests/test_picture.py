"""What is drawn is what was measured: columns add up, merged ones are exact, and who polls has what a reload has."""

import json
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windowed import Traffic, log_normal, recorded

from vllm_locust import picture
from vllm_locust.cell import STEADY, WARMUP, Cell, Cells, Key, total
from vllm_locust.exporter import Snapshot
from vllm_locust.fidelity import DEFAULTS
from vllm_locust.histogram import Histogram
from vllm_locust.live import Live
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Gauges, Mark, Recording, Report, WindowState, to_wire
from vllm_locust.results import Run
from vllm_locust.summary import Meta

MS = NS_PER_S // 1000
MIXED = {"short": Traffic(40), "long": Traffic(12, ttft_s=0.4)}


def drawn(recording: Recording, every: int = 1) -> list[dict[str, Any]]:
    return [*picture.columns(recording, DEFAULTS, every=every, first=0, closed=recording.window_count)]


# Columns


@given(windows=st.integers(1, 40), every=st.sampled_from([1, 2, 5, 10]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_columns_add_up_to_the_run_however_many_windows_each_covers(windows: int, every: int, seed: int) -> None:
    recording = log_normal(seed, MIXED, windows)
    columns = drawn(recording, every)
    assert [column["index"] for column in columns] == [*range(-(-windows // every))]
    assert [column["end_s"] for column in columns[:-1]] == [column["start_s"] for column in columns[1:]]
    totals = recording.totals
    for name in ("", *MIXED):
        every_cell = total(cell for key, cell in totals.items() if name in ("", key.scenario))
        scopes = [column["scopes"].get(name) for column in columns]
        told = [scope for scope in scopes if scope is not None]
        assert sum(scope["sent"] for scope in told) == every_cell.counters["sent"]
        assert sum(scope["outcomes"].get("ok", 0) for scope in told) == every_cell.counters["outcome|ok|200"]
        assert sum(scope["ttft"]["count"] for scope in told) == every_cell.histogram("ttft").count
        for scope in told:
            assert sum(number for _, number in scope["ttft"]["heat"]) == scope["ttft"]["count"]


def test_a_column_of_several_windows_has_the_percentiles_of_all_their_samples() -> None:
    recording = log_normal(1, {"short": Traffic(100)}, 6)
    merged = Histogram()
    for index in range(5):
        merged.merge(total(recording.window(index).values()).histogram("ttft"))
    p50, p95, p99 = (value and value / NS_PER_S for value in merged.percentiles([0.5, 0.95, 0.99]))
    first, last = drawn(recording, 5)
    told = first["scopes"][""]["ttft"]
    assert [told["p50"], told["p95"], told["p99"]] == pytest.approx([p50, p95, p99], abs=1e-9)
    assert (first["end_s"], last["end_s"]) == (50, 60)


@given(windows=st.integers(0, 200_000))
def test_there_are_never_more_columns_than_can_be_seen_and_no_fewer_than_need_be(windows: int) -> None:
    every = picture.windows_per_column(windows)
    assert -(-windows // every) <= picture.MOST
    assert str(every).strip("0") in ("1", "2", "5")
    assert every == 1 or windows > picture.MOST * every // (2.5 if str(every)[0] == "5" else 2)


def test_a_column_without_a_sample_has_nulls_and_no_zeros() -> None:
    recording = recorded([{Key("short", "chat"): Cell(counters={"sent": 1})}, {}])
    first, second = drawn(recording)
    for column in (first, second):
        scope = column["scopes"][""]
        assert scope["ttft"] == {"count": 0, "p50": None, "p95": None, "p99": None, "max": None, "heat": []}
        assert scope["offered_per_s"] is None
        assert column["fidelity"] is None
    assert list(second["scopes"]) == [""]


def test_the_warm_up_is_drawn_and_what_was_sent_in_it_is_not_in_later_columns() -> None:
    cold, warm = Cell(), Cell()
    cold.histogram("ttft").add(900 * MS, 3)
    warm.histogram("ttft").add(100 * MS, 5)
    both: Cells = {Key("short", "chat", WARMUP): cold, Key("short", "chat", STEADY): warm}
    recording = recorded([{Key("short", "chat", WARMUP): cold}, both])
    recording.steady_ns = 10 * NS_PER_S
    recording.grid = recording.grid.moved([recording.steady_ns])
    first, second = drawn(recording)
    assert (first["steady"], first["scopes"][""]["ttft"]["count"]) == (False, 3)
    assert (second["steady"], second["scopes"][""]["ttft"]["count"]) == (True, 5)


def test_offered_is_0_for_a_scenario_that_was_not_due_and_absent_in_a_closed_loop() -> None:
    due, other = Cell(counters={"scheduled": 20, "sent": 10}), Cell(counters={"token_events": 1})
    (column,) = drawn(recorded([{Key("short", "chat"): due, Key("long", "chat"): other}]))
    rates = {name: scope["offered_per_s"] for name, scope in column["scopes"].items()}
    assert rates == {"": 2.0, "short": 2.0, "long": 0.0}


def test_a_generator_that_was_busy_in_a_window_is_told_of_that_window_alone() -> None:
    cell = Cell(counters={"token_events": 5, "stamped": 5})
    busy = {1: {"cpu_ns": round(9.5 * NS_PER_S)}}
    columns = drawn(recorded([{Key("short", "chat"): cell} for _ in range(3)], gauges=busy))
    assert [column["fidelity"]["limited"] for column in columns] == [False, True, False]
    assert "95 % of a core" in columns[1]["fidelity"]["text"]


@given(values_ns=st.lists(st.integers(0, 10**13), max_size=50))
def test_every_sample_is_in_its_cell_of_the_heat_map(values_ns: list[int]) -> None:
    histogram = Histogram()
    histogram.add_array(np.array(values_ns, np.int64))
    cells = picture.heat(histogram)
    assert sum(number for _, number in cells) == len(values_ns)
    assert [cell for cell, _ in cells] == sorted({cell for cell, _ in cells})
    numbers = dict(cells)
    for value_ns in values_ns:
        # A histogram knows a value within 0.5 %.
        edges_ns = [1000 * 10 ** (cell / 10) for cell in (0, *range(1, 140))]
        lower = np.searchsorted(edges_ns, value_ns * 0.995, side="right") - 1
        upper = np.searchsorted(edges_ns, value_ns * 1.005, side="right") - 1
        assert any(numbers.get(max(int(cell), 0)) for cell in (lower, upper))


def test_the_picture_of_a_saved_run_is_strict_json_with_its_tables_verdict_and_marks() -> None:
    recording = log_normal(3, MIXED, 4)
    recording.marks = [Mark(at_ns=12 * NS_PER_S, text="worker 2 </script> lost")]
    meta = Meta(run="r1", parts=["short", "long"], limits=["short: ttft p95 < 1ms"], target="http://x")
    told = json.loads(json.dumps(picture.of_run(Run.of(recording, meta)), allow_nan=False))
    assert (told["state"], told["length_s"], told["next"]) == ("stopped", 40, len(told["columns"]))
    assert told["marks"] == [{"at_s": 12, "text": "worker 2 </script> lost"}]
    assert told["limits"][0]["scope"] == "short"
    assert told["limits"][0]["bound"] == 0.001
    assert "limit is < 1ms" in " ".join(told["verdict"])
    assert told["verdict"][-1] == "exit code 3"
    assert [row[0] for row in told["tables"]["run"]["rows"]] == ["short", "long", "all"]
    assert [row[0] for row in told["tables"]["window"]["rows"]] == ["short", "long", "all"]
    assert [row[0] for row in told["tables"]["facts"]["rows"]] == ["Rates", "Streams"]
    assert told["tables"]["failures"] is None
    widths = {name: len(table["columns"]) for name, table in told["tables"].items() if table is not None}
    assert all(len(row) == widths[name] for name in widths for row in told["tables"][name]["rows"])


# Live


class Master:
    """The owner of a recording whose workers report as a strategy says, and a browser that polls."""

    def __init__(self) -> None:
        self.runs = count()
        self.recording: Recording | None = None
        self.running = False
        self.sealed = {"a": 0, "b": 0}
        self.seqs = count(1)
        self.live: set[str] = set()
        self.server = Live(self.snapshot)
        self.server._told_s = -1e9
        self.version, self.next, self.shown = "", 0, list[dict[str, Any]]()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            recording=self.recording,
            running=self.running,
            users=1,
            workers=len(self.live),
            live_workers=tuple(sorted(self.live)),
            meta=None if self.recording is None else Meta(parts=["short"]),
        )

    def act(self, action: str, worker: str) -> None:
        if action == "start":
            self.recording = Recording(f"r{next(self.runs)}", 0, NS_PER_S)
            self.recording.steady_ns = AT_THE_LATEST_NS
            self.running, self.live = True, {"a", "b"}
            self.sealed = dict.fromkeys(self.sealed, 0)
        elif self.recording is None:
            return
        elif action in ("report", "seal") and self.running:
            self._report(worker, sealed=action == "seal")
        elif action == "lose":
            self.live.discard(worker)
        elif action == "return":
            self.live.add(worker)
        elif action == "steady" and self.recording.steady_ns == AT_THE_LATEST_NS:
            self.recording.steady_ns = max(self.sealed.values()) * NS_PER_S
        elif action == "stop":
            self.running = False
            self.recording.length_ns = max(1, *self.sealed.values()) * NS_PER_S

    def _report(self, worker: str, *, sealed: bool) -> None:
        assert self.recording is not None
        index, seq = self.sealed[worker], next(self.seqs)
        cell = Cell(counters={"sent": seq, "token_events": 1})
        cell.histogram("ttft").add(seq * MS, seq)
        window = WindowState(
            index=index,
            seq=seq,
            sealed=sealed,
            gauges=Gauges(span_ns=NS_PER_S, users_last=seq),
            cells=to_wire({Key("short", "chat"): cell}),
        )
        merged = self.recording.merge(
            Report(
                run=self.recording.run,
                epoch=0,
                worker=worker,
                seq=seq,
                now_ns=seq,
                windows=[window],
                failures=[],
            )
        )
        assert merged
        self.sealed[worker] += sealed

    def poll(self) -> None:
        """Do what the page does."""
        self.server._told_s = -1e9  # as if a second had passed
        told = json.loads(self.server.picture(self.version, self.next))
        self.version, self.next = told["version"], told["next"]
        self.shown = [column for column in self.shown if column["index"] < told["from"]] + told["columns"]


AT_THE_LATEST_NS = 1000 * NS_PER_S
"""When a warm-up ends that nothing ends before: an end that moves is never earlier than what has been reported."""
ACTIONS = ("start", "report", "report", "seal", "seal", "seal", "lose", "return", "steady", "stop")


@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(["a", "b"]), st.booleans()), max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_who_polls_at_any_moments_has_at_the_end_what_a_reload_has(actions: list[tuple[str, str, bool]]) -> None:
    master = Master()
    for action, worker, polls in [("start", "a", True), *actions]:
        master.act(action, worker)
        if polls:
            master.poll()
    master.poll()
    fresh = json.loads(Live(master.snapshot).picture())
    assert master.shown == fresh["columns"]
    assert fresh["from"] == 0
    assert [column["index"] for column in master.shown] == [*range(len(master.shown))]


def test_columns_that_last_do_not_travel_again() -> None:
    master = Master()
    master.act("start", "a")
    for _ in range(5):
        master.act("seal", "a")
        master.act("seal", "b")
    master.act("report", "a")
    first = json.loads(master.server.picture())
    again = json.loads(master.server.picture(first["version"], first["next"]))
    assert (first["next"], len(first["columns"])) == (5, 6)
    assert [column["index"] for column in again["columns"]] == [5]


def test_before_the_first_run_there_is_an_empty_picture() -> None:
    assert json.loads(Master().server.picture("r0.0.1", 7)) == {
        "run": "",
        "state": "none",
        "columns": [],
        "from": 0,
        "next": 0,
    }


@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS[1:]), st.sampled_from(["a", "b"]), st.booleans()), max_size=30)
)
@settings(max_examples=100, deadline=None)
def test_what_happened_within_the_steady_windows_is_the_same_whenever_it_is_asked_for(
    actions: list[tuple[str, str, bool]],
) -> None:
    asked, unasked = Master(), Master()
    for action, worker, asks in [("start", "a", False), *actions]:
        for master in (asked, unasked):
            master.act(action, worker)
        if asks and asked.recording is not None:
            asked.recording.within()
    assert asked.recording is not None
    assert unasked.recording is not None
    assert to_wire(asked.recording.within()) == to_wire(unasked.recording.within())
