"""Orders and requests that arrive late over an abandoned connection, and reads from a ZooKeeper server that is
behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, TypeVar

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.administering.topics import NewTopic
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.apis import ALTER_PARTITION_REASSIGNMENTS, INCREMENTAL_ALTER_CONFIGS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import as_admin, replicas_of
from tests.simulation.storms.faults.operations_configs import late_change
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm

T = TypeVar("T")
P = TopicPartition("orders", 0)


async def _started() -> tuple[VirtualCluster, int, int, int]:
    """Return a cluster, its controller, and the other two brokers."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    await asyncio.sleep(2)
    [controller] = cluster.active_controllers()
    one, other = (broker_id for broker_id in cluster.broker_ids if broker_id != controller)
    return cluster, controller, one, other


async def _alive_after_a_late_order(leader_knows: list[list[int]]) -> None:
    """Append which brokers the leader considers alive, each answer once, while a late order arrives."""
    cluster, controller, leader, follower = await _started()
    network = cluster.simulation.network
    await as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[leader, follower, controller]]))
    await asyncio.sleep(2)
    network.delay_standing(host_name(controller), host_name(leader), 6.0)
    cluster.kill_broker(follower)
    await cluster.until(lambda: follower not in cluster.state(P).isr)
    await asyncio.sleep(7)  # LeaderAndIsr is late as well; after it UpdateMetadata is in flight
    network.reset_at(host_name(controller), host_name(leader))
    await asyncio.sleep(1)
    await cluster.start_broker(follower)
    metadata = cluster.broker(leader)._metadata

    def alive() -> list[int]:
        return [b for b in cluster.broker_ids if metadata.alive_epoch(b) is not None]

    await cluster.until(lambda: alive() == list(cluster.broker_ids))
    for _ in range(800):  # the bytes of the abandoned connection arrive, and a later order may make up for them
        if alive() not in leader_knows:
            leader_knows.append(alive())
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_late_metadata_does_not_replace_newer(seed: int) -> None:
    leader_knows: list[list[int]] = []
    run(_alive_after_a_late_order(leader_knows), seed=seed)
    assert leader_knows == [[0, 1, 2]]


def test_the_mutant_of_late_orders_makes_that_fail() -> None:
    leader_knows: list[list[int]] = []
    with planted("late-order-carried-out"):
        run(_alive_after_a_late_order(leader_knows), seed=1)
    assert leader_knows != [[0, 1, 2]]


@pytest.mark.parametrize("seed", [1, 2])
@run_by(on_virtual_loop)
async def test_a_late_creation_does_not_bring_a_deleted_topic_back(seed: int) -> None:
    cluster, controller, _, _ = await _started()
    network, zookeeper = cluster.simulation.network, cluster.simulation.zookeeper

    async def create_and_delete(admin: Admin) -> None:
        await admin.create_topic("another")  # opens a connection to the controller
        network.delay_standing("admin", host_name(controller), 8.0)
        creating = asyncio.ensure_future(admin.create_topic("orders", partitions=1, replication_factor=3))
        await asyncio.sleep(0.2)
        network.reset_at("admin", host_name(controller))
        await creating
        await admin.delete_topic("orders")
        await cluster.until(lambda: not zookeeper.has(znodes.topic_path("orders")))
        await asyncio.sleep(30)
        assert await admin.list_topics() == ["another"]
        await admin.create_topic("orders")  # a new request is executed

    await as_admin(cluster, create_and_delete)


async def _min_insync_replicas_of_a_leader_that_reads_late(found: list[int]) -> None:
    cluster, _, leader, follower = await _started()
    zookeeper = cluster.simulation.zookeeper
    zookeeper.lag(host_name(leader), 1.0)
    await asyncio.sleep(2)
    zookeeper.lose_connections(host_name(leader))
    await cluster.until(lambda: zookeeper.stale_sessions(host_name(leader)))
    await as_admin(
        cluster,
        lambda admin: admin.create_topic(
            "orders", assignments=[[leader, follower]], configs={"min.insync.replicas": "2"}
        ),
    )
    replicas = replicas_of(cluster, leader)
    await cluster.until(lambda: replicas.partitions.get(P) is not None)
    partition = replicas.partitions.get(P)
    assert partition is not None
    found.append(partition.min_insync_replicas)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_broker_with_a_lagging_zookeeper_server_knows_the_settings_of_a_new_topic(seed: int) -> None:
    found: list[int] = []
    run(_min_insync_replicas_of_a_leader_that_reads_late(found), seed=seed)
    assert found == [2]


def test_the_mutant_of_stale_settings_makes_that_fail() -> None:
    found: list[int] = []
    with planted("settings-of-a-server-that-is-behind"):
        run(_min_insync_replicas_of_a_leader_that_reads_late(found), seed=1)
    assert found == [1]


@pytest.mark.parametrize("seed", [1, 2])
@run_by(on_virtual_loop)
async def test_a_producer_sees_all_partitions_of_a_topic_that_is_being_created_or_none(
    seed: int,
) -> None:
    """The controller settles new partitions in slices of 200."""

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
    await as_admin(cluster, create)
    await producing
    assert partitions == [449] * 30


@run_by(on_virtual_loop, seed=1)
async def test_a_name_that_stays_taken_names_the_broker_it_waits_for() -> None:
    cluster, _, one, _ = await _started()

    async def delete_and_create(admin: Admin) -> str:
        await admin.create_topic("orders", partitions=1, replication_factor=3)
        cluster.kill_broker(one)
        await cluster.until(lambda: one not in cluster.state(P).isr)
        deleting = asyncio.create_task(admin.delete_topic("orders"))
        await asyncio.sleep(1)
        with pytest.raises(BrokerError, match="still being deleted") as caught:
            await admin.create_topic("orders", partitions=1, replication_factor=2)
        with pytest.raises(BrokerError) as timed_out:
            await deleting
        assert timed_out.value.code is ErrorCode.REQUEST_TIMED_OUT
        return f"{caught.value}; {timed_out.value}"

    told = await as_admin(cluster, delete_and_create)
    assert told.count(f"its replicas on broker {one} cannot be reached") == 2


# --- Administrators' changes ------------------------------------------------------------------------------------------


_Ask = Callable[[Admin, int], Awaitable[object]]
_Way = Callable[[_Ask, _Ask, str], Coroutine[Any, Any, tuple[bytes, bytes]]]


async def _after_a_broker_was_stopped(ask: _Ask, then: _Ask, path: str) -> tuple[bytes, bytes]:
    """Leave a request in the socket of a stopped broker (SIGSTOP). Its client retries it at another broker, which
    executes it and then `then`. Both get the controller and one of the two replicas. Return the znode of that path
    before and after the broker resumes."""
    cluster, controller, one, other = await _started()
    network = cluster.simulation.network
    await as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[controller, one]]))
    world = cluster.client("asker")

    async def call() -> None:
        async with Admin(cluster.bootstrap, world=world, request_timeout_ms=2_000) as admin:
            await admin.list_topics()
            for broker_id in (controller, one):
                network.block("asker", host_name(broker_id))
                network.reset("asker", host_name(broker_id))
            await admin.list_topics()  # opens its only connection
            cluster.pause_broker(other)
            asking = asyncio.ensure_future(ask(admin, one))
            await asyncio.sleep(3)
            network.heal()
            await asking

    await world.process.run(call())
    await as_admin(cluster, lambda admin: then(admin, controller))
    await asyncio.sleep(1)
    before = cluster.simulation.zookeeper.data(path)
    cluster.resume_broker(other)
    await asyncio.sleep(10)
    return before, cluster.simulation.zookeeper.data(path)


async def _after_the_network_held_it_back(ask: _Ask, then: _Ask, path: str) -> tuple[bytes, bytes]:
    """Do the same, but delay the data that the client sends to the controller, which then arrives all at once."""
    cluster, controller, one, _ = await _started()
    network = cluster.simulation.network
    await as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[controller, one]]))
    world = cluster.client("asker")

    async def call() -> None:
        async with Admin(cluster.bootstrap, world=world, request_timeout_ms=1_000) as admin:
            await admin.alter_partition_reassignments({P: [controller, one]})  # opens a connection to the controller
            network.block("asker", host_name(controller))
            await ask(admin, one)

    await world.process.run(call())
    await as_admin(cluster, lambda admin: then(admin, controller))
    await asyncio.sleep(1)
    before = cluster.simulation.zookeeper.data(path)
    network.heal()
    await asyncio.sleep(10)
    return before, cluster.simulation.zookeeper.data(path)


async def _after_slow_connections(ask: _Ask, then: _Ask, path: str, *, after_the_look_up: bool) -> tuple[bytes, bytes]:
    """Do the same, but slow down each segment of the connection, so that the broker does not know that the client is
    gone when its request arrives. With `after_the_look_up` it turns slow once the first request for the change has
    arrived."""
    cluster, controller, one, _ = await _started()
    network = cluster.simulation.network
    await as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[controller, one]]))
    world = cluster.client("asker")

    async def call() -> None:
        async with Admin(cluster.bootstrap, world=world, request_timeout_ms=1_000) as admin:
            await admin.describe_log_dirs()  # opens connections to all brokers

            def slow_down(arrival: Arrival | None = None) -> None:
                if arrival is None or (arrival.source == "asker" and request_key(arrival.data) in _CHANGES):
                    for broker_id in cluster.broker_ids:
                        network.delay_standing("asker", host_name(broker_id), 8.0)
                    network.taps.clear()

            if after_the_look_up:
                network.taps.append(slow_down)
            else:
                slow_down()
            await ask(admin, one)
            await then(admin, controller)

    await world.process.run(call())
    await asyncio.sleep(1)
    before = cluster.simulation.zookeeper.data(path)
    await asyncio.sleep(20)
    return before, cluster.simulation.zookeeper.data(path)


_CHANGES = {ALTER_PARTITION_REASSIGNMENTS.key, INCREMENTAL_ALTER_CONFIGS.key}
_WAYS: list[_Way] = [
    _after_a_broker_was_stopped,
    _after_the_network_held_it_back,
    partial(_after_slow_connections, after_the_look_up=False),
    partial(_after_slow_connections, after_the_look_up=True),
]


def _change_settings(way: _Way) -> tuple[bytes, bytes]:
    def at_least(number: int) -> _Ask:
        change = {ConfigResource.of_topic("orders"): [ConfigChange.set("min.insync.replicas", number)]}
        return lambda admin, _: admin.incremental_alter_configs(change)

    return run(way(at_least(1), at_least(2), znodes.topic_config_path("orders")), seed=1)


def _reassign(way: _Way) -> tuple[bytes, bytes]:
    def to(admin: Admin, broker_id: int) -> Awaitable[object]:
        return admin.alter_partition_reassignments({P: [broker_id]})

    return run(way(to, to, znodes.topic_path("orders")), seed=1)


@pytest.mark.parametrize("way", _WAYS)
def test_a_late_change_of_settings_does_not_undo_a_newer_one(way: _Way) -> None:
    before, after = _change_settings(way)
    assert before == after


@pytest.mark.parametrize("way", _WAYS)
def test_a_late_reassignment_does_not_undo_a_newer_one(way: _Way) -> None:
    before, after = _reassign(way)
    assert before == after


@pytest.mark.parametrize("change", [_change_settings, _reassign])
def test_the_mutant_of_late_changes_makes_that_fail(change: Callable[[_Way], tuple[bytes, bytes]]) -> None:
    with planted("late-change-carried-out"):
        before, after = change(_WAYS[-1])
    assert before != after


@run_by(on_virtual_loop, seed=1)
async def test_a_late_unclean_election_costs_no_records() -> None:
    cluster, controller, one, other = await _started()
    network = cluster.simulation.network
    await as_admin(cluster, lambda admin: admin.create_topic("orders", assignments=[[one, other]]))
    world = cluster.client("asker")

    async def only_one_is_in_sync_and_dies() -> None:
        cluster.kill_broker(other)
        await cluster.until(lambda: cluster.state(P).isr == (one,))
        cluster.kill_broker(one)
        await cluster.until(lambda: cluster.state(P).leader == -1)
        await cluster.start_broker(other)

    async def call() -> None:
        async with Admin(cluster.bootstrap, world=world, request_timeout_ms=1_000) as admin:
            await admin.elect_leaders("preferred", [P])  # opens a connection to the controller
            await only_one_is_in_sync_and_dies()
            network.block("asker", host_name(controller))
            await admin.elect_leaders("unclean", [P])

    await world.process.run(call())
    assert cluster.state(P).leader == other
    await cluster.start_broker(one)
    await cluster.until(lambda: set(cluster.state(P).isr) == {one, other})
    await only_one_is_in_sync_and_dies()
    network.heal()
    await asyncio.sleep(10)
    assert cluster.state(P).leader == -1
    await cluster.start_broker(one)
    await cluster.until(lambda: cluster.state(P).leader == one)


def _accused_by_late_changes() -> set[str]:
    """Return the anomalies that the storms' fault of late changes finds in a cluster without other faults."""
    report = Report(seed=1)

    async def main() -> None:
        storm = Storm(report, Random(1))
        await storm.cluster.start()
        topics = [NewTopic(topic, 1, 1) for topic in sorted({partition.topic for partition in storm.partitions})]
        await as_admin(storm.cluster, lambda admin: admin.create_topics(topics))
        for _ in range(6):
            await late_change(storm)

    run(main(), seed=1)
    assert report.events["late change: a newer one was granted"] == 6
    return {anomaly.kind for anomaly in report.anomalies}


def test_the_late_changes_of_a_storm_find_that_mutant_and_nothing_without_it() -> None:
    assert _accused_by_late_changes() == set()
    with planted("late-change-carried-out"):
        assert _accused_by_late_changes() == {"a late change"}
