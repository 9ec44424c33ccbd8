"""Errors of the user, and the exit codes of every command.

An error of the user says what was wrong, where (file, line or key), with which value, what is accepted, and the flag
that fixes it. It is printed as one message, never as a traceback. What a server does wrong is no error but a counted
outcome; anything else that is raised is a bug of ours and keeps its traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process says when it ends; the higher number wins where two apply, but 4 beats 3 only for doubt."""

    OK = 0
    """Ran, and met its limits if it had any."""
    NOT_RUN = 1
    """Could not run, ended early, or sent nothing."""
    BAD_INPUT = 2
    """Something the user gave is wrong; nothing was sent."""
    MISSED = 3
    """A limit was missed, or more than 1 % of the requests failed where no limit speaks of failures."""
    NOT_JUDGED = 4
    """Nothing can be said for sure: data are missing, a limit had too few samples, or the generator missed its own."""


class InputError(Exception):
    """Something that the user gave cannot be used; the text is all that is shown."""

    exit_code = ExitCode.BAD_INPUT


class TargetError(InputError):
    """The server that is to be measured cannot be used at all (not there, not an OpenAI dialect, no access)."""

    exit_code = ExitCode.NOT_RUN
