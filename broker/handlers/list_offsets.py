"""ListOffsets and OffsetForLeaderEpoch: offsets by time, and the ends of leader epochs.

A request may name every partition of the cluster, and each timestamp needs some reading: up to a whole segment if the
records that its index points to are deleted. The work is therefore done in slices, between which other tasks run.
"""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.broker.replication.reading import offset_for
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
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


async def handle_list_offsets(services: Services, request: Request, body: ListOffsetsRequest) -> None:
    slices = Slices()
    topics = []
    for topic in body.topics:
        answers = []
        for asked in topic.partitions:
            answers.append(await _list(services, topic, asked, body.replica_id, slices))
            await slices.breathe()
        topics.append(ListOffsetsTopicResponse(topic.name, answers))
    request.respond(ListOffsetsResponse(0, topics))


async def _list(
    services: Services, topic: ListOffsetsTopic, asked: ListOffsetsPartition, replica_id: int, slices: Slices
) -> ListOffsetsPartitionResponse:
    try:
        partition = services.replicas.partitions.require(TopicPartition(topic.name, asked.partition_index))
        partition.check_topic_id(topic.topic_id)
        timestamp, offset = await slices.finish(
            offset_for(partition, asked.timestamp, asked.current_leader_epoch, replica_id)
        )
    except BrokerError as error:
        return ListOffsetsPartitionResponse(asked.partition_index, error.code)
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
