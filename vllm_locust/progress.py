"""One line about now, while a run runs: what has ended, what streams, how the last closed window was."""

from collections.abc import Iterable, Sequence

from vllm_locust.cell import Cell, total
from vllm_locust.quantity import NS_PER_S, format_count, format_duration, format_rate
from vllm_locust.recording import Gauges, Recording
from vllm_locust.timeline import Outcome

_QUIET_S = 5
"""A stream that has been silent for longer is worth a word."""


def in_flight(recording: Recording, live_workers: Iterable[str]) -> int:
    """Return how many streams were in flight when their workers last reported; those of a lost one are gone."""
    return sum(_last(recording, worker).in_flight_last for worker in live_workers)


def silence_s(recording: Recording, live_workers: Iterable[str]) -> float:
    """Return for how long the quietest stream of those in flight had sent no byte when its worker last reported."""
    return max((_last(recording, worker).silence_last_ns for worker in live_workers), default=0) / NS_PER_S


def _last(recording: Recording, worker: str) -> Gauges:
    """Return what a worker was like in the last window that it has told of."""
    index, last = max(0, recording.closed_windows([worker]) - 1), Gauges()
    while (gauges := recording.gauges.get((worker, index))) is not None:
        index, last = index + 1, gauges
    return last


def streams(number: int, silent_s: float) -> str:
    """Say how many streams are in flight, and for how long the quietest one has been silent."""
    text = f"{format_count(number)} streams in flight"
    return f"{text} (one silent for {silent_s:.0f} s)" if number and silent_s >= _QUIET_S else text


def line(recording: Recording, age_ns: int, live_workers: Sequence[str]) -> str:
    """Return the line; a window is closed once every worker that takes part has sealed it."""
    so_far = total(recording.totals_of(()).values())
    ended = _ended(so_far)
    failed = sum(number for outcome, number in ended.items() if outcome.failed)
    flying = streams(in_flight(recording, live_workers), silence_s(recording, live_workers))
    text = (
        f"{age_ns / NS_PER_S:4.0f} s  {flying}, "
        f"{format_count(ended.get(Outcome.OK, 0))} ok, {format_count(failed)} failed"
    )
    waiting = so_far.counters.get("scheduled", 0) - so_far.counters.get("sent", 0)
    if waiting > 0:
        text += f", {format_count(waiting)} due and not sent"
    if age_ns < recording.steady_ns:
        return f"{text}; warm-up"
    closed = recording.closed_windows(live_workers)
    if not closed:
        return text
    window = total(recording.window(closed - 1).values())
    since_ns, until_ns = recording.bounds_ns(closed - 1)
    rate = format_rate(window.counters.get("tokens_received", 0) * NS_PER_S / (until_ns - since_ns))
    return (
        f"{text}; last window: TTFT p95 {_percentile(window, 'ttft', 0.95)}, "
        f"ITL p99 {_percentile(window, 'itl', 0.99)}, {rate} tok/s"
    )


def _ended(cell: Cell) -> dict[Outcome, int]:
    ended: dict[Outcome, int] = {}
    for name, number in cell.counters.items():
        kind, _, rest = name.partition("|")
        if kind == "outcome":
            outcome = Outcome(rest.partition("|")[0])
            ended[outcome] = ended.get(outcome, 0) + number
    return ended


def _percentile(cell: Cell, metric: str, quantile: float) -> str:
    histogram = cell.histograms.get(metric)
    value_ns = None if histogram is None else histogram.percentile(quantile)
    return format_duration(None if value_ns is None else value_ns / NS_PER_S)
