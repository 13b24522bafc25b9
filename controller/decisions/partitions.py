"""Partitions are added to topics (Kafka's ZkAdminManager.createPartitions and processPartitionModifications). Pure.

What is to be is written to the topic's znode first, over the version that was read, and taken into the picture and told
to brokers afterwards: a controller that dies in between has left what its successor reads when it takes office. The
same happens when a tool, or somebody by hand, writes the znode; only additions are taken over from there. A topic never
loses partitions: what is missing is put back, since the next controller would forget them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from minibroker.controller.decisions.cluster_state import ClusterState, PartitionsAdded
from minibroker.controller.decisions.placement import assign_more_replicas
from minibroker.controller.decisions.plan import Plan, PlanBuilder, SetTopic
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.controller.decisions.topics import MAX_MESSAGE_LENGTH, MAX_PARTITIONS_OF_A_TOPIC, MAX_TOPIC_BYTES
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatePartitionsAssignment, CreatePartitionsTopic, CreatePartitionsTopicResult
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.znodes import TopicZnode, encode_topic

_SHOWN = 20


class Growth(NamedTuple):
    """A topic that is to have more partitions, after every check."""

    topic: str
    znode: TopicZnode
    version: int
    """Of the znode that this goes by."""

    def result(self) -> CreatePartitionsTopicResult:
        return CreatePartitionsTopicResult(
            self.topic, ErrorCode.NONE, topic_id=self.znode.topic_id, num_partitions=len(self.znode.partitions)
        )


class _Refused(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


# --- On request ----------------------------------------------------------------------------------------------


def repeated(requests: Sequence[CreatePartitionsTopic]) -> list[CreatePartitionsTopicResult]:
    """The answers for names that a request has more than once, each name once."""
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
) -> list[Growth | CreatePartitionsTopicResult]:
    """For each request, in order, the topic as it is to be, or its result. It goes by the topics' znodes (`read`, and
    their `versions`) rather than by the picture, which may be behind; `malformed`: what is wrong with the others.

    Where an earlier attempt of the same call has succeeded, that is a success (see `CreatePartitionsTopic`).
    """
    answers: list[Growth | CreatePartitionsTopicResult] = []
    for request in requests:
        znode = read.get(request.name)
        try:
            if request.name in malformed:
                raise _Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"topic {request.name!r} gets no partitions before its znode makes sense: "
                    f"{malformed[request.name]}",
                )
            if request.name not in state.topic_ids:
                raise _Refused(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"there is no topic {request.name[:80]!r}: see the list of topics for its name",
                )
            if znode is None or znode.topic_id != state.topic_ids[request.name]:
                raise _Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"the znode of topic {request.name!r} is gone, or not as the controller knows it: see its log",
                )
            # Partitions that somebody has removed from the znode just now are there all the same: they are put back.
            there = dict(sorted((state.assignment_of(request.name) | znode.partitions).items()))
            znode = msgspec.structs.replace(znode, partitions=there)
            answers.append(_validated(request, state, znode, versions[request.name], random))
        except _Refused as refused:
            answers.append(_refusal(request.name, refused.code, refused.message, znode))
    return answers


def _refusal(topic: str, code: ErrorCode, message: str, znode: TopicZnode | None = None) -> CreatePartitionsTopicResult:
    result = CreatePartitionsTopicResult(topic, code, message[:MAX_MESSAGE_LENGTH])
    if znode is not None:
        result.topic_id, result.num_partitions = znode.topic_id, len(znode.partitions)
    return result


def _validated(
    request: CreatePartitionsTopic, state: ClusterState, znode: TopicZnode, version: int, random: Random
) -> Growth | CreatePartitionsTopicResult:
    topic, count, present = request.name, request.count, len(znode.partitions)
    if state.is_queued_for_deletion(topic):
        raise _Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {topic!r} is being deleted: it gets no partitions")
    if request.topic_id not in ("", znode.topic_id):
        raise _Refused(
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
        raise _Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {topic!r} has {counted(present, 'partition')} already, and {count} are asked for: give more; "
            "partitions cannot be taken away",
        )
    if count > MAX_PARTITIONS_OF_A_TOPIC:
        raise _Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"the number of partitions is {count}: give at most {MAX_PARTITIONS_OF_A_TOPIC}",
        )
    if znode.adding_replicas or znode.removing_replicas:
        changing = sorted({*znode.adding_replicas, *znode.removing_replicas})
        raise _Refused(
            ErrorCode.REASSIGNMENT_IN_PROGRESS,
            f"the partitions {changing[:_SHOWN]} of topic {topic!r} are being reassigned: wait for that, or cancel it",
        )
    numbers = [number for number in range(count) if number not in znode.partitions]
    factor = len(znode.partitions[min(znode.partitions)])
    if given is not None:
        more = _explicit(request.assignments or [], numbers, factor, state)
    else:
        staying = state.staying_broker_ids()
        if factor > len(staying):
            shown = ", ".join(str(broker_id) for broker_id in staying[:_SHOWN]) or "none"
            raise _Refused(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"topic {topic!r} has {counted(factor, 'replica')} of each partition, and there are only "
                f"{len(staying)} live brokers ({shown}): start more brokers, or assign the new partitions yourself",
            )
        more = assign_more_replicas(state.racks(), znode.partitions, numbers, random)
    grown = msgspec.structs.replace(znode, partitions=dict(sorted((znode.partitions | more).items())))
    size = len(encode_topic(grown))
    if size > MAX_TOPIC_BYTES:
        raise _Refused(
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
        raise _Refused(ErrorCode.INVALID_REPLICA_ASSIGNMENT, problem)
    return given


def write(growths: Iterable[Growth]) -> Plan:
    """Write the topics to ZooKeeper; `added` those that were written comes next."""
    builder = PlanBuilder()
    for topic, znode, version in growths:
        builder.write(SetTopic(topic, znode, version))
    return builder.build()


# --- What is in ZooKeeper --------------------------------------------------------------------------------------


def added(state: ClusterState, topics: Mapping[str, TopicZnode]) -> Plan:
    """Take partitions into the picture that known topics have got, as new ones. `settle` over `new_partitions` comes
    next."""
    builder = PlanBuilder()
    for topic in sorted(topics):
        more = {
            p.partition: topics[topic].partitions[p.partition] for p in new_partitions(state, {topic: topics[topic]})
        }
        if not more:
            continue
        builder.change(PartitionsAdded(topic, more))
        for number, replicas in more.items():
            partition = TopicPartition(topic, number)
            builder.move_partition(partition, PartitionState.NEW)
            for broker_id in replicas:
                builder.move_replica(PartitionReplica(partition, broker_id), ReplicaState.NEW)
    return builder.build()


def new_partitions(state: ClusterState, topics: Mapping[str, TopicZnode]) -> list[TopicPartition]:
    """Those that are not in the picture, of topics that are."""
    return [
        TopicPartition(topic, number)
        for topic, znode in topics.items()
        if topic in state.topic_ids
        for number in sorted(znode.partitions)
        if TopicPartition(topic, number) not in state.assignments
    ]


class Modification(NamedTuple):
    """What is to be done about znodes of known topics that are not as the picture has them."""

    grown: dict[str, TopicZnode]
    """Topics that somebody has given more partitions: take them in."""
    repair: Plan
    """What is put back."""


def modified(
    state: ClusterState,
    read: Mapping[str, TopicZnode],
    versions: Mapping[str, int],
    malformed: Mapping[str, str] = MappingProxyType({}),
) -> Modification:
    """Kafka ignores partitions that are missing, and replicas of known partitions that are others, until the next
    controller reads them. The former are put back here, as is all of a znode that makes no sense any more (the next
    controller could not read it, and know nothing of the topic); the latter are pointed out."""
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
