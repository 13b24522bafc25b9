"""A transaction that lacks a record or an offset is never committed, and the end of a block tells its outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from minibroker.client.errors import (
    BufferFull,
    InvalidSetting,
    InvalidTransactionState,
    PartitionerFailed,
    SerializationFailed,
    TransactionAborted,
)
from minibroker.client.group.commits import GroupMetadata
from minibroker.client.producer import Producer
from minibroker.protocol.apis import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, ScriptedCluster, reject
from tests.unit.client.transactions.test_producer_transactions import (
    ALONE,
    P0,
    committed,
    ends,
    ends_upon,
    lose_ends,
    producer_of,
    run,
)

E = ErrorCode


def partition_of(topic: str, key: bytes | None, value: bytes | None, partitions: Any) -> int:
    assert value != b"nowhere"
    return 0


NOT_SENT: list[tuple[Callable[[Producer], object], type[Exception]]] = [
    (lambda producer: producer.send("orders", b"x" * 5_000), BrokerError),
    (lambda producer: producer.send("bad/name", b"x"), BrokerError),
    (lambda producer: producer.send("orders", b"x", partition=-1), BrokerError),
    (lambda producer: producer.send("orders", b"x", partition="0"), InvalidSetting),  # type: ignore[arg-type]
    (lambda producer: producer.send("orders", 5), TypeError),
    (lambda producer: producer.send(["orders"], b"x"), TypeError),  # type: ignore[arg-type]
    (lambda producer: producer.send("orders", b"x", headers={"a": b"b"}), TypeError),  # type: ignore[arg-type]
    (lambda producer: producer.send_batch("orders", [b"x" * 5_000]), BrokerError),
    (lambda producer: producer.send_batch("orders", [b"x"], [b"k", b"l"]), ValueError),
    (lambda producer: producer.send_batch("orders", [5]), TypeError),
]


@pytest.mark.parametrize("number", range(len(NOT_SENT)))
def test_an_error_of_send_aborts_the_transaction_even_if_it_is_handled(number: int) -> None:
    call, kind = NOT_SENT[number]

    async def scenario(cluster: ScriptedCluster) -> None:
        async with producer_of(cluster, max_request_size=2_000) as producer:
            with pytest.raises(TransactionAborted, match="a record for .* has failed") as caught:  # noqa: PT012
                async with producer.transaction():
                    await producer.send("orders", b"good", partition=0)
                    with pytest.raises(kind):
                        call(producer)
            assert isinstance(caught.value.reason, kind)
            async with producer.transaction():
                producer.send("orders", b"again", partition=0)
        assert committed(cluster) == [b"again"]
        assert ends(cluster) == [False, True]

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "value", "kind"),
    [
        ({"value_serializer": "json"}, object(), SerializationFailed),
        ({"partitioner": partition_of}, b"nowhere", PartitionerFailed),
        ({"buffer_memory": 2_000, "max_request_size": 1_900, "batch_size": 100}, b"x" * 1_700, BufferFull),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_an_error_of_the_program_or_of_the_buffer_aborts_as_well(
    settings: dict[str, Any], value: Any, kind: type[Exception]
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        async with producer_of(cluster, **settings) as producer:
            with pytest.raises(TransactionAborted) as caught:  # noqa: PT012
                async with producer.transaction():
                    await producer.send("orders", "good" if "value_serializer" in settings else b"good")
                    with pytest.raises(kind):  # noqa: PT012
                        for _ in range(10):
                            producer.send("orders", value)
            assert isinstance(caught.value.reason, kind)
        assert committed(cluster) == []

    run(scenario)


@run_by(run)
async def test_a_block_that_is_left_by_an_error_of_the_cluster_may_be_repeated(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster, max_request_size=2_000, value_serializer="json") as producer:
        with pytest.raises(TransactionAborted, match="MESSAGE_TOO_LARGE") as caught:
            async with producer.transaction():
                producer.send("orders", "x" * 5_000)
        assert isinstance(caught.value.__cause__, BrokerError)
        lost = BrokerError(E.ILLEGAL_GENERATION, "as consumer.group_metadata() raises it")
        with pytest.raises(TransactionAborted, match="ILLEGAL_GENERATION") as caught:  # noqa: PT012
            async with producer.transaction():
                await producer.send("orders", "a")
                raise lost
        assert caught.value.reason is caught.value.__cause__ is lost
        with pytest.raises(SerializationFailed):
            async with producer.transaction():
                producer.send("orders", object())
    assert committed(cluster) == []


# --- offsets ---


@pytest.mark.parametrize(
    "arguments", [({P0: -1}, ALONE), ({P0: 1}, "billing"), (5, ALONE), ({P0: 1}, GroupMetadata("billing", 3, "x"))]
)
def test_an_error_of_send_offsets_aborts_even_if_it_is_handled(arguments: tuple[Any, Any]) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        async with producer_of(cluster) as producer:
            with pytest.raises(TransactionAborted):  # noqa: PT012
                async with producer.transaction() as transaction:
                    await producer.send("orders", b"a")
                    with pytest.raises(Exception, match=r"\w"):
                        await transaction.send_offsets(*arguments)
        assert committed(cluster) == []

    run(scenario)


@run_by(run)
async def test_offsets_whose_call_was_cancelled_abort(cluster: ScriptedCluster, /) -> None:
    cluster.script(TXN_OFFSET_COMMIT, HANG)
    async with producer_of(cluster, request_timeout_ms=500) as producer:
        with pytest.raises(TransactionAborted, match="send_offsets has failed: it was interrupted by CancelledError"):  # noqa: PT012
            async with producer.transaction() as transaction:
                await producer.send("orders", b"a")
                with pytest.raises(TimeoutError):  # noqa: PT012
                    async with asyncio.timeout(None) as limit:
                        ends_upon(cluster, TXN_OFFSET_COMMIT, limit)
                        await transaction.send_offsets({P0: 1}, ALONE)
    assert committed(cluster) == []


@run_by(run)
async def test_offsets_that_are_not_awaited_abort(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        transaction = producer.transaction()
        with pytest.raises(InvalidTransactionState, match="Write `await transaction.send_offsets"):  # noqa: PT012
            async with transaction:
                await producer.send("orders", b"a")
                transaction.send_offsets({P0: 1}, ALONE)  # type: ignore[unused-coroutine]
        assert not await transaction.was_committed()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction() as transaction:
                transaction.send_offsets({P0: 1}, ALONE)  # type: ignore[unused-coroutine]
                raise ZeroDivisionError
        async with producer.transaction() as transaction:
            producer.send("orders", b"b")
            await transaction.send_offsets({P0: 1}, ALONE)
    assert committed(cluster) == [b"b"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_end_of_a_block_waits_for_offsets_that_another_task_sends(is_refused: bool) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        codes = [E.CONCURRENT_TRANSACTIONS, *([E.UNKNOWN_MEMBER_ID] if is_refused else [])]
        cluster.script(TXN_OFFSET_COMMIT, *map(reject, codes))
        transaction, task = None, None
        async with producer_of(cluster) as producer:
            try:
                async with producer.transaction() as transaction:
                    await producer.send("orders", b"a")
                    task = asyncio.create_task(transaction.send_offsets({P0: 3}, ALONE))
                    await asyncio.sleep(0)
                assert not is_refused
            except TransactionAborted:
                assert is_refused
            assert task is not None
            await asyncio.gather(task, return_exceptions=True)
        assert committed(cluster) == ([] if is_refused else [b"a"])
        assert bool(cluster.groups.group("billing").offsets) is not is_refused

    run(scenario)


@run_by(run)
async def test_offsets_of_a_topic_that_does_not_exist_fail_after_max_block_ms(cluster: ScriptedCluster, /) -> None:
    cluster.script(TXN_OFFSET_COMMIT, *[reject(E.UNKNOWN_TOPIC_OR_PARTITION)] * 1_000)
    async with producer_of(cluster, max_block_ms=100) as producer, asyncio.timeout(30):
        after = r"UNKNOWN_TOPIC_OR_PARTITION: offset 1 of input-0, after \d+\.\d s \(max_block_ms\)"
        with pytest.raises(TransactionAborted, match=after):
            async with producer.transaction() as transaction:
                await transaction.send_offsets({P0: 1}, ALONE)


# --- the outcome ---


@run_by(run)
async def test_an_interrupted_commit_says_that_it_may_be_committed(
    cluster: ScriptedCluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    release = lose_ends(cluster)
    async with producer_of(cluster, request_timeout_ms=500) as producer:
        with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError) as caught:  # noqa: PT012
            async with asyncio.timeout(None) as limit, producer.transaction() as transaction:
                ends_upon(cluster, END_TXN, limit)
                producer.send("orders", b"a", partition=0)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        (note,) = caught.value.__cause__.__notes__
        assert "it may be committed. Call was_committed()" in note
        assert note in caplog.text
        release()
        assert await transaction.was_committed()
    assert committed(cluster) == [b"a"]


@run_by(run)
async def test_an_interruption_before_the_commit_aborts_and_has_no_note(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        with pytest.raises(TimeoutError) as caught:  # noqa: PT012
            async with asyncio.timeout(None) as limit, producer.transaction() as transaction:
                await producer.send("orders", b"a", partition=0)
                limit.reschedule(0)
                await asyncio.sleep(60)
        assert not hasattr(caught.value.__cause__, "__notes__")
        assert not await transaction.was_committed()


@run_by(run)
async def test_a_transaction_that_was_open_for_too_long_names_that_cause(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster, transaction_timeout_ms=50) as producer:
        for is_noticed_by_a_batch in (False, True):
            with pytest.raises(TransactionAborted) as caught:  # noqa: PT012
                async with producer.transaction():
                    await producer.send("orders", b"slow", partition=0)
                    await asyncio.sleep(0.06)
                    cluster.transactions.time_out("t")
                    if is_noticed_by_a_batch:
                        await producer.send("orders", b"late", partition=0)
            for text in (str(caught.value), str(caught.value.reason)):
                assert "it was open for longer than transaction_timeout_ms=50, so its coordinator aborted it" in text
                assert "raise transaction_timeout_ms" in text
                assert "newer producer" not in text
                assert "begin it again" not in text


@run_by(run)
async def test_a_time_out_above_the_brokers_maximum_is_named(cluster: ScriptedCluster, /) -> None:
    cluster.script(INIT_PRODUCER_ID, reject(E.INVALID_TRANSACTION_TIMEOUT))
    with pytest.raises(BrokerError, match=r"transaction_timeout_ms=3600000.*transaction\.max\.timeout\.ms"):
        await producer_of(cluster, transaction_timeout_ms=3_600_000).start()
    assert cluster.requests(END_TXN) == []
