"""Requests that only the controller can answer, taken to it by another broker (KIP-590, Kafka's ForwardingManager).

So a client needs to reach no particular broker, and a broker can ask for itself: the topics that are the brokers' own
are created so. Nothing is tried again here, since whoever asked knows best whether a repetition does harm.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.protocol import apis
from minibroker.protocol.connections.broker_connections import BrokerConnections
from minibroker.protocol.connections.framing import MAX_SMALL_REQUEST_BYTES
from minibroker.protocol.connections.rpc import Connection
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, NetworkError
from minibroker.protocol.messages import EnvelopeRequest, EnvelopeResponse, Message

CONNECT_TIMEOUT_S = 10.0
"""Kafka's socket.connection.setup.timeout.ms."""
LOOK_EVERY_S = 1.0
"""At whether the answer is still wanted, and whether that broker is still the controller."""
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
        self,
        api: apis.Api[Asked, Answered],
        body: Asked,
        *,
        timeout_s: float,
        is_from_client: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answered:
        """The controller's answer. Raises BrokerError: what the controller says; INVALID_REQUEST for a request that is
        too large; or NOT_CONTROLLER where it is not known, cannot be reached, did not answer, is no longer the
        controller, or where the answer is not wanted any more; then the request may have been carried out."""
        controller_id = self._metadata.controller_id
        endpoint = self._metadata.endpoint(controller_id)
        if endpoint is None:
            raise self._no_controller(api, "no live broker is known as the controller")
        request_data = apis.encode_request(api, 0, None, body)[4:]
        if len(request_data) > MAX_SMALL_REQUEST_BYTES - ENVELOPE_BYTES:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"a request for {api.name} of {len(request_data)} bytes is too large to be forwarded to the "
                "controller: ask the controller itself, or for fewer topics at a time",
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
                    # It may have lain in the socket while this broker was stopped: newer ones may have been granted.
                    raise self._no_controller(api, "whoever asked is gone")
                envelope = EnvelopeRequest(self._broker_id, is_from_client, memoryview(request_data))
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
        """Raises as `Connection.request`, and NetworkError where there is no use in waiting any longer."""
        answer = connection.send(apis.ENVELOPE, envelope, timeout_s=timeout_s)
        while not (await asyncio.wait([answer], timeout=LOOK_EVERY_S))[0]:
            if self._metadata.controller_id != controller_id:
                raise NetworkError(f"broker {controller_id} has not answered, and is not the controller any more")
            if not is_wanted():
                raise NetworkError("whoever asked is gone")
        return answer.result()

    def _no_controller(self, api: apis.Api[Any, Any], reason: str) -> BrokerError:
        return BrokerError(
            ErrorCode.NOT_CONTROLLER,
            f"broker {self._broker_id} could not forward {api.name} to the controller: {reason}",
        )
