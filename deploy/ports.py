"""Free ports of this machine.

Ports that are chosen here lie below the range from which the kernel takes the source ports of outgoing connections.
Inside it, a client that retries a dead server's port is in time given that very port as its own source, and then TCP
connects it to itself: the server seems to live, and cannot come back because its port is taken.
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


def free_ports(count: int, avoid: Sequence[int] = ()) -> list[int]:
    """`count` consecutive ports on which nothing listens, none of them in `avoid`. Raises LaunchError."""
    highest = min(lowest_source_port(), 65_536) - count
    for _ in range(1_000):
        first = _random.randint(_LOWEST, max(_LOWEST, highest))
        ports = list(range(first, first + count))
        if all(port not in avoid and is_free(port) for port in ports):
            return ports
    raise LaunchError(f"no {count} consecutive free ports between {_LOWEST} and {highest + count}: stop what uses them")


def lowest_source_port() -> int:
    """From here on the kernel gives ports to outgoing connections."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    return int(text.split()[0])
