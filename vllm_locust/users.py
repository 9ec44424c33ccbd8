"""The Locust users that stream: `ChatUser` and `CompletionsUser`.

The class is the endpoint, the scenario is what it sends. Which request comes next is not Locust's (unseeded) choice
of a task but the run's; a user only fetches it. A class without tasks of its own gets the one that does so.
"""

import time
import uuid
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, User
from locust.env import Environment
from locust.exception import InterruptTaskSet, RescheduleTask, RescheduleTaskImmediately, StopTest, StopUser

from vllm_locust import api
from vllm_locust.generator import GateClosedError, Generator, generator_of
from vllm_locust.hub import hub
from vllm_locust.timeline import Outcome, Timeline

_TOLD_TO_LOCUST = (StopUser, StopTest, RescheduleTask, RescheduleTaskImmediately, InterruptTaskSet)
"""What a listener may raise to tell Locust something; anything else is an error of ours."""


_UNREACHABLE_S = 1.0
"""How long a user whose connection was refused waits: a server that restarts is not asked a thousand times a second."""


class StreamError(Exception):
    """How a request failed, as Locust shows it: the kind and the status, since messages of servers are unbounded."""


class StreamUser(FastHttpUser):
    """A Locust user that streams from one endpoint; `self.client` still serves for anything else."""

    abstract = True
    endpoint: ClassVar[str]
    scenario: str | None = None
    """Name of a packaged scenario, or path of a scenario file; `--scenario` overrides it."""
    insecure = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class that has no tasks the one that sends what its scenario says."""
        super().__init_subclass__(**kwargs)
        restore_tasks(cls)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        hub().pause()  # Locust makes all users that it is told to spawn in one go

    def send_next(self) -> None:
        """Send the next request of the scenario."""
        try:
            part, body, request_id = self._generator.next_request(type(self).__name__, self.endpoint)
        except GateClosedError:
            raise StopUser from None
        self._send(body, part.name, request_id, part.output_tokens)

    def stream(self, body: dict[str, Any], scenario: str) -> Timeline:
        """Stream a body of your own, recorded under `scenario`; returns the finished timeline.

        `model`, `stream` and `stream_options` are added unless the body has them. Failures are recorded, not raised.
        """
        if not scenario.isprintable():
            raise ValueError(f"scenario {scenario!r} is a label; it may not have control characters")
        return self._send(body, scenario, uuid.uuid4().hex, None)

    def _note_plugin_error(self) -> None:
        recorder = self._generator.recorder
        if recorder is not None:
            recorder.note_plugin_error()

    @property
    def _generator(self) -> Generator:
        return generator_of(self.environment)

    def _send(self, body: dict[str, Any], scenario: str, request_id: str, expected_tokens: int | None) -> Timeline:
        timeline = Timeline(
            request_id=request_id,
            scenario=scenario,
            endpoint=self.endpoint,
            called_ns=time.monotonic_ns(),
            user_class=type(self).__name__,
            choices_asked=body["n"] if isinstance(body.get("n"), int) else 1,
            expected_tokens=body["max_tokens"] if body.get("ignore_eos") and expected_tokens else None,
        )
        try:
            self._generator.stream(timeline, body, self._fire_ttft)
        except GateClosedError:
            raise StopUser from None
        except _TOLD_TO_LOCUST:
            raise
        except Exception:
            self._note_plugin_error()
            raise
        if timeline.outcome is Outcome.CANCELLED:
            raise StopUser
        self._fire_itl(timeline)
        self._fire_request(timeline)
        if timeline.outcome is Outcome.CONNECT_FAILED:
            gevent.sleep(_UNREACHABLE_S)
        return timeline

    def _fire_ttft(self, timeline: Timeline) -> None:
        self.environment.events.ttft.fire(
            scenario=timeline.scenario,
            endpoint=timeline.endpoint,
            ttft=(timeline.ttft_ns or 0) / 1e9,
            request_id=timeline.request_id,
            context=self.context(),
        )

    def _fire_itl(self, timeline: Timeline) -> None:
        recorder = self._generator.recorder
        if recorder is not None and recorder.itl_wanted and timeline.first_ns is not None:
            self.environment.events.itl.fire(
                scenario=timeline.scenario,
                endpoint=timeline.endpoint,
                itl=timeline.gaps_ns() / 1e9,
                request_id=timeline.request_id,
                context=self.context(),
            )

    def _fire_request(self, timeline: Timeline) -> None:
        outcome = timeline.outcome
        exception = None
        if outcome is not None and outcome.failed:
            status = f" {timeline.status}" if timeline.status not in (0, 200) else ""
            exception = StreamError(f"{outcome}{status}")
        path = api.PATHS[self.endpoint]
        self.environment.events.request.fire(
            request_type="POST",
            name=f"{path} [{timeline.scenario}]",
            response_time=timeline.response_time_ns / 1e6,
            response_length=timeline.response_bytes,
            response=None,
            exception=exception,
            context=self.context(),
            url=f"{self.host}{path}",
        )


def restore_tasks(user_class: type[StreamUser]) -> None:
    """Give a user class that has no tasks (left) ours: Locust's tag filter knows nothing of parts."""
    own = [task for task in user_class.tasks if task is not StreamUser.send_next]
    user_class.tasks = own or [StreamUser.send_next]


def task_tags(user_class: type[User]) -> set[str]:
    """Return the Locust tags of a class's own tasks."""
    return {tag for task in user_class.tasks for tag in getattr(task, "locust_tag_set", ())}


class ChatUser(StreamUser):
    """Streams from `/v1/chat/completions`."""

    abstract = True
    endpoint = "chat"


class CompletionsUser(StreamUser):
    """Streams from `/v1/completions`."""

    abstract = True
    endpoint = "completions"
