"""Whether the server or the generator was measured, and why: the verdict "is it me?".

Promise: a criterion is relative to what was measured (a share of the median gap, of a core, of the time), so that a
fast server is held to a finer measure than a slow one; each has a default with its reason and an option, and what is
found names the worker, the figure and what to do. What the system does not tell is said, never made up.

It reads the `fidelity` of a summary (see `vllm_locust.summary`) and changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_locust.quantity import format_duration, format_list, format_share

UNCERTAIN_SHARE = 0.01
"""How many of the token times may be more uncertain than the limit: with more, a p99 is the generator's."""
WAIT_SHARE = 0.005
"""How much of the time a worker may wait for a core whatever it needs: one with next to nothing to do is not judged."""
FLAGS = {
    "uncertainty": "--max-uncertainty",
    "cpu": "--max-generator-cpu",
    "core_wait": "--max-core-wait",
    "stalled": "--max-stalled",
}
"""The option of each limit."""

_LOAD = "add workers{how} or lower the load"
_CORE = "something else runs on its core: give the generator a core or a machine of its own"
_BLOCKED = "something blocks its event loop: a task or a listener that computes, or waits outside gevent"


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the generator may be off, as shares from 0 to 1."""

    uncertainty: float = 0.05
    """Of the median gap: ten times the error of a percentile, and less than the differences that servers are compared
    by."""
    cpu: float = 0.9
    """Of a core, in any window: a process has one (the GIL), and what queues behind it grows without bound on the way
    to 1."""
    core_wait: float = 0.2
    """Of the time for which a worker needs a core, in waits of 1 ms and longer. An idle machine makes less than 1 %
    of it, a test suite beside it 15 %, a process that never sleeps on the same core 39 % at 2 streams and 45 % at 200:
    whatever the load, both want the core, and one has it."""
    stalled: float = 0.01
    """Of the time, the longest stretch left out: a machine that stalls once is no habit."""
    given: tuple[str, ...] = ()
    """Those that the user set: such a limit is one to meet, the others only say what was measured."""


DEFAULTS = Limits()


@dataclass(frozen=True, slots=True)
class Fault:
    """A limit that the generator exceeded."""

    limit: str
    text: str


def faults(fidelity: dict[str, Any], limits: Limits) -> list[Fault]:
    """Return why the generator, and not only the server, was measured; empty if it was not."""
    workers = fidelity["workers"]
    found = []
    if (fidelity["uncertain_share"] or 0) > UNCERTAIN_SHARE:
        share, lag = format_share(fidelity["uncertain_share"], 1), ""
        if workers:
            worst = max(workers, key=lambda worker: workers[worker]["loop_lag_s"])
            lag = f"{worst} was away for up to {format_duration(workers[worst]['loop_lag_s'])}, "
        gap = f"the {fidelity['gap']['name']} ({format_duration(fidelity['gap']['s'])})"
        text = f"{lag}{share} of token times uncertain by more than {100 * limits.uncertainty:g} % of {gap}"
        found.append(Fault("uncertainty", text))
    for limit, figure, text in (
        ("cpu", "cpu_share_max", "{worker} used up to {share} of a core"),
        ("core_wait", "core_wait_of_need", "{worker} waited for a core for {share} of the time that it needed one"),
        ("stalled", "stalled_share", "the event loop of {worker} stalled for {share} of the time"),
    ):
        above = {w: seen[figure] for w, seen in workers.items() if (seen[figure] or 0) > getattr(limits, limit)}
        if limit == "core_wait":
            above = {w: share for w, share in above.items() if (workers[w]["core_wait_share"] or 0) > WAIT_SHARE}
        if above:
            worst = max(above, key=lambda worker: above[worker])
            others = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
            found.append(Fault(limit, text.format(worker=f"{worst}{others}", share=percent(above[worst]))))
    return found


def line(fidelity: dict[str, Any], limits: Limits) -> str:
    """Say in one line whether the server or the generator was measured, and why."""
    if unknown(fidelity):
        return "not known: nothing tells of the generator"
    if not fidelity["token_events"]:
        return "nothing to judge: no token arrived"
    found = faults(fidelity, limits)
    if not found:
        return f"measured the server: {', '.join(_evidence(fidelity)) or 'no sign of a busy generator'}"
    remedies = _remedies({fault.limit for fault in found}, fidelity["workers"], limits)
    return f"limited by the generator: {', '.join(fault.text for fault in found)}; {'; '.join(remedies)}"


def unknown(fidelity: dict[str, Any]) -> bool:
    """Tell whether nothing was said of any worker, as where another tool was the generator."""
    workers = fidelity["workers"].values()
    return bool(workers) and all(seen["cpu_share"] is None for seen in workers)


def misses(fidelity: dict[str, Any], limits: Limits) -> list[str]:
    """Return what keeps the generator from meeting the limits that the user set."""
    if not fidelity["token_events"]:
        return []
    missed = [
        f"{fault.text} (the limit is {FLAGS[fault.limit]} {100 * getattr(limits, fault.limit):g}%)"
        for fault in faults(fidelity, limits)
        if fault.limit in limits.given
    ]
    unknown = [worker for worker, seen in fidelity["workers"].items() if seen["core_wait_share"] is None]
    if "core_wait" in limits.given and unknown:
        missed.append(f"{FLAGS['core_wait']}: nobody knows how long {format_list(unknown)} waited for a core")
    return missed


def _remedies(found: set[str], workers: dict[str, Any], limits: Limits) -> Iterator[str]:
    """Name what to do about each cause; what comes of another one needs no remedy of its own."""
    if "core_wait" in found:
        yield _CORE
    if "cpu" in found or found == {"uncertainty"}:
        yield _LOAD.format(how=" (`--processes 2`)" if len(workers) == 1 else "")
    alone = not found & {"core_wait", "cpu"}
    if "stalled" in found and (alone or any(_blocked(seen, limits) for seen in workers.values())):
        yield _BLOCKED


def _blocked(seen: dict[str, Any], limits: Limits) -> bool:
    """Tell whether a worker stalled for longer than a lack of CPU or of a core explains."""
    stalled = seen["stalled_share"] or 0
    return stalled > max(limits.stalled, seen["core_wait_share"] or 0) and (seen["cpu_share_max"] or 0) <= limits.cpu


def _evidence(fidelity: dict[str, Any]) -> Iterator[str]:
    workers = fidelity["workers"].values()
    if fidelity["stamped_share"] is not None:
        yield f"{format_share(fidelity['stamped_share'], 1)} of token times stamped by the kernel"
    if fidelity["read_lag"]["p99"] is not None:
        yield f"read lag p99 {format_duration(fidelity['read_lag']['p99'])}"
    if workers:
        yield f"loop away up to {format_duration(max(seen['loop_lag_s'] for seen in workers))}"
        yield f"CPU up to {percent(max(seen['cpu_share_max'] or 0 for seen in workers))}"
        waits = [seen["core_wait_share"] for seen in workers if seen["core_wait_share"] is not None]
        yield f"waited for a core for {percent(max(waits))}" if waits else "wait for a core unknown here"


def percent(share: float) -> str:
    """Print a share in whole percent, a small one with two digits."""
    if 0 < share < 0.001:  # noqa: PLR2004 - more digits would say no more
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"  # noqa: PLR2004 - two digits
