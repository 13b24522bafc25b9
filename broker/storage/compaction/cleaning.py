"""Compaction of a log (Kafka's Cleaner): the latest record of each key stays, at its offset, and earlier ones go.

One pass: read the dirty part, as far as its keys fit into the map (`KeyMap`); then write every segment below that end
anew, from the log's beginning, without the records that the map has a later one for. A log with more new keys than the
map can hold takes several passes. Small segments that are neighbours become one.

What stays, and why:
- offsets, timestamps, leader epochs, producers' sequences. A batch loses records, nothing else changes.
- A record without a value, a tombstone, deletes its key. Readers of the deleted record must find it, so a batch gets,
  when it is first cleaned, the time at which its tombstones may go: `delete.retention.ms` later (KIP-534; KAFKA-4529
  used the age of a file). A wall clock may be set, and set right again, so two clocks count (`Now`); only across a
  start of the broker there is the wall clock alone. Batches after the end of the pass get none, since the records that
  their tombstones delete are still there.
- Records of an aborted transaction go, whatever their keys. A pass ends below the last stable offset, so every
  transaction in it is decided.
- A transaction's marker stays as long as a batch of that transaction does, or whoever reads the log, recovery included,
  would take the transaction for open. Then it gets a time, as tombstones do: a reader that has begun to skip an aborted
  transaction must find its end. An abort leaves the index together with its marker: readers skip a listed producer up
  to its next marker, which would be that of a later transaction. The last marker of a producer that the log knows stays
  as well, since it has the producer's epoch.
- The first batch of each leader epoch, emptied if need be: a log that is copied, or recovered, learns from it where the
  epoch begins, and tells deposed leaders by that where to cut off what was never acknowledged (KIP-101).
- Of each producer that the log knows its last five batches, emptied if need be: a repetition must be recognised also by
  a broker that has read nothing but this log.
- The last batch of each segment, emptied if need be: where a segment ends before the next one begins, recovery takes
  that for damage.

All work happens in worker threads, in slices, on files that the pass opens for itself: changes of the log cannot
disturb its reading, only make it useless. So when the log is cut, or is closed, the pass is given up (`stop`), and the
segment under way with it. Those that were swapped in before stay.

A batch with a wrong CRC ends the pass: written anew, it would seem right. A batch with a right CRC is as its producer
sent it, which may be anything, also in a topic that was not always compacted. A batch that cannot be decoded, or
encoded again, stays as it is, so that it does not keep its log from ever being cleaned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minibroker.broker.storage.compaction.key_map import KeyMap
from minibroker.broker.storage.compaction.swap import CLEANED_SUFFIX
from minibroker.broker.storage.indexes.aborted_index import AbortedTransactions
from minibroker.broker.storage.indexes.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.broker.storage.segment import Appended, Segment
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import (
    CRC_END,
    HEADER_SIZE,
    NO_LEADER_EPOCH,
    NO_TIMESTAMP,
    BatchHeader,
    CorruptRecord,
    DecodedBatch,
    check_header,
    decode_batch,
    parse_header,
    stamp,
    validate_batch,
    with_records,
    without_records,
)
from minibroker.protocol.world import Disk

SLICE_BYTES = 64 * 1024
"""How much is read and written in one go: a millisecond, for which the event loop may have to wait for the
interpreter's lock."""
_SYNC_BYTES = 32 * 1024**2
_HEADERS_BYTES = 8 * 1024


class CannotBeCleaned(MinibrokerError):
    """The log holds what compaction cannot read. Says where."""


class Source(NamedTuple):
    """A segment to read. Its file is opened by its name."""

    segment: Segment
    end_offset: int
    size: int


class Now(NamedTuple):
    """The time by the clock that is behind, and by the one that is ahead: the wall clock, and a clock that continues
    the wall time of the log's opening, however the wall clock is set since. From a `latest_ms` to a later `earliest_ms`
    their difference has passed by both."""

    earliest_ms: int
    latest_ms: int


class Compaction:
    """One pass. Its three generators are run by worker threads, a slice for each `next`, which is the number of bytes
    read and written; one after the other. They raise CorruptRecord, ValueError, OSError."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        sources: Sequence[Source],
        *,
        first_dirty: int,
        end: int,
        key_map: KeyMap,
        producer_ids: frozenset[int],
        aborted: AbortedTransactions,
        has_whole_log: bool,
        index_interval_bytes: int,
        delete_retention_ms: int,
    ) -> None:
        """`sources` end at `end` or later, and `key_map` is empty. `aborted`: all transactions whose markers are in the
        log. `has_whole_log`: `sources` begin with the log's first segment; if not, no marker goes."""
        self.end = first_dirty
        """The offset below which the log is clean after this pass. `read_keys` sets it: to `end`, or to less if the map
        is full."""
        self.has_changed = False
        """The segment written last is not, byte for byte, what it was made from."""
        self.stopped = asyncio.Event()
        self._disk = disk
        self._directory = directory
        self._sources = sources
        self._first_dirty = first_dirty
        self._wanted_end = end
        self._key_map = key_map
        self._producer_ids = producer_ids
        self._needed: frozenset[int] = frozenset()
        """The last offsets of producers' last batches and markers, and of the first batches of leader epochs."""
        self._aborted = aborted
        self._has_whole_log = has_whole_log
        self._unended: set[int] = set()
        """The producers with a transactional batch that stays, and whose marker has not come yet."""
        self.dropped_markers: set[int] = set()
        """The offsets of the markers that did not stay."""
        self._index_interval_bytes = index_interval_bytes
        self._delete_retention_ms = delete_retention_ms

    def stop(self) -> None:
        """Give up, soon. In the event loop."""
        self.stopped.set()

    # -- 1: the keys --

    def read_keys(self) -> Iterator[int]:
        done = 0
        for source in self._sources:
            if source.end_offset <= self._first_dirty:
                continue
            for header, data in _batches(self._disk, source):
                if header.last_offset < self._first_dirty:
                    continue
                if header.records_count and not header.is_control and not self._aborted.includes(header):
                    batch = _decoded(data, header)
                    if batch is not None and batch.keys is not None:
                        if not self._key_map.has_room_for(batch.count):
                            return
                        self._key_map.put(batch.keys, batch.offsets)
                self.end = header.next_offset
                done += header.size
                if done >= SLICE_BYTES:
                    yield done
                    done = 0
        self.end = self._wanted_end
        yield done

    # -- 2: the producers, and the leader epochs --

    def read_headers(self) -> Iterator[int]:
        """After the keys."""
        last_batches = ProducerState()
        epoch, first_of_epochs = NO_LEADER_EPOCH, set[int]()
        last_markers: dict[int, int] = {}
        for source in self._sources:
            for header, read in _headers(self._disk, source):
                if header.base_offset >= self.end:
                    break
                if header.partition_leader_epoch > epoch:
                    epoch = header.partition_leader_epoch
                    first_of_epochs.add(header.last_offset)
                if header.producer_id in self._producer_ids:
                    last_batches.update(header, header.base_offset, 0)
                    if header.is_control:
                        last_markers[header.producer_id] = header.last_offset
                if read:
                    yield read
        of_producers = {batch.last_offset for _, producer in last_batches.capture() for batch in producer.batches}
        self._needed = frozenset(first_of_epochs.union(of_producers, last_markers.values()))

    # -- 3: each group of segments --

    def write(self, group: Sequence[Source], cleaned: Segment, now: Now) -> Iterator[int]:
        """Fill `cleaned`, which is empty, with what stays of the group; it is on disk then, without indexes."""
        pieces: list[bytes | bytearray] = []
        appended: list[Appended] = []
        read = waiting = unsynced = 0
        self.has_changed = False
        for number, source in enumerate(group):
            position = 0
            for header, data in _batches(self._disk, source):
                position += header.size
                read += header.size
                is_last = number == len(group) - 1 and position == source.size
                kept = self._kept(header, data, is_last, now)
                self.has_changed = self.has_changed or kept is not data
                if kept is not None:
                    pieces.append(kept)
                    max_timestamp = header.max_timestamp if kept is data else parse_header(kept).max_timestamp
                    appended.append(Appended(header.last_offset, max_timestamp, len(kept)))
                    waiting += len(kept)
                if read + waiting >= SLICE_BYTES:
                    _append(cleaned, pieces, appended)
                    unsynced += waiting
                    if unsynced >= _SYNC_BYTES:  # not all at the end, which would hold up the log's own flushes
                        cleaned.file.fdatasync()
                        unsynced = 0
                    yield read + waiting
                    read = waiting = 0
                    pieces, appended = [], []
        _append(cleaned, pieces, appended)
        cleaned.seal()
        cleaned.file.fdatasync()
        if cleaned.max_timestamp == NO_TIMESTAMP:  # the segment's age is that of its records, not of its compaction
            cleaned.file.set_modified_ms(max(source.segment.newest_ms for source in group))
        yield read + waiting

    def create(self, base_offset: int) -> Segment:
        """An empty segment for `write`, whatever an earlier attempt left under its name."""
        cleaned = Segment(self._disk, self._directory, base_offset, self._index_interval_bytes, suffix=CLEANED_SUFFIX)
        if cleaned.size:
            cleaned.file.truncate(0)
            cleaned.size = 0
        return cleaned

    def _kept(self, header: BatchHeader, data: bytes, is_last: bool, now: Now) -> bytes | bytearray | None:
        """Return the rest of a batch: `data` itself if everything stays, None if nothing does."""
        if header.base_offset >= self.end:
            return data
        is_needed = is_last or header.last_offset in self._needed
        if header.is_control:
            return self._kept_marker(header, data, is_needed, now)
        kept = self._kept_records(header, data, is_needed, now)
        if header.is_transactional and kept is not None:
            self._unended.add(header.producer_id)
        return kept

    def _kept_marker(self, header: BatchHeader, data: bytes, is_needed: bool, now: Now) -> bytes | bytearray | None:
        has_batches = header.producer_id in self._unended
        self._unended.discard(header.producer_id)
        if has_batches or is_needed or not self._has_whole_log:
            return data
        horizon_ms = self._horizon_ms(header)
        if horizon_ms is not None:
            if horizon_ms > now.earliest_ms:
                return data
            self.dropped_markers.add(header.last_offset)
            return None
        batch = _decoded(data, header)
        written = None if batch is None else _written(batch, [0], now.latest_ms + self._delete_retention_ms)
        return data if written is None else _in_place(written)

    def _horizon_ms(self, header: BatchHeader) -> int | None:
        """From when on the batch's tombstones, or the marker, may go. A batch copied from a replica that has compacted
        it carries that replica's time, set when its own log was clean."""
        return header.delete_horizon_ms if header.base_offset < self._first_dirty else None

    def _kept_records(self, header: BatchHeader, data: bytes, is_needed: bool, now: Now) -> bytes | bytearray | None:
        if not header.records_count:
            return data if is_needed else None
        if self._aborted.includes(header):
            return _in_place(without_records(header)) if is_needed else None
        batch = _decoded(data, header)
        if batch is None:
            return data
        horizon_ms = self._horizon_ms(header)
        tombstones_go = horizon_ms is not None and horizon_ms <= now.earliest_ms
        keys, values = batch.keys, batch.values
        if keys is None:
            kept = []
        else:
            latest = self._key_map.latest(keys)
            kept = [
                index
                for index, (newest, offset) in enumerate(zip(latest, batch.offsets, strict=True))
                if offset >= newest and keys[index] is not None
            ]
        if tombstones_go:
            kept = [index for index in kept if values[index] is not None]
        if not kept:
            return _in_place(without_records(header)) if is_needed else None
        written: bytearray | None = None
        if horizon_ms is None and any(values[index] is None for index in kept):
            # Where there is no room for the new timestamp deltas, these tombstones stay.
            written = _written(batch, kept, now.latest_ms + self._delete_retention_ms)
        if written is None and len(kept) < batch.count:
            written = _written(batch, kept)
        return data if written is None else _in_place(written)


def _decoded(data: bytes, header: BatchHeader) -> DecodedBatch | None:
    try:
        return decode_batch(data, header, check_crc=False, to_be_encoded=True, gives_way=True)
    except CorruptRecord:
        return None


def _written(batch: DecodedBatch, kept: Sequence[int], delete_horizon_ms: int | None = None) -> bytearray | None:
    try:
        return with_records(batch, kept, delete_horizon_ms)
    except ValueError:
        return None


def _in_place(batch: bytearray) -> bytearray:
    """With the CRC of a batch that has its place in a log."""
    header = parse_header(batch)
    batch[:CRC_END] = stamp(header, header.base_offset, header.partition_leader_epoch)
    return batch


def _append(cleaned: Segment, pieces: list[bytes | bytearray], appended: list[Appended]) -> None:
    if appended:
        data = b"".join(pieces)
        if cleaned.size + len(data) > MAX_RELATIVE_OFFSET:
            raise ValueError(f"{cleaned.path} would become larger than its index can tell")
        cleaned.append([data], appended)


def _batches(disk: Disk, source: Source) -> Iterator[tuple[BatchHeader, bytes]]:
    """All batches of a segment, their CRCs checked."""
    file = disk.open(source.segment.path)
    try:
        position = chunk_position = 0
        chunk = b""
        while position < source.size:
            at = position - chunk_position
            if at + HEADER_SIZE > len(chunk):
                chunk, chunk_position, at = file.pread(SLICE_BYTES, position), position, 0
            try:
                header = parse_header(chunk, at)
                check_header(header)
                if at + header.size > len(chunk):
                    size = min(max(SLICE_BYTES, header.size), source.size - position)
                    chunk, chunk_position, at = file.pread(size, position), position, 0
                validate_batch(chunk, header, at)
            except CorruptRecord as error:
                raise CorruptRecord(f"{source.segment.path}, position {position}: {error}") from error
            yield header, chunk[at : at + header.size]
            position += header.size
    finally:
        file.close()


def _headers(disk: Disk, source: Source) -> Iterator[tuple[BatchHeader, int]]:
    """The header of each batch, and how many bytes had to be read for it."""
    file = disk.open(source.segment.path)
    try:
        position = chunk_position = 0
        chunk = b""
        while position < source.size:
            read = 0
            at = position - chunk_position
            if at + HEADER_SIZE > len(chunk):
                chunk, chunk_position, at = file.pread(_HEADERS_BYTES, position), position, 0
                read = len(chunk)
            header = parse_header(chunk, at)
            check_header(header)
            yield header, read
            position += header.size
    finally:
        file.close()
