"""Groups on a whole cluster, through raw requests: members, generations and committed offsets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigErrors, ConfigResource
from minibroker.client.producer import Producer
from minibroker.deploy.simulator.cluster import VirtualCluster, host_name
from minibroker.deploy.simulator.loop import on_virtual_loop
from minibroker.deploy.simulator.world import Simulation, VirtualWorld
from minibroker.protocol import apis, znodes
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_LEADER, OFFSETS_TOPIC, TopicPartition, internal_partition
from tests.running import run_by
from tests.simulation.scenarios.groups.group_members import NOT_NOW, GroupClient, GroupMember, codes_of
from tests.simulation.scenarios.helpers import replica_of, with_client
from tests.simulation.seeds import every_seed

ORDERS = TopicPartition("orders", 0)
P0_OF_OFFSETS = TopicPartition(OFFSETS_TOPIC, 0)
DAY_MS = 86_400_000

Program = Callable[[VirtualCluster, VirtualWorld], Coroutine[Any, Any, None]]


def with_topic(program: Program, settings: dict[str, str] | None = None, brokers: int = 3, seed: int = 0) -> None:
    """Run the program with a cluster that has the topic `orders` of two partitions."""
    replicas = min(3, brokers)
    few = {"offsets.topic.num.partitions": "4", "offsets.topic.replication.factor": str(replicas)}
    topic = {"name": "orders", "partitions": 2, "replication_factor": replicas}
    with_client(program, topic, settings=few | (settings or {}), brokers=brokers, seed=seed)


@run_by(with_topic)
async def test_a_member_joins_is_assigned_commits_and_leaves(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
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


@run_by(with_topic)
async def test_a_second_member_makes_a_second_generation_in_which_both_are_assigned(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    first, second = GroupMember(cluster, world, "billing"), GroupMember(cluster, world, "billing")
    await first.join_and_sync()
    joining = asyncio.ensure_future(second.join_and_sync())
    while await first.heartbeat() != ErrorCode.REBALANCE_IN_PROGRESS:
        await asyncio.sleep(0.1)
    assert await first.join_and_sync() == first.member_id.encode()
    assert await joining == second.member_id.encode()
    assert first.generation_id == second.generation_id == 2
    assert first.member_id != second.member_id


@run_by(with_topic)
async def test_the_next_coordinator_has_the_members_their_assignments_and_the_offsets(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
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


@run_by(with_topic)
async def test_a_client_outside_a_group_may_commit_to_it_if_it_has_no_members(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    client = GroupClient(cluster, world, "nightly")
    assert await client.commit({ORDERS: 3, TopicPartition("orders", 1): 4}) == [ErrorCode.NONE, ErrorCode.NONE]
    everything = await client.fetch_group()
    assert [(t.name, [p.committed_offset for p in t.partitions]) for t in everything.topics] == [("orders", [3, 4])]


async def until_offsets_topic(cluster: VirtualCluster) -> None:
    await cluster.until(
        lambda: all(cluster.broker(b)._metadata.partition_count(OFFSETS_TOPIC) for b in cluster.living())
    )


@run_by(with_topic)
async def test_a_group_starts_while_a_broker_is_dead_because_the_offsets_topic_exists(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    await until_offsets_topic(cluster)
    for _ in range(2):  # the first broker to die may be the controller
        dead = cluster.active_controllers()[0]
        cluster.kill_broker(dead)
        member = GroupMember(cluster, world, f"begun without {dead}")
        await member.join_and_sync()
        assert await member.commit_as_member({ORDERS: 7}) == [ErrorCode.NONE]
        await cluster.start_broker(dead)


@pytest.mark.parametrize("brokers", [1, 2])
@run_by(on_virtual_loop)
async def test_too_few_brokers_for_the_offsets_topic_are_reported_until_the_last_one_starts(
    brokers: int,
) -> None:
    cluster = VirtualCluster(Simulation(), 3)
    for broker_id in range(brokers):
        await cluster.start_broker(broker_id)
    await asyncio.sleep(5)
    world = cluster.client("client")

    async def program() -> None:
        client = GroupClient(cluster, world, "billing")
        await client.look_for_coordinator(0)
        await asyncio.sleep(1)
        answer = await client.look_for_coordinator(0)
        assert answer.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert "offsets.topic.replication.factor" in (answer.error_message or "")
        assert f"the replication factor is 3: it must be 1 to {brokers}" in (answer.error_message or "")
        for broker_id in range(brokers, 3):
            await cluster.start_broker(broker_id)
        await until_offsets_topic(cluster)
        cluster.kill_broker(0)
        await client.find_coordinator()

    await world.process.run(program())


@run_by(on_virtual_loop)
async def test_the_offsets_topic_is_spread_over_all_brokers_that_start_together() -> None:
    settings = {"offsets.topic.num.partitions": "5", "offsets.topic.replication.factor": "1"}
    cluster = VirtualCluster(Simulation(), 5, settings)
    for broker_id in cluster.broker_ids:
        await cluster.start_broker(broker_id)
        await asyncio.sleep(0.5)
    await until_offsets_topic(cluster)
    assert {cluster.state(TopicPartition(OFFSETS_TOPIC, p)).leader for p in range(5)} == set(cluster.broker_ids)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_the_next_controller_creates_the_offsets_topic_if_the_first_dies_meanwhile(
    seed: int,
) -> None:
    cluster = VirtualCluster(Simulation(), 4)
    await cluster.start()
    zookeeper = cluster.simulation.zookeeper
    await cluster.until(cluster.active_controllers)
    if seed == 0:
        await asyncio.sleep(0.5)
    elif seed == 1:
        await cluster.until(lambda: zookeeper.has(znodes.topic_path(OFFSETS_TOPIC)))
    else:
        await cluster.until(lambda: zookeeper.has(znodes.state_path(TopicPartition(OFFSETS_TOPIC, 0))))
    cluster.kill_broker(cluster.active_controllers()[0])
    await until_offsets_topic(cluster)
    state = cluster.state(TopicPartition(OFFSETS_TOPIC, 0))
    await cluster.until(lambda: cluster.state(TopicPartition(OFFSETS_TOPIC, 0)).leader in cluster.living())
    assert state.leader_epoch >= 0


@run_by(with_topic)
async def test_an_offsets_topic_deleted_by_hand_is_recreated(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    await until_offsets_topic(cluster)
    before = cluster.broker(0)._metadata.topic_id(OFFSETS_TOPIC)
    cluster.simulation.zookeeper.make(znodes.delete_topic_path(OFFSETS_TOPIC))
    await cluster.until(lambda: cluster.broker(0)._metadata.topic_id(OFFSETS_TOPIC) not in (None, before))
    await GroupMember(cluster, world, "billing").join_and_sync()


@run_by(with_topic)
async def test_the_offsets_topic_is_internal(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    client = GroupClient(cluster, world, "billing")
    async with Admin(cluster.bootstrap, world=world) as admin:
        await client.find_coordinator()
        topic = await admin.describe_topic(OFFSETS_TOPIC)
        assert len(topic.partitions) == 4
        assert {len(partition.replicas) for partition in topic.partitions} == {3}
        resource = ConfigResource.of_topic(OFFSETS_TOPIC)
        entries = (await admin.describe_configs([resource]))[resource]
        assert entries["cleanup.policy"].value == "compact"
        assert entries["segment.bytes"].value == str(100 * 1024 * 1024)
    async with Producer(cluster.bootstrap, world=world) as producer:
        with pytest.raises(BrokerError, match="INVALID_TOPIC_EXCEPTION"):
            await producer.send(OFFSETS_TOPIC, b"forged", key=b"k", partition=0)
    request = g.FindCoordinatorRequest(2, ["neither a group nor a transaction"])
    answer = await client.ask(0, apis.FIND_COORDINATOR, request)
    assert answer.coordinators[0].error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("by_hand", [False, True])
def test_offsets_survive_the_removal_of_their_topics_cleanup_policy(by_hand: bool) -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        client = GroupClient(cluster, world, "nightly")
        assert await client.commit({ORDERS: 42}) == [ErrorCode.NONE]
        offsets, brokers = ConfigResource.of_topic(OFFSETS_TOPIC), ConfigResource.of_all_brokers()
        async with Admin(cluster.bootstrap, world=world) as admin:
            if by_hand:
                path, zookeeper = znodes.topic_config_path(OFFSETS_TOPIC), cluster.simulation.zookeeper
                zookeeper.make(path, znodes.encode_config({}))
                zookeeper.make(f"{znodes.CONFIG_CHANGE_PREFIX}x", znodes.encode_config_change(path))
            else:
                await admin.incremental_alter_configs({brokers: [ConfigChange.set("log.cleanup.policy", "compact")]})
                with pytest.raises(ConfigErrors, match=f"{OFFSETS_TOPIC} holds .*: set cleanup.policy=compact"):
                    await admin.incremental_alter_configs({offsets: [ConfigChange.delete("cleanup.policy")]})
                await admin.incremental_alter_configs({brokers: [ConfigChange.set("log.cleanup.policy", "delete")]})
            await admin.incremental_alter_configs(
                {brokers: [ConfigChange.set("log.retention.bytes", "1"), ConfigChange.set("log.segment.bytes", "500")]}
            )
            for _ in range(30):  # enough to fill segments
                assert await GroupClient(cluster, world, "other").commit({ORDERS: 7}) == [ErrorCode.NONE]
            await asyncio.sleep(3)
            entry = (await admin.describe_configs([offsets]))[offsets]["cleanup.policy"]
            assert (entry.value, entry.is_read_only) == ("compact", True)
        cluster.kill_broker(await client.find_coordinator())
        assert await client.committed(ORDERS) == 42

    often = {"log.retention.check.interval.ms": "500", "offsets.topic.segment.bytes": "500"}
    with_topic(program, ONE_OFFSETS_PARTITION | often)


@run_by(with_topic, brokers=1)
async def test_one_broker_is_enough(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    member = GroupMember(cluster, world, "billing")
    await member.join_and_sync()
    assert await member.commit_as_member({ORDERS: 7}) == [ErrorCode.NONE]
    assert await member.committed(ORDERS) == 7


@every_seed(range(8))
@run_by(with_topic)
async def test_a_committed_offset_never_goes_back_whichever_broker_dies(
    cluster: VirtualCluster, world: VirtualWorld, /, seed: int
) -> None:
    """One client commits 1, 2, 3, ... and new clients read the offset, while coordinators are killed, stopped, paused
    and cut off. An answer is never lower than any offset returned or acknowledged before its request was sent."""

    random = Random(seed)
    committer = GroupClient(cluster, world, "billing")
    await committer.find_coordinator()
    least, acknowledged = -1, 0
    over = False

    def has_acknowledged(enough: int) -> bool:
        return acknowledged >= enough

    async def commit() -> None:
        nonlocal acknowledged, least
        offset = 0
        while not over:
            offset += 1
            codes = await committer.commit({ORDERS: offset}, within_s=120)
            if codes == [ErrorCode.NONE]:
                acknowledged += 1
                least = max(least, offset)
            await asyncio.sleep(0.1)

    async def ask() -> None:
        nonlocal least
        while not over:
            fresh = GroupClient(cluster, world, "billing")
            for broker_id in random.sample(cluster.broker_ids, len(cluster.broker_ids)):
                known = least
                try:
                    group = await fresh.fetch_group([ORDERS], broker_id=broker_id)
                except (NetworkError, BrokerError):
                    continue
                if group.error_code == ErrorCode.NONE:
                    told = group.topics[0].partitions[0].committed_offset
                    assert told >= known, f"broker {broker_id} says {told}, but {known} was known"
                    least = max(least, told)
            fresh.close()
            await asyncio.sleep(0.2)

    tasks = [asyncio.ensure_future(commit()), asyncio.ensure_future(ask()), asyncio.ensure_future(ask())]
    for round_number in range(6):
        coordinator = await committer.find_coordinator(within_s=120)
        enough = acknowledged + 3
        fault = (round_number + seed) % 4
        if fault == 0:
            cluster.kill_broker(coordinator)
            await asyncio.sleep(random.uniform(0.1, 3))
            await cluster.start_broker(coordinator)
        elif fault == 1:
            cluster.pause_broker(coordinator)
            await asyncio.sleep(random.uniform(5, 12))
            cluster.resume_broker(coordinator)
        elif fault == 2:
            await cluster.stop_broker(coordinator)
            await cluster.start_broker(coordinator)
        else:
            host = host_name(coordinator)
            for other in cluster.broker_ids:
                if other != coordinator:
                    cluster.simulation.network.block(host, host_name(other))
                    cluster.simulation.network.block(host_name(other), host)
            cluster.simulation.zookeeper.cut(host)
            await asyncio.sleep(random.uniform(5, 15))
            cluster.simulation.network.heal()
            cluster.simulation.zookeeper.uncut(host)
        await cluster.until(partial(has_acknowledged, enough), within_s=120)
        for task in tasks:
            if task.done():
                task.result()
    over = True
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks)
    assert await committer.committed(ORDERS) >= least


@run_by(with_topic)
async def test_a_coordinator_resumed_after_a_pause_returns_no_outdated_offset(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    client = GroupClient(cluster, world, "billing")
    assert await client.commit({ORDERS: 1}) == [ErrorCode.NONE]
    old = await client.find_coordinator()
    fresh = GroupClient(cluster, world, "billing")
    await fresh.fetch_group([ORDERS], broker_id=old)
    cluster.pause_broker(old)
    asked = asyncio.ensure_future(fresh.fetch_group([ORDERS], broker_id=old))
    await asyncio.sleep(8)
    assert await client.commit({ORDERS: 2}) == [ErrorCode.NONE]
    cluster.resume_broker(old)
    answer = await asked
    assert answer.error_code != ErrorCode.NONE or answer.topics[0].partitions[0].committed_offset == 2


@pytest.mark.parametrize(
    "asked_for",
    ["the group", "an offset of the group", "another offset than it knows", "one that it knows, and another"],
)
@run_by(with_topic)
async def test_a_coordinator_resumed_after_a_pause_does_not_report_a_deletion_as_done(
    cluster: VirtualCluster, world: VirtualWorld, /, asked_for: str
) -> None:
    """It does not know of the commit, and so finds no offset to delete."""

    client = GroupClient(cluster, world, "billing")
    if "it knows" in asked_for:
        assert await client.commit({TopicPartition("orders", 1): 1}) == [ErrorCode.NONE]
    old = await client.find_coordinator()
    fresh = GroupClient(cluster, world, "billing")
    await fresh.fetch_group([ORDERS], broker_id=old)
    cluster.pause_broker(old)
    offsets = TopicPartition(OFFSETS_TOPIC, internal_partition("billing", 4))
    await cluster.until(lambda: cluster.state(offsets).leader not in (old, NO_LEADER))
    assert await client.commit({ORDERS: 2}) == [ErrorCode.NONE]
    if asked_for == "the group":
        deletion = fresh.ask(old, apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"]))
        deleting: asyncio.Future[object] = asyncio.ensure_future(deletion)
    else:
        indexes = [0, 1] if asked_for == "one that it knows, and another" else [0]
        body = g.OffsetDeleteRequest("billing", [g.OffsetDeleteTopic("orders", indexes)])
        deleting = asyncio.ensure_future(fresh.ask(old, apis.OFFSET_DELETE, body))
    await asyncio.sleep(1)  # until the request is in the socket of the paused broker
    cluster.resume_broker(old)
    said = codes_of(await deleting)
    assert said <= NOT_NOW, [ErrorCode(code).name for code in said]
    assert await client.committed(ORDERS) == 2


@run_by(with_topic)
async def test_after_a_failed_commit_a_coordinator_and_its_successor_return_the_same_offset(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """The commit fails because the followers do not fetch for a while, and is replicated afterwards. If the first
    coordinator returned the previous offset, a client could continue there, and commit it after the second one had
    returned the newer offset."""

    client = GroupClient(cluster, world, "billing")
    assert await client.commit({ORDERS: 1}) == [ErrorCode.NONE]
    coordinator = await client.find_coordinator()
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != coordinator]
    for broker_id in others:
        cluster.pause_broker(broker_id)
    assert await client.commit({ORDERS: 2}, broker_id=coordinator) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    for broker_id in others:
        cluster.resume_broker(broker_id)
    assert await client.committed(ORDERS) == 2
    assert await client.find_coordinator() == coordinator
    cluster.kill_broker(coordinator)
    assert await client.committed(ORDERS) == 2


async def settled(members: list[GroupMember]) -> None:
    """Let every member follow the protocol until all are in one generation and none must rejoin."""

    async def keep_up(member: GroupMember) -> None:
        await member.join_and_sync(120)
        while True:
            if await member.heartbeat() != ErrorCode.NONE:
                await member.join_and_sync(120)
            await asyncio.sleep(0.5)

    tasks = [asyncio.ensure_future(keep_up(member)) for member in members]
    async with asyncio.timeout(120):
        while True:
            await asyncio.sleep(2)
            generations = {member.generation_id for member in members}
            if len(generations) == 1 and {await member.heartbeat() for member in members} == {ErrorCode.NONE}:
                break
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@run_by(with_topic)
async def test_a_group_outlives_the_coordinator_at_every_step_of_a_rebalance(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """The coordinator is killed before the join is answered, before the leader sends the assignment, while that is
    stored, and afterwards."""

    for step in range(6):
        group_id = f"group-{step}"
        members = [GroupMember(cluster, world, group_id) for _ in range(2)]
        joins = [asyncio.ensure_future(member.join()) for member in members]
        coordinator = await members[0].find_coordinator()
        if step:
            await asyncio.gather(*joins)
        else:
            await asyncio.sleep(0.05)
        first = [asyncio.ensure_future(member.sync_once()) for member in members] if step > 1 else []
        await asyncio.sleep((0, 0, 0.001, 0.003, 0.006, 1)[step])
        cluster.kill_broker(coordinator)
        await asyncio.gather(*joins, *first, return_exceptions=True)
        await settled(members)
        assert {member.assignment for member in members} == {member.member_id.encode() for member in members}
        await cluster.start_broker(coordinator)


@run_by(with_topic)
async def test_a_generation_number_is_used_once_even_if_coordinators_stored_none(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """A member may still commit for a generation that was never stored; only its number distinguishes it."""

    member = GroupMember(cluster, world, "billing")
    await member.join_and_sync()
    given = [member.generation_id]
    for _ in range(3):
        coordinator = await member.find_coordinator()
        cluster.kill_broker(coordinator)
        await member.join()
        await cluster.start_broker(coordinator)
        given.append(member.generation_id)
        member.protocols = [("range", b"%d" % len(given))]  # so that the same coordinator begins another generation
        await member.join()
        given.append(member.generation_id)
    assert given == sorted(set(given))


@run_by(with_topic, brokers=1)
async def test_a_resumed_coordinator_keeps_members_whose_heartbeats_wait_in_its_sockets(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    member = GroupMember(cluster, world, "billing", session_timeout_ms=6_000)
    await member.join_and_sync()
    cluster.pause_broker(0)
    await asyncio.sleep(30)
    cluster.resume_broker(0)
    await asyncio.sleep(1)
    assert await member.heartbeat() == ErrorCode.NONE
    assert member.generation_id == 1


@run_by(with_topic)
async def test_the_offsets_of_a_recreated_topic_start_over_with_any_coordinator(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    client = GroupClient(cluster, world, "billing")
    async with Admin(cluster.bootstrap, world=world) as admin:
        before = (await admin.describe_topic("orders")).topic_id
        assert await client.commit({ORDERS: 7}, topic_id=before) == [ErrorCode.NONE]
        coordinator = await client.find_coordinator()
        cluster.kill_broker(coordinator)
        await client.committed(ORDERS)
        await admin.create_topic("other", partitions=1, replication_factor=2)
        deletion = asyncio.ensure_future(admin.delete_topic("orders"))
        await cluster.start_broker(coordinator)
        await deletion
        await admin.create_topic("orders", partitions=2, replication_factor=3)
        after = (await admin.describe_topic("orders")).topic_id
        assert await client.committed(ORDERS) == -1
        assert await client.commit({ORDERS: 8}, topic_id=before) == [ErrorCode.INCONSISTENT_TOPIC_ID]
        assert await client.commit({ORDERS: 1}, topic_id=after) == [ErrorCode.NONE]
        cluster.kill_broker(await client.find_coordinator())
        assert await client.committed(ORDERS) == 1


@run_by(with_topic)
async def test_groups_are_listed_described_and_deleted(cluster: VirtualCluster, world: VirtualWorld, /) -> None:
    member = GroupMember(cluster, world, "billing")
    await member.join_and_sync()
    await member.commit_as_member({ORDERS: 7})
    simple = GroupClient(cluster, world, "nightly")
    await simple.commit({ORDERS: 3})

    async def listed(*states: str, types: Sequence[str] = ()) -> dict[str, str]:
        found: dict[str, str] = {}
        for broker_id in cluster.broker_ids:
            answer = await member.ask(broker_id, apis.LIST_GROUPS, g.ListGroupsRequest(list(states), list(types)))
            assert answer.error_code == ErrorCode.NONE
            assert {group.group_type for group in answer.groups} <= {"classic"}
            found |= {group.group_id: group.group_state for group in answer.groups}
        return found

    assert await listed() == {"billing": "Stable", "nightly": "Empty"}
    assert await listed("stable") == {"billing": "Stable"}
    assert await listed("stable", types=["Classic", "consumer"]) == {"billing": "Stable"}
    assert await listed(types=["consumer", "nonsense"]) == {}
    described = await member.of_coordinator(apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["billing"]))
    (group,) = described.groups
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    assert [(m.member_id, bytes(m.member_assignment)) for m in group.members] == [
        (member.member_id, member.member_id.encode())
    ]
    assert group.members[0].client_id == "client"
    nobody = GroupClient(cluster, world, "unknown")
    unknown = await nobody.of_coordinator(apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["unknown"]))
    assert unknown.groups[0].group_state == "Dead"
    refused = await member.of_coordinator(apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"]))
    assert refused.results[0].error_code == ErrorCode.NON_EMPTY_GROUP
    done = await simple.of_coordinator(apis.DELETE_GROUPS, g.DeleteGroupsRequest(["nightly", "nightly"]))
    assert [result.error_code for result in done.results] == [ErrorCode.NONE]
    assert await listed() == {"billing": "Stable"}
    assert await simple.committed(ORDERS) == -1


@run_by(with_topic, settings={"min.insync.replicas": "2", "replica.lag.time.max.ms": "2000"})
async def test_a_group_with_an_uncertain_deletion_is_neither_listed_nor_half_deleted(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """Later attempts are refused and leave no record, because too few replicas are in sync; the first one is in the
    log."""

    client = GroupClient(cluster, world, "billing")
    assert await client.commit({ORDERS: 7}) == [ErrorCode.NONE]
    coordinator = await client.find_coordinator()
    offsets = TopicPartition(OFFSETS_TOPIC, internal_partition("billing", 4))
    others = [broker_id for broker_id in cluster.broker_ids if broker_id != coordinator]
    for broker_id in others:
        cluster.pause_broker(broker_id)
    deleted = await client.ask(coordinator, apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"]))
    assert deleted.results[0].error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    await cluster.until(lambda: cluster.state(offsets).isr == (coordinator,))
    await asyncio.sleep(10)
    listed = await client.ask(coordinator, apis.LIST_GROUPS, g.ListGroupsRequest())
    described = await client.ask(coordinator, apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["billing"]))
    assert (listed.groups, described.groups[0].error_code) == ([], ErrorCode.COORDINATOR_NOT_AVAILABLE)
    for broker_id in others:
        cluster.resume_broker(broker_id)
    await cluster.until(lambda: len(cluster.state(offsets).isr) == 3)
    await asyncio.sleep(2)
    described = await client.ask(coordinator, apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["billing"]))
    assert (described.groups[0].error_code, described.groups[0].group_state) == (ErrorCode.NONE, "Dead")


def test_a_deletion_outlives_the_request_that_asked_for_it() -> None:
    """The append of the deletion times out later than its request. If it ended with the request, the group would appear
    to be in deletion, and be unusable, for the rest of the coordinator's term."""

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        client = GroupClient(cluster, world, "billing")
        assert await client.commit({ORDERS: 7}) == [ErrorCode.NONE]
        coordinator = await client.find_coordinator()
        for other in set(cluster.broker_ids) - {coordinator}:
            cluster.pause_broker(other)
        deletion = client.ask(coordinator, apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"]), 60)
        with pytest.raises(BrokerError, match="REQUEST_TIMED_OUT"):
            await deletion
        for other in set(cluster.broker_ids) - {coordinator}:
            cluster.resume_broker(other)
        assert await client.committed(ORDERS) == -1
        assert await client.commit({ORDERS: 8}) == [ErrorCode.NONE]
        assert await client.committed(ORDERS) == 8

    slow = {"offsets.commit.timeout.ms": "40000", "replica.lag.time.max.ms": "60000"}
    with_topic(program, slow | {"zookeeper.session.timeout.ms": "60000", "broker.crash.detection.ms": "60000"})


def test_a_group_with_more_offsets_than_one_append_holds_is_deleted_and_expires() -> None:
    """In a single append it could not be deleted, and later groups in its partition of the log would not expire."""

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.create_topic("many", partitions=40, replication_factor=1)
        first, second, small = (GroupClient(cluster, world, name) for name in ("x" * 300, "y" * 300, "small"))
        for client in (first, second):
            for start in range(0, 40, 5):
                committed = {TopicPartition("many", index): 1 for index in range(start, start + 5)}
                assert set(await client.commit(committed)) == {ErrorCode.NONE}
        assert await small.commit({ORDERS: 7}) == [ErrorCode.NONE]
        deleted = await first.of_coordinator(apis.DELETE_GROUPS, g.DeleteGroupsRequest([first.group_id]))
        assert deleted.results[0].error_code == ErrorCode.NONE
        async with asyncio.timeout(90):
            while await small.committed(ORDERS) != -1 or await second.committed(TopicPartition("many", 39)) != -1:
                await asyncio.sleep(1)

    few = {"offsets.topic.num.partitions": "1", "offsets.topic.segment.bytes": "4000"}
    with_topic(program, few | {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "10000"})


@pytest.mark.parametrize("name", ["myGroup/0", "", "x" * 32_767])
@run_by(with_topic)
async def test_static_members_and_protocols_keep_any_name_with_the_next_coordinator(
    cluster: VirtualCluster, world: VirtualWorld, /, name: str
) -> None:
    member = GroupMember(cluster, world, "billing", group_instance_id=name, protocols=[(name, b"topics")])
    await member.join_and_sync()
    coordinator = await member.find_coordinator()
    await cluster.stop_broker(coordinator)
    again = GroupMember(cluster, world, "billing", group_instance_id=name, protocols=[(name, b"topics")])
    await again.join_and_sync()
    assert again.member_id != member.member_id
    described = await again.of_coordinator(apis.DESCRIBE_GROUPS, g.DescribeGroupsRequest(["billing"]))
    assert [one.group_instance_id for one in described.groups[0].members] == [name]
    assert described.groups[0].protocol_data == name


@run_by(with_topic)
async def test_a_name_too_long_for_a_group_record_is_refused_with_the_rule(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    member = GroupMember(cluster, world, "billing", group_instance_id="é" * 16_384)
    with pytest.raises(BrokerError, match=r"INVALID_REQUEST: JoinGroup: group\.instance\.id has 32768 bytes"):
        await member.join_once()


ONE_OFFSETS_PARTITION = {"offsets.topic.num.partitions": "1"}


def offsets_end(cluster: VirtualCluster, broker_id: int, index: int = 0) -> int:
    """Return the log end offset of a partition of `__consumer_offsets`."""
    partition = replica_of(cluster, broker_id, TopicPartition(OFFSETS_TOPIC, index))
    return partition.log.log_end_offset


@pytest.mark.slow
def test_offsets_committed_after_a_group_was_dropped_survive_the_running_expiry() -> None:
    """The expiry is handling the group when the only member id issued for it is returned."""

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        assert await GroupClient(cluster, world, "old").commit({ORDERS: 7}) == [ErrorCode.NONE]
        await asyncio.sleep(50)
        member = GroupMember(cluster, world, "new", session_timeout_ms=60_000)
        client = GroupClient(cluster, world, "new")
        coordinator = await member.find_coordinator()
        assert (await member.join_once()).error_code == ErrorCode.MEMBER_ID_REQUIRED
        before = offsets_end(cluster, coordinator)
        while offsets_end(cluster, coordinator) == before:
            await asyncio.sleep(0.0002)
        # The expiry has just deleted the old group's offsets, and waits until that is replicated.
        followers = [id for id in cluster.broker_ids if id != coordinator]
        for follower in followers:
            cluster.pause_broker(follower)
        leaving = g.LeaveGroupRequest("new", [g.LeavingMember(member.member_id, None)])
        assert (await member.ask(coordinator, apis.LEAVE_GROUP, leaving)).members[0].error_code == ErrorCode.NONE
        committing = asyncio.ensure_future(client.commit({ORDERS: 42}, broker_id=coordinator))
        await asyncio.sleep(0.3)
        for follower in followers:
            cluster.resume_broker(follower)
        assert await committing == [ErrorCode.NONE]
        for _ in range(5):
            assert await client.committed(ORDERS) == 42
            await asyncio.sleep(1)

    retention = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "20000"}
    with_topic(program, ONE_OFFSETS_PARTITION | retention)


@run_by(with_topic, settings=ONE_OFFSETS_PARTITION)
async def test_a_group_with_an_uncertain_deletion_is_not_recreated_when_an_issued_id_expires(
    cluster: VirtualCluster, world: VirtualWorld, /
) -> None:
    """If it were recreated, it would be deleted again every second while it has new members."""

    gone = GroupMember(cluster, world, "billing", session_timeout_ms=8_000)
    assert (await gone.join_once()).error_code == ErrorCode.MEMBER_ID_REQUIRED
    coordinator = await gone.find_coordinator()
    followers = [id for id in cluster.broker_ids if id != coordinator]
    await asyncio.sleep(5)
    for follower in followers:
        cluster.pause_broker(follower)
    deleting = gone.ask(coordinator, apis.DELETE_GROUPS, g.DeleteGroupsRequest(["billing"]))
    in_doubt = asyncio.ensure_future(deleting)
    await asyncio.sleep(5.2)
    for follower in followers:
        cluster.resume_broker(follower)
    assert [one.error_code for one in (await in_doubt).results] == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    members = [GroupMember(cluster, world, "billing", group_instance_id=f"till-{n}") for n in range(2)]
    await asyncio.gather(*(member.join_and_sync() for member in members))
    before = offsets_end(cluster, coordinator)
    for _ in range(10):
        await asyncio.sleep(1)
        assert [await member.heartbeat() for member in members] == [ErrorCode.NONE] * 2
    assert offsets_end(cluster, coordinator) == before
    cluster.kill_broker(coordinator)
    await asyncio.sleep(3)
    assert [await member.heartbeat() for member in members] == [ErrorCode.NONE] * 2


@pytest.mark.parametrize(("behind_ms", "ahead_ms"), [(8 * DAY_MS, 0), (0, 8 * DAY_MS), (400 * DAY_MS, 400 * DAY_MS)])
def test_an_offset_is_kept_for_its_retention_whatever_its_coordinators_clocks(behind_ms: int, ahead_ms: int) -> None:
    """The first coordinator's clock is behind when it writes the offset; the next one's is ahead when it starts."""

    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        client, member = GroupClient(cluster, world, "nightly"), GroupMember(cluster, world, "billing")
        coordinator = await client.find_coordinator()
        await member.join_and_sync()
        others = [broker_id for broker_id in cluster.broker_ids if broker_id != coordinator]
        for broker_id in others:
            cluster.simulation.host(host_name(broker_id)).clock_offset_ms = ahead_ms
            cluster.kill_broker(broker_id)
            await cluster.start_broker(broker_id)
        await cluster.until(lambda: len(cluster.state(P0_OF_OFFSETS).isr) == 3)
        cluster.simulation.host(host_name(coordinator)).clock_offset_ms = -behind_ms
        assert await client.commit({ORDERS: 42}) == [ErrorCode.NONE]
        assert await member.commit_as_member({ORDERS: 43}) == [ErrorCode.NONE]
        assert await member.leave() == ErrorCode.NONE
        await asyncio.sleep(1)
        cluster.kill_broker(coordinator)
        for _ in range(5):
            await asyncio.sleep(1)
            assert await client.committed(ORDERS) == 42
            assert await member.committed(ORDERS) == 43
        assert await client.find_coordinator() != coordinator

    often = {"offsets.retention.minutes": str(7 * 24 * 60), "offsets.retention.check.interval.ms": "500"}
    with_topic(program, ONE_OFFSETS_PARTITION | often)


def test_an_offset_unused_for_its_retention_is_deleted_by_its_coordinator() -> None:
    async def program(cluster: VirtualCluster, world: VirtualWorld) -> None:
        client = GroupClient(cluster, world, "nightly")
        coordinator = await client.find_coordinator()
        assert await client.commit({ORDERS: 42}) == [ErrorCode.NONE]
        await asyncio.sleep(50)
        cluster.kill_broker(coordinator)
        await asyncio.sleep(55)
        assert await client.committed(ORDERS) == 42
        await asyncio.sleep(15)
        assert await client.committed(ORDERS) == -1

    often = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "500"}
    with_topic(program, ONE_OFFSETS_PARTITION | often)


@run_by(with_topic, settings={"offsets.topic.num.partitions": "50"})
async def test_a_failover_of_a_hundred_partitions_is_a_few_short_lines_in_the_logs(
    cluster: VirtualCluster, world: VirtualWorld, /, caplog: pytest.LogCaptureFixture
) -> None:
    async with Admin(cluster.bootstrap, world=world) as admin:
        await admin.create_topic("payments", partitions=60, replication_factor=3)
    for number in range(30):  # so that each broker coordinates some
        client = GroupClient(cluster, world, f"group {number}")
        assert await client.commit({ORDERS: 3}) == [ErrorCode.NONE]
    await asyncio.sleep(10)
    with caplog.at_level(logging.INFO, "minibroker"):
        caplog.clear()
        cluster.kill_broker(1)
        await asyncio.sleep(15)
        await cluster.start_broker(1)
        await asyncio.sleep(15)
        async with Admin(cluster.bootstrap, world=world) as admin:
            await admin.delete_topic("payments")
        await asyncio.sleep(1)
    lines = [line for line in caplog.messages if not line.startswith(("admin", "consumer", "producer"))]
    assert len(lines) < 50
    assert max(map(len, lines)) < 300
    assert [line for line in lines if line.startswith("coordinates ") and " groups of __consumer_offsets-" in line]
    assert not [line for line in lines if " 0 groups" in line]
