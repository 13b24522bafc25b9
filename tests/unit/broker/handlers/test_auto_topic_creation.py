"""Automatic topic creation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from minibroker.broker.cluster.forwarding import ForwardingManager
from minibroker.broker.handlers import auto_topic_creation
from minibroker.broker.handlers.administration import Administration
from minibroker.broker.handlers.auto_topic_creation import AutoTopicCreation
from minibroker.broker.settings.broker_config import BrokerConfig


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
    creation = AutoTopicCreation(
        BrokerConfig(broker_id=1, log_dirs="unused", zookeeper_connect="unused:2181"),
        cast(Administration, Hanging()),
        cast(ForwardingManager, None),
        lambda coroutine, name: started.append(coroutine),
    )

    creation.create_soon(["orders"])
    with caplog.at_level(logging.WARNING):
        asyncio.run(started[0])

    assert caplog.messages == [
        "orders cannot be created: not done within 0 s; ZooKeeper may be away: see `minibroker status`"
    ]
