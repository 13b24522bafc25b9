"""Compacted topics: the records that all replicas keep and clients read, even if brokers die during compaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from minibroker.broker.storage.compaction.cleanable import Cleanable
from minibroker.broker.storage.log import Log
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster, host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import decode_batch, iterate_batches
from tests.running import run_by
from tests.simulation.mutants import planted
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client
from tests.simulation.seeds import every_seed

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
OFTEN = {
    "log.cleaner.backoff.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "log.flush.offset.checkpoint.interval.ms": "1000",
}
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "1000", "min.cleanable.dirty.ratio": "0.1"}
KEYS = 5

Program = Callable[[VirtualCluster, VirtualWorld], Awaitable[None]]


def with_topic(
    program: Program,
    configs: dict[str, str] | None = None,
    settings: dict[str, str] | None = None,
    *,
    partitions: int = 1,
    seed: int = 1,
) -> None:
    all_configs = COMPACTED | (configs or {})
    topic = {"name": "orders", "partitions": partitions, "replication_factor": 3, "configs": all_configs}
    with_client(program, topic, settings=OFTEN | (settings or {}), seed=seed)


async def produce(
    cluster: VirtualCluster,
    world: VirtualWorld,
    count: int,
    *,
    start: int = 0,
    partition: int = 0,
    tombstones: bool = False,
) -> dict[bytes, bytes | None]:
    """Send each record in a batch of its own, and return the latest value of each key."""
    latest: dict[bytes, bytes | None] = {}
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(start, start + count):
            key, value = b"key-%d" % (number % KEYS), None if tombstones else b"%d" % number
            latest[key] = value
            await producer.send("orders", value, key=key, partition=partition)
    return latest


async def table(cluster: VirtualCluster, world: VirtualWorld, partition: TopicPartition = P0) -> dict[bytes, bytes]:
    """Return the table of keys and values that a consumer builds from the beginning of the topic."""
    found: dict[bytes, bytes] = {}
    async with Consumer(
        cluster.bootstrap, partitions=[partition], auto_offset_reset="earliest", world=world
    ) as consumer:
        [end] = (await consumer.end_offsets([partition])).values()
        batches = consumer.batches()
        while await consumer.position(partition) < end:
            try:
                async with asyncio.timeout(1):
                    batch = await anext(batches)
            except TimeoutError:
                continue  # a batch without records
            for key, value in zip(batch.keys or (), batch.values, strict=True):
                assert key is not None
                found.pop(key, None)
                if value is not None:
                    found[key] = value
    return found


def has_replica(cluster: VirtualCluster, broker_id: int) -> bool:
    replicas = cluster.broker(broker_id)._replicas
    return replicas is not None and replicas.partitions.get(P0) is not None


def records(cluster: VirtualCluster, broker_id: int, partition: TopicPartition = P0) -> int:
    """Return the number of records that a replica still has."""
    log = replica_of(cluster, broker_id, partition).log
    data = log.read(log.log_start_offset, 1 << 30, log.log_end_offset)
    total = 0
    offset = log.log_start_offset
    while offset < log.log_end_offset and data:
        for header, _, _ in iterate_batches(data):
            total += header.records_count
            offset = header.next_offset
        data = log.read(offset, 1 << 30, log.log_end_offset)
    return total


def is_clean(cluster: VirtualCluster, broker_id: int, partition: TopicPartition = P0) -> bool:
    """Return whether all but the active segment is compacted."""
    log = replica_of(cluster, broker_id, partition).log
    return log.first_dirty_offset == log.extents()[-1].base_offset > 0


async def until_led_by_another(cluster: VirtualCluster, broker_id: int) -> None:
    await cluster.until(lambda: cluster.state(P0).leader not in (broker_id, -1))


def in_sync(cluster: VirtualCluster) -> bool:
    return len(cluster.state(P0).isr) == 3


async def until_clean(cluster: VirtualCluster) -> None:
    await cluster.until(lambda: all(is_clean(cluster, broker_id) for broker_id in cluster.living()))


@run_by(with_topic)
async def test_all_replicas_keep_the_latest_record_of_each_key_at_its_offset(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    latest = await produce(cluster, world, 60)
    await until_clean(cluster)
    for broker_id in cluster.broker_ids:
        extents = replica_of(cluster, broker_id, P0).log.extents()
        assert records(cluster, broker_id) <= KEYS + extents[-1].end_offset - extents[-1].base_offset
        assert extents[0].base_offset == 0
        assert extents[-1].end_offset == 60
    assert await table(cluster, world) == latest
    async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
        read = [await anext(consumer) for _ in range(KEYS)]
        assert all(record.value == b"%d" % record.offset for record in read)
    assert in_sync(cluster)


@every_seed(range(1, 6))
@run_by(with_topic)
async def test_the_next_leader_and_the_returning_broker_have_the_latest_record_of_each_key(
    cluster: VirtualCluster, world: VirtualWorld, /, seed: int
) -> None:
    latest: dict[bytes, bytes | None] = {}
    for round_number in range(3):
        latest |= await produce(cluster, world, 40, start=40 * round_number)
        leader = cluster.state(P0).leader
        if seed % 2:
            await until_clean(cluster)
        else:
            await asyncio.sleep(0.1 * seed)
        cluster.kill_broker(leader)
        await until_led_by_another(cluster, leader)
        latest |= await produce(cluster, world, 10, start=1_000 * (round_number + 1))
        assert await table(cluster, world) == latest
        await cluster.start_broker(leader)
        await cluster.until(lambda: in_sync(cluster))
    await until_clean(cluster)
    assert await table(cluster, world) == latest


@pytest.mark.slow
@every_seed(range(1, 4))
@run_by(with_topic)
async def test_kills_and_power_cuts_during_compaction_cost_no_replica_a_keys_latest_record(
    cluster: VirtualCluster, world: VirtualWorld, /, seed: int
) -> None:
    dice = Random(seed)
    acknowledged: dict[bytes, int] = {}
    sent: dict[bytes, int] = {}
    is_over = False

    async def write() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            while not is_over:
                key = b"key-%d" % dice.randrange(2 * KEYS)
                sent[key] = sent.get(key, 0) + 1
                await producer.send("orders", b"%d" % sent[key], key=key, partition=0)
                acknowledged[key] = sent[key]
                await asyncio.sleep(0.02)

    writing = asyncio.get_running_loop().create_task(write())
    for _ in range(6):
        await asyncio.sleep(dice.uniform(0.5, 3))
        broker_id = dice.choice(cluster.broker_ids)
        (cluster.kill_broker if dice.random() < 0.5 else cluster.power_cut)(broker_id)
        await asyncio.sleep(dice.uniform(0.1, 2))
        await cluster.start_broker(broker_id)
        await cluster.until(lambda: in_sync(cluster) and all(has_replica(cluster, b) for b in cluster.broker_ids))
    is_over = True
    await writing
    await until_clean(cluster)
    assert acknowledged == sent
    for broker_id in cluster.broker_ids:
        assert latest_in(cluster, broker_id) == acknowledged
        assert replicas_of(cluster, broker_id).cleaner.uncleanable == 0
    assert {key: int(value) for key, value in (await table(cluster, world)).items()} == acknowledged


def latest_in(cluster: VirtualCluster, broker_id: int) -> dict[bytes, int]:
    """Return the latest value of each key in a replica."""
    log = replica_of(cluster, broker_id, P0).log
    latest: dict[bytes, int] = {}
    for segment in log._segments:
        data = segment.file.pread(segment.size, 0)
        for header, start, _ in iterate_batches(data):
            batch = decode_batch(data, header, start)
            records = zip(batch.keys or (), batch.values, strict=False)
            latest.update((key or b"", int(value or 0)) for key, value in records)
    return latest


@run_by(with_topic)
async def test_an_empty_replica_copies_a_log_with_gaps(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    latest = await produce(cluster, world, 60)
    await until_clean(cluster)
    follower = next(b for b in cluster.broker_ids if b != cluster.state(P0).leader)
    await cluster.stop_broker(follower)
    empty_host(cluster, follower)
    await cluster.start_broker(follower)
    await cluster.until(lambda: has_replica(cluster, follower) and in_sync(cluster))
    assert replica_of(cluster, follower, P0).log.log_end_offset == 60
    assert records(cluster, follower) < 60
    assert everything(cluster, follower).count(b"key-") < 60
    for broker_id in cluster.broker_ids:
        if broker_id != follower:
            await cluster.stop_broker(broker_id)
    await cluster.until(lambda: cluster.state(P0).leader == follower)
    assert await table(cluster, world) == latest


def empty_host(cluster: VirtualCluster, broker_id: int) -> None:
    disk = cluster.simulation.host(host_name(broker_id)).disk
    disk.directory(LOG_DIR).change({str(P0): None})


@run_by(with_topic, configs={"delete.retention.ms": "60000"})
async def test_a_deleted_key_stays_gone_after_its_tombstone_is_removed(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 40)
    await produce(cluster, world, 3 * KEYS, start=40, tombstones=True)
    await until_clean(cluster)
    before = [records(cluster, broker_id) for broker_id in cluster.broker_ids]
    assert min(before) >= KEYS  # the tombstones are still there
    await asyncio.sleep(70)
    others = await produce_other_keys(cluster, world, 40)
    await until_clean(cluster)
    await asyncio.sleep(70)
    others |= await produce_other_keys(cluster, world, 40)
    await until_clean(cluster)
    assert await table(cluster, world) == others
    for broker_id in cluster.broker_ids:
        assert b"key-" not in everything(cluster, broker_id)
    # A consumer skips batches that have no records any more.
    async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
        assert (await anext(consumer)).key in others


async def a_clock_runs_ahead(cluster: VirtualCluster, world: VirtualWorld) -> None:
    """Run one clock ahead until the log is compacted twice; a consumer has read up to the tombstones before."""
    await produce(cluster, world, KEYS)
    await produce(cluster, world, KEYS, start=KEYS, tombstones=True)
    await until_clean_again(cluster, world)
    hosts = [cluster.simulation.host(host_name(broker_id)) for broker_id in cluster.broker_ids]
    for ahead_ms in (2 * 86_400_000, 0):
        for host in hosts:
            host.clock_offset_ms = ahead_ms
        await until_clean_again(cluster, world)
    for broker_id in cluster.broker_ids:
        assert b"key-" in everything(cluster, broker_id)


async def until_clean_again(cluster: VirtualCluster, world: VirtualWorld) -> None:
    await produce_other_keys(cluster, world, 40)
    await until_clean(cluster)


def test_a_clock_that_runs_ahead_for_a_while_takes_no_tombstone_early() -> None:
    with_topic(a_clock_runs_ahead, {"delete.retention.ms": "3600000"})


def test_by_the_wall_clock_tombstones_would_go_early() -> None:
    with planted("tombstones-by-the-wall-clock"), pytest.raises(AssertionError, match="key-"):
        with_topic(a_clock_runs_ahead, {"delete.retention.ms": "3600000"})


async def produce_other_keys(cluster: VirtualCluster, world: VirtualWorld, count: int) -> dict[bytes, bytes]:
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(count):
            await producer.send("orders", b"v", key=b"other-%d" % (number % 3), partition=0)
    return {b"other-%d" % number: b"v" for number in range(3)}


def everything(cluster: VirtualCluster, broker_id: int) -> bytes:
    log = replica_of(cluster, broker_id, P0).log
    return b"".join(segment.file.pread(segment.size, 0) for segment in log._segments)


@run_by(with_topic)
async def test_a_record_without_a_key_is_refused_with_the_reason(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    async with Producer(cluster.bootstrap, world=world) as producer:
        with pytest.raises(BrokerError, match="without a key, and the topic is compacted") as refused:
            await producer.send("orders", b"value", partition=0)
        assert refused.value.code is ErrorCode.INVALID_RECORD
        await producer.send("orders", b"value", key=b"key", partition=0)
    assert await table(cluster, world) == {b"key": b"value"}


def test_a_compacted_log_loses_nothing_to_retention_unless_its_policy_says_so() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world, 60)
        await until_clean(cluster)
        await asyncio.sleep(30)
        assert replica_of(cluster, 0, P0).log.log_start_offset == 0

    with_topic(program, {"retention.ms": "10000", "retention.bytes": "100"})

    async def both(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world, 60)
        await cluster.until(lambda: replica_of(cluster, 0, P0).log.log_start_offset == 60)

    with_topic(both, {"cleanup.policy": "compact,delete", "retention.ms": "10000"})


@run_by(with_topic, configs={"min.compaction.lag.ms": "5000"}, partitions=2)
async def test_an_unreadable_log_is_skipped_and_the_others_are_compacted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 20, partition=0)
    log = replica_of(cluster, 0, P0).log
    assert len(log.extents()) > 1
    cluster.simulation.host(host_name(0)).disk.rot(log._segments[0].path, 100, 3)
    await produce(cluster, world, 60, partition=0)
    await produce(cluster, world, 60, partition=1)
    await cluster.until(lambda: all(is_clean(cluster, broker_id, P1) for broker_id in cluster.broker_ids))
    await cluster.until(lambda: is_clean(cluster, 1) and is_clean(cluster, 2))
    assert replicas_of(cluster, 0).cleaner.uncleanable == 1
    assert not is_clean(cluster, 0)


@run_by(with_topic, configs={"min.compaction.lag.ms": "5000"}, partitions=2)
async def test_the_cleaner_waits_for_its_back_off_while_no_file_can_be_opened(
    cluster: VirtualCluster, world: VirtualWorld, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[TopicPartition] = []

    for partition in (P0, P1):
        await produce(cluster, world, 60, partition=partition.partition)
    await asyncio.sleep(1)
    faults = cluster.simulation.host(host_name(0)).disk.faults
    before, faults.descriptor_limit = faults.descriptor_limit, cluster.broker(0)._world.disk.descriptors().files
    cleaner = replicas_of(cluster, 0).cleaner
    compact = cleaner._compact

    async def counted(log: Log, what: Cleanable) -> bool:
        tried.append(log.partition)
        return await compact(log, what)

    monkeypatch.setattr(cleaner, "_compact", counted)
    await asyncio.sleep(10)
    assert cleaner.passes == 0
    assert set(tried) == {P0, P1}, "one log that is short of something does not hold up the others"
    assert len(tried) <= 2 * 10 / 0.5
    faults.descriptor_limit = before
    await cluster.until(lambda: all(is_clean(cluster, 0, p) for p in (P0, P1)))


@run_by(with_topic)
async def test_a_restarted_broker_knows_how_far_the_log_was_compacted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 60)
    await until_clean(cluster)
    await asyncio.sleep(1)  # for the checkpoint
    before = replica_of(cluster, 0, P0).log.first_dirty_offset
    cluster.kill_broker(0)
    await cluster.start_broker(0)
    await cluster.until(lambda: has_replica(cluster, 0))
    await asyncio.sleep(5)
    assert replica_of(cluster, 0, P0).log.first_dirty_offset == before
    assert replicas_of(cluster, 0).cleaner.passes == 0
