"""Stored batches that are small on disk and large for those who read them."""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace

from minibroker.client.admin import Admin
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS, Header, encode_batch
from minibroker.protocol.records.columns import encode_columns
from minibroker.protocol.records.compression import Compression
from minibroker.protocol.records.header import HEADER_SIZE, MAX_RECORDS, BatchHeader, parse_header, write_header
from minibroker.protocol.world.real import RealNetwork
from tests.faults.hostile.attacks import ATTACK_S, Target, attack

TOPIC = "read"
CONNECTIONS = 16


async def create_topic(target: Target) -> None:
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication_factor=3)


def constant_batch(
    value: bytes, count: int = MAX_RECORDS, *, headers: list[Header] | None = None, base_offset: int = 0
) -> bytearray:
    """Return a batch of `count` records that says their value and headers once."""
    now_ms = int(time.time() * 1_000)
    header: BatchHeader = parse_header(encode_batch([b"", b""], base_timestamp=now_ms))
    batch = bytearray(HEADER_SIZE)
    encode_columns(batch, None, None, None, [value], None if headers is None else [headers])
    changed = replace(header, base_offset=base_offset, records_count=count, last_offset_delta=count - 1)
    return write_header(batch, changed)


def lying_batch(value: bytes, timestamp_ms: int, base_offset: int = 0) -> bytearray:
    """Return a batch whose header denies its record's timestamp."""
    batch = encode_batch([value], base_timestamp=0, timestamp_deltas=[timestamp_ms], base_offset=base_offset)
    return write_header(batch, replace(parse_header(batch), max_timestamp=0))


async def connected_to_leader(bootstrap: str, topic: str = TOPIC) -> Connection:
    network = RealNetwork()
    port = int(bootstrap.partition(",")[0].rpartition(":")[2])
    any_broker = await open_connection(network, LOOPBACK, port, client_id="stranger", timeout_s=ATTACK_S)
    metadata = await any_broker.request(apis.METADATA, m.MetadataRequest([topic]), timeout_s=ATTACK_S)
    any_broker.close()
    leader_id = metadata.topics[0].partitions[0].leader_id
    leader = next(broker.port for broker in metadata.brokers if broker.node_id == leader_id)
    return await open_connection(network, LOOPBACK, leader, client_id="stranger", timeout_s=ATTACK_S)


async def produced(connection: Connection, batch: bytes | bytearray, topic: str = TOPIC) -> int:
    """Send the batch; return the error code."""
    partition = m.ProducePartition(0, memoryview(batch))
    request = m.ProduceRequest(None, -1, 60_000, [m.ProduceTopic(topic, [partition])])
    answer = await connection.request(apis.PRODUCE, request, timeout_s=60)
    return answer.responses[0].partition_responses[0].error_code


def late_batch(magic: int, deltas: list[int]) -> bytearray:
    """Return a batch of MAX_RECORDS empty records, compressed."""
    values = [b""] * MAX_RECORDS
    return encode_batch(
        values,
        base_timestamp=int(time.time() * 1_000),
        timestamp_deltas=deltas,
        compression=Compression.ZSTD,
        magic=magic,
    )


async def search(target: Target, magic: int) -> None:
    """Search for the time of the last record of a large batch, on many connections."""
    connections = [await connected_to_leader(target.bootstrap) for _ in range(CONNECTIONS)]
    deltas = [0] * MAX_RECORDS
    deltas[-1] = 1_000
    batch = late_batch(magic, deltas)
    last_ms = parse_header(batch).max_timestamp
    code = await produced(connections[0], batch)
    assert code == ErrorCode.NONE, code
    partition = m.ListOffsetsPartition(0, -1, last_ms)
    request = m.ListOffsetsRequest(-1, 0, [m.ListOffsetsTopic(TOPIC, [partition])])

    async def ask(connection: Connection) -> None:
        while True:
            answer = await connection.request(apis.LIST_OFFSETS, request, timeout_s=60)
            found = answer.topics[0].partitions[0]
            assert (found.error_code, found.offset) == (ErrorCode.NONE, MAX_RECORDS - 1), found

    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(ask(connection))


@attack(prepare=create_topic)
async def search_by_time_in_columns(target: Target) -> None:
    """ListOffsets by time, in a stored batch of a million records."""
    await search(target, MAGIC_COLUMNS)


@attack(prepare=create_topic)
async def search_by_time_in_records(target: Target) -> None:
    """ListOffsets by time, in a stored batch of a million of Kafka's records."""
    await search(target, MAGIC_RECORDS)


async def create_compacted_topic(target: Target) -> None:
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication_factor=3, configs={"cleanup.policy": "compact"})


async def produce_compacted(target: Target, magic: int) -> None:
    batch = encode_batch(
        [b""] * MAX_RECORDS,
        keys=[b"k"] * MAX_RECORDS,
        base_timestamp=int(time.time() * 1_000),
        compression=Compression.ZSTD,
        magic=magic,
    )
    connections = [await connected_to_leader(target.bootstrap) for _ in range(CONNECTIONS)]

    async def send(connection: Connection) -> None:
        while True:
            code = await produced(connection, batch)
            assert code == ErrorCode.NONE, code

    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(send(connection))


@attack(prepare=create_compacted_topic)
async def keys_of_columns(target: Target) -> None:
    """Batches of a million small records for a compacted topic, whose keys the leader reads."""
    await produce_compacted(target, MAGIC_COLUMNS)


@attack(prepare=create_compacted_topic)
async def keys_of_records(target: Target) -> None:
    """The same with Kafka's records."""
    await produce_compacted(target, MAGIC_RECORDS)


@attack(prepare=create_topic)
async def constant_column(target: Target) -> None:
    """A column said once for a million records, fetched by many."""
    connections = [await connected_to_leader(target.bootstrap) for _ in range(CONNECTIONS)]
    for _ in range(20):
        code = await produced(connections[0], constant_batch(b"v" * 1_000))
        assert code == ErrorCode.NONE, code
    wanted = m.FetchTopic(TOPIC, "", [m.FetchPartition(0, -1, 0, -1, -1, 1 << 20)])
    request = m.FetchRequest(-1, 0, 1, 1 << 20, 0, [wanted])
    for _ in range(50):
        await asyncio.gather(*(each.request(apis.FETCH, request, timeout_s=ATTACK_S) for each in connections))
