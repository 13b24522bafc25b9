"""Orders and requests that come by a connection that was given up, and what is read from a ZooKeeper that is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from tests.simulation.cluster import VirtualCluster, host_name
from tests.simulation.loop import run
from tests.simulation.mutants import planted
from tests.simulation.world import Simulation

T = TypeVar("T")
P = TopicPartition("orders", 0)


async def _started() -> tuple[VirtualCluster, int, int, int]:
    """A cluster, its controller, and the other two brokers."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    await asyncio.sleep(2)
    [controller] = cluster.active_controllers()
    one, other = (broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    return cluster, controller, one, other


async def _as_admin(cluster: VirtualCluster, do: Callable[[Admin], Awaitable[T]]) -> T:
    world = cluster.client("admin")

    async def call() -> T:
        async with Admin(cluster.bootstrap, world=world) as admin:
            return await do(admin)

    return await world.process.run(call())


async def _alive_after_a_late_order(leader_knows: list[list[int]]) -> None:
    cluster, controller, leader, follower = await _started()
    network = cluster.simulation.network
    await _as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[leader, follower, controller]]))
    await asyncio.sleep(2)
    network.delay_standing(host_name(controller), host_name(leader), 6.0)
    cluster.kill_broker(follower)
    await cluster.until(lambda: follower not in cluster.state(P).isr)
    await asyncio.sleep(7)  # the LeaderAndIsr is late, too; then the UpdateMetadata is on its way
    network.reset_at(host_name(controller), host_name(leader))
    await asyncio.sleep(1)
    await cluster.start_broker(follower)
    await asyncio.sleep(8)  # by now the bytes of the connection that was given up have come
    metadata = cluster.broker(leader)._metadata
    leader_knows.append([b for b in cluster.broker_ids if metadata.alive_epoch(b) is not None])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_metadata_that_comes_late_does_not_replace_newer(seed: int) -> None:
    leader_knows: list[list[int]] = []
    run(_alive_after_a_late_order(leader_knows), seed=seed)
    assert leader_knows == [[0, 1, 2]]


def test_the_mutant_of_late_orders_makes_that_fail() -> None:
    leader_knows: list[list[int]] = []
    with planted("late-order-carried-out"):
        run(_alive_after_a_late_order(leader_knows), seed=1)
    assert leader_knows != [[0, 1, 2]]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_creation_that_comes_late_does_not_bring_a_deleted_topic_back(seed: int) -> None:
    async def scenario() -> None:
        cluster, controller, _, _ = await _started()
        network, zookeeper = cluster.simulation.network, cluster.simulation.zookeeper

        async def create_and_delete(admin: Admin) -> None:
            await admin.create_topic("another")  # now there is a connection to the controller
            network.delay_standing("admin", host_name(controller), 8.0)
            creating = asyncio.ensure_future(admin.create_topic("orders", partitions=1, replication_factor=3))
            await asyncio.sleep(0.2)
            network.reset_at("admin", host_name(controller))
            await creating
            await admin.delete_topic("orders")
            await cluster.until(lambda: not zookeeper.has(znodes.topic_path("orders")))
            await asyncio.sleep(30)
            assert await admin.list_topics() == ["another"]
            await admin.create_topic("orders")  # a new request is another matter

        await _as_admin(cluster, create_and_delete)

    run(scenario(), seed=seed)


async def _min_insync_replicas_of_a_leader_that_reads_late(found: list[int]) -> None:
    cluster, _, leader, follower = await _started()
    zookeeper = cluster.simulation.zookeeper
    zookeeper.lag(host_name(leader), 1.0)
    await asyncio.sleep(2)
    zookeeper.lose_connections(host_name(leader))
    await cluster.until(lambda: zookeeper.stale_sessions(host_name(leader)))
    await _as_admin(
        cluster,
        lambda admin: admin.create_topic(
            "orders", assignments=[[leader, follower]], configs={"min.insync.replicas": "2"}
        ),
    )
    replicas = cluster.broker(leader)._replicas
    assert replicas is not None
    await cluster.until(lambda: replicas.partition(P) is not None)
    partition = replicas.partition(P)
    assert partition is not None
    found.append(partition.min_insync_replicas)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_broker_whose_zookeeper_server_is_behind_knows_the_settings_of_a_new_topic(seed: int) -> None:
    found: list[int] = []
    run(_min_insync_replicas_of_a_leader_that_reads_late(found), seed=seed)
    assert found == [2]


def test_the_mutant_of_stale_settings_makes_that_fail() -> None:
    found: list[int] = []
    with planted("settings-of-a-server-that-is-behind"):
        run(_min_insync_replicas_of_a_leader_that_reads_late(found), seed=1)
    assert found == [1]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_producer_that_looks_while_a_topic_of_many_partitions_is_created_sees_all_of_them_or_none(seed: int) -> None:
    """They are settled in slices of 200."""

    async def scenario() -> None:
        cluster, _, _, _ = await _started()
        world = cluster.client("producer")
        partitions = []

        async def produce() -> None:
            async with Producer(cluster.bootstrap, world=world) as producer:
                for _ in range(30):
                    metadata = await producer.send("orders", b"value", partition=449)
                    partitions.append(metadata.partition)
                    await asyncio.sleep(0.02)

        async def create(admin: Admin) -> None:
            await admin.create_topic("orders", partitions=450, replication_factor=3)
            assert len((await admin.describe_topic("orders")).partitions) == 450

        producing = asyncio.ensure_future(world.process.run(produce()))
        await _as_admin(cluster, create)
        await producing
        assert partitions == [449] * 30

    run(scenario(), seed=seed)


def test_a_name_that_stays_taken_says_which_broker_it_waits_for() -> None:
    async def scenario() -> None:
        cluster, _, one, _ = await _started()

        async def delete_and_create(admin: Admin) -> str:
            await admin.create_topic("orders", partitions=1, replication_factor=3)
            cluster.kill_broker(one)
            await cluster.until(lambda: one not in cluster.state(P).isr)
            await admin.delete_topic("orders")
            await asyncio.sleep(1)
            with pytest.raises(BrokerError, match="still being deleted") as caught:
                await admin.create_topic("orders", partitions=1, replication_factor=2)
            return str(caught.value)

        assert f"its replicas on broker {one} cannot be reached" in await _as_admin(cluster, delete_and_create)

    run(scenario(), seed=1)
