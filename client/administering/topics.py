"""Creating, enlarging, deleting and describing topics: CreateTopics, CreatePartitions and DeleteTopics at the
controller, Metadata at any broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import InvalidSetting, TopicErrors, no_such_partition, topic_error
from minibroker.client.settings import about, check_integer, check_names, check_text, check_topic_name
from minibroker.protocol import messages as m
from minibroker.protocol.apis import CREATE_PARTITIONS, CREATE_TOPICS, DELETE_TOPICS
from minibroker.protocol.errors import ErrorCode, MinibrokerError, error_of
from minibroker.protocol.model import NO_LEADER, TopicPartition
from minibroker.protocol.topic_ids import NO_TOPIC, NONCE_BYTES

MAX_PARTITIONS = 10_000
MAX_REPLICATION_FACTOR = 1_000


class NewTopic(NamedTuple):
    """A topic to create. None, as number of partitions or replication factor, means the brokers' default."""

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, str] = {}
    assignments: Sequence[Sequence[int]] | None = None
    """Broker ids for each partition, the preferred leader first. Replaces the two numbers."""


class PartitionDescription(NamedTuple):
    partition: int
    leader: int | None
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline_replicas: tuple[int, ...]


class TopicDescription(NamedTuple):
    name: str
    topic_id: str
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]
    """Ascending."""


async def create(requests: AdminRequests, topics: Iterable[NewTopic]) -> None:
    """See `Admin.create_topics`."""
    given: object = topics
    if isinstance(given, NewTopic | str):
        raise InvalidSetting("topics", topics, "give a list of NewTopic, or call create_topic")
    creatable = [_creatable(topic) for topic in topics]
    for name, count in Counter(topic.name for topic in creatable).items():
        if count > 1:
            raise InvalidSetting("topics", name, f"it is named {count} times: name it once")
    creation = Creation(creatable, requests.runtime.world.random)
    errors = await requests.at_controller(creation)
    created = [name for name in creation.names() if name not in errors]
    if created:
        await requests.until_known(dict.fromkeys(created, 0))
    if errors:
        raise TopicErrors(errors)


async def create_partitions(
    requests: AdminRequests, topic: str, count: int, assignments: Sequence[Sequence[int]] | None
) -> None:
    """See `Admin.create_partitions`."""
    (name,) = check_names("topic", [topic])
    check_integer("count", count, 1, MAX_PARTITIONS)
    errors = await requests.at_controller(NewPartitions(name, count, assignments))
    if errors:
        raise errors[name]
    await requests.until_known({name: count})


async def delete(requests: AdminRequests, names: Iterable[str]) -> None:
    """See `Admin.delete_topics`."""
    errors = await requests.at_controller(Deletion(check_names("names", names)))
    if errors:
        raise TopicErrors(errors)


async def describe(requests: AdminRequests, names: Iterable[str] | None) -> dict[str, TopicDescription]:
    """See `Admin.describe_topics`."""
    response = await requests.metadata(None if names is None else check_names("names", names))
    errors: dict[str, MinibrokerError] = {
        topic.name: topic_error(
            error_of(topic.error_code), f"topic {topic.name!r}", topic.name, requests.runtime.protection.principal
        )
        for topic in response.topics
        if topic.error_code != ErrorCode.NONE and not topic.partitions
    }
    if errors:
        raise TopicErrors(errors)
    return {topic.name: _description(topic) for topic in sorted(response.topics, key=lambda topic: topic.name)}


class Creation:
    """CreateTopics. Each topic carries a nonce, the same in all attempts, which becomes part of the topic's id. So the
    controller recognises a topic that an earlier attempt created, and its answer needs no interpretation. Each attempt
    names one controller epoch: a later controller, which does not know what its predecessor created, rejects it."""

    api = CREATE_TOPICS
    final = (ErrorCode.REQUEST_TIMED_OUT,)
    """The topic exists, but some of its partitions have no leader: the user must learn of that."""
    is_prepared = False
    may_yet = "It may yet be created: see `minibroker topics list` before you try again"

    def __init__(self, topics: Iterable[m.CreatableTopic], random: Random) -> None:
        self._topics = {topic.name: topic for topic in topics}
        for topic in self._topics.values():
            topic.nonce = random.randbytes(NONCE_BYTES)

    def names(self) -> list[str]:
        return list(self._topics)

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.CreateTopicsRequest:
        topics = [self._topics[name] for name in names]
        return m.CreateTopicsRequest(topics, timeout_ms, controller_epoch=controller_epoch)

    def results(self, response: m.CreateTopicsResponse) -> dict[str, tuple[int, str]]:
        return {topic.name: (topic.error_code, topic.error_message) for topic in response.topics}


class NewPartitions:
    """CreatePartitions for one topic.

    The first request has an id that no topic has. The controller rejects it with the topic's id and number of
    partitions. All later requests carry these, so a topic that is created during the call gets no partitions. If a
    repetition finds as many partitions as the call wants, an earlier attempt added them: partitions never go away, so
    another client can at most have requested the same number at the same time.
    """

    api = CREATE_PARTITIONS
    may_yet = "They may yet be added: see `minibroker topics describe` before you try again"

    def __init__(self, topic: str, count: int, assignments: Sequence[Sequence[int]] | None) -> None:
        given = None if assignments is None else [m.CreatePartitionsAssignment(list(ids)) for ids in assignments]
        self._request = m.CreatePartitionsTopic(topic, count, given, NO_TOPIC)
        self._is_another = False
        self.is_prepared = False

    @property
    def final(self) -> Collection[ErrorCode]:
        """REQUEST_TIMED_OUT: the partitions exist, but some have no leader, and the user must learn of that."""
        final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT)
        return (*final, ErrorCode.UNKNOWN_TOPIC_ID) if self._is_another else final

    def names(self) -> list[str]:
        return [self._request.name]

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.CreatePartitionsRequest:
        return m.CreatePartitionsRequest([self._request], timeout_ms)

    def results(self, response: m.CreatePartitionsResponse) -> dict[str, tuple[int, str]]:
        for result in response.results:
            if result.error_code == ErrorCode.UNKNOWN_TOPIC_ID:
                if self._request.topic_id == NO_TOPIC:
                    self._request.topic_id, self._request.known_count = result.topic_id, result.num_partitions
                    self.is_prepared = True
                else:
                    self._is_another = True
        return {result.name: (result.error_code, result.error_message) for result in response.results}


class Deletion:
    """DeleteTopics. Each request names its topics by id, so that no attempt, however late it arrives, deletes a topic
    that was created during the call.

    The controller supplies the ids: the first request has an id that no topic has, and is rejected with the current
    ids. From then on, a topic that is gone or has another id counts as deleted, whoever deleted it. Rejected: the ids
    in a broker's metadata, which may belong to a topic that was deleted long before.
    """

    api = DELETE_TOPICS
    final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,)
    may_yet = "It may yet be deleted: see `minibroker topics list` before you try again"

    def __init__(self, names: Iterable[str]) -> None:
        self._ids = dict.fromkeys(names, NO_TOPIC)
        self.is_prepared = False

    def names(self) -> list[str]:
        return list(self._ids)

    def request(self, names: Sequence[str], timeout_ms: int, controller_epoch: int) -> m.DeleteTopicsRequest:
        return m.DeleteTopicsRequest(list(names), timeout_ms, [self._ids[name] for name in names])

    def results(self, response: m.DeleteTopicsResponse) -> dict[str, tuple[int, str]]:
        results: dict[str, tuple[int, str]] = {}
        for topic in response.responses:
            code = topic.error_code
            is_gone = code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
            if is_gone and self._ids.get(topic.name) != NO_TOPIC:
                code = ErrorCode.NONE
            elif code == ErrorCode.UNKNOWN_TOPIC_ID:
                self._ids[topic.name] = topic.topic_id
                self.is_prepared = True
            results[topic.name] = code, topic.error_message
        return results


async def existing(
    requests: AdminRequests, partitions: Iterable[TopicPartition]
) -> tuple[dict[str, str], dict[TopicPartition, MinibrokerError]]:
    """Return the ids of these partitions' topics, and an error for each partition that does not exist."""
    asked = list(partitions)
    response = await requests.metadata(sorted({partition.topic for partition in asked}))
    topics = {topic.name: topic for topic in response.topics}
    principal = requests.runtime.protection.principal
    problems = {partition: _missing(partition, topics.get(partition.topic), principal) for partition in asked}
    errors = {partition: problem for partition, problem in problems.items() if problem is not None}
    return {name: topic.topic_id for name, topic in topics.items()}, errors


def _missing(partition: TopicPartition, topic: m.MetadataTopic | None, principal: str | None) -> MinibrokerError | None:
    if topic is None or not topic.partitions:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else error_of(topic.error_code)
        return topic_error(code, partition.topic, partition.topic, principal)
    if all(one.partition_index != partition.partition for one in topic.partitions):
        return no_such_partition(partition, len(topic.partitions))
    return None


def _creatable(topic: NewTopic) -> m.CreatableTopic:
    if not isinstance(topic, NewTopic):
        raise InvalidSetting("topics", topic, "give a list of NewTopic, or call create_topic")
    if not isinstance(topic.configs, Mapping):
        raise InvalidSetting("configs", topic.configs, "give a dict of settings' names and values")
    if not isinstance(topic.name, str):
        raise InvalidSetting("name", topic.name, "a name is a str")
    check_topic_name(topic.name)
    assignments = []
    if topic.assignments is not None:
        if topic.partitions is not None or topic.replication_factor is not None:
            raise InvalidSetting(
                "assignments",
                topic.assignments,
                "they determine the partitions and the replication factor: leave those out",
            )
        assignments = [m.CreatableAssignment(index, list(ids)) for index, ids in enumerate(topic.assignments)]
    try:
        if topic.partitions is not None:
            check_integer("partitions", topic.partitions, 1, MAX_PARTITIONS)
        if topic.replication_factor is not None:
            check_integer("replication_factor", topic.replication_factor, 1, MAX_REPLICATION_FACTOR)
    except InvalidSetting as error:
        raise about(topic.name, error) from None
    return m.CreatableTopic(
        topic.name,
        -1 if topic.partitions is None else topic.partitions,
        -1 if topic.replication_factor is None else topic.replication_factor,
        assignments,
        [
            m.CreatableConfig(check_text("configs", name), check_text(name, str(value)))
            for name, value in topic.configs.items()
        ],
    )


def _description(topic: m.MetadataTopic) -> TopicDescription:
    return TopicDescription(
        topic.name,
        topic.topic_id,
        topic.is_internal,
        tuple(
            PartitionDescription(
                partition.partition_index,
                None if partition.leader_id == NO_LEADER else partition.leader_id,
                partition.leader_epoch,
                tuple(partition.replica_nodes),
                tuple(partition.isr_nodes),
                tuple(partition.offline_replicas),
            )
            for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
        ),
    )
