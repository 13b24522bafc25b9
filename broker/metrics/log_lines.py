"""Gathers log lines about many partitions into one.

A failover moves hundreds of partitions within milliseconds, one by one. A line for each would bury the few lines that
an operator looks for, so events shortly after the first are logged together with it. The fate of each single partition
is logged at DEBUG and recorded in the controller's timeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from minibroker.protocol.model import INTERNAL_TOPICS, TopicPartition

T = TypeVar("T")

GATHER_S = 0.5
NAMED = 3


def named(partitions: Collection[TopicPartition], limit: int = NAMED) -> str:
    """Return `orders-0, orders-1, orders-2 and 57 more`, with users' partitions before the brokers' own."""
    ordered = sorted(partitions, key=lambda partition: (partition.topic in INTERNAL_TOPICS, partition))
    shown = ", ".join(str(partition) for partition in ordered[:limit])
    return shown if len(partitions) <= limit else f"{shown} and {len(partitions) - limit} more"


class Gathered(Generic[T]):
    """Calls `say` with all items added within `gather_s` of the first, and on `close`."""

    def __init__(self, say: Callable[[list[T]], None], gather_s: float = GATHER_S) -> None:
        self._say = say
        self._gather_s = gather_s
        self._items: list[T] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        self._items.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._gather_s, self._flush)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._flush()

    def _flush(self) -> None:
        self._timer = None
        items, self._items = self._items, []
        self._say(items)
