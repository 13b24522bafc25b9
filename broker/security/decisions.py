"""Whether a principal may perform an operation on a resource: pure, with the semantics of Kafka's AclAuthorizer.

- A pattern applies to a resource if it is literal with the same name or `*`, or if it is a prefix of the name.
- Of the entries that apply, those for the principal or `User:*`, and for the host or `*`, count.
- One Deny for the operation, or All, refuses. Otherwise one Allow is needed, for the operation, All, or an operation
  that implies it (`IMPLIED_BY`).
- If no pattern applies, `allow.everyone.if.no.acl.found` decides.

A snapshot of all bindings never changes. It remembers its answers, so that a produce request pays for one look into a
dictionary per topic.
"""

from collections.abc import Iterable, Mapping

from minibroker.protocol.acls import (
    ANYBODY,
    IMPLIED_BY,
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    operation_bits,
)

MOST_REMEMBERED = 10_000
"""Answers that a snapshot remembers. Clients choose the names, so the number must be bounded."""

_Entries = frozenset[AccessControlEntry]


class Bindings:
    """A snapshot of all bindings."""

    def __init__(
        self, entries: Mapping[ResourcePattern, _Entries] | None = None, *, allows_if_no_pattern: bool = False
    ) -> None:
        self.entries = entries or {}
        self._allows_if_no_pattern = allows_if_no_pattern
        self._prefixes: dict[AclResourceType, dict[int, set[str]]] = {}
        for kind, name, pattern_type in self.entries:
            if pattern_type is PatternType.PREFIXED:
                self._prefixes.setdefault(kind, {}).setdefault(len(name), set()).add(name)
        self._remembered: dict[tuple[str, str, str, int], bool] = {}

    def changed(self, changes: Mapping[ResourcePattern, _Entries]) -> "Bindings":
        """Return a snapshot in which these patterns have these entries; a pattern without entries is gone."""
        entries = {pattern: found for pattern, found in (dict(self.entries) | dict(changes)).items() if found}
        return Bindings(entries, allows_if_no_pattern=self._allows_if_no_pattern)

    def matching(self, wanted: AclFilter) -> list[AclBinding]:
        """Return the bindings that match, in a fixed order."""
        return [
            AclBinding(pattern, entry)
            for pattern in sorted(self.entries)
            if wanted.matches_pattern(pattern)
            for entry in sorted(self.entries[pattern])
            if wanted.matches_entry(entry)
        ]

    def allows(self, principal: str, host: str, operation: AclOperation, kind: AclResourceType, name: str) -> bool:
        key = (principal, host, name, operation << 8 | kind)  # an IntEnum in the key would be hashed in Python
        answer = self._remembered.get(key)
        if answer is None:
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            answer = self._remembered[key] = self._decide(principal, host, operation, kind, name)
        return answer

    def operations(self, principal: str, host: str, kind: AclResourceType, name: str) -> int:
        """Return the operations that the principal may perform on a resource, as bits (KIP-430)."""
        return operation_bits(
            each for each in SUPPORTED_OPERATIONS[kind] if self.allows(principal, host, each, kind, name)
        )

    def allows_on_any(self, principal: str, host: str, operation: AclOperation, kind: AclResourceType) -> bool:
        """Return whether the principal may perform the operation on at least one resource of this type (Kafka's
        authorizeByResourceType; KIP-679). Implied operations do not count there."""
        allowed: list[ResourcePattern] = []
        denied: set[ResourcePattern] = set()
        for pattern, entries in self.entries.items():
            if pattern.resource_type is kind:
                permissions = {each.permission for each in _applying(entries, principal, host, (operation,))}
                if AclPermissionType.DENY in permissions:
                    denied.add(pattern)
                if AclPermissionType.ALLOW in permissions:
                    allowed.append(pattern)
        if ResourcePattern(kind, WILDCARD) in denied:
            return False
        return self._allows_if_no_pattern or any(not _is_dominated(pattern, denied) for pattern in allowed)

    def _decide(self, principal: str, host: str, operation: AclOperation, kind: AclResourceType, name: str) -> bool:
        applying = list(self._applying_to(kind, name))
        if not applying:
            return self._allows_if_no_pattern
        entries = [each for some in applying for each in _applying(some, principal, host)]
        refused = {each.operation for each in entries if each.permission is AclPermissionType.DENY}
        allowed = {each.operation for each in entries if each.permission is AclPermissionType.ALLOW}
        if not refused.isdisjoint((operation, AclOperation.ALL)):
            return False
        # An entry for All counts for the operations that imply this one as well, and thus for this one.
        return not allowed.isdisjoint((operation, AclOperation.ALL, *IMPLIED_BY.get(operation, ())))

    def _applying_to(self, kind: AclResourceType, name: str) -> Iterable[_Entries]:
        for literal in (name, WILDCARD):
            entries = self.entries.get(ResourcePattern(kind, literal))
            if entries:
                yield entries
        for length, prefixes in self._prefixes.get(kind, {}).items():
            if (prefix := name[:length]) in prefixes and len(prefix) == length:
                yield self.entries[ResourcePattern(kind, prefix, PatternType.PREFIXED)]


def _applying(
    entries: _Entries, principal: str, host: str, operations: tuple[AclOperation, ...] | None = None
) -> list[AccessControlEntry]:
    return [
        each
        for each in entries
        if each.principal in (principal, ANYBODY)
        and each.host in (host, WILDCARD)
        and (operations is None or each.operation in (*operations, AclOperation.ALL))
    ]


def _is_dominated(allowed: ResourcePattern, denied: set[ResourcePattern]) -> bool:
    """Return whether what the pattern allows is denied as a whole."""
    kind, name, pattern_type = allowed
    if pattern_type is PatternType.LITERAL:
        if name == WILDCARD:
            return False
        if allowed in denied:
            return True
    return any(
        ResourcePattern(kind, name[:length], PatternType.PREFIXED) in denied for length in range(1, len(name) + 1)
    )
