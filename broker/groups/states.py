"""The states of a group, and which may follow which (Kafka's GroupMetadata.validPreviousStates)."""

from enum import Enum


class GroupState(Enum):
    """Names as DescribeGroups and ListGroups give them."""

    EMPTY = "Empty"
    """No members. It may have committed offsets."""
    PREPARING_REBALANCE = "PreparingRebalance"
    """Members are waited for to join the next generation."""
    COMPLETING_REBALANCE = "CompletingRebalance"
    """The generation is made up; its leader is waited for to say who gets what."""
    STABLE = "Stable"
    """The assignment is in the log: members work, and show by heartbeats that they live."""
    DEAD = "Dead"
    """It is gone: deleted, without anything to keep, or coordinated by another broker from now on."""


_S = GroupState

VALID_PREVIOUS_STATES: dict[GroupState, frozenset[GroupState]] = {
    _S.EMPTY: frozenset({_S.PREPARING_REBALANCE}),
    _S.PREPARING_REBALANCE: frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE}),
    _S.COMPLETING_REBALANCE: frozenset({_S.PREPARING_REBALANCE}),
    _S.STABLE: frozenset({_S.COMPLETING_REBALANCE}),
    _S.DEAD: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
}
"""From which states a group may come to each."""


class IllegalTransition(RuntimeError):
    """A move that the table does not have: a broken invariant."""


def check_transition(group_id: str, old: GroupState, new: GroupState) -> None:
    """Raises IllegalTransition."""
    if old not in VALID_PREVIOUS_STATES[new]:
        raise IllegalTransition(f"group {group_id!r} cannot go from {old.value} to {new.value}")
