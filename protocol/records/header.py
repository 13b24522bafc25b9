"""The 61 bytes in front of a batch, the only part that a broker reads.

Kafka's CRC does not cover the first 17 of them, which include the base offset and the leader epoch, since a leader
rewrites these. If one of their bits flips on a disk or on the way, records get other offsets and no CRC detects it. In
a batch of columns, minibroker's own format, the leader mixes a checksum of these 17 bytes into the CRC (`stamp`), and
readers remove it again (`validate_batch`). Batches of Kafka's format stay as they are; their readers at least detect
that a batch cannot be at the offset it claims (`placed_batches`).
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from crc32c import crc32c

from minibroker.protocol.records.compression import Compression

Buffer = bytes | bytearray | memoryview

MAGIC_RECORDS = 2
MAGIC_COLUMNS = 77

HEADER_SIZE = 61
MAGIC_POSITION = 16
"""The position of the magic in all of Kafka's formats."""
LENGTH_END = 12  # batch_length counts the bytes from here on
CRC_END = 21  # the CRC covers the bytes from here on
TIMES_END = 43  # attributes, last offset delta, base and largest timestamp are between the two

MAX_RECORDS = 1 << 20
"""The limit of records in a batch: with constant columns a few bytes could otherwise claim billions."""

NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1
NO_TIMESTAMP = -1

COMPRESSION_MASK = 0x07
_LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
DELETE_HORIZON = 0x40

_HEADER = struct.Struct(">qiibIhiqqqhii")
_PLACE = struct.Struct(">qiib")
"""Base offset, batch length, leader epoch, magic; the leader writes the first and the third."""
_CRC = struct.Struct(">I")
_TIMES = struct.Struct(">hiqq")
_CRC_POSITION = 17

LIMIT = 1 << 62
"""Offsets, timestamps and timestamp deltas do not exceed this, so that sums of two fit into 64 bits."""

MAX_TIMESTAMP_MS = ((1 << 63) - 1) // 1_000
"""The largest timestamp that brokers accept, in the year 294247: readers such as Spark count microseconds in 64 bits.
Logs of earlier versions may have larger ones."""


_ATTRIBUTES_END = 22
"""The low byte of a batch's attributes."""


def is_transactional(records: Buffer) -> bool:
    """Return whether the first batch belongs to a transaction. Only that batch can: a producer with an id sends one at
    a time."""
    return len(records) > _ATTRIBUTES_END and bool(records[_ATTRIBUTES_END] & TRANSACTIONAL)


class CorruptRecord(ValueError):
    """The bytes are not a valid batch: Kafka's CORRUPT_MESSAGE."""


class RecordsTooLarge(CorruptRecord):
    """The batch exceeds the readers' limits: Kafka's MESSAGE_TOO_LARGE to a producer. To a reader it is corrupt, since
    no broker accepts such a batch."""


class InvalidRecord(ValueError):
    """The batch is intact, but no producer may send it: Kafka's INVALID_RECORD."""


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a header, in their order. `crc` covers attributes to the end of the batch; for columns in a log, it
    also covers the fields before it."""

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
        """The codec. Raises ValueError for an unknown one, which `check_header` rules out."""
        return Compression(self.attributes & COMPRESSION_MASK)

    @property
    def is_log_append_time(self) -> bool:
        """Whether `max_timestamp` is the timestamp of every record, instead of those in the body."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time from which compaction may remove the batch's tombstones; None: unknown yet. It replaces the base
        timestamp, and the records' deltas are then counted from it (KIP-534)."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None

    @property
    def has_producer_id(self) -> bool:
        return self.producer_id > NO_PRODUCER_ID

    @property
    def last_sequence(self) -> int:
        """The last record's sequence, which wraps from 2**31 - 1 to 0; NO_SEQUENCE without a base.

        It is derived from offsets, not from the number of records, so compaction does not change it.
        """
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF


class BatchSlice(NamedTuple):
    """A whole batch within a buffer: `buffer[start:end]`."""

    header: BatchHeader
    start: int
    end: int


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the unchecked header at `position`. Raises CorruptRecord if fewer than 61 bytes are left."""
    try:
        return BatchHeader(*_HEADER.unpack_from(buffer, position))
    except struct.error:
        raise CorruptRecord(f"a batch header takes {HEADER_SIZE} bytes, {len(buffer) - position} are left") from None


def check_header(header: BatchHeader) -> None:
    """Raise CorruptRecord for values that no stored batch has.

    A count of zero is allowed: compaction keeps the header of an emptied batch for the producer's state.
    """
    if header.batch_length < HEADER_SIZE - LENGTH_END:
        raise CorruptRecord(f"a batch length of {header.batch_length} leaves no room for the header")
    if header.magic not in (MAGIC_COLUMNS, MAGIC_RECORDS):
        raise CorruptRecord(f"unknown magic {header.magic}")
    if header.attributes & COMPRESSION_MASK > Compression.ZSTD:
        raise CorruptRecord(f"unknown compression {header.attributes & COMPRESSION_MASK}")
    if header.last_offset_delta < 0 or not 0 <= header.records_count <= header.last_offset_delta + 1:
        raise CorruptRecord(f"{header.records_count} records with a last offset delta of {header.last_offset_delta}")
    if not 0 <= header.base_offset <= LIMIT:
        raise CorruptRecord(f"a base offset of {header.base_offset}")
    if header.records_count > MAX_RECORDS:
        raise RecordsTooLarge(f"{header.records_count} records: a batch holds at most {MAX_RECORDS}")
    if header.is_control and header.magic != MAGIC_RECORDS:
        raise CorruptRecord(f"a control batch of magic {header.magic}")


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[BatchSlice]:
    """Yield the complete batches from `position` on, and end silently at an incomplete one.

    The last slice's `end` (or `position`) is the end of the batches. Raises CorruptRecord as `check_header` does; the
    CRC is left to `validate_batch`.
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


def placed_batches(
    buffer: Buffer, offset: int, end_offset: int, leader_epoch: int, least_epoch: int = NO_LEADER_EPOCH
) -> tuple[list[BatchSlice], CorruptRecord | None]:
    """Return the complete batches that a leader sent from `offset` on, up to the first that cannot be at the offset it
    claims, and the error of that one.

    Offsets must ascend and begin below `end_offset`. Leader epochs must not descend, from `least_epoch` on, nor exceed
    `leader_epoch` (NO_LEADER_EPOCH: unknown). No batch at all is an error as well."""
    placed: list[BatchSlice] = []
    at = offset
    try:
        for batch in iterate_batches(buffer):
            header, epoch = batch.header, batch.header.partition_leader_epoch
            if not (header.base_offset >= at if placed else header.next_offset > at):
                raise CorruptRecord(
                    f"a batch of the offsets {header.base_offset} to {header.last_offset} comes at {at}"
                )
            if header.base_offset >= end_offset:
                raise CorruptRecord(f"a batch begins at {header.base_offset}, where {end_offset} is the end")
            if NO_LEADER_EPOCH < epoch < least_epoch:
                raise CorruptRecord(f"the batch at {header.base_offset} has leader epoch {epoch}, behind {least_epoch}")
            if epoch > leader_epoch != NO_LEADER_EPOCH:
                raise CorruptRecord(
                    f"the batch at {header.base_offset} has leader epoch {epoch}, where {leader_epoch} is the latest"
                )
            at, least_epoch = header.next_offset, max(epoch, least_epoch)
            placed.append(batch)
    except CorruptRecord as error:
        return placed, error
    return placed, None if placed else CorruptRecord(f"{len(buffer)} bytes hold no whole batch")


def validate_batch(buffer: Buffer, header: BatchHeader, position: int = 0, *, as_produced: bool = False) -> None:
    """Raise CorruptRecord unless the batch at `position` is complete, plausible and matches its CRC.

    `header` is the one that `parse_header` read there. Accepts every batch in a log, including logs older than
    `stamp`. `as_produced`: the batch is not in a log yet.
    """
    check_header(header)
    end = position + header.size
    if end > len(buffer):
        raise CorruptRecord(f"a batch of {header.size} bytes, {len(buffer) - position} are left")
    view = memoryview(buffer)
    computed = crc32c(view[position + CRC_END : end])
    if computed != header.crc:
        _check_crc(computed, header, None if as_produced else view[position : position + _CRC_POSITION])


def validate_pieces(pieces: Iterable[Buffer], header: BatchHeader) -> None:
    """Do the same as `validate_batch` for a batch in a log that is not in memory as a whole. `pieces` are all of its
    bytes, in order, and the first one holds the header."""
    check_header(header)
    computed, place = 0, b""
    for piece in pieces:
        computed = crc32c(memoryview(piece)[CRC_END:] if not place else piece, computed)
        place = place or bytes(piece[:_CRC_POSITION])
    if computed != header.crc:
        _check_crc(computed, header, place)


def _check_crc(computed: int, header: BatchHeader, place: Buffer | None) -> None:
    """`place`: the bytes before the CRC of a batch in a log (see `stamp`)."""
    if place is None or header.magic != MAGIC_COLUMNS or computed ^ crc32c(place) != header.crc:
        raise CorruptRecord(f"the CRC is {computed:#010x}, the header says {header.crc:#010x}")


def validate_produced(header: BatchHeader, *, has_sequence: bool = True) -> None:
    """Raise InvalidRecord for a batch that a log may hold but a producer must not send (Kafka's LogValidator).
    `has_sequence`: with a producer id, the batch must have a sequence as well."""
    if header.is_control:
        raise InvalidRecord("producers may not write control batches")
    if header.is_log_append_time:
        raise InvalidRecord("producers may not claim log append time")
    if header.delete_horizon_ms is not None:
        raise InvalidRecord("producers may not say when tombstones go")
    if header.records_count < 1:
        raise InvalidRecord("the batch has no records")
    if header.last_offset_delta != header.records_count - 1:
        raise InvalidRecord(
            f"{header.records_count} records with a last offset delta of {header.last_offset_delta}: "
            "offsets must be dense"
        )
    if header.has_producer_id and (header.producer_epoch < 0 or (has_sequence and header.base_sequence < 0)):
        raise InvalidRecord(
            f"producer {header.producer_id} has epoch {header.producer_epoch} and base sequence "
            f"{header.base_sequence}: both must be given"
        )
    if header.is_transactional and not header.has_producer_id:
        raise InvalidRecord("the batch belongs to a transaction and has no producer id")


def stamp(header: BatchHeader, base_offset: int, leader_epoch: int) -> bytes:
    """Return the first CRC_END bytes of a batch for its place in a log. `header` is the header as produced, whose CRC
    covers only the bytes after it."""
    place = _PLACE.pack(base_offset, header.batch_length, leader_epoch, header.magic)
    crc = header.crc ^ crc32c(place) if header.magic == MAGIC_COLUMNS else header.crc
    return place + _CRC.pack(crc)


def with_append_time(batch: memoryview, header: BatchHeader, now_ms: int) -> tuple[BatchHeader, bytes]:
    """Return the header of a batch whose records all get the time at which the leader appends it, and the new bytes
    from CRC_END to TIMES_END."""
    attributes = header.attributes | _LOG_APPEND_TIME
    times = _TIMES.pack(attributes, header.last_offset_delta, header.base_timestamp, now_ms)
    crc = crc32c(batch[TIMES_END:], crc32c(times))
    return msgspec.structs.replace(header, attributes=attributes, max_timestamp=now_ms, crc=crc), times


def write_header(batch: bytearray, header: BatchHeader) -> bytearray:
    """Write the header, with its length and CRC, in front of the body that `batch` already holds."""
    header = msgspec.structs.replace(header, batch_length=len(batch) - LENGTH_END)
    check_header(header)
    try:
        _HEADER.pack_into(batch, 0, *msgspec.structs.astuple(header))
    except struct.error as error:
        raise ValueError(f"a header field is out of range: {error}") from error
    with memoryview(batch) as view:
        _CRC.pack_into(batch, _CRC_POSITION, crc32c(view[CRC_END:]))
    return batch
