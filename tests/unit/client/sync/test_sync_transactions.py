"""Transactions of the blocking producer: records are queued, and the loop takes them before the block ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minibroker.client.errors import (
    Closed,
    CommitFailed,
    InvalidSetting,
    InvalidTransactionState,
    ProducerFenced,
    SerializationFailed,
    TransactionAborted,
)
from minibroker.client.group.commits import GroupMetadata
from minibroker.protocol.apis import END_TXN, PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.sync import Consumer, Producer
from tests.unit.client.scripted_broker import DROP, reject
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster
from tests.unit.client.transactions.test_producer_transactions import rule_of

P0 = TopicPartition("input", 0)


@pytest.fixture
def cluster() -> Iterator[ClusterThread]:
    with scripted_cluster() as running:
        yield running


def producer_of(cluster: ClusterThread, **settings: Any) -> Producer:
    return Producer(cluster.bootstrap, transactional_id="t", retry_backoff_ms=5, **settings)


def committed(cluster: ClusterThread) -> list[bytes | None]:
    return cluster.do(lambda: cluster.cluster.log("orders").committed_values())


def ends(cluster: ClusterThread) -> list[bool]:
    return cluster.do(lambda: [request.committed for request in cluster.cluster.requests(END_TXN)])


def test_queued_records_belong_to_the_block_in_which_they_were_sent(cluster: ClusterThread) -> None:
    with producer_of(cluster) as producer:
        for number in range(5):
            with producer.transaction() as transaction:
                for index in range(1_000):
                    producer.send("orders", b"%d-%d" % (number, index))
                producer.send_batch("orders", [b"%d-last" % number])
            assert transaction.was_committed()
            values = committed(cluster)
            assert len(values) == 1_001 * (number + 1)
            assert values[-1] == b"%d-last" % number
    assert ends(cluster) == [True] * 5


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_aborts_the_block_and_propagates(cluster: ClusterThread, error: type[BaseException]) -> None:
    with producer_of(cluster) as producer:
        with pytest.raises(error), producer.transaction() as transaction:  # noqa: PT012
            producer.send("orders", b"a").result()
            deliveries = [producer.send("orders", b"x" * 100) for _ in range(5_000)]
            raise error
        assert not transaction.was_committed()
        assert all(delivery.done() for delivery in deliveries)
        producer.flush()  # nothing is left to report
        with producer.transaction():
            producer.send("orders", b"b")
    assert committed(cluster) == [b"b"]


def test_a_record_outside_of_a_transaction_is_refused_at_once(cluster: ClusterThread) -> None:
    with producer_of(cluster) as producer:
        for _ in range(2):
            with pytest.raises(InvalidTransactionState, match="send within `with producer.transaction"):
                producer.send("orders", b"x")
            with pytest.raises(InvalidTransactionState):
                producer.send_batch("orders", [b"x"])
            with producer.transaction():
                producer.send("orders", b"a")
    with pytest.raises(Closed):
        producer.send("orders", b"x")
    with pytest.raises(Closed):
        producer.transaction().__enter__()
    assert committed(cluster) == [b"a", b"a"]


def test_a_second_transaction_is_refused_and_does_not_disturb_the_first(cluster: ClusterThread) -> None:
    refused: list[BaseException] = []

    def other(producer: Producer) -> None:
        try:
            producer.transaction().__enter__()
        except InvalidTransactionState as error:
            refused.append(error)

    with producer_of(cluster) as producer, producer.transaction():
        producer.send("orders", b"a")
        thread = threading.Thread(target=other, args=(producer,))
        thread.start()
        thread.join()
        with pytest.raises(InvalidTransactionState), producer.transaction():
            raise AssertionError("it must not begin")
        producer.send("orders", b"b")
    assert len(refused) == 1
    assert committed(cluster) == [b"a", b"b"]


def test_records_of_other_threads_belong_to_the_transaction(cluster: ClusterThread) -> None:
    with producer_of(cluster) as producer, producer.transaction():
        threads = [threading.Thread(target=producer.send, args=("orders", b"x")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert committed(cluster) == [b"x"] * 4


def test_a_record_that_fails_makes_the_end_of_the_block_raise(cluster: ClusterThread) -> None:
    cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
    with producer_of(cluster) as producer:
        with (
            pytest.raises(TransactionAborted, match="a record of orders-0 has failed: INVALID_RECORD"),
            producer.transaction(),
        ):
            producer.send("orders", b"bad")
        producer.flush()
        with producer.transaction():
            producer.send("orders", b"a")
    assert committed(cluster) == [b"a"]


def test_a_block_that_is_left_by_a_failure_of_the_transaction_says_so(cluster: ClusterThread) -> None:
    cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
    with producer_of(cluster) as producer:
        with pytest.raises(TransactionAborted) as caught, producer.transaction():
            producer.send("orders", b"bad").result()
        assert isinstance(caught.value.__cause__, BrokerError)


@pytest.mark.parametrize("is_handled", [True, False])
def test_a_record_that_the_loop_cannot_take_aborts(cluster: ClusterThread, is_handled: bool) -> None:
    with producer_of(cluster, max_request_size=2_000, batch_size=1_000) as producer:
        with (  # noqa: PT012
            pytest.raises(TransactionAborted, match="a record for orders has failed: MESSAGE_TOO_LARGE"),
            producer.transaction(),
        ):
            producer.send("orders", b"a")
            delivery = producer.send("orders", b"x" * 5_000)
            if is_handled:
                with pytest.raises(BrokerError):
                    delivery.result()
        producer.flush()
        with producer.transaction():
            producer.send("orders", b"b")
    assert committed(cluster) == [b"b"]


def test_a_fenced_producer_says_so(cluster: ClusterThread) -> None:
    with producer_of(cluster) as zombie, producer_of(cluster) as producer:
        with producer.transaction():
            producer.send("orders", b"a")
        with pytest.raises(ProducerFenced), zombie.transaction():
            zombie.send("orders", b"zombie")
        with pytest.raises(ProducerFenced):
            zombie.transaction().__enter__()
    assert committed(cluster) == [b"a"]


def test_offsets_are_committed_with_the_records(cluster: ClusterThread) -> None:
    cluster.do(lambda: cluster.cluster.add_topic("input"))
    with Producer(cluster.bootstrap) as source:
        source.send("input", b"v")
    with (
        producer_of(cluster) as producer,
        Consumer(cluster.bootstrap, topics=["input"], group="billing") as consumer,
    ):
        record = next(consumer)
        with producer.transaction() as transaction:
            producer.send("orders", record.value)
            transaction.send_offsets({P0: record.offset + 1}, consumer.group_metadata())
        assert consumer.committed(P0)[P0] is not None
        with pytest.raises(TransactionAborted), producer.transaction() as transaction, pytest.raises(CommitFailed):
            transaction.send_offsets({P0: 7}, GroupMetadata("billing", 9, "stranger"))
        with pytest.raises(InvalidTransactionState):
            transaction.send_offsets({P0: 7}, GroupMetadata("billing"))
    assert committed(cluster) == [b"v"]


def test_callbacks_are_called_before_the_block_has_ended(cluster: ClusterThread) -> None:
    told: list[object] = []
    with producer_of(cluster) as producer:
        with producer.transaction():
            producer.send("orders", b"a", on_delivery=lambda metadata, error: told.append(metadata))
        assert len(told) == 1


def test_closing_aborts_an_open_transaction(cluster: ClusterThread) -> None:
    producer = producer_of(cluster)
    producer.start()
    transaction = producer.transaction()
    transaction.__enter__()
    producer.send("orders", b"a").result()
    producer.close()
    with pytest.raises(TransactionAborted, match="the producer was closed"):
        transaction.__exit__(None, None, None)
    assert committed(cluster) == []
    assert ends(cluster) == [False]


def test_transactions_need_a_transactional_id(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer, pytest.raises(InvalidSetting, match="transactional_id"):
        producer.transaction()


def test_async_with_names_the_other_transaction(cluster: ClusterThread) -> None:
    async def use(producer: Producer) -> None:
        async with producer.transaction():  # type: ignore[attr-defined]
            pass

    with producer_of(cluster) as producer, pytest.raises(TypeError, match="Producer.transaction of minibroker"):
        use(producer).send(None)


# --- incomplete transactions, and their outcome ---


NOT_SENT: list[tuple[Callable[[Producer], object], type[Exception]]] = [
    (lambda producer: producer.send("orders", object()), SerializationFailed),
    (lambda producer: producer.send("bad/name", "x"), BrokerError),
    (lambda producer: producer.send("orders", "x", headers={"a": b"b"}), TypeError),  # type: ignore[arg-type]
    (lambda producer: producer.send("orders", "x", partition=-1), BrokerError),
    (lambda producer: producer.send("orders", "x" * 5_000).result(), BrokerError),
    (lambda producer: producer.send_batch("orders", ["x" * 5_000]), BrokerError),
    (lambda producer: producer.send_batch("orders", ["x"], [b"k", b"l"]), ValueError),
    (lambda producer: producer.send_batch("orders", [object()]), SerializationFailed),
]


@pytest.mark.parametrize("number", range(len(NOT_SENT)))
def test_an_error_of_send_aborts_even_if_it_is_handled(cluster: ClusterThread, number: int) -> None:
    call, kind = NOT_SENT[number]
    with producer_of(cluster, max_request_size=2_000, value_serializer="json") as producer:
        with pytest.raises(TransactionAborted, match="a record for .* has failed") as caught, producer.transaction():  # noqa: PT012
            producer.send("orders", "good")
            with pytest.raises(kind):
                call(producer)
        assert isinstance(caught.value.reason, kind)
        producer.flush()
        with producer.transaction():
            producer.send("orders", "again")
    assert committed(cluster) == [b'"again"']


def test_a_full_buffer_alone_does_not_abort(cluster: ClusterThread) -> None:
    """The loop repeats a record for which there is no room yet."""
    settings = {"buffer_memory": 2_000, "max_request_size": 1_900, "batch_size": 100}
    with producer_of(cluster, **settings) as producer:
        with producer.transaction() as transaction:
            for _ in range(50):
                producer.send("orders", b"x" * 1_700)
            producer.send_batch("orders", [b"x" * 1_000])
        assert transaction.was_committed()
    assert len(committed(cluster)) == 51


def test_an_error_of_send_offsets_aborts_even_if_it_is_handled(cluster: ClusterThread) -> None:
    with (  # noqa: PT012
        producer_of(cluster) as producer,
        pytest.raises(TransactionAborted, match="send_offsets has failed"),
        producer.transaction() as transaction,
    ):
        producer.send("orders", b"a")
        with pytest.raises(InvalidSetting):
            transaction.send_offsets({P0: -1}, GroupMetadata("billing"))
    assert committed(cluster) == []


def test_an_interrupted_commit_says_that_it_may_be_committed(cluster: ClusterThread) -> None:
    rule = rule_of(END_TXN.key, DROP)
    cluster.do(lambda: cluster.cluster.rules.append(rule))

    def interrupt() -> None:
        while not ends(cluster):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with producer_of(cluster, request_timeout_ms=500) as producer:
        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt) as caught, producer.transaction() as transaction:  # noqa: PT012
            producer.send("orders", b"a")
            thread.start()
        thread.join()
        (note,) = caught.value.__notes__
        assert "it may be committed. Call was_committed()" in note
        cluster.do(lambda: cluster.cluster.rules.remove(rule))
        assert transaction.was_committed()
    assert committed(cluster) == [b"a"]
