"""Deletion of topics (Kafka's TopicDeletionManager).

A znode under `/admin/delete_topics` queues a topic. The topic is gone when all brokers have deleted its replicas and
all its znodes are removed. The states of the replicas are the state of the deletion: `resume` reads them and takes the
next possible steps.

    Online -> Offline -> DeletionStarted -> DeletionSuccessful -> NonExistent
                 ^  \\              |
                 |   v             v
               DeletionIneligible (the broker is down, or could not)

A replica that becomes Offline gets StopReplica without deletion: leaders stop leading, and followers stop fetching from
a leader that is about to vanish. A second request, right after the first, deletes the log.

A topic with an ineligible replica waits until the broker is back. The topic is forgotten only after every replica is
deleted: otherwise a returning broker would bring old records into a new topic of the same name. Every live broker must
also have confirmed the deletion (Kafka does not wait for that): otherwise, if the controller died, a slow broker would
continue to show the topic to its clients, and no later controller could correct that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from minibroker.controller.decisions.cluster_state import (
    ClusterState,
    DeletionAnnounced,
    DeletionHeard,
    DeletionIneligible,
    DeletionQueued,
    TopicRemoved,
    in_order,
)
from minibroker.controller.decisions.events import ResumeDeletions
from minibroker.controller.decisions.plan import DeletedTopic, EnsureNode, Plan, PlanBuilder, RemoveNode
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.controller.decisions.topics import MAX_MESSAGE_LENGTH
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import DeletableTopicResult
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.znodes import DELETE_TOPICS, delete_topic_path, topic_config_path

IS_REASSIGNED = "its partitions are being reassigned"


def disabled(topics: Iterable[str]) -> list[DeletableTopicResult]:
    """Return the results if `delete.topic.enable` is false."""
    return [
        DeletableTopicResult(
            topic,
            "",
            ErrorCode.TOPIC_DELETION_DISABLED,
            f"topic {topic[:80]!r} is not deleted: delete.topic.enable is false on the controller's broker",
        )
        for topic in topics
    ]


def results(
    state: ClusterState, topics: Mapping[str, str], malformed: Mapping[str, str] = MappingProxyType({})
) -> list[DeletableTopicResult]:
    """Return the results of a DeleteTopics request. `topics`: see `request`. `malformed` has the problems of znodes
    that cannot be decoded: where the replicas of these topics are is unknown."""
    return [_result(state, topic, topic_id, malformed.get(topic)) for topic, topic_id in topics.items()]


def _result(state: ClusterState, topic: str, topic_id: str, problem: str | None) -> DeletableTopicResult:
    if problem is not None:
        return DeletableTopicResult(
            topic,
            "",
            ErrorCode.INVALID_REQUEST,
            f"topic {topic[:80]!r} cannot be deleted before its znode makes sense: {problem}"[:MAX_MESSAGE_LENGTH],
        )
    if topic not in state.topic_ids:
        return DeletableTopicResult(
            topic,
            "",
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"there is no topic {topic[:80]!r}, so it cannot be deleted: `minibroker topics list` has the names",
        )
    known = state.topic_ids[topic]
    if is_meant(state, topic, topic_id):
        return DeletableTopicResult(topic, known, ErrorCode.NONE)
    return DeletableTopicResult(
        topic,
        known,
        ErrorCode.UNKNOWN_TOPIC_ID,
        f"topic {topic!r} has the id {known}, not {topic_id}: it is another topic, and is not deleted",
    )


def is_meant(state: ClusterState, topic: str, topic_id: str) -> bool:
    """Return whether the topic with the name is the one to delete: a request may be late, or a repetition."""
    return topic in state.topic_ids and topic_id in ("", state.topic_ids[topic])


def request(state: ClusterState, topics: Mapping[str, str]) -> Plan:
    """Mark the existing topics as to be deleted in ZooKeeper, and queue them.

    `topics` maps names to ids; an empty id is not checked. Something is written even if nothing changes, since that
    fails if this controller has been deposed. A deposed controller must not report a deletion or an id, because there
    may be another topic of that name by now.
    """
    builder = PlanBuilder()
    for topic, topic_id in topics.items():
        if is_meant(state, topic, topic_id):
            builder.write(EnsureNode(delete_topic_path(topic)))
            if topic not in state.topics_to_delete:
                _queue(builder, state, topic)
    if any(topic in state.topic_ids and not is_meant(state, topic, topic_id) for topic, topic_id in topics.items()):
        builder.write(EnsureNode(DELETE_TOPICS))
    builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()


def confirm_office() -> Plan:
    """A write that changes nothing. It fails if this controller has been deposed, and later reads are at least as new
    as the write."""
    return Plan(writes=(EnsureNode(DELETE_TOPICS),))


def queue(state: ClusterState, topics: Iterable[str], leave_alone: Iterable[str] = ()) -> Plan:
    """Queue those of the topics under `/admin/delete_topics` that exist, and drop the requests for others.

    `leave_alone` are topics whose znode cannot be decoded: their request stays until they are repaired.
    """
    builder = PlanBuilder()
    spared = frozenset(leave_alone)
    queued = False
    for topic in topics:
        if topic in state.topic_ids:
            if topic not in state.topics_to_delete:
                _queue(builder, state, topic)
                queued = True
        elif topic not in spared:
            builder.write(RemoveNode(delete_topic_path(topic)))
            builder.note(f"topic {topic} does not exist: the request to delete it is dropped")
    if queued:
        builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()


def dropped(topics: Iterable[str]) -> Plan:
    """Remove the requests because `delete.topic.enable` is false, as Kafka does."""
    builder = PlanBuilder()
    for topic in topics:
        builder.write(RemoveNode(delete_topic_path(topic)))
        builder.note(f"topic {topic} is not deleted, and the request is dropped: delete.topic.enable is false")
    return builder.build()


def waiting(state: ClusterState, topics: Mapping[str, str]) -> dict[str, str]:
    """Return those of the topics (ids by name) that still exist, each with its obstacle as a sentence. Empty: it waits
    for responses of brokers or the end of a reassignment, which usually come soon."""
    return {
        topic: "" if state.is_reassigning(topic) else state.ineligible_topics.get(topic, "")
        for topic, topic_id in topics.items()
        if state.topic_ids.get(topic) == topic_id
    }


def unanswered(state: ClusterState, topic: str) -> str:
    """Return, as a sentence, for what a deletion without an obstacle waits."""
    if state.is_reassigning(topic):
        return IS_REASSIGNED
    deleting = (
        r.broker_id for r in state.replicas_of(topic) if state.replica_state(r) is ReplicaState.DELETION_STARTED
    )
    brokers = ", ".join(str(broker_id) for broker_id in sorted({*deleting, *state.unaware_brokers.get(topic, ())}))
    return f"broker {brokers} has not answered yet" if brokers else "it is about to be removed from ZooKeeper"


def _queue(builder: PlanBuilder, state: ClusterState, topic: str) -> None:
    builder.change(DeletionQueued(topic))
    if state.is_reassigning(topic):
        builder.change(DeletionIneligible(topic, IS_REASSIGNED))


def resume(state: ClusterState) -> Plan:
    """Begin, or begin again, every deletion that is not under way, waiting or finished."""
    builder = PlanBuilder()
    beginning = [topic for topic in state.topics_to_delete if _can_begin(state, topic)]
    for topic in beginning:
        for partition in state.partitions_of(topic):
            if state.partition_state(partition) is not PartitionState.NON_EXISTENT:
                builder.move_partition(partition, PartitionState.OFFLINE, PartitionState.NON_EXISTENT)
    if beginning:
        # First, clients must see that the topic is gone, and its leaders must reject further requests.
        deleted = [DeletedTopic(topic, state.topic_ids[topic]) for topic in beginning]
        builder.announce(state.live_brokers, (), deleted)
    for topic in beginning:
        builder.change(DeletionAnnounced(topic, state.live_broker_ids()))
        _begin(builder, state, topic)
    return builder.build()


def _can_begin(state: ClusterState, topic: str) -> bool:
    states = state.replica_states_of(topic)
    under_way = ReplicaState.DELETION_STARTED in states
    return is_eligible(state, topic) and not under_way and not _is_finished(state, topic)


def is_eligible(state: ClusterState, topic: str) -> bool:
    """Return whether the deletion has no obstacle (Kafka's isTopicEligibleForDeletion). The end of an obstacle raises
    ResumeDeletions."""
    return topic not in state.ineligible_topics and not state.is_reassigning(topic)


def _begin(builder: PlanBuilder, state: ClusterState, topic: str) -> None:
    out_of_reach: dict[int, None] = {}
    for replica in state.replicas_of(topic):
        current = state.replica_state(replica)
        if current is ReplicaState.DELETION_SUCCESSFUL:
            continue
        if state.is_live(*replica):
            if current is not ReplicaState.OFFLINE:
                builder.move_replica(replica, ReplicaState.OFFLINE)
                builder.stop(replica, delete=False)
            builder.move_replica(replica, ReplicaState.DELETION_STARTED)
            builder.stop(replica, delete=True)
            continue
        out_of_reach[replica.broker_id] = None
        if current in (ReplicaState.NEW, ReplicaState.ONLINE):
            builder.move_replica(replica, ReplicaState.OFFLINE)
        if current is not ReplicaState.DELETION_INELIGIBLE:
            builder.move_replica(replica, ReplicaState.DELETION_INELIGIBLE)
    if out_of_reach:
        brokers = ", ".join(str(broker_id) for broker_id in sorted(out_of_reach))
        builder.change(DeletionIneligible(topic, f"its replicas on broker {brokers} cannot be reached"))


def replicas_answered(state: ClusterState, broker_id: int, errors: Mapping[TopicPartition, ErrorCode]) -> Plan:
    """Handle a broker's response to a StopReplica that deletes. Replicas that do not wait for one are left alone."""
    builder = PlanBuilder()
    for partition in in_order(errors):
        replica = PartitionReplica(partition, broker_id)
        if state.replica_state(replica) is not ReplicaState.DELETION_STARTED:
            continue
        error = errors[partition]
        if error is ErrorCode.NONE:
            builder.move_replica(replica, ReplicaState.DELETION_SUCCESSFUL)
        else:
            builder.move_replica(replica, ReplicaState.DELETION_INELIGIBLE)
            reason = (
                f"broker {broker_id} could not delete {partition} ({error.name}): that is tried again when it "
                "restarts, or asks for it"
            )
            builder.change(DeletionIneligible(partition.topic, reason))
    builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()


def heard(state: ClusterState, broker_id: int, topics: Iterable[str]) -> Plan:
    """Handle a broker's response to an UpdateMetadata that reports the topics as deleted."""
    builder = PlanBuilder()
    for topic in topics:
        if broker_id in state.unaware_brokers.get(topic, ()):
            builder.change(DeletionHeard(topic, broker_id))
    builder.follow_up(ResumeDeletions(state.controller_epoch))
    return builder.build()


def finished(state: ClusterState) -> tuple[str, ...]:
    """Return the topics without replicas, which no broker shows to clients any more. Next comes `forget`."""
    return tuple(
        topic for topic in state.topics_to_delete if _is_finished(state, topic) and not state.unaware_brokers.get(topic)
    )


def _is_finished(state: ClusterState, topic: str) -> bool:
    return state.replica_states_of(topic) <= {ReplicaState.DELETION_SUCCESSFUL}


def forget(state: ClusterState, topic: str, nodes: Sequence[str]) -> Plan:
    """Remove a finished topic from ZooKeeper and the cluster state.

    `nodes` is the tree at `/brokers/topics/T`, children before parents. The request under `/admin/delete_topics` is
    removed last, so that after a failure the next controller finds it and continues.
    """
    builder = PlanBuilder()
    builder.write(RemoveNode(topic_config_path(topic)))
    for path in nodes:
        builder.write(RemoveNode(path))
    builder.write(RemoveNode(delete_topic_path(topic)))
    for replica in state.replicas_of(topic):
        builder.move_replica(replica, ReplicaState.NON_EXISTENT)
    builder.change(TopicRemoved(topic))
    return builder.build()
