"""OAUTHBEARER (RFC 7628): the client sends a token that an identity provider has issued.

A broker that refuses a token first says so in a challenge, and fails after the client's answer to it, as the RFC has
it. Extensions are accepted and ignored.
"""

import re
from collections.abc import Callable

from minibroker.protocol.sasl.mechanisms import Authenticated, SaslError

_SEPARATOR = "\x01"
_ABORT = b"\x01"
_INITIAL = re.compile(
    r"n,(?:a=(?P<identity>(?:[^=,\x00\x80-\U0010ffff]|=2C|=3D)+))?,\x01"
    r"(?P<pairs>(?:[A-Za-z]+=[\x21-\x7E \t\r\n]+\x01)*)\x01"
)
"""As in Kafka (OAuthBearerClientInitialResponse)."""
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(?P<token>[-_.a-zA-Z0-9]+)")
INVALID_TOKEN = b'{"status":"invalid_token"}'
"""The challenge that refuses a token (RFC 7628, 3.2.2)."""
_TOKEN = re.compile(r"[-_.a-zA-Z0-9]+")


class OAuthBearerClient:
    """See `ClientMechanism`. Raises SaslError for what is no token."""

    def __init__(self, token: str) -> None:
        if not _TOKEN.fullmatch(token):
            raise SaslError("the token is empty, or has other characters than those of a JWT")
        self._message = f"n,,{_SEPARATOR}auth=Bearer {token}{_SEPARATOR}{_SEPARATOR}".encode()

    def respond(self, challenge: bytes | None) -> bytes | None:
        if challenge is None:
            return self._message
        return _ABORT if challenge else None  # a challenge says why the token is refused; the error follows


class OAuthBearerServer:
    """See `ServerMechanism`. `validate` returns who a token is for, or raises SaslError or UnknownKey."""

    def __init__(self, validate: Callable[[str], Authenticated]) -> None:
        self._validate = validate
        self.refusal: SaslError | None = None
        """Why the token is refused. The client has been told that it is."""

    def respond(self, message: bytes) -> bytes | Authenticated:
        if self.refusal is not None:
            raise self.refusal
        identity, token = parse_initial(message)
        try:
            found = self._validate(token)
            if identity not in ("", found.user):
                raise SaslError("the client asks for another identity than that of its token")
        except TokenRefused as error:
            self.refusal = error
            return INVALID_TOKEN
        return found


class TokenRefused(SaslError):
    """The token is not valid."""


class UnknownKey(Exception):
    """The token names a key that may be known after the keys are read again. The exchange stays as it was."""


def parse_initial(message: bytes) -> tuple[str, str]:
    """Return the requested identity, which may be empty, and the token. Raises SaslError."""
    try:
        found = _INITIAL.fullmatch(message.decode("utf-8"))
    except UnicodeDecodeError:
        found = None
    if found is None:
        raise SaslError("the client's message is not one of OAUTHBEARER")
    pairs = [pair.partition("=") for pair in found["pairs"].split(_SEPARATOR) if pair]
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise SaslError("the client's message of OAUTHBEARER has a name twice")
    bearer = _BEARER.fullmatch({name: value for name, _, value in pairs}.get("auth", ""))
    if bearer is None:
        raise SaslError("the client's message of OAUTHBEARER has no token")
    identity = (found["identity"] or "").replace("=2C", ",").replace("=3D", "=")
    return identity, bearer["token"]
