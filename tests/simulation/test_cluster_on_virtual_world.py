"""Three brokers, their controllers and clients, unchanged, on the virtual World: the abstraction does not leak."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from client.admin import Admin
from client.consumer import Consumer
from client.producer import Producer
from protocol import znodes
from protocol.model import TopicPartition
from protocol.world import World
from tests.simulation.cluster import LOG_DIR, VirtualCluster
from tests.simulation.loop import run
from tests.simulation.world import Simulation

TOPIC = "orders"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]
everywhere = pytest.mark.parametrize("seed", range(3))


async def _start_cluster() -> VirtualCluster:
    """Three brokers, and a topic of three partitions with three replicas each."""
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    world = cluster.client("admin")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic(TOPIC, partitions=len(PARTITIONS), replication_factor=3)

    await world.process.run(create())
    return cluster


async def _produce(world: World, bootstrap: str, numbers: Iterable[int]) -> None:
    """Send the numbers to the partitions in turn, one per virtual millisecond, and see them all acknowledged."""
    async with Producer(bootstrap, world=world) as producer:
        for number in numbers:
            producer.send(TOPIC, b"%d" % number, partition=number % len(PARTITIONS))
            await producer.drain()
            await asyncio.sleep(0.001)


async def _consume(world: World, bootstrap: str, count: int) -> dict[int, list[int]]:
    """The numbers in each partition, in order: `count` of them, and what else comes within a second."""
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
    """The numbers from 0 on are there: nothing lost, nothing twice, nothing out of order."""
    world = cluster.client("consumer")
    consumed = await world.process.run(_consume(world, cluster.bootstrap, count))
    assert consumed == {
        partition.partition: list(range(partition.partition, count, len(PARTITIONS))) for partition in PARTITIONS
    }


async def _until_in_sync(cluster: VirtualCluster) -> None:
    await cluster.until(lambda: all(len(cluster.state(partition).isr) == 3 for partition in PARTITIONS))


@everywhere
def test_nothing_is_lost_or_doubled_or_reordered_when_a_leader_is_killed(seed: int) -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("producer")
        producing = world.process.start(_produce(world, cluster.bootstrap, range(1_200)))
        await asyncio.sleep(0.5)
        before = cluster.state(PARTITIONS[0])
        cluster.kill_broker(before.leader)
        await producing
        after = cluster.state(PARTITIONS[0])
        assert after.leader not in (-1, before.leader)
        assert after.leader_epoch == before.leader_epoch + 1
        assert before.leader not in after.isr
        await _check(cluster, 1_200)

    run(scenario(), seed=seed)


@everywhere
def test_every_broker_is_killed_and_comes_back_in_turn_while_a_producer_goes_on(seed: int) -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("producer")
        producing = world.process.start(_produce(world, cluster.bootstrap, range(3_000)))
        for broker_id in cluster.broker_ids:
            await asyncio.sleep(0.3)
            cluster.kill_broker(broker_id)
            await asyncio.sleep(0.6)
            await cluster.start_broker(broker_id)
            await _until_in_sync(cluster)
        await producing
        await _check(cluster, 3_000)

    run(scenario(), seed=seed)


@everywhere
def test_a_killed_controller_is_replaced_and_elects_leaders(seed: int) -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        [controller] = cluster.active_controllers()
        world = cluster.client("producer")
        producing = world.process.start(_produce(world, cluster.bootstrap, range(1_200)))
        await asyncio.sleep(0.5)
        cluster.kill_broker(controller)
        await cluster.until(lambda: cluster.active_controllers())
        [successor] = cluster.active_controllers()
        assert successor != controller
        assert znodes.decode_controller(cluster.simulation.zookeeper.data(znodes.CONTROLLER)) == successor
        assert znodes.decode_controller_epoch(cluster.simulation.zookeeper.data(znodes.CONTROLLER_EPOCH)) == 2
        await producing
        await _check(cluster, 1_200)

    run(scenario(), seed=seed)


def test_all_brokers_are_killed_at_once_and_keep_what_was_acknowledged() -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        world = cluster.client("producer")
        await world.process.run(_produce(world, cluster.bootstrap, range(300)))
        for broker_id in cluster.broker_ids:
            cluster.kill_broker(broker_id)
        await asyncio.sleep(60)
        await cluster.start()
        await _check(cluster, 300)
        await world.process.run(_produce(world, cluster.bootstrap, range(300, 600)))
        await _until_in_sync(cluster)
        await _check(cluster, 600)

    run(scenario())


def test_a_clean_stop_hands_over_and_leaves_a_marker_that_a_kill_does_not() -> None:
    async def scenario() -> None:
        cluster = await _start_cluster()
        markers = {}
        for broker_id, end in ((0, cluster.stop_broker), (1, None)):
            if end is not None:
                await end(broker_id)
            else:
                cluster.kill_broker(broker_id)
            disk = cluster.client(f"broker-{broker_id}").disk
            markers[broker_id] = [name for name in disk.list(LOG_DIR) if "clean" in name]
        assert len(markers[0]) == 1
        assert markers[1] == []
        for broker_id in (0, 1):
            await cluster.start_broker(broker_id)
        await _until_in_sync(cluster)

    run(scenario())


# --- Determinism --------------------------------------------------------------------------------------------------


async def _traced_scenario() -> str:
    cluster = await _start_cluster()
    world = cluster.client("producer")
    producing = world.process.start(_produce(world, cluster.bootstrap, range(600)))
    await asyncio.sleep(0.3)
    cluster.kill_broker(cluster.state(PARTITIONS[0]).leader)
    await producing
    await _check(cluster, 600)
    return cluster.simulation.loop.trace


def test_a_cluster_runs_the_same_way_in_every_process_with_the_same_seed() -> None:
    program = (
        "from tests.simulation.loop import run\n"
        "from tests.simulation.test_cluster_on_virtual_world import _traced_scenario\n"
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
