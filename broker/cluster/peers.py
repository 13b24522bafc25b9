"""Requests to the other brokers of the cluster, over one kept connection to each."""

import asyncio
from typing import TypeVar

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.protocol import apis
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.messages import Message

CONNECT_TIMEOUT_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms."""

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)


class Peers:
    """The brokers that broker `broker_id` sends requests to. `purpose` becomes part of its client id."""

    def __init__(self, broker_id: int, metadata: MetadataCache, connections: BrokerConnections, purpose: str) -> None:
        self._client_id = f"broker-{broker_id}-{purpose}"
        self._metadata = metadata
        self._connections = connections
        self._opened: dict[int, Connection] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def request(self, peer_id: int, api: apis.Api[Asked, Answered], body: Asked, *, timeout_s: float) -> Answered:
        """Return the broker's answer. Answers may arrive in another order than their requests.

        Raises NetworkError, BrokerError, InvalidMessage. After NetworkError the request may have been carried out."""
        connection = await self._connection(peer_id, timeout_s)
        return await connection.request(api, body, timeout_s=timeout_s)

    async def _connection(self, peer_id: int, timeout_s: float) -> Connection:
        async with self._opening.setdefault(peer_id, asyncio.Lock()):
            endpoint = self._metadata.endpoint(peer_id)
            if endpoint is None:
                raise NetworkError(f"broker {peer_id} is not alive, as far as this broker knows")
            opened = self._opened.get(peer_id)
            address = f"{endpoint.host}:{endpoint.port}"
            if opened is not None and not opened.closed and opened.address == address:
                return opened
            if opened is not None:
                opened.close("the broker has another address now")
            setup_s = min(CONNECT_TIMEOUT_S, timeout_s)
            connection = self._opened[peer_id] = await self._connections.open(
                peer_id,
                endpoint.host,
                endpoint.port,
                client_id=self._client_id,
                connect_timeout_s=setup_s,
                request_timeout_s=setup_s,
            )
            return connection

    def close(self) -> None:
        for connection in self._opened.values():
            connection.close("this broker stops")
        self._opened.clear()
