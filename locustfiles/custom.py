"""A user that builds its own requests: a conversation of three questions, each sent with what was said before."""

from typing import Any

from locust import between, task

from vllm_locust import ChatUser

QUESTIONS = ("Why is the sky blue?", "Why is it red in the evening?", "And on Mars?")


class Custom(ChatUser):
    """Asks, waits a second or two, and asks on."""

    wait_time = between(1, 2)

    @task
    def conversation(self) -> None:
        """Send each question with all that came before it; `model` and `stream` are added to the body."""
        messages: list[dict[str, Any]] = []
        for question in QUESTIONS:
            if messages:
                self.wait()
            messages.append({"role": "user", "content": question})
            answer = self.stream({"messages": messages, "max_tokens": 64}, scenario="mine")
            if answer.outcome != "ok":
                return
            messages.append({"role": "assistant", "content": f"An answer of {answer.output_tokens} tokens."})
