"""Groups as an administrator sees them: described and deleted, and what they have committed read, set and deleted.

All is asked of the group's coordinator (see `coordinators`). Groups are asked about one by one, several at a time: of
many groups each has an answer or an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from minibroker.client.cluster.coordinators import Answered, Coordinator, Coordinators
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.settings import check_choice, check_text
from minibroker.client.shown import shown
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DELETE_GROUPS, DESCRIBE_GROUPS, OFFSET_COMMIT, OFFSET_DELETE, OFFSET_FETCH
from minibroker.protocol.consumer_protocol import PROTOCOL_TYPE, assigned_partitions, subscribed_topics
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import NO_EPOCH, TopicPartition

T = TypeVar("T")
Response = TypeVar("Response", bound=m.Message)

_AT_A_TIME = 32

GROUP_STATES = ("PreparingRebalance", "CompletingRebalance", "Stable", "Empty", "Dead")
"""Kafka's names. Empty: no members, and offsets that are kept."""

_NOBODY = -1
"""The generation of a commit by somebody who is no member."""
_HAS_MEMBERS = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.NON_EMPTY_GROUP,
)
"""What a commit by nobody meets in a group that has members."""


class GroupListing(NamedTuple):
    group: str
    protocol_type: str
    """"consumer"; empty where nobody but administrators has committed; others are not consumers (Kafka Connect)."""
    state: str
    """One of GROUP_STATES."""


class MemberDescription(NamedTuple):
    member_id: str
    group_instance_id: str | None
    """The name of a static member (KIP-345)."""
    client_id: str
    client_host: str
    topics: tuple[str, ...] | None
    """What it is subscribed to; None where that is not known, as of members that are no consumers."""
    partitions: tuple[TopicPartition, ...] | None
    """What it is assigned, sorted; None where that is not known. Empty while the group rebalances."""


class GroupDescription(NamedTuple):
    group: str
    state: str
    """One of GROUP_STATES."""
    protocol_type: str
    assignor: str | None
    """The one that the members agreed on; None while there is none."""
    coordinator: Coordinator
    members: tuple[MemberDescription, ...]
    """In the order of their ids."""


class GroupErrors(PartialFailure[str, GroupDescription]):
    """Some groups of a request failed; the others succeeded. `errors` and `results` are by group name."""


def check_group(name: str, group: str) -> str:
    """Raises InvalidSetting."""
    if not isinstance(group, str) or not group:
        raise InvalidSetting(name, group, "give the name of a group, which is not empty")
    return check_text(name, group)


def check_groups(name: str, groups: Iterable[str]) -> list[str]:
    """Each once. Raises InvalidSetting."""
    if isinstance(groups, str):
        raise InvalidSetting(name, groups, f"give a list: [{shown(groups)}]")
    return list(dict.fromkeys(check_group(name, group) for group in groups))


def check_states(states: Iterable[str] | None) -> list[str]:
    """Raises InvalidSetting."""
    if isinstance(states, str):
        raise InvalidSetting("states", states, f"give a list: [{shown(states)}]")
    return [check_choice("states", state, GROUP_STATES) for state in states or ()]


async def of_each(
    groups: Sequence[str], ask: Callable[[str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, MinibrokerError]]:
    """What `ask` returns for each, and what went wrong with the others."""
    results: dict[str, T] = {}
    errors: dict[str, MinibrokerError] = {}
    free = asyncio.Semaphore(_AT_A_TIME)

    async def one(group: str) -> None:
        async with free:
            try:
                results[group] = await ask(group)
            except (NetworkError, BrokerError, InvalidMessage) as error:
                errors[group] = error

    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            tasks.create_task(one(group))
    return (
        {group: results[group] for group in groups if group in results},
        {group: errors[group] for group in groups if group in errors},
    )


async def describe(coordinators: Coordinators, group: str, timeout_s: float) -> GroupDescription:
    """Raises BrokerError (GROUP_ID_NOT_FOUND), NetworkError."""
    answered = await coordinators.request(
        group,
        DESCRIBE_GROUPS,
        g.DescribeGroupsRequest([group]),
        code_of=lambda response: _of(group, response.groups).error_code,
        timeout_s=timeout_s,
    )
    found = _of(group, answered.response.groups)
    _check(found.error_code, group)
    if found.group_state == "Dead" and not found.members:  # how Kafka's coordinators say it (before KIP-1043)
        raise BrokerError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {group}")
    members = [_member(found.protocol_type, member) for member in found.members]
    return GroupDescription(
        group,
        found.group_state,
        found.protocol_type,
        found.protocol_data or None,
        answered.coordinator,
        tuple(sorted(members, key=lambda member: member.member_id)),
    )


def _member(protocol_type: str, member: g.DescribedGroupMember) -> MemberDescription:
    topics: tuple[str, ...] | None = None
    partitions: tuple[TopicPartition, ...] | None = None
    if protocol_type == PROTOCOL_TYPE:
        # Bytes of another client, which brokers do not read either: what cannot be read of them hides nothing else.
        with suppress(InvalidMessage):
            topics = tuple(sorted(subscribed_topics(member.member_metadata)))
        with suppress(InvalidMessage):
            partitions = tuple(sorted(assigned_partitions(member.member_assignment)))
    return MemberDescription(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, topics, partitions
    )


async def delete(coordinators: Coordinators, group: str, timeout_s: float) -> None:
    """Raises BrokerError (NON_EMPTY_GROUP, which names the members, GROUP_ID_NOT_FOUND), NetworkError."""
    answered = await coordinators.change(
        group,
        DELETE_GROUPS,
        lambda attempt: g.DeleteGroupsRequest([group], attempt),
        code_of=lambda response: _of(group, response.results).error_code,
        timeout_s=timeout_s,
    )
    code = error_of(_of(group, answered.response.results).error_code)
    if code is ErrorCode.GROUP_ID_NOT_FOUND and answered.in_doubt:
        return  # an earlier attempt has done it
    if code is ErrorCode.NON_EMPTY_GROUP:
        raise await has_members(coordinators, group, timeout_s)
    _check(code, group)


class Committed(NamedTuple):
    offset: OffsetAndMetadata
    topic_id: str
    """Of the topic in which it was committed; empty: not known."""


async def committed(
    coordinators: Coordinators, group: str, partitions: Sequence[TopicPartition] | None, timeout_s: float
) -> dict[TopicPartition, Committed]:
    """Of these partitions, or of all (None), what is committed. Raises BrokerError, NetworkError."""
    topics = None if partitions is None else [g.OffsetFetchTopic(*topic) for topic in by_topic(partitions).items()]

    def code_of(response: g.OffsetFetchResponse) -> int:
        found = _of(group, response.groups)
        each = (p.error_code for topic in found.topics for p in topic.partitions)
        return found.error_code or next(filter(None, each), ErrorCode.NONE)

    answered = await coordinators.request(
        group,
        OFFSET_FETCH,
        g.OffsetFetchRequest([g.OffsetFetchGroup(group, topics)]),
        code_of=code_of,
        timeout_s=timeout_s,
    )
    _check(code_of(answered.response), group)
    found: dict[TopicPartition, Committed] = {}
    for topic in _of(group, answered.response.groups).topics:
        for p in topic.partitions:
            if p.committed_offset >= 0:
                epoch = None if p.committed_leader_epoch == NO_EPOCH else p.committed_leader_epoch
                offset = OffsetAndMetadata(p.committed_offset, epoch, p.metadata or "")
                found[TopicPartition(topic.name, p.partition_index)] = Committed(offset, topic.topic_id)
    return dict(sorted(found.items()))


async def commit(
    coordinators: Coordinators,
    group: str,
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
    topic_ids: Mapping[str, str],
    timeout_s: float,
) -> dict[TopicPartition, MinibrokerError]:
    """Offsets of somebody who is no member. Returns what was refused. Raises BrokerError (NON_EMPTY_GROUP, which names
    the members), NetworkError."""
    topics = [
        g.OffsetCommitTopic(
            name,
            [_to_commit(number, offsets[TopicPartition(name, number)]) for number in numbers],
            topic_ids.get(name, ""),
        )
        for name, numbers in by_topic(offsets).items()
    ]

    answered = await coordinators.change(
        group,
        OFFSET_COMMIT,
        lambda attempt: g.OffsetCommitRequest(group, _NOBODY, "", None, topics, attempt),
        code_of=lambda response: _first_of(response.topics, _OF_THE_GROUP),
        timeout_s=timeout_s,
    )
    if _first_of(answered.response.topics, _HAS_MEMBERS):
        raise await has_members(coordinators, group, timeout_s)
    return _errors(offsets, answered, answered.response.topics)


def _to_commit(number: int, committed: OffsetAndMetadata) -> g.OffsetCommitPartition:
    epoch = NO_EPOCH if committed.leader_epoch is None else committed.leader_epoch
    return g.OffsetCommitPartition(number, committed.offset, epoch, committed.metadata)


async def delete_offsets(
    coordinators: Coordinators, group: str, partitions: Sequence[TopicPartition], timeout_s: float
) -> dict[TopicPartition, MinibrokerError]:
    """Returns what was refused. Raises BrokerError (GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP), NetworkError."""
    topics = [g.OffsetDeleteTopic(*topic) for topic in by_topic(partitions).items()]
    answered = await coordinators.change(
        group,
        OFFSET_DELETE,
        lambda attempt: g.OffsetDeleteRequest(group, topics, attempt),
        code_of=lambda response: response.error_code or _first_of(response.topics, _OF_THE_GROUP),
        timeout_s=timeout_s,
    )
    code = error_of(answered.response.error_code)
    if code is ErrorCode.GROUP_ID_NOT_FOUND and answered.in_doubt:
        return {}  # an earlier attempt deleted the last of its offsets, and with them the group
    if code is ErrorCode.NON_EMPTY_GROUP:
        raise await has_members(coordinators, group, timeout_s)
    _check(code, group)
    return _errors(partitions, answered, answered.response.topics)


async def has_members(coordinators: Coordinators, group: str, timeout_s: float) -> BrokerError:
    """The error that names them."""
    said = f"group {group} has members"
    try:
        members = (await describe(coordinators, group, timeout_s)).members
    except (BrokerError, NetworkError, InvalidMessage):
        members = ()  # that there are some is what matters
    return BrokerError(ErrorCode.NON_EMPTY_GROUP, f"{said}: {named(members)}" if members else said)


def named(members: Sequence[MemberDescription]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(f"{each.member_id} ({each.client_id} at {each.client_host})" for each in members[:5])
    return shown if len(members) <= 5 else f"{shown} and {len(members) - 5} more"


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
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
"""Errors that OffsetCommit gives each partition, since it has no place for one of the group."""


def _first_of(topics: Iterable[g.OffsetCommitTopicResponse], codes: Sequence[ErrorCode]) -> int:
    """The first of these codes that a partition has; 0: none of them."""
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


Part = TypeVar("Part", g.DescribedGroup, g.DeletableGroupResult, g.OffsetFetchGroupResponse)


def _of(group: str, parts: Iterable[Part]) -> Part:
    for part in parts:
        if part.group_id == group:
            return part
    raise InvalidMessage(f"the answer does not mention group {group}")


def _check(code: int, group: str) -> None:
    if code != ErrorCode.NONE:
        raise BrokerError(error_of(code), f"group {group}")
