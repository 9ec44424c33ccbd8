"""A run as a file.

Promise: what is saved is strict JSON, complete or not there at all, never in the place of another run; loaded again it
gives the same summary to the last digit.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from vllm_locust import bench_run
from vllm_locust import recording as recordings
from vllm_locust.bench_result import TOOL
from vllm_locust.errors import InputError
from vllm_locust.figures import Summary
from vllm_locust.older import upgraded
from vllm_locust.quantity import format_list
from vllm_locust.recording import Recording
from vllm_locust.summary import Meta, summary

FORMAT = 1
"""Version of the run file; another one is refused."""
FILE_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended; made by `Run.of` or `load`."""

    meta: Meta
    recording: Recording
    summary: Summary

    @classmethod
    def of(cls, recording: Recording, meta: Meta) -> "Run":
        """Sum a finished recording up."""
        return cls(meta, recording, summary(recording, meta))


def check_writable(directory: Path) -> None:
    """Make the directory for results, and find out before the first request whether it can be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from error


def save(run: Run, directory: Path) -> Path:
    """Write `<directory>/<name>_<time>/run.json` and return its path; what is there already stays."""
    try:
        target = _new_directory(directory, f"{slug(run.meta.name)}_{stamp(run.meta.started)}") / FILE_NAME
        try:
            with replacing(target) as file:
                file.writelines(_encoded(run))
        except BaseException:
            target.parent.rmdir()
            raise
    except OSError as error:
        raise _unwritable(directory, error) from error
    return target


def _encoded(run: Run) -> Iterator[bytes]:
    """Yield a run file, window by window: those of a day are too much to be in memory as JSON."""
    frame = {**run.recording.save_frame(), "windows": []}
    content = {"format": FORMAT, "meta": msgspec.to_builtins(run.meta), "summary": run.summary, "recording": frame}
    end = b"]}}"
    yield encode(content).removesuffix(end)
    for number, window in enumerate(run.recording.save_windows()):
        yield (b"," if number else b"") + encode(window)
    yield end + b"\n"


def encode(content: Any) -> bytes:  # noqa: ANN401 - JSON
    """Encode strict JSON: msgspec writes what is not finite as null."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:  # half a surrogate pair: Python has strings that UTF-8 has not
        return msgspec.json.encode(_encodable(msgspec.to_builtins(content)))


def _encodable(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _new_directory(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    directory, number = parent / name, 1
    while True:
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
            directory = parent / f"{name}-{number}"
        else:
            return directory


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that is there once all of it is written, and not at all where that fails."""
    temporary = target.with_name(f".{target.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def slug(name: str) -> str:
    """Return a name as one harmless part of a path, short enough for a file system in any script."""
    return re.sub(r"[^\w.-]+", "-", name)[:50].strip(".-") or "run"


def stamp(started: str) -> str:
    """Return when a run began, as it is in the name of its directory; now, where that is no time."""
    try:
        at = datetime.fromisoformat(started)
    except ValueError:
        at = datetime.now(UTC)
    return f"{at:%Y%m%d-%H%M%S}"


def save_text(text: str, file: Path) -> None:
    """Write a report; raises `InputError` where that cannot be."""
    try:
        with replacing(file) as opened:
            opened.write(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise InputError(f"{file}: cannot be written to ({error.strerror}); give another file") from error


def _unwritable(directory: Path, error: OSError) -> InputError:
    return InputError(
        f"--results {directory}: cannot be written to ({error.strerror}); give another one: --results DIR"
    )


def load(path: Path) -> Run:
    """Read a run from its file, or from the directory that holds it; from a result of `vllm bench serve`, too."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; give a {FILE_NAME} or its directory") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    saved = _decode(data, file)
    try:
        if bench_run.recognised(saved):
            return Run(*bench_run.read(saved, file.stem))
        return Run.of(recordings.load(upgraded(saved["recording"])), msgspec.convert(saved["meta"], Meta))
    except (
        *(ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError),
        msgspec.ValidationError,  # only since 0.21 a ValueError
    ) as error:
        raise InputError(f"{file}: damaged ({type(error).__name__}: {error}); measure again") from error


def _decode(data: bytes, file: Path) -> dict[str, Any]:
    try:
        saved = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise InputError(f"{file}: truncated, its end is missing; copy or measure it again") from error
        raise InputError(f"{file}: not JSON ({error}); give the {FILE_NAME} of a run") from error
    if bench_run.recognised(saved):
        return dict(saved)
    if not isinstance(saved, dict) or not {"format", "meta", "recording"} <= saved.keys():
        raise InputError(
            f"{file}: no run file of vllm-locust (with the keys format, meta and recording), "
            f"and no result of {TOOL} (with {format_list(sorted(bench_run.KEYS))})"
        )
    if saved["format"] != FORMAT:
        meta = saved["meta"] if isinstance(saved["meta"], dict) else {}
        raise InputError(
            f"{file}: run file of format {saved['format']!r:.40}, "
            f"written by vllm-locust {meta.get('plugin_version')!r:.40}; this version reads format {FORMAT}"
        )
    return saved
