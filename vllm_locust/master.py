"""The process that plans a run and holds its recording: who takes part, and the end of a run as a handshake.

The end is no sleep: the master closes the gate everywhere, each worker lets its streams run out or cuts them and
sends its final state, and the master waits for everyone who took part and is still there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import msgspec
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, Runner

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
)
from vllm_locust.download import Downloads
from vllm_locust.plan import Plan
from vllm_locust.recording import Mark, Recording, Report, decode_report
from vllm_locust.run import Finish, Phase, Start, new_run_id

logger = logging.getLogger(__name__)

_RESET_NS = 2_000_000_000
"""How long a reset waits for what workers had counted until then."""
_CONFIRM_NS = 2_000_000_000
"""How long the end waits for a worker that was told to start and has not said anything yet."""
_MOST_MARKS = 1_000
"""A load shape may change the number of users each second, for a day."""
_MOST_SCENARIOS = 1_000
"""More of them are names of requests."""
_CLOCK_OFF_S = 2.0
"""A wall clock that is further off is worth a remark; a message may take some of it."""
_NAMES = {REQUESTS: "request log", SAMPLES: "samples"}
"""As remarks call what workers keep."""


@dataclass(slots=True)
class Member:
    """A worker that takes part in a run."""

    name: str
    rank: int | None = None
    """Its part of what is sent; absent for one that joined later, unless it has taken the place of another."""
    late: int = 0
    """Number of its own index space, where it joined later and sends in a closed loop without end."""
    since_ns: int = 0
    """When it got its rank, since the start of the run."""
    taken: dict[str, int] = field(default_factory=dict)
    """How many requests of each user class have been taken in its rank, as last reported."""
    answered_users: int = 0
    done: bool = False
    """Whether all that it had to send has ended."""
    clock_off_s: float | None = None
    """How far its wall clock is from ours, as far as messages tell."""
    confirmed: bool = False
    """Whether it has said anything since it was told to start."""
    reset: bool = False
    """Whether its last report of the epoch before a reset has come."""
    finished: bool = False
    """Whether its final state has come."""
    refused: bool = False
    displaced: bool = False
    """Whether another one has its rank, since it was lost for a while."""
    lost: bool = False
    left: bool = False
    gone_ns: int = 0
    """Since when it has not taken part, whatever the reason; 0 while it does."""


class Master:
    """The process that plans a run and holds its recording."""

    def __init__(self, runner: Runner, directory: Path, finish_timeout_s: float) -> None:
        """Listen to the workers; what they log is kept on the disk of a directory until it is written."""
        self._runner = runner
        self._directory = directory
        self._finish_timeout_s = finish_timeout_s
        self.on_done: Callable[[], None] = lambda: None
        """Called as soon as all that there was to send has ended."""
        self.phase = Phase.IDLE
        self.plan: Plan | None = None
        self.recording: Recording | None = None
        self.members: dict[str, Member] = {}
        self.run_start_ns = self.start_ns = 0
        """When the run began, and its epoch."""
        self.stop_ns: int | None = None
        self.kept: dict[str, Downloads] = {}
        """What is wanted of what workers keep until the end: `REQUESTS`, `SAMPLES`."""
        self.before: list[Recording] = []
        """Recordings of epochs before a reset, as long as last reports of them may come."""
        self.scenarios: dict[str, None] = {}
        """All that this process has counted, in the order in which they were first heard of."""
        self._late = 0
        self._unreadable = 0
        """How many reports could not be read since the start."""
        self._ranks: list[Member] = []
        """Who has each rank."""
        self._steady_ns = 0
        self._spawned: int | None = None
        """How many users stream, once all have been spawned."""
        self._sent: dict[str, str] = {}
        self._deadline_ns = 0
        self._done = gevent.event.Event()
        runner.register_message(HELLO, self._on_hello)
        runner.register_message(STATE, self._on_state)
        runner.register_message(REPORT, self._on_report)
        runner.register_message(REFUSED, self._on_refused)
        runner.register_message(ROWS, self._on_rows)

    # Beginning

    def begin(self, plan: Plan) -> None:
        """Start a run with everyone who is there."""
        self.plan, self._steady_ns, self._spawned = plan, plan.settings.load.warmup_ns, None
        self.recording = Recording(new_run_id(), 0, plan.settings.window_ns)
        self._shape(self.recording)
        self.phase = Phase.RUNNING
        self.run_start_ns = self.start_ns = time.monotonic_ns()
        self.stop_ns, self._late, self._unreadable = None, 0, 0
        self._note_scenarios(plan.parts)
        wanted = {REQUESTS: plan.settings.request_log, SAMPLES: plan.settings.samples}
        self.kept = {of: self._new_downloads(of, self.recording.run) for of, asked in wanted.items() if asked}
        self._done.clear()
        clients = self._clients()
        self.members = {client: Member(self._name(client), rank) for rank, client in enumerate(clients)}
        self._ranks = list(self.members.values())
        for client in clients:
            self._send_start(client)

    def join(self, client: str) -> None:
        """A worker has connected; if a run is on, it takes part from now on."""
        if self.phase is not Phase.RUNNING or self.recording is None or client in self.members:
            return
        assert self.plan is not None  # noqa: S101 - a run has begun
        member = self.members[client] = Member(self._name(client))
        self.mark(f"{member.name} joined")
        load = self.plan.settings.load
        if not self._inherit(member) and load.arrivals is None and load.requests is None:
            self._late += 1
            member.late = self._late
        self._send_start(client)

    def _inherit(self, heir: Member) -> bool:
        """Give a member the rank of one that is lost, if there is one."""
        for rank, member in enumerate(self._ranks):
            if member.gone_ns:
                heir.rank, heir.taken, heir.done = rank, member.taken, False
                heir.since_ns = time.monotonic_ns() - self.run_start_ns
                member.rank, member.displaced, self._ranks[rank] = None, True, heir
                self.mark(f"{heir.name} takes the place of {member.name}")
                return True
        return False

    def refuse(self) -> None:
        """There is no run: what was asked for cannot be done."""
        self.phase = Phase.IDLE

    def _on_hello(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        """Start a worker again that was told to before it could listen."""
        self._sent.pop(msg.node_id, None)
        member = self.members.get(msg.node_id)
        if self.phase is Phase.RUNNING and member is not None and not member.confirmed:
            self._send_start(msg.node_id)

    def _send_start(self, client: str) -> None:
        assert self.plan is not None and self.recording is not None  # noqa: S101, PT018 - a run has begun
        plan, known = self.plan, self._sent.get(client) == self.plan.hash
        start = Start(
            version=__version__,
            run=self.recording.run,
            epoch=self.recording.epoch,
            age_ns=time.monotonic_ns() - self.start_ns,
            run_age_ns=time.monotonic_ns() - self.run_start_ns,
            worker=self.members[client].name,
            rank=self.members[client].rank,
            ranks=len(self._ranks),
            late=self.members[client].late,
            taken=self.members[client].taken,
            since_ns=self.members[client].since_ns,
            steady_ns=self._steady_ns,
            settings=plan.settings,
            scenario_hash=plan.hash,
            scenarios=None if known else plan.encoded,
        )
        self._sent[client] = plan.hash
        for downloads in self.kept.values():
            downloads.expect(client, self.members[client].name)
        self._runner.send_message(START, msgspec.msgpack.encode(start), client)

    def reset(self) -> Recording | None:
        """Count from now on (a new epoch); returns the recording of the old one, as complete as it gets."""
        old = self.recording
        if old is None or self.phase is not Phase.RUNNING:
            return None
        self.watch()  # who is gone takes no part in what comes
        self.before.append(old)
        self.recording = Recording(old.run, old.epoch + 1, old.window_ns)
        self.start_ns = time.monotonic_ns()
        at_ns = self.start_ns - self.run_start_ns
        self._shape(self.recording)
        self.members = {client: m for client, m in self.members.items() if not (m.finished or self._gone(client))}
        self.mark(f"reset, {at_ns / 1e9:.0f} s after the start")
        for client, member in self.members.items():
            member.reset = False
            message = {"run": old.run, "epoch": old.epoch + 1, "at_ns": at_ns}
            self._runner.send_message(RESET, message, client)
        while self._resetting() and time.monotonic_ns() < self.start_ns + _RESET_NS:
            gevent.sleep(POLL_S)
        self.before.remove(old)
        return old

    def _resetting(self) -> bool:
        return any(m.confirmed and not m.reset and not self._gone(client) for client, m in self.members.items())

    # During

    def _shape(self, recording: Recording) -> None:
        """Tell a recording when the warm-up and the stages end."""
        assert self.plan is not None  # noqa: S101 - a run has begun
        since_ns = self.start_ns - self.run_start_ns if recording.epoch else 0
        recording.steady_ns = max(0, self._steady_ns - since_ns)
        load = self.plan.settings.load
        recording.stages_ns = [ns - since_ns for ns in load.stages_ns]
        recording.grid = recording.grid.moved(ns - since_ns for ns in load.boundaries_ns(self._steady_ns))

    def spawned(self, users: int) -> None:
        """All users have been spawned, and so many of them stream."""
        self._spawned = users
        self._look_for_steady()

    def _on_state(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        member = self.members.get(msg.node_id)
        if member is not None and self.recording is not None and msg.data["run"] == self.recording.run:
            member.answered_users, member.done = msg.data["answered_users"], msg.data["done"]
            self._look_for_steady()
            if self.done:
                self.on_done()

    def _look_for_steady(self) -> None:
        """End the warm-up if all users run and each has finished a request."""
        age_ns = time.monotonic_ns() - self.run_start_ns
        if (
            self.phase is Phase.RUNNING
            and self.plan is not None
            and self.recording is not None
            and self.plan.settings.load.until_answered
            and age_ns < self._steady_ns
            and self._spawned is not None
            and sum(m.answered_users for m in self.members.values() if not m.lost) >= self._spawned
        ):
            self._steady_ns = age_ns
            self._shape(self.recording)
            for client in self.members:
                self._send_steady(client)

    @property
    def warming_up(self) -> bool:
        """Whether what is sent now is left out of latencies."""
        return self.phase is Phase.RUNNING and time.monotonic_ns() < self.run_start_ns + self._steady_ns

    def _send_steady(self, client: str) -> None:
        assert self.recording is not None  # noqa: S101 - a run has begun
        self._runner.send_message(STEADY, {"run": self.recording.run, "at_ns": self._steady_ns}, client)

    @property
    def done(self) -> bool:
        """Whether all that there was to send has ended; a rank that is lost and finds no heir is given up."""
        given_up_ns = time.monotonic_ns() - round(self._finish_timeout_s * 1e9)
        return any(m.done for m in self._ranks) and all(
            m.done or (m.gone_ns and m.gone_ns < given_up_ns) for m in self._ranks
        )

    @property
    def complete(self) -> bool:
        """Whether every rank has sent all that it had to send."""
        passing = self.plan is not None and self.plan.settings.load.arrivals is not None
        # An heir passes over what was due before it came.
        return all(m.done and not (passing and m.since_ns) for m in self._ranks)

    @property
    def starved(self) -> list[str]:
        """Names of those that have requests left, and no user to send them: Locust has moved them, or was told to."""
        if self._spawned is None:
            return []
        return [
            member.name
            for client, member in self.members.items()
            if member.rank is not None and not (member.done or self._gone(client) or self._users(client))
        ]

    def _on_report(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        try:
            report, last, wall_s = decode_report(msg.data["report"]), msg.data["last"], msg.data["wall_s"]
        except (ValueError, TypeError, KeyError) as error:
            logger.error("a report of worker %s cannot be read and is dropped: %s", msg.node_id, error)
            self._unreadable += 1
            return
        member = self.members.get(msg.node_id)
        if member is not None:
            self._note(msg.node_id, member, report, wall_s)
        if self.recording is not None and self.recording.merge(report):
            if member is not None and last:
                member.finished = True
                for downloads in self.kept.values():
                    downloads.fetch(msg.node_id)
        elif self._merge_late(report) and member is not None and last:
            member.reset = True
        self._note_scenarios(cell.key.scenario for window in report.windows for cell in window.cells)
        # Whatever is not final will have changed by the next report, and travels again in any case.
        if last or any(window.sealed for window in report.windows):
            ack = {"run": report.run, "epoch": report.epoch, "seq": report.seq}
            self._runner.send_message(ACK, ack, msg.node_id)
        if isinstance(self._runner, MasterRunner):  # else this is the worker's own greenlet, which may not stop here
            gevent.sleep(0)  # workers report at the same time: a scrape, say, need not wait for all of them

    def _merge_late(self, report: Report) -> bool:
        """Take a report of an epoch before a reset; returns whether it is of the last one."""
        merged = [before for before in self.before if before.merge(report)]
        return bool(merged) and merged[-1] is self.before[-1]

    def _note_scenarios(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self.scenarios) < _MOST_SCENARIOS:
                self.scenarios.setdefault(name)

    def _note(self, client: str, member: Member, report: Report, wall_s: float) -> None:
        """Note what a report says of its worker."""
        if self.recording is None or report.run != self.recording.run:
            return
        member.confirmed = True
        member.taken, member.done, member.answered_users = report.taken, report.done, report.answered_users
        if report.steady_ns != self._steady_ns:  # it has not heard, or not yet
            self._send_steady(client)
        off_s = wall_s - time.time()  # a message that took its time makes a clock seem to be behind, never ahead
        member.clock_off_s = off_s if member.clock_off_s is None else max(member.clock_off_s, off_s)

    @property
    def remarks(self) -> list[str]:
        """Say whose wall clock is wrong, and what could not be read."""
        unreadable = [f"{self._unreadable} reports of workers could not be read"] if self._unreadable else []
        return [*self._clock_remarks(), *unreadable]

    @property
    def missing_rows(self) -> list[str]:
        """Say what is missing of what workers kept until the end."""
        return [remark for downloads in self.kept.values() for remark in downloads.remarks]

    def _clock_remarks(self) -> list[str]:
        return [
            f"{m.name}: its wall clock is {abs(m.clock_off_s):.0f} s {'behind' if m.clock_off_s < 0 else 'ahead'}; "
            "no number depends on it"
            for m in self.members.values()
            if m.clock_off_s is not None and abs(m.clock_off_s) > _CLOCK_OFF_S
        ]

    def _new_downloads(self, of: str, run: str) -> Downloads:
        def ask(client: str, offset: int) -> None:
            self._runner.send_message(LOG, {"run": run, "of": of, "offset": offset}, client)

        return Downloads(_NAMES[of], self._directory, self._finish_timeout_s, ask, self._left)

    def _on_rows(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        downloads = self.kept.get(msg.data["of"])
        if downloads is not None and self.recording is not None and self.recording.run == msg.data["run"]:
            downloads.take(msg.node_id, msg.data)

    def _on_refused(self, environment: Environment, msg: Any) -> None:  # noqa: ANN401, ARG002 - a locust Message
        name, version = msg.data["worker"], msg.data["version"]
        logger.error("%s runs vllm-locust %s, this master %s; it takes no part", name, version, __version__)
        if msg.node_id in self.members:
            self.members[msg.node_id].refused = True
            self.members[msg.node_id].gone_ns = time.monotonic_ns()
            for downloads in self.kept.values():
                downloads.forget(msg.node_id)
            self.mark(f"{name} takes no part: it runs vllm-locust {version}, the master {__version__}")

    def watch(self) -> None:
        """Note workers that have gone, and those that are back."""
        for client, member in self.members.items():
            gone = self._gone(client)
            lost, left = gone and not member.finished, gone and member.finished
            if lost and not member.lost:
                logger.warning("%s is lost; what it had reported stays in the results", member.name)
                self.mark(f"{member.name} lost{self._share(member)}")
            elif member.lost and not gone:
                self.mark(f"{member.name} back")
                if member.displaced:
                    self._send_finish(client, 0.0)
            elif left and not member.left and self.phase is Phase.RUNNING:
                self.mark(f"{member.name} left{self._share(member)}")
            member.lost, member.left = lost, left
            if not member.refused:
                member.gone_ns = (member.gone_ns or time.monotonic_ns()) if gone else 0
        for client, member in self.members.items():
            if self._stands_by(member) and not self._gone(client) and self._inherit(member):
                self._send_start(client)
        self._look_for_steady()

    def _share(self, member: Member) -> str:
        """Say what nobody sends any more, unless somebody takes a member's place."""
        if self.plan is None or self.plan.settings.load.arrivals is None or member.rank is None:
            return ""
        return f", and with it 1 of {len(self._ranks)} parts of the request rate"

    def _stands_by(self, member: Member) -> bool:
        return member.rank is None and not (member.late or member.refused or member.finished or member.displaced)

    def mark(self, text: str) -> None:
        """Note that something has happened in the run."""
        if self.recording is not None and len(self.recording.marks) < _MOST_MARKS:
            self.recording.marks.append(Mark(at_ns=time.monotonic_ns() - self.start_ns, text=text))

    @property
    def fleet(self) -> int:
        """How many workers there are to begin a run with."""
        return len(self._clients())

    @property
    def live_workers(self) -> tuple[str, ...]:
        """Names of those who take part now."""
        return tuple(m.name for m in self.members.values() if not (m.lost or m.left or m.refused))

    # End

    def finish(self, stop_timeout_s: float) -> None:
        """Close the gate everywhere and wait for the final state of everyone who is still there, and what it kept.

        A second call joins the first one's wait.
        """
        if self.phase is Phase.FINISHING:
            self._done.wait()
            return
        if self.phase is not Phase.RUNNING or self.recording is None:
            return
        self.phase = Phase.FINISHING
        self.stop_ns = time.monotonic_ns()
        length_ns = self.recording.whole_ns(self.stop_ns - self.start_ns)
        for client in list(self._waited_for()):
            self._send_finish(client, stop_timeout_s)
        self._deadline_ns = self.stop_ns + round((stop_timeout_s + self._finish_timeout_s) * 1e9)
        while any(self._waited_for()) and time.monotonic_ns() < self._deadline_ns:
            gevent.sleep(POLL_S)
        for downloads in self.kept.values():
            downloads.wait()
        self.watch()
        self.recording.length_ns = length_ns
        self.phase = Phase.FINISHED
        self._done.set()

    def hurry(self) -> None:
        """Have everyone cut what still streams, at a second Ctrl-C."""
        if self.phase is not Phase.FINISHING or self.recording is None:
            return
        for client in list(self._waited_for()):
            self._send_finish(client, 0.0)
        self._deadline_ns = time.monotonic_ns() + round(self._finish_timeout_s * 1e9)

    def _send_finish(self, client: str, stop_timeout_s: float) -> None:
        assert self.recording is not None  # noqa: S101 - a run has begun
        length_ns = (self.stop_ns or time.monotonic_ns()) - self.start_ns
        windows = self.recording.grid.count(self.recording.whole_ns(length_ns))
        finish = Finish(run=self.recording.run, windows=windows, stop_timeout_s=stop_timeout_s)
        self._runner.send_message(FINISH, msgspec.msgpack.encode(finish), client)

    @property
    def missing(self) -> list[str]:
        """Names of those whose final state never came."""
        return [m.name for m in self.members.values() if not m.finished and not m.refused]

    def _waited_for(self) -> Iterator[str]:
        """Yield those who take part, are there, and have more to say; some were told to start a moment ago."""
        hearing = self.stop_ns is not None and time.monotonic_ns() < self.stop_ns + _CONFIRM_NS
        return (
            client
            for client, m in self.members.items()
            if (m.confirmed or hearing) and not (m.finished or m.refused or self._gone(client))
        )

    # Locust's view of who is there

    def _clients(self) -> list[str]:
        if isinstance(self._runner, MasterRunner):
            clients = self._runner.clients
            return [client.id for client in clients.ready + clients.spawning + clients.running]
        return ["local"]

    def _gone(self, client: str) -> bool:
        if not isinstance(self._runner, MasterRunner):
            return False
        node = self._runner.clients.get(client)
        return node is None or node.state == STATE_MISSING

    def _users(self, client: str) -> int:
        runner = self._runner
        return int(runner.clients[client].user_count if isinstance(runner, MasterRunner) else runner.user_count)

    def _left(self, client: str) -> bool:
        """Tell whether a worker has gone for good: one that is missing may only be slow."""
        return isinstance(self._runner, MasterRunner) and client not in self._runner.clients

    def _name(self, client: str) -> str:
        if isinstance(self._runner, MasterRunner):
            host = client.rpartition("_")[0]
            return f"worker {self._runner.get_worker_index(client) + 1} ({host})"
        return "local"
