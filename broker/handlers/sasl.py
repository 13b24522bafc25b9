"""The SASL of a broker's listeners: the mechanisms that they have enabled, and the exchanges with their clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from minibroker.broker.network.metrics import NetworkMetrics, Summary
from minibroker.broker.network.request_channel import Gate, Request
from minibroker.broker.security.sasl import Outcome, SaslListener, SaslState
from minibroker.broker.security.scram_credentials import ScramCredentials
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import listener_config
from minibroker.broker.settings.sasl import check_inter_broker, jwks_url, plain_users, sasl_mechanisms
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import SaslAuthenticateRequest, SaslHandshakeRequest
from minibroker.protocol.model import uses_sasl
from minibroker.protocol.sasl.mechanisms import OAUTHBEARER, PLAIN, ServerMechanism
from minibroker.protocol.sasl.oauthbearer import OAuthBearerServer
from minibroker.protocol.sasl.plain import PlainServer
from minibroker.protocol.sasl.scram import BY_NAME, ScramMechanism, ScramServer, decoy_secret
from minibroker.protocol.world import World

if TYPE_CHECKING:
    from minibroker.broker.security.oauth import SigningKeys, TokenValidator

logger = logging.getLogger("minibroker.network")

_NONCE_BYTES = 24
_DECOY_BYTES = 32


class SaslServer:
    """Raises InvalidConfig if the settings of a listener contradict each other."""

    def __init__(self, config: BrokerConfig, world: World) -> None:
        self.scram = ScramCredentials()
        self.metrics = NetworkMetrics()
        """Replaced by those of the server."""
        self.keys: list[SigningKeys] = []
        """Those of tokens. To be followed."""
        self._world = world
        self._clock = world.clock
        self._random = world.random
        protocols = {name: each for name, each in config.security_protocols().items() if uses_sasl(each)}
        self._listeners = {name: self._listener(config, name) for name in protocols}
        self._decoy = world.random.randbytes(_DECOY_BYTES) if self._listeners else b""  # see `share_decoys`
        check_inter_broker(config)
        self._delay_s = config.connection_failed_authentication_delay_ms / 1_000
        self._failures = {name: Summary(logger, name, "did not authenticate") for name in self._listeners}

    @property
    def uses_scram(self) -> bool:
        return any(name in BY_NAME for listener in self._listeners.values() for name in listener.mechanisms)

    def share_decoys(self, secret: bytes) -> None:
        """Give unknown users of SCRAM the salts that all brokers with this secret give them, also after a restart."""
        self._decoy = decoy_secret(secret)

    def new_gate(self, listener: str) -> Callable[[], Gate] | None:
        """Return the function that makes the state of a connection; None: the listener does not use SASL."""
        found = self._listeners.get(listener)
        return None if found is None else partial(SaslState, found)

    def handshake(self, request: Request, body: SaslHandshakeRequest) -> None:
        """Raises BrokerError(ILLEGAL_SASL_STATE) if the listener does not use SASL."""
        response, failure = self._state(request).handshake(body.mechanism)
        request.respond(response)
        if failure is not None:
            self._close(request, failure)

    def authenticate(self, request: Request, body: SaslAuthenticateRequest) -> Callable[[], None] | None:
        """Answer a step of an exchange, unless it has failed: then return the function that answers, to be called after
        `pause`. Raises BrokerError(ILLEGAL_SASL_STATE) if the listener does not use SASL, and UnknownKey if this may
        succeed after `refresh_keys`."""
        state = self._state(request)
        outcome = state.authenticate(body.auth_bytes, self._clock.monotonic(), self._clock.wall_ms() / 1_000)
        if outcome.failure is not None:
            if outcome.was_repeated:
                self.metrics.failed_reauthentications += 1
            else:
                self.metrics.failed_authentications += 1
            return partial(self._fail, request, outcome)
        if outcome.principal is not None:
            self._succeed(request, outcome)
        request.respond(outcome.response)
        return None

    async def refresh_keys(self) -> None:
        """Read the keys of tokens again."""
        for keys in self.keys:
            await keys.refresh()

    async def pause(self) -> None:
        """Wait for connection.failed.authentication.delay.ms, so that guessing takes time."""
        await asyncio.sleep(self._delay_s)

    def _succeed(self, request: Request, outcome: Outcome) -> None:
        assert outcome.principal is not None
        session = request.session
        if outcome.was_repeated:
            self.metrics.successful_reauthentications += 1
        else:
            self.metrics.successful_authentications += 1
            session.principal = outcome.principal._replace(broker_id=session.principal.broker_id)
            request.source.authenticated()

    def _fail(self, request: Request, outcome: Outcome) -> None:
        request.respond(outcome.response)
        self._close(request, outcome.failure or "")

    def _close(self, request: Request, reason: str) -> None:
        self._failures[request.listener].log(request.peer, reason, self._clock.monotonic())
        request.close_quietly()

    def _state(self, request: Request) -> SaslState:
        state = request.session.gate
        if not isinstance(state, SaslState):
            raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, f"the listener {request.listener} does not use SASL")
        return state

    # -- the mechanisms of a listener --

    def _listener(self, config: BrokerConfig, name: str) -> SaslListener:
        own = listener_config(config, name)
        made = {each: self._mechanism(own, name, each) for each in sasl_mechanisms(own, name)}
        return SaslListener(name, made, own.connections_max_reauth_ms)

    def _mechanism(self, own: BrokerConfig, listener: str, mechanism: str) -> Callable[[], ServerMechanism]:
        if mechanism == PLAIN:
            return partial(PlainServer, plain_users(own, listener).get)
        if mechanism == OAUTHBEARER:
            return partial(OAuthBearerServer, self._validator(own, listener).validate)
        return partial(self._scram, BY_NAME[mechanism])

    def _validator(self, own: BrokerConfig, listener: str) -> TokenValidator:
        url = jwks_url(own, listener)
        try:
            from minibroker.broker.security.oauth import SigningKeys, TokenRules, TokenValidator
        except ImportError as error:
            raise InvalidConfig(
                f"the listener {listener} has OAUTHBEARER enabled, which needs PyJWT: pip install 'minibroker[oauth]'"
            ) from error
        keys = SigningKeys(url, self._world)
        self.keys.append(keys)
        rules = TokenRules(
            own.sasl_oauthbearer_expected_audience,
            own.sasl_oauthbearer_expected_issuer,
            own.sasl_oauthbearer_sub_claim_name,
            own.sasl_oauthbearer_clock_skew_seconds,
        )
        return TokenValidator(keys, rules, self._world)

    def _scram(self, mechanism: ScramMechanism) -> ScramServer:
        nonce = self._random.randbytes(_NONCE_BYTES).hex()
        return ScramServer(mechanism, lambda user: self.scram.get(user, mechanism), nonce, self._decoy)
