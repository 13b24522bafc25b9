"""Connection limits (Kafka's ConnectionQuotas): total, per address, and the rate of new connections.

Pure: receives the time, never reads it. A connection over any of the limits is refused, that is, closed at once. Kafka
delays connections that come too fast, but a delayed connection keeps its file descriptor, and a refused client backs
off.
"""

from __future__ import annotations


def why_too_few_descriptors(used: int, limit: int, kept: int) -> str | None:
    """Return why a connection within its limits must be refused nevertheless, or None. Every file of the broker takes a
    descriptor, and a log without one cannot continue. `kept` is the number of descriptors that connections must
    leave."""
    if used <= limit - kept:
        return None
    return (
        f"{used} of the {limit} files and connections that this process may have open are taken (`ulimit -n`), and "
        f"the last {kept} are reserved for the broker: raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, "
        f"`--ulimit nofile` of Docker), or lower max.connections"
    )


class ConnectionQuotas:
    """Counts connections. Every `try_open` that returned None is followed by one `close`."""

    def __init__(self, max_connections: int, max_connections_per_ip: int, max_connection_creation_rate: int) -> None:
        self._max_connections = max_connections
        self._max_connections_per_ip = max_connections_per_ip
        self._rate = max_connection_creation_rate
        # A token bucket that holds one second's worth of connections and refills at the rate.
        self._allowance = float(max_connection_creation_rate)
        self._refilled_at: float | None = None
        self.total = 0
        self.per_address: dict[str, int] = {}

    def configure(self, max_connections: int, max_connections_per_ip: int, max_connection_creation_rate: int) -> None:
        """Change the limits. Open connections stay open."""
        self._max_connections = max_connections
        self._max_connections_per_ip = max_connections_per_ip
        self._rate = max_connection_creation_rate

    def try_open(self, address: str, now: float) -> str | None:
        """Count a new connection and return None, or return why it is refused, naming the setting. `now` is in
        seconds."""
        if self.total >= self._max_connections:
            return f"max.connections={self._max_connections} is reached"
        if self.per_address.get(address, 0) >= self._max_connections_per_ip:
            return f"max.connections.per.ip={self._max_connections_per_ip} is reached"
        if self._refilled_at is not None:
            self._allowance = min(float(self._rate), self._allowance + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        if self._allowance < 1.0:
            return f"max.connection.creation.rate={self._rate} per second is exceeded"
        self._allowance -= 1.0
        self.total += 1
        self.per_address[address] = self.per_address.get(address, 0) + 1
        return None

    def close(self, address: str) -> None:
        """Stop counting a connection that has ended."""
        self.total -= 1
        self.per_address[address] -= 1
        if self.per_address[address] == 0:
            del self.per_address[address]
