"""`vllm-locust check` as its users meet it: a process, its output, its exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from emitter import DONE, LENGTH, ROLE, Answer, Emitter, token
from processes import simulator

FAST = ("--ttft", "1ms", "--ttft-sigma", "0", "--itl", "0ms", "--prefill", "0ms")
KEY = "sk-secret-4711"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulator(tmp_path_factory.mktemp("simulator"), *FAST) as url:
        yield url


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    prompts = [{"prompt": "How?"}, {"prompt": "Why is the sky blue?"}]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    path = tmp_path / "mine.toml"
    path.write_text('cache = "natural"\n[part.ask]\nprompts = "p.jsonl"\noutput_tokens = 5\n')
    return path


def check(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run the command; returns its exit code and what it wrote to stdout and stderr, neither of them a traceback."""
    clean = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | environment
    command = [sys.executable, "-m", "vllm_locust", "check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, timeout=60, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    assert KEY not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_scenario_that_would_run_is_described_with_an_answer_per_part_and_endpoint(
    server: str, scenario: Path
) -> None:
    code, out, err = check("--host", server, "--scenario", scenario)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "scenario mine, part ask: 2 prompts"
    assert lines[1].startswith(f"server {server}: model simulated, context of 32,768 tokens, endpoints ")
    chat, text = lines[-2:]
    for line, endpoint, tokens in ((chat, "chat", 9), (text, "completions", 5)):
        assert line.split()[:3] == [endpoint, "ask:", "ok,"]
        assert f"{tokens} tokens in, 5 out (from usage), finish reason length" in line


def test_the_packaged_scenario_needs_no_file(server: str) -> None:
    code, out, err = check("--host", f"{server}/v1")
    assert (code, err) == (0, "")
    for part in ("short", "long", "longform"):
        assert f"part {part}: " in out
        assert f"{part}: ok, TTFT " in out


def test_without_requests_only_the_server_is_looked_at(server: str, scenario: Path) -> None:
    code, out, _ = check("--host", server, "--scenario", scenario, "--no-request")
    assert code == 0
    assert "TTFT" not in out


def test_a_model_that_is_not_served_is_bad_input(server: str, scenario: Path) -> None:
    code, _, err = check("--host", server, "--scenario", scenario, "--model", "other")
    assert code == 2
    assert err == f"vllm-locust: --model 'other' is not served by {server}; it serves simulated\n"


def test_a_server_that_is_not_there_is_no_run(scenario: Path) -> None:
    code, _, err = check("--host", "http://127.0.0.1:1", "--scenario", scenario)
    assert code == 1
    assert err.startswith("vllm-locust: no answer from http://127.0.0.1:1 ")
    assert err.count("\n") == 1


def test_what_is_no_address_is_bad_input(scenario: Path) -> None:
    code, _, err = check("--host", "localhost:8000", "--scenario", scenario)
    assert code == 2
    assert "write it like http://my-server:8000" in err


def test_the_host_is_asked_for() -> None:
    code, _, err = check()
    assert code == 2
    assert "--host" in err


def test_bad_prompts_are_named_by_file_and_line_or_skipped_and_counted(server: str, scenario: Path) -> None:
    prompts = scenario.parent / "p.jsonl"
    prompts.write_text(prompts.read_text() + '{"text": "no prompt"}\n')
    code, out, err = check("--host", server, "--scenario", scenario)
    assert (code, out) == (2, "")
    assert "p.jsonl" in err
    assert ":3:" in err
    code, out, _ = check("--host", server, "--scenario", scenario, "--skip-bad-prompts")
    assert code == 0
    assert "part ask: 2 prompts, 1 bad lines skipped" in out


def test_a_scenario_that_is_not_there_is_bad_input(server: str, tmp_path: Path) -> None:
    code, _, err = check("--host", server, "--scenario", tmp_path / "missing.toml")
    assert code == 2
    assert "missing.toml" in err


def test_the_key_is_needed_taken_from_the_environment_too_and_never_shown(tmp_path: Path, scenario: Path) -> None:
    with simulator(tmp_path, *FAST, "--api-key", KEY) as url:
        arguments = ("--host", url, "--scenario", scenario)
        code, _, err = check(*arguments)
        assert code == 1
        assert "--api-key or OPENAI_API_KEY" in err
        assert check(*arguments, "--api-key", f"{KEY}-wrong")[0] == 1
        assert check(*arguments, "--api-key", KEY)[0] == 0
        assert check(*arguments, OPENAI_API_KEY=KEY)[0] == 0


def test_a_chat_server_without_completions_is_asked_by_chat_alone(tmp_path: Path, scenario: Path) -> None:
    with simulator(tmp_path, *FAST, "--chat-only") as url:
        code, out, _ = check("--host", url, "--scenario", scenario)
    assert code == 0
    assert "endpoints chat" in out
    assert "completions ask" not in out


def test_requests_that_fail_are_shown_and_are_no_run(tmp_path: Path, scenario: Path) -> None:
    with simulator(tmp_path, *FAST, "--stream-errors", "1") as url:
        code, out, err = check("--host", url, "--scenario", scenario)
    assert code == 1
    assert "ask: stream_error 200: code 500: EngineCore encountered an issue" in out
    assert err == "vllm-locust: 2 of 2 requests failed, see above\n"


def test_what_a_server_writes_cannot_harm_the_terminal(scenario: Path) -> None:
    def reply(body: bytes, status: str = "200 OK") -> Answer:
        return Answer([(0, body)], status, "application/json", framing=LENGTH)

    evil = reply(b'{"error":{"message":"\\u001b[2Jgone\\nmore model"}}', "400 Bad Request")
    models = reply(b'{"data":[{"id":"evil\\u001b[31m"}]}')
    with Emitter() as emitter:
        server = emitter.serve({"/v1/models": models, "/v1/completions": Answer([], "404 Not Found"), "*": evil})
        code, out, err = check("--host", server.url, "--scenario", scenario)
        refused = emitter.serve({"/v1/models": models, "*": evil})
        _, _, err_model = check("--host", refused.url, "--scenario", scenario, "--model", "other")
        broken = emitter.serve(reply(b'{"error":"\\u001b[2Jgone"}'))
        _, _, err_broken = check("--host", broken.url, "--scenario", scenario)
    assert code == 1
    assert "http_4xx 400: " in out
    assert "\x1b" not in out + err + err_model + err_broken


def test_a_server_without_lengths_and_counts_is_said_to_be_one(scenario: Path) -> None:
    models = Answer([(0, b'{"data":[{"id":"a"}]}')], content_type="application/json", framing=LENGTH)
    stream = Answer([(0, ROLE), (5, token("a")), (10, DONE)])
    with Emitter() as emitter:
        server = emitter.serve({"/v1/models": models, "/v1/completions": Answer([], "404 Not Found"), "*": stream})
        code, out, _ = check("--host", server.url, "--scenario", scenario)
    assert code == 0
    assert "it does not take min_tokens and ignore_eos" in out
    assert "? tokens in, 1 out (estimated), finish reason none" in out
