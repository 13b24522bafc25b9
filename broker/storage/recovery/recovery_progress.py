"""The work that is left while the logs of a directory are opened: worker threads count, the event loop reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minibroker.protocol.model import TopicPartition
from minibroker.protocol.recovery_progress import RecoveryProgress


class LogProgress:
    """The progress of one log. Belongs to the worker thread that opens it; any thread may read it."""

    def __init__(self, sizes: Collection[int] = ()) -> None:
        """`sizes`: the bytes of the segments that will be read."""
        self.bytes = self.remaining_bytes = sum(sizes)
        self.remaining_segments = len(sizes)
        self._after = 0
        """The bytes that remain after the segment that is being read."""

    def found(self, size: int) -> None:
        """Begin with another segment."""
        self.bytes += size
        self.remaining_bytes += size
        self.remaining_segments += 1

    def begin(self, size: int) -> None:
        """The next segment is being read."""
        self._after = max(0, self.remaining_bytes - size)

    def left(self, size: int) -> None:
        """Set the bytes of the segment that are not read yet."""
        self.remaining_bytes = min(self.remaining_bytes, self._after + size)

    def end(self) -> None:
        """The segment has been read."""
        self.remaining_bytes = self._after
        self.remaining_segments = max(0, self.remaining_segments - 1)


class DirectoryProgress:
    """The progress of all logs of a directory. Belongs to the event loop."""

    def __init__(self) -> None:
        self._opened_logs = 0
        self._opened_bytes = 0
        self._left: dict[TopicPartition, LogProgress] = {}

    def begin(self, partitions: Iterable[TopicPartition]) -> None:
        """Begin to open these logs; their sizes are not known yet."""
        self._left = {partition: LogProgress() for partition in partitions}

    def measured(self, partition: TopicPartition, progress: LogProgress) -> None:
        self._left[partition] = progress

    def of(self, partition: TopicPartition) -> LogProgress:
        return self._left[partition]

    def opened(self, partition: TopicPartition) -> None:
        """Or it cannot be."""
        self._opened_logs += 1
        self._opened_bytes += self._left.pop(partition).bytes

    def given_up(self) -> None:
        """The directory is not opened."""
        self._left.clear()

    @property
    def now(self) -> RecoveryProgress:
        left = self._left.values()
        return RecoveryProgress(
            logs=self._opened_logs + len(left),
            remaining_logs=len(left),
            remaining_segments=sum(log.remaining_segments for log in left),
            bytes=self._opened_bytes + sum(log.bytes for log in left),
            remaining_bytes=sum(log.remaining_bytes for log in left),
        )
