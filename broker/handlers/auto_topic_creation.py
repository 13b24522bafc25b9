"""Creates topics on demand (Kafka's AutoTopicCreationManager).

With auto.create.topics.enable, these are the topics that a client names, if it allows the creation.
`__consumer_offsets` is created on demand if the controller could not create it when the cluster formed
(`controller/handlers/internal_topics.py`).

Whoever may create a topic by naming it can name a thousand in a few kilobytes. Topics that clients name are therefore
created a few at a time, and PARTITIONS_PER_S. Kafka has no such bound; one who wants thousands of topics at once sends
CreateTopics, for which there is a quota.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
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
MAX_AT_ONCE = 100
"""Partitions created at a time, unless a single topic has more."""
PARTITIONS_PER_S = 100
"""Partitions created per second, by this broker, in topics that clients name. The first are created at once."""
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
        self._topics_at_once = max(1, MAX_AT_ONCE // config.num_partitions)
        self._seconds_each = config.num_partitions / PARTITIONS_PER_S
        self._turn = asyncio.Lock()
        """Held by the clients' topics that are being created, until the next ones may be."""
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
        self._under_way.update(new)
        if internal := [name for name in new if name in self._internal]:
            self._start_task(self._create(internal, self._ask), f"creation of {internal[0]}")
        if others := [name for name in new if name not in self._internal]:
            self._start_task(self._create_in_turn(others), f"creation of {others[0]}")

    async def _create_in_turn(self, names: list[str]) -> None:
        for first in range(0, len(names), self._topics_at_once):
            together = names[first : first + self._topics_at_once]
            await self._create(together, self._ask_in_turn)

    async def _create(
        self, names: list[str], ask: Callable[[list[str]], Awaitable[list[CreatableTopicResult]]]
    ) -> None:
        try:
            for result in await ask(names):
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

    async def _ask_in_turn(self, names: list[str]) -> list[CreatableTopicResult]:
        async with self._turn:
            results = await self._ask(names)
            await asyncio.sleep(len(names) * self._seconds_each)
        return results

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
