"""`on_delivery`: which callback is called, when and in which order, and where its exceptions go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.errors import Closed, DeliveryFailed, InvalidSetting
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import BatchDeliveryFailed, Delivery, RecordMetadata
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, ORDINARY, ScriptedCluster, leap, reject
from tests.waiting import until

Called = list[tuple[RecordMetadata | None, MinibrokerError | None]]


def run(
    scenario: Callable[[ScriptedCluster, Called, Callable[..., None]], Coroutine[Any, Any, None]], partitions: int = 1
) -> None:
    """Run the scenario with a cluster that has a topic "orders", a list, and a callback that appends to it."""

    async def main() -> None:
        called: Called = []

        def note(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
            called.append((metadata, error))

        async with asyncio.timeout(60), ScriptedCluster(1) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster, called, note)

    asyncio.run(main())


@run_by(run)
async def test_each_record_is_told_where_it_is_in_order_and_before_flush_returns(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /
) -> None:
    async with Producer(cluster.bootstrap, batch_size=500) as producer:
        for number in range(100):
            key = b"k" if number % 2 else None
            producer.send("orders", b"v", key=key, timestamp_ms=number, on_delivery=note)
            producer.send("orders", b"without")
        await producer.flush()
        assert len(called) == 100
        offsets = [metadata.offset for metadata, _ in called if metadata is not None]
        assert offsets == list(range(0, 200, 2))
        producer.send("orders", b"last", on_delivery=note)
    assert len(called) == 101


@pytest.mark.parametrize("fails", [False, True])
@run_by(run)
async def test_flush_that_begins_as_the_last_record_ends_returns_after_its_callback(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /, fails: bool
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"first")
        if fails:
            cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
        sent = producer.send("orders", b"v", on_delivery=note)
        ended = asyncio.Event()
        assert sent._batch.listeners is not None
        sent._batch.listeners.append(ended.set)
        await ended.wait()
        await producer.flush()
        assert len(called) == 1


@run_by(run)
async def test_a_reported_failure_is_not_raised_by_flush(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD))
        producer.send("orders", b"v", on_delivery=note)
        await producer.flush()
    ((metadata, error),) = called
    assert metadata is None
    assert isinstance(error, BrokerError)


def test_an_exception_of_a_callback_is_logged_and_the_records_failure_is_still_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: ScriptedCluster, called: Called, note: Callable[..., None]) -> None:
        def broken(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
            raise ZeroDivisionError("in the callback")

        async with Producer(cluster.bootstrap) as producer:
            cluster.script(PRODUCE, ORDINARY, reject(ErrorCode.INVALID_RECORD))
            await producer.send("orders", b"good", on_delivery=broken)
            producer.send("orders", b"bad", on_delivery=broken)
            with pytest.raises(DeliveryFailed):
                await producer.flush()
            await producer.send("orders", b"after", on_delivery=note)

    with caplog.at_level(logging.ERROR, "minibroker.client"):
        run(scenario)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "broken" in record.getMessage()
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ZeroDivisionError)


class _Asynchronous:
    async def __call__(self, metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
        """A coroutine, which the producer would not await."""


async def _asynchronous(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
    """A callable whose result would not be awaited either."""


@pytest.mark.parametrize("on_delivery", [_asynchronous, _Asynchronous(), "a name"])
@run_by(run)
async def test_what_cannot_be_called_back_is_refused_and_nothing_is_sent(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /, on_delivery: Any
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        with pytest.raises(InvalidSetting, match="on_delivery="):
            producer.send("orders", b"v", on_delivery=on_delivery)
    assert cluster.log("orders").values() == []


async def _wait_for(awaitable: Awaitable[object]) -> None:
    await asyncio.wait_for(awaitable, 0.05)


async def _within_a_timeout(awaitable: Awaitable[object]) -> None:
    async with asyncio.timeout(0.05):
        await awaitable


@pytest.mark.parametrize(("wait", "by"), [(_wait_for, "send"), (_within_a_timeout, "send_batch")])
@run_by(run)
async def test_a_failure_after_its_caller_gave_up_waiting_is_raised_by_flush(
    cluster: ScriptedCluster,
    called: Called,
    note: Callable[..., None],
    /,
    wait: Callable[[Awaitable[object]], Awaitable[None]],
    by: str,
) -> None:
    async with Producer(cluster.bootstrap) as producer:
        sent = producer.send("nowhere", b"v") if by == "send" else producer.send_batch("nowhere", [b"v", b"w"])
        patient = asyncio.create_task(sent)
        with pytest.raises(TimeoutError):
            await wait(sent)
        leap(producer)
        with pytest.raises(MinibrokerError):
            await patient
        await producer.flush()  # the failure was reported
        sent = producer.send("nowhere", b"v") if by == "send" else producer.send_batch("nowhere", [b"v", b"w"])
        with pytest.raises(TimeoutError):
            await wait(sent)
        leap(producer)
        with pytest.raises(DeliveryFailed) as failed:
            await producer.flush()
        assert [failure.value for failure in failed.value.failures] == [b"v", b"w"][: 1 if by == "send" else 2]


@pytest.mark.parametrize("by", ["send", "send_batch"])
@run_by(run)
async def test_a_failure_at_the_moment_its_caller_gives_up_waiting_is_raised_by_flush(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /, by: str
) -> None:
    async with Producer(cluster.bootstrap, delivery_timeout_ms=300) as producer:
        sent = producer.send("nowhere", b"v") if by == "send" else producer.send_batch("nowhere", [b"v"])
        waiting = asyncio.create_task(sent)
        await asyncio.sleep(0)  # it has begun to wait
        batch = sent._batch if isinstance(sent, Delivery) else sent._parts[0].batch
        assert batch.listeners is not None

        def give_up() -> None:  # the wait is over by then, but the task has not gone on
            waiting.cancel()

        batch.listeners.append(give_up)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(DeliveryFailed) as failed:
            await producer.flush()
        assert [failure.value for failure in failed.value.failures] == [b"v"]
        late = asyncio.create_task(sent)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await producer.flush()  # the failure was reported


@run_by(run)
async def test_flush_raises_the_failures_before_a_batch_was_given_up(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /
) -> None:
    async with Producer(
        cluster.bootstrap, batch_size=100, max_in_flight_requests_per_connection=1, request_timeout_ms=500
    ) as producer:
        cluster.script(PRODUCE, reject(ErrorCode.INVALID_RECORD), HANG)
        sent = producer.send_batch("orders", [b"a" * 60, b"b" * 60], partition=0)
        waiting = asyncio.create_task(sent)
        await until(lambda: any(part.batch.is_done for part in sent._parts), 20)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not sent.done()
        with pytest.raises(DeliveryFailed) as failed:
            await producer.flush()
        assert [failure.value for failure in failed.value.failures] == [b"a" * 60]
        with pytest.raises(BatchDeliveryFailed):
            await sent
        await producer.flush()


@run_by(run)
async def test_a_callback_may_send(cluster: ScriptedCluster, called: Called, note: Callable[..., None], /) -> None:
    sent = 0
    async with Producer(cluster.bootstrap) as producer:

        def send_another(metadata: RecordMetadata | None, error: MinibrokerError | None) -> None:
            nonlocal sent
            note(metadata, error)
            if sent < 50:
                sent += 1
                producer.send("orders", b"%d" % sent, on_delivery=send_another)

        send_another(None, None)
        while len(called) <= 50:
            await producer.flush()
    assert cluster.log("orders").values() == [b"%d" % number for number in range(1, 51)]


@run_by(run)
async def test_records_that_moved_to_other_batches_report_their_final_offsets(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /
) -> None:
    cluster.script(PRODUCE, *[reject(ErrorCode.MESSAGE_TOO_LARGE)] * 3)  # split, and split again
    async with Producer(cluster.bootstrap) as producer:
        for number in range(8):
            producer.send("orders", b"%d" % number, on_delivery=note)  # held first
    assert sorted(metadata.offset for metadata, _ in called if metadata is not None) == list(range(8))


@run_by(run)
async def test_unacknowledged_records_fail_when_the_producer_closes(
    cluster: ScriptedCluster, called: Called, note: Callable[..., None], /
) -> None:
    producer = Producer(cluster.bootstrap)
    await producer.start()
    cluster.script(PRODUCE, *[HANG] * 10)
    producer.send("orders", b"v", on_delivery=note)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.warns(ResourceWarning, match="1 record"):
        await asyncio.gather(closing, return_exceptions=True)
    assert [type(error) for _, error in called] == [Closed]
