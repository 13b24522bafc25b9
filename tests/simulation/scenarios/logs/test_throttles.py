"""Replicas catch up at the configured rate, and replicas in sync are not delayed by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from minibroker.client.admin import Admin
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by

P0 = TopicPartition("orders", 0)
RATE = 20_000
BACKLOG = 400_000
SIDES = ("leader", "follower")
LAG_S = 4
SETTINGS = {"replica.lag.time.max.ms": str(LAG_S * 1_000)}
every_side = pytest.mark.parametrize("side", SIDES)


def play(
    scenario: Callable[[VirtualCluster, VirtualWorld], Awaitable[None]],
    side: str,
    replicas: str,
    *,
    fetch_bytes: int = 10_000,
) -> None:
    async def main() -> None:
        own = {f"{side}.replication.throttled.rate": str(RATE), "replica.fetch.max.bytes": str(fetch_bytes)}
        cluster = VirtualCluster(Simulation(), settings=SETTINGS | own)
        await cluster.start()
        world = cluster.client("client")

        async def client() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                configs = {f"{side}.replication.throttled.replicas": replicas}
                await admin.create_topic("orders", assignments=[(0, 1, 2)], configs=configs)
            await scenario(cluster, world)

        await world.process.run(client())

    run(main(), seed=1)


async def produce(cluster: VirtualCluster, world: VirtualWorld, size: int) -> None:
    """Send records with acks=all; return once all are acknowledged."""
    async with Producer(cluster.bootstrap, world=world) as producer:
        for _ in range(size // 1_000):
            await producer.send("orders", b"x" * 900, partition=0)


async def catch_up(cluster: VirtualCluster, world: VirtualWorld) -> float:
    """Return the seconds that a replica needs to catch up after it was down while much was written."""
    cluster.kill_broker(2)
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    await produce(cluster, world, BACKLOG)
    await cluster.start_broker(2)
    began = world.clock.monotonic()
    await cluster.until(lambda: 2 in cluster.state(P0).isr, within_s=300)
    return world.clock.monotonic() - began


@every_side
@pytest.mark.parametrize("replicas", ["*", "0:0,0:2"])
@run_by(play)
async def test_a_returning_replica_catches_up_at_the_throttled_rate(
    cluster: VirtualCluster, world: VirtualWorld, /, side: str, replicas: str
) -> None:
    took_s = await catch_up(cluster, world)
    assert 0.9 * (BACKLOG / RATE - 1) < took_s < 1.2 * BACKLOG / RATE


@every_side
@pytest.mark.parametrize("replicas", ["", "0:1,1:0,1:2"])
@run_by(play)
async def test_replicas_that_no_topic_setting_names_catch_up_unthrottled(
    cluster: VirtualCluster, world: VirtualWorld, /, side: str, replicas: str
) -> None:
    assert await catch_up(cluster, world) < 2


@every_side
@run_by(play, replicas="*")
async def test_in_sync_replicas_are_not_throttled_though_writes_exceed_the_rate(
    cluster: VirtualCluster, world: VirtualWorld, /, side: str
) -> None:
    began = world.clock.monotonic()
    for _ in range(4 * LAG_S):
        await produce(cluster, world, 3 * RATE)
        assert len(cluster.state(P0).isr) == 3
        await asyncio.sleep(1)
    assert world.clock.monotonic() - began < 6 * LAG_S


@every_side
@run_by(play, replicas="*")
async def test_the_others_stay_in_sync_and_acknowledge_while_one_catches_up(
    cluster: VirtualCluster, world: VirtualWorld, /, side: str
) -> None:
    catching_up = asyncio.create_task(catch_up(cluster, world))
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    longest_s = 0.0
    async with Producer(cluster.bootstrap, world=world) as producer:
        while not catching_up.done():
            assert {0, 1} <= set(cluster.state(P0).isr)
            began = world.clock.monotonic()
            await producer.send("orders", b"x" * 100, partition=0)
            longest_s = max(longest_s, world.clock.monotonic() - began)
            await asyncio.sleep(0.1)
    assert await catching_up > BACKLOG / RATE - 1
    assert longest_s < 1


@run_by(play, side="follower", replicas="*", fetch_bytes=BACKLOG)
async def test_an_in_sync_replica_fetches_from_a_new_leader_at_once_though_the_rate_is_used_up(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    other = TopicPartition("others", 0)

    async with Admin(cluster.bootstrap, world=world) as admin:
        configs = {"follower.replication.throttled.replicas": "*"}
        await admin.create_topic("others", assignments=[(1, 0, 2)], configs=configs)
    catching_up = asyncio.create_task(catch_up(cluster, world))
    await cluster.until(lambda: 2 not in cluster.state(P0).isr)
    await cluster.until(lambda: 2 in cluster.state(other).isr)
    await asyncio.sleep(1)  # all missed records came in one answer, which uses up the rate for twenty seconds
    cluster.kill_broker(1)
    await cluster.until(lambda: cluster.state(other).leader == 0)
    for _ in range(3 * LAG_S):
        await asyncio.sleep(1)
        assert cluster.state(other).isr == (0, 2)
    await catching_up
