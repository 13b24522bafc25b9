"""Addition of partitions to topics (Kafka's ZkAdminManager.createPartitions and processPartitionModifications). Pure.

The new assignment is first written to the topic's znode, over the version that was read; then it is added to the
cluster state and sent to the brokers. If the controller dies in between, its successor reads the znode when it takes
office. Changes of the znode by hand or by tools follow the same path, but only additions are accepted. A topic never
loses partitions: missing ones are written back, since the next controller would forget them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from minibroker.controller.decisions.cluster_state import ClusterState, PartitionsAdded
from minibroker.controller.decisions.placement import assign_more_replicas
from minibroker.controller.decisions.plan import Plan, PlanBuilder, SetTopic
from minibroker.controller.decisions.topics import (
    MAX_MESSAGE_LENGTH,
    MAX_PARTITIONS_OF_A_TOPIC,
    MAX_TOPIC_BYTES,
    PartitionRoom,
    Refused,
    begin_partitions,
)
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatePartitionsAssignment, CreatePartitionsTopic, CreatePartitionsTopicResult
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.znodes import TopicZnode, encode_topic

_SHOWN = 20


class Growth(NamedTuple):
    """A topic with more partitions, which passed every check."""

    topic: str
    znode: TopicZnode
    version: int
    """The version of the znode that was read."""

    def result(self) -> CreatePartitionsTopicResult:
        return CreatePartitionsTopicResult(
            self.topic, ErrorCode.NONE, topic_id=self.znode.topic_id, num_partitions=len(self.znode.partitions)
        )


# --- On request ----------------------------------------------------------------------------------------------


def repeated(requests: Sequence[CreatePartitionsTopic]) -> list[CreatePartitionsTopicResult]:
    """Return one result for each name that a request has more than once."""
    times = Counter(request.name for request in requests)
    return [
        _refusal(name, ErrorCode.INVALID_REQUEST, f"topic {name!r} is named {count} times in one request: name it once")
        for name, count in times.items()
        if count > 1
    ]


def validate(
    requests: Iterable[CreatePartitionsTopic],
    state: ClusterState,
    read: Mapping[str, TopicZnode],
    versions: Mapping[str, int],
    random: Random,
    malformed: Mapping[str, str] = MappingProxyType({}),
    max_broker_partitions: int | None = None,
) -> Iterator[Growth | CreatePartitionsTopicResult]:
    """Yield, for each request in order, the grown topic or a result. The topics' znodes (`read`, with their
    `versions`) decide, since the cluster state may be behind; `malformed` has the problems of the other znodes.

    If an earlier attempt of the same call has succeeded, that is a success (see `CreatePartitionsTopic`).
    """
    room = PartitionRoom(state, max_broker_partitions)
    for request in requests:
        znode = read.get(request.name)
        try:
            if request.name in malformed:
                raise Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"topic {request.name!r} gets no partitions before its znode makes sense: "
                    f"{malformed[request.name]}",
                )
            if request.name not in state.topic_ids:
                raise Refused(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"there is no topic {request.name[:80]!r}: `minibroker topics list` has the names",
                )
            if znode is None or znode.topic_id != state.topic_ids[request.name]:
                raise Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"the znode of topic {request.name!r} is gone, or not as the controller knows it: see its log",
                )
            # Partitions that were just removed from the znode by hand still exist: they are written back.
            there = dict(sorted((state.assignment_of(request.name) | znode.partitions).items()))
            znode = msgspec.structs.replace(znode, partitions=there)
            answer = _validated(request, state, znode, versions[request.name], random, room)
        except Refused as refused:
            answer = _refusal(request.name, refused.code, refused.message, znode)
        yield answer


def _refusal(topic: str, code: ErrorCode, message: str, znode: TopicZnode | None = None) -> CreatePartitionsTopicResult:
    result = CreatePartitionsTopicResult(topic, code, message[:MAX_MESSAGE_LENGTH])
    if znode is not None:
        result.topic_id, result.num_partitions = znode.topic_id, len(znode.partitions)
    return result


def _validated(
    request: CreatePartitionsTopic,
    state: ClusterState,
    znode: TopicZnode,
    version: int,
    random: Random,
    room: PartitionRoom,
) -> Growth | CreatePartitionsTopicResult:
    topic, count, present = request.name, request.count, len(znode.partitions)
    if state.is_queued_for_deletion(topic):
        raise Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {topic!r} is being deleted: it gets no partitions")
    if request.topic_id not in ("", znode.topic_id):
        raise Refused(
            ErrorCode.UNKNOWN_TOPIC_ID,
            f"topic {topic!r} has the id {znode.topic_id}, not {request.topic_id}: it is another topic, and stays as "
            "it is",
        )
    given = None if request.assignments is None else [tuple(a.broker_ids) for a in request.assignments]
    if count == present and 0 <= request.known_count < present:
        newest = [replicas for number, replicas in znode.partitions.items() if number >= request.known_count]
        if given is None or given == newest:
            return Growth(topic, znode, version).result()
    if count <= present:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {topic!r} has {counted(present, 'partition')} already, and {count} are asked for: give more; "
            "partitions cannot be taken away",
        )
    if count > MAX_PARTITIONS_OF_A_TOPIC:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"the number of partitions is {count}: give at most {MAX_PARTITIONS_OF_A_TOPIC}",
        )
    if znode.adding_replicas or znode.removing_replicas:
        changing = sorted({*znode.adding_replicas, *znode.removing_replicas})
        raise Refused(
            ErrorCode.REASSIGNMENT_IN_PROGRESS,
            f"the partitions {changing[:_SHOWN]} of topic {topic!r} are being reassigned: wait for that, or cancel it",
        )
    numbers = [number for number in range(count) if number not in znode.partitions]
    factor = len(znode.partitions[min(znode.partitions)])
    room.take(topic, len(numbers), factor)
    if given is not None:
        more = _explicit(request.assignments or [], numbers, factor, state)
    else:
        staying = state.staying_broker_ids()
        if factor > len(staying):
            shown = ", ".join(str(broker_id) for broker_id in staying[:_SHOWN]) or "none"
            raise Refused(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"topic {topic!r} has {counted(factor, 'replica')} of each partition, and there are only "
                f"{len(staying)} live brokers ({shown}): start more brokers, or assign the new partitions yourself",
            )
        more = assign_more_replicas(state.racks(), znode.partitions, numbers, random)
    grown = msgspec.structs.replace(znode, partitions=dict(sorted((znode.partitions | more).items())))
    size = len(encode_topic(grown))
    if size > MAX_TOPIC_BYTES:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"the assignment of topic {topic!r} would take {size} bytes in ZooKeeper: the limit is {MAX_TOPIC_BYTES}",
        )
    return Growth(topic, grown, version)


def _explicit(
    assignments: Sequence[CreatePartitionsAssignment], numbers: Sequence[int], factor: int, state: ClusterState
) -> dict[int, tuple[int, ...]]:
    problem = None
    if len(assignments) != len(numbers):
        problem = (
            f"{counted(len(numbers), 'partition')} to be added, and {len(assignments)} assigned: assign each of them"
        )
    given = {number: tuple(a.broker_ids) for number, a in zip(numbers, assignments, strict=False)}
    for number, replicas in given.items():
        where = f"partition {number} is assigned to {list(replicas[:_SHOWN])}"
        staying = state.staying_broker_ids()
        unknown = [broker_id for broker_id in replicas if broker_id not in staying]
        if problem is not None:
            break
        if len(replicas) != factor:
            problem = f"{where}: give it {factor} replicas, as partition 0 has"
        elif len(set(replicas)) != len(replicas):
            problem = f"{where}: a broker holds at most one replica of a partition"
        elif unknown:
            problem = (
                f"{where}, but broker {unknown[0]} is not alive, or is shutting down: choose live brokers out of "
                f"{list(staying[:_SHOWN])}, or start it"
            )
    if problem is not None:
        raise Refused(ErrorCode.INVALID_REPLICA_ASSIGNMENT, problem)
    return given


def write(growths: Iterable[Growth]) -> Plan:
    """Write the topics to ZooKeeper. Next comes `added` for those that were written."""
    return Plan(writes=tuple(SetTopic(topic, znode, version) for topic, znode, version in growths))


# --- Changes found in ZooKeeper --------------------------------------------------------------------------------


def added(state: ClusterState, topics: Mapping[str, TopicZnode]) -> Plan:
    """Add the new partitions of known topics to the cluster state. Next comes `settle` for `new_partitions`."""
    builder = PlanBuilder()
    for topic in sorted(topics):
        more = {
            p.partition: topics[topic].partitions[p.partition] for p in new_partitions(state, {topic: topics[topic]})
        }
        if more:
            builder.change(PartitionsAdded(topic, more))
            begin_partitions(builder, topic, more)
    return builder.build()


def new_partitions(state: ClusterState, topics: Mapping[str, TopicZnode]) -> list[TopicPartition]:
    """Return the partitions of known topics that are not in the cluster state."""
    return [
        TopicPartition(topic, number)
        for topic, znode in topics.items()
        if topic in state.topic_ids
        for number in sorted(znode.partitions)
        if TopicPartition(topic, number) not in state.assignments
    ]


class Modification(NamedTuple):
    """The reaction to znodes of known topics that differ from the cluster state."""

    grown: dict[str, TopicZnode]
    """Topics with more partitions, to be added."""
    repair: Plan
    """Writes and notes for everything else."""


def modified(
    state: ClusterState,
    read: Mapping[str, TopicZnode],
    versions: Mapping[str, int],
    malformed: Mapping[str, str] = MappingProxyType({}),
) -> Modification:
    """Compare the znodes with the cluster state. Kafka ignores missing partitions and changed replicas until the next
    controller reads them. Here, missing partitions are written back, and so is a znode that can no longer be decoded
    (the next controller would not know the topic). Changed replicas are noted."""
    builder = PlanBuilder()
    for topic in sorted(malformed):
        if topic in state.topic_ids:
            builder.note(f"the znode of topic {topic} is put back as it was: {malformed[topic]}")
            builder.write(SetTopic(topic, state.topic_znode(topic), versions[topic]))
    grown: dict[str, TopicZnode] = {}
    for topic in sorted(read):
        znode, known = read[topic], state.assignment_of(topic)
        if topic not in state.topic_ids or (znode.topic_id, znode.partitions) == (state.topic_ids[topic], known):
            continue
        if znode.topic_id != state.topic_ids[topic]:
            builder.note(
                f"the znode of topic {topic} has the topic_id {znode.topic_id!r} now, and the topic is "
                f"{state.topic_ids[topic]}: it is ignored; put the id back"
            )
            continue
        missing = [number for number in known if number not in znode.partitions]
        more = [number for number in znode.partitions if number not in known]
        moved = [number for number, replicas in known.items() if znode.partitions.get(number, replicas) != replicas]
        if moved:
            builder.note(
                f"the znode of topic {topic} has other replicas for the partitions {moved[:_SHOWN]} than those that "
                f"they have ({[list(known[number]) for number in moved[:_SHOWN]]}): that is ignored; put "
                "them back"
            )
        if more and topic in state.topics_to_delete:
            builder.note(f"topic {topic} is being deleted: it does not get the partitions {more[:_SHOWN]}")
        elif more:
            grown[topic] = znode
        if missing:
            builder.note(
                f"the partitions {missing[:_SHOWN]} are missing in the znode of topic {topic}: they are put back, as a "
                "topic cannot lose partitions"
            )
        if missing or (more and topic in state.topics_to_delete):
            kept = {n: replicas for n, replicas in znode.partitions.items() if topic in grown or n in known}
            whole = dict(sorted((kept | {number: known[number] for number in missing}).items()))
            builder.write(SetTopic(topic, msgspec.structs.replace(znode, partitions=whole), versions[topic]))
    return Modification(grown, builder.build())
