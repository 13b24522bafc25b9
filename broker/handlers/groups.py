"""The requests of groups: find a coordinator, members, and offsets. Labels R1..R7: ARCHITECTURE.md."""

from minibroker.broker.groups.listing import describe, list_groups
from minibroker.broker.handlers.authorized_operations import ON_GROUP
from minibroker.broker.handlers.producer_ids import NO_TRANSACTIONS, warn_of_transactions
from minibroker.broker.handlers.services import Services, answer_later, check_named_once
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.kafka.primitives import MAX_STRING_BYTES
from minibroker.protocol.messages import groups as g
from minibroker.protocol.model import (
    NO_EPOCH,
    NO_LEADER,
    OFFSETS_TOPIC,
    TopicPartition,
    offsets_partition,
)

DELETION_TIMEOUT_MS = 30_000
"""The limit for all groups of a request together."""
GROUP_KEY, TRANSACTION_KEY = 0, 1
"""The `key_type` of FindCoordinator."""
NO_METADATA = "this broker has not received the cluster's metadata yet"


async def handle_find_coordinator(services: Services, request: Request, body: g.FindCoordinatorRequest) -> None:
    """R1. Return the broker that leads the group's partition of `__consumer_offsets`. COORDINATOR_NOT_AVAILABLE: there
    is none yet, so the client should ask again; the message says why.

    There are no transactions yet, and each client should give up with a reason. librdkafka retries all errors of
    FindCoordinator except for two of authorization, whose message it prints. franz-go retries all of them without a
    pause, so it is sent to this broker, whose answer to InitProducerId it accepts as final. The other clients give up
    in either case.
    """
    coordinators = [_coordinator(services, request, body, key) for key in body.coordinator_keys]
    request.respond(g.FindCoordinatorResponse(0, coordinators))


def _coordinator(services: Services, request: Request, body: g.FindCoordinatorRequest, key: str) -> g.Coordinator:
    def refuse(code: ErrorCode, message: str) -> g.Coordinator:
        return g.Coordinator(key, -1, "", -1, code, message)

    if body.key_type == TRANSACTION_KEY:
        if body.gives_up_at_init:
            me = services.configs.static.broker_id
            endpoint = services.metadata.listener_endpoint(me, request.listener)
            if endpoint is None:
                return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, NO_METADATA)
            return g.Coordinator(key, me, endpoint.host, endpoint.port, ErrorCode.NONE)
        warn_of_transactions(request, key)
        return refuse(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, NO_TRANSACTIONS)
    if body.key_type != GROUP_KEY:
        return refuse(ErrorCode.INVALID_REQUEST, f"key type {body.key_type}: there are groups (0) and transactions (1)")
    partitions = services.metadata.partition_count(OFFSETS_TOPIC)
    if services.metadata.told_all_epoch == NO_EPOCH:
        return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, NO_METADATA)
    if not partitions:
        services.auto_topic_creation.create_soon([OFFSETS_TOPIC])
        return refuse(ErrorCode.COORDINATOR_NOT_AVAILABLE, services.auto_topic_creation.why_missing(OFFSETS_TOPIC))
    topic_partition = TopicPartition(OFFSETS_TOPIC, offsets_partition(key, partitions))
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
        topic_id=services.metadata.topic_id(OFFSETS_TOPIC) or "",
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
    services.groups.members.join(body, request.client_id or "", host, request.respond, lambda: request.closed)


async def handle_sync_group(services: Services, request: Request, body: g.SyncGroupRequest) -> None:
    services.groups.members.sync(body, request.respond)


async def handle_heartbeat(services: Services, request: Request, body: g.HeartbeatRequest) -> None:
    request.respond(g.HeartbeatResponse(0, services.groups.members.heartbeat(body)))


async def handle_leave_group(services: Services, request: Request, body: g.LeaveGroupRequest) -> None:
    request.respond(services.groups.members.leave(body))


async def handle_offset_commit(services: Services, request: Request, body: g.OffsetCommitRequest) -> None:
    services.groups.commits.commit(body, lambda topics: request.respond(g.OffsetCommitResponse(0, topics)))


async def handle_offset_fetch(services: Services, request: Request, body: g.OffsetFetchRequest) -> None:
    check_named_once("a group", [group.group_id for group in body.groups])
    services.groups.commits.fetch(body, request.respond)


async def handle_offset_delete(services: Services, request: Request, body: g.OffsetDeleteRequest) -> None:
    services.groups.commits.delete(body, request.respond)


async def handle_describe_groups(services: Services, request: Request, body: g.DescribeGroupsRequest) -> None:
    # each once: a description may be large, and a small request could name a group often
    groups = [describe(services.groups.terms, group_id) for group_id in dict.fromkeys(body.groups)]
    if body.include_authorized_operations:
        for group in groups:
            if group.error_code == ErrorCode.NONE:
                group.authorized_operations = ON_GROUP
    request.respond(g.DescribeGroupsResponse(0, groups))


async def handle_list_groups(services: Services, request: Request, body: g.ListGroupsRequest) -> None:
    request.respond(list_groups(services.groups.terms, body.states_filter, body.types_filter))


async def handle_delete_groups(services: Services, request: Request, body: g.DeleteGroupsRequest) -> None:
    """Answer once the log has the tombstones."""

    async def delete() -> None:
        codes = {
            group_id: await services.groups.removal.delete(group_id, body.attempt)
            for group_id in dict.fromkeys(body.groups_names)
        }
        results = [g.DeletableGroupResult(group_id, code) for group_id, code in codes.items()]
        request.respond(g.DeleteGroupsResponse(0, results))

    answer_later(services, request, DELETION_TIMEOUT_MS, delete)
