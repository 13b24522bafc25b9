"""`minibroker consume --group`: a member of a group that commits the records it has printed.

The committed offsets never exceed the records written to standard output, however the command ends. The consumer itself
counts a record as done when the next one is requested, so this module commits instead: every few seconds, before
partitions move to another member, and at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import API_TIMEOUT_MS
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ApiTimedOut, CommitFailed, InvalidSetting, MaxPollIntervalExceeded
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.settings import IsolationLevel
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import plural

COMMIT_EVERY_S = 5.0
"""Kafka's default for auto.commit.interval.ms."""
_LAST_COMMIT_S = 5.0
"""Maximum time after Ctrl-C to commit the printed records; leaving the group may take as long."""
_IDLE_S = 0.2
"""Time within which the end is noticed."""


class _Printed(RebalanceListener):
    """The offsets after the printed records, in this member's partitions."""

    def __init__(self) -> None:
        self.consumer: Consumer | None = None
        self.has_joined = False
        self._offsets: dict[TopicPartition, int] = {}
        """The offsets that are not committed yet."""
        self._commit_at = 0.0

    def add(self, partition: TopicPartition, offset: int) -> None:
        if not self._offsets:
            self._commit_at = time.monotonic() + COMMIT_EVERY_S
        self._offsets[partition] = offset

    def due_in_s(self) -> float | None:
        """Return the seconds until the next commit. None: there is nothing to commit."""
        return max(0.0, self._commit_at - time.monotonic()) if self._offsets else None

    async def commit(self) -> None:
        """Commit. Raises CommitFailed; the next call retries the offsets of partitions that this member still owns."""
        if not self._offsets:
            return
        assert self.consumer is not None
        offsets, self._offsets = self._offsets, {}
        try:
            await self.consumer.commit(offsets)
        except CommitFailed as error:
            mine = set(self.consumer.assignment())
            failed = {partition: offsets[partition] for partition in error.errors if partition in mine}
            self._offsets = failed | self._offsets
            self._commit_at = time.monotonic() + COMMIT_EVERY_S
            raise

    async def commit_or_warn(self) -> None:
        """Commit and continue after a failure: another member may then print some records again."""
        try:
            await self.commit()
        except CommitFailed as error:
            sys.stderr.write(pastable(f"warning: {error}\n"))

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.has_joined = True

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self.commit_or_warn()
        self._forget(partitions)

    async def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self._forget(partitions)

    def _forget(self, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._offsets.pop(partition, None)


async def consume_group(
    bootstrap: str,
    topics: Sequence[str],
    group: str,
    reset: Literal["earliest", "latest"],
    level: IsolationLevel,
    count: int | None,
    exit_at_end: bool,
    write: Callable[[ConsumerBatch, int | None], int],
    told: Callable[[int], None],
) -> int:
    """Return the number of records written. `write` writes a batch, up to a limit; `told` receives the number if this
    is interrupted. The consumer joins any group, with the first assignor that all members support. Raises CommitFailed
    if the last records are not committed."""
    printed = _Printed()
    async with Consumer(
        bootstrap,
        topics=topics,
        group=group,
        listener=printed,
        partition_assignment_strategy=["cooperative-sticky", "sticky", "range", "roundrobin"],
        auto_offset_reset=reset,
        isolation_level=level,
        client_id="minibroker-cli",
        default_api_timeout_ms=API_TIMEOUT_MS,
        **security.chosen(),
    ) as consumer:
        printed.consumer = consumer
        batches = consumer.batches()
        ends: dict[TopicPartition, int] = {}
        consumed = 0
        try:
            while not (exit_at_end and printed.has_joined and await _is_at_end(consumer, ends)):
                if printed.due_in_s() == 0.0:
                    await printed.commit_or_warn()
                due_s = printed.due_in_s()
                patience_s = _IDLE_S if exit_at_end else due_s
                try:
                    async with asyncio.timeout(patience_s):
                        batch = await anext(batches)
                except TimeoutError:
                    continue
                except MaxPollIntervalExceeded as error:  # the reader of the output was slow; the consumer joins again
                    sys.stderr.write(pastable(f"warning: {error}\n"))
                    continue
                written = write(batch, None if count is None else count - consumed)
                consumed += written
                end = batch.next_offset if written == len(batch) else batch.offsets[written]
                printed.add(TopicPartition(batch.topic, batch.partition), end)
                if consumed == count:
                    break
        except asyncio.CancelledError:
            told(consumed)
            await _end_soon(consumer, printed, consumed)
            raise
        await printed.commit()
    return consumed


async def _end_soon(consumer: Consumer, printed: _Printed, consumed: int) -> None:
    """Raises CommitFailed, ApiTimedOut."""
    try:
        async with asyncio.timeout(_LAST_COMMIT_S):
            await printed.commit()
    except TimeoutError:
        raise ApiTimedOut(
            f"interrupted after {consumed} {plural(consumed, 'record')}; the last ones are not committed and "
            f"will be read again, because the group's coordinator did not answer within {_LAST_COMMIT_S:g} s"
        ) from None
    finally:
        await consumer.close(timeout_ms=_LAST_COMMIT_S * 1_000)


async def _is_at_end(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    """`ends` are the ends at the time of each partition's assignment; they are looked up here."""
    assigned = consumer.assignment()
    new = [partition for partition in assigned if partition not in ends]
    if new:
        ends |= await consumer.end_offsets(new)
    try:
        for partition in assigned:
            if await consumer.position(partition) < ends[partition]:
                return False
    except InvalidSetting:  # it has moved to another member
        return False
    return True
