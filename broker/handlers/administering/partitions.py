"""CreatePartitions: served by the controller's broker, and answered when the new partitions have leaders."""

from minibroker.broker.handlers.administering.mutation_quotas import REFUSAL, Mutations
from minibroker.broker.handlers.administering.topics import LEAST_TIMEOUT_MS, may_change, respond_with_leaders
from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)
from minibroker.protocol.words import counted


def _without_leaders(result: CreatePartitionsTopicResult) -> str:
    there = f"topic {result.name!r} has {counted(result.num_partitions, 'partition')} now"
    return f"{there}, but not all of them have a leader yet"


async def handle_create_partitions(services: Services, request: Request, body: CreatePartitionsRequest) -> None:
    """Raise BrokerError(NOT_CONTROLLER) on any other broker."""
    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), lambda: _create(services, request, body))


async def _create(services: Services, request: Request, body: CreatePartitionsRequest) -> None:
    wanted = [topic for topic in body.topics if may_change(topic.name, request)]
    count = services.metadata.partition_count
    new = {topic.name: max(0, topic.count - count(topic.name)) for topic in wanted}
    mutations = Mutations(services, request, new, is_test=body.validate_only)
    may = [topic for topic in wanted if topic.name not in mutations.refused]
    results = await services.administration.create_partitions(may, validate_only=body.validate_only)
    mutations.carried_out(results)
    results += [
        CreatePartitionsTopicResult(name, ErrorCode.THROTTLING_QUOTA_EXCEEDED, REFUSAL) for name in mutations.refused
    ]
    refused = dict.fromkeys(topic.name for topic in body.topics if not may_change(topic.name, request))
    results += [
        CreatePartitionsTopicResult(
            name, ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {name!r} is the brokers' own: clients cannot change it"
        )
        for name in refused
    ]

    def respond(results: list[CreatePartitionsTopicResult]) -> None:
        request.respond(CreatePartitionsResponse(mutations.throttle(), results))

    respond_with_leaders(services, body, results, _without_leaders, respond)
