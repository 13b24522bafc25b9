"""The checks on record sets from producers (Kafka's LogValidator), made before anything is written.

A batch that no reader accepts must not be acknowledged: its records may take MAX_BODY_BYTES, decompressed, and their
headers MAX_HEADERS_BYTES. A few kilobytes can hold more than that, but decompressing every batch, as Kafka does, would
cost more than all other work on it. So a batch is decompressed, in a worker thread, only if its size and the frames of
its codec leave open whether it is larger than MAX_HEADERS_BYTES (`may_exceed`, a few microseconds).

For the same reason the records are neither read nor counted, and consumers would stop at a batch that they cannot read,
until they seek past it. Only what costs nothing is refused: a body that does not begin as its header says
(`check_beginning`), and one that is decompressed for another reason and cannot be. There is one exception: a batch of
70 bytes may claim a million records. If a header claims more records than the body has bytes, they are counted.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import islice
from struct import Struct

from minibroker.broker.storage.indexes.index import MAX_RELATIVE_OFFSET
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import MAX_RECORD_ERRORS, ProduceRecordError
from minibroker.protocol.model import INTERNAL_TOPICS, TopicPartition
from minibroker.protocol.records import (
    HEADER_SIZE,
    LIMIT,
    MAGIC_COLUMNS,
    MAGIC_POSITION,
    MAGIC_RECORDS,
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    MAX_TIMESTAMP_MS,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    CorruptRecord,
    InvalidRecord,
    RecordsTooLarge,
    check_beginning,
    check_count,
    check_size,
    claims_much,
    decode_batch,
    parse_header,
    validate_batch,
    validate_produced,
)
from minibroker.protocol.records.compression import (
    Compression,
    DecompressionFailed,
    DecompressionTooLarge,
    decompress,
    may_exceed,
)
from minibroker.protocol.records.header import COMPRESSION_MASK, LENGTH_END

_OLD_MAGICS = (0, 1)
"""The magic of Kafka before 0.11: rejected, as by Kafka 4 (`ProduceRequest.validateRecords`)."""


class RefusedRecords(BrokerError):
    """A batch is refused because of some of its records."""

    def __init__(self, code: ErrorCode, detail: str, record_errors: list[ProduceRecordError]) -> None:
        super().__init__(code, detail)
        self.record_errors = record_errors


_QUICK_BYTES = 128 << 10
_QUICK_RECORDS = 1_000
_QUICK_COMPRESSED_BYTES = 16 << 10
"""Bytes that are checked within one slice of the event loop."""

_length_of = Struct(">8xi").unpack_from
"""The length of a batch (`records.header`)."""

_size_of = Struct(">8xi4xb4xh34xi").unpack_from
"""The length, magic, attributes and number of records of a batch (`records.header`)."""

_form_of = Struct(">8xi4xb4xh4xqq").unpack_from
"""The length, magic, attributes, base and largest timestamp of a batch (`records.header`)."""


def is_to_be_rewritten(records: Buffer, config: LogConfig) -> bool:
    """A log with that config keeps some batch of a record set in another form than the one that it has. Looks at
    headers alone, and leaves what is wrong with them for `read_headers`."""
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


class Looked(IntEnum):
    """How closely the records of a record set have been looked at."""

    NOT = 0
    SIZE = 1
    """Readers take so much, and the body may hold as many records as the header claims."""
    RECORDS = 2
    """And each is as the topic wants it."""


def look_needed(config: LogConfig) -> Looked:
    return Looked.RECORDS if config.looks_at_records else Looked.SIZE


def takes_long(records: Buffer, config: LogConfig, looked: Looked = Looked.NOT) -> bool:
    """`check_acceptable` would look at the records, and that may take more than a slice of the event loop."""
    if looked >= look_needed(config):
        return False
    return _records_take_long(records) if config.looks_at_records else _size_takes_long(records)


def _size_takes_long(records: Buffer) -> bool:
    position, end = 0, len(records)
    while position + HEADER_SIZE <= end:
        length, magic, attributes, count = _size_of(records, position)
        size = LENGTH_END + length
        if not HEADER_SIZE <= size <= end - position:
            break  # for `read_headers` to refuse
        if _may_be_too_large(records, attributes, position, size):
            return True
        if count > _QUICK_RECORDS and claims_much(magic, attributes, size, count):
            return True
        position += size
    return False


def _may_be_too_large(records: Buffer, attributes: int, position: int, size: int) -> bool:
    """For readers: `check_size` tells."""
    codec = attributes & COMPRESSION_MASK
    if codec == Compression.NONE or codec > Compression.ZSTD:
        return size > MAX_HEADERS_BYTES
    return may_exceed(
        Compression(codec), memoryview(records)[position + HEADER_SIZE : position + size], MAX_HEADERS_BYTES
    )


def _records_take_long(records: Buffer) -> bool:
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


def check_one_batch(records: Buffer, partition: TopicPartition) -> None:
    """Raise BrokerError(INVALID_RECORD) if a second batch follows the first, as Kafka does since version 3 of Produce
    (`ProduceRequest.validateRecords`). A batch takes 70 bytes, and as much work as one of a megabyte."""
    if len(records) < HEADER_SIZE:
        return  # `read_headers` reports it
    size = LENGTH_END + _length_of(records)[0]
    if HEADER_SIZE <= size < len(records):
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"{partition}: {len(records) - size} bytes follow the batch of {size} bytes: a Produce request has one "
            f"batch for each partition, so send the next one in another request",
        )


def read_headers(records: Buffer, partition: TopicPartition) -> list[BatchHeader]:
    """The headers of the batches of a record set, at least one, each with the right CRC. In an internal topic, a batch
    with a producer id needs no sequence: a coordinator wrote it for the producer.

    Raises BrokerError CORRUPT_MESSAGE, INVALID_RECORD, MESSAGE_TOO_LARGE.
    """
    headers: list[BatchHeader] = []
    position = 0
    end = len(records)
    while position < end:
        try:
            if end - position > MAGIC_POSITION and records[position + MAGIC_POSITION] in _OLD_MAGICS:
                magic = records[position + MAGIC_POSITION]
                raise InvalidRecord(f"records of magic {magic}, which is obsolete: upgrade the producer")
            header = parse_header(records, position)
            validate_batch(records, header, position, as_produced=True)
            validate_produced(header, has_sequence=partition.topic not in INTERNAL_TOPICS)
        except RecordsTooLarge as error:
            raise _too_large(partition, error) from error
        except CorruptRecord as error:
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{partition}: {error}") from error
        except InvalidRecord as error:
            raise BrokerError(ErrorCode.INVALID_RECORD, f"{partition}: {error}") from error
        headers.append(header)
        position += header.size
    if not headers:
        raise BrokerError(ErrorCode.INVALID_RECORD, f"{partition}: the record set is empty")
    return headers


def check_acceptable(
    records: Buffer,
    headers: Sequence[BatchHeader],
    partition: TopicPartition,
    config: LogConfig,
    now_ms: int,
    looked: Looked = Looked.NOT,
) -> None:
    """Whether a log with these settings takes the batches whose `headers` were read. `looked`: this was done before, as
    closely as that, and what was looked at need not be again.

    Raises BrokerError CORRUPT_MESSAGE, INVALID_RECORD, MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP.
    """
    largest = min(config.max_message_bytes, MAX_BATCH_BYTES)
    if config.looks_at_records and len(headers) > 1:
        why = "is compacted" if config.compact else "limits timestamps"
        raise BrokerError(  # as in Kafka: all are decoded, and 70 bytes may become a million records
            ErrorCode.INVALID_RECORD,
            f"{partition}: more than one batch, and the topic {why}: send one at a time",
        )
    position = 0
    for header in headers:
        if header.size > largest:
            raise BrokerError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"a batch of {header.size} bytes for {partition}, whose max.message.bytes is {largest}",
            )
        # If the log replaces the timestamps, readers do not see those of the producer.
        most = LIMIT if config.log_append_time else MAX_TIMESTAMP_MS
        if not (-most <= header.base_timestamp <= most and -most <= header.max_timestamp <= most):
            raise BrokerError(
                ErrorCode.INVALID_TIMESTAMP,
                f"{partition}: timestamps from {header.base_timestamp} to {header.max_timestamp} ms, allowed are "
                f"{-most} to {most}: give milliseconds since 1970, not microseconds or nanoseconds",
            )
        if looked < look_needed(config):
            _look(records, header, position, partition, config, now_ms)
        position += header.size
    if position > config.segment_bytes or sum(h.last_offset_delta + 1 for h in headers) > MAX_RELATIVE_OFFSET:
        raise BrokerError(
            ErrorCode.RECORD_LIST_TOO_LARGE,
            f"{position} bytes, {len(headers)} batches for {partition}, whose segment.bytes is {config.segment_bytes}",
        )


def _look(
    records: Buffer, header: BatchHeader, position: int, partition: TopicPartition, config: LogConfig, now_ms: int
) -> None:
    """At what is in a batch. Raises BrokerError."""
    try:
        if config.looks_at_records:
            _check_records(records, header, position, partition, config, now_ms)
            return
        _check_body(records, header, position, partition)
    except RecordsTooLarge as error:
        raise _too_large(partition, error) from error
    except CorruptRecord as error:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{partition}: {error}") from error


def _check_body(records: Buffer, header: BatchHeader, position: int, partition: TopicPartition) -> None:
    """Look at as much of the body as costs little, or must be looked at for its size. Raises RecordsTooLarge and
    BrokerError."""
    try:
        if header.records_count:
            check_beginning(records, header, position)
        if _may_be_too_large(records, header.attributes, position, header.size):
            check_size(records, header, position)
        if claims_much(header.magic, header.attributes, header.size, header.records_count):
            check_count(records, header, position)
    except RecordsTooLarge:
        raise
    except CorruptRecord as error:  # the producer made it so, and another attempt would be the same
        raise BrokerError(
            ErrorCode.INVALID_RECORD,
            f"{partition}: a batch of {header.size} bytes claims {header.records_count} records, which it does not "
            f"hold ({error}): no consumer could read it, so encode the records again",
        ) from error


def _too_large(partition: TopicPartition, error: RecordsTooLarge) -> BrokerError:
    return BrokerError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"{partition}: {error}. A batch holds at most {MAX_BODY_BYTES} bytes of records, decompressed, and "
        f"{MAX_HEADERS_BYTES} bytes of headers: send fewer or smaller records in a batch",
    )


def _check_records(
    records: Buffer, header: BatchHeader, position: int, partition: TopicPartition, config: LogConfig, now_ms: int
) -> None:
    """Check the conditions of compaction and of the topic's limits on timestamps. Raises CorruptRecord and
    RefusedRecords."""
    batch = decode_batch(records, header, position, check_crc=False, max_body_bytes=MAX_BODY_BYTES, gives_way=True)
    keys = batch.keys
    if config.compact and (keys is None or None in keys):
        without = range(header.records_count) if keys is None else (i for i, key in enumerate(keys) if key is None)
        reason = "a record without a key, and the topic is compacted"
        errors = [ProduceRecordError(index, reason) for index in islice(without, MAX_RECORD_ERRORS)]
        raise RefusedRecords(ErrorCode.INVALID_RECORD, f"{partition}: {reason}: give each record a key", errors)
    if not config.log_append_time:
        latest = batch.base_timestamp + max(batch.timestamp_deltas)
        if latest > MAX_TIMESTAMP_MS:
            raise BrokerError(
                ErrorCode.INVALID_TIMESTAMP,
                f"{partition}: a timestamp of {latest} ms, allowed are up to {MAX_TIMESTAMP_MS}: give milliseconds "
                "since 1970, not microseconds or nanoseconds",
            )
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
