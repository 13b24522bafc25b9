"""Offset look-ups and time limits while a broker hangs (SIGSTOP): it keeps its connections, accepts new ones, and never
answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ApiTimedOut
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.apis import LIST_OFFSETS
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, NetworkError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client

LONG_SESSION = {"zookeeper.session.timeout.ms": "40000"}
"""Longer than these tests take, so that the hanging leader stays the leader."""


async def with_a_record_in_each(cluster: VirtualCluster, world: VirtualWorld, assignments: list[list[int]]) -> int:
    """Write a record to each partition; broker N leads partition N. Return a broker that is not the controller."""
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", assignments=assignments)
        controller = (await admin.describe_cluster()).controller_id
    async with Producer(cluster.bootstrap, world=world) as producer:
        for partition in cluster.broker_ids:
            producer.send("orders", b"value", partition=partition)
        await producer.flush()
    return next(broker_id for broker_id in cluster.broker_ids if broker_id != controller)


async def one_replica_each(cluster: VirtualCluster, world: VirtualWorld) -> int:
    return await with_a_record_in_each(cluster, world, [[broker_id] for broker_id in cluster.broker_ids])


async def when_read(consumer: Consumer, world: VirtualWorld, count: int) -> dict[int, float]:
    """Read `count` records; return for each partition the seconds until its first one."""
    began = world.clock.monotonic()
    read: dict[int, float] = {}
    async with asyncio.timeout(60):
        while len(read) < count:
            read.setdefault((await anext(consumer)).partition, world.clock.monotonic() - began)
    return read


@pytest.mark.parametrize("is_connected", [True, False])
@run_by(with_client, settings=LONG_SESSION)
async def test_end_offsets_takes_no_longer_than_its_time_limit_while_a_leader_hangs(
    cluster: VirtualCluster, world: VirtualWorld, /, is_connected: bool
) -> None:
    hangs = await one_replica_each(cluster, world)
    orders = [TopicPartition("orders", hangs)]
    async with Consumer(cluster.bootstrap, topics=["orders"], default_api_timeout_ms=2_000, world=world) as consumer:
        if is_connected:
            await consumer.end_offsets(orders)
        cluster.pause_broker(hangs)
        began = world.clock.monotonic()
        with pytest.raises(NetworkError, match=f"broker-{hangs}.*no answer"):
            await consumer.end_offsets(orders)
        assert 1.5 < world.clock.monotonic() - began < 2.5


@run_by(with_client, settings=LONG_SESSION)
async def test_a_starting_consumer_reads_from_the_other_leaders_while_one_hangs(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    cluster.pause_broker(await one_replica_each(cluster, world))
    async with Consumer(cluster.bootstrap, topics=["orders"], world=world) as consumer:
        read = await when_read(consumer, world, 2)
    assert max(read.values()) < 2, read


@run_by(with_client)
async def test_a_consumer_that_starts_while_a_leader_hangs_waits_only_for_its_successor(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    hangs = await with_a_record_in_each(cluster, world, [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    await asyncio.sleep(2)
    cluster.pause_broker(hangs)
    async with Consumer(cluster.bootstrap, topics=["orders"], world=world) as consumer:
        read = await when_read(consumer, world, 3)
    assert read.pop(hangs) < 12, "the session of 6 s, and an election"
    assert max(read.values()) < 2, read


@run_by(with_client, settings=LONG_SESSION)
async def test_end_positions_are_looked_up_at_leaders_that_answer_while_one_hangs(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    hangs = await one_replica_each(cluster, world)
    cluster.pause_broker(hangs)
    async with Consumer(cluster.bootstrap, topics=["orders"], default_api_timeout_ms=3_000, world=world) as consumer:
        with pytest.raises(ApiTimedOut):
            await consumer.position(TopicPartition("orders", hangs))
        consumer.seek_to_end()  # while the previous look-up waits for the hanging leader
        began = world.clock.monotonic()
        for other in set(cluster.broker_ids) - {hangs}:
            assert await consumer.position(TopicPartition("orders", other)) == 1
        assert world.clock.monotonic() - began < 1
        cluster.resume_broker(hangs)
        assert await consumer.position(TopicPartition("orders", hangs)) == 1


@pytest.mark.parametrize("api_timeout_s", [3, 60])
@run_by(with_client, settings=LONG_SESSION)
async def test_list_topics_is_given_up_at_its_time_limit_if_all_brokers_hang(
    cluster: VirtualCluster, world: VirtualWorld, /, api_timeout_s: int
) -> None:
    async with Admin(cluster.bootstrap, default_api_timeout_ms=api_timeout_s * 1_000, world=world) as admin:
        await admin.list_topics()
        for broker_id in cluster.broker_ids:
            cluster.pause_broker(broker_id)
        began = world.clock.monotonic()
        with pytest.raises(NetworkError) as raised:
            await admin.list_topics()
        assert api_timeout_s - 0.5 < world.clock.monotonic() - began < api_timeout_s + 0.5
        assert all(f"broker-{broker_id}" in str(raised.value) for broker_id in cluster.broker_ids)


@pytest.mark.parametrize("hangs", [0, 1, 2])
@run_by(with_client, settings=LONG_SESSION)
async def test_list_topics_with_little_time_is_answered_while_one_broker_hangs(
    cluster: VirtualCluster, world: VirtualWorld, /, hangs: int
) -> None:
    async with Admin(cluster.bootstrap, default_api_timeout_ms=1_000, world=world) as admin:
        cluster.pause_broker(hangs)
        for _ in range(3):
            assert await admin.list_topics() == []


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.REQUEST_TIMED_OUT])
@run_by(with_client)
async def test_a_look_up_that_is_refused_as_a_whole_does_not_stop_the_consumer(
    cluster: VirtualCluster, world: VirtualWorld, /, code: ErrorCode
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=1, replication_factor=3)
    refused: list[Any] = []
    for broker_id in cluster.broker_ids:
        broker = cluster.broker(broker_id)

        async def handle(request: Any, original: Any = broker._handle) -> None:
            if request.api is LIST_OFFSETS and not refused:
                refused.append(request)
                raise BrokerError(code, "refused")
            await original(request)

        broker._handle = handle
    partition = TopicPartition("orders", 0)
    async with Consumer(cluster.bootstrap, partitions=[partition], world=world) as consumer:
        if ERRORS[code].retriable:
            assert await consumer.position(partition) == 0
        else:
            with pytest.raises(BrokerError, match="refused"):
                await anext(consumer)
            consumer.seek_to_beginning(partition)
            assert await consumer.position(partition) == 0
    assert refused


@run_by(with_client)
async def test_offsets_of_an_unknown_partition_are_refused_with_the_number_of_partitions(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("orders", partitions=2, replication_factor=1)
    async with Consumer(cluster.bootstrap, topics=["orders"], default_api_timeout_ms=2_000, world=world) as consumer:
        with pytest.raises(BrokerError, match="finding offsets: orders has no partition 9: its partitions"):
            await consumer.end_offsets([TopicPartition("orders", 9)])
