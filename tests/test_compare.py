"""Comparisons: what differs, words that chance does not make, limits, the rule, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_samples import example
from windowed import Change, Traffic, log_normal, recorded, steadily

from vllm_locust import allowance, chance, cli, compare
from vllm_locust.cell import Cell, Key
from vllm_locust.comparison import Comparison
from vllm_locust.comparison import compare as compared
from vllm_locust.difference import Difference, Word
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.figure import FIGURES, Figure
from vllm_locust.judgement import State
from vllm_locust.quantity import NS_PER_S
from vllm_locust.results import Run, save
from vllm_locust.side import measure, side
from vllm_locust.summary import Meta

TRAFFIC = {"short": Traffic(120, sigma=0.25), "long": Traffic(60, ttft_s=0.13, sigma=0.25)}
META = Meta(
    name="a",
    run="r1",
    target="http://x:8000",
    parts=[*TRAFFIC],
    scenarios={"MixedChat": "mixed"},
    endpoints={"MixedChat": "chat"},
    scenario_hash="h1",
    load={"users": 20, "spawn_rate": 20, "workers": 2},
)


def run(chance_of: int, *, slower: Change = steadily, windows: int = 30, **meta: Any) -> Run:
    return Run.of(log_normal(chance_of, TRAFFIC, windows, slower=slower), replace(META, **meta))


def long_by(factor: float) -> Change:
    return lambda scenario, _: factor if scenario == "long" else 1.0


def words(found: Comparison) -> dict[str, Word]:
    return {row.name: row.word for row in found.differences}


def test_the_law_of_student_is_that_of_the_tables() -> None:
    # Abramowitz and Stegun, table 26.10.
    for freedom, within_95, within_99 in ((1, 12.706, 63.657), (5, 2.571, 4.032), (30, 2.042, 2.750)):
        assert chance.student_within(0.95, freedom) == pytest.approx(within_95, abs=6e-4)
        assert chance.student_within(0.99, freedom) == pytest.approx(within_99, abs=6e-4)
    assert chance.student_above(0, 7.5) == 0.5
    assert chance.student_above(-2, 9) + chance.student_above(2, 9) == 1
    assert chance.student_above(math.inf, 3) == 0
    assert chance.student_above(4, 1e6) == pytest.approx(math.erfc(4 / math.sqrt(2)) / 2, rel=1e-3)


def test_a_figure_has_the_value_that_the_report_of_its_run_shows() -> None:
    told = run(1)
    for name in ("", "short", "long"):
        scope = told.summary["scenarios"][name] if name else told.summary["total"]
        for figure in FIGURES:
            match figure.metric:
                case "failures":
                    expected = scope["failed_share"]
                case "goodput":
                    expected = None
                case "ttft" | "e2el":
                    expected = scope["judged"][figure.metric][figure.statistic]
                case "request_per_s" | "output_tokens_per_s":
                    expected = scope["rates"][figure.metric]
                case _:
                    expected = scope[figure.metric][figure.statistic]
            found = measure(side([told]), figure, name)
            assert (found and found.value) == (expected and pytest.approx(expected, rel=1e-8)), figure


def test_what_changed_has_a_word_and_what_did_not_has_none() -> None:
    found = compared([run(1)], [run(2, slower=long_by(0.9))], tuned=True)
    said = words(found)
    assert {name for name, word in said.items() if word is Word.WORSE} == set()
    assert {"long: TTFT p50", "long: TTFT p95", "long: TPOT mean"} <= {n for n, w in said.items() if w is Word.BETTER}
    assert {word for name, word in said.items() if name.startswith("short")} == {Word.UNCLEAR}
    assert found.exit_code == ExitCode.OK
    back = compared([run(2, slower=long_by(0.9))], [run(1)])
    assert words(back)["long: TTFT p50"] is Word.WORSE
    assert back.exit_code == ExitCode.MISSED


def test_the_same_has_no_clear_difference_twenty_times_over() -> None:
    for seed in range(20):
        found = compared([run(100 + 2 * seed)], [run(101 + 2 * seed)])
        assert set(words(found).values()) == {Word.UNCLEAR}, seed


def test_a_comparison_is_printed_with_all_that_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = save(run(1), tmp_path), save(run(2, slower=long_by(1.2), name="b"), tmp_path)
    assert cli.main(["compare", str(base), str(new), "--rule", "tuned", "--limit", "long: ttft p95 +5%"]) == 3
    shown = capsys.readouterr().out
    assert "long: TTFT p95 (+" in shown
    assert "missed: long: ttft p95 +5%: " in shown
    assert "variation between restarts not measured" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert cli.main(["compare", str(base), str(base), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("### no clear difference\n")
    for arguments in ([], [str(base)], [str(base), str(new), "--base", str(base)], ["--base", str(base)]):
        assert cli.main(["compare", *arguments]) == 2
        assert "BASE NEW" in capsys.readouterr().err


# What makes runs incomparable (section H of the cases)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"scenario_hash": "h2"}, "prompts and lengths"),
        ({"scenarios": {"MixedChat": "other"}}, "scenario"),
        ({"endpoints": {"MixedChat": "completions"}}, "endpoints"),
        ({"cache": "cold"}, "cache"),
        ({"load": META.load | {"users": 40}}, "load"),
        ({"load": META.load | {"arrivals": "poisson", "request_rate": 5}}, "load"),
        ({"ended_early": True}, "ended early"),
        ({"missing_workers": ["w2"]}, "data missing"),
    ],
)
def test_case_56_and_76_what_answers_another_question_is_refused_unless_forced(
    changed: dict[str, Any], what: str
) -> None:
    sides = [run(1)], [run(2, **changed)]
    found = compared(*sides)
    assert what in {one.what for one in found.differing if one.prevents}
    assert (found.word, found.exit_code, found.differences) == (Word.INCOMPARABLE, ExitCode.NOT_JUDGED, ())
    shown = compare.text(found)
    assert f"incomparable: {what}" in shown
    assert "TTFT" not in shown
    forced = compared(*sides, force=True)
    assert forced.differences
    assert what in {one.what for one in forced.differing}
    assert compare.text(forced).index(f"{what}: ") < compare.text(forced).index("TTFT")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"seed": 7}, "seed"),
        ({"model": "other"}, "model"),
        ({"target": "http://y"}, "target"),
        ({"plugin_version": "9.9"}, "vllm-locust"),
        ({"load": META.load | {"workers": 3}}, "workers"),
        ({"load": META.load | {"spawn_rate": 1}}, "spawn rate"),
    ],
)
def test_case_76_what_differs_and_may_is_named_before_any_number(changed: dict[str, Any], what: str) -> None:
    found = compared([run(1)], [run(2, **changed)])
    assert [one.what for one in found.differing] == [what]
    assert found.exit_code == ExitCode.OK
    shown = compare.text(found)
    assert shown.index(f"{what}: ") < shown.index("TTFT")


def test_what_came_out_otherwise_is_named() -> None:
    other = {name: replace(traffic, tokens=110, input_tokens=210) for name, traffic in TRAFFIC.items()}
    new = Run.of(log_normal(2, other, 24), META)
    named = {one.what for one in compared([run(1)], [new]).differing}
    assert named == {
        "duration",
        *(f"{name}: mean {kind} tokens" for name in TRAFFIC for kind in ("input", "output") if kind == "input"),
    }


def test_a_run_in_which_nothing_was_sent_is_refused() -> None:
    found = compared([run(1)], [Run.of(recorded([{}]), META)])
    assert "nothing sent" in {one.what for one in found.differing if one.prevents}
    assert found.exit_code == ExitCode.NOT_JUDGED


# Numbers by hand


def windows(change: Callable[[Cell, int], None], number: int = 30) -> Run:
    """Return a run of windows that `change` fills, given their cell and index."""
    cells = [Cell() for _ in range(number)]
    for index, cell in enumerate(cells):
        change(cell, index)
    return Run.of(recorded([{Key("short", "chat"): cell} for cell in cells]), replace(META, parts=["short"]))


def of(*, ttft_s: float | None = 0.3, failed: int = 0, tokens: int = 1000) -> Run:
    """Return a run whose windows are alike; what failed did so in the first one."""

    def fill(cell: Cell, index: int) -> None:
        bad = failed if not index else 0
        cell.counters = {"sent": 20 + bad, "outcome|ok|200": 20, "tokens_received": tokens}
        if bad:
            cell.counters |= {"outcome|http_5xx|500": bad, "failed_without_token": bad}
        if ttft_s is not None:
            cell.histogram("ttft").add(round(ttft_s * NS_PER_S), 20)

    return windows(fill)


def test_a_change_that_rounds_to_nothing_has_no_sign_of_a_fall() -> None:
    told = Difference(scenario="a", figure=Figure("ttft", "p95"), base=1.0, new=0.9999)
    assert told.shown(told.change) == "+0.0 %"
    told = Difference(scenario="a", figure=Figure("failures"), base=0.5, new=0.49999)
    assert told.shown(told.change) == "+0.00 pp"


def row(found: Comparison, name: str) -> Difference:
    return next(row for row in found.differences if row.name == name)


def test_case_73_what_only_one_side_has_is_incomparable_and_never_passes() -> None:
    found = compared([of()], [of(ttft_s=None)])
    missing = row(found, "short: TTFT p95")
    assert (missing.word, missing.note, missing.new) == (Word.INCOMPARABLE, "the new has none", None)
    assert row(found, "short: requests/s").word is Word.UNCLEAR
    assert (found.word, found.exit_code) == (Word.INCOMPARABLE, ExitCode.NOT_JUDGED)
    shown = compare.text(found)
    assert "incomparable: the new has none" in shown
    back = compared([of(ttft_s=None)], [of()])
    assert row(back, "short: TTFT p95").note == "the base has none"
    assert back.exit_code == ExitCode.NOT_JUDGED
    judged = compared([of()], [of(ttft_s=None)], allowances=[allowance.parse("ttft p95 +5%")]).allowances
    assert [one.state for one in judged] == [State.INCONCLUSIVE]


@pytest.mark.parametrize(
    ("base", "new", "name", "word", "shown"),
    [
        (of(), of(failed=12), "short: failures", Word.WORSE, "+1.96 pp"),
        (of(), of(), "short: failures", Word.UNCLEAR, "+0.00 pp"),
        (of(tokens=1000), of(tokens=0), "short: output tok/s", Word.WORSE, "-100.0 %"),
        (of(tokens=0), of(tokens=1000), "short: output tok/s", Word.BETTER, "+100"),
        (of(tokens=0), of(tokens=0), "short: output tok/s", Word.UNCLEAR, "+0.00"),
        (of(ttft_s=0.3), of(ttft_s=0.33), "short: TTFT p95", Word.WORSE, "+10.0 %"),
        (of(ttft_s=0.3), of(ttft_s=0.27), "short: TTFT p95", Word.BETTER, "-10.0 %"),
    ],
)
def test_case_74_zero_baselines_and_directions(base: Run, new: Run, name: str, word: Word, shown: str) -> None:
    found = compared([base], [new])
    told = row(found, name)
    assert told.word is word
    assert told.shown(told.change).startswith(shown)
    text = compare.text(found) + compare.as_markdown(found)
    assert not {"inf", "nan", "None"} & set(text.replace("`", " ").replace("(", " ").split())


@pytest.mark.parametrize(
    ("new_s", "state", "shown"),
    [(0.33, State.MISSED, "+10.0 %"), (0.27, State.MET, "-10.0 %"), (0.3, State.MET, "+0.0 %")],
)
def test_case_74_a_limit_on_what_changes(new_s: float, state: State, shown: str) -> None:
    found = compared([of(ttft_s=0.3)], [of(ttft_s=new_s)], allowances=[allowance.parse("short: ttft p95 +5%")])
    (judged,) = found.allowances
    assert judged.state is state
    assert f", {shown}" in judged.text
    assert found.exit_code == (ExitCode.MISSED if state is State.MISSED else ExitCode.OK)


def test_a_percentile_among_the_failures_is_failed_and_as_clear_as_they_are() -> None:
    found = compared([of(failed=2)], [of(failed=60)])
    told = row(found, "short: TTFT p95")
    assert (told.new, told.word) == (math.inf, Word.WORSE)
    line = next(line for line in compare.text(found).splitlines() if line.startswith("TTFT p95"))
    assert "failed" in line
    assert row(compared([of(failed=60)], [of(failed=61)]), "short: TTFT p95").word is Word.UNCLEAR


def test_a_percentile_of_few_samples_gets_no_word_and_meets_no_limit() -> None:
    found = compared(
        [windows(lambda cell, _: cell.histogram("ttft").add(NS_PER_S))],
        [windows(lambda cell, _: cell.histogram("ttft").add(NS_PER_S // 2))],
        allowances=[allowance.parse("ttft p99 +5%")],
        force=True,
    )
    told = row(found, "short: TTFT p99")
    assert (told.word, told.note) == (Word.UNCLEAR, "too few samples")
    assert row(found, "short: TTFT p50").word is Word.BETTER
    assert found.allowances[0].state is State.INCONCLUSIVE


def test_good_requests_are_compared_where_they_mean_the_same() -> None:
    def good(share: float, *texts: str) -> Run:
        def fill(cell: Cell, index: int) -> None:
            cell.counters = {"sent": 50, "outcome|ok|200": 50, "good": round(50 * share) + index % 2}

        told = windows(fill)
        return Run.of(told.recording, replace(told.meta, goodput=[*texts]))

    same = compared([good(0.6, "ttft < 1s")], [good(0.8, "ttft < 1s")])
    told = row(same, "short: goodput")
    assert (told.word, told.base, told.new) == (Word.BETTER, pytest.approx(0.61), pytest.approx(0.81))
    assert told.shown(told.change) == "+20.00 pp"
    other = compared([good(0.6, "ttft < 1s")], [good(0.8, "ttft < 2s")])
    assert row(other, "short: goodput").word is Word.INCOMPARABLE
    assert other.exit_code == ExitCode.NOT_JUDGED


def test_windows_need_not_be_alike() -> None:
    """Case 73: a run of longer windows, and one whose last window is a stump."""
    wide = windows(lambda cell, i: cell.histogram("ttft").add(round(0.3 * NS_PER_S), 40 + i % 2), 15)
    cells = [{Key("short", "chat"): cell} for cell in (Cell() for _ in range(31))]
    for index, of_window in enumerate(cells):
        for cell in of_window.values():
            cell.histogram("ttft").add(round(0.3 * NS_PER_S), 20 if index < 30 else 3)
    stump = Run.of(recorded(cells, last_s=1), wide.meta)
    assert len(side([stump]).stretches) == 30
    assert math.fsum(one.length_s for one in side([stump]).stretches) == pytest.approx(301)
    found = compared([wide], [stump], force=True)
    assert row(found, "short: TTFT p95").word is Word.UNCLEAR


def test_too_few_windows_say_so_and_get_no_word() -> None:
    found = compared([run(1, windows=3)], [run(2, windows=3, slower=long_by(0.5))])
    assert {one.word for one in found.differences} == {Word.UNCLEAR}
    assert any("fewer than 4 windows" in remark for remark in found.remarks)
    assert found.exit_code == ExitCode.NOT_JUDGED  # whatever was worse would have passed
    assert "no difference could have been found" in compare.text(found)
    ruled = compared([run(1, windows=3)], [run(2, windows=3, slower=long_by(0.5))], tuned=True)
    assert ruled.rule is not None
    assert (ruled.rule.state, ruled.exit_code) == (State.INCONCLUSIVE, ExitCode.NOT_JUDGED)


# Several runs a side


def test_restarts_that_differ_take_the_word_from_a_difference_that_one_pair_would_have_called_clear() -> None:
    wobbly = [1.0, 1.12, 0.9]
    base = [run(10 + i, slower=lambda _s, _w, f=factor: f) for i, factor in enumerate(wobbly)]
    new = [run(20 + i, slower=lambda _s, _w, f=factor: 0.9 * f) for i, factor in enumerate(wobbly)]
    assert words(compared(base[:1], new[:1]))["short: TTFT p50"] is Word.BETTER
    found = compared(base, new)
    assert words(found)["short: TTFT p50"] is Word.UNCLEAR
    assert not any("restarts" in remark for remark in found.remarks)


def test_restarts_that_agree_make_a_difference_clearer() -> None:
    base, new = ([run(seed + i, slower=long_by(factor)) for i in range(3)] for seed, factor in ((30, 1), (40, 0.95)))
    assert words(compared(base[:1], new[:1]))["long: TTFT p50"] is Word.UNCLEAR
    assert words(compared(base, new))["long: TTFT p50"] is Word.BETTER


# The rule


def test_the_rule_of_tuning_takes_ttft_down_and_leaves_itl_alone() -> None:
    def tuned(ttft: float, itl: float, *, events: int = 1000) -> Run:
        def fill(cell: Cell, index: int) -> None:
            wobble = 1 + 0.01 * (index % 3)
            cell.counters = {
                "sent": 20,
                "outcome|ok|200": 20,
                "token_events": events,
                "tokens_received": 1000,
            }
            cell.histogram("ttft").add(round(ttft * wobble * NS_PER_S), 20)
            for metric in ("itl", "tpot"):
                cell.histogram(metric).add(
                    round(itl * wobble * NS_PER_S * (1000 / events if metric == "itl" else 1)), 20
                )

        return windows(fill)

    base = tuned(0.3, 0.01)
    for new, state, what in (
        (tuned(0.25, 0.01), State.MET, "short: TTFT p95 (-1"),
        (tuned(0.25, 0.011), State.MISSED, "ITL mean (+10.0 %) is clearly higher"),
        (tuned(0.30, 0.01), State.MISSED, "clearly lower in no scenario"),
        (tuned(0.35, 0.01), State.MISSED, "TTFT p95 (+1"),
        (tuned(0.25, 0.01, events=500), State.MET, "by TPOT, since events carry 1 and 2 tokens"),
    ):
        found = compared([base], [new], tuned=True)
        assert found.rule is not None
        assert found.rule.state is state, found.rule
        assert what in found.rule.text
        assert found.exit_code == (ExitCode.OK if state is State.MET else ExitCode.MISSED)


# Words for limits


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft p95 5%", "not one change"),
        ("ttft +5%", "a statistic is missing"),
        ("ttft p95 +5", "has no unit"),
        ("nothing p95 +5%", "no metric 'nothing'"),
        ("failures p95 +5%", "has no statistic"),
        ("failures +3", "points of percent"),
        ("ttft p95 +", "is not a duration"),
        (": ttft p95 +5%", "no part before the colon"),
        ("ttft p95 +5%%", "is not a number"),
    ],
)
def test_a_limit_that_is_none_is_refused_with_what_is_accepted(text: str, words: str) -> None:
    with pytest.raises(InputError, match=r"^--limit: ") as caught:
        allowance.parse(text)
    assert words in str(caught.value)


def test_a_limit_on_a_part_that_nobody_has_is_refused() -> None:
    with pytest.raises(InputError, match="no part 'other'; there are short, long, all"):
        compared([run(1)], [run(2)], allowances=[allowance.parse("other: ttft p95 +5%")])


@pytest.mark.parametrize(
    ("text", "figure", "rises", "most", "relative"),
    [
        ("ttft p95 +5%", Figure("ttft", "p95"), True, 0.05, True),
        ("short: output_tokens_per_s -3%", Figure("output_tokens_per_s"), False, 0.03, True),
        ("ttft p50 + 20ms", Figure("ttft", "p50"), True, 0.02, False),
        ("failures +0.5%", Figure("failures"), True, 0.005, False),
        ("goodput -1%", Figure("goodput"), False, 0.01, False),
        ("request_per_s -2/s", Figure("request_per_s"), False, 2.0, False),
        ("output_tokens mean +10", Figure("output_tokens", "mean"), True, 10.0, False),
    ],
)
def test_a_limit_is_what_it_says(text: str, figure: Figure, *, rises: bool, most: float, relative: bool) -> None:
    parsed = allowance.parse(text)
    assert (parsed.figure, parsed.rises, parsed.relative) == (figure, rises, relative)
    assert parsed.most == pytest.approx(most)
    assert allowance.parse(parsed.text) == parsed


def test_of_how_servers_were_started_the_words_that_differ_are_shown() -> None:
    begun = "vllm serve llama --tensor-parallel-size 2 --max-num-seqs 256 --max-num-batched-tokens {} --port 8000"
    found = compared([run(1, server_config=begun.format(2048))], [run(2, server_config=begun.format(8192) + " -O3")])
    (only,) = found.differing
    assert (only.what, only.base, only.new) == ("server", "2048", "8192 … -O3")
    (only,) = compared([run(1, note="a")], [run(2)]).differing
    assert (only.what, only.base, only.new) == ("note", "a", "unknown")


def test_answers_that_both_runs_kept_are_side_by_side_and_not_in_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = save(run(1), tmp_path), save(run(2, name="b"), tmp_path)
    kept = example(answer="It is so, and so.", output_tokens=5)
    cut = msgspec.structs.replace(kept, answer="It is so", output_tokens=3)
    for path, sample in ((base, kept), (new, cut)):
        (path.parent / "samples.jsonl").write_bytes(msgspec.json.encode(sample) + b"\n")
    assert cli.main(["compare", str(base), str(new.parent), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "answers to 1 prompt beside each other: 0 equal, 1 shorter" in shown
    assert "It is so, and so." in shown
    assert "It is so, and so." in (tmp_path / "page.html").read_text()
    assert cli.main(["compare", str(base), str(new), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert "1 shorter" in shown
    assert "It is so" not in shown


def test_a_scenario_that_one_side_does_not_have_is_incomparable_in_every_figure() -> None:
    new = Run.of(log_normal(2, {"short": TRAFFIC["short"]}), replace(META, parts=["short"]))
    found = compared([run(1)], [new], force=True)
    told = [one for one in found.differences if one.scenario == "long"]
    assert {(one.word, one.new, one.note) for one in told} == {(Word.INCOMPARABLE, None, "the new has none")}


def test_windows_that_are_empty_say_nothing_of_failures() -> None:
    def bursts(cell: Cell, index: int) -> None:
        if index % 15 == 7:
            cell.counters = {"sent": 40, "outcome|ok|200": 40}
            cell.histogram("ttft").add(round(0.3 * NS_PER_S) + index, 40)

    told = row(compared([windows(bursts)], [windows(bursts)]), "short: TTFT p95")
    assert (told.word, told.note) == (Word.UNCLEAR, "")
    assert told.low is not None
