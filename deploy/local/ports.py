"""Free ports of this machine.

The ports chosen here lie below the range from which the kernel takes the source ports of outgoing connections. Inside
that range, a client that retries a dead server's port eventually gets it as its own source port, and TCP connects the
client to itself: the server seems to live, and cannot return because its port is taken.

A port is free until its server listens, and again after that server is killed; another launcher must not draw it in
these moments. A launcher that keeps ports therefore leases them: for each port it binds a Unix socket with the port in
its name, in the abstract namespace, which belongs to the network namespace as ports do. The kernel ends a lease with
the process, however that ends, and no file is left. Rejected: a TCP socket that is bound and does not listen (it either
keeps the server from binding or is invisible to other launchers); lock files, which stay.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path
from random import SystemRandom

from minibroker.deploy.errors import LaunchError

LOOPBACK = "127.0.0.1"

_LOWEST = 10_000
_random = SystemRandom()


def is_free(port: int) -> bool:
    """Return whether nothing listens on `port` of loopback. Closed connections in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


class PortLease:
    """Consecutive ports that no other launcher draws until `release`, or until this process ends."""

    def __init__(self, ports: list[int], sockets: list[socket.socket]) -> None:
        self.ports = ports
        self._sockets = sockets

    def release(self) -> None:
        for held in self._sockets:
            held.close()


def lease_ports(count: int, avoid: Collection[int] = ()) -> PortLease:
    """Lease `count` consecutive free ports, none of them in `avoid`. Raises LaunchError if there are none."""
    highest = min(lowest_source_port(), 65_536) - count
    for _ in range(1_000):
        first = _random.randint(_LOWEST, max(_LOWEST, highest))
        ports = list(range(first, first + count))
        if any(port in avoid for port in ports):
            continue
        lease = PortLease(ports, [])
        if all(_lease(port, lease._sockets) and is_free(port) for port in ports):
            return lease
        lease.release()
    raise LaunchError(f"no {count} consecutive free ports between {_LOWEST} and {highest + count}: stop what uses them")


def _lease(port: int, leased: list[socket.socket]) -> bool:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    leased.append(held)
    try:
        held.bind(f"\0minibroker-port-{port}")
    except OSError:
        return False
    return True


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Return ports as `lease_ports` does, without a lease: for servers that listen at once."""
    lease = lease_ports(count, avoid)
    lease.release()
    return lease.ports


class PortLeases:
    """The ports that a launcher takes one by one, leased until `release`."""

    def __init__(self) -> None:
        self._leases: list[PortLease] = []

    def choose(self, preferred: int | None, avoid: Collection[int]) -> int:
        """Lease and return `preferred` if it is free, leased by nobody and no source port, else a free port that is not
        in `avoid`. Raises LaunchError if there is none."""
        if preferred is None or not (preferred < lowest_source_port() and self._lease(preferred)):
            self._leases.append(lease_ports(1, avoid))
        (port,) = self._leases[-1].ports
        return port

    def keep(self, given: Collection[int]) -> None:
        """Lease ports that the user chose, as far as nobody else has leased them."""
        for port in given:
            self._lease(port)

    def release(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def _lease(self, port: int) -> bool:
        lease = PortLease([port], [])
        if _lease(port, lease._sockets) and is_free(port):
            self._leases.append(lease)
            return True
        lease.release()
        return False


def lowest_source_port() -> int:
    """Return the first port that the kernel gives to outgoing connections."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    return int(text.split()[0])
