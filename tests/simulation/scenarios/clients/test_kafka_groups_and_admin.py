"""Old versions and special cases of Kafka's protocol: groups, administration, and batches of columns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import KafkaConnection, connect
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import configs, data, groups, metadata, topics
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, decode_batch, iterate_batches
from minibroker.protocol.topic_ids import make
from tests.running import run_by
from tests.simulation.scenarios.clients.test_kafka_dialect import ORDERS, about, fetch, to_leader, wire, with_cluster

GROUP = "readers"
ORDERS_0 = TopicPartition(ORDERS, 0)


async def to_coordinator(world: VirtualWorld) -> KafkaConnection:
    while True:
        connection = await connect(world.network, host_name(1), PORT)
        asked = wire(metadata.FIND_COORDINATOR, key=GROUP, key_type=0, coordinator_keys=[])
        answer = await connection.request(metadata.FIND_COORDINATOR, 0, asked)
        connection.close()
        if not answer.error_code:
            return await connect(world.network, answer.host, answer.port)
        await asyncio.sleep(0.1)


def join(member_id: str = "") -> g.JoinGroupRequest:
    return g.JoinGroupRequest(GROUP, 10_000, 10_000, member_id, None, "consumer", [g.JoinGroupProtocol("range", b"")])


@pytest.mark.parametrize("version", [0, 3])
@run_by(with_cluster, settings={"group.initial.rebalance.delay.ms": "0"})
async def test_a_member_older_than_kip_394_joins_at_once_commits_and_leaves(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    connection = await to_coordinator(world)
    joined = await connection.request(groups.JOIN_GROUP, version, join())
    while joined.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
        await asyncio.sleep(0.1)
        joined = await connection.request(groups.JOIN_GROUP, version, join())
    assert joined.error_code == ErrorCode.NONE
    assert joined.protocol_name == "range"
    me, generation = joined.member_id, joined.generation_id
    assert (joined.leader, [member.member_id for member in joined.members]) == (me, [me])
    mine = [g.SyncGroupAssignment(me, b"mine")]
    sync = g.SyncGroupRequest(GROUP, generation, me, None, None, None, mine)
    assert (await connection.request(groups.SYNC_GROUP, 0, sync)).assignment == b"mine"

    commit = g.OffsetCommitRequest(
        GROUP, generation, me, None, [g.OffsetCommitTopic(ORDERS, [g.OffsetCommitPartition(0, 5, -1, "")])]
    )
    answer = await connection.request(groups.OFFSET_COMMIT, 2, commit)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE
    asked = wire(
        groups.OFFSET_FETCH,
        group_id=GROUP,
        topics=[g.OffsetFetchTopic(ORDERS, [0])],
        groups=[],
        require_stable=False,
    )
    answer = await connection.request(groups.OFFSET_FETCH, 1, asked)
    assert [p.committed_offset for p in answer.topics[0].partitions] == [5]

    beat = g.HeartbeatRequest(GROUP, generation, me, None)
    assert (await connection.request(groups.HEARTBEAT, 0, beat)).error_code == ErrorCode.NONE
    leave = wire(groups.LEAVE_GROUP, group_id=GROUP, member_id=me, members=[])
    assert (await connection.request(groups.LEAVE_GROUP, 0, leave)).error_code == ErrorCode.NONE
    assert (await connection.request(groups.LEAVE_GROUP, 2, leave)).error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def commit(connection: KafkaConnection, offset: int) -> int:
    """Commit as a client that is not a member; return the error code."""
    request = g.OffsetCommitRequest(
        GROUP, -1, "", None, [g.OffsetCommitTopic(ORDERS, [g.OffsetCommitPartition(0, offset, -1, "")])]
    )
    while True:
        answer: g.OffsetCommitResponse = await connection.request(groups.OFFSET_COMMIT, 2, request)
        code = answer.topics[0].partitions[0].error_code
        if code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            return code
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("offset", [-1, -2, -5])
@run_by(with_cluster, settings={"group.initial.rebalance.delay.ms": "0"})
async def test_a_group_that_was_reset_to_a_negative_offset_begins_by_policy(
    cluster: VirtualCluster, world: VirtualWorld, /, offset: int
) -> None:
    """kafkajs resets a group's offsets by committing -1 or -2."""

    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(3):
            await producer.send(ORDERS, b"%d" % number)
    connection = await to_coordinator(world)
    assert await commit(connection, 2) == ErrorCode.NONE
    assert await commit(connection, offset) == ErrorCode.NONE
    async with Admin(cluster.bootstrap, world=world) as administrator:
        assert await administrator.list_group_offsets(GROUP, [ORDERS_0]) == {ORDERS_0: None}
        assert await administrator.list_group_offsets(GROUP) == {}
    async with Consumer(
        cluster.bootstrap, topics=[ORDERS], group=GROUP, auto_offset_reset="earliest", world=world
    ) as consumer:
        assert (await consumer.committed(ORDERS_0))[ORDERS_0] is None
        assert [record.value for record in await consumer.poll(10_000, 1)] == [b"0"]
        await consumer.commit()
    async with Admin(cluster.bootstrap, world=world) as administrator:
        found = (await administrator.list_group_offsets(GROUP))[ORDERS_0]
        assert found is not None
        assert found.offset == 1


@pytest.mark.parametrize("version", [1, 2, 7, 8])
@run_by(with_cluster)
async def test_not_coordinator_is_reported_in_the_field_that_the_offset_fetch_version_reads(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int
) -> None:
    """Otherwise the client would conclude that the group has committed nothing."""

    coordinator = await to_coordinator(world)
    topics = [g.OffsetFetchTopic(ORDERS, [0])]
    asked = wire(
        groups.OFFSET_FETCH,
        group_id=GROUP if version < 8 else "",
        topics=topics if version < 8 else None,
        groups=[g.OffsetFetchGroup(GROUP, topics)] if version >= 8 else [],
        require_stable=False,
    )
    codes: list[int] = []
    for broker in range(3):
        connection = await connect(world.network, host_name(broker), PORT)
        answer: Any = await connection.request(groups.OFFSET_FETCH, version, asked)
        codes.append(
            answer.topics[0].partitions[0].error_code
            if version == 1
            else answer.error_code
            if version < 8
            else answer.groups[0].error_code
        )
    assert sorted(codes)[1:] == [ErrorCode.NOT_COORDINATOR] * 2
    coordinator.close()


OPERATIONS_ON_TOPIC, OPERATIONS_ON_CLUSTER, OPERATIONS_ON_GROUP = 0xDF8, 0x1FA0, 0x148
"""The operations that Apache Kafka 3.9.1 reports without an authorizer: 8, 7 and 3."""


@pytest.mark.parametrize("asks", [True, False])
@run_by(with_cluster)
async def test_authorized_operations_of_topics_groups_and_the_cluster_are_reported_on_request(
    cluster: VirtualCluster, world: VirtualWorld, /, asks: bool
) -> None:
    def told(operations: int) -> int:
        return operations if asks else m.NO_OPERATIONS

    connection = await to_coordinator(world)
    for version in (8, 10, 11, 12):
        asked = about(ORDERS, "nobody-has-it")
        asked.include_topic_authorized_operations = asks
        asked.include_cluster_authorized_operations = asks
        answer = await connection.request(metadata.METADATA, version, asked)
        found = [topic.topic_authorized_operations for topic in answer.topics]
        assert found == [told(OPERATIONS_ON_TOPIC)] * 2
        of_cluster = told(OPERATIONS_ON_CLUSTER) if version <= 10 else m.NO_OPERATIONS
        assert answer.cluster_authorized_operations == of_cluster
    described = await connection.request(metadata.DESCRIBE_CLUSTER, 1, m.DescribeClusterRequest(1, asks))
    assert described.cluster_authorized_operations == told(OPERATIONS_ON_CLUSTER)
    while True:
        answer = await connection.request(groups.DESCRIBE_GROUPS, 5, g.DescribeGroupsRequest([GROUP], asks))
        if answer.groups[0].error_code == ErrorCode.NONE:
            break
        assert answer.groups[0].authorized_operations == m.NO_OPERATIONS
        await asyncio.sleep(0.1)
    assert answer.groups[0].authorized_operations == told(OPERATIONS_ON_GROUP)


@run_by(with_cluster)
async def test_a_topic_is_deleted_by_its_id_and_no_other(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    known = (await connection.request(metadata.METADATA, 12, about(ORDERS))).topics[0]
    state = topics.DELETE_TOPICS.request.fields[0].type.of.cls  # type: ignore[attr-defined]
    other = make(1, 2, b"others")
    asked = wire(
        topics.DELETE_TOPICS,
        topics=[state(None, known.topic_id), state(None, other)],
        topic_names=[],
        timeout_ms=10_000,
    )
    answer = await connection.request(topics.DELETE_TOPICS, 6, asked)
    found = {result.topic_id: (result.name, result.error_code) for result in answer.responses}
    assert found == {known.topic_id: (ORDERS, ErrorCode.NONE), other: ("", ErrorCode.UNKNOWN_TOPIC_ID)}
    gone = (await connection.request(metadata.METADATA, 12, about(ORDERS))).topics[0]
    assert gone.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@run_by(with_cluster)
async def test_columns_are_fetched_as_records_even_by_a_waiting_fetch(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    connection.send(data.FETCH, 12, fetch(max_wait_ms=20_000))
    async with Producer(cluster.bootstrap, world=world) as producer:
        for number in range(50):
            producer.send(ORDERS, b"%d" % number, key=b"key")
        await producer.flush()
    _, waited = await connection.answer(data.FETCH, 12)
    asked = await connection.request(data.FETCH, 12, fetch())
    for answer in (waited, asked):
        partition = answer.responses[0].partitions[0]
        assert partition.error_code == ErrorCode.NONE
        found: list[bytes | None] = []
        for header, start, _ in iterate_batches(partition.records):
            assert header.magic == MAGIC_RECORDS
            found += decode_batch(partition.records, header, start).values
        assert found == [b"%d" % number for number in range(len(found))]
    assert len(found) == 50


@pytest.mark.parametrize("is_set", [{}, {"durability": "replicated"}], ids=["implied", "set"])
@run_by(with_cluster)
async def test_alter_configs_removes_unnamed_settings_but_keeps_the_durability(
    cluster: VirtualCluster, world: VirtualWorld, /, is_set: dict[str, str]
) -> None:
    """librdkafka sends back the settings that it got from DescribeConfigs."""

    connection = await connect(world.network, host_name(2), PORT)
    path = znodes.topic_config_path(ORDERS)
    zookeeper = cluster.simulation.zookeeper
    zookeeper.make(path, znodes.encode_config(is_set))
    for pairs in (
        [("retention.ms", "1000"), ("segment.bytes", "600"), ("durability", "replicated")],
        [("segment.bytes", "700")],
    ):
        replaced = m.ReplacedConfigs(2, ORDERS, [m.CreatableConfig(*pair) for pair in pairs])
        answer = await connection.request(configs.ALTER_CONFIGS, 2, m.AlterConfigsRequest([replaced]))
        assert [one.error_code for one in answer.responses] == [ErrorCode.NONE]
    asked = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, ORDERS, ["retention.ms", "segment.bytes"])])
    described = await connection.request(configs.DESCRIBE_CONFIGS, 4, asked)
    found = {entry.name: (entry.value, entry.config_source) for entry in described.results[0].configs}
    assert found["segment.bytes"] == ("700", 1)
    assert found["retention.ms"] == ("604800000", 5)
    given = znodes.decode_config(path, zookeeper.data(path))
    assert given == {**is_set, "segment.bytes": "700"}


@run_by(with_cluster)
async def test_a_setting_named_twice_in_alter_configs_is_refused_whatever_its_value(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world.network, host_name(2), PORT)
    for values in (["9"], ["9", "10"], ["10", "9"], ["9", "9"]):
        entries = [m.CreatableConfig("retention.ms", value) for value in values]
        request = m.AlterConfigsRequest([m.ReplacedConfigs(2, ORDERS, entries)])
        (answer,) = (await connection.request(configs.ALTER_CONFIGS, 2, request)).responses
        assert answer.error_code == (ErrorCode.NONE if len(values) == 1 else ErrorCode.INVALID_REQUEST)
    asked = m.DescribeConfigsRequest([m.DescribeConfigsResource(2, ORDERS, [])])  # no names: all settings
    (described,) = (await connection.request(configs.DESCRIBE_CONFIGS, 4, asked)).results
    assert {entry.name: entry.value for entry in described.configs}["retention.ms"] == "9"
