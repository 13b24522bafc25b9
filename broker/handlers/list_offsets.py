"""ListOffsets and OffsetForLeaderEpoch: offsets by time, and the ends of leader epochs.

A request may name every partition of the cluster, and each timestamp needs some reading: up to a whole segment if the
records that its index points to are deleted, and a batch may have a million records. The work is therefore done in
slices, between which other tasks run, and searches that take longer than a slice take turns. A connection waits for its
own search, and no handler task does.
"""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.handler_pool import Continuation
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.reading import offset_for
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    MAX_TIMESTAMP,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderPartitionResponse,
    OffsetForLeaderTopicResponse,
)
from minibroker.protocol.model import TopicPartition


async def handle_list_offsets(services: Services, request: Request, body: ListOffsetsRequest) -> Continuation | None:
    answering = _answer(services, request, body)
    if any(asked.timestamp >= 0 or asked.timestamp == MAX_TIMESTAMP for t in body.topics for asked in t.partitions):
        return answering
    await answering
    return None


async def _answer(services: Services, request: Request, body: ListOffsetsRequest) -> None:
    slices = Slices()
    topics = []
    for topic in body.topics:
        answers = []
        for asked in topic.partitions:
            if request.closed:
                return
            answers.append(await _list(services, request, topic, asked, body))
            await slices.breathe()
        topics.append(ListOffsetsTopicResponse(topic.name, answers))
    request.respond(ListOffsetsResponse(0, topics))


async def _list(
    services: Services, request: Request, topic: ListOffsetsTopic, asked: ListOffsetsPartition, body: ListOffsetsRequest
) -> ListOffsetsPartitionResponse:
    try:
        partition = services.replicas.partitions.require(TopicPartition(topic.name, asked.partition_index))
        partition.check_topic_id(topic.topic_id)
        steps = offset_for(
            partition, asked.timestamp, asked.current_leader_epoch, body.replica_id, body.isolation_level
        )
        found = await services.replicas.searches.finish(steps, lambda: request.closed)
    except BrokerError as error:
        return ListOffsetsPartitionResponse(asked.partition_index, error.code)
    timestamp, offset = found or (-1, -1)
    epoch_at = partition.log.epoch_at
    return ListOffsetsPartitionResponse(
        asked.partition_index, ErrorCode.NONE, timestamp, offset, epoch_at(offset), epoch_at(offset - 1)
    )


async def handle_offset_for_leader_epoch(
    services: Services, request: Request, body: OffsetForLeaderEpochRequest
) -> None:
    slices = Slices()
    topics = []
    for topic in body.topics:
        answers = []
        for asked in topic.partitions:
            answers.append(_end(services, topic.topic, asked))
            await slices.breathe()
        topics.append(OffsetForLeaderTopicResponse(topic.topic, answers))
    request.respond(OffsetForLeaderEpochResponse(0, topics))


def _end(services: Services, topic: str, asked: OffsetForLeaderPartition) -> OffsetForLeaderPartitionResponse:
    try:
        partition = services.replicas.partitions.require(TopicPartition(topic, asked.partition))
        epoch, end_offset = partition.end_offset_for_epoch(asked.leader_epoch, asked.current_leader_epoch)
    except BrokerError as error:
        return OffsetForLeaderPartitionResponse(error.code, asked.partition)
    return OffsetForLeaderPartitionResponse(ErrorCode.NONE, asked.partition, epoch, end_offset)
