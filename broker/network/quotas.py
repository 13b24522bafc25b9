"""Connection limits (Kafka's ConnectionQuotas): total and per address. `connection_rates` has the rates.

The problem: connections cost nothing to those who open them. Strangers who open all that a listener may have, and say
nothing, would keep out clients and brokers; a new controller that cannot reach the others takes them for dead.

The choice. A connection *waits* until its first valid request, and where brokers prove who they are, until that proof.
If a limit is reached, a new connection takes the place of the one that has waited longest, if many wait, else of the
client that has been idle longest (Kafka's closeExcessConnections). Nobody takes the place of a broker, and brokers
count towards no limit. If every client is busy, RESERVED further connections may wait; their places are for brokers,
and a client among them is refused with its first request.

Pure: receives the time, never reads it. A connection that cannot be counted is refused, that is, closed at once.
"""

from __future__ import annotations

import heapq
from typing import Protocol

RESERVED = 100
"""Connections that may wait beyond a limit, for brokers to prove who they are. A cluster of 100 brokers, all of whom
connect at the same time, needs as many."""

MIN_IDLE_S = 1.0
"""A client that was active less long ago keeps its place."""

_CANDIDATES = 64
"""Idle clients found by one look at all connections, so that a flood of connections costs few looks."""


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


class Connected(Protocol):
    """An open connection, as the quotas see it."""

    address: str

    @property
    def idle_since(self) -> float | None:
        """When it was last active, or None if the broker has something to do for it."""
        ...

    def give_way(self, reason: str) -> None:
        """Close now."""
        ...


class ConnectionQuotas:
    """Counts connections. Every `try_open` that returned None is followed by one `close`, or by one `joined` and then
    one `left`."""

    def __init__(self, max_connections: int, max_connections_per_ip: int) -> None:
        self._max_connections = max_connections
        self._max_connections_per_ip = max_connections_per_ip
        self._counted = 0
        self._brokers: set[Connected] = set()
        self._waiting: dict[str | None, dict[Connected, None]] = {None: {}}
        """By address, and all of them (None), in the order in which they came."""
        self._clients: dict[Connected, None] = {}
        self._giving_way: set[Connected] = set()
        """Connections that are being closed, and no longer count."""
        self._idle: dict[str | None, list[tuple[float, int, Connected]]] = {}
        """Candidates to give way, by address and for all addresses (None); the longest idle is the last."""
        self._looked_in_vain: dict[str | None, float] = {}
        self.per_address: dict[str, int] = {}
        """Connections, without those of brokers."""
        self.gave_way = 0
        """Connections closed in favour of newer ones."""

    @property
    def total(self) -> int:
        """All open connections."""
        return self._counted + len(self._brokers) + len(self._giving_way)

    @property
    def clients(self) -> int:
        """The connections that count towards the limits."""
        return self._counted

    def configure(self, max_connections: int, max_connections_per_ip: int) -> None:
        """Change the limits. Open connections stay open."""
        self._max_connections = max_connections
        self._max_connections_per_ip = max_connections_per_ip

    def try_open(self, address: str, now: float, room: str | None = None) -> str | None:
        """Count a new connection and return None, or return why it is refused, naming the setting. `now` is in
        seconds. `room`: why there is no room regardless of these limits."""
        if room is not None and not self._close_one(now, room):
            return room
        reason, of_one = self._why_over(address, 1)
        if reason is not None and not self._make_room(of_one, now, reason):
            return reason
        self._counted += 1
        self.per_address[address] = self.per_address.get(address, 0) + 1
        return None

    def joined(self, connection: Connected, instead_of: Connected | None = None) -> None:
        """An opened connection waits from now on; `instead_of` was counted in its place."""
        if instead_of is not None:
            if instead_of not in self._waiting[None]:  # it was to give way a moment ago
                self._giving_way.add(connection)
                connection.give_way("its place is taken")
                return
            self._forget(instead_of)
        self._waiting[None][connection] = None
        self._waiting.setdefault(connection.address, {})[connection] = None

    def admit(self, connection: Connected, now: float) -> str | None:
        """The connection has sent its first valid request. Return why it is refused, or None."""
        if connection not in self._waiting[None]:
            return None
        reason, address = self._why_over(connection.address)
        if reason is not None:
            victim = self._longest_idle(address, now)
            if victim is None:
                return reason
            self._close_for_another(victim, reason)
        self._forget(connection)
        self._clients[connection] = None
        return None

    def proved(self, connection: Connected) -> None:
        """The connection is a broker's from now on."""
        if connection not in self._brokers and connection not in self._giving_way:
            self._forget(connection)
            self._brokers.add(connection)
            self.close(connection.address)

    def left(self, connection: Connected) -> None:
        """Stop counting a connection, if it has joined and still counts."""
        if connection in self._clients or connection in self._waiting[None]:
            self._forget(connection)
            self.close(connection.address)
        self._brokers.discard(connection)
        self._giving_way.discard(connection)

    def close(self, address: str) -> None:
        """Stop counting a connection that has ended without having joined."""
        self._counted -= 1
        self.per_address[address] -= 1
        if self.per_address[address] == 0:
            del self.per_address[address]

    # -- inside --

    def _why_over(self, address: str, more: int = 0) -> tuple[str | None, str | None]:
        """Return which limit `more` connections of the address would exceed, if any, and the address if it is the
        address's own limit."""
        if self._counted + more > self._max_connections:
            return f"max.connections={self._max_connections} is reached", None
        if self.per_address.get(address, 0) + more > self._max_connections_per_ip:
            return f"max.connections.per.ip={self._max_connections_per_ip} is reached", address
        return None, None

    def _make_room(self, address: str | None, now: float, reason: str) -> bool:
        """Make room for one more connection of this address, or of any, and return whether there is some now."""
        limit = self._max_connections if address is None else self._max_connections_per_ip
        reserved = min(RESERVED, limit)
        waiting = self._waiting.get(address, {})
        victim = None
        if len(waiting) < reserved:
            victim = self._longest_idle(address, now)
            counted = self._counted if address is None else self.per_address[address]
            if victim is None and counted < limit + reserved:
                return True
        if victim is None:
            victim = next(iter(waiting), None)
        if victim is None:
            return False
        self._close_for_another(victim, reason)
        return True

    def _close_one(self, now: float, reason: str) -> bool:
        victim = next(iter(self._waiting[None]), None) or self._longest_idle(None, now)
        if victim is None:
            return False
        self._close_for_another(victim, reason)
        return True

    def _forget(self, connection: Connected) -> None:
        self._clients.pop(connection, None)
        if connection in self._waiting[None]:
            del self._waiting[None][connection]
            of_address = self._waiting[connection.address]
            del of_address[connection]
            if not of_address:
                del self._waiting[connection.address]

    def _close_for_another(self, victim: Connected, reason: str) -> None:
        self._forget(victim)
        self._giving_way.add(victim)
        self.close(victim.address)
        self.gave_way += 1
        victim.give_way(reason)

    def _longest_idle(self, address: str | None, now: float) -> Connected | None:
        while True:
            candidates = self._idle.get(address)
            if not candidates:
                self._idle.pop(address, None)
                candidates = self._look(address, now)
                if not candidates:
                    return None
                self._idle[address] = candidates
            while candidates:
                since, _, connection = candidates.pop()
                if connection in self._clients and connection.idle_since == since:
                    return connection

    def _look(self, address: str | None, now: float) -> list[tuple[float, int, Connected]]:
        """Return the clients that have been idle longest, the longest as the last. At most one look in MIN_IDLE_S is in
        vain."""
        if now - self._looked_in_vain.get(address, -MIN_IDLE_S) < MIN_IDLE_S:
            return []
        idle = (
            (since, number, connection)
            for number, connection in enumerate(self._clients)
            if address in (None, connection.address)
            and (since := connection.idle_since) is not None
            and now - since >= MIN_IDLE_S
        )
        found = heapq.nsmallest(_CANDIDATES, idle)
        if found:
            self._looked_in_vain.pop(address, None)
        else:
            if len(self._looked_in_vain) >= _CANDIDATES:
                self._looked_in_vain.clear()
            self._looked_in_vain[address] = now
        found.reverse()
        return found
