"""Comparisons: what differs, words that chance does not make, limits, the rule, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from windowed import Change, Traffic, log_normal, steadily

from vllm_locust import chance, cli
from vllm_locust.comparison import Comparison
from vllm_locust.comparison import compare as compared
from vllm_locust.difference import Word
from vllm_locust.errors import ExitCode
from vllm_locust.figure import FIGURES
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


def run(seed: int, *, slower: Change = steadily, windows: int = 30, **meta: Any) -> Run:
    return Run.of(log_normal(seed, TRAFFIC, windows, slower=slower), replace(META, **meta))


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
