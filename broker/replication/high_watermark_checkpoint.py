"""Writes the high watermarks of all partitions to `replication-offset-checkpoint`, now and then and at the end. With
them is written, now and then, how far logs with durability=synced are flushed.

A restarted broker begins with what is written there. What the file may say, and when it is lowered, is decided by
`LogManager`.
"""

import asyncio
from collections.abc import Mapping

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.checkpoints import Staged
from minibroker.broker.storage.manager import LogManager
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Executor


class HighWatermarkCheckpoint:
    def __init__(
        self, executor: Executor, logs: LogManager, partitions: Mapping[TopicPartition, Partition], interval_ms: int
    ) -> None:
        """`partitions` is read anew each time."""
        self._executor = executor
        self._logs = logs
        self._partitions = partitions
        self._interval_s = interval_ms / 1_000

    async def run(self) -> None:
        """Until cancelled. Raises BrokerError(KAFKA_STORAGE_ERROR) when the disk has failed."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self._executor.run(self._logs.write_high_watermarks, self._stage())
            await self._logs.checkpoint_synced()

    def write(self) -> None:
        """At once. Blocks. Writes nothing to a disk that has failed; else raises as `run`."""
        if self._logs.failure is None:
            self._logs.write_high_watermarks(self._stage())

    def _stage(self) -> Staged:
        return self._logs.stage_high_watermarks(
            {topic_partition: partition.high_watermark for topic_partition, partition in self._partitions.items()}
        )
