"""What Locust's process does by itself that would keep its event loop away, or end a run in the wrong place."""

import functools
import inspect
import itertools
import signal
from collections.abc import Callable

import gevent
import gevent.hub
from locust import argument_parser


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
