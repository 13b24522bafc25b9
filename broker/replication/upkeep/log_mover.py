"""Moves replicas from one log directory of this broker to another (KIP-113), while they go on leading or following.

The batches are copied into a *future* log in the other directory, by the event loop, a slice at a time, until there is
little left, and flushed. Then, in one turn of the loop, so that nothing can be appended in between: the rest is copied,
and flushed; the future log gets its name, durably; the partition is served from it. Only after that do the old files
go. So at every moment one of the two logs has everything on disk, under its name.

A move begins again from the start if the log was truncated, or now begins after the end of the copy. It is given up,
with a log line, if the copy cannot be written or the log cannot be read. No compaction begins during a move, as in
Kafka: it might remove the mark of a deletion whose record was copied before. A restart forgets a move: it removes the
copy, and the move must be requested again.

One replica is moved at a time, as fast as the disks can. Rejected: a log that is appended to together with the other
one until both are equal (two disks that may fail, or hang, in each append); names first, records later (a start that
finds both could not tell which one is complete).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.flushing import SHORTAGE_PAUSE_S
from minibroker.broker.storage.io_errors import Shortage
from minibroker.broker.storage.log import Log, LogInvariantViolated
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import CorruptRecord, parse_header

logger = logging.getLogger("minibroker.replication")

SLICE_BYTES = 1024 * 1024
"""Copied in one turn of the loop, a batch that is larger as a whole."""
REST_BYTES = SLICE_BYTES
"""At most so much is left to be copied, and flushed, by the turn that serves the replica from its new directory."""
BREATH_S = 0.001


class Future(NamedTuple):
    """A replica that is being moved, as far as it has come."""

    topic_partition: TopicPartition
    size: int
    offset_lag: int
    """How many offsets it lacks."""


class _Move:
    def __init__(self, topic_partition: TopicPartition, path: str) -> None:
        self.topic_partition = topic_partition
        self.path = path
        self.future: Log | None = None


class LogMover:
    """Belongs to the event loop."""

    def __init__(
        self,
        logs: LogDirs,
        partitions: Mapping[TopicPartition, Partition],
        is_known: Callable[[TopicPartition], bool],
        on_moved: Callable[[Partition], None],
    ) -> None:
        """`partitions` is read anew each time. `is_known`: the cluster has such a partition. `on_moved`: the partition
        has another log from now on."""
        self._logs = logs
        self._partitions = partitions
        self._is_known = is_known
        self._on_moved = on_moved
        self._moves: dict[TopicPartition, _Move] = {}
        self._is_asked = asyncio.Event()

    def move(self, topic_partition: TopicPartition, path: str) -> None:
        """Begin or continue to move this broker's replica to the directory `path`; if that is its present one, cancel
        the move.

        Raises BrokerError: LOG_DIR_NOT_FOUND, KAFKA_STORAGE_ERROR if a directory is offline, REPLICA_NOT_AVAILABLE if
        only other brokers have replicas, UNKNOWN_TOPIC_OR_PARTITION if none has.
        """
        self._logs.check_destination(topic_partition, path)
        partition = self._partitions.get(topic_partition)
        if partition is None and self._logs.is_offline(topic_partition):
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"the replica of {topic_partition} is offline")
        if partition is None:
            is_known = self._is_known(topic_partition)
            code = ErrorCode.REPLICA_NOT_AVAILABLE if is_known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            raise BrokerError(code, f"there is no replica of {topic_partition} here")
        present = self._moves.get(topic_partition)
        if present is not None and present.path == path:
            return
        self._moves.pop(topic_partition, None)
        if partition.log.log_dir != path:
            self._moves[topic_partition] = _Move(topic_partition, path)
            self._is_asked.set()

    def futures_in(self, path: str) -> list[Future]:
        """Return the replicas that are being moved to that directory, or wait for their turn."""
        found = []
        for topic_partition, move in self._moves.items():
            partition = self._partitions.get(topic_partition)
            if move.path != path or partition is None:
                continue
            log, future = partition.log, move.future
            copied = log.log_start_offset if future is None else future.log_end_offset
            size = 0 if future is None else future.size
            found.append(Future(topic_partition, size, max(0, log.log_end_offset - copied)))
        return found

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            while self._moves:
                move = next(iter(self._moves.values()))
                try:
                    await self._carry_out(move)
                except (BrokerError, CorruptRecord, LogInvariantViolated) as error:
                    why = error.detail if isinstance(error, BrokerError) else str(error)
                    self._give_up(move, why)
                finally:
                    if self._moves.get(move.topic_partition) is move:
                        del self._moves[move.topic_partition]

    def _give_up(self, move: _Move, why: str) -> None:
        if move.topic_partition in self._partitions:
            logger.error(
                "%s is not moved to %s: %s. It stays where it is; ask for the move again once that is mended",
                move.topic_partition,
                move.path,
                why,
            )
        else:  # deleted, or its directory has failed: reported elsewhere
            logger.info("%s is not moved to %s, since it is not here any more", move.topic_partition, move.path)

    async def _carry_out(self, move: _Move) -> None:
        """Raises BrokerError, CorruptRecord and LogInvariantViolated, and then the replica stays where it is."""
        while self._moves.get(move.topic_partition) is move:
            partition = self._partitions.get(move.topic_partition)
            if partition is None:
                self._give_up(move, "")
                return
            try:
                if await self._attempt(move, partition):
                    return
            except Shortage:  # logged
                await asyncio.sleep(SHORTAGE_PAUSE_S)
            await asyncio.sleep(BREATH_S)

    async def _attempt(self, move: _Move, partition: Partition) -> bool:
        """False: it must be begun anew."""
        log = partition.log
        try:
            await log.pause_compaction()
            # Nothing counts on the copy before it is complete.
            config = msgspec.structs.replace(log.config, synced=False, flush_ms=None, flush_messages=None)
            future = await self._logs.create_future(log, move.path, config)
            try:
                removal = await self._copy(move, partition, log, future)
            except BaseException:
                await self._discard(move, future)
                raise
            if removal is None:
                await self._discard(move, future)
                return False
        finally:
            log.resume_compaction()
        move.future = None
        logger.info("%s was moved from %s to %s", move.topic_partition, log.log_dir, move.path)
        await self._logs.at(move.path, LogCheckpoints.note_recovery_points)
        with suppress(BrokerError):  # the old directory has failed, which is reported elsewhere
            await asyncio.shield(removal)
        return True

    async def _discard(self, move: _Move, future: Log) -> None:
        move.future = None
        if self._logs.get(move.topic_partition) is not future:
            await self._logs.discard_future(future)

    async def _copy(self, move: _Move, partition: Partition, log: Log, future: Log) -> asyncio.Task[None] | None:
        """Copy the whole log, and serve the partition from the copy. Return the removal of the original; None if the
        move cannot be completed."""
        cuts = log.cuts

        def goes_on() -> bool:
            return (
                self._moves.get(move.topic_partition) is move
                and self._partitions.get(move.topic_partition) is partition
                and self._logs.get(move.topic_partition) is log
                and log.cuts == cuts
                and log.log_start_offset <= future.log_end_offset
            )

        _begin(future, log)
        move.future = future
        while True:
            while _copy_slice(future, log):
                await asyncio.sleep(BREATH_S)
                if not goes_on():
                    return None
            await future.checkpoint()
            if not goes_on():
                return None
            rest_bytes = log.bytes_between(future.log_end_offset, log.log_end_offset)
            if rest_bytes <= REST_BYTES and not future.is_being_flushed:
                break
        # From here to the end nothing may come between.
        while _copy_slice(future, log):
            pass
        future.go_on_as(log)
        removal = self._logs.replace(log, future, partition.high_watermark)
        partition.log = future
        self._on_moved(partition)
        return removal


def _begin(future: Log, log: Log) -> None:
    """Where the log does, or with the batch in which it does, knowing what came before. Raises BrokerError and
    CorruptRecord."""
    start = log.log_start_offset
    first = log.read(start, 1, log.log_end_offset)
    if first:
        start = min(start, parse_header(first).base_offset)
    if start > 0:
        future.truncate_fully_and_start_at(start, log.epoch_at(start - 1), log.producers_below(start))


def _copy_slice(future: Log, log: Log) -> bool:
    """False: there is no more. Raises BrokerError and LogInvariantViolated where it is damaged."""
    records = log.read(future.log_end_offset, SLICE_BYTES, log.log_end_offset)
    if records:
        future.append_as_follower(records)
    return bool(records)
