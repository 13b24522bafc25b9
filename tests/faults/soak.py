"""Measure the memory of brokers while topics, groups, producers and connections come and go.

    python -m tests.faults.soak [--minutes 30] [--rate 0] [--keep DIR]

A producer sends to a topic that stays, `--rate` records a second (0: as many as it can). Beside it, topics are created,
filled and deleted, groups of one member read and are deleted, idempotent and transactional producers send a record, and
connections are opened and closed. What Kafka remembers for a day or a week (producer ids, groups, transactional ids) is
forgotten within a minute here, so that only what is never forgotten grows. Prints each broker's anonymous memory every
minute, and its growth after the first five minutes. Exit code 1 if that is more than 5 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import ProcessState, let_signals_interrupt

BROKERS = 3
STAYING = "staying"
CONNECTIONS_PER_SECOND = 100
WARM_UP_MINUTES = 5
MAX_GROWTH_BYTES = 5_000_000
SETTINGS = {
    "producer.id.expiration.ms": "30000",
    "transactional.id.expiration.ms": "30000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "10000",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.bytes": "67108864",
    "log.segment.bytes": "16777216",
    "log.retention.check.interval.ms": "10000",
}


def anonymous_bytes(pid: int) -> int:
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) * 1_024


class Work:
    """What happens beside the staying topic. `counts` is printed."""

    def __init__(self, bootstrap: str, ports: Iterator[int]) -> None:
        self._bootstrap = bootstrap
        self._ports = ports
        self.counts: dict[str, int] = {}

    async def repeat(self, what: Callable[[int], Awaitable[None]]) -> None:
        for number in itertools.count():
            await what(number)
            name = what.__name__
            self.counts[name] = self.counts.get(name, 0) + 1

    async def topics(self, number: int) -> None:
        name = f"topic-{number}"
        async with Admin(self._bootstrap) as admin, Producer(self._bootstrap) as producer:
            await admin.create_topic(name, partitions=6, replication_factor=3)
            await asyncio.gather(*(producer.send(name, b"v" * 100, partition=index % 6) for index in range(60)))
            await admin.delete_topic(name)

    async def groups(self, number: int) -> None:
        name = f"group-{number}"
        async with Consumer(self._bootstrap, topics=[STAYING], group=name, auto_offset_reset="latest") as consumer:
            while not (assigned := consumer.assignment()):
                await consumer.poll(timeout_ms=200)
            for partition in assigned:
                await consumer.position(partition)
            await consumer.commit()  # a group without offsets ends with its last member
        async with Admin(self._bootstrap) as admin:
            await admin.delete_groups([name])

    async def transactions(self, number: int) -> None:
        async with Producer(self._bootstrap, transactional_id=f"id-{number}") as producer, producer.transaction():
            producer.send(STAYING, b"v")

    async def connections(self, number: int) -> None:
        """Open a connection, and close it before or within its first frame."""
        _, writer = await asyncio.open_connection(LOOPBACK, next(self._ports))
        if number % 2:
            writer.write(b"\x00\x00\x00\x02" + b"\x95\x12")
        writer.close()
        await asyncio.sleep(1 / CONNECTIONS_PER_SECOND)


async def produce(bootstrap: str, rate: int) -> None:
    async with Producer(bootstrap) as producer:
        values = [b"x" * 100] * 1_000
        began_s = time.monotonic()
        for number in itertools.count(1):
            await producer.send_batch(STAYING, values)
            if rate:
                await asyncio.sleep(max(0.0, began_s + number * len(values) / rate - time.monotonic()))


async def soak(directory: Path, minutes: int, rate: int) -> dict[int, list[int]]:
    """Return each broker's memory after each minute, in bytes."""
    cluster = LocalCluster(directory)
    await asyncio.to_thread(cluster.up, BROKERS, free_ports(BROKERS)[0], settings=SETTINGS)
    try:
        entries = cluster.file().brokers
        bootstrap = cluster.bootstrap()
        async with Admin(bootstrap) as admin:
            await admin.create_topic(STAYING, partitions=6, replication_factor=3)
        work = Work(bootstrap, itertools.cycle([entry.port for entry in entries]))
        found: dict[int, list[int]] = {entry.id: [] for entry in entries}
        comings = (work.topics, work.groups, work.transactions, work.connections)
        tasks = [asyncio.create_task(each) for each in (produce(bootstrap, rate), *map(work.repeat, comings))]
        try:
            await measure(cluster, minutes, tasks, work, found)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found
    finally:
        await asyncio.to_thread(cluster.down, kill=True)


async def measure(
    cluster: LocalCluster, minutes: int, tasks: list[asyncio.Task[None]], work: Work, found: dict[int, list[int]]
) -> None:
    began_s = time.monotonic()
    for minute in range(1, minutes + 1):
        left_s = began_s + 60 * minute - time.monotonic()
        done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        for entry in cluster.file().brokers:
            assert entry.process is not None
            assert cluster.state_of(entry.id) is ProcessState.RUNNING
            found[entry.id].append(anonymous_bytes(entry.process.pid))
        sizes = ", ".join(f"{sizes[-1] / 1e6:.1f}" for sizes in found.values())
        print(f"minute {minute:>3}: {sizes} MB; {work.counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--rate", type=int, default=0, help="records a second; 0: as many as possible")
    parser.add_argument("--keep", type=Path, help="use this directory for the cluster, and leave it")
    arguments = parser.parse_args()
    let_signals_interrupt()
    with tempfile.TemporaryDirectory(prefix="minibroker-soak-") as temporary:
        found = uvloop.run(soak(arguments.keep or Path(temporary), arguments.minutes, arguments.rate))
    grown = {broker: sizes[-1] - sizes[min(WARM_UP_MINUTES, len(sizes)) - 1] for broker, sizes in found.items()}
    print(", ".join(f"broker {broker} {growth / 1e6:+.1f} MB" for broker, growth in grown.items()))
    sys.exit(1 if max(grown.values()) > MAX_GROWTH_BYTES else 0)


if __name__ == "__main__":
    main()
