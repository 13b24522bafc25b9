"""A topic name above the maximum length: each API refuses only that entry, as Kafka does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import connect
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import brokers, configs, data, groups, metadata, topics
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import groups as g
from tests.running import run_by
from tests.simulation.scenarios.clients.test_kafka_dialect import (
    ORDERS,
    about,
    batch,
    fetch,
    to_leader,
    wire,
    with_cluster,
)
from tests.simulation.scenarios.clients.test_kafka_groups_and_admin import GROUP, to_coordinator

LONGEST = 32_000
"""Strings in old versions of Kafka's protocol hold at most 32,767 bytes."""

UNKNOWN, INVALID = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION
TOPIC, BROKER = 2, 4


def codes(answer: Any) -> set[int]:
    """Return all error codes in an answer, at any depth."""
    if isinstance(answer, list):
        return set().union(*map(codes, answer))
    if not isinstance(answer, msgspec.Struct):
        return set()
    own = {answer.error_code} if hasattr(answer, "error_code") else set()
    return own.union(*(codes(getattr(answer, name)) for name in answer.__struct_fields__))


def for_leader(name: str) -> list[tuple[KafkaApi, int, Any, set[int]]]:
    produced = [m.ProduceTopic(topic, [m.ProducePartition(0, batch(b"a"))]) for topic in (name, ORDERS)]
    fetched = fetch()
    fetched.topics = [*fetch(topic=name).topics, *fetched.topics]
    listed = [m.ListOffsetsTopic(topic, [m.ListOffsetsPartition(0, -1, -1)]) for topic in (name, ORDERS)]
    ends = [m.OffsetForLeaderTopic(topic, [m.OffsetForLeaderPartition(0, -1, 0)]) for topic in (name, ORDERS)]
    deleted = [m.DeleteRecordsTopic(topic, [m.DeleteRecordsPartition(0, 0)]) for topic in (name, ORDERS)]
    described = [m.DescribeProducersTopic(topic, [0]) for topic in (name, ORDERS)]
    return [
        (data.PRODUCE, 3, m.ProduceRequest(None, -1, 5_000, produced), {0, UNKNOWN}),
        (data.PRODUCE, 8, m.ProduceRequest(None, -1, 5_000, produced), {0, UNKNOWN}),
        (data.PRODUCE, 9, m.ProduceRequest(None, -1, 5_000, produced), {0, UNKNOWN}),
        (data.FETCH, 4, fetched, {0, UNKNOWN}),
        (data.FETCH, 12, fetched, {0, UNKNOWN}),
        (data.LIST_OFFSETS, 7, m.ListOffsetsRequest(-1, 0, listed), {0, UNKNOWN}),
        (data.OFFSET_FOR_LEADER_EPOCH, 4, m.OffsetForLeaderEpochRequest(-1, ends), {0, UNKNOWN}),
        (topics.DELETE_RECORDS, 2, m.DeleteRecordsRequest(deleted, 5_000), {0, UNKNOWN}),
        (metadata.DESCRIBE_PRODUCERS, 0, m.DescribeProducersRequest(described), {0, UNKNOWN}),
    ]


def for_anybody(name: str) -> list[tuple[KafkaApi, int, Any, set[int]]]:
    created = m.CreateTopicsRequest([m.CreatableTopic(name, 1, 1)], 5_000, validate_only=True)
    deleted = wire(topics.DELETE_TOPICS, topics=[], topic_names=[name], timeout_ms=5_000)
    grown = m.CreatePartitionsRequest([m.CreatePartitionsTopic(name, 9)], 5_000, validate_only=True)
    described = [m.DescribeConfigsResource(TOPIC, topic) for topic in (name, ORDERS)]
    altered = [m.AlterConfigsResource(TOPIC, topic, []) for topic in (name, ORDERS)]
    replaced = [m.ReplacedConfigs(TOPIC, topic, []) for topic in (name, ORDERS)]
    elected = m.ElectLeadersRequest(0, [m.ElectLeadersTopic(name, [0])], 5_000)
    moved = [m.ReassignableTopic(name, [m.ReassignablePartition(0, [1])])]
    moving = [m.ListPartitionReassignmentsTopic(name, [0])]
    return [
        (metadata.METADATA, 1, about(name, ORDERS), {0, INVALID}),
        (metadata.METADATA, 12, about(name, ORDERS, creates=True), {0, INVALID}),
        (topics.CREATE_TOPICS, 5, created, {INVALID}),
        (topics.DELETE_TOPICS, 5, deleted, {UNKNOWN}),
        (topics.CREATE_PARTITIONS, 3, grown, {UNKNOWN}),
        (configs.DESCRIBE_CONFIGS, 4, m.DescribeConfigsRequest(described), {0, INVALID}),
        (
            configs.INCREMENTAL_ALTER_CONFIGS,
            1,
            m.IncrementalAlterConfigsRequest(altered, validate_only=True),
            {0, INVALID},
        ),
        (configs.ALTER_CONFIGS, 2, m.AlterConfigsRequest(replaced, validate_only=True), {0, INVALID}),
        (topics.ELECT_LEADERS, 2, elected, {0, UNKNOWN}),
        (topics.ALTER_PARTITION_REASSIGNMENTS, 0, m.AlterPartitionReassignmentsRequest(5_000, moved), {0, UNKNOWN}),
        (topics.LIST_PARTITION_REASSIGNMENTS, 0, m.ListPartitionReassignmentsRequest(5_000, moving), {0}),
        (brokers.DESCRIBE_LOG_DIRS, 4, m.DescribeLogDirsRequest([m.DescribableLogDirTopic(name, [0])]), {0}),
    ]


def for_coordinator(name: str) -> list[tuple[KafkaApi, int, Any, set[int]]]:
    topics = [g.OffsetCommitTopic(topic, [g.OffsetCommitPartition(0, 0, -1, "")]) for topic in (name, ORDERS)]
    asked = [g.OffsetFetchTopic(topic, [0]) for topic in (name, ORDERS)]
    fetched = wire(groups.OFFSET_FETCH, group_id=GROUP, topics=asked, groups=[], require_stable=False)
    return [
        (groups.OFFSET_COMMIT, 8, g.OffsetCommitRequest(GROUP, -1, "", None, topics), {0, UNKNOWN}),
        (groups.OFFSET_FETCH, 5, fetched, {0}),
    ]


@pytest.mark.parametrize("length", [250, LONGEST])
@run_by(with_cluster)
async def test_a_name_that_is_too_long_is_refused_only_for_its_entry(
    cluster: VirtualCluster, world: VirtualWorld, /, length: int
) -> None:
    name = "x" * length

    wrong = []
    leader, coordinator = await to_leader(cluster, world), await to_coordinator(world)
    anybody = [await connect(world.network, host_name(broker), PORT) for broker in (0, 1)]
    for connections, requests in (
        ([leader], for_leader(name)),
        (anybody, for_anybody(name)),
        ([coordinator], for_coordinator(name)),
    ):
        for api, version, request, expected in requests:
            for connection in connections:
                answer = await connection.request(api, version, request)
                if codes(answer) != expected:
                    wrong.append((api.name, version, codes(answer), expected))
    assert wrong == []


@run_by(with_cluster)
async def test_a_long_name_is_not_repeated_for_each_partition(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    """A request of a hundred kilobytes would have an answer of a hundred megabytes."""

    connection = await to_leader(cluster, world)
    parts = [m.ProducePartition(index, memoryview(b"")) for index in range(5_000)]
    request = m.ProduceRequest(None, -1, 5_000, [m.ProduceTopic("x" * LONGEST, parts)])
    connection.send(data.PRODUCE, 9, request)
    answer = await connection.frames.get()
    assert len(answer) < LONGEST + 5_000 * 250
