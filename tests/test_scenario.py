"""Scenario files are checked whole, and the i-th request is a pure function that loses and repeats nothing."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust.errors import InputError
from vllm_locust.prompts import Prompt
from vllm_locust.scenario import Part, Pick, Scenario, digest, load, nonce, packaged, pick
from vllm_locust.work import Work

A = '[part.a]\nprompts = "p.jsonl"\n'
in_tmp_path = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    """Write a scenario file beside a file of two prompts, and return its path."""
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str, **options: Any) -> Scenario:
    return load(str(write(folder, text)), **options)


def refusal(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(InputError) as refused:
        load(str(path))
    message = str(refused.value)
    assert message.startswith(f"{folder}{os.sep}")
    return message.removeprefix(f"{folder}{os.sep}")


def part(name: str, prompts: int = 3, **changed: Any) -> Part:
    texts = tuple(Prompt(text=f"{name} {i}") for i in range(prompts))
    return Part(name=name, prompts=texts, extra_body={}, **changed)


def sent(scenario: Scenario, number: int, seed: int = 0, user_class: str = "Mixed") -> list[Pick]:
    return [pick(scenario, seed, user_class, i) for i in range(number)]


# Files


def test_a_part_is_loaded_with_everything_that_its_table_says(tmp_path: Path) -> None:
    text = """
    cache = "natural"
    [part.short]
    prompts = "p.jsonl"
    max_tokens = 9
    temperature = 0.5
    extra_body = { top_p = 0.9, stop = ["x"] }
    [part.long]
    prompts = "p.jsonl"
    output_tokens = 40
    """
    scenario = loaded(tmp_path, text)
    assert scenario.name == "mine"
    short, long = scenario.parts
    asked = (Prompt(text="a"), Prompt(text="b"))
    assert short == Part(
        name="short",
        prompts=asked,
        cold=False,
        max_tokens=9,
        temperature=0.5,
        extra_body={"top_p": 0.9, "stop": ["x"]},
    )
    assert long == Part(name="long", prompts=asked, cold=False, output_tokens=40, extra_body={})


def test_prompts_are_cold_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert loaded(tmp_path, '[part.a]\nprompts = "p.jsonl"').parts[0].cold


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[part."a\\u001b[2J"]\nprompts = "p.jsonl"', ["part 'a\\x1b[2J'", "control characters"]),
        ('colour = 1\n[part.a]\nprompts = "p.jsonl"', ["colour: unknown key", "include, cache, weight, part"]),
        (
            '[part.a]\nprompts = "p.jsonl"\ntokens = 5',
            ["part.a.tokens: unknown key", "prompts, output_tokens, max_tokens, temperature, extra_body"],
        ),
        ("[part.a]\noutput_tokens = 5", ["part.a.prompts is missing", '"prompts/short.jsonl"']),
        ("[part.a]\nprompts = 5", ["part.a.prompts is 5", "expected a text"]),
        ('[part.a]\nprompts = ""', ["part.a.prompts is ''", "expected a text"]),
        ('[part.a]\nprompts = "p.jsonl"\noutput_tokens = 0', ["part.a.output_tokens is 0", "at least 1"]),
        ('[part.a]\nprompts = "p.jsonl"\noutput_tokens = "64"', ["part.a.output_tokens is '64'", "a whole number"]),
        ('[part.a]\nprompts = "p.jsonl"\nmax_tokens = 1.5', ["part.a.max_tokens is 1.5", "a whole number"]),
        ('[part.a]\nprompts = "p.jsonl"\nmax_tokens = true', ["part.a.max_tokens is True", "a whole number"]),
        ('[part.a]\nprompts = "p.jsonl"\ntemperature = -1', ["part.a.temperature is -1", "a number of at least 0"]),
        ('[part.a]\nprompts = "p.jsonl"\ntemperature = nan', ["part.a.temperature is nan", "a number"]),
        ('[part.a]\nprompts = "p.jsonl"\ntemperature = false', ["part.a.temperature is False", "a number"]),
        ('[part.a]\nprompts = "p.jsonl"\nextra_body = 5', ["part.a.extra_body is 5", "a table"]),
        (
            '[part.a]\nprompts = "p.jsonl"\noutput_tokens = 5\nmax_tokens = 5',
            ["part.a: output_tokens", "max_tokens exclude each other"],
        ),
        ('cache = "warm"\n[part.a]\nprompts = "p.jsonl"', ["cache is 'warm'", "'cold' or 'natural'"]),
        ('cache = true\n[part.a]\nprompts = "p.jsonl"', ["cache is True", "'cold' or 'natural'"]),
        ("part = 5", ["part is 5", "tables like [part.short]"]),
        ("[part]\na = 5", ["part is {'a': 5}", "tables like [part.short]"]),
        ("", ["no part in it", "[part.short]"]),
        ('include = "a.toml"', ["include is 'a.toml'", "a list of files"]),
        ("include = [5]", ["include is [5]", "a list of files"]),
        ('weight = 5\n[part.a]\nprompts = "p.jsonl"', ["weight is 5", "for each part"]),
        ('weight = { a = -1 }\n[part.a]\nprompts = "p.jsonl"', ["weight is {'a': -1}", "at least 0 for each part"]),
        ('weight = { a = "6" }\n[part.a]\nprompts = "p.jsonl"', ["weight is {'a': '6'}", "a number"]),
        ('weight = { a = inf }\n[part.a]\nprompts = "p.jsonl"', ["weight is {'a': inf}", "a number"]),
        ('weight = { b = 1 }\n[part.a]\nprompts = "p.jsonl"', ["weight.b: no such part", "there are a"]),
        ('weight = { a = 0 }\n[part.a]\nprompts = "p.jsonl"', ["weight: every part has weight 0"]),
        (
            'weight = { a = 0.0000001, b = 1 }\n[part.a]\nprompts = "p.jsonl"\n[part.b]\nprompts = "p.jsonl"',
            ["weight:", "too fine", "small whole numbers"],
        ),
        ("[part.a\n", ["not TOML", "line 1"]),
        (f"limits = 5\n{A}", ["limits is 5", "a table of limits by part"]),
        (f"limits = {{ b = 'ttft p95 < 1s' }}\n{A}", ["limits.b: no such part", "there are a, all"]),
        (f"limits = {{ a = 5 }}\n{A}", ["limits.a is 5", "a limit, like", "or a list of them"]),
        (f"limits = {{ a = ['ttft p95 < 1s', 5] }}\n{A}", ["limits.a is ['ttft p95 < 1s', 5]", "or a list of them"]),
        (f"limits = {{ a = 'ttft < 1s' }}\n{A}", ["limits.a: 'ttft < 1s': a statistic is missing"]),
        (f"limits = {{ all = 'ttft p95 < 1' }}\n{A}", ["limits.all: 'ttft p95 < 1': '1' has no unit"]),
        (f"limits = {{ a = 'a: ttft p95 < 1s' }}\n{A}", ["limits.a: 'a: ttft p95 < 1s': the key names the part"]),
        (f"limits.goodput = 5\n{A}", ["limits.goodput is 5", "what a good request is", "by part"]),
        (f"limits.goodput.a = 5\n{A}", ["limits.goodput is {'a': 5}", "by part"]),
        (f"limits.goodput.b = 'ttft < 1s'\n{A}", ["limits.goodput.b: no such part", "there are a, all"]),
        (f"limits.goodput = 'ttft > 1s'\n{A}", ["limits.goodput.all: 'ttft > 1s': ttft > asks"]),
        ("limits.' x' = 'ttft p95 < 1s'\n[part.' x']\nprompts = 'p.jsonl'", ["limits. x: limits need", "rename it"]),
    ],
)
def test_a_mistake_is_refused_with_file_key_value_and_what_is_accepted(
    tmp_path: Path, text: str, message: list[str]
) -> None:
    shown = refusal(tmp_path, text)
    assert shown.startswith(f"mine.toml: {message[0]}")
    assert [words for words in message if words not in shown] == []


def test_a_file_of_prompts_that_cannot_be_used_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n', encoding="utf-8")
    assert refusal(tmp_path, '[part.a]\nprompts = "bad.jsonl"').startswith("bad.jsonl:2: `prompt` is 5")
    assert refusal(tmp_path, '[part.a]\nprompts = "nowhere.jsonl"').startswith("nowhere.jsonl: No such file")
    scenario = loaded(tmp_path, '[part.a]\nprompts = "bad.jsonl"', skip_bad_prompts=True)
    assert (len(scenario.parts[0].prompts), scenario.parts[0].skipped_prompts) == (1, 1)


def test_a_file_that_is_not_utf_8_is_refused_with_its_offset(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.write_bytes(b"# caf\xe9")
    with pytest.raises(InputError, match=r"mine\.toml: byte 5 is not UTF-8"):
        load(str(path))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert loaded(tmp_path, '\N{BYTE ORDER MARK}[part.a]\nprompts = "p.jsonl"').parts[0].name == "a"


def test_limits_are_kept_in_the_form_of_the_command_line(tmp_path: Path) -> None:
    b = '\n[part.b]\nprompts = "p.jsonl"\n'
    scenario = loaded(
        tmp_path,
        '[limits]\nb = "ttft p95<0.3s"\nall = ["failures < 0.5%", "goodput>95%"]\ngoodput = "tpot<50ms,ttft<1s"\n'
        + A
        + b,
    )
    assert scenario.limits == ("b: ttft p95 < 300ms", "failures < 0.5%", "goodput > 95%")
    assert scenario.goodput == ("tpot < 50ms, ttft < 1s",)
    by_part = loaded(tmp_path, f'[limits.goodput]\nall = "ttft < 1s"\nb = "ttft < 2s"\n{A}{b}')
    assert (by_part.limits, by_part.goodput) == ((), ("ttft < 1s", "b: ttft < 2s"))


def test_limits_of_an_included_file_stay_with_it(tmp_path: Path) -> None:
    """They were set for the traffic of that file alone."""
    write(tmp_path, f'limits = {{ all = "ttft p95 < 1s", goodput = "ttft < 1s" }}\n{A}', "inner.toml")
    outer = loaded(tmp_path, 'include = ["inner.toml"]\nlimits = { a = "ttft p95 < 2s" }')
    assert (outer.limits, outer.goodput) == (("a: ttft p95 < 2s",), ())


json_like = st.recursive(
    st.booleans()
    | st.integers(-9, 9)
    | st.floats()
    | st.sampled_from(["p.jsonl", "", "cold", "x", "ttft p95 < 1s", "ttft < 1s"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "part",
                        "a",
                        "prompts",
                        "weight",
                        "include",
                        "cache",
                        "output_tokens",
                        "temperature",
                        "extra_body",
                    ),
                    *("limits", "goodput", "all"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


def toml(value: Any) -> str:
    """Write a value as inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value).lower() if isinstance(value, bool | float) else json.dumps(value)


@in_tmp_path
@given(table=st.dictionaries(st.sampled_from(["part", "weight", "include", "cache", "limits", "x"]), json_like))
def test_any_toml_is_either_a_scenario_or_refused_as_input(tmp_path: Path, table: dict[str, Any]) -> None:
    path = write(tmp_path, "\n".join(f"{key} = {toml(value)}" for key, value in table.items()))
    try:
        scenario = load(str(path))
    except InputError as refused:
        assert str(refused).startswith(str(tmp_path))  # noqa: PT017 - either is right
    else:
        assert scenario.parts


# Files that include files


def test_an_included_part_keeps_its_weight_unless_it_is_given_another(tmp_path: Path) -> None:
    write(
        tmp_path, 'weight = { a = 3 }\n[part.a]\nprompts = "p.jsonl"\n[part.b]\nprompts = "p.jsonl"', name="inner.toml"
    )
    outer = 'include = ["inner.toml"]\n[part.c]\nprompts = "p.jsonl"\n'
    assert {p.name: p.weight for p in loaded(tmp_path, outer).parts} == {"a": 3, "b": 1, "c": 1}
    weighted = "weight = { b = 0, c = 2 }\n" + outer
    assert {p.name: p.weight for p in loaded(tmp_path, weighted).parts} == {"a": 3, "c": 2}


def test_weights_may_be_fractions_and_keep_their_proportions_exactly(tmp_path: Path) -> None:
    parts = "".join(f'[part.{name}]\nprompts = "p.jsonl"\n' for name in "abc")
    weights = {p.name: p.weight for p in loaded(tmp_path, "weight = { a = 0.6, b = 0.3, c = 0.1 }\n" + parts).parts}
    assert (weights["a"], weights["b"]) == (6 * weights["c"], 3 * weights["c"])


def test_files_are_included_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", '[part.a]\nprompts = "p.jsonl"', name="inner.toml")
    assert [p.name for p in loaded(tmp_path, 'include = ["sub/inner.toml"]').parts] == ["a"]


def test_the_cache_of_the_outer_file_holds_for_what_it_includes(tmp_path: Path) -> None:
    write(tmp_path, 'cache = "cold"\n[part.a]\nprompts = "p.jsonl"', name="inner.toml")
    assert not loaded(tmp_path, 'cache = "natural"\ninclude = ["inner.toml"]').parts[0].cold
    assert loaded(tmp_path, 'include = ["inner.toml"]').parts[0].cold


@pytest.mark.parametrize("chain", [["mine"], ["x", "mine"], ["x", "y", "x"]])
def test_a_file_that_includes_itself_is_refused(tmp_path: Path, chain: list[str]) -> None:
    for name, included in pairwise(chain):
        write(tmp_path, f'include = ["{included}.toml"]', name=f"{name}.toml")
    assert "includes itself" in refusal(tmp_path, f'include = ["{chain[0]}.toml"]')


def test_a_part_that_is_defined_twice_is_refused(tmp_path: Path) -> None:
    inner = '[part.a]\nprompts = "p.jsonl"'
    write(tmp_path, inner, name="one.toml")
    write(tmp_path, inner, name="two.toml")
    for text in (f'include = ["one.toml"]\n{inner}', 'include = ["one.toml", "two.toml"]'):
        assert refusal(tmp_path, text).startswith("mine.toml: part 'a' is defined twice")


def test_a_missing_include_is_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path, 'include = ["gone.toml"]').startswith("gone.toml: No such file")


# Names


def test_the_packaged_scenarios_load_by_their_names() -> None:
    assert {"short", "long", "longform", "mixed"} <= packaged().keys()
    for name in packaged():
        assert load(name).name == name
    assert {p.name: p.weight for p in load("mixed").parts} == {"short": 6, "long": 3, "longform": 1}


def test_a_path_is_looked_for_from_the_working_directory_then_from_the_given_folder(tmp_path: Path) -> None:
    """In a process of its own, since the working directory is that of a process."""
    for folder, name in (("here", "near"), ("there", "far")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f'[part.{name}]\nprompts = "p.jsonl"', name="both.toml")
    write(tmp_path / "there", '[part.far]\nprompts = "p.jsonl"', name="one.toml")
    code = (
        "import sys; from pathlib import Path; from vllm_locust.scenario import load; "
        "print(*(load(name, relative_to=Path(sys.argv[1])).parts[0].name for name in sys.argv[2:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "there"), "both.toml", "one.toml"],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["near", "far"]


def test_an_unknown_name_is_refused_with_the_names_there_are_and_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load("nowhere.toml", relative_to=tmp_path)
    shown = str(refused.value)
    for words in ("'nowhere.toml'", "longform, mixed, short", str(tmp_path / "nowhere.toml"), "--scenario"):
        assert words in shown


# The i-th request

weights = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def weighted(numbers: list[int], prompts: int = 3) -> Scenario:
    return Scenario("s", tuple(part(f"p{i}", prompts, weight=weight) for i, weight in enumerate(numbers)))


@given(weights, st.integers(), st.text(max_size=5), st.integers(0, 10**6))
def test_a_pick_is_a_pure_function_of_seed_class_and_index(
    numbers: list[int], seed: int, user_class: str, index: int
) -> None:
    first = pick(weighted(numbers), seed, user_class, index)
    for other in (0, index + 1, 2**41):
        pick(weighted(numbers), seed + 1, user_class, other)
    assert pick(weighted(numbers), seed, user_class, index) == first


def test_a_pick_is_the_same_in_every_process() -> None:
    """Nothing depends on Python's hash seed."""
    code = (
        "from vllm_locust.scenario import load, pick; s = load('mixed'); "
        "picks = [pick(s, 7, 'Mixed', i) for i in range(200)]; "
        "print([(p.part.name, p.part.prompts.index(p.prompt)) for p in picks])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    picks = [pick(load("mixed"), 7, "Mixed", i) for i in range(200)]
    assert runs == {f"{[(p.part.name, p.part.prompts.index(p.prompt)) for p in picks]}\n"}


@given(weights, st.integers(0, 99), st.integers(0, 30))
def test_in_every_block_each_part_is_exactly_as_frequent_as_its_weight(
    numbers: list[int], seed: int, block: int
) -> None:
    size = sum(numbers)
    picks = [pick(weighted(numbers), seed, "Mixed", block * size + i) for i in range(size)]
    assert Counter(p.part.name for p in picks) == {f"p{i}": weight for i, weight in enumerate(numbers)}


@given(weights, st.integers(0, 99), st.integers(1, 9))
def test_each_prompt_comes_once_before_any_comes_twice(numbers: list[int], seed: int, prompts: int) -> None:
    scenario = weighted(numbers, prompts)
    picks = sent(scenario, 2 * prompts * sum(numbers), seed)
    for each in scenario.parts:
        asked = [p.prompt.text for p in picks if p.part is each]
        cycles = [asked[i : i + prompts] for i in range(0, len(asked), prompts)]
        assert len(cycles) == 2 * each.weight
        assert all(len(set(cycle)) == prompts for cycle in cycles)


@given(weights, st.integers(0, 99), st.integers(1, 6), st.integers(1, 120))
def test_case_76_the_stripes_of_any_number_of_workers_are_the_whole(
    numbers: list[int], seed: int, workers: int, requests: int
) -> None:
    scenario = weighted(numbers)
    whole = Counter((p.part.name, p.prompt.text) for p in sent(scenario, requests, seed))
    stripes = [pick(scenario, seed, "Mixed", i) for w in range(workers) for i in range(w, requests, workers)]
    assert Counter((p.part.name, p.prompt.text) for p in stripes) == whole


def test_case_76_eight_requests_of_four_workers_ask_eight_prompts_once_each_and_again_the_same_next_time() -> None:
    scenario = Scenario("s", (part("only", 8),))
    asked = [pick(scenario, 0, "Mixed", i).prompt.text for w in range(4) for i in range(w, 8, 4)]
    assert sorted(asked) == sorted(p.text for p in scenario.parts[0].prompts)
    assert [p.prompt.text for p in sent(scenario, 8)] == [p.prompt.text for p in sent(scenario, 8)]


@given(weights.filter(lambda numbers: len(numbers) > 1), st.integers(0, 99), st.data())
def test_leaving_parts_out_changes_nothing_about_the_requests_of_those_that_stay(
    numbers: list[int], seed: int, data: st.DataObject
) -> None:
    whole = weighted(numbers, prompts=5)
    kept = data.draw(st.sets(st.sampled_from([p.name for p in whole.parts]), min_size=1))
    filtered = whole.only(kept, None)
    assert filtered == whole.only(None, {p.name for p in whole.parts} - kept)
    blocks = 6
    for each in filtered.parts:
        before = [p.prompt.text for p in sent(whole, blocks * sum(numbers), seed) if p.part.name == each.name]
        after = sent(filtered, blocks * sum(p.weight for p in filtered.parts), seed)
        assert [p.prompt.text for p in after if p.part.name == each.name] == before


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 99), st.integers(1, 7), st.data())
def test_order_once_sends_each_prompt_that_tags_leave_exactly_once_on_any_number_of_workers(
    prompts: list[int], seed: int, workers: int, data: st.DataObject
) -> None:
    """Weights do not count; nor does who has which part."""
    parts = tuple(part(f"p{i}", number, weight=i + 1) for i, number in enumerate(prompts))
    kept = data.draw(st.sets(st.sampled_from([p.name for p in parts]), min_size=1))
    scenario = Scenario("s", parts, once=True).only(kept, None)
    expected = Counter((p.name, prompt.text) for p in parts if p.name in kept for prompt in p.prompts)
    amounts = {"Mixed": scenario.prompts}
    assert amounts["Mixed"] == expected.total()
    picks = []
    for rank in range(workers):
        work = Work(rank, workers, amounts=amounts)
        while (item := work.take("Mixed")) is not None:
            picks.append(pick(scenario, seed, "Mixed", item.index))
            work.end(item, failed=False)
    assert Counter((p.part.name, p.prompt.text) for p in picks) == expected
    with pytest.raises(IndexError):
        pick(scenario, seed, "Mixed", scenario.prompts)


def test_order_once_mixes_parts_by_the_seed_and_keeps_lengths() -> None:
    scenario = Scenario("s", (part("a", 20, output_tokens=5), part("b", 20)), once=True)
    first, again, other = ([(p.part.name, p.prompt.text) for p in sent(scenario, 40, seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert {name for name, _ in first[:20]} == {"a", "b"}
    assert all(p.output_tokens == (5 if p.part.name == "a" else None) for p in sent(scenario, 40))


def test_tags_name_parts_and_none_names_all() -> None:
    scenario = weighted([1, 1, 1])
    assert scenario.only(None, None) == scenario.only((), ()) == scenario
    assert [p.name for p in scenario.only(["p0", "p2", "other"], ["p2"]).parts] == ["p0"]
    assert scenario.only(["other"], None).parts == ()


def test_another_seed_or_class_asks_in_another_order() -> None:
    scenario = weighted([3, 2], prompts=20)
    orders = {
        tuple((p.part.name, p.prompt.text) for p in sent(scenario, 50, seed, user_class))
        for seed in (0, 1, 2)
        for user_class in ("Mixed", "Chat")
    }
    assert len(orders) == 6


def test_the_order_of_prompts_is_another_one_in_each_cycle() -> None:
    scenario = Scenario("s", (part("only", 20),))
    asked = [p.prompt.text for p in sent(scenario, 60)]
    assert len({tuple(asked[i : i + 20]) for i in (0, 20, 40)}) == 3


def test_the_length_of_a_prompt_goes_before_that_of_its_part() -> None:
    prompts = (Prompt(text="a", output_tokens=3), Prompt(text="b"))
    scenario = Scenario("s", (Part(name="p", prompts=prompts, output_tokens=64, extra_body={}),))
    lengths = {p.prompt.text: p.output_tokens for p in sent(scenario, 2)}
    assert lengths == {"a": 3, "b": 64}


def test_a_nonce_is_of_constant_length_and_never_the_same_twice() -> None:
    indices = [*range(2000), *(2**40 * late + i for late in (1, 2) for i in range(100))]
    nonces = [nonce(run, user_class, i) for run in ("r1", "r2") for user_class in ("A", "B") for i in indices]
    assert len(set(nonces)) == len(nonces)
    assert len({len(made) for made in nonces}) == 1
    assert nonce("r1", "A", 5) == nonce("r1", "A", 5)


@given(st.binary(), st.binary())
def test_a_digest_names_its_bytes(a: bytes, b: bytes) -> None:
    assert (digest(a) == digest(b)) == (a == b)
