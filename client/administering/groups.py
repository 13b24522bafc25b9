"""Groups: listed, described and deleted, and members removed.

ListGroups goes to every broker, all other requests to the group's coordinator (`cluster/coordinators.py`). Each group
has a request of its own, several at a time, so that each has its own answer or error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from minibroker.client.administering.requests import AdminRequests, of_each
from minibroker.client.cluster.coordinators import Coordinator
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import check_choice, check_text
from minibroker.client.shown import shown
from minibroker.protocol.apis import DELETE_GROUPS, DESCRIBE_GROUPS, LEAVE_GROUP, LIST_GROUPS
from minibroker.protocol.consumer_protocol import PROTOCOL_TYPE, assigned_partitions, subscribed_topics
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import TopicPartition

GROUP_STATES = ("PreparingRebalance", "CompletingRebalance", "Stable", "Empty", "Dead")
"""Kafka's names. "Empty" groups have committed offsets and no members."""
REMOVED = "removed by an administrator"
"""The reason that the group remembers."""


class GroupListing(NamedTuple):
    group: str
    protocol_type: str
    """"consumer"; empty if only administrators have committed; otherwise not a consumer group (Kafka Connect)."""
    state: str
    """One of GROUP_STATES."""


class MemberDescription(NamedTuple):
    member_id: str
    group_instance_id: str | None
    """The name of a static member (KIP-345)."""
    client_id: str
    client_host: str
    topics: tuple[str, ...] | None
    """The subscribed topics; None if they are unknown, for instance because the member is no consumer."""
    partitions: tuple[TopicPartition, ...] | None
    """The assigned partitions, sorted; None if they are unknown. Empty while the group rebalances."""


class GroupRebalance(NamedTuple):
    """A rebalance of a group, during which its members do not work."""

    time_ms: int
    """When it began, by the coordinator's clock, in milliseconds since 1970."""
    generation: int
    """The generation that it ended."""
    reason: str
    took_ms: int | None
    """Until the members had their assignments, or were all gone. None: it is under way, or another one followed."""


class GroupDescription(NamedTuple):
    group: str
    state: str
    """One of GROUP_STATES."""
    protocol_type: str
    assignor: str | None
    """The assignor that the members agreed on; None if there is none yet."""
    coordinator: Coordinator
    members: tuple[MemberDescription, ...]
    """By ascending member id."""
    rebalances: tuple[GroupRebalance, ...] = ()
    """The last ones, at most 10, the oldest first. A new coordinator knows none of those before. Kafka's brokers report
    none."""


class GroupErrors(PartialFailure[str, GroupDescription]):
    """Some groups of a request failed; the others succeeded. `errors` and `results` are by group name."""


def check_group(name: str, group: str) -> str:
    """Raises InvalidSetting."""
    if not isinstance(group, str) or not group:
        raise InvalidSetting(name, group, "give the name of a group, which is not empty")
    return check_text(name, group)


def check_groups(name: str, groups: Iterable[str]) -> list[str]:
    """Return each group once. Raises InvalidSetting."""
    if isinstance(groups, str):
        raise InvalidSetting(name, groups, f"give a list: [{shown(groups)}]")
    return list(dict.fromkeys(check_group(name, group) for group in groups))


def check_states(states: Iterable[str] | None) -> list[str]:
    """Raises InvalidSetting."""
    if isinstance(states, str):
        raise InvalidSetting("states", states, f"give a list: [{shown(states)}]")
    return [check_choice("states", state, GROUP_STATES) for state in states or ()]


async def list_groups(requests: AdminRequests, states: Iterable[str] | None) -> list[GroupListing]:
    """See `Admin.list_groups`."""
    request = g.ListGroupsRequest(check_states(states))

    def listed(response: g.ListGroupsResponse) -> list[GroupListing]:
        if response.error_code != ErrorCode.NONE:
            raise BrokerError(error_of(response.error_code), LIST_GROUPS.name)
        return [GroupListing(each.group_id, each.protocol_type, each.group_state) for each in response.groups]

    found = await requests.at_all_brokers(LIST_GROUPS, request, listed)
    return sorted({each.group: each for groups in found.values() for each in groups}.values())


async def describe_groups(requests: AdminRequests, groups: Iterable[str]) -> dict[str, GroupDescription]:
    """See `Admin.describe_groups`."""
    results, errors = await of_each(check_groups("groups", groups), lambda group: describe(requests, group))
    if errors:
        raise GroupErrors(errors, results)
    return results


async def delete_groups(requests: AdminRequests, groups: Iterable[str]) -> None:
    """See `Admin.delete_groups`."""
    _, errors = await of_each(check_groups("groups", groups), lambda group: _delete(requests, group))
    if errors:
        raise GroupErrors(errors)


async def remove_members(requests: AdminRequests, group: str, members: Iterable[str] | None) -> list[str]:
    """See `Admin.remove_group_members`."""
    check_group("group", group)
    if isinstance(members, str):
        raise InvalidSetting("members", members, f"give a list: [{shown(members)}]")
    present = (await describe(requests, group)).members
    leaving = present if members is None else [_member_named(group, present, name) for name in members]
    if not leaving:
        return []
    body = g.LeaveGroupRequest(group, [_leaving(each) for each in dict.fromkeys(leaving)])
    answered = await requests.coordinators.request(
        group, LEAVE_GROUP, body, code_of=lambda response: response.error_code, timeout_s=requests.timeout_s
    )
    check_code(answered.response.error_code, group)
    for each in answered.response.members:
        if each.error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID):  # it may have left by itself
            name = each.group_instance_id or each.member_id
            raise BrokerError(error_of(each.error_code), f"member {name} of group {group}")
    return sorted({each.member_id for each in leaving})


def _leaving(member: MemberDescription) -> g.LeavingMember:
    if member.group_instance_id is not None:
        return g.LeavingMember("", member.group_instance_id, REMOVED)
    return g.LeavingMember(member.member_id, None, REMOVED)


def _member_named(group: str, members: Sequence[MemberDescription], name: str) -> MemberDescription:
    for each in members:
        if name in (each.member_id, each.group_instance_id):
            return each
    there = f"the members of group {group} are {named(members)}" if members else f"group {group} has no members"
    raise InvalidSetting("members", name, there)


async def describe(requests: AdminRequests, group: str) -> GroupDescription:
    """Raises BrokerError (GROUP_ID_NOT_FOUND), NetworkError."""
    answered = await requests.coordinators.request(
        group,
        DESCRIBE_GROUPS,
        g.DescribeGroupsRequest([group]),
        code_of=lambda response: of_group(group, response.groups).error_code,
        timeout_s=requests.timeout_s,
    )
    found = of_group(group, answered.response.groups)
    check_code(found.error_code, group)
    if found.group_state == "Dead" and not found.members:  # Kafka's coordinators before KIP-1043 answer like this
        raise BrokerError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {group}")
    members = [_member(found.protocol_type, member) for member in found.members]
    return GroupDescription(
        group,
        found.group_state,
        found.protocol_type,
        found.protocol_data or None,
        answered.coordinator,
        tuple(sorted(members, key=lambda member: member.member_id)),
        tuple(
            GroupRebalance(each.time_ms, each.generation_id, each.reason, None if each.took_ms < 0 else each.took_ms)
            for each in found.rebalances
        ),
    )


def _member(protocol_type: str, member: g.DescribedGroupMember) -> MemberDescription:
    topics: tuple[str, ...] | None = None
    partitions: tuple[TopicPartition, ...] | None = None
    if protocol_type == PROTOCOL_TYPE:
        # Another client wrote these bytes, and no broker checked them. If they cannot be read, the rest is still shown.
        with suppress(InvalidMessage):
            topics = tuple(sorted(subscribed_topics(member.member_metadata)))
        with suppress(InvalidMessage):
            partitions = tuple(sorted(assigned_partitions(member.member_assignment)))
    return MemberDescription(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, topics, partitions
    )


async def _delete(requests: AdminRequests, group: str) -> None:
    """Raises BrokerError (NON_EMPTY_GROUP, which names the members, GROUP_ID_NOT_FOUND), NetworkError."""
    answered = await requests.coordinators.change(
        group,
        DELETE_GROUPS,
        lambda attempt: g.DeleteGroupsRequest([group], attempt),
        code_of=lambda response: of_group(group, response.results).error_code,
        timeout_s=requests.timeout_s,
    )
    code = error_of(of_group(group, answered.response.results).error_code)
    if code is ErrorCode.GROUP_ID_NOT_FOUND and answered.in_doubt:
        return  # an earlier attempt has done it
    if code is ErrorCode.NON_EMPTY_GROUP:
        raise await has_members(requests, group)
    check_code(code, group)


async def has_members(requests: AdminRequests, group: str) -> BrokerError:
    """Return the error that names the members."""
    said = f"group {group} has members"
    try:
        members = (await describe(requests, group)).members
    except (BrokerError, NetworkError, InvalidMessage):
        members = ()
    return BrokerError(ErrorCode.NON_EMPTY_GROUP, f"{said}: {named(members)}" if members else said)


def named(members: Sequence[MemberDescription]) -> str:
    """Name the first five members, and count the others."""
    shown = ", ".join(f"{each.member_id} ({each.client_id} at {each.client_host})" for each in members[:5])
    return shown if len(members) <= 5 else f"{shown} and {len(members) - 5} more"


Part = TypeVar("Part", g.DescribedGroup, g.DeletableGroupResult, g.OffsetFetchGroupResponse)


def of_group(group: str, parts: Iterable[Part]) -> Part:
    for part in parts:
        if part.group_id == group:
            return part
    raise InvalidMessage(f"the answer does not mention group {group}")


def check_code(code: int, group: str) -> None:
    if code != ErrorCode.NONE:
        raise BrokerError(error_of(code), f"group {group}")
