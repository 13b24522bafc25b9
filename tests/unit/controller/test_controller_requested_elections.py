"""Requested elections: the elected leader and ISR, or the reason for none; and the automatic rebalance."""

from __future__ import annotations

import pytest

from minibroker.controller.decisions import brokers, elections, requested_elections
from minibroker.controller.decisions.cluster_state import ClusterState, DeletionQueued, ReplicaFailed, TopicSettings
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import NO_LEADER, ElectionType, LeaderAndIsr, TopicPartition
from tests.unit.controller.pictures import EPOCH, broker, carry_out, leads, lines, partition, picture, text

ASSIGNMENT = (1, 2, 3)
LIVE = {broker_id: broker(broker_id) for broker_id in ASSIGNMENT}


def prefer(current: LeaderAndIsr, live: elections.Live = LIVE) -> LeaderAndIsr | ErrorCode:
    decision = elections.elect_preferred(ASSIGNMENT, current, live, EPOCH)
    return decision if isinstance(decision, ErrorCode) else decision.state


def unclean(current: LeaderAndIsr, live: elections.Live = LIVE) -> LeaderAndIsr | ErrorCode:
    decision = elections.elect_unclean(ASSIGNMENT, current, live, EPOCH)
    return decision if isinstance(decision, ErrorCode) else decision.state


# --- Preferred ------------------------------------------------------------------------------------------------------


def test_the_preferred_leader_takes_over_in_a_new_epoch_and_the_others_stay_in_sync() -> None:
    state = prefer(leads(2, 4, [1, 2, 3], epochs=[5, 20, 25]))
    assert state == leads(1, 5, [1, 2, 3], controller_epoch=EPOCH, epochs=[10, 20, 25])


def test_a_preferred_leader_that_leads_is_not_elected_again() -> None:
    assert prefer(leads(1, 4, [1, 2, 3], epochs=[10, 20, 30])) is ErrorCode.ELECTION_NOT_NEEDED


def test_a_preferred_leader_that_is_dead_is_not_elected() -> None:
    live = {b: LIVE[b] for b in (2, 3)}
    assert prefer(leads(2, 4, [1, 2, 3]), live) is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert prefer(leads(1, 4, [1, 2, 3]), live) is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE


def test_a_preferred_leader_outside_of_the_isr_is_not_elected_even_if_it_is_eligible() -> None:
    assert prefer(leads(2, 4, [2, 3])) is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert prefer(leads(2, 4, [2], eligible={1: 10})) is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE


def test_a_preferred_leader_that_may_have_lost_records_is_not_elected() -> None:
    live = LIVE | {1: broker(1, epoch=10, trusted_since=10)}
    assert prefer(leads(2, 4, [1, 2, 3], epochs=[9, 20, 30]), live) is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE


def test_a_preferred_leader_that_registered_again_leads_in_an_epoch_of_its_own() -> None:
    state = prefer(leads(1, 4, [1, 2], epochs=[7, 20]))
    assert state == leads(1, 5, [1, 2], controller_epoch=EPOCH, epochs=[10, 20])


def test_an_untrusted_replica_leaves_the_isr_and_stays_on_record_if_that_is_then_too_small() -> None:
    live = {b: LIVE[b] for b in (1, 2)}
    assert prefer(leads(2, 4, [1, 2, 3], epochs=[10, 20, 30]), live) == leads(
        1, 5, [1, 2], controller_epoch=EPOCH, epochs=[10, 20]
    )
    state = prefer(leads(2, 4, [1, 2, 3], epochs=[10, 20, 30], to_commit=3), live)
    assert state == leads(1, 5, [1, 2], controller_epoch=EPOCH, epochs=[10, 20], eligible={3: 30}, to_commit=3)


def test_those_that_are_eligible_stay_so() -> None:
    state = prefer(leads(2, 4, [1, 2], epochs=[10, 20], eligible={3: 25}))
    assert state == leads(1, 5, [1, 2], controller_epoch=EPOCH, epochs=[10, 20], eligible={3: 25})


# --- Unclean --------------------------------------------------------------------------------------------------------


def test_an_unclean_election_leaves_a_leader_that_lives_alone() -> None:
    assert unclean(leads(2, 4, [2], epochs=[20])) is ErrorCode.ELECTION_NOT_NEEDED


def test_an_unclean_election_takes_who_has_everything_if_there_is_such_a_one() -> None:
    assert unclean(leads(NO_LEADER, 4, [3, 2], epochs=[29, 19])) == leads(
        2, 5, [3, 2], controller_epoch=EPOCH, epochs=[29, 20]
    )
    live = {b: LIVE[b] for b in (1, 3)}
    assert unclean(leads(NO_LEADER, 4, [2], epochs=[20], eligible={3: 30}), live) == leads(
        3, 5, [3], controller_epoch=EPOCH, epochs=[30], eligible={2: 20}
    )


def test_an_unclean_election_takes_any_replica_that_lives_and_from_then_on_its_log_counts() -> None:
    live = {3: LIVE[3]}
    assert unclean(leads(NO_LEADER, 4, [1], eligible={2: 20}), live) == leads(
        3, 5, [3], controller_epoch=EPOCH, epochs=[30]
    )


def test_without_a_live_replica_no_leader_is_elected() -> None:
    assert unclean(leads(NO_LEADER, 4, [1]), {}) is ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


# --- Plans ----------------------------------------------------------------------------------------------------------


def outcomes(
    state: ClusterState, election_type: ElectionType, *names: str, settings: TopicSettings | None = None
) -> dict[str, ErrorCode]:
    partitions = [partition(name) for name in names]
    found = requested_elections.elect(
        state, partitions, election_type, {p.topic: settings for p in partitions} if settings else {}
    )
    return {str(p): outcome.error for p, outcome in found.outcomes.items()}


def test_a_preferred_election_is_one_write_and_one_order_to_each_replica() -> None:
    state = picture(
        [1, 2, 3],
        {"orders-0": (1, 2, 3), "orders-1": (2, 3, 1), "clicks-0": (3,)},
        {"orders-0": leads(2, 4, [1, 2, 3]), "orders-1": leads(2, 1, [2, 3, 1]), "clicks-0": leads(3, 1, [3])},
    )
    asked = [partition("orders-0"), partition("orders-1")]
    assert requested_elections.topics_to_elect_in(state, asked) == ("orders",)
    found = requested_elections.elect(state, asked, ElectionType.PREFERRED, {"orders": TopicSettings()})
    assert lines(found.plan) == text("""
        partition orders-0 -> OnlinePartition
        write orders-0: leader 1, epoch 5, isr [1 2 3] (over version 5)
        LeaderAndIsr to 1: orders-0
        LeaderAndIsr to 2: orders-0
        LeaderAndIsr to 3: orders-0
        UpdateMetadata to 1 2 3: orders-0
    """)
    assert found.outcomes[asked[0]] == (ErrorCode.NONE, "", 5)
    assert found.outcomes[asked[1]].error is ErrorCode.ELECTION_NOT_NEEDED
    carry_out(state, found.plan)
    assert lines(requested_elections.elect(state, asked, ElectionType.PREFERRED, {}).plan) == []


def test_partitions_that_another_leads_are_elected_for_together() -> None:
    leaders = {"orders-0": 1, "orders-1": 2, "orders-2": 1, "orders-3": NO_LEADER}
    state = picture([1, 2], dict.fromkeys(leaders, (1, 2)), {name: leads(b, 4, [1, 2]) for name, b in leaders.items()})
    asked = [partition(name) for name in reversed(leaders)]
    in_turn = requested_elections.displaced_first(state, asked)
    assert [str(p) for p in in_turn] == ["orders-1", "orders-3", "orders-0", "orders-2"]


def test_an_unclean_election_on_request_is_announced_as_what_it_is() -> None:
    state = picture([1, 2, 3], {"orders-0": (1, 3, 2)}, {"orders-0": leads(1, 4, [1])})
    carry_out(state, brokers.lost(state, [1]))
    carry_out(state, brokers.settle(state, [partition("orders-0")]))
    found = requested_elections.elect(state, [partition("orders-0")], ElectionType.UNCLEAN, {})
    assert lines(found.plan) == text(
        """
        note: unclean election of 3 for orders-0: what only [1] had is lost
        partition orders-0 -> OnlinePartition
        write orders-0: leader 3, epoch 6, isr [3] (over version 6)
        LeaderAndIsr to 2: orders-0
        LeaderAndIsr to 3: orders-0
        UpdateMetadata to 2 3: orders-0
    """
    )


def test_a_replica_on_a_failed_log_directory_is_not_elected() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(2, 4, [1, 2])})
    state.apply(ReplicaFailed(PartitionReplica(partition("orders-0"), 1)))
    assert outcomes(state, ElectionType.PREFERRED, "orders-0") == {"orders-0": ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE}


@pytest.mark.parametrize("is_synced", [False, True])
def test_in_a_synced_topic_a_replica_is_believed_for_what_it_had_flushed(is_synced: bool) -> None:
    state = picture([2], {"orders-0": (1, 2)}, {"orders-0": leads(2, 4, [1, 2], epochs=[9, 20])})
    carry_out(state, brokers.added(state, [broker(1, epoch=10, trusted_since=10, synced_since=3)]))
    expected = ErrorCode.NONE if is_synced else ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    settings = TopicSettings(is_synced=is_synced)
    assert outcomes(state, ElectionType.PREFERRED, "orders-0", settings=settings) == {"orders-0": expected}


def test_a_partition_that_never_had_a_leader_cannot_get_one_by_request() -> None:
    state = picture([2], {"orders-0": (1,)})
    assert outcomes(state, ElectionType.PREFERRED, "orders-0") == {"orders-0": ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE}
    assert outcomes(state, ElectionType.UNCLEAN, "orders-0") == {"orders-0": ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE}


def test_unknown_partitions_and_those_of_topics_to_be_deleted_are_refused() -> None:
    state = picture([1], {"orders-0": (1,), "gone-0": (1,)}, {"orders-0": leads(1, 0, [1]), "gone-0": leads(1, 0, [1])})
    state.apply(DeletionQueued("gone"))
    refused = requested_elections.refused(
        state, [partition("orders-0"), partition("gone-0"), partition("none-7"), TopicPartition("orders", -1)]
    )
    assert {str(p): outcome.error for p, outcome in refused.items()} == {
        "gone-0": ErrorCode.INVALID_TOPIC_EXCEPTION,
        "none-7": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "orders--1": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }


# --- The znode ------------------------------------------------------------------------------------------------------


def test_the_znode_is_as_kafka_writes_it() -> None:
    kafkas = b'{"version":1,"partitions":[{"topic":"orders","partition":3},{"topic":"clicks","partition":0}]}'
    asked = [partition("orders-3"), partition("clicks-0")]
    assert znodes.decode_preferred_election(kafkas) == asked
    assert znodes.decode_preferred_election(znodes.encode_preferred_election(asked)) == asked


def test_what_is_wrong_with_a_long_list_is_one_line_of_bounded_length() -> None:
    asked = [TopicPartition("none", number) for number in range(5_000)] * 2
    line = requested_elections.named(asked, requested_elections.refused(picture([], {}), asked))
    assert line.startswith("/admin/preferred_replica_election: there is no partition none-0; ")
    assert line.endswith("and 9980 more")
    assert len(line) < 2_000


# --- Automatic rebalance --------------------------------------------------------------------------------------------


def unbalanced(elsewhere: int, of: int, live: tuple[int, ...] = (1, 2)) -> ClusterState:
    """Return a state where broker 1 is preferred for this number of partitions, and broker 2 leads some of them."""
    names = [f"orders-{number:02}" for number in range(of)]
    return picture(
        live,
        dict.fromkeys(names, (1, 2)),
        {name: leads(2 if number < elsewhere else 1, 4, [1, 2]) for number, name in enumerate(names)},
    )


@pytest.mark.parametrize(
    ("elsewhere", "of", "percentage", "moves"),
    [(0, 10, 10, 0), (1, 10, 10, 0), (2, 10, 10, 2), (10, 10, 10, 10), (1, 10, 9, 1), (1, 100, 0, 1), (3, 3, 100, 0)],
)
def test_a_broker_gets_back_what_it_should_lead_once_that_is_more_than_the_percentage(
    elsewhere: int, of: int, percentage: int, moves: int
) -> None:
    assert len(requested_elections.to_rebalance(unbalanced(elsewhere, of), percentage)) == moves


def test_only_preferred_leaders_that_live_and_are_in_sync_get_partitions_back() -> None:
    assert requested_elections.to_rebalance(unbalanced(3, 3, live=(2,)), 10) == ()
    state = picture(
        [1, 2],
        {"orders-0": (1, 2), "orders-1": (1, 2), "orders-2": (1, 2), "gone-0": (1, 2)},
        {
            "orders-0": leads(2, 4, [2]),
            "orders-1": leads(2, 4, [1, 2]),
            "orders-2": leads(2, 4, [1, 2]),
            "gone-0": leads(2, 4, [1, 2]),
        },
    )
    state.apply(ReplicaFailed(PartitionReplica(partition("orders-2"), 1)))
    state.apply(DeletionQueued("gone"))
    assert requested_elections.to_rebalance(state, 10) == (partition("orders-1"),)


def test_topics_to_be_deleted_do_not_count() -> None:
    state = picture(
        [1, 2],
        {"orders-0": (1, 2), "gone-0": (1, 2)},
        {"orders-0": leads(1, 4, [1, 2]), "gone-0": leads(2, 4, [1, 2])},
    )
    assert state.preferred_replica_imbalance_count() == 1
    state.apply(DeletionQueued("gone"))
    assert requested_elections.to_rebalance(state, 0) == ()
    assert state.preferred_replica_imbalance_count() == 0
