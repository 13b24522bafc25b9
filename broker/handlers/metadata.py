"""Metadata and ApiVersions: what a client asks first."""

from broker.handlers.services import Services
from broker.network.request_channel import Request
from protocol.apis import APIS
from protocol.errors import ErrorCode
from protocol.messages import ApiVersion, ApiVersionsResponse, MetadataRequest


async def handle_metadata(services: Services, request: Request) -> None:
    body = request.body
    assert isinstance(body, MetadataRequest)
    request.respond(services.metadata.describe(body.topics, request.listener))


async def handle_api_versions(services: Services, request: Request) -> None:
    versions = [ApiVersion(api.key, api.min_version, api.max_version) for _, api in sorted(APIS.items())]
    request.respond(ApiVersionsResponse(ErrorCode.NONE, versions))
