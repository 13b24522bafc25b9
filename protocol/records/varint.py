"""Bodies of magic 2: Kafka's records (DefaultRecord), each a sequence of zigzag varints."""

from collections.abc import Sequence

from minibroker.protocol.records.body import MAX_HEADERS_BYTES, DecodedBatch, Header, checked_base_timestamp
from minibroker.protocol.records.header import LIMIT, BatchHeader, Buffer, CorruptRecord

_SMALLEST_RECORD = 7  # seven fields, a byte each


def encode_records(
    count: int,
    offset_deltas: Sequence[int] | None,
    timestamp_deltas: Sequence[int] | None,
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
) -> bytearray:
    """The body. None for a column means what nil means in magic 77."""
    body = bytearray()
    for index in range(count):
        record = bytearray(1)  # the record's attributes: none are defined
        _write_varint(record, 0 if timestamp_deltas is None else timestamp_deltas[index])
        _write_varint(record, index if offset_deltas is None else offset_deltas[index])
        _write_bytes(record, None if keys is None else keys[index])
        _write_bytes(record, None if values is None else values[index])
        pairs = (None if headers is None else headers[index]) or ()
        _write_varint(record, len(pairs))
        for name, value in pairs:
            _write_bytes(record, name.encode())
            _write_bytes(record, value)
        _write_varint(body, len(record))
        body += record
    return body


def _write_varint(output: bytearray, value: int) -> None:
    value = (value << 1) ^ (value >> 63)
    while value > 0x7F:
        output.append(value & 0x7F | 0x80)
        value >>= 7
    output.append(value)


def _write_bytes(output: bytearray, data: bytes | None) -> None:
    if data is None:
        _write_varint(output, -1)
    else:
        _write_varint(output, len(data))
        output += data


def decode_records(header: BatchHeader, body: Buffer) -> DecodedBatch:
    """The records of a decompressed body. Raises CorruptRecord."""
    count = header.records_count
    data = bytes(body)
    if count * _SMALLEST_RECORD > len(data):
        raise CorruptRecord(f"{count} records in {len(data)} bytes")
    base_timestamp = checked_base_timestamp(header)
    offsets: list[int] = []
    timestamp_deltas: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[list[Header] | None] = []
    position = headers_bytes = 0
    last_delta = -1
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
                pairs.append((name.decode(), header_value))
                if headers_bytes + position - headers_start > MAX_HEADERS_BYTES:
                    raise CorruptRecord(f"more than {MAX_HEADERS_BYTES} bytes of headers")
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
    except (IndexError, UnicodeDecodeError) as error:
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


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The value at `position`, and where the next begins. Raises IndexError past the end of `data`."""
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
