"""Real vLLM servers of a tiny model, each in a session of its own, and what they themselves count and measure.

A server is two processes: the one that answers, and its engine.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import Process, free_port, get, process, wait_for

KEY = "a-key-for-tests"
POSITIONS = 4096
"""How many tokens prompt and answer may have together."""
START_S = 180
"""20 s on an idle machine with two cores; a busy one takes its time."""
_ENVIRONMENT = {
    # More threads, and a worker beside the engine, would spin, and starve the client on a small machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_COUNTERS = {
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "prompted",
    "vllm:admission_rejections_total": "refused",
    "vllm:num_requests_running": "running",
}
_TIMES = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:e2e_request_latency_seconds": "e2el",
}
_SAMPLE = re.compile(r"^(vllm:\w+)\{(.*)\} ([\d.e+-]+)$", re.MULTILINE)
_SETTLED_S = 10


@dataclass(frozen=True, slots=True)
class Vllm:
    """What is installed and made once: vLLM's venv, and the model."""

    venv: Path
    model: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **_ENVIRONMENT, "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}"}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, with its own word on what it has done since it was started."""

    url: str
    process: Process

    def counted(self) -> dict[str, int]:
        """Return what it counts: requests that ended, by reason; tokens; refusals; requests that run now."""
        counts: dict[str, int] = {}
        for name, labels, value in self._samples():
            if name == "vllm:request_success_total":
                key = labels.partition('finished_reason="')[2].partition('"')[0]
            else:
                key = _COUNTERS.get(name, "")
            if key:
                counts[key] = counts.get(key, 0) + int(value)
        return counts

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """Return what it has counted since, without zeros."""
        return {key: more for key, n in self.counted().items() if (more := n - before.get(key, 0))}

    def assert_counted(self, before: dict[str, int], **expected: int) -> None:
        """Check what it has counted since; it counts when it has answered, so its word may take a moment."""
        wanted = {key: n for key, n in expected.items() if n}
        try:
            wait_for(lambda: self.since(before) == wanted, "count", _SETTLED_S)
        except AssertionError:
            assert self.since(before) == wanted

    def times(self) -> dict[str, tuple[float, float]]:
        """Return sum, in seconds, and count of the latencies that it has measured."""
        values = {name: value for name, _, value in self._samples()}
        return {key: (values[f"{name}_sum"], values[f"{name}_count"]) for name, key in _TIMES.items()}

    def _samples(self) -> Iterator[tuple[str, str, float]]:
        for name, labels, value in _SAMPLE.findall(get(f"{self.url}/metrics")):
            yield name, labels, float(value)

    @property
    def engine(self) -> int:
        """Process id of the engine."""
        (found,) = (pid for pid, name in _session(self.process.popen.pid) if name.startswith("VLLM::EngineCor"))
        return found


def _session(leader: int) -> Iterator[tuple[int, str]]:
    """Yield the processes of a session, with their names."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != leader:
            try:
                name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(") ")
            except OSError:
                continue
            if rest.split()[3] == str(leader):
                yield int(path.name), name


@contextmanager
def serve(vllm: Vllm, folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Serve the model until the end of the context; yields once the server is ready."""
    port = free_port()
    command = [
        *(str(vllm.venv / "bin" / "vllm"), "serve", str(vllm.model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(POSITIONS)),
        *("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni", *flags),
    ]
    url = f"http://127.0.0.1:{port}"
    with process(command, folder / f"vllm-{port}.log", env=vllm.environment | environment) as running:
        wait_for(lambda: _ready(url, running), "vLLM", START_S)
        assert running.popen.poll() is None, running.output
        yield Server(url, running)


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Let whatever is started in the context run on one of the cores alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _ready(url: str, running: Process) -> bool:
    return running.popen.poll() is not None or get(f"{url}/health") is not None
