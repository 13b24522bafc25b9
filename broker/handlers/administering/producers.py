"""DescribeProducers: the producers that have written to a partition."""

from functools import partial

from minibroker.broker.handlers.services import Services, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    ActiveProducer,
    DescribeProducersPartition,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersTopicResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import NO_SEQUENCE


async def handle_describe_producers(services: Services, request: Request, body: DescribeProducersRequest) -> None:
    """Answer DescribeProducers (KIP-664) for any replica; a follower reports the producers that it knows."""
    check_named_once("a partition", [(topic.name, index) for topic in body.topics for index in topic.partition_indexes])
    slices = Slices()
    topics = []
    for topic in body.topics:
        partitions = (TopicPartition(topic.name, index) for index in topic.partition_indexes)
        described = await slices.map(partial(_producers, services), partitions)
        topics.append(DescribeProducersTopicResponse(topic.name, described))
    request.respond(DescribeProducersResponse(0, topics))


def _producers(services: Services, topic_partition: TopicPartition) -> DescribeProducersPartition:
    try:
        known = services.replicas.partitions.require(topic_partition).log.producers()
    except BrokerError as error:
        return DescribeProducersPartition(topic_partition.partition, error.code, error.detail)
    active = [
        ActiveProducer(
            producer_id,
            producer.epoch,
            producer.batches[-1].last_sequence if producer.batches else NO_SEQUENCE,
            producer.last_seen_ms,
            producer.coordinator_epoch,
            producer.open_since,
        )
        for producer_id, producer in known
    ]
    return DescribeProducersPartition(topic_partition.partition, ErrorCode.NONE, active_producers=active)
