"""Decisions about added partitions: a case for each rule, as readable plans."""

from __future__ import annotations

from random import Random

import pytest

from minibroker.controller.decisions import brokers, partitions
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.partitions import Growth
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatePartitionsAssignment,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from minibroker.protocol.znodes import TopicZnode
from tests.unit.controller.pictures import carry_out, leads, lines, picture, text

ID = "id-of-orders"


def two_partitions(to_delete: tuple[str, ...] = ()) -> ClusterState:
    assignments = {"orders-0": (1, 2), "orders-1": (2, 3)}
    states = {"orders-0": leads(1, 0, [1, 2]), "orders-1": leads(2, 0, [2, 3])}
    return picture([1, 2, 3], assignments, states, to_delete)


def validated(
    state: ClusterState, request: CreatePartitionsTopic, znode: TopicZnode | None = None
) -> Growth | CreatePartitionsTopicResult:
    topic = znode or TopicZnode(ID, state.assignment_of("orders"))
    [answer] = partitions.validate([request], state, {"orders": topic}, {"orders": 4}, Random(1))
    return answer


def assigned(*replicas: list[int], count: int = 3) -> CreatePartitionsTopic:
    return CreatePartitionsTopic("orders", count, [CreatePartitionsAssignment(ids) for ids in replicas])


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (CreatePartitionsTopic("nothing", 3), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no topic 'nothing'"),
        (CreatePartitionsTopic("orders", 2), ErrorCode.INVALID_PARTITIONS, "has 2 partitions already, and 2 are asked"),
        (CreatePartitionsTopic("orders", 0), ErrorCode.INVALID_PARTITIONS, "and 0 are asked for: give more"),
        (CreatePartitionsTopic("orders", 10_001), ErrorCode.INVALID_PARTITIONS, "give at most 10000"),
        (CreatePartitionsTopic("orders", 3, None, "another"), ErrorCode.UNKNOWN_TOPIC_ID, "it is another topic"),
        (assigned([1]), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partition 2 is assigned to [1]: give it 2 replicas"),
        (assigned([1, 1]), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "a broker holds at most one replica"),
        (assigned([1, 9]), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "broker 9 is not alive"),
        (assigned([1, 2], [2, 3]), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "1 partition to be added, and 2 assigned"),
    ],
)
def test_an_invalid_addition_of_partitions_is_refused_with_the_value_and_the_rule(
    request_: CreatePartitionsTopic, code: ErrorCode, message: str
) -> None:
    answer = validated(two_partitions(), request_)
    assert isinstance(answer, CreatePartitionsTopicResult)
    assert (answer.error_code, message in answer.error_message) == (code, True), answer
    if request_.name == "orders":
        assert (answer.topic_id, answer.num_partitions) == (ID, 2)


def test_a_topic_that_is_being_deleted_gets_no_partitions() -> None:
    answer = validated(two_partitions(to_delete=("orders",)), CreatePartitionsTopic("orders", 3))
    assert isinstance(answer, CreatePartitionsTopicResult)
    assert answer.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_topic_with_more_replicas_than_brokers_live_gets_no_partitions_that_nobody_assigns() -> None:
    state = picture([1], {"orders-0": (1, 2)}, {"orders-0": leads(1, 0, [1])})
    answer = validated(state, CreatePartitionsTopic("orders", 2))
    assert isinstance(answer, CreatePartitionsTopicResult)
    assert answer.error_code == ErrorCode.INVALID_REPLICATION_FACTOR


def test_a_name_that_a_request_has_twice_is_refused() -> None:
    [answer] = partitions.repeated(
        [assigned([1, 2]), CreatePartitionsTopic("orders", 5), CreatePartitionsTopic("x", 1)]
    )
    assert (answer.name, answer.error_code) == ("orders", ErrorCode.INVALID_REQUEST)


@pytest.mark.parametrize(("known", "code"), [(1, ErrorCode.NONE), (2, ErrorCode.INVALID_PARTITIONS), (-1, 37)])
def test_a_repetition_that_finds_what_it_asked_for_is_a_success_if_it_was_not_there_before(
    known: int, code: int
) -> None:
    for given in (None, [CreatePartitionsAssignment([2, 3])]):
        answer = validated(two_partitions(), CreatePartitionsTopic("orders", 2, given, ID, known))
        assert isinstance(answer, CreatePartitionsTopicResult)
        assert (answer.error_code, answer.num_partitions) == (code, 2)
    answer = validated(
        two_partitions(), CreatePartitionsTopic("orders", 2, [CreatePartitionsAssignment([3, 2])], ID, known)
    )
    assert isinstance(answer, CreatePartitionsTopicResult)
    assert answer.error_code == ErrorCode.INVALID_PARTITIONS, "that was somebody else's"


def test_partitions_are_written_then_taken_in_and_then_elected_for() -> None:
    state = two_partitions()
    growth = validated(state, assigned([3, 1]))
    assert isinstance(growth, Growth)
    assert lines(partitions.write([growth])) == ["write topic orders: 3 partitions (over version 4)"]
    plan = partitions.added(state, {"orders": growth.znode})
    assert lines(plan) == text("""
        topic orders has more partitions, with the replicas 2: [3, 1]
        partition orders-2 -> NewPartition
        replica orders-2 on 3 -> NewReplica
        replica orders-2 on 1 -> NewReplica
    """)
    new = partitions.new_partitions(state, {"orders": growth.znode})
    carry_out(state, plan)
    assert partitions.new_partitions(state, {"orders": growth.znode}) == []
    assert lines(partitions.added(state, {"orders": growth.znode})) == []
    assert lines(brokers.settle(state, new)) == text("""
        partition orders-2 -> OnlinePartition
        replica orders-2 on 3 -> OnlineReplica
        replica orders-2 on 1 -> OnlineReplica
        write orders-2: leader 3, epoch 0, isr [3 1] (over no znode yet)
        LeaderAndIsr to 1: orders-2 (new)
        LeaderAndIsr to 3: orders-2 (new)
        UpdateMetadata to 1 2 3: orders-2
    """)


def test_partitions_just_removed_from_the_znode_are_restored_and_not_placed_anew() -> None:
    growth = validated(two_partitions(), CreatePartitionsTopic("orders", 3), TopicZnode(ID, {0: (1, 2)}))
    assert isinstance(growth, Growth)
    assert growth.znode.partitions[1] == (2, 3)
    assert sorted(growth.znode.partitions) == [0, 1, 2]


# --- Written by hand ---------------------------------------------------------------------------------------------


def modified(state: ClusterState, topic_id: str, by_hand: dict[int, tuple[int, ...]]) -> partitions.Modification:
    return partitions.modified(state, {"orders": TopicZnode(topic_id, by_hand)}, {"orders": 8})


def test_a_znode_that_is_as_it_is_known_changes_nothing() -> None:
    state = two_partitions()
    assert modified(state, ID, state.assignment_of("orders")) == partitions.Modification({}, partitions.write([]))


def test_partitions_that_are_missing_are_put_back_and_new_ones_taken_in() -> None:
    grown, repair = modified(two_partitions(), ID, {0: (1, 2), 2: (3, 1)})
    assert grown == {"orders": TopicZnode(ID, {0: (1, 2), 2: (3, 1)})}
    [note, write] = lines(repair)
    assert "the partitions [1] are missing in the znode of topic orders: they are put back" in note
    assert write == "write topic orders: 3 partitions (over version 8)"


def test_other_replicas_and_another_id_are_ignored_aloud() -> None:
    cases: list[tuple[str, dict[int, tuple[int, ...]], str]] = [
        (ID, {0: (3, 1), 1: (2, 3)}, "has other replicas for the partitions [0]"),
        ("another", {0: (1, 2), 1: (2, 3), 2: (1, 2)}, "has the topic_id 'another' now"),
    ]
    for topic_id, by_hand, told in cases:
        grown, repair = modified(two_partitions(), topic_id, by_hand)
        assert grown == {}
        [note] = lines(repair)
        assert told in note


def test_a_topic_that_is_being_deleted_gets_none_by_hand_either() -> None:
    state = two_partitions(to_delete=("orders",))
    grown, repair = modified(state, ID, state.assignment_of("orders") | {2: (1, 2)})
    assert grown == {}
    assert lines(repair)[1:] == ["write topic orders: 2 partitions (over version 8)"]
