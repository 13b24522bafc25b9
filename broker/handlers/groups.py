"""The requests of groups: find a coordinator, members, and offsets. Labels R1..R7: ARCHITECTURE.md."""

from functools import partial

from minibroker.broker.groups.commits import FetchSteps
from minibroker.broker.groups.listing import describe, list_groups
from minibroker.broker.handlers.services import Services, answer_later, check_named_once, respond_sized
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import Slices
from minibroker.protocol.acls import SUPPORTED_BITS, AclResourceType
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.kafka.primitives import MAX_STRING_BYTES
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.transactions import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from minibroker.protocol.model import (
    NO_EPOCH,
    NO_LEADER,
    OFFSETS_TOPIC,
    TRANSACTIONS_TOPIC,
    TopicPartition,
    internal_partition,
)

DELETION_TIMEOUT_MS = 30_000
"""The limit for all groups of a request together."""
TRANSACTIONAL_COMMIT_TIMEOUT_MS = 30_000
"""The limit for the question to the transaction's coordinator and the append together."""
MOST_COMMITTED_WITHOUT_PAUSE = 1_000
"""Partitions of a request whose offsets are committed without a pause."""
OFFSET_BYTES, MEMBER_BYTES, GROUP_BYTES = 32, 128, 32
"""What each takes in an answer beside its names, about."""
_TOPICS = {0: OFFSETS_TOPIC, 1: TRANSACTIONS_TOPIC}
"""The topic of each `key_type` of FindCoordinator: groups and transactional ids."""
NO_METADATA = "this broker has not received the cluster's metadata yet"


async def handle_find_coordinator(services: Services, request: Request, body: g.FindCoordinatorRequest) -> None:
    """R1, T1. Return the broker that leads the partition of the group or transactional id in its internal topic.
    COORDINATOR_NOT_AVAILABLE: there is none yet, so the client should ask again; the message says why."""
    coordinators = await Slices().map(partial(_coordinator, services, request, body), body.coordinator_keys)
    request.respond(g.FindCoordinatorResponse(0, coordinators))


def _coordinator(services: Services, request: Request, body: g.FindCoordinatorRequest, key: str) -> g.Coordinator:
    def refuse(code: ErrorCode, message: str) -> g.Coordinator:
        return g.Coordinator(key, -1, "", -1, code, message)

    topic = _TOPICS.get(body.key_type)
    if topic is None:
        return refuse(ErrorCode.INVALID_REQUEST, f"key type {body.key_type}: there are groups (0) and transactions (1)")
    partitions = services.metadata.partition_count(topic)
    if services.metadata.told_all_epoch == NO_EPOCH:
        return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, NO_METADATA)
    if not partitions:
        services.auto_topic_creation.create_soon([topic])
        return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, services.auto_topic_creation.why_missing(topic))
    topic_partition = TopicPartition(topic, internal_partition(key, partitions))
    state = services.metadata.partition(topic_partition)
    leader = NO_LEADER if state is None else state.leader
    endpoint = services.metadata.listener_endpoint(leader, request.listener)
    if endpoint is None:
        return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{topic_partition} has no leader now")
    assert state is not None
    return g.Coordinator(
        key,
        leader,
        endpoint.host,
        endpoint.port,
        ErrorCode.NONE,
        leader_epoch=state.leader_epoch,
        topic_id=services.metadata.topic_id(topic) or "",
    )


async def handle_join_group(services: Services, request: Request, body: g.JoinGroupRequest) -> None:
    """Raise BrokerError(INVALID_REQUEST) for a name that does not fit into a record of the group.

    As in Kafka, there is no other rule; the Java client's rule for group.instance.id is not the broker's.
    """
    protocols = [("a protocol's name", protocol.name) for protocol in body.protocols]
    for what, name in (
        ("group.instance.id", body.group_instance_id or ""),
        ("the protocol type", body.protocol_type),
        *protocols,
    ):
        size = len(name.encode())
        if size > MAX_STRING_BYTES:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"{what} has {size} bytes; at most {MAX_STRING_BYTES} are allowed"
            )
    host = request.peer.rpartition(":")[0]
    services.groups.members.join(
        body, request.client_id or "", host, request.respond, lambda: request.closed, request.session
    )


async def handle_sync_group(services: Services, request: Request, body: g.SyncGroupRequest) -> None:
    services.groups.members.sync(body, request.respond)


async def handle_heartbeat(services: Services, request: Request, body: g.HeartbeatRequest) -> None:
    request.respond(g.HeartbeatResponse(0, services.groups.members.heartbeat(body)))


async def handle_leave_group(services: Services, request: Request, body: g.LeaveGroupRequest) -> None:
    request.respond(services.groups.members.leave(body))


async def handle_offset_commit(services: Services, request: Request, body: g.OffsetCommitRequest) -> None:
    missing = await _set_aside_missing(services, body)
    services.groups.commits.commit(body, lambda topics: request.respond(g.OffsetCommitResponse(0, topics + missing)))


async def _set_aside_missing(services: Services, body: g.OffsetCommitRequest) -> list[g.OffsetCommitTopicResponse]:
    """Remove the partitions that do not exist from a large request, in slices, and return the answers for them."""
    if sum(len(topic.partitions) for topic in body.topics) <= MOST_COMMITTED_WITHOUT_PAUSE:
        return []
    slices = Slices()
    missing = []
    for topic in body.topics:
        present, refusals = [], []
        for part in topic.partitions:
            if services.metadata.partition(TopicPartition(topic.name, part.partition_index)) is not None:
                present.append(part)
            else:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                refusals.append(g.OffsetCommitPartitionResponse(part.partition_index, code))
            await slices.breathe()
        topic.partitions = present
        if refusals:
            missing.append(g.OffsetCommitTopicResponse(topic.name, refusals))
    body.topics = [topic for topic in body.topics if topic.partitions]
    return missing


async def handle_txn_offset_commit(services: Services, request: Request, body: TxnOffsetCommitRequest) -> None:
    """Answer once the offsets are in the log, as part of the transaction. Its coordinator is asked before."""

    async def commit() -> None:
        request.respond(TxnOffsetCommitResponse(0, await services.groups.transactional_commits.commit(body)))

    answer_later(services, request, TRANSACTIONAL_COMMIT_TIMEOUT_MS, commit)


async def handle_offset_fetch(services: Services, request: Request, body: g.OffsetFetchRequest) -> None:
    check_named_once("a group", [group.group_id for group in body.groups])

    def respond(offsets: int, steps: FetchSteps) -> None:
        respond_sized(services, request, offsets * OFFSET_BYTES, steps)

    services.groups.commits.fetch(body, respond)


async def handle_offset_delete(services: Services, request: Request, body: g.OffsetDeleteRequest) -> None:
    services.groups.commits.delete(body, request.respond)


async def handle_describe_groups(services: Services, request: Request, body: g.DescribeGroupsRequest) -> None:
    # each once: a description may be large, and a small request could name a group often
    groups = await Slices().map(partial(describe, services.groups.terms), dict.fromkeys(body.groups))
    if body.include_authorized_operations:
        for group in groups:
            if group.error_code == ErrorCode.NONE:
                group.authorized_operations = SUPPORTED_BITS[AclResourceType.GROUP]
    members = (member for group in groups for member in group.members)
    size = sum(len(each.member_metadata) + len(each.member_assignment) + MEMBER_BYTES for each in members)
    respond_sized(services, request, size, g.DescribeGroupsResponse(0, groups))


async def handle_list_groups(services: Services, request: Request, body: g.ListGroupsRequest) -> None:
    response = await Slices().finish(list_groups(services.groups.terms, body.states_filter, body.types_filter))
    size = sum(len(group.group_id) + GROUP_BYTES for group in response.groups)
    respond_sized(services, request, size, response)


async def handle_delete_groups(services: Services, request: Request, body: g.DeleteGroupsRequest) -> None:
    """Answer once the log has the tombstones."""

    async def delete() -> None:
        slices = Slices()
        results = []
        for group_id in dict.fromkeys(body.groups_names):
            code = await services.groups.removal.delete(group_id, body.attempt)
            results.append(g.DeletableGroupResult(group_id, code))
            await slices.breathe()
        request.respond(g.DeleteGroupsResponse(0, results))

    answer_later(services, request, DELETION_TIMEOUT_MS, delete)
