"""The znodes of access control lists, and the JSON under them, which are Kafka's.

Literal patterns are in `/kafka-acl/Topic/NAME`, prefixed ones in `/kafka-acl-extended/prefixed/Topic/NAME`. Each change
adds a notification that names the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from minibroker.protocol.acls import (
    PATTERN_TYPES,
    RESOURCE_TYPES,
    AccessControlEntry,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    word_of,
)
from minibroker.protocol.znodes import MalformedZnode

ACLS = "/kafka-acl"
EXTENDED_ACLS = "/kafka-acl-extended"
ACL_CHANGES = "/kafka-acl-changes"
EXTENDED_ACL_CHANGES = "/kafka-acl-extended-changes"
CHANGE_PREFIX = "acl_changes_"

STORES = {PatternType.LITERAL: ACLS, PatternType.PREFIXED: f"{EXTENDED_ACLS}/prefixed"}
"""The parent of the types of resources, for each type of pattern."""
CHANGES = {PatternType.LITERAL: ACL_CHANGES, PatternType.PREFIXED: EXTENDED_ACL_CHANGES}
"""The parent of the notifications, for each type of pattern."""


def type_path(pattern_type: PatternType, resource_type: AclResourceType) -> str:
    return f"{STORES[pattern_type]}/{resource_type.shown}"


PERSISTENT_PATHS = (
    ACLS,
    EXTENDED_ACLS,
    STORES[PatternType.PREFIXED],
    ACL_CHANGES,
    EXTENDED_ACL_CHANGES,
    *(type_path(pattern_type, resource_type) for pattern_type in PATTERN_TYPES for resource_type in RESOURCE_TYPES),
)
"""The paths that exist where ACLs are in use, parents first."""


def acl_path(pattern: ResourcePattern) -> str:
    return f"{type_path(pattern.pattern_type, pattern.resource_type)}/{pattern.name}"


class _EntryJson(msgspec.Struct):
    principal: str
    permissionType: str  # noqa: N815 - Kafka's name
    operation: str
    host: str


class _AclsJson(msgspec.Struct):
    version: int
    acls: list[_EntryJson]


def encode_acls(entries: Iterable[AccessControlEntry]) -> bytes:
    return msgspec.json.encode(
        _AclsJson(
            1,
            [
                _EntryJson(entry.principal, entry.permission.shown, entry.operation.shown, entry.host)
                for entry in sorted(entries)
            ],
        )
    )


def decode_acls(path: str, data: bytes) -> frozenset[AccessControlEntry]:
    """Raises MalformedZnode."""
    if not data:
        return frozenset()
    try:
        read = msgspec.json.decode(data, type=_AclsJson)
        if read.version != 1:
            raise ValueError(f"version {read.version}, not 1")
        return frozenset(
            AccessControlEntry(
                entry.principal,
                entry.host,
                word_of(AclOperation, entry.operation),
                word_of(AclPermissionType, entry.permissionType),
            )
            for entry in read.acls
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedZnode(f"{path}: {error}; correct or delete it") from error


class _ChangeJson(msgspec.Struct):
    version: int
    resourceType: str  # noqa: N815 - Kafka's name
    name: str
    patternType: str  # noqa: N815 - Kafka's name


def encode_change(pattern: ResourcePattern) -> bytes:
    """Return the notification of a change. Those of literal patterns are older than JSON there."""
    kind = pattern.resource_type.name
    if pattern.pattern_type is PatternType.LITERAL:
        return f"{kind}:{pattern.name}".encode()
    return msgspec.json.encode(_ChangeJson(1, kind, pattern.name, pattern.pattern_type.name))


def decode_change(path: str, data: bytes) -> ResourcePattern:
    """Raises MalformedZnode."""
    try:
        if path.startswith(f"{ACL_CHANGES}/"):
            kind, _, name = data.decode().partition(":")
            return ResourcePattern(word_of(AclResourceType, kind), name)
        read = msgspec.json.decode(data, type=_ChangeJson)
        return ResourcePattern(
            word_of(AclResourceType, read.resourceType), read.name, word_of(PatternType, read.patternType)
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedZnode(f"{path}: {error}") from error
