"""The World of the operating system. Only this module opens sockets and files for brokers and clients."""

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import zip_longest
from random import Random, SystemRandom
from ssl import SSLContext
from threading import Thread
from typing import Any, NoReturn, TypeVar

from minibroker.protocol.messages import Buffer
from minibroker.protocol.world import Descriptors, Incoming, World, ZooKeeper

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.BaseProtocol)

_BACKLOG = 1024
_ACCEPTED_PER_TURN = 8
"""Connections that a listener accepts in one turn of the loop. With its first request, each costs up to half a
millisecond, and a storm of connections must not block other work."""
_MAPPED = "::ffff:"
"""The beginning of an IPv4 address as a listener on `::` sees it. Limits and ACLs name the address without it."""

LOOKUP_OVERDUE_S = 0.25

ATTEMPT_DELAY_S = 0.25
"""Seconds without an answer of an address after which the next is tried as well, as RFC 8305 recommends."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that the other side has for a TLS handshake. Kafka's clients give up on a connection after as long."""

THREADS = 4
"""Threads of one executor."""
CLOSE_PATIENCE_S = 5.0

_Addresses = list[tuple[int, str]]
"""Family and numeric address, in the order in which to try them."""


class RealClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def observed_ms(self) -> int:
        return self.wall_ms()


# --- Network -------------------------------------------------------------------------------------------------


class RealIncoming:
    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket = connection
        self.peer = peer

    async def attach(self, factory: Callable[[], P], tls: SSLContext | None = None) -> P:
        protocol = factory()  # with TLS, uvloop returns its own protocol instead
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            self._socket,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
        )
        return protocol

    def close(self) -> None:
        self._socket.close()


class RealListener:
    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self.port: int = listening.getsockname()[1]
        self._on_connection: Callable[[Incoming], None] | None = None
        self._may_accept: Callable[[], bool] = lambda: True

    def start(self, on_connection: Callable[[Incoming], None], may_accept: Callable[[], bool] = lambda: True) -> None:
        self._on_connection, self._may_accept = on_connection, may_accept
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._on_connection is not None
        for _ in range(_ACCEPTED_PER_TURN):
            if not self._may_accept():
                return
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # Out of file descriptors: leave the connection in the backlog and retry later.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket.fileno())
                loop.call_later(0.1, self._resume)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = address[0].removeprefix(_MAPPED)
            self._on_connection(RealIncoming(connection, f"{host}:{address[1]}"))

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    async def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()


class _Lookup:
    def __init__(self, answer: asyncio.Future[_Addresses | OSError]) -> None:
        self.answer = answer
        self.next_thread_s = 0.0


class _Names:
    """Resolves host names in daemon threads.

    If the resolver is unreachable, a look-up blocks for 5 s and more. The event loop's pool for look-ups has so few
    threads that one dead name would keep other connections from live brokers. So each name gets its own thread. Callers
    share the look-up of a name, and after every LOOKUP_OVERDUE_S another thread repeats it, since the network may be
    back and answer a new request at once. The first answer counts.
    """

    def __init__(self) -> None:
        self._lookups: dict[str, _Lookup] = {}

    async def resolve(self, host: str) -> _Addresses:
        """Return at least one address. Raises OSError."""
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError, ValueError):
                socket.inet_pton(family, host)
                return [(family, host)]
        loop = asyncio.get_running_loop()
        lookup = self._lookups.get(host)
        if lookup is None or lookup.answer.done() or lookup.answer.get_loop() is not loop:
            lookup = self._lookups[host] = _Lookup(loop.create_future())
        while not lookup.answer.done():
            if loop.time() >= lookup.next_thread_s:
                lookup.next_thread_s = loop.time() + LOOKUP_OVERDUE_S
                arguments = (host, loop, lookup.answer)
                Thread(target=_look_up, args=arguments, name=f"lookup of {host}", daemon=True).start()
            await asyncio.wait([lookup.answer], timeout=lookup.next_thread_s - loop.time())
        found = lookup.answer.result()
        if isinstance(found, OSError):
            raise found.with_traceback(None)
        return found


def _look_up(host: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[_Addresses | OSError]) -> None:
    """Run in a thread, and set `answer` in the loop unless the loop is closed by then."""
    found: _Addresses | OSError
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = [(family, str(address[0])) for family, _, _, _, address in infos]
    except OSError as error:
        found = error
    except (UnicodeError, ValueError) as error:
        found = OSError(f"{host!r} cannot be a host name: {error}")
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))


class RealNetwork:
    def __init__(self) -> None:
        self._names = _Names()

    async def listen(self, host: str, port: int) -> RealListener:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setblocking(False)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return RealListener(listening)

    async def addresses(self, host: str) -> list[str]:
        return [address for _, address in await self._names.resolve(host)]

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        connection = await _first_connected(_by_turns(await self._names.resolve(host)), port)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Not `create_connection`: if the connection ends in the turn in which it is made, uvloop 0.23 closes the
            # descriptor there, and `connection` closes it again when it is collected: by then it may be a log's.
            _, protocol = await asyncio.get_running_loop().connect_accepted_socket(factory, connection)
        except BaseException:
            connection.close()
            raise
        return protocol


def _by_turns(addresses: _Addresses) -> _Addresses:
    """Alternate between the families, since one may be unreachable (RFC 8305, section 4)."""
    first = [entry for entry in addresses if entry[0] == addresses[0][0]]
    others = [entry for entry in addresses if entry[0] != addresses[0][0]]
    return [entry for pair in zip_longest(first, others) for entry in pair if entry is not None]


async def _first_connected(addresses: _Addresses, port: int) -> socket.socket:
    """Happy Eyeballs (RFC 8305): while an address does not answer, try the next one as well. (`create_connection` does
    so in asyncio, but not in uvloop.) If all attempts fail alike, the first error is raised."""
    rest = iter(addresses)
    attempts: set[asyncio.Task[socket.socket]] = set()
    failures: list[OSError] = []
    winner: socket.socket | None = None
    try:
        while winner is None:
            if (entry := next(rest, None)) is not None:
                attempts.add(asyncio.get_running_loop().create_task(_connected(*entry, port)))
            elif all(attempt.done() for attempt in attempts):
                break
            pending = [attempt for attempt in attempts if not attempt.done()]
            done, _ = await asyncio.wait(
                pending,
                timeout=None if entry is None else ATTEMPT_DELAY_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for attempt in done:
                error = attempt.exception()
                if isinstance(error, OSError):
                    failures.append(error)
                elif winner is None:
                    winner = attempt.result()
    finally:
        # Do not await the attempts: a caller cancelled here, perhaps twice, would leave a socket open.
        for attempt in attempts:
            if not attempt.done():
                attempt.cancel()
                attempt.add_done_callback(_discard)
            elif attempt.exception() is None and attempt.result() is not winner:
                attempt.result().close()
    if winner is not None:
        return winner
    if all(type(failure) is type(failures[0]) for failure in failures):
        raise failures[0]
    raise OSError("; ".join(str(failure) for failure in failures))


def _discard(attempt: asyncio.Task[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


async def _connected(family: int, address: str, port: int) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and error.errno is not None:  # replaces the text of the loop
            raise OSError(error.errno, os.strerror(error.errno)) from None
        raise
    return connection


# --- Disk ----------------------------------------------------------------------------------------------------


_open_files: set[int] = set()
"""Descriptors of files. A set, since worker threads also open and close files."""


OWNER_ONLY = 0o600
"""The mode of new files."""


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, OWNER_ONLY)


class RealFile:
    def __init__(self, path: str, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._descriptor = os.open(path, flags, OWNER_ONLY)
        _open_files.add(self._descriptor)

    def pread(self, size: int, position: int) -> bytes:
        data = os.pread(self._descriptor, size, position)
        if len(data) == size or not data:
            return data
        pieces = [data]
        have = len(data)
        while have < size:
            data = os.pread(self._descriptor, size - have, position + have)
            if not data:
                break
            pieces.append(data)
            have += len(data)
        return b"".join(pieces)

    def pwrite(self, data: Sequence[Buffer], position: int) -> int:
        total = sum(len(piece) for piece in data)
        written = os.pwritev(self._descriptor, data, position)
        while written < total:
            # Short write: a full disk or a signal. Write the rest; a full disk then raises ENOSPC.
            rest = memoryview(b"".join(data))[written:]
            written += os.pwrite(self._descriptor, rest, position + written)
        return total

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def modified_ms(self) -> int:
        return os.fstat(self._descriptor).st_mtime_ns // 1_000_000

    def set_modified_ms(self, wall_ms: int) -> None:
        os.utime(self._descriptor, ns=(wall_ms * 1_000_000, wall_ms * 1_000_000))

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def fdatasync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        # First: others may get the number as soon as the descriptor is closed, and if another thread closed this file
        # as well meanwhile, it would close theirs.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _open_files.discard(descriptor)
            os.close(descriptor)


class RealLock:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class RealDisk:
    def open(self, path: str, *, create: bool = False) -> RealFile:
        return RealFile(path, create=create)

    def read_file(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write_atomically(self, path: str, data: bytes) -> None:
        # The event loop and a worker thread that write the same file need different temporary files.
        temporary = path + (".tmp" if threading.current_thread() is threading.main_thread() else ".worker.tmp")
        with open(temporary, "wb", opener=_owner_only) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self.sync_directory(os.path.dirname(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directories(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> RealLock:
        return RealLock(path)

    def space(self, path: str) -> tuple[int, int]:
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def descriptors(self) -> Descriptors:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            lowest_free = os.open("/", os.O_RDONLY | os.O_CLOEXEC)  # all below are in use
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return Descriptors(len(_open_files), limit, limit)
        os.close(lowest_free)
        # Open files may lie above it, if an early descriptor was closed.
        return Descriptors(len(_open_files), max(lowest_free, len(_open_files)), limit)

    def boot_id(self) -> str:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()


class RealExecutor:
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        call = self._pool.submit(function, *arguments)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)

    def close(self) -> bool:
        """Wait for the threads to end. Return False if a call hangs."""
        _, hanging = wait(list(self._calls), CLOSE_PATIENCE_S)
        self._pool.shutdown(wait=not hanging)
        return not hanging


class _Besides:
    """The thread with its event loop that all clients of this process share for `World.beside`. It starts with the
    first client and ends with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._process_id = 0
        self._thread: _BesideThread | None = None

    def enter(self) -> "_BesideThread":
        with self._lock:
            if self._thread is None or self._process_id != os.getpid():  # a fork has no threads
                self._users = 0
                self._process_id = os.getpid()
                self._thread = _BesideThread()
            self._users += 1
            return self._thread

    def leave(self, thread: "_BesideThread") -> None:
        with self._lock:
            if thread is not self._thread:
                return
            self._users -= 1
            if self._users == 0:
                self._thread = None
                thread.call_soon(lambda: asyncio.get_running_loop().stop())


class _BesideThread:
    """A thread that makes its own event loop. asyncio logs that, and a client used by a logging handler must not wait
    for a lock of `logging` that its caller may hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        Thread(target=self._run, name="minibroker beside", daemon=True).start()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, as soon as it exists; not at all if it has ended."""
        with self._lock:
            if self._loop is None:
                self._early.append(function)
                return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with self._lock:
            self._loop = loop
            for function in self._early:
                loop.call_soon(function)
        loop.run_forever()
        loop.close()


_besides = _Besides()


class RealBeside:
    def __init__(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> None:
        self._main = main
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._end: Future[None] = Future()
        self._thread = _besides.enter()
        self._thread.call_soon(self._start)

    def call(self, function: Callable[[], object]) -> None:
        self._thread.call_soon(function)

    async def wait(self) -> None:
        end = asyncio.wrap_future(self._end)
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError:
            if not self._end.cancel():  # it has begun
                self.call(self._cancel)
                await asyncio.wait([end])
            raise

    # -- in the thread --

    def _start(self) -> None:
        if not self._end.set_running_or_notify_cancel():
            _besides.leave(self._thread)
            return
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        world = RealWorld()
        try:
            await self._main(world)
        finally:
            world.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        _besides.leave(self._thread)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)


class NoZooKeeper:
    """The ZooKeeper of processes without one: clients."""

    async def connect(self, servers: str, session_timeout_ms: int, connect_timeout_ms: int) -> NoReturn:
        raise RuntimeError(f"this process was built without ZooKeeper and cannot connect to {servers}")


class RealWorld:
    """The composition root passes `zookeeper`, since only the controller package uses kazoo."""

    def __init__(self, zookeeper: ZooKeeper | None = None) -> None:
        self.clock = RealClock()
        self.network = RealNetwork()
        self.disk = RealDisk()
        self.zookeeper: ZooKeeper = zookeeper if zookeeper is not None else NoZooKeeper()
        self.random: Random = SystemRandom()
        self._executors: list[RealExecutor] = []

    def new_executor(self, name: str) -> RealExecutor:
        executor = RealExecutor(name)
        self._executors.append(executor)
        return executor

    def beside(self, main: Callable[[World], Coroutine[Any, Any, None]], name: str) -> RealBeside:
        return RealBeside(main, name)

    def close(self) -> bool:
        """Wait for the worker threads to end. Return False if some hang and would keep the interpreter from ending."""
        closed = [executor.close() for executor in self._executors]
        return all(closed)
