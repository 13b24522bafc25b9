"""Bodies of magic 77: the columns of all records.

One MessagePack array `[offset_deltas, timestamp_deltas, keys, values, headers]`, compressed as a whole. A column is nil
(null for every record; for offset_deltas 0, 1, 2...; for timestamp_deltas 0), an array of one element (the same for
every record) or an array of one element for each record.

msgspec decodes the columns against their types. Decoding stops at a nested array in place of a value, which would cost
70 bytes of memory for each byte of input, and at a column longer than MAX_RECORDS. The header column consists of nested
arrays, so it is skipped first (which allocates nothing) and decoded only if it is within MAX_HEADERS_BYTES.

Rejected: the `msgpack` package, which builds all objects before types can be checked, and takes 2.5 times as long to
encode.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Annotated, TypeVar

import msgspec

from minibroker.protocol.records.body import (
    MAX_HEADERS_BYTES,
    DecodedBatch,
    Header,
    HeadersColumn,
    checked_base_timestamp,
    is_increasing,
    size_of_headers,
)
from minibroker.protocol.records.header import (
    HEADER_SIZE,
    LIMIT,
    MAX_RECORDS,
    BatchHeader,
    Buffer,
    CorruptRecord,
    RecordsTooLarge,
)

_T = TypeVar("_T")

_Delta = Annotated[int, msgspec.Meta(ge=-LIMIT, le=LIMIT)]
_OffsetDelta = Annotated[int, msgspec.Meta(ge=0, le=0x7FFFFFFF)]

# The longest column of any batch. Decoding stops at a longer one before it takes memory, since the column's length is
# compared with the count only after decoding.
_Length = msgspec.Meta(max_length=MAX_RECORDS)
_BytesColumn = Annotated[list[bytes | None], _Length]


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    offset_deltas: Annotated[list[_OffsetDelta], _Length] | None
    timestamp_deltas: Annotated[list[_Delta], _Length] | None
    keys: _BytesColumn | None
    values: _BytesColumn | None
    headers: msgspec.Raw


class _Times(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The columns of numbers. The others are skipped, which allocates nothing."""

    offset_deltas: Annotated[list[_OffsetDelta], _Length] | None
    timestamp_deltas: Annotated[list[_Delta], _Length] | None
    keys: msgspec.Raw
    values: msgspec.Raw
    headers: msgspec.Raw


_RawColumns = tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw]
"""All of them skipped."""

_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(_Columns)
_raw_decoder = msgspec.msgpack.Decoder(_RawColumns)
_times_decoder = msgspec.msgpack.Decoder(_Times)
_headers_decoder: msgspec.msgpack.Decoder[list[list[Header] | None]] = msgspec.msgpack.Decoder(HeadersColumn)
_NIL = b"\xc0"
_FIVE_COLUMNS = 0x95
_DECODED_AT_ONCE = 4_096
_MOST_IN_ONE_CALL = 1 << 16
"""Records whose columns are decoded in one call although other threads should run: about 5 ms."""


def encode_columns(
    batch: bytearray,
    offset_deltas: Sequence[int] | None,
    timestamp_deltas: Sequence[int] | None,
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
) -> None:
    """Write the body behind the room for the header; `batch` must hold nothing else."""
    _encoder.encode_into((offset_deltas, timestamp_deltas, keys, values, headers), batch, HEADER_SIZE)


def decode_columns(header: BatchHeader, body: Buffer, *, gives_way: bool = False) -> DecodedBatch:
    """Decode the records of a decompressed body. Raises CorruptRecord. `gives_way`: let other threads run meanwhile,
    also if there are a million records, whose decoding then takes several times as long."""
    count = header.records_count
    is_slow = gives_way and count > _MOST_IN_ONE_CALL and begins_as_columns(body)
    try:
        columns = _decoded_giving_way(body, count) if is_slow else _columns_decoder.decode(body)
        headers = _decode_headers(columns.headers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"not the columns of {count} records: {error}") from error

    base_offset = header.base_offset
    offsets: Sequence[int] = range(base_offset, base_offset + count)
    if columns.offset_deltas is not None:
        offset_deltas = _expanded("offset deltas", columns.offset_deltas, count)
        _check_offset_deltas(offset_deltas, header)
        offsets = [base_offset + delta for delta in offset_deltas]

    base_timestamp, timestamp_deltas = header.base_timestamp, [0]
    if columns.timestamp_deltas is not None:
        base_timestamp, timestamp_deltas = checked_base_timestamp(header), columns.timestamp_deltas
    timestamp_deltas = _expanded("timestamp deltas", timestamp_deltas, count)
    if header.is_log_append_time:
        base_timestamp, timestamp_deltas = header.max_timestamp, [0] * count

    keys, values = columns.keys, columns.values
    shared_bytes = 0
    if count > 1:
        shared = (column[0] for column in (keys, values) if column is not None and len(column) == 1)
        shared_bytes = sum(map(len, filter(None, shared)))
        if headers is not None and len(headers) == 1:
            shared_bytes += size_of_headers(headers[0])
    return DecodedBatch(
        header,
        offsets,
        base_timestamp,
        timestamp_deltas,
        None if keys is None else _expanded("keys", keys, count),
        [None] * count if values is None else _expanded("values", values, count),
        None if headers is None else _expanded("headers", headers, count),
        shared_bytes,
    )


def timestamps_of(header: BatchHeader, body: Buffer) -> Iterator[tuple[int, int]]:
    """Return an iterator over timestamp and offset of each record. Both the call and the iterator raise CorruptRecord.

    Decoding a million numbers in one call would keep other threads from running meanwhile, so those of a large batch
    are decoded one by one, as the iterator gets to them."""
    count = header.records_count
    if count > _DECODED_AT_ONCE and begins_as_columns(body):
        return _walked_times(header, body if isinstance(body, bytes) else bytes(body))
    try:
        columns = _times_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"not the columns of {count} records: {error}") from error
    offset_deltas: Iterable[int] = range(count)
    if columns.offset_deltas is not None:
        if len(columns.offset_deltas) != count:
            raise CorruptRecord(f"{len(columns.offset_deltas)} offset deltas for {count} records")
        _check_offset_deltas(columns.offset_deltas, header)
        offset_deltas = columns.offset_deltas
    timestamp_deltas: Iterable[int] = repeat(0)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    if columns.timestamp_deltas is not None:
        base_timestamp, timestamp_deltas = checked_base_timestamp(header), columns.timestamp_deltas
        if len(columns.timestamp_deltas) == 1:
            timestamp_deltas = repeat(columns.timestamp_deltas[0])
        elif len(columns.timestamp_deltas) != count:
            raise CorruptRecord(f"{len(columns.timestamp_deltas)} timestamp deltas for {count} records")
    return zip(map(base_timestamp.__add__, timestamp_deltas), map(base_offset.__add__, offset_deltas), strict=False)


def _walked_times(header: BatchHeader, data: bytes) -> Iterator[tuple[int, int]]:
    count, base_offset = header.records_count, header.base_offset
    try:
        offset_deltas: Iterable[int] = range(count)
        position = 2
        if data[1] != _NIL[0]:
            length, first = _array(data, 1)
            if length != count:
                raise CorruptRecord(f"{length} offset deltas for {count} records")
            position = first
            for _, after in _numbers(data, first, length):
                position = after
            offset_deltas = (delta for delta, _ in _numbers(data, first, length))
        if data[position] == _NIL[0]:
            return zip(repeat(header.base_timestamp), map(base_offset.__add__, offset_deltas), strict=False)
        length, first = _array(data, position)
    except IndexError as error:
        raise CorruptRecord(f"not the columns of {count} records: {error}") from error
    if length not in (1, count):
        raise CorruptRecord(f"{length} timestamp deltas for {count} records")
    deltas = (delta for delta, _ in _numbers(data, first, length))
    timestamps = map(checked_base_timestamp(header).__add__, deltas)
    return zip(
        repeat(next(timestamps)) if length == 1 else timestamps, map(base_offset.__add__, offset_deltas), strict=False
    )


def _decoded_giving_way(body: Buffer, count: int) -> _Columns:
    """Decode as `_columns_decoder` does, element by element."""
    data = body if isinstance(body, bytes) else bytes(body)
    raw = _raw_decoder.decode(data)  # says where each column begins, and that no element is cut off
    begins = list(accumulate((len(memoryview(column)) for column in raw), initial=1))
    offset_deltas = _number_column(data, begins[0], count)
    if offset_deltas and offset_deltas[0] < 0:
        raise CorruptRecord(f"an offset delta of {offset_deltas[0]}")
    timestamp_deltas = _number_column(data, begins[1], count)
    keys, values = (_bytes_column(data, begin, count) for begin in begins[2:4])
    return _Columns(offset_deltas, timestamp_deltas, keys, values, raw[-1])


def _number_column(data: bytes, begin: int, count: int) -> list[int] | None:
    if data[begin] == _NIL[0]:
        return None
    length, first = _array_for(data, begin, count)
    return [number for number, _ in _numbers(data, first, length)]


def _bytes_column(data: bytes, begin: int, count: int) -> list[bytes | None] | None:
    if data[begin] == _NIL[0]:
        return None
    length, position = _array_for(data, begin, count)
    column: list[bytes | None] = []
    for _ in range(length):
        kind = data[position]
        if kind == _NIL[0]:
            column.append(None)
            position += 1
            continue
        if not 0xC4 <= kind <= 0xC6:
            raise CorruptRecord(f"neither bytes nor nil at byte {position}")
        first = position + 1 + (1 << (kind & 0x03))
        position = first + int.from_bytes(data[position + 1 : first], "big")
        column.append(data[first:position])
    return column


def _array_for(data: bytes, begin: int, count: int) -> tuple[int, int]:
    length, first = _array(data, begin)
    if length not in (1, count):
        raise CorruptRecord(f"{length} elements in a column for {count} records")
    return length, first


def _array(data: bytes, position: int) -> tuple[int, int]:
    """Return the length of the MessagePack array at `position`, and the position of its first element."""
    kind = data[position]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F, position + 1
    if kind not in (0xDC, 0xDD):
        raise CorruptRecord(f"no array at byte {position}")
    end = position + (3 if kind == 0xDC else 5)
    return int.from_bytes(data[position + 1 : end], "big"), end


def _numbers(data: bytes, position: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield MessagePack's integers from `position` on, each with the position after it. Raises CorruptRecord."""
    for _ in range(count):
        if position >= len(data):
            raise CorruptRecord(f"the body ends within {count} numbers")
        kind = data[position]
        position += 1
        if kind < 0x80:
            yield kind, position
        elif kind >= 0xE0:
            yield kind - 0x100, position
        elif 0xCC <= kind <= 0xD3:
            end = position + (1 << (kind & 0x03))
            number = int.from_bytes(data[position:end], "big", signed=kind >= 0xD0)
            if end > len(data) or not -LIMIT <= number <= LIMIT:
                raise CorruptRecord(f"a number of {number}")
            position = end
            yield number, position
        else:
            raise CorruptRecord(f"no number at byte {position - 1}")


def begins_as_columns(body: Buffer) -> bool:
    return len(body) > 0 and body[0] == _FIVE_COLUMNS


def check_columns(header: BatchHeader, body: Buffer) -> None:
    """Raise CorruptRecord unless `decode_columns` can decode a producer's batch. Takes memory for the body alone, not
    for the records that a column of one element becomes."""
    count = header.records_count
    try:
        columns = _columns_decoder.decode(body)
        headers = _decode_headers(columns.headers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"not the columns of {count} records: {error}") from error
    named = {
        "offset deltas": columns.offset_deltas,
        "timestamp deltas": columns.timestamp_deltas,
        "keys": columns.keys,
        "values": columns.values,
        "headers": headers,
    }
    for name, column in named.items():
        if column is not None and len(column) != count and (len(column) != 1 or column is columns.offset_deltas):
            raise CorruptRecord(f"{len(column)} {name} for {count} records")
    if columns.offset_deltas is not None:
        _check_offset_deltas(columns.offset_deltas, header)
    if columns.timestamp_deltas is not None:
        checked_base_timestamp(header)


def headers_size(body: Buffer) -> int:
    """Return the size of the encoded header column, or 0 if the body is not columns."""
    try:
        return len(memoryview(_columns_decoder.decode(body).headers))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


def _check_offset_deltas(deltas: list[int], header: BatchHeader) -> None:
    if deltas[-1] > header.last_offset_delta or not is_increasing(deltas):
        raise CorruptRecord("offset deltas do not increase, or pass the last one")


def _decode_headers(raw: msgspec.Raw) -> list[list[Header] | None] | None:
    encoded = memoryview(raw)
    if encoded == _NIL:
        return None
    if len(encoded) > MAX_HEADERS_BYTES:
        raise RecordsTooLarge(f"{len(encoded)} bytes of headers, more than {MAX_HEADERS_BYTES}")
    return _headers_decoder.decode(encoded)


def _expanded(name: str, column: list[_T], count: int) -> list[_T]:
    if len(column) == count:
        return column
    if len(column) == 1:
        return column * count
    raise CorruptRecord(f"{len(column)} {name} for {count} records")
