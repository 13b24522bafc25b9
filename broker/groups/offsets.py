"""The offsets that a group has committed, is committing, and need not keep any longer. Pure.

The problem. A commit is a record of the log, and may fail after it was written there: it may survive, or be gone with
the next leader. What is shown must be what lasts. So memory follows the log: an offset is known from the moment its
record is replicated, and not before; also where that is after its commit has failed, and until then it is on its way
(Kafka forgets it, and the next coordinator finds it). Commits may be on their way one behind the other, and end in
another order than they were written in: the one that was written last counts, as it will to whoever loads the log.
"""

from collections.abc import Container, Iterable, Mapping

import msgspec

from minibroker.broker.groups.records import OffsetValue
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.topic_ids import is_older


class Committed(msgspec.Struct, frozen=True):
    value: OffsetValue
    log_offset: int
    """Of its record."""
    known_since_s: float
    """To this coordinator, by `Terms.now_s`."""


class GroupOffsets:
    def __init__(self) -> None:
        self._committed: dict[TopicPartition, Committed] = {}
        self._pending: dict[TopicPartition, int] = {}
        """How many records of each partition are on their way, tombstones included."""
        self._deleted_at: dict[TopicPartition, int] = {}
        """Where the log has the latest tombstone of each, while other records of it are on their way."""
        self._in_doubt: dict[TopicPartition, None] = {}
        """Of which a record may be in the log that is not known here."""

    def __len__(self) -> int:
        return len(self._committed)

    def topics(self) -> set[str]:
        """Of which something is committed."""
        return {topic_partition.topic for topic_partition in self._committed}

    def get(self, topic_partition: TopicPartition) -> OffsetValue | None:
        committed = self._committed.get(topic_partition)
        return None if committed is None else committed.value

    def items(self) -> list[tuple[TopicPartition, OffsetValue]]:
        return [(topic_partition, committed.value) for topic_partition, committed in self._committed.items()]

    def settled(self) -> list[tuple[TopicPartition, OffsetValue]]:
        """Those of which no newer record is on its way."""
        return [(one, committed.value) for one, committed in self._committed.items() if one not in self._pending]

    def to_delete(self) -> list[TopicPartition]:
        """Whatever the log may have, now or later: what is on its way ends up before a tombstone that is written now,
        and would be all there is without one."""
        return list(dict.fromkeys([*self._committed, *self._pending, *self._in_doubt]))

    @property
    def is_unused(self) -> bool:
        """Nothing is committed, or about to be."""
        return not self._committed and not self._pending

    # -- commits and deletions --

    def begin(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Records of these are on their way."""
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
        """They will not be told of again; what is shown stays. `is_in_doubt`: they may be in the log."""
        for topic_partition in topic_partitions:
            self._end(topic_partition)
            if is_in_doubt:
                self._in_doubt[topic_partition] = None

    def complete(
        self, topic_partition: TopicPartition, value: OffsetValue | None, log_offset: int, now_s: float
    ) -> None:
        """The record that began is replicated; None: it was a tombstone. One that was written after it counts more."""
        known = self._committed.get(topic_partition)
        newest = max(-1 if known is None else known.log_offset, self._deleted_at.get(topic_partition, -1))
        if log_offset > newest:
            self.load(topic_partition, value, log_offset, now_s)
            if value is None:
                self._deleted_at[topic_partition] = log_offset
        self._end(topic_partition)

    def load(self, topic_partition: TopicPartition, value: OffsetValue | None, log_offset: int, now_s: float) -> None:
        """What the log has, in its order."""
        if value is None:
            self._committed.pop(topic_partition, None)
        else:
            self._committed[topic_partition] = Committed(value, log_offset, now_s)

    # -- what need not be kept --

    def expired(
        self,
        now_s: float,
        retention_s: float,
        *,
        unused_since_s: float | None,
        topics_unused_since_s: Mapping[str, float],
        subscribed: Container[str],
    ) -> list[TopicPartition]:
        """What nobody has used for `retention_s` (KIP-211): since its commit, since `unused_since_s` (None: not known),
        or since its topic has been unused, whichever is latest. A commit that was loaded counts as made then.
        Partitions of topics that are subscribed to are in use, and so is what is being committed."""
        expired = []
        for topic_partition, committed in self._committed.items():
            if topic_partition in self._pending or topic_partition.topic in subscribed:
                continue
            since_s = max(committed.known_since_s, topics_unused_since_s.get(topic_partition.topic, 0.0))
            if unused_since_s is not None:
                since_s = max(since_s, unused_since_s)
            if now_s >= since_s + retention_s:
                expired.append(topic_partition)
        return expired


def is_of_gone_topic(value: OffsetValue, topic_id: str | None) -> bool:
    """Whether the topic that an offset was committed for is certainly gone: a newer one has its name. `topic_id`: of
    the topic that has the name now, as far as is known; None: none is known.

    A topic that nobody names is not gone for that: it may have been created just now, or its znode cannot be read for a
    while. Its offsets are deleted when its deletion is told, or expire. An offset without a topic's id belongs to the
    name, whatever becomes of it.
    """
    return topic_id is not None and is_older(value.topic_id, topic_id)


def newest_topic_id(topic_ids: Iterable[str]) -> str:
    """Of the topics that one name has had. Empty: none is known."""
    newest = ""
    for topic_id in topic_ids:
        if not newest or is_older(newest, topic_id):
            newest = topic_id
    return newest
