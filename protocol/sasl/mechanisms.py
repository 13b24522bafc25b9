"""What the mechanisms have in common: their names, and the interfaces of their two halves.

A client sends the messages of its half in SaslAuthenticate requests, after SaslHandshake has named the mechanism:

    message = client.respond(None)
    while message is not None:
        response = await connection.request(SASL_AUTHENTICATE, SaslAuthenticateRequest(message))
        message = client.respond(response.auth_bytes)

Neither half does I/O or reads a clock, and no error has a part of a password or token.
"""

from typing import NamedTuple, Protocol

from minibroker.protocol.errors import MinibrokerError

PLAIN = "PLAIN"
SCRAM_SHA_256 = "SCRAM-SHA-256"
SCRAM_SHA_512 = "SCRAM-SHA-512"
OAUTHBEARER = "OAUTHBEARER"
MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER)


class SaslError(MinibrokerError):
    """The other side has not proved who it is, or broke the mechanism's rules. The text says which, for logs."""


class Authenticated(NamedTuple):
    """The client has proved to be `user`."""

    user: str
    message: bytes = b""
    """The mechanism's last message to the client."""
    expires_at_s: float | None = None
    """Seconds since 1970 at which the proof ends; None: never."""


class ClientMechanism(Protocol):
    def respond(self, challenge: bytes | None) -> bytes | None:
        """Return the message to send after the broker's challenge (None: at the beginning), or None: the client is
        authenticated, and so is the broker if the mechanism has a proof for it. Raises SaslError."""
        ...


class ServerMechanism(Protocol):
    def respond(self, message: bytes) -> bytes | Authenticated:
        """Return the challenge to send after the client's message, or who the client is. Raises SaslError."""
        ...
