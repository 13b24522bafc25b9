"""Clients that manage offsets themselves, as scripts and tools do. They commit, look up and delete the offsets of their
own group, and delete the group, through an `Admin` and now and then as the group's only member.

Many storms have one or two. In half of the storms offsets expire after a minute, and coordinators look for expired ones
every few seconds. There bookkeepers wait until shortly before or after that, and then look, or commit again while a
coordinator is about to delete. Wall clocks jump there as everywhere, even back and by days. Machines are not suspended,
since a process that resumes takes the time as passed.

Each bookkeeper has its own group and makes one call at a time, so that the result of each lookup is predictable, except
for calls whose outcome is unknown (`ledger`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Mapping
from random import Random
from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupErrors
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, Closed, CommitFailed, PartitionErrors
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition, internal_partition
from tests.simulation.storms.clients.interruptions import may_be_interrupted
from tests.simulation.storms.clients.workload import DURABLE, SHRINKING, Guests
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.settings import RETENTION_MINUTES
from tests.simulation.storms.verdicts.history import Anomaly
from tests.simulation.storms.verdicts.ledger import Call, Ledger, Retention, check_ledger

CLOCK_FAULTS = frozenset({"suspend"})
"""Faults that storms with a short retention leave out."""

_KEPT_S = RETENTION_MINUTES * 60.0
_LATE_S = 75.0
"""Longest time for which faults may leave the group without a coordinator. A dead member counts until then."""
_API_TIMEOUT_MS = 10_000
_SESSION_TIMEOUT_MS = 1_500
_RETRY_S = 0.3


class _Book:
    """A bookkeeper and its group."""

    def __init__(self, name: str, partitions: list[TopicPartition]) -> None:
        self.name = name
        self.group = f"book-of-{name}"
        self.partitions = partitions
        self.ledger = Ledger(self.group)
        self.next_offset = itertools.count(1)
        """Offsets to commit; each is used by a single call."""
        self.set_s = 0.0
        """Time of the last acknowledged change."""


class Bookkeepers(Guests):
    """The bookkeepers of a storm, `Guests` of the workload."""

    def __init__(self, storm: Ground, dice: Random, at_least: int = 0) -> None:
        super().__init__(storm.cluster)
        self._storm = storm
        self._is_forgiven = False
        minutes = int(storm.settings["offsets.retention.minutes"])
        self._offsets_partitions = int(storm.settings["offsets.topic.num.partitions"])
        self.retention = Retention(minutes * 60.0, _LATE_S)
        lasting = [p for p in storm.partitions if p.topic.startswith(DURABLE) and p.topic != SHRINKING]
        self._books = {
            name: _Book(name, sorted(dice.sample(lasting, dice.randint(1, len(lasting)))))
            for name in (f"bookkeeper-{number}" for number in range(max(at_least, dice.choice([0, 1, 1, 2]))))
        }

    def stay_away(self) -> None:
        self._books.clear()

    @property
    def names(self) -> list[str]:
        return list(self._books)

    # -- their lives --

    def _run(self, name: str, world: VirtualWorld) -> None:
        world.process.start(self._live(self._books[name], world), name)

    async def _live(self, book: _Book, world: VirtualWorld) -> None:
        """Use one client after the other."""
        for number in itertools.count(1):
            client = f"{book.name}#{self._starts[book.name]}.{number}"
            with self._storm.client_errors(client):
                if world.random.random() < 0.15:
                    await self._be_a_member(book, client, world)
                else:
                    await self._administer(book, client, world)
            await asyncio.sleep(_RETRY_S)

    async def _administer(self, book: _Book, client: str, world: VirtualWorld) -> None:
        random = world.random
        async with Admin(self._cluster.bootstrap, default_api_timeout_ms=_API_TIMEOUT_MS, world=world) as admin:
            for _ in range(random.choice([1, 3, 20])):
                does = random.choices(
                    [self._commit, self._look, self._delete_offsets, self._delete_group, self._rest],
                    [0.4, 0.35, 0.08, 0.07, 0.1],
                )[0]
                call = does(book, client, admin, random)
                try:
                    if does == self._rest:
                        await call
                    else:
                        await self._interruptible(call, client, admin, random)
                except (ClientCrashed, Closed):
                    raise
                except MinibrokerError as error:
                    self._storm.note(f"{client}: {error!r}")
                await asyncio.sleep(random.choice([0.05, 1.0, 4.0]) * random.random())

    async def _interruptible(
        self, call: Coroutine[Any, Any, None], client: str, of: Admin | Consumer, random: Random
    ) -> None:
        await may_be_interrupted(call, random, self._storm.accuse, self._storm.event, client, of.close)

    async def _commit(self, book: _Book, client: str, admin: Admin, random: Random) -> None:
        offsets = self._next_offsets(book, random)
        call = self._begin(book, client, offsets)
        try:
            await admin.alter_group_offsets(book.group, offsets)
        except PartitionErrors as error:
            self._acknowledge(book, call, but_for=error.errors)
        else:
            self._acknowledge(book, call)

    async def _look(self, book: _Book, client: str, admin: Admin, random: Random) -> None:
        await self._look_up(book, admin, None if random.random() < 0.5 else book.partitions)

    async def _look_up(
        self, book: _Book, admin: Admin, asked: list[TopicPartition] | None, *, is_punctual: bool = False
    ) -> None:
        began_s = self._storm.now_s
        found = await admin.list_group_offsets(book.group, asked)
        offsets = {p: None if (known := found.get(p)) is None else known.offset for p in book.partitions}
        book.ledger.look(offsets, began_s, self._storm.now_s, is_punctual=is_punctual)

    async def _delete_offsets(self, book: _Book, client: str, admin: Admin, random: Random) -> None:
        doomed = random.sample(book.partitions, random.randint(1, len(book.partitions)))
        call = self._begin(book, client, dict.fromkeys(doomed))
        try:
            await admin.delete_group_offsets(book.group, doomed)
        except PartitionErrors as error:
            self._acknowledge(book, call, but_for=error.errors)
        except BrokerError as error:
            if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                raise
            self._acknowledge(book, call)
        else:
            self._acknowledge(book, call)
            self._storm.event("offsets of a group deleted")

    async def _delete_group(self, book: _Book, client: str, admin: Admin, random: Random) -> None:
        call = self._begin(book, client, dict.fromkeys(book.partitions))
        try:
            await admin.delete_groups([book.group])
        except GroupErrors as failed:
            error = failed.errors[book.group]
            if not isinstance(error, BrokerError) or error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                raise error from failed
            self._acknowledge(book, call)
        else:
            self._acknowledge(book, call)
            self._storm.event("a group deleted")

    async def _rest(self, book: _Book, client: str, admin: Admin, random: Random) -> None:
        """Rest, mostly until the committed offsets are about to expire, and then look or commit."""
        seconds = random.uniform(0, 20)
        if self._storm.offsets_expire and random.random() < 0.7:
            seconds = book.set_s + _KEPT_S - self._storm.now_s + random.choice([-1, 0, 1, 6]) * random.random()
        await asyncio.sleep(max(0.0, seconds))
        await (self._look if random.random() < 0.5 else self._commit)(book, client, admin, random)

    async def _be_a_member(self, book: _Book, client: str, world: VirtualWorld) -> None:
        random = world.random
        topics = sorted({partition.topic for partition in book.partitions})
        topics = random.sample(topics, random.randint(1, len(topics)))
        until_s = self._storm.now_s + random.choice([1.0, 10.0, 70.0]) * random.random()
        self._may_be_used(book, until_s - self._storm.now_s)
        async with Consumer(
            self._cluster.bootstrap,
            topics=topics,
            group=book.group,
            enable_auto_commit=False,
            session_timeout_ms=_SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=_SESSION_TIMEOUT_MS / 5,
            default_api_timeout_ms=_API_TIMEOUT_MS,
            world=world,
        ) as consumer:
            while self._storm.now_s < until_s:
                await consumer.poll(timeout_ms=500)
                self._may_be_used(book, 0)
                mine = [partition for partition in consumer.assignment() if partition in book.partitions]
                if mine and random.random() < 0.5:
                    call = self._commit_as_member(book, client, consumer, mine)
                    await self._interruptible(call, client, consumer, random)
                await asyncio.sleep(random.random())
        self._may_be_used(book, 0)

    async def _commit_as_member(self, book: _Book, client: str, consumer: Consumer, mine: list[TopicPartition]) -> None:
        offsets = {partition: next(book.next_offset) for partition in mine}
        call = self._begin(book, client, offsets)
        try:
            await consumer.commit(offsets)
        except CommitFailed as error:
            self._acknowledge(book, call, but_for=error.errors)
        else:
            self._acknowledge(book, call)
            for topic in consumer.subscription():
                book.ledger.used_s[topic].append(call.began_s)

    def _next_offsets(self, book: _Book, random: Random) -> dict[TopicPartition, int]:
        some = random.sample(book.partitions, random.randint(1, len(book.partitions)))
        return {partition: next(book.next_offset) for partition in some}

    def _begin(self, book: _Book, client: str, offsets: Mapping[TopicPartition, int | None]) -> Call:
        return book.ledger.begin(client, offsets, self._storm.now_s)

    def _acknowledge(self, book: _Book, call: Call, *, but_for: Mapping[TopicPartition, object] | None = None) -> None:
        book.set_s = self._storm.now_s
        book.ledger.acknowledge(call, self._storm.now_s, but_for=but_for)

    def _may_be_used(self, book: _Book, seconds: float) -> None:
        """Record that the group may have a member for that long, and until a coordinator has expired its session."""
        book.ledger.may_be_used_until_s = self._storm.now_s + seconds + 2 * _SESSION_TIMEOUT_MS / 1_000

    # -- what the storm asks --

    def forgive(self) -> None:
        """Allow the loss of committed offsets."""
        self._is_forgiven = True

    async def finish(self) -> None:
        """After healing, end the bookkeepers and look up their offsets."""
        for process in self._processes.values():
            process.kill()
        world = self._cluster.client("book-auditor")
        await world.process.run(self._audit(world))
        world.process.kill()

    async def _audit(self, world: VirtualWorld) -> None:
        async with Admin(self._cluster.bootstrap, world=world) as admin:
            for book in self._books.values():
                of_group = TopicPartition(OFFSETS_TOPIC, internal_partition(book.group, self._offsets_partitions))
                book.ledger.coordinated_since_s = self._storm.led_since_s.get(of_group, 0.0)
                await self._look_up(book, admin, book.partitions, is_punctual=self._storm.offsets_expire)

    def judge(self) -> Iterator[Anomaly]:
        if not self._is_forgiven:
            for book in self._books.values():
                yield from check_ledger(book.ledger, self.retention)
