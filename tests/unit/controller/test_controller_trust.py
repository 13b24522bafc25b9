"""Which brokers may be elected after some have lost records: each rule, and a controller that follows them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from minibroker.controller.decisions import brokers, elections, isr_changes
from minibroker.controller.decisions.cluster_state import LogEnd, LogEndReported, TopicSettings
from minibroker.controller.decisions.elections import Basis, Decision
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica
from minibroker.protocol import znodes
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import (
    NO_LEADER,
    LeaderAndIsr,
    Member,
    RegisteredBroker,
    TopicPartition,
    eligible_after,
    min_insync_replicas,
)
from tests.running import run_by
from tests.unit.controller.cluster import Cluster, simulate
from tests.unit.controller.pictures import broker, carry_out, leads, lines, picture, text

ASSIGNMENT = (1, 2, 3)
ORDERS_0 = TopicPartition("orders", 0)


def decide(
    current: LeaderAndIsr,
    *live: RegisteredBroker,
    unclean: bool = False,
    log_ends: Mapping[int, LogEnd] | None = None,
) -> Decision:
    return elections.decide(
        ASSIGNMENT,
        current,
        {b.id: b for b in live},
        7,
        unclean=unclean,
        log_ends=log_ends,
    )


def shown(state: LeaderAndIsr) -> tuple[int, dict[int, int], dict[int, int]]:
    """Leader, ISR and eligible replicas, with their epochs."""
    return state.leader, dict(state.in_sync_members), dict(state.eligible_members)


# --- Rules -------------------------------------------------------------------------------------------------------


def test_a_member_is_trusted_while_its_broker_has_lost_nothing_since_it_was_put_on_record() -> None:
    live = {1: broker(1, epoch=30, trusted_since=20)}
    assert [elections.is_trusted(Member(1, epoch), live) for epoch in (19, 20, 30, -1)] == [False, True, True, True]
    assert not elections.is_trusted(Member(2, 99), live)


def test_a_leader_stays_only_in_the_run_of_its_broker_that_was_elected() -> None:
    state = leads(1, 4, [1, 2, 3], epochs=[10, 20, 30])
    others = (broker(2), broker(3))
    assert decide(state, broker(1), *others) == (state, None)
    restarted, election = decide(state, broker(1, epoch=11), *others)
    assert (restarted.leader, restarted.leader_epoch) == (1, 5)
    assert restarted.isr_epochs == (11, 20, 30), "the leader's is its live one, the others keep theirs"
    assert election == (1, Basis.IN_SYNC)


def test_a_leader_whose_epoch_is_not_on_record_stays_as_in_kafka() -> None:
    state = leads(1, 4, [1, 2, 3])
    assert decide(state, broker(1, epoch=11), broker(2), broker(3)) == (state, None)


def test_a_leader_that_lost_something_is_not_elected_again() -> None:
    state = leads(1, 4, [1, 2, 3], epochs=[10, 20, 30])
    after, _ = decide(state, broker(1, epoch=11, trusted_since=11), broker(2), broker(3))
    assert shown(after) == (2, {2: 20, 3: 30}, {1: 10})


def test_a_live_member_that_lost_records_leaves_the_isr_and_is_not_elected() -> None:
    state = leads(1, 4, [1, 2], epochs=[10, 20])
    lossy = broker(2, epoch=21, trusted_since=21)
    after, election = decide(state, broker(1), lossy, broker(3))
    assert shown(after) == (1, {1: 10}, {2: 20})
    assert (after.leader_epoch, election) == (5, None)
    assert decide(after, lossy, broker(3)).state.leader == NO_LEADER


def test_a_member_that_lost_records_counts_if_its_elected_successor_has_lost_more() -> None:
    # Broker 2 counted as alive when 1 was found to have lost records, and had lost its power by then.
    state = leads(1, 4, [1, 2], epochs=[10, 20])
    one, two = broker(1, epoch=11, trusted_since=11), broker(2, epoch=21, trusted_since=21)
    in_vain, _ = decide(state, one, broker(2))
    assert shown(in_vain) == (2, {2: 20}, {1: 10})
    nobody, _ = decide(in_vain, one)
    assert shown(nobody) == (NO_LEADER, {2: 20}, {1: 10})
    after, election = decide(nobody, one, two, log_ends={1: LogEnd(4, 323), 2: LogEnd(4, 308)})
    assert shown(after) == (1, {1: 11}, {})
    assert election == (1, Basis.LONGEST_LOG)


def test_a_synced_topic_goes_by_what_was_flushed() -> None:
    state = leads(1, 4, [1, 2], epochs=[10, 20])
    one = broker(1, epoch=11, trusted_since=11, synced_since=3)
    two = broker(2, epoch=21, trusted_since=21, synced_since=21)
    assert decide(state, one, two).state.leader == NO_LEADER
    believed = elections.trusted_by_what_is_flushed({1: one, 2: two})
    after, election = decide(state, *believed.values())
    assert shown(after) == (1, {1: 11}, {2: 20})
    assert election == (1, Basis.IN_SYNC)


def test_the_controller_elects_after_a_power_cut_of_all_by_the_topics_durability() -> None:
    names = ("orders-0", "logs-0")
    before = leads(NO_LEADER, 4, [1, 2], epochs=[10, 20], to_commit=1)
    state = picture([], dict.fromkeys(names, (1, 2)), dict.fromkeys(names, before))
    carry_out(state, brokers.added(state, [broker(2, epoch=21, trusted_since=21, synced_since=2)]))
    assert brokers.topics_to_settle(state, state.assignments) == ("logs", "orders")
    settings = {"orders": TopicSettings(is_synced=True), "logs": TopicSettings()}
    carry_out(state, brokers.settle(state, state.assignments, settings=settings))
    assert shown(state.leadership[ORDERS_0]) == (2, {2: 21}, {})
    assert state.leadership[TopicPartition("logs", 0)].leader == NO_LEADER


def test_a_replica_that_dies_stays_eligible_if_too_few_are_left_and_only_then() -> None:
    state = leads(1, 4, [1, 2, 3], epochs=[10, 20, 30])
    two_left, _ = decide(state, broker(1), broker(3))
    assert shown(two_left) == (1, {1: 10, 3: 30}, {})
    one_left, _ = decide(two_left, broker(3))
    assert shown(one_left) == (3, {3: 30}, {1: 10})
    none_left, _ = decide(one_left)
    assert shown(none_left) == (NO_LEADER, {3: 30}, {1: 10})


def test_one_that_lost_something_stays_on_record_until_the_leader_says_that_it_does_without() -> None:
    """The other replica may also have lost its power without a sign of it yet: then its log may be shorter."""
    state = leads(1, 4, [1, 2, 3, 4], epochs=[10, 20, 30, 40])
    lossy = broker(3, epoch=31, trusted_since=31)
    without_it, _ = decide(state, broker(1), broker(2), lossy)
    assert shown(without_it) == (1, {1: 10, 2: 20}, {3: 30, 4: 40})
    fewer, _ = decide(without_it, broker(2), lossy)
    assert shown(fewer) == (2, {2: 20}, {3: 30, 4: 40, 1: 10})
    of_all, _ = decide(fewer, lossy)
    assert (of_all.leader, of_all.isr, set(of_all.eligible)) == (NO_LEADER, (2,), {1, 3, 4})


def test_when_the_last_in_sync_is_gone_an_eligible_one_leads_and_the_last_is_eligible() -> None:
    state = leads(NO_LEADER, 7, [3], epochs=[30], eligible={1: 10})
    assert shown(decide(state, broker(1, epoch=11)).state) == (1, {1: 11}, {3: 30})
    lossy = broker(3, epoch=31, trusted_since=31)
    assert shown(decide(state, broker(1, epoch=11), lossy).state) == (1, {1: 11}, {3: 30})
    assert shown(decide(state, broker(1, epoch=11), broker(3, epoch=31)).state) == (3, {3: 31}, {1: 10})


def test_replicas_on_record_stay_there_while_none_can_be_elected() -> None:
    state = leads(1, 4, [1, 2], epochs=[10, 20])
    after, _ = decide(state, broker(2, epoch=21, trusted_since=21), broker(3))
    assert shown(after) == (NO_LEADER, {1: 10, 2: 20}, {})
    assert decide(after, broker(2, epoch=21, trusted_since=21)).state is after
    back, _ = decide(after, broker(1, epoch=11), broker(2, epoch=21, trusted_since=21))
    assert shown(back) == (1, {1: 11}, {2: 20})


def test_the_longest_log_leads_when_all_are_back_and_none_can_be_trusted() -> None:
    state = leads(NO_LEADER, 4, [1, 2], epochs=[10, 20], eligible={3: 30})
    lossy = [broker(b, epoch=b * 10 + 1, trusted_since=b * 10 + 1) for b in (1, 2, 3)]
    ends = {1: LogEnd(3, 90), 2: LogEnd(3, 95), 3: LogEnd(2, 99)}
    after, election = decide(state, *lossy, log_ends=ends)
    assert shown(after) == (2, {2: 21}, {})
    assert election == (2, Basis.LONGEST_LOG)
    equal, _ = decide(state, *lossy, log_ends=ends | {1: LogEnd(3, 95)})
    assert equal.leader == 1, "of equal ones the first of the assignment"
    assert decide(state, *lossy[:2], log_ends=ends).state is state, "one is not back"
    assert decide(state, *lossy, log_ends={1: ends[1], 3: ends[3]}).state is state, "one has not told"


def test_the_unclean_setting_takes_replicas_that_were_on_record_before_others() -> None:
    state = leads(NO_LEADER, 4, [3], epochs=[30], eligible={2: 20})
    foreign, former = broker(1), broker(2, epoch=21, trusted_since=21)
    assert decide(state, foreign, former, unclean=True).election == (2, Basis.UNCLEAN)
    assert shown(decide(state, foreign, unclean=True).state) == (1, {1: 10}, {})
    assert decide(state, foreign, former).state is state


def test_a_new_partition_has_the_epochs_of_the_replicas_that_live() -> None:
    state = elections.first_state(ASSIGNMENT, {2: broker(2), 3: broker(3, epoch=33)}, 7, to_commit=2)
    assert state is not None
    assert shown(state) == (2, {2: 20, 3: 33}, {})


@pytest.mark.parametrize(
    ("configured", "replicas", "needed"), [(None, 3, 2), (None, 2, 1), (None, 1, 1), (3, 3, 3), (3, 2, 2), (1, 3, 1)]
)
def test_as_many_must_be_in_sync_as_the_setting_says_but_not_more_than_there_are(
    configured: int | None, replicas: int, needed: int
) -> None:
    assert min_insync_replicas(configured, replicas) == needed


def test_the_eligible_are_kept_while_too_few_are_in_sync_but_for_those_that_join() -> None:
    assert eligible_after([Member(2, 20)], [Member(3, 30)], [1], 2) == (Member(2, 20), Member(3, 30))
    assert eligible_after([Member(2, 20), Member(3, 30)], [], [1, 2], 3) == (Member(3, 30),)
    assert eligible_after([Member(2, 20)], [Member(3, 30)], [1, 4], 2) == ()
    assert eligible_after([Member(2, 20)], [Member(3, 30)], [1, 4], 0) == (Member(2, 20), Member(3, 30)), "unknown"


# --- Plans -------------------------------------------------------------------------------------------------------


def test_the_number_by_which_the_leader_commits_decides_which_replicas_are_eligible() -> None:
    numbers = {"one-0": 1, "two-0": 2, "three-0": 3, "unknown-0": 0}
    states = {
        name: leads(1, 4, [1, 2, 3], epochs=[10, 20, 30], to_commit=to_commit) for name, to_commit in numbers.items()
    }
    state = picture([1, 2, 3], dict.fromkeys(states, ASSIGNMENT), states)
    carry_out(state, brokers.lost(state, [2, 3]))
    assert brokers.topics_to_settle(state, state.assignments) == ("one", "three", "two", "unknown")
    settings = dict.fromkeys(("one", "two", "three", "unknown"), TopicSettings(min_insync_replicas=1))
    plan = brokers.settle(state, state.assignments, settings=settings)
    assert [line for line in lines(plan) if line.startswith("write")] == text("""
        write one-0: leader 1, epoch 5, isr [1] (over version 5)
        write three-0: leader 1, epoch 5, isr [1], eligible [2 3] (over version 5)
        write two-0: leader 1, epoch 5, isr [1], eligible [2 3] (over version 5)
        write unknown-0: leader 1, epoch 5, isr [1], eligible [2 3] (over version 5)
    """)
    assert {str(p): known.to_commit for p, known in state.leadership.items()} == numbers


def test_a_new_controller_elects_anew_where_the_leader_runs_anew() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(1, 4, [1, 2], epochs=[9, 20])})
    assert lines(brokers.settle(state, state.assignments)) == text("""
        write orders-0: leader 1, epoch 5, isr [1 2] (over version 5)
        LeaderAndIsr to 1: orders-0
        LeaderAndIsr to 2: orders-0
        UpdateMetadata to 1 2: orders-0
    """)


def test_a_broker_that_reregisters_without_a_loss_regains_its_leadership_once() -> None:
    """Its session was lost: the process and its log are the same."""
    state = picture([1], {"orders-0": (1, 2)}, {"orders-0": leads(1, 4, [1], epochs=[10])})
    carry_out(state, brokers.lost(state, [1]))
    carry_out(state, brokers.settle(state, state.assignments))
    carry_out(state, brokers.added(state, [broker(1, epoch=11)]))
    carry_out(state, brokers.settle(state, state.assignments))
    assert shown(state.leadership[ORDERS_0]) == (1, {1: 11}, {})
    assert brokers.settle(state, state.assignments).writes == ()


def test_a_replica_added_to_the_isr_for_records_it_has_since_lost_is_removed_again() -> None:
    state = picture([1, 2, 3], {"orders-0": ASSIGNMENT}, {"orders-0": leads(1, 4, [1, 2], epochs=[10, 20])})
    carry_out(state, brokers.lost(state, [3]))
    carry_out(state, brokers.added(state, [broker(3, epoch=31, trusted_since=31)]))
    late = leads(1, 4, [1, 2, 3], version=6, epochs=[10, 20, 30])
    carry_out(state, isr_changes.changed(state, {ORDERS_0: late}, []))
    taken_out = "write orders-0: leader 1, epoch 5, isr [1 2], eligible [3] (over version 6)"
    assert taken_out in lines(brokers.settle(state, [ORDERS_0]))
    caught_up = leads(1, 5, [1, 2, 3], version=8, epochs=[10, 20, 31])
    carry_out(state, isr_changes.changed(state, {ORDERS_0: caught_up}, []))
    assert brokers.settle(state, [ORDERS_0]).writes == ()


def test_reports_count_for_the_present_runs_in_the_present_leader_epoch_only() -> None:
    state = picture([1, 2], {"orders-0": (1, 2)}, {"orders-0": leads(NO_LEADER, 4, [1, 2], epochs=[9, 19])})

    def report(broker_id: int, leader_epoch: int) -> None:
        reported = LogEndReported(PartitionReplica(ORDERS_0, broker_id), leader_epoch, LogEnd(3, 10))
        carry_out(state, brokers.replicas_answered(state, broker_id, {ORDERS_0: ErrorCode.NONE}, [reported]))

    report(1, 3)
    assert state.log_ends(ORDERS_0) == {}
    report(1, 4)
    report(2, 4)
    assert set(state.log_ends(ORDERS_0)) == {1, 2}
    carry_out(state, brokers.lost(state, [2]))
    assert set(state.log_ends(ORDERS_0)) == {1}
    state.adopt({ORDERS_0: leads(1, 5, [1])})
    state.adopt({ORDERS_0: leads(NO_LEADER, 4, [1])})
    assert state.log_ends(ORDERS_0) == {}, "somebody has led since"


def test_a_leader_that_may_lack_records_is_an_alarm() -> None:
    state = picture([], {"orders-0": (1, 2)}, {"orders-0": leads(NO_LEADER, 4, [1, 2], epochs=[10, 20])})
    carry_out(state, brokers.added(state, [broker(1, 11, trusted_since=11), broker(2, 21, trusted_since=21)]))
    plan = brokers.settle(state, [ORDERS_0])
    assert plan.writes == ()
    reports = [LogEndReported(PartitionReplica(ORDERS_0, b), 4, LogEnd(3, end)) for b, end in ((1, 90), (2, 95))]
    for reported in reports:
        carry_out(state, brokers.replicas_answered(state, reported.replica.broker_id, {}, [reported]))
    plan = brokers.settle(state, [ORDERS_0])
    [note] = plan.notes
    assert "2 leads orders-0 because its log is the longest" in note
    assert "write orders-0: leader 2, epoch 5, isr [2] (over version 5)" in lines(plan)
    carry_out(state, plan)
    assert state.partition_state(ORDERS_0) is PartitionState.ONLINE


# --- The controller at work ----------------------------------------------------------------------------------------


def test_after_a_power_cut_of_all_brokers_the_longest_log_leads_once_all_have_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        office = await cluster.start([1, 2, 3])
        await office.create("orders", (1, 2, 3))
        await cluster.has(ORDERS_0, 1, [1, 2, 3])
        for broker_id in (1, 2, 3):
            cluster.brokers[broker_id].kill()
            office.suspect(cluster.brokers[broker_id])
        await cluster.until(lambda: cluster.state(ORDERS_0).leader == NO_LEADER)
        for broker_id, end in ((1, 7), (2, 9), (3, 8)):
            assert cluster.state(ORDERS_0).leader == NO_LEADER
            cluster.brokers[broker_id].trusted_since = znodes.SINCE_THIS_REGISTRATION
            cluster.brokers[broker_id].log_ends[ORDERS_0] = (0, end)
            await cluster.brokers[broker_id].start()
            await office.idle()
        await cluster.has(ORDERS_0, 2, [2])
        assert office.controller.unclean_elections == 1

    with caplog.at_level(logging.ERROR):
        simulate(scenario)
    [alarm] = [record for record in caplog.records if record.name == "minibroker.controller.executing.executor"]
    assert "its log is the longest" in alarm.getMessage()


@run_by(simulate)
async def test_settings_are_read_where_an_isr_shrinks_and_nonsense_in_them_is_named(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2, 3])
    await office.create("strict", (1, 2, 3), config={"min.insync.replicas": "3"})
    await office.create("broken", (1, 2, 3))
    nonsense = znodes.encode_config({"min.insync.replicas": "many"})  # written by hand: CreateTopics refuses it
    cluster.zookeeper.make(znodes.topic_config_path("broken"), nonsense)
    strict, broken = TopicPartition("strict", 0), TopicPartition("broken", 0)
    await cluster.has(broken, 1, [1, 2, 3])
    cluster.brokers[3].kill()
    office.suspect(cluster.brokers[3])
    await cluster.has(strict, 1, [1, 2])
    await cluster.has(broken, 1, [1, 2])
    assert (cluster.state(strict).eligible, cluster.state(broken).eligible) == ((3,), ())
    assert cluster.state(strict).eligible_epochs == (cluster.brokers[3].epoch,)
    notes = [note for entry in office.entries for note in entry.get("notes", [])]
    assert "topic broken has min.insync.replicas='many', not a number of replicas: correct it" in notes
    await cluster.until(lambda: cluster.brokers[1].roles[strict].eligible == [3])


@run_by(simulate)
async def test_all_brokers_killed_and_restarted_lead_in_new_epochs_whoever_is_controller(cluster: Cluster, /) -> None:
    office = await cluster.start([1, 2])
    await office.create("orders", (1, 2))
    await cluster.has(ORDERS_0, 1, [1, 2])
    office.kill()
    for broker_id in (1, 2):
        cluster.brokers[broker_id].kill()
        await cluster.brokers[broker_id].start()
    before = cluster.state(ORDERS_0)
    await cluster.elect(101)
    await cluster.until(lambda: cluster.state(ORDERS_0).leader_epoch > before.leader_epoch)
    after = cluster.state(ORDERS_0)
    assert (after.leader, after.isr) == (1, (1, 2))
    assert after.isr_epochs == (cluster.brokers[1].epoch, before.isr_epochs[1])
