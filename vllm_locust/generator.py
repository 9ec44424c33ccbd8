"""What a process has that sends requests: its view of the run, a client, a recorder.

Users ask it for their next request and hand it what they stream; the cluster begins it, ticks it and finishes it.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import gevent
import gevent.event
import msgspec

from vllm_locust import api, arrivals, scenario
from vllm_locust.answer import Answer
from vllm_locust.cell import RETRY, WARMUP, Key
from vllm_locust.client import Client
from vllm_locust.dispatch import Dispatch
from vllm_locust.hub import hub
from vllm_locust.origin import origin_of
from vllm_locust.prompts import Prompt
from vllm_locust.recorder import Recorder
from vllm_locust.recording import Report
from vllm_locust.requestlog import RequestLog
from vllm_locust.run import Finish, Phase, Run, Start, decode_scenarios
from vllm_locust.samples import Samples, Wanted, rank
from vllm_locust.scenario import Pick
from vllm_locust.timeline import Timeline
from vllm_locust.transport import Pool
from vllm_locust.work import Item

_GC_THRESHOLDS = (10_000, 50, 100)


class GateClosedError(Exception):
    """No request may start: the run has not begun, is over, or has nothing for this user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that has not been sent."""

    user_class: str
    endpoint: str
    scenario: str
    body: dict[str, Any]
    request_id: str
    output_tokens: int | None = None
    """How many tokens the scenario asks for exactly."""
    item: Item | None = None
    """Which one of the run's it is; absent for one that a task has built."""
    scheduled_ns: int | None = None


class Generator:
    """The sending side of a process."""

    def __init__(self) -> None:
        self.run = Run()
        self.recorder: Recorder | None = None
        self.log: RequestLog | None = None
        self.samples: Samples | None = None
        self.answered_users = 0
        """How many users have finished a request in this run."""
        self._dispatch: Dispatch[Request] | None = None
        self._arrive: Callable[[Request], None] | None = None
        self._on_state: Callable[[], None] = lambda: None
        self._moved = gevent.event.Event()
        """Set, and replaced, whenever a user that waits for work is to look again."""
        self._client: Client | None = None
        self._known: tuple[str, bytes] | None = None
        self._begun = gevent.event.Event()
        self._run_start_ns = 0
        self._deadline_ns = 0

    # The run

    def begin(
        self, start: Start, arrive: Callable[[Request], None], on_state: Callable[[], None] = lambda: None
    ) -> None:
        """Take part in a run; the master has sent the scenarios unless this process has had them.

        In an open loop `arrive` streams a request that is due. `on_state` is called when a user has finished its first
        request during the warm-up, and when all that there was to send has ended.
        """
        now_ns = time.monotonic_ns()
        if start.scenarios is not None:
            self._known = (start.scenario_hash, start.scenarios)
        assert self._known is not None and self._known[0] == start.scenario_hash  # noqa: S101, PT018 - see master
        settings = start.settings
        origin, prefix = origin_of(settings.target, insecure=settings.insecure, ca_pem=settings.ca_pem)
        if self._client is not None:
            self._client.pool.close()
        self._client = Client(Pool(origin, keep_alive=settings.keep_alive), settings.timeouts, settings.api_key, prefix)
        # A full collection looks at all that Locust ever made, or at all that a thousand streams have, and keeps the
        # loop away for longer than a token takes. Streams leave no garbage that only a collection finds.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._run_start_ns = now_ns - start.run_age_ns
        self.log = self._new_log(start)
        self.samples = Samples(start.worker, settings.seed, settings.samples) if settings.samples else None
        self.answered_users, self._arrive, self._on_state = 0, arrive, on_state
        self.run.begin(start, decode_scenarios(self._known[1]))
        self.new_epoch(start, start.epoch, start.run_age_ns - start.age_ns)
        self._dispatch = self._new_dispatch(start)
        self._begun.set()

    def inherit(self, start: Start) -> None:
        """Take the place of a worker that is lost; in an open loop from now on."""
        self.run.inherit(start)
        self._dispatch = self._new_dispatch(start)
        self._wake()

    def move(self, steady_ns: int) -> None:
        """The warm-up ends at an instant since the start of the run, sooner than was said."""
        self.run.steady_ns = steady_ns
        if self.recorder is not None:
            self._set_boundaries(self.recorder)

    def _set_boundaries(self, recorder: Recorder) -> None:
        assert self.run.start is not None  # noqa: S101 - a run has begun
        since_ns = recorder.start_ns - self._run_start_ns
        recorder.move(ns - since_ns for ns in self.run.start.settings.load.boundaries_ns(self.run.steady_ns))

    def _wake(self) -> None:
        moved, self._moved = self._moved, gevent.event.Event()
        moved.set()

    def _new_dispatch(self, start: Start) -> Dispatch[Request] | None:
        load = start.settings.load
        if load.arrivals is None or start.rank is None or self._arrive is None:
            return None
        schedule: Iterator[tuple[int, int]] = arrivals.slice_of(load.arrivals, start.rank, start.ranks)
        if load.requests is not None:
            last = load.requests
            schedule = itertools.takewhile(lambda arrival: arrival[0] < last, schedule)
        return Dispatch(
            schedule,
            self._run_start_ns,
            since_ns=start.since_ns,
            most=seats(load.max_in_flight, start.rank, start.ranks),
            make=self._make,
            offer=self._offer,
            send=self._arrive,
            drop=self._drop,
            on_done=self._on_state,
        )

    def _new_log(self, start: Start) -> RequestLog | None:
        if self.log is not None:
            self.log.close()
        settings = start.settings
        if not settings.request_log:
            return None
        return RequestLog(start.worker, self._run_start_ns, texts=settings.log_text)

    def refuse(self) -> None:
        """Take no part: users that wait for the run go."""
        self.run.phase = Phase.FINISHED
        self._begun.set()

    def new_epoch(self, start: Start, epoch: int, at_ns: int) -> None:
        """Record into a new epoch, which began `at_ns` after the run; what is in flight goes on, and ends unseen."""
        start_ns, now_ns = self._run_start_ns + at_ns, time.monotonic_ns()
        wanted = self.recorder is not None and self.recorder.itl_wanted
        self.recorder = Recorder(start.run, epoch, start.worker, start.settings.window_ns, start_ns, now_ns)
        self.recorder.itl_wanted, self.recorder.goodput = wanted, start.settings.goodput
        self._set_boundaries(self.recorder)
        hub().begin()

    def harvest(self) -> None:
        """Take what is new from all streams in slices, so that the next `tick` is short."""
        assert self.recorder is not None  # noqa: S101 - a run has begun
        for _ in self.recorder.harvest_slices():
            hub().pause()

    def tick(self, users: int) -> Report:
        """Harvest, and return what the master does not know yet."""
        self._tick(users)
        return self.report()

    def _tick(self, users: int) -> None:
        assert self.recorder is not None and self._client is not None  # noqa: S101, PT018 - a run has begun
        loop = hub()
        self.recorder.tick(
            time.monotonic_ns(),
            swept_ns=loop.oldest_ns,
            unparsed_ns=self._client.oldest_unparsed_ns,
            users=users,
            away_ns=loop.take_longest_away_ns(),
            stalled_ns=loop.take_stalled_ns(),
            core_wait_ns=loop.core_wait.take_ns(),
            silence_ns=self._client.longest_silence_ns,
        )
        loop.rest(self.recorder.take_gaps_ns())

    def write_log(self) -> None:
        """Write what has ended into the log of requests, if there is one, in slices."""
        if self.log is not None:
            for _ in self.log.slices():
                hub().pause()

    def report(self) -> Report:
        """Return what the master does not know yet, without looking for more."""
        assert self.recorder is not None  # noqa: S101 - a run has begun
        report = self.recorder.report(time.monotonic_ns())
        report.steady_ns, report.answered_users = self.run.steady_ns, self.answered_users
        report.taken = dict(self.run.work.taken) if self.run.work is not None else {}
        report.done = self.done
        return report

    def finish(self, finish: Finish) -> Report:
        """Close the gate, let streams run out or cut them, and return the final state; the log is complete then."""
        assert self.recorder is not None and self._client is not None  # noqa: S101, PT018 - a run has begun
        self.run.phase = Phase.FINISHING
        if self._dispatch is not None:
            self._dispatch.close()
        self._wake()
        self.recorder.stop(time.monotonic_ns(), finish.windows)
        self.hurry(finish.stop_timeout_s)
        while self._client.in_flight and time.monotonic_ns() < self._deadline_ns:
            gevent.sleep(0.02)
        if self._client.in_flight:
            self._client.cut_all()
            while self._client.in_flight:
                gevent.sleep(0.001)
        self._tick(users=0)
        self.recorder.finish(time.monotonic_ns())
        self.write_log()
        hub().rest()
        self.run.phase = Phase.FINISHED
        return self.report()

    def hurry(self, stop_timeout_s: float) -> None:
        """Let streams run out for so long from now on."""
        self._deadline_ns = time.monotonic_ns() + round(stop_timeout_s * 1e9)

    @property
    def done(self) -> bool:
        """Whether all that this process had to send has been sent and has ended."""
        if self._dispatch is not None:
            return self._dispatch.done
        return self.run.work is not None and self.run.work.done

    @property
    def target(self) -> str:
        """Address of the server of this run."""
        return "" if self.run.start is None else self.run.start.settings.target

    def note_answered_user(self) -> None:
        """A user has finished its first request."""
        self.answered_users += 1
        if self.run.place(time.monotonic_ns() - self._run_start_ns)[0] == WARMUP:
            self._on_state()

    # Requests

    def next_request(self, user_class: str) -> Request:
        """Return the next request of a user class, or of another one where this one's are all sent.

        Waits for the first run of this process: Locust may start users before the master's word is here. Raises
        `GateClosedError` once there is nothing to send; in an open loop that is at the end.
        """
        self._begun.wait()
        hub().pause()  # a thousand users may begin at once
        while True:
            run = self.run
            if not run.open or run.start is None or not (plan := run.scenarios.get(user_class)) or not plan.parts:
                raise GateClosedError
            work = run.work
            item = work.take(user_class) if work is not None and run.start.settings.load.arrivals is None else None
            if item is not None:
                return self._request(item)
            if work is not None and work.done:
                raise GateClosedError
            self._moved.wait()

    def _request(self, item: Item, scheduled_ns: int | None = None) -> Request:
        start = self.run.start
        assert start is not None  # noqa: S101 - the gate is open
        settings, again = start.settings, f"-{item.attempt}" if item.attempt else ""
        chosen = scenario.pick(self.run.scenarios[item.user_class], settings.seed, item.user_class, item.index)
        # A header is ASCII, a class may have any name.
        name = f"{ascii(item.user_class)[1:-1]}-{item.index}{again}"
        prompt = scenario.nonce(start.run, item.user_class, item.index, item.attempt) if chosen.part.cold else ""
        endpoint = settings.endpoints[item.user_class]
        return Request(
            user_class=item.user_class,
            endpoint=endpoint,
            scenario=chosen.part.name,
            body=request_body(chosen, endpoint, prompt, exact_length=settings.exact_length),
            request_id=f"{start.run}-{name}",
            output_tokens=chosen.part.output_tokens,
            item=item,
            scheduled_ns=scheduled_ns,
        )

    def _make(self, number: int, due_ns: int) -> Request:
        """Make the request of an arrival."""
        start = self.run.start
        assert start is not None  # noqa: S101 - a run has begun
        return self._request(Item(*start.settings.load.request(start.settings.seed, number)), due_ns)

    def _offer(self, request: Request) -> None:
        """An arrival is due."""
        assert self.recorder is not None  # noqa: S101 - a run has begun
        self.recorder.offer(self._key(request), request.scheduled_ns or 0)

    def _drop(self, request: Request) -> None:
        """An arrival was held back until the end."""
        assert self.recorder is not None  # noqa: S101 - a run has begun
        self.recorder.drop(self._key(request))

    def _key(self, request: Request) -> Key:
        phase, stage = self.run.place((request.scheduled_ns or 0) - self._run_start_ns)
        return Key(request.scenario, request.endpoint, phase, stage)

    def stream(self, request: Request, on_first_token: Callable[[Timeline], None]) -> Timeline:
        """Stream one request and record it; raises `GateClosedError` where none may start."""
        called_ns = time.monotonic_ns()
        self._begun.wait()
        run, recorder, client, body = self.run, self.recorder, self._client, request.body
        log, samples = self.log, self.samples
        if not run.open or run.start is None or recorder is None or client is None:
            raise GateClosedError
        settings = run.start.settings
        phase, stage = run.place(time.monotonic_ns() - self._run_start_ns)
        timeline = Timeline(
            request_id=request.request_id,
            scenario=request.scenario,
            endpoint=request.endpoint,
            called_ns=called_ns,
            phase=RETRY if request.item is not None and request.item.attempt else phase,
            stage=stage,
            attempt=0 if request.item is None else request.item.attempt,
            user_class=request.user_class,
            scheduled_ns=request.scheduled_ns,
            choices_asked=body["n"] if isinstance(body.get("n"), int) else 1,
            expected_tokens=body["max_tokens"] if body.get("ignore_eos") and request.output_tokens else None,
        )
        encoded = api.encode_body(api.streaming(body, settings.model, settings.counting))
        wanted = self._wanted(request)
        if wanted is not None or (log is not None and log.texts):
            timeline.answer = Answer()
        recorder.begin(timeline)
        try:
            client.stream(timeline, encoded, on_first_token)
        finally:
            recorder.end(timeline)
            if log is not None:
                log.add(timeline, recorder.epoch, body)
            if samples is not None and wanted is not None:
                samples.keep(wanted, timeline)
            if request.item is not None and request.scheduled_ns is None and run.work is not None:
                run.work.end(request.item, failed=timeline.outcome is not None and timeline.outcome.failed)
                if run.work.idle:
                    self._wake()
                if run.work.done:
                    self._on_state()
        return timeline

    def _wanted(self, request: Request) -> Wanted | None:
        """Tell whether the answer to a request that is about to leave is wanted as a sample."""
        item, samples = request.item, self.samples
        if samples is None or (item is not None and item.attempt):
            return None
        if item is None:  # what has no number is known by what it asks
            prompt = msgspec.json.encode(api.asked(request.body))
            place = rank(samples.seed, request.user_class, prompt)
            return Wanted(place, None, prompt) if samples.admit(request.scenario, place) else None
        place = rank(samples.seed, item.user_class, item.index)
        if not samples.admit(request.scenario, place):
            return None
        chosen = scenario.pick(self.run.scenarios[item.user_class], samples.seed, item.user_class, item.index)
        # The same again without the nonce: no two runs have the same one.
        body = request_body(chosen, request.endpoint, "", exact_length=False)
        return Wanted(place, item.index, msgspec.json.encode(api.asked(body)))


def seats(most: int | None, rank: int, ranks: int) -> int | None:
    """Return a rank's share of the streams that there may be at once."""
    return None if most is None else most // ranks + (rank < most % ranks)


def request_body(chosen: Pick, endpoint: str, nonce: str, *, exact_length: bool) -> dict[str, Any]:
    """Return what a scenario adds to a request: the prompt in the endpoint's form, length and sampling."""
    part = chosen.part
    body: dict[str, Any] = {}
    if endpoint == "chat":
        body["messages"] = _messages(chosen.prompt, nonce)
    else:
        body["prompt"] = nonce + _text(chosen.prompt)
    if chosen.output_tokens is not None:
        body["max_tokens"] = chosen.output_tokens
        if exact_length:
            body |= {"min_tokens": chosen.output_tokens, "ignore_eos": True}
    elif part.max_tokens is not None:
        body["max_tokens"] = part.max_tokens
    if part.temperature is not None:
        body["temperature"] = part.temperature
    return body | part.extra_body


def _text(prompt: Prompt) -> str:
    """Return a prompt as one text; the contents of messages follow each other, an empty line between them."""
    if prompt.text is not None:
        return prompt.text
    return "\n\n".join(m["content"] for m in prompt.messages or () if isinstance(m["content"], str))


def _messages(prompt: Prompt, nonce: str) -> list[dict[str, Any]]:
    """Return a prompt as messages, the nonce in front of the first: the server caches by prefix."""
    if prompt.messages is None:
        return [{"role": "user", "content": nonce + (prompt.text or "")}]
    first, *rest = prompt.messages
    content = first["content"]
    if nonce:
        content = nonce + content if isinstance(content, str) else [{"type": "text", "text": nonce}, *content]
    return [{**first, "content": content}, *rest]


_generators: WeakKeyDictionary[Any, Generator] = WeakKeyDictionary()


def generator_of(environment: Any) -> Generator:  # noqa: ANN401 - a locust Environment, which is above this layer
    """Return the generator of a Locust environment, one for each."""
    found = _generators.get(environment)
    if found is None:
        found = _generators[environment] = Generator()
    return found
