"""Readings of the cluster, shared by all viewers.

No task polls. Each viewer asks for the next reading; the first one reads, and the others get the same. So there is at
most one reading at a time, never more often than `every_s`, and none while nobody watches. If the viewer that reads
leaves, its reading is cancelled and the next viewer begins one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from minibroker.protocol.errors import MinibrokerError

T = TypeVar("T")

NOT_YET = "no broker has answered yet"


@dataclass(frozen=True)
class Reading(Generic[T]):
    number: int
    value: T | None
    """The last state that could be read. None: none yet."""
    error: str | None
    """Why the cluster could not be read this time."""


class Shared(Generic[T]):
    def __init__(
        self, read: Callable[[], Awaitable[T]], every_s: float, instead: Callable[[], T | None] = lambda: None
    ) -> None:
        """`read` raises MinibrokerError or TimeoutError if the cluster cannot be read. If it never could, the value is
        what `instead` returns."""
        self._read = read
        self._instead = instead
        self._every_s = every_s
        self._last: Reading[T] = Reading(0, None, NOT_YET)
        self._read_at_s = float("-inf")
        self._lock = asyncio.Lock()

    async def after(self, seen: int) -> Reading[T]:
        """Return the next reading after number `seen`: another viewer's, or a new one in time."""
        async with self._lock:
            if self._last.number > seen:
                return self._last
            await asyncio.sleep(self._read_at_s + self._every_s - asyncio.get_running_loop().time())
            value, error = self._last.value, None
            try:
                value = await self._read()
            except TimeoutError:
                error = "no broker answered in time"
            except MinibrokerError as failure:
                error = str(failure)
            if value is None:
                value = self._instead()
            self._last = Reading(self._last.number + 1, value, error)
            self._read_at_s = asyncio.get_running_loop().time()
            return self._last

    async def soon(self, within_s: float) -> Reading[T]:
        """Return a reading that is at most `every_s` old, or the last one if that takes longer than `within_s`."""
        if asyncio.get_running_loop().time() - self._read_at_s < self._every_s:
            return self._last
        try:
            async with asyncio.timeout(within_s):
                return await self.after(self._last.number)
        except TimeoutError:
            return self._last
