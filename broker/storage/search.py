"""Searches in a log: by timestamp, and past batches that compaction has emptied.

A search may read the headers of a whole segment, so it comes in steps of 0.1 ms, between which other work can be done.
Its result was right when the search began, or later. Every search raises BrokerError as the methods of `Log` do.

A stored batch of a few bytes may have a million records. Their timestamps are looked at in steps as well, without the
rest of the records; a step that would decompress or decode much yields a call instead, to be made in a thread.
"""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, TypeVar

from minibroker.broker.storage.log import Log
from minibroker.broker.storage.segment import Segment
from minibroker.protocol.records import HEADER_SIZE, NO_TIMESTAMP, BatchHeader, CorruptRecord, validate_batch
from minibroker.protocol.records.compression import Compression, may_exceed
from minibroker.protocol.records.times import record_times

_STEP = 64
"""Batch headers that are read in one step, at a microsecond each."""

_RECORDS_STEP = 512
"""Records that are looked at in one step, at up to a microsecond each."""
_QUICK_BYTES = 128 << 10
"""The size of a body, decompressed, that is read within a step."""

T = TypeVar("T")

Steps = Generator[Callable[[], Any] | None, Any, T]
"""If a step yields a call, its result may be sent; otherwise, the next step makes the call."""
Search = Steps[tuple[int, int] | None]
"""The steps of a search that returns the timestamp and offset of a record."""


class _LogChanged(Exception):
    """The log no longer has the segments that it had when the search began. The search begins anew."""


def offset_for_timestamp(log: Log, timestamp_ms: int, up_to_offset: int) -> Search:
    """Find the first record below `up_to_offset` whose timestamp is `timestamp_ms` or later."""
    return _search(log, lambda: _first_since(log, timestamp_ms, up_to_offset))


def newest_record(log: Log, up_to_offset: int) -> Search:
    """Find the record below `up_to_offset` with the largest timestamp, the first of several (KIP-734). None if no
    record has a timestamp."""
    return _search(log, lambda: _newest(log, up_to_offset))


def past_emptied(log: Log, offset: int, up_to_offset: int) -> Steps[int]:
    """Find the offset from which a reader gets records, if there are any from `offset` to below `up_to_offset`:
    compaction may have left batches without records before them. If there are none, return the offset of the last
    such batch."""
    return _search(log, lambda: _past_emptied(log, offset, up_to_offset))


def _search(log: Log, attempt: Callable[[], Steps[T]]) -> Steps[T]:
    while True:
        log.require_usable()
        try:
            return (yield from attempt())
        except _LogChanged:
            continue
        except OSError as error:
            log.read_failed(error)
        except CorruptRecord as error:
            log.report_damage(error)


def _require_unchanged(log: Log, segment: Segment, cuts: int) -> None:
    """Raises BrokerError once the log is closed, and _LogChanged if it has another segment in that place."""
    log.require_usable()
    if cuts != log.cuts or log.segment_at(segment.base_offset) is not segment:
        raise _LogChanged


def _past_emptied(log: Log, offset: int, up_to_offset: int) -> Steps[int]:
    found, cuts = offset, log.cuts
    for segment in log.segments_from(offset):
        _require_unchanged(log, segment, cuts)
        for number, (_, header) in enumerate(segment.walk(segment.locate(offset), segment.size), 1):
            if header.base_offset >= up_to_offset:
                return found
            found = max(offset, header.base_offset)
            if header.records_count:
                return found
            if number % _STEP == 0:
                yield None
                _require_unchanged(log, segment, cuts)
        yield None  # each of many segments may hold a single batch
    return found


def _first_since(log: Log, timestamp_ms: int, up_to_offset: int) -> Search:
    start, cuts = log.log_start_offset, log.cuts
    for segment in log.segments_from(start):
        if segment.max_timestamp < timestamp_ms:
            continue
        _require_unchanged(log, segment, cuts)
        for number, (position, header) in enumerate(segment.batches_since(timestamp_ms, start), 1):
            if header.base_offset >= up_to_offset:
                return None
            is_young = header.max_timestamp >= timestamp_ms
            if is_young:
                times = yield from _times(log, segment, position, header)
                for looked_at, (timestamp, offset) in enumerate(times, 1):
                    if timestamp >= timestamp_ms and offset >= start:
                        return (timestamp, offset) if offset < up_to_offset else None
                    if looked_at % _RECORDS_STEP == 0:
                        yield None
            if is_young or number % _STEP == 0:
                yield None
                _require_unchanged(log, segment, cuts)
    return None


def _newest(log: Log, up_to_offset: int) -> Search:
    start, cuts = log.log_start_offset, log.cuts
    newest = (NO_TIMESTAMP, 0)
    """With the offset negated, so that the larger pair is the better one."""
    extents = zip(log.segments_from(0), log.extents(), strict=True)
    ends = [(s, min(extent.end_offset, up_to_offset)) for s, extent in extents if start < extent.end_offset]
    for segment, end in sorted(ends, key=lambda item: (-item[0].max_timestamp, item[0].base_offset)):
        if segment.max_timestamp < newest[0] or segment.max_timestamp == NO_TIMESTAMP:
            break
        if segment.base_offset < end:
            _require_unchanged(log, segment, cuts)
            newest = max(newest, (yield from _newest_in(log, segment, max(start, segment.base_offset), end, cuts)))
    timestamp, negated = newest
    return None if timestamp == NO_TIMESTAMP else (timestamp, -negated)


def _newest_in(log: Log, segment: Segment, start: int, end: int, cuts: int) -> Steps[tuple[int, int]]:
    """As `_newest_of`, for all records of a segment from `start` to below `end`."""
    if segment.newest is not None and segment.newest[0] == (start, end):
        return segment.newest[1]
    newest = (NO_TIMESTAMP, 0)
    best: tuple[int, BatchHeader] | None = None
    for number, (position, header) in enumerate(segment.newest_batches(start, end), 1):
        if header.base_offset < start or header.last_offset >= end:
            # Its largest timestamp may be that of a record outside of the range.
            newest = max(newest, (yield from _newest_of(log, segment, position, header, start, end)))
            _require_unchanged(log, segment, cuts)
        elif header.records_count and (best is None or header.max_timestamp > best[1].max_timestamp):
            best = position, header
        if number % _STEP == 0:
            yield None
            _require_unchanged(log, segment, cuts)
    if best is not None:
        newest = max(newest, (yield from _newest_of(log, segment, *best, start, end)))
        _require_unchanged(log, segment, cuts)
    segment.newest = (start, end), newest
    return newest


def _newest_of(
    log: Log, segment: Segment, position: int, header: BatchHeader, start: int, end: int
) -> Steps[tuple[int, int]]:
    """Find the largest timestamp of a batch's records from `start` to below `end`, and the first offset that has it,
    negated."""
    newest = (NO_TIMESTAMP, 0)
    times = yield from _times(log, segment, position, header)
    for number, (timestamp, offset) in enumerate(times, 1):
        if timestamp > newest[0] and start <= offset < end:
            newest = timestamp, -offset
        if number % _RECORDS_STEP == 0:
            yield None
    return newest


def _times(log: Log, segment: Segment, position: int, header: BatchHeader) -> Steps[Iterator[tuple[int, int]]]:
    """Return an iterator over timestamp and offset of each record of a batch. Raises OSError, CorruptRecord."""
    data = segment.file.pread(header.size, position)
    validate_batch(data, header)
    # The broker checked only the header when its producer sent it, so the records may be malformed. Consumers will
    # notice; a log with other producers must not stop answering because of it.
    claimed = header.max_timestamp, max(header.base_offset, log.log_start_offset)
    read = partial(_read_times, data, header, claimed)
    times: Iterator[tuple[int, int]] | None = None
    if _takes_long(data, header):
        times = yield read
    return read() if times is None else times


def _read_times(data: bytes, header: BatchHeader, claimed: tuple[int, int]) -> Iterator[tuple[int, int]]:
    try:
        return _or_claimed(record_times(data, header), claimed)
    except CorruptRecord:
        return iter((claimed,))


def _or_claimed(times: Iterator[tuple[int, int]], claimed: tuple[int, int]) -> Iterator[tuple[int, int]]:
    try:
        yield from times
    except CorruptRecord:
        yield claimed


def _takes_long(data: bytes, header: BatchHeader) -> bool:
    """Whether to read the batch in a thread."""
    if header.records_count > _RECORDS_STEP or header.size > _QUICK_BYTES:
        return True
    codec = header.compression
    return codec is not Compression.NONE and may_exceed(codec, memoryview(data)[HEADER_SIZE:], _QUICK_BYTES)
