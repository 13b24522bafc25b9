"""Transactions of the asynchronous producer, against a scripted cluster that decides by the broker's own rules."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.broker.transactions.states import TransactionState
from minibroker.client.consumer import Consumer
from minibroker.client.errors import (
    Closed,
    CommitFailed,
    CommitOutcomeUnknown,
    InvalidSetting,
    InvalidTransactionState,
    ProducerFenced,
    TransactionAborted,
)
from minibroker.client.group.commits import GroupMetadata, OffsetAndMetadata
from minibroker.client.producer import Producer
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol import messages as m
from minibroker.protocol.apis import END_TXN, FIND_COORDINATOR, INIT_PRODUCER_ID, PRODUCE, TXN_OFFSET_COMMIT, Api
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import parse_header
from tests.running import run_by
from tests.unit.client.scripted_broker import (
    CARRY_OUT_AND_DROP,
    CARRY_OUT_AND_HANG,
    DROP,
    HANG,
    Action,
    Received,
    ScriptedCluster,
    carry_out_and_answer,
    leap,
    reject,
)

E = ErrorCode
P0 = TopicPartition("input", 0)
ALONE = GroupMetadata("billing")


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 2, partitions: int = 2
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            cluster.transactions.coordinator = brokers - 1
            await scenario(cluster)

    asyncio.run(main())


def producer_of(cluster: ScriptedCluster, **settings: Any) -> Producer:
    all_settings: dict[str, Any] = {"transactional_id": "t", "retry_backoff_ms": 5} | settings
    return Producer(cluster.bootstrap, **all_settings)


def committed(cluster: ScriptedCluster) -> list[bytes | None]:
    return [value for log in cluster.topics["orders"].logs for value in log.committed_values()]


def ends(cluster: ScriptedCluster) -> list[bool]:
    return [request.committed for request in cluster.requests(END_TXN)]


def ends_upon(cluster: ScriptedCluster, api: Api[Any, Any], limit: asyncio.Timeout) -> None:
    """Let the time run out when the first such request arrives."""

    def rule(received: Received) -> None:
        if received.api is api and not limit.expired():
            limit.reschedule(0)

    cluster.rules.insert(0, rule)


def run_out_of_patience(producer: Producer) -> None:
    """Let the calls of a producer that has started give up after a second."""
    assert producer._transactions is not None
    producer._transactions._patience_s = 1.0


def lose_ends(cluster: ScriptedCluster) -> Callable[[], None]:
    """Let no EndTxn reach the coordinator until the result is called."""
    rule = rule_of(END_TXN.key, DROP)
    cluster.rules.append(rule)
    return lambda: cluster.rules.remove(rule)


def rule_of(key: int, action: Action) -> Callable[[Received], Action | None]:
    return lambda received: action if received.api.key == key else None


async def fail(producer: Producer, *values: bytes) -> Transaction:
    """Run a block that sends these records and raises. Return its transaction."""
    transaction = producer.transaction()

    async def block() -> None:
        async with transaction:
            for value in values:
                await producer.send("orders", value, partition=0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    return transaction


# --- the ordinary ---


@run_by(run)
async def test_the_records_of_a_block_are_committed_at_its_end(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        async with producer.transaction() as transaction:
            await producer.send("orders", b"a", partition=0)
            producer.send("orders", b"b", partition=1)
            producer.send_batch("orders", [b"c", b"d"], partition=1)
            assert committed(cluster) == []
        assert committed(cluster) == [b"a", b"b", b"c", b"d"]
        assert await transaction.was_committed()
    assert ends(cluster) == [True]
    assert {request.transactional_id for request in cluster.requests(PRODUCE)} == {"t"}


@run_by(run)
async def test_an_exception_aborts_and_propagates(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        transaction = await fail(producer, b"a")
        assert not await transaction.was_committed()
        assert ends(cluster) == [False]
        async with producer.transaction():
            producer.send("orders", b"b")
    assert committed(cluster) == [b"b"]


@run_by(run)
async def test_each_transaction_has_its_own_epoch_whose_sequences_begin_at_0(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        for number in range(3):
            async with producer.transaction():
                for index in range(3):
                    await producer.send("orders", b"%d-%d" % (number, index), partition=0)
    headers = [batch.header for batch in cluster.log("orders").batches if not batch.header.is_control]
    assert [(header.producer_epoch, header.base_sequence) for header in headers] == [
        (epoch, sequence) for epoch in range(3) for sequence in range(3)
    ]
    assert all(header.is_transactional for header in headers)
    assert len(cluster.requests(INIT_PRODUCER_ID)) == 1


@run_by(run)
async def test_a_transaction_in_which_nothing_was_sent_asks_no_broker(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        before = len(cluster.received)
        async with producer.transaction() as transaction:
            producer.send_batch("orders", [])
        assert await transaction.was_committed()
        await fail(producer)
        assert len(cluster.received) == before


@run_by(run)
async def test_records_that_were_not_sent_yet_are_given_up_without_asking_the_coordinator(
    cluster: ScriptedCluster, /
) -> None:
    async with producer_of(cluster, linger_ms=10_000) as producer:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction():
                delivery = producer.send("orders", b"a")
                raise ZeroDivisionError
        with pytest.raises(TransactionAborted, match="its block was left by ZeroDivisionError"):
            await delivery
    assert cluster.requests(END_TXN) == []
    assert cluster.requests(PRODUCE) == []


@run_by(run)
async def test_starting_fences_an_earlier_producer_and_aborts_its_transaction(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as zombie:
        transaction = zombie.transaction()
        await transaction.__aenter__()
        await zombie.send("orders", b"zombie", partition=0)
        async with producer_of(cluster) as producer:
            async with producer.transaction():
                await producer.send("orders", b"a", partition=0)
            zombie.send("orders", b"late", partition=0)
            with pytest.raises(ProducerFenced, match=r"'t' is fenced .*another producer has started") as caught:
                await transaction.__aexit__(None, None, None)
            assert caught.value.is_fatal
            with pytest.raises(ProducerFenced):
                zombie.send("orders", b"later")
            with pytest.raises(ProducerFenced):
                await zombie.transaction().__aenter__()
            async with producer.transaction():
                producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"a", b"b"]


@run_by(run)
async def test_a_start_waits_until_the_earlier_transaction_has_ended(cluster: ScriptedCluster, /) -> None:
    cluster.transactions.holds_markers = True
    async with producer_of(cluster) as first:
        await first.transaction().__aenter__()
        await first.send("orders", b"a", partition=0)
        second = producer_of(cluster)
        starting = asyncio.create_task(second.start())
        await cluster.until(lambda: len(cluster.requests(INIT_PRODUCER_ID)) >= 4)
        assert not starting.done()
        cluster.transactions.holds_markers = False
        cluster.transactions.complete("t")
        await starting
        await second.close()


# --- what a block refuses ---


@run_by(run)
async def test_a_record_outside_of_a_transaction_is_refused(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        for _ in range(2):
            for send in (
                lambda: producer.send("orders", b"x"),
                lambda: producer.send("orders", b"x", b"key"),
                lambda: producer.send_batch("orders", [b"x"]),
            ):
                with pytest.raises(
                    InvalidTransactionState, match=r"send within `async with producer.transaction\(\):`"
                ):
                    send()
            async with producer.transaction():
                producer.send("orders", b"a", partition=0)
                producer.send("orders", b"b", b"key")
    assert sorted(map(bytes, filter(None, committed(cluster)))) == [b"a", b"a", b"b", b"b"]


@run_by(run)
async def test_a_record_sent_while_the_block_ends_is_refused(cluster: ScriptedCluster, /) -> None:
    held = rule_of(PRODUCE.key, CARRY_OUT_AND_HANG)
    async with producer_of(cluster, request_timeout_ms=300) as producer:
        async with producer.transaction():
            await producer.send("orders", b"a", partition=0)
        cluster.rules.append(held)
        transaction = producer.transaction()
        await transaction.__aenter__()
        producer.send("orders", b"b", partition=0)
        await cluster.until(lambda: len(cluster.requests(PRODUCE)) == 2)
        producer.send("orders", b"c")  # opens a batch that waits
        leaving = asyncio.create_task(transaction.__aexit__(None, None, None))
        await asyncio.sleep(0)
        refused: list[InvalidTransactionState] = []
        try:
            producer.send("orders", b"late")
        except InvalidTransactionState as error:
            refused.append(error)
        cluster.rules.remove(held)
        await leaving
        assert len(refused) == 1
    assert sorted(map(bytes, filter(None, committed(cluster)))) == [b"a", b"b", b"c"]


@run_by(run)
async def test_a_second_transaction_is_refused_while_one_is_open(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:

        async def other() -> None:
            async with producer.transaction():
                raise AssertionError("it must not begin")

        async with producer.transaction():
            producer.send("orders", b"a")
            with pytest.raises(InvalidTransactionState, match="is open already, perhaps in another task"):
                async with producer.transaction():
                    raise AssertionError("it must not begin")
            with pytest.raises(InvalidTransactionState):
                await asyncio.create_task(other())
        assert committed(cluster) == [b"a"]


@run_by(run)
async def test_of_two_tasks_that_begin_at_once_one_is_refused(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        release = lose_ends(cluster)
        await fail(producer, b"x")
        begun = [asyncio.create_task(producer.transaction().__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        release()
        done = await asyncio.gather(*begun, return_exceptions=True)
        assert sum(isinstance(each, InvalidTransactionState) for each in done) == 1


@run_by(run)
async def test_a_transaction_is_used_once(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        transaction = producer.transaction()
        with pytest.raises(InvalidTransactionState, match="has not begun"):
            await transaction.was_committed()
        async with transaction:
            with pytest.raises(InvalidTransactionState, match="after the end of its block"):
                await transaction.was_committed()
        with pytest.raises(InvalidTransactionState, match="used once"):
            await transaction.__aenter__()
        async with producer.transaction():
            with pytest.raises(InvalidTransactionState, match="use it within its block"):
                await transaction.send_offsets({P0: 1}, ALONE)


def test_transactions_need_a_transactional_id() -> None:
    with pytest.raises(InvalidSetting, match=r'^transactional_id=None: .*transactional_id="name"'):
        Producer("localhost:9092").transaction()


# --- failures ---


@run_by(run)
async def test_a_record_that_fails_aborts_the_transaction_even_if_the_failure_was_handled(
    cluster: ScriptedCluster, /
) -> None:
    async with producer_of(cluster) as producer:
        with pytest.raises(TransactionAborted, match="a record of orders-0 has failed: INVALID_RECORD") as caught:  # noqa: PT012
            async with producer.transaction():
                await producer.send("orders", b"good", partition=1)
                cluster.script(PRODUCE, reject(E.INVALID_RECORD))
                with pytest.raises(BrokerError):
                    await producer.send("orders", b"bad", partition=0)
                with pytest.raises(TransactionAborted):
                    producer.send("orders", b"more")
        assert isinstance(caught.value.reason, BrokerError)
        assert not caught.value.is_fatal
        async with producer.transaction():
            producer.send("orders", b"again", partition=0)
    assert committed(cluster) == [b"again"]
    assert ends(cluster) == [False, True]


@run_by(run)
async def test_a_block_that_is_left_by_a_failure_of_the_transaction_says_that_it_may_be_repeated(
    cluster: ScriptedCluster, /
) -> None:
    cluster.script(PRODUCE, reject(E.INVALID_RECORD))
    async with producer_of(cluster) as producer:
        with pytest.raises(TransactionAborted, match="INVALID_RECORD") as caught:
            async with producer.transaction():
                await producer.send("orders", b"bad", partition=0)
        assert isinstance(caught.value.__cause__, BrokerError)
        with pytest.raises(TransactionAborted, match="UNKNOWN_MEMBER_ID") as caught:
            async with producer.transaction() as transaction:
                await transaction.send_offsets({P0: 3}, GroupMetadata("billing", 3, "nobody"))
        assert isinstance(caught.value.__cause__, CommitFailed)
    assert committed(cluster) == []


@run_by(run)
async def test_a_record_that_fails_unnoticed_makes_the_commit_an_abort(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, reject(E.INVALID_RECORD))
    async with producer_of(cluster) as producer:
        with pytest.raises(TransactionAborted, match="INVALID_RECORD"):  # noqa: PT012
            async with producer.transaction():
                producer.send("orders", b"bad", partition=0)
                producer.send("orders", b"other", partition=1)
        await producer.flush()  # the error of the transaction has reported the records
    assert committed(cluster) == []


@run_by(run)
async def test_a_record_that_times_out_aborts(cluster: ScriptedCluster, /) -> None:
    cluster.rules.append(rule_of(PRODUCE.key, DROP))
    async with producer_of(cluster) as producer:
        cluster.rules.insert(0, lambda received: leap(producer) if received.api is PRODUCE else None)
        with pytest.raises(TransactionAborted, match="not acknowledged within"):
            async with producer.transaction():
                producer.send("orders", b"late", partition=0)
        cluster.rules.clear()
        async with producer.transaction():
            producer.send("orders", b"a", partition=0)
    assert committed(cluster) == [b"a"]


@run_by(run)
async def test_a_first_batch_that_meets_the_end_of_the_previous_transaction_is_repeated(
    cluster: ScriptedCluster, /
) -> None:
    cluster.transactions.holds_markers = True
    async with producer_of(cluster) as producer:
        async with producer.transaction():
            producer.send("orders", b"a", partition=0)
        async with producer.transaction():
            producer.send_batch("orders", [b"b"] * 3, partition=0)
            await cluster.until(lambda: len(cluster.requests(PRODUCE)) >= 4)
            cluster.transactions.holds_markers = False
            cluster.transactions.complete("t")
    assert committed(cluster) == [b"a", b"b", b"b", b"b"]


@pytest.mark.parametrize("code", [E.NOT_COORDINATOR, E.COORDINATOR_LOAD_IN_PROGRESS, E.CONCURRENT_TRANSACTIONS])
def test_an_end_is_repeated_until_the_coordinator_answers(code: ErrorCode) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        async with producer_of(cluster) as producer:
            async with producer.transaction():
                await producer.send("orders", b"a", partition=0)
                cluster.script(END_TXN, reject(code), DROP, CARRY_OUT_AND_DROP)
            assert committed(cluster) == [b"a"]
            assert len(set(map(str, cluster.requests(END_TXN)))) == 1  # the same epoch each time
            async with producer.transaction():
                producer.send("orders", b"b", partition=0)
        assert committed(cluster) == [b"a", b"b"]

    run(scenario)


@run_by(run)
async def test_the_coordinator_may_move_during_a_transaction(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        async with producer.transaction():
            await producer.send("orders", b"a", partition=0)
            cluster.transactions.coordinator = 0
        assert [request.key_type for request in cluster.requests(FIND_COORDINATOR)] == [1, 1]
    assert committed(cluster) == [b"a"]


# --- time-outs, fencing ---


@pytest.mark.parametrize("is_noticed_by_a_batch", [True, False])
def test_a_producer_goes_on_after_its_transaction_took_too_long(is_noticed_by_a_batch: bool) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        async with producer_of(cluster) as producer:
            with pytest.raises(TransactionAborted, match="perhaps its coordinator has aborted it"):  # noqa: PT012
                async with producer.transaction() as transaction:
                    await producer.send("orders", b"slow", partition=0)
                    cluster.transactions.time_out("t")
                    if is_noticed_by_a_batch:
                        producer.send("orders", b"late", partition=0)
            assert not await transaction.was_committed()
            async with producer.transaction():
                producer.send("orders", b"again", partition=0)
        assert committed(cluster) == [b"again"]
        own = [request for request in cluster.requests(INIT_PRODUCER_ID) if request.producer_id >= 0]
        assert len(own) == is_noticed_by_a_batch  # KIP-588

    run(scenario)


@run_by(run)
async def test_a_producer_whose_epochs_are_used_up_gets_another_id(cluster: ScriptedCluster, /) -> None:
    import msgspec

    from minibroker.broker.transactions.transaction import LAST_EPOCH

    async with producer_of(cluster) as first:
        known = cluster.transactions.known["t"]
        cluster.transactions.known["t"] = msgspec.structs.replace(known, producer_epoch=LAST_EPOCH - 4)
    async with producer_of(cluster) as producer:
        for number in range(5):
            async with producer.transaction():
                producer.send("orders", b"%d" % number, partition=0)
    assert first
    assert committed(cluster) == [b"0", b"1", b"2", b"3", b"4"]
    assert len({batch.header.producer_id for batch in cluster.log("orders").batches}) == 2


@run_by(run)
async def test_a_commit_without_an_answer_has_an_unknown_outcome_until_it_is_asked_for(
    cluster: ScriptedCluster, /
) -> None:
    cluster.rules.append(rule_of(END_TXN.key, CARRY_OUT_AND_HANG))
    async with producer_of(cluster) as producer:
        run_out_of_patience(producer)
        with pytest.raises(CommitOutcomeUnknown, match=r"was_committed\(\)") as caught:
            async with producer.transaction() as transaction:
                producer.send("orders", b"a", partition=0)
        assert not caught.value.is_fatal
        with pytest.raises(CommitOutcomeUnknown):
            await transaction.was_committed()
        with pytest.raises(CommitOutcomeUnknown):
            await producer.transaction().__aenter__()
        cluster.rules.clear()
        assert await transaction.was_committed()
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"a", b"b"]
    assert set(ends(cluster)) == {True}


@pytest.mark.parametrize("has_timed_out", [True, False])
def test_the_next_transaction_first_finds_out_how_the_previous_one_ended(has_timed_out: bool) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        release = lose_ends(cluster)
        async with producer_of(cluster) as producer:
            cluster.rules.insert(0, lambda received: leap(producer) if received.api is END_TXN else None)
            with pytest.raises(CommitOutcomeUnknown):
                async with producer.transaction() as transaction:
                    producer.send("orders", b"a", partition=0)
            if has_timed_out:
                cluster.transactions.time_out("t")
            release()
            async with producer.transaction():
                producer.send("orders", b"b", partition=0)
            assert await transaction.was_committed() is not has_timed_out
        assert committed(cluster) == ([b"b"] if has_timed_out else [b"a", b"b"])

    run(scenario)


@run_by(run)
async def test_a_producer_fenced_during_an_unanswered_commit_says_that_it_may_be_committed(
    cluster: ScriptedCluster, /
) -> None:
    cluster.rules.append(rule_of(END_TXN.key, CARRY_OUT_AND_HANG))
    async with producer_of(cluster) as producer:
        run_out_of_patience(producer)
        with pytest.raises(CommitOutcomeUnknown):
            async with producer.transaction() as transaction:
                producer.send("orders", b"a", partition=0)
        cluster.rules.clear()
        async with producer_of(cluster):
            pass
        with pytest.raises(ProducerFenced, match="may be committed or aborted") as caught:
            await transaction.was_committed()
        assert caught.value.is_commit_unknown
    assert committed(cluster) == [b"a"]


@run_by(run)
async def test_a_producer_fenced_after_a_refused_commit_does_not_say_that_it_was_aborted(
    cluster: ScriptedCluster, /
) -> None:
    """The former coordinator has written the commit, but answered that it is not the coordinator."""

    def fence(received: Received) -> Action | None:
        if received.api is END_TXN and len(cluster.requests(END_TXN)) == 2:
            cluster.transactions.answer(1, m.InitProducerIdRequest("t"), E.NONE, True)
        return None

    cluster.rules.append(fence)
    cluster.script(END_TXN, carry_out_and_answer(E.NOT_COORDINATOR))
    async with producer_of(cluster) as producer:
        with pytest.raises(ProducerFenced, match="may be committed or aborted"):
            async with producer.transaction():
                producer.send("orders", b"a", partition=0)
    assert committed(cluster) == [b"a"]


# --- cancellation and closing ---


@run_by(run)
async def test_cancelling_a_block_aborts_it(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer:
        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(None) as limit, producer.transaction() as transaction:
                await producer.send("orders", b"a", partition=0)
                limit.reschedule(0)
                await asyncio.sleep(60)
        assert not await transaction.was_committed()
        assert cluster.transactions.state("t") is TransactionState.COMPLETE_ABORT
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"b"]


@run_by(run)
async def test_cancelling_the_end_before_the_commit_aborts(cluster: ScriptedCluster, /) -> None:
    cluster.script(PRODUCE, HANG)
    async with producer_of(cluster, request_timeout_ms=500) as producer:
        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(None) as limit, producer.transaction() as transaction:
                ends_upon(cluster, PRODUCE, limit)
                producer.send("orders", b"a", partition=0)
        assert not await transaction.was_committed()
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"b"]


@run_by(run)
async def test_a_commit_whose_wait_is_cancelled_goes_on(cluster: ScriptedCluster, /) -> None:
    release = lose_ends(cluster)
    async with producer_of(cluster, request_timeout_ms=500) as producer:
        with pytest.raises(TimeoutError):  # noqa: PT012
            async with asyncio.timeout(None) as limit, producer.transaction() as transaction:
                ends_upon(cluster, END_TXN, limit)
                producer.send("orders", b"a", partition=0)
        release()
        assert await transaction.was_committed()
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"a", b"b"]


@run_by(run)
async def test_an_abort_without_an_answer_does_not_hold_up_the_exception_but_the_next_transaction(
    cluster: ScriptedCluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minibroker.client.transactions.transactions.ABORT_WAIT_S", 0.05)
    release = lose_ends(cluster)
    async with producer_of(cluster, request_timeout_ms=500) as producer:
        await fail(producer, b"a")
        assert cluster.transactions.state("t") is TransactionState.ONGOING
        release()
        async with producer.transaction():
            producer.send("orders", b"b", partition=0)
    assert committed(cluster) == [b"b"]


@run_by(run)
async def test_closing_a_producer_aborts_its_open_transaction(cluster: ScriptedCluster, /) -> None:
    producer = producer_of(cluster)
    await producer.start()
    transaction = producer.transaction()
    await transaction.__aenter__()
    await producer.send("orders", b"a", partition=0)
    last = producer.send("orders", b"b", partition=0)
    await producer.close()
    assert cluster.transactions.state("t") is TransactionState.COMPLETE_ABORT
    with pytest.raises(TransactionAborted, match="the producer was closed"):
        await last
    with pytest.raises(TransactionAborted, match="the producer was closed"):
        await transaction.__aexit__(None, None, None)
    with pytest.raises(Closed):
        await producer.transaction().__aenter__()
    assert committed(cluster) == []


@run_by(run)
async def test_closing_a_producer_waits_for_a_commit_under_way(cluster: ScriptedCluster, /) -> None:
    release = lose_ends(cluster)
    producer = producer_of(cluster, request_timeout_ms=300)
    await producer.start()
    transaction = producer.transaction()
    await transaction.__aenter__()
    producer.send("orders", b"a", partition=0)
    leaving = asyncio.create_task(transaction.__aexit__(None, None, None))
    await cluster.until(lambda: len(cluster.requests(END_TXN)) > 0)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    release()
    await asyncio.gather(leaving, closing)
    assert committed(cluster) == [b"a"]


@run_by(run)
async def test_a_dropped_producer_aborts_its_open_transaction(cluster: ScriptedCluster, /) -> None:
    async def drop() -> None:
        producer = producer_of(cluster)
        await producer.start()
        await producer.transaction().__aenter__()
        await producer.send("orders", b"a", partition=0)
        del producer
        gc.collect()

    with pytest.warns(ResourceWarning, match="was dropped without `close`"):
        await drop()
    await cluster.until(lambda: cluster.transactions.state("t") is TransactionState.COMPLETE_ABORT)


@run_by(run)
async def test_cancelling_the_body_of_a_producer_aborts_its_open_transaction(cluster: ScriptedCluster, /) -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012
        async with asyncio.timeout(None) as limit, producer_of(cluster) as producer:
            await producer.transaction().__aenter__()
            await producer.send("orders", b"a", partition=0)
            limit.reschedule(0)
            await asyncio.sleep(60)
    assert cluster.transactions.state("t") is TransactionState.COMPLETE_ABORT


# --- offsets ---


@run_by(run)
async def test_offsets_become_the_groups_when_the_transaction_is_committed(cluster: ScriptedCluster, /) -> None:
    offsets = cluster.groups.group("billing").offsets
    async with producer_of(cluster) as producer:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction() as transaction:
                await transaction.send_offsets({P0: 3}, ALONE)
                raise ZeroDivisionError
        assert offsets == {}
        async with producer.transaction() as transaction:
            await transaction.send_offsets({P0: OffsetAndMetadata(5, 2, "note")}, ALONE)
            assert offsets == {}
    assert {key: tuple(stored)[:3] for key, stored in offsets.items()} == {("input", 0): (5, 2, "note")}
    sent = cluster.requests(TXN_OFFSET_COMMIT)
    assert all(request.adds_partition for request in sent)
    numbers = [request.attempt.number for request in sent if request.attempt is not None]
    assert len(numbers) == len(sent) == len(set(numbers))
    assert numbers == sorted(numbers)  # so that a late attempt is recognised
    assert ends(cluster) == [False, True]


@run_by(run)
async def test_no_offsets_are_no_request(cluster: ScriptedCluster, /) -> None:
    async with producer_of(cluster) as producer, producer.transaction() as transaction:
        await transaction.send_offsets({}, ALONE)
    async with producer_of(cluster) as producer:
        with pytest.raises(InvalidSetting, match=r"give consumer.group_metadata\(\)"):
            async with producer.transaction() as transaction:
                await transaction.send_offsets({P0: 1}, "billing")  # type: ignore[arg-type]
        with pytest.raises(InvalidSetting, match="offset"):
            async with producer.transaction() as transaction:
                await transaction.send_offsets({P0: -1}, ALONE)
    assert cluster.requests(TXN_OFFSET_COMMIT) == cluster.requests(END_TXN) == []


@run_by(run)
async def test_offsets_that_the_group_refuses_abort_the_transaction(cluster: ScriptedCluster, /) -> None:
    stranger = GroupMetadata("billing", 3, "nobody")
    async with producer_of(cluster) as producer:
        with pytest.raises(TransactionAborted, match="the offset of input-0 has failed: UNKNOWN_MEMBER_ID"):  # noqa: PT012
            async with producer.transaction() as transaction:
                await producer.send("orders", b"a", partition=0)
                with pytest.raises(CommitFailed, match="UNKNOWN_MEMBER_ID"):
                    await transaction.send_offsets({P0: 3}, stranger)
        async with producer.transaction() as transaction:
            await transaction.send_offsets({P0: 3}, ALONE)
    assert committed(cluster) == []
    assert cluster.groups.group("billing").offsets["input", 0].offset == 3


@run_by(run)
async def test_offsets_are_sent_again_until_the_groups_coordinator_answers(cluster: ScriptedCluster, /) -> None:
    actions = [reject(E.CONCURRENT_TRANSACTIONS), reject(E.UNKNOWN_TOPIC_OR_PARTITION), DROP, CARRY_OUT_AND_DROP]
    cluster.script(TXN_OFFSET_COMMIT, reject(E.NOT_COORDINATOR), *actions)
    async with producer_of(cluster) as producer, producer.transaction() as transaction:
        await transaction.send_offsets({P0: 3}, ALONE)
    assert cluster.groups.group("billing").offsets["input", 0].offset == 3


@run_by(run)
async def test_a_member_sends_offsets_under_its_membership(cluster: ScriptedCluster, /) -> None:
    cluster.add_topic("input")
    async with producer_of(cluster) as producer, Producer(cluster.bootstrap) as source:
        await source.send("input", b"v")
        async with Consumer(cluster.bootstrap, topics=["input"], group="billing") as consumer:
            with pytest.raises(BrokerError, match="ILLEGAL_GENERATION"):
                consumer.group_metadata()
            record = await anext(aiter(consumer))
            async with producer.transaction() as transaction:
                group = consumer.group_metadata()
                assert (group.group, group.generation_id) == ("billing", 1)
                await transaction.send_offsets({P0: record.offset + 1}, group)
            assert await consumer.committed(P0) == {P0: OffsetAndMetadata(1)}
            (request,) = cluster.requests(TXN_OFFSET_COMMIT)
            assert (request.generation_id, request.member_id) == (1, group.member_id)


@run_by(run)
async def test_a_member_that_lost_its_partitions_since_gives_no_metadata_until_it_asks_again(
    cluster: ScriptedCluster, /
) -> None:
    cluster.add_topic("input")
    async with Producer(cluster.bootstrap) as source:
        await source.send_batch("input", [b"v"] * 3)
    async with Consumer(
        cluster.bootstrap, topics=["input"], group="billing", heartbeat_interval_ms=20, session_timeout_ms=6_000
    ) as consumer:
        await consumer.poll(30_000, max_records=1)
        group = cluster.groups.group("billing")
        for member_id in list(group.members):
            group.remove(member_id)
        while consumer.status().member_state == "stable":
            await asyncio.sleep(0.01)
        with pytest.raises(BrokerError, match="not a member of group billing now, or not any more"):
            consumer.group_metadata()
        await consumer.poll(30_000, max_records=1)
        assert consumer.group_metadata().generation_id == 2


def test_a_consumer_without_a_membership_names_its_group_only() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        cluster.add_topic("input")
        async with Consumer(cluster.bootstrap, partitions=[P0], group="billing") as consumer:
            assert consumer.group_metadata() == GroupMetadata("billing", -1, "", None)
        async with Consumer(cluster.bootstrap, partitions=[P0]) as consumer:
            with pytest.raises(InvalidSetting, match='group="name"'):
                consumer.group_metadata()

    run(scenario)


@run_by(run)
async def test_plain_producers_are_not_transactional(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"a", partition=0)
    (request,) = cluster.requests(PRODUCE)
    assert request.transactional_id is None
    assert not parse_header(request.topic_data[0].partition_data[0].records).is_transactional
