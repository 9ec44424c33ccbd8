"""A run as Markdown, read by a parser of it."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from windowed import Traffic, log_normal

from vllm_locust import cli, overview
from vllm_locust.markdown import cell, code, text
from vllm_locust.results import Run, save
from vllm_locust.summary import Meta
from vllm_locust.terminal import printable

HOSTILE = 'a|b `c` **d** <img src=x onerror="x()"> @somebody [e](http://f) \\| \x1b[31m\nnext'


class Read(HTMLParser):
    """The elements of a page, and what is in its code and in the cells of its tables."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").render(markdown))

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "code":
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "code" in self._open:
            self.code[-1] += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data


@given(st.text(max_size=40))
@example("`")
@example("``` ` ```")
@example("a\\|b")
@example(HOSTILE)
def test_a_text_of_anybody_stays_what_it_is_in_a_cell(given: str) -> None:
    read = Read(f"| a | b |\n| --- | --- |\n| {cell(given)} | 1 |\n")
    assert read.rows[1][1] == "1"
    assert " ".join(read.rows[1][0].split()) == printable(given)
    (line,) = Read(f"- {code(given)}\n").code
    assert " ".join(line.split()) == printable(given)
    assert read.tags <= {"table", "thead", "tbody", "tr", "th", "td", "code"}


def hostile_run() -> Run:
    recording = log_normal(1, {HOSTILE: Traffic(30), "long": Traffic(12)}, 3)
    meta = Meta(
        name=HOSTILE,
        run="r1",
        started="2026-01-02T03:04:05+00:00",
        target=f"http://x/{HOSTILE}",
        parts=[HOSTILE, "long"],
        limits=["ttft p95 < 1ms", "failures < 50%"],
        remarks=[HOSTILE],
        load={"users": 3},
    )
    return Run.of(recording, meta)


def test_a_report_has_the_numbers_of_the_run_and_no_markup_of_anybody_else() -> None:
    run = hostile_run()
    shown = text(run)
    read = Read(shown)
    assert read.tags == {
        "h3",
        "ul",
        "li",
        "p",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
    }
    assert {printable(HOSTILE), "long", "all"} <= set(read.code)
    rows = {row[0]: row[1:] for row in read.rows}
    for name, *numbers in overview.rows(run.summary):
        assert rows[name] == numbers
    assert rows["ttft p95 < 1ms"][0] == "missed"
    assert rows["failures < 50%"][0] == "met"
    assert read.code[0] == printable(HOSTILE)
    assert shown.splitlines()[0].endswith(": exit code 3")
    assert any("limit is < 1ms" in reason for reason in read.code)


def test_a_saved_run_is_printed_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile_run()
    path = save(run, tmp_path)
    assert cli.main(["report", "--format", "markdown", str(path)]) == 0
    assert capsys.readouterr().out == text(run)
    with pytest.raises(SystemExit, match="2"):  # not one of them in silence
        cli.main(["report", "--format", "markdown", "--html", str(tmp_path / "page.html"), str(path)])
    assert not (tmp_path / "page.html").exists()
