"""The coordinator of a group is looked up until one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.groups import GroupErrors
from minibroker.client.errors import BrokersFailed, InvalidSetting, PartitionErrors
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.protocol.apis import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    LIST_GROUPS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
)
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition
from tests.running import run_by
from tests.unit.client.administering.administered_groups import MEMBER, GroupCluster
from tests.unit.client.scripted_broker import (
    CARRY_OUT_AND_DROP,
    DROP,
    HANG,
    Action,
    Received,
    ScriptedCluster,
    carry_out_and_answer,
    leap,
    reject,
)

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def run(scenario: Callable[[GroupCluster, Admin], Coroutine[Any, Any, None]], **changes: Any) -> None:
    async def main() -> None:
        cluster = GroupCluster(3)
        async with asyncio.timeout(30), cluster:
            cluster.add_topic("orders", 2)
            cluster.committed["billing"] = {P0: 5}
            async with Admin(cluster.bootstrap, retry_backoff_ms=10, **changes) as admin:
                await scenario(cluster, admin)

    asyncio.run(main())


def asked(cluster: ScriptedCluster, api: Any) -> list[int]:
    return [received.node_id for received in cluster.received if received.api is api]


@run_by(run)
async def test_a_coordinator_is_looked_up_once_and_asked_from_then_on(cluster: GroupCluster, admin: Admin, /) -> None:
    cluster.coordinator = 2
    for _ in range(3):
        assert await admin.list_group_offsets("billing") == {P0: OffsetAndMetadata(5)}
    assert len(asked(cluster, FIND_COORDINATOR)) == 1
    assert asked(cluster, OFFSET_FETCH) == [2, 2, 2]


@run_by(run)
async def test_a_coordinator_that_moved_is_looked_up_again(cluster: GroupCluster, admin: Admin, /) -> None:
    await admin.list_group_offsets("billing")
    cluster.coordinator = 1
    assert await admin.list_group_offsets("billing") == {P0: OffsetAndMetadata(5)}
    assert asked(cluster, OFFSET_FETCH) == [0, 0, 1]


@run_by(run)
async def test_attempts_name_the_latest_epoch_of_a_coordinator_whatever_brokers_say_that_know_less(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    meant_for = []
    for epoch, topic_id in ((7, "one"), (5, "one"), (8, "one"), (3, "of a new cluster")):
        cluster.coordinator, cluster.epoch, cluster.offsets_topic_id = 1 - cluster.coordinator, epoch, topic_id
        await admin.alter_group_offsets("billing", {P0: 1})
        meant_for.append(cluster.received[-1].body.attempt.coordinator_epoch)
    assert meant_for == [7, 7, 8, 3]


@run_by(run)
async def test_one_that_loads_the_group_is_asked_again_and_not_looked_up(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    loading = reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    cluster.script(OFFSET_FETCH, loading, loading)
    assert await admin.list_group_offsets("billing") == {P0: OffsetAndMetadata(5)}
    assert len(asked(cluster, OFFSET_FETCH)) == 3
    assert len(asked(cluster, FIND_COORDINATOR)) == 1


@run_by(run)
async def test_a_group_whose_partition_has_no_leader_yet_is_waited_for(cluster: GroupCluster, admin: Admin, /) -> None:
    absent = reject(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    cluster.script(FIND_COORDINATOR, absent, absent, absent)
    assert await admin.list_group_offsets("billing") == {P0: OffsetAndMetadata(5)}


@run_by(run)
async def test_a_coordinator_that_was_killed_is_replaced_by_its_successor(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    await admin.list_group_offsets("billing")
    await cluster.nodes[0].stop()

    def successor(received: Received) -> None:
        if len(asked(cluster, FIND_COORDINATOR)) == 3:  # the first brokers asked do not know yet that it is dead
            cluster.coordinator = 1

    cluster.rules.append(successor)
    assert await admin.list_group_offsets("billing") == {P0: OffsetAndMetadata(5)}
    assert asked(cluster, OFFSET_FETCH) == [0, 1]


@pytest.mark.slow
@run_by(run)
async def test_a_coordinator_that_says_nothing_is_left_once_there_is_another(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    cluster.rules.append(lambda received: HANG if received.node_id == 0 else None)
    fetching = asyncio.ensure_future(admin.list_group_offsets("billing"))
    await cluster.until(lambda: bool(asked(cluster, OFFSET_FETCH)))
    cluster.coordinator = 2
    assert await fetching == {P0: OffsetAndMetadata(5)}
    assert asked(cluster, OFFSET_FETCH) == [0, 2]


@run_by(run)
async def test_after_the_time_for_it_the_last_error_is_raised(cluster: GroupCluster, admin: Admin, /) -> None:
    def third_time_leaps(received: Received) -> None:
        if received.api is FIND_COORDINATOR and len(cluster.requests(FIND_COORDINATOR)) % 3 == 0:
            leap(admin)

    def unavailable(received: Received) -> Action | None:
        return reject(ErrorCode.COORDINATOR_NOT_AVAILABLE) if received.api is FIND_COORDINATOR else None

    cluster.rules = [third_time_leaps, unavailable]
    with pytest.raises(BrokerError, match="COORDINATOR_NOT_AVAILABLE.*no leader, or .*: see `minibroker status`"):
        await admin.list_group_offsets("billing")
    await cluster.nodes[0].stop()
    cluster.rules = [third_time_leaps]
    with pytest.raises(NetworkError):
        await admin.list_group_offsets("billing")


@run_by(run)
async def test_an_answer_says_more_than_an_attempt_without_time_for_one(
    cluster: GroupCluster, admin: Admin, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minibroker.client.cluster.coordinators.FIRST_ATTEMPT_TIMEOUT_S", 10.0)
    left_s = 2.0
    seen: list[Received] = []

    def first_leaps(received: Received) -> None:
        if received.api is FIND_COORDINATOR:
            if not seen:
                leap(admin, 60 - left_s)
            seen.append(received)

    cluster.rules.append(first_leaps)
    cluster.script(FIND_COORDINATOR, reject(ErrorCode.COORDINATOR_NOT_AVAILABLE), *[HANG] * 30)
    with pytest.raises(BrokerError, match="COORDINATOR_NOT_AVAILABLE") as raised:
        await admin.list_group_offsets("billing")
    assert isinstance(raised.value.__cause__, NetworkError)


@run_by(run)
async def test_what_is_wrong_with_the_question_is_raised_at_once(cluster: GroupCluster, admin: Admin, /) -> None:
    cluster.script(FIND_COORDINATOR, reject(ErrorCode.INVALID_GROUP_ID))
    with pytest.raises(BrokerError) as raised:
        await admin.list_group_offsets("billing")
    assert raised.value.code is ErrorCode.INVALID_GROUP_ID
    for bad in ("", 7):
        with pytest.raises(InvalidSetting, match="give the name of a group"):
            await admin.list_group_offsets(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match=r"give a list: \['billing'\]"):
        await admin.describe_groups("billing")
    with pytest.raises(InvalidSetting, match="'Stable'"):
        await admin.list_groups(["stable"])
    with pytest.raises(InvalidSetting, match="offset=-1"):
        await admin.alter_group_offsets("billing", {P0: -1})


@run_by(run)
async def test_groups_are_listed_by_whoever_coordinates_them(cluster: GroupCluster, admin: Admin, /) -> None:
    cluster.committed["audit"] = {}
    cluster.members["audit"] = [MEMBER]
    assert [(each.group, each.state) for each in await admin.list_groups()] == [
        ("audit", "Stable"),
        ("billing", "Empty"),
    ]
    assert [each.group for each in await admin.list_groups(["Stable"])] == ["audit"]
    assert sorted(asked(cluster, LIST_GROUPS)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
@run_by(run, default_api_timeout_ms=2_000)
async def test_a_list_waits_for_brokers_that_are_busy_and_names_those_that_do_not_answer(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    cluster.script(LIST_GROUPS, DROP, reject(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
    assert [each.group for each in await admin.list_groups()] == ["billing"]
    cluster.rules.append(lambda r: DROP if r.api is LIST_GROUPS and r.node_id == 2 else None)
    with pytest.raises(BrokersFailed, match="^broker 2: ") as raised:
        await admin.list_groups()
    assert {broker: [each.group for each in found] for broker, found in raised.value.results.items()} == {
        0: ["billing"],
        1: [],
    }


@run_by(run)
async def test_a_group_that_is_not_there_is_an_error_and_the_others_are_described(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    with pytest.raises(GroupErrors, match="no: GROUP_ID_NOT_FOUND: there is no group no") as raised:
        await admin.describe_groups(["billing", "no"])
    described = raised.value.results["billing"]
    assert (described.state, described.coordinator.node_id, described.members) == ("Empty", 0, ())


@run_by(run)
async def test_members_whose_bytes_make_no_sense_are_described_without_them(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    cluster.members["billing"] = [MEMBER]
    (member,) = (await admin.describe_groups(["billing"]))["billing"].members
    assert member == ("app-1-x", None, "app", "10.0.0.7", None, None)


@run_by(run)
async def test_a_deletion_whose_answer_was_lost_counts_as_done_if_it_is_found_done(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    cluster.script(DELETE_GROUPS, CARRY_OUT_AND_DROP)
    await admin.delete_groups(["billing"])
    assert asked(cluster, DELETE_GROUPS) == [0, 0]
    assert cluster.committed == {}
    with pytest.raises(GroupErrors, match="billing: GROUP_ID_NOT_FOUND"):
        await admin.delete_groups(["billing"])
    cluster.committed["billing"] = {}
    cluster.script(DELETE_GROUPS, carry_out_and_answer(ErrorCode.REQUEST_TIMED_OUT))
    await admin.delete_groups(["billing"])
    cluster.script(DELETE_GROUPS, reject(ErrorCode.NOT_COORDINATOR))
    with pytest.raises(GroupErrors, match="billing: GROUP_ID_NOT_FOUND"):
        await admin.delete_groups(["billing"])


@pytest.mark.parametrize("change", ["delete", "commit"])
@run_by(run)
async def test_a_group_with_members_is_left_alone_and_the_error_names_them(
    cluster: GroupCluster, admin: Admin, /, change: str
) -> None:
    cluster.members["billing"] = [MEMBER]
    attempt = admin.delete_groups(["billing"]) if change == "delete" else admin.alter_group_offsets("billing", {P0: 1})
    with pytest.raises(MinibrokerError, match=r"NON_EMPTY_GROUP.* has members: app-1-x \(app at 10.0.0.7\)"):
        await attempt
    assert cluster.committed["billing"] == {P0: 5}


@run_by(run)
async def test_offsets_are_set_deleted_and_read_and_an_unknown_partition_fails_alone(
    cluster: GroupCluster, admin: Admin, /
) -> None:
    cluster.script(OFFSET_COMMIT, carry_out_and_answer(ErrorCode.COORDINATOR_NOT_AVAILABLE), DROP)
    with pytest.raises(PartitionErrors) as raised:
        await admin.alter_group_offsets("new", {P0: 3, P1: OffsetAndMetadata(4, 2, "why"), ("orders", 7): 1})  # type: ignore[dict-item]
    assert list(raised.value.errors) == [TopicPartition("orders", 7)]
    assert await admin.list_group_offsets("new", [P1, P0, TopicPartition("orders", 7)]) == {
        P0: OffsetAndMetadata(3),
        P1: OffsetAndMetadata(4),
        TopicPartition("orders", 7): None,
    }
    (sent,) = cluster.requests(OFFSET_COMMIT)[-1].topics
    assert [(p.committed_leader_epoch, p.committed_metadata) for p in sent.partitions] == [(-1, ""), (2, "why")]
    await admin.delete_group_offsets("new", [P0])
    assert await admin.list_group_offsets("new") == {P1: OffsetAndMetadata(4)}
    assert len(asked(cluster, OFFSET_DELETE)) == 1
    assert len(asked(cluster, DESCRIBE_GROUPS)) == 0
