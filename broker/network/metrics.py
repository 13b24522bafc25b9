"""Counters and sums of the network layer, as plain attributes that the exporter reads; log lines about what strangers
can cause as often as they like."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict

from minibroker.protocol.apis import APIS

MAX_SOFTWARE = 100
OTHER = ("other", "other")
SUMMARY_INTERVAL_S = 1.0


class Times:
    """Durations in seconds, as a histogram. Percentiles follow from the counts, to within their bounds."""

    BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        """Durations by the smallest bound that they did not exceed; the last counter is for those beyond all bounds."""
        self.sum_s = 0.0

    def add(self, duration_s: float, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self.sum_s += duration_s
        if duration_s <= bounds_s[0]:  # as most are; a search would take twice as long
            self.counts[0] += 1
        else:
            self.counts[bisect_left(bounds_s, duration_s)] += 1

    def counts_of(self, number: int) -> list[int]:
        """Return the counts of so many durations, of which those that were not added are 0."""
        return [number - sum(self.counts[1:]), *self.counts[1:]]


class ApiMetrics:
    """Sums and histograms over the requests of one API (Kafka's RequestQueueTimeMs, LocalTimeMs, RemoteTimeMs,
    ResponseSendTimeMs, TotalTimeMs)."""

    __slots__ = (
        "answered",
        "errors",
        "handled",
        "local",
        "name",
        "remote",
        "request_bytes",
        "request_queue",
        "send_s",
        "total",
        "unauthorized",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.handled = 0
        """Requests whose handler has returned."""
        self.answered = 0
        """Requests that were answered or need no answer."""
        self.errors = 0
        """Handlers that raised."""
        self.unauthorized = 0
        """Requests refused as a whole because the sender was not authorized."""
        self.request_bytes = 0
        self.request_queue = Times()
        """From the arrival of the last byte until a handler took the request."""
        self.local = Times()
        """In the handler."""
        self.remote = Times()
        """From the return of the handler until the request was answered. Without those that were answered in it."""
        self.total = Times()
        """From the arrival of the last byte until the request was answered."""
        self.send_s = 0.0
        """Seconds from the answer until the transport accepted it. The time that a slow peer takes to read is not
        measured."""


class ClientSoftware:
    """Open connections by client software (KIP-511): at most MAX_SOFTWARE names and versions at a time, and OTHER for
    all others."""

    def __init__(self) -> None:
        self.connections: dict[tuple[str, str], int] = {}

    def add(self, name: str, version: str) -> tuple[str, str]:
        """Count a connection. Returns the key to pass to `remove` when it closes."""
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


class Delays:
    """Connections that came too fast, and the sum of their delays."""

    __slots__ = ("count", "sum_s")

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0

    def add(self, delay_s: float) -> None:
        self.count += 1
        self.sum_s += delay_s


class ListenerMetrics:
    """New connections of a listener (Kafka's ConnectionQuotas)."""

    __slots__ = ("accepted", "address_delays", "delays")

    def __init__(self) -> None:
        self.accepted = 0
        """Connections that had their turn and a place."""
        self.delays = Delays()
        """Over the rate of the listener or of the broker."""
        self.address_delays = Delays()
        """Over the rate of an address."""


class NetworkMetrics:
    def __init__(self) -> None:
        self.per_listener: dict[str, ListenerMetrics] = defaultdict(ListenerMetrics)
        self.client_software = ClientSoftware()
        self.per_api = {key: ApiMetrics(api.name) for key, api in APIS.items()}
        """By API key."""
        self.connections_opened = 0
        self.connections_refused = 0
        """Connections refused because of a limit."""
        self.handshakes_failed = 0
        self.successful_authentications = 0
        self.failed_authentications = 0
        self.successful_reauthentications = 0
        self.failed_reauthentications = 0
        self.expired_connections_killed = 0
        """Connections closed because their client had not authenticated itself again in time (KIP-368)."""
        self.bad_input = 0
        """Connections closed because of invalid input."""
        self.idle_closed = 0
        self.slow_closed = 0
        """Connections closed because a frame or the reading of responses took too long, or because unread responses
        took too much memory."""


class Summary:
    """Logs at most once per second, so that a flood of connections does not flood the log."""

    def __init__(self, logger: logging.Logger, listener: str, what: str) -> None:
        self._logger = logger
        self._listener = listener
        self._what = what
        self._since_log = 0
        self._log_after = 0.0

    def log(self, peer: str, reason: str, now: float) -> None:
        self._since_log += 1
        if now < self._log_after:
            return
        self._logger.warning(
            "listener %s %s %d connections, the last of them from %s: %s",
            self._listener,
            self._what,
            self._since_log,
            peer,
            reason,
        )
        self._since_log = 0
        self._log_after = now + SUMMARY_INTERVAL_S
