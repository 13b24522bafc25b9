"""Forwards requests that only the controller can answer (KIP-590, Kafka's ForwardingManager).

Clients can therefore send them to any broker, and a broker can send its own: it creates the internal topics in this
way. Nothing is retried here, because only the sender knows whether a repetition does harm.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.protocol import apis
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.messages import EnvelopeRequest, EnvelopeResponse, Message
from minibroker.protocol.principal import ANONYMOUS, Principal

CONNECT_TIMEOUT_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms."""
LOOK_EVERY_S = 1.0
"""Time between checks whether the answer is still wanted and the broker is still the controller."""
ENVELOPE_BYTES = 256
"""Upper bound of the bytes that an envelope adds to its request."""


class Sender(NamedTuple):
    """The client that has sent a request."""

    principal: Principal
    host: str
    client_id: str | None
    is_before_mutation_quotas: bool = False
    """It does not know THROTTLING_QUOTA_EXCEEDED."""


_NOBODY = Sender(ANONYMOUS, "", None)

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)


class ForwardingManager:
    """Forwards the requests of broker `broker_id`. Each has a connection of its own: they are few, and the controller
    may change."""

    def __init__(self, broker_id: int, metadata: MetadataCache, connections: BrokerConnections) -> None:
        self._broker_id = broker_id
        self._metadata = metadata
        self._connections = connections

    async def request(
        self,
        api: apis.Api[Asked, Answered],
        body: Asked,
        *,
        timeout_s: float,
        sender: Sender | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answered:
        """Return the controller's answer. `sender`: the client that has sent the request; None: it is this broker's
        own.

        Raises BrokerError: the controller's error; INVALID_REQUEST if the request is too large; or NOT_CONTROLLER if
        the controller is unknown, unreachable, does not answer or is no longer the controller, or if the answer is no
        longer wanted. After NOT_CONTROLLER, the request may have been carried out.
        """
        controller_id = self._metadata.controller_id
        endpoint = self._metadata.endpoint(controller_id)
        if endpoint is None:
            raise self._no_controller(api, "no live broker is known as the controller")
        principal, host, client_id, is_before_mutation_quotas = sender or _NOBODY
        request_data = apis.encode_request(api, 0, client_id, body)[4:]
        if len(request_data) > MAX_SMALL_REQUEST_BYTES - ENVELOPE_BYTES - len(str(principal).encode()):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"a request for {api.name} of {len(request_data)} bytes is too large to be forwarded to the "
                "controller: send it to the controller itself, or name fewer topics at a time",
            )
        setup_s = min(CONNECT_TIMEOUT_S, timeout_s)
        try:
            connection = await self._connections.open(
                controller_id,
                endpoint.host,
                endpoint.port,
                client_id=f"broker-{self._broker_id}-forwarding",
                connect_timeout_s=setup_s,
                request_timeout_s=setup_s,
            )
            try:
                if not is_wanted():
                    # The request may have waited in the socket while this broker was suspended, and a newer one may
                    # have been granted.
                    raise self._no_controller(api, "the client has disconnected")
                envelope = EnvelopeRequest(
                    self._broker_id,
                    sender is not None,
                    memoryview(request_data),
                    str(principal),
                    host,
                    is_before_mutation_quotas,
                )
                answer = await self._ask(connection, envelope, controller_id, timeout_s, is_wanted)
            finally:
                connection.close("the request was forwarded")
            return apis.decode_response(api, apis.decode_response_envelope(answer.response_data))
        except (NetworkError, InvalidMessage) as error:
            raise self._no_controller(api, str(error)) from error

    async def _ask(
        self,
        connection: Connection,
        envelope: EnvelopeRequest,
        controller_id: int,
        timeout_s: float,
        is_wanted: Callable[[], bool],
    ) -> EnvelopeResponse:
        """Raise as `Connection.request` does, and NetworkError once waiting is useless."""
        answer = connection.send(apis.ENVELOPE, envelope, timeout_s=timeout_s)
        while not (await asyncio.wait([answer], timeout=LOOK_EVERY_S))[0]:
            if self._metadata.controller_id != controller_id:
                raise NetworkError(f"broker {controller_id} has not answered and is no longer the controller")
            if not is_wanted():
                raise NetworkError("the client has disconnected")
        return answer.result()

    def _no_controller(self, api: apis.Api[Any, Any], reason: str) -> BrokerError:
        return BrokerError(
            ErrorCode.NOT_CONTROLLER,
            f"broker {self._broker_id} could not forward {api.name} to the controller: {reason}",
        )
