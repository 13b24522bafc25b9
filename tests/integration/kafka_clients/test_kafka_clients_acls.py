"""Access control lists through librdkafka's admin client and our command line, and what librdkafka's clients report."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from minibroker.deploy.local.local_cluster import LocalCluster
from tests.integration.cli.shell import Shell
from tests.live_cluster import live_cluster
from tests.waiting import until_true

kafka: Any = importlib.import_module("confluent_kafka.admin")  # its type stubs are incomplete

pytestmark = pytest.mark.slow

PATIENCE_S = 60
SETTINGS = {
    "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "group.initial.rebalance.delay.ms": "0",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster") / ".minibroker", settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: LocalCluster) -> Any:
    return kafka.AdminClient({"bootstrap.servers": cluster.bootstrap(), "log_level": 0})


def acl(operation: str, name: str, *, kind: str = "TOPIC", pattern: str = "LITERAL", permission: str = "ALLOW") -> Any:
    return kafka.AclBinding(
        kafka.ResourceType[kind],
        name,
        kafka.ResourcePatternType[pattern],
        "User:ANONYMOUS",
        "*",
        kafka.AclOperation[operation],
        kafka.AclPermissionType[permission],
    )


def matching(name: str) -> Any:
    return kafka.AclBindingFilter(
        kafka.ResourceType.TOPIC,
        name,
        kafka.ResourcePatternType.MATCH,
        None,
        None,
        kafka.AclOperation.ANY,
        kafka.AclPermissionType.ANY,
    )


def create(admin: Any, *bindings: Any) -> None:
    for future in admin.create_acls(list(bindings)).values():
        assert future.result(PATIENCE_S) is None


def produce_error(cluster: LocalCluster, topic: str) -> int | None:
    """Return the error of a record, or None."""
    errors: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap(), "log_level": 0, "message.timeout.ms": 10_000})
    producer.produce(topic, b"value", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    [error] = errors
    return None if error is None else error.code()


def test_acls_are_created_described_and_deleted(admin: Any) -> None:
    bindings = {acl("READ", "described"), acl("WRITE", "desc", pattern="PREFIXED", permission="DENY")}
    create(admin, *bindings)
    until_true(lambda: set(admin.describe_acls(matching("described")).result(PATIENCE_S)) == bindings)
    [deleted] = admin.delete_acls([matching("described")]).values()
    assert set(deleted.result(PATIENCE_S)) == bindings
    until_true(lambda: not admin.describe_acls(matching("described")).result(PATIENCE_S))


def test_a_binding_that_means_nothing_is_refused(admin: Any) -> None:
    [refused] = admin.create_acls([acl("READ", "not-the-cluster", kind="BROKER")]).values()
    with pytest.raises(KafkaException) as raised:
        refused.result(PATIENCE_S)
    assert raised.value.args[0].code() == KafkaError.INVALID_REQUEST


def test_clients_report_what_they_may_not_do(cluster: LocalCluster, admin: Any) -> None:
    [created] = admin.create_topics([kafka.NewTopic("orders", 1, 3)]).values()
    created.result(PATIENCE_S)
    assert produce_error(cluster, "orders") is None
    create(admin, acl("READ", "orders"))
    until_true(lambda: produce_error(cluster, "orders") == KafkaError.TOPIC_AUTHORIZATION_FAILED)
    create(admin, acl("WRITE", "orders"), acl("DESCRIBE", "readers", kind="GROUP"))
    until_true(lambda: produce_error(cluster, "orders") is None)

    consumer = Consumer({"bootstrap.servers": cluster.bootstrap(), "group.id": "readers", "log_level": 0})
    try:
        consumer.subscribe(["orders"])
        until_true(lambda: _code(consumer.poll(1.0)) == KafkaError.GROUP_AUTHORIZATION_FAILED)
    finally:
        consumer.close()


def _code(message: Any) -> int | None:
    return None if message is None or message.error() is None else message.error().code()


def test_the_command_line_adds_lists_and_removes(cluster: LocalCluster) -> None:
    minibroker = Shell(cluster.directory.parent)
    added = minibroker(
        "acls", "add", "--allow-principal", "User:alice", "--consumer", "--topic", "pay", "--group", "readers-of-pay"
    )
    assert "warning: 'alice' is none of the users with a password" in added.err
    assert added.out.splitlines() == [
        "added: User:alice may Read Topic 'pay'",
        "added: User:alice may Describe Topic 'pay'",
        "added: User:alice may Read Group 'readers-of-pay'",
    ]
    listed = json.loads(minibroker.ok("acls", "list", "--topic", "pay", "--format", "json"))
    assert {(each["principal"], each["operation"]) for each in listed} == {
        ("User:alice", "READ"),
        ("User:alice", "DESCRIBE"),
    }
    refused = minibroker("acls", "remove", "--topic", "pay")
    assert (refused.code, refused.out) == (1, "")
    assert "matches: User:alice may Read Topic 'pay'\n" in refused.err
    assert "to ask 'Remove 2 access control lists?'; to confirm, repeat with --yes" in refused.err
    assert len(json.loads(minibroker.ok("acls", "list", "--topic", "pay", "--format", "json"))) == 2
    removed = minibroker.ok("acls", "remove", "--topic", "pay", "--yes").splitlines()
    assert len(removed) == 2
    assert minibroker.ok("acls", "remove", "--topic", "pay").startswith("nothing removed")
