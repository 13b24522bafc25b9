"""PLAIN (RFC 4616): the client sends its name and its password."""

from collections.abc import Callable
from hmac import compare_digest

from minibroker.protocol.sasl.mechanisms import Authenticated, SaslError
from minibroker.protocol.words import printable

_SHOWN = 100
"""Characters of a user's name in an error."""


class PlainClient:
    """See `ClientMechanism`."""

    def __init__(self, username: str, password: str) -> None:
        self._message = f"\0{username}\0{password}".encode()

    def respond(self, challenge: bytes | None) -> bytes | None:
        return self._message if challenge is None else None


class PlainServer:
    """See `ServerMechanism`. An unknown user is refused like a wrong password, and takes as long."""

    def __init__(self, password_of: Callable[[str], str | None]) -> None:
        self._password_of = password_of

    def respond(self, message: bytes) -> Authenticated:
        try:
            parts = message.decode().split("\0")
        except UnicodeDecodeError:
            raise SaslError("the message of PLAIN is not UTF-8") from None
        if len(parts) != 3:
            raise SaslError(f"the message of PLAIN has {len(parts)} parts, not an identity, a user and a password")
        identity, user, password = parts
        if not user or not password:
            raise SaslError(f"the message of PLAIN has no {'password' if user else 'user'}")
        if identity not in ("", user):
            raise SaslError("the client asks for another identity than that of its user")
        expected = self._password_of(user)
        is_same = compare_digest(password.encode(), (password if expected is None else expected).encode())
        if expected is None or not is_same:
            raise SaslError(
                f"an unknown user or a wrong password: {printable(user[:_SHOWN])}; the users of PLAIN are those of the "
                "listener's sasl.jaas.config (user_NAME)"
            )
        return Authenticated(user)
