"""A real run against a hostile server: what it says harms neither terminal, UI, tables, metrics nor logs."""

import csv
import http.server
import itertools
import json
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from emitter import DONE, FINISH, token
from hostile import GZIP, HEAD, LAST, WHOLE, framed
from processes import assert_clean, cluster, free_port, get, saved, wait_for
from prometheus_client.parser import text_string_to_metric_families

from vllm_locust.timeline import Outcome

SAID = "hOsTiLe"
"""Stands in all that the server says of its own."""
EVIL = (
    f"{SAID}\x1b[2J\x1b]0;title\x07\x9b31m\x00\x7f\u202egnp.exe\u2066\u200b\r\n\u2028\u0085"
    f"</script><img src=x onerror=alert(1)>\t=cmd|'/C calc'!A0,\"{SAID}\"\\"
)
TEXT = json.dumps(EVIL)[1:-1]
WORD = f"{SAID}" + "x" * 2_000


def plain(status: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, ""))
    return head.encode("latin-1") + body


def stream(*events: str) -> bytes:
    return HEAD + b"".join(framed(f"data: {event}\n\n".encode()) for event in events) + LAST


ANSWERS = [
    HEAD + framed(WHOLE) + LAST,
    plain(f"500 {SAID}\x1b[31m", json.dumps({"error": {"message": EVIL + "x" * 1_000_000}}).encode()),
    plain(f"429 {SAID}", EVIL.encode("utf-8", "surrogatepass")),
    plain("404 Not Found", json.dumps({"detail": [{"msg": EVIL}]}).encode(), f"X-{SAID}: \x9b31m{SAID}"),
    plain("200 OK", f"<html>{EVIL}".encode(), f"Content-Type: {SAID}\x9b"),
    plain("200 OK", WHOLE, f"Content-Encoding: {SAID}\x9b31m\xff"),
    stream(f'{{"error":{{"message":"{TEXT}","type":"{TEXT}","code":"{TEXT}"}}}}'),
    stream(f'{{"choices":[{{"index":0,"delta":{{"content":"{TEXT}"}},"finish_reason":"{TEXT}"}}]}}', "[DONE]"),
    stream(f'{{"choices":[{{"index":0,"delta":{{"content":"{TEXT}"}},"finish_reason":"{WORD}"}}]}}', "[DONE]"),
    stream(f'{{"choices":[{{"index":"{TEXT}"}}]}}'),
    stream(f"{SAID}{'[' * 100_000}"),
    stream(f'{{"{TEXT}":1,"usage":{{"completion_tokens":{2**70}}}}}'),
    stream('{"choices":[{"index":0,"text":"a"}],"usage":{"completion_tokens":-5}}'),
    f"{SAID} HTTP/1.1 \x1b[31m\r\n\r\n".encode(),
    HEAD + b"8000000000000000\r\n" + SAID.encode(),
    HEAD + framed(f"event: {SAID}\x1b[31m\nid: {SAID}\nretry: {SAID}\n{SAID}: {SAID}\n".encode() + WHOLE) + LAST,
    GZIP + framed(zlib.compress(WHOLE, wbits=31) + SAID.encode()) + LAST,
    HEAD + framed(b": " + SAID.encode() + b"\xff\n\n" + token("a") + FINISH + DONE) + LAST,
    b"",
]
KINDS = ("http_5xx", "http_429", "http_4xx", "stream_error", "malformed", "not_streamed", "connection_lost")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the probe like a server, and every stream in the next of many ways."""

    protocol_version = "HTTP/1.1"
    answers: Iterator[bytes]
    given = 0

    def do_GET(self) -> None:
        self.wfile.write(plain("200 OK", json.dumps({"data": [{"id": f"m\x1b[31m\u202e{SAID}"}]}).encode()))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            self.wfile.write(plain("400 Bad Request", b'{"error":{"message":"field required: model"}}'))
            return
        self.close_connection = True
        type(self).given += 1
        self.wfile.write(next(self.answers))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def hostile_server() -> Iterator[str]:
    Handler.answers, Handler.given = itertools.cycle(ANSWERS), 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def assert_harmless(text: str) -> None:
    """No character that a terminal obeys or hides."""
    bad = [line for line in text.split("\n") if not line.replace("\t", "").isprintable()]
    assert not bad


def shown(url: str) -> str:
    return json.dumps(
        [json.loads(get(f"{url}/stats/requests"))[table] for table in ("errors", "stats", "extended_stats")]
    )


@pytest.mark.parametrize(("level", "log"), [("INFO", "csv"), pytest.param("DEBUG", "jsonl", marks=pytest.mark.long)])
def test_what_a_hostile_server_says_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, log: str
) -> None:
    monkeypatch.setenv("LOCUST_LOGLEVEL", level)
    port, metrics = free_port(), free_port()
    web = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", str(metrics), "--autostart"]
    url, results = f"http://127.0.0.1:{port}", ["--results", str(tmp_path / "results"), "--request-log", log]
    with hostile_server() as server:
        load = ["-u", "4", "-r", "4", "-t", "10s", "--autoquit", "1", "--host", server, "--first-token-timeout", "5"]
        with cluster(tmp_path, [*web, *results, *load], 1) as running:
            wait_for(lambda: Handler.given > 4 * len(ANSWERS), "requests")
            # Locust's worker reports its rows every three seconds, ours are there sooner.
            wait_for(lambda: all(kind in shown(url) for kind in (*KINDS, "POST", SAID)), "failures of every kind")
            stats = json.loads(get(f"{url}/stats/requests"))
            tables = {
                path: get(f"{url}/{path}")
                for path in ("stats/requests/csv", "stats/failures/csv", "exceptions", "exceptions/csv")
            }
            page = get(f"http://127.0.0.1:{metrics}/metrics")
            assert running.master.wait() in (0, 1, 3)
            logs = [running.master.output, *(worker.output for worker in running.workers)]
            assert_clean(running.master, *running.workers)

    failures = stats.pop("extended_stats")
    assert SAID not in json.dumps(stats)
    assert not [path for path, table in tables.items() if SAID in table]
    assert json.loads(tables["exceptions"])["exceptions"] == []
    assert SAID in json.dumps(failures)
    assert_harmless("\n".join(str(value) for table in failures for row in table["data"] for value in row.values()))

    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert {s.labels["outcome"] for s in samples if "outcome" in s.labels} <= set(Outcome)
    assert SAID not in page

    for said in logs:
        assert_harmless(said)
        assert "sseclient" not in said
    assert SAID not in logs[1]
    if level == "INFO":
        assert max(said.count("\n") for said in logs) < 200

    run = saved(tmp_path)
    outcomes = run["summary"]["total"]["outcomes"]
    failed = {name for name, number in outcomes.items() if number}
    assert failed >= {"ok", *KINDS}
    assert all(re.fullmatch(r"[ -~]*", reason) for reason in run["summary"]["total"]["finish"])
    (rows,) = (tmp_path / "results").glob(f"*/requests.{log}")
    *lines, _ = rows.read_text(encoding="utf-8").split("\n")
    assert_harmless("\n".join(lines))
    table = list(csv.DictReader(lines)) if log == "csv" else []
    assert len(table or lines) == sum(outcomes.values())
    assert not [row for row in table if row["message"].startswith(("=", "+", "-", "@"))]
    for more in ([], ["--full"]):
        command = [sys.executable, "-m", "vllm_locust", "report", *map(str, (tmp_path / "results").glob("*")), *more]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.stderr == ""
        assert_harmless(told.stdout)
        assert max(map(len, told.stdout.split("\n"))) <= 100
