"""Reassignments: which are refused, each of the twelve steps, and when one is complete."""

from __future__ import annotations

import pytest

from minibroker.controller.decisions import deletion, elections, reassignment
from minibroker.controller.decisions import plan as p
from minibroker.controller.decisions.cluster_state import (
    AssignmentChanged,
    ClusterState,
    DeletionIneligible,
    TopicSettings,
)
from minibroker.controller.decisions.reassignment import Refusal
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ListPartitionReassignmentsTopic, ReassignablePartition, ReassignableTopic
from minibroker.protocol.model import LeaderAndIsr, ReplicaAssignment, TopicPartition
from minibroker.protocol.znodes import Reassignment, TopicZnode
from tests.unit.controller.pictures import broker, carry_out, leads, lines, partition, picture, text

P0 = partition("orders-0")


def under_way(
    target: tuple[int, ...] = (2, 3),
    *,
    live: tuple[int, ...] = (1, 2, 3, 4),
    state: LeaderAndIsr | None = None,
) -> ClusterState:
    """Return a state where orders-0 moves from 1 and 2 to the target."""
    known = picture(live, {"orders-0": (1, 2)}, {"orders-0": state or leads(1, 4, [1, 2])})
    carry_out(known, reassignment.take_in(known, {P0: ReplicaAssignment((1, 2)).reassigned_to(target)}))
    return known


# --- Requests ---


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ((), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no replica: name at least one broker"),
        ((1, 1), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "at most one replica"),
        ((-1,), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "never negative"),
        ((1, 9), ErrorCode.INVALID_REPLICA_ASSIGNMENT, r"broker 9 is not alive: choose live brokers out of \[1, 3\]"),
        (None, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, r"has the replicas \[1, 2\]"),
    ],
)
def test_an_impossible_reassignment_is_refused_with_the_reason(
    target: tuple[int, ...] | None, code: ErrorCode, said: str
) -> None:
    verdict = reassignment.judge(picture([1, 3], {"orders-0": (1, 2)}), P0, target)
    assert isinstance(verdict, Refusal)
    assert verdict.code is code
    with pytest.raises(ValueError, match=said):
        raise ValueError(verdict.message)


def test_unknown_partitions_are_refused_and_so_are_those_of_topics_that_are_to_be_deleted() -> None:
    state = picture([1, 2], {"orders-0": (1, 2), "old-0": (1,)}, to_delete=("old",))
    for name in ("orders-1", "other-0", "old-0"):
        verdict = reassignment.judge(state, partition(name), (1,))
        assert isinstance(verdict, Refusal)
        assert verdict.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_replica_that_is_down_may_stay_and_a_repetition_is_no_error() -> None:
    state = under_way((2, 3), live=(1, 3, 4))
    assert reassignment.judge(state, P0, (2, 4)) == ReplicaAssignment((2, 4, 3, 1), (4, 3), (3, 1))
    state.live_brokers.pop(3)
    assert reassignment.judge(state, P0, (2, 3)) == state.assignment(P0)


def test_a_partition_that_is_named_twice_is_refused() -> None:
    topics = [ReassignableTopic("orders", [ReassignablePartition(0, [1]), ReassignablePartition(0, [2])])]
    judged = reassignment.judge_request(picture([1, 2], {"orders-0": (1, 2)}), topics)
    assert judged.wanted == {}
    assert judged.refused[P0].code is ErrorCode.INVALID_REQUEST
    [answer] = reassignment.results(topics, judged.refused, {}, {})
    assert [one.error_code for one in answer.partitions] == [ErrorCode.INVALID_REQUEST] * 2


def test_what_the_file_says_again_is_not_wanted_again() -> None:
    state = under_way((2, 3))
    assert reassignment.judge_file(state, [Reassignment(P0, (2, 3))]).wanted == {}
    assert reassignment.judge_file(state, [Reassignment(P0, (3, 2))]).wanted != {}


def test_what_is_under_way_is_listed_without_what_was_added_in_vain() -> None:
    state = under_way((2, 3))
    carry_out(state, reassignment.take_in(state, {P0: state.assignment(P0).reassigned_to((2, 4))}))
    [topic] = reassignment.under_way(state, None)
    [one] = topic.partitions
    assert (one.replicas, one.adding_replicas, one.removing_replicas) == ([2, 4, 3, 1], [4], [3, 1])
    assert reassignment.under_way(state, [ListPartitionReassignmentsTopic("orders", [1])]) == []


# --- Assignments ---


def test_an_assignment_knows_where_it_comes_from_and_where_it_goes() -> None:
    first = ReplicaAssignment((1, 2)).reassigned_to((3, 2))
    assert first == ReplicaAssignment((3, 2, 1), (3,), (1,))
    assert (first.target, first.origin, first.replication_factor) == ((3, 2), (2, 1), 2)
    second = first.reassigned_to((4,))
    assert second == ReplicaAssignment((4, 3, 2, 1), (4, 3), (3, 2, 1))
    assert (second.target, second.origin, second.replication_factor) == ((4,), (2, 1), 2)
    back = second.reassigned_to(second.origin)
    assert back == ReplicaAssignment((2, 1, 4, 3), (4, 3), (4, 3))
    assert back.is_cancelled
    assert not second.is_cancelled
    assert not ReplicaAssignment((1, 2)).reassigned_to((2, 1)).is_being_reassigned


def test_the_picture_knows_the_replicas_of_each_broker_while_they_come_and_go() -> None:
    state = under_way((2, 3))
    assert [state.partitions_on(b) for b in (1, 2, 3, 4)] == [(P0,), (P0,), (P0,), ()]
    assert state.is_reassigning("orders")
    state.apply(AssignmentChanged(P0, ReplicaAssignment((2, 3))))
    assert [state.partitions_on(b) for b in (1, 2, 3, 4)] == [(), (P0,), (P0,), ()]
    assert state.reassigning == {}


# --- The steps ---


def test_step_1_writes_old_and_new_replicas_over_the_version_that_was_read() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 2), "orders-1": (2, 1)})
    znode = TopicZnode("id-of-orders", {0: (1, 2), 1: (2, 1)})
    wanted = {P0: ReplicaAssignment((1, 2)).reassigned_to((2, 3))}
    after = TopicZnode("id-of-orders", {0: (2, 3, 1), 1: (2, 1)}, {0: (3,)}, {0: (1,)})
    assert reassignment.record(state, {"orders": (znode, 8)}, wanted).writes == (p.SetTopic("orders", after, 8),)
    assert reassignment.record(state, {"orders": (after, 9)}, wanted).writes == ()
    another = TopicZnode("another id", {0: (1, 2)})
    assert reassignment.record(state, {"orders": (another, 0)}, wanted).writes == ()


def test_steps_2_and_3_raise_the_epoch_and_then_start_the_new_replicas() -> None:
    state = under_way((2, 3))
    assert state.replica_state(PartitionReplica(P0, 3)) is ReplicaState.NEW
    plan = reassignment.raise_epochs(state, [P0])
    assert lines(plan) == text("""
        write orders-0: leader 1, epoch 5, isr [1 2] (over version 5)
        LeaderAndIsr to 1: orders-0
        LeaderAndIsr to 2: orders-0
    """)
    carry_out(state, plan)
    assert lines(reassignment.start_new(state, [P0])) == text("""
        replica orders-0 on 3 -> OnlineReplica
        LeaderAndIsr to 3: orders-0 (new)
        UpdateMetadata to 1 2 3 4: orders-0
    """)


def test_steps_4_to_8_give_the_partition_to_the_target_and_take_it_from_the_others() -> None:
    state = under_way((2, 3), state=leads(1, 4, [2, 3, 1]))
    carry_out(state, reassignment.start_new(state, [P0]))
    finish = reassignment.finish(state, [P0], {})
    assert finish.partitions == (P0,)
    assert lines(finish.plan) == text("""
        partition orders-0 -> OnlinePartition
        write orders-0: leader 2, epoch 5, isr [2 3] (over version 5)
    """)
    carry_out(state, finish.plan)
    gone = reassignment.leaving(state, [P0])
    assert gone == (PartitionReplica(P0, 1),)
    plan = reassignment.release(state, [P0], gone)
    assert lines(plan) == text("""
        orders-0 has the replicas [2, 3]
        replica orders-0 on 1 -> OfflineReplica
        LeaderAndIsr to 2: orders-0
        LeaderAndIsr to 3: orders-0
        StopReplica to 1: orders-0
    """)
    carry_out(state, plan)
    plan = reassignment.delete(state, gone)
    assert lines(plan) == text("""
        replica orders-0 on 1 -> ReplicaDeletionStarted
        StopReplica to 1: orders-0 (delete)
    """)
    carry_out(state, plan)
    carry_out(state, reassignment.forget(state, gone))
    assert state.replica_state(gone[0]) is ReplicaState.NON_EXISTENT


def test_steps_10_to_12_clear_up() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(1, 4, [1, 2])})
    left = Reassignment(partition("other-0"), (1,))
    assert reassignment.leave([left], 3).writes == (p.SetReassignments((left,), 3),)
    assert lines(reassignment.over(state, [P0])) == text("""
        UpdateMetadata to 1 2: orders-0
        then ResumeDeletions
    """)


def test_a_topic_under_reassignment_is_not_deleted_before_the_reassignment_ends() -> None:
    state = under_way((2, 3))
    plan = deletion.request(state, {"orders": ""})
    assert DeletionIneligible("orders", "its partitions are being reassigned") in plan.changes
    carry_out(state, plan)
    assert not state.is_queued_for_deletion("orders")
    assert lines(deletion.resume(state)) == []
    # The end of a reassignment usually comes soon: the request waits for it as long as it may.
    assert deletion.waiting(state, {"orders": state.topic_ids["orders"]}) == {"orders": ""}
    assert deletion.unanswered(state, "orders") == "its partitions are being reassigned"
    state.apply(AssignmentChanged(P0, ReplicaAssignment((2, 3))))
    carry_out(state, reassignment.over(state, [P0]))
    assert state.is_queued_for_deletion("orders")
    assert lines(deletion.resume(state))


# --- When it is over, and who leads ---

MOVE = ReplicaAssignment((2, 3, 1), (3,), (1,))


@pytest.mark.parametrize(
    ("state", "live"),
    [
        (leads(1, 4, [1, 2]), (1, 2, 3)),  # 3 is not in sync
        (leads(1, 4, [2, 3, 1]), (1, 2)),  # 3 is down
        (leads(-1, 4, [2, 3, 1]), (1, 2, 3)),  # no replica leads
        (leads(1, 4, [2, 3, 1], epochs=(20, 29, 10)), (1, 2, 3)),  # 3 has lost records since
        (leads(1, 4, [2, 3], eligible={1: 10}), (1, 2, 3)),  # 1 may have records that they lack
    ],
)
def test_it_waits_until_the_target_has_everything(state: LeaderAndIsr, live: tuple[int, ...]) -> None:
    brokers = {b: broker(b, trusted_since=30 if b == 3 else 0) for b in live}
    assert elections.complete(MOVE, state, brokers, 7) is None


def test_a_leader_of_the_target_stays_in_an_epoch_of_its_own() -> None:
    after = elections.complete(MOVE, leads(3, 4, [2, 3, 1]), {b: broker(b) for b in (1, 2, 3)}, 7)
    assert after is not None
    assert (after.leader, after.leader_epoch, after.isr, after.controller_epoch) == (3, 5, (2, 3), 7)


def test_the_leader_is_the_first_of_the_target_that_is_live_trusted_and_in_sync() -> None:
    target = ReplicaAssignment((4, 2, 3, 1), (4, 3), (1,))
    state = leads(1, 4, [1, 2, 3, 4], epochs=(10, 20, 30, 40))
    live = {1: broker(1), 2: broker(2, trusted_since=25), 3: broker(3)}
    assert elections.for_reassignment(target, state, live) == 3
    assert elections.for_reassignment(target, state, {1: broker(1)}) is None


def test_a_cancelled_one_waits_for_as_many_of_the_old_replicas_as_it_takes_to_commit() -> None:
    cancelled = ReplicaAssignment((1, 2, 3), (3,), (3,))
    live = {b: broker(b) for b in (1, 3)}
    after = elections.complete(cancelled, leads(3, 4, [1, 3], to_commit=1), live, 7)
    assert after is not None
    assert (after.leader, after.isr) == (1, (1,))
    assert elections.complete(cancelled, leads(3, 4, [1, 3], to_commit=2), live, 7) is None
    assert elections.complete(cancelled, leads(3, 4, [3], to_commit=1), live, 7) is None


def test_min_insync_replicas_goes_by_the_replicas_that_it_comes_from() -> None:
    """A move of one of two replicas has three for a while; by that number two would have to be in sync."""
    state = under_way((2, 3), state=leads(1, 4, [1, 2]))
    state.live_brokers.pop(2)
    plan = reassignment.finish(state, [P0], {"orders": TopicSettings()})
    assert plan.partitions == ()
    assert state.assignment(P0).replication_factor == 2
    assert TopicPartition(*P0) == P0
