"""Serve a legitimate client while hundreds of other connections are slow or half-open.

    python -m tests.faults.slow_connections [--connections 500] [--seconds 45] [--seed 1] [--keep DIR]

A third of the connections sends one byte of a frame per second (slowloris), a third sends nothing, and a third requests
data again and again without reading an answer. They come from their own process, of a lower priority, and another
address, so that neither their cost nor their limit (`max.connections.per.ip`) applies to the legitimate client; the
storm tries a tenth more than are allowed. The legitimate client sends requests at a fixed rate, half of them Metadata
and half a small Produce, and measures each from the time it was due. Printed: p50, p99 and the largest, without the
storm (before and after it, together) and in it. Judged: the p99 of a usual second (the median of all seconds' p99). The
p99 over all seconds would depend on the rare stalls of 50 ms that a machine has with and without the storm. Exit code 1
unless every check passed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.apis import Plane
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.records import encode_batch
from minibroker.protocol.world.real import RealWorld
from tests.faults.hostile.frames import Check, bad_lines, report, resident_bytes, start_broker

ACCEPTED_AT_ONCE = 64
"""Sockets that are accepted, about to be refused, and therefore open for a moment."""
TOPIC = "legitimate"
FILLED_TOPIC = "filled"
FILLED_BYTES = 8 * 1024 * 1024
STORM_ADDRESS = "127.0.0.2"
REQUESTS_PER_SECOND = 200
WARM_UP_S = 5.0
MAX_SLOWDOWN = 3.0
BYTES_PER_CONNECTION = 1024 * 1024
"""Memory that one connection may cost the broker: a megabyte of unread answers, and some for its frames."""


# --- The storm, in its own process ----------------------------------------------------------------------------------


class Storm:
    """Keeps connections open, and reopens those that the broker closes."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = Random(seed)
        self.now: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()

    async def keep(self, kind: str) -> None:
        while True:
            raw = socket.socket()
            raw.setblocking(False)
            # Small, so that the broker's buffers fill up soon when a peer does not read.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            raw.bind((STORM_ADDRESS, 0))
            try:
                await asyncio.get_running_loop().sock_connect(raw, (LOOPBACK, self._port))
                reader, writer = await asyncio.open_connection(sock=raw)
            except OSError:
                raw.close()
                self.closed["not accepted"] += 1
                await asyncio.sleep(1)
                continue
            self.now[kind] += 1
            began_s = time.monotonic()
            try:
                await getattr(self, kind)(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                self.now[kind] -= 1
                writer.transport.abort()
            self.closed["refused" if time.monotonic() - began_s < 1.0 else f"{kind}, later"] += 1
            await asyncio.sleep(1 + self._random.random())

    async def drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = apis.encode_request(apis.METADATA, 1, "slow", m.MetadataRequest(["t" * 20] * 50))
        ended = asyncio.ensure_future(reader.read(1))
        try:
            for byte in frame:
                writer.write(bytes([byte]))
                done, _ = await asyncio.wait([ended], timeout=1.0)
                if done:
                    return
        finally:
            ended.cancel()

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async def deaf(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Request 64 KiB twice a second, as a consumer may, until the socket is full; read nothing."""
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        wanted = m.FetchTopic(FILLED_TOPIC, "", [m.FetchPartition(0, -1, 0, -1, -1, 64 * 1024)])
        request = apis.encode_request(apis.FETCH, 1, "deaf", m.FetchRequest(-1, 0, 1, 64 * 1024, 0, [wanted]))
        await asyncio.sleep(self._random.random())
        while not writer.is_closing():
            writer.write(bytes(request))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await writer.drain()
            await asyncio.sleep(0.5)
        raise ConnectionResetError


KINDS = ("drip", "silent", "deaf")


async def storm(port: int, connections: int, seed: int, broker_pid: int) -> None:
    """Run the storm until standard input ends. Once a second, print how many sockets and bytes the broker uses, and the
    storm's own counts.

    This process watches the broker: a look at hundreds of descriptors takes milliseconds, which would distort the
    latencies in the process that measures.
    """
    running = Storm(port, seed)
    tasks = [asyncio.create_task(running.keep(KINDS[n % len(KINDS)])) for n in range(connections)]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        print(sockets_of(broker_pid), resident_bytes(broker_pid), dict(running.now), dict(running.closed), flush=True)
        await asyncio.wait([ended], timeout=1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- The legitimate client -------------------------------------------------------------------------------------------


class Latencies(NamedTuple):
    milliseconds: list[float]
    """The latencies in the order of the answers."""
    failed: int

    def p99_of_a_usual_second(self) -> float:
        """The median of the p99 of each second, which rare stalls of the machine hardly change."""
        seconds = zip(*[iter(self.milliseconds)] * REQUESTS_PER_SECOND, strict=False)
        return float(median(sorted(second)[int(REQUESTS_PER_SECOND * 0.99)] for second in seconds))

    def at(self, part: float) -> float:
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))]

    def __str__(self) -> str:
        return (
            f"{len(self.milliseconds)} requests, p50 {self.at(0.5):.2f} ms, p99 {self.at(0.99):.2f} ms, "
            f"largest {self.at(1):.2f} ms, p99 of a usual second {self.p99_of_a_usual_second():.2f} ms, "
            f"{self.failed} failed"
        )


async def measure(connection: Connection, seconds: float) -> Latencies:
    """Send requests at a fixed rate, without waiting for the answers to earlier ones."""
    milliseconds: list[float] = []
    failed = 0
    records = memoryview(encode_batch([b"x" * 100], base_timestamp=1_700_000_000_000))
    produce = m.ProduceRequest(None, -1, 10_000, [m.ProduceTopic(TOPIC, [m.ProducePartition(0, records)])])
    metadata = m.MetadataRequest([TOPIC])

    async def one(number: int, due_s: float) -> None:
        nonlocal failed
        if number % 2:
            answer = await connection.request(apis.METADATA, metadata, timeout_s=10)
            failed += answer.topics[0].error_code != 0
        else:
            produced = await connection.request(apis.PRODUCE, produce, timeout_s=10)
            failed += produced.responses[0].partition_responses[0].error_code != 0
        milliseconds.append((time.monotonic() - due_s) * 1_000)

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * REQUESTS_PER_SECOND)):
            due_s = began_s + number / REQUESTS_PER_SECOND
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(one(number, due_s))
    return Latencies(milliseconds, failed)


def sockets_of(pid: int) -> int:
    """The number of sockets that the process has open."""
    found = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(entry.path).startswith("socket:")
    return found


async def run(directory: Path, connections: int, seconds: float, seed: int) -> list[Check]:
    cluster = LocalCluster(directory)
    tried = connections + connections // 10
    settings = {"max.connections.per.ip": str(connections), "default.replication.factor": "1"}
    ports = await asyncio.to_thread(start_broker, cluster, settings)
    port = ports[Plane.DATA]
    world = RealWorld()
    try:
        process = cluster.file().broker(1).process
        assert process is not None
        async with Admin(cluster.bootstrap()) as admin:
            for topic in (TOPIC, FILLED_TOPIC):
                await admin.create_topic(topic, partitions=1, replication_factor=1)
        async with Producer(cluster.bootstrap()) as producer:
            for _ in range(FILLED_BYTES // 65_000):
                producer.send(FILLED_TOPIC, bytes(65_000), partition=0)
                await producer.flush()
        connection = await open_connection(world.network, LOOPBACK, port, client_id="legitimate", timeout_s=5)
        await measure(connection, WARM_UP_S)
        sockets_before = sockets_of(process.pid)
        before_bytes = resident_bytes(process.pid)
        before = await measure(connection, seconds / 2)

        attacker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.slow_connections",
            *("--storm", str(port), "--watch", str(process.pid), "--connections", str(tried), "--seed", str(seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=lambda: os.nice(10) and None,
        )
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        async with asyncio.timeout(20):
            while sockets_of(process.pid) - sockets_before < connections:
                await asyncio.sleep(0.1)
        during = await measure(connection, seconds)
        attacker.stdin.close()
        said = [line.split(maxsplit=2) for line in (await attacker.stdout.read()).decode().splitlines()]
        await attacker.wait()
        most = max(int(sockets) for sockets, _, _ in said) - sockets_before
        most_bytes = max(int(resident) for _, resident, _ in said)
        after = await measure(connection, seconds / 2)
        after_bytes = resident_bytes(process.pid)
        quiet = Latencies(before.milliseconds + after.milliseconds, before.failed + after.failed)
        failed = quiet.failed + during.failed

        print(f"storm, as it saw itself (open, then closed): {said[-1][2]}")
        print(f"before: {before}\nafter: {after}\nwithout the storm: {quiet}\nin the storm: {during}")
        limit_bytes = before_bytes + connections * BYTES_PER_CONNECTION
        lines = bad_lines(cluster.log_of(1))
        said_so = sum("is reached" in line for line in cluster.log_of(1).read_text().splitlines())
        return [
            Check(
                "p99 of legitimate requests, of a usual second",
                (usual := during.p99_of_a_usual_second()) <= MAX_SLOWDOWN * quiet.p99_of_a_usual_second(),
                f"{usual:.2f} ms in the storm, {quiet.p99_of_a_usual_second():.2f} ms without: "
                f"{usual / quiet.p99_of_a_usual_second():.2f} times (limit {MAX_SLOWDOWN:g}); "
                f"over all seconds, stalls of the machine among them: {during.at(0.99) / quiet.at(0.99):.2f} times",
            ),
            Check("no legitimate request fails", not failed, f"{failed} failed"),
            Check(
                "connection limits hold",
                said_so > 0 and most <= connections + ACCEPTED_AT_ONCE,
                f"{tried} tried, at most {most} at once, the limit is {connections}; {said_so} lines say so",
            ),
            Check(
                "memory is bounded",
                most_bytes <= limit_bytes,
                f"{before_bytes / 2**20:.0f} MiB before, at most {most_bytes / 2**20:.0f} MiB in the storm, "
                f"{after_bytes / 2**20:.0f} MiB after (limit {limit_bytes / 2**20:.0f})",
            ),
            Check("the broker lives", cluster.state_of(1).name == "RUNNING", f"process {process.pid}"),
            Check("no unhandled exception in its log", not lines, f"{len(lines)} lines {lines[:5]}"),
        ]
    finally:
        world.close()
        await asyncio.to_thread(cluster.down, kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=45, help="duration of the storm, and of the time without it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    parser.add_argument("--storm", type=int, metavar="PORT", help="be the storm, until the standard input ends")
    parser.add_argument("--watch", type=int, metavar="PID", help="with --storm: the broker's process")
    arguments = parser.parse_args()
    let_signals_interrupt()
    if arguments.storm is not None:
        uvloop.run(storm(arguments.storm, arguments.connections, arguments.seed, arguments.watch))
        return
    print(f"seed {arguments.seed}, {arguments.connections} connections", flush=True)
    with tempfile.TemporaryDirectory(prefix="minibroker-storm-") as temporary:
        directory = arguments.keep or Path(temporary)
        checks = uvloop.run(run(directory, arguments.connections, arguments.seconds, arguments.seed))
    sys.exit(report("slow_connections", checks))


if __name__ == "__main__":
    main()
