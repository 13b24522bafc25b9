"""CreatePartitions: the controller's broker takes it, and answers when the new partitions have leaders."""

from collections.abc import Callable

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.handlers.topics import LEAST_TIMEOUT_MS, may_change
from minibroker.broker.network.request_channel import Request
from minibroker.broker.purgatory.purgatory import DelayedOperation
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)


class DelayedCreatePartitions(DelayedOperation):
    """As `DelayedCreateTopics`: what has no leader at the deadline is there nevertheless, and REQUEST_TIMED_OUT."""

    def __init__(
        self,
        timeout_ms: int,
        results: list[CreatePartitionsTopicResult],
        has_leaders: Callable[[str, int], bool],
        respond: Callable[[list[CreatePartitionsTopicResult]], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._results = results
        self._has_leaders = has_leaders
        self._respond = respond

    def _without_leaders(self) -> list[CreatePartitionsTopicResult]:
        return [r for r in self._results if not r.error_code and not self._has_leaders(r.name, r.num_partitions)]

    def try_complete(self) -> bool:
        return False if self._without_leaders() else self.force_complete()

    def on_complete(self) -> None:
        for result in self._without_leaders():
            result.error_code = ErrorCode.REQUEST_TIMED_OUT
            there = f"topic {result.name!r} has {result.num_partitions} partitions now"
            result.error_message = f"{there}, but not all of them have a leader yet"
        self._respond(self._results)

    def on_expiration(self) -> None:
        """The answer says it all."""


async def handle_create_partitions(services: Services, request: Request) -> None:
    """Raises BrokerError(NOT_CONTROLLER) on any other broker."""
    body = request.body
    assert isinstance(body, CreatePartitionsRequest)
    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), lambda: _create(services, request, body))


async def _create(services: Services, request: Request, body: CreatePartitionsRequest) -> None:
    may = [topic for topic in body.topics if may_change(topic.name, request)]
    results = await services.administration.create_partitions(may, validate_only=body.validate_only)
    refused = dict.fromkeys(topic.name for topic in body.topics if not may_change(topic.name, request))
    results += [
        CreatePartitionsTopicResult(
            name, ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {name!r} is the brokers' own: nobody else may change it"
        )
        for name in refused
    ]

    def respond(results: list[CreatePartitionsTopicResult]) -> None:
        request.respond(CreatePartitionsResponse(0, results))

    grown = [result.name for result in results if not result.error_code]
    if body.validate_only or not grown:
        respond(results)
        return
    operation = DelayedCreatePartitions(max(body.timeout_ms, 0), results, services.metadata.has_leaders, respond)
    services.topic_purgatory.try_complete_else_watch(operation, grown)
