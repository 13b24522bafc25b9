"""A log's segments, and how they reach the disk.

Batches are written at once, into the page cache. Everything else (indexes, leader epochs, producer snapshots) lives in
memory and is written by the next flush, in a worker thread; then the recovery point moves. A flush takes a picture of
the log in the event loop, and counts only as far as the log was not truncated while it was carried out.

With `durability=synced` a flush follows every append. One is under way at a time, for everything appended before it
began; the next begins when it has ended. Under load many records share an fdatasync (group commit), and no append waits
for one. Only the log's account changes: `safe_end_offset`, by which the replica is judged, is the end of the last
flush. Neither the recovery point's checkpoint nor index entries are written for it: recovery reads on from that
checkpoint, and no torn batch lies below the end of a flush.

After a failed write or fsync the page cache may hold pages that are marked clean but are not on disk, and a second
fsync would "succeed". So the first failure takes the whole log directory offline until the broker is restarted.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NoReturn

from minibroker.broker.storage.checkpoints import (
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    encode_epochs,
    encode_topic_id,
)
from minibroker.broker.storage.compaction.swap import Swap
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.io_errors import Trouble, shortage, trouble_of
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.producer_state import Producer
from minibroker.broker.storage.recovery.recovery import Recovered
from minibroker.broker.storage.retention import SegmentExtent
from minibroker.broker.storage.segment import IndexWrite, Segment
from minibroker.broker.storage.snapshots import (
    drop_snapshots_above,
    remove_snapshot,
    write_snapshot,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    CorruptRecord,
)
from minibroker.protocol.world import Disk, File, World

logger = logging.getLogger("minibroker.storage")

SHORTAGE_PAUSE_S = 1.0
"""Seconds before a flush that could not be carried out is tried again."""
_KEPT_SNAPSHOTS = 2
"""Snapshots that are kept besides those at the beginning of a segment."""
_base_offset_of = attrgetter("base_offset")


@dataclass
class Flush:
    """A picture of everything of a log that is not on disk yet: taken in the event loop, written in a worker thread."""

    end_offset: int
    changes: int
    epochs_version: int
    directory: str
    files: list[File] = field(default_factory=list)
    indexes: list[IndexWrite] = field(default_factory=list)
    sealed: list[Segment] = field(default_factory=list)
    sync_directory: bool = False
    topic_id: str = ""
    """The topic's id, if its file may not be on disk."""
    epochs: bytes | None = None
    snapshots: list[tuple[int, list[tuple[int, Producer]]]] = field(default_factory=list)
    old_snapshots: list[int] = field(default_factory=list)
    lowest_cut: int | None = None
    """The lowest offset to which the log was truncated since the picture was taken."""

    def carry_out(self, world: World) -> None:
        """Blocks. Raises OSError; any part may then be written or not."""
        disk = world.disk
        for file in self.files:
            file.fdatasync()
        for index in self.indexes:
            index.carry_out(disk)
        for offset, captured in self.snapshots:
            write_snapshot(disk, self.directory, offset, captured)
        for offset in self.old_snapshots:
            remove_snapshot(disk, self.directory, offset)
        if self.topic_id:
            write_topic_id(disk, self.directory, self.topic_id)
        if self.epochs is not None:
            disk.write_atomically(f"{self.directory}/{LEADER_EPOCH_FILE}", self.epochs)  # syncs the directory
        elif self.sync_directory and not self.topic_id:
            disk.sync_directory(self.directory)


def write_topic_id(disk: Disk, directory: str, topic_id: str) -> None:
    """Write the file, durable on return with all names in the log's directory. Raises OSError."""
    disk.write_atomically(f"{directory}/{PARTITION_METADATA_FILE}", encode_topic_id(topic_id))


class FlushedLog:
    """The part of a `Log` that holds its segments and flushes them."""

    def __init__(
        self,
        directory: LogDirectory,
        path: str,
        partition: TopicPartition,
        topic_id: str,
        config: LogConfig,
        recovered: Recovered,
        *,
        has_durable_id: bool,
    ) -> None:
        """`has_durable_id`: the file with the topic's id is on disk. Otherwise the first flush writes it."""
        self.partition = partition
        self.topic_id = topic_id
        """Empty if the topic's id is not known."""
        self.config = config
        self.path = path
        self.log_dir = directory.path
        """The path of its log directory."""
        self.on_flushed: Callable[[], None] = lambda: None
        """Called, with `synced` only, when a flush may have moved `safe_end_offset`."""
        self._directory = directory
        self._disk = directory.world.disk
        self._clock = directory.world.clock
        self._segments = recovered.segments
        self._active = recovered.segments[-1]
        self._active_since_ms = self._clock.wall_ms()
        """The wall time at which the active segment was begun or opened."""
        self._jitter = directory.world.random.random()
        """The share of `segment_jitter_ms` by which the active segment rolls early."""
        self._log_end_offset = recovered.log_end_offset
        self._log_start_offset = recovered.log_start_offset
        self._recovery_point = recovered.recovery_point
        self._epochs = recovered.epochs
        self._producers = recovered.producers
        self._looked_after_s = self._clock.monotonic()
        self._snapshots = recovered.snapshots
        """Offsets of the snapshot files, ascending."""
        self._pending_snapshots: list[tuple[int, list[tuple[int, Producer]]]] = []
        self._written_epochs_version = recovered.written_epochs_version
        self._bytes_since_flush = 0
        self._flush_after_bytes = _flush_after_bytes(config)
        self._records_since_flush = 0
        self._unflushed_since_s: float | None = None
        """The time of the first append that no flush covers yet, begun or done."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushes_again = False
        """Another flush begins when the present one has ended."""
        self._flush_began_s: float | None = None
        self._bytes_since_snapshot = 0
        self._changes = 0
        """Segments created, removed and truncated."""
        self._synced_changes = 0
        self._cuts = 0
        self._written_now: Flush | None = None
        self._shortage: OSError | None = None
        """The error that kept the last flush from being carried out."""
        self._flushing: asyncio.Task[None] | None = None
        self._retired: list[Segment] = []
        self._damage_told = ""
        self._has_durable_id = has_durable_id
        self._swap: Swap | None = None
        self._closed = False

    # -- positions --

    @property
    def log_start_offset(self) -> int:
        return self._log_start_offset

    @property
    def stored_start_offset(self) -> int:
        """The offset at which the log would begin after a crash: `log_start_offset`, once that is on disk."""
        base = self._segments[0].base_offset
        if base == self._log_start_offset:
            return base
        stored = self._directory.log_start_offsets.stored.get(self.partition, 0)
        return min(max(base, stored), self._log_start_offset)

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets."""
        return self._log_end_offset

    @property
    def recovery_point(self) -> int:
        """The offset below which everything survives a power cut."""
        return self._recovery_point

    @property
    def has_durable_id(self) -> bool:
        """Whether the file with the topic's id is on disk, so that the log survives a power cut. Its first flush writes
        it."""
        return self._has_durable_id

    @property
    def safe_end_offset(self) -> int:
        """The offset below which this replica counts as having everything: the log's end, or with `synced` the end of
        the last flush."""
        return self._recovery_point if self.config.synced else self._log_end_offset

    @property
    def is_safe(self) -> bool:
        """Whether this replica counts as having its whole log."""
        return not self.config.synced or self._recovery_point >= self._log_end_offset

    @property
    def flushing_for_s(self) -> float:
        """Seconds since the present flush began; 0 if there is none."""
        return 0.0 if self._flush_began_s is None else self._clock.monotonic() - self._flush_began_s

    @property
    def cuts(self) -> int:
        """The number of truncations so far."""
        return self._cuts

    @property
    def is_being_flushed(self) -> bool:
        return self._written_now is not None

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch, or NO_EPOCH."""
        return self._epochs.latest

    @property
    def size(self) -> int:
        """The bytes of all batches."""
        return sum(segment.size for segment in self._segments)

    def __repr__(self) -> str:
        return f"<Log {self.partition} {self._log_start_offset}..{self._log_end_offset}>"

    def configure(self, config: LogConfig) -> None:
        """Apply these settings from now on."""
        has_new_interval = config.flush_ms != self.config.flush_ms
        self.config = config
        self._flush_after_bytes = _flush_after_bytes(config)
        self._make_safe()  # records that were recovered, or appended earlier
        if has_new_interval:
            self._flush_in_time()

    def extents(self) -> list[SegmentExtent]:
        """Return the extents of all segments, the oldest first. Raises BrokerError."""
        try:
            return self._extents()
        except OSError as error:
            self.read_failed(error)

    def _extents(self) -> list[SegmentExtent]:
        ends = [*(segment.base_offset for segment in self._segments[1:]), self._log_end_offset]
        return [
            SegmentExtent(segment.base_offset, end, segment.size, segment.newest_ms)
            for segment, end in zip(self._segments, ends, strict=True)
        ]

    def _segment_index(self, offset: int) -> int:
        if offset >= self._active.base_offset:
            return len(self._segments) - 1
        return max(0, bisect_right(self._segments, offset, key=_base_offset_of) - 1)

    def segments_from(self, offset: int) -> list[Segment]:
        """Return the segment that holds `offset`, and all after it."""
        return self._segments[self._segment_index(offset) :]

    def segment_at(self, offset: int) -> Segment:
        return self._segments[self._segment_index(offset)]

    # -- failures --

    def report_damage(self, error: CorruptRecord) -> NoReturn:
        """Raises BrokerError CORRUPT_MESSAGE."""
        if str(error) != self._damage_told:  # followers retry for ever
            self._damage_told = str(error)
            logger.error("%s is damaged on disk: %s", self.partition, error)
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{self.partition} is damaged on disk: {error}") from error

    def read_failed(self, error: OSError) -> NoReturn:
        """Raises BrokerError."""
        self._directory.refuse(error, f"reading {self.path}", is_read=True)

    def require_usable(self) -> None:
        """Raises BrokerError once the directory has failed or the log is closed."""
        if self._directory.failure is not None:
            self._directory.check()
        if self._closed:
            raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"the log of {self.partition} is closed")

    def _let_go(self, segment: Segment) -> None:
        if self._flushing is None:
            segment.close()
        else:
            self._retired.append(segment)  # a worker thread may be syncing its file

    def _finish_swap(self) -> None:
        """Complete a swap of segments that is under way. Raises OSError, and can be repeated then."""
        swap = self._swap
        if swap is not None:
            swap.carry_out()
            swap.segment.indexes_stored()
            self._swap = None

    # -- flushing --

    async def flush(self) -> None:
        """Make everything that was appended before the call survive a power cut. Several callers share one fdatasync.

        Raises BrokerError KAFKA_STORAGE_ERROR; then the log directory is offline, unless the error is a Shortage.
        """
        self._directory.check()
        target = self._log_end_offset
        while self._recovery_point < min(target, self._log_end_offset) and not self._closed:
            await self._wait_for_flush(self._flush_task())

    async def checkpoint(self) -> None:
        """`flush`, and also write the index entries and producer state that make a restart short."""
        self._directory.check()
        self._forget_silent_producers()
        if self._flushing is not None:
            await self._wait_for_flush(self._flushing)
        if self._has_unwritten() and not self._closed:
            self._take_snapshot()
            await self._wait_for_flush(self._flush_task())
        await self.flush()

    def _forget_silent_producers(self) -> None:
        before_s, self._looked_after_s = self._looked_after_s, self._clock.monotonic()
        self._producers.time_passed(self._looked_after_s - before_s)
        self._producers.forget_unseen_for(self.config.producer_id_expiration_ms / 1_000)

    def _has_unwritten(self) -> bool:
        return (
            self._recovery_point < self._log_end_offset
            or self._has_unwritten_epochs()
            or self._synced_changes < self._changes
            or self._bytes_since_snapshot > 0
            or bool(self._pending_snapshots)
            or (len(self._segments) > 1 and not self._segments[-2].stored)
        )

    def _has_unwritten_epochs(self) -> bool:
        """An epoch that began at the log's end needs no file: every leader has one, and each new controller or failed
        broker begins new ones in most logs."""
        if self._written_epochs_version < 0:
            return True
        is_changed = self._epochs.version != self._written_epochs_version
        return is_changed and self._epochs.latest_start < self._log_end_offset

    def _take_snapshot(self) -> None:
        self._pending_snapshots.append((self._log_end_offset, self._producers.capture()))
        self._bytes_since_snapshot = 0

    def _flush_task(self) -> asyncio.Task[None]:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush(), name=f"flush {self.partition}")
            self._flushing.add_done_callback(self._flush_ended)
        return self._flushing

    def _flush_in_background(self) -> None:
        self._bytes_since_flush = self._records_since_flush = 0
        self._flushes_again = self._written_now is not None  # it lacks the latest records
        self._flush_task()

    def _make_safe(self) -> None:
        if not self.is_safe:
            self._flush_in_background()

    def _flush_ended(self, task: asyncio.Task[None]) -> None:
        self._flushing = None
        for segment in self._retired:
            segment.close()
        self._retired.clear()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._directory.fail(error, f"flushing {self.path}")
        if self._shortage is not None:
            self._directory.tell_of_shortage(self._shortage, f"flushing {self.path}")
            asyncio.get_running_loop().call_later(SHORTAGE_PAUSE_S, self._flush_after_shortage)
        elif not self._closed and self._directory.failure is None:
            if self._flushes_again:
                self._flush_in_background()
            if self.config.synced:
                self._make_safe()
                self.on_flushed()

    def _flush_after_shortage(self) -> None:
        if not self._closed and self._directory.failure is None:
            self._flush_in_background()

    async def _wait_for_flush(self, flush: asyncio.Task[None]) -> None:
        """Raises BrokerError if the flush was not carried out."""
        await self._directory.unless_hung(flush)
        self._directory.check()
        if self._shortage is not None:
            raise shortage(f"flushing {self.path}", self._shortage)

    async def _flush(self) -> None:
        """Write one picture of the log. An error is recorded as the directory's `failure`."""
        async with self._directory.flush_turns:
            self._flush_began_s = self._clock.monotonic()
            try:
                await self._write_picture()
            finally:
                self._flush_began_s = None

    async def _write_picture(self) -> None:
        if self._bytes_since_snapshot >= self.config.flush_bytes:
            self._take_snapshot()
        work = self._written_now = self._picture()
        self._reset_flush_counts()
        try:
            await self._directory.run(work.carry_out, self._directory.world)
        except OSError as error:
            if trouble_of(error) is not Trouble.SHORTAGE:
                self._directory.fail(error, f"flushing {self.path}")
                return
            # No file could be opened, so none was written to, and no fdatasync has failed: the next flush does it all.
            self._shortage = error
            cut = work.lowest_cut
            self._pending_snapshots[:0] = [taken for taken in work.snapshots if cut is None or taken[0] <= cut]
            self._snapshots = sorted({*self._snapshots, *(offset for offset, _ in work.snapshots)})
            if cut is not None:
                self._snapshots = drop_snapshots_above(self._disk, self.path, self._snapshots, cut)
            return
        finally:
            self._written_now = None
        self._shortage = None
        self._flushed(work)

    def flush_now(self) -> None:
        """`checkpoint` in this turn of the loop, which blocks on the disk. No flush may be under way. Raises
        BrokerError KAFKA_STORAGE_ERROR."""
        assert self._written_now is None
        self._take_snapshot()
        work = self._picture()
        self._reset_flush_counts()
        try:
            work.carry_out(self._directory.world)
        except OSError as error:
            self._directory.refuse(error, f"flushing {self.path}")
        self._flushed(work)

    def _flushed(self, work: Flush) -> None:
        """Count a flush that was carried out."""
        written = [offset for offset, _ in work.snapshots]
        self._snapshots = sorted({*self._snapshots, *written} - set(work.old_snapshots))
        self._synced_changes = max(self._synced_changes, work.changes)
        self._has_durable_id = self._has_durable_id or bool(work.topic_id)
        if work.epochs is not None:
            self._written_epochs_version = work.epochs_version
        if work.lowest_cut is not None:
            self._snapshots = drop_snapshots_above(self._disk, self.path, self._snapshots, work.lowest_cut)
            return
        for index in work.indexes:
            index.carried_out()
        for segment in work.sealed:
            segment.indexes_stored()
        self._recovery_point = max(self._recovery_point, work.end_offset)

    def _picture(self) -> Flush:
        work = Flush(
            end_offset=self._log_end_offset,
            changes=self._changes,
            epochs_version=self._epochs.version,
            directory=self.path,
        )
        work.sync_directory = self._synced_changes < self._changes
        if not self._has_durable_id:
            work.topic_id, work.sync_directory = self.topic_id, True
        snapshot_due = bool(self._pending_snapshots)
        work.snapshots, self._pending_snapshots = self._pending_snapshots, []
        for number in range(len(self._segments) - 1, -1, -1):
            segment = self._segments[number]
            is_active = segment is self._active
            end = self._log_end_offset if is_active else self._segments[number + 1].base_offset
            is_in_swap = self._swap is not None and segment is self._swap.segment
            if not is_active and (segment.stored or is_in_swap) and end <= self._recovery_point:
                break
            work.files.insert(0, segment.file)
            writes = segment.index_writes(all_entries=snapshot_due or not is_active)
            work.indexes[:0] = writes
            if any(write.is_relied_on and write.first == 0 for write in writes):
                work.sync_directory = True
            if not is_active and not segment.stored:
                work.sealed.append(segment)
        if self._epochs.version != self._written_epochs_version:
            work.epochs = encode_epochs(self._epochs.entries)
        if work.snapshots:
            begins = {segment.base_offset for segment in self._segments}
            others = [offset for offset in self._snapshots if offset not in begins]
            work.old_snapshots = others[:-_KEPT_SNAPSHOTS]
        return work

    def _flush_in_time(self) -> None:
        """Set the timer for `flush_ms`."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self.config.flush_ms is not None and self._unflushed_since_s is not None and not self._closed:
            left_s = self._unflushed_since_s + self.config.flush_ms / 1_000 - self._clock.monotonic()
            self._flush_timer = asyncio.get_running_loop().call_later(max(left_s, 0), self._flush_is_due)

    def _flush_is_due(self) -> None:
        self._flush_timer = None
        if not self._closed and self._directory.failure is None:
            self._flush_in_background()

    def _reset_flush_counts(self) -> None:
        """Start the counts anew: a flush that covers all appends begins."""
        self._bytes_since_flush = self._records_since_flush = 0
        self._unflushed_since_s = None
        self._flush_in_time()

    def moved(self, path: str) -> None:
        """The log's directory has this path from now on. No flush may be under way."""
        self.path = path
        for segment in self._segments:
            segment.moved(path)


def _flush_after_bytes(config: LogConfig) -> int:
    return 0 if config.synced else config.flush_bytes
