"""Brokers lost, added, bounced; offline and new partitions: state in, printed Plan out."""

from __future__ import annotations

from minibroker.controller.decisions import brokers
from minibroker.controller.decisions.cluster_state import ReplicaFailed, Snapshot, TopicSettings
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.znodes import TopicZnode
from tests.unit.controller.pictures import EPOCH, broker, carry_out, leads, lines, partition, picture, take_office, text


def test_a_broker_that_registered_again_is_neither_lost_nor_added_but_bounced() -> None:
    live = {1: broker(1), 2: broker(2), 3: broker(3)}
    registered = {2: broker(2, epoch=21), 3: broker(3), 4: broker(4)}
    difference = brokers.difference(live, registered)
    assert difference.lost == (1,)
    assert difference.bounced == (broker(2, epoch=21),)
    assert difference.added == (broker(4),)


def test_a_dead_leader_is_replaced_and_leaves_the_isr_in_one_write() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 2, 3)}, {"orders-0": leads(1, 4, [1, 2, 3], version=9)})
    plan = brokers.lost(state, [1])
    assert lines(plan) == text("""
        broker 1 is gone
        partition orders-0 -> OfflinePartition
        replica orders-0 on 1 -> OfflineReplica
    """)
    carry_out(state, plan)
    assert lines(brokers.settle(state, [partition("orders-0")])) == text("""
        partition orders-0 -> OnlinePartition
        write orders-0: leader 2, epoch 5, isr [2 3] (over version 9)
        LeaderAndIsr to 2: orders-0
        LeaderAndIsr to 3: orders-0
        UpdateMetadata to 2 3: orders-0
    """)


def test_a_dead_follower_leaves_the_isr_and_the_leader_epoch_rises() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 2, 3)}, {"orders-0": leads(2, 4, [1, 2, 3], version=9)})
    plan = brokers.lost(state, [3])
    assert lines(plan) == ["broker 3 is gone", "replica orders-0 on 3 -> OfflineReplica"]
    carry_out(state, plan)
    assert lines(brokers.settle(state, [partition("orders-0")])) == text("""
        write orders-0: leader 2, epoch 5, isr [1 2] (over version 9)
        LeaderAndIsr to 1: orders-0
        LeaderAndIsr to 2: orders-0
        UpdateMetadata to 1 2: orders-0
    """)


def test_a_replica_outside_the_isr_is_not_elected_even_if_it_is_the_only_one_left() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(1, 4, [1])})
    carry_out(state, brokers.lost(state, [1]))
    plan = brokers.settle(state, [partition("orders-0")])
    assert lines(plan) == text("""
        note: orders-0 has no leader: none of its ISR [1] is alive
        write orders-0: leader -1, epoch 5, isr [1] (over version 5)
        LeaderAndIsr to 2: orders-0
        UpdateMetadata to 2: orders-0
    """)
    carry_out(state, plan)
    assert state.partition_state(partition("orders-0")) is PartitionState.OFFLINE
    assert state.offline_partition_count() == 1


def test_an_unclean_election_is_for_topics_that_ask_for_it_and_says_what_it_costs() -> None:
    states = {"orders-0": leads(1, 4, [1]), "clicks-0": leads(1, 4, [1])}
    state = picture([1, 2, 3], {"orders-0": (1, 3, 2), "clicks-0": (1, 3, 2)}, states)
    carry_out(state, brokers.lost(state, [1]))
    affected = [partition("orders-0"), partition("clicks-0")]
    assert brokers.topics_to_settle(state, affected) == ("clicks", "orders")
    plan = brokers.settle(state, affected, settings={"clicks": TopicSettings(unclean_leader_election=True)})
    assert "write clicks-0: leader 3, epoch 5, isr [3] (over version 5)" in lines(plan)
    assert "note: unclean election of 3 for clicks-0: what only [1] had is lost" in lines(plan)
    assert "write orders-0: leader -1, epoch 5, isr [1] (over version 5)" in lines(plan)


def test_no_setting_is_asked_for_where_all_is_well_or_nobody_lives() -> None:
    states = {"changing-0": leads(1, 4, [1, 2]), "dead-0": leads(3, 4, [3]), "healthy-0": leads(2, 4, [2])}
    state = picture([1, 2], {"changing-0": (1, 2), "dead-0": (3,), "healthy-0": (2, 1)}, states)
    carry_out(state, brokers.lost(state, [1]))
    assert brokers.topics_to_settle(state, state.assignments) == ("changing",)


def test_when_all_in_sync_replicas_die_at_once_each_of_them_may_come_back_and_lead() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 2, 3)}, {"orders-0": leads(1, 4, [1, 2])})
    carry_out(state, brokers.lost(state, [1, 2]))
    carry_out(state, brokers.settle(state, [partition("orders-0")]))
    assert state.leadership[partition("orders-0")].isr == (1, 2)

    carry_out(state, brokers.added(state, [broker(2, epoch=21)]))
    assert lines(brokers.settle(state, state.partitions_without_leader(), tell=[2])) == text("""
        partition orders-0 -> OnlinePartition
        write orders-0: leader 2, epoch 6, isr [2], eligible [1] (over version 6)
        LeaderAndIsr to 2: orders-0
        LeaderAndIsr to 3: orders-0
        UpdateMetadata to 2 3: orders-0
    """)


def test_a_joining_broker_gets_the_full_metadata_before_its_replicas() -> None:
    state = picture(
        [1],
        {"orders-0": (1, 2), "clicks-0": (1,), "new-0": (2,)},
        {"orders-0": leads(1, 4, [1]), "clicks-0": leads(1, 0, [1])},
    )
    plan = brokers.added(state, [broker(2)])
    assert lines(plan) == text("""
        broker 2 (epoch 20) joins
        replica new-0 on 2 -> OnlineReplica
        replica orders-0 on 2 -> OnlineReplica
        UpdateMetadata to 2: clicks-0 new-0 orders-0
    """)
    carry_out(state, plan)
    hosted = brokers.affected_by(state, [2])
    assert lines(brokers.settle(state, hosted, tell=[2], announce=hosted, announce_brokers=True)) == text("""
        partition new-0 -> OnlinePartition
        make sure of /brokers/topics/new/partitions
        write new-0: leader 2, epoch 0, isr [2] (over no znode yet)
        LeaderAndIsr to 2: new-0 (new) orders-0
        UpdateMetadata to 1 2: new-0 orders-0
    """)


def test_a_broker_without_replicas_still_makes_everybody_hear_of_it() -> None:
    state = picture([1], {"orders-0": (1,)}, {"orders-0": leads(1, 4, [1])})
    carry_out(state, brokers.added(state, [broker(2)]))
    assert lines(brokers.settle(state, [], tell=[2], announce_brokers=True)) == ["UpdateMetadata to 1 2: brokers only"]


def test_a_new_partition_gets_its_live_replicas_as_isr() -> None:
    state = picture([2, 3], {"orders-0": (1, 2, 3), "orders-1": (1,)})
    plan = brokers.settle(state, state.partitions_without_leader())
    assert lines(plan) == text("""
        note: orders-1 stays new: none of its replicas [1] is alive
        partition orders-0 -> OnlinePartition
        make sure of /brokers/topics/orders/partitions
        write orders-0: leader 2, epoch 0, isr [2 3] (over no znode yet)
        LeaderAndIsr to 2: orders-0 (new)
        LeaderAndIsr to 3: orders-0 (new)
        UpdateMetadata to 2 3: orders-0
    """)


def test_settling_twice_changes_nothing() -> None:
    state = picture([2, 3], {"orders-0": (1, 2, 3), "orders-1": (1,)}, {"orders-1": leads(1, 3, [1])})
    carry_out(state, brokers.settle(state, state.assignments))
    again = brokers.settle(state, state.assignments)
    assert again.writes == ()
    assert again.partition_moves == ()
    assert again.leader_and_isr == {}
    assert again.metadata_updates == ()


def test_after_a_conflict_all_live_replicas_get_the_state_even_without_a_change() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 2, 3)}, {"orders-0": leads(1, 4, [1, 2])})
    assert lines(brokers.settle(state, [partition("orders-0")], tell=[1, 2, 3], announce=[partition("orders-0")])) == [
        "LeaderAndIsr to 1: orders-0",
        "LeaderAndIsr to 2: orders-0",
        "LeaderAndIsr to 3: orders-0",
        "UpdateMetadata to 1 2 3: orders-0",
    ]


def test_a_partition_whose_state_cannot_be_read_is_left_alone() -> None:
    state = picture([1], {})
    snapshot = Snapshot(
        {}, {"orders": TopicZnode("id", {0: (1,)})}, {}, malformed_states=frozenset({TopicPartition("orders", 0)})
    )
    take_office(state, snapshot)
    plan = brokers.settle(state, [TopicPartition("orders", 0)], tell=[1])
    assert plan.writes == ()
    assert plan.leader_and_isr == {}
    assert plan.notes == ("the state znode of orders-0 is missing or cannot be read: it stays without a leader",)


def test_a_failed_log_directory_takes_the_replica_down_and_not_the_broker() -> None:
    before = leads(1, 0, [1, 2], to_commit=1)
    state = picture([1, 2], {"a-0": (1, 2), "b-0": (1, 2)}, {"a-0": before, "b-0": before})
    errors = {partition("a-0"): ErrorCode.KAFKA_STORAGE_ERROR, partition("b-0"): ErrorCode.NONE}
    plan = brokers.replicas_answered(state, 1, errors)
    assert lines(plan) == text("""
        replica a-0 on 1 has lost its log directory
        partition a-0 -> OfflinePartition
        replica a-0 on 1 -> OfflineReplica
    """)
    carry_out(state, plan)
    assert lines(brokers.settle(state, [partition("a-0")])) == text("""
        partition a-0 -> OnlinePartition
        write a-0: leader 2, epoch 1, isr [2] (over version 5)
        LeaderAndIsr to 2: a-0
        UpdateMetadata to 1 2: a-0
    """)
    # The next answer reports that it is well again; until then the problem is reported once.
    assert lines(brokers.replicas_answered(state, 1, errors)) == []
    well = brokers.replicas_answered(state, 1, {partition("a-0"): ErrorCode.NONE})
    assert lines(well) == ["replica a-0 on 1 has its log directory again", "replica a-0 on 1 -> OnlineReplica"]


def test_a_broker_with_a_failed_log_directory_is_asked_again_when_it_reports_a_change() -> None:
    state = picture([1, 2], {"a-0": (1, 2)}, {"a-0": leads(1, 0, [1])})
    state.apply(ReplicaFailed(PartitionReplica(partition("a-0"), 2)))
    plan = brokers.settle(state, brokers.affected_by(state, [2]), tell=[2])
    assert lines(plan) == ["LeaderAndIsr to 2: a-0"]


def test_a_restart_gives_a_broker_its_log_directories_back() -> None:
    state = picture([1, 2], {"a-0": (1, 2)}, {"a-0": leads(1, 0, [1, 2])})
    state.apply(ReplicaFailed(PartitionReplica(partition("a-0"), 2)))
    assert state.live_replicas(partition("a-0")) == (1,)
    carry_out(state, brokers.lost(state, [2]))
    carry_out(state, brokers.added(state, [broker(2, epoch=21)]))
    assert state.live_replicas(partition("a-0")) == (1, 2)


def test_a_new_controller_drops_brokers_that_refuse_connections_and_stale_requests() -> None:
    state = picture([], {})
    topics = {"orders": TopicZnode("orders-id", {0: (1, 2)}), "old": TopicZnode("old-id", {0: (2,)})}
    snapshot = Snapshot(
        {1: broker(1), 2: broker(2)},
        topics,
        {TopicPartition("orders", 0): leads(1, 4, [1, 2])},
        topics_to_delete=("ghost", "old"),
        notifications=("/isr_change_notification/isr_change_0000000004",),
    )
    assert lines(brokers.load(state, snapshot, refused=[1])) == text("""
        note: topic ghost does not exist: the request to delete it is dropped
        broker 2 (epoch 20) joins
        topic old (old-id) has the replicas 0: [2]
        topic orders (orders-id) has the replicas 0: [1, 2]
        topic old is queued for deletion
        remove /brokers/ids/1 (epoch 10)
        remove /isr_change_notification/isr_change_0000000004
        remove /admin/delete_topics/ghost
        UpdateMetadata to 2: brokers only
        then ResumeDeletions
    """)
    carry_out(state, brokers.load(state, snapshot, refused=[1]))
    assert lines(brokers.initialize(state, snapshot, [partition("old-0"), partition("orders-0")])) == [
        "found NewPartition: old-0; OfflinePartition: orders-0; "
        "OnlineReplica: [old-0 on 2] [orders-0 on 2]; OfflineReplica: [orders-0 on 1]",
        "adopt orders-0: leader 1, epoch 4, isr [1 2]",
    ]


def test_a_topic_to_be_deleted_gets_no_election_and_no_metadata() -> None:
    state = picture([1, 2], {"old-0": (1, 2)}, {"old-0": leads(1, 4, [1, 2])}, to_delete=("old",))
    carry_out(state, brokers.lost(state, [1]))
    affected = [partition("old-0")]
    plan = brokers.settle(state, affected, announce=affected, announce_brokers=True, tell=[2])
    assert lines(plan) == ["UpdateMetadata to 2: brokers only"]


def test_a_broker_that_dies_while_it_deletes_makes_the_topic_wait_and_resumes_it_when_it_joins() -> None:
    state = picture([1, 2], {"old-0": (1, 2)}, {"old-0": leads(1, 4, [1, 2])}, to_delete=("old",))
    replica = PartitionReplica(partition("old-0"), 2)
    state.move_replica(replica, ReplicaState.DELETION_STARTED)
    plan = brokers.lost(state, [2])
    assert lines(plan) == text("""
        broker 2 is gone
        the deletion of topic old waits: broker 2 is down
        replica old-0 on 2 -> ReplicaDeletionIneligible
    """)
    carry_out(state, plan)
    assert lines(brokers.added(state, [broker(2, epoch=21)])) == text("""
        broker 2 (epoch 21) joins
        the deletion of topic old may go on
        UpdateMetadata to 2: old (deleted)
        then ResumeDeletions
    """)


def test_what_the_controller_writes_carries_its_epoch() -> None:
    state = picture([1, 2], {"a-0": (1, 2), "b-0": (1,)}, {"a-0": leads(1, 0, [1, 2], controller_epoch=3)})
    carry_out(state, brokers.lost(state, [2]))
    carry_out(state, brokers.settle(state, state.assignments))
    assert state.leadership[partition("a-0")].controller_epoch == EPOCH
    assert state.leadership[partition("b-0")].controller_epoch == EPOCH
