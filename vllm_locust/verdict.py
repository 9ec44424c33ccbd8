"""What keeps a run from being a success.

Promise: each finding names its subject, its measurement and the exit code that it asks for, and none hides another.
Whether the server or the generator was measured is a word of its own (`vllm_locust.fidelity`); it is a finding only
where the user set a limit to it.

It reads a summary (see `vllm_locust.results`) and changes nothing. Texts may hold words of the server:
whoever prints them makes them harmless first (`vllm_locust.report.printable`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_locust import fidelity
from vllm_locust import limit as limits
from vllm_locust.errors import ExitCode
from vllm_locust.fidelity import percent
from vllm_locust.judgement import State
from vllm_locust.quantity import format_count, format_list, format_share

FAILED_SHARE = 0.01
"""More failures than this share miss, where no limit speaks of failures: what SLOs of 99 % allow."""
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

    @property
    def generator_limits(self) -> fidelity.Limits:
        """How far the generator may be off."""


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
    missed = fidelity.misses(summary["fidelity"], ending.generator_limits)
    found += [Finding(ExitCode.NOT_JUDGED, "generator", text) for text in missed]
    found += _missed(summary) if requests else []  # else there is nothing to judge, which has been said
    found += _held_back(total)
    if failed:
        found += _failures(summary)
    elif requests and not ok:
        text = f"none of {format_count(requests)} requests came to an end: run longer (--run-time)"
        found.append(Finding(ExitCode.NOT_JUDGED, "load", text))
    return [*found, *_stability(summary.get("stability"))]


def _held_back(total: dict[str, Any]) -> Iterator[Finding]:
    """Yield that too many requests were due and never sent: nobody gains by leaving out what would have been late."""
    due, dropped = total["scheduled"], total["dropped"]
    if due and dropped > FAILED_SHARE * due:
        text = f"{format_share(dropped, due)} of the requests that were due had not been sent by the end"
        advice = "lower the rate, or raise --max-in-flight, or add workers if the generator was late"
        yield Finding(ExitCode.MISSED, "load", f"{text}: {advice}")


def _stability(judged: dict[str, Any] | None) -> list[Finding]:
    """Return what keeps a run from being stable, where it was to be; the report has all reasons."""
    if judged is None or judged["verdict"] == "stable":
        return []
    first, *others = judged["reasons"]
    more = f", and {len(others)} more reason{'s' if len(others) > 1 else ''}" if others else ""
    code = ExitCode.MISSED if judged["verdict"] == "unstable" else ExitCode.NOT_JUDGED
    return [Finding(code, "stability", f"{judged['verdict']}: {first['text']}{more}")]


def _failures(summary: dict[str, Any]) -> Iterator[Finding]:
    """Yield what there is to say of failures, unless a limit for all parts has the say."""
    if any(limit["metric"] == "failures" and not limit["scope"] for limit in summary["limits"]):
        return
    total = summary["total"]
    failed, ok = total["failed"], total["outcomes"]["ok"]
    if text := all_failed(summary):
        yield Finding(ExitCode.MISSED, "failures", text)
    elif total["failed_share"] > FAILED_SHARE:
        share = format_share(failed, failed + ok)
        text = f"{share} of the requests failed, more than {percent(FAILED_SHARE)}{_most_often(summary)}"
        yield Finding(ExitCode.MISSED, "failures", text)


def _missed(summary: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each limit that was not met: what was measured, what was asked for, and what to do."""
    for limit in summary["limits"]:
        if limit["state"] == State.MET:
            continue
        missed = limit["state"] == State.MISSED
        asked, what, why = limits.parse(limit["limit"]), limit["text"], ""
        if missed and asked.metric == "failures":
            why = _most_often(summary, asked.scope)
        text = f"{what}, the limit is {asked.condition}{why}: {limit['advice']}"
        yield Finding(ExitCode.MISSED if missed else ExitCode.NOT_JUDGED, asked.subject, text)


def all_failed(summary: dict[str, Any]) -> str:
    """Return what there is to say of a run in which every request failed, the server's words included; else nothing."""
    failed, ok = summary["total"]["failed"], summary["total"]["outcomes"]["ok"]
    return f"all {format_count(failed)} requests failed{_most_often(summary)}" if failed and not ok else ""


def exit_code(found: Sequence[Finding]) -> ExitCode:
    """Return the one exit code of a run: doubt (4) beats an early end (1), which beats a miss (3)."""
    return worst({finding.exit_code for finding in found})


def worst(codes: Collection[ExitCode]) -> ExitCode:
    """Return the one that the others give way to, of those that a run can end with."""
    return next((code for code in _PRECEDENCE if code in codes), ExitCode.OK)


def _most_often(summary: dict[str, Any], scenario: str = "") -> str:
    worst = next((kind for kind in summary["failures"] if scenario in ("", kind["scenario"])), None)
    if worst is None:
        return ""
    status = f" (HTTP status {worst['status']})" if worst["status"] not in (0, 200) else ""
    message = f': "{worst["message"]}"' if worst["message"] else ""
    return f", most often {worst['outcome']}{status}{message}"
