"""Hanging transactions: open in the log of a partition, and unknown to every coordinator, so that nothing ends them
(KIP-664). Consumers with read_committed wait at them for ever.

Clusters of which every leader asks the coordinator before it appends (KIP-890) do not produce them. They remain from
`transaction.partition.verification.enable=false`, and from a `__transaction_state` that was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigResource
from minibroker.client.administering.transactions import ProducerState, TransactionalIdErrors, TransactionDescription
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition

MAX_TIMEOUT = "transaction.max.timeout.ms"
DEFAULT_MAX_TIMEOUT_MS = 900_000
GRACE_MS = 5 * 60_000
"""Time beyond the longest transaction time-out after which an open transaction is suspected, as in Kafka."""


class OpenTransaction(NamedTuple):
    partition: TopicPartition
    producer: ProducerState


def open_transactions(
    producers: Mapping[TopicPartition, Iterable[ProducerState]], before_ms: float
) -> list[OpenTransaction]:
    """Return the transactions that are open and to which nothing was written since `before_ms`."""
    return [
        OpenTransaction(partition, producer)
        for partition, states in sorted(producers.items())
        for producer in states
        if producer.current_txn_start_offset is not None and producer.last_timestamp_ms < before_ms
    ]


def knows(transaction: TransactionDescription, found: OpenTransaction) -> bool:
    """Whether the coordinator will end this open transaction: it counts the partition to the one of its producer, and
    its marker will not have an epoch below that of the log."""
    producer = found.producer
    return (
        transaction.producer_id == producer.producer_id
        and transaction.producer_epoch >= producer.producer_epoch
        and found.partition in transaction.partitions
    )


def unknown_to_all(
    found: Iterable[OpenTransaction], transactions: Sequence[TransactionDescription]
) -> list[OpenTransaction]:
    """Return those that no coordinator will end."""
    return [each for each in found if not any(knows(transaction, each) for transaction in transactions)]


def still_open(
    found: Iterable[OpenTransaction], producers: Mapping[TopicPartition, Iterable[ProducerState]]
) -> list[OpenTransaction]:
    """Return those that were not ended, nor continued, since they were found."""
    return [each for each in found if each.producer in producers.get(each.partition, ())]


async def transactions_of(admin: Admin, found: Iterable[OpenTransaction]) -> list[TransactionDescription]:
    """Return what the coordinators know of the producers of these transactions. Raises BrokersFailed if a broker does
    not answer: it may be the coordinator."""
    producer_ids = sorted({each.producer.producer_id for each in found})
    if not producer_ids:
        return []
    listed = await admin.list_transactions(producer_ids=producer_ids)
    try:
        described = await admin.describe_transactions(each.transactional_id for each in listed)
    except TransactionalIdErrors as failed:
        for error in failed.errors.values():
            if not (isinstance(error, BrokerError) and error.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND):
                raise
        described = failed.results  # the others were forgotten meanwhile
    return list(described.values())


async def hanging(
    admin: Admin, producers: Mapping[TopicPartition, Iterable[ProducerState]], before_ms: float
) -> list[OpenTransaction]:
    """Return the hanging transactions to which nothing was written since `before_ms`. The coordinators are asked after
    the logs, and the logs once more, since a transaction may end meanwhile."""
    found = open_transactions(producers, before_ms)
    found = unknown_to_all(found, await transactions_of(admin, found))
    if not found:
        return []
    return still_open(found, await admin.describe_producers(dict.fromkeys(each.partition for each in found)))


async def longest_timeout_ms(admin: Admin) -> int:
    """Return the longest `transaction.max.timeout.ms` of the live brokers."""
    resources = [ConfigResource.of_broker(broker.id) for broker in (await admin.describe_cluster()).brokers]
    described = await admin.describe_configs(resources, names=[MAX_TIMEOUT])
    values = [int(entries[MAX_TIMEOUT].value or 0) for entries in described.values() if MAX_TIMEOUT in entries]
    return max(values, default=DEFAULT_MAX_TIMEOUT_MS)
