"""Signs that a server was not steady, beside spikes: each rule looks for one, and says where it is seen, in numbers.

`drift`: the windows' geometric means of `ttft`, `itl_max` or `tpot` rise over the run (`chance.concordance`, the trend
    test of Mann and Kendall: by ranks, so one bad window is no trend), and from its first to its last third by
    `DRIFT` at least. A fall is a remark.
`variation`: the windows' geometric means of `tpot` scatter with a coefficient of variation above `VARIATION`, after
    what the few samples of a window explain is taken off (Fisher's component of variance between groups, of
    logarithms), and that is no chance (`chance.variance_ratio_above`).
`failures`: more than `FAILED` of the requests failed, of all, or, with more certainty than chance leaves, of a
    scenario; or more failed in a window than the same law of dealing out allows, and more than `FAILED` of it.
`throughput`: output tokens or completed requests per second fall over the run (the trend test) by `DRIFT` at least,
    and twice as much as what was asked for: arrivals in an open loop, else users.
`backlog`: requests that were due and have not ended become more over the run (the trend test), by a quarter at
    least; or more than `FAILED` of the arrivals were dropped. Open loop alone.
`silence`: a window with no token, or less than a tenth (`QUIET`) of the usual number, although streams were in flight
    for half as long as usual, half of a window, and twice as long as 95 % of the requests wait for a token; or a stream
    that had been silent for a window, and twice as long as any other request waited. All requests of a window would
    have to be among the slowest at once: no chance to speak of.

Trends of rates and backlogs are tested over stretches of at least twice
the time that a request takes, since neighbours share requests.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from vllm_locust import chance
from vllm_locust.cell import Cell
from vllm_locust.evidence import DRIFTING, FALSE_ALARMS, Evidence, Symptom, of, when
from vllm_locust.histogram import Histogram
from vllm_locust.intervals import Interval, ended
from vllm_locust.quantity import NS_PER_S, format_duration, format_rate, format_share

DRIFT = 0.10
VARIATION = 0.20
FAILED = 0.01
"""As `vllm_locust.verdict.FAILED_SHARE`, without which a run is no success."""
GROWTH = 0.25
QUIET = 0.1
FEWEST = 8
"""Windows or stretches without which no order of them is remarkable enough."""
_FINEST = 1e-6
"""Variance of logarithms below which a histogram cannot tell times apart."""


# Drift and variation


def drifts(evidence: Evidence) -> Iterator[Symptom]:
    """Yield scenarios and metrics that become slower; those that become faster are of the kind `faster`."""
    allowed = FALSE_ALARMS["drift"] / 2 / max(len(DRIFTING) * len(evidence.steady), 1)
    for scenario in evidence.steady:
        for metric in DRIFTING:
            found = [(w, _log_mean(h)) for w, h in evidence.samples(scenario, metric) if h.count]
            if len(found) < FEWEST:
                continue
            times, levels = [float(w.index) for w, _ in found], [level for _, level in found]
            early, late = _thirds(levels)
            for kind, sign, verb in (("drift", 1, "rose"), ("faster", -1, "fell")):
                _, likely = chance.concordance(times, [sign * level for level in levels])
                if likely <= allowed and sign * (late - early) >= math.log1p(DRIFT):
                    first, last = (format_duration(math.exp(level) / NS_PER_S) for level in (early, late))
                    text = f"{of(metric, scenario)} {verb} from {first} in the first third to {last} in the last"
                    yield Symptom(kind, f"{text} (geometric means)", scenario, metric)


def variations(evidence: Evidence) -> Iterator[Symptom]:
    """Yield scenarios of which the time per output token changes from window to window."""
    allowed = FALSE_ALARMS["variation"] / max(len(evidence.steady), 1)
    for scenario in evidence.steady:
        found = [(w, h.count, *_log_mean_and_squares(h)) for w, h in evidence.samples(scenario, "tpot") if h.count]
        groups, number = len(found), sum(count for _, count, _, _ in found)
        if groups < FEWEST or number <= groups:
            continue
        mean = sum(count * level for _, count, level, _ in found) / number
        within = max(sum(squares for *_, squares in found) / (number - groups), _FINEST)
        between = sum(count * (level - mean) ** 2 for _, count, level, _ in found) / (groups - 1)
        size = (number - sum(count**2 for _, count, _, _ in found) / number) / (groups - 1)
        variation = math.sqrt(math.expm1(max(0.0, between - within) / size))
        likely = chance.variance_ratio_above(between / within, groups - 1, number - groups)
        if variation > VARIATION and likely <= allowed:
            usual = statistics.median(level for _, _, level, _ in found)
            off = [
                window
                for window, count, level, _ in found
                if abs(level - usual) > max(math.log1p(VARIATION), 3 * math.sqrt(within / count))
            ]
            text = (
                f"{of('tpot', scenario)} varies by {100 * variation:.0f} % from window to window (coefficient of "
                f"variation of geometric means, chance taken off){f', most {when(off)}' if off else ''}"
            )
            yield Symptom("variation", text, scenario, "tpot", tuple(window.index for window in off))


def _log_mean(histogram: Histogram) -> float:
    """Return the mean logarithm, in which no single slow request weighs much; a zero counts as a nanosecond."""
    return _log_mean_and_squares(histogram)[0]


def _log_mean_and_squares(histogram: Histogram) -> tuple[float, float]:
    """Return the mean logarithm, and the sum of the squared distances from it."""
    values, counts = histogram.occupied()
    logs = np.log(values.clip(1))
    mean = float((counts * logs).sum()) / histogram.count
    return mean, float((counts * (logs - mean) ** 2).sum())


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last third."""
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


# Failures


def failures(evidence: Evidence) -> Iterator[Symptom]:
    """Yield too many failures: of all requests, or of a scenario."""
    failed, number = _failed([cell for window in evidence.windows for cell in window.cells.values()])
    if failed > FAILED * number:
        yield Symptom("failures", f"{format_share(failed, number)} of the requests failed")
    allowed = FALSE_ALARMS["failures"] / 2 / max(len(evidence.steady), 1)
    for scenario, cells in evidence.steady.items():
        failed, number = _failed(cells)
        if failed > FAILED * number and chance.binomial_at_least(failed, number, FAILED) <= allowed:
            text = f"{format_share(failed, number)} of the requests of {scenario} failed"
            yield Symptom("failures", text, scenario)


def failing_windows(evidence: Evidence) -> Iterator[Symptom]:
    """Yield scenarios with windows in which more requests failed than elsewhere."""
    allowed = FALSE_ALARMS["failures"] / 2 / max(len(evidence.steady) * len(evidence.windows), 1)
    for scenario, cells in evidence.steady.items():
        failed, number = _failed(cells)
        counts = [(window, *_failed([cell])) for window, cell in zip(evidence.windows, cells, strict=True)]
        found = [
            (hits / size, hits, size, window)
            for window, hits, size in counts
            if hits > FAILED * size and chance.at_least(hits, size, failed, number) <= allowed
        ]
        if found:
            _, hits, size, worst = max(found, key=lambda each: each[0])
            windows = [window for *_, window in found]
            text = (
                f"requests of {scenario} failed together {when(windows)}: {hits} of {size} {when([worst])}, "
                f"{failed} of {number} in the run"
            )
            yield Symptom("failures", text, scenario, windows=tuple(window.index for window in windows))


def _failed(cells: Iterable[Cell]) -> tuple[int, int]:
    """Return how many requests failed, and of how many that ended by themselves."""
    counts = ended(cells)
    return counts["failed"], counts["failed"] + counts["ok"]


# Rates


def throughput(evidence: Evidence) -> Iterator[Symptom]:
    """Yield rates that fall although as much is asked for."""
    asked = _asked(evidence)
    done = [float(ended(window.cells.values())["ok"]) for window in evidence.windows]
    tokens = [float(number) for number in evidence.counted("tokens_received")]
    for metric, title, numbers in (("tokens", "output tokens", tokens), ("requests", "completed requests", done)):
        rates = _stretches(evidence, numbers)
        if len(rates) < FEWEST:
            return
        early, late = _thirds(rates)
        _, likely = chance.concordance(range(len(rates)), [-rate for rate in rates])
        fall = 1 - late / early if early else 0.0
        before, after = _thirds(_stretches(evidence, asked))
        explained = 1 - after / before if before else 0.0
        if likely <= FALSE_ALARMS["throughput"] / 2 and fall >= max(DRIFT, 2 * explained):
            text = (
                f"{title} fell from {format_rate(early)}/s in the first third to {format_rate(late)}/s in the last, "
                "and no less was asked for"
            )
            yield Symptom("throughput", text, metric=metric)


def _asked(evidence: Evidence) -> list[float]:
    """Return what was asked for, window by window: arrivals of a schedule, else users, else streams in flight."""
    if any(scheduled := evidence.counted("scheduled")):
        return [float(number) for number in scheduled]
    for name in ("users_last", "in_flight_ns"):
        numbers = [sum(getattr(seen, name) for seen in window.gauges.values()) for window in evidence.windows]
        if any(numbers):
            return [float(number) for number in numbers]
    return [1.0] * len(evidence.windows)


def _stretches(evidence: Evidence, numbers: Sequence[float]) -> list[float]:
    """Add up windows to stretches in which requests begin and end, and return rates per second."""
    size = max(1, math.ceil(2 * evidence.takes_ns() / evidence.window_ns))
    first = math.ceil(max(0, evidence.takes_ns() / evidence.window_ns - 0.1))
    return [
        sum(numbers[start : start + size]) / sum(window.length_s for window in evidence.windows[start : start + size])
        for start in range(first, len(numbers) - size + 1, size)
    ]


def backlog(evidence: Evidence, before: int) -> Iterator[Symptom]:
    """Yield that more and more requests wait; so many were due and had not ended `before` the first window."""
    scheduled, dropped = evidence.counted("scheduled"), evidence.counted("dropped")
    if not any(scheduled):
        return
    if sum(dropped) > FAILED * sum(scheduled):
        text = f"{format_share(sum(dropped), sum(scheduled))} of the arrivals were dropped: too many were in flight"
        yield Symptom("backlog", text)
    size = max(1, math.ceil(2 * evidence.takes_ns() / evidence.window_ns))
    waiting, levels = before, []
    for position, window in enumerate(evidence.windows):
        waiting += scheduled[position] - dropped[position] - sum(ended(window.cells.values()).values())
        levels.append(float(waiting))
    first = math.ceil(max(0, evidence.takes_ns() / evidence.window_ns - 0.1))
    levels = levels[first + size - 1 :: size]
    if len(levels) < FEWEST:
        return
    early, late = _thirds(levels)
    _, likely = chance.concordance(range(len(levels)), levels)
    if likely <= FALSE_ALARMS["backlog"] and late - early >= max(GROWTH * early, FEWEST):
        text = (
            f"requests that were due and had not ended rose from {early:.0f} in the first third to {late:.0f} in the "
            f"last: {format_rate(_mean_rate(evidence, scheduled))}/s were offered and "
            f"{format_rate(_mean_rate(evidence, [sum(ended(w.cells.values()).values()) for w in evidence.windows]))}/s "
            "ended"
        )
        yield Symptom("backlog", text)


def _mean_rate(evidence: Evidence, numbers: Sequence[int]) -> float:
    return sum(numbers) / sum(window.length_s for window in evidence.windows)


# Silence


def silence(evidence: Evidence) -> Iterator[Symptom]:
    """Yield windows in which nothing came, and streams that came to nothing."""
    waits = Histogram()
    for name in evidence.totals:
        waits.merge(evidence.histogram(name, "ttft"))
        waits.merge(evidence.histogram(name, "itl_max"))
    usual_ns, longest_ns = waits.percentile(0.95) or 0, waits.max or 0
    tokens = evidence.counted("tokens_received")
    streams_ns = [sum(seen.in_flight_ns for seen in window.gauges.values()) for window in evidence.windows]
    few = QUIET * statistics.median(tokens) if tokens else 0
    busy_ns = max(evidence.window_ns / 2, 2 * usual_ns, statistics.median(streams_ns) / 2 if streams_ns else 0)
    silent = [
        window
        for window, number, in_flight_ns in zip(evidence.windows, tokens, streams_ns, strict=True)
        if number <= few and in_flight_ns >= busy_ns and _longest_away_ns(window) <= evidence.window_ns / 2
    ]
    if silent:
        yield Symptom(
            "silence",
            f"{'hardly a' if any(tokens[evidence.windows.index(w)] for w in silent) else 'no'} token came "
            f"{when(silent)}, while streams were in flight",
            windows=tuple(window.index for window in silent),
        )
    quiet = [
        (max((s.silence_last_ns for s in window.gauges.values()), default=0), window) for window in evidence.windows
    ]
    hung = [(length_ns, w) for length_ns, w in quiet if length_ns >= max(evidence.window_ns, 2 * longest_ns)]
    if hung:
        worst_ns = max(length_ns for length_ns, _ in hung)
        windows = [window for _, window in hung]
        text = f"a stream sent nothing for {format_duration(worst_ns / NS_PER_S)} {when(windows)}, and was not ended"
        yield Symptom("silence", text, windows=tuple(window.index for window in windows))


def _longest_away_ns(window: Interval) -> int:
    """Return for how long a worker did not read what a server may have sent."""
    return max((seen.loop_lag_ns for seen in window.gauges.values()), default=0)


# Scenarios beside each other


def interplay(evidence: Evidence) -> Iterator[Symptom]:
    """Yield scenarios that wait longer for a first token in windows in which others have more prompts read.

    The rank correlation of the windows' geometric mean TTFT with the number of first tokens of a scenario whose prompts
    are longer: which of the two came first, no number tells.
    """
    prompts = {name: evidence.histogram(name, "input_tokens").mean or 0 for name in evidence.steady}
    pairs = [(short, long) for short in prompts for long in prompts if prompts[long] > prompts[short]]
    for short, long in pairs:
        found = [
            (_log_mean(cell.histograms["ttft"]), float(other.histograms.get("ttft", Histogram()).count))
            for cell, other in zip(evidence.steady[short], evidence.steady[long], strict=True)
            if cell.histograms.get("ttft", Histogram()).count
        ]
        tau, likely = chance.concordance([level for level, _ in found], [number for _, number in found])
        if len(found) >= FEWEST and likely <= FALSE_ALARMS["interplay"] / len(pairs):
            text = (
                f"TTFT of {short} is longer in windows with more prompts of {long} "
                f"(rank correlation {tau:.2f} over {len(found)} windows)"
            )
            yield Symptom("interplay", text, short, "ttft")
