"""The Locust users that stream: `ChatUser` and `CompletionsUser`.

The class is the endpoint, the scenario is what it sends. Which request comes next is not Locust's (unseeded) choice
of a task but the run's; a user only fetches it. A class without tasks of its own gets the one that does so.
"""

import logging
import uuid
from functools import partial
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, User
from locust.env import Environment
from locust.exception import InterruptTaskSet, RescheduleTask, RescheduleTaskImmediately, StopTest, StopUser

from vllm_locust import api
from vllm_locust.generator import GateClosedError, Generator, Request, generator_of
from vllm_locust.hub import hub
from vllm_locust.timeline import Outcome, Timeline

logger = logging.getLogger(__name__)

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
    _answered = False
    """Whether one of its requests has ended."""

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
            request = generator_of(self.environment).next_request(type(self).__name__)
        except GateClosedError:
            raise StopUser from None
        self._send(request)

    def stream(self, body: dict[str, Any], scenario: str) -> Timeline:
        """Stream a body of your own, recorded under `scenario`; returns the finished timeline.

        `model`, `stream` and `stream_options` are added unless the body has them. Failures are recorded, not raised.
        """
        if not scenario.isprintable():
            raise ValueError(f"scenario {scenario!r} is a label; it may not have control characters")
        request = Request(
            user_class=type(self).__name__,
            endpoint=self.endpoint,
            scenario=scenario,
            body=body,
            request_id=uuid.uuid4().hex,
        )
        return self._send(request)

    def _send(self, request: Request) -> Timeline:
        try:
            timeline = send(self.environment, request, self.context())
        except GateClosedError:
            raise StopUser from None
        if timeline.outcome is Outcome.CANCELLED:
            raise StopUser
        if not self._answered:
            self._answered = True
            generator_of(self.environment).note_answered_user()
        if timeline.outcome is Outcome.CONNECT_FAILED:
            gevent.sleep(_UNREACHABLE_S)
        return timeline


def send(environment: Environment, request: Request, context: dict[str, Any]) -> Timeline:
    """Stream a request, record it, and tell Locust and the listeners of our events; `context` is what they are given.

    Raises `GateClosedError` where none may start, and what a listener raises.
    """
    generator = generator_of(environment)
    try:
        timeline = generator.stream(request, partial(_fire_ttft, environment, context))
    except (GateClosedError, *_TOLD_TO_LOCUST):
        raise
    except Exception:
        _note_plugin_error(generator)
        raise
    if timeline.outcome is not Outcome.CANCELLED:
        _fire_itl(environment, generator, timeline, context)
        _fire_request(environment, generator, timeline, context)
    return timeline


def arrive(environment: Environment, request: Request) -> None:
    """Send what is due in an open loop, where no user waits for it."""
    try:
        send(environment, request, {})
    except (GateClosedError, *_TOLD_TO_LOCUST):
        pass
    except Exception:
        logger.exception("a request could not be sent")


def _note_plugin_error(generator: Generator) -> None:
    if generator.recorder is not None:
        generator.recorder.note_plugin_error()


def _fire_ttft(environment: Environment, context: dict[str, Any], timeline: Timeline) -> None:
    environment.events.ttft.fire(  # type: ignore[attr-defined]
        scenario=timeline.scenario,
        endpoint=timeline.endpoint,
        ttft=(timeline.ttft_ns or 0) / 1e9,
        request_id=timeline.request_id,
        context=context,
    )


def _fire_itl(environment: Environment, generator: Generator, timeline: Timeline, context: dict[str, Any]) -> None:
    recorder = generator.recorder
    if recorder is not None and recorder.itl_wanted and timeline.first_ns is not None:
        environment.events.itl.fire(  # type: ignore[attr-defined]
            scenario=timeline.scenario,
            endpoint=timeline.endpoint,
            itl=timeline.gaps_ns() / 1e9,
            request_id=timeline.request_id,
            context=context,
        )


def _fire_request(environment: Environment, generator: Generator, timeline: Timeline, context: dict[str, Any]) -> None:
    outcome = timeline.outcome
    exception = None
    if outcome is not None and outcome.failed:
        status = f" {timeline.status}" if timeline.status not in (0, 200) else ""
        exception = StreamError(f"{outcome}{status}")
    path = api.PATHS[timeline.endpoint]
    environment.events.request.fire(
        request_type="POST",
        name=f"{path} [{timeline.scenario}]",
        response_time=timeline.response_time_ns / 1e6,
        response_length=timeline.response_bytes,
        response=None,
        exception=exception,
        context=context,
        url=f"{generator.target}{path}",
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
