"""Elections, and the states that follow from them, for any assignment, ISR, eligible replicas and survivors."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from minibroker.controller.decisions import elections
from minibroker.controller.decisions.cluster_state import LogEnd
from minibroker.controller.decisions.elections import Basis, is_trusted
from minibroker.controller.decisions.placement import assign_replicas
from minibroker.protocol.model import NO_EPOCH, NO_LEADER, LeaderAndIsr, Member, RegisteredBroker, leader_and_isr

assignments = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
epochs = st.integers(1, 6)


@st.composite
def brokers(draw: st.DrawFn, broker_id: int) -> RegisteredBroker:
    """A live broker in some epoch, trusted with some earlier one."""
    epoch = draw(epochs)
    return RegisteredBroker(broker_id, epoch, (), trusted_since=draw(st.integers(0, epoch)))


lives = st.sets(st.integers(0, 9)).flatmap(
    lambda ids: st.fixed_dictionaries({broker_id: brokers(broker_id) for broker_id in sorted(ids)})
)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[int], LeaderAndIsr]:
    """An assignment and a possible state: ISR and eligible replicas are disjoint parts of the assignment, in any order;
    the ISR is never empty; epochs may be unknown."""
    assignment = draw(assignments)
    on_record = draw(st.lists(st.sampled_from(assignment), min_size=1, unique=True))
    in_sync = draw(st.integers(1, len(on_record)))
    with_epochs = [Member(b, draw(st.one_of(st.just(NO_EPOCH), epochs))) for b in on_record]
    leader = draw(st.sampled_from([*on_record[:in_sync], NO_LEADER]))
    state = leader_and_isr(
        leader,
        draw(st.integers(0, 50)),
        with_epochs[:in_sync],
        with_epochs[in_sync:],
        3,
        draw(st.integers(0, 50)),
        draw(st.integers(0, 4)),
    )
    return assignment, state


minimums = st.integers(1, 4)
log_ends = st.dictionaries(st.integers(0, 9), st.builds(LogEnd, st.integers(0, 3), st.integers(0, 5)))


def on_record(state: LeaderAndIsr) -> list[int]:
    return [*state.isr, *state.eligible]


def trusted(state: LeaderAndIsr, live: elections.Live) -> set[int]:
    return {m.broker_id for m in (*state.in_sync_members, *state.eligible_members) if is_trusted(m, live)}


@given(assignments, lives)
def test_a_new_partition_is_led_by_its_first_live_replica_with_all_live_ones_in_sync(
    assignment: list[int], live: elections.Live
) -> None:
    state = elections.first_state(assignment, live, 4, to_commit=2)
    alive = [replica for replica in assignment if replica in live]
    if not alive:
        assert state is None
        return
    assert state is not None
    assert (state.leader, state.leader_epoch) == (alive[0], 0)
    assert state.in_sync_members == tuple(Member(b, live[b].epoch) for b in alive)


@given(partitions(), lives, st.booleans(), log_ends)
def test_an_elected_replica_is_trusted_if_any_is(
    partition: tuple[list[int], LeaderAndIsr], live: elections.Live, unclean: bool, ends: dict[int, LogEnd]
) -> None:
    assignment, state = partition
    election = elections.elect(assignment, state, live, unclean=unclean, log_ends=ends)
    in_sync = {m.broker_id for m in state.in_sync_members if is_trusted(m, live)}
    everybody = trusted(state, live)
    if everybody:
        candidates = in_sync or everybody
        assert election is not None
        assert election.basis is (Basis.IN_SYNC if in_sync else Basis.ELIGIBLE)
        assert election.leader == next(b for b in assignment if b in candidates)
    elif all(b in live and b in ends for b in on_record(state)):
        assert election is not None
        assert election.basis is Basis.LONGEST_LOG
        assert ends[election.leader] == max(ends[b] for b in on_record(state))
    elif unclean:
        assert (election is None) == (not set(assignment) & set(live))
        assert election is None or (election.basis is Basis.UNCLEAN and election.leader in live)
    else:
        assert election is None


@given(partitions(), lives)
def test_the_next_state_never_drops_a_replica_with_all_acknowledged_records(
    partition: tuple[list[int], LeaderAndIsr], live: elections.Live
) -> None:
    assignment, state = partition
    after, election = elections.decide(assignment, state, live, 4)
    assert after.isr, "the last member never leaves the ISR"
    assert set(on_record(after)) <= set(on_record(state)), "no replica is put on record that was not"
    assert not set(after.isr) & set(after.eligible)
    assert after.to_commit == state.to_commit, "only the leader knows"
    if elections.leader_stays(state, live):
        assert after.leader == state.leader
        assert election is None
    if after.leader == NO_LEADER:
        assert not trusted(state, live)
        assert (after.isr, after.eligible) == (state.isr, state.eligible)
    elif after is not state:
        assert after.leader in after.isr
        assert all(is_trusted(member, live) for member in after.in_sync_members)
        assert (after.leader, live[after.leader].epoch) in after.in_sync_members or election is None
        lossy = any(m.broker_id in live and not is_trusted(m, live) for m in state.in_sync_members)
        if state.to_commit == 0 or len(after.isr) < state.to_commit or state.eligible or lossy:
            # Nothing is committed from here on. A replica that had everything may still have it and can lead later; if
            # one host has lost its power, all may have.
            assert set(on_record(after)) == set(on_record(state))
        else:
            assert after.eligible == ()


@given(partitions(), lives, st.booleans(), log_ends)
def test_replicas_on_record_keep_their_epoch_except_the_new_leader(
    partition: tuple[list[int], LeaderAndIsr],
    live: elections.Live,
    unclean: bool,
    ends: dict[int, LogEnd],
) -> None:
    assignment, state = partition
    after, election = elections.decide(assignment, state, live, 4, unclean=unclean, log_ends=ends)
    before: dict[int, int] = dict((*state.in_sync_members, *state.eligible_members))
    for broker_id, epoch in (*after.in_sync_members, *after.eligible_members):
        if election is not None and broker_id == election.leader:
            assert epoch == live[broker_id].epoch
        else:
            assert epoch == before[broker_id]


@given(partitions(), lives, st.booleans(), log_ends)
def test_every_change_raises_the_leader_epoch_by_one_and_nothing_else_does(
    partition: tuple[list[int], LeaderAndIsr],
    live: elections.Live,
    unclean: bool,
    ends: dict[int, LogEnd],
) -> None:
    assignment, state = partition
    after, election = elections.decide(assignment, state, live, 4, unclean=unclean, log_ends=ends)
    assert after.partition_epoch == state.partition_epoch, "the version that the write expects"
    if after is state:
        assert election is None
    else:
        assert after.leader_epoch == state.leader_epoch + 1
        assert after.controller_epoch == 4
    recorded = dict(state.in_sync_members).get(state.leader, NO_EPOCH)
    if after.leader == state.leader and recorded != NO_EPOCH and recorded != live[state.leader].epoch:
        assert after is not state, "another run of the leader leads in another epoch"


@given(partitions(), lives, st.booleans(), log_ends)
def test_deciding_twice_decides_nothing_new(
    partition: tuple[list[int], LeaderAndIsr],
    live: elections.Live,
    unclean: bool,
    ends: dict[int, LogEnd],
) -> None:
    assignment, state = partition
    after, _ = elections.decide(assignment, state, live, 4, unclean=unclean, log_ends=ends)
    again, _ = elections.decide(assignment, after, live, 4, unclean=unclean, log_ends=ends)
    assert again is after


@given(st.data(), minimums)
def test_successive_losses_leave_a_leader_to_the_last_and_any_of_the_last_leads_again(
    data: st.DataObject, to_commit: int
) -> None:
    assignment = data.draw(assignments)
    live = {broker_id: RegisteredBroker(broker_id, 1, ()) for broker_id in assignment}
    state = elections.first_state(assignment, live, 4, to_commit=to_commit)
    assert state is not None
    for lost in data.draw(st.permutations(assignment)):
        del live[lost]
        eligible = state.eligible
        state, _ = elections.decide(assignment, state, live, 4)
        if live:
            assert state.leader in live
            assert set(state.isr) == set(live)
        else:
            assert (state.leader, state.isr, state.eligible) == (NO_LEADER, (lost,), eligible)
    # Nothing was committed without them, so each of the last `to_commit` has everything.
    assert len(on_record(state)) == min(to_commit, len(assignment))
    back = data.draw(st.sampled_from(on_record(state)))
    state, _ = elections.decide(assignment, state, {back: RegisteredBroker(back, 2, ())}, 4)
    assert state.leader == back


@given(
    st.lists(st.integers(0, 1_000), min_size=1, max_size=12, unique=True),
    st.integers(1, 60),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_placement_spreads_leaders_and_replicas_evenly(
    brokers: list[int],
    partitions: int,
    factor: int,
    random: Random,
) -> None:
    factor = min(factor, len(brokers))
    assignment = assign_replicas(dict.fromkeys(brokers), partitions, factor, random)
    assert sorted(assignment) == list(range(partitions))
    for replicas in assignment.values():
        assert len(replicas) == len(set(replicas)) == factor
        assert set(replicas) <= set(brokers)
    leaders = [sum(1 for replicas in assignment.values() if replicas[0] == broker) for broker in brokers]
    assert max(leaders) - min(leaders) <= 1
    if partitions % len(brokers) == 0:
        held = [sum(1 for replicas in assignment.values() if broker in replicas) for broker in brokers]
        assert max(held) == min(held)
