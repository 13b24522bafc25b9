"""Retention: old records are deleted on all replicas, and readers that missed some learn how many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import ProducePartition, ProduceRequest, ProduceTopic
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, encode_batch, parse_header
from minibroker.protocol.records.header import write_header
from tests.running import run_by
from tests.simulation.scenarios.helpers import replica_of, replicas_of, with_client

P0 = TopicPartition("orders", 0)
SMALL = {"segment.bytes": "1000"}
OFTEN = {
    "log.retention.check.interval.ms": "1000",
    "log.flush.offset.checkpoint.interval.ms": "1000",
}


def with_topic(
    program: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]],
    configs: dict[str, str],
    settings: dict[str, str],
) -> None:
    topic = {"name": "orders", "partitions": 1, "replication_factor": 3, "configs": SMALL | configs}
    with_client(program, topic, settings=OFTEN | settings)


async def produce(cluster: VirtualCluster, world: VirtualWorld, count: int, timestamp_ms: int | None = None) -> None:
    """Send each record in a batch of its own, of about 170 bytes."""
    async with Producer(cluster.bootstrap, world=world) as producer:
        for _ in range(count):
            await producer.send("orders", b"x" * 100, partition=0, timestamp_ms=timestamp_ms)


def starts(cluster: VirtualCluster) -> list[int]:
    return [replica_of(cluster, broker_id, P0).log.log_start_offset for broker_id in cluster.broker_ids]


def sizes(cluster: VirtualCluster) -> list[int]:
    return [replica_of(cluster, broker_id, P0).log.size for broker_id in cluster.broker_ids]


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({"retention.ms": "1000", "segment.ms": "1000"}, "older than retention.ms=1000"),
        ({"retention.bytes": "3000"}, "more than retention.bytes=3000"),
    ],
)
def test_the_leader_logs_one_line_per_retention_with_amount_and_reason(
    configs: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world, 30)
        await asyncio.sleep(20)
        assert starts(cluster)[0] > 0

    with caplog.at_level(logging.INFO, "minibroker.replication"):
        with_topic(program, configs, {})
    lines = [line for line in caplog.messages if "retention" in line]
    assert 1 <= len(lines) <= 3, lines
    assert lines[0].startswith("orders-0: retention deletes offsets 0 to ")
    assert f"): {why}; the log begins at offset " in lines[0]


def test_the_deletion_of_records_on_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        await produce(cluster, world, 30)
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.delete_records({P0: 12})

    with caplog.at_level(logging.INFO, "minibroker.replication"):
        with_topic(program, {}, {})
    (line,) = (line for line in caplog.messages if "on request" in line)
    assert line == "orders-0: deletes records 0 to 11 on request"


@run_by(with_topic, configs={"retention.bytes": "3000"}, settings={})
async def test_all_replicas_keep_retention_bytes_and_begin_at_one_offset(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 60)
    await cluster.until(lambda: len(set(starts(cluster))) == 1 and starts(cluster)[0] > 0)
    await cluster.until(lambda: all(3_000 <= size < 5_000 for size in sizes(cluster)))
    before = starts(cluster)
    await asyncio.sleep(5)
    assert starts(cluster) == before
    async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
        assert await consumer.beginning_offsets([P0]) == {P0: before[0]}
        assert [(await anext(consumer)).offset for _ in range(60 - before[0])] == list(range(before[0], 60))


@run_by(with_topic, configs={"retention.ms": "10000"}, settings={})
async def test_records_older_than_retention_ms_are_deleted_even_from_the_active_segment(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 20)
    await asyncio.sleep(5)
    assert starts(cluster) == [0, 0, 0]
    await cluster.until(lambda: starts(cluster) == [20, 20, 20] and sizes(cluster) == [0, 0, 0])
    await produce(cluster, world, 3)
    async with Consumer(cluster.bootstrap, partitions=[P0], world=world) as consumer:
        assert (await anext(consumer)).offset == 20


@pytest.mark.parametrize("largest", [-1, 0])
@run_by(with_topic, configs={"retention.ms": "10000"}, settings={})
async def test_records_without_a_timestamp_age_from_their_append_time(
    cluster: VirtualCluster, world: VirtualWorld, /, largest: int
) -> None:
    """librdkafka sends 0 as the largest timestamp of a batch without timestamps."""

    sent = encode_batch([b"x"], timestamps=[-1], magic=MAGIC_RECORDS)
    header = msgspec.structs.replace(parse_header(sent), max_timestamp=largest)
    records = memoryview(write_header(sent, header))
    leader = cluster.state(P0).leader
    client = await open_connection(world.network, host_name(leader), PORT, client_id="test", timeout_s=5)
    produce = ProduceRequest(None, -1, 5_000, [ProduceTopic(P0.topic, [ProducePartition(0, records)])])
    answer = await client.send(apis.PRODUCE, produce, timeout_s=5)
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    client.close()
    await asyncio.sleep(8)
    assert starts(cluster) == [0, 0, 0]
    async with Consumer(cluster.bootstrap, partitions=[P0], auto_offset_reset="earliest", world=world) as consumer:
        assert (await anext(consumer)).timestamp_ms == -1
        assert await consumer.offsets_for_times({P0: 0}) == {P0: None}
    await cluster.until(lambda: starts(cluster) == [1, 1, 1], within_s=5)


@run_by(with_topic, configs={"retention.bytes": "1000"}, settings={"zookeeper.session.timeout.ms": "60000"})
async def test_retention_deletes_no_uncommitted_records(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    leader = cluster.state(P0).leader
    await produce(cluster, world, 20)
    for broker_id in cluster.broker_ids:
        if broker_id != leader:
            cluster.pause_broker(broker_id)
    async with Producer(cluster.bootstrap, world=world, acks=1) as producer:
        for _ in range(40):
            await producer.send("orders", b"x" * 100, partition=0)
    await asyncio.sleep(10)
    replica = replica_of(cluster, leader, P0)
    assert replica.log.log_start_offset <= replica.high_watermark == 20
    assert replica.log.log_end_offset == 60
    for broker_id in cluster.broker_ids:
        if broker_id != leader:
            cluster.resume_broker(broker_id)
    await cluster.until(lambda: min(starts(cluster)) > 20)


@pytest.mark.parametrize("reset", ["earliest", "none"])
@run_by(with_topic, configs={"retention.bytes": "1000"}, settings={})
async def test_a_consumer_overtaken_by_retention_logs_how_much_it_missed(
    cluster: VirtualCluster, world: VirtualWorld, /, reset: str, caplog: pytest.LogCaptureFixture
) -> None:
    await produce(cluster, world, 60)
    await cluster.until(lambda: min(starts(cluster)) > 5)
    begins = starts(cluster)[0]
    async with Consumer(
        cluster.bootstrap,
        partitions=[P0],
        auto_offset_reset=reset,  # type: ignore[arg-type]
        world=world,
    ) as consumer:
        consumer.seek(P0, 5)
        if reset == "none":
            with pytest.raises(BrokerError, match=f"at offset 5; the log is {begins} to 60") as raised:
                await anext(consumer)
            assert raised.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
            return
        with caplog.at_level(logging.WARNING, "minibroker.client"):
            assert (await anext(consumer)).offset == begins
        assert f"{begins - 5} records of orders-0 were deleted unread" in caplog.text


@run_by(with_topic, configs={"retention.bytes": "1000"}, settings={})
async def test_a_returning_replica_starts_over_if_the_records_it_lacks_were_deleted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await produce(cluster, world, 3)
    leader = cluster.state(P0).leader
    away = next(broker_id for broker_id in cluster.broker_ids if broker_id != leader)
    cluster.kill_broker(away)
    await produce(cluster, world, 60)
    await cluster.until(lambda: replica_of(cluster, leader, P0).log.log_start_offset > 20)
    await cluster.start_broker(away)
    await cluster.until(lambda: len(cluster.state(P0).isr) == 3)
    await cluster.until(lambda: len(set(starts(cluster))) == 1)
    assert replica_of(cluster, away, P0).log.log_end_offset == 63


@run_by(with_topic, configs={"retention.bytes": "1000"}, settings={})
async def test_a_leader_that_may_be_deposed_deletes_nothing(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    leader = cluster.state(P0).leader
    replica = replica_of(cluster, leader, P0)
    replica._may_be_deposed = lambda told_in_broker_epoch: True
    await produce(cluster, world, 60)
    await asyncio.sleep(10)
    assert starts(cluster) == [0, 0, 0]


@run_by(with_topic, configs={"segment.ms": "5000", "retention.ms": "-1"}, settings={})
async def test_a_log_begins_a_segment_when_its_records_are_far_apart_in_time(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    now_ms = world.clock.wall_ms()
    for later_ms in (0, 4_000, 5_001, 6_000, 10_002):
        await produce(cluster, world, 1, now_ms + later_ms)
    log = replica_of(cluster, cluster.state(P0).leader, P0).log
    assert [extent.base_offset for extent in log.extents()] == [0, 2, 4]


@run_by(on_virtual_loop)
async def test_a_partition_that_is_deleted_while_retention_looks_at_others_is_left_alone() -> None:
    cluster = VirtualCluster(Simulation(), brokers=1)
    await cluster.start()
    world = cluster.client("client")

    async def client() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("first", partitions=1, replication_factor=1)
            await admin.create_topic("second", partitions=1, replication_factor=1)

    await world.process.run(client())
    replicas = replicas_of(cluster, 0)
    looking = asyncio.create_task(replicas._retention.run_once(LOG_DIR))
    await asyncio.sleep(0)  # until the first partition has been handled
    second = replicas.partitions.pop(TopicPartition("second", 0))
    await second.log.close()
    await looking
