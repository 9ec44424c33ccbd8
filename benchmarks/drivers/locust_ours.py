"""A Locust file with this plugin; what is measured of each stream is kept beside the report, for the comparison."""

from typing import Any

import once
from locust import events, task
from locust.env import Environment

from vllm_locust import ChatUser


class Ours(ChatUser):
    @task
    def ask(self) -> None:
        try:
            self.stream(once.BODY, scenario="bench")
        finally:
            once.leave(self.environment)


@events.init.add_listener
def _listen(environment: Environment, **_: Any) -> None:
    hooks: Any = environment.events
    hooks.ttft.add_listener(lambda request_id, ttft, **_: once.ttfts_s.update({request_id: ttft}))
    hooks.itl.add_listener(lambda request_id, itl, **_: once.gaps_s.update({request_id: itl.tolist()}))
