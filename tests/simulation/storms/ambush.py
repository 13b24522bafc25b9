"""Faults that wait for a moment and strike in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ambushes(Generic[T]):
    """The faults that wait for one kind of event."""

    def __init__(self) -> None:
        self._laid: list[tuple[Callable[[T], bool], asyncio.Future[T]]] = []

    async def next(self, within_s: float, is_wanted: Callable[[T], bool] = lambda _: True) -> T | None:
        """Return the next wanted event, before other tasks react to it; None if it does not come in time."""
        waiting: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ambush = (is_wanted, waiting)
        self._laid.append(ambush)
        try:
            async with asyncio.timeout(within_s):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._laid.remove(ambush)

    def strike(self, event: T) -> None:
        for is_wanted, waiting in self._laid:
            if not waiting.done() and is_wanted(event):
                waiting.set_result(event)
