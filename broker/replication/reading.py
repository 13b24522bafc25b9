"""Fetches of consumers and followers from the logs that this broker leads (Kafka's fetchMessages)."""

from collections.abc import Callable, Sequence

from minibroker.broker.replication.delayed import AdmittedFetch, DelayedFetch, Waits
from minibroker.broker.replication.isr_writer import IsrWriter
from minibroker.broker.replication.partition import CONSUMER, Partition
from minibroker.broker.replication.partitions import Partitions
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import FetchPartition, FetchPartitionResponse, FetchRequest
from minibroker.protocol.model import TopicPartition

_MOST_PRODUCER_BYTES = 256 * 1024
"""After this many bytes no further partition of an answer gets the state of its producers: about 15 ms of the loop's
time for the last one."""

RefusedFetch = tuple[TopicPartition, FetchPartitionResponse]
"""One partition of a fetch that cannot be served, and its answer."""
FetchAnswer = list[tuple[TopicPartition, FetchPartitionResponse]]


class Reader:
    """Serves fetches. Each partition succeeds or fails by itself."""

    def __init__(
        self, partitions: Partitions, logs: LogDirs, waits: Waits, isr_writer: IsrWriter, fetch_max_bytes: int
    ) -> None:
        self._partitions = partitions
        self._logs = logs
        self._waits = waits
        self._isr_writer = isr_writer
        self._fetch_max_bytes = fetch_max_bytes

    def fetch(self, request: FetchRequest, respond: Callable[[FetchAnswer], None]) -> None:
        """Read for a consumer or a follower. Call `respond` at once with the records that are there, or once
        `min_bytes` can be read, or after `max_wait_ms`. A follower's offsets move the high watermark first.

        For each partition, in this order: the fetch is admitted, the follower's progress recorded, the records read.
        When a fetch that waited completes, its records are read again."""
        admissions = [
            self._admit(TopicPartition(topic.topic, fetch.partition), fetch, topic.topic_id, request.replica_id)
            for topic in request.topics
            for fetch in topic.partitions
        ]
        admitted = [admission for admission in admissions if isinstance(admission, AdmittedFetch)]
        if request.replica_id != CONSUMER:  # P6
            for part in admitted:
                self._record_progress(part, request.replica_id, request.replica_epoch)
        answer = self._read(admissions, request)
        min_bytes = min(request.min_bytes, self.max_bytes(request))  # as in Kafka: more can never be answered
        size = sum(len(response.records) for _, response in answer)
        settled = any(r.error_code != 0 or r.diverging_epoch is not None for _, r in answer)
        if settled or size >= min_bytes or request.max_wait_ms <= 0 or not admissions:
            self._deliver(answer, request, respond)
            return

        def read_and_deliver() -> None:
            present = [self._admit_after_waiting(part, request.replica_id) for part in admitted]
            self._deliver(self._read(present, request), request, respond)

        operation = DelayedFetch(
            request.max_wait_ms,
            min_bytes,
            request.replica_id,
            admitted,
            self._partitions.get,
            read_and_deliver,
            self._waits.fetch_expired,
        )
        keys = [part.topic_partition for part in admitted]
        if min_bytes <= 1 and not any(part.partition.leader_quota for part in admitted):
            self._waits.fetches.watch(operation, keys)  # the read above has just found nothing
        else:
            self._waits.fetches.try_complete_else_watch(operation, keys)

    def max_bytes(self, request: FetchRequest) -> int:
        return min(request.max_bytes, self._fetch_max_bytes)

    def _admit(
        self, topic_partition: TopicPartition, fetch: FetchPartition, topic_id: str, replica_id: int
    ) -> AdmittedFetch | RefusedFetch:
        try:
            partition = self._partitions.require(topic_partition)
            partition.check_topic_id(topic_id)
        except BrokerError as error:
            known = self._partitions.known_leader(topic_partition, topic_id)
            return topic_partition, FetchPartitionResponse(
                topic_partition.partition,
                error.code,
                current_leader_id=known.leader if known else -1,
                current_leader_epoch=known.leader_epoch if known else -1,
            )
        return _admit_to(partition, fetch, replica_id)

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

    def _read(self, admissions: Sequence[AdmittedFetch | RefusedFetch], request: FetchRequest) -> FetchAnswer:
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
            response = partition.read(fetch, request.replica_id, max_bytes=left, at_least_one=nothing_yet)
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
        partition.tell_producers(refused)
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


def _admit_to(partition: Partition, fetch: FetchPartition, replica_id: int) -> AdmittedFetch | RefusedFetch:
    refusal = partition.admit(fetch, replica_id)
    if refusal is not None:
        return partition.topic_partition, refusal
    return AdmittedFetch(partition.topic_partition, fetch, partition, partition.leader_epoch)
