"""Of faults that follow each other, the timelines tell one story each: of the broker that was lost, from the fault on,
and of nothing that belongs to the fault before.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from minibroker.client.cli.timelines.failovers import failovers
from minibroker.client.cli.timelines.story import Story
from minibroker.deploy.simulator.cluster import LOG_DIR, VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, TopicPartition
from tests.running import run_by
from tests.simulation.scenarios.helpers import as_admin, send_numbers, session_of

PARTITIONS = [TopicPartition("orders", number) for number in range(6)]
FAULTS = 6
SESSION_S = 6.0
TOLD_BEFORE_MS = 700
"""A story begins at most this long before its fault: fetches are answered every 500 ms."""
RETRANSMITTED_WITHIN_MS = 2_500
"""Connections of a broker that was cut off are silent for so long after that, until TCP sends again."""
TOLD_AFTER_MS = 300
FORMED_S = 3
SETTLED_S = 5
"""After that, the controller has handled what was notified, and has its answers."""


class Fault(NamedTuple):
    name: str
    victim: int
    at_ms: int


class Chain:
    """Faults that follow each other on one cluster, which is whole again before the next one."""

    def __init__(self, cluster: VirtualCluster, chosen: random.Random) -> None:
        self.cluster = cluster
        self._random = chosen
        self.told: list[Fault] = []
        """The faults that are failovers."""
        self._clock = cluster.client("clock").clock

    async def add(self) -> None:
        """Cause a fault of one broker, in half of the cases of the controller, and repair it."""
        cluster = self.cluster
        await cluster.until(lambda: len(cluster.active_controllers()) == 1)
        [controller] = cluster.active_controllers()
        others = [broker_id for broker_id in cluster.broker_ids if broker_id != controller]
        victim = self._random.choice([controller, controller, *others])
        name = self._random.choice([*FAILOVERS, *HICCUPS])
        at_ms = self._clock.observed_ms()
        if name in HICCUPS:
            await HICCUPS[name](self, victim)
            await asyncio.sleep(self._random.uniform(0, 5))
        else:
            self.told.append(Fault(name, victim, at_ms))
            await FAILOVERS[name](self, victim)
            await cluster.until(lambda: all(len(cluster.state(p).isr) == len(cluster.broker_ids) for p in PARTITIONS))
            await asyncio.sleep(self._random.choice([1, 2, 3, 10, 20]))

    async def until_replaced(self, victim: int) -> None:
        """Wait for the failover, and for a while."""
        state = self.cluster.state
        await self.cluster.until(
            lambda: all(state(p).leader != NO_LEADER and victim not in state(p).isr for p in PARTITIONS)
        )
        await asyncio.sleep(self._random.choice([0.05, 0.5, 3]))

    # -- failovers --

    async def kill(self, victim: int) -> None:
        self.cluster.kill_broker(victim)
        await self.until_replaced(victim)
        await self.cluster.start_broker(victim)

    async def stop(self, victim: int) -> None:
        await self.cluster.stop_broker(victim)
        await self.until_replaced(victim)
        await self.cluster.start_broker(victim)

    async def fill_disk(self, victim: int) -> None:
        faults = self.cluster.simulation.host(host_name(victim)).disk.faults
        await self.cluster.until(lambda: any(self.cluster.state(p).leader == victim for p in PARTITIONS))
        led = next(p for p in PARTITIONS if self.cluster.state(p).leader == victim)
        faults.break_directory(LOG_DIR, errno.ENOSPC)
        self.told[-1] = self.told[-1]._replace(at_ms=self._clock.observed_ms())
        await send_numbers(self.cluster, led.topic, range(3), led.partition)
        await self.until_replaced(victim)
        faults.mend_directory(LOG_DIR)
        await self.cluster.start_broker(victim)

    async def hang(self, victim: int) -> None:
        self.cluster.pause_broker(victim)
        await self.until_replaced(victim)
        self.cluster.resume_broker(victim)

    async def cut_off_zookeeper(self, victim: int) -> None:
        session = session_of(self.cluster, victim)
        session.suspend()
        await asyncio.sleep(self._random.uniform(1.5, 2) * SESSION_S)
        session.resume()

    async def isolate(self, victim: int) -> None:
        session, network = session_of(self.cluster, victim), self.cluster.simulation.network
        session.suspend()
        network.unreachable(host_name(victim), True)
        await self.until_replaced(victim)
        network.heal()
        session.resume()

    # -- what is no failover --

    async def hang_for_a_moment(self, victim: int) -> None:
        self.cluster.pause_broker(victim)
        await asyncio.sleep(self._random.uniform(0.5, 3))
        self.cluster.resume_broker(victim)

    async def zookeeper_hangs(self, victim: int) -> None:
        sessions = [session_of(self.cluster, broker_id) for broker_id in self.cluster.broker_ids]
        for session in sessions:
            session.suspend()
        await asyncio.sleep(self._random.uniform(1, SESSION_S * 0.75))
        for session in sessions:
            session.resume()


FAILOVERS: dict[str, Callable[[Chain, int], Awaitable[None]]] = {
    "kill": Chain.kill,
    "stop": Chain.stop,
    "fill disk": Chain.fill_disk,
    "hang": Chain.hang,
    "cut off ZooKeeper": Chain.cut_off_zookeeper,
    "isolate": Chain.isolate,
}
HICCUPS: dict[str, Callable[[Chain, int], Awaitable[None]]] = {
    "hang for a moment": Chain.hang_for_a_moment,
    "ZooKeeper hangs": Chain.zookeeper_hangs,
}

QUICK_SEEDS = (8, 17, 29, 45)  # each shows a fault that there was


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in QUICK_SEEDS else [pytest.mark.slow]) for seed in range(60)]
)
@run_by(on_virtual_loop, limit_s=100_000)
async def test_each_fault_of_a_chain_has_its_own_story(seed: int) -> None:
    settings = {"zookeeper.session.timeout.ms": str(round(SESSION_S * 1_000))}
    ended: list[int] = []
    cluster = VirtualCluster(Simulation(), settings=settings, on_broker_failure=lambda broker, _: ended.append(broker))
    await cluster.start()
    await as_admin(
        cluster, lambda admin: admin.create_topic("orders", partitions=len(PARTITIONS), replication_factor=3)
    )
    await asyncio.sleep(FORMED_S)
    chain = Chain(cluster, random.Random(seed))
    for _ in range(FAULTS):
        await chain.add()
    await asyncio.sleep(SETTLED_S)
    stories = failovers((await as_admin(cluster, lambda admin: admin.timeline())).entries)

    assert ended == [fault.victim for fault in chain.told if fault.name == "fill disk"]
    told = [(story.title, story.began_ms) for story in stories]
    assert len(stories) == len(chain.told), (chain.told, told)
    before: Story | None = None
    for fault, story in zip(chain.told, stories, strict=True):
        assert f"broker {fault.victim} " in f"{story.title} ", (fault, story.lines())
        assert ("full disk" in story.title) == (fault.name == "fill disk"), (fault, story.title)
        assert ("stopped cleanly" in story.title) == (fault.name == "stop"), (fault, story.title)
        assert ("did not run" in story.title) == (fault.name == "hang"), (fault, story.title)
        if fault.name == "hang":
            assert not any("hung" in step.text or "a hang" in step.text for step in story.steps), story.lines()
        silent_ms = RETRANSMITTED_WITHIN_MS if "isolate" in {each.name for each in chain.told} else TOLD_BEFORE_MS
        assert -silent_ms <= story.began_ms - fault.at_ms <= TOLD_AFTER_MS, (fault, story.began_ms, story.lines())
        assert not story.leaderless
        if before is not None:
            assert before.began_ms + before.steps[-1].at_ms <= story.began_ms, (before.lines(), story.lines())
        before = story
