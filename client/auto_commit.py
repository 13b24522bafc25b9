"""Commits by themselves (`enable_auto_commit`): what the user is done with, every `auto_commit_interval_ms`.

What is in the user's hands is not committed: if it fails over that, the record comes again. So a commit waits until the
next records are asked for. Rejected: to commit by the clock alone, as aiokafka does, which loses the record that a
crash interrupts.

A position that stays the same is committed every REPEAT_S (Kafka's client commits it at every interval): offsets that
nobody commits expire, in a group without members, after `offsets.retention.minutes`, which clients do not know.
"""

from __future__ import annotations

import asyncio

from minibroker.client.activity import Activity
from minibroker.client.commits import Commits, OffsetAndMetadata
from minibroker.client.errors import CommitFailed
from minibroker.client.fetch_state import PartitionState
from minibroker.client.fetcher import Fetcher
from minibroker.client.log import Logger
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.world import Clock

logger = Logger("minibroker.client")

PATIENCE_S = 30.0

REPEAT_S = 20.0
"""A position that stays the same is committed this often: a third of the least `offsets.retention.minutes`, 1."""


def positions(fetcher: Fetcher) -> dict[TopicPartition, OffsetAndMetadata]:
    """What `commit` without offsets commits: where the consumer is, in all partitions in which that is known."""
    found = {}
    for partition, state in fetcher.states.items():
        if state.position is not None and not state.is_gone:
            epoch = state.position_epoch
            found[partition] = OffsetAndMetadata(state.position, None if epoch == NO_EPOCH else epoch)
    return found


_Noted = tuple[PartitionState | None, str, OffsetAndMetadata]
"""An offset, in the topic of which id, and during which hold on the partition."""


def _covers(last: _Noted | None, noted: _Noted) -> bool:
    """Whether what was committed last is as good as the other."""
    return last is not None and last[:2] == noted[:2] and last[2].offset >= noted[2].offset


class AutoCommit:
    """See the module."""

    def __init__(
        self, fetcher: Fetcher, commits: Commits, activity: Activity, clock: Clock, who: str, interval_s: float
    ) -> None:
        self._clock = clock
        self._fetcher = fetcher
        self._commits = commits
        self._activity = activity
        self._who = who
        self._interval_s = interval_s
        self._last: dict[TopicPartition, _Noted] = {}
        """What was committed last, and in the topic of which id."""
        self._all_committed_at = clock.monotonic()

    async def run(self) -> None:
        """The task."""
        while True:
            await asyncio.sleep(self._interval_s)
            while self._activity.holds:
                await self._activity.freed.wait()
            is_due = self._clock.monotonic() >= self._all_committed_at + REPEAT_S
            await self.commit(PATIENCE_S, everything=is_due)

    def news(self) -> list[TopicPartition]:
        """The partitions whose positions are not committed."""
        return [partition for partition, noted in self._noted().items() if self._last.get(partition) != noted]

    def _noted(self) -> dict[TopicPartition, _Noted]:
        return {
            partition: (self._fetcher.states.get(partition), self._fetcher.topic_id(partition), offset)
            for partition, offset in positions(self._fetcher).items()
        }

    async def commit(self, patience_s: float, *, everything: bool = False) -> None:
        """Now what is news, or everything. A failure is a WARNING: the same offsets, or later ones, are tried again
        next time."""
        noted = self._noted()
        offsets = {
            partition: offset
            for partition, (*_, offset) in noted.items()
            if everything or self._last.get(partition) != noted[partition]
        }
        if not offsets:
            return
        began = self._clock.monotonic()
        try:
            await self._commits.commit(self._commits.ticket(offsets, self._fetcher.topic_id), patience_s)
        except CommitFailed as error:
            # What is committed when partitions are given up may be behind one by the clock, and done by then.
            failed = {p: why for p, why in error.errors.items() if not _covers(self._last.get(p), noted[p])}
            if failed:
                logger.warning("%s: auto-commit: %s", self._who, CommitFailed(error.group, failed))
        else:
            self._last = noted
            if len(offsets) == len(noted):
                self._all_committed_at = began
