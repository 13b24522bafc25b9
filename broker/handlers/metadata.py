"""Metadata, DescribeCluster and ApiVersions: what a client asks first."""

import re

from minibroker.broker.handlers.services import Services
from minibroker.broker.handlers.topics import may_change
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    BROKER_ENDPOINTS,
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    MetadataRequest,
)

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""As KIP-511 has it."""


async def handle_metadata(services: Services, request: Request) -> None:
    """A topic that does not exist and may be created is LEADER_NOT_AVAILABLE: who asks again finds it."""
    body = request.body
    assert isinstance(body, MetadataRequest)
    answer = services.metadata.describe(
        body.topics, request.listener, body.topic_ids, with_departed=request.source.dialect.drops_unnamed_brokers
    )
    if body.allow_auto_topic_creation and services.auto_topic_creation.is_enabled:
        missing = [
            topic
            for topic in answer.topics
            if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and may_change(topic.name, request)
        ]
        services.auto_topic_creation.create_soon([topic.name for topic in missing])
        for topic in missing:
            topic.error_code = ErrorCode.LEADER_NOT_AVAILABLE
    request.respond(answer)


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
        )
    )
