"""An excerpt of a run: some of its windows, or some of its scenarios, as a run of its own that every report reads.

Promise: excerpts that part a run add up to all of it. Windows are the resolution: an instant is moved to the nearest
end of one, and times go on counting from the start of the whole run. A sample is in the window in which it happened, so
a request counts as sent in one excerpt and as ended, maybe, in the next.

What is known of the whole run alone stays what it is there: remarks, missing workers, an early end. It is not judged
for stability: the promise on false alarms is for a run, and not for the part of it that somebody has picked out.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec

from vllm_locust import limit as limits
from vllm_locust import recording as recordings
from vllm_locust.errors import InputError
from vllm_locust.figures import ended
from vllm_locust.quantity import NS_PER_S, format_list
from vllm_locust.recording import Failure, Recording, WireCell
from vllm_locust.results import Run
from vllm_locust.slowest import each
from vllm_locust.summary import Meta

_Kinds = dict[tuple[str, str, str, int], tuple[int, int]]
"""First and last window of each kind of failure."""


def excerpt(
    run: Run, *, since_s: float | None = None, until_s: float | None = None, scenarios: Collection[str] = ()
) -> Run:
    """Return the part of a run from an instant to another, of some scenarios; what is not given leaves nothing out.

    Raises `InputError` where there is nothing between them, or no scenario of a name.
    """
    unknown = [name for name in scenarios if name not in run.summary["scenarios"]]
    if unknown:
        known = format_list(run.summary["scenarios"])
        raise InputError(f"--scenario {unknown[0]}: the run has no such scenario; it has {known}")
    since_ns, until_ns = _stretch(run.recording, since_s, until_s)
    part = _part(run.recording, since_ns, until_ns, scenarios)
    return Run.of(part, _meta(run, since_ns, until_ns, scenarios))


def _ends_ns(recording: Recording) -> list[int]:
    """Return where windows begin, and where the last one ends."""
    found = [recording.bounds_ns(index) for index in recording.windows]
    return [*(since_ns for since_ns, _ in found), found[-1][1]] if found else [0]


def _stretch(recording: Recording, since_s: float | None, until_s: float | None) -> tuple[int, int]:
    """Return the ends of windows that are nearest to two instants."""
    ends_ns = _ends_ns(recording)
    first_ns, last_ns = ends_ns[0], ends_ns[-1]
    since_ns = first_ns if since_s is None else round(since_s * NS_PER_S)
    until_ns = last_ns if until_s is None else round(until_s * NS_PER_S)
    given = " ".join(
        f"{flag} {value:g}s" for flag, value in (("--from", since_s), ("--to", until_s)) if value is not None
    )
    of = f"the run is {_told(last_ns)} long"
    if since_ns >= until_ns and given:
        raise InputError(f"{given}: nothing is between them; {of}, and times count from its start")
    if until_ns > last_ns + recording.window_ns / 2:
        raise InputError(f"{given}: {of}, and times count from its start")
    since, until = (min(ends_ns, key=lambda end_ns: abs(end_ns - at_ns)) for at_ns in (since_ns, until_ns))
    if since >= until and given:
        near = next((pair for pair in pairwise(ends_ns) if pair[0] <= since_ns < pair[1]), (first_ns, last_ns))
        window = " to ".join(map(_told, near))
        raise InputError(f"{given}: less than a window, which are the finest there is; the nearest is {window}")
    return since, until


def _part(recording: Recording, since_ns: int, until_ns: int, scenarios: Collection[str]) -> Recording:
    """Return a recording of what happened between two ends of windows; what came after the stop belongs to the end."""
    to_the_end = until_ns == _ends_ns(recording)[-1]
    first, grid, frame = recording.grid.index(since_ns), recording.grid, recording.save_frame()
    windows = {
        window["index"]: [cell for cell in window["cells"] if _of(cell.key.scenario, scenarios)]
        for window in recording.save_windows()
        if window["index"] >= first and (to_the_end or window["index"] < grid.count(until_ns))
    }

    def within(at_ns: int) -> bool:
        return at_ns >= since_ns and (to_the_end or at_ns < until_ns)

    slowest = (slow for slow in each(recording.slowest) if within(slow.at_ns) and _of(slow.scenario, scenarios))
    return recordings.load(
        {
            **frame,
            "begin_ns": since_ns,
            "length_ns": recording.length_ns if to_the_end else until_ns,
            "windows": [{"index": index, "cells": cells} for index, cells in windows.items()],
            "gauges": [gauges for gauges in frame["gauges"] if gauges[1] in windows],
            "failures": msgspec.to_builtins([*_failures(recording, _kinds(windows))]),
            "slowest": msgspec.to_builtins([*slowest]),
            "marks": msgspec.to_builtins([mark for mark in recording.marks if within(mark.at_ns)]),
        }
    )


def _of(name: str, scenarios: Collection[str]) -> bool:
    return not scenarios or name in scenarios


def _kinds(windows: Mapping[int, Sequence[WireCell]]) -> _Kinds:
    """Return in which windows each kind of outcome occurred first and last."""
    found: _Kinds = {}
    for index, cells in windows.items():
        for cell in cells:
            for outcome, status, _ in ended(cell.counters):
                kind = (cell.key.scenario, cell.key.endpoint, outcome, status)
                found[kind] = found.get(kind, (index, index))[0], index
    return found


def _failures(recording: Recording, kinds: _Kinds) -> Iterator[Failure]:
    """Yield the failures that occurred, with times of their own, or else with those of the windows they occurred in."""
    for kind, known in recording.failures.items():
        if kind in kinds:
            (since_ns, _), (_, until_ns) = (recording.bounds_ns(index) for index in kinds[kind])
            first_ns = max(known.first_ns, since_ns)
            last_ns = max(first_ns, min(known.last_ns, until_ns))
            yield msgspec.structs.replace(known, first_ns=first_ns, last_ns=last_ns)


def _meta(run: Run, since_ns: int, until_ns: int, scenarios: Collection[str]) -> Meta:
    """Say which part it is, and leave out what is asked of other parts."""
    meta = run.meta
    return replace(
        meta,
        parts=[part for part in meta.parts if _of(part, scenarios)],
        limits=[text for text in meta.limits if _of(limits.parse(text, where="limits").scope, scenarios)],
        goodput=[
            text for text in meta.goodput if not (scope := limits.parse_good(text)[0].scope) or _of(scope, scenarios)
        ],
        stability=False,
        excerpt=[*_words(run, since_ns, until_ns, scenarios)],
    )


def _words(run: Run, since_ns: int, until_ns: int, scenarios: Collection[str]) -> Iterator[str]:
    whole_ns = _ends_ns(run.recording)[-1]
    since, until, whole = map(_told, (since_ns, until_ns, whole_ns))
    names = f", scenario {format_list(scenarios)}" if scenarios else ""
    yield f"{since} to {until} of {whole}, in whole windows{names}"
    if scenarios:
        yield "streams in flight and workers are those of all scenarios, and limits on these are left out"
    yield "remarks are the whole run's; of its slowest requests, those that fall in here are shown"
    if run.meta.stability:
        yield "stability is judged of a whole run alone"


def _told(at_ns: int) -> str:
    return f"{round(at_ns / NS_PER_S, 2):g} s"
