"""Requests that only the controller can serve; any broker forwards them (`broker/cluster/forwarding.py`).

The controller answers forwarded requests itself, or with NOT_CONTROLLER: no request is forwarded twice.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from minibroker.broker.handlers.administering.elections import handle_elect_leaders
from minibroker.broker.handlers.administering.partitions import handle_create_partitions
from minibroker.broker.handlers.administering.reassignments import (
    handle_alter_partition_reassignments,
    handle_list_partition_reassignments,
)
from minibroker.broker.handlers.administering.topics import LEAST_TIMEOUT_MS, handle_create_topics, handle_delete_topics
from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.dialect import Answer, Dialect
from minibroker.broker.network.request_channel import Request, Session
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage
from minibroker.protocol.messages import (
    EnvelopeRequest,
    EnvelopeResponse,
)
from minibroker.protocol.model import ANONYMOUS, Principal

CONTROLLER_HANDLERS: dict[int, Callable[[Services, Request, Any], Awaitable[None]]] = {
    apis.CREATE_TOPICS.key: handle_create_topics,
    apis.DELETE_TOPICS.key: handle_delete_topics,
    apis.CREATE_PARTITIONS.key: handle_create_partitions,
    apis.ELECT_LEADERS.key: handle_elect_leaders,
    apis.ALTER_PARTITION_REASSIGNMENTS.key: handle_alter_partition_reassignments,
    apis.LIST_PARTITION_REASSIGNMENTS.key: handle_list_partition_reassignments,
}
"""The forwarded APIs and the controller's handlers for them."""


async def handle_or_forward(services: Services, request: Request, body: Any) -> None:
    """Handle the request if this broker is the controller, otherwise forward it."""
    if services.administration.is_active:
        await CONTROLLER_HANDLERS[request.api.key](services, request, body)
        return
    # One second more than the controller has, so that it can report what was not done in time.
    timeout_ms = max(body.timeout_ms, 0) + LEAST_TIMEOUT_MS

    async def forward() -> None:
        request.respond(
            await services.forwarding.request(
                request.api,
                body,
                timeout_s=timeout_ms / 1_000,
                is_from_client=True,
                is_wanted=lambda: not request.closed,
            )
        )

    answer_later(services, request, timeout_ms, forward)


async def handle_envelope(services: Services, request: Request, body: EnvelopeRequest) -> None:
    """Raise BrokerError: INVALID_REQUEST for a malformed request or an API that is not forwarded;
    UNSUPPORTED_VERSION."""
    try:
        envelope = apis.decode_request_envelope(body.request_data)
        handler = CONTROLLER_HANDLERS.get(envelope.api_key)
        if handler is None:
            raise InvalidMessage(f"API {envelope.api_key} is not forwarded")
        api = apis.APIS[envelope.api_key]
        if not api.min_version <= envelope.api_version <= api.max_version:
            raise BrokerError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"in an envelope: version {envelope.api_version} of {api.name}; "
                f"this broker knows {api.min_version} to {api.max_version}",
            )
        inner_body = apis.decode_request(api, envelope)
    except InvalidMessage as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"in an envelope: {error}") from error
    source = _Enveloped(request, ANONYMOUS if body.is_from_client else Principal(body.broker_id))
    inner = request.enveloped(source, api, envelope, inner_body)
    try:
        await handler(services, inner, inner_body)
    except BrokerError as error:
        inner.fail(error.code, error.detail)


class _Enveloped:
    """The source of a request that came in an envelope. Its answer goes into the envelope's."""

    def __init__(self, outer: Request, principal: Principal) -> None:
        self._outer = outer
        self.peer = outer.peer
        self.listener = outer.listener
        self.session = Session()
        self.session.principal = principal

    @property
    def dialect(self) -> Dialect:
        """The dialect of the forwarding broker: our own."""
        return self._outer.source.dialect

    @property
    def closed(self) -> bool:
        return self._outer.closed

    def introduced(self, name: str, version: str) -> None:
        """Forwarding brokers do not report the client's software."""

    def answered(self, request: Request, answer: Answer | None) -> None:
        if answer is None:  # the forwarding broker is gone
            self._outer.respond_nothing()
        else:
            self._outer.respond(EnvelopeResponse(memoryview(b"".join(answer))[4:]))

    def handled(self, *, wake: bool) -> None:
        """Only the envelope was dispatched."""

    def close_connection(self, reason: str) -> None:
        self._outer.close_connection(reason)

    def room_in_channel(self) -> None:
        """The request was never offered to the channel."""
