"""What a run tells beside its tables, in words: rates, streams, tokens and remarks; for report, tab and page.

Nothing here computes a number: `vllm_locust.summary` sums up.
"""

from collections.abc import Iterator, Sequence

from vllm_locust.api import Counting
from vllm_locust.figures import Summary
from vllm_locust.overview import cell
from vllm_locust.quantity import format_count, format_duration, format_rate, format_share
from vllm_locust.summary import Meta

Facts = list[tuple[str, list[str]]]
"""Texts by subject, which may have none."""

_ABSENT = "–"
_QUEUED_S = 0.01
"""Requests that leave later than this are late: by a cap, or a generator that was away. Of few of them it takes more:
the first ones leave while their worker still gets ready."""
_MOST_REMARKS = 12
"""Lines of what was remarked in the short form; a load shape may change the number of users each second."""


def of_load(summary: Summary, meta: Meta) -> Facts:
    """Return what is said of requests and streams."""
    total, rates = summary["total"], summary["total"]["rates"]
    return [
        ("Rates", [_rates(rates)]),
        ("Goodput", [*_goodput(rates, meta.goodput)]),
        ("Queue", [*_queue(total)]),
        ("Streams", [*_streams(rates)]),
        ("Retries", [*_retries(summary["retry"])]),
    ]


def of_measurement(summary: Summary, meta: Meta, *, full: bool = False) -> Facts:
    """Return what is said of tokens, and what was remarked; all of it only in `full`."""
    return [
        ("Tokens", [*_token_notes(summary["total"], meta)]),
        ("Counts", [_counts(summary["total"])] if full else []),
        ("Remarks", [*(meta.remarks if full else _few(meta.remarks)), *_remarks(summary)]),
    ]


def _rates(rates: Summary) -> str:
    failed, offered = rates["output_tokens_failed_per_s"], rates["offered_per_s"]
    requests = f"{format_rate(rates['request_per_s'])} requests/s ok, {format_rate(rates['sent_per_s'])} sent/s"
    if offered is not None:
        requests = (
            f"requests/s: {format_rate(offered)} offered, {format_rate(rates['sent_per_s'])} achieved (sent), "
            f"{format_rate(rates['request_per_s'])} completed (ok)"
        )
    return (
        f"{requests}; "
        f"{format_rate(rates['input_tokens_per_s'])} input tok/s, "
        f"{format_rate(rates['output_tokens_per_s'])} output tok/s"
        + (f" ({format_rate(failed)} of them of failed requests)" if failed else "")
    )


def _goodput(rates: Summary, limits: Sequence[str]) -> Iterator[str]:
    """Say how many requests were good, and what that is; nothing where nobody asked."""
    if rates["goodput_per_s"] is not None:
        share = _ABSENT if rates["goodput_share"] is None else format_share(rates["goodput_share"], 1)
        good = f"good is an ok request with {'; '.join(limits)}"
        yield f"{format_rate(rates['goodput_per_s'])} requests/s, {share} of all due; {good}"


def _queue(total: Summary) -> Iterator[str]:
    """Say what requests waited for before they left, where that is worth a word."""
    queue, due = total["queue"], total["ttft_scheduled"]
    if queue["count"] and (queue["p95"] >= _QUEUED_S or queue["max"] >= 10 * _QUEUED_S):
        yield (
            f"sent up to {format_duration(queue['max'])} late (p95 {format_duration(queue['p95'])}); "
            f"from when it was due, TTFT p95 {format_duration(due['p95'])}, p99 {format_duration(due['p99'])}"
        )
    if dropped := total["dropped"]:
        whom = "1 request was" if dropped == 1 else f"{format_count(dropped)} requests were"
        yield f"{whom} due and not sent by the end; limits count {'it' if dropped == 1 else 'them'} as failed"


def _retries(retry: Summary) -> Iterator[str]:
    if number := retry["requests"]:
        whom = "1 request" if number == 1 else f"{format_count(number)} requests"
        yield (
            f"{whom} asked again what had failed, counted apart: "
            f"{format_count(retry['ok'])} ok, {format_count(retry['failed'])} failed"
        )


def _streams(rates: Summary) -> Iterator[str]:
    """Say how many streams there were, of a run that is over: `so_far` does not go through all windows."""
    if "in_flight_mean" in rates:
        mean, peak = format_rate(rates["in_flight_mean"]), format_count(rates["in_flight_peak"])
        yield f"{mean} in flight on average, {peak} at most (the sum of the workers' peaks)"


def _token_notes(total: Summary, meta: Meta) -> Iterator[str]:
    counts, per_event, by_token = total["counts"], total["tokens"]["tokens_per_event"], total["itl_token"]
    if per_event is not None and f"{per_event:.2f}" != "1.00":
        yield f"{per_event:.2f} tokens per event: gaps are those of events" + (
            f"; by token {cell(by_token, 'p50', 1e3, 6)} (p50) and {cell(by_token, 'p99', 1e3, 6)} ms (p99)"
            if by_token["count"]
            else "; --continuous-usage asks each for its tokens"
        )
    if meta.counting != Counting() and total["tokens"]["events"] and not by_token["count"]:
        yield "events were asked how many tokens they carry, and told nothing: itl_token is missing"
    if counts["zero_gaps"]:
        yield f"{format_share(counts['zero_gaps'], total['itl']['count'])} of the gaps are zero"
    if counts["estimated"]:
        yield f"{counts['estimated']:,} requests without usage: their events are counted as tokens"
    if counts["coalesced"]:
        share = format_share(counts["coalesced"], sum(total["outcomes"].values()))
        yield (
            f"{counts['coalesced']:,} requests ({share}) were gathered on their way (a buffering proxy?) and came in "
            "two pieces at most: their gaps, tpot and itl_max are left out"
        )
    if counts["short_outputs"]:
        yield f"{counts['short_outputs']:,} answers shorter than asked for"


def _counts(total: Summary) -> str:
    finish = {f"finish {reason}": number for reason, number in total["finish"].items()}
    return ", ".join(f"{name} {number:,}" for name, number in (total["counts"] | finish).items())


def _few(remarks: list[str]) -> list[str]:
    """Return the first and the last remarks where there are many: the last ones may tell of what is missing."""
    most = _MOST_REMARKS // 2
    left = len(remarks) - 2 * most
    return remarks if left <= 1 else [*remarks[:most], f"{format_count(left)} more remarks: --full", *remarks[-most:]]


def _remarks(summary: Summary) -> Iterator[str]:
    if reconnects := summary["total"]["counts"]["reconnects"]:
        whom = "1 request was" if reconnects == 1 else f"{reconnects:,} requests were"
        yield f"{whom} sent on a fresh connection, since the server had closed the idle one"
    for worker, seen in summary["fidelity"]["workers"].items():
        if seen["late"]:
            yield f"{worker}: {seen['late']:,} samples came late and count in a later window"
        if seen["plugin_errors"]:
            yield f"{worker}: {seen['plugin_errors']:,} errors of the plugin, see its log"
