"""What a log takes from producers (Kafka's LogValidator): what is wrong with a record set is found before any of it is
written."""

from itertools import islice
from struct import Struct

from minibroker.broker.storage.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.compression import DecompressionFailed, DecompressionTooLarge, decompress
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import MAX_RECORD_ERRORS, ProduceRecordError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import (
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_POSITION,
    MAGIC_RECORDS,
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    MAX_RECORDS,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    CorruptRecord,
    InvalidRecord,
    decode_batch,
    parse_header,
    validate_batch,
    validate_produced,
)
from minibroker.protocol.records.header import COMPRESSION_MASK, LENGTH_END

_MAX_COMPACTED_BODY_BYTES = MAX_BODY_BYTES - 16 * MAX_RECORDS
"""Decompressed: compaction writes the offset of each record that it leaves, and must find room for that. What it could
not write anew would keep a key that was deleted."""

_OLD_MAGICS = (0, 1)
"""Of Kafka before 0.11: refused, as by Kafka 4 (`ProduceRequest.validateRecords`)."""


class RefusedRecords(BrokerError):
    """A batch is refused because of some of its records."""

    def __init__(self, code: ErrorCode, detail: str, record_errors: list[ProduceRecordError]) -> None:
        super().__init__(code, detail)
        self.record_errors = record_errors


_QUICK_BYTES = 128 << 10
_QUICK_RECORDS = 1_000
_QUICK_COMPRESSED_BYTES = 16 << 10
"""So much is looked through within a slice of the event loop."""


_form_of = Struct(">8xi4xb4xh4xqq").unpack_from
"""Of a batch: its length, magic, attributes, base and largest timestamp (`records.header`)."""


def is_to_be_rewritten(records: Buffer, config: LogConfig) -> bool:
    """A log with that config keeps some batch of a record set in another form than the one that it has. Looks at
    headers alone, and leaves what is wrong with them for `validated_headers`."""
    position, last = 0, len(records) - HEADER_SIZE
    while position <= last:
        length, magic, attributes, base_timestamp, max_timestamp = _form_of(records, position)
        if length < HEADER_SIZE - LENGTH_END or magic not in (MAGIC_RECORDS, MAGIC_COLUMNS):
            return False
        if (
            (magic == MAGIC_COLUMNS and not config.columns)
            or (config.compression is not None and attributes & COMPRESSION_MASK != config.compression)
            or (not config.log_append_time and has_doubtful_times(base_timestamp, max_timestamp))
        ):
            return True
        position += length + LENGTH_END
    return False


def has_doubtful_times(base_timestamp: int, max_timestamp: int) -> bool:
    """The header need not say truly what the batch's largest timestamp is. librdkafka finds the largest from 0 on, so
    records without a timestamp would be of 1970, and old enough to be deleted. Kafka's brokers look at each record of
    each batch."""
    return base_timestamp < 0 or max_timestamp < base_timestamp


def takes_long(records: Buffer, config: LogConfig) -> bool:
    """`validated_headers` would look at each record, and that may take more than a slice of the event loop."""
    if not config.looks_at_records:
        return False
    try:
        header = parse_header(records)
    except CorruptRecord:
        return False
    if header.size > _QUICK_BYTES or header.records_count > _QUICK_RECORDS:
        return True
    if not header.attributes & COMPRESSION_MASK:
        return False
    if header.size > _QUICK_COMPRESSED_BYTES or header.size > len(records):
        return True
    try:  # its size says little
        decompress(header.compression, memoryview(records)[HEADER_SIZE : header.size], _QUICK_BYTES)
    except DecompressionTooLarge:
        return True
    except DecompressionFailed:
        return False
    return False


def validated_headers(
    records: Buffer, partition: TopicPartition, config: LogConfig, now_ms: int, *, is_checked: bool = False
) -> list[BatchHeader]:
    """The headers of the batches of a record set, at least one. `is_checked`: the records in them have been looked at
    before, by this function, and only they need not be again.

    Raises BrokerError CORRUPT_MESSAGE, INVALID_RECORD, MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP.
    """
    headers: list[BatchHeader] = []
    position = 0
    end = len(records)
    while position < end:
        try:
            if end - position > MAGIC_POSITION and records[position + MAGIC_POSITION] in _OLD_MAGICS:
                magic = records[position + MAGIC_POSITION]
                raise InvalidRecord(f"records of magic {magic}, which nobody writes any more: upgrade the producer")
            header = parse_header(records, position)
            if header.size > min(config.max_message_bytes, MAX_BATCH_BYTES):
                raise BrokerError(
                    ErrorCode.MESSAGE_TOO_LARGE,
                    f"a batch of {header.size} bytes for {partition}, "
                    f"whose max.message.bytes is {config.max_message_bytes}",
                )
            validate_batch(records, header, position, as_produced=True)
            validate_produced(header)
            if not (-LIMIT <= header.base_timestamp <= LIMIT and -LIMIT <= header.max_timestamp <= LIMIT):
                raise BrokerError(
                    ErrorCode.INVALID_TIMESTAMP,
                    f"{partition}: base {header.base_timestamp} ms, largest {header.max_timestamp} ms; "
                    f"allowed are {-LIMIT} to {LIMIT}",
                )
            if config.looks_at_records:
                if headers:  # as in Kafka: all are decoded here, and 70 bytes may become a million records
                    why = "is compacted" if config.compact else "limits timestamps"
                    raise InvalidRecord(f"more than one batch, and the topic {why}: send one at a time")
                if not is_checked:
                    _check_records(records, header, position, partition, config, now_ms)
        except CorruptRecord as error:
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{partition}: {error}") from error
        except InvalidRecord as error:
            raise BrokerError(ErrorCode.INVALID_RECORD, f"{partition}: {error}") from error
        headers.append(header)
        position += header.size
    if not headers:
        raise BrokerError(ErrorCode.INVALID_RECORD, f"{partition}: the record set is empty")
    if position > config.segment_bytes or sum(h.last_offset_delta + 1 for h in headers) > MAX_RELATIVE_OFFSET:
        raise BrokerError(
            ErrorCode.RECORD_LIST_TOO_LARGE,
            f"{position} bytes, {len(headers)} batches for {partition}, whose segment.bytes is {config.segment_bytes}",
        )
    return headers


def _check_records(
    records: Buffer, header: BatchHeader, position: int, partition: TopicPartition, config: LogConfig, now_ms: int
) -> None:
    """What compaction relies on, and what the topic says of timestamps. Raises CorruptRecord and RefusedRecords."""
    batch = decode_batch(records, header, position, check_crc=False, max_body_bytes=_MAX_COMPACTED_BODY_BYTES)
    keys = batch.keys
    if config.compact and (keys is None or None in keys):
        without = range(header.records_count) if keys is None else (i for i, key in enumerate(keys) if key is None)
        reason = "a record without a key, and the topic is compacted"
        errors = [ProduceRecordError(index, reason) for index in islice(without, MAX_RECORD_ERRORS)]
        raise RefusedRecords(ErrorCode.INVALID_RECORD, f"{partition}: {reason}: give each record a key", errors)
    if config.limits_times and not config.log_append_time:
        problems = ((index, _time_problem(time, config, now_ms)) for index, time in enumerate(batch.timestamps))
        wrong = (ProduceRecordError(index, problem) for index, problem in problems if problem is not None)
        errors = list(islice(wrong, MAX_RECORD_ERRORS))
        if errors:
            raise RefusedRecords(
                ErrorCode.INVALID_TIMESTAMP, f"{partition}: {errors[0].batch_index_error_message}", errors
            )


def _time_problem(timestamp: int, config: LogConfig, now_ms: int) -> str | None:
    if timestamp == NO_TIMESTAMP:
        return None
    before_max_ms, after_max_ms = config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms
    if after_max_ms is not None and timestamp - now_ms > after_max_ms:
        said = f"{timestamp - now_ms} ms ahead of the broker's clock, message.timestamp.after.max.ms is {after_max_ms}"
    elif before_max_ms is not None and now_ms - timestamp > before_max_ms:
        said = f"{now_ms - timestamp} ms behind the broker's clock, message.timestamp.before.max.ms is {before_max_ms}"
    else:
        return None
    return f"{timestamp} ms is {said}"
