"""What a run says of the server, and whether it can be believed.

Promise: each finding names its subject, its measurement and the exit code that it asks for; the fidelity line
says whether the server or the generator was measured, and why. Thresholds are relative to what was measured,
so that a fast server is held to a finer measure than a slow one.

It reads a summary (see `vllm_locust.results`) and changes nothing. Texts may hold words of the server:
whoever prints them makes them harmless first (`vllm_locust.report.printable`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_locust.errors import ExitCode
from vllm_locust.quantity import format_count, format_duration, format_list, format_share

FAILED_SHARE = 0.01
"""More failures than this share miss, where no limit speaks of failures: what SLOs of 99 % allow."""
UNCERTAIN_SHARE = 0.05
"""The generator is at fault if one token time in a hundred is uncertain by more than this share of the median
gap: ten times the error of a percentile, and less than the differences that people compare servers by."""
CPU_SHARE = 0.9
"""The generator is at fault if a worker used more than this share of a core in one window: a process has one
core (the GIL), and what queues behind it grows without bound on the way to 1."""

_PRECEDENCE = (ExitCode.NOT_JUDGED, ExitCode.NOT_RUN, ExitCode.MISSED)
"""Missing data make every other verdict doubtful, and an early end what a run says of failures."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps a run from being a success."""

    exit_code: ExitCode
    subject: str
    text: str


class Ending(Protocol):
    """How a run ended; `vllm_locust.summary.Meta` is one."""

    @property
    def ended_early(self) -> bool:
        """Whether it was stopped before it was over."""

    @property
    def missing_workers(self) -> Sequence[str]:
        """Workers whose final data never came."""


def findings(summary: dict[str, Any], ending: Ending) -> list[Finding]:
    """Return everything that keeps the run from being a success; a finding never hides another one."""
    total = summary["total"]
    requests, failed, ok = total["requests"], total["failed"], total["outcomes"]["ok"]
    found = []
    if not requests:
        found.append(Finding(ExitCode.NOT_RUN, "load", "nothing was sent"))
    if ending.missing_workers:
        # Without a request there is nothing to doubt.
        code = ExitCode.NOT_JUDGED if requests else ExitCode.NOT_RUN
        text = f"the final data of {format_list(ending.missing_workers)} are missing: counts are too low"
        found.append(Finding(code, "workers", text))
    if ending.ended_early:
        found.append(Finding(ExitCode.NOT_RUN, "load", "the run ended early"))
    if failed and not ok:
        text = f"all {format_count(failed)} requests failed{_most_often(summary)}"
        found.append(Finding(ExitCode.MISSED, "failures", text))
    elif failed and total["failed_share"] > FAILED_SHARE:
        share = format_share(failed, failed + ok)
        text = f"{share} of the requests failed, more than {_percent(FAILED_SHARE)}{_most_often(summary)}"
        found.append(Finding(ExitCode.MISSED, "failures", text))
    elif requests and not ok:
        text = f"none of {format_count(requests)} requests came to an end: run longer (--run-time)"
        found.append(Finding(ExitCode.NOT_JUDGED, "load", text))
    return found


def exit_code(found: Sequence[Finding]) -> ExitCode:
    """Return the one exit code of a run: doubt (4) beats an early end (1), which beats a miss (3)."""
    codes = {finding.exit_code for finding in found}
    return next((code for code in _PRECEDENCE if code in codes), ExitCode.OK)


def _most_often(summary: dict[str, Any]) -> str:
    if not summary["failures"]:
        return ""
    worst = summary["failures"][0]
    status = f" (HTTP status {worst['status']})" if worst["status"] else ""
    message = f': "{worst["message"]}"' if worst["message"] else ""
    return f", most often {worst['outcome']}{status}{message}"


def generator_faults(summary: dict[str, Any]) -> list[str]:
    """Return why the generator, and not only the server, was measured; empty if it was not."""
    fidelity, (gap_s, gap_name) = summary["fidelity"], _typical_gap(summary["total"])
    workers, faults = fidelity["workers"], []
    uncertainty_s = fidelity["uncertainty"]["p99"]
    if uncertainty_s is not None and gap_s is not None and uncertainty_s > UNCERTAIN_SHARE * gap_s:
        uncertain, gap = format_duration(uncertainty_s), format_duration(gap_s)
        faults.append(f"token times uncertain by {uncertain} (p99) at a {gap_name} of {gap}")
        if workers:
            worst = max(workers, key=lambda worker: workers[worker]["loop_lag_s"])
            faults.append(f"{worst} was away for up to {format_duration(workers[worst]['loop_lag_s'])}")
    for worker, seen in workers.items():
        if (seen["cpu_share_max"] or 0) > CPU_SHARE:
            faults.append(f"{worker} used up to {_percent(seen['cpu_share_max'])} of a core")
    return faults


def fidelity_line(summary: dict[str, Any]) -> str:
    """Say in one line whether the server or the generator was measured, and why."""
    if not summary["total"]["tokens"]["events"]:
        return "nothing to judge: no token arrived"
    faults = generator_faults(summary)
    if faults:
        remedy = "add workers (`--processes 2`) or lower the load"
        return f"limited by the generator: {', '.join(faults)}; {remedy}"
    return f"measured the server: {', '.join(_evidence(summary['fidelity']))}"


def _evidence(fidelity: dict[str, Any]) -> list[str]:
    workers, evidence = fidelity["workers"].values(), []
    if fidelity["stamped_share"] is not None:
        evidence.append(f"{format_share(fidelity['stamped_share'], 1)} of token times stamped by the kernel")
    if fidelity["read_lag"]["p99"] is not None:
        evidence.append(f"read lag p99 {format_duration(fidelity['read_lag']['p99'])}")
    if workers:
        evidence.append(f"loop away up to {format_duration(max(seen['loop_lag_s'] for seen in workers))}")
        evidence.append(f"CPU up to {_percent(max(seen['cpu_share_max'] or 0 for seen in workers))}")
    return evidence or ["no sign of a busy generator"]


def _typical_gap(total: dict[str, Any]) -> tuple[float | None, str]:
    """Return what uncertainty is held against: the median gap, or what is left where that is 0 or absent."""
    for statistic, name in (("p50", "median gap"), ("mean", "mean gap")):
        if total["itl"][statistic]:
            return total["itl"][statistic], name
    return total["ttft"]["p50"], "median TTFT"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
