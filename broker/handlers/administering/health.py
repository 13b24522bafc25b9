"""DescribeHealth: what a broker knows of its own state."""

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import DescribeHealthRequest, DescribeHealthResponse


async def handle_describe_health(services: Services, request: Request, _body: DescribeHealthRequest) -> None:
    contact = services.zookeeper_contact()
    request.respond(
        DescribeHealthResponse(
            0,
            ErrorCode.NONE,
            services.configs.config.broker_id,
            -1 if contact.away_s is None else round(contact.away_s * 1_000),
            contact.session_timeout_ms,
        )
    )
