"""A plain Locust script over `requests`: the clock is read at each line."""

from time import perf_counter

import once
from locust import HttpUser, task
from requests import RequestException


class Script(HttpUser):
    @task
    def ask(self) -> None:
        try:
            self._ask()
        finally:
            once.leave(self.environment)

    def _ask(self) -> None:
        name, times_s = once.next_name(), []
        begun_s = perf_counter()
        with self.client.post(
            once.PATH, json=once.BODY, headers={"X-Request-Id": name}, stream=True, catch_response=True
        ) as response:
            try:
                for line in response.iter_lines():
                    now_s = perf_counter()
                    if once.has_token(line):
                        times_s.append(now_s)
            except (ValueError, RequestException) as error:
                response.failure(str(error))
        once.note(name, begun_s, times_s)
