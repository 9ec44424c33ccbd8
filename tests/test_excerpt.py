"""Parts of a run: whole windows that add up to it."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windowed import Traffic, log_normal

from vllm_locust import cli, page, report
from vllm_locust.cell import total
from vllm_locust.errors import InputError
from vllm_locust.excerpt import excerpt
from vllm_locust.recording import Failure, Mark
from vllm_locust.results import Run, save
from vllm_locust.slowest import Slow
from vllm_locust.summary import Meta

TRAFFIC = {"short": Traffic(20), "long": Traffic(10, ttft_s=0.3)}
WINDOWS = 12


def whole(*, steady_s: int = 0) -> Run:
    recording = log_normal(1, TRAFFIC, WINDOWS)
    recording.steady_ns = steady_s * 10**9
    for name, at_s in (("short", 15), ("long", 95)):
        failure = Failure(
            scenario=name,
            endpoint="chat",
            outcome="http_5xx",
            status=500,
            first_ns=at_s * 10**9,
            last_ns=at_s * 10**9,
            message=name,
        )
        recording.failures[failure.kind] = failure
        recording.slowest[name, "ttft"] = [
            Slow(
                scenario=name,
                endpoint="chat",
                metric="ttft",
                value_ns=10**9,
                at_ns=at_s * 10**9,
                worker="w1",
                request_id=f"{name}-1",
                input_tokens=1,
                output_tokens=1,
                in_flight=1,
                outcome="ok",
            )
        ]
        recording.marks.append(Mark(at_ns=at_s * 10**9, text=name))
    limits = ["ttft p95 < 1ms", "short: ttft p95 < 1ms"]
    return Run.of(recording, Meta(name="a", parts=[*TRAFFIC], limits=limits, stability=True))


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, WINDOWS - 1), max_size=4))
def test_parts_that_share_out_the_windows_add_up_to_the_run(cuts: set[int]) -> None:
    run = whole()
    edges = [None, *(f"{10 * cut}s" for cut in sorted(cuts)), None]
    parts = [excerpt(run, since=a, until=b, scenario=name) for a, b in pairwise(edges) for name in TRAFFIC]
    added, every = (total(cell for one in runs for cell in one.recording.totals.values()) for runs in (parts, [run]))
    assert added.counters == every.counters
    for metric, histogram in every.histograms.items():
        assert [*added.histograms[metric]] == [*histogram]
        assert (added.histograms[metric].sum, added.histograms[metric].max) == (histogram.sum, histogram.max)
    assert sum(part.summary["duration_s"] for part in parts) == pytest.approx(2 * run.summary["duration_s"])
    assert sum(part.summary["total"]["requests"] for part in parts) == run.summary["total"]["requests"]


def test_all_of_a_run_is_the_run() -> None:
    run = whole()
    part = excerpt(run, since="0s", until="120s")
    assert part.summary == {k: v for k, v in run.summary.items() if k != "stability"}


def test_a_part_has_what_happened_then_and_nothing_else() -> None:
    run = whole(steady_s=20)
    part = excerpt(run, since="35s", until="100.5s", scenario="long")
    assert part.summary["duration_s"] == pytest.approx(60)
    assert [*part.summary["scenarios"]] == ["long"]
    assert [kind["message"] for kind in part.summary["failures"]] == ["long"]
    assert [slow["request_id"] for slow in part.summary["slowest"]] == ["long-1"]
    assert [mark.text for mark in part.recording.marks] == ["long"]
    assert part.meta.remarks[0] == "a part of the run, 40.0 s to 100 s of 120 s in whole windows, scenario long"
    assert part.summary["limits"] == []
    assert part.summary["warmup"] is None
    own = [run.recording.window(index) for index in range(4, 10)]
    expected = total(cell for cells in own for key, cell in cells.items() if key.scenario == "long")
    assert part.summary["total"]["ttft"]["count"] == expected.histograms["ttft"].count
    assert part.summary["total"]["rates"]["output_tokens_per_s"] == expected.counters["tokens_received"] / 60
    assert [limit["scope"] for limit in excerpt(run, scenario="short").summary["limits"]] == ["short"]
    assert [limit["scope"] for limit in excerpt(run, until="40s").summary["limits"]] == ["", "short"]


def test_a_part_of_a_run_with_a_warm_up_leaves_it_out() -> None:
    part = excerpt(whole(steady_s=20), until="60s")
    assert part.summary["duration_s"] == 40
    assert part.summary["warmup"]["s"] == 20
    within = excerpt(whole(steady_s=20), until="20s")
    assert within.summary["duration_s"] == 20


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"since": "61s", "until": "69s"}, "no whole window in it; the run has 12 of 10.0 s, to 120 s"),
        ({"since": "60s", "until": "30s"}, "--from 60s --to 30s: no whole window"),
        ({"since": "200s"}, "no whole window"),
        ({"since": "soon"}, "--from: 'soon' is not a duration"),
        ({"until": "-1s"}, "--to: '-1s' is not a duration"),
        ({"scenario": "other"}, "--scenario: 'other' is not in this run; there are short, long"),
    ],
)
def test_a_part_that_is_not_there_is_refused(asked: dict[str, str], what: str) -> None:
    with pytest.raises(InputError) as caught:
        excerpt(whole(), **asked)
    assert what in str(caught.value)


def test_every_report_of_a_run_is_one_of_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = whole()
    path = save(run, tmp_path)
    part = excerpt(run, since="20s", until="80s", scenario="long")
    asked = ["report", str(path), "--from", "20s", "--to", "80s", "--scenario", "long"]
    assert cli.main(asked) == 0
    assert capsys.readouterr().out == report.text(part)
    assert cli.main([*asked, "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == page.of_run(part)
    assert cli.main([*asked, "--format", "markdown"]) == 0
    assert "20.0 s to 80.0 s of 120 s" in capsys.readouterr().out
    assert cli.main([*asked, "--full"]) == 0
    assert "short-1" not in capsys.readouterr().out
