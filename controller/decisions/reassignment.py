"""Partitions get other replicas (Kafka's onPartitionReassignment, KIP-455). Pure.

The problem: replicas are to move while records are written, and any broker may die meanwhile, this controller too.
Nothing acknowledged may be lost, and what was begun must be finished, or taken back, by whoever is in office then.

The choice: the intent is in the topic znode before anything happens. There the partition has the old replicas (OAR) and
the new ones (RAR) together, and those that come and go are named (`ReplicaAssignment`). Everything after that follows
from what ZooKeeper has, and may be done twice. The twelve steps of a reassignment:

 Phase A, while the target is not in sync
  1. The topic znode gets OAR and RAR together, with those that come and go (`record`), and so does the picture
     (`take_in`).
  2. The leader epoch is raised, and the replicas that were there hear of it by LeaderAndIsr (`raise_epochs`): now the
     leader lets the new ones fetch. Whatever the old assignment has under way is fenced.
  3. The new replicas are New, hear of it too, and are Online (`start_new`). The state znode is watched
     (ReassignedPartitionsIsrChange), until all of the target are in the ISR.

 Phase B, when they are (`elections.complete`)
  4. Which replicas are to go is known: OAR and RAR without RAR (`leaving`).
  5. Those of the target are Online.
  6. and 7. If the leader is not of the target, one of the target is elected. Its state is written in a leader epoch of
     its own, with an ISR of the target alone (`finish`); after that the picture has RAR, and the target is told of both
     (`release`). From then on no leader lets any other replica join the ISR.
  8. The others are Offline and told to stop (`release`), and then to delete (`delete`, `forget`). One that cannot be
     told finds out when its broker registers again (`ControllerOrders.delete_strays`).
  9. The topic znode gets RAR alone (`record`).
 10. `/admin/reassign_partitions` loses the partition (`leave`).
 11. Every broker gets UpdateMetadata,
 12. and deletions of topics that waited for this go on (`over`).

Kafka shrinks the ISR after the leader has moved; here it is one write, since the state in between is of no use. A
reassignment that is replaced or cancelled goes on from where it is, with another target: the replicas that it has added
go at the end, like the rest, and not at once as in Kafka, since by then they may be the only ones in sync.
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
"""What partitions are to have now: on the way to their target."""


# --- What is asked for -----------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    code: ErrorCode
    message: str


def judge(state: ClusterState, partition: TopicPartition, target: Sequence[int] | None) -> ReplicaAssignment | Refusal:
    """What the partition gets if it is to have the replicas `target`; None: if it is to go back to those that it had
    before the reassignment that is under way."""
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
        return current  # a repetition: whoever has died since
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
    """What an administrator asks for."""
    return _judge_all(
        state,
        [
            (TopicPartition(topic.name, p.partition_index), None if p.replicas is None else tuple(p.replicas))
            for topic in topics
            for p in topic.partitions
        ],
    )


def judge_file(state: ClusterState, entries: Iterable[Reassignment]) -> Judged:
    """What `/admin/reassign_partitions` asks for. What is under way already, or has been done, is not wanted again."""
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
    """Those of topics whose znodes make no sense. `malformed`: what is wrong with these."""
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
    """Partitions of topics that are others, or have been changed since whoever asks has looked: the request may have
    been on its way for long, and newer ones been granted."""
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
    """One for each partition of the request, in its order."""

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
    """The reassignments that are under way, of these partitions or of all."""
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
    """Say what is wrong with entries of `/admin/reassign_partitions`."""
    builder = PlanBuilder()
    for refusal in refused.values():
        builder.note(f"an entry of /admin/reassign_partitions is dropped: {refusal.message}")
    return builder.build()


# --- Phase A ---------------------------------------------------------------------------------------------------


def record(state: ClusterState, read: Mapping[str, tuple[TopicZnode, int]], wanted: Wanted) -> Plan:
    """Steps 1 and 9: write the assignments into the topic znodes, which were `read` with their versions. Of a topic
    that is gone, or is another one by now, nothing is written."""
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
    """Partitions of topics whose znode would be more than ZooKeeper takes."""
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
    """Step 1, in the picture. `raise_epochs` comes next."""
    builder = PlanBuilder()
    for partition in in_order(wanted):
        builder.change(AssignmentChanged(partition, wanted[partition]))
        for broker_id in wanted[partition].replicas:
            replica = PartitionReplica(partition, broker_id)
            if state.replica_state(replica) is ReplicaState.NON_EXISTENT:
                builder.move_replica(replica, ReplicaState.NEW)
    return builder.build()


def raise_epochs(state: ClusterState, partitions: Iterable[TopicPartition]) -> Plan:
    """Step 2. What conflicts is to be done again; `start_new` comes next."""
    builder = PlanBuilder()
    for partition in in_order(partitions):
        current = state.leadership.get(partition)
        if current is None:
            continue  # it never had a leader: `settle` gives it its first one
        raised = msgspec.structs.replace(
            current, leader_epoch=current.leader_epoch + 1, controller_epoch=state.controller_epoch
        )
        builder.write(WriteState(partition, raised))
        builder.tell((b for b in state.live_replicas(partition) if not _is_new(state, partition, b)), partition)
    return builder.build()


def start_new(state: ClusterState, partitions: Iterable[TopicPartition]) -> Plan:
    """Step 3. The brokers of new replicas may make their logs, in whichever directory works."""
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
    """Those of the partitions that may be ready, by their ISRs: `finish` looks closer, with their topics' settings."""
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
    """Those that are ready."""


def finish(state: ClusterState, partitions: Iterable[TopicPartition], settings: Mapping[str, TopicSettings]) -> Finish:
    """Steps 5 to 7, in ZooKeeper: the leader and the ISR belong to the target alone. What conflicts is to be decided
    again; for the others `release` comes next."""
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
    """Step 4."""
    return tuple(
        PartitionReplica(partition, broker_id)
        for partition in partitions
        for broker_id in state.assignment(partition).removing
    )


def release(state: ClusterState, partitions: Iterable[TopicPartition], gone: Iterable[PartitionReplica]) -> Plan:
    """Steps 6 to 8: the picture has the target, which hears of it; the others (`leaving`) are told to stop. `delete`
    comes next."""
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
    """Step 8: their brokers delete them. `forget` comes next: the answer is not waited for, as a broker may be away for
    good."""
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
    """Step 10: these entries of `/admin/reassign_partitions` stay. `problem`: why it could not be read."""
    builder = PlanBuilder()
    builder.write(SetReassignments(tuple(entries), version))
    if problem:
        builder.note(f"the reassignments are dropped: {problem}")
    return builder.build()


def over(state: ClusterState, partitions: Collection[TopicPartition]) -> Plan:
    """Steps 11 and 12."""
    builder = PlanBuilder()
    builder.announce(state.live_brokers, (p for p in partitions if p in state.assignments))
    for topic in dict.fromkeys(partition.topic for partition in partitions):
        if topic in state.ineligible_topics and not state.is_reassigning(topic):
            builder.change(DeletionResumed(topic))
    builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()
