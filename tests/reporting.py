"""Workers whose reports are kept as they leave, and may be harmed on their way: what a master should hold, exactly."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import MIXED, Process

from vllm_locust.cell import Cell, total
from vllm_locust.recording import Report, WireCell, decode_report, from_wire

_LOCUSTFILE = """
import itertools, json, os, time
{before}
exec(open({locustfile!r}).read())
import gevent
from locust import events
from vllm_locust.cluster import REPORT


def pass_on(number, send):
{passing}


@events.init.add_listener
def watch(runner, **_):
    send, numbers = runner.send_message, itertools.count(1)
    kept = open(f"reports-{{os.getpid()}}.jsonl", "a")

    def send_message(kind, data=None, client_id=None):
        if kind != REPORT:
            return send(kind, data, client_id)
        line = {{"at_s": time.monotonic(), "last": data["last"], "report": data["report"].hex()}}
        print(json.dumps(line), file=kept, flush=True)
        pass_on(next(numbers), lambda: send(kind, data, client_id))

    runner.send_message = send_message
"""


def reporting(folder: Path, *, before: str = "", passing: str = "send()", locustfile: Path = MIXED) -> Path:
    """Write a locustfile for workers that keeps their reports in the folder in which they run.

    `before` runs before anything is imported; `passing` passes a report on by `send()`, the `number`-th of all.
    """
    path = folder / "reporting_locustfile.py"
    indented = "\n".join(f"    {line}" for line in passing.splitlines())
    path.write_text(_LOCUSTFILE.format(before=before, passing=indented, locustfile=str(locustfile)))
    return path


@dataclass(frozen=True, slots=True)
class Sent:
    """A report that has left, harmed later or not."""

    at_s: float
    last: bool
    size: int
    report: Report


def sent(folder: Path, worker: Process | int) -> list[Sent]:
    """Return the reports of a worker, by process or pid; empty before the first."""
    path = folder / f"reports-{worker if isinstance(worker, int) else worker.popen.pid}.jsonl"
    return list(_parse(path.read_text())) if path.exists() else []


def _parse(text: str) -> Iterator[Sent]:
    for line in text.splitlines():
        kept = json.loads(line)
        data = bytes.fromhex(kept["report"])
        yield Sent(kept["at_s"], kept["last"], len(data), decode_report(data))


def told(reports: list[Sent], *, epoch: int = 0) -> Cell:
    """Return the sum of all that a worker has told of the last run: the last state of each window."""
    windows: dict[int, list[WireCell]] = {}
    run = reports[-1].report.run
    for one in reports:
        if (one.report.run, one.report.epoch) == (run, epoch):
            windows |= {window.index: window.cells for window in one.report.windows}
    return total(cell for cells in windows.values() for cell in from_wire(cells).values())


def completed(cell: Cell) -> int:
    """Return how many requests of a sum were answered in full."""
    return sum(number for name, number in cell.counters.items() if name.startswith("outcome|ok|"))
