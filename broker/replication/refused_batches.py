"""Rejected batches that Kafka's idempotent producers will send again, before which nothing of theirs may be appended.

The problem: a log that does not know a producer accepts any first sequence of it, as Kafka's do
(`ProducerState.check`). But a producer has up to five requests under way. If the first is rejected (the broker does not
lead yet, too few replicas are in sync) and the second, a moment later, is not, the second would be appended: the
records would change their order, and the first batch, when it comes again, would be out of sequence, which ends
librdkafka's producer. In Kafka that happens.

The choice: a rejected batch that will come again is remembered. Until it does, nothing else of an unknown producer is
appended that arrived before the rejection, or soon after: such batches were under way on the same connection. (Large
batches are appended long after their arrival.) They get OUT_OF_ORDER_SEQUENCE_NUMBER, as if the producer were known,
and come again after it. This ends after a while: the batch may come again to another broker, and its producer to this
one with another topic.
"""

from __future__ import annotations

from typing import NamedTuple

from minibroker.broker.storage.log import Log
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode
from minibroker.protocol.model import MAX_TOPIC_NAME_LENGTH, TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, BatchHeader, Buffer, CorruptRecord, parse_header

REMEMBERED_S = 10.0
"""Seconds after a rejection after which later batches do not wait for the rejected one."""
FORGOTTEN_S = 120.0
"""Seconds after which earlier batches have been handled: clients wait for a minute at most."""
MOST_REMEMBERED = 10_000
"""The most rejected batches remembered. Beyond that the oldest are forgotten."""


class _Refused(NamedTuple):
    epoch: int
    sequence: int
    since_s: float


class RefusedBatches:
    def __init__(self) -> None:
        self._refused: dict[tuple[TopicPartition, int], _Refused] = {}
        """The rejected batches by partition and producer id, the oldest first."""

    def __len__(self) -> int:
        return len(self._refused)

    def check(self, topic_partition: TopicPartition, records: Buffer, log: Log, received_s: float) -> None:
        """Before records are appended that came at `received_s`. Raises BrokerError OUT_OF_ORDER_SEQUENCE_NUMBER where
        another batch must come first."""
        if not self._refused:
            return
        header = _idempotent(records)
        if header is None:
            return
        refused = self._refused.get((topic_partition, header.producer_id))
        if refused is None or refused.epoch != header.producer_epoch or refused.sequence == header.base_sequence:
            return
        if received_s < refused.since_s + REMEMBERED_S and not log.knows_producer(header.producer_id):
            raise BrokerError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} in epoch {header.producer_epoch} sends sequence "
                f"{header.base_sequence}, but its batch of {refused.sequence} was refused and has not come again",
            )

    def note(self, topic_partition: TopicPartition, records: Buffer, code: ErrorCode, now_s: float) -> None:
        """`code` is the answer to a batch."""
        while self._refused and next(iter(self._refused.values())).since_s + FORGOTTEN_S <= now_s:
            del self._refused[next(iter(self._refused))]  # else every batch would be compared with them for ever
        if not (self._refused or ERRORS[code].retriable) or len(topic_partition.topic) > MAX_TOPIC_NAME_LENGTH:
            return
        header = _idempotent(records)
        if header is None or code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return
        key = topic_partition, header.producer_id
        refused = self._refused.get(key)
        if refused is not None:
            is_other = refused.epoch >= header.producer_epoch and refused.sequence != header.base_sequence
            is_old = refused.since_s + REMEMBERED_S <= now_s
            if is_other and not is_old and code is not ErrorCode.NONE:
                return  # the first that was refused is the first to be appended
            del self._refused[key]
        if ERRORS[code].retriable:
            self._refused[key] = _Refused(header.producer_epoch, header.base_sequence, now_s)
            if len(self._refused) > MOST_REMEMBERED:
                del self._refused[next(iter(self._refused))]


def _idempotent(records: Buffer) -> BatchHeader | None:
    try:
        header = parse_header(records)
    except CorruptRecord:
        return None
    return header if header.magic == MAGIC_RECORDS and header.has_producer_id else None
