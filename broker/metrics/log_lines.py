"""Log lines about many partitions: one for what happens to all of them at once.

A failover moves hundreds of partitions within milliseconds, each by itself. A line for each would bury the few lines
that a person looks for, so what comes shortly after the first is told with it. What becomes of each single partition
is logged at DEBUG, and the controller's timeline has it, too.
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
    """`orders-0, orders-1, orders-2 and 57 more`: users' partitions before the brokers' own."""
    ordered = sorted(partitions, key=lambda partition: (partition.topic in INTERNAL_TOPICS, partition))
    shown = ", ".join(str(partition) for partition in ordered[:limit])
    return shown if len(partitions) <= limit else f"{shown} and {len(partitions) - limit} more"


class Gathered(Generic[T]):
    """`say` is called with all that was added within `gather_s` of the first, and on `close`."""

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
