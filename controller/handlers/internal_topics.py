"""The topics that brokers need for themselves, such as `__consumer_offsets`, are created when the cluster has formed.

Clients create a group when they need it, and that may be while a broker is dead: too few brokers are left then for the
topic's replicas. So the controller creates it as soon as enough brokers are registered. It looks again when a broker
comes, when a topic is gone, and in every term of office: a predecessor may have died over it. To look costs nothing if
the topics exist.

Rejected: to create it with fewer replicas, as Kafka did before 0.11. It would keep them for ever, and lose offsets with
the first disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from minibroker.controller.decisions import events, topics
from minibroker.controller.event_loop import Handlers
from minibroker.controller.handlers.steps import Steps
from minibroker.controller.handlers.topics import TopicEvents
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import CreatableTopicResult

FORMED_S = 1.0
"""Without another broker that comes. Brokers that are started together get equal shares of the partitions."""

_log = logging.getLogger(__name__)


class InternalTopics:
    def __init__(self, steps: Steps, topic_events: TopicEvents) -> None:
        self._steps = steps
        self._topics = topic_events

    def handlers(self) -> Handlers:
        return {events.ClusterFormed: lambda _: self._create_missing()}

    async def create_when_formed(self) -> None:
        """The task, for the tenure's life."""
        if not self._steps.settings.internal_topics:
            return
        while True:
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(FORMED_S):
                        await self._steps.forming.wait()
            self._steps.post(events.ClusterFormed(self._steps.epoch))
            await self._steps.forming.wait()

    async def _create_missing(self) -> None:
        missing = topics.missing(self._steps.state, self._steps.settings.internal_topics)
        if missing:
            await self._topics.create_topics(
                events.CreateTopicsRequest(
                    self._steps.epoch, fail=lambda _: None, answer=_report, topics=missing, validate_only=False
                )
            )


def _report(results: list[CreatableTopicResult]) -> None:
    for result in results:
        if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            code = ErrorCode(result.error_code)
            _log.warning("%s cannot be created: %s: %s", result.name, code.name, result.error_message)
