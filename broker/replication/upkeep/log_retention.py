"""Removes records that are too old or too many from disk, at intervals (Kafka's LogManager.cleanupLogs).

Leaders decide where their logs begin (`expire`, `Partition.delete_records`), and followers take it from the answers to
their fetches; both remove the segments below. The start of a log is written to disk at intervals, and soon if a request
waits for that. Each log directory has its own task, so a slow disk delays no other.

This broker's copy of the settings may be outdated: an operator may just have set a longer retention, with success. So
the settings of all topics that have something to delete are read again first, once in a round.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep import WithPresentSettings
from minibroker.broker.scheduling.sleeps import Sleeps
from minibroker.broker.storage import retention
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.replication")

GATHER_S = 0.02


class LogRetention:
    def __init__(
        self,
        clock: Clock,
        logs: LogDirs,
        partitions: Mapping[TopicPartition, Partition],
        interval_ms: int,
        on_start_stored: Callable[[TopicPartition], None],
        sleeps: Sleeps,
        with_present_settings: WithPresentSettings,
    ) -> None:
        """`partitions` is read anew each time. `on_start_stored` is called when the start of a partition's log, which
        was to be stored soon, is on disk."""
        self._clock = clock
        self._logs = logs
        self._partitions = partitions
        self.interval_ms = interval_ms
        """May be changed at any time. The caller must wake the sleeping task."""
        self._sleeps = sleeps
        self._on_start_stored = on_start_stored
        self._with_present_settings = with_present_settings
        self._to_store: dict[str, dict[TopicPartition, None]] = {path: {} for path in logs.paths}
        self._has_moved = {path: asyncio.Event() for path in logs.paths}

    def store_start_soon(self, log_dir: str, topic_partition: TopicPartition) -> None:
        self._to_store[log_dir][topic_partition] = None
        self._has_moved[log_dir].set()

    async def store_starts(self, log_dir: str) -> None:
        """Until cancelled, store the log starts of the partitions in one directory when asked to."""
        while True:
            await self._has_moved[log_dir].wait()
            await asyncio.sleep(GATHER_S)
            self._has_moved[log_dir].clear()
            moved, self._to_store[log_dir] = self._to_store[log_dir], {}
            await self._logs.at(log_dir, LogCheckpoints.checkpoint_log_start_offsets)
            for topic_partition in moved:
                self._on_start_stored(topic_partition)

    async def run(self, log_dir: str) -> None:
        """For one directory, until cancelled."""
        while True:
            await self._sleeps.sleep(lambda: self.interval_ms / 1_000)
            await self.run_once(log_dir)

    async def run_once(self, log_dir: str) -> None:
        """Skip logs in a directory that is offline or fails in between."""
        now_ms = self._clock.wall_ms()
        limits: dict[Partition, int] = {}
        for log in self._logs.logs_in(log_dir):
            partition = self._partitions.get(log.partition)
            # Else it was deleted, or has failed, while others had their turn: its log is closed.
            if partition is not None and partition.log is log and has_expired(partition, now_ms):
                limits[partition] = partition.high_watermark
            await asyncio.sleep(0)
        for partition in await self._with_present_settings(list(limits)) if limits else []:
            if self._partitions.get(partition.topic_partition) is not partition:
                continue
            try:
                expire(partition, now_ms, limits[partition])
            except BrokerError as error:
                if error.code is not ErrorCode.KAFKA_STORAGE_ERROR:
                    raise
            await asyncio.sleep(0)
        await self._logs.at(log_dir, LogCheckpoints.remove_old_segments)


def has_expired(partition: Partition, now_ms: int) -> bool:
    """Whether there is something to `expire`, by the settings that are known here."""
    return expired_until(partition, now_ms, partition.high_watermark) > partition.log.log_start_offset


def expire(partition: Partition, now_ms: int, limit: int) -> None:
    """Let the log begin after the records that are too old or too many by the topic's settings, at `limit` at most.
    Only a leader does that, and none that may have a successor, whose log would begin earlier. Raises BrokerError
    if the disk has failed.

    Called when the settings have just been read. `limit` is the high watermark before that: records above it may
    have been written under other settings that keep them."""
    log, config = partition.log, partition.log.config
    before, start = log.log_start_offset, expired_until(partition, now_ms, limit)
    if start > before:
        gone = [segment for segment in log.extents() if before < segment.end_offset <= start]
        log.move_log_start_offset(start)
        what = retention.described(gone, before, start, now_ms, config.retention_ms, config.retention_bytes)
        logger.info("%s: retention deletes %s", partition.topic_partition, what)


def expired_until(partition: Partition, now_ms: int, limit: int) -> int:
    log = partition.log
    if not partition.is_leader or partition.may_be_deposed:
        return log.log_start_offset
    return retention.expired(
        log.extents(),
        log_start_offset=log.log_start_offset,
        high_watermark=min(limit, partition.high_watermark),
        now_ms=now_ms,
        retention_ms=log.config.retention_ms,
        retention_bytes=log.config.retention_bytes,
    )
