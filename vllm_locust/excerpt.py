"""A part of a run that is over: some of its windows, one of its scenarios; every report of a run is one of a part, too.

Promise: parts that share out the windows of a run add up to it. A part is made of whole windows, those that lie within
what was asked for. What is in it is what happened then: a request that was sent before may have ended in it.

What is said of the whole run is not said of its parts: the verdict on stability, limits on all scenarios where one is
chosen, and slow requests beyond the ten slowest of the run.
"""

from dataclasses import replace

from vllm_locust.errors import InputError
from vllm_locust.limit import parse
from vllm_locust.quantity import NS_PER_S, duration_s, format_duration, format_list
from vllm_locust.recording import Recording, load
from vllm_locust.results import Run


def excerpt(run: Run, *, since: str | None = None, until: str | None = None, scenario: str | None = None) -> Run:
    """Return the windows between two instants since the start of the run, and of a scenario; absent means all.

    Raises `InputError` where there is no such window or scenario.
    """
    recording, names = run.recording, [*run.summary["scenarios"]]
    if scenario is not None and scenario not in names:
        raise InputError(f"--scenario: {scenario!r} is not in this run; there are {format_list(names)}")
    length_ns = recording.bounds_ns(recording.window_count - 1)[1] if recording.window_count else 0
    since_ns = 0 if since is None else round(duration_s(since, where="--from") * NS_PER_S)
    until_ns = length_ns if until is None else round(duration_s(until, where="--to") * NS_PER_S)
    bounds_ns = {index: recording.bounds_ns(index) for index in recording.windows}
    windows = [index for index, (begin, end) in bounds_ns.items() if since_ns <= begin and end <= until_ns]
    if not windows:
        raise InputError(
            f"--from {since or '0s'} --to {until or format_duration(length_ns / NS_PER_S)}: no whole window in it; "
            f"the run has {len(bounds_ns)} of {format_duration(recording.window_ns / NS_PER_S)}, "
            f"to {format_duration(length_ns / NS_PER_S)}"
        )
    begin_ns, end_ns = bounds_ns[windows[0]][0], bounds_ns[windows[-1]][1]
    last = None if until is None else windows[-1]
    part = _part(recording, windows[0], last, begin_ns, end_ns, scenario)
    shown = [format_duration(ns / NS_PER_S) for ns in (begin_ns, end_ns, length_ns)]
    what = f"a part of the run, {shown[0]} to {shown[1]} of {shown[2]} in whole windows"
    limits = [text for text in run.meta.limits if scenario is None or parse(text).scope == scenario]
    meta = replace(
        run.meta,
        parts=run.meta.parts if scenario is None else [scenario],
        limits=limits,
        stability=False,
        remarks=[what + (f", scenario {scenario}" if scenario else ""), *run.meta.remarks],
    )
    return Run.of(part, meta)


def _part(  # noqa: PLR0913, PLR0917 - what is cut out
    recording: Recording, first: int, last: int | None, begin_ns: int, end_ns: int, scenario: str | None
) -> Recording:
    """Return these windows of a recording; without a last one, what came after the stop is in it, too."""
    saved = recording.save()

    def within(since_ns: int, until_ns: int) -> bool:
        return since_ns <= (until_ns if last is None else end_ns) and until_ns >= begin_ns

    def chosen(name: str) -> bool:
        return scenario in (None, name)

    part = load(
        saved
        | {
            "windows": [
                window | {"cells": [cell for cell in window["cells"] if chosen(cell["key"][0])]}
                for window in saved["windows"]
                if first <= window["index"] and (last is None or window["index"] <= last)
            ],
            "gauges": [
                gauges for gauges in saved["gauges"] if first <= gauges[1] and (last is None or gauges[1] <= last)
            ],
            "failures": [
                kind
                for kind in saved["failures"]
                if chosen(kind["scenario"]) and within(kind["first_ns"], kind["last_ns"])
            ],
            "marks": [mark for mark in saved["marks"] if within(mark["at_ns"], mark["at_ns"])],
            "length_ns": saved["length_ns"] if last is None else end_ns,
        }
    )
    part.slowest = {
        place: [slow for slow in slows if chosen(slow.scenario) and within(slow.at_ns, slow.at_ns)]
        for place, slows in recording.slowest.items()
    }
    part.begin_ns = begin_ns
    return part
