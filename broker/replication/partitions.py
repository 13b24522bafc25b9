"""The table of the replicas on this broker."""

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.replication.partition import Partition
from minibroker.broker.storage.log_dirs import LogDirs
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import UpdateMetadataPartition
from minibroker.protocol.model import TopicPartition


class Partitions(dict[TopicPartition, Partition]):
    """The partitions that have a replica in service here (Kafka's ReplicaManager.allPartitions).

    A dict, so that appends and fetches look a partition up without another call."""

    def __init__(self, broker_id: int, logs: LogDirs, metadata: MetadataCache) -> None:
        super().__init__()
        self._broker_id = broker_id
        self._logs = logs
        self._metadata = metadata

    def require(self, topic_partition: TopicPartition) -> Partition:
        """Return the partition, led here or not.

        Raises BrokerError: KAFKA_STORAGE_ERROR if its log directory is offline, NOT_LEADER_OR_FOLLOWER if its replicas
        are on other brokers, UNKNOWN_TOPIC_OR_PARTITION if this broker does not know it."""
        partition = self.get(topic_partition)
        if partition is None:
            if self._logs.is_offline(topic_partition):
                text = f"the replica of {topic_partition} on broker {self._broker_id} is offline"
                raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, text)
            known = self._metadata.partition(topic_partition) is not None
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            raise BrokerError(code, f"{topic_partition} is not on broker {self._broker_id}")
        return partition

    def known_leader(self, topic_partition: TopicPartition, topic_id: str) -> UpdateMetadataPartition | None:
        """Return the leader for a client that came to the wrong broker (KIP-951).

        None also if another topic has the name: leader epochs of two topics cannot be compared. An empty id matches
        any topic."""
        is_meant = topic_id in ("", self._metadata.topic_id(topic_partition.topic))
        return self._metadata.partition(topic_partition) if is_meant else None
