"""CreateTopics and DeleteTopics: the controller's broker takes them, and answers when the cluster has followed."""

import asyncio
from collections.abc import Callable
from itertools import zip_longest
from typing import Generic, TypeVar

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.broker.scheduling.purgatory import DelayedOperation
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import (
    CreatableTopicResult,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from minibroker.protocol.model import ANONYMOUS, INTERNAL_TOPICS

LEAST_TIMEOUT_MS = 1_000
"""For the controller's part: a request that does not wait for leaders still waits to hear the outcome."""


def may_change(topic: str, request: Request) -> bool:
    """Whether whoever asks may create, change or delete a topic of that name."""
    # A name that differs from the brokers' own by a dot alone would keep them from creating their topic.
    return topic.replace(".", "_") not in INTERNAL_TOPICS or request.principal != ANONYMOUS


Result = TypeVar("Result", CreatableTopicResult, CreatePartitionsTopicResult)


class DelayedCreatePartitions(DelayedOperation, Generic[Result]):
    """Completes when every topic that was created, or has got partitions, has leaders for all of them, as far as this
    broker's metadata tells. What has none at the deadline is there nevertheless, and reported as REQUEST_TIMED_OUT with
    what `describe` says of it (Kafka's class of that name).
    """

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

    def on_expiration(self) -> None:
        """The answer says it all."""


def _without_leaders(result: CreatableTopicResult) -> str:
    return f"topic {result.name!r} was created, but not all of its partitions have a leader yet"


async def handle_create_topics(services: Services, request: Request) -> None:
    """Raises BrokerError(NOT_CONTROLLER) on any other broker."""
    body = request.body
    assert isinstance(body, CreateTopicsRequest)
    answer_later(services, request, max(body.timeout_ms, LEAST_TIMEOUT_MS), lambda: _create(services, request, body))


async def _create(services: Services, request: Request, body: CreateTopicsRequest) -> None:
    may = [topic for topic in body.topics if may_change(topic.name, request)]
    results = await services.administration.create_topics(
        may, validate_only=body.validate_only, controller_epoch=body.controller_epoch
    )
    results += [
        CreatableTopicResult(topic.name, "", ErrorCode.INVALID_TOPIC_EXCEPTION, _brokers_own(topic.name))
        for topic in body.topics
        if not may_change(topic.name, request)
    ]
    # All results for a name that the request repeats are the same.
    results = list({result.name: result for result in results}.values())

    def respond(results: list[CreatableTopicResult]) -> None:
        request.respond(CreateTopicsResponse(0, results))

    created = [result.name for result in results if not result.error_code]
    if body.validate_only or not created:
        respond(results)
        return
    operation = DelayedCreatePartitions(
        max(body.timeout_ms, 0), results, services.metadata.has_leaders, _without_leaders, respond
    )
    services.topic_purgatory.try_complete_else_watch(operation, created)


async def handle_delete_topics(services: Services, request: Request) -> None:
    """Answers once the topics are gone and their names free, or with REQUEST_TIMED_OUT and what they wait for: at the
    deadline, or as soon as that is something that may last, as a broker that is down. The deletion is recorded then,
    which cannot be undone, and goes on by itself. (Kafka's DelayedDeleteTopics waits until no broker shows them.)
    Raises BrokerError(NOT_CONTROLLER) on any other broker."""
    body = request.body
    assert isinstance(body, DeleteTopicsRequest)
    waits_until = asyncio.get_running_loop().time() + max(body.timeout_ms, 0) / 1_000
    # The rest is for ZooKeeper, without which nothing can be said of any topic.
    timeout_ms = max(body.timeout_ms, 0) + LEAST_TIMEOUT_MS // 2
    answer_later(services, request, timeout_ms, lambda: _delete(services, request, body, waits_until))


async def _delete(services: Services, request: Request, body: DeleteTopicsRequest, waits_until: float) -> None:
    topics: dict[str, str] = {}
    unknown: list[DeletableTopicResult] = []
    for named, topic_id in zip_longest(body.topics, body.topic_ids[: len(body.topics)], fillvalue=""):
        name = named or (services.metadata.topic_with_id(topic_id) if topic_id else "")
        if name is None:
            code, message = ErrorCode.UNKNOWN_TOPIC_ID, f"there is no topic of the id {topic_id}"
            unknown.append(DeletableTopicResult("", topic_id, code, message))
        else:
            topics[name] = topic_id
    may = {name: topic_id for name, topic_id in topics.items() if may_change(name, request)}
    results = await services.administration.delete_topics(may)
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
    request.respond(DeleteTopicsResponse(0, results + unknown))


def _brokers_own(topic: str) -> str:
    return f"topic {topic!r} is the brokers' own: they create it when it is needed, and nobody else may delete it"
