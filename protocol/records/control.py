"""Control batches: each has one record, which ends a transaction in a partition."""

import struct
from enum import IntEnum
from typing import NamedTuple

from minibroker.protocol.records.batch import decode_batch
from minibroker.protocol.records.header import (
    CONTROL,
    MAGIC_RECORDS,
    NO_LEADER_EPOCH,
    NO_SEQUENCE,
    TRANSACTIONAL,
    BatchHeader,
    Buffer,
    CorruptRecord,
    write_header,
)
from minibroker.protocol.records.varint import encode_records

_KEY = struct.Struct(">hh")  # version, type
_VALUE = struct.Struct(">hi")  # version, coordinator epoch
_DECISION = struct.Struct(">q")  # of minibroker alone; readers of Kafka's skip what follows its fields

NO_DECISION = -1


class ControlType(IntEnum):
    """The end of a transaction in a control batch (Kafka's ControlRecordType)."""

    ABORT = 0
    COMMIT = 1


class EndTransactionMarker(NamedTuple):
    """The one record of a control batch (Kafka's EndTransactionMarker)."""

    type: ControlType
    coordinator_epoch: int
    decision: int = NO_DECISION
    """As in TransactionMarker, of a producer that keeps its epoch."""


def encode_control_batch(
    marker: EndTransactionMarker,
    *,
    timestamp: int,
    producer_id: int,
    producer_epoch: int,
    base_offset: int = 0,
    partition_leader_epoch: int = NO_LEADER_EPOCH,
) -> bytearray:
    """Encode the batch that ends a producer's transaction in one partition: transactional, control, one record."""
    key = _KEY.pack(0, marker.type)
    value = _VALUE.pack(0, marker.coordinator_epoch)
    if marker.decision != NO_DECISION:
        value += _DECISION.pack(marker.decision)
    return write_header(
        encode_records(1, None, None, [key], [value], None),
        BatchHeader(
            base_offset=base_offset,
            batch_length=0,
            partition_leader_epoch=partition_leader_epoch,
            magic=MAGIC_RECORDS,
            crc=0,
            attributes=TRANSACTIONAL | CONTROL,
            last_offset_delta=0,
            base_timestamp=timestamp,
            max_timestamp=timestamp,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=NO_SEQUENCE,
            records_count=1,
        ),
    )


def decode_control_batch(buffer: Buffer, header: BatchHeader | None = None, position: int = 0) -> EndTransactionMarker:
    """Return the marker in the control batch at `position`. Raises CorruptRecord for any other batch."""
    batch = decode_batch(buffer, header, position)
    if not batch.header.is_control or batch.count != 1 or batch.keys is None:
        raise CorruptRecord("not a control batch of one record")
    key, value = batch.keys[0], batch.values[0]
    if key is None or value is None:
        raise CorruptRecord("a control record without key or value")
    try:
        # Later versions add fields at the end.
        _, number = _KEY.unpack_from(key)
        version, coordinator_epoch = _VALUE.unpack_from(value)
        has_decision = version == 0 and len(value) == _VALUE.size + _DECISION.size
        decision = _DECISION.unpack_from(value, _VALUE.size)[0] if has_decision else NO_DECISION
        return EndTransactionMarker(ControlType(number), coordinator_epoch, decision)
    except (struct.error, ValueError) as error:
        raise CorruptRecord(f"not an end of transaction: {error}") from error
