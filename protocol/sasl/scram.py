"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): both sides prove that they know the password, which stays with
the client. scramp implements the mechanism.

The server keeps what is derived from a password. An unknown user gets a salt as well, always the same one for a
mechanism, and is refused with the proof. The limit: unknown users always get LEAST_ITERATIONS iterations and SALT_BYTES
bytes of salt, so a client can tell that a user with other numbers exists.

librdkafka before 2.6.1 puts its own nonce once more before that of its last message, where RFC 5802 wants the server's
nonce as it is. Kafka 3.9 accepts that (ScramSaslServer, `endsWith`), and so does this server, because Debian's kcat is
such a client. An old exchange cannot be replayed for it: the proof also covers the server's first message, with a nonce
that is drawn for each exchange. Kafka 4 refuses these clients again.
"""

from __future__ import annotations

import hashlib
import hmac
import shlex
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import scramp
from scramp.utils import saslprep

from minibroker.protocol.sasl.mechanisms import SCRAM_SHA_256, SCRAM_SHA_512, Authenticated, SaslError
from minibroker.protocol.words import printable

LEAST_ITERATIONS = 4_096
MOST_ITERATIONS = 16_384
"""Kafka's ScramMechanism and ScramCredentialUtils. More would let whoever sets credentials keep clients busy."""
MOST_ITERATIONS_OF_CLIENTS = 1_000_000
"""A client that hashed more often for a broker would stall."""
SALT_BYTES = 32
LONGEST_NAME = 300
"""Characters of a user's name. It becomes the name of a znode, and to normalize it (SASLprep) takes long."""
MAX_MESSAGE_BYTES = 2_048
"""Room for the longest name."""
_SHOWN = 100
"""Characters of a user's name in an error."""


class ScramMechanism(IntEnum):
    """The mechanisms by their numbers in requests."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism(self) -> str:
        """The name that clients use."""
        return SCRAM_SHA_256 if self is ScramMechanism.SCRAM_SHA_256 else SCRAM_SHA_512

    @property
    def digest(self) -> str:
        """The hash function."""
        return "sha256" if self is ScramMechanism.SCRAM_SHA_256 else "sha512"


BY_NAME = {each.mechanism: each for each in ScramMechanism}


class ScramCredential(NamedTuple):
    """What the server knows of a password. Not shown."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential(..., iterations={self.iterations})"


def password_problem(password: str) -> str | None:
    """Return why this is no password for SCRAM, as the end of a sentence; None: it is one. Clients would hash some
    characters in different ways: Java and librdkafka as they are, others after SASLprep."""
    if not password:
        return "is empty: a password has at least one character"
    try:
        prepared = saslprep(password)
    except scramp.ScramException:
        prepared = ""
    if prepared != password:
        return "has characters that clients treat differently: use printable ASCII"
    return None


def salted_password(mechanism: ScramMechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """Return what a client sends to set a password (KIP-554). Takes some milliseconds. Raises ValueError with the
    password's problem."""
    problem = password_problem(password)
    if problem is not None:
        raise ValueError(f"the password {problem}")
    return hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)


def credential_of(mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """Return the credential of a salted password."""
    client_key = hmac.digest(salted, b"Client Key", mechanism.digest)
    stored_key = hashlib.new(mechanism.digest, client_key).digest()
    return ScramCredential(salt, stored_key, hmac.digest(salted, b"Server Key", mechanism.digest), iterations)


def name_problem(name: str) -> str | None:
    """Return why no user of this name could log in, or None."""
    if not 0 < len(name) <= LONGEST_NAME:
        return f"a user's name has from 1 to {LONGEST_NAME} characters"
    try:
        prepared = saslprep(name)
    except scramp.ScramException:
        prepared = ""
    if prepared != name:
        return f"the name {name!r} has characters that SASLprep (RFC 4013) changes or forbids: use ASCII"
    return None


def decoy_secret(secret: bytes) -> bytes:
    """Return the key of the salts of unknown users, the same for all brokers with this secret."""
    return hmac.digest(secret, b"minibroker unknown users of SCRAM", "sha256")


class ScramClient:
    """See `ClientMechanism`. `nonce` is random text, without commas."""

    def __init__(self, mechanism: ScramMechanism, username: str, password: str, nonce: str) -> None:
        try:
            self._scram = scramp.ScramClient([mechanism.mechanism], username, password, c_nonce=nonce)
        except scramp.ScramException as error:
            raise SaslError(f"the user or the password cannot be used with SCRAM: {error}") from None
        self._step = 0

    def respond(self, challenge: bytes | None) -> bytes | None:
        self._step += 1
        try:
            if challenge is None:
                return str(self._scram.get_client_first()).encode()
            if self._step == 2:
                self._scram.set_server_first(_text(challenge))
                iterations = int(self._scram.iterations)
                if not LEAST_ITERATIONS <= iterations <= MOST_ITERATIONS_OF_CLIENTS:
                    raise SaslError(
                        f"the broker asks for {iterations} iterations of SCRAM, but a client accepts "
                        f"{LEAST_ITERATIONS} to {MOST_ITERATIONS_OF_CLIENTS}: fewer would weaken the password, more "
                        "would stall the client"
                    )
                return str(self._scram.get_client_final()).encode()
            self._scram.set_server_final(_text(challenge))
        except scramp.ScramException as error:
            raise SaslError(
                f"the broker's answer is not one of SCRAM, or does not prove that it knows the user: {error}"
            ) from None
        return None


class ScramServer:
    """See `ServerMechanism`. `nonce` is random text, without commas; `decoy` is the key of the salts of
    unknown users, which only the brokers know."""

    def __init__(
        self,
        mechanism: ScramMechanism,
        credential_of: Callable[[str], ScramCredential | None],
        nonce: str,
        decoy: bytes,
    ) -> None:
        self._mechanism = mechanism
        self._credential_of = credential_of
        self._decoy = decoy
        self._user = ""
        self._is_known = False
        self._has_begun = False
        self._nonce = nonce
        self._scram = scramp.ScramMechanism(mechanism.mechanism).make_server(self._look_up, s_nonce=nonce)

    def respond(self, message: bytes) -> bytes | Authenticated:
        try:
            text = _text(message)
            if not self._has_begun:
                self._has_begun = True
                _check_name(text)
                self._scram.set_client_first(text)
                return str(self._scram.get_server_first()).encode()
            self._accept_repeated_nonce(text)
            self._scram.set_client_final(text)
            final = str(self._scram.get_server_final()).encode()
        except scramp.ScramException as error:
            if error.server_error is scramp.utils.ServerError.INVALID_PROOF:
                raise SaslError(self._refusal()) from None
            raise SaslError(f"SCRAM: {error}") from None
        if not self._is_known:
            raise SaslError(self._refusal())
        return Authenticated(self._user, final)

    def _accept_repeated_nonce(self, client_final: str) -> None:
        """See the module."""
        expected = str(self._scram.nonce)
        repeated = expected.removesuffix(self._nonce) + expected
        if f"r={repeated}" in client_final.split(","):
            self._scram.nonce = type(self._scram.nonce)(repeated)

    def _refusal(self) -> str:
        """Return why the proof is wrong, and what an administrator can do. Clients do not see it."""
        user, mechanism = shlex.quote(printable(self._user[:_SHOWN])), self._mechanism.mechanism
        remedy = f"`minibroker configs alter --user {user} --set '{mechanism}=[password-file=FILE]'`"
        if self._is_known:
            return f"wrong password of user {user} for {mechanism}; {remedy} sets the one that FILE contains"
        return (
            f"no user {user} has a password for {mechanism}; {remedy} sets the one that FILE contains, "
            "`minibroker users list` lists users"
        )

    def _look_up(self, user: str) -> tuple[bytes, bytes, bytes, int]:
        found = self._credential_of(user)
        self._user, self._is_known = user, found is not None
        if found is None:
            made = hmac.digest(self._decoy, f"{self._mechanism.mechanism} {user}".encode(), "sha512")
            size = hashlib.new(self._mechanism.digest).digest_size
            found = ScramCredential(made[:SALT_BYTES], made[:size], made[:size], LEAST_ITERATIONS)
        return found.salt, found.stored_key, found.server_key, found.iterations


def _check_name(client_first: str) -> None:
    """Raises SaslError if the name is too long to be normalized."""
    names = (part[2:].replace("=2C", ",").replace("=3D", "=") for part in client_first.split(",") if part[:2] == "n=")
    if any(len(name) > LONGEST_NAME for name in names):
        raise SaslError(f"SCRAM: the user's name has more than {LONGEST_NAME} characters")


def _text(message: bytes) -> str:
    if len(message) > MAX_MESSAGE_BYTES:
        raise SaslError(f"a message of SCRAM has {len(message)} bytes; {MAX_MESSAGE_BYTES} are allowed")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise SaslError("a message of SCRAM is not UTF-8") from None
