"""Connections that fall silent end soon, by the kernel's own means.

The problem: a box in between may forget a connection (a firewall's table, an address that moves) and tell neither end.
Whoever waits for an answer then waits for its request's timeout, 30 s and more: a follower that way holds up every
write with acks=all, a broker does not hear that it leads.

The choice: the kernels ask each other whether a quiet connection still stands (TCP keepalive). They answer however busy
their process is, so unlike with a shorter timeout a slow answer is waited for. Where something was sent and not
acknowledged no probe is sent, but what was sent, again and again for a quarter of an hour: so between brokers that is
bounded, too (TCP_USER_TIMEOUT, RFC 5482). Not for clients: it would also end connections whose other end reads nothing
for a while on purpose, as a broker that is flooded does, and a consumer that is slow.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple


class Patience(NamedTuple):
    """The kernel counts in whole seconds."""

    idle_s: int
    """When nothing has come for so long, the other end is asked,"""
    probes: int
    """up to so many times, once a second."""
    unacknowledged_s: int | None = None
    """How long what was sent may go without an acknowledgement; None: as long as the kernel thinks fit. Where it is
    set, Linux ends a quiet connection after this time, too, and does not count the probes."""


OF_CRASH_DETECTION = Patience(idle_s=1, probes=2)
OF_BROKERS = Patience(idle_s=1, probes=4, unacknowledged_s=5)
OF_CLIENTS = Patience(idle_s=3, probes=3)


def keep_alive(transport: asyncio.BaseTransport, patience: Patience) -> None:
    """As far as the platform can."""
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
