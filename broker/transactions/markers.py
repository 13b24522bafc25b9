"""Tells the partitions of ended transactions their outcome (Kafka's TransactionMarkerChannelManager).

Each outcome is written as a marker by the leader of every partition that has joined the transaction, and repeated until
it is replicated there, or until this broker no longer coordinates the transaction: the next coordinator then finds the
decision in its log and writes the markers again, under its higher epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.cluster.peers import Peers
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.terms import TransactionTerm
from minibroker.broker.transactions.transaction import Transaction
from minibroker.protocol.apis import WRITE_TXN_MARKERS
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.messages.transactions import TransactionMarker, TransactionTopic, WriteTxnMarkersRequest
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.world import ZooKeeperError, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import partition_exists

logger = logging.getLogger("minibroker.transactions")

REQUEST_TIMEOUT_S = 30.0
"""As Kafka's request.timeout.ms between brokers."""
LEAST_PAUSE_S = 0.01
MOST_PAUSE_S = 1.0
"""The pauses between attempts for a partition, which double."""
MOST_AT_ONCE = 1_000
"""Transactions in one request."""

_E = ErrorCode


class _Ended:
    """A transaction whose markers are being written."""

    def __init__(
        self, term: TransactionTerm, transaction: Transaction, decision: int, written: Callable[[], None]
    ) -> None:
        self.term = term
        self.transaction = transaction
        self.decision = decision
        self.written = written
        self.left = set(transaction.partitions)
        self.pause_s = LEAST_PAUSE_S


class MarkerSender:
    def __init__(
        self,
        metadata: MetadataCache,
        peers: Peers,
        sessions: Callable[[], Awaitable[ZooKeeperSession]],
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._metadata = metadata
        self._peers = peers
        self._sessions = sessions
        self._start_task = start_task
        self._waiting: dict[int, dict[_Ended, set[TopicPartition]]] = {}
        """What is to be sent to each broker."""
        self._busy: set[int] = set()
        """The brokers that a task sends to."""
        self.failed = 0
        """Attempts of partitions that failed so far."""

    def send(self, term: TransactionTerm, transaction: Transaction, decision: int, written: Callable[[], None]) -> None:
        """T9. Write the markers of a transaction whose outcome the record at the offset `decision` has decided.
        `written` is called once they are replicated, and never if the term ends first."""
        ended = _Ended(term, transaction, decision, written)
        if ended.left:
            self._route(ended, transaction.partitions)
        else:
            written()

    def _route(self, ended: _Ended, partitions: Iterable[TopicPartition]) -> None:
        unknown, unheard_of = [], []
        for topic_partition in sorted(partitions):
            state = self._metadata.partition(topic_partition)
            if state is not None and self._metadata.endpoint(state.leader) is not None:
                self._waiting.setdefault(state.leader, {}).setdefault(ended, set()).add(topic_partition)
                self._send_soon(state.leader)
            elif self._seems_deleted(topic_partition):
                unheard_of.append(topic_partition)
            else:
                unknown.append(topic_partition)
        if unknown:
            self._again(ended, unknown)
        if unheard_of:
            self._start_task(self._settle_deleted(ended, unheard_of), "markers of transactions, for deleted topics")

    def _seems_deleted(self, topic_partition: TopicPartition) -> bool:
        """Whether the topic is gone, or was created again with fewer partitions, as far as this broker has heard."""
        if self._metadata.told_all_epoch == NO_EPOCH:
            return False
        is_gone = self._metadata.topic_id(topic_partition.topic) is None
        return is_gone or self._metadata.has_fewer_partitions(topic_partition)

    async def _settle_deleted(self, ended: _Ended, partitions: Sequence[TopicPartition]) -> None:
        """Settle the partitions that are gone, and try the others again. Only ZooKeeper knows: this broker may not have
        heard of a partition that is younger than its metadata. A topic whose deletion waits for a broker is gone."""
        left = []
        for topic_partition in partitions:
            try:
                exists = await partition_exists(await self._sessions(), topic_partition)
            except (ZooKeeperError, MalformedZnode) as error:
                logger.debug("it is not known whether %s is deleted: %s", topic_partition, error)
                exists = True
            if exists:
                left.append(topic_partition)
            else:
                self._settle(ended, topic_partition)
        if left:
            self._again(ended, left)

    def _settle(self, ended: _Ended, topic_partition: TopicPartition) -> None:
        ended.left.discard(topic_partition)
        if not ended.left and not ended.term.is_over:
            ended.written()

    def _again(self, ended: _Ended, partitions: Iterable[TopicPartition]) -> None:
        """Try again after a pause, as long as the term lasts."""
        self._start_task(self._later(ended, list(partitions)), "markers of transactions, again")

    async def _later(self, ended: _Ended, partitions: list[TopicPartition]) -> None:
        pause_s, ended.pause_s = ended.pause_s, min(2 * ended.pause_s, MOST_PAUSE_S)
        await asyncio.sleep(pause_s)
        if not ended.term.is_over:
            self._route(ended, partitions)

    # -- one broker --

    def _send_soon(self, broker_id: int) -> None:
        if broker_id not in self._busy:
            self._busy.add(broker_id)
            self._start_task(self._send(broker_id), f"markers of transactions for broker {broker_id}")

    async def _send(self, broker_id: int) -> None:
        """Send what waits for the broker. What comes meanwhile is sent together afterwards."""
        try:
            while waiting := self._waiting.get(broker_id):
                taken = {ended: waiting.pop(ended) for ended in list(waiting)[:MOST_AT_ONCE]}
                live = {ended: parts for ended, parts in taken.items() if not ended.term.is_over}
                if live:
                    await self._attempt(broker_id, live)
        finally:
            self._busy.discard(broker_id)

    async def _attempt(self, broker_id: int, taken: dict[_Ended, set[TopicPartition]]) -> None:
        ended_in_order = list(taken)
        request = WriteTxnMarkersRequest([_marker(ended, taken[ended]) for ended in ended_in_order])
        try:
            answer = await self._peers.request(broker_id, WRITE_TXN_MARKERS, request, timeout_s=REQUEST_TIMEOUT_S)
        except (NetworkError, BrokerError, InvalidMessage) as error:
            logger.debug("broker %d did not write the markers of %d transactions: %s", broker_id, len(taken), error)
            for ended, partitions in taken.items():
                self._failed(ended, partitions)
            return
        for ended, written in zip(ended_in_order, answer.markers, strict=True):
            codes = {
                TopicPartition(topic.name, result.partition_index): ErrorCode(result.error_code)
                for topic in written.topics
                for result in topic.results_by_partition
            }
            failed = set()
            for topic_partition in sorted(taken[ended]):
                code = codes.get(topic_partition, _E.UNKNOWN_SERVER_ERROR)
                if code is _E.INVALID_PRODUCER_EPOCH:
                    # The log has a later epoch of the producer, so nothing of this transaction is open there.
                    logger.warning(
                        "%s has a later epoch than %d of producer %d, whose transactional id is %r",
                        *(topic_partition, ended.transaction.producer_epoch, ended.transaction.producer_id),
                        ended.transaction.transactional_id,
                    )
                    self._settle(ended, topic_partition)
                elif code is _E.NONE:
                    self._settle(ended, topic_partition)
                else:
                    self._log_failure(ended, topic_partition, code)
                    failed.add(topic_partition)
            if failed:
                self._failed(ended, failed)

    def _failed(self, ended: _Ended, partitions: set[TopicPartition]) -> None:
        self.failed += len(partitions)
        if not ended.term.is_over:
            self._again(ended, partitions)

    def _log_failure(self, ended: _Ended, topic_partition: TopicPartition, code: ErrorCode) -> None:
        # After TRANSACTION_COORDINATOR_FENCED, the term ends as soon as this broker hears of its successor.
        logger.debug(
            "%s: the marker of transactional id %r is not written: %s",
            *(topic_partition, ended.transaction.transactional_id, code.name),
        )


def _marker(ended: _Ended, partitions: set[TopicPartition]) -> TransactionMarker:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    transaction = ended.transaction
    return TransactionMarker(
        transaction.producer_id,
        transaction.producer_epoch,
        transaction.state is TransactionState.PREPARE_COMMIT,
        ended.term.epoch,
        [TransactionTopic(name, indexes) for name, indexes in topics.items()],
        transaction.raises_epoch,
        ended.decision,
    )
