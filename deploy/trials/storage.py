"""The cost of log upkeep: compaction, recovery, catching up and deletion, measured on a new cluster.

Broker 1 leads every topic here. Each comparison is made within one run: produce latency with broker 1's cleaner at work
and without, in turns; a start after a kill and one after a clean stop; pings to broker 1 while it removes segments and
before.

A compacted topic is one large active segment, which no cleaner touches until a record dated after `segment.ms` rolls
it: this is how the bench starts the cleaner. The broker's log says when it has ended, and how much it read and wrote.
Nothing is checkpointed, so a killed broker reads all of its log again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import SystemRandom
from statistics import median
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.values import Values
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import LOOPBACK
from minibroker.deploy.local.who import BrokerId
from minibroker.deploy.trials.demo import BROKERS, Tell
from minibroker.deploy.trials.trial import patience
from minibroker.protocol.apis import API_VERSIONS
from minibroker.protocol.connections.rpc import open_connection
from minibroker.protocol.messages import ApiVersionsRequest
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world.real import RealNetwork

SETTINGS = {
    "log.cleaner.backoff.ms": "50",
    "log.retention.check.interval.ms": "500",
    "log.flush.offset.checkpoint.interval.ms": "86400000",
    "internal.segment.bytes.min": "14",
}
"""Settings of the brokers: upkeep begins soon, no checkpoint shortens the recovery after a kill, and there can be many
small segments."""

LEADER, FOLLOWER = 1, 2
RATE = 500
"""Records per second whose latency is measured."""

_HOUR_MS = 3_600_000
_LARGEST_SEGMENT = 2**31 - 1
_RECORDS_PER_KEY = 4
_SEGMENT_BYTES = 16 * 1024
_SEGMENT_VALUE_BYTES = 10_000
"""A size of which no two values fit into a segment."""
_POLL_S = 0.005
_COMPACTED = r": compacted from .* (\d+) bytes read and written in ([\d.]+) s"


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    figure: float
    unit: str
    baseline: float | None = None
    """The same figure in the same run without the measured operation."""

    @property
    def ratio(self) -> float | None:
        return self.figure / self.baseline if self.baseline else None


class StorageBench:
    """Measures on a cluster that was started with SETTINGS. Methods raise MinibrokerError."""

    def __init__(self, cluster: LocalCluster, megabytes: int, size: int, tell: Tell) -> None:
        """`megabytes` is the total of the values to compact, recover and catch up with, `size` the bytes of each."""
        self._cluster = cluster
        self._bytes = megabytes * 1_000_000
        self._count = max(_RECORDS_PER_KEY, self._bytes // size)
        self._size = size
        self._tell = tell
        self._values = Values()
        self._run = SystemRandom().getrandbits(32)

    # -- compaction --

    async def compaction(self, rounds: int, seconds: float) -> list[Figure]:
        """In each round, fill a topic, then produce to another one for `seconds`, and while the first is compacted."""
        rates: list[float] = []
        quiet: list[float] = []
        cleaning: list[float] = []
        async with (
            self._topic("bench-produce", [*range(1, BROKERS + 1)]) as produced,
            self._latencies(produced) as took,
        ):
            for number in range(rounds):
                self._tell(f"compaction, round {number + 1} of {rounds}")
                configs = {
                    "cleanup.policy": "compact",
                    "segment.bytes": str(_LARGEST_SEGMENT),
                    "segment.ms": str(_HOUR_MS),
                }
                name = f"bench-compact-{number}"
                async with self._topic(name, [LEADER], configs) as topic, self._producer() as producer:
                    await self._fill(producer, topic, keys=self._count // _RECORDS_PER_KEY)
                    await asyncio.sleep(seconds)
                    quiet += await took(time.monotonic() - seconds)
                    later_ms = time.time_ns() // 1_000_000 + 2 * _HOUR_MS
                    await producer.send(topic, b"", key=b"the last", timestamp_ms=later_ms)
                    compacted = await self._line_of_log(f"{topic}-0{_COMPACTED}")
                    cleaning_s = max(float(compacted[2]), 1 / RATE)  # a short pass is logged as 0 s
                    cleaning += await took(time.monotonic() - cleaning_s)
                rates.append(int(compacted[1]) / cleaning_s / 1e6)
        with_ms, without_ms = (percentile(sorted(times), 0.99) * 1_000 for times in (cleaning, quiet))
        return [
            Figure("compaction: read and written", median(rates), "MB/s"),
            Figure("compaction: produce p99 meanwhile", with_ms, "ms", without_ms),
        ]

    async def _line_of_log(self, pattern: str) -> re.Match[str]:
        """Wait for the line in broker LEADER's log. Scraping its metrics would be a further load."""
        log = self._cluster.log_of(LEADER)
        async with patience(f"broker {LEADER} did not write {pattern!r} into its log"):
            while (found := re.search(rf"(?m)^\S+ INFO \S+ {pattern}", log.read_text())) is None:  # noqa: ASYNC110 (it is another process's)
                await asyncio.sleep(_POLL_S)
            return found

    @asynccontextmanager
    async def _latencies(self, topic: str) -> AsyncIterator[Callable[[float], Awaitable[list[float]]]]:
        """Send records at a steady rate, with acks=all. Yields a function that waits for all records due from a given
        time until now, and returns their latencies, each from the time at which the record was due."""
        taken: dict[float, float | None] = {}
        """The latency of each record by its due time; None until it is acknowledged."""

        async def acknowledged(due_s: float, delivery: Delivery) -> None:
            await delivery
            taken[due_s] = time.monotonic() - due_s

        async def send(producer: Producer, group: asyncio.TaskGroup) -> None:
            due_s, number = time.monotonic(), 0
            while True:
                due_s, number = due_s + 1 / RATE, number + 1
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                delivery = producer.send(topic, self._values.make(self._run, number, 100))
                taken[due_s] = None
                group.create_task(acknowledged(due_s, delivery))

        async def took(begin_s: float) -> list[float]:
            end_s = time.monotonic()
            await _until(
                lambda: max(taken, default=0.0) >= end_s and None not in between(begin_s, end_s),
                "records that are produced meanwhile are not acknowledged",
            )
            return [took_s for took_s in between(begin_s, end_s) if took_s is not None]

        def between(begin_s: float, end_s: float) -> list[float | None]:
            return [took_s for due_s, took_s in taken.items() if begin_s <= due_s < end_s]

        async with self._producer() as producer, asyncio.TaskGroup() as group:
            sending = group.create_task(send(producer, group))
            yield took
            sending.cancel()

    # -- recovery, and catching up --

    async def recovery_and_catch_up(self) -> list[Figure]:
        """Fill a topic, kill a follower and start it; then stop it, fill more, and start it again."""
        async with self._topic("bench-recover", [*range(1, BROKERS + 1)]) as topic, self._producer() as producer:
            self._tell("recovery")
            await self._fill(producer, topic)
            await self._in_sync(topic)
            size = self._size_on_disk(topic)
            await asyncio.to_thread(self._cluster.kill, BrokerId(FOLLOWER))
            after_kill_s = await self._start()
            await self._in_sync(topic)
            self._tell("catching up")
            await asyncio.to_thread(self._cluster.stop, BrokerId(FOLLOWER))
            await self._fill(producer, topic)
            before = self._size_on_disk(topic)
            starting = asyncio.create_task(self._start())
            await _until(lambda: self._size_on_disk(topic) > before, f"broker {FOLLOWER} did not fetch")
            began_s = time.monotonic()
            await self._in_sync(topic)
            caught_up_s = time.monotonic() - began_s
            after_stop_s = await starting
        return [
            Figure("start after a kill", after_kill_s, "s", after_stop_s),
            Figure("recovery", (after_kill_s - after_stop_s) / (size / 1e9), "s/GB"),
            Figure("follower's catch-up", (self._size_on_disk(topic) - before) / caught_up_s / 1e6, "MB/s"),
        ]

    async def _start(self) -> float:
        """Start the follower and return the seconds until it serves."""
        began_s = time.monotonic()
        await asyncio.to_thread(self._cluster.start, BrokerId(FOLLOWER))
        return time.monotonic() - began_s

    async def _in_sync(self, topic: str) -> None:
        async with patience(f"not every replica of {topic} was in sync"), Admin(self._cluster.bootstrap()) as admin:
            while len((await admin.describe_topic(topic)).partitions[0].isr) < BROKERS:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    def _size_on_disk(self, topic: str) -> int:
        return sum(path.stat().st_size for path in self._directory(FOLLOWER, topic).glob("*.log"))

    def _directory(self, broker_id: int, topic: str) -> Path:
        return self._cluster.directory / f"broker-{broker_id}" / f"{topic}-0"

    # -- deletion --

    async def deletion(self, segments: int, seconds: float) -> list[Figure]:
        """Ping the leader of a log of `segments` segments for `seconds`, and then while all of them are removed."""
        self._tell(f"deleting {segments} segments")
        broker = self._cluster.file().broker(LEADER)
        connection = await open_connection(
            RealNetwork(), LOOPBACK, broker.port, client_id="minibroker-cli", timeout_s=10.0
        )

        async def longest(until: Callable[[], bool]) -> float:
            longest_s = 0.0
            while not until():
                asked_s = time.monotonic()
                await connection.request(API_VERSIONS, ApiVersionsRequest("minibroker", "1"), timeout_s=10.0)
                longest_s = max(longest_s, time.monotonic() - asked_s)
            return longest_s * 1_000

        configs = {"segment.bytes": str(_SEGMENT_BYTES)}
        try:
            async with (
                self._topic("bench-delete", [LEADER], configs) as topic,
                self._producer() as producer,
                Admin(self._cluster.bootstrap()) as admin,
            ):
                directory, number = self._directory(LEADER, topic), 0
                async with patience("the segments were not flushed"):
                    # A new segment causes a flush of the earlier ones, unless a flush is under way.
                    while number < segments or len([*directory.glob("*.snapshot")]) < segments:
                        await producer.send(topic, self._values.make(self._run, number, _SEGMENT_VALUE_BYTES))
                        number += 1
                quiet_until_s = time.monotonic() + seconds
                quiet_ms = await longest(lambda: time.monotonic() >= quiet_until_s)
                last = sorted(directory.glob("*.log"))[-2]
                async with patience("the segments were not removed"):
                    deleting = asyncio.create_task(admin.delete_records({TopicPartition(topic, 0): -1}))
                    deleting_ms = await longest(lambda: not last.exists())
                    await deleting
        finally:
            connection.close()
        return [Figure(f"deleting {segments} segments: longest ping", deleting_ms, "ms", quiet_ms)]

    # -- inside --

    @asynccontextmanager
    async def _topic(self, name: str, replicas: list[int], configs: dict[str, str] | None = None) -> AsyncIterator[str]:
        """Create a topic of one partition, led by the first of `replicas`, and delete it at the end."""
        async with Admin(self._cluster.bootstrap()) as admin:
            await admin.create_topic(name, assignments=[replicas], configs=configs)
            yield name
            await admin.delete_topic(name)

    def _producer(self) -> Producer:
        return Producer(self._cluster.bootstrap(), client_id="minibroker-cli")

    async def _fill(self, producer: Producer, topic: str, keys: int | None = None) -> None:
        for number in range(self._count):
            key = None if keys is None else b"key %d" % (number % keys)
            producer.send(topic, self._values.make(self._run, number, self._size), key=key)
            await producer.drain()
        await producer.flush()


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    async with patience(otherwise):
        while not condition():  # noqa: ASYNC110 (it is about another process)
            await asyncio.sleep(_POLL_S)
