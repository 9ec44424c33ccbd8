"""A result file of `vllm bench serve`, and what it has of each request (`--save-detailed`) as a recording.

Promise: a sample is in the window in which it happened, and goes through the same histograms as any other.

What it does not do: mend. In a chat the chunk that names the role is a first token there, and so it is here; only
tokens are counted as the server did, so that chunk carries none.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_locust.cell import Cell, Key
from vllm_locust.grid import Grid
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Recording, Report
from vllm_locust.slowest import Slow
from vllm_locust.terminal import printable
from vllm_locust.timeline import MESSAGE_CHARS, Outcome, outcome_of_status
from vllm_locust.windows import Window, Windows

TOOL = "vllm bench serve"
SCENARIO = "bench"
"""What its requests are called where the file has no name for them."""
_WINDOWS = 30
"""How many there are in a short run: a comparison draws from them."""
_LONGEST_WINDOW_S = 10
_MOST_S = 1e6
"""More is no duration: eleven days."""
_MOST = 2**53
"""More is no count."""
_PHRASES = {status.phrase: int(status) for status in HTTPStatus}


class Result(msgspec.Struct, kw_only=True):
    """The keys that are read, whatever else is there; lists have a value per request."""

    duration: float
    completed: int
    request_throughput: float
    failed: int | None = None
    num_prompts: int | None = None
    date: str | None = None
    backend: str | None = None
    endpoint_type: str | None = None
    label: str | None = None
    model_id: str | None = None
    scenario: str | None = None
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    output_throughput: float | None = None
    request_goodput: float | None = None
    input_lens: list[int | None] | None = None
    output_lens: list[int] | None = None
    ttfts: list[float | None] | None = None
    itls: list[list[float]] | None = None
    start_times: list[float | None] | None = None
    latencies: list[float | None] | None = None
    queue_times: list[float | None] | None = None
    errors: list[str] | None = None

    @property
    def open(self) -> bool:
        """Whether requests left at a rate."""
        return isinstance(self.request_rate, float)

    @property
    def number(self) -> int:
        """How many requests ended, one way or the other."""
        return self.completed + self.lost

    @property
    def lost(self) -> int:
        """How many failed; older versions do not tell."""
        return max(0, (self.num_prompts or 0) - self.completed) if self.failed is None else self.failed

    @property
    def key(self) -> Key:
        """What its requests are counted under."""
        return Key(self.scenario or SCENARIO, self.endpoint)

    @property
    def endpoint(self) -> str:
        """Which one they were sent to, empty where the file does not tell."""
        backend = self.backend or self.endpoint_type or ""
        return "chat" if "chat" in backend else "completions" if backend in ("openai", "vllm") else ""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, in nanoseconds since the first one was sent."""

    sent_ns: int
    scheduled_ns: int | None
    first_ns: int | None
    times_ns: npt.NDArray[np.int64]
    """When each event came; empty where the file has no gaps."""
    gaps_ns: npt.NDArray[np.int64]
    """Between them."""
    end_ns: int
    e2el_ns: int | None
    input_tokens: int | None
    output_tokens: int
    error: str

    @property
    def ok(self) -> bool:
        """Whether it was answered: without a reason of the status there is no error either, but no token."""
        return not self.error and self.first_ns is not None

    @property
    def tokens(self) -> int:
        """How many tokens came: as the server counted them, of a request that failed as many as there were events."""
        return self.output_tokens if self.ok else self.times_ns.size


def result_of(saved: dict[str, Any]) -> Result:
    """Return what a file says; raises `ValueError` or `msgspec.ValidationError` where it is damaged."""
    result = msgspec.convert(saved, Result)
    _check(result)
    return result


def _check(result: Result) -> None:
    if not 1 / NS_PER_S <= result.duration < _MOST_S:
        raise ValueError(f"a duration of {result.duration!r:.20} s")
    for name in ("completed", "lost", "num_prompts", "total_input_tokens", "total_output_tokens", "max_concurrency"):
        if not 0 <= (getattr(result, name) or 0) < _MOST:
            raise ValueError(f"{name} is {getattr(result, name)!r:.20}")
    for name in ("request_throughput", "output_throughput", "request_goodput", "request_rate", "burstiness"):
        value = getattr(result, name)
        if isinstance(value, float) and value < 0:
            raise ValueError(f"{name} is {value!r:.20}")


def requests_of(result: Result) -> Iterator[Request]:
    """Yield the requests that the file has lists of; none without `--save-detailed`."""
    lists = (result.start_times, result.ttfts, result.output_lens, result.errors)
    if any(values is None for values in lists):
        return
    starts = result.start_times or []
    number = len(starts)
    optional = (result.itls, result.latencies, result.queue_times, result.input_lens)
    columns = [values if values is not None else [None] * number for values in (*lists, *optional)]
    if {*map(len, columns)} != {number}:
        raise ValueError(f"lists of different lengths: {', '.join(str(len(values)) for values in columns)}")
    began_s = min((start for start in starts if start is not None), default=0.0)
    for start, ttft, length, error, gaps, latency, queued, asked in zip(*columns, strict=True):
        yield _request(result, (start, ttft, latency, queued), gaps, began_s, (asked, length, error))


def _request(
    result: Result,
    times_s: tuple[float | None, ...],
    gaps_s: Sequence[float] | None,
    began_s: float,
    told: tuple[int | None, int, str],
) -> Request:
    start, ttft, latency, queued = times_s
    asked, length, error = told
    sent_ns = 0 if start is None else _ns(start - began_s)
    first_ns = sent_ns + _ns(ttft) if ttft else None  # a failed request has a TTFT of 0 there
    gaps_ns = _gaps_ns(gaps_s if first_ns is not None and gaps_s is not None else ())
    known = [] if first_ns is None or gaps_s is None else [first_ns]
    times_ns = np.concatenate((known, gaps_ns)).astype(np.int64).cumsum()
    last_ns = int(times_ns[-1]) if times_ns.size else first_ns
    e2el_ns = _ns(latency) if latency else None if last_ns is None else last_ns - sent_ns
    end_ns = max(sent_ns + (e2el_ns or 0), last_ns or 0)
    scheduled_ns = sent_ns - _ns(queued) if result.open and queued is not None else None
    if not 0 <= length < _MOST or not 0 <= (asked or 0) < _MOST:
        raise ValueError("a number of tokens that is none")
    return Request(sent_ns, scheduled_ns, first_ns, times_ns, gaps_ns, end_ns, e2el_ns, asked, length, error)


def _gaps_ns(gaps_s: Sequence[float]) -> npt.NDArray[np.int64]:
    gaps = np.array(gaps_s, np.float64)
    if not ((gaps >= 0) & (gaps < _MOST_S)).all():
        raise ValueError("a gap that is no time")
    return np.rint(gaps * NS_PER_S).astype(np.int64)


def _ns(seconds: float) -> int:
    if not 0 <= seconds < _MOST_S:
        raise ValueError(f"{seconds!r:.20} s is no time")
    return round(seconds * NS_PER_S)


def recording_of(result: Result, requests: Sequence[Request]) -> Recording:
    """Return what a master would hold, had the requests been those of one worker; without any, there is no window."""
    length_ns = _ns(result.duration)
    window_s = max(1, min(_LONGEST_WINDOW_S, round(result.duration / _WINDOWS)))
    window_ns = min(window_s * NS_PER_S, max(1, length_ns // _WINDOWS))
    recording = Recording("", 0, window_ns)
    if not requests:
        return recording
    recording.length_ns = length_ns
    windows = Windows(0, Grid(window_ns))
    windows.stop(length_ns, windows.grid.count(length_ns))
    key = result.key
    for request in requests:
        _count(request, key, windows)
    _count_events(requests, key, windows)
    _count_in_flight(requests, windows)
    windows.at(max(0, length_ns - 1))  # windows in which nothing happened exist
    windows.seal_all()
    failures = [_failure(request, key) for request in requests if not request.ok]
    report = Report(
        run="",
        epoch=0,
        worker=TOOL,
        seq=1,
        now_ns=length_ns,
        windows=windows.report(1),
        failures=failures,
        slowest=[*_slow(requests, key)],
    )
    recording.merge(report)
    return recording


def _count(request: Request, key: Key, windows: Windows) -> None:
    """Put a request's samples and counts into the windows in which they happened, as a worker does."""
    end = windows.cell(key, request.end_ns)
    windows.cell(key, request.sent_ns).count("sent")
    if request.first_ns is None:
        end.count("failed_without_token")
    else:
        windows.cell(key, request.first_ns).histogram("ttft").add(request.first_ns - request.sent_ns)
    if request.scheduled_ns is not None:
        _count_scheduled(request, request.scheduled_ns, key, windows)
    _count_tokens(request, end)
    if request.gaps_ns.size:
        end.histogram("itl_max").add(int(request.gaps_ns.max()))
    outcome, status = _outcome(request)
    end.count(f"outcome|{outcome}|{status}")
    if request.ok:
        _count_ok(request, end)


def _count_scheduled(request: Request, at_ns: int, key: Key, windows: Windows) -> None:
    windows.cell(key, at_ns).count("scheduled")
    windows.cell(key, request.sent_ns).histogram("queue").add(request.sent_ns - at_ns)
    if request.first_ns is not None:
        windows.cell(key, request.first_ns).histogram("ttft_scheduled").add(request.first_ns - at_ns)
    if request.ok and request.e2el_ns is not None:
        end = windows.cell(key, request.end_ns)
        end.histogram("e2el_scheduled").add(request.sent_ns + request.e2el_ns - at_ns)


def _count_ok(request: Request, end: Cell) -> None:
    if request.input_tokens is not None:
        end.histogram("input_tokens").add(request.input_tokens)
    end.histogram("output_tokens").add(request.output_tokens)
    if request.e2el_ns is None or request.first_ns is None:
        return
    end.histogram("e2el").add(request.e2el_ns)
    if request.output_tokens > 1:
        streamed_ns = max(0, request.sent_ns + request.e2el_ns - request.first_ns)
        end.histogram("tpot").add(round(streamed_ns / (request.output_tokens - 1)))


def _count_tokens(request: Request, end: Cell) -> None:
    """Count the tokens that came with no event of their own, at the end, and those of a request that failed."""
    missing = request.tokens - request.times_ns.size
    if missing > 0:
        end.count("tokens_received", missing)
    if not request.ok and request.times_ns.size:
        end.count("tokens_failed", request.tokens)


def _count_events(requests: Sequence[Request], key: Key, windows: Windows) -> None:
    """Count events and gaps when they came; of more events than tokens the first ones carry none: a role does not."""
    times = [request.times_ns for request in requests]
    carrying = [request.times_ns[max(0, request.times_ns.size - request.tokens) :] for request in requests]
    for name, found in (("token_events", times), ("tokens_received", carrying)):
        for window, few in _split(windows, np.concatenate(found)):
            _cell(window, key).count(name, few.size)
    gaps_ns = np.concatenate([request.gaps_ns for request in requests])
    for window, few in _split(windows, np.concatenate([each[1:] for each in times]), gaps_ns):
        _cell(window, key).histogram("itl").add_array(few)


def _split(
    windows: Windows, times: npt.NDArray[np.int64], values: npt.NDArray[np.int64] | None = None
) -> list[tuple[Window, npt.NDArray[np.int64]]]:
    return windows.split(times, values) if times.size else []


def _cell(window: Window, key: Key) -> Cell:
    return window.cells.setdefault(key, Cell())


def _count_in_flight(requests: Sequence[Request], windows: Windows) -> None:
    changes = sorted([(one.end_ns, -1) for one in requests] + [(one.sent_ns, 1) for one in requests])
    number, since_ns = 0, 0
    for at_ns, change in changes:
        for gauges, piece_ns in windows.pieces(since_ns, at_ns):
            gauges.in_flight_ns += number * piece_ns
            gauges.in_flight_peak = max(gauges.in_flight_peak, number)
            gauges.in_flight_last = number
        number, since_ns = number + change, at_ns


def _outcome(request: Request) -> tuple[str, int]:
    """Return outcome and status of a request: by the reason of the status, or our own word, else it was lost."""
    if request.ok:
        return Outcome.OK, 200
    if status := _PHRASES.get(request.error):
        return outcome_of_status(status), status
    word = re.match(r"\w*", request.error)
    if word and word[0] in [outcome.value for outcome in Outcome if outcome.failed]:
        return word[0], 0
    if not request.error or request.error.startswith("Never received a valid chunk"):
        return Outcome.EMPTY, 0
    return (Outcome.TOTAL_TIMEOUT if "TimeoutError" in request.error else Outcome.CONNECTION_LOST), 0


def _failure(request: Request, key: Key) -> Failure:
    outcome, status = _outcome(request)
    lines = request.error.strip().splitlines() or [""]
    return Failure(
        scenario=key.scenario,
        endpoint=key.endpoint,
        outcome=outcome,
        status=status,
        first_ns=request.end_ns,
        last_ns=request.end_ns,
        message=printable(lines[-1].removeprefix(f"{outcome}:"), MESSAGE_CHARS),  # of a traceback, what went wrong
    )


def _slow(requests: Sequence[Request], key: Key) -> Iterator[Slow]:
    starts, ends = (np.sort([getattr(one, name) for one in requests]) for name in ("sent_ns", "end_ns"))
    for number, request in enumerate(requests):
        points = [] if request.first_ns is None else [("ttft", request.first_ns - request.sent_ns, request.first_ns)]
        if request.gaps_ns.size:
            longest = int(request.gaps_ns.argmax())
            points.append(("itl_max", int(request.gaps_ns[longest]), int(request.times_ns[longest + 1])))
        in_flight = np.searchsorted(starts, request.sent_ns, "right") - np.searchsorted(ends, request.sent_ns, "right")
        for metric, value_ns, at_ns in points:
            yield Slow(
                scenario=key.scenario,
                endpoint=key.endpoint,
                metric=metric,
                value_ns=value_ns,
                at_ns=at_ns,
                worker=TOOL,
                request_id=f"number {number}",
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                in_flight=int(in_flight),
                outcome=_outcome(request)[0],
            )
