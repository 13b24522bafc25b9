"""How commands connect to the brokers that they look at: with the user's credentials, or as one of the brokers.

The commands for a local cluster have its brokers' secret, as its directory belongs to the user. So they find out which
brokers serve whatever the listeners ask of clients, before there is a user, and after a password has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from ssl import CERT_NONE, PROTOCOL_TLS_CLIENT, SSLContext
from typing import Protocol

from minibroker.client.cluster.authentication import open_authenticated
from minibroker.client.security import UNPROTECTED, Protection
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.connections.tls import TlsNetwork
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import Network
from minibroker.protocol.world.real import RealNetwork, RealWorld

CLIENT_ID = "minibroker-cli"

Address = tuple[str, int]


class Access(Protocol):
    async def open(self, address: Address, timeout_s: float) -> Connection:
        """Return a connection that may be used. Raises MinibrokerError."""
        ...


class AsClient:
    """With the user's settings (`--command-config`), or as anybody."""

    def __init__(self, protection: Protection = UNPROTECTED) -> None:
        self._protection = protection

    async def open(self, address: Address, timeout_s: float) -> Connection:
        tls, credentials = self._protection
        network: Network = RealNetwork()
        if tls is not None:
            network = TlsNetwork(network, connecting=lambda: tls)
        connection, _ = await open_authenticated(
            network, *address, credentials, RealWorld().random, client_id=CLIENT_ID, timeout_s=timeout_s
        )
        return connection


ANYBODY = AsClient()


class AsBroker:
    """As the broker itself at each of these addresses, by the brokers' secret. Its certificate is not verified, since
    the connection does not leave the host, and both sides prove that they know the secret."""

    def __init__(self, secret_file: Path, ids: Mapping[Address, int], is_encrypted: bool) -> None:
        self._secret_file = secret_file
        self._ids = ids
        self._network: Network = RealNetwork()
        if is_encrypted:
            tls = SSLContext(PROTOCOL_TLS_CLIENT)
            tls.check_hostname = False
            tls.verify_mode = CERT_NONE
            self._network = TlsNetwork(self._network, connecting=lambda: tls)

    async def open(self, address: Address, timeout_s: float) -> Connection:
        broker_id = self._ids.get(address)
        if broker_id is None:
            raise NetworkError(f"{address[0]}:{address[1]} is no broker of this cluster")
        try:
            secret = self._secret_file.read_bytes().strip()
        except OSError as error:
            raise NetworkError(f"{self._secret_file} cannot be read: {error.strerror}") from error
        connections = BrokerConnections(RealWorld(), broker_id, secret, lambda *_: self._network)
        return await connections.open(
            broker_id, *address, client_id=CLIENT_ID, connect_timeout_s=timeout_s, request_timeout_s=timeout_s
        )
