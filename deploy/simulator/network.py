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
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from ssl import SSLContext
from typing import TypeVar

from minibroker.deploy.simulator.loop import VirtualLoop
from minibroker.deploy.simulator.process import Process
from minibroker.deploy.simulator.transport import Arrival, Link, Machine, VirtualTransport, os_error
from minibroker.protocol.world import Incoming

P = TypeVar("P", bound=asyncio.BaseProtocol)

MIN_LATENCY_S = 0.000_05
MAX_LATENCY_S = 0.000_5
CUT_PROBABILITY = 1 / 16
"""Probability that a piece is cut in two at a random position. Receivers must accept any cut."""

ALL_ADDRESSES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_FIRST_FREE_PORT = 32_768
_LAST_FREE_PORT = 60_999

_CONNECT_AGAIN_S = (1, 2, 4, 8, 16, 32, 64)
"""Seconds that an unanswered connect waits before each further attempt, and at the end before it gives up."""


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
        self._machines: dict[str, Machine] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._listeners: dict[tuple[str, int], list[VirtualListener]] = {}
        self._next_ports: dict[str, int] = {}

    def add_host(self, name: str) -> str:
        """Add a host, and return its IP address. Raises ValueError if the name is taken."""
        if name in self._addresses:
            raise ValueError(f"there is a host {name} already")
        number = len(self._machines) + 1
        address = f"10.0.{number // 256}.{number % 256}"
        self._addresses[name] = self._addresses[address] = address
        self._machines[address] = Machine()
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

    def reset_all(self, host: str) -> int:
        """Break all connections of a host with others, at both ends. Returns their number."""
        own = self._address(host)
        return sum(self.reset(host, other) for other in dict.fromkeys(self._addresses.values()) if other != own)

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

    def machine(self, address: str) -> Machine:
        return self._machines[address]

    def link(self, source: str, target: str) -> Link:
        """Return the link from one address to another."""
        if (source, target) not in self._links:
            for one, other in ((source, target), (target, source)):
                self._links[one, other] = Link(self._machines[one], self._machines[other])
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
                raise os_error(errno.EHOSTUNREACH, host)
            raise socket.gaierror(socket.EAI_AGAIN, f"Temporary failure in name resolution: {host}")
        if address is not None and not self._machines[address].is_attached:
            if host == address:
                raise os_error(errno.EHOSTUNREACH, host)
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
                raise os_error(errno.EADDRINUSE, f"{listener.bound_to}:{listener.port}")
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
                raise os_error(errno.EADDRNOTAVAIL, f"{host}:{port}")
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
            raise os_error(errno.EBADF, f"the connection from {self._peer} was closed")
        protocol = factory()
        self._transport.attach(protocol)
        return protocol

    def close(self) -> None:
        self._transport.abort()
