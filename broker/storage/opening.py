"""The work of a thread that opens or creates the files of a log."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from minibroker.broker.storage.checkpoints import (
    PARTITION_METADATA_FILE,
    MalformedFile,
    decode_topic_id,
    encode_topic_id,
)
from minibroker.broker.storage.descriptors import check_room_to_open
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.recovery.continuity import DataContinuity
from minibroker.broker.storage.recovery.recovery import Recovered, empty_log, recover
from minibroker.broker.storage.recovery.recovery_progress import LogProgress
from minibroker.broker.storage.segment import LOG_SUFFIX
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Disk

logger = logging.getLogger("minibroker.storage")


class Opened(NamedTuple):
    topic_id: str
    recovered: Recovered
    has_durable_id: bool
    """The file with the topic's id is on disk."""


class LogOpener:
    """Every method blocks, and runs in a worker thread."""

    def __init__(self, directory: LogDirectory, continuity: DataContinuity, index_interval_bytes: int) -> None:
        self._directory = directory
        self._disk = directory.world.disk
        self._clock = directory.world.clock
        self._continuity = continuity
        self._index_interval_bytes = index_interval_bytes

    def _path(self, partition: TopicPartition) -> str:
        return f"{self._directory.path}/{partition}"

    def open(
        self,
        partition: TopicPartition,
        clean: bool,
        recovery_point: int,
        log_start_offset: int | None,
        progress: LogProgress | None = None,
        is_last: bool = True,
    ) -> Opened:
        """Open a log. `is_last`: as for `check_room_to_open`. Raises TooManySegments, DamagedLog, MalformedFile,
        CorruptRecord, OSError."""
        directory = self._path(partition)
        segments = sum(name.endswith(LOG_SUFFIX) for name in self._disk.list(directory))
        check_room_to_open(self._disk, segments, is_last=is_last)
        topic_id = self._topic_id_or_reset(directory, recovery_point, clean)
        recovered = recover(
            self._disk,
            directory,
            recovery_point=recovery_point,
            clean=clean,
            log_start_offset=log_start_offset,
            high_watermark=self._directory.high_watermarks.values.get(partition, 0),
            index_interval_bytes=self._index_interval_bytes,
            now_ms=self._clock.wall_ms(),
            before_loss=self._continuity.distrust,
            progress=progress,
        )
        # If both are 0, the first flush may not have ended.
        was_flushed = recovery_point > 0 or (log_start_offset or 0) > 0
        return Opened(topic_id, recovered, has_durable_id=was_flushed or not topic_id)

    def _topic_id_or_reset(self, directory: str, recovery_point: int, clean: bool) -> str:
        """Return the topic's id, or empty a log whose id file may be torn.

        The id is written when a log is created, and reaches the disk with the first flush. A power cut before that may
        leave any part of the file and any of the records. Their topic is unknown then, so they are removed, as
        unflushed records may be. A clean stop does not flush a log without records either. Raises MalformedFile,
        OSError.
        """
        if recovery_point or not (self._continuity.has_lost_memory or (clean and self._is_empty(directory))):
            return read_topic_id(self._disk, directory)
        try:
            topic_id = read_topic_id(self._disk, directory)
        except MalformedFile:
            topic_id = ""
        # A file without a checksum is valid otherwise, since the first versions wrote none.
        if not topic_id or self._disk.read_file(f"{directory}/{PARTITION_METADATA_FILE}") != encode_topic_id(topic_id):
            topic_id = ""
            logger.info("%s was made shortly before the host lost its power: it is made anew, empty", directory)
            for name in self._disk.list(directory):
                self._disk.remove(f"{directory}/{name}")
            self._disk.sync_directory(directory)
        return topic_id

    def _is_empty(self, directory: str) -> bool:
        segments = [name for name in self._disk.list(directory) if name.endswith(LOG_SUFFIX)]
        return not any(self._disk.read_file(f"{directory}/{name}") for name in segments)

    def create(self, partitions: Sequence[TopicPartition], topic_id: str) -> list[Opened]:
        """Create empty logs. Their directories are durable on return; the files in them, with the topic's id, become
        durable with the first flush. Raises OSError, with none of them open."""
        created: list[Opened] = []
        with ExitStack() as undo:
            for partition in partitions:
                opened = self._create_log(partition, topic_id)
                for segment in opened.recovered.segments:
                    undo.callback(segment.close)
                created.append(opened)
            self._disk.sync_directory(self._directory.path)
            undo.pop_all()
        return created

    def _create_log(self, partition: TopicPartition, topic_id: str) -> Opened:
        # An earlier topic of that name may have left offsets in the files.
        self._directory.lower_offsets(partition, 0)
        directory = self._path(partition)
        if self._disk.exists(directory):
            recovered = self.open(partition, False, 0, 0).recovered
        else:
            self._disk.make_directories(directory)
            recovered = empty_log(self._disk, directory, self._index_interval_bytes)
        try:
            if topic_id:
                put_topic_id(self._disk, directory, topic_id)
            else:
                self._disk.sync_directory(directory)
        except BaseException:
            for segment in recovered.segments:
                segment.close()
            raise
        return Opened(topic_id, recovered, has_durable_id=not topic_id)

    def create_future(self, partition: TopicPartition, path: str, topic_id: str) -> Recovered:
        self._directory.lower_offsets(partition, 0)  # as in `_create_log`
        self._disk.make_directories(path)
        recovered = empty_log(self._disk, path, self._index_interval_bytes)
        if topic_id:
            put_topic_id(self._disk, path, topic_id)
        return recovered


def put_topic_id(disk: Disk, directory: str, topic_id: str) -> None:
    """Write the id, without syncing it: whole or not at all, whenever the process dies. Raises OSError."""
    path = f"{directory}/{PARTITION_METADATA_FILE}"
    file = disk.open(path + ".tmp", create=True)
    try:
        file.truncate(0)
        file.pwrite([encode_topic_id(topic_id)], 0)
    finally:
        file.close()
    disk.rename(path + ".tmp", path)


def read_topic_id(disk: Disk, directory: str) -> str:
    """Return the topic's id, empty if it is not known. Raises MalformedFile, OSError."""
    path = f"{directory}/{PARTITION_METADATA_FILE}"
    return decode_topic_id(path, disk.read_file(path)) if disk.exists(path) else ""
