"""Strangers who keep others out of a listener, write lines of a broker's log, or change nodes in ZooKeeper."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import time
from collections.abc import Iterable
from typing import cast

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException

from minibroker.client.admin import Admin
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.who import Controller
from minibroker.protocol import apis, znodes
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.world.real import RealNetwork
from tests.faults.hostile.attacks import ATTACK_S, Target, attack

FEW = {"max.connections": "400", "max.connections.per.ip": "300"}
"""Limits that are reached in a second. The brokers are asked from this machine as well, so they count together."""
PER_ADDRESS = 330
"""More connections than one address may have."""
FULL = 250
"""Connections of strangers with which a listener counts as full; brokers and clients have the rest of the places."""
FULL_WITHIN_S = 6.0
STALL_S = 3.0
"""The longest time without a controller or a leader that a killed broker may cause."""


class _Silent(asyncio.Protocol):
    """A connection that sends `first`, and nothing more. It is in `held` while it is open."""

    def __init__(self, first: bytes | bytearray, held: set[_Silent]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first = first
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held.add(self)
        if self._first:
            cast(asyncio.Transport, transport).write(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)


async def _hold(address: str, port: int, first: bytes | bytearray, until_s: float, held: set[_Silent]) -> None:
    """Keep a connection open until that time, with a new one for each that is closed."""
    loop = asyncio.get_running_loop()
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            transport, protocol = await loop.create_connection(
                lambda: _Silent(first, held), LOOPBACK, port, local_addr=(address, 0)
            )
        except OSError:
            await asyncio.sleep(0.5)
            continue
        await asyncio.wait([protocol.ended], timeout=left_s)
        transport.abort()
        await asyncio.sleep(min(1.0, max(0.0, until_s - time.monotonic())))


async def _fill(
    ports: Iterable[int],
    count: int,
    until_s: float,
    held: set[_Silent],
    first: bytes | bytearray = b"",
    addresses: int = 1,
) -> None:
    """Keep `count` connections from each address to each port open until that time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sources = [f"127.0.0.{2 + number}" for number in range(addresses)] if addresses > 1 else [LOOPBACK]
    async with asyncio.TaskGroup() as tasks:
        for number, (address, port) in enumerate(itertools.product(sources * count, ports)):
            tasks.create_task(_hold(address, port, first, until_s, held))
            if number % 20 == 19:
                await asyncio.sleep(0.01)


async def _until_full(held: set[_Silent], ports: int) -> None:
    began_s = time.monotonic()
    while len(held) < FULL * ports:
        assert time.monotonic() < began_s + FULL_WITHIN_S, f"{len(held)} connections to {ports} listeners are held"
        await asyncio.sleep(0.05)


async def _until_controller(cluster: LocalCluster, other_than: int) -> float:
    began_s = time.monotonic()
    while True:
        view = await asyncio.to_thread(cluster.view)
        has_leaders = all(state.leader_id not in (-1, other_than) for state in view.partitions.values())
        if view.controller_id not in (None, other_than) and has_leaders and len(view.brokers) == 2:
            return time.monotonic() - began_s
        await asyncio.sleep(0.05)


@attack(settings=FEW, ends_sessions=True)
async def idle_strangers_on_control_listeners(target: Target) -> None:
    """The control listeners are kept full by strangers who say nothing, and the controller is killed."""
    began_s = time.monotonic()
    held: set[_Silent] = set()
    filling = asyncio.create_task(_fill(target.control_ports.values(), PER_ADDRESS, began_s + ATTACK_S - 1.0, held))
    await _until_full(held, len(target.control_ports))
    cluster = target.cluster()
    (killed,) = await asyncio.to_thread(cluster.kill, Controller())
    assert isinstance(killed, int)
    took_s = await _until_controller(cluster, killed)
    await filling
    print(f"a controller and leaders {took_s:.2f} s after the kill")
    assert took_s < STALL_S, f"no controller and leaders for {took_s:.1f} s"
    suspected = [
        line
        for broker in target.control_ports
        for line in cluster.log_of(broker).read_text().splitlines()
        if "suspected to have crashed" in line and f"broker {killed} is" not in line
    ]
    assert not suspected, suspected


@attack(settings=FEW)
async def idle_strangers_on_data_listeners(target: Target) -> None:
    """The data listeners are kept full by strangers, of whom half have sent one valid request."""
    until_s = time.monotonic() + ATTACK_S - 1.0
    versions = apis.encode_request(apis.API_VERSIONS, 1, "stranger", m.ApiVersionsRequest("stranger", "1"))
    ports = list(target.data_ports.values())
    held: set[_Silent] = set()
    filling = [
        asyncio.create_task(_fill(ports, PER_ADDRESS // 2, until_s, held, first, addresses=2))
        for first in (b"", versions)
    ]
    await _until_full(held, len(ports))
    slowest_s, count = 0.0, 0
    while time.monotonic() < until_s:
        for host_port in target.bootstrap.split(","):
            began_s = time.monotonic()
            async with Admin(host_port, default_api_timeout_ms=3_000) as admin:
                await admin.list_topics()
            slowest_s, count = max(slowest_s, time.monotonic() - began_s), count + 1
    await asyncio.gather(*filling)
    print(f"{count} administrators came in, the slowest within {slowest_s:.2f} s")


@attack()
async def forged_log_lines(target: Target) -> None:
    """Names with line breaks are sent in a loop, to forge lines that the launcher believes and to fill the disk."""
    cluster = target.cluster()
    logs = [cluster.log_of(broker) for broker in target.data_ports]
    before = sum(log.stat().st_size for log in logs)
    until_s = time.monotonic() + ATTACK_S - 2.0
    forged = "\n".join(
        [
            "x",
            "2026-11-28T03:00:00.123 ready broker.id=1 port=1",
            '2026-11-28T03:00:00.123 handed over: {"moved":77,"remaining":0,"among_them":[],"problem":""}',
            "error: FORGED",
        ]
    )
    name = forged + "y" * 200 + "\nerror: FORGED"

    async def send(port: int) -> int:
        count = 0
        connection = await open_connection(RealNetwork(), LOOPBACK, port, client_id=forged[:249], timeout_s=5.0)
        while time.monotonic() < until_s and not connection.closed:
            protocols = [g.JoinGroupProtocol(name, b"")]
            group = f"{count % 100}{forged}"
            join = g.JoinGroupRequest(group, 30_000, 30_000, "", None, "consumer", protocols, reason=name)
            proof = m.BrokerHandshakeRequest(1, 9, bytes(m.PROOF_BYTES))
            try:
                with contextlib.suppress(BrokerError):
                    await connection.request(apis.JOIN_GROUP, join, timeout_s=5.0)
                with contextlib.suppress(BrokerError):
                    await connection.request(apis.BROKER_HANDSHAKE, proof, timeout_s=5.0)
            except MinibrokerError:
                return count
            count += 2
        return count

    counts = await asyncio.gather(*(send(port) for port in target.data_ports.values() for _ in range(4)))
    written = sum(log.stat().st_size for log in logs) - before
    print(f"{sum(counts)} requests, {written / 1e6:.2f} MB of log")
    assert written < 20e6, f"{written / 1e6:.1f} MB of log"
    bad = [line for log in logs for line in log.read_text().splitlines() if line.startswith("error:")]
    assert not bad, bad[:3]
    for broker in target.data_ports:
        assert cluster.handed_over(broker) is None


@attack()
async def strangers_in_zookeeper(target: Target) -> None:
    """The endpoints of brokers are rewritten in ZooKeeper, and the controller's node is deleted."""
    connect = target.cluster().file().zookeeper.connect

    def write() -> list[str]:
        client = KazooClient(hosts=connect)
        client.start()
        done: list[str] = []
        try:
            for broker, port in target.data_ports.items():
                path = znodes.broker_path(broker)
                data, _ = client.get(path)
                for change, *arguments in (
                    (client.set, path, data.replace(str(port).encode(), b"1")),
                    (client.delete, znodes.CONTROLLER),
                    (client.create, "/stranger"),
                ):
                    with contextlib.suppress(KazooException):
                        change(*arguments)
                        done.append(f"{change.__name__} {arguments[0]}")
        finally:
            client.stop()
            client.close()
        return done

    done = await asyncio.to_thread(write)
    assert not done, done
