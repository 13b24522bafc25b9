"""The data directory: what the logs in it share."""

import logging
from collections.abc import Callable
from typing import NoReturn

from minibroker.broker.storage.checkpoints import (
    HIGH_WATERMARK_FILE,
    LOG_START_OFFSET_FILE,
    RECOVERY_POINT_FILE,
    OffsetCheckpoint,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.storage")


class LogDirectory:
    """What the logs of one directory share: the world, the checkpoints, and whether the disk has failed."""

    def __init__(self, world: World, path: str) -> None:
        self.world = world
        self.recovery_points = OffsetCheckpoint(world.disk, f"{path}/{RECOVERY_POINT_FILE}")
        self.log_start_offsets = OffsetCheckpoint(world.disk, f"{path}/{LOG_START_OFFSET_FILE}")
        self.high_watermarks = OffsetCheckpoint(world.disk, f"{path}/{HIGH_WATERMARK_FILE}")
        self.failure: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    def lower_offsets(self, partition: TopicPartition, offset: int) -> None:
        """On return no checkpoint says more than `offset` of the partition: what a log holds from there on, after a cut
        or in a new topic of that name, is neither flushed nor committed, whatever was there before. Raises OSError."""
        for checkpoint in (self.recovery_points, self.log_start_offsets, self.high_watermarks):
            checkpoint.lower(partition, offset)

    def on_offline(self, listener: Callable[[], None]) -> None:
        """Call `listener`, once, when the directory fails; at once if it has failed already."""
        self._listeners.append(listener)
        if self.failure is not None:
            listener()

    def fail(self, error: BaseException, doing: str) -> None:
        """Take the directory offline for good. Called in the event loop."""
        if self.failure is None:
            self.failure = error
            logger.error("the log directory is offline: %s failed: %r", doing, error, exc_info=error)
            for listener in self._listeners:
                listener()

    def check(self) -> None:
        """Raises BrokerError (KAFKA_STORAGE_ERROR) once the directory has failed."""
        if self.failure is not None:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"the log directory is offline: {self.failure!r}")

    def fail_and_raise(self, error: OSError, doing: str) -> NoReturn:
        self.fail(error, doing)
        raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{doing} failed: {error}") from error
