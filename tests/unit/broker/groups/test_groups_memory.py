"""What members and offsets of strangers may take, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from minibroker.broker.coordinating.kept import COUNT_INTERVAL_S
from minibroker.broker.groups import commits, room
from minibroker.broker.groups.commits import LONG_METADATA
from minibroker.broker.groups.coordinator import UNASSIGNED_SESSION_S
from minibroker.broker.groups.group import MEMBER_BYTES
from minibroker.broker.groups.room import LOOK_INTERVAL_S, Room
from minibroker.broker.groups.terms import GROUP_BYTES, OFFSET_BYTES
from minibroker.broker.network.request_channel import Session
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition
from tests.groups_support import CoordinatedGroups, with_groups
from tests.running import run_by

DAY_MS = 86_400_000
HALF_HOUR_MS = 1_800_000
LARGE = [("range", bytes(900_000))]


def join_alone(
    groups: CoordinatedGroups, group_id: str, connection: Session | None = None, size: int = 900_000
) -> asyncio.Future[g.JoinGroupResponse]:
    """Join as the attacker does: without an id, with a long session and a longer rebalance."""
    return groups.join(
        group_id=group_id,
        protocols=[("range", bytes(size))],
        session_timeout_ms=HALF_HOUR_MS,
        rebalance_timeout_ms=DAY_MS,
        connection=connection,
        requires_known_member_id=False,
    )


@run_by(with_groups)
async def test_a_member_whose_client_hangs_up_before_its_first_generation_is_forgotten(
    groups: CoordinatedGroups, /
) -> None:
    connection = Session()
    join_alone(groups, "stranger", connection)
    assert groups.groups.members._kept_bytes() > 900_000
    connection.end()
    await asyncio.sleep(10)
    assert groups.groups.members._kept_bytes() < 10_000
    assert not groups.group("stranger").members


@run_by(with_groups)
async def test_a_member_whose_client_hangs_up_before_its_first_assignment_has_a_short_session(
    groups: CoordinatedGroups, /
) -> None:
    connection = Session()
    joined = await join_alone(groups, "stranger", connection)
    connection.end()
    await asyncio.sleep(UNASSIGNED_SESSION_S / 2)
    beat = groups.heartbeat(joined.member_id, joined.generation_id, group_id="stranger")
    assert beat is ErrorCode.NONE  # it is back on another connection, with its whole session
    await asyncio.sleep(2 * UNASSIGNED_SESSION_S)
    assert groups.group("stranger").members

    silent = Session()
    await join_alone(groups, "silent", silent)
    silent.end()
    await asyncio.sleep(UNASSIGNED_SESSION_S + 1)
    assert not groups.group("silent").members


@run_by(with_groups)
async def test_a_member_with_an_assignment_outlives_its_connection(groups: CoordinatedGroups, /) -> None:
    connection = Session()
    joined = await join_alone(groups, "honest", connection)
    sync = groups.sync(joined.member_id, joined.generation_id, {joined.member_id: b"all"}, group_id="honest")
    assert bytes((await sync).assignment) == b"all"
    assert not connection._at_end
    connection.end()
    await asyncio.sleep(UNASSIGNED_SESSION_S + 1)
    beat = groups.heartbeat(joined.member_id, joined.generation_id, group_id="honest")
    assert beat is ErrorCode.NONE


@run_by(with_groups)
async def test_members_of_all_groups_stay_within_a_budget_that_members_leave_again(
    groups: CoordinatedGroups, /
) -> None:
    groups.groups.members.room.limit = 5_000_000
    connections = [Session() for _ in range(8)]
    joins = [join_alone(groups, f"stranger-{number}", one) for number, one in enumerate(connections)]
    refused = [join.result() for join in joins if join.done()]
    assert len(refused) == 3
    assert {answer.error_code for answer in refused} == {ErrorCode.COORDINATOR_NOT_AVAILABLE}
    assert "try again later" in (refused[0].error_message or "")
    small = groups.join(group_id="honest", requires_known_member_id=False)
    for one in connections:
        one.end()
    await asyncio.sleep(1)
    join_alone(groups, "later")
    await asyncio.sleep(10)
    assert small.result().error_code == ErrorCode.NONE
    assert groups.groups.members._kept_bytes() < 2_000_000


@run_by(with_groups)
async def test_a_group_that_could_never_be_stored_takes_no_more_members(
    groups: CoordinatedGroups, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_GROUP_METADATA_BYTES", 2_000_000)
    joins = [join_alone(groups, "large") for _ in range(3)]
    assert [join.done() for join in joins] == [False, False, True]
    refused = joins[2].result()
    assert refused.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert "a group may have 2000000" in (refused.error_message or "")


@run_by(with_groups)
async def test_long_metadata_of_offsets_is_refused_beyond_a_budget_and_short_metadata_never(
    groups: CoordinatedGroups, /
) -> None:
    groups.groups.commits.room.limit = 10_000
    long = "m" * 4_000
    codes = [await groups.commit(1, group_id=f"stranger-{number}", metadata=long) for number in range(4)]
    assert codes == [0, 0, ErrorCode.OFFSET_METADATA_TOO_LARGE, ErrorCode.OFFSET_METADATA_TOO_LARGE]
    assert await groups.commit(1, group_id="honest", metadata="m" * LONG_METADATA) == 0
    assert await groups.committed(group_id="honest") == 1
    await groups.commit(2, group_id="stranger-0", metadata="")
    await asyncio.sleep(1)
    assert await groups.commit(3, group_id="stranger-3", metadata=long) == 0
    assert groups.groups.commits._metadata_length() == 2 * len(long) + LONG_METADATA
    assert groups.groups.commits._being_written == 0


@run_by(with_groups)
async def test_metadata_of_open_transactions_counts(groups: CoordinatedGroups, /) -> None:
    await groups.commit_in_transaction(1, metadata="m" * 3_000)
    assert groups.group().offsets.metadata_length == 3_000
    groups.end_transaction(committed=True)
    await asyncio.sleep(1)
    assert groups.group().offsets.metadata_length == 3_000
    assert groups.group().offsets.get(TopicPartition("orders", 0)) is not None


@run_by(with_groups)
async def test_offsets_of_open_transactions_and_longer_metadata_count_towards_the_budget(
    groups: CoordinatedGroups, /
) -> None:
    kept = groups.groups.terms.kept
    assert await groups.commit(1) == 0
    kept.limit = kept.kept + 2 * OFFSET_BYTES
    for offset in range(5):
        assert await groups.commit_in_transaction(offset) == 0, "it takes the place of the last one"
    assert groups.group().offsets.in_all == 2
    assert await groups.commit(2, metadata="m" * OFFSET_BYTES) == 0
    assert await groups.commit(3, metadata="m" * 2 * OFFSET_BYTES) == ErrorCode.POLICY_VIOLATION
    assert await groups.commit(3, metadata="m" * OFFSET_BYTES) == 0


@run_by(with_groups)
async def test_new_groups_and_offsets_are_refused_beyond_a_budget_and_known_ones_go_on(
    groups: CoordinatedGroups, /, caplog: pytest.LogCaptureFixture
) -> None:
    kept = groups.groups.terms.kept
    kept.limit = 4 * (GROUP_BYTES + OFFSET_BYTES)
    codes = [await groups.commit(1, group_id=f"stranger-{number}") for number in range(6)]
    assert codes == [0, 0, 0, ErrorCode.POLICY_VIOLATION, ErrorCode.POLICY_VIOLATION, ErrorCode.POLICY_VIOLATION]
    assert (await groups.join(group_id="honest")).error_code == ErrorCode.POLICY_VIOLATION
    assert "the groups of this broker would take more than 8000 bytes" in caplog.text
    assert await groups.commit(2, group_id="stranger-0") == 0
    assert await groups.committed(group_id="stranger-0") == 2
    for number in range(3):
        assert await groups.groups.removal.delete(f"stranger-{number}") == 0
    await asyncio.sleep(COUNT_INTERVAL_S)
    await groups.commit(1, group_id="honest")
    await asyncio.sleep(1)
    assert await groups.commit(1, group_id="honest") == 0
    assert kept.kept < 2 * (GROUP_BYTES + OFFSET_BYTES)


class _Time:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 0

    def observed_ms(self) -> int:
        return self.wall_ms()


def test_what_is_kept_is_counted_only_if_the_limit_may_be_reached_and_not_often() -> None:
    counts: list[int] = []
    time = _Time()

    def count() -> int:
        counts.append(0)
        return 40

    of_members = Room(100, time, count)
    assert all(of_members.add(25) for _ in range(4))
    assert not counts
    assert of_members.add(25)  # 40 of the 100 bytes are left
    assert len(counts) == 1
    assert of_members.add(35)
    assert not of_members.add(1)
    assert len(counts) == 1
    assert of_members.refused == 1
    time.now_s += LOOK_INTERVAL_S
    assert of_members.add(1)
    assert not of_members.add(MEMBER_BYTES)
    assert commits.MOST_METADATA_LENGTH > LONG_METADATA
