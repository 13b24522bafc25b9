"""The settings of a topic that its logs use (Kafka's LogConfig)."""

import msgspec

from minibroker.protocol.records.compression import Compression


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Kafka's names and defaults where it has them."""

    segment_bytes: int = 1024**3
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    message_timestamp_before_max_ms: int | None = None
    """How far a record's timestamp may be behind the broker's clock, in ms; None: any time is accepted. A record
    without a timestamp is always accepted."""
    message_timestamp_after_max_ms: int | None = None
    """How far a record's timestamp may be ahead of the broker's clock, in ms; None: any time is accepted."""
    log_append_time: bool = False
    """The leader gives each batch the time at which it appends it (`message.timestamp.type`)."""
    columns: bool = True
    """Batches of columns are appended as they are; else as Kafka's records (`record.format`)."""
    compression: Compression | None = None
    """The codec that all batches have (`compression.type`); None: that of their producer."""
    compression_level: int | None = None
    """The level at which the leader compresses; None: the codec's default."""
    producer_id_expiration_ms: int = 86_400_000
    """Forget a producer that was silent for this long while the log was looked after (`checkpoint`)."""
    segment_ms: int = 604_800_000
    """Begin a new segment when a batch is this much younger than the first one of the active segment."""
    segment_jitter_ms: int = 0
    """The most by which a segment rolls before `segment_ms`, drawn for each segment, so that not all logs roll at once.
    A jitter above `segment_ms` counts as `segment_ms` (Kafka's `LogConfig.randomSegmentJitter`)."""
    retention_ms: int | None = 604_800_000
    """Records older than this may be deleted, a segment at a time; None: no limit of age."""
    retention_bytes: int | None = None
    """The oldest segments may be deleted if this much is left without them; None: no limit of size."""
    synced: bool = False
    """durability=synced: appended records are flushed at once, and count for nothing before."""
    delete: bool = True
    """The oldest records may be deleted, by age, by size, or on demand; what `retention_ms` and `retention_bytes` say
    counts only then."""
    compact: bool = False
    """Only the latest record of each key must stay; records without a key are rejected."""
    min_cleanable_dirty_ratio: float = 0.5
    """The log is compacted when more than this part of it is new since the last time."""
    min_compaction_lag_ms: int = 0
    """Younger records are not compacted."""
    max_compaction_lag_ms: int | None = None
    """Compact the log once it has older records that were not compacted; None: no limit of age."""
    delete_retention_ms: int = 86_400_000
    """How long a tombstone stays once what it deletes is gone."""
    flush_messages: int | None = None
    """Flush in the background after this many appended records."""
    flush_ms: int | None = None
    """Flush appended records in the background after this time at the latest."""
    flush_bytes: int = 32 * 1024**2
    """Flush in the background after this many appended bytes: that bounds what recovery must check after a crash, and
    keeps the kernel from writing everything back at once."""

    @property
    def looks_at_records(self) -> bool:
        """Before they are appended."""
        return self.compact or (self.limits_times and not self.log_append_time)

    @property
    def limits_times(self) -> bool:
        return self.message_timestamp_before_max_ms is not None or self.message_timestamp_after_max_ms is not None
