"""Offsets that a transaction commits: they count once its commit marker is replicated, and never after an abort."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from minibroker.broker.groups.group import Group
from minibroker.broker.groups.offsets import GroupOffsets
from minibroker.broker.groups.terms import GroupTerm
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.fields import Attempt
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.topic_ids import make
from tests.groups_support import GROUP, OFFSETS, ORDERS_ID, CoordinatedGroups, with_groups
from tests.replication_support import ME, ORDERS
from tests.running import run_by
from tests.unit.broker.groups.test_groups_compacted_load import compact, load_again
from tests.unit.broker.groups.test_groups_offsets import OTHER, offset_of, value

E = ErrorCode
NEWER_ID = make(1, 3, b"orders")
SHORT = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "6000"}
A, B = 7, 8
"""Producers."""


# --- the rules ---------------------------------------------------------------------------------------------------


def test_an_offset_of_a_transaction_counts_from_the_commit_marker_on() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    assert offset_of(offsets) == 3
    assert offsets.of_transactions() == {ORDERS}
    offsets.end_transaction(A, 11, is_committed=True, now_s=0)
    assert offset_of(offsets) == 5
    assert offsets.of_transactions() == set()


def test_an_offset_of_an_aborted_transaction_never_counts() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    offsets.end_transaction(A, 11, is_committed=False, now_s=0)
    assert offset_of(offsets) == 3
    assert offsets.of_transactions() == set()


def test_the_last_offset_of_a_transaction_counts() -> None:
    offsets = GroupOffsets()
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    offsets.add_of_transaction(A, ORDERS, value(6), 11)
    offsets.end_transaction(A, 12, is_committed=True, now_s=0)
    assert offset_of(offsets) == 6


@pytest.mark.parametrize("is_complete_before_the_marker", [False, True])
def test_a_later_commit_wins_over_an_earlier_one_of_a_transaction(is_complete_before_the_marker: bool) -> None:
    offsets = GroupOffsets()
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    offsets.begin([ORDERS])
    if is_complete_before_the_marker:
        offsets.complete(ORDERS, value(6), 11, 0)
        offsets.end_transaction(A, 12, is_committed=True, now_s=0)
    else:
        offsets.end_transaction(A, 12, is_committed=True, now_s=0)
        offsets.complete(ORDERS, value(6), 11, 0)
    assert offset_of(offsets) == 6


@pytest.mark.parametrize("is_complete_before_the_marker", [False, True])
def test_a_later_tombstone_wins_over_an_earlier_offset_of_a_transaction(is_complete_before_the_marker: bool) -> None:
    offsets = GroupOffsets()
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    offsets.begin(offsets.to_delete())
    if is_complete_before_the_marker:
        offsets.complete(ORDERS, None, 11, 0)
        offsets.end_transaction(A, 12, is_committed=True, now_s=0)
    else:
        offsets.end_transaction(A, 12, is_committed=True, now_s=0)
        offsets.complete(ORDERS, None, 11, 0)
    assert offset_of(offsets) is None
    assert offsets.is_unused


def test_an_earlier_commit_that_completes_late_does_not_undo_a_transaction() -> None:
    offsets = GroupOffsets()
    offsets.begin([ORDERS])
    offsets.add_of_transaction(A, ORDERS, value(6), 11)
    offsets.end_transaction(A, 12, is_committed=True, now_s=0)
    offsets.complete(ORDERS, value(5), 10, 0)
    assert offset_of(offsets) == 6


def test_of_two_transactions_the_later_record_counts_in_any_order_of_the_markers() -> None:
    for first, second in ((A, B), (B, A)):
        offsets = GroupOffsets()
        offsets.add_of_transaction(A, ORDERS, value(5), 10)
        offsets.add_of_transaction(B, ORDERS, value(6), 11)
        offsets.end_transaction(first, 12, is_committed=True, now_s=0)
        offsets.end_transaction(second, 13, is_committed=True, now_s=0)
        assert offset_of(offsets) == 6
        assert offsets.of_transactions() == set()


def test_of_a_transactions_offsets_for_a_partition_only_the_last_is_kept() -> None:
    offsets = GroupOffsets()
    for log_offset in range(10, 20):
        offsets.add_of_transaction(A, ORDERS, value(log_offset), log_offset)
        offsets.add_of_transaction(B, ORDERS, value(log_offset), log_offset)
    assert offsets.in_all == 2
    offsets.end_transaction(A, 20, is_committed=True, now_s=0)
    assert offset_of(offsets) == 19


def test_a_marker_ends_no_transaction_that_began_after_it() -> None:
    offsets = GroupOffsets()
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    offsets.add_of_transaction(A, ORDERS, value(6), 12, began_after=11)  # while the marker is being replicated
    assert offsets.in_all == 2
    offsets.end_transaction(A, 11, is_committed=True, now_s=0)
    assert offset_of(offsets) == 5
    offsets.end_transaction(A, 13, is_committed=False, now_s=0)
    assert offset_of(offsets) == 5
    assert offsets.of_transactions() == set()


def test_an_offset_does_not_replace_that_of_a_transaction_whose_marker_is_being_replicated() -> None:
    term = GroupTerm(OFFSETS, 0, 0, 0)
    group = term.groups["transfers"] = Group("transfers")
    group.offsets.load(OTHER, value(1), 1, 0)
    for log_offset, last in ((10, 5), (20, 6)):
        term.add_of_transaction(A, group, ORDERS, value(last), log_offset)
        term.marker_appended(A, log_offset + 1)
    term.add_of_transaction(A, group, ORDERS, value(7), 30)
    for marker_offset, last in ((11, 5), (21, 6)):
        term.end_transaction(A, marker_offset, is_committed=True, now_s=0)
        assert offset_of(group.offsets) == last
    term.add_of_transaction(A, group, ORDERS, value(8), 31)
    assert group.offsets.in_all == 3, "nothing is in doubt any more"


def test_offsets_of_open_transactions_do_not_expire_and_keep_their_group() -> None:
    offsets = GroupOffsets()
    offsets.load(ORDERS, value(3), 1, 0)
    offsets.load(OTHER, value(3), 2, 0)
    offsets.add_of_transaction(A, ORDERS, value(5), 10)

    def expired() -> list[TopicPartition]:
        return offsets.expired(100, 10, unused_since_s=None, topics_unused_since_s={}, subscribed=frozenset())

    assert expired() == [OTHER]
    assert [partition for partition, _ in offsets.settled()] == [OTHER]
    offsets.end_transaction(A, 11, is_committed=False, now_s=0)
    assert expired() == [ORDERS, OTHER]
    offsets = GroupOffsets()
    offsets.add_of_transaction(A, ORDERS, value(5), 10)
    assert not offsets.is_unused


# --- at the coordinator ------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_offsets_are_visible_with_their_transaction(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit(3) == E.NONE
    assert await groups.commit_in_transaction(5) == E.NONE
    assert groups.questions == [(OFFSETS, "transfers", True)]
    assert await groups.committed() == 3
    assert await groups.stable_offset() == E.UNSTABLE_OFFSET_COMMIT
    groups.end_transaction(committed=True)
    assert await groups.committed() == 5
    assert await groups.stable_offset() == 5


@run_by(with_groups)
async def test_offsets_of_an_aborted_transaction_are_forgotten(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit_in_transaction(5) == E.NONE
    groups.end_transaction(committed=False)
    assert await groups.stable_offset() == -1
    assert groups.groups.terms.loaded()[0].groups == {}


@run_by(with_groups, lead=False)
async def test_offsets_are_not_visible_before_the_marker_is_replicated(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    committing = groups.commit_in_transaction(5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    groups.replicate(2, 3)
    assert await committing == E.NONE
    fetching = groups.fetch()
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == -1
    groups.end_transaction(committed=True)
    assert groups.group().offsets.get(ORDERS) is None
    groups.replicate(2, 3)
    known = groups.group().offsets.get(ORDERS)
    assert known is not None
    assert known.offset == 5


@run_by(with_groups, lead=False)
async def test_an_offset_whose_commit_timed_out_is_decided_by_the_marker(groups: CoordinatedGroups, /) -> None:
    await groups.lead(isr=(ME, 2, 3))
    assert await groups.commit_in_transaction(5) == E.COORDINATOR_NOT_AVAILABLE
    groups.end_transaction(committed=True)
    fetching = groups.fetch(require_stable=True)
    groups.replicate(2, 3)
    assert (await fetching).topics[0].partitions[0].committed_offset == 5


@run_by(with_groups)
async def test_all_offsets_of_a_group_include_those_that_are_not_stable(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit_in_transaction(5) == E.NONE
    assert (await groups.fetch(None)).topics == []
    (topic,) = (await groups.fetch(None, require_stable=True)).topics
    assert [(one.partition_index, one.error_code) for one in topic.partitions] == [(0, E.UNSTABLE_OFFSET_COMMIT)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"generation_id": 0}, E.ILLEGAL_GENERATION),
        ({"generation_id": 2}, E.ILLEGAL_GENERATION),
        ({"member_id": "nobody"}, E.UNKNOWN_MEMBER_ID),
        ({"member_id": "", "generation_id": -1}, E.NONE),  # a producer from before KIP-447
        ({"generation_id": -1}, E.ILLEGAL_GENERATION),
        ({"member_id": "", "generation_id": 1}, E.UNKNOWN_MEMBER_ID),
        ({"instance": "static"}, E.UNKNOWN_MEMBER_ID),
        ({"group_id": "other"}, E.ILLEGAL_GENERATION),
        ({"partition": TopicPartition("unknown", 0)}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"topic_id": NEWER_ID}, E.INCONSISTENT_TOPIC_ID),
        ({"topic_id": ORDERS_ID}, E.NONE),
        ({"metadata": "é" * 4_097}, E.OFFSET_METADATA_TOO_LARGE),
        ({}, E.NONE),
    ],
    ids=str,
)
def test_a_transaction_commits_offsets_only_for_a_member(
    tmp_path: Path, change: dict[str, object], expected: ErrorCode
) -> None:
    async def scenario(groups: CoordinatedGroups) -> None:
        (member,) = await groups.stable()
        named = {"member_id": member, "generation_id": 1} | change
        assert await groups.commit_in_transaction(5, **named) == expected  # type: ignore[arg-type]
        end = groups.broker.partition(OFFSETS).log.log_end_offset
        assert end == (2 if expected is E.NONE else 1)

    with_groups(tmp_path, scenario)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (E.INVALID_TXN_STATE, E.INVALID_TXN_STATE),
        (E.PRODUCER_FENCED, E.PRODUCER_FENCED),
        (E.CONCURRENT_TRANSACTIONS, E.CONCURRENT_TRANSACTIONS),
        (E.NOT_COORDINATOR, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.COORDINATOR_NOT_AVAILABLE, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.NETWORK_EXCEPTION, E.COORDINATOR_LOAD_IN_PROGRESS),
    ],
    ids=str,
)
def test_nothing_is_appended_without_the_coordinator_of_the_transaction(
    tmp_path: Path, answer: ErrorCode, expected: ErrorCode
) -> None:
    async def scenario(groups: CoordinatedGroups) -> None:
        async def no() -> ErrorCode:
            return answer

        groups.answer = no
        assert await groups.commit_in_transaction(5) == expected
        assert groups.broker.partition(OFFSETS).log.log_end_offset == 0

    with_groups(tmp_path, scenario)


class Held:
    """Holds back the answer to a question."""

    def __init__(self, groups: CoordinatedGroups) -> None:
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        groups.answer = self._answer

    async def _answer(self) -> ErrorCode:
        self.asked.set()
        await self.released.wait()
        return E.NONE


@run_by(with_groups)
async def test_a_marker_voids_the_answer_of_the_coordinator(groups: CoordinatedGroups, /) -> None:
    held = Held(groups)
    committing = groups.commit_in_transaction(5)
    await held.asked.wait()
    groups.end_transaction(committed=False, epoch=0)  # of a client that keeps its epoch
    held.released.set()
    assert await committing == E.COORDINATOR_LOAD_IN_PROGRESS
    assert groups.broker.partition(OFFSETS).log.log_end_offset == 1
    assert await groups.commit_in_transaction(5) == E.NONE


@run_by(with_groups)
async def test_a_new_term_voids_the_answer_of_the_coordinator(groups: CoordinatedGroups, /) -> None:
    held = Held(groups)
    committing = groups.commit_in_transaction(5)
    await held.asked.wait()
    await load_again(groups)
    held.released.set()
    assert await committing == E.COORDINATOR_LOAD_IN_PROGRESS
    assert groups.broker.partition(OFFSETS).log.log_end_offset == 0


@run_by(with_groups)
async def test_the_generation_is_checked_again_after_the_answer(groups: CoordinatedGroups, /) -> None:
    (member,) = await groups.stable()
    held = Held(groups)
    committing = groups.commit_in_transaction(5, member_id=member, generation_id=1)
    await held.asked.wait()
    groups.leave(member)
    held.released.set()
    assert await committing == E.UNKNOWN_MEMBER_ID
    assert await groups.committed() == -1


@run_by(with_groups)
async def test_a_late_attempt_does_not_replace_a_later_offset_of_the_transaction(groups: CoordinatedGroups, /) -> None:
    held = Held(groups)
    late = groups.commit_in_transaction(5, attempt=Attempt("client", 1, -1))
    await held.asked.wait()
    again = groups.commit_in_transaction(6, attempt=Attempt("client", 2, -1))
    await asyncio.sleep(0)
    held.released.set()
    assert [await late, await again] == [E.REQUEST_TIMED_OUT, E.NONE]
    groups.end_transaction(committed=True)
    assert await groups.committed() == 6


@run_by(with_groups)
async def test_a_late_commit_of_an_ended_transaction_is_fenced_by_the_epoch(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit_in_transaction(5) == E.NONE
    groups.end_transaction(committed=True, epoch=1)
    assert await groups.commit_in_transaction(4) == E.INVALID_PRODUCER_EPOCH
    assert await groups.commit_in_transaction(6, producer_epoch=1) == E.NONE
    assert await groups.committed() == 5


# --- loading -----------------------------------------------------------------------------------------------------


@run_by(with_groups)
async def test_a_load_follows_the_markers(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit_in_transaction(5, group_id="committed") == E.NONE
    groups.end_transaction(committed=True)
    assert await groups.commit_in_transaction(5, group_id="aborted", producer_epoch=1) == E.NONE
    groups.end_transaction(committed=False, epoch=2)
    await load_again(groups)
    assert await groups.stable_offset(group_id="committed") == 5
    assert await groups.stable_offset(group_id="aborted") == -1
    assert set(groups.groups.terms.loaded()[0].groups) == {"committed"}


@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_that_is_open_at_a_load_stays_open_until_its_marker(tmp_path: Path, committed: bool) -> None:
    async def scenario(groups: CoordinatedGroups) -> None:
        assert await groups.commit(3) == E.NONE
        assert await groups.commit_in_transaction(5) == E.NONE
        await load_again(groups)
        assert await groups.committed() == 3
        assert await groups.stable_offset() == E.UNSTABLE_OFFSET_COMMIT
        groups.end_transaction(committed=committed)
        assert await groups.stable_offset() == (5 if committed else 3)
        await load_again_later(groups)
        assert await groups.stable_offset() == (5 if committed else 3)

    with_groups(tmp_path, scenario)


async def load_again_later(groups: CoordinatedGroups) -> None:
    await groups.follow(3)
    await groups.lead(4)


@run_by(with_groups, lead=False)
async def test_a_marker_that_arrives_during_a_load_is_applied_after_it(groups: CoordinatedGroups, /) -> None:
    await groups.lead()
    assert await groups.commit_in_transaction(5) == E.NONE
    await groups.follow(1)
    await groups.lead(2, wait=False)
    groups.end_transaction(committed=True)
    assert groups.groups.terms.loaded() == []
    await groups.lead(2)
    assert await groups.stable_offset() == 5


@pytest.mark.parametrize("deletes", ["nothing", "the offset", "the group"])
@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_later_record_counts_at_a_load_whenever_the_marker_comes(
    tmp_path: Path, deletes: str, is_compacted: bool
) -> None:
    """Compaction leaves only the last record of each key, so an earlier one must not count either."""

    async def scenario(groups: CoordinatedGroups) -> None:
        assert await groups.commit_in_transaction(5) == E.NONE
        if deletes == "nothing":
            assert await groups.commit(4) == E.NONE
        elif deletes == "the group":
            assert await groups.groups.removal.delete(GROUP) is E.NONE
        else:
            done: list[g.OffsetDeleteResponse] = []
            groups.groups.commits.delete(
                g.OffsetDeleteRequest(GROUP, [g.OffsetDeleteTopic("orders", [0])]), done.append
            )
            assert done[0].topics[0].partitions[0].error_code == E.NONE
        groups.end_transaction(committed=True)
        expected = 4 if deletes == "nothing" else -1
        assert await groups.stable_offset() == expected
        if is_compacted:
            await compact(groups)
        await load_again(groups)
        assert await groups.stable_offset() == expected

    with_groups(tmp_path, scenario)


@run_by(with_groups, settings=SHORT)
async def test_a_group_with_an_open_transaction_is_kept_beyond_its_retention(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit(3) == E.NONE
    assert await groups.commit_in_transaction(5) == E.NONE
    await asyncio.sleep(200)
    assert await groups.stable_offset() == E.UNSTABLE_OFFSET_COMMIT
    assert await groups.committed() == 3
    groups.end_transaction(committed=True)
    assert await groups.stable_offset() == 5
    await asyncio.sleep(200)
    assert await groups.stable_offset() == -1
    assert groups.groups.terms.loaded()[0].groups == {}
