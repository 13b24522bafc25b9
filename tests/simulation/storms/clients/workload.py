"""The strict clients of a storm: producers and consumers that record what they see and survive every fault.

Each runs in a process on its own host. A killed client is started again under its name, and a consumer then continues
at the position of its predecessor, as if it had committed its offsets. Topics whose names begin with `durable` are
written with acks=all, the others with acks=1. One topic loses its oldest records (`shrinking`), and its consumers skip
to its log start. Some clients speak Kafka's protocol (`kafka_clients`) on the same topics.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from random import Random

from minibroker.client.consumer import Consumer
from minibroker.client.errors import AuthenticationFailed, ClientCrashed, CorruptBatch, LogTruncated
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import BatchDelivery, BatchDeliveryFailed, Delivery
from minibroker.client.producing.partitioners import crc32
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.kafka_clients import (
    KafkaBatch,
    KafkaConsumer,
    KafkaProducer,
    ProtocolBroken,
    RecordMetadata,
    Versions,
)
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.security import Right, Security, may_read, may_write
from tests.simulation.storms.verdicts.history import Acknowledged, History, Polled, Sent

DURABLE = "durable"
SHRINKING = "durable-shrinking"
SYNCED = "durable-synced"


class Guests(ABC):
    """Other clients that meet the same faults."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._processes: dict[str, Process] = {}
        self._starts: Counter[str] = Counter()

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def _run(self, name: str, world: VirtualWorld) -> None:
        """Start the task of a client in its new process."""

    def rights(self, name: str) -> list[Right]:
        """Return what a client needs; nothing: it is an administrator."""
        return []

    def process(self, name: str) -> Process:
        """Return the latest process of a client."""
        return self._processes[name]

    def start(self) -> None:
        for name in self.names:
            self._run(name, self._new_process(name))

    def restart(self, name: str) -> None:
        """Kill a client (SIGKILL) and start it again."""
        self._processes[name].kill()
        self._run(name, self._new_process(name))

    def _new_process(self, name: str) -> VirtualWorld:
        self._starts[name] += 1
        world = self._cluster.client(name)
        self._processes[name] = world.process
        return world


_RETRY_S = 0.3
_MOST_AT_ONCE = 40
"""Most records of a `send_batch`."""


@dataclass(frozen=True)
class ProducerSettings:
    topic: str
    partitions: int
    records_per_s: float
    max_value_bytes: int
    compression: str
    linger_ms: int
    delivery_timeout_ms: int
    request_timeout_ms: int
    sends_batches: bool = False
    """Whether some records go through `send_batch`, to one partition or to the partition of each key."""
    versions: Versions | None = None
    """Versions of Kafka's protocol; None for minibroker's own."""

    @property
    def is_durable(self) -> bool:
        return self.topic.startswith(DURABLE)


class Workload:
    """Starts clients on a cluster and keeps their history."""

    def __init__(self, cluster: VirtualCluster, history: History, security: Security | None = None) -> None:
        self.history = history
        self._security = security
        self.unexpected: list[str] = []
        """Observations that prove a bug of the client or of the cluster."""
        self.acknowledged_end: Counter[TopicPartition] = Counter()
        """One past the highest offset acknowledged with acks=all."""
        self.guests: list[Guests] = []
        self.exposed: set[TopicPartition] = set()
        """Partitions without a complete replica since a power cut, until all brokers have caught up. A deposed leader
        that kept its power may serve records until it truncates its log, so reads are not judged meanwhile."""
        self._cluster = cluster
        self._processes: dict[str, Process] = {}
        self._starts: Counter[str] = Counter()
        self._producers: dict[str, ProducerSettings] = {}
        self._producing: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, Counter[TopicPartition]] = {}
        self._consumers: dict[str, list[TopicPartition]] = {}
        self._versions: dict[str, Versions] = {}
        """Protocol versions of the consumers that speak Kafka's protocol."""
        self._positions: dict[tuple[str, TopicPartition], int] = {}
        self._stopping = False

    # -- their lives --

    def start_producer(self, name: str, settings: ProducerSettings) -> None:
        self._producers[name] = settings
        world = self._start_process(name)
        self._unanswered[name] = Counter()
        self._producing[name] = world.process.start(self._produce(name, world, settings), name)

    def start_consumer(self, name: str, partitions: list[TopicPartition], versions: Versions | None = None) -> None:
        """Start a consumer. `versions` are those of Kafka's protocol, None for minibroker's own."""
        self._consumers[name] = partitions
        if versions is not None:
            self._versions[name] = versions
        world = self._start_process(name)
        world.process.start(self._consume(name, world, partitions), name)

    @property
    def names(self) -> list[str]:
        return [*self._producers, *self._consumers, *(name for guests in self.guests for name in guests.names)]

    def rights(self, name: str) -> list[Right]:
        """Return what a client needs; nothing: it is an administrator."""
        if name in self._producers:
            return may_write(self._producers[name].topic)
        if name in self._consumers:
            return may_read(*sorted({partition.topic for partition in self._consumers[name]}))
        guests = self._guests_with(name)
        return [] if guests is None else guests.rights(name)

    def process(self, name: str) -> Process:
        """Return the latest process of a client."""
        guests = self._guests_with(name)
        return self._processes[name] if guests is None else guests.process(name)

    def _guests_with(self, name: str) -> Guests | None:
        return next((guests for guests in self.guests if name in guests.names), None)

    @property
    def durable_producers(self) -> list[str]:
        return [name for name, settings in self._producers.items() if settings.is_durable]

    def restart(self, name: str) -> None:
        """Kill a client (SIGKILL) and start it again."""
        guests = self._guests_with(name)
        if guests is not None:
            guests.restart(name)
            return
        self._processes[name].kill()
        if name in self._consumers:
            self.start_consumer(name, self._consumers[name], self._versions.get(name))
        else:
            self.start_producer(name, self._producers[name])

    def power_lost(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the acknowledged ends of these partitions, and restart all consumers at the beginning."""
        for partition in partitions:
            self.acknowledged_end.pop(partition, None)
        self.reread()

    def reread(self) -> None:
        """Restart all consumers at the beginning."""
        self._positions.clear()
        for name in self._consumers:
            self.restart(name)

    def has_in_flight(self, partition: TopicPartition) -> bool:
        """Return whether a living producer has an unanswered request for the partition."""
        return any(unanswered[partition] > 0 for unanswered in self._unanswered.values())

    pages_have_rotten = False
    """Whether a consumer may report a corrupt batch."""
    corrupt_reads = 0
    """Number of corrupt batches that consumers reported."""

    async def finish(self) -> None:
        """Stop sending, wait until each record is acknowledged or has failed, and end the consumers."""
        self._stopping = True
        for producing in self._producing.values():
            await producing
        for name in self._consumers:
            self._processes[name].kill()

    def _start_process(self, name: str) -> VirtualWorld:
        self._starts[name] += 1
        world = self._cluster.client(name)
        self._processes[name] = world.process
        return world

    # -- producing --

    async def _produce(self, name: str, world: World, settings: ProducerSettings) -> None:
        for attempt in itertools.count(1):
            if self._stopping:
                return
            try:
                async with self._producer(settings, world) as producer:
                    await self._send(name, f"{name}#{self._starts[name]}.{attempt}", producer, world.random, settings)
            except (ClientCrashed, ProtocolBroken) as error:
                self.unexpected.append(f"{name}: {error!r} {error.__cause__!r}")
            except MinibrokerError:
                pass  # no broker was reached; the outcome of each record is already recorded
            await asyncio.sleep(_RETRY_S)

    def _producer(self, settings: ProducerSettings, world: World) -> Producer | KafkaProducer:
        if settings.versions is not None:
            return KafkaProducer(
                self._cluster.bootstrap,
                acks=-1 if settings.is_durable else 1,
                compression=settings.compression,
                linger_ms=settings.linger_ms,
                delivery_timeout_ms=settings.delivery_timeout_ms,
                request_timeout_ms=settings.request_timeout_ms,
                versions=settings.versions,
                world=world,
            )
        return Producer(
            self._cluster.bootstrap,
            acks="all" if settings.is_durable else 1,
            compression=settings.compression,
            linger_ms=settings.linger_ms,
            batch_size=16 * 1024,
            delivery_timeout_ms=settings.delivery_timeout_ms,
            request_timeout_ms=settings.request_timeout_ms,
            world=world,
        )

    async def _send(
        self,
        name: str,
        identity: str,
        producer: Producer | KafkaProducer,
        random: Random,
        settings: ProducerSettings,
    ) -> None:
        history, unanswered = self.history, self._unanswered[name]
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                if self._stopping:
                    return
                if isinstance(producer, KafkaProducer):
                    if producer.failure is not None:
                        return
                elif settings.sends_batches and random.random() < 0.3:
                    try:
                        sent = self._send_batch(f"{identity}/{number}", producer, random, settings, unanswered)
                    except AuthenticationFailed:
                        return
                    tasks.create_task(self._await_batch(*sent, unanswered, settings.is_durable))
                    await asyncio.sleep(len(sent[1]) * random.expovariate(settings.records_per_s) / 4)
                    continue
                partition = TopicPartition(settings.topic, random.randrange(settings.partitions))
                value = b"%s/%d|" % (identity.encode(), number) + random.randbytes(
                    random.randint(0, settings.max_value_bytes)
                )
                now_s = self._cluster.simulation.loop.now_s
                history.sent[value] = Sent(identity, number * _MOST_AT_ONCE, partition, now_s)
                try:
                    delivery = producer.send(partition.topic, value, partition=partition.partition)
                except AuthenticationFailed:
                    return
                unanswered[partition] += 1
                tasks.create_task(
                    self._await_delivery(name, delivery, value, partition, unanswered, settings.is_durable)
                )
                await asyncio.sleep(random.expovariate(settings.records_per_s))

    def _send_batch(
        self,
        name: str,
        producer: Producer,
        random: Random,
        settings: ProducerSettings,
        unanswered: Counter[TopicPartition],
    ) -> tuple[BatchDelivery, list[bytes], list[TopicPartition]]:
        """Send a batch. Return its delivery, its values, and the partition of each value."""
        count = random.randint(1, _MOST_AT_ONCE)
        values = [
            b"%s.%d|" % (name.encode(), index) + random.randbytes(random.randint(0, settings.max_value_bytes))
            for index in range(count)
        ]
        keys = [b"key-%d" % random.randrange(10) for _ in values] if random.random() < 0.5 else None
        chosen = random.randrange(settings.partitions)
        partitions = [
            TopicPartition(settings.topic, chosen if keys is None else crc32(keys[index], settings.partitions))
            for index in range(count)
        ]
        identity, _, number = name.rpartition("/")
        first = int(number) * _MOST_AT_ONCE
        for index, (value, partition) in enumerate(zip(values, partitions, strict=True)):
            self.history.sent[value] = Sent(identity, first + index, partition)
        delivery = producer.send_batch(settings.topic, values, keys, partition=chosen if keys is None else None)
        unanswered.update(partitions)
        return delivery, values, partitions

    async def _await_batch(
        self,
        delivery: BatchDelivery,
        values: list[bytes],
        partitions: list[TopicPartition],
        unanswered: Counter[TopicPartition],
        is_durable: bool,
    ) -> None:
        sent_s = self._cluster.simulation.loop.now_s
        try:
            metadata = await delivery
        except BatchDeliveryFailed as error:
            self.history.failed += len(error.indexes)
            metadata = error.metadata
        finally:
            unanswered.subtract(partitions)
        now_s = self._cluster.simulation.loop.now_s
        for part in metadata.parts:
            for place, index in enumerate(part.indexes):
                offset = part.base_offset + place if part.base_offset >= 0 else -1
                partition = partitions[index]
                if part.partition != partition.partition:
                    self.unexpected.append(f"{values[index][:40]!r} is in partition {part.partition}, not {partition}")
                if self.history.era(partition, sent_s) != self.history.era(partition, now_s):
                    continue  # the batch ends with its last part; this one may have ended before the power cut
                self.history.acknowledged[partition].append(Acknowledged(values[index], offset, now_s))
                if is_durable:
                    self.acknowledged_end[partition] = max(self.acknowledged_end[partition], offset + 1)

    async def _await_delivery(
        self,
        name: str,
        delivery: Delivery | asyncio.Future[RecordMetadata],
        value: bytes,
        partition: TopicPartition,
        unanswered: Counter[TopicPartition],
        is_durable: bool,
    ) -> None:
        sent_s = self.history.sent[value].at_s
        try:
            metadata = await delivery
        except MinibrokerError as error:
            self.history.failed += 1
            is_refused = isinstance(error, BrokerError) and error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
            if is_refused and self._security is not None:
                self._security.refused(name, partition, value, sent_s)
            return
        finally:
            unanswered[partition] -= 1
        now_s = self._cluster.simulation.loop.now_s
        if self._security is not None:
            self._security.acknowledged(name, partition, value, sent_s)
        self.history.acknowledged[partition].append(Acknowledged(value, metadata.offset, now_s))
        if is_durable:
            self.acknowledged_end[partition] = max(self.acknowledged_end[partition], metadata.offset + 1)

    # -- consuming --

    async def _consume(self, name: str, world: World, partitions: list[TopicPartition]) -> None:
        for attempt in itertools.count(1):
            identity = f"{name}#{self._starts[name]}.{attempt}"
            shrinks = any(partition.topic == SHRINKING for partition in partitions)
            versions = self._versions.get(name)
            try:
                async with (
                    KafkaConsumer(self._cluster.bootstrap, partitions=partitions, versions=versions, world=world)
                    if versions is not None
                    else Consumer(
                        self._cluster.bootstrap,
                        partitions=partitions,
                        auto_offset_reset="earliest" if shrinks else "none",
                        request_timeout_ms=5_000,
                        world=world,
                    )
                ) as consumer:
                    for partition in partitions:
                        position = self._positions.get((name, partition), 0)
                        if versions is not None:  # in the middle of a batch, as if the last commits were lost
                            position = max(0, position - world.random.randint(0, 5))
                        consumer.seek(partition, position)
                        if shrinks:
                            self.history.starts[identity, partition] = position
                    async for batch in consumer.batches():
                        partition = TopicPartition(batch.topic, batch.partition)
                        self._note_poll(identity, partition, batch)
                        self._positions[name, partition] = batch.next_offset
            except LogTruncated as error:
                self.history.truncations.append(f"{identity}: {error}")
            except CorruptBatch as error:
                if self.pages_have_rotten:
                    self.corrupt_reads += 1
                else:
                    self.unexpected.append(f"{identity}: {error}")
            except (ClientCrashed, ProtocolBroken) as error:
                self.unexpected.append(f"{identity}: {error!r} {error.__cause__!r}")
            except BrokerError as error:
                if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
                    self.history.out_of_range += [
                        (f"{identity}: {error}", partition, self._positions.get((name, partition), 0))
                        for partition in partitions
                    ]
            except MinibrokerError:
                pass  # no broker was reached
            await asyncio.sleep(_RETRY_S)

    def _note_poll(self, identity: str, partition: TopicPartition, batch: ConsumerBatch | KafkaBatch) -> None:
        if partition in self.exposed:
            return
        now_s = self._cluster.simulation.loop.now_s
        for offset, value in zip(batch.offsets, batch.values, strict=True):
            self.history.polled.append(
                Polled(identity, partition, offset, value or b"", now_s, self.history.deleted[partition])
            )


async def read_everything(bootstrap: str, world: World, partitions: list[TopicPartition], history: History) -> None:
    """Read the partitions from beginning to end with a fresh consumer into `history.final`. No record may be deleted
    meanwhile."""
    async with Consumer(bootstrap, partitions=partitions, auto_offset_reset="none", world=world) as consumer:
        consumer.seek_to_beginning()
        history.begins = await consumer.beginning_offsets(partitions)
        ends = history.ends = await consumer.end_offsets(partitions)
        history.final = await read_to_ends(consumer.batches(), history.begins, ends)


async def read_to_ends(
    batches: AsyncIterator[ConsumerBatch | KafkaBatch],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, dict[int, bytes]]:
    """Return the records of each partition of `ends` by offset, read until all ends are reached."""
    read: dict[TopicPartition, dict[int, bytes]] = {partition: {} for partition in ends}
    missing = {partition for partition, end in ends.items() if end > begins.get(partition, 0)}
    while missing:
        batch = await anext(batches)
        partition = TopicPartition(batch.topic, batch.partition)
        read[partition] |= dict(zip(batch.offsets, (value or b"" for value in batch.values), strict=True))
        if batch.next_offset >= ends[partition]:
            missing.discard(partition)
    return read


async def read_as_kafkas_do(bootstrap: str, world: World, versions: Versions, history: History) -> list[str]:
    """Read what `read_everything` has read with a consumer of Kafka's protocol. Return the differences."""
    ends = {partition: end for partition, end in history.ends.items() if end > history.begins[partition]}
    async with KafkaConsumer(
        bootstrap, partitions=list(ends), versions=versions, world=world, limits=[1_048_576], fetch_max_wait_ms=10
    ) as consumer:
        told = await consumer.ends(list(ends))
        wrong = [
            f"{p} ends at {told[p]} for Kafka's clients, at {end} for ours" for p, end in ends.items() if told[p] != end
        ]
        for partition in ends:
            consumer.seek(partition, history.begins[partition])
        batches = consumer.batches()
        seen = {} if wrong else await read_to_ends(batches, {}, ends)
        await batches.aclose()
    return wrong + [
        f"{p} is not to Kafka's clients what it is to ours" for p in ends if not wrong and seen[p] != history.final[p]
    ]
