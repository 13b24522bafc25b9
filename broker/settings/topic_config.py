"""The settings of a topic: Kafka's name, type, bounds, default and meaning of each.

The field `retention_ms` is the setting `retention.ms`. docs/settings.md is generated from this table (`make settings`).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from minibroker.broker.settings.types import (
    UNBOUNDED,
    Age,
    BatchBytes,
    Bytes,
    CleanupPolicy,
    CompressionType,
    Count,
    Durability,
    Duration,
    FormatVersion,
    GzipLevel,
    Limit,
    Lz4Level,
    Ratio,
    RecordFormat,
    ThrottledReplicas,
    TimestampType,
    ZstdLevel,
    kafka_name,
)


class TopicConfig(msgspec.Struct, frozen=True, kw_only=True, rename=kafka_name, forbid_unknown_fields=True):
    """The settings of a topic. None: the broker's setting of the same meaning applies."""

    min_insync_replicas: Count | None = None
    """The broker's `min.insync.replicas`, for this topic. With fewer replicas in sync, acks=all is rejected and
    consumers see no new records, including those written with acks=1. A replica that leaves the ISR at that point can
    therefore still be elected without loss. A topic with fewer replicas than this needs all of them in sync."""
    unclean_leader_election_enable: bool | None = None
    """The broker's `unclean.leader.election.enable`, for this topic."""
    durability: Durability | None = None
    """When a record is acknowledged (acks=all) and visible to consumers. `replicated`: when it is in the memory of
    every replica in sync, as in Kafka. `synced`: when it is on the disk of every replica in sync, so that even a power
    cut of all hosts loses nothing. It is fixed when the topic is created, because records acknowledged before a change
    might not be on any disk. Not in Kafka: see durability.md."""
    max_message_bytes: BatchBytes | None = None
    """The broker's `message.max.bytes`, for this topic."""
    segment_bytes: Annotated[int, Meta(ge=14, le=2**31 - 1)] | None = None
    """The broker's `log.segment.bytes`, for this topic. Requests may set 1 MiB or more (KIP-1030)."""
    segment_ms: Age | None = None
    """The broker's `log.roll.ms`, for this topic."""
    segment_jitter_ms: Annotated[int, Meta(ge=0, le=UNBOUNDED)] | None = None
    """The broker's `log.roll.jitter.ms`, for this topic."""
    retention_ms: Limit | None = None
    """The broker's `log.retention.ms`, for this topic."""
    retention_bytes: Limit | None = None
    """The broker's `log.retention.bytes`, for this topic."""
    cleanup_policy: CleanupPolicy | None = None
    """The broker's `log.cleanup.policy`, for this topic. With `compact`, a record without a key is rejected. If a topic
    is switched to `compact`, the first compaction removes its existing records without a key, as in Kafka."""
    min_cleanable_dirty_ratio: Ratio | None = None
    """The broker's `log.cleaner.min.cleanable.ratio`, for this topic."""
    min_compaction_lag_ms: Duration | None = None
    """The broker's `log.cleaner.min.compaction.lag.ms`, for this topic."""
    max_compaction_lag_ms: Age | None = None
    """The broker's `log.cleaner.max.compaction.lag.ms`, for this topic."""
    delete_retention_ms: Duration | None = None
    """The broker's `log.cleaner.delete.retention.ms`, for this topic."""
    index_interval_bytes: Bytes | None = None
    """The broker's `log.index.interval.bytes`, for this topic."""
    record_format: RecordFormat = "columns"
    """The format in which the log stores batches of minibroker's own producers: `columns`, as sent, or `kafka`, as
    records of Kafka's protocol. All clients can read both formats, but the other format must be converted by its reader
    or by the broker, so choose `kafka` for a topic that is read mostly by Kafka's clients. The leader converts batches
    before it appends them; existing batches stay unchanged. Not in Kafka."""
    compression_type: CompressionType | None = None
    """The broker's `compression.type`, for this topic."""
    compression_gzip_level: GzipLevel | None = None
    """The broker's `compression.gzip.level`, for this topic."""
    compression_lz4_level: Lz4Level | None = None
    """The broker's `compression.lz4.level`, for this topic."""
    compression_zstd_level: ZstdLevel | None = None
    """The broker's `compression.zstd.level`, for this topic."""
    message_timestamp_type: TimestampType | None = None
    """The broker's `log.message.timestamp.type`, for this topic. A change applies to records written from then on."""
    message_timestamp_before_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.before.max.ms`, for this topic."""
    message_timestamp_after_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.after.max.ms`, for this topic."""
    message_timestamp_difference_max_ms: Duration | None = None
    """The broker's `log.message.timestamp.difference.max.ms`, for this topic."""
    flush_messages: Annotated[int, Meta(ge=1, le=UNBOUNDED)] | None = None
    """The broker's `log.flush.interval.messages`, for this topic."""
    flush_ms: Duration | None = None
    """The broker's `log.flush.interval.ms`, for this topic."""
    file_delete_delay_ms: Duration | None = None
    """Without effect: see the broker's `log.segment.delete.delay.ms`."""
    preallocate: bool | None = None
    """Without effect: see the broker's `log.preallocate`."""
    segment_index_bytes: Annotated[int, Meta(ge=4, le=2**31 - 1)] | None = None
    """Without effect: see the broker's `log.index.size.max.bytes`."""
    message_downconversion_enable: bool | None = None
    """Without effect: see the broker's `log.message.downconversion.enable`."""
    message_format_version: FormatVersion | None = None
    """Without effect, as in Kafka since 3.0."""
    remote_storage_enable: Literal["false"] = "false"
    """Without effect: there is no tiered storage, so it cannot be enabled."""
    local_retention_ms: Annotated[int, Meta(ge=-2, le=UNBOUNDED)] = -2
    """Without effect: there is no tiered storage."""
    local_retention_bytes: Annotated[int, Meta(ge=-2, le=UNBOUNDED)] = -2
    """Without effect: there is no tiered storage."""
    leader_replication_throttled_replicas: ThrottledReplicas = ""
    """The replicas, by partition and leader, to which `leader.replication.throttled.rate` applies: `*` for all, or
    `PARTITION:BROKER,...`. Replicas in sync are never throttled."""
    follower_replication_throttled_replicas: ThrottledReplicas = ""
    """The replicas to which `follower.replication.throttled.rate` applies: `*` for all, or `PARTITION:BROKER,...`."""


SYNONYMS = {
    "min.insync.replicas": "min.insync.replicas",
    "unclean.leader.election.enable": "unclean.leader.election.enable",
    "durability": "log.durability",
    "max.message.bytes": "message.max.bytes",
    "segment.bytes": "log.segment.bytes",
    "segment.ms": "log.roll.ms",
    "segment.jitter.ms": "log.roll.jitter.ms",
    "retention.ms": "log.retention.ms",
    "retention.bytes": "log.retention.bytes",
    "cleanup.policy": "log.cleanup.policy",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "compression.type": "compression.type",
    "compression.gzip.level": "compression.gzip.level",
    "compression.lz4.level": "compression.lz4.level",
    "compression.zstd.level": "compression.zstd.level",
    "message.timestamp.type": "log.message.timestamp.type",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.difference.max.ms": "log.message.timestamp.difference.max.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "preallocate": "log.preallocate",
    "segment.index.bytes": "log.index.size.max.bytes",
    "message.downconversion.enable": "log.message.downconversion.enable",
    "message.format.version": "log.message.format.version",
}
"""Maps each topic setting to the broker setting that applies where the topic has no value."""
