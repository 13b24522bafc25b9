"""Producers and consumers that outlive the re-creations of their topic."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from random import Random
from typing import Literal

from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, CorruptBatch
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.workload import Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import TopicIdPartition
from tests.simulation.storms.verdicts.incarnations import Acknowledged, Lives, Polled, Sent, has_read_all

KEYS = 8

END_GRACE_S = 3.0
"""Seconds by which a delivery may exceed its timeout."""

POLL_S = 0.001
_RETRY_S = 0.3


@dataclass(frozen=True)
class Producing:
    topic: str
    chooses: Literal["number", "key", "neither"]
    """The way in which a record's partition is determined."""
    records_per_s: float
    burst: int
    linger_ms: int
    batch_size: int
    delivery_timeout_ms: int
    request_timeout_ms: int


@dataclass(frozen=True)
class _Consuming:
    topic: str
    is_by_topic: bool
    is_by_record: bool
    iterates_on: bool
    """Whether it continues with the same consumer after an error."""


class RebirthClients(Guests):
    """The clients of all re-created topics, `Guests` of the workload. They record their history in `lives`."""

    def __init__(self, storm: Ground, lives: Lives) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self._lives = lives
        self.acknowledged_ends: dict[TopicIdPartition, int] = {}
        """One past the highest acknowledged offset of each incarnation's partition."""
        self.producers: dict[str, Producing] = {}
        self._producing: dict[str, asyncio.Task[None]] = {}
        self._consumers: dict[str, _Consuming] = {}
        self.quiet: set[str] = set()
        """Topics to which producers send nothing at the moment."""
        self.slow: set[str] = set()
        """Topics whose consumers process one record and read no other at the moment."""
        self._is_probing = False
        self._probed: dict[str, str] = {}
        """The last problem of each producer that has not finished its final probes."""

    def draw(self, topic: str, dice: Random) -> None:
        """Draw the producers and consumers of a topic."""
        for number in range(dice.choice([1, 1, 2])):
            self.producers[f"{topic}-producer-{number}"] = Producing(
                topic=topic,
                chooses=dice.choice(["number", "key", "neither"]),
                records_per_s=dice.choice([1, 3, 6]),
                burst=dice.choice([1, 4, 4, 10]),
                linger_ms=dice.choice([0, 0, 5, 100]),
                batch_size=dice.choice([100, 300, 16_384]),
                delivery_timeout_ms=dice.choice([4_000, 8_000, 20_000]),
                request_timeout_ms=dice.choice([500, 1_000, 5_000]),
            )
        for number in range(dice.choice([1, 1, 2])):
            self._consumers[f"{topic}-consumer-{number}"] = _Consuming(
                topic=topic,
                is_by_topic=dice.random() < 0.7,
                is_by_record=dice.random() < 0.6,
                iterates_on=dice.random() < 0.5,
            )

    @property
    def names(self) -> list[str]:
        return [*self.producers, *self._consumers]

    def _run(self, name: str, world: VirtualWorld) -> None:
        if name in self.producers:
            self._producing[name] = world.process.start(self._produce(name, world, self.producers[name]), name)
        else:
            world.process.start(self._consume(name, world, self._consumers[name]), name)

    # -- after healing --

    async def probe(self, within_s: float) -> list[str]:
        """Let each producer send to all partitions. Return the problem of each that did not succeed in time."""
        self._probed = dict.fromkeys(self.producers, "it has not begun")
        self._is_probing = True
        try:
            await self._cluster.until(lambda: not self._probed, within_s=within_s)
        except TimeoutError:
            return [f"acknowledgements for {name}: {problem}" for name, problem in self._probed.items()]
        finally:
            self._probed = {}
        return []

    def have_sent_all(self) -> bool:
        """Return whether all producers have ended."""
        return all(task.done() for task in self._producing.values())

    def end_consumers(self) -> None:
        for name, settings in self._consumers.items():
            self._lives.readers[self._identity(name)] = self._read_by(settings)
            self._processes[name].kill()

    def _read_by(self, settings: _Consuming) -> list[TopicPartition]:
        current = self._lives.current(settings.topic)
        assert current is not None
        return current.partitions if settings.is_by_topic else [TopicPartition(settings.topic, 0)]

    def have_read_all(self) -> bool:
        """Return whether all consumers have read the last incarnations to their ends."""
        return all(
            has_read_all(self._lives, self._identity(name), partition)
            for name, settings in self._consumers.items()
            for partition in self._read_by(settings)
        )

    # -- producing and consuming --

    def _identity(self, name: str) -> str:
        return f"{name}#{self._starts[name]}"

    async def _produce(self, name: str, world: World, settings: Producing) -> None:
        start = self._identity(name)
        for attempt in itertools.count(1):
            try:
                async with Producer(
                    self._cluster.bootstrap,
                    linger_ms=settings.linger_ms,
                    batch_size=settings.batch_size,
                    delivery_timeout_ms=settings.delivery_timeout_ms,
                    request_timeout_ms=settings.request_timeout_ms,
                    world=world,
                ) as producer:
                    await self._send(name, f"{start}.{attempt}", producer, world.random, settings)
                return
            except ClientCrashed as error:
                self._storm.workload.unexpected.append(f"{name}: {error!r} {error.__cause__!r}")
            except MinibrokerError as error:  # no broker was reached; each record has its own outcome
                if name in self._probed:
                    self._probed[name] = str(error)
            await asyncio.sleep(_RETRY_S)

    async def _send(self, name: str, identity: str, producer: Producer, random: Random, settings: Producing) -> None:
        numbers = itertools.count()
        async with asyncio.TaskGroup() as tasks:
            while not self._is_probing:
                for _ in range(0 if settings.topic in self.quiet else random.randint(1, settings.burst)):
                    choice = self._choice(settings, random)
                    tasks.create_task(self._record(identity, next(numbers), producer, random, settings, choice))
                await asyncio.sleep(random.expovariate(settings.records_per_s) * (1 + settings.burst) / 2)
            while name in self._probed:
                problem = await self._send_probes(identity, numbers, producer, random, settings)
                if problem is None:
                    del self._probed[name]
                elif name in self._probed:
                    self._probed[name] = problem
                    await asyncio.sleep(_RETRY_S)

    def _choice(self, settings: Producing, random: Random) -> int | bytes | None:
        """Draw the partition or the key of a record."""
        if settings.chooses == "number":
            return random.randrange(len(self._lives.incarnations[settings.topic][-1].assignment))
        return b"%d" % random.randrange(KEYS) if settings.chooses == "key" else None

    async def _send_probes(
        self, identity: str, numbers: itertools.count[int], producer: Producer, random: Random, settings: Producing
    ) -> str | None:
        """Send a record to each partition, with each key, or to partitions of the producer's choice. Return the first
        problem."""
        count = len(self._lives.incarnations[settings.topic][-1].assignment)
        choices: list[int | bytes | None] = list(range(count))
        if settings.chooses == "key":
            choices = [b"%d" % key for key in range(KEYS)]
        elif settings.chooses == "neither":
            choices = [None] * (2 * count)
        for choice in choices:
            problem = await self._record(identity, next(numbers), producer, random, settings, choice)
            if problem is not None:
                return problem
        return None

    async def _record(
        self,
        identity: str,
        number: int,
        producer: Producer,
        random: Random,
        settings: Producing,
        choice: int | bytes | None,
    ) -> str | None:
        """Send a record and wait for its outcome. Return its error, if there is one."""
        value = b"%s/%d|" % (identity.encode(), number) + random.randbytes(random.choice([0, 20, 200]))
        partition = choice if isinstance(choice, int) else None
        key = choice if isinstance(choice, bytes) else None
        sent_s = self._storm.now_s
        self._lives.sent[value] = Sent(identity, number, settings.topic, partition, sent_s, key)
        try:
            metadata = await producer.send(settings.topic, value, partition=partition, key=key)
        except MinibrokerError as error:
            self._check_duration(identity, number, sent_s, settings)
            return f"{error}"
        self._check_duration(identity, number, sent_s, settings)
        acknowledged_in = TopicPartition(metadata.topic, metadata.partition)
        self._lives.acknowledged.append(Acknowledged(value, acknowledged_in, metadata.offset, self._storm.now_s))
        incarnation = self._lives.surely_in(value, acknowledged_in, self._storm.now_s)
        if incarnation is not None:
            identified = TopicIdPartition(incarnation.topic_id, acknowledged_in)
            self.acknowledged_ends[identified] = max(self.acknowledged_ends.get(identified, 0), metadata.offset + 1)
        return None

    def _check_duration(self, identity: str, number: int, sent_s: float, settings: Producing) -> None:
        took_s = self._storm.now_s - sent_s
        if took_s > settings.delivery_timeout_ms / 1_000 + END_GRACE_S:
            self._storm.workload.unexpected.append(
                f"{identity}/{number} had its end after {took_s:.1f} s, with a delivery timeout of "
                f"{settings.delivery_timeout_ms} ms"
            )

    async def _consume(self, name: str, world: World, settings: _Consuming) -> None:
        random = world.random
        partitions = [TopicPartition(settings.topic, 0)]
        for _ in itertools.count():
            identity = self._identity(name)
            try:
                async with Consumer(
                    self._cluster.bootstrap,
                    topics=[settings.topic] if settings.is_by_topic else None,
                    partitions=None if settings.is_by_topic else partitions,
                    request_timeout_ms=5_000,
                    max_partition_fetch_bytes=random.choice([300, 1_048_576]),
                    world=world,
                ) as consumer:
                    while True:
                        try:
                            await self._read(identity, consumer, random, settings)
                        except BrokerError as error:
                            if not settings.iterates_on:
                                raise
                            self._storm.note_once(identity, f"{identity} iterates on after {error.code.name}")
                            await asyncio.sleep(_RETRY_S)
            except (ClientCrashed, CorruptBatch) as error:
                self._storm.workload.unexpected.append(f"{identity}: {error!r} {error.__cause__!r}")
            except MinibrokerError as error:
                self._storm.note(f"{identity} starts again: {error}")
            self._starts[name] += 1  # the next consumer begins at the beginning again
            await asyncio.sleep(_RETRY_S)

    async def _read(self, identity: str, consumer: Consumer, random: Random, settings: _Consuming) -> None:
        polled = self._lives.polled
        if not settings.is_by_record:
            async for batch in consumer.batches():
                polls = polled[identity, TopicPartition(batch.topic, batch.partition)]
                for offset, value in zip(batch.offsets, batch.values, strict=True):
                    polls.append(Polled(offset, value or b"", self._storm.now_s))
            return
        async for record in consumer:
            polls = polled[identity, TopicPartition(record.topic, record.partition)]
            polls.append(Polled(record.offset, record.value or b"", self._storm.now_s))
            if random.random() < 0.2:
                await asyncio.sleep(random.uniform(0, 0.1))
            while settings.topic in self.slow:
                await asyncio.sleep(POLL_S)
