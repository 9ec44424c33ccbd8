"""Runs in a single real Locust process against a real simulator."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from emitter import DONE, FINISH, LENGTH, ROLE, Answer, Emitter, Script, Server, delta, usage
from processes import (
    MIXED,
    assert_clean,
    free_port,
    get,
    headless,
    locust,
    process,
    saved,
    served,
    simulator,
    simulator_process,
    wait_for,
)

YES = delta('{"content":"Yes"}', finish='"length"')
FAST = ("--ttft", "20ms", "--itl", "2ms")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("simulator"), *FAST) as url:
        yield url


def run(folder: Path, arguments: list[str], locustfile: Path = MIXED, timeout_s: float = 60) -> tuple[int, str]:
    """Run Locust to its end; returns exit code and output."""
    with process(locust(*arguments, locustfile=locustfile), folder / "locust.log", cwd=folder) as running:
        code = running.wait(timeout_s)
        if code in (0, 3):
            assert_clean(running)
        return code, running.output


def write(folder: Path, text: str, name: str = "locustfile.py") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def test_totals_equal_the_servers_own_count(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST) as url:
        code, output = run(tmp_path, headless(tmp_path, url, "-u", "10", "-r", "10", "-t", "4s"))
        counted = served(url)
    total = saved(tmp_path)["summary"]["total"]
    assert code == 0
    assert counted["completed"] > 20
    assert total["outcomes"] == {"ok": counted["completed"]} | {k: 0 for k in total["outcomes"] if k != "ok"}
    assert total["tokens"]["output_received"] == total["tokens"]["events"] == counted["tokens"]
    (path,) = (tmp_path / "results").glob("*/run.json")
    assert output.splitlines()[-2:] == ["Verdict   ok", f"Saved     {path}"]


def test_three_lines_are_a_whole_locustfile(tmp_path: Path, server: str) -> None:
    locustfile = write(
        tmp_path,
        """
        from vllm_locust import ChatUser

        class Short(ChatUser):
            scenario = "short"
        """,
    )
    code, _ = run(tmp_path, headless(tmp_path, server, "-u", "2", "-t", "2s"), locustfile)
    run_file = saved(tmp_path)
    assert code == 0
    assert list(run_file["summary"]["scenarios"]) == ["short"]
    assert run_file["summary"]["scenarios"]["short"]["output_tokens"]["max"] == 64


def test_case_52_streams_that_the_end_cuts_are_neither_success_nor_failure(tmp_path: Path) -> None:
    """Sources: locustio/locust#984, #1393."""
    with simulator(tmp_path, "--itl", "100ms") as url:
        arguments = headless(tmp_path, url, "-u", "5", "-r", "5", "-t", "3s", "--stop-timeout", "0")
        code, output = run(tmp_path, arguments)
    total = saved(tmp_path)["summary"]["total"]
    assert total["outcomes"]["cancelled"] == 5
    assert total["failed"] == 0
    assert total["e2el"]["count"] == total["tpot"]["count"] == 0
    assert total["tokens"]["output_received"] > 50
    assert "cancelled" in output
    assert code == 4  # nothing came to an end, so nothing can be judged


def test_case_52_streams_that_run_out_after_the_end_count_but_not_in_its_rates(tmp_path: Path) -> None:
    """Source: vllm-project/guidellm#77."""
    with simulator(tmp_path, "--itl", "30ms") as url:
        run(tmp_path, headless(tmp_path, url, "-u", "5", "-r", "5", "-t", "3s", "--tags", "short"))
        counted = served(url)
    run_file = saved(tmp_path)
    total = run_file["summary"]["total"]
    assert total["outcomes"]["ok"] == counted["completed"]
    assert total["outcomes"]["cancelled"] == 0
    assert total["tokens"]["output_received"] == counted["tokens"]
    assert total["rates"]["output_tokens_per_s"] * run_file["summary"]["duration_s"] < counted["tokens"] - 10


def test_ctrl_c_ends_a_run_in_order(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST) as url:
        command = locust(*headless(tmp_path, url, "-u", "5", "-r", "5"))
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            wait_for(lambda: served(url)["completed"] > 10, "requests")
            running.interrupt()
            assert running.wait() == 0  # without --run-time this is how a run ends
            assert_clean(running)
        counted = served(url)
    assert saved(tmp_path)["summary"]["total"]["outcomes"]["ok"] == counted["completed"]


def test_a_run_that_is_interrupted_before_its_time_says_so(tmp_path: Path, server: str) -> None:
    command = locust(*headless(tmp_path, server, "-u", "5", "-r", "5", "-t", "60s"))
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: "All users spawned" in running.output, "users")
        wait_for(lambda: "streams in flight" in running.output, "progress")
        running.popen.send_signal(signal.SIGINT)
        assert running.wait() == 1
        assert "the run ended early" in running.output


def test_a_second_ctrl_c_cuts_what_still_streams(tmp_path: Path) -> None:
    with (
        simulator(tmp_path, "--itl", "500ms") as url,
        process(locust(*headless(tmp_path, url, "-u", "3", "-r", "3")), tmp_path / "l.log", cwd=tmp_path) as running,
    ):
        wait_for(lambda: served(url)["tokens"] > 3, "tokens")
        running.interrupt()
        time.sleep(0.5)
        assert running.popen.poll() is None
        running.interrupt()
        assert running.wait(20) == 4  # nothing came to an end
        assert_clean(running)
    assert saved(tmp_path)["summary"]["total"]["outcomes"]["cancelled"] == 3


def test_reset_stats_counts_from_the_end_of_the_ramp_up_and_is_no_early_end(tmp_path: Path, server: str) -> None:
    code, output = run(tmp_path, headless(tmp_path, server, "-u", "3", "-r", "1", "-t", "6s", "--reset-stats"))
    assert (code, "reset, 2 s after the start" in output) == (0, True), output
    assert 3 < saved(tmp_path)["summary"]["duration_s"] < 5


def test_locusts_json_has_stdout_to_itself(tmp_path: Path, server: str) -> None:
    command = locust(*headless(tmp_path, server, "-t", "2s", "--json"))
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)
    assert "Verdict   ok" in done.stderr


def test_a_server_that_is_gone_is_not_asked_in_a_hot_loop(tmp_path: Path) -> None:
    with simulator_process(tmp_path, *FAST) as (url, server):
        command = locust(*headless(tmp_path, url, "-u", "2", "-r", "2", "-t", "6s"))
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            wait_for(lambda: served(url)["completed"] > 2, "requests")
            server.popen.kill()
            assert running.wait() == 3
    outcomes = saved(tmp_path)["summary"]["total"]["outcomes"]
    assert 0 < outcomes["connect_failed"] <= 2 * 6


def emitted(emitter: Emitter, answer: Answer) -> Server:
    """Serve one answer to everything but what the probe needs to know."""
    models = Answer([(0, b'{"data":[{"id":"x"}]}')], content_type="application/json", framing=LENGTH)
    return emitter.serve({"/v1/models": models, "/v1/chat/completions": answer})


CHAT = """
from vllm_locust import ChatUser

class Short(ChatUser):
    scenario = "short"
"""


def test_case_29_a_run_in_which_every_request_fails_is_no_success(tmp_path: Path, emitter: Emitter) -> None:
    """Sources: ggml-org/llama.cpp#16486, vllm-project/vllm#16420, vllm-project/guidellm#444, ai-dynamo/aiperf#688."""
    error = b'{"error":{"message":"model x not found","code":404}}'
    server = emitted(emitter, Answer([(2, error)], "404 Not Found", "application/json", framing=LENGTH))
    code, output = run(tmp_path, headless(tmp_path, server.url, "-u", "2", "-t", "2s"), write(tmp_path, CHAT))
    summary = saved(tmp_path)["summary"]
    total = summary["total"]
    assert code == 3, output
    assert total["failed"] == sum(total["outcomes"].values()) == total["outcomes"]["http_4xx"] > 0
    assert [total[name]["count"] for name in ("ttft", "itl", "tpot", "e2el")] == [0, 0, 0, 0]
    assert [total[name]["p50"] for name in ("ttft", "itl", "tpot", "e2el")] == [None] * 4
    (failure,) = summary["failures"]
    assert (failure["outcome"], failure["status"], failure["count"]) == ("http_4xx", 404, total["failed"])
    assert failure["message"] == "model x not found"
    assert 'requests failed, most often http_4xx (HTTP status 404): "model x not found"' in " ".join(output.split())


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        pytest.param([(10, ROLE), (20, YES), (20, usage(7, 1)), (20, DONE)], "ok", id="one-token"),
        pytest.param([(10, ROLE), (20, FINISH), (20, usage(7, 0)), (20, DONE)], "empty", id="no-token"),
    ],
)
def test_case_37_a_run_without_a_gap_ends_and_shows_none(
    tmp_path: Path, emitter: Emitter, pieces: Script, outcome: str
) -> None:
    """Sources: vllm-project/vllm#6064, #5895; triton-inference-server/tensorrtllm_backend#619."""
    server = emitted(emitter, Answer(pieces))
    code, output = run(tmp_path, headless(tmp_path, server.url, "-u", "2", "-t", "2s"), write(tmp_path, CHAT))
    total = saved(tmp_path)["summary"]["total"]
    assert code == {"ok": 0, "empty": 3}[outcome], output
    number = total["outcomes"][outcome]
    assert number == sum(total["outcomes"].values()) > 2
    with_token = number if outcome == "ok" else 0
    assert (total["ttft"]["count"], total["e2el"]["count"]) == (with_token, with_token)
    for name in ("itl", "tpot"):
        assert total[name].pop("count") == 0
        assert set(total[name].values()) == {None}
    (row,) = re.findall(r"^short +\d.*$", output, re.MULTILINE)
    assert "\N{EN DASH}" in row


def test_a_class_whose_parts_are_left_out_takes_no_users(tmp_path: Path, server: str) -> None:
    locustfile = write(
        tmp_path,
        """
        from vllm_locust import ChatUser

        class Brief(ChatUser):
            scenario = "short"

        class Reader(ChatUser):
            scenario = "long"
        """,
    )
    arguments = headless(tmp_path, server, "-u", "4", "-r", "4", "-t", "3s", "--parts", "short")
    code, output = run(tmp_path, arguments, locustfile)
    assert (code, "no part is left for user class Reader; it was left out" in output) == (0, True), output
    assert saved(tmp_path)["summary"]["total"]["rates"]["in_flight_peak"] == 4


def test_broken_streams_are_failures_in_locust_and_here_and_the_exit_code(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST, "--stream-errors", "0.5", "--early-ends", "0.25") as url:
        arguments = headless(tmp_path, url, "-u", "5", "-r", "5", "-t", "3s", "--tags", "short")
        code, output = run(tmp_path, arguments)
        counted = served(url)
    total = saved(tmp_path)["summary"]["total"]
    assert code == 3
    assert total["outcomes"]["stream_error"] + total["outcomes"]["truncated"] == counted["broken"] > 10
    assert total["outcomes"]["ok"] == counted["completed"]
    assert total["ttft"]["count"] == counted["broken"] + counted["completed"]
    assert total["e2el"]["count"] == counted["completed"]
    (occurrences,) = re.findall(
        r"^(\d+)\s+POST /v1/chat/completions \[short\]: StreamError\('truncated'\)", output, re.MULTILINE
    )
    assert 0 < int(occurrences) <= total["outcomes"]["truncated"]


def test_custom_events_fire_once_per_request_with_what_the_recording_holds(tmp_path: Path, server: str) -> None:
    locustfile = write(
        tmp_path,
        """
        import json
        from locust import events, task
        from vllm_locust import ChatUser

        seen = {"ttft": [], "itl": [], "request": []}

        @events.init.add_listener
        def listen(environment, **_):
            environment.events.ttft.add_listener(
                lambda scenario, endpoint, ttft, request_id, context, **_: seen["ttft"].append(ttft))
            environment.events.itl.add_listener(
                lambda scenario, endpoint, itl, request_id, context, **_: seen["itl"].append(itl.tolist()))
            environment.events.request.add_listener(lambda response_time, **_: seen["request"].append(response_time))

        @events.quit.add_listener
        def save(**_):
            with open("seen.json", "w") as file:
                json.dump(seen, file)

        class Mine(ChatUser):
            @task
            def ask(self):
                body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 700, "ignore_eos": True}
                timeline = self.stream(body, scenario="mine")
                assert timeline.outcome == "ok" and timeline.output_tokens == 700
        """,
    )
    code, output = run(tmp_path, headless(tmp_path, server, "-u", "2", "-r", "2", "-t", "4s"), locustfile)
    assert code == 0, output
    seen = json.loads((tmp_path / "seen.json").read_text())
    mine = saved(tmp_path)["summary"]["scenarios"]["mine"]
    assert len(seen["ttft"]) == len(seen["itl"]) == len(seen["request"]) == mine["outcomes"]["ok"] > 1
    assert max(seen["ttft"]) == pytest.approx(mine["ttft"]["max"])
    assert sum(map(len, seen["itl"])) == mine["itl"]["count"] == 699 * mine["outcomes"]["ok"]
    assert sum(map(sum, seen["itl"])) / mine["itl"]["count"] == pytest.approx(mine["itl"]["mean"])
    assert min(seen["request"]) / 1e3 > mine["e2el"]["min"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "other"], 2, "--model 'other' is not served"),
        (["--tags", "shrot"], 2, "no part 'shrot'; there are short, long, longform"),
        (["--exclude-tags", "short", "long", "longform"], 2, "leave no part"),
        (["--scenario", "nowhere.toml"], 2, "scenario 'nowhere.toml' not found"),
        (["--window", "soon"], 2, "--window"),
        (["--seed", "x"], 2, "--seed is 'x'"),
        (["--host", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["--host", "nonsense"], 2, "--host 'nonsense'"),
        (["--host", "http://me:secret@127.0.0.1"], 2, "--host has a user name or password in it"),
        (["--results", "/proc/results"], 2, "--results"),
        (["--idle-timeout", "0s"], 2, "--idle-timeout is 0s, expected a duration above 0, or none"),
        (["--connect-timeout", "none"], 2, "--connect-timeout is none, expected a duration like 10s"),
        (["--total-timeout", "soon"], 2, "--total-timeout: 'soon' is not a duration"),
        (["--prometheus-port", "70000"], 2, "--prometheus-port is '70000'"),
        (["--server-config", "nowhere"], 2, "--server-config nowhere: cannot be read"),
        (["--server-config", sys.executable], 2, "no UTF-8 text"),
    ],
)
def test_bad_input_is_refused_in_words_before_the_first_request(
    tmp_path: Path, server: str, arguments: list[str], code: int, said: str
) -> None:
    before = served(server)
    found, output = run(tmp_path, [*headless(tmp_path, server, "-t", "5s"), *arguments])
    assert (found, said in output, "Traceback" in output) == (code, True, False), output
    assert "secret" not in output
    assert served(server) == before


def test_case_31_a_stream_that_hangs_is_seen_while_it_does_and_ends_at_the_limit_that_was_set(tmp_path: Path) -> None:
    """Sources: fw-ai/benchmark#91, aaif-goose/goose#8110, AtomicBot-ai/atomic-agent#323."""
    port = free_port()
    waits = ["--first-token-timeout", "30s", "--idle-timeout", "4s"]
    options = [*waits, "--prometheus-port", str(port), "--stop-timeout", "20"]
    with simulator(tmp_path, "--ttft", "20ms", "--itl", "60s") as url:
        command = locust(*headless(tmp_path, url, "-u", "2", "-r", "2", "-t", "2s"), *options)
        with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
            wait_for(lambda: silence_s(port) >= 2, "silence in the metrics")
            code = running.wait()
    total = saved(tmp_path)["summary"]["total"]
    assert (code, total["outcomes"]["idle_timeout"]) == (3, total["requests"])
    assert (total["ttft"]["count"], total["itl_max"]["min"] >= 4) == (total["requests"], True)
    assert "no byte for 4 s after 1 token event" in running.output


def silence_s(port: int) -> float:
    found = re.search(
        r"^vllm_locust_longest_silence_seconds (.*)$", get(f"http://127.0.0.1:{port}/metrics"), re.MULTILINE
    )
    return float(found[1]) if found else 0.0


def test_case_24_events_tell_how_many_tokens_they_carry_where_that_is_asked_for(tmp_path: Path) -> None:
    """Sources: vllm-project/vllm#42661, #46652, #55276; ai-dynamo/aiperf#1279."""
    with simulator(tmp_path, *FAST) as url:
        arguments = [*headless(tmp_path, url, "-u", "2", "-r", "2", "-t", "2s"), "--continuous-usage"]
        code, output = run(tmp_path, arguments)
    total, meta = saved(tmp_path)["summary"]["total"], saved(tmp_path)["meta"]
    assert (code, meta["counting"]) == (0, {"continuous_usage": True, "token_ids": False})
    assert total["itl_token"] == total["itl"]
    assert total["itl"]["count"] > 0
    assert "tokens per event" not in output


def test_case_24_a_server_that_does_not_tell_what_was_asked_is_reported(tmp_path: Path, server: str) -> None:
    """The simulator passes `return_token_ids` over."""
    code, output = run(tmp_path, [*headless(tmp_path, server, "-u", "1", "-t", "2s"), "--token-ids"])
    assert code == 0
    assert "told nothing: itl_token is missing" in " ".join(output.split())


def test_a_broken_prompt_file_is_refused_with_line_and_reason(tmp_path: Path, server: str) -> None:
    write(tmp_path, '{"prompt": "fine"}\n{"prompt": 5}\n', "prompts.jsonl")
    write(tmp_path, '[part.mine]\nprompts = "prompts.jsonl"\nmax_tokens = 5\n', "mine.toml")
    arguments = headless(tmp_path, server, "-t", "2s", "--scenario", "mine.toml")
    code, output = run(tmp_path, arguments)
    assert (code, "prompts.jsonl:2: `prompt` is 5" in output, "Traceback" in output) == (2, True, False), output
    code, output = run(tmp_path, [*arguments, "--skip-bad-prompts"])
    assert (code, "1 prompts used, 1 bad lines skipped" in output) == (0, True), output


def test_case_63_a_taken_metrics_port_is_a_clear_error_before_the_load(tmp_path: Path, server: str) -> None:
    """Source: locustio/locust#12, google/turbinia#649."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [*headless(tmp_path, server, "-t", "5s"), "--prometheus-port", port]
        code, output = run(tmp_path, arguments)
    assert (code, port in output, "--prometheus-port" in output, "Traceback" in output) == (2, True, True, False)


def test_a_server_without_completions_is_measured_on_chat_alone(tmp_path: Path) -> None:
    with simulator(tmp_path, *FAST, "--chat-only") as url:
        code, output = run(tmp_path, headless(tmp_path, url, "-u", "4", "-r", "4", "-t", "2s"))
    run_file = saved(tmp_path)
    assert code == 0
    assert run_file["meta"]["endpoints"] == {"MixedChat": "chat"}
    assert "no completions endpoint; user class MixedCompletions was left out" in output
    assert {cell["key"][1] for w in run_file["recording"]["windows"] for cell in w["cells"]} == {"chat"}


def test_the_key_is_sent_and_never_shown_or_saved(tmp_path: Path) -> None:
    secret = "sk-most-secret"
    with simulator(tmp_path, *FAST, "--api-key", secret) as url:
        arguments = headless(tmp_path, url, "-u", "2", "-t", "2s", "--loglevel", "DEBUG")
        code, output = run(tmp_path, arguments)
        assert (code, "--api-key" in output) == (1, True)
        code, output = run(tmp_path, [*arguments, "--api-key", secret, "--html-report"])
    assert code == 0
    (page,) = (tmp_path / "results").glob("*/report.html")
    assert [secret in text for text in (output, json.dumps(saved(tmp_path)), page.read_text())] == [False] * 3
    command = saved(tmp_path)["meta"]["command"]
    assert command.startswith("locust ")
    assert command.endswith(" --api-key '***' --html-report")
    assert command in page.read_text()


SECRETIVE = """
from locust import events

exec(open({mixed!r}).read())

@events.init_command_line_parser.add_listener
def add(parser):
    parser.add_argument("--pass", is_secret=True, default="")
"""


def test_a_note_and_how_the_server_was_started_are_kept_with_the_run_and_shown(tmp_path: Path) -> None:
    config, secret = tmp_path / "server.txt", "sk-most-secret"
    config.write_text(f"HF_TOKEN=hf_other vllm serve tiny --max-num-seqs 64 \\\n  --api-key {secret} --seed 7\n")
    with simulator(tmp_path, *FAST, "--api-key", secret) as url:
        given = ("--note", f"before <b>tuning</b>\x1b[31m {secret}", "--server-config", str(config), "--html-report")
        load = headless(tmp_path, url, "-u", "2", "-r", "2", "-t", "2s")
        code, output = run(tmp_path, [*load, *given, "--api-key", secret])
    assert code == 0, output
    meta = saved(tmp_path)["meta"]
    assert meta["note"] == "before <b>tuning</b>\x1b[31m ***"
    kept = ["HF_TOKEN=*** vllm serve tiny --max-num-seqs 64 \\", "  --api-key *** --seed 7"]
    assert meta["server_config"].splitlines() == kept
    assert "Note      before <b>tuning</b>\\x1b[31m ***\n" in output
    assert "max-num-seqs" not in output.replace(meta["command"], "")
    (page,) = (tmp_path / "results").glob("*/report.html")
    assert "--max-num-seqs 64" in page.read_text()
    assert "<b>tuning" not in page.read_text()
    full = [sys.executable, "-m", "vllm_locust", "report", "--full", str(page.parent)]
    shown = subprocess.check_output(full, text=True)
    assert f"\nServer    {kept[0]}\n          {kept[1].strip()}\n" in shown
    for told in (output, shown, page.read_text()):
        assert secret not in told
        assert "hf_other" not in told


def test_what_says_how_the_server_was_started_is_no_log(tmp_path: Path, server: str) -> None:
    config = tmp_path / "server.txt"
    config.write_text("x" * 65_537)
    code, output = run(tmp_path, headless(tmp_path, server, "-t", "2s", "--server-config", str(config)))
    assert (code, "65,537 bytes, at most 65,536 are kept" in output) == (2, True), output


def test_what_options_of_the_user_keep_secret_is_not_saved_with_the_command(tmp_path: Path, server: str) -> None:
    locustfile, secret = tmp_path / "secretive.py", "open sesame, please"
    locustfile.write_text(SECRETIVE.format(mixed=str(MIXED)))
    arguments = headless(tmp_path, server, "-u", "2", "-r", "2", "-t", "2s", "--pass", secret)
    assert run(tmp_path, arguments, locustfile=locustfile)[0] == 0
    assert saved(tmp_path)["meta"]["command"].endswith(" --pass '***'")
    assert secret not in json.dumps(saved(tmp_path))


def test_connections_are_kept_unless_new_ones_are_wanted(tmp_path: Path, server: str) -> None:
    for connection, folder in (("keep-alive", tmp_path / "kept"), ("new", tmp_path / "new")):
        folder.mkdir()
        run(folder, headless(folder, server, "-u", "3", "-r", "3", "-t", "2s", "--connection", connection))
    kept, new = (saved(tmp_path / name)["summary"]["total"] for name in ("kept", "new"))
    assert kept["connect"]["count"] == 3
    assert new["connect"]["count"] == new["requests"] > 3


def test_a_long_ramp_up_is_remarked_on(tmp_path: Path, server: str) -> None:
    _, output = run(tmp_path, headless(tmp_path, server, "-u", "4", "-t", "4s"))
    assert "the ramp-up takes 3 s of 4 s" in output
    assert "-r" in output


def test_the_saved_run_prints_the_same_report_again(tmp_path: Path, server: str) -> None:
    load = ("-u", "2", "-r", "2", "-t", "2s", "--name", "baseline", "--html-report")
    _, output = run(tmp_path, headless(tmp_path, server, *load))
    (path,) = (tmp_path / "results").glob("baseline_*/run.json")
    page, again = path.with_name("report.html"), tmp_path / "again.html"
    assert f"Page      {page}\n" in output
    command = [sys.executable, "-m", "vllm_locust", "report", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.rstrip() in output
    subprocess.run([*command, "--html", str(again)], check=True)
    assert again.read_text() == page.read_text()
    nowhere = subprocess.run([*command, "--html", str(tmp_path / "no" / "a.html")], capture_output=True, check=False)
    assert (nowhere.returncode, b"Traceback" in nowhere.stderr) == (2, False)
