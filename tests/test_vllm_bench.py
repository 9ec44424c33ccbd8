"""A run as results of `vllm bench serve`: its keys and types are those of real result files, its numbers those told."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from processes import assert_clean, headless, locust, process, simulator
from windowed import Traffic, log_normal

from vllm_locust import cli, requestlog, results, vllm_bench
from vllm_locust.errors import InputError
from vllm_locust.figures import PERCENTILES
from vllm_locust.histogram import RELATIVE_ERROR, Histogram
from vllm_locust.requestlog import Row
from vllm_locust.results import Run
from vllm_locust.summary import Meta

CAPTURES = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("bench_serve/*.json"))
}
"""What vLLM 0.32 wrote."""


def shapes(value: Any) -> set[str]:
    """Return the types of a value, and of what is in it."""
    if isinstance(value, list):
        return {"list", *(f"[{shape}]" for item in value for shape in shapes(item))}
    return {type(value).__name__}


KNOWN: dict[str, set[str]] = {}
for capture in CAPTURES.values():
    for key, value in capture.items():
        KNOWN.setdefault(key, {"NoneType", "[NoneType]"}).update(shapes(value))
KNOWN["label"] |= {"str"}  # those of the captures were not given one
KNOWN["scenario"] = {"str"}  # as `--metadata scenario=short` would add it


def exported(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "summary"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with a warm-up, failures, requests that its end cut, and a log of all of them."""
    folder = tmp_path_factory.mktemp("run")
    with simulator(folder, "--ttft", "20ms", "--itl", "2ms", "--stream-errors", "0.05") as url:
        options = [*headless(folder, url, "-u", "10", "-r", "10", "-t", "6s", "--request-log", "--log-text")]
        options += ["--warmup", "1s", "--window", "2s", "--stop-timeout", "0"]
        with process(locust(*options), folder / "locust.log", cwd=folder) as running:
            assert running.wait() == 3, running.output
            assert_clean(running)
    (path,) = (folder / "results").glob("*/run.json")
    return path.parent


@pytest.fixture(scope="module")
def export(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "new" / "directory"
    assert cli.main(["export", "--format", "vllm-bench", str(run), "--output", str(folder)]) == 0
    return folder


def test_there_is_a_file_per_scenario_one_for_all_and_what_plots_read(export: Path) -> None:
    found = exported(export)
    assert {*found} == {"scenario=short", "scenario=long", "scenario=longform", "all"}
    assert [result["scenario"] for result in found.values()] == [name.removeprefix("scenario=") for name in found]
    plotted = json.loads((export / "summary.json").read_text())
    assert [one["scenario"] for one in plotted] == ["short", "long", "longform", "all"]
    for one in plotted:
        stem = "all" if one["scenario"] == "all" else f"scenario={one['scenario']}"
        assert one == {key: value for key, value in found[stem].items() if key not in vllm_bench.LISTS}


def test_each_key_of_a_real_result_is_there_and_has_its_type_or_is_null(export: Path) -> None:
    for result in exported(export).values():
        assert {*result} == {*KNOWN}
        for key, value in result.items():
            assert shapes(value) <= KNOWN[key], key
    told = {key for key, value in exported(export)["all"].items() if value is not None}
    # No tokenizer, no gaps per request, no limits, no sound; two endpoints in one run, and no bursts in a closed loop.
    never = {"tokenizer_id", "itls", "request_goodput", "rtfx", "endpoint_type", "backend", "burstiness"}
    assert {*KNOWN} - told == never
    assert exported(export)["scenario=short"]["request_rate"] == "inf"


def test_figures_are_those_of_the_report(run: Path, export: Path) -> None:
    summary = results.load(run).summary
    scopes = {f"scenario={name}": scope for name, scope in summary["scenarios"].items()} | {"all": summary["total"]}
    for stem, result in exported(export).items():
        scope = scopes[stem]
        assert result["duration"] == summary["duration_s"]
        assert result["request_throughput"] == scope["rates"]["request_per_s"]
        for name in vllm_bench.METRICS:
            assert result[f"mean_{name}_ms"] == pytest.approx(1e3 * scope[name]["mean"])
            assert result[f"median_{name}_ms"] == result[f"p50_{name}_ms"]
            for key in PERCENTILES:
                assert result[f"{key}_{name}_ms"] == pytest.approx(1e3 * scope[name][key])


def test_lists_are_of_the_very_requests_that_figures_are_of(run: Path, export: Path) -> None:
    log = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    steady = [row for row in log if row["phase"] == "steady" and row["outcome"] != "cancelled"]
    assert {row["phase"] for row in log} == {"steady", "warmup"}
    assert {row["outcome"] for row in log} >= {"ok", "stream_error", "cancelled"}
    found = exported(export)
    assert found["all"]["num_prompts"] == len(steady)
    for stem, result in found.items():
        rows = [row for row in steady if stem in ("all", f"scenario={row['scenario']}")]
        rows.sort(key=lambda row: row["sent_s"])
        failed = [row["outcome"] != "ok" for row in rows]
        assert (result["completed"], result["failed"]) == (len(rows) - sum(failed), sum(failed))
        assert {len(result[key]) for key in vllm_bench.LISTS if result[key] is not None} == {len(rows)}
        assert result["start_times"] == [row["sent_s"] for row in rows]
        assert [bool(error) for error in result["errors"]] == failed
        assert result["generated_texts"] == [row["answer"] or "" for row in rows]
        assert sum(result["output_lens"]) == result["total_output_tokens"]
        assert sum(filter(None, result["input_lens"])) == result["total_input_tokens"]
        # What the end cut had its first token all the same; theirs waits for every answer.
        cut = [
            row["ttft_s"]
            for row in log
            if row["outcome"] == "cancelled" and stem in ("all", f"scenario={row['scenario']}")
        ]
        for key, name, more in (("ttfts", "ttft", cut), ("latencies", "e2el", [])):
            values = np.array([value for value in (*result[key], *more) if value is not None]) * 1e3
            assert result[f"mean_{name}_ms"] == pytest.approx(values.mean(), rel=1e-9)
            off = RELATIVE_ERROR * math.sqrt((values**2).mean())  # each sample is as far off as a bucket is wide
            assert result[f"std_{name}_ms"] == pytest.approx(values.std(), abs=off)
            for share, percentile in ((0.5, "p50"), (0.99, "p99")):
                nearest = np.sort(values)[math.ceil(share * values.size) - 1]
                assert result[f"{percentile}_{name}_ms"] == pytest.approx(nearest, rel=1.01 * RELATIVE_ERROR)


def test_a_log_that_is_csv_gives_the_same_lists(run: Path, export: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    with (tmp_path / "requests.csv").open("wb") as file:
        requestlog.write((run / "requests.jsonl").read_bytes().splitlines(keepends=True), file, "csv", texts=True)
    assert cli.main(["export", "--format", "vllm-bench", str(tmp_path / "run.json")]) == 0
    assert exported(tmp_path / "vllm-bench") == exported(export)


def test_without_a_log_lists_are_null_and_the_command_says_so(
    run: Path, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    assert cli.main(["export", "--format", "vllm-bench", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert [Path(line).name for line in said.out.splitlines()][-2:] == ["all.json", "summary.json"]
    assert "no log of requests beside the run (--request-log)" in said.err
    for stem, result in exported(tmp_path / "vllm-bench").items():
        assert result == exported(export)[stem] | dict.fromkeys(vllm_bench.LISTS)


def test_a_log_that_lacks_requests_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    lines = (run / "requests.jsonl").read_text().splitlines(keepends=True)
    steady = sum('"phase":"steady"' in line and '"outcome":"cancelled"' not in line for line in lines)
    (tmp_path / "requests.jsonl").write_text("".join(line for line in lines if '"phase":"warmup"' in line))
    assert cli.main(["export", "--format", "vllm-bench", str(tmp_path)]) == 0
    assert f"the log beside the run has 0 of the {steady:,} requests" in capsys.readouterr().err
    (tmp_path / "requests.jsonl").write_text("".join(lines)[:-40])
    assert cli.main(["export", "--format", "vllm-bench", str(tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "requests.jsonl: no log of requests" in capsys.readouterr().err


def test_what_is_there_already_stays(run: Path, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in export.iterdir()}
    (export / "scenario=short.json").unlink()
    assert cli.main(["export", "--format", "vllm-bench", str(run), "--output", str(export)]) == 2
    assert "is there already, and stays; give another directory: --output DIR" in capsys.readouterr().err
    assert not (export / "scenario=short.json").exists()
    (export / "scenario=short.json").write_bytes(before[export / "scenario=short.json"])
    assert {path: path.read_bytes() for path in export.iterdir()} == before


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"users": 8, "workers": 1}, ("inf", None, 8)),
        ({"users": 8, "stages": [4, 8], "stage_s": 10}, ("inf", None, None)),
        ({"arrivals": "poisson", "request_rate": 15}, (15.0, 1.0, None)),
        ({"arrivals": "gamma", "burstiness": 0.5, "request_rate": 2.5, "max_in_flight": 9}, (2.5, 0.5, 9)),
        ({"arrivals": "constant", "request_rate": 3}, (3.0, None, None)),
        ({"arrivals": "trace"}, (None, None, None)),
    ],
)
def test_the_load_is_told_in_their_words(load: dict[str, Any], expected: tuple[Any, ...]) -> None:
    told = Run.of(log_normal(1, {"short": Traffic(40)}, 3), Meta(load=load))
    result = vllm_bench.results_of(told)[""]
    assert tuple(result[key] for key in ("request_rate", "burstiness", "max_concurrency")) == expected
    assert result["max_concurrent_requests"] == 9
    assert result["endpoint_type"] == result["backend"] == "openai-chat"


def test_nothing_is_null_and_nothing_divides_by_it() -> None:
    empty = Run.of(log_normal(1, {}, 2), Meta(parts=["short"]))
    for result in vllm_bench.results_of(empty).values():
        assert (result["completed"], result["num_prompts"], result["request_throughput"]) == (0, 0, 0)
        assert {result[f"{key}_{name}_ms"] for name in vllm_bench.METRICS for key in ("mean", "std", "p99")} == {None}
        assert result["total_output_tokens"] is None


def test_the_deviation_of_a_histogram_is_that_of_its_samples() -> None:
    values = np.random.default_rng(3).lognormal(18, 0.6, 20_000).astype(np.int64)
    histogram = Histogram()
    histogram.add_array(values)
    assert vllm_bench._deviation_s(histogram) == pytest.approx(values.std() / 1e9, rel=0.01)


def test_names_of_files_are_harmless_and_differ(tmp_path: Path) -> None:
    names = {"../../x": Traffic(9), "a/b": Traffic(9), "A-b": Traffic(9), "all": Traffic(9), "": Traffic(9)}
    found = vllm_bench.results_of(Run.of(log_normal(1, names, 2), Meta()))
    paths = vllm_bench.save(found, tmp_path / "here")
    assert {path.parent for path in paths} == {tmp_path / "here"}
    assert len({path.name.casefold() for path in paths}) == len(paths) == len(found) + 1
    with pytest.raises(InputError, match="cannot be written to"):
        vllm_bench.save(found, Path("/proc/nothing"))


ROW = Row(
    request_id="-r1",
    scenario="",
    endpoint="chat",
    user_class="Chat",
    worker="w",
    epoch=0,
    phase="steady",
    stage=0,
    attempt=0,
    called_s=0.5,
    scheduled_s=None,
    sent_s=0.5,
    first_token_s=None,
    last_token_s=None,
    done_s=1.0,
    connect_s=None,
    ttft_s=1e-7,
    e2el_s=None,
    itl_max_s=None,
    input_tokens=12,
    output_tokens=0,
    cached_tokens=None,
    token_events=0,
    estimated=True,
    finish_reason=None,
    outcome="http_5xx",
    status=503,
    message='=cmd|"a", b\nc',
    in_flight=1,
    reconnects=0,
)


@pytest.mark.parametrize("form", requestlog.FORMATS)
def test_a_log_is_read_as_it_was_written(form: str, tmp_path: Path) -> None:
    texts = {"prompt": "@x", "answer": "+1", "reasoning": None, "answer_truncated": False}
    rows = [ROW, msgspec.structs.replace(ROW, message=None, status=None, ttft_s=None, estimated=False, **texts)]
    file = tmp_path / f"requests.{form}"
    with file.open("wb") as opened:
        requestlog.write([msgspec.json.encode(row) + b"\n" for row in rows], opened, form, texts=form == "csv")
    found = [*requestlog.read(file)]
    if form == "csv":  # an empty cell is no text
        rows[1] = msgspec.structs.replace(rows[1], reasoning=msgspec.UNSET)
    assert found == rows
    assert found[1].answer == "+1"


def test_the_table_is_one_that_a_spreadsheet_reads(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "--format", "csv", str(run)]) == 0
    text = capsys.readouterr().out
    rows = [*csv.DictReader(io.StringIO(text, newline=""))]
    summary = results.load(run).summary
    assert [row["scenario"] for row in rows] == [*summary["scenarios"], ""]
    assert float(rows[-1]["itl_p99_s"]) == summary["total"]["itl"]["p99"]
    file = tmp_path / "table.csv"
    command = ["export", "--format", "csv", str(run), "--output", str(file)]
    assert cli.main(command) == 0
    assert file.read_bytes().decode() == text
    assert cli.main(command) == 2
    assert "is there already, and stays" in capsys.readouterr().err
