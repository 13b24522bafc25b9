"""Requests by which clients authenticate themselves, and those that manage the credentials of SCRAM.

None of them is shown with its secrets: a message's repr has neither tokens nor salted passwords.
"""

from typing import Annotated

from msgspec import Meta

from minibroker.protocol.messages.fields import Int8, Int16, Int32, Int64, Message, Name, String

MAX_AUTH_BYTES = 64 * 1024
"""The largest message of a mechanism, which may be a token."""
MAX_MECHANISMS = 1_000
MAX_SCRAM_USERS = 10_000
MAX_KEY_BYTES = 1_024

AuthBytes = Annotated[bytes, Meta(max_length=MAX_AUTH_BYTES)]

# --- SaslHandshake (17), SaslAuthenticate (36) --------------------------------------------------------------------


class SaslHandshakeRequest(Message):
    mechanism: String


class SaslHandshakeResponse(Message):
    error_code: Int16
    mechanisms: Annotated[list[Name], Meta(max_length=MAX_MECHANISMS)]
    """Those that the listener has enabled."""


class SaslAuthenticateRequest(Message):
    auth_bytes: AuthBytes

    def __repr__(self) -> str:
        return "SaslAuthenticateRequest(...)"


class SaslAuthenticateResponse(Message):
    error_code: Int16
    error_message: String = ""
    auth_bytes: AuthBytes = b""
    session_lifetime_ms: Int64 = 0
    """The client must authenticate itself again within this time; 0: never (KIP-368)."""


# --- DescribeUserScramCredentials (50), AlterUserScramCredentials (51): KIP-554 -----------------------------------


class ScramUserName(Message):
    name: String


class DescribeUserScramCredentialsRequest(Message):
    users: Annotated[list[ScramUserName], Meta(max_length=MAX_SCRAM_USERS)] | None
    """None or none: all users."""


class ScramCredentialInfo(Message):
    mechanism: Int8
    """`protocol/sasl/scram.py` ScramMechanism."""
    iterations: Int32


class DescribedScramUser(Message):
    user: String
    error_code: Int16
    error_message: String = ""
    credential_infos: Annotated[list[ScramCredentialInfo], Meta(max_length=MAX_MECHANISMS)] = []


class DescribeUserScramCredentialsResponse(Message):
    throttle_time_ms: Int32
    error_code: Int16
    error_message: String = ""
    results: Annotated[list[DescribedScramUser], Meta(max_length=10 * MAX_SCRAM_USERS)] = []


class ScramCredentialDeletion(Message):
    name: String
    mechanism: Int8


class ScramCredentialUpsertion(Message):
    name: String
    mechanism: Int8
    iterations: Int32
    salt: Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
    salted_password: Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]

    def __repr__(self) -> str:
        return f"ScramCredentialUpsertion({self.name!r}, {self.mechanism}, {self.iterations}, ...)"


class AlterUserScramCredentialsRequest(Message):
    deletions: Annotated[list[ScramCredentialDeletion], Meta(max_length=MAX_SCRAM_USERS)]
    upsertions: Annotated[list[ScramCredentialUpsertion], Meta(max_length=MAX_SCRAM_USERS)]


class AlteredScramUser(Message):
    user: String
    error_code: Int16
    error_message: String = ""


class AlterUserScramCredentialsResponse(Message):
    throttle_time_ms: Int32
    results: Annotated[list[AlteredScramUser], Meta(max_length=2 * MAX_SCRAM_USERS)]
