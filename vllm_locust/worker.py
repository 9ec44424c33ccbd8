"""A process that sends requests, as the master sees it: it starts, reports, and finishes when it is told to."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gevent
import msgspec
from locust.env import Environment
from locust.runners import Runner, WorkerRunner

from vllm_locust import __version__
from vllm_locust.cluster import (
    ACK,
    FINISH,
    HELLO,
    LOG,
    POLL_S,
    REFUSED,
    REPORT,
    REQUESTS,
    RESET,
    ROWS,
    SAMPLES,
    START,
    STATE,
    STEADY,
    TICK_S,
)
from vllm_locust.generator import Generator
from vllm_locust.origin import tls_context
from vllm_locust.plan import stream_classes
from vllm_locust.recording import encode_report
from vllm_locust.requestlog import RequestLog
from vllm_locust.run import Finish, Phase, Start
from vllm_locust.samples import Samples
from vllm_locust.users import arrive

logger = logging.getLogger(__name__)

_LINGER_S = 2.0
"""How long a worker that was interrupted waits for the master to have its final state."""
_LOG_LINGER_S = 5.0
"""How long it waits to be asked for more of what it keeps; the master asks each second (`vllm_locust.download`)."""


class Worker:
    """A process that sends requests, as the master sees it."""

    def __init__(self, environment: Environment, runner: Runner, generator: Generator) -> None:
        """Listen to the master; a local run's master lives in the same process."""
        self._environment = environment
        self._runner = runner
        self._generator = generator
        self._ticker: gevent.Greenlet | None = None
        self._unacknowledged = 0
        self._asked_s = 0.0
        """When the master last wanted something of what is kept, 0 where it has not yet."""
        runner.register_message(START, self._on_start)
        runner.register_message(STEADY, self._on_steady)
        runner.register_message(RESET, self._on_reset)
        runner.register_message(ACK, self._on_ack)
        # Concurrent: it waits for streams, and the messages behind it must not.
        runner.register_message(FINISH, self._on_finish, concurrent=True)
        runner.register_message(LOG, self._on_log, concurrent=True)  # waits for a disk
        # Locust's worker takes messages before it runs listeners of `init`: a start may have come too early for us.
        if isinstance(runner, WorkerRunner):
            runner.send_message(HELLO, {"version": __version__})

    def _on_start(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        start = msgspec.msgpack.decode(msg.data, type=Start)
        known = self._generator.run.start
        if known is not None and known.run == start.run:
            if self._generator.run.work is None and start.rank is not None and self._generator.run.open:
                self._generator.inherit(start)
            return
        if start.version != __version__:
            logger.error("the master runs vllm-locust %s, this worker %s; install the same", start.version, __version__)
            self._runner.send_message(REFUSED, {"worker": start.worker, "version": __version__})
            self._generator.refuse()
            return
        for user_class in stream_classes(self._environment.user_classes):
            user_class.insecure = start.settings.insecure
            user_class.ssl_context_factory = staticmethod(
                partial(tls_context, insecure=start.settings.insecure, ca_pem=start.settings.ca_pem)
            )
        self._generator.begin(start, partial(arrive, self._environment), self._tell_state)
        self._unacknowledged, self._asked_s = 0, 0.0
        self._send(encode_report(self._generator.report()))  # tells the master that we take part
        recorder = self._generator.recorder
        if recorder is not None:
            recorder.itl_wanted = bool(self._environment.events.itl._handlers)  # type: ignore[attr-defined] # noqa: SLF001 - it has no public count
        if self._ticker is None:
            self._ticker = gevent.spawn(self._tick_for_ever)

    def _on_steady(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        start = self._generator.run.start
        if start is not None and start.run == msg.data["run"]:
            self._generator.move(msg.data["at_ns"])

    def _tell_state(self) -> None:
        """Tell the master at once what may end the warm-up, or the run."""
        generator = self._generator
        start, users, done = generator.run.start, generator.answered_users, generator.done
        if start is not None and (done or users >= self._runner.user_count):
            self._runner.send_message(STATE, {"run": start.run, "answered_users": users, "done": done})

    def _on_reset(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        start = self._generator.run.start
        if start is not None and start.run == msg.data["run"]:
            # What was counted until now belongs to the old epoch, and to counters that a reset does not touch.
            self._send(encode_report(self._generator.tick(self._runner.user_count)), last=True)
            self._generator.new_epoch(start, msg.data["epoch"], msg.data["at_ns"])

    def _on_ack(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        recorder = self._generator.recorder
        if recorder is not None and (recorder.run, recorder.epoch) == (msg.data["run"], msg.data["epoch"]):
            recorder.acknowledge(msg.data["seq"])
            self._unacknowledged = max(0, recorder.seq - msg.data["seq"])

    def _on_finish(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        finish = msgspec.msgpack.decode(msg.data, type=Finish)
        if self._generator.run.phase is Phase.FINISHING:
            self._generator.hurry(finish.stop_timeout_s)
        else:
            self.finish(finish)

    def _on_log(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        of, run = msg.data["of"], self._generator.run
        kept = self._kept.get(of)
        if (
            kept is not None
            and run.phase is Phase.FINISHED
            and run.start is not None
            and run.start.run == msg.data["run"]
        ):
            self._asked_s = time.monotonic()
            self._runner.send_message(ROWS, {"run": run.start.run, "of": of, **kept.piece(msg.data["offset"])})

    @property
    def _kept(self) -> dict[str, RequestLog | Samples]:
        """What this process keeps until the master has it."""
        kept = {REQUESTS: self._generator.log, SAMPLES: self._generator.samples}
        return {of: each for of, each in kept.items() if each is not None}

    def hurry(self) -> None:
        """Cut what still streams, at a second Ctrl-C."""
        if self._generator.run.phase is Phase.FINISHING:
            self._generator.hurry(0)

    def _tick_for_ever(self) -> None:
        while True:
            gevent.sleep(TICK_S)
            try:
                self._tick()
            except Exception:
                logger.exception("vllm-locust could not report")
                if self._generator.recorder is not None:
                    self._generator.recorder.note_plugin_error()

    def _tick(self) -> None:
        generator = self._generator
        if generator.run.phase in (Phase.RUNNING, Phase.FINISHING):
            generator.harvest()
        if generator.run.phase in (Phase.RUNNING, Phase.FINISHING):
            self._send(encode_report(generator.tick(self._runner.user_count)))
            generator.write_log()
        elif generator.run.phase is Phase.FINISHED and self._unacknowledged:
            self._send(encode_report(generator.report()), last=True)

    def _send(self, report: bytes, *, last: bool = False) -> None:
        """Send a report; `last` says that no other one of its epoch will tell more."""
        self._unacknowledged += 1
        self._runner.send_message(REPORT, {"report": report, "last": last, "wall_s": time.time()})

    def finish(self, finish: Finish) -> None:
        """Close the gate, let streams run out or cut them, send the final state."""
        run = self._generator.run
        if run.phase is not Phase.RUNNING or run.start is None or run.start.run != finish.run:
            return
        self._send(encode_report(self._generator.finish(finish)), last=True)
        # Locust's own stop sleeps for so long without answering heartbeats; whoever is left now has nothing to finish.
        self._environment.stop_timeout = 0

    def halt(self) -> None:
        """Finish without the master's word, if it has not come: the master is gone, or has given this worker up.

        Locust ends the users then, but what is due in an open loop would leave for as long as it waits for them.
        """
        run, recorder = self._generator.run, self._generator.recorder
        if run.phase is Phase.RUNNING and recorder is not None and run.start is not None:
            windows = recorder.grid.count(time.monotonic_ns() - recorder.start_ns)
            stop_timeout_s = run.start.settings.stop_timeout_s
            self.finish(Finish(run=run.start.run, windows=windows, stop_timeout_s=stop_timeout_s))

    def leave(self) -> None:
        """This process was interrupted: finish, with the master's word if it comes at once, without it if not."""
        run = self._generator.run
        self._wait(lambda: run.phase is not Phase.RUNNING, _LINGER_S / 4)
        self.halt()
        while run.phase is Phase.FINISHING:
            gevent.sleep(POLL_S)
        # What the master asks for, it asks for since it has the final state, though its word of that may be lost.
        if self._wait(lambda: not self._unacknowledged, _LINGER_S) or self._asked_s:
            self._hand_over()

    def _hand_over(self) -> None:
        """Stay for as long as the master, which is there, wants something of what is kept."""
        kept, self._asked_s = self._kept.values(), time.monotonic()
        while not all(each.delivered for each in kept) and time.monotonic() < self._asked_s + _LOG_LINGER_S:
            gevent.sleep(POLL_S)

    @staticmethod
    def _wait(until: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, at most so many seconds; returns whether it does."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            gevent.sleep(POLL_S)
        return until()
