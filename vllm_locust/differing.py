"""What two sides of a comparison were not alike in, and what of it makes their numbers incomparable.

Promise: whatever a run file says of what was asked, of whom, and with which generator, is looked at; what differs is
named before any number is. Latencies of other prompts, of another load or of a warm cache are answers to another
question: such sides are not compared unless somebody insists.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from vllm_locust import facts, fidelity
from vllm_locust.quantity import format_duration, format_list, format_rate
from vllm_locust.results import Run
from vllm_locust.side import Side, scenarios, scopes

_LENGTHS = 0.02
"""By how much mean lengths and durations may differ."""
_FEW_WORDS = 8
"""Of a text that is shown as it is."""
EVENTS = 0.01
"""By how much tokens per event may differ for gaps between events to be the same thing."""


@dataclass(frozen=True, slots=True)
class Differing:
    """Something that was not the same, in words for each side."""

    what: str
    base: str
    new: str
    prevents: bool = False
    """Whether it makes numbers incomparable."""


@dataclass(frozen=True, slots=True)
class _Aspect:
    what: str
    of: Callable[[Run], str]
    prevents: bool = False


_ASPECTS = (
    _Aspect("scenario", lambda run: format_list(dict.fromkeys(run.meta.scenarios.values())), prevents=True),
    _Aspect("parts", lambda run: format_list(run.meta.parts), prevents=True),
    _Aspect("prompts and lengths", lambda run: run.meta.scenario_hash, prevents=True),
    _Aspect("endpoints", lambda run: format_list(sorted({*run.meta.endpoints.values()})), prevents=True),
    _Aspect("cache", lambda run: run.meta.cache, prevents=True),
    _Aspect("load", lambda run: format_list(_load(run)), prevents=True),
    _Aspect("seed", lambda run: str(run.meta.seed)),
    _Aspect("model", lambda run: run.meta.model),
    _Aspect("target", lambda run: run.meta.target),
    _Aspect("note", lambda run: run.meta.note),
    _Aspect("server", lambda run: run.meta.server_config),
    _Aspect("counting of tokens", lambda run: format_list(_counting(run))),
    _Aspect("spawn rate", lambda run: str(run.meta.load.get("spawn_rate") or "")),
    _Aspect("workers", lambda run: str(run.meta.load.get("workers") or "")),
    _Aspect("vllm-locust", lambda run: run.meta.plugin_version),
    _Aspect("Locust", lambda run: run.meta.locust_version),
    _Aspect("Python", lambda run: run.meta.python_version),
)
_NOT_LOAD = ("spawn_rate", "run_time_s", "workers")


def differing(base: Side, new: Side) -> list[Differing]:
    """Return everything that differs, what prevents a comparison first."""
    found = [*_asked(base, new), *_flaws(base, new), *_measured(base, new)]
    return sorted(found, key=lambda one: not one.prevents)


def _asked(base: Side, new: Side) -> Iterator[Differing]:
    for aspect in _ASPECTS:
        ours, theirs = ({aspect.of(run): None for run in one.runs} for one in (base, new))
        if len(ours | theirs) > 1:
            base_text, new_text = _shown([*ours], [*theirs])
            yield Differing(aspect.what, base_text, new_text, prevents=aspect.prevents)


def _shown(base: list[str], new: list[str]) -> tuple[str, str]:
    """Say what the sides have; of two long texts, the words that only one of them has."""
    words = [text.split() for text in (*base, *new)]
    if len(words) == 2 and min(map(len, words)) > _FEW_WORDS:  # noqa: PLR2004 - one run a side
        steps = [
            step
            for step in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes()
            if step[0] != "equal"
        ]
        ours = [" ".join(words[0][begin:end]) for _, begin, end, _, _ in steps]
        theirs = [" ".join(words[1][begin:end]) for _, _, _, begin, end in steps]
        return " … ".join(filter(None, ours)) or "nothing more", " … ".join(filter(None, theirs)) or "nothing more"
    ours_text, theirs_text = (" or ".join(text or "unknown" for text in texts) for texts in (base, new))
    return ours_text, theirs_text


def _load(run: Run) -> Iterator[str]:
    """Say which load was asked for, as reports do, but for how long and by how many workers."""
    load = {name: value for name, value in run.meta.load.items() if name not in _NOT_LOAD}
    yield from facts.asked(replace(run.meta, load=load))


def _counting(run: Run) -> Iterator[str]:
    counting = run.meta.counting
    yield from (name for name in ("continuous_usage", "token_ids") if getattr(counting, name))


def _flaws(base: Side, new: Side) -> Iterator[Differing]:
    """Yield what was wrong with a run, on whichever side."""
    for flaw in _FLAWS:
        ours, theirs = (format_list(dict.fromkeys(filter(None, map(flaw.of, one.runs)))) for one in (base, new))
        if (ours, theirs) != ("none", "none"):
            yield Differing(flaw.what, ours, theirs, prevents=flaw.prevents)


def _missed(run: Run) -> str:
    """Say which limits the generator missed that the user set."""
    return "; ".join(fidelity.misses(run.summary["fidelity"], run.meta.generator_limits))


def _generator(run: Run) -> str:
    """Say why the generator, and not only the server, was measured."""
    told, limits = run.summary["fidelity"], run.meta.generator_limits
    return "; ".join(fault.text for fault in fidelity.faults(told, limits)) if told["token_events"] else ""


_FLAWS = (
    _Aspect("nothing sent", lambda run: "" if run.summary["total"]["requests"] else run.meta.name, prevents=True),
    _Aspect("ended early", lambda run: run.meta.name if run.meta.ended_early else "", prevents=True),
    _Aspect("data missing", lambda run: ", ".join(run.meta.missing_workers), prevents=True),
    _Aspect("limits of the generator", _missed, prevents=True),
    _Aspect("limited by the generator", _generator),
)


def _measured(base: Side, new: Side) -> Iterator[Differing]:
    """Yield what came out in another way than it would from the same requests."""
    ours, theirs = (sum(run.summary["duration_s"] or 0 for run in one.runs) / len(one.runs) for one in (base, new))
    if apart(ours, theirs, _LENGTHS):
        yield Differing("duration", format_duration(ours), format_duration(theirs))
    for name in scenarios(base, new):
        for metric in ("input_tokens", "output_tokens"):
            ours, theirs = (_mean(one, name, metric) for one in (base, new))
            if apart(ours, theirs, _LENGTHS):
                yield Differing(f"{name}: mean {metric.replace('_', ' ')}", format_rate(ours), format_rate(theirs))
        ours, theirs = tokens_per_event(base, name), tokens_per_event(new, name)
        if apart(ours, theirs, EVENTS):
            yield Differing(f"{name}: tokens per event", f"{ours:.3f}", f"{theirs:.3f}: gaps are of other events")


def tokens_per_event(one: Side, scenario: str) -> float:
    """Return how many tokens an event of a scenario carries on average; 0 where there was none."""
    tokens = [scope["tokens"] for scope in scopes(one, scenario)]
    events = sum(found["events"] for found in tokens)
    return sum(found["output_received"] for found in tokens) / events if events else 0.0


def _mean(one: Side, scenario: str, metric: str) -> float:
    found = [scope[metric] for scope in scopes(one, scenario) if scope[metric]["count"]]
    count = sum(values["count"] for values in found)
    return sum(values["mean"] * values["count"] for values in found) / count if count else 0.0


def apart(base: float, new: float, share: float) -> bool:
    """Tell whether two figures differ by more than a share of the base."""
    return abs(new - base) > share * base
