"""Runs scenarios on real processes of this machine, with the cluster of `minibroker.testing`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from minibroker.client.settings import parse_bootstrap
from minibroker.deploy.local.who import Member
from minibroker.deploy.observing.cluster_view import ask_cluster
from minibroker.deploy.scenarios.director import Outcome, play
from minibroker.deploy.scenarios.ledger import Ledger
from minibroker.deploy.scenarios.model import Client, Scenario
from minibroker.deploy.scenarios.programs import Surroundings, run_client
from minibroker.deploy.scenarios.stage import Picture, State, cluster_settings
from minibroker.deploy.scenarios.words import Action, Event
from minibroker.deploy.testing.cluster import LocalCluster
from minibroker.protocol.model import NO_LEADER
from minibroker.protocol.world import World

T = TypeVar("T")

_ASK_TIMEOUT_S = 0.5
"""A paused broker does not answer, and each picture would wait for it."""


async def play_live(scenario: Scenario) -> Outcome:
    """Play a scenario on a cluster of its own, which is started and removed. Raises ScenarioError, LaunchError."""
    scenario.check_runner("live")
    async with LocalCluster(scenario.brokers, settings=cluster_settings(scenario)) as cluster:
        return await play_on(scenario, cluster)


async def play_on(scenario: Scenario, cluster: LocalCluster) -> Outcome:
    """Play a scenario on a running cluster that has its number of brokers and its settings. Topics of the scenario must
    not exist. Raises ScenarioError."""
    scenario.check_runner("live")
    stage = LiveStage(scenario, cluster)
    try:
        return await play(scenario, stage, None)
    finally:
        await stage.end()


class LiveStage:
    """`minibroker.deploy.scenarios.stage.Stage` on processes."""

    runner = "live"

    def __init__(self, scenario: Scenario, cluster: LocalCluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self.bootstrap = cluster.bootstrap_servers
        self._addresses = parse_bootstrap(self.bootstrap)
        self.broker_ids = tuple(range(1, len(self._addresses) + 1))
        self._clients: list[asyncio.Task[None]] = []

    def now_s(self) -> float:
        return time.monotonic()

    def notes(self) -> list[tuple[float, str]]:
        return []

    async def picture(self) -> Picture:
        view = await ask_cluster(self._addresses, _ASK_TIMEOUT_S)
        partitions = {
            partition: State(
                None if state.leader_id == NO_LEADER else state.leader_id,
                tuple(state.isr_nodes),
                tuple(state.replica_nodes),
            )
            for partition, state in view.partitions.items()
        }
        return Picture(partitions, view.controller_id, frozenset(view.brokers))

    async def run(self, program: Callable[[World | None], Awaitable[T]]) -> T:
        return await program(None)

    def start_client(self, client: Client, ledger: Ledger) -> None:
        partitions = next((topic.partitions for topic in self._scenario.topics if topic.name == client.produces), 1)
        place = Surroundings(self.bootstrap, None, partitions)
        for number in range(client.members):
            member = client.name if client.members == 1 else f"{client.name}-{number + 1}"
            self._clients.append(asyncio.create_task(run_client(client, member, place, ledger), name=member))

    def kill_client(self, name: str, ledger: Ledger) -> None:
        raise AssertionError(f"{name} is a task of this process; `check_runner` refuses this action for live runs")

    async def act(self, action: Action, members: Sequence[Member]) -> None:
        if action.verb == "heal":
            await self._cluster.heal()
            return
        if action.verb == "slow disk of by":
            await asyncio.gather(*(self._cluster.slow_disk(who, action.seconds()) for who in members))
            return
        if action.verb in ("cut from", "cut packets from to"):
            await self._cluster.cut(*members, one_way=action.verb != "cut from")
            return
        if action.verb == "slow network by":
            await self._cluster.slow_network("all", action.seconds())
            return
        if action.verb == "move clock of by":
            await asyncio.gather(*(self._cluster.move_clock(who, action.seconds()) for who in members))
            return
        act = {
            "kill": self._cluster.kill,
            "stop": self._cluster.stop,
            "start": self._cluster.start,
            "pause": self._cluster.pause,
            "resume": self._cluster.resume,
            "isolate": self._cluster.isolate,
            "drop connections of": self._cluster.drop_connections,
            "fill disk of": self._cluster.fill_disk,
            "break disk of": self._cluster.break_disk,
            "mend disk of": self._cluster.mend_disk,
        }[action.verb]
        # One call for all: brokers start side by side, and a first one might wait for the others.
        whole = set(members) == set(self.broker_ids) and len(members) > 1
        await asyncio.gather(*(act(who) for who in (["all"] if whole else members)))

    async def moment(self, event: Event, within_s: float) -> str | None:
        raise AssertionError(f"{event.text}: `check_runner` refuses this event for live runs")

    async def restore(self) -> None:
        await self._cluster.restore()

    async def end(self) -> None:
        """End the clients that still run. Raises the errors that are none of a client's, which nobody has seen yet."""
        _, late = await asyncio.wait(self._clients, timeout=30) if self._clients else (set(), set())
        for task in late:
            task.cancel()
        outcomes = await asyncio.gather(*self._clients, return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise ExceptionGroup("clients of the scenario have failed", errors)
