"""The terms of `__consumer_offsets`: the groups that this broker coordinates, and how they are loaded (see
`coordinating/terms`)."""

import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.ageing import Ageing, steps_between_checks
from minibroker.broker.coordinating.attempts import LatestAttempts
from minibroker.broker.coordinating.record_fields import MalformedRecord
from minibroker.broker.coordinating.terms import Loading, Term, Terms
from minibroker.broker.groups.group import Group, group_from
from minibroker.broker.groups.records import (
    GroupKey,
    OffsetKey,
    OffsetValue,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
)
from minibroker.broker.groups.states import GroupState
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.questions import Question
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import BatchHeader, ControlType, DecodedBatch, EndTransactionMarker
from minibroker.protocol.world import Clock

MAX_GROUPS = 100_000
"""Groups of one partition of `__consumer_offsets` (Kafka: unlimited)."""
GROUP_BYTES, OFFSET_BYTES = 1_600, 400
"""The memory of a group without members, and of a committed offset without metadata."""
MAX_GROUP_ID_BYTES = 32_767
"""The limit of a record's key."""

_E = ErrorCode


def _kept_bytes(group: Group) -> int:
    """Return the memory of a group without its members."""
    offsets = group.offsets
    return GROUP_BYTES + len(group.group_id) + OFFSET_BYTES * offsets.in_all + offsets.metadata_length


class GroupTerm(Term):
    """One unbroken leadership of a partition, with the groups that this broker coordinates through it."""

    def __init__(self, topic_partition: TopicPartition, epoch: int, leading_since_epoch: int, end_offset: int) -> None:
        super().__init__(topic_partition, epoch, leading_since_epoch, end_offset)
        self.groups: dict[str, Group] = {}
        self.attempts = LatestAttempts(leading_since_epoch)
        self._in_transactions: dict[int, set[str]] = {}
        """The ids of groups with offsets in an open transaction, by producer id."""
        self._unreplicated_markers: dict[int, int] = {}
        """The offset of the last marker of each producer that may not be replicated yet."""

    @property
    def size(self) -> int:
        return len(self.groups)

    def forget(self, group: Group, now_s: float) -> None:
        """Drop the group. The next request for it creates a new one, and operations that still hold this one find it
        dead."""
        if self.groups.get(group.group_id) is group:
            group.transition_to(GroupState.DEAD, now_s)
            del self.groups[group.group_id]

    def forget_unused(self, group: Group, now_s: float) -> None:
        """Drop the group if it is unused. A group that is being deleted stays until the outcome of its deletion is
        known."""
        if group.is_unused and not group.is_being_deleted:
            self.forget(group, now_s)

    # -- transactions --

    def add_of_transaction(
        self, producer_id: int, group: Group, topic_partition: TopicPartition, value: OffsetValue, log_offset: int
    ) -> None:
        """A record of the producer's open transaction is in the log. Call this in log order."""
        began_after = self._unreplicated_markers.get(producer_id, -1)
        group.offsets.add_of_transaction(producer_id, topic_partition, value, log_offset, began_after=began_after)
        self._in_transactions.setdefault(producer_id, set()).add(group.group_id)

    def marker_appended(self, producer_id: int, marker_offset: int) -> None:
        """The marker at this offset is in the log. `end_transaction` follows once it is replicated."""
        if producer_id in self._in_transactions:
            self._unreplicated_markers[producer_id] = marker_offset

    def end_transaction(self, producer_id: int, marker_offset: int, *, is_committed: bool, now_s: float) -> None:
        """The marker at this offset is replicated."""
        if self._unreplicated_markers.get(producer_id) == marker_offset:
            del self._unreplicated_markers[producer_id]
        for group_id in self._in_transactions.pop(producer_id, ()):
            group = self.groups.get(group_id)
            if group is None:
                continue
            group.offsets.end_transaction(producer_id, marker_offset, is_committed=is_committed, now_s=now_s)
            if group.offsets.has_transaction_of(producer_id):
                self._in_transactions.setdefault(producer_id, set()).add(group_id)
            self.forget_unused(group, now_s)


class GroupTerms(Terms[GroupTerm]):
    """Also a MarkerListener of the appender."""

    topic = OFFSETS_TOPIC
    content = "group"
    state = "group state"
    meaningless_key = encode_group_key("")
    logger = logging.getLogger("minibroker.groups")

    def __init__(
        self,
        clock: Clock,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        super().__init__(clock, metadata, replicas, start_task, config.offsets_commit_timeout_ms)
        check_s, retention_s = config.offsets_retention_check_interval_ms / 1_000, config.offsets_retention_minutes * 60
        self.ageing = Ageing(clock, check_s / steps_between_checks(check_s, retention_s))

    @property
    def now_s(self) -> float:
        """The clock by which groups and offsets age."""
        return self.ageing.now_s

    def new_term(self, index: int, epoch: int, leading_since_epoch: int, end_offset: int) -> GroupTerm:
        return GroupTerm(TopicPartition(OFFSETS_TOPIC, index), epoch, leading_since_epoch, end_offset)

    def new_loading(self, term: GroupTerm) -> Loading:
        return _Loading(term, self.now_s, self.skip)

    def sizes(self) -> Iterator[int]:
        for term in self.loaded():
            for group in list(term.groups.values()):
                yield _kept_bytes(group)

    def may_add_group(self, term: GroupTerm, group_id: str) -> bool:
        return len(term.groups) < MAX_GROUPS and self.kept.add(GROUP_BYTES + len(group_id))

    def question(self, term: GroupTerm, producer_id: int) -> Question | None:
        """Return a question to the coordinator of the producer's transaction, or None if the term is over."""
        partition = self._replicas.partitions.get(term.topic_partition)
        return None if partition is None or term.is_over else partition.questions.take(producer_id)

    def stands(self, term: GroupTerm, producer_id: int, question: Question) -> bool:
        """Whether the term and the producer's transaction have not ended since the question was taken."""
        partition = self._replicas.partitions.get(term.topic_partition)
        return partition is not None and not term.is_over and partition.questions.stands(producer_id, question)

    def marker_appended(
        self, topic_partition: TopicPartition, producer_id: int, marker: EndTransactionMarker, end_offset: int
    ) -> None:
        term = self._terms.get(topic_partition.partition) if topic_partition.topic == OFFSETS_TOPIC else None
        if term is None:
            return
        is_committed = marker.type is ControlType.COMMIT
        term.marker_appended(producer_id, end_offset - 1)

        def replicated() -> None:
            term.end_transaction(producer_id, end_offset - 1, is_committed=is_committed, now_s=self.now_s)

        term.await_replicas(end_offset, replicated)

    def of(self, group_id: str) -> GroupTerm | ErrorCode:
        """Return the loaded term of the group's partition, or the error why there is none."""
        return _E.INVALID_GROUP_ID if len(group_id.encode()) > MAX_GROUP_ID_BYTES else self.of_key(group_id)

    def find(self, group_id: str) -> tuple[GroupTerm, Group | None] | ErrorCode:
        """Return the group and its term. The group is None if it does not exist. COORDINATOR_NOT_AVAILABLE: it is being
        deleted."""
        term = self.of(group_id)
        if isinstance(term, ErrorCode):
            return term
        group = term.groups.get(group_id)
        if group is not None and group.is_being_deleted:
            return _E.COORDINATOR_NOT_AVAILABLE
        return term, group

    def find_named(self, group_id: str) -> tuple[GroupTerm, Group | None] | ErrorCode:
        """Like `find`, but returns INVALID_GROUP_ID for the empty name. As in Kafka, that group has offsets but no
        members: very old consumers commit to it."""
        return self.find(group_id) if group_id else _E.INVALID_GROUP_ID


class _OfTransaction(NamedTuple):
    group_id: str
    topic_partition: TopicPartition
    value: bytes | None
    log_offset: int


class _Loading(Loading):
    """Only the last record of each key counts (KAFKA-5600), and only that one is decoded. A record of a transaction
    counts if the commit marker follows. Deleted offsets are kept until the end, because the marker of an earlier record
    may come after the tombstone."""

    def __init__(self, term: GroupTerm, now_s: float, skip: Callable[[int, Exception], None]) -> None:
        self._term = term
        self._now_s = now_s
        self._skip = skip
        self._groups: dict[str, tuple[bytes, int, int]] = {}
        """The encoded group, its offset and its leader epoch, by group id."""
        self._offsets: dict[str, dict[TopicPartition, tuple[bytes | None, int]]] = {}
        self._open: dict[int, dict[tuple[str, TopicPartition], _OfTransaction]] = {}
        """The last records of transactions without a marker by producer id."""

    def add(self, batch: DecodedBatch) -> None:
        if batch.keys is None:
            return
        for offset, key, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
            if key is not None:
                try:
                    self._add(key, value, offset, batch.header)
                except MalformedRecord as error:
                    self._skip(offset, error)

    def _add(self, key_bytes: bytes, value: bytes | None, offset: int, header: BatchHeader) -> None:
        key = decode_key(key_bytes)
        if isinstance(key, OffsetKey):
            record = _OfTransaction(key.group_id, TopicPartition(key.topic, key.partition), value, offset)
            if header.is_transactional:
                self._open.setdefault(header.producer_id, {})[record.group_id, record.topic_partition] = record
            else:
                self._apply(record)
        elif isinstance(key, GroupKey):
            if value is None:
                self._groups.pop(key.group_id, None)
            else:
                self._groups[key.group_id] = (value, offset, header.partition_leader_epoch)

    def add_control(self, header: BatchHeader, marker: EndTransactionMarker) -> None:
        records = self._open.pop(header.producer_id, {})
        if marker.type is ControlType.COMMIT:
            for record in records.values():
                self._apply(record)

    def _apply(self, record: _OfTransaction) -> None:
        if not self._is_overridden(record):
            self._offsets.setdefault(record.group_id, {})[record.topic_partition] = (record.value, record.log_offset)

    def _is_overridden(self, record: _OfTransaction) -> bool:
        """Whether a record that counts follows it."""
        _, newest = self._offsets.get(record.group_id, {}).get(record.topic_partition, (None, -1))
        return newest > record.log_offset

    async def finish(self, slices: Slices) -> None:
        groups: dict[str, Group] = {}
        for group_id, (group_value, log_offset, epoch) in self._groups.items():
            terms_since = max(1, self._term.leading_since_epoch - epoch)
            try:
                groups[group_id] = group_from(group_id, decode_group_value(group_value), self._now_s, terms_since)
            except MalformedRecord as error:
                self._skip(log_offset, error)
            await slices.breathe()
        for group_id, offsets in self._offsets.items():
            for topic_partition, (value, log_offset) in offsets.items():
                committed = self._decoded(value, log_offset)
                if committed is not None:
                    group = _with(groups, group_id)
                    group.offsets.load(topic_partition, committed, log_offset, self._now_s)
            await slices.breathe()
        for producer_id, records in self._open.items():
            for record in records.values():
                committed = self._decoded(record.value, record.log_offset)
                if committed is not None and not self._is_overridden(record):
                    group = _with(groups, record.group_id)
                    self._term.add_of_transaction(
                        producer_id, group, record.topic_partition, committed, record.log_offset
                    )
            await slices.breathe()
        self._term.groups = groups

    def _decoded(self, value: bytes | None, log_offset: int) -> OffsetValue | None:
        """Return None for a tombstone and for a malformed value."""
        if value is None:
            return None
        try:
            return decode_offset_value(value)
        except MalformedRecord as error:
            self._skip(log_offset, error)
            return None


def _with(groups: dict[str, Group], group_id: str) -> Group:
    group = groups.get(group_id)
    if group is None:
        group = groups[group_id] = Group(group_id)
    return group
