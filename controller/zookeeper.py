"""The World's ZooKeeper, on kazoo. The only module that imports kazoo.

The problem: results and watch events must reach the controller in ZooKeeper's order (an event before the response that
was computed after it), on our event loop, and none after the end of the session. kazoo uses threads: one per
connection, which reads and writes the socket, and two workers, one for watches and one for results, which race each
other. It also opens a new session by itself when the old one has expired, keeps pinging for a process whose event loop
is stuck, and blocks its caller after some 280 pipelined calls (it wakes its thread with one byte per call over a
blocking socket pair), indefinitely while the server is away.

The choice: kazoo asks its handler for threads, queues, sockets and results, so `_Handler` replaces it. It has no
workers: the connection thread itself posts results and watch events, as it reads them, to one FIFO (`Inbox`) that our
loop empties (`zookeeper_threads`). That is ZooKeeper's order by construction. On the loop, a result wakes its waiter
and an event calls its watcher, both through `call_soon`, so the order is kept. The handler also refuses to connect once
the session is over, makes TLS connections itself (`zookeeper_tls`), and counts wake-ups instead of writing a byte for
each. No caller's code runs on a thread of kazoo's.

Each session has one more thread, the guard. It alone stops the kazoo client (which blocks): on request, or when the
loop has not run for a session timeout. It counts its own rounds in which the loop did not tick, not seconds: a SIGSTOP
of the whole process stops the guard as well, and then ZooKeeper decides whether the session has expired.

Rejected: kazoo's `*_async` and `rawlink` (a result that arrives before `rawlink` is called runs its callback on the
caller's thread, out of order; `create_async` does this internally, so creates are sent as a `multi` of one); sorting by
zxid afterwards (events carry none); kazoo's chroot (it neither creates parents nor strips the root of look-alikes);
KazooRetry for operations (it repeats them in a new session).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import kazoo.exceptions as errors
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, read_buffer, stat_struct
from kazoo.protocol.states import EventType, KazooState, ZnodeStat
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from minibroker.controller.zookeeper_cut import Cut
from minibroker.controller.zookeeper_protection import protect_all
from minibroker.controller.zookeeper_size import check_size
from minibroker.controller.zookeeper_threads import Hearing, Inbox, WakeUps
from minibroker.controller.zookeeper_tls import TlsConnector, pending
from minibroker.protocol import znodes
from minibroker.protocol.connections.tls import Contexts
from minibroker.protocol.connections.zookeeper_tls import ENABLE
from minibroker.protocol.world import (
    BadVersion,
    Check,
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    SessionExpired,
    SessionState,
    SetData,
    Stat,
    Watcher,
    WatchEvent,
    WatchKind,
    ZooKeeperError,
)

_logger = logging.getLogger("minibroker.zookeeper")

_CHECKS_PER_TIMEOUT = 6
"""How often per session timeout the guard checks that the event loop runs."""

_ANSWER_TIMEOUT_S = 1.0
"""Seconds to wait for the response to a connect request, and for the rest of a message that has begun. kazoo would wait
for a session timeout, but a ZooKeeper that is starting up sometimes accepts a connection and never answers on it."""

_TLS_TIMEOUTS_PER_SESSION = 2
"""Handshakes that fit into a session timeout; each has at least `_ANSWER_TIMEOUT_S`. The first one of a ZooKeeper that
has just started on a busy machine takes more than 2 s, so a third of the usual 6 s is too short. In TLS 1.3, ZooKeeper
judges certificates after the client's part of the handshake, so answers get the same time."""

_PROTECTED = [*CREATOR_ALL_ACL, *READ_ACL_UNSAFE]
"""The ACL of protected nodes: everybody may read them, and sessions with the creator's credential may do everything."""

_PRIVATE = list(CREATOR_ALL_ACL)
"""The ACL of protected nodes that have credentials."""

_RECONNECT_DELAY_S = 0.02
_RECONNECT_MAX_DELAY_S = 0.1

_WATCH_KINDS = {
    EventType.CREATED: WatchKind.CREATED,
    EventType.DELETED: WatchKind.DELETED,
    EventType.CHANGED: WatchKind.CHANGED,
    EventType.CHILD: WatchKind.CHILDREN,
}


class KazooZooKeeper:
    """The real implementation of `minibroker.protocol.world.ZooKeeper`."""

    def __init__(self) -> None:
        # kazoo logs a warning per failed attempt to connect; this module logs once instead.
        self._kazoo_log = logging.getLogger("minibroker.zookeeper.kazoo")
        if self._kazoo_log.level == logging.NOTSET:
            self._kazoo_log.setLevel(logging.ERROR)
        self._digest: str | None = None
        self._sets_acl = False
        self._sets_root_acl = False
        self._contexts: Contexts | None = None
        self._cut: Cut | None = None

    def cut_when(self, is_cut: Callable[[], bool]) -> None:
        """Let no packet through while `is_cut`, which any thread may call, returns true: for tests."""
        self._cut = Cut(is_cut)

    def encrypt(self, contexts: Contexts) -> None:
        """Connect by TLS from now on. `contexts` is called for each connection, on a thread of its session."""
        self._contexts = contexts

    def authenticate(self, digest: str, *, sets_acl: bool, sets_root_acl: bool = False) -> None:
        """Present `digest`, a NAME:PASSWORD of ZooKeeper's digest scheme, in the sessions opened from now on.

        `sets_acl`: everyone may read the znodes that these sessions create; only sessions with the same digest may
        change them. `sets_root_acl`: the same holds for all other nodes of the ensemble (`zookeeper_protection`).
        """
        self._digest = digest
        self._sets_acl = sets_acl
        self._sets_root_acl = sets_root_acl

    async def connect(self, servers: str, session_timeout_ms: int, connect_timeout_ms: int) -> KazooSession:
        """See `minibroker.protocol.world.ZooKeeper`. Raises ValueError if `servers` is malformed."""
        session = KazooSession(
            servers, session_timeout_ms, self._kazoo_log, self._digest, self._sets_acl, self._contexts, self._cut
        )
        try:
            try:
                async with asyncio.timeout(connect_timeout_ms / 1000):
                    await session.open()
            except TimeoutError:
                raise ConnectionLoss(
                    f"no ZooKeeper answered at {servers} within {connect_timeout_ms} ms: {session.why_not_connected()}"
                ) from None
            if self._sets_root_acl:
                await protect_all(session)
        except BaseException:
            await session.close()
            raise
        return session


class KazooSession:
    """See `minibroker.protocol.world.ZooKeeperSession`.

    While SUSPENDED, calls wait until the connection is back (then they are sent) or the session is over. Calls in
    flight when the connection breaks end with ConnectionLoss.
    """

    def __init__(
        self,
        servers: str,
        session_timeout_ms: int,
        kazoo_log: logging.Logger,
        digest: str | None = None,
        sets_acl: bool = False,
        contexts: Contexts | None = None,
        cut: Cut | None = None,
    ) -> None:
        """`digest`, `sets_acl`: see `KazooZooKeeper.authenticate`. `contexts`: see `KazooZooKeeper.encrypt`."""
        self._servers = servers
        self._sets_acl = sets_acl
        hosts, _, chroot = servers.partition("/")
        self._wanted_chroot = [name for name in chroot.split("/") if name]
        self._chroot = ""
        self._session_timeout_ms = session_timeout_ms
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._hearing = Hearing(session_timeout_ms, self._inbox.post)
        timeout_s = max(_ANSWER_TIMEOUT_S, session_timeout_ms / 1000 / _TLS_TIMEOUTS_PER_SESSION)
        self._tls = None if contexts is None else TlsConnector(contexts, timeout_s)
        self._handler = _Handler(
            self._inbox,
            self._finish,
            self._tls,
            _ANSWER_TIMEOUT_S if contexts is None else timeout_s,
            is_ensemble="," in hosts,
            cut=cut,
            hearing=self._hearing,
        )
        try:
            self._client = KazooClient(
                hosts=hosts,
                timeout=session_timeout_ms / 1000,
                handler=self._handler,
                logger=kazoo_log,
                auth_data=None if digest is None else [("digest", digest)],
                default_acl=_PROTECTED if sets_acl else None,
                connection_retry=KazooRetry(
                    max_tries=-1,
                    delay=_RECONNECT_DELAY_S,
                    max_delay=_RECONNECT_MAX_DELAY_S,
                    sleep_func=self._handler.sleep_func,
                ),
            )
        except ValueError as error:
            raise ValueError(
                f"zookeeper.connect is {servers!r}: HOST:PORT,HOST:PORT/CHROOT is expected, for instance localhost:2181"
            ) from error
        self._client.add_listener(self._kazoo_state_changed)

        self._state = SessionState.SUSPENDED
        self._session_id = 0
        self._listeners: list[Callable[[SessionState], None]] = []
        self._calls: set[_Call] = set()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._stopped: asyncio.Future[None] = self._loop.create_future()

        self._ticks = 0
        self._tick_timer: asyncio.TimerHandle | None = None
        self._stop_requested = threading.Event()
        self._guard: threading.Thread | None = None

    # -- opening and closing --

    async def open(self) -> None:
        """Connect for the first time and create the chroot. The caller sets a timeout, and closes after a failure."""
        self._client.start_async()
        self._tick()
        self._guard = threading.Thread(target=self._guard_client, name="zookeeper-guard", daemon=True)
        self._guard.start()
        await self._connected
        chroot = ""
        for name in self._wanted_chroot:
            chroot += "/" + name
            with contextlib.suppress(NodeExists):
                await self.create(chroot, b"")
        self._chroot = chroot

    def why_not_connected(self) -> str:
        """Return the reason of a failed TLS handshake, or a remedy."""
        if self._tls is None:
            return f"start it, or correct zookeeper.connect (if it is a secureClientPort, set {ENABLE}=true)"
        return self._tls.failure or "start it, or correct zookeeper.connect"

    async def close(self) -> None:
        """See the interface. Waits for the server's answer, at most for a session timeout."""
        self._stop_requested.set()
        if self._guard is None:
            self._over("closed before it was opened")
            return
        await asyncio.wait([self._stopped], timeout=self._session_timeout_ms / 1000)
        self._over("closed")

    def _guard_client(self) -> None:
        """The guard thread: stop the client on request, or when the event loop is stuck."""
        interval_s = self._session_timeout_ms / 1000 / _CHECKS_PER_TIMEOUT
        seen, missed = -1, 0
        while not self._stop_requested.wait(interval_s):
            if self._ticks != seen:
                seen, missed = self._ticks, 0
                continue
            missed += 1
            if missed >= _CHECKS_PER_TIMEOUT:
                _logger.error(
                    "the event loop has not run for %d ms, a session timeout: ending the ZooKeeper session 0x%x",
                    self._session_timeout_ms,
                    self._session_id,
                )
                break
        try:
            self._client.stop()
            self._client.close()
        except Exception:
            _logger.exception("kazoo could not be stopped; session 0x%x ends when it times out", self._session_id)
        self._inbox.post(self._client_stopped)

    def _tick(self) -> None:
        self._ticks += 1
        # Two ticks per round of the guard, so that every round sees one while the loop runs.
        interval_s = self._session_timeout_ms / 1000 / _CHECKS_PER_TIMEOUT / 2
        self._tick_timer = self._loop.call_later(interval_s, self._tick)

    # -- called by kazoo's connection thread; these only post --

    def _kazoo_state_changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self._handler.session_over = True
            self._inbox.post(self._over, "expired or closed")
        elif state == KazooState.SUSPENDED:
            self._inbox.post(self._suspended)
        else:
            self._inbox.post(self._reconnected, self._client.client_id[0])

    def _kazoo_watch_fired(self, watcher: Watcher, event: Any) -> None:
        kind = _WATCH_KINDS.get(event.type)
        # kazoo reports a lost connection to its watchers by an event without a kind; the interface reports it by state.
        if kind is not None:
            path = event.path[len(self._chroot) :] or "/"
            self._inbox.post(self._loop.call_soon, watcher, WatchEvent(kind, path))

    # -- called by the inbox, on the loop --

    def _reconnected(self, session_id: int) -> None:
        if self._state is SessionState.EXPIRED:
            return
        self._session_id = session_id
        if not self._connected.done():
            self._connected.set_result(None)
        else:
            _logger.warning("connected again to ZooKeeper at %s, session 0x%x goes on", self._servers, session_id)
        self._change_state(SessionState.CONNECTED)

    def _suspended(self) -> None:
        if self._state is SessionState.EXPIRED:
            return
        _logger.warning(
            "the connection to ZooKeeper at %s is lost; session 0x%x ends unless it is back within %d ms",
            self._servers,
            self._session_id,
            self._session_timeout_ms,
        )
        self._change_state(SessionState.SUSPENDED)

    def _over(self, reason: str) -> None:
        if self._state is SessionState.EXPIRED:
            return
        if not self._stop_requested.is_set():
            _logger.warning("the ZooKeeper session 0x%x at %s is over: %s", self._session_id, self._servers, reason)
        self._stop_requested.set()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        text = f"the ZooKeeper session 0x{self._session_id:x} at {self._servers} is over: {reason}"
        if not self._connected.done():
            self._connected.set_exception(SessionExpired(text))
            self._connected.exception()  # marks it as retrieved: `open` may have timed out
        self._change_state(SessionState.EXPIRED)
        # kazoo loses a request that it receives at the very moment when it gives up: finish all remaining calls.
        for call in list(self._calls):
            self._finish(call, None, SessionExpired(text))

    def _client_stopped(self) -> None:
        self._over("closed")
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _change_state(self, state: SessionState) -> None:
        self._state = state
        for listener in self._listeners:
            self._loop.call_soon(listener, state)

    def _finish(self, call: _Call, value: Any, error: Exception | None) -> None:
        if call not in self._calls:
            return  # finished already, when the session ended
        self._calls.remove(call)
        if call.future.done():
            return  # its caller was cancelled
        if error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)

    # -- the interface --

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def silent_s(self) -> float:
        return self._hearing.silent_s

    def on_heard_again(self, listener: Callable[[float, float], None]) -> None:
        self._hearing.on_heard_again = listener

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    async def create(self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False) -> str:
        try:
            results = await self.multi([Create(path, data, ephemeral, sequence)])
        except MultiFailed as error:
            raise error.cause from None
        created = results[0]
        assert isinstance(created, str)
        return created

    async def get(self, path: str, watch: Watcher | None = None) -> tuple[bytes, Stat]:
        data, stat = await self._call("get", path, self._client.get_async, self._full(path), watch=self._watch(watch))
        return data or b"", _stat(stat)

    async def get_all(self, paths: Sequence[str]) -> list[tuple[bytes, Stat] | None]:
        if not paths:
            return []
        found = await self._call("get", paths[0], self._multi_read, [self._full(path) for path in paths])
        for path, node in zip(paths, found, strict=True):
            if isinstance(node, Exception):
                raise _translate(node, "get", path)
        nodes: list[tuple[bytes, Stat] | None] = found
        return nodes

    def _multi_read(self, paths: Sequence[str]) -> _Call:
        call = self._handler.async_result()
        self._client._call(_MultiRead(paths), call)
        return call

    async def exists(self, path: str, watch: Watcher | None = None) -> Stat | None:
        stat = await self._call("exists", path, self._client.exists_async, self._full(path), watch=self._watch(watch))
        return None if stat is None else _stat(stat)

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        names: list[str] = await self._call(
            "children", path, self._client.get_children_async, self._full(path), watch=self._watch(watch)
        )
        return sorted(names)

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        check_size(path, len(data))
        return _stat(await self._call("set", path, self._client.set_async, self._full(path), data, version))

    async def delete(self, path: str, version: int = -1) -> None:
        await self._call("delete", path, self._client.delete_async, self._full(path), version)

    # -- for `zookeeper_protection`: paths above the chroot --

    async def is_open(self, path: str) -> bool:
        acl, _ = await self._call("read the ACL of", path, self._client.get_acls_async, path)
        return bool(acl == OPEN_ACL_UNSAFE)

    async def protect(self, path: str) -> None:
        await self._call(
            "set the ACL of", path, self._client.set_acls_async, path, _acl_of(path.removeprefix(self._chroot))
        )

    async def all_children(self, path: str) -> list[str]:
        names: list[str] = await self._call("children", path, self._client.get_children_async, path)
        return names

    # -- the interface, continued --

    async def multi(self, operations: Sequence[Operation]) -> list[str | Stat | None]:
        if not operations:
            return []
        transaction = self._client.transaction()
        size = 0
        for operation in operations:
            path = self._full(operation.path)
            size += len(path) + 60
            match operation:
                case Create(_, data, ephemeral, sequence):
                    size += len(data)
                    acl = _PRIVATE if self._sets_acl and _is_private(operation.path) else None
                    transaction.create(path, data, acl=acl, ephemeral=ephemeral, sequence=sequence)
                case SetData(_, data, version):
                    size += len(data)
                    transaction.set_data(path, data, version)
                case Delete(_, version):
                    transaction.delete(path, version)
                case Check(_, version):
                    transaction.check(path, version)
        first = operations[0].path
        check_size(first, size)
        results = await self._call("multi", first, transaction.commit_async)
        for index, result in enumerate(results):
            # In a refused multi all operations fail: those before the culprit as "rolled back", those after it as
            # "inconsistent".
            if isinstance(result, Exception) and not isinstance(
                result, (errors.RolledBackError, errors.RuntimeInconsistency)
            ):
                operation = operations[index]
                raise MultiFailed(index, _translate(result, type(operation).__name__, operation.path))
        return [self._multi_result(operation, result) for operation, result in zip(operations, results, strict=True)]

    def _multi_result(self, operation: Operation, result: Any) -> str | Stat | None:
        if isinstance(result, Exception):
            raise ZooKeeperError(f"a multi with {operation} was refused without a reason: {result!r}")
        match operation:
            case Create():
                path: str = result
                return path[len(self._chroot) :]
            case SetData():
                return _stat(result)
            case _:
                return None

    # -- helpers --

    def _full(self, path: str) -> str:
        assert path.startswith("/"), path
        return self._chroot + path if path != "/" or not self._chroot else self._chroot

    def _watch(self, watcher: Watcher | None) -> Callable[[Any], None] | None:
        return None if watcher is None else partial(self._kazoo_watch_fired, watcher)

    async def _call(self, verb: str, path: str, start: Callable[..., _Call], *arguments: Any, **options: Any) -> Any:
        """Start a call of kazoo's and wait for its result. Raises ZooKeeperErrors in place of kazoo's."""
        if self._state is SessionState.EXPIRED:
            raise SessionExpired(f"{verb} {path}: the ZooKeeper session 0x{self._session_id:x} is over; open a new one")
        call = start(*arguments, **options)
        call.future = self._loop.create_future()
        self._calls.add(call)
        try:
            return await call.future
        except errors.KazooException as error:
            raise _translate(error, verb, path) from None


def _is_private(path: str) -> bool:
    """Return whether a node may have credentials: only brokers read it (Kafka's ZkData.SensitiveRootPaths)."""
    return path.startswith(f"{znodes.USER_CONFIGS}/")


def _acl_of(path: str) -> list[Any]:
    return _PRIVATE if _is_private(path) else _PROTECTED


class _Call:
    """A call in flight, in place of kazoo's AsyncResult. Every thread finishes it through the inbox."""

    future: asyncio.Future[Any]

    def __init__(self, inbox: Inbox, finish: Callable[[_Call, Any, Exception | None], None]) -> None:
        self._inbox = inbox
        self._finish = finish

    def set(self, value: Any = None) -> None:
        self._inbox.post(self._finish, self, value, None)

    def set_exception(self, exception: Exception) -> None:
        self._inbox.post(self._finish, self, None, exception)


class _MultiRead:
    """ZooKeeper's MultiRead (since 3.6), which kazoo lacks: reads many nodes with one request."""

    type = 22

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def serialize(self) -> bytes:
        each = [
            MultiHeader(GetData.type, False, -1).serialize() + GetData(path, None).serialize() for path in self._paths
        ]
        return b"".join([*each, MultiHeader(-1, True, -1).serialize()])

    @staticmethod
    def deserialize(answer: bytes, offset: int) -> list[tuple[bytes, Stat] | Exception | None]:
        """Return, for each node, its data and Stat, None if it does not exist, or another error of kazoo's."""
        nodes: list[tuple[bytes, Stat] | Exception | None] = []
        while True:
            header, offset = MultiHeader.deserialize(answer, offset)
            if header.done:
                return nodes
            if header.type == GetData.type:
                data, offset = read_buffer(answer, offset)
                nodes.append((data or b"", _stat(ZnodeStat._make(stat_struct.unpack_from(answer, offset)))))
                offset += stat_struct.size
            else:
                (error,) = int_struct.unpack_from(answer, offset)
                offset += int_struct.size
                nodes.append(None if error == errors.NoNodeError.code else errors.EXCEPTIONS[error]())


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's environment without its worker threads. `session_over`: never connect again."""

    def __init__(
        self,
        inbox: Inbox,
        finish: Callable[[_Call, Any, Exception | None], None],
        tls: TlsConnector | None,
        answer_timeout_s: float,
        is_ensemble: bool,
        cut: Cut | None,
        hearing: Hearing,
    ) -> None:
        super().__init__()
        self._cut = cut
        self._is_ensemble = is_ensemble
        self._last: tuple[str, int] | None = None
        """The server of the last connection, until kazoo asks for it again."""
        self._tls = tls
        self._answer_timeout_s = answer_timeout_s
        self._inbox = inbox
        self._finish = finish
        self.session_over = False
        self._hearing = hearing

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False

    def async_result(self) -> _Call:
        return _Call(self._inbox, self._finish)

    def dispatch_callback(self, callback: Any) -> None:
        """Run the callback of a watch event; the connection thread calls this as it reads the event."""
        callback.func(*callback.args)

    def select(self, readers: list[Any], writers: list[Any], _: list[Any], timeout: float | None = None) -> Any:
        """Use poll: kazoo's own version creates an epoll for every message, which makes everything 1.5 times slower."""
        if writers:
            self._hearing.asked()
        if len(readers) == 1 and not writers:  # not the main wait, which includes the wake-ups
            timeout = self._answer_timeout_s if timeout is None else min(timeout, self._answer_timeout_s)
        return (
            self._ready(readers, writers, timeout)
            if self._cut is None
            else self._cut.select(self._ready, readers, writers, timeout)
        )

    def _ready(self, readers: list[Any], writers: list[Any], timeout: float | None) -> Any:
        ready: tuple[list[Any], list[Any], list[Any]] = (pending(readers) if self._tls is not None else [], [], [])
        if ready[0]:
            timeout = 0
        poller = select.poll()
        by_descriptor = {}
        for members, event in ((readers, select.POLLIN), (writers, select.POLLOUT)):
            for member in members:
                poller.register(member, event)
                by_descriptor[member.fileno()] = (member, members)
        for descriptor, _event in poller.poll(None if timeout is None else max(0.0, timeout * 1000)):
            member, members = by_descriptor[descriptor]
            found = ready[0 if members is readers else 1]
            if member not in found:
                found.append(member)
        if any(not isinstance(reader, WakeUps) for reader in ready[0]):
            self._hearing.heard()
        return ready

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **options: Any
    ) -> socket.socket:
        if self.session_over:
            raise ConnectionAbortedError("the session is over")
        self._hearing.asked()
        if self._cut is not None:
            self._cut.check()
        if address == self._last:
            # A server that hangs still accepts connections, and would take the rest of the session timeout. kazoo's
            # order is random.
            self._last = None
            raise ConnectionAbortedError("its last connection has just ended: the others are asked first")
        connection: socket.socket
        if self._tls is not None:
            connection = self._tls.connect(address, hostname, timeout)
        else:
            connection = super().create_connection(address, timeout=timeout)
        self._last = address if self._is_ensemble else None
        return connection

    def create_socket_pair(self) -> tuple[WakeUps, WakeUps]:
        wake_ups = WakeUps()
        return wake_ups, wake_ups


def _stat(stat: Any) -> Stat:
    return Stat(stat.version, stat.czxid, stat.mzxid, stat.ephemeralOwner, stat.numChildren)


def _translate(error: Exception, verb: str, path: str) -> ZooKeeperError:
    what = f"{verb} {path}"
    match error:
        case errors.NoNodeError():
            return NoNode(f"{what}: there is no such node")
        case errors.NodeExistsError():
            return NodeExists(f"{what}: it exists already")
        case errors.BadVersionError():
            return BadVersion(f"{what}: the node has another version")
        case errors.NotEmptyError():
            return NotEmpty(f"{what}: the node has children")
        case errors.NoAuthError():
            return ZooKeeperError(
                f"{what}: ZooKeeper refuses it, since the node was created with a credential that this broker lacks; "
                "set zookeeper.digest.file to the file that the other brokers have"
            )
        case errors.UnimplementedError():
            return ZooKeeperError(f"{what}: this ZooKeeper cannot read many nodes at once: use version 3.6 or later")
        case errors.SessionExpiredError():
            return SessionExpired(f"{what}: the session is over")
        case errors.ConnectionLoss() | errors.SessionMovedError():
            return ConnectionLoss(f"{what}: the connection was lost; it may have been carried out")
        case _:
            return ZooKeeperError(f"{what}: {error!r}")
