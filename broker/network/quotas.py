"""Connection limits (Kafka's ConnectionQuotas): total, per listener (KIP-402) and per address. `connection_rates` has
the rates.

The problem: connections cost nothing to those who open them. Strangers who open all that a listener may have, and say
nothing, would keep out clients and brokers; a new controller that cannot reach the others takes them for dead.

The choice. A connection *waits* until its first valid request, and where brokers prove who they are, until that proof.
If a limit is reached, a new connection takes the place of the one that has waited longest, if many wait, else of the
client that has been idle longest (Kafka's closeExcessConnections). Nobody takes the place of a broker, and brokers
count towards no limit. If every client is busy, RESERVED further connections may wait; their places are for brokers,
and a client among them is refused with its first request.

Without a secret, brokers cannot prove anything. Therefore the listener of the brokers is protected, if clients have
another one: the total never refuses or closes its connections. Instead a connection of another listener gives way, if
none is idle even a busy one, as soon as the new one has sent a valid request.

Pure: receives the time, never reads it. A connection that cannot be counted is refused, that is, closed at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from minibroker.broker.network.settings import NetworkSettings

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
    listener: str

    @property
    def idle_since(self) -> float | None:
        """When it was last active, or None if the broker has something to do for it."""
        ...

    def give_way(self, reason: str) -> None:
        """Close now."""
        ...


class _Kind(Enum):
    ALL = "all"
    UNPROTECTED = "unprotected"
    """All except those of the protected listener."""
    LISTENER = "listener"
    ADDRESS = "address"


class Scope(NamedTuple):
    """Connections that are counted together."""

    kind: _Kind
    name: str = ""

    def has(self, connection: Connected, protected: str | None) -> bool:
        match self.kind:
            case _Kind.ALL:
                return True
            case _Kind.UNPROTECTED:
                return connection.listener != protected
            case _Kind.LISTENER:
                return connection.listener == self.name
            case _Kind.ADDRESS:
                return connection.address == self.name


ALL = Scope(_Kind.ALL)
_UNPROTECTED = Scope(_Kind.UNPROTECTED)


def _victims(scope: Scope) -> Scope:
    """Return the connections of which one gives way if the limit of this scope is reached."""
    return _UNPROTECTED if scope == ALL else scope


class ConnectionQuotas:
    """Counts connections. Every `try_open` that returned None is followed by one `close`, or by one `joined` and then
    one `left`."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._overrides: Mapping[str, int] = {}
        self._protected = settings.protected_listener
        self._brokers: set[Connected] = set()
        self._waiting: dict[Scope, dict[Connected, None]] = {}
        """In the order in which they came."""
        self._clients: dict[Connected, None] = {}
        self._giving_way: set[Connected] = set()
        """Connections that are being closed, and no longer count."""
        self._idle: dict[Scope, list[tuple[float, int, Connected]]] = {}
        """Candidates to give way; the longest idle is the last."""
        self._looked_in_vain: dict[Scope, float] = {}
        self.counts: dict[Scope, int] = {}
        """Connections, without those of brokers."""
        self.gave_way = 0
        """Connections closed in favour of newer ones."""

    @property
    def total(self) -> int:
        """All open connections."""
        return self.clients + len(self._brokers) + len(self._giving_way)

    @property
    def clients(self) -> int:
        """The connections that count towards the limits."""
        return self.counts.get(ALL, 0)

    def of_address(self, address: str) -> int:
        """The connections of an address that count towards its limit."""
        return self.counts.get(Scope(_Kind.ADDRESS, address), 0)

    def configure(self, settings: NetworkSettings) -> None:
        """Change the limits. Open connections stay open."""
        self._settings = settings

    def override(self, limits: Mapping[str, int]) -> None:
        """Replace the limits of single addresses."""
        self._overrides = limits

    def try_open(self, address: str, listener: str, now: float, room: str | None = None) -> str | None:
        """Count a new connection and return None, or return why it is refused, naming the setting. `now` is in
        seconds. `room`: why there is no room regardless of these limits."""
        if room is not None and not self._close_one(now, room):
            return room
        for scope in self._limited(address, listener):
            if self.counts.get(scope, 0) >= self._limit(scope):
                reason = self._why_over(scope)
                passes = self._passes(scope, listener)
                if not self._make_room(scope, now, reason, passes=passes) and not passes:
                    return reason
        for scope in self._scopes(address, listener):
            self.counts[scope] = self.counts.get(scope, 0) + 1
        return None

    def joined(self, connection: Connected, instead_of: Connected | None = None) -> None:
        """An opened connection waits from now on; `instead_of` was counted in its place."""
        if instead_of is not None:
            if not self._is_waiting(instead_of):  # it was to give way a moment ago
                self._giving_way.add(connection)
                connection.give_way("its place is taken")
                return
            self._forget(instead_of)
        for scope in self._scopes(connection.address, connection.listener):
            self._waiting.setdefault(scope, {})[connection] = None

    def admit(self, connection: Connected, now: float) -> str | None:
        """The connection has sent its first valid request. Return why it is refused, or None."""
        if not self._is_waiting(connection):
            return None
        for scope in self._limited(connection.address, connection.listener):
            if self.counts[scope] > self._limit(scope):
                reason, passes = self._why_over(scope), self._passes(scope, connection.listener)
                victim = self._longest_idle(_victims(scope), now) or (self._any_unprotected() if passes else None)
                if victim is not None:
                    self._close_for_another(victim, reason)
                elif not passes:
                    return reason
        self._forget(connection)
        self._clients[connection] = None
        return None

    def proved(self, connection: Connected) -> None:
        """The connection is a broker's from now on."""
        if connection not in self._brokers and connection not in self._giving_way:
            self._forget(connection)
            self._brokers.add(connection)
            self.close(connection.address, connection.listener)

    def left(self, connection: Connected) -> None:
        """Stop counting a connection, if it has joined and still counts."""
        if connection in self._clients or self._is_waiting(connection):
            self._forget(connection)
            self.close(connection.address, connection.listener)
        self._brokers.discard(connection)
        self._giving_way.discard(connection)

    def close(self, address: str, listener: str) -> None:
        """Stop counting a connection that has ended without having joined."""
        for scope in self._scopes(address, listener):
            self.counts[scope] -= 1
            if self.counts[scope] == 0:
                del self.counts[scope]

    # -- inside --

    def _limited(self, address: str, listener: str) -> tuple[Scope, ...]:
        """Return the scopes that may have a limit, the narrowest first: room in it is room in the others."""
        return Scope(_Kind.ADDRESS, address), Scope(_Kind.LISTENER, listener), ALL

    def _scopes(self, address: str, listener: str) -> tuple[Scope, ...]:
        limited = self._limited(address, listener)
        return limited if listener == self._protected else (*limited, _UNPROTECTED)

    def _limit(self, scope: Scope) -> float:
        match scope.kind:
            case _Kind.ADDRESS:
                return self._overrides.get(scope.name, self._settings.max_connections_per_ip)
            case _Kind.LISTENER:
                return self._settings.max_connections_of_listeners.get(scope.name, float("inf"))
            case _:
                return self._settings.max_connections

    def _why_over(self, scope: Scope) -> str:
        match scope.kind:
            case _Kind.ADDRESS if scope.name in self._overrides:
                limit = f"max.connections.per.ip.overrides={scope.name}:{self._overrides[scope.name]}"
            case _Kind.ADDRESS:
                limit = f"max.connections.per.ip={self._settings.max_connections_per_ip}"
            case _Kind.LISTENER:
                limit = f"listener.name.{scope.name.lower()}.max.connections={self._limit(scope)}"
            case _:
                limit = f"max.connections={self._settings.max_connections}"
        return f"{limit} is reached"

    def _passes(self, scope: Scope, listener: str) -> bool:
        """Return whether a connection of the listener is not subject to this limit."""
        return scope == ALL and listener == self._protected

    def _is_waiting(self, connection: Connected) -> bool:
        return connection in self._waiting.get(ALL, {})

    def _make_room(self, scope: Scope, now: float, reason: str, *, passes: bool) -> bool:
        """Make room for one more connection, and return whether there is some now. `passes`: for one that is not
        subject to the limit; if many wait, those of its own listener give way, too."""
        limit = self._limit(scope)
        reserved = min(RESERVED, limit)
        victims = _victims(scope)
        waiting = self._waiting.get(ALL if passes else victims, {})
        victim = None
        if len(waiting) < reserved:
            victim = self._longest_idle(victims, now)
            if victim is None and self.counts[scope] < limit + reserved:
                return True
        if victim is None:
            victim = self._first_waiting(victims) or next(iter(waiting), None)
        if victim is None:
            return False
        self._close_for_another(victim, reason)
        return True

    def _close_one(self, now: float, reason: str) -> bool:
        victim = (
            self._first_waiting(_UNPROTECTED)
            or self._first_waiting(ALL)
            or self._longest_idle(_UNPROTECTED, now)
            or self._longest_idle(ALL, now)
        )
        if victim is None:
            return False
        self._close_for_another(victim, reason)
        return True

    def _first_waiting(self, scope: Scope) -> Connected | None:
        return next(iter(self._waiting.get(scope, ())), None)

    def _any_unprotected(self) -> Connected | None:
        """Return a connection of another listener than the protected one, although it is busy."""
        return self._first_waiting(_UNPROTECTED) or next(
            (each for each in self._clients if each.listener != self._protected), None
        )

    def _forget(self, connection: Connected) -> None:
        self._clients.pop(connection, None)
        if self._is_waiting(connection):
            for scope in self._scopes(connection.address, connection.listener):
                waiting = self._waiting[scope]
                del waiting[connection]
                if not waiting:
                    del self._waiting[scope]

    def _close_for_another(self, victim: Connected, reason: str) -> None:
        self._forget(victim)
        self._giving_way.add(victim)
        self.close(victim.address, victim.listener)
        self.gave_way += 1
        victim.give_way(reason)

    def _longest_idle(self, scope: Scope, now: float) -> Connected | None:
        while True:
            candidates = self._idle.get(scope)
            if not candidates:
                self._idle.pop(scope, None)
                candidates = self._look(scope, now)
                if not candidates:
                    return None
                self._idle[scope] = candidates
            while candidates:
                since, _, connection = candidates.pop()
                if connection in self._clients and connection.idle_since == since:
                    return connection

    def _look(self, scope: Scope, now: float) -> list[tuple[float, int, Connected]]:
        """Return the clients that have been idle longest, the longest as the last. At most one look in MIN_IDLE_S is in
        vain."""
        if now - self._looked_in_vain.get(scope, -MIN_IDLE_S) < MIN_IDLE_S:
            return []
        idle = (
            (since, number, connection)
            for number, connection in enumerate(self._clients)
            if scope.has(connection, self._protected)
            and (since := connection.idle_since) is not None
            and now - since >= MIN_IDLE_S
        )
        found = heapq.nsmallest(_CANDIDATES, idle)
        if found:
            self._looked_in_vain.pop(scope, None)
        else:
            if len(self._looked_in_vain) >= _CANDIDATES:
                self._looked_in_vain.clear()
            self._looked_in_vain[scope] = now
        found.reverse()
        return found
