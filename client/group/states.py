"""The states of a group member, their legal moves, and the member's reactions to its coordinator's errors. Pure.

Kafka's AbstractCoordinator.MemberState has four states, which `phase` names. Some of them are divided here, because a
commit or a heartbeat's answer means something else in each part. Errors that `coordinators` retries (the coordinator
has moved, or loads its log) never get here.
"""

from __future__ import annotations

from enum import Enum

from minibroker.protocol.errors import ErrorCode


class MemberState(Enum):
    """Each with Kafka's state and the step within it."""

    UNJOINED = "unjoined", ""
    """The member is in no generation and has no partitions."""
    PREPARING = "preparing rebalance", ""
    """A rebalance has begun. The member waits until its user holds no records, if it must revoke partitions."""
    REVOKING = "preparing rebalance", "revoking"
    """The member commits and calls the listener before it joins: the last commits for these partitions."""
    JOINING = "preparing rebalance", "joining"
    """JoinGroup is sent; the answer arrives when all members have joined or were removed."""
    SYNCING = "completing rebalance", "syncing"
    """The member is in a new generation and waits for its assignment."""
    RECONCILING = "completing rebalance", "reconciling"
    """The assignment has arrived: the coordinator accepts commits, but the partitions are not all in place."""
    REVOKING_ASSIGNED = "completing rebalance", "revoking"
    """The same as REVOKING, for partitions that the assignment moves to other members (KIP-429)."""
    STABLE = "stable", ""
    LEAVING = "stable", "leaving"
    """The user has unsubscribed: the member gives up its partitions and leaves."""
    LOST = "unjoined", "lost"
    """The group goes on without the member, which still has to drop its partitions."""
    REFUSED = "unjoined", "refused"
    """The coordinator has refused the member, which joins again when its user asks for records again."""
    FENCED = "unjoined", "fenced"
    """Another member has taken its group_instance_id. It stays out until the user subscribes again: if it joined, the
    two would fence each other forever."""

    @property
    def phase(self) -> str:
        """Kafka's state, as `ConsumerStatus.member_state` reports it."""
        return self.value[0]

    @property
    def is_in_group(self) -> bool:
        """The member has to leave, or to drop partitions, before it is UNJOINED."""
        return self not in (S.UNJOINED, S.REFUSED, S.FENCED)

    @property
    def has_assignment(self) -> bool:
        """The coordinator accepts commits of this generation."""
        return self in (S.RECONCILING, S.REVOKING_ASSIGNED, S.STABLE, S.LEAVING)

    @property
    def is_revoking(self) -> bool:
        """Partitions are about to be revoked: a commit succeeds now or never."""
        return self in (S.REVOKING, S.REVOKING_ASSIGNED, S.LEAVING)


S = MemberState
MOVES: dict[MemberState, frozenset[MemberState]] = {
    S.UNJOINED: frozenset({S.PREPARING}),
    S.PREPARING: frozenset({S.REVOKING, S.JOINING, S.PREPARING, S.LEAVING, S.LOST}),
    S.REVOKING: frozenset({S.PREPARING, S.LEAVING, S.LOST}),
    S.JOINING: frozenset({S.SYNCING, S.PREPARING, S.LEAVING, S.LOST}),
    S.SYNCING: frozenset({S.RECONCILING, S.PREPARING, S.LEAVING, S.LOST}),
    S.RECONCILING: frozenset({S.REVOKING_ASSIGNED, S.STABLE, S.PREPARING, S.LEAVING, S.LOST}),
    S.REVOKING_ASSIGNED: frozenset({S.RECONCILING, S.PREPARING, S.LEAVING, S.LOST}),
    S.STABLE: frozenset({S.PREPARING, S.LEAVING, S.LOST}),
    S.LEAVING: frozenset({S.UNJOINED, S.LEAVING, S.PREPARING, S.LOST}),
    S.LOST: frozenset({S.UNJOINED, S.REFUSED, S.FENCED}),
    S.REFUSED: frozenset({S.UNJOINED}),
    S.FENCED: frozenset({S.UNJOINED}),
}
"""The states that may follow each state. A step that was interrupted begins again at PREPARING or LEAVING."""


class Reaction(Enum):
    """How a member reacts to an error of its coordinator."""

    REJOIN = "joins again with its id, and keeps its partitions until then"
    LOSE = "has lost its partitions, because the group went on without it, and joins again with its id"
    BEGIN_ANEW = "has lost its partitions and its id, and joins as a new member"
    RAISE = "raises the error to its user, and joins again when records are asked for again"
    FENCED = "has lost its partitions to another member with its group_instance_id, and raises that to its user"


E = ErrorCode
REACTIONS: dict[ErrorCode, Reaction] = {
    E.REBALANCE_IN_PROGRESS: Reaction.REJOIN,
    E.ILLEGAL_GENERATION: Reaction.LOSE,
    E.UNKNOWN_MEMBER_ID: Reaction.BEGIN_ANEW,
    E.FENCED_INSTANCE_ID: Reaction.FENCED,
}
"""Reactions to errors of JoinGroup, SyncGroup, Heartbeat and OffsetCommit; RAISE for all other errors."""


def reaction(code: ErrorCode) -> Reaction:
    return REACTIONS.get(code, Reaction.RAISE)


AFTER_LOSS = {Reaction.RAISE: S.REFUSED, Reaction.FENCED: S.FENCED}
"""The state after LOST by the reaction that caused it; UNJOINED after all others."""
