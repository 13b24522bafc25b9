"""Connections that a middlebox drops silently, so that neither end receives anything: the peers soon continue over new
ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by

TOPIC = "orders"
P0 = TopicPartition(TOPIC, 0)
SOON_S = 8.0

Scenario = Callable[[VirtualCluster, VirtualWorld, int], Awaitable[None]]


def play(scenario: Scenario, min_insync_replicas: int = 3) -> None:
    """Run the scenario with the cluster, the client's world and the controller's id. The controller and another broker
    follow the partition; the third one leads it."""

    async def main() -> None:
        cluster = VirtualCluster(Simulation())
        await cluster.start()
        await cluster.until(cluster.active_controllers)
        [controller] = cluster.active_controllers()
        leader, follower = (b for b in cluster.broker_ids if b != controller)
        world = cluster.client("client")

        async def act() -> None:
            configs = {"min.insync.replicas": str(min_insync_replicas)}
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic(TOPIC, assignments=[(leader, follower, controller)], configs=configs)
            await scenario(cluster, world, controller)

        await world.process.run(act())

    run(main(), seed=1)


@pytest.mark.parametrize("is_sent_at_once", [True, False])
@run_by(play)
async def test_writes_go_on_soon_after_a_followers_connection_fell_silent(
    cluster: VirtualCluster, world: VirtualWorld, controller: int, /, is_sent_at_once: bool
) -> None:
    leader, follower, _ = cluster.state(P0).isr
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send(TOPIC, b"0", partition=0)
        assert cluster.simulation.network.silence(host_name(leader), host_name(follower))
        if not is_sent_at_once:
            await asyncio.sleep(1)
        async with asyncio.timeout(SOON_S):
            await producer.send(TOPIC, b"1", partition=0)
    assert len(cluster.state(P0).isr) == 3


@pytest.mark.parametrize("idle_s", [0, 10])
@run_by(play, min_insync_replicas=1)
async def test_a_broker_soon_learns_that_it_leads_though_its_controller_connection_fell_silent(
    cluster: VirtualCluster, world: VirtualWorld, controller: int, /, idle_s: float
) -> None:
    leader, follower, _ = cluster.state(P0).isr
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send(TOPIC, b"0", partition=0)
        assert cluster.simulation.network.silence(host_name(controller), host_name(follower))
        await asyncio.sleep(idle_s)
        cluster.kill_broker(leader)
        async with asyncio.timeout(2 * SOON_S):
            await producer.send(TOPIC, b"1", partition=0)


@run_by(play)
async def test_a_consumer_reads_on_soon_after_its_connection_fell_silent(
    cluster: VirtualCluster, world: VirtualWorld, controller: int, /
) -> None:
    leader, *_ = cluster.state(P0).isr
    reader = cluster.client("reader")
    found: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read() -> None:
        async with Consumer(cluster.bootstrap, topics=[TOPIC], world=reader) as consumer:
            async for record in consumer:
                found.put_nowait(record.value)

    reading = reader.process.start(read())
    async with Producer(cluster.bootstrap, world=world) as producer:
        await producer.send(TOPIC, b"0", partition=0)
        assert await found.get() == b"0"
        await asyncio.sleep(0.1)  # it has sent its next fetch
        assert cluster.simulation.network.silence("reader", host_name(leader))
        await producer.send(TOPIC, b"1", partition=0)
    async with asyncio.timeout(SOON_S):
        assert await found.get() == b"1"
    reading.cancel()
