"""The servers that tests share; `make test-vllm` installs what they need, and no other target collects these tests."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT
from server import KEY, Server, Vllm, serve

sys.path.append(str(ROOT / "benchmarks"))  # they drive `vllm bench serve`, too; last, for there is an emitter as well

LIMITED = (
    *("--api-key", KEY, "--max-num-seqs", "1", "--max-num-queued-reqs", "2"),
    *("--sse-keep-alive-interval", "1", "--enable-prompt-tokens-details", "--reasoning-parser", "qwen3"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names another installation of vLLM."""
    parser.addoption("--vllm-venv", default=str(ROOT / ".venv-vllm"), help="where vLLM is installed")


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    """Return what is installed, and make the model."""
    venv = Path(request.config.getoption("--vllm-venv"))
    if not (venv / "bin" / "vllm").exists():
        pytest.exit(f"vLLM is not installed in {venv}; `make test-vllm` does that", returncode=4)
    made = Vllm(venv, tmp_path_factory.mktemp("model"))
    command = [venv / "bin" / "python", Path(__file__).with_name("model.py"), made.model]
    subprocess.run(command, check=True, env=made.environment, stderr=subprocess.DEVNULL)
    return made


@pytest.fixture(scope="session")
def plain(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve as nearly everybody does; nothing is cached, so that equal prompts are equal work."""
    with serve(vllm, tmp_path_factory.mktemp("plain"), "--no-enable-prefix-caching") as server:
        yield server


@pytest.fixture(scope="session")
def bundling(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve four tokens per event."""
    with serve(vllm, tmp_path_factory.mktemp("bundling"), "--stream-interval", "4") as server:
        yield server


@pytest.fixture(scope="session")
def limited(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one request at a time and let two wait, for those who have the key."""
    with serve(vllm, tmp_path_factory.mktemp("limited"), *LIMITED) as server:
        yield server
