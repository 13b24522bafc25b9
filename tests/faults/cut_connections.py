"""Send a million records while the producer's connections are cut, mostly between the append and the answer.

    python -m tests.faults.cut_connections [--records 1000000] [--seed 1] [--keep DIR]

A TCP proxy stands between the producer and each broker of a cluster of real processes. At some answers the proxy resets
both connections instead of passing the bytes on: the records are in the log, and the producer cannot know it. More
rarely it cuts in the middle of a request. The producer alternates between `send` and `send_batch`. Then a consumer
reads the topic from its beginning, without the proxies, and compares each value with the one sent. Exit code 1 if a
record is duplicated, missing or out of order, or if no connection was cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.cli.bench.values import ContentCheck, ContentVerdict, Values
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol.world.real import RealNetwork, RealWorld

BROKERS = 3
PARTITIONS = 6
VALUE_BYTES = 50
BATCH_SIZE = 8 * 1024
AT_ONCE = 500
"""Records sent with `send_batch`, then as many with `send`."""

AFTER_THE_APPEND = 0.1
"""The probability that an answer is cut."""
IN_A_REQUEST = 0.003
"""The probability that a piece of a request is cut."""

_PIECE_BYTES = 64 * 1024

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Outcome(NamedTuple):
    verdict: ContentVerdict
    cut_after_append: int
    cut_in_request: int
    seconds: float

    @property
    def problem(self) -> str | None:
        if self.verdict.problem is not None:
            return self.verdict.problem
        return None if self.cut_after_append else "no connection was cut"


class Proxy:
    """Passes bytes between clients and one port, and sometimes cuts a connection."""

    def __init__(self, port: int, random: Random) -> None:
        self._target = port
        self._random = random
        self.cuts = [0, 0]
        """Cuts after an append, and within a request."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Return the port of the proxy."""
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        try:
            server_reader, server_writer = await asyncio.open_connection(LOOPBACK, self._target)
            writers.append(server_writer)
            ways = (
                asyncio.create_task(self._pass_on(reader, server_writer, IN_A_REQUEST, 1)),
                asyncio.create_task(self._pass_on(server_reader, writer, AFTER_THE_APPEND, 0)),
            )
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the other side closed first, or the run has ended; asyncio's server would log either
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, risk: float, kind: int
    ) -> None:
        """Pass bytes on until either side closes or the connection is cut."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                if self._random.random() < risk:
                    self.cuts[kind] += 1
                    writer.write(data[: self._random.randrange(len(data))])
                    return
                writer.write(data)
                await writer.drain()


class ProxiedNetwork(RealNetwork):
    """Connects to brokers through their proxies."""

    def __init__(self, ports: dict[int, int]) -> None:
        super().__init__()
        self._ports = ports

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        return await super().connect(host, self._ports[port], factory)


async def send_all(bootstrap: str, topic: str, records: int, ports: dict[int, int]) -> None:
    source = Values()
    world = RealWorld()
    world.network = ProxiedNetwork(ports)
    async with Producer(
        bootstrap, batch_size=BATCH_SIZE, retry_backoff_ms=5, max_block_ms=60_000, world=world
    ) as producer:
        for first in range(0, records, AT_ONCE):
            values = [source.make(1, number, VALUE_BYTES) for number in range(first, min(first + AT_ONCE, records))]
            if first // AT_ONCE % 2:
                producer.send_batch(topic, values)
            else:
                for value in values:
                    producer.send(topic, value)
            await producer.drain()
    world.close()


async def read_all(bootstrap: str, topic: str) -> ContentVerdict:
    check = ContentCheck()
    async with Consumer(bootstrap, topics=[topic]) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        left = sum(ends.values())
        async for batch in consumer.batches():
            check.add(batch.partition, batch.values)
            left -= len(batch)
            if left <= 0:
                break
    return check.verdict()


async def run(bootstrap: str, records: int, seed: int) -> Outcome:
    """Run against the cluster at `bootstrap`, which must be on this machine."""
    ports = [int(address.rpartition(":")[2]) for address in bootstrap.split(",")]
    proxies = [Proxy(port, Random(f"{seed}/{port - ports[0]}")) for port in ports]
    passages = {port: await proxy.start() for port, proxy in zip(ports, proxies, strict=True)}
    topic = f"cut-{seed}"
    try:
        async with Admin(bootstrap) as admin:
            await admin.create_topic(topic, partitions=PARTITIONS, replication_factor=BROKERS)
        began = time.monotonic()
        await send_all(bootstrap, topic, records, passages)
        seconds = time.monotonic() - began
    finally:
        for proxy in proxies:
            await proxy.close()
    verdict = await read_all(bootstrap, topic)
    after, within = (sum(proxy.cuts[kind] for proxy in proxies) for kind in (0, 1))
    if verdict.checked + verdict.missing < records:
        verdict = verdict._replace(missing=records - verdict.checked)
    return Outcome(verdict, after, within, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="use this directory and leave it, for its logs")
    arguments = parser.parse_args()
    let_signals_interrupt()
    with tempfile.TemporaryDirectory(prefix="minibroker-cut-") as temporary:
        cluster = LocalCluster(arguments.keep or Path(temporary))
        cluster.up(BROKERS, free_ports(BROKERS)[0])
        try:
            outcome = uvloop.run(run(cluster.bootstrap(), arguments.records, arguments.seed))
        finally:
            cluster.down(kill=True)
    verdict = outcome.verdict
    print(
        f"cut_connections: {verdict.checked} of {arguments.records} records are there, {verdict.duplicated} twice, "
        f"{verdict.missing} missing, {verdict.out_of_order} out of order, {verdict.altered} altered, after "
        f"{outcome.cut_after_append} cuts after an append and {outcome.cut_in_request} in a request, "
        f"in {outcome.seconds:.0f} s"
    )
    if outcome.problem is not None:
        print(f"cut_connections: {outcome.problem}")
        sys.exit(1)


if __name__ == "__main__":
    main()
