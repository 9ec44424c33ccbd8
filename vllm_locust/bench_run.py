"""A result of `vllm bench serve` as a run: what it has of each request goes through the same histograms.

Promise: with `--save-detailed` a sample is in the window in which it happened, so reports, comparisons and charts are
made of it as of any run. Without, there is no window: what the file says is shown, and all else is null, never 0.

What it does not do: mend. In a chat the chunk that names the role is a first token there, and so it is here; only
tokens are counted as the server did, so that chunk carries none. What is told of the generator is nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_locust.cell import Cell, Key
from vllm_locust.figures import PERCENTILES, Summary, ratio
from vllm_locust.grid import Grid
from vllm_locust.quantity import NS_PER_S
from vllm_locust.recording import Failure, Recording, Report
from vllm_locust.slowest import Slow
from vllm_locust.summary import Meta, summary
from vllm_locust.terminal import printable
from vllm_locust.timeline import MESSAGE_CHARS, Outcome, outcome_of_status
from vllm_locust.windows import Window, Windows
from vllm_locust.workers import Seen

TOOL = "vllm bench serve"
KEYS = frozenset({"request_throughput", "mean_ttft_ms", "completed", "duration"})
"""What tells such a file from others."""
SCENARIO = "bench"
"""What its requests are called where the file has no name for them."""
UNKNOWN = "unknown"
"""Outcome of failures of which the file only has the number."""
_WINDOWS = 30
"""How many there are in a short run: a comparison draws from them."""
_LONGEST_WINDOW_S = 10
_MOST_S = 1e6
"""More is no duration: eleven days."""
_MOST = 2**53
"""More is no count."""
_METRICS = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = {"mean": "mean", "p50": "median"} | {key: key for key in PERCENTILES if key != "p50"}
"""Their word for each of ours."""
_PHRASES = {status.phrase: int(status) for status in HTTPStatus}


class _Result(msgspec.Struct, kw_only=True):
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


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
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


def recognised(saved: Any) -> bool:  # noqa: ANN401 - JSON
    """Tell whether JSON is a result of `vllm bench serve`."""
    return isinstance(saved, dict) and saved.keys() >= KEYS


def was_read(meta: Meta) -> bool:
    """Tell whether a run is one that `read` returned: it has no target, no seed and no word on the generator."""
    return TOOL in meta.scenarios


def read(saved: dict[str, Any], name: str) -> tuple[Meta, Recording, Summary]:
    """Return a result as a run of a name; raises `ValueError` or `msgspec.ValidationError` where it is damaged."""
    result = msgspec.convert(saved, _Result)
    _check(result)
    requests = [*_requests(result)]
    meta = _meta(result, name, listed=len(requests))
    recording = _recording(result, requests)
    return meta, recording, _filled(summary(recording, meta), result, saved)


def _check(result: _Result) -> None:
    if not 1 / NS_PER_S <= result.duration < _MOST_S:
        raise ValueError(f"a duration of {result.duration!r:.20} s")
    for name in ("completed", "lost", "num_prompts", "total_input_tokens", "total_output_tokens", "max_concurrency"):
        if not 0 <= (getattr(result, name) or 0) < _MOST:
            raise ValueError(f"{name} is {getattr(result, name)!r:.20}")
    for name in ("request_throughput", "output_throughput", "request_goodput", "request_rate", "burstiness"):
        value = getattr(result, name)
        if isinstance(value, float) and value < 0:
            raise ValueError(f"{name} is {value!r:.20}")


def _meta(result: _Result, name: str, *, listed: int) -> Meta:
    scenario, endpoint = result.scenario or SCENARIO, _endpoint(result)
    remarks = [f"read from a result of {TOOL}: see docs/vllm-bench.md for what it defines in another way"]
    if not listed and result.number:
        remarks.append("it has no samples (--save-detailed): what it does not say is missing, and so are charts")
    elif result.itls is None:
        remarks.append("it has no gaps: what it says of them is shown, and the tokens of an answer count when it ended")
    if listed and listed != result.number:
        remarks.append(f"it counts {result.number:,} requests, and has lists of {listed:,}")
    return Meta(
        name=result.label or name,
        started=_started(result.date),
        model=result.model_id or "",
        scenarios={TOOL: scenario},
        endpoints={TOOL: endpoint} if endpoint else {},
        parts=[scenario],
        load=_load(result),
        remarks=remarks,
    )


def _endpoint(result: _Result) -> str:
    backend = result.backend or result.endpoint_type or ""
    return "chat" if "chat" in backend else "completions" if backend in ("openai", "vllm") else ""


def _started(date: str | None) -> str:
    """Return when it was run, on the clock of its machine: nobody knows the zone."""
    try:
        return datetime.strptime(date or "", "%Y%m%d-%H%M%S").isoformat()  # noqa: DTZ007 - it has none
    except ValueError:
        return ""


def _load(result: _Result) -> dict[str, Any]:
    load: dict[str, Any] = {"requests": result.num_prompts}
    if result.open:
        gamma = result.burstiness not in (None, 1.0)
        load |= {"arrivals": "gamma" if gamma else "poisson", "burstiness": result.burstiness if gamma else None}
        load |= {"request_rate": result.request_rate, "max_in_flight": result.max_concurrency}
    else:
        load["users"] = result.max_concurrency
    return {key: value for key, value in load.items() if value is not None}


# Samples


def _requests(result: _Result) -> Iterator[_Request]:
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
    result: _Result,
    times_s: tuple[float | None, ...],
    gaps_s: Sequence[float] | None,
    began_s: float,
    told: tuple[int | None, int, str],
) -> _Request:
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
    return _Request(sent_ns, scheduled_ns, first_ns, times_ns, gaps_ns, end_ns, e2el_ns, asked, length, error)


def _gaps_ns(gaps_s: Sequence[float]) -> npt.NDArray[np.int64]:
    gaps = np.array(gaps_s, np.float64)
    if not ((gaps >= 0) & (gaps < _MOST_S)).all():
        raise ValueError("a gap that is no time")
    return np.rint(gaps * NS_PER_S).astype(np.int64)


def _ns(seconds: float) -> int:
    if not 0 <= seconds < _MOST_S:
        raise ValueError(f"{seconds!r:.20} s is no time")
    return round(seconds * NS_PER_S)


def _recording(result: _Result, requests: Sequence[_Request]) -> Recording:
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
    key = Key(result.scenario or SCENARIO, _endpoint(result))
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


def _count(request: _Request, key: Key, windows: Windows) -> None:
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


def _count_scheduled(request: _Request, at_ns: int, key: Key, windows: Windows) -> None:
    windows.cell(key, at_ns).count("scheduled")
    windows.cell(key, request.sent_ns).histogram("queue").add(request.sent_ns - at_ns)
    if request.first_ns is not None:
        windows.cell(key, request.first_ns).histogram("ttft_scheduled").add(request.first_ns - at_ns)
    if request.ok and request.e2el_ns is not None:
        end = windows.cell(key, request.end_ns)
        end.histogram("e2el_scheduled").add(request.sent_ns + request.e2el_ns - at_ns)


def _count_ok(request: _Request, end: Cell) -> None:
    if request.input_tokens is not None:
        end.histogram("input_tokens").add(request.input_tokens)
    end.histogram("output_tokens").add(request.output_tokens)
    if request.e2el_ns is None or request.first_ns is None:
        return
    end.histogram("e2el").add(request.e2el_ns)
    if request.output_tokens > 1:
        streamed_ns = max(0, request.sent_ns + request.e2el_ns - request.first_ns)
        end.histogram("tpot").add(round(streamed_ns / (request.output_tokens - 1)))


def _count_tokens(request: _Request, end: Cell) -> None:
    """Count the tokens that came with no event of their own, at the end, and those of a request that failed."""
    missing = request.tokens - request.times_ns.size
    if missing > 0:
        end.count("tokens_received", missing)
    if not request.ok and request.times_ns.size:
        end.count("tokens_failed", request.tokens)


def _count_events(requests: Sequence[_Request], key: Key, windows: Windows) -> None:
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


def _count_in_flight(requests: Sequence[_Request], windows: Windows) -> None:
    changes = sorted([(one.end_ns, -1) for one in requests] + [(one.sent_ns, 1) for one in requests])
    number, since_ns = 0, 0
    for at_ns, change in changes:
        for gauges, piece_ns in windows.pieces(since_ns, at_ns):
            gauges.in_flight_ns += number * piece_ns
            gauges.in_flight_peak = max(gauges.in_flight_peak, number)
            gauges.in_flight_last = number
        number, since_ns = number + change, at_ns


def _outcome(request: _Request) -> tuple[str, int]:
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


def _failure(request: _Request, key: Key) -> Failure:
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


def _slow(requests: Sequence[_Request], key: Key) -> Iterator[Slow]:
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


# What there are no samples of


def _filled(told: Summary, result: _Result, saved: Mapping[str, Any]) -> Summary:
    """Return a summary with what the file says in place of what it has no samples of."""
    scenarios = told["scenarios"].values()
    detailed = bool(told["total"]["requests"])
    for scope in (told["total"], *scenarios):
        for name in _METRICS:
            if not scope[name]["count"]:
                scope[name] = _values(saved, name, scope[name], result.completed)
        if not detailed:
            scope.update(_counted(result, scope))
            scope["judged"] = {name: _judged(scope[name], known, result) for name, known in scope["judged"].items()}
        if result.request_goodput is not None:
            scope["rates"]["goodput_per_s"] = result.request_goodput
    told["duration_s"] = result.duration
    if not detailed:
        told["total"]["rates"] |= {"in_flight_mean": None, "in_flight_peak": None}
        told["failures"] = [*_failed(result)]
        told["fidelity"]["workers"] = {TOOL: Seen().figures()}
    return told


def _values(saved: Mapping[str, Any], name: str, known: Summary, completed: int) -> Summary:
    """Return the statistics of a metric that the file says; how many gaps they are of, or TPOTs, nobody knows."""
    values = {ours: saved.get(f"{theirs}_{name}_ms") for ours, theirs in _STATISTICS.items()}
    numbers = {key: msgspec.convert(value, float) / 1e3 for key, value in values.items() if value is not None}
    if any(value < 0 for value in numbers.values()):
        raise ValueError(f"{name} takes less than no time")
    # Without a sample theirs are 0.
    count = completed if name in ("ttft", "e2el") else None
    return known | ({"count": count} | numbers if any(numbers.values()) else {})


def _judged(values: Summary, known: Summary, result: _Result) -> Summary:
    """Return percentiles in which failures are late: theirs where nothing failed, else only which are a failure."""
    told = {key: values[key] for key in PERCENTILES}
    if result.lost:
        told = {
            key: "failed" if share * result.number > result.completed else None for key, share in PERCENTILES.items()
        }
    return known | told | {"count": result.number, "failed": result.lost}


def _counted(result: _Result, scope: Summary) -> Summary:
    """Return requests, tokens and rates as the file counts them."""
    output, asked = result.total_output_tokens, result.total_input_tokens
    outcomes = scope["outcomes"] | {Outcome.OK.value: result.completed}
    return {
        "requests": result.number,
        "failed": result.lost,
        "failed_share": ratio(result.lost, result.number),
        "outcomes": outcomes | ({UNKNOWN: result.lost} if result.lost else {}),
        "input_tokens": _mean(scope["input_tokens"], asked, result.completed),
        "output_tokens": _mean(scope["output_tokens"], output, result.completed),
        "tokens": scope["tokens"] | {"input": asked or 0, "output_received": output or 0},
        "rates": scope["rates"]
        | {
            "request_per_s": result.request_throughput,
            "sent_per_s": ratio(result.number, result.duration),
            "input_tokens_per_s": None if asked is None else asked / result.duration,
            "output_tokens_per_s": result.output_throughput,
        },
    }


def _mean(known: Summary, total: int | None, number: int) -> Summary:
    return known if total is None or not number else known | {"count": number, "mean": total / number}


def _failed(result: _Result) -> Iterable[Summary]:
    if result.lost:
        yield {
            "scenario": result.scenario or SCENARIO,
            "endpoint": _endpoint(result),
            "outcome": UNKNOWN,
            "status": 0,
            "count": result.lost,
            "share": ratio(result.lost, result.number),
            "first_s": None,
            "last_s": None,
            "message": "",
        }
