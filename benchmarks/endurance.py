"""Measures whether the memory of a master and its workers stays flat: an hour's windows in ten minutes, and more.

A real simulator, master and workers, started as users start them, with windows of a second: ten minutes have as many
as 100 minutes of the usual ones. Prints how much memory each process has every 30 s, and at the end by how much it
grows with 360 windows, which are an hour of 10 s each. Exits with 1 if that is more than 20 MB, else with 0.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
from local import free_port, running

_HOUR = 360
"""Windows of 10 s in an hour."""
_MOST_MB = 20
_SETTLE_S = 60
"""How long processes may still grow as whoever has just started does; left out of the slope."""
_LOCUSTFILE = Path(__file__).parent.parent / "locustfiles" / "mixed.py"

Process = subprocess.Popen[bytes]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).read()
    except OSError:
        return False
    return True


def _rss_mb(process: Process) -> float:
    return float(psutil.Process(process.pid).memory_info().rss / 1e6)


def measure(options: argparse.Namespace, folder: Path, started: ExitStack) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and MB of each process, which are printed as they come."""
    port, server, metrics = free_port(), free_port(), free_port()

    def run(name: str, *command: str) -> Process:
        return started.enter_context(running([sys.executable, "-m", *command], folder / f"{name}.log"))

    run("simulator", "vllm_locust", "simulate", "--port", str(server), "--itl", "10ms", "--quiet")
    while not _answers(f"http://127.0.0.1:{server}/health"):
        time.sleep(0.2)
    locust = ("locust", "-f", str(_LOCUSTFILE))
    load = ["--host", f"http://127.0.0.1:{server}", "-u", str(options.users), "-r", str(options.users)]
    load += ["--window", options.window, "--prometheus-port", str(metrics), "--headless", "--only-summary"]
    bound = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)]
    members = {"master": run("master", *locust, *bound, *load, "--expect-workers", str(options.workers))}
    for number in range(1, options.workers + 1):
        members[f"worker {number}"] = run(f"worker-{number}", *locust, "--worker", "--master-port", str(port))
    while not _answers(f"http://127.0.0.1:{metrics}/metrics"):
        time.sleep(0.2)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in members}
    print(f"{'minutes':>7}" + "".join(f"  {name:>9}" for name in members), flush=True)
    start_s = time.monotonic()
    while time.monotonic() < start_s + options.minutes * 60:
        time.sleep(options.every)
        _answers(f"http://127.0.0.1:{metrics}/metrics")  # as Prometheus would
        now_s = time.monotonic() - start_s
        for name, process in members.items():
            if process.poll() is not None:
                raise SystemExit(f"{name} has ended:\n{(folder / 'master.log').read_text()}")
            seen[name].append((now_s, _rss_mb(process)))
        print(f"{now_s / 60:7.1f}" + "".join(f"  {points[-1][1]:6.1f} MB" for points in seen.values()), flush=True)
    members["master"].send_signal(signal.SIGINT)
    members["master"].wait(120)
    return seen


def slope_mb(points: list[tuple[float, float]], windows_per_s: float) -> float:
    """Return by how many MB memory grows with an hour's windows, by least squares."""
    times_s, sizes_mb = np.array([point for point in points if point[0] > _SETTLE_S] or points).T
    return float(np.polyfit(times_s * windows_per_s, sizes_mb, 1)[0]) * _HOUR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long (10)")
    parser.add_argument("--workers", type=int, default=2, help="how many (2)")
    parser.add_argument("--users", type=int, default=20, help="how many, in all (20)")
    parser.add_argument("--window", default="1s", help="length of a window, in seconds (1s)")
    parser.add_argument("--every", type=float, default=30, help="seconds from one look to the next (30)")
    options = parser.parse_args()
    window_s = float(options.window.removesuffix("s"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        seen = measure(options, Path(name), started)
        (path,) = Path(name).glob("results/*/run.json")
        saved = json.loads(path.read_text())
        print(f"{saved['summary']['total']['requests']} requests, {len(saved['recording']['windows'])} windows")
        print(f"run.json has {path.stat().st_size / 1e6:.1f} MB")
    slopes = {name: slope_mb(points, 1 / window_s) for name, points in seen.items()}
    for member, slope in slopes.items():
        print(f"{member:9}  {slope:+6.1f} MB with {_HOUR} windows more")
    return 1 if max(slopes.values()) > _MOST_MB else 0


if __name__ == "__main__":
    sys.exit(main())
