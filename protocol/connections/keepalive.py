"""The kernel ends connections that no longer reach the other side.

The problem: a device in between may drop a connection silently (a firewall's table, an address that moves). A request
then waits for its timeout, 30 s and more. Meanwhile a follower delays every write with acks=all, or a broker does not
learn that it leads.

The choice: TCP keepalive, in which the kernels probe a quiet connection. A kernel answers even if its process is busy,
so a slow response is not mistaken for a dead connection, as it would be with a shorter timeout. While sent bytes are
unacknowledged, the kernel sends no probes, but retransmits for a quarter of an hour; between brokers TCP_USER_TIMEOUT
(RFC 5482) bounds that time as well. Clients do not set it: it would also end connections whose other side deliberately
stops reading for a while, such as an overloaded broker or a slow consumer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple


class Patience(NamedTuple):
    """Limits of a connection, in whole seconds, as the kernel counts."""

    idle_s: int
    """Seconds without any data after which the kernel probes the other side."""
    probes: int
    """Unanswered probes, one a second, after which the connection ends."""
    unacknowledged_s: int | None = None
    """Seconds that sent bytes may stay unacknowledged; None: the kernel's default. If it is set, Linux also ends a
    quiet connection after this time and ignores `probes`."""


OF_CRASH_DETECTION = Patience(idle_s=1, probes=2)
OF_BROKERS = Patience(idle_s=1, probes=4, unacknowledged_s=5)
OF_CLIENTS = Patience(idle_s=3, probes=3)


def keep_alive(transport: asyncio.BaseTransport, patience: Patience) -> None:
    """Apply `patience` to the transport's socket, as far as the platform supports it."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, patience.probes)
    if hasattr(socket, "TCP_KEEPIDLE"):  # macOS has another name for it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, patience.idle_s)
    if patience.unacknowledged_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience.unacknowledged_s * 1_000)
