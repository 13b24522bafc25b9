"""BrokerHandshake and BrokerAuthenticate: another broker proves who it is, before it asks for what only brokers may."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request


async def handle_broker_handshake(services: Services, request: Request) -> None:
    request.respond(services.authorizer.challenge(request))


async def handle_broker_authenticate(services: Services, request: Request) -> None:
    request.respond(services.authorizer.authenticate(request))
