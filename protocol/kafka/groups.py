"""Kafka's schemas of groups: membership, committed offsets and administration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, structs
from minibroker.protocol.kafka.types import BOOL, BYTES, INT16, INT32, INT64, STRING, Array
from minibroker.protocol.messages import groups as g

NEVER = 2**15
"""A version that no API reaches."""

# --- OffsetCommit (8) ----------------------------------------------------------------------------------------


def _offset_commit_failed(request: g.OffsetCommitRequest, code: ErrorCode, message: str) -> g.OffsetCommitResponse:
    return g.OffsetCommitResponse(
        0,
        [
            g.OffsetCommitTopicResponse(
                topic.name, [g.OffsetCommitPartitionResponse(part.partition_index, code) for part in topic.partitions]
            )
            for topic in request.topics
        ],
    )


_COMMITTED_TOPIC = Schema(
    g.OffsetCommitTopicResponse,
    Field("name", STRING),
    Field(
        "partitions",
        structs(g.OffsetCommitPartitionResponse, Field("partition_index", INT32), Field("error_code", INT16)),
    ),
)

OFFSET_COMMIT = KafkaApi(
    apis.OFFSET_COMMIT,
    2,
    9,
    first_flexible=8,
    request=Schema(
        g.OffsetCommitRequest,
        Field("group_id", STRING),
        Field("generation_id", INT32),
        Field("member_id", STRING),
        Field("group_instance_id", STRING, "7+", nullable="7+", default=None),
        Field("retention_time_ms", INT64, "2-4", default=-1),
        Field(
            "topics",
            structs(
                g.OffsetCommitTopic,
                Field("name", STRING),
                Field(
                    "partitions",
                    structs(
                        g.OffsetCommitPartition,
                        Field("partition_index", INT32),
                        Field("committed_offset", INT64),
                        Field("committed_leader_epoch", INT32, "6+", default=-1),
                        Field("committed_metadata", STRING, nullable="0+"),
                    ),
                ),
            ),
        ),
    ),
    response=Schema(
        g.OffsetCommitResponse,
        Field("throttle_time_ms", INT32, "3+", default=0),
        Field("topics", Array(_COMMITTED_TOPIC)),
    ),
    failed=_offset_commit_failed,
)

# --- OffsetFetch (9) -----------------------------------------------------------------------------------------


class _OffsetFetchRequest(m.Message):
    """One group up to version 7, several from 8 on (KIP-709)."""

    group_id: g.GroupId
    topics: Annotated[list[g.OffsetFetchTopic], Meta(max_length=m.MAX_TOPICS)] | None
    groups: Annotated[list[g.OffsetFetchGroup], Meta(max_length=g.MAX_GROUPS)]
    require_stable: bool


class _OffsetFetchResponse(m.Message):
    throttle_time_ms: m.Int32
    topics: list[g.OffsetFetchTopicResponse]
    error_code: m.Int16
    groups: list[g.OffsetFetchGroupResponse]


def _offset_fetch_request(wire: _OffsetFetchRequest, version: int) -> g.OffsetFetchRequest:
    groups = wire.groups if version >= 8 else [g.OffsetFetchGroup(wire.group_id, wire.topics)]
    return g.OffsetFetchRequest(groups, wire.require_stable)


def _offset_fetch_response(ours: g.OffsetFetchResponse, version: int) -> _OffsetFetchResponse:
    first = ours.groups[0] if ours.groups else g.OffsetFetchGroupResponse("", [], ErrorCode.NONE)
    return _OffsetFetchResponse(ours.throttle_time_ms, first.topics, first.error_code, ours.groups)


def _offset_fetch_failed(request: g.OffsetFetchRequest, code: ErrorCode, message: str) -> g.OffsetFetchResponse:
    return g.OffsetFetchResponse(0, [g.refused_offset_fetch(group, code) for group in request.groups])


_OFFSET_FETCH_TOPIC = Schema(g.OffsetFetchTopic, Field("name", STRING), Field("partition_indexes", Array(INT32)))
_FETCHED_TOPIC = Schema(
    g.OffsetFetchTopicResponse,
    Field("name", STRING),
    Field(
        "partitions",
        structs(
            g.OffsetFetchPartition,
            Field("partition_index", INT32),
            Field("committed_offset", INT64),
            Field("committed_leader_epoch", INT32, "5+", default=-1),
            Field("metadata", STRING, nullable="0+"),
            Field("error_code", INT16),
        ),
    ),
)

OFFSET_FETCH = KafkaApi(
    apis.OFFSET_FETCH,
    1,
    9,
    first_flexible=6,
    request=Schema(
        _OffsetFetchRequest,
        Field("group_id", STRING, "0-7", default=""),
        Field("topics", Array(_OFFSET_FETCH_TOPIC), "0-7", nullable="2-7", default=None),
        Field(
            "groups",
            structs(
                g.OffsetFetchGroup,
                Field("group_id", STRING),
                Field("member_id", STRING, "9+", nullable="9+", default=None),  # for KIP-848's groups
                Field("member_epoch", INT32, "9+", default=-1),
                Field("topics", Array(_OFFSET_FETCH_TOPIC), nullable="8+"),
            ),
            "8+",
            default=[],
        ),
        Field("require_stable", BOOL, "7+", default=False),
    ),
    response=Schema(
        _OffsetFetchResponse,
        Field("throttle_time_ms", INT32, "3+", default=0),
        Field("topics", Array(_FETCHED_TOPIC), "0-7", default=[]),
        Field("error_code", INT16, "2-7", default=0),
        Field(
            "groups",
            structs(
                g.OffsetFetchGroupResponse,
                Field("group_id", STRING),
                Field("topics", Array(_FETCHED_TOPIC)),
                Field("error_code", INT16),
            ),
            "8+",
            default=[],
        ),
    ),
    to_ours=_offset_fetch_request,
    from_ours=_offset_fetch_response,
    failed=_offset_fetch_failed,
)

# --- JoinGroup (11) ------------------------------------------------------------------------------------------


def _join_group_request(ours: g.JoinGroupRequest, version: int) -> g.JoinGroupRequest:
    if version == 0:
        ours.rebalance_timeout_ms = ours.session_timeout_ms
    ours.requires_known_member_id = version >= 4  # KIP-394: older clients do not join a second time
    return ours


def _join_group_response(ours: g.JoinGroupResponse, version: int) -> g.JoinGroupResponse:
    if version < 7 and ours.protocol_name is None:
        return msgspec.structs.replace(ours, protocol_name="")
    return ours


JOIN_GROUP = KafkaApi(
    apis.JOIN_GROUP,
    0,
    9,
    first_flexible=6,
    request=Schema(
        g.JoinGroupRequest,
        Field("group_id", STRING),
        Field("session_timeout_ms", INT32),
        Field("rebalance_timeout_ms", INT32, "1+", default=-1),
        Field("member_id", STRING),
        Field("group_instance_id", STRING, "5+", nullable="5+", default=None),
        Field("protocol_type", STRING),
        Field("protocols", structs(g.JoinGroupProtocol, Field("name", STRING), Field("metadata", BYTES))),
        Field("reason", STRING, "8+", nullable="8+", default=None),
    ),
    response=Schema(
        g.JoinGroupResponse,
        Field("throttle_time_ms", INT32, "2+", default=0),
        Field("error_code", INT16),
        Field("generation_id", INT32),
        Field("protocol_type", STRING, "7+", nullable="7+", default=None),
        Field("protocol_name", STRING, nullable="7+"),
        Field("leader", STRING),
        Field("skip_assignment", BOOL, "9+", default=False),
        Field("member_id", STRING),
        Field(
            "members",
            structs(
                g.JoinGroupMember,
                Field("member_id", STRING),
                Field("group_instance_id", STRING, "5+", nullable="5+", default=None),
                Field("metadata", BYTES),
            ),
        ),
    ),
    to_ours=_join_group_request,
    from_ours=_join_group_response,
    failed=lambda request, code, message: g.JoinGroupResponse(0, code, member_id=request.member_id),
)

# --- Heartbeat (12) ------------------------------------------------------------------------------------------

HEARTBEAT = KafkaApi(
    apis.HEARTBEAT,
    0,
    4,
    first_flexible=4,
    request=Schema(
        g.HeartbeatRequest,
        Field("group_id", STRING),
        Field("generation_id", INT32),
        Field("member_id", STRING),
        Field("group_instance_id", STRING, "3+", nullable="3+", default=None),
    ),
    response=Schema(g.HeartbeatResponse, Field("throttle_time_ms", INT32, "1+", default=0), Field("error_code", INT16)),
    failed=lambda request, code, message: g.HeartbeatResponse(0, code),
)

# --- LeaveGroup (13) -----------------------------------------------------------------------------------------


class _LeaveGroupRequest(m.Message):
    """One member up to version 2, several from 3 on (KIP-345)."""

    group_id: g.GroupId
    member_id: g.MemberId
    members: Annotated[list[g.LeavingMember], Meta(max_length=g.MAX_MEMBERS)]


def _leave_group_request(wire: _LeaveGroupRequest, version: int) -> g.LeaveGroupRequest:
    members = wire.members if version >= 3 else [g.LeavingMember(wire.member_id, None)]
    return g.LeaveGroupRequest(wire.group_id, members)


def _leave_group_response(ours: g.LeaveGroupResponse, version: int) -> g.LeaveGroupResponse:
    if version < 3 and not ours.error_code and ours.members:
        return msgspec.structs.replace(ours, error_code=ours.members[0].error_code)
    return ours


LEAVE_GROUP = KafkaApi(
    apis.LEAVE_GROUP,
    0,
    5,
    first_flexible=4,
    request=Schema(
        _LeaveGroupRequest,
        Field("group_id", STRING),
        Field("member_id", STRING, "0-2", default=""),
        Field(
            "members",
            structs(
                g.LeavingMember,
                Field("member_id", STRING),
                Field("group_instance_id", STRING, nullable="3+"),
                Field("reason", STRING, "5+", nullable="5+", default=None),
            ),
            "3+",
            default=[],
        ),
    ),
    response=Schema(
        g.LeaveGroupResponse,
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field("error_code", INT16),
        Field(
            "members",
            structs(
                g.LeavingMemberResponse,
                Field("member_id", STRING),
                Field("group_instance_id", STRING, nullable="3+"),
                Field("error_code", INT16),
            ),
            "3+",
            default=[],
        ),
    ),
    to_ours=_leave_group_request,
    from_ours=_leave_group_response,
    failed=lambda request, code, message: g.LeaveGroupResponse(0, code, []),
)

# --- SyncGroup (14) ------------------------------------------------------------------------------------------

SYNC_GROUP = KafkaApi(
    apis.SYNC_GROUP,
    0,
    5,
    first_flexible=4,
    request=Schema(
        g.SyncGroupRequest,
        Field("group_id", STRING),
        Field("generation_id", INT32),
        Field("member_id", STRING),
        Field("group_instance_id", STRING, "3+", nullable="3+", default=None),
        Field("protocol_type", STRING, "5+", nullable="5+", default=None),
        Field("protocol_name", STRING, "5+", nullable="5+", default=None),
        Field("assignments", structs(g.SyncGroupAssignment, Field("member_id", STRING), Field("assignment", BYTES))),
    ),
    response=Schema(
        g.SyncGroupResponse,
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field("error_code", INT16),
        Field("protocol_type", STRING, "5+", nullable="5+", default=None),
        Field("protocol_name", STRING, "5+", nullable="5+", default=None),
        Field("assignment", BYTES),
    ),
    failed=lambda request, code, message: g.SyncGroupResponse(0, code),
)

# --- DescribeGroups (15), ListGroups (16), DeleteGroups (42) -------------------------------------------------

DESCRIBE_GROUPS = KafkaApi(
    apis.DESCRIBE_GROUPS,
    0,
    5,
    first_flexible=5,
    request=Schema(
        g.DescribeGroupsRequest,
        Field("groups", Array(STRING)),
        Field("include_authorized_operations", BOOL, "3+", default=False),
    ),
    response=Schema(
        g.DescribeGroupsResponse,
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field(
            "groups",
            structs(
                g.DescribedGroup,
                Field("error_code", INT16),
                Field("group_id", STRING),
                Field("group_state", STRING),
                Field("protocol_type", STRING),
                Field("protocol_data", STRING),
                Field(
                    "members",
                    structs(
                        g.DescribedGroupMember,
                        Field("member_id", STRING),
                        Field("group_instance_id", STRING, "4+", nullable="4+", default=None),
                        Field("client_id", STRING),
                        Field("client_host", STRING),
                        Field("member_metadata", BYTES),
                        Field("member_assignment", BYTES),
                    ),
                ),
                Field("authorized_operations", INT32, "3+", default=m.NO_OPERATIONS),
            ),
        ),
    ),
    failed=lambda request, code, message: g.DescribeGroupsResponse(
        0, [g.DescribedGroup(code, group_id, "", "", "", []) for group_id in request.groups]
    ),
)

LIST_GROUPS = KafkaApi(
    apis.LIST_GROUPS,
    0,
    5,
    first_flexible=3,
    request=Schema(
        g.ListGroupsRequest, Field("states_filter", Array(STRING), "4+"), Field("types_filter", Array(STRING), "5+")
    ),
    response=Schema(
        g.ListGroupsResponse,
        Field("throttle_time_ms", INT32, "1+", default=0),
        Field("error_code", INT16),
        Field(
            "groups",
            structs(
                g.ListedGroup,
                Field("group_id", STRING),
                Field("protocol_type", STRING),
                Field("group_state", STRING, "4+", default=""),
                Field("group_type", STRING, "5+", default=g.CLASSIC),
            ),
        ),
    ),
    failed=lambda request, code, message: g.ListGroupsResponse(0, code, []),
)

DELETE_GROUPS = KafkaApi(
    apis.DELETE_GROUPS,
    0,
    2,
    first_flexible=2,
    request=Schema(g.DeleteGroupsRequest, Field("groups_names", Array(STRING))),
    response=Schema(
        g.DeleteGroupsResponse,
        Field("throttle_time_ms", INT32),
        Field("results", structs(g.DeletableGroupResult, Field("group_id", STRING), Field("error_code", INT16))),
    ),
    failed=lambda request, code, message: g.DeleteGroupsResponse(
        0, [g.DeletableGroupResult(group_id, code) for group_id in request.groups_names]
    ),
)

# --- OffsetDelete (47) ---------------------------------------------------------------------------------------


class _OffsetDeletePartition(m.Message):
    partition_index: m.Int32


class _OffsetDeleteTopic(m.Message):
    name: m.Name
    partitions: Annotated[list[_OffsetDeletePartition], Meta(max_length=m.MAX_PARTITIONS)]


class _OffsetDeleteRequest(m.Message):
    group_id: g.GroupId
    topics: Annotated[list[_OffsetDeleteTopic], Meta(max_length=m.MAX_TOPICS)]


def _offset_delete_request(wire: _OffsetDeleteRequest, version: int) -> g.OffsetDeleteRequest:
    topics = [
        g.OffsetDeleteTopic(topic.name, [one.partition_index for one in topic.partitions]) for topic in wire.topics
    ]
    return g.OffsetDeleteRequest(wire.group_id, topics)


OFFSET_DELETE = KafkaApi(
    apis.OFFSET_DELETE,
    0,
    0,
    first_flexible=NEVER,
    request=Schema(
        _OffsetDeleteRequest,
        Field("group_id", STRING),
        Field(
            "topics",
            structs(
                _OffsetDeleteTopic,
                Field("name", STRING),
                Field("partitions", structs(_OffsetDeletePartition, Field("partition_index", INT32))),
            ),
        ),
    ),
    response=Schema(
        g.OffsetDeleteResponse,
        Field("error_code", INT16),
        Field("throttle_time_ms", INT32),
        Field("topics", Array(_COMMITTED_TOPIC)),
    ),
    to_ours=_offset_delete_request,
    failed=lambda request, code, message: g.OffsetDeleteResponse(code, 0, []),
)

APIS = (
    OFFSET_COMMIT,
    OFFSET_FETCH,
    JOIN_GROUP,
    HEARTBEAT,
    LEAVE_GROUP,
    SYNC_GROUP,
    DESCRIBE_GROUPS,
    LIST_GROUPS,
    DELETE_GROUPS,
    OFFSET_DELETE,
)
