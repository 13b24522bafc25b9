"""A compacted topic, which some storms have.

One producer after the other writes to it (acks=all): increasing numbers for each key, and now and then a tombstone. The
final content is judged as a table:

- Each key has its last acknowledged value, or a later attempt, or an unacknowledged attempt of an earlier producer,
  which may have arrived late.
- A record that is still there has the offset at which it was acknowledged.
- The numbers of one producer under one key increase, with or without gaps.

`delete.retention.ms` is longer than a storm: as in Kafka, a replica that was away for longer may become leader with
deleted records.

Administrators switch compaction off and on meanwhile. A record acknowledged while it is off must stay in every in-sync
replica until it is on again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from minibroker.broker.storage.compaction.swap import Swap
from minibroker.broker.storage.log import Log
from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, CorruptBatch
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import CorruptRecord, DecodedBatch, decode_batch, iterate_batches
from minibroker.protocol.world import World
from tests.simulation.mutants.planting import Patches
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.workload import Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.security import Right, may_read, may_write
from tests.simulation.storms.verdicts.history import Anomaly

TOPIC = "compacted"

_PROBABILITY = 0.6
_RETRY_S = 0.3
_READ_BYTES = 1024 * 1024


class Written(NamedTuple):
    """An attempt to write a number under a key."""

    producer: int
    number: int
    is_tombstone: bool
    offset: int | None
    """None if it was not acknowledged."""


class Found(NamedTuple):
    """A record that a fresh consumer read at the end."""

    offset: int
    number: int | None
    """None for a tombstone."""


Table = dict[bytes, list[Found]]
"""Records by key, in the order of the log."""


class Compacting(Guests):
    """The compacted topic and its clients, `Guests` of the workload."""

    def __init__(self, storm: Ground, random: Random) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self.partitions = [TopicPartition(TOPIC, 0)] if random.random() < _PROBABILITY else []
        self.configs = {
            "cleanup.policy": "compact",
            "segment.bytes": str(random.choice([500, 2_000])),
            "segment.ms": str(random.choice([1_000, 60_000])),
            "min.cleanable.dirty.ratio": str(random.choice([0.01, 0.5])),
            "delete.retention.ms": "3600000",
            "retention.ms": "-1",
        }
        self._keys = random.choice([2, 10])
        self._producers = itertools.count()
        self._numbers = itertools.count()
        self._written: dict[bytes, list[Written]] = {}
        self._stopping = False
        self._producing: asyncio.Task[None] | None = None
        self._table: Table | None = None
        self._is_forgiven = False
        self._keeps_all: object | None = None
        """An identity of the current period without compaction; None while compaction is on."""
        self._must_stay: list[tuple[bytes, Found]] = []
        self.swaps: Ambushes[int] = Ambushes()
        """Brokers that are about to swap segments."""

    # -- their lives --

    @property
    def names(self) -> list[str]:
        return ["compacted-producer", "compacted-consumer"] if self.partitions else []

    def rights(self, name: str) -> list[Right]:
        return may_write(TOPIC) if name == "compacted-producer" else may_read(TOPIC)

    def _run(self, name: str, world: VirtualWorld) -> None:
        if name == "compacted-producer":
            self._producing = world.process.start(self._produce(world), name)
        else:
            world.process.start(self._consume(world), name)

    async def finish(self) -> None:
        self._stopping = True
        if self._producing is not None:
            await self._producing
            self._processes["compacted-consumer"].kill()

    def forgive(self) -> None:
        """Allow the loss of acknowledged records."""
        self._is_forgiven = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observe the beginning of each swap of compacted segments."""
        patches = Patches()

        @patches.instead_of(Swap, "carry_out")
        def carry_out(original: Any, swap: Swap) -> None:
            if not swap._is_done:
                self._storm.event("compacted segments swapped in")
                self.swaps.strike(self._broker_of(swap))
            original(swap)

        try:
            yield
        finally:
            patches.undo()

    def _broker_of(self, swap: Swap) -> int:
        """Return the broker whose disk is concerned."""
        for broker_id in self._cluster.broker_ids:
            broker = self._cluster.living_broker(broker_id)
            if broker is not None and any(log._swap is swap for log in broker._logs.logs()):
                return broker_id
        return -1

    # -- writing --

    async def _produce(self, world: World) -> None:
        while not self._stopping:
            try:
                async with Producer(
                    self._cluster.bootstrap,
                    linger_ms=world.random.choice([0, 20]),
                    request_timeout_ms=5_000,
                    world=world,
                ) as producer:
                    identity = next(self._producers)
                    while not self._stopping:
                        await self._write(producer, identity, world.random)
            except ClientCrashed as error:
                self._storm.accuse(Anomaly("a client crashed", f"compacted-producer: {error!r} {error.__cause__!r}"))
            except MinibrokerError:
                pass
            await asyncio.sleep(_RETRY_S)

    async def _write(self, producer: Producer, identity: int, random: Random) -> None:
        """Send a few records and await them, so that attempts for one key end in order."""
        keeps_all = self._keeps_all
        sent: list[tuple[bytes, int, Delivery]] = []
        for _ in range(random.randint(1, 8)):
            key, number = b"k%d" % random.randrange(self._keys), next(self._numbers)
            is_tombstone = random.random() < 0.1
            value = None if is_tombstone else b"%d.%d|" % (identity, number) + random.randbytes(random.randint(0, 60))
            self._written.setdefault(key, []).append(Written(identity, number, is_tombstone, None))
            sent.append((key, number, producer.send(TOPIC, value, key=key, partition=0)))
        for key, number, delivery in sent:
            try:
                offset = (await delivery).offset
            except MinibrokerError:
                continue
            written = self._written[key]
            index = next(i for i, one in enumerate(written) if one.number == number)
            written[index] = written[index]._replace(offset=offset)
            if keeps_all is not None and keeps_all is self._keeps_all:
                self._must_stay.append((key, Found(offset, None if written[index].is_tombstone else number)))
            end = self._storm.workload.acknowledged_end
            end[self.partitions[0]] = max(end[self.partitions[0]], offset + 1)
        await asyncio.sleep(random.expovariate(1))

    # -- its policy --

    async def change_policy(self, world: World) -> str:
        """Change the policy and return it. After a MinibrokerError the policy is unknown."""
        policy = "compact" if self._keeps_all is not None else "delete"
        self._look_at_replicas()
        self._keeps_all = None
        self._must_stay.clear()
        async with Admin(self._cluster.bootstrap, world=world) as admin:
            change = ConfigChange.set("cleanup.policy", policy)
            await admin.incremental_alter_configs({ConfigResource.of_topic(TOPIC): [change]})
        if policy == "delete":
            self._keeps_all = object()
        return policy

    def _look_at_replicas(self) -> None:
        """Check that each in-sync replica has the records that must stay below its log end. Unreadable logs are judged
        elsewhere."""
        if self._is_forgiven or not self._must_stay:
            return
        [partition] = self.partitions
        for broker_id in self._cluster.state(partition).isr:
            broker = self._cluster.living_broker(broker_id)
            replica = broker._replicas.partitions.get(partition) if broker is not None and broker._replicas else None
            if replica is None:
                continue
            with self._cluster.simulation.host(host_name(broker_id)).disk.faults.set_aside():
                try:
                    table = _held(replica.log)
                except (BrokerError, CorruptRecord):
                    continue
            due = [(key, found) for key, found in self._must_stay if found.offset < replica.log.log_end_offset]
            for anomaly in lost(due, table):
                self._storm.accuse(anomaly._replace(text=f"{anomaly.text}, on broker {broker_id}"))

    # -- reading --

    async def _consume(self, world: World) -> None:
        while True:
            newest: dict[tuple[bytes, int], int] = {}
            try:
                async with Consumer(
                    self._cluster.bootstrap, partitions=self.partitions, request_timeout_ms=5_000, world=world
                ) as consumer:
                    consumer.seek_to_beginning()
                    for _ in range(world.random.randint(1, 300)):
                        record = await anext(consumer)
                        if record.value is None or record.key is None:
                            continue
                        identity, number = _numbers(record.value)
                        before = newest.get((record.key, identity), -1)
                        if number <= before and not self._is_forgiven:
                            told = f"{record.key!r} is {number} at offset {record.offset}, was {before}"
                            self._storm.accuse(Anomaly("a key went back", told))
                        newest[record.key, identity] = number
            except CorruptBatch as error:
                if not self._storm.workload.pages_have_rotten:
                    self._storm.accuse(Anomaly("a client crashed", f"compacted-consumer: {error}"))
            except ClientCrashed as error:
                self._storm.accuse(Anomaly("a client crashed", f"compacted-consumer: {error!r} {error.__cause__!r}"))
            except MinibrokerError:
                pass
            await asyncio.sleep(_RETRY_S)

    async def read_back(self, world: VirtualWorld) -> None:
        """Read the whole topic with a fresh consumer, after all producers have ended."""
        if not self.partitions:
            return
        [partition] = self.partitions
        table: Table = {}
        async with Consumer(self._cluster.bootstrap, partitions=[partition], world=world) as consumer:
            consumer.seek_to_beginning()
            end = (await consumer.end_offsets([partition]))[partition]
            batches = consumer.batches()
            at = 0
            while at < end:
                try:
                    async with asyncio.timeout(5):
                        batch = await anext(batches)
                except TimeoutError:
                    break  # only empty batches are left
                at = batch.next_offset
                for offset, key, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
                    found = Found(offset, None if value is None else _numbers(value)[1])
                    table.setdefault(key or b"", []).append(found)
        self._table = table

    # -- the verdict --

    def judge(self) -> list[Anomaly]:
        if self._table is None or self._is_forgiven:
            return []
        return [*lost(self._must_stay, self._table), *wrong(self._written, self._table)]


def _held(log: Log) -> Table:
    """Return the content of a log. Raise BrokerError or CorruptRecord."""
    table: Table = {}
    offset = log.log_start_offset
    while records := log.read(offset, _READ_BYTES, log.log_end_offset):
        for header, start, _ in iterate_batches(records):
            if header.records_count:
                _put(decode_batch(records, header, start), table)
            offset = header.next_offset
    return table


def _put(batch: DecodedBatch, table: Table) -> None:
    for offset, key, value in zip(batch.offsets, batch.keys or (), batch.values, strict=True):
        table.setdefault(key or b"", []).append(Found(offset, None if value is None else _numbers(value)[1]))


def lost(must_stay: Sequence[tuple[bytes, Found]], table: Table) -> Iterator[Anomaly]:
    """Yield one anomaly if any of these records is missing. Pure."""
    gone = [(key, found) for key, found in must_stay if found not in table.get(key, [])]
    if gone:
        key, found = gone[0]
        yield Anomaly("a record is lost that had to stay", f"{len(gone)} of {len(must_stay)}; {key!r}: {found}")


def wrong(written: dict[bytes, list[Written]], table: Table) -> Iterator[Anomaly]:
    """Yield the anomalies in the final content of a compacted topic. Pure."""
    for key, attempts in written.items():
        found = table.get(key, [])
        acknowledged = [attempt for attempt in attempts if attempt.offset is not None]
        by_offset = {attempt.offset: attempt for attempt in acknowledged}
        by_number = {attempt.number: attempt for attempt in attempts}
        newest_of: dict[int, int] = {}
        for record in found:
            expected = by_offset.get(record.offset)
            if expected is not None and record.number != (None if expected.is_tombstone else expected.number):
                yield Anomaly("inconsistent offset", f"{key!r}: {record}, acknowledged was {expected}")
            if record.number is not None and record.number not in by_number:
                yield Anomaly("phantom", f"{key!r}: {record} was never written")
            elif record.number is not None:
                producer = by_number[record.number].producer
                if record.number <= newest_of.get(producer, -1):
                    yield Anomaly("a key went back", f"{key!r}: {record}, behind {newest_of[producer]}")
                newest_of[producer] = record.number
        last = acknowledged[-1] if acknowledged else None
        possible = [attempt for attempt in attempts if last is None or _may_come_after(attempt, last)]
        allowed = {None if attempt.is_tombstone else attempt.number for attempt in possible}
        newest = found[-1].number if found else None
        if newest not in allowed and newest in (None, *by_number) and (found or last is not None):
            yield Anomaly("the latest record of a key is lost", f"{key!r} is {newest}; acknowledged last: {last}")
    for key in table.keys() - written.keys():
        yield Anomaly("phantom", f"key {key!r} was never written")


def _may_come_after(attempt: Written, last: Written) -> bool:
    """Return whether the attempt may be the latest record of a key whose last acknowledged value is `last`."""
    return attempt.number >= last.number or (attempt.offset is None and attempt.producer < last.producer)


def _numbers(value: bytes) -> tuple[int, int]:
    """Return the producer and the number of a value."""
    producer, _, number = value.partition(b"|")[0].partition(b".")
    return int(producer), int(number)
