"""The states of a group's member, and what each error of its coordinator means for it. Pure, and all of it tables.

The states are Kafka's (AbstractCoordinator.MemberState). Which error is retried by itself (the coordinator has moved,
or reads its log) is the business of `coordinators`; what gets here is for the member.
"""

from __future__ import annotations

from enum import Enum

from minibroker.protocol.errors import ErrorCode


class MemberState(Enum):
    UNJOINED = "unjoined"
    """It is in no group, or does not know."""
    PREPARING_REBALANCE = "preparing rebalance"
    """It gives up partitions, or has asked to join and waits for the others to do so."""
    COMPLETING_REBALANCE = "completing rebalance"
    """It has joined a generation and waits for its assignment, or takes it over."""
    STABLE = "stable"


S = MemberState
MOVES: dict[MemberState, frozenset[MemberState]] = {
    S.UNJOINED: frozenset({S.UNJOINED, S.PREPARING_REBALANCE}),
    S.PREPARING_REBALANCE: frozenset({S.COMPLETING_REBALANCE, S.UNJOINED, S.PREPARING_REBALANCE}),
    S.COMPLETING_REBALANCE: frozenset({S.STABLE, S.PREPARING_REBALANCE, S.UNJOINED}),
    S.STABLE: frozenset({S.PREPARING_REBALANCE, S.UNJOINED}),
}
"""From each state, those that may follow."""


class Reaction(Enum):
    """What a member does about an error."""

    REJOIN = "joins again, under its id; what it has stays its own until then"
    LOSE = "has lost its partitions, as the group went on without it, and joins again under its id"
    BEGIN_ANEW = "has lost its partitions and its id, and joins as a new member"
    RAISE = "tells its user, and joins again when records are asked for again"
    FENCED = "has lost its partitions to another of the same group_instance_id, and tells its user"


E = ErrorCode
REACTIONS: dict[ErrorCode, Reaction] = {
    E.REBALANCE_IN_PROGRESS: Reaction.REJOIN,
    E.ILLEGAL_GENERATION: Reaction.LOSE,
    E.UNKNOWN_MEMBER_ID: Reaction.BEGIN_ANEW,
    E.FENCED_INSTANCE_ID: Reaction.FENCED,
}
"""To errors of JoinGroup, SyncGroup, Heartbeat and OffsetCommit. All others are RAISE."""


def reaction(code: ErrorCode) -> Reaction:
    return REACTIONS.get(code, Reaction.RAISE)
