"""The run file: what its schema says of real ones, and those that earlier versions wrote."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from processes import headless, locust, process, saved, simulator
from windowed import Traffic, log_normal

from vllm_locust import cli, page, report
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
    ],
    ids=["closed", "workers", "profile", "stages", "requests", "stability"],
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


def test_every_object_of_the_schema_has_a_word_on_it() -> None:
    schema = json.loads(SCHEMA.read_text())
    for name, part in chain(schema["$defs"].items(), schema["$defs"]["meta"]["properties"].items()):
        plain = name in ("name", "model", "seed", "late", "generator_limits") or part.get("type") in (
            "boolean",
            "string",
        )
        assert plain or "description" in part or "$ref" in part or part.get("type") == "array", name


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
