"""BrokerHandshake and BrokerAuthenticate: another broker authenticates itself before it sends requests of brokers."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.messages import BrokerAuthenticateRequest, BrokerHandshakeRequest


async def handle_broker_handshake(services: Services, request: Request, body: BrokerHandshakeRequest) -> None:
    request.respond(services.authorizer.challenge(request, body))


async def handle_broker_authenticate(services: Services, request: Request, body: BrokerAuthenticateRequest) -> None:
    request.respond(services.authorizer.authenticate(request, body))
