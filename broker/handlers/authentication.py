"""BrokerHandshake and BrokerAuthenticate: another broker authenticates itself before it sends requests of brokers."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request


async def handle_broker_handshake(services: Services, request: Request) -> None:
    request.respond(services.authorizer.challenge(request))


async def handle_broker_authenticate(services: Services, request: Request) -> None:
    request.respond(services.authorizer.authenticate(request))
