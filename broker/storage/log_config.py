"""A topic's settings, as far as its logs care (Kafka's LogConfig)."""

import msgspec

from minibroker.protocol.records.compression import Compression


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Kafka's names and defaults where it has them."""

    segment_bytes: int = 1024**3
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    message_timestamp_before_max_ms: int | None = None
    """How far behind the broker's clock a record's timestamp may be; None: any time is accepted. One that has none is
    accepted always."""
    message_timestamp_after_max_ms: int | None = None
    """The same, ahead of it."""
    log_append_time: bool = False
    """The leader gives each batch the time at which it appends it (`message.timestamp.type`)."""
    columns: bool = True
    """Batches of columns are appended as they are; else as Kafka's records (`record.format`)."""
    compression: Compression | None = None
    """The codec that all batches have (`compression.type`); None: that of their producer."""
    compression_level: int | None = None
    """With which the leader compresses; None: the codec's default."""
    producer_id_expiration_ms: int = 86_400_000
    """Forget a producer that was silent for this long while the log was looked after (`checkpoint`)."""
    segment_ms: int = 604_800_000
    """Begin a new segment when a batch is this much younger than the first one of the active segment."""
    segment_jitter_ms: int = 0
    """So much less than `segment_ms`, at most: drawn for each segment, lest all logs roll at once. A jitter above
    `segment_ms` counts as `segment_ms` (Kafka's `LogConfig.randomSegmentJitter`)."""
    retention_ms: int | None = 604_800_000
    """Records older than this may be deleted, a segment at a time; None: however old they are, they stay."""
    retention_bytes: int | None = None
    """The oldest segments may be deleted without which the log still has this much; None: however many there are."""
    synced: bool = False
    """durability=synced: what was appended is flushed at once, and counts for nothing before it is."""
    delete: bool = True
    """The oldest records may be deleted, by age, by size, or on demand; what `retention_ms` and `retention_bytes` say
    counts only then."""
    compact: bool = False
    """Of each key the latest record alone need stay; records without a key are refused."""
    min_cleanable_dirty_ratio: float = 0.5
    """The log is compacted when more than this part of it is new since the last time."""
    min_compaction_lag_ms: int = 0
    """Younger records are not compacted."""
    max_compaction_lag_ms: int | None = None
    """The log is compacted once it has older ones that were not; None: however old."""
    delete_retention_ms: int = 86_400_000
    """How long a tombstone stays once what it deletes is gone."""
    flush_messages: int | None = None
    """Flush in the background each time so many records were appended."""
    flush_ms: int | None = None
    """Flush in the background what was appended so long ago, at the latest."""
    flush_bytes: int = 32 * 1024**2
    """Flush in the background each time this much was appended: it bounds what a crash leaves to check, and keeps the
    kernel from writing back all at once."""

    @property
    def looks_at_records(self) -> bool:
        """Before they are appended."""
        return self.compact or (self.limits_times and not self.log_append_time)

    @property
    def limits_times(self) -> bool:
        return self.message_timestamp_before_max_ms is not None or self.message_timestamp_after_max_ms is not None
