"""Requests that change a led log: appends of clients and of this broker, and DeleteRecords (Kafka's appendRecords)."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from minibroker.broker.replication.delayed import (
    DelayedDeleteRecords,
    DelayedProduce,
    DeletionStatus,
    ProduceStatus,
    Waits,
    refused_append,
)
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.replication.questions import WAIVED, Question, needs_question
from minibroker.broker.replication.refused_batches import RefusedBatches
from minibroker.broker.storage.log_config import LogConfig
from minibroker.broker.storage.producer_state import NO_OFFSET
from minibroker.broker.storage.validator import (
    Looked,
    check_acceptable,
    is_to_be_rewritten,
    look_needed,
    read_headers,
    takes_long,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Buffer, DeleteRecordsPartitionResult, ProducePartitionResponse
from minibroker.protocol.messages.transactions import ANY_START, TransactionMarker, TransactionTopic
from minibroker.protocol.model import INTERNAL_TOPICS, NO_EPOCH, TopicPartition
from minibroker.protocol.records import NO_DECISION, ControlType, CorruptRecord, EndTransactionMarker, parse_header
from minibroker.protocol.records.header import is_transactional
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.transactions")

_MOOT_INTERVAL_S = 1.0
"""Seconds between two checks whether the producer of a queued batch still waits for it."""


class ToAppend(NamedTuple):
    """The records that a producer sent for one partition."""

    topic_partition: TopicPartition
    topic_id: str
    """The id of the topic that the producer means; empty matches any topic of that name."""
    records: Buffer
    looked: Looked = Looked.NOT
    """How closely `Appender.check` has looked at the records."""
    rewritten_for: LogConfig | None = None
    """The log config for which the records were rewritten."""
    came_as_columns: bool = False
    """A minibroker producer sent columns for a log that takes none."""
    received_s: float | None = None
    """The monotonic time of receipt; None: now."""
    question: Question | None = None
    """The question that a transaction's coordinator has answered for these records."""


class MarkerListener(Protocol):
    """Hears of the ends of transactions in the logs that this broker leads. It must neither wait nor raise."""

    def marker_appended(
        self, topic_partition: TopicPartition, producer_id: int, marker: EndTransactionMarker, end_offset: int
    ) -> None:
        """The marker is in the log, which ends at `end_offset` now. Nothing has run since the append. The marker counts
        once the high watermark has reached `end_offset`, if this leadership lasts until then."""


class Appender:
    """Appends to and deletes from the logs that this broker leads. Each partition succeeds or fails by itself."""

    def __init__(self, world: World, partitions: Partitions, waits: Waits) -> None:
        self._clock = world.clock
        self._partitions = partitions
        self._waits = waits
        self._refused_batches = RefusedBatches()
        self._checks = world.new_executor("record checks")
        self._check_turns = asyncio.Lock()
        self.refusals: Counter[int] = Counter()
        """Producers' batches that were answered with an error, by its code."""
        self.marker_listeners: list[MarkerListener] = []
        """Called for each marker, in the turn of the event loop in which it is appended."""

    # -- before the append --

    def is_to_be_rewritten_for(self, entry: ToAppend) -> LogConfig | None:
        """Return the config of the partition's log if the log keeps records in another form than they have."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not partition.is_leader or partition.log.config == entry.rewritten_for:
            return None
        config = partition.log.config
        if not is_to_be_rewritten(entry.records, config) or partition.log.repeats(entry.records):
            return None
        return config

    def takes_long(self, entry: ToAppend) -> bool:
        """Whether `check` would look at the records in a worker thread."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not partition.is_leader:
            return False
        return takes_long(entry.records, partition.log.config, entry.looked) and not partition.log.repeats(
            entry.records
        )

    def question_for(self, entry: ToAppend) -> Question | None:
        """Return a question if the batch opens a transaction in a log that this broker leads. A transaction's
        coordinator must answer it before `produce`."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not partition.is_leader or not needs_question(partition.log, entry.records):
            return None
        return partition.questions.take(parse_header(entry.records).producer_id)

    def note_refused(self, entry: ToAppend, code: ErrorCode) -> None:
        """The records were refused before the append. Later ones of their producer must not come first."""
        self._refused_batches.note(entry.topic_partition, entry.records, code, self._clock.monotonic())

    async def check(self, entry: ToAppend, is_moot: Callable[[], bool] = lambda: False) -> Looked:
        """Look at records before they are appended, in a worker thread if that takes long. Return how closely they have
        been looked at.

        Raises BrokerError as the append would, and REQUEST_TIMED_OUT if the producer has gone before its turn comes
        (`is_moot`); otherwise the queue of retried batches might never end.

        A million records take seconds, and a few hundred MB: one batch is checked at a time."""
        partition = self._partitions.get(entry.topic_partition)
        if partition is None or not self.takes_long(entry):
            return entry.looked
        try:
            async with self._turn_to_check(is_moot):
                if is_moot():
                    raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, f"{entry.topic_partition}: its producer has gone")
                now_ms = self._clock.wall_ms()
                config = partition.log.config
                await self._checks.run(_check, entry.records, entry.topic_partition, config, now_ms)
                return look_needed(config)
        except BrokerError as error:
            # Moot batches too: the producer may have sent more on the same connection, which must not come first.
            self.note_refused(entry, error.code)
            raise

    @asynccontextmanager
    async def _turn_to_check(self, is_moot: Callable[[], bool]) -> AsyncIterator[None]:
        """Enter in turn, or soon after `is_moot`, so that a batch without a producer leaves memory before its turn."""
        turn = asyncio.ensure_future(self._check_turns.acquire())
        try:
            while not turn.done() and not is_moot():
                await asyncio.wait([turn], timeout=_MOOT_INTERVAL_S)
            yield
        finally:
            if not turn.cancel():
                self._check_turns.release()

    # -- appends --

    def append(self, entries: Iterable[ToAppend], acks: int) -> dict[TopicPartition, ProduceStatus]:
        """Append each entry as leader. Return what `await_replicas` waits for."""
        now_ms = self._clock.wall_ms()
        return {entry.topic_partition: self._append(entry, acks, now_ms) for entry in entries}

    def await_replicas(
        self,
        statuses: dict[TopicPartition, ProduceStatus],
        *,
        timeout_ms: int,
        respond: Callable[[dict[TopicPartition, ProduceStatus]], None],
    ) -> None:
        """Call `respond` once all entries are settled: at once unless acks is -1."""
        if not any(status.pending for status in statuses.values()):
            respond(statuses)
            return
        self._waits.produces.try_complete_else_watch(
            DelayedProduce(timeout_ms, statuses, self._partitions.get, respond, self._waits), statuses
        )

    def write(
        self,
        topic_partition: TopicPartition,
        records: Buffer,
        *,
        leading_since_epoch: int,
        timeout_ms: int,
        respond: Callable[[ProduceStatus], None],
    ) -> int:
        """Append records of this broker itself to an internal topic, with acks=all (Kafka's `appendRecords` with
        AppendOrigin.COORDINATOR). Return the offset after them, or -1 if they were not appended.

        The append succeeds only in the leadership that began with `leading_since_epoch`: a coordinator knows nothing of
        a later one. For transactional batches, the coordinator has asked the transaction's coordinator itself."""

        def find() -> Partition:
            partition = self._partitions.require(topic_partition)
            if partition.leading_since_epoch != leading_since_epoch:
                text = (
                    f"{topic_partition} is led since epoch {partition.leading_since_epoch}, not {leading_since_epoch}"
                )
                raise BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, text)
            return partition

        status = self._append_to(
            ToAppend(topic_partition, "", records, question=WAIVED), find, -1, self._clock.wall_ms()
        )
        if not status.pending:
            respond(status)
            return status.required_offset
        statuses = {topic_partition: status}
        operation = DelayedProduce(timeout_ms, statuses, self._partitions.get, lambda _: respond(status), self._waits)
        self._waits.produces.try_complete_else_watch(operation, statuses)
        return status.required_offset

    def write_markers(
        self,
        written: TransactionMarker,
        *,
        by_administrator: bool = False,
        timeout_ms: int,
        respond: Callable[[dict[TopicPartition, ProduceStatus]], None],
    ) -> None:
        """T10. End a producer's transaction in each of the partitions, with acks=all. Call `respond` once all are
        settled. `by_administrator`: the marker does not come from a coordinator. It may only end what is open, with the
        epochs that the log has; higher ones would fence the producer and its coordinator for good.

        An error leaves open whether the marker will survive. Writing it again is harmless."""
        statuses: dict[TopicPartition, ProduceStatus] = {}
        for topic in written.topics:
            for index in topic.partitions:
                topic_partition = TopicPartition(topic.name, index)
                statuses[topic_partition] = self._append_marker(topic_partition, written, by_administrator)
        self.await_replicas(statuses, timeout_ms=timeout_ms, respond=respond)

    def _append_marker(
        self, topic_partition: TopicPartition, written: TransactionMarker, by_administrator: bool
    ) -> ProduceStatus:
        marker = EndTransactionMarker(
            ControlType.COMMIT if written.committed else ControlType.ABORT,
            written.coordinator_epoch,
            NO_DECISION if written.raises_epoch else written.decision,
        )
        try:
            partition = self._partitions.require(topic_partition)
            if by_administrator:
                partition.log.check_epochs_of_open_transaction(
                    written.producer_id, written.producer_epoch, written.coordinator_epoch
                )
            is_late = partition.log.has_marker(written.producer_id, marker)
            if is_late or _has_ended(partition, written, by_administrator):
                partition.require_leader(NO_EPOCH)
                return ProduceStatus(
                    response=ProducePartitionResponse(topic_partition.partition, ErrorCode.NONE),
                    required_offset=partition.log.log_end_offset,
                    leading_since_epoch=partition.leading_since_epoch,
                    isr=partition.isr,
                    pending=True,
                )
            before = partition.high_watermark
            info = partition.append_marker(
                written.producer_id,
                written.producer_epoch,
                marker,
                raises_epoch=written.raises_epoch,
                now_ms=self._clock.wall_ms(),
            )
        except BrokerError as error:
            return ProduceStatus(response=refused_append(topic_partition.partition, error))
        for listener in self.marker_listeners:
            listener.marker_appended(topic_partition, written.producer_id, marker, info.next_offset)
        self._waits.readable(topic_partition)
        if partition.high_watermark != before:
            self._waits.produces.check_soon(topic_partition)
        return ProduceStatus(
            response=ProducePartitionResponse(topic_partition.partition, ErrorCode.NONE, info.first_offset),
            required_offset=info.next_offset,
            leading_since_epoch=partition.leading_since_epoch,
            isr=partition.isr,
            pending=True,
        )

    def _append(self, entry: ToAppend, acks: int, now_ms: int) -> ProduceStatus:
        def find() -> Partition:
            return self._require_for_clients(entry.topic_partition, entry.topic_id)

        return self._append_to(entry, find, acks, now_ms)

    def _append_to(self, entry: ToAppend, find: Callable[[], Partition], acks: int, now_ms: int) -> ProduceStatus:
        """A BrokerError that `find` raises becomes the answer."""
        topic_partition, topic_id, records, looked, _, came_as_columns, received_s, question = entry
        index = topic_partition.partition
        partition = None
        now_s = self._clock.monotonic()
        try:
            partition = find()
            before = partition.high_watermark
            if came_as_columns:
                partition.log.check_begins(records)
            self._refused_batches.check(
                topic_partition, records, partition.log, now_s if received_s is None else received_s
            )
            if is_transactional(records):
                self._abort_earlier_epoch(partition, records, question)
            info = partition.append(records, required_acks=acks, now_ms=now_ms, looked=looked, question=question)
        except BrokerError as error:
            self._refused_batches.note(topic_partition, records, error.code, now_s)
            response = refused_append(index, error)
            if partition is not None:  # Kafka's producers need it to go on after UNKNOWN_PRODUCER_ID
                response.log_start_offset = partition.log.log_start_offset
            known = self._partitions.known_leader(topic_partition, topic_id)
            if error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER and known is not None:
                response.current_leader_id = known.leader
                response.current_leader_epoch = known.leader_epoch
            return ProduceStatus(response=response)
        self._refused_batches.note(topic_partition, records, ErrorCode.NONE, now_s)
        self._waits.readable(topic_partition)
        if partition.high_watermark != before:
            self._waits.produces.check_soon(topic_partition)
        return ProduceStatus(
            response=ProducePartitionResponse(
                index,
                ErrorCode.NONE,
                base_offset=info.first_offset,
                log_append_time_ms=info.log_append_time_ms,
                log_start_offset=partition.log.log_start_offset,
            ),
            required_offset=info.last_offset + 1,
            leading_since_epoch=partition.leading_since_epoch,
            isr=partition.isr,
            pending=acks == -1,
        )

    def _abort_earlier_epoch(self, partition: Partition, records: Buffer, question: Question | None) -> None:
        """Abort a transaction that the producer has open here in an earlier epoch, before it begins its next one.

        A coordinator ends every transaction before it grants the next epoch, unless a power cut took its records. The
        producer has been told that such a transaction is aborted. Its records must not be committed with the next one.
        Raises BrokerError NOT_ENOUGH_REPLICAS once the marker is appended: the producer sends the batch again."""
        try:
            header = parse_header(records)
        except CorruptRecord:
            return  # the append reports it
        coordinator_epoch = partition.log.coordinator_epoch_of_earlier(header.producer_id, header.producer_epoch)
        if coordinator_epoch is None:
            return
        partition.questions.check(partition.log, records, question)
        topic, index = partition.topic_partition
        marker = TransactionMarker(
            header.producer_id, header.producer_epoch, False, coordinator_epoch, [TransactionTopic(topic, [index])]
        )
        status = self._append_marker(partition.topic_partition, marker, by_administrator=False)
        code = ErrorCode(status.response.error_code)
        text = f"a transaction of producer {header.producer_id} is open in an earlier epoch, and is aborted first"
        logger.warning("%s: %s", partition.topic_partition, text)
        raise BrokerError(code or ErrorCode.NOT_ENOUGH_REPLICAS, f"{text}: send the batch again")

    def _require_for_clients(self, topic_partition: TopicPartition, topic_id: str) -> Partition:
        """Return the partition for a client that changes its log. Raises BrokerError."""
        if topic_partition.topic in INTERNAL_TOPICS:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, "only brokers write to a topic of their own")
        partition = self._partitions.require(topic_partition)
        partition.check_topic_id(topic_id)
        return partition

    # -- deletions --

    def delete_records(self, topic_partition: TopicPartition, topic_id: str, offset: int) -> DeletionStatus:
        """Move the start of the log of the partition, of the topic with that id, to `offset`. Unless that fails, the
        deletion is pending: pass its status to `await_deletions`."""
        response = DeleteRecordsPartitionResult(topic_partition.partition, -1, ErrorCode.NONE)
        try:
            partition = self._require_for_clients(topic_partition, topic_id)
            required_offset = partition.delete_records(offset)
        except BrokerError as error:
            response.error_code, response.error_message = error.code, error.detail
            return DeletionStatus(response=response)
        return DeletionStatus(
            response=response,
            required_offset=required_offset,
            leading_since_epoch=partition.leading_since_epoch,
            pending=True,
        )

    def await_deletions(
        self,
        statuses: dict[TopicPartition, DeletionStatus],
        *,
        timeout_ms: int,
        respond: Callable[[dict[TopicPartition, DeletionStatus]], None],
    ) -> None:
        """Call `respond` once all are settled."""
        if not any(status.pending for status in statuses.values()):
            respond(statuses)
            return
        self._waits.deletions.try_complete_else_watch(
            DelayedDeleteRecords(timeout_ms, statuses, self._partitions.get, respond, self._waits.deletion_expired),
            statuses,
        )


def _has_ended(partition: Partition, written: TransactionMarker, by_administrator: bool) -> bool:
    """Whether the marker is for one certain transaction, or from an administrator for any, and it is not open here."""
    open_since = partition.log.open_since(written.producer_id)
    if by_administrator and open_since == NO_OFFSET:
        return True
    return written.start_offset != ANY_START and open_since != written.start_offset


def _check(records: Buffer, partition: TopicPartition, config: LogConfig, now_ms: int) -> None:
    """Check records in a worker thread. Raises BrokerError."""
    check_acceptable(records, read_headers(records, partition), partition, config, now_ms)
