"""DescribeLogDirs: the replicas, space and state of each log directory of this broker. AlterReplicaLogDirs: moves
replicas between them."""

import logging
from collections.abc import Collection

from minibroker.broker.handlers.services import Services, respond_sized
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.storage.log import Log
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from minibroker.protocol.model import TopicPartition

logger = logging.getLogger("minibroker.handlers")

REPLICA_BYTES = 24
"""What a replica takes in an answer."""
MOST_LOGGED = 10
"""Refusals of a request that are logged one by one."""


async def handle_describe_log_dirs(services: Services, request: Request, body: DescribeLogDirsRequest) -> None:
    wanted = None
    if body.topics is not None:
        wanted = {TopicPartition(topic.topic, number) for topic in body.topics for number in topic.partitions}
    log_dirs = services.replicas.log_dirs
    results = []
    for path in log_dirs.paths:
        total_bytes, usable_bytes = await log_dirs.space(path)
        described_topics = await _topics(services, log_dirs.logs_in(path), wanted)
        for replica, size, lag in services.replicas.mover.futures_in(path):
            if wanted is None or replica in wanted:
                described = DescribeLogDirsPartition(replica.partition, size, lag, is_future_key=True)
                of_topic = described_topics.setdefault(replica.topic, DescribeLogDirsTopic(replica.topic, []))
                of_topic.partitions.append(described)
        reason = log_dirs.offline.get(path)  # read last: the directory may have failed meanwhile
        if reason is None:
            result = DescribeLogDirsResult(
                ErrorCode.NONE, path, [*described_topics.values()], total_bytes, usable_bytes
            )
        else:
            result = DescribeLogDirsResult(ErrorCode.KAFKA_STORAGE_ERROR, path, [], error_message=reason[:1_000])
        results.append(result)
    topics = [topic for result in results for topic in result.topics]
    size = sum(len(topic.name) + REPLICA_BYTES * len(topic.partitions) for topic in topics)
    respond_sized(services, request, size, DescribeLogDirsResponse(0, ErrorCode.NONE, results))


async def _topics(
    services: Services, logs: list[Log], wanted: Collection[TopicPartition] | None
) -> dict[str, DescribeLogDirsTopic]:
    topics: dict[str, DescribeLogDirsTopic] = {}
    slices = Slices()
    for log in sorted(logs, key=lambda log: log.partition):
        await slices.breathe()
        topic, index = log.partition
        if wanted is not None and log.partition not in wanted:
            continue
        replica = services.replicas.partitions.get(log.partition)
        lag = -1 if replica is None else max(0, replica.high_watermark - log.log_end_offset)
        described = DescribeLogDirsPartition(index, log.size, lag)
        topics.setdefault(topic, DescribeLogDirsTopic(topic, [])).partitions.append(described)
    return topics


async def handle_alter_replica_log_dirs(services: Services, request: Request, body: AlterReplicaLogDirsRequest) -> None:
    """Begin or reject each move by itself. If a replica is named twice, the last directory counts, as in Kafka. Unlike
    Kafka, this broker does not remember a directory for a replica that it does not have."""
    wanted = {
        TopicPartition(topic.name, index): directory.path
        for directory in body.dirs
        for topic in directory.topics
        for index in topic.partitions
    }
    results: dict[str, AlterReplicaLogDirTopicResult] = {}
    slices = Slices()
    refusals = 0
    for (topic, index), path in wanted.items():
        code = ErrorCode.NONE
        try:
            services.replicas.mover.move(TopicPartition(topic, index), path)
        except BrokerError as error:
            refusals += 1
            if refusals <= MOST_LOGGED:
                logger.warning("AlterReplicaLogDirs: %s", error)
            code = error.code
        result = results.setdefault(topic, AlterReplicaLogDirTopicResult(topic, []))
        result.partitions.append(AlterReplicaLogDirPartitionResult(index, code))
        await slices.breathe()
    if refusals > MOST_LOGGED:
        logger.warning("AlterReplicaLogDirs: %d more replicas are refused", refusals - MOST_LOGGED)
    request.respond(AlterReplicaLogDirsResponse(0, [*results.values()]))
