"""Commits and deletions that arrive late, over a connection that their client gave up long ago."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.cluster.coordinators import Coordinators
from minibroker.client.consumer import Consumer
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import run
from minibroker.deploy.simulator.world import Simulation
from minibroker.protocol.model import NO_LEADER, OFFSETS_TOPIC, TopicPartition, internal_partition
from minibroker.protocol.world import World
from tests.simulation.mutants import planted
from tests.simulation.scenarios.groups.group_members import GroupClient
from tests.simulation.scenarios.helpers import as_admin
from tests.simulation.storms.faults.faults_of_groups import late_commit
from tests.simulation.storms.report import Report
from tests.simulation.storms.storm import Storm

GROUP = "billing"
P = TopicPartition("orders", 0)
LATE_S = 20.0
MEMBER = "member"
MUTANT = "late-commit-carried-out"


async def _started() -> tuple[VirtualCluster, GroupClient]:
    """Return a cluster with the topic of P, and another client of the group that commits and reads offsets."""
    cluster = VirtualCluster(Simulation(), settings={"offsets.topic.num.partitions": "4"})
    await cluster.start()
    world = cluster.client("other")

    async def prepare() -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("orders", partitions=1, replication_factor=3)
        async with Producer(cluster.bootstrap, world=world) as producer:
            await producer.send_batch("orders", [b"x"] * 30)

    await world.process.run(prepare())
    return cluster, GroupClient(cluster, world, GROUP)


async def _twice(cluster: VirtualCluster, change: Awaitable[object]) -> int:
    """Send the change over a connection that turns slow and breaks for its client, which retries it over another one.
    Return the broker that still has to receive the first attempt."""
    network = cluster.simulation.network
    node = cluster.state(TopicPartition(OFFSETS_TOPIC, internal_partition(GROUP, 4))).leader
    send = Coordinators.change

    async def send_late(*arguments: Any, **options: Any) -> Any:
        # Not sooner: the client may first ask the same broker for metadata.
        assert network.delay_standing(MEMBER, host_name(node), LATE_S)
        return await send(*arguments, **options)

    with patch.object(Coordinators, "change", send_late):
        changing = asyncio.ensure_future(change)
        await asyncio.sleep(0.05)
    assert network.reset_at(MEMBER, host_name(node))
    await changing
    return node


async def _coordinates(cluster: VirtualCluster, node: int, *, is_so: bool = True) -> None:
    """End the session of the node, or of others, until the node is the coordinator, or is not."""
    offsets = TopicPartition(OFFSETS_TOPIC, internal_partition(GROUP, 4))
    while (cluster.state(offsets).leader == node) != is_so or cluster.state(offsets).leader == NO_LEADER:
        cluster.simulation.zookeeper.expire(host_name(cluster.state(offsets).leader))
        await asyncio.sleep(1)


def _committed_after_a_late_commit(is_member: bool, there_and_back: bool) -> int:
    """Send commit(10) twice, then commit(20); return the offset after the first attempt has arrived."""
    found: list[int] = []

    async def commit(cluster: VirtualCluster, world: World) -> None:
        async with Consumer(
            cluster.bootstrap,
            group=GROUP,
            topics=["orders"] if is_member else None,
            auto_offset_reset="earliest",
            session_timeout_ms=30_000,
            world=world,
        ) as consumer:
            if not is_member:
                consumer.assign([P])
            await consumer.poll(timeout_ms=10_000)
            await consumer.commit({P: 1})
            node = await _twice(cluster, consumer.commit({P: 10}))
            if there_and_back:
                await _coordinates(cluster, node, is_so=False)
            await consumer.commit({P: 20})
            await _coordinates(cluster, node)
            await asyncio.sleep(LATE_S)
            committed = (await consumer.committed(P))[P]
            found.append(-1 if committed is None else committed.offset)

    async def scenario() -> None:
        cluster, _ = await _started()
        world = cluster.client(MEMBER)
        await world.process.run(commit(cluster, world))

    run(scenario(), seed=1)
    return found[0]


@pytest.mark.parametrize("there_and_back", [False, True])
@pytest.mark.parametrize("is_member", [False, True])
def test_a_late_commit_does_not_set_the_offset_back(is_member: bool, there_and_back: bool) -> None:
    assert _committed_after_a_late_commit(is_member, there_and_back) == 20


@pytest.mark.parametrize("there_and_back", [False, True])
def test_the_mutant_of_late_commits_makes_that_fail(there_and_back: bool) -> None:
    with planted(MUTANT):
        assert _committed_after_a_late_commit(False, there_and_back) == 10


_CHANGES: list[Callable[[Admin], Awaitable[object]]] = [
    lambda admin: admin.delete_groups([GROUP]),
    lambda admin: admin.delete_group_offsets(GROUP, [P]),
    lambda admin: admin.alter_group_offsets(GROUP, {P: 0}),
]


def _committed_after_a_late(change: Callable[[Admin], Awaitable[object]]) -> int:
    """Send an administrator's change twice, then a commit of 25 by another client; return the offset after the first
    attempt has arrived."""

    async def scenario() -> int:
        cluster, other = await _started()
        assert await other.commit({P: 7}) == [0]
        world = cluster.client(MEMBER)

        async def administrate() -> int:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.list_group_offsets(GROUP)
                await _twice(cluster, change(admin))
                assert await other.commit({P: 25}) == [0]
                await asyncio.sleep(LATE_S)
                return await other.committed(P)

        return await world.process.run(administrate())

    return run(scenario(), seed=1)


@pytest.mark.parametrize("change", _CHANGES)
def test_an_administrators_late_change_does_not_affect_newer_commits(
    change: Callable[[Admin], Awaitable[object]],
) -> None:
    assert _committed_after_a_late(change) == 25
    with planted(MUTANT):
        assert _committed_after_a_late(change) != 25


def _accused_by_late_commits(*, power_is_lost: bool = False) -> set[str]:
    """Return the anomalies that the storms' fault of late commits finds in a cluster without other faults, or with a
    recorded loss of all power."""
    report = Report(seed=1)

    async def main() -> None:
        storm = Storm(report, Random(1))
        await storm.cluster.start()
        topics = [NewTopic(topic, 4, 1) for topic in sorted({partition.topic for partition in storm.partitions})]
        await as_admin(storm.cluster, lambda admin: admin.create_topics(topics))
        for _ in range(6):
            fault = asyncio.create_task(late_commit(storm))
            await asyncio.sleep(1)
            storm.losses_of_power += power_is_lost
            await fault

    run(main(), seed=1)
    assert report.events["late commit: a newer one was granted"] == 6
    return {anomaly.kind for anomaly in report.anomalies}


def test_the_late_commits_of_a_storm_find_that_mutant_and_nothing_without_it() -> None:
    assert _accused_by_late_commits() == set()
    with planted(MUTANT):
        assert _accused_by_late_commits() == {"a late commit"}


def test_a_storms_late_commit_reports_no_bug_after_a_loss_of_all_power() -> None:
    with planted(MUTANT):
        assert _accused_by_late_commits(power_is_lost=True) == set()
