"""The checkpoint files of one log directory: where its logs begin, how far they are flushed, committed and compacted.

Each file is written in a worker thread, from a picture taken in the event loop. This module and
`LogDirectory.lower_offsets` decide what a file may say, and when it is lowered.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress

from minibroker.broker.storage.checkpoints import MalformedFile, OffsetCheckpoint, Staged
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.io_errors import Shortage, Trouble, shortage, trouble_of
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.recovery.continuity import DataContinuity
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition

logger = logging.getLogger("minibroker.storage")


class LogCheckpoints:
    """Belongs to the event loop, except for `write_high_watermarks`."""

    def __init__(
        self,
        directory: LogDirectory,
        continuity: DataContinuity,
        logs: Mapping[TopicPartition, Log],
        damaged: Mapping[TopicPartition, str],
    ) -> None:
        """`logs` and `damaged` are those of the directory's `LogManager`, read anew each time."""
        self._directory = directory
        self._continuity = continuity
        self._logs = logs
        self._damaged = damaged
        self._run = directory.run_unless_hung
        self._recovery_points = directory.recovery_points
        self._log_start_offsets = directory.log_start_offsets
        self._high_watermarks = directory.high_watermarks
        self._first_dirty_offsets = directory.first_dirty_offsets

    def read(self) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int] | None]:
        """Read all files. Return the recovery points, and the log start offsets or None if they are not known. Raises
        OSError."""
        recovery_points = self._read_offsets(self._recovery_points, shows_losses=True)
        log_start_offsets = self._read_offsets(self._log_start_offsets, shows_losses=True)
        self._read_offsets(self._high_watermarks)
        self._read_offsets(self._first_dirty_offsets)
        if self._log_start_offsets.is_written and self._directory.world.disk.exists(self._log_start_offsets.path):
            return recovery_points, log_start_offsets
        self._log_start_offsets.stage({})  # to be written even if every log begins at 0
        return recovery_points, None

    def _read_offsets(self, checkpoint: OffsetCheckpoint, *, shows_losses: bool = False) -> dict[TopicPartition, int]:
        """`shows_losses`: without this file, the loss or return of records may go unnoticed."""
        try:
            return checkpoint.read()
        except MalformedFile as error:
            logger.warning("%s; going on without it", error)
            checkpoint.stage({})  # to be written anew
            if shows_losses:
                self._continuity.distrust(str(error))
            return {}

    async def correct(self) -> None:
        """Write the files anew once the logs are open: they may say more than the logs hold. Raises OSError."""
        await self._write_recovery_points()
        await self._lower_high_watermarks()
        await self._write_first_dirty_offsets()

    async def checkpoint_recovery_points(self) -> None:
        """Flush every log and write the recovery points. Raises BrokerError KAFKA_STORAGE_ERROR."""
        for log in list(self._logs.values()):  # one by one: other work needs worker threads as well
            await log.checkpoint()
        self._directory.producers = sum(log.producer_count for log in self._logs.values())
        await self.note_recovery_points()

    async def checkpoint_synced(self) -> None:
        """Write the recovery points if logs with durability=synced are flushed further than the file says. A power cut
        takes nothing below them, so a start that finds less knows of another cause. Raises BrokerError
        KAFKA_STORAGE_ERROR."""
        known = self._recovery_points.values
        if any(log.config.synced and log.recovery_point > known.get(p, 0) for p, log in self._logs.items()):
            await self.note_recovery_points()

    async def note_recovery_points(self) -> None:
        self._directory.check()
        try:
            await self._write_recovery_points()
        except OSError as error:
            self._directory.refuse(error, f"writing {self._recovery_points.path}")

    async def _write_recovery_points(self) -> None:
        """Write the recovery points and the log start offsets. Raises OSError."""
        points = {partition: log.recovery_point for partition, log in self._logs.items()}
        points |= self._of_damaged(self._recovery_points)
        staged = self._recovery_points.stage(points)
        # First, since a recovery point says that all is there from where the log begins.
        await self._write_log_start_offsets()
        await self._run(self._recovery_points.write, staged)

    def _of_damaged(self, checkpoint: OffsetCheckpoint) -> dict[TopicPartition, int]:
        """Return the file's entries for replicas out of service, which stay. Without its recovery point, the next start
        would take safe records for an unflushed tail and cut them at the damage; without its start offset, deleted
        records would be back when the files are repaired."""
        return {p: checkpoint.values[p] for p in self._damaged if p in checkpoint.values}

    async def remove_old_segments(self) -> None:
        """Remove segments below the logs' starts from disk. Raises BrokerError KAFKA_STORAGE_ERROR."""
        logs = [log for log in list(self._logs.values()) if log.has_old_segments]
        if not logs:
            return
        await self.note_recovery_points()
        starts = await self.checkpoint_log_start_offsets()
        for log in logs:
            # A log may have been flushed since, and then its own recovery point is not on disk yet.
            recovery_point = self._recovery_points.stored.get(log.partition, 0)
            await log.remove_old_segments(min(starts.get(log.partition, 0), recovery_point))

    async def checkpoint_log_start_offsets(self) -> Mapping[TopicPartition, int]:
        """Write the log start offsets above 0, and return those on disk. Raises BrokerError KAFKA_STORAGE_ERROR.

        A log that was never flushed is flushed first. If a power cut took it, the log would be made anew and begin at
        the offset in the file, as if it knew the records before; then its leader would not send it their producers.
        """
        self._directory.check()
        for log in list(self._logs.values()):
            if log.log_start_offset > 0 and not log.has_durable_id:
                with suppress(Shortage):
                    await log.flush()
        try:
            return await self._write_log_start_offsets()
        except OSError as error:
            self._directory.refuse(error, f"writing {self._log_start_offsets.path}")

    async def _write_log_start_offsets(self) -> Mapping[TopicPartition, int]:
        logs = self._logs.items()
        offsets = {p: log.log_start_offset for p, log in logs if log.log_start_offset > 0 and log.has_durable_id}
        offsets |= self._of_damaged(self._log_start_offsets)
        if offsets != self._log_start_offsets.values or not self._log_start_offsets.is_written:
            await self._run(self._log_start_offsets.write, self._log_start_offsets.stage(offsets))
        return offsets

    async def checkpoint_first_dirty_offsets(self) -> None:
        """Write how far logs are compacted. Raises BrokerError KAFKA_STORAGE_ERROR."""
        self._directory.check()
        try:
            await self._write_first_dirty_offsets()
        except OSError as error:
            self._directory.refuse(error, f"writing {self._first_dirty_offsets.path}")

    async def _write_first_dirty_offsets(self) -> None:
        checkpoint = self._first_dirty_offsets
        known = checkpoint.values  # before the controller's first order, logs do not know their topics' settings
        offsets = {p: log.first_dirty_offset for p, log in self._logs.items() if log.config.compact or p in known}
        offsets |= self._of_damaged(checkpoint)
        if offsets != known or not checkpoint.is_written:
            await self._run(checkpoint.write, checkpoint.stage(offsets))

    def high_watermark(self, partition: TopicPartition) -> int:
        """Return the high watermark as last checkpointed, 0 if it never was: of this very log, and within it."""
        return self._high_watermarks.values.get(partition, 0)

    async def _lower_high_watermarks(self) -> None:
        """Lower the high watermarks to the logs before the first append. A mark past a log's end would hold for records
        appended there next, and the mark of a missing log for the next topic of that name."""
        before = self._high_watermarks.values
        marks = {p: min(mark, self._logs[p].log_end_offset) for p, mark in before.items() if p in self._logs}
        marks |= self._of_damaged(self._high_watermarks)
        short = sorted(p for p, mark in marks.items() if mark < before[p])
        if short:  # no crash explains that: a mark is lowered before its log is cut
            reason = f"{', '.join(map(str, short[:10]))} ended further on, by the high watermarks on file"
            await self._run(self._continuity.distrust, reason, False)
        if marks != before:
            await self._run(self._high_watermarks.write, self._high_watermarks.stage(marks))

    async def checkpoint_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Write the high watermarks. Raises BrokerError KAFKA_STORAGE_ERROR."""
        staged = self.stage_high_watermarks(high_watermarks)
        try:
            await self._run(self.write_high_watermarks, staged)
        except Shortage:
            raise
        except BrokerError as error:
            self._directory.fail(error.__cause__ or error, "writing high watermarks")
            raise

    def stage_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> Staged:
        """Take a picture of the high watermarks for `write_high_watermarks`. Logs that are not named keep their last
        checkpoint; partitions without a log are left out. Does not block.

        To be called in the event loop, where logs are cut and deleted, so that the picture is consistent.
        """
        before = self._high_watermarks.values
        marks = {p: high_watermarks.get(p, before.get(p, 0)) for p in self._logs}
        return self._high_watermarks.stage(marks | self._of_damaged(self._high_watermarks))

    def write_high_watermarks(self, staged: Staged) -> None:
        """Blocks; in any thread. Raises BrokerError KAFKA_STORAGE_ERROR."""
        self._directory.check()
        try:
            self._high_watermarks.write(staged)
        except OSError as error:
            doing = f"writing {self._high_watermarks.path}"
            if trouble_of(error) is Trouble.SHORTAGE:
                raise shortage(doing, error) from error
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{doing}: {error}") from error
