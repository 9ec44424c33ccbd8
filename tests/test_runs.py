"""A directory of runs as a table."""

import json
from pathlib import Path

import pytest
from windowed import Traffic, log_normal

from vllm_locust import cli
from vllm_locust.results import Run, save
from vllm_locust.summary import Meta
from vllm_locust.terminal import width_of


def saved(folder: Path, hour: int, target: str = "http://server:8000", **facts: object) -> Path:
    meta = Meta(
        name=f"run{hour}",
        started=f"2026-01-02T{hour:02}:00:00+00:00",
        target=target,
        scenarios={"Chat": "mixed", "Completions": "mixed"},
        load={"users": hour, "workers": 2},
        **facts,  # type: ignore[arg-type]
    )
    return save(Run.of(log_normal(hour, {"short": Traffic(40)}, 4), meta), folder)


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    assert cli.main(["list", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_are_listed_by_what_they_sent_the_latest_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [saved(tmp_path, hour) for hour in (9, 8)]
    missed = saved(tmp_path, 7, "http://other:8000", limits=["ttft p95 < 1ms"])
    lines = listed(capsys, tmp_path)
    assert [line for line in lines if line.startswith("mixed")] == [
        "mixed to http://other:8000",
        "mixed to http://server:8000",
    ]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("run") and "_" in line}
    assert list(rows) == [missed.parent.name, paths[1].parent.name, paths[0].parent.name]
    for hour, path in zip((9, 8), paths, strict=True):
        whole = json.loads(path.read_text())["summary"]["total"]
        told = rows[path.parent.name]
        assert told[1:6] == [str(hour), "users", "40.0", f"{whole['requests']:,}", "0"]
        assert [float(value.rstrip("*")) for value in told[6:8]] == pytest.approx(
            [1e3 * whole["ttft"][key] for key in ("p50", "p95")], rel=0.005
        )
    assert rows[missed.parent.name][-2:] == ["exit", "3"]
    assert rows[paths[0].parent.name][-1] == "ok"


def test_what_cannot_be_read_is_named_and_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, 9, "http://evil\x1b[31m:8000")
    for name, text in {
        "cut": path.read_text()[:500],
        "other": "{}",
        "odd": '{"format":1,"meta":{},"recording":1}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    no_windows = json.loads(path.read_text())
    no_windows["recording"]["windows"] = 5
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "run.json").write_text(json.dumps(no_windows))
    lines = listed(capsys, tmp_path)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert all(width_of(line) <= 100 for line in lines)
    for name, reason in {"cut": "truncated", "other": "no run file", "odd": "damaged", "part": "damaged"}.items():
        assert f"/{name}/run.json: {reason}" in "".join(lines)
    assert path.parent.name in text


def test_a_directory_without_a_run_is_an_error_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(tmp_path)]) == 2
    assert "no run.json in it" in capsys.readouterr().err


def test_a_run_of_an_older_version_is_summed_up_as_a_report_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, 9)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"summary": {}}))
    (row,) = [line.split() for line in listed(capsys, tmp_path) if line.startswith(path.parent.name)]
    assert row[4] == f"{content['summary']['total']['requests']:,}"


def test_a_note_stands_under_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 9, note="tuned\x1b[31m " + "x" * 120)
    saved(tmp_path, 8)
    lines = listed(capsys, tmp_path)
    (at,) = [number for number, line in enumerate(lines) if line.startswith("run9_")]
    assert "".join(line.strip() for line in lines[at + 1 :]) == "tuned\\x1b[31m" + "x" * 120
    assert lines[at - 1].startswith("run8_")
    assert all(width_of(line) <= 100 for line in lines)


def test_a_run_is_listed_with_how_long_it_lasted_and_when_it_started_unless_its_name_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, 9).parent
    heads, row = listed(capsys, tmp_path)[-2:]
    assert heads.split()[:3] == ["run", "load", "[s]"]
    assert row.split()[:4] == [path.name, "9", "users", "40.0"]
    path.rename(tmp_path / "baseline")
    heads, row = listed(capsys, tmp_path)[-2:]
    assert heads.split()[:4] == ["run", "[UTC]", "load", "[s]"]
    assert row.split()[:6] == ["baseline", "2026-01-02", "09:00", "9", "users", "40.0"]


def test_the_names_of_runs_at_a_rate_have_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = Meta(
        name="baseline", started="2026-01-02T09:00:00+00:00", load={"arrivals": "poisson", "request_rate": 12.5}
    )
    path = save(Run.of(log_normal(1, {"short": Traffic(4000)}, 4), meta), tmp_path)
    row = listed(capsys, tmp_path)[-1]
    assert row.startswith(path.parent.name)
    assert width_of(row) <= 100


@pytest.mark.parametrize("started", ["", "yesterday", "\x1b[2J"])
def test_a_start_that_is_no_time_is_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str], started: str) -> None:
    save(Run.of(log_normal(1, {"short": Traffic(4)}, 4), Meta(started=started)), tmp_path).parent.rename(tmp_path / "a")
    assert listed(capsys, tmp_path)[-1].split()[:2] == ["a", "–"]
