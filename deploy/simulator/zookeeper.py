"""ZooKeeper in memory: one linearizable store, many sessions, no threads, no real time.

The problem: plain reads and writes rarely expose errors of a controller. Its errors appear when the reply of a multi is
lost, when a watch fires between two reads, or when another session has just created a node. A test must be able to
cause these events at will and repeat the run.

The choice: a server that processes one request at a time. Each session has two ordered pipes, one up and one down. A
request is processed when it leaves the upper pipe. Watch events and replies enter the lower pipe in ZooKeeper's order:
the events of a write before its reply. A cut connection therefore loses exactly the contents of its pipes, as with TCP.
The creator of the server supplies the latency; time is that of the event loop, virtual on the simulator's loop.

Faults concern the server (`stop`, `start`), the connections of one host (`cut`, `uncut`, `lose_connections`), or its
sessions (`expire`). They name hosts: the owner of a session is a process, and its name begins with its host's. After
such a fault a session reconnects by itself, as kazoo's client does: it tries at intervals until it continues or has
expired. Meanwhile a call waits or fails; the World allows both. A random number of the requests in transit have
arrived, and their replies are lost. The client's own actions run in the context in which it connected, so they stop
while its process is paused and after its kill. The server's actions have no owner.

Modelled: data versions, czxid and mzxid, ephemeral and sequential nodes, `multi` as one transaction, one-shot watches
with the server's rules for the writes that fire them, loss of watches with the connection, the limit on a request's
size, and sessions that survive a lost connection until their timeout. `lag` connects a host to an ensemble server that
is behind. That server answers reads from its older state and fires watches late. A write is processed at once and
answered when that server has applied it, so a session sees its own writes. The answers and events of a session stay in
order, and a session never sees older state than before. Not modelled: elections among the servers (`stop` is the time
without a leader), ACLs, quotas.

Rejected: a fake of kazoo's client (it would keep kazoo's threads); direct calls of the store without pipes (no call
would ever be in flight, so none could be lost).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from random import Random
from typing import Any, TypeVar

from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.zookeeper_pipe import Outcome, Pipe, Request
from minibroker.deploy.simulator.zookeeper_tree import ROOT, Follower, Tree, parent_of
from minibroker.protocol.world import (
    ConnectionLoss,
    Create,
    Delete,
    MultiFailed,
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

T = TypeVar("T")

MAX_REQUEST_BYTES = 0xFFFFF
"""The server's `jute.maxbuffer`. A session rejects a larger request, because the server would close its connection."""

MIN_RECONNECT_S = 0.01
MAX_RECONNECT_S = 0.2
"""Range of the time that a client waits before it tries to connect again."""

_FIRST_SESSION_ID = 0x1000


class VirtualZooKeeper:
    """The server, and (through `connect`) an implementation of `minibroker.protocol.world.ZooKeeper`.

    `before` and `after` are hooks for tests. They are called with the session and the operations of each write request
    (`create`, `set` and `delete` are one operation) immediately before and after it is applied. `after` is not called
    for a rejected request. A hook may write, cut, or expire; if `before` raises, nothing is applied.
    """

    def __init__(self, latency_s: Callable[[], float] = lambda: 0.0, random: Random | None = None) -> None:
        self._latency_s = latency_s
        self.random = random or Random(0)
        self.tree = Tree()
        """The state of the ensemble's leader, to which all writes go."""
        self._followers: dict[str, Follower] = {}
        """The lagging servers, by the host that connects to them."""
        self._next_session_id = _FIRST_SESSION_ID
        self._live: dict[int, VirtualSession] = {}
        self.sessions: list[VirtualSession] = []
        """Every session ever opened, in order."""
        self.reachable = True
        """False: no client can connect, as with a server that is down. Existing sessions continue."""
        self.running = True
        self._cut_hosts: set[str] = set()
        self.slow_hosts: dict[str, tuple[float, float]] = {}
        """Minimum and maximum latency, by host, where it differs from the usual one."""
        self.reconnected: list[Callable[[VirtualSession], None]] = []
        """Called with each session that has reconnected, before it receives anything."""
        self.before: Callable[[VirtualSession, Sequence[Operation]], None] | None = None
        self.after: Callable[[VirtualSession, Sequence[Operation]], None] | None = None

    async def connect(
        self, servers: str, session_timeout_ms: int, connect_timeout_ms: int, *, owner: str = ""
    ) -> VirtualSession:
        """Open a session. `owner` is the name of its process."""
        hosts, slash, path = servers.partition("/")
        try:
            async with asyncio.timeout(connect_timeout_ms / 1000):
                await asyncio.sleep(2 * self._latency_s())
                while not self.answers(owner):  # noqa: ASYNC110 (a client polls)
                    await asyncio.sleep(self.reconnect_delay_s())
        except TimeoutError:
            raise ConnectionLoss(f"no ZooKeeper answers at {hosts} within {connect_timeout_ms} ms") from None
        chroot = slash + path.rstrip("/") if path else ""
        if chroot:
            self.make(chroot)
        session = VirtualSession(
            self, self._next_session_id, chroot, session_timeout_ms, lambda: self._latency_of(owner), owner
        )
        self._next_session_id += 1
        self._live[session.session_id] = session
        self.sessions.append(session)
        return session

    # -- faults --

    def cut(self, owner_host: str) -> None:
        """Separate the processes of that host from the server until `uncut`."""
        self._record(f"cut {owner_host}")
        self._cut_hosts.add(owner_host)
        self._lose_connections(owner_host)

    def uncut(self, owner_host: str) -> None:
        self._record(f"uncut {owner_host}")
        self._cut_hosts.discard(owner_host)

    def lose_connections(self, owner_host: str) -> None:
        """Break the connections of that host. Its clients can reconnect at once."""
        self._record(f"connections of {owner_host} lost")
        self._lose_connections(owner_host)

    def expire(self, owner_host: str) -> None:
        """End the sessions of that host. Their clients are informed when they have reconnected."""
        self._record(f"sessions of {owner_host} expire")
        for session in self.live_sessions(owner_host):
            self.end(session)
            session.lose_connection()

    def lag(self, owner_host: str, seconds: float) -> None:
        """From its next reconnect until `unlag`, that host uses a server that lags by so many seconds. A session that
        has already seen newer state uses another server, and so do new sessions."""
        self._record(f"{owner_host} lags by {seconds}")
        self._followers[owner_host] = Follower(self.tree, seconds)

    def unlag(self, owner_host: str) -> None:
        """Let that server catch up."""
        self._record(f"{owner_host} lags no more")
        follower = self._followers.pop(owner_host)
        follower.catch_up()
        for session in list(follower.sessions):
            session.leave_follower()
        self.tree.adopt_watches(follower.tree)

    def is_lagging(self, owner_host: str) -> bool:
        return owner_host in self._followers

    def stale_sessions(self, owner_host: str) -> int:
        """Number of its sessions that use the lagging server."""
        return len(self._followers[owner_host].sessions)

    def server_for(self, session: VirtualSession) -> Follower | None:
        """Return the server to which the session reconnects. None: one that is up to date, because a client never
        connects to a server that is behind the state that the client has seen."""
        follower = self._followers.get(_host_of(session.owner))
        return follower if follower is not None and follower.tree.zxid >= session.seen_zxid else None

    def stop(self) -> None:
        """Stop the server. It keeps its state, and no session expires meanwhile."""
        self._record("stop")
        self.running = False
        for session in list(self._live.values()):
            session.lose_connection()
            session.stop_expiry()

    def start(self) -> None:
        """Start the server. Each session has its whole timeout to reconnect."""
        if self.running:
            return
        self._record("start")
        self.running = True
        for session in self._live.values():
            session.expire_later()

    def _lose_connections(self, owner_host: str) -> None:
        for session in self.live_sessions(owner_host):
            session.lose_connection()

    def _latency_of(self, owner: str) -> float:
        slow = self.slow_hosts.get(_host_of(owner))
        return self._latency_s() if slow is None else self.random.uniform(*slow)

    def live_sessions(self, host: str) -> list[VirtualSession]:
        """The sessions of that host that have neither expired nor been closed."""
        return [session for session in self._live.values() if _host_of(session.owner) == host]

    def _record(self, what: str) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            loop.record(f"ZooKeeper: {what}")

    def answers(self, owner: str) -> bool:
        """Whether the process of that name can connect."""
        return self.running and self.reachable and _host_of(owner) not in self._cut_hosts

    def reconnect_delay_s(self) -> float:
        return self.random.uniform(MIN_RECONNECT_S, MAX_RECONNECT_S)

    # -- for tests: immediate reads and writes, as with zkCli --

    def make(self, path: str, data: bytes = b"") -> None:
        """Create a node and its parents, or replace its data."""
        if path in self.tree.nodes:
            self._transact(None, [SetData(path, data)])
            return
        missing = []
        parent = parent_of(path)
        while parent not in self.tree.nodes:
            missing.append(parent)
            parent = parent_of(parent)
        for above in reversed(missing):
            self._transact(None, [Create(above, b"")])
        self._transact(None, [Create(path, data)])

    def add(self, prefix: str, data: bytes) -> None:
        """Create a node with the next sequential name."""
        self._transact(None, [Create(prefix, data, sequence=True)])

    def remove(self, path: str) -> None:
        """Delete a node and everything below it."""
        for name in sorted(self.tree.nodes[path].children):
            self.remove(f"{path.rstrip('/')}/{name}")
        self._transact(None, [Delete(path)])

    def data(self, path: str) -> bytes:
        return self.tree.node(path).data

    def stat(self, path: str) -> Stat:
        return self.tree.node(path).stat()

    def has(self, path: str) -> bool:
        return path in self.tree.nodes

    def names(self, path: str) -> list[str]:
        return sorted(self.tree.node(path).children)

    def paths(self) -> list[str]:
        """The paths of all nodes, sorted."""
        return sorted(self.tree.nodes)

    # -- requests --

    def write(self, session: VirtualSession, operations: Sequence[Operation], *, multi: bool) -> list[Any]:
        if self.before is not None:
            self.before(session, operations)
        try:
            results = self._transact(session, operations)
        except MultiFailed as failure:
            if multi:
                raise
            raise failure.cause from None
        if self.after is not None:
            self.after(session, operations)
        return results

    def _transact(self, session: VirtualSession | None, operations: Sequence[Operation]) -> list[Any]:
        session_id = session.session_id if session else 0
        carried_out: Sequence[Operation] = ()
        try:
            results = self.tree.transact(operations, session_id)
            carried_out = operations
        finally:
            for follower in self._followers.values():
                follower.commit(self.tree.zxid, carried_out, session_id)
        return results

    def forget_watches(self, session: VirtualSession) -> None:
        for tree in (self.tree, *(follower.tree for follower in self._followers.values())):
            tree.forget_watches(session)

    # -- sessions --

    def knows(self, session: VirtualSession) -> bool:
        """Whether the session has neither expired nor been closed."""
        return session.session_id in self._live

    def end(self, session: VirtualSession) -> None:
        """Expire or close a session. One transaction deletes its ephemeral nodes."""
        if self._live.pop(session.session_id, None) is None:
            return
        self.forget_watches(session)
        owned = [path for path in sorted(self.tree.nodes) if self.tree.nodes[path].owner == session.session_id]
        if owned:
            self._transact(None, [Delete(path) for path in owned])


def _host_of(owner: str) -> str:
    """Return the host of a process: see `minibroker.deploy.simulator.world.Host.start_process`."""
    return owner.partition("#")[0]


class VirtualSession:
    """One session: `minibroker.protocol.world.ZooKeeperSession`, and its faults.

    `suspend` cuts the connection, and the session's timeout starts. `resume` reconnects. `expire` ends the session at
    the server at once. `lose_connection` is `suspend`, and the client then tries to `resume` by itself. `sever` is for
    a killed process: the timeout starts, without notice to the client. After `pause` the client sends no pings, so the
    timeout starts; after `go_on` it is informed of the events meanwhile.
    """

    def __init__(
        self,
        server: VirtualZooKeeper,
        session_id: int,
        chroot: str,
        session_timeout_ms: int,
        latency_s: Callable[[], float],
        owner: str,
    ) -> None:
        self._server = server
        self._session_id = session_id
        self._chroot = chroot
        self._timeout_s = session_timeout_ms / 1000
        self._latency_s = latency_s
        self.owner = owner
        self._state = SessionState.CONNECTED
        self._listeners: list[Callable[[SessionState], None]] = []
        self._up: Pipe[Request] = Pipe(self._arrived, latency_s)
        self._down: Pipe[Callable[[], None]] = Pipe(lambda deliver: deliver(), latency_s)
        self._pending: dict[Request, None] = {}
        self._follower: Follower | None = None
        """The server to which it is connected, if that server lags."""
        self._at_follower: deque[tuple[Request, Outcome | None]] = deque()
        """Requests that have arrived there and are not answered; a write with its outcome."""
        self.seen_zxid = 0
        """The latest transaction that the client has seen. It never reads older state."""
        self._expiry: asyncio.TimerHandle | None = None
        self._waiting: list[Request] = []
        """Requests made without a connection; they are sent after the reconnect."""
        self._is_connected = True
        """The server's view; `_state` is the client's."""
        self._reconnects = False
        """The client tries to reconnect."""
        self._paused = False
        self._severed = False
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()

    def __repr__(self) -> str:
        return f"VirtualSession({self._session_id:#x} {self.owner} {self._state.value})"

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def silent_s(self) -> float:
        return 0.0  # it loses its connection at once

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    def on_heard_again(self, listener: Callable[[float, float], None]) -> None:
        """It is silent only without a connection."""

    # -- calls --

    async def create(self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False) -> str:
        operation = Create(self._full(path), data, ephemeral, sequence)
        [created] = await self._call(lambda: self._server.write(self, [operation], multi=False), len(data), writes=True)
        return self._local(created)

    async def get(self, path: str, watch: Watcher | None = None) -> tuple[bytes, Stat]:
        full = self._full(path)

        def carry_out() -> tuple[bytes, Stat]:
            result = self._tree.read_data(full)
            if watch is not None:
                self._tree.watch_data(full, self, watch)
            return result

        return await self._call(carry_out)

    async def get_all(self, paths: Sequence[str]) -> list[tuple[bytes, Stat] | None]:
        full = [self._full(path) for path in paths]

        def carry_out() -> list[tuple[bytes, Stat] | None]:
            return [self._tree.read_data(path) if path in self._tree.nodes else None for path in full]

        return await self._call(carry_out, sum(map(len, full)))

    async def exists(self, path: str, watch: Watcher | None = None) -> Stat | None:
        full = self._full(path)

        def carry_out() -> Stat | None:
            if watch is not None:
                self._tree.watch_data(full, self, watch)
            return self._tree.nodes[full].stat() if full in self._tree.nodes else None

        return await self._call(carry_out)

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        full = self._full(path)

        def carry_out() -> list[str]:
            names = self._tree.read_children(full)
            if watch is not None:
                self._tree.watch_children(full, self, watch)
            return names

        return await self._call(carry_out)

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        operation = SetData(self._full(path), data, version)
        [stat] = await self._call(lambda: self._server.write(self, [operation], multi=False), len(data), writes=True)
        assert isinstance(stat, Stat)
        return stat

    async def delete(self, path: str, version: int = -1) -> None:
        operation = Delete(self._full(path), version)
        await self._call(lambda: self._server.write(self, [operation], multi=False), writes=True)

    async def multi(self, operations: Sequence[Operation]) -> list[str | Stat | None]:
        full = [operation._replace(path=self._full(operation.path)) for operation in operations]
        size = sum(len(o.path) + len(o.data) if isinstance(o, Create | SetData) else len(o.path) for o in full)
        results = await self._call(lambda: self._server.write(self, full, multi=True), size, writes=True)
        return [self._local(result) if isinstance(result, str) else result for result in results]

    async def close(self) -> None:
        if self._state is SessionState.CONNECTED:
            # If the request does not arrive, the server ends the session after its timeout.
            with contextlib.suppress(ZooKeeperError):
                await self._call(lambda: self._server.end(self), writes=True)
        self._state = SessionState.EXPIRED
        self._fail_pending(SessionExpired(f"session {self._session_id:#x} was closed"))
        self._disconnect(0)

    def _full(self, path: str) -> str:
        if not path.startswith("/") or (path != ROOT and path.endswith("/")) or "//" in path:
            raise ValueError(f"{path!r} is not a valid path: a path begins with a slash and does not end with one")
        return (self._chroot + path).rstrip("/") or ROOT

    def _local(self, path: str) -> str:
        return path.removeprefix(self._chroot) or ROOT

    @property
    def _tree(self) -> Tree:
        return self._server.tree if self._follower is None else self._follower.tree

    async def _call(self, carry_out: Callable[[], T], data_bytes: int = 0, *, writes: bool = False) -> T:
        if self._severed:
            await asyncio.get_running_loop().create_future()
        if data_bytes > MAX_REQUEST_BYTES:
            raise ZooKeeperError(f"a request of {data_bytes} bytes: ZooKeeper accepts {MAX_REQUEST_BYTES}; split it")
        if self._state is SessionState.EXPIRED:
            raise SessionExpired(f"session {self._session_id:#x} is over")
        request = Request(carry_out, asyncio.get_running_loop().create_future(), writes)
        if self._state is SessionState.SUSPENDED:
            if not self._reconnects or self._server.random.random() < 0.5:
                raise ConnectionLoss(f"session {self._session_id:#x} is not connected")
            self._waiting.append(request)
        else:
            self._send(request)
        result: T = await request.future
        return result

    def _send(self, request: Request) -> None:
        self._pending[request] = None
        if self._is_connected:  # otherwise the request is lost, and the client does not know it yet
            self._up.put(request)

    def _arrived(self, request: Request) -> None:
        if not self._server.knows(self):
            return
        connection = self._up.generation
        outcome = self._carried_out(request) if request.writes or self._follower is None else None
        if connection != self._up.generation:
            return  # a hook cut the connection: the reply is lost
        if self._follower is None:
            assert outcome is not None
            self._reply(request, outcome)
        else:
            self._at_follower.append((request, outcome))
            self.follower_moved()

    def _carried_out(self, request: Request) -> Outcome:
        try:
            result = request.carry_out()
        except ZooKeeperError as failure:
            return Outcome(self._tree_of(request).zxid, None, failure)
        return Outcome(self._tree_of(request).zxid, result, None)

    def _tree_of(self, request: Request) -> Tree:
        return self._server.tree if request.writes else self._tree

    def follower_moved(self) -> None:
        """Answer requests in order: a write when the follower has applied it, a read when all earlier requests are
        answered."""
        while self._at_follower and self._follower is not None:
            request, outcome = self._at_follower[0]
            if outcome is None:
                outcome = self._carried_out(request)
            elif outcome.zxid > self._follower.tree.zxid:
                return
            self._at_follower.popleft()
            self._reply(request, outcome)

    def leave_follower(self) -> None:
        if self._follower is not None:
            self._follower.sessions.pop(self, None)
            self._follower = None

    def _reply(self, request: Request, outcome: Outcome) -> None:
        self._down.put(lambda: self._answer(request, outcome))

    def _answer(self, request: Request, outcome: Outcome) -> None:
        self.seen_zxid = max(self.seen_zxid, outcome.zxid)
        self._pending.pop(request, None)
        if request.future.done():
            return
        if outcome.failure is not None:
            request.future.set_exception(outcome.failure)
        else:
            request.future.set_result(outcome.result)

    def notify(self, watcher: Watcher, kind: WatchKind, path: str, zxid: int) -> None:
        """Send a watch event, at the server's side."""
        event = WatchEvent(kind, self._local(path))
        self._down.put(lambda: self._notified(watcher, event, zxid))

    def _notified(self, watcher: Watcher, event: WatchEvent, zxid: int) -> None:
        self.seen_zxid = max(self.seen_zxid, zxid)
        watcher(event)

    # -- faults --

    def suspend(self, *, requests_arrive: bool = False) -> None:
        """Cut the connection. Requests and replies in transit are lost; with `requests_arrive`, only replies."""
        if self._is_connected and self._state is SessionState.CONNECTED:
            self._break(len(self._up) if requests_arrive else 0)

    def lose_connection(self) -> None:
        """Cut the connection. Some requests in transit arrive, and the client reconnects by itself."""
        if self._severed or self._state is SessionState.EXPIRED:
            return
        if self._is_connected:
            self._reconnects = True
            self._break(self._server.random.randint(0, len(self._up)))
        elif not self._reconnects:
            self._reconnects = True
            self._reconnect_later()

    def resume(self) -> None:
        """Reconnect. The client continues its session, or is informed that it has expired."""
        if self._state is not SessionState.SUSPENDED or self._severed:
            return
        self._reconnects = False
        if self._server.knows(self):
            self.stop_expiry()
            self._is_connected = True
            self._follower = self._server.server_for(self)
            if self._follower is not None:
                self._follower.sessions[self] = None
            for hook in list(self._server.reconnected):
                hook(self)
            self._change(SessionState.CONNECTED)
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._send(request)
        else:
            self._end()

    def expire(self) -> None:
        """End the session at the server. A connected client is informed at once, others when they resume."""
        self._server.end(self)
        if self._state is SessionState.CONNECTED and not self._paused:
            self._disconnect(0)
            self._end()

    def sever(self) -> None:
        """Disconnect for a killed process: the server ends the session after its timeout."""
        if self._severed:
            return
        self._severed = True
        self._disconnect(0)
        self._listeners.clear()
        self._pending.clear()
        self._waiting.clear()
        self._state = SessionState.SUSPENDED

    def pause(self) -> None:
        """Stop the pings of a paused process. Requests that it has sent still arrive."""
        self._paused = True
        if self._is_connected:
            self.expire_later()

    def go_on(self) -> None:
        self._paused = False
        if self._is_connected and self._server.knows(self):
            self.stop_expiry()
        elif self._state is SessionState.CONNECTED:
            self._reconnects = True
            self._disconnect(0)
            # With a delay: until then the process acts, although its session has expired.
            self._loop.call_later(self._latency_s(), self._learn_of_loss, context=self._context)

    def _break(self, requests_arrive: int) -> None:
        """End the connection after so many more of the requests in transit have arrived."""
        self._disconnect(requests_arrive)
        if not self._paused:
            self._learn_of_loss()

    def _disconnect(self, requests_arrive: int) -> None:
        """End the connection at the server's side."""
        self._is_connected = False
        lost = self._up.cut()
        self._down.cut()
        for request in lost[: requests_arrive if self._server.knows(self) else 0]:
            with contextlib.suppress(ZooKeeperError):  # an error is lost as any other reply
                request.carry_out()
        self._server.forget_watches(self)
        self._at_follower.clear()
        self.leave_follower()
        self.expire_later()

    def _learn_of_loss(self) -> None:
        """End the connection at the client's side. After two `go_on` in a row it may have reconnected already."""
        if self._state is not SessionState.CONNECTED or self._is_connected:
            return
        self._change(SessionState.SUSPENDED)
        self._fail_pending(ConnectionLoss(f"session {self._session_id:#x} lost its connection"))
        if self._reconnects:
            self._reconnect_later()

    def _reconnect_later(self) -> None:
        self._loop.call_later(self._server.reconnect_delay_s(), self._try_to_reconnect, context=self._context)

    def _try_to_reconnect(self) -> None:
        if self._state is not SessionState.SUSPENDED or not self._reconnects:
            return
        if self._server.answers(self.owner):
            self.resume()
        else:
            self._reconnect_later()

    def _end(self) -> None:
        self._change(SessionState.EXPIRED)
        self._fail_pending(SessionExpired(f"session {self._session_id:#x} has expired"))

    def expire_later(self) -> None:
        """Let the server end the session after its timeout, unless the client reconnects."""
        # Without an owner, as in the pipes: the server ends the session.
        if self._expiry is None and self._server.running and self._server.knows(self):
            self._expiry = Context().run(self._loop.call_later, self._timeout_s, self._server.end, self)

    def stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _change(self, state: SessionState) -> None:
        self._state = state
        for listener in list(self._listeners):
            listener(state)

    def _fail_pending(self, failure: ZooKeeperError) -> None:
        pending, self._pending = self._pending | dict.fromkeys(self._waiting), {}
        self._waiting.clear()
        for request in pending:
            if not request.future.done():
                request.future.set_exception(failure)
                request.future.exception()  # a call that was cancelled meanwhile must not cause a warning
