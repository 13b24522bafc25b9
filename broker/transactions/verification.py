"""Asks the coordinators of transactions about partitions that are written to (KIP-890).

A leader asks before it appends the first batch of a transaction: see `replication.questions`. One question has the
partitions of one produce request. It goes to the coordinator at once, over a connection on which answers may overtake
each other.

Rejected: gathering questions while one is under way (Kafka's AddPartitionsToTxnManager). The coordinator waits for a
moment with its answer while the previous transaction of the id ends, and the other producers would wait as well.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.cluster.peers import Peers
from minibroker.protocol.apis import ADD_PARTITIONS_TO_TXN
from minibroker.protocol.errors import ERRORS, BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    TransactionToExtend,
    TransactionTopic,
)
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition, internal_partition

logger = logging.getLogger("minibroker.transactions")

SHOWN_OF_ID = 200
"""Characters of a transactional id in an error: a message has a limit, too."""
REQUEST_TIMEOUT_S = 10.0
"""The limit of one question. The producer's connection waits for the answer."""

_E = ErrorCode


class TransactionVerifier:
    def __init__(
        self,
        broker_id: int,
        metadata: MetadataCache,
        peers: Peers,
        local: Callable[[AddPartitionsToTxnRequest], Awaitable[AddPartitionsToTxnResponse]],
        is_enabled: Callable[[], bool] = lambda: True,
    ) -> None:
        """`local` answers if this broker is the coordinator. `is_enabled` returns the present value of
        `transaction.partition.verification.enable`."""
        self._broker_id = broker_id
        self._metadata = metadata
        self._peers = peers
        self._local = local
        self._is_enabled = is_enabled
        self.failed = 0
        """Questions that were not answered so far."""
        self.refused = 0
        """Questions so far to which the coordinator answered that a partition may not be written to, or not yet."""

    def is_waived(self, *, adds: bool) -> bool:
        """Whether batches may be appended without asking. Partitions that join by being written to are always asked
        about, as the coordinator must hear of them."""
        return not adds and not self._is_enabled()

    async def verify(
        self,
        topic_partition: TopicPartition,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        adds: bool,
    ) -> ErrorCode:
        """As `verify_all`, for one partition."""
        codes = await self.verify_all([topic_partition], transactional_id, producer_id, producer_epoch, adds=adds)
        return codes[topic_partition]

    async def verify_all(
        self,
        partitions: Sequence[TopicPartition],
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        adds: bool,
    ) -> dict[TopicPartition, ErrorCode]:
        """Return NONE for each partition that belongs to the ongoing transaction of this producer, and otherwise the
        error. `adds`: the partitions join the transaction, which begins with the first one. If the coordinator cannot
        be asked, the errors are retriable."""
        topics: dict[str, list[int]] = {}
        for topic, index in partitions:
            topics.setdefault(topic, []).append(index)
        named = [TransactionTopic(name, indexes) for name, indexes in topics.items()]
        asked = TransactionToExtend(transactional_id, producer_id, producer_epoch, named, verify_only=not adds)
        try:
            codes = await self._ask(asked)
            self.refused += any(code is not _E.NONE for code in codes.values())
        except (NetworkError, TimeoutError) as error:
            codes = self._unanswered(asked, _E.NETWORK_EXCEPTION, error)
        except InvalidMessage as error:
            codes = self._unanswered(asked, _E.COORDINATOR_NOT_AVAILABLE, error)
        except BrokerError as error:
            codes = self._unanswered(asked, error.code, error)
        return {partition: codes.get(partition, _E.COORDINATOR_NOT_AVAILABLE) for partition in partitions}

    async def _ask(self, asked: TransactionToExtend) -> dict[TopicPartition, ErrorCode]:
        """Raises NetworkError, InvalidMessage, BrokerError."""
        request = AddPartitionsToTxnRequest([asked])
        count = self._metadata.partition_count(TRANSACTIONS_TOPIC)
        index = internal_partition(asked.transactional_id, count) if count else 0
        coordinating = self._metadata.partition(TopicPartition(TRANSACTIONS_TOPIC, index))
        if coordinating is None or coordinating.leader < 0:
            raise BrokerError(_E.COORDINATOR_NOT_AVAILABLE, f"{TRANSACTIONS_TOPIC}-{index} has no leader")
        if coordinating.leader == self._broker_id:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._local(request)
        else:
            answer = await self._peers.request(
                coordinating.leader, ADD_PARTITIONS_TO_TXN, request, timeout_s=REQUEST_TIMEOUT_S
            )
        if answer.error_code:
            raise BrokerError(error_of(answer.error_code), "the coordinator of transactions refused the question")
        return {
            TopicPartition(topic.name, result.partition_index): _for_producers(error_of(result.error_code))
            for extended in answer.results_by_transaction
            for topic in extended.topic_results
            for result in topic.results_by_partition
        }

    def _unanswered(
        self, asked: TransactionToExtend, code: ErrorCode, error: Exception
    ) -> dict[TopicPartition, ErrorCode]:
        self.failed += 1
        logger.debug("the coordinator of transactional id %r could not be asked: %s", asked.transactional_id, error)
        return {TopicPartition(topic.name, index): code for topic in asked.topics for index in topic.partitions}


def _for_producers(code: ErrorCode) -> ErrorCode:
    """Producers know INVALID_PRODUCER_EPOCH as the answer to a write. The leader knows that the partition exists, if
    the coordinator has not heard of it yet."""
    if code is _E.PRODUCER_FENCED:
        return _E.INVALID_PRODUCER_EPOCH
    return _E.COORDINATOR_NOT_AVAILABLE if code in (_E.UNKNOWN_TOPIC_OR_PARTITION, _E.OPERATION_NOT_ATTEMPTED) else code


def produce_error(code: ErrorCode, transactional_id: str, *, adds: bool) -> BrokerError:
    """Return the answer of Produce for a batch that the coordinator did not confirm. A retriable error becomes one that
    every producer retries, as in Kafka's ReplicaManager. `adds`: the producer knows CONCURRENT_TRANSACTIONS and
    TRANSACTION_ABORTABLE."""
    reason = f"the coordinator of transactional id {transactional_id[:SHOWN_OF_ID]!r} answered {code.name}"
    if code is _E.CONCURRENT_TRANSACTIONS and adds:
        return BrokerError(code, f"{reason}: send the batch again")
    if ERRORS[code].retriable:
        return BrokerError(_E.NOT_ENOUGH_REPLICAS, f"{reason}: send the batch again")
    if code is _E.INVALID_TXN_STATE or (code is _E.TRANSACTION_ABORTABLE and not adds):
        return BrokerError(
            _E.INVALID_TXN_STATE, f"{reason}: the partition does not belong to an ongoing transaction of this producer"
        )
    return BrokerError(code, reason)
