"""The states of a group and their valid transitions (Kafka's GroupMetadata.validPreviousStates)."""

from enum import Enum


class GroupState(Enum):
    """States of a group, named as in DescribeGroups and ListGroups."""

    EMPTY = "Empty"
    """No members. It may have committed offsets."""
    PREPARING_REBALANCE = "PreparingRebalance"
    """The coordinator waits for members to join the next generation."""
    COMPLETING_REBALANCE = "CompletingRebalance"
    """The generation is complete; the coordinator waits for the leader's assignment."""
    STABLE = "Stable"
    """The assignment is in the log. Members work and send heartbeats."""
    DEAD = "Dead"
    """The group was deleted, has nothing to keep, or has another coordinator now."""


_S = GroupState

VALID_PREVIOUS_STATES: dict[GroupState, frozenset[GroupState]] = {
    _S.EMPTY: frozenset({_S.PREPARING_REBALANCE}),
    _S.PREPARING_REBALANCE: frozenset({_S.EMPTY, _S.COMPLETING_REBALANCE, _S.STABLE}),
    _S.COMPLETING_REBALANCE: frozenset({_S.PREPARING_REBALANCE}),
    _S.STABLE: frozenset({_S.COMPLETING_REBALANCE}),
    _S.DEAD: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE, _S.STABLE}),
}
"""The states from which a group may enter each state."""


class IllegalTransition(RuntimeError):
    """A transition that the table does not allow: a broken invariant."""


def check_transition(group_id: str, old: GroupState, new: GroupState) -> None:
    """Raises IllegalTransition."""
    if old not in VALID_PREVIOUS_STATES[new]:
        raise IllegalTransition(f"group {group_id!r} cannot go from {old.value} to {new.value}")
