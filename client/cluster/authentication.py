"""How a client authenticates itself on a connection: SaslHandshake names the mechanism, and each SaslAuthenticate
carries one of its messages, which `protocol/sasl` makes and checks.

The broker may say for how long it believes in the user (KIP-368). The client authenticates again before that time is
over, on the same connection and between requests: no request is lost or sent twice.
"""

from __future__ import annotations

import asyncio
import shlex
from random import Random

from minibroker.client.cluster.tokens import token_of, why_refused
from minibroker.client.errors import AuthenticationFailed
from minibroker.client.security import Credentials
from minibroker.client.shown import shown
from minibroker.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError, error_of
from minibroker.protocol.messages import SaslAuthenticateRequest, SaslHandshakeRequest
from minibroker.protocol.sasl import mechanisms
from minibroker.protocol.sasl.mechanisms import ClientMechanism, SaslError
from minibroker.protocol.sasl.oauthbearer import OAuthBearerClient
from minibroker.protocol.sasl.plain import PlainClient
from minibroker.protocol.sasl.scram import BY_NAME, ScramClient
from minibroker.protocol.words import printable
from minibroker.protocol.world import Network

_NONCE_BYTES = 24
_REASON_CHARACTERS = 500


async def open_authenticated(
    network: Network,
    host: str,
    port: int,
    credentials: Credentials | None,
    random: Random,
    *,
    client_id: str,
    timeout_s: float,
) -> tuple[Connection, float | None]:
    """Return a new connection that may be used, and for how many seconds the broker believes in its user, as
    `authenticate`. `timeout_s` is for each of the two. Raises NetworkError, AuthenticationFailed."""
    connection = await open_connection(network, host, port, client_id=client_id, timeout_s=timeout_s)
    if credentials is None:
        return connection, None
    try:
        return connection, await authenticate(connection, credentials, random, timeout_s)
    except BaseException:
        connection.close("the client is not authenticated")
        raise


async def authenticate(
    connection: Connection, credentials: Credentials, random: Random, timeout_s: float
) -> float | None:
    """Authenticate the client. Return for how many seconds the broker believes in it; None: as long as the connection
    lasts. Raises AuthenticationFailed, and NetworkError if the connection or the provider of tokens fails."""
    token = await _token(connection, credentials, timeout_s)
    return await _authenticate(connection, credentials, token, random, timeout_s)


async def authenticate_again(
    connection: Connection, credentials: Credentials, random: Random, timeout_s: float
) -> float | None:
    """As `authenticate`, on a connection that is in use: after the requests that are under way, and before all others.
    A request that takes long, such as JoinGroup, is not counted in `timeout_s`. Requests go on while the token is
    provided. If it raises, the others are still held, and the caller closes the connection."""
    token = await _token(connection, credentials, timeout_s)
    await connection.hold()
    session_s = await _authenticate(connection, credentials, token, random, timeout_s)
    connection.release()
    return session_s


async def _token(connection: Connection, credentials: Credentials, timeout_s: float) -> str:
    """Return the token, or an empty string if the mechanism has none."""
    if credentials.token_provider is None:
        return ""
    try:
        return await token_of(credentials.token_provider, timeout_s)
    except SaslError as error:
        raise AuthenticationFailed(connection.address, credentials.mechanism, str(error)) from None


async def _authenticate(
    connection: Connection, credentials: Credentials, token: str, random: Random, timeout_s: float
) -> float | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await _converse(connection, credentials, token, random)
    except TimeoutError:
        raise NetworkError(
            f"authenticating to {connection.address} by {credentials.mechanism}: no end within {timeout_s:.3g} s"
        ) from None


_NO_SASL = 'this listener has no SASL: use security_protocol="SSL" or "PLAINTEXT", or the port of a listener with SASL'


async def _converse(connection: Connection, credentials: Credentials, token: str, random: Random) -> float | None:
    mechanism = credentials.mechanism

    def failed(reason: str) -> AuthenticationFailed:
        return AuthenticationFailed(connection.address, mechanism, reason, credentials.username)

    try:
        client = _client_of(credentials, token, random)
        offered = await connection.request(SASL_HANDSHAKE, SaslHandshakeRequest(mechanism), ahead=True)
        if offered.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            enabled = ", ".join(map(shown, offered.mechanisms)) or "none"
            raise failed(f"the mechanism is not enabled at this listener, which has {enabled} (sasl_mechanism)")
        if offered.error_code == ErrorCode.ILLEGAL_SASL_STATE:
            raise failed(_NO_SASL)
        if offered.error_code:
            raise NetworkError(f"authenticating to {connection.address}: {error_of(offered.error_code).name}")
        message = client.respond(None)
        session_ms = 0
        while message is not None:
            answer = await connection.request(SASL_AUTHENTICATE, SaslAuthenticateRequest(message), ahead=True)
            if answer.error_code:
                reason = printable(answer.error_message[:_REASON_CHARACTERS]) or error_of(answer.error_code).name
                if token:
                    raise failed(f"{reason}; {why_refused(token)}")
                is_refused = answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
                raise failed(f"{reason}: {_why_refused(credentials)}" if is_refused else reason)
            session_ms = answer.session_lifetime_ms
            message = client.respond(answer.auth_bytes)
    except SaslError as error:
        raise failed(str(error)) from None
    except BrokerError as error:
        raise failed(_NO_SASL if error.code is ErrorCode.ILLEGAL_SASL_STATE else str(error)) from error
    except InvalidMessage as error:
        raise NetworkError(f"authenticating to {connection.address}: {error}") from error
    return session_ms / 1_000 if session_ms > 0 else None


def _why_refused(credentials: Credentials) -> str:
    """Return what may be wrong with a user and its password. Brokers do not say which, and log it."""
    if credentials.mechanism == mechanisms.PLAIN:
        return (
            "the password is wrong, or there is no such user: the users of PLAIN are in the brokers' sasl.jaas.config"
        )
    user = shlex.quote(printable(credentials.username))
    return (
        "the password is wrong, or there is no such user: an administrator can list users with "
        "`minibroker users list`, "
        f"and set the password, which FILE contains, with `minibroker configs alter --user {user} --set "
        f"'{credentials.mechanism}=[password-file=FILE]'`"
    )


def _client_of(credentials: Credentials, token: str, random: Random) -> ClientMechanism:
    """Return the mechanism's half of a client. Raises SaslError for what cannot be sent."""
    match credentials.mechanism:
        case mechanisms.PLAIN:
            return PlainClient(credentials.username, credentials.password)
        case "OAUTHBEARER":
            return OAuthBearerClient(token)
        case name:
            nonce = random.randbytes(_NONCE_BYTES).hex()
            return ScramClient(BY_NAME[name], credentials.username, credentials.password, nonce)
