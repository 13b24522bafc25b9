"""ListOffsets and OffsetForLeaderEpoch: where to begin reading, and where an epoch ended."""

from broker.handlers.services import Services
from broker.network.request_channel import Request
from protocol.errors import BrokerError, ErrorCode
from protocol.messages import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderPartitionResponse,
    OffsetForLeaderTopicResponse,
)
from protocol.model import TopicPartition


async def handle_list_offsets(services: Services, request: Request) -> None:
    body = request.body
    assert isinstance(body, ListOffsetsRequest)
    request.respond(
        ListOffsetsResponse(
            0,
            [
                ListOffsetsTopicResponse(
                    topic.name, [_list(services, topic.name, asked, body.replica_id) for asked in topic.partitions]
                )
                for topic in body.topics
            ],
        )
    )


def _list(services: Services, topic: str, asked: ListOffsetsPartition, replica_id: int) -> ListOffsetsPartitionResponse:
    try:
        partition = services.replicas.leader(TopicPartition(topic, asked.partition_index))
        timestamp, offset = partition.offset_for(asked.timestamp, asked.current_leader_epoch, replica_id)
    except BrokerError as error:
        return ListOffsetsPartitionResponse(asked.partition_index, error.code)
    return ListOffsetsPartitionResponse(
        asked.partition_index, ErrorCode.NONE, timestamp, offset, partition.leader_epoch
    )


async def handle_offset_for_leader_epoch(services: Services, request: Request) -> None:
    body = request.body
    assert isinstance(body, OffsetForLeaderEpochRequest)
    request.respond(
        OffsetForLeaderEpochResponse(
            0,
            [
                OffsetForLeaderTopicResponse(topic.topic, [_end(services, topic.topic, a) for a in topic.partitions])
                for topic in body.topics
            ],
        )
    )


def _end(services: Services, topic: str, asked: OffsetForLeaderPartition) -> OffsetForLeaderPartitionResponse:
    try:
        partition = services.replicas.leader(TopicPartition(topic, asked.partition))
        epoch, end_offset = partition.end_offset_for_epoch(asked.leader_epoch, asked.current_leader_epoch)
    except BrokerError as error:
        return OffsetForLeaderPartitionResponse(error.code, asked.partition)
    return OffsetForLeaderPartitionResponse(ErrorCode.NONE, asked.partition, epoch, end_offset)
