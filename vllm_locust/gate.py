"""One command for CI, from nothing to an exit code: a run with its limits, and a comparison with what was stored.

Promise: what is wrong with a baseline, a limit or a summary's place is said before anything is sent; the run is the one
that this command started, never the newest one in a directory; and a stored baseline is never replaced.

The run is `locust` in a process of its own, with the user's own options; whether it passed is its exit code, of which
the comparison can make a worse one (`vllm_locust.verdict.worst`). A run that ended early, or sent nothing, is not
compared.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_locust import allowance, child, compare, comparison, markdown, page, pairs, results
from vllm_locust.allowance import Allowance
from vllm_locust.comparison import Comparison
from vllm_locust.errors import ExitCode, InputError
from vllm_locust.results import Run
from vllm_locust.side import scenarios, side
from vllm_locust.terminal import labelled
from vllm_locust.verdict import worst

LIMIT = "--limit-difference"
_SAVED = "VLLM_LOCUST_SAVED_PATH"
"""Where the run says which file it was saved to: as a variable, since its command line is the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a run has to pass."""

    locust: tuple[str, ...]
    """The user's options for `locust`."""
    baseline: tuple[Path, ...] = ()
    """Runs to compare with."""
    store: bool = False
    """Whether a run that passes becomes the baseline where there is none."""
    allowances: tuple[Allowance, ...] = ()
    tuned: bool = False
    summary: Path | None = None
    """File that Markdown is added to."""
    html: Path | None = None
    """File for the comparison with charts."""


def run(gate: Gate) -> int:
    """Run, compare, tell; returns the exit code. Raises `InputError` before anything is sent."""
    base = _base(gate)
    _check_outputs(gate)
    code, saved = _measured(gate.locust)
    facts = [f"run: exit code {code}" if code else "run: ok"]
    ran = None if saved is None else results.load(saved)
    found = None if saved is None or ran is None or not base else _compared(gate, base, ran, saved)
    if ran is None or saved is None:
        code = code or ExitCode.NOT_RUN
        facts.append("nothing was saved: see what the run said")
    elif base:
        code = _worse(code, ExitCode.OK if found is None else found.exit_code)
        what = "not made: the run ended early, or sent nothing" if found is None else compare.verdict(found)
        facts.append(f"comparison: {what}")
    elif gate.store:
        code, fact = _stored(saved.parent, gate.baseline[0], code)
        facts.append(fact)
    verdict = f"failed (exit code {code:d})" if code else "passed"
    _print(found, [*facts, verdict])
    try:
        if gate.summary is not None:
            _add(gate.summary, _markdown(ran, found, facts, verdict))
        if gate.html is not None and found is not None:
            results.save_text(page.of_comparison(found), gate.html)
    except InputError as error:  # the disk is full, say: what the run was worth is known all the same
        print(f"vllm-locust: {error}", file=sys.stderr)
        code = code or ExitCode.NOT_RUN
    return code


def _base(gate: Gate) -> list[Run]:
    """Load what is compared with, none where this run is to become it, and check all else that was given."""
    if not gate.locust:
        raise InputError("gate: give the options of locust after --, like -- -f locustfiles/mixed.py --host …")
    if any(word.partition("=")[0] == "--saved-path" for word in gate.locust):
        raise InputError("gate: --saved-path is how it finds the run; leave it out")
    if not gate.baseline:
        given = {
            "--save-baseline": gate.store,
            LIMIT: bool(gate.allowances),
            "--rule": gate.tuned,
            "--html": gate.html is not None,
        }
        if flag := next((flag for flag, is_given in given.items() if is_given), None):
            raise InputError(f"gate: {flag} is for a comparison; name what to compare with by --baseline RUN")
        return []
    if gate.store and len(gate.baseline) > 1:
        raise InputError(f"gate: --save-baseline is for one --baseline, not for {len(gate.baseline)}")
    if gate.store and _vacant(gate.baseline[0]):
        _check_place(gate.baseline[0])
        return []
    for path in filter(_vacant, gate.baseline):
        raise InputError(
            f"--baseline {path}: no run is there; give a {results.FILE_NAME} or its directory, or --save-baseline "
            "to have a run that passes stored there"
        )
    base = [results.load(path) for path in gate.baseline]
    allowance.check_parts(gate.allowances, scenarios(side(base)), LIMIT)
    return base


def _check_outputs(gate: Gate) -> None:
    if gate.summary is not None:
        _add(gate.summary, "")
    if gate.html is not None and not gate.html.absolute().parent.is_dir():
        raise InputError(f"--html {gate.html}: there is no such directory; give another file")


def _vacant(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _measured(options: Sequence[str]) -> tuple[int, Path | None]:
    """Return the exit code of a run, and the file that it was saved to, if it was."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "saved"
        command = [sys.executable, "-m", "locust", *options, "--headless", "--only-summary"]
        with child.started(command, {**os.environ, _SAVED: str(told)}) as process:
            code = child.ended(process)
        return code, Path(told.read_text(encoding="utf-8")) if told.exists() else None


def _compared(gate: Gate, base: Sequence[Run], ran: Run, saved: Path) -> Comparison | None:
    """Compare, unless there is not the whole of a run."""
    if ran.meta.ended_early or not ran.summary["total"]["requests"]:
        return None
    samples = pairs.of_runs(gate.baseline, [saved])
    return comparison.compare(base, [ran], allowances=gate.allowances, tuned=gate.tuned, samples=samples)


def _worse(code: int, other: ExitCode) -> int:
    """Return the worse of two; a code of Locust's own, or of the user's, stays what it is."""
    return worst({ExitCode(code), other}) if code in (0, 1, 3, 4) else code


# The baseline


def _check_place(baseline: Path) -> None:
    """Find out before the first request whether a directory for a baseline can be made."""
    if baseline.suffix == ".json":
        raise InputError(f"--baseline {baseline}: a baseline is stored as a directory, with its {results.FILE_NAME}")
    try:
        baseline.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=baseline.parent):
            pass
    except OSError as error:
        raise InputError(f"--baseline {baseline}: cannot be written to ({error.strerror})") from error


def _stored(directory: Path, baseline: Path, code: int) -> tuple[int, str]:
    """Store a run that passed; returns the exit code, and what became of it."""
    if code:
        return code, f"baseline: not stored in {baseline}, since the run did not pass"
    place = baseline.resolve()
    part = place.with_name(f".{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(directory, part)
        if place.exists():
            place.rmdir()  # which is empty, or a baseline has come meanwhile
        part.rename(place)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        return ExitCode.NOT_RUN, f"baseline: not stored in {baseline} ({error})"
    return code, f"baseline: stored in {baseline}"


# What is told


def _print(found: Comparison | None, lines: Sequence[str]) -> None:
    told = "" if found is None else f"\n{compare.text(found)}"
    gate = "\n".join(labelled("Gate", [*lines]))
    print(f"{told}\n{gate}", flush=True)


def _markdown(ran: Run | None, found: Comparison | None, facts: Sequence[str], verdict: str) -> str:
    parts = [
        f"## Gate: {verdict}\n",
        "".join(f"- {markdown.code(fact)}\n" for fact in facts),
        "" if ran is None else markdown.text(ran),
        "" if found is None else compare.as_markdown(found),
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _add(file: Path, text: str) -> None:
    """Add to a file, which others may add to as well; raises `InputError`."""
    try:
        with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
            opened.write(text)
    except OSError as error:
        raise InputError(f"--summary {file}: cannot be written to ({error.strerror}); give another file") from error
