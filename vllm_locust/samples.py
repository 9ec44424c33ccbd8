"""Samples of answers: a few of each scenario, the same ones of every run that asks the same questions.

Promise: what is kept are the answers to those requests whose ranks are the smallest. A rank is a hash of seed, user
class and the number of the request, so it says nothing of the answer, of who asked, or of when; two runs of one seed
keep the same ones, whatever their workers. Merging is by extreme: the smallest of all are the smallest of the smallest
of any parts, in whichever order and however often these come.

Whether an answer is to be kept is known before the request leaves. Of n requests of a scenario, some K ln(n / K) are
candidates at one time, and no text of another one is ever kept.

What is asked again by `--retry-failed` is no sample: that of the first time is.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec

from vllm_locust.answer import text_of
from vllm_locust.errors import InputError
from vllm_locust.quantity import format_list
from vllm_locust.secret import blotted
from vllm_locust.timeline import Outcome, Timeline

FILE_NAME = "samples.jsonl"
MOST = 1_000
"""So many of a scenario are enough for any reader, and fit into the memory of a worker."""
KEPT_CHARACTERS = 100_000
"""Of the texts of one answer: some 25,000 tokens."""
_PIECE_BYTES = 250_000
"""What travels at once, as of the log of requests."""
_MOST_SCENARIOS = 1_000
"""More of them are names of requests."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer; what there was not is null."""

    scenario: str
    endpoint: str
    user_class: str
    index: int | None
    """Its number among the requests of its user class; absent where a task of the user's own has built it."""
    seed: int
    rank: str
    request_id: str
    worker: str
    phase: str
    outcome: str
    status: int | None
    message: str | None
    finish_reason: str | None
    input_tokens: int | None
    output_tokens: int
    estimated: bool
    ttft_s: float | None
    e2el_s: float | None
    prompt: Any
    """The text or the messages, without the nonce that a cold cache puts in front."""
    answer: str | list[str] | None
    """Of several choices, one after the other."""
    reasoning: str | list[str] | None
    truncated: bool
    """Whether the answer was longer than what is kept."""


def rank(seed: int, user_class: str, which: int | bytes) -> str:
    """Return the rank of a request, which is its number or, where it has none, its prompt: 16 hexadecimal digits."""
    name = which if isinstance(which, bytes) else str(which).encode()
    return blake2b(f"{seed}|{user_class}|".encode() + name, digest_size=8).hexdigest()


# While it runs


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose answer is wanted."""

    rank: str
    index: int | None
    prompt: bytes
    """As JSON; encoded before it leaves, since a body of the user's may have the answer in it later."""


class Samples:
    """The samples of one process in one run."""

    def __init__(self, worker: str, seed: int, most: int) -> None:
        """Keep at `most` so many of each scenario."""
        self.seed = seed
        self._worker = worker
        self._most = most
        self._ranks: dict[str, list[str]] = {}
        """Of each scenario the smallest ones, in order, those of requests that still run among them."""
        self._samples: dict[tuple[str, str], Sample] = {}
        self._left_out = 0
        self._data: bytes | None = None
        self.delivered = False
        """Whether somebody has them all."""

    def admit(self, scenario: str, rank: str) -> bool:
        """Tell whether the answer to a request that is about to leave is wanted; the one it displaces is dropped."""
        ranks = self._ranks.get(scenario)
        if ranks is None:
            if len(self._ranks) == _MOST_SCENARIOS:
                self._left_out += 1
                return False
            ranks = self._ranks[scenario] = []
        full = len(ranks) == self._most
        # The same again is what a task of the user's own asks time and again: its first answer stands for them all.
        if (full and rank > ranks[-1]) or rank in ranks:
            return False
        if full:
            self._samples.pop((scenario, ranks.pop()), None)
        insort(ranks, rank)
        return True

    def keep(self, wanted: Wanted, timeline: Timeline) -> None:
        """Take the answer to a request that has ended, unless it has been displaced in the meantime."""
        if wanted.rank in self._ranks[timeline.scenario]:
            sample = _sample(wanted, timeline, seed=self.seed, worker=self._worker)
            self._samples[timeline.scenario, wanted.rank] = sample

    def piece(self, offset: int) -> dict[str, Any]:
        """Return what the master asks for, as `RequestLog.piece` does."""
        if self._data is None:
            self._data = b"".join(msgspec.json.encode(sample) + b"\n" for sample in self._samples.values())
        size = len(self._data)
        self.delivered = self.delivered or offset >= size
        trouble = f"beyond {_MOST_SCENARIOS:,} scenarios" if self._left_out else ""
        data = self._data[offset : offset + _PIECE_BYTES]
        return {"offset": offset, "data": data, "size": size, "left_out": self._left_out, "trouble": trouble}


def _sample(wanted: Wanted, timeline: Timeline, *, seed: int, worker: str) -> Sample:
    kept = timeline.answer
    content, reasoning = (kept.content, kept.reasoning) if kept is not None else ({}, {})
    length = sum(map(len, [*content.values(), *reasoning.values()]))
    content = _cut(content, KEPT_CHARACTERS)
    reasoning = _cut(reasoning, KEPT_CHARACTERS - sum(map(len, content.values())))
    return Sample(
        scenario=timeline.scenario,
        endpoint=timeline.endpoint,
        user_class=timeline.user_class,
        index=wanted.index,
        seed=seed,
        rank=wanted.rank,
        request_id=timeline.request_id,
        worker=worker,
        phase=timeline.phase,
        outcome=str(timeline.outcome),
        status=timeline.status or None,
        message=timeline.message or None,
        finish_reason=timeline.finish_reason,
        input_tokens=timeline.input_tokens,
        output_tokens=timeline.output_tokens,
        estimated=timeline.events > 0 and timeline.estimated,
        ttft_s=None if timeline.ttft_ns is None else timeline.ttft_ns / 1e9,
        e2el_s=None if timeline.e2el_ns is None else timeline.e2el_ns / 1e9,
        prompt=_blotted(msgspec.json.decode(wanted.prompt), timeline.secret),
        answer=text_of(content, timeline.secret),
        reasoning=text_of(reasoning, timeline.secret),
        truncated=length > KEPT_CHARACTERS or (kept is not None and kept.truncated),
    )


def _cut(by_choice: Mapping[int, str], left: int) -> dict[int, str]:
    """Return the first characters of the texts of all choices."""
    cut = {}
    for choice, text in by_choice.items():
        cut[choice] = text[:left]
        left -= len(cut[choice])
    return cut


def _blotted(prompt: Any, secret: str | None) -> Any:  # noqa: ANN401 - JSON
    if isinstance(prompt, str):
        return blotted(prompt, secret)
    if isinstance(prompt, dict):
        return {name: _blotted(value, secret) for name, value in prompt.items()}
    return [_blotted(value, secret) for value in prompt] if isinstance(prompt, list) else prompt


# Of all workers

Kept = dict[str, dict[str, Sample]]
"""By scenario and rank."""


def add(kept: Kept, sample: Sample, most: int) -> None:
    """Keep a sample if its rank is among the smallest; one that is there already changes nothing."""
    known = kept.setdefault(sample.scenario, {})
    same = known.get(sample.rank)
    known[sample.rank] = sample if same is None else min(same, sample, key=_preference)
    if len(known) > most:
        del known[max(known)]


def _preference(sample: Sample) -> tuple[bool, bytes]:
    """Order what was asked twice, as when a worker was lost for a while: what was cut comes last; else any order."""
    return sample.outcome == Outcome.CANCELLED, msgspec.json.encode(sample)


def each(kept: Kept) -> list[Sample]:
    """Return all that is kept, scenario by scenario."""
    return [kept[scenario][rank] for scenario in sorted(kept) for rank in sorted(kept[scenario])]


# The file


def write(lines: Iterable[bytes], file: IO[bytes], most: int) -> None:
    """Write the samples of a run from those of its workers; raises `OSError`."""
    kept: Kept = {}
    decoder = msgspec.json.Decoder(Sample)
    for line in lines:
        add(kept, decoder.decode(line), most)
    file.writelines(msgspec.json.encode(sample) + b"\n" for sample in each(kept))


def load(path: Path) -> list[Sample]:
    """Read the samples beside a run, of its file or directory; none where it has kept none."""
    file = (path if path.is_dir() else path.parent) / FILE_NAME
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    decoder, samples = msgspec.json.Decoder(Sample), []
    for number, line in enumerate(lines, 1):
        try:
            samples.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"{file}, line {number}: no sample ({error}); measure again, or remove the file"
            ) from error
    return samples


def line(path: Path) -> str:
    """Say where the samples beside a run are, and how many of what; empty where it has kept none."""
    try:
        found = load(path)
    except InputError as error:
        return str(error)
    return f"{(path if path.is_dir() else path.parent) / FILE_NAME}: {told(found)}" if found else ""


def told(samples: Iterable[Sample]) -> str:
    """Say in a few words how many answers of what there are."""
    numbers = Counter(sample.scenario for sample in samples)
    if len(numbers) > 1 and len(set(numbers.values())) == 1:
        return f"{_answers(numbers.popitem()[1])} of each of {len(numbers) + 1} scenarios"
    return format_list(f"{_answers(number)} of {name}" for name, number in sorted(numbers.items()))


def _answers(number: int) -> str:
    return f"{number} answers" if number > 1 else "1 answer"
