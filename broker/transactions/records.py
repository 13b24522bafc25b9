"""Encodes and decodes the records of `__transaction_state` in Kafka's binary schema (TransactionLog,
TransactionLogKey and -Value). Pure.

Values are written in version 1, the first flexible one, which Kafka writes for `transaction.version` 2. Both versions
are read. `successor_of` has a tag of its own, which Kafka's tools skip.
"""

import struct
from typing import NamedTuple

from minibroker.broker.coordinating.record_fields import (
    INT16,
    INT32,
    MalformedRecord,
    RecordReader,
    compact_string,
    length,
    string,
    tagged_fields,
)
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import NO_EPOCH, NO_PRODUCER_ID, Transaction
from minibroker.protocol.model import TopicPartition

KEY_VERSION = 0
VALUE_VERSION = 1

PREVIOUS_PRODUCER_ID_TAG = 0
NEXT_PRODUCER_ID_TAG = 1
CLIENT_TRANSACTION_VERSION_TAG = 2
SUCCESSOR_OF_TAG = 100

RAISING_VERSION = 2
"""The `transaction.version` from which on a producer takes over the raised epoch."""

STATE_NUMBERS = {state: number for number, state in enumerate(TransactionState)}
"""As in Kafka, except that its number 7 is a state that is never written."""
STATES = {number: state for state, number in STATE_NUMBERS.items()}

_INT64 = struct.Struct(">q")
_HEAD = struct.Struct(">hqhib")  # version, producer id, epoch, time-out, state
_TIMES = struct.Struct(">qq")


class UnknownKey(NamedTuple):
    """A key of an unknown version, perhaps of a newer broker. Such a record is skipped."""

    version: int


def encode_key(transactional_id: str) -> bytes:
    return INT16.pack(KEY_VERSION) + string(transactional_id)


def encode_value(transaction: Transaction) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(transaction.partitions):
        by_topic.setdefault(topic, []).append(partition)
    parts = [
        _HEAD.pack(
            VALUE_VERSION,
            transaction.producer_id,
            transaction.producer_epoch,
            transaction.timeout_ms,
            STATE_NUMBERS[transaction.state],
        ),
        length(len(by_topic)) if by_topic else length(-1),  # null, as in Kafka
    ]
    for topic, partitions in by_topic.items():
        parts += (compact_string(topic), length(len(partitions)), *map(INT32.pack, partitions), tagged_fields({}))
    parts.append(_TIMES.pack(transaction.updated_ms, transaction.started_ms))
    tags: dict[int, bytes] = {}
    if transaction.previous_producer_id != NO_PRODUCER_ID:
        tags[PREVIOUS_PRODUCER_ID_TAG] = _INT64.pack(transaction.previous_producer_id)
    if transaction.next_producer_id != NO_PRODUCER_ID:
        tags[NEXT_PRODUCER_ID_TAG] = _INT64.pack(transaction.next_producer_id)
    if transaction.raises_epoch:
        tags[CLIENT_TRANSACTION_VERSION_TAG] = INT16.pack(RAISING_VERSION)
    if transaction.successor_of != NO_EPOCH:
        tags[SUCCESSOR_OF_TAG] = INT16.pack(transaction.successor_of)
    parts.append(tagged_fields(tags))
    return b"".join(parts)


def decode_key(data: bytes) -> str | UnknownKey:
    """Return the transactional id. Raises MalformedRecord."""
    reader = RecordReader(data)
    version = reader.int16()
    return reader.text() if version == KEY_VERSION else UnknownKey(version)


def decode_value(transactional_id: str, data: bytes) -> Transaction:
    """Raises MalformedRecord."""
    reader = RecordReader(data)
    version = reader.int16()
    if not 0 <= version <= VALUE_VERSION:
        raise MalformedRecord(f"a transaction's value has version {version}: 0 to {VALUE_VERSION} are known")
    is_flexible = version >= 1
    producer_id, epoch, timeout_ms, number = reader.int64(), reader.int16(), reader.int32(), reader.int8()
    state = STATES.get(number)
    if state is None:
        raise MalformedRecord(f"a transaction's value has state {number}: 0 to {len(STATES) - 1} are known")

    def count() -> int:
        return reader.unsigned_varint() - 1 if is_flexible else reader.int32()

    partitions = []
    for _ in range(count()):
        topic = reader.compact_text() if is_flexible else reader.text()
        partitions += [TopicPartition(topic, reader.int32()) for _ in range(count())]
        if is_flexible:
            reader.tagged_fields()
    updated_ms, started_ms = reader.int64(), reader.int64()
    tags = reader.tagged_fields() if is_flexible else {}

    def tag(number: int, format: struct.Struct, default: int) -> int:
        value = tags.get(number)
        if value is None:
            return default
        if len(value) != format.size:
            raise reader.problem(f"tagged field {number} has {len(value)} bytes instead of {format.size}")
        return int(format.unpack(value)[0])

    return Transaction(
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        timeout_ms=timeout_ms,
        state=state,
        updated_ms=updated_ms,
        started_ms=started_ms,
        partitions=frozenset(partitions),
        successor_of=tag(SUCCESSOR_OF_TAG, INT16, NO_EPOCH),
        previous_producer_id=tag(PREVIOUS_PRODUCER_ID_TAG, _INT64, NO_PRODUCER_ID),
        next_producer_id=tag(NEXT_PRODUCER_ID_TAG, _INT64, NO_PRODUCER_ID),
        raises_epoch=tag(CLIENT_TRANSACTION_VERSION_TAG, INT16, 0) >= RAISING_VERSION,
    )
