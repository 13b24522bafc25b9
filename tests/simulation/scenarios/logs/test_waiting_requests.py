"""Requests of Kafka's clients that wait: large batches for their check, Metadata for an election."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.refused_batches import REMEMBERED_S
from minibroker.broker.replication.transcoding import MOST_CONVERTED_BYTES
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.administering.topics import NewTopic
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import connect
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Plane
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import data, metadata
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import encode_batch
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.transcoding import as_records, decompressed
from tests.running import run_by
from tests.simulation.scenarios.clients.test_kafka_dialect import (
    ORDERS,
    about,
    codes_of,
    keyed,
    lead_apart_from_the_controller,
    lost,
    of_leader_and_others,
    of_producer,
    produce,
    with_cluster,
)
from tests.simulation.scenarios.helpers import replicas_of


@asynccontextmanager
async def turn_is_taken(replicas: ReplicaManager) -> AsyncIterator[None]:
    """Occupy the check of large batches, as another producer's batch would."""
    async with replicas.appender._check_turns:
        yield


def rests(cluster: VirtualCluster, node: int) -> int:
    server = cluster.broker(node)._server
    assert server is not None
    return len(server.planes[Plane.DATA].pool._continuations)


async def leader_and_replicas(cluster: VirtualCluster, world: VirtualWorld) -> tuple[int, ReplicaManager]:
    leader, _, _ = await of_leader_and_others(cluster, world)
    replicas = replicas_of(cluster, leader)
    return leader, replicas


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_no_later_batch_is_appended_before_one_dropped_because_its_producer_left(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Its producer retries it: if later batches had been appended, it would be out of order for ever."""

    leader, replicas = await leader_and_replicas(cluster, world)
    first, second = memoryview(of_producer(0, 2_000)), memoryview(of_producer(2_000, 1))
    async with turn_is_taken(replicas):
        producer = await connect(world.network, host_name(leader), PORT)
        for records in (first, second):
            producer.send(data.PRODUCE, 9, produce(records))
        await cluster.until(lambda: rests(cluster, leader) == 1)
        producer.close()
        await cluster.until(lambda: rests(cluster, leader) == 0)
    again = await connect(world.network, host_name(leader), PORT)
    for records in (first, second):
        again.send(data.PRODUCE, 9, produce(records))
    assert await codes_of(again, 2) == [ErrorCode.NONE, ErrorCode.NONE]


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_batches_sent_with_a_refused_one_are_not_appended_before_it(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, replicas = await leader_and_replicas(cluster, world)
    producer = await connect(world.network, host_name(leader), PORT)
    first, second = of_producer(0, 2), memoryview(of_producer(2, 2_000))
    damaged = bytearray(first)
    damaged[-1] ^= 1
    async with turn_is_taken(replicas):
        for records in (memoryview(damaged), second, memoryview(first), second):
            producer.send(data.PRODUCE, 9, produce(records))
        await asyncio.sleep(REMEMBERED_S + 1)
    assert await codes_of(producer, 4) == [
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.NONE,
        ErrorCode.NONE,
    ]


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_a_batch_whose_producer_left_does_not_stay_in_memory_until_its_turn(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, replicas = await leader_and_replicas(cluster, world)
    async with turn_is_taken(replicas):
        producer = await connect(world.network, host_name(leader), PORT)
        producer.send(data.PRODUCE, 9, produce(keyed(b"v")))
        await cluster.until(lambda: rests(cluster, leader) == 1)
        producer.close()
        await cluster.until(lambda: rests(cluster, leader) == 0, within_s=3)
    again = await connect(world.network, host_name(leader), PORT)
    again.send(data.PRODUCE, 9, produce(keyed(b"w")))
    assert await codes_of(again, 1) == [ErrorCode.NONE]


@run_by(with_cluster, configs={"cleanup.policy": "compact"})
async def test_a_waiting_batch_is_checked_in_a_thread_if_its_topic_becomes_compacted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, replicas = await leader_and_replicas(cluster, world)
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topics([NewTopic("deleting", assignments=[[leader]])])
        await cluster.until(lambda: replicas.partitions.get(TopicPartition("deleting", 0)) is not None)
        ran: list[TopicPartition] = []
        run = replicas.appender._checks.run

        def noted(call: Any, *args: Any) -> Any:
            ran.append(args[1])
            return run(call, *args)

        replicas.appender._checks.run = noted  # type: ignore[method-assign, assignment]
        producer = await connect(world.network, host_name(leader), PORT)
        topics = [m.ProduceTopic(name, [m.ProducePartition(0, keyed(b"v"))]) for name in ("deleting", ORDERS)]
        async with turn_is_taken(replicas):
            producer.send(data.PRODUCE, 9, m.ProduceRequest(None, -1, 5_000, topics))
            await cluster.until(lambda: rests(cluster, leader) == 1)
            await admin.incremental_alter_configs(
                {ConfigResource.of_topic("deleting"): [ConfigChange.set("cleanup.policy", "compact")]}
            )
            deleting = replicas.partitions.require(TopicPartition("deleting", 0))
            await cluster.until(lambda: deleting.log.config.compact)
        _, answer = await producer.answer(data.PRODUCE, 9)
        assert [topic.partition_responses[0].error_code for topic in answer.responses] == [ErrorCode.NONE] * 2
        assert ran == [TopicPartition(ORDERS, 0), TopicPartition("deleting", 0)]


@run_by(with_cluster, configs={"record.format": "kafka"})
async def test_few_batches_are_transcoded_in_memory_at_once_whatever_the_number_of_producers(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    leader, _, _ = await of_leader_and_others(cluster, world)
    services = cluster.broker(leader)._services
    assert services is not None
    executor = services.transcoder._executor
    run = executor.run
    alive = most = 0

    async def counted(call: Any, *args: Any) -> Any:
        nonlocal alive, most
        alive += call is decompressed
        most = max(most, alive)
        try:
            return await run(call, *args)
        finally:
            alive -= call is as_records

    executor.run = counted  # type: ignore[method-assign, assignment]
    size = 8_000_000
    zeros = encode_batch([bytes(size)], base_timestamp=1_000, compression=Compression.ZSTD)
    producers = [await connect(world.network, host_name(leader), PORT) for _ in range(20)]
    for producer in producers:
        producer.send(data.PRODUCE, 9, produce(memoryview(zeros)))
    for producer in producers:
        assert await codes_of(producer, 1) == [ErrorCode.NONE]
    # Each has its body before the conversion and after it.
    assert 1 < most <= MOST_CONVERTED_BYTES // (2 * size)
    assert alive == 0


@run_by(with_cluster, settings={"auto.create.topics.enable": "true"})
async def test_waiting_metadata_does_not_recreate_a_topic_deleted_meanwhile(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await lead_apart_from_the_controller(cluster, world)
    leader, others, _ = await of_leader_and_others(cluster, world)
    asked = next(other for other in others if other not in cluster.active_controllers())
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topics([NewTopic("brief", assignments=[[asked]])])
        connection = await connect(world.network, host_name(asked), PORT)
        network = cluster.simulation.network
        for source, target in ((asked, leader), (leader, asked)):
            network.block(host_name(source), host_name(target))
        network.reset_at(host_name(asked), host_name(leader))
        await cluster.until(lambda: leader in lost(cluster, asked))
        connection.send(metadata.METADATA, 9, about(ORDERS, "brief", "new", creates=True))
        services = cluster.broker(asked)._services
        assert services is not None
        await cluster.until(lambda: services.topic_purgatory.delayed() == 1)
        await admin.delete_topics(["brief"])
        _, answer = await connection.answer(metadata.METADATA, 9)
        codes = {topic.name: topic.error_code for topic in answer.topics}
        assert codes["brief"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        network.heal()
        await asyncio.sleep(10)
        assert await admin.list_topics() == ["new", ORDERS]
