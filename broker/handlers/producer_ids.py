"""InitProducerId: an id for an idempotent producer. DescribeProducers: the producers that have written to a
partition."""

import logging

from minibroker.broker.handlers.services import Services, answer_later, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    ActiveProducer,
    DescribeProducersPartition,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersTopicResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import NO_SEQUENCE

logger = logging.getLogger("minibroker.transactions")

NO_TRANSACTIONS = "there are no transactions yet: remove transactional.id; the producer can be idempotent without it"
TIMEOUT_MS = 5_000
"""The limit for fetching a new block of ids. After that, the client asks again, perhaps another broker."""


async def handle_init_producer_id(services: Services, request: Request, body: InitProducerIdRequest) -> None:
    """Answer with an unused producer id, with epoch 0."""
    if body.transactional_id is not None:
        warn_of_transactions(request, body.transactional_id)
        raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, NO_TRANSACTIONS)
    answer_later(services, request, TIMEOUT_MS, lambda: _grant(services, request))


def warn_of_transactions(request: Request, transactional_id: str) -> None:
    """Log the rejection once per connection, because not all clients show the reason."""
    session = request.source.session
    if not session.wants_transactions:
        session.wants_transactions = True
        logger.warning(
            "%s (%r) was refused transactional.id %r: there are no transactions yet. A producer without one can be "
            "idempotent",
            *(request.peer, request.client_id, transactional_id),
        )


async def _grant(services: Services, request: Request) -> None:
    producer_id = await services.producer_ids.next()
    request.respond(InitProducerIdResponse(0, ErrorCode.NONE, producer_id, 0))


async def handle_describe_producers(services: Services, request: Request, body: DescribeProducersRequest) -> None:
    """Answer DescribeProducers (KIP-664) for any replica; a follower reports the producers that it knows."""
    check_named_once("a partition", [(topic.name, index) for topic in body.topics for index in topic.partition_indexes])
    request.respond(
        DescribeProducersResponse(
            0,
            [
                DescribeProducersTopicResponse(
                    topic.name,
                    [_producers(services, TopicPartition(topic.name, index)) for index in topic.partition_indexes],
                )
                for topic in body.topics
            ],
        )
    )


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
        )
        for producer_id, producer in known
    ]
    return DescribeProducersPartition(topic_partition.partition, ErrorCode.NONE, active_producers=active)
