"""Clients that read, process and write in transactions, their zombie twins, and plain read_committed consumers.

A transactor has a transactional id and reads some partitions of the topic that all of them write to. Most transactors
commit what they have read as the offsets of a group of their own, so that each input must have been processed by one
committed transaction. They commit or abort by chance, and some transactions last for longer than their time-out.

An *instance* lives until it is fenced or does not get an answer. A twin is another instance of a transactional id that
runs while the first one is paused or cut off. Neither knows of the other: the cluster must let only one of them go on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed
from minibroker.deploy.simulator.kafka_clients import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    KafkaConsumer,
    ProtocolBroken,
    Versions,
)
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.transacting.kafka_transactions import (
    OLDER,
    RAISING,
    Abortable,
    Fenced,
    KafkaTransactions,
    TransactionVersions,
    Unanswered,
)
from tests.simulation.storms.clients.transacting.native_transactions import NativeTransactions
from tests.simulation.storms.clients.workload import Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.security import TWIN, Right, may_join, may_read, may_use, may_write
from tests.simulation.storms.verdicts.history import Anomaly, Polled
from tests.simulation.storms.verdicts.transactions import (
    Append,
    OffsetFetched,
    Outcome,
    StableEnd,
    Transaction,
    TransactionHistory,
    check_transactions,
    unstable_ends,
)

TOPIC = "transactions"

_NEWEST = RAISING[0]
_RETRY_S = 0.3
_MOST_POLLED = 40
"""Records that a transaction processes at most."""


_Client = KafkaTransactions | NativeTransactions


@dataclass(frozen=True)
class _Transactor:
    name: str
    partitions: list[TopicPartition]
    """What it reads."""
    group: str | None
    versions: TransactionVersions | None
    """None: our own client."""
    transaction_timeout_ms: int
    patience_s: float
    pause_s: float
    """Longest pause between transactions."""
    dwell_s: float
    """Longest pause within a transaction."""
    appends: int
    """Most batches of a transaction."""


class Transactors(Guests):
    """The transactors of a storm and the consumers of their topic, `Guests` of the workload."""

    def __init__(self, storm: Ground, dice: Random, at_least: int = 0) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self.history = TransactionHistory()
        self._is_forgiven = False
        self._transactors: dict[str, _Transactor] = {}
        self._consumers: dict[str, Versions | None] = {}
        """Their versions of Kafka's protocol, or None for minibroker's own."""
        self.partitions: list[TopicPartition] = []
        """The partitions of their topic."""
        self.state_partitions: list[TopicPartition] = []
        """The partitions of `__transaction_state`, once they exist."""
        count = max(at_least, dice.choice([0, 0, 1, 2]))
        if count:
            self.partitions = [TopicPartition(TOPIC, number) for number in range(dice.randint(1, 4))]
            self._draw(dice, count)
        self._positions: dict[tuple[str, TopicPartition], int] = {}

    def _draw(self, dice: Random, count: int) -> None:
        for number in range(count):
            name = f"transactor-{number}"
            self._transactors[name] = _Transactor(
                name,
                partitions=sorted(dice.sample(self.partitions, dice.randint(1, len(self.partitions)))),
                group=f"group-of-{name}" if dice.random() < 0.8 else None,
                versions=dice.choice([*OLDER, *RAISING, *RAISING, None, None, None]),
                transaction_timeout_ms=dice.choice([2_000, 6_000, 20_000]),
                patience_s=dice.choice([3.0, 10.0, 30.0]),
                pause_s=dice.choice([0.02, 0.2, 1.0]),
                dwell_s=dice.choice([0.02, 0.2, 1.0]),
                appends=dice.choice([2, 4]),
            )
        for number in range(dice.randint(1, 2)):
            versions = dice.choice([None, None, *OLDER, *RAISING])
            self._consumers[f"transactions-consumer-{number}"] = None if versions is None else versions.data

    def stay_away(self) -> None:
        self._transactors.clear()
        self._consumers.clear()
        self.partitions.clear()

    # -- their lives --

    @property
    def names(self) -> list[str]:
        return [*self._transactors, *self._consumers]

    def rights(self, name: str) -> list[Right]:
        if name in self._consumers:
            return may_read(TOPIC)
        group = self._transactors[name].group or f"unused-group-of-{name}"
        return [*may_read(TOPIC), *may_write(TOPIC), *may_join(group), *may_use(f"id-of-{name}")]

    @property
    def all_partitions(self) -> list[TopicPartition]:
        return [*self.partitions, *self.state_partitions]

    @property
    def transactors(self) -> list[str]:
        return list(self._transactors)

    def _run(self, name: str, world: VirtualWorld) -> None:
        if name in self._consumers:
            world.process.start(self._consume(name, world), name)
        else:
            world.process.start(self._live(self._transactors[name], world, name), name)

    def start_twin(self, name: str) -> VirtualWorld:
        """Start another instance of a transactor on another host. It lives until it is fenced."""
        twin = f"{name}{TWIN}"
        world = self._new_process(twin)
        world.process.start(self._live(self._transactors[name], world, twin, instances=1), twin)
        return world

    async def _live(
        self, transactor: _Transactor, world: VirtualWorld, name: str, instances: int | None = None
    ) -> None:
        for number in itertools.count(1) if instances is None else range(1, instances + 1):
            identity = f"{name}#{self._starts[name]}.{number}"
            with self._storm.client_errors(identity):
                try:
                    await self._instance(transactor, identity, world)
                except ProtocolBroken as error:
                    raise ClientCrashed(f"{identity}: {error}") from error
                except (Fenced, Unanswered) as error:
                    self._storm.event(f"transactor: {type(error).__name__.lower()}")
                    raise
            await asyncio.sleep(_RETRY_S + world.random.choice([0.0, 0.0, 5.0]) * world.random.random())

    async def _instance(self, transactor: _Transactor, identity: str, world: VirtualWorld) -> None:
        async with self._client(transactor, world) as client:
            await client.initialize()
            number = itertools.count(1)
            for session in itertools.count(1):
                await self._go_back(transactor, client)
                is_committed = True
                while is_committed:
                    name = f"{identity}.{next(number)}"
                    is_committed = await self._transact(transactor, client, name, f"{identity}.s{session}", world)
                    await asyncio.sleep(transactor.pause_s * world.random.random())

    def _client(self, transactor: _Transactor, world: World) -> _Client:
        settings: dict[str, Any] = {
            "transactional_id": f"id-of-{transactor.name}",
            "transaction_timeout_ms": transactor.transaction_timeout_ms,
            "partitions": transactor.partitions,
            "patience_s": transactor.patience_s,
            "world": world,
        }
        if transactor.versions is None:
            group = transactor.group or f"unused-group-of-{transactor.name}"
            return NativeTransactions(self._cluster.bootstrap, group=group, **settings)
        return KafkaTransactions(self._cluster.bootstrap, versions=transactor.versions, **settings)

    async def _go_back(self, transactor: _Transactor, client: _Client) -> None:
        """Continue where the last committed transaction ended; without a group, somewhere before the position."""
        if transactor.group is None:
            for partition in transactor.partitions:
                client.seek(partition, max(0, self._positions.get((transactor.name, partition), 0) - 20))
            return
        began_s = self._storm.now_s
        found = await client.committed(transactor.group, transactor.partitions)
        for partition, offset in found.items():
            self._found(transactor.group, partition, offset, began_s)
            client.seek(partition, max(offset, 0))

    def _found(self, group: str, partition: TopicPartition, offset: int, began_s: float) -> None:
        self.history.fetched.append(OffsetFetched(group, partition, offset, began_s, self._storm.now_s))

    async def _transact(
        self, transactor: _Transactor, client: _Client, name: str, session: str, world: VirtualWorld
    ) -> bool:
        """Return whether the transaction was committed. Raise Fenced, or Unanswered."""
        transaction = Transaction(name, self._storm.now_s)
        self.history.transactions.append(transaction)
        await client.begin()
        try:
            await self._work(transactor, client, transaction, session, world)
            if world.random.random() < 0.15:
                raise Abortable("the application changed its mind")
            transaction.commit_asked_s = self._storm.now_s
            await client.commit()
        except Abortable as error:
            self._storm.note_once(name, f"{name}: {error}")
            self._end(transaction, Outcome.ABORTED)  # it has no answer yet, but nobody can commit it any more
            transaction.ended_s = float("inf")
            await client.abort()
            if transactor.versions is not None:  # our own may still be waiting for the answer
                transaction.ended_s = self._storm.now_s
            self._storm.event("transaction aborted")
            return False
        self._end(transaction, Outcome.COMMITTED)
        self._storm.event("transaction committed")
        return True

    def _end(self, transaction: Transaction, outcome: Outcome) -> None:
        transaction.outcome, transaction.ended_s = outcome, self._storm.now_s

    async def _work(
        self,
        transactor: _Transactor,
        client: _Client,
        transaction: Transaction,
        session: str,
        world: VirtualWorld,
    ) -> None:
        random = world.random
        while len(transaction.polled) < _MOST_POLLED and random.random() < 0.7:
            for partition, offset, value in await client.poll():
                transaction.polled.append(Polled(session, partition, offset, value, self._storm.now_s))
        positions = await client.positions()
        for partition, position in positions.items():
            self._positions[transactor.name, partition] = position
        for number in range(random.randint(0, transactor.appends)):
            await asyncio.sleep(transactor.dwell_s * random.random())
            partition = random.choice(self.partitions)
            values = [
                b"%s/%d.%d|%s" % (transaction.name.encode(), number, index, b"x" * random.randint(0, 30))
                for index in range(random.choice([1, 1, 3]))
            ]
            first = len(transaction.appends)
            transaction.appends += [Append(partition, value) for value in values]
            offset = await client.append(partition, values)
            transaction.appends[first:] = [
                Append(partition, value, offset + index if offset >= 0 else -1) for index, value in enumerate(values)
            ]
        if random.random() < 0.02:
            await asyncio.sleep(1.2 * transactor.transaction_timeout_ms / 1_000)
        if transactor.group is not None:
            transaction.group, transaction.offsets = transactor.group, positions
            await client.send_offsets(transactor.group, positions)

    async def _consume(self, name: str, world: VirtualWorld) -> None:
        for number in itertools.count(1):
            identity = f"{name}#{self._starts[name]}.{number}"
            with self._storm.client_errors(identity):
                try:
                    await self._read(name, identity, world)
                except ProtocolBroken as error:
                    raise ClientCrashed(f"{identity}: {error}") from error
            await asyncio.sleep(_RETRY_S)

    async def _read(self, name: str, identity: str, world: VirtualWorld) -> None:
        async with self._consumer(self._consumers[name], READ_COMMITTED, world) as consumer:
            for partition in self.partitions:
                consumer.seek(partition, self._positions.get((name, partition), 0))
            async for batch in consumer.batches():
                partition = TopicPartition(batch.topic, batch.partition)
                for offset, value in zip(batch.offsets, batch.values, strict=True):
                    self.history.polled.append(Polled(identity, partition, offset, value or b"", self._storm.now_s))
                self._positions[name, partition] = batch.next_offset

    def _consumer(self, versions: Versions | None, isolation_level: int, world: World) -> KafkaConsumer | Consumer:
        if versions is not None:
            return KafkaConsumer(
                self._cluster.bootstrap,
                partitions=self.partitions,
                versions=versions,
                world=world,
                isolation_level=isolation_level,
            )
        return Consumer(
            self._cluster.bootstrap,
            partitions=self.partitions,
            auto_offset_reset="none",
            isolation_level="read_committed" if isolation_level == READ_COMMITTED else "read_uncommitted",
            world=world,
        )

    # -- what the storm asks --

    async def create_topic(self, admin: Admin, replication_factor: int) -> None:
        if self.partitions:
            await admin.create_topic(TOPIC, partitions=len(self.partitions), replication_factor=replication_factor)

    async def create_state_topic(self) -> None:
        """Create `__transaction_state` through the first request to a coordinator."""
        world = self._cluster.client("transactions-reader")
        await world.process.run(self._ask_for_state(world))
        world.process.kill()
        partitions = sorted(self._storm.topic(TRANSACTIONS_TOPIC).partitions)
        self.state_partitions = [TopicPartition(TRANSACTIONS_TOPIC, number) for number in partitions]

    async def _ask_for_state(self, world: World) -> None:
        async with self._reader(world) as client:
            await client.initialize()

    async def finish(self, within_s: float) -> None:
        """After healing, end all clients, wait until the transactions that they have left open are aborted, and read
        everything. Accuse what is late."""
        for process in self._processes.values():
            process.kill()
        if not self.partitions or self._is_forgiven:  # a transaction that the coordinator has lost stays open
            return
        world = self._cluster.client("transactions-reader")
        try:
            async with asyncio.timeout(2 * within_s):
                await world.process.run(self._finish(world, within_s))
        except (MinibrokerError, TimeoutError) as error:
            self._storm.accuse(Anomaly("not live", f"not in time after healing: the end of transactions: {error!r}"))
        world.process.kill()

    async def _finish(self, world: World, within_s: float) -> None:
        until_s = self._storm.now_s + within_s
        while True:
            self.history.stable = await self._ends(world)
            if all(end.last_stable_offset == end.high_watermark for end in self.history.stable.values()):
                break
            if self._storm.now_s > until_s:
                for anomaly in unstable_ends(self.history):
                    self._storm.accuse(anomaly)
                return
            await asyncio.sleep(0.5)
        async with self._reader(world) as client:
            for transactor in self._transactors.values():
                if transactor.group is not None:
                    began_s = self._storm.now_s
                    for partition, offset in (await client.committed(transactor.group, transactor.partitions)).items():
                        self._found(transactor.group, partition, offset, began_s)
        ends = {partition: end.high_watermark for partition, end in self.history.stable.items()}
        found = {}
        for level in (READ_COMMITTED, READ_UNCOMMITTED):
            async with (
                self._consumer(_NEWEST.data, level, world) as of_kafka,
                self._consumer(None, level, world) as ours,
            ):
                found[level] = await _read_to(of_kafka, ends)
                if found[level] != await _read_to(ours, ends):
                    text = (
                        f"isolation level {level}: the topic of transactions differs for Kafka's clients and for ours"
                    )
                    self._storm.accuse(Anomaly("two dialects, two logs", text))
        self.history.committed, self.history.log = found[READ_COMMITTED], found[READ_UNCOMMITTED]

    def _reader(self, world: World) -> KafkaTransactions:
        return KafkaTransactions(
            self._cluster.bootstrap,
            transactional_id="reader",
            transaction_timeout_ms=1_000,
            partitions=self.partitions,
            versions=_NEWEST,
            patience_s=60,
            world=world,
        )

    async def _ends(self, world: World) -> dict[TopicPartition, StableEnd]:
        found: list[dict[TopicPartition, int]] = []
        for level in (READ_UNCOMMITTED, READ_COMMITTED):
            async with self._consumer(_NEWEST.data, level, world) as consumer:
                assert isinstance(consumer, KafkaConsumer)
                found.append(await consumer.ends(self.partitions))
        return {partition: StableEnd(found[1][partition], found[0][partition]) for partition in self.partitions}

    def forgive(self) -> None:
        """Allow the loss of records, of offsets and of the states of transactions."""
        self._is_forgiven = True

    def judge(self) -> Iterator[Anomaly]:
        if not self._is_forgiven:
            yield from check_transactions(self.history)


async def _read_to(
    consumer: KafkaConsumer | Consumer, ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, dict[int, bytes]]:
    """Return the records of each partition by offset, from the beginning on."""
    read: dict[TopicPartition, dict[int, bytes]] = {partition: {} for partition in ends}
    for partition in ends:
        consumer.seek(partition, 0)
    while True:
        if isinstance(consumer, KafkaConsumer):
            for batch in await consumer.poll():
                values = (value or b"" for value in batch.values)
                read[TopicPartition(batch.topic, batch.partition)] |= dict(zip(batch.offsets, values, strict=True))
            positions = {partition: consumer.position(partition) for partition in ends}
        else:
            for record in await consumer.poll(timeout_ms=100):
                read[TopicPartition(record.topic, record.partition)][record.offset] = record.value or b""
            positions = {partition: await consumer.position(partition) for partition in ends}
        if all(positions[partition] >= end for partition, end in ends.items()):
            return read
