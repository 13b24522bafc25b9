"""Everything outside the process: clock, network, disk, ZooKeeper, randomness, worker threads. Interfaces only.

The problem: a cluster can only be tested under a thousand crashes, torn writes and reordered packets if all
of those come from a place that the test controls, and only be debugged if the same seed reproduces them.

The choice: brokers, controllers and clients get a `World` and reach nothing else: no `time.time()`, no
`open()`, no `random`. `minibroker.protocol.world.real` implements it with the operating system; the simulator with
virtual time, in memory. Waiting (tasks, events, `asyncio.timeout`, `loop.call_later`) stays asyncio's own, because the
simulator brings an event loop of its own whose time is virtual; wrapping all of that again would buy nothing.

Rejected: monkeypatching (a call that was forgotten goes unnoticed); a file-system or network fake below the
sockets (slow, and threads make it irreproducible).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from minibroker.protocol.messages import Buffer

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.BaseProtocol)


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back. The loop's own time."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970; may jump. For timestamps in records and znodes, never for deadlines."""
        ...


# --- Network -------------------------------------------------------------------------------------------------


class Incoming(Protocol):
    """A connection that was accepted and has no owner yet."""

    @property
    def peer(self) -> str:
        """`host:port` of the other side."""
        ...

    async def attach(self, factory: Callable[[], P]) -> P:
        """Hand the connection to a protocol: its `connection_made` is called with the transport."""
        ...

    def close(self) -> None:
        """Refuse: drop the connection without reading from it."""
        ...


class Listener(Protocol):
    """A bound socket: connections queue up from `listen` on and are accepted from `start` on."""

    @property
    def port(self) -> int: ...

    def start(self, on_connection: Callable[[Incoming], None]) -> None: ...

    async def close(self) -> None:
        """Stop accepting. Connections that were handed out live on."""
        ...


class Network(Protocol):
    async def listen(self, host: str, port: int) -> Listener:
        """Bind; port 0 takes a free one. Raises OSError (EADDRINUSE ...)."""
        ...

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        """Raises OSError (refused, unreachable, name unknown). Bound its time with `asyncio.timeout`."""
        ...


# --- Disk ----------------------------------------------------------------------------------------------------


class File(Protocol):
    """An open file. Positions are explicit, so there is no cursor to share. All calls block; see Executor."""

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        """Write all of `data`, in order, and return the number of bytes. Raises OSError; then an unknown part
        of it has been written."""
        ...

    def size(self) -> int: ...

    def modified_ms(self) -> int:
        """When it was last written to or cut, by the wall clock."""
        ...

    def set_modified_ms(self, wall_ms: int) -> None: ...

    def truncate(self, size: int) -> None: ...

    def fdatasync(self) -> None:
        """The bytes survive a power cut once this returns. After an error nothing is known, as the kernel may have
        marked the lost pages clean: the log directory must be taken offline; never repeat the call."""
        ...

    def close(self) -> None: ...


class Descriptors(NamedTuple):
    """Of this process."""

    files: int
    """Open `File`s."""
    used: int
    """Files, connections and all else that takes one: so many at least."""
    limit: int
    """How many there may be (`ulimit -n`)."""


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    """Paths are absolute strings. Raises OSError as the operating system does."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; with `create`, an empty file if there is none."""
        ...

    def read_file(self, path: str) -> bytes: ...

    def write_atomically(self, path: str, data: bytes) -> None:
        """Replace the whole file: temporary file, fsync, rename, fsync of the directory. The event loop and one worker
        thread may do so with the same file at once."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def make_directories(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Names created, renamed or removed in the directory survive a power cut once this returns."""
        ...

    def lock(self, path: str) -> Lock:
        """Take the lock file for this process. Raises BlockingIOError if another process holds it."""
        ...

    def space(self, path: str) -> tuple[int, int]:
        """Bytes of the file system that the path is on: of all of it, and of what this user can still take."""
        ...

    def descriptors(self) -> Descriptors: ...

    def boot_id(self) -> str:
        """Changes with every start of the host, which loses the page cache."""
        ...


# --- ZooKeeper -----------------------------------------------------------------------------------------------


class ZooKeeperError(Exception):
    """The base class of what ZooKeeper calls raise. The text names the path."""


class NoNode(ZooKeeperError):
    pass


class NodeExists(ZooKeeperError):
    pass


class BadVersion(ZooKeeperError):
    pass


class NotEmpty(ZooKeeperError):
    pass


class ConnectionLoss(ZooKeeperError):
    """The connection broke during the call, which may or may not have been carried out."""


class SessionExpired(ZooKeeperError):
    """The session is over, with all its ephemeral nodes. Nothing can be done through it any more."""


class MultiFailed(ZooKeeperError):
    """A `multi` was refused as a whole: operation `index` failed with `cause`; nothing was changed."""

    def __init__(self, index: int, cause: ZooKeeperError) -> None:
        super().__init__(f"operation {index} of a multi failed: {cause!r}")
        self.index = index
        self.cause = cause


class Stat(NamedTuple):
    version: int
    """The data version: grows with every set."""
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
"""Called once, in the event loop, in the order in which ZooKeeper sent events and responses. Never called for
a lost connection: every watch is forgotten with it, see `SessionState.CONNECTED`."""


class SessionState(Enum):
    CONNECTED = "connected"
    """Connected (again). Every earlier watch is gone: read again and set new ones."""
    SUSPENDED = "suspended"
    """Disconnected; the session may live on. Calls wait or raise ConnectionLoss."""
    EXPIRED = "expired"
    """Final. Every later call raises SessionExpired. Open a new session."""


class ZooKeeperSession(Protocol):
    """One session, from its connect to its end: it is never replaced by another behind its owner's back.

    Calls may be pipelined (several awaited at once); ZooKeeper carries them out in the order of the calls. Paths
    are below the chroot of the connection string. Every call raises ConnectionLoss and SessionExpired.
    """

    @property
    def session_id(self) -> int: ...

    @property
    def state(self) -> SessionState: ...

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Call `listener` in the event loop at every change from now on."""
        ...

    async def create(self, path: str, data: bytes, *, ephemeral: bool = False, sequence: bool = False) -> str:
        """The path created (with its number, if sequential). Raises NodeExists, NoNode (no parent)."""
        ...

    async def get(self, path: str, watch: Watcher | None = None) -> tuple[bytes, Stat]:
        """Raises NoNode, and then sets no watch."""
        ...

    async def get_all(self, paths: Sequence[str]) -> list[tuple[bytes, Stat] | None]:
        """What `get` returns for each of the paths, None where there is no such node: one request, answered as of one
        moment, at a tenth of the price of as many."""
        ...

    async def exists(self, path: str, watch: Watcher | None = None) -> Stat | None:
        """The watch is set in either case: it reports creation, change and deletion."""
        ...

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        """Names, sorted. The watch reports children created and deleted. Raises NoNode."""
        ...

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        """Raises NoNode, BadVersion. A version of -1 is not checked."""
        ...

    async def delete(self, path: str, version: int = -1) -> None:
        """Raises NoNode, BadVersion, NotEmpty."""
        ...

    async def multi(self, operations: Sequence[Operation]) -> list[str | Stat | None]:
        """All or nothing. A path for each Create, a Stat for each SetData, None for others. Raises MultiFailed."""
        ...

    async def close(self) -> None:
        """End the session: its ephemeral nodes vanish at once. Never raises for a lost connection."""
        ...


class ZooKeeper(Protocol):
    async def connect(self, servers: str, session_timeout_ms: int, connect_timeout_ms: int) -> ZooKeeperSession:
        """`servers`: `host:port,host:port/chroot`; the chroot is created. Raises ConnectionLoss naming `servers` if
        none answers in time."""
        ...


# --- Threads, and the whole ----------------------------------------------------------------------------------


class Executor(Protocol):
    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a blocking function in a worker thread. Cancelling the caller does not stop the function."""
        ...


class Beside(Protocol):
    """A coroutine that runs beside the event loop of whoever started it (`World.beside`)."""

    def call(self, function: Callable[[], object]) -> None:
        """Call it soon, in the loop in which the coroutine runs. Nothing happens if that has ended."""
        ...

    async def wait(self) -> None:
        """Until it has ended. Raises what it raised; cancelling the wait cancels it, and returns when it is over."""
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
        """Worker threads of its own, started when they are needed: a call that never returns costs no other executor
        one. `name` tells whose they are: a log directory's has its path."""
        ...

    def beside(self, main: Callable[["World"], Coroutine[Any, Any, None]], name: str) -> Beside:
        """Run `main` where code that blocks this loop does not hold it up: in a thread with an event loop of its own,
        and with a World for that loop. In the simulation, where code takes no time, it is a task like any other.

        Its messages to this loop go through `call_soon_threadsafe`."""
        ...
