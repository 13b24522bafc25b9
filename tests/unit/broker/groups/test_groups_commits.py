"""Committed offsets at one coordinator: who may commit, when a commit becomes visible, and when it is deleted."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from minibroker.broker.coordinating.terms import UNWRITTEN_S
from minibroker.broker.groups.records import OffsetKey, decode_key, decode_offset_value
from minibroker.broker.groups.states import GroupState
from minibroker.protocol.consumer_protocol import ConsumerProtocolSubscription, encode_subscription
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import OFFSETS_TOPIC, TopicPartition
from minibroker.protocol.records import decode_batch, iterate_batches
from minibroker.protocol.topic_ids import make
from tests.groups_support import GROUP, OFFSETS, OFFSETS_ID, ORDERS_ID, CoordinatedGroups, with_groups
from tests.replication_support import ME, ORDERS
from tests.running import run_by
from tests.waiting import until

E = ErrorCode
NEWER_ID = make(1, 3, b"orders")
UNIT_S = 6.0
SHORT = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "6000"}
"""Offsets are kept for ten units, and the check runs once in each."""


def log_of(groups: CoordinatedGroups) -> list[tuple[bytes, bytes | None]]:
    """Return keys and values of all records."""
    log = groups.broker.partition(OFFSETS).log
    data = log.read(0, 1 << 20, log.log_end_offset)
    found: list[tuple[bytes, bytes | None]] = []
    for piece in iterate_batches(data):
        batch = decode_batch(data, piece.header, piece.start)
        found += zip((key or b"" for key in batch.keys or ()), batch.values, strict=True)
    return found


# --- who may commit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"generation_id": 0}, E.ILLEGAL_GENERATION),
        ({"generation_id": 2}, E.ILLEGAL_GENERATION),
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"member_id": "", "generation_id": -1}, E.UNKNOWN_MEMBER_ID),
        ({"group_id": "other"}, E.ILLEGAL_GENERATION),
        ({"group_id": ""}, E.ILLEGAL_GENERATION),
        ({"partition": TopicPartition("unknown", 0)}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partition": TopicPartition("orders", 1)}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"topic_id": NEWER_ID}, E.INCONSISTENT_TOPIC_ID),
        ({"topic_id": ORDERS_ID}, E.NONE),
        ({"metadata": "é" * 4_097}, E.OFFSET_METADATA_TOO_LARGE),
        ({"metadata": "é" * 4_096}, E.NONE),
        ({"metadata": "𝄞" * 2_049}, E.OFFSET_METADATA_TOO_LARGE),
        ({"metadata": "𝄞" * 2_048}, E.NONE),
        ({}, E.NONE),
    ],
)
@run_by(with_groups)
async def test_a_rejected_commit_returns_the_reason(
    groups: CoordinatedGroups, /, change: dict[str, object], expected: ErrorCode
) -> None:
    (member,) = await groups.stable()
    asked = {"offset": 7, "member_id": member, "generation_id": 1} | change
    assert await groups.commit(**asked) == expected  # type: ignore[arg-type]
    assert await groups.committed() == (7 if expected is E.NONE else -1)


@pytest.mark.parametrize("offset", [-1, -2, -5, -(2**63)])
@run_by(with_groups)
async def test_a_negative_offset_is_stored_and_returned_unchanged(groups: CoordinatedGroups, /, offset: int) -> None:
    """kafkajs resets offsets by committing -1 or -2."""

    assert await groups.commit(7) == E.NONE
    assert await groups.commit(offset) == E.NONE
    assert await groups.committed() == offset
    key, value = log_of(groups)[-1]
    assert decode_key(key) == OffsetKey(GROUP, *ORDERS)
    assert value is not None
    assert decode_offset_value(value).offset == offset


@run_by(with_groups)
async def test_the_group_without_a_name_has_offsets_and_no_members(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit(7, group_id="") == E.NONE
    assert (await groups.fetch(group_id="")).topics[0].partitions[0].committed_offset == 7
    assert await delete_offset(groups, group_id="") == E.INVALID_GROUP_ID


@run_by(with_groups)
async def test_members_commit_while_the_group_gathers_and_not_while_it_is_shared_out(
    groups: CoordinatedGroups, /
) -> None:
    one, other = await groups.stable(2)
    groups.leave(other)
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE)
    assert await groups.commit(1, member_id=one, generation_id=1) == E.NONE
    await groups.join(one)
    assert await groups.commit(2, member_id=one, generation_id=1) == E.ILLEGAL_GENERATION
    assert await groups.commit(2, member_id=one, generation_id=2) == E.REBALANCE_IN_PROGRESS
    assert await groups.committed() == 1


@run_by(with_groups)
async def test_a_client_that_is_no_member_commits_to_a_group_without_members(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit(3) == E.NONE
    (member,) = await groups.stable()
    assert await groups.committed() == 3
    assert await groups.commit(4) == E.UNKNOWN_MEMBER_ID
    groups.leave(member)
    assert await groups.commit(2) == E.NONE
    assert await groups.committed() == 2  # such a client may move the offset back


# --- when a commit becomes visible ----------------------------------------------------------------------------------


@run_by(with_groups, lead=False)
async def test_a_commit_is_answered_and_visible_when_it_is_replicated(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    committing = groups.commit(7)
    fetching = groups.fetch()
    await asyncio.sleep(1)
    assert not committing.done()
    assert not fetching.done()
    groups.replicate(2)
    assert not committing.done()
    groups.replicate(3)
    assert await committing == E.NONE
    assert (await fetching).topics[0].partitions[0].committed_offset == 7


@run_by(with_groups, lead=False)
async def test_a_commit_not_replicated_in_time_fails_and_is_visible_once_replicated(
    groups: CoordinatedGroups, /
) -> None:
    """The next coordinator would find it in the log; a member that went on from the earlier offset would set it
    back."""

    await groups.lead(isr=(ME, 2, 3))
    assert await groups.commit(7) == E.COORDINATOR_NOT_AVAILABLE
    assert groups.groups.terms.loaded()[0].groups[GROUP].offsets.items() == []
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == 7
    await groups.follow(1)
    await groups.lead(2)
    assert await groups.committed() == 7


def test_writes_that_keep_failing_log_one_warning_per_interval(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(groups: CoordinatedGroups) -> None:
        await groups.lead(isr=(ME, 2, 3))
        await asyncio.gather(*(groups.commit(offset) for offset in range(20)))
        await asyncio.sleep(UNWRITTEN_S)

    with_groups(tmp_path, scenario, lead=False)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in said if "group state" in line] == [
        "within 5 s 20 writes of group state to __consumer_offsets-0 failed: REQUEST_TIMED_OUT; clients retry"
    ]


@run_by(with_groups, lead=False)
async def test_a_deletion_not_replicated_in_time_fails_and_counts_once_replicated(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    committing = groups.commit(7)
    groups.replicate(2, 3)
    assert await committing == E.NONE
    assert await delete_offset(groups) == E.COORDINATOR_NOT_AVAILABLE
    assert len(groups.group().offsets) == 1
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == -1


@run_by(with_groups, lead=False)
async def test_the_commit_after_a_failed_one_counts(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    assert await groups.commit(7) == E.COORDINATOR_NOT_AVAILABLE
    committing = groups.commit(5)
    groups.replicate(2, 3)
    assert await committing == E.NONE
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == 5


@run_by(with_groups, lead=False)
async def test_a_failed_commit_that_the_next_leader_lacks_is_never_visible(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    assert await groups.commit(7) == E.COORDINATOR_NOT_AVAILABLE
    (old,) = groups.groups.terms.loaded()
    await groups.follow(1)
    groups.broker.partition(OFFSETS).log.truncate_to(0)
    await groups.lead(2)
    assert await groups.committed() == -1
    assert old.groups[GROUP].offsets.items() == []


@run_by(with_groups, lead=False)
async def test_a_coordinator_without_followers_returns_no_offset(groups: CoordinatedGroups, /) -> None:
    """It cannot know whether it still coordinates the group, so its offsets may be out of date."""

    await groups.lead(isr=(ME, 2, 3))
    committing = groups.commit(7)
    groups.replicate(2, 3)
    assert await committing == E.NONE
    assert (await groups.fetch()).error_code == E.COORDINATOR_NOT_AVAILABLE


@run_by(with_groups, lead=False)
async def test_one_record_confirms_all_concurrent_offset_requests(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    fetches = [groups.fetch()]
    fetches += [groups.fetch() for _ in range(9)]
    groups.replicate(2, 3)
    await fetches[0]
    groups.replicate(2, 3)
    await asyncio.gather(*fetches)
    assert groups.broker.partition(OFFSETS).log.log_end_offset == 2


@run_by(with_groups)
async def test_a_broker_without_a_possible_successor_writes_no_record_to_return_an_offset(
    groups: CoordinatedGroups, /
) -> None:
    assert await groups.commit(7) == E.NONE
    assert await groups.committed() == 7
    assert len(log_of(groups)) == 1


@run_by(with_groups)
async def test_an_unknown_group_has_no_offsets(groups: CoordinatedGroups, /) -> None:
    assert await groups.committed(group_id="other") == -1
    assert (await groups.fetch(group_id="")).error_code == E.NONE


# --- topics that are gone ----------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_the_offsets_of_a_deleted_topic_go_and_the_next_one_of_its_name_has_none(
    groups: CoordinatedGroups, /
) -> None:
    assert await groups.commit(7) == E.NONE
    groups.announce({}, deleted={"orders": ORDERS_ID}, last=False)
    await until(lambda: not len(groups.group().offsets))
    key, value = log_of(groups)[-1]
    assert (decode_key(key), value) == (OffsetKey(GROUP, "orders", 0), None)
    groups.announce({"orders": NEWER_ID}, last=False)
    assert await groups.committed() == -1
    assert await groups.commit(8, topic_id=ORDERS_ID) == E.INCONSISTENT_TOPIC_ID
    assert await groups.commit(1, topic_id=NEWER_ID) == E.NONE
    fetched = await groups.fetch()
    assert (fetched.topics[0].topic_id, fetched.topics[0].partitions[0].committed_offset) == (NEWER_ID, 1)


@run_by(with_groups)
async def test_offsets_of_a_topic_deleted_unseen_go_when_its_next_namesake_appears(
    groups: CoordinatedGroups, /
) -> None:
    assert await groups.commit(7) == E.NONE
    groups.announce({"orders": NEWER_ID}, last=False)
    await until(lambda: not len(groups.group().offsets))


@run_by(with_groups, lead=False)
async def test_a_topic_that_this_broker_has_not_heard_of_yet_keeps_its_offsets(groups: CoordinatedGroups, /) -> None:
    """They were committed at another coordinator, which knew the topic."""

    await groups.lead()
    assert await groups.commit(7) == E.NONE
    await groups.follow(1)
    metadata = groups.broker.metadata
    metadata._topics.pop("orders")  # as if the request that announced it had gone only to other brokers
    await groups.lead(2)
    await asyncio.sleep(1)
    fetched = (await groups.fetch()).topics[0]
    assert (fetched.topic_id, fetched.partitions[0].committed_offset) == (ORDERS_ID, 7)
    # The next controller names all topics except this one, whose znode it cannot read.
    groups.announce({OFFSETS_TOPIC: OFFSETS_ID}, epoch=2)
    await asyncio.sleep(1)
    assert await groups.committed() == 7
    groups.announce({"orders": ORDERS_ID}, epoch=3)
    assert await groups.committed() == 7
    groups.broker.metadata._topics.pop("orders")
    groups.announce({}, deleted={"orders": ORDERS_ID}, epoch=3)
    await until(lambda: not len(groups.group().offsets))


# --- deleting ----------------------------------------------------------------------------------------------------


def subscribed_to(*topics: str) -> tuple[tuple[str, bytes], ...]:
    return (("range", encode_subscription(ConsumerProtocolSubscription(list(topics)))),)


async def delete_offset(groups: CoordinatedGroups, partition: TopicPartition = ORDERS, group_id: str = GROUP) -> int:
    answer: asyncio.Future[g.OffsetDeleteResponse] = asyncio.get_running_loop().create_future()
    body = g.OffsetDeleteRequest(group_id, [g.OffsetDeleteTopic(partition.topic, [partition.partition])])
    groups.groups.commits.delete(body, answer.set_result)
    response = await answer
    return response.error_code or response.topics[0].partitions[0].error_code


@run_by(with_groups)
async def test_offsets_are_deleted_one_by_one(groups: CoordinatedGroups, /) -> None:
    assert await delete_offset(groups) == E.GROUP_ID_NOT_FOUND
    await groups.commit(7)
    assert await delete_offset(groups, TopicPartition("orders", 5)) == E.NONE
    assert await groups.committed() == 7
    assert await delete_offset(groups) == E.NONE
    assert await groups.committed() == -1


@run_by(with_groups)
async def test_offsets_of_a_topic_that_a_member_reads_are_not_deleted(groups: CoordinatedGroups, /) -> None:
    await groups.commit(7)
    member = groups.join(protocols=subscribed_to("orders")).result().member_id
    joined = await groups.join(member, protocols=subscribed_to("orders"))
    assert (
        await delete_offset(groups) == E.GROUP_SUBSCRIBED_TO_TOPIC
    )  # while it is unknown which member reads which topic
    await groups.sync(member, joined.generation_id, {})
    assert await delete_offset(groups) == E.GROUP_SUBSCRIBED_TO_TOPIC
    groups.join(member, protocols=subscribed_to("other"))
    await groups.sync(member, 2, {})
    assert await delete_offset(groups) == E.NONE


@run_by(with_groups)
async def test_a_group_without_members_is_deleted_with_its_offsets(groups: CoordinatedGroups, /) -> None:
    removal = groups.groups.removal
    assert await removal.delete(GROUP) is E.GROUP_ID_NOT_FOUND
    (member,) = await groups.stable()
    await groups.commit(7, member_id=member, generation_id=1)
    assert await removal.delete(GROUP) is E.NON_EMPTY_GROUP
    groups.leave(member)
    assert await removal.delete(GROUP) is E.NONE
    assert await groups.committed() == -1
    await groups.follow(1)
    await groups.lead(2)
    assert groups.groups.terms.loaded()[0].groups == {}


@pytest.mark.parametrize("deletes", ["the group", "the offset"])
@pytest.mark.parametrize("times_out", [False, True])
@run_by(with_groups, lead=False)
async def test_a_deleted_offset_does_not_come_back_with_a_commit_in_flight(
    groups: CoordinatedGroups, /, deletes: str, times_out: bool
) -> None:
    await groups.lead(isr=(ME, 2, 3))
    before = groups.commit(7, partition=TopicPartition(OFFSETS_TOPIC, 0))
    groups.replicate(2, 3)
    await before
    committing = groups.commit(8)
    if times_out:
        assert await committing == E.COORDINATOR_NOT_AVAILABLE
    whole = deletes == "the group"
    deleting = asyncio.ensure_future(groups.groups.removal.delete(GROUP) if whole else delete_offset(groups))
    async with asyncio.timeout(30):
        while not deleting.done():
            groups.replicate(2, 3)
            await asyncio.sleep(0.05)
    assert await deleting == E.NONE
    await groups.follow(1)
    await groups.lead(2)
    (term,) = groups.groups.terms.loaded()
    assert [str(partition) for one in term.groups.values() for partition, _ in one.offsets.items()] == (
        [] if whole else [f"{OFFSETS_TOPIC}-0"]
    )


@run_by(with_groups, lead=False)
async def test_a_group_whose_deletion_is_in_doubt_is_hidden_until_it_is_certain(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    committing = groups.commit(7)
    groups.replicate(2, 3)
    await committing
    assert await groups.groups.removal.delete(GROUP) is E.COORDINATOR_NOT_AVAILABLE  # no follower fetches
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).error_code == E.COORDINATOR_NOT_AVAILABLE
    assert groups.commit(8).result() == E.COORDINATOR_NOT_AVAILABLE
    assert groups.join().result().error_code == E.COORDINATOR_NOT_AVAILABLE

    async def followers() -> None:
        while groups.groups.terms.loaded()[0].groups:
            groups.replicate(2, 3)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(30):
        await followers()
    committing = groups.commit(8)
    groups.replicate(2, 3)
    assert await committing == E.NONE


# --- retention ---------------------------------------------------------------------------------------------------


@run_by(with_groups, settings=SHORT)
async def test_retention_of_offsets_begins_when_the_group_loses_its_last_member(groups: CoordinatedGroups, /) -> None:
    (member,) = await groups.stable(session_timeout_ms=1_800_000)
    await groups.commit(7, member_id=member, generation_id=1)
    await asyncio.sleep(20 * UNIT_S)
    assert await groups.committed() == 7  # the coordinator cannot know what these members read
    groups.leave(member)
    await asyncio.sleep(8 * UNIT_S)
    assert await groups.committed() == 7
    await asyncio.sleep(4 * UNIT_S)
    assert await groups.committed() == -1
    assert groups.groups.terms.loaded()[0].groups == {}
    assert {key for key, value in log_of(groups) if value is None} == {key for key, _ in log_of(groups)}


@run_by(with_groups, settings=SHORT)
async def test_offsets_of_a_loaded_group_are_kept_as_long_as_those_of_any_other(groups: CoordinatedGroups, /) -> None:
    """KAFKA-8069: the log records since when a group has been empty."""

    (member,) = await groups.stable(session_timeout_ms=1_800_000)
    await groups.commit(7, member_id=member, generation_id=1)
    await asyncio.sleep(20 * UNIT_S)
    groups.leave(member)
    await groups.follow(1)
    await groups.lead(2)
    await asyncio.sleep(8 * UNIT_S)
    assert await groups.committed() == 7
    await asyncio.sleep(4 * UNIT_S)
    assert await groups.committed() == -1


@run_by(with_groups, settings=SHORT)
async def test_offsets_of_topics_in_use_are_kept_during_a_rebalance_and_others_are_not(
    groups: CoordinatedGroups, /
) -> None:
    """KAFKA-13636: during a rebalance the coordinator does not know what the members read."""

    other = TopicPartition("other", 0)
    groups.announce({"other": make(1, 9, b"others")}, last=False)
    await groups.commit(7)
    await groups.commit(3, partition=other)
    protocols = subscribed_to("orders")

    async def rejoin(member: str) -> None:
        joined = await groups.join(
            member, protocols=protocols, session_timeout_ms=1_800_000, rebalance_timeout_ms=1_800_000
        )
        await groups.sync(member, joined.generation_id, {})

    member = groups.join(protocols=protocols).result().member_id
    await rejoin(member)
    away = groups.join(protocols=protocols, rebalance_timeout_ms=1_800_000, session_timeout_ms=1_800_000)
    groups.join(away.result().member_id, protocols=protocols, rebalance_timeout_ms=1_800_000)
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE)
    for _ in range(20):
        groups.heartbeat(member, 1)
        await asyncio.sleep(UNIT_S)
    assert groups.group().is_in(GroupState.PREPARING_REBALANCE)
    assert (await groups.committed(), await groups.committed(other)) == (7, 3)
    groups.leave(away.result().member_id)
    await rejoin(member)
    assert groups.group().is_in(GroupState.STABLE)
    await asyncio.sleep(2 * UNIT_S)
    assert (await groups.committed(), await groups.committed(other)) == (7, -1)


@run_by(with_groups, settings=SHORT)
async def test_retention_begins_when_members_stop_reading_a_topic_however_old_the_commit_is(
    groups: CoordinatedGroups, /
) -> None:
    other = TopicPartition("other", 0)
    groups.announce({"other": make(1, 9, b"others")}, last=False)
    await groups.commit(7)
    await groups.commit(3, partition=other)

    async def join(member_id: str, *topics: str) -> str:
        joined = await groups.join(member_id, protocols=subscribed_to(*topics), session_timeout_ms=1_800_000)
        await groups.sync(joined.member_id, joined.generation_id, {})
        return joined.member_id

    member = await join(groups.join(protocols=subscribed_to("orders")).result().member_id, "orders", "other")
    await asyncio.sleep(20 * UNIT_S)
    assert (await groups.committed(), await groups.committed(other)) == (7, 3)
    await join(member, "orders")
    await asyncio.sleep(8 * UNIT_S)
    assert (await groups.committed(), await groups.committed(other)) == (7, 3)
    await asyncio.sleep(4 * UNIT_S)
    assert (await groups.committed(), await groups.committed(other)) == (7, -1)


@run_by(with_groups, settings=SHORT)
async def test_a_wall_clock_that_jumps_ahead_deletes_no_offset(groups: CoordinatedGroups, /) -> None:
    await groups.commit(7)
    await asyncio.sleep(UNIT_S)
    groups.broker.world._host.clock_offset_ms += 30 * 24 * 3_600_000
    await asyncio.sleep(5 * UNIT_S)
    assert await groups.committed() == 7
    await asyncio.sleep(6 * UNIT_S)
    assert await groups.committed() == -1
