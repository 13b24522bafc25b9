"""Kafka's schemas of a broker's log directories."""

from __future__ import annotations

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, structs
from minibroker.protocol.kafka.types import BOOL, INT16, INT32, INT64, STRING, Array

# --- AlterReplicaLogDirs (34) --------------------------------------------------------------------------------

ALTER_REPLICA_LOG_DIRS = KafkaApi(
    apis.ALTER_REPLICA_LOG_DIRS,
    1,
    2,
    first_flexible=2,
    request=Schema(
        m.AlterReplicaLogDirsRequest,
        Field(
            "dirs",
            structs(
                m.AlterReplicaLogDir,
                Field("path", STRING),
                Field(
                    "topics",
                    structs(m.AlterReplicaLogDirTopic, Field("name", STRING), Field("partitions", Array(INT32))),
                ),
            ),
        ),
    ),
    response=Schema(
        m.AlterReplicaLogDirsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            structs(
                m.AlterReplicaLogDirTopicResult,
                Field("topic_name", STRING),
                Field(
                    "partitions",
                    structs(
                        m.AlterReplicaLogDirPartitionResult, Field("partition_index", INT32), Field("error_code", INT16)
                    ),
                ),
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
    request=Schema(
        m.DescribeLogDirsRequest,
        Field(
            "topics",
            structs(m.DescribableLogDirTopic, Field("topic", STRING), Field("partitions", Array(INT32))),
            nullable="0+",
        ),
    ),
    response=Schema(
        m.DescribeLogDirsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16, "3+", default=0),
        Field(
            "results",
            structs(
                m.DescribeLogDirsResult,
                Field("error_code", INT16),
                Field("log_dir", STRING),
                Field(
                    "topics",
                    structs(
                        m.DescribeLogDirsTopic,
                        Field("name", STRING),
                        Field(
                            "partitions",
                            structs(
                                m.DescribeLogDirsPartition,
                                Field("partition_index", INT32),
                                Field("partition_size", INT64),
                                Field("offset_lag", INT64),
                                Field("is_future_key", BOOL),
                            ),
                        ),
                    ),
                ),
                Field("total_bytes", INT64, "4+", default=-1),
                Field("usable_bytes", INT64, "4+", default=-1),
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeLogDirsResponse(0, code, []),
)

APIS = (ALTER_REPLICA_LOG_DIRS, DESCRIBE_LOG_DIRS)
