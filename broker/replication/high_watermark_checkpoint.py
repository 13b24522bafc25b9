"""Writes the high watermarks of all partitions to `replication-offset-checkpoint`, now and then and at the end. With
them is written, now and then, how far logs with durability=synced are flushed.

A restarted broker begins with what is written there. What the file may say, and when it is lowered, is decided by
`LogManager`. A directory that does not take it goes offline; the others are written all the same.
"""

import asyncio
from collections.abc import Mapping

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.model import TopicPartition


class HighWatermarkCheckpoint:
    def __init__(self, logs: LogDirs, partitions: Mapping[TopicPartition, Partition], interval_ms: int) -> None:
        """`partitions` is read anew each time."""
        self._logs = logs
        self._partitions = partitions
        self._interval_s = interval_ms / 1_000

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self._logs.checkpoint_high_watermarks(self._high_watermarks())
            await self._logs.checkpoint_synced()

    def write(self) -> None:
        """At once. Blocks."""
        self._logs.write_high_watermarks(self._high_watermarks())

    def _high_watermarks(self) -> dict[TopicPartition, int]:
        return {topic_partition: partition.high_watermark for topic_partition, partition in self._partitions.items()}
