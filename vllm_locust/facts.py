"""What a run tells beside its tables, in words: what was run, rates, tokens, remarks; for all reports.

Nothing here computes a number: `vllm_locust.summary` sums up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_locust import bench_run
from vllm_locust.api import Counting
from vllm_locust.figures import Summary
from vllm_locust.overview import cell
from vllm_locust.quantity import NS_PER_S, format_count, format_duration, format_rate, format_share
from vllm_locust.summary import Meta

Facts = list[tuple[str, list[str]]]
"""Texts by subject, which may have none."""

_ABSENT = "–"
_QUEUED_S = 0.01
"""Requests that leave later than this are late: by a cap, or a generator that was away. Of few of them it takes more:
the first ones leave while their worker still gets ready."""
_MOST_REMARKS = 12
"""Lines of what was remarked in the short form; a load shape may change the number of users each second."""


def of_setting(summary: Summary, meta: Meta) -> Facts:
    """Return what was run, against which server, for how long."""
    details = ["" if bench_run.was_read(meta) else f"seed {meta.seed}", f"cache {meta.cache}" if meta.cache else ""]
    started = f", started {meta.started}" if meta.started else ""
    return [
        ("Run", [f"{meta.name} {meta.run}".rstrip() + started]),
        ("Note", [meta.note] if meta.note else []),
        ("Target", [", ".join(filter(None, (meta.target, meta.model and f"model {meta.model}")))]),
        ("Scenario", [", ".join([*_sent(meta), *filter(None, details)])]),
        ("Load", [", ".join(asked(meta)) or _ABSENT]),
        ("Duration", [format_duration(summary["duration_s"]) + _left_out(summary["warmup"])]),
        ("Excerpt", meta.excerpt),
    ]


def of_versions(meta: Meta) -> Facts:
    """Return what it was run with."""
    named = {"vllm-locust": meta.plugin_version, "Locust": meta.locust_version, "Python": meta.python_version}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    scenario = f"scenario {meta.scenario_hash}" if meta.scenario_hash else ""
    return [
        ("Command", [meta.command] if meta.command else []),
        ("Server", [meta.server_config] if meta.server_config else []),
        ("Versions", [part for part in (versions, scenario) if part]),
    ]


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


def _sent(meta: Meta) -> Iterator[str]:
    """Say what is sent, by which user classes, to which endpoints."""
    for scenario in dict.fromkeys(meta.scenarios.values()):
        users = [
            f"{user}: {meta.endpoints.get(user, '?')}" for user, name in meta.scenarios.items() if name == scenario
        ]
        yield f"{scenario or 'bodies of its own'} ({', '.join(users)})"


def asked(meta: Meta) -> Iterator[str]:
    """Say which load was asked for, the most telling thing first."""
    load = meta.load
    stages = "–".join(f"{value:g}" for value in load.get("stages", ()))
    if "arrivals" in load:
        yield from _arrivals(load, stages)
    elif stages:
        yield f"stages of {stages} users, {format_duration(load['stage_s'])} each"
    else:
        if (users := load.get("users")) is not None:
            yield f"{users} user{'' if users == 1 else 's'}"
        if (rate := load.get("spawn_rate")) is not None:
            yield f"{rate} spawned per s"
    if (requests := load.get("requests")) is not None:
        again = load.get("retry_failed")
        yield f"{format_count(requests)} requests" + (f", failed ones again up to {again} times" if again else "")
    if (run_time_s := load.get("run_time_s")) is not None:
        yield f"for {run_time_s} s"
    if (workers := load.get("workers")) is not None:
        yield f"{workers} worker{'' if workers == 1 else 's'}"


def _arrivals(load: dict[str, Any], stages: str) -> Iterator[str]:
    """Say at which rate requests left."""
    process = load["arrivals"] + (f" (burstiness {load['burstiness']:g})" if "burstiness" in load else "")
    if stages:
        yield f"stages of {stages} requests/s, {process}, {format_duration(load['stage_s'])} each"
    elif "request_rate" in load:
        yield f"{load['request_rate']:g} requests/s, {process}"
    else:
        stretches = [*_stretches(load.get("profile", ()))]
        yield f"requests/s: {', '.join(stretches)}; {process}" if stretches else "requests as in a trace"
    if "max_in_flight" in load:
        yield f"at most {format_count(load['max_in_flight'])} in flight"


def _stretches(profile: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say a rate profile in the words in which it is given."""
    for stretch in profile:
        rate, length_ns = f"{stretch['rate_per_s']:g}", stretch["length_ns"]
        length = "" if length_ns is None else format_duration(length_ns / NS_PER_S)
        yield f"to {rate} over {length}" if stretch["ramp"] else f"{rate} for {length}" if length else rate


def _left_out(warmup: Summary | None) -> str:
    """Say what was left out of latencies and rates."""
    if warmup is None:
        return ""
    if warmup["s"] is None:
        return ", all of it warm-up: nothing is left out"
    number = "1 request" if warmup["requests"] == 1 else f"{format_count(warmup['requests'])} requests"
    failed = f" ({format_count(warmup['failed'])} failed)" if warmup["failed"] else ""
    return f" after {format_duration(warmup['s'])} of warm-up, left out with its {number}{failed}"


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
        good = f"; good is an ok request with {'; '.join(limits)}" if limits else ""
        yield f"{format_rate(rates['goodput_per_s'])} requests/s, {share} of all due{good}"


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
    """Say how many streams there were, where it is known: `so_far` does not go through all windows."""
    if any(rates.get(name) is not None for name in ("in_flight_mean", "in_flight_peak")):
        mean, peak = format_rate(rates["in_flight_mean"]), format_count(rates["in_flight_peak"])
        yield f"{mean} in flight on average, {peak} at most (the sum of the workers' peaks)"


def _token_notes(total: Summary, meta: Meta) -> Iterator[str]:
    counts, per_event, by_token = total["counts"], total["tokens"]["tokens_per_event"], total["itl_token"]
    if per_event is not None and f"{per_event:.2f}" != "1.00":
        yield f"{per_event:.2f} tokens per event: gaps are those of events" + (
            f"; by token {cell(by_token, 'p50', 1e3, 6)} (p50) and {cell(by_token, 'p99', 1e3, 6)} ms (p99)"
            if by_token["count"]
            else ""
            if bench_run.was_read(meta)
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
