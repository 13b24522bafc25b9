"""Requests about topics and settings, and records, whose work or files outlast them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

from minibroker.client.admin import Admin
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Api
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import ElectionType, ResourceType
from minibroker.protocol.records import encode_batch
from minibroker.protocol.world.real import RealNetwork
from tests.faults.hostile.attacks import ATTACK_S, Target, attack

TOPIC = "open"
CONNECTIONS = 6
DAY_MS = 86_400_000


async def connected(target: Target, broker: int) -> Connection:
    port = target.data_ports[broker]
    return await open_connection(RealNetwork(), LOOPBACK, port, client_id="stranger", timeout_s=ATTACK_S)


async def create_topic(target: Target) -> None:
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(TOPIC, assignments=[[1, 2, 3]])


async def insist(target: Target, api: Api[Any, Any], *requests: m.Message) -> None:
    """Repeat the requests over many connections to all brokers until the attack ends."""
    bodies, brokers = itertools.cycle(requests), itertools.cycle(target.data_ports)

    async def over(connection: Connection) -> None:
        while True:
            with contextlib.suppress(BrokerError):
                await connection.request(api, next(bodies), timeout_s=ATTACK_S)

    connections = [await connected(target, next(brokers)) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(over(connection) for connection in connections))


async def produced(connection: Connection, batches: list[bytes]) -> list[int]:
    """Send each batch in a request of its own, all at once; return the error codes."""
    requests = [
        m.ProduceRequest(None, 1, 5_000, [m.ProduceTopic(TOPIC, [m.ProducePartition(0, memoryview(batch))])])
        for batch in batches
    ]
    answers = await asyncio.gather(
        *(connection.request(apis.PRODUCE, request, timeout_s=ATTACK_S) for request in requests)
    )
    return [answer.responses[0].partition_responses[0].error_code for answer in answers]


# --- Topics --------------------------------------------------------------------------------------------------------


@attack()
async def many_partitions_validated(target: Target) -> None:
    """A thousand topics of ten thousand partitions, only to be validated."""
    topics = [m.CreatableTopic(f"t{each}", 10_000, 3) for each in range(1_000)]
    request = m.CreateTopicsRequest(topics, 10_000, validate_only=True)
    await insist(target, apis.CREATE_TOPICS, request)


@attack(prepare=create_topic)
async def many_partitions_added(target: Target) -> None:
    """A topic gets ten thousand partitions, only to be validated."""
    request = m.CreatePartitionsRequest([m.CreatePartitionsTopic(TOPIC, 10_000)], 10_000, validate_only=True)
    await insist(target, apis.CREATE_PARTITIONS, request)


@attack()
async def unknown_topics_deleted(target: Target) -> None:
    """Ten thousand topics that do not exist are to be deleted."""
    request = m.DeleteTopicsRequest([f"no-{each}" for each in range(10_000)], 10_000)
    await insist(target, apis.DELETE_TOPICS, request)


@attack()
async def unknown_partitions_moved(target: Target) -> None:
    """Ten thousand partitions that do not exist are to be moved."""
    moved = [m.ReassignablePartition(0, [1, 2, 3])]
    topics = [m.ReassignableTopic(f"no-{each}", moved) for each in range(5_000)]
    request = m.AlterPartitionReassignmentsRequest(10_000, topics)
    await insist(target, apis.ALTER_PARTITION_REASSIGNMENTS, request)


@attack()
async def unknown_partitions_elected(target: Target) -> None:
    """Ten thousand partitions that do not exist are to get leaders."""
    topics = [m.ElectLeadersTopic(f"no-{each}", [0]) for each in range(5_000)]
    request = m.ElectLeadersRequest(ElectionType.PREFERRED, topics, 10_000)
    await insist(target, apis.ELECT_LEADERS, request)


@attack(settings={"auto.create.topics.enable": "true", "num.partitions": "1000"})
async def topics_created_by_looking(target: Target) -> None:
    """A thousand topics of a thousand partitions are created by asking for their metadata."""
    request = m.MetadataRequest([f"auto-{each}" for each in range(1_000)], True)
    await insist(target, apis.METADATA, request)


# --- Settings ------------------------------------------------------------------------------------------------------


@attack()
async def settings_of_unknown_topics(target: Target) -> None:
    """Settings of a thousand topics that do not exist."""
    topics = [m.DescribeConfigsResource(ResourceType.TOPIC, f"no-{each}", None) for each in range(1_000)]
    request = m.DescribeConfigsRequest(topics)
    await insist(target, apis.DESCRIBE_CONFIGS, request)


@attack(prepare=create_topic)
async def settings_changed_all_the_time(target: Target) -> None:
    """A topic's settings are changed without a pause."""
    changes = [m.AlterableConfig("retention.ms", 0, str(DAY_MS + number)) for number in range(100)]
    requests = [
        m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(ResourceType.TOPIC, TOPIC, [change])])
        for change in changes
    ]
    await insist(target, apis.INCREMENTAL_ALTER_CONFIGS, *requests)


# --- Records -------------------------------------------------------------------------------------------------------


@attack(prepare=create_topic)
async def a_file_for_each_record(target: Target) -> None:
    """Twenty thousand segments of one record each, by timestamps far apart."""
    connection = await connected(target, 1)
    small = m.CreatableTopic("small", 1, 3, [], [m.CreatableConfig("segment.bytes", "100")])
    created = await connection.request(apis.CREATE_TOPICS, m.CreateTopicsRequest([small], 5_000), timeout_s=ATTACK_S)
    assert created.topics[0].error_code == ErrorCode.INVALID_CONFIG, created
    for first in range(0, 20_000, 100):
        # no later than now, as a broker may require
        times = [int(time.time() * 1_000) - (20_000 - number) * DAY_MS for number in range(first, first + 100)]
        await produced(connection, [bytes(encode_batch([b"v"], base_timestamp=time_ms)) for time_ms in times])


@attack(prepare=create_topic)
async def a_producer_for_each_record(target: Target) -> None:
    """Two hundred thousand producers that write one record each."""
    connection = await connected(target, 1)
    now_ms = int(time.time() * 1_000)
    for first in range(0, 200_000, 500):
        batches = [
            bytes(
                encode_batch([b"v"], base_timestamp=now_ms, producer_id=1 << 40 | i, producer_epoch=0, base_sequence=0)
            )
            for i in range(first, first + 500)
        ]
        await produced(connection, batches)
