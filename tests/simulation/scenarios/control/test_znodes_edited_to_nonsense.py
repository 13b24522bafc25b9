"""Znodes edited by hand to invalid values: the problem is reported, and the cluster recovers once it is corrected."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.errors import PartitionErrors
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, replicas_of

P0 = TopicPartition("orders", 0)
PATH = znodes.topic_path("orders")


async def _started() -> tuple[VirtualCluster, int]:
    """Return a cluster with a topic that has a partition for each broker, and a broker that is not the controller."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    await as_admin(cluster, lambda admin: admin.create_topic("orders", partitions=3, replication_factor=2))
    await asyncio.sleep(1)
    return cluster, next(b for b in cluster.broker_ids if b not in cluster.active_controllers())


async def _refused(cluster: VirtualCluster, action: Callable[[Admin], Awaitable[object]]) -> str:
    with pytest.raises(MinibrokerError) as refused:
        await as_admin(cluster, action)
    error = refused.value
    return str(error.errors[P0]) if isinstance(error, PartitionErrors) else str(error)


@pytest.mark.parametrize("nonsense", [b"", b"garbage", b'{"partitions":{"0":[]}}'])
@run_by(on_virtual_loop, seed=1)
async def test_the_active_controller_restores_a_topic_znode_edited_to_nonsense(nonsense: bytes) -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper
    before = zookeeper.data(PATH)
    zookeeper.make(PATH, nonsense)
    await cluster.until(lambda: zookeeper.data(PATH) == before, within_s=5)
    cluster.kill_broker(cluster.active_controllers()[0])
    await as_admin(cluster, lambda admin: admin.create_partitions("orders", 4))


@run_by(on_virtual_loop, seed=1)
async def test_a_reassignment_survives_an_invalid_edit_of_its_topic_znode() -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper

    def znode() -> znodes.TopicZnode:
        return znodes.decode_topic("orders", zookeeper.data(PATH))

    target = next(b for b in cluster.broker_ids if b not in znode().partitions[0])
    asking = asyncio.create_task(as_admin(cluster, lambda admin: admin.alter_partition_reassignments({P0: [target]})))
    while not znode().assignment(0).is_being_reassigned:
        await asyncio.sleep(0.0002)
    zookeeper.make(PATH, b"garbage")
    await asking
    await cluster.until(lambda: cluster.state(P0).isr == (target,))
    await cluster.until(lambda: zookeeper.data(PATH) != b"garbage" and znode().partitions[0] == (target,))
    await asyncio.sleep(1)
    assert not znode().assignment(0).is_being_reassigned


@run_by(on_virtual_loop, seed=1)
async def test_requests_for_a_topic_the_controller_cannot_read_say_what_to_write_to_which_znode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper
    [controller] = cluster.active_controllers()
    cluster.kill_broker(controller)
    zookeeper.make(PATH, b"garbage")
    await cluster.start_broker(controller)
    await cluster.until(lambda: len(cluster.active_controllers()) == 1)
    await asyncio.sleep(5)
    told = [
        await _refused(cluster, action)
        for action in (
            lambda admin: admin.delete_topic("orders"),
            lambda admin: admin.create_topic("orders"),
            lambda admin: admin.create_partitions("orders", 5),
            lambda admin: admin.alter_partition_reassignments({P0: cluster.broker_ids}),
        )
    ]
    for text in told:
        assert f"the znode {PATH} holds b'garbage'" in text
        assert '{"partitions":{"0":[' in text
    assert sum("topic orders is ignored" in record.message for record in caplog.records) == 1
    found = re.search(r"as in (\{.*\}), with all replicas", told[0])
    assert found is not None
    zookeeper.make(PATH, found[1].encode())
    await cluster.until(lambda: zookeeper.has(znodes.state_path(P0)) and cluster.state(P0).leader >= 0)
    await as_admin(cluster, lambda admin: admin.delete_topic("orders"))
    assert await as_admin(cluster, lambda admin: admin.list_topics()) == []
    await as_admin(cluster, lambda admin: admin.create_topic("orders", partitions=1))


@run_by(on_virtual_loop, seed=1)
async def test_an_unreadable_topic_is_named_though_nothing_else_of_it_is_known() -> None:
    cluster, _ = await _started()
    cluster.simulation.zookeeper.make(znodes.topic_path("other"), b"garbage")
    await asyncio.sleep(1)
    with pytest.raises(BrokerError, match="topic 'other' cannot be deleted.*/brokers/topics/other.*correct it"):
        await as_admin(cluster, lambda admin: admin.delete_topic("other"))
    cluster.simulation.zookeeper.remove(znodes.topic_path("other"))
    await as_admin(cluster, lambda admin: admin.create_topic("other"))


# --- A topic's settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
@run_by(on_virtual_loop, seed=1)
async def test_brokers_that_start_with_invalid_topic_settings_lead_and_follow_once_corrected(
    by_hand: bool,
) -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper
    path = znodes.topic_config_path("orders")
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    zookeeper.make(path, znodes.encode_config({"segment.bytes": "lots"}))
    for broker_id in cluster.broker_ids:
        await cluster.start_broker(broker_id)
    await asyncio.sleep(5)
    assert not _serves(cluster)
    if by_hand:
        zookeeper.make(path, znodes.encode_config({}))
    else:
        mended = {ConfigResource.of_topic("orders"): [ConfigChange.set("segment.bytes", "5000")]}
        await as_admin(cluster, lambda admin: admin.incremental_alter_configs(mended))
    await cluster.until(lambda: _serves(cluster), within_s=15 if by_hand else 3)


@run_by(on_virtual_loop, seed=1)
async def test_brokers_that_start_serve_a_topic_with_an_unknown_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, _ = await _started()
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    edited = {"no.such": "secret", "segment.bytes": "5000"}
    cluster.simulation.zookeeper.make(znodes.topic_config_path("orders"), znodes.encode_config(edited))
    for broker_id in cluster.broker_ids:
        await cluster.start_broker(broker_id)
    await cluster.until(lambda: _serves(cluster), within_s=15)
    replicas = replicas_of(cluster, cluster.state(P0).leader)
    assert (replica := replicas.partitions.get(P0)) is not None
    assert replica.log.config.segment_bytes == 5_000
    lines = [r.getMessage() for r in caplog.records if "'no.such'" in r.getMessage()]
    assert len(lines) == len(cluster.broker_ids), "one line for each broker"
    assert "secret" not in "".join(lines)
    orders = ConfigResource.of_topic("orders")
    described = await as_admin(cluster, lambda admin: admin.describe_configs([orders]))
    assert isinstance(described, dict)
    assert described[orders]["no.such"].problem is None


@pytest.mark.parametrize("after_s", [0.0, 0.034, 0.036, 0.04, 0.06])
@run_by(on_virtual_loop, seed=1)
async def test_topic_settings_corrected_while_a_broker_starts_do_not_cost_it_a_replica(after_s: float) -> None:
    cluster, victim = await _started()
    zookeeper = cluster.simulation.zookeeper
    path = znodes.topic_config_path("orders")
    cluster.kill_broker(victim)
    zookeeper.make(path, znodes.encode_config({"segment.bytes": "lots"}))
    starting = asyncio.create_task(cluster.start_broker(victim))
    await cluster.until(lambda: zookeeper.has(znodes.broker_path(victim)))
    await asyncio.sleep(after_s)
    zookeeper.make(path, znodes.encode_config({"segment.bytes": "5000"}))
    zookeeper.make(f"{znodes.CONFIG_CHANGE_PREFIX}x", znodes.encode_config_change(path))
    await starting
    await cluster.until(lambda: _serves(cluster), within_s=20)


def _serves(cluster: VirtualCluster) -> bool:
    """Return whether all replicas exist, are in sync, and are led by the broker that ZooKeeper names."""
    return all(_is_served(cluster, TopicPartition("orders", index)) for index in range(3))


def _is_served(cluster: VirtualCluster, partition: TopicPartition) -> bool:
    state = cluster.state(partition)
    replicas = [cluster.broker(b)._replicas for b in state.isr]
    held = [None if replica is None else replica.partitions.get(partition) for replica in replicas]
    return len(state.isr) == 2 and all(one is not None and one.leader_id == state.leader for one in held)


# --- A partition's state ---------------------------------------------------------------------------------------


@run_by(on_virtual_loop, seed=1)
async def test_a_partition_with_an_invalid_state_at_a_failover_is_led_once_it_is_corrected() -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    path = znodes.state_path(P0)
    before = zookeeper.data(path)
    zookeeper.make(path, b"garbage")
    for broker_id in cluster.broker_ids:
        await cluster.start_broker(broker_id)
    await asyncio.sleep(5)
    zookeeper.make(path, b"still garbage")
    await asyncio.sleep(1)
    zookeeper.make(path, before)
    await cluster.until(lambda: _serves(cluster), within_s=15)


@pytest.mark.parametrize(
    ("field", "nonsense"), [("min_insync_replicas", 2**70), ("leader_epoch", 2**31 + 5), ("controller_epoch", 2**20)]
)
@run_by(on_virtual_loop, seed=1)
async def test_a_number_out_of_range_in_one_partitions_state_affects_no_other_partition(
    field: str, nonsense: int
) -> None:
    cluster, _ = await _started()
    zookeeper = cluster.simulation.zookeeper
    path = znodes.state_path(P0)
    before = zookeeper.data(path)
    zookeeper.make(path, json.dumps(json.loads(before) | {field: nonsense}).encode())
    [controller] = cluster.active_controllers()
    cluster.kill_broker(controller)
    others = [TopicPartition("orders", 1), TopicPartition("orders", 2)]
    await cluster.until(lambda: all(cluster.state(p).leader not in (controller, NO_LEADER) for p in others))
    await cluster.start_broker(controller)
    await cluster.until(lambda: all(_is_served(cluster, p) for p in others), within_s=15)
    assert len(cluster.active_controllers()) == 1
    zookeeper.make(path, before)
    await cluster.until(lambda: _serves(cluster), within_s=15)


@run_by(on_virtual_loop, seed=1)
async def test_a_broker_with_an_invalid_registration_is_known_once_it_is_corrected() -> None:
    cluster, victim = await _started()
    zookeeper = cluster.simulation.zookeeper
    [controller] = cluster.active_controllers()
    path = znodes.broker_path(victim)
    before = zookeeper.data(path)
    zookeeper.make(path, b"garbage")
    cluster.kill_broker(controller)
    await cluster.start_broker(controller)
    await asyncio.sleep(5)
    zookeeper.make(path, before)
    await cluster.until(lambda: _serves(cluster), within_s=15)
