"""DeleteRecords: advance the start of logs, and answer when no replica that may become leader has the earlier
records."""

from minibroker.broker.handlers.services import MOST_WAIT_MS, Services, bound_messages, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.delayed import DeletionStatus
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.messages import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from minibroker.protocol.model import TopicPartition

LEAST_TIMEOUT_MS = 1_000
"""The minimum time for the disks of the replicas. Kafka confirms a deletion before it is on any disk, so a client that
allows no time at all, as in librdkafka's tests, still receives a confirmation."""


async def handle_delete_records(services: Services, request: Request, body: DeleteRecordsRequest) -> None:
    """Answer DeleteRecords. Each partition succeeds or fails by itself. The work is done in slices, because a log that
    becomes empty begins a new segment."""
    entries = [
        (TopicPartition(topic.name, asked.partition_index), topic.topic_id, asked.offset)
        for topic in body.topics
        for asked in topic.partitions
    ]
    check_named_once("a partition", [topic_partition for topic_partition, _, _ in entries])
    slices = Slices()
    statuses: dict[TopicPartition, DeletionStatus] = {}
    for topic_partition, topic_id, offset in entries:
        statuses[topic_partition] = services.replicas.appender.delete_records(topic_partition, topic_id, offset)
        await slices.breathe()

    def respond(statuses: dict[TopicPartition, DeletionStatus]) -> None:
        topics: dict[str, list[DeleteRecordsPartitionResult]] = {}
        bound_messages(status.response for status in statuses.values())
        for topic_partition, status in statuses.items():
            topics.setdefault(topic_partition.topic, []).append(status.response)
        results = [DeleteRecordsTopicResult(name, partitions) for name, partitions in topics.items()]
        request.respond(DeleteRecordsResponse(0, results))

    services.replicas.appender.await_deletions(
        statuses, timeout_ms=min(max(body.timeout_ms, LEAST_TIMEOUT_MS), MOST_WAIT_MS), respond=respond
    )
