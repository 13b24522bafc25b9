"""Requests about one broker: its log directories, its health, and the timeline of its controller."""

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
    """The log directory to which the broker moves these replicas."""
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
    """The high watermark minus the log end offset, at least 0; -1: unknown."""
    is_future_key: bool = False
    """The replica is being moved here from another directory; `offset_lag` offsets remain to be copied."""


class DescribeLogDirsTopic(Message):
    name: TopicName
    partitions: Annotated[list[DescribeLogDirsPartition], Meta(max_length=MAX_PARTITIONS)]


class DescribeLogDirsResult(Message):
    error_code: Int16
    """KAFKA_STORAGE_ERROR if the directory is offline."""
    log_dir: String
    topics: Annotated[list[DescribeLogDirsTopic], Meta(max_length=MAX_TOPICS)]
    total_bytes: Int64 = -1
    usable_bytes: Int64 = -1
    """These two are of the directory's file system; -1: unknown."""
    error_message: String = ""
    """Why the directory is offline (not in Kafka)."""


class DescribeLogDirsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    results: Annotated[list[DescribeLogDirsResult], Meta(max_length=1_000)]


# --- DescribeHealth (124) --------------------------------------------------------------------------------------------


class DescribeHealthRequest(Message):
    """What a broker knows of itself and tells in no other answer."""


class LaggingFollower(Message):
    """A replica that lacks records of this broker, which leads the partition, although its broker lives."""

    broker_id: Int32
    topic_name: TopicName
    partition_index: Int32
    records: Int64
    """Those that it lacks."""
    behind_ms: Int64
    """Since it had everything; -1: it never had, since this broker leads."""
    silent_ms: Int64
    """Since its last fetch."""
    is_in_sync: bool


class SlowDisk(Message):
    """A log directory in which writes or flushes took long just now."""

    log_dir: String
    calls: Int32
    longest_ms: Int64
    longest_call: String
    """"write" or "flush"."""


class SlowCommit(Message):
    """Records of this broker, which leads the partition, for which acks=all waited long just now."""

    topic_name: TopicName
    partition_index: Int32
    broker_id: Int32
    """The follower that copied them last."""
    times: Int32
    longest_ms: Int64


class DescribeHealthResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    broker_id: Int32
    zookeeper_away_ms: Int64
    """Since ZooKeeper was last heard of, or the connection was lost; -1: there is one."""
    zookeeper_session_timeout_ms: Int32
    lagging_followers: Annotated[list[LaggingFollower], Meta(max_length=1_000)] = []
    """Those that have been behind for the longest."""
    slow_disks: Annotated[list[SlowDisk], Meta(max_length=1_000)] = []
    zookeeper_losses: Int32 = 0
    """How many times the connection to ZooKeeper was lost in the last minute, or ZooKeeper not heard in time."""
    slow_commits: Annotated[list[SlowCommit], Meta(max_length=1_000)] = []
    """The longest first."""


# --- DescribeTimeline (125) ------------------------------------------------------------------------------------------


class DescribeTimelineRequest(Message):
    """Entries of this broker's controller, from all its terms, with numbers above `after` and not older than
    `since_ms`."""

    after: Int64 = 0
    since_ms: Int64 = 0
    max_entries: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class DescribeTimelineResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    entries: Annotated[list[memoryview], Meta(max_length=10_000)]
    """JSON objects in the order of their numbers. More entries follow unless `is_complete`."""
    is_complete: bool = True
    last_number: Int64 = 0
    """The number of the broker's last entry. If it is lower than in an earlier response, the files were lost."""
