"""Transcoding of columns (magic 77) to Kafka's records (magic 2), for clients that do not know columns.

A reader's progress does not change: a batch becomes one batch with the same first and last offset, leader epoch,
producer, sequence, attributes and number of records. So a consumer that continues after a batch, or fetches from its
middle, is at the same offset as with the original.

The codec does not change either: the producer chose it to save bytes for every reader and room within the limits of a
fetch, and a client that lacks other codecs has this one. If compression makes a body larger, it is sent uncompressed,
which every reader accepts.

The exception is a batch with a column of one element for all records: a few bytes may stand for terabytes. No
body is written out beyond LARGEST_BODY_BYTES. Instead, the result is a part that begins with the requested record, with
its own offset and sequence, and a reader proceeds part by part.

There are three steps, so that a broker can run the long ones in a thread: `decompressed`, `as_records`, `finished`. The
CRC is checked first, since the result has a new one, which would otherwise hide damage.
"""

from bisect import bisect_left

import msgspec

from minibroker.protocol.records.body import MAX_BODY_BYTES, MAX_STORED_BODY_BYTES, DecodedBatch
from minibroker.protocol.records.columns import decode_columns
from minibroker.protocol.records.compression import (
    Compression,
    DecompressionFailed,
    DecompressionTooLarge,
    compress,
    decompress,
)
from minibroker.protocol.records.header import (
    COMPRESSION_MASK,
    HEADER_SIZE,
    MAGIC_RECORDS,
    NO_SEQUENCE,
    BatchHeader,
    Buffer,
    CorruptRecord,
    RecordsTooLarge,
    validate_batch,
    write_header,
)
from minibroker.protocol.records.varint import BodyTooLarge, encode_records

LARGEST_BODY_BYTES = 16 << 20
"""The largest uncompressed body of a batch that is transcoded as one: less than the limit of a response in any of
Kafka's clients."""

PART_BYTES = 1 << 20
"""The approximate size of the records of a part."""

RECORDS_AT_ONCE = 1 << 16
"""Records that are encoded together. Encoding takes about 300 bytes of memory for each, and keeps other threads from
running for 0.3 us for each."""

_MOST_OVERHEAD = 40
"""The largest overhead of a record beside key, value and headers."""


class Records(msgspec.Struct):
    """A batch of magic 2 with an uncompressed body."""

    header: BatchHeader
    """The final header except for magic, length and CRC."""
    batch: bytearray
    """The body, behind room for the header."""
    is_whole: bool
    """Whether it has all records of the original batch."""


def decompressed(batch: Buffer, header: BatchHeader, limit: int = MAX_STORED_BODY_BYTES) -> Buffer:
    """Return the body of a complete batch. Raises CorruptRecord, and DecompressionTooLarge if the body exceeds a
    `limit` below MAX_STORED_BODY_BYTES."""
    validate_batch(batch, header)
    body = memoryview(batch)[HEADER_SIZE : header.size]
    if not header.records_count:
        if body:
            raise CorruptRecord(f"{len(body)} bytes follow a header that says no records")
        return body
    try:
        return decompress(header.compression, body, limit)
    except DecompressionTooLarge as error:
        if limit < MAX_STORED_BODY_BYTES:
            raise
        raise RecordsTooLarge(str(error)) from error
    except DecompressionFailed as error:
        raise CorruptRecord(str(error)) from error


def as_records(header: BatchHeader, body: Buffer, offset: int, limit: int = LARGEST_BODY_BYTES) -> Records:
    """Return the batch as one of Kafka's, or its part from `offset` on if that is too large. Raises CorruptRecord, and
    BodyTooLarge if the body exceeds a `limit` below LARGEST_BODY_BYTES."""
    if not header.records_count:
        return Records(header, bytearray(HEADER_SIZE), is_whole=True)
    columns = decode_columns(header, body, gives_way=True)
    try:
        return Records(header, _encoded(columns, 0, columns.count, limit), is_whole=True)
    except BodyTooLarge:
        if limit < LARGEST_BODY_BYTES:
            raise
        return _part(columns, offset)


def _part(columns: DecodedBatch, offset: int) -> Records:
    """Return the records from `offset` on that fit into PART_BYTES, at least one. A part ends at the beginning of the
    next, the last one at the end of the batch."""
    header, count = columns.header, columns.count
    first = min(bisect_left(columns.offsets, offset), count - 1)
    end, size = first, 0
    while end < count and (end == first or size < PART_BYTES):
        size += _MOST_OVERHEAD + len(columns.values[end] or b"")
        if columns.keys is not None:
            size += len(columns.keys[end] or b"")
        if columns.headers is not None:
            size += sum(
                _MOST_OVERHEAD + 4 * len(name) + len(value or b"") for name, value in columns.headers[end] or ()
            )
        end += 1
    base = columns.offsets[first] if first else header.base_offset
    last = columns.offsets[end] - 1 if end < count else header.last_offset
    sequence = header.base_sequence
    if sequence != NO_SEQUENCE:
        sequence = (sequence + base - header.base_offset) & 0x7FFFFFFF
    max_timestamp = header.max_timestamp
    if not header.is_log_append_time:
        max_timestamp = columns.base_timestamp + max(columns.timestamp_deltas[first:end])
    part = msgspec.structs.replace(
        header,
        base_offset=base,
        last_offset_delta=last - base,
        max_timestamp=max_timestamp,
        base_sequence=sequence,
        records_count=end - first,
    )
    return Records(part, _encoded(columns, first, end, MAX_BODY_BYTES * 2), is_whole=False)


def _encoded(columns: DecodedBatch, first: int, end: int, limit: int) -> bytearray:
    """Encode the records from `first` to `end`. Offsets are relative to record `first`, or to the batch for 0."""
    offsets, base = columns.offsets, columns.offsets[first] if first else columns.header.base_offset
    batch = bytearray()
    for start in range(first, end, RECORDS_AT_ONCE):
        stop = min(start + RECORDS_AT_ONCE, end)
        are_counted = isinstance(offsets, range) and start == first
        some = encode_records(
            stop - start,
            None if are_counted else [offset - base for offset in offsets[start:stop]],
            columns.timestamp_deltas[start:stop],
            None if columns.keys is None else columns.keys[start:stop],
            columns.values[start:stop],
            None if columns.headers is None else columns.headers[start:stop],
            limit - max(0, len(batch) - HEADER_SIZE),
        )
        if batch:
            batch += memoryview(some)[HEADER_SIZE:]
        else:
            batch = some
    return batch


def recompressed(header: BatchHeader, body: Buffer, codec: Compression, level: int | None = None) -> bytearray:
    """Return a batch of either magic with its decompressed body compressed by another codec."""
    attributes = header.attributes & ~COMPRESSION_MASK | codec
    batch = bytearray(HEADER_SIZE)
    batch += compress(codec, body, level)
    return write_header(batch, msgspec.structs.replace(header, attributes=attributes))


def finished(records: Records, level: int | None = None, is_fixed: bool = False) -> bytearray:
    """Return the compressed batch with its header. `is_fixed`: keep the codec even if the body becomes no smaller."""
    header, batch = records.header, records.batch
    codec = header.compression
    if codec is not Compression.NONE and header.records_count:
        with memoryview(batch) as view:
            body = compress(codec, view[HEADER_SIZE:], level)
        if is_fixed or len(body) < len(batch) - HEADER_SIZE:
            batch[HEADER_SIZE:] = body
        else:
            codec = Compression.NONE
    attributes = header.attributes & ~COMPRESSION_MASK | codec
    return write_header(batch, msgspec.structs.replace(header, magic=MAGIC_RECORDS, attributes=attributes))
