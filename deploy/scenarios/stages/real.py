"""Shared by the stages in real time: clients are tasks of this process, and brokers are asked over the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from minibroker.client.settings import parse_bootstrap
from minibroker.deploy.observing.cluster_view import ask_cluster
from minibroker.deploy.scenarios.ledger import Ledger
from minibroker.deploy.scenarios.model import Client, Scenario
from minibroker.deploy.scenarios.programs import Surroundings, run_client
from minibroker.deploy.scenarios.stage import Picture, State
from minibroker.deploy.scenarios.stages.mortal import Life, MortalLedger, MortalWorld
from minibroker.deploy.scenarios.words import Event
from minibroker.protocol.model import NO_LEADER
from minibroker.protocol.world import World
from minibroker.protocol.world.real import RealWorld

T = TypeVar("T")

_CANCEL_AGAIN_S = 0.1
ASK_TIMEOUT_S = 0.5
"""A paused broker does not answer, and each picture would wait for it."""


class _Mortal(NamedTuple):
    member: str
    life: Life
    ledger: MortalLedger
    task: asyncio.Task[None]


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends: a client that is cancelled says goodbye first, to brokers that it cannot reach."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


class RealStage:
    """The part of `minibroker.deploy.scenarios.stage.Stage` that does not act on members."""

    def __init__(self, scenario: Scenario, bootstrap: str) -> None:
        self._scenario = scenario
        self.bootstrap = bootstrap
        self._addresses = parse_bootstrap(bootstrap)
        self.broker_ids = tuple(range(1, len(self._addresses) + 1))
        self._clients: list[asyncio.Task[None]] = []
        self._mortal: dict[str, list[_Mortal]] = {}
        """The members of each client that a step kills, since its last start."""

    def now_s(self) -> float:
        return time.monotonic()

    def notes(self) -> list[tuple[float, str]]:
        return []

    async def picture(self) -> Picture:
        view = await ask_cluster(self._addresses, ASK_TIMEOUT_S)
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
        partitions = self._scenario.partitions_of(client)
        is_killed = any(
            action.verb == "kill client" and action.words["client"] == client.name
            for step in self._scenario.steps
            for action in step.actions
        )
        self._mortal[client.name] = []
        for number in range(client.members):
            member = client.name if client.members == 1 else f"{client.name}-{number + 1}"
            if not is_killed:
                place = Surroundings(self.bootstrap, None, partitions)
                self._clients.append(asyncio.create_task(run_client(client, member, place, ledger), name=member))
                continue
            life, own = Life(), MortalLedger(ledger)
            place = Surroundings(self.bootstrap, MortalWorld(RealWorld(), life), partitions)
            task = asyncio.create_task(run_client(client, member, place, own), name=member)
            self._clients.append(task)
            self._mortal[client.name].append(_Mortal(member, life, own, task))

    def kill_client(self, name: str, ledger: Ledger) -> None:
        for mortal in self._mortal[name]:
            mortal.life.end()
            mortal.ledger.die()
            self._clients.append(asyncio.create_task(_end(mortal.task), name=f"end of {name}"))
            ledger.died(mortal.member, self.now_s())

    async def moment(self, event: Event, within_s: float) -> str | None:
        raise AssertionError(f"{event.text}: `check_runner` refuses this event")

    async def end(self) -> None:
        """End the clients that still run. Raises the errors that are none of a client's, which nobody has seen yet."""
        _, late = await asyncio.wait(self._clients, timeout=30) if self._clients else (set(), set())
        for task in late:
            task.cancel()
        outcomes = await asyncio.gather(*self._clients, return_exceptions=True)
        if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise ExceptionGroup("clients of the scenario have failed", errors)
