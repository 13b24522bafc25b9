"""A Producer, Consumer or Admin used from another event loop than its own raises an error at once and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import Closed, WrongEventLoop
from minibroker.client.producer import Producer
from minibroker.protocol.apis import METADATA, PRODUCE
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import encode_batch
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, Log, ScriptedCluster

P0 = TopicPartition("orders", 0)
PATIENCE_S = 30.0
Call = Callable[[], Awaitable[object]]


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario with a cluster that has a topic "orders"."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(1) as cluster:
            cluster.add_topic("orders", 1)
            await scenario(cluster)

    asyncio.run(main())


def fill(log: Log, *values: bytes) -> None:
    log.append(encode_batch(list(values), base_timestamp=0, timestamp_deltas=[0] * len(values)))


async def elsewhere(call: Call) -> None:
    """Check that the call, made in another thread with an event loop of its own, is refused at once with the name, the
    rule and the remedy."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(WrongEventLoop, match="in which it was started.*Make one (producer|consumer|admin) "):
                await call()

    await asyncio.to_thread(asyncio.run, main())


@run_by(run)
async def test_a_producer_refuses_every_call_from_another_event_loop(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        await producer.send("orders", b"first")

        async def send() -> None:
            producer.send("orders", b"lost")

        async def send_with_key() -> None:
            producer.send("orders", b"lost", key=b"k")

        for call in (send, send_with_key, producer.drain, producer.flush, producer.close):
            await asyncio.sleep(0.005)  # `send` looks once a millisecond
            await elsewhere(call)
        await producer.send("orders", b"second")
    assert cluster.log("orders").values() == [b"first", b"second"]


@pytest.mark.slow
@run_by(run)
async def test_send_on_its_fast_path_refuses_another_event_loop_too(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap, linger_ms=500) as producer:
        await producer.send("orders", b"known by now")
        await producer.send("orders", b"a", key=b"k")
        for key in (None, b"k"):
            producer.send("orders", b"opens a batch", key=key)

            async def send(key: bytes | None = key) -> None:
                producer.send("orders", b"lost", key=key)

            await asyncio.sleep(0.005)
            await elsewhere(send)
            await producer.flush()
    assert b"lost" not in cluster.log("orders").values()


@run_by(run)
async def test_send_from_a_thread_without_event_loop_is_refused(cluster: ScriptedCluster, /) -> None:
    async with Producer(cluster.bootstrap) as producer:
        with pytest.raises(WrongEventLoop, match=r"no event loop runs.*run_coroutine_threadsafe"):
            await asyncio.to_thread(producer.send, "orders", b"lost")


@pytest.mark.slow
@run_by(run)
async def test_a_delivery_that_has_no_ending_yet_cannot_be_awaited_in_another_event_loop(
    cluster: ScriptedCluster, /
) -> None:
    cluster.script(PRODUCE, HANG)
    async with Producer(cluster.bootstrap, request_timeout_ms=500) as producer:
        delivery = producer.send("orders", b"v")

        async def wait() -> None:
            await delivery

        await elsewhere(wait)
        metadata = await delivery
        assert await asyncio.to_thread(asyncio.run, _result(delivery)) == metadata


async def _result(delivery: Awaitable[object]) -> object:
    return await delivery


@run_by(run)
async def test_a_consumer_refuses_every_call_from_another_event_loop(cluster: ScriptedCluster, /) -> None:
    fill(cluster.log("orders"), b"a")
    async with Consumer(cluster.bootstrap, topics=["orders"]) as consumer:

        async def seek() -> None:
            consumer.seek(P0, 0)

        calls: list[Call] = [
            lambda: anext(consumer),
            lambda: anext(consumer.batches()),
            lambda: consumer.position(P0),
            lambda: consumer.end_offsets([P0]),
            lambda: consumer.offsets_for_times({P0: 0}),
            seek,
            consumer.close,
        ]
        for call in calls:
            await elsewhere(call)
        assert (await anext(consumer)).value == b"a"


@run_by(run)
async def test_an_admin_refuses_every_call_from_another_event_loop(cluster: ScriptedCluster, /) -> None:
    async with Admin(cluster.bootstrap) as admin:
        asked = len(cluster.requests(METADATA))
        for call in (admin.list_topics, lambda: admin.create_topic("t"), lambda: admin.delete_topic("t")):
            await elsewhere(call)
        await elsewhere(admin.close)
        assert len(cluster.requests(METADATA)) == asked
        assert await admin.list_topics() == ["orders"]


def test_the_loop_in_which_a_client_is_started_is_its_own_wherever_it_was_made() -> None:
    with asyncio.Runner() as first:

        async def setting_up() -> ScriptedCluster:
            cluster = ScriptedCluster(1)
            await cluster.__aenter__()
            cluster.add_topic("orders", 1)
            return cluster

        cluster = first.run(setting_up())
        producer = Producer(cluster.bootstrap)

        async def use() -> None:
            async with producer:
                await producer.send("orders", b"v")

        first.run(use())
        with pytest.raises(Closed):
            first.run(producer.flush())
        asyncio.run(producer.close())  # closed already: the second close does nothing, from any loop
        first.run(cluster.__aexit__(None, None, None))


@run_by(run)
async def test_of_a_loop_that_is_closed_the_error_says_that_nothing_more_is_sent(cluster: ScriptedCluster, /) -> None:
    producer = Producer(cluster.bootstrap)

    async def other() -> None:
        await producer.start()
        await producer._runtime.close()  # so that the client leaves no open socket

    await asyncio.to_thread(asyncio.run, other())
    with pytest.raises(WrongEventLoop, match="That loop is closed"):
        await producer.close()
    producer._state = "closed"
