"""Creation, appearance and disappearance of topics (Kafka's AdminZkClient and onNewPartitionCreation)."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from minibroker.controller.decisions.cluster_state import ClusterState, TopicAdded, TopicRemoved
from minibroker.controller.decisions.placement import assign_replicas
from minibroker.controller.decisions.plan import CreateTopic, DeletedTopic, EnsureNode, Plan, PlanBuilder, RemoveNode
from minibroker.controller.decisions.states.partition import PartitionState
from minibroker.controller.decisions.states.replica import PartitionReplica, ReplicaState
from minibroker.protocol import topic_ids
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatableAssignment, CreatableTopic, CreatableTopicResult
from minibroker.protocol.model import DURABILITY, INTERNAL_TOPICS, REPLICATED, TopicPartition, topic_name_problem
from minibroker.protocol.znodes import TopicZnode, delete_topic_path, encode_config, encode_topic

MAX_PARTITIONS_OF_A_TOPIC = 10_000
MAX_TOPIC_BYTES = 900_000
"""The limit for the znodes of a topic together: they are created at once, and ZooKeeper accepts less than 1 MB."""

MAX_NEW_PARTITIONS = 10_000
"""The limit for the partitions that one request adds to all its topics (Kafka's MAX_PARTITIONS_PER_BATCH)."""

MAX_MESSAGE_LENGTH = 1_000


DEFAULT = -1
"""In a request: the broker's default."""

ConfigCheck = Callable[[Mapping[str, str]], str | None]
"""Takes the settings of a topic by name, and returns their problem as a sentence, or None."""


class TopicDefaults(NamedTuple):
    num_partitions: int
    replication_factor: int
    durability: str = REPLICATED


class NewTopic(NamedTuple):
    """A topic that passed every check."""

    topic: str
    znode: TopicZnode
    config: Mapping[str, str]

    def result(self, *, created: bool) -> CreatableTopicResult:
        return CreatableTopicResult(
            self.topic,
            self.znode.topic_id if created else "",
            ErrorCode.NONE,
            num_partitions=len(self.znode.partitions),
            replication_factor=len(self.znode.partitions[0]),
        )


class Refused(Exception):
    """A request for a topic that is not granted."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class PartitionRoom:
    """The partitions that a request may still add: a few bytes can ask for millions."""

    def __init__(self, state: ClusterState, max_broker_partitions: int | None) -> None:
        self._in_request = MAX_NEW_PARTITIONS
        self._most = max_broker_partitions
        self._replicas: float = math.inf
        if max_broker_partitions is not None:
            brokers = state.staying_broker_ids()
            self._replicas = sum(max_broker_partitions - state.replica_count(broker_id) for broker_id in brokers)

    def take(self, topic: str, partitions: int, replicas: int) -> None:
        """Raises Refused, but not for the brokers' own topics, without which groups and transactions stand still."""
        if topic not in INTERNAL_TOPICS:
            if partitions > self._in_request:
                raise Refused(
                    ErrorCode.POLICY_VIOLATION,
                    f"topic {topic!r} would get {partitions} new partitions, but one request adds at most "
                    f"{MAX_NEW_PARTITIONS} to all its topics, and {self._in_request} are left: use several requests",
                )
            if partitions * replicas > self._replicas:
                raise Refused(
                    ErrorCode.POLICY_VIOLATION,
                    f"topic {topic!r} would get {partitions * replicas} new replicas, but the live brokers have room "
                    f"for {max(self._replicas, 0):.0f} with max.broker.partitions={self._most}: raise that on all "
                    "brokers, add brokers, or delete topics",
                )
        self._in_request -= partitions
        self._replicas -= partitions * replicas


# --- Creation ------------------------------------------------------------------------------------------------


def validate(
    requests: Sequence[CreatableTopic],
    state: ClusterState,
    existing: Mapping[str, str],
    defaults: TopicDefaults,
    check_config: ConfigCheck,
    random: Random,
    numbers: Iterator[int],
    spent: Container[bytes] = (),
    max_broker_partitions: int | None = None,
) -> Iterator[NewTopic | CreatableTopicResult]:
    """Yield, for each request in order, the topic to create, or the result with the reason why it is not created.

    If an earlier attempt of the same request has created the topic and its response was lost, that is a success. If
    that topic was deleted since, it is not created again: the request may be late, and another attempt answered.

    `existing` are topics in ZooKeeper, known or not, each with the problem of its znode or an empty string. `numbers`
    are for the ids of new topics (see `topic_ids`). `spent` are the nonces of the topics that this process has created.
    """
    times: dict[str, int] = {}
    for request in requests:
        times[request.name] = times.get(request.name, 0) + 1
    taken = {_collision_key(topic): topic for topic in state.topic_ids}
    room = PartitionRoom(state, max_broker_partitions)
    for request in requests:
        try:
            if times[request.name] > 1:
                raise Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"topic {request.name!r} is named {times[request.name]} times in one request: name it once",
                )
            if is_created_by(state, request):
                yield _created_already(state, request.name)
                continue
            if request.nonce in spent:
                raise Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"topic {request.name!r} was created by an earlier attempt of this request, and deleted since: "
                    "send another request to create it again",
                )
            _check_name(request.name, state, existing, taken)
            topic_id = topic_ids.make(state.controller_epoch, next(numbers), _nonce(request, random))
            assignment = _assignment(request, state, defaults, random, room)
            config = _config(request, check_config, defaults.durability)
            new_topic = NewTopic(request.name, TopicZnode(topic_id, assignment), config)
            _check_size(new_topic)
        except Refused as refused:
            yield refusal(request.name, refused.code, refused.message)
        else:
            taken[_collision_key(request.name)] = request.name
            yield new_topic


def refusal(topic: str, code: ErrorCode, message: str) -> CreatableTopicResult:
    # An illegal name, which the message quotes, may be very long.
    return CreatableTopicResult(topic, "", code, message[:MAX_MESSAGE_LENGTH])


def already_exists(topic: str) -> CreatableTopicResult:
    return refusal(
        topic, ErrorCode.TOPIC_ALREADY_EXISTS, f"there is a topic {topic!r} already: choose another name, or delete it"
    )


def is_created_by(state: ClusterState, request: CreatableTopic) -> bool:
    """Return whether the topic exists and an earlier attempt of this request has created it."""
    topic_id = state.topic_ids.get(request.name)
    return (
        topic_id is not None
        and request.name not in state.topics_to_delete
        and request.nonce != b""
        and request.nonce == topic_ids.nonce(topic_id)
    )


def _created_already(state: ClusterState, topic: str) -> CreatableTopicResult:
    partitions = state.partitions_of(topic)
    return CreatableTopicResult(
        topic,
        state.topic_ids[topic],
        ErrorCode.NONE,
        num_partitions=len(partitions),
        replication_factor=len(state.assignments[partitions[0]]),
    )


def _nonce(request: CreatableTopic, random: Random) -> bytes:
    if request.nonce and len(request.nonce) != topic_ids.NONCE_BYTES:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"topic {request.name!r} has a nonce of {len(request.nonce)} bytes: give {topic_ids.NONCE_BYTES}, or none",
        )
    return request.nonce or random.randbytes(topic_ids.NONCE_BYTES)


def _collision_key(topic: str) -> str:
    """Return a key that is equal for names that Kafka's metrics cannot distinguish (`Topic.hasCollision`)."""
    return topic.replace(".", "_")


def _check_name(topic: str, state: ClusterState, existing: Mapping[str, str], taken: Mapping[str, str]) -> None:
    problem = topic_name_problem(topic)
    if problem is not None:
        raise Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
    if state.is_queued_for_deletion(topic):
        raise Refused(
            ErrorCode.TOPIC_ALREADY_EXISTS,
            f"topic {topic!r} is still being deleted: try again in a moment"
            + (f" (it waits: {state.ineligible_topics[topic]})" if topic in state.ineligible_topics else ""),
        )
    if existing.get(topic):
        raise Refused(
            ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {topic!r} is there, and cannot be read: {existing[topic]}"
        )
    if topic in state.topic_ids or topic in existing:
        raise Refused(ErrorCode.TOPIC_ALREADY_EXISTS, already_exists(topic).error_message)
    other = taken.get(_collision_key(topic))
    if other is not None:
        raise Refused(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"topic {topic!r} collides with topic {other!r}: names must differ in more than '.' and '_', since "
            "metrics write both alike; choose another name",
        )


def _assignment(
    request: CreatableTopic, state: ClusterState, defaults: TopicDefaults, random: Random, room: PartitionRoom
) -> dict[int, tuple[int, ...]]:
    if request.assignments:
        if request.num_partitions != DEFAULT or request.replication_factor != DEFAULT:
            raise Refused(
                ErrorCode.INVALID_REQUEST,
                f"topic {request.name!r} has an assignment, and also num_partitions {request.num_partitions} and "
                f"replication_factor {request.replication_factor}: with an assignment both must be {DEFAULT}",
            )
        assignment = _explicit_assignment(request.assignments, state)
        room.take(request.name, len(assignment), len(assignment[0]))
        return assignment
    partitions = defaults.num_partitions if request.num_partitions == DEFAULT else request.num_partitions
    _check_partition_count(partitions)
    factor = defaults.replication_factor if request.replication_factor == DEFAULT else request.replication_factor
    live = state.staying_broker_ids()
    if not 1 <= factor <= len(live):
        shown = ", ".join(str(broker_id) for broker_id in live[:20]) or "none"
        default = ", the default" if request.replication_factor == DEFAULT else ""
        raise Refused(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"the replication factor is {factor}{default}: it must be 1 to {len(live)}, the number of live brokers "
            f"({shown}); choose another, or start more brokers",
        )
    room.take(request.name, partitions, factor)
    return assign_replicas(state.racks(), partitions, factor, random)


def _check_partition_count(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS_OF_A_TOPIC:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"the number of partitions is {partitions}: give 1 to {MAX_PARTITIONS_OF_A_TOPIC}",
        )


def _explicit_assignment(assignments: Sequence[CreatableAssignment], state: ClusterState) -> dict[int, tuple[int, ...]]:
    _check_partition_count(len(assignments))
    given = {a.partition_index: tuple(a.broker_ids) for a in assignments}
    if sorted(given) != list(range(len(assignments))):
        shown = ", ".join(str(a.partition_index) for a in assignments[:20])
        raise Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"the assignment names the partitions {shown}: name each from 0 to {len(assignments) - 1} once",
        )
    factor = len(given[0])
    for partition, replicas in sorted(given.items()):
        brokers = list(replicas[:20])
        if not replicas or len(replicas) != factor:
            raise Refused(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"partition {partition} is assigned to {brokers} and partition 0 to {list(given[0][:20])}: assign "
                "every partition to the same number of brokers, at least one",
            )
        if len(set(replicas)) != len(replicas):
            raise Refused(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"partition {partition} is assigned to {brokers}: a broker holds at most one replica of a partition",
            )
        staying = state.staying_broker_ids()
        dead = [b for b in replicas if b not in staying]
        if dead:
            raise Refused(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"partition {partition} is assigned to {brokers}, but broker {dead[0]} is not alive, or is "
                f"shutting down: choose live brokers out of {list(staying[:20])}, or start it",
            )
    return dict(sorted(given.items()))


def _config(request: CreatableTopic, check_config: ConfigCheck, durability: str) -> dict[str, str]:
    config: dict[str, str] = {}
    for entry in request.configs:
        if entry.value is None:
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"the setting {entry.name!r} has no value: give one, or leave the setting out to get the default",
            )
        if entry.name in config:
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"the setting {entry.name!r} is given as {config[entry.name]!r} and as {entry.value!r}: give it once",
            )
        config[entry.name] = entry.value
    problem = check_config(config)
    if problem is not None:
        raise Refused(ErrorCode.INVALID_CONFIG, problem)
    if durability != REPLICATED:
        config.setdefault(DURABILITY, durability)  # written, so that all brokers use the same durability permanently
    return config


def _check_size(topic: NewTopic) -> None:
    size = len(encode_topic(topic.znode)) + len(encode_config(topic.config))
    if size > MAX_TOPIC_BYTES:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"the assignment and the settings of topic {topic.topic!r} take {size} bytes in ZooKeeper: the limit is "
            f"{MAX_TOPIC_BYTES}; use fewer partitions or replicas, or shorter settings",
        )


def create(topics: Iterable[NewTopic], leftover_configs: Container[str] = ()) -> Plan:
    """Write the topics to ZooKeeper. Next comes `added` for those that were written.

    `leftover_configs` are topics that do not exist while their configuration does.
    """
    return Plan(
        writes=tuple(CreateTopic(t.topic, t.znode, t.config, t.topic in leftover_configs) for t in topics),
    )


def missing(state: ClusterState, wanted: Iterable[CreatableTopic]) -> list[CreatableTopic]:
    """Return the wanted topics that do not exist and for whose replicas there are enough brokers."""
    live = len(state.staying_broker_ids())
    return [
        topic
        for topic in wanted
        if topic.name not in state.topic_ids
        and not state.is_queued_for_deletion(topic.name)
        and topic.replication_factor <= live
    ]


# --- Changes found in ZooKeeper --------------------------------------------------------------------------------


def added(state: ClusterState, topics: Mapping[str, TopicZnode]) -> Plan:
    """Add topics to the cluster state, with new partitions and replicas. Next comes `settle` for them."""
    builder = PlanBuilder()
    for topic in sorted(topics):
        if topic not in state.topic_ids:
            builder.change(TopicAdded(topic, topics[topic]))
            begin_partitions(builder, topic, topics[topic].partitions)
    return builder.build()


def begin_partitions(builder: PlanBuilder, topic: str, partitions: Mapping[int, tuple[int, ...]]) -> None:
    """Move the partitions and their replicas to New."""
    for number, replicas in partitions.items():
        partition = TopicPartition(topic, number)
        builder.move_partition(partition, PartitionState.NEW)
        for broker_id in replicas:
            builder.move_replica(PartitionReplica(partition, broker_id), ReplicaState.NEW)


def identified(paths: Iterable[str]) -> Plan:
    """Create the nodes for topics' ids, which are missing for topics created by hand or by tools. Without them, leaders
    cannot change ISRs."""
    return Plan(writes=tuple(EnsureNode(path) for path in paths))


def vanished(state: ClusterState, topics: Iterable[str]) -> Plan:
    """Forget topics whose znode was removed by hand, and inform the brokers. The logs stay."""
    builder = PlanBuilder()
    for topic in topics:
        builder.change(TopicRemoved(topic))
        builder.note(
            f"the znode of topic {topic} is gone, though its deletion was not requested: it is forgotten, and its logs "
            f"{' '.join(map(str, state.partitions_of(topic)))} stay on the brokers' disks"
        )
        if topic in state.topics_to_delete:
            builder.write(RemoveNode(delete_topic_path(topic)))
        builder.announce(state.live_brokers, (), [DeletedTopic(topic, state.topic_ids[topic])])
    return builder.build()
