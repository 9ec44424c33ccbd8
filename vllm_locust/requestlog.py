"""The log of all requests: a row for each, kept by the process that sent it until the run is over.

Promise: every request that the run began has a row, whatever became of it. Where there is no room for all, the first
ones have, and the others are counted. The loop does not wait for any of it: rows are made in slices, and written by a
thread.

Prompts and answers are in a row only where the user asks for them, the key of the server never.
"""

import csv
import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm_locust.answer import text_of
from vllm_locust.api import asked
from vllm_locust.errors import InputError
from vllm_locust.spool import Spool
from vllm_locust.tally import longest_gap_ns
from vllm_locust.timeline import Timeline

FORMATS = ("jsonl", "csv")
MOST_BYTES = 256_000_000
"""What a process keeps: some 400,000 requests without texts, and where temporary files are in memory, not all of it."""
PIECE_BYTES = 250_000
"""What travels at once: messages of the run itself wait behind it for a moment only."""
_SLICE = 50
"""How many rows are made without a pause: half a millisecond."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""How cells begin that a spreadsheet takes for formulas (OWASP, CSV injection)."""
_ESCAPED = tuple(f"'{char}" for char in _FORMULA)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Instants are seconds since the run began; what there was not is null."""

    request_id: str
    scenario: str
    endpoint: str
    user_class: str
    worker: str
    epoch: int
    phase: str
    stage: int
    attempt: int
    called_s: float
    scheduled_s: float | None
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    done_s: float
    connect_s: float | None
    ttft_s: float | None
    e2el_s: float | None
    itl_max_s: float | None
    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    token_events: int
    estimated: bool
    finish_reason: str | None
    outcome: str
    status: int | None
    message: str | None
    in_flight: int
    reconnects: int
    prompt: Any = UNSET
    """Absent, as all that follow are, unless texts are wanted."""
    answer: str | list[str] | UnsetType | None = UNSET
    reasoning: str | list[str] | UnsetType | None = UNSET
    answer_truncated: bool | UnsetType = UNSET


TEXTS = ("prompt", "answer", "reasoning", "answer_truncated")
"""The last fields of a row."""
COLUMNS = Row.__struct_fields__[: -len(TEXTS)]
_PLAIN = (int, float, type(None))
"""Types whose values are cells of CSV as they are."""


def row_of(timeline: Timeline, *, worker: str, epoch: int, start_ns: int) -> Row:
    """Return the row of a request that has ended, in a run that began at `start_ns`."""

    def at_s(instant_ns: int | None) -> float | None:
        return None if instant_ns is None else (instant_ns - start_ns) / 1e9

    assert timeline.done_ns is not None  # noqa: S101 - it has ended
    return Row(
        request_id=timeline.request_id,
        scenario=timeline.scenario,
        endpoint=timeline.endpoint,
        user_class=timeline.user_class,
        worker=worker,
        epoch=epoch,
        phase=timeline.phase,
        stage=timeline.stage,
        attempt=timeline.attempt,
        called_s=(timeline.called_ns - start_ns) / 1e9,
        scheduled_s=at_s(timeline.scheduled_ns),
        sent_s=at_s(timeline.sent_ns),
        first_token_s=at_s(timeline.first_ns),
        last_token_s=at_s(timeline.last_ns),
        done_s=(timeline.done_ns - start_ns) / 1e9,
        connect_s=_seconds(timeline.connect_ns),
        ttft_s=_seconds(timeline.ttft_ns),
        e2el_s=_seconds(timeline.e2el_ns),
        itl_max_s=_seconds(longest_gap_ns(timeline)),
        input_tokens=timeline.input_tokens,
        output_tokens=timeline.output_tokens,
        cached_tokens=timeline.cached_tokens,
        token_events=timeline.events,
        estimated=timeline.events > 0 and timeline.estimated,
        finish_reason=timeline.finish_reason,
        outcome=str(timeline.outcome),
        status=timeline.status or None,
        message=timeline.message or None,
        in_flight=timeline.in_flight,
        reconnects=timeline.reconnects,
    )


def _seconds(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else duration_ns / 1e9


class RequestLog:
    """The rows of one process in one run."""

    def __init__(self, worker: str, start_ns: int, *, texts: bool = False, most_bytes: int = MOST_BYTES) -> None:
        """Log for a run that began at `start_ns` on this process's clock."""
        self._worker = worker
        self._start_ns = start_ns
        self._ended: deque[tuple[Timeline, int, msgspec.Raw]] = deque()
        self._lines: list[bytes] = []
        self._encoder = msgspec.json.Encoder()
        self._spool = Spool(most_bytes=most_bytes)
        self.texts = texts
        """Whether prompts and answers are wanted."""
        self.delivered = False
        """Whether somebody has it all."""

    def add(self, timeline: Timeline, epoch: int, body: Mapping[str, Any]) -> None:
        """Take a request that has ended, and what it sent."""
        # Encoded now: the body is the user's, who may be about to put the answer into it, and ask on.
        prompt = self._encoder.encode(asked(body)) if self.texts else b""
        self._ended.append((timeline, epoch, msgspec.Raw(prompt)))

    def slices(self) -> Iterator[None]:
        """Write a row for each request that has ended, a slice at a time: the loop is not to be away for long."""
        while self._ended:
            few = [self._ended.popleft() for _ in range(min(_SLICE, len(self._ended)))]
            self._lines += [self._line(*one) for one in few]
            yield
        if self._lines:  # all at once: each call of a thread costs as much as two dozen rows
            data, self._lines = b"".join(self._lines), []
            self._spool.append(data)

    def _line(self, timeline: Timeline, epoch: int, prompt: msgspec.Raw) -> bytes:
        row = row_of(timeline, worker=self._worker, epoch=epoch, start_ns=self._start_ns)
        if self.texts and timeline.answer is not None:  # it may have been kept for another reader
            row = msgspec.structs.replace(
                row,
                prompt=prompt,
                answer=text_of(timeline.answer.content, timeline.secret),
                reasoning=text_of(timeline.answer.reasoning, timeline.secret),
                answer_truncated=timeline.answer.truncated,
            )
        return self._encoder.encode(row) + b"\n"

    def piece(self, offset: int) -> dict[str, Any]:
        """Return what the master asks for: bytes from an offset of what has been written, and of how many they are.

        Who asks for what lies behind the end has all of it, and the file goes.
        """
        self._spool.settle()
        size = self._spool.size
        data = self._spool.read(offset, PIECE_BYTES) if offset < size else b""
        if offset >= size:
            self.delivered = True
            self._spool.close()
        trouble, left_out = self._spool.trouble, self._spool.left_out
        return {"offset": offset, "data": data, "size": size, "left_out": left_out, "trouble": trouble}

    def close(self) -> None:
        """Nobody will ask for it any more."""
        self._spool.close()


# The file


def write(lines: Iterable[bytes], file: IO[bytes], form: str, *, texts: bool) -> None:
    """Write lines of rows as a file in one of `FORMATS`; raises `OSError`, and `ValueError` where they are no rows."""
    if form == "jsonl":
        file.writelines(lines)
        return
    columns = COLUMNS + TEXTS * texts
    decoder = msgspec.json.Decoder(Row)
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\r\n")  # RFC 4180, section 2
    writer.writerow(columns)
    for line in lines:
        values = msgspec.structs.astuple(decoder.decode(line))[: len(columns)]
        writer.writerow([value if type(value) in _PLAIN else cell(value) for value in values])
    text.detach()


def cell(value: Any) -> str:  # noqa: ANN401 - JSON
    """Return what is neither number nor null as a cell of CSV: no text of it is a formula."""
    if not isinstance(value, str):
        return "" if value is UNSET else msgspec.json.encode(value).decode()
    return f"'{value}" if value.startswith(_FORMULA) else value


def read(file: Path) -> Iterator[Row]:
    """Yield the rows of a log in either of `FORMATS`; raises `InputError` where it is none."""
    form = file.suffix.removeprefix(".")
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            yield from _rows(opened) if form == "csv" else map(msgspec.json.Decoder(Row).decode, opened)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, csv.Error, ValueError) as error:
        raise InputError(f"{file}: no log of requests ({error}); it is written by --request-log") from error


def _rows(file: IO[str]) -> Iterator[Row]:
    """Yield what `write` wrote as CSV; several answers of one request stay the one text that they were written as."""
    empty = {field.name: "" if field.type is str else None for field in msgspec.structs.fields(Row)[: len(COLUMNS)]}
    for line in csv.DictReader(file):
        values = {name: text[text.startswith(_ESCAPED) :] for name, text in line.items() if text}
        yield msgspec.convert(empty | values, Row, strict=False)
