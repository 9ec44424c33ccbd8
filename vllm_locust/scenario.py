"""Scenario files → validated values, and which request is the i-th.

A file has parts; a part's name is its scenario label and its Locust tag. Everything is checked before the first
request: an unknown key, a wrong type or a missing file names file, key, value and what is accepted.

Request *i* of a user class is a pure function of (seed, class, i): which part, which prompt, which length. So the
same seed sends the same requests to a baseline and to a tuned server, on any number of workers. Parts come in blocks
in which each is exactly as frequent as its weight says, in a seeded order; the prompts of a part in a seeded
permutation, so that each comes once before any comes twice. Leaving parts out (tags) changes nothing about the
requests of those that stay.
"""

import hashlib
import random
import tomllib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from vllm_locust import limit, prompts
from vllm_locust.errors import InputError
from vllm_locust.limit import Goodput
from vllm_locust.prompts import Prompt
from vllm_locust.quantity import format_list

_PACKAGED = (Path(__file__).parent / "scenarios", Path(__file__).parent.parent / "scenarios")
"""Where the packaged scenarios are: in the wheel, and in a checkout."""
_LARGEST_BLOCK = 100_000
_ORDERS = ("weighted", "once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of request."""

    name: str
    prompts: tuple[Prompt, ...]
    weight: int = 1
    cold: bool = True
    """Whether a nonce starts each prompt, so that the server's prefix cache answers nothing twice."""
    output_tokens: int | None = None
    """Exact length of the answers, where the server can."""
    max_tokens: int | None = None
    """Longest answer, where answers end by themselves."""
    temperature: float | None = None
    extra_body: dict[str, Any]
    skipped_prompts: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one user class sends."""

    name: str
    parts: tuple[Part, ...]
    stability: bool = False
    """Whether the run is to be judged as a stability test."""
    once: bool = False
    """Whether each prompt is sent once, in a seeded order of all of them, and then no more; weights do not count."""
    limits: tuple[str, ...] = ()
    """What a run has to meet, each limit as `vllm_locust.limit.parse` takes it; no part of what is sent."""
    goodput: tuple[str, ...] = ()
    """What a good request is, a text for each scope."""

    @property
    def prompts(self) -> int:
        """How many there are."""
        return sum(len(part.prompts) for part in self.parts)

    def only(self, tags: Iterable[str] | None, exclude: Iterable[str] | None) -> "Scenario":
        """Return the scenario with those parts alone that are named, and not excluded; None names all."""
        wanted, unwanted = None if not tags else set(tags), set(exclude or ())
        kept = tuple(p for p in self.parts if (wanted is None or p.name in wanted) and p.name not in unwanted)
        return replace(self, parts=kept)


class Given(NamedTuple):
    """A value of the user, and the option or the key of a file that it was given by."""

    where: str
    value: Any
    folder: Path | None = None
    """What paths are relative to."""


LOAD_KEYS = (
    *("request_rate", "arrivals", "burstiness", "trace", "trace_speed", "max_in_flight"),
    *("requests", "retry_failed", "warmup", "stages", "stage_time", "run_time"),
)
"""What `[load]` of a scenario may hold; each is also an option."""


class Pick(NamedTuple):
    """What the i-th request sends."""

    part: Part
    prompt: Prompt
    output_tokens: int | None


def pick(scenario: Scenario, seed: int, user_class: str, index: int) -> Pick:
    """Return what request `index` of a user class sends; a pure function of its arguments."""
    if scenario.once:
        return _pick_once(scenario, seed, user_class, index)
    pattern_size = sum(part.weight for part in scenario.parts)
    block, position = divmod(index, pattern_size)
    weights = tuple(part.weight for part in scenario.parts)
    number, earlier = pattern(seed, user_class, block, weights)[position]
    part = scenario.parts[number]
    count = len(part.prompts)
    cycle, place = divmod(block * part.weight + earlier, count)
    prompt = part.prompts[_permutation(f"{seed}|{user_class}|{part.name}|{cycle}", count)[place]]
    return Pick(part, prompt, prompt.output_tokens or part.output_tokens)


def _pick_once(scenario: Scenario, seed: int, user_class: str, index: int) -> Pick:
    number = _permutation(f"{seed}|{user_class}||once", scenario.prompts)[index]
    for part in scenario.parts:
        if number < len(part.prompts):
            prompt = part.prompts[number]
            return Pick(part, prompt, prompt.output_tokens or part.output_tokens)
        number -= len(part.prompts)
    raise IndexError(index)


@lru_cache(maxsize=64)
def pattern(seed: int, user_class: str, block: int, weights: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return for each place of a block (part, how often that part came earlier in the block)."""
    order = [number for number, weight in enumerate(weights) for _ in range(weight)]
    _seeded(f"{seed}|{user_class}|{block}").shuffle(order)
    seen = [0] * len(weights)
    places = []
    for number in order:
        places.append((number, seen[number]))
        seen[number] += 1
    return places


@lru_cache(maxsize=256)
def _permutation(key: str, count: int) -> list[int]:
    order = list(range(count))
    _seeded(key).shuffle(order)
    return order


def _seeded(key: str) -> random.Random:
    """Return a generator that follows from a text, the same on every platform and in every process."""
    return random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest()))  # noqa: S311 - no secret


def nonce(run: str, user_class: str, index: int, attempt: int = 0) -> str:
    """Return what starts a cold prompt: of constant length, never the same twice."""
    again = f"|{attempt}" if attempt else ""
    digest = hashlib.blake2b(f"{run}|{user_class}|{index}{again}".encode(), digest_size=8).hexdigest()
    return f"[{digest}] "


def digest(encoded: bytes) -> str:
    """Return what names encoded scenarios: equal digest, equal requests."""
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def load(name: str, *, relative_to: Path | None = None, skip_bad_prompts: bool = False) -> Scenario:
    """Load a scenario: a packaged one by its name, else a path against the working directory, then `relative_to`."""
    path = _find(name, relative_to)
    parts = _load_file(path, (), skip_bad=skip_bad_prompts)
    file = _Table(path, "", _read_toml(path))
    stability, order = file.take("stability", _switch), file.take("order", _one_of(*_ORDERS))
    limits, goodput = _load_limits(path, parts)
    return Scenario(path.stem, _whole_weights(path, parts), bool(stability), order == "once", limits, goodput)


def load_keys(name: str, *, relative_to: Path | None = None) -> dict[str, Given]:
    """Return what a scenario file says of load; a file that it includes has no say in it."""
    path = _find(name, relative_to)
    table = _Table(path, "load.", _read_toml(path).get("load", {}))
    given = {
        key: Given(f"{path}: load.{key}", table.take(key, _stages if key == "stages" else _plain), path.parent)
        for key in LOAD_KEYS
    }
    table.close(*LOAD_KEYS)
    return {key: value for key, value in given.items() if value.value is not None}


def packaged() -> dict[str, Path]:
    """Return the packaged scenarios by name."""
    folder = next((folder for folder in _PACKAGED if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _find(name: str, relative_to: Path | None) -> Path:
    known = packaged()
    if name in known:
        return known[name]
    candidates = [Path(name), *([relative_to / name] if relative_to else [])]
    for path in candidates:
        if path.is_file():
            return path
    looked = " and ".join(str(path.absolute()) for path in candidates)
    raise InputError(
        f"scenario {name!r} not found: neither packaged ({format_list(known)}) nor a file (looked for {looked}); "
        "set `scenario` of the user class, or --scenario"
    )


def _load_file(path: Path, including: tuple[Path, ...], *, skip_bad: bool) -> dict[str, tuple[Part, Fraction]]:
    """Return the parts of a file and of those that it includes, with their weights."""
    if path.resolve() in including:
        raise InputError(f"{path}: includes itself, by way of {format_list(p.name for p in including)}")
    table = _Table(path, "", _read_toml(path))
    parts: dict[str, tuple[Part, Fraction]] = {}
    cold = table.take("cache", _one_of("cold", "natural"))
    for name in table.take("include", _texts) or ():
        found = _load_file(path.parent / name, (*including, path.resolve()), skip_bad=skip_bad)
        _refuse_twice(path, parts.keys() & found.keys())
        parts |= found
    own = {
        name: (_part(path, name, value, skip_bad=skip_bad), Fraction(1))
        for name, value in (table.take("part", _tables) or {}).items()
    }
    _refuse_twice(path, parts.keys() & own.keys())
    parts |= own
    weights = table.take("weight", _weights) or {}
    table.take("load", _table)
    table.take("order", _one_of(*_ORDERS))
    table.take("stability", _switch)
    table.take("limits", _limit_table)  # those of the outermost file hold, see `_load_limits`
    table.close("include", "cache", "weight", "part", "order", "load", "limits", "stability")
    unknown = weights.keys() - parts.keys()
    if unknown:
        raise InputError(f"{path}: weight.{min(unknown)}: no such part; there are {format_list(sorted(parts))}")
    if not parts:
        raise InputError(f'{path}: no part in it; write one like [part.short] with prompts = "prompts.jsonl"')
    return {
        name: (part if cold is None else replace(part, cold=cold == "cold"), weights.get(name, weight))
        for name, (part, weight) in parts.items()
    }


def _load_limits(path: Path, parts: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the limits of a file, and what it calls a good request.

    Those of files that it includes do not come along: they were set for the traffic of those files alone.
    """
    by_scope = _read_toml(path).get("limits", {})
    good = _Table(path, "limits.", by_scope).take("goodput", _good_table) or {}
    texts = {name: value for name, value in by_scope.items() if name != "goodput"}
    table = _Table(path, "limits.", texts)
    limits = [
        str(limit.parse(text, scope=name, where=_where(path, f"limits.{name}", name, parts)))
        for name in texts
        for text in table.take(name, _limit_texts)
    ]
    found = [
        limit.parse_good(text, scope=name, where=_where(path, f"limits.goodput.{name}", name, parts))
        for name, text in good.items()
    ]
    return tuple(limits), Goodput(tuple(chain.from_iterable(found))).texts


def _where(path: Path, key: str, part: str, parts: Collection[str]) -> str:
    """Return how errors of a limit begin; refuse one on a part that is not there, or cannot be named in a line."""
    if part != limit.ALL and part not in parts:
        known = format_list((*sorted(parts), limit.ALL))
        raise InputError(f"{path}: {key}: no such part; there are {known}")
    if part != part.strip():
        raise InputError(f"{path}: {key}: limits need a part whose name does not begin or end with a blank; rename it")
    return f"{path}: {key}"


def _refuse_twice(path: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        raise InputError(f"{path}: part {name!r} is defined twice, here and in a file that it includes; rename one")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None


def _part(path: Path, name: str, value: dict[str, Any], *, skip_bad: bool) -> Part:
    if not name.isprintable() or not name:
        raise InputError(f"{path}: part {name!r}: a name is a label; it may not be empty or have control characters")
    table = _Table(path, f"part.{name}.", value)
    file = table.take("prompts", _text)
    if file is None:
        raise InputError(f'{path}: part.{name}.prompts is missing; give a file of prompts, like "prompts/short.jsonl"')
    output_tokens = table.take("output_tokens", _positive)
    max_tokens = table.take("max_tokens", _positive)
    temperature = table.take("temperature", _not_negative)
    extra_body = table.take("extra_body", _table) or {}
    table.close("prompts", "output_tokens", "max_tokens", "temperature", "extra_body")
    if output_tokens is not None and max_tokens is not None:
        raise InputError(f"{path}: part.{name}: output_tokens (an exact length) and max_tokens exclude each other")
    loaded = prompts.load(path.parent / file, skip_bad=skip_bad)
    return Part(
        name=name,
        prompts=loaded.prompts,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        extra_body=extra_body,
        skipped_prompts=loaded.skipped,
    )


def _whole_weights(path: Path, parts: dict[str, tuple[Part, Fraction]]) -> tuple[Part, ...]:
    """Scale weights like 0.6 and 0.3 to whole numbers; a part of weight 0 is left out."""
    kept = {name: (part, weight) for name, (part, weight) in parts.items() if weight}
    if not kept:
        raise InputError(f"{path}: weight: every part has weight 0")
    scale = lcm(*(weight.denominator for _, weight in kept.values()))
    whole = {name: int(weight * scale) for name, (_, weight) in kept.items()}
    if sum(whole.values()) > _LARGEST_BLOCK:
        raise InputError(f"{path}: weight: {format_list(whole.values())} are too fine; use small whole numbers")
    return tuple(replace(part, weight=whole[name]) for name, (part, _) in kept.items())


class _Table:
    """A TOML table whose keys are taken one by one; what is left at the end is unknown."""

    def __init__(self, path: Path, prefix: str, values: dict[str, Any]) -> None:
        self._path = path
        self._prefix = prefix
        self._values = dict(values)

    def take(self, key: str, check: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what `check` returns
        """Return the checked value of a key, None where it is absent."""
        if key not in self._values:
            return None
        value = self._values.pop(key)
        try:
            return check(value)
        except ValueError as expected:
            raise InputError(f"{self._path}: {self._prefix}{key} is {value!r}, expected {expected}") from None

    def close(self, *accepted: str) -> None:
        """Refuse keys that nobody took."""
        for key in self._values:
            raise InputError(f"{self._path}: {self._prefix}{key}: unknown key; accepted are {format_list(accepted)}")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError('a list of files, like ["short.toml", "long.toml"]')
    return value


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _plain(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number or a text")
    return value


def _stages(value: object) -> object:
    if not isinstance(value, list):
        return _plain(value)
    if not all(isinstance(stage, int | float) and not isinstance(stage, bool) for stage in value):
        raise ValueError("numbers, like [8, 16, 32]")
    return value


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table, like { top_p = 0.9 }")
    return value


def _tables(value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ValueError("tables like [part.short]")
    return value


def _limit_table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError('a table of limits by part, like { short = "ttft p95 < 300ms" }')
    return value


def _limit_texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError('a limit, like "ttft p95 < 300ms", or a list of them')
    return texts


def _good_table(value: object) -> dict[str, str]:
    by_part = {limit.ALL: value} if isinstance(value, str) else value
    if not isinstance(by_part, dict) or not all(isinstance(text, str) for text in by_part.values()):
        raise ValueError('what a good request is, like "ttft < 300ms, tpot < 50ms", or a table of that by part')
    return by_part


def _positive(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def _not_negative(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a number of at least 0")
    return value


def _weights(value: object) -> dict[str, Fraction]:
    expected = "a number of at least 0 for each part, like { short = 6, long = 3 }"
    if not isinstance(value, dict):
        raise ValueError(expected)
    try:
        return {name: Fraction(str(_not_negative(weight))) for name, weight in value.items()}
    except ValueError:
        raise ValueError(expected) from None


def _one_of(*accepted: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in accepted:
            raise ValueError(" or ".join(repr(word) for word in accepted))
        return str(value)

    return check
