"""The network layer: requests per second through real sockets.

    python tests/benchmarks/bench_network.py [--seconds 2]

A client in its own process sends ApiVersions requests, `depth` of them at a time per connection, and counts the
answers. Two servers run under uvloop: the broker's SocketServer with a handler that answers, and, as the baseline of
the same run, a bare BufferedProtocol that splits the frames and writes each one back. At last both servers receive
frames of 64 KiB. (`bench_control_plane` measures control requests under a flood of a whole broker.)
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvloop

from minibroker.broker.network.server import NetworkSettings, Request, SocketServer
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.framing import FrameReader
from minibroker.protocol.world.real import RealWorld

LENGTH = struct.Struct(">i")
ANSWER = m.ApiVersionsResponse(0, [m.ApiVersion(api.key, 0, 0) for api in apis.APIS.values()])


class Echo(asyncio.BufferedProtocol):
    """The baseline: the cost of asyncio, uvloop and the framing."""

    def __init__(self) -> None:
        self._reader = FrameReader(lambda prefix: 1 << 30)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.buffer_updated(nbytes):
            answer = bytes(frame[:100])  # as short as the broker's answer
            self._transport.write(LENGTH.pack(len(answer)) + answer)


async def answer(request: Request) -> None:
    if request.api is apis.PRODUCE:
        request.respond(m.ProduceResponse([]))
    else:
        request.respond(ANSWER)


Ports = multiprocessing.connection.Connection


def serve_echo(ports: Ports) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        ports.send(port)
        await asyncio.to_thread(ports.recv)

    uvloop.run(main())


def serve_broker(ports: Ports) -> None:
    async def main() -> None:
        world = RealWorld()
        server = SocketServer(world, NetworkSettings(), answer)
        bound = await server.bind([("DATA", "127.0.0.1", 0, apis.Plane.DATA)])
        server.start()
        ports.send(bound["DATA"])
        await asyncio.to_thread(ports.recv)
        await server.close()
        world.close()

    uvloop.run(main())


def answer_size(port: int, frame: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(frame)
        header = connection.recv(4, socket.MSG_WAITALL)
        return int(4 + LENGTH.unpack(header)[0])


def flood(port: int, frame: bytes, connections: int, depth: int, seconds: float) -> tuple[int, float]:
    """Keep `depth` requests in flight on each connection; return (answers, seconds). All answers have the same size, so
    the client counts bytes and leaves the processor to the server."""
    size = answer_size(port, frame)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    burst = frame * depth
    answers = 0
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        for connection in sockets:
            connection.sendall(burst)
        for connection in sockets:
            missing = size * depth
            while missing:
                missing -= len(connection.recv(min(missing, 1 << 18)))
        answers += depth * connections
    for connection in sockets:
        connection.close()
    return answers, elapsed


class Server:
    def __init__(self, serve: Callable[[Ports], None]) -> None:
        self._ports, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
        self._process.start()
        self.port: int = self._ports.recv()

    def cpu_s(self) -> float:
        """Processor time that the server has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._ports.send(None)
        self._process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    small = bytes(apis.encode_request(apis.API_VERSIONS, 1, "bench", m.ApiVersionsRequest("bench", "1")))
    records = memoryview(os.urandom(64 * 1024))
    large = bytes(
        apis.encode_request(
            apis.PRODUCE,
            1,
            "bench",
            m.ProduceRequest(None, 1, 1_000, [m.ProduceTopic("t", [m.ProducePartition(0, records)])]),
        )
    )
    echo, broker = Server(serve_echo), Server(serve_broker)
    try:
        for name, frame, connections, depth in (
            ("small, 1 connection, 1 in flight", small, 1, 1),
            ("small, 1 connection, 64 in flight", small, 1, 64),
            ("small, 16 connections, 1 in flight", small, 16, 1),
            ("small, 16 connections, 16 in flight", small, 16, 16),
            ("64 KiB, 4 connections, 2 in flight", large, 4, 2),
        ):
            rates, costs = [], []
            for server in (echo, broker):
                cpu_before = server.cpu_s()
                answers, elapsed = flood(server.port, frame, connections, depth, seconds)
                rates.append(answers / elapsed)
                costs.append((server.cpu_s() - cpu_before) / answers * 1e6)
            print(
                f"{name:38} bare {rates[0]:9,.0f}/s {costs[0]:5.1f} µs    "
                f"broker {rates[1]:9,.0f}/s {costs[1]:5.1f} µs    ratio {rates[1] / rates[0]:.2f}",
                flush=True,
            )
    finally:
        echo.close()
        broker.close()


if __name__ == "__main__":
    main()
