"""Automatic commits (`enable_auto_commit`): the records that the user has finished with, every
`auto_commit_interval_ms`.

Records in the user's hands are not committed: if the user fails over them, they are returned again. So a commit waits
until the next records are asked for. Rejected: committing by the clock alone, as aiokafka does, which loses the record
that a crash interrupts.

A position is committed once. In a group without members (partitions assigned by hand) offsets expire unless they are
committed again within `offsets.retention.minutes`, which clients do not know. So such a consumer commits the group's
offsets every REPEAT_S if its positions have not changed. The user or an administrator may have changed the offsets
since, so they are read first, and committed as they are. Rejected: committing the position again, as Kafka's client
does at every interval, which undoes those changes. An offset that an administrator sets between the read and the
commit, one round trip, is still overwritten.
"""

from __future__ import annotations

import asyncio

from minibroker.client.errors import CommitFailed
from minibroker.client.fetching.fetch_state import TopicPartitionState
from minibroker.client.fetching.in_hand import InHand
from minibroker.client.fetching.partitions import FetchedPartitions
from minibroker.client.group.commits import Commits, OffsetAndMetadata
from minibroker.client.log import Logger
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.world import Clock

logger = Logger("minibroker.client")

PATIENCE_S = 30.0

REPEAT_S = 20.0
"""Unchanged offsets are committed this often: a third of the least `offsets.retention.minutes`, 1."""


def positions(partitions: FetchedPartitions) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets that `commit` without arguments commits: the known positions of all partitions."""
    return {p: position for p, state in partitions.states.items() if (position := _position(state)) is not None}


def _position(state: TopicPartitionState) -> OffsetAndMetadata | None:
    if state.position is None or state.is_gone:
        return None
    epoch = state.position_epoch
    return OffsetAndMetadata(state.position, None if epoch == NO_EPOCH else epoch)


_Noted = tuple[TopicPartitionState | None, str, OffsetAndMetadata]
"""The present ownership of the partition, the id of its topic, and an offset."""


def _covers(last: _Noted | None, noted: _Noted) -> bool:
    """Whether the last commit includes the other one."""
    return last is not None and last[:2] == noted[:2] and last[2].offset >= noted[2].offset


class AutoCommit:
    """See the module."""

    def __init__(
        self,
        partitions: FetchedPartitions,
        commits: Commits,
        in_hand: InHand,
        clock: Clock,
        who: str,
        interval_s: float,
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._commits = commits
        self._in_hand = in_hand
        self._who = who
        self._interval_s = interval_s
        self._last: dict[TopicPartition, _Noted] = {}
        """The positions that need no commit: they are committed, or a later offset is."""
        self._repeated_at = clock.monotonic()
        commits.on_committed = self._committed

    async def run(self) -> None:
        """The task."""
        while True:
            await asyncio.sleep(self._interval_s)
            while self._in_hand.holds:
                await self._in_hand.freed.wait()
            await self.commit(PATIENCE_S)
            if self._commits.is_by_hand and self._clock.monotonic() >= self._repeated_at + REPEAT_S:
                await self._repeat()

    def news(self) -> list[TopicPartition]:
        """The partitions whose positions are not committed."""
        return [partition for partition, noted in self._noted().items() if self._last.get(partition) != noted]

    def _noted(self) -> dict[TopicPartition, _Noted]:
        return {
            partition: (self._partitions.states.get(partition), self._partitions.topic_id(partition), offset)
            for partition, offset in positions(self._partitions).items()
        }

    def _committed(self, partition: TopicPartition, topic_id: str, offset: int) -> None:
        """Record each commit of this consumer, including the user's: committing a position that is not beyond it would
        set the group back."""
        state, of_position = self._partitions.states.get(partition), self._partitions.topic_id(partition)
        position = None if state is None else _position(state)
        if position is not None and offset >= position.offset and topic_id in ("", of_position):
            self._last[partition] = (state, of_position, position)

    async def commit(self, patience_s: float) -> None:
        """Commit the positions that have changed. A failure is logged as a WARNING; the next commit tries the same or
        later offsets."""
        noted = self._noted()
        self._last = {partition: last for partition, last in self._last.items() if partition in noted}
        news = {partition: one for partition, one in noted.items() if self._last.get(partition) != one}
        if not news:
            return
        offsets = {partition: offset for partition, (*_, offset) in news.items()}
        failed: dict[TopicPartition, MinibrokerError] = {}
        try:
            await self._commits.commit(self._commits.ticket(offsets, self._partitions.topic_id), patience_s)
        except CommitFailed as error:
            failed = error.errors
        self._last |= {partition: one for partition, one in news.items() if partition not in failed}
        # A commit before a revocation may have waited for one by the clock that has committed the same offsets.
        self._warn({p: why for p, why in failed.items() if not _covers(self._last.get(p), news[p])})

    async def _repeat(self) -> None:
        """Commit the group's offsets again, so that they do not expire, or the position if it has none."""
        began = self._clock.monotonic()
        try:
            await self._commits.repeat(positions(self._partitions), self._partitions.topic_id, PATIENCE_S)
        except CommitFailed as error:
            self._warn(error.errors)
        else:
            self._repeated_at = began

    def _warn(self, failed: dict[TopicPartition, MinibrokerError]) -> None:
        if failed:
            logger.warning("%s: auto-commit: %s", self._who, CommitFailed(self._commits.group, failed))
