"""Requests that name thousands of things are answered in order and in turns, and hold up no one else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from minibroker.broker.handlers.groups import OFFSET_BYTES
from minibroker.broker.handlers.services import SMALL_ANSWER_BYTES
from minibroker.broker.network import large_requests
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.replication.appending import Appender
from minibroker.deploy.simulator.cluster import PORT, VirtualCluster, host_name
from minibroker.deploy.simulator.kafka_connection import connect, request_frame
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka import data, groups, metadata
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.records import decode_batch
from tests.running import run_by
from tests.simulation.scenarios.clients.test_greedy_kafka_clients import to_coordinator
from tests.simulation.scenarios.clients.test_kafka_dialect import (
    ORDERS,
    batch,
    fetch,
    produce,
    to_leader,
    wire,
    with_cluster,
)

MANY = 10_000


def epochs_of(partitions: int) -> m.OffsetForLeaderEpochRequest:
    asked = [m.OffsetForLeaderPartition(index, -1, 0) for index in range(partitions)]
    return m.OffsetForLeaderEpochRequest(-1, [m.OffsetForLeaderTopic("missing", asked)])


@run_by(with_cluster)
async def test_answers_to_kafkas_clients_keep_the_order_of_their_requests(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    connection.send(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())
    connection.send(data.OFFSET_FOR_LEADER_EPOCH, 2, epochs_of(MANY))
    connection.send(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())
    await connection.answer(metadata.API_VERSIONS, 0)
    _, answer = await connection.answer(data.OFFSET_FOR_LEADER_EPOCH, 2)
    await connection.answer(metadata.API_VERSIONS, 0)
    [topic] = answer.topics
    assert [part.partition for part in topic.partitions] == list(range(MANY))
    assert {part.error_code for part in topic.partitions} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


@run_by(with_cluster)
async def test_a_large_fetch_returns_records_and_an_error_for_each_missing_partition(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_leader(cluster, world)
    await connection.request(data.PRODUCE, 9, produce(batch(b"value")))
    asked = fetch(max_wait_ms=60_000)
    asked.min_bytes = 1 << 20
    [topic] = asked.topics
    topic.partitions += [replace(topic.partitions[0], partition=index) for index in range(1_000, MANY)]
    async with asyncio.timeout(10):
        answer = await connection.request(data.FETCH, 11, asked)
    parts = {part.partition_index: part for topic in answer.responses for part in topic.partitions}
    assert sorted(parts) == [0, *range(1_000, MANY)]
    assert parts[0].error_code == ErrorCode.NONE
    assert decode_batch(parts[0].records).values == [b"value"]
    assert {part.error_code for index, part in parts.items() if index} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


@run_by(with_cluster)
async def test_a_large_commit_stores_the_offsets_of_partitions_that_exist(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_coordinator(cluster, world)
    parts = [g.OffsetCommitPartition(index, 5, -1, "") for index in (0, *range(1_000, MANY))]
    request = g.OffsetCommitRequest(
        "group",
        -1,
        "",
        None,
        [
            g.OffsetCommitTopic(ORDERS, parts),
            g.OffsetCommitTopic("missing", [g.OffsetCommitPartition(0, 5, -1, "")]),
        ],
    )
    answer = await connection.request(groups.OFFSET_COMMIT, 2, request)
    codes = {
        (topic.name, part.partition_index): part.error_code for topic in answer.topics for part in topic.partitions
    }
    assert len(codes) == len(parts) + 1
    assert [key for key, code in codes.items() if code == ErrorCode.NONE] == [(ORDERS, 0)]


@pytest.mark.parametrize("acks", [1, 0])
@run_by(with_cluster)
async def test_a_large_request_that_fails_as_a_whole_is_answered_as_a_small_one(
    cluster: VirtualCluster, world: VirtualWorld, /, acks: int
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    parts = [m.ProducePartition(index % (MANY - 1), memoryview(b"")) for index in range(MANY)]
    connection.send(data.PRODUCE, 9, m.ProduceRequest(None, acks, 1_000, [m.ProduceTopic("missing", parts)]))
    async with asyncio.timeout(10):
        if acks == 0:
            await connection.closed.wait()
            assert connection.frames.empty()
            return
        _, answer = await connection.answer(data.PRODUCE, 9)
    failed = answer.responses[0].partition_responses
    assert [part.error_code for part in failed] == [ErrorCode.INVALID_REQUEST] * MANY


@run_by(with_cluster)
async def test_a_large_body_that_is_bad_input_ends_the_connection_after_earlier_answers(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await connect(world.network, host_name(1), PORT)
    names = [*(f"group-{number}" for number in range(MANY)), "broken"]
    request = wire(groups.DESCRIBE_GROUPS, groups=names, include_authorized_operations=False)
    frame = request_frame(groups.DESCRIBE_GROUPS, 0, 2, request)
    place = frame.rindex(b"broken")
    frame[place : place + 6] = b"\xff" * 6  # not UTF-8
    connection.send(metadata.API_VERSIONS, 0, m.ApiVersionsRequest())
    assert connection._transport is not None
    connection._transport.write(bytes(frame))
    await connection.answer(metadata.API_VERSIONS, 0)
    async with asyncio.timeout(10):
        await connection.closed.wait()
    assert connection.frames.empty()


@run_by(with_cluster)
async def test_large_requests_take_turns_and_others_do_not_wait_for_them(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    at_once, most = 0, 0
    handle = LargeRequests.handle

    async def turn(self: LargeRequests, request: object, handler: object) -> None:
        async def counted(request: object) -> object:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(1)
            try:
                return await handler(request)  # type: ignore[operator]
            finally:
                at_once -= 1

        await handle(self, request, counted)  # type: ignore[type-var, arg-type]

    with patch.object(LargeRequests, "handle", turn):
        strangers = [
            await open_connection(world.network, host_name(1), PORT, client_id="s", timeout_s=5) for _ in range(20)
        ]
        innocent = await connect(world.network, host_name(1), PORT)
        large = [
            asyncio.create_task(each.request(apis.OFFSET_FOR_LEADER_EPOCH, epochs_of(2 * MANY), timeout_s=60))
            for each in strangers
        ]
        await asyncio.sleep(2)
        async with asyncio.timeout(0.5):
            await innocent.request(groups.LIST_GROUPS, 0, g.ListGroupsRequest())
        assert sum(each.done() for each in large) < len(large) / 2
        answers = await asyncio.gather(*large)
    assert all(len(answer.topics[0].partitions) == 2 * MANY for answer in answers)
    assert most == large_requests.MOST_AT_ONCE


@run_by(with_cluster)
async def test_markers_for_many_partitions_are_answered_in_the_order_of_the_request(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    topics = [t.TransactionTopic(name, [*range(250)]) for name in ("missing", "absent")]
    markers = [t.TransactionMarker(5, 0, False, 0, topics), t.TransactionMarker(6, 0, False, 0, [])]
    client = await open_connection(world.network, host_name(1), PORT, client_id="admin", timeout_s=5)
    at_once = []
    write = Appender.write_markers

    def counted(self: Appender, written: t.TransactionMarker, **arguments: Any) -> None:
        at_once.append(sum(len(topic.partitions) for topic in written.topics))
        write(self, written, **arguments)

    with patch.object(Appender, "write_markers", counted):
        answer = await client.request(apis.WRITE_TXN_MARKERS, t.WriteTxnMarkersRequest(markers), timeout_s=10)
    assert at_once == [100, 100, 50] * 2
    first, second = answer.markers
    assert [(each.name, [part.partition_index for part in each.results_by_partition]) for each in first.topics] == [
        ("missing", [*range(250)]),
        ("absent", [*range(250)]),
    ]
    assert (second.producer_id, second.topics) == (6, [])


@run_by(with_cluster)
async def test_all_offsets_of_many_groups_are_returned_in_a_turn(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    connection = await to_coordinator(cluster, world)
    groups_in_all = 3 * SMALL_ANSWER_BYTES // OFFSET_BYTES // 2
    names = [f"group-{number}" for number in range(groups_in_all)]
    for name in names:
        commit = g.OffsetCommitPartition(0, 5, -1, "")
        connection.send(
            groups.OFFSET_COMMIT,
            2,
            g.OffsetCommitRequest(name, -1, "", None, [g.OffsetCommitTopic(ORDERS, [commit])]),
        )
    for _ in names:
        await connection.answer(groups.OFFSET_COMMIT, 2)
    in_turns = 0
    answer_in_turn = LargeRequests.answer

    async def counted(self: LargeRequests, *arguments: Any) -> None:
        nonlocal in_turns
        in_turns += 1
        await answer_in_turn(self, *arguments)

    with patch.object(LargeRequests, "answer", counted):
        for asked in (names[:2], names):
            wanted = [g.OffsetFetchGroup(name, None) for name in asked]
            answer = await connection.request(
                groups.OFFSET_FETCH, 8, SimpleNamespace(groups=wanted, require_stable=False)
            )
            assert [each.group_id for each in answer.groups] == asked
            found = [part.committed_offset for each in answer.groups for part in each.topics[0].partitions]
            assert found == [5] * len(asked)
    assert in_turns == 1
