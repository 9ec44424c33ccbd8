"""The compose file is true: what its services start works together, here as plain processes.

Service names become loopback and ports free ones, by flag or by variable; nothing else of a command is changed. What is
not tested is what needs a container engine: the image itself.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import ROOT, Process, free_port, get, process, saved, served, wait_for

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
HOME = re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE)[-1]
PORTS = {("simulator", 8000), ("master", 8089), ("master", 5557), ("master", 9646), ("prometheus", 9090)}
PROGRAMS = {"locust": "locust", "vllm-locust": "vllm_locust"}
WORKERS = 2
PROMETHEUS = shutil.which("prometheus")


def interpolated(text: str, **variables: str) -> str:
    """Fill `${NAME:-default}` in, as compose does."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


@dataclass
class Stack:
    """The services as processes, and where their ports are."""

    folder: Path
    ports: dict[tuple[str, int], int]
    running: dict[str, Process]

    def url(self, service: str, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[service, port]}"

    def remapped(self, text: str, service: str) -> str:
        """Put loopback and free ports in the place of names and ports."""
        for (owner, port), free in self.ports.items():
            text = re.sub(rf"\b{owner}:{port}\b", f"127.0.0.1:{free}", text)
            text = text.replace(
                f"--master-host {owner} --master-port {port}", f"--master-host 127.0.0.1 --master-port {free}"
            )
            if owner == service:
                text = text.replace(f"--port {port}", f"--port {free}").replace(f"=:{port}", f"=127.0.0.1:{free}")
        return text

    def command(self, service: str) -> list[str]:
        words = shlex.split(self.remapped(SERVICES[service]["command"], service))
        if service == "prometheus":
            mounts = dict(volume.split(":")[1::-1] for volume in SERVICES[service]["volumes"])
            config = self.folder / "prometheus.yml"
            source = next(source for target, source in mounts.items() if f"--config.file={target}" in words)
            config.write_text(self.remapped((ROOT / source).read_text(), service))
            words = [f"--config.file={config}" if word.startswith("--config.file=") else word for word in words]
            return [str(PROMETHEUS), *(w.replace("=/prometheus", f"={self.folder}/data") for w in words)]
        return [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]]

    def environment(self, service: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not re.match("(VLLM_)?LOCUST_|OPENAI_", name)}
        own = {
            name: self.remapped(interpolated(value), service)
            for name, value in SERVICES[service].get("environment", {}).items()
        }
        if service == "master":  # has no flags for its ports
            own["LOCUST_WEB_PORT"] = str(self.ports["master", 8089])
            own["LOCUST_MASTER_BIND_PORT"] = str(self.ports["master", 5557])
            own["VLLM_LOCUST_PROMETHEUS_PORT"] = str(self.ports["master", 9646])
        return inherited | own


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    shutil.copytree(ROOT / "locustfiles", folder / "locustfiles")  # as the Dockerfile does
    ports = {port: free_port() for port in sorted(PORTS)}
    stack = Stack(folder, ports, {})
    with ExitStack() as started:
        for service in SERVICES:
            for number in range(WORKERS if service == "worker" else 1):
                if service != "prometheus" or PROMETHEUS:
                    name = f"{service}-{number}"
                    stack.running[name] = started.enter_context(
                        process(
                            stack.command(service), folder / f"{name}.log", cwd=folder, env=stack.environment(service)
                        )
                    )
        yield stack


def post(url: str, **form: object) -> dict[str, Any]:
    with urllib.request.urlopen(url, urllib.parse.urlencode(form).encode(), timeout=10) as response:
        return dict(json.load(response))


def stop(ui: str) -> None:
    """Press Stop, which is a GET in Locust 2.44 and a POST in 2.47."""
    try:
        urllib.request.urlopen(f"{ui}/stop", b"", timeout=90).close()
    except urllib.error.HTTPError:
        urllib.request.urlopen(f"{ui}/stop", timeout=90).close()


def ready(stack: Stack) -> str:
    """Wait for the web UI and its workers, whichever test of the stack comes first; returns the UI's address."""
    ui = stack.url("master", 8089)
    wait_for(lambda: "vllm_locust" in get(ui) or "Locust" in get(ui), "web UI")
    wait_for(lambda: len(json.loads(get(f"{ui}/stats/requests"))["workers"]) == WORKERS, "workers")
    return ui


def test_the_ui_answers_and_workers_join(stack: Stack) -> None:
    assert ready(stack)


def test_a_run_from_the_ui_streams_from_the_simulator_and_is_saved(stack: Stack) -> None:
    ui, simulated = ready(stack), stack.url("simulator", 8000)
    assert post(f"{ui}/swarm", user_count=4, spawn_rate=4, parts="short")["success"]
    wait_for(lambda: served(simulated)["completed"] >= 8, "streams")
    wait_for(lambda: "vllm_locust_ttft_seconds_bucket" in get(f"{stack.url('master', 9646)}/metrics"), "metrics")
    stop(ui)
    wait_for(lambda: list((stack.folder / "results").glob("*/run.json")), "saved run")
    run = saved(stack.folder)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(simulated)["completed"]
    assert run["meta"]["load"]["workers"] == WORKERS
    assert list(run["summary"]["scenarios"]) == ["short"]
    for name, running in stack.running.items():
        assert running.popen.poll() is None, f"{name}: {running.output}"


@pytest.mark.skipif(
    not PROMETHEUS, reason="no prometheus here (Debian's package is named so): its targets are not tested"
)
def test_prometheus_has_its_targets_up(stack: Stack) -> None:
    api = f"{stack.url('prometheus', 9090)}/api/v1"
    wanted = {"vllm-locust": "up", "vllm": "up"}
    wait_for(lambda: healths(get(f"{api}/targets")) == wanted, f"targets {wanted}")


def healths(answer: str) -> dict[str, str]:
    return {target["labels"]["job"]: target["health"] for target in json.loads(answer)["data"]["activeTargets"]}


def test_target_names_a_server_of_your_own() -> None:
    host = SERVICES["master"]["environment"]["LOCUST_HOST"]
    assert interpolated(host) == "http://simulator:8000"
    assert interpolated(host, TARGET="http://my-server:8000") == "http://my-server:8000"


def test_every_port_of_the_file_is_one_that_a_service_has() -> None:
    published = {(name, port) for name, service in SERVICES.items() for port in service.get("ports", [])}
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for _, port in published)
    assert {(name, int(port.rpartition(":")[2])) for name, port in published} <= PORTS
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job["static_configs"] for target in config["targets"]]
    assert {(name, int(port)) for name, port in (target.split(":") for target in targets)} <= PORTS


def test_images_are_pinned_and_ours_does_not_run_as_root() -> None:
    images = [service["image"] for service in SERVICES.values() if "build" not in service]
    images += re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(images) == 2
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+(\.\d+)?(-slim)?", image) for image in images)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["locust"]


def test_the_image_gets_what_it_needs() -> None:
    copied = [line.split()[1:] for line in re.findall(r"^COPY .*$", DOCKERFILE, re.MULTILINE)]
    sources = {word for words in copied for word in words[:-1] if not word.startswith("--")}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | {*wheel["packages"], *wheel["force-include"]} <= sources
    assert SERVICES["master"]["volumes"] == [f"results:{HOME}/results"]
    assert re.search(r"^RUN mkdir results$", DOCKERFILE, re.MULTILINE)
    assert "results" in COMPOSE["volumes"]
