"""Kafka's schemas of the cluster: ApiVersions, Metadata, FindCoordinator, DescribeCluster; and DescribeProducers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode, InvalidMessage
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, error_message, structs
from minibroker.protocol.kafka.types import BOOL, INT8, INT16, INT32, INT64, STRING, UUID, Array
from minibroker.protocol.messages import groups as g

# --- ApiVersions (18) ----------------------------------------------------------------------------------------

API_VERSIONS = KafkaApi(
    apis.API_VERSIONS,
    0,
    4,
    first_flexible=3,
    request=Schema(
        m.ApiVersionsRequest,
        Field("client_software_name", STRING, "3+"),
        Field("client_software_version", STRING, "3+"),
    ),
    response=Schema(
        m.ApiVersionsResponse,
        Field("error_code", INT16),
        Field(
            "api_keys",
            structs(m.ApiVersion, Field("api_key", INT16), Field("min_version", INT16), Field("max_version", INT16)),
        ),
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field(
            "supported_features",
            structs(
                m.SupportedFeature, Field("name", STRING), Field("min_version", INT16), Field("max_version", INT16)
            ),
            "4+",  # Java clients that send version 3 reject a min_version of 0 (KAFKA-17011)
            tag=0,
            default=[],
        ),
        Field("finalized_features_epoch", INT64, "3+", tag=1, default=-1),
        Field(
            "finalized_features",
            structs(
                m.FinalizedFeature,
                Field("name", STRING),
                Field("max_version_level", INT16),
                Field("min_version_level", INT16),
            ),
            "3+",
            tag=2,
            default=[],
        ),
    ),
    failed=lambda request, code, message: m.ApiVersionsResponse(code, []),
)

# --- Metadata (3) --------------------------------------------------------------------------------------------


class _MetadataRequestTopic(m.Message):
    topic_id: m.TopicId
    name: m.String | None


class _MetadataRequest(m.Message):
    topics: Annotated[list[_MetadataRequestTopic], Meta(max_length=m.MAX_TOPICS)] | None
    allow_auto_topic_creation: bool
    include_topic_authorized_operations: bool = False
    include_cluster_authorized_operations: bool = False


def _metadata_request(wire: _MetadataRequest, version: int) -> m.MetadataRequest:
    names: list[str] | None = None
    topic_ids: list[str] = []
    if wire.topics or (wire.topics is not None and version > 0):  # version 0 has no null
        names = [topic.name for topic in wire.topics if topic.name is not None]
        if version < 12 and len(names) < len(wire.topics):
            raise InvalidMessage(
                f"a topic without a name in version {version} of Metadata; names may be null from 12 on"
            )
        topic_ids = [topic.topic_id for topic in wire.topics if topic.name is None]
    return m.MetadataRequest(
        names,
        wire.allow_auto_topic_creation,
        topic_ids,
        wire.include_topic_authorized_operations,
        wire.include_cluster_authorized_operations,
    )


def _metadata_failed(request: m.MetadataRequest, code: ErrorCode, message: str) -> m.MetadataResponse:
    topics = [m.MetadataTopic(code, name, "", False, []) for name in request.topics or ()]
    topics += [m.MetadataTopic(code, "", topic_id, False, []) for topic_id in request.topic_ids]
    return m.MetadataResponse(0, [], None, -1, topics)


METADATA = KafkaApi(
    apis.METADATA,
    0,
    12,
    first_flexible=9,
    request=Schema(
        _MetadataRequest,
        Field(
            "topics",
            structs(
                _MetadataRequestTopic, Field("topic_id", UUID, "10+", default=""), Field("name", STRING, nullable="10+")
            ),
            nullable="1+",
        ),
        Field("allow_auto_topic_creation", BOOL, "4+", default=True),
        Field("include_cluster_authorized_operations", BOOL, "8-10", default=False),
        Field("include_topic_authorized_operations", BOOL, "8+", default=False),
    ),
    response=Schema(
        m.MetadataResponse,
        Field("throttle_time_ms", INT32, "3+", default=0),
        Field(
            "brokers",
            structs(
                m.MetadataBroker,
                Field("node_id", INT32),
                Field("host", STRING),
                Field("port", INT32),
                Field("rack", STRING, "1+", nullable="1+"),
            ),
        ),
        Field("cluster_id", STRING, "2+", nullable="2+", default=None),
        Field("controller_id", INT32, "1+", default=-1),
        Field(
            "topics",
            structs(
                m.MetadataTopic,
                Field("error_code", INT16),
                Field("name", STRING, nullable="12+", on_null=""),
                Field("topic_id", UUID, "10+", default=""),
                Field("is_internal", BOOL, "1+", default=False),
                Field(
                    "partitions",
                    structs(
                        m.MetadataPartition,
                        Field("error_code", INT16),
                        Field("partition_index", INT32),
                        Field("leader_id", INT32),
                        Field("leader_epoch", INT32, "7+", default=-1),
                        Field("replica_nodes", Array(INT32)),
                        Field("isr_nodes", Array(INT32)),
                        Field("offline_replicas", Array(INT32), "5+", default=[]),
                    ),
                ),
                Field("topic_authorized_operations", INT32, "8+", default=m.NO_OPERATIONS),
            ),
        ),
        Field("cluster_authorized_operations", INT32, "8-10", default=m.NO_OPERATIONS),
    ),
    to_ours=_metadata_request,
    failed=_metadata_failed,
)

# --- FindCoordinator (10) ------------------------------------------------------------------------------------


class _FindCoordinatorRequest(m.Message):
    """One `key` up to version 3, several from 4 on (KIP-699)."""

    key: g.GroupId
    key_type: m.Int8
    coordinator_keys: Annotated[list[g.GroupId], Meta(max_length=g.MAX_GROUPS)]


class _FindCoordinatorResponse(m.Message):
    throttle_time_ms: m.Int32
    error_code: m.Int16
    error_message: str | None
    node_id: m.Int32
    host: str
    port: m.Int32
    coordinators: list[g.Coordinator]


def _find_coordinator_request(wire: _FindCoordinatorRequest, version: int) -> g.FindCoordinatorRequest:
    return g.FindCoordinatorRequest(wire.key_type, wire.coordinator_keys if version >= 4 else [wire.key])


def _find_coordinator_response(ours: g.FindCoordinatorResponse, version: int) -> _FindCoordinatorResponse:
    first = ours.coordinators[0] if ours.coordinators else g.Coordinator("", -1, "", -1, ErrorCode.NONE)
    return _FindCoordinatorResponse(
        ours.throttle_time_ms,
        first.error_code,
        first.error_message,
        first.node_id,
        first.host,
        first.port,
        ours.coordinators,
    )


def _find_coordinator_failed(
    request: g.FindCoordinatorRequest, code: ErrorCode, message: str
) -> g.FindCoordinatorResponse:
    return g.FindCoordinatorResponse(
        0, [g.Coordinator(key, -1, "", -1, code, message) for key in request.coordinator_keys]
    )


FIND_COORDINATOR = KafkaApi(
    apis.FIND_COORDINATOR,
    0,
    6,
    first_flexible=3,
    request=Schema(
        _FindCoordinatorRequest,
        Field("key", STRING, "0-3", default=""),
        Field("key_type", INT8, "1+", default=0),
        Field("coordinator_keys", Array(STRING), "4+", default=[]),
    ),
    response=Schema(
        _FindCoordinatorResponse,
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field("error_code", INT16, "0-3", default=0),
        Field("error_message", STRING, "1-3", nullable="1-3", default=None),
        Field("node_id", INT32, "0-3", default=-1),
        Field("host", STRING, "0-3", default=""),
        Field("port", INT32, "0-3", default=-1),
        Field(
            "coordinators",
            structs(
                g.Coordinator,
                Field("key", STRING),
                Field("node_id", INT32),
                Field("host", STRING),
                Field("port", INT32),
                Field("error_code", INT16),
                Field("error_message", STRING, nullable="4+"),
            ),
            "4+",
            default=[],
        ),
    ),
    to_ours=_find_coordinator_request,
    from_ours=_find_coordinator_response,
    failed=_find_coordinator_failed,
)

# --- DescribeCluster (60) ------------------------------------------------------------------------------------

DESCRIBE_CLUSTER = KafkaApi(
    apis.DESCRIBE_CLUSTER,
    0,
    1,
    first_flexible=0,
    request=Schema(
        m.DescribeClusterRequest,
        Field("include_cluster_authorized_operations", BOOL, default=False),
        Field("endpoint_type", INT8, "1+", default=m.BROKER_ENDPOINTS),
    ),
    response=Schema(
        m.DescribeClusterResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        error_message("0+"),
        Field("endpoint_type", INT8, "1+", default=m.BROKER_ENDPOINTS),
        Field("cluster_id", STRING),
        Field("controller_id", INT32),
        Field(
            "brokers",
            structs(
                m.DescribeClusterBroker,
                Field("broker_id", INT32),
                Field("host", STRING),
                Field("port", INT32),
                Field("rack", STRING, nullable="0+"),
            ),
        ),
        Field("cluster_authorized_operations", INT32, default=m.NO_OPERATIONS),
    ),
    failed=lambda request, code, message: m.DescribeClusterResponse(0, code, message),
)

# --- DescribeProducers (61) ----------------------------------------------------------------------------------

DESCRIBE_PRODUCERS = KafkaApi(
    apis.DESCRIBE_PRODUCERS,
    0,
    0,
    first_flexible=0,
    request=Schema(
        m.DescribeProducersRequest,
        Field(
            "topics", structs(m.DescribeProducersTopic, Field("name", STRING), Field("partition_indexes", Array(INT32)))
        ),
    ),
    response=Schema(
        m.DescribeProducersResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            structs(
                m.DescribeProducersTopicResponse,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.DescribeProducersPartition,
                        Field("partition_index", INT32),
                        Field("error_code", INT16),
                        error_message("0+"),
                        Field(
                            "active_producers",
                            structs(
                                m.ActiveProducer,
                                Field("producer_id", INT64),
                                Field("producer_epoch", INT32),
                                Field("last_sequence", INT32),
                                Field("last_timestamp", INT64),
                                Field("coordinator_epoch", INT32),
                                Field("current_txn_start_offset", INT64),
                            ),
                        ),
                    ),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeProducersResponse(
        0,
        [
            m.DescribeProducersTopicResponse(
                topic.name, [m.DescribeProducersPartition(index, code, message) for index in topic.partition_indexes]
            )
            for topic in request.topics
        ],
    ),
)

APIS = (API_VERSIONS, METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER, DESCRIBE_PRODUCERS)
