"""Keeps the ISRs of the partitions led here correct: looks after them, writes changes to ZooKeeper and announces them
(Kafka's ZkIsrManager).

An ISR change is one conditional write of the partition's state znode, in a `multi` that also checks its topic's id:
versions alone do not tell a topic from the next one of its name. Its outcome can be unknown (the connection
broke): then the znode is read until it is known, and meanwhile the partition counts both ISRs (see `isr`). The
controller learns of changes by a sequential node under `/isr_change_notification`, several changes to a node.

Which replicas should be in an ISR is decided by `Partition`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from minibroker.broker.metrics.log_lines import Gathered, named
from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.supervisor import Supervisor
from minibroker.protocol import znodes
from minibroker.protocol.model import LeaderAndIsr, TopicPartition
from minibroker.protocol.words import all_of
from minibroker.protocol.world import (
    BadVersion,
    Check,
    ConnectionLoss,
    MultiFailed,
    NoNode,
    Operation,
    SessionExpired,
    SetData,
    Stat,
    ZooKeeperError,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.replication")

ZOOKEEPER_RETRY_S = 0.1
ZOOKEEPER_TROUBLE_S = 1.0
"""Before the next attempt, where ZooKeeper refused something or a znode is malformed."""
ISR_NOTIFICATION_DELAY_S = 0.05
ISR_CHANGES_PER_NODE = 1_000
"""Even with the longest topic names well below what a znode may hold."""

PARTITIONS_PER_SLICE = 200
BREATH_S = 0.001


class IsrWriter:
    """At most one change of each partition is under way."""

    def __init__(
        self,
        partitions: Mapping[TopicPartition, Partition],
        supervisor: Supervisor,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        lag_time_max_ms: int,
        on_high_watermark: Callable[[Partition], None],
        on_change: Callable[[Partition], None],
    ) -> None:
        """`partitions` is read anew each time. `on_high_watermark`: a change, or time, has moved the partition's;
        `on_change`: the outcome of a change is known."""
        self._partitions = partitions
        self._supervisor = supervisor
        self._sessions = sessions
        self._lag_time_max_ms = lag_time_max_ms
        self._on_high_watermark = on_high_watermark
        self._on_change = on_change
        self._changed: dict[TopicPartition, None] = {}
        self._has_changed = asyncio.Event()
        self._proposed: Gathered[tuple[TopicPartition, frozenset[int], frozenset[int]]] = Gathered(_log_proposals)
        self.shrinks = 0
        self.expands = 0

    def start(self) -> None:
        self._supervisor.start(self._check(), "ISR expiration")
        self._supervisor.start(self._announce_changes(), "ISR change notification")

    def close(self) -> None:
        self._proposed.close()

    def reconsider(self) -> None:
        """Other brokers have come or gone: followers that waited to be known as alive may join now, and those that were
        about to join and are gone are not waited for."""
        for partition in self._partitions.values():
            if partition.is_leader and len(partition.isr) < len(partition.assignment):
                partition.disregard_the_gone()
                if partition.advance_high_watermark():
                    self._on_high_watermark(partition)
                self.propose(partition)

    async def _check(self) -> None:
        """Twice per allowed lag, as Kafka: a follower leaves after 1 to 1.5 times `replica.lag.time.max.ms`."""
        while True:
            await asyncio.sleep(self._lag_time_max_ms / 2_000)
            for number, partition in enumerate(list(self._partitions.values()), 1):
                self._warn_where_the_disk_hangs(partition)
                self.propose(partition)
                # It may have waited for a follower outside of the ISR that is given up only by the passing of time.
                if partition.advance_high_watermark():
                    self._on_high_watermark(partition)
                if number % PARTITIONS_PER_SLICE == 0:
                    await asyncio.sleep(BREATH_S)

    def _warn_where_the_disk_hangs(self, partition: Partition) -> None:
        """A follower whose disk hangs leaves the ISR of a synced topic. A leader cannot, and is not replaced."""
        seconds = partition.log.flushing_for_s
        if seconds * 1_000 > self._lag_time_max_ms:
            logger.warning(
                "%s: the disk has been flushing it for %.0f s; with durability=synced, nothing is acknowledged by this "
                "replica meanwhile. Where this broker leads, kill it if that goes on: then another replica leads",
                partition.topic_partition,
                seconds,
            )

    def propose(self, partition: Partition) -> None:
        """If this broker leads the partition, and its ISR is not right as it is."""
        isr = partition.isr_to_propose()
        if isr is None:
            return
        logger.debug("%s: proposing ISR %s for %s", partition.topic_partition, list(isr), list(partition.isr))
        if isr != partition.isr or partition.eligible:
            before, after = frozenset(partition.isr), frozenset(isr)
            self._proposed.add((partition.topic_partition, after - before, before - after))
        if len(isr) < len(partition.isr):
            self.shrinks += 1
        elif len(isr) > len(partition.isr):
            self.expands += 1
        proposal = partition.propose_isr(isr)
        self._supervisor.start(self._write(partition, proposal), f"ISR of {partition.topic_partition}")

    async def _write(self, partition: Partition, proposal: LeaderAndIsr) -> None:
        """Until it is known whether the proposal holds, or another state does, or it does not matter any more.

        It does not matter either where another topic has taken the name, whose state may have the same version. A look
        before the call is not enough, since the call may wait for a connection: so the write, and what is read, count
        only for this very topic.
        """
        path = znodes.state_path(partition.topic_partition)
        outcome_unknown = False
        while True:
            try:
                session = await self._sessions()
                here = self._partitions.get(partition.topic_partition) is partition
                if not (here and partition.is_pending(proposal)):
                    return
                if outcome_unknown:
                    await catch_up(session)  # a state from before this leadership would be taken for its successor's
                    data, stat = await session.get(path)
                    actual = znodes.decode_state(partition.topic_partition, data, stat.version)
                    if await _is_gone(session, partition):  # asked last: then the state was still this topic's
                        return
                    if actual == msgspec.structs.replace(proposal, partition_epoch=proposal.partition_epoch + 1):
                        moved = partition.isr_written(proposal, actual.partition_epoch)
                        break
                    if actual.partition_epoch != proposal.partition_epoch:
                        moved = partition.isr_conflict(proposal, actual)
                        break
                    outcome_unknown = False
                *_, written = await session.multi(_isr_write(partition, proposal))
                assert isinstance(written, Stat)
                moved = partition.isr_written(proposal, written.version)
                break
            except NoNode:
                return
            except (ConnectionLoss, SessionExpired):
                outcome_unknown = True
                await asyncio.sleep(ZOOKEEPER_RETRY_S)
            except MultiFailed as refused:
                # Treat a rejected write as one of unknown outcome: another writer may have been first, the topic may be
                # gone, or the node of its id may not exist yet.
                outcome_unknown = True
                if not isinstance(refused.cause, BadVersion):
                    await asyncio.sleep(ZOOKEEPER_TROUBLE_S)
            except (ZooKeeperError, MalformedZnode) as error:
                outcome_unknown = True
                logger.error("%s: its ISR cannot be changed: %s", partition.topic_partition, error)
                await asyncio.sleep(ZOOKEEPER_TROUBLE_S)
        if moved:
            self._on_high_watermark(partition)
        self._on_change(partition)
        self._changed[partition.topic_partition] = None
        self._has_changed.set()
        self.propose(partition)

    async def _announce_changes(self) -> None:
        while True:
            await self._has_changed.wait()
            await asyncio.sleep(ISR_NOTIFICATION_DELAY_S)
            self._has_changed.clear()
            changed = list(self._changed)
            self._changed.clear()
            for start in range(0, len(changed), ISR_CHANGES_PER_NODE):
                await self._announce(changed[start : start + ISR_CHANGES_PER_NODE])

    async def _announce(self, changed: list[TopicPartition]) -> None:
        while True:
            try:
                session = await self._sessions()
                await session.create(znodes.ISR_CHANGE_PREFIX, znodes.encode_isr_change(changed), sequence=True)
                return
            except (ConnectionLoss, SessionExpired):
                # Announced twice at worst: the controller reads the znodes, not the announcement.
                await asyncio.sleep(ZOOKEEPER_RETRY_S)


def _log_proposals(proposed: list[tuple[TopicPartition, frozenset[int], frozenset[int]]]) -> None:
    """A line for each change that partitions have in common."""
    alike: dict[tuple[frozenset[int], frozenset[int]], set[TopicPartition]] = {}
    for topic_partition, joining, leaving in proposed:
        alike.setdefault((joining, leaving), set()).add(topic_partition)
    for (joining, leaving), partitions in alike.items():
        changes = [
            f"{all_of('broker', sorted(ids))} {verb if len(ids) > 1 else verb + 's'} the ISR"
            for ids, verb in ((joining, "join"), (leaving, "leave"))
            if ids
        ]
        what = " and ".join(changes) or "which replicas are eligible beside the ISR changes"
        logger.info("%s: %s", named(partitions), what)


def _isr_write(partition: Partition, proposal: LeaderAndIsr) -> list[Operation]:
    """Refused unless the state is the one that was decided on, and is this topic's. The id of a topic that has none is
    not checked."""
    topic_partition, topic_id = partition.topic_partition, partition.log.topic_id
    write = SetData(znodes.state_path(topic_partition), znodes.encode_state(proposal), proposal.partition_epoch)
    return [Check(znodes.topic_id_path(topic_partition.topic, topic_id), -1), write] if topic_id else [write]


async def _is_gone(session: ZooKeeperSession, partition: Partition) -> bool:
    """Whether this replica's topic is gone: another of its name may be there, but ids never come back."""
    topic, topic_id = partition.topic_partition.topic, partition.log.topic_id
    if not topic_id:
        return False
    data, _ = await session.get(znodes.topic_path(topic))
    return znodes.decode_topic(topic, data).topic_id != topic_id
