"""Requests of one Kafka client must not cost the others: names that are too long, or that are repeated too often."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from minibroker.broker.network.dialect import BadInput
from minibroker.broker.network.kafka_dialect import KafkaDialect, KafkaListener
from minibroker.broker.replication import transcoding
from minibroker.client.producer import Producer
from minibroker.deploy.simulator import kafka_connection
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import KafkaConnection, connect
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import configs, data, groups, metadata
from minibroker.protocol.kafka.primitives import MAX_ALL_TAGS, MAX_TAGS, write_unsigned_varint
from minibroker.protocol.messages import groups as g
from minibroker.protocol.records.transcoding import as_records
from tests.running import run_by
from tests.simulation.scenarios.clients.test_kafka_dialect import (
    ORDERS,
    batch,
    fetch,
    produce,
    to_leader,
    wire,
    with_cluster,
)


async def to_coordinator(cluster: VirtualCluster, world: VirtualWorld) -> KafkaConnection:
    connection = await connect(world.network, host_name(1), PORT)
    request = wire(metadata.FIND_COORDINATOR, key="group", key_type=0, coordinator_keys=[])
    while True:
        answer = await connection.request(metadata.FIND_COORDINATOR, 3, request)
        if answer.error_code == ErrorCode.NONE:
            connection.close()
            return await connect(world.network, host_name(answer.node_id), PORT)
        await asyncio.sleep(0.5)


def join(member_id: str = "", metadata_bytes: int = 1) -> g.JoinGroupRequest:
    protocol = g.JoinGroupProtocol("range", b"x" * metadata_bytes)
    return g.JoinGroupRequest("group", 10_000, 20_000, member_id, None, "consumer", [protocol])


@pytest.mark.parametrize("version", [3, 6])
@run_by(with_cluster)
async def test_a_client_id_of_any_length_makes_a_member_id_that_fits_the_answer(
    cluster: VirtualCluster, world: VirtualWorld, /, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, long = [await to_coordinator(cluster, world) for _ in range(2)]
    first = await leader.request(groups.JOIN_GROUP, 3, join())
    with monkeypatch.context() as patched:
        patched.setattr(kafka_connection, "CLIENT_ID", "c" * 32_767)
        long.send(groups.JOIN_GROUP, version, join())
        if version >= 4:
            _, told = await long.answer(groups.JOIN_GROUP, version)
            long.send(groups.JOIN_GROUP, version, join(told.member_id))
    await asyncio.sleep(1)
    again = await leader.request(groups.JOIN_GROUP, 3, join(first.member_id))
    assert (again.error_code, again.generation_id, len(again.members)) == (ErrorCode.NONE, 2, 2)
    _, joined = await long.answer(groups.JOIN_GROUP, version)
    assert joined.error_code == ErrorCode.NONE


@run_by(with_cluster)
async def test_a_group_is_described_once_however_often_it_is_named(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_coordinator(cluster, world)
    joined = await connection.request(groups.JOIN_GROUP, 3, join(metadata_bytes=100_000))
    assignments = [g.SyncGroupAssignment(joined.member_id, b"y")]
    request = g.SyncGroupRequest("group", joined.generation_id, joined.member_id, None, None, None, assignments)
    assert (await connection.request(groups.SYNC_GROUP, 0, request)).error_code == ErrorCode.NONE
    answer = await connection.request(
        groups.DESCRIBE_GROUPS, 0, g.DescribeGroupsRequest(["group", "other", *["group"] * 1_000])
    )
    assert [each.group_id for each in answer.groups] == ["group", "other"]
    assert len(answer.groups[0].members[0].member_metadata) == 100_000


@run_by(with_cluster)
async def test_a_request_may_name_an_item_with_a_large_answer_only_once(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_coordinator(cluster, world)
    twice = [g.OffsetFetchGroup("group", None)] * 2
    offsets = wire(groups.OFFSET_FETCH, group_id="", topics=None, groups=twice, require_stable=False)
    answer = await connection.request(groups.OFFSET_FETCH, 8, offsets)
    assert [each.error_code for each in answer.groups] == [ErrorCode.INVALID_REQUEST] * 2
    resource = m.DescribeConfigsResource(2, ORDERS)
    described = await connection.request(configs.DESCRIBE_CONFIGS, 4, m.DescribeConfigsRequest([resource] * 2))
    assert [each.error_code for each in described.results] == [ErrorCode.INVALID_REQUEST] * 2
    topics = [m.DescribeProducersTopic(ORDERS, [0, 0])]
    producers = await connection.request(metadata.DESCRIBE_PRODUCERS, 0, m.DescribeProducersRequest(topics))
    assert {each.error_code for each in producers.topics[0].partitions} == {ErrorCode.INVALID_REQUEST}


@run_by(with_cluster)
async def test_a_request_with_acks_0_that_fails_as_a_whole_has_no_answer(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """The client would read that answer as the one to its next request."""

    connection = await to_leader(cluster, world)
    request: Any = produce(batch(b"x"), acks=0)
    request.topic_data.append(request.topic_data[0])  # names the partition twice
    connection.send(data.PRODUCE, 9, request)
    connection.send(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())
    async with asyncio.timeout(5):
        await connection.closed.wait()
    assert connection.frames.empty()


def test_an_answer_that_a_version_cannot_express_is_an_error_of_that_request_alone() -> None:
    dialect = KafkaDialect(KafkaListener(1 << 20))
    frame = kafka_connection.request_frame(groups.LIST_GROUPS, 0, 5, g.ListGroupsRequest())
    api, header, body = dialect.decode(bytes(frame[4:]))

    class Asked:
        api_version, correlation_id, client_id = header.api_version, header.correlation_id, header.client_id

    asked: Any = Asked()
    asked.api, asked.body = api, body
    long_name = "\N{EURO SIGN}" * 32_767
    body = g.ListGroupsResponse(0, ErrorCode.NONE, [g.ListedGroup(long_name, "", "")])
    answer = b"".join(dialect.encode_response(asked, body))
    _, read = kafka_connection.read_response(groups.LIST_GROUPS, 0, bytes(answer[4:]))
    assert (read.error_code, read.groups) == (ErrorCode.UNKNOWN_SERVER_ERROR, [])


def test_the_tagged_fields_of_a_request_are_bounded_together() -> None:
    def frame(partitions: int) -> bytes:
        out = bytearray(
            b"\0\0\0\x09" + b"\0\0\0\x01" + b"\0\x01c" + b"\0" + b"\0" + b"\0\x01" + b"\0\0\0\x01" + b"\x02\x02t"
        )
        write_unsigned_varint(out, partitions + 1)
        for index in range(partitions):
            out += index.to_bytes(4, "big") + b"\x01" + bytes([MAX_TAGS]) + b"\x10\0" * MAX_TAGS
        return bytes(out + b"\0\0")

    dialect = KafkaDialect(KafkaListener(100 << 20))
    most = MAX_ALL_TAGS // MAX_TAGS
    assert len(dialect.decode(frame(most))[2].topic_data[0].partition_data) == most  # type: ignore[union-attr]
    with pytest.raises(BadInput, match="tagged fields"):
        dialect.decode(frame(most + 1))


def test_nothing_is_transcoded_for_a_client_that_has_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, transcoded = 12, 0

    def counting(*args: Any) -> Any:
        nonlocal transcoded
        transcoded += 1
        return as_records(*args)

    monkeypatch.setattr(transcoding, "as_records", counting)
    monkeypatch.setattr(transcoding, "CACHE_BYTES", 0)

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        content = bytes(random.Random(1).choices(b"abcdefgh", k=100_000))  # too large to compress on the loop
        async with Producer(cluster.bootstrap, world=world, compression="zstd") as producer:
            for _ in range(batches):
                await producer.send(ORDERS, content, partition=0)
        connections = [await to_leader(cluster, world) for _ in range(10)]
        request = fetch(0)
        request.max_bytes = request.topics[0].partitions[0].partition_max_bytes = 4 << 20
        for connection in connections:
            connection.send(data.FETCH, 12, request)
        await asyncio.sleep(0.01)
        for connection in connections:
            connection.close()
        await asyncio.sleep(5)
        assert 0 < transcoded < 10 * batches / 2

    with_cluster(program)
