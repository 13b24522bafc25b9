"""Connections between brokers: the controller's for its orders and followers' for their fetches.

Both sides of such a connection prove which broker they are before it is used (`broker_proof`).
"""

import asyncio
from collections.abc import Callable

from minibroker.protocol.apis import (
    BROKER_AUTHENTICATE,
    BROKER_HANDSHAKE,
    decode_response,
    decode_response_envelope,
    encode_request,
)
from minibroker.protocol.connections.broker_proof import Handshake, is_same
from minibroker.protocol.connections.framing import FrameReader, FrameTooLarge
from minibroker.protocol.connections.keepalive import OF_BROKERS
from minibroker.protocol.connections.rpc import Connection, open_connection
from minibroker.protocol.errors import BrokerError, InvalidMessage, NetworkError
from minibroker.protocol.messages import (
    PROOF_BYTES,
    BrokerAuthenticateRequest,
    BrokerAuthenticateResponse,
    BrokerHandshakeRequest,
    Buffer,
)
from minibroker.protocol.world import Network, World


class NotTrusted(NetworkError):
    """One side does not accept the other as the expected broker. The text has the remedy."""


class BrokerConnections:
    """Connections of broker `broker_id`. Without a secret, which then no broker has, nothing is proved. `network_of`
    returns the network for a peer's id, host, port and, if it is known, the name of its listener."""

    def __init__(
        self,
        world: World,
        broker_id: int,
        secret: bytes | None,
        network_of: Callable[[int, str, int, str | None], Network] | None = None,
    ) -> None:
        self._network_of = network_of or (lambda *_: world.network)
        self._random = world.random
        self._broker_id = broker_id
        self._secret = secret

    async def open(
        self,
        peer_id: int,
        host: str,
        port: int,
        *,
        client_id: str,
        connect_timeout_s: float,
        request_timeout_s: float,
        listener: str | None = None,
    ) -> Connection:
        """Connect to broker `peer_id` and prove the identities. Raises NetworkError; NotTrusted if the other side is
        not that broker.

        `request_timeout_s` limits the handshake, which waits for a request handler like every request."""
        connection = await open_connection(
            self._network_of(peer_id, host, port, listener),
            host,
            port,
            client_id=client_id,
            timeout_s=connect_timeout_s,
            patience=OF_BROKERS,
        )
        if self._secret is None:
            return connection
        try:
            await self._prove(connection, self._secret, peer_id, request_timeout_s)
        except BaseException:
            connection.close("the brokers have not proved who they are")
            raise
        return connection

    def silent_proof(self, peer_id: int) -> "SilentProof | None":
        """Return the proof for a connection to broker `peer_id` that serves no requests; None without a secret."""
        if self._secret is None:
            return None
        # A nonce protects the side that checks a proof, and this side checks none.
        return SilentProof(self._broker_id, peer_id, self._secret, bytes(PROOF_BYTES))

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


class SilentProof:
    """Proves this broker over a connection that serves no requests (crash detection's), without waiting for anything.

    Such a connection looks like a stranger's, who keeps others out, unless it proves the contrary. The identity of the
    peer does not matter: it learns nothing but a proof for this connection. Sans-I/O: `hello` is sent first, and then
    the bytes that `received` returns.
    """

    def __init__(self, broker_id: int, peer_id: int, secret: bytes, nonce: bytes) -> None:
        self._ids = broker_id, peer_id
        self._secret = secret
        self._nonce = nonce
        self._reader: FrameReader | None = FrameReader(lambda _: 0)

    def hello(self) -> Buffer:
        return encode_request(BROKER_HANDSHAKE, 0, None, BrokerHandshakeRequest(*self._ids, self._nonce))

    def received(self, data: bytes) -> Buffer:
        """Return the bytes to send now. Whatever is no answer to the handshake ends the attempt."""
        if self._reader is None:
            return b""
        buffer = self._reader.get_buffer()
        try:
            if len(data) > len(buffer):
                raise InvalidMessage("more than an answer")
            buffer[: len(data)] = data
            frames = self._reader.buffer_updated(len(data))
            if not frames:
                return b""
            answer = decode_response(BROKER_HANDSHAKE, decode_response_envelope(frames[0]))
        except (BrokerError, InvalidMessage, FrameTooLarge):
            self._reader = None
            return b""
        self._reader = None
        handshake = Handshake(*self._ids, self._nonce, answer.nonce)
        proof = BrokerAuthenticateRequest(handshake.connecting_proof(self._secret))
        return encode_request(BROKER_AUTHENTICATE, 1, None, proof)


def _heard(answer: "asyncio.Future[BrokerAuthenticateResponse]") -> None:
    """Ignore an error: if the proof is rejected, every later request fails too, with an error that says why."""
    if not answer.cancelled():
        answer.exception()
