"""Writes the high watermarks of all partitions to `replication-offset-checkpoint`, at intervals and at the end, and at
intervals the recovery points of logs with durability=synced.

A restarted broker begins with these marks. `LogCheckpoints` decides what the file may say, and when it is lowered. Each
directory is written by itself, so a failing or slow disk delays no other.
"""

import asyncio
from collections.abc import Mapping

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.log_checkpoints import LogCheckpoints
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.model import TopicPartition


class HighWatermarkCheckpoint:
    def __init__(self, logs: LogDirs, partitions: Mapping[TopicPartition, Partition], interval_ms: int) -> None:
        """`partitions` is read anew each time."""
        self._logs = logs
        self._partitions = partitions
        self._interval_s = interval_ms / 1_000

    async def run(self, log_dir: str) -> None:
        """For one directory, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self._write(log_dir, self._high_watermarks())
            await self._logs.at(log_dir, LogCheckpoints.checkpoint_synced)

    async def write(self) -> None:
        """At once, for all directories."""
        marks = self._high_watermarks()
        await asyncio.gather(*(self._write(path, marks) for path in self._logs.paths))

    async def _write(self, log_dir: str, marks: Mapping[TopicPartition, int]) -> None:
        await self._logs.at(log_dir, lambda checkpoints: checkpoints.checkpoint_high_watermarks(marks))

    def _high_watermarks(self) -> dict[TopicPartition, int]:
        return {topic_partition: partition.high_watermark for topic_partition, partition in self._partitions.items()}
