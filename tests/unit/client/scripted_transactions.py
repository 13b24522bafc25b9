"""The transaction coordinator of a ScriptedCluster. It decides by the broker's own rules, and writes markers at once,
unless the test holds them back. Scenarios on the virtual World test real coordinators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minibroker.broker.transactions import transaction as rules
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import ProducerIdAndEpoch, Transaction
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import ControlType
from tests.unit.client.scripted_groups import ScriptedGroups, Stored

TRANSACTION_KEY = 1
NOW_MS = 1


class MarkedLog(Protocol):
    def end_transaction(self, producer_id: int, type: ControlType, producer_epoch: int = 0) -> None: ...


def received_by_transactions(request: Any) -> bool:
    match request:
        case m.InitProducerIdRequest():
            return request.transactional_id is not None
        case g.FindCoordinatorRequest():
            return request.key_type == TRANSACTION_KEY
    return isinstance(request, (t.EndTxnRequest, t.TxnOffsetCommitRequest, t.DescribeTransactionsRequest))


class ScriptedTransactions:
    def __init__(
        self, port: Callable[[int], int], log: Callable[[TopicPartition], MarkedLog], groups: ScriptedGroups
    ) -> None:
        self._port = port
        self._log = log
        self._groups = groups
        self.coordinator = 0
        """The broker that coordinates all transactional ids."""
        self.known: dict[str, Transaction] = {}
        self.holds_markers = False
        """Transactions do not complete before `complete`."""
        self.next_producer_id = 5_000
        self._offsets: dict[str, dict[tuple[str, str, int], Stored]] = {}
        """Offsets of open transactions, by transactional id, for (group, topic, partition)."""

    def _fresh_id(self) -> int:
        self.next_producer_id += 1
        return self.next_producer_id

    def state(self, transactional_id: str) -> TransactionState:
        return self.known[transactional_id].state

    def answer(self, node_id: int, request: Any, scripted: ErrorCode, is_carried_out: bool) -> m.Message:
        if isinstance(request, g.FindCoordinatorRequest):
            at, port = self.coordinator, self._port(self.coordinator)
            found = [g.Coordinator(key, at, "127.0.0.1", port, scripted) for key in request.coordinator_keys]
            return g.FindCoordinatorResponse(0, found)
        code = ErrorCode.NONE if is_carried_out else scripted or ErrorCode.REQUEST_TIMED_OUT
        at = self._groups.coordinator if isinstance(request, t.TxnOffsetCommitRequest) else self.coordinator
        if not code and node_id != at:
            code = ErrorCode.NOT_COORDINATOR
        match request:
            case m.InitProducerIdRequest():
                code, granted = self._init(request) if not code else (code, _NOTHING)
                return m.InitProducerIdResponse(0, scripted or code, *granted)
            case t.EndTxnRequest():
                code, granted = self._end(request) if not code else (code, _NOTHING)
                return t.EndTxnResponse(0, scripted or code, *granted)
            case t.DescribeTransactionsRequest():
                described = [self._described(key, scripted or code) for key in request.transactional_ids]
                return t.DescribeTransactionsResponse(0, described)
            case t.TxnOffsetCommitRequest():
                return self._commit_offsets(request, code, scripted)
        raise AssertionError(f"no script for {request}")

    def _decided(self, transactional_id: str, decision: rules.Decision) -> tuple[ErrorCode, ProducerIdAndEpoch]:
        if isinstance(decision, ErrorCode):
            return decision, _NOTHING
        self.known[transactional_id] = decision
        if decision.is_ending and not self.holds_markers:
            self.complete(transactional_id)
        return ErrorCode.NONE, decision.granted

    def _init(self, request: m.InitProducerIdRequest) -> tuple[ErrorCode, ProducerIdAndEpoch]:
        key, known = request.transactional_id, self.known.get(request.transactional_id or "")
        assert key is not None
        expected = None
        if request.producer_id != t.NO_PRODUCER_ID:
            expected = ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
        fresh = self._fresh_id() if rules.needs_fresh_id(known) else None
        decision = rules.initialize(known, key, request.transaction_timeout_ms, expected, fresh, NOW_MS)
        code, granted = self._decided(key, decision)
        if isinstance(decision, Transaction) and decision.is_ending:
            return ErrorCode.CONCURRENT_TRANSACTIONS, _NOTHING
        return code, granted

    def _end(self, request: t.EndTxnRequest) -> tuple[ErrorCode, ProducerIdAndEpoch]:
        decision = rules.end(
            self.known.get(request.transactional_id),
            ProducerIdAndEpoch(request.producer_id, request.producer_epoch),
            committed=request.committed,
            raises_epoch=request.raises_epoch,
            fresh_id=self._fresh_id(),
            now_ms=NOW_MS,
        )
        return self._decided(request.transactional_id, decision)

    def _described(self, transactional_id: str, code: ErrorCode) -> t.DescribedTransaction:
        known = self.known.get(transactional_id)
        if code or known is None:
            return t.DescribedTransaction(code or ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id)
        return t.DescribedTransaction(
            code,
            transactional_id,
            known.state.value,
            producer_id=known.producer_id,
            producer_epoch=known.producer_epoch,
        )

    def add(self, transactional_id: str, producer: ProducerIdAndEpoch, partition: TopicPartition) -> ErrorCode:
        """A partition joins, since it is written to."""
        known = self.known.get(transactional_id)
        return self._decided(transactional_id, rules.add_partitions(known, producer, [partition], NOW_MS))[0]

    def time_out(self, transactional_id: str) -> None:
        """Abort the open transaction, because it has taken too long."""
        self._decided(transactional_id, rules.time_out(self.known[transactional_id], self._fresh_id(), NOW_MS))

    def complete(self, transactional_id: str) -> None:
        """Write the markers, and apply or drop the offsets."""
        ending = self.known[transactional_id]
        is_committed = ending.state is TransactionState.PREPARE_COMMIT
        for partition in ending.partitions:
            if partition.topic != OFFSETS_TOPIC:
                marker = ControlType.COMMIT if is_committed else ControlType.ABORT
                self._log(partition).end_transaction(ending.producer_id, marker, ending.producer_epoch)
        for (group, topic, index), stored in self._offsets.pop(transactional_id, {}).items():
            if is_committed:
                self._groups.group(group).offsets[topic, index] = stored
        self.known[transactional_id] = rules.complete(ending, NOW_MS)

    def _commit_offsets(
        self, request: t.TxnOffsetCommitRequest, code: ErrorCode, scripted: ErrorCode
    ) -> t.TxnOffsetCommitResponse:
        if not code and request.generation_id >= 0:
            code = self._groups.problem(request)
        if not code:
            producer = ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
            code = self.add(request.transactional_id, producer, TopicPartition(OFFSETS_TOPIC, 0))
        if not code:
            pending = self._offsets.setdefault(request.transactional_id, {})
            for topic in request.topics:
                for p in topic.partitions:
                    stored = Stored(p.committed_offset, p.committed_leader_epoch, p.committed_metadata, topic.topic_id)
                    pending[request.group_id, topic.name, p.partition_index] = stored
        return t.TxnOffsetCommitResponse(
            0,
            [
                t.TxnOffsetCommitTopicResponse(
                    topic.name,
                    [
                        t.TxnOffsetCommitPartitionResponse(partition.partition_index, scripted or code)
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ],
        )


_NOTHING = ProducerIdAndEpoch(t.NO_PRODUCER_ID, t.NO_PRODUCER_EPOCH)
