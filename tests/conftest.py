"""What tests share: the switch for golden files, how hypothesis runs, the emitter and its certificate, the quiet."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from emitter import Emitter, certificate
from hypothesis import settings

pytest.register_assert_rewrite("measuring")

from measuring import CLIENTS  # noqa: E402

# A slow or busy machine must not fail a property; how long all of it may take is the business of `make test`.
settings.register_profile("vllm-locust", deadline=None)
settings.load_profile("vllm-locust")

VLLM = Path(__file__).parent / "vllm"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out those that need a real vLLM, unless they are named, as `make test-vllm` does."""
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return True if collection_path == VLLM and not any(path.is_relative_to(VLLM) for path in named) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that takes over what reports look like now."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew from what is shown now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written anew instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="module")
def emitter() -> Iterator[Emitter]:
    """Run a scripted server in a process of its own."""
    with Emitter() as running:
        yield running


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the certificate that an emitter can serve with."""
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """What a server does wrong is no traceback, in no greenlet; what clients keep open is closed afterwards."""
    yield
    while CLIENTS:
        CLIENTS.pop().pool.close()
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
