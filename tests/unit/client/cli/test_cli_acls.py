"""`minibroker acls add` refuses what kafka-acls refuses, before it asks a broker."""

from __future__ import annotations

import pytest

from minibroker import application
from minibroker.client.cli import acls
from minibroker.client.cli.terminal.output import run_app
from minibroker.protocol.acls import SUPPORTED_OPERATIONS, AclOperation, AclResourceType

ALLOW = ["--allow-principal", "User:x"]


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
