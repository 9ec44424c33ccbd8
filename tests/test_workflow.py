"""The workflow of `examples/` is true: its steps, run in a folder, make what they say.

The port is a free one, and the run shorter; nothing else of a step is changed. Not done is what GitHub's own actions
do: the folder is a copy of the checkout, a venv is Python, and what would be cached stays where it is.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from processes import ROOT, free_port, get, process, served, wait_for

FILE = ROOT / "examples" / "github-actions.yml"
WORKFLOW: dict[str, Any] = yaml.load(FILE.read_text(), yaml.BaseLoader)  # for which `on` is no boolean, as for GitHub
(JOB,) = WORKFLOW["jobs"].values()
STEPS: list[dict[str, Any]] = JOB["steps"]
RUN = {step["name"]: step["run"] for step in STEPS if "run" in step}
INSTALL, START, GATE = RUN
USED = {step["uses"].partition("@")[0]: step.get("with", {}) for step in STEPS if "uses" in step}
SHORTER = ("-t 2m", "-t 12s")
NO_INDEX = "NewConnectionError|Max retries exceeded|from versions: none"


def test_it_is_as_github_has_it() -> None:
    """The schema is SchemaStore's, as check-jsonschema 0.39.0 on PyPI has it."""
    schema = json.loads((ROOT / "tests" / "schemas" / "github-workflow.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    read = yaml.safe_load(FILE.read_text())
    read["on"] = read.pop(True)  # YAML 1.1 has it for a boolean
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(read)] == []
    wrong = {**read, "jobs": {"gate": {**read["jobs"]["gate"], "runs_on": "ubuntu-latest"}}}
    assert list(validator.iter_errors(wrong))


def test_the_baseline_of_main_is_restored_and_kept_as_the_same() -> None:
    restored, kept = USED["actions/cache/restore"], USED["actions/cache/save"]
    assert restored == kept == {"path": "baseline", "key": "load-test-baseline-${{ env.BASELINE }}"}
    (keeps,) = (step for step in STEPS if step.get("uses", "").startswith("actions/cache/save@"))
    (restores,) = (step for step in STEPS if step.get("uses", "").startswith("actions/cache/restore@"))
    assert keeps["if"] == f"github.ref == 'refs/heads/main' && steps.{restores['id']}.outputs.cache-hit != 'true'"
    order = [step.get("name") for step in STEPS]
    assert order.index(restores["name"]) < order.index(GATE) < order.index(keeps["name"])


def test_nothing_of_a_pull_request_can_write() -> None:
    """A pull request's title or branch is somebody's text: no step pastes an expression into a shell."""
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, script in RUN.items() if "${{" in script] == []


@dataclass
class Runner:
    """A machine of GitHub's: a checkout, a Python, and what its steps have in their environment."""

    folder: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            if name.startswith(("vllm_locust/", "locustfiles/", "scenarios/")) or "/" not in name:
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.checkout / name)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder / "venv")], check=True)

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.md"

    @property
    def environment(self) -> dict[str, str]:
        ours = "PYTHON|VIRTUAL_ENV|(VLLM_)?LOCUST_|OPENAI_|GITHUB_"
        base = {name: value for name, value in os.environ.items() if not re.match(ours, name)}
        own = {name: self._here(value) for name, value in WORKFLOW["env"].items()}
        path = f"{self.folder / 'venv' / 'bin'}:{base['PATH']}"
        return {**base, **own, "PATH": path, "PIP_NO_COMPILE": "1", "GITHUB_STEP_SUMMARY": str(self.summary)}

    def _here(self, text: str) -> str:
        return re.sub(r"\b8000\b", str(self.port), text)

    @contextmanager
    def step(self, name: str, replaced: tuple[str, str] = ("", "")) -> Iterator[tuple[int, str]]:
        """Take a step as GitHub does, and end within the block what it has left running."""
        script = self.folder / "script.sh"
        assert replaced[0] in RUN[name]
        script.write_text(self._here(RUN[name]).replace(*replaced) if replaced[0] else self._here(RUN[name]))
        command = ["bash", "-e", str(script)]
        with process(command, self.folder / "step.log", cwd=self.checkout, env=self.environment) as running:
            code = running.wait(300)
            yield code, running.output


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl here, by which the workflow waits for its server")
def test_its_steps_measure_keep_a_baseline_and_hold_what_comes_later_to_it(tmp_path: Path) -> None:
    """One test, since to install takes half a minute."""
    runner = Runner(tmp_path)
    with runner.step(INSTALL) as (code, output):
        if code and re.search(NO_INDEX, output):
            pytest.skip(f"pip reaches no index here: {output.splitlines()[-1]}")
        assert code == 0, output
    with runner.step(START) as (code, output):
        assert code == 0, output
        first_run_is_the_baseline(runner)
    slower_server_fails(runner)


def first_run_is_the_baseline(runner: Runner) -> None:
    with runner.step(GATE, SHORTER) as (code, output):
        assert code == 0, output
    assert "\n          baseline: stored in baseline\n" in output
    assert runner.summary.read_text().startswith("## Gate: passed\n")
    baseline = runner.checkout / USED["actions/cache/save"]["path"]
    assert sorted(path.name for path in baseline.iterdir()) == ["report.html", "run.json"]
    assert len(list((runner.checkout / "results").glob("run_*/run.json"))) == 1
    assert served(f"http://127.0.0.1:{runner.port}")["completed"] > 0


def slower_server_fails(runner: Runner) -> None:
    wait_for(lambda: not listens(runner.port), "end of the server")
    with runner.step(START, ("--quiet", "--quiet --itl 15.5ms")) as (started, _), runner.step(GATE, SHORTER) as ended:
        code, output = ended
        assert (started, code) == (0, 3), output
    assert re.search(r"missed: itl mean \+20%", output)
    kept = [runner.checkout / path for path in USED["actions/upload-artifact"]["path"].split()]
    assert [path for path in kept if not path.exists()] == []
    assert runner.summary.read_text().count("\n## Gate: failed (exit code 3)\n") >= 1


def listens(port: int) -> bool:
    try:
        return bool(get(f"http://127.0.0.1:{port}/health")) or True
    except OSError:
        return False
