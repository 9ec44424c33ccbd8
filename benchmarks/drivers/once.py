"""What the Locust files of the bench share: each user asks once, and when all have, the run ends."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.exception import StopUser

FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))
PATH = "/v1/chat/completions"
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How long is a piece of string?"}],
    "max_tokens": int(os.environ.get("BENCH_TOKENS", "16")),
    "stream": True,
    "stream_options": {"include_usage": True},
}
_LAST_WORDS_S = 0.5
"""Time for the last user to be gone before Locust is told to quit."""

ttfts_s: dict[str, float] = {}
"""Time to first token of each stream, in seconds."""
gaps_s: dict[str, list[float]] = {}
"""Gaps between the tokens of each stream, in seconds."""
_numbers = itertools.count()
_done = itertools.count(1)


def next_name() -> str:
    """Return a name for a request, to be sent as X-Request-Id."""
    return str(next(_numbers))


def has_token(line: bytes | str) -> bool:
    """Tell whether a line of a stream carries a token; raises `ValueError` where it carries an error."""
    text = line.decode() if isinstance(line, bytes) else line
    if not text.startswith("data: ") or text == "data: [DONE]":
        return False
    event = json.loads(text[6:])
    if "error" in event:
        raise ValueError(event["error"]["message"])
    return any(choice["delta"].get("content") for choice in event["choices"])


def note(name: str, begun_s: float, times_s: list[float]) -> None:
    """Keep what was measured of one stream; `times_s` are those of its tokens, on the clock of `begun_s`."""
    if times_s:
        ttfts_s[name] = times_s[0] - begun_s
        gaps_s[name] = [later - earlier for earlier, later in itertools.pairwise(times_s)]


def leave(environment: Environment) -> None:
    """End this user, and the run with the last one."""
    assert environment.parsed_options is not None
    assert environment.runner is not None
    if next(_done) == environment.parsed_options.num_users:
        gevent.spawn_later(_LAST_WORDS_S, environment.runner.quit)
    raise StopUser


@events.quitting.add_listener
def _write(environment: Environment, **_: Any) -> None:
    total = environment.stats.total
    found = {
        "succeeded": total.num_requests - total.num_failures,
        "ttfts_s": ttfts_s,
        "gaps_s": gaps_s,
    }
    (FOLDER / "found.json").write_text(json.dumps(found))
