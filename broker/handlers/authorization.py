"""Authorizes requests: verifies the proofs of other brokers, and is the one place that enforces `Api.caller`.

A connection speaks for no broker until its broker has authenticated itself
(`protocol/connections/broker_proof.py`). Without a secret, no broker can or must do so.
"""

import logging
from collections.abc import Callable
from random import Random
from typing import Any

from minibroker.broker.network.request_channel import Request
from minibroker.protocol.apis import Api, Caller
from minibroker.protocol.connections.broker_proof import Handshake, is_same
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    PROOF_BYTES,
    BrokerAuthenticateRequest,
    BrokerAuthenticateResponse,
    BrokerHandshakeRequest,
    BrokerHandshakeResponse,
    ControlledShutdownRequest,
    EnvelopeRequest,
)
from minibroker.protocol.principal import Principal

logger = logging.getLogger("minibroker.handlers")

LOG_INTERVAL_S = 1.0


def why_refused(api: Api[Any, Any], body: Any, principal: Principal) -> str | None:
    """Return why this principal may not send this request, or None. A broker speaks for itself alone."""
    claims: int | None = None
    if api.caller is Caller.MARKER_WRITER:
        if principal.broker_id is None and any(marker.committed for marker in body.markers):
            return f"{api.name} that commits, over a connection that is {principal.shown}"
        return None
    if api.caller is Caller.READER:
        if body.replica_id < 0:
            return None
        claims = body.replica_id
    elif api.caller is Caller.BROKER:
        is_from_broker = isinstance(body, EnvelopeRequest | ControlledShutdownRequest)
        claims = body.broker_id if is_from_broker else body.controller_id
    if claims is None or claims == principal.broker_id:
        return None
    return f"{api.name} in the name of broker {claims}, over a connection that is {principal.shown}"


class Authorizer:
    """Checks requests and authenticates brokers. Refusals are logged at most once per second by the clock
    `monotonic`."""

    def __init__(self, broker_id: int, secret: bytes | None, random: Random, monotonic: Callable[[], float]) -> None:
        self._broker_id = broker_id
        self._secret = secret
        self._random = random
        self._monotonic = monotonic
        self._log_after_s = 0.0

    def check(self, request: Request) -> None:
        """Raise BrokerError(CLUSTER_AUTHORIZATION_FAILED) if the sender may not send this request."""
        if self._secret is not None:
            reason = why_refused(request.api, request.body, request.principal)
            if reason is not None:
                raise self._refusal(request, reason)

    def may_be_broker(self, request: Request) -> bool:
        """Return whether the sender is a broker, or cannot be told from one because there is no secret."""
        return self._secret is None or request.principal.broker_id is not None

    def challenge(self, request: Request, body: BrokerHandshakeRequest) -> BrokerHandshakeResponse:
        """Return this broker's proof, and the nonce for the other's. Raises
        BrokerError(CLUSTER_AUTHORIZATION_FAILED)."""
        session = request.session
        session.set_broker(None)
        session.handshake = None
        if self._secret is None:
            raise self._refusal(request, f"broker {self._broker_id} has no secret")
        if body.peer_id != self._broker_id:
            raise self._refusal(request, f"this is broker {self._broker_id}, not broker {body.peer_id}")
        nonce = self._random.randbytes(PROOF_BYTES)
        session.handshake = Handshake(body.broker_id, body.peer_id, body.nonce, nonce)
        return BrokerHandshakeResponse(nonce, session.handshake.accepting_proof(self._secret))

    def authenticate(self, request: Request, body: BrokerAuthenticateRequest) -> BrokerAuthenticateResponse:
        """Authenticate the connection as the broker's. Raises BrokerError(CLUSTER_AUTHORIZATION_FAILED); the connection
        then speaks for no broker, and the handshake is used up."""
        session = request.session
        handshake, session.handshake = session.handshake, None
        if self._secret is None or handshake is None:
            raise self._refusal(request, "a proof without a handshake")
        if not is_same(body.proof, handshake.connecting_proof(self._secret)):
            raise self._refusal(request, f"the proof of broker {handshake.connecting_id} is wrong")
        session.set_broker(handshake.connecting_id)
        request.source.proved_broker()
        return BrokerAuthenticateResponse()

    def _refusal(self, request: Request, reason: str) -> BrokerError:
        remedy = "only brokers of the cluster may send this, which need the same broker.secret.file"
        error = BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, f"{reason}; {remedy}", is_complete=True)
        now_s = self._monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + LOG_INTERVAL_S
            logger.warning("%r is refused: %s", request, error)
        return error
