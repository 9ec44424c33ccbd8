"""A plain Locust script over `FastHttpUser`, whose client has an `iter_lines`: the clock is read at each line."""

from time import perf_counter

import once
from locust import FastHttpUser, task


class Script(FastHttpUser):
    @task
    def ask(self) -> None:
        try:
            self._ask()
        finally:
            once.leave(self.environment)

    def _ask(self) -> None:
        name, times_s = once.next_name(), []
        begun_s = perf_counter()
        lines = self.client.iter_lines(once.PATH, method="POST", json=once.BODY, headers={"X-Request-Id": name})
        for line in lines:
            now_s = perf_counter()
            if once.has_token(line):
                times_s.append(now_s)
        once.note(name, begun_s, times_s)
