"""What went wrong or slowly, for people: rows of the web UI, and the last line of a run in which nothing worked."""

import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emitter import LENGTH, Answer, Emitter
from processes import (
    Process,
    assert_clean,
    cluster,
    free_port,
    get,
    headless,
    locust,
    process,
    saved,
    simulator,
    wait_for,
)

from vllm_locust.incidents import FAILURE_COLUMNS, SLOW_COLUMNS, failure_rows, slow_rows

# Rows of the web UI

HOSTILE = '<script>alert("x")</script>\x1b[31m\n\u202egnp.exe'
HARMLESS = '<script>alert("x")</script>\\x1b[31m \\u202egnp.exe'
"""The browser shows tags as they are written, since Locust's UI sets texts, not HTML."""


def test_a_row_of_failures_has_numbers_to_sort_by_and_harmless_words() -> None:
    known = {
        "scenario": "short",
        "endpoint": "chat",
        "outcome": "http_5xx",
        "status": 503,
        "count": 12345,
        "share": 0.0301,
        "first_s": 12.345678901,
        "last_s": 48.0,
        "message": HOSTILE,
    }
    lost = {**known, "outcome": "connect_failed", "status": 0, "share": None, "first_s": None, "last_s": None}
    rows = [dict(zip(FAILURE_COLUMNS, row, strict=True)) for row in failure_rows([known, {**lost, "message": ""}])]
    assert rows[0] == {
        "scenario": "short",
        "endpoint": "chat",
        "kind": "http_5xx",
        "status": 503,
        "count": 12345,
        "share": "3.0 %",
        "first": 12.3,
        "last": 48.0,
        "message": HARMLESS,
    }
    absent = {key: rows[1][key] for key in ("status", "share", "first", "last", "message")}
    assert absent == {"status": None, "share": "–", "first": None, "last": None, "message": ""}


def test_a_row_of_the_slowest_has_the_whole_id_and_worker() -> None:
    slow = {
        "scenario": "short",
        "endpoint": "chat",
        "metric": "itl_max",
        "value_s": 0.123456789,
        "at_s": 61.25,
        "worker": "worker 1 (host)",
        "request_id": "5f0c1234-" + "C" * 60 + "-7",
        "input_tokens": None,
        "output_tokens": 64,
        "in_flight": 20,
        "outcome": "truncated",
    }
    first = {**slow, "metric": "ttft", "value_s": 0.05}
    rows = [dict(zip(SLOW_COLUMNS, row, strict=True)) for row in slow_rows([slow, first])]
    assert [row["what"] for row in rows] == ["first token", "gap"]
    assert rows[1] == {
        "scenario": "short",
        "what": "gap",
        "ms": 123.46,
        "at": 61.2,
        "input": None,
        "output": 64,
        "flight": 20,
        "worker": "worker 1 (host)",
        "id": "5f0c1234-" + "C" * 60 + "-7",
        "outcome": "truncated",
    }


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium to look at the web UI with")
def test_a_hostile_message_is_text_in_a_browser(tmp_path: Path, emitter: Emitter) -> None:
    words = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> \x1b[31m"
    hostile = answered("500 Internal Server Error", json.dumps({"error": {"message": words}}))
    server, port = emitter.serve({"/v1/models": MODELS, "*": hostile}), str(free_port())
    web = ("--web-host", "127.0.0.1", "--web-port", port, "--prometheus-port", "0", "--results", str(tmp_path / "r"))
    command = locust("--autostart", "-u", "2", "-r", "2", "--host", server.url, *web)
    with process(command, tmp_path / "locust.log", cwd=tmp_path):
        wait_for(lambda: "http_5xx" in get(f"http://127.0.0.1:{port}/stats/requests"), "failures")
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        page = [f"--user-data-dir={tmp_path / 'chromium'}", "--virtual-time-budget=5000", "--dump-dom"]
        url = f"http://127.0.0.1:{port}/?tab=llm-failures"
        shown = subprocess.run([*browser, *page, url], capture_output=True, text=True, check=True, timeout=90).stdout
    assert html.escape(words.replace("\x1b", "\\x1b"), quote=False) in shown
    assert "<title>owned" not in shown


# The last line


def answered(status: str, body: str) -> Answer:
    return Answer([(0, body.encode())], status=status, content_type="application/json", framing=LENGTH)


MODELS = answered("200 OK", '{"data":[{"id":"m"}]}')
GONE = answered("404 Not Found", '{"error":{"message":"The model `m` is gone.\\u001b[31m\\nAsk nobody","code":404}}')
LOAD = ("-u", "4", "-r", "4", "-t", "2s")


@contextmanager
def started(how: str, folder: Path, host: str, *more: str) -> Iterator[Process]:
    """Run headless in one process, with forked workers, or as the master of another process."""
    arguments = headless(folder, host, *LOAD, *more)
    if how == "master":
        with cluster(folder, arguments, 1) as running:
            yield running.master
    else:
        port = str(free_port())
        forks = ["--processes", "2", "--master-bind-port", port, "--master-port", port] if how == "forked" else []
        with process(locust(*arguments, *forks), folder / "locust.log", cwd=folder) as running:
            yield running


def nobody_is_left(running: Process) -> bool:
    """Tell whether a process that has ended left no other one of its session behind."""
    try:
        os.killpg(running.popen.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("how", ["alone", "forked", "master"])
def test_a_run_in_which_all_failed_ends_with_the_servers_words(tmp_path: Path, emitter: Emitter, how: str) -> None:
    server = emitter.serve({"/v1/models": MODELS, "*": GONE})
    with started(how, tmp_path, server.url) as running:
        assert running.wait() == 3
        assert_clean(running)
        if how != "master":
            wait_for(lambda: nobody_is_left(running), "end of the workers", 5)
    failed = saved(tmp_path)["summary"]["total"]["failed"]
    *_, report, last = running.output.splitlines()
    words = r'http_4xx (HTTP status 404): "The model `m` is gone.\x1b[31m Ask nobody"'
    assert report.startswith("Saved ")
    assert last == f"vllm-locust: all {failed:,} requests failed, most often {words}"


def test_a_run_whose_server_went_after_the_probe_ends_with_why_none_was_reached(tmp_path: Path) -> None:
    with going_after_the_probe() as url, started("alone", tmp_path, url) as running:
        assert running.wait() == 3
        assert_clean(running)
    outcomes = saved(tmp_path)["summary"]["total"]["outcomes"]
    assert outcomes["connect_failed"] == sum(outcomes.values()) > 0
    last = running.output.splitlines()[-1]
    assert re.fullmatch(
        r'vllm-locust: all \d+ requests failed, most often connect_failed: "\[Errno \d+\] Connection refused"', last
    )


@contextmanager
def going_after_the_probe() -> Iterator[str]:
    """Serve what the probe asks for, and be gone before it has its last answer."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.command)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if asked.count("POST") == 3:  # for each endpoint whether it is there, and whether lengths are exact
                self.server.socket.close()
            body = b'{"data":[{"id":"m"}]}' if self.command == "GET" else b"min_tokens"
            self.send_response(200 if self.command == "GET" else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=lambda: [server.handle_request() for _ in range(4)])
        thread.start()
        yield url
        thread.join()


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_a_probe_that_fails_has_the_last_word_and_leaves_no_worker_behind(
    tmp_path: Path, emitter: Emitter, how: str
) -> None:
    """Workers that were left behind would join the next run on this port, with what they had loaded for this one."""
    server = emitter.serve(answered("500 Internal Server Error", '{"error":{"message":"CUDA out of memory"}}'))
    with started(how, tmp_path, server.url) as running:
        assert running.wait() == 1
        assert nobody_is_left(running)
    last = running.output.splitlines()[-1]
    assert last.startswith(f"vllm-locust: {server.url}/v1/models answers HTTP 500: 'CUDA out of memory'"), last


def test_forked_workers_go_when_the_run_is_refused_before_they_are_there(tmp_path: Path) -> None:
    with started("forked", tmp_path, "http://127.0.0.1:9", "--tags", "shrot") as running:
        assert running.wait() == 2
        assert nobody_is_left(running)
    assert "no part 'shrot'" in running.output.splitlines()[-1]


def test_a_run_with_a_success_does_not_end_with_a_failure(tmp_path: Path) -> None:
    half = ("--ttft", "20ms", "--itl", "2ms", "--stream-errors", "0.5")
    with simulator(tmp_path, *half) as url, started("alone", tmp_path, url) as running:
        assert running.wait() == 3
    assert running.output.splitlines()[-1].startswith("Saved ")
