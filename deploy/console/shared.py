"""Readings of the cluster, shared by all viewers.

No task polls. Each viewer asks for the next reading; the first one reads, and the others get the same. So there is at
most one reading at a time, never more often than `every_s`, and none while nobody watches. If the viewer that reads
leaves or gives up waiting, its reading is cancelled and the next viewer begins one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from minibroker.protocol.errors import MinibrokerError

T = TypeVar("T")

NOT_IN_TIME = "no broker answered in time"


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
        self._last: Reading[T] = Reading(0, None, NOT_IN_TIME)
        self._read_at_s = float("-inf")
        self._lock = asyncio.Lock()
        self._is_ended = False
        self._waits: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """All viewers give up waiting, now and from now on."""
        self._is_ended = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def after(self, seen: int, within_s: float | None = None) -> Reading[T]:
        """Return the next reading after number `seen`: another viewer's, or a new one in time. If that takes longer
        than `within_s`, or the console ends, return the last value with an error."""
        try:
            async with asyncio.timeout(0 if self._is_ended else within_s) as wait:
                self._waits.add(wait)
                try:
                    return await self._next(seen)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            return replace(self._last, error=self._last.error or NOT_IN_TIME)

    async def _next(self, seen: int) -> Reading[T]:
        async with self._lock:
            if self._last.number > seen:
                return self._last
            await asyncio.sleep(self._read_at_s + self._every_s - asyncio.get_running_loop().time())
            value, error = self._last.value, None
            try:
                value = await self._read()
            except TimeoutError:
                error = NOT_IN_TIME
            except MinibrokerError as failure:
                error = str(failure)
            if value is None:
                value = self._instead()
            self._last = Reading(self._last.number + 1, value, error)
            self._read_at_s = asyncio.get_running_loop().time()
            return self._last

    async def soon(self, within_s: float) -> Reading[T]:
        """Return a reading that is at most `every_s` old, or the last value with an error, as `after` does."""
        if asyncio.get_running_loop().time() - self._read_at_s < self._every_s:
            return self._last
        return await self.after(self._last.number, within_s)
