"""The controller is killed at every moment of a preferred election: before and after each of its writes, and when each
of its requests reaches its broker. The next controller finishes the election."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.controller.handlers import steps
from minibroker.deploy.simulator.cluster import CONTROL_PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.world import Check, ConnectionLoss, Operation
from tests.simulation.scenarios.control.test_forwarding import until_controller

TOPIC = "orders"
NUMBERS = range(3)


class Moments:
    """Counts the controller's writes and requests, and kills it at moment `wanted`, or never if that is None."""

    def __init__(self, cluster: VirtualCluster, controller: int, wanted: int | None) -> None:
        self.passed = 0
        self.struck: str | None = None
        self._cluster = cluster
        self._controller = controller
        self._wanted = wanted
        cluster.simulation.zookeeper.before = self._about_to_write
        cluster.simulation.zookeeper.after = self._written
        cluster.simulation.network.taps.append(self._arrives)

    def end(self) -> None:
        self._cluster.simulation.zookeeper.before = self._cluster.simulation.zookeeper.after = None
        self._cluster.simulation.network.taps.remove(self._arrives)

    def _is_ours(self, session: VirtualSession, operations: Sequence[Operation]) -> bool:
        return session.owner.startswith(f"{host_name(self._controller)}#") and isinstance(operations[0], Check)

    def _about_to_write(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        if self._is_ours(session, operations) and self._is_now(f"before {operations[-1]}"):
            raise ConnectionLoss("the request was lost")

    def _written(self, session: VirtualSession, operations: Sequence[Operation]) -> None:
        if self._is_ours(session, operations):
            self._is_now(f"after {operations[-1]}")

    def _arrives(self, arrival: Arrival) -> None:
        is_order = arrival.source == host_name(self._controller) and arrival.target_port == CONTROL_PORT
        if is_order and request_key(arrival.data) is not None:
            self._is_now(f"API {request_key(arrival.data)} to {arrival.target}")

    def _is_now(self, what: str) -> bool:
        if self.struck is not None:
            return False
        self.passed += 1
        if self.passed - 1 != self._wanted:
            return False
        self.struck = what
        self._cluster.kill_broker(self._controller)
        for other in self._cluster.broker_ids:  # requests in flight do not arrive any more
            if other != self._controller:
                self._cluster.simulation.network.reset(host_name(self._controller), host_name(other))
        return True


async def _election(cluster: VirtualCluster, world: VirtualWorld, way: str, wanted: int | None) -> Moments:
    """Give several partitions to their preferred leader under load; return when it leads them and no record is lost."""
    controller = await until_controller(cluster)
    preferred = (controller + 1) % 3
    partitions = [TopicPartition(TOPIC, number) for number in NUMBERS]
    async with Admin(cluster.bootstrap, world=world) as admin:
        assignment = [preferred, (preferred + 1) % 3, (preferred + 2) % 3]
        await admin.create_topic(TOPIC, assignments=[assignment for _ in NUMBERS])
        cluster.kill_broker(preferred)
        await cluster.until(lambda: all(cluster.state(p).leader not in (preferred, NO_LEADER) for p in partitions))
        await cluster.start_broker(preferred)
        await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in partitions))
        assert await until_controller(cluster) == controller
        await asyncio.sleep(3)
        epochs = [cluster.state(p).leader_epoch for p in partitions]

        moments = Moments(cluster, controller, wanted)
        stop = asyncio.Event()
        producing = asyncio.create_task(_produce(cluster, world, stop))
        if way == "request":
            elected = await admin.elect_leaders("preferred", partitions)
            assert elected.keys() == set(partitions)
        else:
            zookeeper = cluster.simulation.zookeeper
            zookeeper.make(znodes.PREFERRED_REPLICA_ELECTION, znodes.encode_preferred_election(partitions))
            await cluster.until(lambda: not zookeeper.has(znodes.PREFERRED_REPLICA_ELECTION))
        assert all(cluster.state(p).leader == preferred for p in partitions)
        assert all(cluster.state(p).leader_epoch > before for p, before in zip(partitions, epochs, strict=True))
        await asyncio.sleep(0.2)
        if moments.struck is not None:
            await cluster.start_broker(controller)
            await cluster.until(lambda: all(len(cluster.state(p).isr) == 3 for p in partitions))
        moments.end()
        stop.set()
        acknowledged = await producing
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            read = {(await anext(consumer)).value for _ in acknowledged}
        assert read == acknowledged
    return moments


async def _produce(cluster: VirtualCluster, world: VirtualWorld, stop: asyncio.Event) -> set[bytes | None]:
    acknowledged: set[bytes | None] = set()
    async with Producer(cluster.bootstrap, acks="all", world=world) as producer:
        while not stop.is_set():
            value = b"%d" % len(acknowledged)
            await producer.send(TOPIC, value, partition=len(acknowledged) % len(NUMBERS))
            acknowledged.add(value)
            await asyncio.sleep(0.005)
    return acknowledged


def _run(way: str, wanted: int | None) -> Moments:
    async def scenario() -> Moments:
        cluster = VirtualCluster(Simulation(), settings={"auto.leader.rebalance.enable": "false"})
        await cluster.start()
        world = cluster.client("client")
        return await world.process.run(_election(cluster, world, way, wanted))

    return run(scenario(), seed=wanted or 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["request", "znode"])
def test_the_next_controller_finishes_an_election_whenever_the_first_is_killed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PARTITIONS_AT_ONCE", 1)  # so that there are as many writes as partitions
    points = _run(way, None).passed
    struck = [_run(way, wanted).struck for wanted in range(points)]
    covered = [what for what in struck if what is not None]
    print(f"{way}: killed at {len(covered)} of {points} moments")
    assert len(covered) >= points - 3  # another seed may send one request less
    assert sum("before" in what for what in covered) >= len(NUMBERS) - 1  # as above
