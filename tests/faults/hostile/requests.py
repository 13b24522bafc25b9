"""Requests that ask for much more work than their bytes: lists of tiny elements, batches, claims, and names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Sequence

from msgspec.structs import replace

from minibroker.client.admin import Admin
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.simulator.kafka_connection import request_frame
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.apis import KAFKA_APIS
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS, encode_batch, parse_header
from minibroker.protocol.records.header import HEADER_SIZE, MAX_RECORDS, write_header
from minibroker.protocol.world.real import RealNetwork
from tests.faults.hostile.attacks import ATTACK_S, Target, attack

TOPIC = "asked"
CONNECTIONS = 8
"""Connections to each broker."""
SECONDS = 7.0
"""The attacker is a nice process, which needs time to begin and to end."""


async def create_topic(target: Target) -> None:
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication_factor=3)


async def sent(port: int, frame: bytes) -> bytes | None:
    """Send a frame over a new connection. Return the answer; None if there is none."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=1 << 20)
    try:
        writer.write(frame)  # without `drain`, which fails if the broker has closed
        (length,) = struct.unpack(">i", await reader.readexactly(4))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None
    finally:
        writer.transport.abort()


async def repeat(ports: Sequence[int], frames: Sequence[bytes], connections: int = CONNECTIONS) -> None:
    """Send the frames again and again, over several connections to each port at a time."""

    until_s = time.monotonic() + SECONDS

    async def go(port: int, first: int) -> None:
        for number in itertools.count(first):
            if time.monotonic() >= until_s:
                return
            await sent(port, frames[number % len(frames)])

    await asyncio.gather(*(go(port, first) for port in ports for first in range(connections)))


def tiny_elements_frame() -> bytes:
    partitions = b"\xdd" + struct.pack(">I", 100_000) + b"\x92\x00\xc4\x00" * 100_000
    topics = b"\xdd" + struct.pack(">I", 62) + (b"\x92\xa1x" + partitions) * 62
    envelope = b"\x95\x00\x00\x01\xc0" + b"\x94\xc0\x01\x00" + topics
    return struct.pack(">i", len(envelope)) + envelope


@attack()
async def tiny_elements(target: Target) -> None:
    """A native Produce of 25 MB that consists of tiny elements, to the data and the control listener."""
    ports = [*target.data_ports.values(), *target.control_ports.values()]
    await repeat(ports, [tiny_elements_frame()], connections=1)


@attack(prepare=create_topic)
async def million_batches(target: Target) -> None:
    """A Produce with hundreds of thousands of batches of one record for a partition."""
    one = bytes(encode_batch([b"v"], base_timestamp=int(time.time() * 1_000), magic=MAGIC_RECORDS))
    records = memoryview(one * (50_000_000 // len(one)))
    request = m.ProduceRequest(None, 1, 5_000, [m.ProduceTopic(TOPIC, [m.ProducePartition(0, records)])])
    for port in target.data_ports.values():
        connection = await open_connection(RealNetwork(), LOOPBACK, port, client_id="stranger", timeout_s=ATTACK_S)
        answer = await connection.request(apis.PRODUCE, request, timeout_s=ATTACK_S)
        [part] = answer.responses[0].partition_responses
        assert part.error_code == ErrorCode.INVALID_RECORD, part


@attack(prepare=create_topic)
async def empty_claims(target: Target) -> None:
    """Batches of eight bytes that claim a million records."""
    for port in target.data_ports.values():
        connection = await open_connection(RealNetwork(), LOOPBACK, port, client_id="stranger", timeout_s=ATTACK_S)
        for magic in (MAGIC_RECORDS, MAGIC_COLUMNS):
            header = parse_header(encode_batch([b"v"], base_timestamp=int(time.time() * 1_000), magic=magic))
            claim = replace(header, records_count=MAX_RECORDS, last_offset_delta=MAX_RECORDS - 1)
            batch = memoryview(write_header(bytearray(HEADER_SIZE + 8), claim))
            request = m.ProduceRequest(None, -1, 5_000, [m.ProduceTopic(TOPIC, [m.ProducePartition(0, batch)])])
            answer = await connection.request(apis.PRODUCE, request, timeout_s=ATTACK_S)
            [part] = answer.responses[0].partition_responses
            assert part.error_code in (ErrorCode.INVALID_RECORD, ErrorCode.NOT_LEADER_OR_FOLLOWER), part


def produce_of(partitions: int) -> m.ProduceRequest:
    data = [m.ProducePartition(index, memoryview(b"")) for index in range(partitions)]
    return m.ProduceRequest(None, 1, 5_000, [m.ProduceTopic("missing", data)])


@attack()
async def unknown_partitions(target: Target) -> None:
    """Produce requests for as many unknown partitions as a request may have, and for more, in both dialects."""
    kafka = KAFKA_APIS[apis.PRODUCE.key]
    frames = [
        bytes(request_frame(kafka, 9, 1, produce_of(19_000))),
        bytes(apis.encode_request(apis.PRODUCE, 1, None, produce_of(19_000))),
        bytes(request_frame(kafka, 9, 1, produce_of(100_000))),
    ]
    await repeat(list(target.data_ports.values()), frames)


@attack()
async def thousands_of_names(target: Target) -> None:
    """Requests of a megabyte that name thousands of groups, transactions and partitions, in both dialects."""
    names = [f"{number:x}" for number in range(90_000)]
    numbers = list(range(90_000))
    asked: list[tuple[apis.Api, int, m.Message]] = [  # type: ignore[type-arg]
        (apis.FIND_COORDINATOR, 4, g.FindCoordinatorRequest(0, names)),
        (apis.DESCRIBE_GROUPS, 5, g.DescribeGroupsRequest(names)),
        (apis.DESCRIBE_TRANSACTIONS, 0, t.DescribeTransactionsRequest(names)),
        (apis.DESCRIBE_PRODUCERS, 0, m.DescribeProducersRequest([m.DescribeProducersTopic("missing", numbers)])),
        (
            apis.OFFSET_FOR_LEADER_EPOCH,
            2,
            m.OffsetForLeaderEpochRequest(
                -1, [m.OffsetForLeaderTopic("missing", [m.OffsetForLeaderPartition(index, -1, 0) for index in numbers])]
            ),
        ),
        (
            apis.OFFSET_FETCH,
            8,
            g.OffsetFetchRequest([g.OffsetFetchGroup("group", [g.OffsetFetchTopic("missing", numbers)])]),
        ),
    ]
    frames = [bytes(apis.encode_request(api, 1, None, body)) for api, _, body in asked]
    frames += [bytes(request_frame(KAFKA_APIS[api.key], version, 1, body)) for api, version, body in asked[:-1]]
    await repeat(list(target.data_ports.values()), frames)


async def create_large_topic(target: Target) -> None:
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=300, replication_factor=1)


@attack(prepare=create_large_topic)
async def requests_left_behind(target: Target) -> None:
    """Sixty kilobytes of small requests on each of many connections, whose clients hang up and come again."""
    metadata = bytes(apis.encode_request(apis.METADATA, 1, "attacker", m.MetadataRequest([TOPIC])))
    produce = bytes(apis.encode_request(apis.PRODUCE, 1, "attacker", m.ProduceRequest(None, 0, 1_000, [])))
    until_s = time.monotonic() + SECONDS

    async def go(port: int, frame: bytes) -> None:
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.write(frame * (60_000 // len(frame)))
                await asyncio.sleep(0.3)
                writer.transport.abort()

    ports = list(target.data_ports.values())
    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(go(ports[number % len(ports)], produce if number % 4 == 0 else metadata))


@attack()
async def heartbeats_left_behind(target: Target) -> None:
    """As many Heartbeats as the system takes, to one broker, from a hundred clients that hang up at once, for ever."""
    heartbeat = g.HeartbeatRequest("group", 1, "member", None)
    frames = bytes(apis.encode_request(apis.HEARTBEAT, 1, "attacker", heartbeat)) * 20_000
    until_s = time.monotonic() + SECONDS
    port = target.data_ports[1]
    hung_up = 0

    async def go() -> None:
        nonlocal hung_up
        loop = asyncio.get_running_loop()
        while time.monotonic() < until_s:
            with socket.socket() as peer, contextlib.suppress(OSError):
                peer.setblocking(False)
                await loop.sock_connect(peer, (LOOPBACK, port))
                peer.send(frames)
                hung_up += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(go())
    print(f"{hung_up} connections")
