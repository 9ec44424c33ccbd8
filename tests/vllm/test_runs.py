"""Whole runs against vLLM: every number that it counts, too, is the same on both sides."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import MIXED, assert_clean, cluster, headless, locust, process, wait_for
from running import ended, load, prompts, run
from server import KEY, Server


def test_a_distributed_run_counts_what_the_server_counts(plain: Server, tmp_path: Path) -> None:
    before = plain.counted()
    arguments = headless(tmp_path, plain.url, "-u", "8", "-r", "8", "-t", "10s")
    with cluster(tmp_path, arguments, locustfile=MIXED) as running:
        code = running.master.wait()
        assert_clean(running.master, *running.workers)
        ran = ended(tmp_path, code, running.master.output)
    assert ran.code == 0
    assert ran.outcomes.keys() == {"ok"}
    assert ran.outcomes["ok"] == ran.total["requests"] > 20
    assert ran.total["finish"] == {"length": ran.outcomes["ok"]}
    assert ran.total["counts"]["estimated"] == ran.total["counts"]["short_outputs"] == 0
    tokens = ran.total["tokens"]
    assert tokens["events"] <= tokens["output_received"]
    assert tokens["surplus"] == 0
    plain.assert_counted(
        before, length=ran.outcomes["ok"], generated=tokens["output_received"], prompted=tokens["input"]
    )


def test_what_the_end_of_a_run_cuts_the_server_stops(plain: Server, tmp_path: Path) -> None:
    before = plain.counted()
    locustfile = load(tmp_path, prompts(8, tokens=2000))
    ran = run(tmp_path, plain.url, locustfile, 4, 4, "--stop-timeout", "0", "--continuous-usage")
    wait_for(lambda: not plain.counted()["running"], "end of what was cut")
    counted = plain.since(before)
    assert ran.outcomes.keys() <= {"ok", "cancelled"}
    assert ran.outcomes["cancelled"] == 4
    # It counts no request that its client has left, and stops soon.
    assert counted.get("length", 0) == ran.outcomes.get("ok", 0)
    assert 100 < ran.total["tokens"]["output_received"] <= counted["generated"] < 2000 * ran.total["requests"]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_check_before_a_run_finds_nothing_to_say(plain: Server, endpoint: str, tmp_path: Path) -> None:
    load(tmp_path, prompts(1, tokens=8), endpoint)
    command = [sys.executable, "-m", "vllm_locust", "check", "--host", plain.url, "--scenario", "load.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny" in done.stdout


@pytest.mark.parametrize("flag", ["", "--continuous-usage", "--token-ids"])
def test_several_tokens_per_event_are_told_in_the_report(bundling: Server, flag: str, tmp_path: Path) -> None:
    before = bundling.counted()
    ran = run(tmp_path, bundling.url, load(tmp_path, prompts(8, tokens=201)), 4, 5, *filter(None, [flag]))
    tokens = ran.total["tokens"]
    assert (ran.code, ran.outcomes.keys()) == (0, {"ok"})
    # The first token comes alone; more than four come where the server is late.
    assert 201 / 51 <= tokens["tokens_per_event"] < 6
    assert f"{tokens['tokens_per_event']:.2f} tokens per event: gaps are those of events" in ran.output
    per_token = ran.total["itl_token"]
    assert per_token["count"] == (ran.total["itl"]["count"] if flag else 0)
    if flag:
        assert per_token["mean"] == pytest.approx(ran.total["itl"]["mean"] / 4, rel=0.1)
    generated, asked = tokens["output_received"], tokens["input"]
    bundling.assert_counted(before, length=ran.outcomes["ok"], generated=generated, prompted=asked)


def test_a_full_queue_is_a_failure(limited: Server, tmp_path: Path) -> None:
    """One request runs, one waits for seconds and gets comments meanwhile, all others are refused.

    vLLM looks twice: before it answers, hence a 503, and when it has begun a stream, hence an error in it, where
    several requests came at once.
    """
    before = limited.counted()
    ran = run(tmp_path, limited.url, load(tmp_path, prompts(40, tokens=1000), wait_s=0.5), 8, 8, "--api-key", KEY)
    ok, at_once, in_stream = (ran.outcomes.get(name, 0) for name in ("ok", "http_5xx", "stream_error"))
    assert (ran.code, sum(ran.outcomes.values())) == (3, ok + at_once + in_stream)
    assert ok > 0
    assert at_once > 8
    statuses = {failure["outcome"]: failure["status"] for failure in ran.summary["failures"]}
    assert statuses == {"http_5xx": 503} | ({"stream_error": 200} if in_stream else {})
    assert all("currently busy" in failure["message"] for failure in ran.summary["failures"])
    assert ran.total["counts"]["comments"] > 0
    assert ran.total["ttft"]["count"] == ran.total["cached_tokens"]["count"] == ok
    generated, asked = ran.total["tokens"]["output_received"], ran.total["tokens"]["input"]
    assert generated == 1000 * ok
    limited.assert_counted(before, length=ok, generated=generated, prompted=asked, refused=at_once + in_stream)
    assert KEY not in ran.output


@pytest.mark.parametrize("options", [(), ("--api-key", "another")], ids=["missing", "wrong"])
def test_a_run_without_the_key_sends_nothing_and_says_so(
    limited: Server, options: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = headless(tmp_path, limited.url, "-u", "1", "-t", "5s", *options)
    with process(locust(*arguments, locustfile=load(tmp_path, prompts(1, tokens=8))), tmp_path / "l.log") as running:
        assert running.wait() == 1
    assert "refuses access (HTTP 401); give its key by --api-key" in running.output
