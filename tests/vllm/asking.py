"""Single requests to a server through the product's own client, for details that a report sums up."""

from time import monotonic_ns
from typing import Any

from server import Server

from vllm_locust.api import encode_body
from vllm_locust.client import Client
from vllm_locust.origin import origin_of
from vllm_locust.timeline import Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Pool

CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ENDPOINTS = ("chat", "completions")


def client_of(server: Server, key: str = "") -> Client:
    """Return a client of a server."""
    origin, prefix = origin_of(server.url)
    return Client(Pool(origin, keep_alive=False), Timeouts(first_token_s=60, idle_s=60), key, prefix)


def body_of(endpoint: str, prompt: str = "Why is the sky blue?", tokens: int = 40, **more: Any) -> dict[str, Any]:
    """Return a body that asks for an answer of exactly so many tokens, the same in every run."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}
    usage = {"stream_options": {"include_usage": True}}
    return {"model": "tiny", "stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": 1} | asked | usage | more


def ask(server: Server, endpoint: str, body: dict[str, Any] | None = None, client: Client | None = None) -> Timeline:
    """Send one request and follow it to its end."""
    timeline = Timeline("request-1", "short", endpoint, monotonic_ns())
    (client or client_of(server)).stream(timeline, encode_body(body or body_of(endpoint)))
    assert timeline.outcome is not None
    return timeline
