"""Answers to the requests of members that wait for them."""

from minibroker.broker.groups.group import NO_GENERATION, MemberMetadata, never
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g


def refused_join(code: ErrorCode, member_id: str) -> g.JoinGroupResponse:
    return g.JoinGroupResponse(0, code, NO_GENERATION, member_id=member_id)


def settle(member: MemberMetadata, *, is_assigned: bool = False) -> None:
    """The end of its connection is no longer of interest."""
    member.is_assigned = member.is_assigned or is_assigned
    if member.connection is not None:
        member.connection.not_at_end(member)
        member.connection = None


def answer_join(member: MemberMetadata, response: g.JoinGroupResponse) -> None:
    waiter, member.join_waiter = member.join_waiter, None
    member.is_gone = never
    if waiter is not None:
        waiter(response)


def answer_sync(member: MemberMetadata, response: g.SyncGroupResponse) -> None:
    waiter, member.sync_waiter = member.sync_waiter, None
    if waiter is not None:
        waiter(response)
