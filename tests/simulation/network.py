"""TCP in memory: connections between processes of the simulated world.

The problem: the code under test must meet what TCP does to it (bytes arrive later, in other pieces, until they do not)
and not what a queue of Python objects does (whole messages, at once, shared with the sender).

The choice: each connection is two ends, and what an end sends (bytes, the end of the stream, a reset) arrives at the
other in order, each piece after a latency of its own. Bytes are copied when they leave. What was written during a turn
of the loop leaves together at its end, as under uvloop (so who changes a buffer that he has just written changes what
is sent, there and here), and now and then it is cut somewhere. An end takes WINDOW_BYTES that the other has not read;
more stays in its buffer, which is what makes `pause_writing` happen.

Pieces on their way belong to nobody, only the calls of a protocol belong to its process: what a process has sent
before it is killed still arrives. The operating system of its host then closes its connections: who has sent it what it
has not read gets a reset, anybody else the end of the stream, as with Linux.

Addresses: each host has a name and an IP address. `localhost` is the own host, an empty host or 0.0.0.0 all addresses
of the own host. All that is sent passes `VirtualTransport._send`, all that a protocol is told passes `_call` or is
scheduled in its process's context: the places for faults.

Rejected: a connection as a pair of StreamReader queues (no flow control, no BufferedProtocol); real sockets on
loopback under a virtual clock (the kernel decides when bytes arrive, so no two runs are equal).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context
from enum import Enum
from random import Random
from typing import Any, TypeVar
from zlib import crc32

from protocol.world import Incoming
from tests.simulation.loop import VirtualLoop
from tests.simulation.process import Process

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.BaseProtocol)

SEGMENT_BYTES = 64 * 1024
WINDOW_BYTES = 256 * 1024
MIN_LATENCY_S = 0.000_05
MAX_LATENCY_S = 0.000_5
CUT_PROBABILITY = 1 / 16
"""How often a piece is cut in two at a random place, which a receiver may not notice."""

ALL_ADDRESSES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_HIGH_WATER_BYTES = 64 * 1024
_SIZE_HINT = 65_536
_FIRST_FREE_PORT = 32_768
_LAST_FREE_PORT = 60_999


class _Signal(Enum):
    END = "end of the stream"
    RESET = "reset"


_Piece = memoryview | _Signal


def _os_error(number: int, what: str) -> OSError:
    return OSError(number, f"{os.strerror(number)}: {what}")


class VirtualNetwork:
    """What all hosts are connected to."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self._random = random
        self._addresses: dict[str, str] = {}
        self._listeners: dict[tuple[str, int], list[VirtualListener]] = {}
        self._next_ports: dict[str, int] = {}

    def add_host(self, name: str) -> str:
        """The IP address that the host is given. Raises ValueError where there is one of that name."""
        if name in self._addresses:
            raise ValueError(f"there is a host {name} already")
        number = len(self._addresses) + 1
        address = f"10.0.{number // 256}.{number % 256}"
        self._addresses[name] = self._addresses[address] = address
        return address

    def of(self, process: Process) -> ProcessNetwork:
        """The network as this process sees it."""
        return ProcessNetwork(self, process)

    def delay_s(self) -> float:
        return self._random.uniform(MIN_LATENCY_S, MAX_LATENCY_S)

    def cut(self, size: int) -> int:
        """How much of a piece goes first."""
        if size > 1 and self._random.random() < CUT_PROBABILITY:
            return self._random.randrange(1, size)
        return size

    def resolve(self, host: str, process: Process) -> tuple[str, str]:
        """The address of the host that is meant, and the one that it is to be reached at. Raises gaierror."""
        if host in ("localhost", LOOPBACK):
            return process.address, LOOPBACK
        address = self._addresses.get(host)
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {host}")
        return address, address

    def free_port(self, address: str) -> int:
        port = self._next_ports.get(address, _FIRST_FREE_PORT)
        while (address, port) in self._listeners:
            port += 1
        self._next_ports[address] = port + 1 if port < _LAST_FREE_PORT else _FIRST_FREE_PORT
        return port

    def listener(self, address: str, reached_at: str, port: int) -> VirtualListener | None:
        for listener in self._listeners.get((address, port), ()):
            if listener.bound_to in (reached_at, ALL_ADDRESSES):
                return listener
        return None

    def add_listener(self, listener: VirtualListener, address: str) -> None:
        listeners = self._listeners.setdefault((address, listener.port), [])
        for other in listeners:
            if ALL_ADDRESSES in (listener.bound_to, other.bound_to) or listener.bound_to == other.bound_to:
                raise _os_error(errno.EADDRINUSE, f"{listener.bound_to}:{listener.port}")
        listeners.append(listener)

    def remove_listener(self, listener: VirtualListener, address: str) -> None:
        listeners = self._listeners.get((address, listener.port), [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._listeners.pop((address, listener.port), None)


class ProcessNetwork:
    """`protocol.world.Network` for one process. Severed when it is killed."""

    def __init__(self, network: VirtualNetwork, process: Process) -> None:
        self._network = network
        self._process = process
        self._ends: dict[VirtualTransport, None] = {}
        self._listeners: dict[VirtualListener, None] = {}
        process.on_kill(self._sever)

    @property
    def connections(self) -> int:
        """How many connections the process has open."""
        return len(self._ends)

    async def listen(self, host: str, port: int) -> VirtualListener:
        """Raises OSError: EADDRINUSE, EADDRNOTAVAIL, or gaierror."""
        self._process.check()
        bound_to = ALL_ADDRESSES
        if host not in ("", ALL_ADDRESSES):
            address, bound_to = self._network.resolve(host, self._process)
            if address != self._process.address:
                raise _os_error(errno.EADDRNOTAVAIL, f"{host}:{port}")
        listener = VirtualListener(
            self, self._network.loop, self._process, bound_to, port or self._network.free_port(self._process.address)
        )
        self._network.add_listener(listener, self._process.address)
        self._listeners[listener] = None
        return listener

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        """Raises OSError: ConnectionRefusedError, or gaierror."""
        self._process.check()
        network = self._network
        address, reached_at = network.resolve(host, self._process)
        await asyncio.sleep(network.delay_s())
        listener = network.listener(address, reached_at, port)
        if listener is None:
            await asyncio.sleep(network.delay_s())
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{reached_at}', {port})")
        own_address = LOOPBACK if reached_at == LOOPBACK else self._process.address
        own = (own_address, network.free_port(self._process.address))
        here = VirtualTransport(network, self._process, self._ends, own, (reached_at, port))
        there = listener.offer(own, (reached_at, port))
        here.join(there)
        there.join(here)
        try:
            await asyncio.sleep(network.delay_s())
        except asyncio.CancelledError:
            here.abort()
            raise
        protocol = factory()
        here.attach(protocol)
        return protocol

    def accepted(self, local: tuple[str, int], remote: tuple[str, int]) -> VirtualTransport:
        """This process's end of a connection that somebody opens to it."""
        return VirtualTransport(self._network, self._process, self._ends, local, remote)

    def forget(self, listener: VirtualListener) -> None:
        self._listeners.pop(listener, None)
        self._network.remove_listener(listener, self._process.address)

    def _sever(self) -> None:
        for listener in list(self._listeners):
            self.forget(listener)
        for end in list(self._ends):
            end.process_killed()


class VirtualListener:
    """`protocol.world.Listener`."""

    def __init__(self, network: ProcessNetwork, loop: VirtualLoop, process: Process, bound_to: str, port: int) -> None:
        self.port = port
        self.bound_to = bound_to
        self._network = network
        self._loop = loop
        self._process = process
        self._backlog: deque[VirtualIncoming] = deque()
        self._on_connection: Callable[[Incoming], None] | None = None
        self._closed = False

    def start(self, on_connection: Callable[[Incoming], None]) -> None:
        self._on_connection = on_connection
        for _ in self._backlog:
            self._loop.call_soon(self._accept, context=self._process.new_context())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._network.forget(self)
        while self._backlog:
            self._backlog.popleft().close()

    def offer(self, remote: tuple[str, int], local: tuple[str, int]) -> VirtualTransport:
        """A connection has been asked for: the operating system makes it, and the process may take it."""
        transport = self._network.accepted(local, remote)
        self._backlog.append(VirtualIncoming(transport, f"{remote[0]}:{remote[1]}"))
        if self._on_connection is not None:
            self._loop.call_soon(self._accept, context=self._process.new_context())
        return transport

    def _accept(self) -> None:
        if self._backlog:  # unless it was closed in the meantime
            assert self._on_connection is not None
            self._on_connection(self._backlog.popleft())


class VirtualIncoming:
    """`protocol.world.Incoming`."""

    def __init__(self, transport: VirtualTransport, peer: str) -> None:
        self._transport = transport
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    async def attach(self, factory: Callable[[], P]) -> P:
        """Raises OSError after `close`."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        if self._transport.is_closing():
            raise _os_error(errno.EBADF, f"the connection from {self._peer} was closed")
        protocol = factory()
        self._transport.attach(protocol)
        return protocol

    def close(self) -> None:
        self._transport.abort()


class VirtualTransport(asyncio.Transport):
    """One end of a connection. Behaves as asyncio's and uvloop's transports do where those agree."""

    def __init__(
        self,
        network: VirtualNetwork,
        process: Process,
        open_ends: dict[VirtualTransport, None],
        local: tuple[str, int],
        remote: tuple[str, int],
    ) -> None:
        super().__init__(extra={"sockname": local, "peername": remote})
        self._network = network
        self._loop = network.loop
        self._process = process
        self._context = process.new_context()
        self._open_ends = open_ends
        open_ends[self] = None
        self._name = f"{local[0]}:{local[1]}>{remote[0]}:{remote[1]}"
        self._protocol: asyncio.BaseProtocol | None = None
        self._other: VirtualTransport | None = None

        self._closing = False
        """Nothing is read any more, and nothing new is taken to be written."""
        self._closed = False
        """This end is gone: `connection_lost` has been called, or soon will be."""

        self._unread: deque[_Piece] = deque()
        self._reading_paused = False
        self._reset_received = False

        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unacknowledged_bytes = 0
        self._last_arrival = 0.0
        self._flush_scheduled = False
        self._end_written = False
        self._end_sent = False
        self._writing_paused = False
        self._high_water = _HIGH_WATER_BYTES
        self._low_water = _HIGH_WATER_BYTES // 4

    def __repr__(self) -> str:
        return f"<connection {self._name} of {self._process.name}>"

    # -- how it begins --

    def join(self, other: VirtualTransport) -> None:
        self._other = other

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._loop.call_soon(self._read, context=Context())

    # -- asyncio.BaseTransport --

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing or not self._process.alive:
            return
        self._closing = True
        self._flush()

    def abort(self) -> None:
        if self._process.alive:
            self._lose(None)

    # -- reading --

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._loop.call_soon(self._read, context=Context())

    def _arrive(self, piece: _Piece) -> None:
        if self._closed:
            if not isinstance(piece, _Signal):
                self._send(_Signal.RESET)  # nobody will ever read this
            return
        if piece is _Signal.RESET:
            self._reset_received = True
            if self._unsent:
                self._lose(_reset())
                return
        self._unread.append(piece)
        self._read()

    def _read(self) -> None:
        """Give the protocol what has arrived, as long as it takes it."""
        protocol: Any = self._protocol
        while self._unread and protocol is not None and self.is_reading():
            piece = self._unread.popleft()
            if piece is _Signal.RESET:
                self._lose(_reset())
            elif piece is _Signal.END:
                if not self._call("eof_received", protocol.eof_received):
                    self.close()
            elif isinstance(protocol, asyncio.BufferedProtocol):
                self._call("buffer_updated", self._fill_buffer, protocol, piece)
            else:
                self._was_read(len(piece))
                self._call("data_received", protocol.data_received, bytes(piece))

    def _fill_buffer(self, protocol: asyncio.BufferedProtocol, piece: memoryview) -> None:
        buffer = memoryview(protocol.get_buffer(_SIZE_HINT))
        size = min(len(buffer), len(piece))
        if size == 0:
            raise RuntimeError("get_buffer() returned an empty buffer")
        buffer[:size] = piece[:size]
        if size < len(piece):
            self._unread.appendleft(piece[size:])
        self._was_read(size)
        protocol.buffer_updated(size)

    def _was_read(self, size: int) -> None:
        other = self._other
        assert other is not None
        other._unacknowledged_bytes -= size
        if other._unsent:
            self._loop.call_later(self._network.delay_s(), other._acknowledged, context=Context())

    # -- writing --

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water, self._high_water

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 4 * low if low is not None else _HIGH_WATER_BYTES
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_water, self._low_water = high, low
        self._maybe_pause_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
        if self._end_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._closing or not self._process.alive:
            return
        self._unsent.append(memoryview(data).cast("B"))
        self._unsent_bytes += len(self._unsent[-1])
        if self._unsent_bytes > self._high_water:
            self._flush()
            self._maybe_pause_writing()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_scheduled_data, context=self._context)

    def write_eof(self) -> None:
        if self._closing or self._end_written or not self._process.alive:
            return
        self._end_written = True
        self._flush()

    def _flush_scheduled_data(self) -> None:
        self._flush_scheduled = False
        self._flush()
        self._maybe_pause_writing()

    def _flush(self) -> None:
        """Send what the window lets through; once that is everything, end the stream if that is wanted."""
        if self._closed:
            return
        if self._reset_received and self._unsent:
            self._lose(_reset())
            return
        while self._unsent and self._unacknowledged_bytes < WINDOW_BYTES:
            segment = self._take(min(SEGMENT_BYTES, WINDOW_BYTES - self._unacknowledged_bytes))
            size = self._network.cut(len(segment))
            self._send(segment[:size])
            if size < len(segment):
                self._send(segment[size:])
        if self._unsent:
            return
        if self._closing:
            self._lose(None)
        elif self._end_written and not self._end_sent:
            self._end_sent = True
            self._send(_Signal.END)

    def _take(self, limit: int) -> memoryview:
        pieces = []
        while self._unsent and limit:
            piece = self._unsent.popleft()
            if len(piece) > limit:
                self._unsent.appendleft(piece[limit:])
                piece = piece[:limit]
            pieces.append(piece)
            limit -= len(piece)
            self._unsent_bytes -= len(piece)
        return memoryview(b"".join(pieces))

    def _acknowledged(self) -> None:
        self._flush()
        if self._writing_paused and self._unsent_bytes <= self._low_water and not self._closed:
            self._writing_paused = False
            self._call("resume_writing", self.get_protocol().resume_writing)

    def _maybe_pause_writing(self) -> None:
        if self._unsent_bytes > self._high_water and not self._writing_paused and not self._closed:
            self._writing_paused = True
            self.get_protocol().pause_writing()

    def _send(self, piece: _Piece) -> None:
        other = self._other
        assert other is not None
        if not isinstance(piece, _Signal):
            self._unacknowledged_bytes += len(piece)
        self._last_arrival = max(self._last_arrival, self._loop.time() + self._network.delay_s())
        self._loop.record(f"{self._name} {piece.value if isinstance(piece, _Signal) else crc32(piece)}")
        self._loop.call_at(self._last_arrival, other._arrive, piece, context=Context())

    # -- how it ends --

    def process_killed(self) -> None:
        """The operating system closes what the process had open."""
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closing = self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if not self._reset_received:
            if any(not isinstance(piece, _Signal) for piece in self._unread):
                self._send(_Signal.RESET)
            elif not self._end_sent:
                self._send(_Signal.END)
        self._unread.clear()
        del self._open_ends[self]
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def _call(self, what: str, method: Callable[..., T], *arguments: object) -> T | None:
        """Call the protocol, in the name of its process."""
        try:
            return self._context.run(method, *arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - reported, and it ends the connection, as in asyncio
            if self._process.alive:
                self._loop.call_exception_handler(
                    {
                        "message": f"Fatal error: protocol.{what}() call failed.",
                        "exception": error,
                        "transport": self,
                        "protocol": self._protocol,
                    }
                )
            self._lose(error if isinstance(error, Exception) else None)
            return None


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
