"""Metadata, DescribeCluster and ApiVersions: the first requests of a client, repeated when a leader dies.

librdkafka asks in the millisecond in which its connection breaks, before any successor can have been elected. If the
answer named the dead leader, it would pause for a second; if it named none, for at least a tenth of a second. If this
broker has just lost the leader as well, or has heard that it is gone, the answer therefore waits for the election,
which is shorter. Our own client asks again soon, so it waits for less time (`Dialect.election_wait_ms`): some
partitions may have their leaders already.

A client asks a broker that has just started, too, which knows no other broker until the controller's first request
arrives. If an answer names no brokers, librdkafka drops all that it knows, and with them its last connection: it stands
still until the process is restarted. Kafka's clients therefore wait for that request; if it does not come, their
connection is closed, and they ask another broker. An answer without brokers is also a wrong one to administrators.
"""

import re
from collections.abc import Callable, Collection
from functools import partial

from minibroker.broker.cluster.metadata_cache import MetadataCache
from minibroker.broker.handlers.administering.topics import may_change
from minibroker.broker.handlers.services import Services, Steps, respond_sized
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.purgatory import DelayedOperation
from minibroker.broker.scheduling.slices import finish_at_once
from minibroker.protocol.acls import SUPPORTED_BITS, AclResourceType
from minibroker.protocol.apis import FINALIZED_FEATURES, FINALIZED_FEATURES_EPOCH, SUPPORTED_FEATURES
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
)

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""The rule of KIP-511."""

ELECTIONS = "(elections)"
"""The key under which answers wait for an election; no topic has this name."""
_MOST_TOPICS = 100
"""The maximum number of topics of a request that may wait. Requests for more topics come from tools, and are too
expensive to answer many at a time."""
FIRST_NEWS_MS = 5_000
"""The maximum time that a client waits for a broker that the controller has not told of the cluster yet. The controller
usually does so within milliseconds of the registration."""


class DelayedMetadata(DelayedOperation):
    """Completes when none of the topics awaits the election of a leader. It is checked on each change of leaders, and
    drops each topic once that one is settled."""

    def __init__(
        self,
        most_ms: int,
        topics: list[str],
        awaiting_elections: Callable[[list[str]], list[str]],
        respond: Callable[[], None],
    ) -> None:
        super().__init__(most_ms)
        self._topics = topics
        self._awaiting_elections = awaiting_elections
        self._respond = respond

    def try_complete(self) -> bool:
        while self._topics:
            if self._awaiting_elections(self._topics[-1:]):
                return False
            self._topics.pop()
        return self.force_complete()

    def on_complete(self) -> None:
        self._respond()


class AwaitsFirstNews(DelayedOperation):
    """Completes when this broker can describe these topics; None: all of them."""

    def __init__(
        self, metadata: MetadataCache, topics: Collection[str] | None, answer: Callable[[], None], request: Request
    ) -> None:
        super().__init__(FIRST_NEWS_MS)
        self._metadata = metadata
        self._topics = topics
        self._answer = answer
        self._request = request

    def try_complete(self) -> bool:
        return self._metadata.has_an_answer(self._topics) and self.force_complete()

    def on_complete(self) -> None:
        if self._metadata.has_an_answer(self._topics):
            self._answer()
        else:
            self._request.close_connection(
                f"it asked for the cluster's brokers, and no controller has named them within {FIRST_NEWS_MS} ms"
            )
            self._request.respond_nothing()


def _once_known(
    services: Services, request: Request, topics: Collection[str] | None, answer: Callable[[], None]
) -> None:
    """Answer at once, or when this broker has heard of the cluster."""
    if services.metadata.has_an_answer(topics) or not request.source.dialect.drops_unnamed_brokers:
        answer()
    else:
        waiting = AwaitsFirstNews(services.metadata, topics, partial(services.metadata_answers.call, answer), request)
        services.topic_purgatory.try_complete_else_watch(waiting, [ELECTIONS])


async def handle_metadata(services: Services, request: Request, body: MetadataRequest) -> None:
    """Answer with the topics' metadata. A missing topic that may be created is LEADER_NOT_AVAILABLE until it exists."""
    _once_known(services, request, body.topics, partial(_answer_metadata, services, request, body))


def _answer_metadata(services: Services, request: Request, body: MetadataRequest) -> None:
    def awaiting_elections(topics: list[str]) -> list[str]:
        return services.metadata.awaiting_elections(services.replicas.fetchers.lost_leaders(), topics)

    def answer() -> None:
        size = services.metadata.size_of_answer(body.topics, body.topic_ids)
        respond_sized(services, request, size, _described(services, request, body, created))

    created: frozenset[str] = frozenset()
    if body.topics and body.allow_auto_topic_creation and services.auto_topic_creation.is_enabled:
        # at once: the connection's next request does not wait for a delayed answer, and may delete topics
        names = [name for name in services.metadata.missing(body.topics) if may_change(name, request)]
        services.auto_topic_creation.create_soon(names)
        created = frozenset(names)
    asked = body.topics or []
    wait_ms = request.source.dialect.election_wait_ms if len(asked) <= _MOST_TOPICS else 0
    if wait_ms and (topics := awaiting_elections(asked)):
        in_turn = partial(services.metadata_answers.call, answer)
        waiting = DelayedMetadata(wait_ms, topics, awaiting_elections, in_turn)
        services.topic_purgatory.try_complete_else_watch(waiting, [ELECTIONS])
    else:
        answer()


def _described(services: Services, request: Request, body: MetadataRequest, created: frozenset[str]) -> Steps:
    lost_leaders = services.replicas.fetchers.lost_leaders() if request.source.dialect.rests_on_named_leaders else ()
    described = yield from services.metadata.describe(
        body.topics,
        request.listener,
        body.topic_ids,
        with_departed=request.source.dialect.drops_unnamed_brokers,
        lost_leaders=lost_leaders,
    )
    for topic in described.topics:
        if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and topic.name in created:
            topic.error_code = ErrorCode.LEADER_NOT_AVAILABLE
        if body.include_topic_authorized_operations:
            topic.topic_authorized_operations = SUPPORTED_BITS[AclResourceType.TOPIC]
    if body.include_cluster_authorized_operations:
        described.cluster_authorized_operations = SUPPORTED_BITS[AclResourceType.CLUSTER]
    return described


async def handle_api_versions(services: Services, request: Request, body: ApiVersionsRequest) -> None:
    """Raise BrokerError(INVALID_REQUEST) for an invalid client software name or version."""
    name, version = body.client_software_name, body.client_software_version
    if name or version:
        for text in (name, version):
            if _SOFTWARE.fullmatch(text) is None:
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST, f"client software name or version {text!r}: letters, digits, - and ."
                )
        request.source.introduced(name, version)
    request.respond(
        ApiVersionsResponse(
            ErrorCode.NONE,
            list(request.source.dialect.api_versions),
            SUPPORTED_FEATURES,
            FINALIZED_FEATURES_EPOCH,
            FINALIZED_FEATURES,
        )
    )


async def handle_describe_cluster(services: Services, request: Request, body: DescribeClusterRequest) -> None:
    """Raise BrokerError(INVALID_REQUEST) if controllers are requested: every controller is a broker."""
    if body.endpoint_type != BROKER_ENDPOINTS:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"endpoint type {body.endpoint_type}: only brokers (1) exist")

    def answer() -> None:
        known = finish_at_once(services.metadata.describe((), request.listener))
        request.respond(
            DescribeClusterResponse(
                0,
                ErrorCode.NONE,
                cluster_id=known.cluster_id or "",
                controller_id=known.controller_id,
                brokers=[DescribeClusterBroker(b.node_id, b.host, b.port, b.rack) for b in known.brokers],
                cluster_authorized_operations=SUPPORTED_BITS[AclResourceType.CLUSTER]
                if body.include_cluster_authorized_operations
                else NO_OPERATIONS,
            )
        )

    _once_known(services, request, (), answer)
