"""Decisions about access have the semantics of Kafka's AclAuthorizer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from minibroker.broker.security.decisions import MOST_REMEMBERED, Bindings
from minibroker.protocol.acls import (
    CLUSTER_NAME,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    operation_bits,
    problem_of,
)

Op, T, P = AclOperation, AclResourceType, PatternType
ALLOW, DENY = AclPermissionType.ALLOW, AclPermissionType.DENY
ALICE, HOST = "User:alice", "10.0.0.1"


def acl(
    operation: AclOperation,
    name: str = "orders",
    *,
    permission: AclPermissionType = ALLOW,
    kind: AclResourceType = T.TOPIC,
    pattern: PatternType = P.LITERAL,
    principal: str = ALICE,
    host: str = "*",
) -> AclBinding:
    return AclBinding(ResourcePattern(kind, name, pattern), AccessControlEntry(principal, host, operation, permission))


def bindings(*acls: AclBinding, allows: bool = False) -> Bindings:
    found: dict[ResourcePattern, set[AccessControlEntry]] = {}
    for pattern, entry in acls:
        found.setdefault(pattern, set()).add(entry)
    return Bindings({pattern: frozenset(entries) for pattern, entries in found.items()}, allows_if_no_pattern=allows)


def may(
    acls: Iterable[AclBinding],
    operation: AclOperation,
    name: str = "orders",
    *,
    kind: AclResourceType = T.TOPIC,
    principal: str = ALICE,
    host: str = HOST,
    allows: bool = False,
) -> bool:
    return bindings(*acls, allows=allows).allows(principal, host, operation, kind, name)


def test_nothing_is_allowed_without_an_acl_unless_the_setting_says_so() -> None:
    assert not may([], Op.READ)
    assert may([], Op.READ, allows=True)
    assert not may([acl(Op.READ, principal="User:bob")], Op.READ, allows=True)
    assert may([acl(Op.READ, "other")], Op.READ, allows=True)


@pytest.mark.parametrize(
    ("name", "pattern", "resource", "applies"),
    [
        ("orders", P.LITERAL, "orders", True),
        ("orders", P.LITERAL, "orders-2", False),
        ("*", P.LITERAL, "orders", True),
        ("orders", P.PREFIXED, "orders", True),
        ("orders", P.PREFIXED, "orders-2", True),
        ("orders-2", P.PREFIXED, "orders", False),
        ("*", P.PREFIXED, "orders", False),
        ("*", P.PREFIXED, "*orders", True),
        ("o", P.PREFIXED, "orders", True),
    ],
)
def test_a_pattern_applies_to_its_name_to_all_or_to_names_that_begin_with_it(
    name: str, pattern: PatternType, resource: str, applies: bool
) -> None:
    assert may([acl(Op.READ, name, pattern=pattern)], Op.READ, resource) is applies


@pytest.mark.parametrize("allowed", [Op.READ, Op.WRITE, Op.DELETE, Op.ALTER, Op.DESCRIBE, Op.ALL])
def test_describe_is_implied_by_the_operations_that_kafka_names(allowed: AclOperation) -> None:
    assert may([acl(allowed)], Op.DESCRIBE)


@pytest.mark.parametrize("allowed", [Op.CREATE, Op.CLUSTER_ACTION, Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS])
def test_describe_is_implied_by_no_other_operation(allowed: AclOperation) -> None:
    assert not may([acl(allowed)], Op.DESCRIBE)


def test_alter_configs_implies_describe_configs_and_nothing_is_implied_the_other_way() -> None:
    assert may([acl(Op.ALTER_CONFIGS)], Op.DESCRIBE_CONFIGS)
    assert not may([acl(Op.DESCRIBE_CONFIGS)], Op.ALTER_CONFIGS)
    assert not may([acl(Op.DESCRIBE)], Op.READ)


def test_a_denied_operation_denies_itself_alone_and_all_denies_everything() -> None:
    allowed = acl(Op.ALL)
    assert may([allowed, acl(Op.READ, permission=DENY)], Op.DESCRIBE)
    assert not may([allowed, acl(Op.READ, permission=DENY)], Op.READ)
    assert not may([allowed, acl(Op.ALL, permission=DENY)], Op.DESCRIBE)
    assert not may([acl(Op.READ), acl(Op.DESCRIBE, permission=DENY)], Op.DESCRIBE)


@pytest.mark.parametrize("denied", [("*", P.LITERAL), ("ord", P.PREFIXED), ("orders", P.LITERAL)])
def test_one_deny_wins_whichever_pattern_it_has(denied: tuple[str, PatternType]) -> None:
    name, pattern = denied
    acls = [acl(Op.READ), acl(Op.READ, name, pattern=pattern, permission=DENY, principal="User:*")]
    assert not may(acls, Op.READ)


def test_an_entry_counts_for_its_principal_and_host_or_for_all() -> None:
    assert may([acl(Op.READ, principal="User:*")], Op.READ)
    assert may([acl(Op.READ, host=HOST)], Op.READ)
    assert not may([acl(Op.READ, host="10.0.0.2")], Op.READ)
    assert not may([acl(Op.READ)], Op.READ, principal="User:bob")
    assert not may([acl(Op.READ)], Op.READ, principal="Group:alice")
    assert may([acl(Op.READ), acl(Op.READ, permission=DENY, host="10.0.0.2")], Op.READ)


def test_resources_of_other_types_do_not_count() -> None:
    assert not may([acl(Op.READ, kind=T.GROUP)], Op.READ)
    assert may([acl(Op.ALTER, CLUSTER_NAME, kind=T.CLUSTER)], Op.DESCRIBE, CLUSTER_NAME, kind=T.CLUSTER)


def test_authorized_operations_are_those_that_each_would_be_allowed() -> None:
    found = bindings(acl(Op.READ), acl(Op.ALTER_CONFIGS)).operations(ALICE, HOST, T.TOPIC, "orders")
    assert found == operation_bits([Op.READ, Op.DESCRIBE, Op.ALTER_CONFIGS, Op.DESCRIBE_CONFIGS])


@pytest.mark.parametrize(
    ("acls", "allowed"),
    [
        ([], False),
        ([acl(Op.WRITE)], True),
        ([acl(Op.ALL, "o", pattern=P.PREFIXED)], True),
        ([acl(Op.READ)], False),
        ([acl(Op.WRITE), acl(Op.WRITE, permission=DENY)], False),
        ([acl(Op.WRITE), acl(Op.WRITE, "ord", pattern=P.PREFIXED, permission=DENY)], False),
        ([acl(Op.WRITE, "ord", pattern=P.PREFIXED), acl(Op.WRITE, permission=DENY)], True),
        ([acl(Op.WRITE, "ord", pattern=P.PREFIXED), acl(Op.WRITE, "o", pattern=P.PREFIXED, permission=DENY)], False),
        ([acl(Op.WRITE, "*"), acl(Op.WRITE, "o", pattern=P.PREFIXED, permission=DENY)], True),
        ([acl(Op.WRITE, "other"), acl(Op.ALL, "*", permission=DENY)], False),
        ([acl(Op.WRITE, principal="User:*", host="*")], True),
        ([acl(Op.WRITE, principal="User:bob")], False),
    ],
)
def test_a_right_on_any_topic_is_one_that_no_deny_covers_as_a_whole(acls: list[AclBinding], allowed: bool) -> None:
    assert bindings(*acls).allows_on_any(ALICE, HOST, Op.WRITE, T.TOPIC) is allowed


def test_a_right_on_any_topic_exists_if_everybody_may_unless_all_topics_are_denied() -> None:
    assert bindings(allows=True).allows_on_any(ALICE, HOST, Op.WRITE, T.TOPIC)
    denied = acl(Op.WRITE, "*", permission=DENY)
    assert not bindings(denied, allows=True).allows_on_any(ALICE, HOST, Op.WRITE, T.TOPIC)


def test_a_changed_pattern_replaces_the_one_before_and_an_empty_one_removes_it() -> None:
    before = bindings(acl(Op.READ), acl(Op.WRITE, "o", pattern=P.PREFIXED))
    assert before.allows(ALICE, HOST, Op.READ, T.TOPIC, "orders")
    pattern, entry = acl(Op.ALTER)
    after = before.changed({pattern: frozenset([entry])})
    assert not after.allows(ALICE, HOST, Op.READ, T.TOPIC, "orders")
    assert after.allows(ALICE, HOST, Op.ALTER, T.TOPIC, "orders")
    gone = after.changed({ResourcePattern(T.TOPIC, "o", P.PREFIXED): frozenset()})
    assert not gone.allows(ALICE, HOST, Op.WRITE, T.TOPIC, "orders")
    assert before.allows(ALICE, HOST, Op.READ, T.TOPIC, "orders")


def test_names_that_clients_choose_take_a_bounded_amount_of_memory() -> None:
    snapshot = bindings(acl(Op.READ))
    for number in range(MOST_REMEMBERED + 10):
        snapshot.allows(ALICE, HOST, Op.READ, T.TOPIC, f"topic-{number}")
    assert len(snapshot._remembered) <= MOST_REMEMBERED


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (AclFilter(), {"orders", "ord", "*"}),
        (AclFilter(name="orders", pattern_type=P.LITERAL), {"orders"}),
        (AclFilter(name="ord", pattern_type=P.PREFIXED), {"ord"}),
        (AclFilter(name="ord"), {"ord"}),
        (AclFilter(name="orders", pattern_type=P.MATCH), {"orders", "ord", "*"}),
        (AclFilter(name="other", pattern_type=P.MATCH), {"*"}),
        (AclFilter(name="*", pattern_type=P.LITERAL), {"*"}),
        (AclFilter(pattern_type=P.PREFIXED), {"ord"}),
        (AclFilter(resource_type=T.GROUP), set()),
        (AclFilter(principal="User:bob"), set()),
        (AclFilter(operation=Op.READ, permission=ALLOW, host="*"), {"orders", "ord", "*"}),
    ],
)
def test_filters_match_as_in_kafka(wanted: AclFilter, found: set[str]) -> None:
    snapshot = bindings(acl(Op.READ), acl(Op.READ, "ord", pattern=P.PREFIXED), acl(Op.READ, "*"))
    assert {binding.pattern.name for binding in snapshot.matching(wanted)} == found


@pytest.mark.parametrize(
    "wrong",
    [
        acl(Op.ANY),
        acl(Op.READ, ""),
        acl(Op.READ, "a/b"),
        acl(Op.READ, ".."),
        acl(Op.READ, "a\nb"),
        acl(Op.READ, "a\x00"),
        acl(Op.READ, pattern=P.MATCH),
        acl(Op.READ, kind=T.ANY),
        acl(Op.READ, "orders", kind=T.CLUSTER),
        acl(Op.READ, principal="alice"),
        acl(Op.READ, host=""),
        acl(Op.READ, permission=AclPermissionType.ANY),
    ],
)
def test_a_binding_that_kafka_rejects_has_a_problem(wrong: AclBinding) -> None:
    assert problem_of(wrong) is not None
    assert problem_of(acl(Op.READ)) is None
