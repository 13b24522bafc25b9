"""The waits of the data path: a produce with acks=all and a deletion for replicas, a fetch for something to read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.upkeep.slow_commits import SlowCommits
from minibroker.broker.scheduling.purgatory import DelayedOperation, Purgatory, SlicedPurgatory, Timer
from minibroker.broker.storage.validator import RefusedRecords
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import DeleteRecordsPartitionResult, FetchPartition, ProducePartitionResponse
from minibroker.protocol.model import TopicPartition

FindPartition = Callable[[TopicPartition], Partition | None]
"""The replica of this broker, None where it has none."""


class _Status(msgspec.Struct, kw_only=True):
    """The state of one partition of a request."""

    required_offset: int = -1
    leading_since_epoch: int = -1
    pending: bool = False


class ProduceStatus(_Status):
    """The response is filled in as soon as it is settled."""

    response: ProducePartitionResponse
    isr: tuple[int, ...] = ()
    """The ISR at the append."""


def refused_append(index: int, error: BrokerError) -> ProducePartitionResponse:
    record_errors = error.record_errors if isinstance(error, RefusedRecords) else []
    return ProducePartitionResponse(index, error.code, error_message=error.detail, record_errors=record_errors)


class DeletionStatus(_Status):
    """As `ProduceStatus`, for a deletion."""

    response: DeleteRecordsPartitionResult


Status = TypeVar("Status", bound=_Status)


class _UntilSettled(DelayedOperation, Generic[Status]):
    """Completes when every partition has one of three endings: an error, the leader moved, or the condition is met.
    Partitions still pending at the deadline end with REQUEST_TIMED_OUT."""

    def __init__(
        self,
        timeout_ms: int,
        statuses: dict[TopicPartition, Status],
        find: FindPartition,
        respond: Callable[[dict[TopicPartition, Status]], None],
        on_expired: Callable[[], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._statuses = statuses
        self._find = find
        self._on_expired = on_expired
        self._respond: Callable[[dict[TopicPartition, Status]], None] | None = respond

    @abstractmethod
    def _look(self, partition: Partition, status: Status) -> ErrorCode | None:
        """Return the ending, None while it is open."""

    @abstractmethod
    def _settle(self, status: Status, code: ErrorCode, partition: Partition | None) -> None:
        """Fill in the response."""

    def try_complete(self) -> bool:
        open_partitions = False
        for topic_partition, status in self._statuses.items():
            if not status.pending:
                continue
            partition = self._find(topic_partition)
            if partition is None:
                code: ErrorCode | None = ErrorCode.NOT_LEADER_OR_FOLLOWER
            else:
                code = self._look(partition, status)
            if code is None:
                open_partitions = True
                continue
            status.pending = False
            self._settle(status, code, partition)
        return False if open_partitions else self.force_complete()

    def on_complete(self) -> None:
        for topic_partition, status in self._statuses.items():
            if status.pending:
                status.pending = False
                self._settle(status, ErrorCode.REQUEST_TIMED_OUT, self._find(topic_partition))
        # This stays watched for a while, under keys that may never be checked, and the callback holds the request.
        respond, self._respond = self._respond, None
        assert respond is not None
        respond(self._statuses)

    def on_expiration(self) -> None:
        self._on_expired()


class DelayedProduce(_UntilSettled[ProduceStatus]):  # P5
    """Waits until all in-sync replicas have what was appended (Kafka's DelayedProduce). REQUEST_TIMED_OUT leaves open
    whether the records will survive."""

    def __init__(
        self,
        timeout_ms: int,
        statuses: dict[TopicPartition, ProduceStatus],
        find: FindPartition,
        respond: Callable[[dict[TopicPartition, ProduceStatus]], None],
        waits: Waits,
    ) -> None:
        super().__init__(timeout_ms, statuses, find, respond, waits.produce_expired)
        self._slow_commits = waits.slow_commits
        self._began_s = waits.slow_commits.on_time_s()

    def _look(self, partition: Partition, status: ProduceStatus) -> ErrorCode | None:
        return partition.acknowledgement(status.required_offset, status.leading_since_epoch)

    def _settle(self, status: ProduceStatus, code: ErrorCode, partition: Partition | None) -> None:
        if code is ErrorCode.NONE:
            if partition is not None:
                self._slow_commits.committed(partition, status.isr, self._began_s)
            return
        status.response.error_code = code
        status.response.base_offset = -1
        if partition is not None and code is not ErrorCode.REQUEST_TIMED_OUT:
            status.response.current_leader_id = partition.leader_id
            status.response.current_leader_epoch = partition.leader_epoch


class DelayedDeleteRecords(_UntilSettled[DeletionStatus]):
    """Waits until no electable replica has the deleted records, or would have them after a crash (Kafka's
    DelayedDeleteRecords). After an error the other replicas may or may not delete them: they are gone from the leader
    that was asked."""

    def _look(self, partition: Partition, status: DeletionStatus) -> ErrorCode | None:
        return partition.deletion(status.required_offset, status.leading_since_epoch)

    def _settle(self, status: DeletionStatus, code: ErrorCode, partition: Partition | None) -> None:
        status.response.error_code = code
        if partition is None:
            return
        if code is ErrorCode.NONE:
            status.response.low_watermark = partition.low_watermark
        elif code is ErrorCode.REQUEST_TIMED_OUT:
            status.response.error_message = (
                f"records of {partition.topic_partition} below {status.required_offset} are not deleted yet on all "
                f"replicas that may lead it"
            )


class AdmittedFetch(NamedTuple):
    """One partition of a fetch, which may be served for as long as the leadership lasts that admitted it."""

    topic_partition: TopicPartition
    fetch: FetchPartition
    partition: Partition
    leader_epoch: int

    def holds(self, find: FindPartition) -> bool:
        return find(self.topic_partition) is self.partition and self.partition.leads_in(self.leader_epoch)


class DelayedFetch(DelayedOperation):
    """Completes when the partitions together have `min_bytes` to read, or the leadership of one of them is no longer
    the one that admitted it (Kafka's DelayedFetch). Records are read when it completes, so the answer is as fresh as
    can be.

    A follower's fetch waits on for the other partitions: the follower gets the controller's order as well and then asks
    anew, without waiting for this answer. When a broker dies nearly every partition changes its leader epoch, a hundred
    with each order; if each order ended all requests that name one of its partitions, most of the failover's time would
    go into asking again for unchanged partitions.

    A follower of thousands of partitions waits for hundreds with each request, and most checks are of a few of them:
    only those are looked at. Where `min_bytes` is more than 1 all count together, and a rate that is used up becomes
    free without a check: then all are looked at.
    """

    def __init__(
        self,
        timeout_ms: int,
        min_bytes: int,
        replica_id: int,
        isolation: FetchIsolation,
        admitted: list[AdmittedFetch],
        find: FindPartition,
        answer: Callable[[], None],
        on_expired: Callable[[], None],
    ) -> None:
        """`answer` reads and responds."""
        super().__init__(timeout_ms)
        self._min_bytes = min_bytes
        self._replica_id = replica_id
        self._isolation = isolation
        self._admitted = admitted
        self._of_partition: dict[Hashable, list[AdmittedFetch]] = {}
        """A request may name a partition twice. Made when it is needed: most requests are answered before that."""
        self._last_held: AdmittedFetch | None = None
        self._is_any_withheld = False
        self._find = find
        self._answer: Callable[[], None] | None = answer
        self._on_expired = on_expired
        self.ended: Callable[[], None] | None = None
        """Called when it waits no more, before the answer if there is one."""

    def try_complete_after(self, checked: Collection[Hashable]) -> bool:
        if self._min_bytes > 1 or self._is_any_withheld:
            return self.try_complete()
        if not self._of_partition:
            for admitted in self._admitted:
                self._of_partition.setdefault(admitted.topic_partition, []).append(admitted)
        is_any_lost = False
        for key in checked:
            for admitted in self._of_partition[key]:
                if not admitted.holds(self._find):
                    is_any_lost = True
                elif self._is_readable(admitted):
                    return self.force_complete()
        if is_any_lost and (self._replica_id == CONSUMER or not self._is_any_held()):
            return self.force_complete()
        return False

    def _is_readable(self, admitted: AdmittedFetch) -> bool:
        partition = admitted.partition
        if admitted.fetch.fetch_offset >= partition.end_for(self._isolation):
            return False
        if partition.withholds_from(self._replica_id):
            self._is_any_withheld = True
            return False
        return True

    def _is_any_held(self) -> bool:
        """The controller's orders come in the partitions' order: the last one is held for longest."""
        if self._last_held is None or not self._last_held.holds(self._find):
            self._last_held = next((a for a in reversed(self._admitted) if a.holds(self._find)), None)
        return self._last_held is not None

    def try_complete(self) -> bool:
        available = 0
        is_any_held = False
        for admitted in self._admitted:
            if not admitted.holds(self._find):
                if self._replica_id == CONSUMER:
                    return self.force_complete()
                continue
            is_any_held = True
            if self._is_readable(admitted):
                if self._min_bytes <= 1:
                    return self.force_complete()
                partition, fetch = admitted.partition, admitted.fetch
                end = partition.end_for(self._isolation)
                try:
                    readable = partition.log.bytes_between(fetch.fetch_offset, end)
                except BrokerError:
                    return self.force_complete()
                available += min(readable, fetch.partition_max_bytes)
        return self.force_complete() if available >= self._min_bytes or not is_any_held else False

    def on_complete(self) -> None:
        answer = self._answer
        self.on_abandoned()
        assert answer is not None
        answer()

    def on_abandoned(self) -> None:
        # This stays watched for a while, a thousand of its kind do, and each may hold hundreds of partitions.
        self._answer = None
        self._admitted, self._of_partition, self._last_held = [], {}, None
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()

    def on_expiration(self) -> None:
        self._on_expired()


class Waits:
    """The purgatories of the data path, and the events that make their operations look again: once per turn of the
    loop, however many events there were."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._timer = Timer()
        self.slow_commits = SlowCommits(monotonic)
        self.produces: Purgatory[DelayedProduce] = Purgatory("Produce", self._timer)
        self.follower_fetches: Purgatory[DelayedFetch] = Purgatory("Fetch", self._timer)
        """Checked at once: producers wait for them."""
        self.fetches: Purgatory[DelayedFetch] = SlicedPurgatory("Fetch", self._timer)
        """Of consumers."""
        self.deletions: Purgatory[DelayedDeleteRecords] = Purgatory("DeleteRecords", self._timer)
        self.expired_produces = 0
        self.expired_fetches = 0
        self.expired_deletions = 0

    @property
    def purgatories(self) -> list[Purgatory[Any]]:
        return [self.produces, self.follower_fetches, self.fetches, self.deletions]

    def readable(self, topic_partition: TopicPartition) -> None:
        """The partition may have more to read."""
        self.follower_fetches.check_soon(topic_partition)
        self.fetches.check_soon(topic_partition)

    def high_watermark_moved(self, partition: Partition) -> None:
        self.produces.check_soon(partition.topic_partition)
        self.readable(partition.topic_partition)

    def isr_changed(self, partition: Partition) -> None:
        self.produces.check_soon(partition.topic_partition)  # an ISR that is too small now settles them as well
        self.deletions.check_soon(partition.topic_partition)

    def role_changed(self, topic_partition: TopicPartition) -> None:
        """The partition's role, or another condition of all its waits, may have changed."""
        for purgatory in self.purgatories:
            purgatory.check_soon(topic_partition)

    def produce_expired(self) -> None:
        self.expired_produces += 1

    def fetch_expired(self) -> None:
        self.expired_fetches += 1

    def deletion_expired(self) -> None:
        self.expired_deletions += 1

    def close(self) -> None:
        for purgatory in self.purgatories:
            purgatory.close()
        self._timer.close()
