"""The state of a connection that uses SASL: what is let in, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minibroker.broker.security.sasl import BEFORE_AUTHENTICATION, SaslListener, SaslState
from minibroker.protocol import apis
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.principal import Principal
from minibroker.protocol.sasl.mechanisms import OAUTHBEARER, PLAIN, Authenticated, ServerMechanism
from minibroker.protocol.sasl.oauthbearer import OAuthBearerServer, TokenRefused
from minibroker.protocol.sasl.plain import PlainServer

ALICE = b"\0alice\0wonderland"
PASSWORDS = {"alice": "wonderland", "bob": "builder"}
TOKEN = b"n,,\x01auth=Bearer abc\x01\x01"
WALL_S = 1_000.0


def state_with(max_reauth_ms: int = 0, token_expires_at_s: float | None = None) -> SaslState:
    mechanisms: dict[str, Callable[[], ServerMechanism]] = {
        PLAIN: lambda: PlainServer(PASSWORDS.get),
        OAUTHBEARER: lambda: OAuthBearerServer(lambda token: Authenticated("alice", expires_at_s=token_expires_at_s)),
    }
    return SaslState(SaslListener("CLIENTS", mechanisms, max_reauth_ms))


def authenticated(state: SaslState, mechanism: str = PLAIN, message: bytes = ALICE, now: float = 0.0) -> int:
    assert state.handshake(mechanism)[0].error_code == ErrorCode.NONE
    outcome = state.authenticate(message, now, WALL_S)
    assert outcome.principal == Principal("User", "alice")
    assert outcome.failure is None
    return outcome.response.session_lifetime_ms


def test_before_authentication_nothing_else_is_let_in() -> None:
    state = state_with()
    let_in = {key for key in [*apis.APIS, 999, -1] if state.why_closed(key, 0.0) is None}
    assert let_in == BEFORE_AUTHENTICATION
    assert not state.is_open


def test_a_client_authenticates_itself_once_if_its_session_is_unlimited() -> None:
    state = state_with()
    assert authenticated(state) == 0
    assert state.is_open
    assert state.why_closed(apis.PRODUCE.key, 1e9) is None
    assert state.handshake(PLAIN)[0].error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert state.authenticate(ALICE, 0.0, WALL_S).response.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert state.why_closed(apis.PRODUCE.key, 1e9) is None


def test_a_failure_is_final() -> None:
    state = state_with()
    state.handshake(PLAIN)
    outcome = state.authenticate(b"\0alice\0wrong", 0.0, WALL_S)
    assert outcome.response.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert outcome.response.error_message == "Authentication failed: invalid credentials with SASL mechanism PLAIN"
    assert (outcome.failure or "").startswith("an unknown user or a wrong password: alice")
    for key in apis.APIS:
        assert state.why_closed(key, 0.0) is not None


def test_a_refused_token_is_refused_with_the_status_that_kafkas_clients_expect() -> None:
    def refuse(token: str) -> Authenticated:
        raise TokenRefused(f"the token {token} has expired")

    state = SaslState(SaslListener("CLIENTS", {OAUTHBEARER: lambda: OAuthBearerServer(refuse)}, 0))
    state.handshake(OAUTHBEARER)
    challenge = state.authenticate(TOKEN, 0.0, WALL_S).response
    assert (challenge.error_code, challenge.auth_bytes) == (ErrorCode.NONE, b'{"status":"invalid_token"}')
    outcome = state.authenticate(b"\x01", 0.0, WALL_S)
    assert outcome.response.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert outcome.response.error_message.endswith('with SASL mechanism OAUTHBEARER: {"status":"invalid_token"}')
    assert outcome.failure == "the token abc has expired"


def test_other_mechanisms_and_tokens_without_a_handshake_end_the_connection() -> None:
    state = state_with()
    response, failure = state.handshake("GSSAPI")
    assert (response.error_code, response.mechanisms) == (ErrorCode.UNSUPPORTED_SASL_MECHANISM, [PLAIN, OAUTHBEARER])
    assert failure is not None
    assert state.why_closed(apis.SASL_HANDSHAKE.key, 0.0) is not None
    outcome = state_with().authenticate(ALICE, 0.0, WALL_S)
    assert outcome.response.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert outcome.failure is not None


def test_a_session_ends_unless_the_client_authenticates_itself_again() -> None:
    state = state_with(max_reauth_ms=5_000)
    assert authenticated(state) == 5_000
    assert state.why_closed(apis.PRODUCE.key, 4.9) is None
    authenticated(state, now=4.9)
    assert state.why_closed(apis.PRODUCE.key, 9.8) is None
    assert state.why_closed(apis.SASL_HANDSHAKE.key, 9.9) is None
    assert not state.has_expired
    assert state.why_closed(apis.PRODUCE.key, 9.9) is not None
    assert state.has_expired


@pytest.mark.parametrize(("max_reauth_ms", "lifetime_ms"), [(0, 60_000), (5_000, 5_000), (90_000, 60_000)])
def test_a_session_does_not_outlive_its_token(max_reauth_ms: int, lifetime_ms: int) -> None:
    state = state_with(max_reauth_ms, token_expires_at_s=WALL_S + 60)
    assert authenticated(state, OAUTHBEARER, TOKEN) == lifetime_ms
    assert state.why_closed(apis.FETCH.key, lifetime_ms / 1_000 - 0.1) is None
    assert state.why_closed(apis.FETCH.key, lifetime_ms / 1_000) is not None


def test_an_expired_token_is_refused() -> None:
    state = state_with(token_expires_at_s=WALL_S)
    state.handshake(OAUTHBEARER)
    assert state.authenticate(TOKEN, 0.0, WALL_S).failure == "the token has expired"


def test_a_client_stays_who_it_is() -> None:
    state = state_with(max_reauth_ms=5_000)
    authenticated(state)
    state.handshake(PLAIN)
    outcome = state.authenticate(b"\0bob\0builder", 1.0, WALL_S)
    assert outcome.failure == "the client authenticates itself again as another user"
    assert outcome.was_repeated
    assert state.why_closed(apis.PRODUCE.key, 1.0) is not None


def test_a_client_keeps_its_mechanism() -> None:
    state = state_with(max_reauth_ms=5_000)
    authenticated(state)
    assert state.handshake(OAUTHBEARER)[0].mechanisms == [PLAIN]
    assert state.why_closed(apis.PRODUCE.key, 1.0) is not None


def test_a_broker_that_has_proved_itself_needs_no_sasl() -> None:
    state = state_with()
    state.set_broker(True)
    assert state.why_closed(apis.FETCH.key, 0.0) is None
    state.set_broker(False)
    assert state.why_closed(apis.FETCH.key, 0.0) is not None
