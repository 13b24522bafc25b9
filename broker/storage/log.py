"""One replica's log: a sequence of segments, of which the last one is appended to.

The problem: a produce request must cost little more than its CRC and one write. Yet after a crash, a power cut or a
disk failure the log must hold everything that it promised, and everything derived from it (indexes, leader epochs,
producer state) must agree with it.

The choice: **the batches are the truth, and one number says how far they are safe.** An append only writes batches and
moves numbers in memory; the rest reaches its files with the next flush (`flushing`). After a crash, recovery ignores
everything on disk at or above the recovery point except the batches, and rebuilds it from their headers (`recovery`).
So files need not be written in order, with one exception: a truncation below the recovery point (or the high watermark)
first lowers the number on disk, synchronously, because the records that the log holds there next are neither flushed
nor committed. That is rare, since truncated records are the youngest.

The same holds for leader epochs. KAFKA-7415 requires that a leader knows its epoch's start offset before its first
append: it does, in memory, and every batch carries its epoch to disk. An epoch without a record needs no file, since a
broker that restarts leads in a new epoch.

Appends and truncations are synchronous, so that nothing runs between validation, offset assignment and the move of the
end offset. No caller's buffer is changed: the leader's offset and epoch are in the first 16 bytes of each batch, which
are written from a new piece beside the rest of the received one, in one vectored write.

Rejected: preallocated and memory-mapped index files (a torn one must be rebuilt anyway, and mapping turns I/O errors
into signals); waiting for the disk in each append, whatever the topic's setting (as in Kafka, the replicas are the
first line of defence).
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from minibroker.broker.storage.cleanup import CleanedLog
from minibroker.broker.storage.descriptors import may_roll
from minibroker.broker.storage.flushing import write_topic_id
from minibroker.broker.storage.indexes.aborted_index import AbortedTransaction
from minibroker.broker.storage.indexes.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.leader_epochs import LeaderEpochCache
from minibroker.broker.storage.producer_state import NO_OFFSET, Producer, ProducerBatch, ProducerState
from minibroker.broker.storage.recovery.recovery import replay
from minibroker.broker.storage.segment import Appended, Segment
from minibroker.broker.storage.snapshots import (
    drop_snapshots_above,
    load_producers,
    remove_told,
    write_told,
)
from minibroker.broker.storage.validator import Looked, check_acceptable, read_headers
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import NO_EPOCH
from minibroker.protocol.records import (
    CRC_END,
    HEADER_SIZE,
    LIMIT,
    NO_TIMESTAMP,
    TIMES_END,
    BatchHeader,
    Buffer,
    CorruptRecord,
    EndTransactionMarker,
    decode_control_batch,
    encode_control_batch,
    parse_header,
    stamp,
    validate_batch,
    with_append_time,
)

MOST_PRODUCERS_IN_ALL = 250_000
"""Producers that the logs of a directory know: about 90 MB. Beyond that, each log that meets another one keeps those
FAIR_PRODUCERS that wrote last."""
FAIR_PRODUCERS = 500
MOST_PENDING_PRODUCERS = 100_000
"""Producers in snapshots that wait for a flush: about 10 MB. A segment that begins without a snapshot is removed
together with later ones."""

_NO_SEGMENT = "files have taken their share of the descriptors, so the log goes on in its last segment"

_MAX_PIECES = 512
"""A vectored write takes at most 1,024 pieces (IOV_MAX)."""


class AppendInfo(NamedTuple):
    """The position of a record set in the log."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    duplicate: bool = False
    """The record set was in the log already, so nothing was written."""
    log_append_time_ms: int = NO_TIMESTAMP
    """The timestamp that the leader gave the records; -1: none."""

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1


class LogInvariantViolated(RuntimeError):
    """The caller broke the log's contract; going on would make replicas differ."""


class Log(CleanedLog):
    """Belongs to the event loop. Appends, reads and truncations are synchronous; flushes, compaction, removal and
    closing are not. Searches are in `search`.

    Every method raises BrokerError: KAFKA_STORAGE_ERROR once the log directory has failed (this call's I/O error
    included; but see `Shortage`), NOT_LEADER_OR_FOLLOWER once the log is closed.
    """

    # -- appending --

    def append_as_leader(
        self, records: Buffer, leader_epoch: int, now_ms: int, *, looked: Looked = Looked.NOT
    ) -> AppendInfo:
        """Give the batches their offsets and `leader_epoch` and append them, all or none. `records` is not changed.
        `looked`: as for `check_acceptable`.

        Raises BrokerError, with nothing written: CORRUPT_MESSAGE, INVALID_RECORD, MESSAGE_TOO_LARGE,
        RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, and as `ProducerState.check`. A repetition of one of a producer's last
        five batches gets the offsets of the first append, whatever the present settings: it is in the log.
        """
        self.require_usable()
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
            self._update_producer(first, first_offset, now_ms)
        return AppendInfo(
            first_offset, offset - 1, max_timestamp, log_append_time_ms=now_ms if is_timed else NO_TIMESTAMP
        )

    def append_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        marker: EndTransactionMarker,
        leader_epoch: int,
        now_ms: int,
        *,
        raises_epoch: bool = False,
    ) -> AppendInfo:
        """End the producer's transaction in this log, as leader. A marker that ends nothing is appended as well: it
        moves the producer's epoch, so that a late batch of the ended transaction is refused. `raises_epoch`: as for
        `ProducerState.check_marker`.

        Raises BrokerError, with nothing written: as `ProducerState.check_marker`."""
        self.require_usable()
        self._producers.check_marker(producer_id, producer_epoch, marker, raises_epoch=raises_epoch)
        batch = encode_control_batch(
            marker,
            timestamp=now_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_offset=self._log_end_offset,
            partition_leader_epoch=leader_epoch,
        )
        return self.append_as_follower(batch, leader_epoch)

    def append_as_follower(self, records: Buffer, leader_epoch: int = LIMIT) -> AppendInfo:
        """Append batches as the leader in that epoch has them, offsets and epochs included.

        They must begin at the log's end or after it. Gaps are always accepted: compaction leaves them, may be switched
        on before this broker hears of it, and leaves its gaps behind when it is switched off.
        Raises BrokerError CORRUPT_MESSAGE and LogInvariantViolated, with nothing written.
        """
        self.require_usable()
        appended: list[Appended] = []
        headers: list[BatchHeader] = []
        markers: dict[int, EndTransactionMarker] = {}
        position = 0
        offset, epoch = self._log_end_offset, self._epochs.latest
        max_timestamp = -1
        end = len(records)
        while position < end:
            try:
                header = parse_header(records, position)
                validate_batch(records, header, position)
                if header.is_control:
                    markers[header.base_offset] = decode_control_batch(records, header, position)
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
                self._update_producer(header, header.base_offset, now_ms, markers.get(header.base_offset))
        return AppendInfo(headers[0].base_offset, offset - 1, max_timestamp)

    def check_begins(self, records: Buffer) -> None:
        """Check records that a native producer sent as columns, before the append: see `ProducerState.check_begins`."""
        with contextlib.suppress(CorruptRecord):  # the append reports it
            self._producers.check_begins(parse_header(records))

    def knows_producer(self, producer_id: int) -> bool:
        """Whether the producer has written here and is not forgotten."""
        return self._producers.get(producer_id) is not None

    def repeats(self, records: Buffer) -> bool:
        """Whether the records are in the log already. If so, only their CRC needs to be checked."""
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

    def _update_producer(
        self, header: BatchHeader, first_offset: int, now_ms: int, marker: EndTransactionMarker | None = None
    ) -> None:
        producers = self._producers
        known = len(producers)
        ended = producers.update(header, first_offset, now_ms, marker)
        if len(producers) != known:
            self._count_producers(len(producers) - known)
        if ended is not None and ended.is_aborted:
            self._active.aborted.append(AbortedTransaction.of(ended))

    def _count_producers(self, gained: int) -> None:
        directory, producers = self._directory, self._producers
        directory.producers += gained
        if directory.producers > MOST_PRODUCERS_IN_ALL and len(producers) > FAIR_PRODUCERS:
            before = len(producers)
            producers.forget_oldest(FAIR_PRODUCERS)
            directory.producers -= before - len(producers)

    def _repetition(self, header: BatchHeader, batch: ProducerBatch) -> AppendInfo:
        times = header.max_timestamp, NO_TIMESTAMP
        if self.config.log_append_time:
            times = self._times_at(batch.first_offset) or times
        return AppendInfo(batch.first_offset, batch.last_offset, times[0], True, times[1])

    def _times_at(self, offset: int) -> tuple[int, int] | None:
        """Return the largest timestamp of the batch at `offset`, and the one that its leader gave it. None if the batch
        cannot be read, or is compacted or deleted."""
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
                is_full = max(active.size + size, last_offset - active.base_offset) > MAX_RELATIVE_OFFSET
                if is_full or may_roll(self._disk, active.size):
                    self.roll()
                    active = self._active
                else:
                    self._directory.tell_of_shortage(_NO_SEGMENT, f"beginning a segment after {active.path}")
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

    def _waited_ms(self, timestamp: int) -> int:
        """Return how much younger a batch is than the active segment: than the segment's first batch, or if that has no
        timestamp, than the segment's creation here (Kafka's `LogSegment.timeWaitedForRoll`)."""
        first = self._active.first_timestamp
        return timestamp - first if first >= 0 else self._clock.wall_ms() - self._active_since_ms

    def roll(self) -> None:
        """Seal the active segment, unless it is empty, and begin a new one."""
        if not self._active.size:
            return
        try:
            if len(self._segments) == 1 and not self._has_durable_id:
                # If neither segment's name is on disk, a power cut may keep the second one alone, and the log would
                # seem to begin there. Needed at most once: if a log's first segment is full before its first flush.
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
        if len(self._pending_snapshots) * len(self._producers) <= MOST_PENDING_PRODUCERS:
            self._pending_snapshots.append((self._log_end_offset, self._producers.capture()))
        self._flush_in_background()

    def _create_segment(self, base_offset: int) -> Segment:
        interval = self.config.index_interval_bytes
        return Segment.create(self._disk, self.path, base_offset, interval, undisturbed=self._flushing is None)

    # -- reading --

    def read(self, offset: int, max_bytes: int, up_to_offset: int, min_one: bool = True) -> bytes:
        """Return whole batches from the one that holds `offset` on: at most `max_bytes` (with `min_one`, the first one
        at any size), and none that reaches `up_to_offset`. Empty if there is none.

        Raises BrokerError OFFSET_OUT_OF_RANGE (below the log's start or past its end), CORRUPT_MESSAGE (damaged disk).
        """
        self.require_usable()
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
            self.report_damage(error)
        return b""

    def check(self, data: Buffer, offset: int) -> None:
        """Check that batches read at `offset`, and the one before them, match their CRC and have the right offsets and
        epochs, which Kafka's CRC does not cover. A plain fetch does not check: this takes a millisecond or more for
        each 4 MiB. Raises BrokerError CORRUPT_MESSAGE."""
        if offset > self._log_start_offset:
            # A follower may have accepted a wrong batch, and notices only now that the next one does not fit.
            self._check(self.read(offset - 1, 1, offset), offset - 1)
        self._check(data, offset)

    def _check(self, data: Buffer, offset: int) -> None:
        position, at = 0, offset
        try:
            while position < len(data):
                header = parse_header(data, position)
                validate_batch(data, header, position)
                # The first batch may begin before the offset, even before the log's start, below which no epoch is
                # known.
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
            self.report_damage(error)

    def bytes_between(self, offset: int, up_to_offset: int) -> int:
        """Return the bytes of the batches from `offset` to `up_to_offset`, both within the log."""
        self.require_usable()
        if offset >= up_to_offset:
            return 0
        first, last = self._segment_index(offset), self._segment_index(up_to_offset)
        try:
            total = self._segments[last].locate(up_to_offset) - self._segments[first].locate(offset)
        except OSError as error:
            self.read_failed(error)
        except CorruptRecord as error:
            self.report_damage(error)
        return total + sum(segment.size for segment in self._segments[first:last])

    # -- transactions --

    def last_stable_offset(self, high_watermark: int) -> int:
        """As `ProducerState.last_stable_offset`."""
        return self._producers.last_stable_offset(high_watermark)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer has a transaction open here in this epoch."""
        producer = self._producers.get(producer_id)
        return producer is not None and producer.open_since != NO_OFFSET and producer.epoch == producer_epoch

    def coordinator_epoch_of_earlier(self, producer_id: int, producer_epoch: int) -> int | None:
        """Return the coordinator epoch for a marker, at least 0, if the producer has a transaction open here in an
        epoch before this one."""
        producer = self._producers.get(producer_id)
        if producer is None or producer.open_since == NO_OFFSET or producer.epoch >= producer_epoch:
            return None
        return max(producer.coordinator_epoch, 0)

    def open_since(self, producer_id: int) -> int:
        """Return the first offset of the producer's open transaction, or NO_OFFSET."""
        producer = self._producers.get(producer_id)
        return NO_OFFSET if producer is None else producer.open_since

    def has_marker(self, producer_id: int, marker: EndTransactionMarker) -> bool:
        """As `ProducerState.has_marker`."""
        return self._producers.has_marker(producer_id, marker)

    def check_epochs_of_open_transaction(self, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> None:
        """As `ProducerState.check_epochs_of_open_transaction`."""
        self._producers.check_epochs_of_open_transaction(producer_id, producer_epoch, coordinator_epoch)

    def has_late_transaction(self, since_ms: int) -> bool:
        """As `ProducerState.has_late_transaction`."""
        return self._producers.has_late_transaction(since_ms)

    def forget_replicated(self, high_watermark: int) -> None:
        """As `ProducerState.forget_replicated`."""
        self._producers.forget_replicated(high_watermark)

    def has_aborted_since(self, offset: int) -> bool:
        """Whether an abort marker may stand at `offset` or later."""
        return any(len(segment.aborted) for segment in self.segments_from(offset))

    def aborted_transactions(self, offset: int, up_to_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions with records from `offset` to below `up_to_offset`, which is at most the last
        stable offset. A few may be among them that have no record there."""
        found: list[AbortedTransaction] = []
        for segment in self.segments_from(offset):
            for aborted in segment.aborted.since(offset):
                if aborted.first_offset < up_to_offset:
                    found.append(aborted)
                if aborted.last_stable_offset >= up_to_offset:
                    return found
        return found

    # -- leader epochs --

    def assign_epoch_start(self, epoch: int, offset: int) -> None:
        """Let `epoch` begin at `offset`: at the log's end for a replica that becomes leader."""
        self.require_usable()
        self._epochs.assign(epoch, offset)

    def end_offset_for(self, requested_epoch: int) -> tuple[int, int]:
        """As `LeaderEpochCache.end_offset_for`."""
        return self._epochs.end_offset_for(requested_epoch, self._log_end_offset)

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the record at `offset`, or NO_EPOCH."""
        return self._epochs.epoch_at(offset)

    @property
    def producer_count(self) -> int:
        return len(self._producers)

    def producers(self) -> list[tuple[int, Producer]]:
        """Return the idempotent producers that the log knows, with their ids."""
        return self._producers.capture()

    def producers_below(self, offset: int) -> list[tuple[int, Producer]]:
        """As `ProducerState.below`."""
        return self._producers.below(offset)

    # -- truncating --

    def truncate_to(self, offset: int) -> None:
        """Cut all records from `offset` on, with the whole batch that holds `offset`. If `offset` is below the log's
        start, empty the log and begin there. In any case forget epochs that wrote nothing below the new end: a leader
        that was replaced before its first append leaves one (KAFKA-7415)."""
        self.require_usable()
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
            # End at the batch before, even if compaction left a gap after it: no reader may wait for its offsets.
            offset = segment.end_before(position)
            self._begin_cut(offset)
            has_begun = True
            # Backwards from the end, so that a crash leaves a log without a gap.
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
            self.report_damage(error)

    def truncate_fully_and_start_at(
        self, offset: int, previous_epoch: int = NO_EPOCH, producers: Sequence[tuple[int, Producer]] = ()
    ) -> None:
        """Drop everything: the log is empty, and its next offset is `offset`. `previous_epoch`: the epoch of the record
        before `offset`, if it is known. `producers`: those that wrote before `offset` (`ProducerState.below`)."""
        self.require_usable()
        has_begun = False
        try:
            if producers:  # first, while a full disk has not changed the log yet
                write_told(self._disk, self.path, offset, producers)
            # Down to 0: a power cut may keep any of the removed files, and recovery must look for gaps.
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
            # After a power cut no old snapshot may seem to belong to this log, which must begin here.
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
        """Hide the records below `offset` from readers. The start never moves back. Raises BrokerError:
        OFFSET_OUT_OF_RANGE, or KAFKA_STORAGE_ERROR with the start unchanged.

        `remove_old_segments` frees their disk space, a whole segment at a time. If no record is left, the active
        segment is sealed for that."""
        self.require_usable()
        if offset > self._log_end_offset:
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{self.partition} ends at {self._log_end_offset}")
        if offset > self._log_start_offset:
            if offset == self._log_end_offset:
                self.roll()  # first: if it fails, nothing has changed
            self._log_start_offset = offset  # the epochs' file must not be ahead of the one that has this

    def _begin_cut(self, offset: int, *, keep: bool = True) -> None:
        """Begin a truncation to `offset`: nothing relies any more on the results of a flush under way, on a checkpoint
        beyond `offset`, or, unless `keep`, on any snapshot."""
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
        """`has_begun`: the files hold neither the old log nor the new one."""
        if has_begun:
            self._directory.fail_and_raise(error, doing)
        self._directory.refuse(error, doing)

    def _drop(self, segment: Segment) -> None:
        segment.remove_files()
        self._changes += 1
        self._let_go(segment)

    def _rewind_producers(self, offset: int) -> None:
        """Restore the producers' state as it was when the log ended at `offset`."""
        self._pending_snapshots = [snapshot for snapshot in self._pending_snapshots if snapshot[0] <= offset]
        self._snapshots = drop_snapshots_above(self._disk, self.path, self._snapshots, offset)
        if self._producers.reaches(offset):
            first_offset = self._segments[0].base_offset
            producers, start = load_producers(self._disk, self.path, self._snapshots, first_offset)
            for taken_at, captured in self._pending_snapshots:
                producers, start = ProducerState.restore(captured), taken_at
            replay(self._segments, start, offset, producers, start, None, self._clock.wall_ms())
            producers.keep_unreplicated(self._producers, offset)
            self._producers = producers

    # -- moving to another log directory --

    def go_on_as(self, original: "Log") -> None:
        """Take over the start, leader epochs, producers and settings of `original`, all of whose batches this log has.
        Raises BrokerError, and LogInvariantViolated if the logs do not match."""
        self.move_log_start_offset(original.log_start_offset)
        ends = self._log_start_offset, self._log_end_offset
        if ends != (original.log_start_offset, original.log_end_offset):
            raise LogInvariantViolated(f"{self.path} holds {ends}, which is not what {original!r} has")
        self._epochs, self._written_epochs_version = LeaderEpochCache(original._epochs.entries), -1
        self._producers = ProducerState.restore(original.producers())
        self._first_dirty_offset = original.first_dirty_offset
        self.configure(original.config)

    # -- the end --

    async def close(self) -> None:
        """Wait for a flush that is under way and close the files. To flush, call `checkpoint` first. Raises BrokerError
        KAFKA_STORAGE_ERROR if the disk hangs; then the files stay open, since a worker thread may use them."""
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
