"""A consumer group at work: a producer that numbers its records, members that read and commit them, and an observer
that polls the committed offsets.

    work = await GroupWork.start(cluster, members=3)
    ...                       # the faults of the test
    await work.finish()       # all records were read in order, and no committed offset went back
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import CommitFailed
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition

TOPIC = "orders"
GROUP = "billing"
SETTINGS = {"offsets.topic.num.partitions": "4", "offsets.topic.replication.factor": "3"}
FAST: dict[str, Any] = {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 500}
_LOOK_S = 0.1


class Stays(RebalanceListener):
    """Counts a member's rebalances, and collects the partitions that it lost."""

    def __init__(self) -> None:
        self.rebalances = 0
        self.lost: list[TopicPartition] = []

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.rebalances += 1

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.lost += partitions


class Member:
    """A member of the group: a process with a consumer."""

    def __init__(self, work: GroupWork, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.stays = Stays()
        self.world: VirtualWorld = work.cluster.client(name)
        self.consumer = Consumer(
            work.cluster.bootstrap,
            group=GROUP,
            topics=[TOPIC],
            listener=self.stays,
            client_id=name,
            world=self.world,
            **(FAST | settings),
        )
        self.failed_commits = 0
        self.pause_s = 0.01
        """Seconds for which the member processes a record."""
        self.is_to_stop = False
        self._work = work
        self.task = self.world.process.start(self._run(), name)

    async def _run(self) -> None:
        async with self.consumer as consumer:
            while not self.is_to_stop:
                records = await consumer.poll(timeout_ms=200, max_records=5)
                for record in records:
                    partition = TopicPartition(record.topic, record.partition)
                    self._work.seen.setdefault(partition, []).append((self.name, record.offset))
                await asyncio.sleep(self.pause_s * len(records))
                if records:
                    try:
                        await consumer.commit()
                    except CommitFailed:
                        self.failed_commits += 1

    def assignment(self) -> list[TopicPartition]:
        return self.consumer.assignment() if self.consumer._state == "running" else []

    def coordinator(self) -> int | None:
        said = self.consumer.status().coordinator
        return None if said is None else int(said.split()[1])


class GroupWork:
    def __init__(self, cluster: VirtualCluster, partitions: int) -> None:
        self.cluster = cluster
        self.partitions = [TopicPartition(TOPIC, index) for index in range(partitions)]
        self.members: list[Member] = []
        self.seen: dict[TopicPartition, list[tuple[str, int]]] = {}
        self.committed: dict[TopicPartition, int] = {}
        self.written = 0
        self._is_over = False
        self._helper = cluster.client("helper")
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    async def start(
        members: int = 3, partitions: int = 6, settings: dict[str, str] | None = None, **consumer: Any
    ) -> GroupWork:
        """Start a cluster and the members; return once each partition has one member."""
        cluster = VirtualCluster(Simulation(), settings=SETTINGS | (settings or {}))
        await cluster.start()
        work = GroupWork(cluster, partitions)
        await work._helper.process.run(work._create(partitions))
        work._tasks = [
            work._helper.process.start(work._write(), "writer"),
            work._helper.process.start(work._look(), "observer"),
        ]
        for number in range(members):
            work.add(f"member-{number}", **consumer)
        await work.shared()
        return work

    async def _create(self, partitions: int) -> None:
        async with Admin(self.cluster.bootstrap, world=self._helper) as admin:
            await admin.create_topic(TOPIC, partitions=partitions, replication_factor=3)

    async def _write(self) -> None:
        async with Producer(self.cluster.bootstrap, world=self._helper, linger_ms=5) as producer:
            while not self._is_over:
                for partition in self.partitions:
                    await producer.send(TOPIC, str(self.written).encode(), partition=partition.partition)
                self.written += 1
                await asyncio.sleep(0.1)

    async def _look(self) -> None:
        while not self._is_over:
            consumer = Consumer(self.cluster.bootstrap, group=GROUP, partitions=self.partitions, world=self._helper)
            try:
                async with consumer:
                    while not self._is_over:
                        found = await consumer.committed(*self.partitions)
                        for partition, at in found.items():
                            offset = 0 if at is None else at.offset
                            before = self.committed.get(partition, 0)
                            assert offset >= before, f"{partition} went back from {before} to {offset}"
                            self.committed[partition] = offset
                        await asyncio.sleep(_LOOK_S)
            except MinibrokerError:
                await asyncio.sleep(_LOOK_S)

    def add(self, name: str, **settings: Any) -> Member:
        member = Member(self, name, settings)
        self.members.append(member)
        return member

    def coordinator(self) -> int:
        """Return the coordinator that a living member knows."""
        return next(node for member in self.living() if (node := member.coordinator()) is not None)

    async def written_more(self, rounds: int) -> None:
        """Wait until each partition has that many more records."""
        wanted = self.written + rounds
        await self.until(lambda: self.written >= wanted)

    def living(self) -> list[Member]:
        return [member for member in self.members if member.world.process.alive and not member.task.done()]

    def is_shared(self) -> bool:
        """Return whether the group is stable and each partition has one member."""
        assigned = [partition for member in self.living() for partition in member.assignment()]
        states = {member.consumer.status().member_state for member in self.living()}
        return sorted(assigned) == self.partitions and states == {"stable"}

    async def shared(self, within_s: float = 60) -> None:
        await self.until(self.is_shared, within_s)

    async def until(self, condition: Callable[[], object], within_s: float = 60) -> None:
        await self.cluster.until(condition, within_s)

    async def leave(self, member: Member) -> None:
        member.is_to_stop = True
        await asyncio.wait([member.task])
        member.task.result()

    async def finish(self) -> None:
        """Stop the writer and let the members read the rest. Raises AssertionError if a record is missing or out of
        order."""
        self._is_over = True
        for task in self._tasks:
            await task
        await self.shared()
        await self.until(lambda: all(self._has_read_all(partition) for partition in self.partitions))
        for member in self.living():
            await self.leave(member)
        for partition in self.partitions:
            firsts = list(dict.fromkeys(offset for _, offset in self.seen[partition]))
            assert firsts == list(range(self.written)), f"{partition}: read in another order, or not all"

    def _has_read_all(self, partition: TopicPartition) -> bool:
        return len({offset for _, offset in self.seen.get(partition, [])}) == self.written

    def duplicates(self) -> int:
        return sum(len(seen) - len({offset for _, offset in seen}) for seen in self.seen.values())
