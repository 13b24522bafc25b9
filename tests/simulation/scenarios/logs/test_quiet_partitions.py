"""Idle partitions cause no traffic, and a write to one reaches its followers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.transport import Arrival
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by

SETTLED_S, COUNTED_S = 5.0, 10.0


def play(scenario: Callable[[Simulation, VirtualCluster, VirtualWorld], Awaitable[None]], partitions: int) -> None:
    async def main() -> None:
        simulation = Simulation()
        cluster = VirtualCluster(simulation)
        await cluster.start()
        world = cluster.client("client")

        async def client() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic("orders", partitions=partitions, replication_factor=3)
            await asyncio.sleep(SETTLED_S)
            await scenario(simulation, cluster, world)

        await world.process.run(client())

    run(main(), seed=1)


def bytes_while_idle(partitions: int) -> int:
    total = 0

    async def scenario(simulation: Simulation, cluster: VirtualCluster, world: VirtualWorld) -> None:
        def count(arrival: Arrival) -> None:
            nonlocal total
            total += len(arrival.data)

        simulation.network.taps.append(count)
        await asyncio.sleep(COUNTED_S)

    play(scenario, partitions)
    return total


def test_idle_traffic_does_not_grow_with_partitions() -> None:
    """With full fetch requests, 240 partitions would take 30 times the bytes of 6."""
    few, many = bytes_while_idle(6), bytes_while_idle(240)
    assert 0 < many < 1.5 * few


@run_by(play, partitions=60)
async def test_a_write_to_one_of_many_quiet_partitions_reaches_all_replicas(
    simulation: Simulation, cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    partition = TopicPartition("orders", 17)

    def replicas() -> list[tuple[int, int, int]]:
        """Return log start, high watermark and log end of each replica."""
        managers = [cluster.broker(broker_id)._replicas for broker_id in cluster.broker_ids]
        found = [None if manager is None else manager.partitions.get(partition) for manager in managers]
        return [(p.log.log_start_offset, p.high_watermark, p.log.log_end_offset) for p in found if p is not None]

    async with Producer(cluster.bootstrap, world=world) as producer, Admin(cluster.bootstrap, world=world) as admin:
        for end in (1, 2, 3):
            await producer.send("orders", b"x", partition=partition.partition)
            await cluster.until(lambda: replicas() == [(0, end, end)] * 3)  # noqa: B023
            await asyncio.sleep(SETTLED_S)
        await admin.delete_records({partition: 2})
        await cluster.until(lambda: replicas() == [(2, 3, 3)] * 3)
