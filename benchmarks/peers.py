"""Measures other tools as this one: the same load for each in turn, and the truth beside what they report.

In every round each tool has its turn, so that what else the machine does meets them all. Prints tables in Markdown;
with `--write` they replace those in docs/fidelity.md. A run that fails or takes too long is said to, and nothing else
is made of it. Exits with 1 if that was one of this project's own, else with 0.
"""

import argparse
import datetime as dt
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bench
import tools
import watch
from figures import Figures, figures

_DOCUMENT = Path(__file__).parent.parent / "docs" / "fidelity.md"
_BEGIN, _END = "<!-- figures of make bench-peers -->\n", "<!-- end of figures -->\n"
_POINTS = tuple(point for point in bench.POINTS if point.streams > 100 and not point.tls)
_BROKEN = tools.Load(100, 47, 24, broken=True)
_SUCCESSES = "streams called a success"
_WHOLE = ("events/s", "CPU, % of a core", "others' CPU on its core, %", "peak memory, MiB", _SUCCESSES)
_ABSENT = "–"


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one tool under one load."""

    figures: list[Figures] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def cell(self, name: str) -> str:
        """Return the median of a figure, and its spread where there is one."""
        values = [found[name] for found in self.figures if name in found]
        if not values:
            return _ABSENT
        digits = 0 if name in _WHOLE else 3 if "error of one" in name else 2
        median, low, high = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
        return median if low == high else f"{median} ({low} to {high})"


def measure(chosen: list[tools.Tool], loads: list[tools.Load], rounds: int, timeout_s: float) -> list[list[Runs]]:
    """Run every tool under every load, round by round; by load, then by tool."""
    results = [[Runs() for _ in chosen] for _ in loads]
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for load, of_load in zip(loads, results, strict=True):
                for tool, runs in zip(chosen, of_load, strict=True):
                    folder = Path(name) / tool.name.replace(" ", "-")
                    _run(tool, load, folder, timeout_s, runs)
                    last = runs.errors[-1:] if len(runs.figures) + len(runs.errors) == number + 1 else []
                    print(f"round {number + 1}, {_title(load)}: {tool.name}", *last, file=sys.stderr, flush=True)
    return results


def _run(tool: tools.Tool, load: tools.Load, folder: Path, timeout_s: float, runs: Runs) -> None:
    folder.mkdir(exist_ok=True)
    tool.prepare(folder)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            watched = watch.run(tool, load, Path(own), timeout_s)
        except watch.RunError as error:
            runs.errors.append(f"{error}{_last_words(Path(own))}")
            return
        runs.figures.append({_SUCCESSES: watched.found.succeeded} if load.broken else figures(watched))


def _last_words(folder: Path) -> str:
    output = folder / "output.txt"
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    return "".join(f"\n    {line[:200]}" for line in lines[-12:] if line.strip())


# The tables


def _title(load: tools.Load) -> str:
    if load.broken:
        return f"{load.streams} streams, {load.streams // 4} of them fine"
    return f"{load.streams:,} streams of {load.rate:g} token events/s each, {load.streams * load.rate:,.0f} in all"


def tables(chosen: list[tools.Tool], loads: list[tools.Load], results: list[list[Runs]]) -> str:
    """Return what was measured, on what and when, as Markdown."""
    rounds = max(len(runs.figures) + len(runs.errors) for runs in results[0])
    versions = ", ".join(dict.fromkeys(tool.version() for tool in chosen))
    today = dt.datetime.now(dt.UTC).date()
    kind = f"Medians of {rounds} rounds (least to most)" if rounds > 1 else "One round"
    parts = [f"{today}; {bench.machine()}; {versions}. {kind}.\n"]
    for load, of_load in zip(loads, results, strict=True):
        parts += [f"### {_title(load)}\n", _table(chosen, of_load)]
        parts += [f"- {line}\n" for line in _failures(chosen, of_load)]
    return "\n".join(parts)


def _table(chosen: list[tools.Tool], of_load: list[Runs]) -> str:
    names = dict.fromkeys(name for runs in of_load for found in runs.figures for name in found)
    rows = [["", *(tool.name for tool in chosen)], ["---", *("---:" for _ in chosen)]]
    rows += [[name, *(runs.cell(name) for runs in of_load)] for name in names]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _failures(chosen: list[tools.Tool], of_load: list[Runs]) -> Iterator[str]:
    for tool, runs in zip(chosen, of_load, strict=True):
        if runs.errors:
            errors = "; ".join(dict.fromkeys(error.partition("\n")[0] for error in runs.errors))
            yield f"{tool.name}: {len(runs.errors)} of {len(runs.errors) + len(runs.figures)} runs failed: {errors}"


def _write(text: str) -> None:
    """Put the tables in the place of those in the document."""
    before, found, rest = _DOCUMENT.read_text().partition(_BEGIN)
    _, also_found, after = rest.partition(_END)
    if not (found and also_found):
        raise SystemExit(f"{_DOCUMENT} has lost its marks")
    _DOCUMENT.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def _options() -> argparse.Namespace:
    names = ", ".join(repr(tool.name) for tool in tools.TOOLS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each tool has its turn (3)")
    parser.add_argument("--seconds", type=float, default=11, help="length of the streams (11)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run is given up (120)")
    parser.add_argument("--tools", default="", help=f"only those whose names contain one of these, a,b: {names}")
    parser.add_argument("--streams", type=int, help="only the load of so many streams; 100 is the one that breaks")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {_DOCUMENT.name}")
    return parser.parse_args()


def main() -> int:
    options = _options()
    wanted = options.tools.split(",")
    chosen = [tool for tool in tools.TOOLS if any(part in tool.name for part in wanted)]
    for tool in chosen:
        if not tool.installed:
            print(f"{tool.name} is not installed ({tool.python}); make bench-peers does that", file=sys.stderr)
    chosen = [tool for tool in chosen if tool.installed]
    loads = [tools.Load(point.streams, point.rate, round(point.rate * options.seconds)) for point in _POINTS]
    loads = [load for load in [*loads, _BROKEN] if options.streams in (None, load.streams)]
    watch.allow_many_sockets()
    # Whoever ends this process means the tools it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = measure(chosen, loads, options.rounds, options.timeout)
    text = tables(chosen, loads, results)
    print(text)
    if options.write:
        _write(text)
    ours = [runs for of_load in results for tool, runs in zip(chosen, of_load, strict=True) if tool is tools.TOOLS[0]]
    return 1 if any(runs.errors for runs in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
