"""The offsets of a group: committed ones, those being written, those of open transactions, and those that may expire.
Pure.

The problem. A commit is a record of the log. It may fail after it was appended, and then either survive or be lost with
the next leader. Clients must only see offsets that last. Memory therefore follows the log: an offset becomes visible
when its record is replicated, even if its commit has failed before, and is pending until then. (Kafka forgets such an
offset, and the next coordinator finds it.) Several commits may be pending and finish in another order than they were
written in. The one that was written last wins, as it does for a coordinator that loads the log.

Offsets of a transaction are records of the log that count once the commit marker is replicated, and never after an
abort marker. Among records of the same partition the place of the record decides, not that of the marker: a later
commit or tombstone wins over an offset whose transaction ends after it. Compaction keeps the last record of each key,
so no other rule gives the same result before and after a compaction.
"""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import msgspec

from minibroker.broker.groups.records import OffsetValue
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.topic_ids import is_older


class _StoredOffset(msgspec.Struct, frozen=True):
    value: OffsetValue
    log_offset: int
    """The offset of its record."""
    known_since_s: float
    """Time at which this coordinator learned of it, by `GroupTerms.now_s`."""


class _OfTransaction(NamedTuple):
    log_offset: int
    value: OffsetValue


class GroupOffsets:
    def __init__(self) -> None:
        self._committed: dict[TopicPartition, _StoredOffset] = {}
        self._pending: dict[TopicPartition, int] = {}
        """The number of pending records of each partition, tombstones included."""
        self._deleted_at: dict[TopicPartition, int] = {}
        """The log offset of each partition's latest tombstone while other records of it are pending."""
        self._in_doubt: dict[TopicPartition, None] = {}
        """Partitions whose records may be in the log without being known here."""
        self._of_transactions: dict[int, dict[TopicPartition, list[_OfTransaction]]] = {}
        """The records of transactions without a replicated marker by producer id and partition, in log order: the last
        one of each transaction."""

        self._metadata_length = 0
        """Characters of the metadata of the committed offsets."""

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def in_all(self) -> int:
        """The number of offsets that are kept: committed, being written, and of transactions."""
        of_transactions = sum(len(records) for of in self._of_transactions.values() for records in of.values())
        return len(self._committed) + len(self._pending) + of_transactions

    def replaced_metadata(self, topic_partition: TopicPartition, producer_id: int | None) -> int | None:
        """Return the characters of the metadata that a commit of this partition would replace, about. None: it would
        replace nothing. `producer_id`: of the transaction that commits."""
        if producer_id is not None:
            records = self._of_transactions.get(producer_id, {}).get(topic_partition)
            return len(records[-1].value.metadata) if records else None
        committed = self._committed.get(topic_partition)
        if committed is not None:
            return len(committed.value.metadata)
        return 0 if topic_partition in self._pending else None

    @property
    def metadata_length(self) -> int:
        """Characters of the metadata that is kept, for transactions as well."""
        open_ones = (one for of in self._of_transactions.values() for records in of.values() for one in records)
        return self._metadata_length + sum(len(one.value.metadata) for one in open_ones)

    def topics(self) -> set[str]:
        """Return the topics with committed offsets."""
        return {topic_partition.topic for topic_partition in self._committed}

    def get(self, topic_partition: TopicPartition) -> OffsetValue | None:
        committed = self._committed.get(topic_partition)
        return None if committed is None else committed.value

    def items(self) -> list[tuple[TopicPartition, OffsetValue]]:
        return [(topic_partition, committed.value) for topic_partition, committed in self._committed.items()]

    def settled(self) -> list[tuple[TopicPartition, OffsetValue]]:
        """Return the committed offsets without a pending record or an open transaction."""
        undecided = self.of_transactions() | self._pending.keys()
        return [(one, committed.value) for one, committed in self._committed.items() if one not in undecided]

    def to_delete(self) -> list[TopicPartition]:
        """Return all partitions that the log may have records of, now or later. A pending record ends up before a
        tombstone written now, and would remain without that tombstone."""
        return list(dict.fromkeys([*self._committed, *self._pending, *self._in_doubt, *sorted(self.of_transactions())]))

    @property
    def is_unused(self) -> bool:
        """Whether nothing is committed or pending, and no transaction is open."""
        return not self._committed and not self._pending and not self._of_transactions

    # -- commits and deletions --

    def begin(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Mark a record of each partition as pending."""
        for topic_partition in topic_partitions:
            self._pending[topic_partition] = self._pending.get(topic_partition, 0) + 1

    def _end(self, topic_partition: TopicPartition) -> None:
        count = self._pending[topic_partition] - 1
        if count:
            self._pending[topic_partition] = count
        else:
            del self._pending[topic_partition]
            self._deleted_at.pop(topic_partition, None)

    def fail(self, topic_partitions: Iterable[TopicPartition], *, is_in_doubt: bool = False) -> None:
        """Forget pending records that failed; the visible offsets stay. `is_in_doubt`: the records may be in the
        log."""
        for topic_partition in topic_partitions:
            self._end(topic_partition)
            if is_in_doubt:
                self._in_doubt[topic_partition] = None

    def complete(
        self, topic_partition: TopicPartition, value: OffsetValue | None, log_offset: int, now_s: float
    ) -> None:
        """Apply a pending record that is replicated now, unless a later record was applied before. None: a
        tombstone."""
        known = self._committed.get(topic_partition)
        newest = max(-1 if known is None else known.log_offset, self._deleted_at.get(topic_partition, -1))
        if log_offset > newest:
            self.load(topic_partition, value, log_offset, now_s)
            if value is None:
                self._deleted_at[topic_partition] = log_offset
        self._end(topic_partition)
        self._override(topic_partition, log_offset)

    def load(self, topic_partition: TopicPartition, value: OffsetValue | None, log_offset: int, now_s: float) -> None:
        """Apply a record of the log. Call this in log order."""
        before = self._committed.pop(topic_partition, None) if value is None else self._committed.get(topic_partition)
        if before is not None:
            self._metadata_length -= len(before.value.metadata)
        if value is not None:
            self._metadata_length += len(value.metadata)
            self._committed[topic_partition] = _StoredOffset(value, log_offset, now_s)

    # -- transactions --

    def of_transactions(self) -> set[TopicPartition]:
        """Return the partitions with an offset in a transaction that has no replicated marker."""
        return set().union(*self._of_transactions.values())

    def has_transaction_of(self, producer_id: int) -> bool:
        return producer_id in self._of_transactions

    def add_of_transaction(
        self,
        producer_id: int,
        topic_partition: TopicPartition,
        value: OffsetValue,
        log_offset: int,
        *,
        began_after: int = -1,
    ) -> None:
        """A record of the producer's open transaction is in the log. Call this in log order. `began_after`: the offset
        of the marker before the transaction; -1: that is replicated."""
        records = self._of_transactions.setdefault(producer_id, {}).setdefault(topic_partition, [])
        if records and records[-1].log_offset > began_after:
            records.pop()
        records.append(_OfTransaction(log_offset, value))

    def end_transaction(self, producer_id: int, marker_offset: int, *, is_committed: bool, now_s: float) -> None:
        """The marker at this offset is replicated. Records after it belong to the producer's next transaction."""
        later: dict[TopicPartition, list[_OfTransaction]] = {}
        for topic_partition, records in self._of_transactions.pop(producer_id, {}).items():
            ended = [one for one in records if one.log_offset < marker_offset]
            if len(ended) < len(records):
                later[topic_partition] = records[len(ended) :]
            if not ended or not is_committed:
                continue
            log_offset, value = ended[-1]
            known = self._committed.get(topic_partition)
            if known is None or log_offset > known.log_offset:
                self.load(topic_partition, value, log_offset, now_s)
                self._override(topic_partition, log_offset)
        if later:
            self._of_transactions[producer_id] = later

    def _override(self, topic_partition: TopicPartition, log_offset: int) -> None:
        """Forget records of open transactions before a commit or tombstone at this offset: they will never count."""
        for producer_id, of_producer in list(self._of_transactions.items()):
            records = of_producer.get(topic_partition)
            if records is None:
                continue
            left = [one for one in records if one.log_offset > log_offset]
            if left:
                of_producer[topic_partition] = left
                continue
            del of_producer[topic_partition]
            if not of_producer:
                del self._of_transactions[producer_id]

    # -- expiration --

    def expired(
        self,
        now_s: float,
        retention_s: float,
        *,
        unused_since_s: float | None,
        topics_unused_since_s: Mapping[str, float],
        subscribed: Container[str],
    ) -> list[TopicPartition]:
        """Return the offsets that were unused for `retention_s` (KIP-211). The time counts from the latest of: the
        commit (or its load), `unused_since_s` (None: unknown), and the time since which the topic is unused. Partitions
        of subscribed topics, and those with pending commits or open transactions, are in use."""
        expired = []
        undecided = self.of_transactions() | self._pending.keys()
        for topic_partition, committed in self._committed.items():
            if topic_partition in undecided or topic_partition.topic in subscribed:
                continue
            since_s = max(committed.known_since_s, topics_unused_since_s.get(topic_partition.topic, 0.0))
            if unused_since_s is not None:
                since_s = max(since_s, unused_since_s)
            if now_s >= since_s + retention_s:
                expired.append(topic_partition)
        return expired


def is_of_gone_topic(value: OffsetValue, topic_id: str | None) -> bool:
    """Return whether the topic of a committed offset is certainly gone, because a newer topic has its name. `topic_id`:
    the id of the topic that has the name now, or None if none is known.

    An unknown topic is not necessarily gone: it may be new, or its znode may be unreadable for a while. Its offsets are
    deleted when its deletion is announced, or they expire. An offset without a topic id belongs to the name, whichever
    topic has it.
    """
    return topic_id is not None and is_older(value.topic_id, topic_id)


def newest_topic_id(topic_ids: Iterable[str]) -> str:
    """Return the id of the newest topic that had this name. Empty: unknown."""
    newest = ""
    for topic_id in topic_ids:
        if not newest or is_older(newest, topic_id):
            newest = topic_id
    return newest
