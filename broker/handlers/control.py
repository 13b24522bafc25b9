"""LeaderAndIsr, StopReplica, UpdateMetadata: the controller's requests.

Two epochs and a number fence each request. The controller epoch rejects requests of a deposed controller. The broker
epoch (KIP-380) permanently rejects requests for an earlier run of this broker. A request for a run that this broker
does not know of yet (its registration succeeded, but the answer is on its way, or lost) waits a moment and is rejected
with another error, after which the controller sends it again.
"""

import asyncio

from minibroker.broker.handlers.metadata import ELECTIONS
from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    LeaderAndIsrRequest,
    LeaderAndIsrResponse,
    StopReplicaRequest,
    StopReplicaResponse,
    UpdateMetadataRequest,
    UpdateMetadataResponse,
)

DEPARTED_NAMED_S = 5.0
"""Time for which a departed broker is still named to clients that drop unnamed brokers. Without this, librdkafka (2.10
and later) would ignore, for a second, the new leaders in the same answer."""


async def _fence(services: Services, request: LeaderAndIsrRequest | StopReplicaRequest | UpdateMetadataRequest) -> None:
    """Raise BrokerError(STALE_CONTROLLER_EPOCH | STALE_BROKER_EPOCH | BROKER_ID_NOT_REGISTERED) for an outdated
    request."""
    if request.controller_epoch < services.control_epoch.highest:
        raise BrokerError(
            ErrorCode.STALE_CONTROLLER_EPOCH,
            f"controller {request.controller_id} has epoch {request.controller_epoch}, "
            f"but this broker has seen epoch {services.control_epoch.highest}",
        )
    own_epoch = await services.registered_epoch(request.broker_epoch)
    if request.broker_epoch < own_epoch:
        raise BrokerError(
            ErrorCode.STALE_BROKER_EPOCH,
            f"the request is for broker epoch {request.broker_epoch}, but this one is {own_epoch}",
        )
    order = (request.controller_epoch, request.broker_epoch, request.number)
    if _is_late(services.control_epoch.last_order, order):
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"order {request.number} of controller epoch {request.controller_epoch} comes after order "
            f"{services.control_epoch.last_order[2]}",
        )
    services.control_epoch.last_order = order
    services.control_epoch.highest = max(services.control_epoch.highest, request.controller_epoch)


def _is_late(last: tuple[int, int, int], order: tuple[int, int, int]) -> bool:
    """Return whether later orders of the same controller have been carried out already. Such an order comes over a
    connection that the controller has given up. The same number again is a repetition, which does no harm."""
    return order[:2] == last[:2] and 0 < order[2] < last[2]


async def handle_leader_and_isr(services: Services, request: Request, body: LeaderAndIsrRequest) -> None:
    try:
        await _fence(services, body)
        answers = await services.replicas.orders.apply_leader_and_isr(body)  # C6
    except BrokerError as error:
        request.respond(LeaderAndIsrResponse(error.code, []))
        return
    request.respond(LeaderAndIsrResponse(ErrorCode.NONE, answers))


async def handle_stop_replica(services: Services, request: Request, body: StopReplicaRequest) -> None:
    try:
        await _fence(services, body)
    except BrokerError as error:
        request.respond(StopReplicaResponse(error.code, []))
        return
    errors = await services.replicas.orders.stop_replicas(body)
    request.respond(StopReplicaResponse(ErrorCode.NONE, errors))


async def handle_update_metadata(services: Services, request: Request, body: UpdateMetadataRequest) -> None:
    try:
        await _fence(services, body)
    except BrokerError as error:
        request.respond(UpdateMetadataResponse(error.code))
        return
    alive_before = services.metadata.alive_epochs()
    ids_before = {topic.topic_name: services.metadata.topic_id(topic.topic_name) for topic in body.topic_states}
    departed_before = services.metadata.departed
    told = services.metadata.update(body)
    if departed := [b for id, b in services.metadata.departed.items() if id not in departed_before]:
        asyncio.get_running_loop().call_later(DEPARTED_NAMED_S, services.metadata.forget, departed)
    for topic in told:
        services.topic_purgatory.check_soon(topic)
    services.topic_purgatory.check_soon(ELECTIONS)
    gone = frozenset(
        known_id
        for name, known_id in ids_before.items()
        if known_id is not None and known_id != services.metadata.topic_id(name)
    ) | {topic.topic_id for topic in body.topic_states if topic.deleted}
    if gone or body.names_the_last:
        services.groups.removal.topics_gone(gone)
    if body.names_the_last:
        await services.replicas.orders.delete_strays()
    # many requests carry only partitions and do not change the live brokers
    if services.metadata.alive_epochs() != alive_before:
        services.replicas.isr_writer.reconsider()
    request.respond(UpdateMetadataResponse(ErrorCode.NONE))
