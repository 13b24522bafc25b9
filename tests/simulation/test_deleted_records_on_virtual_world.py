"""Records that are deleted on demand (KIP-107): when that is acknowledged, and that they do not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import PartitionErrors
from minibroker.client.producer import Producer
from minibroker.protocol.apis import DELETE_RECORDS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.rpc import Connection
from tests.simulation.cluster import VirtualCluster, host_name
from tests.simulation.loop import run
from tests.simulation.mutants import planted
from tests.simulation.test_retention_on_virtual_world import P0, produce, replica_of, starts
from tests.simulation.world import Simulation, VirtualWorld

Program = Callable[[VirtualCluster, VirtualWorld, Admin], Awaitable[None]]


def with_records(
    program: Program, settings: dict[str, str] | None = None, configs: dict[str, str] | None = None
) -> None:
    """Three brokers, and a topic with 40 records of a batch each in one partition."""

    async def scenario() -> None:
        cluster = VirtualCluster(Simulation(), settings=settings or {})
        await cluster.start()
        world = cluster.client("client")

        async def client() -> None:
            async with Admin(cluster.bootstrap, world=world, default_api_timeout_ms=20_000) as admin:
                await admin.create_topic("orders", partitions=1, replication_factor=3, configs=configs)
                await produce(cluster, world, 40)
                await program(cluster, world, admin)

        await world.process.run(client())

    run(scenario())


def followers(cluster: VirtualCluster) -> list[int]:
    leader = cluster.state(P0).leader
    return [broker_id for broker_id in cluster.broker_ids if broker_id != leader]


async def first_offset(cluster: VirtualCluster, world: VirtualWorld) -> int:
    async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
        return (await anext(consumer)).offset


def test_every_replica_begins_where_the_answer_says_and_so_do_consumers() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        assert await admin.delete_records({P0: 7}) == {P0: 7}
        assert starts(cluster) == [7, 7, 7]
        assert await first_offset(cluster, world) == 7
        assert await admin.delete_records({P0: 3}) == {P0: 7}
        assert await admin.delete_records({P0: -1}) == {P0: 40}
        await produce(cluster, world, 1)
        assert await first_offset(cluster, world) == 40

    with_records(program)
