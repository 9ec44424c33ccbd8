"""A process that we start for the user, whose Ctrl-C reaches it through us; nothing of it is left afterwards."""

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm_locust.errors import ExitCode

_GRACE_S = 5.0
_HURRIES = 2
"""The first interrupt ends a run in order, the second one hurries that, the third one leaves."""


@contextmanager
def started(command: list[str], env: Mapping[str, str] | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a process whose output is ours, and end it with the block."""
    # Its own session: Ctrl-C in the terminal is ours to hand on. No stdin, or each would read the terminal's keys.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=env)  # noqa: S603 - our own words
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process, handing it the interrupts that are sent to us; returns its exit code, 1 if it was killed."""
    interrupts = 0

    def interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        process.send_signal(signal.SIGINT if interrupts <= _HURRIES else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    code = process.wait()
    return code if code >= 0 else int(ExitCode.NOT_RUN)
