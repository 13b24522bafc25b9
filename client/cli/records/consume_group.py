"""`minibroker consume --group`: as a member of a group, which commits what was printed.

Committed is what was written to standard output and nothing more, whatever ends the command: so offsets are committed
here, and not by the consumer, for which a record is done when the next one is asked for. It commits every few seconds,
before partitions go to another member, and at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import API_TIMEOUT_MS
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ApiTimedOut, CommitFailed, InvalidSetting, MaxPollIntervalExceeded
from minibroker.client.fetching.records import ConsumerBatch
from minibroker.client.group.listener import RebalanceListener
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import plural

COMMIT_EVERY_S = 5.0
"""As auto.commit.interval.ms of Kafka's consumers."""
_LAST_COMMIT_S = 5.0
"""After Ctrl-C what was printed is committed, if that takes no longer; as long may it take to leave the group."""
_IDLE_S = 0.2
"""How soon the end is noticed."""


class _Printed(RebalanceListener):
    """Where the group is to go on, in the partitions of this member."""

    def __init__(self) -> None:
        self.consumer: Consumer | None = None
        self.has_joined = False
        self._offsets: dict[TopicPartition, int] = {}
        """What is not committed yet."""
        self._commit_at = 0.0

    def add(self, partition: TopicPartition, offset: int) -> None:
        if not self._offsets:
            self._commit_at = time.monotonic() + COMMIT_EVERY_S
        self._offsets[partition] = offset

    def due_in_s(self) -> float | None:
        """Until the next commit; None: there is nothing to commit."""
        return max(0.0, self._commit_at - time.monotonic()) if self._offsets else None

    async def commit(self) -> None:
        """Raises CommitFailed; what is not committed then, and still this member's, the next call tries again."""
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
        """Where it fails, other members may print some records again, and this one goes on."""
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
    count: int | None,
    exit_at_end: bool,
    write: Callable[[ConsumerBatch, int | None], int],
    told: Callable[[int], None],
) -> int:
    """How many records were written, by `write`, which is told how many at most; `told` hears of it where this is
    interrupted. It joins whatever group it is: by the first strategy that all of its members know. Raises CommitFailed
    where the last ones are not committed."""
    printed = _Printed()
    async with Consumer(
        bootstrap,
        topics=topics,
        group=group,
        listener=printed,
        partition_assignment_strategy=["cooperative-sticky", "sticky", "range", "roundrobin"],
        auto_offset_reset=reset,
        client_id="minibroker-cli",
        default_api_timeout_ms=API_TIMEOUT_MS,
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
                except MaxPollIntervalExceeded as error:  # the reader of the output was slow; it joins again
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
            f"interrupted after {consumed} {plural(consumed, 'record')}, the last of which are not committed: the "
            f"group's coordinator did not answer within {_LAST_COMMIT_S:g} s, so the group will read them again"
        ) from None
    finally:
        await consumer.close(timeout_ms=_LAST_COMMIT_S * 1_000)


async def _is_at_end(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    """`ends` are those of the moment when each partition was assigned, which are looked up here."""
    assigned = consumer.assignment()
    new = [partition for partition in assigned if partition not in ends]
    if new:
        ends |= await consumer.end_offsets(new)
    try:
        for partition in assigned:
            if await consumer.position(partition) < ends[partition]:
                return False
    except InvalidSetting:  # it has gone to another member meanwhile
        return False
    return True
