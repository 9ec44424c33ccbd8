"""A plain Locust script, as people write it for streams; it sends 100 requests and stops."""

from locust import HttpUser, task
from locust.exception import StopUser

BODY = {
    "model": "simulated",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 16,
    "stream": True,
}


class Plain(HttpUser):
    """Takes a stream that came to its end for a success."""

    sent = 0

    @task
    def ask(self) -> None:
        """Read one stream."""
        if Plain.sent == 100:
            raise StopUser
        Plain.sent += 1
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as response:
            for _ in response.iter_lines():
                pass
            response.success()
