"""Questions of a leader to the coordinators of transactions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.transactions import verification
from minibroker.broker.transactions.verification import TransactionVerifier, produce_error
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.messages import UpdateMetadataPartition, UpdateMetadataRequest, UpdateMetadataTopic
from minibroker.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    ExtendedTransaction,
    TransactionPartitionResult,
    TransactionToExtend,
    TransactionTopic,
    TransactionTopicResult,
)
from minibroker.protocol.model import NO_LEADER, TRANSACTIONS_TOPIC, TopicPartition, internal_partition

E = ErrorCode
ME, OTHER = 1, 2
ORDERS, ITEMS = TopicPartition("orders", 0), TopicPartition("items", 3)


class Cluster:
    """Coordinators on this broker and on another one, which answer from `answers` or with `error`."""

    def __init__(self, leaders: tuple[int, int]) -> None:
        self.metadata = MetadataCache()
        partitions = [
            UpdateMetadataPartition(i, 1, leader, 0, [1, 2], 0, [1, 2], []) for i, leader in enumerate(leaders)
        ]
        topic = UpdateMetadataTopic(TRANSACTIONS_TOPIC, "id", partitions, False, num_partitions=2)
        self.metadata.update(UpdateMetadataRequest(1, 1, 1, [topic], []))
        self.asked: list[tuple[int, TransactionToExtend]] = []
        self.answers: dict[TopicPartition, ErrorCode] = {}
        self.error: Exception | ErrorCode | None = None
        peers: Any = self
        self.verifier = TransactionVerifier(ME, self.metadata, peers, self._local)

    async def _local(self, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        return self._answer(ME, request)

    async def request(
        self, peer_id: int, api: object, body: AddPartitionsToTxnRequest, *, timeout_s: float
    ) -> AddPartitionsToTxnResponse:
        assert api is apis.ADD_PARTITIONS_TO_TXN
        return self._answer(peer_id, body)

    def _answer(self, broker_id: int, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        [asked] = request.transactions
        self.asked.append((broker_id, asked))
        if isinstance(self.error, Exception):
            raise self.error
        if self.error is not None:
            return AddPartitionsToTxnResponse(0, self.error, [])
        topics = [
            TransactionTopicResult(
                topic.name,
                [
                    TransactionPartitionResult(index, self.answers.get(TopicPartition(topic.name, index), E.NONE))
                    for index in topic.partitions
                ],
            )
            for topic in asked.topics
        ]
        return AddPartitionsToTxnResponse(0, E.NONE, [ExtendedTransaction(asked.transactional_id, topics)])


def id_of(index: int) -> str:
    return next(name for name in map(str, range(100)) if internal_partition(name, 2) == index)


async def test_the_leader_of_the_transactional_ids_partition_is_asked_wherever_it_is() -> None:
    cluster = Cluster((ME, OTHER))
    for index in range(2):
        assert await cluster.verifier.verify(ORDERS, id_of(index), 7, 3, adds=bool(index)) is E.NONE
    topics = [TransactionTopic("orders", [0])]
    assert cluster.asked == [
        (ME, TransactionToExtend(id_of(0), 7, 3, topics, verify_only=True)),
        (OTHER, TransactionToExtend(id_of(1), 7, 3, topics, verify_only=False)),
    ]


async def test_the_partitions_of_a_request_are_one_question_with_an_answer_for_each() -> None:
    cluster = Cluster((ME, OTHER))
    cluster.answers = {ITEMS: E.INVALID_TXN_STATE}
    second = TopicPartition("orders", 1)
    codes = await cluster.verifier.verify_all([ORDERS, ITEMS, second], id_of(1), 7, 3, adds=True)
    assert codes == {ORDERS: E.NONE, ITEMS: E.INVALID_TXN_STATE, second: E.NONE}
    [(_, asked)] = cluster.asked
    assert asked.topics == [TransactionTopic("orders", [0, 1]), TransactionTopic("items", [3])]


@pytest.mark.parametrize(
    ("answered", "code"),
    [
        (E.PRODUCER_FENCED, E.INVALID_PRODUCER_EPOCH),
        (E.UNKNOWN_TOPIC_OR_PARTITION, E.COORDINATOR_NOT_AVAILABLE),
        (E.OPERATION_NOT_ATTEMPTED, E.COORDINATOR_NOT_AVAILABLE),
        (E.CONCURRENT_TRANSACTIONS, E.CONCURRENT_TRANSACTIONS),
        (E.INVALID_PRODUCER_ID_MAPPING, E.INVALID_PRODUCER_ID_MAPPING),
    ],
)
async def test_the_coordinators_answers_become_those_of_a_leader(answered: ErrorCode, code: ErrorCode) -> None:
    cluster = Cluster((ME, OTHER))
    cluster.answers = {ORDERS: answered}
    assert await cluster.verifier.verify(ORDERS, id_of(0), 7, 3, adds=True) is code


@pytest.mark.parametrize("index", [0, 1], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NetworkError("gone"), E.NETWORK_EXCEPTION),
        (InvalidMessage("what"), E.COORDINATOR_NOT_AVAILABLE),
        (BrokerError(E.REQUEST_TIMED_OUT, "late"), E.REQUEST_TIMED_OUT),
        (E.NOT_COORDINATOR, E.NOT_COORDINATOR),
    ],
)
async def test_a_question_that_is_not_answered_confirms_nothing(
    error: Exception | ErrorCode, code: ErrorCode, index: int
) -> None:
    cluster = Cluster((ME, OTHER))
    cluster.error = error
    assert await cluster.verifier.verify(ORDERS, id_of(index), 7, 3, adds=True) is code
    assert cluster.verifier.failed == 1


async def test_without_a_leader_there_is_no_coordinator_to_ask() -> None:
    cluster = Cluster((NO_LEADER, ME))
    assert await cluster.verifier.verify(ORDERS, id_of(0), 7, 3, adds=True) is E.COORDINATOR_NOT_AVAILABLE
    nowhere = TransactionVerifier(ME, MetadataCache(), cluster.verifier._peers, cluster._local)
    assert await nowhere.verify(ORDERS, id_of(1), 7, 3, adds=True) is E.COORDINATOR_NOT_AVAILABLE
    assert cluster.asked == []


async def test_an_answer_without_a_partition_does_not_confirm_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster((ME, OTHER))

    async def empty(_: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        return AddPartitionsToTxnResponse(0, E.NONE, [])

    monkeypatch.setattr(cluster.verifier, "_local", empty)
    assert await cluster.verifier.verify(ORDERS, id_of(0), 7, 3, adds=True) is E.COORDINATOR_NOT_AVAILABLE


async def test_a_coordinator_here_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster((ME, OTHER))
    monkeypatch.setattr(verification, "REQUEST_TIMEOUT_S", 0.01)

    async def never(_: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    monkeypatch.setattr(cluster.verifier, "_local", never)
    assert await cluster.verifier.verify(ORDERS, id_of(0), 7, 3, adds=True) is E.NETWORK_EXCEPTION


@pytest.mark.parametrize(
    ("answered", "adds", "code"),
    [
        (E.CONCURRENT_TRANSACTIONS, True, E.CONCURRENT_TRANSACTIONS),
        (E.CONCURRENT_TRANSACTIONS, False, E.NOT_ENOUGH_REPLICAS),
        *(
            (code, adds, E.NOT_ENOUGH_REPLICAS)
            for adds in (True, False)
            for code in (
                E.NETWORK_EXCEPTION,
                E.NOT_COORDINATOR,
                E.COORDINATOR_NOT_AVAILABLE,
                E.COORDINATOR_LOAD_IN_PROGRESS,
                E.REQUEST_TIMED_OUT,
            )
        ),
        (E.TRANSACTION_ABORTABLE, True, E.TRANSACTION_ABORTABLE),
        (E.TRANSACTION_ABORTABLE, False, E.INVALID_TXN_STATE),
        (E.INVALID_TXN_STATE, False, E.INVALID_TXN_STATE),
        (E.INVALID_PRODUCER_EPOCH, True, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_PRODUCER_ID_MAPPING, False, E.INVALID_PRODUCER_ID_MAPPING),
    ],
)
def test_a_producer_gets_an_error_that_its_version_knows(answered: ErrorCode, adds: bool, code: ErrorCode) -> None:
    error = produce_error(answered, "pay", adds=adds)
    assert error.code is code
    assert answered.name in error.detail
    assert "'pay'" in error.detail


@pytest.mark.parametrize(
    ("is_enabled", "adds", "is_waived"),
    [
        (True, True, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ],
)
def test_only_partitions_that_were_named_before_may_go_without_a_question(
    is_enabled: bool, adds: bool, is_waived: bool
) -> None:
    cluster = Cluster((ME, OTHER))
    verifier = TransactionVerifier(ME, cluster.metadata, cluster.verifier._peers, cluster._local, lambda: is_enabled)
    assert verifier.is_waived(adds=adds) is is_waived
