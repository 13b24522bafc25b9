"""Attacks on the memory that a broker keeps on behalf of its clients.

The attackers send and do not wait for answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.messages import groups as g
from minibroker.protocol.records import encode_batch
from minibroker.protocol.records.compression import Compression
from tests.faults.hostile.attacks import Target, attack
from tests.faults.hostile.readers import constant_batch

PLAYED_S = 8.0
FOREVER_MS = 2**31 - 1

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Address = tuple[str, int]


async def _open(address: Address, receive_bytes: int | None = None) -> Peer:
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(raw, address)
        return await asyncio.open_connection(sock=raw, limit=1 << 16)
    except BaseException:
        raw.close()
        raise


@contextlib.asynccontextmanager
async def _connections(
    addresses: list[Address], count: int, receive_bytes: int | None = None
) -> AsyncIterator[list[Peer]]:
    """Connections to all brokers in turn, aborted at the end."""
    peers: list[Peer] = []
    try:
        for number in range(count):
            with contextlib.suppress(OSError):
                peers.append(await _open(addresses[number % len(addresses)], receive_bytes))
        yield peers
    finally:
        for _, writer in peers:
            writer.transport.abort()


async def _swallow(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


@contextlib.asynccontextmanager
async def _reading(peers: list[Peer]) -> AsyncIterator[None]:
    readers = [asyncio.create_task(_swallow(reader)) for reader, _ in peers]
    try:
        yield
    finally:
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _create(target: Target, topic: str, partitions: int) -> None:
    """Create a topic whose partition N is led by the N-th broker, modulo three."""
    orders = ([1, 2, 3], [2, 3, 1], [3, 1, 2])
    async with Admin(target.bootstrap) as admin:
        await admin.create_topic(topic, assignments=[orders[number % 3] for number in range(partitions)])


def _addresses(target: Target) -> list[Address]:
    return [(LOOPBACK, port) for port in target.data_ports.values()]


def _endless_fetch(topic: str, partitions: range) -> bytes:
    wanted = [m.FetchPartition(index, -1, 0, -1, -1, 1 << 20) for index in partitions]
    fetch = m.FetchRequest(-1, FOREVER_MS, 1 << 30, 1 << 30, 0, [m.FetchTopic(topic, "", wanted)])
    return bytes(apis.encode_request(apis.FETCH, 1, "attacker", fetch))


def _kafka_fetch(topic: str, partition: int, size: int) -> bytes:
    """Version 4 of Fetch of Kafka's protocol."""
    name = topic.encode()
    body = struct.pack(">hhih8s", 1, 4, 1, 8, b"attacker") + struct.pack(">iiiib", -1, 0, 1, size, 0)
    body += struct.pack(">ih", 1, len(name)) + name + struct.pack(">iiqi", 1, partition, 0, size)
    return struct.pack(">i", len(body)) + body


async def create_waited_for(target: Target) -> None:
    await _create(target, "waited-for", 90)


@attack(prepare=create_waited_for)
async def waiting_fetches(target: Target) -> None:
    """Fetches that wait 24 days for more than there is, from clients that hang up."""
    fetches = [_endless_fetch("waited-for", range(first, 90, 3)) for first in range(3)]
    for _ in range(4):
        async with _connections(_addresses(target), 9) as peers:
            for number, (_, writer) in enumerate(peers):
                writer.write(fetches[number % 3] * 100)
            await asyncio.sleep(1)
    async with Producer(target.bootstrap) as producer:
        end = time.monotonic() + PLAYED_S / 2
        while time.monotonic() < end:
            await asyncio.gather(*(producer.send("waited-for", b"x", partition=n) for n in range(90)))


@attack(prepare=create_waited_for)
async def patient_fetches(target: Target) -> None:
    """Fetches that wait for more than there is, while records arrive, from clients that stay."""
    fetches = [_endless_fetch("waited-for", range(first, 90, 3)) for first in range(3)]
    async with _connections(_addresses(target), 30) as peers, Producer(target.bootstrap) as producer:
        for number, (_, writer) in enumerate(peers):
            writer.write(fetches[number % 3] * 100)
        end = time.monotonic() + PLAYED_S
        while time.monotonic() < end:
            await asyncio.gather(*(producer.send("waited-for", b"x", partition=n) for n in range(90)))


async def fill_unread(target: Target) -> None:
    await _create(target, "unread", 6)
    async with Producer(target.bootstrap, batch_size=1 << 20) as producer:
        for _ in range(8):
            await asyncio.gather(*(producer.send("unread", b"v" * 500_000, partition=n) for n in range(6)))


@attack(prepare=fill_unread)
async def unread_answers(target: Target) -> None:
    """480 fetches of two megabytes that are ready, from clients that read nothing."""
    async with _connections(_addresses(target), 480, 4_096) as peers:
        for number, (_, writer) in enumerate(peers):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for partition in range(number % 3, 6, 3):
                writer.write(_kafka_fetch("unread", partition, 1 << 30))
        await asyncio.sleep(PLAYED_S)


async def store_expanding(target: Target) -> None:
    await _create(target, "expanding", 6)
    zeros = bytes(encode_batch([bytes(50)] * 1_000_000, base_timestamp=1, compression=Compression.ZSTD))
    said_once = bytes(constant_batch(b"x" * 1_500, 1_000_000))
    for partition in range(6):
        data = [
            m.ProduceTopic("expanding", [m.ProducePartition(partition, memoryview((said_once, zeros)[partition % 2]))])
        ]
        request = bytes(apis.encode_request(apis.PRODUCE, 1, "attacker", m.ProduceRequest(None, -1, 1_000, data)))
        async with _connections(_addresses(target), 3) as peers:
            for _, writer in peers:
                writer.write(request)
            await asyncio.sleep(0.5)


@attack(prepare=store_expanding)
async def expanding_batches(target: Target) -> None:
    """Kafka's fetches, 60 at a time, of stored batches of some kilobytes that expand to megabytes."""
    async with _connections(_addresses(target), 60) as peers, _reading(peers):
        end = time.monotonic() + PLAYED_S
        while time.monotonic() < end:
            for number, (_, writer) in enumerate(peers):
                if writer.transport.get_write_buffer_size() < 1_000:
                    for partition in range(number % 3, 6, 3):
                        writer.write(_kafka_fetch("expanding", partition, 1 << 30))
            await asyncio.sleep(0.5)


async def begin_groups(target: Target) -> None:
    """Make the cluster create the topic of offsets."""
    await _create(target, "grouped", 200)
    request = apis.encode_request(apis.FIND_COORDINATOR, 1, "attacker", g.FindCoordinatorRequest(0, ["g"]))
    for _ in range(3):
        async with _connections(_addresses(target), 3) as peers:
            for _, writer in peers:
                writer.write(bytes(request))
            await asyncio.sleep(2)


def _join(group: str, size: int) -> bytes:
    protocols = [g.JoinGroupProtocol("range", bytes(size))]
    join = g.JoinGroupRequest(group, 1_800_000, FOREVER_MS, "", None, "consumer", protocols, None, False)
    return bytes(apis.encode_request(apis.JOIN_GROUP, 1, "attacker", join))


@attack(prepare=begin_groups)
async def large_members(target: Target) -> None:
    """Members of many groups with 900 KB of metadata each, from clients that hang up."""
    end, number = time.monotonic() + PLAYED_S, 0
    while time.monotonic() < end:
        async with _connections(_addresses(target), 60) as peers, _reading(peers):
            for _ in range(5):
                for _, writer in peers:
                    number += 1
                    with contextlib.suppress(OSError):
                        writer.write(_join(f"hostile-{number // 9}", 900_000))
                        await writer.drain()
            await asyncio.sleep(0.5)


@attack(prepare=begin_groups)
async def offset_metadata(target: Target) -> None:
    """Offsets of 500 groups with 4 KB of metadata for each partition."""
    parts = [g.OffsetCommitPartition(index, 0, -1, "m" * 4_096) for index in range(200)]
    async with _connections(_addresses(target), 30) as peers, _reading(peers):
        for number in range(500):
            body = g.OffsetCommitRequest(f"hostile-{number}", -1, "", None, [g.OffsetCommitTopic("grouped", parts)])
            request = bytes(apis.encode_request(apis.OFFSET_COMMIT, 1, "attacker", body))
            at = number % 10 * 3
            for _, writer in peers[at : at + 3]:
                with contextlib.suppress(OSError):
                    writer.write(request)
                    await writer.drain()
        await asyncio.sleep(1)
