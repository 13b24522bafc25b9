"""The settings of a log, derived from those of its topic and its broker (Kafka's LogConfig.fromProps)."""

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.topic_config import TopicConfig
from minibroker.broker.settings.types import LZ4_DEFAULT_LEVEL
from minibroker.broker.storage.log_config import LogConfig
from minibroker.protocol.model import SYNCED
from minibroker.protocol.records.compression import Compression


def log_config(topic: TopicConfig, broker: BrokerConfig) -> LogConfig:
    policy = broker.log_cleanup_policy if topic.cleanup_policy is None else topic.cleanup_policy
    compact, delete = "compact" in policy, "delete" in policy
    segment_ms = topic.segment_ms or broker.log_roll_ms
    max_compaction_lag_ms = _either(topic.max_compaction_lag_ms, broker.log_cleaner_max_compaction_lag_ms)
    if compact:
        segment_ms = min(segment_ms, max_compaction_lag_ms)  # the active segment is never compacted
    difference_ms = _either(topic.message_timestamp_difference_max_ms, broker.log_message_timestamp_difference_max_ms)
    before_ms = _either(topic.message_timestamp_before_max_ms, broker.log_message_timestamp_before_max_ms)
    after_ms = _either(topic.message_timestamp_after_max_ms, broker.log_message_timestamp_after_max_ms)
    return LogConfig(
        segment_bytes=topic.segment_bytes or broker.log_segment_bytes,
        index_interval_bytes=topic.index_interval_bytes or broker.log_index_interval_bytes,
        max_message_bytes=topic.max_message_bytes or broker.message_max_bytes,
        columns=topic.record_format == "columns",
        compression=_codec(topic.compression_type or broker.compression_type),
        compression_level=_compression_level(topic, broker),
        log_append_time=(topic.message_timestamp_type or broker.log_message_timestamp_type) == "LogAppendTime",
        message_timestamp_before_max_ms=_first_limit(before_ms, difference_ms),
        message_timestamp_after_max_ms=_first_limit(after_ms, difference_ms),
        flush_messages=_first_limit(_either(topic.flush_messages, broker.log_flush_interval_messages)),
        flush_ms=_first_limit(_either(topic.flush_ms, broker.log_flush_interval_ms)),
        producer_id_expiration_ms=broker.producer_id_expiration_ms,
        segment_ms=segment_ms,
        segment_jitter_ms=_either(topic.segment_jitter_ms, broker.log_roll_jitter_ms),
        synced=topic.durability == SYNCED,
        retention_ms=_limit(_either(topic.retention_ms, broker.log_retention_ms)) if delete else None,
        retention_bytes=_limit(_either(topic.retention_bytes, broker.log_retention_bytes)) if delete else None,
        delete=delete,
        compact=compact,
        min_cleanable_dirty_ratio=(
            broker.log_cleaner_min_cleanable_ratio
            if topic.min_cleanable_dirty_ratio is None
            else topic.min_cleanable_dirty_ratio
        ),
        min_compaction_lag_ms=_either(topic.min_compaction_lag_ms, broker.log_cleaner_min_compaction_lag_ms),
        max_compaction_lag_ms=_first_limit(max_compaction_lag_ms),
        delete_retention_ms=_either(topic.delete_retention_ms, broker.log_cleaner_delete_retention_ms),
    )


def _either(of_topic: int | None, of_broker: int) -> int:
    return of_broker if of_topic is None else of_topic


def _codec(compression_type: str) -> Compression | None:
    """Return None if batches keep the codec of their producer."""
    if compression_type == "producer":
        return None
    return Compression.NONE if compression_type == "uncompressed" else Compression.from_name(compression_type)


def _compression_level(topic: TopicConfig, broker: BrokerConfig) -> int | None:
    """Return the level of the configured codec; None stands for the codec's default."""
    match topic.compression_type or broker.compression_type:
        case "gzip":
            level = _either(topic.compression_gzip_level, broker.compression_gzip_level)
            return None if level in (-1, 0) else level
        case "lz4":
            level = _either(topic.compression_lz4_level, broker.compression_lz4_level)
            return None if level == LZ4_DEFAULT_LEVEL else level
        case "zstd":
            return _either(topic.compression_zstd_level, broker.compression_zstd_level)
        case _:
            return None


def _first_limit(*settings: int) -> int | None:
    """Return the first setting that is a limit: Kafka writes "no limit" as 2**63 - 1."""
    return next((setting for setting in settings if setting < 2**63 - 1), None)


def _limit(setting: int) -> int | None:
    return None if setting == -1 else setting
