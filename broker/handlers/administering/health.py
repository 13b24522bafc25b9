"""DescribeHealth: what a broker knows of its own state and of its followers."""

from itertools import islice

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    DescribeHealthRequest,
    DescribeHealthResponse,
    LaggingFollower,
    SlowCommit,
    SlowDisk,
)

MOST_FOLLOWERS = 200


async def handle_describe_health(services: Services, request: Request, _body: DescribeHealthRequest) -> None:
    async def answer() -> None:
        lagging = await services.replicas.lagging_followers()
        contact = services.zookeeper_contact()
        request.respond(
            DescribeHealthResponse(
                0,
                ErrorCode.NONE,
                services.configs.config.broker_id,
                -1 if contact.away_s is None else round(contact.away_s * 1_000),
                contact.session_timeout_ms,
                [
                    LaggingFollower(
                        late.broker_id,
                        *late.partition,
                        late.records,
                        -1 if late.behind_s is None else round(late.behind_s * 1_000),
                        round(late.silent_s * 1_000),
                        late.is_in_sync,
                    )
                    for late in lagging[:MOST_FOLLOWERS]
                ],
                [
                    SlowDisk(slow.log_dir, slow.calls, round(slow.longest_s * 1_000), slow.longest)
                    for slow in services.slow_disks()
                ],
                contact.recent_losses,
                [
                    SlowCommit(*slow.partition, slow.broker_id, slow.times, round(slow.longest_s * 1_000))
                    for slow in islice(services.replicas.waits.slow_commits.recent(), MOST_FOLLOWERS)
                ],
            )
        )

    answer_later(services, request, None, answer)
