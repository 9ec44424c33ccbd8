"""What a process has that sends requests: its view of the run, a client, a recorder.

Users ask it for their next request and hand it what they stream; the cluster begins it, ticks it and finishes it.
"""

import gc
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import gevent
import gevent.event

from vllm_locust import api, scenario
from vllm_locust.answer import Answer
from vllm_locust.client import Client
from vllm_locust.hub import hub
from vllm_locust.origin import origin_of
from vllm_locust.prompts import Prompt
from vllm_locust.recorder import Recorder
from vllm_locust.recording import Report
from vllm_locust.requestlog import RequestLog
from vllm_locust.run import Finish, Phase, Run, Start, decode_scenarios
from vllm_locust.scenario import Part, Pick
from vllm_locust.timeline import Timeline
from vllm_locust.transport import Pool

_GC_THRESHOLDS = (10_000, 50, 100)


class GateClosedError(Exception):
    """No request may start: the run has not begun, is over, or has nothing for this user."""


class Generator:
    """The sending side of a process."""

    def __init__(self) -> None:
        self.run = Run()
        self.recorder: Recorder | None = None
        self.log: RequestLog | None = None
        self._client: Client | None = None
        self._known: tuple[str, bytes] | None = None
        self._begun = gevent.event.Event()
        self._run_start_ns = 0
        self._deadline_ns = 0

    # The run

    def begin(self, start: Start) -> None:
        """Take part in a run; the master has sent the scenarios unless this process has had them."""
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
        self.new_epoch(start, start.epoch, start.run_age_ns - start.age_ns)
        self.run.begin(start, decode_scenarios(self._known[1]))
        self._begun.set()

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
        self.recorder.itl_wanted = wanted
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
        return self.recorder.report(time.monotonic_ns())

    def finish(self, finish: Finish) -> Report:
        """Close the gate, let streams run out or cut them, and return the final state; the log is complete then."""
        assert self.recorder is not None and self._client is not None  # noqa: S101, PT018 - a run has begun
        self.run.phase = Phase.FINISHING
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

    # Requests

    def next_request(self, user_class: str, endpoint: str) -> tuple[Part, dict[str, Any], str]:
        """Return part, body and request id of the next request of a user class; raises `GateClosedError`.

        Waits for the first run of this process: Locust may start users before the master's word is here.
        """
        self._begun.wait()
        hub().pause()  # a thousand users may begin at once
        run = self.run
        plan = run.scenarios.get(user_class)
        if not run.open or run.start is None or plan is None or not plan.parts:
            raise GateClosedError
        settings = run.start.settings
        index = run.next_index(user_class)
        chosen = scenario.pick(plan, settings.seed, user_class, index)
        prompt = scenario.nonce(run.start.run, user_class, index) if chosen.part.cold else ""
        body = request_body(chosen, endpoint, prompt, exact_length=settings.exact_length)
        # A header is ASCII, a class may have any name.
        return chosen.part, body, f"{run.start.run}-{ascii(user_class)[1:-1]}-{index}"

    def stream(
        self,
        timeline: Timeline,
        body: dict[str, Any],
        on_first_token: Callable[[Timeline], None],
    ) -> None:
        """Stream one request and record it; raises `GateClosedError` where none may start."""
        self._begun.wait()
        run, recorder, client, log = self.run, self.recorder, self._client, self.log
        if not run.open or run.start is None or recorder is None or client is None:
            raise GateClosedError
        settings = run.start.settings
        encoded = api.encode_body(api.streaming(body, settings.model, settings.counting))
        if log is not None and log.texts:
            timeline.answer = Answer()
        recorder.begin(timeline)
        try:
            client.stream(timeline, encoded, on_first_token)
        finally:
            recorder.end(timeline)
            if log is not None:
                log.add(timeline, recorder.epoch, body)


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
