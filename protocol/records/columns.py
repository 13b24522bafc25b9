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

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from minibroker.protocol.records.body import (
    MAX_HEADERS_BYTES,
    DecodedBatch,
    Header,
    HeadersColumn,
    checked_base_timestamp,
    is_increasing,
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


_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(_Columns)
_headers_decoder: msgspec.msgpack.Decoder[list[list[Header] | None]] = msgspec.msgpack.Decoder(HeadersColumn)
_NIL = b"\xc0"


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


def decode_columns(header: BatchHeader, body: Buffer) -> DecodedBatch:
    """Decode the records of a decompressed body. Raises CorruptRecord."""
    count = header.records_count
    try:
        columns = _columns_decoder.decode(body)
        headers = _decode_headers(columns.headers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"not the columns of {count} records: {error}") from error

    base_offset = header.base_offset
    offsets: Sequence[int] = range(base_offset, base_offset + count)
    if columns.offset_deltas is not None:
        offset_deltas = _expanded("offset deltas", columns.offset_deltas, count)
        if offset_deltas[-1] > header.last_offset_delta or not is_increasing(offset_deltas):
            raise CorruptRecord("offset deltas do not increase, or pass the last one")
        offsets = [base_offset + delta for delta in offset_deltas]

    base_timestamp, timestamp_deltas = header.base_timestamp, [0]
    if columns.timestamp_deltas is not None:
        base_timestamp, timestamp_deltas = checked_base_timestamp(header), columns.timestamp_deltas
    timestamp_deltas = _expanded("timestamp deltas", timestamp_deltas, count)
    if header.is_log_append_time:
        base_timestamp, timestamp_deltas = header.max_timestamp, [0] * count

    return DecodedBatch(
        header,
        offsets,
        base_timestamp,
        timestamp_deltas,
        None if columns.keys is None else _expanded("keys", columns.keys, count),
        [None] * count if columns.values is None else _expanded("values", columns.values, count),
        None if headers is None else _expanded("headers", headers, count),
    )


def headers_size(body: Buffer) -> int:
    """Return the size of the encoded header column, or 0 if the body is not columns."""
    try:
        return len(memoryview(_columns_decoder.decode(body).headers))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


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
