"""What Locust's process does by itself that would keep its event loop away, or end a run in the wrong place."""

import functools
import inspect
import itertools
import signal
import time
from collections.abc import Callable, Iterator

import gevent
import gevent.hub
import psutil
from locust import argument_parser

_FORKS_S = 3.0
"""How long workers that `--processes` forked may take to go."""


def prepare() -> None:
    """Do what Locust would do while streams run.

    At each spawn message its worker builds its whole argument parser once per option, 0.2 s in which nothing else runs,
    for defaults that never change. When it stops it looks at its own stack, and the first look takes 30 ms.
    """
    argument_parser.default_args_dict = functools.cache(argument_parser.default_args_dict)
    inspect.stack()


def interrupt_main_greenlet_only(hurry: Callable[[], None]) -> None:
    """Turn Ctrl-C into a KeyboardInterrupt of the main greenlet, not of whichever callback happens to run.

    The first one ends the run in order, the second one hurries that, the third one leaves.
    """
    main, interrupts = gevent.getcurrent(), itertools.count(1)

    def interrupt() -> None:
        if next(interrupts) == 2:  # noqa: PLR2004
            hurry()
        else:
            gevent.hub.get_hub().loop.run_callback(main.throw, KeyboardInterrupt)

    gevent.signal_handler(signal.SIGINT, interrupt)


def end_forks() -> None:
    """Have the workers go that `--processes` forked: Locust leaves them behind where the master goes early."""
    for child in _forks():
        child.terminate()
    wait_for_forks()


def wait_for_forks() -> None:
    """Wait until the workers that `--processes` forked have said their last.

    They stay to be asked how they ended: Locust does so, and complains where somebody else has done it.
    """
    deadline = time.monotonic() + _FORKS_S
    while any(_forks()) and time.monotonic() < deadline:
        time.sleep(0.02)


def _forks() -> "Iterator[psutil.Process]":
    """Yield those that run; a process that the locustfile started has another command, and is not ours."""
    this = psutil.Process()
    for child in this.children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline() == this.cmdline():
                yield child
        except psutil.NoSuchProcess:
            pass
