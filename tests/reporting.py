"""Workers whose reports are kept as they leave, and may be harmed on their way: what a master should hold, exactly."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from processes import MIXED, Process

from vllm_locust.cell import Cell, total
from vllm_locust.recording import Report, WireCell, decode_report, from_wire, load

_LOCUSTFILE = """
import itertools, json, os, time
{before}
exec(open({locustfile!r}).read())
import gevent
from locust import events
from vllm_locust.cluster import REPORT


def pass_on(runner, data, number, send):
    last = data["last"]
{passing}


@events.init.add_listener
def watch(runner, **_):
    send, numbers = runner.send_message, itertools.count(1)
    kept = open(f"reports-{{os.getpid()}}.jsonl", "a")

    def send_message(kind, data=None, client_id=None):
        line = {{"kind": kind, "at_s": time.monotonic()}}
        if kind == REPORT:
            line |= {{"last": data["last"], "report": data["report"].hex()}}
        print(json.dumps(line), file=kept, flush=True)
        if kind == REPORT:
            pass_on(runner, data, next(numbers), lambda: send(kind, data, client_id))
        else:
            send(kind, data, client_id)

    runner.send_message = send_message
"""


def reporting(folder: Path, *, before: str = "", passing: str = "send()", locustfile: Path = MIXED) -> Path:
    """Write a locustfile for workers that keeps their reports in the folder in which they run.

    `before` runs before anything is imported. `passing` passes a report, which is in `data`, on by `send()`: the
    `number`-th of all, maybe the `last` of a run.
    """
    path = folder / "reporting_locustfile.py"
    path.write_text(
        _LOCUSTFILE.format(before=before, passing=indent(dedent(passing), "    "), locustfile=str(locustfile))
    )
    return path


@dataclass(frozen=True, slots=True)
class Sent:
    """A report that has left, harmed later or not."""

    at_s: float
    last: bool
    data: bytes
    report: Report


def sent(folder: Path, worker: Process | int) -> list[Sent]:
    """Return the reports of a worker, by process or pid; empty before the first."""
    return [*_reports(_lines(folder, worker))]


def kinds(folder: Path, worker: Process | int) -> Counter[str]:
    """Return how many messages of each kind a worker has sent."""
    return Counter(line["kind"] for line in _lines(folder, worker))


def _lines(folder: Path, worker: Process | int) -> list[dict[str, Any]]:
    path = folder / f"reports-{worker if isinstance(worker, int) else worker.popen.pid}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last one may yet be written


def _reports(lines: list[dict[str, Any]]) -> Iterator[Sent]:
    for line in lines:
        if "report" in line:
            data = bytes.fromhex(line["report"])
            yield Sent(line["at_s"], line["last"], data, decode_report(data))


def told(reports: list[Sent], *, epoch: int | None = None) -> Cell:
    """Return the sum of all that a worker has told of an epoch (its last) of its last run: each window's last state."""
    windows: dict[int, list[WireCell]] = {}
    last = reports[-1].report
    for one in reports:
        if (one.report.run, one.report.epoch) == (last.run, last.epoch if epoch is None else epoch):
            windows |= {window.index: window.cells for window in one.report.windows}
    return total(cell for cells in windows.values() for cell in from_wire(cells).values())


def completed(cell: Cell) -> int:
    """Return how many requests of a sum were answered in full."""
    return ended(cell, "ok")


def ended(cell: Cell, outcome: str = "") -> int:
    """Return how many requests of a sum came to an end: this one, or any."""
    return sum(number for name, number in cell.counters.items() if name.startswith(f"outcome|{outcome}"))


def assert_holds(run: dict[str, Any], cells: list[Cell]) -> None:
    """Check that a saved run holds what workers have told, all of it, and once."""
    held, expected = total(load(run["recording"]).totals.values()), total(cells)
    assert completed(held) == run["summary"]["total"]["outcomes"]["ok"] == sum(map(completed, cells)) > 0
    assert held.counters == expected.counters
    assert _plain(held) == _plain(expected)
    assert not any(worker["plugin_errors"] for worker in run["summary"]["fidelity"]["workers"].values())


def _plain(cell: Cell) -> dict[str, Any]:
    return {name: (dict(h), h.count, h.sum, h.min, h.max) for name, h in cell.histograms.items() if h.count}
