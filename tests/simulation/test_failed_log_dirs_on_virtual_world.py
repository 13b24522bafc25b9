"""Brokers with two log directories, one of which fails: others lead its replicas, nothing acknowledged is lost, and the
other directory serves on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.protocol import znodes
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.simulation.cluster import VirtualCluster, log_dir
from tests.simulation.loop import run
from tests.simulation.world import Simulation

TOPIC = "orders"
PARTITIONS = 6
WITHIN_S = 3
"""A leader whose directory fails is replaced in this time."""


async def _cluster(brokers: int = 3, replicas: int = 3) -> VirtualCluster:
    """One topic, of whose replicas each broker has half in each of its two directories."""
    cluster = VirtualCluster(Simulation(), brokers=brokers, log_dirs=2)
    await cluster.start()
    await _create(cluster, TOPIC, replicas)
    return cluster


async def _create(cluster: VirtualCluster, topic: str, replicas: int = 3, partitions: int = PARTITIONS) -> None:
    world = cluster.client("admin")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic(topic, partitions=partitions, replication_factor=replicas)

    await world.process.run(create())
    await cluster.until(
        lambda: all(_home(cluster, b, p) for p in _partitions(topic, partitions) for b in _isr(cluster, p))
    )


def _partitions(topic: str = TOPIC, count: int = PARTITIONS) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


def _isr(cluster: VirtualCluster, partition: TopicPartition) -> tuple[int, ...]:
    return cluster.state(partition).isr


def _home(cluster: VirtualCluster, broker_id: int, partition: TopicPartition) -> str | None:
    """The directory in which the broker has the partition."""
    log = cluster.broker(broker_id)._logs.get(partition)
    return None if log is None else log.path.rpartition("/")[0]


def _in(cluster: VirtualCluster, broker_id: int, number: int, topic: str = TOPIC) -> list[TopicPartition]:
    return [p for p in _partitions(topic) if _home(cluster, broker_id, p) == log_dir(number)]


def _leaders(cluster: VirtualCluster) -> dict[TopicPartition, int]:
    return {partition: cluster.state(partition).leader for partition in _partitions()}


async def _send(cluster: VirtualCluster, first: int, count: int, topic: str = TOPIC) -> None:
    """To every partition; returns once all are acknowledged."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(first, first + count):
                await asyncio.gather(*(producer.send(topic, b"%d" % number, partition=p) for p in range(PARTITIONS)))

    await world.process.run(produce())


async def _assert_all_read(cluster: VirtualCluster, count: int) -> None:
    world = cluster.client("consumer")

    async def consume() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            async for record in consumer:
                found[record.partition].append(int(record.value or b""))
                if all(len(set(values)) >= count for values in found.values()):
                    break
        return found

    async with asyncio.timeout(120):
        found = await world.process.run(consume())
    for values in found.values():
        assert sorted(set(values)) == list(range(count))


async def _whole(cluster: VirtualCluster, partitions: list[TopicPartition] | None = None) -> None:
    """Wait until all replicas are in sync, in epochs in which they have lost nothing since."""

    def all_trusted() -> bool:
        for partition in partitions or _partitions():
            state = cluster.state(partition)
            trusted = [epoch >= cluster.broker(b)._logs.trusted_since for b, epoch in state.in_sync_members]
            if len(trusted) < len(cluster.broker_ids) or not all(trusted) or state.leader == NO_LEADER:
                return False
        return True

    await cluster.until(all_trusted)


def _simulate(
    scenario: Callable[[VirtualCluster], Awaitable[None]], seed: int = 0, brokers: int = 3, replicas: int = 3
) -> None:
    async def main() -> None:
        await scenario(await _cluster(brokers, replicas))

    run(main(), seed=seed)


def _notifications(cluster: VirtualCluster) -> list[str]:
    return cluster.simulation.zookeeper.names(znodes.LOG_DIR_EVENTS)


# --- Where replicas go -----------------------------------------------------------------------------------------


def test_new_replicas_go_to_the_directory_with_the_fewest() -> None:
    async def scenario(cluster: VirtualCluster) -> None:
        for broker_id in cluster.broker_ids:
            assert [len(_in(cluster, broker_id, number)) for number in (0, 1)] == [PARTITIONS / 2, PARTITIONS / 2]

    _simulate(scenario)


# --- A directory fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("seed", range(3))
def test_others_lead_what_was_in_the_failed_directory_and_the_rest_is_led_on(error: int, seed: int) -> None:
    async def scenario(cluster: VirtualCluster) -> None:
        await _send(cluster, 0, 10)
        before = _leaders(cluster)
        victim = before[_partitions()[0]]
        failing, healthy = (0, 1) if _home(cluster, victim, _partitions()[0]) == log_dir(0) else (1, 0)
        lost, kept = _in(cluster, victim, failing), _in(cluster, victim, healthy)
        epochs = {p: cluster.state(p).leader_epoch for p in _partitions()}
        cluster.break_log_dir(victim, failing, error)
        sending = asyncio.ensure_future(_send(cluster, 10, 20))
        await cluster.until(lambda: all(cluster.state(p).leader not in (victim, NO_LEADER) for p in lost), WITHIN_S)
        await sending
        await cluster.until(lambda: all(victim not in cluster.state(p).isr for p in lost))
        for partition in kept:
            assert cluster.state(partition).leader == before[partition]
            assert cluster.state(partition).leader_epoch == epochs[partition]
            assert victim in cluster.state(partition).isr
        assert list(cluster.broker(victim)._logs.offline) == [log_dir(failing)]
        assert cluster.living() == list(cluster.broker_ids)
        await cluster.until(lambda: not _notifications(cluster))
        await _assert_all_read(cluster, 30)

    _simulate(scenario, seed)
