"""The blocking producer against scripted brokers."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from minibroker.client import producer as async_producer
from minibroker.client.errors import (
    ApiTimedOut,
    BufferFull,
    Closed,
    DeliveryFailed,
    DeliveryTimedOut,
    FailedRecord,
    InvalidSetting,
    SerializationFailed,
)
from minibroker.client.producing.delivery import BatchDeliveryFailed, RecordMetadata
from minibroker.client.sync import handover
from minibroker.client.sync.background import Call
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.sync import Delivery, Producer
from tests.unit.client.scripted_broker import HANG, leap, reject
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster
from tests.waiting import until_true


@pytest.fixture
def cluster() -> Iterator[ClusterThread]:
    with scripted_cluster() as cluster:
        yield cluster


def hang_all(cluster: ClusterThread) -> None:
    cluster.do(lambda: cluster.cluster.rules.append(lambda received: HANG if received.api is PRODUCE else None))


def answer_again(cluster: ClusterThread) -> None:
    cluster.do(cluster.cluster.rules.clear)


E = TypeVar("E", bound=Exception)


def caught_by_sending(kind: type[E], producer: Producer, value: bytes) -> E:
    """Send until `send` raises, and return that error."""
    try:
        while True:
            producer.send("orders", value)
    except kind as error:
        return error


def send_until(kind: type[Exception], producer: Producer, value: bytes) -> int:
    """Return how many records are sent before `send` raises this error."""
    sent = 0
    try:
        while True:
            producer.send("orders", value)
            sent += 1
    except kind:
        return sent


def test_a_record_is_sent_and_its_delivery_says_where_it_is(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        delivery = producer.send(
            "orders", bytearray(b"v"), key=memoryview(b"k"), partition=0, timestamp_ms=7, headers=[("h", b"1")]
        )
        metadata = delivery.result()
        assert metadata == ("orders", 0, 0, 7)
        assert delivery.done()
        assert delivery.result() == metadata
        assert producer.send("orders", None, key=b"k").result(timeout_ms=10_000).offset == 1
        assert repr(delivery) == "<Delivery orders-0 acknowledged, offset=0>"
    log = cluster.do(lambda: cluster.cluster.log("orders").decoded())
    assert [list(batch.values) for batch in log] == [[b"v"], [None]]
    assert log[0].headers == [[("h", b"1")]]


def test_everything_is_sent_when_the_with_block_ends(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        for number in range(20_000):
            producer.send("orders", b"%d" % number)
            producer.drain()
    assert cluster.values() == [b"%d" % number for number in range(20_000)]


def test_flush_waits_for_what_any_thread_has_sent(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.send("orders", b"v") for _ in range(500)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()
        assert len(cluster.values()) == 2_000
        assert "unacknowledged=0" in repr(producer)


def test_each_threads_records_stay_in_its_order(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap, batch_size=2_000) as producer:

        def work(name: int) -> None:
            for number in range(3_000):
                producer.send("orders", b"%d %d" % (name, number))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = [value or b"" for value in cluster.values()]
    assert len(values) == 12_000
    for name in range(4):
        prefix = b"%d " % name
        own = [int(value.removeprefix(prefix)) for value in values if value.startswith(prefix)]
        assert own == list(range(3_000))


@pytest.mark.slow
def test_send_waits_while_the_buffer_is_full_and_holds_no_more_than_it(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(cluster.bootstrap, buffer_memory=1 << 20, max_block_ms=300, request_timeout_ms=1_000) as producer:
        value = bytes(10_000)
        sent = send_until(BufferFull, producer, value)
        most = handover.QUEUE_RECORDS + 2 * (1 << 20) // len(value) + handover.CHUNK_RECORDS
        assert sent <= most
        answer_again(cluster)
        producer.flush()
        assert len(cluster.values()) == sent
        assert producer.send("orders", b"after").result().offset == sent


@pytest.mark.slow
def test_large_records_do_not_pile_up_before_the_buffer(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(cluster.bootstrap, buffer_memory=1 << 20, max_block_ms=300, request_timeout_ms=1_000) as producer:
        value = bytes(100_000)
        sent = send_until(BufferFull, producer, value)
        assert sent <= 3 * (1 << 20) // len(value)
        answer_again(cluster)


def test_a_thread_that_waits_for_room_goes_on_when_there_is_some(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(cluster.bootstrap, buffer_memory=1 << 20, request_timeout_ms=1_000, max_block_ms=60_000) as producer:
        value = bytes(10_000)

        def work() -> None:
            for _ in range(2_500):
                producer.send("orders", value)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        until_true(lambda: producer._handover._waiting)
        answer_again(cluster)
        for thread in threads:
            thread.join(60)
        producer.flush()
        assert len(cluster.values()) == 7_500


def test_a_mistake_of_the_caller_is_raised_by_send(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(TypeError, match="encode the text"):
            producer.send("orders", "text")
        with pytest.raises(TypeError, match="headers must be a list"):
            producer.send("orders", b"v", headers={"a": b"b"})  # type: ignore[arg-type]
        for name, value, rule in (
            ("timestamp_ms", 1_795_623_764_124.5, "whole milliseconds"),
            ("on_delivery", asyncio.sleep, "called, not awaited"),
        ):
            with pytest.raises(InvalidSetting, match=rule):
                producer.send("orders", b"v", **{name: value})  # type: ignore[arg-type]
        for arguments, code in (
            ({"partition": -1}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ({"timestamp_ms": -1}, ErrorCode.INVALID_TIMESTAMP),
        ):
            with pytest.raises(BrokerError) as caught:
                producer.send("orders", b"v", **arguments)  # type: ignore[arg-type]
            assert caught.value.code is code
        with pytest.raises(BrokerError) as caught:
            producer.send("no/such", b"v")
        assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert cluster.values() == []


def test_what_the_cluster_has_against_a_record_is_raised_by_its_delivery_or_by_flush(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"first").result()
        refused = producer.send("orders", b"v", partition=7)
        with pytest.raises(BrokerError) as caught:
            refused.result()
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        producer.flush()  # the failure was reported
        producer.send("orders", b"w", key=b"k", partition=8)
        with pytest.raises(DeliveryFailed) as failed:
            producer.flush()
        (failure,) = failed.value.failures
        assert failure[:4] == ("orders", 8, b"k", b"w")
        producer.flush()


def test_a_result_that_is_not_there_in_time_names_the_topic_and_what_has_failed_so_far(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        for is_batch in (False, True):
            delivery = producer.send_batch("nowhere", [b"v"]) if is_batch else producer.send("nowhere", b"v")
            said = ""
            while "UNKNOWN_TOPIC_OR_PARTITION" not in said:  # until the brokers have been asked
                with pytest.raises(ApiTimedOut) as raised:
                    delivery.result(timeout_ms=20)
                said = str(raised.value)
            assert said.startswith(
                "not acknowledged within 20 ms, and still being sent: nowhere: the last attempt failed:"
            )
            leap(producer._client)
            with pytest.raises((BrokerError, BatchDeliveryFailed)):
                delivery.result()


def test_a_failure_after_the_wait_for_its_result_timed_out_is_raised_by_flush(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(ApiTimedOut, match="still being sent"):
            producer.send("nowhere", b"v").result(timeout_ms=50)
        leap(producer._client)
        with pytest.raises(DeliveryFailed):
            producer.flush()


def test_a_record_that_a_broker_refuses_is_raised_by_whoever_asks_first(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"first").result()
        cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
        delivery = producer.send("orders", b"v")
        with pytest.raises(BrokerError):
            delivery.result()
        producer.flush()
        cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
        producer.send("orders", b"v")
        with pytest.raises(DeliveryFailed):
            producer.close()


@pytest.mark.slow
def test_failures_that_fill_the_buffer_are_raised_by_send(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(
        cluster.bootstrap, buffer_memory=1 << 20, delivery_timeout_ms=500, request_timeout_ms=400
    ) as producer:
        failed = caught_by_sending(DeliveryFailed, producer, bytes(10_000))
        assert all(isinstance(failure.error, DeliveryTimedOut) for failure in failed.failures)
        with pytest.raises(DeliveryFailed):
            producer.close()


@pytest.mark.slow
def test_waiting_for_a_result_is_bounded_if_the_caller_says_so(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(cluster.bootstrap, request_timeout_ms=500) as producer:
        delivery = producer.send("orders", b"v")
        with pytest.raises(ApiTimedOut, match=r"not acknowledged within 50 ms, and still being sent: orders-0"):
            delivery.result(timeout_ms=50)
        with pytest.raises(ApiTimedOut, match="still being sent, within 50 ms"):
            producer.flush(timeout_ms=50)
        answer_again(cluster)
        assert delivery.result().offset == 0


@pytest.mark.parametrize("waits_for_room", [False, True])
def test_close_is_bounded_if_the_caller_says_so(
    cluster: ClusterThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, waits_for_room: bool
) -> None:
    monkeypatch.setattr(async_producer, "CANCELLED_FLUSH_S", 60)  # it must not send on
    hang_all(cluster)
    producer = Producer(cluster.bootstrap, buffer_memory=1 << 20)
    producer.start()
    delivery = producer.send("orders", b"v")
    if waits_for_room:
        for _ in range(2_000):
            producer.send("orders", bytes(2_000))
    until_true(lambda: cluster.do(lambda: cluster.cluster.requests(PRODUCE)))
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(ApiTimedOut, match="when the producer was closed, within 100 ms"):
            producer.close(timeout_ms=100)
    assert time.monotonic() - began < 10
    with pytest.raises(Closed):
        delivery.result()
    assert "not acknowledged" in caplog.text


def test_who_has_nothing_to_wait_for_need_not_wait(cluster: ClusterThread) -> None:
    producer = Producer(cluster.bootstrap)
    producer.start()
    producer.flush(timeout_ms=0)
    producer.send("orders", b"v").result()
    producer.flush(timeout_ms=0)
    producer.close(timeout_ms=0)
    hang_all(cluster)
    with Producer(cluster.bootstrap, request_timeout_ms=500) as producer:
        producer.send("orders", b"w")
        with pytest.raises(ApiTimedOut, match="within 0 ms"):
            producer.flush(timeout_ms=0)
        answer_again(cluster)


def test_a_producer_that_is_not_open_says_so(cluster: ClusterThread) -> None:
    producer = Producer(cluster.bootstrap)
    producer.close()  # it has not begun
    with pytest.raises(Closed, match=r"is not started: use it within `with Producer\(...\)`"):
        producer.send("orders", b"v")
    with producer:
        pass
    for call in (lambda: producer.send("orders", b"v"), producer.flush, producer.drain):
        with pytest.raises(Closed, match="is closed"):
            call()
    producer.close()
    with pytest.raises(Closed, match="was started before"):
        producer.start()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.slow
def test_the_constructor_says_what_is_wrong_and_start_that_no_broker_is_there() -> None:
    with pytest.raises(InvalidSetting):
        Producer("localhost")
    threads = set(threading.enumerate())
    with pytest.raises(NetworkError, match="127.0.0.1:1"), Producer("127.0.0.1:1"):
        pass
    assert not set(threading.enumerate()) - threads


def test_send_in_other_threads_raises_closed_when_the_producer_is_closed(cluster: ClusterThread) -> None:
    outcomes: list[Delivery | Exception] = []

    def work(producer: Producer) -> None:
        try:
            while True:
                outcomes.append(producer.send("orders", b"v"))
        except Closed as error:
            outcomes.append(error)

    with Producer(cluster.bootstrap) as producer:
        threads = [threading.Thread(target=work, args=(producer,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        until_true(lambda: len(outcomes) > 1_000)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    deliveries = [outcome for outcome in outcomes if isinstance(outcome, Delivery)]
    acknowledged = 0
    for delivery in deliveries:
        try:
            delivery.result()
            acknowledged += 1
        except Closed:
            pass
    assert acknowledged == len(cluster.values())


def test_a_producer_that_is_dropped_warns_and_sends_what_it_has(
    cluster: ClusterThread, caplog: pytest.LogCaptureFixture
) -> None:
    producer = Producer(cluster.bootstrap, linger_ms=60_000)
    producer.start()
    thread, queue = producer._background._thread, producer._handover.queue
    delivery = producer.send("orders", b"v")
    until_true(lambda: not queue)
    dropped = [producer]
    del producer
    with pytest.warns(ResourceWarning, match=r"<Producer running, .*unacknowledged=1> was dropped without `close`"):
        dropped.clear()
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert cluster.values() == [b"v"]
    assert delivery.result().offset == 0
    assert "1 record was not acknowledged, and may never be sent" in caplog.text


def test_a_record_is_counted_while_the_loop_takes_it(cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(cluster.bootstrap) as producer:
        handover = producer._handover
        found: list[int] = []
        send = handover._producer.send

        def count_and_send(*record: Any, **of_record: Any) -> Any:
            found.append(handover.unacknowledged())
            return send(*record, **of_record)

        monkeypatch.setattr(handover._producer, "send", count_and_send)
        producer.send("orders", b"v").result()
        producer.send("orders", b"v", partition=0).result()
    assert found == [1, 1]


def test_an_error_of_the_body_is_raised_with_what_failed_beside_it(cluster: ClusterThread) -> None:
    def body() -> None:
        with Producer(cluster.bootstrap) as producer:
            producer.send("orders", b"first").result()
            cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
            producer.send("orders", b"v")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    (note,) = caught.value.__notes__
    assert note.startswith("While the producer was closed: 1 record was not delivered")


def test_a_client_is_not_sent_to_another_process(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer, pytest.raises(TypeError, match="make a new one there"):
        pickle.dumps(producer)


def test_clients_log_nothing_where_nothing_is_wrong(cluster: ClusterThread, caplog: pytest.LogCaptureFixture) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"v").result()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_callbacks_run_in_the_thread_that_calls_the_producer_in_order_and_before_flush_returns(
    cluster: ClusterThread,
) -> None:
    told: list[tuple[int, int]] = []

    def note(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
        assert metadata is not None
        assert error is None
        told.append((metadata.offset, threading.get_ident()))

    with Producer(cluster.bootstrap) as producer:
        for _ in range(3_000):
            producer.send("orders", b"v", on_delivery=note)
        producer.flush()
        assert told == [(offset, threading.get_ident()) for offset in range(3_000)]
        producer.send("orders", b"last", on_delivery=note)
    assert told[-1] == (3_000, threading.get_ident())


def test_a_callback_may_use_the_producer(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        rest = [b"1", b"2", b"3"]

        def send_next(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
            if rest:
                producer.send("orders", rest.pop(0), on_delivery=send_next)
                producer.flush()

        producer.send("orders", b"0", on_delivery=send_next)
        producer.flush()
    assert cluster.values() == [b"0", b"1", b"2", b"3"]


def test_a_failure_reported_to_a_callback_is_not_repeated_and_its_exception_is_logged(
    cluster: ClusterThread, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[MinibrokerError | None] = []

    def note(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
        errors.append(error)
        raise ZeroDivisionError

    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"first").result()
        producer.send("orders", b"v", partition=9, on_delivery=note)
        cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
        producer.send("orders", b"v", on_delivery=note)
        producer.flush()
    assert [error.code for error in errors if isinstance(error, BrokerError)] == [
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_RECORD,
    ]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_serializers_are_asked_in_the_callers_thread_at_once(cluster: ClusterThread) -> None:
    threads = set()

    def serializer(value: str) -> bytes:
        threads.add(threading.get_ident())
        return value.encode()

    with Producer(cluster.bootstrap, value_serializer="json", key_serializer=serializer, linger_ms=200) as producer:
        value = {"a": 1}
        producer.send("orders", value, key="k")
        value["a"] = 2
        producer.send_batch("orders", [value, None], ["l", "m"])
        value["a"] = 3
        with pytest.raises(SerializationFailed):
            producer.send("orders", object())
    assert cluster.values() == [b'{"a":1}', b'{"a":2}', None]
    assert threads == {threading.get_ident()}


def test_a_batch_of_records_is_sent_in_order_with_those_around_it(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"before")
        delivery = producer.send_batch("orders", [b"%d" % number for number in range(5_000)])
        producer.send("orders", b"after")
        metadata = delivery.result()
        assert sum(part.count for part in metadata.parts) == 5_000
        assert metadata.offsets()[:2] == [(0, 1), (0, 2)]
        assert delivery.done()
    assert delivery.result() == metadata
    assert cluster.values() == [b"before", *(b"%d" % number for number in range(5_000)), b"after"]


def test_what_is_wrong_with_a_batch_is_raised_by_the_call(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap, buffer_memory=1 << 20, max_block_ms=200) as producer:
        with pytest.raises(TypeError, match=r"values\[1\] must be bytes"):
            producer.send_batch("orders", [b"a", 1])
        with pytest.raises(ValueError, match="2 keys for 1 value:"):
            producer.send_batch("orders", [b"a"], [b"k", b"l"])
        with pytest.raises(BrokerError, match="partition -1|give a whole number"):
            producer.send_batch("orders", [b"a"], partition=-1)
        with pytest.raises(BufferFull):
            producer.send_batch("orders", [bytes(1_000)] * 10_000)
        producer.send_batch("orders", [b"fits"]).result()
    assert cluster.values() == [b"fits"]


@pytest.mark.slow
def test_a_batch_waits_for_room_in_the_buffer(cluster: ClusterThread) -> None:
    hang_all(cluster)
    with Producer(cluster.bootstrap, buffer_memory=1 << 20, max_block_ms=300, request_timeout_ms=1_000) as producer:
        taken = 0
        with suppress(BufferFull):
            while True:
                producer.send_batch("orders", [bytes(1_000)] * 100)
                taken += 1
        assert 0 < taken <= 30
        answer_again(cluster)
        producer.flush()
        producer.send_batch("orders", [bytes(1_000)] * 100).result()
    assert len(cluster.values()) == (taken + 1) * 100


def ends_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The next call into the client's thread ends, and at that moment its caller meets the error."""
    wait = Call.wait

    def ended(call: Call[object]) -> None:
        wait(call)
        monkeypatch.setattr(Call, "wait", wait)
        raise error

    monkeypatch.setattr(Call, "wait", ended)


def test_a_caller_that_is_interrupted_when_its_batch_was_taken_hears_of_the_interruption(
    cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster.bootstrap) as producer:
        ends_with(monkeypatch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            producer.send_batch("orders", [b"a", b"b"])
    assert cluster.values() == [b"a", b"b"]


def test_failures_of_others_that_a_batch_meets_when_it_was_taken_are_not_forgotten(
    cluster: ClusterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = FailedRecord("orders", 0, None, b"earlier", 0, (), BrokerError(ErrorCode.INVALID_RECORD))
    with Producer(cluster.bootstrap) as producer:
        ends_with(monkeypatch, DeliveryFailed([failed]))
        producer.send_batch("orders", [b"a", b"b"]).result()
        with pytest.raises(DeliveryFailed) as caught:
            producer.flush()
        assert list(caught.value.failures) == [failed]


def test_a_batch_whose_records_a_broker_refuses_says_which(cluster: ClusterThread) -> None:
    with Producer(cluster.bootstrap) as producer:
        producer.send("orders", b"first").result()
        cluster.do(lambda: cluster.cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD)))
        delivery = producer.send_batch("orders", [b"a", b"b"])
        with pytest.raises(BatchDeliveryFailed) as caught:
            delivery.result()
        assert caught.value.indexes == (0, 1)


def test_a_result_ends_though_others_have_failed_and_nobody_was_told(cluster: ClusterThread) -> None:
    def refuse() -> None:
        cluster.cluster.rules.append(
            lambda received: reject(ErrorCode.INVALID_RECORD) if received.api is PRODUCE else None
        )

    cluster.do(refuse)
    with Producer(cluster.bootstrap, buffer_memory=100_000, max_request_size=50_000, batch_size=20_000) as producer:
        sent = [producer.send("orders", bytes(10_000)) for _ in range(100)]
        with pytest.raises(BrokerError, match="INVALID_RECORD"):
            sent[-1].result(timeout_ms=20_000)
        with pytest.raises(DeliveryFailed) as failed:
            producer.flush()
        assert len(failed.value.failures) == 99
