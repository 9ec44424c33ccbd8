"""The Dockerfile is true: its steps, run in a folder, make what the compose file starts.

Absolute paths become those of the folder, and the Python of the base is the one that runs the tests; nothing else of a
step is changed. Not done is what only a container engine can: to add a user, and to be that user.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
import yaml
from processes import ROOT, assert_clean, free_port, get, process, saved, served, wait_for

DOCKERFILE = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
STEPS: list[tuple[str, str]] = re.findall(r"^([A-Z]+) (.+)$", DOCKERFILE, re.MULTILINE)
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
OURS = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-ours"]
ADDS_USER = "useradd --create-home --uid 1000 locust"
NO_INDEX = "NewConnectionError|Max retries exceeded|from versions: none"


def sent(path: PurePosixPath) -> bool:
    """Tell whether a file of the checkout is in the context: the last line of .dockerignore that names it decides."""
    verdict = True
    for line in IGNORED:
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, str(part)) for part in (path, *path.parents)):
            verdict = line.startswith("!")
    return verdict


def context() -> list[PurePosixPath]:
    tops = [top for top in ROOT.iterdir() if sent(PurePosixPath(top.name))]
    files = [file for top in tops for file in (top.rglob("*") if top.is_dir() else [top]) if file.is_file()]
    return [path for path in (PurePosixPath(file.relative_to(ROOT)) for file in files) if sent(path)]


@dataclass
class Image:
    """The folder that is a container's root, and what its processes have in their environment."""

    root: Path
    workdir: Path
    environment: dict[str, str]

    def inside(self, text: str) -> str:
        return re.sub(r"(?<![\w./])/(?=(src|venv|home)\b)", f"{self.root}/", text)

    def run(self, command: str) -> str:
        words = ["/bin/sh", "-c", self.inside(command)]
        result = subprocess.run(
            words, capture_output=True, text=True, cwd=self.workdir, env=self.environment, timeout=300, check=False
        )
        if result.returncode and " install " in command and re.search(NO_INDEX, result.stderr):
            pytest.skip(f"pip reaches no index here: {result.stderr.splitlines()[-1]}")
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr


def built(folder: Path) -> Image:
    """Take the steps of each stage in the same folder, since a venv knows where it is."""
    for path in context():
        (folder / "context" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / "context" / path)
    ours = "PYTHON|VIRTUAL_ENV|(VLLM_)?LOCUST_|OPENAI_"
    base = {name: value for name, value in os.environ.items() if not re.match(ours, name)}
    base["PIP_NO_COMPILE"] = "1"  # takes a quarter of the time
    base["PATH"] = f"{Path(sys.executable).parent}:{base['PATH']}"
    root, stage = folder / "root", ""
    for word, text in STEPS:
        if word == "FROM":
            if stage:
                root.rename(folder / stage)
            root.mkdir()
            image, stage = Image(root, root, dict(base)), text.partition(" AS ")[2]
        elif word == "COPY":
            copy(image, folder, text)
        elif word == "RUN" and text != ADDS_USER:
            image.run(text)
        elif word == "ENV":
            for name, _, value in (pair.partition("=") for pair in shlex.split(text)):
                image.environment[name] = image.inside(value).replace("$PATH", image.environment["PATH"])
        elif word == "WORKDIR":
            image.workdir = Path(image.inside(text))
            image.workdir.mkdir(parents=True)
        else:
            assert word in ("USER", "LABEL", "CMD") or (word, text) == ("RUN", ADDS_USER), word
    return image


def copy(image: Image, folder: Path, text: str) -> None:
    """Copy as COPY does: what is in a folder, not the folder."""
    *sources, target = (word for word in text.split() if not word.startswith("--"))
    origin = re.findall(r"--from=(\w+)", text)
    for source in sources:
        found = folder / (origin[0] if origin else "context") / source.removeprefix("/")
        place = image.workdir / image.inside(target)
        if found.is_dir():
            shutil.copytree(found, place, symlinks=True, dirs_exist_ok=True)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, place)


def copied() -> list[str]:
    """Return what is copied from the context, in order."""
    texts = [text for word, text in STEPS if word == "COPY" and "--from=" not in text]
    return [source for text in texts for source in [w for w in text.split() if not w.startswith("--")][:-1]]


def test_what_is_sent_to_be_built_from_is_what_is_copied_and_nothing_else() -> None:
    assert {path.parts[0] for path in context()} == {*copied()}
    kept = ["pyproject.toml", "vllm_locust/plugin.py", "vllm_locust/assets/llm.js", "scenarios/prompts/short.jsonl"]
    assert [path for path in kept if not sent(PurePosixPath(path))] == []
    left = [
        ".env",
        ".git/config",
        ".venv/bin/pip",
        "results/a/run.json",
        "vllm_locust/__pycache__/plugin.pyc",
        "key.pem",
    ]
    assert [path for path in left if sent(PurePosixPath(path))] == []


def test_dependencies_are_installed_before_code_is_copied() -> None:
    (installed,) = (n for n, (word, text) in enumerate(STEPS) if word == "RUN" and "--requirement" in text)
    before = " ".join(text for word, text in STEPS[:installed] if word == "COPY")
    assert before == "pyproject.toml /src/"


def test_it_ends_as_the_user_that_compose_names() -> None:
    words = [word for word, _ in STEPS]
    last = words[len(words) - words[::-1].index("FROM") :]
    assert last.index("RUN") < last.index("USER") == len(last) - 1 - last[::-1].index("USER")
    assert [text for word, text in STEPS if word == "USER"] == ["locust"]
    assert f"--uid {OURS['user'].partition(':')[0]} locust" in ADDS_USER
    assert ("RUN", ADDS_USER) in STEPS


def test_what_its_steps_make_is_whole_and_measures(tmp_path: Path) -> None:
    """One test, since the steps take half a minute."""
    image = built(tmp_path)
    has_all_of_the_package_and_nothing_that_only_builds(image)
    says_what_there_is(image)
    measures_and_writes_to_what_compose_mounts_alone(image, tmp_path)


def has_all_of_the_package_and_nothing_that_only_builds(image: Image) -> None:
    (installed,) = image.root.glob("venv/lib/python*/site-packages/vllm_locust")
    for path in context():
        if path.parts[0] in ("vllm_locust", "locustfiles", "scenarios"):
            place = path.relative_to("vllm_locust") if path.parts[0] == "vllm_locust" else path
            assert (installed / place).read_bytes() == (ROOT / path).read_bytes()
    names = {re.split("[-.]", found.name)[0] for found in installed.parent.glob("*.dist-info")}
    assert {"locust", "vllm_locust", "numpy"} <= names
    assert not names & {"hatchling", "mypy", "ruff", "hypothesis"}
    assert {path.name for path in image.root.iterdir()} == {"venv", "home"}
    image.run("python -m pip check")


def says_what_there_is(image: Image) -> None:
    (command,) = (json.loads(text) for word, text in STEPS if word == "CMD")
    assert "simulate" in image.run(shlex.join(command))
    assert "--request-rate" in image.run("vllm-locust options")
    assert f"/{image.root.name}/venv/" in image.run("locust --version")


def measures_and_writes_to_what_compose_mounts_alone(image: Image, folder: Path) -> None:
    assert OURS["read_only"]
    assert [mount.partition(":")[0] for mount in OURS["tmpfs"]] == ["/tmp"]
    environment = {**image.environment, "HOME": str(image.workdir), "TMPDIR": str(folder)}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    before = written(image)
    simulate = ["/bin/sh", "-c", f"exec vllm-locust simulate --port {port}"]
    with process(simulate, folder / "simulator.log", cwd=image.workdir, env=environment):
        wait_for(lambda: get(f"{url}/health") is not None, "simulator")
        options = f"--headless --host {url} -u 4 -r 4 --requests 8 --parts short --warmup 0 --prometheus-port 0"
        locust = ["/bin/sh", "-c", f"exec locust -f locustfiles/mixed.py {options}"]
        with process(locust, folder / "locust.log", cwd=image.workdir, env=environment) as running:
            assert running.wait() == 0, running.output
            assert_clean(running)
        assert served(url)["completed"] == 8
    assert saved(image.workdir)["summary"]["total"]["outcomes"]["ok"] == 8
    assert written(image) == before


def written(image: Image) -> dict[Path, int]:
    """Return when each file and folder was last written to, but for the results."""
    results = image.workdir / "results"
    found = (path for path in image.root.rglob("*") if path != results and results not in path.parents)
    return {path: path.lstat().st_mtime_ns for path in found}
