"""Groups on a whole cluster: members, generations and committed offsets, by raw requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from minibroker.client.admin import Admin
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.simulation.cluster import VirtualCluster
from tests.simulation.group_members import GroupClient, GroupMember
from tests.simulation.loop import run
from tests.simulation.world import Simulation, VirtualWorld

ORDERS = TopicPartition("orders", 0)

Program = Callable[[VirtualCluster, VirtualWorld], Coroutine[Any, Any, None]]


def with_topic(program: Program, settings: dict[str, str] | None = None, brokers: int = 3, seed: int = 0) -> None:
    """A cluster with the topic `orders`, of two partitions."""

    async def scenario() -> None:
        few = {"offsets.topic.num.partitions": "4", "offsets.topic.replication.factor": str(min(3, brokers))}
        cluster = VirtualCluster(Simulation(), brokers, few | (settings or {}))
        await cluster.start()
        world = cluster.client("client")

        async def with_admin() -> None:
            async with Admin(cluster.bootstrap, world=world) as admin:
                await admin.create_topic("orders", partitions=2, replication_factor=min(3, brokers))
            await program(cluster, world)

        await world.process.run(with_admin())

    run(scenario(), seed=seed)


def test_a_member_joins_is_assigned_commits_and_leaves() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        member = GroupMember(cluster, world, "billing")
        assert await member.join_and_sync() == member.member_id.encode()
        assert member.generation_id == 1
        assert member.is_leader
        assert await member.heartbeat() == ErrorCode.NONE
        assert await member.committed(ORDERS) == -1
        assert await member.commit_as_member({ORDERS: 7}) == [ErrorCode.NONE]
        assert await member.committed(ORDERS) == 7
        assert await member.leave() == ErrorCode.NONE
        assert await member.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID
        assert await member.committed(ORDERS) == 7

    with_topic(program)


def test_a_second_member_makes_a_second_generation_in_which_both_are_assigned() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        first, second = GroupMember(cluster, world, "billing"), GroupMember(cluster, world, "billing")
        await first.join_and_sync()
        joining = asyncio.ensure_future(second.join_and_sync())
        while await first.heartbeat() != ErrorCode.REBALANCE_IN_PROGRESS:
            await asyncio.sleep(0.1)
        assert await first.join_and_sync() == first.member_id.encode()
        assert await joining == second.member_id.encode()
        assert first.generation_id == second.generation_id == 2
        assert first.member_id != second.member_id

    with_topic(program)


def test_the_next_coordinator_has_the_members_their_assignments_and_the_offsets() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        member = GroupMember(cluster, world, "billing")
        await member.join_and_sync()
        assert await member.commit_as_member({ORDERS: 7}) == [ErrorCode.NONE]
        coordinator = await member.find_coordinator()
        cluster.kill_broker(coordinator)
        assert await member.committed(ORDERS) == 7
        assert await member.find_coordinator() != coordinator
        assert await member.heartbeat() == ErrorCode.NONE
        assert bytes((await member.sync_once()).assignment) == member.member_id.encode()
        assert await member.commit_as_member({ORDERS: 8}) == [ErrorCode.NONE]

    with_topic(program)


def test_somebody_who_is_no_member_commits_to_a_group_without_members() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        client = GroupClient(cluster, world, "nightly")
        assert await client.commit({ORDERS: 3, TopicPartition("orders", 1): 4}) == [ErrorCode.NONE, ErrorCode.NONE]
        everything = await client.fetch_group()
        assert [(t.name, [p.committed_offset for p in t.partitions]) for t in everything.topics] == [("orders", [3, 4])]

    with_topic(program)
