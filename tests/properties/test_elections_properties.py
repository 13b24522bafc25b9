"""Elections, and the states that follow from them, for whatever assignment, ISR and survivors."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from controller.decisions import elections
from controller.decisions.placement import assign_replicas
from protocol.model import NO_LEADER, LeaderAndIsr

assignments = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
live_sets = st.frozensets(st.integers(0, 9))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[int], LeaderAndIsr]:
    """An assignment and a state as they occur: the ISR is part of the assignment, in any order, never empty."""
    assignment = draw(assignments)
    isr = draw(st.lists(st.sampled_from(assignment), min_size=1, unique=True))
    leader = draw(st.sampled_from([*isr, NO_LEADER]))
    return assignment, LeaderAndIsr(leader, draw(st.integers(0, 50)), tuple(isr), 3, draw(st.integers(0, 50)))


@given(assignments, live_sets)
def test_a_new_partition_is_led_by_its_first_live_replica_with_all_live_ones_in_sync(
    assignment: list[int], live: frozenset[int]
) -> None:
    election = elections.new_partition(assignment, live)
    alive = [replica for replica in assignment if replica in live]
    assert election == ((alive[0], tuple(alive)) if alive else None)


@given(partitions(), live_sets)
def test_a_clean_election_chooses_a_live_member_of_the_isr_and_shrinks_it_to_the_living(
    partition: tuple[list[int], LeaderAndIsr], live: frozenset[int]
) -> None:
    assignment, state = partition
    election = elections.offline(assignment, state.isr, live)
    candidates = [replica for replica in assignment if replica in live and replica in state.isr]
    if not candidates:
        assert election is None
        return
    assert election is not None
    assert election.leader == candidates[0]
    assert set(election.isr) == set(candidates)
    assert election.isr == tuple(member for member in state.isr if member in candidates)


@given(partitions(), live_sets)
def test_an_unclean_election_is_a_clean_one_wherever_that_is_possible(
    partition: tuple[list[int], LeaderAndIsr], live: frozenset[int]
) -> None:
    assignment, state = partition
    clean = elections.offline(assignment, state.isr, live)
    unclean = elections.offline(assignment, state.isr, live, unclean=True)
    if clean is not None:
        assert unclean == clean
    else:
        alive = [replica for replica in assignment if replica in live]
        assert unclean == ((alive[0], (alive[0],)) if alive else None)


@given(partitions(), live_sets)
def test_the_next_state_never_gives_up_who_may_hold_what_was_acknowledged(
    partition: tuple[list[int], LeaderAndIsr], live: frozenset[int]
) -> None:
    assignment, state = partition
    after = elections.next_state(assignment, state, live, controller_epoch=4)
    assert after.isr, "the last member never leaves the ISR"
    assert set(after.isr) <= set(state.isr)
    assert after.leader == NO_LEADER or (after.leader in after.isr and after.leader in live)
    if state.leader in live:
        assert after.leader == state.leader, "a live leader stays"
    if after.leader != NO_LEADER:
        assert set(after.isr) <= live
    else:
        assert after.isr == state.isr
        assert not live & set(state.isr)


@given(partitions(), live_sets, st.booleans())
def test_every_change_raises_the_leader_epoch_by_one_and_nothing_else_does(
    partition: tuple[list[int], LeaderAndIsr], live: frozenset[int], unclean: bool
) -> None:
    assignment, state = partition
    after = elections.next_state(assignment, state, live, controller_epoch=4, unclean=unclean)
    assert after.partition_epoch == state.partition_epoch, "the version that the write expects"
    if (after.leader, after.isr) == (state.leader, state.isr):
        assert after is state
    else:
        assert after.leader_epoch == state.leader_epoch + 1
        assert after.controller_epoch == 4


@given(partitions(), live_sets, st.booleans())
def test_deciding_twice_decides_nothing_new(
    partition: tuple[list[int], LeaderAndIsr], live: frozenset[int], unclean: bool
) -> None:
    assignment, state = partition
    after = elections.next_state(assignment, state, live, 4, unclean)
    assert elections.next_state(assignment, after, live, 4, unclean) is after


@given(st.data())
def test_one_loss_after_the_other_ends_with_a_leader_as_long_as_an_isr_member_lives(data: st.DataObject) -> None:
    assignment = data.draw(assignments)
    state = elections.first_state(assignment, assignment, 4)
    assert state is not None
    live = set(assignment)
    for lost in data.draw(st.permutations(assignment)):
        live.discard(lost)
        state = elections.next_state(assignment, state, live, 4)
        if live:
            assert state.leader in live
            assert set(state.isr) == live
        else:
            assert (state.leader, state.isr) == (NO_LEADER, (lost,))


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
    assignment = assign_replicas(brokers, partitions, factor, random)
    assert sorted(assignment) == list(range(partitions))
    for replicas in assignment.values():
        assert len(replicas) == len(set(replicas)) == factor
        assert set(replicas) <= set(brokers)
    leaders = [sum(1 for replicas in assignment.values() if replicas[0] == broker) for broker in brokers]
    assert max(leaders) - min(leaders) <= 1
    if partitions % len(brokers) == 0:
        held = [sum(1 for replicas in assignment.values() if broker in replicas) for broker in brokers]
        assert max(held) == min(held)
