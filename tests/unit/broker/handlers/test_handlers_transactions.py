"""The requests of transactions that the leaders of partitions answer."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    UpdateMetadataPartition,
    UpdateMetadataRequest,
    UpdateMetadataTopic,
)
from minibroker.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    ExtendedTransaction,
    TransactionMarker,
    TransactionPartitionResult,
    TransactionToExtend,
    TransactionTopic,
    TransactionTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition
from minibroker.protocol.records import MAGIC_COLUMNS, MAGIC_RECORDS
from tests.replication_support import TOPIC, OneBroker, state, with_one_broker
from tests.running import run_by
from tests.storage_support import batch
from tests.unit.broker.handlers.test_handlers_produce_and_control import Peer
from tests.waiting import until


def marker(producer_id: int, *topics: TransactionTopic, epoch: int = 1) -> TransactionMarker:
    return TransactionMarker(producer_id, epoch, True, 0, list(topics), raises_epoch=True)


def codes(answer: WriteTxnMarkersResponse) -> list[tuple[int, dict[tuple[str, int], int]]]:
    return [
        (
            written.producer_id,
            {
                (topic.name, r.partition_index): r.error_code
                for topic in written.topics
                for r in topic.results_by_partition
            },
        )
        for written in answer.markers
    ]


@run_by(with_one_broker)
async def test_markers_are_answered_in_order_with_a_code_for_each_partition(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await broker.told(state(isr=(1, 2), replicas=(1, 2)), state(isr=(1,), replicas=(1,), index=1))
    await broker.told(state(isr=(1,), replicas=(1,), index=3), topic=OFFSETS_TOPIC, topic_id="id-of-offsets")
    both, offsets, unknown = TransactionTopic(TOPIC, [0, 1]), TransactionTopic(OFFSETS_TOPIC, [3]), [9]
    request = WriteTxnMarkersRequest(
        [marker(7, both), marker(8, offsets, TransactionTopic(TOPIC, unknown)), marker(7, TransactionTopic(TOPIC, [1]))]
    )
    await peer.send(apis.WRITE_TXN_MARKERS, request)
    assert not peer.answers, "a replica in sync has not got it"
    broker.follower_has(1, 2)
    await asyncio.sleep(0.01)
    assert codes(peer.answer(apis.WRITE_TXN_MARKERS)) == [
        (7, {(TOPIC, 0): ErrorCode.NONE, (TOPIC, 1): ErrorCode.NONE}),
        (8, {(OFFSETS_TOPIC, 3): ErrorCode.NONE, (TOPIC, 9): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}),
        (7, {(TOPIC, 1): ErrorCode.NONE}),
    ]
    assert broker.partition(TopicPartition(TOPIC, 1)).log.log_end_offset == 2


@run_by(with_one_broker)
async def test_a_request_without_markers_is_answered_at_once(broker: OneBroker, /) -> None:
    peer = Peer(broker)
    await peer.send(apis.WRITE_TXN_MARKERS, WriteTxnMarkersRequest([]))
    assert codes(peer.answer(apis.WRITE_TXN_MARKERS)) == []


@run_by(with_one_broker)
async def test_a_marker_names_each_partition_once(broker: OneBroker, /) -> None:
    with pytest.raises(BrokerError) as refused:
        await Peer(broker).send(
            apis.WRITE_TXN_MARKERS, WriteTxnMarkersRequest([marker(7, TransactionTopic(TOPIC, [0, 0]))])
        )
    assert refused.value.code is ErrorCode.INVALID_REQUEST


# -- Produce --


class Coordinator:
    """Plays the coordinator of the producer's transactional id. It answers when `is_open` is set."""

    def __init__(self, peer: Peer) -> None:
        self.asked: list[TransactionToExtend] = []
        self.codes: dict[tuple[str, int], ErrorCode] = {}
        self.is_open = asyncio.Event()
        self.is_open.set()
        peer.coordinator = self

    async def __call__(self, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        [asked] = request.transactions
        self.asked.append(asked)
        await self.is_open.wait()
        topics = [
            TransactionTopicResult(
                topic.name,
                [
                    TransactionPartitionResult(i, self.codes.get((topic.name, i), ErrorCode.NONE))
                    for i in topic.partitions
                ],
            )
            for topic in asked.topics
        ]
        return AddPartitionsToTxnResponse(0, ErrorCode.NONE, [ExtendedTransaction(asked.transactional_id, topics)])


async def leader(broker: OneBroker, partitions: int = 1, *, verifies: bool = True) -> tuple[Peer, Coordinator]:
    """Let the broker lead partitions without followers, and be the coordinator of every transactional id."""
    peer = Peer(broker)
    peer.verifies_transactions = verifies
    await broker.told(*(state(isr=(1,), replicas=(1,), index=index) for index in range(partitions)))
    metadata = UpdateMetadataPartition(0, 1, 1, 0, [1], 0, [1], [])
    topic = UpdateMetadataTopic(TRANSACTIONS_TOPIC, "id-of-transactions", [metadata], False, num_partitions=1)
    broker.metadata.update(UpdateMetadataRequest(1, 1, 1, [topic], []))
    return peer, Coordinator(peer)


def produce(
    *partitions: int,
    producer_id: int = 7,
    epoch: int = 0,
    sequence: int = 0,
    adds: bool = True,
    acks: int = -1,
    transactional: bool = True,
    magic: int = MAGIC_COLUMNS,
) -> ProduceRequest:
    records = memoryview(
        batch(
            producer_id=producer_id,
            producer_epoch=epoch,
            sequence=sequence,
            transactional=transactional,
            magic=magic,
        )
    )
    topic = ProduceTopic(TOPIC, [ProducePartition(index, records) for index in partitions])
    return ProduceRequest("pay", acks, 1_000, [topic], adds)


async def sent(peer: Peer, request: ProduceRequest) -> dict[int, int]:
    await peer.send(apis.PRODUCE, request)
    response: ProduceResponse = peer.answer(apis.PRODUCE)
    return {part.index: part.error_code for topic in response.responses for part in topic.partition_responses}


def end(broker: OneBroker, partition: int = 0) -> int:
    return broker.partition(TopicPartition(TOPIC, partition)).log.log_end_offset


@pytest.mark.parametrize("adds", [True, False])
@run_by(with_one_broker)
async def test_the_coordinator_is_asked_once_for_the_first_batches_of_a_transaction(
    broker: OneBroker, /, adds: bool
) -> None:
    peer, coordinator = await leader(broker, 2)
    assert await sent(peer, produce(0, 1, epoch=3, adds=adds)) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}
    assert coordinator.asked == [
        TransactionToExtend("pay", 7, 3, [TransactionTopic(TOPIC, [0, 1])], verify_only=not adds)
    ]
    assert await sent(peer, produce(0, epoch=3, sequence=1, adds=adds)) == {0: ErrorCode.NONE}
    assert len(coordinator.asked) == 1, "the transaction is open there"
    broker.end_transaction(7, epoch=4, raises_epoch=True)
    begun = await sent(peer, produce(0, 1, epoch=4, adds=adds))
    assert begun == {0: ErrorCode.NONE, 1: ErrorCode.NOT_ENOUGH_REPLICAS}, "open in an older epoch, so aborted first"
    assert coordinator.asked[1].topics == [TransactionTopic(TOPIC, [0, 1])]


@run_by(with_one_broker)
async def test_a_late_batch_of_a_transaction_that_the_coordinator_does_not_know_is_not_written(
    broker: OneBroker, /
) -> None:
    peer, coordinator = await leader(broker, 2)
    coordinator.codes = {(TOPIC, 0): ErrorCode.INVALID_TXN_STATE}
    assert await sent(peer, produce(0, 1, adds=False)) == {0: ErrorCode.INVALID_TXN_STATE, 1: ErrorCode.NONE}
    assert (end(broker, 0), end(broker, 1)) == (0, 1)
    assert broker.partition().last_stable_offset == 0


@pytest.mark.parametrize("acks", [0, 1, -1])
@run_by(with_one_broker)
async def test_with_any_acks_a_batch_that_is_not_confirmed_is_refused(broker: OneBroker, /, acks: int) -> None:
    peer, coordinator = await leader(broker)
    coordinator.codes = {(TOPIC, 0): ErrorCode.PRODUCER_FENCED}
    if acks:
        assert await sent(peer, produce(0, acks=acks)) == {0: ErrorCode.INVALID_PRODUCER_EPOCH}
    else:
        await peer.send(apis.PRODUCE, produce(0, acks=acks))
        assert peer.closed
    assert end(broker) == 0


@run_by(with_one_broker)
async def test_a_marker_that_overtakes_the_append_voids_the_coordinators_answer(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker)
    coordinator.is_open.clear()
    sending = asyncio.ensure_future(sent(peer, produce(0)))
    await until(lambda: bool(coordinator.asked))
    broker.end_transaction(7)
    coordinator.is_open.set()
    assert await sending == {0: ErrorCode.NOT_ENOUGH_REPLICAS}
    assert end(broker) == 1, "only the marker"
    assert await sent(peer, produce(0)) == {0: ErrorCode.NONE}, "it is asked about anew"


@run_by(with_one_broker)
async def test_a_leadership_that_ends_voids_the_coordinators_answer(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker)
    coordinator.is_open.clear()
    sending = asyncio.ensure_future(sent(peer, produce(0)))
    await until(lambda: bool(coordinator.asked))
    await broker.told(state(leader=2, epoch=1, isr=(1, 2), replicas=(1, 2)))
    await broker.told(state(epoch=2, isr=(1,), replicas=(1,)))
    coordinator.is_open.set()
    assert await sending == {0: ErrorCode.NOT_ENOUGH_REPLICAS}
    assert end(broker) == 0


@pytest.mark.parametrize("magic", [MAGIC_COLUMNS, MAGIC_RECORDS])
@run_by(with_one_broker)
async def test_a_batch_behind_one_that_was_not_confirmed_does_not_come_first(broker: OneBroker, /, magic: int) -> None:
    """The log knows no sequence of the producer, so it would accept any of Kafka's."""
    peer, coordinator = await leader(broker)
    coordinator.codes = {(TOPIC, 0): ErrorCode.NOT_COORDINATOR}
    assert await sent(peer, produce(0, magic=magic)) == {0: ErrorCode.NOT_ENOUGH_REPLICAS}
    coordinator.codes = {}
    behind = await sent(peer, produce(0, sequence=1, magic=magic))
    assert behind[0] in (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID)
    for sequence in range(2):
        assert await sent(peer, produce(0, sequence=sequence, magic=magic)) == {0: ErrorCode.NONE}


@run_by(with_one_broker)
async def test_a_repeated_batch_of_an_ended_transaction_needs_no_question(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker)
    await sent(peer, produce(0))
    broker.end_transaction(7)
    coordinator.codes = {(TOPIC, 0): ErrorCode.INVALID_TXN_STATE}
    assert await sent(peer, produce(0)) == {0: ErrorCode.NONE}
    assert (end(broker), len(coordinator.asked)) == (2, 1)


@run_by(with_one_broker)
async def test_without_verification_only_batches_that_add_their_partition_are_asked_about(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker, verifies=False)
    assert await sent(peer, produce(0, adds=False)) == {0: ErrorCode.NONE}
    assert coordinator.asked == []
    broker.end_transaction(7)
    assert await sent(peer, produce(0, sequence=1, adds=True)) == {0: ErrorCode.NONE}
    assert len(coordinator.asked) == 1


@run_by(with_one_broker)
async def test_a_request_has_the_transactional_batches_of_one_producer(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker, 2)
    request = produce(0)
    request.topic_data[0].partition_data += produce(1, producer_id=8).topic_data[0].partition_data
    mapped = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert await sent(peer, request) == {0: mapped, 1: mapped}
    assert (end(broker, 0), end(broker, 1), coordinator.asked) == (0, 0, [])


@run_by(with_one_broker)
async def test_plain_batches_of_a_transactional_producer_are_not_asked_about(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker)
    assert await sent(peer, produce(0, transactional=False)) == {0: ErrorCode.NONE}
    assert await sent(peer, produce(0, sequence=1)) == {0: ErrorCode.NONE}
    assert await sent(peer, produce(0, sequence=2, transactional=False)) == {0: ErrorCode.INVALID_TXN_STATE}
    assert len(coordinator.asked) == 1


@run_by(with_one_broker)
async def test_what_is_not_led_here_is_refused_without_a_question(broker: OneBroker, /) -> None:
    peer, coordinator = await leader(broker)
    assert await sent(peer, produce(0, 1)) == {0: ErrorCode.NONE, 1: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert coordinator.asked[0].topics == [TransactionTopic(TOPIC, [0])]
