"""The coordinator on one broker: joins, generations, assignments, sessions, and each error that it returns."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.broker.coordinating.terms import Outcome
from minibroker.broker.groups.coordinator import MAX_MEMBER_BYTES
from minibroker.broker.groups.group import Group
from minibroker.broker.groups.states import GroupState
from minibroker.protocol.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    encode_assignment,
    encode_subscription,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from tests.groups_support import GROUP, OFFSETS, ORDERS_ID, CoordinatedGroups, with_groups
from tests.replication_support import ME, ORDERS
from tests.running import run_by
from tests.waiting import until

E = ErrorCode
GONE = TopicPartition("orders", 1)


def code(answer: object) -> ErrorCode:
    return ErrorCode(answer.error_code)  # type: ignore[attr-defined]


# --- joining -----------------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_members_that_come_within_the_initial_delay_are_one_generation(groups: CoordinatedGroups, /) -> None:
    joins = []
    for _ in range(4):
        joins.append(groups.join_new()[1])
        await asyncio.sleep(0.03)  # each joins within 50 ms after the one before it
    answers = [await join for join in joins]
    assert {answer.generation_id for answer in answers} == {1}
    leaders = [answer for answer in answers if answer.leader == answer.member_id]
    assert len(leaders) == 1
    assert [m.member_id for m in leaders[0].members] == [answer.member_id for answer in answers]
    assert all(not answer.members for answer in answers if answer is not leaders[0])
    assert {answer.protocol_name for answer in answers} == {"range"}


@run_by(with_groups)
async def test_the_initial_delay_does_not_outlast_the_rebalance_timeout(groups: CoordinatedGroups, /) -> None:
    began = asyncio.get_running_loop().time()
    first = groups.join_new(rebalance_timeout_ms=200)[1]
    while not first.done():
        groups.join_new(rebalance_timeout_ms=200)
        await asyncio.sleep(0.02)
    assert 0.19 < asyncio.get_running_loop().time() - began < 0.3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"group_id": ""}, E.INVALID_GROUP_ID),
        ({"group_id": "é" * 20_000}, E.INVALID_GROUP_ID),
        ({"session_timeout_ms": 5_999}, E.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, E.INVALID_SESSION_TIMEOUT),
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"member_id": "nobody", "group_id": "other"}, E.UNKNOWN_MEMBER_ID),
        ({"protocols": ()}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocols": (("sticky", b""),)}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocols": (("range", b"x" * (MAX_MEMBER_BYTES + 1)),)}, E.MESSAGE_TOO_LARGE),
        ({"instance": "x", "member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({}, E.MEMBER_ID_REQUIRED),
    ],
)
@run_by(with_groups)
async def test_a_rejected_join_returns_the_reason(
    groups: CoordinatedGroups, /, change: dict[str, object], expected: ErrorCode
) -> None:
    await groups.stable()
    answer = groups.join(**change).result()  # type: ignore[arg-type]
    assert code(answer) is expected
    assert groups.group().is_in(GroupState.STABLE)


@run_by(with_groups)
async def test_a_member_without_a_common_assignor_is_rejected_with_both_lists(groups: CoordinatedGroups, /) -> None:
    await groups.stable()
    answer = groups.join(protocols=(("sticky", b""), ("cooperative-sticky", b""))).result()
    assert answer.error_message is not None
    assert "this member offers 'sticky', 'cooperative-sticky', and all others of the group know 'range'" in (
        answer.error_message
    )


@run_by(with_groups, lead=False)
async def test_a_broker_that_does_not_coordinate_the_group_says_so(groups: CoordinatedGroups, /) -> None:
    assert code(groups.join().result()) is E.NOT_COORDINATOR
    assert code(groups.sync("m", 1).result()) is E.NOT_COORDINATOR
    assert groups.heartbeat("m", 1) is E.NOT_COORDINATOR
    assert groups.leave("m") == [E.NOT_COORDINATOR]
    assert groups.commit(1).result() == E.NOT_COORDINATOR
    assert code(groups.fetch().result()) is E.NOT_COORDINATOR


@run_by(with_groups)
async def test_a_group_that_no_member_joins_is_forgotten(groups: CoordinatedGroups, /) -> None:
    groups.join(session_timeout_ms=6_000)
    assert GROUP in groups.groups.terms.loaded()[0].groups
    forgotten = groups.group()
    await asyncio.sleep(6.1)
    assert groups.groups.terms.loaded()[0].groups == {}
    assert forgotten.is_in(GroupState.DEAD)  # for a caller that was about to use it


@run_by(with_groups, settings={"group.max.size": "2"})
async def test_a_full_group_rejects_further_members(groups: CoordinatedGroups, /) -> None:
    (one, other) = await groups.stable(2)
    assert code(groups.join().result()) is E.GROUP_MAX_SIZE_REACHED
    assert code(groups.join(instance="x").result()) is E.GROUP_MAX_SIZE_REACHED
    assert groups.heartbeat(one, 1) is E.NONE
    assert groups.leave(other) == [E.NONE]
    assert code(groups.join().result()) is E.MEMBER_ID_REQUIRED


@run_by(with_groups)
async def test_a_member_whose_answer_was_lost_gets_it_again_without_a_rebalance(groups: CoordinatedGroups, /) -> None:
    joins = [groups.join_new() for _ in range(2)]
    answers = [await join for _, join in joins]
    for answer in answers:
        again = groups.join(answer.member_id).result()
        assert (again.generation_id, again.leader, again.members) == (1, answer.leader, answer.members)
    assert groups.group().is_in(GroupState.COMPLETING_REBALANCE)


@run_by(with_groups)
async def test_a_follower_that_joins_a_stable_group_again_changes_nothing_and_a_leader_rebalances_it(
    groups: CoordinatedGroups, /
) -> None:
    leader, follower = await groups.stable(2)
    assert groups.join(follower).result().generation_id == 1
    again = groups.join(leader)
    assert groups.heartbeat(follower, 1) is E.REBALANCE_IN_PROGRESS
    groups.join(follower)
    assert (await again).generation_id == 2


@run_by(with_groups)
async def test_a_member_with_another_subscription_rebalances_the_group(groups: CoordinatedGroups, /) -> None:
    leader, follower = await groups.stable(2)
    again = groups.join(follower, protocols=(("range", b"other"),))
    assert groups.heartbeat(leader, 1) is E.REBALANCE_IN_PROGRESS
    answer = await groups.join(leader)
    assert (await again).generation_id == answer.generation_id == 2
    assert [bytes(m.metadata) for m in answer.members] == [b"subscription", b"other"]


@run_by(with_groups)
async def test_a_member_that_does_not_join_within_the_rebalance_timeout_is_removed(
    groups: CoordinatedGroups, /
) -> None:
    leader, follower = await groups.stable(2)
    groups.leave(leader)
    began = asyncio.get_running_loop().time()
    _, joining = groups.join_new(rebalance_timeout_ms=1_000)
    while not joining.done():
        groups.heartbeat(follower, 1)
        await asyncio.sleep(0.5)
    assert 19.9 < asyncio.get_running_loop().time() - began < 21  # the longest of the members' timeouts
    assert groups.heartbeat(follower, 1) is E.UNKNOWN_MEMBER_ID


@run_by(with_groups)
async def test_a_member_that_disconnects_before_its_first_generation_is_not_in_it(groups: CoordinatedGroups, /) -> None:
    ghost = groups.join().result().member_id
    groups.join(ghost, is_gone=lambda: True)
    _, joining = groups.join_new()
    answer = await joining
    assert [member.member_id for member in answer.members] == [answer.member_id]


# --- assignments -------------------------------------------------------------------------------------------------


@run_by(with_groups, lead=False)
async def test_no_member_gets_an_assignment_before_it_is_replicated(groups: CoordinatedGroups, /) -> None:
    async def scenario(groups: CoordinatedGroups) -> None:
        member, joining = groups.join_new()
        assert (await joining).generation_id == 1
        syncing = groups.sync(member, 1, {member: b"all"})
        await asyncio.sleep(1)
        assert not syncing.done()
        assert groups.group().is_in(GroupState.COMPLETING_REBALANCE)
        groups.replicate(2, 3)
        assert bytes((await syncing).assignment) == b"all"
        assert groups.group().is_in(GroupState.STABLE)

    await groups.lead(isr=(ME, 2, 3))
    await scenario(groups)


@run_by(with_groups, lead=False)
async def test_if_the_assignment_cannot_be_stored_the_members_join_again(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    member, joining = groups.join_new()
    await joining
    answer = await groups.sync(member, 1, {member: b"all"})  # no follower fetches
    assert code(answer) is E.COORDINATOR_NOT_AVAILABLE
    assert groups.heartbeat(member, 1) is E.REBALANCE_IN_PROGRESS
    assert (await groups.join(member)).generation_id == 2
    syncing = groups.sync(member, 2, {member: b"all"})
    groups.replicate(2, 3)
    assert code(await syncing) is E.NONE


@run_by(with_groups, lead=False)
async def test_an_assignment_stored_after_the_next_generation_began_is_discarded(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    leader, joining = groups.join_new()
    await joining
    former = groups.sync(leader, 1, {leader: b"former"})
    other, joining = groups.join_new()
    assert code(await former) is E.REBALANCE_IN_PROGRESS
    again = groups.join(leader)
    assert (await joining).generation_id == (await again).generation_id == 2
    waiting = groups.sync(other, 2)
    groups.replicate(2, 3)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert groups.group().is_in(GroupState.COMPLETING_REBALANCE)
    syncing = groups.sync(leader, 2, {leader: b"L", other: b"O"})
    groups.replicate(2, 3)
    assert [bytes((await one).assignment) for one in (syncing, waiting)] == [b"L", b"O"]


@run_by(with_groups, lead=False)
async def test_a_leader_that_syncs_twice_gets_the_assignment_of_its_first_request(groups: CoordinatedGroups, /) -> None:
    """Both may be in the log by then, and the next coordinator would return the later one."""

    await groups.lead(isr=(ME, 2, 3))
    leader, joining = groups.join_new()
    await joining
    broken_off = groups.sync(leader, 1, {leader: b"first"})
    assert (await groups.join(leader)).generation_id == 1
    syncing = groups.sync(leader, 1, {leader: b"second"})
    assert code(await broken_off) is E.REBALANCE_IN_PROGRESS
    groups.replicate(2, 3)
    assert bytes((await syncing).assignment) == b"first"
    await groups.follow(1)
    await groups.lead(2, (ME, 2, 3), wait=False)
    groups.replicate(2, 3)
    await until(groups.groups.terms.loaded)
    assert bytes((await groups.sync(leader, 1)).assignment) == b"first"


@run_by(with_groups)
async def test_followers_wait_for_the_leader_and_a_member_it_left_out_gets_nothing(
    groups: CoordinatedGroups, /
) -> None:
    (leader, first), (other, second) = groups.join_new(), groups.join_new()
    assert (await first).leader == leader
    await second
    waiting = groups.sync(other, 1)
    await asyncio.sleep(1)
    assert not waiting.done()
    assert bytes((await groups.sync(leader, 1, {leader: b"all", "nobody": b"x"})).assignment) == b"all"
    assert bytes((await waiting).assignment) == b""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"group_id": "other"}, E.UNKNOWN_MEMBER_ID),
        ({"group_id": ""}, E.INVALID_GROUP_ID),
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"generation_id": 0}, E.ILLEGAL_GENERATION),
        ({"generation_id": 2}, E.ILLEGAL_GENERATION),
        ({"protocol_name": "sticky"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, E.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_name": "range", "protocol_type": "consumer"}, E.NONE),
    ],
)
@run_by(with_groups)
async def test_a_rejected_sync_returns_the_reason(
    groups: CoordinatedGroups, /, change: dict[str, object], expected: ErrorCode
) -> None:
    (member,) = await groups.stable()
    asked = {"member_id": member, "generation_id": 1} | change
    assert code(groups.sync(**asked).result()) is expected  # type: ignore[arg-type]


@run_by(with_groups)
async def test_a_sync_during_a_rebalance_is_answered_with_rebalance_in_progress(groups: CoordinatedGroups, /) -> None:
    one, other = await groups.stable(2)
    groups.leave(other)
    assert code(groups.sync(one, 1).result()) is E.REBALANCE_IN_PROGRESS


@run_by(with_groups)
async def test_a_leader_without_an_assignment_is_removed_despite_its_heartbeats(groups: CoordinatedGroups, /) -> None:
    (leader, first), (other, second) = groups.join_new(), groups.join_new()
    await first
    await second
    waiting = groups.sync(other, 1)
    while not waiting.done():
        groups.heartbeat(leader, 1)
        await asyncio.sleep(1)
    assert code(waiting.result()) is E.REBALANCE_IN_PROGRESS
    assert groups.heartbeat(leader, 1) is E.UNKNOWN_MEMBER_ID
    answer = await groups.join(other)
    assert (answer.generation_id, answer.leader) == (2, other)


@run_by(with_groups)
async def test_a_follower_that_does_not_sync_is_removed(groups: CoordinatedGroups, /) -> None:
    (leader, first), (other, second) = groups.join_new(), groups.join_new()
    await first
    await second
    await groups.sync(leader, 1, {})
    for _ in range(19):
        assert groups.heartbeat(leader, 1) is E.NONE
        assert groups.heartbeat(other, 1) is E.NONE
        await asyncio.sleep(1)
    await asyncio.sleep(1.1)
    assert groups.heartbeat(other, 1) is E.UNKNOWN_MEMBER_ID
    assert groups.heartbeat(leader, 1) is E.REBALANCE_IN_PROGRESS


@run_by(with_groups)
async def test_a_member_that_comes_while_the_leader_is_at_work_begins_another_rebalance(
    groups: CoordinatedGroups, /
) -> None:
    (leader, first), (other, second) = groups.join_new(), groups.join_new()
    await first
    await second
    waiting = groups.sync(other, 1)
    _, third = groups.join_new()
    assert code(await waiting) is E.REBALANCE_IN_PROGRESS
    assert code(groups.sync(leader, 1, {}).result()) is E.REBALANCE_IN_PROGRESS
    groups.join(leader)
    groups.join(other)
    assert (await third).generation_id == 2


# --- sessions ----------------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_a_member_silent_for_its_session_timeout_is_removed_and_others_stay(groups: CoordinatedGroups, /) -> None:
    loud, silent = await groups.stable(2)
    for _ in range(9):
        await asyncio.sleep(1)
        assert groups.heartbeat(loud, 1) is E.NONE
    await asyncio.sleep(1.1)
    assert groups.heartbeat(silent, 1) is E.UNKNOWN_MEMBER_ID
    assert groups.heartbeat(loud, 1) is E.REBALANCE_IN_PROGRESS


@run_by(with_groups)
async def test_the_last_member_that_goes_leaves_an_empty_group_in_a_generation_of_its_own(
    groups: CoordinatedGroups, /
) -> None:
    await groups.stable()
    await asyncio.sleep(10.1)
    group = groups.group()
    assert group.is_in(GroupState.EMPTY)
    assert group.generation_id == 2
    (member,) = await groups.stable()
    assert groups.heartbeat(member, 3) is E.NONE


@run_by(with_groups)
async def test_a_member_that_waits_for_a_rebalance_stays_without_heartbeats(groups: CoordinatedGroups, /) -> None:
    waiting, slow = await groups.stable(2)
    _, new = groups.join_new()
    joining = groups.join(waiting)
    for _ in range(15):
        assert groups.heartbeat(slow, 1) is E.REBALANCE_IN_PROGRESS
        await asyncio.sleep(1)
    groups.join(slow)
    assert (await joining).generation_id == (await new).generation_id == 2


@run_by(with_groups)
async def test_a_commit_keeps_a_session_up_as_a_heartbeat_does(groups: CoordinatedGroups, /) -> None:
    (member,) = await groups.stable()
    for offset in range(4):
        await asyncio.sleep(6)
        assert await groups.commit(offset, member_id=member, generation_id=1) == E.NONE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"group_id": "other"}, E.UNKNOWN_MEMBER_ID),
        ({"group_id": ""}, E.INVALID_GROUP_ID),
        ({"generation_id": 7}, E.ILLEGAL_GENERATION),
        ({}, E.NONE),
    ],
)
@run_by(with_groups)
async def test_a_rejected_heartbeat_returns_the_reason(
    groups: CoordinatedGroups, /, change: dict[str, object], expected: ErrorCode
) -> None:
    (member,) = await groups.stable()
    asked = {"member_id": member, "generation_id": 1} | change
    assert groups.heartbeat(**asked) is expected  # type: ignore[arg-type]


# --- leaving -----------------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_several_members_leave_at_once_and_static_ones_by_instance_id(groups: CoordinatedGroups, /) -> None:
    static = groups.join(instance="one")
    _, dynamic = groups.join_new()
    stays = groups.join_new()
    await static
    answer = await dynamic
    pending = groups.join().result().member_id
    left = groups.leave(answer.member_id, pending, "nobody", instances=["one", "two"])
    assert left == [E.NONE, E.NONE, E.UNKNOWN_MEMBER_ID, E.NONE, E.UNKNOWN_MEMBER_ID]
    assert list(groups.group().members) == [stays[0]]


# --- static members ----------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_a_static_member_that_comes_back_keeps_its_assignment_without_a_rebalance(
    groups: CoordinatedGroups, /
) -> None:
    first, second = groups.join(instance="one"), groups.join(instance="two")
    old = (await second).member_id
    leader = (await first).member_id
    syncs = [groups.sync(old, 1), groups.sync(leader, 1, {leader: b"L", old: b"S"})]
    await asyncio.gather(*syncs)
    back = await groups.join(instance="two")
    assert (code(back), back.generation_id, back.leader, back.skip_assignment) == (E.NONE, 1, leader, False)
    assert back.member_id != old
    assert bytes((await groups.sync(back.member_id, 1, instance="two")).assignment) == b"S"
    assert groups.heartbeat(old, 1, instance="two") is E.FENCED_INSTANCE_ID
    assert code(groups.sync(old, 1, instance="two").result()) is E.FENCED_INSTANCE_ID
    assert await groups.commit(1, member_id=old, generation_id=1, instance="two") == E.FENCED_INSTANCE_ID
    assert code(groups.join(old, instance="two").result()) is E.FENCED_INSTANCE_ID
    assert groups.heartbeat(leader, 1, instance="one") is E.NONE


@run_by(with_groups)
async def test_a_static_leader_that_comes_back_leads_and_need_not_assign(groups: CoordinatedGroups, /) -> None:
    joined = await groups.join(instance="one")
    await groups.sync(joined.member_id, 1, {joined.member_id: b"all"})
    back = await groups.join(instance="one")
    assert (back.leader, back.skip_assignment) == (back.member_id, True)
    assert [member.member_id for member in back.members] == [back.member_id]
    assert bytes((await groups.sync(back.member_id, 1)).assignment) == b"all"


def consumer_of(
    *topics: str, owned: tuple[TopicPartition, ...] = (), data: bytes = b""
) -> tuple[tuple[str, bytes], ...]:
    return (("range", encode_subscription(ConsumerProtocolSubscription(topics, data, owned, 1 if owned else -1))),)


@pytest.mark.parametrize(
    ("back", "rebalances"),
    [
        (consumer_of("orders"), False),
        (consumer_of("orders", owned=(ORDERS,), data=b"what the sticky assignor remembers"), False),
        (consumer_of("orders", "payments"), True),
        (consumer_of("payments"), True),
    ],
)
@pytest.mark.parametrize("leads", [False, True])
@run_by(with_groups)
async def test_a_static_member_that_comes_back_with_another_subscription_rebalances_its_group(
    groups: CoordinatedGroups, /, back: tuple[tuple[str, bytes], ...], rebalances: bool, leads: bool
) -> None:
    first = groups.join(instance="one", protocols=consumer_of("orders"))
    second = groups.join(instance="two", protocols=consumer_of("orders"))
    leader, other = (await first).member_id, (await second).member_id
    all_of_it = encode_assignment(ConsumerProtocolAssignment([ORDERS]))
    await asyncio.gather(groups.sync(other, 1), groups.sync(leader, 1, {leader: all_of_it}))
    returning = groups.join(instance="one" if leads else "two", protocols=back)
    await until(lambda: returning.done() or groups.group().is_in(GroupState.PREPARING_REBALANCE))
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE) == rebalances
    if rebalances:
        (stayed, name) = (other, "two") if leads else (leader, "one")
        groups.join(stayed, instance=name, protocols=consumer_of("orders"))
        assert ((await returning).generation_id, (await returning).skip_assignment) == (2, False)


@pytest.mark.parametrize(("assigned", "rebalances"), [([ORDERS], False), ([], True), ([ORDERS, GONE], True)])
@run_by(with_groups)
async def test_a_returning_static_leader_assigns_anew_if_its_topics_have_other_partitions(
    groups: CoordinatedGroups, /, assigned: list[TopicPartition], rebalances: bool
) -> None:
    joined = await groups.join(instance="one", protocols=consumer_of("orders", "unknown"))
    given = encode_assignment(ConsumerProtocolAssignment(assigned))
    await groups.sync(joined.member_id, 1, {joined.member_id: given})
    back = await groups.join(instance="one", protocols=consumer_of("orders", "unknown"))
    assert (back.generation_id, back.skip_assignment) == ((2, False) if rebalances else (1, True))


@pytest.mark.parametrize("is_loaded", [False, True])
@run_by(with_groups)
async def test_a_returned_static_leader_assigns_anew_when_its_coordinator_learns_of_partitions(
    groups: CoordinatedGroups, /, is_loaded: bool
) -> None:
    """It may have seen the new partitions when it came back, and considered them assigned, as it had nothing to
    assign."""

    given = encode_assignment(ConsumerProtocolAssignment([ORDERS]))
    joined = await groups.join(instance="one", protocols=consumer_of("orders"))
    await groups.sync(joined.member_id, 1, {joined.member_id: given})
    back = await groups.join(instance="one", protocols=consumer_of("orders"))
    assert back.skip_assignment
    if is_loaded:
        await groups.follow(1)
        await groups.lead(2)
    assert groups.heartbeat(back.member_id, 1) is E.NONE
    groups.announce({"orders": ORDERS_ID}, partitions=2)
    assert groups.heartbeat(back.member_id, 1) is E.REBALANCE_IN_PROGRESS
    again = await groups.join(back.member_id, instance="one", protocols=consumer_of("orders"))
    assert again.generation_id > 1
    assert not again.skip_assignment
    await groups.sync(
        back.member_id, again.generation_id, {back.member_id: given}
    )  # it has not seen the second partition
    groups.announce({"orders": ORDERS_ID}, partitions=3)
    assert groups.heartbeat(back.member_id, again.generation_id) is E.NONE  # as leader it now watches partitions itself


@pytest.mark.parametrize(
    ("kept", "passed_on", "rebalances"), [(True, False, False), (False, True, False), (False, False, True)]
)
@run_by(with_groups)
async def test_a_returning_static_member_that_owed_a_revocation_rebalances_its_group(
    groups: CoordinatedGroups, /, kept: bool, passed_on: bool, rebalances: bool
) -> None:
    """It had to join once more after the revocation and does not remember: the partition would stay unassigned."""

    first = groups.join(instance="one", protocols=consumer_of("orders"))
    second = groups.join(instance="two", protocols=consumer_of("orders", owned=(ORDERS,)))
    leader, other = (await first).member_id, (await second).member_id
    given = encode_assignment(ConsumerProtocolAssignment([ORDERS]))
    nothing = encode_assignment(ConsumerProtocolAssignment([]))
    assignments = {leader: given if passed_on else nothing, other: given if kept else nothing}
    await asyncio.gather(groups.sync(other, 1), groups.sync(leader, 1, assignments))
    returning = groups.join(instance="two", protocols=consumer_of("orders"))
    await until(lambda: returning.done() or groups.group().is_in(GroupState.PREPARING_REBALANCE))
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE) == rebalances
    if rebalances:
        groups.join(leader, instance="one", protocols=consumer_of("orders"))
    assert (await returning).generation_id == (2 if rebalances else 1)


@run_by(with_groups, lead=False)
async def test_a_static_member_whose_return_cannot_be_stored_keeps_its_old_id(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    joined = await groups.join(instance="one")
    syncing = groups.sync(joined.member_id, 1, {joined.member_id: b"all"})
    groups.replicate(2, 3)
    await syncing
    returning = groups.join(instance="one")
    assert groups.heartbeat(joined.member_id, 1, instance="one") is E.FENCED_INSTANCE_ID
    assert code(await returning) is E.COORDINATOR_NOT_AVAILABLE  # no follower fetches
    assert groups.heartbeat(joined.member_id, 1, instance="one") is E.NONE
    returning = groups.join(instance="one")
    groups.replicate(2, 3)
    back = await returning
    assert code(back) is E.NONE
    assert bytes((await groups.sync(back.member_id, 1)).assignment) == b"all"


@run_by(with_groups, lead=False)
async def test_a_static_member_that_comes_back_twice_leaves_the_first_return_fenced(
    groups: CoordinatedGroups, /
) -> None:
    await groups.lead(isr=(ME, 2, 3))
    joined = await groups.join(instance="one")
    syncing = groups.sync(joined.member_id, 1, {joined.member_id: b"all"})
    groups.replicate(2, 3)
    await syncing
    once, twice = groups.join(instance="one"), groups.join(instance="one")
    assert code(once.result()) is E.FENCED_INSTANCE_ID
    groups.replicate(2, 3)
    assert bytes((await groups.sync((await twice).member_id, 1)).assignment) == b"all"


@run_by(with_groups)
async def test_a_static_member_that_comes_back_while_the_leader_assigns_begins_another_rebalance(
    groups: CoordinatedGroups, /
) -> None:
    leader, other = await groups.join(instance="one"), None
    other = groups.join(instance="two")
    groups.join(leader.member_id, instance="one")
    await other
    back = groups.join(instance="two")
    assert groups.heartbeat(leader.member_id, 2, instance="one") is E.REBALANCE_IN_PROGRESS
    groups.join(leader.member_id, instance="one")
    assert (await back).generation_id == 3


@run_by(with_groups)
async def test_a_static_member_that_does_not_join_keeps_its_place_for_its_session(groups: CoordinatedGroups, /) -> None:
    away = await groups.join(instance="away", rebalance_timeout_ms=2_000, session_timeout_ms=30_000)
    await groups.sync(away.member_id, 1, {})
    _, joining = groups.join_new(rebalance_timeout_ms=2_000)
    answer = await joining
    assert [member.group_instance_id for member in answer.members] == ["away", None]
    assert answer.leader == answer.member_id
    await groups.sync(answer.member_id, 2, {away.member_id: b"A"})
    back = await groups.join(instance="away")
    assert (back.generation_id, groups.group().is_in(GroupState.STABLE)) == (2, True)
    assert bytes((await groups.sync(back.member_id, 2)).assignment) == b"A"


@run_by(with_groups)
async def test_static_members_that_are_away_are_not_waited_for_in_a_loop(
    groups: CoordinatedGroups, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    original = Group.elect_joined_leader

    def elect_joined_leader(group: Group) -> bool:
        nonlocal looks
        looks += 1
        return original(group)

    away = await groups.join(instance="away", rebalance_timeout_ms=2_000, session_timeout_ms=30_000)
    await groups.sync(away.member_id, 1, {away.member_id: b"A"})
    member, joining = groups.join_new(rebalance_timeout_ms=2_000)
    answer = await joining
    await groups.sync(member, answer.generation_id, {away.member_id: b"A"})
    groups.group().members[away.member_id].rebalance_timeout_ms = 0  # with it no other member can ever sync
    monkeypatch.setattr(Group, "elect_joined_leader", elect_joined_leader)
    groups.leave(member)
    await asyncio.sleep(10)
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE)
    assert looks <= 11
    await asyncio.sleep(30)
    assert groups.group().is_in(GroupState.EMPTY)


# --- terms -------------------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_members_that_wait_when_the_leadership_ends_must_find_the_new_coordinator(
    groups: CoordinatedGroups, /
) -> None:
    waiting, _ = await groups.stable(2)
    joining = groups.join(waiting)
    (_, one), (_, two) = groups.join_new(group_id="other"), groups.join_new(group_id="other")
    await one
    syncing = groups.sync((await two).member_id, 1, group_id="other")
    await groups.follow(1)
    assert code(joining.result()) is code(syncing.result()) is E.NOT_COORDINATOR
    assert groups.heartbeat(waiting, 1) is E.NOT_COORDINATOR
    await asyncio.sleep(60)  # sessions no longer expire, and no record is written
    assert groups.groups.members.purgatories()[0].delayed() == 0
    assert groups.groups.members.purgatories()[1].delayed() == 0


@run_by(with_groups)
async def test_a_later_epoch_of_the_same_leadership_leaves_groups_as_they_are(groups: CoordinatedGroups, /) -> None:
    (member,) = await groups.stable()
    _, joining = groups.join_new()
    await groups.lead(epoch=1)
    again = groups.join(member)
    assert (await joining).generation_id == (await again).generation_id == 2
    assert groups.groups.terms.loads == 1


@run_by(with_groups, lead=False)
async def test_while_groups_load_requests_wait_and_heartbeats_succeed(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    member, joining = groups.join_new()
    await joining
    groups.sync(member, 1, {member: b"all"})
    groups.replicate(2, 3)
    await until(lambda: groups.group().is_in(GroupState.STABLE))
    pending = groups.commit(7, member_id=member, generation_id=1)
    assert not pending.done()
    await groups.follow(1)
    await groups.lead(2, (ME, 2, 3), wait=False)
    for _ in range(10):
        # The last commit is in the log, but another leader might truncate it: it must not be returned yet.
        assert code(groups.join().result()) is E.COORDINATOR_LOAD_IN_PROGRESS
        assert code(groups.sync(member, 1).result()) is E.REBALANCE_IN_PROGRESS
        assert groups.heartbeat(member, 1) is E.NONE
        assert groups.commit(8, member_id=member, generation_id=1).result() == E.COORDINATOR_LOAD_IN_PROGRESS
        assert code(groups.fetch().result()) is E.COORDINATOR_LOAD_IN_PROGRESS
        await asyncio.sleep(0.5)
    groups.replicate(2, 3)
    await until(lambda: groups.groups.terms.loaded())
    assert bytes(groups.sync(member, 1).result().assignment) == b"all"
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == 7


@run_by(with_groups, lead=False)
async def test_a_load_that_ends_after_the_leadership_changes_nothing(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    member, joining = groups.join_new()
    await joining
    groups.sync(member, 1, {member: b"all"})
    groups.replicate(2, 3)
    await until(lambda: groups.group().is_in(GroupState.STABLE))
    groups.commit(7, member_id=member, generation_id=1)  # every load has to wait for it
    await groups.follow(1)
    for epoch in (2, 4, 6):
        await groups.lead(epoch, (ME, 2, 3), wait=False)
        await groups.follow(epoch + 1)
    await asyncio.sleep(5)
    assert groups.groups.terms.loaded() == []
    assert groups.heartbeat(member, 1) is E.NOT_COORDINATOR
    await groups.lead(8, (ME, 2, 3), wait=False)
    groups.replicate(2, 3)
    await until(lambda: groups.groups.terms.loaded())
    assert groups.heartbeat(member, 1) is E.NONE
    committing = groups.commit(9, member_id=member, generation_id=1)
    groups.replicate(2, 3)
    assert await committing == E.NONE
    await asyncio.sleep(3)
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == 9
    assert groups.groups.terms.loads == 2


@run_by(with_groups)
async def test_a_member_that_is_silent_after_its_group_was_loaded_is_removed(groups: CoordinatedGroups, /) -> None:
    silent, _ = await groups.stable(2, session_timeout_ms=10_000)
    await groups.follow(1)
    await groups.lead(2)
    assert silent in groups.group().members
    await asyncio.sleep(15)
    assert groups.group().members == {}


@run_by(with_groups)
async def test_a_late_write_of_a_former_term_is_not_written(groups: CoordinatedGroups, /) -> None:
    """It does not know what another coordinator has written since."""

    (former,) = groups.groups.terms.loaded()
    await groups.follow(1)
    await groups.lead(2)
    end = groups.broker.partition(OFFSETS).log.log_end_offset
    outcomes: list[Outcome] = []
    groups.groups.terms.write(former, [(b"key", b"value")], outcomes.append)
    assert [outcome.code for outcome in outcomes] == [E.NOT_COORDINATOR]
    assert groups.broker.partition(OFFSETS).log.log_end_offset == end


@run_by(with_groups)
async def test_the_number_of_a_generation_that_was_not_stored_is_not_used_again(groups: CoordinatedGroups, /) -> None:
    leader, follower = await groups.stable(2)
    joins = [groups.join(member) for member in (leader, follower)]
    assert [(await join).generation_id for join in joins] == [2, 2]  # no member brings its assignment
    await groups.follow(1)
    await groups.lead(2)
    assert groups.heartbeat(follower, 2) is E.ILLEGAL_GENERATION
    assert groups.heartbeat(leader, 1) is E.NONE
    joins = [groups.join(member) for member in (follower, leader)]
    assert [(await join).generation_id > 2 for join in joins] == [True, True]


@run_by(with_groups)
async def test_the_return_of_a_static_member_does_not_hide_numbers_that_were_used(groups: CoordinatedGroups, /) -> None:
    static = await groups.join(instance="static")
    await groups.sync(static.member_id, static.generation_id, {static.member_id: b"all"}, instance="static")
    await groups.follow(1)
    await groups.lead(2)
    back = await groups.join(instance="static")  # its return may be stored by this coordinator
    unstored = await groups.join(back.member_id, instance="static", protocols=(("range", b"other"),))
    assert unstored.generation_id > static.generation_id
    await groups.follow(3)
    await groups.lead(4)
    (member,) = groups.group().members
    again = await groups.join(member, instance="static", protocols=(("range", b"third"),))
    assert again.generation_id > unstored.generation_id
