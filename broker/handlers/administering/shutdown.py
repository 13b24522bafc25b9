"""ControlledShutdown: another broker is about to stop, and this one, as the controller, moves its leaders."""

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import ControlledShutdownRequest, ControlledShutdownResponse, RemainingPartition

TIMEOUT_MS = 30_000
"""The stopping broker gives up long before this."""


async def handle_controlled_shutdown(services: Services, request: Request, body: ControlledShutdownRequest) -> None:

    async def answer() -> None:
        try:
            remaining = await services.administration.controlled_shutdown(body.broker_id, body.broker_epoch)
        except BrokerError as error:
            if error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
                raise
            request.respond(ControlledShutdownResponse(error.code, []))
            return
        request.respond(ControlledShutdownResponse(ErrorCode.NONE, [RemainingPartition(*p) for p in remaining]))

    answer_later(services, request, TIMEOUT_MS, answer)
