"""Kafka's schemas of topics and partitions: creation, deletion, reassignment, elections; deletion of records."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, error_message, structs
from minibroker.protocol.kafka.types import BOOL, INT8, INT16, INT32, INT64, STRING, UUID, Array

# --- CreateTopics (19) ---------------------------------------------------------------------------------------

_CREATED_CONFIG = Schema(
    None,
    Field("name", STRING),
    Field("value", STRING, nullable="5+"),
    Field("read_only", BOOL),
    Field("config_source", INT8),
    Field("is_sensitive", BOOL),
)
"""KIP-525. Always empty here; DescribeConfigs has the values."""

CREATE_TOPICS = KafkaApi(
    apis.CREATE_TOPICS,
    2,
    7,
    first_flexible=5,
    request=Schema(
        m.CreateTopicsRequest,
        Field(
            "topics",
            structs(
                m.CreatableTopic,
                Field("name", STRING),
                Field("num_partitions", INT32),
                Field("replication_factor", INT16),
                Field(
                    "assignments",
                    structs(m.CreatableAssignment, Field("partition_index", INT32), Field("broker_ids", Array(INT32))),
                ),
                Field(
                    "configs", structs(m.CreatableConfig, Field("name", STRING), Field("value", STRING, nullable="0+"))
                ),
            ),
        ),
        Field("timeout_ms", INT32),
        Field("validate_only", BOOL),
    ),
    response=Schema(
        m.CreateTopicsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            structs(
                m.CreatableTopicResult,
                Field("name", STRING),
                Field("topic_id", UUID, "7+", default=""),
                Field("error_code", INT16),
                error_message("1+"),
                Field("topic_config_error_code", INT16, "5+", tag=0, default=0),
                Field("num_partitions", INT32, "5+", default=-1),
                Field("replication_factor", INT16, "5+", default=-1),
                Field("configs", Array(_CREATED_CONFIG), "5+", nullable="5+", default=()),
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
    request=Schema(
        _DeleteTopicsRequest,
        Field(
            "topics",
            structs(_DeleteTopicState, Field("name", STRING, nullable="6+"), Field("topic_id", UUID)),
            "6+",
            default=[],
        ),
        Field("topic_names", Array(STRING), "0-5", default=[]),
        Field("timeout_ms", INT32),
    ),
    response=Schema(
        m.DeleteTopicsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "responses",
            structs(
                m.DeletableTopicResult,
                Field("name", STRING, nullable="6+", on_null=""),
                Field("topic_id", UUID, "6+", default=""),
                Field("error_code", INT16),
                error_message("5+"),
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
    request=Schema(
        m.CreatePartitionsRequest,
        Field(
            "topics",
            structs(
                m.CreatePartitionsTopic,
                Field("name", STRING),
                Field("count", INT32),
                Field(
                    "assignments",
                    structs(m.CreatePartitionsAssignment, Field("broker_ids", Array(INT32))),
                    nullable="0+",
                ),
            ),
        ),
        Field("timeout_ms", INT32),
        Field("validate_only", BOOL),
    ),
    response=Schema(
        m.CreatePartitionsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            structs(
                m.CreatePartitionsTopicResult, Field("name", STRING), Field("error_code", INT16), error_message("0+")
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
    request=Schema(
        m.DeleteRecordsRequest,
        Field(
            "topics",
            structs(
                m.DeleteRecordsTopic,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(m.DeleteRecordsPartition, Field("partition_index", INT32), Field("offset", INT64)),
                ),
            ),
        ),
        Field("timeout_ms", INT32),
    ),
    response=Schema(
        m.DeleteRecordsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            structs(
                m.DeleteRecordsTopicResult,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.DeleteRecordsPartitionResult,
                        Field("partition_index", INT32),
                        Field("low_watermark", INT64),
                        Field("error_code", INT16),
                    ),
                ),
            ),
        ),
    ),
    failed=_delete_records_failed,
)

# --- ElectLeaders (43) ---------------------------------------------------------------------------------------

ELECT_LEADERS = KafkaApi(
    apis.ELECT_LEADERS,
    0,
    2,
    first_flexible=2,
    request=Schema(
        m.ElectLeadersRequest,
        Field("election_type", INT8, "1+", default=0),
        Field(
            "topic_partitions",
            structs(m.ElectLeadersTopic, Field("topic", STRING), Field("partitions", Array(INT32))),
            nullable="0+",
        ),
        Field("timeout_ms", INT32),
    ),
    response=Schema(
        m.ElectLeadersResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "1+", default=0),
        Field(
            "replica_election_results",
            structs(
                m.ElectLeadersTopicResult,
                Field("topic", STRING),
                Field(
                    "partition_result",
                    structs(
                        m.ElectLeadersPartitionResult,
                        Field("partition_id", INT32),
                        Field("error_code", INT16),
                        error_message("0+"),
                    ),
                ),
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
    request=Schema(
        m.AlterPartitionReassignmentsRequest,
        Field("timeout_ms", INT32),
        Field(
            "topics",
            structs(
                m.ReassignableTopic,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.ReassignablePartition,
                        Field("partition_index", INT32),
                        Field("replicas", Array(INT32), nullable="0+"),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        m.AlterPartitionReassignmentsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("error_message", STRING, nullable="0+", on_null=""),
        Field(
            "responses",
            structs(
                m.ReassignableTopicResponse,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.ReassignablePartitionResponse,
                        Field("partition_index", INT32),
                        Field("error_code", INT16),
                        error_message("0+"),
                    ),
                ),
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
    request=Schema(
        m.ListPartitionReassignmentsRequest,
        Field("timeout_ms", INT32),
        Field(
            "topics",
            structs(m.ListPartitionReassignmentsTopic, Field("name", STRING), Field("partition_indexes", Array(INT32))),
            nullable="0+",
        ),
    ),
    response=Schema(
        m.ListPartitionReassignmentsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("error_message", STRING, nullable="0+", on_null=""),
        Field(
            "topics",
            structs(
                m.OngoingTopicReassignment,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.OngoingPartitionReassignment,
                        Field("partition_index", INT32),
                        Field("replicas", Array(INT32)),
                        Field("adding_replicas", Array(INT32)),
                        Field("removing_replicas", Array(INT32)),
                    ),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: m.ListPartitionReassignmentsResponse(0, code, message, []),
)

APIS = (
    CREATE_TOPICS,
    DELETE_TOPICS,
    DELETE_RECORDS,
    CREATE_PARTITIONS,
    ELECT_LEADERS,
    ALTER_PARTITION_REASSIGNMENTS,
    LIST_PARTITION_REASSIGNMENTS,
)
