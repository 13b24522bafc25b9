"""The controller's decisions when brokers request a controlled shutdown."""

from __future__ import annotations

import pytest

from minibroker.controller.decisions import brokers, elections, shutdown
from minibroker.controller.decisions.cluster_state import BrokerRemoved, BrokerShuttingDown, ClusterState
from minibroker.controller.decisions.elections import Basis
from minibroker.controller.decisions.plan import MetadataUpdate, Plan
from minibroker.controller.executing import requests
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import LeaderAndIsr, Member
from tests.unit.controller.pictures import broker, carry_out, leads, lines, partition, picture, text

ASSIGNMENT = (1, 2, 3)
ALL = (Member(1, 10), Member(2, 20), Member(3, 30))


def chosen(leader: int, isr: tuple[Member, ...], *stopping: int, to_commit: int = 2) -> tuple[int, list[int]]:
    leader, kept = elections.for_controlled_shutdown(ASSIGNMENT, leader, isr, set(stopping), to_commit)
    return leader, [member.broker_id for member in kept]


def decide(current: LeaderAndIsr, *live: int, stopping: tuple[int, ...]) -> elections.Decision:
    alive = {broker_id: broker(broker_id) for broker_id in live}
    return elections.decide(ASSIGNMENT, current, alive, 7, stopping=stopping)


def shut_down(state: ClusterState, broker_id: int) -> Plan:
    """Return the plan for the broker's partitions, carried out after the one before it."""
    carry_out(state, shutdown.begin(state, broker_id))
    plan = brokers.settle(state, state.partitions_on(broker_id))
    carry_out(state, plan)
    return plan


# --- The election --------------------------------------------------------------------------------------------------


def test_the_first_other_member_of_the_isr_leads_and_the_one_that_stops_leaves_it() -> None:
    assert chosen(1, ALL, 1) == (2, [2, 3])
    assert chosen(1, (ALL[2], ALL[1], ALL[0]), 1) == (2, [3, 2])  # by the assignment, not by the ISR's order


def test_a_follower_that_stops_leaves_the_isr_and_the_leader_stays() -> None:
    assert chosen(1, ALL, 2) == (1, [1, 3])


def test_if_all_in_sync_replicas_stop_the_state_stays_unchanged() -> None:
    assert chosen(1, ALL[:1], 1) == (1, [1])
    assert chosen(1, ALL, 1, 2, 3) == (1, [1, 2, 3])


def test_as_many_stay_in_the_isr_as_are_needed_to_commit_but_others_lead() -> None:
    assert chosen(1, ALL, 1, 2) == (3, [1, 3])
    assert chosen(2, ALL[1:], 2) == (3, [2, 3])
    assert chosen(3, ALL[1:], 2) == (3, [2, 3])
    assert chosen(1, ALL, 1, to_commit=3) == (2, [1, 2, 3])
    assert chosen(1, ALL, 1, 2, to_commit=1) == (3, [3])


def test_an_isr_that_is_too_small_already_keeps_nobody_that_stops() -> None:
    assert chosen(2, ALL[1:], 2, to_commit=3) == (3, [3])


def test_a_move_raises_the_leader_epoch_once_and_puts_the_leader_on_record_in_its_present_run() -> None:
    current = leads(1, 4, (1, 2, 3), epochs=(10, 15, 30))
    after, election = decide(current, 1, 2, 3, stopping=(1,))
    assert (after.leader, after.leader_epoch, dict(after.in_sync_members)) == (2, 5, {2: 20, 3: 30})
    assert after.eligible == ()
    assert election is not None
    assert (election.leader, election.basis) == (2, Basis.IN_SYNC)


def test_a_broker_that_stops_is_not_elected_for_one_that_dies() -> None:
    current = leads(1, 4, (1, 2), epochs=(10, 20))
    after, election = decide(current, 2, 3, stopping=(2,))
    assert election is None
    assert (after.leader, after.isr) == (-1, (1, 2))


def test_an_untrusted_member_is_not_elected_for_one_that_stops() -> None:
    alive = {1: broker(1), 2: broker(2, trusted_since=20), 3: broker(3)}
    current = leads(1, 4, (1, 2, 3), epochs=(10, 15, 30))
    after, _ = elections.decide(ASSIGNMENT, current, alive, 7, stopping=(1,))
    assert (after.leader, after.isr) == (3, (1, 3))  # and two are needed to commit


def test_a_stopping_replica_that_left_a_too_small_isr_stays_eligible() -> None:
    current = leads(2, 4, (2, 3), epochs=(20, 30), eligible={1: 10}, to_commit=3)
    after, _ = decide(current, 2, 3, stopping=(2,))
    assert (after.leader, after.isr, dict(after.eligible_members)) == (3, (3,), {1: 10, 2: 20})


def test_the_same_decision_again_changes_nothing() -> None:
    for stopping in ((1,), (1, 2), (1, 2, 3)):
        after, _ = decide(leads(1, 4, (1, 2, 3)), 1, 2, 3, stopping=stopping)
        assert decide(after, 1, 2, 3, stopping=stopping).state is after


# --- The picture ---------------------------------------------------------------------------------------------------


def test_leaders_move_the_isrs_shrink_and_the_broker_stops_fetching() -> None:
    state = picture(
        [1, 2, 3],
        {"orders-0": (1, 2, 3), "orders-1": (2, 3, 1), "orders-2": (3, 1, 2)},
        {
            "orders-0": leads(1, 4, (1, 2, 3)),
            "orders-1": leads(2, 4, (2, 3, 1)),
            "orders-2": leads(3, 4, (3, 2)),
        },
    )
    begun = shutdown.begin(state, 1)
    assert lines(begun) == text("""
        broker 1 is shutting down
        UpdateMetadata to 1 2 3: brokers only
    """)
    plan = shut_down(state, 1)
    assert lines(plan) == text("""
        partition orders-0 -> OnlinePartition
        write orders-0: leader 2, epoch 5, isr [2 3] (over version 5)
        write orders-1: leader 2, epoch 5, isr [2 3] (over version 5)
        LeaderAndIsr to 1: orders-0 orders-1
        LeaderAndIsr to 2: orders-0 orders-1
        LeaderAndIsr to 3: orders-0 orders-1
        UpdateMetadata to 1 2 3: orders-0 orders-1
    """)
    assert lines(shutdown.stop_following(state, 1)) == text("""
        StopReplica to 1: orders-0
        StopReplica to 1: orders-1
        StopReplica to 1: orders-2
    """)
    assert shutdown.remaining(state, 1) == []


def test_a_stopping_broker_outside_the_isr_gets_no_leader_to_fetch_from() -> None:
    state = picture(
        [1, 2, 3],
        {"orders-0": (1, 2, 3), "orders-1": (1, 2)},
        {"orders-0": leads(1, 4, (1, 2, 3)), "orders-1": leads(1, 4, (1, 2))},
    )
    shut_down(state, 1)
    carry_out(state, shutdown.begin(state, 2))
    carry_out(state, brokers.settle(state, state.partitions_on(2)))
    assert state.leadership[partition("orders-0")].isr == (2, 3)
    assert state.leader(partition("orders-0")) == 3
    told = list(requests.leader_and_isr(state, broker(2), [partition("orders-0")], frozenset(), {}))
    assert [leader.broker_id for request, _ in told for leader in request.live_leaders] == [3]  # it goes on fetching
    told = list(requests.leader_and_isr(state, broker(1), [partition("orders-0")], frozenset(), {}))
    assert [request.live_leaders for request, _ in told] == [[]]


def test_what_remains_is_what_others_cannot_do_without_it() -> None:
    state = picture(
        [1, 2, 3],
        {"alone-0": (1,), "gone-0": (1, 2), "last-0": (1, 2, 3), "small-0": (1, 2, 3), "well-0": (1, 2, 3)},
        {
            "alone-0": leads(1, 4, (1,)),
            "gone-0": leads(1, 4, (1,)),
            "last-0": leads(1, 4, (1,)),
            "small-0": leads(3, 4, (1, 3)),
            "well-0": leads(1, 4, (1, 2, 3)),
        },
        to_delete=("gone",),
    )
    shut_down(state, 1)
    assert [str(each) for each in shutdown.remaining(state, 1)] == ["alone-0", "last-0", "small-0"]
    assert state.leadership[partition("last-0")] == leads(1, 4, (1,))


def test_leaders_learn_who_is_shutting_down() -> None:
    state = picture([1, 2], {})
    carry_out(state, shutdown.begin(state, 2))
    [made_out] = requests.update_metadata(state, MetadataUpdate((1,), ()))
    assert {b.id: b.is_shutting_down for b in made_out(broker(1)).live_brokers} == {1: False, 2: True}


def test_a_new_partition_is_led_by_brokers_that_stay() -> None:
    state = picture([1, 2], {"orders-0": (1, 2), "orders-1": (1,)})
    carry_out(state, shutdown.begin(state, 1))
    carry_out(state, brokers.settle(state, state.partitions_without_leader()))
    assert state.leadership[partition("orders-0")].isr == (2,)
    assert partition("orders-1") not in state.leadership


@pytest.mark.parametrize("is_bounce", [False, True])
def test_a_broker_that_is_gone_or_has_registered_again_is_not_shutting_down(is_bounce: bool) -> None:
    state = picture([1, 2], {})
    state.apply(BrokerShuttingDown(1))
    assert state.staying_broker_ids() == (2,)
    if is_bounce:
        carry_out(state, brokers.added(state, [broker(1, epoch=11)]))
        assert state.staying_broker_ids() == (1, 2)
    else:
        state.apply(BrokerRemoved(1))
    assert state.shutting_down_brokers == set()


def test_only_the_present_run_of_a_broker_is_shut_down() -> None:
    state = picture([1, 2], {})
    assert shutdown.refusal(state, 1, 10) is None
    for broker_id, epoch, code in (
        (1, 9, ErrorCode.STALE_BROKER_EPOCH),
        (1, 11, ErrorCode.BROKER_NOT_AVAILABLE),
        (3, 30, ErrorCode.BROKER_NOT_AVAILABLE),
    ):
        refusal = shutdown.refusal(state, broker_id, epoch)
        assert refusal is not None
        assert refusal.code is code
