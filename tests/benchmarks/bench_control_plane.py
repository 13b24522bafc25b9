"""The latency of the controller's orders while producers saturate the broker, which shows the gain of a control plane.

    python -m tests.benchmarks.bench_control_plane [--seconds 5]

The broker is a real one. One process floods it: many connections to a data listener, each with several small produce
requests (acks=1) in flight, so that the handlers always have a queue. Another process sends each listener one request
at a time, as a controller does: UpdateMetadata (with nothing new) and ApiVersions to the control listener, ApiVersions
and Metadata to the data listener. Both planes accept ApiVersions, so its two rows differ only in the plane.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, cast

import uvloop
from kazoo.client import KazooClient

from minibroker.client.admin import Admin
from minibroker.client.cli.bench.report import percentile
from minibroker.controller.zookeeper import KazooZooKeeper
from minibroker.deploy.local import secret_file
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol import apis, znodes
from minibroker.protocol import messages as m
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.framing import FrameReader
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import CONTROL_LISTENER, DEFAULT_LISTENER, RegisteredBroker, TopicPartition
from minibroker.protocol.records import encode_batch
from minibroker.protocol.world.real import RealWorld

CONNECTIONS = 250
IN_FLIGHT = 4
VALUE_BYTES = 1_000
PAUSE_S = 0.001
"""Between two rounds of probes of a listener."""
PROBE_TIMEOUT_S = 30.0
IDLE, FLOOD = "idle", "flood"


class Row(NamedTuple):
    request: str
    listener: str
    load: str
    p50_ms: float
    p99_ms: float
    max_ms: float


class Orders(NamedTuple):
    """The orders that the cluster's controller would send to one of its brokers."""

    broker: RegisteredBroker
    update_metadata: m.UpdateMetadataRequest
    secret: bytes

    def address(self, listener: str) -> tuple[str, int]:
        return next((e.host, e.port) for e in self.broker.endpoints if e.listener == listener)


def read_orders(connect: str, broker_id: int, secret: bytes) -> Orders:
    """Read from ZooKeeper, as the controller does. The secret is that of the cluster's brokers."""
    client = KazooClient(hosts=connect)
    client.start()
    try:
        brokers = []
        for child in sorted(client.get_children(znodes.BROKER_IDS)):
            data, stat = client.get(znodes.broker_path(int(child)))
            brokers.append(znodes.decode_broker(int(child), data, stat.czxid))
        controller_id = znodes.decode_controller(client.get(znodes.CONTROLLER)[0])
        controller_epoch = znodes.decode_controller_epoch(client.get(znodes.CONTROLLER_EPOCH)[0])
    finally:
        client.stop()
        client.close()
    broker = next(broker for broker in brokers if broker.id == broker_id)
    live = [
        m.UpdateMetadataBroker(
            b.id, [m.UpdateMetadataEndpoint(e.port, e.host, e.listener) for e in b.endpoints], b.rack, b.epoch
        )
        for b in brokers
    ]
    return Orders(broker, m.UpdateMetadataRequest(controller_id, controller_epoch, broker.epoch, [], live), secret)


class Flooding(asyncio.BufferedProtocol):
    """Sends the request again for every answer and decodes none, which leaves the processor to the broker."""

    answers = 0

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._reader = FrameReader(lambda prefix: 1 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._frame * IN_FLIGHT)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        count = sum(1 for _ in self._reader.buffer_updated(nbytes))
        self.answers += count
        self._transport.write(self._frame * count)


def flood(pipe: multiprocessing.connection.Connection, host: str, port: int, topic: str) -> None:
    """Run until the pipe gets a message; then send the number of answers, and the seconds they took."""
    batch = memoryview(bytes(encode_batch([os.urandom(VALUE_BYTES)], base_timestamp=int(time.time() * 1_000))))
    produce = m.ProduceRequest(None, 1, 30_000, [m.ProduceTopic(topic, [m.ProducePartition(0, batch)])])
    frame = bytes(apis.encode_request(apis.PRODUCE, 1, "flood", produce))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        floods = [(await loop.create_connection(lambda: Flooding(frame), host, port))[1] for _ in range(CONNECTIONS)]
        while not all(flooding.answers for flooding in floods):
            await asyncio.sleep(0.01)
        before, began = sum(flooding.answers for flooding in floods), time.monotonic()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        pipe.send((sum(flooding.answers for flooding in floods) - before, time.monotonic() - began))

    uvloop.run(main())


Probe = Callable[[], Awaitable[int]]
"""Sends a request and returns the error code of the answer."""


async def probe(orders: Orders, topic: str, seconds: float, load: str) -> list[Row]:
    world = RealWorld(KazooZooKeeper())
    as_controller = BrokerConnections(world, orders.update_metadata.controller_id, orders.secret)
    control = await as_controller.open(
        orders.broker.id,
        *orders.address(CONTROL_LISTENER),
        client_id="probe",
        connect_timeout_s=PROBE_TIMEOUT_S,
        request_timeout_s=PROBE_TIMEOUT_S,
    )
    data = await open_connection(
        world.network, *orders.address(DEFAULT_LISTENER), client_id="probe", timeout_s=PROBE_TIMEOUT_S
    )

    async def update_metadata() -> int:
        return (
            await control.request(apis.UPDATE_METADATA, orders.update_metadata, timeout_s=PROBE_TIMEOUT_S)
        ).error_code

    async def versions(connection: Connection) -> int:
        request = m.ApiVersionsRequest("probe", "1")
        return (await connection.request(apis.API_VERSIONS, request, timeout_s=PROBE_TIMEOUT_S)).error_code

    async def metadata() -> int:
        answer = await data.request(apis.METADATA, m.MetadataRequest([topic]), timeout_s=PROBE_TIMEOUT_S)
        return answer.topics[0].error_code

    probes: list[tuple[str, str, Probe]] = [
        ("UpdateMetadata", "control", update_metadata),
        ("ApiVersions", "control", lambda: versions(control)),
        ("ApiVersions", "data", lambda: versions(data)),
        ("Metadata", "data", metadata),
    ]
    times: list[list[float]] = [[] for _ in probes]

    async def ask_in_turn(asked_listener: str) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for (name, listener, ask), taken in zip(probes, times, strict=True):
                if listener == asked_listener:
                    began = time.perf_counter()
                    code = await ask()
                    taken.append((time.perf_counter() - began) * 1_000)
                    if code != ErrorCode.NONE:
                        raise SystemExit(f"{name} on the {listener} listener was refused: {ErrorCode(code).name}")
            await asyncio.sleep(PAUSE_S)

    try:
        await asyncio.gather(*(ask_in_turn(listener) for listener in ("control", "data")))
    finally:
        for connection in (control, data):
            connection.close()
            await connection.wait_closed()
        world.close()
    return [
        Row(name, listener, load, percentile(sorted(taken), 0.5), percentile(sorted(taken), 0.99), max(taken))
        for (name, listener, _), taken in zip(probes, times, strict=True)
    ]


async def measure(cluster: LocalCluster, seconds: float) -> tuple[list[Row], float]:
    """Return the rows, and the produce requests that were answered per second of the flood. A topic remains."""
    topic = "bench-control-plane"
    async with Admin(cluster.bootstrap()) as admin:
        await admin.create_topic(topic, partitions=1, replication_factor=1)
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        while (state := (await asyncio.to_thread(cluster.view)).partitions.get(TopicPartition(topic, 0))) is None:
            await asyncio.sleep(0.05)
    secret = (cluster.directory / secret_file.FILE_NAME).read_bytes().strip()
    orders = await asyncio.to_thread(read_orders, cluster.file().zookeeper.connect, state.leader_id, secret)
    rows = await probe(orders, topic, seconds, IDLE)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=flood, args=(theirs, *orders.address(DEFAULT_LISTENER), topic), daemon=True, name="flood"
    )
    process.start()
    theirs.close()  # the wait then also ends if the process dies
    try:
        await asyncio.to_thread(ours.recv)
        rows += await probe(orders, topic, seconds, FLOOD)
        ours.send("end")
        answers, elapsed_s = await asyncio.to_thread(ours.recv)
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)
    return rows, answers / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the probes, each time")
    seconds = parser.parse_args().seconds
    let_signals_interrupt()
    with tempfile.TemporaryDirectory(prefix="minibroker-control-plane-") as directory:
        cluster = LocalCluster(Path(directory))
        cluster.up(1, free_ports(1)[0])
        try:
            rows, per_second = uvloop.run(measure(cluster, seconds))
        finally:
            cluster.down(kill=True)
    print(f"flood: {per_second:,.0f} produce requests a second, {CONNECTIONS} connections, {IN_FLIGHT} in flight each")
    for row in rows:
        print(
            f"{row.request:16}{row.listener:10}{row.load:8}"
            f"p50 {row.p50_ms:8.2f} ms, p99 {row.p99_ms:8.2f} ms, max {row.max_ms:8.2f} ms"
        )


if __name__ == "__main__":
    main()
