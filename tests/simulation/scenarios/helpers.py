"""Helpers of the scenarios: clients in processes of their own, and the state of brokers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition
from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol.model import TopicPartition

T = TypeVar("T")


async def as_admin(
    cluster: VirtualCluster, do: Callable[[Admin], Awaitable[T]], *, host: str = "admin", **settings: Any
) -> T:
    """Run `do` with an administrator on that host, and return its result. `settings` are those of `Admin`."""
    world = cluster.client(host)

    async def administer() -> T:
        async with Admin(**{"bootstrap": cluster.bootstrap, **settings}, world=world) as admin:
            return await do(admin)

    return await world.process.run(administer())


async def send_numbers(cluster: VirtualCluster, topic: str, numbers: Iterable[int], partition: int = 0) -> None:
    """Send numbers with acks=all, each once the one before is acknowledged."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in numbers:
                await producer.send(topic, b"%d" % number, partition=partition)

    await world.process.run(produce())


def with_client(
    program: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]],
    topic: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    brokers: int = 3,
    host: str = "client",
    seed: int = 0,
) -> None:
    """Run the program as a client of a cluster. `topic` has the arguments of `Admin.create_topic` for its topic."""

    async def main() -> None:
        cluster = VirtualCluster(Simulation(), brokers, settings)
        await cluster.start()
        world = cluster.client(host)

        async def client() -> None:
            if topic is not None:
                async with Admin(cluster.bootstrap, world=world) as admin:
                    await admin.create_topic(**topic)
            await program(cluster, world)

        await world.process.run(client())

    run(main(), seed=seed)


def unclean_elections(cluster: VirtualCluster) -> int:
    """Return how many unclean elections the living brokers have held as the controller."""
    controllers = [cluster.broker(broker_id).controller for broker_id in cluster.living()]
    return sum(controller.unclean_elections for controller in controllers if controller is not None)


def replicas_of(cluster: VirtualCluster, broker_id: int) -> ReplicaManager:
    replicas = cluster.broker(broker_id)._replicas
    assert replicas is not None
    return replicas


def replica_of(cluster: VirtualCluster, broker_id: int, partition: TopicPartition) -> Partition:
    replica = replicas_of(cluster, broker_id).partitions.get(partition)
    assert replica is not None
    return replica


def session_of(cluster: VirtualCluster, broker_id: int) -> VirtualSession:
    """Return the latest ZooKeeper session of a broker."""
    return [s for s in cluster.simulation.zookeeper.sessions if s.owner.startswith(f"broker-{broker_id}#")][-1]
