"""The periods in which this broker coordinates groups, and its writes to `__consumer_offsets`.

The problem. Groups live in memory but are defined by the log, which has several replicas and changing leaders. Records
that were read must not be lost to a later leader that lacks them. Only a broker that has read all earlier records may
write. A deposed coordinator that does not know it yet must not answer with outdated state.

The choice. A *term* is one unbroken leadership of a partition by this broker, across any number of leader epochs.

- A term is loaded once, up to the log end at its beginning (requests are rejected while it loads, so nothing is
  appended). It counts as loaded only when the high watermark has reached that offset, because another leader could
  truncate the last records until then.
- Its writes are appended within this term or not at all. They take effect when they are replicated as with acks=all,
  even if the waiting client has already received an error: the next coordinator will read them in the log, and a member
  that was given the older state here would move the offset back later.
- Its reads for clients, and statements that there is nothing to delete, are confirmed by a write: an empty record,
  appended after the request arrived and replicated before the answer, proves that no other broker could have committed
  anything at that time. One record answers all requests that arrived before it was appended.

A late load, a late commit and an isolated coordinator therefore find their term over, or discover it through the write.

Rejected: loading again for each leader epoch, as Kafka does (it also keeps its state), because nothing can have changed
within one leadership. Reading only up to the high watermark: later records may be committed a moment later without a
trace here. Answering from memory while ZooKeeper seems reachable: a process that was suspended does not know of its
successor, and a client that asks it at that moment would return to old offsets.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.groups.ageing import Ageing, steps_between_checks
from minibroker.broker.groups.attempts import LatestAttempts
from minibroker.broker.groups.group import Group, group_from
from minibroker.broker.groups.records import (
    GroupKey,
    MalformedRecord,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
)
from minibroker.broker.groups.states import GroupState
from minibroker.broker.metrics.log_lines import Gathered, named
from minibroker.broker.replication.delayed import ProduceStatus
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition, offsets_partition
from minibroker.protocol.records import DecodedBatch, decode_batch, encode_batch, iterate_batches
from minibroker.protocol.words import counted
from minibroker.protocol.world import Clock

logger = logging.getLogger("minibroker.groups")

MAX_GROUP_ID_BYTES = 32_767
"""The limit of a record's key."""
LOAD_BYTES = 256 * 1024
"""Bytes per read of the log."""
LEAST_LOOK_S = 0.005
MOST_LOOK_S = 0.25
"""The longest interval at which a load polls the high watermark. The interval grows while it waits."""
RETRY_S = 1.0
UNWRITTEN_S = 5.0
"""The interval at which failed writes are logged together. While replicas are missing, clients repeat them many times a
second."""

_NO_MEANING = encode_group_key("")
"""A key with an empty group name, which no group can have. A record with this key and without a value has no effect."""

_E = ErrorCode
_AS_COORDINATOR: dict[int, ErrorCode] = {
    _E.UNKNOWN_TOPIC_OR_PARTITION: _E.COORDINATOR_NOT_AVAILABLE,
    _E.NOT_ENOUGH_REPLICAS: _E.COORDINATOR_NOT_AVAILABLE,
    _E.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _E.COORDINATOR_NOT_AVAILABLE,
    _E.REQUEST_TIMED_OUT: _E.COORDINATOR_NOT_AVAILABLE,
    _E.NOT_LEADER_OR_FOLLOWER: _E.NOT_COORDINATOR,
    _E.KAFKA_STORAGE_ERROR: _E.NOT_COORDINATOR,
    _E.RECORD_LIST_TOO_LARGE: _E.MESSAGE_TOO_LARGE,
}
"""Maps the error of an append to the error for the client (GroupMetadataManager.storeGroup)."""
_NOT_APPENDED = frozenset({_E.UNKNOWN_TOPIC_OR_PARTITION, _E.NOT_ENOUGH_REPLICAS, _E.MESSAGE_TOO_LARGE})
"""Errors after which nothing was appended for certain."""

Record = tuple[bytes, bytes | None]
"""A key and a value. Without a value, the record deletes the key."""
Written = Callable[["Outcome"], None]


class Outcome:
    """The outcome of a write. Without an error, all records are replicated, and `base_offset` is the offset of the
    first. An outcome in doubt also has it if this broker's log has the records."""

    __slots__ = ("base_offset", "code", "is_in_doubt")

    def __init__(self, code: ErrorCode, base_offset: int = -1, is_in_doubt: bool = False) -> None:
        self.code = code
        self.base_offset = base_offset
        self.is_in_doubt = is_in_doubt
        """Whether a failed write may still be in the log, and may stay there."""


class Term:
    """One unbroken leadership of a partition, with the groups that this broker coordinates through it."""

    def __init__(self, index: int, epoch: int, leading_since_epoch: int, end_offset: int) -> None:
        self.topic_partition = TopicPartition(OFFSETS_TOPIC, index)
        self.epoch = epoch
        """The current leader epoch."""
        self.leading_since_epoch = leading_since_epoch
        self.end_offset = end_offset
        """The log end offset when the term began."""
        self.groups: dict[str, Group] = {}
        self.attempts = LatestAttempts(leading_since_epoch)
        self.is_loaded = False
        self.is_over = False
        self.is_confirming = False
        self.unconfirmed: list[Callable[[ErrorCode], None]] = []
        self._in_doubt: list[tuple[int, Callable[[], None]]] = []
        """A heap of failed writes that the log has: the end offset of each, and the callback for its replication."""

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

    def await_replicas(self, end_offset: int, replicated: Callable[[], None]) -> None:
        """Call `replicated` once a write in doubt, which ends at this offset, is replicated, before any request reads
        the groups. It is never called if the term ends first, because the next coordinator reads the outcome in the
        log."""
        heapq.heappush(self._in_doubt, (end_offset, replicated))

    def look_at_what_is_in_doubt(self, partition: Partition | None) -> None:
        while self._in_doubt and partition is not None and partition.is_leader:
            if partition.leading_since_epoch != self.leading_since_epoch:
                return
            if partition.high_watermark < self._in_doubt[0][0]:
                return
            _, replicated = heapq.heappop(self._in_doubt)
            replicated()


class TermListener:
    """A component that works on the groups of a term. The methods are called on the event loop and must return at
    once."""

    def loaded(self, term: Term) -> None:
        """The groups are loaded, and requests are accepted from now on."""

    def over(self, term: Term) -> None:
        """This broker no longer coordinates the groups."""


class Terms:
    """All terms of this broker (a LeadershipListener of the replica manager)."""

    def __init__(
        self,
        clock: Clock,
        config: BrokerConfig,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._clock = clock
        self._config = config
        self._metadata = metadata
        self._replicas = replicas
        self._start_task = start_task
        check_s, retention_s = config.offsets_retention_check_interval_ms / 1_000, config.offsets_retention_minutes * 60
        self.ageing = Ageing(clock, check_s / steps_between_checks(check_s, retention_s))
        self._terms: dict[int, Term] = {}
        self._listeners: list[TermListener] = []
        self._begun: Gathered[tuple[Term, int, float]] = Gathered(_log_begun)
        """Loaded terms to log, each with its number of groups and its load time."""
        self._ended: Gathered[Term] = Gathered(_log_ended)
        self._unwritten: Gathered[tuple[TopicPartition, ErrorCode]] = Gathered(_log_unwritten, UNWRITTEN_S)
        self.loads = 0
        """Terms loaded so far."""
        self.load_s = 0.0
        """Seconds spent on loading them, in total."""

    def close(self) -> None:
        self._ended.close()
        self._begun.close()
        self._unwritten.close()

    def add_listener(self, listener: TermListener) -> None:
        self._listeners.append(listener)

    @property
    def now_s(self) -> float:
        """The clock by which groups and offsets age."""
        return self.ageing.now_s

    # -- look-ups --

    def loaded(self) -> list[Term]:
        return [self._up_to_date(term) for term in self._terms.values() if term.is_loaded]

    def _up_to_date(self, term: Term) -> Term:
        term.look_at_what_is_in_doubt(self._replicas.partitions.get(term.topic_partition))
        return term

    @property
    def is_loading(self) -> bool:
        return any(not term.is_loaded for term in self._terms.values())

    def of(self, group_id: str) -> Term | ErrorCode:
        """Return the loaded term of the group's partition, or the error why there is none."""
        if len(group_id.encode()) > MAX_GROUP_ID_BYTES:
            return _E.INVALID_GROUP_ID
        partitions = self._metadata.partition_count(OFFSETS_TOPIC)
        term = self._terms.get(offsets_partition(group_id, partitions)) if partitions else None
        if term is None:
            return _E.NOT_COORDINATOR
        return self._up_to_date(term) if term.is_loaded else _E.COORDINATOR_LOAD_IN_PROGRESS

    def find(self, group_id: str) -> tuple[Term, Group | None] | ErrorCode:
        """Return the group and its term. The group is None if it does not exist. COORDINATOR_NOT_AVAILABLE: it is being
        deleted."""
        term = self.of(group_id)
        if isinstance(term, ErrorCode):
            return term
        group = term.groups.get(group_id)
        if group is not None and group.is_being_deleted:
            return _E.COORDINATOR_NOT_AVAILABLE
        return term, group

    def find_named(self, group_id: str) -> tuple[Term, Group | None] | ErrorCode:
        """Like `find`, but returns INVALID_GROUP_ID for the empty name. As in Kafka, that group has offsets but no
        members: very old consumers commit to it."""
        return self.find(group_id) if group_id else _E.INVALID_GROUP_ID

    # -- LeadershipListener --

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic != OFFSETS_TOPIC:
            return
        partition = self._replicas.partitions.get(topic_partition)
        assert partition is not None
        term = self._terms.get(topic_partition.partition)
        if term is not None and term.leading_since_epoch == partition.leading_since_epoch:
            term.epoch = epoch
            return
        self._end(topic_partition.partition)
        term = Term(topic_partition.partition, epoch, partition.leading_since_epoch, partition.log.log_end_offset)
        self._terms[topic_partition.partition] = term
        self._start_task(self._load(term), f"load of the groups of {topic_partition}")

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic == OFFSETS_TOPIC:
            self._end(topic_partition.partition)

    def _end(self, index: int) -> None:
        term = self._terms.pop(index, None)
        if term is None:
            return
        term.is_over = True
        for listener in self._listeners:
            listener.over(term)
        logger.debug("%s: no longer coordinates its %s", term.topic_partition, counted(len(term.groups), "group"))
        if term.groups:
            self._ended.add(term)

    # -- reading --

    async def _load(self, term: Term) -> None:
        """Load the term. A failed read is retried until the term ends with the replica."""
        began_s = self._clock.monotonic()
        while not term.is_over:
            try:
                groups = await self._read(term)
                break
            except BrokerError as error:
                logger.error("%s cannot be read, so its groups are not available yet: %s", term.topic_partition, error)
                await asyncio.sleep(RETRY_S)
        await self._until_replicated(term)
        if term.is_over:  # another term may have begun on the same partition (KAFKA-2841)
            return
        term.groups = groups
        term.is_loaded = True
        took_s = self._clock.monotonic() - began_s
        self.loads += 1
        self.load_s += took_s
        logger.debug(
            "%s: coordinates %d groups in epoch %d, after %.3f s", term.topic_partition, len(groups), term.epoch, took_s
        )
        if groups:
            self._begun.add((term, len(groups), took_s))
        for listener in self._listeners:
            listener.loaded(term)

    async def _read(self, term: Term) -> dict[str, Group]:
        """Read the groups from the log. Raises BrokerError."""
        loading = _Loading(term.leading_since_epoch, self.now_s)
        slices = Slices()
        partition = self._replicas.partitions.require(term.topic_partition)
        offset = partition.log.log_start_offset
        while offset < term.end_offset and not term.is_over:
            try:
                data = partition.log.read(offset, LOAD_BYTES, term.end_offset)
                partition.log.check(data, offset)
            except BrokerError as error:
                raise partition.considered(error) from error
            if not data:
                # Compaction may have removed all records up to the end; waiting for a next batch would never end
                # (KAFKA-9065).
                break
            for piece in iterate_batches(data):
                header = piece.header
                if not header.is_control:
                    loading.add(decode_batch(data, header, piece.start, check_crc=False))
                offset = header.next_offset
                await slices.breathe()
        return await loading.groups(slices)

    async def _until_replicated(self, term: Term) -> None:
        look_s = LEAST_LOOK_S
        while not term.is_over:
            partition = self._replicas.partitions.get(term.topic_partition)
            if partition is not None and partition.high_watermark >= term.end_offset:
                return
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, MOST_LOOK_S)

    # -- writing --

    def write(self, term: Term, records: Sequence[Record], written: Written) -> None:
        """Append the records in one batch, within this term. `written` is always called, possibly at once, and possibly
        after the end of the term."""
        batch = encode_batch(
            [value for _, value in records],
            keys=[key for key, _ in records],
            base_timestamp=self._clock.wall_ms(),
        )

        def respond(status: ProduceStatus) -> None:
            code = ErrorCode(status.response.error_code)
            if code is _E.NONE:
                written(Outcome(code, status.response.base_offset))
                return
            logger.debug("%s: %s not written: %s", term.topic_partition, counted(len(records), "record"), code.name)
            self._unwritten.add((term.topic_partition, code))
            is_in_log = status.required_offset >= 0
            base_offset = status.required_offset - len(records) if is_in_log else -1
            written(Outcome(_AS_COORDINATOR.get(code, code), base_offset, is_in_doubt=code not in _NOT_APPENDED))

        self._replicas.appender.write(
            term.topic_partition,
            batch,
            leading_since_epoch=term.leading_since_epoch,
            timeout_ms=self._config.offsets_commit_timeout_ms,
            respond=respond,
        )

    def room(self, term: Term) -> int:
        """Return the maximum size of a batch that is written in this term."""
        partition = self._replicas.partitions.get(term.topic_partition)
        if partition is None:
            return 0
        config = partition.log.config
        return min(config.max_message_bytes, config.segment_bytes)

    def confirm(self, term: Term, confirmed: Callable[[ErrorCode], None]) -> None:
        """Call `confirmed` with NONE once it is certain that no other broker had coordinated the groups of this term
        before this call, or with an error if that cannot be established."""
        partition = self._replicas.partitions.get(term.topic_partition)
        if partition is not None and not term.is_over and partition.leads_alone:
            confirmed(_E.NONE)
            return
        term.unconfirmed.append(confirmed)
        if not term.is_confirming:
            self._confirm(term)

    def _confirm(self, term: Term) -> None:
        asked, term.unconfirmed = term.unconfirmed, []
        term.is_confirming = True

        def written(outcome: Outcome) -> None:
            term.is_confirming = False
            for confirmed in asked:
                confirmed(_E.NOT_COORDINATOR if term.is_over else outcome.code)
            if term.unconfirmed and not term.is_confirming:
                self._confirm(term)

        self.write(term, [(_NO_MEANING, None)], written)


class _Loading:
    """Collects records in log order. Only the last record of each key counts (KAFKA-5600), and only that one is
    decoded."""

    def __init__(self, leading_since_epoch: int, now_s: float) -> None:
        self._leading_since_epoch = leading_since_epoch
        self._now_s = now_s
        self._groups: dict[str, tuple[bytes, int, int]] = {}
        """The encoded group, its offset and its leader epoch, by group id."""
        self._offsets: dict[str, dict[TopicPartition, tuple[bytes, int]]] = {}

    def add(self, batch: DecodedBatch) -> None:
        if batch.keys is None:
            return
        for offset, key, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
            if key is not None:
                try:
                    self._add(key, value, offset, batch.header.partition_leader_epoch)
                except MalformedRecord as error:
                    _skip(offset, error)

    def _add(self, key_bytes: bytes, value: bytes | None, offset: int, epoch: int) -> None:
        key = decode_key(key_bytes)
        if isinstance(key, OffsetKey):
            offsets = self._offsets.setdefault(key.group_id, {})
            topic_partition = TopicPartition(key.topic, key.partition)
            if value is None:
                offsets.pop(topic_partition, None)
            else:
                offsets[topic_partition] = (value, offset)
        elif isinstance(key, GroupKey):
            if value is None:
                self._groups.pop(key.group_id, None)
            else:
                self._groups[key.group_id] = (value, offset, epoch)

    async def groups(self, slices: Slices) -> dict[str, Group]:
        groups: dict[str, Group] = {}
        for group_id, (group_value, log_offset, epoch) in self._groups.items():
            terms_since = max(1, self._leading_since_epoch - epoch)
            try:
                groups[group_id] = group_from(group_id, decode_group_value(group_value), self._now_s, terms_since)
            except MalformedRecord as error:
                _skip(log_offset, error)
            await slices.breathe()
        for group_id, offsets in self._offsets.items():
            for topic_partition, (value, log_offset) in offsets.items():
                try:
                    committed = decode_offset_value(value)
                except MalformedRecord as error:
                    _skip(log_offset, error)
                    continue
                group = groups.get(group_id)
                if group is None:
                    group = groups[group_id] = Group(group_id)
                group.offsets.load(topic_partition, committed, log_offset, self._now_s)
            await slices.breathe()
        return groups


def _skip(offset: int, error: MalformedRecord) -> None:
    # Other groups must still load. No broker of ours writes such a record.
    logger.error("the record at offset %d of %s is skipped: %s", offset, OFFSETS_TOPIC, error)


def _log_begun(begun: list[tuple[Term, int, float]]) -> None:
    groups = counted(sum(number for _, number, _ in begun), "group")
    partitions = named({term.topic_partition for term, _, _ in begun})
    logger.info("coordinates %s of %s, loaded within %.3f s", groups, partitions, max(took_s for _, _, took_s in begun))


def _log_ended(ended: list[Term]) -> None:
    groups = counted(sum(len(term.groups) for term in ended), "group")
    logger.info("no longer coordinates %s of %s", groups, named({term.topic_partition for term in ended}))


def _log_unwritten(unwritten: list[tuple[TopicPartition, ErrorCode]]) -> None:
    for code in dict.fromkeys(code for _, code in unwritten):
        failed = [topic_partition for topic_partition, each in unwritten if each is code]
        writes, of = counted(len(failed), "write"), named(set(failed))
        logger.warning(
            "within %g s %s of group state to %s failed: %s; clients retry", UNWRITTEN_S, writes, of, code.name
        )
