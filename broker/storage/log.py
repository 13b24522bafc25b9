"""One replica's log: a sequence of segments, the last of which is appended to.

The problem: a produce request must cost little more than its CRC and one write, and yet after a crash, a power cut
or a failing disk the log must hold what it promised, and everything derived from it (indexes, leader epochs,
producer state) must agree with it.

The choice: **the batches are the truth, and one number says how far they are safe.** Appending writes batches and
moves numbers in memory, nothing else. Indexes, epochs and producer snapshots live in memory and reach their files
with the next flush, off the event loop; then the recovery point moves. After a crash all that lies at or above the
recovery point on disk is disregarded except for the batches themselves, and built again from their headers
(`recovery`). So there is no order among files to keep, with one exception: a truncation below the recovery point
(or the high watermark) that is on disk lowers that first, synchronously: what the log holds there next is neither
flushed nor committed. It is rare, since what is truncated is the youngest.

That holds for leader epochs too. KAFKA-7415 asks that a leader's epoch is known with its start offset before the
first append: it is, in memory, and every batch carries its epoch to disk. An epoch under which nothing was written
needs no file: a broker that restarts leads in a new epoch.

Appends and truncations are synchronous, so that nothing can come between validation, offset assignment and the move
of the end offset. `flush` takes a picture, has it written by a worker thread, and counts it only if the log was not
truncated meanwhile. No caller's buffer is changed: the leader's offset and epoch go into the first 16 bytes of each
batch, and those are written from a new piece beside the rest of the received one, in one vectored write.

With `durability=synced` the same flush follows every append. One is under way at a time, for all that was appended
before it began, and the next one begins when it has ended: so many records share an fdatasync when many come (group
commit), and appending waits for none. What changes is the log's account: `safe_end_offset`, by which the replica is
judged, is how far it was flushed. Nothing else has to be written for it, neither the recovery point's checkpoint nor
index entries: recovery reads on from that checkpoint, and there is no torn batch below what a flush has covered.

After a failed write or fsync the page cache may hold pages that are marked clean and are not on disk; a second fsync
would "succeed". So the first failure ends the whole log directory, for good.

Rejected: preallocated and memory-mapped index files (a torn one must be rebuilt anyway, and mapping hides I/O errors
as signals); waiting for the disk in each append, whatever the topic's setting (as in Kafka, the replicas are the first
line of defence).
"""

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, NoReturn, TypeVar

from minibroker.broker.storage.checkpoints import encode_epochs
from minibroker.broker.storage.compaction.cleanable import Candidate, Cleanable, cleanable, groups
from minibroker.broker.storage.compaction.cleaning import CannotBeCleaned, Compaction, Now, Source
from minibroker.broker.storage.compaction.key_map import KeyMap
from minibroker.broker.storage.compaction.swap import Swap, remove_cleaned
from minibroker.broker.storage.directory import LogDirectory
from minibroker.broker.storage.flush import Flush, write_topic_id
from minibroker.broker.storage.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.io_errors import Trouble, shortage, trouble_of
from minibroker.broker.storage.leader_epochs import LeaderEpochCache
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.producer_state import Producer, ProducerBatch, ProducerState
from minibroker.broker.storage.recovery.recovery import Recovered, replay
from minibroker.broker.storage.retention import Removal, SegmentExtent
from minibroker.broker.storage.segment import Appended, Segment
from minibroker.broker.storage.snapshots import (
    drop_snapshots_above,
    keep_snapshot,
    load_producers,
    remove_told,
    write_told,
)
from minibroker.broker.storage.validator import Looked, check_acceptable, read_headers
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import (
    CRC_END,
    HEADER_SIZE,
    LIMIT,
    NO_TIMESTAMP,
    TIMES_END,
    BatchHeader,
    Buffer,
    CorruptRecord,
    decode_batch,
    parse_header,
    stamp,
    validate_batch,
    with_append_time,
)

logger = logging.getLogger("minibroker.storage")

_MAX_PIECES = 512
"""A vectored write takes at most 1,024 pieces (IOV_MAX)."""
SHORTAGE_PAUSE_S = 1.0
"""Before a flush that could not be carried out is tried again."""
_KEPT_SNAPSHOTS = 2
"""Besides those at the beginning of a segment."""
_base_offset_of = attrgetter("base_offset")

_SEARCH_STEP = 64
"""Headers of batches, at a microsecond each."""

T = TypeVar("T")

Steps = Generator[None, None, T]
Search = Steps[tuple[int, int] | None]
"""A search that may go over a whole segment, in steps of 0.1 ms; other things may be done between two of them. What it
finds was right when it began, or later. Raises BrokerError as a method of `Log` does."""

Pace = Callable[[int, asyncio.Event], Awaitable[None]]
"""Waits as long as the reading and writing of so many bytes should take, or until the event is set."""


class AppendInfo(NamedTuple):
    """Where a record set is in the log."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    duplicate: bool = False
    """It was there already: nothing was written."""
    log_append_time_ms: int = NO_TIMESTAMP
    """The timestamp that the leader gave it; -1: none."""

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1


class LogInvariantViolated(RuntimeError):
    """The caller broke the log's contract; going on would make replicas differ."""


class _LogChanged(Exception):
    """A search has to begin anew: segments are not those that they were."""


class Log:
    """Belongs to the event loop. What writes, reads and cuts is synchronous; what flushes, compacts, removes and closes
    is not.

    Every method raises BrokerError: KAFKA_STORAGE_ERROR once the log directory has failed (this call's I/O error
    included; but see `Shortage`), NOT_LEADER_OR_FOLLOWER once the log is closed.
    """

    def __init__(
        self,
        directory: LogDirectory,
        path: str,
        partition: TopicPartition,
        topic_id: str,
        config: LogConfig,
        recovered: Recovered,
        first_dirty_offset: int = 0,
        *,
        has_durable_id: bool = True,
    ) -> None:
        """`has_durable_id`: the file with the topic's id is on disk. Else the first flush writes it."""
        self.partition = partition
        self.topic_id = topic_id
        """Empty where the topic's id is not known."""
        self.config = config
        self.path = path
        self.log_dir = directory.path
        """The log directory that it is in."""
        self.on_flushed: Callable[[], None] = lambda: None
        """Called when `safe_end_offset` may have moved by a flush; with `synced` alone."""
        self._directory = directory
        self._disk = directory.world.disk
        self._clock = directory.world.clock
        self._segments = recovered.segments
        self._active = recovered.segments[-1]
        self._active_since_ms = self._clock.wall_ms()
        """When it was begun, or opened."""
        self._jitter = directory.world.random.random()
        """Of the active segment: how much of `segment_jitter_ms` it does without."""
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
        """When the first record was appended that no flush covers which has begun."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushes_again = False
        """As soon as the one that is under way has ended."""
        self._flush_began_s: float | None = None
        self._bytes_since_snapshot = 0
        self._changes = 0
        """Segments created, removed and truncated."""
        self._synced_changes = 0
        self._cuts = 0
        self._written_now: Flush | None = None
        self._shortage: OSError | None = None
        """What kept the last flush from being carried out."""
        self._flushing: asyncio.Task[None] | None = None
        self._retired: list[Segment] = []
        self._removal: Removal | None = None
        self._damage_told = ""
        self._removing: asyncio.Task[None] | None = None
        self._first_dirty_offset = first_dirty_offset
        self._has_durable_id = has_durable_id
        self._wall_clock_ahead_ms = self._clock.wall_ms() - self._monotonic_ms()
        """When the log was opened."""
        self._compaction: Compaction | None = None
        self._removal_waits = False
        """Old segments are to be removed before the next compaction."""
        self._compacting: asyncio.Task[bool] | None = None
        self._is_compaction_paused = False
        self._swap: Swap | None = None
        self._closed = False

    # -- where it is --

    @property
    def log_start_offset(self) -> int:
        return self._log_start_offset

    @property
    def stored_start_offset(self) -> int:
        """Where the log would begin after a crash: at `log_start_offset`, once that is on disk."""
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
        """Everything below survives a power cut."""
        return self._recovery_point

    @property
    def has_durable_id(self) -> bool:
        """The file with the topic's id is on disk: a power cut leaves the log. Its first flush puts it there."""
        return self._has_durable_id

    @property
    def safe_end_offset(self) -> int:
        """Below it this replica counts as having everything: its end, or with `synced` what was flushed."""
        return self._recovery_point if self.config.synced else self._log_end_offset

    @property
    def is_safe(self) -> bool:
        """This replica counts as having all that is in its log."""
        return not self.config.synced or self._recovery_point >= self._log_end_offset

    @property
    def flushing_for_s(self) -> float:
        """For how many seconds the flush that is under way has been at work; 0 where none is."""
        return 0.0 if self._flush_began_s is None else self._clock.monotonic() - self._flush_began_s

    @property
    def cuts(self) -> int:
        """How often it was truncated."""
        return self._cuts

    @property
    def is_being_flushed(self) -> bool:
        return self._written_now is not None

    @property
    def first_dirty_offset(self) -> int:
        """No two records below have the same key, as far as that is known."""
        return self._first_dirty_offset

    @property
    def latest_epoch(self) -> int:
        """The newest leader epoch, or NO_EPOCH."""
        return self._epochs.latest

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return sum(segment.size for segment in self._segments)

    def __repr__(self) -> str:
        return f"<Log {self.partition} {self._log_start_offset}..{self._log_end_offset}>"

    def configure(self, config: LogConfig) -> None:
        """The settings from now on."""
        is_flushed_otherwise = config.flush_ms != self.config.flush_ms
        self.config = config
        self._flush_after_bytes = _flush_after_bytes(config)
        self._make_safe()  # what was recovered, or appended before
        if is_flushed_otherwise:
            self._flush_in_time()

    # -- appending --

    def append_as_leader(
        self, records: Buffer, leader_epoch: int, now_ms: int, *, looked: Looked = Looked.NOT
    ) -> AppendInfo:
        """Give the batches their offsets and `leader_epoch` and append them, all or none. `records` is not changed.
        `looked`: as for `check_acceptable`.

        Raises BrokerError, with nothing written: CORRUPT_MESSAGE, INVALID_RECORD, MESSAGE_TOO_LARGE,
        RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, and as `ProducerState.check`. A repetition of one of a producer's last
        five batches gets the offsets of the first time, whatever the settings are by now: it is in the log.
        """
        self._require_usable()
        if leader_epoch < self._epochs.latest:
            raise LogInvariantViolated(
                f"append to {self.partition} in epoch {leader_epoch}, but {self._epochs.latest} has begun"
            )
        headers = read_headers(records, self.partition)
        first = headers[0]
        known = self._producers.repeated(first) if len(headers) == 1 else None
        if known is not None:
            return self._repetition(first, known)
        check_acceptable(records, headers, self.partition, self.config, now_ms, looked)
        self._check_producer(headers)

        view = memoryview(records)
        first_offset = offset = self._log_end_offset
        pieces: list[Buffer] = []
        appended: list[Appended] = []
        position = 0
        max_timestamp = NO_TIMESTAMP
        is_timed = self.config.log_append_time
        for header in headers:
            size = header.size
            if is_timed:
                header, times = with_append_time(view[position : position + size], header, now_ms)
                pieces += stamp(header, offset, leader_epoch), times, view[position + TIMES_END : position + size]
            else:
                pieces += stamp(header, offset, leader_epoch), view[position + CRC_END : position + size]
            offset += header.last_offset_delta + 1
            appended.append(Appended(offset - 1, header.max_timestamp, size))
            max_timestamp = max(max_timestamp, header.max_timestamp)
            position += size
        if len(pieces) > _MAX_PIECES:
            pieces = [b"".join(pieces)]

        self._write(pieces, position, appended)
        if leader_epoch > self._epochs.latest:
            self._epochs.assign(leader_epoch, first_offset)
        if first.has_producer_id:
            self._producers.update(first, first_offset, now_ms)
        return AppendInfo(
            first_offset, offset - 1, max_timestamp, log_append_time_ms=now_ms if is_timed else NO_TIMESTAMP
        )

    def append_as_follower(self, records: Buffer, leader_epoch: int = LIMIT) -> AppendInfo:
        """Append batches as the leader in that epoch has them, offsets and epochs included.

        They must begin at the log's end or after it: compaction leaves gaps. It may have been switched on before this
        broker heard of it, and what it has left behind is there after it was switched off, so gaps are always taken.
        Raises BrokerError CORRUPT_MESSAGE and LogInvariantViolated, with nothing written.
        """
        self._require_usable()
        appended: list[Appended] = []
        headers: list[BatchHeader] = []
        position = 0
        offset, epoch = self._log_end_offset, self._epochs.latest
        max_timestamp = -1
        end = len(records)
        while position < end:
            try:
                header = parse_header(records, position)
                validate_batch(records, header, position)
            except CorruptRecord as error:
                raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{self.partition}, fetched batch: {error}") from error
            if header.base_offset < offset or not epoch <= header.partition_leader_epoch <= leader_epoch:
                raise LogInvariantViolated(
                    f"{self.partition} is at offset {offset} in epoch {epoch}, and follows in {leader_epoch}; a batch "
                    f"of offset {header.base_offset} and epoch {header.partition_leader_epoch} does not continue it"
                )
            offset, epoch = header.next_offset, header.partition_leader_epoch
            max_timestamp = max(max_timestamp, header.max_timestamp)
            appended.append(Appended(header.last_offset, header.max_timestamp, header.size))
            headers.append(header)
            position += header.size
        if not headers:
            raise LogInvariantViolated(f"{self.partition}: nothing to append")
        self._write([records], position, appended)
        now_ms = self._clock.wall_ms()
        for header in headers:
            if header.partition_leader_epoch > self._epochs.latest:
                self._epochs.assign(header.partition_leader_epoch, header.base_offset)
            if header.has_producer_id:
                self._producers.update(header, header.base_offset, now_ms)
        return AppendInfo(headers[0].base_offset, offset - 1, max_timestamp)

    def check_begins(self, records: Buffer) -> None:
        """Before records are appended that a native producer sent as columns: see `ProducerState.check_begins`."""
        with contextlib.suppress(CorruptRecord):  # for the append to find
            self._producers.check_begins(parse_header(records))

    def knows_producer(self, producer_id: int) -> bool:
        """It has written here, and is not forgotten."""
        return self._producers.get(producer_id) is not None

    def repeats(self, records: Buffer) -> bool:
        """They are in the log already, if their CRC is right: nothing else need be looked at."""
        try:
            return self._producers.repeated(parse_header(records)) is not None
        except CorruptRecord:
            return False

    def _check_producer(self, headers: Sequence[BatchHeader]) -> None:
        if len(headers) > 1:
            if any(header.has_producer_id for header in headers):
                raise BrokerError(
                    ErrorCode.INVALID_RECORD,
                    f"{self.partition}: {len(headers)} batches, but an idempotent producer sends one at a time",
                )
        elif headers[0].has_producer_id:
            self._producers.check(headers[0])

    def _repetition(self, header: BatchHeader, batch: ProducerBatch) -> AppendInfo:
        times = header.max_timestamp, NO_TIMESTAMP
        if self.config.log_append_time:
            times = self._times_at(batch.first_offset) or times
        return AppendInfo(batch.first_offset, batch.last_offset, times[0], True, times[1])

    def _times_at(self, offset: int) -> tuple[int, int] | None:
        """The largest timestamp of the batch there, and the one that its leader gave it. None where it cannot be read,
        or is compacted or deleted."""
        segment = self._segments[self._segment_index(offset)]
        try:
            position = segment.locate(offset)
            if position >= segment.size:
                return None
            header = parse_header(segment.file.pread(HEADER_SIZE, position))
        except (OSError, CorruptRecord):
            return None
        if not header.is_log_append_time or not header.base_offset <= offset <= header.last_offset:
            return None
        return header.max_timestamp, header.max_timestamp

    def _write(self, pieces: Sequence[Buffer], size: int, appended: list[Appended]) -> None:
        active = self._active
        last_offset = appended[-1].last_offset
        try:
            if active.size and (
                active.size + size > self.config.segment_bytes
                or last_offset - active.base_offset > MAX_RELATIVE_OFFSET
                or self._waited_ms(appended[-1].max_timestamp)
                > self.config.segment_ms - self._jitter * min(self.config.segment_jitter_ms, self.config.segment_ms)
            ):
                self.roll()
                active = self._active
            active.append(pieces, appended)
        except OSError as error:
            self._directory.fail_and_raise(error, f"appending to {active.path}")
        self._records_since_flush += last_offset + 1 - self._log_end_offset
        self._log_end_offset = last_offset + 1
        self._bytes_since_flush += size
        self._bytes_since_snapshot += size
        most_records = self.config.flush_messages
        if self._bytes_since_flush >= self._flush_after_bytes or (
            most_records is not None and self._records_since_flush >= most_records
        ):
            self._flush_in_background()
        elif self._unflushed_since_s is None:
            self._unflushed_since_s = self._clock.monotonic()
            if self.config.flush_ms is not None:
                self._flush_in_time()

    def _flush_in_time(self) -> None:
        """As `flush_ms` says."""
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

    def _begin_to_count(self) -> None:
        """A flush begins that covers all that was appended."""
        self._bytes_since_flush = self._records_since_flush = 0
        self._unflushed_since_s = None
        self._flush_in_time()

    def _waited_ms(self, timestamp: int) -> int:
        """How much younger than the active segment a batch is: by the timestamp of its first one, or where that has
        none, by when it was begun here (Kafka's `LogSegment.timeWaitedForRoll`)."""
        first = self._active.first_timestamp
        return timestamp - first if first >= 0 else self._clock.wall_ms() - self._active_since_ms

    def roll(self) -> None:
        """Seal the active segment, unless it is empty, and begin a new one."""
        if not self._active.size:
            return
        try:
            if len(self._segments) == 1 and not self._has_durable_id:
                # Of two names that are not on disk a power cut may keep the second one alone, and the log would pass
                # for one that begins there. Once for a log, where its first segment is full before its first flush.
                self._disk.sync_directory(self.path)
            segment = self._create_segment(self._log_end_offset)
        except OSError as error:
            self._directory.refuse(error, f"rolling {self.path}")
        self._active.seal()
        self._segments.append(segment)
        self._active = segment
        self._active_since_ms = self._clock.wall_ms()
        self._jitter = self._directory.world.random.random()
        self._changes += 1
        self._pending_snapshots.append((self._log_end_offset, self._producers.capture()))
        self._flush_in_background()

    def _create_segment(self, base_offset: int) -> Segment:
        interval = self.config.index_interval_bytes
        return Segment.create(self._disk, self.path, base_offset, interval, undisturbed=self._flushing is None)

    # -- reading --

    def read(self, offset: int, max_bytes: int, up_to_offset: int, min_one: bool = True) -> bytes:
        """Whole batches from the one that holds `offset`: at most `max_bytes` of them (but the first at any size, with
        `min_one`), none that reaches `up_to_offset`. Empty where there is none.

        Raises BrokerError OFFSET_OUT_OF_RANGE (below the log's start or past its end), CORRUPT_MESSAGE (damaged disk).
        """
        self._require_usable()
        end_offset = self._log_end_offset
        if not self._log_start_offset <= offset <= end_offset:
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} of {self.partition}, which holds {self._log_start_offset} to {end_offset}",
            )
        up_to_offset = min(up_to_offset, end_offset)
        if offset >= up_to_offset:
            return b""
        segments = self._segments
        index = self._segment_index(offset)
        try:
            while index < len(segments):
                segment = segments[index]
                if segment.base_offset >= up_to_offset:
                    break
                index += 1
                segment_end = segments[index].base_offset if index < len(segments) else end_offset
                stop = segment.size if segment_end <= up_to_offset else segment.locate(up_to_offset)
                data = segment.read(offset, max_bytes, stop, min_one=min_one)
                if data is not None:
                    return data
        except OSError as error:
            self._directory.refuse(error, f"reading {segment.path}", is_read=True)
        except CorruptRecord as error:
            self._report_damage(error)
        return b""

    def check(self, data: Buffer, offset: int) -> None:
        """Whether batches that were read at `offset`, and the one before them, match their CRC and are where they say,
        of which Kafka's CRC knows nothing: what is sent is not looked at otherwise, and this takes a millisecond or
        more for each 4 MiB. Raises BrokerError CORRUPT_MESSAGE."""
        if offset > self._log_start_offset:
            # A follower that took it for good may find only now that what comes next does not fit.
            self._check(self.read(offset - 1, 1, offset), offset - 1)
        self._check(data, offset)

    def _check(self, data: Buffer, offset: int) -> None:
        position, at = 0, offset
        try:
            while position < len(data):
                header = parse_header(data, position)
                validate_batch(data, header, position)
                # The first may begin before the offset, and the log's start, of which the epochs know no more.
                written_in = self._epochs.epoch_at(header.last_offset)
                begins_at = header.base_offset if position else max(header.base_offset, at)
                if not at <= begins_at <= header.last_offset < self._log_end_offset:
                    raise CorruptRecord(
                        f"a batch of the offsets {header.base_offset} to {header.last_offset} at {at}, in a log "
                        f"that ends at {self._log_end_offset}"
                    )
                if header.partition_leader_epoch != written_in:
                    raise CorruptRecord(
                        f"the batch at {header.base_offset} has leader epoch {header.partition_leader_epoch}, but what "
                        f"is there was written in {written_in}"
                    )
                position += header.size
                at = header.next_offset
        except CorruptRecord as error:
            self._report_damage(error)

    def bytes_between(self, offset: int, up_to_offset: int) -> int:
        """Bytes of the batches from `offset` to `up_to_offset`, both within the log."""
        self._require_usable()
        if offset >= up_to_offset:
            return 0
        first, last = self._segment_index(offset), self._segment_index(up_to_offset)
        try:
            total = self._segments[last].locate(up_to_offset) - self._segments[first].locate(offset)
        except OSError as error:
            self._directory.refuse(error, f"reading {self.path}", is_read=True)
        except CorruptRecord as error:
            self._report_damage(error)
        return total + sum(segment.size for segment in self._segments[first:last])

    def offset_for_timestamp(self, timestamp_ms: int, up_to_offset: int) -> Search:
        """Timestamp and offset of the first record below `up_to_offset` whose timestamp is `timestamp_ms` or later."""
        return self._search(lambda: self._first_since(timestamp_ms, up_to_offset))

    def newest_record(self, up_to_offset: int) -> Search:
        """Timestamp and offset of the record below `up_to_offset` with the largest timestamp, the first of several
        (KIP-734). None where no record has a timestamp."""
        return self._search(lambda: self._newest(up_to_offset))

    def past_emptied(self, offset: int, up_to_offset: int) -> Steps[int]:
        """From where to read on to get records, if there are any from `offset` to below `up_to_offset`: compaction may
        have left batches without records before them. Where there are none, from the last such batch on. In steps, as a
        `Search`."""
        return self._search(lambda: self._past_emptied(offset, up_to_offset))

    def _past_emptied(self, offset: int, up_to_offset: int) -> Steps[int]:
        found, cuts = offset, self._cuts
        for segment in self._segments[self._segment_index(offset) :]:
            self._require_unchanged(segment, cuts)
            for number, (_, header) in enumerate(segment.walk(segment.locate(offset), segment.size), 1):
                if header.base_offset >= up_to_offset:
                    return found
                found = max(offset, header.base_offset)
                if header.records_count:
                    return found
                if number % _SEARCH_STEP == 0:
                    yield
                    self._require_unchanged(segment, cuts)
            yield  # of many segments each may hold a single batch
        return found

    def _search(self, attempt: Callable[[], Steps[T]]) -> Steps[T]:
        while True:
            self._require_usable()
            try:
                return (yield from attempt())
            except _LogChanged:
                continue
            except OSError as error:
                self._directory.refuse(error, f"reading {self.path}", is_read=True)
            except CorruptRecord as error:
                self._report_damage(error)

    def _first_since(self, timestamp_ms: int, up_to_offset: int) -> Search:
        start, cuts = self._log_start_offset, self._cuts
        for segment in self._segments[self._segment_index(start) :]:
            if segment.max_timestamp < timestamp_ms:
                continue
            self._require_unchanged(segment, cuts)
            for number, (position, header) in enumerate(segment.batches_since(timestamp_ms, start), 1):
                if header.base_offset >= up_to_offset:
                    return None
                is_young = header.max_timestamp >= timestamp_ms
                if is_young:
                    for timestamp, offset in self._times(segment, position, header):
                        if timestamp >= timestamp_ms and offset >= start:
                            return (timestamp, offset) if offset < up_to_offset else None
                if is_young or number % _SEARCH_STEP == 0:
                    yield
                    self._require_unchanged(segment, cuts)
        return None

    def _newest(self, up_to_offset: int) -> Search:
        start, cuts = self._log_start_offset, self._cuts
        newest = (NO_TIMESTAMP, 0)
        """With the offset negated, so that the larger one is the better one."""
        extents = zip(self._segments, self.extents(), strict=True)
        ends = [(s, min(extent.end_offset, up_to_offset)) for s, extent in extents if start < extent.end_offset]
        for segment, end in sorted(ends, key=lambda item: (-item[0].max_timestamp, item[0].base_offset)):
            if segment.max_timestamp < newest[0] or segment.max_timestamp == NO_TIMESTAMP:
                break
            if segment.base_offset < end:
                self._require_unchanged(segment, cuts)
                newest = max(newest, (yield from self._newest_in(segment, max(start, segment.base_offset), end, cuts)))
        timestamp, negated = newest
        return None if timestamp == NO_TIMESTAMP else (timestamp, -negated)

    def _newest_in(self, segment: Segment, start: int, end: int, cuts: int) -> Generator[None, None, tuple[int, int]]:
        """As `_newest_of`, of all records of a segment from `start` to below `end`."""
        if segment.newest is not None and segment.newest[0] == (start, end):
            return segment.newest[1]
        newest = (NO_TIMESTAMP, 0)
        best: tuple[int, BatchHeader] | None = None
        for number, (position, header) in enumerate(segment.newest_batches(start, end), 1):
            if header.base_offset < start or header.last_offset >= end:
                # Its largest timestamp may be that of a record that does not count.
                newest = max(newest, self._newest_of(segment, position, header, start, end))
            elif header.records_count and (best is None or header.max_timestamp > best[1].max_timestamp):
                best = position, header
            if number % _SEARCH_STEP == 0:
                yield
                self._require_unchanged(segment, cuts)
        if best is not None:
            newest = max(newest, self._newest_of(segment, *best, start, end))
        segment.newest = (start, end), newest
        return newest

    def _require_unchanged(self, segment: Segment, cuts: int) -> None:
        """Raises BrokerError once the log is closed, and _LogChanged where it has another segment in that place."""
        self._require_usable()
        if cuts != self._cuts or self._segments[self._segment_index(segment.base_offset)] is not segment:
            raise _LogChanged

    def _newest_of(self, segment: Segment, position: int, header: BatchHeader, start: int, end: int) -> tuple[int, int]:
        """The largest timestamp of a batch's records from `start` to below `end`, and the first offset that has it,
        negated."""
        records = [
            (timestamp, -offset)
            for timestamp, offset in self._times(segment, position, header)
            if start <= offset < end
        ]
        return max(records, default=(NO_TIMESTAMP, 0))

    def _times(self, segment: Segment, position: int, header: BatchHeader) -> Iterable[tuple[int, int]]:
        """Timestamp and offset of each record of a batch. Raises OSError, CorruptRecord."""
        data = segment.file.pread(header.size, position)
        validate_batch(data, header)
        try:
            batch = decode_batch(data, header, check_crc=False)
        except CorruptRecord:
            # It is as its producer sent it, which may be anything: only its header was looked at. Its consumers will
            # find out; a log that others write to must not stop answering over it.
            return [(header.max_timestamp, max(header.base_offset, self._log_start_offset))]
        return zip(batch.timestamps, batch.offsets, strict=True)

    def _segment_index(self, offset: int) -> int:
        if offset >= self._active.base_offset:
            return len(self._segments) - 1
        return max(0, bisect_right(self._segments, offset, key=_base_offset_of) - 1)

    def _report_damage(self, error: CorruptRecord) -> NoReturn:
        if str(error) != self._damage_told:  # followers ask again for ever
            self._damage_told = str(error)
            logger.error("%s is damaged on disk: %s", self.partition, error)
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{self.partition} is damaged on disk: {error}") from error

    # -- leader epochs --

    def assign_epoch_start(self, epoch: int, offset: int) -> None:
        """`epoch` begins at `offset`, which is the log's end for a replica that becomes leader."""
        self._require_usable()
        self._epochs.assign(epoch, offset)

    def end_offset_for(self, requested_epoch: int) -> tuple[int, int]:
        """As `LeaderEpochCache.end_offset_for`."""
        return self._epochs.end_offset_for(requested_epoch, self._log_end_offset)

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of the record at `offset`, or NO_EPOCH."""
        return self._epochs.epoch_at(offset)

    def producers(self) -> list[tuple[int, Producer]]:
        """The idempotent producers that it knows, by their ids."""
        return self._producers.capture()

    def producers_below(self, offset: int) -> list[tuple[int, Producer]]:
        """As `ProducerState.below`."""
        return self._producers.below(offset)

    # -- truncating --

    def truncate_to(self, offset: int) -> None:
        """Cut all records from `offset` on; the whole batch that holds it, if it begins before. Below the log's start:
        empty the log and begin there. Epochs that wrote nothing below the new end are forgotten in any case: a leader
        that was replaced before its first append has one (KAFKA-7415)."""
        self._require_usable()
        if offset >= self._log_end_offset:
            self._epochs.truncate_from_end(self._log_end_offset)
            return
        if offset < self._log_start_offset:
            self.truncate_fully_and_start_at(offset, producers=self._producers.below(offset))
            return
        index = self._segment_index(offset)
        segment = self._segments[index]
        has_begun = False
        try:
            position = segment.locate(offset)
            # With the batch before, wherever compaction has left a gap: what nobody can read must not be waited for.
            offset = segment.end_before(position)
            self._begin_cut(offset)
            has_begun = True
            # From the end backwards, so that a crash in between leaves a log without a gap.
            for later in reversed(self._segments[index + 1 :]):
                self._drop(later)
            del self._segments[index + 1 :]
            segment.truncate(offset, position)
            self._changes += 1
            self._active = segment
            self._log_end_offset = offset
            self._log_start_offset = min(self._log_start_offset, offset)
            self._epochs.truncate_from_end(offset)
            self._rewind_producers(offset)
        except OSError as error:
            self._cut_failed(error, f"truncating {self.path} to offset {offset}", has_begun=has_begun)
        except CorruptRecord as error:
            self._closed = True  # cut halfway
            self._report_damage(error)

    def truncate_fully_and_start_at(
        self, offset: int, previous_epoch: int = NO_EPOCH, producers: Sequence[tuple[int, Producer]] = ()
    ) -> None:
        """Drop everything: the log is empty, and its next offset is `offset`. `previous_epoch`: of the record before,
        where that is known. `producers`: who had written before `offset` (`ProducerState.below`)."""
        self._require_usable()
        has_begun = False
        try:
            if producers:  # first, since a full disk must not meet a log that is half emptied
                write_told(self._disk, self.path, offset, producers)
            # Down to 0: of the files that vanish a power cut may keep any, and recovery must look for gaps.
            self._begin_cut(0, keep=False)
            has_begun = True
            if self._removal is not None:
                self._segments[:0] = self._removal.stop()
            began_at = self._segments[0].base_offset
            if not producers:
                remove_told(self._disk, self.path, offset)
            self._pending_snapshots.clear()
            self._snapshots = drop_snapshots_above(self._disk, self.path, self._snapshots, -1)
            for segment in reversed(self._segments):
                self._drop(segment)
            self._active = self._create_segment(offset)
            self._segments = [self._active]
            self._changes += 1
            self._log_start_offset = self._log_end_offset = offset
            self._epochs.clear()
            if previous_epoch != NO_EPOCH:
                self._epochs.assign(previous_epoch, offset - 1)
            self._producers = ProducerState.restore(producers)
            # After a power cut no old snapshot may pass for one of this log, nor may it begin later than here.
            if self._has_durable_id or not self.topic_id:
                self._disk.sync_directory(self.path)
            else:
                write_topic_id(self._disk, self.path, self.topic_id)
                self._has_durable_id = True
            self._synced_changes = self._changes
            if began_at != offset:  # last: until now the old segments may come back
                remove_told(self._disk, self.path, began_at)
        except OSError as error:
            self._cut_failed(error, f"emptying {self.path}", has_begun=has_begun)
        self._make_safe()

    def move_log_start_offset(self, offset: int) -> None:
        """Records below `offset` are gone for readers; never moves back. Raises BrokerError: OFFSET_OUT_OF_RANGE;
        KAFKA_STORAGE_ERROR, and then the log begins where it did.

        What they take on disk goes with `remove_old_segments`, a segment at a time; where no record is left, the active
        segment is sealed for that."""
        self._require_usable()
        if offset > self._log_end_offset:
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{self.partition} ends at {self._log_end_offset}")
        if offset > self._log_start_offset:
            if offset == self._log_end_offset:
                self.roll()  # first: where it cannot, nothing has changed
            self._log_start_offset = offset  # the epochs' file must not be ahead of the one that has this

    def extents(self) -> list[SegmentExtent]:
        """Of all segments, the oldest first. Raises BrokerError."""
        try:
            return self._extents()
        except OSError as error:
            self._directory.refuse(error, f"reading {self.path}", is_read=True)

    def _extents(self) -> list[SegmentExtent]:
        ends = [*(segment.base_offset for segment in self._segments[1:]), self._log_end_offset]
        return [
            SegmentExtent(segment.base_offset, end, segment.size, segment.newest_ms)
            for segment, end in zip(self._segments, ends, strict=True)
        ]

    @property
    def has_old_segments(self) -> bool:
        """There are segments below the log's start that could be removed."""
        return self._removing is None and self._count_old(self._log_start_offset) > 0

    def _count_old(self, start: int) -> int:
        """How many segments can be removed: they end at or below `start`, no flush has anything to do with them, and
        the producers of their batches are in a snapshot that no truncation will take away."""
        start = min(start, self._log_start_offset, self._recovery_point)
        count = 0
        while count + 1 < len(self._segments) and self._segments[count + 1].base_offset <= start:
            if not self._segments[count].stored:
                break
            count += 1
        # From the newest on, which nearly always has one: to look for each would hold the loop where there are many.
        while count and self._segments[count].base_offset not in self._snapshots:
            count -= 1
        return count

    async def remove_old_segments(self, start: int) -> None:
        """Take the segments that end at or below `start` off the disk. `start` is the log start offset, or less; it and
        the recovery point must be on disk. What cannot be removed yet stays, and so may segments when this is
        interrupted: until the next time."""
        self._directory.check()
        count = 0 if self._closed or self._removing is not None else self._count_old(start)
        if not count:
            return
        if self._compaction is not None:
            self._removal_waits = True  # a pass that is stopped for each removal may never come to its end
            return
        kept = self._segments[count].base_offset
        try:
            reading = self._directory.run(keep_snapshot, self._disk, self.path, kept)
            is_whole = await self._directory.unless_hung(reading)
        except OSError as error:
            self._directory.refuse(error, f"keeping a snapshot of {self.path}")
        if not is_whole:
            self._snapshots = [offset for offset in self._snapshots if offset != kept]
        is_same = count == self._count_old(start) and kept == self._segments[count].base_offset
        if self._closed or self._removing is not None or self._compaction is not None or not is_same:
            return  # things have changed; the next time
        self._removal_waits = False
        removed, self._segments = self._segments[:count], self._segments[count:]
        snapshots = [offset for offset in self._snapshots if offset < kept]
        self._snapshots = self._snapshots[len(snapshots) :]
        self._epochs.truncate_from_start(kept)
        self._removal = Removal(self._disk, self.path, removed, snapshots)
        self._removing = asyncio.get_running_loop().create_task(self._remove(), name=f"removal {self.partition}")
        await self._directory.unless_hung(self._removing)

    async def _remove(self) -> None:
        assert self._removal is not None
        try:
            await self._directory.run(self._removal.carry_out)
        except OSError as error:
            self._directory.fail_unless_short(error, f"removing segments of {self.path}")
        finally:
            for segment in self._removal.stop():
                segment.close()
            self._removal = self._removing = None

    def _begin_cut(self, offset: int, *, keep: bool = True) -> None:
        """From now on nothing may rely on what a flush under way writes, nor on a checkpoint that says more than
        `offset`; nor, unless `keep`, on any snapshot."""
        self._cuts += 1
        if self._compaction is not None:
            self._compaction.stop()
        self._finish_swap()
        self._recovery_point = min(self._recovery_point, offset)
        self._first_dirty_offset = min(self._first_dirty_offset, offset)
        work = self._written_now
        if work is not None:
            cut = offset if keep else -1
            work.lowest_cut = cut if work.lowest_cut is None else min(work.lowest_cut, cut)
        self._directory.lower_offsets(self.partition, offset)

    def _cut_failed(self, error: OSError, doing: str, *, has_begun: bool) -> NoReturn:
        """`has_begun`: what is left is neither the old log nor the new one."""
        if has_begun:
            self._directory.fail_and_raise(error, doing)
        self._directory.refuse(error, doing)

    def _drop(self, segment: Segment) -> None:
        segment.remove_files()
        self._changes += 1
        self._let_go(segment)

    def _let_go(self, segment: Segment) -> None:
        if self._flushing is None:
            segment.close()
        else:
            self._retired.append(segment)  # a worker thread may be syncing its file

    def _rewind_producers(self, offset: int) -> None:
        """The state of producers as it was when the log ended at `offset`."""
        self._pending_snapshots = [snapshot for snapshot in self._pending_snapshots if snapshot[0] <= offset]
        self._snapshots = drop_snapshots_above(self._disk, self.path, self._snapshots, offset)
        if self._producers.reaches(offset):
            first_offset = self._segments[0].base_offset
            producers, start = load_producers(self._disk, self.path, self._snapshots, first_offset)
            for taken_at, captured in self._pending_snapshots:
                producers, start = ProducerState.restore(captured), taken_at
            replay(self._segments, start, offset, producers, start, None, self._clock.wall_ms())
            self._producers = producers

    # -- compaction --

    def candidate(self, high_watermark: int, now_ms: int) -> Candidate:
        """What there is to be compacted. Raises BrokerError."""
        self._require_usable()
        found = cleanable(
            self.extents(),
            first_dirty=self._first_dirty_offset,
            log_start_offset=self.stored_start_offset,  # what comes below may be back after a crash
            limit=min(high_watermark, self._recovery_point),
            now_ms=now_ms,
            min_compaction_lag_ms=self.config.min_compaction_lag_ms,
        )
        is_overdue = False
        max_lag_ms = self.config.max_compaction_lag_ms
        if max_lag_ms is not None and found.dirty_bytes:
            try:
                oldest = self._segments[self._segment_index(found.first_dirty)]
                oldest_ms = oldest.first_timestamp if oldest.first_timestamp >= 0 else oldest.newest_ms
            except OSError as error:
                self._directory.refuse(error, f"reading {self.path}", is_read=True)
            except CorruptRecord as error:
                self._report_damage(error)
            is_overdue = now_ms - oldest_ms > max_lag_ms
        return Candidate(found, self.config.min_cleanable_dirty_ratio, is_overdue)

    async def compact(self, what: Cleanable, key_map: KeyMap, pace: Pace) -> bool:
        """One pass over the log, see `compaction`. `key_map` is empty. False: it was given up, since the log was cut
        or is closed, compaction is paused, or segments are to be removed first. On return, what is below
        `first_dirty_offset` is compacted, on disk too.

        Raises CannotBeCleaned and BrokerError KAFKA_STORAGE_ERROR."""
        self._require_usable()
        assert self._compaction is None
        if self._is_compaction_paused:
            return False
        sources = self._sources(what.end)
        if not sources or not all(source.segment.stored for source in sources):
            return False  # a flush is about to write their indexes
        if self._removal_waits and self.has_old_segments:
            return False  # it is their turn
        self._compaction = Compaction(
            self._disk,
            self.path,
            sources,
            first_dirty=what.first_dirty,
            end=what.end,
            key_map=key_map,
            producer_ids=frozenset(producer_id for producer_id, _ in self._producers.capture()),
            index_interval_bytes=self.config.index_interval_bytes,
            delete_retention_ms=self.config.delete_retention_ms,
        )
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(self._compaction, sources, pace), name=f"compaction {self.partition}"
        )
        return await self._directory.unless_hung(self._compacting)

    async def pause_compaction(self) -> None:
        """On return no pass is under way, and none begins before `resume_compaction`. Raises BrokerError
        KAFKA_STORAGE_ERROR where the disk hangs."""
        self._is_compaction_paused = True
        await self._stop_compaction()

    def resume_compaction(self) -> None:
        self._is_compaction_paused = False

    async def _stop_compaction(self) -> None:
        if self._compaction is not None and self._compacting is not None:
            self._compaction.stop()
            await self._directory.unless_hung(asyncio.wait([self._compacting]))

    def _sources(self, end: int) -> list[Source]:
        """The segments that begin below `end`, without those that are only waiting for their removal."""
        return [
            Source(segment, extent.end_offset, extent.size)
            for segment, extent in zip(self._segments, self.extents(), strict=True)
            if extent.base_offset < end and extent.end_offset > self.stored_start_offset and segment is not self._active
        ]

    async def _compact(self, work: Compaction, sources: list[Source], pace: Pace) -> bool:
        try:
            for phase in (work.read_keys(), work.read_headers()):
                if not await self._in_slices(phase, work, pace):
                    return False
            of = {source.segment.base_offset: source for source in sources}
            extents = [
                SegmentExtent(base_offset, source.end_offset, source.size, -1)
                for base_offset, source in of.items()
                if base_offset < work.end
            ]
            for group in groups(extents, self.config.segment_bytes):
                if not await self._replace([of[extent.base_offset] for extent in group], work, pace):
                    return False
            self._first_dirty_offset = max(self._first_dirty_offset, work.end)
            return True
        except OSError as error:
            if work.stopped.is_set() and self._directory.failure is None:
                return False  # the files are not the log's any more
            self._directory.refuse(error, f"compacting {self.path}")
        except (CorruptRecord, ValueError) as error:
            if work.stopped.is_set():
                return False
            raise CannotBeCleaned(f"{self.partition} cannot be compacted: {error}") from error
        finally:
            self._compaction = self._compacting = None

    async def _in_slices(self, phase: Iterator[int], work: Compaction, pace: Pace) -> bool:
        while not work.stopped.is_set():
            self._directory.check()
            done = await self._directory.run(next, phase, None)
            if done is None:
                return not work.stopped.is_set()
            await pace(done, work.stopped)
        return False

    async def _replace(self, group: list[Source], work: Compaction, pace: Pace) -> bool:
        """Write a group of segments anew, and let the log have the result."""
        run, base = self._directory.run, group[0].segment.base_offset
        cleaned = await run(work.create, base)
        is_wanted = False
        try:
            whole = await self._in_slices(work.write(group, cleaned, self._now()), work, pace)
            is_wanted = whole and (len(group) > 1 or work.has_changed)
        finally:
            if not is_wanted:
                cleaned.close()
                if self._directory.failure is None:
                    await run(remove_cleaned, self._disk, self.path, base)
        if not is_wanted:
            return not work.stopped.is_set()  # while what was written was removed, too
        # From here to the swap's first step nothing may come between.
        old = [source.segment for source in group]
        first = self._segments.index(old[0])
        assert self._segments[first : first + len(old)] == old
        self._segments[first : first + len(old)] = [cleaned]
        self._swap = swap = Swap(self._disk, self.path, cleaned, group[-1].end_offset, old)
        for segment in old:
            self._let_go(segment)
        while not self._closed and self._directory.failure is None:
            try:
                await run(swap.carry_out)
                self._finish_swap()
                break
            except OSError as error:
                doing = f"swapping segments of {self.path}"
                if trouble_of(error) is not Trouble.SHORTAGE:
                    self._directory.fail_and_raise(error, doing)
                self._directory.tell_of_shortage(error, doing)
                await asyncio.sleep(SHORTAGE_PAUSE_S)
        return not work.stopped.is_set()

    def _now(self) -> Now:
        times = self._clock.wall_ms(), self._wall_clock_ahead_ms + self._monotonic_ms()
        return Now(min(times), max(times))

    def _monotonic_ms(self) -> int:
        return round(self._clock.monotonic() * 1_000)

    def _finish_swap(self) -> None:
        """Nothing is under way any more that changes names of segments. Raises OSError; it can be repeated."""
        swap = self._swap
        if swap is not None:
            swap.carry_out()
            swap.segment.indexes_stored()
            self._swap = None

    # -- flushing --

    async def flush(self) -> None:
        """On return, all that was appended before the call survives a power cut. Several callers share one fdatasync.

        Raises BrokerError KAFKA_STORAGE_ERROR: then the log directory is offline, unless it is a Shortage.
        """
        self._directory.check()
        target = self._log_end_offset
        while self._recovery_point < min(target, self._log_end_offset) and not self._closed:
            await self._wait_for_flush(self._flush_task())

    async def checkpoint(self) -> None:
        """`flush`, and write what makes a restart short: index entries and producer state up to now."""
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
        """Beside one that has begun at the log's end, which needs no file: every leader has one, and a controller that
        takes office, or a broker that dies, gives most logs another one."""
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
        self._flushes_again = self._written_now is not None  # without what was appended since
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
        """Raises BrokerError where it was not carried out."""
        await self._directory.unless_hung(flush)
        self._directory.check()
        if self._shortage is not None:
            raise shortage(f"flushing {self.path}", self._shortage)

    async def _flush(self) -> None:
        """Write one picture of the log. What fails ends up in the directory's `failure`."""
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
        self._begin_to_count()
        try:
            await self._directory.run(work.carry_out, self._directory.world)
        except OSError as error:
            if trouble_of(error) is not Trouble.SHORTAGE:
                self._directory.fail(error, f"flushing {self.path}")
                return
            # Nothing that was to be opened was written to, and no fdatasync has failed: the next flush does it all.
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
        """As `checkpoint`, but in this turn of the loop, which waits for the disk. No flush may be under way. Raises
        BrokerError KAFKA_STORAGE_ERROR."""
        assert self._written_now is None
        self._take_snapshot()
        work = self._picture()
        self._begin_to_count()
        try:
            work.carry_out(self._directory.world)
        except OSError as error:
            self._directory.refuse(error, f"flushing {self.path}")
        self._flushed(work)

    def _flushed(self, work: Flush) -> None:
        """It was carried out."""
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
            work.indexes[:0] = segment.index_writes(all_entries=snapshot_due or not is_active)
            if not is_active and not segment.stored:
                work.sealed.append(segment)
        if self._epochs.version != self._written_epochs_version:
            work.epochs = encode_epochs(self._epochs.entries)
        if work.snapshots:
            begins = {segment.base_offset for segment in self._segments}
            others = [offset for offset in self._snapshots if offset not in begins]
            work.old_snapshots = others[:-_KEPT_SNAPSHOTS]
        return work

    # -- moving to another log directory --

    def go_on_as(self, original: "Log") -> None:
        """This log has the batches of `original`, up to its end. Take over the rest: where it begins, what it knows
        of leader epochs and producers, how it is configured. Raises BrokerError, and LogInvariantViolated where the
        logs do not match."""
        self.move_log_start_offset(original.log_start_offset)
        ends = self._log_start_offset, self._log_end_offset
        if ends != (original.log_start_offset, original.log_end_offset):
            raise LogInvariantViolated(f"{self.path} holds {ends}, which is not what {original!r} has")
        self._epochs, self._written_epochs_version = LeaderEpochCache(original._epochs.entries), -1
        self._producers = ProducerState.restore(original.producers())
        self._first_dirty_offset = original.first_dirty_offset
        self.configure(original.config)

    def moved(self, path: str) -> None:
        """Its directory has this path from now on. No flush may be under way."""
        self.path = path
        for segment in self._segments:
            segment.moved(path)

    # -- the end --

    async def close(self) -> None:
        """Wait for a flush that is under way and close the files. Flushes nothing: see `checkpoint`. Raises BrokerError
        KAFKA_STORAGE_ERROR where the disk hangs: then files stay open that a worker thread may be at work with."""
        self._closed = True
        self._flush_in_time()
        await self._stop_compaction()
        if self._flushing is not None:
            await self._directory.unless_hung(self._flushing)
        if self._removal is not None and self._removing is not None:
            for segment in self._removal.stop():
                segment.close()
            await self._directory.unless_hung(self._removing)
        for segment in self._segments:
            segment.close()

    def _require_usable(self) -> None:
        if self._directory.failure is not None:
            self._directory.check()
        if self._closed:
            raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"the log of {self.partition} is closed")


def _flush_after_bytes(config: LogConfig) -> int:
    return 0 if config.synced else config.flush_bytes
