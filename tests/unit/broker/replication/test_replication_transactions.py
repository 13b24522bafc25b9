"""What a leader does for transactions: how far consumers read, markers, and questions to coordinators."""

from __future__ import annotations

import asyncio
import gc

from minibroker.broker.replication.questions import WAIVED, Question
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import AbortedTransaction, FetchPartitionResponse
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import READ_COMMITTED, EndTransactionMarker
from tests.replication_support import ORDERS, TOPIC, OneBroker, fetch_of, state, with_one_broker
from tests.running import run_by
from tests.storage_support import batch, headers

ALONE = state(isr=(1,), replicas=(1,))
FOLLOWED = state(isr=(1, 2), replicas=(1, 2))


def send(
    broker: OneBroker,
    producer_id: int,
    sequence: int = 0,
    *,
    epoch: int = 0,
    count: int = 1,
    transactional: bool = True,
    question: Question | None = WAIVED,
    partition: TopicPartition = ORDERS,
) -> ErrorCode:
    records = batch(
        count,
        timestamp=broker.world.clock.wall_ms(),
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=sequence,
        transactional=transactional,
    )
    answer = broker.produce(records, acks=1, question=question, partition=partition).result()
    return ErrorCode(answer.error_code)


def write(broker: OneBroker, count: int = 1) -> None:
    """Append records that belong to no transaction."""
    broker.produce(batch(count, timestamp=broker.world.clock.wall_ms()), acks=1)


def committed(broker: OneBroker, offset: int = 0, *, max_bytes: int = 1 << 20) -> FetchPartitionResponse:
    [found] = broker.fetch(fetch_of(offset, max_bytes=max_bytes), isolation=READ_COMMITTED).result()
    assert found.error_code == ErrorCode.NONE
    return found


def offsets(found: FetchPartitionResponse) -> list[int]:
    return [header.base_offset for header in headers(bytes(found.records))]


# -- isolation --


@run_by(with_one_broker)
async def test_read_committed_ends_at_the_first_record_of_the_oldest_open_transaction(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    write(broker)
    send(broker, 7)
    write(broker)
    found = committed(broker)
    assert (offsets(found), found.last_stable_offset, found.high_watermark) == ([0], 1, 3)
    assert offsets(broker.fetch(fetch_of(0)).result()[0]) == [0, 1, 2], "read_uncommitted reads on"
    assert offsets(committed(broker, 1)) == offsets(committed(broker, 2)) == []


@run_by(with_one_broker)
async def test_read_committed_waits_for_a_marker_that_is_not_replicated(broker: OneBroker, /) -> None:
    await broker.told(FOLLOWED)
    send(broker, 7)
    broker.follower_has(1, 2)
    broker.end_transaction(7)
    assert (committed(broker).last_stable_offset, offsets(committed(broker))) == (0, [])
    broker.follower_has(2, 2)
    assert (committed(broker).last_stable_offset, offsets(committed(broker))) == (2, [0, 1])


@run_by(with_one_broker)
async def test_a_follower_reads_past_the_last_stable_offset_at_any_isolation_level(broker: OneBroker, /) -> None:
    await broker.told(FOLLOWED)
    send(broker, 7)
    [found] = broker.fetch(fetch_of(0, epoch=0), replica=2, isolation=READ_COMMITTED).result()
    assert offsets(found) == [0]


@run_by(with_one_broker)
async def test_aborted_transactions_are_listed_by_first_offset_if_they_overlap_the_answer(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    for producer_id in (7, 8, 9):  # at 0, 1, 2
        send(broker, producer_id)
    broker.end_transaction(8, committed=False)
    broker.end_transaction(9, committed=True)
    broker.end_transaction(7, committed=False)
    send(broker, 8, 1)  # at 6
    broker.end_transaction(8, committed=False)
    found = committed(broker)
    assert offsets(found) == list(range(8))
    first, second, later = AbortedTransaction(7, 0), AbortedTransaction(8, 1), AbortedTransaction(8, 6)
    assert found.aborted_transactions == [first, second, later]
    assert committed(broker, 4).aborted_transactions == [first, later], "the marker of the second is before"
    size = sum(header.size for header in headers(bytes(found.records))[:2])
    assert committed(broker, max_bytes=size).aborted_transactions == [first, second], "it ends before the later"
    assert committed(broker, 8).aborted_transactions == []
    assert broker.fetch(fetch_of(0)).result()[0].aborted_transactions == [], "read_uncommitted needs none"


@run_by(with_one_broker)
async def test_a_fetch_of_committed_records_wakes_when_the_marker_is_replicated(broker: OneBroker, /) -> None:
    await broker.told(FOLLOWED)
    send(broker, 7)
    reading = broker.fetch(fetch_of(0), max_wait_ms=60_000, isolation=READ_COMMITTED)
    for offset in (1, 2):  # the high watermark moves, the last stable offset does not
        broker.follower_has(offset, 2)
        write(broker)
        await asyncio.sleep(0.1)
        assert not reading.done()
    broker.end_transaction(7)
    await asyncio.sleep(0.1)
    assert not reading.done(), "the marker is not replicated"
    broker.follower_has(4, 2)
    await asyncio.sleep(0.01)
    assert offsets(reading.result()[0]) == [0, 1, 2, 3]
    assert broker.replicas.waits.expired_fetches == 0


@run_by(with_one_broker)
async def test_a_fetch_for_many_bytes_counts_those_below_the_last_stable_offset(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    write(broker)
    size = len(batch())
    reading = broker.fetch(fetch_of(0), max_wait_ms=60_000, min_bytes=2 * size, isolation=READ_COMMITTED)
    send(broker, 7)
    await asyncio.sleep(0.1)
    assert not reading.done()
    broker.end_transaction(7)
    await asyncio.sleep(0.01)
    assert offsets(reading.result()[0]) == [0, 1, 2]


@run_by(with_one_broker)
async def test_the_last_stable_offset_is_not_below_a_log_start_that_was_moved_past_it(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7)
    write(broker, 2)
    assert broker.partition().last_stable_offset == 0
    broker.delete(2)
    assert broker.partition().last_stable_offset == 2


# -- markers --


class Listener:
    def __init__(self) -> None:
        self.appended: list[tuple[TopicPartition, int, EndTransactionMarker, int]] = []

    def marker_appended(
        self, topic_partition: TopicPartition, producer_id: int, marker: EndTransactionMarker, end_offset: int
    ) -> None:
        self.appended.append((topic_partition, producer_id, marker, end_offset))


@run_by(with_one_broker)
async def test_a_marker_is_answered_once_every_in_sync_replica_has_it(broker: OneBroker, /) -> None:
    listener = Listener()
    broker.replicas.appender.marker_listeners.append(listener)
    await broker.told(FOLLOWED)
    send(broker, 7)
    ended = broker.end_transaction(7, coordinator_epoch=4)
    assert [(p, i, m.coordinator_epoch, end) for p, i, m, end in listener.appended] == [(ORDERS, 7, 4, 2)]
    broker.follower_has(1, 2)
    await asyncio.sleep(0.1)
    assert not ended.done()
    broker.follower_has(2, 2)
    await asyncio.sleep(0.01)
    assert ended.result() == {ORDERS: ErrorCode.NONE}


@run_by(with_one_broker)
async def test_a_repeated_marker_is_answered_well_and_changes_nothing(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7)
    for _ in range(2):
        ended = broker.end_transaction(7, epoch=1, committed=False, raises_epoch=True)
        assert ended.result() == {ORDERS: ErrorCode.NONE}
    found = committed(broker)
    assert found.last_stable_offset == found.high_watermark
    assert found.aborted_transactions == [AbortedTransaction(7, 0)]


@run_by(with_one_broker)
async def test_a_late_marker_does_not_end_the_next_transaction(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7)
    broker.end_transaction(7, epoch=1, raises_epoch=True)
    send(broker, 7, epoch=1)
    late = broker.end_transaction(7, epoch=1, committed=False, raises_epoch=True)
    assert late.result() == {ORDERS: ErrorCode.INVALID_PRODUCER_EPOCH}
    assert committed(broker).last_stable_offset == 2
    broker.end_transaction(7, epoch=2, raises_epoch=True)
    assert committed(broker).aborted_transactions == []
    assert committed(broker).last_stable_offset == broker.partition().log.log_end_offset == 4


@run_by(with_one_broker)
async def test_a_marker_of_an_older_epoch_or_coordinator_is_refused_and_not_written(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7, epoch=3)
    old_epoch = broker.end_transaction(7, epoch=2)
    broker.end_transaction(7, epoch=3, coordinator_epoch=5)
    old_coordinator = broker.end_transaction(7, epoch=3, coordinator_epoch=4)
    assert old_epoch.result() == {ORDERS: ErrorCode.INVALID_PRODUCER_EPOCH}
    assert old_coordinator.result() == {ORDERS: ErrorCode.TRANSACTION_COORDINATOR_FENCED}
    assert broker.partition().log.log_end_offset == 2


@run_by(with_one_broker)
async def test_each_partition_answers_for_its_own_marker(broker: OneBroker, /) -> None:
    second, unknown = TopicPartition(TOPIC, 1), TopicPartition(TOPIC, 2)
    await broker.told(FOLLOWED, state(leader=2, isr=(1, 2), replicas=(1, 2), index=1))
    send(broker, 7)
    ended = broker.end_transaction(7, partitions=(ORDERS, second, unknown), timeout_ms=300)
    await asyncio.sleep(0.31)
    assert ended.result() == {
        ORDERS: ErrorCode.REQUEST_TIMED_OUT,
        second: ErrorCode.NOT_LEADER_OR_FOLLOWER,
        unknown: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    broker.follower_has(2, 2)
    assert broker.end_transaction(7).done() is False
    assert committed(broker).last_stable_offset == 2, "the marker that timed out counts as soon as it is replicated"


@run_by(with_one_broker)
async def test_a_marker_is_not_written_with_too_few_replicas_in_sync(broker: OneBroker, /) -> None:
    await broker.told(state(isr=(1,)))
    send(broker, 7)
    assert broker.end_transaction(7).result() == {ORDERS: ErrorCode.NOT_ENOUGH_REPLICAS}
    assert broker.partition().log.log_end_offset == 1


@run_by(with_one_broker)
async def test_a_marker_waits_no_longer_once_another_broker_leads(broker: OneBroker, /) -> None:
    await broker.told(FOLLOWED)
    send(broker, 7)
    ended = broker.end_transaction(7, timeout_ms=60_000)
    await broker.told(state(leader=2, epoch=1, isr=(1, 2), replicas=(1, 2)))
    await asyncio.sleep(0.01)
    assert ended.result() == {ORDERS: ErrorCode.NOT_LEADER_OR_FOLLOWER}


# -- questions --


@run_by(with_one_broker)
async def test_the_first_batch_of_a_transaction_needs_a_question_and_later_ones_do_not(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    assert send(broker, 7, question=None) == ErrorCode.NOT_ENOUGH_REPLICAS
    question = broker.partition().questions.take(7)
    assert send(broker, 7, question=question) == ErrorCode.NONE
    assert send(broker, 7, 1, question=None) == ErrorCode.NONE
    assert send(broker, 8, question=question) == ErrorCode.NOT_ENOUGH_REPLICAS, "it was about another producer"
    broker.end_transaction(7)
    assert send(broker, 7, 1, question=None) == ErrorCode.NONE, "a repetition is in the log already"
    assert send(broker, 7, 2, question=None) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert broker.partition().log.log_end_offset == 3


@run_by(with_one_broker)
async def test_a_transaction_that_is_open_in_an_older_epoch_does_not_confirm_a_batch(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7)
    assert send(broker, 7, epoch=1, question=None) == ErrorCode.NOT_ENOUGH_REPLICAS


@run_by(with_one_broker)
async def test_a_marker_voids_the_question_of_its_producer_alone(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    questions = broker.partition().questions
    ours, theirs = questions.take(7), questions.take(8)
    assert questions.take(7) is ours
    broker.end_transaction(7)
    assert send(broker, 7, question=ours) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert send(broker, 8, question=theirs) == ErrorCode.NONE
    assert send(broker, 7, question=questions.take(7)) == ErrorCode.NONE


@run_by(with_one_broker)
async def test_a_change_of_leadership_voids_all_questions(broker: OneBroker, /) -> None:
    await broker.told(FOLLOWED)
    question = broker.partition().questions.take(7)
    await broker.told(state(epoch=1, isr=(1, 2), replicas=(1, 2)))
    assert send(broker, 7, question=question) == ErrorCode.NONE, "the same leader goes on"
    question = broker.partition().questions.take(8)
    await broker.told(state(leader=2, epoch=2, isr=(1, 2), replicas=(1, 2)))
    await broker.told(state(epoch=3, isr=(1, 2), replicas=(1, 2)))
    assert send(broker, 8, question=question) == ErrorCode.NOT_ENOUGH_REPLICAS


@run_by(with_one_broker)
async def test_a_question_that_nobody_holds_is_forgotten(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    questions = broker.partition().questions
    for producer_id in range(100):
        questions.take(producer_id)
    gc.collect()
    assert questions._open is not None
    assert not questions._open


@run_by(with_one_broker)
async def test_a_producer_with_an_open_transaction_may_not_write_beside_it(broker: OneBroker, /) -> None:
    await broker.told(ALONE)
    send(broker, 7)
    assert send(broker, 7, 1, transactional=False) == ErrorCode.INVALID_TXN_STATE
    broker.end_transaction(7)
    assert send(broker, 7, 1, transactional=False) == ErrorCode.NONE


@run_by(with_one_broker)
async def test_a_transaction_of_an_earlier_epoch_is_aborted_before_the_next_one_begins(broker: OneBroker, /) -> None:
    """Only a power cut leaves one: it took the coordinator's records, and the producer was told of an abort."""
    await broker.told(ALONE)
    assert send(broker, 7) is ErrorCode.NONE
    assert send(broker, 7, epoch=1) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert send(broker, 7, epoch=1) is ErrorCode.NONE
    broker.end_transaction(7, epoch=2, raises_epoch=True)
    found = committed(broker)
    assert (offsets(found), found.aborted_transactions) == ([0, 1, 2, 3], [AbortedTransaction(7, 0)])
