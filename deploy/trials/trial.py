"""A workload that detects lost records: it sends numbered records and returns a verdict.

Every record carries its number in its key, and goes to the partition `number % partitions`, so that a partition's
numbers grow; the sender remembers a checksum of its value. While the cluster is broken, acknowledgements are collected
with their times; finally a new consumer reads every partition to its end, and `judge_trial` compares. An acknowledged
record must be there once, in order, with the sent value, at the acknowledged offset if there was one. A record that was
sent and not acknowledged may be there or not.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.deploy.errors import LaunchTimedOut
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.observing.cluster_view import ClusterView
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

PATIENCE_S = 60.0

_POLL_INTERVAL_S = 0.02


class Acknowledged(NamedTuple):
    number: int
    offset: int
    """-1 if the broker returned none, since it appended the record long ago at an earlier attempt."""
    at_s: float
    """The monotonic time in seconds at which the acknowledgement arrived."""


class ReadBack(NamedTuple):
    offset: int
    number: int
    is_intact: bool = True
    """Whether its value is the one that was sent with this number."""


class TrialVerdict(NamedTuple):
    sent: int
    acknowledged: int
    failed: int
    """Records that were reported to the sender as failed; they may be there or not."""
    read_back: int
    lost: int
    """Acknowledged records that are missing, or have another offset or value than acknowledged."""
    duplicated: int
    out_of_order: int
    altered: int
    """Records, acknowledged or not, with a value that was never sent with their number."""

    @property
    def flawless(self) -> bool:
        return self.lost == self.duplicated == self.out_of_order == self.altered == 0


class Gap(NamedTuple):
    """A time without acknowledgements on one partition."""

    partition: int
    seconds: float
    began_s: float


def judge_trial(
    sent: int,
    failed: int,
    acknowledged: Mapping[int, Sequence[Acknowledged]],
    read: Mapping[int, Sequence[ReadBack]],
) -> TrialVerdict:
    """Compare, per partition, the acknowledged records with the ones read, in the order of reading."""
    lost = duplicated = out_of_order = altered = 0
    for partition, acks in acknowledged.items():
        records = read.get(partition, ())
        offsets = {record.number: record.offset for record in reversed(records) if record.is_intact}
        lost += sum(1 for number, said, _ in acks if number not in offsets or said not in (-1, offsets[number]))
    for records in read.values():
        seen: set[int] = set()
        highest = -1
        for _, number, is_intact in records:
            altered += not is_intact
            if number in seen:
                duplicated += 1
                continue
            seen.add(number)
            if number < highest:
                out_of_order += 1
            highest = max(highest, number)
    return TrialVerdict(
        sent=sent,
        acknowledged=sum(map(len, acknowledged.values())),
        failed=failed,
        read_back=sum(map(len, read.values())),
        lost=lost,
        duplicated=duplicated,
        out_of_order=out_of_order,
        altered=altered,
    )


def longest_gap(acknowledged: Mapping[int, Sequence[Acknowledged]], from_s: float, to_s: float) -> Gap:
    """Return the longest time without an acknowledgement on one partition that overlaps the interval."""
    worst = Gap(-1, 0.0, from_s)
    for partition, acks in acknowledged.items():
        times = [ack.at_s for ack in acks]
        for before, after in itertools.pairwise(times):
            if after >= from_s and before <= to_s and after - before > worst.seconds:
                worst = Gap(partition, after - before, before)
    return worst


class Trial:
    """Sends while its context is open, a few records per tick; `verdict` reads back and judges.

    `records_per_second` may be changed at any time.
    """

    def __init__(
        self, bootstrap: str, topic: str, partitions: int, lines: Iterable[bytes], *, records_per_second: int = 2_000
    ) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.partitions = partitions
        self.records_per_second = records_per_second
        self.sent = 0
        self.failures: list[str] = []
        self.acknowledged: dict[int, list[Acknowledged]] = {p: [] for p in range(partitions)}
        self._lines: Iterator[bytes] = iter(lines)
        self._checksums = array("L")
        """The CRC-32 of each value, by number."""
        self._open: dict[int, deque[tuple[int, Delivery]]] = {p: deque() for p in range(partitions)}
        self._more: dict[int, asyncio.Event] = {p: asyncio.Event() for p in range(partitions)}
        self._sending = False

    @property
    def acknowledged_count(self) -> int:
        return sum(map(len, self.acknowledged.values()))

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send in the background; at the end stop sending, and wait for every answer."""
        async with Producer(self.bootstrap, acks="all", linger_ms=0) as producer:
            self._sending = True
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(producer))
                for partition in range(self.partitions):
                    tasks.create_task(self._collect(partition))
                try:
                    yield
                finally:
                    self._sending = False
                    for event in self._more.values():
                        event.set()

    async def wait_for_acknowledgements(self, more: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `more` more records are acknowledged on every partition. Raises TimeoutError."""
        targets = {p: len(acks) + more for p, acks in self.acknowledged.items()}
        async with asyncio.timeout(timeout_s):
            while any(len(self.acknowledged[p]) < n for p, n in targets.items()):  # noqa: ASYNC110 (needs no event)
                await asyncio.sleep(0.005)

    async def _send(self, producer: Producer) -> None:
        """Send at the given rate, a few records per millisecond. Delays are not made up for."""
        next_s = time.monotonic()
        while self._sending:
            per_tick = max(1, self.records_per_second // 1_000)
            pause_s = per_tick / self.records_per_second
            for _ in range(per_tick):
                line = next(self._lines, None)
                if line is None:
                    self._sending = False
                    break
                number = self.sent
                partition = number % self.partitions
                delivery = producer.send(self.topic, line, key=b"%d" % number, partition=partition)
                self.sent += 1
                self._checksums.append(zlib.crc32(line))
                self._open[partition].append((number, delivery))
                self._more[partition].set()
            await producer.drain()
            next_s = max(next_s + pause_s, time.monotonic() - 0.05)
            await asyncio.sleep(next_s - time.monotonic())

    async def _collect(self, partition: int) -> None:
        waiting, more = self._open[partition], self._more[partition]
        while self._sending or waiting:
            if not waiting:
                more.clear()
                await more.wait()
                continue
            number, delivery = waiting.popleft()
            try:
                metadata = await delivery
            except MinibrokerError as error:
                self.failures.append(str(error))
                continue
            self.acknowledged[partition].append(Acknowledged(number, metadata.offset, time.monotonic()))

    async def verdict(self) -> TrialVerdict:
        """Read every partition from its beginning to its end with a new consumer, and judge."""
        read: dict[int, list[ReadBack]] = {p: [] for p in range(self.partitions)}
        async with Consumer(self.bootstrap, topics=[self.topic], auto_offset_reset="earliest") as consumer:
            ends = await consumer.end_offsets([TopicPartition(self.topic, p) for p in range(self.partitions)])
            open_partitions = {tp.partition for tp, end in ends.items() if end > 0}
            if open_partitions:
                async for batch in consumer.batches():
                    for offset, key, value in zip(batch.offsets, batch.keys or (), batch.values, strict=True):
                        number = int(key or b"-1")
                        read[batch.partition].append(ReadBack(offset, number, self._is_intact(number, value)))
                    if batch.offsets[-1] + 1 >= ends[TopicPartition(self.topic, batch.partition)]:
                        open_partitions.discard(batch.partition)
                        if not open_partitions:
                            break
        return judge_trial(self.sent, len(self.failures), self.acknowledged, read)

    def _is_intact(self, number: int, value: bytes | None) -> bool:
        return 0 <= number < self.sent and zlib.crc32(value or b"") == self._checksums[number]


async def wait_until_whole(cluster: LocalCluster, topic: str, otherwise: str) -> ClusterView:
    """Wait until all brokers are in the cluster, it has a controller, and every replica of the topic is in its ISR."""
    brokers = [entry.id for entry in cluster.file().brokers]
    async with patience(otherwise):
        while True:
            view = await asyncio.to_thread(cluster.view)
            states = [state for name, state in view.partitions.items() if name.topic == topic]
            if (
                states
                and sorted(view.brokers) == brokers
                and view.controller_id is not None
                and all(sorted(state.isr_nodes) == sorted(state.replica_nodes) for state in states)
            ):
                return view
            await asyncio.sleep(_POLL_INTERVAL_S)


async def new_topic(cluster: LocalCluster, names: Iterator[str], partitions: int, replication_factor: int) -> str:
    """Create a topic with the first of the names that does not exist."""
    async with Admin(cluster.bootstrap()) as admin:
        existing = await admin.list_topics()
        topic = next(name for name in names if name not in existing)
        await admin.create_topic(topic, partitions=partitions, replication_factor=replication_factor)
        return topic


@asynccontextmanager
async def patience(otherwise: str) -> AsyncIterator[None]:
    """Raise LaunchTimedOut if the body takes longer than a cluster may need to recover."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    except TimeoutError as error:
        raise LaunchTimedOut(f"{otherwise} within {PATIENCE_S:g} s") from error
