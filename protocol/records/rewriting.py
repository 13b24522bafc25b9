"""Batches rewritten by brokers: compaction keeps some of the records, a leader corrects a header.

Offsets, producer, sequence and leader epoch do not change, so state derived from headers stays valid: the last sequence
follows from the last offset delta, not from the number of records. The records' timestamps do not change either, but
the base timestamp of a batch may (`BatchHeader.delete_horizon_ms`).
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from minibroker.protocol.records.batch import decode_batch
from minibroker.protocol.records.body import MAX_STORED_BODY_BYTES, DecodedBatch, Header
from minibroker.protocol.records.columns import encode_columns
from minibroker.protocol.records.compression import Compression, compress
from minibroker.protocol.records.header import (
    DELETE_HORIZON,
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    write_header,
)
from minibroker.protocol.records.varint import encode_records

_T = TypeVar("_T", int, bytes | None, Sequence[Header] | None)


def with_records(batch: DecodedBatch, kept: Sequence[int], delete_horizon_ms: int | None = None) -> bytearray:
    """Return the batch with only the records of these indexes (at least one, ascending), and with `delete_horizon_ms`
    in its header if it is given.

    A column of one element stays one: written out, a megabyte would be repeated for each record. Raises ValueError if
    the body or the timestamps would exceed the limits of `decode_batch`.
    """
    header = batch.header
    base_timestamp, attributes = header.base_timestamp, header.attributes
    if delete_horizon_ms is not None:
        base_timestamp, attributes = delete_horizon_ms, attributes | DELETE_HORIZON
    timestamps = [batch.base_timestamp + batch.timestamp_deltas[index] for index in kept]
    timestamp_deltas = [timestamp - base_timestamp for timestamp in timestamps]
    has_deltas = any(timestamp_deltas) or header.magic != MAGIC_COLUMNS
    if has_deltas and (abs(base_timestamp) > LIMIT or min(timestamp_deltas) < -LIMIT or max(timestamp_deltas) > LIMIT):
        raise ValueError(
            f"timestamps from {min(timestamps)} to {max(timestamps)} cannot be encoded relative to {base_timestamp}"
        )
    offset_deltas = [batch.offsets[index] - header.base_offset for index in kept]
    keys = None if batch.keys is None else [batch.keys[index] for index in kept]
    values = [batch.values[index] for index in kept]
    headers = None if batch.headers is None else [batch.headers[index] for index in kept]

    written = bytearray(HEADER_SIZE)
    if header.magic == MAGIC_COLUMNS:
        timestamp_column = _folded(timestamp_deltas) if has_deltas else None
        encode_columns(written, offset_deltas, timestamp_column, _folded(keys), _folded(values), _folded(headers))
    else:
        written = encode_records(
            len(kept), offset_deltas, timestamp_deltas, keys, values, headers, MAX_STORED_BODY_BYTES
        )
    if len(written) - HEADER_SIZE > MAX_STORED_BODY_BYTES:
        raise ValueError(f"a body of {len(written) - HEADER_SIZE} bytes: a batch holds at most {MAX_STORED_BODY_BYTES}")
    if header.compression is not Compression.NONE:
        with memoryview(written) as view:
            body = compress(header.compression, view[HEADER_SIZE:], None)
        written[HEADER_SIZE:] = body
    return write_header(
        written,
        msgspec.structs.replace(
            header,
            attributes=attributes,
            base_timestamp=base_timestamp,
            max_timestamp=max(timestamps),
            records_count=len(kept),
        ),
    )


def _folded(column: Sequence[_T] | None) -> Sequence[_T] | None:
    """Return a column of one element if all are equal."""
    return column if column is None or column.count(column[0]) < len(column) else column[:1]


def without_records(header: BatchHeader) -> bytearray:
    """Return the batch with only its header, which carries the producer's state and the log's offsets."""
    return write_header(bytearray(HEADER_SIZE), msgspec.structs.replace(header, records_count=0))


def with_true_times(batch: Buffer, header: BatchHeader) -> bytearray:
    """Return the batch with the largest timestamp of its records in its header; -1 if that is negative, as in Kafka.
    The CRC is not checked. Raises CorruptRecord."""
    largest = max(decode_batch(batch, header, check_crc=False).timestamps)
    header = msgspec.structs.replace(header, max_timestamp=max(largest, NO_TIMESTAMP))
    return write_header(bytearray(memoryview(batch)[: header.size]), header)
