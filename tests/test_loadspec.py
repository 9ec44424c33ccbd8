"""What is asked of a run, by options, forms and scenario files: understood, or refused with who said what."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust import loadspec
from vllm_locust.arrivals import Segment
from vllm_locust.errors import InputError
from vllm_locust.load import Load
from vllm_locust.scenario import LOAD_KEYS, Given, load_keys
from vllm_locust.scenario import load as load_scenario

S = 1_000_000_000


def parse(*, once: int | None = None, run_time_s: float | None = None, **asked: Any) -> Load:
    options = {key: Given(f"--{key.replace('_', '-')}", value) for key, value in asked.items()}
    return loadspec.parse(options, seed=7, weights={"Chat": 1}, once=once, run_time_s=run_time_s)


def refusal(**asked: Any) -> str:
    with pytest.raises(InputError) as refused:
        parse(**asked)
    return str(refused.value)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 1}\n{"at_s": 3}\n')
    return str(path)


# Windows


@pytest.mark.parametrize(
    ("run_time_s", "window_s"),
    [(None, 10), (0.5, 1), (5, 1), (59.9, 1), (60, 2), (100, 3), (299, 9), (300, 10), (301, 10), (86_400, 10)],
)
def test_a_window_is_a_thirtieth_of_the_run_within_bounds(run_time_s: float | None, window_s: int) -> None:
    assert loadspec.window_ns(None, parse(), run_time_s) == window_s * S
    assert loadspec.window_ns("", parse(), run_time_s) == window_s * S
    assert loadspec.window_ns("7.5s", parse(), run_time_s) == 7.5 * S


def test_a_run_of_stages_is_as_long_as_they_are() -> None:
    load = parse(stages="1,2,3", stage_time="40s")
    assert loadspec.window_ns(None, load, None) == loadspec.window_ns(None, load, 10) == 4 * S
    assert loadspec.window_ns("1s", load, None) == S


@pytest.mark.parametrize("text", ["0.9s", "0"])
def test_a_window_is_at_least_a_second(text: str) -> None:
    with pytest.raises(InputError, match=f"--window is {text}, expected at least 1s"):
        loadspec.window_ns(text, parse(), 60)


# Rates


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("20", [Segment(20.0)]),
        (20, [Segment(20.0)]),
        (0.5, [Segment(0.5)]),
        ("1,000", [Segment(1000.0)]),
        ("5/s", [Segment(5.0)]),
        ("5 for 60s, to 50 over 2m, 50", [Segment(5.0, 60 * S), Segment(50.0, 120 * S, ramp=True), Segment(50.0)]),
        ("to 50 over 2m", [Segment(50.0, 120 * S, ramp=True)]),
        ("5 / s for 10s,  7.5/s", [Segment(5.0, 10 * S), Segment(7.5)]),
        ("5 for 60s,100", [Segment(5.0, 60 * S), Segment(100.0)]),
        (
            "1,200 for 60s,2,400 for 1m,to 1,000 over 90,0",
            [
                Segment(1200.0, 60 * S),
                Segment(2400.0, 60 * S),
                Segment(1000.0, 90 * S, ramp=True),
                Segment(0.0),
            ],
        ),
    ],
)
def test_a_rate_is_a_number_or_stretches(text: object, segments: list[Segment]) -> None:
    arrivals = parse(request_rate=text).arrivals
    assert arrivals is not None
    assert arrivals.profile == tuple(segments)
    assert (arrivals.process, arrivals.seed) == ("poisson", 7)


@given(st.lists(st.tuples(st.integers(1, 99_999), st.integers(1, 9_999), st.booleans()), min_size=1, max_size=5))
def test_stretches_are_read_as_they_are_written(stretches: list[tuple[int, int, bool]]) -> None:
    texts = [
        f"to {rate:,} over {seconds:,}s" if ramp else f"{rate:,} for {seconds:,}s" for rate, seconds, ramp in stretches
    ]
    arrivals = parse(request_rate=", ".join(texts)).arrivals
    assert arrivals is not None
    assert arrivals.profile == tuple(Segment(float(rate), seconds * S, ramp) for rate, seconds, ramp in stretches)


EXPECTED = "expected a rate per second like 20, or stretches like 5 for 60s, to 50 over 2m, 50"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f" is {text!r}, {EXPECTED}")
            for text in ("fast", "-5", "1.2.3", "5 for 0s", ",", "5 for 9s,", "1e3", "nan", [5, 6])
        ),
        ("0", " is '0', expected a rate above 0"),
        ("5, 6", ": '5' has no end, though more follows; write 5 for 60s"),
        ("5 for ever", ": 'ever' is not a duration; write it like 300ms, 30s, 5m or 1m30s"),
        ("2,000,000", ": rate 2000000.0/s: expected 0, or from 1e-06 to 1,000,000 per second"),
        (
            "5 for 9999999h, 3",
            ": a stretch of 35999996400000000000 ns: expected more than none, and less than 146 years",
        ),
    ],
)
def test_a_rate_that_is_none_is_refused(text: object, message: str) -> None:
    assert refusal(request_rate=text) == f"--request-rate{message}"


def test_the_process_is_poisson_or_gamma_where_it_has_a_shape() -> None:
    for asked, process, burstiness in [
        ({}, "poisson", 1.0),
        ({"arrivals": "constant"}, "constant", 1.0),
        ({"arrivals": "gamma"}, "gamma", 1.0),
        ({"burstiness": "0.5"}, "gamma", 0.5),
        ({"arrivals": "gamma", "burstiness": 2}, "gamma", 2.0),
    ]:
        arrivals = parse(request_rate="5", **asked).arrivals
        assert arrivals is not None
        assert (arrivals.process, arrivals.burstiness) == (process, burstiness)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"request_rate": "5", "arrivals": "weird"}, "--arrivals is 'weird', expected constant, poisson, gamma, trace"),
        ({"arrivals": "constant"}, "--arrivals is for a request rate; add one, like --request-rate 20"),
        ({"burstiness": "2"}, "--burstiness is for a request rate; add one, like --request-rate 20"),
        (
            {"request_rate": "5", "arrivals": "constant", "burstiness": "2"},
            "--burstiness is for gamma arrivals, not for constant ones",
        ),
        *(
            (
                {"request_rate": "5", "burstiness": value},
                f"--burstiness is {value!r}, expected a number above 0; 1 is Poisson, below 1 burstier",
            )
            for value in ("0", "-1", "1,5", "a lot", True)
        ),
        (
            {"request_rate": "5", "burstiness": "2,000,000"},
            "--burstiness: burstiness 2000000.0: expected a number from 1e-06 to 1,000,000",
        ),
        ({"max_in_flight": "8"}, "--max-in-flight is for a request rate; without one, users are the cap: -u 8 -r 8"),
        (
            {"request_rate": "5", "max_in_flight": "0"},
            "--max-in-flight is '0', expected a whole number of at least 1",
        ),
    ],
)
def test_what_makes_no_sense_with_a_rate_or_without_one_is_refused(asked: dict[str, Any], message: str) -> None:
    assert refusal(**asked) == message


# Traces


def test_a_trace_counts_from_its_first_line_at_its_speed(trace: str) -> None:
    for asked, last_ns in [({}, 2 * S), ({"trace_speed": "4"}, S // 2), ({"arrivals": "trace"}, 2 * S)]:
        arrivals = parse(trace=trace, **asked).arrivals
        assert arrivals is not None
        assert arrivals.process == "trace"
        assert arrivals.trace_ns == (0).to_bytes(8, "little") + last_ns.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"request_rate": "5"},
            "--request-rate is 5, but a trace says itself when requests leave; leave one of them out",
        ),
        ({"stages": "1,2"}, "--stages is 1,2, but a trace says itself when requests leave; leave one of them out"),
        ({"burstiness": "2"}, "--burstiness is 2, but a trace says itself when requests leave; leave one of them out"),
        ({"arrivals": "poisson"}, "--arrivals is 'poisson', but there is a trace; leave one of them out"),
        ({"trace_speed": "0"}, "--trace-speed is '0', expected a number above 0, like 2 for twice as fast"),
    ],
)
def test_what_contradicts_a_trace_is_refused(trace: str, asked: dict[str, Any], message: str) -> None:
    assert refusal(trace=trace, **asked) == message


def test_a_trace_that_is_missing_is_refused() -> None:
    assert refusal(arrivals="trace") == "--arrivals is 'trace': name its file by --trace"
    assert refusal(arrivals="trace", request_rate="5") == "--arrivals is 'trace': name its file by --trace"
    assert refusal(trace_speed="2") == "--trace-speed is for a trace; name its file by --trace"
    assert refusal(trace="nowhere.jsonl") == "nowhere.jsonl: No such file or directory"
    assert refusal(trace=5) == "5: No such file or directory"


# Amounts


def test_a_fixed_number_may_have_thousands_commas_and_retries() -> None:
    load = parse(requests="1,000", retry_failed="2")
    assert (load.requests, load.retries) == (1000, 2)
    assert parse(retry_failed="0").retries == 0
    assert parse(once=12).requests == 12
    assert parse(requests=50, request_rate="5").requests == 50


@pytest.mark.parametrize("value", ["0", "1.5", "-1", "many", "1_000", "10,00", True])
def test_a_number_of_requests_that_is_none_is_refused(value: object) -> None:
    assert refusal(requests=value) == f"--requests is {value!r}, expected a whole number of at least 1"
    assert refusal(requests=5, retry_failed="-1").startswith(
        "--retry-failed is '-1', expected a whole number of at lea"
    )


def test_what_contradicts_a_fixed_number_is_refused() -> None:
    retry = "--retry-failed is 1: it is for a fixed number of requests without a rate, like --requests 100"
    assert refusal(retry_failed=1) == retry
    assert refusal(retry_failed=1, requests=5, request_rate=5) == retry
    once = '--requests is 5, but order = "once" sends each prompt once, whatever their number; leave one of them out'
    assert refusal(requests=5, once=7) == once


# Stages


@pytest.mark.parametrize("value", ["8,16,32", "8, 16, 32", [8, 16, 32], [8.0, 16.0, 32.0]])
def test_stages_are_numbers_of_users(value: object) -> None:
    load = parse(stages=value, stage_time="90s")
    assert (load.stages, load.stage_ns, load.arrivals) == ((8.0, 16.0, 32.0), 90 * S, None)
    assert parse(stages=value).stage_ns == 60 * S


def test_stages_are_rates_where_there_is_one() -> None:
    load = parse(stages="0.5,1.5", stage_time=10, request_rate="3", arrivals="constant", max_in_flight=9)
    assert load.arrivals is not None
    assert (load.arrivals.process, load.max_in_flight) == ("constant", 9)
    assert load.arrivals.profile == (Segment(0.5, 10 * S), Segment(1.5, 10 * S))
    assert load.stages == (0.5, 1.5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *(
            (
                {"stages": value},
                f"--stages is {value!r}, expected numbers above 0 like 8,16,32: users, or rates with a rate",
            )
            for value in ("8,", "8,many", "0,8", "-8", "1.5,2", [8, "x"], [True], [], "inf")
        ),
        ({"stages": "8", "stage_time": "500ms"}, "--stage-time is 500ms, expected at least 1s"),
        (
            {"stages": "8", "stage_time": "soon"},
            "--stage-time: 'soon' is not a duration; write it like 300ms, 30s, 5m or 1m30s",
        ),
        ({"stage_time": "5s"}, "--stage-time is for stages; add them, like --stages 8,16,32"),
        (
            {"stages": "1,2000000", "request_rate": "1"},
            "--stages: rate 2000000.0/s: expected 0, or from 1e-06 to 1,000,000 per second",
        ),
    ],
)
def test_stages_that_are_none_are_refused(asked: dict[str, Any], message: str) -> None:
    assert refusal(**asked) == message


# Warm-up


@pytest.mark.parametrize(
    ("asked", "at_most_s", "until_answered"),
    [
        ({}, 30, True),
        ({"run_time_s": 100.0}, 10, True),
        ({"run_time_s": 3600.0}, 30, True),
        ({"request_rate": "5", "run_time_s": 100.0}, 10, False),
        ({"request_rate": "5"}, 30, False),
        ({"stages": "2,4", "stage_time": "10s"}, 2, True),
        ({"stages": "2,4", "stage_time": "10s", "run_time_s": 300.0, "request_rate": 1}, 2, False),
        ({"requests": 10, "run_time_s": 100.0}, 0, True),
        ({"requests": 10, "request_rate": "5"}, 0, False),
        ({"once": 10}, 0, True),
        ({"warmup": "12s", "run_time_s": 100.0}, 12, False),
        ({"warmup": "12s", "requests": 10}, 12, False),
        ({"warmup": "0", "run_time_s": 100.0}, 0, False),
        ({"warmup": 0}, 0, False),
    ],
)
def test_a_warm_up_is_at_most_a_tenth_of_the_run_and_half_a_minute_unless_it_is_set(
    asked: dict[str, Any], at_most_s: int, *, until_answered: bool
) -> None:
    load = parse(**asked)
    assert (load.warmup_ns, load.until_answered) == (at_most_s * S, until_answered)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    left = "nothing would be left"
    assert refusal(warmup="10s", run_time_s=10.0) == f"--warmup is 10s, and the run takes 10.0 s: {left}"
    assert refusal(warmup="6s", stages="1,2", stage_time="3s") == f"--warmup is 6s, and the run takes 6.00 s: {left}"
    assert refusal(warmup="soon").startswith("--warmup: 'soon' is not a duration")


# Classes that share it


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 60), min_size=1), st.integers(1, 50))
def test_weights_are_those_that_count_reduced(weights: dict[str, int], factor: int) -> None:
    def of(by_class: dict[str, int]) -> dict[str, int]:
        return loadspec.parse({}, seed=0, weights=by_class, once=None, run_time_s=None).weights

    reduced = of(weights)
    assert reduced.keys() == {name for name, weight in weights.items() if weight}
    assert of({name: weight * factor for name, weight in weights.items()}) == reduced
    shares = {weight / reduced[name] for name, weight in weights.items() if weight}
    assert len(shares) <= 1


# Scenario files


PART = '[part.a]\nprompts = "p.jsonl"\n[part.b]\nprompts = "p.jsonl"\n'


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_may_ask_for_all_that_options_can(tmp_path: Path, trace: str) -> None:
    """A trace is beside the file that names it."""
    path = write(tmp_path, f'[load]\ntrace = "trace.jsonl"\ntrace_speed = 2\nmax_in_flight = 5\nwarmup = "1s"\n{PART}')
    asked = load_keys(path)
    assert asked.keys() == {"trace", "trace_speed", "max_in_flight", "warmup"}
    load = loadspec.parse(asked, seed=0, weights={"Chat": 1}, once=None, run_time_s=None)
    assert load.arrivals == parse(trace=trace, trace_speed=2).arrivals
    assert (load.max_in_flight, load.warmup_ns) == (5, S)
    every = "".join(f"{key} = {[1, 2] if key == 'stages' else 1}\n" for key in LOAD_KEYS)
    assert load_keys(write(tmp_path, f"[load]\n{every}{PART}")).keys() == set(LOAD_KEYS)
    assert load_keys(write(tmp_path, PART)) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rate = 5", f"load.rate: unknown key; accepted are {', '.join(LOAD_KEYS)}"),
        ("request_rate = [5]", "load.request_rate is [5], expected a number or a text"),
        ("requests = true", "load.requests is True, expected a number or a text"),
        ("warmup = { s = 5 }", "load.warmup is {'s': 5}, expected a number or a text"),
        ('stages = ["8"]', "load.stages is ['8'], expected numbers, like [8, 16, 32]"),
        ("stages = [true]", "load.stages is [True], expected numbers, like [8, 16, 32]"),
        ('request_rate = "fast"', f"load.request_rate is 'fast', {EXPECTED}"),
        ("requests = 0", "load.requests is 0, expected a whole number of at least 1"),
        ("burstiness = 2", "load.burstiness is for a request rate; add one, like --request-rate 20"),
    ],
)
def test_an_error_of_a_file_names_file_and_key(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f"[load]\n{line}\n{PART}")
    with pytest.raises(InputError) as refused:
        loadspec.parse(load_keys(path), seed=0, weights={"Chat": 1}, once=None, run_time_s=None)
    assert str(refused.value) == f"{path}: {message}"


def test_load_is_no_table_or_order_no_word_is_refused(tmp_path: Path) -> None:
    for text, message in [
        ("load = 5", "load is 5, expected a table, like { top_p = 0.9 }"),
        ('order = "twice"', "order is 'twice', expected 'weighted' or 'once'"),
    ]:
        path = write(tmp_path, f"{text}\n{PART}")
        with pytest.raises(InputError) as refused:
            load_scenario(path)
        assert str(refused.value) == f"{path}: {message}"


def test_a_file_that_is_included_has_no_say(tmp_path: Path) -> None:
    write(tmp_path, f'order = "once"\n[load]\nrequest_rate = 5\n{PART}', "other.toml")
    path = write(tmp_path, 'include = ["other.toml"]\n')
    assert load_keys(path) == {}
    assert not load_scenario(path).once


# Options, user classes and files together, in a process of its own: importing Locust patches the whole process


_ASK = """
import json, sys
import msgspec
import vllm_locust.plugin
from locust import User, task
from locust.argument_parser import get_parser
from vllm_locust import ChatUser, CompletionsUser, loadspec, plan
from vllm_locust.errors import InputError

KINDS = {"chat": ChatUser, "completions": CompletionsUser, "other": User}
parser = get_parser(default_config_files=[])


@task
def own(user):
    pass


for line in sys.stdin:
    arguments, described = json.loads(line)
    classes = []
    for name, kind, scenario, weight, builds in described:
        tasks = {"tasks": [own]} if builds else {}
        classes.append(type(name, (KINDS[kind],), {"scenario": scenario, "weight": weight, **tasks}))
    try:
        options = parser.parse_args(arguments, env_vars={})
        asked = plan.given(classes, options, None)
        scenarios = plan.load_scenarios(classes, options, None)
        load = plan.load_of(classes, options, asked, scenarios, plan.tags(options))
        answer = {"load": msgspec.to_builtins(load), "run_time_s": loadspec.run_time_s(asked)}
    except InputError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Planning:
    """The process, and what it says of options and user classes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, *arguments: str, classes: list[tuple[str, str, str | None, int, bool]]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, classes]) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def load(self, *arguments: str, classes: list[tuple[str, str, str | None, int, bool]]) -> Load:
        return msgspec.convert(self.ask(*arguments, classes=classes)["load"], Load)

    def error(self, *arguments: str, classes: list[tuple[str, str, str | None, int, bool]]) -> str:
        return str(self.ask(*arguments, classes=classes)["error"])


@pytest.fixture(scope="module")
def planning() -> Iterator[Planning]:
    command = [sys.executable, "-c", _ASK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Planning(process)
        assert process.stdin is not None
        process.stdin.close()


MIXED = [("Chat", "chat", "mixed", 4, False), ("Completions", "completions", "mixed", 2, False)]


def test_the_names_of_vllm_bench_serve_are_accepted(planning: Planning) -> None:
    load = planning.load("--request-rate=4", "--num-prompts", "50", "--max-concurrency", "8", classes=MIXED)
    assert (load.requests, load.max_in_flight) == (50, 8)
    assert load.weights == {"Chat": 2, "Completions": 1}
    assert load == planning.load("--request-rate=4", "--requests=50", "--max-in-flight=8", classes=MIXED)
    assert planning.error("--max-concurrency", "8", classes=MIXED).startswith("--max-in-flight is for a request rate")


def test_options_win_over_the_file(planning: Planning, tmp_path: Path, trace: str) -> None:
    text = f'[load]\nrequest_rate = 5\nburstiness = 0.5\nrequests = 30\nrun_time = "2m"\nmax_in_flight = 3\n{PART}'
    classes = [("Chat", "chat", write(tmp_path, text), 1, False)]
    as_it_is = planning.ask(classes=classes)
    load = msgspec.convert(as_it_is["load"], Load)
    assert as_it_is["run_time_s"] == 120
    assert (load.arrivals, load.requests, load.max_in_flight) == (
        msgspec.structs.replace(parse(request_rate=5, burstiness=0.5).arrivals, seed=0),
        30,
        3,
    )
    other = planning.ask("--request-rate=7", "--requests=10", "--seed=3", "-t", "10s", classes=classes)
    load = msgspec.convert(other["load"], Load)
    assert other["run_time_s"] == 10
    assert (load.arrivals, load.requests, load.max_in_flight) == (
        msgspec.structs.replace(parse(request_rate=7, burstiness=0.5).arrivals, seed=3),
        10,
        3,
    )
    # What an option excludes, it takes the place of: nobody has to edit the file.
    assert planning.load("--arrivals=constant", classes=classes).arrivals == msgspec.structs.replace(
        parse(request_rate=5, arrivals="constant").arrivals, seed=0
    )
    traced = planning.load("--trace", trace, classes=classes)
    assert traced.arrivals == parse(trace=trace).arrivals
    traces = [("Chat", "chat", write(tmp_path, f'[load]\ntrace = "trace.jsonl"\ntrace_speed = 2\n{PART}'), 1, False)]
    assert planning.load(classes=traces).arrivals == parse(trace=trace, trace_speed=2).arrivals
    assert planning.load("--request-rate=7", classes=traces).arrivals == msgspec.structs.replace(
        parse(request_rate=7).arrivals, seed=0
    )


def test_two_files_that_ask_for_a_load_are_refused(planning: Planning, tmp_path: Path) -> None:
    asking = f"[load]\nrequest_rate = 5\n{PART}"
    one, two = write(tmp_path, asking, "one.toml"), write(tmp_path, asking, "two.toml")
    plain = write(tmp_path, PART, "plain.toml")
    classes = [("A", "chat", one, 1, False), ("B", "completions", two, 1, False)]
    assert planning.error(classes=classes) == (
        f"the scenarios {one}, {two} both have a [load]; a run has one: keep it in one of them, or give --scenario"
    )
    assert planning.load("--scenario", one, classes=classes).arrivals is not None
    for other in (plain, one):  # once is enough
        classes = [("A", "chat", one, 1, False), ("B", "completions", other, 1, False)]
        assert planning.load(classes=classes).arrivals is not None


def test_each_prompt_once_is_for_one_class_and_counts_what_tags_leave(planning: Planning, tmp_path: Path) -> None:
    once = write(tmp_path, f'order = "once"\n{PART}')
    assert planning.load(classes=[("A", "chat", once, 3, False)]).requests == 6
    assert planning.load("--tags", "a", classes=[("A", "chat", once, 3, False)]).requests == 3
    assert planning.load("--exclude-tags", "b", classes=[("A", "chat", once, 3, False)]).requests == 3
    assert planning.error("--requests=5", classes=[("A", "chat", once, 3, False)]).startswith(
        "--requests is 5, but order"
    )
    classes = [("A", "chat", once, 1, False), ("B", "completions", "mixed", 1, False)]
    there = 'order = "once" sends each prompt once, by one user class; there are A, B'
    assert planning.error(classes=classes) == f"{there}: name one of them after Locust's options"


def test_what_user_classes_cannot_send_is_refused(planning: Planning) -> None:
    own = [("Own", "chat", None, 1, True)]
    for argument, what in [("--request-rate=5", "a request rate"), ("--requests=5", "a fixed number of requests")]:
        expected = f"user class Own builds its own requests, which {what} cannot send; give it a scenario"
        assert planning.error(argument, classes=[*MIXED, *own]) == expected
    assert planning.load("--stages=1,2", classes=[*MIXED, *own]).stages == (1.0, 2.0)
    other = [*MIXED, ("Web", "other", None, 1, True)]
    expected = "user class Web does not stream, and a fixed number of requests would wait for it; leave it out"
    assert planning.error("--requests=5", classes=other) == expected
    load = planning.load("--request-rate=5", classes=other)
    assert load.weights == {"Chat": 2, "Completions": 1}  # others run beside it, as users
    uneven = [("Half", "chat", "mixed", 0.5, False), ("One", "chat", "mixed", 1, False)]
    for argument, what in [("--request-rate=5", "a request rate"), ("--requests=5", "a fixed number of requests")]:
        expected = f"user class Half has weight 0.5, but {what} is shared out by whole numbers like 1 and 2"
        assert planning.error(argument, classes=uneven) == expected
    assert planning.load("--stages=1,2", classes=uneven).stages == (1.0, 2.0)
