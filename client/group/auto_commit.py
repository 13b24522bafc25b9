"""Commits by themselves (`enable_auto_commit`): what the user is done with, every `auto_commit_interval_ms`.

What is in the user's hands is not committed: if it fails over that, the record comes again. So a commit waits until the
next records are asked for. Rejected: to commit by the clock alone, as aiokafka does, which loses the record that a
crash interrupts.

A position is committed once. In a group without members (partitions assigned by hand) the offsets expire unless they
are committed again within `offsets.retention.minutes`, which clients do not know. So such a consumer commits every
REPEAT_S what the group has, if its positions have not changed. The user or an administrator may have set that since, so
it is read first, and stays as it is. Rejected: to commit the position again, as Kafka's client does at every interval,
which undoes those commits. An offset that an administrator sets between the read and the commit, one round trip, is
still overwritten.
"""

from __future__ import annotations

import asyncio

from minibroker.client.errors import CommitFailed
from minibroker.client.fetching.fetch_state import PartitionState
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
    """What `commit` without offsets commits: where the consumer is, in all partitions in which that is known."""
    return {p: position for p, state in partitions.states.items() if (position := _position(state)) is not None}


def _position(state: PartitionState) -> OffsetAndMetadata | None:
    if state.position is None or state.is_gone:
        return None
    epoch = state.position_epoch
    return OffsetAndMetadata(state.position, None if epoch == NO_EPOCH else epoch)


_Noted = tuple[PartitionState | None, str, OffsetAndMetadata]
"""An offset, in the topic of which id, and during which hold on the partition."""


def _covers(last: _Noted | None, noted: _Noted) -> bool:
    """Whether what was committed last is as good as the other."""
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
        """The positions that need not be committed: a commit of theirs has succeeded, or one that is beyond them."""
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
        """Note any commit of this consumer, the user's too: a position that has not gone beyond it since would set the
        group back."""
        state, of_position = self._partitions.states.get(partition), self._partitions.topic_id(partition)
        position = None if state is None else _position(state)
        if position is not None and offset >= position.offset and topic_id in ("", of_position):
            self._last[partition] = (state, of_position, position)

    async def commit(self, patience_s: float) -> None:
        """Commit the positions that are news. A failure is a WARNING: the same offsets, or later ones, are tried again
        next time."""
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
        # What is committed when partitions are given up may be behind one by the clock, and done by then.
        self._warn({p: why for p, why in failed.items() if not _covers(self._last.get(p), news[p])})

    async def _repeat(self) -> None:
        """Commit what the group has, so that it does not expire; the position where it has nothing."""
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
