"""The contents of a stopped broker's log, batch by batch, without changing a byte (Kafka's DumpLogSegments).

`recovery` stops at the first bad batch and cuts the log there, since nothing behind it may be served. To find out what
went wrong, the opposite is needed: everything that is left, and where the bad bytes begin and end. So `scan` goes on
after them, at the next batch with a right CRC. A batch in the middle of another one's value could be taken for that
place; it would be reported with an offset that does not fit.

Everything here reads one piece of a file at a time, so a segment may be larger than memory. Raises OSError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.aborted_index import AbortedIndex, AbortedTransaction
from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX, Layout, SparseIndex
from minibroker.broker.storage.recovery.recovery import PAGE_BYTES
from minibroker.broker.storage.segment import LOG_SUFFIX, parse_file_name
from minibroker.broker.storage.snapshots import SNAPSHOT_SUFFIX, TOLD_SUFFIX
from minibroker.protocol.records import (
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    MAX_BATCH_BYTES,
    BatchHeader,
    CorruptRecord,
    check_header,
    parse_header,
    validate_batch,
)

SUFFIXES = (
    LOG_SUFFIX,
    OFFSET_INDEX.suffix,
    TIME_INDEX.suffix,
    aborted_index.SUFFIX,
    SNAPSHOT_SUFFIX,
    TOLD_SUFFIX,
)

_MAGIC_POSITION = 16
_MAGICS = re.compile(b"[%c%c]" % (MAGIC_RECORDS, MAGIC_COLUMNS))
_SEARCH_BYTES = 1024 * 1024
_LARGEST_SEARCHED = 2 * MAX_BATCH_BYTES
"""Behind bad bytes: any two bytes may claim to begin a batch that takes the rest of the file to read."""


class Batch(NamedTuple):
    """A batch that is whole, with a CRC that is right. `data` is all of it."""

    position: int
    header: BatchHeader
    data: bytes

    @property
    def end(self) -> int:
        return self.position + self.header.size


class BadBytes(NamedTuple):
    """The bytes from `position` to `end` are no batches. `is_incomplete`: they are the beginning of one batch, and the
    file ends there, with a page, as it does when a broker dies while it appends."""

    position: int
    end: int
    problem: str
    is_incomplete: bool = False


def base_offset_of(name: str) -> tuple[int, str] | None:
    """The offset and the suffix of a log's file that is named after an offset; None for other names."""
    parsed = parse_file_name(name)
    return parsed if parsed is not None and parsed[1] in SUFFIXES else None


def scan(path: Path) -> Iterator[Batch | BadBytes]:
    """Everything in a segment's file, in its order: each byte is in one of them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while position < size:
            found = _batch_at(file, position, size)
            if isinstance(found, Batch):
                yield found
                position = found.end
                continue
            end = _next_batch(file, position + 1, size)
            yield found._replace(end=end, is_incomplete=found.is_incomplete and end == size and size % PAGE_BYTES == 0)
            position = end


def _batch_at(file: BinaryIO, position: int, size: int, largest: int | None = None) -> Batch | BadBytes:
    left = size - position
    if left < HEADER_SIZE:
        return BadBytes(position, size, f"{left} bytes, and the header of a batch takes {HEADER_SIZE}", True)
    try:
        header = parse_header(_pread(file, HEADER_SIZE, position))
        check_header(header)
        if largest is not None and header.size > largest:
            raise CorruptRecord(f"a batch of {header.size} bytes")
        if header.size > left:
            return BadBytes(position, size, f"{left} of {header.size} bytes of a batch", True)
        data = _pread(file, header.size, position)
        validate_batch(data, header)
    except CorruptRecord as error:
        return BadBytes(position, size, str(error))
    return Batch(position, header, data)


def _next_batch(file: BinaryIO, position: int, size: int) -> int:
    """Where the next batch begins whose CRC is right; `size` if none does."""
    while position + HEADER_SIZE <= size:
        chunk = _pread(file, _SEARCH_BYTES + HEADER_SIZE, position)
        for match in _MAGICS.finditer(chunk, _MAGIC_POSITION, _MAGIC_POSITION + _SEARCH_BYTES):
            start = position + match.start() - _MAGIC_POSITION
            if isinstance(_batch_at(file, start, size, _LARGEST_SEARCHED), Batch):
                return start
        position += _SEARCH_BYTES
    return size


def _pread(file: BinaryIO, size: int, position: int) -> bytes:
    file.seek(position)
    return file.read(size)


def read_index(path: Path, layout: Layout) -> list[tuple[int, int]]:
    """The entries of an index: relative offset and position, or timestamp and relative offset. Raises InvalidIndex."""
    SparseIndex.decode(layout, data := path.read_bytes())
    return list(layout.entry.iter_unpack(data))


def read_aborted(path: Path) -> list[AbortedTransaction]:
    """The entries of an index of aborted transactions. Raises InvalidIndex."""
    return list(AbortedIndex.decode(path.read_bytes(), LIMIT))
