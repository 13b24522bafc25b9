"""A topic from which some storms delete records, by size, by age, and on request.

The strict workload writes and reads the topic, and it is judged as the other topics, except for deleted records. A
missing record must have been deleted, and each deletion must be legal. It is checked at the moment of the leader's
decision, batch by batch, and without the product's own arithmetic:

- It never passes the high watermark.
- It leaves at least `retention.bytes`, unless every deleted record was older than `retention.ms`.
- No replica of any topic has a log start above those that its leaders have decided (`Invariants`).
- A record whose deletion was acknowledged is in no log that may become the leader's.

Administrators change the retention meanwhile. Each value counts that ZooKeeper has had since the leader looked it up,
whether the leader knew of it or not.

The storm replaces a function of the product to see each decision: before the next look from outside, the leader may
truncate its log or die.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.replica_settings import ReplicaSettings
from minibroker.broker.replication.upkeep import log_retention
from minibroker.client.admin import Admin
from minibroker.client.errors import ClientCrashed
from minibroker.deploy.simulator.cluster import host_name
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol import znodes
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import CorruptRecord, iterate_batches
from tests.simulation.mutants.planting import Patches
from tests.simulation.storms.ambush import Ambushes
from tests.simulation.storms.clients.workload import DURABLE, SHRINKING
from tests.simulation.storms.ground import Ground
from tests.simulation.storms.verdicts.history import Anomaly, TopicIdPartition

assert SHRINKING.startswith(DURABLE)

RETENTION = {
    "retention.bytes": ["1000", "5000", "20000", "-1"],
    "retention.ms": ["1000", "5000", "30000", "-1"],
}
"""Values that administrators set."""

_PROBABILITY = 0.6
_READ_BYTES = 1024 * 1024


class Batch(NamedTuple):
    base_offset: int
    next_offset: int
    size: int
    max_timestamp: int


class Rule(NamedTuple):
    """A retention, and the time since which ZooKeeper has had it. None means no limit."""

    since_s: float
    retention_ms: int | None
    retention_bytes: int | None


class Move(NamedTuple):
    """A leader's decision to raise a log start."""

    partition: TopicPartition
    leader: int
    start: int


class Shrinking:
    def __init__(self, storm: Ground, random: Random) -> None:
        self._storm = storm
        self.partitions = (
            [TopicPartition(SHRINKING, p) for p in range(random.randint(1, 2))]
            if random.random() < _PROBABILITY
            else []
        )
        by_size, by_age = random.choice([(True, False), (False, True), (True, True)])
        self.configs = {
            "segment.bytes": str(random.choice([500, 2_000, 10_000])),
            "segment.ms": str(random.choice([300, 5_000, 60_000])),
            "segment.jitter.ms": str(random.choice([0, 200])),
            "retention.bytes": str(random.choice([1_000, 5_000, 20_000]) if by_size else -1),
            "retention.ms": str(random.choice([1_000, 5_000, 30_000]) if by_age else -1),
        }
        self._rules = [_rule(-math.inf, self.configs)]
        self._asked_s: dict[Partition, float] = {}
        """When the leader began to look up the retention."""
        self._is_over = False
        self._administrator: Process | None = None
        self.decided: Counter[TopicIdPartition] = Counter()
        """The highest log start that a leader has decided."""
        self.promised: Counter[TopicIdPartition] = Counter()
        """The offset below which deletion was acknowledged: no replica that may become leader has such a record."""
        self.moves: Ambushes[Move] = Ambushes()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Observe each decision of a leader."""
        patches = Patches()

        @patches.instead_of(ReplicaSettings, "with_present_settings")
        async def with_present_settings(original: Any, replicas: ReplicaSettings, partitions: Any) -> Any:
            self._asked_s |= dict.fromkeys(partitions, self._storm.now_s)
            return await original(replicas, partitions)

        @patches.instead_of(log_retention, "expire")
        def expire(original: Any, partition: Partition, now_ms: int, limit: int) -> None:
            if self._is_over:
                return
            before = partition.log.log_start_offset
            batches = self._batches(partition) if partition.topic_partition.topic == SHRINKING else None
            original(partition, now_ms, limit)
            if partition.log.log_start_offset != before:
                self._moved(partition, batches, now_ms)

        @patches.instead_of(Partition, "delete_records")
        def delete_records(original: Any, partition: Partition, offset: int) -> int:
            before = partition.log.log_start_offset
            try:
                return int(original(partition, offset))
            finally:
                if partition.log.log_start_offset != before:
                    self._begins_later(partition)

        try:
            yield
        finally:
            patches.undo()

    def settings_written(self, data: bytes) -> None:
        """Follow a write of the topic's settings to ZooKeeper."""
        values = znodes.decode_config(znodes.topic_config_path(SHRINKING), data)
        self._rules.append(_rule(self._storm.now_s, values))

    def start_administrator(self, world: VirtualWorld, ends: Mapping[TopicPartition, int]) -> None:
        """Start an administrator that deletes acknowledged records now and then. It reads `ends` each time."""
        self._administrator = world.process
        world.process.start(self._delete_now_and_then(world, ends), "deleter")

    def forgive(self, exposed: Collection[TopicPartition]) -> None:
        """Allow these logs to lose their ends, so that new records may get offsets that were deleted before."""
        for identified in [each for each in self.promised if each.topic_partition in exposed]:
            del self.promised[identified]

    def end(self) -> None:
        """Stop deleting."""
        self._is_over = True
        if self._administrator is not None:
            self._administrator.kill()

    async def _delete_now_and_then(self, world: VirtualWorld, ends: Mapping[TopicPartition, int]) -> None:
        random = world.random
        while True:
            await asyncio.sleep(random.expovariate(1 / 8))
            partition = random.choice(self.partitions)
            offset = random.choice([-1, random.randint(0, ends[partition])])
            try:
                async with Admin(self._storm.cluster.bootstrap, default_api_timeout_ms=15_000, world=world) as admin:
                    told = await admin.delete_records({partition: offset})
            except ClientCrashed as error:
                self._storm.accuse(Anomaly("a client crashed", f"deleter: {error!r} {error.__cause__!r}"))
            except MinibrokerError:
                self._storm.event("records deleted: without success, or in doubt")
            else:
                self._storm.event("records deleted")
                self._was_told(partition, offset, told[partition])

    def _was_told(self, partition: TopicPartition, offset: int, low_watermark: int) -> None:
        identified = TopicIdPartition(self._storm.topic(SHRINKING).topic_id, partition)
        self.promised[identified] = max(self.promised[identified], low_watermark)
        if low_watermark < offset:
            self._storm.accuse(Anomaly("not deleted", f"{partition} up to {offset}: it begins at {low_watermark}"))

    def _batches(self, partition: Partition) -> list[Batch] | None:
        """Return the batches of a log, or None after a disk error."""
        log = partition.log
        batches: list[Batch] = []
        offset = log.log_start_offset
        with self._storm.cluster.simulation.host(host_name(partition.leader_id)).disk.faults.set_aside():
            try:
                while records := log.read(offset, _READ_BYTES, log.log_end_offset):
                    for header, start, end in iterate_batches(records):
                        batches.append(Batch(header.base_offset, header.next_offset, end - start, header.max_timestamp))
                    offset = batches[-1].next_offset
            except (BrokerError, CorruptRecord):
                return None
        return batches

    def _begins_later(self, partition: Partition) -> None:
        start = partition.log.log_start_offset
        identified = TopicIdPartition(partition.log.topic_id, partition.topic_partition)
        self.decided[identified] = max(self.decided[identified], start)
        self._storm.history.deleted[partition.topic_partition] = max(
            self._storm.history.deleted[partition.topic_partition], start
        )
        self._storm.event("a log begins later")
        if not partition.is_leader:
            self._storm.accuse(Anomaly("deleted by a follower", f"{identified}: it begins at {start}"))
        if start > partition.high_watermark:
            self._storm.accuse(
                Anomaly(
                    "deleted above the high watermark",
                    f"{partition.topic_partition} begins at {start}, its high watermark is {partition.high_watermark}",
                )
            )
        self.moves.strike(Move(partition.topic_partition, partition.leader_id, start))

    def _moved(self, partition: Partition, batches: list[Batch] | None, now_ms: int) -> None:
        self._begins_later(partition)
        start = partition.log.log_start_offset
        asked_s = self._asked_s.get(partition, self._storm.now_s)
        rules = in_force(self._rules, asked_s)
        problems = [illegal(batches or (), start, now_ms, rule.retention_ms, rule.retention_bytes) for rule in rules]
        if None not in problems:
            self._storm.accuse(Anomaly("deleted too early", f"{partition.topic_partition}, {rules}: {problems[-1]}"))


def in_force(rules: Sequence[Rule], since_s: float) -> list[Rule]:
    """Return the rules that applied at some time since `since_s`. The rules are in order of time."""
    ends_s = [*(rule.since_s for rule in rules[1:]), math.inf]
    return [rule for rule, end_s in zip(rules, ends_s, strict=True) if end_s >= since_s]


def _rule(since_s: float, values: Mapping[str, str]) -> Rule:
    retention_ms, retention_bytes = (int(values[name]) for name in ("retention.ms", "retention.bytes"))
    return Rule(
        since_s, None if retention_ms == -1 else retention_ms, None if retention_bytes == -1 else retention_bytes
    )


def illegal(
    batches: Sequence[Batch], start: int, now_ms: int, retention_ms: int | None, retention_bytes: int | None
) -> str | None:
    """Return the reason for which the log must not begin at `start`, or None."""
    left = sum(batch.size for batch in batches)
    for batch in batches:
        if batch.base_offset >= start:
            return None
        left -= batch.size
        is_excess = retention_bytes is not None and left >= retention_bytes
        is_old = retention_ms is not None and 0 <= batch.max_timestamp < now_ms - retention_ms
        if not (is_excess or is_old):
            return (
                f"it begins at {start} now, so offset {batch.base_offset} is gone, {now_ms - batch.max_timestamp} ms "
                f"old, after which there were {left} bytes"
            )
    return None
