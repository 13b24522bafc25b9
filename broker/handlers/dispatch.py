"""The dispatch table: the handler of each API (Kafka's KafkaApis)."""

from collections.abc import Awaitable, Callable
from typing import Any

from minibroker.broker.handlers.administering.configs import (
    handle_alter_configs,
    handle_describe_configs,
    handle_incremental_alter_configs,
)
from minibroker.broker.handlers.administering.delete_records import handle_delete_records
from minibroker.broker.handlers.administering.log_dirs import handle_alter_replica_log_dirs, handle_describe_log_dirs
from minibroker.broker.handlers.administering.shutdown import handle_controlled_shutdown
from minibroker.broker.handlers.administering.timeline import handle_describe_timeline
from minibroker.broker.handlers.authentication import handle_broker_authenticate, handle_broker_handshake
from minibroker.broker.handlers.control import handle_leader_and_isr, handle_stop_replica, handle_update_metadata
from minibroker.broker.handlers.fetch import handle_fetch
from minibroker.broker.handlers.forwarding import CONTROLLER_HANDLERS, handle_envelope, handle_or_forward
from minibroker.broker.handlers.groups import (
    handle_delete_groups,
    handle_describe_groups,
    handle_find_coordinator,
    handle_heartbeat,
    handle_join_group,
    handle_leave_group,
    handle_list_groups,
    handle_offset_commit,
    handle_offset_delete,
    handle_offset_fetch,
    handle_sync_group,
)
from minibroker.broker.handlers.list_offsets import handle_list_offsets, handle_offset_for_leader_epoch
from minibroker.broker.handlers.metadata import handle_api_versions, handle_describe_cluster, handle_metadata
from minibroker.broker.handlers.produce import handle_produce
from minibroker.broker.handlers.producer_ids import handle_describe_producers, handle_init_producer_id
from minibroker.broker.handlers.services import Services
from minibroker.broker.network.handler_pool import Continuation, RequestHandler
from minibroker.broker.network.request_channel import Request
from minibroker.protocol import apis

Handler = Callable[[Services, Request, Any], Awaitable[Continuation | None]]

HANDLERS: dict[int, Handler] = {
    apis.PRODUCE.key: handle_produce,
    apis.FETCH.key: handle_fetch,
    apis.LIST_OFFSETS.key: handle_list_offsets,
    apis.METADATA.key: handle_metadata,
    apis.LEADER_AND_ISR.key: handle_leader_and_isr,
    apis.STOP_REPLICA.key: handle_stop_replica,
    apis.UPDATE_METADATA.key: handle_update_metadata,
    apis.CONTROLLED_SHUTDOWN.key: handle_controlled_shutdown,
    apis.OFFSET_COMMIT.key: handle_offset_commit,
    apis.OFFSET_FETCH.key: handle_offset_fetch,
    apis.FIND_COORDINATOR.key: handle_find_coordinator,
    apis.JOIN_GROUP.key: handle_join_group,
    apis.HEARTBEAT.key: handle_heartbeat,
    apis.LEAVE_GROUP.key: handle_leave_group,
    apis.SYNC_GROUP.key: handle_sync_group,
    apis.DESCRIBE_GROUPS.key: handle_describe_groups,
    apis.LIST_GROUPS.key: handle_list_groups,
    apis.API_VERSIONS.key: handle_api_versions,
    **dict.fromkeys(CONTROLLER_HANDLERS, handle_or_forward),
    apis.DELETE_RECORDS.key: handle_delete_records,
    apis.INIT_PRODUCER_ID.key: handle_init_producer_id,
    apis.OFFSET_FOR_LEADER_EPOCH.key: handle_offset_for_leader_epoch,
    apis.DESCRIBE_CONFIGS.key: handle_describe_configs,
    apis.ALTER_CONFIGS.key: handle_alter_configs,
    apis.ALTER_REPLICA_LOG_DIRS.key: handle_alter_replica_log_dirs,
    apis.DESCRIBE_LOG_DIRS.key: handle_describe_log_dirs,
    apis.DELETE_GROUPS.key: handle_delete_groups,
    apis.OFFSET_DELETE.key: handle_offset_delete,
    apis.INCREMENTAL_ALTER_CONFIGS.key: handle_incremental_alter_configs,
    apis.ENVELOPE.key: handle_envelope,
    apis.DESCRIBE_CLUSTER.key: handle_describe_cluster,
    apis.DESCRIBE_PRODUCERS.key: handle_describe_producers,
    apis.DESCRIBE_TIMELINE.key: handle_describe_timeline,
    apis.BROKER_HANDSHAKE.key: handle_broker_handshake,
    apis.BROKER_AUTHENTICATE.key: handle_broker_authenticate,
}


def dispatcher(services: Services) -> RequestHandler:
    """Return the function that the server calls for each request. It raises BrokerError if the sender may not send this
    request (`Api.caller`); the server answers a BrokerError with its code."""

    def dispatch(request: Request) -> Awaitable[Continuation | None]:
        if request.api.caller is not apis.Caller.ANYBODY:
            services.authorizer.check(request)
        return HANDLERS[request.api.key](services, request, request.body)

    return dispatch
