"""Requests that only the controller can answer, taken to it by another broker (KIP-590, Kafka's ForwardingManager).

So a client needs to reach no particular broker, and a broker can ask for itself: the topics that are the brokers' own
are created so. Nothing is tried again here, since whoever asked knows best whether a repetition does harm.
"""

from typing import Any, TypeVar

from minibroker.broker.metadata_cache import MetadataCache
from minibroker.protocol import apis
from minibroker.protocol.broker_connections import BrokerConnections
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.messages import EnvelopeRequest, Message

CONNECT_TIMEOUT_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms."""
ENVELOPE_BYTES = 256
"""More than an envelope adds to its request."""

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)


class ForwardingManager:
    """Of broker `broker_id`. Each request has a connection of its own: they are few, and the controller may change."""

    def __init__(self, broker_id: int, metadata: MetadataCache, connections: BrokerConnections) -> None:
        self._broker_id = broker_id
        self._metadata = metadata
        self._connections = connections

    async def request(
        self, api: apis.Api[Asked, Answered], body: Asked, *, timeout_s: float, is_from_client: bool = False
    ) -> Answered:
        """The controller's answer. Raises BrokerError: what the controller says, or NOT_CONTROLLER where it is not
        known, cannot be reached, or did not answer; then the request may have been carried out."""
        controller_id = self._metadata.controller_id
        endpoint = self._metadata.endpoint(controller_id)
        if endpoint is None:
            raise self._no_controller(api, "no live broker is known as the controller")
        request_data = apis.encode_request(api, 0, None, body)[4:]
        if len(request_data) > MAX_SMALL_REQUEST_BYTES - ENVELOPE_BYTES:
            raise self._no_controller(api, f"{len(request_data)} bytes are too many to be forwarded to it")
        try:
            connection = await self._connections.open(
                controller_id,
                endpoint.host,
                endpoint.port,
                client_id=f"broker-{self._broker_id}-forwarding",
                connect_timeout_s=min(CONNECT_TIMEOUT_S, timeout_s),
                request_timeout_s=timeout_s,
            )
            try:
                envelope = EnvelopeRequest(self._broker_id, is_from_client, memoryview(request_data))
                answer = await connection.request(apis.ENVELOPE, envelope, timeout_s=timeout_s)
            finally:
                connection.close("the request was forwarded")
        except (NetworkError, InvalidMessage) as error:
            raise self._no_controller(api, str(error)) from error
        return apis.decode_response(api, apis.decode_response_envelope(answer.response_data))

    def _no_controller(self, api: apis.Api[Any, Any], reason: str) -> BrokerError:
        return BrokerError(
            ErrorCode.NOT_CONTROLLER,
            f"broker {self._broker_id} could not forward {api.name} to the controller: {reason}",
        )
