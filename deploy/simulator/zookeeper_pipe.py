"""The connection between a session and the ZooKeeper in memory. See `zookeeper`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from minibroker.protocol.world import ZooKeeperError

T = TypeVar("T")


class Pipe(Generic[T]):
    """Delivers items in the order of `put`, each with its own latency. `cut` discards its contents."""

    def __init__(self, deliver: Callable[[T], None], latency_s: Callable[[], float]) -> None:
        self._deliver = deliver
        self._latency_s = latency_s
        self._items: deque[T] = deque()
        self._last_arrival = 0.0
        self.generation = 0

    def put(self, item: T) -> None:
        # Without an owner: the process that sent the item may be killed, and its clock may be wrong.
        self._items.append(item)
        Context().run(self._send)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        arrival = max(self._last_arrival, loop.time() + self._latency_s())
        self._last_arrival = arrival
        if arrival <= loop.time():
            loop.call_soon(self._arrive, self.generation)
        else:
            loop.call_at(arrival, self._arrive, self.generation)

    def _arrive(self, generation: int) -> None:
        # Timers of the same moment may fire in any order, so each delivers the oldest item.
        if generation == self.generation:
            self._deliver(self._items.popleft())

    def __len__(self) -> int:
        return len(self._items)

    def cut(self) -> list[T]:
        lost = list(self._items)
        self._items.clear()
        self.generation += 1
        self._last_arrival = 0.0
        return lost


@dataclass(eq=False)
class Request:
    carry_out: Callable[[], Any]
    future: asyncio.Future[Any]
    writes: bool


class Outcome(NamedTuple):
    """The outcome of a write. A follower sends it when it has applied the write."""

    zxid: int
    result: object
    failure: ZooKeeperError | None
