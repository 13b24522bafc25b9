"""The arguments by which clients protect their connections."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from minibroker import Producer, sync
from minibroker.client.cli.terminal import security as command_config
from minibroker.client.errors import AuthenticationFailed, InvalidSetting, topic_error
from minibroker.client.security import Credentials, TokenFile, from_kafka_names, protection
from minibroker.client.shown import shown
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import ErrorCode

ALICE = {"sasl_plain_username": "alice", "sasl_plain_password": "hunter22"}
SCRAM: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-256", **ALICE}
LOGIN = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="hunter22";'


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_user_has_a_name_and_a_password(mechanism: str) -> None:
    found = protection("Producer", {**SCRAM, "sasl_mechanism": mechanism})
    assert found == (None, Credentials(mechanism, "alice", "hunter22"))


def test_tls_and_sasl_go_together() -> None:
    tls, credentials = protection("Producer", {**SCRAM, "security_protocol": "SASL_SSL", "ssl_check_hostname": False})
    assert tls is not None
    assert not tls.check_hostname
    assert credentials is not None


def test_a_token_has_a_provider() -> None:
    def token() -> str:
        return "x.y."

    given = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": token}
    assert protection("Producer", given).sasl == Credentials("OAUTHBEARER", token_provider=token)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"security_protocol": "SASL"}, "use 'PLAINTEXT' or 'SSL' or 'SASL_PLAINTEXT' or 'SASL_SSL'"),
        ({"security_protocol": "PLAINTEXT"}, 'sasl_mechanism=.* needs security_protocol="SASL_SSL" or'),
        ({"security_protocol": "SSL"}, 'sasl_mechanism=.* needs security_protocol="SASL_SSL"$'),
        ({"ssl_cafile": "ca.pem"}, 'ssl_cafile=.* needs security_protocol="SASL_SSL"$'),
        ({"sasl_mechanism": None}, "use 'PLAIN' or 'SCRAM-SHA-256' or 'SCRAM-SHA-512' or 'OAUTHBEARER'"),
        ({"sasl_mechanism": "GSSAPI"}, "use 'PLAIN'"),
        ({"sasl_plain_username": None}, "sasl_plain_username=None: SCRAM-SHA-256 needs it"),
        ({"sasl_plain_password": None}, "sasl_plain_password=None: SCRAM-SHA-256 needs it"),
        ({"sasl_plain_password": ""}, "not empty"),
        ({"sasl_plain_password": "hunter22\0"}, "without the character NUL"),
        ({"sasl_plain_password": b"hunter22"}, "give text"),
        ({"sasl_plain_password": "hunter22\udc80"}, "surrogate"),
        ({"sasl_mechanism": "OAUTHBEARER"}, "OAUTHBEARER does not use it: give sasl_oauth_token_provider"),
        (
            {"sasl_mechanism": "OAUTHBEARER", **dict.fromkeys(ALICE), "sasl_oauth_token_provider": "x.y."},
            "give a function that returns a token",
        ),
        ({"sasl_oauth_token_provider": str}, "SCRAM-SHA-256 does not use it: give sasl_plain_username and"),
    ],
)
def test_an_error_names_the_argument_and_the_rule_and_never_the_password(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidSetting, match=rule) as failed:
        protection("Producer", {**SCRAM, **changes})
    assert "hunter22" not in str(failed.value)
    assert "hunter22" not in repr(failed.value.value)


def test_a_client_does_not_show_its_password() -> None:
    assert "hunter22" not in repr(Producer("127.0.0.1:1", **SCRAM))
    assert "hunter22" not in repr(sync.Producer("127.0.0.1:1", **SCRAM))
    found = protection("Producer", SCRAM)
    assert "hunter22" not in repr(found) + str(found) + shown(found)


def test_files_have_kafkas_names() -> None:
    values = {
        "security.protocol": "SASL_SSL",
        "ssl.truststore.location": "ca.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": LOGIN,
    }
    expected = {"security_protocol": "SASL_SSL", "ssl_cafile": "ca.pem", "sasl_mechanism": "SCRAM-SHA-512", **ALICE}
    assert from_kafka_names(values) == expected
    del values["sasl.jaas.config"]
    assert from_kafka_names({**values, "sasl.username": "alice", "sasl.password": "hunter22"}) == expected


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x.y.\n")
    found = from_kafka_names(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": f"file://{path}",
        }
    )
    provider = found["sasl_oauth_token_provider"]
    assert isinstance(provider, TokenFile)
    assert pickle.loads(pickle.dumps(provider))() == "x.y."


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"security.protocol": "SASL"}, "give PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ({"sasl.mechanism": "GSSAPI"}, "give PLAIN, SCRAM-SHA-256"),
        ({"sasl.mechanism": "PLAIN"}, "sasl.mechanism=PLAIN needs PlainLoginModule"),
        ({"sasl.jaas.config": LOGIN.rstrip(";")}, "semicolon"),
        ({"sasl.jaas.config": 'ScramLoginModule required password="hunter22";'}, "required username="),
        ({"sasl.mechanism": "OAUTHBEARER", "sasl.jaas.config": "OAuthBearerLoginModule required ;"}, "file of a token"),
    ],
)
def test_an_error_in_a_file_names_the_rule_and_never_the_password(changes: dict[str, str], rule: str) -> None:
    values = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": LOGIN}
    with pytest.raises(InvalidSetting, match=rule) as failed:
        from_kafka_names({**values, **changes})
    assert "hunter22" not in str(failed.value)


def test_a_file_of_commands_may_continue_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(
        "# the user of reports\nsecurity.protocol=SASL_PLAINTEXT\n\nsasl.mechanism=SCRAM-SHA-256\n"
        'sasl.jaas.config=org.apache.ScramLoginModule required \\\n    username="alice" \\\n    password="hunter22";\n'
    )
    assert command_config.read(path) == SCRAM


def test_a_file_of_commands_has_no_other_names(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text("sasl.mechanism=PLAIN\nsasl.pasword=hunter22\n")
    with pytest.raises(InvalidSetting, match="line 2: 'sasl.pasword' is none of the names") as failed:
        command_config.read(path)
    assert "hunter22" not in str(failed.value)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        command_config.read(tmp_path / "missing")


@pytest.mark.parametrize(
    "line",
    ["sasl.jaas.config hunter22", 'sasl.jaas.config Plain required password="hunter22" username="a";', "hunter22"],
)
def test_a_line_without_a_name_is_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(f"sasl.mechanism=PLAIN\n{line}\n")
    with pytest.raises(
        InvalidSetting, match=r"client.properties.*line 2: its beginning is none of the names"
    ) as failed:
        command_config.read(path)
    assert "hunter22" not in str(failed.value)


def test_the_error_of_a_failed_authentication_survives_pickling() -> None:
    error = AuthenticationFailed("h:9092", "PLAIN", "Authentication failed: Invalid username or password")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert copied.reason == "Authentication failed: Invalid username or password"


@pytest.mark.parametrize(
    ("given", "principal"),
    [
        ({}, "User:ANONYMOUS"),
        (SCRAM, "User:alice"),
        ({"security_protocol": "SSL"}, None),
        (
            {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauth_token_provider": lambda: "x.y.",
            },
            None,
        ),
    ],
)
def test_a_client_knows_its_principal_unless_a_certificate_or_a_token_has_it(
    given: dict[str, Any], principal: str | None
) -> None:
    assert protection("Producer", given).principal == principal


def test_a_refusal_names_what_the_client_knows() -> None:
    code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    known = str(topic_error(code, "", "a", "User:CN=x y", AclOperation.WRITE))
    assert known.startswith("TOPIC_AUTHORIZATION_FAILED: User:CN=x y may not Describe Topic 'a': ")
    assert known.endswith("`minibroker acls add --allow-principal 'User:CN=x y' --operation Write --topic a`")
    member = str(topic_error(code, "", "a", "User:x", AclOperation.READ, "my group"))
    assert member.endswith("`minibroker acls add --allow-principal User:x --consumer --topic a --group 'my group'`")
    unknown = str(topic_error(code, "", "a", None))
    assert "this client's principal, which the broker's log names, may not Describe Topic 'a'" in unknown
    assert "--allow-principal PRINCIPAL --operation Describe" in unknown
    assert topic_error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "x", "a", None).detail == "x"
