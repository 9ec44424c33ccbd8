"""A request that has ended → the samples and counters that it adds to a cell.

What failures do to the numbers is decided here: `ttft` and gaps, which were taken while the request ran, stay; `tpot`,
`e2el` and `output_tokens` come from ok requests alone; a request that the end of the run cut leaves its age.
"""

from collections.abc import Iterator
from itertools import pairwise

from vllm_locust import slowest
from vllm_locust.cell import Cell
from vllm_locust.limit import Goodput
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure
from vllm_locust.slowest import Lists, Slow
from vllm_locust.timeline import CUT, Outcome, Timeline

_FINISH_REASONS = ("stop", "length", "tool_calls", "function_call", "content_filter")
"""Those of the dialect; what else servers say is counted as `other`, for they say anything."""


def count_end(timeline: Timeline, cell: Cell, goodput: Goodput | None = None) -> None:
    """Count an ended request, as a good one where something says what that is, and it is."""
    outcome = timeline.outcome
    cell.count(f"outcome|{outcome}|{timeline.status}")
    for name in ("heartbeats", "comments", "reconnects"):
        if number := getattr(timeline, name):
            cell.count(name, number)
    _count_tokens(timeline, cell)
    if timeline.ttfc_ns is not None:
        cell.histogram("ttfc").add(timeline.ttfc_ns)
    longest_ns = longest_gap_ns(timeline)
    if longest_ns is not None:
        cell.histogram("itl_max").add(longest_ns)
    if timeline.coalesced:
        cell.count("coalesced")
    if goodput is not None and is_good(timeline, goodput):
        cell.count("good")
    if outcome is Outcome.OK:
        _count_ok(timeline, cell)
    elif outcome is Outcome.CANCELLED:
        _count_cut(timeline, cell)
    elif timeline.first_ns is None:
        cell.count("failed_without_token")


def is_good(timeline: Timeline, goodput: Goodput) -> bool:
    """Tell whether an ended request is ok and met every limit of its part; what it has no value of, it has met.

    Of several choices the slowest has to.
    """
    if timeline.outcome is not Outcome.OK:
        return False
    for limit in goodput.of(timeline.scenario):
        value_ns = _worst_ns(timeline, limit.metric)
        if value_ns is not None and not limit.met_by(value_ns / NS_PER_S):
            return False
    return True


def _worst_ns(timeline: Timeline, metric: str) -> int | None:
    """Return the value of a metric of one ended request, absent without one."""
    name, of_schedule = metric.removesuffix("_scheduled"), metric.endswith("_scheduled")
    match name:
        case "tpot":
            return max(timeline.tpots_ns(), default=None)
        case "itl_max":
            return longest_gap_ns(timeline)
    value_ns = timeline.ttft_ns if name == "ttft" else timeline.e2el_ns
    if not of_schedule:
        return value_ns
    if value_ns is None or timeline.sent_ns is None or timeline.scheduled_ns is None:
        return None
    return value_ns + timeline.sent_ns - timeline.scheduled_ns


def failure(timeline: Timeline, at_ns: int) -> Failure:
    """Return what is kept of a failed request, which ended `at_ns` after the start."""
    return Failure(
        scenario=timeline.scenario,
        endpoint=timeline.endpoint,
        outcome=str(timeline.outcome),
        status=timeline.status,
        first_ns=at_ns,
        last_ns=at_ns,
        message=timeline.message,
    )


def note_slow(timeline: Timeline, lists: Lists, worker: str, start_ns: int) -> None:
    """Keep an ended request if its first token or longest gap is among the slowest; the epoch began at `start_ns`."""
    for metric, value_ns, at_ns in _slow_points(timeline):
        if slowest.admits(lists, timeline.scenario, metric, value_ns):
            slow = Slow(
                scenario=timeline.scenario,
                endpoint=timeline.endpoint,
                metric=metric,
                value_ns=value_ns,
                at_ns=max(0, at_ns - start_ns),
                worker=worker,
                request_id=timeline.request_id,
                input_tokens=timeline.input_tokens,
                output_tokens=timeline.output_tokens,
                in_flight=timeline.in_flight,
                outcome=str(timeline.outcome),
            )
            slowest.add(lists, slow)


def _slow_points(timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """Yield metric, value and the instant at which it came to its end."""
    if timeline.ttft_ns is not None and timeline.first_ns is not None:
        yield "ttft", timeline.ttft_ns, timeline.first_ns
    longest_ns = longest_gap_ns(timeline)
    if longest_ns is not None and timeline.done_ns is not None:
        closed_ns = timeline.longest_gap_end_ns if longest_ns == timeline.longest_gap_ns else None
        yield "itl_max", longest_ns, closed_ns or timeline.done_ns


def _count_tokens(timeline: Timeline, cell: Cell) -> None:
    received = timeline.events + timeline.bundled
    missing = timeline.output_tokens - received
    if missing > 0:
        cell.count("tokens_received", missing)
        received += missing
    elif missing < 0:
        cell.count("tokens_surplus", -missing)
    if timeline.outcome is not None and timeline.outcome.failed and received:
        cell.count("tokens_failed", received)
    if timeline.input_tokens is not None:
        cell.histogram("input_tokens").add(timeline.input_tokens)
    if timeline.cached_tokens is not None:
        cell.histogram("cached_tokens").add(timeline.cached_tokens)


def longest_gap_ns(timeline: Timeline) -> int | None:
    """Return the largest gap; a stream that was waited for in vain has an open one.

    Gaps that were not harvested count as well: where statistics were reset while it ran, nobody harvests the rest.
    """
    if timeline.coalesced or timeline.last_ns is None or timeline.done_ns is None:
        return None
    gaps_ns = [b - a for choice in timeline.choices.values() for a, b in pairwise(choice.times)]
    if timeline.longest_gap_ns is not None:
        gaps_ns.append(timeline.longest_gap_ns)
    if timeline.outcome in (Outcome.IDLE_TIMEOUT, Outcome.TOKEN_TIMEOUT, Outcome.TOTAL_TIMEOUT):
        gaps_ns.append(timeline.done_ns - timeline.last_ns)
    return max(gaps_ns, default=None)


def _count_ok(timeline: Timeline, cell: Cell) -> None:
    e2el_ns = timeline.e2el_ns
    if e2el_ns is not None:
        cell.histogram("e2el").add(e2el_ns)
        if timeline.scheduled_ns is not None and timeline.sent_ns is not None:
            cell.histogram("e2el_scheduled").add(max(0, e2el_ns + timeline.sent_ns - timeline.scheduled_ns))
    for tpot_ns in timeline.tpots_ns():
        cell.histogram("tpot").add(tpot_ns)
    cell.histogram("output_tokens").add(timeline.output_tokens)
    if timeline.estimated:
        cell.count("estimated")
    if timeline.expected_tokens is not None and timeline.output_tokens < timeline.expected_tokens:
        cell.count("short_outputs")
    for reason in timeline.finish_reasons.values():
        cell.count(f"finish|{reason if reason in _FINISH_REASONS else 'other'}")


def _count_cut(timeline: Timeline, cell: Cell) -> None:
    if timeline.sent_ns is None or timeline.done_ns is None:
        return
    age_ns = timeline.done_ns - timeline.sent_ns
    if timeline.first_ns is None:
        cell.histogram(CUT["ttft"]).add(age_ns)
    cell.histogram(CUT["e2el"]).add(age_ns)
