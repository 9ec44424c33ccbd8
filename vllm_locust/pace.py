"""What changes the load while a run goes on, and what ends it by itself: stages, and the last of a number of requests.

Changes of users and of the rate, whoever makes them, are marks in the recording.
"""

import logging
import time
from collections.abc import Callable

import gevent
from locust.runners import STATE_SPAWNING, Runner

from vllm_locust.cluster import POLL_S
from vllm_locust.errors import InputError
from vllm_locust.load import Load
from vllm_locust.master import Master
from vllm_locust.quantity import NS_PER_S, format_list
from vllm_locust.run import Phase

logger = logging.getLogger(__name__)

_STARVED_S = 10.0
"""How long a worker may have requests left and no user: Locust may be about to give it one."""


class Pace:
    """The load of a run, as it changes."""

    def __init__(self, runner: Runner, master: Master, end: Callable[[], None]) -> None:
        """`end` ends the run as Locust does at --run-time."""
        self._runner = runner
        self._master = master
        self._end = end
        self._load = Load()
        self._stepping: gevent.Greenlet | None = None
        self._users: int | None = None
        self._rate = ""
        self._fed_ns = 0
        """When every worker that has requests left last had a user to send them."""
        self.most_users = 0
        """The most users that Locust was told to run."""
        self.over = False
        """Whether the run has ended by itself."""
        master.on_done = self._end_if_done  # at once: what comes after the last answer would count as time of the run

    def check(self, load: Load) -> None:
        """Refuse what these workers cannot do."""
        workers, users = self._master.fleet, self._runner.target_user_count
        shape = self._runner.environment.shape_class
        if load.stages and load.arrivals is None and shape is not None:
            raise InputError(
                f"--stages are numbers of users, which the load shape {type(shape).__name__} sets, too; "
                "leave one of them out, or let the stages be rates: --request-rate stages"
            )
        if load.max_in_flight is not None and load.max_in_flight < workers:
            raise InputError(f"--max-in-flight {load.max_in_flight} for {workers} workers: each needs one at least")
        if load.requests is not None and load.arrivals is None and users < workers:
            raise InputError(
                f"--requests on {workers} workers with -u {users}: each sends its share, and needs a user: -u {workers}"
            )

    def begin(self, load: Load) -> None:
        """A run has begun."""
        self._load, self._users, self._rate, self.most_users, self.over = load, None, "", 0, False
        self._fed_ns = time.monotonic_ns()
        if load.stages:
            self._stepping = gevent.spawn(self._step_through)

    def stop(self) -> None:
        """The run is over."""
        if self._stepping is not None and self._stepping is not gevent.getcurrent():
            self._stepping.kill()
        self._stepping = None

    def tick(self) -> None:
        """Note what has changed, and end a run whose requests have all ended."""
        users = self._runner.target_user_count
        if self._users not in (None, users):
            self._master.mark(f"users {self._users} → {users}")
        self._users, self.most_users = users, max(self.most_users, users)
        rate = self._load.rate_text(time.monotonic_ns() - self._master.run_start_ns)
        if self._rate not in ("", rate):
            self._master.mark(f"rate {rate}")
        self._rate = rate
        self._end_if_done()
        if self._load.requests is not None and self._load.arrivals is None:
            self._look_for_starved()

    def _end_if_done(self) -> None:
        if self._master.done:
            self._finish("all requests have ended")

    def _look_for_starved(self) -> None:
        """End a run that would never end, since users are gone that were to send what is left of its requests."""
        starved = self._master.starved
        if not starved or self._load.stages or self._runner.environment.shape_class is not None:
            self._fed_ns = time.monotonic_ns()
        elif time.monotonic_ns() > self._fed_ns + _STARVED_S * NS_PER_S and not self.over:
            self._master.mark(f"requests are left, and no user to send them, at {format_list(starved)}")
            self._finish("requests are left, and no user to send them")

    def _step_through(self) -> None:
        """Have Locust run the users of one stage after the other, and end the run after the last one."""
        load = self._load
        for users, since_ns in zip(load.stages, load.stages_ns, strict=False):
            self._sleep_until(since_ns)
            while load.arrivals is None and self._runner.state == STATE_SPAWNING:
                gevent.sleep(POLL_S)
            if load.arrivals is None and self._runner.target_user_count != users:
                self._runner.start(int(users), max(load.stages))
        self._sleep_until(load.stages_ns[-1])
        self._finish("the last stage is over")

    def _sleep_until(self, at_ns: int) -> None:
        gevent.sleep(max(0.0, (self._master.run_start_ns + at_ns - time.monotonic_ns()) / 1e9))

    def _finish(self, why: str) -> None:
        if self._master.phase is Phase.RUNNING and not self.over:
            self.over = True
            logger.info("%s, the run ends", why)
            gevent.spawn(self._end)
