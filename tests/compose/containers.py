"""The cluster of deploy/docker-compose.yml under a project name of its own, and the ways in which containers fail.

Calls block. An error of `docker` or `docker-compose` is a RuntimeError with its output. All containers belong to the
project PROJECT, by whose name they are ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.observing.cluster_view import ClusterView, ask_cluster

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "minibroker-compose-test"
BROKERS = (1, 2, 3)
SERVICES = ("zookeeper", *(f"broker-{broker}" for broker in BROKERS))
COMMAND_TIMEOUT_S = 120.0
CONSOLE_TIMEOUT_S = 10.0


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises RuntimeError if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed; these tests need docker and docker-compose") from error
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def compose_command() -> list[str]:
    """Return the command of Compose 2 if docker has it, else docker-compose."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise RuntimeError("neither `docker compose` nor docker-compose is installed")


class Containers:
    """One cluster at a time: PROJECT is a fixed name, so that the remains of an interrupted run are found."""

    def __init__(self) -> None:
        *ports, console = free_ports(len(BROKERS) + 1)
        self.addresses = [(LOOPBACK, port) for port in ports]
        self.bootstrap = ",".join(f"{host}:{port}" for host, port in self.addresses)
        self.console = f"http://{LOOPBACK}:{console}"
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "CONSOLE_PORT": str(console),
            **{f"BROKER_{broker}_PORT": str(port) for broker, port in zip(BROKERS, ports, strict=True)},
        }
        self._compose = compose_command()

    # -- life --

    def compose(self, *arguments: str) -> str:
        return run(*self._compose, *arguments, environment=self._environment)

    def up(self) -> None:
        """Start the cluster as a user does, with the .env at the root. The images must exist."""
        self.compose("up", "--detach", "--no-build")

    def down(self) -> None:
        """Remove the cluster's containers, networks and volumes in any state."""
        for service in SERVICES:
            if self.state(service).get("Paused"):
                self.unpause(service)
        self.compose("down", "--volumes", "--timeout", "30")

    def logs(self) -> str:
        return self.compose("logs", "--no-color")

    # -- looking --

    def container(self, service: str) -> str | None:
        """Return the id of the service's container, running or not."""
        filters = (f"label=com.docker.compose.project={PROJECT}", f"label=com.docker.compose.service={service}")
        return run("docker", "ps", "--all", "--quiet", *(f"--filter={text}" for text in filters)).strip() or None

    def state(self, service: str) -> dict[str, Any]:
        """Return docker's state of the container; empty if there is none."""
        container = self.container(service)
        if container is None:
            return {}
        state: dict[str, Any] = json.loads(run("docker", "inspect", "--format", "{{json .State}}", container))
        return state

    def is_healthy(self, service: str) -> bool:
        return bool(self.state(service).get("Health", {}).get("Status") == "healthy")

    def view(self) -> ClusterView:
        """Ask the brokers through their published ports."""
        return asyncio.run(ask_cluster(self.addresses))

    def console_page(self, path: str, form: bytes | None = None) -> tuple[int, str]:
        """Return the status and text of a page of the console, or of its answer to a form. 0: it does not answer."""
        try:
            with urlopen(f"{self.console}{path}", form, CONSOLE_TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, HTTPException):
            return 0, ""

    # -- breaking and mending: each pair by name --

    def kill(self, service: str) -> None:
        run("docker", "kill", self._existing(service))

    def start(self, service: str) -> None:
        run("docker", "start", self._existing(service))

    def pause(self, service: str) -> None:
        run("docker", "pause", self._existing(service))

    def unpause(self, service: str) -> None:
        run("docker", "unpause", self._existing(service))

    def disconnect(self, service: str) -> None:
        """Remove the service's address and name from the network. Its peers get no reset."""
        run("docker", "network", "disconnect", f"{PROJECT}_default", self._existing(service))

    def connect(self, service: str) -> None:
        run("docker", "network", "connect", "--alias", service, f"{PROJECT}_default", self._existing(service))

    def _existing(self, service: str) -> str:
        container = self.container(service)
        if container is None:
            raise RuntimeError(f"there is no container of {service} in the project {PROJECT}")
        return container


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Raises TimeoutError with the missing condition."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= ends_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def is_whole(view: ClusterView, brokers: Sequence[int] = BROKERS) -> bool:
    """Return whether every broker is known, there is a controller, and every replica is in its ISR."""
    return (
        view.controller_id is not None
        and sorted(view.brokers) == sorted(brokers)
        and all(sorted(p.isr_nodes) == sorted(p.replica_nodes) for p in view.partitions.values())
    )
