"""Results of `vllm bench serve` as runs: samples where they happened, what is not there null, and round trips."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_locust import bench_run, cli, compare, comparison, markdown, page, report, results, vllm_bench
from vllm_locust.cell import total
from vllm_locust.errors import InputError
from vllm_locust.figures import PERCENTILES
from vllm_locust.histogram import RELATIVE_ERROR
from vllm_locust.results import Run
from vllm_locust.terminal import COLUMNS, width_of

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("bench_serve/*.json"))}
CAPTURES: dict[str, dict[str, Any]] = {name: json.loads(path.read_text()) for name, path in FILES.items()}
"""What vLLM 0.32 wrote with --save-detailed."""
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""What it leaves out without."""


def plain(name: str) -> dict[str, Any]:
    """Return a result as it is written without --save-detailed."""
    return {key: value for key, value in CAPTURES[name].items() if key not in LISTS}


def read(folder: Path, content: Any, name: str = "result.json") -> Run:
    (folder / name).write_text(json.dumps(content))
    return results.load(folder / name)


def nearest(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]


def samples(capture: dict[str, Any]) -> dict[str, list[float]]:
    """Return the latencies of what was answered, by the definitions."""
    ok = [number for number, error in enumerate(capture["errors"]) if not error]
    ends = {number: capture["ttfts"][number] + sum(capture["itls"][number]) for number in ok}
    lengths = {number: capture["output_lens"][number] for number in ok}
    return {
        "ttft": [capture["ttfts"][number] for number in ok],
        "itl": [gap for number in ok for gap in capture["itls"][number]],
        "itl_max": [max(capture["itls"][number]) for number in ok if capture["itls"][number]],
        "e2el": [*ends.values()],
        "tpot": [(ends[n] - capture["ttfts"][n]) / (lengths[n] - 1) for n in ok if lengths[n] > 1],
    }


# With samples


@pytest.mark.parametrize("name", FILES)
def test_the_samples_of_a_result_make_the_figures_that_it_says(name: str) -> None:
    capture, run = CAPTURES[name], results.load(FILES[name])
    whole = run.summary["total"]
    assert whole["outcomes"]["ok"] == capture["completed"]
    assert (whole["failed"], whole["requests"]) == (capture["failed"], capture["num_prompts"])
    assert run.summary["duration_s"] == pytest.approx(capture["duration"], abs=1e-9)
    for key, theirs in (("request_per_s", "request_throughput"), ("output_tokens_per_s", "output_throughput")):
        assert whole["rates"][key] == pytest.approx(capture[theirs], rel=1e-6)
    for metric, values in samples(capture).items():
        assert whole[metric]["count"] == len(values)
        for key, share in PERCENTILES.items():
            assert whole[metric][key] == pytest.approx(nearest(values, share), rel=RELATIVE_ERROR, abs=1e-9)
        if f"mean_{metric}_ms" in capture:
            assert 1e3 * whole[metric]["mean"] == pytest.approx(capture[f"mean_{metric}_ms"], rel=1e-5)
    assert whole["output_tokens"]["mean"] * capture["completed"] == pytest.approx(capture["total_output_tokens"])
    assert whole["tokens"]["input"] == capture["total_input_tokens"]


@pytest.mark.parametrize("name", FILES)
def test_a_result_that_was_read_is_exported_as_it_was(name: str) -> None:
    capture, run = CAPTURES[name], results.load(FILES[name])
    found = vllm_bench.results_of(run)[""]
    for key in ("date", "backend", "endpoint_type", "model_id", "num_prompts", "request_rate", "max_concurrency"):
        assert found[key] == capture[key]
    for key in ("completed", "failed", "total_input_tokens", "total_output_tokens"):
        assert found[key] == capture[key]
    for key in ("duration", "request_throughput", "output_throughput", "total_token_throughput"):
        assert found[key] == pytest.approx(capture[key], rel=1e-6)
    values = samples(capture)
    for metric in vllm_bench.METRICS:
        if f"mean_{metric}_ms" not in capture:
            continue
        assert found[f"mean_{metric}_ms"] == pytest.approx(capture[f"mean_{metric}_ms"], rel=1e-5)
        # Theirs is interpolated: it is between two samples, ours is one of them.
        for key, share in (("p50", 0.5), ("p99", 0.99)):
            ranked, place = np.sort(values[metric]) * 1e3, share * (len(values[metric]) - 1)
            low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
            assert low * (1 - RELATIVE_ERROR) <= found[f"{key}_{metric}_ms"] <= high * (1 + RELATIVE_ERROR)
        off = RELATIVE_ERROR * 1e3 * math.sqrt(np.mean(np.square(values[metric])))
        assert found[f"std_{metric}_ms"] == pytest.approx(capture[f"std_{metric}_ms"], abs=off)


def test_each_sample_is_in_the_window_in_which_it_happened() -> None:
    capture, run = CAPTURES["bench_chat_rate20_poisson"], results.load(FILES["bench_chat_rate20_poisson"])
    recording = run.recording
    assert recording.window_count in (30, 31)
    began = min(capture["start_times"])
    firsts = [start - began + ttft for start, ttft in zip(capture["start_times"], capture["ttfts"], strict=True)]
    gaps = [
        (first + sum(stream[: number + 1]), gap)
        for first, stream in zip(firsts, capture["itls"], strict=True)
        for number, gap in enumerate(stream)
    ]
    window_s = recording.window_ns / 1e9
    for index in range(recording.window_count):
        cell = total(recording.window(index).values())
        held = {name: histogram.count for name, histogram in cell.histograms.items()}
        assert held.get("ttft", 0) == sum(at // window_s == index for at in firsts)
        assert held.get("itl", 0) == pytest.approx(sum(at // window_s == index for at, _ in gaps), abs=2)
    assert recording.window(0)


def test_a_short_result_has_windows_to_draw_from_and_a_long_one_those_of_any_run(tmp_path: Path) -> None:
    for duration_s, window_s in ((0.9, 0.03), (60.0, 2), (300.0, 10), (3_000.0, 10)):
        run = read(tmp_path, CAPTURES["bench_openai_c16"] | {"duration": duration_s})
        assert run.recording.window_ns == pytest.approx(window_s * 1e9)


def test_a_failed_request_is_a_failure_and_no_latency_of_zero() -> None:
    run = results.load(FILES["bench_chat_someoverlong"])
    whole = run.summary["total"]
    (kind,) = run.summary["failures"]
    assert (kind["outcome"], kind["status"], kind["count"], kind["message"]) == ("http_4xx", 400, 6, "Bad Request")
    assert (whole["ttft"]["count"], whole["judged"]["ttft"]["count"], whole["judged"]["ttft"]["failed"]) == (14, 20, 6)
    assert whole["ttft"]["min"] > 0.01
    assert whole["judged"]["e2el"]["p99"] == "failed"


def test_the_chunk_with_the_role_is_an_event_as_there_and_carries_no_token() -> None:
    for name, roles in (("bench_chat_c16", 1), ("bench_openai_c16", 0)):
        capture, run = CAPTURES[name], results.load(FILES[name])
        tokens = run.summary["total"]["tokens"]
        events = sum(1 + len(stream) for stream in capture["itls"])
        assert (tokens["events"], tokens["output_received"]) == (events, capture["total_output_tokens"])
        assert run.summary["total"]["itl"]["count"] == events - capture["completed"]
        assert (events > capture["total_output_tokens"]) == bool(roles)


def test_requests_that_left_at_a_rate_have_a_schedule() -> None:
    capture, run = CAPTURES["bench_chat_rate20_poisson"], results.load(FILES["bench_chat_rate20_poisson"])
    whole = run.summary["total"]
    assert whole["scheduled"] == whole["queue"]["count"] == whole["ttft_scheduled"]["count"] == 100
    assert whole["queue"]["max"] == pytest.approx(max(capture["queue_times"]), abs=1e-9)
    assert whole["rates"]["goodput_per_s"] == capture["request_goodput"]
    assert results.load(FILES["bench_chat_c16"]).summary["total"]["queue"]["count"] == 0
    text = report.text(run)
    assert "20 requests/s, poisson, 100 requests" in text
    assert "16.0 requests/s, – of all due" in text


def test_streams_in_flight_are_counted() -> None:
    rates = results.load(FILES["bench_openai_c16"]).summary["total"]["rates"]
    capture = CAPTURES["bench_openai_c16"]
    busy_s = sum(capture["latencies"])
    assert rates["in_flight_peak"] == capture["max_concurrency"]
    assert rates["in_flight_mean"] == pytest.approx(busy_s / capture["duration"], rel=1e-6)


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        ("Service Unavailable", "http_5xx", 503),
        ("Too Many Requests", "http_429", 429),
        ("stream_error: code 500: it broke", "stream_error", 0),
        ("Never received a valid chunk to calculate TTFT.This response will be marked as failed!", "empty", 0),
        ("", "empty", 0),
        ("Traceback (most recent call last):\n  File x\nTimeoutError\n", "total_timeout", 0),
        (
            "Traceback (most recent call last):\n  x\naiohttp.ServerDisconnectedError: \x1b[31m bye\n",
            "connection_lost",
            0,
        ),
    ],
)
def test_what_an_error_says_is_how_a_request_ended(error: str, outcome: str, status: int, tmp_path: Path) -> None:
    capture = CAPTURES["bench_chat_someoverlong"]
    run = read(tmp_path, capture | {"errors": [text and error for text in capture["errors"]]})
    assert run.summary["total"]["outcomes"][outcome] == 6
    (kind,) = run.summary["failures"]
    assert kind["status"] == status
    assert "\x1b" not in report.text(run, full=True)
    assert "Traceback" not in kind["message"]


def test_a_run_that_was_exported_with_its_log_has_the_same_figures_when_it_is_read(tmp_path: Path) -> None:
    # A result as `vllm_bench` writes one: no gaps per request, a request that failed on its way, one without a token.
    capture = plain("bench_openai_c1") | {
        "num_prompts": 3,
        "completed": 1,
        "failed": 2,
        "scenario": "short",
        "itls": None,
        "input_lens": [128, None, None],
        "output_lens": [11, 0, 0],
        "ttfts": [0.1, 0.2, None],
        "latencies": [0.3, None, None],
        "start_times": [7.5, 7.6, 7.7],
        "queue_times": [None, None, None],
        "generated_texts": None,
        "errors": ["", "connection_lost: reset", "http_5xx"],
    }
    run = read(tmp_path, capture)
    whole = run.summary["scenarios"]["short"]
    assert (whole["ttft"]["count"], whole["e2el"]["mean"], whole["tpot"]["mean"]) == (2, 0.3, 0.02)
    assert {kind["outcome"] for kind in run.summary["failures"]} == {"connection_lost", "http_5xx"}
    assert whole["itl"]["p99"] == capture["p99_itl_ms"] / 1e3
    assert whole["itl_max"]["count"] == 0
    assert "it has no gaps" in report.text(run)


# Without samples


@pytest.mark.parametrize("name", FILES)
def test_without_samples_what_the_file_says_is_told_and_the_rest_is_null(name: str, tmp_path: Path) -> None:
    said, run = plain(name), read(tmp_path, plain(name))
    for scope in (run.summary["total"], run.summary["scenarios"]["bench"]):
        assert (scope["requests"], scope["failed"]) == (said["num_prompts"], said["failed"])
        for metric in vllm_bench.METRICS:
            for key, theirs in {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}.items():
                value = said.get(f"{theirs}_{metric}_ms")
                assert scope[metric][key] == (None if value is None else value / 1e3)
            assert scope[metric]["max"] is None
        assert scope["itl_max"]["count"] == 0
        assert scope["rates"]["request_per_s"] == said["request_throughput"]
        assert scope["rates"]["output_tokens_per_s"] == said["output_throughput"]
        assert scope["output_tokens"]["mean"] * said["completed"] == pytest.approx(said["total_output_tokens"])
    assert run.summary["duration_s"] == said["duration"]
    assert run.recording.window_count == 0
    assert "it has no samples (--save-detailed)" in report.text(run)
    with pytest.raises(InputError, match="has no samples"):
        vllm_bench.results_of(run)


def test_without_samples_a_percentile_among_failures_is_one_and_others_are_unknown(tmp_path: Path) -> None:
    judged = read(tmp_path, plain("bench_chat_someoverlong")).summary["total"]["judged"]["ttft"]
    assert (judged["p50"], judged["p90"], judged["count"], judged["failed"]) == (None, "failed", 20, 6)
    judged = read(tmp_path, plain("bench_chat_c16")).summary["total"]["judged"]["ttft"]
    assert judged["p95"] == CAPTURES["bench_chat_c16"]["p95_ttft_ms"] / 1e3


def test_an_older_result_does_not_say_how_many_failed(tmp_path: Path) -> None:
    old = {key: value for key, value in plain("bench_chat_someoverlong").items() if key not in ("failed", "date")}
    run = read(tmp_path, old)
    assert (run.summary["total"]["failed"], run.meta.started) == (6, "")


def test_runs_with_and_without_samples_are_compared(tmp_path: Path) -> None:
    detailed = results.load(FILES["bench_openai_c16"])
    told = read(tmp_path, plain("bench_openai_c16"), "bench_openai_c16.json")
    for base, new in ((detailed, detailed), (told, told), (detailed, told)):
        found = comparison.compare([base], [new])
        assert (found.refused, found.word) in ((False, "no clear difference"), (False, "incomparable"))
        text = compare.text(found)
        assert "TTFT p50" in text
        assert ("has no samples, only figures" in text) == (new is told)
    figures = {row.figure.title: row for row in comparison.compare([told], [told]).differences}
    assert figures["ITL mean"].base == CAPTURES["bench_openai_c16"]["mean_itl_ms"] / 1e3


# All readers, and what is no result


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("detailed", [True, False])
def test_no_reader_shows_what_is_not_there(name: str, detailed: bool, tmp_path: Path) -> None:  # noqa: FBT001
    run = read(tmp_path, CAPTURES[name] if detailed else plain(name))
    texts = [report.text(run, full=True), markdown.text(run)]
    for text in texts:
        assert not any(word in text for word in ("None", "NaN", "nan", " inf"))
        assert "not known: nothing tells of the generator" in text
        assert "seed" not in text
    assert all(width_of(line) <= COLUMNS for line in texts[0].splitlines())
    assert "not known: nothing tells of the generator" in page.of_run(run)
    assert "measured the server" not in page.of_run(run).partition("const ")[0]


def test_the_commands_take_a_result_wherever_they_take_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(FILES["bench_openai_c16"])
    for command in (["report", file], ["report", "--scenario", "bench", file], ["compare", file, file]):
        assert cli.main(command) == 0
    assert cli.main(["report", "--html", str(tmp_path / "page.html"), file]) == 0
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text(json.dumps(plain("bench_openai_c16")))
    capsys.readouterr()
    assert cli.main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("bench, model tiny\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ttfts": [1.0]}, "lists of different lengths"),
        ({"duration": 0}, "duration"),
        ({"duration": "1 s"}, r"Expected `float`, got `str` - at `\$.duration`"),
        ({"itls": [[-0.1]] * 10}, "is no time"),
        ({"start_times": [1e300, *[0.0] * 9]}, "is no time"),
        ({"output_lens": [-1] * 10}, "number of tokens"),
        ({"completed": -1}, "completed is -1"),
        ({"p99_ttft_ms": "12"}, "Expected `float`"),
    ],
)
def test_a_damaged_result_is_an_error_of_the_user(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = plain("bench_openai_c1") if "p99_ttft_ms" in change else CAPTURES["bench_openai_c1"]
    with pytest.raises(InputError, match=rf"result.json: damaged \(.*{reason}"):
        read(tmp_path, source | change)


def test_other_json_is_named_as_what_it_is_not(tmp_path: Path) -> None:
    for content in ({"avg_latency": 1.0}, [], [CAPTURES["bench_openai_c1"]]):
        with pytest.raises(InputError, match=r"no run file of vllm-locust .* and no result of vllm bench serve"):
            read(tmp_path, content)
    (tmp_path / "two.json").write_text(2 * (json.dumps(plain("bench_openai_c1")) + "\n"))
    with pytest.raises(InputError, match="not JSON"):  # --append-result
        results.load(tmp_path / "two.json")


CONTENTS = [CAPTURES["bench_openai_c1"], plain("bench_openai_c1")]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda values: st.lists(values, max_size=4),
    max_leaves=5,
)


@given(key=st.sampled_from(sorted(CAPTURES["bench_openai_c1"])), value=VALUES, content=st.sampled_from(CONTENTS))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_result_holds_it_is_read_or_refused(
    key: str, value: Any, content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(content | {key: value}))
    with suppress(InputError):
        run = results.load(tmp_path / "result.json")
        assert bench_run.was_read(run.meta)
        assert all(width_of(line) <= COLUMNS for line in report.text(run, full=True).splitlines())
