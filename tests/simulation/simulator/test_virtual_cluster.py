"""Faults of whole brokers, and the exact repetition of a run with all kinds of faults."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop, run
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)


async def _create_topic(cluster: VirtualCluster) -> None:
    world = cluster.client("admin")

    async def create() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic(TOPIC, partitions=1, replication_factor=3)

    await world.process.run(create())


async def _start_cluster() -> VirtualCluster:
    cluster = VirtualCluster(Simulation())
    await cluster.start()
    await _create_topic(cluster)
    return cluster


async def _produce(cluster: VirtualCluster, count: int = 20) -> None:
    """Send some records, each after the acknowledgement of the one before."""
    world = cluster.client("producer")

    async def produce() -> None:
        async with Producer(cluster.bootstrap, world=world) as producer:
            for number in range(count):
                await producer.send(TOPIC, b"%d" % number, partition=0)

    await world.process.run(produce())


async def _until_another_leads(cluster: VirtualCluster, former: int) -> None:
    await cluster.until(lambda: cluster.state(PARTITION).leader not in (-1, former))


async def _until_in_sync(cluster: VirtualCluster) -> None:
    await cluster.until(lambda: len(cluster.state(PARTITION).isr) == 3)


@run_by(on_virtual_loop)
async def test_a_paused_leader_is_replaced_and_returns_as_a_follower() -> None:
    cluster = await _start_cluster()
    paused = cluster.state(PARTITION).leader
    cluster.pause_broker(paused)
    paused_s = cluster.simulation.loop.time()
    await _until_another_leads(cluster, paused)
    assert cluster.simulation.loop.time() - paused_s > 3  # only ZooKeeper reports a pause
    await _produce(cluster)
    cluster.resume_broker(paused)
    await _until_in_sync(cluster)
    assert cluster.living() == [0, 1, 2]


@run_by(on_virtual_loop)
async def test_a_broker_without_power_leaves_the_isr_before_its_session_expires_and_restarts() -> None:
    cluster = await _start_cluster()
    await _produce(cluster)
    victim = next(i for i in cluster.broker_ids if i not in cluster.active_controllers())
    before = cluster.process(victim)
    cluster.power_cut(victim)
    cut_s = cluster.simulation.loop.time()
    await cluster.until(lambda: victim not in cluster.state(PARTITION).isr)
    assert cluster.simulation.loop.time() - cut_s < 5  # keepalive probes have detected it
    assert cluster.living_broker(victim) is None
    await cluster.start_broker(victim)
    assert cluster.process(victim) is not before
    await _until_in_sync(cluster)


def test_a_disk_failure_ends_the_broker_and_fails_the_run_unless_the_test_handles_it() -> None:
    async def scenario(simulation_fails: bool) -> list[tuple[int, str]]:
        failures: list[tuple[int, str]] = []
        simulation = Simulation()

        def failed(broker_id: int, error: Exception) -> None:
            assert broker_id not in cluster.living()
            failures.append((broker_id, str(error)))

        cluster = VirtualCluster(simulation, on_broker_failure=None if simulation_fails else failed)
        await cluster.start()
        await _create_topic(cluster)
        leader = cluster.state(PARTITION).leader
        simulation.host(host_name(leader)).disk.faults.fail("pwrite", errno.EIO)
        await _produce(cluster)
        await _until_another_leads(cluster, leader)
        await cluster.start_broker(leader)
        await _until_in_sync(cluster)
        return failures

    [(_, text)] = run(scenario(simulation_fails=False))
    assert os.strerror(errno.EIO) in text
    with pytest.raises(ExceptionGroup, match="errors in callbacks"):
        run(scenario(simulation_fails=True))


@run_by(on_virtual_loop)
async def test_a_broker_that_cannot_reach_zookeeper_fails_to_start_and_can_start_later() -> None:
    cluster = await _start_cluster()
    cluster.kill_broker(1)
    cluster.simulation.zookeeper.cut(host_name(1))
    starting = asyncio.create_task(cluster.start_broker(1))
    await asyncio.sleep(1)
    assert cluster.living() == [0, 1, 2]
    assert cluster.living_broker(1) is None  # nor its killed predecessor
    with pytest.raises(MinibrokerError, match="no ZooKeeper session"):
        await starting
    assert cluster.living() == [0, 2]
    cluster.simulation.zookeeper.uncut(host_name(1))
    await cluster.start_broker(1)
    await _until_in_sync(cluster)


# --- Determinism --------------------------------------------------------------------------------------------------


async def _faulty_scenario() -> str:
    """Run a cluster with all kinds of faults, and return the trace."""
    simulation = Simulation()
    dice = simulation.random("faults")
    failed: dict[int, Process] = {}
    cluster = VirtualCluster(
        simulation, on_broker_failure=lambda broker_id, _: failed.update({broker_id: cluster.process(broker_id)})
    )
    await cluster.start()
    await _create_topic(cluster)
    network, zookeeper = simulation.network, simulation.zookeeper
    one, other, third = (host_name(broker_id) for broker_id in cluster.broker_ids)
    producing = asyncio.create_task(_produce(cluster, 200))
    network.set_latency(0.001, 0.02)
    network.set_bandwidth(1_000_000)
    zookeeper.cut(other)
    network.block(one, other)
    await asyncio.sleep(dice.uniform(1, 3))
    zookeeper.uncut(other)
    network.heal()
    cluster.pause_broker(0)
    zookeeper.lose_connections(third)
    await asyncio.sleep(dice.uniform(1, 8))
    network.reset(other, third)
    cluster.resume_broker(0)
    cluster.power_cut(1)
    await asyncio.sleep(dice.uniform(0, 3))
    await cluster.start_broker(1)
    network.unreachable(one, True)
    zookeeper.stop()
    await asyncio.sleep(dice.uniform(1, 10))
    zookeeper.start()
    network.unreachable(one, False)
    zookeeper.expire(one)
    faults = simulation.host(third).disk.faults
    faults.sync_delay_s = 0.1
    faults.fail("pwrite", errno.EIO, after=3)
    simulation.host(other).clock_offset_ms = -5_000
    await cluster.until(lambda: failed)
    for broker_id, process in failed.items():
        assert not process.alive
        await cluster.start_broker(broker_id)
    await producing
    await _until_in_sync(cluster)
    return simulation.loop.trace


@pytest.mark.slow
def test_a_run_with_faults_and_the_same_seed_is_equal_in_another_process() -> None:
    program = (
        "from minibroker.deploy.simulator.loop import run\n"
        "from tests.simulation.simulator.test_virtual_cluster import _faulty_scenario\n"
        "print(run(_faulty_scenario(), seed=7, shuffle=True))"
    )
    other_process = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other_process.stdout == run(_faulty_scenario(), seed=7, shuffle=True) + "\n"
    assert run(_faulty_scenario(), seed=8, shuffle=True) + "\n" != other_process.stdout
