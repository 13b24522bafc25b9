"""Looks now and then for what is too old or too much, and removes it from disk (Kafka's LogManager.cleanupLogs).

Leaders decide where their logs begin (`Partition.expire`), followers take it from the answers to their fetches; what
lies below goes from the disks of both.
"""

import asyncio
from collections.abc import Mapping

from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Clock


class LogRetention:
    def __init__(
        self, clock: Clock, logs: LogDirs, partitions: Mapping[TopicPartition, Partition], interval_ms: int
    ) -> None:
        """`partitions` is read anew each time."""
        self._clock = clock
        self._logs = logs
        self._partitions = partitions
        self._interval_s = interval_ms / 1_000

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.run_once()

    async def run_once(self) -> None:
        """What is in a directory that is offline, or fails meanwhile, is left alone."""
        for partition in list(self._partitions.values()):
            try:
                partition.expire(self._clock.wall_ms())
            except BrokerError as error:
                if error.code is not ErrorCode.KAFKA_STORAGE_ERROR:
                    raise
            await asyncio.sleep(0)
        await self._logs.remove_old_segments()
