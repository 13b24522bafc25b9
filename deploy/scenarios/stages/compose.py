"""The cluster of deploy/docker-compose.yml under a project name of its own, and the ways in which containers fail.

Calls block. An error of `docker` or `docker-compose` is a LaunchError with its output. All containers belong to one
project, by whose name they are ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.observing.cluster_view import ClusterView, ask_cluster

DEPLOY = Path(__file__).resolve().parents[2]
COMPOSE_FILE = DEPLOY / "docker-compose.yml"
PROPERTIES = DEPLOY / "broker.properties"
"""The settings of all brokers, as in the image."""
BROKERS = (1, 2, 3)
ZOOKEEPER = "zookeeper"
IMAGES = ("minibroker-zookeeper", "minibroker-broker")
COMMAND_TIMEOUT_S = 120.0


def run(*command: str, environment: Mapping[str, str] | None = None, directory: Path = DEPLOY) -> str:
    """Run a command and return its output. Raises LaunchError if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed: install docker and docker-compose") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchTimedOut(
            f"`{' '.join(command)}` has not ended after {COMMAND_TIMEOUT_S:g} s: see `docker ps`, and try again"
        ) from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise LaunchError(f"`{' '.join(command)}` failed ({done.returncode}): {said}")
    return done.stdout


def compose_command() -> list[str]:
    """Return the command of Compose 2 if docker has it, else docker-compose. Raises LaunchError."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise LaunchError("neither `docker compose` nor docker-compose is installed: install one of them")


def check_possible() -> None:
    """Raises LaunchError if no docker engine answers, or an image is missing."""
    try:
        run("docker", "version", "--format", "{{.Server.Version}}")
    except LaunchError as error:
        raise LaunchError(f"no docker engine answers: start it, as with `systemctl start docker`; {error}") from None
    for image in IMAGES:
        if not run("docker", "images", "--quiet", image).strip():
            raise LaunchError(f"there is no image {image}: `make image` builds it from the source of minibroker")


class Containers:
    """One cluster. The first of `files` is the file of Compose; without any, Compose finds the one of `directory`."""

    def __init__(self, project: str, *, files: Sequence[Path] = (), directory: Path = DEPLOY) -> None:
        *ports, console = free_ports(len(BROKERS) + 1)
        self.project = project
        self.addresses = [(LOOPBACK, port) for port in ports]
        self.bootstrap = ",".join(f"{host}:{port}" for host, port in self.addresses)
        self.console = f"http://{LOOPBACK}:{console}"
        self._directory = directory
        self._environment = {
            **os.environ,
            **({"COMPOSE_FILE": os.pathsep.join(map(str, files))} if files else {}),
            "COMPOSE_PROJECT_NAME": project,
            "CONSOLE_PORT": str(console),
            **{f"BROKER_{broker}_PORT": str(port) for broker, port in zip(BROKERS, ports, strict=True)},
            **{f"BROKER_{broker}_METRICS_PORT": "" for broker in BROKERS},  # any
        }
        self._compose = compose_command()

    # -- life --

    def compose(self, *arguments: str) -> str:
        return run(*self._compose, *arguments, environment=self._environment, directory=self._directory)

    def up(self, *services: str) -> None:
        """Start these services, or all. The images must exist."""
        self.compose("up", "--detach", "--no-build", *services)

    def down(self) -> None:
        """Remove the cluster's containers, networks and volumes in any state."""
        for service in (ZOOKEEPER, *map(service_of, BROKERS)):
            if self.state(service).get("Paused"):
                self.unpause(service)
        self.compose("down", "--volumes", "--timeout", "30")

    def logs(self) -> str:
        return self.compose("logs", "--no-color")

    # -- looking --

    def container(self, service: str) -> str | None:
        """Return the id of the service's container, running or not."""
        filters = (f"label=com.docker.compose.project={self.project}", f"label=com.docker.compose.service={service}")
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

    # -- breaking and mending: each pair by name --

    def kill(self, service: str) -> None:
        run("docker", "kill", self._existing(service))

    def stop(self, service: str) -> None:
        """Stop with the grace period of the file of Compose."""
        self.compose("stop", service)

    def start(self, service: str) -> None:
        run("docker", "start", self._existing(service))

    def pause(self, service: str) -> None:
        run("docker", "pause", self._existing(service))

    def unpause(self, service: str) -> None:
        run("docker", "unpause", self._existing(service))

    def disconnect(self, service: str) -> None:
        """Remove the service's address and name from the network. Its peers get no reset."""
        run("docker", "network", "disconnect", f"{self.project}_default", self._existing(service))

    def connect(self, service: str) -> None:
        run("docker", "network", "connect", "--alias", service, f"{self.project}_default", self._existing(service))

    def _existing(self, service: str) -> str:
        container = self.container(service)
        if container is None:
            raise LaunchError(
                f"there is no container of {service} in the project {self.project}: see `docker ps --all`"
            )
        return container


def service_of(broker_id: int) -> str:
    return f"broker-{broker_id}"
