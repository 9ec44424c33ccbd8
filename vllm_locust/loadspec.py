"""What the user asks of a run, on the command line, in a form or in a scenario's `[load]` → a `Load`, or an error.

Each value is a text, whoever gave it; an error names the option or the key.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vllm_locust.arrivals import PROCESSES, Arrivals, Segment, read_trace
from vllm_locust.errors import InputError
from vllm_locust.load import Load
from vllm_locust.quantity import NS_PER_S, duration_s, format_duration, format_list, number
from vllm_locust.scenario import Given

_LONGEST_WARMUP_S = 30.0
_WARMUP_SHARE = 0.1
"""How long a warm-up is at most unless it is set, and which share of the run."""
_WINDOWS = 30
_LONGEST_WINDOW_S = 10
"""How many windows a run has, and how long they are at most, unless it is said: those of five minutes. A comparison
resamples windows and the verdict on stability reads them, and a handful tells neither anything."""
STAGES = "stages"
"""A request rate that is that of each stage."""
_HOLD = re.compile(r"([0-9.,]+)(?: */ *s)?(?: +for +(.+))?")
_RAMP = re.compile(r"to +([0-9.,]+)(?: */ *s)? +over +(.+)")
_BETWEEN = re.compile(r"(?<![0-9]),|,(?![0-9]{3}(?![0-9]))")
"""A comma that is none of a number's."""
_RATES = "a rate per second like 20, or stretches like 5 for 60s, to 50 over 2m, 50"


def run_time_s(given: Mapping[str, Given]) -> float | None:
    """Return how long the run is to take, where that is said."""
    if "run_time" not in given:
        return None
    where, value, _ = given["run_time"]
    return duration_s(value, where=where)


def window_ns(value: str | None, load: Load, run_time_s: float | None) -> int:
    """Return how long a window is: as was asked, else a thirtieth of the run in whole seconds, where that is known."""
    if value:
        window_s = duration_s(value, where="--window")
        if window_s < 1:
            raise InputError(f"--window is {value}, expected at least 1s")
        return round(window_s * NS_PER_S)
    length_ns = load.length_ns or round((run_time_s or 0) * NS_PER_S)
    window_s = length_ns // (_WINDOWS * NS_PER_S) if length_ns else _LONGEST_WINDOW_S
    return min(max(1, window_s), _LONGEST_WINDOW_S) * NS_PER_S


def parse(
    given: Mapping[str, Given],
    *,
    seed: int,
    weights: dict[str, int],
    once: int | None,
    run_time_s: float | None,
) -> Load:
    """Make sense of all that was given; `once` is the number of prompts where each is to be sent once.

    Raises `InputError` for what makes no sense, or not together.
    """
    arrivals = _arrivals(given, seed)
    stages, stage_s = _stages(given)
    if arrivals is not None and stages:
        with _naming(given["stages"].where):
            profile = tuple(Segment(rate, round(stage_s * NS_PER_S)) for rate in stages)
            arrivals = msgspec.structs.replace(arrivals, profile=profile)
    requests = _whole(given, "requests", least=1)
    if once is not None:
        _exclude(given, "requests", 'order = "once" sends each prompt once, whatever their number')
        requests = once
    retries = _whole(given, "retry_failed", least=0) or 0
    if retries and (requests is None or arrivals is not None):
        raise InputError(
            f"{given['retry_failed'].where} is {retries}: it is for a fixed number of requests without a rate, "
            "like --requests 100"
        )
    most = _whole(given, "max_in_flight", least=1)
    if most is not None and arrivals is None:
        raise InputError(
            f"{given['max_in_flight'].where} is for a request rate; without one, users are the cap: -u {most} -r {most}"
        )
    length_s = len(stages) * stage_s if stages else run_time_s
    warmup_s = _warmup_s(given, length_s, fixed=requests is not None)
    return Load(
        arrivals=arrivals,
        max_in_flight=most,
        weights=_smallest(weights),
        requests=requests,
        retries=retries,
        warmup_ns=round(warmup_s * NS_PER_S),
        until_answered=arrivals is None and not _has(given, "warmup"),
        stages=stages,
        stage_ns=round(stage_s * NS_PER_S),
    )


def _has(given: Mapping[str, Given], key: str) -> bool:
    return key in given and given[key].value not in (None, "")


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Have an error of a schedule begin with who gave it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _exclude(given: Mapping[str, Given], key: str, why: str) -> None:
    if _has(given, key):
        raise InputError(f"{given[key].where} is {given[key].value}, but {why}; leave one of them out")


def _arrivals(given: Mapping[str, Given], seed: int) -> Arrivals | None:
    """Return when requests leave, None in a closed loop."""
    process = str(given["arrivals"].value) if _has(given, "arrivals") else ""
    if process and process not in PROCESSES:
        raise InputError(f"{given['arrivals'].where} is {process!r}, expected {format_list(PROCESSES)}")
    burstiness = _number(
        given, "burstiness", lambda value: value > 0, "a number above 0; 1 is Poisson, below 1 burstier"
    )
    if process == "trace" or _has(given, "trace"):
        return _trace(given, process)
    if _has(given, "trace_speed"):
        raise InputError(f"{given['trace_speed'].where} is for a trace; name its file by --trace")
    if not _has(given, "request_rate"):
        if process or burstiness is not None:
            where = given["arrivals" if process else "burstiness"].where
            raise InputError(f"{where} is for a request rate; add one, like --request-rate 20")
        return None
    if burstiness is not None and process not in ("", "gamma"):
        raise InputError(f"{given['burstiness'].where} is for gamma arrivals, not for {process} ones")
    process = process or ("poisson" if burstiness is None else "gamma")
    profile = _profile(given)
    with _naming(given["request_rate" if burstiness is None else "burstiness"].where):
        return Arrivals(process=process, profile=profile, burstiness=burstiness or 1.0, seed=seed)


def _trace(given: Mapping[str, Given], process: str) -> Arrivals:
    if not _has(given, "trace"):
        raise InputError(f"{given['arrivals'].where} is 'trace': name its file by --trace")
    for key in ("request_rate", "burstiness", "stages"):
        _exclude(given, key, "a trace says itself when requests leave")
    if process not in ("", "trace"):
        raise InputError(f"{given['arrivals'].where} is {process!r}, but there is a trace; leave one of them out")
    speed = _number(given, "trace_speed", lambda value: value > 0, "a number above 0, like 2 for twice as fast")
    path = (given["trace"].folder or Path()) / str(given["trace"].value)
    return Arrivals(process="trace", trace_ns=read_trace(path, speed or 1.0))


def _profile(given: Mapping[str, Given]) -> tuple[Segment, ...]:
    """Read `20`, or `5 for 60s, to 50 over 2m, 50`."""
    where, value, _ = given["request_rate"]
    if _has(given, "stages"):
        return (Segment(1.0),)  # the stages' own takes its place
    if value == STAGES:
        raise InputError(f"{where} is {STAGES}: add them, like --stages 5,10,20")
    segments = []
    parts = [part.strip() for part in _BETWEEN.split(str(value))]
    for position, part in enumerate(parts):
        ramp, hold = _RAMP.fullmatch(part), _HOLD.fullmatch(part)
        rate_text, length_text = ramp.groups() if ramp else hold.groups() if hold else ("", None)
        rate = _value(rate_text)
        if math.isnan(rate):
            raise InputError(f"{where} is {value!r}, expected {_RATES}")
        if length_text is None and position + 1 < len(parts):
            raise InputError(f"{where}: {part!r} has no end, though more follows; write {part} for 60s")
        length_s = None if length_text is None else duration_s(length_text, where=where)
        if length_s == 0:
            raise InputError(f"{where} is {value!r}, expected {_RATES}")
        with _naming(where):
            segments.append(Segment(rate, None if length_s is None else round(length_s * NS_PER_S), ramp is not None))
    if not any(segment.rate_per_s for segment in segments):
        raise InputError(f"{where} is {value!r}, expected a rate above 0")
    return tuple(segments)


def _stages(given: Mapping[str, Given]) -> tuple[tuple[float, ...], float]:
    """Return the stages and how long each takes."""
    if not _has(given, "stages"):
        if _has(given, "stage_time"):
            raise InputError(f"{given['stage_time'].where} is for stages; add them, like --stages 8,16,32")
        return (), 0.0
    where, value, _ = given["stages"]
    texts = value if isinstance(value, list) else str(value).split(",")
    stages = tuple(map(_value, texts))
    whole = _has(given, "request_rate") or all(stage.is_integer() for stage in stages)
    if not stages or not whole or not all(0 < stage < math.inf for stage in stages):
        raise InputError(f"{where} is {value!r}, expected numbers above 0 like 8,16,32: users, or rates with a rate")
    stage_s = (
        duration_s(given["stage_time"].value, where=given["stage_time"].where) if _has(given, "stage_time") else 60.0
    )
    if stage_s < 1:
        raise InputError(f"{given['stage_time'].where} is {given['stage_time'].value}, expected at least 1s")
    return stages, stage_s


def _warmup_s(given: Mapping[str, Given], length_s: float | None, *, fixed: bool) -> float:
    """Return how long the warm-up is at most; a fixed number of requests has none unless it is asked for."""
    if not _has(given, "warmup"):
        if fixed:
            return 0.0
        return _LONGEST_WARMUP_S if length_s is None else min(_LONGEST_WARMUP_S, _WARMUP_SHARE * length_s)
    where, value, _ = given["warmup"]
    warmup_s = duration_s(value, where=where)
    if length_s is not None and warmup_s >= length_s:
        raise InputError(f"{where} is {value}, and the run takes {format_duration(length_s)}: nothing would be left")
    return warmup_s


def _whole(given: Mapping[str, Given], key: str, *, least: int) -> int | None:
    found = _number(
        given, key, lambda value: value >= least and value.is_integer(), f"a whole number of at least {least}"
    )
    return None if found is None else int(found)


def _number(given: Mapping[str, Given], key: str, fits: Callable[[float], bool], expected: str) -> float | None:
    if not _has(given, key):
        return None
    where, value, _ = given[key]
    found = _value(value)
    if not math.isfinite(found) or not fits(found):
        raise InputError(f"{where} is {value!r}, expected {expected}")
    return found


def _value(value: object) -> float:
    """Return a number, or what a text says that is one; NaN for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return number(str(value))
    except InputError:
        return math.nan


def _smallest(weights: dict[str, int]) -> dict[str, int]:
    """Reduce weights, which set the length of the pattern."""
    divisor = math.gcd(*weights.values()) or 1
    return {name: weight // divisor for name, weight in weights.items() if weight}
