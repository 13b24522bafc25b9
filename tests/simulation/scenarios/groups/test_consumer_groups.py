"""Consumer groups of real clients: rebalances, killed and hanging brokers, and members that fail."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from minibroker.client.errors import MaxPollIntervalExceeded
from minibroker.deploy.simulator.loop import VirtualLoop, on_virtual_loop
from tests.running import run_by
from tests.simulation.scenarios.groups.group_workload import GroupWork, Member
from tests.simulation.seeds import every_seed

pytestmark = pytest.mark.slow

STRATEGIES = ["cooperative-sticky", "range"]


def is_coordinated_by_another(work: GroupWork, node: int) -> bool:
    return all(member.coordinator() not in (node, None) for member in work.living())


@pytest.mark.parametrize("strategy", STRATEGIES)
@run_by(on_virtual_loop)
async def test_members_come_and_leave_and_nothing_is_read_twice(strategy: str) -> None:
    work = await GroupWork.start(partition_assignment_strategy=strategy)
    await work.until(lambda: work.written > 20)
    late = work.add("late", partition_assignment_strategy=strategy)
    await work.until(lambda: late.assignment() and work.is_shared())
    await work.leave(work.members[0])
    await work.shared()
    await work.finish()
    assert work.duplicates() == 0


@every_seed(range(2))
@run_by(on_virtual_loop)
async def test_a_killed_coordinator_costs_seconds_and_no_record(seed: int) -> None:
    work = await GroupWork.start()
    loop = asyncio.get_running_loop()
    for _ in range(2):
        node = work.coordinator()
        work.cluster.kill_broker(node)
        began = loop.time()
        await work.until(partial(is_coordinated_by_another, work, node))
        await work.shared()
        assert loop.time() - began < 5
        await work.cluster.start_broker(node)
        await asyncio.sleep(4)
    await work.finish()
    assert all(not member.stays.lost for member in work.members), "the next coordinator took over their sessions"


@pytest.mark.parametrize("state", ["preparing rebalance", "completing rebalance"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@every_seed(range(2))
@run_by(on_virtual_loop)
async def test_a_coordinator_killed_in_the_middle_of_a_rebalance(state: str, strategy: str, seed: int) -> None:
    work = await GroupWork.start(members=2, partition_assignment_strategy=strategy)
    await work.until(lambda: work.written > 10)
    node = work.coordinator()
    late = work.add("late", partition_assignment_strategy=strategy)
    while late.consumer.status().member_state != state:
        await asyncio.sleep(0.000_2)
    work.cluster.kill_broker(node)
    await work.until(lambda: late.assignment() and work.is_shared())
    await work.cluster.start_broker(node)
    await work.finish()


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_coordinator_killed_in_the_middle_of_a_commit(seed: int) -> None:
    work = await GroupWork.start()
    await work.until(lambda: work.written > 10)
    node = work.coordinator()
    session = work.members[0].consumer._session
    assert session is not None
    while not session.commits._queue:
        await asyncio.sleep(0.000_2)
    await asyncio.sleep(0.000_3 * seed)
    work.cluster.kill_broker(node)
    await work.shared()
    await work.cluster.start_broker(node)
    await work.finish()
    assert work.duplicates() == 0, "the commit was executed or retried"


@run_by(on_virtual_loop)
async def test_a_rolling_restart_loses_nothing_and_no_member() -> None:
    work = await GroupWork.start()
    for broker_id in work.cluster.broker_ids:
        await work.cluster.stop_broker(broker_id)
        await asyncio.sleep(2)
        await work.cluster.start_broker(broker_id)
        await asyncio.sleep(4)
        await work.shared()
    await work.finish()
    assert work.duplicates() == 0
    assert all(not member.stays.lost for member in work.members)


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_the_other_members_continue_the_partitions_of_a_killed_one(seed: int) -> None:
    work = await GroupWork.start()
    await work.until(lambda: work.written > 10)
    work.members[1].world.process.kill()
    await work.until(lambda: not work.is_shared())
    began = asyncio.get_running_loop().time()
    await work.shared()
    assert asyncio.get_running_loop().time() - began < 6 + 5, "its session timeout and a rebalance"
    await work.finish()


@every_seed(range(2))
@run_by(on_virtual_loop)
async def test_a_member_stopped_for_longer_than_its_session_commits_nothing_afterwards(seed: int) -> None:
    work = await GroupWork.start()
    await work.until(lambda: work.written > 10)
    member = work.members[1]
    had = member.assignment()
    member.world.process.pause()
    others = [other for other in work.members if other is not member]

    def taken_over() -> bool:
        return set(had) <= {partition for other in others for partition in other.assignment()}

    await work.until(taken_over)
    await asyncio.sleep(5)
    before = dict(work.committed)
    member.world.process.resume()
    await work.shared()
    assert all(work.committed[partition] >= before[partition] for partition in had)
    assert member.assignment(), "it is a member again"
    await work.finish()
    assert member.stays.lost, "its listener was called"


@every_seed(range(2))
@run_by(on_virtual_loop)
async def test_a_leader_killed_while_members_commit_delays_no_member_for_long(seed: int) -> None:
    work = await GroupWork.start()
    await work.until(lambda: work.written > 10)
    for _ in range(2):
        leader = work.cluster.state(work.partitions[0]).leader
        work.cluster.kill_broker(leader)
        await work.written_more(20)
        await work.shared()
        await work.cluster.start_broker(leader)
        await asyncio.sleep(4)
    await work.finish()


@run_by(on_virtual_loop)
async def test_a_coordinator_that_hangs_is_left_as_soon_as_there_is_another() -> None:
    work = await GroupWork.start()
    await work.until(lambda: work.written > 10)
    node = work.coordinator()
    work.cluster.pause_broker(node)
    await work.until(partial(is_coordinated_by_another, work, node))
    work.cluster.resume_broker(node)
    await work.shared()
    await work.finish()


@run_by(on_virtual_loop)
async def test_a_restarted_static_member_gets_its_partitions_back_without_a_rebalance() -> None:
    work = await GroupWork.start(members=2)
    static = work.add("static", group_instance_id="till-1")
    await work.until(lambda: static.assignment() and work.is_shared())
    had = static.assignment()
    before = [member.stays.rebalances for member in work.members[:2]]
    await work.leave(static)
    again = work.add("static-again", group_instance_id="till-1")
    await work.until(lambda: again.assignment() == had)
    assert [member.stays.rebalances for member in work.members[:2]] == before
    await work.finish()


@pytest.mark.parametrize("is_coordinator_killed", [False, True])
@run_by(on_virtual_loop)
async def test_partitions_that_a_restarted_static_member_had_to_give_up_go_to_the_others(
    is_coordinator_killed: bool,
) -> None:
    """The others get the partition in a second rebalance, after the member has revoked it. If the restarted member only
    got the rest and requested no rebalance, the partition would remain unassigned."""

    work = await GroupWork.start(members=1, partitions=4)
    static = work.add("static", group_instance_id="till-1")
    await work.until(lambda: static.assignment() and work.is_shared())
    static.pause_s = 5
    late = work.add("late")
    await work.until(lambda: static.consumer.status().member_state == "completing rebalance")
    await work.until(lambda: late.consumer.status().member_state == "stable")
    assert not late.assignment(), "it waits for the static member's revocation"
    static.world.process.kill()
    if is_coordinator_killed:
        work.cluster.kill_broker(work.coordinator())
    again = work.add("static-again", group_instance_id="till-1")
    await work.until(lambda: again.assignment() and late.assignment() and work.is_shared())
    await work.finish()


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_member_that_waits_for_a_commit_with_records_in_hand_blocks_no_rebalance(seed: int) -> None:
    """They must not wait for each other: the commit for the end of the rebalance, and the rebalance for the records in
    hand."""

    work = await GroupWork.start(members=1)
    work.cluster.simulation.network.set_latency(0.03, 0.06)
    for number in range(3):
        began = asyncio.get_running_loop().time()
        late = work.add(f"late-{number}")
        await work.until(partial(has_its_share, work, late))
        assert asyncio.get_running_loop().time() - began < 10
    await work.finish()


@every_seed(range(3))
@run_by(on_virtual_loop)
async def test_a_commit_during_a_rebalance_that_moves_nothing_ends_with_it(seed: int) -> None:
    """There are as many members as partitions, so a further member gets none. The generation that the commit names has
    no assignment yet, and the one that follows equals the member's present one."""

    async def commit_as_it_completes(member: Member, took_s: list[float]) -> None:
        while member.consumer.status().member_state != "completing rebalance":
            await asyncio.sleep(0.000_2)
        began = asyncio.get_running_loop().time()
        await member.consumer.commit({p: await member.consumer.position(p) for p in member.assignment()})
        took_s.append(asyncio.get_running_loop().time() - began)

    work = await GroupWork.start(members=2, partitions=2)
    await work.until(lambda: work.written > 10 and work.is_shared())
    took_s: list[float] = []
    committing = [
        member.world.process.start(commit_as_it_completes(member, took_s), "commit") for member in work.members
    ]
    work.add("late")
    await asyncio.wait(committing, timeout=70)
    assert len(took_s) == 2
    assert max(took_s) < 5
    await work.shared()
    await work.finish()


def has_its_share(work: GroupWork, member: Member) -> bool:
    return bool(member.assignment()) and work.is_shared()


@run_by(on_virtual_loop)
async def test_a_user_that_takes_too_long_loses_its_membership_and_is_notified() -> None:
    work = await GroupWork.start(max_poll_interval_ms=10_000)
    slow = work.members[0]
    slow.pause_s = 3  # for each of five records, once it lags behind
    await work.until(slow.task.done, within_s=120)
    with pytest.raises(MaxPollIntervalExceeded):
        slow.task.result()
    await work.finish()


@run_by(on_virtual_loop)
async def test_thousands_of_commits_without_waiting_cost_little_each() -> None:
    work = await GroupWork.start(members=1)
    await work.shared()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    consumer = work.members[0].consumer
    began = loop.callbacks
    commits = [consumer.commit_nowait({partition: 0}) for _ in range(1_500) for partition in consumer.assignment()[:1]]
    assert len(commits) == 1_500
    await asyncio.gather(*commits)
    assert (loop.callbacks - began) / len(commits) < 200
    await work.finish()
