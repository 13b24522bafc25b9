"""Requests about the cluster: ApiVersions, Metadata, DescribeCluster; and DescribeProducers."""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_BROKERS,
    MAX_PARTITIONS,
    MAX_TOPICS,
    NO_OPERATIONS,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Name,
    Replicas,
    String,
    TopicId,
    TopicName,
)


class MetadataBroker(Message):
    node_id: Int32
    host: String
    port: Int32
    rack: Name | None = None


# --- Metadata (3) --------------------------------------------------------------------------------------------


class MetadataRequest(Message):
    """`topics` None asks for all topics, an empty list for none (only brokers and controller).
    `allow_auto_topic_creation`: a topic that does not exist may be created if the broker's auto.create.topics.enable
    also allows it. `topic_ids`: topics requested by their ids alone (KIP-516)."""

    topics: Annotated[list[String], Meta(max_length=MAX_TOPICS)] | None
    allow_auto_topic_creation: bool = False
    topic_ids: Annotated[list[TopicId], Meta(max_length=MAX_TOPICS)] = []
    include_topic_authorized_operations: bool = False
    include_cluster_authorized_operations: bool = False


class MetadataPartition(Message):
    error_code: Int16
    partition_index: Int32
    leader_id: Int32
    leader_epoch: Int32
    replica_nodes: Replicas
    isr_nodes: Replicas
    offline_replicas: Replicas


class MetadataTopic(Message):
    error_code: Int16
    name: String
    topic_id: TopicId
    is_internal: bool
    partitions: Annotated[list[MetadataPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_authorized_operations: Int32 = NO_OPERATIONS
    """The operations that the client may perform: bit N for operation N of Kafka's AclOperation (KIP-430)."""


class MetadataResponse(Message):
    throttle_time_ms: Int32
    brokers: Annotated[list[MetadataBroker], Meta(max_length=MAX_BROKERS)]
    cluster_id: Name | None
    controller_id: Int32
    topics: Annotated[list[MetadataTopic], Meta(max_length=MAX_TOPICS)]
    controller_epoch: Int32 = -1
    """The epoch of the last UpdateMetadata that the broker accepted; the higher of two marks the newer metadata."""
    cluster_authorized_operations: Int32 = NO_OPERATIONS


# --- ApiVersions (18) ----------------------------------------------------------------------------------------


class ApiVersionsRequest(Message):
    client_software_name: Name = ""
    client_software_version: Name = ""


class ApiVersion(Message):
    api_key: Int16
    min_version: Int16
    max_version: Int16


class SupportedFeature(Message):
    """A feature and the levels that the broker supports (KIP-584)."""

    name: Name
    min_version: Int16
    max_version: Int16


class FinalizedFeature(Message):
    """A feature and the levels that the cluster uses."""

    name: Name
    max_version_level: Int16
    min_version_level: Int16


class ApiVersionsResponse(Message):
    error_code: Int16
    api_keys: Annotated[list[ApiVersion], Meta(max_length=1_000)]
    supported_features: Annotated[list[SupportedFeature], Meta(max_length=100)] = []
    finalized_features_epoch: Int64 = -1
    """-1: `finalized_features` are unknown."""
    finalized_features: Annotated[list[FinalizedFeature], Meta(max_length=100)] = []


# --- DescribeCluster (60), DescribeProducers (61) ------------------------------------------------------------------


MAX_PRODUCERS = 1_000_000
"""Producers of a log in one message."""
BROKER_ENDPOINTS = 1
"""Endpoints for clients; 2 would be those of controllers (KIP-919)."""


class DescribeClusterRequest(Message):
    endpoint_type: Int8 = BROKER_ENDPOINTS
    include_cluster_authorized_operations: bool = False


class DescribeClusterBroker(Message):
    broker_id: Int32
    host: String
    port: Int32
    rack: Name | None = None


class DescribeClusterResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String = ""
    cluster_id: String = ""
    controller_id: Int32 = -1
    brokers: Annotated[list[DescribeClusterBroker], Meta(max_length=MAX_BROKERS)] = []
    endpoint_type: Int8 = BROKER_ENDPOINTS
    cluster_authorized_operations: Int32 = NO_OPERATIONS


class DescribeProducersTopic(Message):
    name: TopicName
    partition_indexes: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class DescribeProducersRequest(Message):
    topics: Annotated[list[DescribeProducersTopic], Meta(max_length=MAX_TOPICS)]


class ActiveProducer(Message):
    """An idempotent or transactional producer in the state of a partition's log."""

    producer_id: Int64
    producer_epoch: Int32
    last_sequence: Int32
    last_timestamp: Int64
    """The time of its last batch, in ms since 1970."""
    coordinator_epoch: Int32 = -1
    """The coordinator epoch of its last transaction marker; -1: there is none."""
    current_txn_start_offset: Int64 = -1
    """The first offset of its open transaction; -1: no transaction is open."""


class DescribeProducersPartition(Message):
    partition_index: Int32
    error_code: Int16
    error_message: String = ""
    active_producers: Annotated[list[ActiveProducer], Meta(max_length=MAX_PRODUCERS)] = []


class DescribeProducersTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[DescribeProducersPartition], Meta(max_length=MAX_PARTITIONS)]


class DescribeProducersResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[DescribeProducersTopicResponse], Meta(max_length=MAX_TOPICS)]
