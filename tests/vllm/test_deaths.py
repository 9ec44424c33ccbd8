"""vLLM dies while it streams under load; no stream that it left unfinished is a success.

Each test has a server of its own. Users ask for short answers, and now and then for one that is far longer than the
server lives.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import assert_clean, headless, locust, process, wait_for
from running import Ran, ended, load, prompts
from server import Server, Vllm, serve

USERS = 8
SHORT, LONG = 50, 3000


def run_until(server: Server, folder: Path, act: Callable[[], object], *options: str) -> tuple[Ran, dict[str, int]]:
    """Run against a server, and act amid long answers; returns what the server had counted just before, too."""
    arguments = headless(folder, server.url, "-u", str(USERS), "-r", str(USERS), "-t", "15s", *options)
    locustfile = load(folder, prompts(32, SHORT) + prompts(8, LONG), wait_s=0.2)
    counted: dict[str, int] = {}

    def amid() -> bool:
        counted.update(server.counted())
        return counted["length"] > USERS and counted["generated"] - SHORT * (counted["length"] + USERS) > 500

    with process(locust(*arguments, locustfile=locustfile), folder / "l.log", cwd=folder) as running:
        wait_for(amid, "long answers")
        act()
        ran = ended(folder, running.wait(), running.output)
        assert_clean(running)
    print(ran.output[ran.output.index("Run  ") :])
    assert ran.code == 3
    return ran, counted


def assert_whole(total: dict[str, Any]) -> None:
    """What is called ok has all its tokens, and latencies of whole answers are of those that are ok."""
    ok = total["outcomes"]["ok"]
    assert total["output_tokens"]["count"] == total["tpot"]["count"] == total["e2el"]["count"] == ok
    assert total["output_tokens"]["min"] == total["output_tokens"]["max"] == SHORT
    assert total["tokens"]["output_received"] == SHORT * ok + total["tokens"]["output_failed"]
    assert total["tokens"]["output_failed"] > 100


def test_when_the_engine_is_killed(vllm: Vllm, tmp_path: Path) -> None:
    """The server is told to stay, so that it can be asked what it had answered."""
    with serve(vllm, tmp_path, VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as server:
        engine = server.engine
        ran, _ = run_until(server, tmp_path, lambda: os.kill(engine, signal.SIGKILL), "--continuous-usage")
        counted = server.counted()
    assert ran.outcomes.keys() == {"ok", "stream_error", "http_5xx"}
    assert ran.outcomes["ok"] == counted["length"]
    assert ran.outcomes["stream_error"] <= USERS
    failures = {failure["outcome"]: (failure["status"], failure["message"]) for failure in ran.summary["failures"]}
    assert {outcome: status for outcome, (status, _) in failures.items()} == {"stream_error": 200, "http_5xx": 500}
    assert all("EngineCore encountered an issue" in message for _, message in failures.values())
    assert_whole(ran.total)
    assert ran.total["tokens"]["output_received"] <= counted["generated"]


def test_when_the_server_is_killed(vllm: Vllm, tmp_path: Path) -> None:
    with serve(vllm, tmp_path) as server:
        ran, before = run_until(server, tmp_path, server.process.popen.kill)
    assert ran.outcomes.keys() == {"ok", "connection_lost", "connect_failed"}
    assert ran.outcomes["ok"] >= before["length"]
    assert ran.outcomes["connection_lost"] <= USERS
    assert_whole(ran.total)


def test_when_the_server_is_told_to_end(vllm: Vllm, tmp_path: Path) -> None:
    """It does one of three: ends the streams with an error, or as aborted, or is silent and keeps the connections."""
    with serve(vllm, tmp_path) as server:
        ran, before = run_until(server, tmp_path, server.process.popen.terminate, "--idle-timeout", "4s")
    left = ran.outcomes.keys() & {"idle_timeout", "stream_error", "connection_lost"}
    assert left
    assert ran.outcomes.keys() - left <= {"ok", "http_5xx", "connect_failed"}
    assert ran.outcomes["ok"] >= before["length"]
    assert sum(ran.outcomes[outcome] for outcome in left) <= USERS
    assert_whole(ran.total)
