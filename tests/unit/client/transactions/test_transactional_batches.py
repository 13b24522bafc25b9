"""The batches of a transactional producer: their numbers, and what becomes of them if the transaction is aborted."""

from __future__ import annotations

from random import Random

import pytest

from minibroker.client.errors import TransactionAborted
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import Batch, BatchVerdict, Identity
from minibroker.client.producing.partitioners import Partitioner
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.records import parse_header
from minibroker.protocol.records.compression import Compression

FIRST, SECOND = Identity(7, 0), Identity(7, 1)
ABORTED = TransactionAborted("t", "its block was left")


def make() -> Accumulator:
    accumulator = Accumulator(
        batch_size=1_000,
        buffer_memory=100_000,
        max_request_size=10_000,
        linger_s=0.0,
        delivery_timeout_s=120.0,
        is_idempotent=True,
        is_transactional=True,
        partitioner=Partitioner(),
        random=Random(7),
    )
    accumulator.begin_epoch(FIRST)
    accumulator.topic_is_known("t", "id-1", 1, [0])
    return accumulator


def add(accumulator: Accumulator, value: bytes = b"v", topic: str = "t") -> Batch:
    return accumulator.add(0.0, topic, value, None, None, 5, None)[0]


def take(accumulator: Accumulator, topic: str = "t") -> Batch:
    return accumulator.take(accumulator._topics[topic].queues[0])


@pytest.mark.parametrize("code", [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID])
def test_a_lost_number_fails_the_batch_instead_of_raising_the_epoch(code: ErrorCode) -> None:
    accumulator = make()
    add(accumulator)
    assert accumulator.judge(take(accumulator), code) is BatchVerdict.FAIL


def test_a_failure_leaves_the_epoch_to_the_coordinator() -> None:
    accumulator = make()
    failed: list[Batch] = []
    accumulator.on_failed = lambda batch, error: failed.append(batch)
    add(accumulator)
    batch = take(accumulator)
    assert accumulator.judge(batch, ErrorCode.INVALID_RECORD) is BatchVerdict.FAIL
    accumulator.fail(batch, MinibrokerError("bad"))
    assert failed == [batch]
    assert accumulator.identity == accumulator.queue_of(batch).identity == FIRST


def test_each_epoch_begins_with_sequence_0() -> None:
    accumulator = make()
    for identity in (FIRST, SECOND):
        accumulator.begin_epoch(identity)
        for sequence in range(3):
            add(accumulator)
            batch = take(accumulator)
            assert (batch.identity, batch.sequence) == (identity, sequence)
            assert accumulator.judge(batch, ErrorCode.NONE) is BatchVerdict.DELIVERED
            accumulator.delivered(batch, 0, -1)


def test_a_topic_that_was_created_again_gets_numbers_from_0_in_the_same_epoch() -> None:
    accumulator = make()
    add(accumulator)
    accumulator.judge(take(accumulator), ErrorCode.NONE)
    waiting = add(accumulator)
    accumulator.topic_is_known("t", "id-2", 1, [0])
    assert take(accumulator) is waiting
    assert (waiting.identity, waiting.sequence) == (FIRST, 0)


def test_an_abandoned_record_ends_wherever_it_waits_and_is_never_sent() -> None:
    accumulator = make()
    in_flight = add(accumulator)
    take(accumulator)
    waiting = add(accumulator)
    held = add(accumulator, topic="unknown")
    accumulator.abandon(ABORTED)
    assert all(batch.error is ABORTED for batch in (in_flight, waiting, held))
    assert not accumulator.is_waiting
    assert not accumulator.open_batches
    assert accumulator.ready(0.0).queues == []
    assert accumulator.held_topics() == []


def test_the_next_transaction_overtakes_no_abandoned_batch_in_flight() -> None:
    accumulator = make()
    abandoned = add(accumulator)
    take(accumulator)
    accumulator.abandon(ABORTED)
    accumulator.begin_epoch(SECOND)
    add(accumulator)
    flush = accumulator.begin_flush()
    assert accumulator.ready(0.0).queues == []
    assert accumulator.judge(abandoned, ErrorCode.INVALID_PRODUCER_EPOCH) is BatchVerdict.FAIL
    accumulator.fail(abandoned, MinibrokerError("late"))
    batch = take(accumulator)
    assert (batch.identity, batch.sequence) == (SECOND, 0)
    assert accumulator.judge(batch, ErrorCode.NONE) is BatchVerdict.DELIVERED
    accumulator.delivered(batch, 0, -1)
    assert accumulator.is_flushed(flush)


def test_closed_batches_take_no_more_records() -> None:
    accumulator = make()
    first, held = add(accumulator), add(accumulator, topic="unknown")
    accumulator.close_batches()
    assert first.is_closed
    assert held.is_closed
    assert not accumulator.open_batches
    assert add(accumulator) is not first


@pytest.mark.parametrize("is_transactional", [True, False])
def test_a_batch_says_whether_it_is_transactional(is_transactional: bool) -> None:
    accumulator = make()
    add(accumulator)
    encoded = take(accumulator).encode(Compression.NONE, is_transactional=is_transactional)
    assert parse_header(encoded).is_transactional is is_transactional
