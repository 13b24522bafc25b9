"""Encoding and decoding of whole batches: a header and a body of either magic."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from minibroker.protocol.records.body import (
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    MAX_STORED_BODY_BYTES,
    DecodedBatch,
    Header,
    HeadersColumn,
    is_increasing,
)
from minibroker.protocol.records.columns import (
    begins_as_columns,
    check_columns,
    decode_columns,
    encode_columns,
    headers_size,
)
from minibroker.protocol.records.compression import (
    BEGINNINGS,
    Compression,
    DecompressionFailed,
    DecompressionTooLarge,
    compress,
    decompress,
)
from minibroker.protocol.records.header import (
    COMPRESSION_MASK,
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_RECORDS,
    MAX_RECORDS,
    NO_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL,
    BatchHeader,
    Buffer,
    CorruptRecord,
    RecordsTooLarge,
    check_header,
    parse_header,
    validate_batch,
    write_header,
)
from minibroker.protocol.records.varint import (
    SMALLEST_RECORD,
    begins_as_records,
    check_room,
    decode_records,
    encode_records,
    headers_exceed,
)

_INT: frozenset[type] = frozenset((int,))
_BYTES_OR_NONE: frozenset[type] = frozenset((bytes, type(None)))
_ALL_NONE: frozenset[type] = frozenset((type(None),))

_LONGEST_BEGINNING = 10

_T = TypeVar("_T")


def encode_batch(
    values: Sequence[bytes | None],
    *,
    base_timestamp: int | None = None,
    timestamp_deltas: Sequence[int] | None = None,
    timestamps: Sequence[int] | None = None,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Sequence[Header] | None] | None = None,
    compression: Compression = Compression.NONE,
    compression_level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    base_offset: int = 0,
    partition_leader_epoch: int = NO_LEADER_EPOCH,
    offset_deltas: Sequence[int] | None = None,
    last_offset_delta: int | None = None,
    magic: int = MAGIC_COLUMNS,
    is_checked: bool = False,
) -> bytearray:
    """Encode a batch of `len(values)` records from columns (lists or tuples) of that length.

    Record i has the timestamp `timestamps[i]`, or `base_timestamp + timestamp_deltas[i]`, or `base_timestamp` if there
    are no deltas. `offset_deltas` and `last_offset_delta` are for compaction, which leaves gaps and keeps a
    batch's last offset; only then may `values` be empty.

    `is_checked`: the caller guarantees that keys and values are bytes or None. Checking each type again would be a
    third of the cost.

    Raises TypeError for an element of the wrong type and ValueError for columns of the wrong length,
    deltas out of order or range, and more records, headers or bytes than a reader accepts.
    `decode_batch` can read every result.
    """
    count = len(values)
    check = _of_length if is_checked else _checked
    value_column = check("values", values, count, _BYTES_OR_NONE)
    key_column = check("keys", keys, count, _BYTES_OR_NONE)
    offset_column = _checked("offset_deltas", offset_deltas, count, _INT)
    header_column = _checked_headers(headers, count)

    deltas: Sequence[int] | None
    if timestamps is not None:
        if base_timestamp is not None or timestamp_deltas is not None:
            raise ValueError("timestamps leave no room for a base timestamp or deltas")
        if len(timestamps) != count or not count:
            raise ValueError(f"{len(timestamps)} timestamps for {count} records")
        base_timestamp = timestamps[0]
        deltas, lowest, highest = _deltas(timestamps, base_timestamp)
    else:
        deltas = _checked("timestamp_deltas", timestamp_deltas, count, _INT)
        lowest, highest = _range(deltas)
    if base_timestamp is None:
        raise TypeError("give a base timestamp, or timestamps")
    if lowest < -LIMIT or highest > LIMIT:
        raise ValueError(f"timestamp deltas from {lowest} to {highest} are out of range")
    delta_column = None if lowest == highest == 0 else deltas
    if not -LIMIT <= base_timestamp <= LIMIT:
        raise ValueError(f"timestamp {base_timestamp} is out of range")

    last = count - 1
    if offset_column is not None:
        if offset_column[0] < 0 or not is_increasing(offset_column):
            raise ValueError("offset deltas must not be negative and must increase")
        last = offset_column[-1]
        if last == count - 1:
            offset_column = None
    if last_offset_delta is None:
        last_offset_delta = last
    if not max(last, 0) <= last_offset_delta <= 0x7FFFFFFF:
        raise ValueError(f"{count} records up to offset delta {last} end at {last_offset_delta}")

    batch = bytearray(HEADER_SIZE)
    if magic not in (MAGIC_COLUMNS, MAGIC_RECORDS):
        raise ValueError(f"unknown magic {magic}")
    if count > MAX_RECORDS:
        raise ValueError(f"{count} records: a batch holds at most {MAX_RECORDS}")
    if count > 0 and magic == MAGIC_COLUMNS:
        encode_columns(batch, offset_column, delta_column, key_column, value_column, header_column)
    elif count > 0:
        batch = encode_records(count, offset_column, delta_column, key_column, value_column, header_column)
    if len(batch) - HEADER_SIZE > MAX_BODY_BYTES:
        raise ValueError(f"a body of {len(batch) - HEADER_SIZE} bytes: a batch holds at most {MAX_BODY_BYTES}")
    if compression is not Compression.NONE and count > 0:
        with memoryview(batch) as view:
            body = compress(compression, view[HEADER_SIZE:], compression_level)
        batch[HEADER_SIZE:] = body
    return write_header(
        batch,
        BatchHeader(
            base_offset=base_offset,
            batch_length=0,
            partition_leader_epoch=partition_leader_epoch,
            magic=magic,
            crc=0,
            attributes=compression | (TRANSACTIONAL if transactional else 0),
            last_offset_delta=last_offset_delta,
            base_timestamp=base_timestamp,
            max_timestamp=base_timestamp + highest,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            records_count=count,
        ),
    )


def _of_length(name: str, column: Sequence[_T] | None, count: int, allowed: frozenset[type]) -> Sequence[_T] | None:
    """The same as `_checked` for a column of known types."""
    if column is None:
        return None
    if len(column) != count:
        raise ValueError(f"{len(column)} {name} for {count} records")
    return None if count and column[0] is None and column.count(None) == count else column


_MOST_RUNS = 64


def _deltas(timestamps: Sequence[int], base: int) -> tuple[list[int], int, int]:
    """Return each timestamp minus `base`, and the lowest and highest of these deltas.

    A producer's timestamps mostly ascend, and a batch spans few milliseconds. Then bisection finds each run of equal
    timestamps and its deltas are made at once, in a quarter of the time. Raises TypeError for other types than int.
    """
    if sorted(timestamps) == timestamps:
        deltas: list[int] = []
        for _ in range(_MOST_RUNS):
            first = timestamps[len(deltas)]
            if type(first) is not int:
                break
            end = bisect_right(timestamps, first, len(deltas))
            deltas += [first - base] * (end - len(deltas))
            if end == len(timestamps):
                return deltas, deltas[0], deltas[-1]
    _checked("timestamps", timestamps, len(timestamps), _INT)
    deltas = [timestamp - base for timestamp in timestamps]
    return deltas, *_range(deltas)


def _range(deltas: Sequence[int] | None) -> tuple[int, int]:
    if deltas is None:
        return 0, 0
    distinct = set(deltas)  # a batch spans few milliseconds: a set is faster than two passes
    return min(distinct), max(distinct)


def _checked(name: str, column: Sequence[_T] | None, count: int, allowed: frozenset[type]) -> Sequence[_T] | None:
    """Return the column, or None if it is all null. One value of the wrong type would make a batch unreadable."""
    if column is None:
        return None
    _of_length(name, column, count, allowed)
    types = set(map(type, column))
    if not types <= allowed:
        names = ", ".join(sorted(kind.__name__ for kind in types - allowed))
        raise TypeError(f"{name} must be {' or '.join(sorted(kind.__name__ for kind in allowed))}, not {names}")
    return None if types <= _ALL_NONE else column


def _checked_headers(
    headers: Sequence[Sequence[Header] | None] | None, count: int
) -> Sequence[Sequence[Header] | None] | None:
    if headers is None:
        return None
    if len(headers) != count:
        raise ValueError(f"{len(headers)} headers for {count} records")
    try:
        # builtin_types: bytes stay bytes; by default msgspec expects base64 text, as in JSON.
        column = msgspec.convert(headers, HeadersColumn, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise TypeError(f"headers must be lists of (str, bytes or None): {error}") from error
    if not any(column):
        return None
    encoded = msgspec.msgpack.encode(column)
    if len(encoded) > MAX_HEADERS_BYTES:
        raise ValueError(f"{len(encoded)} bytes of headers: a batch holds at most {MAX_HEADERS_BYTES}")
    return column


def decode_batch(
    buffer: Buffer,
    header: BatchHeader | None = None,
    position: int = 0,
    *,
    check_crc: bool = True,
    max_body_bytes: int = MAX_STORED_BODY_BYTES,
    to_be_encoded: bool = False,
    gives_way: bool = False,
) -> DecodedBatch:
    """Decode the records of the batch at `position`. `header`, if given, is the one that `parse_header` read there.
    `to_be_encoded`: see `decode_records`. `gives_way`: see `decode_columns`.

    Nothing in the result refers to `buffer`. Raises only CorruptRecord for invalid bytes, and RecordsTooLarge for a
    batch over the limits. Memory is bounded by `max_body_bytes`, MAX_RECORDS and MAX_HEADERS_BYTES.
    """
    if header is None:
        header = parse_header(buffer, position)
    if check_crc:
        validate_batch(buffer, header, position)
    else:
        check_header(header)
        if position + header.size > len(buffer):
            raise CorruptRecord(f"a batch of {header.size} bytes, {len(buffer) - position} are left")
    compressed = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    if header.records_count == 0:
        if compressed:
            raise CorruptRecord(f"{len(compressed)} bytes follow a header that says no records")
        return DecodedBatch(header, range(0), header.base_timestamp, [], None, [], None)
    try:
        body = decompress(header.compression, compressed, max_body_bytes)
    except DecompressionTooLarge as error:
        raise RecordsTooLarge(str(error)) from error
    except DecompressionFailed as error:
        raise CorruptRecord(str(error)) from error
    if header.magic == MAGIC_COLUMNS:
        return decode_columns(header, body, gives_way=gives_way)
    return decode_records(header, body, to_be_encoded=to_be_encoded)


def claims_much(magic: int, attributes: int, size: int, records_count: int) -> bool:
    """Return whether the header of a producer's batch claims so many records that its body may not hold them. The
    arguments are fields of the header and the size of the batch."""
    if magic == MAGIC_RECORDS and not attributes & COMPRESSION_MASK:
        return records_count * SMALLEST_RECORD > size - HEADER_SIZE
    return records_count > size - HEADER_SIZE


def check_beginning(buffer: Buffer, header: BatchHeader, position: int = 0) -> None:
    """Raise CorruptRecord if the body of a batch with records does not begin as its header says. Takes less than a
    microsecond, and so tells an encoder that is wrong, not one that is hostile."""
    codec, start = header.attributes & COMPRESSION_MASK, position + HEADER_SIZE
    begins = bytes(buffer[start : min(start + _LONGEST_BEGINNING, position + header.size)])
    if codec:
        expected = BEGINNINGS.get(codec)
        if expected is not None and not begins.startswith(expected):
            raise CorruptRecord(f"the body is not data of {Compression(codec).name.lower()}")
    elif header.magic == MAGIC_COLUMNS:
        if not begins_as_columns(begins):
            raise CorruptRecord("the body does not begin with columns")
    elif not begins_as_records(begins, header.size - HEADER_SIZE, header.records_count):
        raise CorruptRecord("the first record does not end where the body allows it")


def check_count(buffer: Buffer, header: BatchHeader, position: int = 0) -> None:
    """Raise CorruptRecord if a batch that `claims_much` cannot have the records that its header claims. Its body is
    small, and takes at most MAX_BODY_BYTES when it is decompressed."""
    body: Buffer = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    try:
        body = decompress(header.compression, body, MAX_BODY_BYTES)
    except DecompressionTooLarge as error:
        raise RecordsTooLarge(str(error)) from error
    except DecompressionFailed as error:
        raise CorruptRecord(str(error)) from error
    if header.magic == MAGIC_COLUMNS:
        check_columns(header, body)
    else:
        check_room(header.records_count, len(body))


def check_size(buffer: Buffer, header: BatchHeader, position: int = 0) -> None:
    """Raise RecordsTooLarge for a producer's batch that is too large for readers, and CorruptRecord if its body cannot
    be decompressed. Other problems of the body are ignored. Takes at most the memory and time of `decode_batch`."""
    body = memoryview(buffer)[position + HEADER_SIZE : position + header.size]
    try:
        body = memoryview(decompress(header.compression, body, MAX_BODY_BYTES))
    except DecompressionTooLarge as error:
        raise RecordsTooLarge(str(error)) from error
    except DecompressionFailed as error:
        raise CorruptRecord(str(error)) from error
    if header.magic == MAGIC_COLUMNS:
        is_too_large = headers_size(body) > MAX_HEADERS_BYTES
    else:
        is_too_large = headers_exceed(body, header.records_count, MAX_HEADERS_BYTES)
    if is_too_large:
        raise RecordsTooLarge(f"more than {MAX_HEADERS_BYTES} bytes of headers")
