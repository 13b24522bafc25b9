"""Lists and describes groups (ListGroups, DescribeGroups). Read-only.

A deposed coordinator that does not know it yet describes its groups in their old state. Nothing is lost by that,
because every change of a group goes through its coordinator, which checks again.
"""

from collections.abc import Generator, Sequence

from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import GroupTerms
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g


def describe(terms: GroupTerms, group_id: str) -> g.DescribedGroup:
    """Describe a group. An unknown group is Dead."""
    found = terms.find(group_id)
    if isinstance(found, ErrorCode):
        return g.DescribedGroup(found, group_id, "", "", "", [])
    _, group = found
    if group is None:
        return g.DescribedGroup(ErrorCode.NONE, group_id, GroupState.DEAD.value, "", "", [])
    is_settled = group.is_in(GroupState.STABLE)
    # Until the members have agreed on a protocol, their metadata has no meaning.
    protocol_name = (group.protocol_name or "") if is_settled else ""
    members = [
        g.DescribedGroupMember(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host,
            member.metadata(protocol_name) if is_settled else b"",
            member.assignment if is_settled else b"",
        )
        for member in group.members.values()
    ]
    rebalances = [
        g.DescribedRebalance(
            each.time_ms, each.generation_id, each.reason, -1 if each.took_ms is None else each.took_ms
        )
        for each in group.rebalances
    ]
    return g.DescribedGroup(
        ErrorCode.NONE,
        group_id,
        group.state.value,
        group.protocol_type or "",
        protocol_name,
        members,
        rebalances=rebalances,
    )


def list_groups(
    terms: GroupTerms, states: Sequence[str], types: Sequence[str]
) -> Generator[None, None, g.ListGroupsResponse]:
    """List the groups that this broker coordinates, restricted to these states and types if any are given.
    COORDINATOR_LOAD_IN_PROGRESS: there may be more."""
    wanted = {state.lower() for state in states}
    is_type_wanted = not types or g.CLASSIC in {each.lower() for each in types}
    listed: list[g.ListedGroup] = []
    for term in terms.loaded():
        listed += [
            g.ListedGroup(group.group_id, group.protocol_type or "", group.state.value)
            for group in term.groups.values()
            if is_type_wanted and not group.is_being_deleted and (not wanted or group.state.value.lower() in wanted)
        ]
        yield
    code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if terms.is_loading else ErrorCode.NONE
    return g.ListGroupsResponse(0, code, listed[: g.MAX_GROUPS])
