"""The verdict on a group's history finds each kind of anomaly, and none in a correct history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.verdicts.group_history import GroupHistory, check_group, check_reborn

P = TopicPartition("orders", 0)
Q = TopicPartition("orders", 1)
RECORDS = {P: {offset: b"%d" % offset for offset in range(10)}, Q: {}}


def group() -> GroupHistory:
    return GroupHistory("billing")


def deliver(history: GroupHistory, member: str, *offsets: int) -> None:
    for offset in offsets:
        history.delivered(member, P, offset, b"%d" % offset)


def commit(history: GroupHistory, member: str, offset: int, generation: int = 1) -> None:
    history.commit_acknowledged(history.commit_begins(member, {P: offset}, generation), generation)


def read(history: GroupHistory, offset: int | None) -> None:
    history.read("reader", {P: offset}, history.read_begins())


def kinds(history: GroupHistory) -> list[str]:
    return [anomaly.kind for anomaly in check_group(history, RECORDS)]


def handed_over(history: GroupHistory) -> None:
    """Let a read up to 4 and commit 3, and then b get the partition and commit 10."""
    history.holds("a", 1, [P])
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 2, 3, 4)
    commit(history, "a", 3)
    history.taken("a", [P])
    history.holds("b", 2, [P])
    history.assigned("b", [P])
    deliver(history, "b", *range(3, 10))
    commit(history, "b", 10, generation=2)
    read(history, 10)


def test_a_hand_over_may_repeat_uncommitted_records() -> None:
    history = group()
    handed_over(history)
    assert kinds(history) == []


def test_a_generation_has_one_owner_unless_the_group_may_have_been_deleted() -> None:
    for may_begin_anew in (False, True):
        history = group()
        history.may_begin_anew = may_begin_anew
        history.holds("a", 1, [P])
        history.holds("b", 1, [P])
        assert kinds(history) == ([] if may_begin_anew else ["two owners in a generation"])


def test_a_commit_without_an_answer_may_be_carried_out_or_not() -> None:
    for found in (2, 3):
        history = group()
        history.assigned("a", [P])
        deliver(history, "a", 0, 1, 2)
        commit(history, "a", 2)
        history.commit_begins("a", {P: 3}, 1)
        read(history, found)
        assert kinds(history) == []


def test_a_read_may_miss_a_commit_acknowledged_during_it() -> None:
    history = group()
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 2)
    began = history.read_begins()
    commit(history, "a", 3)
    history.read("reader", {P: None}, began)
    assert kinds(history) == []


def acknowledged_and_lost(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 2)
    commit(history, "a", 3)
    read(history, 2)


def read_and_lost(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 2)
    read(history, 3)
    read(history, None)


def committed_too_much(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 1)
    commit(history, "a", 3)


def found_too_much(history: GroupHistory) -> None:
    """Find an offset beyond the delivered records, as after a wrong automatic commit."""
    history.assigned("a", [P])
    deliver(history, "a", 0, 1)
    read(history, 3)


def delivered_after_it_was_committed(history: GroupHistory) -> None:
    found_too_much(history)
    deliver(history, "a", 2)


def begun_below_what_is_committed(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 2)
    commit(history, "a", 3)
    history.ended("a")
    history.assigned("b", [P])
    deliver(history, "b", 2, 3)


def twice_in_a_session(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 1, 1)


def out_of_order(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 1, 0)


def left_out(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0, 2)


def not_what_is_there(history: GroupHistory) -> None:
    history.assigned("a", [P])
    history.delivered("a", P, 0, b"other")


def after_it_was_revoked(history: GroupHistory) -> None:
    history.assigned("a", [P])
    deliver(history, "a", 0)
    history.taken("a", [P])
    deliver(history, "a", 1)


def owned_by_two(history: GroupHistory) -> None:
    history.holds("a", 3, [P, Q])
    history.holds("b", 3, [P])


def committed_by_a_member_of_before(history: GroupHistory) -> None:
    history.holds("a", 1, [P])
    history.assigned("a", [P])
    deliver(history, "a", 0, 1)
    history.holds("b", 2, [P])
    commit(history, "a", 2, generation=1)


@pytest.mark.parametrize(
    ("happened", "kind"),
    [
        (acknowledged_and_lost, "a committed offset went back"),
        (read_and_lost, "a committed offset went back"),
        (committed_too_much, "records were skipped"),
        (found_too_much, "records were skipped"),
        (delivered_after_it_was_committed, "records were skipped"),
        (begun_below_what_is_committed, "a committed record came again"),
        (twice_in_a_session, "a session went back"),
        (out_of_order, "a session went back"),
        (left_out, "a session left records out"),
        (not_what_is_there, "another record was delivered"),
        (after_it_was_revoked, "a record of a revoked partition"),
        (owned_by_two, "two owners in a generation"),
        (committed_by_a_member_of_before, "a deposed member committed"),
    ],
)
def test_each_broken_promise_is_found(happened: Callable[[GroupHistory], None], kind: str) -> None:
    history = group()
    happened(history)
    assert kinds(history) == [kind]


def test_a_restarted_static_member_keeps_its_partitions_in_the_same_generation() -> None:
    history = group()
    for _ in range(2):
        history.holds("static-1", 3, [P])
    assert kinds(history) == []


def test_a_commit_under_way_during_a_rebalance_belongs_to_the_later_generation() -> None:
    history = group()
    history.holds("a", 2, [P])
    history.assigned("a", [P])
    deliver(history, "a", 0)
    commit(history, "a", 1, generation=2)
    history.holds("b", 3, [Q])
    commits = history.commit_begins("a", {P: 1}, 2)
    history.commit_acknowledged(commits, 3)
    assert kinds(history) == []


def test_a_commit_may_be_acknowledged_after_its_member_has_left() -> None:
    history = group()
    history.holds("a", 2, [P])
    history.assigned("a", [P])
    deliver(history, "a", 0)
    history.commit_acknowledged(history.commit_begins("a", {P: 1}, 2), -1)
    assert kinds(history) == []


def test_partitions_without_records_are_not_judged() -> None:
    history = group()
    acknowledged_and_lost(history)
    owned_by_two(history)
    assert list(check_group(history, {})) == []


# --- A topic that was created again -------------------------------------------------------------------------------


def reborn(*offsets_of_the_new: int) -> GroupHistory:
    """Return a session that began in the earlier topic and got these offsets of the new one."""
    history = group()
    history.assigned("a", [P])
    for offset in range(20):
        history.delivered("a", P, offset, b"earlier %d" % offset)
    commit(history, "a", 20)
    deliver(history, "a", *offsets_of_the_new)
    return history


def test_a_session_continues_in_a_re_created_topic() -> None:
    history = reborn(*range(10))
    read(history, 10)
    assert list(check_reborn(history, P, RECORDS[P])) == []


@pytest.mark.parametrize(
    ("history", "committed", "kind"),
    [
        (reborn(), 20, "records were skipped"),
        (reborn(0, 1, 3, 4), 5, "records were skipped"),
        (reborn(0, 1, 1), 2, "a session went back"),
    ],
)
def test_anomalies_in_a_re_created_topic_are_found(history: GroupHistory, committed: int, kind: str) -> None:
    read(history, committed)
    assert [anomaly.kind for anomaly in check_reborn(history, P, RECORDS[P])] == [kind]
