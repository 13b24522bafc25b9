"""The dispatch table: the handler of each API (Kafka's KafkaApis)."""

from collections.abc import Awaitable, Callable
from typing import Any

from minibroker.broker.handlers.access import passes_acls
from minibroker.broker.handlers.administering.acls import (
    handle_create_acls,
    handle_delete_acls,
    handle_describe_acls,
)
from minibroker.broker.handlers.administering.client_quotas import (
    handle_alter_client_quotas,
    handle_describe_client_quotas,
)
from minibroker.broker.handlers.administering.configs import (
    handle_alter_configs,
    handle_describe_configs,
    handle_incremental_alter_configs,
)
from minibroker.broker.handlers.administering.delete_records import handle_delete_records
from minibroker.broker.handlers.administering.health import handle_describe_health
from minibroker.broker.handlers.administering.log_dirs import handle_alter_replica_log_dirs, handle_describe_log_dirs
from minibroker.broker.handlers.administering.producers import handle_describe_producers
from minibroker.broker.handlers.administering.scram_credentials import (
    handle_alter_user_scram_credentials,
    handle_describe_user_scram_credentials,
)
from minibroker.broker.handlers.administering.shutdown import handle_controlled_shutdown
from minibroker.broker.handlers.administering.timeline import handle_describe_timeline
from minibroker.broker.handlers.authentication import (
    handle_broker_authenticate,
    handle_broker_handshake,
    handle_sasl_authenticate,
    handle_sasl_handshake,
)
from minibroker.broker.handlers.control import handle_leader_and_isr, handle_stop_replica, handle_update_metadata
from minibroker.broker.handlers.coordinated_transactions import (
    handle_add_offsets_to_txn,
    handle_add_partitions_to_txn,
    handle_describe_transactions,
    handle_end_txn,
    handle_init_producer_id,
    handle_list_transactions,
)
from minibroker.broker.handlers.fetch import handle_fetch
from minibroker.broker.handlers.forwarding import CONTROLLER_APIS, handle_envelope, handle_or_forward
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
    handle_txn_offset_commit,
)
from minibroker.broker.handlers.list_offsets import handle_list_offsets, handle_offset_for_leader_epoch
from minibroker.broker.handlers.metadata import handle_api_versions, handle_describe_cluster, handle_metadata
from minibroker.broker.handlers.produce import handle_produce
from minibroker.broker.handlers.services import Services
from minibroker.broker.handlers.transactions import handle_write_txn_markers
from minibroker.broker.network.handler_pool import Continuation, RequestHandler
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.slices import giving_way
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
    apis.SASL_HANDSHAKE.key: handle_sasl_handshake,
    apis.API_VERSIONS.key: handle_api_versions,
    **dict.fromkeys(CONTROLLER_APIS, handle_or_forward),
    apis.DELETE_RECORDS.key: handle_delete_records,
    apis.INIT_PRODUCER_ID.key: handle_init_producer_id,
    apis.OFFSET_FOR_LEADER_EPOCH.key: handle_offset_for_leader_epoch,
    apis.ADD_PARTITIONS_TO_TXN.key: handle_add_partitions_to_txn,
    apis.ADD_OFFSETS_TO_TXN.key: handle_add_offsets_to_txn,
    apis.END_TXN.key: handle_end_txn,
    apis.WRITE_TXN_MARKERS.key: handle_write_txn_markers,
    apis.TXN_OFFSET_COMMIT.key: handle_txn_offset_commit,
    apis.DESCRIBE_ACLS.key: handle_describe_acls,
    apis.CREATE_ACLS.key: handle_create_acls,
    apis.DELETE_ACLS.key: handle_delete_acls,
    apis.DESCRIBE_CONFIGS.key: handle_describe_configs,
    apis.ALTER_CONFIGS.key: handle_alter_configs,
    apis.ALTER_REPLICA_LOG_DIRS.key: handle_alter_replica_log_dirs,
    apis.DESCRIBE_LOG_DIRS.key: handle_describe_log_dirs,
    apis.SASL_AUTHENTICATE.key: handle_sasl_authenticate,
    apis.DELETE_GROUPS.key: handle_delete_groups,
    apis.OFFSET_DELETE.key: handle_offset_delete,
    apis.INCREMENTAL_ALTER_CONFIGS.key: handle_incremental_alter_configs,
    apis.DESCRIBE_CLIENT_QUOTAS.key: handle_describe_client_quotas,
    apis.ALTER_CLIENT_QUOTAS.key: handle_alter_client_quotas,
    apis.DESCRIBE_USER_SCRAM_CREDENTIALS.key: handle_describe_user_scram_credentials,
    apis.ALTER_USER_SCRAM_CREDENTIALS.key: handle_alter_user_scram_credentials,
    apis.ENVELOPE.key: handle_envelope,
    apis.DESCRIBE_CLUSTER.key: handle_describe_cluster,
    apis.DESCRIBE_PRODUCERS.key: handle_describe_producers,
    apis.DESCRIBE_TRANSACTIONS.key: handle_describe_transactions,
    apis.LIST_TRANSACTIONS.key: handle_list_transactions,
    apis.DESCRIBE_HEALTH.key: handle_describe_health,
    apis.DESCRIBE_TIMELINE.key: handle_describe_timeline,
    apis.BROKER_HANDSHAKE.key: handle_broker_handshake,
    apis.BROKER_AUTHENTICATE.key: handle_broker_authenticate,
}


def dispatcher(services: Services) -> RequestHandler:
    """Return the function that the server calls for each request. It raises BrokerError if the sender may not send this
    request (`Api.caller`, and the ACLs where there are any); the server answers a BrokerError with its code."""

    def dispatch(request: Request) -> Awaitable[Continuation | None]:
        if request.api.caller is not apis.Caller.ANYBODY:
            services.authorizer.check(request)
        handled = HANDLERS[request.api.key](services, request, request.body)
        return handled if request.large is None else _give_way(handled)

    def dispatch_checked(request: Request) -> Awaitable[Continuation | None]:
        if not passes_acls(services, request):
            return nothing()
        return dispatch(request)

    return dispatch if services.acls is None else dispatch_checked


async def _give_way(handled: Awaitable[Continuation | None]) -> Continuation | None:
    """Handle a large request."""
    with giving_way():
        rest = await handled
    return None if rest is None else _give_way_in_rest(rest)


async def _give_way_in_rest(rest: Continuation) -> None:
    with giving_way():
        await rest


async def nothing() -> None:
    """The request has its answer."""
