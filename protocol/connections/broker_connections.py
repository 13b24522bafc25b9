"""Connections between brokers: the controller's for its orders and followers' for their fetches.

Both sides of such a connection prove which broker they are before it is used (`broker_proof`).
"""

import asyncio

from minibroker.protocol.apis import BROKER_AUTHENTICATE, BROKER_HANDSHAKE
from minibroker.protocol.connections.broker_proof import Handshake, is_same
from minibroker.protocol.connections.keepalive import OF_BROKERS
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, InvalidMessage, NetworkError
from minibroker.protocol.messages import (
    PROOF_BYTES,
    BrokerAuthenticateRequest,
    BrokerAuthenticateResponse,
    BrokerHandshakeRequest,
)
from minibroker.protocol.world import World


class NotTrusted(NetworkError):
    """One side does not accept the other as the expected broker. The text has the remedy."""


class BrokerConnections:
    """Connections of broker `broker_id`. Without a secret, which then no broker has, nothing is proved."""

    def __init__(self, world: World, broker_id: int, secret: bytes | None) -> None:
        self._network = world.network
        self._random = world.random
        self._broker_id = broker_id
        self._secret = secret

    async def open(
        self, peer_id: int, host: str, port: int, *, client_id: str, connect_timeout_s: float, request_timeout_s: float
    ) -> Connection:
        """Connect to broker `peer_id` and prove the identities. Raises NetworkError; NotTrusted if the other side is
        not that broker.

        `request_timeout_s` limits the handshake, which waits for a request handler like every request."""
        connection = await open_connection(
            self._network, host, port, client_id=client_id, timeout_s=connect_timeout_s, patience=OF_BROKERS
        )
        if self._secret is None:
            return connection
        try:
            await self._prove(connection, self._secret, peer_id, request_timeout_s)
        except BaseException:
            connection.close("the brokers have not proved who they are")
            raise
        return connection

    async def _prove(self, connection: Connection, secret: bytes, peer_id: int, timeout_s: float) -> None:
        where = f"broker {peer_id} at {connection.address}"
        nonce = self._random.randbytes(PROOF_BYTES)
        try:
            answer = await connection.request(
                BROKER_HANDSHAKE, BrokerHandshakeRequest(self._broker_id, peer_id, nonce), timeout_s=timeout_s
            )
        except (BrokerError, InvalidMessage) as error:
            raise NotTrusted(f"{where} refuses the handshake of brokers: {error}") from error
        handshake = Handshake(self._broker_id, peer_id, nonce, answer.nonce)
        if not is_same(answer.proof, handshake.accepting_proof(secret)):
            raise NotTrusted(
                f"{where} does not have this broker's secret: give all brokers of the cluster the same "
                f"broker.secret.file (or broker.secret), and restart those that had another"
            )
        proof = BrokerAuthenticateRequest(handshake.connecting_proof(secret))
        # The response is not awaited: the peer handles requests in order, so the first one may follow at once.
        connection.send(BROKER_AUTHENTICATE, proof, timeout_s=timeout_s).add_done_callback(_heard)


def _heard(answer: "asyncio.Future[BrokerAuthenticateResponse]") -> None:
    """Ignore an error: if the proof is rejected, every later request fails too, with an error that says why."""
    if not answer.cancelled():
        answer.exception()
