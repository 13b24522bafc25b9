"""Everything outside the process: clock, network, disk, ZooKeeper, randomness, worker threads. Interfaces only.

The problem: a test can only put a cluster through a thousand crashes, torn writes and reordered packets if it controls
their source, and a failure can only be debugged if the same seed reproduces it.

The choice: brokers, controllers and clients receive a `World` and use nothing else: no `time.time()`, no `open()`, no
`random`. `minibroker.protocol.world.real` implements it by the operating system, the simulator in memory with virtual
time. Waiting (tasks, events, `asyncio.timeout`, `loop.call_later`) remains asyncio's, because the simulator has an
event loop with virtual time, so wrapping it would gain nothing.

Rejected: monkeypatching (a forgotten call goes unnoticed); a fake file system or network below the sockets (slow, and
threads make it irreproducible).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from random import Random
from ssl import SSLContext
from typing import Any, NamedTuple, Protocol, TypeVar

from minibroker.protocol.messages import Buffer

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.BaseProtocol)


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds since a fixed moment; they never go back. The loop's own time."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970; they may jump. For timestamps in records and znodes, never for deadlines."""
        ...

    def observed_ms(self) -> int:
        """Return milliseconds since 1970 by the machine's clock, as somebody sees it who looks at the cluster from
        there. A clock that a fault has moved changes `wall_ms` alone. For events whose times are compared between
        brokers."""
        ...


# --- Network -------------------------------------------------------------------------------------------------


class Incoming(Protocol):
    """An accepted connection without an owner."""

    @property
    def peer(self) -> str:
        """`host:port` of the other side."""
        ...

    async def attach(self, factory: Callable[[], P], tls: SSLContext | None = None) -> P:
        """Attach the connection to a protocol, whose `connection_made` is called with the transport: at once, or with a
        TLS context after the handshake. Raises OSError if that fails or takes too long."""
        ...

    def close(self) -> None:
        """Refuse: drop the connection without reading from it."""
        ...


class Listener(Protocol):
    """A bound socket: connections queue up from `listen` on and are accepted from `start` on."""

    @property
    def port(self) -> int: ...

    def start(self, on_connection: Callable[[Incoming], None], may_accept: Callable[[], bool] = lambda: True) -> None:
        """`may_accept` is asked before each connection; False leaves it and further ones queued until the loop's next
        turn."""
        ...

    async def close(self) -> None:
        """Stop accepting. Accepted connections stay open."""
        ...


class Network(Protocol):
    async def listen(self, host: str, port: int) -> Listener:
        """Bind; port 0 selects a free one. Raises OSError, for example EADDRINUSE."""
        ...

    async def addresses(self, host: str) -> list[str]:
        """Return the IP addresses of a host name, one at least. Raises OSError. Bound its time with
        `asyncio.timeout`."""
        ...

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        """Connect. Raises OSError (refused, unreachable, unknown name). Bound its time with `asyncio.timeout`."""
        ...


# --- Disk ----------------------------------------------------------------------------------------------------


class File(Protocol):
    """An open file. Positions are explicit, so there is no cursor to share. All calls block; see Executor."""

    def pread(self, size: int, position: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the file."""
        ...

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        """Write all of `data`, in order, and return the number of bytes. Raises OSError after writing an unknown part
        of it."""
        ...

    def size(self) -> int: ...

    def modified_ms(self) -> int:
        """Return the time of the last write or truncation, by the wall clock."""
        ...

    def set_modified_ms(self, wall_ms: int) -> None: ...

    def truncate(self, size: int) -> None: ...

    def fdatasync(self) -> None:
        """Make the bytes survive a power cut. After an error their state is unknown, since the kernel may have marked
        lost pages clean: take the log directory offline and never repeat the call."""
        ...

    def close(self) -> None: ...


class Descriptors(NamedTuple):
    """File descriptors of this process."""

    files: int
    """Open `File`s."""
    used: int
    """Descriptors of files, connections and others: a lower bound."""
    limit: int
    """The maximum (`ulimit -n`)."""


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    """Paths are absolute strings. Raises OSError as the operating system does."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; with `create`, create an empty file if there is none."""
        ...

    def read_file(self, path: str) -> bytes: ...

    def write_atomically(self, path: str, data: bytes) -> None:
        """Replace the whole file: temporary file, fsync, rename, fsync of the directory. The event loop and one worker
        thread may do so at once, even for the same file."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def make_directories(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Make names created, renamed or removed in the directory survive a power cut."""
        ...

    def lock(self, path: str) -> Lock:
        """Lock the file for this process. Raises BlockingIOError if another process holds the lock."""
        ...

    def space(self, path: str) -> tuple[int, int]:
        """Return the size of the path's file system and the space left for this user, in bytes."""
        ...

    def descriptors(self) -> Descriptors: ...

    def boot_id(self) -> str:
        """Return an id that changes with every start of the host, which loses the page cache."""
        ...


# --- ZooKeeper -----------------------------------------------------------------------------------------------


class ZooKeeperError(Exception):
    """The base class of errors of ZooKeeper calls. The text names the path."""


class NoNode(ZooKeeperError):
    pass


class NodeExists(ZooKeeperError):
    pass


class BadVersion(ZooKeeperError):
    pass


class NotEmpty(ZooKeeperError):
    pass


class ConnectionLoss(ZooKeeperError):
    """The connection broke during the call, which may or may not have taken effect."""


class SessionExpired(ZooKeeperError):
    """The session has ended and its ephemeral nodes are gone. All later calls fail."""


class MultiFailed(ZooKeeperError):
    """A `multi` changed nothing, because operation `index` failed with `cause`."""

    def __init__(self, index: int, cause: ZooKeeperError) -> None:
        super().__init__(f"operation {index} of a multi failed: {cause!r}")
        self.index = index
        self.cause = cause


class Stat(NamedTuple):
    version: int
    """The data version, which grows with every set."""
    czxid: int
    """The transaction that created the node."""
    mzxid: int
    ephemeral_owner: int
    """The session id of an ephemeral node, 0 otherwise."""
    children_count: int


class Create(NamedTuple):
    path: str
    data: bytes
    ephemeral: bool = False
    sequence: bool = False


class SetData(NamedTuple):
    path: str
    data: bytes
    version: int = -1


class Delete(NamedTuple):
    path: str
    version: int = -1


class Check(NamedTuple):
    path: str
    version: int


Operation = Create | SetData | Delete | Check


class WatchKind(Enum):
    CREATED = "created"
    DELETED = "deleted"
    CHANGED = "changed"
    CHILDREN = "children"


class WatchEvent(NamedTuple):
    kind: WatchKind
    path: str


Watcher = Callable[[WatchEvent], None]
"""Called once, in the event loop, in the order in which ZooKeeper sent events and responses. A lost connection drops
every watch without a call (`SessionState.CONNECTED`)."""


class SessionState(Enum):
    CONNECTED = "connected"
    """Connected, perhaps again. Every earlier watch is gone: read again and set new ones."""
    SUSPENDED = "suspended"
    """Disconnected; the session may live on. Calls wait or raise ConnectionLoss."""
    EXPIRED = "expired"
    """Final. Every later call raises SessionExpired. Open a new session."""


PINGS_PER_SESSION_TIMEOUT = 3
PING_SLACK_S = 1.0
"""An answer to a ping may be this late before it counts as missing."""


def silent_at_most_s(session_timeout_ms: int) -> float:
    """Return for how many seconds ZooKeeper may be silent if it answers the pings of a session."""
    return session_timeout_ms / 1_000 / PINGS_PER_SESSION_TIMEOUT + PING_SLACK_S


class ZooKeeperSession(Protocol):
    """One session, from its connect to its end. Another session never replaces it silently.

    Calls may be pipelined (several awaited at once); ZooKeeper executes them in the order of the calls. Paths
    are below the chroot of the connection string. Every call raises ConnectionLoss and SessionExpired.
    """

    @property
    def session_id(self) -> int: ...

    @property
    def state(self) -> SessionState: ...

    @property
    def silent_s(self) -> float:
        """Seconds since ZooKeeper was last heard of. While it can be reached, that is a third of the session timeout at
        most, since it answers pings."""
        ...

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` in the event loop at every later change of the state."""
        ...

    def on_heard_again(self, listener: Callable[[float, float], None]) -> None:
        """Call `listener` in the event loop when ZooKeeper is heard of again after it has not answered a ping in time,
        or a request for a second: with the seconds since it was last heard of, and those for which a request or an
        attempt to connect had no answer. The connection may have been lost, and may not be back yet. There is one
        listener at most."""
        ...

    async def create(self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False) -> str:
        """Create a node and return its path, with its number if sequential. Raises NodeExists, NoNode (no parent)."""
        ...

    async def get(self, path: str, watch: Watcher | None = None) -> tuple[bytes, Stat]:
        """Return the data. Raises NoNode, and then sets no watch."""
        ...

    async def get_all(self, paths: Sequence[str]) -> list[tuple[bytes, Stat] | None]:
        """Return the result of `get` for each path, or None if there is no such node. One request reads all of them as
        of one moment, at a tenth of the cost of single ones."""
        ...

    async def exists(self, path: str, watch: Watcher | None = None) -> Stat | None:
        """Return the node's Stat, if it exists. The watch is always set; it reports creation, change and deletion."""
        ...

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        """Return the names, sorted. The watch reports children created and deleted. Raises NoNode."""
        ...

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        """Set the data. A version of -1 is not checked. Raises NoNode, BadVersion."""
        ...

    async def delete(self, path: str, version: int = -1) -> None:
        """Delete a node. Raises NoNode, BadVersion, NotEmpty."""
        ...

    async def multi(self, operations: Sequence[Operation]) -> list[str | Stat | None]:
        """Execute all operations or none. Return a path for each Create, a Stat for each SetData, None for others.

        Raises MultiFailed."""
        ...

    async def close(self) -> None:
        """End the session: its ephemeral nodes vanish at once. Never raises for a lost connection."""
        ...


class ZooKeeper(Protocol):
    async def connect(self, servers: str, session_timeout_ms: int, connect_timeout_ms: int) -> ZooKeeperSession:
        """Open a session. `servers`: `host:port,host:port/chroot`; the chroot is created. Raises ConnectionLoss with
        `servers` if none answers in time."""
        ...


# --- Threads, and the whole ----------------------------------------------------------------------------------


class Executor(Protocol):
    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a blocking function in a worker thread. Cancelling the caller does not stop the function."""
        ...


class Beside(Protocol):
    """A coroutine that runs in another event loop than its starter's (`World.beside`)."""

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` soon in the coroutine's loop; not at all if that has ended."""
        ...

    async def wait(self) -> None:
        """Wait for its end and raise its error. Cancelling the wait cancels the coroutine and waits for its end."""
        ...


class World(Protocol):
    @property
    def clock(self) -> Clock: ...
    @property
    def network(self) -> Network: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def zookeeper(self) -> ZooKeeper: ...
    @property
    def random(self) -> Random: ...

    def new_executor(self, name: str) -> Executor:
        """Return an executor with its own worker threads, started when needed, so that a call that never returns does
        not block a thread of another executor. `name` names the owner: for a log directory, its path."""
        ...

    def beside(self, main: Callable[["World"], Coroutine[Any, Any, None]], name: str) -> Beside:
        """Run `main` in a thread with its own event loop and World, so that code that blocks this loop does not delay
        it. In the simulation, where code takes no time, it is an ordinary task.

        It must call into this loop by `call_soon_threadsafe`."""
        ...
