"""Bodies of magic 2: Kafka's records (DefaultRecord), each a sequence of zigzag varints.

The problem: a record has ten small fields, and a Python step for each would take a microsecond or two per record.
Brokers transcode batches of columns to this format for Kafka's clients (`transcoding`) while they serve other clients.

The choice: most fields are equal in all records of a batch, or take few values. So each field is a column: either bytes
that all records share, or a piece per record, looked up in a table by one call for the whole column. Adjacent shared
columns are merged, and all columns are interleaved by slices of a list and joined once. A record's length is the sum of
the lengths of its fields: one number if these do not vary, otherwise a column. Offsets differ in every record, but have
one length up to 63, to 8191, and so on, so a batch is encoded range by range.

Rejected: a template of a record that `%` fills (slower than the join); strides of a bytearray, one byte of all records
at a time (slower for long values).

Decoding takes a step per record: native clients pay this price for records that Kafka's clients wrote.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from operator import add

from minibroker.protocol.records.body import (
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    DecodedBatch,
    Header,
    checked_base_timestamp,
)
from minibroker.protocol.records.header import HEADER_SIZE, LIMIT, BatchHeader, Buffer, CorruptRecord, RecordsTooLarge

SMALLEST_RECORD = 7  # seven fields, a byte each

_TABLE = 1 << 14
"""The number of precomputed varints: enough for the lengths and offsets of most records."""


class BodyTooLarge(ValueError):
    """The encoded records would exceed the limit."""


def encode_records(
    count: int,
    offset_deltas: Sequence[int] | None,
    timestamp_deltas: Sequence[int] | None,
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
    limit: int = MAX_BODY_BYTES,
) -> bytearray:
    """Encode at least one record, behind HEADER_SIZE bytes of room for the header. A column of None means the same as
    nil in magic 77, but no column has one element for many records. Raises BodyTooLarge for a body of more than `limit`
    bytes, mostly before it takes memory."""
    key_columns, key_size, key_sizes = _bytes_columns(keys)
    value_columns, value_size, value_sizes = _bytes_columns(values)
    columns = key_columns + value_columns
    fixed = 1 + key_size + value_size  # with the record's attributes
    varying = [sizes for sizes in (key_sizes, value_sizes) if sizes is not None]
    tail = b"\0"  # no headers: the end of one record is merged with the beginning of the next
    if headers is None:
        fixed += 1
    else:
        header_column = _headers_column(headers)
        columns.append(header_column)
        varying.append(list(map(len, header_column)))
        tail = b""
    sizes: Sequence[int] | None = None
    if varying:
        sizes = varying[0]
        for more in varying[1:]:
            sizes = list(map(add, sizes, more))
    least = fixed * count + (sum(sizes) if sizes is not None else 0)  # without lengths, offsets and timestamps
    if least > limit:
        raise BodyTooLarge(f"a body of at least {least} bytes: a batch holds at most {limit}")

    pieces = [bytes(HEADER_SIZE - len(tail))]
    for first, end, width in _offset_ranges(count, offset_deltas):
        offsets = _offset_column(first, end, offset_deltas)
        row = _lead_columns(
            tail,
            fixed + width,
            None if sizes is None else sizes[first:end],
            None if timestamp_deltas is None else timestamp_deltas[first:end],
        )
        row.append(offsets)
        row += [column if isinstance(column, bytes) else column[first:end] for column in columns]
        pieces += _interleaved(_merged(row), end - first)
    pieces.append(tail)
    body = bytearray().join(pieces)
    if len(body) - HEADER_SIZE > limit:
        raise BodyTooLarge(f"a body of {len(body) - HEADER_SIZE} bytes: a batch holds at most {limit}")
    return body


_Column = bytes | Sequence[bytes]


def _bytes_columns(values: Sequence[bytes | None] | None) -> tuple[list[_Column], int, Sequence[int] | None]:
    """Return the columns of a nullable field of bytes (lengths and data), the part of their size that all records
    share, and the rest for each record, if it varies."""
    if values is None:
        return [_varint(-1)], 1, None
    data: Sequence[bytes]
    try:
        lengths = list(map(len, values))  # type: ignore[arg-type]
        data = values  # type: ignore[assignment]
    except TypeError:
        lengths = [-1 if value is None else len(value) for value in values]
        data = [value or b"" for value in values]
    if lengths.count(lengths[0]) == len(lengths):
        length = _varint(lengths[0])
        return [length, data], len(length) + max(lengths[0], 0), None
    if max(lengths) < _TABLE:
        varints, sizes = _tables()
        return [list(map(varints.__getitem__, lengths)), data], 0, list(map(sizes.__getitem__, lengths))
    column = list(map(_varint, lengths))
    return [column, data], 0, list(map(add, map(len, column), map(len, data)))


@cache
def _tables() -> tuple[list[bytes], list[int]]:
    """Return the varints from 0 on, and the sizes of fields of these lengths. The last of each, at -1, is for null."""
    varints = [_varint(number) for number in range(_TABLE)]
    return [*varints, _varint(-1)], [*(number + len(varint) for number, varint in enumerate(varints)), 1]


def _offset_ranges(count: int, deltas: Sequence[int] | None) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of records whose offsets take the same number of bytes: first record, end, that number."""
    first = width = 0
    while first < count:
        width += 1
        bound = 1 << (7 * width - 1)  # one bit per byte marks continuation, one bit is the sign
        end = min(bound, count) if deltas is None else bisect_left(deltas, bound)
        if first < end:
            yield first, end, width
        first = end


def _offset_column(first: int, end: int, deltas: Sequence[int] | None) -> list[bytes]:
    last = end - 1 if deltas is None else deltas[end - 1]
    if last >= _TABLE:
        return list(map(_varint, range(first, end) if deltas is None else deltas[first:end]))
    varints, _ = _tables()
    return varints[first:end] if deltas is None else list(map(varints.__getitem__, deltas[first:end]))


def _lead_columns(tail: bytes, fixed: int, sizes: Sequence[int] | None, deltas: Sequence[int] | None) -> list[_Column]:
    """Return the columns before the offset: the end of the previous record, length, attributes, timestamp. The size of
    a record is `fixed`, plus its number in `sizes`, plus the size of its timestamp."""
    distinct = {0} if deltas is None else set(deltas)
    times = {delta: _varint(delta) for delta in distinct}
    if sizes is None:
        leads = {delta: b"".join((tail, _varint(fixed + len(time)), b"\0", time)) for delta, time in times.items()}
        return [_looked_up(leads, deltas)]
    time_column = _looked_up({delta: b"\0" + time for delta, time in times.items()}, deltas)
    widths = set(map(len, times.values()))
    if len(widths) == 1:
        fixed += widths.pop()
    else:
        sizes = list(map(add, sizes, map(len, time_column)))  # type: ignore[arg-type]
        fixed -= 1  # the attributes are in the time column
    if max(sizes) + fixed < _TABLE:
        varints, _ = _tables()
        return [tail, list(map(varints.__getitem__, map(fixed.__add__, sizes))), time_column]
    return [tail, [_varint(fixed + size) for size in sizes], time_column]


def _looked_up(table: dict[int, bytes], column: Sequence[int] | None) -> _Column:
    if len(table) == 1:
        return next(iter(table.values()))
    assert column is not None
    return list(map(table.__getitem__, column))


def _headers_column(headers: Sequence[Sequence[Header] | None]) -> list[bytes]:
    column: list[bytes] = []
    names: dict[str, bytes] = {}
    lengths, _ = _tables()
    last: Sequence[Header] | None = None
    encoded = b"\0"
    for pairs in headers:
        if pairs is not last:  # they share an object if the column had one element
            last = pairs
            parts = [_varint(len(pairs)) if pairs else b"\0"]
            for name, value in pairs or ():
                if name not in names:
                    in_bytes = name.encode(errors="surrogateescape")
                    names[name] = _varint(len(in_bytes)) + in_bytes
                parts.append(names[name])
                if value is None:
                    parts.append(lengths[-1])
                else:
                    parts += (lengths[len(value)] if len(value) < _TABLE else _varint(len(value)), value)
            encoded = b"".join(parts)
        column.append(encoded)
    return column


def _merged(row: Sequence[_Column]) -> list[_Column]:
    """Return the columns without empty ones, and with adjacent shared columns joined."""
    merged: list[_Column] = []
    for column in row:
        if isinstance(column, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += column
        elif column:
            merged.append(column)
    return merged


def _interleaved(row: Sequence[_Column], count: int) -> list[bytes]:
    pieces = [b""] * (len(row) * count)
    for index, column in enumerate(row):
        pieces[index :: len(row)] = [column] * count if isinstance(column, bytes) else column
    return pieces


def _varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    output = bytearray()
    while value > 0x7F:
        output.append(value & 0x7F | 0x80)
        value >>= 7
    output.append(value)
    return bytes(output)


def decode_records(header: BatchHeader, body: Buffer, *, to_be_encoded: bool = False) -> DecodedBatch:
    """Decode the records of a decompressed body. Raises CorruptRecord.

    Header names may be any bytes, since librdkafka does not check them. Invalid UTF-8 is replaced by U+FFFD, as in
    Java's client, or, with `to_be_encoded`, kept so that `encode_records` restores it.
    """
    count = header.records_count
    data = bytes(body)
    check_room(count, len(data))
    base_timestamp = checked_base_timestamp(header)
    offsets: list[int] = []
    timestamp_deltas: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[list[Header] | None] = []
    position = headers_bytes = 0
    last_delta = -1
    instead = "surrogateescape" if to_be_encoded else "replace"
    try:
        for _ in range(count):
            length, position = _read_varint(data, position)
            end = position + length
            timestamp_delta, position = _read_varint(data, position + 1)  # past the record's attributes
            offset_delta, position = _read_varint(data, position)
            key, position = _read_bytes(data, position)
            value, position = _read_bytes(data, position)
            headers_start = position
            pairs_count, position = _read_varint(data, position)
            pairs: list[Header] = []
            if pairs_count < 0:
                raise CorruptRecord(f"a record with {pairs_count} headers")
            for _ in range(pairs_count):
                name, position = _read_bytes(data, position)
                if name is None:
                    raise CorruptRecord("a header without a name")
                header_value, position = _read_bytes(data, position)
                pairs.append((name.decode(errors=instead), header_value))
                if headers_bytes + position - headers_start > MAX_HEADERS_BYTES:
                    raise RecordsTooLarge(f"more than {MAX_HEADERS_BYTES} bytes of headers")
            headers_bytes += position - headers_start
            if position != end:
                raise CorruptRecord(f"a record of {length} bytes ends {position - end} after its end")
            if not last_delta < offset_delta <= header.last_offset_delta:
                raise CorruptRecord("offset deltas do not increase, or pass the last one")
            if not -LIMIT <= timestamp_delta <= LIMIT:
                raise CorruptRecord(f"a timestamp delta of {timestamp_delta}")
            last_delta = offset_delta
            offsets.append(header.base_offset + offset_delta)
            timestamp_deltas.append(timestamp_delta)
            keys.append(key)
            values.append(value)
            headers.append(pairs or None)
    except IndexError as error:
        raise CorruptRecord(f"not {count} records: {error}") from error
    if position != len(data):
        raise CorruptRecord(f"{len(data) - position} bytes follow the last record")
    if header.is_log_append_time:
        base_timestamp, timestamp_deltas = header.max_timestamp, [0] * count
    return DecodedBatch(
        header,
        offsets,
        base_timestamp,
        timestamp_deltas,
        keys if keys.count(None) < count else None,
        values,
        headers if headers.count(None) < count else None,
    )


def begins_as_records(body: bytes, body_size: int, count: int) -> bool:
    """Return whether the first of `count` records may be that of a body of `body_size` bytes. `body` is its first ten
    bytes."""
    try:
        length, begin = _read_varint(body, 0)
    except (IndexError, CorruptRecord):
        return False
    left = body_size - begin - length
    return length > 0 and (left > 0 if count > 1 else left == 0)


def check_room(count: int, body_bytes: int) -> None:
    """Raise CorruptRecord if a decompressed body is too small for so many records."""
    if count * SMALLEST_RECORD > body_bytes:
        raise CorruptRecord(f"{count} records in {body_bytes} bytes")


def walk_times(header: BatchHeader, data: bytes) -> Iterator[tuple[int, int]]:
    """Yield timestamp and offset of each record of a decompressed body. Raises CorruptRecord at an invalid record."""
    base_offset, base_timestamp = header.base_offset, checked_base_timestamp(header)
    position, last_delta = 0, -1
    try:
        for _ in range(header.records_count):
            length, position = _read_varint(data, position)
            end = position + length
            timestamp_delta, position = _read_varint(data, position + 1)  # past the record's attributes
            offset_delta, position = _read_varint(data, position)
            if not position < end <= len(data):
                raise CorruptRecord(f"a record of {length} bytes")
            if not last_delta < offset_delta <= header.last_offset_delta:
                raise CorruptRecord("offset deltas do not increase, or pass the last one")
            if not -LIMIT <= timestamp_delta <= LIMIT:
                raise CorruptRecord(f"a timestamp delta of {timestamp_delta}")
            position, last_delta = end, offset_delta
            yield base_timestamp + timestamp_delta, base_offset + offset_delta
    except IndexError as error:
        raise CorruptRecord(f"not {header.records_count} records: {error}") from error


def headers_exceed(body: Buffer, count: int, limit: int) -> bool:
    """Return whether `decode_records` would find more than `limit` bytes of headers; False for an invalid body. Stop as
    soon as the bytes left cannot exceed the limit."""
    data = bytes(body)
    left = len(data)
    size = position = 0
    try:
        for _ in range(count):
            if size + left - position <= limit:
                return False
            length, position = _read_varint(data, position)
            end = position + length
            position += 1  # the record's attributes
            while data[position] > 0x7F:
                position += 1
            position += 1  # past the timestamp
            while data[position] > 0x7F:
                position += 1
            position += 1  # past the offset
            for _ in "kv":
                length, position = _read_varint(data, position)
                position += max(length, 0)
            if not position < end <= left:
                return False
            size += end - position
            if size > limit and end - position > 1:
                return True
            position = end
    except (IndexError, CorruptRecord):
        pass
    return False


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the value at `position` and the position after it. Raises IndexError past the end of `data`."""
    result = shift = 0
    while shift < 70:  # ten bytes hold 64 bits
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7
    raise CorruptRecord("a variable-length integer of more than ten bytes")


def _read_bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = _read_varint(data, position)
    if length == -1:
        return None, position
    end = position + length
    if length < 0 or end > len(data):
        raise CorruptRecord(f"a field of {length} bytes, {len(data) - position} are left")
    return data[position:end], end
