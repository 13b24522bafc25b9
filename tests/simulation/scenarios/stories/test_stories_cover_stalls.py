"""Every stall that a client has during a failover lies within the story that the timelines tell of it, and each story
has a cause: the property that users rely on if they ask why writes stalled.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import pytest

from minibroker.client.cli.timelines.failovers import failovers
from minibroker.client.cli.timelines.story import Story
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin

PARTITIONS = [TopicPartition("orders", number) for number in range(3)]
SESSION_MS = 6_000

STALL_MS = 300
"""Less is no stall: an ordinary write takes a few milliseconds."""
SENT_BEFORE_MS = 100
"""A write may have been on its way for so long when its leader was heard for the last time."""
FOUND_AFTER_MS = 1_500
"""A client finds the new leader so long after it leads, at most."""


class Stall(NamedTuple):
    began_ms: int
    ended_ms: int


class Fault(NamedTuple):
    name: str
    victim: int
    began_ms: int


@pytest.mark.parametrize(
    "name", ["killed", "paused", "paused for the session timeout", "paused and killed", "power cut"]
)
@pytest.mark.parametrize("office", ["controller", "no controller", "no leader"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
@run_by(on_virtual_loop)
async def test_stalls_of_writes_lie_within_the_story(name: str, office: str, seed: int) -> None:
    chosen = random.Random(f"{name} {office} {seed}")
    cluster = VirtualCluster(Simulation(), settings={"zookeeper.session.timeout.ms": str(SESSION_MS)})
    await cluster.start()
    await as_admin(
        cluster, lambda admin: admin.create_topic("orders", partitions=len(PARTITIONS), replication_factor=3)
    )
    if office == "no leader":
        await _lead_nothing(cluster, _victim(cluster, office))
    await asyncio.sleep(chosen.uniform(1, 4))
    stalls: list[Stall] = []
    world = cluster.client("client")
    fault = await world.process.run(
        _break_while_writing(cluster, world, name, _victim(cluster, office), chosen, stalls)
    )
    entries = (await as_admin(cluster, lambda admin: admin.timeline())).entries
    [story] = [story for story in failovers(entries) if story.began_ms > fault.began_ms - 2_000]

    assert f"broker {fault.victim} " in f"{story.title} "
    assert stalls or name == "killed"  # which is noticed so fast that writes hardly wait
    for stall in stalls:
        assert stall.began_ms > story.began_ms - SENT_BEFORE_MS, (stall, story.lines())
        assert stall.ended_ms < story.began_ms + _length_ms(story) + FOUND_AFTER_MS, (stall, story.lines())
    assert story.began_ms > fault.began_ms - 1_000
    assert not story.noticed_late


async def _break_while_writing(
    cluster: VirtualCluster, world: VirtualWorld, name: str, victim: int, chosen: random.Random, stalls: list[Stall]
) -> Fault:
    clock = world.clock

    async def write(producer: Producer, partition: TopicPartition) -> None:
        while True:
            began_ms = clock.wall_ms()
            await producer.send(partition.topic, b"x", partition=partition.partition)
            if clock.wall_ms() - began_ms >= STALL_MS:
                stalls.append(Stall(began_ms, clock.wall_ms()))
            await asyncio.sleep(0.05)

    async with Producer(cluster.bootstrap, client_id="p", world=world) as producer, asyncio.TaskGroup() as writers:
        tasks = [writers.create_task(write(producer, partition)) for partition in PARTITIONS]
        await asyncio.sleep(2)
        fault = Fault(name, victim, clock.wall_ms())
        if name == "killed":
            cluster.kill_broker(victim)
        elif name == "power cut":
            cluster.power_cut(victim)
        else:
            cluster.pause_broker(victim)
            if name == "paused and killed":
                await asyncio.sleep(chosen.uniform(2, 5))
                cluster.kill_broker(victim)
            else:
                beyond_s = 0.01 if name == "paused for the session timeout" else chosen.uniform(0.1, 5)
                await asyncio.sleep(SESSION_MS / 1_000 + beyond_s)
                cluster.resume_broker(victim)
        await asyncio.sleep(10)
        for task in tasks:
            task.cancel()
    return fault


def _victim(cluster: VirtualCluster, office: str) -> int:
    [controller] = cluster.active_controllers()
    return controller if office == "controller" else next(b for b in cluster.broker_ids if b != controller)


async def _lead_nothing(cluster: VirtualCluster, broker_id: int) -> None:
    """The broker has been restarted, and its leaders have not come back yet."""
    await cluster.stop_broker(broker_id)
    await cluster.start_broker(broker_id)
    await cluster.until(lambda: all(len(cluster.state(partition).isr) == 3 for partition in PARTITIONS))
    assert broker_id not in {cluster.state(partition).leader for partition in PARTITIONS}


def _length_ms(story: Story) -> float:
    return max(story.led_ms or 0.0, story.late_ms or 0.0, story.left_ms or 0.0, story.replaced_ms or 0.0)
