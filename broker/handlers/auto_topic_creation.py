"""Creates topics on demand (Kafka's AutoTopicCreationManager).

With auto.create.topics.enable, these are the topics that a client names, if it allows the creation.
`__consumer_offsets` is created on demand if the controller could not create it when the cluster formed
(`controller/handlers/internal_topics.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.cluster.internal_topics import REPLICATION_FACTOR_SETTINGS, internal_topics
from minibroker.broker.handlers.administration import Administration
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.apis import CREATE_TOPICS
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import CreatableTopic, CreatableTopicResult, CreateTopicsRequest

logger = logging.getLogger("minibroker.topics")

TIMEOUT_S = 10.0
PAUSE_S = 0.5
"""Pause after an attempt, before the next request for the topic starts another one."""
MAX_UNDER_WAY = 1_000
"""Topics being created at a time. Clients that ask for more ask again."""


class AutoTopicCreation:
    def __init__(
        self,
        config: BrokerConfig,
        administration: Administration,
        forwarding: ForwardingManager,
        start_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.is_enabled = config.auto_create_topics_enable
        """Whether topics that clients name are created."""
        self._internal = internal_topics(config)
        self._administration = administration
        self._forwarding = forwarding
        self._start_task = start_task
        self._under_way: set[str] = set()
        self._problem = ""
        self._internal_problems: dict[str, str] = {}

    def why_missing(self, name: str) -> str:
        """Return why an internal topic is missing after a call of `create_soon`."""
        return self._internal_problems.get(name, f"{name} is being created")

    def create_soon(self, names: Sequence[str]) -> None:
        """Start creating the topics that are not being created already. Clients ask again until the topic exists."""
        room = MAX_UNDER_WAY - len(self._under_way)
        new = [name for name in names if name not in self._under_way][:room]
        if new:
            self._under_way.update(new)
            self._start_task(self._create(new), f"creation of {new[0]}")

    async def _create(self, names: list[str]) -> None:
        try:
            for result in await self._ask(names):
                if result.error_code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
                    self._report([result.name], _refusal(result))
                else:
                    self._problem = ""
                    self._internal_problems.pop(result.name, None)
        except (BrokerError, TimeoutError) as error:
            # asyncio's TimeoutError has no text
            self._report(
                names,
                str(error) or f"not done within {TIMEOUT_S:.0f} s; ZooKeeper may be away: see `minibroker status`",
            )
        finally:
            await asyncio.sleep(PAUSE_S)
            self._under_way.difference_update(names)

    async def _ask(self, names: list[str]) -> list[CreatableTopicResult]:
        """Raises BrokerError, TimeoutError."""
        topics = [self._internal.get(name) or CreatableTopic(name) for name in names]
        if self._administration.is_active:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._administration.create_topics(topics, validate_only=False, controller_epoch=-1)
        # 0 ms: the client asks again and then sees whether there are leaders
        request = CreateTopicsRequest(topics, 0)
        answer = await self._forwarding.request(CREATE_TOPICS, request, timeout_s=TIMEOUT_S)
        for result in answer.topics:
            if result.error_code == ErrorCode.REQUEST_TIMED_OUT:
                result.error_code = ErrorCode.NONE
        return answer.topics

    def _report(self, names: Sequence[str], why: str) -> None:
        problem = f"{', '.join(names[:3])} cannot be created: {why}"
        self._internal_problems.update((name, problem) for name in names if name in self._internal)
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s", problem)


def _refusal(result: CreatableTopicResult) -> str:
    code = ErrorCode(result.error_code)
    setting = REPLICATION_FACTOR_SETTINGS.get(result.name, "")
    named = f" ({setting})" if setting and code is ErrorCode.INVALID_REPLICATION_FACTOR else ""
    return f"{code.name}{named}: {result.error_message}"
