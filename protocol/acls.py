"""The vocabulary of access control lists: resources, operations, bindings and filters, as Kafka names them (KIP-11,
KIP-290)."""

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, TypeVar

WILDCARD = "*"
"""Stands for every name in a literal pattern, and for every host."""
ANYBODY = "User:*"
"""Stands for every principal."""
CLUSTER_NAME = "kafka-cluster"
"""The name of the only resource of type CLUSTER."""


class _Named(IntEnum):
    @property
    def shown(self) -> str:
        """The name in Kafka's tools and znodes: `TransactionalId` for TRANSACTIONAL_ID."""
        return "".join(word.capitalize() for word in self.name.split("_"))


class AclResourceType(_Named):
    ANY = 1
    """In filters alone."""
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(_Named):
    ANY = 1
    """In filters alone: both types of patterns with this very name."""
    MATCH = 2
    """In filters alone: every pattern that applies to the resource of this name."""
    LITERAL = 3
    PREFIXED = 4


class AclOperation(_Named):
    ANY = 1
    """In filters alone."""
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14


class AclPermissionType(_Named):
    ANY = 1
    """In filters alone."""
    DENY = 2
    ALLOW = 3


RESOURCE_TYPES = tuple(AclResourceType)[1:]
"""The types that a binding may have."""
PATTERN_TYPES = (PatternType.LITERAL, PatternType.PREFIXED)

_O = AclOperation
SUPPORTED_OPERATIONS: dict[AclResourceType, tuple[AclOperation, ...]] = {
    AclResourceType.TOPIC: (
        _O.READ,
        _O.WRITE,
        _O.CREATE,
        _O.DELETE,
        _O.ALTER,
        _O.DESCRIBE,
        _O.DESCRIBE_CONFIGS,
        _O.ALTER_CONFIGS,
    ),
    AclResourceType.GROUP: (_O.READ, _O.DESCRIBE, _O.DELETE),
    AclResourceType.CLUSTER: (
        _O.CREATE,
        _O.ALTER,
        _O.DESCRIBE,
        _O.CLUSTER_ACTION,
        _O.DESCRIBE_CONFIGS,
        _O.ALTER_CONFIGS,
        _O.IDEMPOTENT_WRITE,
    ),
    AclResourceType.TRANSACTIONAL_ID: (_O.DESCRIBE, _O.WRITE),
    AclResourceType.DELEGATION_TOKEN: (_O.DESCRIBE,),
    AclResourceType.USER: (_O.CREATE_TOKENS, _O.DESCRIBE_TOKENS),
}
"""The operations that requests need on a resource (Kafka's AclEntry.supportedOperations)."""


def operation_bits(operations: Iterable[AclOperation]) -> int:
    """Return the operations as in Kafka's protocol: bit N for operation N (KIP-430)."""
    return sum(1 << operation for operation in operations)


SUPPORTED_BITS = {kind: operation_bits(operations) for kind, operations in SUPPORTED_OPERATIONS.items()}
"""The authorized operations of a principal that may do everything."""

IMPLIED_BY: dict[AclOperation, tuple[AclOperation, ...]] = {
    _O.DESCRIBE: (_O.READ, _O.WRITE, _O.DELETE, _O.ALTER),
    _O.DESCRIBE_CONFIGS: (_O.ALTER_CONFIGS,),
}
"""An allowed operation on the right allows the one on the left. A denied one denies only itself."""


class ResourcePattern(NamedTuple):
    """The resources that a binding applies to."""

    resource_type: AclResourceType
    name: str
    pattern_type: PatternType = PatternType.LITERAL

    def __str__(self) -> str:
        prefix = "names that begin with " if self.pattern_type is PatternType.PREFIXED else ""
        return f"{self.resource_type.shown} {prefix}{self.name!r}"


class AccessControlEntry(NamedTuple):
    principal: str
    """`User:alice`, or ANYBODY."""
    host: str
    """An IP address, or WILDCARD."""
    operation: AclOperation
    permission: AclPermissionType


class AclBinding(NamedTuple):
    pattern: ResourcePattern
    entry: AccessControlEntry


class AclFilter(NamedTuple):
    """Selects bindings. None, and ANY, match everything."""

    resource_type: AclResourceType = AclResourceType.ANY
    name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: AclOperation = AclOperation.ANY
    permission: AclPermissionType = AclPermissionType.ANY

    def matches_pattern(self, pattern: ResourcePattern) -> bool:
        """Return whether the patterns match (Kafka's ResourcePatternFilter)."""
        if self.resource_type not in (AclResourceType.ANY, pattern.resource_type):
            return False
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, pattern.pattern_type):
            return False
        if self.name is None:
            return True
        if self.pattern_type in (PatternType.ANY, pattern.pattern_type):
            return self.name == pattern.name
        if pattern.pattern_type is PatternType.LITERAL:
            return pattern.name in (self.name, WILDCARD)
        return self.name.startswith(pattern.name)

    def matches_entry(self, entry: AccessControlEntry) -> bool:
        return (
            self.principal in (None, entry.principal)
            and self.host in (None, entry.host)
            and self.operation in (AclOperation.ANY, entry.operation)
            and self.permission in (AclPermissionType.ANY, entry.permission)
        )

    def matches(self, binding: AclBinding) -> bool:
        return self.matches_pattern(binding.pattern) and self.matches_entry(binding.entry)


Word = TypeVar("Word", bound=_Named)


def word_of(kind: type[Word], text: str) -> Word:
    """Return the word of Kafka's tools, in any case and with or without `_` and `-`. Raises ValueError naming all."""
    plain = text.replace("_", "").replace("-", "").lower()
    for word in kind:
        if word.shown.lower() == plain:
            return word
    raise ValueError(f"{text!r} is not one of {', '.join(word.shown for word in kind)}")


_NOT_IN_NAMES = re.compile("[/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]")
"""Characters that a path of ZooKeeper may not have, and the slash."""


def name_problem(name: str) -> str | None:
    """Return why ZooKeeper cannot store what belongs to a resource of this name, such as its ACLs, or None."""
    if not name:
        return "the name of the resource is empty"
    if name in (".", "..") or _NOT_IN_NAMES.search(name) is not None:
        return f"the name {name!r} cannot be stored in ZooKeeper: it is . or .., or has a slash or a control character"
    return None


def problem_of(binding: AclBinding) -> str | None:
    """Return why the binding cannot be created, or None (Kafka's AclApis and AclAuthorizer)."""
    pattern, entry = binding
    if pattern.resource_type is AclResourceType.ANY or pattern.pattern_type not in PATTERN_TYPES:
        return f"a binding names one type of resource and pattern, not {pattern.pattern_type.shown}"
    if entry.operation is AclOperation.ANY or entry.permission is AclPermissionType.ANY:
        return "a binding names one operation, or All, and allows or denies it"
    if (problem := name_problem(pattern.name)) is not None:
        return problem
    if pattern.resource_type is AclResourceType.CLUSTER and pattern.name != CLUSTER_NAME:
        return f"the only resource of type Cluster is {CLUSTER_NAME}, not {pattern.name!r}"
    kind, colon, name = entry.principal.partition(":")
    if not (kind and colon and name):
        return f"the principal {entry.principal!r} is not of the form type:name, for instance User:alice"
    if not entry.host:
        return f"the host is empty; give an IP address, or {WILDCARD} for all"
    return None
