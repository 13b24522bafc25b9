"""A broker that does not know yet that a deletion setting has changed must not delete by the old value."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Check, Operation
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client

P0 = TopicPartition("orders", 0)
ORDERS = ConfigResource.of_topic("orders")
ALL = ConfigResource.of_all_brokers()
OFTEN = {
    "log.cleaner.backoff.ms": "100",
    "log.retention.check.interval.ms": "500",
    "log.flush.offset.checkpoint.interval.ms": "500",
    "zookeeper.session.timeout.ms": "30000",
}
SMALL = {"segment.bytes": "1000", "min.cleanable.dirty.ratio": "0.01"}
SYNC = Check(znodes.TOPICS, -1)
COMPACT = {"cleanup.policy": "compact"}

Scenario = Callable[[VirtualCluster, VirtualWorld, Admin], Awaitable[None]]
HoldBack = Callable[[VirtualCluster, int], Awaitable[None]]


def play(scenario: Scenario, configs: Mapping[str, str], settings: Mapping[str, str] | None = None) -> None:
    """Run the scenario with broker 0 as the topic's leader and another one as the controller."""

    async def client(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", assignments=[(0, 1, 2)], configs={**SMALL, **configs})
            await scenario(cluster, world, admin)

    with_client(client, settings={**OFTEN, **(settings or {})}, seed=1)


async def cut_off(cluster: VirtualCluster, broker_id: int) -> None:
    """Cut the broker off from ZooKeeper for less than its session timeout."""
    cluster.simulation.zookeeper.cut(host_name(broker_id))


async def served_by_a_server_that_is_behind(cluster: VirtualCluster, broker_id: int) -> None:
    zookeeper = cluster.simulation.zookeeper
    zookeeper.lag(host_name(broker_id), 5.0)
    zookeeper.lose_connections(host_name(broker_id))
    await cluster.until(lambda: zookeeper.stale_sessions(host_name(broker_id)))


async def far_away(cluster: VirtualCluster, broker_id: int) -> None:
    cluster.simulation.zookeeper.slow_hosts[host_name(broker_id)] = 5.0, 5.0


def let_hear(cluster: VirtualCluster, broker_id: int) -> None:
    host, zookeeper = host_name(broker_id), cluster.simulation.zookeeper
    zookeeper.uncut(host)
    zookeeper.slow_hosts.pop(host, None)
    if zookeeper.is_lagging(host):
        zookeeper.unlag(host)


HELD_BACK = [cut_off, served_by_a_server_that_is_behind, far_away]


async def produce(cluster: VirtualCluster, world: VirtualWorld, values: Sequence[int]) -> None:
    """Send each value in a batch of its own with acks=all, with one of two keys."""
    async with Producer(cluster.bootstrap, world=world) as producer:
        for value in values:
            await producer.send("orders", b"%d" % value + b" " * 50, key=b"%d" % (value % 2), partition=0)


async def read_all(cluster: VirtualCluster, world: VirtualWorld) -> list[int]:
    found: list[int] = []
    async with Consumer(cluster.bootstrap, partitions=[P0], auto_offset_reset="earliest", world=world) as consumer:
        [end] = (await consumer.end_offsets([P0])).values()
        async for record in consumer:
            found.append(int(record.value or b"-1"))
            if record.offset == end - 1:
                return found
    raise AssertionError


def set_to(name: str, value: str) -> ConfigChange:
    return ConfigChange.set(name, value)


# --- Compaction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold_back", HELD_BACK)
@pytest.mark.parametrize("of_topic", [True, False])
def test_a_replica_with_an_outdated_cleanup_policy_compacts_nothing(hold_back: HoldBack, of_topic: bool) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        await hold_back(cluster, 1)
        policy = {ORDERS: [set_to("cleanup.policy", "delete")]} if of_topic else {ALL: [_delete_by_default()]}
        await admin.incremental_alter_configs(policy)
        await cluster.until(lambda: not replica_of(cluster, 0, P0).log.config.compact)
        await produce(cluster, world, range(60))
        assert replica_of(cluster, 1, P0).log.config.compact
        await asyncio.sleep(2)
        assert cluster.state(P0).isr == (0, 1, 2)
        let_hear(cluster, 1)
        cluster.kill_broker(0)
        await cluster.until(lambda: cluster.state(P0).leader == 1)
        assert await read_all(cluster, world) == list(range(60))

    play(scenario, COMPACT if of_topic else {}, {} if of_topic else {"log.cleanup.policy": "compact"})


def _delete_by_default() -> ConfigChange:
    return set_to("log.cleanup.policy", "delete")


# --- Retention -------------------------------------------------------------------------------------------------

RAISED: dict[str, tuple[dict[str, str], dict[str, str], ConfigResource, ConfigChange]] = {
    "the topic's time": ({"retention.ms": "1000"}, {}, ORDERS, set_to("retention.ms", "-1")),
    "the topic's size": ({"retention.bytes": "1"}, {}, ORDERS, set_to("retention.bytes", "-1")),
    "the topic's policy": ({"retention.bytes": "1"}, {}, ORDERS, set_to("cleanup.policy", "compact")),
    "the brokers' time": ({}, {"log.retention.ms": "1000"}, ALL, set_to("log.retention.ms", "-1")),
    "the brokers' size": ({}, {"log.retention.bytes": "1"}, ALL, set_to("log.retention.bytes", "-1")),
}


@pytest.mark.parametrize("hold_back", HELD_BACK)
@pytest.mark.parametrize("raised", RAISED)
def test_a_leader_with_an_outdated_retention_deletes_nothing(raised: str, hold_back: HoldBack) -> None:
    configs, settings, resource, change = RAISED[raised]

    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        await hold_back(cluster, 0)
        before = replica_of(cluster, 0, P0).log.config
        await admin.incremental_alter_configs({resource: [change]})
        await produce(cluster, world, range(60))
        await asyncio.sleep(2)
        assert replica_of(cluster, 0, P0).log.config == before
        assert cluster.state(P0).leader == 0
        let_hear(cluster, 0)
        await asyncio.sleep(2)
        assert replica_of(cluster, 0, P0).log.log_start_offset == 0

    play(scenario, {"min.cleanable.dirty.ratio": "1", **configs}, settings)


@pytest.mark.parametrize("resource", [ORDERS, ALL])
def test_unreadable_settings_stop_deletion_until_they_are_corrected(resource: ConfigResource) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        path = znodes.topic_config_path("orders") if resource == ORDERS else znodes.broker_config_path(None)
        cluster.simulation.zookeeper.make(path, b"garbage")  # without a notification
        await produce(cluster, world, range(60))
        await asyncio.sleep(3)
        assert replica_of(cluster, 0, P0).log.log_start_offset == 0
        assert all(replica_of(cluster, broker_id, P0).log.first_dirty_offset == 0 for broker_id in cluster.broker_ids)
        cluster.simulation.zookeeper.make(path, znodes.encode_config({} if resource == ALL else both))
        await cluster.until(lambda: replica_of(cluster, 0, P0).log.log_start_offset == 60)

    both = {"cleanup.policy": "compact,delete", "retention.ms": "1000", **SMALL}
    play(scenario, both)


# --- While ZooKeeper's answer is in flight ---------------------------------------------------------------------


@pytest.mark.parametrize("configs", [COMPACT, {"retention.bytes": "1"}])
def test_records_written_after_the_settings_were_read_are_not_deleted_by_them(
    configs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compacted = configs == COMPACT
    waits = 1 if is_compacted else 0
    has_read, goes_on = asyncio.Event(), asyncio.Event()
    read = ReplicaSettings.with_present_settings

    async def read_and_wait(self: ReplicaSettings, partitions: Sequence[Partition]) -> list[Partition]:
        found = await read(self, partitions)
        if self._config.broker_id == waits:
            has_read.set()
            await goes_on.wait()
        return found

    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        await produce(cluster, world, range(30))
        await has_read.wait()
        end = replica_of(cluster, waits, P0).log.log_end_offset
        await served_by_a_server_that_is_behind(cluster, waits)
        change = set_to("cleanup.policy", "delete") if is_compacted else set_to("retention.bytes", "-1")
        await admin.incremental_alter_configs({ORDERS: [change]})
        await produce(cluster, world, range(30, 60))
        goes_on.set()
        let_hear(cluster, waits)
        await asyncio.sleep(2)
        log = replica_of(cluster, waits, P0).log
        assert (log.first_dirty_offset if is_compacted else log.log_start_offset) <= end

    monkeypatch.setattr(ReplicaSettings, "with_present_settings", read_and_wait)
    play(scenario, configs)


# --- Cost ------------------------------------------------------------------------------------------------------


@run_by(play, configs={})
async def test_retention_asks_zookeeper_once_per_round_and_not_at_all_without_work(
    cluster: VirtualCluster, world: VirtualWorld, admin: Admin, /
) -> None:
    asked = 0

    def count(session: VirtualSession, operations: Sequence[Operation]) -> None:
        nonlocal asked
        asked += operations == [SYNC] and session.owner.startswith(host_name(0))

    await asyncio.sleep(10)  # until the cluster has formed and its leaders are balanced
    await admin.create_topic("others", assignments=[(0,)] * 20, configs=SMALL | {"retention.ms": "2000"})
    async with Producer(cluster.bootstrap, world=world) as producer:
        for partition in range(20):
            await producer.send("others", b"x", partition=partition)
    cluster.simulation.zookeeper.before = count
    await asyncio.sleep(1)
    assert asked == 0
    replicas = replicas_of(cluster, 0)
    others = [p.log for p in replicas.partitions.values() if p.topic_partition.topic == "others"]
    await cluster.until(lambda: all(log.log_start_offset == 1 for log in others))
    assert 1 <= asked <= 2
    await asyncio.sleep(5)
    assert asked <= 2
