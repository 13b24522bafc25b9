"""The cost of many partitions, counted in function calls instead of seconds, so that it is the same on every machine.
Twice as many partitions must cost twice as much, and no event loop callback may handle all of them at once. The
controller's writes and requests are counted as well."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from minibroker.client.admin import Admin
from minibroker.controller.handlers.steps import PARTITIONS_AT_ONCE
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import VirtualLoop, on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.benchmarks import bench_controller_scale
from tests.benchmarks.bench_controller_scale import NEW_PARTITIONS, REPLICAS, Row
from tests.running import run_by

FEW = 300
assert FEW >= 3 * PARTITIONS_AT_ONCE
WATCHED_FOR_S = 1.5
OPERATIONS = ("creation", "controller failover", "return of a broker", "broker failure")

MOST_CALLS_IN_A_TURN = 16_000
"""About 2 to 3 ms. The longest callbacks handle a fetch of, or the settling of, a hundred partitions."""
ABOUT_ALL = {"affected_by", "added", "load", "lost"}
"""Functions that plan for every partition in one callback. They are cheap, and excluded from the limit per callback."""


class Calls:
    """Calls of the product's functions during one operation."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        """Calls per function."""
        self.in_turn: Counter[int] = Counter()
        """Calls per callback of the loop."""
        self.about_all: set[int] = set()
        """Callbacks in which a function of ABOUT_ALL was called."""


@contextmanager
def counted(calls: Calls) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/minibroker/" in code.co_filename:
            calls.of[f"{code.co_filename.rpartition('/minibroker/')[2]}: {code.co_qualname}"] += 1
            calls.in_turn[loop.callbacks] += 1
            if code.co_qualname in ABOUT_ALL:
                calls.about_all.add(loop.callbacks)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


@functools.cache
def measured(partitions: int) -> dict[str, Calls]:
    calls = {operation: Calls() for operation in OPERATIONS}

    async def main() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        world = cluster.client("client")
        creation, failover, return_, failure = (calls[operation] for operation in OPERATIONS)

        async def scenario() -> None:
            with counted(creation):
                async with Admin(cluster.bootstrap, world=world) as admin:
                    await admin.create_topic("orders", partitions=partitions, replication_factor=3)
            await asyncio.sleep(5)
            [controller] = cluster.active_controllers()
            with counted(failover):
                await kill(controller)
            with counted(return_):
                await cluster.start_broker(controller)
                await asyncio.sleep(WATCHED_FOR_S)
            [successor] = cluster.active_controllers()
            with counted(failure):
                await kill(next(b for b in cluster.broker_ids if b not in (controller, successor)))

        async def kill(broker_id: int) -> None:
            cluster.kill_broker(broker_id)
            await asyncio.sleep(WATCHED_FOR_S)
            leaders = {cluster.state(TopicPartition("orders", number)).leader for number in range(partitions)}
            assert not leaders & {NO_LEADER, broker_id}

        await world.process.run(scenario())

    run(main(), seed=1)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_twice_as_many_partitions_cost_twice_as_much(operation: str) -> None:
    few, many = measured(FEW)[operation], measured(2 * FEW)[operation]
    assert many.of.total() < 2.2 * few.of.total()
    # A function whose calls grow with the square is hidden in the sum while partitions are few. (A periodic pass over
    # all partitions may happen once or twice during an operation.)
    grown = {
        name: (few.of[name], count)
        for name, count in many.of.items()
        if count > 6 * FEW and count > 3.2 * few.of[name] and not name.startswith("controller/timeline.py")
    }
    assert not grown


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_event_loop_callback_does_more_than_a_part_of_the_work(operation: str) -> None:
    calls = measured(2 * FEW)[operation]
    assert max(count for turn, count in calls.in_turn.items() if turn not in calls.about_all) < MOST_CALLS_IN_A_TURN


@run_by(on_virtual_loop, seed=1)
async def test_the_logs_of_new_partitions_share_their_syncs() -> None:
    """New partitions share a few syncs, whatever their number: only their directories must be durable before the
    answer."""
    flush_s, partitions = 0.05, 64

    cluster = VirtualCluster(Simulation())
    await cluster.start()
    for broker_id in cluster.broker_ids:
        cluster.simulation.host(host_name(broker_id)).disk.faults.sync_delay_s = flush_s
    world = cluster.client("client")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=partitions, replication_factor=3)

    def is_held() -> bool:
        managers = [cluster.broker(broker_id)._replicas for broker_id in cluster.broker_ids]
        return all(manager is not None and len(manager.partitions.values()) == partitions for manager in managers)

    began_s = asyncio.get_running_loop().time()
    await world.process.run(create())
    await cluster.until(is_held)
    assert asyncio.get_running_loop().time() - began_s < partitions * flush_s / 4


# --- The controller alone, with brokers that only answer -----------------------------------------------------------


BROKERS, PARTITIONS, TOPICS = 6, 600, 6


@functools.cache
def rows() -> dict[str, Row]:
    """Return what a small size of `tests/benchmarks/bench_controller_scale.py` prints, by operation."""
    scale = run(bench_controller_scale.measured(BROKERS, PARTITIONS, TOPICS))
    return {row.operation.partition(":")[0]: row for row in scale.rows}


def test_a_new_partition_is_two_znodes_and_a_topic_four_more() -> None:
    created = rows()[f"{TOPICS} topics of {PARTITIONS // TOPICS} partitions are created"]
    assert (created.elected, created.writes) == (PARTITIONS, 2 * PARTITIONS + 4 * TOPICS)
    last = rows()[f"a topic of {NEW_PARTITIONS} partitions is created"]
    assert (last.elected, last.writes) == (NEW_PARTITIONS, 2 * NEW_PARTITIONS + 4)


def test_a_start_writes_every_state_once_and_a_failover_none() -> None:
    taking_office = 2  # /controller and its epoch
    assert rows()["start"].writes == PARTITIONS + taking_office
    assert rows()["controller failover"].writes == taking_office
    assert rows()["controller failover"].requests == 2 * BROKERS * (PARTITIONS // PARTITIONS_AT_ONCE + 1)


def test_a_failed_broker_costs_a_write_for_each_of_its_replicas() -> None:
    failed = rows()["a broker fails"]
    assert failed.writes == 1 + PARTITIONS * REPLICAS // BROKERS
    assert failed.elected == rows()["preferred leaders are elected"].elected


def test_few_elections_among_many_partitions_are_announced_together() -> None:
    elected = rows()["preferred leaders are elected"]
    assert elected.elected < 150
    assert elected.writes == elected.elected
    # The states are read first, which may find changes to announce.
    assert elected.requests <= 2 * BROKERS * 2 * (elected.elected // PARTITIONS_AT_ONCE + 1)
