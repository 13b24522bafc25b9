"""Who leads a partition (Kafka's Election and PartitionLeaderElectionAlgorithms). Pure, tiny, property-tested.

`live` is who may be elected at all: brokers that are up and whose log directory works. Both functions go by the
order of the assignment, since its head is the preferred leader, and keep the order of the ISR they are given.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from controller.cluster_state import NOT_WRITTEN
from protocol.model import INITIAL_LEADER_EPOCH, NO_LEADER, LeaderAndIsr


class Election(NamedTuple):
    leader: int
    isr: tuple[int, ...]


def new_partition(assignment: Sequence[int], live: Container[int]) -> Election | None:
    """The first live replica leads, all live ones are in sync: the log is empty. None where none lives."""
    isr = tuple(replica for replica in assignment if replica in live)
    return Election(isr[0], isr) if isr else None


def offline(
    assignment: Sequence[int], isr: Sequence[int], live: Container[int], unclean: bool = False
) -> Election | None:
    """The first live replica of the assignment that is in the ISR; the ISR shrinks to its live members.

    With `unclean`, where no such replica is left: the first live one, alone in the ISR. What only the others had
    is lost then. None where nobody can be elected.
    """
    for replica in assignment:
        if replica in live and replica in isr:
            return Election(replica, tuple(member for member in isr if member in live))
    if unclean:
        for replica in assignment:
            if replica in live:
                return Election(replica, (replica,))
    return None


def first_state(assignment: Sequence[int], live: Container[int], controller_epoch: int) -> LeaderAndIsr | None:
    """The state of a partition that never had one, or None where no replica lives."""
    election = new_partition(assignment, live)
    if election is None:
        return None
    return LeaderAndIsr(election.leader, INITIAL_LEADER_EPOCH, election.isr, controller_epoch, NOT_WRITTEN)


def next_state(
    assignment: Sequence[int],
    current: LeaderAndIsr,
    live: Container[int],
    controller_epoch: int,
    unclean: bool = False,
) -> LeaderAndIsr:
    """What the state must become now that exactly `live` live; `current` itself where it is right as it is.

    A live leader stays, and who died leaves the ISR. A dead leader is replaced by an offline election. Where that
    elects nobody there is no leader, and the ISR stays as it is: whoever of it comes back has all that was
    acknowledged, and the last member never leaves. Every change raises the leader epoch, also when only the ISR
    shrinks (Kafka's removeReplicasFromIsr), which fences what the removed replica still has under way.

    `partition_epoch` stays that of `current`: the version that the write expects.
    """
    if current.leader in live:
        isr = tuple(member for member in current.isr if member in live)
        election = Election(current.leader, isr or current.isr)
    else:
        election = offline(assignment, current.isr, live, unclean) or Election(NO_LEADER, current.isr)
    if election == (current.leader, current.isr):
        return current
    return LeaderAndIsr(
        election.leader, current.leader_epoch + 1, election.isr, controller_epoch, current.partition_epoch
    )
