"""How clients authenticate themselves on a listener that uses SASL (Kafka's SaslServerAuthenticator).

One object per connection has the state: unauthenticated, in the middle of an exchange, authenticated, failed. Until the
client is authenticated, only the requests that lead there are decoded; anything else closes the connection. So does the
first other request after the end of the session (KIP-368), or after a failure. Pure: receives the time.

Other brokers do not use SASL. They prove themselves by the cluster's secret, on every listener
(`protocol/connections/broker_proof.py`): one secret then serves for data and control, both sides prove it, and no
broker has a password that an administrator could change while it is needed to change passwords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from minibroker.protocol import apis
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    SaslAuthenticateResponse,
    SaslHandshakeResponse,
)
from minibroker.protocol.principal import ANONYMOUS, USER, Principal
from minibroker.protocol.sasl.mechanisms import Authenticated, SaslError, ServerMechanism
from minibroker.protocol.sasl.oauthbearer import INVALID_TOKEN, OAuthBearerServer, TokenRefused

_ALWAYS = frozenset({apis.SASL_HANDSHAKE.key, apis.SASL_AUTHENTICATE.key})
BEFORE_AUTHENTICATION = _ALWAYS | {apis.API_VERSIONS.key, apis.BROKER_HANDSHAKE.key, apis.BROKER_AUTHENTICATE.key}
"""The requests of a client that has not authenticated itself, and of a broker that has not proved itself."""


class SaslListener(NamedTuple):
    """What the connections of a listener share."""

    name: str
    mechanisms: Mapping[str, Callable[[], ServerMechanism]]
    """By their names, in the order of the setting: a new exchange."""
    max_reauth_ms: int
    """The lifetime of a session; 0: no limit."""


class Outcome(NamedTuple):
    """The answer to a SaslAuthenticate request."""

    response: SaslAuthenticateResponse
    principal: Principal | None = None
    """Who the client has just proved to be."""
    failure: str | None = None
    """Why the connection ends after this answer, for the log."""
    was_repeated: bool = False
    """Whether the client had authenticated itself before."""


class SaslState:
    """One connection (see the module)."""

    __slots__ = (
        "_exchange",
        "_expires_at",
        "_is_broker",
        "_listener",
        "_mechanism",
        "_principal",
        "has_expired",
        "has_failed",
    )

    def __init__(self, listener: SaslListener) -> None:
        self._listener = listener
        self._mechanism = ""
        self._exchange: ServerMechanism | None = None
        self._principal = ANONYMOUS
        self._expires_at: float | None = None
        self.has_failed = False
        self._is_broker = False
        self.has_expired = False

    @property
    def is_open(self) -> bool:
        return self._is_broker or self._principal is not ANONYMOUS

    @property
    def mechanism(self) -> str:
        """The mechanism of the last SaslHandshake; empty: none."""
        return self._mechanism

    def set_broker(self, is_broker: bool) -> None:
        self._is_broker = is_broker

    def why_closed(self, api_key: int, now: float) -> str | None:
        if self._is_broker:
            return None
        if self.has_failed:
            return "its authentication has failed"
        if api_key in _ALWAYS:
            return None
        if self._principal is ANONYMOUS:
            if api_key in BEFORE_AUTHENTICATION:
                return None
            if isinstance(self._exchange, OAuthBearerServer) and self._exchange.refusal is not None:
                return str(self._exchange.refusal)  # some clients do not look at the challenge
            asked = apis.APIS[api_key].name if api_key in apis.APIS else f"API {api_key}"
            return f"it sent {asked} before it authenticated itself: give the client security.protocol=SASL_..."
        if self._expires_at is not None and now >= self._expires_at:
            self.has_expired = True
            return "its session has expired, and it did not authenticate itself again (connections.max.reauth.ms)"
        return None

    def handshake(self, mechanism: str) -> tuple[SaslHandshakeResponse, str | None]:
        """Begin an exchange. Return the answer, and why the connection ends after it, or None."""
        enabled = list(self._listener.mechanisms)
        if self._exchange is not None or self._is_finally_authenticated():
            self.has_failed = self._exchange is not None
            reason = "SaslHandshake in the middle of an exchange" if self.has_failed else None
            return SaslHandshakeResponse(ErrorCode.ILLEGAL_SASL_STATE, enabled), reason
        if self._principal is not ANONYMOUS and mechanism != self._mechanism:
            enabled = [self._mechanism]
        if mechanism not in enabled:
            self.has_failed = True
            reason = f"the mechanism {mechanism[:50]!r} is not one of {', '.join(enabled)}"
            return SaslHandshakeResponse(ErrorCode.UNSUPPORTED_SASL_MECHANISM, enabled), reason
        self._mechanism = mechanism
        self._exchange = self._listener.mechanisms[mechanism]()
        return SaslHandshakeResponse(ErrorCode.NONE, enabled), None

    def authenticate(self, message: bytes, now: float, wall_s: float) -> Outcome:
        """Continue the exchange. `now` is monotonic, `wall_s` in seconds since 1970. Errors other than SaslError leave
        the state as it was."""
        if self._exchange is None:
            if not self._is_finally_authenticated():
                self.has_failed = True
            text = "SaslAuthenticate without SaslHandshake, or after the authentication"
            response = SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, text)
            return Outcome(response, failure=text if self.has_failed else None)
        was_repeated = self._principal is not ANONYMOUS
        try:
            answer = self._exchange.respond(message)
            if isinstance(answer, bytes):
                return Outcome(SaslAuthenticateResponse(ErrorCode.NONE, auth_bytes=answer))
            lifetime_ms = self._lifetime_ms(answer, wall_s)
            if was_repeated and answer.user != self._principal.name:
                raise SaslError("the client authenticates itself again as another user")
        except SaslError as error:
            self._exchange, self.has_failed = None, True
            text = f"Authentication failed: invalid credentials with SASL mechanism {self._mechanism}"
            if isinstance(error, TokenRefused):  # Kafka's text is the challenge, for which clients look
                text += f": {INVALID_TOKEN.decode()}"
            response = SaslAuthenticateResponse(ErrorCode.SASL_AUTHENTICATION_FAILED, text)
            return Outcome(response, None, str(error), was_repeated)
        self._exchange = None
        if not was_repeated:
            self._principal = Principal(USER, answer.user)
        self._expires_at = now + lifetime_ms / 1_000 if lifetime_ms else None
        response = SaslAuthenticateResponse(ErrorCode.NONE, "", answer.message, lifetime_ms)
        return Outcome(response, self._principal, None, was_repeated)

    def _is_finally_authenticated(self) -> bool:
        """Return whether the client need not, and may not, authenticate itself again."""
        return self._principal is not ANONYMOUS and self._expires_at is None

    def _lifetime_ms(self, answer: Authenticated, wall_s: float) -> int:
        """Return the lifetime of the session; 0: unlimited. Raises SaslError if it is over."""
        lifetime_ms = self._listener.max_reauth_ms
        if answer.expires_at_s is not None:
            left_ms = int((answer.expires_at_s - wall_s) * 1_000)
            if left_ms <= 0:
                raise SaslError("the token has expired")
            lifetime_ms = min(lifetime_ms, left_ms) if lifetime_ms else left_ms
        return lifetime_ms
