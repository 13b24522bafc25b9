"""Passwords on the command line of `minibroker configs alter --user`, and `minibroker acls add`, which refuses what
kafka-acls refuses, before it asks a broker."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from minibroker import application
from minibroker.client.administering.client_quotas import QuotaEntity
from minibroker.client.cli import acls, command_admin, configs, quotas, users
from minibroker.client.cli.terminal.output import Format, UsageError, run_app
from minibroker.protocol.acls import SUPPORTED_OPERATIONS, AclOperation, AclResourceType
from minibroker.protocol.errors import BrokerError, ErrorCode

ALLOW = ["--allow-principal", "User:x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", (4096, None, None)),
        ("[password=a,b=c]", (4096, "a,b=c", None)),
        ("[iterations=8192,password=secret]", (8192, "secret", None)),
        ("[password-file=/a/b,iterations=5000]", (5000, None, "/a/b")),
    ],
)
def test_the_form_is_that_of_kafka_configs(text: str, expected: tuple[object, ...]) -> None:
    assert users._parsed(f"SCRAM-SHA-256={text}") == ("SCRAM-SHA-256", *expected)


@pytest.mark.parametrize(
    "text",
    ["", "secret", "[secret]", "[iterations=x,password=secret]", "[pass=secret]", "[password-file=f,password=secret]"],
)
def test_an_error_has_the_form_and_not_the_password(text: str) -> None:
    with pytest.raises(UsageError, match="give") as failed:
        users._parsed(f"SCRAM-SHA-512={text}")
    assert "secret" not in str(failed.value)


def test_a_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("hunter 22\n")
    assert users._password(users._parsed(f"SCRAM-SHA-256=[password-file={path}]"), "alice") == "hunter 22"
    with pytest.raises(UsageError, match="cannot be read"):
        users._password(users._parsed("SCRAM-SHA-256=[password-file=/no/such]"), "alice")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is empty: a password has at least one character"),
        (b"\r\n", "is empty"),
        (b"\0secret", "use printable ASCII"),
        (b"secret\nsecret\n", "has 2 lines: give a file with one"),
        (b"secret\xff", "it is not UTF-8"),
    ],
)
def test_a_file_without_a_password_is_named_with_the_rule(content: bytes, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rule) as failed:
        users._password(users._parsed(f"SCRAM-SHA-256=[password-file={path}]"), "alice")
    assert str(path) in str(failed.value)
    assert "secret" not in str(failed.value)


def test_an_empty_password_is_refused_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for text in ("[]", "[password=]"):
        with pytest.raises(UsageError, match="the password is empty"):
            users._password(users._parsed(f"SCRAM-SHA-512={text}"), "alice")


def test_nobody_is_asked_without_a_terminal() -> None:
    with pytest.raises(UsageError, match="give password-file=FILE"):
        users._password(users._parsed("SCRAM-SHA-256=[]"), "alice")


def test_passwords_and_quotas_are_not_changed_together() -> None:
    assert users.are_meant(["SCRAM-SHA-256=[]"], ["SCRAM-SHA-512"])
    assert not users.are_meant(["producer_byte_rate=1"], [])
    with pytest.raises(UsageError, match="two commands"):
        users.are_meant(["SCRAM-SHA-256=[]", "producer_byte_rate=1"], [])


@pytest.mark.parametrize(
    "text",
    [
        "SCRAM-SHA-265=[password=secret]",
        "scram-sha-256=[password=secret]",
        "PLAIN=[password=secret]",
        "PLAIN=secret",
        "SCRAM-SHA-256[password=secret]",
        "x[secret]",
    ],
)
def test_an_unknown_mechanism_is_named_without_the_password(text: str) -> None:
    with pytest.raises(UsageError, match="only SCRAM-SHA-256 and SCRAM-SHA-512, spelled so") as failed:
        users.are_meant([text], [])
    assert "secret" not in str(failed.value)
    with pytest.raises(UsageError, match="--delete scram-sha-256: only SCRAM-SHA-256"):
        users.are_meant([], ["scram-sha-256"])


def test_a_quota_that_is_no_number_is_not_shown() -> None:
    with pytest.raises(UsageError, match="--set password: a quota is a number") as failed:
        quotas.alter("127.0.0.1:1", QuotaEntity("alice"), ["password=secret"], [], False, Format.TABLE)
    assert "secret" not in str(failed.value)


def test_the_end_of_input_at_the_prompt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("getpass.getpass", ended)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(UsageError, match="no password was entered"):
        users._password(users._parsed("SCRAM-SHA-256=[]"), "alice")


def test_a_password_needs_a_user() -> None:
    with pytest.raises(UsageError, match="give --user NAME") as failed:
        configs.alter(broker=1, set_=["SCRAM-SHA-256=[password=secret]"], bootstrap="127.0.0.1:1")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [*ALLOW, "--operation", "IdempotentWrite", "--topic", "a"],
            "--operation IdempotentWrite means nothing for --topic: no request needs it. Use Read, Write,",
        ),
        ([*ALLOW, "--operation", "Create", "--group", "a"], "Use Read, Describe, Delete or All"),
        ([*ALLOW, "--operation", "Read", "--topic", "a", "--cluster"], "Read means nothing for --cluster"),
        ([*ALLOW, "--operation", "Read", "--transactional-id", "t"], "Use Describe, Write or All"),
        ([*ALLOW, "--operation", "Any", "--topic", "a"], "--operation Any means nothing for --topic"),
        ([*ALLOW, "--consumer", "--topic", "a"], "--consumer needs --group NAME"),
        ([*ALLOW, "--consumer", "--group", "g"], "--consumer needs --topic NAME"),
        ([*ALLOW, "--consumer", "--producer", "--topic", "a"], "--producer with --consumer needs --group NAME"),
        ([*ALLOW, "--producer", "--transactional-id", "t"], "--producer needs --topic NAME"),
        ([*ALLOW, "--producer", "--idempotent"], "--producer needs --topic NAME"),
        ([*ALLOW, "--producer", "--topic", "a", "--group", "g"], "--producer gives no rights on --group"),
        ([*ALLOW, "--consumer", "--topic", "a", "--group", "g", "--cluster"], "gives no rights on --cluster"),
        ([*ALLOW, "--consumer", "--topic", "a", "--group", "g", "--idempotent"], "--idempotent belongs to --producer"),
        ([*ALLOW, "--idempotent", "--topic", "a"], "--idempotent belongs to --producer"),
        (["--deny-principal", "User:x", "--producer", "--topic", "a"], "--producer and --consumer only allow"),
        (["--allow-host", "10.0.0.1", "--topic", "a"], "--allow-host needs a principal"),
        ([*ALLOW, "--allow-host", "shop.example.org", "--topic", "a"], "give an IP address"),
        ([*ALLOW, "--allow-host", "0:0::1", "--topic", "a"], "write the address as brokers do, ::1"),
        ([*ALLOW, "--operation", "Read", "--topic", "or*"], "or the beginning of names with --resource-pattern-type"),
        (ALLOW, "no resource given"),
    ],
)
def test_what_means_nothing_is_refused_with_the_rule(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(application(), ["acls", "add", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")


def test_a_principal_without_its_type_finds_nothing_and_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(application(), ["acls", "list", "--principal", "shop"]) == 2
    assert capsys.readouterr().err == "error: --principal 'shop' is not of the form type:name: give User:shop\n"


@pytest.mark.parametrize("kind", [*acls._OPTIONS])
def test_every_operation_that_a_request_needs_may_be_given(kind: AclResourceType) -> None:
    for operation in (AclOperation.ALL, *SUPPORTED_OPERATIONS[kind]):
        acls._check_operation(kind, operation)


def test_the_roles_together_have_the_rights_of_both() -> None:
    resources = [(AclResourceType.TOPIC, "a"), (AclResourceType.GROUP, "g"), (AclResourceType.TRANSACTIONAL_ID, "t")]
    needed = acls._needed(resources, None, True, True, True)
    assert {(kind.shown, operation.shown) for kind, _, operation in needed} == {
        *(("Topic", operation) for operation in ("Write", "Describe", "Create", "Read")),
        ("Group", "Read"),
        ("TransactionalId", "Write"),
        ("TransactionalId", "Describe"),
        ("Cluster", "IdempotentWrite"),
    }


@pytest.mark.parametrize(
    ("needs", "refused", "commands"),
    [
        # Both rights of the command, although a broker names the first.
        (
            ["--operation Describe --topic a", "--operation Alter --cluster"],
            "User:x may not Describe Topic 'a': {it} --operation Describe --topic a`",
            ["--operation Describe --topic a", "--operation Alter --cluster"],
        ),
        # Delete includes Describe, which a broker refused.
        (
            ["--operation Delete --group g"],
            "User:x at ::1 may not Describe Group 'g': {it} --operation Read --group g` (to look at it, ...)",
            ["--operation Delete --group g"],
        ),
        # A right that the command does not know of is not hidden.
        (
            ["--operation Read --topic a"],
            "User:x at ::1 may not Describe Cluster 'kafka-cluster': {it} --operation Describe --cluster`",
            ["--operation Read --topic a", "--operation Describe --cluster"],
        ),
        (["--operation Delete --topic a"], "deleting records of a-0", ["--operation Delete --topic a"]),
    ],
)
def test_a_refusal_names_all_rights_that_the_command_needs(needs: list[str], refused: str, commands: list[str]) -> None:
    it = "an administrator can allow it with `minibroker acls add --allow-principal User:x"
    error = BrokerError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, refused.format(it=it))
    said = str(command_admin._with_all_rights(error, needs))
    assert re.findall("`minibroker acls add --allow-principal [^ ]+ ([^`]*)`", said) == commands
    assert f"{refused.partition(': {it}')[0]}: an administrator" in said or "may not do all that" in said
