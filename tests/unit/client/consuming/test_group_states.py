"""The table of a group member's states."""

import pytest

from minibroker.client.group.states import AFTER_LOSS, MOVES, MemberState, Reaction

S = MemberState


def test_every_state_has_moves_and_a_phase_of_kafkas() -> None:
    assert MOVES.keys() == set(S)
    phases = {state.phase for state in S}
    assert phases == {"unjoined", "preparing rebalance", "completing rebalance", "stable"}


@pytest.mark.parametrize("state", [state for state in S if state.is_in_group and state is not S.LOST])
def test_a_member_can_lose_its_membership_and_leave_in_every_step(state: MemberState) -> None:
    assert {S.LOST, S.LEAVING} <= MOVES[state]


def test_a_member_that_lost_its_membership_is_nowhere_else_before_its_partitions_are_dropped() -> None:
    assert MOVES[S.LOST] == {AFTER_LOSS.get(what, S.UNJOINED) for what in Reaction}
    assert all(not state.is_in_group for state in MOVES[S.LOST])


def test_a_member_is_stable_only_after_its_assignment() -> None:
    assert [state for state in S if S.STABLE in MOVES[state]] == [S.RECONCILING]
