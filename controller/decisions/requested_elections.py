"""Elections on request of an administrator or the automatic rebalance. Pure.

`elections.py` chooses the replica and the ISR (KIP-460: preferred and unclean elections). This module decides which
partitions may be requested, and makes the plan: one write raises the leader epoch; then the old and the new leader get
LeaderAndIsr at the same time, and all brokers UpdateMetadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minibroker.controller.decisions import brokers, elections
from minibroker.controller.decisions.cluster_state import ClusterState, TopicSettings, in_order
from minibroker.controller.decisions.events import ElectionOutcome
from minibroker.controller.decisions.plan import Plan, PlanBuilder, RemoveAsRead
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import NO_EPOCH, NO_LEADER, ElectionType, TopicPartition
from minibroker.protocol.znodes import PREFERRED_REPLICA_ELECTION

_SHOWN = 20


class Elections(NamedTuple):
    plan: Plan
    outcomes: dict[TopicPartition, ElectionOutcome]
    """The outcome for each partition, if the plan is carried out without a conflict."""


def refused(state: ClusterState, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, ElectionOutcome]:
    """Return the partitions without an election, because they do not exist or their topic is being deleted."""
    refusals: dict[TopicPartition, ElectionOutcome] = {}
    for partition in partitions:
        if partition not in state.assignments:
            refusals[partition] = ElectionOutcome(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {str(partition)[:80]}"
            )
        elif state.is_queued_for_deletion(partition.topic):
            refusals[partition] = ElectionOutcome(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"topic {partition.topic} is being deleted: no leader is elected for {partition}",
            )
    return refusals


def displaced_first(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
    """Return the partitions in order, but first those that the preferred leader does not lead.

    Elections are held for some partitions at a time, and every time that changes something informs all brokers. If few
    of many partitions need an election, they are together."""
    return tuple(sorted(in_order(partitions), key=lambda p: state.leader(p) == state.assignments[p][0]))


def topics_to_elect_in(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[str, ...]:
    """Return the topics whose settings `elect` needs: those with partitions that the preferred leader does not lead."""
    topics = {
        partition.topic
        for partition in partitions
        if partition in state.leadership and state.leader(partition) != state.assignments[partition][0]
    }
    return tuple(sorted(topics))


def perhaps_back_in_sync(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
    """Return the partitions whose preferred leader is alive but not in the known ISR."""
    return tuple(
        partition
        for partition in partitions
        if partition in state.leadership
        and (preferred := state.assignments[partition][0]) not in state.leadership[partition].isr
        and state.is_live(partition, preferred)
    )


def elect(
    state: ClusterState,
    partitions: Iterable[TopicPartition],
    election_type: ElectionType,
    settings: Mapping[str, TopicSettings],
) -> Elections:
    """Hold the elections, for partitions that are not `refused`. `settings`: of `topics_to_elect_in`."""
    builder = PlanBuilder()
    outcomes: dict[TopicPartition, ElectionOutcome] = {}
    changed: list[TopicPartition] = []
    for partition in in_order(partitions):
        decision = _decide(state, partition, election_type, settings.get(partition.topic, TopicSettings()))
        if isinstance(decision, ErrorCode):
            is_led = decision is ErrorCode.ELECTION_NOT_NEEDED
            led_in = state.leadership[partition].leader_epoch if is_led else NO_EPOCH
            outcomes[partition] = ElectionOutcome(decision, _why_not(state, partition, decision), led_in)
            continue
        outcomes[partition] = ElectionOutcome(ErrorCode.NONE, "", decision.state.leader_epoch)
        if brokers.decided(builder, state, partition, decision):
            changed.append(partition)
    if changed:
        builder.announce(state.live_brokers, changed)
    return Elections(builder.build(), outcomes)


def _decide(
    state: ClusterState, partition: TopicPartition, election_type: ElectionType, settings: TopicSettings
) -> elections.Decision | ErrorCode:
    current = state.leadership.get(partition)
    if current is None:  # it never had a leader, or its state cannot be decoded
        if election_type is ElectionType.PREFERRED:
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
        return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
    assignment = state.assignments[partition]
    live = state.live_brokers_of(partition)
    if settings.is_synced:
        live = elections.trusted_by_what_is_flushed(live)
    if election_type is ElectionType.PREFERRED:
        if assignment[0] in state.shutting_down_brokers:
            return ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
        return elections.elect_preferred(assignment, current, live, state.controller_epoch)
    return elections.elect_unclean(
        assignment, current, live, state.controller_epoch, log_ends=state.log_ends(partition)
    )


def _why_not(state: ClusterState, partition: TopicPartition, error: ErrorCode) -> str:
    assignment = state.assignments[partition]
    current = state.leadership.get(partition)
    if error is ErrorCode.ELECTION_NOT_NEEDED:
        return f"{partition} is led by broker {state.leader(partition)}"
    if current is None:
        return f"the state znode of {partition} is missing or cannot be read: its replicas are {list(assignment)}"
    if error is ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE:
        return f"none of the replicas {list(assignment)} of {partition} is alive"
    preferred = assignment[0]
    if not state.is_live(partition, preferred):
        return f"the preferred leader of {partition}, broker {preferred}, is not alive"
    if preferred in state.shutting_down_brokers:
        return f"the preferred leader of {partition}, broker {preferred}, is about to stop"
    if preferred not in current.isr:
        return f"the preferred leader of {partition}, broker {preferred}, is not in the ISR {list(current.isr)}"
    return f"the preferred leader of {partition}, broker {preferred}, may have lost records"


# --- Requested in ZooKeeper --------------------------------------------------------------------------------------


def named(partitions: Sequence[TopicPartition], refusals: Mapping[TopicPartition, ElectionOutcome]) -> str:
    """Return the problems of the partitions in the znode as one line for the log, or an empty string."""
    problems = [outcome.message for outcome in refusals.values()]
    repeated = [partition for partition, times in Counter(partitions).items() if times > 1]
    problems += [f"{str(partition)[:80]} is named more than once, and counts once" for partition in repeated]
    if not problems:
        return ""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{PREFERRED_REPLICA_ELECTION}: {'; '.join(problems[:_SHOWN])}{more}"


def done(czxid: int, version: int, problem: str) -> Plan:
    """Remove the znode after its elections were held, unless it has changed since. `problem` is noted."""
    write = RemoveAsRead(PREFERRED_REPLICA_ELECTION, czxid, version)
    return Plan(writes=(write,), notes=(problem,) if problem else ())


# --- Automatic rebalance -----------------------------------------------------------------------------------------


def to_rebalance(state: ClusterState, percentage: int) -> tuple[TopicPartition, ...]:
    """Return the partitions to give back to their preferred leaders (Kafka's checkAndTriggerAutoLeaderRebalance).

    A broker is out of balance if other brokers lead more than `percentage` of the partitions that it is preferred for.
    It gets back those whose ISR it is in.
    """
    preferred: Counter[int] = Counter()
    elsewhere: dict[int, list[TopicPartition]] = {broker_id: [] for broker_id in state.live_brokers}
    # One pass over all partitions, since this must not block the loop for long.
    for partition, current in state.leadership.items():
        broker_id = state.assignments[partition][0]
        if broker_id in elsewhere and partition.topic not in state.topics_to_delete:
            preferred[broker_id] += 1
            if current.leader != broker_id:
                elsewhere[broker_id].append(partition)
    return in_order(
        partition
        for broker_id, partitions in elsewhere.items()
        if len(partitions) * 100 > percentage * preferred[broker_id]
        for partition in partitions
        if _may_be_given_back(state, partition, broker_id)
    )


def _may_be_given_back(state: ClusterState, partition: TopicPartition, preferred: int) -> bool:
    current = state.leadership[partition]
    return (
        preferred in current.isr
        and current.leader != NO_LEADER
        and (partition, preferred) not in state.failed_replicas
        and partition not in state.reassigning
        and preferred not in state.shutting_down_brokers
    )
