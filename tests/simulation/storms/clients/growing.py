"""A topic that repeatedly gets more partitions while it is written and read.

An administrator adds them through the API, or writes the topic's znode. One producer spreads records over all
partitions that it knows, and one consumer reads the whole topic; both have to find the new partitions themselves. At
the end there are at least as many partitions as were acknowledged, every broker knows their leaders, every acknowledged
record is there, and the consumer has read it.

Its random decisions are independent, so that the rest of a storm does not depend on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.ownership import ProcessKilled
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.znodes import TopicZnode
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly

TOPIC = "growing"
MOST_PARTITIONS = 12
METADATA_MAX_AGE_MS = 500
_RETRY_S = 0.3


class Growing:
    """The growing topic and its clients."""

    def __init__(self, storm: Ground, dice: Random) -> None:
        self._storm = storm
        self._cluster = storm.cluster
        self._dice = dice
        self._is_there = False
        self._beginning: asyncio.Task[None] | None = None
        self._is_changing = asyncio.Lock()
        self._is_over = False
        self._promised = 0
        """Number of partitions that an acknowledged call has promised."""
        self._asked = 0
        self._acknowledged: dict[TopicPartition, dict[int, bytes]] = {}
        self._seen: set[tuple[int, int, bytes]] = set()
        self._sender: asyncio.Task[None] | None = None
        self.final: dict[TopicPartition, dict[int, bytes]] = {}
        """The final content, by partition and offset."""

    # -- the fault --

    async def add_partitions(self) -> None:
        """Ask for more partitions of the topic, which the first call creates."""
        try:
            await self._add_partitions()
        except ProcessKilled:
            self._storm.note("the client that adds partitions was killed")

    async def _add_partitions(self) -> None:
        async with self._is_changing:
            if self._beginning is None:
                self._beginning = asyncio.create_task(self._begin(), name="the growing topic begins")
            # Healing cancels this fault, but not the creation that it has requested, which must be known here.
            await asyncio.shield(self._beginning)
            if self._asked >= MOST_PARTITIONS:
                return
            present = len(self._storm.topic(TOPIC).partitions)
            if present < self._promised:
                self._accuse("partitions vanished", f"{present} of {self._promised} are left in ZooKeeper")
            self._asked = max(present, self._asked) + self._dice.choice([1, 1, 2])
            if self._dice.random() < 0.25:
                self._write_by_hand(self._asked)
                return
            self._storm.count("add partitions", f"{self._asked} instead of {present}")
            world = self._cluster.client("enlarger")
            try:
                await asyncio.wait([world.process.start(self._ask(world, self._asked))], timeout=30)
            finally:
                world.process.kill()

    async def _ask(self, world: VirtualWorld, count: int) -> None:
        try:
            async with Admin(self._cluster.bootstrap, default_api_timeout_ms=20_000, world=world) as admin:
                await admin.create_partitions(TOPIC, count)
                self._promised = max(self._promised, count)
                self._storm.event("partitions added by request")
        except BrokerError as error:
            # Each earlier request was for fewer partitions, so no retry or late request explains this error.
            if error.code in (ErrorCode.INVALID_PARTITIONS, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                self._accuse("partitions were refused", f"{count}: {error}")
        except MinibrokerError:
            pass  # the outcome is unknown

    def _write_by_hand(self, count: int) -> None:
        topic, brokers = self._storm.topic(TOPIC), self._cluster.broker_ids
        more = {
            number: tuple(self._dice.sample(brokers, len(brokers))) for number in range(len(topic.partitions), count)
        }
        self._storm.count("add partitions", f"{count} by hand, instead of {len(topic.partitions)}")
        data = znodes.encode_topic(TopicZnode(topic.topic_id, topic.partitions | more))
        self._cluster.simulation.zookeeper.make(znodes.topic_path(TOPIC), data)
        self._promised = max(self._promised, count)

    async def _begin(self) -> None:
        """Create the topic, and start a producer and a consumer that live until the end."""
        world = self._cluster.client("enlarger")

        async def create() -> None:
            while not self._cluster.simulation.zookeeper.has(znodes.topic_path(TOPIC)):
                try:
                    async with Admin(self._cluster.bootstrap, world=world) as admin:
                        await admin.create_topic(TOPIC, partitions=2, replication_factor=len(self._cluster.broker_ids))
                except MinibrokerError:
                    await asyncio.sleep(_RETRY_S)

        await world.process.run(create())
        self._is_there, self._promised, self._asked = True, 2, 2
        sender = self._cluster.client("growing-producer")
        self._sender = sender.process.start(self._produce(sender), "growing-producer")
        reader = self._cluster.client("growing-consumer")
        reader.process.start(self._consume(reader), "growing-consumer")

    async def _produce(self, world: VirtualWorld) -> None:
        random, number = world.random, 0
        while not self._is_over:
            try:
                async with Producer(
                    self._cluster.bootstrap,
                    acks="all",
                    delivery_timeout_ms=20_000,
                    metadata_max_age_ms=METADATA_MAX_AGE_MS,
                    world=world,
                ) as producer:
                    while not self._is_over:
                        number += 1
                        value = b"%d" % number
                        sent = await producer.send(TOPIC, value, key=b"%d" % random.randrange(1_000))
                        partition = TopicPartition(TOPIC, sent.partition)
                        self._acknowledged.setdefault(partition, {})[sent.offset] = value
                        await asyncio.sleep(random.expovariate(10))
            except MinibrokerError:
                await asyncio.sleep(_RETRY_S)

    async def _consume(self, world: VirtualWorld) -> None:
        while True:
            try:
                async with Consumer(
                    self._cluster.bootstrap, topics=[TOPIC], metadata_max_age_ms=METADATA_MAX_AGE_MS, world=world
                ) as consumer:
                    while True:
                        try:
                            record = await anext(consumer)
                            self._seen.add((record.partition, record.offset, record.value or b""))
                        except MinibrokerError:
                            await asyncio.sleep(_RETRY_S)
            except MinibrokerError:
                await asyncio.sleep(_RETRY_S)  # the consumer could not start

    # -- what the storm asks --

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions that have a state znode."""
        zookeeper = self._cluster.simulation.zookeeper
        if not self._is_there:
            return []
        found = [TopicPartition(TOPIC, number) for number in self._storm.topic(TOPIC).partitions]
        return [partition for partition in found if zookeeper.has(znodes.state_path(partition))]

    def is_whole(self) -> bool:
        """Return whether all promised partitions are there, with all replicas in sync."""
        if not self._is_there:
            return True
        states = [self._cluster.state(partition) for partition in self.partitions()]
        return (
            len(states) == len(self._storm.topic(TOPIC).partitions) >= self._promised
            and all(s.leader != NO_LEADER and len(s.isr) == len(self._cluster.broker_ids) for s in states)
            and all(
                broker is not None and broker._metadata.has_leaders(TOPIC, len(states))
                for broker in map(self._cluster.living_broker, self._cluster.broker_ids)
            )
        )

    def forgive(self, partitions: Iterable[TopicPartition]) -> None:
        """Allow the loss of acknowledged records in these partitions."""
        for partition in partitions:
            self._acknowledged.pop(partition, None)

    def has_caught_up(self, broker_id: int) -> bool:
        """Return whether the broker is in every ISR and has every acknowledged record."""
        for partition in self.partitions():
            replica = self._storm.replica(broker_id, partition)
            end = max(self._acknowledged.get(partition, {-1: b""})) + 1
            if replica is None or replica.high_watermark < end or not self._storm.is_in_sync(broker_id, partition):
                return False
        return True

    async def finish(self, within_s: float) -> None:
        """After healing, accuse missing partitions, missing records, and records that the consumer has not read."""
        if self._beginning is None:
            return
        async with asyncio.timeout(within_s):
            await self._beginning
        assert self._sender is not None
        self._is_over = True
        await asyncio.wait([self._sender], timeout=within_s)
        world = self._cluster.client("growing-reader")
        async with asyncio.timeout(within_s):
            final = await world.process.run(self._read_back(world))
        for number, offset, value in sorted(final):
            self.final.setdefault(TopicPartition(TOPIC, number), {})[offset] = value
        try:
            await self._cluster.until(lambda: self._seen >= final, within_s=within_s)
        except TimeoutError:
            missed = sorted(final - self._seen)[:3]
            self._accuse("a consumer of a growing topic missed records", f"{missed} of {len(final)}")
        if self._storm.cuts_power_of_several or len(self._cluster.broker_ids) == 2:
            return  # acknowledged records may be lost legally
        for partition, records in sorted(self._acknowledged.items()):
            for offset, value in records.items():
                if (partition.partition, offset, value) not in final:
                    self._accuse("acknowledged records of a growing topic are lost", f"{partition} {offset}: {value!r}")

    async def _read_back(self, world: VirtualWorld) -> set[tuple[int, int, bytes]]:
        final: set[tuple[int, int, bytes]] = set()
        partitions = self.partitions()
        async with Producer(self._cluster.bootstrap, acks="all", world=world) as producer:
            for partition in partitions:  # each partition must accept a record
                await producer.send(TOPIC, b"the last", partition=partition.partition)
        async with Consumer(self._cluster.bootstrap, topics=[TOPIC], world=world) as consumer:
            ends = await consumer.end_offsets(partitions)
            missing = set(partitions)
            while missing:
                record = await anext(consumer)
                final.add((record.partition, record.offset, record.value or b""))
                partition = TopicPartition(TOPIC, record.partition)
                if record.offset + 1 >= ends[partition]:
                    missing.discard(partition)
        return final

    def _accuse(self, kind: str, what: str) -> None:
        self._storm.accuse(Anomaly(kind, what))
