"""The periods in which this broker coordinates groups or transactions, and its writes to their topic.

The problem. Groups and transactions live in memory but are defined by the log of an internal topic, which has several
replicas and changing leaders. Records that were read must not be lost to a later leader that lacks them. Only a broker
that has read all earlier records may write. A deposed coordinator that does not know it yet must not answer with
outdated state.

The choice. A *term* is one unbroken leadership of a partition by this broker, across any number of leader epochs.

- A term is loaded once, up to the log end at its beginning (requests are rejected while it loads, so nothing is
  appended). It counts as loaded only when the high watermark has reached that offset, because another leader could
  truncate the last records until then.
- Its writes are appended within this term or not at all. They take effect when they are replicated as with acks=all,
  even if the waiting client has already received an error: the next coordinator will read them in the log, and a member
  that was given a group's older state here would move the offset back later.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.coordinating.kept import FEW, MOST_KEPT_BYTES, KeptMemory
from minibroker.broker.metrics.log_lines import Gathered, named
from minibroker.broker.replication.delayed import ProduceStatus
from minibroker.broker.replication.manager import ReplicaManager
from minibroker.broker.replication.partition import Partition
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition, internal_partition
from minibroker.protocol.records import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    BatchHeader,
    CorruptRecord,
    DecodedBatch,
    EndTransactionMarker,
    decode_batch,
    decode_control_batch,
    encode_batch,
    iterate_batches,
)
from minibroker.protocol.words import counted
from minibroker.protocol.world import Clock

LOAD_BYTES = 256 * 1024
"""Bytes per read of the log."""
LEAST_LOOK_S = 0.005
MOST_LOOK_S = 0.25
"""The longest interval at which a load polls the high watermark. The interval grows while it waits."""
RETRY_S = 1.0
UNWRITTEN_S = 5.0
"""The interval at which failed writes are logged together. While replicas are missing, clients repeat them many times a
second."""

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
_NOT_APPENDED = frozenset(
    {_E.UNKNOWN_TOPIC_OR_PARTITION, _E.NOT_ENOUGH_REPLICAS, _E.MESSAGE_TOO_LARGE, _E.RECORD_LIST_TOO_LARGE}
)
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


class Term(ABC):
    """One unbroken leadership of a partition. A subclass has the groups or transactions that this broker coordinates
    through it."""

    def __init__(self, topic_partition: TopicPartition, epoch: int, leading_since_epoch: int, end_offset: int) -> None:
        self.topic_partition = topic_partition
        self.epoch = epoch
        """The current leader epoch."""
        self.leading_since_epoch = leading_since_epoch
        self.end_offset = end_offset
        """The log end offset when the term began."""
        self.is_loaded = False
        self.is_over = False
        self.is_confirming = False
        self.unconfirmed: list[Callable[[ErrorCode], None]] = []
        self._in_doubt: list[tuple[int, Callable[[], None]]] = []
        """A heap of failed writes that the log has: the end offset of each, and the callback for its replication."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of groups or transactional ids."""

    def await_replicas(self, end_offset: int, replicated: Callable[[], None]) -> None:
        """Call `replicated` once a write in doubt, which ends at this offset, is replicated, before any request reads
        this term. It is never called if the term ends first, because the next coordinator reads the outcome in the
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


TermT = TypeVar("TermT", bound=Term)


class Loading(ABC):
    """Collects the records of a term's partition in log order."""

    @abstractmethod
    def add(self, batch: DecodedBatch) -> None:
        """Collect the records of a batch. It may belong to a transaction."""

    @abstractmethod
    def add_control(self, header: BatchHeader, marker: EndTransactionMarker) -> None:
        """Apply the end of a transaction of the producer in `header`."""

    @abstractmethod
    async def finish(self, slices: Slices) -> None:
        """Fill the term, which no request sees before it is loaded."""


class TermListener(Generic[TermT]):
    """A component that works on the content of a term. The methods are called on the event loop and must return at
    once."""

    def loaded(self, term: TermT) -> None:
        """The term is loaded, and requests are accepted from now on."""

    def over(self, term: TermT) -> None:
        """This broker no longer coordinates the content of the term. The term may never have been loaded."""


class Terms(ABC, Generic[TermT]):
    """All terms of this broker in one topic (a LeadershipListener of the replica manager)."""

    topic: ClassVar[str]
    content: ClassVar[str]
    """The singular noun for the content of a term in log lines."""
    state: ClassVar[str]
    """The noun for the records of the topic in log lines."""
    meaningless_key: ClassVar[bytes]
    """A key that no group or transaction can have. A record with this key and without a value has no effect."""
    logger: ClassVar[logging.Logger]

    def __init__(
        self,
        clock: Clock,
        metadata: MetadataCache,
        replicas: ReplicaManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
        write_timeout_ms: int,
    ) -> None:
        self._clock = clock
        self._metadata = metadata
        self._replicas = replicas
        self._start_task = start_task
        self._write_timeout_ms = write_timeout_ms
        """Milliseconds after which a write that is not replicated is reported as failed."""
        self._terms: dict[int, TermT] = {}
        self._listeners: list[TermListener[TermT]] = []
        self._begun: Gathered[tuple[TermT, int, float]] = Gathered(self._log_begun)
        """Loaded terms to log, each with its size and its load time."""
        self._ended: Gathered[TermT] = Gathered(self._log_ended)
        self._unwritten: Gathered[tuple[TopicPartition, ErrorCode]] = Gathered(self._log_unwritten, UNWRITTEN_S)
        self.kept: KeptMemory = KeptMemory(MOST_KEPT_BYTES, self.content, self.sizes, clock, start_task)
        """The memory of the content of all terms."""
        self.loads = 0
        """Terms loaded so far."""
        self.load_s = 0.0
        """Seconds spent on loading them, in total."""

    @abstractmethod
    def new_term(self, index: int, epoch: int, leading_since_epoch: int, end_offset: int) -> TermT:
        """Return an empty term for the partition of this index."""

    @abstractmethod
    def new_loading(self, term: TermT) -> Loading:
        """Return the object that fills the term from the log."""

    @abstractmethod
    def sizes(self) -> Iterator[int]:
        """Yield the memory of each group or transactional id, about. The content may change meanwhile."""

    def close(self) -> None:
        self._ended.close()
        self._begun.close()
        self._unwritten.close()

    def add_listener(self, listener: TermListener[TermT]) -> None:
        self._listeners.append(listener)

    # -- look-ups --

    def loaded(self) -> list[TermT]:
        return [self._up_to_date(term) for term in self._terms.values() if term.is_loaded]

    def _up_to_date(self, term: TermT) -> TermT:
        term.look_at_what_is_in_doubt(self._replicas.partitions.get(term.topic_partition))
        return term

    @property
    def is_loading(self) -> bool:
        return any(not term.is_loaded for term in self._terms.values())

    def of_key(self, key: str) -> TermT | ErrorCode:
        """Return the loaded term of the partition to which the key belongs, or the error why there is none."""
        partitions = self._metadata.partition_count(self.topic)
        term = self._terms.get(internal_partition(key, partitions)) if partitions else None
        if term is None:
            return _E.NOT_COORDINATOR
        return self._up_to_date(term) if term.is_loaded else _E.COORDINATOR_LOAD_IN_PROGRESS

    # -- LeadershipListener --

    def on_leader(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic != self.topic:
            return
        partition = self._replicas.partitions.get(topic_partition)
        assert partition is not None
        term = self._terms.get(topic_partition.partition)
        if term is not None and term.leading_since_epoch == partition.leading_since_epoch:
            term.epoch = epoch
            return
        self._end(topic_partition.partition)
        term = self.new_term(
            topic_partition.partition, epoch, partition.leading_since_epoch, partition.log.log_end_offset
        )
        self._terms[topic_partition.partition] = term
        self._start_task(self._load(term), f"load of the {self.content}s of {topic_partition}")

    def on_follower(self, topic_partition: TopicPartition, epoch: int) -> None:
        if topic_partition.topic == self.topic:
            self._end(topic_partition.partition)

    def _end(self, index: int) -> None:
        term = self._terms.pop(index, None)
        if term is None:
            return
        term.is_over = True
        for listener in self._listeners:
            listener.over(term)
        if not term.is_loaded:
            return
        self.logger.debug("%s: no longer coordinates its %s", term.topic_partition, counted(term.size, self.content))
        if term.size:
            self._ended.add(term)

    # -- reading --

    async def _load(self, term: TermT) -> None:
        """Load the term. A failed read is retried until the term ends with the replica."""
        began_s = self._clock.monotonic()
        while not term.is_over:
            try:
                await self._read(term)
                break
            except BrokerError as error:
                self.logger.error(
                    "%s cannot be read, so its %ss are not available yet: %s", term.topic_partition, self.content, error
                )
                await asyncio.sleep(RETRY_S)
        await self._until_replicated(term)
        if term.is_over:  # another term may have begun on the same partition (KAFKA-2841)
            return
        term.is_loaded = True
        took_s = self._clock.monotonic() - began_s
        self.loads += 1
        self.load_s += took_s
        coordinated = counted(term.size, self.content)
        self.logger.debug(
            "%s: coordinates %s in epoch %d, after %.3f s", term.topic_partition, coordinated, term.epoch, took_s
        )
        if term.size:
            self._begun.add((term, term.size, took_s))
        if term.size > FEW:
            self.kept.count_soon()
        for listener in self._listeners:
            listener.loaded(term)

    async def _read(self, term: TermT) -> None:
        """Fill the term from the log. Raises BrokerError."""
        loading = self.new_loading(term)
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
                if header.is_control:
                    try:
                        loading.add_control(header, decode_control_batch(data, header, piece.start))
                    except CorruptRecord as error:  # no broker of ours writes such a marker
                        self.skip(header.base_offset, error)
                else:
                    loading.add(decode_batch(data, header, piece.start, check_crc=False))
                offset = header.next_offset
                await slices.breathe()
        await loading.finish(slices)

    def skip(self, offset: int, error: Exception) -> None:
        """Log that a malformed record is skipped, so that the others still load."""
        self.logger.error("the record at offset %d of %s is skipped: %s", offset, self.topic, error)

    async def _until_replicated(self, term: TermT) -> None:
        look_s = LEAST_LOOK_S
        while not term.is_over:
            partition = self._replicas.partitions.get(term.topic_partition)
            if partition is not None and partition.high_watermark >= term.end_offset:
                return
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, MOST_LOOK_S)

    # -- writing --

    def write(
        self,
        term: TermT,
        records: Sequence[Record],
        written: Written,
        *,
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_PRODUCER_EPOCH,
        is_transactional: bool = False,
        timeout_ms: int | None = None,
    ) -> int:
        """Append the records in one batch, within this term. `written` is always called, possibly at once, and possibly
        after the end of the term. Return the offset of the first record, or -1 if nothing was appended.

        A transactional batch belongs to the transaction of the producer. `timeout_ms` replaces the usual time after
        which a write that is not replicated is reported as failed."""
        batch = encode_batch(
            [value for _, value in records],
            keys=[key for key, _ in records],
            base_timestamp=self._clock.wall_ms(),
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transactional=is_transactional,
        )

        def respond(status: ProduceStatus) -> None:
            code = ErrorCode(status.response.error_code)
            if code is _E.NONE:
                written(Outcome(code, status.response.base_offset))
                return
            self.logger.debug(
                "%s: %s not written: %s", term.topic_partition, counted(len(records), "record"), code.name
            )
            self._unwritten.add((term.topic_partition, code))
            is_in_log = status.required_offset >= 0
            base_offset = status.required_offset - len(records) if is_in_log else -1
            written(Outcome(_AS_COORDINATOR.get(code, code), base_offset, is_in_doubt=code not in _NOT_APPENDED))

        end_offset = self._replicas.appender.write(
            term.topic_partition,
            batch,
            leading_since_epoch=term.leading_since_epoch,
            timeout_ms=self._write_timeout_ms if timeout_ms is None else timeout_ms,
            respond=respond,
        )
        return end_offset - len(records) if end_offset >= 0 else -1

    def room(self, term: TermT) -> int:
        """Return the maximum size of a batch that is written in this term."""
        partition = self._replicas.partitions.get(term.topic_partition)
        if partition is None:
            return 0
        config = partition.log.config
        return min(config.max_message_bytes, config.segment_bytes)

    def confirm(self, term: TermT, confirmed: Callable[[ErrorCode], None]) -> None:
        """Call `confirmed` with NONE once it is certain that no other broker had coordinated the content of this
        term before this call, or with an error if that cannot be established."""
        partition = self._replicas.partitions.get(term.topic_partition)
        if partition is not None and not term.is_over and partition.leads_alone:
            confirmed(_E.NONE)
            return
        term.unconfirmed.append(confirmed)
        if not term.is_confirming:
            self._confirm(term)

    def _confirm(self, term: TermT) -> None:
        asked, term.unconfirmed = term.unconfirmed, []
        term.is_confirming = True

        def written(outcome: Outcome) -> None:
            term.is_confirming = False
            for confirmed in asked:
                confirmed(_E.NOT_COORDINATOR if term.is_over else outcome.code)
            if term.unconfirmed and not term.is_confirming:
                self._confirm(term)

        self.write(term, [(self.meaningless_key, None)], written)

    # -- log lines --

    def _log_begun(self, begun: list[tuple[TermT, int, float]]) -> None:
        coordinated = counted(sum(size for _, size, _ in begun), self.content)
        partitions = named({term.topic_partition for term, _, _ in begun})
        longest_s = max(took_s for _, _, took_s in begun)
        self.logger.info("coordinates %s of %s, loaded within %.3f s", coordinated, partitions, longest_s)

    def _log_ended(self, ended: list[TermT]) -> None:
        lost = counted(sum(term.size for term in ended), self.content)
        self.logger.info("no longer coordinates %s of %s", lost, named({term.topic_partition for term in ended}))

    def _log_unwritten(self, unwritten: list[tuple[TopicPartition, ErrorCode]]) -> None:
        for code in dict.fromkeys(code for _, code in unwritten):
            failed = [topic_partition for topic_partition, each in unwritten if each is code]
            writes, of = counted(len(failed), "write"), named(set(failed))
            self.logger.warning(
                "within %g s %s of %s to %s failed: %s; clients retry", UNWRITTEN_S, writes, self.state, of, code.name
            )
