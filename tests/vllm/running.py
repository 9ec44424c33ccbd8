"""Runs of the product against a server, as a user starts them: one class of users, one part of a scenario."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from processes import ROOT, assert_clean, headless, locust, process, saved

LOCUSTFILE = """
from locust import constant
from vllm_locust import ChatUser, CompletionsUser

class Load({base}):
    scenario = "load.toml"
    wait_time = constant({wait_s})
"""


Prompt = dict[str, Any]
"""A line of a file of prompts, as this product and `vllm bench serve` take it."""


class Ran(NamedTuple):
    """A run that has ended."""

    code: int
    output: str
    summary: dict[str, Any]

    @property
    def total(self) -> dict[str, Any]:
        return dict(self.summary["total"])

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcomes that occurred."""
        return {outcome: number for outcome, number in self.total["outcomes"].items() if number}


def load(folder: Path, prompts: list[Prompt], endpoint: str = "chat", wait_s: float = 0, **extra: Any) -> Path:
    """Write a Locust file whose users send the prompts as they are; returns its path."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    lines = [
        'cache = "natural"',
        "[part.load]",
        'prompts = "prompts.jsonl"',
        *(f"extra_body.{key} = {json.dumps(value)}" for key, value in extra.items()),
    ]
    (folder / "load.toml").write_text("\n".join(lines) + "\n")
    path = folder / "locustfile.py"
    base = {"chat": "ChatUser", "completions": "CompletionsUser"}[endpoint]
    path.write_text(LOCUSTFILE.format(base=base, wait_s=wait_s))
    return path


def ended(folder: Path, code: int, output: str) -> Ran:
    """Return what a run left in its folder."""
    assert (folder / "results").exists(), output
    return Ran(code, output, saved(folder)["summary"])


def run(folder: Path, url: str, locustfile: Path, users: int, seconds: int, *options: str) -> Ran:
    """Run Locust to its end; nothing may be logged as an error."""
    load = ["-u", str(users), "-r", str(users), "-t", f"{seconds}s", *options]
    with process(locust(*headless(folder, url, *load), locustfile=locustfile), folder / "l.log", cwd=folder) as running:
        code = running.wait(seconds + 90)
        assert_clean(running)
        return ended(folder, code, running.output)


def prompts(number: int, tokens: int, words: int = 40) -> list[Prompt]:
    """Return prompts of equal length that differ from their first word on, for answers of exactly so many tokens."""
    lines = (ROOT / "scenarios" / "prompts" / "long.jsonl").read_text().splitlines()
    # Words like any other: a code or a table would be many tokens.
    text = [word for line in lines for word in json.loads(line)["prompt"].split() if word.isalpha() and word.isascii()]
    texts = (" ".join(text[n * words : (n + 1) * words]) for n in range(number))
    return [{"prompt": f"{n:04} {text}", "output_tokens": tokens} for n, text in enumerate(texts)]
