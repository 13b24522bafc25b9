"""Creation of the brokers' own topics, such as `__consumer_offsets`, when the cluster has formed.

If a topic were created on first use, that might be while a broker is down, with too few brokers left for its replicas.
So the controller creates the topics as soon as enough brokers are registered. It checks again when a broker joins, when
a topic is removed, and in every tenure, since its predecessor may have died before it was done. The check costs nothing
if the topics exist.

Rejected: creating the topic with fewer replicas, as Kafka did before 0.11. It would keep them permanently, and the
first lost disk would lose offsets.
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
"""Seconds without a further broker after which the cluster counts as formed, so that brokers started together get equal
shares of the partitions."""

_log = logging.getLogger(__name__)


class InternalTopics:
    def __init__(self, steps: Steps, topic_events: TopicEvents) -> None:
        self._steps = steps
        self._topics = topic_events

    def handlers(self) -> Handlers:
        return {events.ClusterFormed: lambda _: self._create_missing()}

    async def create_when_formed(self) -> None:
        """Post ClusterFormed whenever the cluster has formed. Runs for the tenure's life."""
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
        if not missing:
            return
        reply: asyncio.Future[list[CreatableTopicResult]] = asyncio.get_running_loop().create_future()
        await self._topics.create_topics(events.CreateTopicsRequest(self._steps.epoch, reply, missing, False))
        for result in reply.result():
            if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
                code = ErrorCode(result.error_code)
                _log.warning("%s cannot be created: %s: %s", result.name, code.name, result.error_message)
