"""Kafka's schemas of authentication (SaslHandshake, SaslAuthenticate), and of the credentials of SCRAM."""

from __future__ import annotations

from minibroker.protocol import apis
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.kafka.schema import Field, KafkaApi, Schema, error_message, structs
from minibroker.protocol.kafka.types import BYTES, INT8, INT16, INT32, INT64, STRING, Array

# --- SaslHandshake (17), SaslAuthenticate (36) ---------------------------------------------------------------

SASL_HANDSHAKE = KafkaApi(
    apis.SASL_HANDSHAKE,
    1,  # after version 0, tokens follow without headers
    1,
    advertised_from=0,  # librdkafka looks for it
    first_flexible=2,
    request=Schema(m.SaslHandshakeRequest, Field("mechanism", STRING)),
    response=Schema(m.SaslHandshakeResponse, Field("error_code", INT16), Field("mechanisms", Array(STRING))),
    failed=lambda request, code, message: m.SaslHandshakeResponse(code, []),
)

SASL_AUTHENTICATE = KafkaApi(
    apis.SASL_AUTHENTICATE,
    0,
    2,
    first_flexible=2,
    request=Schema(m.SaslAuthenticateRequest, Field("auth_bytes", BYTES)),
    response=Schema(
        m.SaslAuthenticateResponse,
        Field("error_code", INT16),
        error_message("0+"),
        Field("auth_bytes", BYTES),
        Field("session_lifetime_ms", INT64, "1+"),
    ),
    failed=lambda request, code, message: m.SaslAuthenticateResponse(code, message),
)

# --- DescribeUserScramCredentials (50), AlterUserScramCredentials (51) ---------------------------------------

DESCRIBE_USER_SCRAM_CREDENTIALS = KafkaApi(
    apis.DESCRIBE_USER_SCRAM_CREDENTIALS,
    0,
    0,
    first_flexible=0,
    request=Schema(
        m.DescribeUserScramCredentialsRequest,
        Field("users", structs(m.ScramUserName, Field("name", STRING)), nullable="0+"),
    ),
    response=Schema(
        m.DescribeUserScramCredentialsResponse,
        Field("throttle_time_ms", INT32),
        Field("error_code", INT16),
        error_message("0+"),
        Field(
            "results",
            structs(
                m.DescribedScramUser,
                Field("user", STRING),
                Field("error_code", INT16),
                error_message("0+"),
                Field(
                    "credential_infos",
                    structs(m.ScramCredentialInfo, Field("mechanism", INT8), Field("iterations", INT32)),
                ),
            ),
        ),
    ),
    failed=lambda request, code, message: m.DescribeUserScramCredentialsResponse(0, code, message),
)


def _alter_failed(
    request: m.AlterUserScramCredentialsRequest, code: ErrorCode, message: str
) -> m.AlterUserScramCredentialsResponse:
    users = dict.fromkeys([*(each.name for each in request.deletions), *(each.name for each in request.upsertions)])
    return m.AlterUserScramCredentialsResponse(0, [m.AlteredScramUser(user, code, message) for user in users])


ALTER_USER_SCRAM_CREDENTIALS = KafkaApi(
    apis.ALTER_USER_SCRAM_CREDENTIALS,
    0,
    0,
    first_flexible=0,
    request=Schema(
        m.AlterUserScramCredentialsRequest,
        Field("deletions", structs(m.ScramCredentialDeletion, Field("name", STRING), Field("mechanism", INT8))),
        Field(
            "upsertions",
            structs(
                m.ScramCredentialUpsertion,
                Field("name", STRING),
                Field("mechanism", INT8),
                Field("iterations", INT32),
                Field("salt", BYTES),
                Field("salted_password", BYTES),
            ),
        ),
    ),
    response=Schema(
        m.AlterUserScramCredentialsResponse,
        Field("throttle_time_ms", INT32),
        Field(
            "results",
            structs(m.AlteredScramUser, Field("user", STRING), Field("error_code", INT16), error_message("0+")),
        ),
    ),
    failed=_alter_failed,
)

APIS = (SASL_HANDSHAKE, SASL_AUTHENTICATE, DESCRIBE_USER_SCRAM_CREDENTIALS, ALTER_USER_SCRAM_CREDENTIALS)
