"""Requests about groups: membership, committed offsets and administration.

`group_instance_id` is the name of a static member (KIP-345), None for a dynamic one. A client that is no member commits
offsets with `generation_id` -1 and an empty `member_id`; a group without members accepts them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from minibroker.protocol.messages.fields import (
    MAX_PARTITIONS,
    MAX_TOPICS,
    NO_OPERATIONS,
    Attempt,
    Int8,
    Int16,
    Int32,
    Int64,
    Message,
    Name,
    String,
    TopicId,
    TopicName,
)

MAX_MEMBERS = 10_000
"""Members of a group in one message."""
MAX_GROUPS = 100_000
MAX_PROTOCOLS = 100
MAX_REBALANCES = 100
CLASSIC = "classic"
"""The type of every group; groups of KIP-848 are not supported."""

GroupId = String
MemberId = String
Opaque = Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
"""A subscription or an assignment, which only members read (see `consumer_protocol`)."""


# --- FindCoordinator (10) ------------------------------------------------------------------------------------


class FindCoordinatorRequest(Message):
    key_type: Int8
    """0: groups, 1: transactions."""
    coordinator_keys: Annotated[list[GroupId], Meta(max_length=MAX_GROUPS)]


class Coordinator(Message):
    key: GroupId
    node_id: Int32
    host: String
    port: Int32
    error_code: Int16
    error_message: String | None = None
    leader_epoch: Int32 = -1
    """The leader epoch of the group's partition of `__consumer_offsets` according to the broker that answers, for
    `Attempt`; -1: unknown."""
    topic_id: TopicId = ""
    """The id of `__consumer_offsets`; epochs of a topic with another id do not compare."""


class FindCoordinatorResponse(Message):
    throttle_time_ms: Int32
    coordinators: Annotated[list[Coordinator], Meta(max_length=MAX_GROUPS)]


# --- JoinGroup (11) ------------------------------------------------------------------------------------------


class JoinGroupProtocol(Message):
    name: String
    metadata: Opaque


class JoinGroupRequest(Message):
    group_id: GroupId
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    member_id: MemberId
    group_instance_id: String | None
    protocol_type: String
    protocols: Annotated[list[JoinGroupProtocol], Meta(max_length=MAX_PROTOCOLS)]
    reason: String | None = None
    """KIP-800."""
    requires_known_member_id: bool = True
    """A member without an id receives one and joins again with it (KIP-394). False for older clients."""


class JoinGroupMember(Message):
    member_id: MemberId
    group_instance_id: String | None
    metadata: Opaque


class JoinGroupResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    generation_id: Int32 = -1
    protocol_type: String | None = None
    protocol_name: String | None = None
    leader: MemberId = ""
    skip_assignment: bool = False
    """The leader is a static member that came back: the assignment stands (KIP-814)."""
    member_id: MemberId = ""
    """With MEMBER_ID_REQUIRED, the id to join with (KIP-394)."""
    members: Annotated[list[JoinGroupMember], Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    """For the leader alone."""
    error_message: String | None = None
    """Details of the error (not in Kafka)."""


# --- SyncGroup (14) ------------------------------------------------------------------------------------------


class SyncGroupAssignment(Message):
    member_id: MemberId
    assignment: Opaque


class SyncGroupRequest(Message):
    group_id: GroupId
    generation_id: Int32
    member_id: MemberId
    group_instance_id: String | None
    protocol_type: String | None
    protocol_name: String | None
    assignments: Annotated[list[SyncGroupAssignment], Meta(max_length=MAX_MEMBERS)]
    """From the leader; empty from other members."""


class SyncGroupResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    protocol_type: String | None = None
    protocol_name: String | None = None
    assignment: Opaque = b""


# --- Heartbeat (12), LeaveGroup (13) -------------------------------------------------------------------------


class HeartbeatRequest(Message):
    group_id: GroupId
    generation_id: Int32
    member_id: MemberId
    group_instance_id: String | None


class HeartbeatResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16


class LeavingMember(Message):
    member_id: MemberId
    """Empty if a static member is removed by its name."""
    group_instance_id: String | None
    reason: String | None = None


class LeaveGroupRequest(Message):
    group_id: GroupId
    members: Annotated[list[LeavingMember], Meta(max_length=MAX_MEMBERS)]


class LeavingMemberResponse(Message):
    member_id: MemberId
    group_instance_id: String | None
    error_code: Int16


class LeaveGroupResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    members: Annotated[list[LeavingMemberResponse], Meta(max_length=MAX_MEMBERS)]


# --- OffsetCommit (8), OffsetFetch (9), OffsetDelete (47) ----------------------------------------------------


class OffsetCommitPartition(Message):
    partition_index: Int32
    committed_offset: Int64
    committed_leader_epoch: Int32
    """The epoch of the last record before the offset; -1: unknown (KIP-320)."""
    committed_metadata: String | None = None


class OffsetCommitTopic(Message):
    name: TopicName
    partitions: Annotated[list[OffsetCommitPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id of the topic that was read. Commits for another topic of the name fail (INCONSISTENT_TOPIC_ID)."""


class OffsetCommitRequest(Message):
    group_id: GroupId
    generation_id: Int32
    member_id: MemberId
    group_instance_id: String | None
    topics: Annotated[list[OffsetCommitTopic], Meta(max_length=MAX_TOPICS)]
    attempt: Attempt | None = None


class OffsetCommitPartitionResponse(Message):
    partition_index: Int32
    error_code: Int16


class OffsetCommitTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[OffsetCommitPartitionResponse], Meta(max_length=MAX_PARTITIONS)]


class OffsetCommitResponse(Message):
    throttle_time_ms: Int32
    topics: Annotated[list[OffsetCommitTopicResponse], Meta(max_length=MAX_TOPICS)]


class OffsetFetchTopic(Message):
    name: TopicName
    partition_indexes: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class OffsetFetchGroup(Message):
    group_id: GroupId
    topics: Annotated[list[OffsetFetchTopic], Meta(max_length=MAX_TOPICS)] | None
    """None: all offsets that the group has committed."""


class OffsetFetchRequest(Message):
    groups: Annotated[list[OffsetFetchGroup], Meta(max_length=MAX_GROUPS)]
    require_stable: bool = False
    """Fail with UNSTABLE_OFFSET_COMMIT while a transaction is about to commit an offset (KIP-447)."""


class OffsetFetchPartition(Message):
    partition_index: Int32
    committed_offset: Int64
    """-1: nothing is committed."""
    committed_leader_epoch: Int32
    metadata: String | None
    error_code: Int16


class OffsetFetchTopicResponse(Message):
    name: TopicName
    partitions: Annotated[list[OffsetFetchPartition], Meta(max_length=MAX_PARTITIONS)]
    topic_id: TopicId = ""
    """The id of the topic for which the offsets were committed; empty: unknown."""


class OffsetFetchGroupResponse(Message):
    group_id: GroupId
    topics: Annotated[list[OffsetFetchTopicResponse], Meta(max_length=MAX_TOPICS)]
    error_code: Int16


class OffsetFetchResponse(Message):
    throttle_time_ms: Int32
    groups: Annotated[list[OffsetFetchGroupResponse], Meta(max_length=MAX_GROUPS)]


def refused_offset_fetch(group: OffsetFetchGroup, error_code: int) -> OffsetFetchGroupResponse:
    """Return the error for the group and for each requested partition, as the oldest clients expect."""
    topics = [
        OffsetFetchTopicResponse(
            topic.name, [OffsetFetchPartition(index, -1, -1, None, error_code) for index in topic.partition_indexes]
        )
        for topic in group.topics or ()
    ]
    return OffsetFetchGroupResponse(group.group_id, topics, error_code)


class OffsetDeleteTopic(Message):
    name: TopicName
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)]


class OffsetDeleteRequest(Message):
    group_id: GroupId
    topics: Annotated[list[OffsetDeleteTopic], Meta(max_length=MAX_TOPICS)]
    attempt: Attempt | None = None


class OffsetDeleteResponse(Message):
    error_code: Int16
    throttle_time_ms: Int32
    topics: Annotated[list[OffsetCommitTopicResponse], Meta(max_length=MAX_TOPICS)]


# --- DescribeGroups (15), ListGroups (16), DeleteGroups (42) -------------------------------------------------


class DescribeGroupsRequest(Message):
    groups: Annotated[list[GroupId], Meta(max_length=MAX_GROUPS)]
    include_authorized_operations: bool = False


class DescribedGroupMember(Message):
    member_id: MemberId
    group_instance_id: String | None
    client_id: String
    client_host: String
    member_metadata: Opaque
    member_assignment: Opaque


class DescribedRebalance(Message):
    time_ms: Int64
    """When it began, in milliseconds since 1970."""
    generation_id: Int32
    """The generation that it ended."""
    reason: String
    took_ms: Int64 = -1
    """Until the members had their assignments, or were all gone. -1: it is under way, or another one followed."""


class DescribedGroup(Message):
    error_code: Int16
    group_id: GroupId
    group_state: Name
    protocol_type: String
    protocol_data: String
    """The name of the protocol (the assignor) that the members have in common."""
    members: Annotated[list[DescribedGroupMember], Meta(max_length=MAX_MEMBERS)]
    authorized_operations: Int32 = NO_OPERATIONS
    rebalances: Annotated[list[DescribedRebalance], Meta(max_length=MAX_REBALANCES)] = msgspec.field(
        default_factory=list
    )
    """The last ones that this coordinator has begun, the oldest first (not in Kafka)."""


class DescribeGroupsResponse(Message):
    throttle_time_ms: Int32
    groups: Annotated[list[DescribedGroup], Meta(max_length=MAX_GROUPS)]


class ListGroupsRequest(Message):
    states_filter: Annotated[list[String], Meta(max_length=1_000)] = msgspec.field(default_factory=list)
    """Empty: all states (KIP-518)."""
    types_filter: Annotated[list[String], Meta(max_length=1_000)] = msgspec.field(default_factory=list)
    """Empty: all types (KIP-848). There is only "classic"."""


class ListedGroup(Message):
    group_id: GroupId
    protocol_type: String
    group_state: Name
    group_type: Name = CLASSIC


class ListGroupsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    groups: Annotated[list[ListedGroup], Meta(max_length=MAX_GROUPS)]


class DeleteGroupsRequest(Message):
    groups_names: Annotated[list[GroupId], Meta(max_length=MAX_GROUPS)]
    attempt: Attempt | None = None


class DeletableGroupResult(Message):
    group_id: GroupId
    error_code: Int16


class DeleteGroupsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[DeletableGroupResult], Meta(max_length=MAX_GROUPS)]
