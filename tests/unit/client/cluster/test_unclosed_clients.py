"""Clients that are dropped without `close`, or cancelled: they send what can be sent and report the rest."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from minibroker.client import consumer as consumer_module
from minibroker.client import producer as producer_module
from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.errors import Closed
from minibroker.client.fetching.records import Record
from minibroker.client.producer import Producer
from minibroker.client.producing.delivery import Delivery
from minibroker.protocol.apis import LEAVE_GROUP, OFFSET_COMMIT, PRODUCE, SYNC_GROUP
from tests.running import run_by
from tests.unit.client.consuming.test_consumer import P0, fill, take
from tests.unit.client.scripted_broker import HANG, ScriptedCluster

SOON_S = 10.0
"""A machine under load ends within this time. It is less than the patience of clients that are closed in peace."""


@pytest.fixture(autouse=True)
def _long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that can end do so even if the machine stands still for a while."""
    monkeypatch.setattr(producer_module, "CANCELLED_FLUSH_S", 30.0)
    monkeypatch.setattr(consumer_module, "ENDING_LOOP_S", 30.0)


@pytest.fixture
def hurried_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "CANCELLED_FLUSH_S", 0.5)
    monkeypatch.setattr(consumer_module, "ENDING_LOOP_S", 0.5)


def run(scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario with a cluster that has a topic "orders"; no connection may outlive it."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(1) as cluster:
            cluster.add_topic("orders", 1)
            await scenario(cluster)
            while any(node.connections for node in cluster.nodes.values()):
                await asyncio.sleep(0.01)

    asyncio.run(main())


@contextmanager
def resource_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings about clients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        told = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
        texts += [text for text in told if text.startswith(("<Producer", "<Consumer", "<Admin"))]


def hang_all(cluster: ScriptedCluster) -> None:
    cluster.rules.append(lambda received: HANG if received.api is PRODUCE else None)


# --- cancelled ---


def test_a_cancelled_body_still_sends_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        sent = asyncio.Event()

        async def body() -> None:
            async with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
                producer.send("orders", b"v")
                sent.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cluster.log("orders").values() == [b"v"]

    run(scenario)
    assert not [record for record in caplog.records if record.name == "minibroker.client"]


@pytest.mark.usefixtures("hurried_end")
@run_by(run)
async def test_a_cancelled_body_gives_up_soon_and_says_how_many_records_were_left(
    cluster: ScriptedCluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    hang_all(cluster)
    waiting: list[Delivery] = []

    async def body() -> None:
        async with Producer(cluster.bootstrap) as producer:
            waiting.extend(producer.send("orders", b"v") for _ in range(2))
            await producer.send("orders", b"v")

    task = asyncio.create_task(body())
    await cluster.until(lambda: len(cluster.requests(PRODUCE)) == 1)
    task.cancel()
    began = asyncio.get_running_loop().time()
    with resource_warnings() as texts, pytest.raises(asyncio.CancelledError):
        await task
    assert 0.4 < asyncio.get_running_loop().time() - began < SOON_S
    (text,) = texts
    assert text.startswith("<Producer closing, bootstrap=127.0.0.1:")
    assert text.endswith("was cancelled: 3 records were not acknowledged, and may or may not be in the log")
    assert caplog.messages == [text]
    with pytest.raises(Closed):
        await waiting[0]


@run_by(run)
async def test_a_second_cancellation_ends_the_flush_of_the_first(cluster: ScriptedCluster, /) -> None:
    hang_all(cluster)

    async def body() -> None:
        async with Producer(cluster.bootstrap) as producer:
            await producer.send("orders", b"v")

    with pytest.MonkeyPatch.context() as patch, resource_warnings() as texts:
        patch.setattr(producer_module, "CANCELLED_FLUSH_S", 1_000.0)
        task = asyncio.create_task(body())
        await cluster.until(lambda: len(cluster.requests(PRODUCE)) == 1)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(texts) == 1


@run_by(run)
async def test_a_close_that_is_cancelled_says_how_many_records_were_left(cluster: ScriptedCluster, /) -> None:
    hang_all(cluster)
    producer = Producer(cluster.bootstrap)
    await producer.start()
    producer.send("orders", b"v")
    with resource_warnings() as texts, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await producer.close()
    (text,) = texts
    assert "was cancelled: 1 record was not acknowledged" in text


@run_by(run)
async def test_records_are_sent_though_asyncio_run_has_cancelled_every_task_of_its_loop(
    cluster: ScriptedCluster, /
) -> None:
    async def body(sent: asyncio.Event) -> None:
        async with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
            producer.send("orders", b"v")
            sent.set()
            await asyncio.Event().wait()

    async def main() -> None:
        sent = asyncio.Event()
        tasks.append(asyncio.create_task(body(sent)))
        await sent.wait()

    tasks: list[asyncio.Task[None]] = []
    await asyncio.to_thread(asyncio.run, main())
    assert tasks[0].cancelled()
    assert cluster.log("orders").values() == [b"v"]


# --- dropped ---


@pytest.mark.slow
@run_by(run)
async def test_a_producer_that_is_dropped_warns_and_sends_what_it_has(cluster: ScriptedCluster, /) -> None:
    async def send() -> Delivery:
        producer = Producer(cluster.bootstrap, linger_ms=60_000)
        await producer.start()
        return producer.send("orders", b"v")

    with resource_warnings() as texts:
        delivery = await send()
        gc.collect()
    (text,) = texts
    assert text.startswith("<Producer running, bootstrap=127.0.0.1:")
    assert text.endswith(", unacknowledged=1> was dropped without `close`")
    assert (await delivery).offset == 0


@pytest.mark.usefixtures("hurried_end")
def test_unsendable_records_of_a_dropped_producer_fail_and_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        hang_all(cluster)

        async def send() -> Delivery:
            producer = Producer(cluster.bootstrap)
            await producer.start()
            return producer.send("orders", b"v")

        with resource_warnings():
            delivery = await send()
            with pytest.raises(Closed, match="dropped without"):
                await delivery

    run(scenario)
    assert {(record.name, record.levelno) for record in caplog.records} == {("minibroker.client", logging.WARNING)}
    dropped, failed = caplog.messages
    assert "unacknowledged=1> was dropped without `close`" in dropped
    assert "1 record was not acknowledged" in failed


@run_by(run)
async def test_a_producer_whose_loop_is_gone_says_how_many_records_are_lost(
    cluster: ScriptedCluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    async def send() -> None:
        producer = Producer(cluster.bootstrap, linger_ms=60_000)
        await producer.start()
        for _ in range(3):
            producer.send("orders", b"v")
        kept.append(producer)

    kept: list[Producer] = []
    await asyncio.to_thread(asyncio.run, send())
    with resource_warnings() as texts:
        kept.clear()
        gc.collect()
    with resource_warnings():  # asyncio's own, of its transports
        gc.collect()
    assert any(", unacknowledged=3> was dropped without `close`" in text for text in texts)
    (message,) = caplog.messages
    assert "3 records were not acknowledged" in message


@run_by(run)
async def test_a_program_that_forgets_to_close_its_producer_hears_of_it_by_default(
    cluster: ScriptedCluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        producer = Producer(cluster.bootstrap)
        await producer.start()
        for _ in range(3):
            producer.send("orders", b"v")

    with resource_warnings() as texts:
        await asyncio.to_thread(asyncio.run, main())
        gc.collect()
    with resource_warnings():  # asyncio's own, of its transports
        gc.collect()
    assert len(texts) == 1
    assert "3 records were not acknowledged, and may never be sent" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["consumer", "admin"])
@run_by(run)
async def test_a_consumer_or_admin_that_is_dropped_warns_and_ends(cluster: ScriptedCluster, /, kind: str) -> None:
    async def use() -> None:
        if kind == "consumer":
            await Consumer(cluster.bootstrap, topics=["orders"]).start()
        else:
            await Admin(cluster.bootstrap).start()

    with resource_warnings() as texts:
        await use()
        gc.collect()
    (text,) = texts
    assert "running, bootstrap=127.0.0.1:" in text
    assert text.endswith("was dropped without `close`")


def test_clients_that_were_never_started_or_are_closed_drop_silently() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        Producer(cluster.bootstrap)
        Consumer(cluster.bootstrap, topics=["orders"])
        Admin(cluster.bootstrap)
        async with (
            Producer(cluster.bootstrap),
            Consumer(cluster.bootstrap, topics=["orders"]),
            Admin(cluster.bootstrap),
        ):
            pass

    with resource_warnings() as texts:
        run(scenario)
        gc.collect()
    assert not texts


@run_by(run)
async def test_clients_say_in_their_repr_how_they_are(cluster: ScriptedCluster, /) -> None:
    bootstrap = cluster.bootstrap
    producer = Producer(bootstrap, linger_ms=60_000)
    assert repr(producer) == f"<Producer not started, bootstrap={bootstrap}, unacknowledged=0>"
    async with producer, Consumer([bootstrap], topics=["orders"]) as consumer, Admin(bootstrap) as admin:
        producer.send("orders", b"v")
        assert repr(producer) == f"<Producer running, bootstrap={bootstrap}, unacknowledged=1>"
        assert repr(consumer) == f"<Consumer running, bootstrap={bootstrap}, partitions=1, batches_waiting=0>"
        assert repr(admin) == f"<Admin running, bootstrap={bootstrap}>"
    assert repr(producer) == f"<Producer closed, bootstrap={bootstrap}, unacknowledged=0>"


@run_by(run)
async def test_a_member_of_a_group_that_is_dropped_says_so_and_its_heart_stops(cluster: ScriptedCluster, /) -> None:
    # `run` waits until no connection is left, the heart's included.

    consumer: Consumer | None = Consumer(cluster.bootstrap, group="billing", topics=["orders"])
    assert consumer is not None
    await consumer.start()
    await cluster.until(lambda: len(cluster.requests(SYNC_GROUP)) == 1)
    assert await consumer.poll(timeout_ms=100) == []
    with resource_warnings() as warned:
        consumer = None
        gc.collect()
    assert len(warned) == 1


# --- asyncio.run ends, and has cancelled every task of its loop, the client's own included ---


def cut_off(body: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, float]:
    """Run the body as a task until it has set its event, end `asyncio.run`, and return how long that took."""

    async def main() -> float:
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(body(ready)))
        await ready.wait()
        return asyncio.get_running_loop().time()

    def play() -> float:
        began = asyncio.run(main())
        return time.monotonic() - began

    tasks: list[asyncio.Task[None]] = []
    return asyncio.to_thread(play)


def member(cluster: ScriptedCluster, is_assigned: bool) -> Consumer:
    what: dict[str, Any] = {"partitions": [P0]} if is_assigned else {"topics": ["orders"]}
    return Consumer(
        cluster.bootstrap,
        group="billing",
        enable_auto_commit=True,
        auto_commit_interval_ms=60_000,
        **what,
    )


@pytest.mark.parametrize("is_assigned", [False, True])
@pytest.mark.parametrize("ending", ["with", "finally", "generator"])
def test_a_member_commits_and_leaves_though_asyncio_run_has_cancelled_every_task_of_its_loop(
    ending: str, is_assigned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 3)

        async def read(consumer: Consumer, ready: asyncio.Event) -> None:
            await take(consumer, 3)
            ready.set()
            await asyncio.Event().wait()

        async def body(ready: asyncio.Event) -> None:
            if ending == "with":
                async with member(cluster, is_assigned) as consumer:
                    await read(consumer, ready)
            consumer = member(cluster, is_assigned)
            await consumer.start()
            try:
                await read(consumer, ready)
            finally:
                if ending == "finally":
                    await consumer.commit({P0: 1})
                await consumer.close()

        async def records() -> AsyncIterator[Record]:
            async with member(cluster, is_assigned) as consumer:
                async for record in consumer:
                    yield record

        async def generator_body(ready: asyncio.Event) -> None:
            kept.append(records())
            async for record in kept[0]:
                if record.offset == 2:
                    break
            ready.set()

        kept: list[AsyncIterator[Record]] = []
        took_s = await cut_off(generator_body if ending == "generator" else body)
        group = cluster.groups.group("billing")
        assert not group.members
        assert group.offsets[P0].offset == 2, "the third record was in hand"
        assert took_s < SOON_S

    run(scenario)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("hurried_end")
@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_member_that_cannot_leave_when_asyncio_run_ends_soon_says_what_it_skipped(
    is_assigned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        fill(cluster.log("orders"), 3)

        async def body(ready: asyncio.Event) -> None:
            async with member(cluster, is_assigned) as consumer:
                await take(consumer, 2)
                cluster.rules.append(lambda received: HANG if received.api in (OFFSET_COMMIT, LEAVE_GROUP) else None)
                ready.set()
                await anext(consumer)
                await asyncio.Event().wait()

        assert await cut_off(body) < SOON_S

    run(scenario)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (text,) = [text for text in warned if "gave up leaving" in text]
    assert "asyncio.run" in text
    assert "1 partition was not committed" in text
    assert ("group billing was not left: it waits for session_timeout_ms=45000" in text) is not is_assigned


@pytest.mark.parametrize("call", ["flush", "close"])
@run_by(run)
async def test_a_producer_is_flushed_in_finally_after_asyncio_run_cancelled_every_task(
    cluster: ScriptedCluster, /, call: str
) -> None:
    async def body(ready: asyncio.Event) -> None:
        producer = Producer(cluster.bootstrap, linger_ms=60_000)
        await producer.start()
        try:
            producer.send("orders", b"v")
            ready.set()
            await asyncio.Event().wait()
        finally:
            if call == "flush":
                await producer.flush()
            await producer.close()

    assert await cut_off(body) < SOON_S
    assert cluster.log("orders").values() == [b"v"]


@run_by(run)
async def test_an_admin_answers_in_finally_though_asyncio_run_has_cancelled_every_task_of_its_loop(
    cluster: ScriptedCluster, /
) -> None:
    async def body(ready: asyncio.Event) -> None:
        async with Admin(cluster.bootstrap) as admin:
            try:
                ready.set()
                await asyncio.Event().wait()
            finally:
                await admin.create_topic("late")

    assert await cut_off(body) < SOON_S
    assert "late" in cluster.topics
