"""A run of this product and one of `vllm bench serve` over the same load say the same of the server.

Same are the prompts, the length of the answers, the parameters of sampling, and how many requests are in flight. The
tools take turns, since a machine has better and worse minutes; tools and server have a core each. Even so, a server may
be a quarter slower in one run than in the next, by its own clock. So each figure is divided by what the server itself
measured of the very same requests, and these shares, as medians of the rounds, are what has to agree. How far, and why:

- TPOT and the mean of ITL, 2 %: first and last token of a hundred or more, and what a loop adds to one of them is next
  to nothing of that. ITL is taken per token, since a busy server puts two into one event now and then.
- The median of ITL, 20 %: gaps are short or long, without and with the prefill of another request, or another process,
  in them; where their middle lies between the two depends on how requests meet, and on what else the machine does.
- TTFT, 20 %: theirs begins before the request is encoded, waits with others for a loop, and ends when that comes to
  the event; ours begins when the request is handed to an open connection, and ends when the event arrived.
- Throughput, 5 %: what lies between two requests, Locust's start in ours, and in theirs the end, when fewer are in
  flight. The server's is that of as many requests without anything between them.

`vllm bench serve` 0.32.0 takes every chunk with choices for a token, and so in a chat the one that names the role for
the first (`async_request_openai_chat_completions`). vLLM sends that right before the first token, so TTFT and TPOT are
as if it did not, and each stream has a gap of some microseconds too many, which is left out here once it is seen.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pytest
import tools
from asking import ENDPOINTS, ask
from running import load, prompts, run
from server import Server, Vllm, on_core, serve

USERS, REQUESTS, TOKENS = 4, 64, 128
PROMPTS = prompts(REQUESTS, TOKENS, words=200)
"""So long that a prefill takes longer than anything that a client does meanwhile."""
ROUNDS, SECONDS = 3, 8
TOLERANCES = {"ttft": 0.2, "ttft p50": 0.2, "tpot": 0.02, "itl": 0.02, "itl p50": 0.2, "throughput": 0.05}
ROLE_GAP = 0.1
"""How long the gap after a role may be, of a usual one."""

Figures = dict[str, float]
"""Means, and medians where the name says so, in seconds; throughput in output tokens per second."""


class Run(NamedTuple):
    """What a tool found, and what the server itself says of the same requests: means, there is nothing else."""

    found: Figures
    own: Figures

    def share(self, name: str) -> float:
        return self.found[name] / self.own[name.removesuffix(" p50")]


@pytest.fixture(scope="module")
def server(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve on a core of its own; nothing is cached, so a prompt is the same work whoever sends it first."""
    with ExitStack() as running:
        with on_core(-1):
            folder = tmp_path_factory.mktemp("agreement")
            server = running.enter_context(serve(vllm, folder, "--no-enable-prefix-caching"))
        for endpoint in ENDPOINTS:
            ask(server, endpoint)
        yield server


def ours(server: Server, endpoint: str, folder: Path) -> Figures:
    ran = run(folder, server.url, load(folder, PROMPTS, endpoint, temperature=0), USERS, SECONDS)
    assert (ran.code, ran.outcomes.keys()) == (0, {"ok"})
    total = ran.total
    return {
        "ttft": total["ttft"]["mean"],
        "ttft p50": total["ttft"]["p50"],
        "tpot": total["tpot"]["mean"],
        "itl": total["itl"]["mean"] / total["tokens"]["tokens_per_event"],
        "itl p50": total["itl"]["p50"],
        "throughput": total["rates"]["output_tokens_per_s"],
    }


def theirs(server: Server, endpoint: str, folder: Path, vllm: Vllm) -> Figures:
    # A format of prompts that both tools read; for the other one theirs would need another package.
    dataset = [{"conversations": [{"value": prompt["prompt"]}, {"value": "an answer"}]} for prompt in PROMPTS]
    (folder / "sharegpt.json").write_text(json.dumps(dataset))
    options: dict[str, Any] = {
        "backend": {"chat": "openai-chat", "completions": "openai"}[endpoint],
        "endpoint": {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint],
        "base-url": server.url,
        "model": "tiny",
        "tokenizer": vllm.model,
        "dataset-name": "sharegpt",
        "dataset-path": folder / "sharegpt.json",
        "sharegpt-output-len": TOKENS,
        "num-prompts": REQUESTS,
        "max-concurrency": USERS,
        "temperature": 0,
        "extra-body": json.dumps({"min_tokens": TOKENS}),
    }
    command = tools.bench_serve(options, folder)
    done = subprocess.run(command, env=vllm.environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS)
    roles = int(endpoint == "chat")
    gaps = [gap for stream in found["itls"] for gap in stream[roles:]]
    assert all(median(stream[n] for stream in found["itls"]) < ROLE_GAP * median(gaps) for n in range(roles))
    return {
        "ttft": found["mean_ttft_ms"] / 1e3,
        "ttft p50": found["median_ttft_ms"] / 1e3,
        "tpot": found["mean_tpot_ms"] / 1e3,
        "itl": mean(gaps) * (REQUESTS + len(gaps)) / (REQUESTS * TOKENS),
        "itl p50": median(gaps),
        "throughput": found["output_throughput"],
    }


def own(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> Figures:
    """Return the server's figures of what it did in between."""
    means = {name: (after[name][0] - total_s) / (after[name][1] - count) for name, (total_s, count) in before.items()}
    return means | {"throughput": USERS * TOKENS / means["e2el"]}


def table(endpoint: str, runs: dict[str, list[Run]]) -> str:
    """Return the medians of the rounds, and of the shares of what the server says."""
    lines = [f"\n{endpoint:12}" + "".join(f"{tool:>24}, of own" for tool in runs)]
    for name in TOLERANCES:
        unit, scale = ("tok/s", 1) if name == "throughput" else ("ms   ", 1e3)
        cells = [
            (median(r.found[name] for r in of_tool) * scale, median(r.share(name) for r in of_tool))
            for of_tool in runs.values()
        ]
        lines.append(f"{name:12}" + "".join(f"{value:18,.2f} {unit} {share:7.3f}" for value, share in cells))
    return "\n".join(lines)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_both_tools_say_the_same(
    server: Server, vllm: Vllm, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: dict[str, list[Run]] = {"vllm-locust": [], "vllm bench serve": []}
    for number in range(ROUNDS):
        for tool, of_tool in runs.items():
            folder = tmp_path / f"{tool} {number}"
            folder.mkdir()
            before = server.times()
            with on_core(0):
                found = (
                    ours(server, endpoint, folder) if tool == "vllm-locust" else theirs(server, endpoint, folder, vllm)
                )
            of_tool.append(Run(found, own(before, server.times())))
    with capsys.disabled():
        print(table(endpoint, runs))
    for name, tolerance in TOLERANCES.items():
        our_share, their_share = (median(r.share(name) for r in of_tool) for of_tool in runs.values())
        assert our_share == pytest.approx(their_share, rel=tolerance), name
        # Of what is no client's business, the server says the same.
        if name in ("tpot", "itl"):
            assert our_share == pytest.approx(1, rel=tolerance), name
    assert all(run.share("ttft") > 1 for run in runs["vllm-locust"])
