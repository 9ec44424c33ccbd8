"""The picture of a comparison: what the page draws of two sides (`vllm_locust.page`), as one JSON document.

It has the keys of a picture of a run (`vllm_locust.picture`) where they mean the same, and `contrast`: how the runs
went over time, and which share of samples took at most how long, for each scenario and for all of them (the empty
name). Runs are lines of their own over time; of distributions, the runs of a side are one line together.
"""

from collections.abc import Iterator, Sequence

from vllm_locust import compare
from vllm_locust.cell import Cell, total
from vllm_locust.comparison import Comparison
from vllm_locust.errors import ExitCode
from vllm_locust.histogram import Histogram
from vllm_locust.intervals import Interval, intervals
from vllm_locust.picture import Values, distribution, plain, settings_of, windows_per_column
from vllm_locust.quantity import NS_PER_S, format_list
from vllm_locust.results import Run
from vllm_locust.side import Side, scenarios

_SHARES = ("ttft", "itl", "e2el")
_SIDES = ("base", "new")


def of(found: Comparison) -> Values:
    """Return the whole picture of a comparison."""
    sides = dict(zip(_SIDES, (found.base, found.new), strict=True))
    names = scenarios(*sides.values())
    told = (f"{one.subject}: {one.text}" for one in found.findings)
    tone = {ExitCode.OK: "good", ExitCode.MISSED: "bad"}.get(found.exit_code, "warn")
    return {
        "run": "comparison",
        "name": " → ".join(one.runs[0].meta.name for one in sides.values()),
        **dict.fromkeys(("target", "model", "started"), ""),
        "state": "compared",
        "window_s": _width_s(found),
        **dict.fromkeys(("now_s", "length_s", "warmup_s", "fidelity")),
        "verdict": [*_differs(found), *([tone, text] for text in (compare.verdict(found), *told))],
        "scenarios": names,
        "tables": {
            "differs": plain(("what", *_SIDES, ""), compare.differing_rows(found)),
            "compared": plain(("scenario", "figure", *compare.HEADS), _rows(found), numbers=range(2, 6)),
            "facts": plain(
                ("About", "In words"), [(label, text) for label, texts in compare.facts(found) for text in texts]
            ),
            "settings": plain(("Side", "Setting", "Value"), _settings(sides)),
        },
        "contrast": {
            "windows": _windows(sides, ["", *names], _width_s(found)),
            "shares": {metric: {name: _shares(sides, metric, name) for name in ("", *names)} for metric in _SHARES},
        }
        if not found.refused
        else None,
    }


def _differs(found: Comparison) -> Iterator[list[str]]:
    """Name what differs, since it stands before any number."""
    if found.differing:
        prevents = any(one.prevents for one in found.differing)
        names = format_list(one.what for one in found.differing)
        yield ["warn" if prevents else "muted", f"the sides differ in: {names}"]


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    return [(name, row.figure.title, *compare.row_of(row)) for name, rows in compare.by_scenario(found) for row in rows]


def _settings(sides: dict[str, Side]) -> list[tuple[str, ...]]:
    return [(label, *row) for label, one in sides.items() for run in one.runs for row in settings_of(run)]


def _width_s(found: Comparison) -> float:
    """Return how long a stretch is that is one point of a line: a window, or so many that a chart can show them."""
    recordings = [run.recording for one in (found.base, found.new) for run in one.runs]
    windows_s = max(recording.window_ns for recording in recordings) / NS_PER_S
    return windows_s * windows_per_column(max(recording.window_count for recording in recordings))


def _windows(sides: dict[str, Side], names: Sequence[str], width_s: float) -> Values:
    """Return the middles of stretches, and by scenario a line for each run: p95 TTFT, mean ITL, output tokens/s."""
    labelled = [
        (side, f"{side} {number}" if len(one.runs) > 1 else side, _stretches(run, width_s))
        for side, one in sides.items()
        for number, run in enumerate(one.runs, 1)
    ]
    points = max((1 + max(stretches, default=-1) for *_, stretches in labelled), default=0)
    return {
        "x_s": [(number + 0.5) * width_s for number in range(points)],
        "lines": {
            name: [
                {"side": side, "label": label, **_line([stretches.get(number, []) for number in range(points)], name)}
                for side, label, stretches in labelled
            ]
            for name in names
        },
    }


def _stretches(run: Run, width_s: float) -> dict[int, list[Interval]]:
    found: dict[int, list[Interval]] = {}
    for window in intervals(run.recording):
        found.setdefault(int(window.start_ns / NS_PER_S // width_s), []).append(window)
    return found


def _line(stretches: Sequence[Sequence[Interval]], name: str) -> Values:
    """Return what a scenario was like in each stretch of a run, null where there is no sample, or no run."""
    scenario = name or None
    told = [total(cell for window in windows for cell in window.told(scenario)) for windows in stretches]
    tokens = [
        sum(
            cell.counters.get("tokens_received", 0)
            for window in windows
            for key, cell in window.cells.items()
            if name in ("", key.scenario)
        )
        for windows in stretches
    ]
    lengths_s = [sum(window.length_s for window in windows) for windows in stretches]
    return {
        "ttft": [_seconds(_of(cell, "ttft").percentile(0.95)) for cell in told],
        "itl": [_seconds(_of(cell, "itl").mean) for cell in told],
        "tokens": [number / length_s if length_s else None for number, length_s in zip(tokens, lengths_s, strict=True)],
    }


def _of(cell: Cell, metric: str) -> Histogram:
    return cell.histograms.get(metric, Histogram())


def _seconds(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / NS_PER_S, 9)


def _shares(sides: dict[str, Side], metric: str, name: str) -> Values | None:
    """Return the distribution of each side over the same values."""
    histograms = {
        label: _of(
            total(stretch.steady[name].copy((metric,)) for stretch in one.stretches if name in stretch.steady), metric
        )
        for label, one in sides.items()
    }
    return distribution(histograms)
