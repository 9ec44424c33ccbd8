"""The run file: what its schema says of real ones, and those that earlier versions wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from processes import headless, locust, process, saved, simulator
from windowed import Traffic, log_normal

from vllm_locust import cli, page, report
from vllm_locust.excerpt import excerpt
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Recording
from vllm_locust.results import Run, load, save
from vllm_locust.summary import Meta

OLDER = sorted((Path(__file__).parent / "golden" / "runs").glob("*.json"))
SCHEMA = Path(cli.__file__).parent / "assets" / "run.schema.json"


def errors(content: Any) -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    found = Draft202012Validator(schema).iter_errors(content)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-u", "4", "-r", "4", "-t", "3s"],
        ["-u", "4", "-r", "4", "-t", "3s", "--processes", "2", "--warmup", "1s", "--goodput", "ttft < 1s"],
        ["--request-rate", "10 for 2s, to 20 over 1s", "--limit", "ttft p95 < 1ms", "-t", "3s", "--note", "é"],
        ["--request-rate", "stages", "--stages", "5,10", "--stage-time", "2s", "--limit", "failures < 1%"],
        ["-u", "2", "-r", "2", "--requests", "20", "--retry-failed", "1", "--continuous-usage"],
        ["--request-rate", "10", "--arrivals", "gamma", "--burstiness", "0.5", "--stability", "-t", "3s"],
        ["-u", "3", "-r", "1", "-t", "5s", "--reset-stats", "--warmup", "1s"],
    ],
    ids=["closed", "workers", "profile", "stages", "requests", "stability", "reset"],
)
def test_what_a_run_saves_is_what_the_schema_says(tmp_path: Path, arguments: list[str]) -> None:
    with simulator(tmp_path, "--ttft", "20ms", "--itl", "2ms", "--early-ends", "0.1") as url:
        command = locust(*headless(tmp_path, url, "--window", "1s", *arguments))
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            running.wait(60)
    content = saved(tmp_path)
    assert content["summary"]["total"]["requests"], running.output
    assert errors(content) == []


def test_a_run_without_a_request_is_in_the_schema_too(tmp_path: Path) -> None:
    empty = save(Run.of(log_normal(1, {}, 1), Meta(parts=["short"], stability=True)), tmp_path)
    assert errors(json.loads(empty.read_text())) == []


def test_the_schema_is_closed(tmp_path: Path) -> None:
    content = json.loads(save(Run.of(log_normal(1, {"a": Traffic(3)}, 2), Meta()), tmp_path).read_text())
    assert errors(content) == []
    content["summary"]["total"]["ttft"]["p42"] = 1
    content["meta"]["load"]["more"] = 1
    content["recording"]["windows"][0]["cells"][0]["histograms"]["ttft"][1] = None
    assert len(errors(content)) == 3


def nodes(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema within a schema, and where it is."""
    if isinstance(schema, dict):
        yield path, schema
        for key in ("properties", "patternProperties", "$defs"):
            for name, inner in schema.get(key, {}).items():
                yield from nodes(inner, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            yield from nodes(schema.get(key), f"{path}[]")
        for key in ("prefixItems", "anyOf"):
            for number, inner in enumerate(schema.get(key, [])):
                yield from nodes(inner, f"{path}[{number}]")


def test_every_key_of_the_schema_has_a_meaning_and_every_set_of_keys_is_closed() -> None:
    everywhere = dict(nodes(json.loads(SCHEMA.read_text())))
    described = {
        f"{path}.{name}": inner.get("description", "")
        for path, node in everywhere.items()
        for key in ("properties", "patternProperties")
        for name, inner in node.get(key, {}).items()
    }
    assert len(described) > 200
    assert [path for path, meaning in described.items() if not meaning] == []
    rows = [node for node in everywhere.values() if "prefixItems" in node]
    assert rows
    assert all(place.get("description") for row in rows for place in row["prefixItems"])
    assert all(row.get("items") is False for row in rows)
    open_ = [path for path, node in everywhere.items() if "properties" in node and node["additionalProperties"]]
    assert open_ == []


@pytest.mark.parametrize(
    ("place", "key"),
    [(("meta",), "colour"), (("summary", "total", "rates"), "x_per_s"), (("recording",), "samples"), ((), "extra")],
)
def test_a_key_that_nobody_has_told_of_fails(tmp_path: Path, place: tuple[str, ...], key: str) -> None:
    content = json.loads(save(Run.of(log_normal(1, {"short": Traffic(40)}, 3), Meta()), tmp_path).read_text())
    inner = content
    for name in place:
        inner = inner[name]
    inner[key] = 1
    assert len(errors(content)) == 1


def test_the_verb_path_tells_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["path", "run.schema.json"]) == 0
    assert Path(capsys.readouterr().out.strip()) == SCHEMA


def made() -> dict[str, Run]:
    """Return runs of shapes that take long to run, made at once."""
    traffic = {"short": Traffic(40), "long": Traffic(2)}
    limits = ["ttft p95 < 1ms", "long: ttft p99 < 1s", "failures < 1%"]
    asked = Meta(stability=True, limits=limits, parts=["short", "long", "unused"])
    steady, slower = log_normal(1, traffic, 30), log_normal(2, traffic, 30, slower=lambda _, n: 9.0 if n > 20 else 1.0)
    return {
        "never began": Run.of(Recording("r1", 0, NS_PER_S), Meta(stability=True)),
        "steady": Run.of(steady, asked),
        "unstable": Run.of(slower, asked),
        "closed": Run.of(log_normal(3, traffic, 12, scheduled=False), Meta(stability=True, goodput=["ttft < 1s"])),
        "part": excerpt(Run.of(steady, asked), since_s=60, until_s=120, scenarios=["short"]),
    }


@pytest.mark.parametrize("shape", list(made()))
def test_a_run_of_any_length_is_what_the_schema_says(tmp_path: Path, shape: str) -> None:
    assert errors(json.loads(save(made()[shape], tmp_path).read_text())) == []


@pytest.mark.parametrize("file", OLDER, ids=lambda path: path.stem)
def test_a_file_of_an_earlier_version_is_read_and_says_what_it_said(file: Path) -> None:
    told = json.loads(file.read_text())["summary"]
    read = load(file)
    assert report.text(read, full=True)
    assert page.of_run(read)
    for name, scope in {"": told["total"], **told["scenarios"]}.items():
        again = read.summary["scenarios"][name] if name else read.summary["total"]
        assert (again["requests"], again["failed"]) == (scope["requests"], scope["failed"])
        assert again["outcomes"] == scope["outcomes"]
        for metric in ("ttft", "itl", "itl_max", "tpot", "e2el", "output_tokens"):
            assert again[metric] == scope[metric], (name, metric)


def test_earlier_versions_are_compared_with_today(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(OLDER[0]), str(OLDER[-1]), "--force"]) in (0, 3, 4)
    assert "Traceback" not in capsys.readouterr().err
