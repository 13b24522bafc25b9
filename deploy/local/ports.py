"""Free ports of this machine.

Ports that are chosen here lie below the range from which the kernel takes the source ports of outgoing connections.
Inside it, a client that retries a dead server's port is in time given that very port as its own source, and then TCP
connects it to itself: the server seems to live, and cannot come back because its port is taken.

A port is free until its server listens, and again after that server is killed; another launcher that draws ports in
these moments must not draw it. So whoever wants to keep ports leases them: for each it binds a Unix socket whose name
says the port, in the abstract namespace, which belongs to the network namespace as ports do. The kernel ends a lease
with the process, however that ends, and no file is left. Rejected: a TCP socket that is bound and does not listen, as
either it keeps the server from binding, or nobody else sees it; lock files, which stay.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

from minibroker.deploy.errors import LaunchError

LOOPBACK = "127.0.0.1"

_LOWEST = 10_000
_random = SystemRandom()


def is_free(port: int) -> bool:
    """Nothing listens on `port` of loopback. Remains of closed connections (TIME_WAIT) do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


class PortLease:
    """Consecutive ports that nobody else draws here until `release`, or until this process ends."""

    def __init__(self, ports: list[int], sockets: list[socket.socket]) -> None:
        self.ports = ports
        self._sockets = sockets

    def release(self) -> None:
        for held in self._sockets:
            held.close()


def lease_ports(count: int, avoid: Sequence[int] = ()) -> PortLease:
    """`count` consecutive ports on which nothing listens, none of them in `avoid` or leased. Raises LaunchError."""
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


def free_ports(count: int, avoid: Sequence[int] = ()) -> list[int]:
    """As `lease_ports`, for who begins to listen at once."""
    lease = lease_ports(count, avoid)
    lease.release()
    return lease.ports


def lowest_source_port() -> int:
    """From here on the kernel gives ports to outgoing connections."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    return int(text.split()[0])
