"""Kafka's schemas of what administrators ask: topics, partitions, records, settings, elections, reassignments, and what
brokers say of themselves.

(CreateTopicsRequest.json and its like in Kafka's `clients/src/main/resources/common/message`.)
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import (
    BOOL,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    Array,
    Field,
    KafkaApi,
    Layout,
)


def _error_message(versions: str) -> Field:
    """Ours is empty where Kafka's is null."""

    def get(result: Any) -> str | None:
        return result.error_message or None

    return Field("error_message", STRING, versions, nullable=versions, get=get, default="", on_null="")


# --- CreateTopics (19) ---------------------------------------------------------------------------------------

_CREATED_CONFIG = Layout(
    None,
    Field("name", STRING),
    Field("value", STRING, nullable="5+"),
    Field("read_only", BOOL),
    Field("config_source", INT8),
    Field("is_sensitive", BOOL),
)
"""KIP-525. Whoever wants to know asks DescribeConfigs."""

CREATE_TOPICS = KafkaApi(
    apis.CREATE_TOPICS,
    2,
    7,
    first_flexible=5,
    request=Layout(
        m.CreateTopicsRequest,
        Field(
            "topics",
            Array(
                Layout(
                    m.CreatableTopic,
                    Field("name", STRING),
                    Field("num_partitions", INT32),
                    Field("replication_factor", INT16),
                    Field(
                        "assignments",
                        Array(
                            Layout(
                                m.CreatableAssignment,
                                Field("partition_index", INT32),
                                Field("broker_ids", Array(INT32)),
                            )
                        ),
                    ),
                    Field(
                        "configs",
                        Array(
                            Layout(m.CreatableConfig, Field("name", STRING), Field("value", STRING, nullable="0+")),
                        ),
                    ),
                )
            ),
        ),
        Field("timeout_ms", INT32),
        Field("validate_only", BOOL),
    ),
    response=Layout(
        m.CreateTopicsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            Array(
                Layout(
                    m.CreatableTopicResult,
                    Field("name", STRING),
                    Field("topic_id", UUID, "7+", default=""),
                    Field("error_code", INT16),
                    _error_message("1+"),
                    Field("num_partitions", INT32, "5+", default=-1),
                    Field("replication_factor", INT16, "5+", default=-1),
                    Field("configs", Array(_CREATED_CONFIG), "5+", nullable="5+", default=()),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.CreateTopicsResponse(
        0, [m.CreatableTopicResult(topic.name, "", code, message) for topic in request.topics]
    ),
)

# --- DeleteTopics (20) ---------------------------------------------------------------------------------------


class _DeleteTopicState(m.Message):
    name: m.String | None
    topic_id: m.TopicId


class _DeleteTopicsRequest(m.Message):
    """Names up to version 5; from 6 on a name or an id."""

    topics: Annotated[list[_DeleteTopicState], Meta(max_length=m.MAX_TOPICS)]
    topic_names: Annotated[list[m.String], Meta(max_length=m.MAX_TOPICS)]
    timeout_ms: m.Int32


def _delete_topics_request(wire: _DeleteTopicsRequest, version: int) -> m.DeleteTopicsRequest:
    if version < 6:
        return m.DeleteTopicsRequest(wire.topic_names, wire.timeout_ms)
    names = [topic.name or "" for topic in wire.topics]
    return m.DeleteTopicsRequest(names, wire.timeout_ms, [topic.topic_id for topic in wire.topics])


def _delete_topics_failed(request: m.DeleteTopicsRequest, code: ErrorCode, message: str) -> m.DeleteTopicsResponse:
    topic_ids = request.topic_ids or [""] * len(request.topics)
    named = zip(request.topics, topic_ids, strict=True)
    return m.DeleteTopicsResponse(
        0, [m.DeletableTopicResult(name, topic_id, code, message) for name, topic_id in named]
    )


DELETE_TOPICS = KafkaApi(
    apis.DELETE_TOPICS,
    1,
    6,
    first_flexible=4,
    request=Layout(
        _DeleteTopicsRequest,
        Field(
            "topics",
            Array(Layout(_DeleteTopicState, Field("name", STRING, nullable="6+"), Field("topic_id", UUID))),
            "6+",
            default=[],
        ),
        Field("topic_names", Array(STRING), "0-5", default=[]),
        Field("timeout_ms", INT32),
    ),
    response=Layout(
        m.DeleteTopicsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "responses",
            Array(
                Layout(
                    m.DeletableTopicResult,
                    Field("name", STRING, nullable="6+", on_null=""),
                    Field("topic_id", UUID, "6+", default=""),
                    Field("error_code", INT16),
                    _error_message("5+"),
                )
            ),
        ),
    ),
    to_ours=_delete_topics_request,
    failed=_delete_topics_failed,
)

# --- CreatePartitions (37) -----------------------------------------------------------------------------------

CREATE_PARTITIONS = KafkaApi(
    apis.CREATE_PARTITIONS,
    0,
    3,
    first_flexible=2,
    request=Layout(
        m.CreatePartitionsRequest,
        Field(
            "topics",
            Array(
                Layout(
                    m.CreatePartitionsTopic,
                    Field("name", STRING),
                    Field("count", INT32),
                    Field(
                        "assignments",
                        Array(Layout(m.CreatePartitionsAssignment, Field("broker_ids", Array(INT32)))),
                        nullable="0+",
                    ),
                )
            ),
        ),
        Field("timeout_ms", INT32),
        Field("validate_only", BOOL),
    ),
    response=Layout(
        m.CreatePartitionsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            Array(
                Layout(
                    m.CreatePartitionsTopicResult,
                    Field("name", STRING),
                    Field("error_code", INT16),
                    _error_message("0+"),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.CreatePartitionsResponse(
        0, [m.CreatePartitionsTopicResult(topic.name, code, message) for topic in request.topics]
    ),
)

# --- DeleteRecords (21) --------------------------------------------------------------------------------------


def _delete_records_failed(request: m.DeleteRecordsRequest, code: ErrorCode, message: str) -> m.DeleteRecordsResponse:
    return m.DeleteRecordsResponse(
        0,
        [
            m.DeleteRecordsTopicResult(
                topic.name,
                [m.DeleteRecordsPartitionResult(part.partition_index, -1, code) for part in topic.partitions],
            )
            for topic in request.topics
        ],
    )


DELETE_RECORDS = KafkaApi(
    apis.DELETE_RECORDS,
    0,
    2,
    first_flexible=2,
    request=Layout(
        m.DeleteRecordsRequest,
        Field(
            "topics",
            Array(
                Layout(
                    m.DeleteRecordsTopic,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(m.DeleteRecordsPartition, Field("partition_index", INT32), Field("offset", INT64)),
                        ),
                    ),
                )
            ),
        ),
        Field("timeout_ms", INT32),
    ),
    response=Layout(
        m.DeleteRecordsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            Array(
                Layout(
                    m.DeleteRecordsTopicResult,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.DeleteRecordsPartitionResult,
                                Field("partition_index", INT32),
                                Field("low_watermark", INT64),
                                Field("error_code", INT16),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=_delete_records_failed,
)

# --- DescribeConfigs (32), AlterConfigs (33), IncrementalAlterConfigs (44) -----------------------------------

DESCRIBE_CONFIGS = KafkaApi(
    apis.DESCRIBE_CONFIGS,
    1,
    4,
    first_flexible=4,
    request=Layout(
        m.DescribeConfigsRequest,
        Field(
            "resources",
            Array(
                Layout(
                    m.DescribeConfigsResource,
                    Field("resource_type", INT8),
                    Field("resource_name", STRING),
                    Field("configuration_keys", Array(STRING), nullable="0+"),
                )
            ),
        ),
        Field("include_synonyms", BOOL),
        Field("include_documentation", BOOL, "3+", default=False),
    ),
    response=Layout(
        m.DescribeConfigsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            Array(
                Layout(
                    m.DescribeConfigsResult,
                    Field("error_code", INT16),
                    Field("error_message", STRING, nullable="0+"),
                    Field("resource_type", INT8),
                    Field("resource_name", STRING),
                    Field(
                        "configs",
                        Array(
                            Layout(
                                m.DescribeConfigsEntry,
                                Field("name", STRING),
                                Field("value", STRING, nullable="0+"),
                                Field("read_only", BOOL),
                                Field("config_source", INT8),
                                Field("is_sensitive", BOOL),
                                Field(
                                    "synonyms",
                                    Array(
                                        Layout(
                                            m.DescribeConfigsSynonym,
                                            Field("name", STRING),
                                            Field("value", STRING, nullable="0+"),
                                            Field("source", INT8),
                                        )
                                    ),
                                ),
                                Field("config_type", INT8, "3+", default=0),
                                Field("documentation", STRING, "3+", nullable="3+", default=None),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeConfigsResponse(
        0,
        [
            m.DescribeConfigsResult(code, message, resource.resource_type, resource.resource_name, [])
            for resource in request.resources
        ],
    ),
)

_ALTERED_RESOURCE = Layout(
    m.AlterConfigsResourceResponse,
    Field("error_code", INT16),
    Field("error_message", STRING, nullable="0+"),
    Field("resource_type", INT8),
    Field("resource_name", STRING),
)


def _not_altered(
    request: m.AlterConfigsRequest | m.IncrementalAlterConfigsRequest, code: ErrorCode, message: str
) -> list[m.AlterConfigsResourceResponse]:
    return [
        m.AlterConfigsResourceResponse(code, message, resource.resource_type, resource.resource_name)
        for resource in request.resources
    ]


ALTER_CONFIGS = KafkaApi(
    apis.ALTER_CONFIGS,
    0,
    2,
    first_flexible=2,
    request=Layout(
        m.AlterConfigsRequest,
        Field(
            "resources",
            Array(
                Layout(
                    m.ReplacedConfigs,
                    Field("resource_type", INT8),
                    Field("resource_name", STRING),
                    Field(
                        "configs",
                        Array(Layout(m.CreatableConfig, Field("name", STRING), Field("value", STRING, nullable="0+"))),
                    ),
                )
            ),
        ),
        Field("validate_only", BOOL),
    ),
    response=Layout(
        m.AlterConfigsResponse, Field("throttle_time_ms", INT32), Field("responses", Array(_ALTERED_RESOURCE))
    ),
    failed=lambda request, code, message: m.AlterConfigsResponse(0, _not_altered(request, code, message)),
)

INCREMENTAL_ALTER_CONFIGS = KafkaApi(
    apis.INCREMENTAL_ALTER_CONFIGS,
    0,
    1,
    first_flexible=1,
    request=Layout(
        m.IncrementalAlterConfigsRequest,
        Field(
            "resources",
            Array(
                Layout(
                    m.AlterConfigsResource,
                    Field("resource_type", INT8),
                    Field("resource_name", STRING),
                    Field(
                        "configs",
                        Array(
                            Layout(
                                m.AlterableConfig,
                                Field("name", STRING),
                                Field("config_operation", INT8),
                                Field("value", STRING, nullable="0+"),
                            )
                        ),
                    ),
                )
            ),
        ),
        Field("validate_only", BOOL),
    ),
    response=Layout(
        m.IncrementalAlterConfigsResponse,
        Field("throttle_time_ms", INT32),
        Field("responses", Array(_ALTERED_RESOURCE)),
    ),
    failed=lambda request, code, message: m.IncrementalAlterConfigsResponse(0, _not_altered(request, code, message)),
)

# --- ElectLeaders (43) ---------------------------------------------------------------------------------------

ELECT_LEADERS = KafkaApi(
    apis.ELECT_LEADERS,
    0,
    2,
    first_flexible=2,
    request=Layout(
        m.ElectLeadersRequest,
        Field("election_type", INT8, "1+", default=0),
        Field(
            "topic_partitions",
            Array(Layout(m.ElectLeadersTopic, Field("topic", STRING), Field("partitions", Array(INT32)))),
            nullable="0+",
        ),
        Field("timeout_ms", INT32),
    ),
    response=Layout(
        m.ElectLeadersResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "1+", default=0),
        Field(
            "replica_election_results",
            Array(
                Layout(
                    m.ElectLeadersTopicResult,
                    Field("topic", STRING),
                    Field(
                        "partition_result",
                        Array(
                            Layout(
                                m.ElectLeadersPartitionResult,
                                Field("partition_id", INT32),
                                Field("error_code", INT16),
                                _error_message("0+"),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.ElectLeadersResponse(
        0,
        code,
        [
            m.ElectLeadersTopicResult(
                topic.topic, [m.ElectLeadersPartitionResult(index, code, message) for index in topic.partitions]
            )
            for topic in request.topic_partitions or ()
        ],
    ),
)

# --- AlterPartitionReassignments (45), ListPartitionReassignments (46) ---------------------------------------

ALTER_PARTITION_REASSIGNMENTS = KafkaApi(
    apis.ALTER_PARTITION_REASSIGNMENTS,
    0,
    0,
    first_flexible=0,
    request=Layout(
        m.AlterPartitionReassignmentsRequest,
        Field("timeout_ms", INT32),
        Field(
            "topics",
            Array(
                Layout(
                    m.ReassignableTopic,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.ReassignablePartition,
                                Field("partition_index", INT32),
                                Field("replicas", Array(INT32), nullable="0+"),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    response=Layout(
        m.AlterPartitionReassignmentsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("error_message", STRING, nullable="0+", on_null=""),
        Field(
            "responses",
            Array(
                Layout(
                    m.ReassignableTopicResponse,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.ReassignablePartitionResponse,
                                Field("partition_index", INT32),
                                Field("error_code", INT16),
                                _error_message("0+"),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.AlterPartitionReassignmentsResponse(0, code, message, []),
)

LIST_PARTITION_REASSIGNMENTS = KafkaApi(
    apis.LIST_PARTITION_REASSIGNMENTS,
    0,
    0,
    first_flexible=0,
    request=Layout(
        m.ListPartitionReassignmentsRequest,
        Field("timeout_ms", INT32),
        Field(
            "topics",
            Array(
                Layout(
                    m.ListPartitionReassignmentsTopic,
                    Field("name", STRING),
                    Field("partition_indexes", Array(INT32)),
                )
            ),
            nullable="0+",
        ),
    ),
    response=Layout(
        m.ListPartitionReassignmentsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("error_message", STRING, nullable="0+", on_null=""),
        Field(
            "topics",
            Array(
                Layout(
                    m.OngoingTopicReassignment,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.OngoingPartitionReassignment,
                                Field("partition_index", INT32),
                                Field("replicas", Array(INT32)),
                                Field("adding_replicas", Array(INT32)),
                                Field("removing_replicas", Array(INT32)),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.ListPartitionReassignmentsResponse(0, code, message, []),
)

# --- AlterReplicaLogDirs (34) --------------------------------------------------------------------------------

ALTER_REPLICA_LOG_DIRS = KafkaApi(
    apis.ALTER_REPLICA_LOG_DIRS,
    1,
    2,
    first_flexible=2,
    request=Layout(
        m.AlterReplicaLogDirsRequest,
        Field(
            "dirs",
            Array(
                Layout(
                    m.AlterReplicaLogDir,
                    Field("path", STRING),
                    Field(
                        "topics",
                        Array(
                            Layout(
                                m.AlterReplicaLogDirTopic,
                                Field("name", STRING),
                                Field("partitions", Array(INT32)),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    response=Layout(
        m.AlterReplicaLogDirsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            Array(
                Layout(
                    m.AlterReplicaLogDirTopicResult,
                    Field("topic_name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.AlterReplicaLogDirPartitionResult,
                                Field("partition_index", INT32),
                                Field("error_code", INT16),
                            )
                        ),
                    ),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.AlterReplicaLogDirsResponse(
        0,
        [
            m.AlterReplicaLogDirTopicResult(
                topic.name, [m.AlterReplicaLogDirPartitionResult(index, code) for index in topic.partitions]
            )
            for directory in request.dirs
            for topic in directory.topics
        ],
    ),
)

# --- DescribeLogDirs (35) ------------------------------------------------------------------------------------

DESCRIBE_LOG_DIRS = KafkaApi(
    apis.DESCRIBE_LOG_DIRS,
    1,
    4,
    first_flexible=2,
    request=Layout(
        m.DescribeLogDirsRequest,
        Field(
            "topics",
            Array(Layout(m.DescribableLogDirTopic, Field("topic", STRING), Field("partitions", Array(INT32)))),
            nullable="0+",
        ),
    ),
    response=Layout(
        m.DescribeLogDirsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "3+", default=0),
        Field(
            "results",
            Array(
                Layout(
                    m.DescribeLogDirsResult,
                    Field("error_code", INT16),
                    Field("log_dir", STRING),
                    Field(
                        "topics",
                        Array(
                            Layout(
                                m.DescribeLogDirsTopic,
                                Field("name", STRING),
                                Field(
                                    "partitions",
                                    Array(
                                        Layout(
                                            m.DescribeLogDirsPartition,
                                            Field("partition_index", INT32),
                                            Field("partition_size", INT64),
                                            Field("offset_lag", INT64),
                                            Field("is_future_key", BOOL),
                                        )
                                    ),
                                ),
                            )
                        ),
                    ),
                    Field("total_bytes", INT64, "4+", default=-1),
                    Field("usable_bytes", INT64, "4+", default=-1),
                )
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeLogDirsResponse(0, code, []),
)

# --- DescribeCluster (60) ------------------------------------------------------------------------------------

DESCRIBE_CLUSTER = KafkaApi(
    apis.DESCRIBE_CLUSTER,
    0,
    1,
    first_flexible=0,
    request=Layout(
        m.DescribeClusterRequest,
        Field("include_cluster_authorized_operations", BOOL, default=False),
        Field("endpoint_type", INT8, "1+", default=m.BROKER_ENDPOINTS),
    ),
    response=Layout(
        m.DescribeClusterResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        _error_message("0+"),
        Field("endpoint_type", INT8, "1+", default=m.BROKER_ENDPOINTS),
        Field("cluster_id", STRING),
        Field("controller_id", INT32),
        Field(
            "brokers",
            Array(
                Layout(
                    m.DescribeClusterBroker,
                    Field("broker_id", INT32),
                    Field("host", STRING),
                    Field("port", INT32),
                    Field("rack", STRING, nullable="0+"),
                )
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
    request=Layout(
        m.DescribeProducersRequest,
        Field(
            "topics",
            Array(
                Layout(m.DescribeProducersTopic, Field("name", STRING), Field("partition_indexes", Array(INT32))),
            ),
        ),
    ),
    response=Layout(
        m.DescribeProducersResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            Array(
                Layout(
                    m.DescribeProducersTopicResponse,
                    Field("name", STRING),
                    Field(
                        "partitions",
                        Array(
                            Layout(
                                m.DescribeProducersPartition,
                                Field("partition_index", INT32),
                                Field("error_code", INT16),
                                _error_message("0+"),
                                Field(
                                    "active_producers",
                                    Array(
                                        Layout(
                                            m.ActiveProducer,
                                            Field("producer_id", INT64),
                                            Field("producer_epoch", INT32),
                                            Field("last_sequence", INT32),
                                            Field("last_timestamp", INT64),
                                            Field("coordinator_epoch", INT32, default=-1),
                                            Field("current_txn_start_offset", INT64, default=-1),
                                        )
                                    ),
                                ),
                            )
                        ),
                    ),
                )
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

APIS = (
    CREATE_TOPICS,
    DELETE_TOPICS,
    DELETE_RECORDS,
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    ALTER_REPLICA_LOG_DIRS,
    DESCRIBE_LOG_DIRS,
    CREATE_PARTITIONS,
    ELECT_LEADERS,
    INCREMENTAL_ALTER_CONFIGS,
    ALTER_PARTITION_REASSIGNMENTS,
    LIST_PARTITION_REASSIGNMENTS,
    DESCRIBE_CLUSTER,
    DESCRIBE_PRODUCERS,
)
