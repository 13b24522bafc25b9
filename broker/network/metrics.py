"""Counters and sums of the network layer. Plain attributes: whoever exports them reads them."""

from __future__ import annotations

from minibroker.protocol.apis import APIS

MAX_SOFTWARE = 100
OTHER = ("other", "other")


class ApiMetrics:
    """Sums over the requests of one API, in seconds (Kafka's RequestQueueTimeMs, LocalTimeMs, RemoteTimeMs,
    ResponseSendTimeMs, TotalTimeMs)."""

    __slots__ = (
        "answered",
        "errors",
        "handled",
        "local_s",
        "name",
        "remote_s",
        "request_bytes",
        "request_queue_s",
        "send_s",
        "total_s",
        "unauthorized",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.handled = 0
        """Requests whose handler has returned."""
        self.answered = 0
        """Requests that were answered, or that need no answer."""
        self.errors = 0
        """Handlers that raised."""
        self.unauthorized = 0
        """Of those: the sender may not ask this (CLUSTER_AUTHORIZATION_FAILED)."""
        self.request_bytes = 0
        self.request_queue_s = 0.0
        """From the arrival of the last byte until a handler took it."""
        self.local_s = 0.0
        """In the handler."""
        self.remote_s = 0.0
        """From the return of the handler until the request was answered."""
        self.total_s = 0.0
        """From the arrival of the last byte until the request was answered."""
        self.send_s = 0.0
        """From the answer until the transport had been given it. What the peer is too slow to take waits there
        unmeasured."""


class ClientSoftware:
    """Open connections by what their clients say they are (KIP-511): at most MAX_SOFTWARE names and versions at a time,
    and OTHER for what comes beyond that."""

    def __init__(self) -> None:
        self.connections: dict[tuple[str, str], int] = {}

    def add(self, name: str, version: str) -> tuple[str, str]:
        """One more connection. Returns what to `remove` once it is gone."""
        software = (name, version)
        if software not in self.connections and len(self.connections) >= MAX_SOFTWARE:
            software = OTHER
        self.connections[software] = self.connections.get(software, 0) + 1
        return software

    def remove(self, software: tuple[str, str] | None) -> None:
        if software is not None:
            self.connections[software] -= 1
            if not self.connections[software]:
                del self.connections[software]


class NetworkMetrics:
    def __init__(self) -> None:
        self.client_software = ClientSoftware()
        self.per_api = {key: ApiMetrics(api.name) for key, api in APIS.items()}
        """By API key."""
        self.connections_opened = 0
        self.connections_refused = 0
        """Over a connection limit."""
        self.bad_input = 0
        """Connections closed because of what they sent."""
        self.idle_closed = 0
        self.slow_closed = 0
        """Connections closed because a frame or the reading of responses took too long, or held too much memory."""
