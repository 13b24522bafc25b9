"""Metadata and ApiVersions: what a client asks first."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.apis import APIS
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import ApiVersion, ApiVersionsResponse, MetadataRequest


async def handle_metadata(services: Services, request: Request) -> None:
    body = request.body
    assert isinstance(body, MetadataRequest)
    request.respond(services.metadata.describe(body.topics, request.listener))


async def handle_api_versions(services: Services, request: Request) -> None:
    versions = [ApiVersion(api.key, api.min_version, api.max_version) for _, api in sorted(APIS.items())]
    request.respond(ApiVersionsResponse(ErrorCode.NONE, versions))
