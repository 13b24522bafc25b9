"""The choice of a partition's leader (Kafka's Election and PartitionLeaderElectionAlgorithms; KIP-903, KIP-966). Pure.

The problem: a replica is in the ISR because it had all acknowledged records. After its broker was away it may not have
them: a killed process returns with everything, but a host that lost its power has lost the content of its memory.
Kafka's ZooKeeper mode elects both alike. And if the ISR has shrunk to one replica which then dies, Kafka waits for it,
or accepts it without its tail, although other replicas may have all acknowledged records.

The choice: every *trusted* member of the ISR and every *trusted* eligible replica has all acknowledged records.
- The state records each of them with the broker epoch in which it was known to have them all. It is trusted while its
  broker is alive and reports that it has lost nothing since that epoch (`RegisteredBroker.trusted_since`). An unknown
  epoch is trusted.
- Eligible replicas are those that left the ISR when it fell below min.insync.replicas: nothing is committed from then
  on (`broker/replication/isr.py`), so they still have everything (`model.eligible_after`). The number is the leader's,
  as recorded in the state (`LeaderAndIsr.to_commit`), not the controller's view of the settings.
- Replicas that left the ISR because they are not trusted stay on record for the last resort, however many members the
  ISR has, until the leader removes them (`Partition.isr_to_propose`). If one host lost its power, the others may have
  lost theirs unnoticed: then the remaining ISR commits nothing, and its logs may be shorter.
- In a topic with durability=synced, flushed records are what counts: a replica is trusted while its broker reports that
  it has lost nothing that was flushed (`RegisteredBroker.synced_since`), even after a power cut of all brokers.
- The first trusted member of the ISR, in the order of the assignment, is elected, or else the first trusted eligible
  replica. If there is neither, there is no leader, and the ISR and the eligible replicas stay on record: each of them
  that returns and is trusted has everything, and the last member never leaves.
- The last resort: if all of them are back and none is trusted, as after a power cut of the whole cluster, no better
  replica will come. Then the one with the longest log leads, since it has the most surviving records.
- With the topic's unclean.leader.election.enable any live replica may lead, those on record first. That loses records,
  so the settings that allow it are read immediately before, and must still hold when the election is written
  (`Steps.topic_settings`).

A broker in a controlled shutdown is still alive, but is not elected, and hands over its leaderships while it can still
serve (`for_controlled_shutdown`).

A live leader stays, unless its broker has registered again since its election: that may be another process with another
log. It may be elected again in a new epoch; in its predecessor's epoch it could assign the same offsets to other
records (docs/internals/elections.md).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from minibroker.controller.decisions.cluster_state import NOT_WRITTEN, LogEnd
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import (
    INITIAL_LEADER_EPOCH,
    NO_EPOCH,
    NO_LEADER,
    LeaderAndIsr,
    Member,
    RegisteredBroker,
    ReplicaAssignment,
    eligible_after,
    leader_and_isr,
)

Live = Mapping[int, RegisteredBroker]
"""The electable brokers: those that are up and whose log directory works."""


class Basis(Enum):
    """The reason why a replica was elected."""

    IN_SYNC = "in sync"
    ELIGIBLE = "eligible"
    LONGEST_LOG = "longest log"
    UNCLEAN = "unclean"


class Election(NamedTuple):
    leader: int
    basis: Basis

    @property
    def may_lose_records(self) -> bool:
        return self.basis in (Basis.LONGEST_LOG, Basis.UNCLEAN)


def is_trusted(member: Member, live: Live) -> bool:
    """Return whether the member is alive and still has everything that it had when it was recorded."""
    broker = live.get(member.broker_id)
    return broker is not None and (member.epoch == NO_EPOCH or member.epoch >= broker.trusted_since)


def trusted_by_what_is_flushed(live: Live) -> dict[int, RegisteredBroker]:
    """Return `live` for a topic with durability=synced, where trust concerns flushed records only."""
    return {b: msgspec.structs.replace(broker, trusted_since=broker.synced_since) for b, broker in live.items()}


def leader_stays(state: LeaderAndIsr, live: Live) -> bool:
    """Return whether the leader is alive in the broker epoch in which it was elected."""
    return _leader_stays(state.leader, state.in_sync_members, live)


def _leader_stays(leader: int, in_sync: Iterable[Member], live: Live) -> bool:
    broker = live.get(leader)
    if broker is None:
        return False
    return all(epoch in (NO_EPOCH, broker.epoch) for broker_id, epoch in in_sync if broker_id == leader)


def is_settled(state: LeaderAndIsr, live: Live, stopping: Collection[int] = ()) -> bool:
    """Return whether there is nothing to decide: the leader and the whole ISR stay."""
    return _is_settled(state.leader, state.in_sync_members, live, stopping)


def _is_settled(leader: int, in_sync: Collection[Member], live: Live, stopping: Collection[int]) -> bool:
    return (
        _leader_stays(leader, in_sync, live)
        and all(is_trusted(member, live) for member in in_sync)
        and not (stopping and any(member.broker_id in stopping for member in in_sync))
    )


# --- Elections -----------------------------------------------------------------------------------------------


def elect(
    assignment: Sequence[int],
    state: LeaderAndIsr,
    live: Live,
    *,
    unclean: bool = False,
    log_ends: Mapping[int, LogEnd] | None = None,
) -> Election | None:
    """Return the replica to lead, or None. The head of the assignment is the preferred leader.

    `log_ends`: the ends of the logs that replicas have reported since the leader was lost.
    """
    for group, basis in ((state.in_sync_members, Basis.IN_SYNC), (state.eligible_members, Basis.ELIGIBLE)):
        trusted = [member.broker_id for member in group if is_trusted(member, live)]
        if trusted:
            return Election(_first(assignment, trusted), basis)
    longest = longest_log(assignment, state, live, log_ends or {})
    if longest is not None:
        return Election(longest, Basis.LONGEST_LOG)
    if unclean:
        for replicas in (state.isr, state.eligible, assignment):
            alive = [broker_id for broker_id in replicas if broker_id in live]
            if alive:
                return Election(_first(assignment, alive), Basis.UNCLEAN)
    return None


def for_reassignment(assignment: ReplicaAssignment, state: LeaderAndIsr, live: Live) -> int | None:
    """Return the leader after a reassignment: the present leader if it belongs to the target, or else the first replica
    of the target that is in the ISR and trusted. None if there is none."""
    target = assignment.target
    if state.leader in target and leader_stays(state, live):
        return state.leader
    trusted = [m.broker_id for m in state.in_sync_members if m.broker_id in target and is_trusted(m, live)]
    return _first(target, trusted) if trusted else None


def longest_log(
    assignment: Sequence[int], state: LeaderAndIsr, live: Live, log_ends: Mapping[int, LogEnd]
) -> int | None:
    """Return the replica on record with the longest log, compared by the last epoch first. None if one of them is down
    or has not reported the end of its log."""
    on_record = (*state.isr, *state.eligible)
    if not all(broker_id in live and broker_id in log_ends for broker_id in on_record):
        return None
    best = max(log_ends[broker_id] for broker_id in on_record)
    return _first(assignment, [broker_id for broker_id in on_record if log_ends[broker_id] == best])


def for_controlled_shutdown(
    assignment: Sequence[int], leader: int, isr: Sequence[Member], stopping: Container[int], to_commit: int
) -> tuple[int, list[Member]]:
    """Return the leader and the ISR, out of the trusted `isr`, when the brokers `stopping` are about to stop (Kafka's
    controlledShutdownPartitionLeaderElection and removeReplicasFromIsr).

    The leader hands over to the first member that does not stop. Members that stop leave the ISR, so that no write
    waits for them when they are gone. As many as are needed to commit stay, since without them writes would be rejected
    right away (Kafka removes them). If all members stop, nothing changes.
    """
    staying = [member for member in isr if member.broker_id not in stopping]
    if not staying:
        return leader, list(isr)
    if leader in stopping:
        leader = _first(assignment, [member.broker_id for member in staying])
    missing = to_commit - len(staying) if len(isr) >= to_commit else 0
    kept = [member for member in isr if member.broker_id in stopping][: max(missing, 0)]
    return leader, [member for member in isr if member in staying or member in kept]


def _first(assignment: Sequence[int], among: Sequence[int]) -> int:
    return next((broker_id for broker_id in assignment if broker_id in among), among[0])


# --- The states that follow ------------------------------------------------------------------------------------


def first_state(assignment: Sequence[int], live: Live, controller_epoch: int, *, to_commit: int) -> LeaderAndIsr | None:
    """Return the first state of a partition: the first live replica leads, and all live ones are in sync, since the log
    is empty. None if no replica is alive. `to_commit` is the controller's view; the leader corrects it."""
    isr = [Member(broker_id, live[broker_id].epoch) for broker_id in assignment if broker_id in live]
    if not isr:
        return None
    return leader_and_isr(isr[0].broker_id, INITIAL_LEADER_EPOCH, isr, (), controller_epoch, NOT_WRITTEN, to_commit)


class Decision(NamedTuple):
    state: LeaderAndIsr
    """The current state itself if nothing changes."""
    election: Election | None = None
    """None if the leader stays or no replica can be elected."""


def decide(
    assignment: Sequence[int],
    current: LeaderAndIsr,
    live: Live,
    controller_epoch: int,
    *,
    unclean: bool = False,
    log_ends: Mapping[int, LogEnd] | None = None,
    stopping: Collection[int] = (),
) -> Decision:
    """Return the new state if exactly the brokers in `live` are alive. `stopping`: those of them that are shutting
    down.

    A replica that has died or is not trusted leaves the ISR. It becomes eligible if the ISR falls too low, if one of
    the leaving replicas is alive and not trusted, or if there are eligible replicas already. If no replica can be
    elected, there is no leader, and none leaves the ISR. Every change raises the leader epoch, even if only the ISR
    shrinks (Kafka's removeReplicasFromIsr); that fences requests of the removed replica.

    `partition_epoch` stays that of `current`: the version that the write expects.
    """
    in_sync = current.in_sync_members
    if _is_settled(current.leader, in_sync, live, stopping):
        return Decision(current)
    election = None
    if _leader_stays(current.leader, in_sync, live):
        trusted = [member for member in in_sync if is_trusted(member, live)]
        leader, isr = for_controlled_shutdown(assignment, current.leader, trusted, stopping, current.to_commit)
        if leader != current.leader:
            election = Election(leader, Basis.IN_SYNC)
            isr = [Member(leader, live[leader].epoch) if m.broker_id == leader else m for m in isr]
    else:
        electable = {b: broker for b, broker in live.items() if b not in stopping} if stopping else live
        election = elect(assignment, current, electable, unclean=unclean, log_ends=log_ends)
        if election is None:
            return Decision(_successor(current, NO_LEADER, in_sync, current.eligible_members, controller_epoch))
        leader = election.leader
        itself = Member(leader, live[leader].epoch)
        if election.basis is Basis.IN_SYNC:
            trusted = [itself if m.broker_id == leader else m for m in in_sync if is_trusted(m, live)]
            _, isr = for_controlled_shutdown(assignment, leader, trusted, stopping, current.to_commit)
        else:
            isr = [itself]
    if election is not None and election.may_lose_records:
        eligible: tuple[Member, ...] = ()  # from now on the leader's log counts
    else:
        eligible = _eligible_beside(isr, current, live)
    return Decision(_successor(current, leader, isr, eligible, controller_epoch), election)


def _eligible_beside(isr: Sequence[Member], current: LeaderAndIsr, live: Live) -> tuple[Member, ...]:
    in_sync, eligible = current.in_sync_members, current.eligible_members
    has_lost = any(m.broker_id in live and not is_trusted(m, live) for m in in_sync)
    enough = 0 if has_lost or eligible else current.to_commit
    return eligible_after(eligible, in_sync, [m.broker_id for m in isr], enough)


# --- On request ------------------------------------------------------------------------------------------------


def elect_preferred(
    assignment: Sequence[int], current: LeaderAndIsr, live: Live, controller_epoch: int
) -> Decision | ErrorCode:
    """Return the state in which the head of the assignment leads, or the reason why it cannot (Kafka's
    preferredReplicaPartitionLeaderElection): ELECTION_NOT_NEEDED, PREFERRED_LEADER_NOT_AVAILABLE.

    It must be in the ISR and trusted, so that nothing is lost. The present leader stays in the ISR if it is trusted,
    like all other members.
    """
    preferred = assignment[0]
    if current.leader == preferred and leader_stays(current, live):
        return ErrorCode.ELECTION_NOT_NEEDED
    isr = [m for m in current.in_sync_members if is_trusted(m, live)]
    if all(m.broker_id != preferred for m in isr):
        return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    isr = [Member(preferred, live[preferred].epoch) if m.broker_id == preferred else m for m in isr]
    state = _successor(current, preferred, isr, _eligible_beside(isr, current, live), controller_epoch)
    return Decision(state, Election(preferred, Basis.IN_SYNC))


def elect_unclean(
    assignment: Sequence[int],
    current: LeaderAndIsr,
    live: Live,
    controller_epoch: int,
    *,
    log_ends: Mapping[int, LogEnd] | None = None,
) -> Decision | ErrorCode:
    """Decide like `decide` with `unclean`, whatever the topic's setting is, for a partition without a leader (KIP-460).
    Or return the reason: ELECTION_NOT_NEEDED, or ELIGIBLE_LEADERS_NOT_AVAILABLE if no replica is alive.

    The election is unclean only if no replica has everything.
    """
    if leader_stays(current, live):
        return ErrorCode.ELECTION_NOT_NEEDED
    decision = decide(assignment, current, live, controller_epoch, unclean=True, log_ends=log_ends)
    return decision if decision.election is not None else ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE


def complete(
    assignment: ReplicaAssignment, current: LeaderAndIsr, live: Live, controller_epoch: int
) -> LeaderAndIsr | None:
    """Return the state that completes a reassignment, with a leader and an ISR of the target only, or None if it must
    wait. `live`: see `decide`.

    The other replicas are deleted, so all acknowledged records must be in as many of the target's logs as promised: all
    of the target are in the ISR, all of the ISR are alive and trusted, and no `eligible` replica may have records that
    they lack. A cancelled reassignment returns to replicas that may have been down before it began: it waits for as
    many of them as are needed to commit.
    """
    if not is_settled(current, live) or current.eligible:
        return None
    staying = [m for m in current.in_sync_members if m.broker_id in assignment.target]
    needed = current.to_commit if assignment.is_cancelled and current.to_commit else len(assignment.target)
    leader = for_reassignment(assignment, current, live)
    if leader is None or len(staying) < needed:
        return None
    itself = Member(leader, live[leader].epoch)
    isr = {m.broker_id: itself if m.broker_id == leader else m for m in staying}
    in_order = [isr[broker_id] for broker_id in assignment.target if broker_id in isr]
    epoch = current.leader_epoch + 1
    return leader_and_isr(leader, epoch, in_order, (), controller_epoch, current.partition_epoch, current.to_commit)


def _successor(
    current: LeaderAndIsr,
    leader: int,
    isr: Sequence[Member],
    eligible: Sequence[Member],
    controller_epoch: int,
) -> LeaderAndIsr:
    changed = (leader, tuple(isr), tuple(eligible)) != (
        current.leader,
        current.in_sync_members,
        current.eligible_members,
    )
    if not changed:
        return current
    epoch = current.leader_epoch + 1
    return leader_and_isr(leader, epoch, isr, eligible, controller_epoch, current.partition_epoch, current.to_commit)
