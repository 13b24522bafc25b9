"""Reassignment of partitions to other replicas (Kafka's onPartitionReassignment, KIP-455). Pure.

The problem: replicas move while records are written, and any broker may die meanwhile, including the controller's.
Acknowledged records must not be lost, and any later controller must be able to finish or cancel the reassignment.

The choice: the intent is written to the topic znode first. It holds the old replicas (OAR) together with the new ones
(RAR), and names those that are added and removed (`ReplicaAssignment`). Everything else follows from ZooKeeper and may
be repeated. The twelve steps of a reassignment:

 Phase A, while the target is not in sync
  1. The topic znode (`record`) and the cluster state (`take_in`) get OAR and RAR together, with the replicas that are
     added and removed.
  2. The leader epoch is raised, and the present replicas get LeaderAndIsr (`raise_epochs`): from now on the leader lets
     the new replicas fetch. Requests of the old epoch are fenced.
  3. The new replicas move to New, get LeaderAndIsr, and move to Online (`start_new`). The state znode is watched
     (ReassignedPartitionsIsrChange) until the whole target is in the ISR.

 Phase B, when it is (`elections.complete`)
  4. The replicas to remove are determined: OAR and RAR without RAR (`leaving`).
  5. The replicas of the target are Online.
  6. and 7. If the leader does not belong to the target, a replica of the target is elected. The state is written in a
     new leader epoch, with an ISR of the target only (`finish`). Then the cluster state gets RAR, and the target gets
     LeaderAndIsr (`release`). From now on no leader lets any other replica join the ISR.
  8. The other replicas move to Offline and get StopReplica without deletion (`release`), then with deletion (`delete`,
     `forget`). A broker that is down deletes its replica when it registers again (`ControllerOrders.delete_strays`).
  9. The topic znode gets RAR (`record`).
 10. The partition is removed from `/admin/reassign_partitions` (`leave`).
 11. Every broker gets UpdateMetadata,
 12. and deletions of topics that waited for this continue (`over`).

Kafka shrinks the ISR after the leader has moved; here one write does both, since the state in between has no use. A
replaced or cancelled reassignment continues with another target. The replicas that it added are removed at the end, not
at once as in Kafka, since they may be the only ones in sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from minibroker.controller.decisions import elections
from minibroker.controller.decisions.cluster_state import (
    AssignmentChanged,
    ClusterState,
    DeletionResumed,
    TopicSettings,
    in_order,
)
from minibroker.controller.decisions.events import ResumeDeletions
from minibroker.controller.decisions.plan import Plan, PlanBuilder, SetReassignments, SetTopic, WriteState
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.controller.decisions.topics import MAX_MESSAGE_LENGTH, MAX_TOPIC_BYTES
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    ANY_VERSION,
    NO_VERSION,
    ListPartitionReassignmentsTopic,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    ReassignablePartitionResponse,
    ReassignableTopic,
    ReassignableTopicResponse,
)
from minibroker.protocol.model import ReplicaAssignment, TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.znodes import Reassignment, TopicZnode, encode_topic

Wanted = Mapping[TopicPartition, ReplicaAssignment]
"""The intended assignments of partitions, on the way to their targets."""


# --- Requests --------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    code: ErrorCode
    message: str


def judge(state: ClusterState, partition: TopicPartition, target: Sequence[int] | None) -> ReplicaAssignment | Refusal:
    """Return the assignment for moving the partition to the replicas `target`, or the refusal. With None, the
    reassignment under way is cancelled: the partition returns to its original replicas."""
    topic, number = partition
    if partition not in state.assignments or (target is not None and topic in state.topics_to_delete):
        reason = "it is being deleted" if partition in state.assignments else _why_unknown(state, partition)
        return Refusal(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition {number} of topic {topic!r} cannot be reassigned: {reason}",
        )
    current = state.assignment(partition)
    if target is None:
        if not current.is_being_reassigned:
            return Refusal(
                ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
                f"{partition} is not being reassigned: it has the replicas {list(current.replicas[:20])}",
            )
        return current.reassigned_to(current.origin)
    if tuple(target) == current.target:
        return current  # a repetition: valid even if brokers have died since
    named = list(target[:20])
    problem = ""
    if not target:
        problem = "no replica: name at least one broker"
    elif len(set(target)) != len(target):
        problem = f"{named}: a broker holds at most one replica of a partition"
    elif min(target) < 0:
        problem = f"{named}: the id of a broker is never negative"
    else:
        dead = [b for b in target if b not in state.live_brokers and b not in current.origin]
        if dead:
            problem = (
                f"{named}, but broker {dead[0]} is not alive: choose live brokers out of "
                f"{list(state.live_broker_ids()[:20])}, or start it"
            )
    if problem:
        return Refusal(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{partition} is to have {problem}")
    return current.reassigned_to(target)


def _why_unknown(state: ClusterState, partition: TopicPartition) -> str:
    if partition.topic not in state.topic_ids:
        return "there is no such topic"
    return f"the topic has {counted(len(state.partitions_of(partition.topic)), 'partition')}, numbered from 0"


class Judged(NamedTuple):
    wanted: dict[TopicPartition, ReplicaAssignment]
    refused: dict[TopicPartition, Refusal]


def judge_request(state: ClusterState, topics: Iterable[ReassignableTopic]) -> Judged:
    """Judge an AlterPartitionReassignments request."""
    return _judge_all(
        state,
        [
            (TopicPartition(topic.name, p.partition_index), None if p.replicas is None else tuple(p.replicas))
            for topic in topics
            for p in topic.partitions
        ],
    )


def judge_file(state: ClusterState, entries: Iterable[Reassignment]) -> Judged:
    """Judge the entries of `/admin/reassign_partitions`. Entries that are under way or done are left out."""
    judged = _judge_all(state, list(entries))
    return Judged(
        {p: assignment for p, assignment in judged.wanted.items() if assignment != state.assignment(p)}, judged.refused
    )


def _judge_all(state: ClusterState, asked: Sequence[tuple[TopicPartition, tuple[int, ...] | None]]) -> Judged:
    judged = Judged({}, {})
    times = Counter(partition for partition, _ in asked)
    for partition, target in asked:
        if times[partition] > 1:
            judged.refused[partition] = Refusal(
                ErrorCode.INVALID_REQUEST, f"{partition} is named {times[partition]} times: name it once"
            )
            continue
        verdict = judge(state, partition, target)
        if isinstance(verdict, Refusal):
            judged.refused[partition] = verdict
        else:
            judged.wanted[partition] = verdict
    return judged


def unreadable(partitions: Iterable[TopicPartition], malformed: Mapping[str, str]) -> dict[TopicPartition, Refusal]:
    """Refuse partitions of topics whose znodes cannot be decoded. `malformed` has the problems of these znodes."""
    return {
        partition: Refusal(
            ErrorCode.INVALID_REQUEST,
            f"{partition} cannot be reassigned before the topic's znode makes sense: {malformed[partition.topic]}"[
                :MAX_MESSAGE_LENGTH
            ],
        )
        for partition in partitions
        if partition.topic in malformed
    }


def outdated(
    topics: Iterable[ReassignableTopic], read: Mapping[str, TopicZnode], changed_in: Mapping[str, int]
) -> dict[TopicPartition, Refusal]:
    """Refuse partitions of topics that have another id, or were changed since the client read them: the request may be
    late, and newer ones may have been granted."""
    refused: dict[TopicPartition, Refusal] = {}
    for topic in topics:
        if topic.name not in read:
            continue
        if topic.topic_id not in ("", read[topic.name].topic_id):
            refusal = Refusal(
                ErrorCode.UNKNOWN_TOPIC_ID,
                f"topic {topic.name!r} has the id {read[topic.name].topic_id}, not {topic.topic_id}: it is another "
                "topic, and stays as it is",
            )
        elif topic.known_version not in (ANY_VERSION, changed_in[topic.name]):
            refusal = Refusal(ErrorCode.INVALID_UPDATE_VERSION, f"topic {topic.name!r} has been changed meanwhile")
        else:
            continue
        refused |= {TopicPartition(topic.name, p.partition_index): refusal for p in topic.partitions}
    return refused


def results(
    topics: Iterable[ReassignableTopic],
    refused: Mapping[TopicPartition, Refusal],
    read: Mapping[str, TopicZnode],
    changed_in: Mapping[str, int],
) -> list[ReassignableTopicResponse]:
    """Return the results of the request's partitions, in their order."""

    def result(partition: TopicPartition) -> ReassignablePartitionResponse:
        refusal = refused.get(partition, Refusal(ErrorCode.NONE, ""))
        return ReassignablePartitionResponse(partition.partition, refusal.code, refusal.message)

    return [
        ReassignableTopicResponse(
            topic.name,
            [result(TopicPartition(topic.name, p.partition_index)) for p in topic.partitions],
            read[topic.name].topic_id if topic.name in read else "",
            changed_in.get(topic.name, NO_VERSION),
        )
        for topic in topics
    ]


def under_way(
    state: ClusterState, topics: Sequence[ListPartitionReassignmentsTopic] | None
) -> list[OngoingTopicReassignment]:
    """Return the reassignments under way, of these partitions or of all."""
    asked = None
    if topics is not None:
        asked = {TopicPartition(topic.name, number) for topic in topics for number in topic.partition_indexes}
    found: dict[str, list[OngoingPartitionReassignment]] = {}
    for partition in in_order(state.reassigning):
        if asked is None or partition in asked:
            assignment = state.reassigning[partition]
            found.setdefault(partition.topic, []).append(
                OngoingPartitionReassignment(
                    partition.partition,
                    list(assignment.replicas),
                    [b for b in assignment.adding if b not in assignment.removing],
                    list(assignment.removing),
                )
            )
    return [OngoingTopicReassignment(topic, partitions) for topic, partitions in found.items()]


def refused_file(refused: Mapping[TopicPartition, Refusal]) -> Plan:
    """Note the entries of `/admin/reassign_partitions` that are refused."""
    return Plan(
        notes=tuple(f"an entry of /admin/reassign_partitions is dropped: {r.message}" for r in refused.values())
    )


# --- Phase A ---------------------------------------------------------------------------------------------------


def record(state: ClusterState, read: Mapping[str, tuple[TopicZnode, int]], wanted: Wanted) -> Plan:
    """Steps 1 and 9: write the assignments into the topic znodes, which were `read` with their versions. Nothing is
    written for a topic that is gone or has another id."""
    builder = PlanBuilder()
    for topic, changed in by_topic(wanted).items():
        if topic in read and read[topic][0].topic_id == state.topic_ids.get(topic):
            znode, version = read[topic]
            known = {number: assignment for number, assignment in changed.items() if number in znode.partitions}
            after = znode.reassigned(known)
            if after != znode:
                builder.write(SetTopic(topic, after, version))
    return builder.build()


def too_large(read: Mapping[str, tuple[TopicZnode, int]], wanted: Wanted) -> dict[TopicPartition, Refusal]:
    """Refuse partitions of topics whose znode would exceed ZooKeeper's limit."""
    refused: dict[TopicPartition, Refusal] = {}
    for topic, changed in by_topic(wanted).items():
        if topic in read:
            size = len(encode_topic(read[topic][0].reassigned(changed)))
            if size > MAX_TOPIC_BYTES:
                message = (
                    f"the assignment of topic {topic!r} would take {size} bytes in ZooKeeper: the limit is "
                    f"{MAX_TOPIC_BYTES}; reassign fewer partitions at a time"
                )
                refused |= dict.fromkeys(
                    (TopicPartition(topic, number) for number in changed), Refusal(ErrorCode.INVALID_REQUEST, message)
                )
    return refused


def by_topic(wanted: Wanted) -> dict[str, dict[int, ReplicaAssignment]]:
    found: dict[str, dict[int, ReplicaAssignment]] = {}
    for (topic, number), assignment in wanted.items():
        found.setdefault(topic, {})[number] = assignment
    return found


def take_in(state: ClusterState, wanted: Wanted) -> Plan:
    """Step 1, in the cluster state. Next comes `raise_epochs`."""
    builder = PlanBuilder()
    for partition in in_order(wanted):
        builder.change(AssignmentChanged(partition, wanted[partition]))
        for broker_id in wanted[partition].replicas:
            replica = PartitionReplica(partition, broker_id)
            if state.replica_state(replica) is ReplicaState.NON_EXISTENT:
                builder.move_replica(replica, ReplicaState.NEW)
    return builder.build()


def raise_epochs(state: ClusterState, partitions: Iterable[TopicPartition]) -> Plan:
    """Step 2. The caller repeats it for conflicts. Next comes `start_new`."""
    builder = PlanBuilder()
    for partition in in_order(partitions):
        current = state.leadership.get(partition)
        if current is None:
            continue  # it never had a leader; `settle` elects its first one
        raised = msgspec.structs.replace(
            current, leader_epoch=current.leader_epoch + 1, controller_epoch=state.controller_epoch
        )
        builder.write(WriteState(partition, raised))
        builder.tell((b for b in state.live_replicas(partition) if not _is_new(state, partition, b)), partition)
    return builder.build()


def start_new(state: ClusterState, partitions: Iterable[TopicPartition]) -> Plan:
    """Step 3. The brokers of new replicas may create logs, in any working directory."""
    builder = PlanBuilder()
    announced = [p for p in in_order(partitions) if p in state.leadership]
    for partition in announced:
        new = [b for b in state.assignments[partition] if _is_new(state, partition, b)]
        for broker_id in new:
            is_live = state.is_live(partition, broker_id)
            target = ReplicaState.ONLINE if is_live else ReplicaState.OFFLINE
            builder.move_replica(PartitionReplica(partition, broker_id), target)
        builder.tell((b for b in new if state.is_live(partition, b)), partition, is_new=True)
    if announced:
        builder.announce(state.live_brokers, announced)
    return builder.build()


def _is_new(state: ClusterState, partition: TopicPartition, broker_id: int) -> bool:
    return state.replica_state(PartitionReplica(partition, broker_id)) is ReplicaState.NEW


# --- Phase B ---------------------------------------------------------------------------------------------------


def candidates(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[TopicPartition, ...]:
    """Return the partitions that may be ready, by their ISRs. `finish` decides, with their topics' settings."""
    return in_order(
        partition
        for partition in partitions
        if (assignment := state.reassigning.get(partition)) is not None
        and (known := state.leadership.get(partition)) is not None
        and (assignment.is_cancelled or set(assignment.target) <= set(known.isr))
    )


class Finish(NamedTuple):
    plan: Plan
    partitions: tuple[TopicPartition, ...]
    """The partitions that are ready."""


def finish(state: ClusterState, partitions: Iterable[TopicPartition], settings: Mapping[str, TopicSettings]) -> Finish:
    """Steps 5 to 7, in ZooKeeper: the leader and the ISR belong to the target only. The caller decides again about
    conflicts. Next comes `release` for the others."""
    builder = PlanBuilder()
    ready: list[TopicPartition] = []
    for partition in candidates(state, partitions):
        assignment, known = state.reassigning[partition], state.leadership[partition]
        of_topic = settings.get(partition.topic, TopicSettings())
        live = state.staying_brokers_of(partition)
        final = elections.complete(
            assignment,
            known,
            elections.trusted_by_what_is_flushed(live) if of_topic.is_synced else live,
            state.controller_epoch,
        )
        if final is None:
            continue
        ready.append(partition)
        for broker_id in assignment.target:
            if _is_new(state, partition, broker_id):
                builder.move_replica(PartitionReplica(partition, broker_id), ReplicaState.ONLINE)
        builder.write(WriteState(partition, final))
        builder.move_partition(partition, PartitionState.ONLINE)
    return Finish(builder.build(), tuple(ready))


def leaving(state: ClusterState, partitions: Iterable[TopicPartition]) -> tuple[PartitionReplica, ...]:
    """Step 4: return the replicas to remove."""
    return tuple(
        PartitionReplica(partition, broker_id)
        for partition in partitions
        for broker_id in state.assignment(partition).removing
    )


def release(state: ClusterState, partitions: Iterable[TopicPartition], gone: Iterable[PartitionReplica]) -> Plan:
    """Steps 6 to 8: the cluster state gets the target, which gets LeaderAndIsr; the replicas in `gone` (see `leaving`)
    get StopReplica. Next comes `delete`."""
    builder = PlanBuilder()
    for partition in partitions:
        target = state.assignment(partition).target
        builder.change(AssignmentChanged(partition, ReplicaAssignment(target)))
        builder.tell((b for b in target if state.is_live(partition, b)), partition)
    for replica in gone:
        if state.replica_state(replica) in (ReplicaState.NEW, ReplicaState.ONLINE):
            builder.move_replica(replica, ReplicaState.OFFLINE)
        if replica.broker_id in state.live_brokers:
            builder.stop(replica, delete=False)
    return builder.build()


def delete(state: ClusterState, gone: Iterable[PartitionReplica]) -> Plan:
    """Step 8: the brokers delete the replicas. Next comes `forget`, without waiting for responses, since a broker may
    never return."""
    builder = PlanBuilder()
    for replica in gone:
        if state.replica_state(replica) is ReplicaState.OFFLINE:
            builder.move_replica(replica, ReplicaState.DELETION_STARTED)
        if replica.broker_id in state.live_brokers:
            builder.stop(replica, delete=True)
    return builder.build()


def forget(state: ClusterState, gone: Iterable[PartitionReplica]) -> Plan:
    builder = PlanBuilder()
    for replica in gone:
        if state.replica_state(replica) is ReplicaState.DELETION_STARTED:
            builder.move_replica(replica, ReplicaState.DELETION_SUCCESSFUL, ReplicaState.NON_EXISTENT)
    return builder.build()


def leave(entries: Iterable[Reassignment], version: int, problem: str = "") -> Plan:
    """Step 10: keep only these entries of `/admin/reassign_partitions`. `problem`: why it could not be decoded."""
    notes = (f"the reassignments are dropped: {problem}",) if problem else ()
    return Plan(writes=(SetReassignments(tuple(entries), version),), notes=notes)


def over(state: ClusterState, partitions: Collection[TopicPartition]) -> Plan:
    """Steps 11 and 12."""
    builder = PlanBuilder()
    builder.announce(state.live_brokers, (p for p in partitions if p in state.assignments))
    for topic in dict.fromkeys(partition.topic for partition in partitions):
        if topic in state.ineligible_topics and not state.is_reassigning(topic):
            builder.change(DeletionResumed(topic))
    builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()
