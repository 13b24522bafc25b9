"""`__consumer_offsets` is created when a coordinator is first asked for (Kafka's AutoTopicCreationManager)."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from minibroker.broker.config import BrokerConfig
from minibroker.broker.forwarding import ForwardingManager
from minibroker.broker.groups.terms import OFFSETS_TOPIC
from minibroker.broker.handlers.administration import Administration
from minibroker.protocol.apis import CREATE_TOPICS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    CreatableConfig,
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsRequest,
)

logger = logging.getLogger("minibroker.groups")

TIMEOUT_S = 10.0
MAX_RECORD_BYTES = 10 * 1024 * 1024
"""A group with all its members is one record: a thousand of them, of 10 KiB each."""
PAUSE_S = 0.5
"""After an attempt, before the next one is made where somebody asks."""


class OffsetsTopic:
    def __init__(
        self,
        config: BrokerConfig,
        administration: Administration,
        forwarding: ForwardingManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._config = config
        self._administration = administration
        self._forwarding = forwarding
        self._start_task = start_task
        self._is_creating = False
        self._problem = ""

    def create_soon(self) -> None:
        """Unless that is under way. Whoever needs it asks again, and finds it."""
        if not self._is_creating:
            self._is_creating = True
            self._start_task(self._create(), f"creation of {OFFSETS_TOPIC}")

    async def _create(self) -> None:
        try:
            result = await self._ask()
            if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
                self._report(f"{ErrorCode(result.error_code).name}: {result.error_message}")
            else:
                self._problem = ""
        except (BrokerError, TimeoutError) as error:
            self._report(str(error))
        finally:
            await asyncio.sleep(PAUSE_S)
            self._is_creating = False

    async def _ask(self) -> CreatableTopicResult:
        """Raises BrokerError, TimeoutError."""
        config = self._config
        topic = CreatableTopic(
            OFFSETS_TOPIC,
            config.offsets_topic_num_partitions,
            config.offsets_topic_replication_factor,
            configs=[
                CreatableConfig("cleanup.policy", "compact"),
                CreatableConfig("segment.bytes", str(config.offsets_topic_segment_bytes)),
                CreatableConfig("max.message.bytes", str(MAX_RECORD_BYTES)),
            ],
        )
        if self._administration.is_active:
            async with asyncio.timeout(TIMEOUT_S):
                results = await self._administration.create_topics([topic], validate_only=False, controller_epoch=-1)
            return results[0]
        # 0 ms: whoever asks again sees when the leaders are there.
        request = CreateTopicsRequest([topic], 0)
        answer = await self._forwarding.request(CREATE_TOPICS, request, timeout_s=TIMEOUT_S)
        result = answer.topics[0]
        if result.error_code == ErrorCode.REQUEST_TIMED_OUT:
            result.error_code = ErrorCode.NONE
        return result

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s cannot be created: %s", OFFSETS_TOPIC, problem)
