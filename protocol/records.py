"""The record batch: what producers send, logs store, followers copy and consumers read.

The problem: records come by the million, and Python spends more on touching one of them than C does
on a whole batch. So the unit is the batch, and the broker looks at its header alone. The header is
Kafka's version 2, byte for byte (DefaultRecordBatch): its CRC-32C begins at the attributes, so the
leader writes base offset and leader epoch in front of it without encoding anything again.

The choice: behind that header, magic 77 holds columns instead of records, one MessagePack array
`[offset_deltas, timestamp_deltas, keys, values, headers]`, compressed as a whole. A column is nil
(null for every record; for offset_deltas 0, 1, 2...; for timestamp_deltas 0), an array of one element
(the same for every record) or an array of one element for each record. C code then encodes and
decodes each column in one call, and Arrow gets its columns without a step per record. Magic 2,
Kafka's varint records, is here too: control batches use it, and so do Kafka's own clients.

Nobody trusts a body. msgspec decodes the columns against their types, so that nested arrays, which
cost 70 bytes of memory for each byte of input, end the decoding where a value was due, and so does a
column longer than MAX_RECORDS. The header
column is the exception, arrays within arrays by nature: it is skipped over first (which allocates
nothing), and decoded only if it is within MAX_HEADERS_BYTES. The `msgpack` package was rejected: it
builds whatever it is sent before anyone can check a type, and takes 2.5 times as long to encode.

Timestamps are milliseconds since the Unix epoch.
"""

import operator
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from crc32c import crc32c

from minibroker.protocol.compression import Compression, DecompressionFailed, compress, decompress

Buffer = bytes | bytearray | memoryview
Header = tuple[str, bytes | None]

MAGIC_RECORDS = 2
MAGIC_COLUMNS = 77

HEADER_SIZE = 61
LENGTH_END = 12  # batch_length counts the bytes from here on
CRC_END = 21  # the CRC covers the bytes from here on

MAX_RECORDS = 1 << 20
"""Records in a batch: constant columns would otherwise let a few bytes claim billions."""

MAX_BODY_BYTES = 64 << 20
"""A body, decompressed."""

MAX_HEADERS_BYTES = 8 << 20
"""All record headers of a batch, as encoded: each pair of two bytes or more becomes some 70 in memory."""

NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1

_COMPRESSION_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20

_HEADER = struct.Struct(">qiibIhiqqqhii")
_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LEADER_EPOCH_POSITION = 12
_CRC = struct.Struct(">I")
_CRC_POSITION = 17
_CONTROL_KEY = struct.Struct(">hh")  # version, type
_CONTROL_VALUE = struct.Struct(">hi")  # version, coordinator epoch
_SMALLEST_RECORD = 7  # magic 2: seven fields, a byte each

# Offsets, timestamps and timestamp deltas stay this far from 64 bits, so that sums of two fit.
_LIMIT = 1 << 62


class CorruptRecord(ValueError):
    """The bytes are not a batch that anyone wrote: Kafka's CORRUPT_MESSAGE."""


class InvalidRecord(ValueError):
    """The batch is intact, but no producer may send it: Kafka's INVALID_RECORD."""


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The 61 bytes in front of a batch, in their order. `crc` covers attributes to the end of the batch."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch, header included."""
        return self.batch_length + LENGTH_END

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self) -> Compression:
        """Raises ValueError for a codec that does not exist; `check_header` has ruled that out."""
        return Compression(self.attributes & _COMPRESSION_MASK)

    @property
    def is_log_append_time(self) -> bool:
        """Every record's timestamp is `max_timestamp`, whatever the body says."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def has_producer_id(self) -> bool:
        return self.producer_id > NO_PRODUCER_ID

    @property
    def last_sequence(self) -> int:
        """The last record's sequence, which wraps from 2**31 - 1 to 0; NO_SEQUENCE without a base.

        Counted by offsets and not by records, so compaction does not change it.
        """
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF


class BatchSlice(NamedTuple):
    """A whole batch within a buffer: `buffer[start:end]`."""

    header: BatchHeader
    start: int
    end: int


class DecodedBatch(msgspec.Struct, frozen=True):
    """A batch's records as columns of `count` elements each; `keys` or `headers` None: null in every record.

    Columns of equal elements may hold the same object `count` times.
    """

    header: BatchHeader
    offsets: Sequence[int]
    base_timestamp: int
    timestamp_deltas: list[int]
    """A record's timestamp in ms since 1970 is `base_timestamp` and its delta: small numbers, which cost less to hand
    on than the sums."""
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[list[Header] | None] | None

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def timestamps(self) -> list[int]:
        """In ms since 1970; computed each time."""
        return [self.base_timestamp + delta for delta in self.timestamp_deltas]

    @property
    def base_offset(self) -> int:
        return self.header.base_offset


class ControlType(IntEnum):
    """What a control batch says of the transaction that it ends (Kafka's ControlRecordType)."""

    ABORT = 0
    COMMIT = 1


class EndTransactionMarker(NamedTuple):
    """The one record of a control batch (Kafka's EndTransactionMarker)."""

    type: ControlType
    coordinator_epoch: int


_Delta = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT)]
_OffsetDelta = Annotated[int, msgspec.Meta(ge=0, le=0x7FFFFFFF)]

# The longest column that any batch may have: decoding stops at a longer one before it takes memory,
# since the column's length is only compared with the count once it is decoded.
_Length = msgspec.Meta(max_length=MAX_RECORDS)
_BytesColumn = Annotated[list[bytes | None], _Length]
_HeadersColumn = Annotated[list[list[Header] | None], _Length]


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    offset_deltas: Annotated[list[_OffsetDelta], _Length] | None
    timestamp_deltas: Annotated[list[_Delta], _Length] | None
    keys: _BytesColumn | None
    values: _BytesColumn | None
    headers: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_columns_decoder = msgspec.msgpack.Decoder(_Columns)
_headers_decoder: msgspec.msgpack.Decoder[list[list[Header] | None]] = msgspec.msgpack.Decoder(_HeadersColumn)
_NIL = b"\xc0"


# --- headers: all that a broker looks at --------------------------------------------------------


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`, whatever it says. Raises CorruptRecord if fewer than 61 bytes are left."""
    try:
        return BatchHeader(*_HEADER.unpack_from(buffer, position))
    except struct.error:
        raise CorruptRecord(f"a batch header takes {HEADER_SIZE} bytes, {len(buffer) - position} are left") from None


def check_header(header: BatchHeader) -> None:
    """Raises CorruptRecord for values that no stored batch has.

    A count of zero is allowed: compaction leaves the header of an emptied batch for the producer's state.
    """
    if header.batch_length < HEADER_SIZE - LENGTH_END:
        raise CorruptRecord(f"a batch length of {header.batch_length} leaves no room for the header")
    if header.magic not in (MAGIC_COLUMNS, MAGIC_RECORDS):
        raise CorruptRecord(f"unknown magic {header.magic}")
    if header.attributes & _COMPRESSION_MASK > Compression.ZSTD:
        raise CorruptRecord(f"unknown compression {header.attributes & _COMPRESSION_MASK}")
    if header.last_offset_delta < 0 or not 0 <= header.records_count <= header.last_offset_delta + 1:
        raise CorruptRecord(f"{header.records_count} records with a last offset delta of {header.last_offset_delta}")
    if not 0 <= header.base_offset <= _LIMIT:
        raise CorruptRecord(f"a base offset of {header.base_offset}")
    if header.records_count > MAX_RECORDS:
        raise CorruptRecord(f"{header.records_count} records: a batch holds at most {MAX_RECORDS}")
    if header.is_control and header.magic != MAGIC_RECORDS:
        raise CorruptRecord(f"a control batch of magic {header.magic}")


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[BatchSlice]:
    """The whole batches from `position` on; ends silently where the next one is incomplete.

    The last slice's `end` (or `position`) says how far it got. Raises CorruptRecord as `check_header`;
    the CRC is left to `validate_batch`.
    """
    length = len(buffer)
    while length - position >= HEADER_SIZE:
        header = parse_header(buffer, position)
        check_header(header)
        end = position + header.size
        if end > length:
            return
        yield BatchSlice(header, position, end)
        position = end


def validate_batch(buffer: Buffer, header: BatchHeader, position: int = 0) -> None:
    """Raises CorruptRecord unless the batch at `position` is whole, plausible and as its CRC says.

    `header` is what `parse_header` read there. Holds for every batch in a log, a producer's or not.
    """
    check_header(header)
    end = position + header.size
    if end > len(buffer):
        raise CorruptRecord(f"a batch of {header.size} bytes, {len(buffer) - position} are left")
    computed = crc32c(memoryview(buffer)[position + CRC_END : end])
    if computed != header.crc:
        raise CorruptRecord(f"the CRC is {computed:#010x}, the header says {header.crc:#010x}")


def validate_produced(header: BatchHeader) -> None:
    """Raises InvalidRecord for what a log may hold but a producer must not send (Kafka's LogValidator)."""
    if header.is_control:
        raise InvalidRecord("producers may not write control batches")
    if header.is_log_append_time:
        raise InvalidRecord("producers may not claim log append time")
    if header.records_count < 1:
        raise InvalidRecord("the batch has no records")
    if header.last_offset_delta != header.records_count - 1:
        raise InvalidRecord(
            f"{header.records_count} records with a last offset delta of {header.last_offset_delta}: "
            "offsets must be dense"
        )
    if header.has_producer_id and (header.producer_epoch < 0 or header.base_sequence < 0):
        raise InvalidRecord(
            f"producer {header.producer_id} has epoch {header.producer_epoch} and base sequence "
            f"{header.base_sequence}: both must be given"
        )
    if header.is_transactional and not header.has_producer_id:
        raise InvalidRecord("a transactional batch needs a producer id")


def assign(buffer: bytearray | memoryview, position: int, base_offset: int, leader_epoch: int) -> None:
    """Write base offset and partition leader epoch in place; the CRC does not cover them."""
    _BASE_OFFSET.pack_into(buffer, position, base_offset)
    _LEADER_EPOCH.pack_into(buffer, position + _LEADER_EPOCH_POSITION, leader_epoch)


# --- encoding -----------------------------------------------------------------------------------


def encode_batch(
    values: Sequence[bytes | None],
    *,
    base_timestamp: int,
    timestamp_deltas: Sequence[int] | None = None,
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
) -> bytearray:
    """A batch of `len(values)` records, from columns (lists or tuples) of that length.

    Record i has the timestamp `base_timestamp + timestamp_deltas[i]`, and all have `base_timestamp`
    without deltas. `offset_deltas` and `last_offset_delta` are for compaction, which leaves gaps and
    keeps a batch's last offset; only there may `values` be empty.

    Raises TypeError for an element of the wrong type and ValueError for columns of the wrong length,
    deltas out of order or range, and more records, headers or bytes than a reader accepts: what this
    returns, `decode_batch` reads.
    """
    count = len(values)
    value_column = _checked("values", values, count, _BYTES_OR_NONE)
    key_column = _checked("keys", keys, count, _BYTES_OR_NONE)
    delta_column = _checked("timestamp_deltas", timestamp_deltas, count, _INT)
    offset_column = _checked("offset_deltas", offset_deltas, count, _INT)
    header_column = _checked_headers(headers, count)

    highest = 0
    if delta_column is not None:
        distinct = set(delta_column)  # a batch spans few milliseconds: a set is quicker than two passes
        lowest, highest = min(distinct), max(distinct)
        if lowest < -_LIMIT or highest > _LIMIT:
            raise ValueError(f"timestamp deltas from {lowest} to {highest} are out of range")
        if lowest == highest == 0:
            delta_column = None
    if not -_LIMIT <= base_timestamp <= _LIMIT:
        raise ValueError(f"timestamp {base_timestamp} is out of range")

    last = count - 1
    if offset_column is not None:
        if offset_column[0] < 0 or not _is_increasing(offset_column):
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
        columns = (offset_column, delta_column, key_column, value_column, header_column)
        _encoder.encode_into(columns, batch, HEADER_SIZE)
    elif count > 0:
        batch += _encode_records(count, offset_column, delta_column, key_column, value_column, header_column)
    if len(batch) - HEADER_SIZE > MAX_BODY_BYTES:
        raise ValueError(f"a body of {len(batch) - HEADER_SIZE} bytes: a batch holds at most {MAX_BODY_BYTES}")
    if compression is not Compression.NONE and count > 0:
        with memoryview(batch) as view:
            body = compress(compression, view[HEADER_SIZE:], compression_level)
        batch[HEADER_SIZE:] = body
    return _finish(
        batch,
        BatchHeader(
            base_offset=base_offset,
            batch_length=0,
            partition_leader_epoch=partition_leader_epoch,
            magic=magic,
            crc=0,
            attributes=compression | (_TRANSACTIONAL if transactional else 0),
            last_offset_delta=last_offset_delta,
            base_timestamp=base_timestamp,
            max_timestamp=base_timestamp + highest,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            records_count=count,
        ),
    )


def encode_control_batch(
    marker: EndTransactionMarker,
    *,
    timestamp: int,
    producer_id: int,
    producer_epoch: int,
    base_offset: int = 0,
    partition_leader_epoch: int = NO_LEADER_EPOCH,
) -> bytearray:
    """The batch that ends a producer's transaction in one partition: transactional, control, one record."""
    key = _CONTROL_KEY.pack(0, marker.type)
    value = _CONTROL_VALUE.pack(0, marker.coordinator_epoch)
    return _finish(
        bytearray(HEADER_SIZE) + _encode_records(1, None, None, [key], [value], None),
        BatchHeader(
            base_offset=base_offset,
            batch_length=0,
            partition_leader_epoch=partition_leader_epoch,
            magic=MAGIC_RECORDS,
            crc=0,
            attributes=_TRANSACTIONAL | _CONTROL,
            last_offset_delta=0,
            base_timestamp=timestamp,
            max_timestamp=timestamp,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=NO_SEQUENCE,
            records_count=1,
        ),
    )


def _finish(batch: bytearray, header: BatchHeader) -> bytearray:
    """Write the header in front of the body that `batch` holds already, with its length and CRC."""
    header = msgspec.structs.replace(header, batch_length=len(batch) - LENGTH_END)
    check_header(header)
    try:
        _HEADER.pack_into(batch, 0, *msgspec.structs.astuple(header))
    except struct.error as error:
        raise ValueError(f"a header field is out of range: {error}") from error
    with memoryview(batch) as view:
        _CRC.pack_into(batch, _CRC_POSITION, crc32c(view[CRC_END:]))
    return batch


_INT: frozenset[type] = frozenset((int,))
_BYTES_OR_NONE: frozenset[type] = frozenset((bytes, type(None)))
_ALL_NONE: frozenset[type] = frozenset((type(None),))

_T = TypeVar("_T")


def _checked(name: str, column: Sequence[_T] | None, count: int, allowed: frozenset[type]) -> Sequence[_T] | None:
    """The column, or None if all of it is null. One value of a wrong type would make a batch unreadable."""
    if column is None:
        return None
    if len(column) != count:
        raise ValueError(f"{len(column)} {name} for {count} records")
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
        # builtin_types: bytes are bytes, and not, as in JSON, a str in base 64.
        column = msgspec.convert(headers, _HeadersColumn, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise TypeError(f"headers must be lists of (str, bytes or None): {error}") from error
    if not any(column):
        return None
    encoded = _encoder.encode(column)
    if len(encoded) > MAX_HEADERS_BYTES:
        raise ValueError(f"{len(encoded)} bytes of headers: a batch holds at most {MAX_HEADERS_BYTES}")
    return column


def _is_increasing(column: Sequence[int]) -> bool:
    return all(map(operator.lt, column, column[1:]))


# --- decoding -----------------------------------------------------------------------------------


def decode_batch(
    buffer: Buffer,
    header: BatchHeader | None = None,
    position: int = 0,
    *,
    check_crc: bool = True,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> DecodedBatch:
    """The records of the batch at `position`; `header`, if given, is what `parse_header` read there.

    Nothing in the result refers to `buffer`. Raises CorruptRecord, and nothing else, for whatever is
    wrong with the bytes. Memory is bounded by `max_body_bytes`, MAX_RECORDS and MAX_HEADERS_BYTES.
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
    except DecompressionFailed as error:
        raise CorruptRecord(str(error)) from error
    decode = _decode_columns if header.magic == MAGIC_COLUMNS else _decode_records
    return decode(header, body)


def decode_control_batch(buffer: Buffer, header: BatchHeader | None = None, position: int = 0) -> EndTransactionMarker:
    """The marker in the control batch at `position`. Raises CorruptRecord if it holds anything else."""
    batch = decode_batch(buffer, header, position)
    if not batch.header.is_control or batch.count != 1 or batch.keys is None:
        raise CorruptRecord("not a control batch of one record")
    key, value = batch.keys[0], batch.values[0]
    if key is None or value is None:
        raise CorruptRecord("a control record without key or value")
    try:
        # Later versions add fields at the end.
        _, number = _CONTROL_KEY.unpack_from(key)
        _, coordinator_epoch = _CONTROL_VALUE.unpack_from(value)
        return EndTransactionMarker(ControlType(number), coordinator_epoch)
    except (struct.error, ValueError) as error:
        raise CorruptRecord(f"not an end of transaction: {error}") from error


def _decode_columns(header: BatchHeader, body: Buffer) -> DecodedBatch:
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
        if offset_deltas[-1] > header.last_offset_delta or not _is_increasing(offset_deltas):
            raise CorruptRecord("offset deltas do not increase, or pass the last one")
        offsets = [base_offset + delta for delta in offset_deltas]

    base_timestamp, timestamp_deltas = header.base_timestamp, [0]
    if columns.timestamp_deltas is not None:
        base_timestamp, timestamp_deltas = _checked_base_timestamp(header), columns.timestamp_deltas
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


def _decode_headers(raw: msgspec.Raw) -> list[list[Header] | None] | None:
    encoded = memoryview(raw)
    if encoded == _NIL:
        return None
    if len(encoded) > MAX_HEADERS_BYTES:
        raise CorruptRecord(f"{len(encoded)} bytes of headers, more than {MAX_HEADERS_BYTES}")
    return _headers_decoder.decode(encoded)


def _expanded(name: str, column: list[_T], count: int) -> list[_T]:
    if len(column) == count:
        return column
    if len(column) == 1:
        return column * count
    raise CorruptRecord(f"{len(column)} {name} for {count} records")


def _checked_base_timestamp(header: BatchHeader) -> int:
    if not -_LIMIT <= header.base_timestamp <= _LIMIT:
        raise CorruptRecord(f"a base timestamp of {header.base_timestamp}")
    return header.base_timestamp


# --- magic 2: Kafka's records (DefaultRecord), each a sequence of zigzag varints ------------------


def _encode_records(
    count: int,
    offset_deltas: Sequence[int] | None,
    timestamp_deltas: Sequence[int] | None,
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None] | None,
    headers: Sequence[Sequence[Header] | None] | None,
) -> bytearray:
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


def _decode_records(header: BatchHeader, body: Buffer) -> DecodedBatch:
    count = header.records_count
    data = bytes(body)
    if count * _SMALLEST_RECORD > len(data):
        raise CorruptRecord(f"{count} records in {len(data)} bytes")
    base_timestamp = _checked_base_timestamp(header)
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
            if not -_LIMIT <= timestamp_delta <= _LIMIT:
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
    """The value at `position` and where the next begins. IndexError past the end of `data`."""
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
