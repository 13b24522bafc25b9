"""Brokers join, fail and bounce, and their partitions follow (Kafka's onBrokerStartup and onBrokerFailure).

All cases use one decision, `settle`: which partitions have the wrong leader or ISR, and which brokers must be informed?
It depends on the cluster state, not on the event. So it serves the loss and return of a broker, a new topic, a failed
log directory, taking office, and the retry after a conflict, and running it twice does no harm. Events differ only in
the partitions to settle, and in the brokers to inform even if nothing changed.

When a leader dies, Kafka writes its partitions twice (the ISR without the broker, then the new leader). One write does
both here, which halves the failover and leads to the same state.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from minibroker.controller.decisions import elections
from minibroker.controller.decisions.cluster_state import (
    BrokerAdded,
    BrokerRemoved,
    ClusterState,
    DeletionIneligible,
    DeletionQueued,
    DeletionResumed,
    LogEndReported,
    ReplicaFailed,
    ReplicaRecovered,
    Snapshot,
    StatesInitialized,
    TopicAdded,
    TopicSettings,
    in_order,
)
from minibroker.controller.decisions.events import ResumeDeletions
from minibroker.controller.decisions.plan import (
    DeletedTopic,
    EnsureNode,
    Plan,
    PlanBuilder,
    RemoveBroker,
    RemoveNode,
    WriteState,
)
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.model import NO_LEADER, LeaderAndIsr, RegisteredBroker, TopicPartition, min_insync_replicas
from minibroker.protocol.znodes import delete_topic_path, partitions_path


class BrokerDifference(NamedTuple):
    """The registered brokers compared with the live ones, each in the order of the ids."""

    added: tuple[RegisteredBroker, ...]
    lost: tuple[int, ...]
    bounced: tuple[RegisteredBroker, ...]
    """Brokers with the same id and another epoch. They are treated as lost, then as added."""


def difference(live: Mapping[int, RegisteredBroker], registered: Mapping[int, RegisteredBroker]) -> BrokerDifference:
    return BrokerDifference(
        added=tuple(registered[b] for b in sorted(registered) if b not in live),
        lost=tuple(b for b in sorted(live) if b not in registered),
        bounced=tuple(registered[b] for b in sorted(registered) if b in live and live[b].epoch != registered[b].epoch),
    )


# --- Taking office -------------------------------------------------------------------------------------------


def load(state: ClusterState, snapshot: Snapshot, refused: Container[int] = (), *, deletes_topics: bool = True) -> Plan:
    """The first plan of a tenure: add the brokers and topics that were read to the empty cluster state, and send the
    list of live brokers to each of them.

    `refused` are registered brokers that accept no connection: they count as dead, and their registration is removed.
    `deletes_topics`: Kafka's `delete.topic.enable`. Next come `initialize` and `settle` for all partitions, then
    deletions.
    """
    builder = PlanBuilder()
    live = [broker for _, broker in sorted(snapshot.brokers.items()) if broker.id not in refused]
    for broker in snapshot.brokers.values():
        if broker.id in refused:
            builder.write(RemoveBroker(broker.id, broker.epoch))
    for path in snapshot.notifications:
        builder.write(RemoveNode(path))  # all states have just been read, and all brokers are about to report failures
    for broker in live:
        builder.change(BrokerAdded(broker))
    for topic in sorted(snapshot.topics):
        builder.change(TopicAdded(topic, snapshot.topics[topic]))
    for topic in snapshot.topics_to_delete:
        if not deletes_topics:
            builder.write(RemoveNode(delete_topic_path(topic)))
            builder.note(f"topic {topic} is not deleted, and the request is dropped: delete.topic.enable is false")
        elif topic in snapshot.topics:
            builder.change(DeletionQueued(topic))
            builder.follow_up(ResumeDeletions(state.controller_epoch))
        elif topic not in snapshot.malformed_topics:
            builder.write(RemoveNode(delete_topic_path(topic)))
            builder.note(f"topic {topic} does not exist: the request to delete it is dropped")
    builder.announce((broker.id for broker in live), ())
    return builder.build()


def initialize(state: ClusterState, snapshot: Snapshot, partitions: Iterable[TopicPartition]) -> Plan:
    """Adopt the states read for these partitions, after `load` (Kafka's initializePartitionState and
    initializeReplicaState). These are no moves, since an earlier controller made them."""
    builder = PlanBuilder()
    positions: dict[TopicPartition, PartitionState] = {}
    replicas: dict[PartitionReplica, ReplicaState] = {}
    for partition in partitions:
        known = snapshot.states.get(partition)
        if known is not None:
            builder.adopt(partition, known)
            is_led = known.leader in state.live_brokers
            positions[partition] = PartitionState.ONLINE if is_led else PartitionState.OFFLINE
        else:
            is_malformed = partition in snapshot.malformed_states
            positions[partition] = PartitionState.OFFLINE if is_malformed else PartitionState.NEW
        for broker_id in state.assignments[partition]:
            is_live = broker_id in state.live_brokers
            replicas[PartitionReplica(partition, broker_id)] = ReplicaState.ONLINE if is_live else ReplicaState.OFFLINE
    builder.change(StatesInitialized(positions, replicas))
    return builder.build()


def urgent(state: ClusterState) -> frozenset[TopicPartition]:
    """Return the partitions to settle first: those without a leader, and those with replicas on dead brokers, for which
    acknowledgements may wait. All brokers are told about all others as well, which takes long if these are many."""
    is_live = state.live_brokers.__contains__
    with_dead = (partition for partition, replicas in state.assignments.items() if not all(map(is_live, replicas)))
    return frozenset((*with_dead, *state.partitions_without_leader()))


# --- Brokers lost and added ----------------------------------------------------------------------------------


# C4: `lost` removes the dead brokers from the cluster state, `settle` elects for the partitions on them.
def lost(state: ClusterState, broker_ids: Iterable[int]) -> Plan:
    """Remove the brokers from the cluster state. Next comes `settle` for the partitions `affected_by` them."""
    gone = tuple(sorted(broker_ids))
    builder = PlanBuilder()
    for broker_id in gone:
        builder.change(BrokerRemoved(broker_id))
    for partition in affected_by(state, gone):
        if state.leader(partition) in gone and state.partition_state(partition) is PartitionState.ONLINE:
            builder.move_partition(partition, PartitionState.OFFLINE)
    for broker_id in gone:
        for partition in state.partitions_on(broker_id):
            _lose_replica(builder, state, PartitionReplica(partition, broker_id), f"broker {broker_id} is down")
    return builder.build()


def affected_by(state: ClusterState, broker_ids: Iterable[int]) -> tuple[TopicPartition, ...]:
    """Return the partitions with a replica on one of the brokers."""
    return in_order(partition for broker_id in broker_ids for partition in state.partitions_on(broker_id))


def _lose_replica(builder: PlanBuilder, state: ClusterState, replica: PartitionReplica, reason: str) -> None:
    current = state.replica_state(replica)
    if current is ReplicaState.DELETION_STARTED:
        builder.move_replica(replica, ReplicaState.DELETION_INELIGIBLE)
        builder.change(DeletionIneligible(replica.partition.topic, reason))
    elif current in (ReplicaState.NEW, ReplicaState.ONLINE):
        builder.move_replica(replica, ReplicaState.OFFLINE)


def suspected(broker_id: int, broker_epoch: int) -> Plan:
    """Remove the registration of a broker that seems to have crashed; BrokerChange then handles its loss."""
    return Plan(writes=(RemoveBroker(broker_id, broker_epoch),))


def added(state: ClusterState, brokers: Iterable[RegisteredBroker]) -> Plan:
    """Add brokers to the cluster state, and send them all metadata first.

    Next comes `settle` for the partitions `affected_by` them and those without a leader.
    """
    brokers = tuple(brokers)
    builder = PlanBuilder()
    resumed: dict[str, None] = {}
    for broker in brokers:
        builder.change(BrokerAdded(broker))
        for partition in state.partitions_on(broker.id):
            replica = PartitionReplica(partition, broker.id)
            if state.is_queued_for_deletion(partition.topic):
                resumed[partition.topic] = None
            elif state.replica_state(replica) in (ReplicaState.NEW, ReplicaState.OFFLINE):
                builder.move_replica(replica, ReplicaState.ONLINE)
    for topic in resumed:
        if topic in state.ineligible_topics:
            builder.change(DeletionResumed(topic))
    if resumed:
        builder.follow_up(ResumeDeletions(state.controller_epoch))
    builder.announce(
        (broker.id for broker in brokers),
        (p for p in state.assignments if not state.is_queued_for_deletion(p.topic)),
        (
            DeletedTopic(topic, state.topic_ids[topic])
            for topic in state.topics_to_delete
            if state.is_queued_for_deletion(topic)
        ),
        names_the_last=True,
    )
    return builder.build()


def log_dirs_failed(state: ClusterState, notifications: Iterable[str], failed: Iterable[int]) -> Plan:
    """Handle notifications (paths) of brokers that have lost log directories (Kafka's processLogDirEventNotification),
    or that request the orders again which they could not carry out, deletions of replicas included.

    Next comes `settle` for the partitions `affected_by` those brokers, which sends them LeaderAndIsr; their responses
    report the lost replicas. If this controller dies in between, its successor sends LeaderAndIsr to all brokers.
    """
    builder = PlanBuilder()
    for path in notifications:
        builder.write(RemoveNode(path))
    resumed: dict[str, None] = {}
    for broker_id in failed:
        for partition in state.partitions_on(broker_id):
            if partition.topic in state.ineligible_topics and state.is_queued_for_deletion(partition.topic):
                resumed[partition.topic] = None
                replica = PartitionReplica(partition, broker_id)
                if replica in state.failed_replicas:  # so that the broker is ordered to delete what it may have
                    builder.change(ReplicaRecovered(replica))
    for topic in resumed:
        builder.change(DeletionResumed(topic))
    if resumed:
        builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()


def replicas_answered(
    state: ClusterState,
    broker_id: int,
    errors: Mapping[TopicPartition, ErrorCode],
    log_ends: Iterable[LogEndReported] = (),
) -> Plan:
    """Handle a broker's response to LeaderAndIsr: KAFKA_STORAGE_ERROR means that the replica's log directory failed.

    Next comes `settle` for the partitions whose replica failed, recovered, or reported the end of its log.
    """
    builder = PlanBuilder()
    for report in log_ends:
        if state.leader(report.replica.partition) == NO_LEADER and report.replica.partition in state.leadership:
            builder.change(report)
    for partition in in_order(errors):
        replica = PartitionReplica(partition, broker_id)
        if broker_id not in state.assignments.get(partition, ()) or broker_id not in state.live_brokers:
            continue
        failed = replica in state.failed_replicas
        if errors[partition] is ErrorCode.KAFKA_STORAGE_ERROR and not failed:
            builder.change(ReplicaFailed(replica))
            if state.leader(partition) == broker_id and state.partition_state(partition) is PartitionState.ONLINE:
                builder.move_partition(partition, PartitionState.OFFLINE)
            _lose_replica(builder, state, replica, f"the log directory of {replica} has failed")
        elif errors[partition] is ErrorCode.NONE and failed:
            builder.change(ReplicaRecovered(replica))
            if state.replica_state(replica) is ReplicaState.OFFLINE:
                builder.move_replica(replica, ReplicaState.ONLINE)
        elif errors[partition] not in (ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR):
            builder.note(f"broker {broker_id} could not take on {partition}: {errors[partition].name}")
    return builder.build()


def all_told(state: ClusterState) -> Plan:
    """Mark the end of the metadata, after `load` and after all topics were announced in parts."""
    builder = PlanBuilder()
    builder.announce(state.live_brokers, (), names_the_last=True)
    return builder.build()


# --- Leaders and ISRs ----------------------------------------------------------------------------------------


def settle(
    state: ClusterState,
    partitions: Iterable[TopicPartition],
    *,
    settings: Mapping[str, TopicSettings] = MappingProxyType({}),
    tell: Container[int] = (),
    announce: Iterable[TopicPartition] = (),
    announce_brokers: bool = False,
) -> Plan:
    """Give each of the partitions the leader and the ISR that it should have. `settings`: of `topics_to_settle`.

    LeaderAndIsr for a changed partition goes to its live replicas, UpdateMetadata to all live brokers. Even if nothing
    changed, brokers in `tell` get LeaderAndIsr for their replicas among `partitions`, and UpdateMetadata contains
    `announce`; with `announce_brokers` it is sent even if it is empty. Partitions of topics queued for deletion are
    left alone.
    """
    builder = PlanBuilder()
    changed: list[TopicPartition] = []
    created_in: set[str] = set()
    for partition in in_order(partitions):
        if partition not in state.assignments or state.is_queued_for_deletion(partition.topic):
            continue
        if partition in state.leadership:
            if _settle_known(builder, state, partition, settings.get(partition.topic, TopicSettings()), tell):
                changed.append(partition)
        elif state.partition_state(partition) is PartitionState.NEW:
            if _settle_new(builder, state, partition, settings.get(partition.topic, TopicSettings()), created_in):
                changed.append(partition)
        else:
            builder.note(f"the state znode of {partition} is missing or cannot be read: it stays without a leader")
    announced = [p for p in announce if p in state.assignments and not state.is_queued_for_deletion(p.topic)]
    if changed or announced or announce_brokers:
        builder.announce(state.live_brokers, (*changed, *announced))
    return builder.build()


def _settle_new(
    builder: PlanBuilder,
    state: ClusterState,
    partition: TopicPartition,
    settings: TopicSettings,
    created_in: set[str],
) -> bool:
    live = state.live_replicas(partition)
    staying = state.staying_brokers_of(partition)
    to_commit = min_insync_replicas(settings.min_insync_replicas, state.assignment(partition).replication_factor)
    first = elections.first_state(state.assignments[partition], staying, state.controller_epoch, to_commit=to_commit)
    if first is None:
        builder.note(f"{partition} stays new: none of its replicas {list(state.assignments[partition])} is alive")
        return False
    if partition.topic not in created_in:
        created_in.add(partition.topic)
        if not any(sibling in state.leadership for sibling in state.partitions_of(partition.topic)):
            builder.write(EnsureNode(partitions_path(partition.topic)))
    builder.write(WriteState(partition, first))
    builder.move_partition(partition, PartitionState.ONLINE)
    _take_online(builder, state, partition, live)
    builder.tell(live, partition, is_new=True)
    return True


def _settle_known(
    builder: PlanBuilder,
    state: ClusterState,
    partition: TopicPartition,
    settings: TopicSettings,
    tell: Container[int],
) -> bool:
    assignment = state.assignments[partition]
    live_brokers = state.live_brokers_of(partition)
    decision = elections.decide(
        assignment,
        state.leadership[partition],
        elections.trusted_by_what_is_flushed(live_brokers) if settings.is_synced else live_brokers,
        state.controller_epoch,
        unclean=settings.unclean_leader_election,
        log_ends=state.log_ends(partition),
        stopping=state.shutting_down_brokers,
    )
    return decided(builder, state, partition, decision, tell, settings.version)


def decided(
    builder: PlanBuilder,
    state: ClusterState,
    partition: TopicPartition,
    decision: elections.Decision,
    tell: Container[int] = (),
    settings_version: int | None = None,
) -> bool:
    """Add the moves, the write and the LeaderAndIsr that follow from a decision about a partition with a state. Returns
    whether UpdateMetadata is needed. `tell`: see `settle`. `settings_version`: the version of the settings that allow
    an unclean election and must still hold when it is written."""
    target, election = decision
    current = state.leadership[partition]
    live = state.live_replicas(partition)
    position = state.partition_state(partition)
    # A new partition with a state has it from an earlier controller, which may not have informed any broker.
    is_new = position is PartitionState.NEW

    if target is not current:
        alarm = ""
        if election is not None and election.may_lose_records:
            alarm = _alarm(partition, current, election)
            builder.note(alarm)
        is_unclean = election is not None and election.basis is elections.Basis.UNCLEAN
        builder.write(
            WriteState(partition, target, alarm=alarm, settings_version=settings_version if is_unclean else None)
        )
    if target.leader == NO_LEADER:
        if position is not PartitionState.OFFLINE:
            builder.move_partition(partition, PartitionState.OFFLINE)
        if target is not current:
            builder.note(_why_leaderless(partition, current, live))
    elif position is PartitionState.ONLINE and target.leader != current.leader:
        had_leader = state.is_live(partition, current.leader)
        builder.move_partition(partition, *(() if had_leader else (PartitionState.OFFLINE,)), PartitionState.ONLINE)
    elif position is not PartitionState.ONLINE:
        builder.move_partition(partition, PartitionState.ONLINE)
    _take_online(builder, state, partition, live)

    # Failed replicas included: one may have been created again.
    informed = [b for b in state.assignments[partition] if b in tell and b in state.live_brokers]
    if target is not current or is_new:
        builder.tell(dict.fromkeys((*live, *informed)), partition, is_new=is_new)
        return True
    builder.tell(informed, partition)
    return False


def _take_online(builder: PlanBuilder, state: ClusterState, partition: TopicPartition, live: tuple[int, ...]) -> None:
    """Move new replicas to their first state; the same plan sends their brokers LeaderAndIsr."""
    for broker_id in state.assignments[partition]:
        replica = PartitionReplica(partition, broker_id)
        if state.replica_state(replica) is ReplicaState.NEW:
            builder.move_replica(replica, ReplicaState.ONLINE if broker_id in live else ReplicaState.OFFLINE)


def _alarm(partition: TopicPartition, current: LeaderAndIsr, election: elections.Election) -> str:
    on_record = [*current.isr, *current.eligible]
    if election.basis is elections.Basis.LONGEST_LOG:
        return (
            f"{election.leader} leads {partition} because its log is the longest: all of {on_record}, which had what "
            "was acknowledged, are back and may have lost some of it; what was only in memory when the power failed is "
            "lost"
        )
    return f"unclean election of {election.leader} for {partition}: what only {on_record} had is lost"


def _why_leaderless(partition: TopicPartition, current: LeaderAndIsr, live: Container[int]) -> str:
    back = [broker_id for broker_id in (*current.isr, *current.eligible) if broker_id in live]
    or_eligible = f" and eligible {list(current.eligible)}" if current.eligible else ""
    lost = f" and sure to have lost nothing ({back} may have)" if back else ""
    return f"{partition} has no leader: none of its ISR {list(current.isr)}{or_eligible} is alive{lost}"


def topics_to_settle(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[str, ...]:
    """Return the topics whose settings `settle` needs for these partitions. Partitions that are settled whatever their
    durability, or without a live replica, need none."""
    topics = {
        partition.topic
        for partition in partitions
        if partition in state.assignments
        and not state.is_queued_for_deletion(partition.topic)
        and (live := state.live_brokers_of(partition))
        and (
            partition not in state.leadership
            or not elections.is_settled(state.leadership[partition], live, state.shutting_down_brokers)
        )
    }
    return tuple(sorted(topics))
