"""Authentication: of other brokers (BrokerHandshake, BrokerAuthenticate), and of clients (SaslHandshake,
SaslAuthenticate)."""

from collections.abc import Callable

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    BrokerAuthenticateRequest,
    BrokerHandshakeRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from minibroker.protocol.sasl.oauthbearer import UnknownKey


async def handle_broker_handshake(services: Services, request: Request, body: BrokerHandshakeRequest) -> None:
    request.respond(services.authorizer.challenge(request, body))


async def handle_broker_authenticate(services: Services, request: Request, body: BrokerAuthenticateRequest) -> None:
    request.respond(services.authorizer.authenticate(request, body))


async def handle_sasl_handshake(services: Services, request: Request, body: SaslHandshakeRequest) -> None:
    services.sasl.handshake(request, body)


async def handle_sasl_authenticate(services: Services, request: Request, body: SaslAuthenticateRequest) -> None:
    try:
        fail = services.sasl.authenticate(request, body)
    except UnknownKey:
        services.background(_authenticate_later(services, request, body), f"keys for {request.peer}")
        return
    if fail is not None:
        services.background(_fail(services, fail), f"refusal of {request.peer}")


async def _authenticate_later(services: Services, request: Request, body: SaslAuthenticateRequest) -> None:
    await services.sasl.refresh_keys()
    try:
        fail = services.sasl.authenticate(request, body)
    except UnknownKey:
        request.fail(ErrorCode.UNKNOWN_SERVER_ERROR, "the keys of tokens took too long to read")
        return
    if fail is not None:
        await _fail(services, fail)


async def _fail(services: Services, fail: Callable[[], None]) -> None:
    await services.sasl.pause()
    fail()
