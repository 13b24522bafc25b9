"""The connections of one client: one for each broker and purpose, opened in the background.

Brokers handle the requests of a connection in order, so a fetch that waits for records must not precede a produce
request. Therefore each purpose has its own connection. After a failed attempt the next one waits for a back-off
(exponential from `backoff_s` to 1 s, with jitter).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum

from minibroker.client.cluster.authentication import authenticate_again, open_authenticated
from minibroker.client.cluster.retries import exponential_backoff_s
from minibroker.client.errors import AuthenticationFailed
from minibroker.client.log import Logger
from minibroker.client.security import UNPROTECTED, Protection
from minibroker.client.settings import Address
from minibroker.client.tasks import BackgroundTasks
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.connections.tls import TlsNetwork
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import World

logger = Logger("minibroker.client")

CONNECT_TIMEOUT_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms."""

OVERDUE_S = 1.0
"""After this long without an outcome, other brokers are asked whether one of them has taken over: a broker that is
stopped or disconnected does not refuse connections."""


CLOSING = "the client is closing"


class Purpose(Enum):
    PRODUCE = "produce"
    FETCH = "fetch"
    COORDINATOR = "coordinator"
    """Requests to a coordinator, whose answers may wait: for all members of a group, or for replicas."""
    REQUESTS = "requests"
    """Metadata, and all other requests that are answered without waiting."""


class _Slot:
    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.attempt: asyncio.Task[None] | None = None
        self.attempt_began = 0.0
        self.failures = 0
        self.retry_at = 0.0
        self.error: NetworkError | AuthenticationFailed | None = None


class Connections:
    """See the module. `listeners` are called when a connection was opened, could not be opened, or was lost."""

    def __init__(
        self,
        world: World,
        tasks: BackgroundTasks,
        *,
        client_id: str,
        backoff_s: float,
        protection: Protection = UNPROTECTED,
    ) -> None:
        self._world = world
        tls, self._credentials = protection
        self._network = world.network if tls is None else TlsNetwork(world.network, connecting=lambda: tls)
        self._tasks = tasks
        self.client_id = client_id
        self._backoff_s = backoff_s
        self._slots: dict[tuple[Address, Purpose], _Slot] = {}
        self._advertised: dict[Address, int] = {}
        self._reached: set[Address] = set()
        self.listeners: list[Callable[[], None]] = []
        self._is_closed = False

    def get(self, address: Address, purpose: Purpose) -> Connection | None:
        """Return the open connection. If there is none, return None and open one as soon as the back-off allows: the
        listeners are called then, or the caller asks again at `retry_at`."""
        slot = self._slot(address, purpose)
        if self._is_closed:
            return None
        if slot.connection is not None:
            return None if slot.connection.closed else slot.connection
        if slot.attempt is None and self._world.clock.monotonic() >= slot.retry_at:
            self._attempt(address, purpose, slot)
        return None

    def retry_at(self, address: Address, purpose: Purpose) -> float | None:
        """Return when the next attempt to connect may begin; None if one is in progress, or there is a connection."""
        slot = self._slot(address, purpose)
        return slot.retry_at if slot.connection is None and slot.attempt is None else None

    def attempt_began(self, address: Address, purpose: Purpose) -> float | None:
        """Return when the attempt to connect that is in progress began; None if there is none."""
        slot = self._slot(address, purpose)
        return slot.attempt_began if slot.connection is None and slot.attempt is not None else None

    async def open(self, address: Address, purpose: Purpose) -> Connection:
        """Return the open connection, after an attempt if necessary. Raises NetworkError and AuthenticationFailed;
        during a back-off, the last one."""
        if self._is_closed:
            raise NetworkError(f"connecting to {address}: {CLOSING}")
        slot = self._slot(address, purpose)
        if slot.connection is not None and slot.connection.closed:
            slot.connection = None
        if slot.connection is None:
            if slot.attempt is None:
                if slot.error is not None and self._world.clock.monotonic() < slot.retry_at:
                    raise slot.error.with_traceback(None)
                self._attempt(address, purpose, slot)
            assert slot.attempt is not None
            await asyncio.wait([slot.attempt])
        if slot.connection is None:
            raise (slot.error or NetworkError(f"connecting to {address}: the client is closing")).with_traceback(None)
        return slot.connection

    def advertised(self, brokers: Mapping[int, Address]) -> None:
        """Learn the addresses that brokers advertise. Perhaps only their network can reach them, so errors about an
        address that was never reached say that it is advertised. Addresses that no broker has any more are forgotten,
        unless they are in use."""
        before, self._advertised = self._advertised, {address: node_id for node_id, address in brokers.items()}
        for address in before.keys() - self._advertised.keys():
            for purpose in Purpose:
                slot = self._slots.get((address, purpose))
                if slot is not None and slot.connection is None and slot.attempt is None:
                    del self._slots[address, purpose]

    def error(self, address: Address, purpose: Purpose) -> NetworkError | None:
        """Return why the last attempt to connect failed; None if it succeeded, or there was none. A failed
        authentication ends the client."""
        slot = self._slots.get((address, purpose))
        return slot.error if slot is not None and isinstance(slot.error, NetworkError) else None

    def in_flight(self, address: Address) -> int:
        """Return the number of requests to the broker that wait for an answer, over all purposes."""
        return sum(
            slot.connection.in_flight
            for purpose in Purpose
            if (slot := self._slots.get((address, purpose))) is not None and slot.connection is not None
        )

    async def close(self) -> None:
        """Close all connections, and open no more. The attempts are BackgroundTasks, which their owner ends."""
        self._is_closed = True
        connections = [slot.connection for slot in self._slots.values() if slot.connection is not None]
        for connection in connections:
            connection.close(CLOSING)
        for connection in connections:
            await connection.wait_closed()

    def _slot(self, address: Address, purpose: Purpose) -> _Slot:
        slot = self._slots.get((address, purpose))
        if slot is None:
            slot = self._slots[address, purpose] = _Slot()
        return slot

    def _attempt(self, address: Address, purpose: Purpose, slot: _Slot) -> None:
        slot.attempt_began = self._world.clock.monotonic()
        slot.attempt = self._tasks.start(
            self._connect(address, purpose, slot), f"connect to {address} for {purpose.value}"
        )

    async def _connect(self, address: Address, purpose: Purpose, slot: _Slot) -> None:
        refused: AuthenticationFailed | None = None
        try:
            connection, session_s = await open_authenticated(
                self._network,
                address.host,
                address.port,
                self._credentials,
                self._world.random,
                client_id=self.client_id,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        except (NetworkError, AuthenticationFailed, ValueError, OverflowError) as error:
            # ValueError, OverflowError: metadata has an illegal host or port
            slot.failures += 1
            if isinstance(error, AuthenticationFailed):
                slot.error = refused = error
            elif isinstance(error, NetworkError):
                slot.error = self._explained(address, error)
            else:
                slot.error = self._explained(address, NetworkError(f"connecting to {address}: {error}"))
            pause_s = exponential_backoff_s(slot.failures, self._backoff_s, self._world.random)
            slot.retry_at = self._world.clock.monotonic() + pause_s
            logger.debug("%s: %s; not again for %.2f s", self.client_id, slot.error, pause_s)
        else:
            slot.failures = 0
            slot.error = None
            slot.connection = connection
            self._reached.add(address)
            logger.debug("%s: connected to %s for %s", self.client_id, address, purpose.value)

            def lost(lost_connection: Connection) -> None:
                why = lost_connection.closed_because
                level = logging.DEBUG if why == CLOSING else logging.INFO
                logger.log(level, "%s: disconnected from %s for %s: %s", self.client_id, address, purpose.value, why)
                if slot.connection is lost_connection:
                    slot.connection = None
                    self._notify()

            connection.on_lost(lost)
            if connection.closed:  # before `on_lost`
                slot.connection = None
                logger.info("%s: disconnected from %s: %s", self.client_id, address, connection.closed_because)
            if session_s is not None:
                renewal = self._keep_authenticated(connection, session_s)
                self._tasks.start(renewal, f"authenticate again to {address} for {purpose.value}")
        finally:
            slot.attempt = None
        self._notify()
        if refused is not None:
            raise refused.copy()  # which ends the client

    async def _keep_authenticated(self, connection: Connection, session_s: float) -> None:
        """Authenticate again before each session ends (KIP-368). Raises AuthenticationFailed, which ends the client."""
        assert self._credentials is not None
        renewed_s: float | None = session_s
        while renewed_s is not None:
            with suppress(TimeoutError):
                # Not all connections of all clients at once: as Kafka, after 85 to 95 % of the time.
                async with asyncio.timeout(renewed_s * self._world.random.uniform(0.85, 0.95)):
                    await connection.wait_closed()
                    return
            try:
                renewed_s = await authenticate_again(
                    connection, self._credentials, self._world.random, CONNECT_TIMEOUT_S
                )
            except NetworkError as error:
                connection.close(f"not authenticated again: {error}")
                return
            except BaseException:
                connection.close("the client is not authenticated any more")
                raise

    def _explained(self, address: Address, error: NetworkError) -> NetworkError:
        node_id = self._advertised.get(address)
        if node_id is None or address in self._reached:
            return error
        return type(error)(
            f"{error}. Broker {node_id} advertises that address, and it was never reached from here: "
            "if the broker runs, use the listener that is meant for this network, or correct advertised.listeners "
            f"(`minibroker configs alter --broker {node_id} --set advertised.listeners=...`, or --delete)"
        )

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()
