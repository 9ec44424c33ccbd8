"""How a run went, window by window: the verdict on its stability in words, a sparkline per metric, a table of windows.

Promise: no line is wider than a page, whatever the numbers and names; a window without a sample is a dot or a dash, and
never a zero. Nothing here computes: `vllm_locust.intervals` has the figures and `vllm_locust.stability` the verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_locust.intervals import intervals, rows
from vllm_locust.quantity import format_duration, format_number
from vllm_locust.recording import Recording
from vllm_locust.terminal import MARK, Column, labelled, printable, table, width_of

_STEPS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"
_NAME_WIDTH = 20
_SPARK_WIDTH = 50
_VALUE_WIDTH = 11
_MOST = 10
"""How many reasons are told; the table of windows marks all."""
_NEEDED = {"p50": 0, "p95": 20, "p99": 100}
"""Samples without which a percentile is no more than the maximum."""
_LEGEND = f"{MARK} max of n: fewer than 20 (p95) or 100 (p99) samples"

Judged = dict[str, Any]
Window = dict[str, Any]


def stability_lines(judged: Judged | None) -> list[str]:
    """Return the verdict with its reasons, doubts and remarks; nothing where nobody asked."""
    if judged is None:
        return []
    return labelled("Stability", [_verdict(judged), *_told(judged)])


def stability_rows(judged: Judged | None) -> list[tuple[str, str]]:
    """Return the verdict and everything that is said for it or against it, each with what it is; as above."""
    if judged is None:
        return []
    kinds = {"reasons": "reason", "doubtful": "in doubt", "remarks": "remark"}
    found = [(told, printable(each["text"])) for kind, told in kinds.items() for each in judged[kind]]
    return [("verdict", _verdict(judged)), *found]


def _verdict(judged: Judged) -> str:
    windows, number = judged["windows"], len(judged["judged_windows"])
    warm = sum(not window["steady"] for window in windows)
    partial = sum(window["steady"] and not window["whole"] for window in windows)
    left_out = [f"{warm} of the warm-up"] * bool(warm) + [f"{partial} partial"] * bool(partial)
    aside = f" (left out: {', '.join(left_out)})" if left_out else ""
    plural = "" if number == 1 else "s"
    return f"{judged['verdict']}: {number} window{plural} of {format_duration(judged['window_s'])}{aside}"


def _told(judged: Judged) -> Iterator[str]:
    reasons = judged["reasons"]
    yield from (reason["text"] for reason in reasons[:_MOST])
    if len(reasons) > _MOST:
        yield f"and {len(reasons) - _MOST} more"
    yield from (f"in doubt for that: {symptom['text']}" for symptom in judged["doubtful"][:_MOST])
    yield from (f"remark: {remark['text']}" for remark in judged["remarks"][:_MOST])


def course(recording: Recording, judged: Judged | None, *, full: bool) -> Iterator[list[str]]:
    """Yield sparklines and table, if the run was to be stable; else, of more than one window, where `full` asks."""
    if judged is not None:
        windows = judged["windows"]
    elif full and len(recording.windows) > 1:
        windows = rows(intervals(recording))
    else:
        return
    if windows:
        yield sparklines(windows)
        yield window_table(windows, _kinds(judged))


def _kinds(judged: Judged | None) -> dict[int, list[str]]:
    """Return by window the kinds of what was seen in it."""
    found: dict[int, list[str]] = {}
    for reason in [] if judged is None else [*judged["reasons"], *judged["doubtful"]]:
        for index in reason["windows"]:
            if reason["kind"] not in found.setdefault(index, []):
                found[index].append(reason["kind"])
    return found


# Sparklines


def sparklines(windows: Sequence[Window]) -> list[str]:
    """Return a line per metric: a mark per window, as high as its share of the largest, and what that is."""
    size = -(-len(windows) // _SPARK_WIDTH)
    each = (
        format_duration(max(window["length_s"] for window in windows))
        if size == 1
        else f"{size} windows, the worst of them"
    )
    lines = [f"windows: a mark per {each}, from 0 to the largest ({_NOTHING} no sample)"]
    for name, of, shown, worst in _series(windows):
        values = [of(window) for window in windows]
        known = [value for value in values if value is not None]
        if known:
            marks = spark([_worst(values[start : start + size], worst) for start in range(0, len(values), size)])
            label = printable(name, _NAME_WIDTH)
            padding = " " * (_NAME_WIDTH - width_of(label))
            low, high = (printable(shown(value), _VALUE_WIDTH) for value in (min(known), max(known)))
            lines.append(f"{label}{padding}  {marks}  {low} .. {high}")
    return lines


_Of = Callable[[Window], float | None]
_Shown = Callable[[float], str]
_Worst = Callable[[Sequence[float]], float]


def _series(windows: Sequence[Window]) -> Iterator[tuple[str, _Of, _Shown, _Worst]]:
    """Yield the name of each metric, how to read it, how to print it, and which of several values is the worst."""
    yield "TTFT p50", lambda window: window["ttft"]["p50"], format_duration, max
    yield "TTFT p95", lambda window: window["ttft"]["p95"], format_duration, max
    names = sorted({name for window in windows for name in window["scenarios"]})
    if len(names) > 1:
        for name in names[:_MOST]:
            yield f"TTFT p95 {name}", _ttft_of(name), format_duration, max
    yield "ITL p99", lambda window: window["itl"]["p99"], format_duration, max
    yield "TPOT mean", lambda window: window["tpot_mean_s"], format_duration, max
    yield "output tok/s", lambda window: window["output_tokens_per_s"], _number, min
    yield "offered/s", lambda window: window["offered_per_s"], _number, max
    yield "completed/s", lambda window: window["completed_per_s"], _number, min
    yield "streams in flight", lambda window: window["in_flight_mean"], _number, max
    if any(window["failed"] for window in windows):
        yield "failed", lambda window: window["failed"], _number, max


def _number(value: float) -> str:
    return format_number(value, 8)


def _ttft_of(name: str) -> _Of:
    def read(window: Window) -> float | None:
        value: float | None = window["scenarios"].get(name, {}).get("p95")
        return value

    return read


def _worst(values: Sequence[float | None], worst: _Worst) -> float | None:
    known = [value for value in values if value is not None]
    return worst(known) if known else None


def spark(values: Sequence[float | None]) -> str:
    """Return a mark per value, from 0 to the largest; a dot where there is none."""
    largest = max((value for value in values if value is not None), default=0) or 1
    marks = [None if value is None else min(int(value / largest * len(_STEPS)), len(_STEPS) - 1) for value in values]
    return "".join(_NOTHING if mark is None else _STEPS[mark] for mark in marks)


# Table


def window_table(windows: Sequence[Window], kinds: dict[int, list[str]]) -> list[str]:
    """Return a row per window, with what was seen in it."""
    offered = any(window["offered_per_s"] is not None for window in windows)
    heads = [
        Column("from", "[s]"),
        Column("requests", "sent"),
        Column("requests", "failed"),
        Column("TTFT [ms]", "samples"),
        Column("TTFT [ms]", "p50"),
        Column("TTFT [ms]", "p95"),
        Column("ITL [ms]", "p99"),
        Column("output", "tok/s"),
        *([Column("requests/s", "offered")] if offered else []),
        Column("requests/s", "ok"),
        Column("", "streams"),
        Column("", "note"),
    ]
    body = [_row(window, kinds.get(window["index"], []), offered=offered) for window in windows]
    if not any(row[-1] for row in body):
        heads, body = heads[:-1], [row[:-1] for row in body]
    lines = table(heads, body)
    return [*lines, _LEGEND] if any(MARK in cell for row in body for cell in row) else lines


def _row(window: Window, kinds: Sequence[str], *, offered: bool) -> list[str]:
    ttft, rates = window["ttft"], ("offered_per_s",) * offered + ("completed_per_s", "in_flight_mean")
    return [
        f"{round(window['start_s'], 1):g}",
        *(format_number(window[name], 6) for name in ("sent", "failed")),
        format_number(ttft["count"], 6),
        *(_latency(ttft, key) for key in ("p50", "p95")),
        _latency(window["itl"], "p99"),
        format_number(window["output_tokens_per_s"], 6),
        *(format_number(window[name], 6) for name in rates),
        _note(window, kinds),
    ]


def _latency(values: dict[str, Any], key: str) -> str:
    value = values[key]
    if value is None:
        return format_number(None, 6)
    return format_number(1e3 * value, 6) + (MARK if values["count"] < _NEEDED[key] else "")


def _note(window: Window, kinds: Sequence[str]) -> str:
    if not window["steady"]:
        return "warm-up"
    if not window["whole"]:
        return f"only {printable(format_duration(window['length_s']), 8)}"
    first, *others = kinds or [""]
    return f"{first} +{len(others)}" if others else first
