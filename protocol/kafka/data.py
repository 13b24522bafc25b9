"""Kafka's schemas of the data path: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, InitProducerId.

The sources are ProduceRequest.json etc. in Kafka's `clients/src/main/resources/common/message`.
"""

from __future__ import annotations

import msgspec
from msgspec import field

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, error_message, structs
from minibroker.protocol.kafka.types import INT8, INT16, INT32, INT64, RECORDS, STRING, UUID, Array

NO_RECORDS = memoryview(b"")

# --- The current leader, beside an error that reports another leader (KIP-951) -------------------------------

_OF_ANOTHER_LEADER = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


class _CurrentLeader(m.Message):
    leader_id: m.Int32 = -1
    leader_epoch: m.Int32 = -1


_NOBODY = _CurrentLeader()


def _leader_of(partition: m.ProducePartitionResponse | m.FetchPartitionResponse) -> _CurrentLeader:
    if partition.error_code not in _OF_ANOTHER_LEADER:
        return _NOBODY
    return _CurrentLeader(partition.current_leader_id, partition.current_leader_epoch)


def _current_leader(versions: str, tag: int) -> Field:
    return Field(
        "current_leader",
        Schema(_CurrentLeader, Field("leader_id", INT32), Field("leader_epoch", INT32)),
        versions,
        tag=tag,
        default=_NOBODY,
        get=_leader_of,
    )


def _node_endpoints(versions: str) -> Field:
    return Field(
        "node_endpoints",
        structs(
            m.MetadataBroker,
            Field("node_id", INT32),
            Field("host", STRING),
            Field("port", INT32),
            Field("rack", STRING, nullable="0+"),
        ),
        versions,
        tag=0,
        default=[],
    )


# --- Produce (0) ---------------------------------------------------------------------------------------------


def _produce_failed(request: m.ProduceRequest, code: ErrorCode, message: str) -> m.ProduceResponse:
    return m.ProduceResponse(
        [
            m.ProduceTopicResponse(
                topic.name,
                [m.ProducePartitionResponse(part.index, code, error_message=message) for part in topic.partition_data],
            )
            for topic in request.topic_data
        ]
    )


def _produce_request(ours: m.ProduceRequest, version: int) -> m.ProduceRequest:
    ours.adds_partitions = version >= 12
    return ours


PRODUCE = KafkaApi(
    apis.PRODUCE,
    3,
    12,
    max_elements=2 * m.MAX_PRODUCE_PARTITIONS,  # each may be the only one of its topic
    advertised_from=0,  # librdkafka rejects a broker that lacks Produce's first versions (KIP-896)
    first_flexible=9,
    request=Schema(
        m.ProduceRequest,
        Field("transactional_id", STRING, "3+", nullable="3+", default=None),
        Field("acks", INT16),
        Field("timeout_ms", INT32),
        Field(
            "topic_data",
            structs(
                m.ProduceTopic,
                Field("name", STRING),
                Field(
                    "partition_data",
                    structs(
                        m.ProducePartition,
                        Field("index", INT32),
                        Field("records", RECORDS, nullable="0+", on_null=NO_RECORDS),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        m.ProduceResponse,
        Field(
            "responses",
            structs(
                m.ProduceTopicResponse,
                Field("name", STRING),
                Field(
                    "partition_responses",
                    structs(
                        m.ProducePartitionResponse,
                        Field("index", INT32),
                        Field("error_code", INT16),
                        Field("base_offset", INT64),
                        Field("log_append_time_ms", INT64, "2+"),
                        Field("log_start_offset", INT64, "5+"),
                        Field(
                            "record_errors",
                            structs(
                                m.ProduceRecordError,
                                Field("batch_index", INT32),
                                Field("batch_index_error_message", STRING, nullable="8+"),
                            ),
                            "8+",
                            default=[],
                        ),
                        error_message("8+"),
                        _current_leader("10+", tag=0),
                    ),
                ),
            ),
        ),
        Field("throttle_time_ms", INT32, "1+"),
        _node_endpoints("10+"),
    ),
    to_ours=_produce_request,
    failed=_produce_failed,
)

# --- Fetch (1) -----------------------------------------------------------------------------------------------


def _fetch_failed(request: m.FetchRequest, code: ErrorCode, message: str) -> m.FetchResponse:
    return m.FetchResponse(
        0,
        code,
        [
            m.FetchTopicResponse(
                topic.topic,
                [m.FetchPartitionResponse(part.partition, code) for part in topic.partitions],
                topic.topic_id,
            )
            for topic in request.topics
        ],
    )


class _ReplicaState(m.Message):
    replica_id: m.Int32 = -1
    replica_epoch: m.Int64 = -1


_NO_REPLICA = _ReplicaState()


class _FetchRequest(m.FetchRequest):
    """The replica is a number up to version 14, and a struct from 15 on (KIP-903)."""

    replica_state: _ReplicaState = field(default_factory=_ReplicaState)


def _fetch_request(wire: _FetchRequest, version: int) -> m.FetchRequest:
    if version >= 15:
        wire.replica_id, wire.replica_epoch = wire.replica_state.replica_id, wire.replica_state.replica_epoch
    return wire


def _diverging_epoch(partition: m.FetchPartitionResponse) -> m.EpochEndOffset | None:
    """The epoch beside OFFSET_OUT_OF_RANGE is for minibroker's own clients, so it is left out with an error."""
    return None if partition.error_code else partition.diverging_epoch


FETCH = KafkaApi(
    apis.FETCH,
    4,
    17,
    first_flexible=12,
    request=Schema(
        _FetchRequest,
        Field("cluster_id", STRING, "12+", nullable="12+", tag=0, default=None),
        Field("replica_id", INT32, "0-14", default=-1),
        Field(
            "replica_state",
            Schema(_ReplicaState, Field("replica_id", INT32), Field("replica_epoch", INT64)),
            "15+",
            tag=1,
            default=_NO_REPLICA,
        ),
        Field("max_wait_ms", INT32),
        Field("min_bytes", INT32),
        Field("max_bytes", INT32),
        Field("isolation_level", INT8),
        # Fetch sessions (KIP-227) are declined with a session id of 0 in the response.
        Field("session_id", INT32, "7+", default=0),
        Field("session_epoch", INT32, "7+", default=-1),
        Field(
            "topics",
            structs(
                m.FetchTopic,
                Field("topic", STRING, "0-12", default=""),
                Field("topic_id", UUID, "13+", default=""),
                Field(
                    "partitions",
                    structs(
                        m.FetchPartition,
                        Field("partition", INT32),
                        Field("current_leader_epoch", INT32, "9+", default=-1),
                        Field("fetch_offset", INT64),
                        Field("last_fetched_epoch", INT32, "12+", default=-1),
                        Field("log_start_offset", INT64, "5+", default=-1),
                        Field("partition_max_bytes", INT32),
                    ),
                ),
            ),
        ),
        Field(
            "forgotten_topics_data",
            structs(
                None,
                Field("topic", STRING, "0-12", default=""),
                Field("topic_id", UUID, "13+", default=""),
                Field("partitions", Array(INT32)),
            ),
            "7+",
            default=(),
        ),
        Field("rack_id", STRING, "11+", default=""),
    ),
    response=Schema(
        m.FetchResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "7+", default=0),
        Field("session_id", INT32, "7+", default=0),
        Field(
            "responses",
            structs(
                m.FetchTopicResponse,
                Field("topic", STRING, "0-12", default=""),
                Field("topic_id", UUID, "13+", default=""),
                Field(
                    "partitions",
                    structs(
                        m.FetchPartitionResponse,
                        Field("partition_index", INT32),
                        Field("error_code", INT16),
                        Field("high_watermark", INT64),
                        Field("last_stable_offset", INT64),
                        Field("log_start_offset", INT64, "5+"),
                        Field(
                            "diverging_epoch",
                            Schema(m.EpochEndOffset, Field("epoch", INT32), Field("end_offset", INT64)),
                            "12+",
                            tag=0,
                            default=None,
                            get=_diverging_epoch,
                        ),
                        _current_leader("12+", tag=1),
                        Field(
                            "aborted_transactions",
                            structs(m.AbortedTransaction, Field("producer_id", INT64), Field("first_offset", INT64)),
                            nullable="4+",
                            on_null=[],
                        ),
                        Field("preferred_read_replica", INT32, "11+", default=-1),
                        Field("records", RECORDS, nullable="0+", on_null=NO_RECORDS),
                    ),
                ),
            ),
        ),
        _node_endpoints("16+"),
    ),
    to_ours=_fetch_request,
    failed=_fetch_failed,
)

# --- ListOffsets (2) -----------------------------------------------------------------------------------------


def _list_offsets_failed(request: m.ListOffsetsRequest, code: ErrorCode, message: str) -> m.ListOffsetsResponse:
    return m.ListOffsetsResponse(
        0,
        [
            m.ListOffsetsTopicResponse(
                topic.name, [m.ListOffsetsPartitionResponse(part.partition_index, code) for part in topic.partitions]
            )
            for topic in request.topics
        ],
    )


LIST_OFFSETS = KafkaApi(
    apis.LIST_OFFSETS,
    1,
    9,
    first_flexible=6,
    request=Schema(
        m.ListOffsetsRequest,
        Field("replica_id", INT32),
        Field("isolation_level", INT8, "2+", default=0),
        Field(
            "topics",
            structs(
                m.ListOffsetsTopic,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.ListOffsetsPartition,
                        Field("partition_index", INT32),
                        Field("current_leader_epoch", INT32, "4+", default=-1),
                        Field("timestamp", INT64),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        m.ListOffsetsResponse,
        Field("throttle_time_ms", INT32, "2+", default=0),
        Field(
            "topics",
            structs(
                m.ListOffsetsTopicResponse,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.ListOffsetsPartitionResponse,
                        Field("partition_index", INT32),
                        Field("error_code", INT16),
                        Field("timestamp", INT64),
                        Field("offset", INT64),
                        Field("leader_epoch", INT32, "4+"),
                    ),
                ),
            ),
        ),
    ),
    failed=_list_offsets_failed,
)

# --- OffsetForLeaderEpoch (23) -------------------------------------------------------------------------------


def _epoch_failed(
    request: m.OffsetForLeaderEpochRequest, code: ErrorCode, message: str
) -> m.OffsetForLeaderEpochResponse:
    return m.OffsetForLeaderEpochResponse(
        0,
        [
            m.OffsetForLeaderTopicResponse(
                topic.topic, [m.OffsetForLeaderPartitionResponse(code, part.partition) for part in topic.partitions]
            )
            for topic in request.topics
        ],
    )


OFFSET_FOR_LEADER_EPOCH = KafkaApi(
    apis.OFFSET_FOR_LEADER_EPOCH,
    2,
    4,
    first_flexible=4,
    request=Schema(
        m.OffsetForLeaderEpochRequest,
        Field("replica_id", INT32, "3+", default=-1),
        Field(
            "topics",
            structs(
                m.OffsetForLeaderTopic,
                Field("topic", STRING),
                Field(
                    "partitions",
                    structs(
                        m.OffsetForLeaderPartition,
                        Field("partition", INT32),
                        Field("current_leader_epoch", INT32),
                        Field("leader_epoch", INT32),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        m.OffsetForLeaderEpochResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "topics",
            structs(
                m.OffsetForLeaderTopicResponse,
                Field("topic", STRING),
                Field(
                    "partitions",
                    structs(
                        m.OffsetForLeaderPartitionResponse,
                        Field("error_code", INT16),
                        Field("partition", INT32),
                        Field("leader_epoch", INT32),
                        Field("end_offset", INT64),
                    ),
                ),
            ),
        ),
    ),
    failed=_epoch_failed,
)

# --- InitProducerId (22) -------------------------------------------------------------------------------------


def _init_producer_id_response(ours: m.InitProducerIdResponse, version: int) -> m.InitProducerIdResponse:
    if version < 4 and ours.error_code == ErrorCode.PRODUCER_FENCED:
        return msgspec.structs.replace(ours, error_code=ErrorCode.INVALID_PRODUCER_EPOCH)
    return ours


INIT_PRODUCER_ID = KafkaApi(
    apis.INIT_PRODUCER_ID,
    0,
    5,
    first_flexible=2,
    request=Schema(
        m.InitProducerIdRequest,
        Field("transactional_id", STRING, nullable="0+"),
        Field("transaction_timeout_ms", INT32),
        Field("producer_id", INT64, "3+"),
        Field("producer_epoch", INT16, "3+"),
    ),
    response=Schema(
        m.InitProducerIdResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        Field("producer_id", INT64),
        Field("producer_epoch", INT16),
    ),
    from_ours=_init_producer_id_response,
    failed=lambda request, code, message: m.InitProducerIdResponse(0, code),
)

APIS = (PRODUCE, FETCH, LIST_OFFSETS, INIT_PRODUCER_ID, OFFSET_FOR_LEADER_EPOCH)
