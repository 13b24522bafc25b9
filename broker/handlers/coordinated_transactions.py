"""The requests that the coordinator of a transactional id answers. The leader's side is in `transactions`."""

import asyncio
from collections.abc import Sequence
from functools import partial

from minibroker.broker.handlers.services import Services, answer_later, check_named_once, respond_sized
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import Slices
from minibroker.broker.transactions.listing import describe
from minibroker.broker.transactions.transaction import ProducerIdAndEpoch
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import InitProducerIdRequest, InitProducerIdResponse
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition, internal_partition

GRANT_TIMEOUT_MS = 5_000
"""The limit of an answer that may need a block of producer ids from ZooKeeper. After that, the client asks again,
perhaps another broker."""
TIMEOUT_MS = 10_000
"""The limit of the other answers. A write that is not replicated ends earlier, with an error that says so."""
MOST_AT_ONCE = 100
"""Transactions of a request that are extended at a time."""
ID_BYTES, PARTITION_BYTES = 32, 4
"""What each takes in an answer beside its names, about."""

_E = ErrorCode


async def handle_init_producer_id(services: Services, request: Request, body: InitProducerIdRequest) -> None:
    """Grant a producer id and an epoch. Without a transactional id: an unused id, with epoch 0."""
    answer_later(services, request, GRANT_TIMEOUT_MS, lambda: _grant(services, request, body))


async def _grant(services: Services, request: Request, body: InitProducerIdRequest) -> None:
    if body.transactional_id is None:
        producer_id = await services.producer_ids.next()
        request.respond(InitProducerIdResponse(0, _E.NONE, producer_id, 0))
        return
    expected = None if body.producer_id < 0 else ProducerIdAndEpoch(body.producer_id, body.producer_epoch)
    granted = await services.transactions.coordinator.initialize(
        body.transactional_id, body.transaction_timeout_ms, expected, body.attempt
    )
    if isinstance(granted, ErrorCode):
        request.respond(InitProducerIdResponse(0, granted))
    else:
        request.respond(InitProducerIdResponse(0, _E.NONE, granted.producer_id, granted.epoch))


async def handle_add_partitions_to_txn(services: Services, request: Request, body: t.AddPartitionsToTxnRequest) -> None:
    check_named_once("a transactional id", [each.transactional_id for each in body.transactions])

    async def add() -> None:
        request.respond(await extend_all(services, body))

    answer_later(services, request, TIMEOUT_MS, add)


async def extend_all(services: Services, body: t.AddPartitionsToTxnRequest) -> t.AddPartitionsToTxnResponse:
    """Answer as the coordinator of all these transactional ids."""
    answered = []
    for start in range(0, len(body.transactions), MOST_AT_ONCE):
        some = body.transactions[start : start + MOST_AT_ONCE]
        answered += await asyncio.gather(*(_extend(services, each) for each in some))
    return t.AddPartitionsToTxnResponse(0, _E.NONE, answered)


async def _extend(services: Services, asked: t.TransactionToExtend) -> t.ExtendedTransaction:
    """Add the partitions to the transaction, all or none, or say which ones belong to it."""
    slices = Slices()
    partitions: list[TopicPartition] = []
    for topic in asked.topics:
        partitions += await slices.map(partial(TopicPartition, topic.name), topic.partitions)
    producer = ProducerIdAndEpoch(asked.producer_id, asked.producer_epoch)
    coordinator = services.transactions.coordinator
    if asked.verify_only:
        codes = await coordinator.verify(asked.transactional_id, producer, partitions)
    else:
        codes = await _unknown(services, partitions, slices)
        if not codes:
            code = await coordinator.add_partitions(asked.transactional_id, producer, partitions)
            codes = dict.fromkeys(partitions, code)
    slices = Slices()  # the wait for the coordinator was no work
    topics: dict[str, list[t.TransactionPartitionResult]] = {}
    for topic_partition, code in codes.items():
        topics.setdefault(topic_partition.topic, []).append(
            t.TransactionPartitionResult(topic_partition.partition, code)
        )
        await slices.breathe()
    return t.ExtendedTransaction(
        asked.transactional_id, [t.TransactionTopicResult(name, results) for name, results in topics.items()]
    )


async def _unknown(
    services: Services, partitions: Sequence[TopicPartition], slices: Slices
) -> dict[TopicPartition, ErrorCode]:
    """Return an error for each partition if one of them does not exist."""
    unknown = set()
    for topic_partition in partitions:
        if topic_partition.topic == TRANSACTIONS_TOPIC or services.metadata.partition(topic_partition) is None:
            unknown.add(topic_partition)
        await slices.breathe()
    if not unknown:
        return {}
    return {
        topic_partition: _E.UNKNOWN_TOPIC_OR_PARTITION if topic_partition in unknown else _E.OPERATION_NOT_ATTEMPTED
        for topic_partition in partitions
    }


async def handle_add_offsets_to_txn(services: Services, request: Request, body: t.AddOffsetsToTxnRequest) -> None:
    partitions = services.metadata.partition_count(OFFSETS_TOPIC)
    if not partitions:
        request.respond(t.AddOffsetsToTxnResponse(0, _E.COORDINATOR_NOT_AVAILABLE))
        return
    offsets = TopicPartition(OFFSETS_TOPIC, internal_partition(body.group_id, partitions))
    producer = ProducerIdAndEpoch(body.producer_id, body.producer_epoch)

    async def add() -> None:
        code = await services.transactions.coordinator.add_partitions(body.transactional_id, producer, [offsets])
        request.respond(t.AddOffsetsToTxnResponse(0, code))

    answer_later(services, request, TIMEOUT_MS, add)


async def handle_end_txn(services: Services, request: Request, body: t.EndTxnRequest) -> None:
    """Answer once the outcome is decided for good. The partitions are told after that."""
    producer = ProducerIdAndEpoch(body.producer_id, body.producer_epoch)

    async def end() -> None:
        granted = await services.transactions.coordinator.end(
            body.transactional_id, producer, committed=body.committed, raises_epoch=body.raises_epoch
        )
        if isinstance(granted, ErrorCode):
            request.respond(t.EndTxnResponse(0, granted))
        else:
            request.respond(t.EndTxnResponse(0, _E.NONE, granted.producer_id, granted.epoch))

    answer_later(services, request, TIMEOUT_MS, end)


async def handle_describe_transactions(
    services: Services, request: Request, body: t.DescribeTransactionsRequest
) -> None:
    # each once: a description may be large, and a small request could name a transaction often
    ids = dict.fromkeys(body.transactional_ids)
    described = await Slices().map(partial(describe, services.transactions.terms), ids)
    topics = (topic for each in described for topic in each.topics)
    size = sum(len(topic.name) + PARTITION_BYTES * len(topic.partitions) for topic in topics)
    respond_sized(services, request, size, t.DescribeTransactionsResponse(0, described))


async def handle_list_transactions(services: Services, request: Request, body: t.ListTransactionsRequest) -> None:
    response = await Slices().finish(services.transactions.list(body))
    size = sum(len(each.transactional_id) + ID_BYTES for each in response.transaction_states)
    respond_sized(services, request, size, response)
