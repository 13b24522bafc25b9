"""`exactlyOnce` of the Spark sink on a whole cluster: drivers and tasks that die anywhere, or wake up late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minibroker.broker.transactions.markers import MarkerSender
from minibroker.client.consumer import Consumer
from minibroker.client.errors import ProducerFenced
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.world import VirtualWorld
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from minibroker.spark_jobs.source import exactly_once
from minibroker.spark_jobs.source.exactly_once import Place, WrittenInTransaction, abort_batch, prepare_rows
from tests.running import run_by
from tests.simulation.scenarios.helpers import with_client
from tests.simulation.scenarios.transactions.spark_model import NAME, PARTITIONS, TOPIC, Query, batch_of, committed

SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}
OUTPUT: dict[str, Any] = {"name": TOPIC, "partitions": PARTITIONS, "replication_factor": 3}


def play(program: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]], seed: int = 0) -> None:
    with_client(program, OUTPUT, settings=SETTINGS, seed=seed)


async def time_of_a_batch(cluster: VirtualCluster) -> float:
    """Run a query of one batch, and return how long its driver took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await Query(cluster, 1).run_to_its_end()
    return loop.time() - began


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_a_driver_that_stops_anywhere_is_followed_by_one_that_goes_on_exactly(fault: str) -> None:
    """A paused driver wakes up while its successor works."""

    async def scenario(cluster: VirtualCluster, _: VirtualWorld) -> None:
        query = Query(cluster, 20)
        query.batches = 1
        took = await time_of_a_batch(cluster)
        query.done = 1
        for batch in range(1, 20):
            query.batches = batch + 1
            world, driver = query.start_driver()
            await asyncio.wait([driver], timeout=took * batch / 18)
            if fault == "killed":
                world.process.kill()
                await query.run_to_its_end()
                continue
            world.process.pause()
            _, second = query.start_driver()
            await asyncio.wait([second], timeout=query.random.uniform(0, 1.2 * took))
            world.process.resume()
            await asyncio.wait([driver, second])
            await query.run_to_its_end()
        assert await committed(cluster) == query.expected()

    play(scenario)


@pytest.mark.parametrize("ends", [0, 1, 3], ids=["none", "one", "all"])
@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_a_decision_is_carried_out_by_the_next_driver(fault: str, ends: int) -> None:
    """The first driver has committed none, one or all of the batch's transactions. Its successor divides the rows
    otherwise."""

    async def scenario(cluster: VirtualCluster, _: VirtualWorld) -> None:
        query = Query(cluster, 2, tasks=3)
        driver = await stop_after_the_decision(query, ends)
        if fault == "killed":
            driver.kill()
        else:
            driver.pause()
        query.tasks = 2
        await query.run_to_its_end(attempts=1)
        assert query.done == 2
        assert await committed(cluster) == query.expected()

    play(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_attempts_that_die_or_wake_up_late_leave_no_rows(seed: int) -> None:
    async def scenario(cluster: VirtualCluster, _: VirtualWorld) -> None:
        query = Query(cluster, 12)

        def task_fault(world: VirtualWorld, place: Place) -> None:
            if place.attempt >= 2 or query.random.random() < 0.5:
                return
            at = query.random.uniform(0, 0.5)
            loop = asyncio.get_running_loop()
            if query.random.random() < 0.5:
                loop.call_later(at, world.process.kill)
            else:
                loop.call_later(at, world.process.pause)
                loop.call_later(at + query.random.uniform(20, 40), world.process.resume)

        query.task_fault = task_fault
        await query.run_to_its_end(attempts=20)
        assert await committed(cluster) == query.expected()

    play(scenario, seed)


@pytest.mark.parametrize("of", ["driver", "group"])
def test_a_coordinator_that_dies_in_a_decision_does_not_change_it(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: VirtualCluster, _: VirtualWorld) -> None:
        query = Query(cluster, 3)
        state = TopicPartition(TRANSACTIONS_TOPIC, internal_partition(NAME, 3))
        victim = state if of == "driver" else TopicPartition("__consumer_offsets", 0)
        original = exactly_once._write_record

        async def write_record(*arguments: Any) -> None:
            if query.done == 1:
                asyncio.get_running_loop().call_later(0.02, cluster.kill_broker, cluster.state(victim).leader)
            await original(*arguments)

        monkeypatch.setattr(exactly_once, "_write_record", write_record)
        await query.run_to_its_end()
        assert await committed(cluster) == query.expected()

    play(scenario)


@run_by(play)
async def test_rows_whose_transaction_times_out_after_the_decision_are_written_again(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    query = Query(cluster, 2, timeout_ms=5_000, tasks=3)
    (await stop_after_the_decision(query, ends=1)).kill()
    await asyncio.sleep(30)
    await query.run_to_its_end()
    assert await committed(cluster) == query.expected()
    assert "except for the rows of 2 tasks" in query.errors[0]


@run_by(play)
async def test_rows_that_timed_out_after_the_decision_are_not_written_by_other_tasks(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    query = Query(cluster, 1, timeout_ms=5_000, tasks=3)
    (await stop_after_the_decision(query, ends=1)).kill()
    await asyncio.sleep(30)
    query.tasks = 2
    with pytest.raises(AssertionError):
        await query.run_to_its_end(attempts=2)
    assert "It has 2 tasks now, and had 3" in query.errors[-1]
    query.tasks = 3
    await query.run_to_its_end()
    assert await committed(cluster) == query.expected()


async def stop_after_the_decision(query: Query, ends: int) -> Any:
    """Start a driver that stops after it has decided and committed so many transactions. Return its process."""
    is_there = asyncio.Event()

    async def end(self: Any, prepared: Any, *, committed: bool) -> Any:
        await original(self, prepared[:ends], committed=committed)
        is_there.set()
        await asyncio.Event().wait()

    original = exactly_once._Driver.end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactly_once._Driver, "end", end)
        world, _ = query.start_driver()
        await is_there.wait()
    return world.process


@run_by(play)
async def test_a_batch_that_takes_longer_than_its_transactions_is_not_committed_in_part(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    query = Query(cluster, 1, timeout_ms=5_000, tasks=3)
    slow = {0}

    def task_fault(world: VirtualWorld, place: Place) -> None:
        if place.task in slow:
            slow.clear()
            world.process.pause()
            asyncio.get_running_loop().call_later(20, world.process.resume)

    query.task_fault = task_fault
    await query.run_to_its_end()
    assert len(query.errors) == 1
    assert "is not committed: the transaction of task" in query.errors[0]
    assert "transactionTimeout=5000ms" in query.errors[0]
    assert await committed(cluster) == query.expected()


@run_by(play)
async def test_an_older_checkpoint_is_refused(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    query = Query(cluster, 3)
    await query.run_to_its_end()
    query.done = 1
    with pytest.raises(AssertionError):
        await query.run_to_its_end(attempts=1)
    assert "batch 1 of minibroker-spark-query is older than batch 2, which is committed" in query.errors[-1]
    query.done = 2
    await query.run_to_its_end()
    assert await committed(cluster) == query.expected()


def test_readers_see_a_batch_as_soon_as_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = MarkerSender._attempt

    async def late(*arguments: Any) -> None:
        await asyncio.sleep(1)
        await attempt(*arguments)

    monkeypatch.setattr(MarkerSender, "_attempt", late)

    async def scenario(cluster: VirtualCluster, world: VirtualWorld) -> None:
        query = Query(cluster, 1)
        await query.run_to_its_end()
        partitions = [TopicPartition(TOPIC, index) for index in range(PARTITIONS)]
        ends = []
        for level in ("read_uncommitted", "read_committed"):
            async with Consumer(
                cluster.bootstrap, world=world, partitions=partitions, isolation_level=level
            ) as consumer:
                ends.append(await consumer.end_offsets(partitions))
        assert ends[0] == ends[1]

    play(scenario)


@run_by(play)
async def test_a_batch_that_fails_leaves_no_transaction_open(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    """Tasks stop at different places, and go on when the driver has aborted the batch."""
    options, guard = Query(cluster, 1).options, f"{NAME}-run"
    await prepare_rows(options, Place(NAME, 0, 30, 0, guard), [batch_of([30])], world)
    executors = [cluster.client(f"executor {task}") for task in range(30)]
    tasks = [
        each.process.start(prepare_rows(options, Place(NAME, 0, task, 0, guard), [batch_of([task])], each))
        for task, each in enumerate(executors)
    ]
    for each in executors:
        await asyncio.sleep(0.0005)
        each.process.pause()
    await abort_batch(options, NAME, 0, [], guard, world)
    for each in executors:
        each.process.resume()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    too_late, written = MinibrokerError, WrittenInTransaction
    assert {type(each) for each in outcomes} >= {too_late, ProducerFenced, written}
    assert await committed(cluster) == []
