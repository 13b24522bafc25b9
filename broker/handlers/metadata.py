"""Metadata, DescribeCluster and ApiVersions: what a client asks first, and again when a leader dies.

librdkafka asks in the millisecond in which its connection breaks, before any successor can have been elected. Told of
the dead leader it would rest for a second, and told of none for a tenth of one, at best. So where this broker has just
lost that leader, too, the answer waits for the election, which takes less.
"""

import re
from collections.abc import Callable, Collection
from functools import partial

from minibroker.broker.handlers.administering.topics import may_change
from minibroker.broker.handlers.authorized_operations import ON_CLUSTER, ON_TOPIC
from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.purgatory import DelayedOperation
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    BROKER_ENDPOINTS,
    NO_OPERATIONS,
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    MetadataRequest,
    MetadataResponse,
    MetadataTopic,
)

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""As KIP-511 has it."""

ELECTION_MS = 300
"""For so long an answer waits for one: a few times what it takes."""
ELECTIONS = "(elections)"
"""What answers that wait for one are watched under, and no topic is called."""
_MOST_TOPICS = 100
"""That a request which may wait names. Those for more, or for all, are of tools, and cost too much to be answered many
at a time."""


class DelayedMetadata(DelayedOperation):
    """Completes when none of the topics is led by a broker that was just lost. It is checked whenever anything is told
    of leaders: so each topic is looked at until it is settled, and not again."""

    def __init__(
        self, topics: list[str], led_by_lost: Callable[[list[str]], list[str]], respond: Callable[[], None]
    ) -> None:
        super().__init__(ELECTION_MS)
        self._topics = topics
        self._led_by_lost = led_by_lost
        self._respond = respond

    def try_complete(self) -> bool:
        while self._topics:
            if self._led_by_lost(self._topics[-1:]):
                return False
            self._topics.pop()
        return self.force_complete()

    def on_complete(self) -> None:
        self._respond()

    def on_expiration(self) -> None:
        """The answer names no leader."""


async def handle_metadata(services: Services, request: Request) -> None:
    """A topic that does not exist and may be created is LEADER_NOT_AVAILABLE: who asks again finds it."""
    body = request.body
    assert isinstance(body, MetadataRequest)

    def led_by_lost(topics: list[str]) -> list[str]:
        return services.metadata.led_by(services.replicas.lost_leaders(), topics)

    def answer(created: Collection[str]) -> None:
        lost = services.replicas.lost_leaders() if request.source.dialect.rests_on_named_leaders else ()
        described = _described(services, request, body, lost)
        for topic in _missing(described):
            if topic.name in created:
                topic.error_code = ErrorCode.LEADER_NOT_AVAILABLE
        request.respond(described)

    created: Collection[str] = ()
    if body.topics and body.allow_auto_topic_creation and services.auto_topic_creation.is_enabled:
        # At once: the next request of the connection does not wait for an answer that does, and may delete topics.
        described = _described(services, request, body, ())
        created = [topic.name for topic in _missing(described) if may_change(topic.name, request)]
        services.auto_topic_creation.create_soon(created)
    asked = body.topics or []
    may_wait = request.source.dialect.rests_on_named_leaders and len(asked) <= _MOST_TOPICS
    if may_wait and (topics := led_by_lost(asked)):
        in_turn = partial(services.metadata_answers.call, partial(answer, created))
        services.topic_purgatory.try_complete_else_watch(DelayedMetadata(topics, led_by_lost, in_turn), [ELECTIONS])
    else:
        answer(created)


def _described(
    services: Services, request: Request, body: MetadataRequest, lost_leaders: Collection[int]
) -> MetadataResponse:
    described = services.metadata.describe(
        body.topics,
        request.listener,
        body.topic_ids,
        with_departed=request.source.dialect.drops_unnamed_brokers,
        lost_leaders=lost_leaders,
    )
    if body.include_topic_authorized_operations:
        for topic in described.topics:
            topic.topic_authorized_operations = ON_TOPIC
    if body.include_cluster_authorized_operations:
        described.cluster_authorized_operations = ON_CLUSTER
    return described


def _missing(described: MetadataResponse) -> list[MetadataTopic]:
    return [topic for topic in described.topics if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


async def handle_api_versions(services: Services, request: Request) -> None:
    """Raises BrokerError(INVALID_REQUEST) for a client software name or version that is none."""
    body = request.body
    assert isinstance(body, ApiVersionsRequest)
    name, version = body.client_software_name, body.client_software_version
    if name or version:
        for text in (name, version):
            if _SOFTWARE.fullmatch(text) is None:
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST, f"client software name or version {text!r}: letters, digits, - and ."
                )
        request.source.introduced(name, version)
    request.respond(ApiVersionsResponse(ErrorCode.NONE, list(request.source.dialect.api_versions)))


async def handle_describe_cluster(services: Services, request: Request) -> None:
    """Raises BrokerError(INVALID_REQUEST) where controllers are asked for: each of them is a broker."""
    body = request.body
    assert isinstance(body, DescribeClusterRequest)
    if body.endpoint_type != BROKER_ENDPOINTS:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"endpoint type {body.endpoint_type}: there are brokers (1) alone")
    known = services.metadata.describe((), request.listener)
    request.respond(
        DescribeClusterResponse(
            0,
            ErrorCode.NONE,
            cluster_id=known.cluster_id or "",
            controller_id=known.controller_id,
            brokers=[DescribeClusterBroker(b.node_id, b.host, b.port, b.rack) for b in known.brokers],
            cluster_authorized_operations=ON_CLUSTER if body.include_cluster_authorized_operations else NO_OPERATIONS,
        )
    )
