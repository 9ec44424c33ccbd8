"""`vllm-locust gate`: from nothing to an exit code, with real runs against a simulator that gets slower."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from processes import MIXED, Process, assert_clean, headless, locust, process, simulator, wait_for
from test_demo import left

from vllm_locust import gate
from vllm_locust.errors import ExitCode
from vllm_locust.results import FILE_NAME

NAME = "<img src=x> | mine"
LOAD = ("-u", "4", "-r", "4", "-t", "6s", "--parts", "short", "--name", NAME, "--save-samples", "3")
SERVER = ("--ttft", "40ms", "--itl", "2ms")
ROOM = ("--limit-difference", "ttft p50 +100%", "--limit-difference", "short: e2el p50 +100%")
"""More than a busy machine makes of a run, and less than the slower server does."""


def gated(folder: Path, host: str, *options: str, load: tuple[str, ...] = LOAD, locustfile: Path = MIXED) -> list[str]:
    """Return the command of a gate around a run."""
    locust = ["-f", str(locustfile), *(word for word in headless(folder, host, *load) if word not in HEADLESS)]
    return [sys.executable, "-m", "vllm_locust", "gate", *options, "--", *locust]


_AT_EXIT = re.compile(
    r"^Exception ignored in: <function _removeHandlerRef .*?^RuntimeError: greenlet is being finalized$",
    re.MULTILINE | re.DOTALL,
)
"""What an older gevent prints where Locust refuses its command line and the interpreter ends: nobody raised it."""
HEADLESS = ("--headless", "--only-summary")
"""What the gate says itself."""


def ran(folder: Path, command: list[str], **env: str) -> tuple[int, str]:
    """Run a gate to its end; returns its exit code and what it said."""
    log = folder / f"gate-{len(list(folder.glob('gate-*')))}.log"
    with process(command, log, cwd=folder, env={**os.environ, "GITHUB_STEP_SUMMARY": "", **env}) as running:
        code = running.wait()
        assert "Traceback" not in _AT_EXIT.sub("", running.output), running.output
        return code, running.output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("server"), *SERVER) as url:
        yield url


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("slower"), "--ttft", "250ms", "--itl", "8ms") as url:
        yield url


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, server: str) -> tuple[Path, str, str]:
    """Return where the first run of a project stored its baseline, what it said, and its summary."""
    folder = tmp_path_factory.mktemp("first")
    decoy = folder / "results" / "newer"
    decoy.mkdir(parents=True)
    (decoy / FILE_NAME).write_text("{}")
    os.utime(decoy / FILE_NAME, (4e9, 4e9))  # of a later year: the newest run there is
    baseline, summary = folder / "kept" / "baseline", folder / "summary.md"
    summary.write_text("# Of a step before\n")
    command = gated(folder, server, "--baseline", str(baseline), "--save-baseline")
    code, said = ran(folder, command, GITHUB_STEP_SUMMARY=str(summary))
    assert code == 0, said
    return baseline, said, summary.read_text()


def test_the_first_run_is_stored_as_it_is(first: tuple[Path, str, str]) -> None:
    baseline, said, _ = first
    (saved,) = (baseline.parent.parent / "results").glob(f"img-src-x-mine_*/{FILE_NAME}")
    assert (baseline / FILE_NAME).read_bytes() == saved.read_bytes()
    assert [path.name for path in baseline.parent.iterdir()] == ["baseline"]
    assert said.endswith(f"\nGate      run: ok\n          baseline: stored in {baseline}\n          passed\n")
    assert json.loads(saved.read_text())["meta"]["name"] == NAME


def test_the_summary_is_added_to_the_file_of_the_job_as_markdown(first: tuple[Path, str, str]) -> None:
    _, _, summary = first
    html = rendered(summary)
    assert headings(summary)[:2] == ["Of a step before", "Gate: passed"]
    assert html.count("<table>") == 2  # figures and outcomes
    assert "<img" not in html
    assert "&lt;img src=x&gt; | mine" in html


def rendered(markdown: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(markdown))


def headings(markdown: str) -> list[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    return [
        inner.content for token, inner in pairwise(tokens) if token.type == "heading_open" and inner.type == "inline"
    ]


def test_the_same_server_passes_and_its_baseline_stays(
    tmp_path: Path, server: str, first: tuple[Path, str, str]
) -> None:
    baseline, _, _ = first
    before = (baseline / FILE_NAME).read_bytes()
    summary = tmp_path / "summary.md"
    options = ("--baseline", str(baseline), "--save-baseline", *ROOM, "--summary", str(summary))
    code, said = ran(tmp_path, gated(tmp_path, server, *options))
    assert code == 0, said
    assert "\nVerdict   ok\n" in said
    assert "\nLimits    met: ttft p50 +100%: " in said
    assert "\nSamples   answers to " in said
    assert "answers to " in summary.read_text()
    assert said.endswith("\n          passed\n")
    assert (baseline / FILE_NAME).read_bytes() == before
    assert headings(summary.read_text())[0] == "Gate: passed"
    assert rendered(summary.read_text()).count("<table>") == 2 + 1  # those of the run, and the comparison of `short`


def test_a_slower_server_is_worse_and_fails(tmp_path: Path, slower: str, first: tuple[Path, str, str]) -> None:
    baseline, _, _ = first
    summary = tmp_path / "summary.md"
    options = ("--baseline", str(baseline / FILE_NAME), "--summary", str(summary), "--html", "comparison.html")
    code, said = ran(tmp_path, gated(tmp_path, slower, *options))
    assert code == 3, said
    assert "\nVerdict   ok\n" in said  # of the run by itself
    assert said.endswith("\n          failed (exit code 3)\n")
    assert "\nGate      run: ok\n          comparison: worse: " in said
    assert headings(summary.read_text())[0] == "Gate: failed (exit code 3)"
    assert (tmp_path / "comparison.html").read_text().startswith("<!doctype html>")


def test_a_limit_on_the_difference_is_held_to_several_runs(
    tmp_path: Path, slower: str, first: tuple[Path, str, str]
) -> None:
    """A path may be given twice, as may runs after restarts."""
    baseline, _, _ = first
    code, said = ran(tmp_path, gated(tmp_path, slower, "--baseline", str(baseline), str(baseline), *ROOM))
    assert code == 3, said
    assert "missed: ttft p50 +100%: " in said


DAMAGED = "damaged.json"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--baseline", "nowhere"], "--baseline nowhere: no run is there"),
        (["--baseline", "empty"], "or --save-baseline to have a run that passes stored there"),
        (["--baseline", "full"], f"{Path('full') / FILE_NAME}: no such file"),
        (["--baseline", "full", "--save-baseline"], f"{Path('full') / FILE_NAME}: no such file"),
        (["--baseline", DAMAGED], f"{DAMAGED}: no run file of vllm-locust"),
        (["--baseline", "a", "b", "--save-baseline"], "--save-baseline is for one --baseline, not for 2"),
        (["--baseline", "a.json", "--save-baseline"], "--baseline a.json: a baseline is stored as a directory"),
        (["--baseline", "/proc/a/b", "--save-baseline"], "--baseline /proc/a/b: cannot be written to"),
        (["--save-baseline"], "--save-baseline is for a comparison; name what to compare with by --baseline"),
        (["--rule", "tuned"], "--rule is for a comparison"),
        (["--html", "comparison.html"], "--html is for a comparison"),
        (["--baseline", "a", "--save-baseline", "--html", "b/c.html"], "--html b/c.html: there is no such directory"),
        (["--limit-difference", "ttft p95 +5%"], "--limit-difference is for a comparison"),
        (["--limit-difference", "ttft p95 < 5s"], "--limit-difference"),
        (["--summary", "nowhere/summary.md"], "--summary nowhere/summary.md: cannot be written to"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "else.txt").touch()
    (tmp_path / DAMAGED).write_text("{}")
    assert said in refused(tmp_path, *options)


def refused(folder: Path, *options: str) -> str:
    """Return what is said where nobody so much as connects to the server, and nothing is left."""
    before = sorted(folder.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"http://127.0.0.1:{listener.getsockname()[1]}"
        code, output = ran(folder, gated(folder, host, *options))
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert code == 2, output
    assert len(output.splitlines()) == 1
    assert sorted(path for path in folder.rglob("*") if path.suffix != ".log") == before
    return output


def test_a_limit_on_a_part_that_no_baseline_has_is_refused(tmp_path: Path, first: tuple[Path, str, str]) -> None:
    baseline, _, _ = first
    said = refused(tmp_path, "--baseline", str(baseline), "--limit-difference", "lnog: ttft p50 +5%")
    assert said.startswith("vllm-locust: --limit-difference: 'lnog: ttft p50 +5%': no part 'lnog'")


def test_what_the_gate_needs_of_locusts_options(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_locust", "gate"]
    code, said = ran(tmp_path, command)
    assert (code, "give the options of locust after --" in said) == (2, True)
    code, said = ran(tmp_path, [*command, "--", "-f", str(MIXED), "--saved-path=mine"])
    assert (code, "--saved-path is how it finds the run" in said) == (2, True)


def test_ctrl_c_ends_the_run_in_order_and_nothing_is_compared_or_stored(
    tmp_path: Path, server: str, first: tuple[Path, str, str]
) -> None:
    baseline, _, _ = first
    long = (*LOAD, "-t", "60s")
    for options, fact in (
        (["--baseline", str(baseline)], "comparison: not made: the run ended early, or sent nothing"),
        (["--baseline", "new", "--save-baseline"], "baseline: not stored in new, since the run did not pass"),
    ):
        with process(gated(tmp_path, server, *options, load=long), tmp_path / "gate.log", cwd=tmp_path) as running:
            wait_for(lambda running=running: "streams in flight" in running.output, "progress")
            running.interrupt()
            assert running.wait() == 1, running.output
            assert_clean(running)
            assert "the run ended early" in running.output
            assert told(running) == ["run: exit code 1", fact, "failed (exit code 1)"]
            wait_for(lambda: not left(tmp_path), "end of everything", 10)
    assert not (tmp_path / "new").exists()


def told(running: Process) -> list[str]:
    """Return what is said of the gate."""
    _, _, last = running.output.rpartition("\nGate ")
    return [line.strip() for line in last.splitlines()]


def test_a_run_that_misses_its_own_limit_fails_and_is_not_stored(tmp_path: Path, server: str) -> None:
    load = (*LOAD, "-t", "2s", "--limit", "ttft p50 < 1ms")
    (tmp_path / "kept").mkdir()
    code, said = ran(tmp_path, gated(tmp_path, server, "--baseline", "kept", "--save-baseline", load=load))
    assert code == 3, said
    assert "baseline: not stored in kept, since the run did not pass" in said
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize(
    ("load", "locustfile", "code"),
    [
        (("-t", "2s"), MIXED, 1),  # nobody is there
        (("-t", "2s", "--window", "soon"), MIXED, 2),
        (("-t", "2s", "--no-such-option"), MIXED, 2),
        (("-t", "2s"), Path("nowhere.py"), 1),
    ],
)
def test_a_run_that_cannot_be_made_fails_as_it_does(
    tmp_path: Path, load: tuple[str, ...], locustfile: Path, code: int
) -> None:
    summary = tmp_path / "summary.md"
    command = gated(tmp_path, "http://127.0.0.1:9", "--summary", str(summary), load=load, locustfile=locustfile)
    found, said = ran(tmp_path, command)
    assert found == code, said
    lines = [f"run: exit code {code}", "nothing was saved: see what the run said", f"failed (exit code {code})"]
    assert [line[10:] for line in said.splitlines()[-3:]] == lines
    assert headings(summary.read_text()) == [f"Gate: {lines[-1]}"]


@pytest.mark.parametrize(("place", "code"), [("saved.txt", 0), ("nowhere/saved.txt", 1)])
def test_a_run_tells_a_script_where_it_was_saved(tmp_path: Path, server: str, place: str, code: int) -> None:
    command = locust(*headless(tmp_path, server, *LOAD, "-t", "2s", "--results", "here", "--saved-path", place))
    found, said = ran(tmp_path, command)
    assert found == code, said
    (saved,) = (tmp_path / "here").glob(f"*/{FILE_NAME}")
    if code:
        assert f"{place}: cannot be written to (No such file or directory)" in said
    else:
        assert (tmp_path / place).read_text() == str(saved)


@pytest.mark.parametrize(
    ("run", "compared", "worst"),
    [(0, 0, 0), (0, 3, 3), (0, 4, 4), (3, 0, 3), (3, 4, 4), (4, 3, 4), (1, 3, 1), (1, 4, 4), (2, 3, 2), (7, 4, 7)],
)
def test_the_worse_of_two_codes_is_that_of_the_gate(run: int, compared: int, worst: int) -> None:
    """4 beats 1, which beats 3; what is nobody's of ours, a locustfile's own say, stays."""
    assert gate._worse(run, ExitCode(compared)) == worst


def test_help_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_locust import cli  # noqa: PLC0415

    with pytest.raises(SystemExit):
        cli.main(["gate", "--help"])
    shown: Any = capsys.readouterr().out
    assert shown.startswith("usage: vllm-locust gate [options] -- OPTIONS OF LOCUST\n")
