"""Topics that come by themselves (Kafka's AutoTopicCreationManager): `__consumer_offsets` when a coordinator is first
asked for, and with auto.create.topics.enable whatever a client names that lets topics be created."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from minibroker.broker.config import BrokerConfig
from minibroker.broker.forwarding import ForwardingManager
from minibroker.broker.handlers.administration import Administration
from minibroker.protocol.apis import CREATE_TOPICS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    CreatableConfig,
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsRequest,
)
from minibroker.protocol.model import OFFSETS_TOPIC

logger = logging.getLogger("minibroker.topics")

TIMEOUT_S = 10.0
MAX_RECORD_BYTES = 10 * 1024 * 1024
"""A group with all its members is one record: a thousand of them, of 10 KiB each."""
PAUSE_S = 0.5
"""After an attempt, before the next one is made where somebody asks."""
MAX_UNDER_WAY = 1_000
"""Topics. Whoever asks for more asks again."""


class AutoTopicCreation:
    def __init__(
        self,
        config: BrokerConfig,
        administration: Administration,
        forwarding: ForwardingManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.is_enabled = config.auto_create_topics_enable
        """For topics that clients name."""
        self._config = config
        self._administration = administration
        self._forwarding = forwarding
        self._start_task = start_task
        self._under_way: set[str] = set()
        self._problem = ""

    def create_soon(self, names: Sequence[str]) -> None:
        """Those of which the creation is not under way. Whoever needs one asks again, and finds it."""
        room = MAX_UNDER_WAY - len(self._under_way)
        new = [name for name in names if name not in self._under_way][:room]
        if new:
            self._under_way.update(new)
            self._start_task(self._create(new), f"creation of {new[0]}")

    async def _create(self, names: list[str]) -> None:
        try:
            for result in await self._ask(names):
                if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
                    code = ErrorCode(result.error_code)
                    self._report(f"{result.name} cannot be created: {code.name}: {result.error_message}")
                else:
                    self._problem = ""
        except (BrokerError, TimeoutError) as error:
            why = str(error) or f"not done within {TIMEOUT_S:.0f} s; is ZooKeeper away?"  # asyncio's say nothing
            self._report(f"{', '.join(names[:3])} cannot be created: {why}")
        finally:
            await asyncio.sleep(PAUSE_S)
            self._under_way.difference_update(names)

    async def _ask(self, names: list[str]) -> list[CreatableTopicResult]:
        """Raises BrokerError, TimeoutError."""
        topics = [self._offsets_topic() if name == OFFSETS_TOPIC else CreatableTopic(name) for name in names]
        if self._administration.is_active:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._administration.create_topics(topics, validate_only=False, controller_epoch=-1)
        # 0 ms: whoever asks again sees when the leaders are there.
        request = CreateTopicsRequest(topics, 0)
        answer = await self._forwarding.request(CREATE_TOPICS, request, timeout_s=TIMEOUT_S)
        for result in answer.topics:
            if result.error_code == ErrorCode.REQUEST_TIMED_OUT:
                result.error_code = ErrorCode.NONE
        return answer.topics

    def _offsets_topic(self) -> CreatableTopic:
        config = self._config
        return CreatableTopic(
            OFFSETS_TOPIC,
            config.offsets_topic_num_partitions,
            config.offsets_topic_replication_factor,
            configs=[
                CreatableConfig("cleanup.policy", "compact"),
                CreatableConfig("segment.bytes", str(config.offsets_topic_segment_bytes)),
                CreatableConfig("max.message.bytes", str(MAX_RECORD_BYTES)),
            ],
        )

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s", problem)
