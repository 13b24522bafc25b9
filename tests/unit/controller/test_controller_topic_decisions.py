"""Topics created, validated, deleted; ISR changes: state in, result or printed Plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from random import Random

import msgspec
import pytest

from minibroker.controller.decisions import brokers, deletion, isr_changes, topics
from minibroker.controller.decisions.cluster_state import ClusterState
from minibroker.controller.decisions.placement import assign_replicas
from minibroker.controller.decisions.states.replica import ReplicaState
from minibroker.controller.decisions.topics import NewTopic, TopicDefaults
from minibroker.protocol import topic_ids
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableAssignment,
    CreatableConfig,
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsResponse,
)
from minibroker.protocol.znodes import TopicZnode
from tests.unit.controller.pictures import broker, carry_out, leads, lines, partition, picture, text

DEFAULTS = TopicDefaults(num_partitions=4, replication_factor=3)


def check_config(values: Mapping[str, str]) -> str | None:
    for name, value in values.items():
        if name not in ("retention.ms", "min.insync.replicas") or not value.isdecimal():
            return f"{name}={value} is no topic setting"
    return None


def validate(state: ClusterState, *requests: CreatableTopic, existing: Sequence[str] = ()) -> list[object]:
    return list(
        topics.validate(requests, state, dict.fromkeys(existing, ""), DEFAULTS, check_config, Random(1), count(1))
    )


def refused(state: ClusterState, request: CreatableTopic) -> tuple[ErrorCode, str]:
    [answer] = validate(state, request)
    assert isinstance(answer, CreatableTopicResult)
    assert answer.topic_id == ""
    return ErrorCode(answer.error_code), answer.error_message


def accepted(state: ClusterState, request: CreatableTopic) -> NewTopic:
    [answer] = validate(state, request)
    assert isinstance(answer, NewTopic), answer
    return answer


THREE_BROKERS = (1, 2, 3)


def test_a_topic_gets_the_defaults_where_the_request_names_none() -> None:
    topic = accepted(picture(THREE_BROKERS, {}), CreatableTopic("orders"))
    assert sorted(topic.znode.partitions) == [0, 1, 2, 3]
    assert all(sorted(replicas) == [1, 2, 3] for replicas in topic.znode.partitions.values())
    assert len(topic.znode.topic_id) == 22
    result = topic.result(created=True)
    assert (result.error_code, result.num_partitions, result.replication_factor) == (0, 4, 3)
    assert result.topic_id == topic.znode.topic_id
    assert topic.result(created=False).topic_id == ""


def test_a_new_topic_records_the_brokers_durability_if_it_differs_from_kafkas() -> None:
    said = CreatableTopic("own", configs=[CreatableConfig("durability", "replicated")])
    for default, expected in (("replicated", {}), ("synced", {"durability": "synced"})):
        defaults = TopicDefaults(4, 3, default)
        state = picture(THREE_BROKERS, {})
        requests = [CreatableTopic("orders"), said]
        answers = topics.validate(requests, state, {}, defaults, lambda _: None, Random(1), count(1))
        assert [a.config for a in answers if isinstance(a, NewTopic)] == [expected, {"durability": "replicated"}]


def test_a_request_adds_at_most_ten_thousand_partitions_to_all_its_topics() -> None:
    requests = [CreatableTopic(f"topic-{number}", num_partitions=4_000) for number in range(1_000)]
    answers = validate(picture(THREE_BROKERS, {}), *requests, CreatableTopic("small", num_partitions=2_000))
    assert [type(answer) for answer in (*answers[:2], answers[-1])] == [NewTopic] * 3
    refusals = [answer for answer in answers if isinstance(answer, CreatableTopicResult)]
    assert {refusal.error_code for refusal in refusals} == {ErrorCode.POLICY_VIOLATION}
    assert len(refusals) == 998
    assert "at most 10000 to all its topics, and 2000 are left" in refusals[0].error_message


def test_requests_cannot_fill_the_cluster_with_partitions_except_with_the_brokers_own() -> None:
    state = picture(THREE_BROKERS, {"orders-0": (1, 2, 3), "orders-1": (1, 2, 3)})
    requests = [CreatableTopic("a", num_partitions=7), CreatableTopic("b"), CreatableTopic("__consumer_offsets")]
    answers = list(
        topics.validate(requests, state, {}, DEFAULTS, check_config, Random(1), count(1), max_broker_partitions=10)
    )
    assert [isinstance(answer, NewTopic) for answer in answers] == [True, False, True]
    assert isinstance(answers[1], CreatableTopicResult)
    assert answers[1].error_message.startswith(
        "topic 'b' would get 12 new replicas, but the live brokers have room for 3 with max.broker.partitions=10"
    )


def test_an_explicit_assignment_is_taken_as_it_is() -> None:
    request = CreatableTopic("orders", assignments=[CreatableAssignment(1, [3, 1]), CreatableAssignment(0, [2, 3])])
    assert accepted(picture(THREE_BROKERS, {}), request).znode.partitions == {0: (2, 3), 1: (3, 1)}


def assigned(*assignments: tuple[int, list[int]]) -> CreatableTopic:
    return CreatableTopic("orders", assignments=[CreatableAssignment(p, replicas) for p, replicas in assignments])


def configured(*configs: tuple[str, str | None]) -> CreatableTopic:
    return CreatableTopic("orders", 1, 1, configs=[CreatableConfig(name, value) for name, value in configs])


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (CreatableTopic("a/b"), ErrorCode.INVALID_TOPIC_EXCEPTION, "topic name 'a/b' contains '/'"),
        (CreatableTopic(".."), ErrorCode.INVALID_TOPIC_EXCEPTION, "'..' cannot be a topic name"),
        (CreatableTopic("taken"), ErrorCode.TOPIC_ALREADY_EXISTS, "there is a topic 'taken' already"),
        (CreatableTopic("leaving"), ErrorCode.TOPIC_ALREADY_EXISTS, "topic 'leaving' is still being deleted"),
        (CreatableTopic("my_topic"), ErrorCode.INVALID_TOPIC_EXCEPTION, "collides with topic 'my.topic'"),
        (CreatableTopic("orders", 0), ErrorCode.INVALID_PARTITIONS, "the number of partitions is 0: give 1 to 10000"),
        (CreatableTopic("orders", 10_001), ErrorCode.INVALID_PARTITIONS, "the number of partitions is 10001"),
        (
            CreatableTopic("orders", 1, 4),
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "the replication factor is 4: it must be 1 to 3, the number of live brokers (1, 2, 3)",
        ),
        (CreatableTopic("orders", 1, 0), ErrorCode.INVALID_REPLICATION_FACTOR, "the replication factor is 0"),
        (
            CreatableTopic("orders", 1, -1, [CreatableAssignment(0, [1])]),
            ErrorCode.INVALID_REQUEST,
            "with an assignment both must be -1",
        ),
        (assigned((0, [1]), (2, [1])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "name each from 0 to 1 once"),
        (assigned((0, [1]), (0, [2])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "names the partitions 0, 0"),
        (assigned((0, [1, 2]), (1, [1])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partition 1 is assigned to [1]"),
        (assigned((0, [])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "at least one"),
        (assigned((0, [1, 1])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "at most one replica"),
        (assigned((0, [1, 9])), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "broker 9 is not alive"),
        (configured(("colour", "red")), ErrorCode.INVALID_CONFIG, "colour=red is no topic setting"),
        (configured(("retention.ms", None)), ErrorCode.INVALID_CONFIG, "the setting 'retention.ms' has no value"),
        (
            configured(("retention.ms", "1"), ("retention.ms", "2")),
            ErrorCode.INVALID_CONFIG,
            "is given as '1' and as '2'",
        ),
        (
            configured(("retention.ms", "1" * 900_000)),
            ErrorCode.INVALID_REQUEST,
            "bytes in ZooKeeper: the limit is 900000",
        ),
    ],
)
def test_an_invalid_topic_is_refused_with_the_value_and_the_rule(
    request_: CreatableTopic, code: ErrorCode, message: str
) -> None:
    states = {name: leads(1, 0, [1]) for name in ("taken-0", "leaving-0", "my.topic-0")}
    state = picture(THREE_BROKERS, dict.fromkeys(states, (1,)), states, to_delete=("leaving",))
    found, told = refused(state, request_)
    assert (found, message in told) == (code, True), told


def test_a_default_replication_factor_that_is_too_large_is_named_as_the_default() -> None:
    code, message = refused(picture([1], {}), CreatableTopic("orders"))
    assert code is ErrorCode.INVALID_REPLICATION_FACTOR
    assert message.startswith("the replication factor is 3, the default: it must be 1 to 1")


def test_topics_of_one_request_must_not_collide_with_each_other() -> None:
    state = picture(THREE_BROKERS, {})
    twice, again, dotted, underscored = validate(
        state, CreatableTopic("x"), CreatableTopic("x"), CreatableTopic("a.b"), CreatableTopic("a_b")
    )
    assert isinstance(twice, CreatableTopicResult)
    assert isinstance(again, CreatableTopicResult)
    assert twice.error_code == again.error_code == ErrorCode.INVALID_REQUEST
    assert isinstance(dotted, NewTopic)
    assert isinstance(underscored, CreatableTopicResult)
    assert underscored.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_topic_that_is_in_zookeeper_and_not_yet_known_exists_all_the_same() -> None:
    [answer] = validate(picture(THREE_BROKERS, {}), CreatableTopic("orders"), existing=["orders"])
    assert isinstance(answer, CreatableTopicResult)
    assert answer.error_code == ErrorCode.TOPIC_ALREADY_EXISTS


def test_a_topic_appears_as_new_and_is_then_elected_for() -> None:
    state = picture([1, 2], {})
    plan = topics.added(state, {"orders": TopicZnode("some-id", {0: (1, 2), 1: (2, 3)})})
    assert lines(plan) == text("""
        topic orders (some-id) has the replicas 0: [1, 2], 1: [2, 3]
        partition orders-0 -> NewPartition
        partition orders-1 -> NewPartition
        replica orders-0 on 1 -> NewReplica
        replica orders-0 on 2 -> NewReplica
        replica orders-1 on 2 -> NewReplica
        replica orders-1 on 3 -> NewReplica
    """)
    carry_out(state, plan)
    assert lines(topics.added(state, {"orders": TopicZnode("some-id", {0: (1, 2)})})) == []
    plan = brokers.settle(state, state.partitions_of("orders"))
    assert lines(plan) == text("""
        partition orders-0 -> OnlinePartition
        partition orders-1 -> OnlinePartition
        replica orders-0 on 1 -> OnlineReplica
        replica orders-0 on 2 -> OnlineReplica
        replica orders-1 on 2 -> OnlineReplica
        replica orders-1 on 3 -> OfflineReplica
        make sure of /brokers/topics/orders/partitions
        write orders-0: leader 1, epoch 0, isr [1 2] (over no znode yet)
        write orders-1: leader 2, epoch 0, isr [2] (over no znode yet)
        LeaderAndIsr to 1: orders-0 (new)
        LeaderAndIsr to 2: orders-0 (new) orders-1 (new)
        UpdateMetadata to 1 2: orders-0 orders-1
    """)


def test_a_topic_whose_znode_was_removed_by_hand_is_forgotten_aloud() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(1, 0, [1, 2])}, to_delete=("orders",))
    plan = topics.vanished(state, ["orders"])
    [note] = plan.notes
    assert "its deletion was not requested" in note
    assert lines(plan)[1:] == text("""
        topic orders is forgotten
        remove /admin/delete_topics/orders
        UpdateMetadata to 1 2: orders (deleted)
    """)
    carry_out(state, plan)
    assert state.assignments == {}
    assert state.replica_states == {}
    assert state.partitions_on(1) == ()


# --- Placement -----------------------------------------------------------------------------------------------


class Rolls(Random):
    """Random numbers that the test chooses."""

    def __init__(self, *rolls: int) -> None:
        super().__init__()
        self._rolls = list(rolls)

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return self._rolls.pop(0)


def test_placement_is_that_of_the_example_in_kafkas_source() -> None:
    """Five brokers, ten partitions, three replicas, starting at broker 0 with distance 0 (AdminUtils)."""
    assignment = assign_replicas(dict.fromkeys(range(5)), 10, 3, Rolls(0, 0))
    assert [assignment[p] for p in range(10)] == [
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 0),
        (4, 0, 1),
        (0, 2, 3),
        (1, 3, 4),
        (2, 4, 0),
        (3, 0, 1),
        (4, 1, 2),
    ]


def test_one_broker_takes_everything() -> None:
    assert assign_replicas({7: None}, 3, 1, Random(1)) == {0: (7,), 1: (7,), 2: (7,)}


# --- Deletion ------------------------------------------------------------------------------------------------


def two_replicas(live: Sequence[int] = (1, 2)) -> ClusterState:
    return picture(live, {"old-0": (1, 2)}, {"old-0": leads(1, 4, [1, 2])}, to_delete=("old",))


def test_a_deletion_first_updates_all_metadata_and_then_stops_the_replicas() -> None:
    state = two_replicas()
    assert lines(deletion.resume(state)) == text("""
        the deletion of topic old waits until 1 2 know of it
        partition old-0 -> OfflinePartition
        partition old-0 -> NonExistentPartition
        replica old-0 on 1 -> OfflineReplica
        replica old-0 on 1 -> ReplicaDeletionStarted
        replica old-0 on 2 -> OfflineReplica
        replica old-0 on 2 -> ReplicaDeletionStarted
        UpdateMetadata to 1 2: old (deleted)
        StopReplica to 1: old-0
        StopReplica to 2: old-0
        StopReplica to 1: old-0 (delete)
        StopReplica to 2: old-0 (delete)
    """)


def test_a_topic_is_forgotten_once_every_broker_has_deleted_its_replica() -> None:
    state = two_replicas()
    carry_out(state, deletion.resume(state))
    assert lines(deletion.resume(state)) == []
    carry_out(state, deletion.replicas_answered(state, 1, {partition("old-0"): ErrorCode.NONE}))
    assert deletion.finished(state) == ()
    assert lines(deletion.replicas_answered(state, 2, {partition("old-0"): ErrorCode.NONE})) == text("""
        replica old-0 on 2 -> ReplicaDeletionSuccessful
        then ResumeDeletions
    """)
    carry_out(state, deletion.replicas_answered(state, 2, {partition("old-0"): ErrorCode.NONE}))
    carry_out(state, deletion.heard(state, 1, ["old"]))
    assert deletion.finished(state) == (), "broker 2 still shows it to its clients"
    assert lines(deletion.heard(state, 2, ["old"])) == text("""
        broker 2 knows that topic old is gone
        then ResumeDeletions
    """)
    carry_out(state, deletion.heard(state, 2, ["old"]))
    assert deletion.finished(state) == ("old",)
    assert lines(deletion.resume(state)) == []
    plan = deletion.forget(state, "old", ["/brokers/topics/old/partitions", "/brokers/topics/old"])
    assert lines(plan) == text("""
        topic old is forgotten
        replica old-0 on 1 -> NonExistentReplica
        replica old-0 on 2 -> NonExistentReplica
        remove /config/topics/old
        remove /brokers/topics/old/partitions
        remove /brokers/topics/old
        remove /admin/delete_topics/old
    """)


def test_a_broker_that_dies_need_not_know_of_a_deletion() -> None:
    state = picture([1, 2], {"old-0": (1,)}, {"old-0": leads(1, 4, [1])}, to_delete=("old",))
    carry_out(state, deletion.resume(state))
    carry_out(state, deletion.replicas_answered(state, 1, {partition("old-0"): ErrorCode.NONE}))
    carry_out(state, deletion.heard(state, 1, ["old"]))
    assert deletion.finished(state) == ()
    carry_out(state, brokers.lost(state, [2]))
    assert deletion.finished(state) == ("old",)


def test_a_replica_on_a_dead_broker_makes_the_topic_wait_until_the_broker_is_back() -> None:
    state = two_replicas(live=[1])
    plan = deletion.resume(state)
    assert lines(plan) == text("""
        the deletion of topic old waits until 1 know of it
        the deletion of topic old waits: its replicas on broker 2 cannot be reached
        partition old-0 -> OfflinePartition
        partition old-0 -> NonExistentPartition
        replica old-0 on 1 -> OfflineReplica
        replica old-0 on 1 -> ReplicaDeletionStarted
        replica old-0 on 2 -> ReplicaDeletionIneligible
        UpdateMetadata to 1: old (deleted)
        StopReplica to 1: old-0
        StopReplica to 1: old-0 (delete)
    """)
    carry_out(state, plan)
    carry_out(state, deletion.replicas_answered(state, 1, {partition("old-0"): ErrorCode.NONE}))
    assert lines(deletion.resume(state)) == []

    carry_out(state, brokers.added(state, [broker(2, epoch=21)]))
    assert lines(deletion.resume(state)) == text("""
        the deletion of topic old waits until 1 2 know of it
        replica old-0 on 2 -> OfflineReplica
        replica old-0 on 2 -> ReplicaDeletionStarted
        UpdateMetadata to 1 2: old (deleted)
        StopReplica to 2: old-0
        StopReplica to 2: old-0 (delete)
    """)


def test_a_replica_that_a_broker_could_not_delete_makes_the_topic_wait() -> None:
    state = two_replicas()
    carry_out(state, deletion.resume(state))
    errors = {partition("old-0"): ErrorCode.KAFKA_STORAGE_ERROR}
    assert lines(deletion.replicas_answered(state, 1, errors)) == text("""
        the deletion of topic old waits: broker 1 could not delete old-0 (KAFKA_STORAGE_ERROR): that is tried again \
when it restarts, or asks for it
        replica old-0 on 1 -> ReplicaDeletionIneligible
        then ResumeDeletions
    """)
    carry_out(state, deletion.replicas_answered(state, 1, errors))
    assert lines(deletion.resume(state)) == []


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    state = two_replicas()
    assert lines(deletion.replicas_answered(state, 1, {partition("old-0"): ErrorCode.NONE})) == ["then ResumeDeletions"]


def test_a_topic_that_never_had_a_leader_can_be_deleted() -> None:
    state = picture([], {"old-0": (1, 2)}, to_delete=("old",))
    carry_out(state, deletion.resume(state))
    assert state.replica_states_of("old") == {ReplicaState.DELETION_INELIGIBLE}


def test_requests_to_delete_are_queued_once_and_dropped_where_there_is_no_such_topic() -> None:
    state = picture([1], {"a-0": (1,), "b-0": (1,)}, to_delete=("a",))
    assert lines(deletion.queue(state, ["a", "b", "ghost", "broken"], leave_alone=["broken"])) == text("""
        note: topic ghost does not exist: the request to delete it is dropped
        topic b is queued for deletion
        remove /admin/delete_topics/ghost
        then ResumeDeletions
    """)
    assert lines(deletion.request(state, {"a": "", "b": "id-of-b", "ghost": ""})) == text("""
        topic b is queued for deletion
        make sure of /admin/delete_topics/a
        make sure of /admin/delete_topics/b
        then ResumeDeletions
    """)
    known, unknown = deletion.results(state, {"a": "", "ghost": ""})
    assert (known.error_code, known.topic_id) == (0, "id-of-a")
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "there is no topic 'ghost'" in unknown.error_message


def test_a_topic_of_another_id_than_was_meant_is_not_deleted() -> None:
    state = picture([1], {"a-0": (1,)})
    assert lines(deletion.request(state, {"a": "id-of-an-older-a"})) == text("""
        make sure of /admin/delete_topics
        then ResumeDeletions
    """)
    [result] = deletion.results(state, {"a": "id-of-an-older-a"})
    assert (result.error_code, result.topic_id) == (ErrorCode.UNKNOWN_TOPIC_ID, "id-of-a")


def test_a_topic_that_an_earlier_attempt_of_the_same_request_created_counts_as_created() -> None:
    request = CreatableTopic("orders", 2, 3, nonce=b"chance")
    created = accepted(picture(THREE_BROKERS, {}), request)
    state = picture(THREE_BROKERS, {})
    carry_out(state, topics.added(state, {"orders": created.znode}))
    [again] = validate(state, request)
    assert isinstance(again, CreatableTopicResult)
    assert (again.error_code, again.topic_id) == (ErrorCode.NONE, created.znode.topic_id)
    assert (again.num_partitions, again.replication_factor) == (2, 3)
    for other in (b"", b"other!"):
        assert refused(state, CreatableTopic("orders", 2, 3, nonce=other))[0] is ErrorCode.TOPIC_ALREADY_EXISTS
    carry_out(state, deletion.request(state, {"orders": created.znode.topic_id}))
    code, message = refused(state, request)
    assert code is ErrorCode.TOPIC_ALREADY_EXISTS
    assert "still being deleted" in message


def test_topics_are_numbered_so_that_their_ids_tell_which_is_newer() -> None:
    older, newer = validate(picture(THREE_BROKERS, {}), CreatableTopic("a"), CreatableTopic("b"))
    assert isinstance(older, NewTopic)
    assert isinstance(newer, NewTopic)
    assert topic_ids.is_older(older.znode.topic_id, newer.znode.topic_id)


def test_a_nonce_that_is_too_short_is_refused() -> None:
    code, message = refused(picture(THREE_BROKERS, {}), CreatableTopic("orders", nonce=b"short"))
    assert code is ErrorCode.INVALID_REQUEST
    assert "give 6" in message


# --- ISR changes ---------------------------------------------------------------------------------------------


def test_an_isr_that_a_leader_changed_is_adopted_and_announced() -> None:
    state = picture([1, 2], {"a-0": (1, 2)}, {"a-0": leads(1, 4, [1, 2])})
    read = {partition("a-0"): leads(1, 4, [1], version=6), partition("ghost-0"): leads(1, 1, [1])}
    plan = isr_changes.changed(state, read, ["/isr_change_notification/isr_change_0000000001"])
    assert lines(plan) == text("""
        adopt a-0: leader 1, epoch 4, isr [1]
        remove /isr_change_notification/isr_change_0000000001
        UpdateMetadata to 1 2: a-0
    """)


def test_a_replica_that_died_just_after_its_leader_took_it_in_is_taken_out_again() -> None:
    state = picture([1, 2], {"a-0": (1, 2)}, {"a-0": leads(1, 4, [1])})
    carry_out(state, brokers.lost(state, [2]))
    read = {partition("a-0"): leads(1, 4, [1, 2], version=6, to_commit=1)}
    carry_out(state, isr_changes.changed(state, read, []))
    assert "write a-0: leader 1, epoch 5, isr [1] (over version 6)" in lines(brokers.settle(state, read))


def test_a_refusal_can_be_read_however_long_the_name_is_that_it_quotes() -> None:
    name = "x" * 32_767
    answers = validate(picture(THREE_BROKERS, {}), CreatableTopic(name), CreatableTopic(name))
    results = [answer for answer in answers if isinstance(answer, CreatableTopicResult)]
    assert [result.error_code for result in results] == [ErrorCode.INVALID_REQUEST] * 2
    response = CreateTopicsResponse(0, results)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(response), type=CreateTopicsResponse) == response
