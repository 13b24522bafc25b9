"""Checks a request against the ACLs before its handler runs."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ADD_PARTITIONS_TO_TXN

BROKERS_SINCE = 4
"""The version of AddPartitionsToTxn in Kafka's protocol from which on only brokers send it (KIP-890)."""


def passes_acls(services: Services, request: Request) -> bool:
    """Return whether the request is to be handled, without the parts that the sender may not touch; otherwise it is
    answered. Raises BrokerError if it is refused as a whole."""
    assert services.acls is not None
    body = request.body
    outcome = services.acls.check(
        request.principal,
        request.host,
        request.api,
        body,
        request.session.inquiries,
        is_from_user=_is_from_user(request),
    )
    if outcome is None:
        return True
    if isinstance(body, m.ProduceRequest) and body.acks == 0:
        # Its client notices nothing else. The records that it may write are appended nevertheless.
        request.close_connection("a produce request with acks=0 names topics that its principal may not write")
        if isinstance(outcome, m.Message):
            request.respond_nothing()
    elif isinstance(outcome, m.Message):
        request.respond(outcome)
    if isinstance(outcome, m.Message):
        return False
    request.amendment = outcome
    return True


def _is_from_user(request: Request) -> bool:
    """Return whether AddPartitionsToTxn comes from a producer. Our own producers do not send it."""
    if request.api is not ADD_PARTITIONS_TO_TXN:
        return True
    return not request.source.dialect.reads_columns and request.api_version < BROKERS_SINCE
