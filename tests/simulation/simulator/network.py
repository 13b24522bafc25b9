"""TCP in memory: connections between processes of the simulated world.

The problem: the code under test must meet the behaviour of TCP (bytes arrive late, in other pieces, or not at all),
not that of a queue of Python objects (whole messages, at once, shared with the sender).

The choice: each connection has two ends. Pieces that one end sends (bytes, the end of the stream, a reset) arrive at
the other in order, each with its own latency. Bytes are copied when they leave. Bytes written during one turn of the
loop leave together at the end of the turn, as under uvloop, so a later change to a written buffer changes the sent
bytes, there and here. Some pieces are cut in two. An end sends until WINDOW_BYTES are unread by the other; further
bytes stay in its buffer, which leads to `pause_writing`.

Pieces in transit have no owner; only the calls of a protocol belong to its process. Bytes that a process sent before it
was killed therefore arrive. The operating system of its host then closes its connections as Linux does: a peer with
unread bytes gets a reset, other peers get the end of the stream. For a paused process, the system still receives.

Faults are set on links; a link leads from one host to another, in one direction. If a link does not carry, a piece at
its end is not lost: TCP sends it again, with all later pieces, at intervals that double. It succeeds once the link and
the link back, for the acknowledgement, both carry; otherwise the sender gives up (ETIMEDOUT). After a repair, a
connection may thus be silent for about as long again as the fault lasted; the same holds for a connect. If only
acknowledgements are lost, pieces arrive until the sender notices; new ones are then held back. A host without power
forgets its connections without notice. Its peers get silence, a reset once it is up again, or the result of their
keepalive probes.

Only pieces of the same connection keep their order. A test can slow down existing connections but not later ones, and
break one end without the other's knowledge: bytes that a client sent before it gave up then reach the server after
those of its next connection.

Each host has a name and an IP address. `localhost` is the host itself; an empty host or 0.0.0.0 means all its
addresses.

Rejected: a pair of StreamReader queues as the connection (no flow control, no BufferedProtocol); real sockets on
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
from ssl import SSLContext
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from minibroker.protocol.world import Incoming
from tests.simulation.simulator.loop import VirtualLoop
from tests.simulation.simulator.process import Process

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.BaseProtocol)

SEGMENT_BYTES = 64 * 1024
WINDOW_BYTES = 256 * 1024
MIN_LATENCY_S = 0.000_05
MAX_LATENCY_S = 0.000_5
CUT_PROBABILITY = 1 / 16
"""Probability that a piece is cut in two at a random position. Receivers must accept any cut."""

ALL_ADDRESSES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_HIGH_WATER_BYTES = 64 * 1024
_SIZE_HINT = 65_536
_FIRST_FREE_PORT = 32_768
_LAST_FREE_PORT = 60_999

_CONNECT_AGAIN_S = (1, 2, 4, 8, 16, 32, 64)
"""Seconds that an unanswered connect waits before each further attempt, and at the end before it gives up."""
_MIN_RETRANSMISSION_S = 0.2
_MAX_RETRANSMISSION_S = 0.4
_MIN_USER_TIMEOUT_S = 20.0
_MAX_USER_TIMEOUT_S = 60.0


class _Signal(Enum):
    END = "end of the stream"
    RESET = "reset"


_Piece = memoryview | _Signal


class Arrival(NamedTuple):
    """Bytes at the end of a link, just before they are delivered."""

    source: str
    """The host that sent the bytes."""
    target: str
    target_port: int
    data: memoryview
    is_late: bool
    """Whether `delay_standing` has delayed them."""


def _os_error(number: int, what: str) -> OSError:
    return OSError(number, f"{os.strerror(number)}: {what}")


class _Machine:
    """The network's view of a host."""

    def __init__(self) -> None:
        self.has_power = True
        self.is_attached = True
        self.boots = 1
        self.processes: list[ProcessNetwork] = []


class _Link:
    """The route from one host to another."""

    def __init__(self, source: _Machine, target: _Machine) -> None:
        self._source = source
        self._target = target
        self.back = self
        self.blocked = False
        self.free_at_s = 0.0
        """Time at which all sent bytes have left, if its bandwidth is limited."""
        self.answers = False
        """This link and the one back carry. Cached, because it is read for every piece."""

    def carries(self) -> bool:
        """Whether sent pieces arrive."""
        ends = (self._source, self._target)
        if not all(end.has_power for end in ends):
            return False
        return self._source is self._target or (not self.blocked and all(end.is_attached for end in ends))

    def update(self) -> None:
        """Recompute `answers` after a change of this link or the one back."""
        self.answers = self.carries() and self.back.carries()


class VirtualNetwork:
    """Connects all hosts. Faults name hosts and last until they are undone."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self._low_latency_s = MIN_LATENCY_S
        self._high_latency_s = MAX_LATENCY_S
        self.bytes_per_s: float | None = None
        """Bandwidth of each link; None: unlimited."""
        self.taps: list[Callable[[Arrival], None]] = []
        """Called with all bytes of connections at the end of a link, just before they arrive. A tap may break the
        connection; the bytes are then lost."""
        self._addresses: dict[str, str] = {}
        self._machines: dict[str, _Machine] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._listeners: dict[tuple[str, int], list[VirtualListener]] = {}
        self._next_ports: dict[str, int] = {}

    def add_host(self, name: str) -> str:
        """Add a host, and return its IP address. Raises ValueError if the name is taken."""
        if name in self._addresses:
            raise ValueError(f"there is a host {name} already")
        number = len(self._machines) + 1
        address = f"10.0.{number // 256}.{number % 256}"
        self._addresses[name] = self._addresses[address] = address
        self._machines[address] = _Machine()
        return address

    def of(self, process: Process) -> ProcessNetwork:
        """Return the network for one process."""
        network = ProcessNetwork(self, process)
        self._machines[process.address].processes.append(network)
        return network

    # -- faults --

    def block(self, source: str, target: str) -> None:
        """Stop all traffic from one host to another, bytes in transit included."""
        self._set_blocked(source, target, True)

    def unblock(self, source: str, target: str) -> None:
        self._set_blocked(source, target, False)

    def heal(self) -> None:
        """Undo all `block` and `unreachable`."""
        self.loop.record("network: heal")
        for link in self._links.values():
            link.blocked = False
        for machine in self._machines.values():
            machine.is_attached = True
        self._links_changed()

    def unreachable(self, host: str, flag: bool) -> None:
        """Detach the host from the network, or attach it again. While it is detached, its name cannot be resolved,
        there is no route to or from its address, and its connections are silent."""
        self.loop.record(f"network: unreachable {host} {flag}")
        self._machines[self._address(host)].is_attached = not flag
        self._links_changed()

    def reset(self, host_a: str, host_b: str) -> int:
        """Break all connections between two hosts, at both ends. Returns their number."""
        self.loop.record(f"network: reset {host_a} {host_b}")
        ends = self._connections(self._address(host_a), self._address(host_b))
        for end in ends:
            end.broken()
        return len(ends)

    def delay_standing(self, source: str, target: str, by_s: float) -> int:
        """Delay all further pieces of the existing connections from one host to another, the end of the stream
        included. Later connections are not affected. Returns the number of delayed connections."""
        self.loop.record(f"network: delay {source} {target} {by_s}")
        ends = self._ends(self._address(source), self._address(target))
        for end in ends:
            end.delay_s = by_s
        return len(ends)

    def silence(self, host_a: str, host_b: str) -> int:
        """Stop all traffic of the existing connections between two hosts, as when a middlebox has forgotten them. Later
        connections are not affected. Returns the number of silenced connections."""
        self.loop.record(f"network: silence {host_a} {host_b}")
        connections = self._connections(self._address(host_a), self._address(host_b))
        for end in connections:
            for side in (end, end.other):
                side.silenced = True
                side.link_changed()
        return len(connections)

    def reset_at(self, host: str, other: str) -> int:
        """Break all connections between two hosts at the end of `host`, as a middlebox may. Bytes that `host` has sent
        still arrive at `other`, which notices when it sends. Returns the number of connections."""
        self.loop.record(f"network: reset at {host} {other}")
        ends = self._ends(self._address(host), self._address(other))
        for end in ends:
            end.broken_here()
        return len(ends)

    def set_latency(self, low_s: float, high_s: float) -> None:
        """Set the range of the latency of a piece, for all links."""
        self.loop.record(f"network: latency {low_s} {high_s}")
        self._low_latency_s, self._high_latency_s = low_s, high_s

    def set_bandwidth(self, bytes_per_s: float | None) -> None:
        """Set the bandwidth of each link. The connections of a link share it; later pieces queue behind earlier ones.
        None: unlimited."""
        self.loop.record(f"network: bandwidth {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        for link in self._links.values():
            link.free_at_s = 0.0

    def power_off(self, address: str) -> None:
        """End the host's connections without notice, and make it unreachable."""
        machine = self._machines[address]
        machine.has_power = False
        for process in machine.processes:
            process.vanish()
        machine.processes.clear()
        self._links_changed()

    def power_on(self, address: str) -> None:
        """The host is up again, without its former connections."""
        machine = self._machines[address]
        machine.has_power = True
        machine.boots += 1
        self._links_changed()

    def _set_blocked(self, source: str, target: str, blocked: bool) -> None:
        self.loop.record(f"network: {'block' if blocked else 'unblock'} {source} {target}")
        self.link(self._address(source), self._address(target)).blocked = blocked
        self._links_changed()

    def _links_changed(self) -> None:
        for link in self._links.values():
            link.update()
        for machine in self._machines.values():
            for process in machine.processes:
                process.links_changed()

    def _connections(self, address_a: str, address_b: str) -> list[VirtualTransport]:
        """Return one end of each connection between two hosts."""
        found: dict[VirtualTransport, None] = {}
        for end in (*self._ends(address_a, address_b), *self._ends(address_b, address_a)):
            if end.other not in found:
                found[end] = None
        return list(found)

    def _ends(self, address: str, other: str) -> list[VirtualTransport]:
        """Return the ends at `address` of its connections to `other`."""
        return [end for process in self._machines[address].processes for end in process.ends_to(other)]

    def _address(self, host: str) -> str:
        """Return the host's address. Raises ValueError if there is no such host."""
        if host not in self._addresses:
            raise ValueError(f"there is no host {host}")
        return self._addresses[host]

    # -- for processes, and their connections --

    def machine(self, address: str) -> _Machine:
        return self._machines[address]

    def link(self, source: str, target: str) -> _Link:
        """Return the link from one address to another."""
        if (source, target) not in self._links:
            for one, other in ((source, target), (target, source)):
                self._links[one, other] = _Link(self._machines[one], self._machines[other])
            there, back = self._links[source, target], self._links[target, source]
            there.back, back.back = back, there
            there.update()
            back.update()
        return self._links[source, target]

    def delay_s(self) -> float:
        return self.random.uniform(self._low_latency_s, self._high_latency_s)

    def cut(self, size: int) -> int:
        """Return the size at which a piece is cut in two; the whole size if it is not cut."""
        if size > 1 and self.random.random() < CUT_PROBABILITY:
            return self.random.randrange(1, size)
        return size

    def resolve(self, host: str, process: Process) -> tuple[str, str]:
        """Return the address of the named host, and the address at which this process reaches it.

        Raises gaierror for an unknown name, and OSError EHOSTUNREACH for an address without a route.
        """
        if host in ("localhost", LOOPBACK):
            return process.address, LOOPBACK
        address = self._addresses.get(host)
        if address == process.address:
            return address, address
        if not self._machines[process.address].is_attached:
            if host == address:
                raise _os_error(errno.EHOSTUNREACH, host)
            raise socket.gaierror(socket.EAI_AGAIN, f"Temporary failure in name resolution: {host}")
        if address is not None and not self._machines[address].is_attached:
            if host == address:
                raise _os_error(errno.EHOSTUNREACH, host)
            address = None
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

    def process_ended(self, network: ProcessNetwork) -> None:
        processes = self._machines[network.address].processes
        if network in processes:  # false after a power cut
            processes.remove(network)

    def remove_listener(self, listener: VirtualListener, address: str) -> None:
        listeners = self._listeners.get((address, listener.port), [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._listeners.pop((address, listener.port), None)


class ProcessNetwork:
    """`minibroker.protocol.world.Network` for one process. Killing the process closes its connections and listeners."""

    def __init__(self, network: VirtualNetwork, process: Process) -> None:
        self._network = network
        self._process = process
        self._ends: dict[VirtualTransport, None] = {}
        self._listeners: dict[VirtualListener, None] = {}
        process.on_kill(self._sever)
        process.on_resume(self._resumed)

    @property
    def address(self) -> str:
        return self._process.address

    @property
    def connections(self) -> int:
        """Number of open connections."""
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

    async def addresses(self, host: str) -> list[str]:
        """Raises gaierror."""
        self._process.check()
        return [self._network.resolve(host, self._process)[1]]

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> P:
        """Raises OSError: ConnectionRefusedError, gaierror, EHOSTUNREACH, TimeoutError."""
        self._process.check()
        network = self._network
        address, reached_at = network.resolve(host, self._process)
        link = network.link(self._process.address, address)
        for again_s in _CONNECT_AGAIN_S:
            await asyncio.sleep(network.delay_s())
            if link.answers:
                break
            await asyncio.sleep(again_s)
        else:
            raise TimeoutError(errno.ETIMEDOUT, f"Connect call failed ('{reached_at}', {port})")
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
        """Return this process's end of a connection that a peer opens."""
        return VirtualTransport(self._network, self._process, self._ends, local, remote)

    def forget(self, listener: VirtualListener) -> None:
        self._listeners.pop(listener, None)
        self._network.remove_listener(listener, self._process.address)

    def ends_to(self, address: str) -> list[VirtualTransport]:
        return [end for end in self._ends if end.remote_address == address]

    def links_changed(self) -> None:
        for end in self._ends:
            end.link_changed()

    def vanish(self) -> None:
        """The host has lost its power."""
        for end in list(self._ends):
            end.vanish()

    def _sever(self) -> None:
        for listener in list(self._listeners):
            self.forget(listener)
        for end in list(self._ends):
            end.process_killed()
        self._network.process_ended(self)

    def _resumed(self) -> None:
        for end in self._ends:
            self._network.loop.call_soon(end.process_resumed, context=Context())


class VirtualListener:
    """`minibroker.protocol.world.Listener`."""

    def __init__(self, network: ProcessNetwork, loop: VirtualLoop, process: Process, bound_to: str, port: int) -> None:
        self.port = port
        self.bound_to = bound_to
        self._network = network
        self._loop = loop
        self._process = process
        self._backlog: deque[VirtualIncoming] = deque()
        self._on_connection: Callable[[Incoming], None] | None = None
        self._may_accept: Callable[[], bool] = lambda: True
        self._closed = False

    def start(self, on_connection: Callable[[Incoming], None], may_accept: Callable[[], bool] = lambda: True) -> None:
        self._on_connection, self._may_accept = on_connection, may_accept
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
        """Put a new connection into the backlog, as the operating system does. Returns this side's end."""
        transport = self._network.accepted(local, remote)
        self._backlog.append(VirtualIncoming(transport, f"{remote[0]}:{remote[1]}"))
        if self._on_connection is not None:
            self._loop.call_soon(self._accept, context=self._process.new_context())
        return transport

    def _accept(self) -> None:
        if self._backlog:  # empty if the listener was closed meanwhile
            assert self._on_connection is not None
            if self._may_accept():
                self._on_connection(self._backlog.popleft())
            else:
                self._loop.call_soon(self._accept, context=self._process.new_context())


class VirtualIncoming:
    """`minibroker.protocol.world.Incoming`."""

    def __init__(self, transport: VirtualTransport, peer: str) -> None:
        self._transport = transport
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    async def attach(self, factory: Callable[[], P], tls: SSLContext | None = None) -> P:
        """Raises OSError after `close`. TLS is not simulated."""
        assert tls is None
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


class VirtualSocket:
    """The socket of a transport. It stores options; those of keepalive and TCP_USER_TIMEOUT have an effect."""

    def __init__(self) -> None:
        self._options: dict[tuple[int, int], int] = {}

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._options[level, option] = value

    @property
    def keepalive(self) -> bool:
        return bool(self._options.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE)))

    @property
    def keepalive_idle_s(self) -> int:
        """Seconds of silence after which the other end is probed."""
        return self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 7_200)

    @property
    def keepalive_patience_s(self) -> float:
        """Seconds for an answer to the probes. If TCP_USER_TIMEOUT is set, Linux does not count probes: that timeout
        applies, since the last piece from the other end."""
        interval_s = self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 75)
        if self.user_timeout_s is not None:
            return max(self.user_timeout_s - self.keepalive_idle_s, interval_s)
        return self._options.get((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 9) * interval_s

    @property
    def user_timeout_s(self) -> float | None:
        """Seconds that sent bytes may stay unacknowledged."""
        milliseconds = self._options.get((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return None if milliseconds is None else milliseconds / 1_000


class VirtualTransport(asyncio.Transport):
    """One end of a connection. It behaves as asyncio's and uvloop's transports where those agree."""

    def __init__(
        self,
        network: VirtualNetwork,
        process: Process,
        open_ends: dict[VirtualTransport, None],
        local: tuple[str, int],
        remote: tuple[str, int],
    ) -> None:
        self._socket = VirtualSocket()
        super().__init__(extra={"sockname": local, "peername": remote, "socket": self._socket})
        self._network = network
        self._loop = network.loop
        self._process = process
        self._context = process.new_context()
        self._open_ends = open_ends
        open_ends[self] = None
        self._name = f"{local[0]}:{local[1]}>{remote[0]}:{remote[1]}"
        self._protocol: asyncio.BaseProtocol | None = None
        self.other: VirtualTransport
        """The other end. Set, with the link to it, by `join`."""
        self._link: _Link
        self._machine = network.machine(process.address)
        self._boot = self._machine.boots

        self._closing = False
        """Nothing more is read, and new writes are ignored."""
        self._closed = False
        """This end is gone: `connection_lost` has been called or is scheduled."""

        self._unread: deque[_Piece] = deque()
        self._reading_paused = False
        self._reset_received = False

        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unacknowledged_bytes = 0
        self._last_arrival = 0.0
        self.delay_s = 0.0
        """Added to the latency of each piece."""
        self.silenced = False
        """No piece arrives any more, from either end."""
        self._flush_scheduled = False
        self._end_written = False
        self._end_sent = False
        self._writing_paused = False
        self._high_water = _HIGH_WATER_BYTES
        self._low_water = _HIGH_WATER_BYTES // 4

        self._vanished = False
        """Its host lost its power, or gave up without reaching the other end: only resets leave this end."""
        self._stalled = False
        """A piece was not acknowledged, so no piece arrives."""
        self._held: deque[_Piece] = deque()
        """Pieces to retransmit."""
        self._backing_off = False
        """A retransmission has failed, so no new piece is sent."""
        self._gives_up_at_s = 0.0
        self._retransmission_s = 0.0
        self._keepalive: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<connection {self._name} of {self._process.name}>"

    # -- beginning --

    def join(self, other: VirtualTransport) -> None:
        self.other = other
        self._link = self._network.link(self._process.address, other._process.address)

    @property
    def remote_address(self) -> str:
        return self.other._process.address

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._loop.call_soon(self._read, context=Context())

    # -- asyncio.BaseTransport --

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
                self._send(_Signal.RESET)  # this end will never read it
            return
        if self._reset_received:
            return
        if piece is _Signal.RESET:
            self._reset_received = True
            if self._unsent and self._process.running:
                self._lose(_reset())
                return
        self._unread.append(piece)
        self._read()

    def _read(self) -> None:
        """Pass arrived pieces to the protocol while it reads."""
        protocol: Any = self._protocol
        while self._unread and protocol is not None and self.is_reading() and self._process.running:
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
        other = self.other
        other._unacknowledged_bytes -= size
        if other._unsent:
            self._loop.call_later(self._network.delay_s(), other._acknowledged, context=Context())

    # -- writing --

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

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

    def can_write_eof(self) -> bool:
        return True

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
        """Send as much as the window allows. After the last byte, end the stream or close, if requested."""
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
        if not self._process.running:
            return
        self._flush()
        if self._writing_paused and self._unsent_bytes <= self._low_water and not self._closed:
            self._writing_paused = False
            self._call("resume_writing", self.get_protocol().resume_writing)

    def _maybe_pause_writing(self) -> None:
        if self._unsent_bytes > self._high_water and not self._writing_paused and not self._closed:
            self._writing_paused = True
            self.get_protocol().pause_writing()

    def _send(self, piece: _Piece) -> None:
        leaves_at_s = self._loop.now_s
        if not isinstance(piece, _Signal):
            self._unacknowledged_bytes += len(piece)
            if self._network.bytes_per_s is not None:
                leaves_at_s = max(leaves_at_s, self._link.free_at_s) + len(piece) / self._network.bytes_per_s
                self._link.free_at_s = leaves_at_s
        self._last_arrival = max(self._last_arrival, leaves_at_s + self._network.delay_s() + self.delay_s)
        self._loop.record(f"{self._name} {piece.value if isinstance(piece, _Signal) else crc32(piece)}")
        self._loop.call_at_true(self._last_arrival, self._deliver, (piece,), Context())

    def _deliver(self, piece: _Piece) -> None:
        """Deliver a piece that has reached the end of the link."""
        if self._network.taps and not isinstance(piece, _Signal):
            source, target = self._process.name.partition("#")[0], self.other._process.name.partition("#")[0]
            arrival = Arrival(source, target, self.get_extra_info("peername")[1], piece, self.delay_s > 0)
            for tap in list(self._network.taps):
                tap(arrival)
        if self._answers and not self._stalled:
            self.other._arrive(piece)
        else:
            self._deliver_or_hold(piece)

    # -- broken links --

    @property
    def _answers(self) -> bool:
        return self._link.answers and not self.silenced

    def _deliver_or_hold(self, piece: _Piece) -> None:
        carries = self._link.carries() and not self.silenced
        if self._vanished or self._boot != self._machine.boots:
            if piece is _Signal.RESET and carries:
                self.other._arrive(piece)
            return
        if not self._stalled:
            random = self._network.random
            self._stalled, self._backing_off = True, False
            patience_s, own_s = random.uniform(_MIN_USER_TIMEOUT_S, _MAX_USER_TIMEOUT_S), self._socket.user_timeout_s
            self._gives_up_at_s = self._loop.now_s + (patience_s if own_s is None else own_s)
            self._retransmission_s = random.uniform(_MIN_RETRANSMISSION_S, _MAX_RETRANSMISSION_S)
            self._loop.call_later(self._retransmission_s, self._retransmit, context=Context())
        if carries and not self._held and not self._backing_off:
            self.other._arrive(piece)  # only the acknowledgement is lost
        else:
            self._held.append(piece)

    def _retransmit(self) -> None:
        now_s = self._loop.now_s
        if self._vanished or self._boot != self._machine.boots:
            self._held.clear()
        elif self._answers:
            self._stalled = False
            held, self._held = self._held, deque()
            for piece in held:
                self.other._arrive(piece)
        elif now_s >= self._gives_up_at_s:
            self._give_up()
        else:
            self._backing_off = True
            self._retransmission_s *= 2
            again_at_s = min(now_s + self._retransmission_s, self._gives_up_at_s)
            self._loop.call_at_true(again_at_s, self._retransmit, (), Context())

    def _give_up(self) -> None:
        """Time out. The other end is not notified."""
        self._loop.record(f"{self._name} has timed out")
        self._forget()
        self._lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _forget(self) -> None:
        self._vanished = self._stalled = True
        self._held.clear()

    def vanish(self) -> None:
        """The host has lost its power."""
        self._forget()
        self._lose(None)

    def broken(self) -> None:
        """Reset both ends. Pieces in transit are lost."""
        for end in (self, self.other):
            end._held.clear()
            end._arrive(_Signal.RESET)

    def broken_here(self) -> None:
        """Reset this end only."""
        self._arrive(_Signal.RESET)

    def link_changed(self) -> None:
        """Simulate keepalive probes, if enabled: they detect that the other end is unreachable or gone."""
        if not self._socket.keepalive:
            return
        random, other = self._network.random, self.other
        if not self._answers:
            if self._keepalive is None:
                gives_up_s = random.uniform(0, self._socket.keepalive_idle_s) + self._socket.keepalive_patience_s
                self._keepalive = self._loop.call_later(gives_up_s, self._probes_end, context=Context())
            return
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None
        if other._vanished:
            within_s = random.uniform(0, self._socket.keepalive_idle_s)
            self._loop.call_later(within_s, self._arrive, _Signal.RESET, context=Context())

    def _probes_end(self) -> None:
        """Give up after unanswered probes. TCP sends no probes while a piece is unacknowledged."""
        if not self._stalled:
            self._give_up()

    def process_resumed(self) -> None:
        """Handle the pieces that arrived and the acknowledgements from the time of the pause."""
        self._read()
        self._acknowledged()

    # -- end --

    def process_killed(self) -> None:
        """Close the connection as the operating system does for a killed process."""
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closing = self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if not self._reset_received and not self._vanished:
            if any(not isinstance(piece, _Signal) for piece in self._unread):
                self._send(_Signal.RESET)
            elif not self._end_sent:
                self._send(_Signal.END)
        self._unread.clear()
        del self._open_ends[self]
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def _call(self, what: str, method: Callable[..., T], *arguments: object) -> T | None:
        """Call the protocol as its process."""
        try:
            return self._context.run(method, *arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - reported; it ends the connection, as in asyncio
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
