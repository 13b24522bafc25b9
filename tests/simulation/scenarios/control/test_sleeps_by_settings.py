"""A task that sleeps for the duration of a setting wakes up when the setting changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client

P0 = TopicPartition("orders", 0)
ALL = ConfigResource.of_all_brokers()
ORDERS = ConfigResource.of_topic("orders")
SOON_S = 5
"""Seconds within which a task must react; its sleep would last for a quarter of an hour or more."""
LONG_MS = "1000000"

Scenario = Callable[[VirtualCluster, VirtualWorld, Admin], Awaitable[None]]


def play(scenario: Scenario, *, settings: Mapping[str, str], configs: Mapping[str, str] | None = None) -> None:
    async def client(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", assignments=[(0, 1, 2)], configs=configs or {})
            await scenario(cluster, world, admin)

    with_client(client, settings=settings, seed=1)


async def produce(cluster: VirtualCluster, world: VirtualWorld, count: int) -> None:
    """Send each record in a batch of its own, with about 1,000 bytes and one of three keys."""
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(count):
            await producer.send("orders", b"x" * 900, key=b"%d" % (number % 3), partition=0)


@pytest.mark.parametrize("side", ["leader", "follower"])
@pytest.mark.parametrize(
    "changes",
    [
        {ALL: [ConfigChange.delete("{side}.replication.throttled.rate")]},
        {ALL: [ConfigChange.set("{side}.replication.throttled.rate", 10_000_000)]},
        {ORDERS: [ConfigChange.delete("{side}.replication.throttled.replicas")]},
    ],
    ids=["removed", "raised", "no longer of this topic"],
)
def test_a_throttled_replica_continues_at_once_when_its_throttle_is_loosened(
    side: str, changes: dict[ConfigResource, list[ConfigChange]]
) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        rate = ConfigChange.set(f"{side}.replication.throttled.rate", 100)
        await admin.incremental_alter_configs({ALL: [rate]})
        cluster.kill_broker(2)
        await cluster.until(lambda: 2 not in cluster.state(P0).isr)
        await produce(cluster, world, 250)
        await cluster.start_broker(2)
        partition = replicas_of(cluster, 2).partitions.get
        await cluster.until(lambda: (it := partition(P0)) is not None and it.log.size > 0)
        assert 2 not in cluster.state(P0).isr
        named = {
            resource: [c._replace(name=c.name.format(side=side)) for c in each] for resource, each in changes.items()
        }
        await admin.incremental_alter_configs(named)
        await cluster.until(lambda: 2 in cluster.state(P0).isr, within_s=SOON_S)

    play(
        scenario,
        settings={
            "replica.fetch.max.bytes": "100000",
            "replica.lag.time.max.ms": "3000",
            # More replicas than brokers, so the topic is not created: its fetches would wake the fetcher.
            "offsets.topic.replication.factor": "9",
        },
        configs={f"{side}.replication.throttled.replicas": "*"},
    )


def is_clean(cluster: VirtualCluster, broker_id: int) -> bool:
    partition = replica_of(cluster, broker_id, P0)
    return partition.log.first_dirty_offset == partition.log.extents()[-1].base_offset > 0


COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "5000", "min.cleanable.dirty.ratio": "0.01"}


@pytest.mark.parametrize("change", ["removed", "raised"])
def test_a_compaction_continues_at_once_when_its_rate_is_raised(change: str) -> None:
    name = "log.cleaner.io.max.bytes.per.second"

    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        await admin.incremental_alter_configs({ALL: [ConfigChange.set(name, 10)]})
        await produce(cluster, world, 30)
        await cluster.until(lambda: all(replicas_of(cluster, b).cleaner._done_bytes > 0 for b in cluster.broker_ids))
        assert not any(is_clean(cluster, broker_id) for broker_id in cluster.broker_ids)
        loosened = ConfigChange.delete(name) if change == "removed" else ConfigChange.set(name, 10_000_000)
        await admin.incremental_alter_configs({ALL: [loosened]})
        await cluster.until(lambda: all(is_clean(cluster, b) for b in cluster.broker_ids), within_s=SOON_S)

    settings = {"log.cleaner.backoff.ms": "100", "log.flush.offset.checkpoint.interval.ms": "500"}
    play(scenario, settings=settings, configs=COMPACTED)


@pytest.mark.parametrize("backoff_ms", ["0", "500"])
def test_the_cleaner_follows_a_shorter_back_off_at_once_and_0_does_not_starve_other_tasks(backoff_ms: str) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        await produce(cluster, world, 30)
        await admin.incremental_alter_configs({ALL: [ConfigChange.set("log.cleaner.backoff.ms", backoff_ms)]})
        await cluster.until(lambda: all(is_clean(cluster, b) for b in cluster.broker_ids), within_s=SOON_S)

    settings = {"log.cleaner.backoff.ms": LONG_MS, "log.flush.offset.checkpoint.interval.ms": "500"}
    play(scenario, settings=settings, configs=COMPACTED)


@run_by(
    play,
    settings={"log.retention.check.interval.ms": LONG_MS},
    configs={"retention.bytes": "5000", "segment.bytes": "2000"},
)
async def test_retention_follows_a_shorter_interval_at_once(
    cluster: VirtualCluster, world: VirtualWorld, admin: Admin, /
) -> None:
    await produce(cluster, world, 30)
    name = "log.retention.check.interval.ms"
    await admin.incremental_alter_configs({ALL: [ConfigChange.set(name, "500")]})
    partition = replica_of(cluster, 0, P0)
    await cluster.until(lambda: partition.log.log_start_offset > 0, within_s=SOON_S)


@pytest.mark.parametrize("setting", ["flush.ms", "flush.messages"])
def test_a_log_is_flushed_at_once_when_its_topics_interval_is_shortened(setting: str) -> None:
    async def scenario(cluster: VirtualCluster, world: VirtualWorld, admin: Admin) -> None:
        partition = replica_of(cluster, 0, P0)
        log = partition.log
        await produce(cluster, world, 2)
        await asyncio.sleep(SOON_S)
        assert log.recovery_point == 0
        await admin.incremental_alter_configs({ORDERS: [ConfigChange.set(setting, 3)]})
        if setting == "flush.messages":
            await produce(cluster, world, 1)
        await cluster.until(lambda: log.recovery_point == log.log_end_offset, within_s=SOON_S)
        for _ in range(3):
            await produce(cluster, world, 3)
            await cluster.until(lambda: log.recovery_point == log.log_end_offset, within_s=SOON_S)

    settings = {"log.flush.offset.checkpoint.interval.ms": LONG_MS, "log.flush.interval.ms": LONG_MS}
    play(scenario, settings=settings)
