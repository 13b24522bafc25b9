"""What each role costs: processor time per MB of a client, a leader and a follower; memory of partitions, connections.

    python -m tests.benchmarks.bench_roles [--megabytes 200] [--partitions 1000] [--connections 1000]

The cluster has three brokers as processes of this machine. One of them leads all partitions of a topic, with two
followers or none, so each process has one role. The client is this process: the producer sends distinct values one by
one with acks=all, the consumer reads batches. Times of brokers and ZooKeeper are from /proc, in ms per MB of values.
Afterwards partitions are created and left idle, and then idle connections are opened, each after an ApiVersions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.cli.terminal.output import print_table
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt
from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world.real import RealNetwork
from tests.benchmarks.bench_partitions import cpu_s

BROKERS = (1, 2, 3)
LEADER, FOLLOWER = "broker 1", "broker 2"
LOADS = [(100, 1, 3), (1_024, 1, 3), (100, 1, 1), (1_024, 1, 1), (100, 100, 3), (1_024, 100, 3)]
"""Bytes per value, partitions, replicas."""
DISTINCT_BYTES = 20_000_000
SINGLE_RECORDS = 5_000
IDLE_S = 10.0
TIMEOUT_S = 60.0

Cpu = dict[str, float]


@contextlib.asynccontextmanager
async def spent(cluster: LocalCluster) -> AsyncIterator[Cpu]:
    """Yield a dict that has the processor time of each process at the end."""
    found: Cpu = {}
    before, own_s, began_s = cpu_s(cluster), time.process_time(), time.monotonic()
    yield found
    own_s, wall_s = time.process_time() - own_s, time.monotonic() - began_s
    found |= {name: seconds - before[name] for name, seconds in cpu_s(cluster).items()}
    found |= {"client": own_s, "wall": wall_s}


async def create(cluster: LocalCluster, topic: str, partitions: int, replicas: int) -> None:
    async with Admin(cluster.bootstrap(), default_api_timeout_ms=TIMEOUT_S * 1_000) as admin:
        await admin.create_topics([NewTopic(topic, assignments=[BROKERS[:replicas]] * partitions)])
    await asyncio.sleep(1)  # what follows a creation is not to be measured


async def produce(bootstrap: str, topic: str, values: list[bytes], times: int) -> None:
    async with Producer(bootstrap) as producer:
        for _ in range(times):
            for value in values:
                producer.send(topic, value)
                await producer.drain()
        await producer.flush()


async def consume(bootstrap: str, topic: str, partitions: int, records: int) -> None:
    assigned = [TopicPartition(topic, number) for number in range(partitions)]
    async with Consumer(bootstrap, partitions=assigned, auto_offset_reset="earliest") as consumer:
        async for batch in consumer.batches():
            records -= len(batch)
            if records <= 0:
                return


async def loads(cluster: LocalCluster, megabytes: int) -> None:
    rows: list[tuple[object, ...]] = []
    for size, partitions, replicas in LOADS:
        topic = f"load-{size}-{partitions}-{replicas}"
        await create(cluster, topic, partitions, replicas)
        values = [os.urandom(size) for _ in range(DISTINCT_BYTES // size)]
        times = max(1, megabytes * 1_000_000 // DISTINCT_BYTES)
        sent_mb = times * len(values) * size / 1e6
        for what, work in (
            ("produce", produce(cluster.bootstrap(), topic, values, times)),
            ("consume", consume(cluster.bootstrap(), topic, partitions, times * len(values))),
        ):
            async with spent(cluster) as cpu:
                await work
            of = {name: round(seconds * 1_000 / sent_mb, 2) for name, seconds in cpu.items()}
            rows.append(
                (what, size, partitions, replicas, of["client"], of[LEADER], of[FOLLOWER], round(sent_mb / cpu["wall"]))
            )
    print_table(("action", "bytes", "partitions", "replicas", "client", "leader", "a follower", "MB/s"), rows)


async def single_records(cluster: LocalCluster, count: int) -> None:
    """A request for each record, one after the other: the cost of a request."""
    await create(cluster, "single", 1, 3)
    async with Producer(cluster.bootstrap()) as producer:
        await producer.send("single", b"first")
        async with spent(cluster) as cpu:
            for _ in range(count):
                await producer.send("single", b"v" * 100)
    of = {name: seconds * 1_000 / count for name, seconds in cpu.items()}
    print(
        f"ms per acknowledged request of one record: client {of['client']:.2f}, leader {of[LEADER]:.2f}, "
        f"a follower {of[FOLLOWER]:.2f}"
    )


def resident_bytes(cluster: LocalCluster) -> dict[int, int]:
    found = {}
    for entry in cluster.file().brokers:
        assert entry.process is not None
        [kilobytes] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{entry.process.pid}/status").read_text())
        found[entry.id] = int(kilobytes) * 1_024
    return found


async def idle(cluster: LocalCluster, what: str) -> None:
    async with spent(cluster) as cpu:
        await asyncio.sleep(IDLE_S)
    shares = ", ".join(
        f"{name} {seconds / cpu['wall']:.1%}" for name, seconds in sorted(cpu.items()) if "wall" not in name
    )
    memory = ", ".join(f"{size / 1e6:.0f}" for size in resident_bytes(cluster).values())
    print(f"{what}: of a core: {shares}; MB of the brokers: {memory}", flush=True)


async def partitions_and_connections(cluster: LocalCluster, partitions: int, connections: int) -> None:
    await idle(cluster, "idle")
    before = resident_bytes(cluster)
    await create(cluster, "many", partitions, 3)
    await asyncio.sleep(IDLE_S)
    after = resident_bytes(cluster)
    each = ", ".join(
        f"{broker_id}: {(after[broker_id] - before[broker_id]) / partitions / 1e3:.1f}" for broker_id in before
    )
    print(f"memory per replica in KB, {partitions} partitions, all led by broker 1: {each}")
    await idle(cluster, f"idle, {partitions} partitions more")
    port = cluster.file().brokers[0].port
    opened = [
        await open_connection(RealNetwork(), LOOPBACK, port, client_id="idle", timeout_s=TIMEOUT_S)
        for _ in range(connections)
    ]
    for connection in opened:
        await connection.request(apis.API_VERSIONS, m.ApiVersionsRequest("idle", "1"), timeout_s=TIMEOUT_S)
    grown = resident_bytes(cluster)[1] - after[1]
    print(f"memory per connection: {grown / connections / 1e3:.1f} KB, {connections} connections")
    for connection in opened:
        connection.close()


@contextlib.contextmanager
def running() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="minibroker-roles-") as directory:
        cluster = LocalCluster(Path(directory))
        cluster.up(len(BROKERS), free_ports(len(BROKERS))[0])
        try:
            yield cluster
        finally:
            cluster.down(kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of values, for each load")
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--connections", type=int, default=1_000)
    arguments = parser.parse_args()
    let_signals_interrupt()
    with running() as cluster:
        uvloop.run(partitions_and_connections(cluster, arguments.partitions, arguments.connections))
    with running() as cluster:
        uvloop.run(loads(cluster, arguments.megabytes))
        uvloop.run(single_records(cluster, SINGLE_RECORDS))


if __name__ == "__main__":
    main()
