"""CreateTopics and DeleteTopics: served by the controller's broker, and answered when the cluster has followed."""

import asyncio
from collections.abc import Callable
from itertools import zip_longest
from typing import Generic, TypeVar

from minibroker.broker.handlers.administering.mutation_quotas import REFUSAL, Mutations
from minibroker.broker.handlers.services import MOST_WAIT_MS, Services, answer_later, bound_messages
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.purgatory import DelayedOperation
from minibroker.broker.settings.config_changes import small_segments_problem
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableTopic,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from minibroker.protocol.model import INTERNAL_TOPICS

LEAST_TIMEOUT_MS = 1_000
"""The minimum time for the controller: a request that does not wait for leaders still waits for the outcome."""


def may_change(topic: str, request: Request) -> bool:
    """Return whether the sender may create, change or delete a topic of that name."""
    # a name that differs from an internal topic's by a dot alone would prevent that topic's creation
    return topic.replace(".", "_") not in INTERNAL_TOPICS or request.principal.broker_id is not None


Result = TypeVar("Result", CreatableTopicResult, CreatePartitionsTopicResult)


class DelayedCreatePartitions(DelayedOperation, Generic[Result]):
    """Completes when this broker's metadata shows a leader for each partition of the created or extended topics
    (Kafka's class of that name). Topics without one at the deadline exist nevertheless, and are reported as
    REQUEST_TIMED_OUT with the text of `describe`."""

    def __init__(
        self,
        timeout_ms: int,
        results: list[Result],
        has_leaders: Callable[[str, int], bool],
        describe: Callable[[Result], str],
        respond: Callable[[list[Result]], None],
    ) -> None:
        super().__init__(timeout_ms)
        self._results: list[Result] = results
        self._has_leaders = has_leaders
        self._describe: Callable[[Result], str] = describe
        self._respond: Callable[[list[Result]], None] = respond

    def _without_leaders(self) -> list[Result]:
        return [r for r in self._results if not r.error_code and not self._has_leaders(r.name, r.num_partitions)]

    def try_complete(self) -> bool:
        return False if self._without_leaders() else self.force_complete()

    def on_complete(self) -> None:
        for result in self._without_leaders():
            result.error_code = ErrorCode.REQUEST_TIMED_OUT
            result.error_message = self._describe(result)
        self._respond(self._results)


def respond_with_leaders(
    services: Services,
    body: CreateTopicsRequest | CreatePartitionsRequest,
    results: list[Result],
    describe: Callable[[Result], str],
    respond: Callable[[list[Result]], None],
) -> None:
    """Respond when the new partitions have leaders, or at once if there are none."""
    changed = [result.name for result in results if not result.error_code]
    if body.validate_only or not changed:
        respond(results)
        return
    has_leaders = services.metadata.has_leaders
    timeout_ms = min(max(body.timeout_ms, 0), MOST_WAIT_MS)
    operation = DelayedCreatePartitions(timeout_ms, results, has_leaders, describe, respond)
    services.topic_purgatory.try_complete_else_watch(operation, changed)


def _without_leaders(result: CreatableTopicResult) -> str:
    return f"topic {result.name!r} was created, but not all of its partitions have a leader yet"


async def handle_create_topics(services: Services, request: Request, body: CreateTopicsRequest) -> None:
    """Raise BrokerError(NOT_CONTROLLER) on any other broker."""
    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), lambda: _create(services, request, body))


async def _create(services: Services, request: Request, body: CreateTopicsRequest) -> None:
    may = [topic for topic in body.topics if may_change(topic.name, request)]
    refused: list[CreatableTopicResult] = []
    if request.principal.broker_id is None:
        for topic in may:
            given = {config.name: config.value for config in topic.configs}
            problem = small_segments_problem(given, services.configs.config)
            if problem is not None:
                refused.append(CreatableTopicResult(topic.name, "", ErrorCode.INVALID_CONFIG, problem))
        names = {result.name for result in refused}
        may = [topic for topic in may if topic.name not in names]
    mutations = Mutations(
        services, request, {topic.name: _partitions(services, topic) for topic in may}, is_test=body.validate_only
    )
    may = [topic for topic in may if topic.name not in mutations.refused]
    results = await services.administration.create_topics(
        may, validate_only=body.validate_only, controller_epoch=body.controller_epoch
    )
    mutations.carried_out(results)
    results += [
        CreatableTopicResult(name, "", ErrorCode.THROTTLING_QUOTA_EXCEEDED, REFUSAL) for name in mutations.refused
    ]
    results += [
        CreatableTopicResult(topic.name, "", ErrorCode.INVALID_TOPIC_EXCEPTION, _brokers_own(topic.name))
        for topic in body.topics
        if not may_change(topic.name, request)
    ]
    results += refused
    # the results for a repeated name are equal
    results = list({result.name: result for result in results}.values())

    def respond(results: list[CreatableTopicResult]) -> None:
        request.respond(CreateTopicsResponse(mutations.throttle(), results))

    respond_with_leaders(services, body, results, _without_leaders, respond)


def _partitions(services: Services, topic: CreatableTopic) -> int:
    if topic.assignments:
        return len(topic.assignments)
    return services.configs.config.num_partitions if topic.num_partitions == -1 else max(0, topic.num_partitions)


async def handle_delete_topics(services: Services, request: Request, body: DeleteTopicsRequest) -> None:
    """Answer once the topics are gone and their names are free. Otherwise answer REQUEST_TIMED_OUT with the reason: at
    the deadline, or as soon as the reason may last, such as a broker that is down. The deletion is recorded then,
    cannot be undone, and continues on its own. (Kafka's DelayedDeleteTopics waits until no broker shows them.) Raises
    BrokerError(NOT_CONTROLLER) on any other broker."""
    waits_until = asyncio.get_running_loop().time() + max(body.timeout_ms, 0) / 1_000
    # the additional time is for ZooKeeper, without which no topic's state is known
    timeout_ms = max(body.timeout_ms, 0) + LEAST_TIMEOUT_MS // 2
    answer_later(services, request, timeout_ms, lambda: _delete(services, request, body, waits_until))


async def _delete(services: Services, request: Request, body: DeleteTopicsRequest, waits_until: float) -> None:
    topics: dict[str, str] = {}
    unknown: list[DeletableTopicResult] = []
    for named, topic_id in zip_longest(body.topics, body.topic_ids[: len(body.topics)], fillvalue=""):
        name = named or (services.metadata.topic_with_id(topic_id) if topic_id else "")
        if name is None:
            code, message = ErrorCode.UNKNOWN_TOPIC_ID, f"there is no topic with the id {topic_id}"
            unknown.append(DeletableTopicResult("", topic_id, code, message))
        else:
            topics[name] = topic_id
    may = {name: topic_id for name, topic_id in topics.items() if may_change(name, request)}
    mutations = Mutations(
        services, request, {name: services.metadata.partition_count(name) for name in may}, is_test=False
    )
    results = await services.administration.delete_topics(
        {name: topic_id for name, topic_id in may.items() if name not in mutations.refused}
    )
    mutations.carried_out(results)
    doomed = {result.name: result.topic_id for result in results if not result.error_code}
    try:
        async with asyncio.timeout_at(waits_until):
            left = await services.administration.until_deleted(doomed)
    except TimeoutError:
        left = services.administration.deletions_left(doomed)
    for result in results:
        if result.name in left:
            result.error_code = ErrorCode.REQUEST_TIMED_OUT
            result.error_message = f"topic {result.name!r} is marked for deletion and not gone yet: {left[result.name]}"
    results += [
        DeletableTopicResult(name, "", ErrorCode.INVALID_TOPIC_EXCEPTION, _brokers_own(name))
        for name in topics.keys() - may.keys()
    ]
    results += [
        DeletableTopicResult(name, topics[name], ErrorCode.THROTTLING_QUOTA_EXCEEDED, REFUSAL)
        for name in mutations.refused
    ]
    results += unknown
    bound_messages(results)
    request.respond(DeleteTopicsResponse(mutations.throttle(), results))


def _brokers_own(topic: str) -> str:
    return f"topic {topic!r} is the brokers' own: they create it when it is needed, and clients cannot delete it"
