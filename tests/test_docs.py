"""What the documents say is so: commands are parsed, examples run, tables compared with the code."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import ROOT, Process, assert_clean, headless, locust, process, saved, simulator

from vllm_locust import (
    cli,
    evidence,
    families,
    fidelity,
    histogram,
    judgement,
    limit,
    loadspec,
    requestlog,
    samples,
    scenario,
    slowest,
    spikes,
    stability,
    summary,
    symptoms,
    verdict,
)
from vllm_locust import recording as recordings
from vllm_locust.arrivals import PROCESSES, Arrivals, Segment
from vllm_locust.cell import RETRY, STEADY, WARMUP, Cell, Key, select, total
from vllm_locust.cpu import LONG_WAIT_NS
from vllm_locust.errors import ExitCode
from vllm_locust.exporter import Exporter, Snapshot
from vllm_locust.fidelity import DEFAULTS
from vllm_locust.hub import STALL_NS
from vllm_locust.load import Load
from vllm_locust.quantity import NS_PER_S, duration_s
from vllm_locust.recording import Gauges, Recording, Report, WindowState, to_wire
from vllm_locust.scenario import Given
from vllm_locust.slowest import Slow
from vllm_locust.summary import Meta, fidelity_of, slowest_of
from vllm_locust.timeline import METRICS, Outcome, Unit
from vllm_locust.timeouts import Timeouts
from vllm_locust.workers import Seen

README = (ROOT / "README.md").read_text()
DEFINITIONS = (ROOT / "docs" / "metrics.md").read_text()
LOAD = (ROOT / "docs" / "load.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
FLOW = " ".join(README.split())
FAST = ("--ttft", "20ms", "--itl", "2ms")
OPTIONAL_LABELS = {"Tokens", "Remarks", "Metrics"}  # lines of a report that appear where there is something to say
LOCUSTS_PARSER = """
import json, sys, vllm_locust.plugin
from locust.argument_parser import get_parser
parser = get_parser(default_config_files=[])
group = next(g for g in parser._action_groups if g.title.startswith("vllm-locust"))
rejected = []
for command in json.load(sys.stdin):
    try:
        parser.parse_args(command)
    except SystemExit:
        rejected.append(command)
json.dump({
    "ours": {a.option_strings[0]: [a.default, a.include_in_web_ui] for a in group._group_actions},
    "help": {a.option_strings[0]: a.help for a in group._group_actions},
    "flags": [flag for a in parser._actions for flag in a.option_strings],
    "defaults": {a.dest: a.default for a in parser._actions if isinstance(a.default, str | int)},
    "rejected": rejected,
}, sys.stdout)
"""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(title: str, text: str = README) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def table(text: str) -> list[list[str]]:
    """Return the cells of each row of the first table, without its head."""
    lines = text[text.index("\n|") + 1 :].split("\n\n", maxsplit=1)[0].splitlines()
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[2:]]


def names(text: str) -> list[str]:
    return [row[0].strip("` |") for row in table(text)]


def commands(text: str = README + CONTRIBUTING) -> list[list[str]]:
    """Return the words of each command, without variables that are set for it."""
    found = []
    for line in "".join(blocks("sh", text)).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        found += [words] if words else []
    return found


def of(program: str) -> list[list[str]]:
    return [words[1:] for words in commands() if words[0] == program]


@pytest.fixture(scope="module")
def parser() -> dict[str, Any]:
    """What Locust's parser, with our options in it, has and makes of the commands."""
    env = {name: value for name, value in os.environ.items() if not re.match("(VLLM_)?LOCUST_", name)}
    command = [sys.executable, "-c", LOCUSTS_PARSER]
    handed_on = [words[words.index("--") + 1 :] for words in of("vllm-locust") if "--" in words]
    asked = json.dumps([*of("locust"), *handed_on])
    result = subprocess.run(command, check=False, input=asked, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("simulator"), *FAST) as url:
        yield url


# Commands and options


def test_only_programs_that_are_known_here_are_named() -> None:
    assert {words[0] for words in commands()} == {"make", "locust", "vllm-locust", "docker"}


def test_locust_accepts_every_locust_command(parser: dict[str, Any]) -> None:
    assert len(of("locust")) >= 6
    assert parser["rejected"] == []
    files = {words[words.index("-f") + 1] for words in of("locust")}
    examples = files - {"locustfile.py", "-", "$(vllm-locust path mixed.py)"}
    assert examples == {"locustfiles/mixed.py", "locustfiles/stability.py"}
    assert all((ROOT / example).is_file() for example in examples)


def test_every_verb_accepts_its_commands() -> None:
    assert {words[0] for words in of("vllm-locust")} == {"check", "compare", "gate", "list", "report", "simulate"}
    for words in of("vllm-locust"):
        assert cli._parser().parse_args(words).act


def test_every_make_target_exists_and_ci_finds_its_own() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {words[0] for words in of("make")} <= targets
    assert set(re.findall(r"`make ([a-z-]+)", README + CONTRIBUTING)) <= targets
    for target in ("lint", "test", "test-long", "bench"):
        assert f"`make {target}`" in README


def test_every_flag_that_is_named_exists(parser: dict[str, Any]) -> None:
    theirs = section("Coming from `vllm bench serve`")
    ours = README.replace(theirs, "\n".join(row[-1] for row in table(theirs))) + LOAD
    verbs = re.findall(r"--[a-z-]+", (ROOT / "vllm_locust" / "cli.py").read_text())
    known = {*parser["flags"], *verbs, "--build", "--scale"}
    assert {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours) if flag not in known} == set()


def test_the_table_of_options_is_that_of_the_command_line(parser: dict[str, Any]) -> None:
    rows = {row[0].strip("`"): row[1] for row in table(section("Options"))}
    assert list(rows) == list(parser["ours"])
    for flag, (default, _) in parser["ours"].items():
        assert rows[flag].strip("`") == default if isinstance(default, str) else not rows[flag].startswith("`")


def test_the_web_form_has_the_fields_that_are_named(parser: dict[str, Any]) -> None:
    shown = [flag.removeprefix("--") for flag, (_, in_form) in parser["ours"].items() if in_form]
    listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
    assert f"The web form shows {listed}." in FLOW


def test_defaults_and_ports_that_the_text_names_are_those_of_locust_and_ours(parser: dict[str, Any]) -> None:
    assert parser["defaults"]["stop_timeout"] == 60
    assert "`--stop-timeout` to end: 60 s here" in FLOW
    assert (parser["defaults"]["web_port"], parser["defaults"]["master_bind_port"]) == (8089, 5557)


def test_the_bounds_that_the_text_names_are_those_of_the_code() -> None:
    assert f"at most {100 * histogram.RELATIVE_ERROR:g} % off" in FLOW
    assert f"more than {100 * fidelity.UNCERTAIN_SHARE:g} % of the token times uncertain by" in FLOW
    assert f"more than {100 * DEFAULTS.uncertainty:g} % of the median gap" in FLOW
    assert f"more than {100 * DEFAULTS.cpu:g} % of a core" in FLOW
    assert f"waited for more than {100 * DEFAULTS.core_wait:g} % of the time for which it needed a core" in FLOW
    assert f"waited for a core for less than {100 * fidelity.WAIT_SHARE:g} % of the time" in " ".join(
        DEFINITIONS.split()
    )
    assert f"stalled for more than {100 * DEFAULTS.stalled:g} % of the time" in FLOW
    assert f"in waits of {LONG_WAIT_NS // 1_000_000} ms and longer" in DEFINITIONS
    assert f"in stretches of {STALL_NS // 1_000_000} ms and longer" in DEFINITIONS
    assert f"more than {100 * verdict.FAILED_SHARE:g} % of the requests failed" in FLOW


def test_the_rules_of_stability_and_their_rates_are_those_of_the_code() -> None:
    told = section("Stability", DEFINITIONS)
    flow = " ".join(told.split())
    rates = {row[0].strip("`"): row[2] for row in table(told)}
    expected = {name: f"{100 * rate:g} %" for name, rate in evidence.FALSE_ALARMS.items()}
    assert f"in less than {expected.pop('interplay')} of all runs by chance" in flow
    assert rates == expected
    rules = {row[0].strip("`"): row[1] for row in table(told)}
    assert f"by {100 * symptoms.DRIFT:g} % at least" in rules["drift"]
    assert f"by {100 * symptoms.DRIFT:g} % at least" in rules["throughput"]
    assert f"above {100 * symptoms.VARIATION:g} %" in rules["variation"]
    assert f"more than {100 * symptoms.FAILED:g} % of the requests failed" in rules["failures"]
    assert f"found with {100 * stability.POWER:g} % certainty" in flow
    needs = [spikes.needed(evidence.FALSE_ALARMS["spike"] / (len(evidence.SPIKING) * n * 30)) for n in (1, 3)]
    assert f"have at least {needs[0]} requests of a scenario ({needs[1]}, of three scenarios)" in flow


def test_the_numbers_of_a_run_file_are_those_that_are_told() -> None:
    told = section("The run file", DEFINITIONS)
    load, numbers = (re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in told.split("`summary` has"))
    empty = summary.summary(Recording("run", 0, NS_PER_S), summary.Meta(stability=True))
    assert re.findall(r"\w+", " ".join(numbers)) == list(empty)
    facts = Load(
        arrivals=Arrivals(process="gamma", profile=(Segment(1.0),)),
        max_in_flight=1,
        requests=1,
        retries=1,
        stages=(1.0,),
        stage_ns=NS_PER_S,
    ).facts()
    always = ["users", "spawn_rate", "run_time_s", "workers"]
    assert {*re.findall(r"\w+", " ".join(load))} == {*always, *facts, "profile"}
    (frame,) = re.findall(r"^`recording` is.*?\n\n", told, re.MULTILINE | re.DOTALL)
    saved_ns = {name for name in Recording("run", 0, NS_PER_S).save_frame() if name.endswith("_ns")}
    assert {*re.findall(r"`(\w+_ns)`", frame)} == saved_ns


def test_the_examples_read_a_run_file(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST) as url:
        command = locust(*headless(tmp_path, url, "-u", "4", "-r", "4", "-t", "3s", "--window", "1s", "--warmup", "0"))
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            running.wait(60)
    (file,) = (tmp_path / "results").glob("*/run.json")
    code = "".join(re.findall(r"```python\n(.*?)```", section("The run file", DEFINITIONS), re.DOTALL))
    ran = subprocess.run([sys.executable, "-c", code], cwd=file.parent, capture_output=True, text=True, check=True)
    *scenarios, (count, p95_ns) = [line.split() for line in ran.stdout.splitlines()]
    told = saved(tmp_path)["summary"]["scenarios"]
    assert [line[:2] for line in scenarios] == [[name, str(scope["requests"])] for name, scope in told.items()]
    recording = recordings.load(saved(tmp_path)["recording"])
    ttft = total(select(recording.window(1), scenario="short", phase=STEADY)).histograms["ttft"]
    assert (int(count), float(p95_ns)) == (ttft.count, ttft.percentile(0.95))


def test_the_phases_told_are_those_of_the_code() -> None:
    assert names(section("Time of a run", DEFINITIONS)) == [WARMUP, STEADY, RETRY]


def test_the_rates_and_arrivals_that_are_told_are_understood(tmp_path: Path) -> None:
    told = section("Arrivals", LOAD)
    assert names(told) == list(PROCESSES)
    rates = names(told.partition("A **rate** is")[2])
    assert rates[-1] == loadspec.STAGES
    for rate in (f"5 for 60s, {rates[2]}", *rates[:2], f"{rates[3]}, 5"):
        assert parsed(request_rate=rate).arrivals
    (tmp_path / "arrivals.jsonl").write_text(blocks("json", LOAD)[0])
    assert parsed(trace=str(tmp_path / "arrivals.jsonl"), trace_speed="2").arrivals is not None


def parsed(**given: str) -> Load:
    options = {key: Given(f"--{key}", value) for key, value in given.items()}
    return loadspec.parse(options, seed=0, weights={"Chat": 1}, once=None, run_time_s=None)


def test_the_warm_up_told_is_that_of_the_code() -> None:
    assert loadspec.parse({}, seed=0, weights={}, once=None, run_time_s=60.0).warmup_ns == 6 * NS_PER_S
    assert loadspec.parse({}, seed=0, weights={}, once=None, run_time_s=6000.0).warmup_ns == 30 * NS_PER_S
    assert "a tenth of the run, at most 30 s" in FLOW
    assert parsed().until_answered
    assert not parsed(request_rate="20").until_answered
    assert parsed(requests="20").warmup_ns == 0


def test_what_is_kept_of_slow_requests_is_what_a_run_file_has() -> None:
    told = section("Failures and slow requests", DEFINITIONS)
    names_told = {name for row in table(told) for name in re.findall(r"`(\w+)`", row[0])}
    slow = Slow(
        scenario="short",
        endpoint="chat",
        metric="ttft",
        value_ns=1,
        at_ns=1,
        worker="w",
        request_id="id",
        input_tokens=1,
        output_tokens=1,
        in_flight=1,
        outcome="ok",
    )
    recording = Recording("run", 0, NS_PER_S)
    recording.merge(Report(run="run", epoch=0, worker="w", seq=1, now_ns=0, windows=[], failures=[], slowest=[slow]))
    (kept,) = slowest_of(recording)
    assert names_told == kept.keys() - {"scenario", "endpoint"}
    assert slowest.SIZE == 10
    assert "the ten `steady` requests" in told


def test_the_columns_of_the_log_are_those_of_its_rows() -> None:
    told = section("The log of requests", DEFINITIONS)
    assert names(told) == list(requestlog.COLUMNS)
    assert re.findall(r"`(\w+)`", told.partition("four more follow:")[2].partition("Each worker")[0]) == list(
        requestlog.TEXTS
    )
    assert f"up to {requestlog.MOST_BYTES // 1_000_000} MB" in told


def test_the_fields_of_a_sample_are_those_of_its_file() -> None:
    told = section("Samples of answers", DEFINITIONS)
    assert names(told) == list(samples.Sample.__struct_fields__)
    assert f"{samples.KEPT_CHARACTERS:,} characters" in told


def test_the_time_limits_have_the_same_default_everywhere(parser: dict[str, Any]) -> None:
    for name, wait_s in msgspec.structs.asdict(Timeouts()).items():
        flag = f"--{name.removesuffix('_s').replace('_', '-')}-timeout"
        default, _ = parser["ours"][flag]
        assert wait_s == (None if default == "none" else duration_s(default))
        assert parser["help"][flag].rpartition("default: ")[2].partition(",")[0] == default


def test_the_limits_of_the_generator_have_the_same_default_everywhere(parser: dict[str, Any]) -> None:
    readme = {row[0].strip("`"): row[1] for row in table(section("Options"))}
    criteria = table(section("Fidelity", DEFINITIONS).partition("where one of these holds:")[2])
    defined = {row[1].strip("`"): row[2] for row in criteria}
    expected = {flag: f"{100 * getattr(DEFAULTS, name):g} %" for name, flag in fidelity.FLAGS.items()}
    assert defined == expected
    assert {flag: readme[flag] for flag in expected} == expected
    assert {flag: parser["help"][flag].rpartition("default: ")[2].replace("%%", " %") for flag in expected} == expected


def test_the_figures_of_fidelity_are_those_of_a_run_file() -> None:
    listed = {name for row in table(section("Fidelity", DEFINITIONS)) for name in re.findall(r"`(\w+)`", " ".join(row))}
    seen = fidelity_of(Recording("r", 0, NS_PER_S), DEFAULTS, {})
    worker = Seen().figures()
    assert listed <= seen.keys() | worker.keys()
    shown_elsewhere = {"token_events", "gap", "workers", "plugin_errors", "in_flight_peak"}
    assert (seen.keys() | worker.keys()) - listed == shown_elsewhere


def test_the_exit_codes_are_those_of_the_code() -> None:
    assert names(section("Against your own server")) == [str(int(code)) for code in ExitCode]


def test_check_runs_as_readme_says(server: str, tmp_path: Path) -> None:
    (words,) = (words for words in of("vllm-locust") if words[0] == "check")
    command = [sys.executable, "-m", "vllm_locust", *(word.replace("http://my-server:8000", server) for word in words)]
    with process(command, tmp_path / "check.log") as check:
        assert check.wait() == 0, check.output


# Examples


def test_every_example_runs_as_a_locustfile(server: str, tmp_path: Path) -> None:
    custom = (ROOT / "locustfiles" / "custom.py").read_text()
    with ExitStack() as started:
        runs: list[tuple[Path, Process]] = []
        for number, text in enumerate([*blocks("python"), custom]):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "locustfile.py").write_text(text)
            arguments = headless(folder, server, "-u", "4", "-r", "4", "-t", "2s")
            command = locust(*arguments, locustfile=folder / "locustfile.py")
            runs.append((folder, started.enter_context(process(command, folder / "locust.log", cwd=folder))))
        for folder, run in runs:
            assert run.wait() == 0, run.output
            assert_clean(run)
            assert saved(folder)["summary"]["total"]["outcomes"]["ok"], run.output
        first, *_, events, _ = (run.output for _, run in runs)
        assert shape(first) == shape(blocks("text")[0])
        assert re.search(r"^short 0\.\d{3} s$", events, re.MULTILINE), events
        assert re.search(r"^short 63 gaps$", events, re.MULTILINE), events
        assert list(saved(runs[-1][0])["summary"]["scenarios"]) == ["mine"]


LOADS = (
    *("At a rate", "Warm-up", "A fixed number of requests", "The knee of a server", "Setting limits"),
    "Is it stable?",
)
SHORT = {
    "-t 5m": "-t 2s",
    "--warmup 30s": "--warmup 1s",
    "--stage-time 60s": "--stage-time 1s",
    "--stages 5,10,20,40": "--stages 5,10 --stage-time 1s",
    "--stages 8,16,32,64": "--stages 4,8",
    "for 60s, to 50 over 2m": "for 1s, to 50 over 1s",
    "--requests 1000": "--requests 100",
    "stability.py": "stability.py -t 2s",
}


def test_every_load_that_readme_shows_runs(server: str, tmp_path: Path) -> None:
    shown = [
        line for title in LOADS for line in "".join(blocks("sh", section(title))).splitlines() if line[:7] == "locust "
    ]
    assert len(shown) >= 12
    (tmp_path / "locustfile.py").write_text(blocks("python")[0])
    (tmp_path / "questions.toml").write_text(next(text for text in blocks("toml") if "once" in text))
    (tmp_path / "questions.jsonl").write_text("".join(f'{{"prompt": "Question {number}"}}\n' for number in range(50)))
    (tmp_path / "locustfiles").symlink_to(ROOT / "locustfiles")
    for number in range(0, len(shown), 8):
        with ExitStack() as started:
            runs = []
            for place, line in enumerate(shown[number : number + 8], number):
                for long, short in SHORT.items():
                    line = line.replace(long, short)  # noqa: PLW2901
                words = shlex.split(line.replace("http://my-server:8000", server))[1:]
                where = ["--results", str(tmp_path / f"{place}" / "results"), "--prometheus-port", "0"]
                command = [sys.executable, "-m", "locust", *words, *where, "--only-summary"]
                runs.append(started.enter_context(process(command, tmp_path / f"{place}.log", cwd=tmp_path)))
            for place, run in enumerate(runs, number):
                code = run.wait()
                run_file = saved(tmp_path / f"{place}")
                judged = run_file["meta"]["limits"] or run_file["meta"]["stability"]
                assert code in ((0, 3, 4) if judged else (0,)), run.output
                assert_clean(run)
                assert run_file["summary"]["total"]["outcomes"]["ok"], run.output
                if "--requests" in shown[place] or "questions" in shown[place]:
                    assert run_file["summary"]["total"]["requests"] == (100 if "--requests" in shown[place] else 50)


def shape(output: str) -> tuple[list[str], list[str]]:
    """Return the labels of a report that are always there, and the heads of its columns."""
    report = output[re.search(r"^Run  ", output, re.MULTILINE).start() :]  # type: ignore[union-attr]
    labels = [
        label for label in re.findall(r"^([A-Z][a-z]+) {2,}", report, re.MULTILINE) if label not in OPTIONAL_LABELS
    ]
    (heads,) = re.findall(r"^scenario +requests .*$", report, re.MULTILINE)
    return labels, heads.split()


def test_the_first_example_is_three_lines_on_the_first_screen() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line]) == 3
    assert README[: README.index("Why not a plain Locust script")].count("\n") < 60


def test_the_report_shown_has_three_scenarios_a_failure_and_fidelity() -> None:
    report = blocks("text")[0]
    for line in (r"short +\d", r"long +\d", r"longform +\d", r"all +\d", r" +\d+ stream_error ", r"Fidelity +measured"):
        assert re.search(rf"^{line}", report, re.MULTILINE), line


def test_the_scenario_shown_loads(tmp_path: Path) -> None:
    text = next(text for text in blocks("toml") if "[part.chat]" in text)
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    (tmp_path / "documents.jsonl").write_text('{"prompt": "c", "output_tokens": 7}\n')
    loaded = scenario.load("mine.toml", relative_to=tmp_path)
    assert [(part.name, part.weight, len(part.prompts)) for part in loaded.parts] == [("chat", 3, 2), ("summary", 1, 1)]
    given = scenario.load_keys("mine.toml", relative_to=tmp_path)
    load = loadspec.parse(given, seed=0, weights={"Chat": 1}, once=None, run_time_s=loadspec.run_time_s(given))
    assert load.facts() == {"arrivals": "poisson", "request_rate": 20.0}


def test_the_packaged_scenarios_are_those_that_readme_describes() -> None:
    assert set(scenario.packaged()) == {"short", "long", "longform", "mixed", "stability"}
    assert "Five scenarios are packaged" in FLOW
    text = " ".join(section("Writing a scenario").split())
    for name in ("short", "long", "longform"):
        (part,) = scenario.load(name).parts
        assert re.search(rf"`{name}` \([^)]*, {part.output_tokens} tokens\)", text)
    weights = " : ".join(str(part.weight) for part in scenario.load("mixed").parts)
    assert f"as {weights}" in text
    assert scenario.load("stability").parts == scenario.load("mixed").parts
    assert scenario.load_keys("stability")["run_time"].value == "5m"


def test_the_keys_of_a_load_are_those_of_the_code() -> None:
    (told,) = re.findall(r"^- `\[load\]` .*?(?=^- |^$)", section("Writing a scenario"), re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"`([a-z_]{5,})`", told)} - {"stability = true"} == set(scenario.LOAD_KEYS)


def test_of_100_streams_of_which_75_break_plain_locust_reports_none(tmp_path: Path) -> None:
    script = ROOT / "tests" / "plain_locustfile.py"
    ours = script.read_text().replace("import HttpUser, task", "import task\nfrom vllm_locust import ChatUser")
    ours = ours.replace("HttpUser", "ChatUser")
    ours = re.sub(r"with self.*success\(\)", 'self.stream(BODY, scenario="mine")', ours, flags=re.DOTALL)
    (tmp_path / "ours.py").write_text(ours)
    faults = (*FAST, "--stream-errors", "0.5", "--early-ends", "0.25")
    load = ["-u", "10", "-r", "10", "-t", "3s"]
    with ExitStack() as started:
        hosts = [started.enter_context(simulator(tmp_path, *faults)) for _ in range(2)]
        plain = [*locust(locustfile=script), "--headless", "--csv", "plain", "--host", hosts[0], *load]
        mine = locust(*headless(tmp_path, hosts[1], *load), locustfile=tmp_path / "ours.py")
        theirs = started.enter_context(process(plain, tmp_path / "plain.log", cwd=tmp_path))
        own = started.enter_context(process(mine, tmp_path / "ours.log", cwd=tmp_path))
        assert (theirs.wait(), own.wait()) == (0, int(ExitCode.MISSED)), theirs.output + own.output
    *_, row = csv.DictReader((tmp_path / "plain_stats.csv").read_text().splitlines())
    assert (row["Name"], row["Request Count"], row["Failure Count"]) == ("Aggregated", "100", "0")
    outcomes = {name: number for name, number in saved(tmp_path)["summary"]["total"]["outcomes"].items() if number}
    assert outcomes == {"ok": 25, "stream_error": 50, "truncated": 25}
    claim = (
        "of 100 streams of which 75 break, a script that reads them with `iter_lines` reports "
        "100 requests and 0 failures. This plugin reports 25 `ok`, 50 `stream_error`, 25 `truncated`."
    )
    assert claim in FLOW


# Definitions


def test_the_definitions_name_every_metric_and_every_outcome() -> None:
    assert names(section("Metrics", DEFINITIONS)) == list(METRICS)
    assert names(section("Outcomes", DEFINITIONS)) == [str(outcome) for outcome in Outcome]
    failures = {outcome for outcome in Outcome if outcome.failed}
    assert failures == set(Outcome) - {Outcome.OK, Outcome.CANCELLED}
    assert "All but `ok` and `cancelled` are failures." in " ".join(DEFINITIONS.split())


def test_readme_defines_as_the_definitions_do() -> None:
    rows = table(section("The definitions"))
    assert rows == table(section("Metrics", DEFINITIONS))[: len(rows)]
    assert [row[0] for row in rows] == ["`ttft`", "`itl`", "`itl_max`", "`tpot`", "`e2el`"]


def test_the_families_listed_are_those_of_the_code(*, update_golden: bool) -> None:
    """`pytest tests/test_docs.py --update-golden` writes the table anew."""
    told = section("In Prometheus", DEFINITIONS)
    listed = re.findall(r"^\|.*\n", told, re.MULTILINE)
    if update_golden:
        (ROOT / "docs" / "metrics.md").write_text(DEFINITIONS.replace("".join(listed), families.markdown()))
    else:
        assert "".join(listed) == families.markdown()


def test_the_families_listed_are_those_that_can_be_exported() -> None:
    cell = Cell()
    for name in (*METRICS, "uncertainty"):
        cell.histogram(name).add(1)
    for name in ("stamped", "scheduled", "dropped", "sent", "good", "outcome|ok|200"):
        cell.count(name)
    for name in ("tokens_received", "tokens_failed", "token_events"):
        cell.count(name)
    recording, gauges = Recording("run", 0, NS_PER_S), Gauges(span_ns=NS_PER_S, core_wait_ns=0)
    window = WindowState(index=0, seq=1, sealed=True, gauges=gauges, cells=to_wire({Key("short", "chat"): cell}))
    recording.merge(Report(run="run", epoch=0, worker="w", seq=1, now_ns=0, windows=[window], failures=[]))
    snapshot = Snapshot(recording=recording, running=True, users=1, workers=1, live_workers=("w",), meta=Meta())
    exported = {}
    for family in Exporter(lambda: snapshot).collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported[family.name + "_total" * (family.type == "counter")] = (family.type, labels)
    listed = {row[0].strip("`"): (row[1], set(row[3].split(", ")) - {"–"}) for row in rows_of_families()}
    assert listed == exported


def rows_of_families() -> list[list[str]]:
    return table(section("In Prometheus", DEFINITIONS))


def test_the_limits_that_the_definitions_show_are_limits_and_need_as_many_samples(tmp_path: Path) -> None:
    told = section("Limits", DEFINITIONS)
    shown = re.findall(r"^    (\S.*)$", told, re.MULTILINE)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    part = '[part.short]\nprompts = "p.jsonl"'
    (tmp_path / "mine.toml").write_text("\n".join([*shown, part]))
    loaded = scenario.load("mine.toml", relative_to=tmp_path)
    assert (len(loaded.limits), len(loaded.goodput)) == (4, 1)
    for text in ("short: ttft p95 < 300ms", "failures < 0.5%", "failures <= 0%", "goodput > 95%"):
        assert f"`{text}`" in " ".join(told.split())
        assert limit.parse(text)
    samples = dict(re.findall(r"([\d,]+) for (p[\d.]+)", told))
    assert {p: judgement.needed(float(p[1:]) / 100) for p in samples.values()} == {
        p: int(number.replace(",", "")) for number, p in samples.items()
    }
    assert len(samples) == 3
    (failures, good) = (judgement.needed(limit.parse(text).bound) for text in ("failures < 0.5%", "goodput > 95%"))
    assert f"{failures} for `failures < 0.5%`, {good} for `goodput > 95%`" in told
    assert f"its {100 * judgement.CONFIDENCE:g} % confidence interval" in told
    rows = [name for row in table(told) for name in re.findall(r"`(\w+)`", row[0])]
    assert {*limit.PLAIN} <= {*rows}
    for metric in limit.REQUEST_METRICS:
        assert f"`{metric}`" in told


def test_every_series_that_readme_queries_is_exported() -> None:
    assert set(re.findall(r"vllm_locust_\w+", "".join(blocks("promql")))) <= {
        row[0].strip("`") for row in rows_of_families()
    }


def test_units_follow_the_text() -> None:
    tokens = [metric.name for metric in METRICS.values() if metric.unit is Unit.TOKENS]
    assert list(METRICS)[-3:] == tokens
    assert "The last three are numbers of tokens, all others are times." in " ".join(DEFINITIONS.split())


# The rest


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text, folder = document.read_text(), document.parent
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = (folder / path).read_bytes().decode(errors="replace") if path else text
            heads = [
                re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
                for head in re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
            ]
            assert not anchor or anchor in heads, target
