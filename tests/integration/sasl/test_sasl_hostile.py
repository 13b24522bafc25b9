"""Malformed frames to a listener with SASL, before and after authentication.

Both dialects. Nothing may crash, nobody may get in, and the broker must serve others afterwards.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.world.real import RealWorld
from tests.faults.hostile.kafka import hostile_frame

FRAMES = 10_000
"""Before authentication, and as many after it."""
FRAMES_PER_CONNECTION = 5
CONNECTIONS = 40
SEED = 36
LOGIN = b"\0alice\0wonderland"
ALMOST = (
    b"\0alice\0wonderlanD",
    b"\0alice\0",
    b"n,,n=alice,r=abc",
    b"n,,\x01auth=Bearer abc\x01\x01",
    b"",
    b"\x00" * 100,
)
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "")


def damaged(random: Random, frame: bytearray) -> bytes:
    for _ in range(random.randint(0, 3)):
        frame[random.randrange(len(frame))] = random.randrange(256)
    return bytes(frame[: random.randint(4, len(frame))] if random.random() < 0.1 else frame)


def frames(random: Random, number: int) -> bytes:
    """Return one frame: any of Kafka's, or one of SASL in our own protocol, damaged."""
    if random.random() < 0.5:
        return hostile_frame(SEED, number).data
    if random.random() < 0.5:
        request: bytearray = apis.encode_request(
            apis.SASL_HANDSHAKE, number, None, m.SaslHandshakeRequest(random.choice(MECHANISMS))
        )
    else:
        message = random.choice(ALMOST)
        request = apis.encode_request(apis.SASL_AUTHENTICATE, number, None, m.SaslAuthenticateRequest(message))
    return damaged(random, request)


def login(native: bool) -> bytes:
    if native:
        return bytes(
            apis.encode_request(apis.SASL_HANDSHAKE, 1, None, m.SaslHandshakeRequest("PLAIN"))
            + apis.encode_request(apis.SASL_AUTHENTICATE, 2, None, m.SaslAuthenticateRequest(LOGIN))
        )
    requests = b""
    for key, body in ((17, struct.pack(">h", 5) + b"PLAIN"), (36, struct.pack(">i", len(LOGIN)) + LOGIN)):
        request = struct.pack(">hhih", key, 1, key, -1) + body
        requests += struct.pack(">i", len(request)) + request
    return requests


async def attack(port: int, begin: Callable[[Random], bytes]) -> None:
    numbers = iter(range(0, FRAMES, FRAMES_PER_CONNECTION))

    async def one() -> None:
        for first in numbers:
            random = Random(f"{SEED}/{first}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(OSError):
                writer.write(begin(random))
                for number in range(first, first + FRAMES_PER_CONNECTION):
                    writer.write(frames(random, number))
                writer.write_eof()
                async with asyncio.timeout(30):
                    await reader.read()
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


async def innocent(port: int) -> None:
    connection = await open_connection(RealWorld().network, "127.0.0.1", port, client_id="innocent", timeout_s=10)
    await connection.request(apis.SASL_HANDSHAKE, m.SaslHandshakeRequest("PLAIN"), timeout_s=10)
    answer = await connection.request(apis.SASL_AUTHENTICATE, m.SaslAuthenticateRequest(LOGIN), timeout_s=10)
    assert answer.error_code == 0
    assert (await connection.request(apis.METADATA, m.MetadataRequest(None), timeout_s=10)).brokers
    connection.close()


@pytest.mark.slow
def test_malformed_frames_before_and_after_authentication_harm_nobody(tmp_path: Path) -> None:
    plain, secured = free_ports(2)
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{secured},CONTROLLER://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="wonderland" ;',
        "max.connection.creation.rate": "100000",
        "connection.failed.authentication.delay.ms": "1",
    }
    cluster = LocalCluster(tmp_path / "cluster")
    try:
        cluster.up(1, plain, None, settings)
        asyncio.run(attack(secured, lambda random: b""))
        log = cluster.log_of(1).read_text()
        assert "sent bad input" in log
        asyncio.run(innocent(secured))
        asyncio.run(attack(secured, lambda random: login(random.random() < 0.5)))
        asyncio.run(innocent(secured))
        assert "Traceback" not in cluster.log_of(1).read_text()
        assert "wonderland" not in cluster.log_of(1).read_text()
    finally:
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)
