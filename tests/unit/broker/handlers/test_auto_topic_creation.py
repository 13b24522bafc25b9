"""Automatic topic creation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.handlers import auto_topic_creation
from minibroker.broker.handlers.administration import Administration
from minibroker.broker.handlers.auto_topic_creation import AutoTopicCreation
from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.protocol.messages import CreatableTopic, CreatableTopicResult


def creation_of(
    administration: object, start_task: Callable[[Coroutine[Any, Any, None], str], object], num_partitions: int = 1
) -> AutoTopicCreation:
    config = BrokerConfig(
        broker_id=1, log_dirs="unused", zookeeper_connect="unused:2181", num_partitions=num_partitions
    )
    return AutoTopicCreation(config, cast(Administration, administration), cast(ForwardingManager, None), start_task)


class Hanging:
    """A controller whose ZooKeeper does not answer."""

    is_active = True

    async def create_topics(self, *arguments: object, **named: object) -> None:
        await asyncio.Event().wait()


def test_the_log_says_why_a_topic_was_not_created_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto_topic_creation, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(auto_topic_creation, "PAUSE_S", 0.0)
    started: list[Coroutine[Any, Any, None]] = []
    creation = creation_of(Hanging(), lambda coroutine, name: started.append(coroutine))

    creation.create_soon(["orders"])
    with caplog.at_level(logging.WARNING):
        asyncio.run(started[0])

    assert caplog.messages == [
        "orders cannot be created: not done within 0 s; ZooKeeper may be away: see `minibroker status`"
    ]


class Creating:
    """A controller that creates all topics at once."""

    is_active = True

    def __init__(self) -> None:
        self.created: list[tuple[float, list[str]]] = []
        """The times and the names."""

    async def create_topics(self, topics: list[CreatableTopic], **named: object) -> list[CreatableTopicResult]:
        self.created.append((asyncio.get_running_loop().time(), [topic.name for topic in topics]))
        return [CreatableTopicResult(topic.name, "id", 0, "") for topic in topics]


def test_thousands_of_names_are_created_slowly_and_others_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_topic_creation, "PARTITIONS_PER_S", 10_000)
    monkeypatch.setattr(auto_topic_creation, "PAUSE_S", 0.0)

    async def main() -> list[tuple[float, list[str]]]:
        tasks: list[asyncio.Task[None]] = []
        controller = Creating()
        creation = creation_of(
            controller, lambda coroutine, name: tasks.append(asyncio.create_task(coroutine)), num_partitions=50
        )
        strange = [f"stranger-{number}" for number in range(6)]
        creation.create_soon([*strange, "__consumer_offsets"])
        creation.create_soon(["orders"])
        await asyncio.gather(*tasks)
        return controller.created

    times, names = zip(*asyncio.run(main()), strict=True)
    assert names[0] == ["__consumer_offsets"]  # waits for no turn
    assert list(names[1:]) == [
        ["stranger-0", "stranger-1"],
        ["orders"],
        ["stranger-2", "stranger-3"],
        ["stranger-4", "stranger-5"],
    ]
    partitions = [50 * len(each) for each in names[1:-1]]
    assert times[-1] - times[1] >= sum(partitions) / 10_000
