"""Runs scenarios on containers, with the cluster of deploy/docker-compose.yml.

The settings of a scenario reach the brokers in a properties file, which an override file of Compose puts in place of
the image's. Faults are those of docker: containers are killed, stopped, paused, and disconnected from their network.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from minibroker.deploy.errors import LaunchTimedOut
from minibroker.deploy.local.who import Member
from minibroker.deploy.observing.cluster_view import ask_cluster
from minibroker.deploy.scenarios.director import Outcome, play
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.stage import cluster_settings
from minibroker.deploy.scenarios.stages import compose
from minibroker.deploy.scenarios.stages.compose import ZOOKEEPER, Containers, service_of
from minibroker.deploy.scenarios.stages.real import ASK_TIMEOUT_S, RealStage
from minibroker.deploy.scenarios.words import Action

PROJECT = "minibroker-scenario"
"""The name of each project begins with it."""
_UP_WITHIN_S = 120.0
_POLL_S = 0.1


async def play_containers(scenario: Scenario) -> Outcome:
    """Play a scenario on containers of its own, which are started and removed. Raises ScenarioError, LaunchError."""
    scenario.check_runner("containers")
    await asyncio.to_thread(compose.check_possible)
    with tempfile.TemporaryDirectory(prefix="minibroker-scenario-") as directory:
        override = _override(Path(directory), scenario.brokers, cluster_settings(scenario))
        project = f"{PROJECT}-{secrets.token_hex(4)}"
        containers = Containers(project, files=[compose.COMPOSE_FILE, override])
        stage = ContainerStage(scenario, containers)
        try:
            await stage.start()
            try:
                return await play(scenario, stage, None)
            finally:
                await stage.end()
        finally:
            await asyncio.shield(asyncio.to_thread(containers.down))


def _override(directory: Path, brokers: int, settings: Mapping[str, str]) -> Path:
    """Write the file of Compose that gives the brokers these settings, and the file with the settings."""
    lines = [compose.PROPERTIES.read_text(), *(f"{name}={value}\n" for name, value in settings.items())]
    properties = directory / "broker.properties"
    properties.write_text("".join(lines))
    properties.chmod(0o644)  # the user of the containers reads it
    volumes = [f"{properties}:/etc/minibroker/broker.properties:ro"]
    override = directory / "docker-compose.json"
    override.write_text(
        json.dumps({"services": {service_of(id): {"volumes": volumes} for id in range(1, brokers + 1)}})
    )
    return override


class ContainerStage(RealStage):
    """`minibroker.deploy.scenarios.stage.Stage` on containers."""

    runner = "containers"

    def __init__(self, scenario: Scenario, containers: Containers) -> None:
        super().__init__(scenario, ",".join(containers.bootstrap.split(",")[: scenario.brokers]))
        self._containers = containers
        self._isolated: set[str] = set()

    async def start(self) -> None:
        """Return once every broker serves. Raises LaunchError, LaunchTimedOut."""
        starting = asyncio.ensure_future(
            asyncio.to_thread(self._containers.up, ZOOKEEPER, *map(service_of, self.broker_ids))
        )
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # otherwise it would start containers while they are removed
            raise
        await self._serves(self.broker_ids)

    async def _serves(self, brokers: Collection[int]) -> None:
        """Wait until these brokers answer and are registered, and there is a controller, as one that is started on a
        machine. Raises LaunchTimedOut."""
        addresses = {self._addresses[broker_id - 1] for broker_id in brokers}
        deadline_s = time.monotonic() + _UP_WITHIN_S
        while True:
            view = await ask_cluster(self._addresses, ASK_TIMEOUT_S)
            knows = view.answered - view.uninformed
            if view.controller_id is not None and view.brokers.keys() >= set(brokers) and addresses <= knows:
                return
            if time.monotonic() > deadline_s:
                logs = "\n".join((await asyncio.to_thread(self._containers.logs)).splitlines()[-20:])
                raise LaunchTimedOut(f"the brokers are not up after {_UP_WITHIN_S:g} s; their last lines:\n{logs}")
            await asyncio.sleep(_POLL_S)

    async def act(self, action: Action, members: Sequence[Member]) -> None:
        if action.verb == "heal":
            await self._heal()
            return
        services = [ZOOKEEPER if isinstance(member, str) else service_of(member) for member in members]
        await asyncio.gather(*(asyncio.to_thread(self._act_on, action.verb, service) for service in services))
        if action.verb == "start":
            await self._serves([member for member in members if isinstance(member, int)])

    def _act_on(self, verb: str, service: str) -> None:
        containers = self._containers
        state = containers.state(service)
        runs, is_paused = bool(state.get("Running")), bool(state.get("Paused"))
        match verb:
            case "kill" if runs:
                containers.kill(service)
            case "stop" if runs:
                containers.stop(service)
            case "start" if not runs:
                containers.start(service)
            case "pause" if runs and not is_paused:
                containers.pause(service)
            case "resume" if is_paused:
                containers.unpause(service)
            case "isolate" if service not in self._isolated:
                containers.disconnect(service)
                self._isolated.add(service)

    async def _heal(self) -> None:
        isolated, self._isolated = self._isolated, set()
        await asyncio.gather(*(asyncio.to_thread(self._containers.connect, service) for service in isolated))

    async def restore(self) -> None:
        await self._heal()
        services = [ZOOKEEPER, *map(service_of, self.broker_ids)]
        for verb in ("resume", "start"):
            await asyncio.gather(*(asyncio.to_thread(self._act_on, verb, service) for service in services))
