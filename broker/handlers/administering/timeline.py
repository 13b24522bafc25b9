"""DescribeTimeline: the actions of this broker's controller in all its terms of office."""

import msgspec

from minibroker.broker.handlers.services import Services
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import DescribeTimelineRequest, DescribeTimelineResponse

MAX_BYTES = 256 * 1024
"""The size limit of an answer, unless its first entry is larger. It takes about a millisecond."""


async def handle_describe_timeline(services: Services, request: Request, body: DescribeTimelineRequest) -> None:
    last_number, found = services.administration.recorded_after(body.after, body.since_ms)
    entries: list[memoryview] = []
    size = 0
    for entry in found[: body.max_entries]:
        encoded = msgspec.json.encode(entry)
        size += len(encoded)
        if entries and size > MAX_BYTES:
            break
        entries.append(memoryview(encoded))
    is_complete = len(entries) == len(found)
    request.respond(DescribeTimelineResponse(0, ErrorCode.NONE, entries, is_complete, last_number))
