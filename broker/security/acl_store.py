"""The access control lists in ZooKeeper: this broker's snapshot of them, and changes (Kafka's AclAuthorizer).

Each change writes the znode of a pattern, if it is still as it was read, together with a notification that names the
pattern. Each broker watches the notifications and reads the patterns that they name. If it may have missed one, it
reads all patterns. Notifications are removed after a quarter of an hour.

A znode that cannot be read refuses everything to the pattern: half of a list could allow what the other half denies.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from minibroker.broker.security.decisions import Bindings
from minibroker.protocol import acl_znodes
from minibroker.protocol.acls import (
    ANYBODY,
    PATTERN_TYPES,
    WILDCARD,
    AccessControlEntry,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    AclResourceType,
    PatternType,
    ResourcePattern,
    name_problem,
    word_of,
)
from minibroker.protocol.change_watcher import EXPIRATION_S, RETRY_S, ChangeWatcher
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.world import (
    BadVersion,
    Clock,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    SessionExpired,
    SetData,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.acls")

READS_AT_ONCE = 100
MATCHES_AT_ONCE = 2_000
"""Filters that are compared with patterns before other tasks run. A request may have thousands of both."""
PAUSE_S = 0.001
MAX_ATTEMPTS = 10
"""Attempts to change a pattern that others change at the same time."""

Entries = frozenset[AccessControlEntry]
Change = Callable[[Entries], Entries]

REFUSE_ALL: Entries = frozenset(
    [AccessControlEntry(ANYBODY, WILDCARD, AclOperation.ALL, AclPermissionType.DENY)],
)


def _with(added: set[AccessControlEntry]) -> Change:
    return lambda entries: entries | added


class AclStore(ChangeWatcher):
    """Keeps `bindings` up to date while `run` runs."""

    def __init__(
        self, clock: Clock, sessions: Callable[[], Awaitable[ZooKeeperSession]], *, allows_if_no_pattern: bool
    ) -> None:
        super().__init__("ACLs", logger, clock, sessions)
        self.bindings = Bindings(allows_if_no_pattern=allows_if_no_pattern)
        self._allows_if_no_pattern = allows_if_no_pattern
        self._reading = asyncio.Lock()

    # -- reading --

    async def load(self, sessions: Callable[[], Awaitable[ZooKeeperSession]]) -> None:
        """Read all patterns when the broker starts. `sessions` must open a new session if the first has expired."""
        while True:
            try:
                session = await sessions()
                for path in acl_znodes.PERSISTENT_PATHS:
                    with suppress(NodeExists):
                        await session.create(path, b"")
                await catch_up(session)
                await self._read_all(session)
                return
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(RETRY_S)

    async def _look(self, session: ZooKeeperSession) -> None:
        """Read the patterns that new notifications name, or all, and set the watches for the next change."""
        everything, self._may_have_missed = self._may_have_missed, False  # set again by events during this call
        if everything:
            await catch_up(session)
        paths: list[str] = []
        for parent in acl_znodes.CHANGES.values():
            paths += [f"{parent}/{name}" for name in await session.children(parent, self._watched)]
        changed: list[ResourcePattern] = []
        for path in [] if everything else [path for path in paths if path not in self._seen]:
            try:
                changed.append(acl_znodes.decode_change(path, (await session.get(path))[0]))
            except NoNode:
                everything = True  # removed already: this broker was away or slow
            except MalformedZnode as error:
                logger.warning("all ACLs are read, because a notification of a change is malformed: %s", error)
                everything = True
        if everything:
            await self._read_all(session)
        else:
            await self._read(session, changed)
        now_s = self._clock.monotonic()
        self._seen = {path: self._seen.get(path, now_s) for path in paths}
        for path in [path for path, s in self._seen.items() if now_s - s >= EXPIRATION_S]:
            with suppress(NoNode):
                await session.delete(path)
            self._seen.pop(path, None)

    async def _read_all(self, session: ZooKeeperSession) -> None:
        async with self._reading:
            patterns = []
            for pattern_type, parent in acl_znodes.STORES.items():
                for kind in await session.children(parent):
                    patterns += await self._patterns(session, pattern_type, kind)
            found = await self._entries_of(session, patterns)
            self.bindings = Bindings(allows_if_no_pattern=self._allows_if_no_pattern).changed(found)

    async def _patterns(self, session: ZooKeeperSession, pattern_type: PatternType, kind: str) -> list[ResourcePattern]:
        try:
            resource_type = word_of(AclResourceType, kind)
        except ValueError:
            logger.warning("the ACLs of resources of the unknown type %r are ignored", kind)
            return []
        names = await session.children(acl_znodes.type_path(pattern_type, resource_type))
        return [ResourcePattern(resource_type, name, pattern_type) for name in names]

    async def _read(self, session: ZooKeeperSession, patterns: Sequence[ResourcePattern]) -> None:
        async with self._reading:  # an older read must not overwrite a newer one
            if patterns:
                self.bindings = self.bindings.changed(await self._entries_of(session, patterns))

    async def _entries_of(
        self, session: ZooKeeperSession, patterns: Sequence[ResourcePattern]
    ) -> dict[ResourcePattern, Entries]:
        found: dict[ResourcePattern, Entries] = {}
        for start in range(0, len(patterns), READS_AT_ONCE):
            some = patterns[start : start + READS_AT_ONCE]
            nodes = await session.get_all([acl_znodes.acl_path(pattern) for pattern in some])
            for pattern, node in zip(some, nodes, strict=True):
                try:
                    data = b"" if node is None else node[0]
                    found[pattern] = acl_znodes.decode_acls(acl_znodes.acl_path(pattern), data)
                except MalformedZnode as error:
                    logger.error("everything is refused on %s, whose ACLs cannot be read: %s", pattern, error)
                    found[pattern] = REFUSE_ALL
        return found

    # -- changing --

    async def add(self, bindings: Iterable[AclBinding]) -> dict[ResourcePattern, BrokerError]:
        """Add the bindings. Return the patterns that could not be changed. Raises ZooKeeperError."""
        added: dict[ResourcePattern, set[AccessControlEntry]] = {}
        for pattern, entry in bindings:
            added.setdefault(pattern, set()).add(entry)
        return await self._change_all({pattern: _with(each) for pattern, each in added.items()})

    async def remove(
        self, filters: Sequence[AclFilter]
    ) -> tuple[list[list[AclBinding]], dict[ResourcePattern, BrokerError]]:
        """Remove all bindings that match. Return those that each filter removed, a binding for the first filter that
        matches, and the patterns that could not be changed. Raises ZooKeeperError."""
        patterns = set(self.bindings.entries)
        for each in filters:
            if each.name is None or name_problem(each.name) is not None:
                continue
            if each.resource_type is not AclResourceType.ANY:
                # Patterns that this broker has not heard of yet.
                types = PATTERN_TYPES if each.pattern_type is PatternType.ANY else (each.pattern_type,)
                patterns |= {
                    ResourcePattern(each.resource_type, each.name, kind) for kind in types if kind in PATTERN_TYPES
                }
        removed: dict[AclBinding, int] = {}

        def without(pattern: ResourcePattern) -> Change:
            matching = [(number, each) for number, each in enumerate(filters) if each.matches_pattern(pattern)]

            def change(entries: Entries) -> Entries:
                kept = set(entries)
                for entry in entries:
                    number = next((number for number, each in matching if each.matches_entry(entry)), None)
                    if number is not None:
                        removed.setdefault(AclBinding(pattern, entry), number)
                        kept.discard(entry)
                return frozenset(kept)

            return change

        concerned: list[ResourcePattern] = []
        matched = 0
        for pattern in sorted(patterns):
            matched += len(filters)
            if matched >= MATCHES_AT_ONCE:
                matched = 0
                await asyncio.sleep(PAUSE_S)
            if any(wanted.matches_pattern(pattern) for wanted in filters):
                concerned.append(pattern)
        failed = await self._change_all({pattern: without(pattern) for pattern in concerned})
        results: list[list[AclBinding]] = [[] for _ in filters]
        for binding in sorted(removed):
            results[removed[binding]].append(binding)
        return results, failed

    async def _change_all(self, changes: Mapping[ResourcePattern, Change]) -> dict[ResourcePattern, BrokerError]:
        failed: dict[ResourcePattern, BrokerError] = {}
        session = await self._sessions()
        for pattern, change in changes.items():
            try:
                await self._change(session, pattern, change)
            except BrokerError as error:
                failed[pattern] = error
        await self._read(session, list(changes))
        return failed

    async def _change(self, session: ZooKeeperSession, pattern: ResourcePattern, change: Change) -> None:
        """Raises BrokerError if others change the pattern all the time, or if its znode is malformed."""
        path = acl_znodes.acl_path(pattern)
        notification = Create(
            f"{acl_znodes.CHANGES[pattern.pattern_type]}/{acl_znodes.CHANGE_PREFIX}",
            acl_znodes.encode_change(pattern),
            sequence=True,
        )
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S)
            write: Operation
            try:
                data, stat = await session.get(path)
                before = acl_znodes.decode_acls(path, data)
                version = stat.version
            except NoNode:
                before, version = frozenset(), -1
            except MalformedZnode as error:
                raise BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, str(error)) from error
            after = change(before)
            if after == before:
                return
            if version < 0:
                write = Create(path, acl_znodes.encode_acls(after))
            elif after:
                write = SetData(path, acl_znodes.encode_acls(after), version)
            else:
                write = Delete(path, version)
            try:
                await session.multi([write, notification])
                logger.info("the ACLs of %s have changed", pattern)
                return
            except MultiFailed as error:
                if not isinstance(error.cause, BadVersion | NodeExists | NoNode):
                    raise
        raise BrokerError(
            ErrorCode.UNKNOWN_SERVER_ERROR,
            f"the ACLs of {pattern} were changed by others {MAX_ATTEMPTS} times in a row: try again",
        )
