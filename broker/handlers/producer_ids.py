"""InitProducerId: an identity for an idempotent producer."""

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import InitProducerIdRequest, InitProducerIdResponse

TIMEOUT_MS = 5_000
"""For a new block of ids. The client asks again, perhaps another broker."""


async def handle_init_producer_id(services: Services, request: Request) -> None:
    """Every call gets an id that was never given out before, with epoch 0."""
    body = request.body
    assert isinstance(body, InitProducerIdRequest)
    if body.transactional_id is not None:
        raise BrokerError(ErrorCode.INVALID_REQUEST, "transactional_id is set, and there are no transactions yet")
    answer_later(services, request, TIMEOUT_MS, lambda: _grant(services, request))


async def _grant(services: Services, request: Request) -> None:
    producer_id = await services.producer_ids.next()
    request.respond(InitProducerIdResponse(0, ErrorCode.NONE, producer_id, 0))
