"""What the web UI serves beside Locust's own pages: charts, data and files, under any base path, behind its login."""

import csv
import gzip
import io
import json
import re
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
from processes import MIXED, Browser, assert_clean, free_port, get, locust, process, saved, served, simulator, wait_for

_WITH_LOGIN = """
exec(open({mixed!r}).read())
from flask_login import UserMixin, login_user
from locust import events


class Person(UserMixin):
    id = "somebody"


@events.init.add_listener
def _(environment, **_):
    web_ui = environment.web_ui
    web_ui.app.config["SECRET_KEY"] = "of this test"
    web_ui.login_manager.user_loader(lambda _: Person())
    web_ui.app.add_url_rule("/come-in", "come-in", lambda: str(login_user(Person())))
"""
SHEETS = ("scenarios", "windows", "failures", "slowest")
PATHS = ("", "/picture", "/charts.html", *(f"/{name}.csv" for name in SHEETS))


def rows(text: str) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def picture(url: str, **asked: object) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    return dict(json.loads(get(f"{url}/llm/picture?{query}")))


def test_it_is_behind_the_login_and_under_the_base_path_of_locust(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "with_login.py"
    file.write_text(_WITH_LOGIN.format(mixed=str(MIXED)))
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--host", "http://h"]
    command = locust(*options, "--web-base-path", "/load", "--web-login", locustfile=file)
    url = f"http://127.0.0.1:{port}"
    with process(command, tmp_path / "locust.log", cwd=tmp_path) as running:
        wait_for(lambda: "charts are at" in running.output, "web UI")
        stranger, member = (urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar())) for _ in "ab")
        wait_for(lambda: member.open(f"{url}/come-in"), "login")
        for path in PATHS:
            with stranger.open(f"{url}/load/llm{path}") as answer:
                assert answer.url.startswith(f"{url}/load/login?")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                member.open(f"{url}/llm{path}")
        with member.open(f"{url}/load/llm") as answer:
            assert "<html" in answer.read().decode()
        with member.open(f"{url}/load/llm/picture") as answer:
            assert json.load(answer)["state"] == "none"
        with pytest.raises(urllib.error.HTTPError, match="404"):  # in words, not as an empty file
            member.open(f"{url}/load/llm/windows.csv")
        assert f"charts are at {url}/load/llm\n" in running.output
        assert_clean(running)


def test_files_and_data_are_those_of_the_run(tmp_path: Path) -> None:
    port = free_port()
    options = ["--web-host", "127.0.0.1", "--web-port", str(port), "--prometheus-port", "0", "--window", "1s"]
    url = f"http://127.0.0.1:{port}"
    browser = Browser(url)
    with (
        simulator(tmp_path, "--stream-errors", "0.1") as server,
        process(locust(*options, "--host", server), tmp_path / "locust.log", cwd=tmp_path) as running,
    ):
        wait_for(lambda: browser.stats()["state"] in ("ready", "stopped"), "web UI")
        links = {link["href"] for link in json.loads(re.findall(r'"extendedCsvFiles": (\[.*?\])', get(url))[0])}
        assert links == {f"./llm{path}" for path in PATHS if path != "/picture"}
        browser.swarm(user_count="4", spawn_rate="4", warmup="1s", parts="short")
        wait_for(lambda: picture(url)["next"] >= 3, "columns")
        now = picture(url)
        assert (now["state"], now["users"], now["workers"], now["verdict"]) == ("running", 4, 1, None)
        later = picture(url, version=now["version"], **{"from": now["next"]})
        assert later["from"] == now["next"]
        assert all(column["index"] >= now["next"] for column in later["columns"])
        for bad in ("x", -5):
            assert picture(url, version=now["version"], **{"from": bad})["from"] == 0
        asking = urllib.request.Request(f"{url}/llm/picture", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(asking) as answer:
            assert json.loads(gzip.decompress(answer.read()))["run"] == now["run"]
        browser.post("stop")
        wait_for(lambda: list((tmp_path / "results").glob("*/run.json")), "saved run")
        run = saved(tmp_path)
        end = picture(url)
        sheets = {name: rows(get(f"{url}/llm/{name}.csv")) for name in SHEETS}
        page = get(f"{url}/llm/charts.html")
        assert_clean(running)
        counted = served(server)
    summary = run["summary"]
    total = summary["total"]
    assert end["state"] == "stopped"
    assert end["verdict"] == ["ok"] or "failed" in end["verdict"][0]
    outcomes = [column["scopes"][""]["outcomes"] for column in end["columns"]]
    ended = {name: sum(one.get(name, 0) for one in outcomes) for name in ("ok", "stream_error")}
    assert ended["ok"] <= total["outcomes"]["ok"] == counted["completed"]  # some ended after the stop
    assert [row["scenario"] for row in sheets["scenarios"]] == ["short", ""]
    assert float(sheets["scenarios"][0]["ttft_p95_s"]) == total["ttft"]["p95"]
    assert int(sheets["scenarios"][0]["requests"]) == total["requests"]
    assert sum(int(row["ok"]) for row in sheets["windows"] if row["scenario"] == "short") == ended["ok"]
    assert [int(row["count"]) for row in sheets["failures"]] == [kind["count"] for kind in summary["failures"]]
    assert [row["request_id"] for row in sheets["slowest"]] == [slow["request_id"] for slow in summary["slowest"]]
    assert json.dumps(end).replace("<", "\\u003c") in page
