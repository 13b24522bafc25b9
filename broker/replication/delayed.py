"""The two waits of the data path: a produce with acks=all for its replicas, a fetch for something to read."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from minibroker.broker.purgatory.purgatory import DelayedOperation
from minibroker.broker.replication.partition import Partition
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import FetchPartition, ProducePartitionResponse
from minibroker.protocol.model import TopicPartition

FindPartition = Callable[[TopicPartition], Partition | None]
"""The replica of this broker, None where it has none."""


class ProduceStatus(msgspec.Struct):
    """What is known of one partition of a produce request. The response is filled in as soon as it is settled."""

    response: ProducePartitionResponse
    required_offset: int = -1
    leading_since_epoch: int = -1
    pending: bool = False


class DelayedProduce(DelayedOperation):  # P5
    """Completes when every partition has one of three endings: an error, the leader moved, or all in-sync replicas have
    what was appended (Kafka's DelayedProduce). What is still pending at the deadline is answered with
    REQUEST_TIMED_OUT, which leaves open whether the records will survive."""

    def __init__(
        self,
        timeout_ms: int,
        statuses: dict[TopicPartition, ProduceStatus],
        find: FindPartition,
        respond: Callable[[dict[TopicPartition, ProduceStatus]], None],
        on_expired: Callable[[], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._statuses = statuses
        self._find = find
        self._on_expired = on_expired
        self._respond: Callable[[dict[TopicPartition, ProduceStatus]], None] | None = respond

    def try_complete(self) -> bool:
        open_partitions = False
        for topic_partition, status in self._statuses.items():
            if not status.pending:
                continue
            partition = self._find(topic_partition)
            if partition is None:
                code: ErrorCode | None = ErrorCode.NOT_LEADER_OR_FOLLOWER
            else:
                code = partition.acknowledgement(status.required_offset, status.leading_since_epoch)
            if code is None:
                open_partitions = True
                continue
            status.pending = False
            if code is not ErrorCode.NONE:
                status.response.error_code = code
                status.response.base_offset = -1
                if partition is not None:
                    status.response.current_leader_id = partition.leader_id
                    status.response.current_leader_epoch = partition.leader_epoch
        return False if open_partitions else self.force_complete()

    def on_complete(self) -> None:
        for status in self._statuses.values():
            if status.pending:
                status.pending = False
                status.response.error_code = ErrorCode.REQUEST_TIMED_OUT
                status.response.base_offset = -1
        # This stays watched for a while, under keys that may never be checked, and the callback holds the request.
        respond, self._respond = self._respond, None
        assert respond is not None
        respond(self._statuses)

    def on_expiration(self) -> None:
        self._on_expired()


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
    can be."""

    def __init__(
        self,
        timeout_ms: int,
        min_bytes: int,
        replica_id: int,
        admitted: list[AdmittedFetch],
        find: FindPartition,
        answer: Callable[[], None],
        on_expired: Callable[[], None],
    ) -> None:
        """`answer` reads and responds."""
        super().__init__(timeout_ms)
        self._min_bytes = min_bytes
        self._replica_id = replica_id
        self._admitted = admitted
        self._find = find
        self._answer = answer
        self._on_expired = on_expired

    def try_complete(self) -> bool:
        available = 0
        for admitted in self._admitted:
            if not admitted.holds(self._find):
                return self.force_complete()
            partition, fetch = admitted.partition, admitted.fetch
            end = partition.readable_end(self._replica_id)
            if fetch.fetch_offset < end and not partition.withholds_from(self._replica_id):
                if self._min_bytes <= 1:
                    return self.force_complete()
                try:
                    readable = partition.log.bytes_between(fetch.fetch_offset, end)
                except BrokerError:
                    return self.force_complete()
                available += min(readable, fetch.partition_max_bytes)
        return self.force_complete() if available >= self._min_bytes else False

    def on_complete(self) -> None:
        self._answer()

    def on_expiration(self) -> None:
        self._on_expired()
