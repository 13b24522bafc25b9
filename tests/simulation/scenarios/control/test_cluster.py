"""Unmodified brokers, controllers and clients on the virtual World: failovers, clean stops and determinism."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol import znodes
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.seeds import every_seed

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]
RECORDS_PER_S = 3_000
everywhere = every_seed(range(2))


async def _start_cluster() -> VirtualCluster:
    """Start three brokers, and create a topic of three partitions with three replicas each."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await as_admin(cluster, lambda admin: admin.create_topic(TOPIC, partitions=len(PARTITIONS), replication_factor=3))
    return cluster


class Load:
    """A producer in its own process that sends the numbers from `first` on to the partitions in turn. It sends fast
    enough that records are always in flight to the followers when their leader is killed."""

    def __init__(self, cluster: VirtualCluster, first: int = 0) -> None:
        self._world = cluster.client("producer")
        self._bootstrap = cluster.bootstrap
        self._next = first
        self._enough = asyncio.Event()
        self._producing = self._world.process.start(self._produce())

    async def stop(self) -> int:
        """Stop sending, wait until all is acknowledged, and return the next number, which is the number of records."""
        self._enough.set()
        await self._producing
        return self._next

    async def _produce(self) -> None:
        async with Producer(self._bootstrap, world=self._world) as producer:
            while not self._enough.is_set():
                producer.send(TOPIC, b"%d" % self._next, partition=self._next % len(PARTITIONS))
                self._next += 1
                await producer.drain()
                await asyncio.sleep(self._world.random.uniform(0, 2 / RECORDS_PER_S))


async def _consume(world: World, bootstrap: str, count: int) -> dict[int, list[int]]:
    """Return the numbers in each partition, in order: `count` of them, and any more that arrive within a second."""
    consumed: dict[int, list[int]] = {partition.partition: [] for partition in PARTITIONS}

    async def read(consumer: Consumer) -> None:
        async for batch in consumer.batches():
            consumed[batch.partition] += [int(value or b"") for value in batch.values]
            if sum(map(len, consumed.values())) >= count:
                return

    async with Consumer(bootstrap, topics=[TOPIC], world=world) as consumer:
        await read(consumer)
        try:
            async with asyncio.timeout(1):
                await read(consumer)
        except TimeoutError:
            pass
    return consumed


async def _check(cluster: VirtualCluster, count: int) -> None:
    """Assert that the numbers from 0 on are there: none lost, duplicated or out of order."""
    world = cluster.client("consumer")
    consumed = await world.process.run(_consume(world, cluster.bootstrap, count))
    assert consumed == {
        partition.partition: list(range(partition.partition, count, len(PARTITIONS))) for partition in PARTITIONS
    }


async def _until_in_sync(cluster: VirtualCluster) -> None:
    await cluster.until(lambda: all(len(cluster.state(partition).isr) == 3 for partition in PARTITIONS))


@pytest.mark.slow
@everywhere
@run_by(on_virtual_loop)
async def test_nothing_is_lost_or_doubled_or_reordered_when_a_leader_is_killed(seed: int) -> None:
    cluster = await _start_cluster()
    load = Load(cluster)
    await asyncio.sleep(0.3)
    before = cluster.state(PARTITIONS[0])
    cluster.kill_broker(before.leader)
    await cluster.until(lambda: cluster.state(PARTITIONS[0]).leader not in (-1, before.leader))
    after = cluster.state(PARTITIONS[0])
    assert after.leader_epoch == before.leader_epoch + 1
    assert before.leader not in after.isr
    await asyncio.sleep(0.3)
    await _check(cluster, await load.stop())


@pytest.mark.slow
@everywhere
@run_by(on_virtual_loop)
async def test_every_broker_is_killed_and_comes_back_in_turn_while_a_producer_goes_on(seed: int) -> None:
    cluster = await _start_cluster()
    load = Load(cluster)
    for broker_id in cluster.broker_ids:
        await asyncio.sleep(0.1)
        cluster.kill_broker(broker_id)
        await asyncio.sleep(0.6)
        await cluster.start_broker(broker_id)
        await _until_in_sync(cluster)
    await _check(cluster, await load.stop())


@everywhere
@run_by(on_virtual_loop)
async def test_a_killed_controller_is_replaced_and_elects_leaders(seed: int) -> None:
    cluster = await _start_cluster()
    [controller] = cluster.active_controllers()
    load = Load(cluster)
    await asyncio.sleep(0.2)
    cluster.kill_broker(controller)
    await cluster.until(cluster.active_controllers)
    [successor] = cluster.active_controllers()
    assert successor != controller
    assert znodes.decode_controller(cluster.simulation.zookeeper.data(znodes.CONTROLLER)) == successor
    assert znodes.decode_controller_epoch(cluster.simulation.zookeeper.data(znodes.CONTROLLER_EPOCH)) == 2
    await cluster.until(lambda: all(cluster.state(partition).leader in cluster.living() for partition in PARTITIONS))
    await asyncio.sleep(0.1)
    await _check(cluster, await load.stop())


@run_by(on_virtual_loop)
async def test_all_brokers_are_killed_at_once_and_keep_what_was_acknowledged() -> None:
    cluster = await _start_cluster()
    load = Load(cluster)
    await asyncio.sleep(0.1)
    count = await load.stop()
    for broker_id in cluster.broker_ids:
        cluster.kill_broker(broker_id)
    await asyncio.sleep(60)
    await cluster.start()
    await _check(cluster, count)
    load = Load(cluster, first=count)
    await asyncio.sleep(0.1)
    count = await load.stop()
    await _until_in_sync(cluster)
    await _check(cluster, count)


@run_by(on_virtual_loop)
async def test_a_clean_stop_leaves_a_marker_and_a_kill_does_not() -> None:
    cluster = await _start_cluster()

    def markers(broker_id: int) -> list[str]:
        disk = cluster.simulation.host(f"broker-{broker_id}").start_process().disk
        return [name for name in disk.list(LOG_DIR) if "clean" in name]

    await cluster.stop_broker(0)
    cluster.kill_broker(1)
    assert len(markers(0)) == 1
    assert markers(1) == []
    for broker_id in (0, 1):
        await cluster.start_broker(broker_id)
    await _until_in_sync(cluster)


# --- Determinism --------------------------------------------------------------------------------------------------


async def _traced_scenario() -> str:
    cluster = await _start_cluster()
    load = Load(cluster)
    await asyncio.sleep(0.1)
    cluster.kill_broker(cluster.state(PARTITIONS[0]).leader)
    await asyncio.sleep(0.5)
    await _check(cluster, await load.stop())
    return cluster.simulation.loop.trace


@pytest.mark.slow
def test_a_cluster_runs_the_same_way_in_every_process_with_the_same_seed() -> None:
    program = (
        "from minibroker.deploy.simulator.loop import run\n"
        "from tests.simulation.scenarios.control.test_cluster import _traced_scenario\n"
        "print(run(_traced_scenario(), seed=7))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert traces == {run(_traced_scenario(), seed=7) + "\n"}
    assert run(_traced_scenario(), seed=8) + "\n" not in traces
