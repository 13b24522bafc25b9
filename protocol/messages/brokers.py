"""What one broker alone knows: its log directories, and the timeline of its controller."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_PARTITIONS,
    MAX_TOPICS,
    Int16,
    Int32,
    Int64,
    Message,
    String,
    TopicName,
)

# --- AlterReplicaLogDirs (34) --------------------------------------------------------------------------------------


class AlterReplicaLogDirTopic(Message):
    name: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class AlterReplicaLogDir(Message):
    path: String
    """The directory that these replicas of the broker are to be moved to."""
    topics: Annotated[list[AlterReplicaLogDirTopic], Meta(max_length=MAX_TOPICS)]


class AlterReplicaLogDirsRequest(Message):
    dirs: Annotated[list[AlterReplicaLogDir], Meta(max_length=1_000)]


class AlterReplicaLogDirPartitionResult(Message):
    partition_index: Int32
    error_code: Int16


class AlterReplicaLogDirTopicResult(Message):
    topic_name: TopicName
    partitions: Annotated[list[AlterReplicaLogDirPartitionResult], Meta(max_length=MAX_PARTITIONS)]


class AlterReplicaLogDirsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[AlterReplicaLogDirTopicResult], Meta(max_length=MAX_TOPICS)]


# --- DescribeLogDirs (35) ------------------------------------------------------------------------------------------


class DescribableLogDirTopic(Message):
    topic: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class DescribeLogDirsRequest(Message):
    """`topics` None: all."""

    topics: Annotated[list[DescribableLogDirTopic], Meta(max_length=MAX_TOPICS)] | None


class DescribeLogDirsPartition(Message):
    partition_index: Int32
    partition_size: Int64
    offset_lag: Int64
    """How far the log ends before the high watermark; -1: not known."""
    is_future_key: bool = False
    """The replica is being moved here, from another directory, and `offset_lag` is what is still to be copied."""


class DescribeLogDirsTopic(Message):
    name: TopicName
    partitions: Annotated[list[DescribeLogDirsPartition], Meta(max_length=MAX_PARTITIONS)]


class DescribeLogDirsResult(Message):
    error_code: Int16
    """KAFKA_STORAGE_ERROR: it is offline."""
    log_dir: String
    topics: Annotated[list[DescribeLogDirsTopic], Meta(max_length=MAX_TOPICS)]
    total_bytes: Int64 = -1
    usable_bytes: Int64 = -1
    """Of the file system that the directory is on; -1: not known."""
    error_message: String = ""
    """Why it is offline (not in Kafka)."""


class DescribeLogDirsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    results: Annotated[list[DescribeLogDirsResult], Meta(max_length=1_000)]


# --- DescribeTimeline (125) ------------------------------------------------------------------------------------------


class DescribeTimelineRequest(Message):
    """What the controller of this broker did, whenever it was in office: entries with a number above `after`, and not
    older than `since_ms`."""

    after: Int64 = 0
    since_ms: Int64 = 0
    max_entries: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class DescribeTimelineResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    entries: Annotated[list[memoryview], Meta(max_length=10_000)]
    """JSON objects, in the order of their numbers; not all that there are, unless `is_complete`."""
    is_complete: bool = True
    last_number: Int64 = 0
    """Of the last entry that this broker has. Lower than one that it gave out before: its files were lost."""
