"""The state of a run: its phase, its gate, and who sends which request.

Locust dispatches users; whether a request starts is decided here. The master makes a `Start` for every worker; what
is in it is all that a worker knows: settings, scenarios and prompts come from the master, never from the worker's own
files.

Phase and stage of a request are fixed here, when it is sent. The warm-up has an end that everyone knows from the start;
the master may move it forward.
"""

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from vllm_locust.api import Counting
from vllm_locust.cell import STEADY, WARMUP
from vllm_locust.limit import Goodput
from vllm_locust.load import Load
from vllm_locust.scenario import Scenario
from vllm_locust.timeouts import Timeouts
from vllm_locust.work import Work


class Phase(StrEnum):
    """Where a run stands."""

    IDLE = "idle"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of a run share."""

    target: str
    model: str
    seed: int = 0
    keep_alive: bool = True
    api_key: str | None = None
    insecure: bool = False
    ca_pem: str | None = None
    """Certificates of the server's authority, where it is not a public one."""
    timeouts: Timeouts = Timeouts()
    load: Load = Load()
    goodput: Goodput | None = None
    """What a good request has to meet, where that is said."""
    endpoints: dict[str, str] = {}
    """`chat` or `completions` by user class."""
    counting: Counting = Counting()
    window_ns: int = 10_000_000_000
    stop_timeout_s: float = 60.0
    tags: tuple[str, ...] = ()
    """Parts to send, all where empty."""
    exclude_tags: tuple[str, ...] = ()
    exact_length: bool = True
    """Whether the server takes `min_tokens` and `ignore_eos`."""
    request_log: bool = False
    log_text: bool = False
    """Whether prompts and answers are in that log."""
    samples: int = 0
    """How many answers of each scenario are kept."""

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"Settings(target={self.target!r}, model={self.model!r}, seed={self.seed})"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to take part."""

    version: str
    """Version of the plugin; a worker of another one is refused."""
    run: str
    epoch: int
    age_ns: int
    """How old the epoch is; counted on from there on the worker's own monotonic clock."""
    run_age_ns: int
    """How old the run is; the same unless statistics were reset."""
    worker: str
    """What the master calls this worker."""
    rank: int | None
    """Absent where this worker only stands by: it joined late, and there is nothing that others do not send."""
    ranks: int
    late: int = 0
    """Number of an index space of its own, for a worker that joined late and has no rank; else 0."""
    taken: dict[str, int] = {}
    """How many requests of each user class the predecessor of this rank had taken."""
    since_ns: int = 0
    """From when on this worker sends the arrivals of its rank, since the start of the run."""
    steady_ns: int = 0
    """When the warm-up ends, as far as that is known, since the start of the run."""
    settings: Settings
    scenario_hash: str
    scenarios: bytes | None
    """Encoded scenarios by user class; absent where the worker has them, by the hash."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The master closes the gate."""

    run: str
    windows: int
    """How many windows the run has; what comes now belongs behind them."""
    stop_timeout_s: float


def new_run_id() -> str:
    """Return a fresh name of a run, which starts the nonces of a cold cache."""
    return secrets.token_hex(4)


def encode_scenarios(scenarios: dict[str, Scenario]) -> bytes:
    """Encode the scenarios of all user classes."""
    return msgspec.msgpack.encode(scenarios)


def decode_scenarios(data: bytes) -> dict[str, Scenario]:
    """Decode what `encode_scenarios` returned."""
    return msgspec.msgpack.decode(data, type=dict[str, Scenario])


@dataclass(slots=True)
class Run:
    """A process's view of the run."""

    phase: Phase = Phase.IDLE
    start: Start | None = None
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    """What each user class sends, after tags."""
    work: Work | None = None
    """What there is to send, absent where this process stands by."""
    steady_ns: int = 0

    @property
    def open(self) -> bool:
        """Whether requests may start."""
        return self.phase is Phase.RUNNING

    def begin(self, start: Start, scenarios: dict[str, Scenario]) -> None:
        """Open the gate."""
        settings = start.settings
        self.scenarios = {n: s.only(settings.tags, settings.exclude_tags) for n, s in scenarios.items()}
        self.steady_ns = start.steady_ns
        self.inherit(start)
        self.phase = Phase.RUNNING

    def inherit(self, start: Start) -> None:
        """Take the rank that a start names; nothing is to be sent without one."""
        self.start, load = start, start.settings.load
        self.work = None
        if start.rank is not None or start.late:
            self.work = Work(
                start.rank or 0,
                start.ranks,
                late=start.late,
                amounts=load.amounts(start.settings.seed),
                retries=load.retries,
                taken=start.taken,
            )

    def place(self, at_ns: int) -> tuple[str, int]:
        """Return phase and stage of a request that is sent at an instant since the start of the run."""
        assert self.start is not None  # noqa: S101 - the gate is open
        return WARMUP if at_ns < self.steady_ns else STEADY, self.start.settings.load.stage(at_ns)
