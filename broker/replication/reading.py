"""Reads from the logs that this broker leads: fetches of consumers and followers, and ListOffsets (Kafka's
fetchMessages and fetchOffset)."""

from collections.abc import Callable, Sequence

import msgspec

from minibroker.broker.replication.delayed import AdmittedFetch, DelayedFetch, Waits
from minibroker.broker.replication.following.silences import Silences
from minibroker.broker.replication.isolation import CONSUMER, FetchIsolation
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.storage import search
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.broker.storage.producer_state import encode_snapshot
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    EARLIEST_LOCAL_TIMESTAMP,
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import READ_UNCOMMITTED

_MOST_PRODUCER_BYTES = 256 * 1024
"""After this many bytes no further partition of an answer gets the state of its producers: about 15 ms of the loop's
time for the last one."""

RefusedFetch = tuple[TopicPartition, FetchPartitionResponse]
"""One partition of a fetch that cannot be served, and its answer."""
FetchAnswer = list[tuple[TopicPartition, FetchPartitionResponse]]


def _at_once(call: Callable[[], None]) -> None:
    call()


class Reader:
    """Serves fetches. Each partition succeeds or fails by itself."""

    def __init__(
        self,
        partitions: Partitions,
        logs: LogDirs,
        waits: Waits,
        isr_writer: IsrWriter,
        silences: Silences,
        fetch_max_bytes: int,
    ) -> None:
        self._partitions = partitions
        self._logs = logs
        self._waits = waits
        self._isr_writer = isr_writer
        self._silences = silences
        self._fetch_max_bytes = fetch_max_bytes

    def fetch(
        self,
        request: FetchRequest,
        respond: Callable[[FetchAnswer], None],
        in_turn: Callable[[Callable[[], None]], None] = _at_once,
    ) -> DelayedFetch | None:
        """Read for a consumer or a follower. Call `respond` at once with the records that are there, or once
        `min_bytes` can be read, or after `max_wait_ms`. Return the operation if it waits. A fetch that has
        waited reads in turn. A follower's offsets move the
        high watermark first.

        For each partition, in this order: the fetch is admitted, the follower's progress recorded, the records read.
        When a fetch that waited completes, its records are read again. Raises BrokerError INVALID_REQUEST for an
        unknown isolation level."""
        isolation = FetchIsolation.of(request.replica_id, request.isolation_level)
        admissions = [
            self._admit(TopicPartition(topic.topic, fetch.partition), fetch, topic.topic_id, request.replica_id)
            for topic in request.topics
            for fetch in topic.partitions
        ]
        admitted = [admission for admission in admissions if isinstance(admission, AdmittedFetch)]
        if request.replica_id != CONSUMER:  # P6
            self._silences.heard(request.replica_id, request.max_wait_ms)
            for part in admitted:
                self._record_progress(part, request.replica_id, request.replica_epoch)
        answer = self._read(admissions, request, isolation)
        min_bytes = min(request.min_bytes, self.max_bytes(request))  # as in Kafka: more can never be answered
        size = sum(len(response.records) for _, response in answer)
        settled = any(r.error_code != 0 or r.diverging_epoch is not None for _, r in answer)
        if settled or size >= min_bytes or request.max_wait_ms <= 0 or not admissions:
            self._deliver(answer, request, respond)
            return None

        def read_and_deliver() -> None:
            present = [self._admit_after_waiting(part, request.replica_id) for part in admitted]
            self._deliver(self._read(present, request, isolation), request, respond)

        operation = DelayedFetch(
            request.max_wait_ms,
            min_bytes,
            request.replica_id,
            isolation,
            admitted,
            self._partitions.get,
            lambda: in_turn(read_and_deliver),
            self._waits.fetch_expired,
        )
        keys = [part.topic_partition for part in admitted]
        waiting = self._waits.fetches if request.replica_id == CONSUMER else self._waits.follower_fetches
        if min_bytes <= 1 and not any(part.partition.leader_quota for part in admitted):
            waiting.watch(operation, keys)  # the read above has just found nothing
        elif waiting.try_complete_else_watch(operation, keys):
            return None
        return operation

    def max_bytes(self, request: FetchRequest) -> int:
        return min(request.max_bytes, self._fetch_max_bytes)

    def _admit(
        self, topic_partition: TopicPartition, fetch: FetchPartition, topic_id: str, replica_id: int
    ) -> AdmittedFetch | RefusedFetch:
        try:
            partition = self._partitions.require(topic_partition)
            partition.check_topic_id(topic_id)
        except BrokerError as error:
            return topic_partition, self._refusal(topic_partition, topic_id, error.code)
        return _admit_to(partition, fetch, replica_id)

    def refusal(self, topic_partition: TopicPartition, topic_id: str) -> FetchPartitionResponse | None:
        """Return the answer for a partition of which this broker has no replica, or None if it has one."""
        try:
            self._partitions.require(topic_partition)
        except BrokerError as error:
            return self._refusal(topic_partition, topic_id, error.code)
        return None

    def _refusal(self, topic_partition: TopicPartition, topic_id: str, code: ErrorCode) -> FetchPartitionResponse:
        known = self._partitions.known_leader(topic_partition, topic_id)
        return FetchPartitionResponse(
            topic_partition.partition,
            code,
            current_leader_id=known.leader if known else -1,
            current_leader_epoch=known.leader_epoch if known else -1,
        )

    def _admit_after_waiting(self, admitted: AdmittedFetch, replica_id: int) -> AdmittedFetch | RefusedFetch:
        """Admit the fetch again only if the leadership has changed."""
        if admitted.holds(self._partitions.get):
            return admitted
        topic_partition = admitted.topic_partition
        if self._partitions.get(topic_partition) is not admitted.partition:
            offline = self._logs.is_offline(topic_partition)
            code = ErrorCode.KAFKA_STORAGE_ERROR if offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return topic_partition, FetchPartitionResponse(topic_partition.partition, code)
        return _admit_to(admitted.partition, admitted.fetch, replica_id)

    def _record_progress(self, admitted: AdmittedFetch, replica_id: int, broker_epoch: int) -> None:
        """The follower has everything before the offset that it fetches from."""
        partition = admitted.partition
        if partition.record_follower_fetch(replica_id, admitted.fetch, broker_epoch):
            self._waits.high_watermark_moved(partition)
        self._waits.deletions.check_soon(partition.topic_partition)
        if partition.eligible or replica_id not in partition.isr:
            self._isr_writer.propose(partition)

    def _read(
        self, admissions: Sequence[AdmittedFetch | RefusedFetch], request: FetchRequest, isolation: FetchIsolation
    ) -> FetchAnswer:
        """Read whole batches, `max_bytes` in all. The first partition that has a batch is served even if the batch is
        larger."""
        left = self.max_bytes(request)
        answer: FetchAnswer = []
        nothing_yet = True
        producer_bytes = 0
        for admission in admissions:
            if not isinstance(admission, AdmittedFetch):
                topic_partition, refused = admission
                if request.replica_id != CONSUMER and refused.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    refused = self._with_producers(topic_partition, refused, producer_bytes)
                    producer_bytes += len(refused.producers)
                answer.append((topic_partition, refused))
                continue
            topic_partition, fetch, partition, _ = admission
            response = partition.read(fetch, request.replica_id, isolation, max_bytes=left, at_least_one=nothing_yet)
            size = len(response.records)
            left = max(0, left - size)
            nothing_yet = nothing_yet and not size
            answer.append((topic_partition, response))
        return answer

    def _with_producers(
        self, topic_partition: TopicPartition, refused: FetchPartitionResponse, producer_bytes: int
    ) -> FetchPartitionResponse:
        """Add the state of the partition's producers, unless the answer already has `producer_bytes` of them: gathering
        them takes the loop's time. The follower then asks again for the rest."""
        partition = self._partitions.get(topic_partition)
        if partition is None or producer_bytes > _MOST_PRODUCER_BYTES:
            return FetchPartitionResponse(topic_partition.partition, ErrorCode.OFFSET_NOT_AVAILABLE)
        tell_producers(partition, refused)
        return refused

    def _deliver(self, answer: FetchAnswer, request: FetchRequest, respond: Callable[[FetchAnswer], None]) -> None:
        for topic_partition, response in answer:
            partition = self._partitions.get(topic_partition) if response.records else None
            if partition is None:
                continue
            if request.replica_id == CONSUMER:
                partition.traffic.bytes_out += len(response.records)
            else:
                partition.traffic.replication_bytes_out += len(response.records)
                quota = partition.quota_for(request.replica_id)
                if quota is not None:
                    quota.record(len(response.records))
        respond(answer)


def tell_producers(partition: Partition, refusal: FetchPartitionResponse) -> None:
    """Add the state of producers to the refusal of a follower as out of range: see
    `FetchPartitionResponse.producers`."""
    if producers := partition.log.producers_below(refusal.log_start_offset):
        refusal.producers = memoryview(encode_snapshot(producers))


def _admit_to(partition: Partition, fetch: FetchPartition, replica_id: int) -> AdmittedFetch | RefusedFetch:
    refusal = partition.admit(fetch, replica_id)
    if refusal is not None:
        return partition.topic_partition, refusal
    return AdmittedFetch(partition.topic_partition, fetch, partition, partition.leader_epoch)


def read_past_emptied(
    partition: Partition, fetch: FetchPartition, isolation: FetchIsolation, *, max_bytes: int, at_least_one: bool
) -> search.Steps[FetchPartitionResponse]:
    """As `read`, for a consumer, from the next batch that has records; in steps. If none below the consumer's end
    has any, the answer is the last batch, so that the consumer goes on after it."""
    epoch = partition.leader_epoch
    try:
        offset = yield from search.past_emptied(partition.log, fetch.fetch_offset, partition.end_for(isolation))
    except BrokerError as error:
        return partition.refusal(partition.considered(error).code)
    if not partition.leads_in(epoch):
        return partition.refusal(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    found = msgspec.structs.replace(fetch, fetch_offset=offset)
    response = partition.read(found, CONSUMER, isolation, max_bytes=max_bytes, at_least_one=at_least_one)
    partition.traffic.bytes_out += len(response.records)
    return response


def offset_for(
    partition: Partition,
    timestamp_ms: int,
    current_leader_epoch: int,
    replica_id: int,
    isolation_level: int = READ_UNCOMMITTED,
) -> search.Steps[tuple[int, int]]:
    """Return (timestamp, offset) for ListOffsets, with offset -1 if there is no such record; in steps, as `Search`.
    "Latest" is the high watermark, or the last stable offset for read_committed. A new leader does not know either
    until it has reached the start of its epoch (KIP-207). Raises BrokerError."""
    partition.require_leader(current_leader_epoch)
    end = partition.end_for(FetchIsolation.of(replica_id, isolation_level))
    if timestamp_ms in (EARLIEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP):
        return -1, partition.log.log_start_offset
    if timestamp_ms == LATEST_TIERED_TIMESTAMP:
        return -1, -1
    if timestamp_ms < LATEST_TIERED_TIMESTAMP:
        raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, f"timestamp {timestamp_ms} has no meaning here")
    if replica_id == CONSUMER and partition.high_watermark < partition.epoch_start_offset:
        raise partition.high_watermark_not_known()
    if timestamp_ms == LATEST_TIMESTAMP:
        return -1, end
    epoch = partition.leader_epoch
    try:
        if timestamp_ms == MAX_TIMESTAMP:
            found = yield from search.newest_record(partition.log, end)
        else:
            found = yield from search.offset_for_timestamp(partition.log, timestamp_ms, end)
    except BrokerError as error:
        partition.require_leader(current_leader_epoch)
        raise partition.considered(error, replica_id) from error
    if partition.leader_epoch != epoch:
        return (yield from offset_for(partition, timestamp_ms, current_leader_epoch, replica_id, isolation_level))
    partition.require_leader(current_leader_epoch)
    return found if found is not None else (-1, -1)
