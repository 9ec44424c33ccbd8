"""Whether a server was steady over a run: `stable`, `unstable` or `inconclusive`, with reasons in windows and numbers.

Promise: a run in which nothing but chance is at work is called unstable at most once in a hundred times
(`vllm_locust.evidence` has the rates, `vllm_locust.spikes` and `vllm_locust.symptoms` have the rules), and a run is
called stable only if a server that was not steady would have been found: `POWER` says how surely.

*Inconclusive* beats *stable*: too few windows, or requests, to find anything; an early end; missing data; a generator
at fault. *Unstable* beats *inconclusive* where what was seen does not hang on what is in doubt: too little data makes a
test blind, not wrong, and the windows before an early end are what they are. But where a worker was lost, rates fell
and requests stayed open because of it; where the load changed in stages, latencies were to change; and where the
generator was at fault, no time that it took counts, but what a server refused, or did not send for a whole window.

Windows of the warm-up are left out, and so are those of which less than nine tenths are left (case 50), and those in
which failed requests were asked again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_locust import spikes, symptoms
from vllm_locust.cell import RETRY, STEADY
from vllm_locust.evidence import FALSE_ALARMS, Evidence, Symptom
from vllm_locust.intervals import Interval, ended, intervals, rows
from vllm_locust.quantity import NS_PER_S, format_list
from vllm_locust.recording import Recording

FALSE_ALARM = sum(FALSE_ALARMS.values())
"""How often a run in which nothing but chance is at work is called unstable, at most."""
POWER = 0.9
"""How surely a window in which everything takes three times as long is found, and a rise by half over the run, of
log-normal times (sigma 0.5) in 30 windows, nine of ten of which have the requests that `spikes.needed` asks for."""
FEWEST_WINDOWS = 10
"""Whole windows after the warm-up without which nothing is called stable."""
_RARE = 0.15
"""A scenario with a smaller share of the requests is named where it has too few to show a spike, and no doubt."""
_PRESENT = 0.5
"""Share of a window for which a worker has to be there to have taken part in it."""
_REMARKS = ("faster", "interplay", "rare")
_SPOILT = {
    "generator": FALSE_ALARMS.keys() - {"failures", "silence"},
    "workers": {"throughput", "backlog", "silence"},
    "load": {"spike", "drift", "variation", "throughput", "backlog"},
}
"""By what is in doubt: which symptoms may come from that."""


def judge(
    recording: Recording, *, missing: Sequence[str], early: bool, faulty: bool, limited: bool = False
) -> dict[str, Any]:
    """Return the verdict on a recording, its reasons, remarks and a row for each window, as plain values.

    What was seen and may come from what is in doubt is `doubtful`, and no reason.
    `missing` are workers without final data; `early` says that the run was stopped before it was over, `faulty` that
    the generator was at fault, and `limited` that a limit of the user's says how many requests may fail.
    """
    every = list(intervals(recording))
    judged = [window for window in every if window.steady and window.whole and not _asks_again(window)]
    evidence = Evidence.of(judged)
    together, sparse = _together(evidence)
    doubts = [*_doubts(evidence, missing, early=early, faulty=faulty), *sparse]
    seen = [*_symptoms(evidence, together, _open_before(every, judged), limited=limited)]
    remarks = [symptom for symptom in [*seen, *doubts] if symptom.kind in _REMARKS]
    doubts = [doubt for doubt in doubts if doubt.kind not in _REMARKS]
    seen = [symptom for symptom in seen if symptom.kind not in _REMARKS]
    spoilt = set().union(*(_SPOILT.get(doubt.kind, set()) for doubt in doubts))
    standing = [symptom for symptom in seen if symptom.kind not in spoilt]
    return {
        "verdict": "unstable" if standing else "inconclusive" if doubts else "stable",
        "judged_windows": [window.index for window in judged],
        "window_s": recording.window_ns / NS_PER_S,
        "reasons": [reason.plain() for reason in [*standing, *doubts]],
        "doubtful": [symptom.plain() for symptom in seen if symptom.kind in spoilt],
        "remarks": [remark.plain() for remark in remarks],
        "windows": rows(every),
    }


def _symptoms(evidence: Evidence, together: dict[str, int], open_before: int, *, limited: bool) -> Iterator[Symptom]:
    yield from symptoms.silence(evidence)
    if not limited:
        yield from symptoms.failures(evidence)
    yield from symptoms.failing_windows(evidence)
    yield from spikes.spikes(evidence, together)
    yield from symptoms.drifts(evidence)
    yield from symptoms.variations(evidence)
    yield from symptoms.throughput(evidence)
    yield from symptoms.backlog(evidence, open_before)
    yield from symptoms.interplay(evidence)


def _asks_again(window: Interval) -> bool:
    return any(key.phase == RETRY for key in window.cells)


def _open_before(every: Sequence[Interval], judged: Sequence[Interval]) -> int:
    """Return how many requests were due and had not ended when the first judged window began."""
    first = judged[0].index if judged else 0
    cells = [cell for window in every[:first] for cell in window.cells.values()]
    due = sum(cell.counters.get("scheduled", 0) - cell.counters.get("dropped", 0) for cell in cells)
    return due - sum(ended(cells).values())


def _together(evidence: Evidence) -> tuple[dict[str, int], list[Symptom]]:
    """Return how many windows of each scenario hold enough requests to show a spike, and what has never enough."""
    number = len(evidence.windows)
    most = max(1, number // FEWEST_WINDOWS)
    requests = {name: evidence.histogram(name, "ttft").count for name in evidence.steady}
    needed = spikes.needed(spikes.allowed_of_one(evidence))
    together, sparse = {}, []
    for name, cells in evidence.steady.items():
        counts = [cell.histograms["ttft"].count if "ttft" in cell.histograms else 0 for cell in cells]
        enough = [size for size in range(1, most + 1) if _fewest(counts, size) >= needed]
        together[name] = min(enough, default=most)
        if not enough:
            rare = requests[name] < _RARE * sum(requests.values())
            text = (
                f"{name}: nine of ten windows have to have {needed} requests to show a spike, "
                f"{f'{most} taken together, ' if most > 1 else ''}and have {_fewest(counts, most)} and more"
            )
            text += ": not judged by itself" if rare else ": send more, or run longer with a longer --window"
            sparse.append(Symptom("rare" if rare else "sparse", text, name))
    return together, sparse


def _fewest(counts: Sequence[int], size: int) -> int:
    """Return how many requests nine of ten windows have, so many taken together."""
    groups = sorted(sum(counts[first : first + size]) for first in range(0, len(counts) - size + 1, size))
    return groups[len(groups) // 10] if groups else 0


def _doubts(evidence: Evidence, missing: Sequence[str], *, early: bool, faulty: bool) -> Iterator[Symptom]:
    if faulty:
        yield Symptom("generator", "the generator was measured, and not the server alone (see Fidelity)")
    if missing:
        yield Symptom("workers", f"the final data of {format_list(missing)} are missing")
    yield from _absences(evidence)
    if early:
        yield Symptom("early", "the run ended early")
    stages = {key.stage for window in evidence.windows for key in window.cells if key.phase == STEADY}
    if len(stages) > 1:
        yield Symptom("load", f"the load changed in {len(stages)} stages: a constant one is judged")
    users = [sum(seen.users_last for seen in window.gauges.values()) for window in evidence.windows]
    if users and max(users) > min(users) and not any(evidence.counted("scheduled")):
        yield Symptom("load", f"there were {min(users)} to {max(users)} users: a constant load is judged")
    if len(evidence.windows) < FEWEST_WINDOWS:
        text = f"{len(evidence.windows)} whole windows after the warm-up, and {FEWEST_WINDOWS} are needed"
        yield Symptom("short", f"{text}: run longer (--run-time)")
    if not evidence.steady:
        yield Symptom("sparse", "no request after the warm-up")


def _absences(evidence: Evidence) -> Iterator[Symptom]:
    """Yield workers that were not there all the time: the load was not the same."""
    workers = sorted({worker for window in evidence.windows for worker in window.gauges})
    for worker in workers:
        absent = [window for window in evidence.windows if not _present(window, worker)]
        if absent:
            text = f"{worker} took part in {len(evidence.windows) - len(absent)} of {len(evidence.windows)} windows"
            yield Symptom("workers", text, windows=tuple(window.index for window in absent))


def _present(window: Interval, worker: str) -> bool:
    seen = window.gauges.get(worker)
    return seen is not None and seen.span_ns >= _PRESENT * (window.end_ns - window.start_ns)
