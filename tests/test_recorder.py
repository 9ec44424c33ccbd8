"""The recorder, driven with requests made by hand: its recording is that of the definitions, whenever it is asked."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windowed import merge_cells

from vllm_locust.cell import Cell, Cells, Key, total
from vllm_locust.recorder import Recorder
from vllm_locust.recording import Gauges, Recording, decode_report, encode_report
from vllm_locust.timeline import Outcome, Timeline

MS = 1_000_000
START = 77_000_123 * MS
WINDOW_MS = 1000


@dataclass(frozen=True, kw_only=True)
class Read:
    """Token events that came together: (choice, exact number of tokens of the choice so far or 0)."""

    at_ms: int
    events: list[tuple[int, int]]
    lag_ns: int = 0
    uncertainty_ns: int = 1000
    stamped: bool = True


@dataclass(frozen=True, kw_only=True)
class Request:
    """What happens to one request, in milliseconds since the start of the run."""

    scenario: str = "short"
    phase: str = "steady"
    called_ms: int = 0
    scheduled_ms: int | None = None
    sent_ms: int | None = 0
    connect_ms: int | None = None
    reads: list[Read] = field(default_factory=list)
    reasoning: bool = False
    """Whether the first event is reasoning and the last one content."""
    done_ms: int = 455
    outcome: Outcome = Outcome.OK
    status: int = 200
    usage: tuple[int, int, int | None] | None = None
    """Tokens of the prompt, of the answer, of the prompt in the cache."""
    expected_tokens: int | None = None
    finish: str | None = None
    comments: int = 0

    @property
    def key(self) -> Key:
        return Key(self.scenario, "chat", self.phase)

    @property
    def events(self) -> list[tuple[int, int, int]]:
        return [(read.at_ms, choice, tokens) for read in self.reads for choice, tokens in read.events]


Step = tuple[float, Callable[[], None]]


class Bench:
    """A recorder whose clock is turned by hand."""

    def __init__(self, *, joined_ms: float = 0) -> None:
        self.now_ns = START
        self.recorder = Recorder(
            "r", 0, "w1", WINDOW_MS * MS, START, START + round(joined_ms * MS), clock=lambda: self.now_ns
        )

    def at(self, ms: float) -> int:
        self.now_ns = START + round(ms * MS)
        return self.now_ns

    def tick(
        self,
        ms: float,
        *,
        swept_ms: float | None = None,
        unparsed_ms: float | None = None,
        stalled_ms: int = 0,
        core_wait_ms: int | None = None,
    ) -> None:
        swept_ns = self.at(ms if swept_ms is None else swept_ms)
        unparsed_ns = None if unparsed_ms is None else self.at(unparsed_ms)
        self.recorder.tick(
            self.at(ms),
            swept_ns=swept_ns,
            unparsed_ns=unparsed_ns,
            users=3,
            away_ns=round(ms),
            stalled_ns=stalled_ms * MS,
            core_wait_ns=None if core_wait_ms is None else core_wait_ms * MS,
        )

    def steps(self, request: Request) -> list[Step]:
        """Return what happens to a request, and when."""
        return Story(self, request).steps()

    def play(self, steps: list[Step]) -> None:
        for at_ms, happen in sorted(steps, key=lambda step: step[0]):
            self.at(at_ms)
            happen()


class Story:
    """What happens to one request, step by step."""

    def __init__(self, bench: Bench, request: Request) -> None:
        self.bench, self.request = bench, request
        self.timeline = Timeline("id", request.scenario, "chat", START + request.called_ms * MS, request.phase)
        self.timeline.expected_tokens = request.expected_tokens
        if request.scheduled_ms is not None:
            self.timeline.scheduled_ns = START + request.scheduled_ms * MS

    def steps(self) -> list[Step]:
        request = self.request
        begun = [(request.called_ms, lambda: self.bench.recorder.begin(self.timeline))]
        sent = [] if request.sent_ms is None else [(request.sent_ms, self.send)]
        return [*begun, *sent, *((r.at_ms, partial(self.read, r)) for r in request.reads), (request.done_ms, self.end)]

    def send(self) -> None:
        self.timeline.sent_ns = self.bench.now_ns
        if self.request.connect_ms is not None:
            self.timeline.connect_ns = self.request.connect_ms * MS

    def read(self, came: Read) -> None:
        timeline, now_ns = self.timeline, self.bench.now_ns
        for choice, tokens in came.events:
            timeline.token_event(choice, now_ns, tokens)
        timeline.token_reads += 1
        timeline.reads.extend((now_ns, len(came.events), came.lag_ns, came.uncertainty_ns, came.stamped))

    def end(self) -> None:
        timeline, request = self.timeline, self.request
        timeline.status, timeline.comments = request.status, request.comments
        if request.reasoning:
            timeline.reasoning_ns, timeline.content_ns = timeline.first_ns, timeline.last_ns
        if request.usage is not None:
            timeline.input_tokens, timeline.completion_tokens, timeline.cached_tokens = request.usage
        if request.finish is not None:
            timeline.finish_reasons[0] = request.finish
        timeline.end(request.outcome, self.bench.now_ns, f"{request.outcome} happened")
        self.bench.recorder.end(timeline)


def recorded(*requests: Request, ticks_ms: tuple[float, ...] = (), finish_ms: float = 99_999) -> Recording:
    """Return the recording of some requests."""
    bench, master = Bench(), Recording("r", 0, WINDOW_MS * MS)
    steps = [step for request in requests for step in bench.steps(request)]
    bench.play([*steps, *((ms, lambda ms=ms: bench.tick(ms)) for ms in ticks_ms)])
    bench.recorder.finish(bench.at(finish_ms))
    assert master.merge(decode_report(encode_report(bench.recorder.report(bench.now_ns))))
    return master


def total_of(*requests: Request) -> Cell:
    return total(recorded(*requests).totals.values())


def streamed(*tokens_ms: int, tokens: tuple[int, ...] = (), **changed: Any) -> Request:
    """Return a request whose token events came each in a read of its own."""
    reads = [Read(at_ms=at, events=[(0, tokens[i] if tokens else 0)]) for i, at in enumerate(tokens_ms)]
    return Request(reads=reads, **changed)


def samples(cell: Cell, metric: str) -> tuple[int, float] | None:
    """Return count and sum in milliseconds, which tell every small set of samples in these tests apart."""
    found = cell.histograms.get(metric)
    return None if found is None else (found.count, found.sum / MS)


REF = streamed(300, 350, 400, 450, usage=(7, 4, None), finish="stop")


Sample = tuple[float, str, int]

# The definitions once more, as plainly as they are written, without bulk, ticks or windows in mind


def sampled(request: Request) -> Iterator[Sample]:
    """Yield when, under which name, and with which value a request has samples."""
    yield from sampled_of_requests(request)
    yield from sampled_of_tokens(request)
    for read in request.reads:
        yield from [(read.at_ms, "uncertainty", read.uncertainty_ns)] * len(read.events)
        if read.stamped:
            yield read.at_ms, "read_lag", read.lag_ns


def sampled_of_requests(request: Request) -> Iterator[Sample]:
    events, sent, done = request.events, request.sent_ms, request.done_ms
    if sent is None:
        return
    if request.connect_ms is not None:
        yield sent, "connect", request.connect_ms * MS
    if request.scheduled_ms is not None:
        yield sent, "queue", max(0, sent - request.scheduled_ms) * MS
    if events:
        yield events[0][0], "ttft", (events[0][0] - sent) * MS
        yield from due(request, events[0][0], "ttft_scheduled", events[0][0])
    if events and request.reasoning:
        yield done, "ttfc", (events[-1][0] - sent) * MS
    if request.outcome is Outcome.OK:
        yield done, "e2el", (events[-1][0] - sent) * MS
        yield from due(request, done, "e2el_scheduled", events[-1][0])
    if request.outcome is Outcome.CANCELLED:
        yield from ((done, name, (done - sent) * MS) for name in ("cut_e2el", "cut_ttft")[: 1 + (not events)])


def due(request: Request, at_ms: float, name: str, until_ms: float) -> Iterator[Sample]:
    if request.scheduled_ms is not None:
        yield at_ms, name, max(0, until_ms - request.scheduled_ms) * MS


def sampled_of_tokens(request: Request) -> Iterator[Sample]:
    events, done, ok = request.events, request.done_ms, request.outcome is Outcome.OK
    if not coalesced(request):
        times = [[at for at, c, _ in events if c == choice] for choice in told(request)]
        gaps = [(after, (after - before) * MS) for choice in times for before, after in pairwise(choice)]
        yield from ((at, "itl", gap) for at, gap in gaps)
        yield from sampled_by_token(events)
        longest = [gap for _, gap in gaps]
        if request.outcome is Outcome.IDLE_TIMEOUT:
            longest.append((done - events[-1][0]) * MS)
        yield from ((done, "itl_max", gap) for gap in sorted(longest)[-1:])
        yield from ((done, "tpot", tpot) for tpot in (tpots(request) if ok else ()))
    if ok:
        yield done, "output_tokens", tokens_of(request)
    if request.usage is not None:
        yield done, "input_tokens", request.usage[0]
        yield from ((done, "cached_tokens", cached) for cached in request.usage[2:] if cached is not None)


def sampled_by_token(events: list[tuple[float, int, int]]) -> Iterator[Sample]:
    """Yield gaps per token: of events that say, as the one before them, how many tokens there are by now."""
    for choice in {choice for _, choice, _ in events}:
        so_far = [(at, tokens) for at, c, tokens in events if c == choice]
        for i, ((before, known), (at, tokens)) in enumerate(pairwise(so_far), 1):
            new = tokens - max(tokens for _, tokens in so_far[:i])
            if known and tokens and new > 0:
                yield at, "itl_token", int((at - before) * MS) // new


def coalesced(request: Request) -> bool:
    return len(request.events) >= 8 and len(request.reads) <= 2


def told(request: Request) -> dict[int, int]:
    """Return the exact number of tokens of each choice, 0 where it was never told."""
    choices = {choice for _, choice, _ in request.events}
    return {choice: max(tokens for _, c, tokens in request.events if c == choice) for choice in choices}


def tokens_of(request: Request) -> int:
    if request.usage is not None:
        return request.usage[1]
    return sum(exact or sum(c == choice for _, c, _ in request.events) for choice, exact in told(request).items())


def tpots(request: Request) -> Iterator[int]:
    exact = told(request)
    for choice in exact:
        times = [at for at, c, _ in request.events if c == choice]
        if len(exact) == 1:
            tokens = tokens_of(request)
        elif all(exact.values()):
            tokens = exact[choice]
        else:
            tokens = round(tokens_of(request) * len(times) / len(request.events))
        if tokens > 1:
            yield (times[-1] - times[0]) * MS // (tokens - 1)


def counted(request: Request) -> Iterator[Sample]:
    """Yield when, under which name, and how much is counted of a request."""
    events, done = request.events, request.done_ms
    yield (done if request.sent_ms is None else request.sent_ms), "sent", 1
    bundled, known = 0, dict.fromkeys(told(request), 0)
    for number, (at, choice, tokens) in enumerate(events, 1):
        known[choice] = max(known[choice], tokens)
        more = max(0, sum(known.values()) - number - bundled)
        bundled += more
        yield at, "token_events", 1
        yield at, "tokens_received", 1 + more
    received = len(events) + bundled
    for read in request.reads:
        yield read.at_ms, "stamped" if read.stamped else "unstamped", len(read.events)
    missing = tokens_of(request) - received
    yield done, "tokens_received", max(0, missing)
    yield done, "tokens_surplus", max(0, -missing)
    yield done, f"outcome|{request.outcome}|{request.status}", 1
    yield done, "comments", request.comments
    yield done, "coalesced", int(coalesced(request))
    if request.outcome.failed:
        yield done, "tokens_failed", received + max(0, missing)
        yield done, "failed_without_token", int(not events)
    if request.outcome is Outcome.OK:
        yield done, "estimated", int(request.usage is None and not any(told(request).values()))
        yield done, "short_outputs", int((request.expected_tokens or 0) > tokens_of(request))
        if request.finish is not None:
            yield done, "finish|stop" if request.finish == "stop" else "finish|other", 1


def expected_cells(requests: list[Request], window_of: Callable[[float], int]) -> dict[int, Cells]:
    windows: dict[int, Cells] = defaultdict(dict)
    for request in requests:
        for at, metric, value in sampled(request):
            windows[window_of(at)].setdefault(request.key, Cell()).histogram(metric).add(value)
        for at, name, number in counted(request):
            if number:
                windows[window_of(at)].setdefault(request.key, Cell()).count(name, number)
    return windows


def expected_gauges(requests: list[Request], window_of: Callable[[float], int], cuts: set[float]) -> dict[int, Gauges]:
    """Return span, integral and peak of the streams in flight, from all instants at which any of them could change."""
    gauges: dict[int, Gauges] = defaultdict(Gauges)
    changes = sorted([c for r in requests for c in ((r.called_ms, 1), (r.done_ms, -1))], key=lambda c: c[0])
    end = max(cuts)
    instants = sorted({0.0, *cuts, *(at for at, _ in changes)})
    for a, b in pairwise(instant for instant in instants if instant <= end):
        flying = sum(change for at, change in changes if at <= a)
        found = gauges[window_of(a)]
        found.span_ns += round((b - a) * MS)
        found.in_flight_ns += round(flying * (b - a) * MS)
        found.in_flight_peak = max(found.in_flight_peak, flying)
    flying = 0
    for at, change in changes:
        flying += change
        found = gauges[window_of(at)]
        found.in_flight_peak = max(found.in_flight_peak, flying)
    return gauges


# Requests drawn at random


@st.composite
def reads_of(draw: st.DrawFn, from_ms: int) -> list[Read]:
    exact, known, at_ms, reads = draw(st.booleans()), {0: 0, 1: 0}, from_ms, []
    choices = st.integers(0, draw(st.integers(0, 1)))
    for _ in range(draw(st.integers(0, 5))):
        at_ms += draw(st.one_of(st.just(0), st.integers(0, 60), st.integers(0, 1500)))
        events = []
        for _ in range(draw(st.one_of(st.just(1), st.integers(1, 9)))):
            choice = draw(choices)
            known[choice] += draw(st.integers(0, 4)) if exact else 0
            events.append((choice, known[choice]))
        lag, uncertainty, stamped = draw(st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.booleans()))
        reads.append(Read(at_ms=at_ms, events=events, lag_ns=lag, uncertainty_ns=uncertainty, stamped=stamped))
    return reads


@st.composite
def requests_at_random(draw: st.DrawFn) -> Request:
    called_ms = draw(st.integers(0, 3000))
    sent_ms = draw(st.one_of(st.none(), st.integers(called_ms, called_ms + 400)))
    reads = [] if sent_ms is None else draw(reads_of(sent_ms))
    if sent_ms is None:
        outcomes = [Outcome.CONNECT_FAILED]
    elif reads:
        outcomes = [Outcome.OK, Outcome.OK, Outcome.TRUNCATED, Outcome.IDLE_TIMEOUT, Outcome.CANCELLED]
    else:
        outcomes = [Outcome.EMPTY, Outcome.HTTP_5XX, Outcome.FIRST_TOKEN_TIMEOUT, Outcome.CANCELLED]
    last_ms = reads[-1].at_ms if reads else sent_ms or called_ms
    return Request(
        scenario=draw(st.sampled_from(["short", "long"])),
        phase=draw(st.sampled_from(["steady", "steady", "warmup"])),
        called_ms=called_ms,
        scheduled_ms=draw(st.one_of(st.none(), st.integers(0, 3200))),
        sent_ms=sent_ms,
        connect_ms=draw(st.one_of(st.none(), st.integers(0, 9))),
        reads=reads,
        reasoning=draw(st.booleans()),
        done_ms=last_ms + draw(st.one_of(st.just(0), st.integers(0, 1500))),
        outcome=draw(st.sampled_from(outcomes)),
        usage=draw(
            st.one_of(
                st.none(), st.tuples(st.integers(0, 99), st.integers(0, 30), st.one_of(st.none(), st.integers(0, 9)))
            )
        ),
        expected_tokens=draw(st.one_of(st.none(), st.integers(1, 30))),
        finish=draw(st.sampled_from([None, "stop", "made up"])),
        comments=draw(st.integers(0, 2)),
    )


def plain(cells: Cells) -> dict[Key, tuple[dict[str, tuple[Any, ...]], dict[str, int]]]:
    """Return cells as values that compare; what is empty is left out."""
    return {
        key: (
            {m: (dict(h), h.count, h.sum, h.min, h.max) for m, h in cell.histograms.items() if h.count},
            dict(cell.counters),
        )
        for key, cell in cells.items()
    }


@settings(max_examples=200)
@given(
    requests=st.lists(requests_at_random(), max_size=4),
    ticks=st.dictionaries(st.integers(0, 12_000), st.sampled_from(["tick", "lost", "unacknowledged", "acknowledged"])),
    stop=st.one_of(st.none(), st.tuples(st.integers(0, 9000), st.integers(-1, 1))),
)
def test_the_recording_is_that_of_the_definitions_whenever_ticks_and_reports_come(
    requests: list[Request], ticks: dict[int, str], stop: tuple[int, int] | None
) -> None:
    """The master may think of one window more or less than the worker has seen when it stops."""
    stop_ms = None if stop is None else stop[0] + 0.25
    windows = None if stop is None else max(1, stop[0] // WINDOW_MS + 1 + stop[1])

    def window_of(at_ms: float) -> int:
        index = int(at_ms // WINDOW_MS)
        if stop_ms is None or windows is None:
            return index
        return min(index, windows) if at_ms < stop_ms else windows

    finish_ms = max([12_001.5, *(request.done_ms + 0.75 for request in requests)])
    cuts = {finish_ms, *range(0, int(finish_ms), WINDOW_MS), *([] if stop_ms is None else [stop_ms])}
    cells, gauges = expected_cells(requests, window_of), expected_gauges(requests, window_of, cuts)

    bench, master = Bench(), Recording("r", 0, WINDOW_MS * MS)

    def tick(ms: float, report: str) -> None:
        bench.tick(ms)
        if report != "tick":
            travelling = encode_report(bench.recorder.report(bench.now_ns))
            if report != "lost":
                assert master.merge(decode_report(travelling))
            if report == "acknowledged":
                bench.recorder.acknowledge(bench.recorder.seq)

    steps = [step for request in requests for step in bench.steps(request)]
    steps += [(ms + 0.5, lambda ms=ms, report=report: tick(ms + 0.5, report)) for ms, report in ticks.items()]
    if stop_ms is not None and windows is not None:
        steps.append((stop_ms, lambda: bench.recorder.stop(bench.now_ns, windows)))
    bench.play(steps)
    bench.recorder.finish(bench.at(finish_ms))
    assert master.merge(bench.recorder.report(bench.now_ns))

    assert plain(master.totals) == plain(merged(cells))
    late = sum(found.late for found in master.gauges.values())
    if stop is None or stop[1] >= 0:
        assert late == 0
        last = max([*cells, *gauges])
        assert {i: plain(master.window(i)) for i in range(last + 1)} == {i: plain(cells[i]) for i in range(last + 1)}
        for index, expected in gauges.items():
            (found,) = (gauges for (_, of), gauges in master.gauges.items() if of == index)
            assert (found.span_ns, found.in_flight_ns) == (expected.span_ns, expected.in_flight_ns)
            assert found.in_flight_peak == expected.in_flight_peak
    assert bench.recorder.in_flight == 0


def merged(windows: dict[int, Cells]) -> Cells:
    cells: Cells = {}
    for part in windows.values():
        merge_cells(cells, part)
    return cells


# Known requests


def test_the_reference_stream_is_recorded_with_the_numbers_of_its_definition() -> None:
    ref = total_of(REF)
    assert samples(ref, "ttft") == (1, 300)
    assert samples(ref, "itl") == (3, 150)
    assert samples(ref, "itl_max") == samples(ref, "tpot") == (1, 50)
    assert samples(ref, "e2el") == (1, 450)
    assert (ref.histograms["output_tokens"].sum, ref.histograms["input_tokens"].sum) == (4, 7)
    assert not {"queue", "connect", "ttfc", "cached_tokens", "cut_ttft", "cut_e2el"} & ref.histograms.keys()
    assert ref.counters == {
        "sent": 1,
        "token_events": 4,
        "tokens_received": 4,
        "stamped": 4,
        "outcome|ok|200": 1,
        "finish|stop": 1,
    }


def test_case_11_a_truncated_stream_keeps_what_users_saw_and_its_tokens_are_those_of_a_failure() -> None:
    cut = total_of(streamed(300, 350, done_ms=400, outcome=Outcome.TRUNCATED))
    assert (samples(cut, "ttft"), samples(cut, "itl"), samples(cut, "itl_max")) == ((1, 300), (1, 50), (1, 50))
    assert not {"tpot", "e2el", "output_tokens", "cut_e2el"} & cut.histograms.keys()
    assert cut.counters["outcome|truncated|200"] == 1
    assert (cut.counters["tokens_received"], cut.counters["tokens_failed"]) == (2, 2)
    assert "failed_without_token" not in cut.counters


def test_case_13_an_error_in_the_stream_keeps_the_first_token_and_is_listed_with_its_message() -> None:
    master = recorded(streamed(300, done_ms=350, outcome=Outcome.STREAM_ERROR))
    cell = total(master.totals.values())
    assert samples(cell, "ttft") == (1, 300)
    assert not {"itl", "tpot", "e2el", "output_tokens"} & cell.histograms.keys()
    (failure,) = master.failures.values()
    assert failure.kind == ("short", "chat", "stream_error", 200)
    assert (failure.first_ns, failure.last_ns, failure.message) == (350 * MS, 350 * MS, "stream_error happened")


def test_case_23_one_token_has_no_gap_and_no_time_per_token() -> None:
    one = total_of(streamed(200, usage=(7, 1, None), done_ms=201))
    assert (samples(one, "ttft"), samples(one, "e2el")) == ((1, 200), (1, 200))
    assert not {"itl", "itl_max", "tpot"} & one.histograms.keys()


def test_case_24_tokens_are_counted_as_they_arrive_where_events_tell_how_many() -> None:
    bundled = total_of(streamed(300, 340, 380, 420, tokens=(4, 8, 12, 16), usage=(7, 16, None)))
    assert (bundled.counters["token_events"], bundled.counters["tokens_received"]) == (4, 16)
    assert (samples(bundled, "itl"), samples(bundled, "tpot")) == ((3, 120), (1, 8))
    assert samples(bundled, "itl_token") == (3, 30)


def test_case_24_a_gap_is_divided_by_the_tokens_of_its_own_event() -> None:
    first = total_of(streamed(300, 310, 320, 330, 340, 350, tokens=(5, 6, 7, 8, 9, 10), usage=(7, 10, None)))
    assert (samples(first, "itl"), samples(first, "itl_token")) == ((5, 50), (5, 50))
    some = total_of(streamed(300, 340, 380, 420, 460, tokens=(4, 8, 0, 16, 20), usage=(7, 20, None)))
    assert samples(some, "itl_token") == (2, 20)


def test_case_24_where_no_event_tells_its_tokens_no_gap_is_divided() -> None:
    assert samples(total_of(streamed(300, 340, 380, 420, usage=(7, 16, None))), "itl_token") is None
    assert samples(total_of(streamed(300, 340, 380, tokens=(0, 0, 16), usage=(7, 16, None))), "itl_token") is None


def test_case_24_bundled_tokens_belong_to_the_window_of_their_event_however_late_they_are_harvested() -> None:
    master = recorded(streamed(900, 1100, tokens=(4, 8), usage=(7, 8, None), done_ms=1200))
    assert [total(master.window(i).values()).counters["tokens_received"] for i in (0, 1)] == [4, 4]


def test_case_24_without_counts_by_event_the_missing_tokens_arrive_with_usage() -> None:
    master = recorded(streamed(300, 340, 380, 420, usage=(7, 16, None), done_ms=1500))
    assert [total(master.window(i).values()).counters["tokens_received"] for i in (0, 1)] == [4, 12]


def test_case_26_two_choices_have_gaps_of_their_own() -> None:
    events = [(300, 0), (350, 1), (400, 0), (450, 1), (500, 0), (550, 1)]
    reads = [Read(at_ms=at, events=[(choice, 0)]) for at, choice in events]
    two = total_of(Request(reads=reads, usage=(7, 6, None), done_ms=555))
    assert (samples(two, "itl"), samples(two, "tpot")) == ((4, 400), (2, 200))
    assert (two.histograms["itl"].min, two.histograms["itl"].max) == (100 * MS, 100 * MS)
    assert (samples(two, "ttft"), samples(two, "e2el")) == ((1, 300), (1, 550))
    assert two.histograms["output_tokens"].sum == 6


def test_case_31_a_stream_that_was_waited_for_in_vain_has_its_open_gap_as_the_longest() -> None:
    stalled = total_of(streamed(300, 350, done_ms=2350, outcome=Outcome.IDLE_TIMEOUT))
    assert (samples(stalled, "itl"), samples(stalled, "itl_max")) == ((1, 50), (1, 2000))
    lost = total_of(streamed(300, 350, done_ms=2350, outcome=Outcome.CONNECTION_LOST))
    assert samples(lost, "itl_max") == (1, 50)


def test_case_33_a_hundred_events_in_one_write_are_coalesced_and_say_nothing_of_gaps() -> None:
    buffered = Request(reads=[Read(at_ms=1000, events=[(0, 0)] * 100)], usage=(7, 100, None), done_ms=1000)
    cell = total_of(buffered)
    assert (samples(cell, "ttft"), samples(cell, "e2el")) == ((1, 1000), (1, 1000))
    assert not {"itl", "itl_max", "tpot"} & cell.histograms.keys()
    assert (cell.counters["coalesced"], cell.counters["token_events"]) == (1, 100)


def test_case_37_requests_without_a_token_or_with_one_alone_have_no_samples_instead_of_zeros() -> None:
    one = streamed(200, usage=(7, 1, None), done_ms=201)
    empty = Request(usage=(7, 0, None), outcome=Outcome.EMPTY)
    mixed = total_of(*[REF] * 4, *[one] * 3, *[empty] * 3)
    assert (mixed.histograms["ttft"].count, mixed.histograms["ttft"].min) == (7, 200 * MS)
    assert (mixed.histograms["tpot"].count, mixed.histograms["itl"].count) == (4, 12)
    assert (mixed.counters["outcome|empty|200"], mixed.counters["failed_without_token"]) == (3, 3)
    assert mixed.histograms["output_tokens"].min == 1
    only_ones, only_empty = total_of(*[one] * 3), total_of(*[empty] * 3)
    assert not {"itl", "itl_max", "tpot"} & only_ones.histograms.keys()
    assert not {"ttft", "itl", "itl_max", "tpot", "e2el", "output_tokens"} & only_empty.histograms.keys()


def test_case_38_gaps_are_pooled_by_event_and_times_per_token_by_request() -> None:
    a = streamed(*(1000 + 10 * i for i in range(11)), usage=(7, 11, None), done_ms=1100)
    b = streamed(500, 600, usage=(7, 2, None), done_ms=600)
    both = total_of(a, b)
    assert samples(both, "itl") == (11, 200)
    assert (both.histograms["itl"].max, both.histograms["itl"].mean) == (100 * MS, 200 * MS / 11)
    assert (samples(both, "tpot"), both.histograms["tpot"].mean) == ((2, 110), 55 * MS)


def test_case_39_usage_completes_the_count_or_shows_a_surplus_and_without_it_the_count_is_an_estimate() -> None:
    more = total_of(streamed(300, 350, 400, 450, usage=(7, 9, None)))
    assert (more.counters["tokens_received"], more.histograms["output_tokens"].sum) == (9, 9)
    assert more.histograms["tpot"].sum == 150 * MS // 8
    fewer = total_of(streamed(300, 350, 400, 450, usage=(2, 2, None)))
    assert (fewer.counters["tokens_received"], fewer.counters["tokens_surplus"]) == (4, 2)
    assert fewer.histograms["output_tokens"].sum == 2
    none = total_of(streamed(300, 350, 400, 450))
    assert (none.counters["estimated"], none.histograms["output_tokens"].sum) == (1, 4)
    assert "estimated" not in more.counters


def test_case_39_fewer_tokens_than_were_asked_for_are_counted_as_short() -> None:
    short = total_of(streamed(300, 350, usage=(7, 10, None), expected_tokens=128))
    assert (short.counters["short_outputs"], short.counters["outcome|ok|200"]) == (1, 1)
    whole = total_of(streamed(300, 350, usage=(7, 128, None), expected_tokens=128))
    assert "short_outputs" not in whole.counters


def test_case_42_two_events_in_one_read_have_a_gap_of_zero_that_is_kept() -> None:
    reads = [Read(at_ms=300, events=[(0, 0)]), Read(at_ms=400, events=[(0, 0)] * 2), Read(at_ms=450, events=[(0, 0)])]
    cell = total_of(Request(reads=reads, usage=(7, 4, None)))
    assert (samples(cell, "itl"), cell.histograms["itl"].zeros) == ((3, 150), 1)
    assert samples(cell, "tpot") == (1, 50)


def test_case_50_tokens_count_when_they_arrive_and_a_request_when_it_ends() -> None:
    master = recorded(streamed(800, 1300, called_ms=500, sent_ms=500, usage=(7, 2, None), done_ms=2100))
    first, second, third = (total(master.window(i).values()) for i in range(3))
    assert (first.counters["token_events"], samples(first, "ttft"), first.counters["sent"]) == (1, (1, 300), 1)
    assert (second.counters["token_events"], samples(second, "itl")) == (1, (1, 500))
    assert (samples(third, "e2el"), third.counters["outcome|ok|200"]) == ((1, 800), 1)
    assert [plain(master.window(i)) for i in (3, 50, 99)] == [{}, {}, {}]
    assert master.window_count == 100


def test_case_52_a_request_that_the_end_cut_is_neither_success_nor_failure_and_keeps_its_age() -> None:
    silent = total_of(Request(outcome=Outcome.CANCELLED, done_ms=700))
    assert (samples(silent, "cut_ttft"), samples(silent, "cut_e2el")) == ((1, 700), (1, 700))
    talking = total_of(streamed(300, 350, outcome=Outcome.CANCELLED, done_ms=700))
    assert (samples(talking, "ttft"), samples(talking, "cut_e2el")) == ((1, 300), (1, 700))
    assert "cut_ttft" not in talking.histograms
    for cell in (silent, talking):
        assert not {"tpot", "e2el", "output_tokens"} & cell.histograms.keys()
        assert not {"tokens_failed", "failed_without_token"} & cell.counters.keys()
    assert recorded(Request(outcome=Outcome.CANCELLED)).failures == {}


def test_open_loop_requests_have_a_queue_and_new_connections_a_time_to_open() -> None:
    cell = total_of(streamed(300, scheduled_ms=10, called_ms=10, sent_ms=35, connect_ms=4))
    assert (samples(cell, "queue"), samples(cell, "connect"), samples(cell, "ttft")) == ((1, 25), (1, 4), (1, 265))


def test_a_request_that_got_no_connection_counts_as_due_and_as_failed_without_a_token() -> None:
    cell = total_of(Request(sent_ms=None, outcome=Outcome.CONNECT_FAILED, status=0))
    assert cell.counters == {"sent": 1, "outcome|connect_failed|0": 1, "failed_without_token": 1}
    assert cell.histograms == {}


def test_failures_of_a_kind_are_listed_once_with_first_and_last_time() -> None:
    failing = [Request(called_ms=at, sent_ms=at, done_ms=at, outcome=Outcome.HTTP_5XX, status=503) for at in (5, 900)]
    (failure,) = recorded(*failing).failures.values()
    assert (failure.status, failure.first_ns, failure.last_ns) == (503, 5 * MS, 900 * MS)


def test_the_slowest_first_tokens_and_longest_gaps_of_a_scenario_are_kept_with_what_tells_the_request() -> None:
    requests = [
        streamed(300, 350, 900, 950, usage=(7, 4, None), done_ms=1000),
        streamed(300, 380, 390, scenario="long", outcome=Outcome.TRUNCATED),
        streamed(250, outcome=Outcome.CANCELLED, called_ms=40, sent_ms=50),
    ]
    kept = recorded(*requests, ticks_ms=(320, 620)).slowest
    shown = {
        place: [(s.value_ns // MS, s.at_ns // MS, s.input_tokens, s.output_tokens, s.in_flight, s.outcome) for s in of]
        for place, of in kept.items()
    }
    assert shown == {
        ("short", "ttft"): [(300, 300, 7, 4, 1, "ok"), (200, 250, None, 1, 3, "cancelled")],
        ("long", "ttft"): [(300, 300, None, 3, 2, "truncated")],
        ("short", "itl_max"): [(550, 900, 7, 4, 1, "ok")],
        ("long", "itl_max"): [(80, 380, None, 3, 2, "truncated")],
    }
    (slow,) = kept["long", "ttft"]
    assert (slow.worker, slow.request_id, slow.endpoint) == ("w1", "id", "chat")


def test_the_longest_gap_of_a_request_ended_with_the_first_of_several_as_long_whenever_it_was_harvested() -> None:
    request = streamed(100, 150, 250, 260, 360, 370, done_ms=400)
    for ticks_ms in ((), (255,), (155, 262, 365)):
        ((slow,),) = (of for place, of in recorded(request, ticks_ms=ticks_ms).slowest.items() if place[1] == "itl_max")
        assert (slow.value_ns, slow.at_ns) == (100 * MS, 250 * MS)


def test_case_31_the_open_gap_of_a_stream_that_was_waited_for_in_vain_ended_with_the_time_out() -> None:
    waited = streamed(100, 150, done_ms=5000, outcome=Outcome.IDLE_TIMEOUT)
    (slow,) = recorded(waited).slowest["short", "itl_max"]
    assert (slow.value_ns, slow.at_ns, slow.outcome) == (4850 * MS, 5000 * MS, "idle_timeout")


def test_of_choices_the_longest_gap_is_that_of_any() -> None:
    reads = [Read(at_ms=at, events=[(choice, 0)]) for at, choice in ((100, 0), (110, 1), (150, 0), (230, 1), (260, 0))]
    (slow,) = recorded(Request(reads=reads)).slowest["short", "itl_max"]
    assert (slow.value_ns, slow.at_ns) == (120 * MS, 230 * MS)


def test_case_33_a_coalesced_request_has_a_first_token_and_no_gap_among_the_slowest() -> None:
    assert set(recorded(Request(reads=[Read(at_ms=100, events=[(0, 0)] * 100)])).slowest) == {("short", "ttft")}


def test_only_steady_requests_with_a_token_are_among_the_slowest() -> None:
    silent = Request(outcome=Outcome.FIRST_TOKEN_TIMEOUT)
    assert recorded(streamed(100, 150, phase="warmup"), silent).slowest == {}


def test_a_report_carries_what_of_the_slowest_no_acknowledged_one_has() -> None:
    bench = Bench()
    bench.play(bench.steps(streamed(100, 150)))
    bench.tick(500)
    report = bench.recorder.report(bench.now_ns)
    assert [(slow.metric, slow.value_ns // MS) for slow in report.slowest] == [("itl_max", 50), ("ttft", 100)]
    assert bench.recorder.report(bench.now_ns).slowest == report.slowest
    bench.recorder.acknowledge(report.seq)
    assert bench.recorder.report(bench.now_ns).slowest == []


def test_phases_and_scenarios_are_kept_apart() -> None:
    warm, other = streamed(100, phase="warmup"), streamed(200, scenario="long")
    totals = recorded(REF, warm, other).totals
    assert {key: cell.histograms["ttft"].sum // MS for key, cell in totals.items()} == {
        Key("short", "chat"): 300,
        Key("short", "chat", "warmup"): 100,
        Key("long", "chat"): 200,
    }


def test_how_reads_were_is_filed_under_the_window_in_which_they_came() -> None:
    reads = [
        Read(at_ms=900, events=[(0, 0)], lag_ns=50_000, uncertainty_ns=1000),
        Read(at_ms=1100, events=[(0, 0)] * 2, lag_ns=70_000, uncertainty_ns=9000),
        Read(at_ms=1200, events=[(0, 0)], uncertainty_ns=300_000, stamped=False),
    ]
    master = recorded(Request(reads=reads, done_ms=1300))
    first, second = (total(master.window(i).values()) for i in (0, 1))
    assert (first.counters["stamped"], second.counters["stamped"], second.counters["unstamped"]) == (1, 2, 1)
    assert (first.histograms["read_lag"].sum, second.histograms["read_lag"].sum) == (50_000, 70_000)
    assert (first.histograms["uncertainty"].sum, second.histograms["uncertainty"].sum) == (1000, 2 * 9000 + 300_000)


# While a stream runs


def live(*tokens_ms: int, reads: int | None = None) -> tuple[Bench, Timeline]:
    """Return a request in the middle of its answer."""
    bench = Bench()
    timeline = Timeline("id", "short", "chat", START)
    bench.at(0)
    bench.recorder.begin(timeline)
    timeline.sent_ns = START
    for at_ms in tokens_ms:
        timeline.token_event(0, bench.at(at_ms), 0)
    timeline.token_reads = len(tokens_ms) if reads is None else reads
    return bench, timeline


def seen_by_now(bench: Bench) -> Cell:
    master = Recording("r", 0, WINDOW_MS * MS)
    master.merge(bench.recorder.report(bench.now_ns))
    return total(master.totals.values())


def test_a_tick_takes_first_token_tokens_and_gaps_of_a_stream_that_goes_on() -> None:
    bench, timeline = live(100, 150, 200)
    bench.tick(250)
    cell = seen_by_now(bench)
    assert (samples(cell, "ttft"), samples(cell, "itl"), cell.counters["token_events"]) == ((1, 100), (2, 100), 3)
    assert cell.counters["tokens_received"] == 3
    assert "outcome|ok|200" not in cell.counters
    timeline.token_event(0, bench.at(280), 0)
    bench.tick(300)
    cell = seen_by_now(bench)
    assert (samples(cell, "itl"), cell.counters["token_events"]) == ((3, 180), 4)


def test_memory_of_a_stream_stays_flat_however_long_the_answer_is() -> None:
    bench, timeline = live()
    for second in range(50):
        for i in range(100):
            timeline.token_event(0, bench.at(second * 1000 + i * 10), i)
            timeline.token_reads += 1
            timeline.reads.extend((bench.now_ns, 1, 0, 0, True))
        bench.tick(second * 1000 + 995)
        assert len(timeline.choices[0].times) == 1
        assert (len(timeline.choices[0].kept), len(timeline.reads), len(timeline.bundles)) == (0, 0, 0)


def test_gaps_are_held_back_until_the_third_read_and_hold_their_window_open() -> None:
    bench, timeline = live(100, 150, reads=2)
    bench.tick(2500)
    report = bench.recorder.report(bench.now_ns)
    assert [window.sealed for window in report.windows] == [False, False, False]
    assert "itl" not in seen_by_now(bench).histograms
    assert seen_by_now(bench).counters["token_events"] == 2
    timeline.token_event(0, bench.at(2600), 0)
    timeline.token_reads = 3
    bench.tick(2700)
    report = bench.recorder.report(bench.now_ns)
    assert [window.sealed for window in report.windows] == [True, True, False]
    assert [[m for cell in w.cells for m in cell.histograms if m == "itl"] for w in report.windows] == [
        ["itl"],
        [],
        ["itl"],
    ]


def test_gaps_that_were_held_back_are_dropped_where_the_request_turns_out_coalesced() -> None:
    bench, timeline = live(*[100] * 20, reads=1)
    bench.tick(500)
    timeline.token_reads = 2
    timeline.token_event(0, bench.at(600), 0)
    timeline.end(Outcome.OK, bench.now_ns)
    bench.recorder.end(timeline)
    bench.tick(700)
    cell = seen_by_now(bench)
    assert not {"itl", "itl_max", "tpot"} & cell.histograms.keys()
    assert (cell.counters["coalesced"], cell.counters["token_events"]) == (1, 21)


def test_gaps_of_a_request_stay_together_for_those_who_listen_and_count_all_the_same() -> None:
    bench, timeline = live()
    bench.recorder.itl_wanted = True
    instants = [100, 150, 210, 1280, 1360, 2500]
    for i, at_ms in enumerate(instants):
        timeline.token_event(0, bench.at(at_ms), 0)
        timeline.token_reads += 1
        bench.tick(at_ms + (600 if i == 2 else 1))
    timeline.token_event(0, bench.at(2600), 0)
    timeline.end(Outcome.OK, bench.now_ns)
    assert [gap // MS for gap in timeline.gaps_ns().tolist()] == [50, 60, 1070, 80, 1140, 100]
    bench.recorder.end(timeline)
    bench.recorder.harvest()
    assert [gap // MS for gap in timeline.gaps_ns().tolist()] == [50, 60, 1070, 80, 1140, 100]
    assert samples(seen_by_now(bench), "itl") == (6, 2500)


def test_gauges_are_of_the_window_of_the_tick() -> None:
    bench, _ = live()
    bench.tick(400)
    bench.tick(900)
    bench.tick(1300)
    report = bench.recorder.report(bench.now_ns)
    first, second = (window.gauges for window in report.windows)
    assert (first.loop_lag_ns, second.loop_lag_ns) == (900, 1300)
    assert (first.span_ns, second.span_ns) == (1000 * MS, 300 * MS)
    assert (first.in_flight_ns, first.in_flight_peak, first.in_flight_last, first.users_last) == (1000 * MS, 1, 1, 3)
    assert first.cpu_ns > 0
    assert report.now_ns == 1300 * MS


def test_a_request_knows_how_many_streams_were_in_flight_when_it_left() -> None:
    bench, first = live()
    second, third = (Timeline(name, "short", "chat", START) for name in ("second", "third"))
    bench.recorder.begin(second)
    first.end(Outcome.OK, bench.at(100))
    bench.recorder.end(first)
    bench.recorder.begin(third)
    assert [timeline.in_flight for timeline in (first, second, third)] == [1, 2, 2]


def test_errors_of_our_own_are_counted_in_the_window_in_which_they_happened() -> None:
    bench = Bench()
    for at_ms in (100, 1200, 1300):
        bench.at(at_ms)
        bench.recorder.note_plugin_error()
    windows = bench.recorder.report(bench.now_ns).windows
    assert [window.gauges.plugin_errors for window in windows] == [1, 2]


def test_a_worker_that_joined_later_was_not_there_before() -> None:
    bench = Bench(joined_ms=2300)
    bench.tick(2500)
    report = bench.recorder.report(bench.now_ns)
    assert [window.gauges.span_ns // MS for window in report.windows] == [0, 0, 200]


# Windows and reports


def sealed(bench: Bench) -> list[int]:
    return [window.index for window in bench.recorder.report(bench.now_ns).windows if window.sealed]


def test_a_window_is_sealed_only_when_a_sweep_began_after_its_end_and_nothing_older_is_unparsed() -> None:
    bench = Bench()
    bench.tick(1100, swept_ms=999)
    assert sealed(bench) == []
    bench.tick(1200, swept_ms=1150, unparsed_ms=990)
    assert sealed(bench) == []
    bench.tick(1300, swept_ms=1250, unparsed_ms=1240)
    assert sealed(bench) == [0]
    bench.tick(3400, unparsed_ms=2100)
    assert sealed(bench) == [0, 1]


def test_what_turns_up_after_its_window_was_sealed_goes_to_the_oldest_open_one_and_is_counted_late() -> None:
    bench, timeline = live()
    bench.tick(2500)
    for at_ms in (900, 950, 1990, 2100):
        timeline.token_event(0, START + at_ms * MS, 0)
        timeline.token_reads += 1
    bench.tick(2600)
    report = bench.recorder.report(bench.now_ns)
    assert [(window.index, window.gauges.late) for window in report.windows] == [(0, 0), (1, 0), (2, 3 + 2 + 1)]
    (cell,) = report.windows[2].cells
    assert (cell.counters["token_events"], cell.histograms["itl"].count) == (4, 3)
    assert cell.histograms["ttft"].count == 1


def test_a_window_is_reported_whole_until_it_is_acknowledged_and_only_then_no_more() -> None:
    bench, timeline = live(100, 150, 200)
    bench.tick(300)
    first = bench.recorder.report(bench.now_ns)
    again = bench.recorder.report(bench.now_ns)
    assert (first.seq, again.seq, bench.recorder.seq) == (1, 2, 2)
    assert again.windows == first.windows
    bench.recorder.acknowledge(1)
    assert bench.recorder.report(bench.now_ns).windows == []
    timeline.token_event(0, bench.at(400), 0)
    bench.tick(500)
    (changed,) = bench.recorder.report(bench.now_ns).windows
    assert (changed.index, changed.seq, changed.cells[0].counters["token_events"]) == (0, 4, 4)


def test_an_error_of_ours_after_the_end_is_no_other_error() -> None:
    bench, _ = live(100, 150, 200)
    bench.recorder.finish(bench.at(300))
    bench.recorder.note_plugin_error()
    assert sum(window.gauges.plugin_errors for window in bench.recorder.report(bench.now_ns).windows) == 1


def test_an_acknowledgement_does_not_cover_what_changed_since() -> None:
    bench, timeline = live(100, 150, 200)
    bench.tick(300)
    bench.recorder.report(bench.now_ns)
    timeline.token_event(0, bench.at(400), 0)
    bench.tick(500)
    bench.recorder.acknowledge(1)
    assert [window.index for window in bench.recorder.report(bench.now_ns).windows] == [0]
    bench.recorder.acknowledge(1)
    assert [window.index for window in bench.recorder.report(bench.now_ns).windows] == [0]


def test_a_window_that_was_sealed_after_its_report_is_not_dropped_by_the_acknowledgement_of_that_report() -> None:
    bench, _ = live(100)
    bench.tick(900)
    bench.recorder.report(bench.now_ns)
    bench.tick(1100)
    bench.recorder.acknowledge(1)
    assert sealed(bench) == [0]


def test_a_sealed_window_is_dropped_once_the_master_has_it() -> None:
    bench = Bench()
    for second in range(1, 100):
        bench.tick(second * 1000 + 1)
        bench.recorder.acknowledge(bench.recorder.report(bench.now_ns).seq)
        assert len(bench.recorder._windows._windows) == 1


def test_after_the_end_every_window_is_sealed_and_final() -> None:
    bench, timeline = live(100, 150)
    timeline.end(Outcome.OK, bench.at(2100))
    bench.recorder.end(timeline)
    bench.recorder.finish(bench.at(2200))
    report = bench.recorder.report(bench.now_ns)
    assert [(window.index, window.sealed) for window in report.windows] == [(0, True), (1, True), (2, True)]
    bench.recorder.acknowledge(report.seq)
    assert bench.recorder.report(bench.now_ns).windows == []


def test_case_52_what_comes_after_the_stop_goes_behind_the_windows_of_the_run() -> None:
    """The run has two windows for everyone; a stream runs out for another four of them."""
    bench, timeline = live(500, 900, 1400)
    bench.recorder.stop(bench.at(1500), 2)
    for at_ms in (1600, 3000, 5500):
        timeline.token_event(0, bench.at(at_ms), 0)
        bench.tick(at_ms + 1)
    timeline.end(Outcome.OK, bench.at(5600))
    bench.recorder.end(timeline)
    bench.recorder.finish(bench.at(5700))
    master = Recording("r", 0, WINDOW_MS * MS)
    master.merge(bench.recorder.report(bench.now_ns))
    counts = [total(master.window(i).values()).counters.get("token_events", 0) for i in range(7)]
    assert counts == [2, 1, 3, 0, 0, 0, 0]
    master.length_ns = 1500 * MS
    within = total(master.within().values())
    assert (within.counters["token_events"], "outcome|ok|200" in within.counters) == (3, False)
    assert [master.gauges["w1", i].span_ns // MS for i in range(3)] == [1000, 500, 4200]


@pytest.mark.parametrize("told_ms", [0, 1450, 1900])
def test_a_window_ends_early_where_the_warm_up_does_and_nothing_is_lost_whenever_that_is_told(told_ms: int) -> None:
    """Windows are 0 to 1, 1 to 1.5 and from there; who hears of it late has filed something in the window before."""
    bench, timeline = live()
    steps: list[Step] = [(told_ms, lambda: bench.recorder.move([1500 * MS]))]
    steps += [(at_ms, lambda: timeline.token_event(0, bench.now_ns, 0)) for at_ms in (900, 1200, 1600, 2300, 2600)]
    steps += [(at_ms, lambda: bench.tick(bench.now_ns / MS - START / MS)) for at_ms in (1000, 1650, 2000, 2550)]
    bench.play(steps)
    timeline.token_reads = 5
    timeline.end(Outcome.OK, bench.at(3000))
    bench.recorder.end(timeline)
    bench.recorder.finish(bench.at(3100))
    master = Recording("r", 0, WINDOW_MS * MS)
    master.grid = master.grid.moved([1500 * MS])
    master.merge(bench.recorder.report(bench.now_ns))
    events = [total(master.window(i).values()).counters.get("token_events", 0) for i in range(4)]
    assert events == ([1, 1, 2, 1] if told_ms < 1500 else [1, 2, 1, 1])
    assert sum(gauges.late for gauges in master.gauges.values()) == 0
    assert sum(gauges.span_ns for gauges in master.gauges.values()) == 3100 * MS


def test_what_is_offered_and_dropped_is_counted_when_it_was_due_and_at_the_end() -> None:
    bench, key = Bench(), Key("short", "chat")
    for due_ms in (100, 900, 1100):
        bench.recorder.offer(key, START + due_ms * MS)
    bench.at(2500)
    bench.recorder.drop(key)
    cells = recorded_by(bench)
    assert [cell.counters.get("scheduled", 0) for cell in cells] == [2, 1, 0]
    assert [cell.counters.get("dropped", 0) for cell in cells] == [0, 0, 1]


def recorded_by(bench: Bench) -> list[Cell]:
    """Return all that happened in each of the first three windows."""
    bench.recorder.finish(bench.now_ns)
    master = Recording("r", 0, WINDOW_MS * MS)
    master.merge(bench.recorder.report(bench.now_ns))
    return [total(master.window(index).values()) for index in range(3)]


def test_cpu_is_shared_out_over_the_windows_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_ns = iter([7 * MS, 757 * MS])
    monkeypatch.setattr(time, "process_time_ns", lambda: next(cpu_ns))
    bench = Bench(joined_ms=500)
    bench.tick(2000)
    windows = bench.recorder.report(bench.now_ns).windows
    assert [w.gauges.cpu_ns for w in windows] == [250 * MS, 500 * MS, 0]


def test_waits_for_a_core_add_up_and_are_absent_where_the_system_does_not_tell() -> None:
    bench = Bench()
    for at_ms, wait_ms in ((400, 3), (900, 0), (1300, 0), (2100, None)):
        bench.tick(at_ms, core_wait_ms=wait_ms)
    assert [w.gauges.core_wait_ns for w in bench.recorder.report(bench.now_ns).windows] == [3 * MS, 0, None]


def test_stalls_add_up_in_the_window_in_which_they_are_noticed() -> None:
    bench = Bench()
    for at_ms, stalled_ms in ((400, 60), (900, 200), (1300, 0), (1700, 70)):
        bench.tick(at_ms, stalled_ms=stalled_ms)
    assert [w.gauges.stalled_ns for w in bench.recorder.report(bench.now_ns).windows] == [260 * MS, 70 * MS]


def test_what_has_ended_is_taken_in_slices_too_and_comes_to_the_same() -> None:
    """At 500 requests per second, all ends of a second at once would keep the loop from its arrivals for 25 ms."""
    requests = [streamed(300 + i, 350 + i, 400 + i, done_ms=455 + i, usage=(7, 3, None)) for i in range(35)]
    whole = recorded(*requests)
    bench, master = Bench(), Recording("r", 0, WINDOW_MS * MS)
    bench.play([step for request in requests for step in bench.steps(request)])
    left = [len(bench.recorder._ended)]
    left += [len(bench.recorder._ended) for _ in bench.recorder.harvest_slices()]
    assert left[0] == 35
    assert 0 < left[-1] <= 10
    assert all(0 < before - after <= 10 for before, after in pairwise(left))
    bench.recorder.finish(bench.at(99_999))
    assert master.merge(decode_report(encode_report(bench.recorder.report(bench.now_ns))))
    (found,), (expected,) = master.totals.values(), whole.totals.values()
    assert found.counters == expected.counters
    assert found.histograms.keys() == expected.histograms.keys() >= {"ttft", "itl", "e2el", "tpot"}
    assert all(samples(found, metric) == samples(expected, metric) for metric in expected.histograms)
