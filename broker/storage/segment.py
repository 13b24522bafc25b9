"""A segment: batches one after the other in a file, and the two indexes that find them (Kafka's LogSegment).

Reading never decodes: a batch is found by its header, and leaves as the bytes that it is. Where a read begins is
mostly known already, because readers go on where they stopped and followers read what was just appended: `_known`
remembers where the batches of the last few such offsets begin. Otherwise the index says where to look, and at most
`index_interval_bytes` of headers are walked. Where a read ends is found the same way, so the bytes of the batches are
read once, by one call, and not copied again.

An index entry is believed only where the batch that it speaks of is there: a bit that has flipped in an index would
otherwise make a reader skip records in silence. Where it is not, the segment is walked from its beginning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedIndex
from minibroker.broker.storage.indexes.index import (
    OFFSET_INDEX,
    TIME_INDEX,
    Entry,
    InvalidIndex,
    Layout,
    SparseIndex,
    StoredIndex,
)
from minibroker.protocol.records import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    CorruptRecord,
    EndTransactionMarker,
    check_header,
    decode_control_batch,
    parse_header,
)
from minibroker.protocol.world import Disk

logger = logging.getLogger("minibroker.storage")

LOG_SUFFIX = ".log"

_FILE_NAME = re.compile(r"(\d{20})(\.[a-z]+)", re.ASCII)
_WALK_BYTES = 8 * 1024
_KNOWN_OFFSETS = 64


def file_name(offset: int, suffix: str) -> str:
    """`00000000000000000042.log`."""
    return f"{offset:020d}{suffix}"


def parse_file_name(name: str) -> tuple[int, str] | None:
    """The offset and the suffix of a name that `file_name` makes; None for other names."""
    match = _FILE_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


class Appended(NamedTuple):
    """The facts about a batch that a segment needs."""

    last_offset: int
    max_timestamp: int
    size: int


class Segment:
    """Offsets from `base_offset` on. Every call may raise OSError, and CorruptRecord where it walks over headers."""

    def __init__(
        self, disk: Disk, directory: str, base_offset: int, index_interval_bytes: int, *, suffix: str = ""
    ) -> None:
        """Open. The indexes are empty until `load_sealed`, or `load_active` and `note`, have filled them.

        `suffix` is what the name of its file has behind `path`, the name that it is to get."""
        self.base_offset = base_offset
        self.path = f"{directory}/{file_name(base_offset, LOG_SUFFIX)}"
        self.file = disk.open(self.path + suffix, create=True)
        self.size = self.file.size()
        """The end of the last whole batch: where the next append goes."""
        self.max_timestamp = NO_TIMESTAMP
        """-1 where no record has a timestamp: negative ones do not count, as in Kafka."""
        self._max_timestamp_offset = base_offset
        self._first_timestamp: int | None = None
        self._bytes_since_entry = 0
        self._index_interval_bytes = index_interval_bytes
        self._disk = disk
        self._directory = directory
        self._offset_index: SparseIndex | StoredIndex = SparseIndex(OFFSET_INDEX)
        self._time_index: SparseIndex | StoredIndex = SparseIndex(TIME_INDEX)
        self.aborted = AbortedIndex()
        self._known: dict[int, int] = {base_offset: 0}
        self._distrusted: set[Layout] = set()
        """Index files that were found to be damaged."""
        self.newest: tuple[tuple[int, int], tuple[int, int]] | None = None
        """The last result of a search for the newest record: the range of offsets, and the record."""

    @classmethod
    def create(
        cls, disk: Disk, directory: str, base_offset: int, index_interval_bytes: int, *, undisturbed: bool = True
    ) -> Segment:
        """An empty one, whatever was there under its name. `undisturbed`: no other thread may be writing files of an
        earlier segment with that base offset, so what is not there now need not be emptied later."""
        segment = cls(disk, directory, base_offset, index_interval_bytes)
        if segment.size:
            segment.file.truncate(0)
            segment.size = 0
        for index in (segment._offset_index, segment._time_index):
            assert isinstance(index, SparseIndex)
            index.in_step = undisturbed and not disk.exists(segment._index_path(index.layout))
        segment.aborted.in_step = undisturbed and not disk.exists(segment._path_of(aborted_index.SUFFIX))
        return segment

    @property
    def first_timestamp(self) -> int:
        """The largest of the first batch, which there must be, in ms."""
        if self._first_timestamp is None:
            self._first_timestamp = parse_header(self.file.pread(HEADER_SIZE, 0)).max_timestamp
        return self._first_timestamp

    @property
    def newest_ms(self) -> int:
        """The time that stands for the segment's age: its largest timestamp, or if it has none, the time of the last
        write (Kafka's `LogSegment.largestTimestamp`)."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.file.modified_ms()

    # -- writing --

    def append(self, data: Sequence[Buffer], batches: Sequence[Appended]) -> None:
        """Write `data`, which is `batches`, at the end. If it raises, the segment is as before except for bytes past
        its `size`, which are overwritten or cut later."""
        position = self.size
        written = self.file.pwrite(data, position)
        for batch in batches:
            self.note(batch, position)
            position += batch.size
        assert position - self.size == written
        self.size = position
        self._remember(batches[-1].last_offset + 1, position)

    def note(self, batch: Appended, position: int) -> None:
        """Take a batch of the file into the indexes. Batches come in order, none left out."""
        if batch.max_timestamp > self.max_timestamp:
            self.max_timestamp = batch.max_timestamp
            self._max_timestamp_offset = batch.last_offset
        if self._bytes_since_entry > self._index_interval_bytes:
            assert isinstance(self._offset_index, SparseIndex)
            self._offset_index.append(batch.last_offset - self.base_offset, position)
            self._add_time_entry()
            self._bytes_since_entry = 0
        self._bytes_since_entry += batch.size

    def _add_time_entry(self) -> None:
        index = self._time_index
        assert isinstance(index, SparseIndex)
        if self.max_timestamp > (index.last[0] if index.last is not None else NO_TIMESTAMP):
            index.append(self.max_timestamp, self._max_timestamp_offset - self.base_offset)

    def seal(self) -> None:
        """Nothing is appended any more. The time index then ends with the segment's largest timestamp."""
        self._add_time_entry()
        for index in (self._offset_index, self._time_index):
            assert isinstance(index, SparseIndex)
            index.in_step = False  # written even if it is empty

    def cut(self, position: int) -> None:
        """Drop the bytes from `position` on, durably: if the recovery point is the new end, the next segment may begin
        there at once, and then this one counts as flushed. Bytes that a power cut brought back would look like damage.
        """
        self.file.truncate(position)
        self.file.fdatasync()
        self.size = position

    def truncate(self, offset: int, position: int) -> None:
        """Cut the batches from `offset` on, which begin at `position`, and be ready to append again."""
        self.cut(position)
        self._first_timestamp = self.newest = None
        self._known = {self.base_offset: 0}
        self.aborted.keep_below(offset)
        try:
            self._load_indexes()
        except InvalidIndex:
            # The file of a sealed segment is damaged: walk over all of its batches instead.
            self.clear_indexes()
        for at, header in self.walk(self.resume(offset, position), position):
            self.note(Appended(header.last_offset, header.max_timestamp, header.size), at)

    def moved(self, directory: str) -> None:
        """The log's directory has this path from now on."""
        self._directory = directory
        self.path = f"{directory}/{file_name(self.base_offset, LOG_SUFFIX)}"
        for index, layout in ((self._offset_index, OFFSET_INDEX), (self._time_index, TIME_INDEX)):
            if isinstance(index, StoredIndex):
                index.path = self._index_path(layout)

    def close(self) -> None:
        self.file.close()

    def remove_files(self) -> None:
        for suffix in (OFFSET_INDEX.suffix, TIME_INDEX.suffix, aborted_index.SUFFIX, LOG_SUFFIX):
            path = self._path_of(suffix)
            if self._disk.exists(path):
                self._disk.remove(path)

    # -- indexes --

    def resume(self, offset: int, position: int) -> int:
        """Forget index entries at or past `offset` or `position`, and all where what is left does not fit the batches.
        Returns where the batches begin that `note` must be given: what comes before is as if just appended."""
        offsets, times = self._offset_index, self._time_index
        assert isinstance(offsets, SparseIndex)
        assert isinstance(times, SparseIndex)
        offsets.keep_keys_below(offset - self.base_offset)
        offsets.keep_values_below(position)
        if not self._index_agrees(offsets):
            self.clear_indexes()
            return 0
        last = offsets.last
        # A time entry comes with an offset entry, except for the last of a sealed segment.
        times.keep_values_below(last[0] + 1 if last is not None else 0)
        newest = times.last
        if last is not None and newest is None:  # a file that was lost, or a segment without timestamps
            self.clear_indexes()
            return 0
        self.max_timestamp, relative = newest if newest is not None else (NO_TIMESTAMP, 0)
        self._max_timestamp_offset = self.base_offset + relative
        self._bytes_since_entry = 0
        return last[1] if last is not None else 0

    def first_offset_at(self, position: int) -> int:
        """The base offset of the batch there. `position` is one that `resume` has returned, or 0."""
        return self.base_offset if position == 0 else parse_header(self.file.pread(HEADER_SIZE, position)).base_offset

    def marker_at(self, position: int, header: BatchHeader) -> EndTransactionMarker:
        """The content of the control batch there."""
        return decode_control_batch(self.file.pread(header.size, position), header)

    def _index_agrees(self, offsets: SparseIndex) -> bool:
        """Whether the batch of the last entry is where the index says."""
        last = offsets.last
        if last is None:
            return True
        return last[1] < self.size and self._is_at(last[1], self.base_offset + last[0])

    def clear_indexes(self) -> None:
        """Start over: `note` must be given every batch."""
        self._offset_index, self._time_index = SparseIndex(OFFSET_INDEX), SparseIndex(TIME_INDEX)
        self.max_timestamp = NO_TIMESTAMP
        self._bytes_since_entry = 0

    def _load_indexes(self) -> None:
        """Bring both indexes into memory from their files. Raises InvalidIndex."""
        if not isinstance(self._offset_index, SparseIndex):
            self._offset_index = self._read_index(OFFSET_INDEX)
        if not isinstance(self._time_index, SparseIndex):
            self._time_index = self._read_index(TIME_INDEX)

    def load_active(self) -> None:
        """Read what index files there are, as a start for `resume` and `note`; damaged ones are treated as empty."""
        try:
            self._offset_index, self._time_index = self._read_index(OFFSET_INDEX), self._read_index(TIME_INDEX)
        except InvalidIndex:
            self.clear_indexes()

    def load_sealed(self) -> int | None:
        """Check the index files of a segment that was sealed and flushed. Returns the offset after its last record;
        None: they must be built again."""
        try:
            offsets, times = self._read_index(OFFSET_INDEX), self._read_index(TIME_INDEX)
        except InvalidIndex:
            return None
        if times.last is None or not self._index_agrees(offsets):
            return None
        try:
            next_offset = self.base_offset
            for _, header in self.walk(offsets.last[1] if offsets.last is not None else 0, self.size):
                next_offset = header.next_offset
                if header.max_timestamp > times.last[0]:
                    return None  # the time index was cut short
            self._offset_index, self._time_index = offsets, times
            newest = self.base_offset + times.last[1]
            if not self._is_at(self.locate(newest), newest, times.last[0]):
                return None
        except CorruptRecord:
            return None
        self.max_timestamp = times.last[0]
        self._max_timestamp_offset = self.base_offset + times.last[1]
        self.indexes_stored()
        return next_offset

    def _read_index(self, layout: Layout) -> SparseIndex:
        path = self._index_path(layout)
        if not self._disk.exists(path):
            raise InvalidIndex(f"there is no {path}")
        return SparseIndex.decode(layout, self._disk.read_file(path))

    def load_aborted(self, below: int) -> None:
        """Read the aborted transactions with markers below `below`, up to which the file is complete. Raises
        InvalidIndex."""
        path = self._path_of(aborted_index.SUFFIX)
        if self._disk.exists(path):
            self.aborted = AbortedIndex.decode(self._disk.read_file(path), below)

    def store_aborted(self) -> None:
        """Replace the file of aborted transactions, which the recovery point is past already: a torn write would leave
        an incomplete file that looks whole. Raises OSError."""
        path = self._path_of(aborted_index.SUFFIX)
        if len(self.aborted) or self._disk.exists(path):
            self._disk.write_atomically(path, self.aborted.encode())
        self.aborted.all_stored()

    def _index_path(self, layout: Layout) -> str:
        return self._path_of(layout.suffix)

    def _path_of(self, suffix: str) -> str:
        return f"{self._directory}/{file_name(self.base_offset, suffix)}"

    @property
    def stored(self) -> bool:
        """The index files are complete."""
        return isinstance(self._offset_index, StoredIndex)

    def index_writes(self, *, all_entries: bool = True) -> list[IndexWrite]:
        """Return the writes that the index files lack, the time index first: an entry of the offset index implies that
        the time index's entries up to there are in its file. So entries of the offset index that were cut go first.
        Without `all_entries`, return nothing unless a file may hold entries that were cut: those must be gone before
        the recovery point passes them. Aborted transactions are always written: readers below the recovery point rely
        on the file. `IndexWrite.carry_out` may run in another thread, one after the other."""
        offsets, times, aborted = self._offset_index, self._time_index, self.aborted
        writes: list[IndexWrite] = []
        if not aborted.is_written:
            path = self._path_of(aborted_index.SUFFIX)
            if len(aborted) or self._disk.exists(path):
                writes.append(IndexWrite(path, aborted.stored, aborted.encode(aborted.stored), aborted))
            aborted.in_step = not writes
        known = [index for index in (offsets, times) if isinstance(index, SparseIndex)]
        if not all_entries and all(index.in_step for index in known):
            return writes
        if isinstance(offsets, SparseIndex) and not offsets.in_step:
            writes.append(self._write_of(offsets, b""))
        if isinstance(times, SparseIndex) and (times.stored < len(times) or not times.in_step):
            writes.append(self._write_of(times, times.encode(times.stored)))
        if isinstance(offsets, SparseIndex) and offsets.stored < len(offsets):
            writes.append(self._write_of(offsets, offsets.encode(offsets.stored)))
        for write in writes:
            write.source.in_step = False
        return writes

    def _write_of(self, index: SparseIndex, data: bytes) -> IndexWrite:
        return IndexWrite(self._index_path(index.layout), index.stored, data, index)

    def indexes_stored(self) -> None:
        """The index files of a sealed segment are written: keep them there only."""
        offsets, times = self._offset_index, self._time_index
        self._offset_index = StoredIndex(self._disk, self._index_path(OFFSET_INDEX), OFFSET_INDEX, len(offsets))
        self._time_index = StoredIndex(self._disk, self._index_path(TIME_INDEX), TIME_INDEX, len(times))

    # -- reading --

    def walk(self, position: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of every batch from one batch's `position` to another's. Reads headers alone."""
        chunk = b""
        chunk_position = 0
        next_offset = self.base_offset
        while position < end:
            at = position - chunk_position
            if at + HEADER_SIZE > len(chunk):
                chunk, chunk_position, at = self.file.pread(min(_WALK_BYTES, end - position), position), position, 0
            try:
                header = parse_header(chunk, at)
                check_header(header)
            except CorruptRecord as error:
                raise CorruptRecord(f"{self.path}, position {position}: {error}") from error
            if header.base_offset < next_offset:
                raise CorruptRecord(
                    f"{self.path}, position {position}: offset {header.base_offset} where {next_offset} is next"
                )
            yield position, header
            position += header.size
            next_offset = header.next_offset
        if position > end:
            raise CorruptRecord(f"{self.path}: a batch reaches position {position}, where {end} is the end")

    def _walk_from(self, entry: Entry | None, end: int) -> Iterator[tuple[int, BatchHeader]]:
        """As `walk`, from the batch of an entry of the offset index; from the first one where there is no entry, or it
        is not true: bits of the file may have flipped."""
        position = 0
        if entry is not None:
            if self._is_at(entry[1], self.base_offset + entry[0]):
                position = entry[1]
            else:
                self._distrust_index(OFFSET_INDEX)
        return self.walk(position, end)

    def _is_at(self, position: int, last_offset: int, max_timestamp: int | None = None) -> bool:
        """Whether a batch with this last offset, and this largest timestamp, if one is given, begins there."""
        if position < 0:
            return False
        try:
            header = parse_header(self.file.pread(HEADER_SIZE, position))
        except CorruptRecord:
            return False
        return header.last_offset == last_offset and max_timestamp in (None, header.max_timestamp)

    def _floor(self, layout: Layout, key: int) -> Entry | None:
        """As `SparseIndex.floor`; None also where the index cannot be read any more."""
        try:
            return self._index(layout).floor(key)
        except InvalidIndex:
            self._distrust_index(layout)
            return None

    def _floor_by_value(self, layout: Layout, value: int) -> Entry | None:
        try:
            return self._index(layout).floor_by_value(value)
        except InvalidIndex:
            self._distrust_index(layout)
            return None

    def _index(self, layout: Layout) -> SparseIndex | StoredIndex:
        return self._offset_index if layout is OFFSET_INDEX else self._time_index

    def _distrust_index(self, layout: Layout) -> None:
        if layout not in self._distrusted:
            self._distrusted.add(layout)
            logger.warning("%s is damaged; searching without it, until a start repairs it", self._index_path(layout))

    def locate(self, offset: int) -> int:
        """Return the position of the batch that holds `offset`, or of the next one; `size` if there is none."""
        position = self._known.get(offset)
        if position is not None:
            return position
        if offset <= self.base_offset:
            return 0
        entry = self._floor(OFFSET_INDEX, offset - self.base_offset)
        for position, header in self._walk_from(entry, self.size):
            if header.last_offset >= offset:
                return position
        return self.size

    def read(self, offset: int, max_bytes: int, stop: int, *, min_one: bool) -> bytes | None:
        """Whole batches from the one that holds `offset`, none that begins at or after the position `stop`, and no more
        than `max_bytes`; at least one with `min_one`. None where no batch begins in between."""
        start = self.locate(offset)
        if start >= stop:
            return None
        end = stop
        if end - start > max_bytes:
            end = self._last_boundary(start, start + max(max_bytes, 0))
            if end == start:
                if not min_one:
                    return b""
                _, header = next(self.walk(start, stop))
                end = start + header.size
                self._remember(header.next_offset, end)
        data = self.file.pread(end - start, start)
        if len(data) < end - start:
            raise CorruptRecord(f"{self.path} ends at position {start + len(data)}, but had {self.size} bytes")
        return data

    def end_before(self, position: int) -> int:
        """The offset after the last batch that begins before the one at `position`."""
        end = self.base_offset
        entry = self._floor_by_value(OFFSET_INDEX, position - 1)
        for _, header in self._walk_from(entry, position):
            end = header.next_offset
        return end

    def _last_boundary(self, start: int, limit: int) -> int:
        """The last position up to `limit` where a batch begins, at least `start`. `limit` is within the segment."""
        entry = self._floor_by_value(OFFSET_INDEX, limit)
        if entry is not None and entry[1] <= start:
            walked = self.walk(start, self.size)
        else:
            walked = self._walk_from(entry, self.size)
        for position, header in walked:
            if position + header.size > limit:
                self._remember(header.base_offset, position)
                return position
        raise AssertionError(f"{self.path}: no batch reaches position {limit}")

    def _remember(self, offset: int, position: int) -> None:
        """The batch with `offset` as its first begins at `position`, or will once it is appended."""
        known = self._known
        if len(known) >= _KNOWN_OFFSETS:
            del known[next(iter(known))]
        known[offset] = position

    def batches_since(self, timestamp_ms: int, offset: int) -> Iterator[tuple[int, BatchHeader]]:
        """All batches from the first one on that may hold a record from `offset` on with a timestamp of `timestamp_ms`
        or later."""
        entry = self._floor(TIME_INDEX, timestamp_ms)
        if entry is not None:
            # All records before the batch that brought this entry's timestamp are older than it.
            brought_by = self.base_offset + entry[1]
            if self._is_at(self.locate(brought_by), brought_by, entry[0]):
                offset = max(offset, brought_by)
            else:
                self._distrust_index(TIME_INDEX)
        return self.walk(self.locate(offset), self.size)

    def newest_batches(self, start: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
        """Some of the batches with offsets from `start` to below `end`, in order: among them the first of those with
        the largest timestamp.

        Cheap unless that largest one lies before `start`: the time index tells which batch it is, of all up to an entry
        of the offset index, and what comes after the last such entry is little.
        """
        position = self.locate(start)
        indexed = self._floor(OFFSET_INDEX, end - 1 - self.base_offset)
        newest = None if indexed is None else self._floor_by_value(TIME_INDEX, indexed[0])
        if indexed is not None and newest is not None and self.base_offset + newest[1] >= start:
            found = self.locate(self.base_offset + newest[1])
            _, header = next(self.walk(found, self.size), (found, None))
            if header is None or (header.last_offset, header.max_timestamp) != (
                self.base_offset + newest[1],
                newest[0],
            ):
                self._distrust_index(TIME_INDEX)
            elif not self._is_at(indexed[1], self.base_offset + indexed[0]):
                self._distrust_index(OFFSET_INDEX)
            elif header.base_offset >= start and header.records_count:  # compaction may have left nothing of it
                yield found, header
                position = indexed[1]
        for found, header in self.walk(position, self.size):
            if header.base_offset >= end:
                return
            yield found, header


class IndexWrite(NamedTuple):
    """The entries of an index from number `first` on, on their way to its file."""

    path: str
    first: int
    data: bytes
    source: SparseIndex | AbortedIndex

    @property
    def is_relied_on(self) -> bool:
        """Whether a start takes a missing file for an empty index."""
        return isinstance(self.source, AbortedIndex)

    def carry_out(self, disk: Disk) -> None:
        """Write, cut what comes after, and make it durable. Raises OSError. Runs in any thread."""
        position = self.first * self.source.entry_size
        file = disk.open(self.path, create=True)
        try:
            if self.data:
                file.pwrite([self.data], position)
            file.truncate(position + len(self.data))
            file.fdatasync()
        finally:
            file.close()

    def carried_out(self) -> None:
        """The file holds these entries, and the index has only grown since they were taken."""
        self.source.stored = self.first + len(self.data) // self.source.entry_size
        self.source.in_step = True
