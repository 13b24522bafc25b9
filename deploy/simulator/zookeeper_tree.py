"""The znodes of a server of the ZooKeeper in memory, and their watches. See `zookeeper`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from minibroker.protocol.world import (
    BadVersion,
    Check,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    SetData,
    Stat,
    Watcher,
    WatchKind,
    ZooKeeperError,
)

ROOT = "/"


class ConnectedSession(Protocol):
    """The part of a session (`zookeeper.VirtualSession`) that a server needs."""

    def notify(self, watcher: Watcher, kind: WatchKind, path: str, zxid: int) -> None:
        """Send a watch event."""
        ...

    @property
    def owner(self) -> str:
        """The name of its process."""
        ...

    def follower_moved(self) -> None:
        """The server has applied a transaction."""
        ...

    def leave_follower(self) -> None:
        """The server is gone."""
        ...


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or ROOT


@dataclass
class Node:
    data: bytes
    czxid: int
    mzxid: int
    owner: int = 0
    version: int = 0
    next_number: int = 0
    children: set[str] = field(default_factory=set)

    def stat(self) -> Stat:
        return Stat(self.version, self.czxid, self.mzxid, self.owner, len(self.children))


_WatchTable = dict[str, dict[tuple[ConnectedSession, Watcher], None]]


class Tree:
    """The nodes of one server, and the watches that sessions have set at it."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {ROOT: Node(b"", 0, 0)}
        self.zxid = 0
        """Id of the last transaction that was applied here."""
        self._data_watches: _WatchTable = {}
        self._child_watches: _WatchTable = {}

    def copy(self) -> Tree:
        """Return a copy of the nodes, without watches."""
        tree = Tree()
        tree.zxid = self.zxid
        tree.nodes = {path: replace(node, children=set(node.children)) for path, node in self.nodes.items()}
        return tree

    def node(self, path: str) -> Node:
        try:
            return self.nodes[path]
        except KeyError:
            raise NoNode(f"there is no znode {path}") from None

    def read_data(self, path: str) -> tuple[bytes, Stat]:
        node = self.node(path)
        return node.data, node.stat()

    def read_children(self, path: str) -> list[str]:
        return sorted(self.node(path).children)

    def transact(self, operations: Sequence[Operation], session_id: int) -> list[Any]:
        """Apply all operations as one transaction, or none of them."""
        self.zxid += 1
        undo: list[Callable[[], None]] = []
        fired: list[tuple[WatchKind, str]] = []
        results: list[Any] = []
        for index, operation in enumerate(operations):
            try:
                results.append(self._carry_out(operation, session_id, undo, fired))
            except ZooKeeperError as cause:
                for step in reversed(undo):
                    step()
                raise MultiFailed(index, cause) from cause
        for kind, path in fired:
            self._fire(kind, path)
        return results

    def _carry_out(
        self,
        operation: Operation,
        session_id: int,
        undo: list[Callable[[], None]],
        fired: list[tuple[WatchKind, str]],
    ) -> str | Stat | None:
        match operation:
            case Create():
                return self._create(operation, session_id, undo, fired)
            case SetData(path, data, version):
                node = self._expect(path, version)
                before = (node.data, node.version, node.mzxid)

                def restore() -> None:
                    node.data, node.version, node.mzxid = before

                undo.append(restore)
                node.data, node.version, node.mzxid = bytes(data), node.version + 1, self.zxid
                fired.append((WatchKind.CHANGED, path))
                return node.stat()
            case Delete(path, version):
                node = self._expect(path, version)
                if path == ROOT:
                    raise ZooKeeperError("the znode / cannot be deleted")
                if node.children:
                    raise NotEmpty(f"the znode {path} has children")
                siblings = self.nodes[parent_of(path)].children
                name = path.rpartition("/")[2]

                def bring_back() -> None:
                    self.nodes[path] = node
                    siblings.add(name)

                undo.append(bring_back)
                del self.nodes[path]
                siblings.discard(name)
                fired.append((WatchKind.DELETED, path))
                return None
            case Check(path, version):
                self._expect(path, version)
                return None

    def _create(
        self,
        operation: Create,
        session_id: int,
        undo: list[Callable[[], None]],
        fired: list[tuple[WatchKind, str]],
    ) -> str:
        path = operation.path
        parent_path = parent_of(path)
        parent = self.node(parent_path)
        if parent.owner:
            raise ZooKeeperError(f"the znode {parent_path} is ephemeral and cannot have children")
        if operation.sequence:
            path = f"{path}{parent.next_number:010d}"
        if path in self.nodes:
            raise NodeExists(f"there is a znode {path} already")
        number = parent.next_number
        owner = session_id if operation.ephemeral else 0
        name = path.rpartition("/")[2]

        def take_back() -> None:
            del self.nodes[path]
            parent.children.discard(name)
            parent.next_number = number

        undo.append(take_back)
        self.nodes[path] = Node(bytes(operation.data), self.zxid, self.zxid, owner)
        parent.children.add(name)
        parent.next_number += 1
        fired.append((WatchKind.CREATED, path))
        return path

    def _expect(self, path: str, version: int) -> Node:
        node = self.node(path)
        if version not in (-1, node.version):
            raise BadVersion(f"the znode {path} has version {node.version}, not {version}")
        return node

    # -- watches --

    def watch_data(self, path: str, session: ConnectedSession, watcher: Watcher) -> None:
        self._data_watches.setdefault(path, {})[session, watcher] = None

    def watch_children(self, path: str, session: ConnectedSession, watcher: Watcher) -> None:
        self._child_watches.setdefault(path, {})[session, watcher] = None

    def forget_watches(self, session: ConnectedSession) -> None:
        for table in (self._data_watches, self._child_watches):
            for path in list(table):
                table[path] = {key: None for key in table[path] if key[0] is not session}
                if not table[path]:
                    del table[path]

    def _fire(self, kind: WatchKind, path: str) -> None:
        watchers = dict(self._data_watches.pop(path, {}))
        if kind is WatchKind.DELETED:
            watchers |= self._child_watches.pop(path, {})
        for session, watcher in watchers:
            session.notify(watcher, kind, path, self.zxid)
        if kind is not WatchKind.CHANGED:
            parent = parent_of(path)
            for session, watcher in self._child_watches.pop(parent, {}):
                session.notify(watcher, WatchKind.CHILDREN, parent, self.zxid)

    def adopt_watches(self, other: Tree) -> None:
        """Take over the watches of another server, which has reached the same state."""
        for table, others in (
            (self._data_watches, other._data_watches),
            (self._child_watches, other._child_watches),
        ):
            for path, watchers in others.items():
                table.setdefault(path, {}).update(watchers)


class Follower:
    """A server of the ensemble that applies transactions later than the ensemble's leader."""

    def __init__(self, leader: Tree, lag_s: float) -> None:
        self.tree = leader.copy()
        self.sessions: dict[ConnectedSession, None] = {}
        """The sessions that are connected to it."""
        self._lag_s = lag_s
        self._committed: deque[tuple[int, Sequence[Operation], int]] = deque()

    def commit(self, zxid: int, operations: Sequence[Operation], session_id: int) -> None:
        self._committed.append((zxid, operations, session_id))
        Context().run(asyncio.get_running_loop().call_later, self._lag_s, self._apply)

    def _apply(self) -> None:
        if self._committed:  # empty if it has caught up meanwhile
            zxid, operations, session_id = self._committed.popleft()
            if operations:
                self.tree.zxid = zxid - 1
                self.tree.transact(operations, session_id)
            self.tree.zxid = zxid
            for session in list(self.sessions):
                session.follower_moved()

    def catch_up(self) -> None:
        while self._committed:
            self._apply()
