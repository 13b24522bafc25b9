"""The network layer of a broker: listeners, processors, channels and handlers (Kafka's SocketServer).

The data plane has one request channel and one pool of handlers for all its listeners. The control plane has one
processor, one handler, a channel and connection limits of its own, so that clients cannot block the controller
(KIP-291). Listeners bind first, so that the broker can register its real ports; connections then wait in the operating
system's queue until `start`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from minibroker.broker.network.acceptor import Acceptor
from minibroker.broker.network.connection_rates import ConnectionRates
from minibroker.broker.network.handler_pool import RequestHandler, RequestHandlerPool
from minibroker.broker.network.host_limits import HostLimits
from minibroker.broker.network.large_requests import LargeRequests
from minibroker.broker.network.metrics import NetworkMetrics
from minibroker.broker.network.processor import PrincipalOf, Processor, ServerConnection
from minibroker.broker.network.quotas import ConnectionQuotas, why_too_few_descriptors
from minibroker.broker.network.request_channel import Gate, OnAnswer, Request, RequestChannel
from minibroker.broker.network.settings import NetworkSettings
from minibroker.broker.network.unsent import UnsentAnswers
from minibroker.protocol.apis import Plane
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import Network, World

__all__ = ["NetworkSettings", "Request", "RequestHandler", "SocketServer"]

ALL_ADDRESSES = "0.0.0.0"
"""The meaning of an empty host in Kafka's `listeners`."""

KEPT_DESCRIPTORS = {Plane.DATA: 1 / 8, Plane.CONTROL: 1 / 16}
"""The fraction of the file descriptors that the connections of a plane must leave free: 1/16 for files, ZooKeeper and
connections to other brokers; the data plane also leaves 1/16 to the controller."""

CONNECTIONS_GRACE_S = 1.0
"""Time that `close` gives peers to read their last responses."""


class Security(Protocol):
    """What connections of the listeners go through before their first request."""

    def network(self, listener: str) -> Network: ...

    def principal_of(self, listener: str) -> PrincipalOf | None:
        """None: connections have no principal by TLS."""
        ...


class PlaneParts(NamedTuple):
    """The parts of a plane that all of its listeners share."""

    channel: RequestChannel
    pool: RequestHandlerPool
    quotas: ConnectionQuotas


class SocketServer:
    """Calls `handler` with each request, in a task of its plane. The connection's next request waits until the handler
    returns. The handler answers, or passes the request on to be answered later. A BrokerError is answered with its
    code; any other exception is logged and answered with UNKNOWN_SERVER_ERROR."""

    def __init__(
        self,
        world: World,
        settings: NetworkSettings,
        handler: RequestHandler,
        security: Security | None = None,
        *,
        brokers_have_proofs: bool = False,
        new_gate: Callable[[str], Callable[[], Gate] | None] = lambda listener: None,
    ) -> None:
        """`brokers_have_proofs`: brokers share a secret, so that others have no business on the control plane.
        `new_gate` returns, for a listener that uses SASL, the function that makes the state of a connection."""
        clock = world.clock.monotonic
        self.metrics = NetworkMetrics()
        self.unsent = UnsentAnswers(settings.max_unsent_bytes_of_all, self._data_connections, clock)
        self._network = world.network
        self._security = security
        self._new_gate = new_gate
        self._disk = world.disk
        self._clock = clock
        self._settings = settings
        self._brokers_have_proofs = brokers_have_proofs
        control = RequestChannel(settings.control_queued_max_requests, settings.queued_max_request_bytes, clock)
        data = RequestChannel(
            settings.queued_max_requests, settings.queued_max_request_bytes, clock, gives_way_to=control
        )
        self.large = LargeRequests(world.new_executor("large requests"), self.unsent.in_turn)
        self.planes = {
            plane: PlaneParts(
                channel,
                RequestHandlerPool(f"{plane.value}-plane", handlers, channel, handler, self.metrics, clock, self.large),
                ConnectionQuotas(settings),
            )
            for plane, channel, handlers in ((Plane.CONTROL, control, 1), (Plane.DATA, data, settings.num_io_threads))
        }
        self._rates = ConnectionRates(
            settings.max_connection_creation_rate,
            settings.max_connection_creation_rate_of_listeners,
            settings.protected_listener,
        )
        """Of the data plane. The control plane has none, so that clients cannot delay the controller."""
        self._host_limits = HostLimits(world.network, self._limit_addresses)
        self._acceptors: list[Acceptor] = []
        self._data_acceptors: list[Acceptor] = []

    def set_connection_rates(self, quotas: Mapping[str | None, float]) -> None:
        """Replace the rates of new connections by address; None: of all other addresses."""
        self._rates.set_quotas(quotas, self._clock())

    def set_on_answer(self, on_answer: OnAnswer | None) -> None:
        """Call this with the answers of the data plane from now on; None: no longer."""
        self.planes[Plane.DATA].channel.on_answer = on_answer

    def reconfigure(self, settings: NetworkSettings) -> None:
        """Change the connection limits and the numbers of tasks of the data plane, at any time. Open connections stay
        open."""
        self._settings = settings
        for parts in self.planes.values():
            parts.quotas.configure(settings)
        self._host_limits.configure(settings.max_connections_per_ip_overrides)
        self._rates.configure(
            settings.max_connection_creation_rate, settings.max_connection_creation_rate_of_listeners, self._clock()
        )
        self.planes[Plane.DATA].pool.resize(settings.num_io_threads)
        for acceptor in self._data_acceptors:
            acceptor.resize(settings.num_network_threads, partial(self._processor, acceptor.name, Plane.DATA))

    async def bind(self, listeners: Sequence[tuple[str, str, int, Plane]]) -> dict[str, int]:
        """Bind each (name, host, port, plane) and return the port of each name. An empty host means all addresses; port
        0 takes a free port. Raises NetworkError naming the address and the remedy; then none is bound."""
        self._host_limits.configure(self._settings.max_connections_per_ip_overrides)
        try:
            for name, host, port, plane in listeners:
                await self._bind(name, host, port, plane)
        except BaseException:
            await self._host_limits.close()
            for acceptor in self._acceptors:
                await acceptor.close()
            self._acceptors.clear()
            self._data_acceptors.clear()
            raise
        return {acceptor.name: acceptor.listener.port for acceptor in self._acceptors}

    def start(self) -> None:
        """Begin to accept connections and to handle requests."""
        for parts in self.planes.values():
            parts.pool.start()
        for acceptor in self._acceptors:
            acceptor.start()

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting and reading. Let queued requests be handled for up to `grace_s`, then cancel them, and close
        all connections. Returns when every task has ended and every connection is closed."""
        await self._host_limits.close()
        for acceptor in self._acceptors:
            await acceptor.close()
        self.unsent.close()
        processors = [processor for acceptor in self._acceptors for processor in acceptor.all_processors]
        for parts in self.planes.values():
            parts.channel.close()
        await asyncio.gather(*(parts.pool.close(grace_s) for parts in self.planes.values()))
        await asyncio.gather(*(processor.close(CONNECTIONS_GRACE_S) for processor in processors))

    async def _bind(self, name: str, host: str, port: int, plane: Plane) -> None:
        try:
            network = self._network if self._security is None else self._security.network(name)
            listener = await network.listen(host or ALL_ADDRESSES, port)
        except OSError as error:
            raise NetworkError(_why_not_bound(name, host, port, error)) from error
        parts = self.planes[plane]
        count = 1 if plane is Plane.CONTROL else self._settings.num_network_threads
        processors = [self._processor(name, plane) for _ in range(count)]
        acceptor = Acceptor(
            name,
            listener,
            processors,
            parts.quotas,
            self.metrics,
            self._clock,
            lambda: self._room(plane),
            self._rates if plane is Plane.DATA else None,
        )
        self._acceptors.append(acceptor)
        if plane is Plane.DATA:
            self._data_acceptors.append(acceptor)

    def _processor(self, name: str, plane: Plane) -> Processor:
        processor = Processor(
            name,
            plane,
            self.planes[plane].channel,
            self._settings,
            self.metrics,
            self._clock,
            None if self._security is None else self._security.principal_of(name),
            requires_proof=plane is Plane.CONTROL and self._brokers_have_proofs,
            new_gate=self._new_gate(name),
        )
        if plane is Plane.DATA:
            processor.unsent = self.unsent
        return processor

    def open_connections(self) -> dict[str, int]:
        """Return how many connections each listener has."""
        return {
            acceptor.name: sum(len(each.connections) for each in acceptor.all_processors)
            for acceptor in self._acceptors
        }

    def _data_connections(self) -> list[ServerConnection]:
        processors = (each for acceptor in self._data_acceptors for each in acceptor.all_processors)
        return [connection for processor in processors for connection in processor.connections]

    def _limit_addresses(self, limits: Mapping[str, int]) -> None:
        for parts in self.planes.values():
            parts.quotas.override(limits)

    def _room(self, plane: Plane) -> str | None:
        _, used, limit = self._disk.descriptors()
        return why_too_few_descriptors(used, limit, int(limit * KEPT_DESCRIPTORS[plane]))


def _why_not_bound(name: str, host: str, port: int, error: OSError) -> str:
    what = f"the listener {name} cannot listen on {host or ALL_ADDRESSES}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{what}: another process listens there. Stop it (`ss -ltnp 'sport = :{port}'` names it), or give {name} "
            f"another port in `listeners`"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine does not have that address. Use one that it has, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"{what}: not permitted. Use a port of 1024 or higher"
    if isinstance(error, socket.gaierror):
        return f"{what}: the name {host!r} is not known. Use an address of this machine, or 0.0.0.0 for all of them"
    return f"{what}: {error.strerror or error}"
