"""The committed offsets of a group, read and changed by an administrator: OffsetFetch, OffsetCommit and OffsetDelete at
the group's coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from minibroker.client.administering.groups import check_code, check_group, has_members, of_group
from minibroker.client.administering.requests import AdminRequests
from minibroker.client.administering.topics import existing
from minibroker.client.cluster.coordinators import Answered
from minibroker.client.errors import PartitionErrors
from minibroker.client.group.commits import OffsetAndMetadata, check_offsets
from minibroker.client.settings import check_partitions
from minibroker.protocol import messages as m
from minibroker.protocol.apis import OFFSET_COMMIT, OFFSET_DELETE, OFFSET_FETCH
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.topic_ids import is_older

Response = TypeVar("Response", bound=m.Message)

_NO_GENERATION = -1
"""The generation in a commit of an administrator, who is no member."""
_HAS_MEMBERS = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.NON_EMPTY_GROUP,
)
"""Answers to a commit of an administrator if the group has members."""


async def committed_offsets(
    requests: AdminRequests, group: str, partitions: Iterable[TopicPartition] | None
) -> dict[TopicPartition, OffsetAndMetadata | None]:
    """See `Admin.list_group_offsets`."""
    asked = None if partitions is None else check_partitions("partitions", partitions)
    check_group("group", group)
    found = await _fetch(requests, group, asked)
    ids: dict[str, str] = {}
    if names := sorted({partition.topic for partition, each in found.items() if each.topic_id}):
        ids = {topic.name: topic.topic_id for topic in (await requests.metadata(names)).topics}
    offsets: dict[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(asked or ())
    for partition, each in found.items():
        if not is_older(each.topic_id, ids.get(partition.topic, "")):
            offsets[partition] = each.offset
    return offsets


async def alter(requests: AdminRequests, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
    """See `Admin.alter_group_offsets`."""
    retries = requests.retries()
    asked = check_offsets(offsets)
    check_group("group", group)
    if not asked:
        return
    ids, errors = await existing(requests, asked)
    there = {partition: offset for partition, offset in asked.items() if partition not in errors}
    if there:
        errors |= await _commit(requests, group, there, ids, retries.remaining_s)
    if errors:
        raise PartitionErrors(errors)


async def delete(requests: AdminRequests, group: str, partitions: Iterable[TopicPartition]) -> None:
    """See `Admin.delete_group_offsets`."""
    asked = check_partitions("partitions", partitions)
    if errors := await _delete(requests, check_group("group", group), asked):
        raise PartitionErrors(errors)


class _Committed(NamedTuple):
    offset: OffsetAndMetadata
    topic_id: str
    """The id of the topic in which it was committed; empty: not known."""


async def _fetch(
    requests: AdminRequests, group: str, partitions: Sequence[TopicPartition] | None
) -> dict[TopicPartition, _Committed]:
    """Return the committed offsets of these partitions, or of all (None). Raises BrokerError, NetworkError."""
    topics = None if partitions is None else [g.OffsetFetchTopic(*topic) for topic in _by_topic(partitions).items()]

    def code_of(response: g.OffsetFetchResponse) -> int:
        found = of_group(group, response.groups)
        each = (p.error_code for topic in found.topics for p in topic.partitions)
        return found.error_code or next(filter(None, each), ErrorCode.NONE)

    answered = await requests.coordinators.request(
        group,
        OFFSET_FETCH,
        g.OffsetFetchRequest([g.OffsetFetchGroup(group, topics)]),
        code_of=code_of,
        timeout_s=requests.timeout_s,
    )
    check_code(code_of(answered.response), group)
    found: dict[TopicPartition, _Committed] = {}
    for topic in of_group(group, answered.response.groups).topics:
        for p in topic.partitions:
            if p.committed_offset >= 0:
                epoch = None if p.committed_leader_epoch == NO_EPOCH else p.committed_leader_epoch
                offset = OffsetAndMetadata(p.committed_offset, epoch, p.metadata or "")
                found[TopicPartition(topic.name, p.partition_index)] = _Committed(offset, topic.topic_id)
    return dict(sorted(found.items()))


async def _commit(
    requests: AdminRequests,
    group: str,
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
    topic_ids: Mapping[str, str],
    timeout_s: float,
) -> dict[TopicPartition, MinibrokerError]:
    """Commit offsets without being a member. Return the errors of the partitions that were rejected. Raises BrokerError
    (NON_EMPTY_GROUP, which names the members), NetworkError."""
    topics = [
        g.OffsetCommitTopic(
            name,
            [_to_commit(number, offsets[TopicPartition(name, number)]) for number in numbers],
            topic_ids.get(name, ""),
        )
        for name, numbers in _by_topic(offsets).items()
    ]

    answered = await requests.coordinators.change(
        group,
        OFFSET_COMMIT,
        lambda attempt: g.OffsetCommitRequest(group, _NO_GENERATION, "", None, topics, attempt),
        code_of=lambda response: _first_of(response.topics, _OF_THE_GROUP),
        timeout_s=timeout_s,
    )
    if _first_of(answered.response.topics, _HAS_MEMBERS):
        raise await has_members(requests, group)
    return _errors(offsets, answered, answered.response.topics)


def _to_commit(number: int, committed: OffsetAndMetadata) -> g.OffsetCommitPartition:
    epoch = NO_EPOCH if committed.leader_epoch is None else committed.leader_epoch
    return g.OffsetCommitPartition(number, committed.offset, epoch, committed.metadata)


async def _delete(
    requests: AdminRequests, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, MinibrokerError]:
    """Return the errors of the partitions that were rejected. Raises BrokerError (GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP),
    NetworkError."""
    topics = [g.OffsetDeleteTopic(*topic) for topic in _by_topic(partitions).items()]
    answered = await requests.coordinators.change(
        group,
        OFFSET_DELETE,
        lambda attempt: g.OffsetDeleteRequest(group, topics, attempt),
        code_of=lambda response: response.error_code or _first_of(response.topics, _OF_THE_GROUP),
        timeout_s=requests.timeout_s,
    )
    code = error_of(answered.response.error_code)
    if code is ErrorCode.GROUP_ID_NOT_FOUND and answered.in_doubt:
        return {}  # an earlier attempt deleted the last offsets of the group, and thereby the group
    if code is ErrorCode.NON_EMPTY_GROUP:
        raise await has_members(requests, group)
    check_code(code, group)
    return _errors(partitions, answered, answered.response.topics)


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(partition.partition)
    return topics


_OF_THE_GROUP = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.REQUEST_TIMED_OUT,
)
"""Errors of the group. OffsetCommit reports them for each partition, since it has no field for them."""


def _first_of(topics: Iterable[g.OffsetCommitTopicResponse], codes: Sequence[ErrorCode]) -> int:
    """Return the first of these codes that a partition has; 0 if none has any."""
    return next((p.error_code for topic in topics for p in topic.partitions if p.error_code in codes), ErrorCode.NONE)


def _errors(
    asked: Iterable[TopicPartition], answered: Answered[Response], topics: Iterable[g.OffsetCommitTopicResponse]
) -> dict[TopicPartition, MinibrokerError]:
    codes = {TopicPartition(topic.name, p.partition_index): p.error_code for topic in topics for p in topic.partitions}
    errors: dict[TopicPartition, MinibrokerError] = {}
    for partition in asked:
        if partition not in codes:
            errors[partition] = InvalidMessage(
                f"the answer of broker {answered.coordinator.node_id} does not mention {partition}"
            )
        elif codes[partition] != ErrorCode.NONE:
            errors[partition] = BrokerError(error_of(codes[partition]), str(partition))
    return errors
