"""Callers that the producer holds back, for how long and in which order; and leaders that it does not wait for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.errors import BufferFull, Closed, InvalidSetting
from minibroker.client.producer import Producer
from minibroker.client.producing.batch import Batch
from minibroker.client.producing.partitioners import Partitions, RoundRobin, crc32, murmur2
from minibroker.client.tasks import Turns
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.running import run_by
from tests.unit.client.scripted_broker import HANG, Action, Received, ScriptedCluster, reject
from tests.waiting import until


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None]], brokers: int = 1, partitions: int = 1
) -> None:
    """Run the scenario with a cluster that has a topic "orders"."""

    async def main() -> None:
        async with asyncio.timeout(60), ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            await scenario(cluster)

    asyncio.run(main())


# --- turns ---


async def test_waiters_pass_one_by_one_in_the_order_in_which_they_came() -> None:
    room: list[None] = []
    passed: list[str] = []
    turns = Turns(lambda: len(room) > 0)

    async def take(name: str, rounds: int) -> None:
        for _ in range(rounds):
            if not turns.is_clear:
                await turns.wait()
            room.pop()
            passed.append(name)

    tasks = [asyncio.create_task(take(name, 2)) for name in "abc"]
    await asyncio.sleep(0)
    for _ in range(4):
        room.append(None)
        turns.look()
        await until(lambda: not room)
    assert passed == ["a", "b", "c", "a"]  # a, which came again, was behind b and c
    room += [None, None]
    turns.look()
    await asyncio.gather(*tasks)
    assert passed == ["a", "b", "c", "a", "b", "c"]
    assert turns._waiting == type(turns._waiting)()


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    is_open = False
    turns = Turns(lambda: is_open)
    tasks = [asyncio.create_task(turns.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    is_open = True
    turns.look()
    tasks[0].cancel()  # it has its turn, and will not use it
    tasks[1].cancel()
    await asyncio.wait_for(tasks[2], 10)


# --- drain ---


@pytest.mark.slow
@run_by(run)
async def test_drain_gives_up_after_max_block_ms_and_loses_nothing(cluster: ScriptedCluster, /) -> None:
    held = True
    cluster.rules.append(lambda received: HANG if held and received.api is PRODUCE else None)
    async with Producer(
        cluster.bootstrap,
        buffer_memory=100_000,
        max_request_size=50_000,
        max_block_ms=50,
        request_timeout_ms=200,
        retry_backoff_ms=1,
    ) as producer:
        producer.send_batch("orders", [b"x" * 1_000] * 150, partition=0)
        with pytest.raises(BufferFull, match=r"0.05 s \(max_block_ms\).*drain"):
            await producer.drain()
        held = False
    assert cluster.log("orders").end == 150


@pytest.mark.parametrize("told_by", ["on_delivery", "await"])
@run_by(run)
async def test_reported_failures_take_no_room(cluster: ScriptedCluster, /, told_by: str) -> None:
    cluster.rules.append(lambda received: reject(ErrorCode.INVALID_RECORD) if received.api is PRODUCE else None)
    told: list[object] = []
    async with Producer(
        cluster.bootstrap, buffer_memory=100_000, max_request_size=50_000, batch_size=20_000, max_block_ms=500
    ) as producer:
        for number in range(40):
            note = (lambda _, error: told.append(error)) if told_by == "on_delivery" else None
            sent = producer.send("orders", bytes(10_000), on_delivery=note)
            await until(sent.done, 10)
            if told_by == "await":
                with pytest.raises(BrokerError):
                    await sent
            if told_by == "on_delivery":
                await until(lambda number=number: len(told) > number, 10)  # type: ignore[misc]
            assert producer._accumulator.used == 0
            await producer.drain()
    if told_by == "on_delivery":
        assert len(told) == 40


@run_by(run)
async def test_a_failed_record_is_not_kept_by_the_error_that_was_raised(cluster: ScriptedCluster, /) -> None:
    """The garbage collector does not track a Delivery: a reference cycle would keep it for ever."""

    cluster.rules.append(lambda received: reject(ErrorCode.INVALID_RECORD) if received.api is PRODUCE else None)
    async with Producer(cluster.bootstrap) as producer:
        for _ in range(20):
            with pytest.raises(BrokerError):
                await producer.send("orders", b"v")
        gc.collect()
        assert sum(isinstance(each, Batch) and each.error is not None for each in gc.get_objects()) <= 1


@run_by(run)
async def test_tasks_that_drain_get_room_in_the_order_in_which_they_came(cluster: ScriptedCluster, /) -> None:
    order: list[int] = []
    async with Producer(cluster.bootstrap, buffer_memory=20_000, max_request_size=20_000) as producer:
        await producer.send("orders", b"known")

        async def use(number: int) -> None:
            for _ in range(20):
                await producer.drain()
                order.append(number)
                producer.send_batch("orders", [b"x" * 1_000] * 19, partition=0)

        await asyncio.gather(*map(use, range(4)))
    assert cluster.log("orders").end == 1 + 4 * 20 * 19
    counts = [order[: len(order) // 2].count(number) for number in range(4)]
    assert max(counts) - min(counts) <= 2, counts


@run_by(run)
async def test_closing_lets_those_who_drain_know(cluster: ScriptedCluster, /) -> None:
    cluster.rules.append(lambda received: HANG if received.api is PRODUCE else None)
    producer = Producer(cluster.bootstrap, buffer_memory=20_000, max_request_size=20_000, delivery_timeout_ms=500)
    await producer.start()
    producer.send_batch("orders", [b"x" * 1_000] * 30, partition=0)
    draining = [asyncio.create_task(producer.drain()) for _ in range(3)]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(producer.close())
    for each in draining:
        with pytest.raises(Closed):
            await each
    with pytest.raises(Closed):
        await producer.drain()
    await asyncio.gather(closing, return_exceptions=True)
    with pytest.raises(Closed):
        await producer.drain()


# --- leaders that do not answer ---


@pytest.mark.slow
@pytest.mark.parametrize("timeout_ms", [0, 20])
@run_by(run, brokers=2, partitions=2)
async def test_records_that_may_go_anywhere_avoid_a_leader_that_takes_nothing(
    cluster: ScriptedCluster, /, timeout_ms: int
) -> None:
    stuck = True

    def rule(received: Received) -> Action | None:
        return HANG if stuck and received.api is PRODUCE and received.node_id == 1 else None

    cluster.rules.append(rule)
    async with Producer(
        cluster.bootstrap,
        batch_size=1_000,
        max_in_flight_requests_per_connection=1,
        partitioner_availability_timeout_ms=timeout_ms,
        partitioner=RoundRobin(),
        request_timeout_ms=1_500,
        retry_backoff_ms=1,
    ) as producer:
        await producer.send("orders", b"known", partition=0)
        for partition in (1, 1):  # the second cannot be sent while the first has no answer
            producer.send_batch("orders", [b"x" * 900], partition=partition)
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.3
        chosen: list[int] = []
        while loop.time() < end:
            await asyncio.sleep(0.005)
            chosen.append(producer.send_batch("orders", [b"x" * 900])._parts[0].batch.partition)
        last = chosen[-10:]
        assert (1 in last) is (timeout_ms == 0)
        stuck = False
        if timeout_ms:
            await until(lambda: 1 in producer._accumulator._topics["orders"].available)
    assert sum(cluster.log("orders", index).end for index in range(2)) == 3 + len(chosen)


# --- functions that choose partitions ---


def test_round_robin_goes_around_for_each_topic_and_leaves_out_what_is_not_available() -> None:
    choose = RoundRobin()
    chosen = [choose("a", b"k", None, Partitions(4, [0, 2, 3])) for _ in range(4)]
    assert chosen == [0, 2, 3, 0]
    assert choose("b", None, b"v", Partitions(2, [0, 1])) == 0


@pytest.mark.parametrize("wrong", [murmur2, crc32, "murmur2", RoundRobin, None, 5])
def test_an_object_that_is_no_partitioner_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSetting, match="Partitioner"):
        Producer("127.0.0.1:9092", partitioner=wrong)
