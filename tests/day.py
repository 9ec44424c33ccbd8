"""A long run as the master holds it: so many windows, with all that an open loop on three workers has in them.

    python day.py WINDOWS FOLDER

In a process of its own it merges them, saves the run to the folder and prints, in JSON, by how many MB that process had
grown with the recording, by how many at its largest while it saved, and how large the file is.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from vllm_locust.cell import Cell, Cells, Key
from vllm_locust.recording import Gauges, Recording, Report, WindowState, decode_report, encode_report, to_wire
from vllm_locust.results import Run, save
from vllm_locust.summary import Meta

MS = 1_000_000
WINDOW_NS = 10_000 * MS
SAMPLES = {  # median and sigma of what is log-normal, and how many there are per request
    "ttft": (250 * MS, 0.6, 1),
    "ttft_scheduled": (250 * MS, 0.6, 1),
    "itl": (30 * MS, 0.4, 100),
    "itl_max": (90 * MS, 0.5, 1),
    "tpot": (31 * MS, 0.2, 1),
    "e2el": (6_000 * MS, 0.4, 1),
    "e2el_scheduled": (6_000 * MS, 0.4, 1),
    "queue": (0.1 * MS, 0.8, 1),
    "input_tokens": (800, 0.7, 1),
    "output_tokens": (100, 0.3, 1),
    "uncertainty": (0.02 * MS, 0.8, 100),
    "read_lag": (0.05 * MS, 0.8, 100),
}
REQUESTS = 20
"""Of a cell and a worker in a window: 36 requests and 3,600 tokens per second in all."""
WORKERS = 3
_VARIANTS = 30
"""How many different states there are; the next ones have the same cells again."""


def _cells(rng: np.random.Generator) -> Cells:
    cells: Cells = {}
    for scenario in ("short", "long", "longform"):
        for endpoint in ("chat", "completions"):
            cell = cells[Key(scenario, endpoint)] = Cell()
            for metric, (median, sigma, per_request) in SAMPLES.items():
                values = rng.lognormal(np.log(median), sigma, REQUESTS * per_request)
                cell.histogram(metric).add_array(values.astype(np.int64))
            for name in ("scheduled", "sent", "outcome|ok|200", "finish|length"):
                cell.count(name, REQUESTS)
            for name in ("stamped", "token_events", "tokens_received"):
                cell.count(name, REQUESTS * 100)
    return cells


def reports(windows: int) -> Iterator[bytes]:
    """Yield what workers send at the end of each window."""
    rng = np.random.default_rng(1)
    pool = [to_wire(_cells(rng)) for _ in range(_VARIANTS)]
    for index in range(windows):
        for worker in range(WORKERS):
            wait_ns = int(rng.integers(10**6))
            gauges = Gauges(
                span_ns=WINDOW_NS, in_flight_ns=30 * WINDOW_NS, cpu_ns=10**9 + wait_ns, core_wait_ns=wait_ns
            )
            cells = pool[(index * WORKERS + worker) % _VARIANTS]
            state = WindowState(index=index, seq=index, sealed=True, gauges=gauges, cells=cells)
            now_ns = (index + 1) * WINDOW_NS
            yield encode_report(
                Report(
                    run="day",
                    epoch=0,
                    worker=f"worker {worker}",
                    seq=index,
                    now_ns=now_ns,
                    windows=[state],
                    failures=[],
                )
            )


def record(recording: Recording, sent: Iterator[bytes]) -> None:
    """Let a master take what was sent."""
    for report in sent:
        assert recording.merge(decode_report(report))


def main() -> None:
    windows, folder = int(sys.argv[1]), Path(sys.argv[2])
    record(Recording("day", 0, WINDOW_NS), reports(10))  # whatever is imported or cached at the first use
    process = psutil.Process()
    before = process.memory_info().rss
    recording = Recording("day", 0, WINDOW_NS)
    record(recording, reports(windows))
    recording.length_ns = windows * WINDOW_NS
    grown = process.memory_info().rss - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now (proc(5))
    path = save(Run.of(recording, Meta(name="day", started="2026-12-02T00:00:00+00:00")), folder)
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found = {"grown": grown, "peak": int(peak.split()[1]) * 1024 - before, "file": path.stat().st_size}
    print(json.dumps({name: round(size / 1e6, 1) for name, size in found.items()}))


if __name__ == "__main__":
    main()
