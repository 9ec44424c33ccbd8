"""The compose file is true: what its services start works together, here as plain processes.

Service names become loopback, ports free ones, by flag or by variable, and paths of a container those of a folder;
nothing else of a command is changed. What is not tested is what needs a container engine: that the images are what they
are called, and Grafana, of which only the files are read; and a vLLM, which needs a GPU.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from processes import ROOT, Browser, Process, assert_clean, free_port, get, process, saved, served, simulator, wait_for

from vllm_locust.quantity import duration_s

FILE = ROOT / "docker-compose.yml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("simulator", "master", "worker")
PORTS = {("simulator", 8000), ("master", 8089), ("master", 5557), ("master", 9646), ("prometheus", 9090)}
ELSEWHERE = {("grafana", 3000), ("vllm", 8000)}
PROGRAMS = {"locust": "locust", "vllm-locust": "vllm_locust"}
WORKERS = 2
PROMETHEUS = shutil.which("prometheus")
DOCKER_COMPOSE = shutil.which("docker-compose")
WGET = shutil.which("wget")
NO_PROMETHEUS = "no prometheus here (Debian's package is named so): its targets and rules are not tested"


def interpolated(text: str, **variables: str) -> str:
    """Fill `${NAME:-default}` in, as compose does."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)
    return text.replace("$$", "$")


def mounts(service: str) -> dict[str, str]:
    """Return the files and folders of the checkout that a service has, by where it has them."""
    volumes = [volume.split(":") for volume in SERVICES[service].get("volumes", [])]
    return {target: source for source, target, *_ in (v for v in volumes if len(v) > 1) if source.startswith("./")}


@dataclass
class Stack:
    """The services as processes, and where their ports are."""

    folder: Path
    variables: dict[str, str]
    ports: dict[tuple[str, int], int] = field(default_factory=lambda: {port: free_port() for port in sorted(PORTS)})
    running: dict[str, Process] = field(default_factory=dict)

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
                text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        return text

    def command(self, service: str) -> list[str]:
        if service != "prometheus":
            words = shlex.split(self.remapped(interpolated(SERVICES[service]["command"], **self.variables), service))
            return [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]]
        for target, source in mounts(service).items():
            place = self.folder / target.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(self.remapped((ROOT / source).read_text(), service))
        for target in ("tmp", "prometheus"):
            (self.folder / target).mkdir(exist_ok=True)
        (script,) = SERVICES[service]["command"]
        script = self.remapped(interpolated(script, **self.variables), service)
        script = re.sub(r"(?<=[ >=])/(etc|tmp|prometheus)\b", lambda path: f"{self.folder}{path[0]}", script)
        script = script.replace("exec /bin/prometheus ", f"exec {PROMETHEUS} ")
        return [*SERVICES[service]["entrypoint"], script]

    def environment(self, service: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not re.match("(VLLM_)?LOCUST_|OPENAI_", name)}
        own = {
            name: self.remapped(interpolated(value, **self.variables), service)
            for name, value in SERVICES[service].get("environment", {}).items()
        }
        if service == "master":  # has no flags for its ports
            own["LOCUST_WEB_PORT"] = str(self.ports["master", 8089])
            own["LOCUST_MASTER_BIND_PORT"] = str(self.ports["master", 5557])
            own["VLLM_LOCUST_PROMETHEUS_PORT"] = str(self.ports["master", 9646])
        return inherited | own

    def check(self, service: str) -> int:
        """Run the health check of a service; returns its exit code."""
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        program = {"python": sys.executable, "python3": sys.executable, "wget": str(WGET)}[words[0]]
        command = [program, *(self.remapped(word, service) for word in words[1:])]
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode

    @property
    def browser(self) -> Browser:
        """The web UI, once it and the workers are there, whichever test of the stack comes first."""
        browser = Browser(self.url("master", 8089))
        wait_for(lambda: len(browser.stats()["workers"]) == WORKERS, "workers")
        return browser

    def targets(self) -> dict[str, set[tuple[str, str]]]:
        """Return what Prometheus scrapes and whether it could, by job."""
        active = json.loads(get(f"{self.url('prometheus', 9090)}/api/v1/targets"))["data"]["activeTargets"]
        jobs: dict[str, set[tuple[str, str]]] = {"vllm-locust": set(), "vllm": set()}
        for target in active:
            jobs[target["labels"]["job"]].add((target["scrapeUrl"], target["health"]))
        return jobs


@contextmanager
def started(folder: Path, *, watched: bool = True, **variables: str) -> Iterator[Stack]:
    """Start what compose would, with variables as in its environment; watched by Prometheus, where there is one."""
    shutil.copytree(ROOT / "locustfiles", folder / "locustfiles")  # as the Dockerfile does
    stack = Stack(folder, variables)
    with ExitStack() as processes:
        for service in ("simulator", "master", "worker", "prometheus"):
            for number in range(WORKERS if service == "worker" else 1):
                if service != "prometheus" or (watched and PROMETHEUS):
                    name = f"{service}-{number}"
                    command, environment = stack.command(service), stack.environment(service)
                    stack.running[name] = processes.enter_context(
                        process(command, folder / f"{name}.log", cwd=folder, env=environment)
                    )
        yield stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(tmp_path_factory.mktemp("compose")) as stack:
        yield stack


def test_the_ui_answers_and_workers_join(stack: Stack) -> None:
    assert "Locust" in get(stack.browser.url)


def test_a_run_from_the_ui_streams_from_the_simulator_and_is_saved(stack: Stack) -> None:
    browser, simulated = stack.browser, stack.url("simulator", 8000)
    assert browser.swarm(user_count="4", spawn_rate="4", parts="short")["success"]
    wait_for(lambda: served(simulated)["completed"] >= 8, "streams")
    wait_for(lambda: "vllm_locust_ttft_seconds_bucket" in get(f"{stack.url('master', 9646)}/metrics"), "metrics")
    assert "chart" in get(f"{browser.url}/llm")
    wait_for(lambda: json.loads(get(f"{browser.url}/llm/picture"))["columns"], "columns of charts")
    browser.post("stop")
    wait_for(lambda: list((stack.folder / "results").glob("*/run.json")), "saved run")
    run = saved(stack.folder)
    assert run["summary"]["total"]["outcomes"]["ok"] == served(simulated)["completed"]
    assert run["meta"]["load"]["workers"] == WORKERS
    assert list(run["summary"]["scenarios"]) == ["short"]
    for name, running in stack.running.items():
        assert running.popen.poll() is None, f"{name}: {running.output}"


@pytest.mark.skipif(not PROMETHEUS, reason=NO_PROMETHEUS)
def test_prometheus_has_its_targets_up_and_its_rules_loaded(stack: Stack) -> None:
    wanted = {
        "vllm-locust": {(f"{stack.url('master', 9646)}/metrics", "up")},
        "vllm": {(f"{stack.url('simulator', 8000)}/metrics", "up")},
    }
    wait_for(lambda: stack.targets() == wanted, f"targets {wanted}")
    shipped = yaml.safe_load((ROOT / "docker" / "alerts.yml").read_text())["groups"]
    groups = json.loads(get(f"{stack.url('prometheus', 9090)}/api/v1/rules"))["data"]["groups"]
    rules = {(group["name"], rule["name"]) for group in groups for rule in group["rules"]}
    assert rules == {(group["name"], rule["alert"]) for group in shipped for rule in group["rules"]}


def test_a_server_of_your_own_is_measured_with_a_key_that_only_the_master_is_told(tmp_path: Path) -> None:
    with simulator(tmp_path, "--api-key", "sesame") as url:
        with started(tmp_path, TARGET=f"{url}/", OPENAI_API_KEY="sesame") as stack:
            browser = stack.browser
            if PROMETHEUS:
                wait_for(lambda: stack.targets()["vllm"] == {(f"{url}/metrics", "up")}, "target")
            assert browser.swarm(user_count="4", spawn_rate="4", parts="short", warmup="0")["success"]
            wait_for(lambda: served(url)["completed"] >= 8, "streams")
            # As compose stops them: who depends on another one goes first, and each gets a SIGTERM.
            for names in (["worker-0", "worker-1"], ["master-0"]):
                for name in names:
                    stack.running[name].popen.terminate()
                assert [stack.running[name].wait() for name in names] == [0] * len(names)
            assert_clean(*(stack.running[name] for name in ("master-0", "worker-0", "worker-1")))
            assert served(stack.url("simulator", 8000)) == {"completed": 0, "broken": 0, "tokens": 0}
        run = saved(tmp_path)
        assert run["summary"]["total"]["outcomes"]["ok"] == served(url)["completed"]
        assert sum(run["summary"]["total"]["outcomes"].values()) == served(url)["completed"]
        assert run["meta"]["missing_workers"] == []
    told = {name for name, service in SERVICES.items() if "OPENAI_API_KEY" in json.dumps(service)}
    assert told == {"master"}


def test_a_master_that_is_told_to_go_ends_the_run_and_saves_it(tmp_path: Path) -> None:
    with started(tmp_path, watched=False) as stack:
        browser, simulated = stack.browser, stack.url("simulator", 8000)
        assert browser.swarm(user_count="4", spawn_rate="4", parts="short", warmup="0")["success"]
        wait_for(lambda: served(simulated)["completed"] >= 8, "streams")
        stack.running["master-0"].popen.terminate()
        assert [stack.running[name].wait() for name in ("master-0", "worker-0", "worker-1")] == [0, 0, 0]
        assert_clean(stack.running["master-0"])
        assert saved(tmp_path)["summary"]["total"]["outcomes"]["ok"] == served(simulated)["completed"]


@pytest.mark.skipif(not WGET, reason="no wget here, which some health checks call")
@pytest.mark.parametrize(
    "service", [s for s in ("simulator", "master", "prometheus") if s != "prometheus" or PROMETHEUS]
)
def test_a_health_check_tells_a_service_that_answers_from_one_that_does_not(stack: Stack, service: str) -> None:
    wait_for(lambda: stack.check(service) == 0, f"health of {service}")
    assert Stack(stack.folder, {}).check(service) != 0  # at ports where nobody is


def test_every_service_that_listens_has_a_health_check_and_who_needs_it_waits_for_that() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" in service} == {*SERVICES} - {"worker"}
    needed = {(name, n, how["condition"]) for name, s in SERVICES.items() for n, how in s.get("depends_on", {}).items()}
    assert needed == {
        ("master", "simulator", "service_healthy"),
        ("worker", "master", "service_healthy"),
        ("grafana", "prometheus", "service_healthy"),
    }
    checked = {(name, int(port)) for name, s in SERVICES.items() for port in ports_of(s.get("healthcheck", {}))}
    assert checked == {*ELSEWHERE, ("simulator", 8000), ("master", 8089), ("prometheus", 9090)}


def ports_of(healthcheck: dict[str, Any]) -> list[str]:
    return re.findall(r"http://127\.0\.0\.1:(\d+)/", " ".join(healthcheck.get("test", [])))


def test_target_names_a_server_of_your_own() -> None:
    for host in (SERVICES["master"]["environment"]["LOCUST_HOST"], SERVICES["prometheus"]["environment"]["TARGET"]):
        assert interpolated(host) == "http://simulator:8000"
        assert interpolated(host, TARGET="") == "http://simulator:8000"
        assert interpolated(host, TARGET="http://my-server:8000") == "http://my-server:8000"
    for name in (*OURS, "prometheus"):  # who talk to it may also find it on this machine
        assert SERVICES[name]["extra_hosts"] == ["host.docker.internal:host-gateway"]


@pytest.mark.skipif(not PROMETHEUS, reason=NO_PROMETHEUS)
def test_prometheus_scrapes_the_server_that_target_names(tmp_path: Path) -> None:
    scraped = {
        "https://models.example/v1/": "https://models.example/metrics",
        "http://who:secret@models.example:8080": "http://models.example:8080/metrics",
        "http://[::1]:8000": "http://[::1]:8000/metrics",
    }
    stacks = [Stack(tmp_path / str(number), {"TARGET": target}) for number, target in enumerate(scraped)]
    with ExitStack() as processes:
        for stack in stacks:  # all at once: it takes each one five seconds to tell its targets
            command, environment = stack.command("prometheus"), stack.environment("prometheus")
            processes.enter_context(process(command, stack.folder / "log", env=environment))
        for stack, url in zip(stacks, scraped.values(), strict=True):
            wait_for(lambda stack=stack: stack.targets()["vllm"], "targets")
            ((found, _),) = stack.targets()["vllm"]
            assert re.sub(":(80|443)/", "/", found) == url  # Prometheus 2 adds these
            assert len(stack.targets()["vllm-locust"]) == 1
            assert "secret" not in (stack.folder / "tmp" / "prometheus.yml").read_text()


def test_every_port_of_the_file_is_one_that_a_service_has() -> None:
    published = {(name, interpolated(port)) for name, service in SERVICES.items() for port in service.get("ports", [])}
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for _, port in published)
    assert {(name, int(port.rpartition(":")[2])) for name, port in published} <= PORTS | ELSEWHERE
    variables = re.findall(r"\$\{(\w+_PORT):-", FILE.read_text())
    assert len(set(variables)) == len(published)
    moved = {name: str(50000 + number) for number, name in enumerate(variables)}
    ports = [interpolated(port, **moved) for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(port.split(":")[1] for port in ports) == sorted(moved.values())
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job.get("static_configs", []) for target in config["targets"]]
    assert {(name, int(port)) for name, port in (target.split(":") for target in targets)} <= PORTS


def test_no_service_may_do_more_than_it_has_to() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "vllm", name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & service.keys(), name
        assert all(":ro" in volume for volume in service.get("volumes", []) if volume.startswith(".")), name
        assert all(option.endswith(":mode=1777") for option in service.get("tmpfs", [])), name
        if "build" not in service:
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", service["image"]), name
    assert all(SERVICES[name]["ulimits"]["nofile"] >= 65536 for name in OURS)


def test_what_has_nothing_to_lose_is_started_anew_and_what_measures_is_not() -> None:
    restarted = {name for name, service in SERVICES.items() if service.get("restart") == "unless-stopped"}
    assert restarted == {"worker", "prometheus", "grafana"}
    assert all("restart" not in SERVICES[name] for name in SERVICES.keys() - restarted)


def test_a_stop_leaves_time_for_streams_to_run_out_and_the_run_to_be_saved() -> None:
    options = (ROOT / "vllm_locust" / "options.py").read_text()
    (stop_s,) = re.findall(r"^_STOP_TIMEOUT_S = (\d+)$", options, re.MULTILINE)
    for name in ("master", "worker"):
        finish_s = 10  # beyond it, by default
        assert duration_s(SERVICES[name]["stop_grace_period"], where=name) >= int(stop_s) + finish_s + 10


def test_every_file_that_is_mounted_is_there_and_every_volume_is_declared() -> None:
    named = set()
    for name, service in SERVICES.items():
        assert all((ROOT / source).exists() for source in mounts(name).values()), name
        named |= {v.split(":")[0] for v in service.get("volumes", []) if not v.startswith((".", "/"))}
    assert named == {*COMPOSE["volumes"]}


def test_grafana_finds_its_dashboard_and_prometheus_and_lets_nobody_log_in() -> None:
    grafana = SERVICES["grafana"]
    has = mounts("grafana")
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((ROOT / has[home]).read_text())["title"]
    provisioning = ROOT / has["/etc/grafana/provisioning"]
    (sources,) = (yaml.safe_load(path.read_text()) for path in (provisioning / "datasources").iterdir())
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
    (providers,) = (yaml.safe_load(path.read_text()) for path in (provisioning / "dashboards").iterdir())
    assert [provider["options"]["path"] for provider in providers["providers"]] == [str(Path(home).parent)]
    closed = {"GF_AUTH_BASIC_ENABLED": "false", "GF_AUTH_DISABLE_LOGIN_FORM": "true"}
    closed |= {"GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true", "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer"}
    assert closed.items() <= grafana["environment"].items()


def test_the_file_is_as_the_compose_specification_has_it() -> None:
    """The schema is that of github.com/compose-spec/compose-spec, as check-jsonschema 0.39.0 on PyPI has it."""
    schema = json.loads((ROOT / "tests" / "schemas" / "compose-spec.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    wrong = {**COMPOSE, "services": {"master": {**SERVICES["master"], "healthchek": {}}}}
    assert list(validator.iter_errors(wrong))


@pytest.mark.skipif(not DOCKER_COMPOSE, reason="no docker-compose here (Debian's package is named so)")
@pytest.mark.parametrize(("profile", "target"), [("", None), ("", ""), ("vllm", "http://vllm:8000")])
def test_docker_compose_reads_it_as_it_is_read_here(profile: str, target: str | None) -> None:
    variables = {} if target is None else {"TARGET": target}
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [str(DOCKER_COMPOSE), "--file", str(FILE), *(["--profile", profile] if profile else []), "config"]
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert printed.returncode == 0, printed.stderr
    services = yaml.safe_load(printed.stdout)["services"]
    # Without its profile the first version prints a service all the same, and the second one does not.
    assert {*SERVICES} - services.keys() <= ({"vllm"} if not profile else set())
    for name, service in services.items():
        own = {key: interpolated(value, **variables) for key, value in SERVICES[name].get("environment", {}).items()}
        assert {key: value or "" for key, value in service.get("environment", {}).items()} == own, name
        command = [SERVICES[name]["command"]] if isinstance(SERVICES[name].get("command"), str) else []
        assert not command or [interpolated(c) for c in command] == words(service["command"]), name


def words(command: str | list[str]) -> list[str]:
    return [command if isinstance(command, str) else shlex.join(command)]
