"""Runs scenarios on virtual time: the whole cluster and its clients in one process, repeatable by a seed."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from minibroker.deploy.local.who import Member
from minibroker.deploy.scenarios.director import Outcome, play
from minibroker.deploy.scenarios.ledger import Ledger
from minibroker.deploy.scenarios.model import Client, Scenario
from minibroker.deploy.scenarios.programs import Surroundings, run_client
from minibroker.deploy.scenarios.stage import Picture, State, cluster_settings
from minibroker.deploy.scenarios.words import REQUESTS, Action, Event
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.network import MAX_LATENCY_S, MIN_LATENCY_S
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.deploy.simulator.world import Simulation
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.world import Operation, SetData, World

T = TypeVar("T")

LIMIT_S = 1_200.0


def play_virtual(scenario: Scenario, seed: int = 1) -> Outcome:
    """Play a scenario on virtual time. The same seed gives the same run. Raises ScenarioError; a broken promise is no
    error."""
    scenario.check_runner("virtual")

    async def main() -> Outcome:
        stage = VirtualStage(scenario)
        await stage.start()
        return await play(scenario, stage, seed)

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return run(main(), seed=seed, limit_s=LIMIT_S, shuffle=True)
    finally:
        logging.disable(disabled)


class VirtualStage:
    """`minibroker.deploy.scenarios.stage.Stage` on the simulator."""

    runner = "virtual"

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._simulation = Simulation()
        self._cluster = VirtualCluster(
            self._simulation,
            scenario.brokers,
            cluster_settings(scenario),
            on_broker_failure=self._broker_failed,
            first_id=1,
        )
        self.bootstrap = self._cluster.bootstrap
        self.broker_ids = self._cluster.broker_ids
        self._notes: list[tuple[float, str]] = []
        self._clients: dict[str, list[tuple[str, Process]]] = {}
        self._states: dict[str, LeaderAndIsr] = {}
        self._programs = 0

    async def start(self) -> None:
        await self._cluster.start()

    def now_s(self) -> float:
        return self._simulation.loop.now_s

    def notes(self) -> list[tuple[float, str]]:
        return self._notes

    def _broker_failed(self, broker_id: int, error: Exception) -> None:
        self._notes.append((self.now_s(), f"broker {broker_id} ends: {error}"))

    # -- state --

    async def picture(self) -> Picture:
        zookeeper = self._simulation.zookeeper
        partitions: dict[TopicPartition, State] = {}
        for topic in zookeeper.names(znodes.TOPICS) if zookeeper.has(znodes.TOPICS) else ():
            assignment = znodes.decode_topic(topic, zookeeper.data(znodes.topic_path(topic)))
            for number, replicas in assignment.partitions.items():
                partition = TopicPartition(topic, number)
                if zookeeper.has(znodes.state_path(partition)):
                    state = self._cluster.state(partition)
                    leader = None if state.leader < 0 else state.leader
                    partitions[partition] = State(leader, tuple(state.isr), tuple(replicas))
        registered = zookeeper.names(znodes.BROKER_IDS) if zookeeper.has(znodes.BROKER_IDS) else []
        controller = (
            znodes.decode_controller(zookeeper.data(znodes.CONTROLLER)) if zookeeper.has(znodes.CONTROLLER) else None
        )
        return Picture(partitions, controller, frozenset(map(int, registered)))

    # -- clients --

    async def run(self, program: Callable[[World | None], Awaitable[T]]) -> T:
        self._programs += 1
        world = self._cluster.client(f"program-{self._programs}")

        async def main() -> T:
            return await program(world)

        return await world.process.run(main())

    def start_client(self, client: Client, ledger: Ledger) -> None:
        partitions = self._scenario.partitions_of(client)
        started = self._clients[client.name] = []
        for number in range(client.members):
            member = client.name if client.members == 1 else f"{client.name}-{number + 1}"
            world = self._cluster.client(f"client-{member}")
            place = Surroundings(self.bootstrap, world, partitions)
            world.process.start(run_client(client, member, place, ledger), member)
            started.append((member, world.process))

    def kill_client(self, name: str, ledger: Ledger) -> None:
        for member, process in self._clients.get(name, ()):
            process.kill()
            ledger.died(member, self.now_s())

    # -- faults --

    async def act(self, action: Action, members: Sequence[Member]) -> None:
        network, zookeeper = self._simulation.network, self._simulation.zookeeper
        match action.verb:
            case "heal":
                self._heal()
                return
            case "slow network by":
                network.set_latency(action.seconds(), action.seconds() * 1.2)
                return
            case "cut from":
                self._cut(*members)
                return
            case "cut packets from to":
                source, target = members
                assert isinstance(source, int)
                assert isinstance(target, int)
                network.block(host_name(source), host_name(target))
                return
        for member in members:
            if isinstance(member, str):
                zookeeper.start() if action.verb in ("start", "resume") else zookeeper.stop()
                continue
            await self._act_on(action, member)

    async def _act_on(self, action: Action, broker_id: int) -> None:
        cluster, host = self._cluster, self._simulation.host(host_name(broker_id))
        is_alive = cluster.process(broker_id).alive
        match action.verb:
            case "kill":
                cluster.kill_broker(broker_id)
            case "stop":
                if is_alive:
                    await cluster.stop_broker(broker_id)
            case "start":
                if not is_alive:
                    await cluster.start_broker(broker_id)
            case "pause":
                cluster.pause_broker(broker_id)
            case "resume":
                cluster.resume_broker(broker_id)
            case "isolate":
                self._simulation.network.unreachable(host.name, True)
                self._simulation.zookeeper.cut(host.name)
            case "drop connections of":
                self._simulation.network.reset_all(host.name)
            case "power-cut":
                cluster.power_cut(broker_id)
            case "expire":
                self._simulation.zookeeper.expire(host.name)
            case "slow disk of by":
                host.disk.faults.sync_delay_s = action.seconds()
            case "fill disk of":
                host.disk.faults.free_bytes = 0
            case "break disk of":
                host.disk.faults.break_directory(LOG_DIR, errno.EIO)
            case "mend disk of":
                host.disk.faults.clear()
                if not is_alive:
                    await cluster.start_broker(broker_id)
            case "move clock of by":
                host.clock_offset_ms += int(action.seconds() * 1_000)

    def _cut(self, one: Member, other: Member) -> None:
        network, zookeeper = self._simulation.network, self._simulation.zookeeper
        for end, peer in ((one, other), (other, one)):
            if isinstance(end, str):
                if isinstance(peer, int):
                    zookeeper.cut(host_name(peer))
            elif isinstance(peer, int):
                network.block(host_name(end), host_name(peer))

    def _heal(self) -> None:
        network, zookeeper = self._simulation.network, self._simulation.zookeeper
        network.heal()
        network.set_latency(MIN_LATENCY_S, MAX_LATENCY_S)
        for broker_id in self.broker_ids:
            host = host_name(broker_id)
            network.unreachable(host, False)
            zookeeper.uncut(host)
            self._simulation.host(host).disk.faults.clear()
            self._simulation.host(host).clock_offset_ms = 0

    async def restore(self) -> None:
        self._heal()
        self._simulation.zookeeper.start()
        for broker_id in self.broker_ids:
            self._cluster.resume_broker(broker_id)
        gone = [broker_id for broker_id in self.broker_ids if not self._cluster.process(broker_id).alive]
        await asyncio.gather(*(self._cluster.start_broker(broker_id) for broker_id in gone))

    # -- moments --

    async def moment(self, event: Event, within_s: float) -> str | None:
        came: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        network, zookeeper = self._simulation.network, self._simulation.zookeeper
        request = event.words.get("request")
        wanted = REQUESTS.get(request or "")

        def arrived(arrival: Arrival) -> None:
            is_at_broker = arrival.target.startswith("broker-")
            if not came.done() and is_at_broker and request_key(arrival.data) == wanted:
                came.set_result(f"from {arrival.source} to {arrival.target}")

        def written(session: VirtualSession, operations: Sequence[Operation]) -> None:
            for operation in operations:
                if isinstance(operation, SetData) and operation.path.endswith("/state") and not came.done():
                    partition = _partition_of(operation.path)
                    after = znodes.decode_state(partition, operation.data, 0)
                    former = self._states.get(operation.path)
                    self._states[operation.path] = after
                    if not partition.topic.startswith("__") and (former is None or former.leader != after.leader):
                        came.set_result(f"broker {after.leader} is to lead {partition}")

        if request is not None:
            network.taps.append(arrived)
        else:
            self._remember_states()
            zookeeper.after = written
        try:
            async with asyncio.timeout(within_s):
                return await came
        except TimeoutError:
            return None
        finally:
            zookeeper.after = None
            if request is not None:
                network.taps.remove(arrived)

    def _remember_states(self) -> None:
        zookeeper = self._simulation.zookeeper
        for path in zookeeper.paths():
            if path.endswith("/state"):
                self._states[path] = znodes.decode_state(_partition_of(path), zookeeper.data(path), 0)


def _partition_of(path: str) -> TopicPartition:
    *_, topic, _, number, _ = path.split("/")
    return TopicPartition(topic, int(number))
