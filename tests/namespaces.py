"""Machines for tests: network namespaces of this computer, each with an address and a name of its own, on one switch.

The switch is a bridge in a namespace of its own, so nothing is added to the network of the computer itself, and what it
forwards or filters does not matter. It takes root and `ip`; `MACHINES` skips a test where they are missing.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

_NETWORK = "10.77.0"
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    """Run `ip`; raises with what it says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Machine:
    """A host with a network of its own; its files and processes are this computer's."""

    name: str
    """What it calls itself, too."""
    address: str
    _namespace: str
    _switch: str

    def command(self, *command: str) -> list[str]:
        """Return a command that runs on it: each step replaces the one before, so that signals reach the last."""
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "sh", "-c", script, self.name, *command]

    def get(self, url: str) -> str:
        """Return the body of a page as this machine gets it."""
        script = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=5).read().decode())"
        command = self.command(sys.executable, "-c", script, url)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout

    def cut(self) -> None:
        """Pull its cable out."""
        _ip("-n", self._switch, "link", "set", "dev", self.name, "down")

    def restore(self) -> None:
        """Put its cable in again."""
        _ip("-n", self._switch, "link", "set", "dev", self.name, "up")


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    """Make a namespace, which takes its links with it when it goes."""
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name)


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """Make machines of such names (at most 15 letters each), which reach each other and nobody else."""
    prefix = f"vllm-locust-{os.getpid()}-{next(_numbers)}"
    with ExitStack() as made:
        switch = made.enter_context(_namespace(f"{prefix}-switch"))
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        found = []
        for number, name in enumerate(names, 1):
            namespace = made.enter_context(_namespace(f"{prefix}-{name}"))
            machine = Machine(name, f"{_NETWORK}.{number}", namespace, switch)
            _ip("-n", switch, "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", switch, "link", "set", "dev", name, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            found.append(machine)
        yield found


def _reason() -> str:
    """Return why there can be no machines here, or nothing."""
    if sys.platform != "linux" or os.getuid():
        return "machines are network namespaces, which only root has, on Linux"
    try:
        with machines("probe") as (probe,):
            subprocess.run(probe.command("true"), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


_WHY_NOT = _reason()
MACHINES = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "there are machines")


def existing() -> set[str]:
    """Return the names of all namespaces of this process's machines that there are."""
    listed = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout
    namespaces: list[dict[str, Any]] = json.loads(listed or "[]")
    return {n["name"] for n in namespaces if n["name"].startswith(f"vllm-locust-{os.getpid()}-")}
