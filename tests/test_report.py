"""The text report: what it shows, that it fits, and that nothing in it can harm a terminal."""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_locust.api import Counting
from vllm_locust.cell import RETRY, Cell, Cells, Key
from vllm_locust.figures import COUNTS
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.report import text
from vllm_locust.results import Run
from vllm_locust.slowest import Slow
from vllm_locust.summary import Meta
from vllm_locust.terminal import COLUMNS, printable, width_of
from vllm_locust.timeline import METRICS

MS = 1_000_000
DASH = "–"
GOLDEN = Path(__file__).parent / "golden"


def recorded(
    cells: Cells,
    *,
    failures: list[Failure] | None = None,
    slow: list[Slow] | None = None,
    length_s: int = 60,
    **gauges: int,
) -> Recording:
    """Return what the master holds after one worker has reported one window."""
    seen = Gauges(**{"span_ns": length_s * NS_PER_S, **gauges})
    window = WindowState(index=0, seq=1, sealed=True, gauges=seen, cells=to_wire(cells))
    recording = Recording("r1", 0, length_s * NS_PER_S)
    appendix: dict[str, Any] = {"failures": failures or [], "slowest": slow or []}
    recording.merge(Report(run="r1", epoch=0, worker="w1", seq=1, now_ns=0, windows=[window], **appendix))
    recording.length_ns = length_s * NS_PER_S
    return recording


def answered(number: int, *, ttft_ms: int, gap_ms: int, tokens: int) -> Cell:
    """Return a cell of `number` ok requests, whose times spread to their double."""
    cell = Cell()
    for i in range(number):
        ttft_ns, gap_ns = (int(ms * MS * (1 + i / number)) for ms in (ttft_ms, gap_ms))
        cell.histogram("ttft").add(ttft_ns)
        cell.histogram("itl").add(gap_ns, tokens - 1)
        cell.histogram("itl_max").add(gap_ns)
        cell.histogram("tpot").add(gap_ns)
        cell.histogram("e2el").add(ttft_ns + gap_ns * (tokens - 1))
        cell.histogram("input_tokens").add(4 * tokens)
        cell.histogram("output_tokens").add(tokens)
    cell.histogram("read_lag").add(80_000, max(number * tokens, 1))
    cell.histogram("uncertainty").add(0, max(number * tokens, 1))
    names = ("sent", "outcome|ok|200", "finish|length")
    cell.counters = dict.fromkeys(names, number)
    cell.counters |= dict.fromkeys(("token_events", "tokens_received", "stamped"), number * tokens)
    return cell


def three_scenarios() -> Run:
    """Return a run of three scenarios, one of which fails at times, and a part without requests."""
    short = answered(1200, ttft_ms=40, gap_ms=8, tokens=64)
    short.counters |= {"sent": 1246, "outcome|http_429|429": 40, "outcome|cancelled|200": 3}
    short.counters |= {"outcome|http_5xx|503": 2, "outcome|stream_error|200": 1}
    short.counters["failed_without_token"] = 42
    long = answered(60, ttft_ms=310, gap_ms=12, tokens=512)
    long.counters |= {"estimated": 60, "stamped": 60 * 512 - 9, "unstamped": 9, "reconnects": 3}
    chat = answered(12, ttft_ms=95, gap_ms=9, tokens=128)
    chat.histogram("connect").add(2 * MS, 12)
    chat.histogram("itl").add(0, 5)
    failures = [
        failed("http_429", 429, 12_300, 48_120, "queue is full, try again later"),
        failed("http_5xx", 503, 30_020, 30_021, "upstream connect error: " + 9 * "no healthy upstream, "),
        failed("stream_error", 200, 1_250, 1_250, "EngineCore encountered an issue"),
    ]
    cells = {
        Key("short", "completions"): short,
        Key("long", "completions"): long,
        Key("会話", "chat"): chat,
    }
    gauges = {
        "in_flight_peak": 50,
        "in_flight_ns": 2880 * NS_PER_S,
        "cpu_ns": 25 * NS_PER_S,
        "loop_lag_ns": 64 * MS,
        "core_wait_ns": 900 * MS,
        "stalled_ns": 300 * MS,
    }
    meta = Meta(
        name="baseline",
        run="5f0c",
        started="2026-01-02T03:04:05+00:00",
        plugin_version="0.1.0",
        locust_version="2.47.0",
        python_version="3.11.7",
        target="http://127.0.0.1:8000",
        model="tiny",
        scenarios={"Mixed": "mixed", "Chat": "chat"},
        endpoints={"Mixed": "completions", "Chat": "chat"},
        parts=["short", "long", "会話", "rare"],
        scenario_hash="sha256:12ab",
        cache="cold",
        load={"users": 50, "spawn_rate": 10, "run_time_s": 60, "workers": 2},
        remarks=["the wall clock of worker w2 is 200 s behind; no number depends on it"],
    )
    slow = [
        *(slow_request("short", "ttft", (80 - i) * MS, i, outcome="ok") for i in range(3)),
        *(
            slow_request("short", "itl_max", 16 * MS - i, 2 * i, outcome="cancelled" if i == 1 else "ok")
            for i in range(3)
        ),
        slow_request("long", "ttft", 615 * MS, 7, outcome="ok", input_tokens=None),
        slow_request(
            "long", "itl_max", 5000 * MS, 8, outcome="stream_error", user_class="SummariesOfVeryLongDocuments"
        ),
    ]
    return Run.of(recorded(cells, failures=failures, slow=slow, **gauges), meta)


def failed(outcome: str, status: int, first_ms: int, last_ms: int, message: str) -> Failure:
    """Return what is known of a kind of failure."""
    return Failure(
        scenario="short",
        endpoint="completions",
        outcome=outcome,
        status=status,
        first_ns=first_ms * MS,
        last_ns=last_ms * MS,
        message=message,
    )


def slow_request(  # noqa: PLR0913 - what a row shows
    scenario: str,
    metric: str,
    value_ns: int,
    number: int,
    *,
    outcome: str,
    input_tokens: int | None = 256,
    user_class: str = "Mixed",
) -> Slow:
    """Return one of the slowest requests."""
    return Slow(
        scenario=scenario,
        endpoint="completions",
        metric=metric,
        value_ns=value_ns,
        at_ns=(1250 + 6000 * number) * MS,
        worker=f"worker {1 + number % 2} (host)",
        request_id=f"5f0c1234-{user_class}-{number}",
        input_tokens=input_tokens,
        output_tokens=64,
        in_flight=20 + number,
        outcome=outcome,
    )


def golden(name: str, actual: str, *, update: bool) -> str:
    """Return a golden file, made anew where that is asked for."""
    if update:
        (GOLDEN / name).write_text(actual, encoding="utf-8")
    return (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "full"), [("report.txt", False), ("report_full.txt", True)])
def test_the_report_of_three_scenarios_is_the_golden_one(name: str, *, full: bool, update_golden: bool) -> None:
    """Any change of the words or of the layout is seen in a diff; `--update-golden` takes it over."""
    shown = text(three_scenarios(), full=full)
    assert shown == golden(name, shown, update=update_golden)


def test_the_numbers_of_three_scenarios_are_the_golden_ones(*, update_golden: bool) -> None:
    """Scripts and comparisons read these names: a change of them is a change of the format."""
    numbers = json.dumps(three_scenarios().summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    assert numbers == golden("summary.json", numbers, update=update_golden)


def test_the_short_report_fits_a_screen() -> None:
    """Forty lines hold four scenarios and all that is to be said of them."""
    assert len(text(three_scenarios()).splitlines()) <= 40


def limited(limits: list[str], goodput: list[str]) -> Run:
    """Return a run of two scenarios, in which 90 of 100 requests that were due were good."""
    short, long = answered(80, ttft_ms=40, gap_ms=8, tokens=64), answered(20, ttft_ms=300, gap_ms=8, tokens=64)
    short.counters["good"], long.counters["good"] = 80, 10
    cells = {Key("short", "chat"): short, Key("long", "chat"): long}
    return Run.of(recorded(cells, length_s=10), Meta(limits=limits, goodput=goodput))


def test_each_limit_has_a_line_with_its_state_first() -> None:
    """The samples of `short` are 40.0, 40.5, … 79.5 ms, those of `long` 300, 315, … 585 ms; buckets are 0.5 % off."""
    limits = ["short: ttft p50 < 100ms", "ttft p95 < 200ms", "long: ttft p99 < 1s", "goodput > 95%"]
    shown = text(limited(limits, ["ttft < 450ms, tpot < 50ms", "long: ttft < 2s"])).splitlines()
    start = next(i for i, line in enumerate(shown) if line.startswith("Limits"))
    assert shown[start : start + 5] == [
        "Limits    met           short: ttft p50 < 100ms: 59.7 ms (95 % CI 55.1 ms to 64.7 ms, 80 requests)",
        "          missed        ttft p95 < 200ms: 508 ms (95 % CI 437 ms to 585 ms, 100 requests)",
        "          inconclusive  long: ttft p99 < 1s: too few samples: 585 ms (95 % CI from 572 ms, 20",
        "                        requests), 100 are needed",
        "          missed        goodput > 95%: 90.0 % (95 % CI 82.6 % to 94.5 %, 100 requests)",
    ]
    assert "exit code 4" in "".join(shown)


def test_goodput_has_a_line_where_somebody_said_what_it_is() -> None:
    shown = text(limited([], ["ttft < 450ms, tpot < 50ms", "long: ttft < 2s"])).splitlines()
    (line,) = (i for i, line in enumerate(shown) if line.startswith("Goodput"))
    assert [" ".join(part.split()) for part in shown[line : line + 2]] == [
        "Goodput 9.00 requests/s, 90.0 % of all due; good is an ok request with ttft < 450ms, tpot < 50ms;",
        "long: ttft < 2s",
    ]
    assert "goodput" not in text(limited([], [])).lower()
    assert "Limits" not in text(limited([], []))


def rows(shown: str) -> dict[str, list[str]]:
    """Return the cells of each line by its first word; the first line of a name wins."""
    lines: dict[str, list[str]] = {}
    for words in map(str.split, shown.splitlines()):
        if words:
            lines.setdefault(words[0], words[1:])
    return lines


def test_the_columns_line_up_under_wide_names() -> None:
    """Chinese, Japanese and Korean characters take two columns each."""
    lines = text(three_scenarios()).splitlines()
    table = [line for line in lines if line.startswith(("scenario", "short", "long", "会話", "rare", "all"))]
    assert len(table) == 6
    assert len({width_of(line.rstrip()) for line in table}) == 1


def test_a_configured_part_without_requests_has_a_row_of_zeros_and_dashes() -> None:
    """Nobody has to guess whether a part was forgotten."""
    assert rows(text(three_scenarios()))["rare"] == ["0", "0", *[DASH] * 9, "0.00"]


def test_a_run_without_any_sample_is_shown_and_not_ok() -> None:
    """Nothing was sent: dashes, never zeros that look like latencies, and exit code 1."""
    shown = text(Run.of(Recording("r1", 0, NS_PER_S), Meta()), full=True)
    assert rows(shown)["all"][2:] == [DASH] * 10
    assert "nothing was sent (exit code 1)" in shown
    assert "nan" not in shown.lower()


@pytest.mark.parametrize(("number", "marked"), [(19, 4), (20, 1), (99, 1), (100, 0)])
def test_a_percentile_that_its_samples_cannot_carry_is_marked_as_their_maximum(number: int, marked: int) -> None:
    """p95 needs 20 samples, p99 needs 100: TTFT p95 and p99, longest gap p95 and E2EL p95 here."""
    cell = answered(number, ttft_ms=100, gap_ms=10, tokens=101)
    shown = text(Run.of(recorded({Key("one", "chat"): cell}), Meta()))
    assert sum(word.endswith("*") for word in rows(shown)["one"]) == marked
    assert ("* max of n" in shown) == bool(marked)
    if marked:
        assert rows(shown)["one"][6] == f"{100 * (1 + (number - 1) / number):.0f}*"


def test_one_scenario_needs_no_row_of_all() -> None:
    """It would say the same twice."""
    shown = text(Run.of(recorded({Key("one", "chat"): answered(5, ttft_ms=9, gap_ms=3, tokens=4)}), Meta()))
    assert "all" not in rows(shown)


def test_failures_that_count_as_late_are_shown_beside_what_users_saw() -> None:
    """42 of 1,242 without a first token leave p95 a number, and turn p99 into a failure."""
    shown = " ".join(text(three_scenarios()).split())
    assert "counting failures as late: short TTFT p50" in shown
    assert "p99 failed" in shown
    assert "long TTFT" not in shown


def test_an_outcome_comes_with_its_count_share_times_and_a_message() -> None:
    """One line says what went wrong, how often and when."""
    line = next(line for line in text(three_scenarios()).splitlines() if "http_429" in line and "%" in line)
    assert " ".join(line.split()) == "40 http_429 3.0 % 12.3 s to 48.1 s: queue is full, try again later"


def test_the_statuses_of_an_outcome_have_lines_of_their_own() -> None:
    """404 and 422 are different mistakes; what the name of the outcome says already is not said twice."""
    cell = Cell(counters={"sent": 10, "outcome|http_4xx|404": 1, "outcome|http_4xx|422": 6, "outcome|http_429|429": 3})
    failures = [
        failed("http_4xx", 404, 900, 900, "no such model"),
        failed("http_4xx", 422, 500, 2000, "bad field"),
        failed("http_429", 429, 300, 400, ""),
    ]
    shown = text(Run.of(recorded({Key("short", "completions"): cell}, failures=failures), Meta()))
    lines = [" ".join(line.removeprefix("Outcomes").split()) for line in shown.splitlines()]
    assert "6 http_4xx 422 60.0 % 500 ms to 2.00 s: bad field" in lines
    assert "1 http_4xx 404 10.0 % at 900 ms: no such model" in lines
    assert "3 http_429 30.0 % 300 ms to 400 ms:" in lines


def test_the_long_report_has_a_row_for_each_kind_with_all_of_its_message() -> None:
    """Kind, status, count, share of the scenario's requests, first and last time, and what the server said."""
    shown = text(three_scenarios(), full=True).split("\n\n")
    (block,) = (block for block in shown if block.startswith("failures: "))
    rows = [line.split() for line in block.splitlines()]
    place = rows.index(["short", "completions", "http_5xx", "503", "2", "0.2", "%", "30.0", "30.0"])
    assert " ".join(word for row in rows[place + 1 : place + 4] for word in row).count("no healthy upstream") == 9
    assert ["EngineCore", "encountered", "an", "issue"] in rows


def test_a_run_without_failures_has_no_table_of_them() -> None:
    shown = text(Run.of(recorded({Key("one", "chat"): answered(5, ttft_ms=9, gap_ms=3, tokens=4)}), Meta()), full=True)
    assert "failures:" not in shown


def test_the_slowest_requests_are_named_by_their_id() -> None:
    """The short report names the worst of all, the long one those of each scenario; whoever did not end ok says so."""
    run = three_scenarios()
    short, long = text(run), text(run, full=True)
    assert "Slowest   first token 615 ms: long, 5f0c1234-Mixed-7, at 43.2 s" in short
    assert "gap 5.00 s: long, 5f0c1234-SummariesOfVeryLongDocuments-8, at 49.2 s, stream_error" in short
    blocks = {block.splitlines()[0]: block for block in long.split("\n\n")}
    rows = [line.split() for line in blocks["short: longest gaps"].splitlines()[3:]]
    assert [row[0] for row in rows] == [f"5f0c1234-Mixed-{number}" for number in (0, 2, 4)]
    assert rows[1][1:] == ["16.0", "13.2", "256", "64", "22", "worker", "1", "cancelled"]
    assert "outcome" not in blocks["short: slowest first tokens"]
    (row,) = (line.split() for line in blocks["long: slowest first tokens"].splitlines()[3:])
    assert row == ["5f0c1234-Mixed-7", "615", "43.2", DASH, "64", "27", "worker", "2"]


def test_of_an_id_that_is_too_wide_the_end_stays() -> None:
    """It tells requests apart; the run's id, with which all begin, is in the heading."""
    slow = slow_request("one", "ttft", MS, 123_456, outcome="ok", user_class="C" * 60)
    shown = text(Run.of(recorded({Key("one", "chat"): Cell()}, slow=[slow]), Meta()), full=True)
    assert f"…{'C' * 32}-123456 " in shown


@pytest.mark.parametrize(("number", "words"), [(0, ""), (1, "1 request was sent"), (1234, "1,234 requests were sent")])
def test_requests_that_met_a_stale_connection_are_counted_in_a_remark(number: int, words: str) -> None:
    cell = answered(5, ttft_ms=9, gap_ms=3, tokens=4)
    cell.counters["reconnects"] = number
    shown = text(Run.of(recorded({Key("one", "chat"): cell}), Meta()))
    assert ("on a fresh connection, since the server had closed the idle one" in shown) == bool(number)
    assert words in shown


@pytest.mark.parametrize(
    ("number", "dropped", "retries"),
    [
        (0, "", ""),
        (1, "1 request was due and not sent by the end", "1 request asked again"),
        (1234, "1,234 requests were due and not sent by the end", "1,234 requests asked again"),
    ],
)
def test_what_was_dropped_and_what_was_asked_again_is_counted(number: int, dropped: str, retries: str) -> None:
    cell = answered(5, ttft_ms=9, gap_ms=3, tokens=4)
    cell.counters["dropped"] = number
    again = {Key("one", "chat", RETRY): Cell(counters={"sent": number, "outcome|ok|200": number})}
    shown = text(Run.of(recorded({Key("one", "chat"): cell} | again), Meta()))
    assert dropped in shown
    assert retries in shown
    assert ("due and not sent" in shown) == ("counted apart" in shown) == bool(number)


def test_what_is_unusual_about_tokens_is_said_only_then() -> None:
    """Estimates, zero gaps, bundled tokens, short answers and buffered streams change what numbers mean."""
    words = ("tokens per event", "are zero", "without usage", "two pieces", "shorter than asked")
    plain = answered(30, ttft_ms=9, gap_ms=3, tokens=4)
    shown = text(Run.of(recorded({Key("one", "chat"): plain}), Meta()))
    assert not any(word in shown for word in words)
    plain.histogram("itl").add(0)
    plain.counters |= {"tokens_received": 240, "estimated": 1, "coalesced": 2, "short_outputs": 3}
    shown = text(Run.of(recorded({Key("one", "chat"): plain}), Meta()))
    assert all(word in shown for word in words)


def test_case_24_of_events_that_bundle_tokens_the_report_tells_the_gap_by_token_or_how_to_have_it() -> None:
    """Gaps between events are several times too long for who reads them as gaps between tokens."""
    cells = {Key("one", "chat"): answered(200, ttft_ms=9, gap_ms=40, tokens=4)}
    (cell,) = cells.values()
    cell.counters["tokens_received"] = 4 * cell.counters["token_events"]
    asked = Meta(counting=Counting(continuous_usage=True))
    without, in_vain = (" ".join(text(Run.of(recorded(cells), meta)).split()) for meta in (Meta(), asked))
    cell.histogram("itl_token").add(10 * MS, 600)
    with_counts = " ".join(text(Run.of(recorded(cells), asked)).split())
    assert "4.00 tokens per event: gaps are those of events; --continuous-usage asks each for its tokens" in without
    assert "events were asked how many tokens they carry, and told nothing: itl_token is missing" in in_vain
    assert "4.00 tokens per event: gaps are those of events; by token 10.0 (p50) and 10.0 ms (p99)" in with_counts
    assert "told nothing" not in without + with_counts


def test_late_samples_and_errors_of_the_plugin_are_named_with_their_worker() -> None:
    """What we did wrong ourselves is not hidden."""
    recording = recorded({Key("one", "chat"): answered(1, ttft_ms=9, gap_ms=3, tokens=4)}, late=7, plugin_errors=2)
    shown = text(Run.of(recording, Meta()))
    assert "w1: 7 samples came late" in shown
    assert "w1: 2 errors of the plugin" in shown


@pytest.mark.parametrize("number", [0, 1, 12, 13, 14, 900])
def test_of_many_remarks_the_short_report_has_the_first_and_the_last(number: int) -> None:
    """A load shape changes the number of users each second."""
    remarks = [f"{second} s: users {second} → {second + 1}" for second in range(number)]
    run = Run.of(recorded({Key("one", "chat"): answered(1, ttft_ms=9, gap_ms=3, tokens=4)}), Meta(remarks=remarks))
    assert [line[10:] for line in text(run, full=True).splitlines() if "users" in line] == remarks
    shown = [line[10:] for line in text(run).splitlines() if "users" in line]
    assert shown == (remarks if number <= 13 else [*remarks[:6], *remarks[-6:]])
    assert (f"{number - 12} more remarks: --full" in text(run)) == (number > 13)


HOSTILE = "a\x1b[31m\x9b2J\nb\r\t\u202egnp.exe\u2066\x00\x7f\u200b\u2028c\udcff"


def test_printable_leaves_nothing_that_a_terminal_obeys() -> None:
    """White space becomes a blank, the rest an escape that says what it was."""
    assert printable(HOSTILE, 200) == (r"a\x1b[31m\x9b2J b \u202egnp.exe\u2066\x00\x7f\u200b c\udcff")


@pytest.mark.parametrize(
    ("given_text", "width", "shown"),
    [
        ("short", 5, "short"),
        ("longer", 5, "long…"),
        ("会話会話", 8, "会話会話"),
        ("会話会話", 7, "会話会…"),
        ("会話会話", 6, "会話…"),
        ("\x1b\x1b", 4, "…"),
        ("", 5, ""),
        ("x", 1, "x"),
        ("xy", 1, "…"),
    ],
)
def test_printable_cuts_to_columns_not_to_characters(given_text: str, width: int, shown: str) -> None:
    """An escape is cut as a whole, so that no half of it is left."""
    assert printable(given_text, width) == shown


@given(st.text(st.characters(), max_size=60), st.integers(1, 40))
@example("e" + "\u0301" * 50, 3)
def test_printable_keeps_its_promise_for_any_text(anything: str, width: int) -> None:
    """At most `width` columns, one line, no control, format, surrogate or unassigned character."""
    shown = printable(anything, width)
    assert width_of(shown) <= width
    assert len(shown) <= 5 * width
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}


names = st.one_of(st.text(st.characters(), max_size=40), st.sampled_from([HOSTILE, "会話" * 30, "x" * 200, "*"]))
times = st.one_of(st.integers(0, 10**10), st.sampled_from([10**13, 10**17, 10**21]))
lengths = st.one_of(st.none(), st.integers(0, 10**14))
counts = st.one_of(st.integers(0, 2000), st.sampled_from([10**6, 10**9, 10**13, 10**17]))
outcomes = st.sampled_from(["ok|200", "http_429|429", "connect_failed|0", "cancelled|200", "first_token_timeout|200"])


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Draw a cell of any samples and counts, however unlikely together."""
    cell = Cell()
    for metric in [*METRICS, "read_lag", "uncertainty"]:
        for value in draw(st.lists(times, max_size=2)):
            cell.histogram(metric).add(value, draw(st.sampled_from([1, 30, 10**9])))
    kinds = draw(st.lists(outcomes, unique=True))
    listed = ("sent", "token_events", "tokens_received", "tokens_failed", "failed_without_token", *COUNTS)
    cell.counters = {name: draw(counts) for name in [*listed, *(f"outcome|{kind}" for kind in kinds)]}
    return cell


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a run with names, messages and numbers of any size."""
    keys = draw(st.lists(st.builds(Key, names, st.sampled_from(["chat", "completions"])), max_size=3, unique=True))
    failures = [
        Failure(
            scenario=draw(names),
            endpoint="chat",
            outcome=draw(st.sampled_from(["http_429", "truncated"])),
            status=429,
            first_ns=draw(times),
            last_ns=draw(times),
            message=draw(names),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    slow = [
        Slow(
            scenario=draw(st.sampled_from([*(key.scenario for key in keys), ""])),
            endpoint="chat",
            metric=draw(st.sampled_from(["ttft", "itl_max"])),
            value_ns=draw(times),
            at_ns=draw(times),
            worker=draw(names),
            request_id=draw(names),
            input_tokens=draw(st.one_of(st.none(), counts)),
            output_tokens=draw(counts),
            in_flight=draw(counts),
            outcome=draw(st.sampled_from(["ok", "connection_lost", "first_token_timeout"])),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    gauges = {name: draw(times) for name in ("in_flight_peak", "in_flight_ns", "cpu_ns", "loop_lag_ns", "late")}
    meta = Meta(
        name=draw(names),
        started=draw(names),
        target=draw(names),
        model=draw(names),
        scenarios=draw(st.dictionaries(names, names, max_size=2)),
        parts=draw(st.lists(names, max_size=2)),
        load=draw(st.dictionaries(names, names, max_size=2)),
        missing_workers=draw(st.lists(names, max_size=2)),
        ended_early=draw(st.booleans()),
        remarks=draw(st.lists(names, max_size=2)),
        plugin_version=draw(names),
        stability=draw(st.booleans()),
    )
    recording = recorded({key: draw(cells()) for key in keys}, failures=failures, slow=slow, **gauges)
    recording.gauges = {(draw(names), 0): seen for seen in recording.gauges.values()}
    recording.length_ns = draw(lengths)
    return Run.of(recording, meta)


@settings(max_examples=150, deadline=None)
@given(runs(), st.booleans())
def test_no_line_is_wider_than_a_page_or_harmful_whatever_the_run_holds(run: Run, full: bool) -> None:  # noqa: FBT001
    """However long, wide or hostile the names, and however large the numbers."""
    shown = text(run, full=full)
    assert max(map(width_of, shown.split("\n"))) <= COLUMNS
    assert all(char == "\n" or char.isprintable() for char in shown)


@pytest.mark.parametrize("field", ["name", "target", "model", "started", "plugin_version"])
def test_a_hostile_text_in_the_file_stays_harmless(field: str) -> None:
    """A run file may come from anybody; its words are escaped wherever they are shown."""
    run = three_scenarios()
    changes: dict[str, Any] = {field: HOSTILE}
    shown = text(replace(run, meta=replace(run.meta, **changes)), full=True)
    assert r"a\x1b[31m\x9b2J" in shown
    assert "\x1b" not in shown
