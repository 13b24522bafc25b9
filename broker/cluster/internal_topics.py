"""The internal topics, which brokers create: `__consumer_offsets` and `__transaction_state`."""

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.messages import CreatableConfig, CreatableTopic
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC

MAX_RECORD_BYTES = 10 * 1024 * 1024
"""A group with all its members is one record: up to a thousand members of 10 KiB each."""
REPLICATION_FACTOR_SETTINGS = {
    OFFSETS_TOPIC: "offsets.topic.replication.factor",
    TRANSACTIONS_TOPIC: "transaction.state.log.replication.factor",
}


def internal_topics(config: BrokerConfig) -> dict[str, CreatableTopic]:
    """Return the internal topics by name, with this broker's settings."""
    offsets = CreatableTopic(
        OFFSETS_TOPIC,
        config.offsets_topic_num_partitions,
        config.offsets_topic_replication_factor,
        configs=[
            CreatableConfig("cleanup.policy", "compact"),
            CreatableConfig("segment.bytes", str(config.offsets_topic_segment_bytes)),
            CreatableConfig("max.message.bytes", str(MAX_RECORD_BYTES)),
        ],
    )
    replicas = config.transaction_state_log_replication_factor
    transactions = CreatableTopic(
        TRANSACTIONS_TOPIC,
        config.transaction_state_log_num_partitions,
        replicas,
        configs=[
            CreatableConfig("cleanup.policy", "compact"),
            CreatableConfig("segment.bytes", str(config.transaction_state_log_segment_bytes)),
            CreatableConfig("min.insync.replicas", str(min(config.transaction_state_log_min_isr, replicas))),
            CreatableConfig("max.message.bytes", str(MAX_RECORD_BYTES)),
        ],
    )
    return {topic.name: topic for topic in (offsets, transactions)}
