"""The record batch: the unit that producers send, logs store, followers copy and consumers read.

The problem: records come by the million, and Python spends more time on one record than C on a whole batch. So the unit
is the batch, and the broker reads only its header (`header`). The header is Kafka's version 2, byte for byte
(DefaultRecordBatch). Its CRC-32C begins at the attributes, so the leader writes base offset and leader epoch in front
of it without encoding anything again.

The choice: behind that header, magic 77 holds columns instead of records (`columns`). C code encodes and decodes each
column in one call, and Arrow receives its columns without a step per record. Control batches (`control`) and Kafka's
own clients use magic 2, Kafka's varint records (`varint`). `batch` puts headers and bodies together.

A body is never trusted: its decoded size is bounded before memory is allocated. Timestamps are milliseconds since the
Unix epoch.
"""

from minibroker.protocol.records.batch import (
    check_beginning,
    check_count,
    check_size,
    claims_much,
    decode_batch,
    encode_batch,
)
from minibroker.protocol.records.body import (
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    MAX_STORED_BODY_BYTES,
    DecodedBatch,
    Header,
)
from minibroker.protocol.records.control import (
    NO_DECISION,
    ControlType,
    EndTransactionMarker,
    decode_control_batch,
    encode_control_batch,
)
from minibroker.protocol.records.header import (
    CRC_END,
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_POSITION,
    MAGIC_RECORDS,
    MAX_RECORDS,
    MAX_TIMESTAMP_MS,
    NO_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TIMES_END,
    BatchHeader,
    BatchSlice,
    Buffer,
    CorruptRecord,
    InvalidRecord,
    RecordsTooLarge,
    check_header,
    iterate_batches,
    parse_header,
    placed_batches,
    stamp,
    validate_batch,
    validate_pieces,
    validate_produced,
    with_append_time,
)
from minibroker.protocol.records.isolation import (
    ISOLATION_LEVELS,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    BatchFilter,
)
from minibroker.protocol.records.rewriting import with_records, with_true_times, without_records

__all__ = [
    "CRC_END",
    "HEADER_SIZE",
    "ISOLATION_LEVELS",
    "LIMIT",
    "MAGIC_COLUMNS",
    "MAGIC_POSITION",
    "MAGIC_RECORDS",
    "MAX_BATCH_BYTES",
    "MAX_BODY_BYTES",
    "MAX_HEADERS_BYTES",
    "MAX_RECORDS",
    "MAX_STORED_BODY_BYTES",
    "MAX_TIMESTAMP_MS",
    "NO_DECISION",
    "NO_LEADER_EPOCH",
    "NO_PRODUCER_EPOCH",
    "NO_PRODUCER_ID",
    "NO_SEQUENCE",
    "NO_TIMESTAMP",
    "READ_COMMITTED",
    "READ_UNCOMMITTED",
    "TIMES_END",
    "BatchFilter",
    "BatchHeader",
    "BatchSlice",
    "Buffer",
    "ControlType",
    "CorruptRecord",
    "DecodedBatch",
    "EndTransactionMarker",
    "Header",
    "InvalidRecord",
    "RecordsTooLarge",
    "check_beginning",
    "check_count",
    "check_header",
    "check_size",
    "claims_much",
    "decode_batch",
    "decode_control_batch",
    "encode_batch",
    "encode_control_batch",
    "iterate_batches",
    "parse_header",
    "placed_batches",
    "stamp",
    "validate_batch",
    "validate_pieces",
    "validate_produced",
    "with_append_time",
    "with_records",
    "with_true_times",
    "without_records",
]
