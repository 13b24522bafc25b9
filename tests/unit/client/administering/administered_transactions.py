"""A ScriptedCluster whose transactions are listed, described and aborted. One broker coordinates all of them."""

from __future__ import annotations

from typing import Any

from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import Transaction
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import TopicPartition
from tests.unit.client.scripted_broker import Action, ScriptedCluster


class TransactionCluster(ScriptedCluster):
    def __init__(self, brokers: int = 1) -> None:
        super().__init__(brokers)
        self.producers: dict[TopicPartition, list[m.ActiveProducer]] = {}
        """The producers of each partition, as its leader knows them."""
        self.markers: list[t.TransactionMarker] = []

    def add_transaction(
        self, transactional_id: str, state: TransactionState, producer_id: int, *partitions: TopicPartition
    ) -> None:
        is_open = state in (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT)
        self.transactions.known[transactional_id] = Transaction(
            transactional_id=transactional_id,
            producer_id=producer_id,
            producer_epoch=3,
            timeout_ms=60_000,
            state=state,
            updated_ms=1,
            started_ms=1 if is_open else -1,
            partitions=frozenset(partitions),
        )

    async def answer(self, node_id: int, request: Any, action: Action) -> m.Message:
        is_coordinator = node_id == self.transactions.coordinator
        match request:
            case t.ListTransactionsRequest(state_filters=states, producer_id_filters=producer_ids):
                listed = [
                    t.ListedTransaction(name, each.producer_id, each.state.value)
                    for name, each in self.transactions.known.items()
                    if is_coordinator
                    and (not states or each.state.value in states)
                    and (not producer_ids or each.producer_id in producer_ids)
                ]
                return t.ListTransactionsResponse(0, action.code, [], listed)
            case t.DescribeTransactionsRequest(transactional_ids=ids):
                return t.DescribeTransactionsResponse(0, [self._described(name, is_coordinator) for name in ids])
            case m.DescribeProducersRequest(topics=topics):
                return m.DescribeProducersResponse(
                    0,
                    [
                        m.DescribeProducersTopicResponse(
                            topic.name,
                            [
                                m.DescribeProducersPartition(
                                    index,
                                    action.code,
                                    active_producers=self.producers.get(TopicPartition(topic.name, index), []),
                                )
                                for index in topic.partition_indexes
                            ],
                        )
                        for topic in topics
                    ],
                )
            case t.WriteTxnMarkersRequest(markers=[marker]):
                self.markers.append(marker)
                written = [
                    t.TransactionTopicResult(
                        topic.name, [t.TransactionPartitionResult(index, action.code) for index in topic.partitions]
                    )
                    for topic in marker.topics
                ]
                return t.WriteTxnMarkersResponse([t.WrittenTransactionMarker(marker.producer_id, written)])
        return await super().answer(node_id, request, action)

    def _described(self, transactional_id: str, is_coordinator: bool) -> t.DescribedTransaction:
        if not is_coordinator:
            return t.DescribedTransaction(ErrorCode.NOT_COORDINATOR, transactional_id)
        known = self.transactions.known.get(transactional_id)
        if known is None:
            return t.DescribedTransaction(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id)
        topics: dict[str, list[int]] = {}
        for topic, index in sorted(known.partitions):
            topics.setdefault(topic, []).append(index)
        return t.DescribedTransaction(
            ErrorCode.NONE,
            transactional_id,
            known.state.value,
            known.timeout_ms,
            known.started_ms,
            known.producer_id,
            known.producer_epoch,
            [t.TransactionTopic(name, indexes) for name, indexes in topics.items()],
        )
