"""The shape of the package: imports go down one list, and the core works without Locust."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vllm_locust"

LAYERS = [
    *(
        "errors",
        "quantity",
        "secret",
        "terminal",
        "histogram",
        "grid",
        "answer",
        "timeline",
        "limit",
        "timeouts",
        "cell",
        "slowest",
        "recording",
        "sse",
        "api",
        "origin",
        "cpu",
        "tcp",
        "hub",
        "stamp",
        "tls",
        "transport",
        "response",
        "note",
        "pattern",
        "prompts",
        "draws",
        "arrivals",
    ),
    *(
        "scenario",
        "work",
        "load",
        "loadspec",
        "run",
        "body",
        "client",
        "tally",
        "harvest",
        "windows",
        "recorder",
        "spool",
        "requestlog",
        "samples",
        "pairs",
        "dispatch",
        "generator",
        "probe",
        "workers",
        "fidelity",
        "judgement",
        "figures",
        "chance",
        "intervals",
        "evidence",
        "spikes",
        "symptoms",
        "stability",
        "summary",
        "verdict",
        "bench_result",
        "bench_run",
        "older",
        "results",
        "vllm_bench",
        "excerpt",
        "incidents",
        "overview",
        "facts",
        "stages",
        "course",
        "runs",
        "report",
        "picture",
        "markdown",
        "figure",
        "bootstrap",
        "side",
        "difference",
        "differing",
        "allowance",
        "rule",
        "comparison",
        "compare",
        "contrast",
        "sheet",
        "page",
        "progress",
        "options",
    ),
    *(
        "families",
        "exporter",
        "exposition",
        "listener",
        "users",
        "plan",
        "cluster",
        "download",
        "worker",
        "master",
        "pace",
        "live",
        "webui",
        "host",
        "plugin",
        "check",
        "child",
        "demo",
        "gate",
    ),
    *("simulated_faults", "simulated", "simulated_metrics", "simulated_wire", "simulator", "faults", "cli", "__main__"),
]
"""A module imports only those before it."""
WITHOUT_GEVENT = [
    *(
        "errors",
        "quantity",
        "secret",
        "histogram",
        "answer",
        "timeline",
        "limit",
        "timeouts",
        "cell",
        "slowest",
        "recording",
        "sse",
        "api",
        "prompts",
        "draws",
        "arrivals",
        "scenario",
        "run",
    ),
    "cpu",
    *("samples", "pairs"),
    *(
        "tally",
        "recorder",
        "workers",
        "fidelity",
        "judgement",
        "figures",
        "summary",
        "verdict",
        "terminal",
        "results",
        "older",
    ),
    *("bench_result", "bench_run"),
    "excerpt",
    *("chance", "intervals", "evidence", "spikes", "symptoms", "stability", "course"),
    *(
        "incidents",
        "overview",
        "facts",
        "runs",
        "report",
        "picture",
        "markdown",
        "figure",
        "bootstrap",
        "side",
        "difference",
        "differing",
        "allowance",
        "rule",
        "comparison",
        "compare",
        "contrast",
        "child",
        "gate",
        "sheet",
        "page",
        "families",
        "simulated_faults",
        "simulated",
        "faults",
    ),
]
CONTACTS = {"users", "plan", "worker", "master", "pace", "webui", "host", "plugin"}
"""All that may know Locust; a verb of `cli` may, too, when it is used."""
SERVER = {"simulated_faults", "simulated", "simulated_metrics", "simulated_wire", "simulator"}
"""The embedded server stands alone: it knows what servers do, and nothing of how we measure."""

MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"}


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the full names of modules that a tree imports; of `from package import name`, both."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            assert inner.level == 0, "relative imports are not used here"
            assert inner.module is not None
            yield inner.module
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)


def ours(name: str) -> set[str]:
    """Return the modules of this package that a module imports, wherever in it."""
    found = {full.split(".")[1] for full in imports(tree(name)) if full.startswith("vllm_locust.")}
    return found & MODULES.keys()


def test_the_list_of_layers_has_every_module_once() -> None:
    assert sorted(LAYERS) == sorted(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_is_below_it(name: str) -> None:
    below = set(LAYERS[: LAYERS.index(name)])
    assert ours(name) - below == set()


@pytest.mark.parametrize("name", sorted(SERVER))
def test_the_simulator_imports_nothing_of_what_measures(name: str) -> None:
    assert ours(name) - SERVER == set()


@pytest.mark.parametrize("name", MODULES)
def test_only_the_contacts_with_locust_import_it(name: str) -> None:
    module = tree(name)
    if name == "cli":
        module.body = [node for node in module.body if not isinstance(node, ast.FunctionDef)]
    knows_locust = any(full.split(".")[0] == "locust" for full in imports(module))
    assert not knows_locust or name in CONTACTS


@pytest.mark.parametrize("name", [*MODULES, "__init__"])
def test_a_module_says_what_it_promises(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))


def loaded_by(statement: str) -> set[str]:
    """Return the packages that a statement loads in a fresh interpreter."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize("names", [["histogram"], WITHOUT_GEVENT], ids=["histogram", "core"])
def test_the_core_is_usable_without_locust_and_gevent(names: list[str]) -> None:
    loaded = loaded_by("; ".join(f"import vllm_locust.{name}" for name in names))
    assert "vllm_locust" in loaded
    assert loaded & {"locust", "gevent", "geventhttpclient", "flask"} == set()


def test_the_package_itself_loads_nothing_until_a_name_is_used() -> None:
    assert loaded_by("import vllm_locust") & {"locust", "gevent", "numpy", "msgspec"} == set()
    assert "locust" in loaded_by("from vllm_locust import ChatUser")


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    code = "import vllm_locust\ntry: vllm_locust.Nothing\nexcept AttributeError as error: print(error)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "module 'vllm_locust' has no attribute 'Nothing'\n"
