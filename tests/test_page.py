"""The page of charts in a real browser: of a saved picture, and live beside a real run that is started in the form."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import windowed
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from processes import MIXED, Cluster, Process, assert_clean, cluster, free_port, locust, process, simulator, wait_for
from windowed import Traffic, recorded

from vllm_locust import contrast, overview, picture
from vllm_locust.cell import STEADY, Cells, Key
from vllm_locust.comparison import compare
from vllm_locust.excerpt import excerpt
from vllm_locust.page import ASSETS, of_run, page
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Mark, Recording
from vllm_locust.results import Run, load
from vllm_locust.summary import Meta
from vllm_locust.terminal import printable
from vllm_locust.verdict import findings

Picture = dict[str, Any]

MS = NS_PER_S // 1000
CHROMIUM = shutil.which("chromium")
NODE = shutil.which("node")
MARKUP = "<img src=x onerror=\"document.title='owned'\">"
HOSTILE = (MARKUP, 'a "quoted"\nname \\', "__proto__", "constructor")
OVER_TIME = {"ttft", "scenarios", "itl", "load", "tokens", "outcomes", "fidelity", "ttft-heat", "itl-heat"}
COLORS = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", (ASSETS / "llm.css").read_text().partition("}")[0]))
"""Those of the light theme, by name."""
NOTHING = ("", COLORS["grid"])
needs_node = pytest.mark.skipif(not NODE, reason="node is not installed here")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("chromium is not installed here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


# What is delivered


def test_the_library_is_the_one_that_its_readme_names() -> None:
    folder = ASSETS / "uplot"
    readme = (folder / "README.md").read_text()
    sums = dict(re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "README.md"
    }
    (version,) = re.findall(r"^# uPlot (\S+)$", readme, re.MULTILINE)
    assert f"(v{version})" in (folder / "uPlot.iife.min.js").read_text()[:100]


@needs_node
def test_each_script_is_one_that_a_browser_reads() -> None:
    for path in ASSETS.glob("*.js"):
        done = subprocess.run([NODE or "", "--check", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert path.read_text().startswith('"use strict";')


def test_nothing_writes_markup() -> None:
    for path in ASSETS.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text()), path


# A saved page


def recording_of(names: tuple[str, ...], windows: int = 12) -> Recording:
    """Return a run of three stages with failures, in one window of which the generator was busy."""
    rng = np.random.default_rng(4)
    cells = []
    for index in range(windows):
        stage, of_window = 3 * index // windows + 1, Cells()
        for order, name in enumerate(names):
            cell = windowed._cell(rng, Traffic(30, ttft_s=0.05 * (order + 1)), float(stage), 1.0)
            gaps_ns = rng.lognormal(0, 0.3, 500) * 10 * MS * stage
            cell.histogram("itl").add_array(gaps_ns.astype(np.int64))
            cell.counters |= {"token_events": 500, "stamped": 500, "outcome|stream_error|200": index % 3}
            of_window[Key(name, "chat", STEADY, stage)] = cell
        cells.append(of_window)
    recording = recorded(cells, gauges={5: {"cpu_ns": round(9.7 * NS_PER_S)}})
    recording.stages_ns = [windows * 10 * NS_PER_S * stage // 3 for stage in range(4)]
    recording.marks = [Mark(at_ns=25 * NS_PER_S, text=f"worker 2 ({MARKUP}) lost")]
    return recording


def saved_picture(*names: str) -> Picture:
    meta = Meta(
        run="r1",
        name=MARKUP,
        target="http://somewhere:8000",
        parts=list(names),
        limits=["ttft p95 < 300ms", "itl p99 < 1h", "output_tokens_per_s > 10"],
        load={"stages": [2, 4, 8], "stage_s": 40},
    )
    told = picture.of_run(Run.of(recording_of(names), meta))
    return dict(json.loads(json.dumps(told, allow_nan=False)))


@dataclass
class Seen:
    """A page that is open, and what it did."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def charts(self) -> dict[str, int]:
        """Return how many columns each chart has that is shown."""
        shown = "[...document.querySelectorAll('[data-chart]:not([hidden])')]"
        found = self.page.evaluate(f"{shown}.map(chart => [chart.dataset.chart, Number(chart.dataset.columns)])")
        return dict(found)

    def line(self, chart: str, index: int) -> list[float | None]:
        """Return what is drawn as a line of a chart."""
        return list(self.page.evaluate(f"llm.charts.get({chart!r}).u.data[{index + 1}]"))

    def legend(self, chart: str) -> list[str]:
        """Return what the legend of a chart says."""
        return self.page.locator(f"[data-chart={chart}] .legend li").all_inner_texts()

    def table(self, name: str) -> list[list[str]]:
        """Return the rows of a table."""
        rows = f"[...document.querySelectorAll('#table-{name} tbody tr')]"
        return list(self.page.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))"))

    def pixels(self, chart: str) -> str:
        """Return what a chart looks like, as long as it is painted at all."""
        painted = self.page.evaluate(
            """async (id) => {
                await new Promise(requestAnimationFrame);
                const canvas = document.querySelector(`[data-chart=${id}] canvas`);
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                return [new Set(new Uint32Array(data.buffer)).size, canvas.toDataURL()];
            }""",
            chart,
        )
        assert painted[0] > 5
        return str(painted[1])

    def pixel(self, chart: str, x: float, y: float) -> str:
        """Return the colour at a point of a chart, given in the units of its axes; "" where nothing is painted."""
        *parts, alpha = self.page.evaluate(
            """([id, x, y]) => {
                const {u} = llm.charts.get(id);
                const [left, top] = [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
                return [...u.ctx.getImageData(Math.round(left), Math.round(top), 1, 1).data];
            }""",
            [chart, x, y],
        )
        return "#" + "".join(f"{part:02x}" for part in parts) if alpha else ""


def watched(opened: Page) -> Seen:
    seen = Seen(opened)
    opened.on("request", lambda request: seen.requests.append(request.url))
    opened.on("pageerror", lambda error: seen.errors.append(str(error)))
    opened.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
    return seen


Show = Callable[..., Seen]


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Iterator[Show]:
    """Open the file of a picture; in the end it must have asked nobody for anything, and have had no error."""
    opened: list[tuple[Seen, BrowserContext, str]] = []

    def opener(shown: Picture, width: int = 1280, height: int = 720, **options: Any) -> Seen:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(page(json.dumps(shown)), encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        seen = watched(context.new_page())
        opened.append((seen, context, path.as_uri()))
        seen.page.goto(path.as_uri())
        return seen

    yield opener
    for seen, context, address in opened:
        context.close()
        assert {request.partition("#")[0] for request in seen.requests} == {address}
        assert seen.errors == []


def test_all_of_a_saved_run_is_drawn_and_told(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown)
    shares = {f"{metric}-shares": len(told["at_s"]) for metric, told in shown["distributions"].items()}
    assert list(shares) == ["ttft-shares", "itl-shares", "e2el-shares"]
    assert seen.charts() == dict.fromkeys(OVER_TIME, 12) | {"stages": 3} | shares
    for chart in (*OVER_TIME, *shares, "stages"):
        seen.pixels(chart)
    columns = shown["columns"]
    for index, statistic in enumerate(("p50", "p95", "p99")):
        assert seen.line("ttft", index) == [column["scopes"][""]["ttft"][statistic] for column in columns]
    assert seen.line("itl", 2) == [column["scopes"][""]["itl"]["max"] for column in columns]
    assert seen.line("tokens", 0) == [column["scopes"][""]["output_tokens_per_s"] for column in columns]
    by_throughput = sorted(shown["stages"], key=lambda stage: stage["rates"]["request_per_s"])
    assert seen.line("stages", 0) == [stage["ttft"]["p95"] for stage in by_throughput]
    for name, told in shown["tables"].items():
        assert seen.table(name) == (told["rows"] if told else [])
    n = columns[-1]["scopes"][""]["ttft"]["count"]
    assert 20 <= n < 100
    assert seen.page.locator("[data-chart=ttft] .told").inner_text() == f"latest · 1:50–2:00 · n {n}"
    starred = [text.endswith("*") for text in seen.legend("ttft")]
    assert starred == [False, False, True]  # a p99 of fewer than 100
    assert "limited by the generator" in seen.page.locator("#verdicts").inner_text()


def test_a_part_of_a_run_is_drawn_from_its_begin_and_called_one(show: Show) -> None:
    run = Run.of(recording_of(("short", "long")), Meta(run="r1", parts=["short", "long"]))
    seen = show(json.loads(json.dumps(picture.of_run(excerpt(run, since_s=60, until_s=100, scenarios=["long"])))))
    assert seen.charts()["ttft"] == 4
    assert seen.page.evaluate("llm.charts.get('ttft').u.scales.x.min") == 60
    assert seen.page.evaluate("llm.charts.get('ttft').u.scales.x.max") == 100
    assert "60 s to 100 s of 120 s, in whole windows, scenario long" in seen.page.locator("#facts").inner_text()
    assert seen.page.locator("#age").inner_text() == ""


def test_how_the_server_was_started_is_folded_and_stays_text(show: Show) -> None:
    config = f"vllm serve tiny\n  --a 1\n  --b 2\n  --c 3\n  {MARKUP}\n  --last 5"
    meta = Meta(run="r1", note=MARKUP, server_config=config, plugin_version="1.2.3")
    seen = show(json.loads(json.dumps(picture.of_run(Run.of(recording_of(("short",)), meta)))))
    folded = seen.page.locator("#table-settings details")
    assert folded.count() == 1
    assert folded.inner_text() == "vllm serve tiny … (6 lines)"
    folded.locator("summary").click()
    assert folded.evaluate("folded => folded.lastChild.data") == config
    assert config in folded.inner_text()
    assert ["Note", MARKUP] in seen.table("settings")


def test_the_distribution_of_each_scenario_is_drawn_with_the_limits_on_it(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown)
    told = shown["distributions"]["ttft"]
    for index, name in enumerate(("", "short", "long")):
        assert seen.line("ttft-shares", index) == told["shares"][name]
    at_s = told["at_s"][next(i for i, share in enumerate(told["shares"][""]) if share >= 0.95)]
    assert seen.page.locator("[data-chart=ttft-shares] .told").inner_text() == f"at most {at_s * 1000:.3g} ms"
    assert seen.pixel("ttft-shares", 0.3, 0.95) == COLORS["limit"]  # ttft p95 < 300ms
    seen.page.select_option("#scenario", value="long")
    assert seen.line("ttft-shares", 0) == told["shares"]["long"]
    assert [text.split()[0] for text in seen.legend("ttft-shares")] == ["long"]
    seen.page.click("#log")
    seen.pixels("ttft-shares")


def test_a_comparison_is_drawn_and_told(show: Show) -> None:
    def run(seed: int, name: str, *, slower: float = 1.0) -> Run:
        traffic = {HOSTILE[0]: Traffic(60, sigma=0.2), "long": Traffic(40, ttft_s=0.2 * slower, sigma=0.2)}
        return Run.of(windowed.log_normal(seed, traffic, 20), Meta(name=name, parts=[*traffic]))

    found = compare([run(1, "base"), run(2, "base")], [run(3, MARKUP, slower=2)])
    shown = json.loads(json.dumps(contrast.of(found), allow_nan=False))
    seen = show(shown)
    shares = {
        f"contrast-{name}-shares": len(told[""]["at_s"])
        for name, told in shown["contrast"]["shares"].items()
        if told[""]
    }
    assert list(shares) == ["contrast-ttft-shares", "contrast-e2el-shares"]  # these runs have no gaps
    assert seen.charts() == {"contrast-ttft": 20, "contrast-tokens": 20} | shares
    for chart in seen.charts():
        seen.pixels(chart)
    seen.page.select_option("#scenario", value="long")
    assert [text.rsplit(maxsplit=2)[0] for text in seen.legend("contrast-ttft")] == ["base 1", "base 2", "new"]
    windows = [stretch.steady["long"].histograms["ttft"] for stretch in found.new.stretches]
    assert seen.line("contrast-ttft", 2) == [pytest.approx((each.percentile(0.95) or 0) / NS_PER_S) for each in windows]
    told = shown["contrast"]["shares"]["ttft"]["long"]
    assert [seen.line("contrast-ttft-shares", i) for i in (0, 1)] == [told["shares"][side] for side in ("base", "new")]
    rows = seen.table("compared")
    assert rows == shown["tables"]["compared"]["rows"]
    assert {row[0] for row in rows} == {MARKUP, "long", "all"}
    (worse,) = [row for row in rows if row[:2] == ["long", "TTFT p50"]]
    assert worse[-1] == "worse"
    cells = seen.page.locator("#table-compared td.bad").all_inner_texts()
    assert cells == ["worse"] * sum(row[-1] == "worse" for row in rows)
    assert "exit code 3" in seen.page.locator("#verdicts").inner_text()


def test_a_comparison_that_is_refused_has_no_numbers(show: Show) -> None:
    runs = [
        Run.of(windowed.log_normal(1, {"a": Traffic(9)}, 5), Meta(parts=["a"], cache=cache)) for cache in ("", "cold")
    ]
    seen = show(json.loads(json.dumps(contrast.of(compare(runs[:1], runs[1:])))))
    assert seen.charts() == {}
    assert seen.table("compared") == []
    assert seen.table("differs") == [["cache", "unknown", "cold", "makes numbers incomparable"]]
    assert "incomparable: cache" in seen.page.locator("#verdicts").inner_text()


def test_each_column_is_painted_where_its_numbers_are(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown)
    for column in shown["columns"][::2]:
        at_s, scope = column["start_s"] + 3, column["scopes"][""]
        ended_ok, ended_badly = (scope["outcomes"].get(kind, 0) / 10 for kind in ("ok", "stream_error"))
        assert seen.pixel("outcomes", at_s, ended_ok / 2) == COLORS["ok"]
        if ended_badly:
            assert seen.pixel("outcomes", at_s, ended_ok + ended_badly / 2) == COLORS["f0"]
        assert seen.pixel("outcomes", at_s, (ended_ok + ended_badly) * 1.03 + 0.05) in NOTHING
        for metric in ("ttft", "itl"):
            occupied = {cell for cell, _ in scope[metric]["heat"]}
            top = max(max(other["scopes"][""][metric]["heat"])[0] for other in shown["columns"])
            for cell in range(top - 8, top + 1):
                color = seen.pixel(f"{metric}-heat", at_s, 1e-6 * 10 ** ((cell + 0.5) / 10))
                assert (color not in NOTHING) == (cell in occupied)


def test_the_cursor_is_in_all_charts_and_what_it_points_at_is_told(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown)

    def point(chart: str, at_s: float, top: int = 60) -> None:
        x = seen.page.evaluate(f"llm.charts.get('{chart}').u.valToPos({at_s}, 'x')")
        seen.page.hover(f"[data-chart={chart}] .u-over", position={"x": round(x), "y": top})

    point("ttft", 25)
    told = seen.page.locator("[data-chart] .told").all_inner_texts()
    assert sum(text.startswith("0:20–0:30") for text in told) == len(OVER_TIME) - 1
    assert seen.page.locator("[data-chart=ttft] .bubble").inner_text() == f"0:25 worker 2 ({MARKUP}) lost"
    ended = shown["columns"][2]["scopes"][""]["outcomes"]
    assert ended["stream_error"] == 4
    assert [text.split()[:2] for text in seen.legend("outcomes")] == [["ok", str(ended["ok"])], ["stream_error", "4"]]
    fidelity = seen.page.locator("[data-chart=fidelity] .told")
    assert fidelity.inner_text() == "measured the server"
    point("itl", 55)
    assert fidelity.inner_text() == f"limited by the generator: {shown['columns'][5]['fidelity']['text']}"
    cells = dict(shown["columns"][7]["scopes"][""]["itl"]["heat"])
    top = seen.page.evaluate("llm.charts.get('itl-heat').u.valToPos(0.0225, 'y')")  # between 10^-1.7 and 10^-1.6
    point("itl-heat", 75, round(top))
    assert f"20 ms–25.1 ms: {cells[43]} of 1,000" in seen.legend("itl-heat")[0]


def test_a_saved_page_does_not_say_that_something_runs(show: Show) -> None:
    shown = saved_picture("short")
    for state, text in (("running", "saved while it ran"), ("stopped", "■ stopped")):
        for warming_up in (False, state == "running"):
            seen = show(shown | {"state": state, "warming_up": warming_up})
            assert seen.page.locator("#state").inner_text() == text


def test_a_move_of_the_cursor_does_not_lay_the_page_out_for_each_chart(show: Show) -> None:
    seen = show(saved_picture("short", "long"))
    assert len(seen.charts()) == 13
    watching = seen.page.context.new_cdp_session(seen.page)
    watching.send("Performance.enable")

    def layouts() -> float:
        metrics = watching.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "LayoutCount")

    seen.page.hover("[data-chart=ttft] .u-over", position={"x": 20, "y": 60})
    before = layouts()
    for x in range(40, 340, 30):
        seen.page.hover("[data-chart=ttft] .u-over", position={"x": x, "y": 60})
    assert layouts() - before < 40  # of ten moves


def test_charts_are_reachable_by_keys(show: Show) -> None:
    seen = show(saved_picture("short", "long"))
    seen.page.focus("[data-chart=tokens] .plot")
    for key in ("ArrowLeft", "ArrowLeft", "+"):
        seen.page.keyboard.press(key)
    told = seen.page.locator("[data-chart=ttft] .told")
    assert seen.page.evaluate("llm.charts.get('load').u.scales.x.min") > 0
    seen.page.keyboard.press("Escape")
    assert seen.page.evaluate("llm.charts.get('load').u.scales.x.min") == 0
    assert told.inner_text().startswith("1:40–1:50")
    button = seen.page.locator("[data-chart=ttft] .legend button").nth(2)
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert seen.page.evaluate("llm.charts.get('ttft').u.series.map(each => each.show)")[1:] == [True, True, False]


def test_hostile_names_stay_text_and_have_their_own_numbers(show: Show) -> None:
    shown = saved_picture(*HOSTILE)
    seen = show(shown)
    assert seen.page.title() == "LLM – Locust"
    assert seen.page.locator("img").count() == 0
    assert seen.page.locator("#name").text_content() == MARKUP
    assert seen.page.evaluate("[...document.querySelectorAll('#scenario option')].map(o => o.value)") == ["", *HOSTILE]
    for order, name in enumerate(HOSTILE):
        p95 = [column["scopes"][name]["ttft"]["p95"] for column in shown["columns"]]
        assert seen.line("scenarios", order) == p95
        seen.page.select_option("#scenario", value=name)
        assert seen.line("ttft", 1) == p95
        assert seen.page.locator("[data-chart=ttft] h2 small").text_content() == name
    seen.page.reload()
    assert seen.page.locator("#scenario").input_value() == HOSTILE[-1]
    assert seen.page.title() == "LLM – Locust"


def test_a_scenario_that_a_column_does_not_have_is_a_gap_of_latencies_and_no_rate(show: Show) -> None:
    shown = saved_picture("toString", "long")
    del shown["columns"][4]["scopes"]["toString"]
    shown["columns"][5]["scopes"]["toString"] |= {"ttft": None, "offered_per_s": None}
    seen = show(shown)
    seen.page.select_option("#scenario", value="toString")
    assert [seen.line("ttft", 1)[i] for i in (4, 5)] == [None, None]
    assert seen.line("tokens", 0)[4] == 0


def test_a_column_of_which_not_all_is_reported_has_no_rates_nor_streams(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown | {"state": "running", "next": 11})
    for chart, lines in (("load", 4), ("tokens", 2), ("outcomes", 1)):
        for index in range(lines):
            assert [value is None for value in seen.line(chart, index)] == [False] * 11 + [True]
    assert seen.line("ttft", 1)[11] is not None
    seen = show(shown)
    assert seen.line("load", 2)[11] == shown["columns"][11]["in_flight"]


def test_what_is_chosen_changes_what_is_drawn_and_outlasts_a_reload(show: Show) -> None:
    shown = saved_picture("short", "long")
    seen = show(shown)
    light = seen.pixels("ttft")
    seen.page.select_option("#scenario", value="long")
    seen.page.click("#log")
    seen.page.click("#theme")
    for _ in range(2):
        assert seen.page.evaluate("llm.charts.get('ttft').u.scales.y.distr") == 3
        assert seen.line("ttft", 1) == [column["scopes"]["long"]["ttft"]["p95"] for column in shown["columns"]]
        assert seen.page.evaluate("[document.documentElement.dataset.theme, localStorage.theme]") == ["dark", "dark"]
        assert seen.pixels("ttft") != light
        seen.page.reload()
    seen.page.select_option("#scenario", value="")
    seen.page.click("#linear")
    seen.page.click("#theme")
    assert seen.pixels("ttft") == light


def test_without_a_choice_the_theme_is_that_of_the_system(show: Show) -> None:
    dark = show(saved_picture("short"), color_scheme="dark")
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(show: Show, width: int) -> None:
    seen = show(saved_picture(*HOSTILE, "a" * 300), width=width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    charts = seen.page.locator("#charts .cell")
    boxes = [box for box in (charts.nth(0).bounding_box(), charts.nth(1).bounding_box()) if box]
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)  # side by side where there is room


def test_no_word_of_a_table_is_broken_in_a_narrow_window(show: Show) -> None:
    seen = show(saved_picture("short", "longform"), width=390)
    lines = """[...document.querySelectorAll('td.text')].filter(cell => /^\\S+$/.test(cell.textContent)).map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return [cell.textContent, range.getClientRects().length];
    })"""
    found = dict(seen.page.evaluate(lines))
    assert found["longform"] == found["stream_error"] == 1
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    "bare",
    [
        {"run": "", "state": "none"},
        {"run": "", "state": "none", "columns": None, "tables": None, "scenarios": None, "fidelity": None},
        {"run": "r1.0", "state": "running", "columns": [], "tables": {"run": None}, "now_s": 0.1, "warmup_s": 5},
        {"run": "r1.0", "state": "running", "columns": [{"index": 0, "start_s": 0, "end_s": 0.2, "scopes": {}}]},
    ],
)
def test_a_picture_without_numbers_has_no_empty_charts(show: Show, bare: Picture) -> None:
    seen = show(bare)
    assert set(seen.charts()) <= {"load", "tokens"}  # of a column in which nothing was sent
    assert seen.page.locator("table").count() == 0


def test_new_columns_replace_old_ones_and_another_run_replaces_everything(show: Show) -> None:
    shown = saved_picture("short", "long")
    columns = shown["columns"]
    seen = show(shown | {"state": "running", "columns": columns[:6], "next": 5})
    p95 = [column["scopes"][""]["ttft"]["p95"] for column in columns]

    def draw(**changed: Any) -> list[float | None]:
        seen.page.evaluate("given => llm.draw(given)", shown | {"state": "running"} | changed)
        return seen.line("ttft", 1)

    chart = seen.page.evaluate_handle("llm.charts.get('ttft').u")
    assert draw(columns=columns[5:8], **{"from": 5, "next": 7}) == p95[:8]
    assert draw(columns=[columns[3]], **{"from": 3, "next": 3}) == p95[:4]
    assert seen.page.evaluate("held => held === llm.charts.get('ttft').u", chart)  # the same chart with other data
    assert seen.line("load", 0)[:4] == [*(column["scopes"][""]["sent_per_s"] for column in columns[:3]), None]
    assert draw(columns=[columns[2]], every=5, **{"from": 2, "next": 2}) == [p95[2]]  # the narrow ones are not of it
    assert draw(columns=columns[:2], run="r2.0", **{"from": 0, "next": 2}) == p95[:2]
    assert seen.page.evaluate("llm.picture.columns.length") == 2


def test_the_longest_picture_is_drawn_whole(show: Show) -> None:
    names = [f"part {number}" for number in range(6)]
    shown = saved_picture(*names)
    tenth = shown["columns"]
    columns = [tenth[i % 12] | {"index": i, "start_s": 10.0 * i, "end_s": 10.0 * i + 10} for i in range(picture.MOST)]
    changes = {"columns": columns, "next": picture.MOST, "length_s": 7200, "stages": [], "distributions": {}}
    seen = show(shown | changes)
    assert seen.charts() == dict.fromkeys(OVER_TIME, picture.MOST)
    for chart in OVER_TIME:
        seen.pixels(chart)


# Saved, mailed and printed


def stable_run(*names: str) -> Run:
    """Return a run that is judged as a stability test and is not stable, with more reasons than one."""
    recording = recording_of(names, windows=30)
    meta = Meta(run="r1", name="printed", parts=list(names), stability=True, limits=["ttft p95 < 1ms"])
    run = Run.of(recording, meta)
    assert len(run.summary["stability"]["reasons"]) > 1
    return run


def test_a_saved_page_begins_with_the_verdict_and_has_all_its_reasons(show: Show) -> None:
    run = stable_run("short", "long")
    seen = show(picture.of_run(run))
    judged, verdict = run.summary["stability"], seen.page.locator("#verdicts").inner_text()
    for finding in findings(run.summary, run.meta):
        assert f"✗ {finding.subject}: {finding.text}" in verdict
    told = [row[1] for row in seen.table("stability")]
    assert told[0].startswith(f"{judged['verdict']}: 3")
    kinds = ("reasons", "doubtful", "remarks")
    assert told[1:] == [printable(each["text"]) for kind in kinds for each in judged[kind]]
    shown = "[...document.querySelectorAll('h2')].filter(each => each.checkVisibility()).map(each => each.textContent)"
    assert seen.page.evaluate(shown)[:4] == ["This run", "Limits", "Stability", "Time to first token"]
    assert seen.table("marks") == [["25.0", f"worker 2 ({MARKUP}) lost"]]
    note = overview.counting_failures(run.summary)
    assert note.startswith("counting failures as late: ")
    assert seen.page.locator("#table-run .note").inner_text().endswith(note)


def test_a_page_may_load_nothing_from_anywhere() -> None:
    policy = re.sub(r"\s+", " ", re.findall(r'Content-Security-Policy"\s+content="([^"]+)"', page())[0])
    assert policy.startswith("default-src 'none'; ")
    sources = {source for rule in policy.split("; ")[1:] for source in rule.split()[1:]}
    assert sources == {"'unsafe-inline'", "'self'", "data:"}  # 'self' is Locust, whose picture a live page asks for


@pytest.mark.parametrize(("scenarios", "windows"), [(20, 2_000), (3, 700), (1, 2_000)])
def test_a_page_can_be_mailed_however_long_the_run(scenarios: int, windows: int) -> None:
    names = [f"scenario {number}" for number in range(scenarios)]
    pool = [recording_of(tuple(names), 12).window(index) for index in range(12)]
    cells = [pool[index % 12] for index in range(windows)]
    saved = of_run(Run.of(recorded(cells), Meta(run="r1", parts=names)))
    assert len(saved.encode()) < 2_000_000


PRINTED = """() => [...document.querySelectorAll(".cell")].filter((cell) => cell.checkVisibility())
    .flatMap((cell) => [...cell.querySelectorAll("table, canvas")]).map((each) => each.getBoundingClientRect().right)"""


def test_paper_is_white_and_no_table_or_chart_is_wider(show: Show) -> None:
    seen = show(picture.of_run(stable_run(*HOSTILE, "a" * 300)), width=680, color_scheme="dark")
    seen.page.emulate_media(media="print")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(seen.page.evaluate(PRINTED)) <= 680
    assert seen.page.evaluate("document.documentElement.dataset.theme") == "light"
    background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgba(0, 0, 0, 0)"
    seen.page.emulate_media(media="screen")
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext (poppler-utils) is not installed here")
def test_a_printed_page_has_every_heading_and_the_last_column_of_every_table(tmp_path: Path) -> None:
    if not CHROMIUM:
        pytest.skip("chromium is not installed here")
    run, source, target = stable_run("short", "long"), tmp_path / "report.html", tmp_path / "report.pdf"
    source.write_text(of_run(run), encoding="utf-8")
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
    subprocess.run(
        [CHROMIUM, *options, f"--print-to-pdf={target}", source.as_uri()], check=True, capture_output=True, timeout=60
    )
    done = subprocess.run(["pdftotext", "-layout", str(target), "-"], check=True, capture_output=True, text=True)
    told, drawn = " ".join(done.stdout.split()), picture.of_run(run)
    titles = dict(re.findall(r'\["(\w+)", "([^"]+)"\]', (ASSETS / "llm.js").read_text()))
    for name, table in drawn["tables"].items():
        if table:
            assert titles[name] in told
            assert table["columns"][-1]["title"].split()[0] in told
    charts = re.findall(r'title: "([^"]+)"', (ASSETS / "charts.js").read_text())
    assert len(charts) == 13
    for title in charts:
        assert title in told
    output = drawn["tables"]["run"]["rows"][-1][-1]
    assert output in told


# Live

LOGIN = """
from flask_login import UserMixin, login_user
from locust import events

exec(open({mixed!r}).read())


class Person(UserMixin):
    def get_id(self):
        return "somebody"


@events.init.add_listener
def guard(environment, **_):
    if environment.web_ui:
        environment.web_ui.app.secret_key = "known"
        environment.web_ui.login_manager.user_loader(lambda _: Person())
        environment.web_ui.auth_args = {{"username_password_callback": "/enter"}}
        environment.web_ui.app.route("/enter")(lambda: str(login_user(Person())))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("simulator"), "--ttft", "20ms", "--itl", "2ms") as url:
        yield url


@dataclass
class Session:
    """Somebody with Locust's own page in one tab and the page of charts in another."""

    url: str
    ui: Page
    seen: Seen
    folder: Path
    log: Process

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait while the pages live: their events are handled when they are talked to."""
        wait_for(lambda: condition() or self.seen.page.wait_for_timeout(100), what)

    def state(self) -> str:
        return self.seen.page.locator("#state").inner_text()

    def run(self) -> str:
        """Return run and epoch of what is drawn."""
        return str(self.seen.page.evaluate("llm.picture.run"))

    def columns(self) -> int:
        return self.seen.charts().get("ttft", 0)

    def press(self, name: str) -> None:
        self.ui.get_by_role("button", name=name, exact=True).click()

    def start(self, users: int, parts: str = "") -> None:
        self.ui.fill("input[name=userCount]", str(users))
        self.ui.fill("input[name=spawnRate]", str(users))
        if parts:
            self.press("Custom parameters")
            self.ui.fill("input[name=parts]", parts)
        self.press("Start")

    def runs(self) -> list[Path]:
        return sorted((self.folder / "results").glob("*/run.json"), key=lambda path: path.stat().st_mtime)


def watch_a_run(session: Session) -> None:
    """Start one in the form, see it grow, and choose a scenario."""
    assert session.state() == "no run yet"
    session.start(4)
    session.wait(lambda: session.columns() >= 2, "columns")
    before = session.columns()
    session.wait(lambda: session.columns() > before, "charts that move")
    assert session.state() == "● running"
    assert [row[0] for row in session.seen.table("run")] == ["short", "long", "longform", "all"]
    session.seen.page.select_option("#scenario", value="short")
    p95 = "llm.picture.columns.map(column => column.scopes.short?.ttft.p95 ?? null)"
    assert session.seen.line("ttft", 1) == session.seen.page.evaluate(p95)


def reset_it(session: Session) -> None:
    """Have Locust reset its statistics: what is drawn begins again, and is what another page would draw."""
    run = session.run()
    session.press("Reset")
    session.wait(lambda: session.run() != run, "another epoch")
    assert session.run().split(".")[0] == run.split(".")[0]
    session.wait(lambda: session.columns() >= 2, "columns since the reset")
    kept, fresh = session.seen.page.evaluate(
        """async () => {
            const fresh = await (await fetch("llm/picture")).json(), {columns, next} = llm.picture;
            return [columns, fresh.columns].map((each) => JSON.stringify(each.slice(0, next)));
        }"""
    )
    assert kept == fresh


def stop_it(session: Session) -> None:
    """Stop the run in Locust's page: what is drawn in the end is what was saved and printed."""
    session.press("Stop")
    session.wait(lambda: session.state() == "■ stopped" and session.runs(), "end")
    run = load(session.runs()[0])
    rows = overview.rows(run.summary)
    session.wait(lambda: session.seen.table("run") == rows, "final table")
    verdict = ["✓ ok" if told == "ok" else f"✗ {told}" for told in picture.verdict_lines(run.summary, run.meta)]
    told = session.seen.page.locator("#verdicts li")
    session.wait(lambda: told.all_text_contents()[1:] == verdict, "verdict")
    printed = [line.split() for line in session.log.output.splitlines()]
    assert all(row in printed for row in rows)
    drawn = picture.of_run(run)
    names = ("scenarios", "limits", "marks", "length_s", "columns")
    held = "names => names.map(name => llm.picture[name])"
    session.wait(
        lambda: session.seen.page.evaluate(held, names) == json.loads(json.dumps([drawn[name] for name in names])),
        "all that a picture of the saved run has",
    )


def run_again(session: Session) -> None:
    """Start another run, of one scenario: it replaces what was drawn of the one before."""
    run = session.run()
    session.press("New")
    session.start(2, "long")
    session.wait(lambda: session.state() != "■ stopped" and session.run() != run, "second run")
    session.wait(lambda: [row[0] for row in session.seen.table("run")] == ["long"], "its table")
    assert session.seen.page.evaluate("document.querySelector('#scenario').length") == 2
    assert session.seen.page.locator("#scenario").input_value() == ""  # it has no part `short`
    session.press("Stop")
    session.wait(lambda: session.state() == "■ stopped", "end of the second run")


def test_a_run_of_workers_is_started_watched_reset_stopped_and_run_again(
    chromium: Browser, tmp_path: Path, server: str
) -> None:
    port = free_port()
    with chromium.new_context() as context:
        with cluster(tmp_path, options(tmp_path, server, port)) as running:
            wait_for(lambda: running.master.output.count("reported as ready") == 2, "workers")
            session = opened(context, f"http://127.0.0.1:{port}", tmp_path, running)
            watch_a_run(session)
            reset_it(session)
            stop_it(session)
            run_again(session)
            assert session.seen.errors == []
            assert_clean(running.master, *running.workers)
        trouble, drawn = session.seen.page.locator("#trouble"), session.columns()
        session.wait(trouble.is_visible, "word that Locust is gone")
        assert trouble.inner_text().startswith("cannot reach Locust: ")
        assert session.columns() == drawn > 0


def test_a_page_below_a_path_and_behind_a_login_says_what_keeps_it_from_locust(
    chromium: Browser, tmp_path: Path, server: str
) -> None:
    port = free_port()
    locustfile = tmp_path / "locustfile.py"
    locustfile.write_text(dedent(LOGIN).format(mixed=str(MIXED)))
    command = locust(*options(tmp_path, server, port), "--web-base-path", "/load", "--web-login", locustfile=locustfile)
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running, chromium.new_context() as context:
        wait_for(lambda: "charts are at" in running.output, "web UI")
        context.request.get(f"http://127.0.0.1:{port}/enter")
        session = opened(context, f"http://127.0.0.1:{port}/load", tmp_path, running)
        watch_a_run(session)
        trouble, requests = session.seen.page.locator("#trouble"), session.seen.requests
        assert not trouble.is_visible()
        context.clear_cookies()
        session.wait(trouble.is_visible, "trouble")
        assert trouble.inner_text() == "cannot reach Locust: it wants a login; load this page again"
        context.request.get(f"http://127.0.0.1:{port}/enter")
        session.wait(lambda: not trouble.is_visible(), "end of the trouble")
        hide(session.seen.page, hidden=True)
        session.seen.page.wait_for_timeout(300)
        before = len(requests)
        session.seen.page.wait_for_timeout(2500)
        assert len(requests) == before  # nobody looks
        hide(session.seen.page, hidden=False)
        session.wait(lambda: len(requests) > before, "what it asks for again")
        assert session.seen.errors == []
        assert_clean(running)
    asked = {request.partition("?")[0].removeprefix(session.url) for request in requests[1:]}
    assert asked == {"/llm/picture", "/login"}  # whereto it was sent, and did not go: see `trouble`


def hide(shown: Page, *, hidden: bool) -> None:
    """Do what a browser does with a tab that another one covers."""
    shown.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def options(folder: Path, server: str, port: int) -> list[str]:
    where = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", server]
    return [*where, "--results", str(folder / "results"), "--window", "1s", "--warmup", "0", "--name", MARKUP]


def opened(context: BrowserContext, url: str, folder: Path, running: Process | Cluster) -> Session:
    seen = watched(context.new_page())
    seen.page.goto(f"{url}/llm")
    ui = context.new_page()
    ui.goto(url)
    log = running.master if isinstance(running, Cluster) else running
    session = Session(url, ui, seen, folder, log)
    session.wait(lambda: session.state() != "", "first picture")
    return session
