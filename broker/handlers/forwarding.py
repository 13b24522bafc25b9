"""Requests that only the controller can serve; any broker forwards them (`broker/cluster/forwarding.py`).

The controller answers forwarded requests itself, or with NOT_CONTROLLER: no request is forwarded twice.

ACLs are checked at both brokers. The first check keeps refused requests, for each of which there would be another
connection, away from the controller. The second one counts if the first broker has no authorizer yet, or knows older
ACLs. (In Kafka, only the controller checks.)
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from minibroker.broker.cluster.forwarding import Sender
from minibroker.broker.handlers.access import passes_acls
from minibroker.broker.handlers.administering.elections import handle_elect_leaders
from minibroker.broker.handlers.administering.partitions import handle_create_partitions
from minibroker.broker.handlers.administering.reassignments import (
    handle_alter_partition_reassignments,
    handle_list_partition_reassignments,
)
from minibroker.broker.handlers.administering.topics import LEAST_TIMEOUT_MS, handle_create_topics, handle_delete_topics
from minibroker.broker.handlers.services import Services, answer_later, check_count
from minibroker.broker.network.dialect import Answer, BadInput, Dialect
from minibroker.broker.network.request_channel import Request, Session
from minibroker.protocol import apis
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage
from minibroker.protocol.messages import (
    EnvelopeRequest,
    EnvelopeResponse,
)
from minibroker.protocol.principal import Principal, broker_principal, parse_principal


class ControllerApi(NamedTuple):
    handle: Callable[[Services, Request, Any], Awaitable[None]]
    named: Callable[[Any], int]
    """Counts the topics and partitions that a request names."""


CONTROLLER_APIS: dict[int, ControllerApi] = {
    apis.CREATE_TOPICS.key: ControllerApi(handle_create_topics, lambda body: len(body.topics)),
    apis.DELETE_TOPICS.key: ControllerApi(
        handle_delete_topics, lambda body: max(len(body.topics), len(body.topic_ids))
    ),
    apis.CREATE_PARTITIONS.key: ControllerApi(handle_create_partitions, lambda body: len(body.topics)),
    apis.ELECT_LEADERS.key: ControllerApi(
        handle_elect_leaders, lambda body: sum(1 + len(topic.partitions) for topic in body.topic_partitions or ())
    ),
    apis.ALTER_PARTITION_REASSIGNMENTS.key: ControllerApi(
        handle_alter_partition_reassignments, lambda body: sum(1 + len(topic.partitions) for topic in body.topics)
    ),
    apis.LIST_PARTITION_REASSIGNMENTS.key: ControllerApi(
        handle_list_partition_reassignments,
        lambda body: sum(1 + len(topic.partition_indexes) for topic in body.topics or ()),
    ),
}
"""The forwarded APIs."""

MUTATING = (apis.CREATE_TOPICS, apis.DELETE_TOPICS, apis.CREATE_PARTITIONS)
"""Those with a quota for controller mutations."""


async def handle_or_forward(services: Services, request: Request, body: Any) -> None:
    """Handle the request if this broker is the controller, otherwise forward it. Raise BrokerError(INVALID_REQUEST) if
    it names too much."""
    api = CONTROLLER_APIS[request.api.key]
    check_count(services, api.named(body))
    if services.administration.is_active:
        await api.handle(services, request, body)
        return
    # One second more than the controller has, so that it can report what was not done in time.
    timeout_ms = max(body.timeout_ms, 0) + LEAST_TIMEOUT_MS

    async def forward() -> None:
        answer = await services.forwarding.request(
            request.api,
            body,
            timeout_s=timeout_ms / 1_000,
            sender=Sender(request.principal, request.host, request.client_id, not _knows_mutation_quotas(request)),
            is_wanted=lambda: not request.closed,
        )
        if answer.throttle_time_ms > 0:  # by the quota for controller mutations, which the controller keeps
            request.source.throttle(answer.throttle_time_ms / 1_000)
        request.respond(answer)

    answer_later(services, request, timeout_ms, forward)


def _knows_mutation_quotas(request: Request) -> bool:
    return request.api not in MUTATING or request.source.dialect.knows_mutation_quotas(
        request.api.key, request.api_version
    )


async def handle_envelope(services: Services, request: Request, body: EnvelopeRequest) -> None:
    """Raise BrokerError: INVALID_REQUEST for a malformed request or an API that is not forwarded;
    UNSUPPORTED_VERSION."""
    try:
        envelope = apis.decode_request_envelope(body.request_data)
        served = CONTROLLER_APIS.get(envelope.api_key)
        if served is None:
            raise InvalidMessage(f"API {envelope.api_key} is not forwarded")
        api = apis.APIS[envelope.api_key]
        if not api.min_version <= envelope.api_version <= api.max_version:
            raise BrokerError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"in an envelope: version {envelope.api_version} of {api.name}; "
                f"this broker knows {api.min_version} to {api.max_version}",
            )
        inner_body = apis.decode_request(api, envelope)
        principal = parse_principal(body.principal) if body.is_from_client else broker_principal(body.broker_id)
    except (InvalidMessage, ValueError) as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"in an envelope: {error}") from error
    inner = request.enveloped(_Enveloped(request, principal, body), api, envelope, inner_body)
    try:
        check_count(services, served.named(inner_body))
        if services.acls is None or passes_acls(services, inner):
            await served.handle(services, inner, inner_body)
    except BrokerError as error:
        inner.fail(error.code, error.detail)


class _Enveloped:
    """The source of a request that came in an envelope. Its answer goes into the envelope's."""

    def __init__(self, outer: Request, principal: Principal, envelope: EnvelopeRequest) -> None:
        self._outer = outer
        self.peer = outer.peer
        self.listener = outer.listener
        self.session = Session()
        self.session.principal = principal
        self.session.host = envelope.client_host
        self.session.is_before_mutation_quotas = envelope.is_before_mutation_quotas

    @property
    def dialect(self) -> Dialect:
        """The dialect of the forwarding broker: our own."""
        return self._outer.source.dialect

    @property
    def closed(self) -> bool:
        return self._outer.closed

    def proved_broker(self) -> None:
        """Envelopes contain no proofs."""

    def authenticated(self) -> None:
        """The client has authenticated itself to the forwarding broker."""

    @property
    def on_answer(self) -> None:
        """The forwarding broker counts the request."""
        return None

    def throttle(self, seconds: float) -> None:
        """Brokers are not throttled."""

    def introduced(self, name: str, version: str) -> None:
        """Forwarding brokers do not report the client's software."""

    def answered(self, request: Request, answer: Answer | None) -> None:
        if answer is None:  # the forwarding broker is gone
            self._outer.respond_nothing()
        else:
            self._outer.respond(EnvelopeResponse(memoryview(b"".join(answer))[4:]))

    def handled(self, *, wake: bool) -> None:
        """Only the envelope was dispatched."""

    def refused(self, bad_input: BadInput) -> None:
        """Its body was decoded at once."""

    def close_connection(self, reason: str) -> None:
        self._outer.close_connection(reason)

    def close(self) -> None:
        self._outer.close_quietly()

    def room_in_channel(self, size: int) -> None:
        """The request was never offered to the channel."""
