"""What groups there are, and what one is like: DescribeGroups and ListGroups. Reads, and decides nothing.

A coordinator that was deposed without hearing of it describes its groups as they used to be. Nothing is lost by that:
whoever changes a group asks its coordinator for it, which looks again.
"""

from collections.abc import Sequence

from minibroker.broker.groups.states import GroupState
from minibroker.broker.groups.terms import Terms
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g


def describe(terms: Terms, group_id: str) -> g.DescribedGroup:
    """A group that is not known is Dead."""
    found = terms.find(group_id)
    if isinstance(found, ErrorCode):
        return g.DescribedGroup(found, group_id, "", "", "", [])
    _, group = found
    if group is None:
        return g.DescribedGroup(ErrorCode.NONE, group_id, GroupState.DEAD.value, "", "", [])
    is_settled = group.is_in(GroupState.STABLE)
    # Until the members have agreed, what they say in the protocol that they will choose means nothing.
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
    return g.DescribedGroup(
        ErrorCode.NONE, group_id, group.state.value, group.protocol_type or "", protocol_name, members
    )


def list_groups(terms: Terms, states: Sequence[str], types: Sequence[str]) -> g.ListGroupsResponse:
    """Those that this broker coordinates, in these states and of these types; none given: all.
    COORDINATOR_LOAD_IN_PROGRESS where there may be more."""
    wanted = {state.lower() for state in states}
    is_type_wanted = not types or g.CLASSIC in {each.lower() for each in types}
    listed = [
        g.ListedGroup(group.group_id, group.protocol_type or "", group.state.value)
        for term in terms.loaded()
        for group in term.groups.values()
        if is_type_wanted and not group.is_being_deleted and (not wanted or group.state.value.lower() in wanted)
    ]
    code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if terms.is_loading else ErrorCode.NONE
    return g.ListGroupsResponse(0, code, listed[: g.MAX_GROUPS])
