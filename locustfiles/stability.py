"""The test before you trust a server: mixed traffic for five minutes at a fixed rate, judged in windows of ten seconds.

Find the rate first: 70 to 80 % of the last stage that met its limits, as in

    locust -f locustfiles/mixed.py --request-rate stages --stages 5,10,20,40 --limit "ttft p95 < 500ms" …
"""

from vllm_locust import ChatUser, CompletionsUser


class StabilityChat(ChatUser):
    """Three of four requests go to `/v1/chat/completions`."""

    scenario = "stability"
    weight = 3


class StabilityCompletions(CompletionsUser):
    """The fourth one uses `/v1/completions`."""

    scenario = "stability"
    weight = 1
